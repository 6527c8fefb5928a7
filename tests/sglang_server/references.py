"""What log-probs ought to be: by transformers and by the training engine, in float32."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from slime_tis.trainer.data.sample import Sample


class Reference:
    """A model in transformers, float32."""

    def __init__(self, checkpoint: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Its weights, as a training engine gives them."""
        yield from self._model.state_dict().items()

    @torch.no_grad()
    def log_probs(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Of all tokens but the first, each after those before it."""
        ids = torch.tensor([list(token_ids)])
        logits = self._model(ids).logits[0, :-1].double() / temperature
        return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist()

    @torch.no_grad()
    def logits(self, sample: Sample) -> Tensor:
        """[tokens, vocabulary] in double precision: those that each token of a response was sampled from."""
        ids, start = torch.tensor([sample.tokens]), len(sample.row.token_ids)
        return self._model(ids).logits[0, start - 1 : -1].double()

    def gap_over_sets(self, sample: Sample, versions: tuple[int, ...], temperature: float = 1.0) -> float:
        """Largest difference to what the server said of a sample's tokens, over the sets that they were sampled from.

        Args:
            sample: with a sampling mask.
            versions: of the weights; tokens that others sampled are omitted.
            temperature: of sampling.
        """
        assert sample.sampling_mask is not None
        logits = self.logits(sample) / temperature
        gaps = [0.0]
        rows = zip(
            logits,
            sample.sampling_mask.sets(),
            sample.response_ids,
            sample.rollout_log_probs,
            sample.weight_versions,
            strict=True,
        )
        for row, allowed, token, log_prob, version in rows:
            if version in versions:
                expected = row[allowed].log_softmax(-1)[allowed.index(token)]
                gaps.append(abs(float(expected) - log_prob))
        return max(gaps)

    def gap(self, sample: Sample, temperature: float = 1.0) -> float:
        """Largest difference to what the server said of a sample's tokens."""
        return max(self.differences(sample, temperature))

    def differences(self, sample: Sample, temperature: float = 1.0) -> list[float]:
        """Difference to what the server said, for each token of a response."""
        expected = self.log_probs(sample.tokens, temperature)[len(sample.row.token_ids) - 1 :]
        return [abs(one - other) for one, other in zip(expected, sample.rollout_log_probs, strict=True)]
