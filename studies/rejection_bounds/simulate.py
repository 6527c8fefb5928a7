"""Simulates rejection of healthy and broken sequences by fixed bounds, z-score and target share.

    python -m studies.rejection_bounds.simulate

prints the two tables of README.md in about a minute. A batch is 256 responses of one length, whose
log-ratios are noise of a given standard deviation with E[exp Δ] = 1, as under sampling by the
rollout policy. Eight of them are broken: four have 0.1 nats too much at every token (another
temperature, other weights), four have one token of −5 nats (a kernel that fails, a token that was
retokenised).
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime_tis import RolloutCorrectionConfig, correct

LENGTHS = (12, 64, 300, 3000)
DEVIATIONS = (0.005, 0.01, 0.02, 0.05, 0.1)
SEQUENCES, BROKEN = 256, 4
OFFSET, TOKEN = 0.1, -5.0
RULES = {
    "±0.1 %": {"rs_lower_bound": 0.999, "rs_upper_bound": 1.001},
    "±5 %": {"rs_lower_bound": 0.95, "rs_upper_bound": 1.05},
    "`--rs-z-score 3`": {"rs_z_score": 3.0},
    "`--rs-target-fraction 0.05`": {"rs_target_fraction": 0.05},
}
NOISE = {
    "every token": (1.0, 1.0),
    "a tenth of the tokens": (0.1, 1.0),
    "a tenth of the sequences": (1.0, 0.1),
}
"""Shares of tokens and sequences that carry all of the noise: of most tokens of a language model
both engines are certain, and once it has learnt a task, of most answers."""


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Shares of the sequences of one kind that a rule rejects."""

    healthy: float
    offset: float
    token: float

    def __str__(self) -> str:
        return " · ".join(_percent(share) for share in (self.healthy, self.offset, self.token))


def log_ratios(
    length: int, deviation: float, noise: tuple[float, float], generator: torch.Generator
) -> Tensor:
    """Returns Δ of healthy sequences, [256, length]: normal with mean −σ²/2."""
    tokens, sequences = noise
    options: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    noisy = torch.rand(SEQUENCES, length, **options) < tokens
    noisy &= torch.rand(SEQUENCES, 1, **options) < sequences
    share = tokens * sequences
    sigma = deviation * torch.where(noisy, 1.0, 0.1) / (share + 0.01 * (1 - share)) ** 0.5
    return sigma * torch.randn(SEQUENCES, length, **options) - sigma**2 / 2


def broken(healthy_ST: Tensor) -> Tensor:
    """The same batch with four sequences off by a constant, and four with one token far off."""
    delta_ST = healthy_ST.clone()
    delta_ST[:BROKEN] += OFFSET
    delta_ST[BROKEN : 2 * BROKEN, healthy_ST.shape[1] // 2] = TOKEN
    return delta_ST


def rejected(options: dict[str, float], delta_ST: Tensor) -> Tensor:
    """1.0 for each sequence that the rule rejects, float64 [256]."""
    config = RolloutCorrectionConfig(use_rs=True, rs_level="geometric", **options)  # type: ignore[arg-type]
    found = correct(config, delta_ST, torch.zeros_like(delta_ST), torch.ones_like(delta_ST))
    return (found.accepted_per_sequence == 0).double()


def shares(options: dict[str, float], length: int, deviation: float, batches: int) -> Shares:
    """What a rule rejects, averaged over batches."""
    generator = torch.Generator().manual_seed(0)
    total_S = torch.zeros(SEQUENCES, dtype=torch.float64)
    for _ in range(batches):
        healthy_ST = log_ratios(length, deviation, NOISE["every token"], generator)
        total_S += rejected(options, broken(healthy_ST))
    mean_S = total_S / batches
    return Shares(
        healthy=mean_S[2 * BROKEN :].mean().item(),
        offset=mean_S[:BROKEN].mean().item(),
        token=mean_S[BROKEN : 2 * BROKEN].mean().item(),
    )


def estimates(
    length: int, deviation: float, noise: tuple[float, float], batches: int
) -> dict[str, float]:
    """Returns k3 of the batch over σ²/2, by three estimators, with and without a token of +20 nats.

    Also, as "healthy rejected", the share of the sequences that 3 deviations by the clamped mean
    reject without it.
    """
    generator = torch.Generator().manual_seed(0)
    config = RolloutCorrectionConfig(use_rs=True, rs_level="geometric", rs_z_score=3.0)
    sums: dict[str, float] = {}
    for _ in range(batches):
        healthy_ST = log_ratios(length, deviation, noise, generator)
        spoiled_ST = healthy_ST.clone()
        spoiled_ST[0, 0] = 20.0
        for suffix, delta_ST in (("", healthy_ST), (", +20 nats", spoiled_ST)):
            found = correct(config, delta_ST, torch.zeros_like(delta_ST), torch.ones_like(delta_ST))
            bounds = found.global_batch.adaptive_bounds
            assert bounds is not None
            mean_S = (delta_ST.exp() - 1 - delta_ST).mean(1)
            for name, k3 in (
                ("mean", found.statistics.metrics()["mismatch_k3_kl"]),
                ("median of sequences", mean_S.median().item()),
                ("clamped mean", bounds.k3.item()),
            ):
                sums[name + suffix] = (
                    sums.get(name + suffix, 0.0) + k3 / (deviation**2 / 2) / batches
                )
        lost = rejected({"rs_z_score": 3.0}, healthy_ST).mean().item()
        sums["healthy rejected"] = sums.get("healthy rejected", 0.0) + lost / batches
    return sums


def tables(batches: int) -> Iterator[str]:
    """The lines of the two Markdown tables."""
    yield f"| tokens | σ of a token | {' | '.join(RULES)} |"
    yield "|---" * (2 + len(RULES)) + "|"
    for length in LENGTHS:
        for deviation in DEVIATIONS:
            cells = [str(shares(options, length, deviation, batches)) for options in RULES.values()]
            yield f"| {length} | {deviation} | {' | '.join(cells)} |"
    yield ""
    names = (
        "mean",
        "mean, +20 nats",
        "median of sequences",
        "clamped mean",
        "clamped mean, +20 nats",
    )
    yield f"| noise at | tokens | {' | '.join(names)} | healthy rejected by 3σ |"
    yield "|---" * (3 + len(names)) + "|"
    for title, noise in NOISE.items():
        for length in LENGTHS:
            found = estimates(length, 0.05, noise, batches)
            cells = [
                f"{found[name]:.2g}" if found[name] > 100 else f"{found[name]:.2f}"
                for name in names
            ]
            yield (
                f"| {title} | {length} | {' | '.join(cells)} |"
                f" {100 * found['healthy rejected']:.1f} % |"
            )


def _percent(share: float) -> str:
    if 0 < share < 0.0005:
        return "<0.1"
    return f"{100 * share:.1f}" if 0 < share < 0.0995 else f"{100 * share:.0f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--batches", type=int, default=20, help="batches of 256 sequences for each cell (20)"
    )
    for line in tables(parser.parse_args().batches):
        print(line, flush=True)
