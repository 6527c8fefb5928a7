"""Requests to SGLang servers and their answers, tested with answers of real servers.

Every value of an answer is checked: a server may be broken, another program, or run another model.
The types check single values (type, finite, bounds); `parse_…` checks their relations, such as
equal counts.
"""

import math
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from torch import Tensor

from slime_tis.errors import quoted
from slime_tis.hf_directory import MoeSizes
from slime_tis.trainer.data.sample import FinishReason, Numbers, Sampling, SamplingMask
from slime_tis.trainer.engines.function_requests import Generation

BYTES_PER_TOKEN = 256
"""Maximum average bytes of an answer per token; real answers have 50 to 80."""
BYTES_PER_TOKEN_ID = 10
"""Maximum average bytes of a token id in a sampling mask."""
ANSWER_BYTES = 256 << 10
"""Maximum bytes of an answer in addition to its tokens."""
NEUTRAL_SAMPLING_PARAMS = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
"""Sent with each request: defaults of the server or checkpoint must not change the distribution."""
MAX_LOG_PROB = 1e-3
"""Largest log-prob: in half precision a probability of 1 may be rounded up slightly."""
LOWEST = -1e30
"""Log-probs up to this value are a server's −∞."""
EXPERT_BYTES = 4
"""Bytes of a routed expert, an int32. Base64 encodes 3 bytes as 4 characters."""
MAX_NAME = 128
"""Maximum characters of a name in an answer."""


class InvalidAnswer(Exception):
    """The problem of an answer: the end of a message that begins with the server's name."""


@dataclass(frozen=True, kw_only=True)
class ExpertLayout:
    """The layout of routed experts in an answer."""

    num_hidden_layers: int
    """Number of all layers; dense layers have columns in an answer too."""
    moe: MoeSizes

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes of the experts of some tokens in an answer."""
        num_experts = num_tokens * self.num_hidden_layers * self.moe.top_k
        return 4 * math.ceil(EXPERT_BYTES * num_experts / 3)


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """POST /generate for one sample."""

    input_ids: Sequence[int]
    """Tokens of the prompt and of the partial response."""
    sampling: Sampling
    max_new_tokens: int
    request_id: str
    """Id for aborts. The server aborts all ids with this prefix, so all ids must have equal
    width."""
    session: str = ""
    """Conversation. A router with routing keys sends its requests to the server whose cache has the
    earlier turns."""
    seed: int | None = None
    first_experts: int | None = None
    """First token whose routed experts are returned; None for none."""
    stop: Sequence[str] = ()

    def body(self) -> dict[str, object]:
        """The JSON."""
        params: dict[str, object] = {
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "top_k": self.sampling.top_k,
            "max_new_tokens": self.max_new_tokens,
            **NEUTRAL_SAMPLING_PARAMS,
        }
        if self.sampling.stop_token_ids:
            params["stop_token_ids"] = list(self.sampling.stop_token_ids)
        if self.stop:
            params |= {"stop": list(self.stop), "no_stop_trim": True}
        if self.seed is not None:
            params["sampling_seed"] = self.seed
        body: dict[str, object] = {
            "rid": self.request_id,
            "input_ids": list(self.input_ids),
            "sampling_params": params,
            "return_logprob": True,
        }
        if self.first_experts is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": self.first_experts}
        if self.sampling.return_sampling_mask:
            body |= {"return_sampling_mask": True, "sampling_logprobs_mode": "selected"}
        return body

    def max_bytes(self, layout: ExpertLayout | None = None) -> int:
        """Maximum bytes of the answer."""
        mask_tokens = 0
        if self.sampling.return_sampling_mask:
            # A mask also contains tokens as likely as the last one of top-k.
            mask_tokens = 2 * self.sampling.top_k
        max_bytes = max_answer_bytes(self.max_new_tokens, mask_tokens)
        if layout is not None and self.first_experts is not None:
            max_bytes += layout.num_bytes(len(self.input_ids) + self.max_new_tokens)
        return max_bytes


def score_body(token_ids: Sequence[int]) -> dict[str, object]:
    """The body of POST /generate that returns the log-probs of given tokens and samples nothing."""
    return {
        "input_ids": list(token_ids),
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 0, **NEUTRAL_SAMPLING_PARAMS},
        "return_logprob": True,
        "logprob_start_len": 0,
    }


def top_body(token_ids: Sequence[int], sampling: Sampling, count: int) -> dict[str, object]:
    """The body of POST /generate that samples one token and returns the likeliest ones."""
    sampling = replace(
        sampling, top_p=1.0, top_k=-1, return_sampling_mask=False, return_routed_experts=False
    )
    request = GenerateRequest(
        input_ids=token_ids,
        sampling=sampling,
        max_new_tokens=1,
        request_id=f"top-{secrets.token_hex(16)}",
    )
    return request.body() | {"top_logprobs_num": count}


def max_answer_bytes(num_tokens: int, mask_tokens: int = 0) -> int:
    """Maximum bytes of an answer of `num_tokens` tokens, each with a mask of `mask_tokens` ids."""
    bytes_per_token = BYTES_PER_TOKEN + BYTES_PER_TOKEN_ID * mask_tokens
    return ANSWER_BYTES + bytes_per_token * num_tokens


def version_number(name: object) -> int:
    """The version that a server's weights are named by; 0 for names that are not numbers.

    Runs name weights by decimal numbers; SGLang names the initial weights "default". Raises
    ValueError for signed, long and fractional numbers, which no run gives.
    """
    if name is None:
        return 0
    if (
        not isinstance(name, str)
        or len(name) > MAX_NAME
        or re.fullmatch(r"[+-][0-9]+|[0-9]{16,}|[+-]?[0-9]+\.[0-9]*", name)
    ):
        raise ValueError(f"the name of its weights is {quoted(name)}")
    if re.fullmatch("[0-9]+", name):
        return int(name)
    return 0


LogProb = Annotated[float, msgspec.Meta(le=MAX_LOG_PROB)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
RankCount = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
TokenCount = Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]
Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]


class Answer(msgspec.Struct):
    """The used fields of an answer; other fields are ignored."""


class TokenLogProb(Answer, array_like=True, gc=False):
    """SGLang's [log-prob, token, text]; the first token of an input has no log-prob."""

    log_prob: LogProb | None
    token: TokenId


class _WeightSpan(Answer):
    version: Any
    start: int
    end: int

    def __post_init__(self) -> None:
        self.version = version_number(self.version)


class _Finish(Answer):
    type: FinishReason


class OutputMeta(Answer, kw_only=True):
    """`meta_info` of POST /generate."""

    finish_reason: _Finish
    output_token_logprobs: list[TokenLogProb] = []
    completion_tokens: int | None = None
    weight_versions: list[_WeightSpan]
    output_token_sampling_mask: list[list[TokenId]] | None = None
    output_token_sampling_logprobs: list[LogProb] | None = None
    input_token_logprobs: list[TokenLogProb] = []
    output_top_logprobs: list[list[TokenLogProb]] = []


class GenerateAnswer(Answer):
    """The answer to POST /generate."""

    output_ids: list[TokenId]
    meta_info: OutputMeta


class ModelInfo(Answer):
    """The answer to GET /model_info."""

    weight_version: str | None = None

    def __post_init__(self) -> None:
        version_number(self.weight_version)


class ServerInfo(Answer):
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


class _RankChecksums(Answer):
    checksums: dict[str, str]


class _Worker(Answer):
    url: str


class ControlAnswer(Answer):
    """The answer to other endpoints."""

    success: Any = None
    ranks: list[_RankChecksums] | None = None
    workers: list[_Worker] | None = None


AnswerT = TypeVar("AnswerT", bound=Answer)


def parse(schema: type[AnswerT], body: bytes) -> AnswerT:
    """Parses the body of an answer.

    Raises InvalidAnswer if it is not JSON, or a field is missing or invalid.
    """
    try:
        return msgspec.json.decode(body, type=schema)
    except msgspec.ValidationError as error:
        raise InvalidAnswer(str(error)) from None
    # ValueError: a text that is not UTF-8. RecursionError: deeply nested lists.
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise InvalidAnswer("it is not JSON") from None


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
    _check_vocabulary("it", answer.output_ids, vocab_size)
    meta = answer.meta_info
    token_ids = Numbers("q", answer.output_ids)
    length = len(token_ids)
    entries = meta.output_token_logprobs if token_ids else []
    log_probs = _log_probs_of(token_ids, entries)
    if meta.completion_tokens not in (None, length):
        raise InvalidAnswer(
            f"it has {length} tokens and says that they are {quoted(meta.completion_tokens)}"
        )
    if length > request.max_new_tokens:
        raise InvalidAnswer(f"it has {length} tokens where {request.max_new_tokens} were asked for")
    if not token_ids and meta.finish_reason.type != "abort":
        raise InvalidAnswer(f"it has no tokens but finish_reason {meta.finish_reason.type!r}")
    versions = _token_versions(meta, length)
    routed_experts = None
    problem = None
    if experts is not None and request.first_experts is not None and token_ids:
        # The last token was not fed, so it has no experts.
        num_rows = len(request.input_ids) + length - 1 - request.first_experts
        # After an update, earlier tokens were fed again, to routers with other weights.
        if versions[0] != versions[-1]:
            problem = "its weights were updated in the middle of a request"
        else:
            try:
                routed_experts = experts(num_rows)
            except InvalidAnswer as error:
                problem = str(error)
    mask = None
    if request.sampling.return_sampling_mask:
        mask, log_probs = _sampling_mask(meta, token_ids, vocab_size)
    generation = Generation(
        token_ids=token_ids,
        log_probs=log_probs,
        weight_versions=versions,
        finish_reason=meta.finish_reason.type,
        text="",
        routed_experts=routed_experts,
        sampling_mask=mask,
    )
    return generation, problem


def parse_scores(body: bytes, token_ids: Sequence[int]) -> list[float]:
    """Parses the log-probs at temperature 1 of all tokens but the first; raises InvalidAnswer."""
    entries = parse(GenerateAnswer, body).meta_info.input_token_logprobs
    return _log_probs_of(Numbers("q", token_ids[1:]), entries[1:]).tolist()


def parse_top(body: bytes, vocab_size: int | None = None) -> dict[int, float]:
    """Parses the likeliest tokens of an answer to `top_body`, without impossible tokens."""
    positions = parse(GenerateAnswer, body).meta_info.output_top_logprobs
    if not positions or not positions[0]:
        raise InvalidAnswer("it has no output_top_logprobs")
    token_ids = [entry.token for entry in positions[0]]
    _check_vocabulary("output_top_logprobs", token_ids, vocab_size)
    log_probs = {}
    for entry in positions[0]:
        if entry.log_prob is not None and entry.log_prob > LOWEST:
            log_probs[entry.token] = min(entry.log_prob, 0.0)
    return log_probs


def parse_checksums(body: bytes) -> Mapping[str, list[str]]:
    """Parses checksums by tensor name, one per rank that has the tensor; raises InvalidAnswer."""
    ranks = parse(ControlAnswer, body).ranks
    if ranks is None:
        raise InvalidAnswer("it has no ranks")
    checksums: dict[str, list[str]] = {}
    for rank in ranks:
        for name, checksum in rank.checksums.items():
            checksums.setdefault(name, []).append(checksum)
    return checksums


def _check_vocabulary(subject: str, token_ids: Sequence[int], vocab_size: int | None) -> None:
    if vocab_size is not None and max(token_ids, default=0) >= vocab_size:
        raise InvalidAnswer(
            f"{subject} has token {quoted(max(token_ids))}, but the vocabulary of --hf-checkpoint"
            f" ends at {vocab_size - 1}; see that the server runs the same model"
        )


def _sampling_mask(
    meta: OutputMeta, token_ids: Sequence[int], vocab_size: int | None
) -> tuple[SamplingMask, Numbers]:
    sets = meta.output_token_sampling_mask
    log_probs = meta.output_token_sampling_logprobs
    if not token_ids:
        return SamplingMask.unrecorded(0), Numbers("d")
    if sets is None or log_probs is None:
        raise InvalidAnswer(
            "it has no output_token_sampling_mask with output_token_sampling_logprobs"
        )
    if not len(sets) == len(log_probs) == len(token_ids):
        raise InvalidAnswer(
            f"it has {len(sets)} sampling masks, {len(log_probs)} log-probs, {len(token_ids)}"
            " tokens"
        )
    for position, (allowed, token) in enumerate(zip(sets, token_ids, strict=True)):
        distinct = set(allowed)
        if len(distinct) < len(allowed):
            raise InvalidAnswer(f"sampling mask {position} has a token twice")
        if token not in distinct:
            raise InvalidAnswer(
                f"sampling mask {position} lacks the token {token} that was sampled"
            )
        _check_vocabulary(f"sampling mask {position}", allowed, vocab_size)
    # Half precision may round a probability of 1 up.
    bounded = Numbers("d", [min(log_prob, 0.0) for log_prob in log_probs])
    return SamplingMask.from_sets(sets), bounded


def _log_probs_of(token_ids: Numbers, entries: Sequence[TokenLogProb]) -> Numbers:
    if len(entries) != len(token_ids):
        raise InvalidAnswer(f"it has {len(entries)} log-probs for {len(token_ids)} tokens")
    # null becomes NaN, which JSON does not have.
    log_probs = np.array([entry.log_prob for entry in entries], np.float64)
    if np.isnan(log_probs).any():
        raise InvalidAnswer(f"log-prob {int(np.isnan(log_probs).argmax())} is null")
    for position, (entry, token) in enumerate(zip(entries, token_ids, strict=True)):
        if entry.token != token:
            raise InvalidAnswer(
                f"log-prob {position} is of token {quoted(entry.token)}, but the token is {token}"
            )
    return Numbers("d", np.minimum(log_probs, 0.0).tobytes())


def _token_versions(meta: OutputMeta, length: int) -> Numbers:
    """The version of each token, from the spans of an answer."""
    versions = Numbers("q")
    last = 0
    for span in meta.weight_versions:
        end = len(versions)
        if span.start != end or not span.start <= span.end <= length:
            bounds = f"{quoted(span.start)} to {quoted(span.end)} after {end} of {length} tokens"
            raise InvalidAnswer(f"weight_versions has a span from {bounds}")
        if span.version < last:
            raise InvalidAnswer(f"weight_versions goes back from {last} to {span.version}")
        versions.extend([span.version] * (span.end - span.start))
        last = span.version
    if len(versions) != length:
        raise InvalidAnswer(f"weight_versions covers {len(versions)} tokens of {length}")
    return versions
