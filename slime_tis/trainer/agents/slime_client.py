"""slime's way to the rollout engine, for functions written for slime: `post` to the address in `args`, `GenerateState`.

The engine of the asking sample answers requests to the run's address, for every kind of engine. So these functions
work with the local engine, and their training tokens can be compared with the sampled tokens. Requests to other
addresses are sent.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx

from slime_tis.trainer.engines.generation import Generation, TokenEngine
from slime_tis.trainer.engines.local.checkpoint import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOCAL_ADDRESS = ("127.0.0.1", 0)
"""Address of the engine where the run has no servers; port 0 can be connected to by nobody."""
TIMEOUT = 600.0
"""Longest wait for another server's answer, in seconds."""


@dataclass(frozen=True)
class SlimeEngine:
    """The engine of one sample, asked as SGLang's `POST /generate` is."""

    engine: TokenEngine
    tokenizer: PreTrainedTokenizerBase
    netloc: str = ""
    """Host and port of the run's own address."""

    async def post(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """The answer in the form of a server's.

        Args:
            payload: With `input_ids`, or with `text`, which is tokenized as a server tokenizes it; `sampling_params`.

        Raises:
            ValueError: Neither of the two, or parameters that are not possible.
        """
        ids = payload.get("input_ids")
        if ids is None:
            if not isinstance(payload.get("text"), str):
                raise ValueError("a request to the engine needs input_ids, a list of token ids, or text.")
            ids = self.tokenizer.encode(payload["text"])
        found = await self.engine.generate(ids, payload.get("sampling_params"))
        return answer(found, len(ids))


current_engine: ContextVar[SlimeEngine | None] = ContextVar("current_engine", default=None)
"""The engine of the sample that the running coroutine makes."""


def answer(found: Generation, prompt_tokens: int) -> dict[str, Any]:
    """What a server answers to `POST /generate` with return_logprob, of one response."""
    versions = found.weight_versions
    meta: dict[str, Any] = {
        "finish_reason": {"type": found.finish_reason},
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(found.token_ids),
        "cached_tokens": 0,
        "output_token_logprobs": [
            [log_prob, token, None] for log_prob, token in zip(found.log_probs, found.token_ids, strict=True)
        ],
        "weight_versions": [
            {"version": str(version), "start": place, "end": place + 1} for place, version in enumerate(versions)
        ],
    }
    if versions:
        meta["weight_version"] = str(versions[-1])
    if found.sampling_mask is not None:
        meta["output_token_sampling_mask"] = found.sampling_mask.sets()
    return {"text": found.text, "output_ids": list(found.token_ids), "meta_info": meta}


async def post(
    url: str, payload: Mapping[str, Any], max_retries: int = 60, headers: Mapping[str, str] | None = None
) -> Any:
    """Posts JSON and returns the JSON that is answered; the run's own engine answers what is posted to its address.

    Args:
        url: Address.
        payload: The request.
        max_retries: Number of tries after the first, a second apart.
        headers: Sent along.

    Raises:
        httpx.HTTPError: No try was answered.
        ValueError: The engine refuses the request.
    """
    engine, parts = current_engine.get(), urlsplit(url)
    if engine is not None and parts.netloc == engine.netloc and parts.path.rstrip("/") == "/generate":
        return await engine.post(payload)
    return await _request("POST", url, max_retries, json=payload, headers=headers)


async def get(url: str) -> Any:
    """The JSON that is answered to a GET request."""
    return await _request("GET", url, 0)


async def _request(method: str, url: str, retries: int, **options: Any) -> Any:
    async with httpx.AsyncClient(timeout=TIMEOUT) as client:
        while True:
            try:
                response = await client.request(method, url, **options)
                response.raise_for_status()
                return response.json()
            except httpx.HTTPError:
                if retries < 1:
                    raise
            retries -= 1
            await asyncio.sleep(1)


class GenerateState:
    """What slime's functions ask of its `GenerateState`: the tokenizer."""

    def __init__(self, args: Namespace) -> None:
        """Loads the tokenizer of `args.hf_checkpoint` the first time."""
        self.args = args
        self.tokenizer = _tokenizer(str(args.hf_checkpoint))
        self.processor = None
        self.aborted = False


@lru_cache(maxsize=4)
def _tokenizer(path: str) -> PreTrainedTokenizerBase:
    return load_tokenizer(path)
