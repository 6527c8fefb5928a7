"""No input gives a non-finite weight or metric, and wrong inputs are refused with a message."""

import math
import os
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_tis import Correction, GlobalBatch, RolloutCorrectionConfig, Statistics, correct
from slime_tis.correction.modes import LEVELS, MODES, Level, ModeName
from slime_tis.correction.reference import reference_correct
from slime_tis.integrations.verl import RolloutCorrectionConfig as VerlConfig
from tests.correction.strategies import batches, configurations

EXAMPLES = int(os.environ.get("SLIME_TIS_SAFETY_EXAMPLES", "300"))
TOKEN_IS = RolloutCorrectionConfig(use_tis=True)
NAN, INF = math.nan, math.inf


Batch = tuple[list[list[float]], list[list[float]], list[list[int]]]
"""Train log-probs, rollout log-probs and loss masks of the sequences."""
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def corrected_in(dtype: torch.dtype, config: RolloutCorrectionConfig, batch: Batch) -> Correction:
    """The correction of a batch whose log-probs are stored in `dtype`."""
    train, rollout, mask = batch
    return correct(
        config,
        [torch.tensor(row, dtype=dtype) for row in train],
        [torch.tensor(row, dtype=dtype) for row in rollout],
        [torch.tensor(row, dtype=torch.int64) for row in mask],
    )


def are_finite(values: Iterable[float]) -> bool:
    return all(math.isfinite(value) for value in values)


@settings(max_examples=EXAMPLES)
@given(configurations(), batches(wild=True), DTYPES)
def test_weights_of_wild_batches_are_finite(config, batch, dtype):
    for weights in corrected_in(dtype, config, batch).weights:
        assert weights.dtype == torch.float32
        assert torch.isfinite(weights).all()
        assert (weights >= 0).all()


@settings(max_examples=EXAMPLES)
@given(configurations(), batches(wild=True), DTYPES)
def test_no_masked_token_of_a_wild_batch_is_accepted(config, batch, dtype):
    correction = corrected_in(dtype, config, batch)
    for accepted, original in zip(correction.mask, batch[2], strict=True):
        assert accepted.dtype == torch.bool
        assert not (accepted & ~torch.tensor(original, dtype=torch.bool)).any()
    assert (correction.accepted_per_sequence <= correction.masked_in_per_sequence).all()


@settings(max_examples=EXAMPLES)
@given(configurations(), batches(wild=True), DTYPES)
def test_metrics_of_wild_batches_are_finite(config, batch, dtype):
    statistics = corrected_in(dtype, config, batch).statistics
    merged = statistics.merge(Statistics.empty(config)).merge(statistics)
    assert are_finite(statistics.metrics().values())
    assert are_finite(merged.metrics().values())


@settings(max_examples=EXAMPLES)
@given(configurations(), batches(wild=True), DTYPES)
def test_the_mean_of_a_wild_batch_has_a_finite_gradient(config, batch, dtype):
    losses = [torch.ones(len(row), requires_grad=True) for row in batch[0]]
    mean = corrected_in(dtype, config, batch).mean(losses)
    assert mean.isfinite().all()
    if losses:
        gradients = torch.autograd.grad(mean, losses)
        assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize(
    "bound", [5e-324, 1e-300, 1e-46, 1.0, 3.5e38, 1e300, 1.7e308], ids="bound {}".format
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", LEVELS)
class TestAbsurdBounds:
    TRAIN = ([-1.5, -1.0, -0.1, -3e38], [-5.0, NAN])
    ROLLOUT = ([-1.0, -INF, -30.0, 3e38], [-1e-40, -1e9])

    @pytest.fixture
    def train(self) -> list[torch.Tensor]:
        return [torch.tensor(row) for row in self.TRAIN]

    @pytest.fixture
    def correction(
        self, train: list[torch.Tensor], level: Level, mode: ModeName, bound: float
    ) -> Correction:
        config = RolloutCorrectionConfig(
            use_tis=True,
            tis_batch_normalize=True,
            tis_level=level,
            tis_mode=mode,
            tis_lower_bound=0.0,
            tis_upper_bound=bound,
        )
        rollout = [torch.tensor(row) for row in self.ROLLOUT]
        return correct(config, train, rollout, [torch.ones(4), torch.ones(2)])

    def test_weights_are_finite(self, correction):
        for weights in correction.weights:
            assert weights.isfinite().all()
            assert (weights >= 0).all()

    def test_metrics_are_finite(self, correction):
        assert are_finite(correction.statistics.metrics().values())

    def test_the_log_probs_passed_are_unchanged(self, train, correction):
        expected = [torch.tensor(row) for row in self.TRAIN]
        torch.testing.assert_close(train, expected, rtol=0, atol=0, equal_nan=True)


def test_truncation_keeps_tokens_whose_weight_is_0():
    config = RolloutCorrectionConfig(use_tis=True, tis_upper_bound=1e-46)  # 0 in float32
    corrected = correct(config, torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2))
    assert corrected.weights.tolist() == [[0.0, 0.0]]
    assert corrected.mask.tolist() == [[True, True]]


class TestReject:
    """Tokens 0 and 2 are finite; the three others have a NaN or an infinity."""

    TRAIN = torch.tensor([-1.0, NAN, -2.0, -INF, -1.0])
    ROLLOUT = torch.tensor([-1.5, -1.0, -2.0, -INF, INF])
    FINITE = (0, 2)

    @pytest.fixture
    def correction(self) -> Correction:
        return correct(TOKEN_IS, [self.TRAIN], [self.ROLLOUT], [torch.ones(5)])

    def test_rejected_tokens_have_weight_0(self, correction):
        expected = [math.exp(0.5), 0.0, 1.0, 0.0, 0.0]
        assert correction.weights[0].tolist() == pytest.approx(expected)

    def test_exactly_the_non_finite_tokens_are_rejected(self, correction):
        assert correction.mask[0].tolist() == [True, False, True, False, False]
        assert correction.masked_in_per_sequence.tolist() == [5]
        assert correction.accepted_per_sequence.tolist() == [2]

    def test_metrics_are_those_of_the_finite_tokens(self, correction):
        finite = list(self.FINITE)
        clean = correct(TOKEN_IS, [self.TRAIN[finite]], [self.ROLLOUT[finite]], [torch.ones(2)])
        expected = clean.statistics.metrics() | {
            "nonfinite_token_fraction": 0.6,
            "gradient_kept_fraction": 0.4,
        }
        assert correction.statistics.metrics() == pytest.approx(expected)


NEUTRAL_IS = RolloutCorrectionConfig(use_tis=True, nonfinite_policy="neutral")


@pytest.fixture
def one_neutral_token() -> Correction:
    """A token with log-ratio 0.5, and one whose train log-prob is NaN."""
    train = [torch.tensor([-1.0, NAN])]
    rollout = [torch.tensor([-1.5, -1.0])]
    return correct(NEUTRAL_IS, train, rollout, [torch.ones(2)])


def test_neutral_tokens_have_ratio_one(one_neutral_token):
    assert one_neutral_token.weights[0].tolist() == pytest.approx([math.exp(0.5), 1.0])
    assert one_neutral_token.mask[0].tolist() == [True, True]


def test_metrics_count_neutral_tokens_as_kept(one_neutral_token):
    values = one_neutral_token.statistics.metrics()
    assert values["nonfinite_token_fraction"] == 0.5
    assert values["gradient_kept_fraction"] == 1.0
    assert values["mismatch_kl"] == pytest.approx(-0.25)


@pytest.mark.parametrize(
    ("train", "rollout"),
    [(-INF, -1.5), (-1.0, -INF), (NAN, NAN), (-1e9, -1.0)],
    ids=["train -inf", "rollout -inf", "both NaN", "train below the lowest"],
)
def test_neutral_tokens_have_no_part_in_perplexities(train, rollout):
    """The other tokens have log-probs of -1 and -1.5."""
    config = RolloutCorrectionConfig(get_mismatch_metrics=True, nonfinite_policy="neutral")
    train_log_probs = torch.tensor([[-1.0, -1.0, train]])
    rollout_log_probs = torch.tensor([[-1.5, -1.5, rollout]])
    correction = correct(config, train_log_probs, rollout_log_probs, torch.ones(1, 3))
    values = correction.statistics.metrics()
    assert values["mismatch_training_ppl"] == pytest.approx(math.e)
    assert values["mismatch_rollout_ppl"] == pytest.approx(math.exp(1.5))
    assert values["mismatch_log_ppl_diff"] == pytest.approx(-0.5)


def test_a_batch_of_only_neutral_tokens_has_no_perplexity():
    config = RolloutCorrectionConfig(get_mismatch_metrics=True, nonfinite_policy="neutral")
    correction = correct(config, torch.full((1, 2), NAN), torch.zeros(1, 2), torch.ones(1, 2))
    values = correction.statistics.metrics()
    assert values["mismatch_kl"] == 0.0
    assert values["nonfinite_token_fraction"] == 1.0
    assert not [name for name in values if "ppl" in name]


class TestRaise:
    """Token 150 of the second sequence has an infinite train log-prob."""

    CONFIG = RolloutCorrectionConfig(use_tis=True, nonfinite_policy="raise")

    @pytest.fixture
    def train(self) -> list[torch.Tensor]:
        train = [torch.zeros(7), torch.zeros(200)]
        train[1][150] = -INF
        return train

    def test_the_error_locates_the_token(self, train):
        rollout = [torch.zeros(7), torch.zeros(200)]
        masks = [torch.ones(7), torch.ones(200)]
        message = r"sequence 1, position 150: train log-prob -inf, rollout log-prob 0\.0"
        with pytest.raises(ValueError, match=message):
            correct(self.CONFIG, train, rollout, masks)

    def test_a_masked_token_raises_nothing(self, train):
        rollout = [torch.zeros(7), torch.zeros(200)]
        masks = [torch.ones(7), torch.ones(200)]
        masks[1][150] = 0
        correction = correct(self.CONFIG, train, rollout, masks)
        assert correction.accepted_per_sequence.tolist() == [7, 199]


def test_a_sequence_without_rollout_log_probs_is_rejected():
    train = [torch.zeros(2), torch.zeros(3)]
    masks = [torch.ones(2), torch.ones(3)]
    correction = correct(TOKEN_IS, train, [None, torch.zeros(3)], masks)
    assert [mask.tolist() for mask in correction.mask] == [[False, False], [True, True, True]]
    assert correction.statistics.metrics()["nonfinite_token_fraction"] == 0.4


def test_the_ratio_of_half_precision_log_probs_is_exact():
    train = torch.tensor([-10.0625], dtype=torch.bfloat16)
    rollout = torch.tensor([-10.0], dtype=torch.float16)
    correction = correct(TOKEN_IS, [train], [rollout], [torch.ones(1)])
    assert correction.weights[0].item() == pytest.approx(math.exp(-0.0625), rel=1e-6)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int32, torch.int64, torch.float32, torch.bfloat16], ids=str
)
def test_masks_of_any_dtype(dtype):
    mask = [torch.tensor([1, 0, 1]).to(dtype)]
    correction = correct(TOKEN_IS, [torch.zeros(3)], [torch.zeros(3)], mask)
    assert correction.mask[0].tolist() == [True, False, True]
    assert correction.weights[0].tolist() == [1.0, 0.0, 1.0]


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
OTHERS = [-0.5, 0.0, -200.0, -9999.0, -1e6]


class TestSentinels:
    """Each log-prob is judged by itself. The difference to the other one may be anything, also
    0."""

    CONFIG = RolloutCorrectionConfig(use_tis=True, use_rs=True, rs_level="sequence")

    def inputs(
        self, side: str, value: float, other: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Train log-probs, rollout log-probs and mask, with `value` on one side."""
        judged = torch.tensor([[-1.0, value]])
        opposite = torch.tensor([[-1.2, other]])
        if side == "train":
            return judged, opposite, torch.ones(1, 2)
        return opposite, judged, torch.ones(1, 2)

    @pytest.mark.parametrize("sentinel", SENTINELS.values(), ids=SENTINELS)
    @pytest.mark.parametrize("other", OTHERS, ids=str)
    @pytest.mark.parametrize("side", ["train", "rollout"])
    def test_a_sentinel_is_minus_infinity(self, side, other, sentinel):
        correction = correct(self.CONFIG, *self.inputs(side, sentinel, other))
        expected = correct(self.CONFIG, *self.inputs(side, -INF, other))
        assert correction.weights[0, 1] == 0.0
        assert torch.equal(correction.mask, expected.mask)
        assert correction.statistics.metrics() == expected.statistics.metrics()

    @pytest.mark.parametrize(
        "value", [*SENTINELS.values(), -INF], ids=[*SENTINELS, "minus infinity"]
    )
    @pytest.mark.parametrize("other", OTHERS, ids=str)
    @pytest.mark.parametrize("side", ["train", "rollout"])
    def test_the_reference_rejects_the_same_tokens(self, side, other, value):
        inputs = self.inputs(side, value, other)
        correction = correct(self.CONFIG, *inputs)
        assert torch.equal(correction.mask, reference_correct(self.CONFIG, *inputs).mask)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize(
    ("train", "rollout"),
    [(True, False), (False, True), (True, True)],
    ids=["train is low", "rollout is low", "both are low"],
)
@pytest.mark.parametrize(
    ("value", "is_legal"), [(-200.0, True), (-9000.0, True), (-9999.0, False)], ids=str
)
def test_low_log_probs_are_legal_in_every_dtype(value, is_legal, train, rollout, dtype):
    low = torch.tensor([[value]], dtype=dtype)
    ordinary = torch.tensor([[-1.0]], dtype=dtype)
    train_log_probs = low if train else ordinary
    rollout_log_probs = low if rollout else ordinary
    correction = correct(TOKEN_IS, train_log_probs, rollout_log_probs, torch.ones(1, 1))
    assert correction.mask.item() == is_legal


def test_log_densities_have_no_lowest_value():
    train, rollout = torch.tensor([[-50_000.0, -1e5]]), torch.tensor([[-50_000.5, -1e5]])
    found = correct(TOKEN_IS, train, rollout, torch.ones(1, 2), are_densities=True)
    assert found.weights[0].tolist() == pytest.approx([math.exp(0.5), 1.0])
    assert not correct(TOKEN_IS, train, rollout, torch.ones(1, 2)).mask.any()


EVERY_OPTION = RolloutCorrectionConfig(
    use_tis=True, use_rs=True, rs_veto_threshold=1e-4, tis_batch_normalize=True
)


def test_an_empty_list_of_sequences():
    assert correct(EVERY_OPTION, [], [], []).weights == []


def test_a_padded_batch_without_sequences():
    empty = torch.zeros(0, 4)
    correction = correct(EVERY_OPTION, empty, empty, empty)
    assert correction.weights.dtype == torch.float32
    assert correction.mask.dtype == torch.bool
    assert correction.weights.shape == (0, 4)
    assert correction.statistics.metrics() == {}


def test_packed_sequences_without_tokens():
    empty = torch.zeros(0)
    correction = correct(EVERY_OPTION, empty, empty, empty, lengths=[0, 0])
    assert correction.mask.shape == (0,)
    assert correction.accepted_per_sequence.tolist() == [0, 0]


def test_a_sequence_without_trained_tokens():
    correction = correct(EVERY_OPTION, [torch.zeros(3)], [torch.zeros(3)], [torch.zeros(3)])
    assert correction.weights[0].tolist() == [0, 0, 0]
    assert correction.statistics.metrics() == {}


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


def test_lengths_of_lists_are_refused():
    two = [torch.zeros(2)]
    with pytest.raises(ValueError, match="pass lengths with packed"):
        correct(TOKEN_IS, two, two, [torch.ones(2)], lengths=[2])


def test_a_configuration_of_verl_is_refused():
    with pytest.raises(TypeError, match=r"pass a slime_tis\.RolloutCorrectionConfig"):
        correct(VerlConfig.pg_is(), ROW, ROW, ONES)


def test_a_converted_configuration_of_verl_is_accepted():
    assert correct(VerlConfig.pg_is().to_config(), ROW, ROW, ONES).mask.all()


def test_no_gradient_flows():
    config = RolloutCorrectionConfig(use_tis=True, use_rs=True, tis_batch_normalize=True)
    train = torch.tensor([-1.0, -2.0], requires_grad=True)
    correction = correct(config, [train], [torch.tensor([-1.5, -2.0])], [torch.ones(2)])
    assert not correction.weights[0].requires_grad
    assert not correction.statistics.sums.requires_grad
    (correction.weights[0] * train).sum().backward()
    assert train.grad is not None
    assert train.grad.tolist() == correction.weights[0].tolist()


@pytest.mark.parametrize(
    ("drift", "noise"),
    [(0.01, 0.02), (0.0, 1.0), (1.0, 1.0), (0.0, 5.0)],
    ids=["small", "noise", "drift", "large"],
)
def test_error_of_long_sums_is_relative_to_the_log_ratios(drift, noise):
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.empty(8, 131_072).exponential_(2.0, generator=generator)
    train = rollout + drift + noise * torch.randn(rollout.shape, generator=generator)
    exact = train.double() - rollout.double()

    config = RolloutCorrectionConfig(use_tis=True, tis_level="geometric")
    found = correct(config, train, rollout, torch.ones_like(rollout))
    error = (found.sequence_sums.log_ratio - exact.sum(1)).abs()
    assert (error <= 1e-8 * exact.abs().sum(1)).all()


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
