"""Rules of the health warnings, and the rule engine that the diagnosis uses as well.

Rules are entries of a table, and `evaluate` applies them to named values. `STEP_RULES` are the
health warnings on the metrics of one optimizer step; `Health` reports when a warning begins and
ends. The rules of the diagnosis on a run's metrics are in
`slime_tis.analysis.diagnosis.metric_rules`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slime_tis.alarm import Alarm
from slime_tis.correction import MODES, RolloutCorrectionConfig

Values = Mapping[str, float]
"""Metrics or statistics by name."""
Rows = Sequence[Mapping[str, Any]]
"""Rows of a metrics.jsonl."""

METRIC_PREFIXES = ("train/", "rollout_corr/", "actor/rollout_corr/", "correction/")
"""A run logs the metrics of the correction under one of these prefixes. The TRL adapter uses the
last one."""
MAX_REJECTED = 0.1
"""Largest healthy share of rejected tokens."""
MIN_EFFECTIVE_SAMPLES = 0.5
"""Smallest healthy effective sample size, as a share of the batch."""
MAX_WEIGHTS_AT_BOUND = 0.05
"""Largest healthy share of weights at the upper bound."""
MAX_K3 = 0.05
"""Largest healthy k3 KL, nats per token. Low precision and a few steps of staleness stay below
it."""
MAX_WORKER_RATIO = 3.0
"""Largest healthy ratio of a server's mean abs(Δ) to the other servers'."""
NEGLIGIBLE_DIFFERENCE = 2e-4
"""Healthy mean abs(Δ), nats: the difference of two fp32 engines with different kernels."""
MIN_UPDATE_RECEIVED = 0.5
"""Smallest healthy share of a weight update that reaches the rollout engine."""
CONSTANT_REWARD_ROLLOUTS = 10
"""Consecutive rollouts with a single reward value after which the reward function is suspect."""
EQUAL_REWARD_ROLLOUTS = "equal_reward_rollouts"
"""Name of a value that `Health` counts: consecutive rollouts with a single reward value."""
CALM_STEPS = 10
"""Consecutive steps without a finding after which its warning ends."""


@dataclass(frozen=True)
class Finding:
    """A problem that metrics or tokens show."""

    cause: str
    """Name of the health rule, or of the cause in `slime_tis.analysis.diagnosis.CAUSES`."""
    evidence: tuple[str, ...]
    """Measured facts, one statement each."""
    confidence: float = 1.0
    """From 0 to 1: how specific the evidence is to this cause."""
    share: float = 1.0
    """Share of the mismatch, Σ min(abs(Δ), 10), that the cause explains."""
    detail: str = ""
    """Variant of the cause, such as a precision, a lag in tokens or a ratio of temperatures."""
    title: str = ""
    """The cause in words."""
    fix: str = ""
    """Advice: the change that removes the problem."""

    @property
    def score(self) -> float:
        """Findings are ranked by their confidence and their share of the mismatch."""
        return self.confidence * (0.4 + 0.6 * self.share)

    def __str__(self) -> str:
        """The finding as a one-line warning."""
        return f"{'; '.join(self.evidence)}; {self.fix}"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A condition on named values, and the finding if it holds."""

    cause: str
    """Cause of the finding."""
    metric: str
    """Name of the value that shows the problem. The rule is skipped if the value is missing."""
    condition: Callable[[float, Values, RolloutCorrectionConfig], float | bool]
    """(the metric's value, all values, the run's configuration) → confidence from 0 to 1, or a
    bool. The rule is skipped if it raises a KeyError, as other values may be missing."""
    message: str
    """Template of the evidence, with `value`, `complement` (1 − value), `values` and
    `correction`. The rule is skipped if a value is missing."""
    fix: str = ""
    """Template of the advice, with `correction` and `values`."""
    after: int = 1
    """Consecutive steps with the finding before a health warning is printed."""
    share: float = 0.5
    """Assumed share of the mismatch that the cause explains, as metrics do not show it."""
    detail: str = ""
    """Variant of the cause."""


def ramp(value: float, low: float, high: float) -> float:
    """Returns 0 up to `low`, 1 from `high` on, linear in between; `low` may be the larger one."""
    return float(min(max((value - low) / (high - low), 0.0), 1.0))


def evaluate(
    rules: Sequence[Rule], values: Values, correction: RolloutCorrectionConfig | None = None
) -> dict[str, Finding | None]:
    """Applies a table of rules.

    Args:
        rules: The rules. Of several rules of a cause, the first one that holds makes the finding.
        values: Metrics or statistics by name.
        correction: Configuration of the run.

    Returns:
        Findings by cause. It is None if no rule holds, and missing if all metrics are missing.
    """
    correction = correction or RolloutCorrectionConfig()
    findings: dict[str, Finding | None] = {}
    for rule in rules:
        try:
            finding = _finding(rule, values, correction)
        except KeyError:
            # The condition or the message needs a value that is missing.
            continue
        if findings.get(rule.cause) is None:
            findings[rule.cause] = finding
    return findings


def _finding(rule: Rule, values: Values, correction: RolloutCorrectionConfig) -> Finding | None:
    """Returns the finding of a rule, or None if its condition does not hold.

    Raises:
        KeyError: A value that the condition or the message needs is missing.
    """
    value = values[rule.metric]
    confidence = float(rule.condition(value, values, correction))
    # Not `<= 0`, which would let NaN through.
    if not confidence > 0:
        return None
    text = rule.message.format(
        value=value, complement=1 - value, values=values, correction=correction
    )
    return Finding(
        cause=rule.cause,
        evidence=tuple(text.split("\n")),
        fix=rule.fix.format(correction=correction, values=values),
        confidence=confidence,
        share=rule.share,
        detail=rule.detail,
    )


OPSM = "train/opsm_clipfrac"
"""Metric of off-policy sequence masking, which keeps the policy close to the rollout policy."""
PULL = "train/rollout_pull"
"""Metric of the pull towards the rollout policy."""


def corrects_staleness(correction: RolloutCorrectionConfig) -> bool:
    """Whether weights, rejection or the clip compare the policy with the policy that sampled."""
    return (
        correction.corrects
        or correction.use_rollout_logprobs
        or correction.old_logprobs == "interpolate"
    )


def _all_retokenized(values: Values) -> bool:
    """Whether retokenization removed every sample, so that wider bounds would not help."""
    return values.get("train/skipped_steps", 0) > 0 and values.get("rollout/retokenized") == 1


def _at_bound_rule(fraction: str) -> Rule:
    """Returns the rule on the share of weights at the upper bound, a metric of one mode."""
    return Rule(
        cause="at_bound",
        metric=f"train/mis_{fraction}",
        condition=lambda value, values, correction: (
            correction.mode.high_fraction == fraction and value > MAX_WEIGHTS_AT_BOUND
        ),
        message=(
            f"in each of the last 10 steps more than {MAX_WEIGHTS_AT_BOUND:.0%} of the weights were"
            " at the upper bound, so the bound determines the weights"
        ),
        fix=(
            "raise --tis-upper-bound {correction.tis_upper_bound:g}, weight at a lower level, or"
            " reduce the mismatch."
        ),
        after=10,
    )


def _positive_rule(cause: str, metric: str, message: str, fix: str) -> Rule:
    """Returns the rule that a metric is above 0."""
    return Rule(
        cause=cause, metric=metric, condition=lambda value, *_: value > 0, message=message, fix=fix
    )


def _zero_gradient_rule(holds: Callable[[Values], bool], message: str, fix: str) -> Rule:
    """Returns the rule on a zero gradient that has a reason in the values."""
    return Rule(
        cause="zero_gradient",
        metric="train/grad_norm",
        condition=lambda value, values, _: value == 0 and holds(values),
        message=message,
        fix=fix,
    )


_STEP_RULES = (
    Rule(
        cause="rejection",
        metric="train/gradient_kept_fraction",
        condition=lambda value, values, _: (
            1 - value > MAX_REJECTED and not _all_retokenized(values)
        ),
        message=(
            f"{{complement:.1%}} of the tokens are rejected, more than {MAX_REJECTED:.0%}, so"
            " training sees a biased selection"
        ),
        fix=(
            "widen the rejection bounds, adapt them to length and noise (--rs-target-fraction"
            " 0.02), or reduce the mismatch (higher precision, newer weights)."
        ),
        after=2,
    ),
    Rule(
        cause="effective_samples",
        metric="train/mis_eff_sample_size",
        condition=lambda value, *_: value < MIN_EFFECTIVE_SAMPLES,
        message=f"fewer than {MIN_EFFECTIVE_SAMPLES:.0%} of the samples carry the gradient",
        fix=(
            "lower --tis-upper-bound, weight at a lower level (--tis-level token), or reduce the"
            " mismatch."
        ),
        after=2,
    ),
    *(_at_bound_rule(mode.high_fraction) for mode in MODES.values() if not mode.rejects),
    # The first reason that holds is named, so the most special one comes first.
    _zero_gradient_rule(
        _all_retokenized,
        "every sample was retokenized, so no token was trained on",
        "return the token ids that the engine sampled, or add --retokenization keep-mask"
        " (docs/agents.md).",
    ),
    _zero_gradient_rule(
        lambda values: values.get("train/skipped_steps", 0) > 0,
        "every token was rejected or masked",
        "widen the bounds, or raise --max-weight-staleness.",
    ),
    _zero_gradient_rule(
        lambda values: True,
        "all advantages are 0, which happens if each group's samples have equal rewards",
        "check the reward function and the difficulty of the prompts.",
    ),
    Rule(
        cause="nonfinite_gradient",
        metric="train/nonfinite_gradient_steps",
        condition=lambda value, *_: value != 0,
        message="the gradient was NaN or infinite and the step was skipped",
        fix="lower --lr, and check rewards, --kl-loss-coef and --entropy-coef.",
    ),
    _positive_rule(
        "nonfinite_log_probs",
        "train/nonfinite_token_fraction",
        "log-probs of the rollout or training engine are NaN, infinite or missing",
        "check the rollout engine's numerics; --nonfinite-policy {correction.nonfinite_policy}"
        " handles these tokens.",
    ),
    Rule(
        cause="no_variance",
        metric="rollout/zero_std_groups",
        condition=lambda value, *_: value >= 1,
        message="within every group all rewards are equal, so all advantages are 0",
        fix=(
            "use prompts of another difficulty, more samples per prompt, or a finer-grained reward."
        ),
        after=2,
    ),
    Rule(
        cause="constant_reward",
        metric="rollout/raw_reward",
        condition=lambda _, values, __: values[EQUAL_REWARD_ROLLOUTS] >= CONSTANT_REWARD_ROLLOUTS,
        message=f"every sample of the last {CONSTANT_REWARD_ROLLOUTS} rollouts has this reward",
        fix=(
            "check that the reward function reads the answer and the label correctly (--rm-type,"
            " --custom-rm-path, --label-key)."
        ),
    ),
    Rule(
        cause="staleness",
        metric="rollout/weight_staleness",
        condition=lambda value, values, correction: (
            value > 0 and not corrects_staleness(correction) and not values.keys() & {OPSM, PULL}
        ),
        message="samples come from older weights and nothing corrects for it",
        fix=(
            "add the correction that `slime-tis recommend` names for a dump (docs/choosing.md), or"
            " update the rollout engine after every rollout (--update-weights-interval 1,"
            " --rollout-lookahead 0)."
        ),
    ),
    Rule(
        cause="mismatch",
        metric="train/mismatch_k3_kl",
        condition=lambda value, *_: value > MAX_K3,
        message=f"the KL between rollout and training policy is above {MAX_K3:g} nats per token",
        fix=(
            "compare weights (--check-weight-sync), temperature, tokenizer and chat template of"
            " both engines, then raise the rollout's precision."
        ),
        after=2,
    ),
    Rule(
        cause="worst_worker",
        metric="train/worst_worker_ratio",
        condition=lambda value, values, _: (
            value > MAX_WORKER_RATIO
            and values["train/worst_worker_abs_diff"] > NEGLIGIBLE_DIFFERENCE
        ),
        message=(
            "the tokens of rollout server {values[train/worst_worker]:.0f} (from 0, in the order of"
            " --sglang-url) differ this many times as much from training as the other servers'"
            " tokens"
        ),
        fix="restart the server, and compare its version, flags and weights with the others'.",
        after=3,
    ),
    _positive_rule(
        "retokenized",
        "rollout/retokenized",
        "the generate function returned trained tokens that the engine did not sample",
        "return the sampled token ids instead of text (docs/agents.md).",
    ),
    _positive_rule(
        "routing_replay",
        "train/routing_replay_missing",
        "this number of samples has no recorded experts, so training routes their tokens itself",
        "generate with --use-rollout-routing-replay and an engine that records experts"
        " (docs/moe.md).",
    ),
    Rule(
        cause="absorbed_updates",
        metric="rollout/update_received",
        condition=lambda value, *_: value < MIN_UPDATE_RECEIVED,
        message=(
            "in each of the last 3 updates, rounding to the rollout engine's precision lost more"
            f" than {1 - MIN_UPDATE_RECEIVED:.0%}, so samples are staler than"
            " rollout/weight_staleness reports"
        ),
        fix=(
            "add --weight-update-rounding stochastic, train in the engine's precision (--bf16), or"
            " raise --lr or the engine's precision."
        ),
        after=3,
    ),
    Rule(
        cause="micro_batch_load",
        metric="perf/micro_batch_load",
        condition=lambda value, *_: value > 1,
        message=(
            "a micro-batch exceeds the token budget and may not fit into memory; one sample, or all"
            " segments of one rollout, are larger than the budget"
        ),
        fix=(
            "raise --max-tokens-per-gpu, lower --rollout-max-context-len, or return fewer or"
            " shorter segments."
        ),
    ),
)
STEP_RULES = tuple(
    replace(rule, message=f"{rule.metric} is {{value:.3g}}: {rule.message}") for rule in _STEP_RULES
)
"""Health warnings. The cause is the name of the metric `health/CAUSE`."""


@dataclass(frozen=True, kw_only=True)
class HealthState:
    """State of `Health` between two steps, for a checkpoint."""

    alarms: dict[str, tuple[bool, int]] = field(default_factory=dict)
    """For each rule, whether its warning is on, and the steps in a row that contradict that."""
    last_reward: float | None = None
    """Mean reward of the last rollout."""
    equal_reward_rollouts: int = 0
    """Consecutive rollouts in which every sample has that reward."""


@dataclass(frozen=True)
class Change:
    """A warning that began or ended at a step."""

    name: str
    """Name of the rule."""
    finding: Finding | None
    """The finding that began; None if it ended."""

    def __str__(self) -> str:
        """The warning in one line."""
        if self.finding is None:
            return (
                f"health/{self.name} has ended: the finding has been absent for {CALM_STEPS} steps."
            )
        return str(self.finding)


class Health:
    """Checks the metrics of every step. A warning whose metric is missing keeps its state."""

    def __init__(
        self, correction: RolloutCorrectionConfig, rules: Sequence[Rule] = STEP_RULES
    ) -> None:
        self._correction = correction
        self._rules = rules
        self._alarms = {rule.cause: Alarm(rule.after, CALM_STEPS) for rule in rules}
        self._last_reward: float | None = None
        self._equal_reward_rollouts = 0

    def check(self, metrics: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
        """Checks one optimizer step.

        Returns:
            health/NAME: 1 while a finding holds, 0 at the step at which it ends.
            One message for each finding that began or ended at the step.
        """
        health, changes = self.observe(metrics)
        return health, [str(change) for change in changes]

    def observe(self, metrics: Mapping[str, float]) -> tuple[dict[str, float], list[Change]]:
        """Checks one optimizer step; the same as `check` with changes instead of messages."""
        values = {**metrics, EQUAL_REWARD_ROLLOUTS: float(self._count_equal_rewards(metrics))}
        health: dict[str, float] = {}
        changes: list[Change] = []
        for name, finding in evaluate(self._rules, values, self._correction).items():
            alarm = self._alarms[name]
            was_on = alarm.is_on
            is_on = alarm.observe(finding is not None)
            if is_on or was_on:
                health[f"health/{name}"] = float(is_on)
            if is_on and not was_on:
                changes.append(Change(name, finding))
            elif was_on and not is_on:
                changes.append(Change(name, None))
        return health, changes

    def state(self) -> HealthState:
        """Returns the state that a resumed run continues from."""
        return HealthState(
            alarms={name: (alarm.is_on, alarm.count) for name, alarm in self._alarms.items()},
            last_reward=self._last_reward,
            equal_reward_rollouts=self._equal_reward_rollouts,
        )

    def restore(self, state: HealthState) -> None:
        """Continues from the state of an earlier process; rules that it lacks start anew."""
        for name, alarm in self._alarms.items():
            alarm.is_on, alarm.count = state.alarms.get(name, (False, 0))
        self._last_reward = state.last_reward
        self._equal_reward_rollouts = state.equal_reward_rollouts

    def _count_equal_rewards(self, metrics: Mapping[str, float]) -> int:
        """Counts consecutive rollouts, up to this step's, in which every sample has one reward."""
        reward = metrics.get("rollout/raw_reward")
        if reward is None:
            # Without the metric the count stays.
            return self._equal_reward_rollouts
        if metrics.get("rollout/zero_std_groups") != 1.0:
            self._equal_reward_rollouts = 0
        elif reward == self._last_reward:
            self._equal_reward_rollouts += 1
        else:
            self._equal_reward_rollouts = 1
        self._last_reward = reward
        return self._equal_reward_rollouts
