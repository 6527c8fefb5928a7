"""Answers of vLLM servers, tested with recorded ones; see `servers.answers` for shared checks."""

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from slime_tis.errors import quoted
from slime_tis.trainer.data.sample import FinishReason
from slime_tis.trainer.engines.function_requests import Generation
from slime_tis.trainer.engines.local.routing import expert_dtype
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
    has_duplicates,
    parse,
)
from slime_tis.trainer.engines.servers.api import ExpertLayout, GenerateRequest, ServedModel
from slime_tis.trainer.engines.servers.errors import InvalidAnswer, ReportedFailure

SENTINEL = -9999.0
"""vLLM's smallest log-prob, which stands for −∞: the token is masked."""


NAMES = {"token": "token_id", "log_prob": "logprob"}
"""vLLM's names of fields that have other names here."""


class ScoredToken(Answer, rename=NAMES, gc=False):
    """A token and its log-prob; null if that is not a number."""

    token: TokenId
    log_prob: LogProb | None


class SampledToken(ScoredToken, rename=NAMES):
    """A sampled token, and the likeliest tokens at its position."""

    top_logprobs: tuple[ScoredToken, ...] = ()


class _LogProbs(Answer):
    content: list[SampledToken] | None = None


class _PromptLogProb(Answer, rename=NAMES):
    log_prob: LogProb | None


class Choice(Answer):
    """One sampled response."""

    finish_reason: FinishReason
    token_ids: list[TokenId]
    logprobs: _LogProbs | None = None
    weight_versions: list[WeightSpan] | None = None
    routed_experts: str | None = None
    """Base64 of a file of NumPy, integers [tokens, layers, k]."""
    sampling_mask: list[list[TokenId]] | None = None

    @property
    def log_probs(self) -> list[SampledToken]:
        """One entry per token."""
        if self.logprobs is None or self.logprobs.content is None:
            raise InvalidAnswer("it has no log-probs")
        return self.logprobs.content


class _CachedTokens(Answer):
    cached_tokens: int | None = None


class _Usage(Answer):
    prompt_tokens_details: _CachedTokens | None = None


class GenerateAnswer(Answer):
    """The answer to POST /inference/v1/generate."""

    choices: list[Choice]
    prompt_logprobs: list[dict[str, _PromptLogProb] | None] | None = None
    usage: _Usage | None = None

    @property
    def choice(self) -> Choice:
        """The only response: each request asks for one."""
        if len(self.choices) != 1:
            raise InvalidAnswer(f"it has {len(self.choices)} choices, but 1 was asked for")
        return self.choices[0]


class PauseState(Answer):
    """The answer to GET /is_paused."""

    is_paused: bool


class VersionAnswer(Answer):
    """The answer to GET /version."""

    version: Name = ""


class _ModelConfig(Answer):
    max_model_len: TokenCount | None = None
    """Longest prompt and response together, in tokens."""
    dtype: Name | None = None
    quantization: Any = None
    logprobs_mode: Name | None = None
    enable_return_routed_experts: Any = None
    return_sampling_mask: Any = None


class _SchedulerConfig(Answer):
    enable_chunked_prefill: Any = None


class _DeviceConfig(Answer):
    device: Any = None


class _LoraConfig(Answer):
    max_lora_rank: TokenCount


class VllmConfig(Answer):
    """The configuration of a server, of which it reports much more."""

    model_config: _ModelConfig
    lora_config: _LoraConfig | None = None
    """None if the server takes no LoRA adapters."""
    scheduler_config: _SchedulerConfig = msgspec.field(default_factory=_SchedulerConfig)
    device_config: _DeviceConfig = msgspec.field(default_factory=_DeviceConfig)

    @property
    def takes_seeds(self) -> bool:
        """Whether requests may have seeds.

        On a CPU, vLLM 0.32 ends when it splits the prefill of a request that has a seed.
        """
        on_cpu = self.device_config.device == "cpu"
        return not (on_cpu and self.scheduler_config.enable_chunked_prefill is not False)


class ServerDescription(Answer):
    """The answer to GET /server_info. Never log it: it contains the token of Hugging Face."""

    vllm_config: VllmConfig


class _WorldSize(Answer):
    world_size: RankCount


class _Results(Answer):
    results: list[Any]


class _RankChecksums(Answer):
    results: list[dict[str, str]]


class _CacheReset(Answer):
    success: bool


def parse_generation(
    body: bytes, request: GenerateRequest, model: ServedModel
) -> tuple[Generation, str | None]:
    """Parses the answer to a request, and says why its experts are unusable."""
    choice = parse(GenerateAnswer, body).choice
    entries = choice.log_probs
    for position, entry in enumerate(entries):
        if entry.log_prob is not None and entry.log_prob <= SENTINEL:
            raise InvalidAnswer(
                f"log-prob {position} is {entry.log_prob:g}, by which vLLM means a masked token"
            )
    sampled = SampledTokens(
        token_ids=choice.token_ids,
        log_probs=entries,
        finish_reason=choice.finish_reason,
        spans=choice.weight_versions or [],
        masks=choice.sampling_mask,
    )
    if choice.sampling_mask is not None:
        # Processed log-probs are already normalized over the mask; `checked_generation` refuses
        # null.
        sampled.mask_log_probs = [entry.log_prob or 0.0 for entry in entries]
    experts: Callable[[int], Tensor] | None = None
    if model.experts is not None:
        experts = partial(routed_experts, choice.routed_experts, model.experts)
    return checked_generation(sampled, request, model.vocab_size, experts)


def routed_experts(text: str | None, layout: ExpertLayout, num_rows: int) -> Tensor:
    """Returns the experts [`num_rows`, sparse layers, k].

    Written from vLLM's source: its CPU build returns none.

    Raises:
        InvalidAnswer: The text is missing, or cannot be the experts of `num_rows` tokens.
    """
    if text is None:
        raise InvalidAnswer("it has no routed_experts")
    try:
        file = io.BytesIO(base64.b64decode(text, validate=True))
        experts = np.load(file, allow_pickle=False)
    except (ValueError, EOFError):
        raise InvalidAnswer("routed_experts is not base64 of an array") from None
    moe = layout.moe
    is_integer = isinstance(experts, np.ndarray) and experts.dtype.kind in "iu"
    if not is_integer or experts.shape != (num_rows, layout.num_hidden_layers, moe.top_k):
        shape = quoted(getattr(experts, "shape", None))
        raise InvalidAnswer(
            f"routed_experts has the shape {shape}, not {num_rows} tokens,"
            f" {layout.num_hidden_layers} layers and {moe.top_k} experts"
        )
    experts = experts[:, list(moe.layers)].astype(np.int64)
    if experts.min(initial=0) < 0 or experts.max(initial=0) >= moe.num_experts:
        raise InvalidAnswer(
            f"routed_experts has {experts.min()} to {experts.max()}, but there are"
            f" {moe.num_experts} experts"
        )
    if has_duplicates(experts):
        raise InvalidAnswer("routed_experts has the same expert twice for a token")
    return torch.from_numpy(experts).to(expert_dtype(moe.num_experts))


def parse_scores(body: bytes, token_ids: Sequence[int]) -> list[float]:
    """Parses the log-probs at temperature 1 of all tokens but the first."""
    positions = parse(GenerateAnswer, body).prompt_logprobs or []
    if len(positions) != len(token_ids):
        raise InvalidAnswer(
            f"it has prompt_logprobs of {len(positions)} tokens, but {len(token_ids)} were sent"
        )
    entries = []
    for position, token in enumerate(token_ids[1:], start=1):
        # The first token of a prompt has no log-prob.
        scores = positions[position] or {}
        if str(token) not in scores:
            raise InvalidAnswer(f"prompt_logprobs {position} lacks the token {token}")
        entries.append(ScoredToken(token=token, log_prob=scores[str(token)].log_prob))
    return checked_log_probs(token_ids[1:], entries).tolist()


def parse_top(body: bytes, count: int, vocab_size: int | None = None) -> dict[int, float]:
    """Parses the likeliest next tokens, without masked ones."""
    positions = parse(GenerateAnswer, body).choice.log_probs
    if not positions or not positions[0].top_logprobs:
        raise InvalidAnswer("it has no top_logprobs")
    entries = []
    for entry in positions[0].top_logprobs:
        if entry.log_prob is not None and entry.log_prob > SENTINEL:
            entries.append((min(entry.log_prob, 0.0), entry.token))
    check_vocabulary("top_logprobs", [token for _, token in entries], vocab_size)
    # The sampled token is there, too, also if it is not one of the likeliest.
    entries.sort(reverse=True)
    return {token: log_prob for log_prob, token in entries[:count]}


def parse_cached_tokens(body: bytes) -> int | None:
    """Parses how many tokens of the prompt came from the prefix cache; None if it is not told."""
    usage = parse(GenerateAnswer, body).usage
    if usage is None or usage.prompt_tokens_details is None:
        return None
    return usage.prompt_tokens_details.cached_tokens


def parse_checksums(body: bytes) -> Mapping[str, list[str]]:
    """Parses the checksums of `WorkerExtension.weight_checksums`, one per rank and tensor."""
    return checksums_by_tensor(parse(_RankChecksums, body).results)


def first_problem(body: bytes) -> str:
    """Parses the first problem that a rank returns; an empty text without one."""
    for problem in parse(_Results, body).results:
        if problem not in (None, "None", ""):
            return str(problem)
    return ""


def parse_problems(body: bytes) -> None:
    """Raises ReportedFailure with the first problem that a rank returns."""
    problem = first_problem(body)
    if problem:
        raise ReportedFailure(problem)


def parse_cache_reset(body: bytes) -> None:
    """Raises ReportedFailure if the prefix cache was not emptied."""
    if not parse(_CacheReset, body).success:
        raise ReportedFailure("the prefix cache was not emptied")


def parse_world_size(body: bytes) -> int:
    """Parses the number of ranks."""
    return parse(_WorldSize, body).world_size
