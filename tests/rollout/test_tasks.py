"""Event loops for users' coroutines: what hangs, swallows cancellations or meddles with the loop
blocks nothing."""

import asyncio
import subprocess
import sys
import threading

import pytest

from slime_tis.errors import CustomFunctionError
from slime_tis.trainer.engines.event_loops import LoopThread, run

STUBBORN = """
import asyncio, time
from slime_tis.trainer.engines.event_loops import run

async def stubborn():
    while True:
        try:
            await asyncio.sleep(1000)
        except:
            pass

async def work():
    asyncio.create_task(stubborn())
    asyncio.create_task(asyncio.to_thread(time.sleep, 1000))
    await asyncio.sleep(0.01)
    return "worked"

print(run(work()))
"""


def test_a_process_ends_with_a_hung_thread_beside_a_hung_task():
    """A bare `except` also swallows the GeneratorExit with which the interpreter ends
    coroutines."""
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE) as process:
        try:
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()
        assert process.stdout.read() == b"worked\n"


def test_a_hung_call_blocks_no_other_call():
    released = threading.Event()

    async def work() -> list[int]:
        hung = asyncio.ensure_future(asyncio.to_thread(released.wait))
        answers = [await asyncio.to_thread(int, "7") for _ in range(20)]
        assert not hung.done()
        return answers

    try:
        assert run(work()) == [7] * 20
    finally:
        released.set()


def test_a_semaphore_of_a_module_serves_every_run():
    gate = asyncio.Semaphore(1)

    async def turn(number: int) -> int:
        async with gate:
            await asyncio.sleep(0)
            return number

    async def work() -> list[int]:
        return list(await asyncio.gather(turn(0), turn(1)))

    assert run(work()) == [0, 1]
    # with a loop for each run this one raises: bound to a different event loop
    assert run(work()) == [0, 1]


async def stops_the_loop() -> int:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.01)
    return 7


async def cancels_all_tasks() -> None:
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(0.01)


def test_a_function_that_stops_the_loop_is_finished():
    assert run(stops_the_loop()) == 7


def test_a_function_that_cancels_every_task_is_refused():
    with pytest.raises(CustomFunctionError, match="did not create"):
        run(cancels_all_tasks())
    assert run(stops_the_loop()) == 7  # the loop is usable afterwards


def test_a_stopped_loop_of_a_thread_continues():
    with LoopThread("test") as loop:
        for _ in range(2):
            assert loop.submit(stops_the_loop()).result(timeout=60) == 7


def test_a_loop_ends_though_a_task_swallows_cancellations():
    started = threading.Event()
    swallowed = []

    async def stubborn() -> None:
        while True:
            try:
                started.set()
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                swallowed.append(1)

    with LoopThread("test") as loop:
        loop.submit(stubborn())
        started.wait()
    assert len(swallowed) > 1
