"""`correct` against its one-page reference, that against plain loops, over every layout and split;
the traced core."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

from slime_tis import (
    GlobalBatch,
    RolloutCorrectionConfig,
    Statistics,
    adaptive_bounds,
    correct,
    functional,
)
from slime_tis.correction import LEVELS, layout
from slime_tis.correction.api import Correction
from slime_tis.correction.reference import ReferenceCorrection, reference_correct
from tests.correction.expected import Expected, Masks, Rows, expected_correction
from tests.correction.strategies import (
    batches,
    configurations,
    policy_batch,
    policy_configurations,
    tensors,
)

Batch = tuple[Rows, Rows, Masks]
"""Train log-probs, rollout log-probs and mask, one list for each sequence."""


def padded_rows(
    rows: Sequence[Sequence[Any]], width: int, fill: float | bool, dtype: torch.dtype
) -> torch.Tensor:
    """[B, width], with `fill` in the padding."""
    filled = [[*row, *[fill] * (width - len(row))] for row in rows]
    return torch.tensor(filled, dtype=dtype).view(len(rows), width)


def padded(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Train and rollout log-probs [B, T] in float64, NaN in the padding, and the mask."""
    train, rollout, mask = batch
    width = max((len(row) for row in train), default=0) + 1
    return (
        padded_rows(train, width, math.nan, torch.float64),
        padded_rows(rollout, width, math.nan, torch.float64),
        padded_rows(mask, width, False, torch.bool),
    )


def assert_metrics(
    metrics: Mapping[str, float], expected: Mapping[str, float], deviation: float
) -> None:
    """Equal within rounding.

    `deviation` is the tolerance of standard deviations, whose digits small weights lose.
    """
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        tolerance = deviation if name.endswith("weight_std") else 1e-7
        assert metrics[name] == pytest.approx(value, rel=1e-6, abs=tolerance), name


def assert_agrees(corrected: Correction[torch.Tensor], reference: ReferenceCorrection) -> None:
    weights = corrected.weights.double()
    torch.testing.assert_close(weights, reference.weights, rtol=2e-6, atol=1e-7)
    assert torch.equal(corrected.mask, reference.mask)
    assert corrected.accepted_per_sequence.tolist() == reference.mask.sum(1).tolist()


def assert_equals_loops(reference: ReferenceCorrection, expected: Expected) -> None:
    """Weights and mask are those of the loops, and 0 in the padding."""
    rows = zip(reference.weights, reference.mask, expected.weights, expected.mask, strict=True)
    for weights, mask, expected_weights, expected_mask in rows:
        length = len(expected_mask)
        assert weights[:length].tolist() == pytest.approx(expected_weights, rel=1e-9, abs=1e-12)
        assert mask[:length].tolist() == expected_mask
        assert not mask[length:].any()
        assert not weights[length:].any()


@settings(max_examples=200)
@given(configurations(), batches())
def test_finite_batches_equal_the_reference(config, batch):
    corrected = correct(config, *padded(batch))
    reference = reference_correct(config, *padded(batch))
    assert_agrees(corrected, reference)
    assert_metrics(corrected.statistics.metrics(), reference.metrics, 1e-6)


@settings(max_examples=200)
@given(configurations(), batches())
def test_the_reference_equals_plain_loops(config, batch):
    reference = reference_correct(config, *padded(batch))
    expected = expected_correction(config, *batch)
    assert_equals_loops(reference, expected)
    assert_metrics(reference.metrics, expected.metrics, 1e-7)


@settings(max_examples=20)
@given(configurations(), batches())
def test_trained_tokens_are_counted_per_sequence(config, batch):
    corrected = correct(config, *padded(batch))
    assert corrected.masked_in_per_sequence.tolist() == [sum(mask) for mask in batch[2]]


@settings(max_examples=100)
@given(configurations(), batches(wild=True))
def test_non_finite_batches_equal_the_reference(config, batch):
    assert_agrees(correct(config, *padded(batch)), reference_correct(config, *padded(batch)))


@settings(max_examples=100)
@given(configurations(), batches(wild=True))
def test_the_reference_of_non_finite_batches_equals_loops(config, batch):
    reference = reference_correct(config, *padded(batch))
    assert_equals_loops(reference, expected_correction(config, *batch))


@settings(max_examples=150)
@given(policy_configurations(), st.integers(0, 1000))
def test_corrections_of_the_policy_equal_the_reference(config, seed):
    batch = policy_batch(seed)
    corrected = correct(config, **batch)
    reference = reference_correct(config, **batch)
    assert_agrees(corrected, reference)
    assert_metrics(corrected.statistics.metrics(), reference.metrics, 1e-6)


@settings(max_examples=40)
@given(policy_configurations(), st.integers(0, 1000))
def test_lists_of_the_policy_equal_the_padded_batch(config, seed):
    batch = policy_batch(seed)
    corrected = correct(config, **batch)
    lists = {name: list(values) for name, values in batch.items()}
    listed = correct(config, **lists)
    torch.testing.assert_close(torch.stack(listed.weights), corrected.weights, rtol=1e-6, atol=0)
    assert torch.equal(torch.stack(listed.mask), corrected.mask)


@settings(max_examples=40)
@given(policy_configurations(), st.integers(0, 1000))
def test_packed_sequences_of_the_policy_equal_the_padded_batch(config, seed):
    batch = policy_batch(seed)
    corrected = correct(config, **batch)
    flat = {name: values.reshape(-1) for name, values in batch.items()}
    packed = correct(config, **flat, lengths=[19] * 7)
    weights = packed.weights.view(7, 19)
    torch.testing.assert_close(weights, corrected.weights, rtol=1e-6, atol=0)
    assert torch.equal(packed.mask.view(7, 19), corrected.mask)


@settings(max_examples=40)
@given(policy_configurations(), st.integers(0, 1000))
def test_micro_batches_of_the_policy_merge(config, seed):
    batch = policy_batch(seed)
    corrected = correct(config, **batch)
    parts = []
    for rows in (slice(0, 3), slice(3, 7)):
        micro_batch = {name: values[rows] for name, values in batch.items()}
        parts.append(correct(config, **micro_batch, global_batch=corrected.global_batch))
    weights = torch.cat([part.weights for part in parts])
    torch.testing.assert_close(weights, corrected.weights, rtol=1e-6, atol=0)
    assert torch.equal(torch.cat([part.mask for part in parts]), corrected.mask)
    merged = parts[0].statistics.merge(parts[1].statistics)
    assert_metrics(merged.metrics(), corrected.statistics.metrics(), 1e-9)


@settings(max_examples=40)
@given(
    policy_configurations().filter(lambda config: not config.batch_options),
    st.integers(0, 1000),
)
def test_the_functional_form_equals_the_padded_batch(config, seed):
    batch = policy_batch(seed)
    corrected = correct(config, **batch)
    functional_form = functional.correct(config, **batch)
    torch.testing.assert_close(functional_form.weights, corrected.weights, rtol=2e-6, atol=1e-7)
    assert torch.equal(functional_form.mask, corrected.mask)


RAISING = RolloutCorrectionConfig(use_tis=True, nonfinite_policy="raise")


def test_the_reference_refuses_non_finite_tokens():
    train = torch.tensor([[0.0, math.nan]])
    message = "a log-prob is not finite; fix the sample or choose --nonfinite-policy"
    with pytest.raises(ValueError, match=message):
        reference_correct(RAISING, train, torch.zeros(1, 2), torch.tensor([[1, 1]]))


def test_the_reference_accepts_masked_non_finite_tokens():
    train = torch.tensor([[0.0, math.nan]])
    reference = reference_correct(RAISING, train, torch.zeros(1, 2), torch.tensor([[1, 0]]))
    assert reference.weights.tolist() == [[1, 0]]


@dataclass
class Sequences:
    """A correction as one tensor per sequence."""

    weights: Sequence[torch.Tensor]
    mask: Sequence[torch.Tensor]
    statistics: Statistics


def assert_same(corrected: Sequences, expected: Sequences) -> None:
    """Weights, mask and metrics agree within 1e-6."""
    for weights, expected_weights in zip(corrected.weights, expected.weights, strict=True):
        torch.testing.assert_close(weights, expected_weights, rtol=1e-6, atol=1e-6)
    assert [row.tolist() for row in corrected.mask] == [row.tolist() for row in expected.mask]
    metrics = expected.statistics.metrics()
    assert corrected.statistics.metrics() == pytest.approx(metrics, rel=1e-6, abs=1e-6)


def of_lists(config: RolloutCorrectionConfig, batch: Batch) -> Sequences:
    """The correction of a batch that is passed as lists."""
    listed = correct(config, *tensors(batch))
    return Sequences(listed.weights, listed.mask, listed.statistics)


@settings(max_examples=40)
@given(configurations(), batches(max_sequences=8))
def test_chunks_of_the_pass_leave_the_correction(config, batch):
    expected = of_lists(config, batch)
    with mock.patch.object(layout, "CPU_CHUNK_TOKENS", 16):
        chunked = of_lists(config, batch)
    assert_same(chunked, expected)


# an empty list has no tensors that could be packed or padded
FILLED = batches(max_sequences=8).filter(lambda batch: len(batch[0]) > 0)


@settings(max_examples=40)
@given(configurations(), FILLED)
def test_packed_sequences_equal_lists(config, batch):
    lengths = [len(row) for row in batch[0]]
    train, rollout, mask = (torch.cat(sequences) for sequences in tensors(batch))
    packed = correct(config, train, rollout, mask, lengths=lengths)
    sequences = Sequences(
        packed.weights.split(lengths), packed.mask.split(lengths), packed.statistics
    )
    assert_same(sequences, of_lists(config, batch))


@settings(max_examples=40)
@given(configurations(), FILLED, st.integers(0, 40))
def test_padding_of_any_width_leaves_the_correction(config, batch, extra):
    lengths = [len(row) for row in batch[0]]
    width = max(lengths) + extra
    corrected = correct(config, *(pad(sequences, width) for sequences in tensors(batch)))
    weights = [row[:length] for row, length in zip(corrected.weights, lengths, strict=True)]
    mask = [row[:length] for row, length in zip(corrected.mask, lengths, strict=True)]
    sequences = Sequences(weights, mask, corrected.statistics)
    assert_same(sequences, of_lists(config, batch))


def pad(sequences: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """[B, width], with NaN in the padding of floats and 0 in the padding of masks."""
    fill = 0 if sequences[0].dtype == torch.bool else torch.nan
    rows = torch.full((len(sequences), width), fill, dtype=sequences[0].dtype)
    for row, sequence in zip(rows, sequences, strict=True):
        row[: len(sequence)] = sequence
    return rows


@settings(max_examples=100)
@given(configurations(), batches(), st.integers(0, 5))
def test_micro_batches_merge(config, batch, cut):
    inputs = tensors(batch)
    complete = correct(config, *inputs)
    micro_batches = [[values[:cut] for values in inputs], [values[cut:] for values in inputs]]
    known = GlobalBatch(second_moment_limit=complete.global_batch.second_moment_limit)
    if config.adaptive:
        sums = [correct(config, *micro_batch).sequence_sums for micro_batch in micro_batches]
        known = replace(known, adaptive_bounds=adaptive_bounds(config, sums))
    statistics = Statistics.empty(config)
    for micro_batch in micro_batches:
        first_pass = correct(config, *micro_batch, global_batch=known)
        statistics = statistics.merge(first_pass.statistics)
    known = replace(known, batch_norm_factor=statistics.batch_norm_factor())
    merged = Sequences([], [], statistics)
    for micro_batch in micro_batches:
        corrected = correct(config, *micro_batch, global_batch=known)
        merged.weights = [*merged.weights, *corrected.weights]
        merged.mask = [*merged.mask, *corrected.mask]
    assert_same(merged, Sequences(complete.weights, complete.mask, complete.statistics))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "lengths",
    [[3000, 1, 129, 128, 0], [700, 650, 3], [40, 300]],
    ids=["up to 3000", "up to 700", "up to 300"],
)
def test_rows_of_long_sequences_join(lengths, level):
    """Sequences longer than a row, of several row widths.

    The reference has no rows.
    """
    generator = torch.Generator().manual_seed(1)
    config = RolloutCorrectionConfig(use_tis=True, tis_level=level, tis_upper_bound=1e6)
    delta = [0.02 * torch.randn(length, generator=generator) for length in lengths]
    mask = [torch.rand(length, generator=generator) > 0.2 for length in lengths]
    rollout = [torch.zeros(length) for length in lengths]
    corrected = correct(config, delta, rollout, mask)
    for i, weights in enumerate(corrected.weights):
        reference = reference_correct(
            config, delta[i].double()[None], rollout[i][None], mask[i][None]
        )
        expected = reference.weights[0].float()
        torch.testing.assert_close(weights, expected, rtol=2e-6, atol=1e-6)


OPTIONS: dict[str, dict[str, Any]] = {
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


def functional_correction(options: dict[str, Any]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A function of tensors [B, T] or [T] that returns weights and mask."""
    config = RolloutCorrectionConfig(**options)

    def weights_with_mask(
        train: torch.Tensor,
        rollout: torch.Tensor,
        mask: torch.Tensor,
        current: torch.Tensor,
        advantages: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        return tuple(
            functional.correct(
                config, train, rollout, mask, current_log_probs=current, advantages=advantages
            )
        )

    return weights_with_mask


TRACERS = {
    "fx": torch.fx.symbolic_trace,
    "compile": lambda function: torch.compile(function, fullgraph=True, backend="eager"),
}


@pytest.mark.parametrize("tracer", TRACERS.values(), ids=TRACERS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_traced_correction_is_the_same(options, tracer):
    inputs = [values.float() for values in policy_batch().values()]
    weights, mask = functional_correction(options)(*inputs)
    traced_weights, traced_mask = tracer(functional_correction(options))(*inputs)
    assert torch.equal(traced_weights, weights)
    assert torch.equal(traced_mask, mask)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_batches_of_other_sizes_are_not_compiled_again(options):
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(
        functional_correction(options), fullgraph=True, dynamic=True, backend=counter
    )
    for rows, tokens in ((4, 6), (3, 5), (8, 33), (2, 100)):
        compiled(*torch.full((5, rows, tokens), -0.5))
    assert counter.frame_count == 1


# a mean over the batch differs from the means over its rows
OPTIONS_OF_ROWS = {
    name: options for name, options in OPTIONS.items() if "tis_batch_normalize" not in options
}


@pytest.mark.parametrize("options", OPTIONS_OF_ROWS.values(), ids=OPTIONS_OF_ROWS)
def test_vmap_maps_the_correction_over_rows(options):
    inputs = [values.float() for values in policy_batch().values()]
    weights, mask = functional_correction(options)(*inputs)
    mapped_weights, mapped_mask = torch.func.vmap(functional_correction(options))(*inputs)
    torch.testing.assert_close(mapped_weights, weights)
    assert torch.equal(mapped_mask, mask)


def test_no_gradient_flows_through_weights():
    config = RolloutCorrectionConfig(use_tis=True)
    train, rollout, mask, *_ = policy_batch().values()

    def loss(log_probs: torch.Tensor) -> torch.Tensor:
        corrected = functional.correct(config, log_probs, rollout, mask)
        return (corrected.weights * torch.where(corrected.mask, log_probs, 0.0)).sum()

    gradient = torch.func.grad(loss)(train)
    corrected = functional.correct(config, train, rollout, mask)
    torch.testing.assert_close(gradient, (corrected.weights * corrected.mask).double())


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
