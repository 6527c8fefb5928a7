"""Requests that user-defined functions send to a rollout engine, and the answers."""

from __future__ import annotations

import hashlib
import operator
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from slime_tis.errors import quoted
from slime_tis.trainer.data.sample import (
    STATUS,
    FinishReason,
    Floats,
    Ints,
    Numbers,
    Prompt,
    Sample,
    Sampling,
    SamplingMask,
)

DISTRIBUTION = ("temperature", "top_p", "top_k")
"""Names of `sampling_params` that the log-probs depend on."""
Text = Annotated[str, Field(min_length=1)]
RequestParams = Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The answer to one request."""

    token_ids: Ints
    """Sampled tokens, including the stop token or stop string."""
    log_probs: Floats
    """Log-prob of each token in the distribution it was sampled from."""
    weight_versions: Ints
    """Version of the weights that sampled each token."""
    workers: Ints = field(default_factory=list, compare=False)
    """For each token the index of the server that sampled it, as in `Sample.rollout_workers`; empty
    if unknown."""
    finish_reason: FinishReason
    """stop: a stop token or stop string; length: `max_new_tokens` or the end of the context; abort:
    the rollout has enough groups; the function should return its partial sample and is called again
    in the next rollout."""
    text: str
    """Text of the tokens, without special tokens and the stop unless the request keeps them."""
    routed_experts: Tensor | None = field(default=None, compare=False)
    """uint8 or int16 [input + sampled tokens - 1, sparse layers, k]: the experts of each token fed,
    as in `Sample`."""
    routing_weights: Tensor | None = field(default=None, compare=False)
    """float32 of the same shape: the combine weight of each expert."""
    sampling_mask: SamplingMask | None = None
    """The candidate tokens at each sampled token; None if nothing was cut or recorded."""

    @classmethod
    def of(cls, sample: Sample) -> Generation:
        """Returns the response that an incomplete sample has so far."""
        return cls(
            token_ids=Numbers("q", sample.response_ids),
            log_probs=Numbers("d", sample.rollout_log_probs or ()),
            weight_versions=Numbers("q", sample.weight_versions),
            workers=Numbers("i", sample.worker_of_each),
            finish_reason="abort",
            text=sample.response,
            routed_experts=sample.rollout_routed_experts,
            routing_weights=sample.rollout_routing_weights,
            sampling_mask=sample.sampling_mask,
        )

    @property
    def candidates(self) -> SamplingMask:
        """`sampling_mask`; an unrecorded one if it is None."""
        return (
            SamplingMask.unrecorded(len(self.token_ids))
            if self.sampling_mask is None
            else self.sampling_mask
        )


class TokenEngine(Protocol):
    """A rollout engine as seen by the function that makes one sample."""

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling_params: RequestParams = None,
        *,
        session_id: str | None = None,
    ) -> Generation:
        """Samples the continuation of some tokens; any number of coroutines may await this concurrently.

        Args:
            token_ids: The input, at least one token.
            sampling_params: The fields of `SamplingParams`.
            session_id: One of several concurrent conversations within the sample, whose key/value
                cache is reused.
        """


RolloutFunction = Callable[[Sample, TokenEngine], Awaitable[list[Sample]]]
"""Makes one sample, or several of one rollout, by requests to an engine."""


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """How the tokens of one request are sampled and decoded."""

    sampling: Sampling
    """`max_response_len` is the request's `max_new_tokens`."""
    stop: tuple[str, ...] = ()
    """Texts that end a response; they are part of it."""
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    """Whether the text keeps the stop token or stop string."""
    spaces_between_special_tokens: bool = True


class SamplingParams(BaseModel):
    """`sampling_params` of a request; None takes the run's value."""

    model_config = ConfigDict(extra="forbid")

    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1)] | Literal[-1] | None = None
    max_new_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Text | list[Text] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    spaces_between_special_tokens: bool | None = None


def request_options(params: RequestParams, sampling: Sampling) -> RequestOptions:
    """Returns the options of a request; raises ValueError for an unknown name or an invalid value."""
    try:
        values = SamplingParams.model_validate(dict(params or {})).model_dump(exclude_none=True)
    except ValidationError as error:
        first, *_ = error.errors(include_url=False)
        raise ValueError(
            f"sampling_params has {first['loc'][0]} {quoted(first['input'])}: {first['msg']}."
        ) from None
    for name in DISTRIBUTION:
        default = getattr(sampling, name)
        if sampling.for_training and values.get(name, default) != default:
            raise ValueError(
                f"sampling_params has {name} {values[name]:g}, but the run samples with"
                f" {default:g}, and training computes that distribution; remove the parameter."
            )
    stop = values.pop("stop", ())
    changed = {
        name: values.pop(name) for name in (*DISTRIBUTION, "stop_token_ids") if name in values
    }
    changed["max_response_len"] = values.pop("max_new_tokens", sampling.max_response_len)
    stops = dict.fromkeys((stop,) if isinstance(stop, str) else stop)
    return RequestOptions(sampling=replace(sampling, **changed), stop=tuple(stops), **values)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request to an engine."""

    token_ids: list[int]
    options: RequestOptions
    key: bytes
    session: tuple[int, str | None]
    """Number of the sample and name of its conversation."""


class SampleKey(NamedTuple):
    """Key of a sample's random numbers, in addition to the inputs of its requests."""

    seed: int
    prompt_index: int
    """Index of the prompt in its file."""
    occurrence: int
    """Earlier occurrences of the same prompt in the batch."""
    sample: int


@dataclass(eq=False)
class SampleEngine:
    """The `TokenEngine` of one call of a rollout function.

    The random numbers of a request depend only on the sample's key, the input, and the number of
    earlier requests of this sample with the same input.
    """

    answer: Callable[[Request], Awaitable[Generation]]
    sampling: Sampling
    key: SampleKey
    number: int
    """Number of the sample in the rollout."""
    vocab_size: int | None
    """None checks no token."""
    _asked: Counter[bytes] = field(default_factory=Counter)

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling_params: RequestParams = None,
        *,
        session_id: str | None = None,
    ) -> Generation:
        """See `TokenEngine`."""
        options = request_options(sampling_params, self.sampling)
        ids = [operator.index(token) for token in token_ids]
        if not ids:
            raise ValueError("token_ids is empty, but sampling needs at least one token to follow.")
        if self.vocab_size is not None and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise ValueError(
                f"token_ids has {wrong}, but the model's vocabulary ends at {self.vocab_size - 1};"
                " use the tokenizer of --hf-checkpoint."
            )
        numbers = np.asarray([*self.key, *ids], dtype="<i8")
        digest = hashlib.blake2b(numbers.tobytes(), digest_size=32).digest()
        repetition = self._asked[digest]
        self._asked[digest] += 1
        key = hashlib.blake2b(digest + repetition.to_bytes(8, "little"), digest_size=16).digest()
        session = self.number, session_id
        return await self.answer(Request(token_ids=ids, options=options, key=key, session=session))


def request_uniforms(key: bytes) -> Iterator[float]:
    """An endless stream of the uniforms in [0, 1) that draw the tokens of a request."""
    generator = np.random.Generator(np.random.Philox(key=np.frombuffer(key, dtype="<u8")))
    while True:
        yield from generator.random(64).tolist()


class StopStrings:
    """Finds the first stop text in a growing response."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._last_characters = {text[-1] for text in stop}
        self._always = any(character.isspace() for character in self._last_characters)
        self._may_complete: dict[int, bool] = {}
        self._tail = max((len(text.encode()) for text in stop), default=0) + 1

    def found(self, token_ids: Sequence[int]) -> bool:
        """Returns whether the last token completes one of the texts, if no earlier token did."""
        if not self._stop or not self._can_complete(token_ids[-1]):
            return False
        text = self._tokenizer.decode(list(token_ids[-self._tail :]))
        return any(stop in text for stop in self._stop)

    def first(self, token_ids: Sequence[int]) -> int | None:
        """Number of tokens up to the first text; None if the response has none."""
        return next(
            (end for end in range(1, len(token_ids) + 1) if self.found(token_ids[:end])), None
        )

    def _can_complete(self, token: int) -> bool:
        if token not in self._may_complete:
            text = self._tokenizer.decode([token])
            ends = (
                self._always
                or "\ufffd" in text
                or any(last in text for last in self._last_characters)
            )
            self._may_complete[token] = ends
        return self._may_complete[token]


def sample_of(prompt: Prompt, response: Generation, group_index: int = 0, index: int = 0) -> Sample:
    """Returns the sample of an answer to a prompt."""
    return Sample(
        prompt_row=prompt,
        group_index=group_index,
        index=index,
        tokens=Numbers("q", prompt.token_ids) + response.token_ids,
        response=response.text,
        response_length=len(response.token_ids),
        rollout_log_probs=response.log_probs,
        loss_mask=Numbers("b", bytes([1]) * len(response.token_ids)),
        weight_versions=response.weight_versions,
        rollout_workers=response.workers,
        status=STATUS[response.finish_reason],
        rollout_routed_experts=response.routed_experts,
        rollout_routing_weights=response.routing_weights,
        sampling_mask=response.sampling_mask,
    ).compact()


def response_text(
    tokenizer: PreTrainedTokenizerBase,
    token_ids: Sequence[int],
    options: RequestOptions,
    finish_reason: FinishReason,
) -> str:
    """Returns the text of a response, without its stop unless the request sets `no_stop_trim`."""

    def decoded(ids: Sequence[int]) -> str:
        return tokenizer.decode(  # type: ignore[no-any-return]
            np.asarray(ids, dtype=np.int64),  # transformers looks at each element of a list
            skip_special_tokens=options.skip_special_tokens,
            spaces_between_special_tokens=options.spaces_between_special_tokens,
        )

    text = decoded(token_ids)
    if finish_reason != "stop" or options.no_stop_trim:
        return text
    positions = [position for position in map(text.find, options.stop) if position >= 0]
    return text[: min(positions)] if positions else decoded(token_ids[:-1])
