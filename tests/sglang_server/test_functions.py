"""A function of several turns asks a real server and the local engine, and gets the same."""

from pathlib import Path

import pytest
import torch

from slime_tis.trainer.data.sample import STATUS, Prompt, Sample, Sampling
from slime_tis.trainer.engines.generation import TokenEngine
from slime_tis.trainer.engines.local.checkpoint import load_tokenizer
from slime_tis.trainer.engines.local.engine import LocalEngine
from tests.checkpoints import EOS
from tests.sglang_server.conftest import MakeEngine
from tests.sglang_server.references import Reference
from tests.sglang_server.servers import RealServer

OBSERVATION = [11, 12, 13]
DIGITS = [str(digit) for digit in range(10)]
BOUND = 1e-4


async def three_turns(sample: Sample, engine: TokenEngine) -> list[Sample]:
    """Answers that end at a digit, an end of sequence or after 24 tokens, with observations between them."""
    for turn in range(3):
        answer = await engine.generate(sample.tokens, {"stop": DIGITS, "max_new_tokens": 24})
        sample.append_response_tokens(tokens=answer.token_ids, log_probs=answer.log_probs, text=answer.text)
        sample.status = STATUS[answer.finish_reason]
        if turn < 2:
            sample.append_response_tokens(tokens=OBSERVATION, trainable=False)
    return [sample]


def flat(groups: list[list[Sample]]) -> list[Sample]:
    return [sample for group in groups for sample in group]


def test_turns_are_those_of_the_local_engine(
    server: RealServer, make_engine: MakeEngine, prompts: list[Prompt], checkpoint: Path
) -> None:
    greedy = Sampling(temperature=0.0, max_response_len=24)
    tokenizer = load_tokenizer(checkpoint)
    asked = make_engine(server).submit_function(prompts, three_turns, greedy, seed=0, concurrency=8).result()
    own = LocalEngine(checkpoint, tokenizer).submit_function(prompts, three_turns, greedy, 0, concurrency=8).result()
    assert {sum(sample.loss_mask) < 72 for sample in flat(own)} == {True, False}  # some turns stop, others do not
    for one, other in zip(flat(asked), flat(own), strict=True):
        assert (one.tokens, one.loss_mask, one.status) == (other.tokens, other.loss_mask, other.status)
        assert one.response == other.response
        assert one.rollout_log_probs == pytest.approx(other.rollout_log_probs, abs=BOUND)


def test_sampled_turns_have_the_log_probs_of_one_forward_pass(
    two_servers: list[RealServer],
    make_engine: MakeEngine,
    prompts: list[Prompt],
    reference: Reference,
    checkpoint: Path,
) -> None:
    engine = make_engine(*two_servers)
    sampling = Sampling(max_response_len=24, n_samples=3)
    samples = flat(engine.submit_function(prompts, three_turns, sampling, seed=0, concurrency=20).result())
    assert len(samples) == 24 and len({tuple(sample.tokens) for sample in samples}) == 24
    ends = {EOS, *load_tokenizer(checkpoint).convert_tokens_to_ids(DIGITS)}
    for sample in samples:
        log_probs = reference.log_probs(sample.tokens)[-sample.response_length :]
        trained = torch.tensor(sample.loss_mask) > 0
        gap = (torch.tensor(sample.rollout_log_probs) - torch.as_tensor(log_probs)).abs()
        assert gap[trained].max() < BOUND
        turns = "".join("x" if m else " " for m in sample.loss_mask).split()
        assert len(turns) == 3 and max(map(len, turns)) <= 24
        where = [place for place, m in enumerate(sample.loss_mask) if m]
        last = {place for place in where if place + 1 not in where}
        assert all((sample.response_ids[place] in ends) <= (place in last) for place in where)
        assert all(
            sample.response_ids[p] in ends or len(turn) == 24 for p, turn in zip(sorted(last), turns, strict=True)
        )
