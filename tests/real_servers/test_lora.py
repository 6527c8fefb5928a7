"""Training of LoRA adapters with a real server, which gets merged weights or loads the adapter."""

from dataclasses import dataclass

import pytest

from tests.real_servers.servers import ENGINE
from tests.real_servers.training import Row, finished_run, server_flags

LORA = ["--lora-rank", "8", "--lr", "1e-2"]
RUNS = {
    "merged": ("float32", "merged"),
    "merged, bf16": ("bfloat16", "merged"),
    "unmerged": ("float32", "unmerged"),
    "unmerged, bf16": ("bfloat16", "unmerged"),
}


@dataclass
class Finished:
    """A run on a server of this precision."""

    precision: str
    rollout_lora: str
    rows: list[Row]
    stdout: str


@pytest.fixture(scope="module", params=RUNS.values(), ids=list(RUNS))
def finished(
    task: list[str], request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Finished:
    precision, rollout_lora = request.param
    output = tmp_path_factory.mktemp("lora")
    flags = [*task, *LORA, *server_flags(dtype=precision), "--check-weight-sync"]
    flags += ["--rollout-lora", rollout_lora]
    flags += [f"--{ENGINE.name}-weight-sync", "disk", "--check-engines", "stop"]
    run = finished_run(flags, output)
    return Finished(precision, rollout_lora, run.rows, run.stdout)


def test_the_server_applies_a_trial_adapter(finished: Finished) -> None:
    lines = finished.stdout.splitlines()
    (line,) = [line for line in lines if "applies the LoRA adapter" in line]
    share = float(line.partition("share ")[2].split()[0])
    assert share == pytest.approx(1, abs=0.002 if finished.precision == "float32" else 0.1)


def test_the_server_applies_the_adapter_of_every_step(finished: Finished) -> None:
    for row in finished.rows:
        # In bf16, merging rounds a part of a young adapter away.
        tolerance = 0.02 if finished.precision == "float32" else 0.3
        assert row["rollout/adapter_share"] == pytest.approx(1, abs=tolerance)


def test_rollouts_agree_with_the_adapter(finished: Finished) -> None:
    bound = 2e-5 if finished.precision == "float32" else 0.1
    for row in finished.rows:
        assert row["train/train_rollout_logprob_abs_diff"] < bound


def test_only_merging_in_bf16_rounds_the_adapter(finished: Finished) -> None:
    is_rounded = finished.precision == "bfloat16" and finished.rollout_lora == "merged"
    for row in finished.rows:
        assert (row["rollout/adapter_survival"] != 1.0) == is_rounded
