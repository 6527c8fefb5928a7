"""Alarms during training inside another trainer: `LiveHealth` checks each step's metrics.

The metrics are those of the correction and of `slime_tis.token_signs`, under the names of
`slime_tis.health` ("train/NAME"). `LIVE_RULES` are the rules; a `Framework` has its names of
metrics and options for the messages.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from torch import Tensor

from slime_tis.correction import Ranks, RolloutCorrectionConfig, Statistics
from slime_tis.errors import HealthAlarm
from slime_tis.health import MAX_K3, STEP_RULES, Health, Rule, Values
from slime_tis.token_signs import over_ranks, sign_metrics

logger = logging.getLogger(__name__)

OnAlarm = Literal["warn", "stop"]
"""Reaction to an alarm, in addition to its message and its metric."""
DEFAULT_METRICS = (
    "mismatch_k3_kl",
    "mismatch_kl",
    "train_rollout_logprob_abs_diff",
    "nonfinite_token_fraction",
    "effective_sequence_share",
    "largest_samples_share",
    "weight_staleness",
    "mis_ratio_mean_after_mis",
    "mis_weight_max",
    "mis_eff_sample_size",
    "mis_rs_masked_fraction",
    "gradient_kept_fraction",
)
"""Metrics that an adapter logs by default, without prefix."""
MIN_SHIFTED = 0.04
"""Smallest share of shifted samples: one of 24. Single samples agree by chance."""
MIN_DEPENDENCE = 0.75
"""Smallest correlation of Δ with both log-probs that a temperature makes. Simulated temperatures
of 0.6 to 1.3 make 0.78 to 0.99, noise of 0.05 to 1 nats at most 0.26."""
WEAK_DEPENDENCE = 0.5
"""The same if the tokens are also no samples of the reported distribution: raw log-probs."""
EXACT_DEPENDENCE = 0.9999
"""The same for a factor on the log-probs: Δ is then an exact function."""
MIN_VISIBLE = 0.02
"""Smallest mean abs(Δ) whose dependence is judged, nats."""
MAX_POSITIVE_SHARE = 0.02
"""Largest share of Σ abs(Δ) with Δ > 0 that counts as one sign. Noise has 0.22 to 0.5."""
MIN_ONE_SIGNED = 5e-3
"""Smallest mean abs(Δ) of truncated sampling, nats."""
MAX_LARGE_SHARE = 0.2
"""Largest share of Σ abs(Δ) in tokens with abs(Δ) above 1.5 nats, of truncated sampling. A large
mismatch of other weights is nearly one-signed as well: tokens that training prefers are rare."""
MIN_PLACEHOLDERS = 0.002
"""Smallest share of tokens with a rollout log-prob of exactly 0."""
PLACEHOLDER_RATIO = 3.0
"""Smallest mean abs(Δ) of these tokens relative to the other tokens'."""
MIN_BOUNDED = 3
"""Smallest number of tokens that have the smallest log-prob."""
MIN_BOUNDED_SPREAD = 0.05
"""Smallest deviation of log π_train of these tokens, nats. Equal tokens after equal prefixes, as
in the samples of one prompt, have equal log-probs in both engines."""
MAX_ABOVE_ZERO = 0.01
"""Largest share of log-probs above 0."""
GROWTH = 4.0
"""Mean abs(Δ) relative to that of the first batch, from which on the weights differ."""
MIN_GROWN = 5e-3
"""Smallest mean abs(Δ) that counts as grown, nats."""
MAX_RATIO_ERRORS = 4.0
"""Largest mean of ρ − 1, in standard errors, of tokens that the reported distribution sampled."""
MIN_CHANGED = 1e-3
"""Smallest share of the trained weights that a healthy optimizer step changes."""
MAX_CLIPPED = 0.2
"""Largest healthy share of tokens whose gradient PPO's clip removes."""


@dataclass(frozen=True, kw_only=True)
class Framework:
    """Another trainer, as messages name its metrics and options."""

    name: str
    prefix: str
    """Prefix of the correction's metrics in its log."""
    suffix: str = ""
    """Suffix of these metrics."""
    metrics: Mapping[str, str] = field(default_factory=dict)
    """Our name of a metric → the framework's, if it does not have the prefix."""
    samples_are_fresh: bool = True
    """Whether samples without a weight version come from the current weights, as in a trainer that
    samples and then trains."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Names of `OPTIONS` → the framework's names in the advice."""

    def metric(self, name: str) -> str:
        """The framework's name of one of our metrics."""
        own = name.split("/", 1)[-1]
        return self.metrics.get(name, f"{self.prefix}{own}{self.suffix}")


OPTIONS = {
    "learning_rate": "the learning rate",
    "steps": "the optimizer steps per batch of samples",
    "temperature": "the temperature",
    "log_probs": "the engine's log-probs after temperature, top-p and top-k",
    "truncation": "top-p, top-k and min-p",
    "sync": "the update of the rollout engine's weights",
    "versions": "the weight version of each sample",
    "correction": "RolloutCorrectionConfig",
    "rewards": "the reward function",
}
"""Words of the advice, for a framework without own names."""


def _placeholder(values: Values) -> bool:
    """Whether tokens with a log-prob of exactly 0 differ more than the others."""
    return (
        values["train/placeholder_fraction"] >= MIN_PLACEHOLDERS
        and values["train/placeholder_size"] > PLACEHOLDER_RATIO * values["train/rest_abs_diff"]
    )


def _truncated(values: Values) -> bool:
    """Whether nearly every difference has the sign that truncated sampling makes."""
    return (
        values["train/rest_positive_share"] < MAX_POSITIVE_SHARE
        and values["train/rest_abs_diff"] > MIN_ONE_SIGNED
        and values["train/rest_large_share"] < MAX_LARGE_SHARE
    )


def _broken(values: Values) -> bool:
    """Whether log-probs are above 0, at a lower bound, or a multiple of the true ones."""
    is_bounded = (
        values["train/bounded_tokens"] >= MIN_BOUNDED
        and values["train/bounded_spread"] > MIN_BOUNDED_SPREAD
    )
    is_scaled = abs(values["train/log_prob_dependence"]) > EXACT_DEPENDENCE
    return values["train/above_zero_fraction"] > MAX_ABOVE_ZERO or is_bounded or is_scaled


def _temperature(values: Values) -> bool:
    """Whether the difference is a function of the log-prob, as with a temperature."""
    smallest = MIN_DEPENDENCE
    if values["train/sampled_ratio_errors"] > MAX_RATIO_ERRORS:
        smallest = WEAK_DEPENDENCE
    return (
        abs(values["train/log_prob_dependence"]) > smallest
        and values["train/abs_diff"] > MIN_VISIBLE
    )


def _shifted(values: Values) -> bool:
    """Whether samples agree with training after a shift, or with a neighbor."""
    # Samples of a few tokens are not compared, so the metric may be missing.
    return values.get("train/shifted_sample_fraction", 0.0) > MIN_SHIFTED


def _sign(values: Values) -> str:
    """The cause whose sign the reported log-probs show; empty without one.

    The most certain sign comes first: a placeholder has one sign of Δ as well, and a clamped or
    scaled log-prob depends on the log-prob as with a temperature.
    """
    signs = {
        "placeholder_log_probs": _placeholder,
        "shifted_tokens": _shifted,
        "broken_tokens": _broken,
        "truncated_sampling": _truncated,
        "temperature": _temperature,
    }
    if "train/placeholder_fraction" not in values:
        # Only metrics of a framework that never shows its tokens.
        return ""
    for cause, holds in signs.items():
        if holds(values):
            return cause
    return ""


def _is_stale(values: Values) -> bool:
    """Whether old samples differ by much, and by more than fresh samples do."""
    stale = values.get("train/mismatch_k3_kl_stale", 0.0)
    fresh = values.get("train/mismatch_k3_kl_fresh", 0.0)
    return stale > max(MAX_K3, 2 * fresh)


def _not_updated(values: Values) -> bool:
    """Whether the mismatch has grown although samples are reported as fresh."""
    return (
        values.get("train/mismatch_growth", 0.0) > GROWTH
        and values["train/abs_diff"] > MIN_GROWN
        and values.get("train/weight_staleness", 0.0) == 0
        and not _sign(values)
    )


def _other_network(values: Values) -> bool:
    """Whether engines with equal weights differ without a sign of the log-probs."""
    return (
        values.get("train/updates") == 0
        and values["train/mismatch_k3_kl"] > MAX_K3
        and values["train/sampled_ratio_errors"] < MAX_RATIO_ERRORS
        and not _sign(values)
    )


def _unexplained(values: Values) -> bool:
    """Whether the KL is large and no more specific rule explains it."""
    return (
        values["train/mismatch_k3_kl"] > MAX_K3
        and not _sign(values)
        and not _not_updated(values)
        and not _is_stale(values)
        and not _other_network(values)
        # The first batch had it already, and its alarm has said so.
        and values["train/mismatch_k3_kl"] > GROWTH * values.get("train/first_k3", 0.0)
    )


def _sign_rule(cause: str, metric: str, message: str, fix: str) -> Rule:
    """Returns the rule that the log-probs show the sign of a cause."""
    return Rule(
        cause=cause,
        metric=f"train/{metric}",
        condition=lambda _, values, __: _sign(values) == cause,
        message=message,
        fix=fix,
    )


SAMPLES = (
    " ({values[train/largest_samples_fraction]:.0%} of the samples, those that differ most, have"
    " {values[train/largest_samples_share]:.0%} of the mismatch)"
)
"""Concentration of the mismatch, for messages."""


def _mismatch_rule(samples: str) -> Rule:
    """Returns the rule on an unexplained mismatch; `samples` ends the message."""
    return Rule(
        cause="mismatch",
        metric="train/mismatch_k3_kl",
        condition=lambda _, values, __: _unexplained(values),
        message=f"the KL between rollout and training policy is above {MAX_K3:g} nats per token"
        + samples,
        fix=(
            "write a dump and run `slime-tis diagnose`; compare weights, temperature and tokenizer."
        ),
        after=2,
    )


LIVE_RULES = (
    Rule(
        cause="nonfinite_log_probs",
        metric="train/nonfinite_token_fraction",
        condition=lambda value, *_: value > 0,
        message="log-probs of the rollout or training engine are NaN, infinite or missing",
        fix=(
            "check the engine's numerics; nonfinite_policy of [correction] says what happens to"
            " these tokens."
        ),
    ),
    _sign_rule(
        "placeholder_log_probs",
        "placeholder_fraction",
        "this share of the tokens has a rollout log-prob of exactly 0, but training differs by"
        " {values[train/placeholder_size]:.2g} nats: a placeholder, such as that of an appended"
        " end token, or greedy sampling",
        "make the engine report the log-prob of every token that is trained, or mask the token.",
    ),
    _sign_rule(
        "shifted_tokens",
        "shifted_sample_fraction",
        "this share of the samples agrees with training after a shift by one token, or with a"
        " neighboring sample",
        "return the log-probs in the order of the samples and of their tokens, without the"
        " prompt's.",
    ),
    _sign_rule(
        "broken_tokens",
        "log_prob_dependence",
        "the reported numbers are above 0, at a lower bound, or a multiple of the log-probs",
        "report natural log-probs of the sampled token without a bound or a factor.",
    ),
    _sign_rule(
        "truncated_sampling",
        "rest_positive_share",
        "nearly no token is more likely under training: sampling removed a part of the"
        " distribution and training does not",
        "switch [truncation] off, or correct with weights and rejection.",
    ),
    _sign_rule(
        "temperature",
        "log_prob_dependence",
        "Δ is a function of the log-prob, as with another temperature",
        "use one value of [temperature] in both engines, and [log_probs].",
    ),
    Rule(
        cause="other_network",
        metric="train/mismatch_k3_kl",
        condition=lambda _, values, __: _other_network(values),
        message=(
            "before the first update the weights are equal, and the tokens are samples of the"
            " reported distribution, so network, prompt or precision of the engines differ"
        )
        + SAMPLES,
        fix="compare model, chat template, tokenizer, rope and precision of both engines.",
    ),
    Rule(
        cause="weights_not_updated",
        metric="train/mismatch_growth",
        condition=lambda _, values, __: _not_updated(values),
        message=(
            "mean abs(Δ) is this many times that of the first batch, whose weights were equal, and"
            " no older version is reported: the engine has other weights than training"
        )
        + SAMPLES,
        fix="check [sync]. If samples are older on purpose, report [versions].",
        after=2,
    ),
    Rule(
        cause="stale_weights",
        metric="train/mismatch_k3_kl_stale",
        condition=lambda _, values, __: _is_stale(values),
        message=(
            "samples from weights {values[train/stale_age]:.1f} steps old differ by more than"
            f" {MAX_K3:g} nats per token"
        ),
        fix=(
            "use samples of at most {values[train/largest_useful_age]:.0f} steps, or multiply"
            " [learning_rate] by {values[train/learning_rate_factor]:.2g}. The KL grows with the"
            " square of both."
        ),
        after=2,
    ),
    Rule(
        cause="unchanged_policy",
        metric="train/changed_weight_fraction",
        condition=lambda value, values, _: (
            value < MIN_CHANGED and values.get("rollout/zero_std_groups", 0.0) < 1
        ),
        message="this share of the trained weights changed in the last optimizer steps",
        fix=(
            "check [learning_rate], frozen parameters and the optimizer. Weights in bf16 lose"
            " updates below half a unit in the last place; keep fp32 weights."
        ),
        after=2,
    ),
    Rule(
        cause="long_steps",
        metric="train/pg_clipfrac",
        condition=lambda value, *_: value > MAX_CLIPPED,
        message=(
            f"the clip removes the gradient of more than {MAX_CLIPPED:.0%} of the tokens: the"
            " policy leaves the one that the batch was scored with"
        ),
        fix="lower [learning_rate] or [steps].",
        after=2,
    ),
    _mismatch_rule(SAMPLES),
    # A framework may log only the KL.
    _mismatch_rule(""),
)
"""Rules that other trainers need, in addition to those of `STEP_ADVICE`."""
STEP_ADVICE = {
    "rejection": "widen the rejection bounds of [correction], or reduce the mismatch.",
    "effective_samples": "lower tis_upper_bound of [correction], or reduce the mismatch.",
    "at_bound": "raise tis_upper_bound of [correction], or reduce the mismatch.",
    "nonfinite_gradient": "lower [learning_rate], and check [rewards].",
    "no_variance": "use prompts of another difficulty, more samples per prompt, or a finer reward.",
    "constant_reward": "check that [rewards] reads the answer and the label correctly.",
    "staleness": "correct with [correction], or check [sync].",
}
"""Advice of the rules of `STEP_RULES` that apply to every trainer."""
STOPPING = (
    "nonfinite_log_probs",
    "placeholder_log_probs",
    "shifted_tokens",
    "broken_tokens",
    "temperature",
    "other_network",
    "weights_not_updated",
    "stale_weights",
    "unchanged_policy",
    "nonfinite_gradient",
    "mismatch",
)
"""Alarms that end the run with `on_alarm="stop"`: training would use wrong numbers. The others may
pass by themselves."""


def live_rules(framework: Framework) -> tuple[Rule, ...]:
    """The rules with the framework's names in messages and advice."""
    # Rules of STEP_RULES without advice here read metrics that only our trainer has.
    rules = [rule for rule in STEP_RULES if rule.cause in STEP_ADVICE]
    rules = [replace(rule, fix=STEP_ADVICE[rule.cause]) for rule in rules]
    for rule in LIVE_RULES:
        rules.append(replace(rule, message=f"{rule.metric} is {{value:.3g}}: {rule.message}"))
    options = {**OPTIONS, **framework.options}
    named = []
    for rule in rules:
        fix = rule.fix
        for option, words in options.items():
            fix = fix.replace(f"[{option}]", words)
        message = rule.message.replace(rule.metric, framework.metric(rule.metric), 1)
        named.append(replace(rule, message=message, fix=fix))
    return tuple(named)


class LiveHealth:
    """Alarms of one run.

    Args:
        correction: The options of the correction.
        framework: Names of the trainer.
        on_alarm: "warn" prints a message; "stop" also raises `HealthAlarm` for the alarms in
            `STOPPING`.
        prints: Whether this process prints. Every process has the same metrics and alarms.

    Raises:
        ValueError: `on_alarm` is unknown.
    """

    def __init__(
        self,
        correction: RolloutCorrectionConfig,
        framework: Framework,
        *,
        on_alarm: OnAlarm = "warn",
        prints: bool = True,
    ) -> None:
        if on_alarm not in get_args(OnAlarm):
            raise ValueError(f"on_alarm must be 'warn' or 'stop', not {on_alarm!r}.")
        self._health = Health(correction, live_rules(framework))
        self._samples_are_fresh = framework.samples_are_fresh
        self._stops = on_alarm == "stop"
        self.prints = prints
        self._first_step: int | None = None
        self._first_size: float | None = None
        self._first_k3 = 0.0

    def check(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Checks the metrics of a step, which may come in several calls.

        Args:
            step: Optimizer steps made before.
            metrics: Our names of the metrics and their values. NaN counts as missing.

        Returns:
            health/CAUSE: 1 while an alarm is on, 0 at the step at which it ends.

        Raises:
            HealthAlarm: An alarm of `STOPPING` began and `on_alarm` is "stop".
        """
        # A comparison with NaN is false, so an alarm would end without a measurement.
        measured = {name: value for name, value in metrics.items() if not math.isnan(value)}
        # The rules know only one step; growth and advice need the first batch as well.
        values = {**measured, **self._derived(step, measured)}
        health, changes = self._health.observe(values)
        stopping = []
        for change in changes:
            message = str(change)
            if change.finding is not None:
                message = f"health/{change.name} since step {step}: {message}"
                if change.name in STOPPING:
                    stopping.append(message)
            # Other processes have the same alarm, and raise it together.
            if self.prints:
                logger.warning(message)
        if stopping and self._stops:
            raise HealthAlarm(" ".join(stopping))
        return health

    def _derived(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Values that need the first batch, or several metrics."""
        derived: dict[str, float] = {}
        if self._first_step is None and metrics:
            # Also of a batch whose tokens cannot be compared: it may be trained on.
            self._first_step = step
        size = metrics.get("train/abs_diff")
        if size is not None and self._first_step is not None:
            if step == self._first_step and self._first_size is None:
                # The engine has just loaded the weights that training starts from.
                self._first_size = size
                self._first_k3 = metrics.get("train/mismatch_k3_kl", 0.0)
            derived["train/updates"] = float(step - self._first_step)
            is_comparable = self._samples_are_fresh or "train/weight_staleness" in metrics
            if step > self._first_step and self._first_size is not None and is_comparable:
                # fp32 engines may agree to the last bit, so the divisor has a minimum.
                derived["train/mismatch_growth"] = size / max(self._first_size, 1e-6)
                derived["train/first_k3"] = self._first_k3
        age = metrics.get("train/weight_staleness")
        if age is not None:
            derived["rollout/weight_staleness"] = age
        k3 = metrics.get("train/mismatch_k3_kl_stale")
        if k3:
            # Δ is proportional to age and learning rate (Adam's step has the size of the rate),
            # and k3 ≈ Δ²/2.
            factor = min((MAX_K3 / k3) ** 0.5, 1.0)
            derived["train/learning_rate_factor"] = factor
            derived["train/largest_useful_age"] = float(int(metrics["train/stale_age"] * factor))
        return derived


class StepMonitor:
    """Alarms of a framework whose loss sees micro-batches, and the number of the step."""

    def __init__(
        self, correction: RolloutCorrectionConfig, framework: Framework, on_alarm: OnAlarm
    ) -> None:
        self._health = LiveHealth(correction, framework, on_alarm=on_alarm)
        self._step = -1
        self._statistics: Statistics | None = None
        self._sums: Tensor | None = None

    def add(
        self, step: int, statistics: Statistics, sums: Tensor, ranks: Ranks, *, prints: bool
    ) -> dict[str, float]:
        """Adds a micro-batch; the first one of a step also checks the step before.

        Args:
            step: Optimizer steps made before.
            statistics: Of the micro-batch.
            sums: Its `token_sums`.
            ranks: Ranks that train on parts of a batch; each has the same steps.
            prints: Whether this process prints the messages.

        Returns:
            Metrics without prefix and health/CAUSE of the step before, if one has ended; else
            nothing.

        Raises:
            HealthAlarm: See `LiveHealth`.
        """
        metrics: dict[str, float] = {}
        if self._statistics is not None and self._sums is not None and step == self._step:
            self._statistics = self._statistics.merge(statistics)
            self._sums = self._sums + sums
            return metrics
        if self._statistics is not None and self._sums is not None:
            # Only complete steps are reduced: their number is the same on every rank.
            total = over_ranks(self._sums, ranks)
            metrics = self._statistics.all_reduce(ranks).metrics()
            metrics |= sign_metrics(total)
            values = {f"train/{name}": value for name, value in metrics.items()}
            self._health.prints = prints
            metrics = logged(metrics, all_metrics=False) | self._health.check(self._step, values)
        self._step = step
        self._statistics = statistics
        self._sums = sums
        return metrics


def logged(metrics: Mapping[str, float], *, all_metrics: bool) -> dict[str, float]:
    """The metrics that an adapter logs: those of `DEFAULT_METRICS`, or all."""
    if all_metrics:
        return dict(metrics)
    return {name: metrics[name] for name in DEFAULT_METRICS if name in metrics}
