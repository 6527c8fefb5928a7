"""Measures the rounding noise of each precision on trained models of several depths and widths.

    python -m studies.precision_noise.measure    # after `make data data-smollm2`; 20 minutes

A rollout engine of each precision samples answers token by token with a cache of keys and values.
The same weights then score the answers in one forward pass, in fp32 or in bf16. Everything else is
equal, so the mismatch is rounding noise. The noise is Σ abs(Δ) / Σ (1 − p), with p the larger
probability of the token, as in `slime_tis.analysis.diagnosis`.

Models: sort digits with 2 to 8 layers of 64 to 256 features, trained until the loss of an answer
is below 4 nats, and SmolLM2-135M-Instruct, which has 30 layers of 576 features.
"""

import argparse
import datetime
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.provenance import machine
from examples.tables import read_rows, write_rows
from slime_tis.analysis.diagnosis.hypotheses.network import TABLE as NETWORK
from slime_tis.analysis.diagnosis.hypotheses.prompts import TABLE as PROMPTS
from slime_tis.analysis.diagnosis.rescore import load_model
from slime_tis.analysis.diagnosis.trained_tokens import Tokens
from slime_tis.demo.sort_digits import Example, prepare
from slime_tis.trainer.data.prompts import load_prompts
from studies.collapse.run import versions

RESULTS = Path(__file__).with_name("results.csv")
SMOLLM2 = Path("data/smollm2/checkpoint")
SMOLLM2_PROMPTS = Path("data/smollm2/prompts/eval.jsonl")
TINY = Path("runs/studies/precision_noise")
"""Where the models of sort digits are made."""
LAYERS = (2, 4, 8)
WIDTHS = (64, 128, 256)
ROLLOUT = {
    "fp32": "",
    "fp16": "fp16",
    "bf16": "bf16",
    "bf16 weights": "bf16 weights",
    "fp8": "fp8 weights",
    "fp8 weights and activations": "fp8 weights and activations",
    "fp8 KV cache": "fp8 KV cache",
    "int8": "int8 weights",
    "int4": "int4 weights",
}
"""The hypothesis of the diagnosis that makes each precision of the rollout engine."""
TRAINING = {"fp32": "", "fp16": "fp16", "bf16": "bf16"}
"""The same for the training engine."""
BATCH = 16
"""Samples that are answered together, and tokens of their logits that are kept."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The noise of one pair of precisions of one model."""

    model: str
    layers: int
    width: int
    training: str
    rollout: str
    samples: int
    tokens: int
    mean_abs: float
    """Mean abs(Δ), nats."""
    noise: float
    """Σ abs(Δ) / Σ (1 − p)."""
    noise_low: float
    """Lower end of its 95 % interval: bootstrap over samples."""
    noise_high: float
    k3: float
    """Mean of ρ − 1 − log ρ, nats."""
    date: str
    machine: str
    versions: str


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """One answer."""

    prompt: Tensor
    """[P] token ids."""
    response: Tensor
    """[T] token ids."""
    log_probs: Tensor
    """[T] of the rollout engine."""


def main() -> None:
    """Measures all models; an interrupted run starts again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="table to write")
    parser.add_argument(
        "--models", nargs="+", default=["sort_digits", "smollm2"], help="which models"
    )
    options = parser.parse_args()
    rows: list[Row] = []
    if options.results.exists():
        rows = [row for row in read_rows(options.results, Row) if row.model not in options.models]
    if "sort_digits" in options.models:
        for layers in LAYERS:
            for width in WIDTHS:
                rows += sort_digits(layers, width)
                write_rows(options.results, Row, rows)
    if "smollm2" in options.models:
        rows += smollm2()
        write_rows(options.results, Row, rows)
    print(options.results)


def sort_digits(layers: int, width: int) -> list[Row]:
    """Returns the rows of a model of sort digits, which is trained if it does not exist yet."""
    directory = TINY / f"{layers}_layers_{width}_wide"
    if not directory.exists():
        # The noise does not depend on the accuracy, so training ends when answers are likely.
        example = Example(
            layers=layers, hidden_size=width, accuracy=(0.0, 1.0), sampled_accuracy=0.0
        )
        prepare(directory, example=example)
    return measure(
        "sort_digits", directory / "checkpoint", directory / "eval.jsonl", count=128, length=11
    )


def smollm2() -> list[Row]:
    """Returns the rows of SmolLM2."""
    return measure(
        "smollm2", SMOLLM2, SMOLLM2_PROMPTS, count=40, length=32, apply_chat_template=True
    )


def measure(
    name: str,
    checkpoint: Path,
    prompt_file: Path,
    *,
    count: int,
    length: int,
    apply_chat_template: bool = False,
) -> list[Row]:
    """Returns the rows of one model.

    Args:
        name: Of the model, in the table.
        checkpoint: Hugging Face directory.
        prompt_file: JSONL with the key `prompt`.
        count: Number of prompts, one answer each.
        length: Largest length of an answer, tokens.
        apply_chat_template: Whether the prompts are messages.
    """
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    prompts = load_prompts(
        prompt_file, tokenizer, input_key="prompt", apply_chat_template=apply_chat_template
    )
    ids = [torch.tensor(prompt.token_ids) for prompt in prompts[:count]]
    model = load_model(str(checkpoint))
    rows = []
    for rollout, hypothesis in ROLLOUT.items():
        torch.manual_seed(0)
        has_fp8_cache = rollout == "fp8 KV cache"
        with precision(model, hypothesis):
            samples = answered(model, ids, length, fp8_cache=has_fp8_cache)
        for training, scoring in TRAINING.items():
            with precision(model, scoring):
                log_probs = scored(model, samples)
            row = compared(samples, log_probs)
            rows.append(
                Row(
                    model=name,
                    layers=model.config.num_hidden_layers,
                    width=model.config.hidden_size,
                    training=training,
                    rollout=rollout,
                    samples=len(samples),
                    date=datetime.date.today().isoformat(),
                    machine=f"{os.cpu_count()} cores of {machine()}",
                    versions=versions(),
                    **row,
                )
            )
            print(rows[-1], flush=True)
    return rows


def precision(model: Any, hypothesis: str) -> AbstractContextManager[None]:
    """Returns a context in which the model computes in the precision of a hypothesis."""
    network = None
    if hypothesis in NETWORK:
        network = NETWORK[hypothesis].network
    if network is None:
        return nullcontext()
    return network(model, 0.0)


@torch.inference_mode()
def answered(
    model: Any, prompts: Sequence[Tensor], length: int, *, fp8_cache: bool
) -> list[Sampled]:
    """Returns one answer of each prompt, sampled token by token at temperature 1."""
    samples = []
    for group in by_length(prompts):
        options: dict[str, Any] = {}
        if fp8_cache:
            options["past_key_values"] = _fp8_cache()
        batch = torch.stack(group)
        output = model.generate(
            batch,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=length,
            return_dict_in_generate=True,
            output_logits=True,
            pad_token_id=0,
            **options,
        )
        logits = torch.stack(output.logits, 1).float()
        responses = output.sequences[:, batch.shape[1] :]
        log_probs = logits.log_softmax(-1).gather(2, responses[..., None])[..., 0]
        ends = model.generation_config.eos_token_id
        for prompt, response, row in zip(group, responses, log_probs, strict=True):
            size = _length(response, ends)
            samples.append(Sampled(prompt=prompt, response=response[:size], log_probs=row[:size]))
    return samples


def _fp8_cache() -> Any:
    """Returns an empty cache that stores keys and values in fp8."""
    from slime_tis.analysis.diagnosis.hypotheses.hypothesis import Input

    sample = Input(tokens=torch.zeros(1), response=1, positions=torch.zeros(1))
    edit = PROMPTS["fp8 KV cache"].inputs
    assert edit is not None
    return edit(sample, 0.0, []).cache()


def _length(response: Tensor, ends: Any) -> int:
    """Returns the number of tokens up to and including the first end token."""
    tokens = [ends]
    if isinstance(ends, list):
        tokens = ends
    found = torch.isin(response, torch.tensor(tokens)).nonzero()
    if len(found):
        return int(found[0, 0]) + 1
    return len(response)


def by_length(prompts: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yields batches of prompts of equal length, so that no padding is needed."""
    groups: dict[int, list[Tensor]] = {}
    for prompt in prompts:
        groups.setdefault(len(prompt), []).append(prompt)
    for group in groups.values():
        for start in range(0, len(group), BATCH):
            yield group[start : start + BATCH]


@torch.inference_mode()
def scored(model: Any, samples: Sequence[Sampled]) -> list[Tensor]:
    """Returns the log-probs [T] of all answers, one forward pass each."""
    rows = []
    for sample in samples:
        ids = torch.cat([sample.prompt, sample.response])
        size = len(sample.response)
        logits = model(ids[None], logits_to_keep=size + 1).logits[0, :-1].float()
        rows.append(logits.log_softmax(-1).gather(1, sample.response[:, None])[:, 0])
    return rows


def compared(samples: Sequence[Sampled], log_probs: Sequence[Tensor]) -> dict[str, Any]:
    """Returns tokens, mean abs(Δ), noise with its interval, and k3."""
    lengths = [len(sample.response) for sample in samples]
    rollout = torch.cat([sample.log_probs for sample in samples]).double().numpy()
    tokens = Tokens(
        train=torch.cat(list(log_probs)).double().numpy(),
        rollout=rollout,
        sample=np.repeat(np.arange(len(samples)), lengths),
        position=np.concatenate([np.arange(length) for length in lengths]),
        entropy=None,
        workers=(),
        has_experts=False,
        precisions=("", ""),
    )
    delta = tokens.log_ratio
    size = np.bincount(tokens.sample, np.abs(delta))
    uncertainty = np.bincount(tokens.sample, tokens.uncertainty)
    draws = np.random.default_rng(0).integers(0, len(size), (4000, len(size)))
    drawn = size[draws].sum(1) / uncertainty[draws].sum(1)
    low, high = np.quantile(drawn, (0.025, 0.975)).tolist()
    return {
        "tokens": len(tokens),
        "mean_abs": float(np.abs(delta).mean()),
        "noise": tokens.noise,
        "noise_low": low,
        "noise_high": high,
        "k3": float((np.expm1(delta) - delta).mean()),
    }


if __name__ == "__main__":
    main()
