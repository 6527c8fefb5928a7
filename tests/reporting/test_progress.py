"""A bar follows work in the background, and disappears afterwards."""

import io
import time

import pytest

from slime_tis.trainer.reporting import progress


def test_the_bar_follows_and_leaves_nothing(monkeypatch):
    monkeypatch.setattr(progress, "INTERVAL", 0.005)
    written, done = io.StringIO(), [0]
    with progress.shown_progress(lambda: (done[0], 8), "responses", shown=True, file=written):
        for done[0] in (3, 8):
            while f"{done[0]}/8" not in written.getvalue():
                time.sleep(0.005)
    assert "responses" in written.getvalue()
    assert written.getvalue().rsplit("\r", 2)[1].strip() == ""


@pytest.mark.parametrize("shown", [True, False], ids=["short work", "not shown"])
def test_no_bar(shown):
    written = io.StringIO()
    with pytest.raises(KeyError), progress.shown_progress(lambda: (0, 1), "responses", shown=shown, file=written):
        raise KeyError
    assert written.getvalue() == ""
