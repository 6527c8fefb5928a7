"""Runs of train.py with LoRA adapters: rollouts, exports, resumption, refusals."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_tis.main import train
from slime_tis.trainer.learner import Learner
from slime_tis.trainer.megatron import hf_weights
from tests.runs import metrics_of, run_here, training_metrics

KL = ["--use-kl-loss", "--kl-loss-coef", "0.01", "--rollout-precision", "fp32"]
LORA = ["--lora-rank", "4", "--lora-alpha", "8", *KL]


def flags_of(parent):
    return [*LORA, "--save", str(parent / "save"), "--save-hf", str(parent / "hf")]


@pytest.fixture(scope="module")
def finished(task, tmp_path_factory):
    """The directory of a run of three rollouts, and its metrics."""
    parent = tmp_path_factory.mktemp("lora")
    return parent, run_here([*task, *flags_of(parent)], parent / "run")


def checkpoint_of(task):
    return task[task.index("--hf-checkpoint") + 1]


def test_rollouts_are_those_of_the_adapted_model(finished):
    _, rows = finished
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-5 for row in rows)


def test_the_reference_policy_is_the_model_without_adapters(finished):
    _, rows = finished
    divergences = [row["train/kl_loss"] for row in rows]
    assert divergences[0] == 0.0
    assert min(divergences[1:]) > 1e-4


def exported_config(finished):
    parent, _ = finished
    return json.loads((parent / "hf" / "adapter_config.json").read_text())


def test_the_export_names_the_model(task, finished):
    assert exported_config(finished)["base_model_name_or_path"] == checkpoint_of(task)


def test_the_export_has_the_scale(finished):
    config = exported_config(finished)
    assert (config["r"], config["lora_alpha"]) == (4, 8)


def test_a_resumed_run_equals_the_uninterrupted_one(task, finished, tmp_path):
    _, expected = finished
    flags = [*task, *flags_of(tmp_path)]
    run_here([*flags, "--num-rollout", "2"], tmp_path / "run")
    rows = run_here([*flags, "--load", str(tmp_path / "save")], tmp_path / "run")
    assert list(map(training_metrics, rows)) == list(map(training_metrics, expected))


def test_merged_weights_are_exported_with_the_adapter(task, tmp_path):
    flags = [*task, *LORA, "--num-rollout", "1", "--merge-lora", "--save-hf", str(tmp_path / "hf")]
    run_here(flags, tmp_path / "run")
    adapter = load_file(tmp_path / "hf-adapter" / "adapter_model.safetensors")
    layer = "model.layers.1.mlp.down_proj"
    up = adapter[f"base_model.model.{layer}.lora_B.weight"]
    down = adapter[f"base_model.model.{layer}.lora_A.weight"]
    before = load_file(f"{checkpoint_of(task)}/model.safetensors")[f"{layer}.weight"]
    merged = load_file(tmp_path / "hf" / "model.safetensors")[f"{layer}.weight"]
    assert up.any()
    torch.testing.assert_close(merged, before + 2.0 * up @ down)


def test_training_continues_from_an_exported_adapter(task, finished, tmp_path):
    parent, _ = finished
    flags = ["--lora-adapter-path", str(parent / "hf"), *KL]
    rows = run_here([*task, *flags, "--num-rollout", "1"], tmp_path / "run")
    assert rows[0]["train/kl_loss"] > 0
    assert rows[0]["train/train_rollout_logprob_abs_diff"] < 1e-5


def test_the_directory_of_the_adapter_may_vanish_during_the_run(
    task, finished, tmp_path, monkeypatch
):
    parent, _ = finished
    adapter = tmp_path / "adapter"
    shutil.copytree(parent / "hf", adapter)
    train_on_batch = Learner.train

    def train_without_directory(self, *args, **kwargs):
        shutil.rmtree(adapter, ignore_errors=True)
        return train_on_batch(self, *args, **kwargs)

    monkeypatch.setattr(Learner, "train", train_without_directory)
    flags = ["--lora-adapter-path", str(adapter), "--num-rollout", "2"]
    assert len(run_here([*task, *flags], tmp_path / "run")) == 2


def test_two_ranks_equal_one(task, finished, tmp_path):
    _, expected = finished
    flags = [*task, *LORA, "--tensor-model-parallel-size", "2", "--sequence-parallel"]
    rows = metrics_of(flags, tmp_path / "run", ranks=2)
    first = training_metrics(rows[0])
    assert first == pytest.approx(training_metrics(expected[0]), rel=1e-4, abs=1e-4)


CHANGED = {
    "--lora-rank is 8 but was 4 in the run": ["--lora-rank", "8"],
    "--lora-alpha is 16.0": ["--lora-alpha", "16"],
    "--lora-target-modules is ['q_proj']": ["--lora-target-modules", "q_proj"],
}


@pytest.mark.parametrize(("message", "flags"), CHANGED.items(), ids=CHANGED)
def test_a_resumed_run_keeps_its_adapters(message, flags, task, finished, tmp_path, capsys):
    parent, _ = finished
    save = str(parent / "save")
    words = [*task, *LORA, *flags, "--load", save, "--save", save]
    with pytest.raises(SystemExit, match="2"):
        train([*words, "--output-dir", str(tmp_path / "run")])
    assert message in capsys.readouterr().err


def test_a_resumed_run_keeps_training_adapters(task, finished, tmp_path, capsys):
    parent, _ = finished
    words = [*task, *KL, "--load", str(parent / "save"), "--output-dir", str(tmp_path / "run")]
    with pytest.raises(SystemExit, match="2"):
        train(words)
    assert "--lora-rank is unset but was 4 in the run" in capsys.readouterr().err


def test_other_weights_of_the_same_model_are_refused(task, finished, tmp_path, capsys):
    """A checkpoint has no weights but the adapters'; on other weights they mean something else."""
    parent, _ = finished
    model = tmp_path / "model"
    shutil.copytree(checkpoint_of(task), model)
    tensors = load_file(model / "model.safetensors")
    save_file(
        {name: tensor * 1.01 for name, tensor in tensors.items()}, model / "model.safetensors"
    )
    words = [*task, *LORA, "--hf-checkpoint", str(model), "--load", str(parent / "save")]
    assert train([*words, "--output-dir", str(tmp_path / "run")]) == 1
    assert "whose config.json or weights differ" in capsys.readouterr().err


def test_an_engine_without_the_adapter_ends_the_run(task, tmp_path, capsys, monkeypatch):
    """The fault of verl#7413: the rollout engine gets the model's weights without the adapter."""
    monkeypatch.setattr(hf_weights, "adapters_of", lambda module: {})
    assert train([*task, *LORA, "--output-dir", str(tmp_path / "run")]) == 1
    assert "does not apply the LoRA adapter" in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_check_is_logged_after_every_update(finished):
    _, rows = finished
    for row in rows:
        assert row["rollout/adapter_share"] == pytest.approx(1, abs=0.01)
        assert row["rollout/adapter_survival"] == 1.0


def test_merging_into_a_coarse_engine_is_measured(task, tmp_path):
    flags = ["--lora-rank", "4", "--lr", "1e-4", "--rollout-precision", "bf16"]
    rows = run_here([*task, *flags], tmp_path / "run")
    survivals = [row["rollout/adapter_survival"] for row in rows]
    assert all(0.5 < survival < 1.2 for survival in survivals)
    assert survivals[0] != 1.0


UNMERGED = ["--lora-rank", "4", "--rollout-lora", "unmerged", "--check-weight-sync"]


@pytest.fixture(scope="module")
def unmerged(task, tmp_path_factory):
    """The metrics of a run on an int8 engine that applies the adapter beside its weights."""
    return run_here([*task, *UNMERGED], tmp_path_factory.mktemp("unmerged") / "run")


def test_an_unmerged_adapter_survives_completely(unmerged):
    assert [row["rollout/adapter_survival"] for row in unmerged] == [1.0] * 3


def test_rollouts_with_an_unmerged_adapter_apply_it(unmerged):
    for row in unmerged:
        # int8 weights make the share uncertain as long as the adapter is small
        margin = 4 * row["rollout/adapter_share_error"] + 0.05
        assert row["rollout/adapter_share"] == pytest.approx(1, abs=margin)


def test_a_run_with_an_unmerged_adapter_is_resumed(task, unmerged, tmp_path):
    flags = [*task, *UNMERGED, "--save", str(tmp_path / "save")]
    run_here([*flags, "--num-rollout", "2"], tmp_path / "run")
    rows = run_here([*flags, "--load", str(tmp_path / "save")], tmp_path / "run")
    assert list(map(training_metrics, rows)) == list(map(training_metrics, unmerged))


@pytest.mark.parametrize(("before", "after"), [("merged", "unmerged"), ("unmerged", "merged")])
def test_a_resumed_run_may_send_its_adapter_otherwise(before, after, task, tmp_path):
    """The checkpoint has weights of the engine, which was one step behind."""
    flags = [*task, *LORA, "--save", str(tmp_path / "save"), "--update-weights-interval", "2"]
    run_here([*flags, "--num-rollout", "1", "--rollout-lora", before], tmp_path / "run")
    flags += ["--load", str(tmp_path / "save"), "--rollout-lora", after]
    rows = run_here([*flags, "--num-rollout", "2"], tmp_path / "run")
    assert rows[1]["train/train_rollout_logprob_abs_diff"] < 1e-5


def test_a_rank_above_the_size_of_a_matrix_is_a_warning(task, tmp_path, capsys):
    flags = ["--lora-rank", "40", "--lora-target-modules", "q_proj", "--num-rollout", "1"]
    run_here([*task, *flags], tmp_path / "run")
    message = "warning: the LoRA rank 40 is above the smaller side of q_proj (64 × 32); a smaller"
    assert message in capsys.readouterr().err


def test_no_warning_of_a_small_rank(task, tmp_path, capsys):
    run_here([*task, "--lora-rank", "4", "--num-rollout", "1"], tmp_path / "run")
    assert "LoRA rank" not in capsys.readouterr().err
