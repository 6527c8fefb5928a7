"""Weights that are sent: their rounding, and the share of an update that arrives."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from slime_tis.trainer.engines.local.load_model import load_tokenizer
from slime_tis.trainer.engines.local.local_engine import LocalEngine
from slime_tis.trainer.engines.weight_rounding import (
    Precision,
    WeightRounder,
    round_fp8,
    round_int8,
    round_nearest,
    round_stochastic,
    rounds,
    spacing,
)
from slime_tis.trainer.engines.weight_updates import WeightUpdates, row_stride
from tests.checkpoints import make_checkpoint

BF16 = 2.0**-7
"""Distance of neighbouring bf16 numbers in [1, 2)."""


def updates_of(
    rounding: Literal["nearest", "stochastic"] = "nearest",
    precision: Precision = "bf16",
    *,
    samples_all: bool = False,
) -> WeightUpdates:
    rounder = WeightRounder(rounding, 0)
    return WeightUpdates(rounder, lambda name: precision, samples_all=samples_all)


def push(updates: WeightUpdates, version: int, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sends tensors as a version of the weights; returns what the engine receives."""
    return dict(updates.source(lambda: tensors.items(), version)())


def test_the_first_weights_are_no_update():
    updates = updates_of()
    push(updates, 0, w=torch.ones(4))
    assert updates.metrics() == {}


@pytest.fixture
def partly_absorbed() -> dict[str, float]:
    """The metrics of an update whose four small changes of `w` are absorbed.

    The two changes of `v` arrive. |Δ|² is 4 · (h/4)² of w and 2 · h² of v, where h is bf16's
    distance.
    """
    updates = updates_of()
    push(updates, 0, w=torch.ones(4), v=torch.full((2,), 1.5))
    # rows are not sampled in tensors of at most 61 rows: the first row counts for all
    push(updates, 1, w=torch.full((4,), 1 + BF16 / 4), v=torch.full((2,), 1.5 + BF16))
    return updates.metrics()


def test_absorbed_elements_are_counted(partly_absorbed):
    assert partly_absorbed["rollout/update_absorbed"] == pytest.approx(4 / 6)


def test_the_norm_of_absorbed_changes(partly_absorbed):
    norm = (0.25 / 2.25) ** 0.5
    assert partly_absorbed["rollout/update_absorbed_norm"] == pytest.approx(norm)


def test_the_share_of_an_update_that_arrives(partly_absorbed):
    assert partly_absorbed["rollout/update_received"] == pytest.approx(2 / 2.25)


def test_a_complete_update_absorbs_nothing():
    updates = updates_of()
    push(updates, 0, w=torch.ones(1))
    push(updates, 1, w=torch.full((1,), 1 + BF16))
    assert updates.metrics() == {
        "rollout/update_absorbed": 0.0,
        "rollout/update_absorbed_norm": 0.0,
        "rollout/update_received": pytest.approx(1.0),
    }


def test_a_version_sent_again_has_the_same_metrics():
    updates = updates_of()
    push(updates, 0, w=torch.ones(1))
    push(updates, 1, w=torch.full((1,), 1 + BF16))
    once = updates.metrics()
    push(updates, 1, w=torch.full((1,), 1 + BF16))
    assert updates.metrics() == once


@pytest.mark.parametrize(
    ("rounding", "low", "high"), [("nearest", 0.0, 0.0), ("stochastic", 0.75, 1.25)]
)
def test_small_steps_from_a_bf16_checkpoint(rounding, low, high):
    generator = torch.Generator().manual_seed(0)
    sign = torch.randn(61 * 1024, 64, generator=generator).sign()
    start = round_nearest(0.0313 + torch.rand(sign.shape, generator=generator) / 16, "bf16")
    updates = updates_of(rounding)
    push(updates, 0, w=start)
    for version in (1, 2, 3):
        push(updates, version, w=start + version * 2e-5 * sign)
        metrics = updates.metrics()
        assert low <= metrics["rollout/update_received"] <= high
        # most elements do not change with either rounding: the few that do change by a full
        # distance
        assert metrics["rollout/update_absorbed"] > 0.6


def test_rows_of_large_tensors_are_sampled():
    updates = updates_of()
    push(updates, 0, big=torch.zeros(49152, 576), bias=torch.zeros(576))
    assert updates.sampled["big"].trained.numel() <= 65_536
    assert updates.sampled["big"].share == pytest.approx(113 / 49152, rel=0.02)
    assert updates.sampled["bias"].trained.numel() == 10


@pytest.mark.parametrize(
    ("precision", "samples_all", "sampled"),
    [("bf16", False, set()), ("fp32", True, {"half"})],
    ids=["only rounded tensors", "all tensors"],
)
def test_tensors_that_are_not_rounded_are_sampled_on_request(precision, samples_all, sampled):
    updates = updates_of(precision=precision, samples_all=samples_all)
    half = torch.zeros(8, 8)
    push(updates, 0, half=half if samples_all else half.bfloat16())
    assert set(updates.sampled) == sampled


@pytest.mark.parametrize(
    ("shape", "stride"), [((10, 100_000), 61), ((1000, 65_536), 1001)], ids=str
)
def test_the_stride_bounds_the_sample(shape, stride):
    assert row_stride(torch.zeros(shape)) == stride


def test_every_row_of_large_tensors_is_checked_in_turn():
    updates = updates_of(precision="fp32", samples_all=True)
    checked: set[int] = set()
    for version in range(400):
        push(updates, version, big=torch.zeros(128, 512))
        rows = updates.sent_rows()["big"]
        assert len(rows.rows) <= 3
        checked |= set(range(rows.first, 128, rows.stride))
    assert checked == set(range(128))


def test_all_rows_of_small_tensors_are_checked():
    updates = updates_of(precision="fp32", samples_all=True)
    push(updates, 0, small=torch.zeros(128, 511))
    assert updates.sent_rows()["small"].rows.shape == (128, 511)


@pytest.fixture
def sent() -> WeightUpdates:
    """A tensor of ones [64, 64] that was sent as version 0."""
    updates = updates_of(samples_all=True)
    push(updates, 0, w=torch.ones(64, 64))
    return updates


def test_the_first_weights_are_no_change(sent):
    assert not sent.sent_rows()["w"].changed


def test_a_change_that_bf16_cannot_represent_is_none(sent):
    push(sent, 1, w=torch.ones(64, 64) + BF16 / 8)
    assert not sent.sent_rows()["w"].changed


def test_a_change_of_one_element_is_found(sent):
    weight = torch.ones(64, 64)
    weight[40, 50] += BF16
    push(sent, 1, w=weight)
    assert sent.sent_rows()["w"].changed
    # row 40 is not in the fixed sample
    assert not sent.moved


def test_a_change_of_all_elements_is_found(sent):
    push(sent, 1, w=torch.ones(64, 64) + BF16)
    assert sent.sent_rows()["w"].changed_everywhere
    assert sent.moved


def test_a_change_of_most_rows_is_not_everywhere(sent):
    weight = torch.ones(64, 64)
    weight[:48] += BF16
    push(sent, 1, w=weight)
    rows = sent.sent_rows()["w"]
    assert rows.changed
    assert not rows.changed_everywhere


QUERY = "model.layers.0.self_attn.q_proj.weight"
Weights = dict[str, torch.Tensor]


def send_as_they_are(weights: Weights, before: Weights) -> None:
    pass


def stale_quarter(weights: Weights, before: Weights) -> None:
    """A quarter of the query's rows stays old."""
    weights[QUERY][128:192] = before[QUERY][128:192]


def engine_of(
    directory: Path, precision: Precision, emulation_dtype: torch.dtype = torch.float32
) -> tuple[LocalEngine, Weights]:
    """An engine of a mixture with a tied head, and the weights of its checkpoint."""
    path = make_checkpoint(
        directory,
        "qwen3_moe",
        hidden_size=256,
        num_attention_heads=8,
        head_dim=32,
        tie_word_embeddings=True,
    )
    tokenizer = load_tokenizer(path)
    engine = LocalEngine(path, tokenizer, precision=precision, emulation_dtype=emulation_dtype)
    assert engine._weights[QUERY].shape == (256, 256)
    start = {name: weight.clone() for name, weight in load_file(path / "model.safetensors").items()}
    return engine, start


def wrong_weights_of(
    engine: LocalEngine, start: Weights, fault: Callable[[Weights, Weights], None]
) -> set[str]:
    """Names that twelve updates with a fault report as wrong."""
    updates = WeightUpdates(WeightRounder("nearest", 0), engine.weight_precision, samples_all=True)
    wrong: set[str] = set()
    for version in range(12):
        new = {name: weight * (1 + 0.03 * version) for name, weight in start.items()}
        sent = {name: weight.clone() for name, weight in updates.source(new.items, version)()}
        fault(sent, start)
        engine.update_weights(sent.items, version)
        (names,) = engine.wrong_weights(updates.sent_rows()).values()
        wrong |= set(names)
    return wrong


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_right_updates_have_no_wrong_weights(precision, tmp_path):
    engine, start = engine_of(tmp_path, precision)
    assert wrong_weights_of(engine, start, send_as_they_are) == set()


@pytest.mark.parametrize("precision", ["fp8", "int8", "int4"])
def test_right_updates_of_an_emulated_engine_in_bf16_have_no_wrong_weights(precision, tmp_path):
    engine, start = engine_of(tmp_path, precision, emulation_dtype=torch.bfloat16)
    assert wrong_weights_of(engine, start, send_as_they_are) == set()


def test_an_emulated_engine_in_bf16_holds_rounded_bf16_weights(tmp_path):
    engine, start = engine_of(tmp_path, "fp8", emulation_dtype=torch.bfloat16)
    engine.update_weights(start.items, 1)
    assert torch.equal(engine._weights[QUERY], round_fp8(start[QUERY]).bfloat16())


def test_stale_rows_of_an_emulated_engine_in_bf16_are_found(tmp_path):
    engine, start = engine_of(tmp_path, "fp8", emulation_dtype=torch.bfloat16)
    assert wrong_weights_of(engine, start, stale_quarter) == {QUERY}


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_stale_rows_outside_the_fixed_sample_are_found(precision, tmp_path):
    engine, start = engine_of(tmp_path, precision)
    assert wrong_weights_of(engine, start, stale_quarter) == {QUERY}


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_stale_copy_of_a_tied_head_is_found(precision, tmp_path):
    engine, start = engine_of(tmp_path, precision)
    # an engine with two copies of the tied weights updates only the embedding
    head = engine._model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    assert wrong_weights_of(engine, start, send_as_they_are) == {"lm_head.weight"}


COARSE = ["fp16", "bf16", "fp8", "int8", "int4"]
ROW_SCALES = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("precision", "distances"),
    [
        # bf16 has 7 bits of mantissa: 2^-7 in [1, 2), 2^-6 in [2, 4), 2^-12 in [1/32, 1/16)
        ("bf16", [2.0**-7, 2.0**-7, 2.0**-6, 2.0**-12]),
        ("fp16", [2.0**-10, 2.0**-10, 2.0**-9, 2.0**-15, 2.0**-24]),
        ("fp8", [2.0**-3, 2.0**-3, 2.0**-2, 2.0**-8, 2.0**-9]),
        ("int8", [1.0, 1.0, 1.0, 1.0, 1.0]),
    ],
    ids=["bf16", "fp16", "fp8", "int8"],
)
def test_distances_of_neighboring_numbers(precision, distances):
    numbers = torch.tensor([1.0, 1.99, 2.0, 0.05, 0.0])[: len(distances)]
    assert spacing(numbers, precision).tolist() == distances


@pytest.mark.parametrize(
    ("dtype", "precision", "rounded"),
    [
        (torch.float32, "bf16", True),
        (torch.float32, "fp16", True),
        (torch.float32, "int8", True),
        (torch.bfloat16, "fp16", True),
        (torch.bfloat16, "fp8", True),
        (torch.float32, "fp32", False),
        (torch.bfloat16, "fp32", False),
        (torch.bfloat16, "bf16", False),
    ],
    ids=str,
)
def test_an_engine_rounds_to_fewer_bits(dtype, precision, rounded):
    assert rounds(dtype, precision) == rounded


A_QUARTER_UP = torch.full((1, 40_000), 1.0 + 2.0**-9)
"""A quarter of bf16's distance above 1."""


def test_a_quarter_of_the_distance_is_rounded_up_in_a_quarter_of_draws():
    sent = round_stochastic(A_QUARTER_UP, "bf16", generator())
    assert sorted(set(sent[0].tolist())) == [1.0, 1.0 + 2.0**-7]
    # 0.011 are 5 standard deviations of a binomial
    assert (sent > 1).float().mean().item() == pytest.approx(0.25, abs=0.011)


def test_stochastic_rounding_is_symmetric():
    sent = round_stochastic(A_QUARTER_UP, "bf16", generator())
    assert torch.equal(round_stochastic(-A_QUARTER_UP, "bf16", generator()), -sent)


def test_a_quarter_of_the_distance_is_rounded_down_to_nearest():
    assert set(round_nearest(A_QUARTER_UP, "bf16")[0].tolist()) == {1.0}


def weight_and_step(
    seed: int, exponent: int, precision: Precision
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random weights [4, 16], and the distance of the numbers around each."""
    weight = torch.randn(4, 16, generator=generator(seed)) * 2.0**exponent
    scale = torch.ones(4, 1)
    if precision in ROW_SCALES:
        scale = weight.abs().amax(-1, keepdim=True) / ROW_SCALES[precision]
    return weight, spacing(weight.abs() / scale, precision) * scale


@pytest.mark.parametrize("precision", COARSE)
@settings(max_examples=30)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-12, 3))
def test_stochastic_rounding_takes_a_neighbor(precision, seed, exponent):
    weight, step = weight_and_step(seed, exponent, precision)
    rounded = round_stochastic(weight, precision, generator(seed))
    assert ((rounded - weight).abs() <= step * (1 + 1e-5)).all()


@pytest.mark.parametrize("precision", COARSE)
@settings(max_examples=30)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-12, 3))
def test_stochastic_rounding_has_no_bias(precision, seed, exponent):
    weight, step = weight_and_step(seed, exponent, precision)
    draws = [round_stochastic(weight, precision, generator(seed + i)) for i in range(400)]
    error = (torch.stack(draws).mean(0) - weight).abs()
    # a draw deviates by half a step at most; 5 standard deviations of the mean of 400
    assert (error <= 0.5 * step * 5 / 400**0.5 + 1e-6 * weight.abs()).all()


@pytest.mark.parametrize("precision", COARSE)
@settings(max_examples=30)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-12, 3))
def test_the_engine_keeps_rounded_weights(precision, seed, exponent):
    weight, _ = weight_and_step(seed, exponent, precision)
    rounded = round_stochastic(weight, precision, generator(seed))
    torch.testing.assert_close(round_nearest(rounded, precision), rounded, rtol=1e-6, atol=0.0)


WEIGHT = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)) * 0.05


def send(version: int, weight: torch.Tensor, seed: int = 7, name: str = "w") -> torch.Tensor:
    """The weight that a bf16 engine receives."""
    return WeightRounder("stochastic", seed)(name, weight, "bf16", version)


def test_the_same_version_is_rounded_alike():
    """Another rank, or a server that comes back, gets the same numbers."""
    assert send(3, WEIGHT).dtype == torch.bfloat16
    assert torch.equal(send(3, WEIGHT), send(3, WEIGHT))


@pytest.mark.parametrize(
    ("version", "seed", "name"), [(4, 7, "w"), (3, 8, "w"), (3, 7, "v")], ids=str
)
def test_version_seed_name_decide_the_draw(version, seed, name):
    assert not torch.equal(send(version, WEIGHT, seed, name), send(3, WEIGHT))


def test_weights_that_need_no_rounding_are_not_copied():
    half = WEIGHT.bfloat16()
    assert WeightRounder("stochastic", 7)("w", WEIGHT, "fp32", 3) is WEIGHT
    assert send(3, half) is half


def test_weights_of_the_engines_precision_are_sent_as_they_are():
    weight = torch.randn(64, 4000, generator=generator()).bfloat16().float()
    weight[:, 0] = 2.0 ** torch.arange(-32, 32)
    assert torch.equal(send(0, weight).float(), weight)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([127.0, -127.0, 0.4, 0.6, 0.5, 1.5], [127.0, -127.0, 0.0, 1.0, 0.0, 2.0]),
        ([1.27, 0.0, 0.003, 0.006, -0.016, 0.024], [1.27, 0.0, 0.0, 0.01, -0.02, 0.02]),
    ],
    ids=["scale 1", "scale 0.01"],
)
def test_int8_by_hand(row, expected):
    rounded = round_int8(torch.tensor([row]))
    torch.testing.assert_close(rounded, torch.tensor([expected]), rtol=0.0, atol=1e-7)


def test_int4_by_hand():
    rounded = round_nearest(torch.tensor([[7.0, -7.0, 0.4, 0.6, 0.5, 2.5]]), "int4")
    assert rounded.tolist() == [[7.0, -7.0, 0.0, 1.0, 0.0, 2.0]]


@pytest.mark.parametrize("scale", [1.0, 1 / 8], ids=str)
def test_fp8_by_hand(scale):
    """With 448 in the row the scale is 1.

    e4m3 has 3 bits of mantissa: steps of 1/8 in [1, 2), of 32 in [256, 448], and of 2^-9 below
    2^-6. Halves go to the even mantissa.
    """
    weight = torch.tensor([[448.0, 1.0625, 1.1875, 1.07, -300.0, 310.0, 2.0**-9, 2.0**-11, 0.0]])
    expected = torch.tensor([[448.0, 1.0, 1.25, 1.125, -288.0, 320.0, 2.0**-9, 0.0, 0.0]])
    assert torch.equal(round_fp8(weight * scale), expected * scale)


@pytest.mark.parametrize("rounding", [round_fp8, round_int8], ids=["fp8", "int8"])
def test_extreme_rows_stay_finite(rounding):
    rounded = rounding(torch.tensor([[0.0, 0.0], [1e-44, -1e-44], [3e38, -3e38]]))
    assert torch.isfinite(rounded).all()
    assert rounded[0].tolist() == [0.0, 0.0]


def random_rows(seed: int, log_scale: float) -> torch.Tensor:
    return 10.0**log_scale * torch.randn(5, 33, generator=generator(seed))


@settings(max_examples=50)
@given(st.integers(0, 2**31), st.floats(-6.0, 6.0))
def test_int8_errs_by_half_a_step_at_most(seed, log_scale):
    weight = random_rows(seed, log_scale)
    step = weight.abs().amax(-1, keepdim=True) / 127
    assert ((round_int8(weight) - weight).abs() <= 0.5 * step * (1 + 1e-5)).all()


@settings(max_examples=50)
@given(st.integers(0, 2**31), st.floats(-6.0, 6.0))
def test_fp8_errs_by_half_a_step_at_most(seed, log_scale):
    weight = random_rows(seed, log_scale)
    largest = weight.abs().amax(-1, keepdim=True)
    # a mantissa of 3 bits, and subnormal numbers below
    step = torch.maximum(weight.abs() / 8, largest / 448 * 2.0**-9)
    assert ((round_fp8(weight) - weight).abs() <= 0.5 * step * (1 + 1e-5)).all()


@pytest.mark.parametrize("rounding", [round_fp8, round_int8], ids=["fp8", "int8"])
@settings(max_examples=50)
@given(seed=st.integers(0, 2**31), log_scale=st.floats(-6.0, 6.0))
def test_rounded_rows_are_not_changed_again(rounding, seed, log_scale):
    rounded = rounding(random_rows(seed, log_scale))
    torch.testing.assert_close(rounding(rounded), rounded, rtol=1e-6, atol=0.0)
