"""Signals are noticed at once, obeyed if the caller allows it, and shared between ranks."""

import os
import signal
import time
from pathlib import Path

import pytest
from torch import distributed as dist

from slime_tis.trainer import stop_signals
from slime_tis.trainer.stop_signals import Failure, Interrupted, Interrupts, stops_because


def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138)]
)
def test_a_signal_is_raised_where_work_may_be_abandoned(number, status):
    before = signal.getsignal(number)
    with Interrupts() as interrupts:
        interrupts.started()
        for _ in range(3):  # a launcher passes the terminal's signal on
            os.kill(os.getpid(), number)
        until(lambda: interrupts.number)
        interrupts.check()  # nothing may be abandoned here
        with pytest.raises(Interrupted) as raised, interrupts.abandonable():
            interrupts.check()
    assert (raised.value.status, str(raised.value)) == (status, number.name)
    assert signal.getsignal(number) is before


def run_child(body):
    pid = os.fork()
    if pid == 0:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        body()
        os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_signal_during_start_up_ends_the_process(capfd):
    def body():
        with Interrupts():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)

    assert run_child(body) == 143
    assert "before training began" in capfd.readouterr().err


def test_a_second_signal_ends_the_process_with_its_children(capfd, tmp_path):
    def body():
        with Interrupts() as interrupts:
            interrupts.started()
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            (tmp_path / "child").write_text(str(child))
            os.kill(os.getpid(), signal.SIGINT)
            until(lambda: interrupts.number)
            stop_signals.REPEAT_WINDOW = (
                0.0  # the next signal is a second one, in this process alone
            )
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)

    assert run_child(body) == 143
    assert [line.split(":")[0] for line in capfd.readouterr().err.splitlines()] == [
        "SIGINT",
        "SIGTERM",
    ]
    child = int((tmp_path / "child").read_text())
    until(
        lambda: (
            not Path(f"/proc/{child}").exists()
            or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]
        )
    )


def test_a_forked_child_has_its_own_signals():
    with Interrupts() as interrupts:
        interrupts.started()

        def body():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)

        assert run_child(body) == -signal.SIGTERM
        os.kill(os.getpid(), signal.SIGUSR1)
        until(lambda: interrupts.number)
        assert (
            interrupts.number == signal.SIGUSR1
        )  # the child's signal, which came first, is not among this process's


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            interrupts.started()
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGUSR1)
            until(lambda: interrupts.number)
            assert interrupts.number == signal.SIGUSR1
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture
def store() -> dist.HashStore:
    """The key-value store of two ranks."""
    return dist.HashStore()


@pytest.fixture
def ranks(store) -> tuple[Interrupts, Interrupts]:
    """The signals of two ranks that share a store."""
    first = Interrupts()
    second = Interrupts()
    first.share(store, 0)
    second.share(store, 1)
    return first, second


def test_ranks_share_signals(store, ranks):
    _, second = ranks
    store.set("signal", str(int(signal.SIGUSR1)))
    second._look_at_others()
    assert second.number == signal.SIGUSR1


def test_ranks_share_the_first_failure(ranks):
    first, second = ranks
    assert second.failure_elsewhere() is None
    assert first.report_failure("no memory") == Failure(0, "no memory")
    assert second.report_failure("the same, later") == Failure(0, "no memory")
    assert second.failure_elsewhere() == Failure(0, "no memory")


def test_the_failure_of_this_rank_is_not_elsewhere(ranks):
    first, _ = ranks
    first.report_failure("no memory")
    assert first.failure_elsewhere() is None


def test_a_rank_names_the_rank_that_failed():
    message = stops_because(1, Failure(0, "no memory"))
    assert message == "rank 1 stops because rank 0 failed: no memory"


def test_a_rank_without_a_message_was_killed():
    message = stops_because(1, None)
    assert message.startswith("rank 1 stops because another rank ended without a message")
