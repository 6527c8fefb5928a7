"""A function of several turns asks a real server and the local engine, and gets the same."""

import pytest

from slime_tis.trainer.data.sample import STATUS, Sampling
from slime_tis.trainer.engines.local.checkpoint import load_tokenizer
from slime_tis.trainer.engines.local.engine import LocalEngine
from tests.samples import flat
from tests.sglang_server.references import BOUND

OBSERVATION = [11, 12, 13]
DIGITS = [str(digit) for digit in range(10)]


async def three_turns(sample, engine):
    """Answers that end at a digit, an end of sequence or after 24 tokens, with observations between them."""
    for turn in range(3):
        answer = await engine.generate(sample.tokens, {"stop": DIGITS, "max_new_tokens": 24})
        sample.append_response_tokens(tokens=answer.token_ids, log_probs=answer.log_probs, text=answer.text)
        sample.status = STATUS[answer.finish_reason]
        if turn < 2:
            sample.append_response_tokens(tokens=OBSERVATION, trainable=False)
    return [sample]


def test_turns_are_those_of_the_local_engine(real, checkpoint):
    prompts, greedy = real.prompts, Sampling(temperature=0.0, max_response_len=24)
    tokenizer = load_tokenizer(checkpoint)
    asked = real.make_engine(real.server).submit(prompts, greedy, 0, function=three_turns, concurrency=8).result()
    own = LocalEngine(checkpoint, tokenizer).submit(prompts, greedy, 0, function=three_turns, concurrency=8).result()
    assert {sum(sample.loss_mask) < 72 for sample in flat(own)} == {True, False}  # some turns stop, others do not
    for one, other in zip(flat(asked), flat(own), strict=True):
        assert (one.tokens, one.loss_mask, one.status) == (other.tokens, other.loss_mask, other.status)
        assert one.response == other.response
        assert one.rollout_log_probs == pytest.approx(other.rollout_log_probs, abs=BOUND)
