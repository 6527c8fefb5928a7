"""The contract of a rollout engine."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from slime_tis.peft_directory import AdapterConfig
from slime_tis.trainer.data.sample import Prompt, Sample, Sampling
from slime_tis.trainer.engines.function_requests import RolloutFunction
from slime_tis.trainer.engines.weight_rounding import Precision
from slime_tis.trainer.invariant.self_check import Kernels

WeightSource = Callable[[], Iterable[tuple[str, Tensor]]]
"""Yields the Hugging Face name and the complete tensor of one weight after the other."""


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
    dtype: torch.dtype = torch.float32
    """Type of training's weights and activations."""
    kernels: Kernels | None = None
    """Operations that training shares, see --true-on-policy."""
    adapter: AdapterConfig | None = None
    """Settings of the LoRA adapter that is sent unmerged; None if all weights are sent."""
    device: torch.device | str = "cpu"
    check_interrupts: Callable[[], None] = lambda: None
    """Called while the engine samples or waits; raises to end the rollout."""


@dataclass(frozen=True, kw_only=True)
class SentRows:
    """Rows of a sent tensor, float32 on the CPU, rounded to the engine's precision."""

    rows: Tensor
    """Every `stride`-th row from row `first` on; all rows of a small tensor."""
    first: int = 0
    stride: int = 1
    changed: bool
    """Whether any element of the tensor changed in the update, in the engine's precision."""
    changed_everywhere: bool = False
    """Whether each of `weight_updates.BLOCKS` blocks of rows and of columns changed."""


class RolloutUnavailable(RuntimeError):
    """No rollout is possible; the run saves a checkpoint and stops with this message."""


class RolloutFuture(Protocol):
    """A rollout that is being generated."""

    @property
    def progress(self) -> tuple[int, int]:
        """Numbers of complete and of all responses; from any thread."""

    def is_done(self) -> bool:
        """Whether `result` returns samples without waiting; a collective."""

    def result(self) -> list[list[Sample]]:
        """Waits for the rollout and returns a list of samples per prompt; a collective.

        Every rank gets the same samples.
        """


class RolloutEngine(Protocol):
    """Samples responses with a copy of the policy's weights.

    Every method is a collective: in a torch.distributed job all ranks call it with the same
    arguments.
    """

    weight_version: int
    """Version of the weights in use; 0 is the checkpoint."""

    workers: tuple[str, ...]
    """Names of the servers, to which `Sample.rollout_workers` refers; empty behind a router, which
    does not name them.
    """

    max_context_len: int | None
    """Longest text, in tokens; None if unknown."""

    can_checkpoint_weights: bool
    """Whether weights older than the policy's are saved and restored; else a resumed run begins
    with the policy's."""

    @property
    def http_address(self) -> tuple[str, int] | None:
        """Host and port of the router, else of the first server; None except on rank 0.

        It answers POST /generate.
        """

    def submit(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        seed: int,
        *,
        function: RolloutFunction | None = None,
        concurrency: int = 1,
        num_groups: int | None = None,
    ) -> RolloutFuture:
        """Starts sampling `sampling.n_samples` responses to each prompt with the current weights.

        With a `function`, the engine calls it for each response, at most `concurrency` calls at a
        time. The function receives a sample with the prompt's tokens and a `TokenEngine`, and
        returns the samples of one rollout, which share a `rollout_id`. An in-process engine samples
        immediately, each rank for its share of the prompts. A remote engine samples, and calls the
        function on rank 0, while the caller trains; tokens sampled after a weight update carry the
        new version.

        With `num_groups` the rollout is the first `num_groups` groups to complete; requests of the
        others return with the finish reason abort. These groups become `unfinished`. The next call
        with `num_groups` resumes their aborted samples; a rollout starts again if it has several
        samples or the function returned none in time.
        """

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, seed: int
    ) -> list[list[Sample]]:
        """`submit` and its result, in the prompts' order."""

    def update_weights(self, source: WeightSource, version: int) -> None:
        """Loads new weights: calls the source once and iterates it to the end."""

    def weight_precision(self, name: str) -> Precision | None:
        """The engine's precision of a tensor, by Hugging Face name.

        None if it is unknown, or on a rank that does not ask the servers.
        """

    def wrong_weights(self, sent: Mapping[str, SentRows]) -> dict[str, list[str]]:
        """Tensors that provably differ from the rows sent last, by name, per copy of weights."""

    def prompt_log_probs(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
        """Log-probs at temperature 1 of all tokens but the first, per copy of the weights."""

    def cached_tokens(self, token_ids: Sequence[int]) -> dict[str, int]:
        """Number of tokens whose keys and values are taken from the cache, per copy of the weights.

        Samples one token after the text. Copies that do not tell the number are left out.
        """

    def top_log_probs(
        self, texts: Sequence[Sequence[int]], sampling: Sampling, count: int
    ) -> list[dict[int, float]]:
        """Log-probs of the likeliest next tokens per text, before top-p and top-k.

        Empty after a failure.
        """

    def unfinished(self) -> list[list[Sample]]:
        """Partially generated groups; the next `submit` resumes them before new prompts."""

    def resume_unfinished(self, groups: list[list[Sample]]) -> None:
        """Restores the groups that `unfinished` returned in an earlier process."""

    def metrics(self) -> dict[str, float]:
        """The engine's counts, as rollout/NAME."""

    def save_weights(self, directory: Path) -> None:
        """Writes weights that are older than the policy's into an unfinished checkpoint."""

    def load_weights(self, directory: Path, version: int) -> None:
        """Restores the weights that `save_weights` wrote."""

    def close(self) -> None:
        """Frees the engine's resources."""
