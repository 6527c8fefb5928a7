"""Whatever goes in, nothing non-finite comes out, and what is wrong is said in a message."""

import math
import os

import pytest
import torch
from hypothesis import given, settings

from slime_tis import GlobalBatch, RolloutCorrectionConfig, Statistics, correct
from slime_tis.correction.modes import LEVELS
from slime_tis.correction.reference import reference_correct
from slime_tis.integrations.verl import RolloutCorrectionConfig as VerlConfig
from tests.correction.strategies import batches, configurations

EXAMPLES = int(os.environ.get("SLIME_TIS_SAFETY_EXAMPLES", "300"))
TOKEN_IS = RolloutCorrectionConfig(use_tis=True)
NAN, INF = math.nan, math.inf


@settings(max_examples=EXAMPLES)
@given(configurations(), batches(wild=True))
def test_nothing_non_finite_comes_out(config, batch):
    train, rollout, mask = batch
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found = correct(
            config,
            [torch.tensor(x, dtype=dtype) for x in train],
            [torch.tensor(x, dtype=dtype) for x in rollout],
            [torch.tensor(x, dtype=torch.int64) for x in mask],
        )
        for weights, kept, original in zip(found.weights, found.mask, mask, strict=True):
            assert weights.dtype == torch.float32 and kept.dtype == torch.bool
            assert torch.isfinite(weights).all() and (weights >= 0).all()
            assert not (kept & ~torch.tensor(original, dtype=torch.bool)).any()
        merged = found.statistics.merge(Statistics.empty(config)).merge(found.statistics)
        for statistics in (found.statistics, merged):
            assert all(math.isfinite(value) for value in statistics.metrics().values())
        losses = [torch.ones(len(x), requires_grad=True) for x in train]
        mean = found.mean(losses)
        gradients = torch.autograd.grad(mean, losses) if losses else ()
        assert all(bool(value.isfinite().all()) for value in (mean, *gradients))
        assert (found.accepted_per_sequence <= found.masked_in_per_sequence).all()


@pytest.mark.parametrize("bound", [5e-324, 1e-300, 1e-46, 1.0, 3.5e38, 1e300, 1.7e308])
@pytest.mark.parametrize("level", LEVELS)
def test_absurd_bounds_give_finite_weights_and_metrics(level, bound):
    rollout = [torch.tensor([-1.0, -INF, -30.0, 3e38]), torch.tensor([-1e-40, -1e9])]
    train = [torch.tensor([-1.5, -1.0, -0.1, -3e38]), torch.tensor([-5.0, NAN])]
    for mode in ("truncate", "clip", "mask"):
        options = {
            "tis_level": level,
            "tis_mode": mode,
            "tis_lower_bound": 0.0,
            "tis_upper_bound": bound,
        }
        config = RolloutCorrectionConfig(use_tis=True, tis_batch_normalize=True, **options)
        inputs = [[x.clone() for x in values] for values in (train, rollout)]
        found = correct(config, *inputs, [torch.ones(4), torch.ones(2)])
        assert all(weights.isfinite().all() and (weights >= 0).all() for weights in found.weights)
        assert all(math.isfinite(value) for value in found.statistics.metrics().values())
        assert all(
            torch.equal(x.nan_to_num(), y.nan_to_num())
            for x, y in zip(inputs[0], train, strict=True)
        )


def test_truncation_keeps_tokens_whose_weight_is_0():
    config = RolloutCorrectionConfig(use_tis=True, tis_upper_bound=1e-46)  # 0 in float32
    corrected = correct(config, torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2))
    assert corrected.weights.tolist() == [[0.0, 0.0]]
    assert corrected.mask.tolist() == [[True, True]]


def test_reject_takes_out_exactly_the_token():
    train = [torch.tensor([-1.0, NAN, -2.0, -INF, -1.0])]
    rollout = [torch.tensor([-1.5, -1.0, -2.0, -INF, INF])]
    clean = correct(TOKEN_IS, [train[0][[0, 2]]], [rollout[0][[0, 2]]], [torch.ones(2)])
    found = correct(TOKEN_IS, train, rollout, [torch.ones(5)])
    assert found.weights[0].tolist() == pytest.approx([math.exp(0.5), 0.0, 1.0, 0.0, 0.0])
    assert found.mask[0].tolist() == [True, False, True, False, False]
    assert found.masked_in_per_sequence.tolist() == [
        5
    ] and found.accepted_per_sequence.tolist() == [2]
    expected = clean.statistics.metrics() | {
        "nonfinite_token_fraction": 0.6,
        "gradient_kept_fraction": 0.4,
    }
    assert found.statistics.metrics() == pytest.approx(expected)


def test_neutral_tokens_have_ratio_one_and_no_part_in_perplexities():
    config = RolloutCorrectionConfig(use_tis=True, nonfinite_policy="neutral")
    found = correct(
        config, [torch.tensor([-1.0, NAN])], [torch.tensor([-1.5, -1.0])], [torch.ones(2)]
    )
    assert found.weights[0].tolist() == pytest.approx([math.exp(0.5), 1.0])
    assert found.mask[0].tolist() == [True, True]
    values = found.statistics.metrics()
    assert values["nonfinite_token_fraction"] == 0.5 and values["gradient_kept_fraction"] == 1.0
    assert values["mismatch_kl"] == pytest.approx(-0.25)
    # One infinite log-prob among tokens of −1 and −1.5 leaves both perplexities as they are without
    # it.
    config = RolloutCorrectionConfig(get_mismatch_metrics=True, nonfinite_policy="neutral")
    expected = {
        "mismatch_training_ppl": math.e,
        "mismatch_rollout_ppl": math.exp(1.5),
        "mismatch_log_ppl_diff": -0.5,
    }
    for train, rollout in ((-INF, -1.5), (-1.0, -INF), (NAN, NAN), (-1e9, -1.0)):
        inputs = (
            torch.tensor([[-1.0, -1.0, train]]),
            torch.tensor([[-1.5, -1.5, rollout]]),
            torch.ones(1, 3),
        )
        values = correct(config, *inputs).statistics.metrics()
        assert {name: values[name] for name in expected} == pytest.approx(expected)
    lost = correct(
        config, torch.full((1, 2), NAN), torch.zeros(1, 2), torch.ones(1, 2)
    ).statistics.metrics()
    assert lost["mismatch_kl"] == 0.0 and lost["nonfinite_token_fraction"] == 1.0
    assert not [name for name in lost if "ppl" in name]


def test_raise_names_sequence_and_position():
    config = RolloutCorrectionConfig(use_tis=True, nonfinite_policy="raise")
    train = [torch.zeros(7), torch.zeros(200)]
    train[1][150] = -INF
    masks = [torch.ones(7), torch.ones(200)]
    rollout = [torch.zeros(7), torch.zeros(200)]
    with pytest.raises(
        ValueError, match=r"sequence 1, position 150: train log-prob -inf, rollout log-prob 0\.0"
    ):
        correct(config, train, rollout, masks)
    masks[1][150] = 0
    assert correct(config, train, rollout, masks).accepted_per_sequence.tolist() == [7, 199]


def test_missing_rollout_log_probs_and_half_precision():
    found = correct(
        TOKEN_IS,
        [torch.zeros(2), torch.zeros(3)],
        [None, torch.zeros(3)],
        [torch.ones(2), torch.ones(3)],
    )
    assert [mask.tolist() for mask in found.mask] == [[False, False], [True, True, True]]
    assert found.statistics.metrics()["nonfinite_token_fraction"] == 0.4
    train, rollout = (
        torch.tensor([-10.0625], dtype=torch.bfloat16),
        torch.tensor([-10.0], dtype=torch.float16),
    )
    found = correct(TOKEN_IS, [train], [rollout], [torch.ones(1)])
    assert found.weights[0].item() == pytest.approx(math.exp(-0.0625), rel=1e-6)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int32, torch.int64, torch.float32, torch.bfloat16]
)
def test_masks_of_any_dtype(dtype):
    mask = [torch.tensor([1, 0, 1]).to(dtype)]
    found = correct(TOKEN_IS, [torch.zeros(3)], [torch.zeros(3)], mask)
    assert found.mask[0].tolist() == [True, False, True] and found.weights[0].tolist() == [
        1.0,
        0.0,
        1.0,
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_of_absurd_log_probs_do_not_overflow(dtype):
    huge = torch.full((300,), torch.finfo(dtype).min, dtype=dtype)
    found = correct(TOKEN_IS, [huge], [huge], [torch.ones(300)], are_densities=True)
    values = found.statistics.metrics()
    assert found.weights[0].tolist() == [1.0] * 300 and values["mismatch_kl"] == 0.0
    assert all(math.isfinite(value) for value in values.values())


SENTINELS = {
    "vLLM": -9999.0,
    "vLLM in bfloat16": -9984.0,
    "others": -1e6,
    "lowest float32": -3.4e38,
}


@pytest.mark.parametrize("sentinel", SENTINELS.values(), ids=SENTINELS)
@pytest.mark.parametrize("other", [-0.5, 0.0, -200.0, -9999.0, -1e6], ids=str)
@pytest.mark.parametrize("side", ["train", "rollout"])
def test_a_sentinel_is_minus_infinity_on_either_side(side, other, sentinel):
    """Each log-prob is judged by itself: the difference to the other one may be anything, 0 included."""
    config = RolloutCorrectionConfig(use_tis=True, use_rs=True, rs_level="sequence")

    def corrected(value):
        pair = [torch.tensor([[-1.0, value]]), torch.tensor([[-1.2, other]])]
        train, rollout = pair if side == "train" else reversed(pair)
        found = correct(config, train, rollout, torch.ones(1, 2))
        by_reference = reference_correct(config, train, rollout, torch.ones(1, 2))
        assert torch.equal(found.mask, by_reference.mask)
        return found

    found, expected = corrected(sentinel), corrected(-INF)
    assert found.weights[0, 1] == 0.0
    assert torch.equal(found.mask, expected.mask)
    assert found.statistics.metrics() == expected.statistics.metrics()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize(
    ("value", "is_legal"), [(-200.0, True), (-9000.0, True), (-9999.0, False)], ids=str
)
def test_low_log_probs_are_legal_in_every_dtype(value, is_legal, dtype):
    low, ordinary = torch.tensor([[value]], dtype=dtype), torch.tensor([[-1.0]], dtype=dtype)
    for pair in ((low, ordinary), (ordinary, low), (low, low)):
        found = correct(TOKEN_IS, *pair, torch.ones(1, 1))
        assert found.mask.item() == is_legal


def test_log_densities_have_no_lowest_value():
    train, rollout = torch.tensor([[-50_000.0, -1e5]]), torch.tensor([[-50_000.5, -1e5]])
    found = correct(TOKEN_IS, train, rollout, torch.ones(1, 2), are_densities=True)
    assert found.weights[0].tolist() == pytest.approx([math.exp(0.5), 1.0])
    assert not correct(TOKEN_IS, train, rollout, torch.ones(1, 2)).mask.any()


def test_empty_batches_and_sequences():
    config = RolloutCorrectionConfig(
        use_tis=True, use_rs=True, rs_veto_threshold=1e-4, tis_batch_normalize=True
    )
    assert correct(config, [], [], []).weights == []
    padded = correct(config, torch.zeros(0, 4), torch.zeros(0, 4), torch.zeros(0, 4))
    assert (padded.weights.dtype, padded.mask.dtype) == (torch.float32, torch.bool)
    assert padded.weights.shape == (0, 4) and padded.statistics.metrics() == {}
    packed = correct(config, torch.zeros(0), torch.zeros(0), torch.zeros(0), lengths=[0, 0])
    assert packed.mask.shape == (0,) and packed.accepted_per_sequence.tolist() == [0, 0]
    masked = correct(config, [torch.zeros(3)], [torch.zeros(3)], [torch.zeros(3)])
    assert masked.weights[0].tolist() == [0, 0, 0] and masked.statistics.metrics() == {}


ROW, ONES = torch.zeros(1, 2), torch.ones(1, 2)
REFUSED = {
    "number of masks": (([torch.zeros(2)], [torch.zeros(2)], []), "numbers of sequences differ"),
    "tokens of a sequence": (
        ([ROW[0]] * 2, [ROW[0], torch.zeros(4)], [ONES[0]] * 2),
        "sequence 1 has these numbers",
    ),
    "shapes": (
        (torch.zeros(2, 3), torch.zeros(2, 4), torch.ones(2, 3)),
        r"rollout_log_probs \(2, 4\)",
    ),
    "tensor and list": (
        (torch.zeros(2, 3), [torch.zeros(3)], torch.ones(2, 3)),
        "pass tensors of one shape",
    ),
    "list and tensor": (
        ([ROW[0]], ROW, [ONES[0]]),
        "rollout_log_probs is Tensor, loss_mask is list",
    ),
    "packed without lengths": ((ROW[0], ROW[0], ONES[0]), r"pass \[B, T\], or \[N\] with lengths"),
    "integers": ((ROW.long(), ROW, ONES), "train_log_probs has dtype torch.int64"),
    "complex": ((ROW, ROW, ONES.to(torch.complex64)), "loss_mask has dtype torch.complex64"),
    "device": (
        (ROW, torch.zeros(1, 2, device="meta"), ONES),
        "rollout_log_probs is torch.strided on meta",
    ),
    "sparse": ((ROW, ROW.to_sparse(), ONES), "pass dense tensors"),
    "numbers": (([ROW[0]], [[0.0, 0.0]], [ONES[0]]), r"rollout_log_probs\[0\] is list"),
    "missing": (([ROW[0], None], [ROW[0]] * 2, [ONES[0]] * 2), r"train_log_probs\[1\] is NoneType"),
    "two dimensions": (([ROW], [ROW[0]], [ONES[0]]), r"train_log_probs\[0\] has shape \(1, 2\)"),
    "nothing": ((None, None, None), "loss_mask is NoneType; pass"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_inputs_that_disagree_or_are_of_another_kind(arguments, message):
    with pytest.raises(ValueError, match=message):
        correct(TOKEN_IS, *arguments)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([1, 4.0], "one whole number per"),
        (5, "one whole number per"),
        ([1, 3], "sum to 4"),
        ([6, -1], "none below 0"),
    ],
    ids=["a float", "a number", "another sum", "a negative length"],
)
def test_lengths_that_do_not_fit(lengths, message):
    with pytest.raises(ValueError, match=message):
        correct(TOKEN_IS, torch.zeros(5), torch.zeros(5), torch.ones(5), lengths=lengths)


@pytest.mark.parametrize("factor", [0.0, -1.0, NAN, INF, 1e-300])
def test_a_mean_weight_that_nothing_can_be_divided_by(factor):
    config = RolloutCorrectionConfig(use_tis=True, tis_batch_normalize=True)
    inputs = torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2)
    weights = correct(
        config, *inputs, global_batch=GlobalBatch(batch_norm_factor=torch.tensor(factor))
    ).weights
    assert weights.tolist() == ([[0.0, 0.0]] if factor == INF else [[1.0, 1.0]])


def test_lengths_of_lists_and_a_configuration_of_verl_are_refused():
    with pytest.raises(ValueError, match="pass lengths with packed"):
        correct(TOKEN_IS, [torch.zeros(2)], [torch.zeros(2)], [torch.ones(2)], lengths=[2])
    with pytest.raises(TypeError, match=r"pass a slime_tis\.RolloutCorrectionConfig"):
        correct(VerlConfig.pg_is(), torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2))
    assert correct(
        VerlConfig.pg_is().to_config(), torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2)
    ).mask.all()


def test_no_gradient_flows():
    config = RolloutCorrectionConfig(use_tis=True, use_rs=True, tis_batch_normalize=True)
    train = torch.tensor([-1.0, -2.0], requires_grad=True)
    found = correct(config, [train], [torch.tensor([-1.5, -2.0])], [torch.ones(2)])
    assert not found.weights[0].requires_grad and not found.statistics.sums.requires_grad
    (found.weights[0] * train).sum().backward()
    assert train.grad is not None and train.grad.tolist() == found.weights[0].tolist()


def test_sum_of_log_ratios_over_long_sequences():
    sequences, tokens, drift = 64, 131_072, 0.01
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.empty(sequences, tokens).exponential_(2.0, generator=generator)
    train = rollout + drift + 0.02 * torch.randn(sequences, tokens, generator=generator)
    exact = (train - rollout).double().sum(1)

    config = RolloutCorrectionConfig(use_tis=True, tis_level="geometric")
    found = correct(config, train, rollout, torch.ones(sequences, tokens, dtype=torch.bool))
    assert (found.sequence_sums.log_ratio - exact).abs().max() <= 1e-5
    assert torch.allclose(found.weights[:, 0].double(), (exact / tokens).exp(), rtol=1e-6)
    assert abs(found.statistics.metrics()["mismatch_kl"] + exact.mean().item() / tokens) <= 1e-8
