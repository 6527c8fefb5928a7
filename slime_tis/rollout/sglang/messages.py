"""What is said to an SGLang server and what it answers; pure functions, checked against answers of real servers.

Nothing in an answer is believed unchecked: a server may be broken, another program, or run another model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

from slime_tis.rollout.sample import FinishReason, Sampling

FINISH_REASONS = ("stop", "length", "abort")
LARGEST_LOG_PROB = 1e-3
"""A probability of 1 may come out a little above it in half precision; what exceeds this is no log-prob."""
BYTES_PER_TOKEN = 256
"""Most of an answer that one token takes, in bytes, averaged over the answer: its id, its log-prob at full precision, a
span of weight versions and its text, which real answers put into 50 to 80."""
ANSWER_BYTES = 256 << 10
"""Of an answer besides its tokens, at most, in bytes."""
LONGEST_SHOWN = 80
"""Characters of a value in a message."""
LONGEST_NAME = 128
"""Characters of a name of weights."""
LARGEST_VERSION = 2**53
LARGEST_COUNT = 1 << 16
"""Ranks of one kind that a server can have."""
LONGEST_CONTEXT = 1 << 32
"""Tokens."""
NEUTRAL = {"min_p": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
"""Sent along, so that defaults of the server or of the checkpoint cannot change the distribution."""


class MalformedAnswer(ValueError):
    """An answer that a sample cannot be made of; the words say what is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What a server sampled in one request."""

    token_ids: list[int]
    """Sampled tokens, the stop token included."""

    log_probs: list[float]
    """Log-probability of each, after temperature."""

    versions: list[int] | None
    """Version of the weights that sampled each, or None where the server tells none."""

    has_spans: bool
    """Whether the versions were told token by token, and not one for all."""

    finish_reason: FinishReason
    """Why it ended."""

    text: str | None
    """The tokens' text, where the server has a tokenizer."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a server says about itself."""

    version: str | None = None
    """Of SGLang."""

    weight_version: str | None = None
    """Name of the weights in use; "default" where they are those it started with."""

    longest_input: int | None = None
    """Most tokens that it takes, where it tells."""

    tp_size: int = 1
    """Tensor-parallel ranks."""

    pp_size: int = 1
    """Pipeline-parallel ranks."""

    dp_size: int = 1
    """Replicas behind one address."""

    is_deterministic: bool = False
    """Whether it samples with the seed that a request names, under --enable-deterministic-inference."""


def generate_payload(
    input_ids: Sequence[int], sampling: Sampling, *, limit: int, request_id: str, seed: int | None = None
) -> dict[str, object]:
    """The body of POST /generate for one sample.

    Args:
      input_ids: the prompt, and what has been sampled of its response.
      sampling: how to sample.
      limit: most tokens that may still be sampled.
      request_id: to abort it by. The server aborts all that begin with the same characters, so that ids must have
        one width.
      seed: of the response, for a server that takes one: the token at a place follows from seed, place and weights.
    """
    parameters: dict[str, object] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": limit,
        **NEUTRAL,
    }
    if sampling.stop_token_ids:
        parameters["stop_token_ids"] = list(sampling.stop_token_ids)
    if seed is not None:
        parameters["sampling_seed"] = seed
    return {
        "rid": request_id,
        "input_ids": list(input_ids),
        "sampling_params": parameters,
        "return_logprob": True,
    }


def scoring_payload(input_ids: Sequence[int]) -> dict[str, object]:
    """The body of POST /generate that asks for the log-probs of given tokens and samples none."""
    return {
        "input_ids": list(input_ids),
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 0, **NEUTRAL},
        "return_logprob": True,
        "logprob_start_len": 0,
    }


def answer_bytes(payload: Mapping[str, object]) -> int:
    """The largest answer to POST /generate that a server can have good reason to give, in bytes.

    `ANSWER_BYTES` + `BYTES_PER_TOKEN` · (tokens to sample + tokens to score). Decoding that much JSON holds up the
    other requests of the loop for less than half a second at 32,768 tokens.

    Args:
      payload: of `generate_payload` or `scoring_payload`.
    """
    tokens = cast(Mapping[str, int], payload["sampling_params"])["max_new_tokens"]
    if "logprob_start_len" in payload:
        tokens += len(cast(Sequence[int], payload["input_ids"]))
    return ANSWER_BYTES + BYTES_PER_TOKEN * tokens


def parse_generation(
    answer: object, *, limit: int, vocab_size: int | None = None, default_version: int = 0
) -> Completion:
    """Takes the answer to `generate_payload` apart, and believes none of it unchecked.

    Args:
      answer: decoded JSON.
      limit: most tokens that were asked for; fewer may come, at the end of the context.
      vocab_size: ids that the model has; None does not look.
      default_version: of weights whose name is no number, which are those the server started with.

    Raises:
      MalformedAnswer: log-probs are missing, too few, NaN, null or positive, belong to other tokens, tokens lie
        outside of the vocabulary, or versions do not cover the tokens or go backwards.
    """
    meta = _mapping(_field(answer, "meta_info"), "meta_info")
    reason = _mapping(_field(meta, "finish_reason"), "finish_reason").get("type")
    if reason not in FINISH_REASONS:
        raise MalformedAnswer(f"finish_reason is {shown(reason)}")
    output_ids = _mapping(answer, "the answer").get("output_ids")
    found = [] if output_ids == [] else _field(meta, "output_token_logprobs")
    entries = _sequence(found, "output_token_logprobs")
    token_ids = [_entry(entry)[1] for entry in entries] if output_ids is None else _token_ids(output_ids)
    _check_vocabulary(token_ids, vocab_size)
    log_probs = _log_probs(entries, token_ids)
    told = meta.get("completion_tokens")
    if told is not None and told != len(token_ids):
        raise MalformedAnswer(f"it has {len(token_ids)} tokens and says that they are {shown(told)}")
    if len(token_ids) > limit:
        raise MalformedAnswer(f"it has {len(token_ids)} tokens where {limit} were asked for")
    if not token_ids and reason != "abort":
        raise MalformedAnswer(f"it has no tokens but finish_reason {reason!r}")
    text = _mapping(answer, "the answer").get("text")
    return Completion(
        token_ids=token_ids,
        log_probs=log_probs,
        versions=_versions(meta, len(token_ids), default_version),
        has_spans=meta.get("weight_versions") is not None,
        finish_reason=cast(FinishReason, reason),
        text=text if isinstance(text, str) else None,
    )


def parse_scores(answer: object, token_ids: Sequence[int]) -> list[float]:
    """The log-probs, at temperature 1, of all given tokens but the first, each after those before it.

    Raises:
      MalformedAnswer: as for `parse_generation`.
    """
    meta = _mapping(_field(answer, "meta_info"), "meta_info")
    entries = _sequence(_field(meta, "input_token_logprobs"), "input_token_logprobs")
    return _log_probs(entries[1:], list(token_ids[1:]))


def parse_info(model_info: Mapping[str, object], server_info: Mapping[str, object]) -> Capabilities:
    """What /model_info and /server_info say; the latter also holds the API key, and is not to be logged.

    The weight version stands in the former: the latter keeps that of the start.

    Raises:
      MalformedAnswer: sizes that no server has, or a name of weights that cannot be one.
    """
    longest = server_info.get("max_req_input_len")
    version, weight_version = server_info.get("version"), model_info.get("weight_version")
    if weight_version is not None:
        version_number(weight_version)
    return Capabilities(
        version=None if version is None else shown(version).strip("'"),
        weight_version=None if weight_version is None else str(weight_version),
        longest_input=None if longest is None else _count(longest, "max_req_input_len", LONGEST_CONTEXT) - 1,
        is_deterministic=server_info.get("enable_deterministic_inference") is True,
        **{
            name: 1 if server_info.get(name) is None else _count(server_info[name], name, LARGEST_COUNT)
            for name in ("tp_size", "pp_size", "dp_size")
        },
    )


def version_number(name: object, default_version: int = 0) -> int:
    """Our version of the weights that a server names: a decimal number, else those it started with.

    Raises:
      MalformedAnswer: the name is neither of the two: no text, far too long, or a number that no version has.
    """
    if name is None:
        return default_version
    if type(name) is int:
        name = str(name) if 0 <= name <= LARGEST_VERSION else "-1"
    if not isinstance(name, str) or len(name) > LONGEST_NAME:
        raise MalformedAnswer(f"the name of its weights is {shown(name)}")
    if name.isascii() and name.isdecimal() and int(name) <= LARGEST_VERSION:
        return int(name)
    if name.isascii() and name.lstrip("+-").replace(".", "", 1).isdecimal():
        raise MalformedAnswer(f"the version of its weights is {shown(name)}")
    return default_version


def shown(value: object, longest: int = LONGEST_SHOWN) -> str:
    """A value of an answer for a message: its repr, in which control characters are escaped, cut."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested deeply, or a number of thousands of digits
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= longest else text[:longest] + "…"


def _count(value: object, name: str, largest: int) -> int:
    if type(value) is not int or not 0 < value <= largest:
        raise MalformedAnswer(f"{name} is {shown(value)}")
    return value


def _field(answer: object, name: str) -> object:
    mapping = _mapping(answer, "the answer")
    if mapping.get(name) is None:
        raise MalformedAnswer(f"it has no {name}")
    return mapping[name]


def _mapping(value: object, name: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise MalformedAnswer(f"{name} is no JSON object but {type(value).__name__}")
    return value


def _sequence(value: object, name: str) -> list[object]:
    if not isinstance(value, list):
        raise MalformedAnswer(f"{name} is no list but {type(value).__name__}")
    return value


def _token_ids(value: object) -> list[int]:
    ids = _sequence(value, "output_ids")
    for token in ids:
        if type(token) is not int or token < 0:
            raise MalformedAnswer(f"output_ids has {shown(token)}")
    return cast(list[int], ids)


def _check_vocabulary(token_ids: Sequence[int], vocab_size: int | None) -> None:
    if vocab_size is None or not token_ids or max(token_ids) < vocab_size:
        return
    raise MalformedAnswer(
        f"it has token {shown(max(token_ids))}, but the vocabulary of --hf-checkpoint ends at {vocab_size - 1}; see "
        "that the server runs the same model"
    )


def _log_probs(entries: list[object], token_ids: list[int]) -> list[float]:
    """The first of every [log-prob, token, text], after checking that they are those of the tokens."""
    if len(entries) != len(token_ids):
        raise MalformedAnswer(f"it has {len(entries)} log-probs for {len(token_ids)} tokens")
    log_probs = []
    for place, (entry, token_id) in enumerate(zip(entries, token_ids, strict=True)):
        log_prob, of_token = _entry(entry)
        if of_token != token_id:
            raise MalformedAnswer(f"log-prob {place} is of token {shown(of_token)}, but the token is {token_id}")
        if not math.isfinite(log_prob) or log_prob > LARGEST_LOG_PROB:
            raise MalformedAnswer(f"log-prob {place} is {log_prob}")
        log_probs.append(min(log_prob, 0.0))
    return log_probs


def _entry(entry: object) -> tuple[float, int]:
    match entry:
        case [float() | int() as log_prob, int() as token_id, *_] if not (
            isinstance(log_prob, bool) or isinstance(token_id, bool)
        ):
            with suppress(OverflowError):  # an integer of hundreds of digits
                return float(log_prob), token_id
    raise MalformedAnswer(f"a log-prob is {shown(entry)}")


def _versions(meta: Mapping[str, object], length: int, default_version: int) -> list[int] | None:
    spans = meta.get("weight_versions")
    if spans is None:
        name = meta.get("weight_version")
        return None if name is None else [version_number(name, default_version)] * length
    versions: list[int] = []
    newest = 0
    for span in _sequence(spans, "weight_versions"):
        match span:
            case {"version": name, "start": int() as start, "end": int() as end} if start == len(versions) <= end:
                version = version_number(name, default_version)
            case _:
                raise MalformedAnswer(f"weight_versions has {shown(span)} after {len(versions)} tokens")
        if end > length:
            raise MalformedAnswer(f"weight_versions covers {shown(end)} tokens of {length}")
        if version < newest:
            raise MalformedAnswer(f"weight_versions goes back from {newest} to {version}")
        versions += [version] * (end - start)
        newest = version
    if len(versions) != length:
        raise MalformedAnswer(f"weight_versions covers {len(versions)} tokens of {length}")
    return versions
