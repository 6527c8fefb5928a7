"""What of an update arrives: metrics by hand, the sample, and the same numbers whoever streams."""

import pytest
import torch
from safetensors.torch import load_file

from slime_tis.trainer.engines.local.checkpoint import load_tokenizer
from slime_tis.trainer.engines.local.engine import LocalEngine
from slime_tis.trainer.engines.weight_rounding import WeightRounder, round_nearest
from slime_tis.trainer.engines.weight_updates import WeightUpdates, row_stride
from tests.checkpoints import make_checkpoint

BF16 = 2.0**-7
"""Distance of neighbouring bf16 numbers in [1, 2)."""


def updates_of(rounding="nearest", precision="bf16", *, samples_all=False):
    return WeightUpdates(WeightRounder(rounding, 0), lambda name: precision, samples_all=samples_all)


def push(updates, version, **tensors):
    return dict(updates.source(lambda: tensors.items(), version)())


def test_metrics_by_hand():
    updates = updates_of()
    push(updates, 0, w=torch.ones(4), v=torch.full((2,), 1.5))
    assert updates.metrics() == {}
    # three of four rows are not sampled where a tensor has 61 rows or fewer: the first row counts for all
    push(updates, 1, w=torch.full((4,), 1 + BF16 / 4), v=torch.full((2,), 1.5 + BF16))
    found = updates.metrics()
    assert found["rollout/update_absorbed"] == pytest.approx(4 / 6)
    # |Δ|² is 4 · (h/4)² of w, absorbed, and 2 · h² of v
    assert found["rollout/update_absorbed_norm"] == pytest.approx((0.25 / 2.25) ** 0.5)
    assert found["rollout/update_received"] == pytest.approx(2 / 2.25)


def test_a_version_sent_again_is_compared_with_the_one_before():
    updates = updates_of()
    push(updates, 0, w=torch.ones(1))
    push(updates, 1, w=torch.full((1,), 1 + BF16))
    once = updates.metrics()
    push(updates, 1, w=torch.full((1,), 1 + BF16))
    assert updates.metrics() == once
    absorbed = {"rollout/update_absorbed": 0.0, "rollout/update_absorbed_norm": 0.0}
    assert once == {**absorbed, "rollout/update_received": pytest.approx(1.0)}


@pytest.mark.parametrize(
    ("rounding", "low", "high"), [("nearest", 0.0, 0.0), ("stochastic", 0.75, 1.25), ("error-compensated", 0.75, 1.25)]
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
        # most elements do not change whatever the rounding: the few that do change by a whole distance
        assert found["rollout/update_absorbed"] > 0.6


def test_the_sample_is_small_and_only_of_what_is_rounded():
    updates = updates_of()
    push(updates, 0, big=torch.zeros(49152, 576), bias=torch.zeros(576), half=torch.zeros(8, 8).bfloat16())
    assert set(updates.sampled) == {"big", "bias"}
    assert updates.sampled["big"].trained.numel() <= 65_536 and updates.sampled["bias"].trained.numel() == 10
    assert updates.sampled["big"].share == pytest.approx(113 / 49152, rel=0.02)
    assert row_stride(torch.zeros(10, 100_000)) == 61 and row_stride(torch.zeros(1000, 65_536)) == 1001
    everything = updates_of(precision="fp32", samples_all=True)
    push(everything, 0, half=torch.zeros(8, 8))
    assert set(everything.sampled) == {"half"}


def test_small_tensors_are_checked_completely_and_every_row_of_large_ones_in_turn():
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
    assert updates.sent_rows()["w"].changed and not updates.moved  # row 40 is not in the fixed sample
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
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "head_dim": 32, "tie_word_embeddings": True}
    path = make_checkpoint(tmp_path, "qwen3_moe", **sizes)
    engine = LocalEngine(path, load_tokenizer(path), precision=precision)
    assert engine._weights["model.layers.0.self_attn.q_proj.weight"].shape == (256, 256)
    if fault is tied_head:  # an engine with two copies of the tied weights updates the embedding alone
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
