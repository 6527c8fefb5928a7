"""Correction of trajectories against plain loops, over every combination of options; bypass; shapes."""

import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_tis import RolloutCorrectionConfig
from slime_tis.diffusion import apply_bypass_mode, correct_trajectories
from tests.correction.strategies import configurations
from tests.diffusion.expected import expected_metrics, expected_trajectories
from tests.diffusion.strategies import trajectories

LN2 = math.log(2)
TIMES = [900.0, 600.0, 300.0, 0.125]


def tensors(*tables):
    return [torch.tensor(table, dtype=torch.float64) for table in tables]


def times_of(batch, steps):
    """Windows that differ from trajectory to trajectory."""
    return [[TIMES[(i + t) % len(TIMES)] for t in range(steps)] for i in range(batch)]


@settings(max_examples=250)
@given(configurations(), trajectories())
def test_against_plain_loops(config, batch):
    oracle = expected_trajectories(config, *batch)
    times = times_of(len(batch[0]), len(batch[0][0]))
    found = correct_trajectories(config, *tensors(*batch), timesteps=torch.tensor(times))
    assert found.mask.tolist() == oracle.mask and found.weights.dtype == torch.float32
    for row, expected in zip(found.weights.tolist(), oracle.weights, strict=True):
        assert row == pytest.approx(expected, rel=2e-6, abs=1e-7)
    folded = [[w * m for w, m in zip(*pair, strict=True)] for pair in zip(oracle.weights, oracle.mask, strict=True)]
    for row, expected in zip(found.folded.tolist(), folded, strict=True):
        assert row == pytest.approx(expected, rel=2e-6, abs=1e-7)
    assert ((found.folded > 0) == found.mask).all()
    assert found.statistics.metrics() == pytest.approx(expected_metrics(config, *batch, times), rel=1e-6, abs=1e-7)


@settings(max_examples=150)
@given(configurations(), trajectories(wild=True))
def test_what_is_not_finite(config, batch):
    oracle = expected_trajectories(config, *batch)
    times = times_of(len(batch[0]), len(batch[0][0]))
    found = correct_trajectories(config, *tensors(*batch), timesteps=torch.tensor(times))
    assert found.mask.tolist() == oracle.mask
    assert found.weights.isfinite().all() and not found.weights.requires_grad
    values = found.statistics.metrics()
    assert all(torch.tensor(list(values.values())).isfinite())
    sizes = {name: value for name, value in expected_metrics(config, *batch, times).items() if "logprob_abs" in name}
    assert {name: values[name] for name in sizes} == pytest.approx(sizes, rel=1e-6, abs=1e-7)


@settings(max_examples=100)
@given(configurations(), trajectories(), st.integers(0, 5))
def test_micro_batches_merge(config, batch, cut):
    train, rollout = tensors(*batch)
    times = torch.tensor(times_of(*train.shape))
    whole = correct_trajectories(config, train, rollout, timesteps=times)
    parts = [
        correct_trajectories(config, train[span], rollout[span], timesteps=times[span], global_batch=whole.global_batch)
        for span in (slice(0, cut), slice(cut, None))
    ]
    torch.testing.assert_close(torch.cat([part.weights for part in parts]), whole.weights, rtol=1e-6, atol=1e-6)
    assert torch.equal(torch.cat([part.mask for part in parts]), whole.mask)
    sent = [pickle.loads(pickle.dumps(part.statistics)) for part in parts]  # as ranks send them
    merged = sent[0].merge(sent[1]).metrics()
    assert merged == pytest.approx(whole.statistics.metrics(), rel=1e-6, abs=1e-6)


@settings(max_examples=60)
@given(configurations(), trajectories())
def test_one_step_is_a_column(config, batch):
    """[B] is [B, 1]: each step of each trajectory is a sequence of its own, and every level is the token's."""
    train, rollout = (x[:, 0] for x in tensors(*batch))
    flat = correct_trajectories(config, train, rollout, timesteps=torch.tensor(600.0))
    column = correct_trajectories(config, train[:, None], rollout[:, None], timesteps=torch.tensor([600.0]))
    assert flat.weights.shape == flat.mask.shape == train.shape
    assert torch.equal(flat.weights, column.weights[:, 0]) and torch.equal(flat.mask, column.mask[:, 0])
    assert flat.statistics.metrics() == column.statistics.metrics()


def test_means_over_latent_dimensions_and_their_sums():
    """16 dimensions: the mean's ratio is 1.02, that of the step 1.02^16; bounds act on what is asked for."""
    config = RolloutCorrectionConfig(use_tis=True, tis_upper_bound=1.2, use_rs=True, rs_upper_bound=1.5)
    train = torch.tensor([[-1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    rollout = train - torch.tensor([[1.02, 1.001], [1.03, 1.002]], dtype=torch.float64).log()
    means = correct_trajectories(config, train, rollout)
    sums = correct_trajectories(config, train, rollout, latent_dims=16)
    assert means.weights.flatten().tolist() == pytest.approx([1.02, 1.001, 1.03, 1.002])
    assert means.mask.all()
    assert sums.weights.flatten().tolist() == pytest.approx([1.2, 1.001**16, 1.2, 1.002**16])
    assert sums.mask.tolist() == [[True, True], [False, True]]
    same = correct_trajectories(config, 16 * train, 16 * rollout)
    assert torch.equal(same.weights, sums.weights) and torch.equal(same.mask, sums.mask)
    metrics = sums.statistics.metrics()
    assert metrics["rollout_corr/logprob_abs_diff_max"] == pytest.approx(16 * 0.029558802, rel=1e-6)
    assert metrics["rollout_corr/rejected_sequence_fraction"] == 0.5


def test_bypass_takes_the_rollout_for_the_old_policy():
    batch = {"rollout_log_probs": torch.tensor([[-1.0]]), "old_log_probs": torch.tensor([[-2.0]])}
    found = apply_bypass_mode(batch)
    assert found["old_log_probs"] is batch["rollout_log_probs"]
    assert batch["old_log_probs"].item() == -2.0, "the batch that was passed stays as it was"


def test_an_empty_batch():
    config = RolloutCorrectionConfig(use_tis=True, use_rs=True)
    for shape in ((0,), (0, 3)):
        found = correct_trajectories(config, torch.zeros(shape), torch.zeros(shape), timesteps=torch.zeros(shape))
        assert found.folded.shape == shape and found.statistics.metrics() == {}


def test_bypass_without_rollout_log_probs_is_refused():
    with pytest.raises(ValueError, match="--use-rollout-logprobs needs rollout_log_probs, but the batch has latents;"):
        apply_bypass_mode({"latents": torch.zeros(1)})


@pytest.mark.parametrize(
    "shapes",
    [((4, 3), (4, 2)), ((4,), (4, 1)), ((4, 3, 2), (4, 3, 2)), ((), ()), ((4, 3), (4, 3), (4,)), ((4,), (4,), (3,))],
    ids=["steps", "dimensions", "three dimensions", "scalars", "timesteps of [B, steps]", "timesteps of [B]"],
)
def test_shapes_that_disagree(shapes):
    train, rollout, timesteps = (*(torch.zeros(shape) for shape in shapes), None)[:3]
    with pytest.raises(ValueError, match=r"has shape .*; pass"):
        correct_trajectories(RolloutCorrectionConfig(use_tis=True), train, rollout, timesteps=timesteps)


def test_decoupled_by_hand():
    """Token weights 2, 1, 1/4, 4 bounded to 2; the veto takes the second trajectory."""
    train = torch.tensor([[-1.0, -2.0], [-1.0, -3.0]], dtype=torch.float64)
    rollout = train + torch.tensor([[-LN2, 0.0], [2 * LN2, -2 * LN2]], dtype=torch.float64)
    config = RolloutCorrectionConfig(use_tis=True, rs_veto_threshold=0.3)
    timesteps = torch.tensor([[900.0, 300.0], [900.0, 600.0]])
    found = correct_trajectories(config, train, rollout, timesteps=timesteps).statistics.metrics()
    expected = {
        "gradient_kept_fraction": 0.5,
        "mismatch_kl": -LN2 / 4,
        "mis_ratio_mean_after_mis": 5.25 / 4,
        "mis_catastrophic_seq_fraction": 0.5,
        "logprob_abs_diff_mean": 5 * LN2 / 4,
        "logprob_abs_diff_max": 2 * LN2,
        "logprob_abs_diff/ts_300": 0.0,
        "logprob_abs_diff/ts_600": 2 * LN2,
        "logprob_abs_diff/ts_900": 1.5 * LN2,
        "rejected_sequence_fraction": 0.5,
    }
    assert {name: found[f"rollout_corr/{name}"] for name in expected} == pytest.approx(expected, abs=1e-7)
