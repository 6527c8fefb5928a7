"""Health warnings during training: reports when a finding of `slime_tis.rules.STEP_RULES` begins and ends."""

from collections.abc import Mapping

from slime_tis.alarm import Alarm
from slime_tis.correction import RolloutCorrectionConfig
from slime_tis.rules import EQUAL_REWARD_ROLLOUTS, STEP_RULES, evaluate

CALM_STEPS = 10
"""Consecutive steps without a finding after which its warning ends."""


class Health:
    """Checks the metrics of each step. A finding whose metric is missing keeps its state."""

    def __init__(self, correction: RolloutCorrectionConfig) -> None:
        self._correction = correction
        self._alarms = {rule.cause: Alarm(rule.after, CALM_STEPS) for rule in STEP_RULES}
        self._last_reward: float | None = None
        self._equal_reward_rollouts = 0

    def check(self, metrics: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
        """Checks one optimizer step.

        Returns:
            health/NAME: 1 while a finding holds, 0 at the step at which it ends.
            One message for each finding that began or ended at the step.
        """
        values = {**metrics, EQUAL_REWARD_ROLLOUTS: float(self._count_equal_rewards(metrics))}
        health, messages = {}, []
        for name, finding in evaluate(STEP_RULES, values, self._correction).items():
            alarm = self._alarms[name]
            was_on, is_on = alarm.is_on, alarm.observe(finding is not None)
            if is_on or was_on:
                health[f"health/{name}"] = float(is_on)
            if is_on and not was_on:
                messages.append(str(finding))
            elif was_on and not is_on:
                messages.append(f"health/{name} has ended: the finding is absent since {CALM_STEPS} steps.")
        return health, messages

    def _count_equal_rewards(self, metrics: Mapping[str, float]) -> int:
        """Consecutive rollouts, including this step's, in which every sample has the same reward."""
        reward = metrics.get("rollout/raw_reward")
        if reward is not None:
            is_constant = metrics.get("rollout/zero_std_groups") == 1.0
            count = self._equal_reward_rollouts + 1 if reward == self._last_reward else 1
            self._equal_reward_rollouts = count if is_constant else 0
            self._last_reward = reward
        return self._equal_reward_rollouts
