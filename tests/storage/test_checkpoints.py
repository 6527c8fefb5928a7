"""Checkpoint directories and the trainer's state in them: which is complete, damaged, kept or
refused."""

import json
import os
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from slime_tis.trainer.storage import checkpoint_files as files
from slime_tis.trainer.storage.checkpoint_files import (
    TrainerState,
    changed_options,
    check_options,
    read_trainer_state,
)
from slime_tis.trainer.storage.directories import remove_files
from tests.storage.killed import killed_at_each_operation


def write(directory: Path, step: int, run: str) -> Path:
    """A complete checkpoint of a run."""
    checkpoint = files.checkpoint_path(directory, step)
    unfinished = files.begin(checkpoint)
    (unfinished / "__0_0.distcp").write_bytes(bytes(range(100)) * step)
    (unfinished / files.TRAINER_STATE).write_text(json.dumps({"run": run, "step": step}))
    files.write_manifest(unfinished, files.checksums(unfinished, files.files_of(unfinished)))
    files.finish(unfinished, checkpoint, run)
    return checkpoint


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_checkpoints_are_directories_in_the_order_of_steps(tmp_path):
    steps = ["iter_0000002", "iter_9999999", "iter_10000000"]
    # U+0663 is the Arabic digit 3
    others = ["iter_abc", "iter_", "iter_-1", "iter_1.5", "xiter_1", "iter_\u0663"]
    for name in (*steps, *others):
        (tmp_path / name).mkdir()
    (tmp_path / "iter_0000003").write_text("a file")
    assert [path.name for path in files.checkpoints(tmp_path)] == steps


def test_an_absent_directory_has_no_checkpoints(tmp_path):
    assert files.checkpoints(tmp_path / "absent") == []


def test_checksums_are_sha256(tmp_path):
    (tmp_path / "a").write_text("abc")
    assert files.checksums(tmp_path, ["a"]) == {
        "a": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    }


def test_the_trainer_state_is_read_back(tmp_path):
    (tmp_path / "trainer_state.json").write_text(json.dumps(asdict(STATE)))
    assert read_trainer_state(tmp_path) == STATE


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "does not list trainer_state.json"),
        ("nonsense\n", "line 1 of SHA256SUMS"),
        ("0" * 64 + "  ../../etc/passwd\n", "line 1 of SHA256SUMS"),
        ("0" * 64 + "  /etc/passwd\n", "line 1 of SHA256SUMS"),
    ],
    ids=["empty", "nonsense", "leads out", "absolute"],
)
def test_a_damaged_manifest_is_named(text, message, tmp_path):
    checkpoint = write(tmp_path, 1, "a")
    (checkpoint / files.MANIFEST).write_text(text)
    with pytest.raises(files.Damaged, match=message):
        files.read_manifest(checkpoint)


def flip(file: Path) -> None:
    """Changes one bit in the middle."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 8
    file.write_bytes(data)


DAMAGES = {
    "flipped bit": flip,
    "cut": lambda file: os.truncate(file, file.stat().st_size // 2),
    "removed": lambda file: file.unlink(),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"x\n"),
    "a directory": lambda file: (file.unlink(), file.mkdir()),
}


@pytest.mark.parametrize("name", ["__0_0.distcp", files.TRAINER_STATE])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_every_damaged_file_is_named(name, damage, tmp_path):
    checkpoint = write(tmp_path, 1, "a")
    damage(checkpoint / name)
    with pytest.raises(files.Damaged, match=re.escape(name)):
        files.check(checkpoint, files.read_manifest(checkpoint))


# a flipped bit may be in the checksum of any file, so the message may name another one
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_manifest_is_refused(damage, tmp_path):
    checkpoint = write(tmp_path, 1, "a")
    damage(checkpoint / files.MANIFEST)
    with pytest.raises(files.Damaged):
        files.check(checkpoint, files.read_manifest(checkpoint))


@pytest.mark.parametrize(
    ("retain", "kept"),
    [(1, [7]), (2, [6, 7]), (3, [4, 6, 7])],
    ids=["one", "two", "three"],
)
def test_the_last_checkpoints_of_a_run_are_kept(retain, kept, tmp_path):
    for step in (1, 4, 6, 7):
        write(tmp_path, step, "mine")
    files.prune(tmp_path / "iter_0000007", "mine", retain=retain)
    assert names(tmp_path) == [f"iter_000000{step}" for step in kept]


def test_checkpoints_of_another_run_are_kept(tmp_path):
    write(tmp_path, 2, "other")
    write(tmp_path, 7, "mine")
    files.prune(tmp_path / "iter_0000007", "mine", retain=1)
    assert names(tmp_path) == ["iter_0000002", "iter_0000007"]


def test_checkpoints_of_another_run_are_not_counted(tmp_path):
    write(tmp_path, 1, "mine")
    write(tmp_path, 2, "other")
    write(tmp_path, 7, "mine")
    files.prune(tmp_path / "iter_0000007", "mine", retain=2)
    assert names(tmp_path) == ["iter_0000001", "iter_0000002", "iter_0000007"]


def test_later_checkpoints_are_kept(tmp_path):
    for step in (6, 7, 9):
        write(tmp_path, step, "mine")
    files.prune(tmp_path / "iter_0000007", "mine", retain=1)
    assert names(tmp_path) == ["iter_0000007", "iter_0000009"]


def test_a_checkpoint_with_a_users_file_is_kept(tmp_path):
    notes = write(tmp_path, 4, "mine") / "notes.txt"
    notes.write_text("mine")
    write(tmp_path, 7, "mine")
    files.prune(tmp_path / "iter_0000007", "mine", retain=1)
    assert names(tmp_path) == ["iter_0000004", "iter_0000007"]
    assert notes.read_text() == "mine"


def test_a_step_that_is_saved_again_replaces_the_first(tmp_path):
    write(tmp_path, 1, "a")
    write(tmp_path, 1, "a")
    assert names(tmp_path) == ["iter_0000001"]


def test_a_replaced_checkpoint_of_another_run_is_kept(tmp_path):
    write(tmp_path, 1, "a")
    write(tmp_path, 1, "b")
    assert names(tmp_path) == ["iter_0000001", "iter_0000001.replaced"]
    assert [files.run_of(tmp_path / name) for name in names(tmp_path)] == ["b", "a"]


def test_a_replaced_damaged_checkpoint_is_kept(tmp_path):
    write(tmp_path, 1, "a")
    write(tmp_path, 1, "b")
    (tmp_path / "iter_0000001" / files.TRAINER_STATE).write_text("damaged")
    write(tmp_path, 1, "b")
    assert names(tmp_path) == ["iter_0000001", "iter_0000001.replaced", "iter_0000001.replaced-2"]


@pytest.mark.parametrize("name", [".iter_0000003.unfinished", ".iter_0000001.removed"])
def test_directories_of_killed_runs_are_removed(name, tmp_path):
    (tmp_path / name).mkdir()
    for file in ("__0_1.distcp", ".metadata.tmp", "common.pt", ".tmpSpjdmX"):
        (tmp_path / name / file).write_text("")
    write(tmp_path, 4, "a")
    assert names(tmp_path) == ["iter_0000004"]


def test_a_users_file_in_an_unfinished_checkpoint_is_kept(tmp_path):
    thesis = tmp_path / ".iter_0000005.unfinished" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("mine")
    with pytest.raises(OSError, match="holds files that this program did not write"):
        write(tmp_path, 5, "a")
    assert thesis.read_text() == "mine"


def test_a_file_that_is_gone_does_not_stop_a_removal(tmp_path):
    (tmp_path / "save").mkdir()
    (tmp_path / "save" / "common.pt").write_text("")
    remove_files(tmp_path / "save", ["common.pt", "gone.pt"])
    assert names(tmp_path) == []


def test_a_link_named_like_an_unfinished_checkpoint_is_kept(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "common.pt").write_text("mine")
    (tmp_path / "save").mkdir()
    link = tmp_path / "save" / ".iter_0000003.unfinished"
    link.symlink_to(tmp_path / "elsewhere")
    write(tmp_path / "save", 4, "a")
    assert (tmp_path / "elsewhere" / "common.pt").read_text() == "mine"
    assert link.is_symlink()


def test_a_save_killed_at_any_operation_keeps_two_checkpoints(tmp_path):
    for step in (1, 2):
        write(tmp_path, step, "a")

    def save() -> None:
        files.prune(write(tmp_path, 3, "a"), "a", retain=2)

    for number in killed_at_each_operation(tmp_path, save):
        complete = files.checkpoints(tmp_path)
        assert len(complete) >= 2, f"killed at operation {number}"
        for checkpoint in complete:
            files.check(checkpoint, files.read_manifest(checkpoint))
        files.sweep(tmp_path)  # as a resumed run does
        files.prune(complete[-1], "a", retain=2)
        kept = [path.name for path in complete[-2:]]
        assert names(tmp_path) == kept, f"killed at operation {number}"
        # the next process begins with steps 1 and 2 again
        for path in complete:
            if path.exists() and files.step_of(path) == 3:
                path.rename(tmp_path.parent / f"third{number}")
        for step in (1, 2):
            if not files.checkpoint_path(tmp_path, step).exists():
                write(tmp_path, step, "a")
    assert names(tmp_path) == ["iter_0000002", "iter_0000003"]


STATE = TrainerState(
    run="a",
    step=3,
    rollout_id=3,
    dataset={"epoch": 0, "position": 2},
    unfinished=[],
    evaluation_due=False,
    sampler_weight_version=2,
    first_accuracy=None,
    token_budget=512,
    options={"lr": 1e-4},
    model="0",
)


@pytest.mark.parametrize(
    "change", [{"step": "3"}, {"unfinished": {}}, {"first_accuracy": []}], ids=str
)
def test_a_value_of_another_type_is_named(change, tmp_path):
    (tmp_path / "trainer_state.json").write_text(json.dumps({**asdict(STATE), **change}))
    with pytest.raises(ValueError, match=rf"trainer_state\.json: {next(iter(change))}: "):
        read_trainer_state(tmp_path)


SAVED = {"seed": 1, "rollout_seed": 5, "rollout_shuffle": False, "lr": 1.0}
SHUFFLED = {**SAVED, "rollout_shuffle": True}


@pytest.mark.parametrize(
    ("saved", "now", "message"),
    [
        (SAVED, {**SAVED, "seed": 2}, "--seed is 2 but was 1"),
        (SHUFFLED, {**SHUFFLED, "rollout_seed": 6}, "--rollout-seed is 6 but was 5"),
        (SAVED, SHUFFLED, "--rollout-shuffle is True"),
    ],
    ids=["seed", "rollout seed of shuffled prompts", "shuffle"],
)
def test_options_that_a_resumed_run_must_keep(saved, now, message):
    with pytest.raises(ValueError, match=message):
        check_options(saved, now)


FAST = {"bf16_if_fast": True, "rollout_engine": "local", "rollout_precision": "bf16"}


@pytest.mark.parametrize(
    ("was_bf16", "flags"),
    [(False, "add --no-bf16, because"), (True, "add --bf16 --rollout-precision bf16, because")],
    ids=["float32", "bf16"],
)
def test_a_machine_with_another_fast_precision_is_told_the_flags(was_bf16, flags):
    saved = {**FAST, "bf16": was_bf16}
    with pytest.raises(ValueError, match=flags):
        check_options(saved, {**saved, "bf16": not was_bf16})


def test_the_rollout_seed_may_change_without_shuffling():
    check_options(SAVED, {**SAVED, "rollout_seed": 6, "lr": 2.0})


def test_changed_options_are_reported_in_one_line():
    saved = {"lr": 1e-4, "save": "a", "ids": [1, 2], "gone": 1, "rm_type": "math"}
    now = {"lr": 5e-5, "save": "b", "ids": [1, 2], "new": 1, "rm_type": "xyz\n"}
    assert changed_options(saved, now) == "--lr 0.0001 → 5e-05, --rm-type 'math' → 'xyz\\n'"


def test_equal_options_are_not_reported():
    assert changed_options(SAVED, SAVED) == ""
