"""Every weight transport delivers the weights, names their version, and releases a server that failed."""

import pkgutil
from pathlib import Path
from typing import Any

import pytest

from slime_tis.trainer.engines.engine import EngineHost
from slime_tis.trainer.engines.sglang.client import Server
from slime_tis.trainer.options.sglang import WEIGHT_TRANSPORTS, SGLangConfig
from tests.rollout.sglang.weight_servers import WeightServer, digests, some_weights, with_clients

TRANSPORTS: dict[str, dict[str, Any]] = {
    "distributed": {},
    "disk": {},
}
"""Options of each transport in these tests."""


def test_every_transport_is_tested() -> None:
    assert TRANSPORTS.keys() == WEIGHT_TRANSPORTS.keys()


@pytest.mark.parametrize("name", TRANSPORTS)
def test_weights_arrive_and_a_failed_server_is_released(name: str, pair: list[WeightServer], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = SGLangConfig(sglang_weight_sync=name, sglang_request_timeout=60.0, **TRANSPORTS[name])
    host = EngineHost(hf_checkpoint=tmp_path, weights=list, output_dir=tmp_path)

    async def work(clients: list[Server]) -> None:
        weights = pkgutil.resolve_name(WEIGHT_TRANSPORTS[name]).build(config, host, [server.url for server in pair])
        assert await weights.push(clients, some_weights(1).items, 1) == {}
        pair[0].behave(refuse={"/pause_generation": 1})
        assert list(await weights.push(clients, some_weights(2).items, 2)) == [clients[0]]
        await weights.close()

    with_clients(pair, work)
    assert pair[0].calls()[-2:] == ["abort_request", "continue_generation"]
    state = pair[1].state()
    assert state["weights"] == [digests(some_weights(2))]
    assert (state["version"], state["paused"]) == ("2", False)
