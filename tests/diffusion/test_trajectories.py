"""Correction of trajectories against plain loops, over every combination of options; bypass; shapes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_tis import PRESETS, GlobalBatch, Ranks, RolloutCorrectionConfig
from slime_tis.correction import AllReduce, ReduceOp
from slime_tis.diffusion import apply_bypass_mode, correct_trajectories
from tests.correction.strategies import configurations
from tests.diffusion.expected import expected_metrics, expected_trajectories
from tests.diffusion.strategies import Rows, trajectories

TIMES = [900.0, 600.0, 300.0, 0.125]


def tensors(*tables: Rows) -> list[torch.Tensor]:
    return [torch.tensor(table, dtype=torch.float64) for table in tables]


def times_of(batch: int, steps: int) -> Rows:
    """Windows that differ from trajectory to trajectory."""
    return [[TIMES[(i + t) % len(TIMES)] for t in range(steps)] for i in range(batch)]


@settings(max_examples=250)
@given(configurations(), trajectories())
def test_against_plain_loops(config: RolloutCorrectionConfig, batch: tuple[Rows, Rows]) -> None:
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
def test_what_is_not_finite(config: RolloutCorrectionConfig, batch: tuple[Rows, Rows]) -> None:
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
def test_micro_batches_merge(config: RolloutCorrectionConfig, batch: tuple[Rows, Rows], cut: int) -> None:
    train, rollout = tensors(*batch)
    times = torch.tensor(times_of(*train.shape))
    whole = correct_trajectories(config, train, rollout, timesteps=times)
    parts = [
        correct_trajectories(config, train[span], rollout[span], timesteps=times[span], global_batch=whole.global_batch)
        for span in (slice(0, cut), slice(cut, None))
    ]
    torch.testing.assert_close(torch.cat([part.weights for part in parts]), whole.weights, rtol=1e-6, atol=1e-6)
    assert torch.equal(torch.cat([part.mask for part in parts]), whole.mask)
    merged = parts[0].statistics.merge(parts[1].statistics).metrics()
    assert merged == pytest.approx(whole.statistics.metrics(), rel=1e-6, abs=1e-6)


@settings(max_examples=60)
@given(configurations(), trajectories())
def test_one_step_is_a_column(config: RolloutCorrectionConfig, batch: tuple[Rows, Rows]) -> None:
    """[B] is [B, 1]: each step of each trajectory is a sequence of its own, and every level is the token's."""
    train, rollout = (x[:, 0] for x in tensors(*batch))
    flat = correct_trajectories(config, train, rollout, timesteps=torch.tensor(600.0))
    column = correct_trajectories(config, train[:, None], rollout[:, None], timesteps=torch.tensor([600.0]))
    assert flat.weights.shape == flat.mask.shape == train.shape
    assert torch.equal(flat.weights, column.weights[:, 0]) and torch.equal(flat.mask, column.mask[:, 0])
    assert flat.statistics.metrics() == column.statistics.metrics()


def test_levels_of_a_single_step_are_the_same() -> None:
    train, rollout = torch.tensor([-1.0, -2.0, -1.5]), torch.tensor([-1.3, -1.2, -1.5])
    found = [
        correct_trajectories(RolloutCorrectionConfig(use_tis=True, tis_level=level), train, rollout).weights
        for level in ("token", "sequence", "geometric", "prefix", "segment")
    ]
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("name", PRESETS)
def test_equal_policies_are_left_alone(name: str) -> None:
    """All weights are 1 to the bit and nothing is rejected, under every preset."""
    config = RolloutCorrectionConfig.preset(name)
    log_probs = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    found = correct_trajectories(config, log_probs, log_probs.clone())
    assert torch.equal(found.weights, torch.ones(6, 3)) and found.mask.all()
    assert torch.equal(found.folded, torch.ones(6, 3))
    metrics = found.statistics.metrics()
    prefix = "actor/rollout_corr/" if config.use_rollout_logprobs else "rollout_corr/"
    assert {metrics[prefix + name] for name in ("mismatch_kl", "logprob_abs_diff_mean", "logprob_abs_diff_max")} == {0}


def test_means_over_latent_dimensions_and_their_sums() -> None:
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


def test_ranks_normalise_together() -> None:
    config = RolloutCorrectionConfig(use_tis=True, tis_upper_bound=8.0, tis_batch_normalize=True)
    zero, log2 = torch.zeros(1, 2), torch.full((1, 2), 2.0).log()
    pairs: list[torch.Tensor] = []

    def recorded(pair: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        pairs.append(pair)
        return pair

    def summed(pair: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        return torch.stack(pairs).sum(0)

    def weights(rank: torch.Tensor, data: AllReduce) -> torch.Tensor:
        return correct_trajectories(config, rank, zero, global_batch=GlobalBatch(ranks=Ranks(data=data))).weights

    for rank in (log2, zero):
        weights(rank, recorded)
    found = [weights(rank, summed) for rank in (log2, zero)]
    assert [x.unique().tolist() for x in found] == [[pytest.approx(4 / 3)], [pytest.approx(2 / 3)]]


def test_trimming_says_its_limit() -> None:
    config = RolloutCorrectionConfig(rs_second_moment_bound=0.5)
    found = correct_trajectories(config, torch.tensor([[0.0, 1.0], [0.5, 2.0]]), torch.zeros(2, 2))
    assert found.global_batch.second_moment_limit is not None and found.global_batch.second_moment_limit.item() == 4.0
    assert found.mask.tolist() == [[True, True], [True, False]]


def test_bypass_takes_the_rollout_for_the_old_policy() -> None:
    batch = {"rollout_log_probs": torch.tensor([[-1.0]]), "old_log_probs": torch.tensor([[-2.0]])}
    found = apply_bypass_mode(batch)
    assert found["old_log_probs"] is batch["rollout_log_probs"]
    assert batch["old_log_probs"].item() == -2.0, "the batch that was passed stays as it was"


@pytest.mark.parametrize(
    "batch",
    [{}, {"latents": torch.zeros(1)}, {"rollout_log_probs": None}],
    ids=["empty batch", "other fields", "None"],
)
def test_bypass_without_rollout_log_probs_is_refused(batch: dict) -> None:
    had = ", ".join(batch) or "nothing"
    with pytest.raises(ValueError, match=f"--use-rollout-logprobs needs rollout_log_probs, but the batch has {had};"):
        apply_bypass_mode(batch)


def test_missing_log_probs_of_a_step_are_the_policys_affair() -> None:
    """NaN says missing: the step goes, is neutral, or stops the run with its place named."""
    train, rollout = torch.zeros(2, 2), torch.tensor([[0.0, torch.nan], [0.0, 0.0]])
    keeps = {"reject": [[True, False], [True, True]], "neutral": [[True, True], [True, True]]}
    for policy, expected in keeps.items():
        config = RolloutCorrectionConfig(use_tis=True, nonfinite_policy=policy)  # type: ignore[arg-type]
        assert correct_trajectories(config, train, rollout).mask.tolist() == expected
    with pytest.raises(ValueError, match="sequence 0, position 1"):
        correct_trajectories(RolloutCorrectionConfig(use_tis=True, nonfinite_policy="raise"), train, rollout)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((4, 3), (4, 2)), r"train_log_probs has shape \(4, 3\), rollout_log_probs \(4, 2\); pass two tensors of one"),
        (((4,), (4, 1)), r"train_log_probs has shape \(4,\), rollout_log_probs \(4, 1\)"),
        (((4, 3, 2), (4, 3, 2)), r"\(4, 3, 2\), rollout_log_probs \(4, 3, 2\); .* \[B, steps\], or \[B\]"),
        (((), ()), r"train_log_probs has shape \(\)"),
        (((4, 3), (4, 3), (4,)), r"timesteps has shape \(4,\), train_log_probs \(4, 3\); .*, \(3,\)\."),
        (((4,), (4,), (3,)), r"timesteps has shape \(3,\), train_log_probs \(4,\)"),
    ],
    ids=["steps", "dimensions", "three dimensions", "scalars", "timesteps of [B, steps]", "timesteps of [B]"],
)
def test_shapes_that_disagree(shapes: tuple, message: str) -> None:
    train, rollout, *times = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match=message):
        correct_trajectories(
            RolloutCorrectionConfig(use_tis=True), train, rollout, timesteps=times[0] if times else None
        )


def test_an_empty_batch() -> None:
    config = RolloutCorrectionConfig(use_tis=True, use_rs=True)
    for shape in ((0,), (0, 3)):
        found = correct_trajectories(config, torch.zeros(shape), torch.zeros(shape), timesteps=torch.zeros(shape))
        assert found.folded.shape == shape and found.statistics.metrics() == {}
