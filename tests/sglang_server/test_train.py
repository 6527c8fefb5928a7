"""Runs of train.py on a real server: bf16 there, fp32 in training; also with its experts."""

import json
import math
import signal
from pathlib import Path

import psutil
import pytest
import torch

from slime_tis.trainer.data.sample import Sample
from slime_tis.trainer.data.sample_file import from_dict, load_samples
from tests.runs import free_port, make_task, read_metrics, run_apart, start_apart
from tests.samples import flat
from tests.sglang_server.servers import FLAGS, PYTHON

STEPS = 4


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    flags = make_task(tmp_path_factory.mktemp("task"), prompts=32, hidden_size=64)
    precision = flags.index("--rollout-precision")  # of the local engine
    return [
        *flags[:precision],
        *flags[precision + 2 :],
        "--num-rollout",
        str(STEPS),
        "--lr",
        "1e-4",
    ]


def sglang_flags(*server_flags):
    launch = ["--rollout-engine", "sglang", "--sglang-launch", "1", "--sglang-python", str(PYTHON)]
    return [
        *launch,
        "--sglang-base-port",
        str(free_port()),
        "--sglang-config",
        str(FLAGS),
        *server_flags,
    ]


def test_a_run_with_a_bf16_server_measures_its_mismatch_and_corrects_it(task, tmp_path):
    flags = [
        *task,
        *sglang_flags("--sglang-dtype", "bfloat16"),
        "--check-weight-sync",
        "--sglang-weight-sync",
        "disk",
    ]
    run = run_apart(
        [*flags, "--rollout-lookahead", "1", "--use-tis", "--tis-upper-bound", "2.0"], tmp_path
    )
    assert run.returncode == 0, run.stderr
    assert "engines agree" in run.stdout and "prefix cache" not in run.stderr
    rows = read_metrics(tmp_path)
    assert len(rows) == STEPS
    for row in rows:
        assert (
            1e-4 < row["train/train_rollout_logprob_abs_diff"] < 0.2
        )  # the second step: up to 0.11 in five runs
        assert 0.0 < row["train/mismatch_k3_kl"] < 0.1
        assert row["train/mis_weight_max"] <= 2.0 and row["train/mis_weight_std"] > 0.0
        assert math.isfinite(row["train/loss"]) and row["train/grad_norm"] > 0.0
        assert row["rollout/sglang_retries"] == row["rollout/sglang_deaths"] == 0
    assert rows[0]["rollout/weight_staleness"] == 0
    assert rows[0]["train/train_rollout_logprob_abs_diff"] < 0.03  # bf16 alone
    assert max(row["rollout/weight_staleness_max"] for row in rows) == 1
    assert not [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(tmp_path) in str(process.info["cmdline"])
    ]


def test_a_server_with_another_norm_epsilon_is_named_before_the_first_step(task, tmp_path):
    override = [
        "--sglang-json-model-override-args",
        '{"rms_norm_eps": 0.01}',
        "--sglang-dtype",
        "float32",
    ]
    run = run_apart([*task, *sglang_flags(*override), "--check-engines", "stop"], tmp_path)
    assert run.returncode == 1 and "uses a norm epsilon of 0.01" in run.stderr


def test_two_ranks_that_share_a_model_give_an_fp32_server_its_weights(task, tmp_path):
    data = str(tmp_path / "rollout_{rollout_id}.jsonl")
    flags = [*task, *sglang_flags("--sglang-dtype", "float32"), "--tensor-model-parallel-size", "2"]
    flags += [
        "--check-weight-sync",
        "--weight-sync-bound",
        "1e-4",
        "--save-debug-rollout-data",
        data,
    ]
    run = run_apart(flags, tmp_path, ranks=2)
    assert run.returncode == 0, run.stderr
    rows = read_metrics(tmp_path)
    assert len(rows) == STEPS
    for row in rows:
        assert row["train/train_rollout_logprob_abs_diff"] < 1e-5
        assert row["rollout/weight_staleness_max"] == 0
    for rollout in range(STEPS):
        samples = [
            json.loads(line)
            for line in Path(data.format(rollout_id=rollout)).read_text().splitlines()
        ]
        assert {version for sample in samples for version in sample["weight_versions"]} == {rollout}


@pytest.fixture(scope="module")
def experts_task(tmp_path_factory):
    flags = make_task(
        tmp_path_factory.mktemp("experts"),
        "qwen3_moe",
        prompts=32,
        hidden_size=64,
        num_hidden_layers=3,
    )
    precision = flags.index("--rollout-precision")
    flags = [
        *flags[:precision],
        *flags[precision + 2 :],
        "--lr",
        "1e-5",
        "--use-rollout-routing-replay",
    ]
    return [*flags, *sglang_flags("--sglang-dtype", "bfloat16")]


def test_a_run_replays_the_experts_of_a_bf16_server(experts_task, tmp_path):
    flags = ["--num-rollout", "2", "--n-samples-per-prompt", "16", "--num-steps-per-rollout", "2"]
    run = run_apart([*experts_task, *flags, "--measure-routing-mismatch", "1"], tmp_path)
    assert run.returncode == 0, run.stderr
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert row["train/routing_replay_missing"] == 0
        assert 0 < row["train/routing_difference"] < 0.5
        with_replay, without = (
            row[f"train/{name}_replay/mismatch_k3_kl"] for name in ("with", "without")
        )
        assert math.isfinite(without) and 0 < with_replay < without
    last = rows[-1]
    assert last["rollout/sglang_retries"] == last["rollout/sglang_malformed_responses"] == 0


def test_an_interrupted_partial_rollout_goes_on_with_the_experts_of_its_stragglers(
    experts_task, tmp_path
):
    data = tmp_path / "rollout_{rollout_id}.jsonl"
    flags = [
        *experts_task,
        "--partial-rollout",
        "--over-sampling-batch-size",
        "8",
        "--num-rollout",
        "6",
    ]
    flags += [
        "--rollout-max-response-len",
        "100",
        "--rollout-stop-token-ids",
        *map(str, range(3, 64, 24)),
    ]
    flags += ["--save", str(tmp_path / "checkpoints"), "--save-debug-rollout-data", str(data)]
    first = start_apart(flags, tmp_path / "first")
    metrics = tmp_path / "first" / "metrics.jsonl"
    first.until(lambda: metrics.exists() and metrics.read_text(), timeout=600)
    first.processes[0].terminate()
    ended = first.wait(120)
    assert ended.statuses == [128 + signal.SIGTERM], ended.stderr
    (checkpoint,) = (tmp_path / "checkpoints").glob("iter_*")
    unfinished = json.loads((checkpoint / "trainer_state.json").read_text())["unfinished"]
    left = [
        sample for group in unfinished for sample in map(from_dict, group) if sample.response_ids
    ]
    begun = [sample for sample in left if sample.status is Sample.Status.ABORTED]
    run = run_apart([*flags, "--load", str(tmp_path / "checkpoints")], tmp_path / "second")
    assert run.returncode == 0, run.stderr
    rows = [*read_metrics(tmp_path / "first"), *read_metrics(tmp_path / "second")]
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert all(row["train/routing_replay_missing"] == 0 for row in rows)
    files = [
        data.with_name(f"rollout_{rollout}.jsonl")
        for rollout in range(len(read_metrics(tmp_path / "first")), 6)
    ]
    trained = [sample for file in files for sample in flat(load_samples(file, 4, 4))]
    pairs = [(one, whole) for one in begun for whole in trained if begins_with(whole, one)]
    assert pairs
    for one, whole in pairs:
        assert whole.rollout_routed_experts is not None and one.rollout_routed_experts is not None
        assert torch.equal(
            whole.rollout_routed_experts[: len(one.tokens) - 1], one.rollout_routed_experts
        )
        assert len(whole.rollout_routed_experts) == len(whole.tokens) - 1


def begins_with(whole, part):
    first = whole.prompt_index, whole.response_ids[: part.response_length]
    log_probs = whole.rollout_log_probs[: part.response_length]
    return (*first, log_probs) == (part.prompt_index, part.response_ids, part.rollout_log_probs)
