"""--report-to with the real libraries of W&B, Trackio and MLflow, offline and without a server."""

import importlib
import json
import math
import os
from pathlib import Path

import pytest
import wandb

from slime_tis.analysis.logs.read_log import read_log
from slime_tis.trainer.configs.loop import ReportingConfig
from slime_tis.trainer.reporting import trackers
from slime_tis.trainer.reporting.reporters import open_reporters
from slime_tis.trainer.reporting.trackers import HIDDEN

OPTIONS = {"lr": 1e-4, "judge": {"api_key": "sk-123", "url": "http://a"}, "openai_api_key": "sk-4"}
ROWS = [
    {"train/mismatch_k3_kl": 0.5, "eval/a b": 0.25, "train/kl": math.nan},
    {"train/mismatch_k3_kl": 0.125, "train/max": math.inf},
]
IDENTITY = "0123456789abcdef"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A working directory, without the settings of this machine's user."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def trackio_directory(home, monkeypatch):
    """Trackio's database; the library reads the variable when it is imported."""
    import trackio.sqlite_storage as storage

    monkeypatch.setattr(storage, "TRACKIO_DIR", home / "trackio")
    return home / "trackio"


@pytest.fixture
def mlflow_client(home, monkeypatch):
    """A client of a store in files, the only local one of mlflow-skinny."""
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (home / "mlruns").as_uri())
    mlflow.set_tracking_uri((home / "mlruns").as_uri())
    return mlflow.MlflowClient()


def report(rows, first_step=1, **config):
    reporters = open_reporters(
        ReportingConfig(output_dir="runs/mine", progress=False, **config),
        OPTIONS,
        total_steps=9,
        resume_step=first_step if first_step > 1 else 0,
        run=IDENTITY,
    )
    for step, row in enumerate(rows, start=first_step):
        reporters.log(row, step)
    reporters.close()


def trackio_logs():
    from trackio.sqlite_storage import SQLiteStorage

    return SQLiteStorage.get_logs("sorting", "mine-01234567")


def mlflow_run(client):
    experiment = client.get_experiment_by_name("sorting")
    (run,) = client.search_runs([experiment.experiment_id])
    return run


def test_wandb_writes_an_offline_run(home):
    report(ROWS, report_to=("wandb",), wandb_mode="offline")
    wandb.teardown()  # waits for the process that writes the file
    log = read_log(Path("runs/mine/wandb"))
    assert log is not None and [row["train/mismatch_k3_kl"] for row in log.rows] == [0.5, 0.125]


def test_wandb_gets_no_secret(home):
    report(ROWS, report_to=("wandb",), wandb_mode="offline")
    wandb.teardown()
    (file,) = Path("runs/mine/wandb").glob("offline-run-*/*.wandb")
    content = file.read_bytes()
    assert b"openai_api_key" in content
    assert b"sk-" not in content


def test_slimes_flag_is_the_same(home):
    report(ROWS, use_wandb=True, wandb_mode="offline")
    wandb.teardown()
    assert list(Path("runs/mine/wandb").glob("offline-run-*/*.wandb"))


def test_trackio_writes_its_database(trackio_directory):
    report(ROWS, report_to=("trackio",), tracker_project="sorting")
    rows = trackio_logs()
    assert [(row["step"], row["train/mismatch_k3_kl"]) for row in rows] == [(1, 0.5), (2, 0.125)]
    assert (trackio_directory / "sorting.db").exists()


def test_trackio_continues_the_run_after_a_resumption(trackio_directory):
    report(ROWS[:1], report_to=("trackio",), tracker_project="sorting")
    report(ROWS[1:], first_step=2, report_to=("trackio",), tracker_project="sorting")
    assert [row["step"] for row in trackio_logs()] == [1, 2]


def test_trackio_gets_no_secret(trackio_directory):
    from trackio.sqlite_storage import SQLiteStorage

    report(ROWS, report_to=("trackio",), tracker_project="sorting")
    config = SQLiteStorage.get_run_config("sorting", "mine-01234567")
    assert config["judge"] == {"api_key": HIDDEN, "url": "http://a"}
    assert config["openai_api_key"] == HIDDEN and config["lr"] == 1e-4


def test_trackio_prints_one_plain_line(trackio_directory, capsys):
    report([], report_to=("trackio",), tracker_project="sorting")
    assert capsys.readouterr().out == (
        "trackio: run mine-01234567; see `trackio show --project sorting`\n"
    )


def test_mlflow_has_the_finite_metrics(mlflow_client):
    report(ROWS, report_to=("mlflow",), tracker_project="sorting")
    run = mlflow_run(mlflow_client)
    history = mlflow_client.get_metric_history(run.info.run_id, "train/mismatch_k3_kl")
    # MLflow gives no order of the values.
    values = sorted((metric.step, metric.value) for metric in history)
    assert values == [(1, 0.5), (2, 0.125)]
    assert run.data.metrics == {"train/mismatch_k3_kl": 0.125, "eval/a b": 0.25}
    assert run.info.status == "FINISHED"


def test_mlflow_continues_the_run_after_a_resumption(mlflow_client):
    report(ROWS[:1], report_to=("mlflow",), tracker_project="sorting")
    report(ROWS[1:], first_step=2, report_to=("mlflow",), tracker_project="sorting")
    run = mlflow_run(mlflow_client)
    assert len(mlflow_client.get_metric_history(run.info.run_id, "train/mismatch_k3_kl")) == 2


def test_mlflow_gets_no_secret(mlflow_client):
    report(ROWS, report_to=("mlflow",), tracker_project="sorting")
    params = mlflow_run(mlflow_client).data.params
    assert params["lr"] == "0.0001" and params["openai_api_key"] == HIDDEN
    assert "sk-" not in json.dumps(params)


def test_mlflow_takes_more_options_than_one_request(mlflow_client, monkeypatch):
    monkeypatch.setitem(OPTIONS, "words", "x" * 9000)
    for number in range(250):
        monkeypatch.setitem(OPTIONS, f"option_{number}", number)
    report([], report_to=("mlflow",), tracker_project="sorting")
    params = mlflow_run(mlflow_client).data.params
    assert len(params) == len(OPTIONS) and len(params["words"]) == 500


def test_a_server_that_does_not_answer_delays_no_run(mlflow_client, monkeypatch, capsys):
    monkeypatch.setattr(trackers, "MLFLOW_CLOSE", 0.1)
    reporters = open_reporters(
        ReportingConfig(output_dir="runs/mine", report_to=("mlflow",), progress=False),
        OPTIONS,
        total_steps=9,
        run=IDENTITY,
    )
    # Nobody reads from this pipe, so that MLflow waits when it opens it.
    (metrics,) = Path("mlruns").glob("*/*/metrics")
    (metrics / "train").mkdir()
    os.mkfifo(metrics / "train" / "mismatch_k3_kl")
    reporters.log(ROWS[0], 1)
    reporters.close()
    assert "warning: mlflow does not get all metrics: the server did not answer within" in (
        capsys.readouterr().err
    )


def test_metrics_after_a_failed_batch_are_sent(mlflow_client):
    reporters = open_reporters(
        ReportingConfig(
            output_dir="runs/mine", report_to=("mlflow",), tracker_project="sorting", progress=False
        ),
        OPTIONS,
        total_steps=9,
        run=IDENTITY,
    )
    reporters.log({"train/../a": 0.5}, 1)  # MLflow refuses the name
    reporters.log(ROWS[1], 2)
    reporters.close()
    assert mlflow_run(mlflow_client).data.metrics == {"train/mismatch_k3_kl": 0.125}


def test_two_runs_may_make_the_experiment(mlflow_client, monkeypatch):
    mlflow_client.create_experiment("sorting")
    find = type(mlflow_client).get_experiment_by_name
    answers = [None]

    def find_too_early(client, name):
        return answers.pop() if answers else find(client, name)

    monkeypatch.setattr(type(mlflow_client), "get_experiment_by_name", find_too_early)
    report(ROWS, report_to=("mlflow",), tracker_project="sorting")
    assert mlflow_run(mlflow_client).info.status == "FINISHED"


def test_a_tracker_that_does_not_start_is_one_message(home, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nowhere://a")
    importlib.import_module("mlflow").set_tracking_uri("nowhere://a")
    with pytest.raises(ValueError, match=r"^--report-to has mlflow but mlflow does not start: .*"):
        report([], report_to=("mlflow",))


def test_the_start_does_not_wait_long_for_a_server(home, monkeypatch):
    # With MLflow's default of seven retries, this would take four minutes.
    monkeypatch.setitem(trackers.MLFLOW_START, "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    importlib.import_module("mlflow").set_tracking_uri("http://127.0.0.1:9")
    with pytest.raises(ValueError, match=r"mlflow does not start: .*127\.0\.0\.1"):
        report([], report_to=("mlflow",))


def test_a_lost_server_is_one_warning(mlflow_client, capsys):
    reporters = open_reporters(
        ReportingConfig(output_dir="runs/mine", report_to=("mlflow",), progress=False),
        OPTIONS,
        total_steps=9,
        run=IDENTITY,
    )
    for path in sorted(Path("mlruns").rglob("meta.yaml")):
        path.write_text("")
    for step, row in enumerate(ROWS, start=1):
        reporters.log(row, step)
    reporters.close()
    assert capsys.readouterr().err.count("warning: mlflow does not get all metrics") == 1
    assert len(Path("runs/mine/metrics.jsonl").read_text().splitlines()) == 2
