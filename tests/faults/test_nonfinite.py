"""NaN or infinite gradients, losses and weights end in one message and are never saved."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import tree_leaves

from tests.faults.forked import run_forked
from tests.runs import make_task, read_metrics

DIVERGES = ("--lr", "1", "--weight-decay", "100", "--num-rollout", "30", "--save-interval", "1")
STOPS = {
    "weights that grow a hundredfold each step": DIVERGES,
    "the same, several steps per rollout": (*DIVERGES, "--num-steps-per-rollout", "4"),
    "the same in bfloat16": (*DIVERGES, "--bf16"),
    "the same with a distributed optimizer": (*DIVERGES, "--use-distributed-optimizer"),
    "huge rewards": ("--custom-rm-path", "{directory}/huge.py:huge", "--disable-grpo-std-normalization"),
    "a loss that overflows": ("--use-tis", "--custom-tis-function-path", "{directory}/huge.py:overflow"),
    "a weight that is NaN": ("--hf-checkpoint", "{directory}/nan"),
    "a weight that is infinite": ("--hf-checkpoint", "{directory}/inf"),
    "weights whose products overflow": ("--hf-checkpoint", "{directory}/large"),
}
CODE = """
def huge(args, sample):
    return 1e100 * sample.response_ids[0]

def overflow(args, *, pg_loss, loss_masks, **kwargs):
    return pg_loss * 3e38, loss_masks, {}
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A task with its flags, user code, and copies of its model with weights that are not finite or too large."""
    directory = tmp_path_factory.mktemp("task")
    task = make_task(directory)
    (directory / "huge.py").write_text(CODE)
    for name, value in (("nan", math.nan), ("inf", math.inf), ("large", 1e25)):
        shutil.copytree(directory / "model", directory / name)
        weights = load_file(directory / name / "model.safetensors")
        next(iter(weights.values())).view(-1)[:40] = value
        save_file(weights, directory / name / "model.safetensors", metadata={"format": "pt"})
    return directory, task


@pytest.fixture(scope="module")
def directory(prepared: tuple[Path, list[str]]) -> Path:
    return prepared[0]


@pytest.fixture(scope="module")
def task(prepared: tuple[Path, list[str]]) -> list[str]:
    return prepared[1]


def wrong(outcome: Any, save: Path) -> str | None:
    """Returns an error if a run has several messages or saved weights that are not finite."""
    lines = [line for line in outcome.error.splitlines() if not line.startswith("warning: ")]
    if outcome.status not in (1, 2) or outcome.traceback:
        return f"status {outcome.status}: {outcome.error}"
    if len(lines) != 1:
        return f"{len(lines)} messages: {outcome.error}"
    for checkpoint in save.glob("iter_*"):
        dcp_to_torch_save(checkpoint, save / "plain.pt")
        found = torch.load(save / "plain.pt", weights_only=True)
        layers = [value for name, value in found.items() if name.startswith(("embedding.", "decoder."))]
        weights = [weight for weight in tree_leaves(layers) if isinstance(weight, torch.Tensor)]
        if not weights or not all(weight.isfinite().all() for weight in weights):
            return f"{checkpoint.name} has weights that are not finite"
    return None


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_what_is_not_finite_ends_the_run_or_is_skipped(
    policy: str, directory: Path, task: list[str], tmp_path: Path, tally: Any
) -> None:
    tries = tally(f"a gradient that is not finite ({policy})")
    for number, (name, flags) in enumerate(STOPS.items()):
        save, run = tmp_path / f"save{number}", tmp_path / f"run{number}"
        outcome = run_forked(
            [*task, "--save", str(save), "--output-dir", str(run), "--nonfinite-gradient", policy]
            + [flag.format(directory=directory) for flag in flags],
            tmp_path / f"log{number}",
        )
        failure = wrong(outcome, save)
        if policy == "skip" and outcome.status == 0:
            skipped = [row["train/nonfinite_gradient_steps"] for row in read_metrics(run)]
            failure = None if 1.0 in skipped and not outcome.traceback else f"nothing was skipped: {skipped}"
        elif outcome.status == 1 and not any(said in outcome.error for said in ("not finite", "holds NaN or infinity")):
            failure = f"not said: {outcome.error}"
        tries.record(name, failure)
    tries.check(at_least=len(STOPS))


def test_the_last_good_step_is_saved_and_resumed(task: list[str], tmp_path: Path, tally: Any) -> None:
    """The reward of the third rollout overflows; a run with other rewards resumes after step 2."""
    tries = tally("the checkpoint of the last good step")
    (tmp_path / "late.py").write_text("def reward(args, sample):\n    return 1e100 * (sample.index % 2)\n")
    flags = [*task, "--save", str(tmp_path / "save"), "--load", str(tmp_path / "save")]
    flags += ["--output-dir", str(tmp_path / "run"), "--disable-grpo-std-normalization"]
    good = run_forked([*flags, "--num-rollout", "2"], tmp_path / "good")
    bad = run_forked([*flags, "--custom-rm-path", f"{tmp_path / 'late.py'}:reward"], tmp_path / "bad")
    again = run_forked(flags, tmp_path / "again")
    tries.record("two good steps", None if good.status == 0 else good.error)
    said = f"The run stops after step 2, saved under {tmp_path / 'save'}"
    tries.record("a bad third", None if bad.status == 1 and said in bad.error else bad.error)
    tries.record("a good third", None if again.status == 0 and "after step 2" in again.output else again.error)
    steps = [(row["step"], row["train/nonfinite_gradient_steps"]) for row in read_metrics(tmp_path / "run")]
    tries.record("the metrics", None if steps == [(1, 0.0), (2, 0.0), (3, 0.0)] else str(steps))
    tries.check(at_least=4)
