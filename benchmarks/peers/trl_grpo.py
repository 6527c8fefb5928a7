"""GRPO with TRL's GRPOTrainer on the same task, timed from the end of one step to the end of the next."""

import tempfile
from typing import Any

import accelerate
import torch
import transformers
import trl
from datasets import Dataset
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
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class EndOfStep(TrainerCallback):
    """Starts the clock when training begins and stops it at each optimizer step."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._clock.start()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._clock.end_step()


def main() -> None:
    options = read_options(__doc__.splitlines()[0])
    torch.set_num_threads(options.threads)
    checkpoint = options.data / "checkpoint"
    clock = StepClock()

    def exact_match(completions: list[str], label: list[str], **_: Any) -> list[float]:
        rewards = [float(completion == wanted) for completion, wanted in zip(completions, label, strict=True)]
        clock.rewards.append(sum(rewards) / len(rewards))
        return rewards

    with tempfile.TemporaryDirectory() as directory:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32),
            reward_funcs=exact_match,
            args=GRPOConfig(
                output_dir=directory,
                max_steps=options.steps,
                per_device_train_batch_size=PROMPTS * GROUP,
                gradient_accumulation_steps=1,
                num_generations=GROUP,
                max_completion_length=MAX_NEW_TOKENS,
                temperature=1.0,
                learning_rate=LEARNING_RATE,
                lr_scheduler_type="constant",
                weight_decay=0.0,
                max_grad_norm=MAX_GRAD_NORM,
                beta=0.0,
                num_iterations=1,
                bf16=False,
                gradient_checkpointing=False,
                use_cpu=True,
                use_vllm=False,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                seed=0,
            ),
            train_dataset=Dataset.from_list(read_rows(options.data, "train.jsonl")),
            processing_class=AutoTokenizer.from_pretrained(checkpoint, padding_side="left"),
            callbacks=[EndOfStep(clock)],
        )
        trainer.train()
    versions = {module.__name__: module.__version__ for module in (torch, transformers, trl, accelerate)}
    write_times(options.out, clock, versions)


if __name__ == "__main__":
    main()
