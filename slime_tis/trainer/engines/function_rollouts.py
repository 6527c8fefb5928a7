"""Rollouts by a user-defined function: concurrent calls, which send requests to an engine."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from slime_tis.errors import CustomFunctionError
from slime_tis.trainer.data.sample import Prompt, Sample, SampleStatus, Sampling, by_rollout
from slime_tis.trainer.engines.event_loops import CANCELLED, cancel_and_wait
from slime_tis.trainer.engines.function_requests import (
    Generation,
    Request,
    RolloutFunction,
    SampleEngine,
    SampleKey,
)
from slime_tis.trainer.rank_collectives import map_over_ranks


@dataclass(eq=False, kw_only=True)
class FunctionCall:
    """A call of the function; it makes one rollout."""

    prompt: Prompt
    group_index: int
    number: int
    key: SampleKey
    samples: list[Sample] = field(default_factory=list)
    """Samples that this or an earlier call returned; empty before."""
    complete: bool = False

    def first_sample(self) -> Sample:
        """Returns the function's input: the aborted sample, or a fresh one.

        A rollout of several samples starts again, because a function continues only one sample.
        """
        if len(self.samples) == 1:
            sample = self.samples[0]
        else:
            sample = Sample(prompt_row=self.prompt, tokens=list(self.prompt.token_ids))
        sample.group_index = self.group_index
        sample.index = self.number
        sample.rollout_id = self.number
        return sample


def resumed_groups(
    unfinished: Sequence[Sequence[Sample]], prompts: Sequence[Prompt], n_samples: int, seed: int
) -> list[list[FunctionCall]]:
    """Returns the calls for unfinished groups, then `n_samples` calls for each prompt."""
    rollouts = [(group[0].row, by_rollout(group)) for group in unfinished]
    for prompt in prompts:
        no_samples: list[list[Sample]] = [[] for _ in range(n_samples)]
        rollouts.append((prompt, no_samples))
    # A prompt may occur several times; the occurrence makes the groups' random numbers differ.
    occurrences: Counter[int] = Counter()
    numbers = count()
    groups = []
    for group_index, (prompt, samples_by_rollout) in enumerate(rollouts):
        calls = []
        for index, samples in enumerate(samples_by_rollout):
            key = SampleKey(
                seed=seed,
                prompt_index=prompt.index,
                occurrence=occurrences[prompt.index],
                sample=index,
            )
            call = FunctionCall(
                prompt=prompt,
                group_index=group_index,
                number=next(numbers),
                key=key,
                samples=samples,
                complete=bool(samples) and not is_unfinished(samples),
            )
            calls.append(call)
        groups.append(calls)
        occurrences[prompt.index] += 1
    return groups


def is_unfinished(samples: Sequence[Sample]) -> bool:
    """Whether a rollout must be resumed."""
    return any(sample.status in (SampleStatus.ABORTED, SampleStatus.PENDING) for sample in samples)


def is_complete(group: Sequence[FunctionCall]) -> bool:
    """Whether every call of a group is complete."""
    return all(call.complete for call in group)


ABORT_TIMEOUT = 20.0
"""Longest wait for functions to return after requests are answered with abort, in seconds."""


@dataclass(eq=False)
class FunctionBatch:
    """Concurrent calls of a function. It belongs to one loop."""

    groups: Sequence[Sequence[FunctionCall]]
    function: RolloutFunction
    answer: Callable[[Request], Awaitable[Generation]]
    sampling: Sampling
    concurrency: int
    vocab_size: int | None
    """None skips the check of tokens."""
    num_groups: int | None = None
    """This number of complete groups aborts the others."""
    end_requests: Callable[[], Awaitable[None]] | None = None
    """Makes the engine answer requests with abort."""
    end_sample: Callable[[int], None] = lambda number: None
    """Called with the number of every call that ended."""

    def __post_init__(self) -> None:
        wanted = self.num_groups
        if wanted is None:
            wanted = len(self.groups)
        self._wanted = wanted
        self._complete = sum(map(is_complete, self.groups))
        self._stopping = False
        """Enough groups are complete: calls that have not started are skipped."""
        self._ended = False
        """`run` cancels the remaining calls."""
        self._changed = asyncio.Event()
        self._failure: Exception | None = None

    async def run(self) -> None:
        """Calls the function until enough groups are complete; raises the exception of a call."""
        gate = asyncio.Semaphore(self.concurrency)
        tasks = []
        for group in self.groups:
            for call in group:
                if not call.complete:
                    tasks.append(asyncio.create_task(self._call(call, group, gate)))
        try:
            while self._complete < self._wanted and self._failure is None:
                self._changed.clear()
                await self._changed.wait()
            if self._failure is None and self.end_requests is not None:
                self._stopping = True
                await self.end_requests()
                if tasks:
                    await asyncio.wait(tasks, timeout=ABORT_TIMEOUT)
        finally:
            self._ended = True
            await cancel_and_wait(tasks)
        if self._failure is not None:
            raise self._failure

    def fail(self, error: Exception) -> None:
        """Ends the batch: the engine cannot answer."""
        self._failure = self._failure or error
        self._changed.set()

    async def _call(
        self, call: FunctionCall, group: Sequence[FunctionCall], gate: asyncio.Semaphore
    ) -> None:
        """Calls the function once and stores its samples; an exception ends the batch."""
        async with gate:
            if self._stopping or self._failure is not None:
                return
            engine = SampleEngine(
                answer=self.answer,
                sampling=self.sampling,
                key=call.key,
                number=call.number,
                vocab_size=self.vocab_size,
            )
            try:
                samples = await self.function(call.first_sample(), engine)
                # After an abort, a function may still return a complete rollout.
                call.complete = not (self._stopping and is_unfinished(samples))
                call.samples = samples
                self._complete += is_complete(group)
            except asyncio.CancelledError:
                # Not cancelled by `run`: the function cancelled itself, which must not look like
                # the end of the batch.
                if self._ended:
                    raise
                self.fail(CustomFunctionError(CANCELLED))
            except Exception as error:
                self.fail(error)
            finally:
                self.end_sample(call.number)
            self._changed.set()


def calls_over_ranks(
    make: Callable[[Sequence[Sequence[FunctionCall]]], None],
    groups: Sequence[Sequence[FunctionCall]],
) -> list[list[Sample]]:
    """Returns the samples of all groups; each rank makes its share. A collective."""

    def make_share(share: Sequence[Sequence[FunctionCall]]) -> list[list[list[Sample]]]:
        make(share)
        samples_of_share = []
        for group in share:
            samples_of_share.append([call.samples for call in group])
        return samples_of_share

    # A rank fills only the calls of its share; the result has the samples of all ranks.
    samples_of_groups = map_over_ranks(make_share, groups)
    for group, samples_of_calls in zip(groups, samples_of_groups, strict=True):
        for call, samples in zip(group, samples_of_calls, strict=True):
            call.samples = samples
    return numbered(groups)


def numbered(groups: Sequence[Sequence[FunctionCall]]) -> list[list[Sample]]:
    """Returns the samples per group; rollouts are numbered from 0.

    A call without samples has one sample without a response.
    """
    numbered_groups = []
    number = 0
    for group_index, group in enumerate(groups):
        samples = []
        for call in group:
            for sample in call.samples or [call.first_sample()]:
                sample.group_index = group_index
                sample.index = number
                sample.rollout_id = number
                samples.append(sample)
            number += 1
        numbered_groups.append(samples)
    return numbered_groups
