"""Weights over process groups: to servers in processes of their own, compared to the bit."""

import asyncio
import gc
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from slime_tis.trainer.engines.engine import EngineHost
from slime_tis.trainer.engines.sglang.client import Server
from slime_tis.trainer.engines.sglang.weights import protocol
from slime_tis.trainer.engines.sglang.weights.disk import DiskSync
from slime_tis.trainer.engines.sglang.weights.distributed import DistributedSync, UpdateGroup
from slime_tis.trainer.engines.sglang.weights.protocol import buckets
from slime_tis.trainer.options.sglang import SGLangConfig
from tests.rollout.sglang.weight_servers import WeightServer, digests, running, some_weights, with_clients

Work = Callable[[list[Server]], Any]


def sync(bucket_bytes: int = 300, timeout: float = 60.0, **options: Any) -> DistributedSync:
    return DistributedSync(device="cpu", bucket_bytes=bucket_bytes, timeout=timeout, **options)


def push_once(
    weights: DistributedSync, servers: list[WeightServer], named: dict[str, Tensor], version: int
) -> dict[str, str]:
    """Why servers failed, by URL."""

    async def work(clients: list[Server]) -> dict[str, str]:
        try:
            failed = await weights.push(clients, named.items, version)
            return {server.url: reason for server, reason in failed.items()}
        finally:
            await weights.close()

    return with_clients(servers, work)


def test_buckets_are_full_and_no_fuller() -> None:
    named = [(f"w{i}", torch.zeros(size, dtype=torch.uint8)) for i, size in enumerate((4, 5, 1, 1, 20, 3, 7, 3))]
    found = list(buckets(lambda: named, 10, lambda tensor: tensor))
    assert [each.names for each in found] == [["w0", "w1", "w2"], ["w3"], ["w4"], ["w5", "w6"], ["w7"]]
    assert [each.last for each in found] == [False, False, False, False, True]
    with pytest.raises(ValueError, match="no weights to send"):
        next(buckets(list, 10, lambda tensor: tensor))


def test_weights_arrive_to_the_bit(pair: list[WeightServer]) -> None:
    named = some_weights(seed=1)
    weights = sync()
    assert push_once(weights, pair, named, 12) == {}
    for server in pair:
        state = server.state()
        assert state["weights"] == [digests(named)]
        assert (state["version"], state["paused"], state["session"], state["groups"]) == ("12", False, False, [])
        updates = server.bodies("/update_weights_from_distributed")
        assert len(updates) > 2 and [body.get("weight_version") for body in updates] == [None] * (len(updates) - 1) + [
            "12"
        ]
        assert not any(body["flush_cache"] for body in updates)
        assert server.calls() == [
            "pause_generation",
            "flush_cache",
            "init_weights_update_group",
            "begin_weight_update",
            *["update_weights_from_distributed"] * len(updates),
            "end_weight_update",
            "continue_generation",
            "destroy_weights_update_group",
        ]
        assert server.bodies("/pause_generation") == [{"mode": "retract"}]


def test_a_group_serves_until_its_server_starts_anew(pair: list[WeightServer]) -> None:
    weights, first = sync(), pair[0]

    async def work(clients: list[Server]) -> None:
        for version in (1, 2):
            assert await weights.push(clients, some_weights(version).items, version) == {}
        assert first.calls().count("init_weights_update_group") == 1
        first.behave()  # its version is "default" again
        assert await weights.push(clients, some_weights(3).items, 3) == {}
        assert first.calls().count("init_weights_update_group") == 1
        assert pair[1].calls().count("init_weights_update_group") == 1
        assert await weights.push(clients[:1], some_weights(4).items, 4) == {}
        assert await weights.push(clients, some_weights(5).items, 5) == {}
        assert await weights.push(clients[1:], some_weights(6).items, 6) == {}
        await weights.close()

    with_clients(pair, work)
    assert first.calls().count("init_weights_update_group") == 1
    assert [server.state()["version"] for server in pair] == ["5", "6"]
    assert [server.state()["weights"] for server in pair] == [[digests(some_weights(5))], [digests(some_weights(6))]]
    assert [server.state()["groups"] for server in pair] == [[], []]


def test_a_server_without_sessions_and_with_two_ranks() -> None:
    server, named = WeightServer(session=False, tp_size=2), some_weights(2)
    with running(server):
        assert push_once(sync(), [server], named, 3) == {}
        assert server.state()["weights"] == [digests(named)] * 2
        assert server.bodies("/init_weights_update_group")[0]["world_size"] == 3


def test_a_session_left_open_is_closed_first(pair: list[WeightServer]) -> None:
    pair[0].behave(session=True)
    assert push_once(sync(), pair, some_weights(1), 1) == {}
    calls = [call for call in pair[0].calls() if "_weight_update" in call]
    assert calls == ["begin_weight_update", "end_weight_update", "begin_weight_update", "end_weight_update"]


@pytest.mark.parametrize("status", [400, 200], ids=["HTTP 400", "success false"])
def test_flush_is_asked_for_until_it_is_done(pair: list[WeightServer], status: int) -> None:
    pair[0].behave(refuse={"/flush_cache": 3}, refuse_status=status)
    assert push_once(sync(), pair, some_weights(1), 1) == {}
    assert pair[0].calls()[:5] == ["pause_generation", *["flush_cache"] * 4]


def test_flush_that_is_never_done(pair: list[WeightServer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "CONTROL_TIMEOUT", 0.3)
    pair[0].behave(refuse={"/flush_cache": 1000})
    weights = sync()
    failed = push_once(weights, pair, some_weights(1), 1)
    assert list(failed) == [pair[0].url]
    assert "refused on purpose" in failed[pair[0].url]
    assert pair[0].calls()[-2:] == ["abort_request", "continue_generation"]
    assert pair[1].state()["version"] == "1"


def test_a_server_that_dies_in_the_middle_takes_no_other_along(pair: list[WeightServer]) -> None:
    victim, named, weights = WeightServer(), some_weights(7), sync()
    given: list[str] = []

    def source() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named.items():
            given.append(name)
            yield name, tensor

    async def work(clients: list[Server]) -> list[str]:
        failed = await weights.push(clients, source, 9)
        again = await weights.push([clients[0], clients[2]], some_weights(8).items, 10)
        await weights.close()
        return [server.url for server in [*failed, *again]]

    with running(victim):
        victim.behave(die_bucket=2)
        began = time.monotonic()
        assert with_clients([pair[0], victim, pair[1]], work) == [victim.url]
        assert time.monotonic() - began < 20.0
    assert given == list(named), "iterated once, to the end"
    for server in pair:
        assert server.state()["version"] == "10" and server.state()["weights"] == [digests(some_weights(8))]
        versions = [body.get("weight_version") for body in server.bodies("/update_weights_from_distributed")]
        assert [version for version in versions if version] == ["9", "10"]
        assert server.calls().count("init_weights_update_group") == 1


def test_a_server_that_refuses_in_the_middle(pair: list[WeightServer]) -> None:
    pair[0].behave(refuse_bucket=2)
    weights = sync()
    failed = push_once(weights, pair, some_weights(1), 5)
    assert list(failed) == [pair[0].url]
    assert "Failed to update parameter online: shapes differ." in failed[pair[0].url]
    assert pair[0].calls()[-4:] == [
        "end_weight_update",
        "destroy_weights_update_group",
        "abort_request",
        "continue_generation",
    ]
    assert pair[0].bodies("/abort_request") == [{"abort_all": True}]
    state = pair[0].state()
    assert (state["version"], state["paused"], state["session"], state["groups"]) == ("default", False, False, [])
    assert pair[1].state()["weights"] == [digests(some_weights(1))]


def test_a_server_that_does_not_join(pair: list[WeightServer]) -> None:
    pair[0].behave(refuse={"/init_weights_update_group": 1})
    weights = sync()
    began = time.monotonic()
    failed = push_once(weights, pair, some_weights(1), 5)
    assert list(failed) == [pair[0].url]
    assert time.monotonic() - began < 10.0, "the wait for it to join is broken off"
    assert "refused on purpose" in failed[pair[0].url]
    assert pair[1].state()["version"] == "5"


def test_a_server_that_hangs() -> None:
    server, weights = WeightServer(), sync(timeout=2.0)
    with running(server):
        server.behave(hang_bucket=2)
        began = time.monotonic()
        failed = push_once(weights, [server], some_weights(1), 5)
        assert list(failed) == [server.url]
        assert time.monotonic() - began < 15.0
        assert "within 2 s" in failed[server.url] or "Timed out" in failed[server.url]


def test_a_server_with_replicas_is_refused(pair: list[WeightServer]) -> None:
    pair[0].behave(info={"tp_size": 1, "dp_size": 2, "pp_size": 1})
    weights = sync()
    failed = push_once(weights, pair, some_weights(1), 5)
    assert list(failed) == [pair[0].url]
    assert "runs with --dp-size 2 and --pp-size 1" in failed[pair[0].url]
    assert "use --sglang-weight-sync disk" in failed[pair[0].url]


def test_a_source_that_fails_lets_the_servers_go_on(pair: list[WeightServer]) -> None:
    def source() -> Iterator[tuple[str, Tensor]]:
        yield from list(some_weights(1).items())[:4]
        raise RuntimeError("out of memory")

    async def work(clients: list[Server]) -> None:
        await sync().push(clients, source, 5)

    with pytest.raises(RuntimeError, match="out of memory"):
        with_clients(pair, work)
    for server in pair:
        state = server.state()
        assert (state["version"], state["paused"], state["session"], state["groups"]) == ("default", False, False, [])


@pytest.mark.parametrize("kind", ["distributed", "disk"])
def test_never_more_than_a_bucket_is_held(pair: list[WeightServer], tmp_path: Any, kind: str) -> None:
    kilobyte, alive, most = 1024, weakref.WeakSet(), []
    (tmp_path / "config.json").write_text("{}")

    def source() -> Iterator[tuple[str, Tensor]]:
        for i in range(40):
            tensor = torch.full((kilobyte,), i, dtype=torch.uint8)
            alive.add(tensor)
            most.append(len(alive))
            yield f"w{i}", tensor

    async def work(clients: list[Server]) -> None:
        weights: DistributedSync | DiskSync = sync(bucket_bytes=4 * kilobyte)
        if kind == "disk":
            weights = DiskSync(tmp_path / "w", hf_checkpoint=tmp_path, device="cpu", bucket_bytes=4096, timeout=60.0)
        assert await weights.push(clients, source, 5) == {}
        await weights.close()

    gc.disable()  # nothing waits for the collector
    try:
        with_clients(pair, work)
    finally:
        gc.enable()
    assert len(most) == 40
    assert max(most) <= (4 + 1 if kind == "distributed" else 1 + 1), "a bucket and the tensor after it; disk copies"
    assert not alive
    assert len(pair[0].state()["weights"][0]) == 40 or kind == "distributed"


def test_only_the_loopback_listens_and_the_default_group_stays(pair: list[WeightServer]) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        default = dist.group.WORLD
        addresses: set[str] = set()

        def source() -> Iterator[tuple[str, Tensor]]:
            found = psutil.Process(os.getpid()).net_connections("tcp")
            addresses.update(each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN)
            yield from some_weights(1).items()

        async def work(clients: list[Server]) -> None:
            weights = sync()
            assert await weights.push(clients, source, 5) == {}
            await weights.close()

        with_clients(pair, work)
        assert {address.removeprefix("::ffff:") for address in addresses} == {"127.0.0.1"}
        assert dist.group.WORLD is default and dist.get_world_size() == 1
        dist.barrier()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "localhost", socket.gethostname()], ids=["IP address", "localhost", "host name"]
)
def test_closing_ends_a_join_under_way(address: str) -> None:
    async def work() -> None:
        group = UpdateGroup(address, server_ranks=1, device=torch.device("cpu"), timeout=60.0)
        assert group._store is not None
        before = group._store.num_keys()
        joining = protocol.in_thread(group.join)
        while group._store.num_keys() <= before:  # until its own rank waits for the server's
            await asyncio.sleep(0.002)
        assert not joining.done()
        group.close()
        with pytest.raises(RuntimeError):
            await asyncio.wait_for(joining, 5.0)

    asyncio.run(work())


def test_disk_needs_a_directory_that_servers_on_other_machines_see(tmp_path: Path) -> None:
    here, away = "http://127.0.0.1:1", "http://10.0.0.9:1"
    host = EngineHost(hf_checkpoint=tmp_path, weights=dict, output_dir=tmp_path)
    disk = SGLangConfig(sglang_weight_sync="disk")
    with pytest.raises(ValueError, match="may not see"):
        DiskSync.build(disk, host, [here, away])
    shared = SGLangConfig(sglang_weight_sync="disk", sglang_weight_dir=str(tmp_path / "shared"))
    for config, urls in ((disk, [here]), (shared, [here, away])):
        asyncio.run(DiskSync.build(config, host, urls).close())
