"""Runs train.py, and writes the mismatch and the CPU time of every optimizer step.

    python -m studies.true_on_policy.measured STEPS.jsonl FLAGS…

Δ is the log-prob of the forward pass that is differentiated minus the rollout engine's. The gate of
--true-on-policy sees the same log-probs, and still stops the run.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from slime_tis.main import train
from slime_tis.policy.loss_inputs import LossInputs
from slime_tis.trainer.data.sample import Sample
from slime_tis.trainer.learner import Learner
from slime_tis.trainer.megatron.micro_batches import in_sample_order
from slime_tis.trainer.megatron.parallel import Parallel
from slime_tis.trainer.on_policy_gate import OnPolicyGate
from slime_tis.trainer.step_inputs import Step


def differences(log_probs_L: Tensor, rollout_L: Tensor, mask_L: Tensor) -> dict[str, float]:
    """Returns the mismatch of a step's trained tokens.

    Args:
        log_probs_L: [L] log-probs of training, nats.
        rollout_L: [L] log-probs of the rollout engine, nats.
        mask_L: [L] above 0 for trained tokens.
    """
    trained_L = mask_L > 0
    delta = (log_probs_L - rollout_L)[trained_L].double()
    size = delta.abs()
    return {
        "tokens": int(trained_L.sum()),
        # Counted on Δ: NaN counts as different.
        "different": int((delta != 0).sum()),
        "sum_abs": float(size.sum()),
        "max_abs": float(size.max()) if len(size) else 0.0,
    }


class Meter(OnPolicyGate):
    """Measures Δ of every step, then lets the run's own gate check it, if there is one."""

    def __init__(self, gate: OnPolicyGate | None) -> None:
        super().__init__()
        self.gate = gate
        self.last: dict[str, float] = {}
        """The mismatch of the last step."""
        self._seen: list[Tensor] = []

    def watch(self, inputs: LossInputs) -> None:
        """Keeps the log-probs of a micro-batch."""
        self._seen.append(inputs.log_probs_L.detach())
        if self.gate is not None:
            self.gate.watch(inputs)

    def check(self, step: Step, number: int, parallel: Parallel) -> None:
        """Measures the step, and calls the run's gate."""
        tokens = step.batch.responses
        log_probs_L = in_sample_order(torch.cat(self._seen), step.partition, tokens.lengths)
        self._seen = []
        self.last = differences(log_probs_L, tokens.rollout_log_probs_L, tokens.loss_mask_L)
        if self.gate is not None:
            self.gate.check(step, number, parallel)


def measured(
    learner: Learner,
    groups: Sequence[Sequence[Sample]],
    user_advantages: Sequence[float] | None,
    file: Path,
) -> list[dict[str, float]]:
    """Makes the optimizer step of one rollout, and appends a line to the file.

    The line has the step, `differences`, and the CPU time of the process in seconds since its
    start: before and after training. What lies between two steps is sampling, rewards, the update
    of the engine's weights, reports, and an evaluation where one is due.
    """
    if not isinstance(learner.gate, Meter):
        learner.gate = Meter(learner.gate)
    before = time.process_time()
    rows = TRAIN(learner, groups, user_advantages)
    after = time.process_time()
    line = {"step": learner.step, **learner.gate.last, "cpu_before": before, "cpu_after": after}
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(line) + "\n")
    return rows


TRAIN = Learner.train
"""The method that `main` replaces."""


def main(arguments: Sequence[str]) -> int:
    """Trains with the flags after the file's name, and returns the status."""
    if len(arguments) < 2:
        print("error: give a file for the steps, then flags of train.py.", file=sys.stderr)
        return 2
    file = Path(arguments[0])
    file.parent.mkdir(parents=True, exist_ok=True)
    # Steps of an interrupted run: the run begins again.
    file.unlink(missing_ok=True)

    def replacement(
        learner: Learner,
        groups: Sequence[Sequence[Sample]],
        user_advantages: Sequence[float] | None = None,
    ) -> list[dict[str, float]]:
        return measured(learner, groups, user_advantages, file)

    Learner.train = replacement  # type: ignore[method-assign, assignment]
    return train(list(arguments[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
