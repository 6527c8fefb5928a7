"""A non-finite gradient is explained by the token that causes it, in runs of train.py."""

import re
from pathlib import Path

import pytest

from tests.runs import make_task, run_apart

LOSS = """
def nan_gradient(args, batch, logits, sum_of_sample_mean):
    finite = sum_of_sample_mean(logits[0].logsumexp(-1))
    # sqrt(0) has an infinite derivative, and inf * 0 is NaN
    return finite + (0 * logits[0, 1]).sum().sqrt(), {}

def finite_gradient(args, batch, logits, sum_of_sample_mean):
    return sum_of_sample_mean(logits[0].logsumexp(-1)), {}
"""


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("task")
    (directory / "loss.py").write_text(LOSS)
    return [*make_task(directory), "--loss-type", "custom_loss", "--custom-loss-function-path"]


def test_the_message_names_token_sample_prompt(flags: list[str], tmp_path: Path) -> None:
    path = flags[1].replace("model", "loss.py")
    ended = run_apart([*flags, f"{path}:nan_gradient", "--num-rollout", "1"], tmp_path / "run")
    assert ended.returncode == 1
    sentence = (
        r"The first token at fault is token 1 \(id \d+\) of the response of sample \d+ to the"
        r" prompt '.+>': "
    )
    sentence += r"its log-prob is -\d+\.\d+ in training and -\d+\.\d+ in the rollout engine\."
    assert re.search(sentence, ended.stderr), ended.stderr
    assert "the gradient of step 1 is not finite; the step was not made" in ended.stderr


def test_a_finite_loss_of_a_user_is_trained(flags: list[str], tmp_path: Path) -> None:
    path = flags[1].replace("model", "loss.py")
    ended = run_apart([*flags, f"{path}:finite_gradient", "--num-rollout", "1"], tmp_path / "run")
    assert ended.returncode == 0, ended.stderr
