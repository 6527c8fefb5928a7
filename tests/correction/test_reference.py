"""`correct` against its one-page reference, that against plain loops, over every layout and split;
the traced core."""

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_tis import (
    GlobalBatch,
    RolloutCorrectionConfig,
    Statistics,
    adaptive_bounds,
    correct,
    functional,
)
from slime_tis.correction import LEVELS, layout
from slime_tis.correction.reference import reference_correct
from tests.correction.expected import expected_correction
from tests.correction.strategies import (
    batches,
    configurations,
    policy_batch,
    policy_configurations,
    tensors,
)

SOME, REST = slice(0, 3), slice(3, 7)


def padded(batch, dtype=torch.float64):
    """Train and rollout log-probs [B, T], NaN in the padding, and the mask."""
    width = max((len(x) for x in batch[0]), default=0) + 1
    fill = (math.nan, math.nan, False)
    dtypes = (dtype, dtype, torch.bool)
    return [
        torch.tensor([[*x, *[f] * (width - len(x))] for x in xs], dtype=d).view(len(xs), width)
        for xs, f, d in zip(batch, fill, dtypes, strict=True)
    ]


def assert_metrics(found, expected, deviation):
    """Equal but for rounding; `deviation` is that of the standard deviations, which small weights
    lose digits of."""
    found, expected = dict(found), dict(expected)
    for name in [name for name in expected if name.endswith("weight_std")]:
        assert found.pop(name) == pytest.approx(expected.pop(name), rel=1e-6, abs=deviation)
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-7)


def assert_agrees(config, batch, reference):
    found = correct(config, *padded(batch))
    torch.testing.assert_close(found.weights.double(), reference.weights, rtol=2e-6, atol=1e-7)
    assert torch.equal(found.mask, reference.mask)
    assert found.accepted_per_sequence.tolist() == reference.mask.sum(1).tolist()
    assert found.masked_in_per_sequence.tolist() == [sum(mask) for mask in batch[2]]


def assert_is(reference, expected):
    for weights, mask, row, row_mask in zip(
        reference.weights, reference.mask, expected.weights, expected.mask, strict=True
    ):
        assert weights[: len(row)].tolist() == pytest.approx(row, rel=1e-9, abs=1e-12)
        assert (
            mask[: len(row)].tolist() == row_mask
            and not mask[len(row) :].any()
            and not weights[len(row) :].any()
        )


@settings(max_examples=300)
@given(configurations(), batches())
def test_finite_batches(config, batch):
    reference = reference_correct(config, *padded(batch))
    assert_agrees(config, batch, reference)
    assert_metrics(correct(config, *padded(batch)).statistics.metrics(), reference.metrics, 1e-6)
    expected = expected_correction(config, *batch)
    assert_is(reference, expected)
    assert_metrics(reference.metrics, expected.metrics, 1e-7)


@settings(max_examples=150)
@given(configurations(), batches(wild=True))
def test_batches_with_non_finite_values(config, batch):
    reference = reference_correct(config, *padded(batch))
    assert_agrees(config, batch, reference)
    assert_is(reference, expected_correction(config, *batch))


@settings(max_examples=150)
@given(policy_configurations(), st.integers(0, 1000))
def test_the_current_policy_and_advantages(config, seed):
    """Padded, packed, in lists, in micro-batches, and as the traced function."""
    batch = policy_batch(seed)
    reference = reference_correct(config, **batch)
    found = correct(config, **batch)
    torch.testing.assert_close(found.weights.double(), reference.weights, rtol=2e-6, atol=1e-7)
    assert torch.equal(found.mask, reference.mask)
    metrics = found.statistics.metrics()
    assert_metrics(metrics, reference.metrics, 1e-6)
    lists = correct(config, **{name: list(x) for name, x in batch.items()})
    packed = correct(config, **{name: x.reshape(-1) for name, x in batch.items()}, lengths=[19] * 7)
    for weights, mask in (
        (packed.weights.view(7, 19), packed.mask.view(7, 19)),
        map(torch.stack, (lists.weights, lists.mask)),
    ):
        torch.testing.assert_close(weights, found.weights, rtol=1e-6, atol=0)
        assert torch.equal(mask, found.mask)
    known = {"global_batch": found.global_batch}
    parts = [
        correct(config, **{name: x[rows] for name, x in batch.items()}, **known)
        for rows in (SOME, REST)
    ]
    torch.testing.assert_close(
        torch.cat([part.weights for part in parts]), found.weights, rtol=1e-6, atol=0
    )
    assert torch.equal(torch.cat([part.mask for part in parts]), found.mask)
    assert_metrics(parts[0].statistics.merge(parts[1].statistics).metrics(), metrics, 1e-9)
    if not config.batch_options:
        traced = functional.correct(config, **batch)
        torch.testing.assert_close(traced.weights, found.weights, rtol=2e-6, atol=1e-7)
        assert torch.equal(traced.mask, found.mask)


def test_the_reference_refuses_non_finite_tokens_too():
    config = RolloutCorrectionConfig(use_tis=True, nonfinite_policy="raise")
    train, mask = torch.tensor([[0.0, math.nan]]), torch.tensor([[1, 1]])
    with pytest.raises(
        ValueError, match="a log-prob is not finite; fix the sample or choose --nonfinite-policy"
    ):
        reference_correct(config, train, torch.zeros(1, 2), mask)
    assert reference_correct(
        config, train, torch.zeros(1, 2), torch.tensor([[1, 0]])
    ).weights.tolist() == [[1, 0]]


def assert_same(a, b):
    """(weights, mask, statistics) of both, within 1e-6."""
    for x, y in zip(a[0], b[0], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)
    assert [x.tolist() for x in a[1]] == [x.tolist() for x in b[1]]
    assert a[2].metrics() == pytest.approx(b[2].metrics(), rel=1e-6, abs=1e-6)


@settings(max_examples=100)
@given(configurations(), batches(max_sequences=8), st.integers(0, 40))
def test_layout_padding_and_chunks(config, batch, extra):
    inputs = tensors(batch)
    lengths = [len(x) for x in inputs[0]]
    listed = correct(config, *inputs)
    expected = (listed.weights, listed.mask, listed.statistics)
    with mock.patch.object(layout, "CPU_CHUNK_TOKENS", 16):
        chunked = correct(config, *inputs)
    assert_same(expected, (chunked.weights, chunked.mask, chunked.statistics))
    if lengths:
        packed = correct(config, *(torch.cat(x) for x in inputs), lengths=lengths)
        assert_same(
            expected, (packed.weights.split(lengths), packed.mask.split(lengths), packed.statistics)
        )
        padded = correct(config, *(pad(x, max(lengths) + extra) for x in inputs))
        rows = [[x[i, :n] for i, n in enumerate(lengths)] for x in (padded.weights, padded.mask)]
        assert_same(expected, (*rows, padded.statistics))


def pad(sequences, width):
    """[B, width], with junk in the padding of floats and 0 in that of masks."""
    junk = 0 if sequences[0].dtype == torch.bool else torch.nan
    out = torch.full((len(sequences), width), junk, dtype=sequences[0].dtype)
    for row, sequence in zip(out, sequences, strict=True):
        row[: len(sequence)] = sequence
    return out


@settings(max_examples=100)
@given(configurations(), batches(), st.integers(0, 5))
def test_micro_batches_merge(config, batch, cut):
    inputs = tensors(batch)
    whole = correct(config, *inputs)
    parts = [[x[:cut] for x in inputs], [x[cut:] for x in inputs]]
    known = GlobalBatch(second_moment_limit=whole.global_batch.second_moment_limit)
    if config.adaptive:
        bounds = adaptive_bounds(config, [correct(config, *part).sequence_sums for part in parts])
        known = replace(known, adaptive_bounds=bounds)
    statistics = Statistics.empty(config)
    for part in parts:
        first = correct(config, *part, global_batch=known)
        statistics = statistics.merge(first.statistics)
    known = replace(known, batch_norm_factor=statistics.batch_norm_factor())
    found = [correct(config, *part, global_batch=known) for part in parts]
    weights = [w for f in found for w in f.weights]
    mask = [m for f in found for m in f.mask]
    assert_same((whole.weights, whole.mask, whole.statistics), (weights, mask, statistics))


@pytest.mark.parametrize("level", LEVELS)
def test_rows_of_long_sequences_join(level):
    """Sequences longer than a row, of several row widths, against the reference, which has no
    rows."""
    generator = torch.Generator().manual_seed(1)
    config = RolloutCorrectionConfig(use_tis=True, tis_level=level, tis_upper_bound=1e6)
    for lengths in ([3000, 1, 129, 128, 0], [700, 650, 3], [40, 300]):
        delta = [0.02 * torch.randn(n, generator=generator) for n in lengths]
        mask = [torch.rand(n, generator=generator) > 0.2 for n in lengths]
        found = correct(config, delta, [torch.zeros(n) for n in lengths], mask)
        for d, m, weights in zip(delta, mask, found.weights, strict=True):
            reference = reference_correct(config, d.double()[None], torch.zeros(1, len(d)), m[None])
            torch.testing.assert_close(weights, reference.weights[0].float(), rtol=2e-6, atol=1e-6)


OPTIONS = {
    "token truncate": {"use_tis": True, "tis_upper_bound": 1.3},
    "segment clip": {
        "use_tis": True,
        "tis_level": "segment",
        "tis_mode": "clip",
        "tis_upper_bound": 1.3,
    },
    "normalized sequence": {"use_tis": True, "tis_level": "sequence", "tis_batch_normalize": True},
    "geometric": {
        "use_rs": True,
        "rs_level": "geometric",
        "rs_lower_bound": 0.7,
        "rs_upper_bound": 1.2,
    },
    "veto": {"use_tis": True, "rs_veto_threshold": 0.2, "rs_veto_upper_threshold": 4.0},
    "kpop": {"divergence_mask": "binary_kl_max", "divergence_mask_direction": "both"},
    "binary_tv away": {"divergence_mask": "binary_tv", "divergence_mask_bound": 0.05},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_fx_and_compile_and_vmap_trace_it(name):
    config = RolloutCorrectionConfig(**OPTIONS[name])

    def both(*inputs):
        train, rollout, mask, current, advantages = inputs
        return tuple(
            functional.correct(
                config, train, rollout, mask, current_log_probs=current, advantages=advantages
            )
        )

    inputs = [x.float() for x in policy_batch().values()]
    expected = both(*inputs)
    for traced in (
        torch.fx.symbolic_trace(both),
        torch.compile(both, fullgraph=True, backend="eager"),
    ):
        for one, other in zip(traced(*inputs), expected, strict=True):
            assert torch.equal(one, other)
    if not config.tis_batch_normalize:
        for one, other in zip(torch.func.vmap(both)(*inputs), expected, strict=True):
            torch.testing.assert_close(one, other)


def test_no_gradient_flows_through_weights():
    config = RolloutCorrectionConfig(use_tis=True)
    train, rollout, mask, *_ = policy_batch().values()
    train[1, 2] = -1.0

    def loss(log_probs):
        found = functional.correct(config, log_probs, rollout, mask)
        return (found.weights * torch.where(found.mask, log_probs, 0.0)).sum()

    gradient = torch.func.grad(loss)(train)
    found = functional.correct(config, train, rollout, mask)
    torch.testing.assert_close(gradient, (found.weights * found.mask).double())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param(
            {"use_rs": True, "rs_level": "geometric", "rs_z_score": 3.0}, "rs_z_score", id="z-score"
        ),
        pytest.param({"rs_second_moment_bound": 0.1}, "rs_second_moment_bound", id="second moment"),
        pytest.param({"divergence_mask": "binary_tv"}, "advantages", id="advantages"),
    ],
)
def test_options_on_the_batch_are_refused(options, words):
    train, rollout, mask, *_ = policy_batch().values()
    with pytest.raises(ValueError, match=words):
        functional.correct(RolloutCorrectionConfig(**options), train, rollout, mask)
