"""The study of live alarms: its rule for counting, its lists, and the tables of its page."""

import pytest

from slime_tis.integrations.frameworks import TRL
from slime_tis.live_health import live_rules
from studies.live_alarms.count import (
    DOCS_PAGE,
    HERE,
    PROGRAMS,
    Verdict,
    cell,
    early_alarms,
    page_tables,
    read_runs,
    totals,
    verdict,
)
from studies.live_alarms.faults import FAULTS, GENERAL, HEALTHY

RIGHT = frozenset({"shifted_tokens"})
VERDICTS = {
    "right": ([("mismatch", 4), ("shifted_tokens", 6)], "right", 2),
    "noticed": ([("mismatch", 4)], "noticed", None),
    "wrong": ([("mismatch", 4), ("temperature", 5)], "wrong", None),
    "only before the fault": ([("shifted_tokens", 3)], "missed", None),
    "missed": ([], "missed", None),
}
"""Alarms of a fault from step 4 on, the verdict, and the delay."""


@pytest.mark.parametrize(("alarms", "word", "after"), VERDICTS.values(), ids=VERDICTS)
def test_a_verdict_follows_the_rule(alarms, word, after):
    found = verdict(alarms, 4, RIGHT, GENERAL["slime_tis"])
    assert (found.word, found.after) == (word, after)


def test_alarms_before_the_fault_are_early():
    assert early_alarms([("mismatch", 3), ("temperature", 4)], 4) == ["mismatch"]


def test_a_cell_has_verdicts_delays_names():
    verdicts = [Verdict("right", 0, ("a",)), Verdict("right", 2, ("b",)), Verdict("missed")]
    assert cell(verdicts) == "right 2 of 3, missed 1 of 3, after 0 to 2: `a`, `b`"


def test_alarms_that_count_as_right_exist():
    ours = {rule.cause for rule in live_rules(TRL)}
    expected = set().union(*(case.ours for case in FAULTS.values()))
    # In the list before the rules were written: never built, and covered by no_variance.
    assert expected - ours == {"penalty", "zero_gradient"}


def test_every_case_ran_with_every_seed():
    runs = read_runs(HERE / "results.csv")
    cases = {(run.case, run.seed) for run in runs}
    names = [*FAULTS, *HEALTHY]
    assert cases == {(name, seed) for name in names for seed in (0, 1, 2)}


def test_the_page_has_the_tables_of_the_results():
    assert page_tables() in (HERE / "README.md").read_text()


def test_the_documentation_has_the_totals():
    assert totals(read_runs(HERE / "results.csv")) in DOCS_PAGE.read_text()


@pytest.mark.parametrize("program", PROGRAMS)
def test_healthy_cases_expect_no_alarm(program):
    for case in HEALTHY.values():
        assert not case.ours
        assert not case.martingale
