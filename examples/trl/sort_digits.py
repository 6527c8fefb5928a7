"""TRL's GRPO with rollout correction sorts ten digits; `make train-trl` runs it.

The answer to `3141592653>` is `1123345569`.

    python examples/sort_digits/prepare.py --out data/sort_digits
    python examples/trl/sort_digits.py --steps 60 --output-dir runs/trl

The rollout engine is a bfloat16 copy of the policy. TRL gets its log-probs through `rollout_func`,
as it gets vLLM's.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from trl import GRPOConfig

from slime_tis import RolloutCorrectionConfig
from slime_tis.integrations.trl import CorrectedGRPOTrainer

RolloutFunc = Callable[[Sequence[str], Any], dict[str, Any]]
"""TRL's `rollout_func`: takes prompts and the trainer; returns token ids and log-probs."""
ANSWER = 12
"""Tokens of an answer, at most."""
CORRECTION = RolloutCorrectionConfig(
    use_tis=True,
    tis_upper_bound=2.0,
    use_rs=True,
    rs_level="geometric",
    rs_z_score=3.0,
    rs_veto_threshold=1e-3,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--data", type=Path, default=Path("data/sort_digits"), help="from examples/sort_digits"
    )
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of 128 samples")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/trl"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    run(options.data, options.output_dir, steps=options.steps)


def run(
    data: Path,
    output_dir: Path,
    *,
    steps: int,
    rollout_func: RolloutFunc | None = None,
    rollout_precision: str = "bf16",
) -> None:
    """Trains, and prints the accuracy on held-out prompts.

    Args:
        data: Directory of `prepare.py`.
        output_dir: For dumps and TRL's files.
        steps: Optimizer steps.
        rollout_func: The sampler; None for a bfloat16 copy of the policy.
        rollout_precision: Of the sampler.
    """
    trainer = make_trainer(data, output_dir, steps, rollout_func, rollout_precision)
    held_out = rows(data / "eval.jsonl")
    before = accuracy(trainer, held_out)
    trainer.train()
    print(f"held-out accuracy: {before:.2f} -> {accuracy(trainer, held_out):.2f}")


def make_trainer(
    data: Path,
    output_dir: Path,
    steps: int,
    rollout_func: RolloutFunc | None = None,
    rollout_precision: str = "bf16",
) -> CorrectedGRPOTrainer:
    """The trainer: 16 prompts with 8 answers each per step, from `sample` by default."""
    settings = GRPOConfig(
        output_dir=str(output_dir),
        max_steps=steps,
        per_device_train_batch_size=128,
        num_generations=8,
        max_completion_length=ANSWER,
        learning_rate=1.5e-4,
        lr_scheduler_type="constant",
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        gradient_checkpointing=False,
        seed=1,
    )
    checkpoint = data / "checkpoint"
    return CorrectedGRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(checkpoint),
        args=settings,
        train_dataset=Dataset.from_list(rows(data / "train.jsonl")),
        processing_class=AutoTokenizer.from_pretrained(checkpoint, padding_side="left"),
        reward_funcs=exact_match,
        rollout_func=rollout_func or sample,
        rollout_correction=CORRECTION,
        dump_dir=output_dir / "dump",
        rollout_precision=rollout_precision,
    )


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def exact_match(completions: Sequence[str], label: Sequence[str], **_: Any) -> list[float]:
    return [
        float(completion == answer) for completion, answer in zip(completions, label, strict=True)
    ]


def sample(prompts: Sequence[str], trainer: CorrectedGRPOTrainer) -> dict[str, Any]:
    """TRL's `rollout_func`: one answer per prompt, with log-probs, from a bfloat16 copy."""
    policy = trainer.accelerator.unwrap_model(trainer.model)
    engine = type(policy)(
        policy.config
    )  # a deepcopy would share the forward that accelerate replaced
    engine.load_state_dict(policy.state_dict())
    engine = engine.eval().to(torch.bfloat16)
    prompt_ids, answers, log_probs = generate(
        engine, trainer.processing_class, prompts, do_sample=True
    )
    return {"prompt_ids": prompt_ids, "completion_ids": answers, "logprobs": log_probs}


def generate(
    model: PreTrainedModel, tokenizer: Any, prompts: Sequence[str], *, do_sample: bool
) -> tuple[list[list[int]], list[list[int]], list[list[float]]]:
    """Token ids of prompts and answers, and the log-probs of the answers' tokens."""
    inputs = tokenizer(list(prompts), return_tensors="pt", padding=True).to(model.device)
    with torch.no_grad():
        output = model.generate(
            **inputs,
            max_new_tokens=ANSWER,
            do_sample=do_sample,
            top_k=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
    answer_BT: Tensor = output.sequences[:, inputs["input_ids"].shape[1] :]
    log_prob_BT = (
        torch.stack(output.logits, 1)
        .float()
        .log_softmax(-1)
        .gather(2, answer_BT[..., None])[..., 0]
    )
    answers, log_probs = [], []
    for ids, values in zip(answer_BT.tolist(), log_prob_BT.tolist(), strict=True):
        length = (
            ids.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in ids else len(ids)
        )
        answers.append(ids[:length])
        log_probs.append(values[:length])
    return tokenizer(list(prompts))["input_ids"], answers, log_probs


def accuracy(trainer: CorrectedGRPOTrainer, prompts: Sequence[dict[str, str]]) -> float:
    """The share of correct greedy answers."""
    model, tokenizer = (
        trainer.accelerator.unwrap_model(trainer.model).eval(),
        trainer.processing_class,
    )
    _, answers, _ = generate(model, tokenizer, [row["prompt"] for row in prompts], do_sample=False)
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    return sum(exact_match(texts, [row["label"] for row in prompts])) / len(prompts)


if __name__ == "__main__":
    main()
