"""The data of a rollout: prompts in, sampled responses out, and how to sample them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from slime_tis.sampling_mask import SamplingMask

FinishReason = Literal["stop", "length", "abort"]


class SampleStatus(Enum):
    """What became of a sample, under slime's names; the engines here give completed, truncated and aborted ones."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


STATUS: dict[FinishReason, SampleStatus] = {
    "stop": SampleStatus.COMPLETED,
    "length": SampleStatus.TRUNCATED,
    "abort": SampleStatus.ABORTED,
}


@dataclass(frozen=True, kw_only=True)
class Prompt(str):
    """One row of a prompt file. It is its own text, as reward functions written for slime expect of `sample.prompt`."""

    index: int  # type: ignore[assignment]  # hides str.index, for which there is str.find
    """Row of the file, from 0."""

    text: str
    """The prompt as it was tokenized, after the chat template where one is applied."""

    token_ids: tuple[int, ...]
    """Tokens of the text."""

    label: str | None = None
    """What the reward compares the response with."""

    metadata: dict[str, Any] = field(default_factory=dict)
    """Anything else that the row hands to the reward: its other columns, and its mapping of metadata."""

    __hash__ = str.__hash__

    def __new__(cls, text: str = "", **fields: Any) -> Prompt:
        """Makes the string; the fields are set by the dataclass."""
        return super().__new__(cls, text)


@dataclass(kw_only=True)
class Sample:
    """One response to a prompt, with the log-probs of the policy that sampled it.

    It is mutable, as slime's is: a reward function, the user's own among them, writes into it.

    The four lists are one entry per response token, the end-of-sequence token included.
    """

    prompt: Prompt
    """What was answered."""

    group_index: int
    """Place of the prompt in the batch; the samples of one prompt share it."""

    sample_index: int
    """Place of this sample in the batch."""

    response_ids: list[int]
    """Sampled tokens."""

    response: str
    """Their text, without special tokens."""

    rollout_log_probs: list[float]
    """Log-probability of each token in the distribution it was sampled from; NaN where it is missing."""

    loss_mask: list[int]
    """1 where a token is trained on, 0 where it is not the policy's own (tool output)."""

    weight_versions: list[int]
    """Version of the weights that sampled each token."""

    finish_reason: FinishReason
    """Why sampling ended: stop token, length limit, or aborted from outside."""

    sampling_mask: SamplingMask | None = None
    """The tokens that could be sampled at each response token under top-p or top-k; None where nothing was cut, or
    the engine did not report it."""

    reward: float | None = None
    """Score of the response, once it has one."""

    reward_parts: dict[str, float] = field(default_factory=dict)
    """The numbers of a reward that is a dict, by key; the score is the one that --reward-key names."""

    metadata: dict[str, Any] = field(default_factory=dict)
    """The prompt's metadata, this sample's own copy, which a reward function may write into."""

    remove_sample: bool = False
    """Whether a reward function asked to train on none of the sample's tokens."""

    routed_experts: Tensor | None = field(default=None, compare=False)
    """uint8 or int16 [tokens - 1, sparse layers, k]: the experts that the engine's routers chose, in their order, when
    each token of prompt and response but the last was fed; None where they were not recorded."""

    routing_weights: Tensor | None = field(default=None, compare=False)
    """float32 of the same shape: what the engine multiplied the output of each of these experts by."""

    Status: ClassVar = SampleStatus

    def __post_init__(self) -> None:
        if not self.metadata:
            self.metadata = copy.deepcopy(self.prompt.metadata)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and response tokens."""
        return [*self.prompt.token_ids, *self.response_ids]

    # The names that reward functions written for slime read.

    @property
    def label(self) -> str | None:
        """The prompt's label."""
        return self.prompt.label

    @property
    def index(self) -> int:
        """Place of this sample in the batch."""
        return self.sample_index

    @property
    def tokens(self) -> list[int]:
        """Prompt and response tokens."""
        return self.token_ids

    @property
    def response_length(self) -> int:
        """Tokens of the response."""
        return len(self.response_ids)

    @property
    def effective_response_length(self) -> int:
        """Tokens of the response that are trained on."""
        return sum(self.loss_mask)

    @property
    def rollout_top_p_token_ids(self) -> Tensor | None:
        """The tokens that could be sampled, of one response token after another."""
        return None if self.sampling_mask is None else self.sampling_mask.token_ids

    @property
    def rollout_top_p_token_offsets(self) -> Tensor | None:
        """Where the tokens of each response token begin in them, and where the last ones end."""
        if self.sampling_mask is None:
            return None
        return torch.nn.functional.pad(self.sampling_mask.lengths.cumsum(0), (1, 0))

    @property
    def rollout_routed_experts(self) -> Tensor | None:
        """The experts that the engine's routers chose."""
        return self.routed_experts

    @property
    def status(self) -> SampleStatus:
        """Why sampling ended, as slime says it."""
        return STATUS[self.finish_reason]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How responses are drawn."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest token and reports log-probs at temperature 1."""

    top_p: float = 1.0
    """Nucleus probability: the likeliest tokens that reach it together can be sampled; 1 means all tokens."""

    top_k: int = -1
    """Number of likeliest tokens that can be sampled; -1 means all."""

    max_response_len: int
    """Longest response, in tokens."""

    max_context_len: int | None = None
    """Longest prompt and response together, in tokens; unset means the model's own limit."""

    n_samples: int = 1
    """Responses per prompt."""

    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a response besides the model's end-of-sequence tokens."""

    return_routed_experts: bool = False
    """Record the experts that every token is routed to."""

    return_routing_weights: bool = False
    """Record the weights that the outputs of these experts are combined with."""

    return_sampling_mask: bool = False
    """Whether the samples carry the sets of tokens that top-p and top-k left; evaluation has no use for them."""

    for_training: bool = False
    """Whether samples are trained on: no request of a user's function may then change temperature, top-p or top-k."""

    def __post_init__(self) -> None:
        if self.temperature < 0.0:
            raise ValueError(f"temperature is {self.temperature} but must be 0 (greedy) or more.")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p} but must be above 0 and at most 1; 1 keeps all tokens.")
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k} but must be 1 or more, or -1 for all tokens.")
        for name in ("max_response_len", "n_samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)} but must be 1 or more.")

    @property
    def records_routing(self) -> bool:
        """Whether experts or their weights are recorded."""
        return self.return_routed_experts or self.return_routing_weights


def response_limit(
    prompt: Prompt, sampling: Sampling, context_len: int | None, longest_prompt: int | None = None
) -> int:
    """The most tokens that a response to a prompt may have.

    Args:
        prompt: to be answered.
        sampling: its limits.
        context_len: the model's own limit on prompt and response together; None where there is none.
        longest_prompt: most tokens that the engine takes; None where only the context limits them.

    Raises:
        ValueError: the prompt leaves no tokens for a response.
    """
    length = len(prompt.token_ids)
    if length == 0:
        raise ValueError(f"prompt {prompt.index} has no tokens; a response needs at least one to follow.")
    contexts = [limit for limit in (sampling.max_context_len, context_len) if limit is not None]
    limit = min([sampling.max_response_len, *(context - length for context in contexts)])
    if limit < 1:
        raise ValueError(
            f"prompt {prompt.index} has {length} tokens, which leaves no tokens for a response in a "
            f"context of {min(contexts)}; set --rollout-max-prompt-len to leave such prompts out."
        )
    if longest_prompt is not None and length > longest_prompt:
        raise ValueError(
            f"prompt {prompt.index} has {length} tokens, but the servers take {longest_prompt} at most; set "
            "--rollout-max-prompt-len to leave such prompts out."
        )
    return limit
