"""Measures the mismatch that remains with routing replay, by the engine's precision.

Writes mismatch.csv.

    python -m examples.sort_digits_moe.measure data/sort_digits_moe ...    # two minutes per policy

An engine of each precision answers the held-out prompts, and records its experts and their weights.
Training in fp32, with the same weights, then computes the log-probs of these answers: with its own
choice of experts, with the engine's experts, and with the engine's experts and their weights. All
of the difference is the engine's rounding: no weight is stale. Engines that round a part of the
weights alone show what the rest of the mismatch comes from.
"""

import argparse
import datetime
import os
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from benchmarks.provenance import machine
from examples.tables import write_rows
from slime_tis.policy.step_sums import mismatch, mismatch_metrics
from slime_tis.trainer.configs.megatron import MegatronConfig
from slime_tis.trainer.data.prompts import load_prompts
from slime_tis.trainer.data.sample import Sample, Sampling
from slime_tis.trainer.engines.local.load_model import load_tokenizer
from slime_tis.trainer.engines.local.local_engine import LocalEngine
from slime_tis.trainer.engines.weight_rounding import round_fp8
from slime_tis.trainer.megatron.batch import TrainingBatch, fixed_partition
from slime_tis.trainer.megatron.parallel import initialize, shut_down
from slime_tis.trainer.megatron.training_engine import TrainingEngine
from slime_tis.trainer.step_inputs import training_batch
from studies.collapse.run import versions

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
PARTS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[str, ...]]] = {
    "bf16 weights, computed in fp32": (lambda weight: weight.bfloat16().float(), ("",)),
    "fp8 experts": (round_fp8, (".mlp.experts.",)),
    "fp8 attention": (round_fp8, tuple(f".self_attn.{name}_proj." for name in "qkvo")),
}
"""Engines in fp32 with a part of the weights rounded: how, and what the names of these have in
them."""
REPLAYS = ("nothing", "experts", "experts and weights")
SAMPLES = 8  # per prompt
RESPONSE = 12  # tokens, at most
PER_PASS = 256  # samples in a micro-batch


@dataclass(frozen=True, kw_only=True)
class Row:
    """The mismatch of an engine's samples under one kind of replay."""

    policy: str
    """Directory of the checkpoint."""
    engine: str
    replayed: str
    tokens: int
    """Of the responses, which the metrics are means over."""
    other_experts: float
    """Share of the tokens of prompts and responses for which a layer chooses another set of
    experts, without replay."""
    abs_diff: float
    """Mean absolute difference of log-probs, nats."""
    k3: float
    """Mean of exp(Δ) − Δ − 1 over tokens."""
    ten_tokens: float
    """Share of it that the ten tokens with the most have."""
    smallest: float
    """Smallest ratio π_train/π_rollout of a token."""
    largest: float
    """Largest of them."""
    date: str
    machine: str
    versions: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "data", type=Path, nargs="*", default=[DATA], help=f"what prepare.py made (default {DATA})"
    )
    parser.add_argument(
        "--hf-checkpoint",
        type=Path,
        help="another policy than the data's own, such as one that was trained",
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="table to write")
    options = parser.parse_args()
    rows = [
        row
        for data in options.data
        for row in measure(data, options.hf_checkpoint or data / "checkpoint")
    ]
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
        max_response_len=RESPONSE,
        n_samples=samples,
        return_routed_experts=True,
        return_routing_weights=True,
    )
    config = MegatronConfig(hf_checkpoint=str(checkpoint))
    parallel = initialize(config)
    rows = []
    try:
        training = TrainingEngine(
            config, parallel, temperature=1.0, total_steps=1, keep_reference=False
        )
        for name in (*ENGINES, *PARTS):
            precision, bits = ENGINES.get(name, ("fp32", None))
            settings: dict[str, Any] = {"precision": precision, "router_bits": bits}
            engine = LocalEngine(checkpoint, tokenizer, **settings)
            if name in PARTS:
                engine.update_weights(partial(partly_rounded, checkpoint, *PARTS[name]), 0)
            found = [sample for group in engine.generate(prompts, sampling, 0) for sample in group]
            rows += list(compare(str(checkpoint), name, found, training))
    finally:
        shut_down()
    return rows


def partly_rounded(
    checkpoint: Path, rounding: Callable[[Tensor], Tensor], parts: tuple[str, ...]
) -> Iterator[tuple[str, Tensor]]:
    """The weights of a checkpoint; those with one of `parts` in their names are rounded."""
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        yield name, rounding(weight) if any(part in name for part in parts) else weight


def compare(
    policy: str, name: str, samples: list[Sample], training: TrainingEngine
) -> Iterator[Row]:
    """One row per kind of replay.

    Args:
        policy: directory of the checkpoint.
        name: of the engine that the samples come from.
        samples: with experts and weights.
        training: the policy in fp32.
    """
    plain = training_batch(samples, training.parallel)
    experts = [sample.rollout_routed_experts for sample in samples]
    replayed = plain.with_routing(experts, None)
    with_weights = plain.with_routing(
        experts, [sample.rollout_routing_weights for sample in samples]
    )
    other_experts = None
    for replay, batch in zip(REPLAYS, (replayed, replayed, with_weights), strict=True):
        own_choice = (
            other_experts is None
        )  # the first pass: routers choose, and are compared with what is recorded
        metrics = mismatch_of(batch, training, replays_routing=not own_choice)
        if own_choice:
            other_experts = training.routing.metrics()["routing_difference"]
        assert other_experts is not None
        yield Row(
            policy=policy,
            engine=name,
            replayed=replay,
            tokens=sum(plain.responses.lengths),
            other_experts=other_experts,
            abs_diff=metrics["train_rollout_logprob_abs_diff"],
            k3=metrics["mismatch_k3_kl"],
            ten_tokens=metrics["ten_tokens"],
            smallest=metrics["ratio_min"],
            largest=metrics["ratio_max"],
            date=datetime.date.today().isoformat(),
            machine=f"{os.cpu_count()} cores of {machine()}",
            versions=versions(),
        )


def mismatch_of(
    batch: TrainingBatch, training: TrainingEngine, *, replays_routing: bool
) -> dict[str, float]:
    """Returns the mismatch metrics of training and engine, and the share of ten tokens in k3."""
    partition = fixed_partition(len(batch), PER_PASS)
    log_probs_L = training.log_probs(batch, partition, replays_routing=replays_routing)
    delta_L = (log_probs_L - batch.responses.rollout_log_probs_L).double()
    k3_L = delta_L.expm1() - delta_L
    metrics = mismatch_metrics(mismatch(batch.responses, log_probs_L, training.parallel.ranks))
    return metrics | {"ten_tokens": float(k3_L.topk(10).values.sum() / k3_L.sum().clamp_min(1e-30))}


def table(rows: Iterable[Row]) -> str:
    """Returns the Markdown table of README.md: without replay → experts → experts and weights.

    Values are medians over the policies; smallest and largest ratios are over all policies.
    """
    lines = [
        (
            "| rollout engine | other experts | mean abs Δ | k3 KL | k3 lower by | smallest ratio |"
            " largest ratio |"
        ),
        "|---|---|---|---|---|---|---|",
    ]
    rows = list(rows)
    for name in dict.fromkeys(row.engine for row in rows):
        plain, *replays = (
            [row for row in rows if (row.engine, row.replayed) == (name, kind)] for kind in REPLAYS
        )
        kinds = (plain, *replays)
        columns = [
            f"{statistics.median(row.other_experts for row in plain):.1%}",
            " → ".join(f"{statistics.median(row.abs_diff for row in kind):.1e}" for kind in kinds),
            " → ".join(f"{statistics.median(row.k3 for row in kind):.1e}" for kind in kinds),
            ", ".join(
                lower_by(without, with_experts)
                for without, with_experts in zip(plain, replays[0], strict=True)
            ),
            " → ".join(f"{min(row.smallest for row in kind):.3g}" for kind in kinds),
            " → ".join(f"{max(row.largest for row in kind):.3g}" for kind in kinds),
        ]
        lines.append(f"| {name} | {' | '.join(columns)} |")
    return "\n".join(lines)


def lower_by(without: Row, replayed: Row) -> str:
    """How many times lower k3 is with replay; a dash where there is no mismatch of routing."""
    factor = without.k3 / replayed.k3
    return (
        "–" if not without.other_experts else f"{factor:.0f}" if factor >= 10 else f"{factor:.1f}"
    )


if __name__ == "__main__":
    main()
