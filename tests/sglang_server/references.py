"""What log-probs ought to be: by transformers and by the training engine, in float32."""

import torch
from transformers import AutoModelForCausalLM

BOUND = 1e-4
"""Largest difference of log-probs in float32, in nats."""


class Reference:
    """A model in transformers, float32."""

    def __init__(self, checkpoint):
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def named_tensors(self):
        """Its weights, as a training engine gives them."""
        yield from self._model.state_dict().items()

    @torch.no_grad()
    def log_probs(self, token_ids, temperature=1.0):
        """Of all tokens but the first, each after those before it."""
        ids = torch.tensor([list(token_ids)])
        logits = self._model(ids).logits[0, :-1].double() / temperature
        return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist()

    @torch.no_grad()
    def logits(self, sample):
        """[tokens, vocabulary] in double precision, for each token of a response."""
        ids, start = torch.tensor([sample.tokens]), len(sample.row.token_ids)
        return self._model(ids).logits[0, start - 1 : -1].double()

    def gap_over_sets(self, sample, versions, temperature=1.0):
        """Largest difference to the server's log-probs of these versions, over the sampling
        sets."""
        assert sample.sampling_mask is not None
        rows = zip(
            self.logits(sample) / temperature,
            sample.sampling_mask.sets(),
            sample.response_ids,
            strict=True,
        )
        expected = [
            float(row[allowed].log_softmax(-1)[allowed.index(token)])
            for row, allowed, token in rows
        ]
        pairs = zip(expected, sample.rollout_log_probs, sample.weight_versions, strict=True)
        return max(
            (abs(one - other) for one, other, version in pairs if version in versions), default=0.0
        )

    def gap(self, sample, temperature=1.0):
        """Largest difference to what the server said of a sample's tokens."""
        return max(self.differences(sample, temperature))

    def differences(self, sample, temperature=1.0):
        """Difference to what the server said, for each token of a response."""
        expected = self.log_probs(sample.tokens, temperature)[len(sample.row.token_ids) - 1 :]
        return [
            abs(one - other) for one, other in zip(expected, sample.rollout_log_probs, strict=True)
        ]


def worst_by_version(sample, weights):
    """Largest difference of a token's log-prob to that of the weights whose version it carries."""
    differences = {
        version: weights[version].differences(sample) for version in set(sample.weight_versions)
    }
    return max(differences[version][place] for place, version in enumerate(sample.weight_versions))
