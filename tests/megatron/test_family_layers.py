"""Layers that only some families have, and checkpoints of their weights on two ranks."""

import math
from types import SimpleNamespace

import pytest
import torch

from slime_tis.trainer.configs.megatron import MegatronConfig
from slime_tis.trainer.megatron import checkpoint_saving, sharded_checkpoint
from slime_tis.trainer.megatron.batch import make_batch
from slime_tis.trainer.megatron.family_layers import ClampedSwiGLU
from slime_tis.trainer.megatron.layers import attention_with_sinks, neighbors_apart, windowed
from slime_tis.trainer.megatron.training_engine import TrainingEngine
from tests.checkpoints import make_checkpoint, transformers_model
from tests.megatron.passes import likelihood, on_ranks

BATCH = make_batch([[3, 4, 5, 6, 7]], [[1] * 3], [[0.0] * 3], [[0] * 3])
TENSOR_2 = {"tensor_model_parallel_size": 2}


def test_a_window_of_two_keys_in_causal_attention():
    key = torch.zeros(1, 1, 4, 8)
    assert windowed(None, 2, key)[0, 0].int().tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 1, 1, 0],
        [0, 0, 1, 1],
    ]


def test_a_window_ends_at_the_last_key_of_a_query():
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)[None, None]
    key = torch.zeros(1, 1, 4, 8)
    assert windowed(mask, 3, key)[0, 0].int().tolist() == [[1, 1, 0, 0], [0, 1, 1, 1]]


def test_features_of_even_index_come_first():
    features = torch.arange(6)[None]
    assert neighbors_apart(features, 4).tolist() == [[0, 2, 1, 3, 4, 5]]


def build(directory, parallel, layout):
    config = MegatronConfig(hf_checkpoint=str(directory / "model"), lr=1e-3, **layout)
    return TrainingEngine(config, parallel, temperature=1.0, total_steps=10)


def resumes_with_equal_weights(parallel, directory, layout):
    engine = build(directory, parallel, layout)
    engine.train_step(BATCH, [[0]], likelihood)
    checkpoint_saving.save(directory / "save", 1, engine, {"run": "a", "step": 1}, retain=1)
    resumed = build(directory, parallel, layout)
    checkpoint, _ = sharded_checkpoint.latest_complete_checkpoint(directory / "save")
    sharded_checkpoint.load(checkpoint, resumed)
    expected = dict(engine.named_hf_tensors())
    for name, tensor in resumed.named_hf_tensors():
        assert torch.equal(tensor, expected[name]), name


def test_norms_over_all_heads_are_resumed_on_two_ranks(tmp_path):
    make_checkpoint(tmp_path / "model", "olmo2")
    on_ranks(resumes_with_equal_weights, tmp_path, TENSOR_2)


def test_latent_attention_is_resumed_on_two_ranks(tmp_path):
    make_checkpoint(tmp_path / "model", "deepseek_v3")
    layout = TENSOR_2 | {"sequence_parallel": True}
    on_ranks(resumes_with_equal_weights, tmp_path, layout)


def test_sinks_are_resumed_on_two_ranks(tmp_path):
    make_checkpoint(tmp_path / "model", "gpt_oss")
    layout = TENSOR_2 | {"sequence_parallel": True, "expert_tensor_parallel_size": 1}
    on_ranks(resumes_with_equal_weights, tmp_path, layout)


def test_a_sink_takes_its_share_of_the_softmax():
    query = torch.tensor([[[[1.0, 0.0]]]])
    key = torch.tensor([[[[2.0, 0.0], [0.0, 3.0]]]])
    value = torch.tensor([[[[10.0, 0.0], [0.0, 10.0]]]])
    every_key = torch.ones(1, 1, 1, 2, dtype=torch.bool)
    sinks = torch.tensor([1.0])
    output = attention_with_sinks(query, key, value, every_key, sinks, 0.5)
    # logits: sink 1, keys 0.5 * 2 and 0
    total = 2 * math.e + 1
    expected = torch.tensor([10 * math.e / total, 10 / total])
    torch.testing.assert_close(output[0, 0, 0], expected)


def test_the_clamped_activation_of_large_values():
    activation = ClampedSwiGLU(SimpleNamespace(), alpha=1.0, limit=7.0)
    # gate 9 becomes 7, up -9 becomes -7
    expected = 7 / (1 + math.exp(-7)) * (-7 + 1)
    assert activation(torch.tensor([9.0, -9.0])).item() == pytest.approx(expected)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_norms_of_latents_have_the_given_epsilon(family, parallel, tmp_path):
    directory = make_checkpoint(tmp_path / "model", family)
    reference = transformers_model(directory)
    for name, module in reference.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            module.variance_epsilon = 1e-2
    config = MegatronConfig(hf_checkpoint=str(directory), latent_norm_epsilon=1e-2)
    engine = TrainingEngine(config, parallel, temperature=1.0, total_steps=1)
    log_probs = engine.log_probs(BATCH, [[0]])
    with torch.no_grad():
        logits = reference(torch.tensor([[3, 4, 5, 6, 7]])).logits[0].log_softmax(-1)
    expected = torch.stack([logits[1, 5], logits[2, 6], logits[3, 7]])
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=1e-5)
