"""The servers behind an SGLang router, which take weights and control each by itself."""

from __future__ import annotations

import re
from typing import Any

import httpx

from slime_tis.rollout.sglang.client import CONTROL_BYTES, Answer, UnusableAnswer, fetch
from slime_tis.rollout.sglang.config import normalized_url

RANK = re.compile(r"@\d+$")
"""What a router that knows data-parallel ranks puts after a server's URL."""
CHECK_PORT = "check --sglang-router-port."


async def workers_of(client: httpx.AsyncClient, router_url: str) -> tuple[str, ...]:
    """The URLs of a router's servers: /workers, or /list_workers of routers before 0.2.2.

    Args:
      client: with the key, if there is one.
      router_url: as `SGLangConfig.router_url`.

    Raises:
      ValueError: no router answers there, it refuses, or it has no servers.
    """
    try:
        answer = await fetch(client, "GET", f"{router_url}/workers", None, limit=CONTROL_BYTES)
        if answer.status in (404, 405):
            answer = await fetch(client, "GET", f"{router_url}/list_workers", None, limit=CONTROL_BYTES)
    except UnusableAnswer as error:
        raise ValueError(f"the SGLang router at {router_url} gave an answer that {error}; {CHECK_PORT}") from None
    except (httpx.HTTPError, OSError) as error:
        raise ValueError(
            f"no SGLang router answers at {router_url} ({type(error).__name__}); check --sglang-router-ip and "
            "--sglang-router-port."
        ) from None
    if answer.status != 200:
        raise ValueError(
            f"the SGLang router at {router_url} does not name its servers (HTTP {answer.status}); give them with "
            "--sglang-url."
        )
    urls = _urls(answer, router_url)
    if not urls:
        raise ValueError(f"the SGLang router at {router_url} has no servers; add some to it.")
    return urls


def _urls(answer: Answer, router_url: str) -> tuple[str, ...]:
    """Reads {"workers": [{"url": …}, …]} or {"urls": [ … ]}; each server once."""
    try:
        body: Any = answer.json()
        found = body["urls"] if "urls" in body else [worker["url"] for worker in body["workers"]]
        return tuple(dict.fromkeys(normalized_url(RANK.sub("", url)) for url in found))
    except (UnusableAnswer, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{router_url} answers, but not as an SGLang router does; {CHECK_PORT}") from error
