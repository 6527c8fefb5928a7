"""Expected log-probs: by transformers, in float32."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from slime_tis.trainer.data.sample import Sample

BOUND = 1e-4
"""Largest difference of log-probs in float32, in nats."""


class Reference:
    """A model in transformers, float32."""

    def __init__(self, checkpoint: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self.model.eval()

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Its weights, as a training engine gives them."""
        yield from self.model.state_dict().items()

    @torch.no_grad()
    def next_log_probs(self, token_ids: Sequence[int], temperature: float = 1.0) -> Tensor:
        """[tokens, vocabulary] in double precision: log-probs of the token after each token."""
        logits_TV = self.model(torch.tensor([list(token_ids)])).logits[0].double()
        return (logits_TV / temperature).log_softmax(-1)

    def log_probs(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Log-probs of all tokens but the first, each after those before it."""
        next_log_probs_TV = self.next_log_probs(token_ids, temperature)[:-1]
        tokens = torch.tensor(list(token_ids)[1:])
        return next_log_probs_TV.gather(1, tokens[:, None])[:, 0].tolist()

    def response_log_probs(self, sample: Sample, temperature: float = 1.0) -> Tensor:
        """[response tokens, vocabulary] in double precision: log-probs at each response token."""
        start = len(sample.row.token_ids)
        return self.next_log_probs(sample.tokens, temperature)[start - 1 : -1]

    def differences(self, sample: Sample, temperature: float = 1.0) -> list[float]:
        """|expected - reported log-prob| per response token, in nats."""
        log_probs_LV = self.response_log_probs(sample, temperature)
        expected = log_probs_LV.gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0]
        return differences(expected.tolist(), sample)

    def largest_difference(self, sample: Sample, temperature: float = 1.0) -> float:
        """The largest of `differences`."""
        return max(self.differences(sample, temperature))

    def largest_difference_over_sets(
        self, sample: Sample, versions: Collection[int], temperature: float = 1.0
    ) -> float:
        """Like `largest_difference`, for tokens of these weight versions.

        The expected log-prob of a token is normalized over the token's sampling set. The result is
        0 if no token has one of the versions.
        """
        assert sample.sampling_mask is not None
        rows = self.response_log_probs(sample, temperature)
        expected = []
        for row, allowed, token in zip(
            rows, sample.sampling_mask.sets(), sample.response_ids, strict=True
        ):
            log_probs = row[allowed].log_softmax(-1)
            expected.append(float(log_probs[allowed.index(token)]))
        largest = 0.0
        for difference, version in zip(
            differences(expected, sample), sample.weight_versions, strict=True
        ):
            if version in versions:
                largest = max(largest, difference)
        return largest


def differences(expected: Sequence[float], sample: Sample) -> list[float]:
    """|expected - reported log-prob| per response token, in nats."""
    pairs = zip(expected, sample.rollout_log_probs, strict=True)
    return [abs(log_prob - reported) for log_prob, reported in pairs]


def largest_difference(sample: Sample, references: Mapping[int, Reference]) -> float:
    """The largest difference of a token's log-prob to the weights whose version it carries."""
    by_version = {}
    for version in set(sample.weight_versions):
        by_version[version] = references[version].differences(sample)
    by_token = [
        by_version[version][position] for position, version in enumerate(sample.weight_versions)
    ]
    return max(by_token)
