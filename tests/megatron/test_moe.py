"""Training of mixtures of experts in one process: routers, their bias, recomputation, and which layers are used."""

import dataclasses
import gc
import weakref

import pytest
import torch
from safetensors.torch import load_file

from slime_tis.hf_directory import MoeSizes, load_config, moe_sizes
from slime_tis.trainer.megatron.architecture import uses_transformer_engine
from slime_tis.trainer.megatron.engine import TrainingEngine
from slime_tis.trainer.options.megatron import MegatronConfig
from tests.checkpoints import make_checkpoint
from tests.megatron.passes import likelihood
from tests.megatron.test_checkpoint import BATCH

BIAS = "e_score_correction_bias"


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("glm"), "glm4_moe", num_hidden_layers=3)


def build(model, parallel, **options):
    config = MegatronConfig(hf_checkpoint=str(model), lr=1e-2, clip_grad=0.0, **options)
    return TrainingEngine(config, parallel, temperature=1.0, total_steps=10, keep_reference=True)


def test_router_biases_stay_float32_and_constant_in_bfloat16_training(glm, parallel):
    engine, file = build(glm, parallel, bf16=True), load_file(glm / "model.safetensors")
    before = engine.reference_log_probs(BATCH, [[0, 1, 2]])
    for _ in range(2):
        assert engine.train_step(BATCH, [[0, 2], [1]], likelihood).is_finite
    torch.testing.assert_close(engine.reference_log_probs(BATCH, [[0, 1, 2]]), before, rtol=0, atol=0)
    for name, tensor in engine.named_hf_tensors():
        if name.endswith(BIAS):
            assert tensor.dtype == torch.float32 and torch.equal(tensor, file.pop(name))
        else:
            assert tensor.dtype == torch.bfloat16, name
            unchanged = torch.equal(tensor, file.pop(name).bfloat16())
            assert not unchanged or ".experts." in name, name  # so few tokens do not reach every expert
    assert not file


def test_an_unused_engine_is_freed(glm, model, parallel):
    for path in (model, glm):
        engine = build(path, parallel)
        assert engine.train_step(BATCH, [[0, 2], [1]], likelihood).is_finite
        module = weakref.ref(engine.model.module)
        del engine
        gc.collect()
        assert module() is None, path


def test_sizes_are_read_from_the_configuration(glm, tmp_path):
    assert moe_sizes(load_config(glm)) == MoeSizes(
        layers=(1, 2), num_experts=8, top_k=2, intermediate_size=24, shared_intermediate_size=24
    )
    sizes = {"num_hidden_layers": 6, "mlp_only_layers": [1], "decoder_sparse_step": 2}
    assert moe_sizes(load_config(make_checkpoint(tmp_path / "qwen2", "qwen2_moe", **sizes))) == MoeSizes(
        layers=(3, 5), num_experts=8, top_k=2, intermediate_size=24, shared_intermediate_size=40
    )
    assert moe_sizes(load_config(make_checkpoint(tmp_path / "dense", "qwen3"))) is None


def test_transformer_engine_is_used_for_dense_models_only(glm, model, parallel):
    gpu = dataclasses.replace(parallel, backend=dataclasses.replace(parallel.backend, transformer_engine=True))
    assert [uses_transformer_engine(load_config(path), gpu) for path in (model, glm)] == [True, False]
    assert [uses_transformer_engine(load_config(path), parallel) for path in (model, glm)] == [False, False]
