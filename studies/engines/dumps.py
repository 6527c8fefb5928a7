"""What `slime-tis diagnose` says about the log-probs of two engines of the study.

    python -m studies.engines.dumps      # the second command of `make study-engines`

Each dump takes a server's reported log-probs as the rollout and the trainer's layers as training.
Writes the dumps below --out, diagnosis.csv, and its table in README.md.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.tables import read_rows, write_rows
from slime_tis.analysis.diagnosis.diagnose import diagnose
from slime_tis.analysis.dumps.files import write
from slime_tis.analysis.dumps.table import SampleParts, TokenTable
from studies.engines import page
from studies.engines.diagnosis_rows import DIAGNOSIS, DiagnosisRow
from studies.engines.records import PRECISIONS, SERVERS, Precision, Records, Report, Scores
from studies.engines.run import MODELS, RECORDS

DUMPS = Path("runs/studies/engines/dumps")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Two engines whose difference has a known cause."""

    name: str
    token_set: str
    rollout: tuple[str, Precision, str, Report]
    """Engine, precision, method and distribution of the log-probs that count as the rollout's."""
    training: tuple[str, Precision, str, Report]
    """The same of those that count as training's."""
    expected: tuple[str, ...]
    """Causes of `slime-tis diagnose` that are right."""


def cases() -> Iterator[Case]:
    """Yields the pairs of engines that a user of either server can have."""
    for server in SERVERS:
        for precision in PRECISIONS:
            for trained in PRECISIONS:
                same = precision == trained == "fp32"
                yield Case(
                    name=f"{server} {precision}, training {trained}",
                    token_set=f"{server}_{precision}_plain",
                    rollout=(server, precision, "decoded", "raw"),
                    training=("Megatron", trained, "one pass", "raw"),
                    expected=("healthy",) if same else ("rounding", "healthy"),
                )
        yield from sampling_cases(server)
    yield Case(
        name="SGLang fp32, scored by vLLM fp32",
        token_set="SGLang_fp32_plain",
        rollout=("SGLang", "fp32", "decoded", "raw"),
        training=("vLLM", "fp32", "one pass", "raw"),
        expected=("healthy",),
    )
    yield Case(
        name="vLLM bf16, scored by SGLang bf16",
        token_set="vLLM_bf16_plain",
        rollout=("vLLM", "bf16", "decoded", "raw"),
        training=("SGLang", "bf16", "one pass", "raw"),
        expected=("rounding", "healthy"),
    )


def sampling_cases(server: str) -> Iterator[Case]:
    """Yields temperature 0.7 with top-p 0.9 in a server, and other settings in training."""
    truncated = f"{server}_fp32_truncated"
    raw = f"{server}_fp32_truncated_raw"
    trained: tuple[tuple[Report, str], ...] = (
        ("raw", "without temperature and top-p"),
        ("temperature", "without top-p"),
        ("processed", "with the same sampling"),
    )
    causes: dict[tuple[Report, Report], tuple[str, ...]] = {
        ("processed", "raw"): ("temperature", "truncated_sampling"),
        ("processed", "temperature"): ("truncated_sampling",),
        ("processed", "processed"): ("healthy",),
        ("raw", "temperature"): ("temperature",),
        ("raw", "processed"): ("temperature", "truncated_sampling"),
        # The log-probs agree, but the tokens were drawn from another distribution.
        ("raw", "raw"): ("truncated_sampling", "temperature"),
    }
    reported: tuple[tuple[Report, str], ...] = (("processed", truncated), ("raw", raw))
    for report, token_set in reported:
        for training, words in trained:
            yield Case(
                name=f"{server} fp32 reports {report}, training {words}",
                token_set=token_set,
                rollout=(server, "fp32", "decoded", report),
                training=("Megatron", "fp32", "one pass", training),
                expected=causes[report, training],
            )


def table(records: Records, case: Case) -> TokenTable:
    """Returns the dump of a case."""
    tokens = records.token_set(case.token_set)
    scores = records.scores(case.token_set)
    rollout = chosen(scores, case.rollout)
    training = chosen(scores, case.training)
    parts = []
    for number, response in enumerate(tokens.responses):
        entropy = training.entropy[number] if training.entropy else None
        part = SampleParts(
            train_log_prob=training.log_probs[number],
            rollout_log_prob=rollout.log_probs[number],
            entropy=entropy,
            token=response,
            prompt=tokens.prompts[number],
            step=0,
            sample_index=number,
            group=number,
        )
        parts.append(part)
    # train.py writes both into its dumps.
    metadata = {
        "source": "studies/engines",
        "precision": case.training[1],
        "rollout_precision": case.rollout[1],
    }
    return TokenTable.from_parts(parts, metadata)


def chosen(scores: Sequence[Scores], wanted: tuple[str, Precision, str, Report]) -> Scores:
    """Returns the scores of an engine."""
    for each in scores:
        scorer = each.scorer
        if (scorer.engine, scorer.precision, scorer.method, scorer.report) == wanted:
            return each
    raise ValueError(f"the study has no log-probs of {' '.join(wanted)}: run `make study-engines`.")


def verdict(case: Case, causes: Sequence[str]) -> str:
    """Returns how right a diagnosis is.

    Args:
        case: The dump's case.
        causes: Causes of the findings, the likeliest first.
    """
    if causes[0] in case.expected:
        return "named"
    if causes[0] == "unexplained" and set(causes) & set(case.expected):
        return "candidate"
    return "misleading"


def main() -> None:
    """Writes the dumps, and the diagnosis of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--out", type=Path, default=DUMPS, help="directory of the dumps")
    options = parser.parse_args()
    rows: list[DiagnosisRow] = []
    if DIAGNOSIS.exists():
        # The rows of models that are not diagnosed now stay.
        earlier = read_rows(DIAGNOSIS, DiagnosisRow)
        rows = [row for row in earlier if row.model not in options.models]
    for model in options.models:
        for case in cases():
            dump = table(Records(options.records / model), case)
            path = options.out / model / f"{case.name.replace(' ', '_').replace(',', '')}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, dump)
            findings = diagnose(dump).findings
            row = DiagnosisRow(
                model=model,
                case=case.name,
                tokens=int(dump.valid.sum()),
                cause=findings[0].cause,
                confidence=findings[0].confidence,
                expected=" ".join(case.expected),
                verdict=verdict(case, [finding.cause for finding in findings]),
            )
            rows.append(row)
            print(f"{row.verdict}: {model}, {row.case}: {row.cause} {row.confidence:.0%}")
    write_rows(DIAGNOSIS, DiagnosisRow, rows)
    print(page.write_diagnosis(rows))


if __name__ == "__main__":
    main()
