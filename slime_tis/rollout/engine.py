"""What a rollout engine is, and which one the options ask for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from slime_tis.rollout.sample import Prompt, Sample, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slime_tis.rollout.config import RolloutConfig


class RolloutEngine(Protocol):
    """Samples responses with its own copy of the policy's weights.

    Every method is a collective: in a torch.distributed job all ranks call it with the same arguments.
    """

    weight_version: int
    """Version of the weights in use; 0 is the checkpoint."""

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, seed: int) -> list[list[Sample]]:
        """Samples `sampling.n_samples` responses to each prompt.

        Returns:
          one list of samples per prompt, in the prompts' order, the same on every rank.
        """

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Takes new weights under their Hugging Face names, whole tensors, and iterates to the end."""

    def save_weights(self, directory: Path) -> None:
        """Puts the weights in use into an unfinished checkpoint, when they are older than the policy's."""

    def load_weights(self, directory: Path, version: int) -> None:
        """Takes up what `save_weights` put into a checkpoint."""

    def close(self) -> None:
        """Gives back what the engine holds."""


def build_engine(
    config: RolloutConfig,
    hf_checkpoint: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    device: torch.device | str = "cpu",
) -> RolloutEngine:
    """The engine that `--rollout-engine` names, with the weights of `hf_checkpoint`."""
    from slime_tis.rollout.local import LocalEngine

    return LocalEngine(hf_checkpoint, tokenizer, precision=config.rollout_precision, device=device)


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
