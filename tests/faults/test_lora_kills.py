"""Runs with LoRA adapters that are killed between an optimizer step and the next checkpoint.

The resumed run must have the metrics and the adapter of an uninterrupted one, bit by bit.
"""

import hashlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from slime_tis.trainer.adapter_check import AdapterCheck
from slime_tis.trainer.checkpointer import Checkpointer
from slime_tis.trainer.engines.local.local_engine import LocalEngine
from slime_tis.trainer.engines.rollout_engine import WeightSource
from slime_tis.trainer.learner import Learner
from slime_tis.trainer.megatron.checkpoint_saving import Saving
from tests.faults.forked import ForkedRun, Outcome, run_forked
from tests.runs import make_task, read_metrics, training_metrics

TIMEOUT = 120.0
"""Seconds after which a run counts as hanging."""
STEPS = 5
KILLED_STEP = 4
"""The step after which a run is killed. It has checkpoints of the steps before."""
MODES = {
    "merged": ["--rollout-precision", "bf16"],
    "unmerged": ["--rollout-precision", "int8", "--rollout-lora", "unmerged"],
    # Checkpoints of odd steps then have the rollout engine's older adapter.
    "unmerged and stale": ["--rollout-lora", "unmerged", "--update-weights-interval", "2"],
}


def die() -> None:
    """Kills this process as the kernel does when memory is full."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_before(owner: type, name: str, is_moment: Callable[[Any], bool]) -> None:
    """Kills this process instead of the call of a method at a moment, which depends on `self`."""
    method = getattr(owner, name)

    def deadly(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_moment(self):
            die()
        return method(self, *args, **kwargs)

    setattr(owner, name, deadly)


def die_after(owner: type, name: str, is_moment: Callable[[Any], bool]) -> None:
    """Kills this process at the end of the call of a method, if this is the moment."""
    method = getattr(owner, name)

    def deadly(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        if is_moment(self):
            die()
        return result

    setattr(owner, name, deadly)


def die_within_the_update() -> None:
    """Kills this process after the first tensors of the weight update."""
    update = LocalEngine.update_weights

    def deadly(self: LocalEngine, source: WeightSource, version: int) -> None:
        def first_tensors() -> Iterator[tuple[str, Tensor]]:
            for number, named in enumerate(source()):
                if number == 3:
                    die()
                yield named

        update(self, first_tensors if version == KILLED_STEP else source, version)

    LocalEngine.update_weights = deadly  # type: ignore[method-assign]


def is_trained(learner: Learner) -> bool:
    return learner.step == KILLED_STEP


def is_sent(check: AdapterCheck) -> bool:
    return check.sampler.weight_version == KILLED_STEP


def is_due(checkpointer: Checkpointer) -> bool:
    return checkpointer.position.step == KILLED_STEP


def is_written(saving: Saving) -> bool:
    return saving.final.name == f"iter_{KILLED_STEP:07d}"


MOMENTS: dict[str, Callable[[], None]] = {
    "after the optimizer step": lambda: die_after(Learner, "train", is_trained),
    "within the weight update": die_within_the_update,
    "before the proof": lambda: die_before(AdapterCheck, "__call__", is_sent),
    "after the proof": lambda: die_after(AdapterCheck, "__call__", is_sent),
    "before the checkpoint": lambda: die_before(Checkpointer, "save", is_due),
    "before the checkpoint counts": lambda: die_before(Saving, "complete", is_written),
    "after the checkpoint": lambda: die_after(Checkpointer, "save", is_due),
}
"""What a run does at its start, so that it dies at the moment."""


def has_noise(check: AdapterCheck) -> bool:
    """Whether this is the second check before the first step, which is that of the trial."""
    return check.noise is not None


TRIAL = {
    "before the trial is checked": lambda: die_before(AdapterCheck, "checked_shares", has_noise),
    "before the first step": lambda: die_before(Learner, "train", lambda learner: True),
}
"""Moments before the first step, when the engine has a random adapter or just had it."""


def flags_of(task: list[str], mode: str, directory: Path) -> list[str]:
    """Flags of a run that saves each step, and that continues if it has a checkpoint."""
    flags = [*task, "--lora-rank", "4", "--lora-alpha", "8", *MODES[mode]]
    flags += ["--use-tis", "--lr-decay-style", "cosine", "--check-engines", "off"]
    flags += ["--num-rollout", str(STEPS), "--save-interval", "1", "--rollout-shuffle"]
    flags += ["--save", str(directory / "save"), "--load", str(directory / "save")]
    return [*flags, "--save-hf", str(directory / "hf"), "--output-dir", str(directory / "run")]


def results(directory: Path) -> tuple[list[dict[str, Any]], str]:
    """Metrics of all steps without times, and the checksum of the exported adapter."""
    rows = []
    for row in read_metrics(directory / "run"):
        rows.append({"step": row["step"], **training_metrics(row)})
    adapter = (directory / "hf" / "adapter_model.safetensors").read_bytes()
    return rows, hashlib.sha256(adapter).hexdigest()


@dataclass
class KilledRun:
    """A run that was killed, and its continuation."""

    killed: Outcome
    resumed: Outcome
    directory: Path


@dataclass
class Runs:
    """Runs of one mode: an uninterrupted one, and killed ones."""

    flags: Callable[[Path], list[str]]
    uninterrupted: Path

    def kill(self, moment: Callable[[], None], directory: Path) -> KilledRun:
        """Kills a run at a moment, and continues it."""
        flags = self.flags(directory)
        killed = ForkedRun(flags, directory / "log_killed", before=moment).wait(TIMEOUT)
        resumed = run_forked(flags, directory / "log_resumed", timeout=TIMEOUT)
        return KilledRun(killed, resumed, directory)


@pytest.fixture(scope="module", params=MODES)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    task = make_task(tmp_path_factory.mktemp("task"))
    directory = tmp_path_factory.mktemp("uninterrupted")

    def flags(directory: Path) -> list[str]:
        return flags_of(task, request.param, directory)

    outcome = run_forked(flags(directory), directory / "log", timeout=TIMEOUT)
    assert outcome.status == 0, outcome.error
    return Runs(flags, directory)


@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS)
def test_a_killed_run_resumes_bitwise(
    moment: Callable[[], None], runs: Runs, tmp_path: Path
) -> None:
    run = runs.kill(moment, tmp_path)
    assert run.killed.status == -signal.SIGKILL
    assert run.resumed.status == 0, run.resumed.error
    assert "resumed from" in run.resumed.output
    assert results(tmp_path) == results(runs.uninterrupted)


@pytest.mark.parametrize("moment", TRIAL.values(), ids=TRIAL)
def test_a_trial_adapter_does_not_survive_a_kill(
    moment: Callable[[], None], runs: Runs, tmp_path: Path
) -> None:
    run = runs.kill(moment, tmp_path)
    assert run.killed.status == -signal.SIGKILL
    assert run.resumed.status == 0, run.resumed.error
    assert results(tmp_path) == results(runs.uninterrupted)
