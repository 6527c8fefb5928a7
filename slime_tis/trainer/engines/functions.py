"""Rollouts that functions of the user's own make, many at once, by asking an engine."""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch.distributed as dist

from slime_tis.errors import CustomFunctionError, first_line
from slime_tis.trainer.collectives import map_over_ranks
from slime_tis.trainer.data.sample import Prompt, Sample, SampleStatus, Sampling, by_rollout
from slime_tis.trainer.engines.generation import Generation, Request, RolloutFunction, SampleEngine, SampleKey
from slime_tis.trainer.engines.tasks import CANCELLED, cancel_and_wait

ABORT_TIMEOUT = 20.0
"""Longest wait for functions to return what they have once requests are answered with abort, in seconds."""


@dataclass(eq=False, kw_only=True)
class FunctionCall:
    """A call of the function, which makes one rollout."""

    prompt: Prompt
    group_index: int
    """Place of its prompt in the batch."""
    number: int
    """Number of the rollout in the batch."""
    key: SampleKey
    samples: list[Sample] = field(default_factory=list)
    """What it returned, or what an earlier call did; empty before."""
    complete: bool = False
    """Whether no further call is needed."""

    def fresh_sample(self) -> Sample:
        """What the function begins with: tokens of the prompt and no response."""
        return Sample(
            prompt=self.prompt,
            group_index=self.group_index,
            index=self.number,
            rollout_id=self.number,
            tokens=list(self.prompt.token_ids),
        )

    def first_sample(self) -> Sample:
        """What the function is given: the sample that was aborted, where its rollout is that sample alone."""
        if len(self.samples) != 1:
            return self.fresh_sample()
        (sample,) = self.samples
        sample.group_index, sample.index, sample.rollout_id = self.group_index, self.number, self.number
        return sample


def new_groups(prompts: Sequence[Prompt], n_samples: int, seed: int) -> list[list[FunctionCall]]:
    """The calls for each prompt.

    Args:
        prompts: Of the rollout.
        n_samples: Calls for each.
        seed: Of the rollout.
    """
    return _groups([(prompt, [[]] * n_samples) for prompt in prompts], seed)


def resumed_groups(
    unfinished: Sequence[Sequence[Sample]], prompts: Sequence[Prompt], n_samples: int, seed: int
) -> list[list[FunctionCall]]:
    """The calls for groups that were aborted, followed by those for new prompts."""
    earlier = [(group[0].row, by_rollout(group)) for group in unfinished]
    return _groups([*earlier, *((prompt, [[]] * n_samples) for prompt in prompts)], seed)


def _groups(of_prompts: Sequence[tuple[Prompt, Sequence[list[Sample]]]], seed: int) -> list[list[FunctionCall]]:
    seen: Counter[int] = Counter()
    numbers = count()
    groups = []
    for group_index, (prompt, rollouts) in enumerate(of_prompts):
        calls = []
        for place, samples in enumerate(rollouts):
            key = SampleKey(seed=seed, prompt_index=prompt.index, occurrence=seen[prompt.index], sample=place)
            complete = bool(samples) and not is_unfinished(samples)
            calls.append(
                FunctionCall(
                    prompt=prompt,
                    group_index=group_index,
                    number=next(numbers),
                    key=key,
                    samples=samples,
                    complete=complete,
                )
            )
        seen[prompt.index] += 1
        groups.append(calls)
    return groups


def is_unfinished(samples: Sequence[Sample]) -> bool:
    """Whether a rollout is to be gone on with."""
    return any(sample.status in (SampleStatus.ABORTED, SampleStatus.PENDING) for sample in samples)


class FunctionBatch:
    """Calls of a function, some at a time. It belongs to one loop; `progress` may be read from any thread."""

    def __init__(
        self,
        groups: Sequence[Sequence[FunctionCall]],
        function: RolloutFunction,
        answer: Callable[[Request], Awaitable[Generation]],
        sampling: Sampling,
        *,
        concurrency: int,
        vocab_size: int | None,
        num_groups: int | None = None,
        end_requests: Callable[[], Awaitable[None]] | None = None,
        end_sample: Callable[[int], None] = lambda number: None,
    ) -> None:
        """Calls nothing yet.

        Args:
            groups: Calls for each prompt.
            function: Makes one rollout.
            answer: Answers one request.
            sampling: The run's own.
            concurrency: Most calls at once.
            vocab_size: Number of token ids of the model; None checks none.
            num_groups: Number of complete groups after which the rest is aborted; None waits for all.
            end_requests: Has requests answered with abort from then on; with `num_groups` alone.
            end_sample: Called with the number of each call that has ended.
        """
        if concurrency < 1:
            raise ValueError(f"concurrency is {concurrency} but must be 1 or more.")
        self.groups = groups
        self._function, self._answer, self._sampling, self._concurrency = function, answer, sampling, concurrency
        self._vocab_size, self._end_requests, self._end_sample = vocab_size, end_requests, end_sample
        self._num_groups = len(groups) if num_groups is None else num_groups
        self._missing = [sum(not call.complete for call in group) for group in groups]
        """Calls of each group that are not complete."""
        self._complete = self._missing.count(0)
        """Groups whose calls are."""
        self._stopping = self._ended = False
        self._changed = asyncio.Event()
        self._failure: Exception | None = None

    @property
    def progress(self) -> tuple[int, int]:
        """Number of calls that are complete, and of all."""
        calls = [call for group in self.groups for call in group]
        return sum(call.complete for call in calls), len(calls)

    async def run(self) -> None:
        """Calls the function until enough groups are complete.

        Raises:
            Exception: What a call raised.
        """
        gate = asyncio.Semaphore(self._concurrency)
        tasks = [
            asyncio.create_task(self._call(call, place, gate))
            for place, group in enumerate(self.groups)
            for call in group
            if not call.complete
        ]
        try:
            while self._complete < self._num_groups and self._failure is None:
                self._changed.clear()
                await self._changed.wait()
            if self._failure is None and self._end_requests is not None:
                self._stopping = True
                await self._end_requests()
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

    async def _call(self, call: FunctionCall, place: int, gate: asyncio.Semaphore) -> None:
        """Calls the function for a call of the group at a place."""
        async with gate:
            if self._stopping or self._failure is not None:
                return
            engine = SampleEngine(
                self._answer, self._sampling, call.key, number=call.number, vocab_size=self._vocab_size
            )
            try:
                samples = await self._function(call.first_sample(), engine)
                call.complete = not (self._stopping and is_unfinished(samples))
                call.samples = samples
                self._missing[place] -= call.complete
                self._complete += call.complete and self._missing[place] == 0
            except asyncio.CancelledError:
                if self._ended:
                    raise
                self.fail(CustomFunctionError(CANCELLED))
            except Exception as error:
                self.fail(error)
            finally:
                self._end_sample(call.number)
            self._changed.set()


def calls_over_ranks(
    make: Callable[[Sequence[Sequence[FunctionCall]]], None], groups: Sequence[Sequence[FunctionCall]]
) -> list[list[Sample]]:
    """The samples of all groups, of which each rank makes its share; a collective.

    Args:
        make: Makes the rollouts of some groups.
        groups: Calls for each prompt, the same on every rank.

    Raises:
        ValueError: A function put into a sample what cannot be sent to another rank.
    """
    is_shared = dist.is_initialized() and dist.get_world_size() > 1

    def share(part: Sequence[Sequence[FunctionCall]]) -> list[list[list[Sample]] | bytes]:
        make(part)
        made = [[call.samples for call in group] for group in part]
        return [packed(group) for group in made] if is_shared else list(made)

    for group, made in zip(groups, map_over_ranks(share, groups), strict=True):
        rollouts = pickle.loads(made) if isinstance(made, bytes) else made
        for call, samples in zip(group, rollouts, strict=True):
            call.samples = samples
    return numbered(groups)


def packed(group: list[list[Sample]]) -> bytes:
    """The rollouts of a group as bytes, for other ranks.

    Raises:
        ValueError: A sample has what cannot be pickled.
    """
    try:
        return pickle.dumps(group)
    except Exception as error:  # of any object of the user's
        raise ValueError(
            f"a sample cannot be sent to the other ranks: {first_line(error)}; put only plain data into its metadata."
        ) from error


def divided_calls(
    groups: Sequence[Sequence[FunctionCall]], num_groups: int | None
) -> tuple[list[list[Sample]], list[list[Sample]]]:
    """The samples of the first complete groups, and those of the others, which are to be gone on with."""
    complete = [group for group in groups if all(call.complete for call in group)][:num_groups]
    taken = set(map(id, complete))
    return numbered(complete), numbered([group for group in groups if id(group) not in taken])


def numbered(groups: Sequence[Sequence[FunctionCall]]) -> list[list[Sample]]:
    """The samples of each group, numbered from 0 on; a call that was not made has one without a response."""
    found, number = [], 0
    for place, group in enumerate(groups):
        samples = []
        for call in group:
            for sample in call.samples or [call.fresh_sample()]:
                sample.group_index, sample.index, sample.rollout_id = place, number, number
                samples.append(sample)
            number += 1
        found.append(samples)
    return found
