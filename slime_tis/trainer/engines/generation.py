"""Requests of single sequences to a rollout engine, from functions of the user's own: what they ask and get."""

from __future__ import annotations

import hashlib
import operator
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch import Tensor

from slime_tis.errors import quoted
from slime_tis.trainer.data.sample import FinishReason, Sample, Sampling
from slime_tis.trainer.data.sampling_mask import SamplingMask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DISTRIBUTION = ("temperature", "top_p", "top_k")
"""Names of `sampling_params` that the log-probs depend on."""
UNIFORMS_AT_A_TIME = 64
"""Random numbers that are drawn together, of which a short response leaves some."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What one request sampled."""

    token_ids: list[int]
    """Sampled tokens, the stop token and those of a stop string included."""

    log_probs: list[float]
    """Log-probability of each token in the distribution that it was sampled from."""

    weight_versions: list[int]
    """Version of the weights that sampled each token."""

    finish_reason: FinishReason
    """stop: a stop token or stop string; length: `max_new_tokens` or the end of the context; abort: the rollout has
    enough groups, and the function returns what it has, to be called again in the next rollout."""

    text: str
    """Text of the tokens, without special tokens and without the stop, unless the request asked for them."""

    routed_experts: Tensor | None = field(default=None, compare=False)
    """uint8 or int16 [input + sampled tokens - 1, sparse layers, k]: the experts of each token that was fed, as in
    `Sample`; None where they are not recorded."""

    routing_weights: Tensor | None = field(default=None, compare=False)
    """float32 of the same shape: what the output of each of these experts was multiplied by."""

    sampling_mask: SamplingMask | None = None
    """The tokens that could be sampled at each sampled token; None where nothing was cut or recorded."""


class TokenEngine(Protocol):
    """A rollout engine as the function that makes one sample sees it."""

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling_params: Mapping[str, Any] | None = None,
        *,
        session_id: str | None = None,
    ) -> Generation:
        """Samples what follows some tokens. Any number of coroutines may wait for this at the same time.

        Args:
            token_ids: The input, at least one token.
            sampling_params: Under SGLang's names: temperature, top_p, top_k, max_new_tokens, stop (strings),
                stop_token_ids, skip_special_tokens, no_stop_trim, spaces_between_special_tokens. What is left out or
                None is as the run's flags say.
            session_id: Name of a conversation within the sample, one for each where several go on at the same time;
                the local engine takes the key/value cache of its turn before up again.

        Raises:
            ValueError: The tokens or parameters are not possible, or samples for training would be drawn from another
                distribution than training computes.
        """


RolloutFunction = Callable[[Sample, TokenEngine], Awaitable[list[Sample]]]
"""Makes one sample, or several that belong to one rollout, by asking an engine."""


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """How the tokens of one request are sampled, and how they become text."""

    sampling: Sampling
    """`max_response_len` is the request's `max_new_tokens`."""

    stop: tuple[str, ...] = ()
    """Texts that end a response, and belong to it."""

    skip_special_tokens: bool = True
    """Whether the text is without special tokens."""

    no_stop_trim: bool = False
    """Whether the text has the stop token or stop string at its end."""

    spaces_between_special_tokens: bool = True
    """Whether slow tokenizers put spaces between special tokens in the text."""


def request_options(params: Mapping[str, Any] | None, sampling: Sampling) -> RequestOptions:
    """The options of a request that has `sampling_params` of its own.

    Args:
        params: As `TokenEngine.generate` takes them.
        sampling: The run's own, for what is left out.

    Raises:
        ValueError: A name is unknown, a value is not possible, or samples for training would be drawn from another
            distribution than the run's.
    """
    given = {name: value for name, value in (params or {}).items() if value is not None}
    unknown = [name for name in given if name not in PARSERS]
    if unknown:
        raise ValueError(f"sampling_params has {quoted(unknown[0])}, but the names are {', '.join(PARSERS)}.")
    values = {name: PARSERS[name](name, value) for name, value in given.items()}
    for name in DISTRIBUTION:
        own = getattr(sampling, name)
        if sampling.for_training and values.get(name, own) != own:
            raise ValueError(
                f"sampling_params has {name} {values[name]:g}, but the run samples with {own:g}: the log-probs would "
                "not be those of the distribution that training computes; leave it out."
            )
    changed = {name: values[name] for name in (*DISTRIBUTION, "stop_token_ids") if name in values}
    limit = values.get("max_new_tokens", sampling.max_response_len)
    text = {name: value for name, value in values.items() if name in RequestOptions.__dataclass_fields__}
    return RequestOptions(sampling=replace(sampling, max_response_len=limit, **changed), **text)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.floating, np.integer)):
        raise ValueError(f"sampling_params has {name} {quoted(value)} but it must be a number.")
    return float(value)


def _whole_number(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ValueError(f"sampling_params has {name} {quoted(value)} but it must be a whole number.")
    return int(value)


def _tokens_to_sample(name: str, value: Any) -> int:
    number = _whole_number(name, value)
    if number < 1:
        raise ValueError(f"sampling_params has {name} {number} but it must be 1 or more.")
    return number


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"sampling_params has {name} {quoted(value)} but it must be True or False.")
    return value


def _strings(name: str, value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"sampling_params has {name} {quoted(value)} but it must be a text or a list of texts.")
    return tuple(dict.fromkeys(texts))


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"sampling_params has {name} {quoted(value)} but it must be a list of token ids.")
    return tuple(_whole_number(name, token) for token in value)


PARSERS: dict[str, Callable[[str, Any], Any]] = {
    "temperature": _number,
    "top_p": _number,
    "top_k": _whole_number,
    "max_new_tokens": _tokens_to_sample,
    "stop": _strings,
    "stop_token_ids": _token_ids,
    "skip_special_tokens": _boolean,
    "no_stop_trim": _boolean,
    "spaces_between_special_tokens": _boolean,
}
"""What `sampling_params` may have, and how each value is checked."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request to an engine."""

    token_ids: list[int]
    """The input."""

    options: RequestOptions

    key: bytes
    """16 bytes that its random numbers follow from."""

    session: tuple[int, str | None]
    """The sample that asks and the name of its conversation."""


@dataclass(frozen=True, kw_only=True)
class SampleKey:
    """What the random numbers of a sample follow from, besides the inputs of its requests."""

    seed: int
    """Of the rollout."""

    prompt_index: int
    """Of the prompt in its file."""

    occurrence: int
    """How often the same prompt occurs earlier in the batch."""

    sample: int
    """Place of the sample among those of its prompt."""


class SampleEngine:
    """The `TokenEngine` that one call of a rollout function gets.

    The random numbers of a request follow from the sample's key, the input, and how often this sample asked with the
    same input before: neither the order of arrival nor any other sample matters.
    """

    def __init__(
        self,
        answer: Callable[[Request], Awaitable[Generation]],
        sampling: Sampling,
        key: SampleKey,
        *,
        number: int,
        vocab_size: int | None,
    ) -> None:
        """Asks nothing yet.

        Args:
            answer: Answers one request.
            sampling: The run's own.
            key: Of the sample.
            number: Of the sample in the rollout.
            vocab_size: Number of token ids of the model; None checks none.
        """
        self._answer, self._sampling, self._key, self._number = answer, sampling, key, number
        self._vocab_size = vocab_size
        self._asked: Counter[bytes] = Counter()

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling_params: Mapping[str, Any] | None = None,
        *,
        session_id: str | None = None,
    ) -> Generation:
        """Samples what follows some tokens; see `TokenEngine`."""
        options = request_options(sampling_params, self._sampling)
        ids = [operator.index(token) for token in token_ids]
        if not ids:
            raise ValueError("token_ids is empty, but sampling needs at least one token to follow.")
        if self._vocab_size is not None and not 0 <= min(ids) <= max(ids) < self._vocab_size:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise ValueError(
                f"token_ids has {wrong}, but the model's vocabulary ends at {self._vocab_size - 1}; use the tokenizer "
                "of --hf-checkpoint."
            )
        digest = input_digest(self._key, ids)
        repetition = self._asked[digest]
        self._asked[digest] += 1
        key = hashlib.blake2b(digest + repetition.to_bytes(8, "little"), digest_size=16).digest()
        session = self._number, session_id
        return await self._answer(Request(token_ids=ids, options=options, key=key, session=session))


def input_digest(key: SampleKey, token_ids: Sequence[int]) -> bytes:
    """32 bytes that differ for other samples and other inputs."""
    numbers = [key.seed, key.prompt_index, key.occurrence, key.sample, *token_ids]
    return hashlib.blake2b(np.asarray(numbers, dtype="<i8").tobytes(), digest_size=32).digest()


def request_uniforms(key: bytes) -> Iterator[float]:
    """The uniforms in [0, 1) that the tokens of a request are drawn with, one after the other, without an end."""
    generator = np.random.Generator(np.random.Philox(key=np.frombuffer(key, dtype="<u8")))
    while True:
        yield from generator.random(UNIFORMS_AT_A_TIME).tolist()


class StopStrings:
    """Finds the first of some texts at the end of a growing response."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
        """Prepares for these texts; none is never found."""
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._last_characters = {text[-1] for text in stop}
        self._always = any(character.isspace() for character in self._last_characters)
        self._may_complete: dict[int, bool] = {}
        self._tail = max((len(text.encode()) for text in stop), default=0) + 1

    def found(self, token_ids: Sequence[int]) -> bool:
        """Whether the last token completes one of the texts, given that none was there before it.

        A text that the last token completes ends within that token, and begins at most as many tokens earlier as it has
        bytes. Tokens that are a part of a character decode to the replacement character and are always looked at.
        """
        if not self._stop or not self._can_complete(token_ids[-1]):
            return False
        text = self._tokenizer.decode(list(token_ids[-self._tail :]))
        return any(stop in text for stop in self._stop)

    def first(self, token_ids: Sequence[int]) -> int | None:
        """Number of tokens up to the first of the texts; None where none is in the response."""
        return next((end for end in range(1, len(token_ids) + 1) if self.found(token_ids[:end])), None)

    def _can_complete(self, token: int) -> bool:
        if token not in self._may_complete:
            text = self._tokenizer.decode([token])
            ends = self._always or "\ufffd" in text or any(last in text for last in self._last_characters)
            self._may_complete[token] = ends
        return self._may_complete[token]


def response_text(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], options: RequestOptions, finish_reason: FinishReason
) -> str:
    """The text of a response, as the request asked for it.

    Args:
        tokenizer: Of the model.
        token_ids: Of the whole response.
        options: Of the request.
        finish_reason: Why the response ended; after a stop the text ends before it, unless `no_stop_trim` is given.
    """
    trims = finish_reason == "stop" and not options.no_stop_trim
    text = _decoded(tokenizer, token_ids, options)
    if not trims:
        return text
    places = [place for place in map(text.find, options.stop) if place >= 0]
    return text[: min(places)] if places else _decoded(tokenizer, token_ids[:-1], options)


def _decoded(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], options: RequestOptions) -> str:
    text: str = tokenizer.decode(
        list(token_ids),
        skip_special_tokens=options.skip_special_tokens,
        spaces_between_special_tokens=options.spaces_between_special_tokens,
    )
    return text
