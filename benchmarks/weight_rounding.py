"""The share of small weight updates that reaches a rollout engine in bf16, by rounding mode.

    python -m benchmarks.weight_rounding --hf-checkpoint data/smollm2/checkpoint \\
        --prompts data/smollm2/prompts

The checkpoint is rounded to bfloat16 first, where published ones lie. One series of Adam steps per
learning rate, in float32, raises the log-probs of right answers to training prompts; after each
step an engine in bf16 per rounding mode is sent the weights. Of right answers to held-out prompts:
the rise of their mean log-prob in training and in each engine, and the k3 divergence between the
two. Nothing is sampled: the series is the same for every mode.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.provenance import commit, machine
from slime_tis.trainer.configs.rollout import Rounding
from slime_tis.trainer.data.prompts import load_prompts
from slime_tis.trainer.engines.local.load_model import (
    load_model,
    load_tokenizer,
    weights_by_file_name,
)
from slime_tis.trainer.engines.local.local_engine import LocalEngine
from slime_tis.trainer.engines.local.token_sampling import log_softmax
from slime_tis.trainer.engines.weight_rounding import WeightRounder
from slime_tis.trainer.engines.weight_updates import WeightUpdates

MODES: tuple[Rounding, ...] = ("nearest", "stochastic")
COLUMNS = ("lr", "rounding", "step", "trained", "engine", "k3", "received")


@dataclass(frozen=True, kw_only=True)
class Text:
    """A prompt and the right answer to it."""

    token_ids: tuple[int, ...]
    answer_len: int


def texts(path: Path, checkpoint: Path) -> list[Text]:
    """The prompts of a file with their labels as answers."""
    tokenizer = load_tokenizer(checkpoint)
    found = []
    for prompt in load_prompts(
        path, tokenizer, input_key="prompt", label_key="label", apply_chat_template=True
    ):
        answer = [
            *tokenizer.encode(str(prompt.label), add_special_tokens=False),
            tokenizer.eos_token_id,
        ]
        found.append(Text(token_ids=(*prompt.token_ids, *answer), answer_len=len(answer)))
    return found


def answer_log_probs(model: PreTrainedModel, text: Text) -> Tensor:
    """Log-probs [answer_len] of the answer's tokens."""
    ids = torch.tensor([text.token_ids])
    log_probs = log_softmax(model(ids).logits[0, :-1])
    return log_probs.gather(-1, ids[0, 1:, None])[-text.answer_len :, 0]


@dataclass(kw_only=True)
class Lane:
    """A rollout engine in bf16 and how it gets its updates."""

    engine: LocalEngine
    updates: WeightUpdates

    def answer_log_probs(self, held_out: Sequence[Text]) -> Tensor:
        """Log-probs of all answers' tokens, one after the other."""
        found: list[float] = []
        for text in held_out:
            ((_, log_probs),) = self.engine.prompt_log_probs(text.token_ids).items()
            found += log_probs[-text.answer_len :]
        return torch.tensor(found)


def series(
    checkpoint: Path,
    lr: float,
    steps: int,
    batches: Sequence[Sequence[Text]],
    held_out: Sequence[Text],
    every: int,
) -> None:
    """Makes the series of one learning rate, and prints its rows."""
    model = load_model(checkpoint, torch.float32).requires_grad_(True)
    weights = weights_by_file_name(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16().float())
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, betas=(0.9, 0.98))
    lanes = {}
    for mode in MODES:
        engine = LocalEngine(checkpoint, load_tokenizer(checkpoint), precision="bf16")
        updates = WeightUpdates(WeightRounder(mode, 0), engine.weight_precision, samples_all=False)
        engine.update_weights(updates.source(weights.items, 0), 0)
        lanes[mode] = Lane(engine=engine, updates=updates)
    started: dict[str, float] = {}
    for step in range(steps + 1):
        if step:
            for text in batches[(step - 1) % len(batches)]:
                (-answer_log_probs(model, text).mean() / len(batches[0])).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        for lane in lanes.values() if step else ():
            lane.engine.update_weights(lane.updates.source(weights.items, step), step)
        if step % every and step != steps:
            continue
        with torch.no_grad():
            trained = torch.cat([answer_log_probs(model, text) for text in held_out])
        for mode, lane in lanes.items():
            served = lane.answer_log_probs(held_out)
            delta = trained - served
            started.setdefault("trained", trained.mean().item())
            started.setdefault(mode, served.mean().item())
            rises = trained.mean().item() - started["trained"], served.mean().item() - started[mode]
            k3 = (delta.expm1() - delta).mean().item()
            received = lane.updates.metrics().get("rollout/update_received", float("nan"))
            row = [
                f"{lr:g}",
                mode,
                str(step),
                *(f"{rise:+.4f}" for rise in rises),
                f"{k3:.2e}",
                f"{received:.3f}",
            ]
            print("| " + " | ".join(row) + " |", flush=True)


def main() -> None:
    """Prints the table, row after row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hf-checkpoint", type=Path, required=True)
    parser.add_argument(
        "--prompts", type=Path, required=True, help="directory of train.jsonl and eval.jsonl"
    )
    parser.add_argument("--lr", nargs="+", type=float, default=[1e-6, 5e-6])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--every", type=int, default=4, help="steps between two rows")
    parser.add_argument("--answers", type=int, default=8, help="right answers per step")
    parser.add_argument("--held-out", type=int, default=24, help="held-out answers")
    given = parser.parse_args()
    torch.set_num_threads(1)
    train = texts(given.prompts / "train.jsonl", given.hf_checkpoint)
    batches = [train[start :: given.steps][: given.answers] for start in range(given.steps)]
    held_out = texts(given.prompts / "eval.jsonl", given.hf_checkpoint)[: given.held_out]
    print(f"{date.today()}, {machine()}, torch {torch.__version__}, one thread, commit {commit()}")
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|")
    for lr in given.lr:
        series(given.hf_checkpoint, lr, given.steps, batches, held_out, given.every)


if __name__ == "__main__":
    main()
