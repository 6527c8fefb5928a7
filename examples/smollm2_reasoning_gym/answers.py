"""Prints answers to held-out questions before and after training, in words.

    python -m examples.smollm2_reasoning_gym.answers \
        --before data/smollm2/checkpoint --after runs/smollm2/hf \
        --prompts data/smollm2/prompts/eval.jsonl
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from examples.reasoning_gym.reward import RIGHT, entry_score
from slime_tis.trainer.data.prompts import load_prompts
from slime_tis.trainer.data.sample import Prompt, Sampling
from slime_tis.trainer.engines.local.load_model import load_tokenizer
from slime_tis.trainer.engines.local.local_engine import LocalEngine


def main() -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--before", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--after", type=Path, required=True, help="the directory of --save-hf")
    parser.add_argument("--prompts", type=Path, required=True, help="eval.jsonl")
    parser.add_argument("--each", type=int, default=2, help="questions of each dataset (default 2)")
    parser.add_argument(
        "--max-response-len", type=int, default=12, help="tokens (default 12, as in train.yaml)"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    try:
        tokenizer = load_tokenizer(options.before)
        rows = load_prompts(
            options.prompts,
            tokenizer,
            input_key="prompt",
            label_key="label",
            apply_chat_template=True,
        )
        prompts = first_of_each(rows, options.each)
        before, after = (
            answers(directory, prompts, options.max_response_len)
            for directory in (options.before, options.after)
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for prompt, *both in zip(prompts, before, after, strict=True):
        entry = prompt.metadata["entry"]
        print(f"\n{prompt.metadata['dataset']}: {entry['question']}  [{entry['answer']}]")
        for when, answer in zip(("before", "after"), both, strict=True):
            verdict = "right" if entry_score(prompt.metadata, answer) >= RIGHT else "wrong"
            print(f"  {when + ':':8}{verdict}  {answer!r}")
    return 0


def first_of_each(prompts: list[Prompt], each: int) -> list[Prompt]:
    """The first prompts of every dataset, dataset after dataset."""
    by_dataset: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        by_dataset[prompt.metadata["dataset"]].append(prompt)
    return [prompt for name in sorted(by_dataset) for prompt in by_dataset[name][:each]]


def answers(directory: Path, prompts: list[Prompt], max_response_len: int) -> list[str]:
    """Greedy answers of a checkpoint."""
    engine = LocalEngine(directory, load_tokenizer(directory))
    try:
        groups = engine.generate(
            prompts, Sampling(temperature=0.0, max_response_len=max_response_len), 0
        )
    finally:
        engine.close()
    return [group[0].response for group in groups]


if __name__ == "__main__":
    sys.exit(main())
