"""Alarms for conditions that hold several times in a row."""


class Alarm:
    """Turns on after a condition held `after` times in a row, and off after it failed `calm` times in a row."""

    def __init__(self, after: int, calm: int = 1) -> None:
        self.is_on = False
        self.count = 0
        """Observations in a row that contradict `is_on`."""
        self._after = after
        self._calm = calm

    def observe(self, holds: bool) -> bool:
        """Takes one observation; returns whether the alarm is on."""
        self.count = 0 if holds is self.is_on else self.count + 1
        limit = self._calm if self.is_on else self._after
        if self.count >= limit:
            self.is_on = not self.is_on
            self.count = 0
        return self.is_on
