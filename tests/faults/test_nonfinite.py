"""NaN or infinite gradients, losses and weights end in one message and are never saved."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import tree_leaves

from tests.faults.forked import run_forked
from tests.runs import read_metrics

DIVERGES = ("--lr", "1", "--weight-decay", "100", "--num-rollout", "30", "--save-interval", "1")
STOPS = {
    "weights that grow a hundredfold each step": DIVERGES,
    "the same in bfloat16": (*DIVERGES, "--bf16"),
    "huge rewards": ("--custom-rm-path", "{directory}/huge.py:huge", "--disable-grpo-std-normalization"),
    "a loss that overflows": ("--use-tis", "--custom-tis-function-path", "{directory}/huge.py:overflow"),
    "a weight that is NaN": ("--hf-checkpoint", "{directory}/nan"),
}
CODE = """
def huge(args, sample):
    return 1e100 * sample.response_ids[0]

def overflow(args, *, pg_loss, loss_masks, **kwargs):
    return pg_loss * 3e38, loss_masks, {}
"""


@pytest.fixture(scope="module")
def directory(task):
    """The task's directory, with user code and a copy of its model with a weight that is NaN."""
    directory = Path(task[task.index("--hf-checkpoint") + 1]).parent
    (directory / "huge.py").write_text(CODE)
    shutil.copytree(directory / "model", directory / "nan")
    weights = load_file(directory / "nan" / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] = math.nan
    save_file(weights, directory / "nan" / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("policy", ["stop", "skip"])
@pytest.mark.parametrize("name", STOPS)
def test_a_gradient_that_is_not_finite_ends_the_run_or_is_skipped(name, policy, directory, task, tmp_path):
    flags = [*task, "--save", str(tmp_path / "save"), "--output-dir", str(tmp_path / "run")]
    flags += [flag.format(directory=directory) for flag in STOPS[name]]
    outcome = run_forked([*flags, "--nonfinite-gradient", policy], tmp_path / "log")
    assert not outcome.traceback, outcome.error
    if policy == "skip" and outcome.status == 0:
        assert 1.0 in [row["train/nonfinite_gradient_steps"] for row in read_metrics(tmp_path / "run")]
        return
    assert outcome.status in (1, 2)
    (message,) = [line for line in outcome.error.splitlines() if not line.startswith("warning: ")]
    assert outcome.status == 2 or "not finite" in message or "holds NaN or infinity" in message
    for checkpoint in (tmp_path / "save").glob("iter_*"):
        dcp_to_torch_save(checkpoint, tmp_path / "plain.pt")
        state = torch.load(tmp_path / "plain.pt", weights_only=True)
        layers = [value for key, value in state.items() if key.startswith(("embedding.", "decoder."))]
        weights = [weight for weight in tree_leaves(layers) if isinstance(weight, torch.Tensor)]
        assert weights and all(weight.isfinite().all() for weight in weights)


def test_the_last_good_step_is_saved_and_resumed(task, tmp_path):
    """The reward of the third rollout overflows; a run with other rewards resumes after step 2."""
    (tmp_path / "late.py").write_text("def reward(args, sample):\n    return 1e100 * (sample.index % 2)\n")
    flags = [*task, "--save", str(tmp_path / "save"), "--load", str(tmp_path / "save")]
    flags += ["--output-dir", str(tmp_path / "run"), "--disable-grpo-std-normalization"]
    good = run_forked([*flags, "--num-rollout", "2"], tmp_path / "good")
    bad = run_forked([*flags, "--custom-rm-path", f"{tmp_path / 'late.py'}:reward"], tmp_path / "bad")
    again = run_forked(flags, tmp_path / "again")
    assert (good.status, bad.status, again.status) == (0, 1, 0)
    assert f"The run stops after step 2, saved under {tmp_path / 'save'}" in bad.error
    steps = [(row["step"], row["train/nonfinite_gradient_steps"]) for row in read_metrics(tmp_path / "run")]
    assert steps == [(1, 0.0), (2, 0.0), (3, 0.0)]
