"""The rollout engine that samples from SGLang servers over HTTP."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slime_tis.rollout.engine import WeightSource
from slime_tis.rollout.sample import Prompt, Sample, Sampling, response_limit
from slime_tis.rollout.sglang.batch import Batch
from slime_tis.rollout.sglang.config import SGLangConfig
from slime_tis.rollout.sglang.fleet import Fleet
from slime_tis.rollout.sglang.job import Job
from slime_tis.rollout.sglang.member import Patience
from slime_tis.rollout.sglang.ranks import Ranks
from slime_tis.rollout.sglang.weights import WeightSync

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Groups = list[list[Sample]]


class SGLangEngine:
    """Samples with SGLang servers, as `engine.RolloutEngine` asks.

    The first rank of a torch.distributed job talks to the servers, from a thread of its own, so that rollouts go on
    while the caller trains; all ranks get the same samples. Servers draw their own random numbers, so that samples
    are not the same again in an equal run, unless they are started with --enable-deterministic-inference: then each
    response has a seed of its own.
    """

    can_checkpoint_weights = False

    def __init__(
        self,
        config: SGLangConfig,
        hf_checkpoint: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        *,
        output_dir: Path,
        weights: WeightSource,
        device: torch.device | str = "cpu",
        weights_version: Callable[[], int] | None = None,
        patience: Patience | None = None,
        weight_sync: WeightSync | None = None,
        safe_point: Callable[[], None] = lambda: None,
    ) -> None:
        """Waits for the servers, and starts them where that is asked for; a collective.

        Args:
          config: which servers, and how they are asked.
          hf_checkpoint: that servers begin with.
          tokenizer: of the checkpoint.
          output_dir: for the output of servers that are started here.
          weights: the policy's present weights, for servers that come back without; a collective.
          device: of this process.
          weights_version: version of what `weights` yields; None where that is always the one in use.
          patience: how long to wait for servers; None is as the config says.
          weight_sync: the way of new weights; None is as the config says.
          safe_point: called while a rollout is waited for; raises where it is to be given up.

        Raises:
          RolloutUnavailable: no server comes up.
          ValueError: the servers refuse the key, or the config names none.
        """
        self.weight_version = 0
        self._tokenizer, self._weights, self._safe_point = tokenizer, weights, safe_point
        self._weights_version = weights_version or (lambda: self.weight_version)
        self._context_len, self._vocab_size = _model_sizes(Path(hf_checkpoint))
        self._run, self._submitted = secrets.token_hex(4), 0
        self._unfinished: Groups = []
        self._partial_in_flight = False
        self._fleet: Fleet | None = None
        self._ranks = Ranks()

        def open_fleet() -> int | None:
            self._fleet = Fleet(
                config,
                hf_checkpoint,
                log_dir=output_dir,
                device=device,
                vocab_size=self._vocab_size,
                patience=patience,
                weight_sync=weight_sync,
            )
            return self._fleet.longest_input

        self._longest_input = self._ranks.together(open_fleet, weights)

    def submit(
        self, prompts: Sequence[Prompt], sampling: Sampling, seed: int = 0, *, num_groups: int | None = None
    ) -> InFlight:
        """Starts sampling; see `engine.RolloutEngine`.

        Args:
          prompts: a group of responses each.
          sampling: how to sample.
          seed: of the rollout; it has an effect on servers that take a seed with each request.
          num_groups: groups that are waited for, the earliest of those that are complete; the others are aborted, kept
            as `unfinished`, and gone on with by the next call that has a `num_groups`, before its own prompts.

        Raises:
          ValueError: a prompt leaves no tokens for a response or has unknown tokens, or fewer groups are in flight than
            wanted.
        """
        fresh = [[self._job(prompt, sampling) for _ in range(sampling.n_samples)] for prompt in prompts]
        carried = (
            [] if num_groups is None else [[self._resumed(sample, sampling) for sample in g] for g in self._unfinished]
        )
        groups = [*carried, *fresh]
        for group, jobs in enumerate(groups):
            for place, job in enumerate(jobs):
                job.seed = response_seed(seed, group, place)
        self._check_num_groups(num_groups, len(groups))
        batch, future = None, None
        if self._fleet is not None:
            batch, future = self._fleet.start(f"{self._run}-r{self._submitted:08d}", groups, sampling, num_groups)
        self._submitted += 1
        self._partial_in_flight |= num_groups is not None
        return InFlight(self, batch, future, num_groups=num_groups, total=sum(map(len, groups)))

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, seed: int = 0) -> Groups:
        """`submit` and its result, in the prompts' order."""
        return self.submit(prompts, sampling, seed).result()

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Gives the servers new weights; requests in flight pause, and go on with them.

        A server that fails is taken out, and given the weights when it comes back.

        Args:
          named_tensors: Hugging Face names and whole tensors.
          version: that tokens sampled from now on carry.
        """
        given = [named_tensors]

        def weights() -> Iterable[tuple[str, Tensor]]:
            return given.pop() if given else self._weights()

        self._ranks.together(lambda: self._first().update(lambda: self._ranks.iterate(weights), version), weights)
        self.weight_version = version

    def prompt_log_probs(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
        """Log-probs at temperature 1 of all tokens but the first, by the URL of each server."""
        return self._ranks.together(lambda: self._first().prompt_log_probs(token_ids), self._weights)

    def unfinished(self) -> Groups:
        """Groups that were aborted, and are gone on with; those of a rollout in flight until it is there."""
        return self._unfinished

    def resume_unfinished(self, groups: Groups) -> None:
        """Takes up what `unfinished` gave, in another process."""
        self._unfinished = groups

    def metrics(self) -> dict[str, float]:
        """rollout/sglang_… counts since the start, on the first rank."""
        metrics = {} if self._fleet is None else self._fleet.metrics()
        return {f"rollout/sglang_{name}": value for name, value in metrics.items()}

    def save_weights(self, directory: Path) -> None:
        """Writes nothing: weights that servers hold do not travel with checkpoints."""

    def load_weights(self, directory: Path, version: int) -> None:
        """Gives the servers the policy's present weights, in place of the older ones that they had."""
        self.update_weights(self._weights(), version)

    def close(self) -> None:
        """Ends what is in flight, and stops the servers that were started here; counts and `unfinished` stay."""
        if self._fleet is not None:
            self._fleet.close()
        self._ranks.close()

    def collect(self, batch: Batch | None, future: Future[None] | None, num_groups: int | None) -> Groups:
        """Waits for a batch; a collective, for `InFlight`."""

        def wait() -> tuple[Groups, Groups]:
            assert batch is not None and future is not None
            self._first().wait(
                future, lambda: self._ranks.iterate(self._weights), self._weights_version, self._safe_point
            )
            return self._sorted(batch.groups, num_groups)

        if num_groups is not None:
            self._partial_in_flight = False
        groups, left = self._ranks.together(wait, self._weights)
        if num_groups is not None:
            self._unfinished = left
        return groups

    def _first(self) -> Fleet:
        assert self._fleet is not None
        return self._fleet

    def _sorted(self, groups: Sequence[Sequence[Job]], num_groups: int | None) -> tuple[Groups, Groups]:
        """The groups to train on, numbered from 0, and those to go on with."""
        complete = [group for group in groups if all(job.finish_reason for job in group)][:num_groups]
        taken = set(map(id, complete))
        return self._samples(complete), self._samples([group for group in groups if id(group) not in taken])

    def _samples(self, groups: Sequence[Sequence[Job]]) -> Groups:
        numbers = iter(range(sum(map(len, groups))))
        return [[job.sample(self._tokenizer, place, next(numbers)) for job in g] for place, g in enumerate(groups)]

    def _job(self, prompt: Prompt, sampling: Sampling) -> Job:
        limit = response_limit(prompt, sampling, self._context_len, self._longest_input)
        if self._vocab_size is not None and not 0 <= min(prompt.token_ids) <= max(prompt.token_ids) < self._vocab_size:
            raise ValueError(
                f"prompt {prompt.index} has token {max(prompt.token_ids)}, but the model's vocabulary ends at "
                f"{self._vocab_size - 1}; use the tokenizer of --hf-checkpoint."
            )
        return Job(prompt=prompt, limit=int(min(limit, max(self._servers_context() - len(prompt.token_ids), 1))))

    def _servers_context(self) -> float:
        """Tokens of prompt and response that any server may be asked for: 0.5.9 refuses the whole context, and a server
        may have been started with a shorter one than the checkpoint's, six more than its longest input."""
        context = float("inf") if self._context_len is None else self._context_len - 1
        return context if self._longest_input is None else min(context, self._longest_input + 6)

    def _resumed(self, sample: Sample, sampling: Sampling) -> Job:
        return Job.from_sample(sample, self._job(sample.prompt, sampling).limit)

    def _check_num_groups(self, num_groups: int | None, groups: int) -> None:
        if num_groups is None:
            return
        if not 0 < num_groups <= groups:
            raise ValueError(
                f"{num_groups} groups are wanted of {groups} in flight; submit more prompts or want fewer."
            )
        if self._partial_in_flight:
            raise ValueError("a partial rollout is in flight already; wait for its result first.")


class InFlight:
    """A rollout that servers are sampling."""

    def __init__(
        self,
        engine: SGLangEngine,
        batch: Batch | None,
        future: Future[None] | None,
        *,
        num_groups: int | None,
        total: int,
    ) -> None:
        """`SGLangEngine.submit` makes it; batch and future are None on all ranks but the first."""
        self._engine, self._batch, self._future, self._want, self._total = engine, batch, future, num_groups, total
        self._groups: Groups | None = None

    @property
    def progress(self) -> tuple[int, int]:
        """Responses that are complete, and all; on the first rank, and from any thread."""
        return (0, self._total) if self._batch is None else self._batch.progress

    def result(self) -> Groups:
        """Waits for the groups; a collective.

        Raises:
          RolloutUnavailable: no server is left to finish it, or one says that a request is wrong.
        """
        if self._groups is None:
            self._groups = self._engine.collect(self._batch, self._future, self._want)
        return self._groups


def response_seed(seed: int, group: int, place: int) -> int:
    """The seed of one response of a rollout, 63 bits of a hash: equal seeds would give a group equal responses."""
    digest = hashlib.sha256(f"{seed} {group} {place}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _model_sizes(hf_checkpoint: Path) -> tuple[int | None, int | None]:
    """Context length and vocabulary size of a checkpoint, as far as its configuration has them."""
    config = json.loads((hf_checkpoint / "config.json").read_text())
    config = config.get("text_config") or config
    return config.get("max_position_embeddings"), config.get("vocab_size")
