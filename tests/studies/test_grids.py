"""Studies: train.py accepts every case's flags, and the pages show the tables of results."""

import json
import re
import shlex
from pathlib import Path

import pytest

from slime_tis.trainer.cli.train_arguments import configure
from slime_tis.trainer.cli.train_options import Arguments
from studies.collapse import report, run
from studies.collapse.cases import Grid, Study
from studies.collapse.results import read_table
from tests.checkpoints import make_checkpoint, make_task
from tests.runs import ROOT

STUDIES = ["collapse", "comparison", "comparison/sweep", "real_model", "rounding", "tool_agent"]
CASES = {
    "collapse": 28,  # nine corrections in three scenarios, and standard PPO without a mismatch
    "real_model": 32,  # seven corrections in two scenarios, five in three, three in int4
}
"""Number of cases of the studies that state it."""
CORRECTIONS: list[tuple[str, str, str, dict[str, object]]] = [
    ("collapse", "both", "standard PPO", {"corrects": False, "use_rollout_logprobs": False}),
    ("collapse", "both", "policy gradient + sequence IS", {"policy_loss": "reinforce"}),
    (
        "collapse",
        "both",
        "geometric RS + veto",
        {"rs_bounds": (0.95, 1.05), "rs_veto_threshold": 1e-4},
    ),
    ("comparison/sweep", "stale 16", "bypass PPO, 0.1", {"use_rollout_logprobs": True}),
    ("real_model", "both", "sequence TIS", {"tis_level": "sequence"}),
    ("real_model", "both", "geometric RS by z-score", {"rs_z_score": 3}),
    ("real_model", "both", "bypass PPO", {"use_rollout_logprobs": True}),
    ("tool_agent", "stale fp8", "token TIS", {"tis_level": "token"}),
    ("tool_agent", "stale fp8", "segment TIS", {"tis_level": "segment"}),
    ("tool_agent", "stale fp8", "sequence TIS", {"tis_level": "sequence"}),
]
"""Study, scenario and correction, and fields of its configuration."""


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


@pytest.fixture
def cases(data: None, name: str) -> dict[tuple[str, str], Arguments]:
    """The configurations of a study's cases with seed 3, by scenario and correction."""
    study = Study(ROOT / "studies" / name)
    configured = {}
    for case in Grid.load(study).cases([3]):
        arguments = configure(case.command(study.runs / case.name), {})
        configured[case.scenario, case.correction] = arguments
    return configured


@pytest.mark.parametrize("name", STUDIES)
def test_train_accepts_every_case(cases):
    for arguments in cases.values():
        assert arguments.megatron.seed == arguments.rollout.rollout_seed == 3


@pytest.mark.parametrize("name", CASES)
def test_a_study_has_the_stated_number_of_cases(name, cases):
    assert len(cases) == CASES[name]


@pytest.mark.parametrize(
    ("name", "scenario", "correction", "fields"),
    CORRECTIONS,
    ids=[f"{name}: {correction}" for name, _, correction, _ in CORRECTIONS],
)
def test_a_case_has_the_options_of_its_name(cases, scenario, correction, fields):
    config = cases[scenario, correction].correction
    assert {field: getattr(config, field) for field in fields} == fields


TABULATED = [name for name in STUDIES if not name.startswith("comparison")]
"""The studies whose page has the table of all runs."""


@pytest.mark.parametrize("name", TABULATED)
def test_stored_results_have_the_flags_of_the_grid(name):
    study = Study(ROOT / "studies" / name)
    stored = {key: row.flags for key, row in read_table(study.results).items()}
    cases = {case.key: " ".join(case.flags) for case in Grid.load(study).cases(report.SEEDS)}
    assert stored.items() <= cases.items()


def test_the_collapse_study_has_all_results():
    study = Study(ROOT / "studies" / "collapse")
    cases = {case.key for case in Grid.load(study).cases(report.SEEDS)}
    assert read_table(study.results).keys() == cases


@pytest.mark.parametrize("name", TABULATED)
def test_the_page_of_a_study_shows_its_table(name):
    study = Study(ROOT / "studies" / name)
    rows = read_table(study.results).values()
    table = report.table(rows) + report.not_run(rows, Grid.load(study))
    page = study.page.read_text(encoding="utf-8")
    assert f"{report.begin('results')}{table}\n{report.END}" in page, "run `make docs`"


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize("name", ["collapse", "comparison", "real_model"])
def test_the_commands_shown_are_accepted(name):
    study = Study(ROOT / "studies" / name)
    readme = study.directory / "README.md"
    pages = readme.read_text(encoding="utf-8") + study.page.read_text(encoding="utf-8")
    commands = re.findall(r"^python -m studies\.collapse\.run (?:.*\\\n)*.*$", pages, re.M)
    assert commands
    for command in commands:
        options = run.parse(shlex.split(command.replace("\\\n", " "))[3:])
        grid = Grid.load(options.study).chosen(options.scenarios, options.corrections)
        cases = grid.cases([0], options.more)
        assert cases
        for case in cases:
            configure(case.command(options.runs), {})
