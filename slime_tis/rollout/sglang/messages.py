"""What is said to an SGLang server and what it answers; pure functions, checked against answers of real servers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from slime_tis.rollout.sample import FinishReason, Sampling

FINISH_REASONS = ("stop", "length", "abort")
LARGEST_LOG_PROB = 1e-3
"""A probability of 1 may come out a little above it in half precision; what exceeds this is no log-prob."""
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


def generate_payload(input_ids: Sequence[int], sampling: Sampling, *, limit: int, request_id: str) -> dict[str, object]:
    """The body of POST /generate for one sample.

    Args:
      input_ids: the prompt, and what has been sampled of its response.
      sampling: how to sample.
      limit: most tokens that may still be sampled.
      request_id: to abort it by. The server aborts all that begin with the same characters, so that ids must have
        one width.
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


def parse_generation(answer: object, *, limit: int, default_version: int = 0) -> Completion:
    """Takes the answer to `generate_payload` apart, and believes none of it unchecked.

    Args:
      answer: decoded JSON.
      limit: most tokens that were asked for; fewer may come, at the end of the context.
      default_version: of weights whose name is no number, which are those the server started with.

    Raises:
      MalformedAnswer: log-probs are missing, too few, NaN, null or positive, belong to other tokens, or versions do
        not cover the tokens.
    """
    meta = _mapping(_field(answer, "meta_info"), "meta_info")
    reason = _mapping(_field(meta, "finish_reason"), "finish_reason").get("type")
    if reason not in FINISH_REASONS:
        raise MalformedAnswer(f"finish_reason is {reason!r}")
    output_ids = _mapping(answer, "the answer").get("output_ids")
    found = [] if output_ids == [] else _field(meta, "output_token_logprobs")
    entries = _sequence(found, "output_token_logprobs")
    token_ids = [_entry(entry)[1] for entry in entries] if output_ids is None else _token_ids(output_ids)
    log_probs = _log_probs(entries, token_ids)
    told = meta.get("completion_tokens")
    if told is not None and told != len(token_ids):
        raise MalformedAnswer(f"it has {len(token_ids)} tokens and says that they are {told}")
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
    """
    longest = server_info.get("max_req_input_len")
    version, weight_version = server_info.get("version"), model_info.get("weight_version")
    return Capabilities(
        version=None if version is None else str(version),
        weight_version=None if weight_version is None else str(weight_version),
        longest_input=longest - 1 if isinstance(longest, int) else None,
        **{name: _count(server_info.get(name)) for name in ("tp_size", "pp_size", "dp_size")},
    )


def version_number(name: str | None, default_version: int = 0) -> int:
    """Our version of the weights that a server names: a decimal number, else those it started with."""
    return int(name) if name is not None and name.isascii() and name.isdecimal() else default_version


def _count(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 1


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
            raise MalformedAnswer(f"output_ids has {token!r}")
    return cast(list[int], ids)


def _log_probs(entries: list[object], token_ids: list[int]) -> list[float]:
    """The first of every [log-prob, token, text], after checking that they are those of the tokens."""
    if len(entries) != len(token_ids):
        raise MalformedAnswer(f"it has {len(entries)} log-probs for {len(token_ids)} tokens")
    log_probs = []
    for place, (entry, token_id) in enumerate(zip(entries, token_ids, strict=True)):
        log_prob, of_token = _entry(entry)
        if of_token != token_id:
            raise MalformedAnswer(f"log-prob {place} is of token {of_token}, but the token is {token_id}")
        if not math.isfinite(log_prob) or log_prob > LARGEST_LOG_PROB:
            raise MalformedAnswer(f"log-prob {place} is {log_prob}")
        log_probs.append(min(log_prob, 0.0))
    return log_probs


def _entry(entry: object) -> tuple[float, int]:
    match entry:
        case [float() | int() as log_prob, int() as token_id, *_] if not isinstance(log_prob, bool):
            return float(log_prob), token_id
    raise MalformedAnswer(f"a log-prob is {str(entry)[:60]}")


def _versions(meta: Mapping[str, object], length: int, default_version: int) -> list[int] | None:
    spans = meta.get("weight_versions")
    if spans is None:
        name = meta.get("weight_version")
        return None if name is None else [version_number(str(name), default_version)] * length
    versions: list[int] = []
    for span in _sequence(spans, "weight_versions"):
        match span:
            case {"version": name, "start": int() as start, "end": int() as end} if start == len(versions) <= end:
                versions += [version_number(str(name), default_version)] * (end - start)
            case _:
                raise MalformedAnswer(f"weight_versions has {str(span)[:80]} after {len(versions)} tokens")
    if len(versions) != length:
        raise MalformedAnswer(f"weight_versions covers {len(versions)} tokens of {length}")
    return versions
