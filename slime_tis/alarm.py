"""Alarms for conditions that hold several times in a row."""


class Alarm:
    """Turns on after a condition held `after` times in a row, and off after it failed `calm` times in a row."""

    def __init__(self, after: int, calm: int = 1) -> None:
        self.is_on = False
        self._after, self._calm = after, calm
        self._row = 0  # observations in a row that contradict `is_on`

    def observe(self, holds: bool) -> bool:
        """Takes one observation; returns whether the alarm is on."""
        self._row = 0 if holds is self.is_on else self._row + 1
        if self._row >= (self._calm if self.is_on else self._after):
            self.is_on, self._row = not self.is_on, 0
        return self.is_on
