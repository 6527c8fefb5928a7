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


def test_a_process_with_hung_threads_and_tasks_ends():
    """A bare `except` also swallows the GeneratorExit with which the interpreter ends
    coroutines."""
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE) as process:
        try:
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()
        assert process.stdout.read() == b"worked\n"


def test_a_hung_call_holds_up_no_other_one():
    released = threading.Event()

    async def work():
        hung = asyncio.ensure_future(asyncio.to_thread(released.wait))
        assert not hung.done()
        return [await asyncio.to_thread(int, "7") for _ in range(20)]

    try:
        assert run(work()) == [7] * 20
    finally:
        released.set()


def test_a_module_s_semaphore_serves_one_run_after_another():
    gate = asyncio.Semaphore(1)

    async def turn():
        async with gate:
            await asyncio.sleep(0)

    async def work():
        await asyncio.gather(turn(), turn())

    for _ in range(2):
        run(work())  # with a loop for each the second one raises: bound to a different event loop


async def stops_the_loop():
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.01)
    return 7


async def cancels_all_tasks():
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(0.01)


def test_a_function_that_stops_the_loop_or_cancels_every_task():
    assert run(stops_the_loop()) == 7
    with pytest.raises(CustomFunctionError, match="did not create"):
        run(cancels_all_tasks())
    assert run(stops_the_loop()) == 7
    with LoopThread("test") as loop:
        assert loop.submit(stops_the_loop()).result(timeout=60) == 7
        assert loop.submit(stops_the_loop()).result(timeout=60) == 7


def test_a_loop_of_its_own_thread_ends_beside_a_task_that_swallows_cancellations():
    started, swallowed = threading.Event(), []

    async def stubborn():
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
