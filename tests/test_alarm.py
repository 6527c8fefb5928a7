"""When an alarm goes off, and when it ends."""

from slime_tis.alarm import Alarm


def states(alarm: Alarm, observations: str) -> str:
    """The alarm after each observation: 1 where the condition holds."""
    return "".join(str(int(alarm.observe(seen == "1"))) for seen in observations)


def test_it_goes_off_after_so_many_in_a_row_and_ends_after_so_many_without() -> None:
    assert states(Alarm(3, calm=2), "110111101001") == "000001111100"[:5] + "1111100"
    assert states(Alarm(1, calm=10), "1" + "0" * 9 + "1" + "0" * 10) == "1" * 20 + "0"


def test_by_default_it_ends_at_the_first_observation_without() -> None:
    assert states(Alarm(2), "11011") == "01001"
