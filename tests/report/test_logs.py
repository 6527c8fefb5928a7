"""Logs of other programs, written by these programs, in the diagnosis."""

import math

import pytest
from torch.utils.tensorboard import SummaryWriter
from transformers import TrainerState

from slime_tis.analysis.report.command import diagnosis
from slime_tis.analysis.report.logs import read_log

STEPS = 12
VALUES = [0.004 * 1.4**step for step in range(STEPS)]
"""Mean |Δ| of a run whose rollout engine misses every update."""


def tensorboard(directory):
    writer = SummaryWriter(directory)
    for step, value in enumerate(VALUES):
        writer.add_scalar("policy/rollout_train_logprobs_abs_diff_mean", value, step)
    writer.close()
    return directory


def trainer_state(directory):
    rows = [{"step": i, "sampling/sampling_logp_difference/mean": value} for i, value in enumerate(VALUES)]
    TrainerState(log_history=rows).save_to_json(str(directory / "trainer_state.json"))
    return directory


def console(directory):
    """As verl's LocalLogger prints, with Ray's prefix and with numpy's numbers."""
    path = directory / "train.log"
    lines = [
        f"(TaskRunner pid=7) step:{step} - global_seqlen/mean:1.0e+02 - train/token_mult_prob_error:{form(math.exp(v))}"
        for step, (v, form) in enumerate(zip(VALUES, 6 * [str, "np.float64({})".format], strict=True))
    ]
    path.write_text("\n".join(["Epoch 1: step:none", *lines, "step:99 - cut"]) + "\n")
    return path


def table(directory):
    path = directory / "export.csv"
    rows = [f"{step},{value},text" for step, value in enumerate(VALUES)]
    path.write_text("\n".join(["_step,debug/vllm_vs_local_logprob_diff_mean,name", *rows]) + "\n")
    return path


@pytest.mark.parametrize("write", [tensorboard, trainer_state, console, table], ids=lambda write: write.__name__)
def test_a_log_of_another_program_is_diagnosed(write, tmp_path):
    path = write(tmp_path)
    rows = read_log(path)
    assert rows is not None and [row["step"] for row in rows] == list(range(STEPS))
    assert [row["train/train_rollout_logprob_abs_diff"] for row in rows] == pytest.approx(VALUES, rel=1e-6)
    text = diagnosis(str(path))
    assert "weights not updated" in text and "rollout/weight_staleness" in text


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("export.csv", ""),
        ("export.csv", "a,b\n1,2\n"),
        ("export.csv", "\x00\n\x00"),
        ("trainer_state.json", "[]"),
        ("trainer_state.json", '{"log_history": 3}'),
        ("trainer_state.json", '{"log_history": [3]}'),
        ("events.out.tfevents.1", "nothing"),
        ("train.log", "no metrics"),
        ("run-1.wandb", ":W&B"),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_a_log_without_metrics_is_refused(name, content, tmp_path):
    (tmp_path / name).write_text(content)
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(ValueError, match=name):
            diagnosis(str(path))
