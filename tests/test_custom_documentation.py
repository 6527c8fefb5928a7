"""Runs the functions of docs/custom_functions.md with train.py, as a user would."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slime_tis.trainer.data.sample_file import load_samples
from slime_tis.user_functions import USER_FUNCTIONS, load_function
from tests.rollout.sglang.fake_sglang import fake_servers
from tests.runs import ROOT, read_metrics, run_apart, run_here, training_metrics, with_sglang

PAGE = (ROOT / "docs" / "custom_functions.md").read_text()
EXAMPLES = dict(re.findall(r"^```python\n# (\w+\.py): (.*?)^```$", PAGE, re.M | re.S))


@pytest.fixture(autouse=True)
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes the files of the page to the working directory."""
    for name, text in EXAMPLES.items():
        (tmp_path / name).write_text(f"# {text}")
    monkeypatch.chdir(tmp_path)


def test_the_correction_shown_reports_its_metrics(run):
    path = "my_correction.py:cautious_tis"
    (row,) = run("--use-tis", "--num-rollout", "1", "--custom-tis-function-path", path)
    assert row["train/grad_norm"] > 0
    assert row["train/cautious_weight"] == pytest.approx(1, abs=0.1)
    unlikely = row["train/cautious_unlikely"]
    assert 0 < unlikely < 1
    assert row["train/gradient_kept_fraction"] == pytest.approx(1 - unlikely, abs=0.05)


def test_the_reward_shown_scores(run):
    (row,) = run("--num-rollout", "1", "--custom-rm-path", "my_reward.py:reward")
    assert row["rollout/raw_reward"] == pytest.approx(-0.01 * row["rollout/response_len"])


HALF = "def reward(args, sample):\n    return float((sample.index + len(sample.prompt)) % 2)\n"


def test_the_filters_shown_accept_mixed_groups(run, tmp_path):
    (tmp_path / "half.py").write_text(HALF)
    flags = ["--custom-rm-path", "half.py:reward"]
    flags += ["--dynamic-sampling-filter-path", "my_filter.py:solvable"]
    flags += ["--rollout-sample-filter-path", "my_samples.py:drop_truncated"]
    flags += ["--rollout-all-samples-process-path", "my_samples.py:record"]
    (row,) = run(*flags, "--num-rollout", "1")
    assert row["rollout/dynamic_filter/dropped"] == 0
    trained = pytest.approx(16 * (1 - row["rollout/truncated"]))
    assert row["train/loss_denominator"] == trained
    recorded = json.loads((tmp_path / "run" / "all_samples.jsonl").read_text())
    assert len(recorded["rewards"]) == 4


def test_the_logs_shown_write_their_files(run, task, tmp_path, capsys):
    (tmp_path / "half.py").write_text(HALF)
    flags = ["--custom-rm-path", "half.py:reward"]
    flags += ["--dynamic-sampling-filter-path", "my_filter.py:solvable"]
    flags += ["--custom-reward-post-process-path", "my_shaping.py:centered"]
    flags += ["--custom-rollout-log-function-path", "my_log.py:log_rollout"]
    held_out = task[task.index("--prompt-data") + 1]
    flags += ["--eval-prompt-data", held_out, "--skip-eval-before-train"]
    flags += ["--custom-eval-rollout-log-function-path", "my_log.py:log_evaluation"]
    (row,) = run(*flags, "--num-rollout", "1")
    lines = capsys.readouterr().out.splitlines()
    (evaluated,) = [line for line in lines if line.startswith("eval accuracy: ")]
    assert "->" not in evaluated  # nothing was measured before training
    assert row["rollout/raw_reward"] == 0.5
    longest = json.loads((tmp_path / "run" / "longest.jsonl").read_text())
    assert longest["rollout/dynamic_filter/sampled"] == 4


def test_the_buffer_filter_shown_runs(task, tmp_path):
    flags = [
        *with_sglang(task),
        "--partial-rollout",
        "--over-sampling-batch-size",
        "8",
        "--num-rollout",
        "4",
    ]
    flags += [
        "--rollout-max-response-len",
        "60",
        "--buffer-filter-path",
        "my_buffer.py:most_complete",
    ]
    with fake_servers(1) as (server,):
        server.pace = 0.01  # so that all requests are under way before the first of them ends
        rows = run_here([*flags, "--sglang-url", server.url], tmp_path / "run")
    assert [row["rollout/buffer_dropped"] for row in rows] == [0, 0, 0, 0]
    assert all(row["rollout/buffer_waiting"] == 0 for row in rows)
    assert rows[-1]["rollout/mixed_versions"] > 0


def test_the_data_source_shown_is_taken_up_where_it_was(task, tmp_path):
    data = str(tmp_path / "{rollout_id}.jsonl")
    flags = [
        *task,
        "--data-source-path",
        "my_data.py:Sums",
        "--rollout-lookahead",
        "1",
        "--num-rollout",
        "3",
    ]
    flags += ["--save-debug-rollout-data", data]
    run_here([*flags, "--save", "save", "--save-interval", "2"], tmp_path / "run")

    def prompts(number):
        return [
            group[0].metadata["number"]
            for group in load_samples(tmp_path / f"{number}.jsonl", 4, 4)
        ]

    assert [prompts(number) for number in range(3)] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    (tmp_path / "load").mkdir()
    (tmp_path / "load" / "iter_0000002").symlink_to(tmp_path / "save" / "iter_0000002")
    (tmp_path / "load" / "sums_1.json").symlink_to(tmp_path / "save" / "sums_1.json")
    assert (
        json.loads((tmp_path / "load" / "sums_1.json").read_text()) == 12
    )  # the third rollout is in flight
    (tmp_path / "2.jsonl").rename(tmp_path / "whole.jsonl")
    run_here([*flags, "--load", "load"], tmp_path / "resumed")
    assert prompts(2) == [9, 10, 11, 12]


ROLLOUT = ("--rollout-function-path", "my_rollout.py:generate_rollout")


def test_the_rollout_shown_is_trained(task, tmp_path):
    (row,) = run_here([*task, *ROLLOUT, "--num-rollout", "1"], tmp_path / "run")
    assert row["rollout/response_len"] == 3
    assert row["rollout/teacher"] == 1
    assert row["train/loss_denominator"] == 16
    assert row["train/mismatch_rollout_log_ppl"] == pytest.approx(2.0)


def test_the_rollout_shown_is_resumed(task, tmp_path):
    flags = [*task, *ROLLOUT, "--num-rollout", "3"]
    rows = run_here([*flags, "--save", "save", "--save-interval", "2"], tmp_path / "run")
    (tmp_path / "load").mkdir()
    (tmp_path / "load" / "iter_0000002").symlink_to(tmp_path / "save" / "iter_0000002")
    resumed = run_here([*flags, "--load", "load"], tmp_path / "resumed")
    assert training_metrics(resumed[-1]) == training_metrics(rows[2])


LOSS = ("--loss-type", "custom_loss", "--custom-loss-function-path", "my_objective.py:clipped")
CORRECTION = (
    "--use-tis",
    "--tis-batch-normalize",
    "--use-rs",
    "--rs-level",
    "token",
    "--rs-upper-bound",
    "1.001",
)


def objective(
    run: Callable[..., list[dict[str, Any]]], *flags: str, name: str, step: int = 1
) -> dict[str, Any]:
    """The metrics of a step, the first or the second of a rollout of two."""
    rows = run("--num-rollout", "1", "--num-steps-per-rollout", "2", *flags, name=name)
    return training_metrics(rows[step])


@pytest.mark.parametrize("flags", [(), CORRECTION], ids=["alone", "corrected"])
def test_the_loss_shown_is_the_built_in_one(run, flags):
    flags = (*flags, "--micro-batch-size", "4")
    built_in, shown = (
        objective(run, *flags, name="built_in"),
        objective(run, *flags, *LOSS, name="own"),
    )
    assert ("train/mis_eff_sample_size" in shown) == ("--use-tis" in flags)
    assert (shown["train/gradient_kept_fraction"] < 1) == ("--use-rs" in flags)
    assert shown.pop("train/my_ratio") == pytest.approx(shown["train/ois"], rel=1e-5)
    assert shown == pytest.approx(built_in, rel=1e-4, abs=1e-7)


REDUCER_FLAG = "--custom-pg-loss-reducer-function-path"


def test_the_reducer_shown_divides_by_a_constant(run):
    flags = ("--calculate-per-token-loss",)
    plain = objective(run, *flags, name="plain", step=0)
    flags += (REDUCER_FLAG, "my_objective.py:constant_divisor")
    reduced = objective(run, *flags, name="reduced", step=0)
    expected = plain["train/grad_norm"] / 100
    assert reduced["train/grad_norm"] == pytest.approx(expected, rel=1e-4)


def test_dr_grpo_equals_the_mean_at_full_length(run):
    """Every response here reaches the limit."""
    mean = objective(run, name="mean", step=0)
    dr_grpo = objective(
        run, REDUCER_FLAG, "slime_tis.policy.reducers.dr_grpo", name="dr_grpo", step=0
    )
    assert dr_grpo["train/grad_norm"] == pytest.approx(mean["train/grad_norm"], rel=1e-5)


def test_the_advantages_shown_fade(run):
    mean = objective(run, name="mean", step=0)
    flags = ("--custom-advantage-function-path", "my_objective.py:fading")
    faded = objective(run, *flags, name="faded", step=0)
    assert 0 < faded["train/grad_norm"] < mean["train/grad_norm"]


ONE_STEP = (
    "--num-rollout 1 --lr 0.01 --adam-eps 1 --weight-decay 0 --clip-grad 0 --micro-batch-size 4"
)
ADVANTAGE = ("--custom-advantage-function-path", "my_objective.py:fading")
REDUCER = ("--custom-pg-loss-reducer-function-path", "my_objective.py:constant_divisor")


@pytest.mark.parametrize(
    ("flags", "layouts"),
    [
        pytest.param(
            [*ADVANTAGE, *REDUCER, "--use-kl-loss", "--kl-loss-coef", "0.1"],
            [()],
            id="advantages, reducer",
        ),
        pytest.param(
            [*LOSS, *CORRECTION], [(), ("--context-parallel-size", "2")], id="corrected loss"
        ),
        pytest.param(
            [*ADVANTAGE, *LOSS], [(), ("--tensor-model-parallel-size", "2")], id="advantages, loss"
        ),
    ],
)
def test_objectives_are_those_of_one_rank(flags, layouts, task, tmp_path):
    """Weights that one step has changed in proportion to the gradient, and metrics, on two ranks of
    a layout."""
    flags = [*task, *(flag.replace("my_objective", f"{tmp_path}/my_objective") for flag in flags)]
    flags += ONE_STEP.split()
    (alone,) = run_here([*flags, "--save-hf", str(tmp_path / "alone_hf")], tmp_path / "alone")
    weights = load_file(tmp_path / "alone_hf" / "model.safetensors")
    before = load_file(Path(task[task.index("--hf-checkpoint") + 1]) / "model.safetensors")
    moved = max(float((weights[name] - before[name]).abs().max()) for name in before)
    assert moved > 1e-4
    for layout in layouts:
        name = f"two{len(layout)}"
        two = run_apart(
            [*flags, *layout, "--save-hf", str(tmp_path / f"{name}_hf")], tmp_path / name, ranks=2
        )
        assert two.returncode == 0, two.stderr[-3000:]
        found = load_file(tmp_path / f"{name}_hf" / "model.safetensors")
        assert found.keys() == weights.keys()
        for key, weight in weights.items():
            torch.testing.assert_close(found[key], weight, rtol=0.0, atol=1e-6)
        (row,) = read_metrics(tmp_path / name)
        assert training_metrics(row) == pytest.approx(training_metrics(alone), rel=1e-4, abs=1e-5)


def test_the_page_lists_every_function_with_its_arguments():
    rows = dict(re.findall(r"^\| (?:\[)?`--([\w-]+-path)`.*? \| (.*?) \| ", PAGE, re.M))
    for option, signature in USER_FUNCTIONS.items():
        row = rows[option.replace("_", "-")]
        names = signature.methods or (
            () if option == "custom_tis_function_path" else signature.positional
        )
        assert all(
            re.search(rf"\b{'groups' if name == 'samples' else name}\b|\b{name}\b", row)
            for name in names
        ), row


@pytest.mark.parametrize(
    "path", re.findall(r"^\| `((?:slime_tis|custom_tis)\.[\w.]+)`", PAGE, re.M)
)
def test_the_functions_listed_are_there(path):
    assert load_function(path).__doc__
