"""The contract of a rollout engine."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from slime_tis.trainer.data.sample import Prompt, Sample, Sampling
from slime_tis.trainer.engines.generation import RolloutFunction
from slime_tis.trainer.engines.weight_rounding import Precision

WeightSource = Callable[[], Iterable[tuple[str, Tensor]]]
"""Yields weights under their Hugging Face names, whole tensors, one after the other."""


@dataclass(frozen=True, kw_only=True)
class EngineHost:
    """The training process that an engine serves."""

    hf_checkpoint: str | Path
    """Weights that engines begin with."""
    weights: WeightSource
    """The policy's current weights, for servers that lost theirs; a collective."""
    weights_version: Callable[[], int] | None = None
    """Version of `weights`; None for the version that the engine was sent last."""
    output_dir: Path
    """Directory for logs of servers."""
    device: torch.device | str = "cpu"
    check_interrupts: Callable[[], None] = lambda: None
    """Called while the engine samples or waits; raises to end the rollout."""


@dataclass(frozen=True, kw_only=True)
class SentRows:
    """Rows of a tensor that the engine was sent, float32 on the CPU, rounded to its precision."""

    rows: Tensor
    """Every `stride`-th row from row `first` on; all rows of a small tensor."""
    first: int = 0
    stride: int = 1
    changed: bool
    """Whether any element of the tensor differs from the version before, in the engine's precision."""
    changed_everywhere: bool = False
    """Whether each of `weight_updates.BLOCKS` blocks of rows, and each of as many blocks of columns, differs."""


class RolloutUnavailable(RuntimeError):
    """No rollout can be had; the run saves what it has and stops with this message.

    No rollout engine is left that could answer, the reward server does not answer, or a filter drops every group.
    """


class RolloutFuture(Protocol):
    """A rollout that is being generated."""

    @property
    def progress(self) -> tuple[int, int]:
        """Responses that are complete, and all; from any thread."""

    def result(self) -> list[list[Sample]]:
        """Waits for it; a collective. One list of samples per prompt, the same on every rank.

        Raises:
            RolloutUnavailable: no engine is left to finish it.
        """


class RolloutEngine(Protocol):
    """Samples responses with its own copy of the policy's weights.

    Every method is a collective: in a torch.distributed job all ranks call it with the same arguments.
    """

    weight_version: int
    """Version of the weights in use; 0 is the checkpoint."""

    max_context_len: int | None
    """Longest text that it takes, in tokens, where that is known."""

    can_checkpoint_weights: bool
    """Whether weights older than the policy's can be saved and taken up again; else a resumed run begins with the
    policy's own."""

    @property
    def http_address(self) -> tuple[str, int] | None:
        """Host and port of the router, else of the first server, for POST /generate; None on ranks that ask none."""

    def submit(
        self, prompts: Sequence[Prompt], sampling: Sampling, seed: int, *, num_groups: int | None = None
    ) -> RolloutFuture:
        """Starts sampling `sampling.n_samples` responses to each prompt, with the present weights.

        With `num_groups` the rollout is the first that many groups to be complete; the rest is aborted, and
        `unfinished`.

        An engine in this process samples at once; a remote one goes on while the caller trains, and tokens that
        follow an update of the weights carry its version.
        """

    def submit_function(
        self,
        prompts: Sequence[Prompt],
        function: RolloutFunction,
        sampling: Sampling,
        seed: int,
        *,
        concurrency: int,
        num_groups: int | None = None,
    ) -> RolloutFuture:
        """Starts calling a function for `sampling.n_samples` rollouts of each prompt.

        The function is given a sample with the tokens of its prompt, and a `TokenEngine`, and returns the samples of
        one rollout. Its group has the samples of all its rollouts; those of one share a `rollout_id`.

        An engine in this process calls it at once, each rank for its share of the prompts; a remote one on rank 0, in
        the background, while the caller trains: requests go on over updates of the weights, and each token has the
        version that sampled it.

        With `num_groups`, once so many groups are complete, requests are answered with the finish reason abort.
        Rollouts with a sample of status ABORTED are then `unfinished`; the next call of this method calls the function
        again with that sample, or from the prompt on where the rollout has several or none was returned in time.

        Args:
            prompts: Each gets a group.
            function: Makes one rollout; what it raises ends the rollout of all.
            sampling: How requests are sampled that say nothing else.
            seed: Of the rollout.
            concurrency: Most calls of the function at once, of each rank that calls it.
            num_groups: Number of groups that are waited for; None waits for all.
        """

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, seed: int) -> list[list[Sample]]:
        """`submit` and its result, in the prompts' order."""

    def update_weights(self, source: WeightSource, version: int) -> None:
        """Takes new weights: calls the source once, and iterates what it returns to the end."""

    def weight_precision(self, name: str) -> Precision | None:
        """The precision in which the engine holds the tensor of a Hugging Face name.

        None where it is not known, and on ranks whose weights the engine does not take.
        """

    def wrong_weights(self, sent: Mapping[str, SentRows]) -> dict[str, list[str]]:
        """Names of the tensors in use that are other than those that were sent, as far as the engine can see.

        Args:
            sent: rows of the weights of the last update, by Hugging Face name.

        Returns:
            by the name of each copy of the weights that the engine can look into; empty lists where all is well.
        """

    def prompt_log_probs(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
        """Log-probs at temperature 1 of a text's tokens but the first, under the weights in use.

        Returns:
            by the name of whoever computed them, one entry for each copy of the weights.
        """

    def unfinished(self) -> list[list[Sample]]:
        """Groups whose stragglers were aborted, to be gone on with by the next `submit` before its own prompts."""

    def resume_unfinished(self, groups: list[list[Sample]]) -> None:
        """Takes up what `unfinished` gave, in another process."""

    def metrics(self) -> dict[str, float]:
        """What the engine counts, as rollout/NAME."""

    def save_weights(self, directory: Path) -> None:
        """Puts the weights in use into an unfinished checkpoint, when they are older than the policy's."""

    def load_weights(self, directory: Path, version: int) -> None:
        """Takes up what `save_weights` put into a checkpoint."""

    def close(self) -> None:
        """Gives back what the engine holds."""
