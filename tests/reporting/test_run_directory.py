"""The run directory: configuration written whole, earlier runs set aside, resumed ones gone on with."""

import os

import pytest
import yaml

from slime_tis.reporting.run_directory import prepare_run_directory, write_atomically, written_whole


def test_configuration_is_written_in_order(tmp_path):
    directory = prepare_run_directory(str(tmp_path / "a" / "b"), {"lr": 1e-4, "bf16": False, "ids": [2]}, 0)
    text = (directory / "config.yaml").read_text()
    assert text == "lr: 0.0001\nbf16: false\nids:\n- 2\n"
    assert yaml.safe_load(text) == {"lr": 1e-4, "bf16": False, "ids": [2]}
    assert sorted(path.name for path in directory.iterdir()) == ["config.yaml"]


def test_a_fresh_run_sets_an_earlier_one_aside_and_a_resumed_one_does_not(tmp_path):
    directory = prepare_run_directory(str(tmp_path), {"seed": 1}, 0)
    (directory / "metrics.jsonl").write_text('{"step": 1}\n')
    (directory / "tensorboard").mkdir()
    (directory / "checkpoints").mkdir()
    prepare_run_directory(str(tmp_path), {"seed": 1}, 2)
    assert (directory / "metrics.jsonl").exists() and not (directory / "earlier").exists()
    os.utime(directory / "metrics.jsonl", (0, 86400 * 365))
    prepare_run_directory(str(tmp_path), {"seed": 2}, 0)
    (earlier,) = (directory / "earlier").iterdir()
    assert earlier.name.startswith("1971010") or earlier.name.startswith("19701231")
    assert sorted(path.name for path in earlier.iterdir()) == ["config.yaml", "metrics.jsonl", "tensorboard"]
    assert (earlier / "config.yaml").read_text() == "seed: 1\n"
    assert sorted(path.name for path in directory.iterdir()) == ["checkpoints", "config.yaml", "earlier"]
    assert (directory / "config.yaml").read_text() == "seed: 2\n"


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "config.yaml"
    write_atomically(path, "old\n")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800\n")
    with pytest.raises(KeyboardInterrupt), written_whole(path) as partial:
        partial.write_text("ne")
        assert path.read_text() == "old\n"
        raise KeyboardInterrupt
    assert path.read_text() == "old\n"
    assert list(tmp_path.iterdir()) == [path]
