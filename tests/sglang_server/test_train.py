"""Whole runs of train.py on a real server: bf16 there, fp32 in training."""

import json
import math
from pathlib import Path

import psutil
import pytest

from tests.runs import free_port, make_task, read_metrics, run_apart
from tests.sglang_server.servers import FLAGS, PYTHON

STEPS = 4


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    flags = make_task(tmp_path_factory.mktemp("task"), prompts=32, hidden_size=64)
    precision = flags.index("--rollout-precision")  # of the local engine
    return [*flags[:precision], *flags[precision + 2 :], "--num-rollout", str(STEPS), "--lr", "1e-4"]


def sglang_flags(*server_flags: str) -> list[str]:
    launch = ["--rollout-engine", "sglang", "--sglang-launch", "1", "--sglang-python", str(PYTHON)]
    return [*launch, "--sglang-base-port", str(free_port()), "--sglang-config", str(FLAGS), *server_flags]


def test_a_run_with_a_bf16_server_measures_its_mismatch_and_corrects_it(task: list[str], tmp_path: Path) -> None:
    flags = [*task, *sglang_flags("--sglang-dtype", "bfloat16"), "--check-weight-sync", "--sglang-weight-sync", "disk"]
    run = run_apart([*flags, "--rollout-lookahead", "1", "--use-tis", "--tis-upper-bound", "2.0"], tmp_path)
    assert run.returncode == 0, run.stderr
    rows = read_metrics(tmp_path)
    assert len(rows) == STEPS
    for row in rows:
        assert 1e-4 < row["train/train_rollout_logprob_abs_diff"] < 0.1
        assert 0.0 < row["train/mismatch_k3_kl"] < 0.1
        assert row["train/mis_weight_max"] <= 2.0 and row["train/mis_weight_std"] > 0.0
        assert math.isfinite(row["train/loss"]) and row["train/grad_norm"] > 0.0
        assert row["rollout/sglang_retries"] == row["rollout/sglang_deaths"] == 0
    assert (
        rows[0]["rollout/weight_staleness"] == 0 and rows[0]["train/train_rollout_logprob_abs_diff"] < 0.03
    )  # bf16 alone
    assert max(row["rollout/weight_staleness_max"] for row in rows) == 1
    assert not [
        process for process in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(process.info["cmdline"])
    ]


def test_two_ranks_that_share_a_model_give_an_fp32_server_its_weights(task: list[str], tmp_path: Path) -> None:
    data = str(tmp_path / "rollout_{rollout_id}.jsonl")
    flags = [*task, *sglang_flags("--sglang-dtype", "float32"), "--tensor-model-parallel-size", "2"]
    flags += ["--check-weight-sync", "--weight-sync-bound", "1e-4", "--save-debug-rollout-data", data]
    run = run_apart(flags, tmp_path, ranks=2)
    assert run.returncode == 0, run.stderr
    rows = read_metrics(tmp_path)
    assert len(rows) == STEPS
    for row in rows:
        assert row["train/train_rollout_logprob_abs_diff"] < 1e-5
        assert row["rollout/weight_staleness_max"] == 0
    for rollout in range(STEPS):
        samples = [json.loads(line) for line in Path(data.format(rollout_id=rollout)).read_text().splitlines()]
        assert {version for sample in samples for version in sample["weight_versions"]} == {rollout}
