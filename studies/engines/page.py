"""The tables of README.md, from results.csv."""

from collections.abc import Sequence
from pathlib import Path

from studies.collapse.report import replace_table
from studies.engines.diagnosis_rows import DiagnosisRow
from studies.engines.records import PRECISIONS, SERVERS, SHARED, Precision, Scorer
from studies.engines.results import Row, order

PAGE = Path(__file__).with_name("README.md")
NAMES = {"sort_digits": "Sort digits", "smollm2": "SmolLM2-135M-Instruct"}
"""Headings by model."""
ONE_PASS = "one pass"
MISSING = "–"
"""In a cell without a measurement."""


def write(rows: Sequence[Row], path: Path = PAGE) -> Path:
    """Writes all tables into the page."""
    for name, text in tables(rows).items():
        replace_table(path, name, text)
    return path


def write_diagnosis(rows: Sequence[DiagnosisRow], path: Path = PAGE) -> Path:
    """Writes the table of diagnoses into the page."""
    return replace_table(path, "diagnosis", diagnosis(rows))


def diagnosis(rows: Sequence[DiagnosisRow]) -> str:
    """Returns the table of diagnoses."""
    lines = [
        "| model | rollout and training | finding | confidence | verdict |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.model} | {row.case} | `{row.cause}` | {row.confidence:.0%} | {row.verdict} |"
        )
    return "\n".join(lines)


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """Returns the Markdown of each table, by the name in its mark."""
    texts = {"programs": programs(rows)}
    builders = {
        "agreement": agreement,
        "pairs": matrix,
        "decoded": decoded,
        "reports": reported,
        "greedy": greedy,
    }
    for name, build in builders.items():
        parts = []
        for model, heading in NAMES.items():
            own = [row for row in rows if row.model == model]
            if own:
                parts.append(f"\n**{heading}**\n\n{build(own)}")
        texts[name] = "\n".join(parts)
    return texts


def programs(rows: Sequence[Row]) -> str:
    """Returns what was measured, on what."""
    versions: dict[str, str] = {}
    for row in rows:
        versions[row.first_engine] = row.first_version
        versions[row.second_engine] = row.second_version
    lines = ["| engine | version |", "|---|---|"]
    lines += [f"| {engine} | {version} |" for engine, version in sorted(versions.items())]
    machines = sorted({row.machine for row in rows})
    dates = sorted({row.date for row in rows})
    lines += [f"| machine | {', '.join(machines)} |", f"| date | {', '.join(dates)} |"]
    return "\n".join(lines)


def agreement(rows: Sequence[Row]) -> str:
    """Compares every engine with transformers in one pass, in both precisions."""
    lines = [
        "| precision | engine | method | batch | tokens | mean abs(Δ) | max abs(Δ) | k3 | KL |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    shared = [row for row in rows if row.token_set == SHARED]
    for precision in PRECISIONS:
        reference = one_pass(shared, "transformers", precision)
        compared = [row for row in shared if reference in (row.first, row.second)]
        for row in sorted(compared, key=lambda each: order(other(each, reference))):
            scorer = other(row, reference)
            if scorer.precision == precision:
                lines.append(
                    f"| {precision} | {scorer.engine} | {scorer.method} | {scorer.batch} |"
                    f" {row.tokens} | {numbers(row)} |"
                )
    return "\n".join(lines)


def matrix(rows: Sequence[Row]) -> str:
    """Returns mean abs(Δ) of each pair of engines in one pass."""
    shared = [row for row in rows if row.token_set == SHARED]
    scorers = []
    for precision in PRECISIONS:
        for engine in ("transformers", "Megatron", *SERVERS):
            scorers.append(one_pass(shared, engine, precision))
    heads = [f"{each.engine} {each.precision}" for each in scorers]
    lines = [f"| mean abs(Δ) | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for head, scorer in zip(heads, scorers, strict=True):
        cells = []
        for column in scorers:
            pair = [row for row in shared if {row.first, row.second} == {scorer, column}]
            cells.append(number(pair[0].mean_abs) if pair else MISSING)
        lines.append(f"| {head} | {' | '.join(cells)} |")
    return "\n".join(lines)


def decoded(rows: Sequence[Row]) -> str:
    """Compares the log-probs that servers report while they sample with those of other engines."""
    lines = [
        "| sampled by | batch | scored by | tokens | mean abs(Δ) | max abs(Δ) | k3 | KL |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for precision in PRECISIONS:
        for server in SERVERS:
            for name in ("plain", "single"):
                own = [row for row in rows if row.token_set == f"{server}_{precision}_{name}"]
                for row in sorted(own, key=lambda each: order(each.second)):
                    second = row.second
                    lines.append(
                        f"| {server} {precision} | {row.first_batch} | {second.engine}"
                        f" {second.precision} | {row.tokens} | {numbers(row)} |"
                    )
    return "\n".join(lines)


def reported(rows: Sequence[Row]) -> str:
    """Shows which distribution a reported log-prob is of, at temperature 0.7 and top-p 0.9."""
    lines = [
        "| engine | server's setting | reported field | raw | temperature | temperature, top-p |",
        "|---|---|---|---|---|---|",
    ]
    fields = {
        ("vLLM", "truncated", "processed"): ("processed_logprobs", "logprobs"),
        ("vLLM", "truncated_raw", "raw"): ("raw_logprobs (default)", "logprobs"),
        ("SGLang", "truncated", "temperature"): ("default", "output_token_logprobs"),
        ("SGLang", "truncated", "processed"): ("default", "output_token_sampling_logprobs"),
        ("SGLang", "truncated_raw", "raw"): (
            "SGLANG_RETURN_ORIGINAL_LOGPROB",
            "output_token_logprobs",
        ),
    }
    for (server, name, report), (setting, field) in fields.items():
        cells = []
        for formula in ("raw", "temperature", "processed"):
            found = [
                row
                for row in rows
                if row.token_set == f"{server}_fp32_{name}"
                and row.first_report == report
                and row.second_engine == "transformers"
                and row.second_precision == "fp32"
                and row.second_report == formula
            ]
            cells.append(cell(found))
        lines.append(f"| {server} | {setting} | {field} | {' | '.join(cells)} |")
    return "\n".join(lines)


def greedy(rows: Sequence[Row]) -> str:
    """Compares both servers' greedy answers as far as they are equal."""
    lines = [
        "| precision | equal tokens | mean abs(Δ) | max abs(Δ) | k3 | KL |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if {row.first_engine, row.second_engine} == set(SERVERS) and row.temperature == 0.0:
            lines.append(f"| {row.first_precision} | {row.tokens} | {numbers(row)} |")
    return "\n".join(lines)


def cell(found: Sequence[Row]) -> str:
    """Returns mean abs(Δ), and the number of tokens that the formula removes."""
    if not found:
        return MISSING
    row = found[0]
    if row.outside:
        return f"{number(row.mean_abs)} ({row.outside} removed)"
    return number(row.mean_abs)


def one_pass(rows: Sequence[Row], engine: str, precision: Precision) -> Scorer:
    """Returns the scorer of an engine with its largest batch."""
    scorers = [scorer for row in rows for scorer in (row.first, row.second)]
    found = [
        scorer
        for scorer in scorers
        if (scorer.engine, scorer.precision, scorer.method) == (engine, precision, ONE_PASS)
    ]
    return max(found, key=lambda scorer: scorer.batch)


def other(row: Row, scorer: Scorer) -> Scorer:
    """Returns the one of a row's two scorers that is not this one."""
    return row.second if row.first == scorer else row.first


def numbers(row: Row) -> str:
    """Returns the last cells of a line."""
    kl = MISSING if row.kl is None else number(row.kl)
    return f"{number(row.mean_abs)} | {number(row.max_abs)} | {number(row.k3)} | {kl}"


def number(value: float) -> str:
    """Returns a number with two digits."""
    if value == 0:
        return "0"
    return f"{value:.1e}"
