"""Runs each fault and each healthy case in TRL under both programs, and writes their alarms.

    python -m studies.live_alarms.run --results studies/live_alarms/results.csv --seeds 0 1 2

It needs the environment of `make study-alarms`: TRL 1.16.0 and martingale 0.2.0.
"""

import argparse
import csv
import logging
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from martingale.integrations.trl import MartingaleGRPOTrainer, MartingaleRecorder
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from trl import GRPOConfig

from slime_tis import RolloutCorrectionConfig
from slime_tis.integrations.trl import RolloutCorrectionMixin
from slime_tis.progress import print_line, tracked
from studies.live_alarms.faults import ANSWERS_PER_PROMPT, FAULTS, HEALTHY, Case

WORDS = ["<pad>", "<eos>", "<unk>", *map(str, range(20))]
"""The vocabulary."""
STEPS = 12
"""Optimizer steps of a run."""
ANSWER = 16
"""Tokens of an answer, at most."""
BATCH = 16
"""Answers per optimizer step."""
EOS = 1
"""Token id of the end."""


class WatchedTrainer(RolloutCorrectionMixin, MartingaleGRPOTrainer):
    """TRL's trainer under both programs."""


@dataclass(frozen=True)
class Alarm:
    """One alarm of one program."""

    program: str
    name: str
    step: int
    """Optimizer steps made before the batch that raised it."""


class AlarmLog(logging.Handler):
    """Keeps the alarms of slime_tis, which it prints by logging."""

    def __init__(self) -> None:
        super().__init__()
        self.alarms: list[Alarm] = []

    def emit(self, record: logging.LogRecord) -> None:
        name, _, rest = record.getMessage().removeprefix("health/").partition(" since step ")
        if rest:
            step = int(rest.split(":")[0])
            self.alarms.append(Alarm("slime_tis", name, step))


def make_tokenizer() -> PreTrainedTokenizerFast:
    ids = {word: i for i, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


@dataclass(frozen=True)
class World:
    """Size of the model, and the learning rate of cases that set none."""

    hidden_size: int = 32
    layers: int = 2
    learning_rate: float = 1e-3


def make_model(world: World, dtype: str, directory: Path) -> Qwen2ForCausalLM:
    """The model, loaded from a directory: with a KL term TRL loads the reference policy from it."""
    config = Qwen2Config(
        vocab_size=len(WORDS),
        hidden_size=world.hidden_size,
        intermediate_size=2 * world.hidden_size,
        num_hidden_layers=world.layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=EOS,
        attention_dropout=0.0,
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config)
    for parameter in model.parameters():
        parameter.data.mul_(6)  # far from uniform
    model.save_pretrained(directory)
    return Qwen2ForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))


class PlantedEngine:
    """A `rollout_func` that samples as a case says."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.engine: Qwen2ForCausalLM | None = None
        self.history: list[dict[str, Tensor]] = []
        """Weights after each optimizer step; the last one is the trainer's."""

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        planted = self.case.engine
        step = trainer.state.global_step
        self._load(trainer, step)
        inputs = trainer.processing_class(list(prompts), return_tensors="pt")
        limit = trainer.max_completion_length
        answers, log_probs = self._sample(inputs["input_ids"], limit)
        planted.edit(step, log_probs)
        output = {
            "prompt_ids": inputs["input_ids"].tolist(),
            "completion_ids": answers,
            "logprobs": log_probs,
        }
        if planted.reports_versions:
            version = max(step - planted.delay, 0)
            output["weight_versions"] = [version] * len(prompts)
        return output

    def _load(self, trainer: Any, step: int) -> None:
        policy = trainer.accelerator.unwrap_model(trainer.model)
        planted = self.case.engine
        state = {name: value.detach().clone() for name, value in policy.state_dict().items()}
        # Several batches of one step have the same weights.
        while len(self.history) <= step:
            self.history.append(state)
        if self.engine is None:
            self.engine = Qwen2ForCausalLM(policy.config).eval().to(planted.dtype)
            self.engine.load_state_dict(state)
            if planted.rope_factor != 1.0:
                rotary = self.engine.model.rotary_emb
                # inv_freq is theta^(-2i/d), so a factor of theta has the same exponent
                size = len(rotary.inv_freq)
                exponent = torch.arange(size, dtype=torch.float32) / size
                rotary.inv_freq.mul_(planted.rope_factor**-exponent)
        source = self.history[max(step - planted.delay, 0)]
        own = self.engine.state_dict()
        for name, value in source.items():
            if planted.receives(step, name):
                own[name].copy_(value)

    @torch.no_grad()
    def _sample(self, prompt_BT: Tensor, limit: int) -> tuple[list[list[int]], list[list[float]]]:
        assert self.engine is not None
        planted = self.case.engine
        tokens_BT = prompt_BT
        log_prob_columns = []
        for _ in range(limit):
            logits_BV = self.engine(tokens_BT, use_cache=False).logits[:, -1].float()
            sampled_BV = planted.sampling(logits_BV)
            reported_BV = sampled_BV
            if planted.reported is not None:
                reported_BV = planted.reported(logits_BV)
            token_B1 = torch.multinomial(sampled_BV.softmax(-1), 1)
            log_prob_columns.append(reported_BV.log_softmax(-1).gather(1, token_B1))
            tokens_BT = torch.cat([tokens_BT, token_B1], 1)
        answer_BT = tokens_BT[:, prompt_BT.shape[1] :].tolist()
        log_prob_BT = torch.cat(log_prob_columns, 1).tolist()
        answers = []
        log_probs = []
        for ids, values in zip(answer_BT, log_prob_BT, strict=True):
            length = limit
            if EOS in ids:
                length = ids.index(EOS) + 1
            answers.append(ids[:length])
            log_probs.append(values[:length])
        return answers, log_probs


def distinct(completions: Sequence[str], **_: Any) -> list[float]:
    return [len(set(completion.split())) / ANSWER for completion in completions]


def sparse(completions: Sequence[str], **_: Any) -> list[float]:
    return [float("7" in completion.split()) for completion in completions]


def constant(completions: Sequence[str], **_: Any) -> list[float]:
    return [1.0 for _ in completions]


REWARDS = {"distinct": distinct, "sparse": sparse, "constant": constant}


def watch(case: Case, world: World, seed: int, directory: Path) -> list[Alarm]:
    """Runs a case; returns both programs' alarms, ordered by step."""
    torch.manual_seed(seed)
    random.seed(seed)
    options = {
        "learning_rate": world.learning_rate,
        "max_completion_length": ANSWER,
        **case.options,
    }
    tokenizer = make_tokenizer()
    model = make_model(world, options.pop("dtype", "float32"), directory / "model")
    settings = GRPOConfig(
        output_dir=str(directory / "out"),
        per_device_train_batch_size=BATCH,
        num_generations=ANSWERS_PER_PROMPT,
        max_steps=STEPS,
        lr_scheduler_type="constant_with_warmup",
        use_cpu=True,
        bf16=False,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        gradient_checkpointing=False,
        disable_tqdm=True,
        seed=seed,
        **options,
    )
    correction = None
    if case.corrects:
        correction = RolloutCorrectionConfig(use_tis=True)
    prompts = [f"{i % 20} {(i * 7 + 3) % 20} {i // 20}" for i in range(60)]
    flight = MartingaleRecorder(str(directory / "record"), tokenizer=tokenizer)
    log = AlarmLog()
    logger = logging.getLogger("slime_tis.live_health")
    logger.addHandler(log)
    try:
        trainer = WatchedTrainer(
            model=model,
            args=settings,
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
            processing_class=tokenizer,
            reward_funcs=REWARDS[case.reward],
            rollout_func=PlantedEngine(case),
            rollout_correction=correction,
            flight_recorder=flight,
            halt_on_error=False,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    finally:
        logger.removeHandler(log)
    alarms = list(log.alarms)
    for alarm in trainer.martingale_monitor.alarms:
        # Its steps count the optimizer step that has just ended.
        alarms.append(Alarm("martingale", alarm.kind, alarm.step - 1))
    return sorted(alarms, key=lambda alarm: alarm.step)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, required=True, help="CSV to write")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--hidden-size", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--only", default="", help="run cases whose name contains this text")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    # Both programs also print each alarm.
    logging.getLogger("martingale").propagate = False
    logging.getLogger("slime_tis").propagate = False
    world = World(options.hidden_size, options.layers, options.learning_rate)
    chosen = []
    for seed in options.seeds:
        for kind, cases in (("fault", FAULTS), ("healthy", HEALTHY)):
            for name, case in cases.items():
                if options.only in name:
                    chosen.append((seed, kind, name, case))
    rows = []
    for seed, kind, name, case in tracked(chosen, "runs", len(chosen)):
        start = time.process_time()
        with tempfile.TemporaryDirectory() as directory:
            alarms = watch(case, world, seed, Path(directory))
        seconds = time.process_time() - start
        found = [f"{alarm.program}:{alarm.name}@{alarm.step}" for alarm in alarms]
        print_line(f"{kind} {seed} {name} ({seconds:.1f} s): {' '.join(found)}")
        rows.append({"kind": kind, "case": name, "seed": seed, "alarms": " ".join(found)})
    with options.results.open("w", newline="") as file:
        columns = ["kind", "case", "seed", "alarms"]
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
