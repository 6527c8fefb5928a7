"""Weight transports: servers receive the exact weights; a server that fails is released."""

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

from slime_tis.trainer.configs.servers import WEIGHT_TRANSPORTS, server_config
from slime_tis.trainer.engines.rollout_engine import EngineHost
from slime_tis.trainer.engines.servers.errors import ServerError
from slime_tis.trainer.engines.servers.update_group import TorchGroup
from slime_tis.trainer.engines.servers.weights import protocol
from slime_tis.trainer.engines.servers.weights.disk import DiskSync
from slime_tis.trainer.engines.servers.weights.distributed import DistributedSync
from slime_tis.trainer.engines.sglang import sglang_api
from tests.rollout.sglang.fake_sglang import REFUSED, fake_servers
from tests.rollout.sglang.rollouts import with_clients
from tests.runs import fork_server

RELEASED = ["abort_request", "continue_generation"]


@pytest.fixture
def servers():
    with fake_servers(3) as servers:
        yield servers


OPTIONS = {
    "engine": "sglang",
    "flag": server_config("sglang").flag,
    "bucket_bytes": 300,
    "request_timeout": 60.0,
    "sync_address": None,
}


def distributed(**options):
    host = EngineHost(hf_checkpoint="", weights=dict, output_dir=Path())
    return DistributedSync(SimpleNamespace(**{**OPTIONS, **options}), host, [])


@pytest.fixture(params=WEIGHT_TRANSPORTS)
def make(request, tmp_path, checkpoint):
    return {"distributed": distributed, "disk": on_disk(tmp_path, checkpoint)}[request.param]


def on_disk(directory, checkpoint):
    host = EngineHost(hf_checkpoint=checkpoint, weights=dict, output_dir=directory)
    fields = {**OPTIONS, "weight_dir": str(directory / "sglang_weights")}
    return lambda **options: DiskSync(SimpleNamespace(**{**fields, **options}), host, [])


def some_weights(seed):
    """Tensors of odd shapes and several types, one that is not contiguous, and one with values
    beyond bf16."""
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
    """Sends these sources as versions 1, 2, …, and closes the transport; returns the last failures
    by URL."""

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


def test_servers_receive_exact_weights(make, servers):
    assert push(make(), servers, versions=2) == {}
    assert_weights(servers, 2)
    assert [server.groups for server in servers] == [{}, {}, {}]


def test_running_requests_return_to_the_queue(make, servers):
    push(make(), servers, versions=2)
    for server in servers:
        assert server.bodies("/pause_generation") == [{"mode": "retract"}] * 2


def test_distributed_weights_take_these_calls(servers):
    push(distributed(), servers, versions=2)
    for server in servers:
        num_buckets = server.count("/update_weights_from_distributed") // 2
        assert num_buckets > 2
        pause = ["pause_generation", "flush_cache"]
        update = ["begin_weight_update"]
        update += ["update_weights_from_distributed"] * num_buckets
        update += ["end_weight_update", "continue_generation"]
        first = [*pause, "init_weights_update_group", *update]
        second = [*pause, *update]
        assert server.called == [*first, *second, "destroy_weights_update_group"]


def test_only_the_last_bucket_names_the_version(servers):
    push(distributed(), servers)
    for server in servers:
        bodies = server.bodies("/update_weights_from_distributed")
        versions = [body.get("weight_version") for body in bodies]
        assert versions == [None] * (len(bodies) - 1) + ["1"]


def test_weights_on_disk_take_these_calls(servers, tmp_path, checkpoint):
    push(on_disk(tmp_path, checkpoint)(), servers, versions=2)
    calls = ["pause_generation", "flush_cache", "update_weights_from_disk", "continue_generation"]
    for server in servers:
        assert server.called == calls * 2


def test_servers_are_told_which_directory_to_read(servers, tmp_path, checkpoint):
    push(on_disk(tmp_path, checkpoint)(), servers, versions=2)
    for server in servers:
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
    kilobyte = 1024
    alive = weakref.WeakSet()
    counts = []

    def source():
        for i in range(40):
            tensor = torch.full((kilobyte,), i, dtype=torch.uint8)
            alive.add(tensor)
            counts.append(len(alive))
            yield f"w{i}", tensor

    weights = make(bucket_bytes=4 * kilobyte)
    gc.disable()  # nothing waits for the collector
    try:
        assert push_source(weights, servers, source) == {}
    finally:
        gc.enable()
    assert len(counts) == 40
    assert not alive
    # A bucket and the next tensor; the disk transport copies.
    assert max(counts) <= (5 if isinstance(weights, DistributedSync) else 2)


@pytest.fixture(scope="module")
def small_buckets():
    """Buckets of at most 10 bytes."""
    sizes = (4, 5, 1, 1, 20, 3, 7, 3)
    weights = [(f"w{i}", torch.zeros(size, dtype=torch.uint8)) for i, size in enumerate(sizes)]
    return list(protocol.buckets(lambda: weights, 10, torch.device("cpu")))


def test_buckets_are_as_large_as_allowed(small_buckets):
    names = [bucket.names for bucket in small_buckets]
    assert names == [["w0", "w1", "w2"], ["w3"], ["w4"], ["w5", "w6"], ["w7"]]


def test_the_last_bucket_is_marked(small_buckets):
    assert [bucket.last for bucket in small_buckets] == [False, False, False, False, True]


def test_a_server_joins_again_only_after_a_restart(servers):
    weights = distributed()
    first = servers[0]

    async def work(clients):
        for version in (1, 2):
            assert await weights.push(clients, some_weights(version).items, version) == {}
        assert first.count("/init_weights_update_group") == 1
        await asyncio.to_thread(first.die)
        await asyncio.to_thread(first.come_back)
        assert await weights.push(clients, some_weights(3).items, 3) == {}
        await weights.close()

    with_clients(servers, work)
    assert [server.count("/init_weights_update_group") for server in servers] == [2, 1, 1]
    assert_weights(servers, 3)


def test_a_push_to_some_servers_leaves_the_others(servers):
    weights = distributed()

    async def work(clients):
        assert await weights.push(clients, some_weights(3).items, 3) == {}
        assert await weights.push(clients[:1], some_weights(4).items, 4) == {}
        await weights.close()

    with_clients(servers, work)
    assert_weights(servers[:1], 4)
    assert_weights(servers[1:], 3)
    assert [server.groups for server in servers] == [{}, {}, {}]


def test_both_ranks_of_a_server_get_the_weights(servers):
    server = servers[0]
    server.info["tp_size"] = 2
    assert push(distributed(), [server]) == {}
    assert_weights([server], 1, ranks=2)
    assert server.bodies("/init_weights_update_group")[0]["world_size"] == 3


def test_an_open_session_of_a_killed_run_is_ended(servers):
    server = servers[0]
    server.session = True
    assert push(distributed(), [server]) == {}
    assert_weights([server], 1)
    calls = ("begin_weight_update", "end_weight_update")
    assert [call for call in server.called if call in calls] == [*calls, *calls]


def test_distributed_weights_refuse_data_parallel_replicas(servers):
    servers[0].info["dp_size"] = 2
    failed = push(distributed(), servers[:1])
    assert "use --sglang-weight-sync disk" in failed[servers[0].url]


flush_refusals = pytest.mark.parametrize("status", [400, 200], ids=["HTTP 400", "success false"])


@flush_refusals
def test_a_refused_flush_is_repeated(servers, status):
    servers[0].replies["/flush_cache"] = [(status, REFUSED[1])] * 3
    assert push(distributed(), servers) == {}
    assert servers[0].called[:5] == ["pause_generation", *["flush_cache"] * 4]


@flush_refusals
def test_a_server_that_never_flushes_is_released(servers, status, monkeypatch):
    monkeypatch.setattr(sglang_api, "CONTROL_TIMEOUT", 0.3)
    servers[0].replies["/flush_cache"] = [(status, REFUSED[1])] * 1000
    assert list(push(distributed(), servers)) == [servers[0].url]
    assert servers[0].called[-2:] == RELEASED
    assert servers[1].weight_version == "1"


@pytest.mark.parametrize("fault", ["die", "refuse", "hang"])
def test_a_failure_in_the_middle_affects_no_other_server(servers, fault):
    weights = distributed(request_timeout=2.0 if fault == "hang" else 60.0)
    victim = servers[1]
    victim.bucket_faults = {2: fault}
    names = []

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
    assert names == list(some_weights(7)), "the source was not iterated once, to its end"
    assert_weights([servers[0], servers[2]], 8)
    assert [server.count("/init_weights_update_group") for server in servers] == [1, 1, 1]


@pytest.fixture
def refusing_server(servers):
    """A server that refused the second bucket."""
    servers[0].bucket_faults = {2: "refuse"}
    assert list(push(distributed(), servers[:1])) == [servers[0].url]
    return servers[0]


def test_a_server_that_refuses_a_bucket_leaves_the_group(refusing_server):
    release = ["end_weight_update", "destroy_weights_update_group", *RELEASED]
    assert refusing_server.called[-4:] == release


def test_requests_of_a_server_with_mixed_weights_are_aborted(refusing_server):
    assert refusing_server.bodies("/abort_request") == [{"abort_all": True}]


def test_a_server_that_refuses_a_bucket_continues(refusing_server):
    assert refusing_server.weight_version == "default"
    assert refusing_server.paused is False
    assert refusing_server.session is False


def listening_addresses():
    addresses = set()
    for connection in psutil.Process(os.getpid()).net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN:
            addresses.add(connection.laddr.ip.removeprefix("::ffff:"))
    return addresses


def test_the_store_listens_only_on_the_loopback(servers):
    addresses = []

    def source():
        addresses.append(listening_addresses())
        yield from some_weights(1).items()

    assert push_source(distributed(), servers, source) == {}
    assert addresses == [{"127.0.0.1"}]


def test_the_default_group_stays(servers):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        default = dist.group.WORLD
        assert push(distributed(), servers) == {}
        assert dist.group.WORLD is default
        assert dist.get_world_size() == 1
        dist.barrier()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "localhost", socket.gethostname()],
    ids=["IP address", "localhost", "host name"],
)
def test_close_ends_a_waiting_join(address):
    async def work():
        group = TorchGroup(
            address, name="group", num_ranks=1, device=torch.device("cpu"), timeout=60.0
        )
        before = group._store.num_keys()
        joining = protocol.in_thread(group.join)
        while group._store.num_keys() <= before:  # until rank 0 waits for the server's rank
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


def test_nothing_is_restored_before_the_first_push(servers, tmp_path, checkpoint):
    weights = on_disk(tmp_path, checkpoint)()

    async def work(clients):
        assert await weights.restore(clients[0]) is False
        await weights.close()

    with_clients(servers, work)


def test_a_returning_server_reads_the_newest_weights(servers, tmp_path, checkpoint):
    servers[0].replies["/update_weights_from_disk"] = [REFUSED] * 2
    weights = on_disk(tmp_path, checkpoint)()

    async def work(clients):
        assert list(await weights.push(clients, some_weights(1).items, 1)) == [clients[0]]
        with pytest.raises(ServerError, match="refused on purpose"):
            await weights.restore(clients[0])
        assert await weights.restore(clients[0]) is True
        await weights.close()

    with_clients(servers, work)
    assert_weights(servers, 1)


@pytest.fixture
def after_full_disk(tmp_path, checkpoint):
    """The numbers of the weights that a source yielded while they could not be written."""
    weights = on_disk(tmp_path, checkpoint)(bucket_bytes=100_000)
    asyncio.run(weights.push([], some_weights(1).items, 1))
    numbers = []

    def source():
        for i in range(8):
            numbers.append(i)
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
    return numbers


def test_a_full_disk_does_not_end_the_source_early(after_full_disk):
    assert after_full_disk == list(range(8))


@pytest.mark.usefixtures("after_full_disk")
def test_a_full_disk_leaves_the_previous_weights(tmp_path):
    assert directories(tmp_path) == ["weights_00000001"]


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
    connection, child_connection = fork_server().Pipe()
    process = fork_server().Process(target=use, args=(tmp_path, checkpoint, child_connection))
    process.start()
    connection.recv()
    with pytest.raises(ValueError, match="another run is writing"):
        on_disk(tmp_path, checkpoint)()
    connection.send(True)
    process.join()


@pytest.fixture
def after_crash(tmp_path, checkpoint):
    """The directory of weights after a crash in the second update."""
    process = fork_server().Process(target=crash, args=(tmp_path, checkpoint))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    return tmp_path / "sglang_weights"


def test_a_crash_leaves_the_previous_weights(after_crash, tmp_path):
    assert directories(tmp_path) == ["unfinished_00000002", "weights_00000001"]
    (old,) = after_crash.glob("weights_*")
    with safe_open(str(old / "model.safetensors"), "pt") as tensors:
        assert torch.equal(tensors.get_tensor("a"), torch.zeros(9))


def test_the_next_run_removes_only_weights_of_runs(after_crash, tmp_path, checkpoint):
    directory = after_crash / "weights_of_mine"
    directory.mkdir()
    file = after_crash / "weights_00000007_abcdef01"
    file.touch()
    link = after_crash / "weights_00000008_abcdef01"
    os.symlink(checkpoint, link)
    weights = on_disk(tmp_path, checkpoint)()
    assert set(after_crash.iterdir()) == {after_crash / ".lock", directory, file, link}
    asyncio.run(weights.close())


def test_a_users_directory_keeps_the_newest_weights(tmp_path, checkpoint):
    weights = on_disk(tmp_path, checkpoint)()
    asyncio.run(weights.push([], some_weights(1).items, 1))
    asyncio.run(weights.close())
    # Servers may still be asked to read it.
    assert "weights_00000001" in directories(tmp_path)


def test_temporary_weights_are_removed(tmp_path, checkpoint):
    weights = on_disk(tmp_path, checkpoint)(weight_dir=None)
    asyncio.run(weights.push([], some_weights(1).items, 1))
    asyncio.run(weights.close())
    assert directories(tmp_path) == []


def test_a_directory_that_cannot_be_written_is_refused(tmp_path, checkpoint):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ValueError, match="cannot be written"):
        on_disk(tmp_path, checkpoint)(weight_dir=str(file / "w"))


HERE = "http://127.0.0.1:1"
AWAY = "http://10.0.0.9:1"


def disk_transport(directory, urls, **options):
    host = EngineHost(hf_checkpoint=directory, weights=dict, output_dir=directory)
    config = server_config("sglang", weight_sync="disk", **options)
    return pkgutil.resolve_name(WEIGHT_TRANSPORTS["disk"])(config, host, urls)


def test_servers_on_other_machines_need_a_shared_directory(tmp_path):
    with pytest.raises(ValueError, match=f"{AWAY} may not see"):
        disk_transport(tmp_path, [HERE, AWAY])


def test_local_servers_need_no_shared_directory(tmp_path):
    asyncio.run(disk_transport(tmp_path, [HERE]).close())


def test_a_shared_directory_serves_other_machines(tmp_path):
    shared = str(tmp_path / "shared")
    asyncio.run(disk_transport(tmp_path, [HERE, AWAY], weight_dir=shared).close())
