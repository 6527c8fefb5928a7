"""The answers of SGLang servers, tested with answers of real servers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from torch import Tensor

from slime_tis.errors import quoted
from slime_tis.trainer.data.sample import FinishReason, Numbers
from slime_tis.trainer.engines.function_requests import Generation
from slime_tis.trainer.engines.servers.answers import (
    Answer,
    LogProb,
    Name,
    RankCount,
    SampledTokens,
    TokenCount,
    TokenId,
    WeightSpan,
    check_vocabulary,
    checked_generation,
    checked_log_probs,
    checksums_by_tensor,
    parse,
)
from slime_tis.trainer.engines.servers.api import GenerateRequest
from slime_tis.trainer.engines.servers.errors import InvalidAnswer

LOWEST = -1e30
"""Log-probs up to this value are a server's −∞."""


class TokenEntry(Answer, array_like=True, gc=False):
    """SGLang's [log-prob, token, text]; the first token of an input has no log-prob."""

    log_prob: LogProb | None
    token: TokenId


class _Finish(Answer):
    type: FinishReason


class OutputMeta(Answer, kw_only=True):
    """`meta_info` of POST /generate."""

    finish_reason: _Finish
    output_token_logprobs: list[TokenEntry] = msgspec.field(default_factory=list)
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    weight_versions: list[WeightSpan]
    output_token_sampling_mask: list[list[TokenId]] | None = None
    output_token_sampling_logprobs: list[LogProb] | None = None
    input_token_logprobs: list[TokenEntry] = msgspec.field(default_factory=list)
    output_top_logprobs: list[list[TokenEntry]] = msgspec.field(default_factory=list)


class GenerateAnswer(Answer):
    """The answer to POST /generate."""

    output_ids: list[TokenId]
    meta_info: OutputMeta


class ServerDescription(Answer):
    """The answer to GET /server_info. Never log it: it contains the API key.

    Its weight version is that of the start; GET /model_info has the current one.
    """

    version: Name = ""
    max_req_input_len: TokenCount | None = None
    """Every input must be shorter than this number of tokens."""
    tp_size: RankCount = 1
    pp_size: RankCount = 1
    dp_size: RankCount = 1
    sampling_mask_max_tokens: TokenCount | None = None
    """Largest reported sampling mask (--sampling-mask-max-tokens)."""
    dtype: Name | None = None
    quantization: Any = None
    enable_deterministic_inference: Any = None
    """Whether the server uses requests' seeds; only True counts."""
    enable_return_routed_experts: Any = None
    """Whether the server records experts; only True counts, and without it requests for experts are
    ignored."""
    enable_lora: Any = None
    max_lora_rank: TokenCount | None = None
    lora_target_modules: list[Name] | None = None


class _RankChecksums(Answer):
    checksums: dict[str, str]


class ControlAnswer(Answer):
    """The answer to other endpoints."""

    success: Any = None
    ranks: list[_RankChecksums] | None = None


def parse_generation(
    body: bytes,
    request: GenerateRequest,
    *,
    vocab_size: int | None = None,
    experts: Callable[[int], Tensor] | None = None,
) -> tuple[Generation, str | None]:
    """Parses the answer to a request, and says why its experts are unusable.

    `experts` is `ExpertText.experts` of the reader that cut them out of the body; None if they were
    not requested.
    """
    answer = parse(GenerateAnswer, body)
    meta = answer.meta_info
    length = len(answer.output_ids)
    if meta.completion_tokens not in (None, length):
        raise InvalidAnswer(
            f"it has {length} tokens and says that they are {quoted(meta.completion_tokens)}"
        )
    sampled = SampledTokens(
        token_ids=answer.output_ids,
        log_probs=meta.output_token_logprobs,
        finish_reason=meta.finish_reason.type,
        spans=meta.weight_versions,
        masks=meta.output_token_sampling_mask,
        mask_log_probs=meta.output_token_sampling_logprobs,
    )
    return checked_generation(sampled, request, vocab_size, experts)


def parse_scores(
    body: bytes, token_ids: Sequence[int], vocab_size: int | None = None
) -> list[float]:
    """Parses the log-probs at temperature 1 of all tokens but the first; raises InvalidAnswer."""
    entries = parse(GenerateAnswer, body).meta_info.input_token_logprobs
    for entry, token in zip(entries, token_ids, strict=False):
        # SGLang 0.5.23 names the last token of the vocabulary 0, with the right log-prob.
        if vocab_size is not None and token == vocab_size - 1 and entry.token == 0:
            entry.token = token
    return checked_log_probs(Numbers("q", token_ids[1:]), entries[1:]).tolist()


def parse_top(body: bytes, vocab_size: int | None = None) -> dict[int, float]:
    """Parses the likeliest tokens of an answer, without impossible tokens."""
    positions = parse(GenerateAnswer, body).meta_info.output_top_logprobs
    if not positions or not positions[0]:
        raise InvalidAnswer("it has no output_top_logprobs")
    token_ids = [entry.token for entry in positions[0]]
    check_vocabulary("output_top_logprobs", token_ids, vocab_size)
    log_probs = {}
    for entry in positions[0]:
        if entry.log_prob is not None and entry.log_prob > LOWEST:
            log_probs[entry.token] = min(entry.log_prob, 0.0)
    return log_probs


def parse_cached_tokens(body: bytes) -> int | None:
    """Parses how many tokens of the input came from the prefix cache; None if it is not told."""
    return parse(GenerateAnswer, body).meta_info.cached_tokens


def parse_checksums(body: bytes) -> Mapping[str, list[str]]:
    """Parses checksums by tensor name, one per rank that has the tensor; raises InvalidAnswer."""
    ranks = parse(ControlAnswer, body).ranks
    if ranks is None:
        raise InvalidAnswer("it has no ranks")
    return checksums_by_tensor(rank.checksums for rank in ranks)
