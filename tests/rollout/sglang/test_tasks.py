"""Tasks that do not end when they are told to."""

import asyncio

import pytest

from slime_tis.rollout.sglang.tasks import end, within


def test_a_task_that_swallows_a_cancellation_gets_another_one() -> None:
    swallowed = []

    async def stubborn() -> None:
        while len(swallowed) < 2:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                swallowed.append(1)
        await asyncio.sleep(3600)

    async def failing() -> None:
        raise ValueError("of no interest here")

    async def work() -> list[bool]:
        tasks = [asyncio.ensure_future(each) for each in (stubborn(), failing(), asyncio.sleep(0))]
        await asyncio.sleep(0.01)
        await end(tasks)
        return [task.cancelled() for task in tasks]

    assert asyncio.run(work()) == [True, False, False]
    assert len(swallowed) == 2


def test_work_that_takes_too_long_or_is_not_wanted_any_more_is_cancelled() -> None:
    async def work() -> None:
        cancelled = []

        async def long() -> None:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                cancelled.append(1)
                raise

        assert await within(None, asyncio.sleep(0, 7)) == 7
        assert await within(60.0, asyncio.sleep(0, 7)) == 7
        with pytest.raises(TimeoutError):
            await within(0.01, long())
        outer = asyncio.ensure_future(within(60.0, long()))
        await asyncio.sleep(0.01)
        outer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await outer
        assert len(cancelled) == 2

    asyncio.run(work())
