"""Mixtures of experts in the in-process engine: recorded routing, and weights by the names of the file."""

import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from slime_tis.hf_directory import MoeSizes
from slime_tis.trainer.data.sample import Prompt, Sampling
from slime_tis.trainer.engines.local.load_model import (
    linear_weight_names,
    load_model,
    load_tokenizer,
    weights_by_file_name,
)
from slime_tis.trainer.engines.local.local_engine import LocalEngine
from slime_tis.trainer.engines.local.routing import has_usable_experts, has_usable_weights
from slime_tis.trainer.engines.weight_rounding import round_fp8, round_int8
from tests.checkpoints import make_checkpoint
from tests.rollout.conftest import make_prompts
from tests.samples import flat, make_sample

GROUPS = {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.7, "first_k_dense_replace": 1}
SIZES = {
    "qwen3_moe": {"num_hidden_layers": 3},
    "qwen2_moe": {"norm_topk_prob": False},
    "mixed": {"norm_topk_prob": False, "mlp_only_layers": [1], "num_hidden_layers": 3},
    "glm4_moe": {**GROUPS, "num_hidden_layers": 3},
}
LAYERS = {"qwen3_moe": [0, 1, 2], "qwen2_moe": [0, 1], "mixed": [0, 2], "glm4_moe": [1, 2]}
TEXTS = [
    "31415>",
    "7>",
    "abc def + 12>",
]  # of different lengths, so that the batch is padded on the left


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, request):
    family = "qwen3_moe" if request.param == "mixed" else request.param
    path = tmp_path_factory.mktemp("moe") / request.param
    return request.param, make_checkpoint(path, family, **SIZES[request.param])


def generate(path, **options):
    sampling = Sampling(
        max_response_len=12, n_samples=3, stop_token_ids=tuple(range(3, 12)), **options
    )
    return flat(
        LocalEngine(path, load_tokenizer(path)).generate(
            make_prompts(path, TEXTS), sampling, seed=1
        )
    )


def routing_of(model, layers, token_ids):
    """([tokens, layers, k] experts, weights) that the model's routers return for a whole sequence."""
    found = []
    routers = [model.model.layers[layer].mlp.gate for layer in layers]
    hooks = [
        gate.register_forward_hook(lambda module, args, output: found.append(output[1:]))
        for gate in routers
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor([token_ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    weights, experts = zip(*found, strict=True)
    return torch.stack(experts, 1), torch.stack(weights, 1)


@pytest.mark.parametrize("checkpoint", LAYERS, indirect=True)
def test_rows_are_the_experts_of_every_token_but_the_last(checkpoint):
    name, path = checkpoint
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    samples = generate(path, return_routed_experts=True, return_routing_weights=True)
    assert (
        len({len(sample.response_ids) for sample in samples}) > 1
    )  # some are dropped from the batch before others
    for sample in samples:
        experts, weights = routing_of(model, LAYERS[name], sample.tokens)
        assert (
            sample.rollout_routed_experts is not None
            and sample.rollout_routed_experts.dtype == torch.uint8
        )
        rows, order = sample.rollout_routed_experts.long().sort(
            -1
        )  # transformers leaves the order of GLM's open
        expected, expected_order = experts[:-1].sort(-1)
        assert torch.equal(rows, expected)
        found, wanted = (
            sample.rollout_routing_weights.gather(-1, order),
            weights[:-1].gather(-1, expected_order),
        )
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("checkpoint", ["qwen3_moe"], indirect=True)
def test_only_what_is_asked_for_is_recorded_and_samples_are_the_same(checkpoint):
    _, path = checkpoint
    without, ids = generate(path), generate(path, return_routed_experts=True)
    assert [sample.response_ids for sample in without] == [sample.response_ids for sample in ids]
    assert all(
        sample.rollout_routed_experts is None and sample.rollout_routing_weights is None
        for sample in without
    )
    assert all(
        sample.rollout_routed_experts is not None and sample.rollout_routing_weights is None
        for sample in ids
    )


GOOD = torch.tensor([[[0, 1], [2, 3]], [[7, 6], [0, 1]], [[5, 0], [1, 0]]], dtype=torch.uint8)


def sample_with(experts, weights=None):
    prompt = Prompt(index=0, text="1>", token_ids=(1, 5))
    return make_sample(
        prompt, [4, 2], rollout_routed_experts=experts, rollout_routing_weights=weights
    )


def sizes(top_k=2, experts=8):
    return MoeSizes(
        layers=(0, 1),
        num_experts=experts,
        top_k=top_k,
        intermediate_size=4,
        shared_intermediate_size=None,
    )


def changed(index, value):
    found = GOOD.clone()
    found[index] = torch.tensor(value, dtype=torch.uint8)
    return found


def test_experts_and_weights_that_belong_together_are_usable():
    for experts in (GOOD, GOOD.short(), GOOD.int()):
        assert has_usable_experts(sample_with(experts), sizes())
    for experts in (
        GOOD[..., :1],
        torch.zeros_like(GOOD[..., :1]),
    ):  # all tokens may have the same first expert
        assert has_usable_experts(sample_with(experts), sizes(top_k=1))
    assert has_usable_weights(sample_with(GOOD, torch.full(GOOD.shape, 0.5)))
    for wrong in (None, torch.full(GOOD.shape, torch.nan), torch.full(GOOD.shape, -0.5)):
        assert not has_usable_weights(sample_with(GOOD, wrong))


UNUSABLE = {
    "none": None,
    "a row too few": GOOD[:-1],
    "a layer too few": GOOD[:, :1],
    "an unknown expert": changed((0, 0, 0), 8),
    "an expert twice": changed((2, 1), [3, 3]),
    "negative": -GOOD.short() - 1,
    "floats": GOOD.float(),
}


@pytest.mark.parametrize("experts", UNUSABLE.values(), ids=UNUSABLE)
def test_experts_that_cannot_be_replayed_are_not_usable(experts):
    assert not has_usable_experts(sample_with(experts), sizes())


def test_a_router_alone_is_rounded(tmp_path):
    path = make_checkpoint(tmp_path / "moe", "qwen3_moe")
    tokenizer = load_tokenizer(path)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    engine = LocalEngine(path, tokenizer, router_bits=3)
    engine.update_weights(lambda: load_file(path / "model.safetensors").items(), version=1)
    engine.save_weights(tmp_path)
    found = load_file(tmp_path / "rollout_weights.safetensors")
    for name, weight in reference.named_parameters():
        if name.endswith("mlp.gate.weight"):
            scale = weight.abs().amax(-1, keepdim=True) / 3
            levels = found[name] / scale
            torch.testing.assert_close(levels, levels.round(), rtol=0, atol=1e-5)
            assert float((found[name] - weight).abs().max()) <= float(scale.max()) / 2 + 1e-6
            assert int(levels.round().unique().numel()) == 7
        else:
            assert torch.equal(found[name], weight)


FAMILIES = ("qwen3_moe", "qwen2_moe", "glm4_moe")
TOKENS = [1, 3, 14, 15, 9, 26, 5, 35, 8]
THREE_LAYERS = {"num_hidden_layers": 3}


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    root = tmp_path_factory.mktemp(request.param)
    return [
        make_checkpoint(root / str(seed), request.param, seed=seed, **THREE_LAYERS)
        for seed in range(2)
    ]


def tensors_of(path):
    return load_file(path / "model.safetensors")


def make_engine(path, precision="fp32"):
    return LocalEngine(path, load_tokenizer(path), precision=precision)


def scores(engine):
    return engine.prompt_log_probs(TOKENS)["the local engine"]


def test_weights_have_the_names_and_values_of_the_file(pair):
    model, file = load_model(pair[0], torch.float32), tensors_of(pair[0])
    weights = weights_by_file_name(model)
    assert weights.keys() == file.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, file[name]), name
    with torch.no_grad():
        weights["model.layers.2.mlp.experts.3.up_proj.weight"].fill_(7.0)
    stacked = model.get_parameter("model.layers.2.mlp.experts.gate_up_proj")
    assert (stacked[3] == 7.0).all(1).tolist() == [False] * 24 + [True] * 24


def test_updates_replace_every_weight_and_checkpoints_are_taken_up_as_they_are(pair, tmp_path):
    first, second = (make_engine(path) for path in pair)
    assert scores(first) != scores(second)
    first.update_weights(tensors_of(pair[1]).items, version=1)
    assert scores(first) == scores(second)
    first, second = (make_engine(path, "int8") for path in pair)
    first.save_weights(tmp_path)
    second.load_weights(tmp_path, version=4)
    assert scores(second) == scores(first) and second.weight_version == 4


@pytest.mark.parametrize(
    ("precision", "rounding"), [("fp8", round_fp8), ("int8", round_int8)], ids=["fp8", "int8"]
)
def test_eight_bit_engines_round_experts_and_leave_routers(pair, tmp_path, precision, rounding):
    file = tensors_of(pair[0])
    rounded = {
        name: (
            rounding(weight) if re.search(r"_proj\.weight$", name) else weight
        )  # not gate.weight, not lm_head
        for name, weight in file.items()
    }
    shutil.copytree(pair[0], tmp_path, dirs_exist_ok=True)
    save_file(rounded, tmp_path / "model.safetensors", {"format": "pt"})
    engine, expected = make_engine(pair[0], precision), scores(make_engine(tmp_path))
    for _ in range(2):  # as loaded, and as updated
        assert scores(engine) == expected
        engine.update_weights(file.items, version=1)
    names = linear_weight_names(load_model(pair[0], torch.float32))
    assert names == {name for name in file if name.endswith("_proj.weight")}
