"""Routed experts of servers: asked for, checked, put together over several requests, or omitted."""

import base64
import json
import logging
import re
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_tis.hf_directory import MoeSizes
from slime_tis.trainer.data.sample import Sample, Sampling
from slime_tis.trainer.engines.function_requests import Generation, RequestOptions
from slime_tis.trainer.engines.local.routing import has_usable_experts
from slime_tis.trainer.engines.servers import responses as sampling_module
from slime_tis.trainer.engines.servers.api import (
    ExpertLayout,
    GenerateRequest,
    max_answer_bytes,
)
from slime_tis.trainer.engines.servers.responses import PendingSample
from slime_tis.trainer.engines.sglang import expert_text
from slime_tis.trainer.engines.sglang.expert_text import ExpertText
from slime_tis.trainer.engines.sglang.sglang_answers import parse_generation
from tests.checkpoints import make_checkpoint, make_tokenizer
from tests.rollout.sglang.fake_sglang import (
    EXPERTS,
    LAYERS,
    chosen_experts,
    continuation,
    spoiled,
    wait_until,
)
from tests.rollout.sglang.rollouts import EARLY, LATE, PROMPTS, Run, assert_exact, held
from tests.samples import flat, reloaded

SIZES = MoeSizes(
    layers=tuple(range(LAYERS)),
    num_experts=EXPERTS,
    top_k=2,
    intermediate_size=24,
    shared_intermediate_size=None,
)
SAMPLING = Sampling(max_response_len=20, n_samples=3, return_routed_experts=True)
LONG = Sampling(max_response_len=30, n_samples=2, return_routed_experts=True)
SHORT = next(prompt for prompt in EARLY if len(continuation(list(prompt.token_ids), 9)) >= 4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_moe", num_hidden_layers=LAYERS)


@pytest.fixture
def start(start: Callable[..., Run]) -> Callable[..., Run]:
    return partial(start, sampling=SAMPLING)


def assert_experts(sample: Sample) -> None:
    """Each row has the experts that the weights of the next token choose.

    Rows of the prompt have the choice of the weights that sampled the first token.
    """
    first = len(sample.row.token_ids)
    expected = []
    for position, token in enumerate(sample.tokens[:-1]):
        version = sample.weight_versions[max(position + 1 - first, 0)]
        expected.append(chosen_experts(token, version))
    assert sample.rollout_routed_experts is not None
    assert sample.rollout_routed_experts.dtype == torch.uint8
    assert sample.rollout_routed_experts.tolist() == expected
    assert has_usable_experts(sample, SIZES)


def test_samples_have_the_experts_of_all_input_tokens(start):
    run = start(2)
    groups = run.engine.generate(PROMPTS, SAMPLING, seed=0)
    assert_exact(groups, PROMPTS)
    for sample in flat(groups):
        assert_experts(sample)
    assert all(body["return_routed_experts"] for body in run.requests)
    assert {body["routed_experts_start_len"] for body in run.requests} == {0}


def test_an_evaluation_requests_no_experts(start):
    run = start(1)
    groups = run.engine.generate(PROMPTS[:2], Sampling(max_response_len=20), seed=0)
    assert all(sample.rollout_routed_experts is None for sample in flat(groups))
    assert not any("return_routed_experts" in body for body in run.requests)


def test_servers_that_do_not_return_experts_are_refused(start):
    flags = "--use-rollout-routing-replay or --measure-routing-mismatch"
    with pytest.raises(ValueError, match=f"^{flags} is on"):
        start(2, lambda servers: servers[1].info.update(enable_return_routed_experts=False))


def test_updates_leave_the_experts_of_earlier_tokens(start):
    run = start(2)
    with held(run, 5):
        pending = run.engine.submit(LATE[:3], LONG, seed=0)
        wait_until(lambda: run.num_held == 6)
        run.update(1)
        for server in run.servers:
            server.stop_after = 9
        wait_until(lambda: run.num_held == 6)
        run.update(2)
    groups = pending.result()
    assert_exact(groups, LATE[:3], LONG)
    for sample in flat(groups):
        assert sample.weight_versions == [0] * 5 + [1] * 9 + [2] * 16
        assert_experts(sample)
    # the last token of an input was not fed before, so its experts are requested again
    starts = {(len(body["input_ids"]), body["routed_experts_start_len"]) for body in run.requests}
    assert starts == {(3, 0), (8, 7), (17, 16)}


def stragglers(run: Run) -> list[list[Sample]]:
    """Two groups that have 2 to 8 tokens when a third one is complete."""
    with held(run, 2):
        pending = run.engine.submit([LATE[0], SHORT, LATE[1]], LONG, seed=0, num_groups=1)
        wait_until(lambda: run.num_held == 6)
        run.servers[0].stop_after = 8
        assert_exact(pending.result(), [SHORT], LONG)
    return run.engine.unfinished()


def test_stragglers_have_the_experts_of_their_tokens(start):
    for sample in flat(stragglers(start(1))):
        assert sample.status is Sample.Status.ABORTED
        assert_experts(sample)


def test_stragglers_of_a_checkpoint_keep_their_experts(start):
    run = start(1)
    unfinished = stragglers(run)
    lengths = [len(sample.response_ids) for sample in flat(unfinished)]
    stored = reloaded(unfinished)
    run.update(1)
    run.engine.resume_unfinished(stored)
    groups = run.engine.submit([], LONG, seed=1, num_groups=2).result()
    assert_exact(groups, [LATE[0], LATE[1]], LONG)
    for sample, length in zip(flat(groups), lengths, strict=True):
        assert sample.weight_versions == [0] * length + [1] * (30 - length)
        assert_experts(sample)


def test_stragglers_without_all_experts_get_none(start, caplog):
    run = start(1)
    (without, incomplete), second = stragglers(run)
    without.rollout_routed_experts = None
    incomplete.rollout_routed_experts = incomplete.rollout_routed_experts[:-1]
    run.engine.resume_unfinished([[without, incomplete], second])
    groups = run.engine.submit([], LONG, seed=1, num_groups=2).result()
    assert_exact(groups, [LATE[0], LATE[1]], LONG)
    is_missing = [sample.rollout_routed_experts is None for sample in flat(groups)]
    assert is_missing == [True, True, False, False]
    assert sum("return_routed_experts" not in body for body in run.requests) == 2
    assert not caplog.records


def test_a_request_that_an_update_did_not_end_has_none(start, monkeypatch, caplog):
    monkeypatch.setattr(sampling_module, "ABORT_TIMEOUT", 0.05)
    run = start(1)
    run.servers[0].deaf = True
    with held(run, 5):
        pending = run.engine.submit(LATE[:1], LONG, seed=0)
        wait_until(lambda: run.num_held == 2)
        run.update(1)
    for sample in flat(pending.result()):
        assert sample.weight_versions == [0] * 5 + [1] * 25
        assert sample.rollout_routed_experts is None
    assert "updated in the middle" in caplog.text


def with_text(change: Callable[[str], str]) -> Any:
    """A fault that changes the encoded experts of an answer."""

    def edit(answer: dict[str, Any]) -> None:
        answer["meta_info"]["routed_experts"] = change(answer["meta_info"]["routed_experts"])

    return spoiled(edit)


def with_rows(change: Callable[[Any], Any]) -> Any:
    """A fault that changes the rows of an answer, in place if `change` returns None."""

    def text(encoded: str) -> str:
        rows = np.frombuffer(base64.b64decode(encoded), "<i4").reshape(-1, LAYERS, 2).copy()
        changed = change(rows)
        if changed is None:
            changed = rows
        return base64.b64encode(changed.tobytes()).decode()

    return with_text(text)


HOSTILE = {
    "absent": (
        spoiled(lambda answer: answer["meta_info"].pop("routed_experts")),
        "it has no routed_experts",
    ),
    "a row too few": (with_rows(lambda rows: rows[1:]), r"has \d+ characters, not \d+"),
    "not base64": (with_text(lambda text: "!" + text[1:]), "is not base64 of whole rows"),
    "an expert too many": (
        with_rows(lambda rows: rows[0, 1].fill(EXPERTS)),
        "to 8, but there are 8",
    ),
    "the same expert twice": (
        with_rows(lambda rows: rows[1].fill(3)),
        "the same expert twice for a token",
    ),
    "a layer of zeros": (with_rows(lambda rows: rows[:, 1].fill(0)), "is all zeros in layer 1"),
}


@pytest.mark.parametrize("fault", [fault for fault, _ in HOSTILE.values()], ids=list(HOSTILE))
def test_only_samples_with_impossible_experts_have_none(fault, start):
    run = start(1)
    run.servers[0].faults.extend([fault, fault])
    groups = run.engine.generate(LATE[:2], SAMPLING, seed=0)
    assert_exact(groups, LATE[:2])
    recorded = [sample for sample in flat(groups) if sample.rollout_routed_experts is not None]
    assert len(recorded) == 4  # of six
    for sample in recorded:
        assert_experts(sample)
    assert run.engine.metrics()["rollout/sglang_malformed_responses"] == 0


@pytest.mark.parametrize(("fault", "problem"), HOSTILE.values(), ids=list(HOSTILE))
def test_the_first_impossible_experts_are_reported(fault, problem, start, caplog):
    run = start(1)
    run.servers[0].faults.extend([fault, fault])
    with caplog.at_level(logging.WARNING):
        run.engine.generate(LATE[:2], SAMPLING, seed=0)
    (record,) = caplog.records
    assert "no experts that can be replayed" in record.getMessage()
    assert re.search(problem, record.getMessage())


def layout(num_hidden_layers: int = 2, **fields: Any) -> ExpertLayout:
    sizes: dict[str, Any] = {
        "layers": (0, 1),
        "num_experts": 8,
        "top_k": 2,
        "intermediate_size": 4,
        "shared_intermediate_size": None,
        **fields,
    }
    return ExpertLayout(num_hidden_layers=num_hidden_layers, moe=MoeSizes(**sizes))


ONE_EXPERT = layout(num_hidden_layers=1, layers=(0,), top_k=1)


def test_bytes_of_the_experts_of_qwen3_30b():
    # 48 layers of 8 experts of 4 bytes are 1,536 bytes, in base64 2,048.
    qwen3_30b = layout(num_hidden_layers=48, layers=tuple(range(48)), num_experts=128, top_k=8)
    assert qwen3_30b.num_bytes(1) == 2048
    assert qwen3_30b.num_bytes(1000) == 2_048_000


def test_bytes_of_one_expert_are_padded():
    assert ONE_EXPERT.num_bytes(1) == 8


def test_an_answer_of_1000_tokens_may_have_half_a_megabyte():
    assert max_answer_bytes(1000) == 262_144 + 256_000


def test_one_expert_per_token_is_decoded():
    encoded = base64.b64encode(bytes(8)).decode()
    _, text = read({"routed_experts": encoded}, ONE_EXPERT)
    assert text.experts(2).tolist() == [[[0]], [[0]]]


def read(
    answer: dict[str, Any],
    layout: ExpertLayout,
    cuts: Iterable[int] = (),
    separators: tuple[str, str] = (",", ":"),
) -> tuple[dict[str, Any], ExpertText]:
    """An answer that arrives in parts, without its experts, and the reader of its experts."""
    body = json.dumps(answer, separators=separators).encode()
    text = ExpertText(layout)
    positions = [0, *sorted(cut % len(body) for cut in cuts), len(body)]
    kept = b"".join(text.cut(body[start:end]) for start, end in pairwise(positions)) + text.end()
    return json.loads(kept), text


@given(
    st.integers(1, 5),
    st.sampled_from([((0, 1, 2), 3), ((1, 2), 3), ((1,), 2), ((0, 2), 4)]),
    st.sampled_from([(4, 2), (8, 3), (256, 8), (257, 2), (512, 1)]),
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(0, 2**16), max_size=5),
)
def test_what_was_encoded_is_decoded_without_dense_layers(rows, layers, sizes, seed, cuts):
    (sparse, num_layers), (num_experts, top_k) = layers, sizes
    chance = np.random.default_rng(seed)
    experts = np.argsort(chance.random((rows, num_layers, num_experts)), -1)[..., :top_k].astype(
        "<i4"
    )
    dense = [layer for layer in range(num_layers) if layer not in sparse]
    experts[:, dense] = 0
    shape = layout(
        num_hidden_layers=num_layers, layers=sparse, num_experts=num_experts, top_k=top_k
    )
    answer = {
        "text": 'say \\"routed_experts":"',
        'a name with "routed_experts': "AAAA",
        "routed_experts": base64.b64encode(experts.tobytes()).decode(),
        "more": 1,
    }
    with mock.patch.object(expert_text, "BLOCK_CHARACTERS", 64):  # several blocks
        rest, text = read(answer, shape, cuts)
    assert rest == answer | {"routed_experts": ""}
    found = text.experts(rows)
    assert found.dtype == (torch.uint8 if num_experts <= 256 else torch.int16)
    assert np.array_equal(found.numpy(), experts[:, list(sparse)])


# Texts that look like the field, in front of it and behind.
MISLEADING = {
    "text": '"routed_experts": "BBBB"',
    'a "routed_experts': "CC",
    "output_ids": [4, 5],
    "meta_info": {
        "finish_reason": {"type": "length"},
        "output_token_logprobs": [[-1.0, 4, '"routed_experts":"AAAA"'], [-1.0, 5, None]],
        "weight_versions": [{"version": "0", "start": 0, "end": 2}],
        "routed_experts": base64.b64encode(
            np.array([[[0, 1], [2, 3]]] * 2, dtype="<i4").tobytes()
        ).decode(),
    },
}
SEPARATORS = {"compact": (",", ":"), "spaces": (", ", ": "), "more spaces": (" , ", " : ")}


@pytest.mark.parametrize("separators", SEPARATORS.values(), ids=SEPARATORS)
def test_a_text_like_the_field_is_not_read_as_experts(separators):
    """At every cut of the answer into two parts, in one part, and byte by byte."""
    size = len(json.dumps(MISLEADING, separators=separators))
    for cuts in ([], range(size), *([cut] for cut in range(size))):
        rest, text = read(MISLEADING, layout(), cuts, separators)
        assert rest["meta_info"]["routed_experts"] == "", cuts
        assert text.experts(2).tolist() == [[[0, 1], [2, 3]]] * 2, cuts


def test_an_answer_with_misleading_texts_is_parsed():
    request = GenerateRequest(
        input_ids=[1],
        sampling=Sampling(max_response_len=2),
        max_new_tokens=2,
        request_id="",
        first_experts=0,
    )
    rest, text = read(MISLEADING, layout())
    generation, problem = parse_generation(json.dumps(rest).encode(), request, experts=text.experts)
    assert problem is None
    assert generation.routed_experts is not None
    assert generation.routed_experts.tolist() == [[[0, 1], [2, 3]]] * 2


def completion(experts: list[list[int]], finish_reason: Literal["abort", "stop"]) -> Generation:
    """One sampled token, with one expert in each of two layers for each input token."""
    return Generation(
        token_ids=[5],
        log_probs=[-1.0],
        weight_versions=[0],
        text="",
        finish_reason=finish_reason,
        routed_experts=torch.tensor(experts, dtype=torch.uint8)[..., None],
    )


def two_completions(last: list[int]) -> PendingSample:
    """Zeros for the prompt, and the experts of a later request."""
    pending = PendingSample(prompt_ids=list(SHORT.token_ids), max_new_tokens=8)
    pending.append(completion([[0, 0]] * len(SHORT.token_ids), "abort"))
    assert pending.unrecorded_layer is None  # the rows to come may be others
    pending.append(completion([last], "stop"))
    return pending


@pytest.mark.parametrize(
    ("last", "layer"), [([0, 0], 0), ([0, 3], 0), ([6, 0], 1)], ids=["both", "first", "second"]
)
def test_a_layer_that_is_0_in_all_requests_is_unrecorded(last, layer):
    pending = two_completions(last)
    assert pending.unrecorded_layer == layer
    generation = pending.generation(make_tokenizer(), RequestOptions(sampling=LONG))
    assert generation.routed_experts is None


def test_a_layer_that_is_not_0_in_a_later_request_is_recorded():
    pending = two_completions([6, 3])
    assert pending.unrecorded_layer is None
    generation = pending.generation(make_tokenizer(), RequestOptions(sampling=LONG))
    assert generation.routed_experts[-1, :, 0].tolist() == [6, 3]
