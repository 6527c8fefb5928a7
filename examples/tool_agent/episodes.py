"""Prints policies' greedy episodes on held-out questions, with accuracy and calls per episode.

python -m examples.tool_agent.episodes data/tool_agent/checkpoint runs/tool_agent/hf
"""

import argparse
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from examples.tool_agent.agent import correct, generate
from slime_tis.trainer.agents.custom_generate import slime_sampling_params
from slime_tis.trainer.data.prompts import load_prompts
from slime_tis.trainer.data.sample import Sample, Sampling
from slime_tis.trainer.engines.local.load_model import load_tokenizer
from slime_tis.trainer.engines.local.local_engine import LocalEngine

PROMPTS = Path("data/tool_agent/eval.jsonl")
RESPONSE = 64
"""Most tokens of an episode after its prompt."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoints", nargs="+", type=Path, help="Hugging Face directories")
    parser.add_argument(
        "--prompts", type=Path, default=PROMPTS, help=f"held-out questions (default {PROMPTS})"
    )
    parser.add_argument(
        "--each", type=int, default=4, help="episodes to print of each policy (default 4)"
    )
    options = parser.parse_args(argv)
    for checkpoint in options.checkpoints:
        if not (checkpoint / "config.json").is_file():
            parser.error(
                f"{checkpoint} has no config.json; give directories of Hugging Face checkpoints."
            )
    if not options.prompts.is_file():
        parser.error(
            f"there are no questions in {options.prompts}; examples/tool_agent/prepare.py writes"
            " them."
        )
    torch.set_num_threads(1)
    disable_progress_bar()
    for checkpoint in options.checkpoints:
        samples = episodes(checkpoint, options.prompts)
        right = sum(correct(None, sample) for sample in samples) / len(samples)
        calls = sum(sample.metadata["calls"] for sample in samples) / len(samples)
        print(f"{checkpoint}: accuracy {right:.2f}, {calls:.1f} calls per episode")
        for sample in samples[: options.each]:
            print(f"  {sample.prompt_text.removeprefix('<bos>')}{sample.response}")


def episodes(checkpoint: Path, prompts: Path) -> list[Sample]:
    """The greedy episode of each question.

    Args:
        checkpoint: Hugging Face directory of the policy.
        prompts: rows that prepare.py wrote.
    """
    tokenizer = load_tokenizer(checkpoint)
    loaded = load_prompts(
        prompts, tokenizer, input_key="prompt", label_key="label", metadata_key="metadata"
    )
    sampling = Sampling(temperature=0.0, max_response_len=RESPONSE)
    args = Namespace(hf_checkpoint=str(checkpoint), rollout_max_response_len=RESPONSE)

    async def episode(sample: Sample, engine: Any) -> list[Sample]:
        return [await generate(args, sample, slime_sampling_params(sampling), engine)]

    engine = LocalEngine(checkpoint, tokenizer)
    groups = engine.submit(loaded, sampling, 0, function=episode, concurrency=len(loaded)).result()
    engine.close()
    return [sample for group in groups for sample in group]


if __name__ == "__main__":
    main()
