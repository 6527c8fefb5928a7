"""The commands `slime-tis report` and `slime-tis diagnose`, for one run and for two."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from slime_tis.analysis.diagnosis.checkpoint_proof import prove
from slime_tis.analysis.diagnosis.diagnose import Diagnosis, diagnose, with_proof
from slime_tis.analysis.diagnosis.diagnosis_text import as_text
from slime_tis.analysis.diagnosis.metric_rules import ABS, K3, invalid_values, series_of
from slime_tis.analysis.diagnosis.proof import Proof
from slime_tis.analysis.diagnosis.rescore import Rescored, check_device
from slime_tis.analysis.diagnosis.trained_tokens import mean_of
from slime_tis.analysis.dumps.table import TokenTable
from slime_tis.analysis.report import mismatch_plots, overview
from slime_tis.analysis.report.page import check_output, page_data, render
from slime_tis.analysis.report.page_samples import decoder
from slime_tis.analysis.report.report_inputs import Source, open_source
from slime_tis.atomic_files import write_atomically
from slime_tis.errors import one_line
from slime_tis.hf_hub import TOKENIZER, local_directory

MISMATCH = ("k3", "χ²", "mean abs(Δ)")
"""Metrics of the overview, by label, that two runs without dumps are compared by."""
MEASURES = {"k3": K3, "abs": ABS}
"""Metrics that --fail-on can limit."""


def report(
    paths: Sequence[str], *, out: str = "", as_json: bool = False, hf_checkpoint: str = ""
) -> str:
    """Writes a report on one or several runs or dumps, and returns the text to print.

    Args:
        paths: Run directories or dumps.
        out: File to write. Default: report.html in the run directory, DUMP.report.html next to a
            dump, or comparison.html in the working directory.
        as_json: Print the numbers as JSON, and write the page only with `out`.
        hf_checkpoint: Directory of the tokenizer or ORG/NAME, if the dump names none.

    Raises:
        ValueError: an input cannot be read, or the output is a file that is not a report.
    """
    if out:  # before the inputs, which may take minutes to read
        check_output(Path(out))
    sources = [open_source(path, len(paths)) for path in paths]
    target = _default_output(sources)
    if out:
        target = Path(out)
    writes = bool(out) or not as_json
    if writes:
        check_output(target)
    tokenizer = hf_checkpoint
    if tokenizer:
        tokenizer = local_directory(tokenizer, files=TOKENIZER)
    data = page_data(sources, decoder(sources[0].table, tokenizer), with_samples=writes)
    if writes:
        write_atomically(target, render(data))
    if as_json:
        return json.dumps(_numbers(sources, data), indent=1, allow_nan=False)
    lines = [f"{target} ({target.stat().st_size / 1e6:.1f} MB)"]
    for source in sources:
        if source.note and source.note not in lines:
            lines.append(source.note)
    return "\n".join(lines)


def _default_output(sources: Sequence[Source]) -> Path:
    if len(sources) > 1:
        return Path("comparison.html")
    path = sources[0].path
    if path.is_dir():
        return path / "report.html"
    return path.with_name(f"{path.name}.report.html")


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
    device: str = "",
) -> str:
    """Returns a text with the causes of a mismatch; with a checkpoint, also their proof.

    Args:
        path: Run directory or dump.
        hf_checkpoint: Model that scores the samples again: a directory, or ORG/NAME.
        other_checkpoints: Models whose weights the rollout engine may have used, given likewise.
        as_json: Return JSON.
        fail_on: Limits, for example "k3=0.01,cause".
        device: Device of torch that scores again; default cpu.

    Raises:
        LimitExceeded: a limit of `fail_on` is exceeded.
        ValueError: the input cannot be read, or `fail_on` is not a list of limits.
    """
    limits = _limits(fail_on)
    if other_checkpoints and not hf_checkpoint:
        raise ValueError("--other-checkpoint is compared with --hf-checkpoint; give both.")
    if device and not hf_checkpoint:
        raise ValueError("--device is the device of --hf-checkpoint; give both.")
    # Before the dump is read, which may take minutes.
    check_device(device or "cpu")
    source = open_source(path)
    result = diagnose(source.table, source.metrics)
    facts: dict[str, Any] = {"rescored": None, "proof": None}
    note = source.note
    if hf_checkpoint and source.table is not None and result.rest is None:
        raise ValueError(
            "--hf-checkpoint scores the samples of a dump; this one has no trained token."
        )
    if hf_checkpoint and result.rest is None:
        raise ValueError(f"--hf-checkpoint scores the samples of a dump. {source.note}")
    if hf_checkpoint and result.rest is not None:
        directory = local_directory(hf_checkpoint)
        others = [local_directory(other, "--other-checkpoint") for other in other_checkpoints]
        if result.rest.valid.any():
            rescored, proof = prove(
                result.rest,
                directory,
                others,
                device=device or "cpu",
                with_progress=True,
            )
            note = _note_on_proof(result, rescored, proof)
            result = with_proof(result, proof)
            facts = {
                "rescored": {**asdict(rescored), "verdict": rescored.verdict},
                "proof": asdict(proof),
            }
        else:
            note = "Nothing was scored again: certain findings explain every token."
    text = as_text(result, str(source.path), note)
    if as_json:
        values = {"name": source.name, **result.as_json(), **facts}
        text = json.dumps(values, indent=1, allow_nan=False)
    exceeded = _exceeded(limits, result, source)
    if exceeded:
        raise LimitExceeded(exceeded, text)
    return text


def _note_on_proof(result: Diagnosis, rescored: Rescored, proof: Proof) -> str:
    """Returns what scoring again shows, in words."""
    part = ""
    if result.server:
        part = f", samples of {result.server}"
    note = f"Rescored in fp32{part}: {rescored}."
    if not proof.causes:
        # A cause has the sentence as its evidence.
        note += f" {proof.sentence}"
    return note


def _limits(fail_on: str) -> dict[str, float]:
    """Limits by name. The limit of `cause` is unused: every cause except `healthy` fails."""
    limits: dict[str, float] = {}
    if not fail_on:
        return limits
    for part in fail_on.split(","):
        name, equals, value = part.strip().partition("=")
        if name == "cause" and not equals:
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


def _exceeded(limits: dict[str, float], result: Diagnosis, source: Source) -> list[str]:
    """The exceeded limits in words; a limit that cannot be checked counts as exceeded."""
    words = []
    if "cause" in limits and result.cause != "healthy":
        words.append(f"the cause is {result.cause}")
    for name in MEASURES:
        if name not in limits:
            continue
        value, reason = _measured(name, source)
        if reason:
            words.append(f"{name} {reason}, so its limit {limits[name]:g} cannot be checked")
        # Negated, so that NaN exceeds the limit.
        elif not value <= limits[name]:
            words.append(f"{name} is {value:.3g}, the limit {limits[name]:g}")
    return words


def _measured(name: str, source: Source) -> tuple[float, str]:
    """Mean k3 or abs(Δ) over the tokens of a dump, else over the steps of a log.

    The second value says why the first is unknown; it is empty if it is known.
    """
    if source.table is not None and source.table.valid.any():
        numbers = mismatch_plots.summary(source.table)
        key = "mean_abs_log_ratio"
        if name == "k3":
            key = "k3"
        return numbers[key], ""
    metric = MEASURES[name]
    facts = invalid_values(source.metrics, (metric,))
    if facts:
        return math.nan, f"is not known: {facts[0]}"
    values = series_of(source.metrics, metric)
    if not values:
        return math.nan, "is neither in a dump nor in the log"
    return fmean(values), ""


def _numbers(sources: Sequence[Source], data: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a report, without plots and samples."""
    rows = []
    for source in sources:
        mismatch = None
        if source.table is not None:
            mismatch = mismatch_plots.summary(source.table)
        row = {
            "name": source.name,
            "steps": len(source.metrics),
            "last": overview.last_values(source.metrics),
            "warnings": overview.warnings(source.metrics),
            "mismatch": mismatch,
            "note": source.note,
        }
        rows.append(row)
    groups = {}
    for group in overview.group_runs(sources):
        groups[group.name] = [source.name for source in group.sources]
    return {
        "sources": rows,
        "groups": groups,
        "diagnoses": data["diagnoses"],
        "what_if": data["what_if"]["rows"],
    }


def comparison(before: str, after: str, *, as_json: bool = False) -> str:
    """Returns the differences between two runs or dumps, as text or JSON."""
    one = open_source(before, 2)
    two = open_source(after, 2)
    lines = _changed("option", overview.configuration(one), overview.configuration(two))
    if one.table is not None and two.table is not None:
        lines += _changed("dump", one.table.metadata, two.table.metadata)
        lines += _mismatch(one.table, two.table)
    else:
        lines += _changed("last", _last_mismatch(one), _last_mismatch(two))
    first = diagnose(one.table, one.metrics).findings[0]
    second = diagnose(two.table, two.metrics).findings[0]
    cause = f"{first.title} ({first.confidence:.0%})"
    if (first.cause, first.detail) == (second.cause, second.detail):
        lines.append(f"diagnosis: {cause} in both")
    else:
        lines.append(f"diagnosis: {cause} → {second.title} ({second.confidence:.0%})")
    for source in (one, two):
        if source.note:
            lines.append(f"{source.name}: {source.note}")
    if as_json:
        return json.dumps({"before": before, "after": after, "changes": lines}, indent=1)
    items = [f"- {one_line(line, 500)}" for line in lines]
    return "\n".join([f"{before} → {after}", *items])


def _last_mismatch(source: Source) -> dict[str, str]:
    """The last values of the mismatch metrics, rounded: a smaller change is no change."""
    values = overview.last_values(source.metrics)
    return {key: f"{value:.3g}" for key, value in values.items() if key in MISMATCH}


def _changed(kind: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The entries of two mappings that differ, in words."""
    changes = []
    for name in {**before, **after}:
        if before.get(name) != after.get(name):
            changes.append(f"{kind} {name}: {before.get(name, 'none')} → {after.get(name, 'none')}")
    return changes


def _mismatch(before: TokenTable, after: TokenTable) -> list[str]:
    """Both means of abs(Δ), and the standard error of the difference.

    If both tables have the same tokens, also how much each engine's log-probs changed.
    """
    if not (before.valid.any() and after.valid.any()):
        return ["no token has log-probs of both engines in both dumps"]
    mean_before, error_before = _mean_size(before)
    mean_after, error_after = _mean_size(after)
    difference = mean_after - mean_before
    error = float(np.hypot(error_before, error_after))
    noise = ""
    # Negated, so that NaN is no difference.
    if not abs(difference) > 2 * error:
        noise = ", within the noise of the samples"
    lines = [
        f"mean abs(Δ): {mean_before:.3g} → {mean_after:.3g} nats (difference {difference:.2g},"
        f" standard error {error:.2g}{noise})"
    ]
    has_same_tokens = (
        before.token is not None
        and after.token is not None
        and np.array_equal(before.offsets, after.offsets)
        and np.array_equal(before.token, after.token)
    )
    if not has_same_tokens:
        return lines
    valid = before.valid & after.valid
    if not valid.any():
        return lines
    training = np.abs(before.policy_log_prob - after.policy_log_prob)[valid].mean()
    rollout = np.abs(before.rollout_log_prob - after.rollout_log_prob)[valid].mean()
    lines.append(
        f"both have the same tokens; their log-probs changed in training by {training:.3g} and in"
        f" the rollout engine by {rollout:.3g} nats on average"
    )
    return lines


def _mean_size(table: TokenTable) -> tuple[float, float]:
    """Mean of abs(Δ) over the valid tokens, and its standard error."""
    return mean_of(np.abs(table.log_ratio[table.valid]), table.sample[table.valid])
