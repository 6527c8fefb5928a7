"""Locks, swapped directories and exports: written whole, loadable by transformers, never over
unknown files."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from slime_tis.trainer.storage import exports
from slime_tis.trainer.storage.directories import DirectoryInUse, held, unwritable
from slime_tis.trainer.storage.hf_writer import write_hf_checkpoint
from tests.runs import largest_file
from tests.storage.killed import killed_at_each_operation


def export(target, content):
    exports.check_target(target, "--save-hf is 'hf'", "export")
    unfinished = exports.begin(target)
    (unfinished / "config.json").write_text(content)
    (unfinished / "part-0.safetensors").write_text(content)
    (unfinished / "part-0.safetensors").rename(unfinished / "model.safetensors")
    exports.finish(unfinished, target)


def files(directory):
    return {path.name: path.read_text() for path in directory.iterdir()}


@pytest.mark.parametrize("before", [False, True], ids=["the first export", "over an earlier one"])
def test_an_export_killed_at_any_operation_is_complete(before, tmp_path):
    target = tmp_path / "hf"
    if before:
        export(target, "old")
    contents = set()
    for number in killed_at_each_operation(tmp_path, lambda: export(target, "new")):
        found = files(target) if target.exists() else {}
        contents.add(
            "".join(sorted({found.get(name, "") for name in ("config.json", "model.safetensors")}))
        )
        assert not found or len(found) == 3, f"killed at operation {number}: {found}"
        export(target, "old" if before else "third")
        assert [path.name for path in tmp_path.iterdir()] == ["hf"], f"killed at operation {number}"
        if not before:
            for path in target.iterdir():
                path.unlink()
            target.rmdir()
    assert files(target)["config.json"] == "new"
    assert contents == (
        {"old", "new"} if before else {""}
    )  # nothing follows the renaming of a first one


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
def test_what_somebody_else_has_in_the_way_is_refused_and_stays(make, tmp_path):
    left = tmp_path / ".hf.unfinished"
    left.mkdir()
    make(left)
    before = sorted(path for path in tmp_path.rglob("*"))
    with pytest.raises(
        ValueError, match=r"^--save-hf is 'hf' but .*\.hf\.unfinished' is in its way; move that"
    ):
        export(tmp_path / "hf", "new")
    assert sorted(path for path in tmp_path.rglob("*")) == before


HOLD = """
import sys
from pathlib import Path
from slime_tis.trainer.storage.directories import held
with held({Path(sys.argv[1]): "--save"}):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_lock_is_of_one_process_and_ends_with_it(tmp_path):
    lock = tmp_path / "run" / ".lock"
    command = [sys.executable, "-c", HOLD, str(lock)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with (
            pytest.raises(
                DirectoryInUse, match=f"process id {holder.pid} on {os.uname().nodename}"
            ),
            held({lock: "--output-dir"}),
        ):
            pass
        holder.kill()
    assert lock.exists()
    with held({lock: "--save"}):
        assert str(os.getpid()) in lock.read_text()
    assert os.listdir(tmp_path / "run") == []


def test_a_directory_that_cannot_be_locked_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ValueError, match="--save cannot be written: Not a directory"),
        held({tmp_path / "file" / "run" / ".lock": "--save"}),
    ):
        pass


def test_why_a_directory_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    assert unwritable(tmp_path) is None and unwritable(tmp_path / "a" / "b") is None
    for name, words in (
        ("file", "that is a file"),
        ("file/x", "is a file"),
        ("loop", "that is a broken link"),
        ("x" * 300, "File name too long"),
        ("a\0b", "embedded null byte"),
    ):
        assert words in str(unwritable(tmp_path / name))
    if not os.access("/sys/kernel", os.W_OK):
        assert unwritable("/sys/kernel/x/y") == "'/sys/kernel' cannot be written"


@pytest.fixture
def like(tmp_path):
    source = tmp_path / "like"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "llama", "torch_dtype": "float16"}')
    for name in (
        *(
            "tokenizer.model",
            "merges.txt",
            "chat_template.jinja",
            "model-00001-of-00002.safetensors",
        ),
        *("qwen.tiktoken", "tokenization_qwen.py"),
        *(
            "model.safetensors.index.json",
            "pytorch_model.bin",
            ".slime_tis_export.json",
            ".gitattributes",
        ),
    ):
        (source / name).write_text(name)
    (source / "original.json").mkdir()
    return source


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "written").mkdir()
    return tmp_path / "written"


SIDE = [
    *(
        "chat_template.jinja",
        "config.json",
        "merges.txt",
        "qwen.tiktoken",
        "tokenization_qwen.py",
        "tokenizer.model",
    )
]


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_one_file_and_what_lies_beside_the_weights(directory, like):
    weights = {"a": torch.tensor([1.0, -2.5]), "b": torch.zeros(2, 3)}
    write_hf_checkpoint(directory, weights.items(), like=like, shard_bytes=32)
    assert names(directory) == sorted([*SIDE, "model.safetensors"])
    assert (directory / "merges.txt").read_text() == "merges.txt"
    assert json.loads((directory / "config.json").read_text()) == {
        "model_type": "llama",
        "dtype": "float32",
    }
    loaded = load_file(directory / "model.safetensors")
    assert loaded["a"].tolist() == [1.0, -2.5] and loaded["b"].shape == (2, 3)


def test_shards_hold_at_most_their_bytes_but_for_a_larger_tensor(directory, like):
    sizes = {"a": 10, "b": 10, "c": 30, "d": 5, "e": 15}  # elements of 2 bytes, 40 bytes per file
    weights = {name: torch.full((size,), 1.0, dtype=torch.bfloat16) for name, size in sizes.items()}
    write_hf_checkpoint(directory, weights.items(), like=like, shard_bytes=40)
    files = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert names(directory) == sorted([*SIDE, *files, "model.safetensors.index.json"])
    assert [sorted(load_file(directory / file)) for file in files] == [
        ["a", "b"],
        ["c"],
        ["d", "e"],
    ]
    assert json.loads((directory / "model.safetensors.index.json").read_text()) == {
        "metadata": {"total_size": 140},
        "weight_map": {"a": files[0], "b": files[0], "c": files[1], "d": files[2], "e": files[2]},
    }
    assert json.loads((directory / "config.json").read_text())["dtype"] == "bfloat16"


def test_views_that_share_memory_are_written_as_tensors_of_their_own(directory, like):
    whole = torch.arange(6.0).view(2, 3)
    write_hf_checkpoint(
        directory, [("row", whole[0]), ("transposed", whole.T)], like=like, shard_bytes=100
    )
    loaded = load_file(directory / "model.safetensors")
    assert loaded["row"].tolist() == [0.0, 1.0, 2.0]
    assert loaded["transposed"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


def test_a_full_disk_is_an_error_of_the_system_and_the_rest_is_left_to_iterate(directory, like):
    given = []

    def weights():
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
