"""How far can a diagnosis reach from a dump only?

A classifier reads statistics of the second generator's faults.

    python -m studies.diagnosis.reach --seeds 6 7 8 9

Faults of the network or its input that the rollout engine reports honestly have no certain sign. A
linear discriminant on twelve statistics tells their four classes (prompt, position, precision,
weights). It is trained on the other seeds of the same generator, which is more than a user has.
Faults without a class are among the named ones unless it abstains below a margin.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import torch

from slime_tis.analysis.diagnosis.engine_rules import share_of_largest_tenth
from slime_tis.analysis.diagnosis.trained_tokens import Tokens, tokens_of
from slime_tis.analysis.dumps.files import parquet_tables
from slime_tis.analysis.dumps.table import TokenTable
from studies.diagnosis import second

CLASSES: dict[str, tuple[str, ...]] = {
    "prompt": (
        "BOS dropped",
        "two prompt tokens added",
        "last prompt token missing",
        "prompt cut from the left",
        "pads attended",
        "older prompt cache",
    ),
    "position": ("rope_theta", "linear rope scaling", "attention window"),
    "precision": (
        "norm epsilon",
        "bf16 weights",
        "fp8 weights",
        "int8 weights",
        "int4 weights",
        "fp8 cache",
        "dropout",
    ),
    "weights": ("older weights", "one older tensor"),
}
WITHOUT_CLASS = (
    "two heads exchanged",
    "gelu instead of silu",
    "first layer skipped",
    "output layer in int4",
    "attention scale",
    "residual branch at 0.9",
    "norm weight reset",
    "adapter unknown to training",
)
OTHERS, MODELLED, ALL = 17, 35, 63
"""Faults per seed with a hypothesis and a certain sign, all with a hypothesis, and all faulty
dumps."""
RIDGE = 0.3
"""Share of the identity in the covariance of the statistics."""


def statistics(tokens: Tokens) -> list[float]:
    """Size, tail, sign, dependence on uncertainty, position, sample, neighbor and token id of Δ."""
    delta, uncertainty = tokens.log_ratio, tokens.uncertainty
    size, relative = np.abs(delta), np.abs(delta) / uncertainty
    surprise = tokens.train + (0 if tokens.entropy is None else tokens.entropy)
    slope = float((surprise * delta).sum() / (surprise**2).sum())
    thirds = [
        np.median(relative[part])
        for part in np.array_split(np.argsort(tokens.position, kind="stable"), 3)
    ]
    same = np.diff(tokens.sample) == 0
    by_sample = np.bincount(tokens.sample, size) / np.maximum(
        np.bincount(tokens.sample, uncertainty), 1e-9
    )
    assert tokens.token is not None
    ids, counts = np.unique(tokens.token, return_counts=True)
    of_id = [delta[tokens.token == i].mean() for i in ids[counts > 9]]
    logs = np.log(
        [np.median(relative), size.mean(), np.quantile(relative, 0.99), thirds[0], thirds[2]]
    )
    return [
        *logs.tolist(),
        share_of_largest_tenth(relative),
        float(delta.sum() / size.sum()),
        slope / float(size.mean()),
        float(np.corrcoef(np.log(size + 1e-9), np.log(uncertainty))[0, 1]),
        float(np.corrcoef(delta[1:][same], delta[:-1][same])[0, 1]),
        float(by_sample.std() / by_sample.mean()),
        float(np.std(of_id) / size.mean()),
    ]


def discriminant(
    train: np.ndarray, labels: np.ndarray, test: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns class and margin of every test row: the nearest mean under the covariance."""
    center, scale = train.mean(0), train.std(0) + 1e-9
    train, test = (train - center) / scale, (test - center) / scale
    names = np.unique(labels)
    means = np.stack([train[labels == name].mean(0) for name in names])
    rest = train - means[np.searchsorted(names, labels)]
    inverse = np.linalg.inv((1 - RIDGE) * np.cov(rest.T) + RIDGE * np.eye(train.shape[1]))
    offset = test[:, None] - means
    distance = np.einsum("ncf,fg,ncg->nc", offset, inverse, offset)
    ordered = np.sort(distance, 1)
    return names[distance.argmin(1)], ordered[:, 1] - ordered[:, 0]


def measure(seeds: Sequence[int], folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Statistics, faults and seeds of the dumps; dumps are made where they are missing."""
    rows, faults, owners = [], [], []
    wanted = {*WITHOUT_CLASS, *(name for names in CLASSES.values() for name in names)}
    for seed in seeds:
        world = None
        for number, (names, _) in enumerate(second.cases()):
            if len(names) != 1 or names[0] not in wanted:
                continue
            path = folder / f"{seed}_{number}.parquet"
            if not path.exists():
                world = world or second.make_world(seed, folder / str(seed))
                second.dump(
                    world, second.rows_of(world, names, random.Random(1000 * seed + number)), path
                )
            rows.append(statistics(tokens_of(TokenTable.concatenate(list(parquet_tables(path))))))
            faults.append(names[0])
            owners.append(seed)
    return np.array(rows), np.array(faults), np.array(owners)


def predicted(
    rows: np.ndarray, labels: np.ndarray, owners: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns each dump's class and margin, by a discriminant of the other seeds' dumps."""
    found, margins = labels.copy(), np.zeros(len(labels))
    for seed in np.unique(owners):
        own, others = owners == seed, (owners != seed) & (labels != "")
        found[own], margins[own] = discriminant(rows[others], labels[others], rows[own])
    return found, margins


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[6, 7, 8, 9])
    parser.add_argument("--dumps", type=Path, help="folder of dumps (default: a temporary one)")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows, faults, owners = measure(options.seeds, options.dumps or Path(folder))
    of_fault = {name: kind for kind, names in CLASSES.items() for name in names}
    labels = np.array([of_fault.get(name, "") for name in faults])
    found, margins = predicted(rows, labels, owners)
    right, seeds = found == labels, len(options.seeds)
    print(
        f"{right.sum() / (labels != '').sum():.0%} of {(labels != '').sum()} dumps in their class"
    )
    print(
        "| least margin | right, of all with a hypothesis | misleading, of all faulty dumps"
        " |\n|---|---|---|"
    )
    for least in (0.0, 1.0, 2.0, 4.0, 8.0, 16.0):
        named = margins >= least
        correct = OTHERS * seeds + (named & right).sum()
        print(
            f"| {least:g} | {correct / MODELLED / seeds:.0%} |"
            f" {(named & ~right).sum() / ALL / seeds:.0%} |"
        )
    pairs = []
    for a, b in combinations(of_fault, 2):
        both = np.isin(faults, (a, b))
        if of_fault[a] != of_fault[b]:
            pairs.append(
                (
                    (predicted(rows[both], faults[both], owners[both])[0] == faults[both]).mean(),
                    a,
                    b,
                )
            )
    print(
        "pairs that are told apart worst:",
        "; ".join(f"{a} and {b} {share:.0%}" for share, a, b in sorted(pairs)[:6]),
    )


if __name__ == "__main__":
    main()
