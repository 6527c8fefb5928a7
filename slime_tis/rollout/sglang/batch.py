"""A rollout in flight: its responses are sampled one by one until all groups, or as many as wanted, are complete."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial

from slime_tis.rollout.sample import Sampling
from slime_tis.rollout.sglang.job import Job
from slime_tis.rollout.sglang.messages import MalformedAnswer, generate_payload, parse_generation
from slime_tis.rollout.sglang.pool import Pool
from slime_tis.rollout.sglang.server import ABORT_INTERVAL, ABORT_TIMEOUT, RequestRefused, Server, ServerError
from slime_tis.rollout.sglang.tasks import end


class Batch:
    """Groups of responses. It lives on the pool's loop; `progress` may be read from anywhere."""

    def __init__(
        self,
        name: str,
        groups: Sequence[Sequence[Job]],
        sampling: Sampling,
        pool: Pool,
        *,
        num_groups: int | None = None,
        longest_input: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """Asks nothing yet.

        Args:
          name: that the ids of its requests begin with, unlike that of any other batch, all of one width.
          groups: jobs of each prompt.
          sampling: how to sample.
          pool: of servers.
          num_groups: groups after which the rest is aborted; None waits for all.
          longest_input: most tokens that all servers take.
          vocab_size: ids of the model, which no answer may exceed; None does not look.
        """
        self.groups = groups
        self._name, self._sampling, self._pool = name, sampling, pool
        self._longest_input, self._vocab_size = longest_input, vocab_size
        self._want = len(groups) if num_groups is None else num_groups
        self._open = [sum(job.finish_reason is None for job in group) for group in groups]
        self._complete = self._open.count(0)
        self._settled = asyncio.Event()
        self._stopping = False
        self._interrupted: set[Job] = set()
        self._failure: Exception | None = None

    @property
    def progress(self) -> tuple[int, int]:
        """Responses that are complete, and all."""
        total = sum(map(len, self.groups))
        return total - sum(self._open), total

    async def run(self) -> None:
        """Samples until enough groups are complete.

        Raises:
          RolloutUnavailable: no server is left.
          RequestRefused: a server says that a request is wrong.
        """
        self._settle_if_enough()
        tasks = {
            asyncio.ensure_future(self._finish(job, group, place)): job
            for group, jobs in enumerate(self.groups)
            for place, job in enumerate(jobs)
            if job.finish_reason is None and not self._settled.is_set()
        }
        try:
            await self._settled.wait()
            if self._failure is None:
                self._stopping = True
                await self._abort(tasks)
        finally:
            await end(tasks)
        if self._failure is not None:
            raise self._failure

    async def interrupt(self, concerns: Callable[[Server], bool]) -> None:
        """Ends the requests that some servers are answering; the jobs go on from their tokens in new ones."""
        jobs = [job for group in self.groups for job in group if job.request and concerns(job.request[0])]
        requests = {job: job.request for job in jobs}
        self._interrupted.update(jobs)
        await _abort_until(lambda: [job for job in jobs if job.request and job.request == requests[job]])

    async def _finish(self, job: Job, group: int, place: int) -> None:
        """Samples one response to its end."""
        try:
            while job.finish_reason is None and not self._stopping:
                job.end_where_full(self._longest_input)
                if job.finish_reason is None:
                    await self._pool.run(partial(self._ask, job, f"{self._name}-g{group:06d}-s{place:04d}"))
        except Exception as error:
            self._failure = self._failure or error
            self._settled.set()
        if job.finish_reason is not None:
            self._open[group] -= 1
            self._complete += self._open[group] == 0
            self._settle_if_enough()

    async def _ask(self, job: Job, name: str, server: Server) -> None:
        """One request for the rest of a response."""
        first = self._pool.version_of(server)
        self._interrupted.discard(job)
        request_id = f"{name}-t{job.tries % 1000:03d}"
        job.tries += 1
        job.request = server, request_id
        seed = job.seed if self._pool.takes_seeds(server) else None
        try:
            answer = await server.generate(
                generate_payload(job.input_ids, self._sampling, limit=job.left, request_id=request_id, seed=seed)
            )
            completion = parse_generation(answer, limit=job.left, vocab_size=self._vocab_size)
        except MalformedAnswer as error:
            raise server.malformed("/generate", str(error)) from None
        finally:
            job.request = None
        versions = [first] * len(completion.token_ids) if completion.versions is None else completion.versions
        self._pool.check_versions(server, first, versions)
        server.has_spans = completion.has_spans
        job.absorb(completion, versions)
        if not completion.token_ids and not self._stopping and job not in self._interrupted:
            raise ServerError(f"{server.url} aborted a request before its first token.")

    def _settle_if_enough(self) -> None:
        if self._complete >= self._want:
            self._settled.set()

    async def _abort(self, tasks: dict[asyncio.Task[None], Job]) -> None:
        """Ends all requests in flight, which are answered with what has been sampled, and starts no more."""

        def in_flight() -> list[Job]:
            for task, job in tasks.items():
                if job.request is None:
                    task.cancel()
            return [job for task, job in tasks.items() if job.request and not task.done()]

        await _abort_until(in_flight)


async def _abort_until(in_flight: Callable[[], Iterable[Job]]) -> None:
    """Asks servers to abort requests, again and again: one that a server has not read yet it ignores."""
    loop = asyncio.get_running_loop()
    end = loop.time() + ABORT_TIMEOUT
    wait = 0.01
    while (requests := [job.request for job in in_flight() if job.request]) and loop.time() < end:
        await asyncio.gather(*(_abort(server, request_id) for server, request_id in requests))
        await asyncio.sleep(wait)
        wait = min(2 * wait, ABORT_INTERVAL)


async def _abort(server: Server, request_id: str) -> None:
    with suppress(ServerError, RequestRefused):  # then the request itself fails, too, or ends by itself
        await server.abort(request_id)
