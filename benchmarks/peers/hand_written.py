"""GRPO as one would write it by hand on transformers: one file, one model, one step per rollout, no old forward.

The policy that sampled is the policy that is trained, so the ratio's denominator is the training forward's own
log-probs, detached. `--own-decode` samples with a decode loop that runs each prompt once and shares its key-value
cache over the group, instead of with `generate`.
"""

import random

import torch
import transformers
from task import (
    GROUP,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    MAX_NEW_TOKENS,
    PROMPTS,
    StepClock,
    read_options,
    read_rows,
    write_times,
)
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

CLIP = 0.2


def main() -> None:
    options = read_options(__doc__.splitlines()[0], "--own-decode")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    checkpoint = options.data / "checkpoint"
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    sample = own_decode if options.own_decode else library_decode
    rows = read_rows(options.data, "train.jsonl")
    random.Random(0).shuffle(rows)

    clock = StepClock()
    clock.start()
    for step in range(options.steps):
        batch = [rows[(step * PROMPTS + index) % len(rows)] for index in range(PROMPTS)]
        prompts = tokenizer([row["prompt"] for row in batch], return_tensors="pt").input_ids
        with clock.part("generate"), torch.no_grad():
            tokens = sample(model, prompts, tokenizer.eos_token_id, tokenizer.pad_token_id)
        with clock.part("reward"):
            completions = tokens[:, prompts.shape[1] :]
            ended = completions == tokenizer.eos_token_id
            mask = (ended.cumsum(1) - ended.long()) == 0  # up to and with the first end of sequence
            texts = tokenizer.batch_decode(
                completions.masked_fill(~mask, tokenizer.pad_token_id), skip_special_tokens=True
            )
            labels = [row["label"] for row in batch for _ in range(GROUP)]
            rewards = torch.tensor([float(text == label) for text, label in zip(texts, labels, strict=True)])
        with clock.part("forward"):
            loss = policy_loss(model, tokens, completions, mask, group_advantages(rewards))
        with clock.part("backward"):
            loss.backward()
        with clock.part("optimizer"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
        clock.rewards.append(rewards.mean().item())
        clock.end_step()
    write_times(options.out, clock, {"torch": torch.__version__, "transformers": transformers.__version__})


def library_decode(model: torch.nn.Module, prompts: Tensor, eos: int, pad: int) -> Tensor:
    """[prompts × group, tokens] sampled by transformers' generate."""
    repeated = prompts.repeat_interleave(GROUP, 0)
    return model.generate(
        input_ids=repeated,
        attention_mask=torch.ones_like(repeated),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        max_new_tokens=MAX_NEW_TOKENS,
        use_cache=True,
    )


def own_decode(model: torch.nn.Module, prompts: Tensor, eos: int, pad: int) -> Tensor:
    """[prompts × group, tokens] sampled token by token, the prompts' key-value cache shared over each group."""
    cache = DynamicCache(config=model.config)
    logits = model(input_ids=prompts, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
    cache.batch_repeat_interleave(GROUP)
    logits = logits.repeat_interleave(GROUP, 0)
    done = torch.zeros(len(logits), dtype=torch.bool)
    columns: list[Tensor] = []
    while True:
        token = torch.multinomial(logits.softmax(-1), 1).squeeze(1).masked_fill(done, pad)
        columns.append(token)
        done |= token == eos
        if len(columns) == MAX_NEW_TOKENS or done.all():
            return torch.cat([prompts.repeat_interleave(GROUP, 0), torch.stack(columns, 1)], 1)
        logits = model(input_ids=token[:, None], past_key_values=cache, use_cache=True).logits[:, -1]


def group_advantages(rewards: Tensor) -> Tensor:
    """[prompts × group, 1]: the reward's distance from its group's mean, in the group's deviations."""
    groups = rewards.view(PROMPTS, GROUP)
    scaled = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    return scaled.view(-1, 1)


def policy_loss(
    model: torch.nn.Module, tokens: Tensor, completions: Tensor, mask: Tensor, advantages: Tensor
) -> Tensor:
    """The clipped PPO loss, averaged over the tokens of the batch."""
    length = completions.shape[1]
    logits = model(input_ids=tokens, logits_to_keep=length + 1, use_cache=False).logits[:, :-1]
    log_probs = logits.log_softmax(-1).gather(-1, completions[..., None]).squeeze(-1)
    ratio = (log_probs - log_probs.detach()).exp()
    objective = torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -(objective * mask).sum() / mask.sum()


if __name__ == "__main__":
    main()
