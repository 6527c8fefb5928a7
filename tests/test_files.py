"""Files that are complete or as they were."""

import pytest

from slime_tis.files import atomic_path, write_atomically


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "config.yaml"
    write_atomically(path, "old\n")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800\n")
    with pytest.raises(KeyboardInterrupt), atomic_path(path) as partial:
        partial.write_text("ne")
        assert path.read_text() == "old\n"
        raise KeyboardInterrupt
    assert path.read_text() == "old\n"
    assert list(tmp_path.iterdir()) == [path]
