"""The order of sequences, padding, layout and micro-batches change nothing."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_tis import GlobalBatch, RolloutCorrectionConfig, Statistics, adaptive_bounds, correct
from slime_tis.correction import LEVELS, layout
from slime_tis.correction.reference import reference_correct
from tests.correction.strategies import batches, configurations, tensors

Inputs = tuple[list, list, list]


def assert_same(a, b):
    """(weights, mask, statistics) of both, within 1e-6."""
    for x, y in zip(a[0], b[0], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)
    assert [x.tolist() for x in a[1]] == [x.tolist() for x in b[1]]
    assert a[2].metrics() == pytest.approx(b[2].metrics(), rel=1e-6, abs=1e-6)


@settings(max_examples=100)
@given(configurations(), batches(), st.integers(0, 40))
def test_layout_and_padding(config, batch, extra):
    inputs = tensors(batch)
    lengths = [len(x) for x in inputs[0]]
    listed = correct(config, *inputs)
    expected = (listed.weights, listed.mask, listed.statistics)
    if lengths:
        packed = correct(config, *(torch.cat(x) for x in inputs), lengths=lengths)
        assert_same(expected, (packed.weights.split(lengths), packed.mask.split(lengths), packed.statistics))
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


@settings(max_examples=60)
@given(configurations(), batches(max_sequences=8))
def test_chunks(config, batch):
    inputs = tensors(batch)
    whole = correct(config, *inputs)
    usual = layout.CPU_CHUNK_TOKENS
    try:
        layout.CPU_CHUNK_TOKENS = 16
        chunked = correct(config, *inputs)
    finally:
        layout.CPU_CHUNK_TOKENS = usual
    assert_same((whole.weights, whole.mask, whole.statistics), (chunked.weights, chunked.mask, chunked.statistics))


@pytest.mark.parametrize("level", LEVELS)
def test_rows_of_long_sequences_join(level):
    """Sequences longer than a row, of several row widths, against the reference, which has no rows."""
    generator = torch.Generator().manual_seed(1)
    config = RolloutCorrectionConfig(use_tis=True, tis_level=level, tis_upper_bound=1e6)
    for lengths in ([3000, 1, 129, 128, 0], [700, 650, 3], [40, 300]):
        delta = [0.02 * torch.randn(n, generator=generator) for n in lengths]
        mask = [torch.rand(n, generator=generator) > 0.2 for n in lengths]
        found = correct(config, delta, [torch.zeros(n) for n in lengths], mask)
        for d, m, weights in zip(delta, mask, found.weights, strict=True):
            reference = reference_correct(config, d.double()[None], torch.zeros(1, len(d)), m[None])
            torch.testing.assert_close(weights, reference.weights[0].float(), rtol=2e-6, atol=1e-6)
