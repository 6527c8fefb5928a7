"""Weight transports: servers receive the weights bit by bit; a server that fails is released and holds up no other."""

import asyncio
import gc
import os
import pkgutil
import resource
import signal
import socket
import weakref
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from slime_tis.trainer.configs.sglang import WEIGHT_TRANSPORTS, SGLangConfig
from slime_tis.trainer.engines.rollout_engine import EngineHost
from slime_tis.trainer.engines.sglang.client import ServerError
from slime_tis.trainer.engines.sglang.weights import protocol
from slime_tis.trainer.engines.sglang.weights.disk import DiskSync
from slime_tis.trainer.engines.sglang.weights.distributed import DistributedSync, UpdateGroup
from tests.rollout.sglang.fake_sglang import REFUSED, fake_servers
from tests.rollout.sglang.rollouts import with_clients
from tests.runs import fork_server

RELEASED = ["abort_request", "continue_generation"]


@pytest.fixture
def servers():
    with fake_servers(3) as servers:
        yield servers


OPTIONS = {"bucket_bytes": 300, "sglang_request_timeout": 60.0, "sglang_sync_address": None}


def distributed(**options):
    host = EngineHost(hf_checkpoint="", weights=dict, output_dir=Path())
    return DistributedSync(SimpleNamespace(**{**OPTIONS, **options}), host, [])


@pytest.fixture(params=WEIGHT_TRANSPORTS)
def make(request, tmp_path, checkpoint):
    return {"distributed": distributed, "disk": on_disk(tmp_path, checkpoint)}[request.param]


def on_disk(directory, checkpoint):
    host = EngineHost(hf_checkpoint=checkpoint, weights=dict, output_dir=directory)
    fields = {**OPTIONS, "sglang_weight_dir": str(directory / "sglang_weights")}
    return lambda **options: DiskSync(SimpleNamespace(**{**fields, **options}), host, [])


def some_weights(seed):
    """Tensors of odd shapes and several types, one that is not contiguous, and one with values beyond bf16."""
    make = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(37, 11, generator=make),
        "scalar": torch.randn((), generator=make),
        "one": torch.randn(1, generator=make),
        "half": torch.randn(5, 3, 2, generator=make).bfloat16(),
        "turned": torch.randn(8, 6, generator=make).T,
        "large": torch.randn(64, generator=make),
        "extreme": torch.tensor([float("inf"), -0.0, 1e-45, 3.4e38, float("-inf")]),
        "count": torch.randint(0, 9, (3,), generator=make),
    }


def bits(named):
    return {
        name: (tensor.dtype, tensor.shape, tensor.contiguous().flatten().view(torch.uint8).tolist())
        for name, tensor in named.items()
    }


def assert_weights(servers, version, ranks=1):
    for server in servers:
        assert list(map(bits, server.tensors)) == [bits(some_weights(version))] * ranks
        assert (server.weight_version, server.paused, server.session) == (
            str(version),
            False,
            False,
        )


def push_source(weights, servers, *sources):
    """Sends these sources as versions 1, 2, …, and closes the transport; returns the last failures by URL."""

    async def work(clients):
        try:
            for version, source in enumerate(sources, start=1):
                failed = await weights.push(clients, source, version)
            return {server.url: reason for server, reason in failed.items()}
        finally:
            await weights.close()

    return with_clients(servers, work)


def push(weights, servers, versions=1):
    return push_source(
        weights, servers, *(some_weights(version).items for version in range(1, versions + 1))
    )


def test_weights_arrive_to_the_bit(make, servers):
    assert push(make(), servers, versions=2) == {}
    assert_weights(servers, 2)
    for server in servers:
        assert (
            server.groups == {} and server.bodies("/pause_generation") == [{"mode": "retract"}] * 2
        )
        updates = server.bodies("/update_weights_from_distributed")
        if updates:
            half = len(updates) // 2
            assert half > 2 and [body.get("weight_version") for body in updates[:half]] == [
                None
            ] * (half - 1) + ["1"]
            session = [
                "begin_weight_update",
                *["update_weights_from_distributed"] * half,
                "end_weight_update",
            ]
            calls = ["pause_generation", "flush_cache", *session, "continue_generation"]
            joined = [*calls[:2], "init_weights_update_group", *calls[2:]]
            assert server.called == [*joined, *calls, "destroy_weights_update_group"]
        else:
            calls = [
                "pause_generation",
                "flush_cache",
                "update_weights_from_disk",
                "continue_generation",
            ]
            assert server.called == calls * 2
            body = server.bodies("/update_weights_from_disk")[1]
            assert "/weights_00000002_" in body.pop("model_path")
            assert body == {"weight_version": "2", "load_format": "auto", "flush_cache": False}


REFUSALS = {
    "pause": ("distributed", "/pause_generation"),
    "join": ("distributed", "/init_weights_update_group"),
    "pause, disk": ("disk", "/pause_generation"),
    "load": ("disk", "/update_weights_from_disk"),
}


@pytest.mark.parametrize(("make", "endpoint"), REFUSALS.values(), ids=REFUSALS, indirect=["make"])
def test_a_server_that_refuses_is_released(make, endpoint, servers):
    servers[0].replies[endpoint] = [REFUSED]
    failed = push(make(), servers)
    assert list(failed) == [servers[0].url] and "refused on purpose" in failed[servers[0].url]
    assert servers[0].called[-2:] == RELEASED
    assert_weights(servers[1:], 1)


def test_a_source_that_fails_leaves_the_servers_as_they_were(make, servers):
    def source():
        yield from list(some_weights(1).items())[:4]
        raise RuntimeError("rank 3 went away")

    with pytest.raises(RuntimeError, match="rank 3 went away"):
        with_clients(servers, lambda clients: make().push(clients, source, 5))
    for server in servers:
        assert (server.weight_version, server.paused, server.session, server.groups) == (
            "default",
            False,
            False,
            {},
        )


def test_never_more_than_a_bucket_is_held(make, servers):
    alive, most, kilobyte = weakref.WeakSet(), [], 1024

    def source():
        for i in range(40):
            tensor = torch.full((kilobyte,), i, dtype=torch.uint8)
            alive.add(tensor)
            most.append(len(alive))
            yield f"w{i}", tensor

    weights = make(bucket_bytes=4 * kilobyte)
    gc.disable()  # nothing waits for the collector
    try:
        assert push_source(weights, servers, source) == {}
    finally:
        gc.enable()
    assert len(most) == 40 and not alive
    assert max(most) <= (
        5 if isinstance(weights, DistributedSync) else 2
    )  # a bucket and the next tensor; disk copies


def test_buckets_are_full_and_no_fuller():
    named = [
        (f"w{i}", torch.zeros(size, dtype=torch.uint8))
        for i, size in enumerate((4, 5, 1, 1, 20, 3, 7, 3))
    ]
    found = list(protocol.buckets(lambda: named, 10, lambda tensor: tensor))
    assert [each.names for each in found] == [
        ["w0", "w1", "w2"],
        ["w3"],
        ["w4"],
        ["w5", "w6"],
        ["w7"],
    ]
    assert [each.last for each in found] == [False, False, False, False, True]


def test_a_group_serves_until_its_server_starts_again(servers):
    weights, first = distributed(), servers[0]

    async def work(clients):
        for version in (1, 2):
            assert await weights.push(clients, some_weights(version).items, version) == {}
        assert first.count("/init_weights_update_group") == 1
        await asyncio.to_thread(first.die)
        await asyncio.to_thread(first.come_back)
        assert await weights.push(clients, some_weights(3).items, 3) == {}
        assert [server.count("/init_weights_update_group") for server in servers] == [2, 1, 1]
        assert await weights.push(clients[:1], some_weights(4).items, 4) == {}
        await weights.close()

    with_clients(servers, work)
    assert_weights(servers[:1], 4)
    assert_weights(servers[1:], 3)
    assert [server.groups for server in servers] == [{}, {}, {}]


def test_two_ranks_with_an_open_session_are_served_and_replicas_refused(servers):
    server = servers[0]
    server.info["tp_size"], server.session = 2, True
    assert push(distributed(), [server]) == {}
    assert_weights([server], 1, ranks=2)
    assert server.bodies("/init_weights_update_group")[0]["world_size"] == 3
    session = [
        call for call in server.called if call in ("begin_weight_update", "end_weight_update")
    ]
    assert session == ["begin_weight_update", "end_weight_update"] * 2
    servers[0].info["dp_size"] = 2
    assert "use --sglang-weight-sync disk" in push(distributed(), servers[:1])[servers[0].url]


@pytest.mark.parametrize("status", [400, 200], ids=["HTTP 400", "success false"])
def test_flush_is_asked_for_until_it_is_done(servers, status, monkeypatch):
    servers[0].replies["/flush_cache"] = [(status, REFUSED[1])] * 3
    assert push(distributed(), servers) == {}
    assert servers[0].called[:5] == ["pause_generation", *["flush_cache"] * 4]
    monkeypatch.setattr(protocol, "CONTROL_TIMEOUT", 0.3)
    servers[0].replies["/flush_cache"] = [(status, REFUSED[1])] * 1000
    assert list(push(distributed(), servers, versions=2)) == [servers[0].url]
    assert servers[0].called[-2:] == RELEASED and servers[1].weight_version == "2"


@pytest.mark.parametrize("fault", ["die", "refuse", "hang"])
def test_a_server_that_fails_in_the_middle_takes_no_other_along(servers, fault):
    weights = distributed(sglang_request_timeout=2.0 if fault == "hang" else 60.0)
    victim, names = servers[1], list[str]()
    victim.bucket_faults = {2: fault}

    def source():
        for name, tensor in some_weights(7).items():
            names.append(name)
            yield name, tensor

    async def work(clients):
        failed = await weights.push(clients, source, 9)
        again = await weights.push([clients[0], clients[2]], some_weights(8).items, 8)
        await weights.close()
        return [server.url for server in [*failed, *again]]

    assert with_clients(servers, work) == [victim.url]
    assert names == list(some_weights(7))  # iterated once, to the end
    assert_weights([servers[0], servers[2]], 8)
    assert [server.count("/init_weights_update_group") for server in servers] == [1, 1, 1]
    if fault == "refuse":
        assert victim.called[-4:] == [
            "end_weight_update",
            "destroy_weights_update_group",
            *RELEASED,
        ]
        assert victim.bodies("/abort_request") == [{"abort_all": True}]
        assert (victim.weight_version, victim.paused, victim.session) == ("default", False, False)


def test_only_the_loopback_listens_and_the_default_group_stays(servers):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        default, addresses = dist.group.WORLD, set[str]()

        def source():
            connections = psutil.Process(os.getpid()).net_connections("tcp")
            addresses.update(
                each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN
            )
            yield from some_weights(1).items()

        assert push_source(distributed(), servers, source) == {}
        assert {address.removeprefix("::ffff:") for address in addresses} == {"127.0.0.1"}
        assert dist.group.WORLD is default and dist.get_world_size() == 1
        dist.barrier()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "localhost", socket.gethostname()],
    ids=["IP address", "localhost", "host name"],
)
def test_closing_ends_a_join_under_way(address):
    async def work():
        group = UpdateGroup(address, server_ranks=1, device=torch.device("cpu"), timeout=60.0)
        before = group._store.num_keys()
        joining = protocol.in_thread(group.join)
        while group._store.num_keys() <= before:  # until its own rank waits for the server's
            await asyncio.sleep(0.002)
        assert not joining.done()
        group.close()
        with pytest.raises(RuntimeError):
            await asyncio.wait_for(joining, 5.0)

    asyncio.run(work())


def directories(path):
    return sorted(
        each.name.rsplit("_", 1)[0] for each in (path / "sglang_weights").iterdir() if each.is_dir()
    )


def test_a_server_that_comes_back_reads_the_newest(servers, tmp_path, checkpoint):
    servers[0].replies["/update_weights_from_disk"] = [REFUSED] * 2
    weights = on_disk(tmp_path, checkpoint)()

    async def work(clients):
        assert await weights.restore(clients[0]) is False  # nothing has been written yet
        assert list(await weights.push(clients, some_weights(1).items, 1)) == [clients[0]]
        with pytest.raises(ServerError, match="refused on purpose"):
            await weights.restore(clients[0])
        assert await weights.restore(clients[0]) is True
        await weights.close()

    with_clients(servers, work)
    assert_weights(servers, 1)


def test_a_full_disk_is_reported_and_the_source_exhausted(tmp_path, checkpoint):
    weights, sent = on_disk(tmp_path, checkpoint)(bucket_bytes=100_000), []
    asyncio.run(weights.push([], some_weights(1).items, 1))

    def source():
        for i in range(8):
            sent.append(i)
            yield f"w{i}", torch.zeros(100_000, dtype=torch.uint8)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(RuntimeError, match="the weights of version 2 could not be written"):
            asyncio.run(weights.push([], source, 2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert sent == list(range(8)) and directories(tmp_path) == ["weights_00000001"]


def crash(root, checkpoint):
    weights = on_disk(root, checkpoint)(bucket_bytes=10)
    asyncio.run(weights.push([], lambda: [("a", torch.zeros(9))], 1))

    def source():
        yield "a", torch.ones(9)
        yield "b", torch.ones(9)
        os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(weights.push([], source, 2))


def use(root, checkpoint, ready):
    weights = on_disk(root, checkpoint)()
    ready.send(True)
    ready.recv()
    asyncio.run(weights.close())


def test_a_directory_is_for_one_run_at_a_time(tmp_path, checkpoint):
    ours, theirs = fork_server().Pipe()
    process = fork_server().Process(target=use, args=(tmp_path, checkpoint, theirs))
    process.start()
    ours.recv()
    with pytest.raises(ValueError, match="another run is writing"):
        on_disk(tmp_path, checkpoint)()
    ours.send(True)
    process.join()


def test_a_crash_leaves_the_old_weights_and_the_next_run_removes_them(tmp_path, checkpoint):
    process = fork_server().Process(target=crash, args=(tmp_path, checkpoint))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert directories(tmp_path) == ["unfinished_00000002", "weights_00000001"]
    (old,) = (tmp_path / "sglang_weights").glob("weights_*")
    with safe_open(str(old / "model.safetensors"), "pt") as tensors:
        assert torch.equal(tensors.get_tensor("a"), torch.zeros(9))
    others = [
        tmp_path / "sglang_weights" / name
        for name in ("weights_of_mine", "weights_00000007_abcdef01", "weights_00000008_abcdef01")
    ]
    others[0].mkdir()
    others[1].touch()
    os.symlink(checkpoint, others[2])
    make = on_disk(tmp_path, checkpoint)
    weights = make()
    assert sorted((tmp_path / "sglang_weights").iterdir()) == sorted(
        [tmp_path / "sglang_weights/.lock", *others]
    )
    asyncio.run(weights.push([], some_weights(1).items, 1))
    asyncio.run(weights.close())
    assert "weights_00000001" in directories(tmp_path)  # servers may still be asked to read it
    asyncio.run(make(sglang_weight_dir=None).close())
    assert "weights_00000001" not in directories(tmp_path)
    with pytest.raises(ValueError, match="cannot be written"):
        make(sglang_weight_dir=str(others[1] / "w"))


def test_disk_needs_a_directory_that_servers_on_other_machines_see(tmp_path):
    here, away = "http://127.0.0.1:1", "http://10.0.0.9:1"
    host = EngineHost(hf_checkpoint=tmp_path, weights=dict, output_dir=tmp_path)
    disk = SGLangConfig(sglang_weight_sync="disk")
    with pytest.raises(ValueError, match="may not see"):
        DiskSync(disk, host, [here, away])
    shared = SGLangConfig(sglang_weight_sync="disk", sglang_weight_dir=str(tmp_path / "shared"))
    for config, urls in ((disk, [here]), (shared, [here, away])):
        weights = pkgutil.resolve_name(WEIGHT_TRANSPORTS["disk"])(config, host, urls)
        asyncio.run(weights.close())
