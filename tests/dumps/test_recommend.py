"""slime-tis recommend: the column of the study for a mismatch, and the flags that won there."""

import math
from dataclasses import replace

import numpy as np
import pytest

from examples.collapse_study.cases import Grid
from examples.comparison_study.compare import STUDY
from slime_tis.analysis.dumps.files import write
from slime_tis.analysis.dumps.table import SampleParts, TokenTable
from slime_tis.analysis.report.recommend import Cell, Column, Mismatch, column_for, recommendation, study
from slime_tis.main import main


def cell(method, relative):
    return Cell(method=method, flags="--use-tis", relative=relative, low=0.9, high=1.0, seeds=5, tied=True, collapsed=0)


STALE = Column(name="stale 16", stale=True, sigma=(0.6, 2.0), standard=0.4, cells=(cell("B", 0.98), cell("C", 0.97)))
NOISE = replace(STALE, name="fp8", stale=False, sigma=(0.1, 0.2))
HARMLESS = replace(NOISE, cells=(*NOISE.cells, cell("standard PPO", 0.98)))


def mismatch(cause, sigma, age=0):
    return Mismatch(cause=cause, k3=0.01, sigma=sigma, age=age)


@pytest.mark.parametrize(
    ("case", "column"),
    [
        pytest.param(mismatch("stale_weights", 1.0), "stale 16", id="inside"),
        pytest.param(mismatch("rounding", 1.0, age=15), "stale 16", id="old weights"),
        pytest.param(mismatch("rounding", 0.15), "fp8", id="noise"),
        pytest.param(mismatch("healthy", 0.15, age=15), "fp8", id="old but equal weights"),
        pytest.param(mismatch("rounding", 0.39), "fp8", id="just within the tolerance"),
        pytest.param(mismatch("rounding", 0.41), None, id="more noise than the study had"),
        pytest.param(mismatch("stale_weights", 4.1), None, id="staler than the study"),
        pytest.param(mismatch("stale_weights", 0.0), None, id="equal engines"),
    ],
)
def test_a_mismatch_has_the_column_of_its_kind_and_size(case, column):
    chosen = column_for(case, [STALE, NOISE])
    assert (chosen and chosen.name) == column


@pytest.mark.parametrize(
    ("case", "columns", "words"),
    [
        pytest.param(mismatch("temperature", 1.0), [STALE], "fix the cause first", id="a fault"),
        pytest.param(mismatch("stale_weights", 9.0), [STALE], "does not cover", id="outside"),
        pytest.param(mismatch("rounding", 0.15), [HARMLESS], "No correction is needed", id="standard PPO is tied"),
        pytest.param(mismatch("healthy", 0.01), [NOISE], "No correction is needed", id="less than the study"),
        pytest.param(mismatch("healthy", 0.01, age=15), [NOISE], "No correction is needed", id="old but equal weights"),
    ],
)
def test_without_evidence_the_answer_has_no_flags(case, columns, words):
    text = recommendation(case, columns)
    assert words in text and "--" not in text.split()[0]


def test_the_answer_has_flags_with_their_evidence():
    text = recommendation(mismatch("stale_weights", 1.0), [STALE, HARMLESS])
    assert text.startswith("--use-tis\n") and "B reaches 0.98 [0.90, 1.00]" in text and "told apart from it: C." in text


def test_the_packaged_study_has_the_flags_of_the_grid():
    """tests/examples/test_comparison_study.py passes the flags of the grid to train.py."""
    grid = Grid.load(STUDY)
    assert study()
    for column in study():
        assert column.cells[0].relative == max(cell.relative for cell in column.cells)
        for cell in column.cells:
            assert cell.flags == grid.corrections[cell.method]


def test_the_command_measures_a_dump(tmp_path, capsys):
    """Weights of age 0 to 15 with a log-ratio that grows with age, as in the column "stale 16"."""
    chance = np.random.default_rng(0)
    parts = []
    for step in range(16, 48):
        for _ in range(8):
            age = step % 16
            rollout = -chance.exponential(1.0, 11)
            noise = 0.12 * math.sqrt(age) * chance.normal(size=11)
            parts.append(
                SampleParts(
                    train_log_prob=np.minimum(rollout + noise, 0),
                    rollout_log_prob=rollout,
                    weight_version=np.full(11, step - age),
                    step=step,
                )
            )
    write(tmp_path / "dump.pt", TokenTable.from_parts(parts, {"source": "slime_tis", "old_policy": "current"}))
    assert main(["recommend", str(tmp_path / "dump.pt")]) == 0
    text = capsys.readouterr().out
    assert text.startswith("--") and "'stale 16'" in text
    assert main(["recommend", str(tmp_path / "absent")]) == 2
