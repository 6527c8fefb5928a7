"""--rollout-lora unmerged: the local engine applies adapters beside its rounded weights."""

import pytest
import torch

from slime_tis.trainer.engines.local.load_model import load_tokenizer
from slime_tis.trainer.engines.local.local_engine import LocalEngine
from slime_tis.trainer.megatron.lora import without_adapters
from tests.lora.engines import build, make_samples, randomize_adapters
from tests.lora.test_adapter_check import PROBE, check_of


def local_engine(model, precision="fp32"):
    return LocalEngine(model, load_tokenizer(model), precision=precision, lora_scale=2.0)


def log_probs(engine):
    return torch.tensor(next(iter(engine.prompt_log_probs(PROBE).values())))


@pytest.fixture
def adapted(model, parallel):
    """A training engine whose adapters have an effect."""
    engine = build(model, parallel)
    randomize_adapters(engine, scale=0.05)
    return engine


@pytest.mark.parametrize("precision", ["fp32", "int8", "fp8"])
def test_the_adapter_is_in_force_in_every_precision(precision, model, adapted):
    sampler = local_engine(model, precision)
    sampler.update_weights(adapted.named_adapter_tensors, 1)
    metrics = check_of(adapted, sampler)()
    assert metrics["rollout/adapter_share"] == pytest.approx(1, abs=0.1)


def test_log_probs_are_those_of_merged_weights(model, adapted):
    unmerged = local_engine(model)
    unmerged.update_weights(adapted.named_adapter_tensors, 1)
    merged = LocalEngine(model, load_tokenizer(model))
    merged.update_weights(adapted.named_hf_tensors, 1)
    torch.testing.assert_close(log_probs(unmerged), log_probs(merged), rtol=0, atol=2e-5)


def test_new_adapters_leave_the_engine_bitwise_unchanged(model, parallel):
    sampler = local_engine(model, "int8")
    before = log_probs(sampler)
    sampler.update_weights(build(model, parallel).named_adapter_tensors, 1)
    assert torch.equal(log_probs(sampler), before)


def test_adapters_that_merging_rounds_away_have_an_effect(model, parallel):
    engine = build(model, parallel)
    randomize_adapters(engine, scale=2e-4)
    merged = LocalEngine(model, load_tokenizer(model), precision="int4")
    before = log_probs(merged)
    merged.update_weights(engine.named_hf_tensors, 1)
    unmerged = local_engine(model, "int4")
    unmerged.update_weights(engine.named_adapter_tensors, 1)
    samples = make_samples()
    with without_adapters(engine.model.module):
        without = engine.log_probs(samples, [[0, 1, 2, 3]])
    effect = (engine.log_probs(samples, [[0, 1, 2, 3]]) - without).abs().mean()
    moved = (log_probs(unmerged) - before).abs().mean()
    assert 0.3 * effect < moved < 3 * effect


def test_an_adapter_of_another_model_is_refused(model):
    name = "base_model.model.model.layers.9.mlp.up_proj.lora_A.weight"
    with pytest.raises(ValueError, match="no such linear layer"):
        local_engine(model).update_weights(lambda: [(name, torch.zeros(4, 32))], 1)


LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
# tensors of the layer, and the message
SHAPES = {
    "A of another input": ({"A": (4, 8)}, r"has the shape \[4, 8\], .* needs \[rank, 32\]"),
    "B of another output": ({"B": (8, 4)}, r"has the shape \[8, 4\], .* needs \[64, rank\]"),
    "another rank than A": ({"A": (4, 32), "B": (64, 8)}, r"needs \[64, 4\]"),
    "another rank than B": ({"B": (64, 8), "A": (4, 32)}, r"needs \[8, 32\]"),
    "a vector": ({"A": (32,)}, r"has the shape \[32\], .* needs \[rank, 32\]"),
}


@pytest.mark.parametrize(("shapes", "message"), SHAPES.values(), ids=SHAPES)
def test_tensors_of_another_shape_are_refused(shapes, message, model):
    tensors = []
    for matrix, shape in shapes.items():
        tensors.append((f"{LAYER}.lora_{matrix}.weight", torch.zeros(shape)))
    with pytest.raises(ValueError, match=message):
        local_engine(model).update_weights(lambda: tensors, 1)


def test_saved_adapters_are_restored(model, adapted, tmp_path):
    sampler = local_engine(model, "int8")
    sampler.update_weights(adapted.named_adapter_tensors, 1)
    sampler.save_weights(tmp_path)
    restored = local_engine(model, "int8")
    restored.load_weights(tmp_path, 1)
    assert torch.equal(log_probs(restored), log_probs(sampler))
