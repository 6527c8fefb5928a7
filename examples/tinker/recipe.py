"""A tinker recipe with rollout correction, on a stand-in for the service: no key, no network.

    python -m examples.tinker.recipe

With the service, take `tinker.ServiceClient().create_lora_training_client(...)` in place of
`LocalClient`; the loop and the loss stay. The policy is a table of logits that learns to prefer
high tokens. The sampler rounds its logits to bfloat16.
"""

from types import SimpleNamespace

import torch
from tinker import types
from tinker.lib.public_interfaces.training_client import TrainingClient

from slime_tis import RolloutCorrectionConfig
from slime_tis.integrations.tinker import corrected_loss

VOCABULARY, LENGTH, SAMPLES = 16, 8, 64
CORRECTION = RolloutCorrectionConfig(use_tis=True, tis_upper_bound=2.0, rs_veto_threshold=1e-3)


class LocalClient:
    """A policy of one logit per position and token, with the methods of tinker's TrainingClient."""

    def __init__(self) -> None:
        self.logits = torch.zeros(LENGTH, VOCABULARY, requires_grad=True)
        self.optimizer = torch.optim.Adam([self.logits], lr=0.1)

    def sample(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [samples, length] and the log-probs of the rounded sampler."""
        log_probs = self.logits.detach().bfloat16().float().log_softmax(-1)
        tokens = torch.distributions.Categorical(logits=log_probs).sample((SAMPLES,))
        return tokens, log_probs.expand(SAMPLES, -1, -1).gather(2, tokens[..., None])[..., 0]

    def forward_backward_custom(self, data, loss_fn):
        """tinker's two passes: loss of log-probs, then its gradient as cross-entropy weights."""
        tokens = torch.stack([datum.loss_fn_inputs["target_tokens"].to_torch() for datum in data])
        log_probs = (
            self.logits.log_softmax(-1)
            .expand(len(data), -1, -1)
            .gather(2, tokens[..., None])[..., 0]
        )
        forward = SimpleNamespace(
            loss_fn_outputs=[{"logprobs": tensor_data(row)} for row in log_probs.detach()]
        )
        result = TrainingClient._compute_custom_loss(data, loss_fn, forward)
        weights = torch.stack([datum.loss_fn_inputs["weights"].to_torch() for datum in result.data])
        (-(log_probs * weights).sum() / weights.numel()).backward()
        return result.metrics

    def optim_step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def tensor_data(values: torch.Tensor) -> types.TensorData:
    kind = "int64" if values.dtype == torch.int64 else "float32"
    return types.TensorData(data=values.tolist(), dtype=kind, shape=list(values.shape))


def datum(tokens: torch.Tensor, log_probs: torch.Tensor, advantage: torch.Tensor) -> types.Datum:
    """One sample as tinker takes it."""
    inputs = {
        "target_tokens": tokens,
        "logprobs": log_probs,
        "advantages": advantage.expand(len(tokens)),
        "mask": torch.ones(len(tokens)),
    }
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens.tolist()),
        loss_fn_inputs={name: tensor_data(value) for name, value in inputs.items()},
    )


def main(steps: int = 30) -> None:
    torch.manual_seed(0)
    client, loss = LocalClient(), corrected_loss(CORRECTION)
    for step in range(steps):
        tokens, log_probs = client.sample()
        rewards = tokens.float().mean(1) / (VOCABULARY - 1)
        advantages = (rewards - rewards.mean()) / rewards.std()
        metrics = client.forward_backward_custom([*map(datum, tokens, log_probs, advantages)], loss)
        client.optim_step()
        k3, weight = metrics["custom/mismatch_k3_kl:mean"], metrics["custom/mis_weight_max:mean"]
        print(
            f"step {step + 1}: reward {rewards.mean():.3f}  k3 {k3:.1e}  largest weight"
            f" {weight:.4f}"
        )


if __name__ == "__main__":
    main()
