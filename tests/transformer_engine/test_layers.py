"""transformer-engine's real modules, without a GPU: weights, checkpoints, and float32.

The modules ask for a GPU when they are built; `on_cpu` answers for it. Their kernels are not run.
"""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformer_engine.pytorch.attention.dot_product_attention import utils as attention

from slime_tis.trainer.configs.megatron import MegatronConfig
from slime_tis.trainer.megatron.architecture import build_model
from slime_tis.trainer.megatron.hf_weights import load_hf_weights, named_hf_tensors, named_weights
from slime_tis.trainer.megatron.parallel import (
    initialize,
    shut_down,
    trains_with_transformer_engine,
)
from tests.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    """One process whose layers come from transformer-engine, on the CPU."""
    parallel = initialize(MegatronConfig(hf_checkpoint=str(tmp_path_factory.mktemp("none"))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "current_device", lambda: "cpu")
        yield replace(parallel, device=torch.device("cpu"), transformer_engine=True)
    shut_down()


def build(checkpoint, parallel):
    return build_model(
        checkpoint, MegatronConfig(hf_checkpoint=str(checkpoint), bf16=True), parallel
    )


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_loaded_weights_are_exported(family, tied, on_cpu, tmp_path):
    checkpoint = make_checkpoint(tmp_path, family, tie_word_embeddings=tied)
    model = build(checkpoint, on_cpu)
    load_hf_weights(model, checkpoint, on_cpu)
    exported = dict(named_hf_tensors(model, on_cpu))
    expected = load_file(checkpoint / "model.safetensors")
    assert set(exported) == set(expected)
    assert all(torch.equal(tensor, expected[name].bfloat16()) for name, tensor in exported.items())


def test_checkpoints_have_every_weight(on_cpu, tmp_path):
    model = build(make_checkpoint(tmp_path, "qwen3"), on_cpu)
    stored = {entry.key for entry in model.module.sharded_state_dict().values()}
    weights = set()
    for name in named_weights(model.module):
        if ".layers.1." not in name:  # checkpoints stack the layers
            weights.add(name.replace("decoder.layers.0.", "decoder.layers."))
    assert weights <= stored


def test_mixtures_of_experts_have_torch_layers(on_cpu, tmp_path):
    model = build(make_checkpoint(tmp_path, "qwen3_moe"), on_cpu)
    modules = [type(module).__module__ for module in model.module.modules()]
    assert not [name for name in modules if "transformer_engine" in name]


def test_bf16_trains_with_it(on_cpu):
    assert trains_with_transformer_engine(
        MegatronConfig(hf_checkpoint="model", bf16=True), has_gpu=True
    )


@pytest.mark.parametrize(
    ("context_parallel", "has_unfused"), [(False, True), (True, False)], ids=["one rank", "context"]
)
def test_float32_has_only_unfused_attention(context_parallel, has_unfused, on_cpu, monkeypatch):
    """The unfused backend pads packed sequences, and has no context parallelism."""
    monkeypatch.setattr(attention, "get_device_compute_capability", lambda: (9, 0))
    parameters = attention.AttentionParams(
        qkv_dtype=torch.float32,
        max_seqlen_q=64,
        max_seqlen_kv=64,
        context_parallel=context_parallel,
        qkv_layout="thd_thd_thd",
        attn_mask_type="padding_causal",
    )
    has_flash, _, has_fused, _, unfused, _ = attention.get_attention_backend(parameters)
    assert (has_flash, has_fused, bool(unfused)) == (False, False, has_unfused)
