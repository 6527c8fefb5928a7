"""Writes the figure and the tables of the page, and the table that `recommend` reads.

python -m studies.comparison.compare    # part of `make docs`
"""

import json
from collections.abc import Sequence
from dataclasses import asdict

from slime_tis.atomic_files import write_atomically
from studies.collapse.cases import ROOT, Grid, Study
from studies.collapse.report import replace_table
from studies.collapse.results import Row, read_table
from studies.comparison import page_tables, rule_tests
from studies.comparison.columns import STUDY, columns, sorting_columns
from studies.comparison.coverage import coverage_table, residuals_of
from studies.comparison.heat_map import draw
from studies.comparison.marked_numbers import fill_page, values_of

EVIDENCE = ROOT / "slime_tis" / "analysis" / "report" / "comparison_study.json"
"""The columns of the study, as `slime-tis recommend` reads them."""
SWEEP = Study(STUDY.directory / "sweep")
PAGES = (STUDY.page, ROOT / "docs" / "choosing.md")
"""Pages with marked numbers."""
MAIN = ("stale 16", "stale 64", "fp8", "fp8 and stale 16", "int4")
"""The columns of the first table."""


def main() -> None:
    rows = [*read_table(STUDY.results).values()]
    sweep_rows = [*read_table(SWEEP.results).values()]
    grid = Grid.load(STUDY)
    compared = columns(rows, grid)
    seen = sorting_columns(compared)
    evidence = [asdict(column) for column in seen]
    text = json.dumps(evidence, indent=1, ensure_ascii=False)
    write_atomically(EVIDENCE, text + "\n")
    print(EVIDENCE)
    print(draw(compared, STUDY.picture))
    for name, table in tables(rows, sweep_rows, grid).items():
        print(replace_table(STUDY.page, name, table))
    print(replace_table(STUDY.page, "coverage", coverage_table(residuals_of(rows))))
    numbers = values_of(compared, seen)
    for page in PAGES:
        print(fill_page(page, numbers))


def tables(rows: Sequence[Row], sweep_rows: Sequence[Row], grid: Grid) -> dict[str, str]:
    """The tables of the page by name, as Markdown, except the simulated coverage."""
    compared = columns(rows, grid)
    seen = sorting_columns(compared)
    others = [column for column in compared if column not in seen]
    first = [column for column in seen if column.name in MAIN]
    rest = [column for column in seen if column not in first]
    early_rows = [row for row in rows if row.date < rule_tests.RULE_DATE]
    late_rows = [row for row in rows if row.date >= rule_tests.RULE_DATE]
    early = sorting_columns(columns(early_rows, grid))
    return {
        "results": page_tables.results(first),
        "results of other tasks": page_tables.results(others),
        "other mismatches": page_tables.results(rest),
        "comparisons": page_tables.comparisons(compared),
        "records": page_tables.records(seen),
        "growth of on-policy training": page_tables.growth(rows),
        "held-out columns": rule_tests.answers(seen, others),
        "later seeds": rule_tests.later_seeds(early, early_rows, late_rows, grid),
        "predictors": page_tables.predictors(rows, compared),
        "sweep": page_tables.sweep(sweep_rows),
        "cost": page_tables.cost([*rows, *sweep_rows]),
    }


if __name__ == "__main__":
    main()
