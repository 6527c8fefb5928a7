"""The functions shown in docs/customization.md, run by train.py as a user would."""

import json
import re
from pathlib import Path

import pytest

from tests.conftest import Run
from tests.runs import ROOT, training_metrics

PAGE = (ROOT / "docs" / "customization.md").read_text()
EXAMPLES = dict(re.findall(r"^```python\n# (\w+\.py): (.*?)^```$", PAGE, re.M | re.S))


@pytest.fixture(autouse=True)
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of the page, in the working directory."""
    for name, text in EXAMPLES.items():
        (tmp_path / name).write_text(f"# {text}")
    monkeypatch.chdir(tmp_path)


def test_the_filters_logs_and_shaped_rewards_shown_run(run: Run, task: list[str], tmp_path: Path) -> None:
    reward = "def reward(args, sample):\n    return float((sample.index + len(sample.prompt)) % 2)\n"
    (tmp_path / "half.py").write_text(reward)
    flags = ["--custom-rm-path", "half.py:reward", "--dynamic-sampling-filter-path", "my_filter.py:solvable"]
    flags += ["--rollout-sample-filter-path", "my_samples.py:drop_truncated"]
    flags += ["--rollout-all-samples-process-path", "my_samples.py:record"]
    flags += ["--custom-reward-post-process-path", "my_shaping.py:centred"]
    flags += ["--custom-rollout-log-function-path", "my_log.py:log_rollout"]
    held_out = task[task.index("--prompt-data") + 1]
    flags += ["--eval-prompt-data", held_out, "--skip-eval-before-train"]
    flags += ["--custom-eval-rollout-log-function-path", "my_log.py:log_evaluation"]
    (row,) = run(*flags, "--num-rollout", "1")
    assert row["rollout/dynamic_filter/dropped"] == 0 and row["rollout/raw_reward"] == 0.5
    assert row["train/loss_denominator"] == pytest.approx(16 * (1 - row["rollout/truncated"]))
    assert len(json.loads((tmp_path / "run" / "all_samples.jsonl").read_text())["rewards"]) == 4
    assert json.loads((tmp_path / "run" / "longest.jsonl").read_text())["rollout/dynamic_filter/sampled"] == 4


def objective(run: Run, *flags: str, name: str, step: int = 1) -> dict[str, float]:
    """The metrics of a step, the first or the second of a rollout of two."""
    return training_metrics(run("--num-rollout", "1", "--num-steps-per-rollout", "2", *flags, name=name)[step])


def test_the_loss_shown_is_the_built_in_one(run: Run) -> None:
    own = ("--loss-type", "custom_loss", "--custom-loss-function-path", "my_objective.py:clipped")
    built_in, shown = objective(run, name="built_in"), objective(run, *own, name="own")
    assert shown.pop("train/my_ratio") == pytest.approx(shown["train/ois"], rel=1e-5)
    assert shown == pytest.approx(built_in, rel=1e-5, abs=1e-7)


def test_the_advantages_and_the_reducer_shown_act(run: Run) -> None:
    reducer = "--custom-pg-loss-reducer-function-path"
    plain = objective(run, "--calculate-per-token-loss", name="plain", step=0)["train/grad_norm"]
    flags = ("--calculate-per-token-loss", reducer, "my_objective.py:constant_divisor")
    assert objective(run, *flags, name="reduced", step=0)["train/grad_norm"] == pytest.approx(plain / 100, rel=1e-4)
    mean = objective(run, name="mean", step=0)["train/grad_norm"]
    flags = (reducer, "slime_tis.policy.reducers.dr_grpo")
    dr_grpo = objective(run, *flags, name="dr_grpo", step=0)  # every response here reaches the limit
    assert dr_grpo["train/grad_norm"] == pytest.approx(mean, rel=1e-5)
    flags = ("--custom-advantage-function-path", "my_objective.py:fading")
    assert 0 < objective(run, *flags, name="faded", step=0)["train/grad_norm"] < mean


@pytest.mark.parametrize("path", re.findall(r"^\| `(slime_tis\.[\w.]+)`", PAGE, re.M))
def test_the_functions_listed_are_there(path: str) -> None:
    from slime_tis.custom import load_function

    assert load_function(path).__doc__
