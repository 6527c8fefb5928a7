"""The pages under docs/: flags up to date, command lines and YAML accepted, every metric explained."""

import importlib.util
import math
import re
import shlex
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from slime_tis.correction import RolloutCorrectionConfig, correct
from slime_tis.integrations import verl
from slime_tis.policy.step_sums import STALENESS, TURN, metrics_by, sums_by
from slime_tis.trainer.cli.arguments import configure
from slime_tis.trainer.data.sample import Sample
from slime_tis.trainer.rollout.metrics import rollout_metrics
from tests.checkpoints import make_task

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def blocks(page, language):
    """The fenced blocks of a page in a language, none for a plain one."""
    fenced = re.findall(r"^( *)```(\w*)\n(.*?)^ *```$", (DOCS / page).read_text(), re.M | re.S)
    return [textwrap.dedent(text) for _, name, text in fenced if name == language]


def documented(pattern):
    """The names in the glossary that match."""
    return set(re.findall(f"`({pattern})`", (DOCS / "metrics.md").read_text()))


@pytest.fixture
def task(tmp_path, monkeypatch):
    """The paths that the pages name, and the flags that every run needs."""
    monkeypatch.chdir(tmp_path)
    make_task(tmp_path / "data" / "sort_digits")
    return (
        "--hf-checkpoint data/sort_digits/checkpoint --prompt-data data/sort_digits/train.jsonl --num-rollout 1 "
        "--rollout-batch-size 4 --n-samples-per-prompt 2 --rollout-max-response-len 12 --rm-type exact_match "
    )


def test_flags_page_is_what_its_writer_writes():
    spec = importlib.util.spec_from_file_location("write_flags", DOCS / "write_flags.py")
    writer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(writer)
    assert (DOCS / "flags.md").read_text() == writer.render(), "run `make docs`"


def test_whole_command_on_the_quick_start_is_accepted(task):
    (command,) = [block for block in blocks("quick_start.md", "") if block.startswith("python train.py \\")]
    got = configure(shlex.split(command.replace("\\\n", " "))[2:], {})
    assert got.correction.rs_z_score == 3.0 and got.correction.rs_level == "geometric"
    assert got.rollout.eval_prompt_sets == (("sort_digits", "data/sort_digits/eval.jsonl"),)
    assert got.loop.global_batch_size == 256


def test_commands_on_the_sglang_page_are_accepted(task):
    (commands,) = [block for block in blocks("sglang.md", "") if block.startswith("python train.py")]
    found = [configure(shlex.split(task + line.split("…")[1]), {}).sglang for line in commands.splitlines()]
    assert [config.sglang_launch for config in found] == [1, None, None]
    assert found[0].sglang_server_args == ("--mem-fraction-static", "0.8")
    assert len(found[1].server_urls) == 2 and found[2].router_url == "http://10.0.0.4:8000"


def test_every_correction_on_the_quick_start_is_accepted(task):
    (choices,) = [block for block in blocks("quick_start.md", "") if block.startswith("--use-tis\n")]
    corrections = [configure(shlex.split(task + line), {}).correction for line in choices.splitlines()]
    assert [c.use_rollout_logprobs for c in corrections] == [False] * 4 + [True] * 3 + [False]
    assert [c.corrects for c in corrections] == [True] * 4 + [False] + [True] * 3


def test_refusal_on_the_quick_start_is_the_one_given(task):
    (block,) = [block for block in blocks("quick_start.md", "") if block.startswith("$ ")]
    command, message = block.splitlines()
    with pytest.raises(ValueError) as error:
        configure(shlex.split(task + command.split("…")[1]), {})
    assert str(error.value) == message


@pytest.mark.parametrize("page", ["flags.md", "quick_start.md"])
def test_yaml_on_the_pages_is_accepted(task, tmp_path, page):
    (block,) = blocks(page, "yaml")
    (tmp_path / "page.yaml").write_text(block)
    got = configure(shlex.split(task + "--custom-config-path page.yaml"), {}).correction
    assert got.use_tis and got.rs_veto_threshold == 1e-4


def test_the_staged_roll_out_is_accepted_stage_by_stage(task, tmp_path):
    found = []
    for block in blocks("off_policy.md", "yaml"):
        (tmp_path / "stage.yaml").write_text(block)
        found.append(configure(shlex.split(task + "--custom-config-path stage.yaml"), {}).correction)
    ours, verls = found[:3], found[3:]
    for stages in (ours, verls):
        assert [(stage.use_rs, stage.use_tis) for stage in stages] == [(False, False), (True, False), (True, True)]
    assert not any(stage.use_rollout_logprobs for stage in ours)
    assert all(stage.use_rollout_logprobs and stage.policy_loss == "reinforce" for stage in verls)
    assert verls[2].tis_level == verls[2].rs_level == "sequence" and verls[2].rs_bounds == (0.5, 2.0)


def test_the_block_on_the_verl_page_is_what_its_table_says(task, tmp_path):
    (block,) = blocks("verl.md", "yaml")
    (tmp_path / "verl.yaml").write_text(block)
    got = configure(shlex.split(task + "--custom-config-path verl.yaml"), {}).correction
    same = "--use-tis --tis-upper-bound 2.0 --use-rs --rs-level sequence --rs-upper-bound 2.0 --rs-lower-bound 0.5 "
    assert (
        got
        == configure(shlex.split(task + same + "--rs-veto-threshold 1e-4 --rejection-normalizer kept"), {}).correction
    )


CORRECTIONS = [
    {"use_tis": True, "use_rs": True, "rs_veto_threshold": 1e-4, "tis_batch_normalize": True},
    {"use_tis": True, "tis_mode": "clip", "rollout_rs": "token_k1,seq_max_k3", "rollout_rs_threshold": 2.0},
    {"use_tis": True, "tis_mode": "mask", "tis_level": "sequence"},
    {"use_rs": True, "rs_level": "geometric"},
    {"use_rs": True, "rs_level": "geometric", "rs_z_score": 3.0},
]


@pytest.mark.parametrize("options", CORRECTIONS, ids=str)
def test_every_metric_of_the_correction_is_in_the_glossary(options):
    config = RolloutCorrectionConfig(**options)
    train = [torch.tensor([-1.0, -2.0]), torch.tensor([-0.5])]
    rollout = [torch.tensor([-1.1, -1.9]), torch.tensor([-0.4])]
    mask = [torch.ones(2), torch.ones(1)]
    names = correct(config, train, rollout, mask).statistics.metrics()
    criteria = "|".join(criterion.name for criterion in config.rejections) or "none"
    general = {re.sub(rf"mis_rs_({criteria})_", "mis_rs_CRITERION_", f"train/{name}") for name in names}
    assert len(names) >= 15 and general - documented(r"train/\w+") == set()


def test_every_metric_of_a_rollout_is_in_the_glossary():
    failed = Sample(response_length=1, loss_mask=[0], failure="raised")
    names = {name.replace("/raised", "/REASON") for name in rollout_metrics([[failed]], 0)}
    assert names - documented(r"rollout/[\w/]+") == set()


@pytest.mark.parametrize("by", [STALENESS, TURN], ids=["staleness", "turn"])
def test_every_metric_of_a_breakdown_is_in_the_glossary(by):
    sums = sums_by(by, torch.zeros(6), torch.ones(6), torch.ones(6), torch.tensor([0, 1, 2, 4, 7, 12]))
    names = {re.sub(f"_{by.name}_.*", f"_{by.name}_N", f"train/{name}") for name in metrics_by(by, sums)}
    assert len(names) == 4 and names - documented(r"train/\w+") == set()
    page = (DOCS / "metrics.md").read_text()
    assert all(f"`{bucket}`" in page for bucket in by.buckets)


def test_every_timed_part_is_in_the_glossary():
    sources = (ROOT / "slime_tis").rglob("*.py")
    parts = re.findall(r'\btimer[(,] ?"(\w+)"', "".join(path.read_text() for path in sources))
    assert len(parts) >= 10
    assert {f"perf/{name}_time" for name in parts} - documented(r"perf/\w+") == set()


@pytest.fixture
def process_group(tmp_path):
    """A torch.distributed job of one rank."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_python_on_the_library_page_runs(process_group):
    """Each block continues the ones before it; the page asserts that layouts and splits agree."""
    found = {}
    for block in blocks("library.md", "python"):
        exec(block, found)
    weights = [math.exp(0.1), 2.0, 1.0], [math.exp(-0.1), 1.0, 0.0]
    assert found["correction"].weights.flatten().tolist() == pytest.approx([*weights[0], *weights[1]])
    assert found["loss"].item() == pytest.approx((sum(weights[0]) + sum(weights[1])) / 5)
    assert found["metrics"]["mis_truncate_fraction"] == pytest.approx(0.2)


def test_python_on_the_page_for_verl_runs():
    """Each block continues the ones before it; the tensors are those of a batch with a masked token."""
    log_prob = torch.tensor([[-1.0, -2.0], [-0.5, -1.0]], requires_grad=True)
    found = {
        "log_prob": log_prob,
        "old_log_prob": log_prob.detach(),
        "rollout_log_prob": torch.tensor([[-1.1, -2.9], [-0.4, -1.0]]),
        "response_mask": torch.tensor([[1, 1], [1, 0]]),
        "advantages": torch.ones(2, 2),
    }
    for block in blocks("verl.md", "python"):
        exec(block, found)
        if block.startswith("import slime_tis"):  # w = exp(ΣΔ) = e bounded to 2, and e^-0.1; on −log π of 1, 2 and 1/2
            row = math.exp(1.0), math.exp(-0.1)
            assert found["loss"].item() == pytest.approx((min(row[0], 2.0) * 3 + row[1] * 0.5) / 3)
    assert found["config"].tis_level == "token" and found["weights"].max() == 2.0
    assert found["loss"].item() == pytest.approx(-(math.exp(0.1) + 2.0 + math.exp(-0.1)) / 3)


def test_the_switch_on_the_page_for_verl_replaces_its_helper(monkeypatch):
    name = "verl.trainer.ppo.rollout_corr_helper"
    monkeypatch.setitem(sys.modules, name, None)  # restored afterwards
    (code,) = [block for block in blocks("verl.md", "python") if block.startswith("# use_slime_tis.py")]
    found = {}
    exec(code, found)
    found["switch"]()
    assert importlib.import_module(name).apply_bypass_mode is verl.apply_bypass_mode
