"""What differs between two runs or dumps: options, engines' records, size and cause of the mismatch."""

import json
from typing import Any

import numpy as np

from slime_tis.analysis.diagnosis import diagnose
from slime_tis.analysis.dumps.table import TokenTable
from slime_tis.analysis.report import overview
from slime_tis.analysis.report.source import Source, open_source
from slime_tis.errors import one_line

MISMATCH = ("k3", "χ²", "mean abs(Δ)")
"""Metrics that are compared without dumps, by the labels of the overview."""


def comparison(before: str, after: str, *, as_json: bool = False) -> str:
    """The differences between two runs or dumps, as text or JSON."""
    sources = [open_source(path, 2) for path in (before, after)]
    lines = changes(*sources) + [f"{source.name}: {source.note}" for source in sources if source.note]
    if as_json:
        return json.dumps({"before": before, "after": after, "changes": lines}, indent=1)
    return "\n".join([f"{before} → {after}", *(f"- {one_line(line, 500)}" for line in lines)])


def changes(before: Source, after: Source) -> list[str]:
    """One sentence per difference, the configuration first."""
    lines = _changed("option", _configuration(before), _configuration(after))
    if before.table is not None and after.table is not None:
        lines += _changed("dump", before.table.metadata, after.table.metadata)
        lines += _mismatch(before.table, after.table)
    else:
        metrics = [
            {key: f"{value:.3g}" for key, value in overview.last_values(source.metrics).items() if key in MISMATCH}
            for source in (before, after)
        ]
        lines += _changed("last", *metrics)
    first, second = (diagnose(source.table, source.metrics).findings[0] for source in (before, after))
    causes = [f"{each.title} ({each.confidence:.0%})" for each in (first, second)]
    same = (first.cause, first.detail) == (second.cause, second.detail)
    return [*lines, f"diagnosis: {causes[0]} in both" if same else f"diagnosis: {causes[0]} → {causes[1]}"]


def _configuration(source: Source) -> dict[str, Any]:
    return {str(name): value for name, value in source.options.items() if name not in overview.PER_RUN_OPTIONS}


def _changed(kind: str, before: Any, after: Any) -> list[str]:
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return [f"{kind} {name}: {before.get(name, 'none')} → {after.get(name, 'none')}" for name in names]


def _mismatch(before: TokenTable, after: TokenTable) -> list[str]:
    """The mean of abs(Δ) with its standard error, and for equal tokens the engine whose log-probs changed."""
    if not (before.valid.any() and after.valid.any()):
        return ["no token has log-probs of both engines in both dumps"]
    (a, error_a), (b, error_b) = map(_mean_size, (before, after))
    error = float(np.hypot(error_a, error_b))
    noise = "" if abs(b - a) > 2 * error else ", within the noise of the samples"
    lines = [f"mean abs(Δ): {a:.3g} → {b:.3g} nats (difference {b - a:.2g}, standard error {error:.2g}{noise})"]
    if not (
        before.token is not None
        and after.token is not None
        and np.array_equal(before.offsets, after.offsets)
        and np.array_equal(before.token, after.token)
    ):
        return lines
    valid = before.valid & after.valid
    if valid.any():
        pairs = {
            "training": (before.policy_log_prob, after.policy_log_prob),
            "the rollout engine": (before.rollout_log_prob, after.rollout_log_prob),
        }
        moved = [f"{name} by {np.abs(x - y)[valid].mean():.3g}" for name, (x, y) in pairs.items()]
        lines.append(f"both have the same tokens; their log-probs changed in {' and in '.join(moved)} nats on average")
    return lines


def _mean_size(table: TokenTable) -> tuple[float, float]:
    """Mean abs(Δ) of the valid tokens, and its standard error over samples."""
    sample, size = table.sample[table.valid], np.abs(table.log_ratio[table.valid])
    sums, counts = (np.bincount(sample, weights, len(table)) for weights in (size, None))
    mean = sums.sum() / counts.sum()
    return float(mean), float(np.sqrt(((sums - mean * counts) ** 2).sum()) / counts.sum())
