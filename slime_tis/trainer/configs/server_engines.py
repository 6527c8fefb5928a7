"""The engines that sample on servers, by their name in `--rollout-engine`."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ServerEngineEntry:
    """One engine whose servers answer over HTTP."""

    title: str
    """The engine's name in messages."""
    api: str
    """Class of its HTTP API, a `slime_tis.trainer.engines.servers.api.ServerApi`."""


SERVER_ENGINES = {
    "sglang": ServerEngineEntry(
        title="SGLang",
        api="slime_tis.trainer.engines.sglang.sglang_api:SGLangApi",
    ),
}
"""The table of server engines; CONTRIBUTING has the recipe for another one."""
