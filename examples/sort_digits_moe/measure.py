"""Measures what routing replay leaves of the mismatch, by the precision of the rollout engine; writes mismatch.csv.

    python -m examples.sort_digits_moe.measure    # data/sort_digits_moe, some minutes on one core

An engine of each precision answers the held-out prompts, and records its experts and their weights. Training in
fp32, with the same weights, then computes the log-probs of these answers: with experts of its own choice, with the
engine's experts, and with the engine's experts and their weights. All of the difference is the engine's rounding: no
weight is stale.
"""

import argparse
import datetime
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from examples.collapse_study.run import processor, versions
from examples.tables import write_rows
from slime_tis.learner import training_batch
from slime_tis.megatron.batch import TrainingBatch, fixed_partition
from slime_tis.megatron.config import MegatronConfig
from slime_tis.megatron.engine import TrainingEngine
from slime_tis.megatron.parallel import initialize, shut_down
from slime_tis.policy.replay_mismatch import mismatch, mismatch_metrics
from slime_tis.rollout.checkpoint import load_tokenizer
from slime_tis.rollout.local import LocalEngine
from slime_tis.rollout.prompts import load_prompts
from slime_tis.rollout.sample import Sample, Sampling

HERE = Path(__file__).resolve().parent
DATA, RESULTS = Path("data/sort_digits_moe"), HERE / "mismatch.csv"
ENGINES: dict[str, tuple[str, int | None]] = {
    "fp32": ("fp32", None),
    "bf16": ("bf16", None),
    "int8": ("int8", None),
    "fp8": ("fp8", None),
    "fp32, routers of 4 bits": ("fp32", 4),
    "fp8, routers of 4 bits": ("fp8", 4),
}
"""--rollout-precision and --rollout-router-bits."""
REPLAYS = ("nothing", "experts", "experts and weights")
SAMPLES = 8  # per prompt
RESPONSE = 12  # tokens, at most
PER_PASS = 256  # samples in a micro-batch


@dataclass(frozen=True, kw_only=True)
class Row:
    """The mismatch of an engine's samples under one kind of replay."""

    engine: str
    replayed: str
    tokens: int
    """Of the responses, which the metrics are means over."""
    other_experts: float
    """Share of the tokens of prompts and responses for which a layer chooses another set of experts, without replay."""
    abs_diff: float
    """Mean absolute difference of log-probs, nats."""
    k3: float
    """Mean of exp(Δ) − Δ − 1 over tokens."""
    smallest: float
    """Smallest ratio π_train/π_rollout of a token."""
    largest: float
    """Largest of them."""
    date: str
    machine: str
    versions: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA, help=f"what prepare.py made (default {DATA})")
    parser.add_argument(
        "--hf-checkpoint", type=Path, help="another policy than data's own, such as one that was trained"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="table to write")
    options = parser.parse_args()
    rows = measure(options.data, options.hf_checkpoint or options.data / "checkpoint")
    write_rows(options.results, Row, rows)
    print(f"{table(rows)}\n\n{options.results}")


def measure(data: Path, checkpoint: Path, samples: int = SAMPLES) -> list[Row]:
    """The rows of every engine.

    Args:
        data: directory with eval.jsonl.
        checkpoint: Hugging Face directory of a mixture of experts.
        samples: per prompt.
    """
    tokenizer = load_tokenizer(checkpoint)
    prompts = load_prompts(data / "eval.jsonl", tokenizer, input_key="prompt", label_key="label")
    sampling = Sampling(
        max_response_len=RESPONSE, n_samples=samples, return_routed_experts=True, return_routing_weights=True
    )
    config = MegatronConfig(hf_checkpoint=str(checkpoint))
    parallel = initialize(config)
    rows = []
    try:
        training = TrainingEngine(config, parallel, temperature=1.0, total_steps=1, keep_reference=False)
        for name, (precision, bits) in ENGINES.items():
            engine = LocalEngine(checkpoint, tokenizer, precision=precision, router_bits=bits)
            found = [sample for group in engine.generate(prompts, sampling, 0) for sample in group]
            rows += list(compare(name, found, training))
    finally:
        shut_down()
    return rows


def compare(name: str, samples: list[Sample], training: TrainingEngine) -> Iterator[Row]:
    """One row per kind of replay.

    Args:
        name: of the engine that the samples come from.
        samples: with experts and weights.
        training: the policy in fp32.
    """
    plain = training_batch(samples, training.parallel)
    experts = [sample.routed_experts for sample in samples]
    replayed = plain.with_routing(experts, None)
    with_weights = plain.with_routing(experts, [sample.routing_weights for sample in samples])
    other_experts = None
    for replay, batch in zip(REPLAYS, (replayed, replayed, with_weights), strict=True):
        own_choice = other_experts is None  # the first pass: routers choose, and are compared with what is recorded
        metrics = mismatch_of(batch, training, replays_routing=not own_choice)
        if own_choice:
            other_experts = training.routing.metrics()["routing_difference"]
        yield Row(
            engine=name,
            replayed=replay,
            tokens=sum(plain.responses.lengths),
            other_experts=other_experts,
            abs_diff=metrics["train_rollout_logprob_abs_diff"],
            k3=metrics["mismatch_k3_kl"],
            smallest=metrics["ratio_min"],
            largest=metrics["ratio_max"],
            date=datetime.date.today().isoformat(),
            machine=f"{os.cpu_count()} cores of {processor()}",
            versions=versions(),
        )


def mismatch_of(batch: TrainingBatch, training: TrainingEngine, *, replays_routing: bool) -> dict[str, float]:
    """The metrics of the training policy's log-probs against the engine's."""
    partition = fixed_partition(len(batch), PER_PASS)
    log_probs_L = training.log_probs(batch, partition, replays_routing=replays_routing, counts_routing=True)
    return mismatch_metrics(mismatch(batch.responses, log_probs_L, training.parallel.ranks))


def table(rows: Iterable[Row]) -> str:
    """The Markdown table of docs/moe.md: without replay → experts → experts and weights."""
    by_engine: dict[str, list[Row]] = {}
    for row in rows:
        by_engine.setdefault(row.engine, []).append(row)
    lines = [
        "| rollout engine | other experts | mean abs Δ | k3 KL | smallest ratio | largest ratio |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in by_engine.items():
        columns = [
            " → ".join(f"{value:.1e}" for value in values)
            for values in ([row.abs_diff for row in found], [row.k3 for row in found])
        ]
        columns += [
            " → ".join(f"{value:.3g}" for value in values)
            for values in ([row.smallest for row in found], [row.largest for row in found])
        ]
        lines.append(f"| {name} | {found[0].other_experts:.2%} | {' | '.join(columns)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
