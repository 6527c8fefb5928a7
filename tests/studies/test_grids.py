"""Studies: train.py accepts the flags of every case, and the pages show the tables of the results."""

import json
import re
import shlex

import pytest

from slime_tis.trainer.cli.train_arguments import configure
from studies.collapse import report, run
from studies.collapse.cases import Grid, Study
from studies.collapse.results import read_table
from tests.checkpoints import make_checkpoint, make_task
from tests.runs import ROOT

STUDIES = {
    "collapse": (
        28,  # nine corrections in three scenarios, and standard PPO without a mismatch
        {
            ("both", "standard PPO"): {"corrects": False, "use_rollout_logprobs": False},
            ("both", "policy gradient + sequence IS"): {"policy_loss": "reinforce"},
            ("both", "geometric RS + veto"): {"rs_bounds": (0.95, 1.05), "rs_veto_threshold": 1e-4},
        },
    ),
    "comparison": (None, {}),
    "comparison/sweep": (
        None,
        {("stale 16", "bypass PPO, 0.1"): {"use_rollout_logprobs": True}},
    ),
    "real_model": (
        32,  # seven corrections in two scenarios, five in three, three in int4
        {
            ("both", "sequence TIS"): {"tis_level": "sequence"},
            ("both", "geometric RS by z-score"): {"rs_z_score": 3},
            ("both", "bypass PPO"): {"use_rollout_logprobs": True},
        },
    ),
    "rounding": (None, {}),
    "tool_agent": (
        None,
        {
            ("stale fp8", f"{level} TIS"): {"tis_level": level}
            for level in ("token", "segment", "sequence")
        },
    ),
}
"""Number of cases if it is fixed, and values of the corrections of some cases."""


@pytest.fixture
def data(monkeypatch, tmp_path):
    """The paths that the grids name, in a checkout that has not made them."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "studies").symlink_to(ROOT / "studies")
    for task in ("sort_digits", "sort_digits_moe", "tool_agent"):
        make_task(tmp_path / "data" / task)
    make_checkpoint(tmp_path / "data" / "sort_digits_moe" / "checkpoint", "qwen3_moe")
    smollm2 = tmp_path / "data" / "smollm2"
    make_task(smollm2, "LlamaForCausalLM")
    (smollm2 / "checkpoint_bf16").symlink_to("checkpoint")
    (smollm2 / "study_prompts").mkdir()
    prompt = {"prompt": [{"role": "user", "content": "1 + 1"}], "label": "2"}
    for name in ("train.jsonl", "eval.jsonl"):
        (smollm2 / "study_prompts" / name).write_text(json.dumps(prompt) + "\n")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize("name", STUDIES)
def test_every_case_is_a_command_line_that_train_accepts(name):
    study, (count, values) = Study(ROOT / "studies" / name), STUDIES[name]
    cases = Grid.load(study).cases([3])
    found = {
        (case.scenario, case.correction): configure(case.command(study.runs / case.name), {})
        for case in cases
    }
    assert count in (None, len(found))
    assert (
        {got.megatron.seed for got in found.values()}
        == {got.rollout.rollout_seed for got in found.values()}
        == {3}
    )
    for key, fields in values.items():
        assert {field: getattr(found[key].correction, field) for field in fields} == fields


@pytest.mark.parametrize("name", [name for name in STUDIES if not name.startswith("comparison")])
def test_the_page_of_a_study_shows_its_table(name):
    study = Study(ROOT / "studies" / name)
    rows, page = read_table(study.results), study.page.read_text(encoding="utf-8")
    cases = {case.key: " ".join(case.flags) for case in Grid.load(study).cases(report.SEEDS)}
    assert {key: row.flags for key, row in rows.items()}.items() <= cases.items(), (
        "grid.yaml has other flags"
    )
    assert name != "collapse" or rows.keys() == cases.keys(), "the whole grid is in results.csv"
    shown = report.table(rows.values()) + report.not_run(rows.values(), Grid.load(study))
    assert f"{report.begin('results')}{shown}\n{report.END}" in page, "run `make docs`"


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize("name", ["collapse", "comparison", "real_model"])
def test_the_commands_shown_are_accepted(name):
    study = Study(ROOT / "studies" / name)
    text = (study.directory / "README.md").read_text(encoding="utf-8") + study.page.read_text(
        encoding="utf-8"
    )
    shown = re.findall(r"^python -m studies\.collapse\.run (?:.*\\\n)*.*$", text, re.M)
    assert shown
    for command in shown:
        options = run.parse(shlex.split(command.replace("\\\n", " "))[3:])
        cases = (
            Grid.load(options.study)
            .chosen(options.scenarios, options.corrections)
            .cases([0], options.more)
        )
        assert cases and all(configure(case.command(options.runs), {}) for case in cases)
