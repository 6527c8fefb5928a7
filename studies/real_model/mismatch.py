"""Measures the mismatch by precision on a pretrained model, with intervals over samples.

Writes mismatch.csv.

    python -m studies.real_model.mismatch    # after `make data-smollm2`; some minutes on one core

An engine of each precision answers the same held-out prompts once each. Training in fp32, fp16 or
bf16, with the same weights, then computes the log-probs of these answers. The intervals are
percentiles of a bootstrap over the answers, which are independent of each other (Efron, "Bootstrap
Methods: Another Look at the Jackknife", Ann. Statist. 7(1), 1979).
"""

import argparse
import datetime
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.provenance import machine
from examples.tables import read_rows, write_rows
from slime_tis.trainer.configs.megatron import MegatronConfig
from slime_tis.trainer.data.prompts import load_prompts
from slime_tis.trainer.data.sample import Prompt, Sample, Sampling
from slime_tis.trainer.engines.local.load_model import load_tokenizer
from slime_tis.trainer.engines.local.local_engine import LocalEngine
from slime_tis.trainer.engines.weight_rounding import Precision
from slime_tis.trainer.megatron.batch import fixed_partition
from slime_tis.trainer.megatron.parallel import initialize, shut_down
from slime_tis.trainer.megatron.training_engine import TrainingEngine
from slime_tis.trainer.step_inputs import training_batch
from studies.collapse.report import replace_table
from studies.collapse.run import versions

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "mismatch.csv"
PAGE = HERE / "README.md"
CHECKPOINT, PROMPTS = Path("data/smollm2/checkpoint"), Path("data/smollm2/study_prompts/eval.jsonl")
PRECISIONS: tuple[tuple[Precision, tuple[Precision, ...]], ...] = (
    ("fp32", ("fp32", "fp16", "bf16", "int8", "fp8")),
    ("fp16", ("fp16",)),
    ("bf16", ("fp16", "bf16", "fp8")),
)
"""Of training, and of the rollout engines that it is compared with."""
RESPONSE = 24  # tokens, at most
PER_PASS = 16  # samples in a micro-batch
RESAMPLES = 4000
INTERVAL = (0.025, 0.975)


@dataclass(frozen=True, kw_only=True)
class Row:
    """The mismatch of an engine's samples; low and high are the ends of the 95 % interval."""

    training: str
    rollout: str
    samples: int
    tokens: int
    k3: float
    """Mean of ρ − 1 − log ρ over tokens, ρ = π_train/π_rollout."""
    k3_low: float
    k3_high: float
    chi2: float
    """Mean of ρ² − 1 over tokens."""
    chi2_low: float
    chi2_high: float
    largest: float
    """Largest ρ."""
    largest_low: float
    largest_high: float
    date: str
    machine: str
    versions: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--hf-checkpoint", type=Path, default=CHECKPOINT, help=f"policy (default {CHECKPOINT})"
    )
    parser.add_argument(
        "--prompts", type=Path, default=PROMPTS, help=f"rows with a chat prompt (default {PROMPTS})"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="table to write")
    parser.add_argument(
        "--draw", action="store_true", help=f"write the table of {PAGE.name} from the results alone"
    )
    options = parser.parse_args()
    if options.draw:
        print(replace_table(PAGE, "mismatch", table(read_rows(options.results, Row))))
        return
    rows = measure(options.hf_checkpoint, options.prompts)
    write_rows(options.results, Row, rows)
    print(f"{table(rows)}\n\n{options.results}")


def measure(
    checkpoint: Path, prompts: Path, *, apply_chat_template: bool = True, response: int = RESPONSE
) -> list[Row]:
    """The rows of every pair of precisions.

    Args:
        checkpoint: Hugging Face directory.
        prompts: JSONL file with the key `prompt`.
        apply_chat_template: whether the prompts are messages.
        response: tokens of an answer, at most.
    """
    tokenizer = load_tokenizer(checkpoint)
    loaded = load_prompts(
        prompts, tokenizer, input_key="prompt", apply_chat_template=apply_chat_template
    )
    answers: dict[Precision, list[Sample]] = {}
    for precision in PRECISIONS[0][1]:
        answers[precision] = answered(
            LocalEngine(checkpoint, tokenizer, precision=precision), loaded, response
        )
    configs = [
        MegatronConfig(
            hf_checkpoint=str(checkpoint), fp16=training == "fp16", bf16=training == "bf16"
        )
        for training, _ in PRECISIONS
    ]
    parallel = initialize(configs[0])
    rows = []
    try:
        for config, (name, rollouts) in zip(configs, PRECISIONS, strict=True):
            training = TrainingEngine(config, parallel, temperature=1.0, total_steps=1)
            rows += [
                compare(training, answers[rollout], training=name, rollout=rollout)
                for rollout in rollouts
            ]
    finally:
        shut_down()
    return rows


def answered(engine: LocalEngine, prompts: Sequence[Prompt], response: int) -> list[Sample]:
    """One sample of each prompt."""
    groups = engine.generate(list(prompts), Sampling(max_response_len=response), 0)
    engine.close()
    return [sample for group in groups for sample in group]


def compare(engine: TrainingEngine, samples: list[Sample], *, training: str, rollout: str) -> Row:
    """The row of one pair of precisions.

    Args:
        engine: the policy that is trained.
        samples: of the rollout engine.
        training: precision of the policy.
        rollout: precision of the rollout engine.
    """
    batch = training_batch(samples, engine.parallel)
    train_L = engine.log_probs(batch, fixed_partition(len(batch), PER_PASS)).double()
    log_ratios = (train_L - batch.responses.rollout_log_probs_L.double()).split(
        list(batch.responses.lengths)
    )
    found: dict[str, float] = {}
    for name, (value, low, high) in zip(
        ("k3", "chi2", "largest"), estimates(log_ratios), strict=True
    ):
        found |= {name: value, f"{name}_low": low, f"{name}_high": high}
    return Row(
        training=training,
        rollout=rollout,
        samples=len(samples),
        tokens=len(train_L),
        **found,
        date=datetime.date.today().isoformat(),
        machine=f"{os.cpu_count()} cores of {machine()}",
        versions=versions(),
    )


def estimates(
    log_ratios: Sequence[Tensor], resamples: int = RESAMPLES
) -> Iterator[tuple[float, float, float]]:
    """k3, χ² and the largest ratio, each with the ends of its 95 % interval over responses.

    The upper end of the largest ratio's interval is the largest one that was seen: no bootstrap
    goes beyond its sample.

    Args:
        log_ratios: of each response, [tokens] float64, log π_train − log π_rollout.
        resamples: of the bootstrap.
    """
    count_S = torch.tensor([len(one) for one in log_ratios], dtype=torch.float64)
    k3_S = torch.stack([(one.expm1() - one).sum() for one in log_ratios])
    chi2_S = torch.stack([(2 * one).expm1().sum() for one in log_ratios])
    largest_S = torch.stack([one.max().exp() for one in log_ratios])
    drawn = torch.randint(
        len(count_S), (resamples, len(count_S)), generator=torch.Generator().manual_seed(0)
    )
    ends = torch.tensor(INTERVAL, dtype=torch.float64)
    for sum_S in (k3_S, chi2_S):
        resampled = sum_S[drawn].sum(1) / count_S[drawn].sum(1)
        yield float(sum_S.sum() / count_S.sum()), *resampled.quantile(ends).tolist()
    yield float(largest_S.max()), *largest_S[drawn].amax(1).quantile(ends).tolist()


def table(rows: Iterable[Row]) -> str:
    """The Markdown table of README.md."""
    lines = [
        "| training | rollout | tokens | k3 KL | χ² per token | largest weight |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        columns = [
            f"{value:.2g} [{low:.2g}, {high:.2g}]"
            for value, low, high in (
                (row.k3, row.k3_low, row.k3_high),
                (row.chi2, row.chi2_low, row.chi2_high),
            )
        ]
        columns.append(f"{row.largest:.2f} [{row.largest_low:.2f}, {row.largest_high:.2f}]")
        lines.append(f"| {row.training} | {row.rollout} | {row.tokens} | {' | '.join(columns)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
