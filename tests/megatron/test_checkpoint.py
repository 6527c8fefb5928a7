"""Checkpoints of dense models and of mixtures of experts."""

import dataclasses
import gc
import os
import subprocess
import weakref

import pytest
import torch
from safetensors.torch import load_file

from slime_tis.hf_directory import MoeSizes, load_config, moe_sizes
from slime_tis.trainer.configs.megatron import MegatronConfig
from slime_tis.trainer.megatron import checkpoint_saving, sharded_checkpoint
from slime_tis.trainer.megatron.architecture import uses_transformer_engine
from slime_tis.trainer.megatron.batch import make_batch
from slime_tis.trainer.megatron.training_engine import TrainingEngine
from slime_tis.trainer.storage.checkpoint_files import read_state
from tests.checkpoints import make_checkpoint
from tests.megatron.passes import likelihood

TOKENS = [[3, 4, 5, 6, 7], [8, 9, 10], [11, 12, 13, 14]]
MASKS = [[1] * 3, [1] * 2, [1] * 2]
BATCH = make_batch(TOKENS, MASKS, [[0.0] * 3, [0.0] * 2, [0.0] * 2], [[0] * 3, [0] * 2, [0] * 2])


def steps(engine, count):
    return [engine.train_step(BATCH, [[0, 2], [1]], likelihood).grad_norm for _ in range(count)]


def build(model, parallel, **options):
    config = MegatronConfig(hf_checkpoint=str(model), lr=1e-3, lr_decay_style="linear", **options)
    return TrainingEngine(config, parallel, temperature=1.0, total_steps=10)


FP16 = {"fp16": True, "initial_loss_scale": 1024.0}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_distributed_optimizer": True},
        {"bf16": True},
        FP16,
        {**FP16, "use_distributed_optimizer": True},
    ],
    ids=str,
)
def test_resumption_is_bitwise(options, model, parallel, tmp_path):
    engine = build(model, parallel, **options)
    steps(engine, 2)
    checkpoint_saving.save(tmp_path, 2, engine, {"run": "a", "step": 2}, retain=2)
    expected = steps(engine, 2)
    resumed = build(model, parallel, **options)
    checkpoint, _ = sharded_checkpoint.latest_complete_checkpoint(tmp_path)
    sharded_checkpoint.load(checkpoint, resumed)
    assert read_state(checkpoint) == {"run": "a", "step": 2}
    assert steps(resumed, 2) == expected
    for name, tensor in resumed.named_hf_tensors():
        assert torch.equal(tensor, dict(engine.named_hf_tensors())[name])


def test_an_overflow_of_float16_lowers_the_loss_scale(model, parallel):
    engine = build(model, parallel, fp16=True, initial_loss_scale=2.0**32)
    results = [engine.train_step(BATCH, [[0, 2], [1]], likelihood) for _ in range(3)]
    # the second overflow halves it
    assert [result.loss_scale for result in results] == [2.0**32, 2.0**32, 2.0**31]
    assert all(result.overflowed and result.is_finite for result in results)


def test_an_overflow_of_float16_leaves_the_weights(model, parallel):
    engine = build(model, parallel, fp16=True, initial_loss_scale=2.0**32)
    before = {name: tensor.clone() for name, tensor in engine.named_hf_tensors()}
    assert engine.train_step(BATCH, [[0, 2], [1]], likelihood).overflowed
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.named_hf_tensors())


def test_a_loss_that_is_not_finite_is_no_overflow(model, parallel):
    def broken(inputs):
        outputs = likelihood(inputs)
        return dataclasses.replace(outputs, numerator=outputs.numerator * torch.nan)

    result = build(model, parallel, fp16=True).train_step(BATCH, [[0, 2], [1]], broken)
    assert not result.overflowed
    assert not result.is_finite


def test_a_checkpoint_of_another_model_is_refused(model, parallel, tmp_path):
    checkpoint_saving.save(tmp_path / "runs", 1, build(model, parallel), {"run": "a"}, retain=1)
    make_checkpoint(tmp_path / "other", "qwen3", num_hidden_layers=3)
    with pytest.raises(sharded_checkpoint.CheckpointError, match="another model or layout"):
        sharded_checkpoint.load(
            tmp_path / "runs" / "iter_0000001", build(tmp_path / "other", parallel)
        )


@pytest.fixture(params=[False, True], ids=["each rank", "distributed optimizer"])
def other_options(request, model, parallel, tmp_path):
    """A run resumed after two steps, with other options of the optimizer."""
    engine = build(model, parallel, use_distributed_optimizer=request.param)
    steps(engine, 2)
    checkpoint_saving.save(tmp_path, 2, engine, {"run": "a"}, retain=1)
    config = MegatronConfig(
        hf_checkpoint=str(model),
        lr=1e-2,
        min_lr=2e-3,
        lr_decay_style="linear",
        use_distributed_optimizer=request.param,
        adam_beta1=0.5,
        adam_beta2=0.6,
        adam_eps=1e-4,
        weight_decay=0.3,
    )
    resumed = TrainingEngine(config, parallel, temperature=1.0, total_steps=4)
    sharded_checkpoint.load(tmp_path / "iter_0000002", resumed)
    return resumed


def test_options_of_the_optimizer_are_those_of_the_resumed_run(other_options):
    result = other_options.train_step(BATCH, [[0, 2], [1]], likelihood)
    assert result.learning_rate == pytest.approx(2e-3 + (1e-2 - 2e-3) * (1 - 3 / 4))  # step 3 of 4
    for group in other_options.optimizer.param_groups:
        assert (tuple(group["betas"]), group["eps"]) == ((0.5, 0.6), 1e-4)
        assert group["weight_decay"] == 0.3 * group["wd_mult"]


def test_the_state_of_the_optimizer_is_that_of_the_checkpoint(other_options):
    other_options.train_step(BATCH, [[0, 2], [1]], likelihood)
    step_counts = set()
    for wrapper in sharded_checkpoint.torch_adams(other_options.optimizer):
        step_counts |= {float(state["step"]) for state in wrapper.optimizer.state.values()}
    assert step_counts == {3.0}


@pytest.mark.parametrize("name", ["__cause__", "__context__"])
def test_a_full_disk_is_found_behind_torchs_error(name):
    disk_full = OSError(28, "No space left on device")
    positions_differ, wrapped = RuntimeError("unexpected pos 64 vs 0"), ValueError("cannot write")
    setattr(positions_differ, name, disk_full)
    setattr(wrapped, name, positions_differ)
    assert checkpoint_saving._os_error(wrapped) is disk_full


def test_no_process_is_forked_to_write(model, parallel, tmp_path, monkeypatch):
    engine = build(model, parallel)

    def no_fork():
        raise AssertionError("a process was forked")

    monkeypatch.setattr(os, "fork", no_fork)
    checkpoint_saving.save(tmp_path, 1, engine, {"run": "a"}, retain=1)
    assert {path.name for path in (tmp_path / "iter_0000001").iterdir()} == {
        "__0_0.distcp",
        "__0_1.distcp",
        ".metadata",
        "common.pt",
        "metadata.json",
        "trainer_state.json",
        "SHA256SUMS",
    }
    subprocess.run(
        ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"],
        cwd=tmp_path / "iter_0000001",
        check=True,
    )


BIAS = "e_score_correction_bias"


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("glm"), "glm4_moe", num_hidden_layers=3)


def build_moe(model, parallel, **options):
    config = MegatronConfig(hf_checkpoint=str(model), lr=1e-2, clip_grad=0.0, **options)
    return TrainingEngine(config, parallel, temperature=1.0, total_steps=10, keep_reference=True)


@pytest.fixture(scope="module")
def trained_glm(glm, parallel):
    """A mixture of experts after two steps in bfloat16."""
    engine = build_moe(glm, parallel, bf16=True)
    for _ in range(2):
        assert engine.train_step(BATCH, [[0, 2], [1]], likelihood).is_finite
    return engine


def test_the_reference_policy_does_not_train(glm, parallel, trained_glm):
    untrained = build_moe(glm, parallel, bf16=True).reference_log_probs(BATCH, [[0, 1, 2]])
    reference = trained_glm.reference_log_probs(BATCH, [[0, 1, 2]])
    torch.testing.assert_close(reference, untrained, rtol=0, atol=0)


def test_router_biases_stay_constant_in_float32(glm, trained_glm):
    file = load_file(glm / "model.safetensors")
    tensors = dict(trained_glm.named_hf_tensors())
    assert tensors.keys() == file.keys()
    biases = [name for name in tensors if name.endswith(BIAS)]
    assert len(biases) == 2
    for name in biases:
        assert tensors[name].dtype == torch.float32
        assert torch.equal(tensors[name], file[name])


def test_other_weights_train_in_bfloat16(glm, trained_glm):
    file = load_file(glm / "model.safetensors")
    for name, tensor in trained_glm.named_hf_tensors():
        if name.endswith(BIAS):
            continue
        assert tensor.dtype == torch.bfloat16, name
        is_unchanged = torch.equal(tensor, file[name].bfloat16())
        # so few tokens do not reach every expert
        assert not is_unchanged or ".experts." in name, name


@pytest.mark.parametrize("checkpoint", ["model", "glm"])
def test_an_unused_engine_is_freed(checkpoint, request, parallel):
    engine = build_moe(request.getfixturevalue(checkpoint), parallel)
    assert engine.train_step(BATCH, [[0, 2], [1]], likelihood).is_finite
    module = weakref.ref(engine.model.module)
    del engine
    gc.collect()
    assert module() is None


def test_sizes_of_experts_of_glm(glm):
    assert moe_sizes(load_config(glm)) == MoeSizes(
        layers=(1, 2), num_experts=8, top_k=2, intermediate_size=24, shared_intermediate_size=24
    )


def test_sizes_of_experts_of_qwen(tmp_path):
    sizes = {"num_hidden_layers": 6, "mlp_only_layers": [1], "decoder_sparse_step": 2}
    checkpoint = make_checkpoint(tmp_path, "qwen2_moe", **sizes)
    assert moe_sizes(load_config(checkpoint)) == MoeSizes(
        layers=(3, 5), num_experts=8, top_k=2, intermediate_size=24, shared_intermediate_size=40
    )


def test_a_dense_model_has_no_sizes_of_experts(tmp_path):
    assert moe_sizes(load_config(make_checkpoint(tmp_path, "qwen3"))) is None


@pytest.mark.parametrize(
    ("checkpoint", "has_engine", "expected"),
    [
        pytest.param("model", True, True, id="dense model"),
        pytest.param("glm", True, False, id="experts"),
        pytest.param("model", False, False, id="dense model without transformer-engine"),
        pytest.param("glm", False, False, id="experts without transformer-engine"),
    ],
)
def test_only_dense_models_use_transformer_engine(
    checkpoint, has_engine, expected, request, parallel
):
    config = load_config(request.getfixturevalue(checkpoint))
    machine = dataclasses.replace(parallel, transformer_engine=has_engine)
    options = MegatronConfig(hf_checkpoint="none")
    assert uses_transformer_engine(config, machine, options) is expected


def test_an_error_without_text_is_named_by_its_type():
    assert sharded_checkpoint.reason(RuntimeError("")) == "RuntimeError"
