"""Runs of train.py with --freeze-params-name-list: export, resumption, refusals."""

import pytest
import torch
from safetensors.torch import load_file

from slime_tis.main import train
from tests.runs import run_here, training_metrics

FREEZE = ["--freeze-params-name-list", "embedding", r"layers\.0\."]


def flags_of(parent):
    return [*FREEZE, "--save", str(parent / "save"), "--save-hf", str(parent / "hf")]


@pytest.fixture(scope="module")
def finished(task, tmp_path_factory):
    """The directory of a run of three rollouts, and its metrics."""
    parent = tmp_path_factory.mktemp("frozen")
    return parent, run_here([*task, *flags_of(parent)], parent / "run")


def test_the_export_has_the_frozen_weights(task, finished):
    parent, _ = finished
    model = task[task.index("--hf-checkpoint") + 1]
    before = load_file(f"{model}/model.safetensors")
    after = load_file(parent / "hf" / "model.safetensors")
    frozen = ("model.embed_tokens.", "model.layers.0.")
    equal = {name for name, tensor in after.items() if torch.equal(tensor, before[name])}
    assert equal == {name for name in before if name.startswith(frozen)}
    assert after.keys() == before.keys()


def test_a_resumed_run_equals_the_uninterrupted_one(task, finished, tmp_path):
    _, expected = finished
    flags = [*task, *flags_of(tmp_path)]
    run_here([*flags, "--num-rollout", "2"], tmp_path / "run")
    rows = run_here([*flags, "--load", str(tmp_path / "save")], tmp_path / "run")
    assert list(map(training_metrics, rows)) == list(map(training_metrics, expected))


@pytest.mark.parametrize(
    "other",
    [
        ["--freeze-params-name-list", "embedding"],
        ["--only-train-params-name-list", "embedding"],
        [],
    ],
    ids=["fewer", "only", "none"],
)
def test_a_resumed_run_keeps_the_list(other, task, finished, tmp_path, capsys):
    parent, _ = finished
    save = str(parent / "save")
    flags = [*task, "--load", save, "--save", save, "--output-dir", str(tmp_path / "run")]
    with pytest.raises(SystemExit, match="2"):
        train([*flags, *other])
    message = capsys.readouterr().err
    assert "--freeze-params-name-list is" in message
    assert "the optimizer's state is of other weights" in message


def test_a_pattern_without_a_match_ends_the_run(task, tmp_path, capsys):
    flags = [*task, "--freeze-params-name-list", "wq_b", "--output-dir", str(tmp_path / "run")]
    assert train(flags) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: --freeze-params-name-list has 'wq_b', which is found in no")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
