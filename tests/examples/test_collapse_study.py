"""The study of collapse: its grid, its rows, its report, and the commands that its pages show."""

import re
import shlex
from pathlib import Path

import pytest

from examples.collapse_study import report, run
from examples.collapse_study.cases import Grid, Study
from examples.collapse_study.results import Row, area, collapse_step, read_table, summarize
from examples.tables import write_rows
from slime_tis.trainer.cli.arguments import configure
from tests.checkpoints import make_task
from tests.runs import ROOT

# The grid


@pytest.fixture
def data(monkeypatch, tmp_path):
    """The paths that train.yaml names, in a checkout that has not made them."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    make_task(tmp_path / "data" / "sort_digits")
    monkeypatch.chdir(tmp_path)


def test_every_case_is_a_command_line_that_train_accepts(data):
    found = {}
    for case in Grid.load().cases([3]):
        got = configure(case.command(Path("runs/x")), {})
        assert (got.megatron.seed, got.rollout.rollout_seed, got.loop.num_steps_per_rollout) == (3, 3, 1)
        found[case.scenario, case.correction] = got
    assert len(found) == 28, "nine corrections in three scenarios, and standard PPO without a mismatch"
    corrections = {name: got.correction for (scenario, name), got in found.items() if scenario == "both"}
    assert not corrections["standard PPO"].corrects and not corrections["standard PPO"].use_rollout_logprobs
    assert corrections["policy gradient + sequence IS"].policy_loss == "reinforce"
    assert corrections["geometric RS + veto"].rs_bounds == (0.95, 1.05)
    assert corrections["geometric RS + veto"].rs_veto_threshold == 1e-4


# Rows


def test_results_of_a_curve_by_hand():
    curve = [(0, 0.4), (10, 0.6), (20, 0.2), (40, 0.3)]
    assert area(curve) == pytest.approx((10 * 0.5 + 10 * 0.4 + 20 * 0.25) / 40)
    assert collapse_step(curve) == 20, "0.2 is less than half of 0.6"
    assert collapse_step([(0, 0.4), (10, 0.2), (20, 0.21)]) is None, "half is not less than half"


FACTS = {
    "scenario": "both",
    "correction": "token TIS",
    "seed": 1,
    "seconds": 12.5,
    "flags": "--use-tis --tis-upper-bound 2",
    "date": "2026-01-02",
    "machine": "2 cores of X, Y",
    "versions": "python 3",
}


def test_a_row_from_the_metrics_of_a_run_and_back_from_csv(tmp_path):
    metrics = [
        {"step": 0, "eval/accuracy": 0.5},
        {"step": 1, "train/mismatch_k3_kl": 0.1, "train/gradient_kept_fraction": 1.0, "rollout/raw_reward": 0.5},
        {"step": 2, "train/mismatch_k3_kl": 0.3, "train/gradient_kept_fraction": 0.5, "eval/accuracy": 0.125},
    ]
    for row, staleness in zip(metrics[1:], (0.0, 3.0), strict=True):
        row["rollout/weight_staleness"] = staleness
    row = summarize(metrics, **FACTS)
    assert (row.final_accuracy, row.accuracy_area, row.collapse_step, row.steps) == (0.125, 0.3125, 2, 2)
    assert row.mismatch_k3_kl == pytest.approx(0.2)
    assert (row.kept_fraction, row.reward, row.ess, row.mismatch_kl) == (0.75, 0.5, None, None)
    assert row.late_accuracy == 0.125
    assert row.k3_by_staleness == ((0, 0.1), (3, 0.3))
    write_rows(tmp_path / "r.csv", Row, [row])
    assert read_table(tmp_path / "r.csv") == {("both", "token TIS", 1): row}
    assert read_table(tmp_path / "none.csv") == {}
    (tmp_path / "other.csv").write_text("seed,accuracy\n0,0.5\n")
    with pytest.raises(ValueError, match=r"other\.csv does not have the columns scenario, correction, seed"):
        read_table(tmp_path / "other.csv")


# The report


def row_of(correction: str, seed: int, *accuracy: float, scenario: str = "both") -> Row:
    curve = [{"step": 10 * i, "eval/accuracy": value} for i, value in enumerate(accuracy)]
    for staleness, row in enumerate(curve):
        row |= {"train/mismatch_k3_kl": 0.01 + 0.02 * staleness, "rollout/weight_staleness": float(staleness)}
    return summarize(curve, **FACTS | {"scenario": scenario, "correction": correction, "seed": seed})


def test_the_table_has_medians_and_ranges_over_seeds():
    rows = [row_of("a", 0, 0.4, 0.1), row_of("a", 1, 0.4, 0.3), row_of("a", 2, 0.4, 0.0), row_of("b", 0, 0.4, 0.8)]
    assert report.table(rows).splitlines() == [
        "**both**",
        "",
        "| run | final accuracy | last quarter | mean accuracy | collapse at step | k3 KL | k3 KL, new → old | kept |",
        "|---|---|---|---|---|---|---|---|",
        "| a | 0.10 [0.00, 0.30] | 0.10 [0.00, 0.30] | 0.25 [0.20, 0.35] | 10 (2 of 3) | 0.02 | 0.01 → 0.03 | – |",
        "| b | 0.80 | 0.80 | 0.60 | – | 0.02 | 0.01 → 0.03 | – |",
    ]


def test_the_page_shows_what_the_table_of_results_says():
    rows = read_table(Study().results)
    assert set(rows) == {case.key for case in Grid.load().cases([0, 1, 2])}, "the whole grid is in results.csv"
    flags = {case.key: " ".join(case.flags) for case in Grid.load().cases([0, 1, 2])}
    assert {key: row.flags for key, row in rows.items()} == flags, "grid.yaml says something else than was run"
    assert report.not_run(rows.values(), Grid.load()) == ""
    page = Study().page.read_text(encoding="utf-8")
    assert f"{report.begin('results')}{report.table(rows.values())}\n{report.END}" in page, "run `make docs`"


def test_the_commands_shown_are_accepted(data):
    text = (Study().directory / "README.md").read_text(encoding="utf-8") + Study().page.read_text(encoding="utf-8")
    targets = set(re.findall(r"^make (\w+)", text, re.M))
    makefile = (ROOT / "Makefile").read_text()
    assert targets == {"study"} and re.search("^study:", makefile, re.M)
    shown = re.findall(r"^python -m examples\.collapse_study\.run (?:.*\\\n)*.*$", text, re.M)
    assert shown
    for command in shown:
        options = run.parse(shlex.split(command.replace("\\\n", " "))[3:])
        cases = Grid.load().chosen(options.scenarios, options.corrections).cases(options.seeds, options.more)
        assert cases and all(configure(case.command(options.runs), {}) for case in cases)
