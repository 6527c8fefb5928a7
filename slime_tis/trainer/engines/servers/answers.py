"""Checks of servers' answers that all engines share.

Every value of an answer is checked: a server may be broken, another program, or run another model.
The types check single values (type, finite, bounds); functions check their relations, such as equal
counts.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from torch import Tensor

from slime_tis.errors import quoted
from slime_tis.trainer.data.sample import FinishReason, Numbers, SamplingMask
from slime_tis.trainer.engines.function_requests import Generation
from slime_tis.trainer.engines.servers.api import GenerateRequest
from slime_tis.trainer.engines.servers.errors import InvalidAnswer

MAX_LOG_PROB = 1e-3
"""Largest log-prob: in half precision a probability of 1 may be rounded up slightly."""
MAX_NAME = 128
"""Maximum characters of a name in an answer."""

LogProb = Annotated[float, msgspec.Meta(le=MAX_LOG_PROB)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
RankCount = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
TokenCount = Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]
Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]


class Answer(msgspec.Struct):
    """The used fields of an answer; other fields are ignored."""


AnswerT = TypeVar("AnswerT", bound=Answer)


class TokenLogProb(Protocol):
    """The log-prob of a token in an answer."""

    @property
    def token(self) -> int:
        """The token's id."""

    @property
    def log_prob(self) -> float | None:
        """Its log-prob; None if the server has none."""


class WeightSpan(Answer):
    """The weights of the tokens from `start` to before `end`."""

    version: Any
    """Their number; None for weights that no run sent."""
    start: int
    end: int

    def __post_init__(self) -> None:
        self.version = version_number(self.version)


class WeightName(Answer):
    """The answer to the question for the name of a server's weights."""

    weight_version: str | None = None

    def __post_init__(self) -> None:
        version_number(self.weight_version)


class _Worker(Answer):
    url: str


class _Workers(Answer):
    workers: list[_Worker] = msgspec.field(default_factory=list)


class _Model(Answer):
    id: Name
    parent: str | None = None
    """The base model of an adapter."""


class _Models(Answer):
    data: list[_Model]


@dataclass(kw_only=True)
class SampledTokens:
    """The parts of a sampled response, as a server reports them."""

    token_ids: Sequence[int]
    log_probs: Sequence[TokenLogProb]
    """One per sampled token."""
    finish_reason: FinishReason
    spans: Sequence[WeightSpan]
    masks: Sequence[Sequence[int]] | None = None
    """Tokens that could be sampled at each position; None without sampling masks."""
    mask_log_probs: Sequence[float] | None = None
    """Log-probs of the sampled tokens among the tokens of their masks."""


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


def parse_workers(body: bytes) -> list[str]:
    """Parses the URLs of a router's servers: SGLang's gateway and vLLM's router answer alike."""
    workers = parse(_Workers, body).workers
    # Routers append @RANK to the URL of a data-parallel rank.
    return [re.sub(r"@\d+$", "", worker.url) for worker in workers]


def parse_adapters(body: bytes) -> list[str]:
    """Parses the names of LoRA adapters in GET /v1/models; they have a parent, the base model."""
    models = parse(_Models, body).data
    return [model.id for model in models if model.parent is not None]


def parse_weight_name(body: bytes) -> str | None:
    """Parses the name of a server's weights; None if it names none."""
    return parse(WeightName, body).weight_version


def checksums_by_tensor(ranks: Iterable[Mapping[str, str]]) -> dict[str, list[str]]:
    """Returns the checksums by tensor, one of each rank that has the tensor."""
    checksums: dict[str, list[str]] = {}
    for rank in ranks:
        for name, checksum in rank.items():
            checksums.setdefault(name, []).append(checksum)
    return checksums


def is_older(version: str, oldest: tuple[int, ...]) -> bool:
    """Whether a server's version is older; a server that reports no version is not."""
    numbers = [int(number) for number in re.findall("[0-9]{1,9}", version)[: len(oldest)]]
    return any(numbers) and tuple(numbers) < oldest


def version_number(name: object) -> int | None:
    """The version that a server's weights are named by; None for names that are not numbers.

    Runs name weights by decimal numbers; servers name the initial weights "default". Raises
    ValueError for signed, long and fractional numbers, which no run gives.
    """
    if name is None:
        return None
    if (
        not isinstance(name, str)
        or len(name) > MAX_NAME
        or re.fullmatch(r"[+-][0-9]+|[0-9]{16,}|[+-]?[0-9]+\.[0-9]*", name)
    ):
        raise ValueError(f"the name of its weights is {quoted(name)}")
    if re.fullmatch("[0-9]+", name):
        return int(name)
    return None


def is_named_by_run(name: str | None) -> bool:
    """Whether a run sent a server's weights: it named them by a decimal number."""
    return name is not None and name.isdecimal()


def checked_generation(
    sampled: SampledTokens,
    request: GenerateRequest,
    vocab_size: int | None,
    experts: Callable[[int], Tensor] | None = None,
) -> tuple[Generation, str | None]:
    """Checks a response, and says why its experts are unusable.

    `experts` decodes the routed experts of a number of tokens; None if they were not requested.
    """
    check_vocabulary("it", sampled.token_ids, vocab_size)
    token_ids = Numbers("q", sampled.token_ids)
    length = len(token_ids)
    log_probs = checked_log_probs(token_ids, sampled.log_probs if token_ids else [])
    if length > request.max_new_tokens:
        raise InvalidAnswer(f"it has {length} tokens where {request.max_new_tokens} were asked for")
    if not token_ids and sampled.finish_reason != "abort":
        raise InvalidAnswer(f"it has no tokens but finish_reason {sampled.finish_reason!r}")
    versions = _token_versions(sampled.spans, length, request.initial_version)
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
        mask, log_probs = _sampling_mask(sampled, token_ids, vocab_size)
    generation = Generation(
        token_ids=token_ids,
        log_probs=log_probs,
        weight_versions=versions,
        finish_reason=sampled.finish_reason,
        text="",
        routed_experts=routed_experts,
        sampling_mask=mask,
    )
    return generation, problem


def checked_log_probs(token_ids: Sequence[int], entries: Sequence[TokenLogProb]) -> Numbers:
    """The log-probs of tokens, at most 0; raises InvalidAnswer unless each is of its token."""
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


def has_duplicates(experts: npt.NDArray[np.integer[Any]]) -> bool:
    """Whether a token has the same expert twice in a layer, in experts [tokens, layers, k]."""
    columns = np.ascontiguousarray(experts.reshape(-1, experts.shape[-1]).T)
    return any((one == other).any() for one, other in itertools.combinations(columns, 2))


def check_vocabulary(subject: str, token_ids: Sequence[int], vocab_size: int | None) -> None:
    """Raises InvalidAnswer if a token is not one of the model's."""
    if vocab_size is not None and max(token_ids, default=0) >= vocab_size:
        raise InvalidAnswer(
            f"{subject} has token {quoted(max(token_ids))}, but the vocabulary of --hf-checkpoint"
            f" ends at {vocab_size - 1}; see that the server runs the same model"
        )


def _sampling_mask(
    sampled: SampledTokens, token_ids: Sequence[int], vocab_size: int | None
) -> tuple[SamplingMask, Numbers]:
    sets = sampled.masks
    log_probs = sampled.mask_log_probs
    if not token_ids:
        return SamplingMask.unrecorded(0), Numbers("d")
    if sets is None or log_probs is None:
        raise InvalidAnswer("it has no sampling masks with the log-probs among their tokens")
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
        check_vocabulary(f"sampling mask {position}", allowed, vocab_size)
    # Half precision may round a probability of 1 up.
    bounded = Numbers("d", [min(log_prob, 0.0) for log_prob in log_probs])
    return SamplingMask.from_sets(sets), bounded


def _token_versions(spans: Sequence[WeightSpan], length: int, initial: int) -> Numbers:
    """The version of each token, from the spans of an answer.

    `initial` is the version of weights that no run sent.
    """
    versions = Numbers("q")
    last = initial
    for span in spans:
        end = len(versions)
        if span.start != end or not span.start <= span.end <= length:
            bounds = f"{quoted(span.start)} to {quoted(span.end)} after {end} of {length} tokens"
            raise InvalidAnswer(f"weight_versions has a span from {bounds}")
        version = initial if span.version is None else span.version
        if version < last:
            raise InvalidAnswer(f"weight_versions goes back from {last} to {version}")
        versions.extend([version] * (span.end - span.start))
        last = version
    if len(versions) != length:
        raise InvalidAnswer(f"weight_versions covers {len(versions)} tokens of {length}")
    return versions
