"""GRPO with TRL's GRPOTrainer on the same task, timed from the end of a step to the next end."""

import tempfile
from typing import Any

import accelerate
import torch
import transformers
import trl
from datasets import Dataset
from task import CLOCKS, MAX_GRAD_NORM, TASKS, StepClock, read_options, read_rows, write_times
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
    options = read_options(__doc__.splitlines()[0], "--checkpointing")
    task = TASKS[options.task]
    torch.set_num_threads(options.threads)
    clock = StepClock(CLOCKS[options.clock])

    def scores(
        completions: list[str], label: list[str], completion_ids: list[list[int]], **_: Any
    ) -> list[float]:
        rewards = [
            task.score(text, wanted) for text, wanted in zip(completions, label, strict=True)
        ]
        clock.scored(rewards, [len(ids) for ids in completion_ids])
        return rewards

    with tempfile.TemporaryDirectory() as directory:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32),
            reward_funcs=scores,
            args=GRPOConfig(
                output_dir=directory,
                max_steps=options.steps,
                per_device_train_batch_size=task.micro_batch,
                # all completions of a step are sampled at once
                gradient_accumulation_steps=task.micro_batches,
                num_generations=task.group,
                max_completion_length=task.max_new_tokens,
                temperature=1.0,
                learning_rate=task.learning_rate,
                lr_scheduler_type="constant",
                weight_decay=0.0,
                max_grad_norm=MAX_GRAD_NORM,
                beta=0.0,
                num_iterations=1,
                shuffle_dataset=False,
                bf16=False,
                gradient_checkpointing=options.checkpointing,
                use_cpu=True,
                use_vllm=False,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                seed=0,
            ),
            train_dataset=Dataset.from_list(read_rows(options.rows)),
            processing_class=AutoTokenizer.from_pretrained(options.checkpoint, padding_side="left"),
            callbacks=[EndOfStep(clock)],
        )
        trainer.train()
    versions = {
        module.__name__: module.__version__ for module in (torch, transformers, trl, accelerate)
    }
    write_times(options.out, clock, versions)


if __name__ == "__main__":
    main()
