"""Measures which families real servers serve on this machine's processor, and draws the table.

    python -m studies.families.run --engines vllm --models gpt_oss moonlight
    python -m studies.families.run --draw

A measurement takes one to five minutes. Without --models, all that results.csv lacks are made.
"""

import argparse
import csv
import dataclasses
import tempfile
from pathlib import Path

from slime_tis.progress import print_line
from studies.collapse.report import replace_table
from studies.families.measure import ENGINES, EngineName, Measurement, measure
from studies.families.models import MODELS
from tests.runs import ROOT

RESULTS = Path(__file__).with_name("results.csv")
PAGE = ROOT / "docs" / "models.md"
TITLES: dict[EngineName, str] = {"sglang": "SGLang 0.5.23", "vllm": "vLLM 0.32"}


def main() -> None:
    """Reads the command line, measures, and writes results.csv and the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--models", nargs="+", choices=MODELS, help="measure these again")
    parser.add_argument("--draw", action="store_true", help="only write the table")
    given = parser.parse_args()
    results = read()
    if not given.draw:
        for engine in given.engines:
            for name in given.models or MODELS:
                if given.models is None and (engine, name) in results:
                    continue
                results[engine, name] = measured(engine, name)
                # After each one, so that an interrupted study continues.
                write(results)
    replace_table(PAGE, "servers", table(results))


def measured(engine: EngineName, name: str) -> Measurement:
    """Returns one measurement, with a line on the terminal."""
    with tempfile.TemporaryDirectory() as directory:
        result = measure(engine, name, Path(directory))
    print_line(f"{engine} {name}: {cell(result)}")
    return result


Results = dict[tuple[EngineName, str], Measurement]


def read() -> Results:
    """Returns the measurements in results.csv by engine and model."""
    results: Results = {}
    if not RESULTS.exists():
        return results
    with RESULTS.open(newline="") as file:
        for row in csv.DictReader(file):
            result = Measurement(
                engine="vllm" if row["engine"] == "vllm" else "sglang",
                model=row["model"],
                before=float(row["before"]) if row["before"] else None,
                after=float(row["after"]) if row["after"] else None,
                message=row["message"],
            )
            results[result.engine, result.model] = result
    return results


def write(results: Results) -> None:
    """Writes results.csv, in the order of engines and models."""
    names = [field.name for field in dataclasses.fields(Measurement)]
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        for engine in ENGINES:
            for name in MODELS:
                if (engine, name) in results:
                    writer.writerow(dataclasses.asdict(results[engine, name]))


def table(results: Results) -> str:
    """Returns the Markdown of the table, with a note for each failure."""
    notes: list[str] = []
    lines = [f"| family | {' | '.join(TITLES.values())} |", "|---|---|---|"]
    for name, model in MODELS.items():
        cells = []
        for engine in ENGINES:
            result = results.get((engine, name))
            cells.append("not run" if result is None else cell(result, notes))
        lines.append(f"| {model.title} | {' | '.join(cells)} |")
    for number, note in enumerate(notes, 1):
        lines += ["", f"{number}. `{note}`"]
    return "\n".join(lines)


def cell(result: Measurement, notes: list[str] | None = None) -> str:
    """Returns the mean differences, or why there are none; a message goes to `notes`."""
    if not result.message:
        return f"{result.before:.0e}, {result.after:.0e}"
    if notes is None:
        return f"failed: {result.message}"
    if result.message not in notes:
        notes.append(result.message)
    return f"failed ({notes.index(result.message) + 1})"


if __name__ == "__main__":
    main()
