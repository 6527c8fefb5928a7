"""An SGLang or vLLM server, which reveals log-probs only."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pkgutil import resolve_name

import torch

from slime_tis.errors import quoted
from slime_tis.parity.executions import Record, Side
from slime_tis.parity.recording import Recording
from slime_tis.parity.samples import Samples
from slime_tis.trainer.configs.servers import ServerConfig, server_config
from slime_tis.trainer.engines.servers.api import ServerApi, served_model
from slime_tis.trainer.engines.servers.client import Server, make_client
from slime_tis.trainer.engines.servers.errors import RequestError


def check(side: Side) -> None:
    """Asks the server for its model and its adapters, but for no log-probs.

    Raises:
        ValueError: The server does not answer, refuses, or lacks the adapter.
    """
    config = server_config(side.execution, url=(side.url,))
    with _advising(config):
        asyncio.run(_ask(config, _api(config, side), []))


@contextmanager
def opened(side: Side) -> Iterator[Record]:
    """Yields the execution of a running server.

    Raises:
        ValueError: The server does not answer, or refuses.
    """
    config = server_config(side.execution, url=(side.url,))
    api = _api(config, side)

    def record(samples: Samples, substitutes: Recording | None = None) -> Recording:
        with _advising(config):
            precision, rows = asyncio.run(_ask(config, api, samples.tokens))
        log_probs_T = torch.full([samples.total], torch.nan)
        log_probs_T[samples.predicted] = torch.tensor(list(chain.from_iterable(rows)))
        return Recording(
            name=side.execution,
            precision=precision,
            log_probs_T=log_probs_T,
            is_scored_T=samples.predicted,
        )

    yield record


def _api(config: ServerConfig, side: Side) -> ServerApi:
    """Returns the engine's protocol, whose requests name the adapter that the server loaded."""
    model = served_model(side.checkpoint, records_experts=False)
    api: ServerApi = resolve_name(config.entry.api)(model=model)
    if side.served_adapter:
        api = api.with_adapter(side.served_adapter)
    return api


@contextmanager
def _advising(config: ServerConfig) -> Iterator[None]:
    """Replaces failures of requests by a ValueError with advice."""
    try:
        yield
    except RequestError as error:
        raise ValueError(
            f"{error} Start a server of {config.entry.title} with this checkpoint, or correct"
            " --url."
        ) from error


async def _ask(
    config: ServerConfig, api: ServerApi, token_rows: Sequence[Sequence[int]]
) -> tuple[str, list[list[float]]]:
    """Returns the server's precision, and each row's log-probs, which start at its second token."""
    client = make_client(config.keys, api.user_endpoints)
    (url,) = config.server_urls
    async with client.session:
        server = Server(url, client, api, config.request_timeout)
        info = await api.info(server)
        if info.problem:
            raise ValueError(f"{url} {info.problem}")
        if api.adapter is not None:
            names = await server.call(api.adapters())
            if api.adapter not in names:
                raise ValueError(
                    f"{url} has no adapter {quoted(api.adapter)}, but {', '.join(names) or 'none'};"
                    " load it, or correct --served-adapter."
                )
        rows = []
        for tokens in token_rows:
            rows.append(await server.call(api.score(tokens)))
        await server.close()
    return info.precision or "its own precision", rows
