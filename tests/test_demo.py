"""The demos refuse a directory that cannot be made, before they train."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime_tis.demo import demo_commands


def too_late(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("the model is trained before the directory is refused")


@pytest.mark.parametrize(
    "command", [demo_commands.demo, demo_commands.diagnosis_demo], ids=["demo", "diagnose --demo"]
)
@pytest.mark.parametrize(
    "directory",
    ["/proc/x", "file/x", "a" * 300, "nul\0", "/dev/null/x"],
    ids=["procfs", "below a file", "long name", "NUL", "below a device"],
)
def test_unusable_directory_is_refused_before_training(
    command: Callable[[str], Any], directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo_commands, "prepare", too_late)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot be made \(.*\); give another"):
        command(directory)


def test_existing_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_commands, "prepare", too_late)
    with pytest.raises(ValueError, match="exists already"):
        demo_commands.demo(str(tmp_path))


def test_the_demo_does_not_freeze_the_objects_of_its_caller(tmp_path: Path) -> None:
    before = gc.get_freeze_count()
    with pytest.raises(ValueError, match="exists already"):
        demo_commands.demo(str(tmp_path))
    assert gc.get_freeze_count() == before
