"""Weights that are sent: how they are rounded, and what of an update arrives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from slime_tis.trainer.engines.local.load_model import load_tokenizer
from slime_tis.trainer.engines.local.local_engine import LocalEngine
from slime_tis.trainer.engines.weight_rounding import (
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


def updates_of(rounding="nearest", precision="bf16", *, samples_all=False):
    return WeightUpdates(
        WeightRounder(rounding, 0), lambda name: precision, samples_all=samples_all
    )


def push(updates, version, **tensors):
    return dict(updates.source(lambda: tensors.items(), version)())


def test_metrics_by_hand_also_of_a_version_sent_again():
    updates = updates_of()
    push(updates, 0, w=torch.ones(4), v=torch.full((2,), 1.5))
    assert updates.metrics() == {}
    # three of four rows are not sampled where a tensor has 61 rows or fewer: the first row counts
    # for all
    push(updates, 1, w=torch.full((4,), 1 + BF16 / 4), v=torch.full((2,), 1.5 + BF16))
    found = updates.metrics()
    assert found["rollout/update_absorbed"] == pytest.approx(4 / 6)
    # |Δ|² is 4 · (h/4)² of w, absorbed, and 2 · h² of v
    assert found["rollout/update_absorbed_norm"] == pytest.approx((0.25 / 2.25) ** 0.5)
    assert found["rollout/update_received"] == pytest.approx(2 / 2.25)
    updates = updates_of()
    push(updates, 0, w=torch.ones(1))
    push(updates, 1, w=torch.full((1,), 1 + BF16))
    once = updates.metrics()
    push(updates, 1, w=torch.full((1,), 1 + BF16))
    assert updates.metrics() == once
    absorbed = {"rollout/update_absorbed": 0.0, "rollout/update_absorbed_norm": 0.0}
    assert once == {**absorbed, "rollout/update_received": pytest.approx(1.0)}


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
        found = updates.metrics()
        assert low <= found["rollout/update_received"] <= high
        # most elements do not change whatever the rounding: the few that do change by a whole
        # distance
        assert found["rollout/update_absorbed"] > 0.6


def test_samples_are_small_and_every_row_of_large_tensors_is_checked_in_turn():
    updates = updates_of()
    push(
        updates,
        0,
        big=torch.zeros(49152, 576),
        bias=torch.zeros(576),
        half=torch.zeros(8, 8).bfloat16(),
    )
    assert set(updates.sampled) == {"big", "bias"}
    assert (
        updates.sampled["big"].trained.numel() <= 65_536
        and updates.sampled["bias"].trained.numel() == 10
    )
    assert updates.sampled["big"].share == pytest.approx(113 / 49152, rel=0.02)
    assert (
        row_stride(torch.zeros(10, 100_000)) == 61 and row_stride(torch.zeros(1000, 65_536)) == 1001
    )
    everything = updates_of(precision="fp32", samples_all=True)
    push(everything, 0, half=torch.zeros(8, 8))
    assert set(everything.sampled) == {"half"}
    updates, seen = updates_of(precision="fp32", samples_all=True), set()
    for version in range(400):
        push(updates, version, small=torch.zeros(128, 511), big=torch.zeros(128, 512))
        rows = updates.sent_rows()
        assert rows["small"].rows.shape == (128, 511)
        seen |= set(range(rows["big"].first, 128, rows["big"].stride))
    assert len(rows["big"].rows) <= 3 and seen == set(range(128))


def test_changes_are_those_of_all_elements_in_the_engines_precision():
    updates, w = updates_of(samples_all=True), torch.ones(64, 64)
    push(updates, 0, w=w)
    assert not updates.sent_rows()["w"].changed
    push(updates, 1, w=w + BF16 / 8)
    assert not updates.sent_rows()["w"].changed  # bf16 has no such numbers
    one = w.clone()
    one[40, 50] += BF16
    push(updates, 2, w=one)
    assert (
        updates.sent_rows()["w"].changed and not updates.moved
    )  # row 40 is not in the fixed sample
    push(updates, 3, w=one + BF16)
    assert updates.sent_rows()["w"].changed_everywhere and updates.moved
    quarter = one + BF16
    quarter[:48] += BF16
    push(updates, 4, w=quarter)
    assert updates.sent_rows()["w"].changed and not updates.sent_rows()["w"].changed_everywhere


def stale_quarter(weights, before):
    name = "model.layers.0.self_attn.q_proj.weight"
    weights[name][128:192] = before[name][128:192]


def tied_head(weights, before):
    pass


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("fault", [None, stale_quarter, tied_head])
def test_faults_in_rows_outside_the_fixed_sample_are_found(fault, precision, tmp_path):
    sizes = {
        "hidden_size": 256,
        "num_attention_heads": 8,
        "head_dim": 32,
        "tie_word_embeddings": True,
    }
    path = make_checkpoint(tmp_path, "qwen3_moe", **sizes)
    engine = LocalEngine(path, load_tokenizer(path), precision=precision)
    assert engine._weights["model.layers.0.self_attn.q_proj.weight"].shape == (256, 256)
    if (
        fault is tied_head
    ):  # an engine with two copies of the tied weights updates the embedding alone
        head = engine._model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    updates = WeightUpdates(WeightRounder("nearest", 0), engine.weight_precision, samples_all=True)
    start = {name: weight.clone() for name, weight in load_file(path / "model.safetensors").items()}
    wrong = set()
    for version in range(12):
        new = {name: weight * (1 + 0.03 * version) for name, weight in start.items()}
        sent = {name: weight.clone() for name, weight in updates.source(new.items, version)()}
        if fault is not None:
            fault(sent, start)
        engine.update_weights(sent.items, version)
        (names,) = engine.wrong_weights(updates.sent_rows()).values()
        wrong |= set(names)
    expected = {None: set(), tied_head: {"lm_head.weight"}}
    assert wrong == expected.get(fault, {"model.layers.0.self_attn.q_proj.weight"})


COARSE = ["fp16", "bf16", "fp8", "int8", "int4"]
ROW_SCALES = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_distances_and_what_an_engine_rounds():
    numbers = torch.tensor([1.0, 1.99, 2.0, 0.05, 0.0])
    # bf16 has 7 bits of mantissa: 2^-7 in [1, 2), 2^-6 in [2, 4), 2^-12 in [1/32, 1/16)
    assert spacing(numbers, "bf16")[:4].tolist() == [2.0**-7, 2.0**-7, 2.0**-6, 2.0**-12]
    assert spacing(numbers, "fp16").tolist() == [2.0**-10, 2.0**-10, 2.0**-9, 2.0**-15, 2.0**-24]
    assert spacing(numbers, "fp8").tolist() == [2.0**-3, 2.0**-3, 2.0**-2, 2.0**-8, 2.0**-9]
    assert spacing(numbers, "int8").tolist() == [1.0] * 5
    assert (
        rounds(torch.float32, "bf16")
        and rounds(torch.float32, "fp16")
        and rounds(torch.bfloat16, "fp16")
    )
    assert rounds(torch.bfloat16, "fp8") and rounds(torch.float32, "int8")
    assert not rounds(torch.float32, "fp32") and not rounds(torch.bfloat16, "fp32")
    assert not rounds(torch.bfloat16, "bf16")


def test_a_quarter_of_the_way_up_is_rounded_up_a_quarter_of_the_time():
    weight = torch.full((1, 40_000), 1.0 + 2.0**-9)  # a quarter of bf16's distance above 1
    sent = round_stochastic(weight, "bf16", generator())
    assert sorted(set(sent[0].tolist())) == [1.0, 1.0 + 2.0**-7]
    assert (sent > 1).float().mean().item() == pytest.approx(
        0.25, abs=0.011
    )  # 5 deviations of a binomial
    assert torch.equal(round_stochastic(-weight, "bf16", generator()), -sent)
    assert set(round_nearest(weight, "bf16")[0].tolist()) == {1.0}


@pytest.mark.parametrize("precision", COARSE)
@settings(max_examples=30)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-12, 3))
def test_stochastic_rounding_takes_a_neighbour_and_has_no_bias(precision, seed, exponent):
    weight = torch.randn(4, 16, generator=generator(seed)) * 2.0**exponent
    drawn = torch.stack(
        [round_stochastic(weight, precision, generator(seed + i)) for i in range(400)]
    )
    scale = weight.abs().amax(-1, keepdim=True) / ROW_SCALES.get(precision, 1.0)
    if precision not in ROW_SCALES:
        scale = torch.ones_like(scale)
    step = spacing(weight.abs() / scale, precision) * scale
    assert ((drawn - weight).abs() <= step * (1 + 1e-5)).all()
    assert ((drawn.mean(0) - weight).abs() <= 0.5 * step * 5 / 400**0.5 + 1e-6 * weight.abs()).all()
    again = round_nearest(drawn[0], precision)  # what the engine makes of what it is sent
    torch.testing.assert_close(again, drawn[0], rtol=1e-6, atol=0.0)


def send(version, weight, seed=7, name="w"):
    return WeightRounder("stochastic", seed)(name, weight, "bf16", version)


def test_seed_version_and_name_alone_decide():
    weight = torch.randn(32, 32, generator=generator()) * 0.05
    sent = send(3, weight)
    assert sent.dtype == torch.bfloat16
    assert torch.equal(send(3, weight), sent)  # another rank, or a server that comes back
    for other in (send(4, weight), send(3, weight, seed=8), send(3, weight, name="v")):
        assert not torch.equal(other, sent)
    half = weight.bfloat16()
    assert (
        WeightRounder("stochastic", 7)("w", weight, "fp32", 3) is weight and send(3, half) is half
    )


def test_weights_of_the_engines_precision_are_sent_as_they_are():
    weight = torch.randn(64, 4000, generator=generator()).bfloat16().float()
    weight[:, 0] = 2.0 ** torch.arange(-32, 32)
    assert torch.equal(send(0, weight).float(), weight)


def test_rounding_to_the_row_scale_by_hand():
    weight = torch.tensor(
        [[127.0, -127.0, 0.4, 0.6, 0.5, 1.5], [1.27, 0.0, 0.003, 0.006, -0.016, 0.024]]
    )
    expected = torch.tensor(
        [[127.0, -127.0, 0.0, 1.0, 0.0, 2.0], [1.27, 0.0, 0.0, 0.01, -0.02, 0.02]]
    )
    torch.testing.assert_close(round_int8(weight), expected, rtol=0.0, atol=1e-7)
    fours = torch.tensor([[7.0, -7.0, 0.4, 0.6, 0.5, 2.5]])
    assert round_nearest(fours, "int4").tolist() == [[7.0, -7.0, 0.0, 1.0, 0.0, 2.0]]
    # With 448 in the row the scale is 1. e4m3 has 3 bits of mantissa: steps of 1/8 in [1, 2), of 32
    # in [256, 448], and of 2^-9 below 2^-6; halves go to the even mantissa.
    weight = torch.tensor([[448.0, 1.0625, 1.1875, 1.07, -300.0, 310.0, 2.0**-9, 2.0**-11, 0.0]])
    expected = torch.tensor([[448.0, 1.0, 1.25, 1.125, -288.0, 320.0, 2.0**-9, 0.0, 0.0]])
    assert torch.equal(round_fp8(weight), expected)
    assert torch.equal(round_fp8(weight / 8), expected / 8)
    weight = torch.tensor([[0.0, 0.0], [1e-44, -1e-44], [3e38, -3e38]])
    for rounding in (round_fp8, round_int8):
        rounded = rounding(weight)
        assert torch.isfinite(rounded).all()
        assert rounded[0].tolist() == [0.0, 0.0]


@settings(max_examples=50)
@given(st.integers(0, 2**31), st.floats(-6.0, 6.0))
def test_rounding_errs_by_half_a_step_at_most_and_again_by_nothing(seed, log_scale):
    weight = 10.0**log_scale * torch.randn(5, 33, generator=torch.Generator().manual_seed(seed))
    largest = weight.abs().amax(-1, keepdim=True)
    int8, fp8 = round_int8(weight), round_fp8(weight)
    assert ((int8 - weight).abs() <= largest / 127 * 0.5 * (1 + 1e-5)).all()
    fp8_step = torch.maximum(
        weight.abs() / 8, largest / 448 * 2.0**-9
    )  # a mantissa of 3 bits; then subnormal
    assert ((fp8 - weight).abs() <= 0.5 * fp8_step * (1 + 1e-5)).all()
    torch.testing.assert_close(round_int8(int8), int8, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(round_fp8(fp8), fp8, rtol=1e-6, atol=0.0)
