"""Files that are complete or as they were."""

import os

import pytest
import torch
from safetensors.torch import save_file

from slime_tis.atomic_files import atomic_file, write_atomically
from slime_tis.trainer.storage.directories import make_private, make_public


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "config.yaml"
    write_atomically(path, "old\n")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800\n")
    with pytest.raises(KeyboardInterrupt), atomic_file(path) as file:
        file.write(b"ne")
        assert path.read_text() == "old\n"
        raise KeyboardInterrupt
    assert path.read_text() == "old\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_swapped_while_it_is_written_is_reported(tmp_path):
    path = tmp_path / "config.yaml"
    victim = tmp_path / "victim"
    victim.write_text("thesis")
    with pytest.raises(OSError, match="another process replaced it"), atomic_file(path) as file:
        (tmp_path / ".config.yaml.partial").unlink()
        (tmp_path / ".config.yaml.partial").symlink_to(victim)
        file.write(b"new")
    assert victim.read_text() == "thesis"
    assert not path.exists()


@pytest.mark.parametrize(
    ("mask", "mode"), [(0o022, 0o755), (0o002, 0o775), (0o077, 0o700)], ids=oct
)
def test_a_private_directory_gets_its_usual_mode_when_complete(mask, mode, tmp_path):
    earlier = os.umask(mask)
    try:
        make_private(tmp_path / "a" / "b")
        assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
        make_public(tmp_path / "a" / "b")
        assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == mode
    finally:
        os.umask(earlier)


@pytest.mark.parametrize(
    ("mask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)], ids=oct
)
def test_files_of_safetensors_get_the_usual_mode_when_complete(mask, mode, tmp_path):
    weights = tmp_path / "a" / "model.safetensors"
    earlier = os.umask(mask)
    try:
        make_private(tmp_path / "a")
        save_file({"weight": torch.zeros(2)}, weights)
        make_public(tmp_path / "a")
        assert weights.stat().st_mode & 0o777 == mode
    finally:
        os.umask(earlier)
