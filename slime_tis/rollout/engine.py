"""What a rollout engine is, and which one the options ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from slime_tis.rollout.sample import Prompt, Sample, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slime_tis.rollout.config import RolloutConfig
    from slime_tis.rollout.sglang.config import SGLangConfig


WeightSource = Callable[[], Iterable[tuple[str, Tensor]]]
"""Yields weights under their Hugging Face names, whole tensors, one after the other."""


class EngineLost(RuntimeError):
    """No rollout engine is left that could answer; the run saves what it has and stops with this sentence."""


class Pending(Protocol):
    """A rollout that is being generated."""

    @property
    def progress(self) -> tuple[int, int]:
        """Responses that are complete, and all; from any thread."""

    def result(self) -> list[list[Sample]]:
        """Waits for it; a collective. One list of samples per prompt, the same on every rank.

        Raises:
          EngineLost: no engine is left to finish it.
        """


class RolloutEngine(Protocol):
    """Samples responses with its own copy of the policy's weights.

    Every method is a collective: in a torch.distributed job all ranks call it with the same arguments.
    """

    weight_version: int
    """Version of the weights in use; 0 is the checkpoint."""

    stale_weights_travel: bool
    """Whether weights older than the policy's can be saved and taken up again; else a resumed run begins with the
    policy's own."""

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling, seed: int, *, want: int | None = None) -> Pending:
        """Starts sampling `sampling.n_samples` responses to each prompt, with the present weights.

        With `want` the rollout is the first `want` groups to be complete; the rest is aborted, and `unfinished`.

        An engine in this process samples at once; a remote one goes on while the caller trains, and tokens that
        follow an update of the weights carry its version.
        """

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, seed: int) -> list[list[Sample]]:
        """`submit` and its result, in the prompts' order."""

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Takes new weights under their Hugging Face names, whole tensors, and iterates to the end."""

    def score(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
        """Log-probs at temperature 1 of a text's tokens but the first, under the weights in use.

        Returns:
          by the name of whoever computed them, one entry for each copy of the weights.
        """

    def unfinished(self) -> list[list[Sample]]:
        """Groups whose stragglers were aborted, to be gone on with by the next `submit` before its own prompts."""

    def resume_unfinished(self, groups: list[list[Sample]]) -> None:
        """Takes up what `unfinished` gave, in another process."""

    def figures(self) -> dict[str, float]:
        """What the engine counts, as rollout/NAME."""

    def save_weights(self, directory: Path) -> None:
        """Puts the weights in use into an unfinished checkpoint, when they are older than the policy's."""

    def load_weights(self, directory: Path, version: int) -> None:
        """Takes up what `save_weights` put into a checkpoint."""

    def close(self) -> None:
        """Gives back what the engine holds."""


def build_engine(
    config: RolloutConfig,
    sglang: SGLangConfig,
    hf_checkpoint: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    weights: WeightSource,
    weights_version: Callable[[], int],
    output_dir: str,
    device: torch.device | str = "cpu",
    safe_point: Callable[[], None] = lambda: None,
) -> RolloutEngine:
    """The engine that `--rollout-engine` names.

    Args:
      config: which engine, and how it rounds.
      sglang: its servers, where it is SGLang.
      hf_checkpoint: the weights that it begins with.
      tokenizer: of the checkpoint.
      weights: the policy's present weights, for servers that come back without any; a collective.
      weights_version: their version.
      output_dir: where logs of servers go.
      device: of this process.
      safe_point: called while a rollout is sampled or waited for; raises where it is to be given up.
    """
    if config.rollout_engine == "sglang":
        from slime_tis.rollout.sglang.engine import SGLangEngine

        return SGLangEngine(
            sglang,
            hf_checkpoint,
            tokenizer,
            weights=weights,
            weights_version=weights_version,
            output_dir=Path(output_dir),
            device=device,
            safe_point=safe_point,
        )
    from slime_tis.rollout.local import LocalEngine

    precision = config.rollout_precision
    return LocalEngine(hf_checkpoint, tokenizer, precision=precision, device=device, safe_point=safe_point)


def training_sampling(config: RolloutConfig) -> Sampling:
    """How the samples that are trained on are drawn."""
    return Sampling(
        temperature=config.rollout_temperature,
        top_p=config.rollout_top_p,
        top_k=config.rollout_top_k,
        max_response_len=config.rollout_max_response_len,
        max_context_len=config.rollout_max_context_len,
        n_samples=config.n_samples_per_prompt,
        stop_token_ids=config.rollout_stop_token_ids or (),
    )


def evaluation_sampling(config: RolloutConfig) -> Sampling:
    """How the answers to held-out prompts are drawn."""
    return Sampling(
        temperature=config.eval_temperature,
        top_p=config.eval_top_p,
        max_response_len=config.eval_max_response_len or config.rollout_max_response_len,
        max_context_len=config.rollout_max_context_len,
        n_samples=config.n_samples_per_eval_prompt,
        stop_token_ids=config.rollout_stop_token_ids or (),
    )
