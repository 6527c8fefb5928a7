"""What the reporters really write, read back by the programs that read it."""

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from slime_tis.trainer.cli.file_checks import held_outputs
from slime_tis.trainer.configs.loop import ReportingConfig
from slime_tis.trainer.configs.megatron import MegatronConfig
from slime_tis.trainer.reporting.reporters import JsonLines, format_step, open_reporters
from slime_tis.trainer.reporting.trackers import (
    HIDDEN,
    TRACKERS,
    RunInfo,
    Tracker,
    without_secrets,
)
from tests.runs import free_port, largest_file

METRICS = {
    "rollout/raw_reward": 0.4375,
    "train/loss": -0.01234,
    "train/grad_norm": 0.5,
    "train/mismatch_k3_kl": 1.2e-4,
    "train/mis_ratio_mean_after_mis": 0.998,
    "train/gradient_kept_fraction": 0.996,
    "perf/step_time": 0.31,
}


def lines_of(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_jsonl_is_one_valid_object_a_step_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    reporter = JsonLines(path)
    reporter.log({"train/loss": 0.5, "train/kl": math.nan, "train/max": math.inf}, 1)
    assert (
        path.read_text() == '{"step": 1, "train/loss": 0.5, "train/kl": null, "train/max": null}\n'
    )
    reporter.log({"train/loss": 0.25}, 2)
    assert lines_of(path)[1] == {"step": 2, "train/loss": 0.25}
    reporter.close()


def test_jsonl_on_a_full_disk_names_the_file_and_the_step(tmp_path):
    reporter = JsonLines(tmp_path / "metrics.jsonl")
    with (
        largest_file(100),
        pytest.raises(
            OSError, match=r"^could not write the metrics of step 7 to .*jsonl: File too large"
        ),
    ):
        reporter.log({f"train/{number}": 0.5 for number in range(20)}, 7)
    reporter.close()


def test_jsonl_of_a_resumed_run_has_every_step_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(json.dumps({"step": step, "run": 1}) + "\n" for step in range(6)) + '{"step": 6, "r'
    )
    reporter = JsonLines(path, resume_step=4)
    reporter.log({"run": 2}, 4)
    reporter.close()
    assert [(row["step"], row["run"]) for row in lines_of(path)] == [
        (0, 1),
        (1, 1),
        (2, 1),
        (3, 1),
        (4, 2),
    ]


@pytest.mark.parametrize(
    ("again", "expected"), [(True, [1, 2, 2]), (False, [1, 2, 2, 2])], ids=["due", "done"]
)
def test_jsonl_of_a_run_resumed_twice_has_the_evaluation_that_was_due_once(
    tmp_path, again, expected
):
    """A signal ended the evaluation after step 2; each resumption makes it before it trains."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1, "train/loss": 1.0, "eval/accuracy": 0.5}\n{"step": 2, "train/loss": 1.0}\n'
    )
    for evaluates_again in (True, again):
        reporter = JsonLines(path, resume_step=3, evaluates_again=evaluates_again)
        reporter.log({"eval/accuracy": 0.75}, 2)
        reporter.close()
    assert [row["step"] for row in lines_of(path)] == expected
    assert lines_of(path)[0]["eval/accuracy"] == 0.5 and lines_of(path)[-1] == {
        "step": 2,
        "eval/accuracy": 0.75,
    }


def test_console_line_has_the_columns_that_were_logged():
    assert (
        format_step(METRICS, 7, 120)
        == "step   7/120  reward 0.438  loss -0.0123  grad norm 0.500  k3 1.2e-04  weight 0.998  "
        "rejected 0.4%  time 0.31 s"
    )
    assert (
        format_step({"eval/a": 0.34, "eval/a/response_len": 11.0}, 0, 9) == "step 0/9  eval/a 0.340"
    )
    assert (
        format_step({"train/grad_norm": 2e18, "eval/a": 1e30}, 1, 1)
        == "step 1/1  grad norm 2.000e+18  eval/a 1.000e+30"
    )


def test_tensorboard_of_a_resumed_run_hides_the_steps_done_again(tmp_path):
    names = {"tb_project_name": "sort", "tb_experiment_name": "one"}
    config = ReportingConfig(output_dir=str(tmp_path), use_tensorboard=True, **names)
    for resume_step, steps, value in ((0, (1, 2, 3), 1.0), (2, (2, 3), 2.0)):
        reporter = open_reporters(config, {}, total_steps=3, resume_step=resume_step, run="r")
        for step in steps:
            reporter.log({"x": value}, step)
        reporter.close()
    events = EventAccumulator(str(tmp_path / "tensorboard" / "sort" / "one")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("x")] == [
        (1, 1.0),
        (2, 2.0),
        (3, 2.0),
    ]
    assert [(row["step"], row["x"]) for row in lines_of(tmp_path / "metrics.jsonl")] == [
        (1, 1),
        (2, 2),
        (3, 2),
    ]


def test_prometheus_reads_the_last_values(tmp_path):
    port = free_port()
    config = ReportingConfig(output_dir=str(tmp_path / "run"), prometheus_port=port)
    reporter = open_reporters(config, {}, total_steps=2)
    reporter.log(
        {"train/k3": 0.5, "eval/accuracy": 0.25, "eval/sort_digits": 0.0, "eval/sort-digits": 0.0},
        1,
    )
    reporter.log({"train/k3": float("nan"), "perf/step_time": 2.0}, 2)
    with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        families = text_string_to_metric_families(answer.read().decode())
    values = {sample.name: sample.value for family in families for sample in family.samples}
    k3 = values.pop("slime_tis_train_k3")
    assert k3 != k3
    assert values == {
        "slime_tis_eval_accuracy": 0.25,
        "slime_tis_eval_sort_digits": 0.0,
        "slime_tis_perf_step_time": 2.0,
        "slime_tis_step": 2.0,
    }
    other = replace(config, output_dir=str(tmp_path / "other"))
    with (
        pytest.raises(ValueError, match="not available"),
        held_outputs(MegatronConfig(hf_checkpoint="none"), other, main=True),
    ):
        pass
    reporter.close()
    open_reporters(replace(config, output_dir=str(tmp_path / "third")), {}, total_steps=2).close()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"use_wandb": True},
            "--use-wandb is on but wandb is not installed; run pip install wandb.",
        ),
        (
            {"report_to": ("trackio",)},
            "--report-to has trackio but trackio is not installed; run pip install trackio.",
        ),
        (
            {"report_to": ("tensorboard", "mlflow")},
            "--report-to has mlflow but mlflow is not installed; run pip install mlflow.",
        ),
        (
            {"prometheus_port": 9000},
            "--prometheus-port is set but prometheus_client is not installed; run pip install"
            " prometheus_client.",
        ),
    ],
    ids=["wandb", "trackio", "mlflow", "prometheus"],
)
def test_a_package_that_is_missing_is_one_message(config, message, monkeypatch):
    find = importlib.util.find_spec
    installed = ("tensorboard",)
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: find(name) if name in installed else None
    )
    with pytest.raises(ValueError) as error:
        ReportingConfig(**config)
    assert str(error.value) == message


def test_a_directory_of_offline_runs_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "mlflow").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="run pip install mlflow"):
        ReportingConfig(report_to=("mlflow",))


def test_prometheus_needs_a_port():
    with pytest.raises(ValueError, match="add --prometheus-port N"):
        ReportingConfig(report_to=("prometheus",))


def test_report_to_tensorboard_writes_events(tmp_path):
    config = ReportingConfig(
        output_dir=str(tmp_path), report_to=("tensorboard",), tb_project_name="sort"
    )
    reporter = open_reporters(config, {}, total_steps=1)
    reporter.log({"x": 0.5}, 1)
    reporter.close()
    events = EventAccumulator(str(tmp_path / "tensorboard" / "sort")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("x")] == [(1, 0.5)]


@pytest.mark.parametrize(
    ("name", "is_hidden"),
    [
        ("api_key", True),
        ("OPENAI_API_KEY", True),
        ("judge-password", True),
        ("hf_token", True),
        ("client_secret", True),
        ("api_key_env", False),
        ("rollout_stop_token_ids", False),
        ("max_tokens_per_gpu", False),
        ("reward_key", False),
        ("tis_level", False),
    ],
)
def test_names_of_secrets_are_known(name, is_hidden):
    shown = without_secrets({name: "value"})
    assert (shown[name] == HIDDEN) == is_hidden


class FailingTracker:
    """A tracker whose server is lost after the start."""

    def __init__(self, config, run):
        pass

    def log(self, metrics, step):
        raise ConnectionError("no route to host\nand a traceback")

    close = log


class UnreachableTracker:
    """Cannot be built."""

    def __init__(self, config, run):
        raise ConnectionError("no route to host")


def test_a_tracker_that_does_not_start_names_the_given_flag(monkeypatch):
    monkeypatch.setitem(TRACKERS, "wandb", UnreachableTracker)
    monkeypatch.setattr("slime_tis.trainer.configs.loop._is_installed", lambda package: True)
    info = RunInfo(identity="0", directory=Path("runs"), options={})
    with pytest.raises(ValueError) as error:
        Tracker("wandb", ReportingConfig(use_wandb=True), info)
    assert str(error.value) == (
        "--use-wandb is on but wandb does not start: no route to host; set up its login or"
        " server, or remove it."
    )


def test_a_tracker_that_fails_warns_once(monkeypatch, capsys):
    monkeypatch.setitem(TRACKERS, "wandb", FailingTracker)
    info = RunInfo(identity="0", directory=Path("runs"), options={})
    tracker = Tracker("wandb", ReportingConfig(), info)
    for step in (1, 2):
        tracker.log({"x": 1.0}, step)
    assert capsys.readouterr().err == (
        "warning: wandb does not get all metrics: no route to host; metrics.jsonl has them.\n"
    )
