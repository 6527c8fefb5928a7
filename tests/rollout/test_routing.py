"""Mixtures of experts in the in-process engine: recorded routing, and weights by name."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from slime_tis.hf_directory import MoeSizes
from slime_tis.trainer.data.sample import Prompt, Sample, Sampling
from slime_tis.trainer.engines.local.load_model import (
    linear_weight_names,
    load_model,
    load_tokenizer,
    weights_by_file_name,
)
from slime_tis.trainer.engines.local.local_engine import LocalEngine
from slime_tis.trainer.engines.local.routing import has_usable_experts, has_usable_weights
from slime_tis.trainer.engines.weight_rounding import Precision, round_fp8, round_int8
from tests.checkpoints import make_checkpoint
from tests.rollout.conftest import make_prompts
from tests.samples import flat, make_sample

GROUPS = {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.7, "first_k_dense_replace": 1}
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_hidden_layers": 3},
    "qwen2_moe": {"norm_topk_prob": False},
    "mixed": {"norm_topk_prob": False, "mlp_only_layers": [1], "num_hidden_layers": 3},
    "glm4_moe": {**GROUPS, "num_hidden_layers": 3},
}
LAYERS = {"qwen3_moe": [0, 1, 2], "qwen2_moe": [0, 1], "mixed": [0, 2], "glm4_moe": [1, 2]}
TEXTS = ["31415>", "7>", "abc def + 12>"]
"""Prompts of different lengths, so that the batch is padded on the left."""


def make_mixture(directory: Path, name: str) -> Path:
    """A checkpoint of `SIZES`."""
    family = "qwen3_moe" if name == "mixed" else name
    return make_checkpoint(directory / name, family, **SIZES[name])


def generate(path: Path, **options: Any) -> list[Sample]:
    """Nine samples of different lengths."""
    stop_token_ids = tuple(range(3, 12))
    sampling = Sampling(max_response_len=12, n_samples=3, stop_token_ids=stop_token_ids, **options)
    engine = LocalEngine(path, load_tokenizer(path))
    return flat(engine.generate(make_prompts(path, TEXTS), sampling, seed=1))


def routing_of(
    model: PreTrainedModel, layers: list[int], token_ids: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts and weights [tokens, layers, k] that the model's routers return for a sequence."""
    outputs = []
    hooks = []
    for layer in layers:
        router = model.model.layers[layer].mlp.gate
        hooks.append(
            router.register_forward_hook(lambda module, args, output: outputs.append(output[1:]))
        )
    with torch.no_grad():
        model(input_ids=torch.tensor([token_ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    weights, experts = zip(*outputs, strict=True)
    return torch.stack(experts, 1), torch.stack(weights, 1)


@dataclass(frozen=True)
class RecordedRouting:
    """Routing of one sample: recorded by the engine, and computed by transformers.

    All have the shape [tokens but the last, layers, k], sorted by expert, as transformers leaves
    the order of GLM's experts open.
    """

    dtype: torch.dtype
    recorded: torch.Tensor
    recorded_weights: torch.Tensor
    expected: torch.Tensor
    expected_weights: torch.Tensor


@pytest.fixture(scope="module", params=LAYERS)
def recorded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[RecordedRouting]:
    name = request.param
    path = make_mixture(tmp_path_factory.mktemp("moe"), name)
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    samples = generate(path, return_routed_experts=True, return_routing_weights=True)
    # some samples leave the decoding batch before others
    assert len({len(sample.response_ids) for sample in samples}) > 1
    routings = []
    for sample in samples:
        experts, weights = routing_of(model, LAYERS[name], sample.tokens)
        assert sample.rollout_routed_experts is not None
        assert sample.rollout_routing_weights is not None
        recorded_experts, order = sample.rollout_routed_experts.long().sort(-1)
        expected, expected_order = experts[:-1].sort(-1)
        routings.append(
            RecordedRouting(
                dtype=sample.rollout_routed_experts.dtype,
                recorded=recorded_experts,
                recorded_weights=sample.rollout_routing_weights.gather(-1, order),
                expected=expected,
                expected_weights=weights[:-1].gather(-1, expected_order),
            )
        )
    return routings


def test_rows_are_the_experts_of_every_token_but_the_last(recorded):
    for routing in recorded:
        assert torch.equal(routing.recorded, routing.expected)


def test_weights_are_those_of_the_experts(recorded):
    for routing in recorded:
        torch.testing.assert_close(
            routing.recorded_weights, routing.expected_weights, rtol=1e-5, atol=1e-6
        )


def test_experts_are_recorded_in_one_byte(recorded):
    assert {routing.dtype for routing in recorded} == {torch.uint8}


@pytest.fixture(scope="module")
def with_and_without_experts(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[list[Sample], list[Sample]]:
    """The same samples with recorded experts and without."""
    path = make_mixture(tmp_path_factory.mktemp("moe"), "qwen3_moe")
    return generate(path, return_routed_experts=True), generate(path)


def test_recording_does_not_change_samples(with_and_without_experts):
    recorded, plain = with_and_without_experts
    assert [sample.response_ids for sample in plain] == [sample.response_ids for sample in recorded]


def test_only_the_requested_routing_is_recorded(with_and_without_experts):
    recorded, plain = with_and_without_experts
    assert all(sample.rollout_routed_experts is None for sample in plain)
    assert all(sample.rollout_routed_experts is not None for sample in recorded)
    assert all(sample.rollout_routing_weights is None for sample in plain + recorded)


GOOD = torch.tensor([[[0, 1], [2, 3]], [[7, 6], [0, 1]], [[5, 0], [1, 0]]], dtype=torch.uint8)


def sample_with(experts: torch.Tensor | None, weights: torch.Tensor | None = None) -> Sample:
    prompt = Prompt(index=0, text="1>", token_ids=(1, 5))
    return make_sample(
        prompt, [4, 2], rollout_routed_experts=experts, rollout_routing_weights=weights
    )


def sizes(top_k: int = 2) -> MoeSizes:
    return MoeSizes(
        layers=(0, 1),
        num_experts=8,
        top_k=top_k,
        intermediate_size=4,
        shared_intermediate_size=None,
    )


def changed(index: tuple[int, ...], value: int | list[int]) -> torch.Tensor:
    """The good experts with another value."""
    experts = GOOD.clone()
    experts[index] = torch.tensor(value, dtype=torch.uint8)
    return experts


@pytest.mark.parametrize(
    "experts", [GOOD, GOOD.short(), GOOD.int()], ids=["uint8", "int16", "int32"]
)
def test_experts_of_the_model_are_usable(experts):
    assert has_usable_experts(sample_with(experts), sizes())


@pytest.mark.parametrize(
    "experts",
    [GOOD[..., :1], torch.zeros_like(GOOD[..., :1])],
    ids=["different", "all the first expert"],
)
def test_one_expert_per_token_is_usable(experts):
    assert has_usable_experts(sample_with(experts), sizes(top_k=1))


@pytest.mark.parametrize(
    ("weights", "usable"),
    [
        (torch.full(GOOD.shape, 0.5), True),
        (None, False),
        (torch.full(GOOD.shape, torch.nan), False),
        (torch.full(GOOD.shape, -0.5), False),
    ],
    ids=["positive", "none", "nan", "negative"],
)
def test_positive_weights_are_usable(weights, usable):
    assert has_usable_weights(sample_with(GOOD, weights)) == usable


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


@pytest.fixture(scope="module")
def router_in_three_bits(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights of a checkpoint, and of an engine that rounds only routers, after an update."""
    directory = tmp_path_factory.mktemp("router")
    path = make_checkpoint(directory / "moe", "qwen3_moe")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    weights = dict(model.state_dict())
    engine = LocalEngine(path, load_tokenizer(path), router_bits=3)
    engine.update_weights(load_file(path / "model.safetensors").items, version=1)
    engine.save_weights(directory)
    return weights, load_file(directory / "rollout_weights.safetensors")


def test_routers_have_seven_levels_per_row(router_in_three_bits):
    weights, rounded = router_in_three_bits
    for name, weight in weights.items():
        if name.endswith("mlp.gate.weight"):
            scale = weight.abs().amax(-1, keepdim=True) / 3
            levels = rounded[name] / scale
            torch.testing.assert_close(levels, levels.round(), rtol=0, atol=1e-5)
            assert int(levels.round().unique().numel()) == 7


def test_routers_err_by_half_a_level(router_in_three_bits):
    weights, rounded = router_in_three_bits
    for name, weight in weights.items():
        if name.endswith("mlp.gate.weight"):
            scale = weight.abs().amax(-1, keepdim=True) / 3
            error = (rounded[name] - weight).abs().max()
            assert float(error) <= float(scale.max()) / 2 + 1e-6


def test_other_weights_are_not_rounded(router_in_three_bits):
    weights, rounded = router_in_three_bits
    for name, weight in weights.items():
        if not name.endswith("mlp.gate.weight"):
            assert torch.equal(rounded[name], weight)


FAMILIES = ("qwen3_moe", "qwen2_moe", "glm4_moe", "deepseek_v3")
TOKENS = [1, 3, 14, 15, 9, 26, 5, 35, 8]
THREE_LAYERS = {"num_hidden_layers": 3}


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints of a family with different weights."""
    root = tmp_path_factory.mktemp(request.param)
    checkpoints = []
    for seed in range(2):
        path = make_checkpoint(root / str(seed), request.param, seed=seed, **THREE_LAYERS)
        checkpoints.append(path)
    return checkpoints


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def make_engine(path: Path, precision: Precision = "fp32") -> LocalEngine:
    return LocalEngine(path, load_tokenizer(path), precision=precision)


def scores(engine: LocalEngine) -> list[float]:
    """Log-probs of some tokens."""
    return engine.prompt_log_probs(TOKENS)["the local engine"]


def test_weights_have_the_values_of_the_file_by_name(pair):
    weights = weights_by_file_name(load_model(pair[0], torch.float32))
    file = tensors_of(pair[0])
    assert weights.keys() == file.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, file[name]), name


def test_weights_by_name_are_views_of_the_model(pair):
    model = load_model(pair[0], torch.float32)
    weights = weights_by_file_name(model)
    with torch.no_grad():
        weights["model.layers.2.mlp.experts.3.up_proj.weight"].fill_(7.0)
    # transformers stacks gate and up projections of all experts
    stacked = model.get_parameter("model.layers.2.mlp.experts.gate_up_proj")
    assert (stacked[3] == 7.0).all(1).tolist() == [False] * 24 + [True] * 24


def test_an_update_replaces_every_weight(pair):
    first = make_engine(pair[0])
    second = make_engine(pair[1])
    assert scores(first) != scores(second)
    first.update_weights(tensors_of(pair[1]).items, version=1)
    assert scores(first) == scores(second)


def test_saved_weights_are_loaded_without_rounding_again(pair, tmp_path):
    first = make_engine(pair[0], "int8")
    second = make_engine(pair[1], "int8")
    first.save_weights(tmp_path)
    second.load_weights(tmp_path, version=4)
    assert scores(second) == scores(first)
    assert second.weight_version == 4


@pytest.mark.parametrize(
    ("precision", "rounding"), [("fp8", round_fp8), ("int8", round_int8)], ids=["fp8", "int8"]
)
def test_an_eight_bit_engine_rounds_projections(pair, tmp_path, precision, rounding):
    """Before and after an update, but neither routers nor the output layer."""
    weights = tensors_of(pair[0])
    rounded = dict(weights)
    for name, weight in weights.items():
        if "_proj" in name and name.endswith(".weight"):
            rounded[name] = rounding(weight)
    shutil.copytree(pair[0], tmp_path, dirs_exist_ok=True)
    save_file(rounded, tmp_path / "model.safetensors", {"format": "pt"})
    expected = scores(make_engine(tmp_path))
    engine = make_engine(pair[0], precision)
    assert scores(engine) == expected
    engine.update_weights(weights.items, version=1)
    assert scores(engine) == expected


def test_projections_are_the_linear_weights(pair):
    names = linear_weight_names(load_model(pair[0], torch.float32))
    expected = set()
    for name in tensors_of(pair[0]):
        if "_proj" in name and name.endswith(".weight"):
            expected.add(name)
    assert names == expected
