"""A bar follows what continues in the background, and is gone when it is over."""

import io
import time

import pytest

from slime_tis.trainer.reporting import progress


def test_the_bar_follows_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "INTERVAL", 0.005)
    written, done = io.StringIO(), [0]
    with progress.shown_progress(lambda: (done[0], 8), "responses", shown=True, file=written):
        for done[0] in (3, 8):
            while f"{done[0]}/8" not in written.getvalue():
                time.sleep(0.005)
    assert "responses" in written.getvalue()
    assert written.getvalue().rsplit("\r", 2)[1].strip() == ""


def test_an_error_ends_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "INTERVAL", 0.005)
    with pytest.raises(ValueError, match="mine"), progress.shown_progress(lambda: (0, 1), "", shown=True):
        raise ValueError("mine")


def test_what_is_over_at_once_has_no_bar() -> None:
    written = io.StringIO()
    with progress.shown_progress(lambda: (0, 1), "responses", shown=True, file=written):
        pass
    assert written.getvalue() == ""


def test_nothing_is_shown_where_it_is_not_wanted() -> None:
    written = io.StringIO()
    with progress.shown_progress(lambda: (0, 1), "responses", shown=False, file=written):
        pass
    assert written.getvalue() == ""
