"""The table of all benchmarks: README.md quotes it, and processors are kept apart."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import summary
from benchmarks.summary import Measurement

ROW = Measurement(
    subject="training step, sort digits",
    contender="TRL GRPOTrainer",
    processor="AMD EPYC (family 26, model 2)",
    threads="1",
    unit="s (CPU)",
    median=0.8139,
    lowest=0.779,
    highest=0.849,
    date="2026-11-27",
    commit="abc1234",
)
OURS = replace(ROW, contender=summary.OURS, median=0.4265, lowest=None, highest=None)


def test_readme_quotes_the_result_files() -> None:
    page = summary.README.read_text(encoding="utf-8")
    assert summary.with_quotation(page, summary.measurements()) == page, (
        "write it with: python -m benchmarks.summary"
    )


def test_table_page_has_all_rows_of_the_result_files() -> None:
    page = summary.TABLE.read_text(encoding="utf-8")
    assert page == summary.complete_table(summary.measurements()), (
        "write it with: python -m benchmarks.summary"
    )


def test_row_shows_median_range_threads_date() -> None:
    assert summary.line(ROW) == (
        "| training step, sort digits | TRL GRPOTrainer | 0.814 s (CPU) | 0.779 to 0.849"
        " | 1 | 2026-11-27 | abc1234 |"
    )


def test_readme_has_one_line_for_a_run() -> None:
    assert summary.quotation([OURS, ROW]).splitlines()[2:] == [
        "| training step, sort digits, s (CPU) | 0.426 | TRL GRPOTrainer 0.814"
        " | AMD EPYC (family 26, model 2) | 2026-11-27 |"
    ]


def test_row_of_one_round_has_no_range() -> None:
    assert "| 0.426 s (CPU) |  | 1 |" in summary.line(OURS)


def test_processors_have_sections_of_their_own() -> None:
    intel = replace(ROW, processor="Intel Xeon with AMX", median=0.5)
    page = summary.complete_table([ROW, intel])
    amd_section = page.split("## AMD EPYC (family 26, model 2)\n")[1].split("\n## ")[0]
    assert "0.814 s" in amd_section
    assert "0.500 s" not in amd_section


def test_readme_has_the_newest_run_of_each_maker() -> None:
    older = replace(ROW, date="2026-11-23", commit="old")
    intel = replace(ROW, processor="Intel Xeon with AMX", date="2026-11-21")
    assert summary.quoted([older, ROW, intel]) == [ROW, intel]


def test_of_two_runs_of_a_day_the_last_one_is_quoted() -> None:
    later = replace(ROW, commit="0000000")
    assert summary.quoted([ROW, later]) == [later]


def test_readme_quotes_runs_with_one_thread() -> None:
    two_threads = replace(ROW, threads="2", date="2026-11-28")
    assert summary.quoted([ROW, two_threads]) == [ROW]


def test_run_without_its_peer_is_not_quoted() -> None:
    with_peer = [replace(OURS, date="2026-11-23"), replace(ROW, date="2026-11-23")]
    assert summary.quoted([*with_peer, OURS]) == with_peer


def test_ours_comes_first_in_a_run_that_began_with_its_peer() -> None:
    assert summary.quoted([ROW, OURS]) == [OURS, ROW]


def test_page_without_a_place_for_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="put the lines <!-- benchmarks"):
        summary.with_quotation("# slime_tis\n", [ROW])


def test_table_is_written_again_without_a_change(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- benchmarks.summary -->\nold\n<!-- end -->\nb\n")
    summary.main(tmp_path / "table.md", readme)
    first = readme.read_text()
    summary.main(tmp_path / "table.md", readme)
    assert readme.read_text() == first
    assert first.startswith("a\n") and first.endswith("b\n") and "old" not in first
