"""slime-tis recommend: conditions of a dump, the study's nearest column, and its method."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slime_tis.analysis.diagnosis import diagnose
from slime_tis.analysis.dumps.files import write
from slime_tis.analysis.dumps.table import SampleParts, TokenTable
from slime_tis.analysis.report.comparison_study import (
    Cell,
    Column,
    Conditions,
    age_doublings,
    best_cell,
    distance,
    nearest_column,
    record,
    study,
)
from slime_tis.analysis.report.recommend import Mismatch, measured, recommendation
from slime_tis.analysis.report.student_t import t_probability, t_quantile
from slime_tis.main import main
from studies.collapse.cases import Grid
from studies.comparison.columns import STUDY


def cell(method: str, gap: float, gap_low: float = 0.0) -> Cell:
    """A method that loses a share of the best accuracy, with an interval up to 0.2 above it."""
    return Cell(
        method=method,
        flags="" if method == "standard PPO" else "--use-tis",
        relative=1 - gap,
        low=0.9 - gap,
        high=1.1 - gap,
        gap=gap,
        gap_low=gap_low,
        gap_high=gap + 0.2,
        seeds=5,
        is_worse=False,
        collapsed=0,
    )


def conditions(
    age: int = 0, precision: str | None = "fp32", steps: int = 1, stale_servers: float = 0.0
) -> Conditions:
    return Conditions(age=age, precision=precision, steps=steps, stale_servers=stale_servers)


def column(name: str, of_column: Conditions, *cells: Cell) -> Column:
    return Column(
        name=name, covers=True, conditions=of_column, sigma=(0.5, 2.0), tokens=11, cells=cells
    )


STALE = column("stale 16", conditions(age=15), cell("B", 0.0), cell("C", 0.02))
STALE_FP8 = replace(STALE, name="fp8 and stale 16", conditions=conditions(15, "fp8"))
OLDER = replace(STALE, name="stale 64", conditions=conditions(age=63))
STEPS = replace(STALE, name="four steps", conditions=conditions(age=3, steps=4))
FP8 = replace(STALE, name="fp8", conditions=conditions(0, "fp8"), sigma=(0.1, 0.2))
INT4 = replace(STALE, name="int4", conditions=conditions(0, "int4"), sigma=(0.4, 0.6))
SERVER = replace(STALE, name="stale server", conditions=conditions(stale_servers=0.25))
COLUMNS = [STALE, STALE_FP8, OLDER, STEPS, FP8, INT4, SERVER]


@pytest.mark.parametrize(
    ("of_run", "sigma", "name"),
    [
        pytest.param(conditions(15), 1.0, "stale 16", id="equal conditions"),
        pytest.param(conditions(15), 100.0, "stale 16", id="any size"),
        pytest.param(conditions(63), 0.5, "stale 64", id="age before size"),
        pytest.param(conditions(1000), 0.5, "stale 64", id="older than the study"),
        pytest.param(conditions(15, "fp8"), 0.5, "fp8 and stale 16", id="fp8 with old weights"),
        pytest.param(conditions(3, steps=4), 0.5, "four steps", id="steps per rollout"),
        pytest.param(conditions(3), 0.5, "stale 16", id="one step per rollout"),
        pytest.param(conditions(0, "int4"), 0.1, "int4", id="named precision before size"),
        pytest.param(conditions(0, "bf16"), 0.5, "fp8", id="nearest precision"),
        pytest.param(conditions(0, None), 0.1, "fp8", id="small noise of unknown precision"),
        pytest.param(conditions(0, None), 0.5, "int4", id="large noise of unknown precision"),
        pytest.param(conditions(0, None), 0.0, "fp8", id="equal engines"),
        pytest.param(conditions(15, stale_servers=0.5), 1.0, "stale server", id="server"),
    ],
)
def test_known_conditions_choose_the_column(of_run: Conditions, sigma: float, name: str) -> None:
    nearest = nearest_column(of_run, sigma, COLUMNS)
    assert nearest is not None
    assert nearest.name == name


def test_a_column_of_a_fault_is_never_chosen() -> None:
    fault = replace(STALE, covers=False)
    assert nearest_column(conditions(15), 1.0, [fault]) is None


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        pytest.param(conditions(7, "fp8"), 0.0, id="equal"),
        pytest.param(conditions(15, "fp8"), 1.0, id="twice the age"),
        pytest.param(conditions(7, "bf16"), 1.0, id="a class of precision"),
        pytest.param(conditions(7, None), 0.0, id="unknown precision"),
        pytest.param(conditions(7, "fp8", steps=4), 4.0, id="four times the steps"),
    ],
)
def test_distance_counts_doublings(other: Conditions, expected: float) -> None:
    assert distance(other, conditions(7, "fp8")) == pytest.approx(expected)


def test_distance_of_servers_is_that_of_their_shares() -> None:
    own = conditions(age=100, stale_servers=0.5)
    assert distance(own, conditions(stale_servers=0.25)) == pytest.approx(1.0)


def test_age_doublings_are_negative_for_newer_weights() -> None:
    assert age_doublings(conditions(7), conditions(15)) == pytest.approx(-1.0)


def test_standard_ppo_is_chosen_if_it_may_be_the_best() -> None:
    harmless = replace(FP8, cells=(cell("B", 0.0), cell("standard PPO", 0.09, -0.01)))
    assert best_cell(harmless, [harmless], FP8.conditions).method == "standard PPO"


@pytest.mark.parametrize(
    ("gap", "gap_low"),
    [
        pytest.param(0.09, 0.01, id="an interval above 0"),
        pytest.param(0.11, -0.5, id="a gap above the margin"),
    ],
)
def test_standard_ppo_with_a_gap_is_not_chosen(gap: float, gap_low: float) -> None:
    harmful = replace(FP8, cells=(cell("B", 0.0), cell("standard PPO", gap, gap_low)))
    assert best_cell(harmful, [harmful], FP8.conditions).method == "B"


def test_no_correction_is_not_carried_to_older_weights() -> None:
    harmless = replace(STALE, cells=(cell("B", 0.0), cell("standard PPO", 0.01)))
    assert best_cell(harmless, [harmless], conditions(15)).method == "standard PPO"
    assert best_cell(harmless, [harmless], conditions(63)).method == "B"


def test_the_record_over_all_columns_chooses_the_method() -> None:
    lossy = replace(FP8, cells=(cell("C", 0.0), cell("B", 0.5)))
    assert best_cell(STALE, [STALE, lossy], STALE.conditions).method == "C"


def test_a_method_that_ran_in_few_columns_has_a_worse_record() -> None:
    """B: 0, 0, 0, 0.02. C: 0, 0.02 has a mean of 0.01, with t(1) = 12.7 an upper end of 0.137."""
    others = [replace(FP8, name=str(i), cells=(cell("B", 0.0),)) for i in range(2)]
    both = replace(FP8, cells=(cell("C", 0.0), cell("B", 0.02)))
    columns = [STALE, both, *others]
    assert best_cell(STALE, columns, STALE.conditions).method == "B"
    few = record("C", columns)
    assert few is not None
    assert few.high == pytest.approx(0.01 + 12.706 * 0.01, rel=1e-4)


def test_one_column_is_no_record() -> None:
    assert record("B", [STALE]) is None


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (7, 2.3646), (30, 2.0423)],
    ids=str,
)
def test_quantiles_of_student_are_those_of_tables(degrees: int, quantile: float) -> None:
    assert t_quantile(0.95, degrees) == pytest.approx(quantile, abs=5e-5)


@pytest.mark.parametrize(
    ("t", "probability"),
    [(0.0, 0.0), (1e-12, 0.0), (1e12, 1.0), (float("inf"), 1.0)],
    ids=str,
)
def test_probabilities_of_student_at_extremes(t: float, probability: float) -> None:
    assert t_probability(t, 4) == pytest.approx(probability, abs=1e-9)


def mismatch(of_run: Conditions, cause: str = "stale_weights", sigma: float = 1.0) -> Mismatch:
    return Mismatch(cause=cause, conditions=of_run, k3=0.01, sigma=sigma, tokens=50.0)


def test_an_answer_starts_with_flags() -> None:
    text = recommendation(mismatch(conditions(15)), COLUMNS)
    assert text.startswith("--use-tis\n")


def test_an_answer_has_gaps_with_intervals() -> None:
    standard = replace(STALE, cells=(*STALE.cells, cell("standard PPO", 0.5, 0.4)))
    text = recommendation(mismatch(conditions(15)), [standard, FP8])
    assert "Standard PPO is 50% below the column's best accuracy (95% interval 40% to 70%)" in text
    assert "Over its 2 columns, B loses 0% on average and at most 0%" in text


def test_an_equal_column_is_no_extrapolation() -> None:
    text = recommendation(mismatch(conditions(15)), COLUMNS)
    assert "Column of the study: 'stale 16'." in text
    assert "xtrapolation" not in text


@pytest.mark.parametrize(
    ("case", "difference"),
    [
        pytest.param(
            mismatch(conditions(250)), "weights up to 63 steps old, here 250", id="older weights"
        ),
        pytest.param(
            replace(mismatch(conditions(15)), youngest=15),
            "weights of age 0 to 15, here none below 15",
            id="constant lag",
        ),
        pytest.param(
            mismatch(conditions(15, "int4")), "precision fp8, here int4", id="another precision"
        ),
        pytest.param(
            mismatch(conditions(3, steps=8)), "4 steps per rollout, here 8", id="more steps"
        ),
        pytest.param(
            mismatch(conditions(15), sigma=4.1), "σ√T 0.5 to 2, here 4.1", id="a larger mismatch"
        ),
    ],
)
def test_an_extrapolation_names_the_difference(case: Mismatch, difference: str) -> None:
    text = recommendation(case, COLUMNS)
    assert "Extrapolation: the nearest column of the study is" in text
    assert difference in text


def test_an_unknown_precision_is_stated() -> None:
    text = recommendation(mismatch(conditions(0, None), "rounding", 0.5), COLUMNS)
    assert "The rollout engine's precision is unknown; this column has int4." in text


@pytest.mark.parametrize(
    ("case", "words"),
    [
        pytest.param(mismatch(conditions(), "temperature"), "fix the cause first", id="a fault"),
        pytest.param(
            mismatch(conditions(), "rounding", 0.01), "less than in any column", id="tiny noise"
        ),
        pytest.param(
            mismatch(conditions(15), sigma=0.09), "less than in any column", id="tiny drift"
        ),
        pytest.param(
            mismatch(conditions(15), "healthy"), "the diagnosis finds no mismatch", id="healthy"
        ),
        pytest.param(
            mismatch(conditions()), "The age of the weights is unknown", id="old, age unknown"
        ),
    ],
)
def test_an_answer_without_evidence_has_no_flags(case: Mismatch, words: str) -> None:
    text = recommendation(case, COLUMNS)
    assert words in text
    assert not text.startswith("--")


def test_without_columns_the_study_does_not_cover() -> None:
    assert "does not cover" in recommendation(mismatch(conditions(15)), [])


def test_a_stale_server_gets_a_method_until_it_is_fixed() -> None:
    text = recommendation(mismatch(conditions(stale_servers=0.5), "worker"), COLUMNS)
    assert "fix the cause first" in text
    assert "Until then, if this server has old weights: --use-tis (B" in text


def test_the_packaged_study_has_the_flags_of_the_grid() -> None:
    """tests/studies/test_grids.py passes the flags of the grid to train.py."""
    grid = Grid.load(STUDY)
    assert study()
    for of_study in study():
        for of_method in of_study.cells:
            assert of_method.flags == grid.corrections[of_method.method]


def test_the_best_methods_of_the_packaged_study_have_no_gap() -> None:
    for of_study in study():
        first = of_study.cells[0]
        assert (first.gap, first.gap_low, first.gap_high) == (0, 0, 0)


IDS = 64
"""Token ids of a dump whose logits have a standard deviation of 2.5."""


def noisy_dump(
    *,
    samples: int = 256,
    tokens: int = 11,
    noise: Callable[[int], float] = lambda age: 0.3,
    age: Callable[[int], int] = lambda sample: 0,
    has_versions: bool = True,
    **metadata: str,
) -> TokenTable:
    """A dump whose rollout engine adds noise to the logits; eight samples per step from step 64."""
    random = np.random.default_rng(0)
    parts = []
    for sample in range(samples):
        step = 64 + sample // 8
        of_sample = age(sample)
        logits = random.normal(0, 2.5, (tokens, IDS))
        rollout_logits = logits + noise(of_sample) * random.normal(size=logits.shape)
        train = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        rollout = rollout_logits - np.log(np.exp(rollout_logits).sum(1, keepdims=True))
        # Gumbel's trick: the maximum is a sample of the rollout engine's distribution.
        token = (rollout + random.gumbel(size=rollout.shape)).argmax(1)
        rows = np.arange(tokens)
        part = SampleParts(
            train_log_prob=train[rows, token],
            rollout_log_prob=rollout[rows, token],
            token=token,
            entropy=-(np.exp(train) * train).sum(1),
            prompt=[1, sample],
            weight_version=[step - of_sample] * tokens if has_versions else None,
            step=step if has_versions else None,
        )
        parts.append(part)
    return TokenTable.from_parts(parts, {"source": "test", **metadata})


def answer(dump: TokenTable) -> str:
    return recommendation(measured(dump, diagnose(dump)), study())


@pytest.mark.parametrize(
    ("dump", "words"),
    [
        pytest.param(noisy_dump(rollout_precision="int4"), "study: 'int4'.", id="int4"),
        pytest.param(noisy_dump(), "precision is unknown", id="servers of unknown precision"),
        pytest.param(
            noisy_dump(tokens=100, noise=lambda age: 0.05, rollout_precision="bf16"),
            "precision fp8, here bf16",
            id="bf16 with the noise of a real model",
        ),
        pytest.param(
            noisy_dump(tokens=30, noise=lambda age: 0.2, age=lambda sample: 8),
            "weights of age 0 to 7, here none below 8",
            id="constant lag of 8 steps",
        ),
        pytest.param(
            noisy_dump(noise=lambda age: 0.01 + 0.015 * age, age=lambda sample: sample % 64),
            "study: 'stale 64'.",
            id="63 steps",
        ),
        pytest.param(
            noisy_dump(
                noise=lambda age: 0.1 + 0.04 * age,
                age=lambda sample: sample % 16,
                rollout_precision="fp8",
            ),
            "study: 'fp8 and stale 16'.",
            id="fp8 and 15 steps",
        ),
        pytest.param(
            noisy_dump(has_versions=False), "weights of unknown age", id="dump without versions"
        ),
    ],
)
def test_a_dump_of_noise_gets_an_answer(dump: TokenTable, words: str) -> None:
    text = answer(dump)
    assert words in text
    assert "fix the cause first" not in text


@pytest.mark.parametrize(
    "dump",
    [
        pytest.param(noisy_dump(noise=lambda age: 3.0), id="more noise than any precision"),
        pytest.param(
            replace(noisy_dump(), rollout_log_prob=np.full(256 * 11, -7.0, np.float32)),
            id="a constant",
        ),
    ],
)
def test_other_mismatches_are_to_be_fixed(dump: TokenTable) -> None:
    assert "fix the cause first" in answer(dump)


def test_few_tokens_get_no_recommendation() -> None:
    log_probs = [-1.0] * 29
    table = TokenTable.from_parts(
        [SampleParts(train_log_prob=log_probs, rollout_log_prob=log_probs)]
    )
    answer = recommendation(measured(table, diagnose(table)), [STALE])
    assert answer.startswith("No recommendation: it needs at least 30 trained tokens")


def test_an_unnamed_cause_is_called_uncertain() -> None:
    dump = noisy_dump(tokens=30, noise=lambda age: 0.2, age=lambda sample: 8)
    result = measured(dump, diagnose(dump))
    assert result.cause == "stale_weights"
    assert not result.is_certain
    assert "The diagnosis is not certain" in recommendation(result, study())


def with_steps(drift: list[float]) -> TokenTable:
    """A dump with one sample per step, in which π_θ has moved by `drift` nats from π_old."""
    parts = []
    for step, nats in enumerate(drift):
        old = np.full(40, -1.0)
        parts.append(
            SampleParts(
                train_log_prob=old - nats, old_log_prob=old, rollout_log_prob=old - 0.1, step=step
            )
        )
    return TokenTable.from_parts(parts, {"old_policy": "recomputed"})


@pytest.mark.parametrize(
    ("drift", "steps"),
    [
        pytest.param([0, 0, 0, 0], 1, id="one step"),
        pytest.param([0, 0.1, 0, 0.1], 2, id="two steps"),
        pytest.param([0, 0.1, 0.2, 0.3] * 2, 4, id="four steps"),
        pytest.param([0, 1e-5, 0, 1e-5], 2, id="a small learning rate"),
        pytest.param([0, 0.001, *([0, 0.1] * 5)], 2, id="warm-up"),
        pytest.param([1e-4, 1.1e-4, 0.9e-4], 1, id="other kernels in the second pass"),
        pytest.param([0.1, 0.2], 1, id="without a first step"),
    ],
)
def test_steps_per_rollout_follow_from_the_old_policy(drift: list[float], steps: int) -> None:
    dump = with_steps(drift)
    assert measured(dump, diagnose(dump)).conditions.steps == steps


def test_steps_per_rollout_of_a_run_are_its_option() -> None:
    dump = with_steps([0, 0])
    result = measured(dump, diagnose(dump), {"num_steps_per_rollout": 4})
    assert result.conditions.steps == 4


@pytest.mark.parametrize("precision", ["w4a16", "", "FP8"])
def test_an_unlisted_precision_is_unknown(precision: str) -> None:
    dump = noisy_dump(samples=40, rollout_precision=precision)
    assert measured(dump, diagnose(dump)).conditions.precision is None


@pytest.mark.parametrize("code", [-9999.0, -1e6, -np.inf, np.nan])
def test_codes_without_a_log_prob_do_not_count(code: float) -> None:
    dump = noisy_dump()
    expected = measured(dump, diagnose(dump))
    log_probs = dump.rollout_log_prob.copy()
    log_probs[0] = code
    changed = replace(dump, rollout_log_prob=log_probs)
    assert measured(changed, diagnose(changed)).k3 == pytest.approx(expected.k3, rel=0.01)


def test_the_command_recommends_for_a_dump(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights of age 0 to 15 with a mismatch that grows with age, as in the column "stale 16"."""
    dump = noisy_dump(
        noise=lambda age: 0.01 + 0.04 * age, age=lambda s: s % 16, rollout_precision="fp32"
    )
    path = tmp_path / "dump.parquet"
    write(path, dump)
    assert main(["recommend", str(path)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("--")
    assert "'stale 16'" in text


def test_the_command_takes_the_precision_of_servers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "dump.parquet"
    write(path, noisy_dump())
    assert main(["recommend", str(path), "--rollout-precision", "fp8"]) == 0
    text = capsys.readouterr().out
    assert "rollout precision fp8" in text
    assert "'fp8'" in text


def test_the_command_refuses_an_unknown_precision(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["recommend", "dump", "--rollout-precision", "fp4"])
    assert "invalid choice: 'fp4'" in capsys.readouterr().err


def test_the_command_refuses_a_missing_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recommend", "absent"]) == 2
    assert "absent" in capsys.readouterr().err
