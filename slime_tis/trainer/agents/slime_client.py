"""The engine of one sample, and slime's functions that reach it: `post` and `GenerateState`.

The sample's engine answers requests to the run's address. Therefore slime's functions work with
every engine, and their tokens can be compared with the sampled tokens. Requests to other addresses
are sent.
"""

import asyncio
import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

import httpx
from transformers import PreTrainedTokenizerBase

from slime_tis.errors import first_line
from slime_tis.trainer.agents.sampled_tokens import Sampled
from slime_tis.trainer.data.sample import Sample
from slime_tis.trainer.engines.function_requests import Generation, TokenEngine
from slime_tis.trainer.engines.local.load_model import load_tokenizer
from slime_tis.trainer.engines.plain_body import PLAIN, read_plain

LOCAL_ADDRESS = ("127.0.0.1", 0)
"""Address of an engine without a server; nobody can connect to port 0."""
TIMEOUT = 600.0
"""Longest wait for another server's answer, in seconds."""
MAX_ANSWER_BYTES = 64 << 20
"""Longest answer of another server, such as a tool, in bytes."""
CLOSED_PAUSE = 0.5
"""Seconds before a late request is refused: a function that retries forever must not occupy the
loop."""


class RecordedEngine:
    """The engine of one call: records sampled tokens, and answers slime's `POST /generate`."""

    def __init__(
        self, engine: TokenEngine, sample: Sample, tokenizer: PreTrainedTokenizerBase, address: str
    ) -> None:
        """Wraps an engine; the response of an aborted sample counts as sampled.

        Args:
            engine: Samples the tokens.
            sample: The function's input.
            tokenizer: Encodes requests with text.
            address: HOST:PORT of the run's servers.
        """
        self._engine = engine
        self._tokenizer = tokenizer
        self.address = address
        self.sampled: list[Sampled] = []
        if sample.response_length:
            earlier = Sampled(
                input_ids=list(sample.prompt_ids),
                generation=Generation.of(sample),
                is_trained=sample.loss_mask[:],
            )
            self.sampled.append(earlier)
        self.is_closed = False
        """Whether requests are refused because the function ran out of time."""

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling_params: Mapping[str, Any] | None = None,
        *,
        session_id: str | None = None,
    ) -> Generation:
        """Samples the continuation of some tokens; see `TokenEngine`."""
        if self.is_closed:
            await asyncio.sleep(CLOSED_PAUSE)
            raise RuntimeError("this sample ran out of time (--generate-timeout).")
        generation = await self._engine.generate(token_ids, sampling_params, session_id=session_id)
        input_ids = [int(token) for token in token_ids]
        self.sampled.append(Sampled(input_ids=input_ids, generation=generation))
        # Copies, because the function may change the lists in place.
        return replace(
            generation,
            token_ids=list(generation.token_ids),
            log_probs=list(generation.log_probs),
            weight_versions=list(generation.weight_versions),
            workers=list(generation.workers),
        )

    async def post(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Answers a request as an SGLang server answers `POST /generate` with return_logprob.

        Raises:
            ValueError: The request has neither `input_ids` nor `text`.
        """
        ids = payload.get("input_ids")
        if ids is None:
            if not isinstance(payload.get("text"), str):
                raise ValueError(
                    "a request to the engine needs input_ids, a list of token ids, or text."
                )
            ids = self._tokenizer.encode(payload["text"])
        generation = await self.generate(ids, payload.get("sampling_params"))
        pairs = zip(generation.log_probs, generation.token_ids, strict=True)
        versions = []
        for index, version in enumerate(generation.weight_versions):
            versions.append({"version": str(version), "start": index, "end": index + 1})
        meta: dict[str, Any] = {
            "finish_reason": {"type": generation.finish_reason},
            "prompt_tokens": len(ids),
            "completion_tokens": len(generation.token_ids),
            "cached_tokens": 0,
            "output_token_logprobs": [[log_prob, token, None] for log_prob, token in pairs],
            "weight_versions": versions,
        }
        if versions:
            meta["weight_version"] = versions[-1]["version"]
        if generation.sampling_mask is not None:
            meta["output_token_sampling_mask"] = generation.sampling_mask.sets()
        return {"text": generation.text, "output_ids": generation.token_ids, "meta_info": meta}


current_engine: ContextVar[RecordedEngine | None] = ContextVar("current_engine", default=None)


async def post(
    url: str,
    payload: Mapping[str, Any],
    max_retries: int = 60,
    headers: Mapping[str, str] | None = None,
) -> Any:
    """Posts JSON and returns the JSON answer.

    The engine of the running call answers requests to the run's address. As in slime, other
    requests are repeated after an error, up to `max_retries` times. An answer that is not JSON,
    compressed or larger than `MAX_ANSWER_BYTES` is an error, too.

    Raises:
        httpx.HTTPError: The last error.
    """
    engine = current_engine.get()
    if engine is not None:
        parts = urlsplit(url)
        if parts.netloc == engine.address and parts.path.rstrip("/") == "/generate":
            return await engine.post(payload)
    return await _request("POST", url, max_retries, json=payload, headers=headers)


async def get(url: str) -> Any:
    """Returns the JSON answer to a GET request."""
    return await _request("GET", url, 0)


async def _request(method: str, url: str, retries: int, **options: Any) -> Any:
    """Returns the JSON answer to a request, which is repeated after an error."""
    async with httpx.AsyncClient(timeout=TIMEOUT) as client:
        while True:
            try:
                return await _answer(client, method, url, options)
            except httpx.HTTPError:
                if retries < 1:
                    raise
            retries -= 1
            await asyncio.sleep(1)


async def _answer(
    client: httpx.AsyncClient, method: str, url: str, options: Mapping[str, Any]
) -> Any:
    """Returns the JSON answer to one request; raises httpx.HTTPError."""
    headers = {**(options.get("headers") or {}), **PLAIN}
    async with client.stream(method, url, **{**options, "headers": headers}) as response:
        response.raise_for_status()
        body = await read_plain(response, MAX_ANSWER_BYTES)
    if len(body) > MAX_ANSWER_BYTES:
        raise httpx.DecodingError(f"{url} answered with more than {MAX_ANSWER_BYTES} bytes.")
    try:
        return json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise httpx.DecodingError(
            f"the answer of {url} is not JSON: {first_line(error)}."
        ) from error


class GenerateState:
    """Stands for slime's `GenerateState`; functions use its tokenizer."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.tokenizer = _tokenizer(str(args.hf_checkpoint))
        self.processor = None
        self.aborted = False


_tokenizer = lru_cache(maxsize=4)(load_tokenizer)
