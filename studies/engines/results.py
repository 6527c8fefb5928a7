"""The table of the study: one row per pair of log-probs of the same tokens."""

import datetime
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, combinations
from pathlib import Path

from benchmarks.provenance import machine
from examples.tables import read_rows, write_rows
from studies.engines.measures import Top, common_length, compare
from studies.engines.records import (
    SHARED,
    Precision,
    Records,
    Report,
    Scorer,
    Scores,
    TokenSet,
)

RESULTS = Path(__file__).with_name("results.csv")
GREEDY_PAIR = ("SGLang", "vLLM")
"""The servers whose greedy answers are compared as far as they are equal."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The difference of two engines on the same tokens; Δ is log π_second − log π_first."""

    model: str
    token_set: str
    sampled_by: str
    temperature: float
    top_p: float
    first_engine: str
    first_precision: str
    first_method: str
    first_batch: int
    first_report: str
    second_engine: str
    second_precision: str
    second_method: str
    second_batch: int
    second_report: str
    tokens: int
    outside: int
    """Tokens that only one of the two keeps after top-p; not in the columns below."""
    mean_abs: float
    """Mean abs(Δ), nats."""
    max_abs: float
    k3: float
    """Mean of exp(Δ) − 1 − Δ."""
    kl: float | None
    """Mean KL(first ‖ second) over the union of both engines' 8 likeliest tokens and the rest."""
    date: str
    machine: str
    first_version: str
    second_version: str

    @property
    def first(self) -> Scorer:
        """The engine that sampled, if one of the two did."""
        return Scorer(
            engine=self.first_engine,
            precision=_precision(self.first_precision),
            method=self.first_method,
            batch=self.first_batch,
            report=_report(self.first_report),
        )

    @property
    def second(self) -> Scorer:
        """The other engine."""
        return Scorer(
            engine=self.second_engine,
            precision=_precision(self.second_precision),
            method=self.second_method,
            batch=self.second_batch,
            report=_report(self.second_report),
        )


def _precision(text: str) -> Precision:
    return "bf16" if text == "bf16" else "fp32"


def _report(text: str) -> Report:
    reports: dict[str, Report] = {
        "raw": "raw",
        "temperature": "temperature",
        "processed": "processed",
    }
    return reports[text]


def read_results(path: Path) -> list[Row]:
    """Returns the rows of a table."""
    return read_rows(path, Row)


def write_results(path: Path, rows: Sequence[Row]) -> None:
    """Writes a table."""
    write_rows(path, Row, rows)


def model_rows(model: str, records: Records) -> list[Row]:
    """Returns all comparisons of a model."""
    rows = []
    for tokens in records.token_sets():
        for first, second in pairs(tokens, records.scores(tokens.name)):
            rows.append(row(model, tokens, first, second))
    for precision in ("fp32", "bf16"):
        rows.append(greedy_row(model, records, precision))
    return rows


def pairs(tokens: TokenSet, scores: Sequence[Scores]) -> Iterator[tuple[Scores, Scores]]:
    """Yields the scores that are compared.

    All pairs of the shared tokens. Of tokens that a server sampled, its own log-probs and each
    other engine's.
    """
    if tokens.name == SHARED:
        # Sorted, so that the first engine of a pair does not depend on names of files.
        yield from combinations(sorted(scores, key=lambda each: order(each.scorer)), 2)
        return
    sampled = [each for each in scores if each.scorer.method == "decoded"]
    scored = [each for each in scores if each.scorer.method != "decoded"]
    for first in sampled:
        for second in scored:
            yield first, second


def order(scorer: Scorer) -> tuple[int, int, str, int]:
    """Returns the place of a scorer in tables: fp32 first, transformers first."""
    engines = ("transformers", "Megatron", "vLLM", "SGLang")
    precision = ("fp32", "bf16").index(scorer.precision)
    return precision, engines.index(scorer.engine), scorer.method, scorer.batch


def row(model: str, tokens: TokenSet, first: Scores, second: Scores) -> Row:
    """Returns the row of a pair."""
    difference = compare(
        list(chain(*first.log_probs)),
        list(chain(*second.log_probs)),
        list(chain(*first.top)),
        list(chain(*second.top)),
    )
    columns: dict[str, object] = {}
    for side, scores in (("first", first), ("second", second)):
        for name, value in asdict(scores.scorer).items():
            columns[f"{side}_{name}"] = value
        columns[f"{side}_version"] = scores.version
    return Row(
        model=model,
        token_set=tokens.name,
        sampled_by=tokens.sampled_by,
        temperature=tokens.sampling.temperature,
        top_p=tokens.sampling.top_p,
        **asdict(difference),
        **columns,  # type: ignore[arg-type]
        date=datetime.date.today().isoformat(),
        machine=f"{os.cpu_count()} cores of {machine()}",
    )


def greedy_row(model: str, records: Records, precision: str) -> Row:
    """Compares the greedy answers of both servers, as far as they have the same tokens."""
    sides = []
    for engine in GREEDY_PAIR:
        name = f"{engine}_{precision}_greedy"
        (scores,) = [each for each in records.scores(name) if each.scorer.method == "decoded"]
        sides.append((records.token_set(name), scores))
    (first_tokens, first), (second_tokens, second) = sides
    lengths = []
    for one, other in zip(first_tokens.responses, second_tokens.responses, strict=True):
        lengths.append(common_length(one, other))
    return row(model, first_tokens, shortened(first, lengths), shortened(second, lengths))


def shortened(scores: Scores, lengths: Sequence[int]) -> Scores:
    """Returns the scores of the first tokens of each answer."""
    log_probs: list[list[float]] = []
    top: list[list[Top]] = []
    for length, values, rows in zip(lengths, scores.log_probs, scores.top, strict=True):
        log_probs.append(values[:length])
        top.append(rows[:length])
    return replace(scores, log_probs=log_probs, top=top)
