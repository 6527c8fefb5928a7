"""One response that is being sampled, over as many requests as it takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slime_tis.rollout.sample import FinishReason, Prompt, Sample
from slime_tis.rollout.sglang.messages import Completion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slime_tis.rollout.sglang.server import Server


@dataclass(eq=False, kw_only=True)
class Job:
    """A response and what is known of it so far."""

    prompt: Prompt
    limit: int
    """Most tokens of the response."""
    seed: int | None = None
    """Of its random numbers, for servers that take one."""
    token_ids: list[int] = field(default_factory=list)
    """Sampled so far."""
    log_probs: list[float] = field(default_factory=list)
    """Of each token."""
    versions: list[int] = field(default_factory=list)
    """Of the weights that sampled each."""
    finish_reason: FinishReason | None = None
    """Why it ended; None while it has not."""
    tries: int = 0
    """Requests made for it."""
    request: tuple[Server, str] | None = None
    """Who is being asked, and the request's id."""

    @classmethod
    def from_sample(cls, sample: Sample, limit: int) -> Job:
        """Goes on with a sample that was aborted; one that ended stays as it is."""
        job = cls(
            prompt=sample.prompt,
            limit=limit,
            token_ids=list(sample.response_ids),
            log_probs=list(sample.rollout_log_probs),
            versions=list(sample.weight_versions),
            finish_reason=None if sample.finish_reason == "abort" else sample.finish_reason,
        )
        job.end_where_full()
        return job

    @property
    def input_ids(self) -> list[int]:
        """What the next token follows."""
        return [*self.prompt.token_ids, *self.token_ids]

    @property
    def left(self) -> int:
        """Tokens that may still be sampled."""
        return self.limit - len(self.token_ids)

    def absorb(self, completion: Completion, versions: list[int]) -> None:
        """Adds what a request sampled; an aborted one leaves it unfinished."""
        self.token_ids += completion.token_ids
        self.log_probs += completion.log_probs
        self.versions += versions
        if completion.finish_reason != "abort":
            self.finish_reason = completion.finish_reason
        self.end_where_full()

    def end_where_full(self, longest_input: int | None = None) -> None:
        """Ends it by its length when no token is left, or the server takes no input that long."""
        too_long = longest_input is not None and len(self.input_ids) > longest_input and len(self.token_ids) > 0
        if self.finish_reason is None and (self.left < 1 or too_long):
            self.finish_reason = "length"

    def sample(self, tokenizer: PreTrainedTokenizerBase, group_index: int, sample_index: int) -> Sample:
        """As it stands; unfinished ones have the finish reason abort."""
        return Sample(
            prompt=self.prompt,
            group_index=group_index,
            sample_index=sample_index,
            response_ids=list(self.token_ids),
            response=tokenizer.decode(self.token_ids, skip_special_tokens=True),
            rollout_log_probs=list(self.log_probs),
            loss_mask=[1] * len(self.token_ids),
            weight_versions=list(self.versions),
            finish_reason=self.finish_reason or "abort",
        )
