"""Warnings while training: what the metrics of a step show to be wrong, and how to fix it.

`findings` is a function of the metrics of one step. `Health` reports each finding when it begins and when it is over,
and adds `health/NAME` to the metrics, 1 at every step at which the finding holds.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from slime_tis.alarm import Alarm
from slime_tis.correction import RolloutCorrectionConfig

MAX_REJECTED = 0.1
"""Share of rejected tokens above which training is on a selected set."""
MIN_EFFECTIVE = 0.5
"""Effective sample size, as a share of the batch, below which the gradient is mostly noise."""
MAX_AT_BOUND = 0.05
"""Share of weights at a bound above which it is the bound that decides them."""
MAX_K3 = 0.05
"""Largest k3 KL per token, in nats, which neither precision nor a few steps of staleness exceed."""
MIN_RECEIVED = 0.5
"""Share of the updates of the weights below which the rollout policy does not follow the trained one."""
CONSTANT_ROLLOUTS = 10
"""Rollouts in a row with one reward for every sample at which the reward function is suspect."""
STEPS_UNTIL_OVER = 10
"""Steps in a row without a finding after which it is over."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A problem that the metrics of a step show."""

    metric: str
    """The metric that shows it."""
    value: float
    message: str
    """What it means and how to fix it."""

    def __str__(self) -> str:
        """The warning as it is printed."""
        return f"{self.metric} is {self.value:.3g}: {self.message}"


@dataclass(frozen=True, kw_only=True)
class HealthReport:
    """Metrics and messages that one step adds."""

    metrics: dict[str, float]
    """health/NAME: 1 while a finding holds, 0 at the step at which it is over."""
    messages: list[str]
    """One for each finding that began or ended with the step."""


@dataclass(frozen=True, kw_only=True)
class _Rule:
    find: Callable[[Mapping[str, float], RolloutCorrectionConfig], Finding | None]
    after: int
    """Steps in a row with the finding at which it is reported."""


class Health:
    """Checks the metrics of each step, and remembers which findings hold."""

    def __init__(self, correction: RolloutCorrectionConfig) -> None:
        """Starts without findings.

        Args:
            correction: The configuration of the run.
        """
        self._correction = correction
        self._alarms = {name: Alarm(rule.after, STEPS_UNTIL_OVER) for name, rule in RULES.items()}
        self._reward: float | None = None
        self._rewards_alike = 0

    def check(self, metrics: Mapping[str, float]) -> HealthReport:
        """Checks one optimizer step.

        Args:
            metrics: Metrics of the step; a finding whose metric is missing stays as it was.

        Returns:
            health/NAME of the findings that hold or end here, and messages for those that begin or end here.
        """
        metrics = {**metrics, REWARDS_ALIKE: float(self._count_rewards(metrics))}
        found = findings(metrics, self._correction)
        health, messages = {}, []
        for name, alarm in self._alarms.items():
            if name not in found:
                continue
            was_on, finding = alarm.is_on, found[name]
            is_on = alarm.observe(finding is not None)
            if is_on or was_on:
                health[f"health/{name}"] = float(is_on)
            if is_on and not was_on and finding is not None:
                messages.append(str(finding))
            elif was_on and not is_on:
                messages.append(f"health/{name} is over: it did not hold in the last {STEPS_UNTIL_OVER} steps.")
        return HealthReport(metrics=health, messages=messages)

    def _count_rewards(self, metrics: Mapping[str, float]) -> int:
        """Rollouts in a row, this one included, in which every sample has the same reward."""
        reward = metrics.get("rollout/raw_reward")
        if reward is not None:
            alike = metrics.get("rollout/zero_std_groups") == 1.0
            self._rewards_alike = 0 if not alike else self._rewards_alike + 1 if reward == self._reward else 1
            self._reward = reward
        return self._rewards_alike


REWARDS_ALIKE = "rollouts with one reward"
"""Name under which `Health` hands the rules what it counts from step to step."""


def findings(metrics: Mapping[str, float], correction: RolloutCorrectionConfig) -> dict[str, Finding | None]:
    """Findings of one step by name: None where the rule finds nothing, no entry where its metric is missing.

    Args:
        metrics: Metrics of the step, under their names in the log.
        correction: The configuration of the run.
    """
    found: dict[str, Finding | None] = {}
    for name, rule in RULES.items():
        try:
            found[name] = rule.find(metrics, correction)
        except KeyError:  # the rule's metric is missing
            continue
    return found


def _rejection(metrics: Mapping[str, float], correction: RolloutCorrectionConfig) -> Finding | None:
    kept = metrics["train/gradient_kept_fraction"]
    if not 1 - kept > MAX_REJECTED or _is_all_retokenized(metrics):
        return None
    return Finding(
        metric="train/gradient_kept_fraction",
        value=kept,
        message=f"{1 - kept:.1%} of the tokens are rejected, more than {MAX_REJECTED:.0%}, so training is on a "
        "selected set; widen the bounds that reject, let them follow length and noise (--rs-target-fraction 0.02), or "
        "bring the rollout closer (higher precision, newer weights).",
    )


def _effective_samples(metrics: Mapping[str, float], correction: RolloutCorrectionConfig) -> Finding | None:
    share = metrics["train/mis_eff_sample_size"]
    if not share < MIN_EFFECTIVE:
        return None
    return Finding(
        metric="train/mis_eff_sample_size",
        value=share,
        message=f"fewer than {MIN_EFFECTIVE:.0%} of the samples carry the gradient, the rest is noise; lower "
        "--tis-upper-bound, weight at a lower level (--tis-level token), or bring the rollout closer.",
    )


def _at_bound(metrics: Mapping[str, float], correction: RolloutCorrectionConfig) -> Finding | None:
    mode = {"truncate": "truncate_fraction", "clip": "clip_fraction_high"}.get(correction.tis_mode, "")
    share = metrics[f"train/mis_{mode}"]
    if not share > MAX_AT_BOUND:
        return None
    return Finding(
        metric=f"train/mis_{mode}",
        value=share,
        message=f"in each of the last {RULES['at_bound'].after} steps more than {MAX_AT_BOUND:.0%} of the weights were "
        f"at --tis-upper-bound {correction.tis_upper_bound:g}, so the bound decides the weights; raise it, weight at a "
        "lower level, or bring the rollout closer.",
    )


def _zero_gradient(metrics: Mapping[str, float], correction: RolloutCorrectionConfig) -> Finding | None:
    norm = metrics["train/grad_norm"]
    if norm != 0:
        return None
    reason = (
        "nothing was left to train on: every sample was retokenized; return the token ids that the engine sampled, "
        "or add --retokenization keep-mask (docs/agents.md)"
        if _is_all_retokenized(metrics)
        else "nothing was left to train on: everything was rejected or left out; widen the bounds, or raise "
        "--max-weight-staleness"
        if metrics.get("train/skipped_steps")
        else "nothing is learned from this step: all advantages are 0, as they are where all samples of a group have "
        "the same reward; check the reward function and the difficulty of the prompts"
    )
    return Finding(metric="train/grad_norm", value=norm, message=f"{reason}.")


def _is_all_retokenized(metrics: Mapping[str, float]) -> bool:
    """Whether retokenization left nothing to train on, so that wider bounds would not help."""
    return metrics.get("train/skipped_steps", 0) > 0 and metrics.get("rollout/retokenized") == 1


def _nonfinite_gradient(metrics: Mapping[str, float], correction: RolloutCorrectionConfig) -> Finding | None:
    steps = metrics["train/nonfinite_gradient_steps"]
    if not steps:
        return None
    return Finding(
        metric="train/nonfinite_gradient_steps",
        value=steps,
        message="the gradient was NaN or infinite and the step was left out; lower --lr, and look at rewards, "
        "--kl-loss-coef and --entropy-coef.",
    )


def _nonfinite_log_probs(metrics: Mapping[str, float], correction: RolloutCorrectionConfig) -> Finding | None:
    share = metrics["train/nonfinite_token_fraction"]
    if not share > 0:
        return None
    return Finding(
        metric="train/nonfinite_token_fraction",
        value=share,
        message="log-probs of the rollout or of the training engine are NaN, infinite or missing; look at the rollout "
        f"engine's numbers. --nonfinite-policy {correction.nonfinite_policy} is what happens to these tokens.",
    )


def _no_variance(metrics: Mapping[str, float], correction: RolloutCorrectionConfig) -> Finding | None:
    share = metrics["rollout/zero_std_groups"]
    if not share >= 1:
        return None
    return Finding(
        metric="rollout/zero_std_groups",
        value=share,
        message="in every group all samples have the same reward, so that all advantages are 0; take prompts of "
        "another difficulty, more samples per prompt, or a reward that distinguishes answers.",
    )


def _constant_reward(metrics: Mapping[str, float], correction: RolloutCorrectionConfig) -> Finding | None:
    if metrics[REWARDS_ALIKE] < CONSTANT_ROLLOUTS:
        return None
    return Finding(
        metric="rollout/raw_reward",
        value=metrics["rollout/raw_reward"],
        message=f"every sample of the last {CONSTANT_ROLLOUTS} rollouts has this reward; check that the reward "
        "function reads the answer and the label correctly (--rm-type, --custom-rm-path, --label-key).",
    )


def _staleness(metrics: Mapping[str, float], correction: RolloutCorrectionConfig) -> Finding | None:
    staleness = metrics["rollout/weight_staleness"]
    if not staleness > 0 or corrects_staleness(correction):
        return None
    return Finding(
        metric="rollout/weight_staleness",
        value=staleness,
        message="the samples are of older weights, and nothing corrects that; add --use-tis or --use-rollout-logprobs, "
        "or update the rollout engine after every rollout (--update-weights-interval 1, --rollout-lookahead 0).",
    )


def _mismatch(metrics: Mapping[str, float], correction: RolloutCorrectionConfig) -> Finding | None:
    k3 = metrics["train/mismatch_k3_kl"]
    if not k3 > MAX_K3:
        return None
    return Finding(
        metric="train/mismatch_k3_kl",
        value=k3,
        message=f"more than {MAX_K3:g} nats per token between rollout and training policy; compare their weights "
        "(--check-weight-sync), temperature, tokenizer and chat template, then raise the rollout's precision.",
    )


def _absorbed(metrics: Mapping[str, float], correction: RolloutCorrectionConfig) -> Finding | None:
    received = metrics["rollout/update_received"]
    if not received < MIN_RECEIVED:
        return None
    return Finding(
        metric="rollout/update_received",
        value=received,
        message=f"in each of the last {RULES['absorbed_updates'].after} updates rounding to the rollout engine's "
        f"precision kept back more than {1 - MIN_RECEIVED:.0%}, so samples are staler than rollout/weight_staleness "
        "says; add --weight-update-rounding stochastic, train in the engine's precision (--bf16), or raise --lr or "
        "the engine's precision.",
    )


def _retokenized(metrics: Mapping[str, float], correction: RolloutCorrectionConfig) -> Finding | None:
    share = metrics["rollout/retokenized"]
    if not share > 0:
        return None
    return Finding(
        metric="rollout/retokenized",
        value=share,
        message="the generate function gives tokens to be trained on that are not those that the engine sampled; hand "
        "on token ids instead of text (docs/agents.md).",
    )


def _routing_replay(metrics: Mapping[str, float], correction: RolloutCorrectionConfig) -> Finding | None:
    samples = metrics["train/routing_replay_missing"]
    if not samples > 0:
        return None
    return Finding(
        metric="train/routing_replay_missing",
        value=samples,
        message="this number of samples of the step has no experts that can be replayed, so training routes them "
        "itself; generate the samples with --use-rollout-routing-replay and an engine that records experts "
        "(docs/moe.md).",
    )


def _micro_batch_load(metrics: Mapping[str, float], correction: RolloutCorrectionConfig) -> Finding | None:
    load = metrics["perf/micro_batch_load"]
    if not load > 1:
        return None
    return Finding(
        metric="perf/micro_batch_load",
        value=load,
        message="a micro-batch is over the token budget: a sample, or the segments of a rollout, which are in one "
        "micro-batch, have more tokens, and may not fit into memory; raise --max-tokens-per-gpu, lower "
        "--rollout-max-context-len, or return fewer or shorter segments.",
    )


RULES = {
    "rejection": _Rule(find=_rejection, after=2),
    "effective_samples": _Rule(find=_effective_samples, after=2),
    "at_bound": _Rule(find=_at_bound, after=10),
    "zero_gradient": _Rule(find=_zero_gradient, after=1),
    "nonfinite_gradient": _Rule(find=_nonfinite_gradient, after=1),
    "nonfinite_log_probs": _Rule(find=_nonfinite_log_probs, after=1),
    "no_variance": _Rule(find=_no_variance, after=2),
    "constant_reward": _Rule(find=_constant_reward, after=1),
    "staleness": _Rule(find=_staleness, after=1),
    "mismatch": _Rule(find=_mismatch, after=2),
    "retokenized": _Rule(find=_retokenized, after=1),
    "routing_replay": _Rule(find=_routing_replay, after=1),
    "absorbed_updates": _Rule(find=_absorbed, after=3),
    "micro_batch_load": _Rule(find=_micro_batch_load, after=1),
}
"""Rules by the name of their finding, health/NAME in the metrics."""


def corrects_staleness(correction: RolloutCorrectionConfig) -> bool:
    """Whether weights, rejection or the clip compare the policy with the one that sampled."""
    return correction.corrects or correction.use_rollout_logprobs or correction.old_logprobs == "interpolate"
