"""A small policy and its prompts: sort digits, `3141592653>` → `1123345569`.

`slime-tis demo` and examples use them.

Each prompt begins with `<bos>`, since prompts are tokenized without special tokens, as slime does.

The policy is trained on a few supervised answers, until a third of the greedy answers to held-out
prompts are correct. Reinforcement learning starts from this policy.
"""

import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from slime_tis.progress import Progress
from slime_tis.trainer.matrix_products import prefers_onednn, use_fast_linear_layers

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
# ids of the special tokens, which begin the vocabulary
PAD = 0
BOS = 1
EOS = 2
CHARACTERS = (*"0123456789", ">", "Ġ")  # Ġ is how byte-level tokenizers write a space
COMPLETE = "complete.json"
"""File that a finished directory of prompts and checkpoint contains."""
EXPERTS_PER_TOKEN = 2
"""Experts of a mixture of experts that each token uses."""
MAX_ANSWER_LOSS = 4.0
"""Supervised loss, in nats per answer, below which accuracy is measured."""
WARMUP_STEPS = 30
"""Steps of linear learning-rate warmup in supervised training."""
TYPICAL_STEPS = 60
"""Steps of supervised training until the accuracy is reached, for the progress display; seed 0
needs 55."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """Sizes of the task, the model and its supervised training."""

    digits: int = 10
    train_prompts: int = 4096
    eval_prompts: int = 256
    hidden_size: int = 128
    layers: int = 3
    experts: int = 0
    """Experts per layer, each as wide as the model; a token uses two. 0 for a dense model."""
    supervised_prompts: int = 256
    """Training rows of the supervised training. With few rows, samples become about as accurate as
    greedy answers long before the model can sort."""
    lr: float = 2e-3
    batch_size: int = 128
    accuracy: tuple[float, float] = (0.30, 0.40)
    """Range of greedy held-out accuracy in which the supervised training stops."""
    sampled_accuracy: float = 0.15
    """Smallest accuracy at temperature 1 at which it stops: RL needs some correct samples."""
    max_steps: int = 1000

    @property
    def max_length(self) -> int:
        """Longest text of the model, in tokens."""
        return 2 * self.digits + 44


def prepare(
    out: Path, *, seed: int = 0, example: Example | None = None, with_progress: bool = False
) -> dict[str, Any]:
    """Creates the directory `out` atomically, and returns the report in `complete.json`."""
    example = example or Example()
    start = time.monotonic()
    train, held_out = make_rows(example, seed)
    tokenizer = make_tokenizer(example.max_length)
    model = make_model(example, seed)
    supervised = answered(train[: example.supervised_prompts], tokenizer)
    with Progress("supervised training", TYPICAL_STEPS, shown=with_progress) as progress:
        results = train_supervised(
            model,
            supervised,
            answered(held_out, tokenizer),
            example,
            seed,
            on_step=progress.update,
        )
    report = {
        "seed": seed,
        **results,
        "parameters": model.num_parameters(),
        "seconds": time.monotonic() - start,
        "example": asdict(example),
    }
    write_example(out, model, tokenizer, {"train": train, "eval": held_out}, report)
    return report


def write_example(
    out: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: dict[str, list[dict[str, Any]]],
    report: dict[str, Any],
) -> None:
    """Creates the directory `out` atomically.

    It contains `checkpoint`, a NAME.jsonl for each set of prompts, and `complete.json`.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    try:
        try:
            model.save_pretrained(unfinished / "checkpoint")
        except SafetensorError as error:  # raised on a full disk
            raise OSError(str(error)) from error
        tokenizer.save_pretrained(unfinished / "checkpoint")
        for name, rows in prompts.items():
            write_jsonl(unfinished / f"{name}.jsonl", rows)
        (unfinished / COMPLETE).write_text(json.dumps(report, indent=2) + "\n")
        unfinished.chmod(0o755)  # mkdtemp's directories are private
        os.rename(unfinished, out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def make_rows(example: Example, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns training and held-out rows without duplicates."""
    generator = random.Random(seed)
    questions: dict[str, None] = {}
    while len(questions) < example.train_prompts + example.eval_prompts:
        questions["".join(generator.choices("0123456789", k=example.digits))] = None
    rows = [{"prompt": f"<bos>{digits}>", "label": "".join(sorted(digits))} for digits in questions]
    return rows[: example.train_prompts], rows[example.train_prompts :]


def make_tokenizer(
    max_length: int, characters: Sequence[str] = CHARACTERS, special: Sequence[str] = SPECIAL_TOKENS
) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE without merges: every character is a token.

    It adds no special tokens to a text.
    """
    vocab = {token: index for index, token in enumerate([*special, *characters])}
    unknown = "<unk>" if "<unk>" in special else None
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {f"{token[1:-1]}_token": token for token in special}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, padding_side="left", model_max_length=max_length, **names
    )


def make_model(example: Example, seed: int) -> PreTrainedModel:
    """Returns the example's model with random weights."""
    return make_qwen3(
        seed,
        experts=example.experts,
        hidden_size=example.hidden_size,
        vocab_size=len(SPECIAL_TOKENS) + len(CHARACTERS),
        num_hidden_layers=example.layers,
        max_position_embeddings=example.max_length,
    )


def make_qwen3(seed: int, *, hidden_size: int, experts: int = 0, **sizes: int) -> PreTrainedModel:
    """Returns a Qwen3 model, dense or a mixture of experts, with random weights."""
    torch.manual_seed(seed)
    options: dict[str, Any] = {
        **sizes,
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden_size // 4,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "dtype": "float32",
    }
    model: PreTrainedModel
    if experts:
        options |= {
            "num_experts": experts,
            "num_experts_per_tok": EXPERTS_PER_TOKEN,
            "norm_topk_prob": True,
            "moe_intermediate_size": hidden_size,
            "tie_word_embeddings": False,  # SGLang's Qwen3-MoE has separate output embeddings
        }
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**options))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**options, tie_word_embeddings=True))
    model = model.float()
    model.generation_config = GenerationConfig(pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS)
    return model


def answered(rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Returns tokens [rows, tokens] of prompt, label and `<eos>`; all rows have the same length."""
    texts = [row["prompt"] + row["label"] + "<eos>" for row in rows]
    return torch.tensor(tokenizer(texts)["input_ids"])


def train_supervised(
    model: PreTrainedModel,
    train: Tensor,
    held_out: Tensor,
    example: Example,
    seed: int,
    *,
    on_step: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Trains until both accuracies are reached, and returns them with the number of steps.

    `on_step` is called before every step. On some processors, faster linear layers with the same
    parameters replace those of the model.
    """
    if prefers_onednn():
        use_fast_linear_layers(model)
    lowest, highest = example.accuracy
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=example.lr, betas=(0.9, 0.98), weight_decay=0.0
    )
    scale = 1.0
    endless = batches(train, example, seed)
    for step in range(1, example.max_steps + 1):
        on_step()
        batch = next(endless)
        for group in optimizer.param_groups:
            group["lr"] = example.lr * scale * min(1.0, step / WARMUP_STEPS)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        answers = batch[:, -example.digits - 1 :, None]
        log_probs = answer_log_probs(model, batch, example.digits)
        loss = -log_probs.gather(-1, answers).squeeze(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if loss.item() * (example.digits + 1) > MAX_ANSWER_LOSS:
            continue
        greedy, sampled = accuracies(model, held_out, example.digits)
        if lowest <= greedy <= highest and sampled >= example.sampled_accuracy:
            return {"steps": step, "accuracy": greedy, "sampled_accuracy": sampled}
        if greedy > highest:
            # the step overshot the range: undo it, and go on with smaller steps
            scale /= 2
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), before, strict=True):
                    parameter.copy_(value)
    raise RuntimeError(
        f"seed {seed} did not reach a greedy accuracy of {lowest} to {highest} in"
        f" {example.max_steps} steps; choose another --seed."
    )


def batches(train: Tensor, example: Example, seed: int) -> Iterator[Tensor]:
    """Yields batches of rows without end, in a new order every epoch."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(train), generator=generator)
        yield from train[order].split(example.batch_size)


def answer_log_probs(model: PreTrainedModel, tokens: Tensor, digits: int) -> Tensor:
    """Returns the log-probs [rows, digits + 1, vocabulary] of the answer and `<eos>`."""
    logits: Tensor = model(
        input_ids=tokens[:, :-1], logits_to_keep=digits + 1, use_cache=False
    ).logits
    return logits.log_softmax(-1)


@torch.no_grad()
def accuracies(model: PreTrainedModel, tokens: Tensor, digits: int) -> tuple[float, float]:
    """Returns the share of correct greedy answers and the expected share of correct samples.

    One forward pass on the correct answers gives both. A greedy answer is correct if all correct
    tokens are the most probable ones; a sample is correct with the probability of the answer.
    """
    log_probs = answer_log_probs(model, tokens, digits)
    answers = tokens[:, -digits - 1 :]
    greedy = (log_probs.argmax(-1) == answers).all(-1).float().mean()
    sampled = log_probs.gather(-1, answers[..., None]).sum((1, 2)).exp().mean()
    return greedy.item(), sampled.item()


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes one row per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
