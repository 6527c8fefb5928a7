"""GRPO by hand, corrected by slime_tis: a tiny model learns to repeat the digit of its prompt.

The rollout engine is a bf16 copy of the policy that gets the weights at every fourth step, so that
its log-probs differ from training by rounding and staleness. The lines that correct this are marked
with an arrow.

python -m examples.minimal.grpo
"""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

import slime_tis

VOCABULARY, END, PROMPTS, GROUP, LENGTH, UPDATE_INTERVAL = (
    10,
    0,
    16,
    8,
    6,
    4,
)  # token 0 ends a response
CORRECTION = slime_tis.RolloutCorrectionConfig(
    use_tis=True, tis_upper_bound=2.0, rs_veto_threshold=1e-4
)  # <-


def train(steps: int) -> Iterator[dict[str, float]]:
    """Trains for some steps; yields the metrics of each."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    policy = Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCABULARY, **sizes, **heads))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3)
    for step in range(steps):
        if step % UPDATE_INTERVAL == 0:
            rollout_engine = copy.deepcopy(policy).bfloat16()
        prompts = torch.randint(1, VOCABULARY, (PROMPTS, 1)).repeat_interleave(GROUP, 0)
        responses, rollout_log_probs = sample(rollout_engine, prompts)
        ended = responses == END
        mask = ended.cumsum(1) - ended.long() == 0  # up to and with the first end
        rewards = ((responses == prompts) & mask).float().sum(1) / LENGTH

        log_probs = response_log_probs(policy, prompts, responses)
        old_log_probs = (
            log_probs.detach()
        )  # one step per rollout: the old policy is the current one
        correction = slime_tis.correct(CORRECTION, old_log_probs, rollout_log_probs, mask)  # <-
        token_loss = -(log_probs - old_log_probs).exp() * group_advantages(rewards)
        loss = correction.mean(token_loss)  # <- instead of (token_loss * mask).sum() / mask.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield {"reward": rewards.mean().item(), **correction.statistics.metrics()}  # <-


@torch.no_grad()
def sample(model: PreTrainedModel, prompts: Tensor) -> tuple[Tensor, Tensor]:
    """Responses [B, T] and the log-probs that the model gave their tokens."""
    tokens, log_probs = prompts, []
    for _ in range(LENGTH):
        distribution = model(tokens, logits_to_keep=1).logits[:, -1].float().log_softmax(-1)
        tokens = torch.cat([tokens, distribution.exp().multinomial(1)], 1)
        log_probs.append(distribution.gather(1, tokens[:, -1:]))
    return tokens[:, prompts.shape[1] :], torch.cat(log_probs, 1)


def response_log_probs(model: PreTrainedModel, prompts: Tensor, responses: Tensor) -> Tensor:
    """[B, T], with gradient."""
    logits = model(torch.cat([prompts, responses], 1), logits_to_keep=LENGTH + 1).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, responses[..., None]).squeeze(-1)


def group_advantages(rewards: Tensor) -> Tensor:
    """Returns [B, 1]: (reward − group mean) / group standard deviation."""
    groups = rewards.view(PROMPTS, GROUP)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(
        -1, 1
    )


if __name__ == "__main__":
    for step, metrics in enumerate(train(60), start=1):
        if step == 1 or step % 10 == 0:
            shown = ("reward", "mismatch_k3_kl", "mis_ratio_mean_after_mis", "mis_eff_sample_size")
            print(f"step {step:2}", *(f"{name} {metrics[name]:.3g}" for name in shown), sep="  ")
