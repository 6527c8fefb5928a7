"""Alarms for conditions that hold several times in a row."""


class Alarm:
    """Goes off when a condition has held a number of times in a row, and ends when it has not held as often."""

    def __init__(self, after: int, calm: int = 1) -> None:
        """Sets the two counts.

        Args:
            after: observations in a row at which it goes off.
            calm: observations in a row without the condition at which it ends.
        """
        self.is_on = False
        self._after, self._calm = after, calm
        self._row = 0  # observations in a row that speak against the present state

    def observe(self, holds: bool) -> bool:
        """Takes one observation; returns whether the alarm is on."""
        self._row = 0 if holds is self.is_on else self._row + 1
        if self._row >= (self._calm if self.is_on else self._after):
            self.is_on, self._row = not self.is_on, 0
        return self.is_on
