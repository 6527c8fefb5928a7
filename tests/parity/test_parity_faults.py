"""Faults in a tiny model, which `slime-tis parity` must find at their place."""

import copy
import math

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from slime_tis.hf_model import load_causal_lm
from slime_tis.parity.comparison import compare
from slime_tis.parity.executions import Side
from slime_tis.parity.parity_text import sentence
from slime_tis.parity.recording import Operation
from slime_tis.parity.samples import joined, random_prompts
from slime_tis.parity.transformers_executions import execution
from tests.checkpoints import VOCAB_SIZE, make_checkpoint

ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
PROMPTS = random_prompts(2, 6, VOCAB_SIZE, seed=0)
RESPONSES = random_prompts(2, 5, VOCAB_SIZE, seed=1)
SAMPLES = joined(PROMPTS, RESPONSES)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: make_checkpoint(root / family, family) for family in ARCHITECTURES}


@pytest.fixture
def model_of(checkpoints):
    """Loads a family's model; each call returns another copy."""

    def load(family="qwen3", dtype=torch.float32):
        return load_causal_lm(checkpoints[family], dtype, architecture=ARCHITECTURES[family])

    return load


def execute(model, name="full"):
    return execution(model, Side(execution=name, checkpoint="", chunk_size=4))


def compared(reference, other, name="full"):
    """Compares one pass of a model with an execution of another model."""
    expected = execute(reference)(SAMPLES)
    record = execute(other, name)
    return compare(expected, record(SAMPLES), record(SAMPLES, expected), SAMPLES)


def other_rope_theta(model):
    config = copy.deepcopy(model.config)
    config.rope_parameters["rope_theta"] *= 2
    rotary = Qwen3RotaryEmbedding(config)

    def rotate_otherwise(_, args, kwargs):
        positions = torch.arange(kwargs["hidden_states"].shape[1])[None]
        angles = rotary(kwargs["hidden_states"], positions)
        return args, {**kwargs, "position_embeddings": angles}

    model.model.layers[1].self_attn.register_forward_pre_hook(rotate_otherwise, with_kwargs=True)


def one_ulp_in_a_weight(model):
    weight = model.model.layers[1].mlp.up_proj.weight
    largest = weight.abs().argmax()
    flat = weight.data.view(-1)
    # A smaller weight's last bit can be lost in the rounding of the sums.
    flat[largest] = torch.nextafter(flat[largest], torch.tensor(torch.inf))


def other_epsilon(model):
    model.model.layers[1].post_attention_layernorm.variance_epsilon = 1e-3


def other_attention_scale(model):
    model.model.layers[0].self_attn.scaling *= 1.01


def other_query_norm(model):
    model.model.layers[1].self_attn.q_norm.weight.data *= 1.1


def transposed_heads(model):
    def transpose(_, args):
        heads = args[0].unflatten(-1, (4, 16))
        return (heads.transpose(-1, -2).flatten(-2),)

    model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(transpose)


def bf16_in_an_mlp(model):
    def cast(_, __, output):
        return output.bfloat16().float()

    model.model.layers[0].mlp.gate_proj.register_forward_hook(cast)


def other_router(model):
    model.model.layers[1].mlp.gate.weight.data[0] *= 2


FAULTS = {
    "rope theta of one layer": ("qwen3", other_rope_theta, "query rope of layer 1"),
    "one ulp in a weight": ("qwen3", one_ulp_in_a_weight, "up projection of layer 1"),
    "epsilon of a norm": ("qwen3", other_epsilon, "norm before MLP of layer 1"),
    "scale of attention": ("qwen3", other_attention_scale, "attention of layer 0"),
    "query norm": ("qwen3", other_query_norm, "query norm of layer 1"),
    "transposed heads": ("qwen3", transposed_heads, "attention of layer 1"),
    "bf16 in one MLP": ("qwen3", bf16_in_an_mlp, "gate projection of layer 0"),
    "router": ("qwen3_moe", other_router, "router logits of layer 1"),
}


@pytest.mark.parametrize(("family", "fault", "place"), FAULTS.values(), ids=[*FAULTS])
def test_first_operation_is_the_fault(model_of, family, fault, place):
    model = model_of(family)
    fault(model)
    comparison = compared(model_of(family), model)
    assert str(comparison.first.operation) == place
    assert not comparison.first.own.is_equal


def test_a_fault_is_not_called_rounding(model_of):
    model = model_of()
    other_query_norm(model)
    assert "Rounding" not in sentence(compared(model_of(), model))


def test_nothing_is_said_about_own_differences_that_were_not_measured(model_of):
    model = model_of()
    other_query_norm(model)
    comparison = compare(execute(model_of())(SAMPLES), execute(model)(SAMPLES), None, SAMPLES)
    assert sentence(comparison).endswith("No recorded operation before it differs.")


def test_later_operations_inherit_the_difference(model_of):
    model = model_of()
    other_attention_scale(model)
    comparison = compared(model_of(), model)
    own = [row.operation for row in comparison.operations if not row.own.is_equal]
    assert own == [Operation("attention", 0)]
    assert not comparison.operations[-1].difference.is_equal


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_equal_models_are_equal_bit_by_bit(model_of, family):
    comparison = compared(model_of(family), model_of(family))
    assert comparison.is_equal
    assert sentence(comparison).startswith(
        "full and full are equal bit by bit in fp32: 14 log-probs"
    )


@pytest.mark.parametrize("name", ["decode", "batch", "chunks"])
def test_executions_of_one_model_agree_up_to_rounding(model_of, name):
    model = model_of()
    comparison = compared(model, model, name)
    assert comparison.log_probs.tokens == SAMPLES.total - 2
    assert comparison.log_probs.mean < 1e-5
    assert len(comparison.operations) == 3 + 2 * 17


def test_large_error_is_named_besides_rounding(model_of):
    model = model_of(dtype=torch.bfloat16)
    faulty = model_of(dtype=torch.bfloat16)
    faulty.model.layers[1].mlp.down_proj.weight.data *= 1.5
    comparison = compared(model, faulty, "decode")
    assert comparison.later_fault.operation == Operation("down projection", 1)
    assert "The largest own difference is that of down projection of layer 1" in sentence(
        comparison
    )


def test_nan_is_named(model_of):
    model = model_of()
    model.model.layers[1].mlp.down_proj.weight.data[3, 5] = math.nan
    comparison = compared(model_of(), model)
    assert sentence(comparison).startswith("down projection of layer 1: full and full differ")
    assert f"NaN in {SAMPLES.total} values" in sentence(comparison)


def test_nan_on_both_sides_is_a_difference(model_of):
    model = model_of()
    model.model.layers[0].input_layernorm.weight.data[0] = math.nan
    comparison = compared(model, model)
    assert comparison.first.operation == Operation("norm before attention", 0)
    assert comparison.log_probs.difference.nan == comparison.log_probs.tokens


def test_first_token_that_differs_is_named(model_of):
    model = model_of()
    token = SAMPLES.tokens[1][3]
    model.model.embed_tokens.weight.data[token, 0] += 1
    comparison = compared(model_of(), model)
    first = comparison.first
    assert first.operation == Operation("embedding")
    sample, position = SAMPLES.position_of(first.difference.token)
    assert SAMPLES.tokens[sample][position] == token
