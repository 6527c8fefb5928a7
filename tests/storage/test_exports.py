"""Exported directories: what may be replaced, and what a process leaves that is killed at any of its operations."""

import pytest

from slime_tis.trainer.storage import exports
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
def test_an_export_killed_at_any_operation_is_the_old_one_or_the_new_one_and_the_next_takes_its_place(before, tmp_path):
    target = tmp_path / "hf"
    if before:
        export(target, "old")
    contents = set()
    for number in killed_at_each_operation(tmp_path, lambda: export(target, "new")):
        found = files(target) if target.exists() else {}
        contents.add("".join(sorted({found.get(name, "") for name in ("config.json", "model.safetensors")})))
        assert not found or len(found) == 3, f"killed at operation {number}: {found}"
        export(target, "old" if before else "third")
        assert [path.name for path in tmp_path.iterdir()] == ["hf"], f"killed at operation {number}"
        if not before:
            for path in target.iterdir():
                path.unlink()
            target.rmdir()
    assert files(target)["config.json"] == "new"
    assert contents == ({"old", "new"} if before else {""})  # nothing follows the renaming of a first one


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
    with pytest.raises(ValueError, match=r"^--save-hf is 'hf' but .*\.hf\.unfinished' is in its way; move that"):
        export(tmp_path / "hf", "new")
    assert sorted(path for path in tmp_path.rglob("*")) == before
