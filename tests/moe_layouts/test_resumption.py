"""Runs with experts on two ranks resume from a checkpoint, and the rollout engine gets their weights."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.moe_layouts.test_layouts import make_moe_task
from tests.runs import metrics_of, run_apart, training_metrics

EXPERTS_2 = ["--expert-model-parallel-size", "2"]


@pytest.mark.parametrize("optimizer", [[], ["--use-distributed-optimizer"]], ids=["whole", "distributed optimizer"])
def test_a_run_resumes_from_a_checkpoint(optimizer, tmp_path):
    flags = [*make_moe_task(tmp_path, "glm4_moe"), "--rollout-precision", "fp32", "--check-weight-sync"]
    flags += [*EXPERTS_2, *optimizer, "--weight-sync-bound", "1e-4"]
    whole = metrics_of([*flags, "--save-hf", str(tmp_path / "whole_hf")], tmp_path / "whole", 2)
    saved = ["--save", str(tmp_path / "checkpoints")]
    metrics_of([*flags, *saved, "--num-rollout", "2"], tmp_path / "first", 2)
    resumed = [*saved, "--load", str(tmp_path / "checkpoints"), "--save-hf", str(tmp_path / "resumed_hf")]
    (row,) = metrics_of([*flags, *resumed], tmp_path / "second", 2)
    assert training_metrics(row) == pytest.approx(training_metrics(whole[2]), rel=1e-5)
    weights = load_file(tmp_path / "whole_hf" / "model.safetensors")
    for name, weight in load_file(tmp_path / "resumed_hf" / "model.safetensors").items():
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=1e-6, msg=name)
    start = load_file(tmp_path / "model" / "model.safetensors")
    changed = {name for name, weight in weights.items() if not torch.equal(weight, start[name])}
    assert weights.keys() - changed == {name for name in weights if name.endswith("e_score_correction_bias")}
    AutoModelForCausalLM.from_pretrained(tmp_path / "resumed_hf")
    for size, ranks in (("1", 1), ("4", 4)):  # the optimizer's state of the experts has another form
        other = run_apart([*flags, *resumed, "--expert-model-parallel-size", size], tmp_path / f"by_{size}", ranks)
        assert other.returncode == 2, other.stderr
        assert f"--expert-model-parallel-size is {size} but the run that --load resumes has 2" in other.stderr
        assert not (tmp_path / f"by_{size}" / "metrics.jsonl").exists()
