"""The demos refuse a directory that cannot be made, before they train."""

import pytest

from slime_tis.demo import demo_commands


def too_late(*args, **kwargs):
    raise AssertionError("the model is trained before the directory is refused")


@pytest.mark.parametrize(
    "command", [demo_commands.demo, demo_commands.diagnosis_demo], ids=["demo", "diagnose --demo"]
)
@pytest.mark.parametrize("place", ["/proc/x", "file/x", "a" * 300, "nul\0", "/dev/null/x"])
def test_a_directory_that_cannot_be_made_is_refused_first(command, place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo_commands, "prepare", too_late)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot be made \(.*\); give another"):
        command(place)


def test_an_existing_directory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_commands, "prepare", too_late)
    with pytest.raises(ValueError, match="exists already"):
        demo_commands.demo(str(tmp_path))
