"""The agent: calls a calculator in turns until it answers, and the reward for its answer.

    --custom-generate-function-path examples/tool_agent/agent.py:generate
    --custom-rm-path examples/tool_agent/agent.py:correct

The policy writes `?47+38=`, where the `=` stops it; the calculator's result is appended as an
observation, which is not trained on, and the policy continues from exactly these tokens.
"""

from functools import cache
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from examples.reasoning_gym.reward import RIGHT, entry_score
from examples.tool_agent.calculator import calculate

CALL, END_OF_CALL, ANSWER, END_OF_OBSERVATION = "?", "=", "!", ";"
MAX_CALLS = 6
"""Calls that are carried out; an episode that asks for another ends there. A question needs three
at most."""


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], engine: Any) -> Any:
    """One episode.

    Args:
        args: The program's options.
        sample: With the tokens of the prompt, or, of an episode that was stopped, with those so
            far.
        sampling_params: How responses are sampled.
        engine: Answers requests for this sample.

    Returns:
        The sample, with the policy's tokens and the calculator's.
    """
    tokenizer = load_tokenizer(args.hf_checkpoint)
    calls = sample.metadata.get("calls", 0) if sample.response_length else 0
    while True:
        left = args.rollout_max_response_len - sample.response_length
        if left < 1:
            sample.status = sample.Status.TRUNCATED
            break
        found = await engine.generate(
            sample.tokens,
            {**sampling_params, "max_new_tokens": left, "stop": [END_OF_CALL]},
            session_id="episode",
        )
        sample.append_response_tokens(
            args, tokens=found.token_ids, log_probs=found.log_probs, text=found.text
        )
        if (
            found.finish_reason != "stop"
            or not found.text.endswith(END_OF_CALL)
            or calls == MAX_CALLS
        ):
            break
        _, _, call = sample.response.removesuffix(END_OF_CALL).rpartition(CALL)
        observation = calculate(call) + END_OF_OBSERVATION
        ids = tokenizer.encode(observation, add_special_tokens=False)
        sample.append_response_tokens(args, tokens=ids, trainable=False, text=observation)
        calls += 1
    sample.metadata["calls"] = calls
    return sample


def correct(args: Any, sample: Any, **kwargs: Any) -> float:
    """1 where reasoning-gym gives the answer its full score, else 0."""
    _, _, answer = sample.response.rpartition(ANSWER)
    return float(entry_score(sample.metadata, answer.removesuffix("<eos>")) >= RIGHT)


@cache
def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The policy's tokenizer."""
    return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
