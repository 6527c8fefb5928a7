"""Bodies of requests to SGLang servers, and the maximum size of the answers."""

from collections.abc import Sequence

from slime_tis.trainer.data.sample import Sampling
from slime_tis.trainer.engines.sglang.schema import ExpertRequest

BYTES_PER_TOKEN = 256
"""Maximum average bytes of an answer per token: id, log-prob, a span of weight versions and text; real answers have 50
to 80."""
BYTES_PER_TOKEN_ID = 10
"""Maximum bytes of a token id in an answer, including its separator."""
ANSWER_BYTES = 256 << 10
"""Maximum bytes of an answer in addition to its tokens."""
NEUTRAL_SAMPLING_PARAMS = {"min_p": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
"""Sent with each request: defaults of the server or checkpoint must not change the distribution."""


def generate_body(
    input_ids: Sequence[int],
    sampling: Sampling,
    *,
    max_new_tokens: int,
    request_id: str,
    seed: int | None = None,
    experts: ExpertRequest | None = None,
    stop: Sequence[str] = (),
) -> dict[str, object]:
    """The body of POST /generate for one sample.

    Args:
        input_ids: Tokens of the prompt and of the partial response.
        sampling: How to sample.
        max_new_tokens: Maximum tokens to sample.
        request_id: Id for aborts. The server aborts all ids with this prefix, so all ids must have equal width.
        seed: Seed of the response, for servers that use it.
        experts: Routed experts to return; None for none.
        stop: Texts that end the response.
    """
    params: dict[str, object] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": max_new_tokens,
        **NEUTRAL_SAMPLING_PARAMS,
    }
    if sampling.stop_token_ids:
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    if stop:
        params |= {"stop": list(stop), "no_stop_trim": True}
    if seed is not None:
        params["sampling_seed"] = seed
    body: dict[str, object] = {
        "rid": request_id,
        "input_ids": list(input_ids),
        "sampling_params": params,
        "return_logprob": True,
    }
    if experts is not None:
        body |= {"return_routed_experts": True, "routed_experts_start_len": experts.first}
    if sampling.return_sampling_mask:
        body |= {"return_sampling_mask": True, "sampling_logprobs_mode": "selected"}
    return body


def score_body(token_ids: Sequence[int]) -> dict[str, object]:
    """The body of POST /generate that returns the log-probs of given tokens and samples nothing."""
    return {
        "input_ids": list(token_ids),
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 0, **NEUTRAL_SAMPLING_PARAMS},
        "return_logprob": True,
        "logprob_start_len": 0,
    }


def max_answer_bytes(num_tokens: int, set_tokens: int = 0) -> int:
    """Maximum bytes of an answer to POST /generate.

    `ANSWER_BYTES` + (`BYTES_PER_TOKEN` + `BYTES_PER_TOKEN_ID` · set tokens) · tokens. Decoding this JSON blocks the
    loop for less than half a second at 32,768 tokens without masks.

    Args:
        num_tokens: Tokens to sample or to score.
        set_tokens: Maximum tokens of a sampling mask; 0 if masks are not requested.
    """
    return ANSWER_BYTES + (BYTES_PER_TOKEN + BYTES_PER_TOKEN_ID * set_tokens) * num_tokens
