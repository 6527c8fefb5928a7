"""Makes the example's policy and prompts: sums and differences of two to four numbers.

A tool calculates with two numbers.

    python -m examples.tool_agent.prepare --out data/tool_agent

writes a Qwen3 checkpoint directory with its tokenizer, `train.jsonl` and `eval.jsonl`, and
`complete.json`, whose presence says that all of it is there. The questions are reasoning-gym's
chain_sum. The policy has seen some transcripts, in which the calculator is used for the last
operation of a question more often than for the others, and answers are guessed otherwise:

    47+38-62>   ?47+38=   85;   ?85-62=   23;   !23<eos>
    prompt      call      observation   …       answer

so that at first its greedy answers are right about questions of one operation only; reinforcement
learning takes it from there.
"""

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from reasoning_gym import create_dataset
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from examples.reasoning_gym.reward import encoded
from examples.sort_digits.prepare import is_complete
from examples.tool_agent.calculator import calculate
from slime_tis.demo.sort_digits import (
    PAD,
    SPECIAL_TOKENS,
    make_qwen3,
    make_tokenizer,
    write_example,
)

CHARACTERS = (*"0123456789", *"+-=>?!;", "Ġ")  # Ġ is how byte-level tokenizers write a space
MAX_LENGTH = 128
DATASET = "chain_sum"
CONFIG = {"min_terms": 2, "max_terms": 4, "min_digits": 2, "max_digits": 2}


@dataclass(frozen=True, kw_only=True)
class Example:
    """Sizes of the task, the model and its supervised training."""

    train_prompts: int = 4096
    """Rows of train.jsonl."""

    eval_prompts: int = 128
    """Rows of eval.jsonl; none of them is in train.jsonl."""

    hidden_size: int = 128
    """Width of the model."""

    layers: int = 3
    """Depth of the model."""

    transcripts: int = 4096
    """Transcripts that the supervised training sees."""

    call_probability: tuple[float, ...] = (0.8, 0.4, 0.4)
    """Probability of calling the calculator in a transcript where one, two and three operations are
    left."""

    lr: float = 2e-3
    """Learning rate of the supervised training."""

    batch_size: int = 64
    """Transcripts per supervised step."""

    accuracy: tuple[float, float] = (0.2, 0.4)
    """Share of held-out questions that greedy calls answer rightly to stop in, lowest and
    highest."""

    copied: float = 0.8
    """Share of held-out transcripts with all calls whose calls and answer, the decision to call
    left aside, are right to stop above."""

    max_steps: int = 1000
    """Supervised steps after which it is given up."""


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """Tokens of an episode, and which of them the policy sampled."""

    tokens: list[int]
    sampled: list[bool]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to make")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the prompts and the weights (default 0)"
    )
    options = parser.parse_args()
    if is_complete(parser, options.out):
        return
    torch.set_num_threads(1)  # more gain little at this size, and cost much where cores are shared
    report = prepare(options.out, seed=options.seed)
    print(
        f"{options.out}: {report['parameters']:,} parameters, {report['steps']} supervised steps,"
        f" accuracy {report['accuracy']:.2f} greedy, {report['seconds']:.0f} s."
    )


def prepare(out: Path, *, seed: int = 0, example: Example | None = None) -> dict[str, Any]:
    """Makes the directory `out`, whole or not at all, and returns what its `complete.json` says."""
    example = example or Example()
    start = time.monotonic()
    train, held_out = make_rows(example, seed)
    tokenizer = make_tokenizer(MAX_LENGTH, CHARACTERS)
    model = make_qwen3(
        seed,
        hidden_size=example.hidden_size,
        vocab_size=len(SPECIAL_TOKENS) + len(CHARACTERS),
        num_hidden_layers=example.layers,
        max_position_embeddings=MAX_LENGTH,
    )
    report = {
        "seed": seed,
        **train_supervised(model, tokenizer, train, held_out, example, seed),
        "parameters": model.num_parameters(),
        "seconds": time.monotonic() - start,
        "example": asdict(example),
    }
    write_example(out, model, tokenizer, {"train": train, "eval": held_out}, report)
    return report


def make_rows(example: Example, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and held-out rows, all of them different."""
    count = example.train_prompts + example.eval_prompts
    rows: dict[str, dict[str, Any]] = {}
    for entry in create_dataset(DATASET, seed=seed, size=2 * count, **CONFIG):
        prompt = "<bos>" + entry["metadata"]["expression"].replace(" ", "") + ">"
        metadata = {"dataset": DATASET, "config": CONFIG, "entry": encoded(entry), "answer": "text"}
        rows[prompt] = {"prompt": prompt, "label": entry["answer"], "metadata": metadata}
    found = list(rows.values())[:count]
    if len(found) < count:
        raise ValueError(f"{DATASET} with {CONFIG} has too few questions for {count} rows.")
    return found[: example.train_prompts], found[example.train_prompts :]


def transcript(
    row: dict[str, Any],
    tokenizer: PreTrainedTokenizerFast,
    call_probability: tuple[float, ...],
    chance: random.Random,
) -> Transcript:
    """Returns an episode that calls the calculator once per operation, and answers at some point.

    Args:
        row: the question, and its answer, which is given whether or not all operations were
            calculated.
        tokenizer: every character is a token.
        call_probability: of calling with one, two, … operations left.
        chance: decides.
    """
    tokens = tokenizer(row["prompt"])["input_ids"]
    sampled = [False] * len(tokens)

    def add(text: str, *, by_policy: bool) -> None:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens.extend(ids)
        sampled.extend([by_policy] * len(ids))

    value, operations = split_expression(row["prompt"].removeprefix("<bos>").removesuffix(">"))
    for place, operation in enumerate(operations):
        if chance.random() >= call_probability[len(operations) - place - 1]:
            break
        call = f"{value}{operation}"
        value = calculate(call)
        add(f"?{call}=", by_policy=True)
        add(f"{value};", by_policy=False)
    add(f"!{row['label']}<eos>", by_policy=True)
    return Transcript(tokens=tokens, sampled=sampled)


def split_expression(expression: str) -> tuple[str, list[str]]:
    """`47+38-62` → `47`, [`+38`, `-62`]."""
    parts = expression.replace("+", " +").replace("-", " -").split()
    return parts[0], parts[1:]


def train_supervised(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    train: list[dict[str, Any]],
    held_out: list[dict[str, Any]],
    example: Example,
    seed: int,
) -> dict[str, float]:
    """Trains until the accuracy is what was asked for, and returns it with the steps taken.

    Raises:
        RuntimeError: the accuracy is not reached.
    """
    chance = random.Random(seed)
    seen = [
        transcript(chance.choice(train), tokenizer, example.call_probability, chance)
        for _ in range(example.transcripts)
    ]
    always = (1.0,) * len(example.call_probability)
    right = padded([transcript(row, tokenizer, always, chance) for row in held_out])
    decisions = torch.tensor(tokenizer.convert_tokens_to_ids(["?", "!"]))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=example.lr, betas=(0.9, 0.98), weight_decay=0.0
    )
    lowest, highest = example.accuracy
    warmup = 30
    for step, batch in zip(
        range(1, example.max_steps + 1), batches(seen, example.batch_size, chance), strict=False
    ):
        for group in optimizer.param_groups:
            group["lr"] = example.lr * min(1.0, step / warmup)
        tokens, sampled = padded(batch)
        log_probs = (
            logits(model, tokens).log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        )
        loss = -(log_probs * sampled[:, 1:]).sum() / sampled.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 5 == 0:
            accuracy, copied = accuracies(model, *right, decisions)
            if lowest <= accuracy <= highest and copied >= example.copied:
                return {"steps": step, "accuracy": accuracy, "copied": copied}
    raise RuntimeError(
        f"seed {seed} did not reach a greedy accuracy of {lowest} to {highest} in"
        f" {example.max_steps} steps; take another --seed."
    )


def batches(
    transcripts: list[Transcript], size: int, chance: random.Random
) -> Iterator[list[Transcript]]:
    """Batches without end, in a new order every epoch."""
    while True:
        order = chance.sample(transcripts, len(transcripts))
        yield from (order[start : start + size] for start in range(0, len(order), size))


def padded(transcripts: list[Transcript]) -> tuple[Tensor, Tensor]:
    """[rows, tokens] ids, and which of them the policy sampled, padded on the right."""
    longest = max(len(one.tokens) for one in transcripts)
    tokens = torch.full((len(transcripts), longest), PAD)
    sampled = torch.zeros(len(transcripts), longest, dtype=torch.bool)
    for row, one in enumerate(transcripts):
        tokens[row, : len(one.tokens)] = torch.tensor(one.tokens)
        sampled[row, : len(one.sampled)] = torch.tensor(one.sampled)
    return tokens, sampled


def logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """[rows, tokens - 1, vocabulary] of all tokens but the first."""
    found: Tensor = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return found


@torch.no_grad()
def accuracies(
    model: PreTrainedModel, tokens: Tensor, sampled: Tensor, decisions: Tensor
) -> tuple[float, float]:
    """Returns the share of questions with right greedy calls and answer, also with given decisions.

    Args:
        model: policy.
        tokens: [rows, tokens] of transcripts in which everything is calculated.
        sampled: which of them the policy samples.
        decisions: ids of the tokens that begin a call and an answer.
    """
    expected = tokens[:, 1:]
    right = (logits(model, tokens).argmax(-1) == expected) | ~sampled[:, 1:]
    given = right | torch.isin(expected, decisions)
    return right.all(-1).float().mean().item(), given.all(-1).float().mean().item()


if __name__ == "__main__":
    main()
