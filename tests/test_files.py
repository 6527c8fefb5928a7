"""Files that are complete or as they were."""

from pathlib import Path

import pytest

from slime_tis.files import atomic_path, write_atomically


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("name", ["a.json", ".a.json"], ids=["plain name", "hidden name"])
def test_the_file_appears_when_it_is_complete(name: str, tmp_path: Path) -> None:
    with atomic_path(tmp_path / name) as partial:
        partial.write_text("new")
        assert [path.name for path in tmp_path.iterdir()] == [".a.json.partial"]
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: "new"}
