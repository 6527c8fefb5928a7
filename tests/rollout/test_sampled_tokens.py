"""Which tokens of a sample are those that an engine sampled."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_tis.trainer.agents.sampled_tokens import Sampled, copy_engine_records, provenance
from slime_tis.trainer.data.sample import Sample
from slime_tis.trainer.engines.function_requests import Generation

Request = tuple[list[int], list[int]]
"""Input and sampled tokens."""


def requests(*pairs: Request) -> list[Sampled]:
    """Answered requests, each by another server."""
    answered = []
    for number, (input_ids, sampled) in enumerate(pairs):
        generation = Generation(
            token_ids=sampled,
            finish_reason="stop",
            text="",
            log_probs=[-1.0] * len(sampled),
            weight_versions=[1] * len(sampled),
            workers=[number] * len(sampled),
        )
        answered.append(Sampled(input_ids=input_ids, generation=generation))
    return answered


def with_experts(request: Sampled, rows: list[int]) -> Sampled:
    """The request with one expert per input token, of one layer."""
    experts = torch.tensor(rows)[:, None, None]
    return replace(request, generation=replace(request.generation, routed_experts=experts))


CASES = {
    "another end": ([1, 2, 3, 4], 2, [([1, 2], [3, 9])], [0, -1]),
    "another input": ([1, 2, 3, 4], 2, [([1, 9], [3, 4])], [-1, -1]),
    "two turns": ([1, 2, 3, 8, 4], 3, [([1, 2], [3]), ([1, 2, 3, 8], [4])], [0, -1, 1]),
    "another observation": ([1, 2, 3, 8, 4], 3, [([1, 2], [3]), ([1, 2, 3, 7], [4])], [0, -1, -1]),
    "asked twice": ([1, 2, 3, 4], 2, [([1, 2], [3, 5]), ([1, 2], [3, 4])], [1, 1]),
    "longer than": ([1, 2, 3], 1, [([1], [2, 3])], [0]),
}


@pytest.mark.parametrize(("tokens", "length", "pairs", "expected"), CASES.values(), ids=CASES)
def test_the_request_that_sampled_each_token(tokens, length, pairs, expected):
    assert provenance(tokens, length, requests(*pairs)).request == expected


def conversation(turns: list[list[int]]) -> tuple[list[int], list[Request], list[bool]]:
    """Tokens, requests, and whether each response token was sampled; observations are from 8 on."""
    tokens = [7]
    pairs = []
    sampled = []
    for number, turn in enumerate(turns):
        pairs.append((list(tokens), turn))
        tokens += [*turn, 8 + number]
        sampled += [True] * len(turn) + [False]
    return tokens, pairs, sampled


TURNS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=5)


@given(TURNS)
def test_every_sampled_token_is_found(turns):
    tokens, pairs, sampled = conversation(turns)
    requests_of_tokens = provenance(tokens, len(sampled), requests(*pairs)).request
    assert [number >= 0 for number in requests_of_tokens] == sampled


@given(TURNS, st.integers(0, 100))
def test_no_token_after_a_change_is_found(turns, place):
    tokens, pairs, sampled = conversation(turns)
    place %= len(sampled)
    before = provenance(tokens, len(sampled), requests(*pairs)).request
    tokens[1 + place] += 100
    after = provenance(tokens, len(sampled), requests(*pairs)).request
    assert after[:place] == before[:place]
    assert set(after[place:]) == {-1}


def sample_of_two_turns() -> Sample:
    """Token 3, the observation 8, and token 4."""
    return Sample(tokens=[1, 2, 3, 8, 4], response_length=3, rollout_log_probs=[-1.0, 0.0, -1.0])


@pytest.mark.parametrize(
    ("earlier", "expected"),
    [(None, [20, 21, 22, 23]), ([10], [20, 21, 22, 23]), ([10, 11], [20, 11, 22, 23])],
    ids=["not recorded", "cut short", "complete"],
)
def test_experts_are_those_of_the_request_that_sampled(earlier, expected):
    sample = sample_of_two_turns()
    first, second = requests(([1, 2], [3]), ([1, 2, 3, 8], [4]))
    if earlier is not None:
        first = with_experts(first, earlier)
    answered = [first, with_experts(second, [20, 21, 22, 23])]
    copy_engine_records(sample, provenance(sample.tokens, 3, answered), answered)
    assert sample.rollout_routed_experts is not None
    assert sample.rollout_routed_experts.flatten().tolist() == expected


def test_the_server_of_a_token_is_unknown_at_first():
    assert sample_of_two_turns().worker_of_each == [-1, -1, -1]


def test_tokens_keep_their_server():
    sample = sample_of_two_turns()
    answered = requests(([1, 2], [3]), ([1, 2, 3, 8], [4]))
    copy_engine_records(sample, provenance(sample.tokens, 3, answered), answered)
    # an observation has the server of the token before it
    assert sample.worker_of_each == [0, 0, 1]
