"""The experts that the local engine records, against forward passes of transformers without a cache."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from slime_tis.rollout.checkpoint import load_tokenizer
from slime_tis.rollout.local import LocalEngine
from slime_tis.rollout.routing import expert_dtype
from slime_tis.rollout.sample import Prompt, Sampling
from tests.checkpoints import make_checkpoint

EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
SIZES = {
    "qwen3_moe": EXPERTS | {"num_experts": 8, "norm_topk_prob": True, "num_hidden_layers": 3},
    "qwen2_moe": EXPERTS | {"num_experts": 8, "norm_topk_prob": False, "shared_expert_intermediate_size": 40},
    "mixed": EXPERTS | {"num_experts": 8, "mlp_only_layers": [1], "num_hidden_layers": 3},
    "glm4_moe": EXPERTS
    | {
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.7,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 3,
    },
}
LAYERS = {"qwen3_moe": [0, 1, 2], "qwen2_moe": [0, 1], "mixed": [0, 2], "glm4_moe": [1, 2]}
TEXTS = ["31415>", "7>", "abc def + 12>"]  # of different lengths, so that the batch is padded on the left


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, request):
    family = "qwen3_moe" if request.param == "mixed" else request.param
    path = tmp_path_factory.mktemp("moe") / request.param
    return request.param, make_checkpoint(path, family, **SIZES[request.param])


def generate(path, **options):
    tokenizer = load_tokenizer(path)
    prompts = [
        Prompt(index=i, text=text, token_ids=tuple(tokenizer(text)["input_ids"])) for i, text in enumerate(TEXTS)
    ]
    sampling = Sampling(max_response_len=12, n_samples=3, stop_token_ids=tuple(range(3, 12)), **options)
    return [sample for group in LocalEngine(path, tokenizer).generate(prompts, sampling, seed=1) for sample in group]


def routing_of(model, layers, token_ids):
    """([tokens, layers, k] experts, weights) that the model's routers return for a whole sequence."""
    found = []
    routers = [model.model.layers[layer].mlp.gate for layer in layers]
    hooks = [gate.register_forward_hook(lambda module, args, output: found.append(output[1:])) for gate in routers]
    with torch.no_grad():
        model(input_ids=torch.tensor([token_ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    weights, experts = zip(*found, strict=True)
    return torch.stack(experts, 1), torch.stack(weights, 1)


@pytest.mark.parametrize("checkpoint", LAYERS, indirect=True)
def test_rows_are_the_experts_of_every_token_but_the_last(checkpoint):
    name, path = checkpoint
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, experts_implementation="eager").eval()
    samples = generate(path, return_routed_experts=True, return_routing_weights=True)
    assert len({len(sample.response_ids) for sample in samples}) > 1  # some are dropped from the batch before others
    for sample in samples:
        experts, weights = routing_of(model, LAYERS[name], sample.token_ids)
        assert sample.routed_experts is not None and sample.routed_experts.dtype == torch.uint8
        # transformers leaves the order of GLM's experts open
        rows, order = (
            sample.routed_experts.long().sort(-1) if name == "glm4_moe" else (sample.routed_experts.long(), None)
        )
        expected, expected_order = experts[:-1].sort(-1) if name == "glm4_moe" else (experts[:-1], None)
        assert torch.equal(rows, expected)
        assert sample.routing_weights is not None
        found, wanted = sample.routing_weights, weights[:-1]
        if order is not None and expected_order is not None:
            found, wanted = found.gather(-1, order), wanted.gather(-1, expected_order)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        assert sample.rollout_routed_experts is sample.routed_experts


@pytest.mark.parametrize("checkpoint", ["qwen3_moe"], indirect=True)
def test_only_what_is_asked_for_is_recorded_and_samples_are_the_same(checkpoint):
    _, path = checkpoint
    without, ids = generate(path), generate(path, return_routed_experts=True)
    assert [sample.response_ids for sample in without] == [sample.response_ids for sample in ids]
    assert all(sample.routed_experts is None and sample.routing_weights is None for sample in without)
    assert all(sample.routed_experts is not None and sample.routing_weights is None for sample in ids)


@pytest.mark.parametrize("checkpoint", ["qwen3_moe"], indirect=True)
def test_a_rows_memory_is_its_own(checkpoint):
    _, path = checkpoint
    for sample in generate(path, return_routed_experts=True):
        assert sample.routed_experts.untyped_storage().nbytes() == sample.routed_experts.numel()


def test_a_dense_model_has_no_experts_to_record(tmp_path):
    path = make_checkpoint(tmp_path / "dense", "qwen3")
    with pytest.raises(ValueError, match="routed experts were asked of a Qwen3ForCausalLM, which has no experts"):
        generate(path, return_routed_experts=True)


@pytest.mark.parametrize(("experts", "dtype"), [(8, torch.uint8), (256, torch.uint8), (257, torch.int16)])
def test_the_smallest_type_that_holds_the_numbers(experts, dtype):
    assert expert_dtype(experts) is dtype
