"""The study on a pretrained model: its grid, what is omitted of it, its page, and the mismatch with intervals."""

import json
import math
import re
import shlex
from pathlib import Path

import pytest
import torch

from examples.collapse_study import report, run
from examples.collapse_study.cases import Grid, Study
from examples.collapse_study.results import Row, read_table, summarize
from examples.real_model_study import mismatch
from examples.tables import read_rows, write_rows
from slime_tis.trainer.cli.arguments import configure
from tests.checkpoints import make_checkpoint
from tests.runs import ROOT

STUDY = Study(ROOT / "examples" / "real_model_study")


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The paths that train.yaml names, in a checkout that has not made them."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    prompts = tmp_path / "data" / "smollm2" / "study_prompts"
    prompts.mkdir(parents=True)
    for name in ("checkpoint", "checkpoint_bf16"):
        checkpoint = tmp_path / "data" / "smollm2" / name
        checkpoint.mkdir()
        (checkpoint / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    for name in ("train.jsonl", "eval.jsonl"):
        (prompts / name).write_text('{"prompt": [{"role": "user", "content": "1 + 1"}], "label": "2"}\n')
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("data")
def test_every_case_is_a_command_line_that_train_accepts() -> None:
    cases = Grid.load(STUDY).cases([3])
    found = {(case.scenario, case.correction): configure(case.command(STUDY.runs / case.name), {}) for case in cases}
    assert len(found) == 25
    of_both = {name: got.correction for (scenario, name), got in found.items() if scenario == "both"}
    assert of_both["sequence TIS"].tis_level == "sequence"
    assert of_both["geometric RS by z-score"].rs_z_score == 3
    assert of_both["bypass PPO"].use_rollout_logprobs
    assert {got.megatron.seed for got in found.values()} == {3}
    rounding = Study(ROOT / "examples" / "rounding_study")
    assert all(configure(case.command(rounding.runs / case.name), {}) for case in Grid.load(rounding).cases([3]))


def row_of(scenario: str, correction: str, seed: int, flags: str = "") -> Row:
    curve = [{"step": step, "eval/accuracy": 0.2 + step / 20} for step in (0, 4, 8, 12)]
    facts = {"seconds": 1.0, "flags": flags, "date": "2026-01-02", "machine": "2 cores", "versions": "python 3"}
    return summarize(curve, scenario=scenario, correction=correction, seed=seed, **facts)


def test_what_was_not_run_is_listed() -> None:
    grid = Grid.load(STUDY).chosen(["both", "bf16"], ["standard PPO", "bypass PPO"])
    rows = [row_of("both", "standard PPO", seed) for seed in (0, 1, 2)] + [row_of("both", "bypass PPO", 0)]
    assert report.not_run(rows, grid).splitlines() == [
        "",
        "",
        "4 of the 12 runs of seeds 0, 1, 2 were made. Not run yet:",
        "",
        "* both: bypass PPO (seeds 1, 2)",
        "* bf16: standard PPO (seeds 0, 1, 2), bypass PPO (seeds 0, 1, 2)",
    ]


@pytest.mark.parametrize("name", ["real_model_study", "rounding_study", "tool_agent_study"])
def test_the_page_of_a_study_shows_its_table(name: str) -> None:
    study = Study(ROOT / "examples" / name)
    rows, page = read_table(study.results), study.page.read_text(encoding="utf-8")
    cases = {case.key: " ".join(case.flags) for case in Grid.load(study).cases(report.SEEDS)}
    assert {key: row.flags for key, row in rows.items()}.items() <= cases.items(), "grid.yaml has other flags"
    shown = report.table(rows.values()) + report.not_run(rows.values(), Grid.load(study))
    assert f"{report.begin('results')}{shown}\n{report.END}" in page, "run `make docs`"


def test_the_page_shows_the_measured_mismatch() -> None:
    page = STUDY.page.read_text(encoding="utf-8")
    measured = mismatch.table(read_rows(mismatch.RESULTS, mismatch.Row))
    assert f"{report.begin('mismatch')}{measured}\n{report.END}" in page, "run `make docs`"


@pytest.mark.usefixtures("data")
def test_the_commands_shown_are_accepted() -> None:
    text = (STUDY.directory / "README.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^python -m examples\.collapse_study\.run (?:.*\\\n)*.*$", text, re.M)
    options = run.parse(shlex.split(shown.replace("\\\n", " "))[3:])
    cases = Grid.load(options.study).chosen(options.scenarios, options.corrections).cases([0], options.more)
    assert [case.correction for case in cases] == ["standard PPO", "token TIS"] and options.missing
    assert all(configure(case.command(options.runs), {}).loop.num_rollout == 4 for case in cases)


def test_estimates_by_hand() -> None:
    """ρ of two responses: 2 and 1; 1/2. k3 = ((1 − ln 2) + 0 + (−1/2 + ln 2))/3 = 1/6; χ² = (3 + 0 − 3/4)/3 = 3/4."""
    log_ratios = [torch.tensor([2.0, 1.0], dtype=torch.float64).log(), torch.tensor([0.5], dtype=torch.float64).log()]
    k3, chi2, largest = mismatch.estimates(log_ratios)
    assert k3[0] == pytest.approx(1 / 6) and chi2[0] == pytest.approx(0.75) and largest[0] == pytest.approx(2)
    # resamples: twice the first (a quarter), both (half), twice the second (a quarter)
    assert k3[1:] == pytest.approx(((1 - math.log(2)) / 2, math.log(2) - 0.5))
    assert chi2[1:] == pytest.approx((-0.75, 1.5))
    assert largest[1:] == pytest.approx((0.5, 2))


def test_a_small_model_is_measured(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", "llama")
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{i}+1="}}\n' for i in range(4)))
    rows = mismatch.measure(checkpoint, tmp_path / "rows.jsonl", apply_chat_template=False, response=4)
    pairs = [(row.training, row.rollout) for row in rows]
    assert pairs == [(training, rollout) for training, rollouts in mismatch.PRECISIONS for rollout in rollouts]
    by_pair = dict(zip(pairs, rows, strict=True))
    assert by_pair["fp32", "fp32"].k3 < 1e-9 < by_pair["fp32", "int8"].k3 < by_pair["fp32", "fp8"].k3
    for row in rows:
        assert row.k3_low <= row.k3 <= row.k3_high and row.chi2_low <= row.chi2 <= row.chi2_high
        assert row.largest_low <= row.largest == pytest.approx(row.largest_high) and row.samples == 4
    write_rows(tmp_path / "mismatch.csv", mismatch.Row, rows)
    again = read_rows(tmp_path / "mismatch.csv", mismatch.Row)
    assert mismatch.table(again).splitlines()[:2] == [
        "| training | rollout | tokens | k3 KL | χ² per token | largest weight |",
        "|---|---|---|---|---|---|",
    ]
    assert len(mismatch.table(again).splitlines()) == 2 + len(pairs)
