"""Runs of train.py on a real server: bf16 there, fp32 in training; also with its experts."""

import json
import math
import signal
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch

from slime_tis.analysis.dumps.readers import read
from slime_tis.trainer.data.sample import Sample
from slime_tis.trainer.data.sample_file import from_dict, load_samples
from tests.real_servers.servers import ENGINE, ONLY_SGLANG
from tests.real_servers.training import (
    RUN,
    FinishedRun,
    Row,
    ended_run,
    finished_run,
    server_flags,
    without_engine,
)
from tests.runs import Completed, make_task, read_metrics, start_apart
from tests.samples import flat

STEPS = 4
SURPLUS_LENGTH = {"sglang": 400, "vllm": 1200}[ENGINE.name]
"""Longest response that the interrupted run does not need, in tokens. On a busy machine vLLM
samples hundreds of tokens before it reads an abort."""
CONTEXT = SURPLUS_LENGTH + 12
"""Longest prompt and response together of the interrupted run, in tokens."""


@pytest.fixture(scope="module")
def bf16_run(task: list[str], tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """A run whose rollouts are one step ahead, on a server in bf16."""
    flags = [*task, *server_flags(dtype="bfloat16")]
    flags += [f"--{ENGINE.name}-weight-sync", "disk", "--check-weight-sync"]
    flags += ["--rollout-lookahead", "1", "--use-tis", "--tis-upper-bound", "2.0"]
    output = tmp_path_factory.mktemp("bf16")
    flags += ["--save-debug-train-data", str(output / "dump" / "{rollout_id}.parquet")]
    run = finished_run(flags, output)
    assert len(run.rows) == STEPS
    return run


def test_engines_agree_on_a_bf16_server(bf16_run: FinishedRun) -> None:
    assert "engines agree" in bf16_run.stdout
    assert "prefix cache" not in bf16_run.stderr


def test_dumps_name_the_precision_of_the_server(bf16_run: FinishedRun) -> None:
    metadata = read(str(bf16_run.output / "dump")).metadata
    assert (metadata["precision"], metadata["rollout_precision"]) == ("fp32", "bf16")


def test_the_first_rollout_is_on_policy(bf16_run: FinishedRun) -> None:
    assert bf16_run.rows[0]["rollout/weight_staleness"] == 0


def test_bf16_alone_changes_log_probs_a_little(bf16_run: FinishedRun) -> None:
    # The first rollout is on-policy, so the server's precision is the only difference.
    assert bf16_run.rows[0]["train/train_rollout_logprob_abs_diff"] < 0.03


def test_a_run_measures_the_mismatch_of_bf16(bf16_run: FinishedRun) -> None:
    for row in bf16_run.rows:
        # up to 0.11 in the second step of five runs
        assert 1e-4 < row["train/train_rollout_logprob_abs_diff"] < 0.2
        assert 0.0 < row["train/mismatch_k3_kl"] < 0.1


def test_importance_weights_of_bf16_are_truncated(bf16_run: FinishedRun) -> None:
    for row in bf16_run.rows:
        assert row["train/mis_weight_max"] <= 2.0
        assert row["train/mis_weight_std"] > 0.0


def test_every_step_on_a_bf16_server_trains(bf16_run: FinishedRun) -> None:
    for row in bf16_run.rows:
        assert math.isfinite(row["train/loss"])
        assert row["train/grad_norm"] > 0.0


def test_no_request_is_repeated(bf16_run: FinishedRun) -> None:
    for row in bf16_run.rows:
        assert row[ENGINE.metric("retries")] == 0
        assert row[ENGINE.metric("deaths")] == 0


def test_a_lookahead_of_one_makes_tokens_one_step_old(bf16_run: FinishedRun) -> None:
    assert max(row["rollout/weight_staleness_max"] for row in bf16_run.rows) == 1


def test_a_run_ends_its_server(bf16_run: FinishedRun) -> None:
    remaining = []
    for process in psutil.process_iter(["cmdline"]):
        if str(bf16_run.output) in str(process.info["cmdline"]):
            remaining.append(process)
    assert remaining == []


def test_a_wrong_norm_epsilon_stops_before_training(task: list[str], tmp_path: Path) -> None:
    flags = [*task, *server_flags(dtype="float32"), "--check-engines", "stop"]
    override = {"sglang": "--sglang-json-model-override-args", "vllm": "--vllm-hf-overrides"}
    flags += [override[ENGINE.name], '{"rms_norm_eps": 0.01}']
    run = ended_run(flags, tmp_path)
    assert run.returncode == 1
    assert "uses a norm epsilon of 0.01" in run.stderr


@dataclass
class TensorParallelRun:
    """A run of two tensor-parallel ranks on a server in fp32."""

    rows: list[Row]
    versions: list[set[int]]
    """Weight versions of the tokens, per rollout."""


@pytest.fixture(scope="module")
def tensor_parallel_run(
    task: list[str], tmp_path_factory: pytest.TempPathFactory
) -> TensorParallelRun:
    output = tmp_path_factory.mktemp("tensor_parallel")
    flags = [*task, *server_flags(dtype="float32"), "--tensor-model-parallel-size", "2"]
    flags += ["--check-weight-sync", "--weight-sync-bound", "1e-4"]
    flags += ["--save-debug-rollout-data", str(output / "rollout_{rollout_id}.jsonl")]
    run = finished_run(flags, output, ranks=2)
    assert len(run.rows) == STEPS
    versions = []
    for rollout in range(STEPS):
        rollout_versions: set[int] = set()
        for line in (output / f"rollout_{rollout}.jsonl").read_text().splitlines():
            rollout_versions.update(json.loads(line)["weight_versions"])
        versions.append(rollout_versions)
    return TensorParallelRun(run.rows, versions)


def test_two_ranks_send_complete_tensors(tensor_parallel_run: TensorParallelRun) -> None:
    for row in tensor_parallel_run.rows:
        assert row["train/train_rollout_logprob_abs_diff"] < 1e-5


def test_two_ranks_train_on_policy(tensor_parallel_run: TensorParallelRun) -> None:
    staleness = [row["rollout/weight_staleness_max"] for row in tensor_parallel_run.rows]
    assert staleness == [0] * STEPS


def test_each_rollout_has_the_version_of_its_step(tensor_parallel_run: TensorParallelRun) -> None:
    assert tensor_parallel_run.versions == [{step} for step in range(STEPS)]


@pytest.fixture(scope="module")
def experts_task(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of a run on a server in bf16, which replays its experts if the engine returns them."""
    directory = tmp_path_factory.mktemp("experts")
    family = "qwen3"
    options = ["--lr", "1e-5"]
    if ENGINE.name == "sglang":
        family = "qwen3_moe"
        options.append("--use-rollout-routing-replay")
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "max_position_embeddings": CONTEXT + 100}
    flags = make_task(directory, family, prompts=32, **sizes, **ENGINE.sizes)
    return [*without_engine(flags), *options, *server_flags(dtype="bfloat16")]


@pytest.fixture(scope="module")
def replay_run(experts_task: list[str], tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    flags = [*experts_task, "--num-rollout", "2", "--n-samples-per-prompt", "16"]
    flags += ["--num-steps-per-rollout", "2", "--measure-routing-mismatch", "1"]
    run = finished_run(flags, tmp_path_factory.mktemp("replay"))
    assert [row["step"] for row in run.rows] == [1, 2, 3, 4]
    return run


@ONLY_SGLANG
def test_a_server_gives_the_experts_of_every_token(replay_run: FinishedRun) -> None:
    for row in replay_run.rows:
        assert row["train/routing_replay_missing"] == 0


@ONLY_SGLANG
def test_a_bf16_server_chooses_some_other_experts(replay_run: FinishedRun) -> None:
    for row in replay_run.rows:
        assert 0 < row["train/routing_difference"] < 0.5


@ONLY_SGLANG
def test_routing_replay_lowers_the_mismatch(replay_run: FinishedRun) -> None:
    for row in replay_run.rows:
        without_replay = row["train/without_replay/mismatch_k3_kl"]
        assert math.isfinite(without_replay)
        assert 0 < row["train/with_replay/mismatch_k3_kl"] < without_replay


@ONLY_SGLANG
def test_answers_with_experts_are_well_formed(replay_run: FinishedRun) -> None:
    last = replay_run.rows[-1]
    assert last[ENGINE.metric("retries")] == 0
    assert last[ENGINE.metric("malformed_responses")] == 0


@dataclass
class InterruptedRun:
    """A partial rollout that a signal interrupts, and the run that resumes it."""

    first: Completed
    rows: list[Row]
    """Metrics of both runs."""
    pairs: list[tuple[Sample, Sample]]
    """Unfinished responses of the checkpoint, and the trained responses that begin with them."""


def begins_with(sample: Sample, beginning: Sample) -> bool:
    """Whether a sample continues another one."""
    length = beginning.response_length
    return (
        sample.prompt_index == beginning.prompt_index
        and sample.response_ids[:length] == beginning.response_ids
        and sample.rollout_log_probs[:length] == beginning.rollout_log_probs
    )


def unfinished_responses(checkpoint: Path) -> list[Sample]:
    """Aborted samples of a checkpoint that have response tokens."""
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    samples = [from_dict(fields) for fields in flat(state["unfinished"])]
    aborted = [sample for sample in samples if sample.status is Sample.Status.ABORTED]
    return [sample for sample in aborted if sample.response_ids]


def write_prompts(file: Path) -> Path:
    """Short and long prompts in turn; the long ones leave room for responses of 20 tokens.

    So a rollout is complete while the server still samples the responses to short prompts.
    """
    rows = []
    for number in range(32):
        is_long = number % 2 == 1
        digits = str(number % 10) * (CONTEXT - 22 if is_long else 3)
        rows.append(json.dumps({"prompt": f"<bos>{digits}>", "label": digits}))
    file.write_text("\n".join(rows) + "\n")
    return file


@pytest.fixture(scope="module")
def interrupted_run(
    experts_task: list[str], tmp_path_factory: pytest.TempPathFactory
) -> InterruptedRun:
    directory = tmp_path_factory.mktemp("interrupted")
    flags = [*experts_task, "--num-rollout", "6"]
    flags += ["--rollout-max-response-len", str(SURPLUS_LENGTH)]
    flags += ["--partial-rollout", "--over-sampling-batch-size", "8"]
    prompts = write_prompts(directory / "prompts.jsonl")
    flags += ["--prompt-data", str(prompts), "--rollout-max-context-len", str(CONTEXT)]
    flags += ["--save", str(directory / "checkpoints")]
    flags += ["--save-debug-rollout-data", str(directory / "rollout_{rollout_id}.jsonl")]
    started = start_apart(flags, directory / "first")
    metrics = directory / "first" / "metrics.jsonl"
    started.until(lambda: metrics.exists() and metrics.read_text(), timeout=RUN)
    started.processes[0].terminate()
    first = started.wait(RUN)
    (checkpoint,) = (directory / "checkpoints").glob("iter_*")
    unfinished = unfinished_responses(checkpoint)
    resumed = finished_run([*flags, "--load", str(directory / "checkpoints")], directory / "second")
    first_rows = read_metrics(directory / "first")
    trained: list[Sample] = []
    for rollout in range(len(first_rows), 6):
        groups = load_samples(directory / f"rollout_{rollout}.jsonl", 4, 4)
        trained += flat(groups)
    pairs = []
    for beginning in unfinished:
        pairs += [(beginning, sample) for sample in trained if begins_with(sample, beginning)]
    return InterruptedRun(first, [*first_rows, *resumed.rows], pairs)


def test_sigterm_ends_a_run_with_its_status(interrupted_run: InterruptedRun) -> None:
    assert interrupted_run.first.statuses == [128 + signal.SIGTERM], interrupted_run.first.stderr


def test_a_resumed_run_completes_the_steps(interrupted_run: InterruptedRun) -> None:
    assert [row["step"] for row in interrupted_run.rows] == [1, 2, 3, 4, 5, 6]


@ONLY_SGLANG
def test_no_experts_are_missing_after_an_interruption(interrupted_run: InterruptedRun) -> None:
    for row in interrupted_run.rows:
        assert row["train/routing_replay_missing"] == 0


def test_unfinished_responses_are_continued(interrupted_run: InterruptedRun) -> None:
    assert interrupted_run.pairs


@ONLY_SGLANG
def test_continued_responses_keep_their_experts(interrupted_run: InterruptedRun) -> None:
    for beginning, sample in interrupted_run.pairs:
        kept = beginning.rollout_routed_experts
        experts = sample.rollout_routed_experts
        assert kept is not None and experts is not None
        assert torch.equal(experts[: len(beginning.tokens) - 1], kept)


@ONLY_SGLANG
def test_continued_responses_have_experts_for_all_tokens(
    interrupted_run: InterruptedRun,
) -> None:
    for _, sample in interrupted_run.pairs:
        assert sample.rollout_routed_experts is not None
        assert len(sample.rollout_routed_experts) == len(sample.tokens) - 1
