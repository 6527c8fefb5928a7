"""What a micro-batch's objective reports, how it merges over micro-batches and ranks, and the figures of a step.

Shapes: suffix _R the response tokens a rank holds, one sequence after another; _S the sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slime_tis.correction import Ranks, RolloutCorrectionConfig, Statistics
from slime_tis.policy.config import PolicyConfig
from slime_tis.policy.lag import staleness_metrics

SUMS = ("pg_loss", "pg_clipfrac", "ppo_kl", "ois", "entropy_loss", "kl_loss")


@dataclass(frozen=True, kw_only=True)
class Report:
    """The mergeable part of what a micro-batch reports. Figures come from the merged report, once per step."""

    sums: Tensor
    """float64 [len(SUMS)] numerators over kept units, of this rank's tokens."""
    units: Tensor
    """float64 [4]: kept units, original units, kept tokens, original tokens; counted by context-parallel rank 0."""
    statistics: Statistics
    """The correction's table."""
    recomputed: Statistics
    """The table between π_old itself and π_rollout, under --get-mismatch-metrics; else empty."""
    lags: Tensor
    """The mismatch by lag of the weights, of this rank's tokens."""
    opsm_clipped: Tensor
    """Numerator over original units of the share that off-policy sequence masking leaves out, float64."""
    custom: dict[str, Tensor]
    """Numerators over original units of the figures that a custom function returned, float64."""

    def merge(self, other: "Report") -> "Report":
        """The report of both micro-batches together."""
        return Report(
            sums=self.sums + other.sums,
            units=self.units + other.units,
            statistics=self.statistics.merge(other.statistics),
            recomputed=self.recomputed.merge(other.recomputed),
            lags=self.lags + other.lags,
            opsm_clipped=self.opsm_clipped + other.opsm_clipped,
            custom={name: value + other.custom[name] for name, value in self.custom.items()},
        )

    def all_reduce(self, ranks: Ranks) -> "Report":
        """The report of all context- and data-parallel ranks; a collective of the last pipeline stage."""
        names = sorted(self.custom)
        custom = [self.custom[name].reshape(1) for name in names]
        own = torch.cat([self.sums, self.units, self.lags.view(-1), self.opsm_clipped.reshape(1), *custom])
        flat = ranks.all_reduce(own)
        n, end = len(SUMS), len(SUMS) + 4 + self.lags.numel()
        return Report(
            sums=flat[:n],
            units=flat[n : n + 4],
            statistics=self.statistics.all_reduce(ranks),
            recomputed=self.recomputed.all_reduce(ranks),
            lags=flat[n + 4 : end].view_as(self.lags),
            opsm_clipped=flat[end],
            custom=dict(zip(names, flat[end + 1 :], strict=True)),
        )


def step_metrics(
    report: Report, correction: RolloutCorrectionConfig, policy: PolicyConfig, *, custom: bool
) -> dict[str, float]:
    """The named figures of one optimizer step, from the report of all its micro-batches and ranks.

    Args:
        report: merged over micro-batches and ranks.
        correction: the configuration it was made under.
        policy: the configuration it was made under.
        custom: a user's function did the correction, so the library's table holds mismatch statistics alone.
    """
    kept, original, kept_tokens, original_tokens = report.units.tolist()
    kept, original = max(kept, 1.0), max(original, 1.0)
    means = dict(zip(SUMS, (report.sums / kept).tolist(), strict=True))
    means["loss"] = (
        means["pg_loss"] - policy.entropy_coef * means["entropy_loss"] + policy.kl_loss_coef * means["kl_loss"]
    )
    if not policy.use_kl_loss:
        del means["kl_loss"]
    means |= report.statistics.metrics()
    means["gradient_kept_fraction"] = kept_tokens / max(original_tokens, 1.0)
    if correction.get_mismatch_metrics:
        recomputed = report.recomputed.metrics()
        means |= {name: value for name, value in recomputed.items() if name != "gradient_kept_fraction"}
    means |= staleness_metrics(report.lags)
    if policy.use_opsm:
        means["opsm_clipfrac"] = float(report.opsm_clipped) / original
    return means | _under_free_names({name: float(value) / original for name, value in report.custom.items()}, means)


RESERVED = ("grad_norm", "lr", "loss_units", "old_log_prob_forwards", "skipped_steps")
"""Metrics of a step that the training engine adds to those of the report."""


def _under_free_names(custom: dict[str, float], own: dict[str, float]) -> dict[str, float]:
    """The metrics of a custom function; one that is named like a metric of ours is called custom_NAME."""
    taken = {*own, *RESERVED}
    found = {name: value for name, value in custom.items() if name not in taken}
    for name in sorted(taken & custom.keys()):
        free = f"custom_{name}"
        while free in taken or free in found:
            free = f"custom_{free}"
        found[free] = custom[name]
    return found


@dataclass(frozen=True)
class Reducer:
    """Masked sums whose quotient by `units` is the mean over tokens, or over sequences of their token means."""

    scale_R: Tensor
    """float32: what one token counts, 0 where it is masked."""
    units: Tensor
    """float64 scalar: tokens, or sequences that have any."""

    @classmethod
    def build(cls, mask_R: Tensor, counts_S: Tensor, lengths: list[int], *, per_token: bool) -> "Reducer":
        """From the kept tokens on this rank and the tokens each whole sequence is averaged over."""
        if per_token:
            return cls(mask_R.float(), counts_S.sum())
        inverse_S = torch.where(counts_S > 0, 1 / counts_S.clamp_min(1), 0.0).float()
        repeats = torch.tensor(lengths, device=inverse_S.device)
        inverse_R = inverse_S.repeat_interleave(repeats, output_size=len(mask_R))
        return cls(torch.where(mask_R, inverse_R, 0.0), (counts_S > 0).sum().to(counts_S.dtype))

    def sum(self, term_R: Tensor) -> Tensor:
        """Σ scale · term, with gradient; a masked token contributes nothing, whatever stands there."""
        return torch.where(self.scale_R > 0, term_R, 0.0) @ self.scale_R

    def sum_each(self, terms_R: Sequence[Tensor]) -> Tensor:
        """The sums of several terms, float64 [len(terms)], without gradient."""
        seen_R = self.scale_R > 0
        terms = torch.stack([torch.where(seen_R, term_R.detach(), 0.0) for term_R in terms_R])
        return terms.double() @ self.scale_R.double()


def with_measured_weights(config: RolloutCorrectionConfig) -> RolloutCorrectionConfig:
    """The configuration that statistics are made under: in bypass with the weights that the loss has no use for.

    There π_θ/π_rollout already is the ratio of the loss; verl too measures its weights and does not apply them. They
    are truncated, which leaves the mask as it is, and need no pass over the global batch.
    """
    if config.use_tis or not config.use_rollout_logprobs:
        return config
    return replace(config, use_tis=True, tis_mode="truncate", tis_batch_normalize=False, policy_loss="reinforce")


def metrics_only(config: RolloutCorrectionConfig) -> RolloutCorrectionConfig:
    """The same configuration with weights and rejection off: statistics alone."""
    return replace(
        config,
        use_tis=False,
        use_rs=False,
        rs_z_score=None,
        rs_target_fraction=None,
        rs_veto_threshold=None,
        rs_veto_upper_threshold=None,
        rs_second_moment_bound=None,
        rollout_rs=None,
        rollout_rs_threshold=None,
    )
