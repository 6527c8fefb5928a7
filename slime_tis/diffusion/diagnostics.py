"""Warnings about the metrics of a run: heavy rejection, weights at their bound, a mismatch beyond precision."""

from collections.abc import Mapping

from slime_tis.alarm import Alarm
from slime_tis.correction import RolloutCorrectionConfig
from slime_tis.diffusion.trajectories import prefix_of

REJECTED_SHARE = 0.05
"""Share of sequences rejected above which training is on a selected set."""
LASTING = 10
"""Steps in a row after which something is not chance."""
FIRST_STEPS = 50
"""Steps of a run in which a gap is one of the set-up."""
LARGEST_LOG_PPL_GAP = 1.0
"""Mean log-prob of a step, in nats, by which two engines that compute the same thing never differ."""


class Diagnostics:
    """Checks the metrics of each step and returns each warning once, for the caller to log."""

    def __init__(self, config: RolloutCorrectionConfig) -> None:
        self._config = config
        self._prefix = prefix_of(config)
        self._steps = 0
        self._rejecting = Alarm(LASTING)
        self._at_bound = Alarm(LASTING)
        self._reported: set[object] = set()

    def check(self, metrics: Mapping[str, float]) -> list[str]:
        """The warnings after a step."""
        found = {name.removeprefix(self._prefix): value for name, value in metrics.items()}
        self._steps += 1
        is_first, mode = self._steps <= FIRST_STEPS, self._config.mode
        rejects_many = found.get("rejected_sequence_fraction", 0.0) > REJECTED_SHARE
        at_bound = not mode.rejects and found.get(f"mis_{mode.high_fraction}", 0.0) > 0.0  # one that rejects has none
        problems = {
            _about_rejection: self._rejecting.observe(rejects_many),
            _about_gap: is_first and found.get("mismatch_log_ppl_abs_diff", 0.0) > LARGEST_LOG_PPL_GAP,
            _about_bound: self._at_bound.observe(at_bound) and is_first,
        }
        new = [about for about, holds in problems.items() if holds and about not in self._reported]
        self._reported.update(new)
        return [about(self._config, found, self._steps) for about in new]


def _about_rejection(config: RolloutCorrectionConfig, found: Mapping[str, float], _: int) -> str:
    message = (
        f"{found['rejected_sequence_fraction']:.1%} of the sequences lost a step to rejection, and more than "
        f"{REJECTED_SHARE:.0%} did in each of the last {LASTING} steps: training is on a selected set. Bring the "
        f"rollout closer (newer weights, higher precision), or widen the bounds that reject."
    )
    if config.rejection_normalizer == "original":
        message += (
            f" The gradient is shrunk to {found['gradient_kept_fraction']:.0%} by it; "
            f"--rejection-normalizer kept takes the mean over the accepted steps."
        )
    if config.use_rollout_logprobs:
        message += " Without --use-rollout-logprobs rejection compares π_old, not the moving π_θ, with the rollout."
    return message


def _about_gap(_: RolloutCorrectionConfig, found: Mapping[str, float], step: int) -> str:
    gap = found["mismatch_log_ppl_abs_diff"]
    return (
        f"mismatch_log_ppl_abs_diff is {gap:.2f} nats at step {step}, above {LARGEST_LOG_PPL_GAP:g}: rollout and "
        f"training disagree about a step by more than precision explains. Compare their timesteps, noise level and "
        f"guidance, and the scale of their log-probs (mean or sum over latent dimensions); then raise the precision "
        f"of the rollout or update its weights more often."
    )


def _about_bound(config: RolloutCorrectionConfig, _: Mapping[str, float], __: int) -> str:
    return (
        f"The largest weight was at its bound --tis-upper-bound {config.tis_upper_bound:g} in each of the last "
        f"{LASTING} steps: the bound is doing the work. Bring the rollout closer (newer weights, higher precision), or "
        f"raise the bound."
    )
