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
from slime_tis.trainer.megatron import sharded_checkpoint
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
    sharded_checkpoint.save(tmp_path, 2, engine, {"run": "a", "step": 2}, retain=2)
    expected = steps(engine, 2)
    resumed = build(model, parallel, **options)
    found = sharded_checkpoint.latest_complete_checkpoint(tmp_path)
    sharded_checkpoint.load(found[0], resumed)
    assert read_state(found[0]) == {"run": "a", "step": 2}
    assert steps(resumed, 2) == expected
    for name, tensor in resumed.named_hf_tensors():
        assert torch.equal(tensor, dict(engine.named_hf_tensors())[name])


def test_an_overflow_of_float16_skips_the_step_and_a_loss_that_is_not_finite_is_none(
    model, parallel
):
    engine = build(model, parallel, fp16=True, initial_loss_scale=2.0**32)
    before = {name: tensor.clone() for name, tensor in engine.named_hf_tensors()}
    results = [engine.train_step(BATCH, [[0, 2], [1]], likelihood) for _ in range(3)]
    assert [result.loss_scale for result in results] == [
        2.0**32,
        2.0**32,
        2.0**31,
    ]  # the second overflow halves it
    assert all(result.overflowed and result.is_finite for result in results)
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.named_hf_tensors())

    def broken(inputs):
        found = likelihood(inputs)
        return dataclasses.replace(found, numerator=found.numerator * torch.nan)

    result = build(model, parallel, fp16=True).train_step(BATCH, [[0, 2], [1]], broken)
    assert not result.overflowed and not result.is_finite


def test_a_checkpoint_of_another_model_is_refused(model, parallel, tmp_path):
    sharded_checkpoint.save(tmp_path / "runs", 1, build(model, parallel), {"run": "a"}, retain=1)
    make_checkpoint(tmp_path / "other", "qwen3", num_hidden_layers=3)
    with pytest.raises(sharded_checkpoint.CheckpointError, match="another model or layout"):
        sharded_checkpoint.load(
            tmp_path / "runs" / "iter_0000001", build(tmp_path / "other", parallel)
        )


@pytest.mark.parametrize("distributed", [False, True])
def test_options_of_the_optimizer_are_those_of_the_resumed_run(
    distributed, model, parallel, tmp_path
):
    engine = build(model, parallel, use_distributed_optimizer=distributed)
    steps(engine, 2)
    sharded_checkpoint.save(tmp_path, 2, engine, {"run": "a"}, retain=1)
    options = {"adam_beta1": 0.5, "adam_beta2": 0.6, "adam_eps": 1e-4, "weight_decay": 0.3}
    config = MegatronConfig(
        hf_checkpoint=str(model),
        lr=1e-2,
        min_lr=2e-3,
        use_distributed_optimizer=distributed,
        **options,
    )
    config = dataclasses.replace(config, lr_decay_style="linear")
    resumed = TrainingEngine(config, parallel, temperature=1.0, total_steps=4)
    sharded_checkpoint.load(tmp_path / "iter_0000002", resumed)
    found = resumed.train_step(BATCH, [[0, 2], [1]], likelihood)
    assert found.learning_rate == pytest.approx(2e-3 + (1e-2 - 2e-3) * (1 - 3 / 4))  # step 3 of 4
    for group in resumed.optimizer.param_groups:
        assert (tuple(group["betas"]), group["eps"]) == ((0.5, 0.6), 1e-4)
        assert group["weight_decay"] == 0.3 * group["wd_mult"]
    states = [
        state
        for part in sharded_checkpoint.torch_adams(resumed.optimizer)
        for state in part.optimizer.state.values()
    ]
    assert {float(state["step"]) for state in states} == {3.0}  # the state is the checkpoint's


@pytest.mark.parametrize("name", ["__cause__", "__context__"])
def test_a_full_disk_is_found_behind_torchs_error(name):
    disk_full = OSError(28, "No space left on device")
    positions_differ, wrapped = RuntimeError("unexpected pos 64 vs 0"), ValueError("cannot write")
    setattr(positions_differ, name, disk_full)
    setattr(wrapped, name, positions_differ)
    assert sharded_checkpoint._os_error(wrapped) is disk_full


def test_no_process_is_forked_to_write(model, parallel, tmp_path, monkeypatch):
    engine = build(model, parallel)

    def no_fork():
        raise AssertionError("a process was forked")

    monkeypatch.setattr(os, "fork", no_fork)
    sharded_checkpoint.save(tmp_path, 1, engine, {"run": "a"}, retain=1)
    assert {path.name for path in (tmp_path / "iter_0000001").iterdir()} == {
        *("__0_0.distcp", "__0_1.distcp", ".metadata", "common.pt", "metadata.json"),
        *("trainer_state.json", "SHA256SUMS"),
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


def test_router_biases_stay_float32_and_constant_in_bfloat16_training(glm, parallel):
    engine, file = build_moe(glm, parallel, bf16=True), load_file(glm / "model.safetensors")
    before = engine.reference_log_probs(BATCH, [[0, 1, 2]])
    for _ in range(2):
        assert engine.train_step(BATCH, [[0, 2], [1]], likelihood).is_finite
    torch.testing.assert_close(
        engine.reference_log_probs(BATCH, [[0, 1, 2]]), before, rtol=0, atol=0
    )
    for name, tensor in engine.named_hf_tensors():
        if name.endswith(BIAS):
            assert tensor.dtype == torch.float32 and torch.equal(tensor, file.pop(name))
        else:
            assert tensor.dtype == torch.bfloat16, name
            unchanged = torch.equal(tensor, file.pop(name).bfloat16())
            assert not unchanged or ".experts." in name, (
                name
            )  # so few tokens do not reach every expert
    assert not file


def test_an_unused_engine_is_freed(glm, model, parallel):
    for path in (model, glm):
        engine = build_moe(path, parallel)
        assert engine.train_step(BATCH, [[0, 2], [1]], likelihood).is_finite
        module = weakref.ref(engine.model.module)
        del engine
        gc.collect()
        assert module() is None, path


def test_sizes_and_layers_follow_the_configuration(glm, tmp_path, model, parallel):
    assert moe_sizes(load_config(glm)) == MoeSizes(
        layers=(1, 2), num_experts=8, top_k=2, intermediate_size=24, shared_intermediate_size=24
    )
    sizes = {"num_hidden_layers": 6, "mlp_only_layers": [1], "decoder_sparse_step": 2}
    assert moe_sizes(
        load_config(make_checkpoint(tmp_path / "qwen2", "qwen2_moe", **sizes))
    ) == MoeSizes(
        layers=(3, 5), num_experts=8, top_k=2, intermediate_size=24, shared_intermediate_size=40
    )
    assert moe_sizes(load_config(make_checkpoint(tmp_path / "dense", "qwen3"))) is None
    gpu = dataclasses.replace(parallel, transformer_engine=True)
    assert [uses_transformer_engine(load_config(path), gpu) for path in (model, glm)] == [
        True,
        False,
    ]
    assert [uses_transformer_engine(load_config(path), parallel) for path in (model, glm)] == [
        False,
        False,
    ]


def test_an_error_without_text_is_named_by_its_type():
    assert sharded_checkpoint._reason(RuntimeError("")) == "RuntimeError"
