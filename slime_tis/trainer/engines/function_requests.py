"""Requests that user-defined functions send to a rollout engine, and the answers."""

from __future__ import annotations

import hashlib
import operator
from bisect import bisect_left
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
    """Log-prob of each token, in the distribution that it was sampled from."""
    weight_versions: Ints
    """Version of the weights that sampled each token."""
    workers: Ints = field(default_factory=list, compare=False)
    """Index of the server that sampled each token, as in `Sample.rollout_workers`; empty if
    unknown."""
    finish_reason: FinishReason
    """stop: a stop token or stop string; length: `max_new_tokens` or the end of the context.

    abort: the rollout has enough groups. The function should return its partial sample; the next
    rollout calls it again."""
    text: str
    """Decoded tokens; special tokens and the stop are removed unless the request keeps them."""
    routed_experts: Tensor | None = field(default=None, compare=False)
    """uint8 or int16 [input + sampled tokens - 1, sparse layers, k]: the experts per fed token, as
    in `Sample`."""
    routing_weights: Tensor | None = field(default=None, compare=False)
    """Combine weights of the experts: float32, same shape."""
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
        if self.sampling_mask is None:
            return SamplingMask.unrecorded(len(self.token_ids))
        return self.sampling_mask


class TokenEngine(Protocol):
    """A rollout engine as seen by the function that makes one sample."""

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling_params: RequestParams = None,
        *,
        session_id: str | None = None,
    ) -> Generation:
        """Samples the continuation of some tokens; coroutines may await this concurrently.

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
    """Texts that end a response, which includes them."""
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


PROCESSORS = {
    "min_p": 0,
    "repetition_penalty": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "min_new_tokens": 0,
}
"""Parameters of SGLang that change the distribution after temperature, top-k and top-p, and the
value that leaves it as it is."""


def request_options(params: RequestParams, sampling: Sampling) -> RequestOptions:
    """Returns the options of a request.

    Raises:
        ValueError: A name is unknown, or a value is invalid.
    """
    requested = _without_processors(dict(params or {}))
    try:
        values = SamplingParams.model_validate(requested).model_dump(exclude_none=True)
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
    stop = values.pop("stop", sampling.stop)
    if isinstance(stop, str):
        stop = [stop]
    distinct_stops = tuple(dict.fromkeys(stop))
    changes = {"max_response_len": values.pop("max_new_tokens", sampling.max_response_len)}
    for name in (*DISTRIBUTION, "stop_token_ids"):
        if name in values:
            changes[name] = values.pop(name)
    return RequestOptions(sampling=replace(sampling, **changes), stop=distinct_stops, **values)


def _without_processors(params: dict[str, Any]) -> dict[str, Any]:
    """Returns the parameters without the ones of PROCESSORS, which must have no effect."""
    remaining = {}
    for name, value in params.items():
        if name not in PROCESSORS:
            remaining[name] = value
        elif value is not None and value != PROCESSORS[name]:
            raise ValueError(
                f"sampling_params has {name} {quoted(value)}, which samples from another"
                " distribution than the one that training computes: after temperature, top-k and"
                " top-p; remove the parameter, and limit tokens with --rollout-top-p or"
                " --rollout-top-k."
            )
    return remaining


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request to an engine."""

    token_ids: list[int]
    options: RequestOptions
    key: bytes
    session: tuple[int, str | None]
    """Number of the sample, and name of the conversation within it."""


class SampleKey(NamedTuple):
    """Key of a sample's random numbers; the input of a request is added to it."""

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
    _repetitions: Counter[bytes] = field(default_factory=Counter)
    """Number of requests per input."""

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
            wrong = min(ids)
            if wrong >= 0:
                wrong = max(ids)
            raise ValueError(
                f"token_ids has {wrong}, but the model's vocabulary ends at {self.vocab_size - 1};"
                " use the tokenizer of --hf-checkpoint."
            )
        numbers = np.asarray([*self.key, *ids], dtype="<i8")
        digest = hashlib.blake2b(numbers.tobytes(), digest_size=32).digest()
        repetition = self._repetitions[digest]
        self._repetitions[digest] += 1
        key = hashlib.blake2b(digest + repetition.to_bytes(8, "little"), digest_size=16).digest()
        session = (self.number, session_id)
        request = Request(token_ids=ids, options=options, key=key, session=session)
        return await self.answer(request)


def common_prefix(first: list[int], second: list[int]) -> int:
    """Length of the common prefix of two sequences of tokens."""
    shorter = min(len(first), len(second))
    if first[:shorter] == second[:shorter]:
        return shorter

    def differs(last: int) -> bool:
        return first[: last + 1] != second[: last + 1]

    # Comparisons of slices run in C: a binary search over them is faster than a loop over tokens.
    return bisect_left(range(shorter), True, key=differs)


def request_uniforms(key: bytes) -> Iterator[float]:
    """An endless stream of the uniforms in [0, 1) that draw the tokens of a request."""
    generator = np.random.Generator(np.random.Philox(key=np.frombuffer(key, dtype="<u8")))
    while True:
        yield from generator.random(64).tolist()


class StopStrings:
    """Finds the first stop text in a growing response."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._last_characters = {text[-1] for text in stop}
        # SentencePiece tokenizers drop the space at the start of a decoded text, so a single token
        # does not show it.
        self._ends_in_space = any(map(str.isspace, self._last_characters))
        self._completing_tokens: dict[int, bool] = {}
        # A text begins at most as many tokens before its last token as it has bytes.
        byte_lengths = [len(text.encode()) for text in stop]
        self._tail = max(byte_lengths, default=0) + 1

    def found(self, token_ids: Sequence[int]) -> bool:
        """Returns whether the last token completes one of the texts, if no earlier token did."""
        if not self._stop or not self._can_complete(token_ids[-1]):
            return False
        text = self._tokenizer.decode(list(token_ids[-self._tail :]))
        return any(stop in text for stop in self._stop)

    def first(self, token_ids: Sequence[int]) -> int | None:
        """Number of tokens up to the first text; None if the response has none."""
        for end in range(1, len(token_ids) + 1):
            if self.found(token_ids[:end]):
                return end
        return None

    def _can_complete(self, token: int) -> bool:
        """Whether the token's text may contain the last character of a stop text."""
        if self._ends_in_space:
            return True
        if token not in self._completing_tokens:
            text = self._tokenizer.decode([token])
            # U+FFFD stands for a part of a character's bytes, whose rest may complete a text.
            characters = self._last_characters | {"\ufffd"}
            self._completing_tokens[token] = any(last in text for last in characters)
        return self._completing_tokens[token]


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
        # An array, because transformers inspects every element of a list.
        return tokenizer.decode(  # type: ignore[no-any-return]
            np.asarray(ids, dtype=np.int64),
            skip_special_tokens=options.skip_special_tokens,
            spaces_between_special_tokens=options.spaces_between_special_tokens,
        )

    text = decoded(token_ids)
    if finish_reason != "stop" or options.no_stop_trim:
        return text
    positions = [text.find(stop) for stop in options.stop if stop in text]
    if positions:
        return text[: min(positions)]
    return decoded(token_ids[:-1])
