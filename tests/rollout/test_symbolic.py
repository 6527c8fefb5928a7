"""Symbolic comparison in a process of its own: right answers, and expressions that would hang any other way."""

import os
import signal
import threading
import time
from contextlib import suppress

import psutil

from slime_tis.trainer.rewards import symbolic
from slime_tis.trainer.rewards.symbolic import same_expression


def test_comparisons_from_threads_and_after_the_process_was_killed():
    found = []
    threads = [
        threading.Thread(target=lambda n=n: found.append(same_expression(f"x+{n}+1", f"x+{n + 1}"))) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 8
    process = symbolic._worker._process
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not same_expression("y+w", "w+y")  # the one that meets the end of the process counts as wrong
    assert same_expression("z+w", "w+z")


def test_an_expression_without_end_is_wrong_and_costs_its_processor_time_alone(monkeypatch, caplog):
    monkeypatch.setattr(symbolic, "SECONDS", 1)
    symbolic._worker._stop()
    started = psutil.Process().children()
    assert not same_expression("1000000007^{1000000009}", "x^2")
    assert "more than 1 s of processor time" in caplog.text
    assert same_expression("a+b", "b+a")
    symbolic._worker._stop()
    assert psutil.Process().children() == started


def test_the_process_ends_with_the_program():
    read, write = os.pipe()
    program = os.fork()
    if program == 0:
        same_expression("c+d", "d+c")
        os.write(write, b" ".join(str(child.pid).encode() for child in psutil.Process().children()))
        os._exit(0)
    os.waitpid(program, 0)
    workers = [int(pid) for pid in os.read(read, 100).split()]
    assert len(workers) == 1
    deadline = time.monotonic() + 10
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(workers[0]).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.05)
