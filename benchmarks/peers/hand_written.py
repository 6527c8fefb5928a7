"""GRPO as one would write it by hand on transformers: one model, one step per rollout.

The policy that sampled is the policy that is trained, so the ratio's denominator is the training
forward's own log-probs, detached. `--own-decode` samples with a decode loop that runs each prompt
once and shares its key-value cache over the group, instead of with `generate`.
"""

from typing import Any

import torch
import transformers
from task import CLOCKS, MAX_GRAD_NORM, TASKS, StepClock, Task, read_options, read_rows, write_times
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

CLIP = 0.2


def main() -> None:
    options = read_options(__doc__.splitlines()[0], "--own-decode")
    task = TASKS[options.task]
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint, padding_side="left")
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=task.learning_rate, weight_decay=0.0, fused=True
    )
    sample = own_decode if options.own_decode else library_decode
    rows = read_rows(options.rows)

    clock = StepClock(CLOCKS[options.clock])
    clock.start()
    for step in range(options.steps):
        batch = [rows[(step * task.prompts + index) % len(rows)] for index in range(task.prompts)]
        prompts = tokenizer([row["prompt"] for row in batch], return_tensors="pt", padding=True)
        with clock.part("generate"), torch.no_grad():
            completions = sample(model, prompts.input_ids, prompts.attention_mask, eos, pad, task)
        with clock.part("reward"):
            ended = completions == eos
            mask = (ended.cumsum(1) - ended.long()) == 0  # up to and with the first end of sequence
            texts = tokenizer.batch_decode(
                completions.masked_fill(~mask, pad), skip_special_tokens=True
            )
            labels = [row["label"] for row in batch for _ in range(task.group)]
            rewards = torch.tensor(
                [task.score(text, label) for text, label in zip(texts, labels, strict=True)]
            )
        advantages = group_advantages(rewards, task)
        tokens = torch.cat([prompts.input_ids.repeat_interleave(task.group, 0), completions], 1)
        seen = torch.cat([prompts.attention_mask.repeat_interleave(task.group, 0), mask.long()], 1)
        forward = backward = 0.0
        for first in range(0, len(tokens), task.micro_batch):
            part = slice(first, first + task.micro_batch)
            with clock.part("forward_of_part"):
                loss = (
                    policy_loss(model, tokens[part], seen[part], mask[part], advantages[part])
                    / mask.sum()
                )
            with clock.part("backward_of_part"):
                loss.backward()
            forward += clock.parts["forward_of_part"].pop()
            backward += clock.parts["backward_of_part"].pop()
        clock.parts["forward"].append(forward)
        clock.parts["backward"].append(backward)
        with clock.part("optimizer"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
        clock.scored(rewards.tolist(), mask.sum(1).tolist())
        clock.end_step()
    del clock.parts["forward_of_part"], clock.parts["backward_of_part"]
    write_times(
        options.out, clock, {"torch": torch.__version__, "transformers": transformers.__version__}
    )


def library_decode(
    model: torch.nn.Module, prompts: Tensor, seen: Tensor, eos: int, pad: int, task: Task
) -> Tensor:
    """[prompts × group, completion] sampled by transformers' generate."""
    generate: Any = model.generate
    tokens: Tensor = generate(
        input_ids=prompts.repeat_interleave(task.group, 0),
        attention_mask=seen.repeat_interleave(task.group, 0),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        max_new_tokens=task.max_new_tokens,
        use_cache=True,
    )
    return tokens[:, prompts.shape[1] :]


def own_decode(
    model: torch.nn.Module, prompts: Tensor, seen: Tensor, eos: int, pad: int, task: Task
) -> Tensor:
    """Samples [prompts × group, completion] token by token.

    The samples of a group share the key-value cache of their prompt.
    """
    cache = DynamicCache(config=model.config)
    mask = seen if (seen == 0).any() else None  # models are faster without a mask
    logits = model(
        input_ids=prompts,
        attention_mask=mask,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits[:, -1]
    cache.batch_repeat_interleave(task.group)
    logits = logits.repeat_interleave(task.group, 0)
    if mask is not None:
        mask = mask.repeat_interleave(task.group, 0)
    done = torch.zeros(len(logits), dtype=torch.bool)
    columns: list[Tensor] = []
    while True:
        token = torch.multinomial(logits.softmax(-1), 1).squeeze(1).masked_fill(done, pad)
        columns.append(token)
        done |= token == eos
        if len(columns) == task.max_new_tokens or done.all():
            return torch.stack(columns, 1)
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        logits = model(
            input_ids=token[:, None], attention_mask=mask, past_key_values=cache, use_cache=True
        ).logits[:, -1]


def group_advantages(rewards: Tensor, task: Task) -> Tensor:
    """Returns [prompts × group, 1]: (reward − group mean) / group standard deviation."""
    groups = rewards.view(task.prompts, task.group)
    scaled = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    return scaled.view(-1, 1)


def policy_loss(
    model: torch.nn.Module, tokens: Tensor, seen: Tensor, mask: Tensor, advantages: Tensor
) -> Tensor:
    """The clipped PPO loss, summed over the completions' tokens."""
    length = mask.shape[1]
    attention_mask = seen if (seen == 0).any() else None
    logits = model(
        input_ids=tokens, attention_mask=attention_mask, logits_to_keep=length + 1, use_cache=False
    ).logits[:, :-1]
    log_probs = logits.log_softmax(-1).gather(-1, tokens[:, -length:, None]).squeeze(-1)
    ratio = (log_probs - log_probs.detach()).exp()
    objective = torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -(objective * mask).sum()


if __name__ == "__main__":
    main()
