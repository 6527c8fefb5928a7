"""Alarms for conditions that hold several times in a row."""


class Alarm:
    """An alarm that neither starts nor ends because of a single observation.

    Args:
        after: Observations in a row with the condition that turn it on.
        calm: Observations in a row without the condition that turn it off.
    """

    def __init__(self, after: int, calm: int = 1) -> None:
        self.is_on = False
        self.count = 0
        """Observations in a row that contradict `is_on`."""
        self._after = after
        self._calm = calm

    def observe(self, holds: bool) -> bool:
        """Takes one observation; returns whether the alarm is on."""
        if holds is self.is_on:
            self.count = 0
            return self.is_on
        self.count += 1
        limit = self._after
        if self.is_on:
            limit = self._calm
        if self.count >= limit:
            self.is_on = holds
            self.count = 0
        return self.is_on
