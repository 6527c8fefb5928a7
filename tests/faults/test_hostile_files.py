"""Files that somebody prepared to run code when they are loaded: nothing runs, and one message
names the file."""

import io
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from slime_tis.torch_files import UnsafeFile, UnsafeTorch, load_tensors
from slime_tis.trainer.megatron.checkpoint_reader import read_metadata
from slime_tis.trainer.storage.checkpoint_files import checksums, files_of, write_manifest
from tests.faults.forked import run_forked
from tests.runs import make_task

TIMEOUT = 120.0


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.marker}",)


def metadata_of(checkpoint: Path) -> Metadata:
    return pickle.loads((checkpoint / ".metadata").read_bytes())


def write_metadata(checkpoint: Path, metadata: Any) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


def torch_bytes(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def point_to(checkpoint: Path, index: MetadataIndex, content: bytes) -> None:
    """Appends the content to the shard file of an entry, and points the entry of `.metadata` to
    it."""
    metadata = metadata_of(checkpoint)
    info = metadata.storage_data[index]
    shard = checkpoint / info.relative_path
    info.offset = shard.stat().st_size
    info.length = len(content)
    with shard.open("ab") as file:
        file.write(content)
    write_metadata(checkpoint, metadata)


def first_of(checkpoint: Path, kind: type) -> MetadataIndex:
    """The index of the first tensor, or of the first object that is not one."""
    metadata = metadata_of(checkpoint)
    for index in metadata.storage_data:
        is_weight = index.fqn.startswith("decoder.")
        if is_weight and isinstance(metadata.state_dict_metadata[index.fqn], kind):
            return index
    raise AssertionError(f"no {kind.__name__}")


def as_metadata(checkpoint: Path, evil: Evil) -> None:
    write_metadata(checkpoint, evil)


def in_metadata(checkpoint: Path, evil: Evil) -> None:
    metadata = metadata_of(checkpoint)
    metadata.planner_data = {"plan": evil}
    write_metadata(checkpoint, metadata)


def in_metadata_of_a_rank(checkpoint: Path, evil: Evil) -> None:
    (checkpoint / "__0.metadata").write_bytes(pickle.dumps(evil))
    (checkpoint / ".metadata").unlink()


def as_common_state(checkpoint: Path, evil: Evil) -> None:
    torch.save({"optimizer": evil}, checkpoint / "common.pt")


def as_legacy_common_state(checkpoint: Path, evil: Evil) -> None:
    torch.save({"optimizer": evil}, checkpoint / "common.pt", _use_new_zipfile_serialization=False)


def as_object(checkpoint: Path, evil: Evil) -> None:
    point_to(checkpoint, first_of(checkpoint, BytesStorageMetadata), torch_bytes([evil]))


def as_legacy_object(checkpoint: Path, evil: Evil) -> None:
    content = torch_bytes([evil], _use_new_zipfile_serialization=False)
    point_to(checkpoint, first_of(checkpoint, BytesStorageMetadata), content)


def as_tensor(checkpoint: Path, evil: Evil) -> None:
    point_to(checkpoint, first_of(checkpoint, TensorStorageMetadata), torch_bytes(evil))


def as_object_in_the_place_of_a_tensor(checkpoint: Path, evil: Evil) -> None:
    index = first_of(checkpoint, TensorStorageMetadata)
    point_to(checkpoint, index, torch_bytes(evil))
    metadata = metadata_of(checkpoint)
    metadata.state_dict_metadata[index.fqn] = BytesStorageMetadata()
    info = metadata.storage_data.pop(index)
    metadata.storage_data[type(index)(index.fqn)] = info
    write_metadata(checkpoint, metadata)


def as_pickled_state_of_fp8(checkpoint: Path, evil: Evil) -> None:
    pickled = torch.frombuffer(bytearray(pickle.dumps(evil)), dtype=torch.uint8)
    point_to(checkpoint, first_of(checkpoint, BytesStorageMetadata), torch_bytes([pickled]))


def as_update_samples(checkpoint: Path, evil: Evil) -> None:
    torch.save({"embedding": evil}, checkpoint / "weight_update_samples.pt")


def as_rollout_weights(checkpoint: Path, evil: Evil) -> None:
    (checkpoint / "rollout_weights.safetensors").write_bytes(torch_bytes({"weight": evil}))


def as_file_elsewhere(checkpoint: Path, evil: Evil) -> None:
    outside = checkpoint.parent / "outside.distcp"
    outside.write_bytes(torch_bytes(evil))
    index = first_of(checkpoint, TensorStorageMetadata)
    metadata = metadata_of(checkpoint)
    metadata.storage_data[index].relative_path = "../outside.distcp"
    write_metadata(checkpoint, metadata)


ATTACKS: dict[Callable[[Path, Evil], None], str] = {
    as_metadata: ".metadata was not loaded: it refers to posix.system",
    in_metadata: ".metadata was not loaded: it refers to posix.system",
    in_metadata_of_a_rank: ".metadata",
    as_common_state: "common.pt was not loaded",
    as_legacy_common_state: "common.pt was not loaded",
    as_object: ".distcp was not loaded",
    as_legacy_object: ".distcp was not loaded",
    as_tensor: ".distcp was not loaded",
    as_object_in_the_place_of_a_tensor: "was it saved with another model",
    as_pickled_state_of_fp8: "_extra_state",
    as_update_samples: "weight_update_samples.pt was not loaded",
    as_rollout_weights: "rollout_weights.safetensors",
    as_file_elsewhere: ".metadata was not loaded: it refers to the file '../outside.distcp'",
}
"""Where the code is, and the words of the message."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """A run of two steps whose rollout engine has older weights: its flags and its directory."""
    directory = tmp_path_factory.mktemp("hostile")
    flags = [*make_task(directory), "--update-weights-interval", "2", "--use-rollout-logprobs"]
    saving = ["--num-rollout", "1", "--save", str(directory / "save")]
    saving += ["--output-dir", str(directory / "run")]
    outcome = run_forked([*flags, *saving], directory / "log", timeout=TIMEOUT)
    assert outcome.status == 0, outcome.error
    assert (directory / "save" / "iter_0000001" / "rollout_weights.safetensors").exists()
    return flags, directory


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_loaded_checkpoint_runs_no_code(
    attack: Callable[[Path, Evil], None], trained: tuple[list[str], Path], tmp_path: Path
) -> None:
    flags, directory = trained
    shutil.copytree(directory / "save", tmp_path / "save")
    checkpoint = tmp_path / "save" / "iter_0000001"
    attack(checkpoint, Evil(tmp_path / "ran"))
    write_manifest(checkpoint, checksums(checkpoint, files_of(checkpoint)))
    loading = ["--num-rollout", "2", "--load", str(tmp_path / "save")]
    loading += ["--output-dir", str(tmp_path / "run")]
    outcome = run_forked([*flags, *loading], tmp_path / "log", timeout=TIMEOUT)
    assert not Path(tmp_path / "ran").exists()
    assert outcome.status == 1 and not outcome.traceback
    message = outcome.error.splitlines()[-1]
    assert ATTACKS[attack] in message and "weights_only" not in outcome.error


def test_metadata_is_what_torch_reads(trained: tuple[list[str], Path]) -> None:
    checkpoint = trained[1] / "save" / "iter_0000001"
    expected = metadata_of(checkpoint)
    metadata = read_metadata(checkpoint / ".metadata")
    assert metadata.state_dict_metadata == expected.state_dict_metadata
    assert metadata.storage_data == expected.storage_data


def test_damaged_metadata_is_refused_or_read(
    trained: tuple[list[str], Path], tmp_path: Path
) -> None:
    content = (trained[1] / "save" / "iter_0000001" / ".metadata").read_bytes()
    chance = random.Random(0)
    refused = 0
    for _ in range(500):
        damaged = bytearray(content)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        (tmp_path / ".metadata").write_bytes(damaged)
        try:
            read_metadata(tmp_path / ".metadata")
        except UnsafeFile:
            refused += 1
    assert refused > 250


CLASSES_CHANGED = {
    "by a state": b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N(d(Vx\nI1\nstb.",
    "by attributes": b"ctorch.distributed.checkpoint.metadata\nMetadata\nN(dVx\nI1\ns\x86b.",
}


@pytest.mark.parametrize("name", CLASSES_CHANGED)
def test_metadata_changes_no_class_of_torch(name: str, tmp_path: Path) -> None:
    before = dict(vars(Metadata))
    (tmp_path / ".metadata").write_bytes(CLASSES_CHANGED[name])
    with pytest.raises(UnsafeFile, match="is not torch's metadata"):
        read_metadata(tmp_path / ".metadata")
    assert dict(vars(Metadata)) == before


@pytest.mark.parametrize("version", ["2.4.1", "2.5.0+cu124", "2.9.1", "2.6.0.dev20250101"])
def test_an_older_torch_loads_no_file_of_others(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"samples": []}, tmp_path / "4.pt")
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(UnsafeTorch, match=r"4.pt was not loaded: .* CVE-2026-24747.*torch>=2.10"):
        load_tensors(tmp_path / "4.pt")


@pytest.mark.parametrize("version", ["2.10.0", "2.13.0+cpu", "3.0.0"])
def test_a_newer_torch_loads_tensors(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"samples": [torch.ones(2)]}, tmp_path / "4.pt")
    monkeypatch.setattr(torch, "__version__", version)
    assert load_tensors(tmp_path / "4.pt")["samples"][0].tolist() == [1, 1]
