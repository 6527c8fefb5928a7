"""Checkpoint directories and the trainer's state in them: which is complete, damaged, kept or
refused."""

import json
import os
from dataclasses import asdict

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


def write(directory, step, run, *, extra=None):
    checkpoint = files.checkpoint_path(directory, step)
    unfinished = files.begin(checkpoint)
    (unfinished / "__0_0.distcp").write_bytes(bytes(range(100)) * step)
    (unfinished / files.TRAINER_STATE).write_text(json.dumps({"run": run, "step": step}))
    files.write_manifest(unfinished, files.checksums(unfinished, files.files_of(unfinished)))
    files.finish(unfinished, checkpoint, run)
    if extra is not None:
        (checkpoint / extra).write_text("mine")
    return checkpoint


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_names_checksums_and_states(tmp_path):
    steps = ["iter_0000002", "iter_9999999", "iter_10000000"]
    for name in (*steps, "iter_abc", "iter_", "iter_-1", "iter_1.5", "xiter_1", "iter_\u0663"):
        (tmp_path / name).mkdir()
    (tmp_path / "iter_0000003").write_text("a file")
    assert [path.name for path in files.checkpoints(tmp_path)] == steps
    assert files.checkpoints(tmp_path / "absent") == []
    (tmp_path / "a").write_text("abc")
    assert files.checksums(tmp_path, ["a"]) == {
        "a": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    }
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


def flip(file):
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


@pytest.mark.parametrize("name", ["__0_0.distcp", files.TRAINER_STATE, files.MANIFEST])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_every_damaged_file_is_named(name, damage, tmp_path):
    checkpoint = write(tmp_path, 1, "a")
    damage(checkpoint / name)
    with pytest.raises(files.Damaged) as error:
        files.check(checkpoint, files.read_manifest(checkpoint))
    assert name == files.MANIFEST or name in str(error.value)  # a damaged sum is that of any file


def test_only_earlier_checkpoints_of_the_run_are_removed(tmp_path):
    for step in (1, 2, 4, 6, 7, 9):
        write(
            tmp_path,
            step,
            "other" if step == 2 else "mine",
            extra="notes.txt" if step == 4 else None,
        )
    files.prune(tmp_path / "iter_0000007", "mine", retain=2)
    kept = ["iter_0000002", "iter_0000004", "iter_0000006", "iter_0000007", "iter_0000009"]
    assert (
        names(tmp_path) == kept
    )  # another run's, one with a strange file, the last two, and a later one
    assert (tmp_path / "iter_0000004" / "notes.txt").read_text() == "mine"
    files.prune(tmp_path / "iter_0000007", "mine", retain=1)
    assert names(tmp_path) == ["iter_0000002", "iter_0000004", "iter_0000007", "iter_0000009"]


def test_the_same_step_again_takes_the_place_of_the_first(tmp_path):
    write(tmp_path, 1, "a")
    write(tmp_path, 1, "a")
    assert names(tmp_path) == ["iter_0000001"]
    write(tmp_path, 1, "b")
    assert names(tmp_path) == ["iter_0000001", "iter_0000001.replaced"]
    assert [files.run_of(tmp_path / name) for name in names(tmp_path)] == ["b", "a"]
    (tmp_path / "iter_0000001" / files.TRAINER_STATE).write_text("damaged")
    write(tmp_path, 1, "b")
    assert names(tmp_path) == ["iter_0000001", "iter_0000001.replaced", "iter_0000001.replaced-2"]


def test_what_killed_runs_left_is_swept_and_a_strange_file_in_it_is_not(tmp_path):
    for name in (".iter_0000003.unfinished", ".iter_0000001.removed"):
        (tmp_path / name).mkdir()
        for file in ("__0_1.distcp", ".metadata.tmp", "common.pt", ".tmpSpjdmX"):
            (tmp_path / name / file).write_text("")
    write(tmp_path, 4, "a")
    assert names(tmp_path) == ["iter_0000004"]
    (tmp_path / ".iter_0000005.unfinished").mkdir()
    (tmp_path / ".iter_0000005.unfinished" / "thesis.txt").write_text("mine")
    with pytest.raises(OSError, match="holds files that this program did not write"):
        write(tmp_path, 5, "a")
    assert (tmp_path / ".iter_0000005.unfinished" / "thesis.txt").read_text() == "mine"


def test_a_file_that_is_gone_does_not_stop_a_removal(tmp_path):
    (tmp_path / "save").mkdir()
    (tmp_path / "save" / "common.pt").write_text("")
    remove_files(tmp_path / "save", ["common.pt", "gone.pt"])
    assert names(tmp_path) == []


def test_a_link_with_the_name_of_a_left_over_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "common.pt").write_text("mine")
    (tmp_path / "save").mkdir()
    link = tmp_path / "save" / ".iter_0000003.unfinished"
    link.symlink_to(tmp_path / "elsewhere")
    write(tmp_path / "save", 4, "a")
    assert (tmp_path / "elsewhere" / "common.pt").read_text() == "mine" and link.is_symlink()


def test_a_run_killed_at_any_operation_on_checkpoints_leaves_whole_ones_and_the_next_save_tidies_up(
    tmp_path,
):
    for step in (1, 2):
        write(tmp_path, step, "a")

    def save():
        files.prune(write(tmp_path, 3, "a"), "a", retain=2)

    for number in killed_at_each_operation(tmp_path, save):
        whole = files.checkpoints(tmp_path)
        assert len(whole) >= 2, f"killed at operation {number}"
        for checkpoint in whole:
            files.check(checkpoint, files.read_manifest(checkpoint))
        files.sweep(tmp_path)  # as a resumed run does
        files.prune(whole[-1], "a", retain=2)
        assert names(tmp_path) == [path.name for path in whole[-2:]], (
            f"killed at operation {number}"
        )
        for path in whole:
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


def test_changed_options_are_refused_with_both_values_or_reported_in_one_line():
    saved = {"seed": 1, "rollout_seed": 5, "rollout_shuffle": False, "lr": 1.0}
    check_options(saved, {**saved, "rollout_seed": 6, "lr": 2.0})
    shuffled = {**saved, "rollout_shuffle": True}
    for before, now, words in (
        (saved, {**saved, "seed": 2}, "--seed is 2 .* has 1"),
        (shuffled, {**shuffled, "rollout_seed": 6}, "--rollout-seed is 6 .* has 5"),
        (saved, shuffled, "--rollout-shuffle is True"),
    ):
        with pytest.raises(ValueError, match=words):
            check_options(before, now)
    saved = {"lr": 1e-4, "save": "a", "ids": [1, 2], "gone": 1, "rm_type": "math"}
    now = {"lr": 5e-5, "save": "b", "ids": [1, 2], "new": 1, "rm_type": "xyz\n"}
    assert changed_options(saved, now) == "--lr 0.0001 → 5e-05, --rm-type 'math' → 'xyz\\n'"
    assert changed_options(saved, saved) == ""
