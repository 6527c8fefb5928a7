"""Locks, swapped directories and exports: written whole, loadable by transformers, never over
unknown files."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slime_tis.trainer.storage import exports
from slime_tis.trainer.storage.directories import DirectoryInUse, held, unwritable
from slime_tis.trainer.storage.hf_writer import write_hf_checkpoint
from tests.runs import largest_file
from tests.storage.killed import killed_at_each_operation


def export(target: Path, content: str) -> None:
    """Writes an export of two files."""
    exports.check_target(target, "--save-hf is 'hf'", "export")
    unfinished = exports.begin(target)
    (unfinished / "config.json").write_text(content)
    (unfinished / "part-0.safetensors").write_text(content)
    (unfinished / "part-0.safetensors").rename(unfinished / "model.safetensors")
    exports.finish(unfinished, target)


def contents(directory: Path) -> dict[str, str]:
    """The text of each file; none of an absent directory."""
    if not directory.exists():
        return {}
    return {path.name: path.read_text() for path in directory.iterdir()}


def test_a_first_export_killed_at_any_operation_is_absent(tmp_path):
    target = tmp_path / "hf"
    # nothing follows the operation that gives the directory its name
    for number in killed_at_each_operation(tmp_path, lambda: export(target, "new")):
        assert not target.exists(), f"killed at operation {number}"
        export(target, "third")
        assert names(tmp_path) == ["hf"], f"killed at operation {number}"
        shutil.rmtree(target)
    assert contents(target)["config.json"] == "new"


def test_an_export_killed_over_an_earlier_one_is_complete(tmp_path):
    target = tmp_path / "hf"
    export(target, "old")
    exported = set()
    for number in killed_at_each_operation(tmp_path, lambda: export(target, "new")):
        files = contents(target)
        assert len(files) in (0, 3), f"killed at operation {number}: {files}"
        exported.add((files.get("config.json"), files.get("model.safetensors")))
        export(target, "old")
        assert names(tmp_path) == ["hf"], f"killed at operation {number}"
    assert contents(target)["config.json"] == "new"
    assert exported == {("old", "old"), ("new", "new")}


@pytest.mark.parametrize(
    "make",
    [
        lambda left: (left / "thesis.txt").write_text("mine"),
        lambda left: [(left / name).write_text("") for name in ("config.json", "thesis.txt")],
        lambda left: (left.rmdir(), left.write_text("mine")),
        lambda left: (left.rmdir(), left.symlink_to("elsewhere")),
    ],
    ids=["a file", "a file beside ours", "a file in its place", "a link in its place"],
)
def test_a_users_file_in_the_way_of_an_export_stays(make, tmp_path):
    left = tmp_path / ".hf.unfinished"
    left.mkdir()
    make(left)
    before = sorted(tmp_path.rglob("*"))
    message = r"^--save-hf is 'hf' but .*\.hf\.unfinished' is in its way; move that"
    with pytest.raises(ValueError, match=message):
        export(tmp_path / "hf", "new")
    assert sorted(tmp_path.rglob("*")) == before


HOLD = """
import sys
from pathlib import Path
from slime_tis.trainer.storage.directories import held
with held({Path(sys.argv[1]): "--save is 'run'"}):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of the directory `run`."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run" / ".lock")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_held_lock_names_its_process(holder, tmp_path):
    message = f"process id {holder.pid} on {os.uname().nodename}"
    with (
        pytest.raises(DirectoryInUse, match=message),
        held({tmp_path / "run" / ".lock": "--output-dir is 'run'"}),
    ):
        pass


def test_the_lock_of_a_killed_process_is_taken(holder, tmp_path):
    holder.kill()
    holder.wait()
    lock = tmp_path / "run" / ".lock"
    assert lock.exists()
    with held({lock: "--save is 'run'"}):
        assert str(os.getpid()) in lock.read_text()


def test_a_released_lock_leaves_no_file(tmp_path):
    with held({tmp_path / "run" / ".lock": "--save is 'run'"}):
        pass
    assert names(tmp_path / "run") == []


def test_a_directory_that_cannot_be_locked_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ValueError, match="--save is 'x', which cannot be written: Not a directory"),
        held({tmp_path / "file" / "run" / ".lock": "--save is 'x'"}),
    ):
        pass


@pytest.mark.parametrize("name", [".", "a/b"], ids=["present", "absent"])
def test_a_writable_directory_has_no_message(name, tmp_path):
    assert unwritable(tmp_path / name) is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("file", "that is a file"),
        ("file/x", "is a file"),
        ("loop", "that is a broken link"),
        ("x" * 300, "File name too long"),
        # Python 3.11: "embedded null byte", 3.13: "embedded null character in path"
        ("a\0b", "embedded null "),
    ],
    ids=["a file", "below a file", "a loop of links", "a long name", "a null byte"],
)
def test_why_a_directory_cannot_be_written(name, words, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    assert words in str(unwritable(tmp_path / name))


@pytest.mark.skipif(os.access("/sys/kernel", os.W_OK), reason="this user may write /sys/kernel")
def test_the_directory_without_permission_is_named():
    assert unwritable("/sys/kernel/x/y") == "'/sys/kernel' cannot be written"


SIDE_FILES = [
    "chat_template.jinja",
    "config.json",
    "merges.txt",
    "qwen.tiktoken",
    "tokenization_qwen.py",
    "tokenizer.model",
]
"""Files of a checkpoint that an export copies."""

OMITTED_FILES = [
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    ".slime_tis_export.json",
    ".gitattributes",
]


@pytest.fixture
def like(tmp_path: Path) -> Path:
    """The checkpoint that an export takes its configuration and tokenizer from."""
    source = tmp_path / "like"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "llama", "torch_dtype": "float16"}')
    for name in (*SIDE_FILES, *OMITTED_FILES):
        if name != "config.json":
            (source / name).write_text(name)
    (source / "original.json").mkdir()
    return source


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "written").mkdir()
    return tmp_path / "written"


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_small_weights_are_written_to_one_file(directory, like):
    weights = {"a": torch.tensor([1.0, -2.5]), "b": torch.zeros(2, 3)}
    write_hf_checkpoint(directory, weights.items(), like=like, shard_bytes=32)
    assert names(directory) == sorted([*SIDE_FILES, "model.safetensors"])
    loaded = load_file(directory / "model.safetensors")
    assert loaded["a"].tolist() == [1.0, -2.5]
    assert loaded["b"].shape == (2, 3)


def test_the_tokenizer_is_copied(directory, like):
    write_hf_checkpoint(directory, [("a", torch.zeros(1))], like=like, shard_bytes=32)
    assert (directory / "merges.txt").read_text() == "merges.txt"


def test_the_configuration_names_the_dtype_of_the_weights(directory, like):
    write_hf_checkpoint(directory, [("a", torch.zeros(1))], like=like, shard_bytes=32)
    config = json.loads((directory / "config.json").read_text())
    assert config == {"model_type": "llama", "dtype": "float32"}


def test_a_shard_exceeds_its_limit_only_for_a_larger_tensor(directory, like):
    sizes = {"a": 10, "b": 10, "c": 30, "d": 5, "e": 15}  # elements of 2 bytes, 40 bytes per file
    weights = {name: torch.full((size,), 1.0, dtype=torch.bfloat16) for name, size in sizes.items()}
    write_hf_checkpoint(directory, weights.items(), like=like, shard_bytes=40)
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert names(directory) == sorted([*SIDE_FILES, *shards, "model.safetensors.index.json"])
    tensors = [sorted(load_file(directory / shard)) for shard in shards]
    assert tensors == [["a", "b"], ["c"], ["d", "e"]]
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert index == {
        "metadata": {"total_size": 140},
        "weight_map": {
            "a": shards[0],
            "b": shards[0],
            "c": shards[1],
            "d": shards[2],
            "e": shards[2],
        },
    }


def test_views_that_share_memory_are_written_separately(directory, like):
    whole = torch.arange(6.0).view(2, 3)
    write_hf_checkpoint(
        directory, [("row", whole[0]), ("transposed", whole.T)], like=like, shard_bytes=100
    )
    loaded = load_file(directory / "model.safetensors")
    assert loaded["row"].tolist() == [0.0, 1.0, 2.0]
    assert loaded["transposed"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


def test_a_full_disk_leaves_the_other_weights_to_the_caller(directory, like):
    """Iterating over them may be a collective, which every rank must end."""
    given = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(4):
            given.append(i)
            yield f"w{i}", torch.zeros(100_000, dtype=torch.uint8)

    stream = weights()
    with largest_file(50_000), pytest.raises(OSError, match="File too large"):
        write_hf_checkpoint(directory, stream, like=like, shard_bytes=100_000)
    assert given == [0, 1]
    assert [name for name, _ in stream] == ["w2", "w3"]


def test_a_target_whose_name_is_not_utf8_is_refused(tmp_path):
    with pytest.raises(ValueError, match="its name is not UTF-8"):
        exports.check_target(tmp_path / "a\ud800", "--save-hf is 'hf'", "export")
