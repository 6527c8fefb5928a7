"""train.py under torchrun itself, as a user starts it: two ranks give the metrics of one process on the same data."""

from tests.megatron.test_layouts import TWO_RANKS, assert_same, replayed
from tests.runs import read_metrics, run_program


def test_two_ranks_agree_with_one(tmp_path):
    flags, expected = replayed(tmp_path)
    result = run_program([*flags, *TWO_RANKS["tensor and sequence"]], tmp_path / "two", ranks=2)
    assert result.returncode == 0, result.stderr[-4000:]
    assert_same(read_metrics(tmp_path / "two"), expected)
