"""Weights on disk: whole directories or none, read by other programs, and by servers."""

import asyncio
import json
import os
import resource
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from slime_tis.trainer.engines.sglang.client import Server, ServerError
from slime_tis.trainer.engines.sglang.weights.disk import DiskSync
from tests.rollout.sglang.weight_servers import WeightServer, digests, some_weights, with_clients
from tests.runs import fork_server


def sync(directory: Path | None, checkpoint: Path, bucket_bytes: int = 1 << 30) -> DiskSync:
    return DiskSync(directory, hf_checkpoint=checkpoint, device="cpu", bucket_bytes=bucket_bytes, timeout=60.0)


def push(weights: DiskSync, named: dict[str, Tensor], version: int) -> None:
    assert asyncio.run(weights.push([], named.items, version)) == {}


def directories(path: Path) -> list[str]:
    return sorted(each.name.split("_")[0] + "_" + each.name.split("_")[1] for each in path.iterdir() if each.is_dir())


@pytest.mark.parametrize("bucket_bytes", [1 << 30, 20_000], ids=["one file", "several files"])
def test_transformers_reads_what_is_written(tmp_path: Path, checkpoint: Path, bucket_bytes: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    named = {name: tensor + 0.125 for name, tensor in model.state_dict().items()}
    weights = sync(tmp_path, checkpoint, bucket_bytes)
    push(weights, named, 3)
    (written,) = (each for each in tmp_path.iterdir() if each.is_dir())
    loaded = AutoModelForCausalLM.from_pretrained(written)
    assert {name: tensor.dtype for name, tensor in loaded.state_dict().items()} == dict.fromkeys(named, torch.float32)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, named[name]), name
    prompt = "sort 312>"
    assert AutoTokenizer.from_pretrained(written)(prompt) == AutoTokenizer.from_pretrained(checkpoint)(prompt)
    others = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    shards = {each.name for each in written.iterdir()} - others - {"chat_template.jinja"}
    if bucket_bytes > 20_000:
        assert shards == {"model.safetensors"}
        return
    index = json.loads((written / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in named.values())
    assert set(index["weight_map"]) == set(named)
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3 and shards == {*files, "model.safetensors.index.json"}
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    for file in files:
        with safe_open(str(written / file), "pt") as tensors:
            assert set(tensors.keys()) == {name for name, where in index["weight_map"].items() if where == file}
            size = sum(tensors.get_tensor(name).nbytes for name in tensors.keys())  # noqa: SIM118
            assert size <= bucket_bytes or len(tensors.keys()) == 1


def test_servers_read_it_to_the_bit(pair: list[WeightServer], tmp_path: Path, checkpoint: Path) -> None:
    for server in pair:
        server.behave()
    weights = sync(tmp_path, checkpoint, 300)

    async def work(clients: list[Server]) -> None:
        for version in (1, 2):
            assert await weights.push(clients, some_weights(version).items, version) == {}
            assert directories(tmp_path) == [f"weights_{version:08d}"], "only the newest is kept"
        await weights.close()

    with_clients(pair, work)
    for server in pair:
        state = server.state()
        assert state["weights"] == [digests(some_weights(2))]
        assert (state["version"], state["paused"]) == ("2", False)
        one = ["pause_generation", "flush_cache", "update_weights_from_disk", "continue_generation"]
        assert server.calls() == one * 2
        body = server.bodies("/update_weights_from_disk")[1]
        assert body.pop("model_path").startswith(f"{tmp_path}/weights_00000002_")
        assert body == {"weight_version": "2", "load_format": "auto", "flush_cache": False}


def test_a_server_that_comes_back_reads_the_newest(pair: list[WeightServer], tmp_path: Path, checkpoint: Path) -> None:
    pair[0].behave(refuse={"/update_weights_from_disk": 2})
    pair[1].behave()
    weights = sync(tmp_path, checkpoint)

    async def work(clients: list[Server]) -> None:
        assert await weights.restore(clients[0]) is False, "nothing has been written yet"
        failed = await weights.push(clients, some_weights(1).items, 1)
        assert list(failed) == [clients[0]] and "refused on purpose" in failed[clients[0]]
        assert pair[0].calls()[-2:] == ["abort_request", "continue_generation"]
        with pytest.raises(ServerError, match="refused on purpose"):
            await weights.restore(clients[0])
        assert await weights.restore(clients[0]) is True
        await weights.close()

    with_clients(pair, work)
    assert [server.state()["weights"] for server in pair] == [[digests(some_weights(1))]] * 2
    assert [server.state()["version"] for server in pair] == ["1", "1"]


def test_a_source_that_fails_leaves_the_old_weights(tmp_path: Path, checkpoint: Path) -> None:
    weights = sync(tmp_path, checkpoint, 300)
    push(weights, some_weights(1), 1)

    def source() -> Iterator[tuple[str, Tensor]]:
        yield from list(some_weights(2).items())[:5]
        raise RuntimeError("rank 3 went away")

    with pytest.raises(RuntimeError, match="rank 3 went away"):
        asyncio.run(weights.push([], source, 2))
    assert directories(tmp_path) == ["weights_00000001"]


def test_a_full_disk_is_reported_and_the_source_exhausted(tmp_path: Path, checkpoint: Path) -> None:
    weights, given = sync(tmp_path, checkpoint, 100_000), []
    push(weights, some_weights(1), 1)

    def source() -> Iterator[tuple[str, Tensor]]:
        for i in range(8):
            given.append(i)
            yield f"w{i}", torch.zeros(100_000, dtype=torch.uint8)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(RuntimeError) as failure:
            asyncio.run(weights.push([], source, 2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert str(failure.value).startswith(f"the weights of version 2 could not be written to {tmp_path} (")
    assert str(failure.value).endswith("; free space or choose another --sglang-weight-dir.")
    assert given == list(range(8))
    assert directories(tmp_path) == ["weights_00000001"]


def crash(root: Path, checkpoint: Path) -> None:
    """Writes weights, and ends in the middle of writing others."""
    weights = sync(root, checkpoint, bucket_bytes=10)
    asyncio.run(weights.push([], lambda: [("a", torch.zeros(9))], 1))

    def source() -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.ones(9)
        yield "b", torch.ones(9)
        os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(weights.push([], source, 2))


def test_a_crash_in_between_leaves_the_old_one_and_the_next_run_cleans_up(tmp_path: Path, checkpoint: Path) -> None:
    process = fork_server().Process(target=crash, args=(tmp_path, checkpoint))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert directories(tmp_path) == ["unfinished_00000002", "weights_00000001"]
    (old,) = tmp_path.glob("weights_*")
    with safe_open(str(old / "model.safetensors"), "pt") as tensors:
        assert torch.equal(tensors.get_tensor("a"), torch.zeros(9))
    (tmp_path / "weights_of_mine").mkdir()
    (tmp_path / "weights_00000007_abcdef01").touch()
    os.symlink(checkpoint, tmp_path / "weights_00000008_abcdef01")
    weights = sync(tmp_path, checkpoint)
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        ".lock",
        "weights_00000007_abcdef01",
        "weights_00000008_abcdef01",
        "weights_of_mine",
    ]
    asyncio.run(weights.close())


def test_a_directory_is_for_one_run_at_a_time(tmp_path: Path, checkpoint: Path) -> None:
    first = sync(tmp_path, checkpoint)
    push(first, some_weights(1), 1)
    with pytest.raises(ValueError, match="another run is using"):
        sync(tmp_path, checkpoint)
    assert directories(tmp_path) == ["weights_00000001"]
    asyncio.run(first.close())
    assert directories(tmp_path) == ["weights_00000001"], "servers may still be asked to read it"
    second = sync(tmp_path, checkpoint)
    assert directories(tmp_path) == []
    asyncio.run(second.close())


def test_a_directory_that_cannot_be(tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot be written"):
        sync(tmp_path / "file/w", checkpoint)


def test_the_temporary_directory_is_private_and_goes(checkpoint: Path) -> None:
    weights = sync(None, checkpoint)
    push(weights, some_weights(1), 1)
    path = weights._directory
    assert path.stat().st_mode & 0o077 == 0 and directories(path) == ["weights_00000001"]
    asyncio.run(weights.close())
    assert not path.exists()


def test_temporary_weights_of_killed_runs_are_removed_and_nothing_else(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, strange, other = (tmp_path / f"slime_tis_weights_{name}" for name in ("killed", "strange", "other"))
    for directory in (killed, strange, other):
        (directory / "weights_00000003_0123abcd").mkdir(parents=True)
        (directory / "weights_00000003_0123abcd" / "model.safetensors").write_text("")
    for directory in (killed, strange):
        (directory / ".lock").write_text("")  # as after SIGKILL: a lock file that nobody holds
    (strange / "thesis.txt").write_text("mine")
    (tmp_path / "slime_tis_weights_link").symlink_to(killed)

    def sync_in_temporary() -> DiskSync:
        return DiskSync(None, hf_checkpoint=checkpoint, device="cpu", bucket_bytes=2**20, timeout=5)

    first = sync_in_temporary()
    kept = {"slime_tis_weights_link", strange.name, other.name}
    (own,) = {path.name for path in tmp_path.iterdir()} - kept
    second = sync_in_temporary()  # the first one is live
    assert len({path.name for path in tmp_path.iterdir()} - kept - {own}) == 1
    assert (strange / "thesis.txt").read_text() == "mine" and list(other.iterdir())
    asyncio.run(second.close())
    asyncio.run(first.close())
    assert {path.name for path in tmp_path.iterdir()} == kept
