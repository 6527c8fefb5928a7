"""The commands `slime-tis report` and `slime-tis diagnose`, also of two runs."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from slime_tis.analysis.diagnosis.diagnose import Diagnosis, as_text, diagnose, with_proof
from slime_tis.analysis.diagnosis.metric_rules import ABS, K3, invalid_values, series_of
from slime_tis.analysis.diagnosis.proof import prove
from slime_tis.analysis.diagnosis.trained_tokens import mean_of
from slime_tis.analysis.dumps.table import TokenTable
from slime_tis.analysis.report import mismatch_plots, overview
from slime_tis.analysis.report.page import check_output, page_data, render
from slime_tis.analysis.report.page_samples import decoder
from slime_tis.analysis.report.report_inputs import Source, open_source
from slime_tis.atomic_files import write_atomically
from slime_tis.errors import one_line

MISMATCH = ("k3", "χ²", "mean abs(Δ)")
"""Metrics that are compared without dumps, by the labels of the overview."""


def report(
    paths: Sequence[str], *, out: str = "", as_json: bool = False, hf_checkpoint: str = ""
) -> str:
    """Writes a report on one or several runs or dumps; returns the text to print.

    Args:
        paths: Run directories or dumps.
        out: File to write. Default: report.html in the run directory, DUMP.report.html next to a
            dump, or comparison.html in the working directory.
        as_json: Print the numbers as JSON, and write the page only with `out`.
        hf_checkpoint: Directory of the tokenizer, if the dump names none.
    """
    if out:
        check_output(Path(out))
    sources = [open_source(path, len(paths)) for path in paths]
    path = sources[0].path
    default = path / "report.html" if path.is_dir() else path.with_name(f"{path.name}.report.html")
    target = Path(out) if out else default if len(paths) == 1 else Path("comparison.html")
    writes = bool(out) or not as_json
    if writes:
        check_output(target)
    data = page_data(sources, decoder(sources[0].table, hf_checkpoint), with_samples=writes)
    if writes:
        write_atomically(target, render(data))
    if as_json:
        return json.dumps(_numbers(sources, data), indent=1, allow_nan=False)
    notes = "".join(
        f"\n{note}" for note in dict.fromkeys(source.note for source in sources) if note
    )
    return f"{target} ({target.stat().st_size / 1e6:.1f} MB){notes}"


class LimitExceeded(Exception):
    """A limit of --fail-on is exceeded; `text` is the diagnosis."""

    def __init__(self, exceeded: Sequence[str], text: str) -> None:
        super().__init__("; ".join(exceeded))
        self.text = text


def diagnosis(
    path: str,
    *,
    hf_checkpoint: str = "",
    other_checkpoints: Sequence[str] = (),
    as_json: bool = False,
    fail_on: str = "",
) -> str:
    """Names the causes of the mismatch of a run or a dump, and proves them with a checkpoint; returns the text.

    Args:
        path: Run directory or dump.
        hf_checkpoint: Model that scores samples again.
        other_checkpoints: Models whose weights the rollout engine may have.
        as_json: Return JSON.
        fail_on: Limits, for example "k3=0.01,cause".

    Raises:
        LimitExceeded: a limit of `fail_on` is exceeded.
        ValueError: the input cannot be read, or `fail_on` is no list of limits.
    """
    limits = _limits(fail_on)
    if other_checkpoints and not hf_checkpoint:
        raise ValueError("--other-checkpoint is compared with --hf-checkpoint; give both.")
    source = open_source(path)
    result = diagnose(source.table, source.metrics)
    facts: dict[str, Any] = {"rescored": None, "proof": None}
    note = source.note
    if hf_checkpoint:
        if source.table is None:
            raise ValueError(f"--hf-checkpoint scores the samples of a dump. {source.note}")
        server = result.server  # samples of the other servers would hide the cause
        table = source.table.of_worker(server) if server else source.table
        rescored, proof = prove(table, hf_checkpoint, other_checkpoints)
        result = with_proof(result, proof)
        facts = {
            "rescored": {**asdict(rescored), "verdict": rescored.verdict},
            "proof": asdict(proof),
        }
        note = f"Rescored in fp32{server and f', samples of {server}'}: {rescored}."
        note += "" if proof.causes else f" {proof.sentence}"
    if as_json:
        text = json.dumps(
            {"name": source.name, **result.as_json(), **facts}, indent=1, allow_nan=False
        )
    else:
        text = as_text(result, str(source.path), note)
    if exceeded := _exceeded(limits, result, source):
        raise LimitExceeded(exceeded, text)
    return text


def _limits(fail_on: str) -> dict[str, float]:
    """Limits by name; `cause` has none and fails for every cause but `healthy`."""
    limits: dict[str, float] = {}
    for part in fail_on.split(",") if fail_on else ():
        name, has_value, value = part.strip().partition("=")
        if name == "cause" and not has_value:
            limits[name] = 0.0
            continue
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = math.nan
        if name not in MEASURES or not math.isfinite(limits[name]):
            raise ValueError(
                f"--fail-on has {part.strip()!r}; give a list of k3=X, abs=X (nats per token) and"
                " cause."
            )
    return limits


MEASURES = {"k3": K3, "abs": ABS}
"""The metric of each limit of --fail-on."""


def _exceeded(limits: dict[str, float], result: Diagnosis, source: Source) -> list[str]:
    """The exceeded limits in words; a limit that cannot be checked counts as exceeded."""
    words = []
    if "cause" in limits and result.cause != "healthy":
        words.append(f"the cause is {result.cause}")
    for name in limits.keys() - {"cause"}:
        value, reason = _measured(name, source)
        if reason:
            words.append(f"{name} {reason}, so its limit {limits[name]:g} cannot be checked")
        elif not value <= limits[name]:  # NaN, too
            words.append(f"{name} is {value:.3g}, the limit {limits[name]:g}")
    return words


def _measured(name: str, source: Source) -> tuple[float, str]:
    """Mean k3 or abs(Δ) over the tokens of a dump, else over the steps of a log, and why it is unknown."""
    if source.table is not None and source.table.valid.any():
        numbers = mismatch_plots.summary(source.table)
        return numbers["k3"] if name == "k3" else numbers["mean_abs_log_ratio"], ""
    metric = MEASURES[name]
    if facts := invalid_values(source.metrics, (metric,)):
        return math.nan, f"is not known: {facts[0]}"
    values = series_of(source.metrics, metric)
    if not values:
        return math.nan, "is neither in a dump nor in the log"
    return fmean(values), ""


def _numbers(sources: Sequence[Source], data: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a report, without plots and samples."""
    return {
        "sources": [
            {
                "name": source.name,
                "steps": len(source.metrics),
                "last": overview.last_values(source.metrics),
                "warnings": overview.warnings(source.metrics),
                "mismatch": None if source.table is None else mismatch_plots.summary(source.table),
                "note": source.note,
            }
            for source in sources
        ],
        "groups": {
            group.name: [source.name for source in group.sources]
            for group in overview.group_runs(sources)
        },
        "diagnoses": data["diagnoses"],
        "what_if": data["what_if"]["rows"],
    }


def comparison(before: str, after: str, *, as_json: bool = False) -> str:
    """The differences between two runs or dumps as text or JSON: one sentence each, the configuration first."""
    one, two = sources = [open_source(path, 2) for path in (before, after)]
    lines = _changed("option", overview.configuration(one), overview.configuration(two))
    if one.table is not None and two.table is not None:
        lines += _changed("dump", one.table.metadata, two.table.metadata)
        lines += _mismatch(one.table, two.table)
    else:
        metrics = [
            {
                key: f"{value:.3g}"
                for key, value in overview.last_values(source.metrics).items()
                if key in MISMATCH
            }
            for source in sources
        ]
        lines += _changed("last", *metrics)
    first, second = (diagnose(source.table, source.metrics).findings[0] for source in sources)
    causes = [f"{each.title} ({each.confidence:.0%})" for each in (first, second)]
    same = (first.cause, first.detail) == (second.cause, second.detail)
    lines.append(
        f"diagnosis: {causes[0]} in both" if same else f"diagnosis: {causes[0]} → {causes[1]}"
    )
    lines += [f"{source.name}: {source.note}" for source in sources if source.note]
    if as_json:
        return json.dumps({"before": before, "after": after, "changes": lines}, indent=1)
    return "\n".join([f"{before} → {after}", *(f"- {one_line(line, 500)}" for line in lines)])


def _changed(kind: str, before: Any, after: Any) -> list[str]:
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return [
        f"{kind} {name}: {before.get(name, 'none')} → {after.get(name, 'none')}" for name in names
    ]


def _mismatch(before: TokenTable, after: TokenTable) -> list[str]:
    """The mean of abs(Δ) with its standard error, and for equal tokens the engine whose log-probs changed."""
    if not (before.valid.any() and after.valid.any()):
        return ["no token has log-probs of both engines in both dumps"]
    (a, error_a), (b, error_b) = (
        mean_of(np.abs(table.log_ratio[table.valid]), table.sample[table.valid])
        for table in (before, after)
    )
    error = float(np.hypot(error_a, error_b))
    noise = "" if abs(b - a) > 2 * error else ", within the noise of the samples"
    lines = [
        f"mean abs(Δ): {a:.3g} → {b:.3g} nats (difference {b - a:.2g}, standard error"
        f" {error:.2g}{noise})"
    ]
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
        lines.append(
            f"both have the same tokens; their log-probs changed in {' and in '.join(moved)} nats"
            " on average"
        )
    return lines
