"""The held-out generator: its faults have an effect where they say, and its dumps are valid."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from slime_tis.analysis.dumps.readers import read
from studies.diagnosis.held_out import run
from studies.diagnosis.held_out.dumps import Case, Scored, cases, make, write_dump
from studies.diagnosis.held_out.engines import Engine, Sample, score
from studies.diagnosis.held_out.models import (
    ANSWER,
    END,
    EOS,
    FIRST_HALF,
    SECOND_HALVES,
    SMOLLM2,
    TINY,
    WORD,
    Task,
    World,
    make_tiny,
)
from studies.diagnosis.held_out.planted import FAULTS, PAIRS, add
from tests.runs import ROOT

ANNOUNCED = {
    "argmax_log_prob",
    "attention_scale",
    "chunk_boundaries",
    "log_prob_factor",
    "packed_neighbors",
    "padded_vocabulary",
    "placeholder_log_prob",
    "several_inputs",
    "template_per_turn",
    "tensor_rows",
    "thinking_removed",
    "untied_head",
}
Worlds = Callable[[str], World]


@pytest.fixture(scope="module")
def world_of(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    """Barely trained models by family."""
    directory = tmp_path_factory.mktemp("held_out")
    worlds: dict[str, World] = {}

    def world(family: str) -> World:
        if family not in worlds:
            worlds[family] = make_tiny(
                3, family, directory / family, taught=12, steps=3, samples=4, max_response=8
            )
        return worlds[family]

    return world


def scripted(world: World, form: str) -> list[Sample]:
    """Samples of a step between others with given responses instead of sampled ones."""
    rng = random.Random(7)
    samples = []
    for index in range(4):
        task: Task = world.task(rng, form)
        thoughts = [WORD + 5, WORD + 6, ANSWER] if form == "reasoning" else []
        repeated = [WORD + 8, WORD + 8, WORD + 8, FIRST_HALF, SECOND_HALVES + 1]
        first = [*thoughts, *repeated, WORD + 9, WORD + index]
        response = first
        mask = [1] * len(first)
        turn_starts = []
        if task.followup:
            response = [*first, END, *task.followup]
            mask = [1] * (len(first) + 1) + [0] * len(task.followup)
            turn_starts = [len(response)]
        response = [*response, *range(WORD + 20, WORD + 26), EOS]
        mask += [1] * (len(response) - len(mask))
        samples.append(
            Sample(
                task=task,
                step=1,
                index=index,
                response=response,
                mask=mask,
                turn_starts=turn_starts,
            )
        )
    for sample in samples:
        sample.neighbors = [each for each in samples if each is not sample]
    return samples


def reported(engine: Engine, samples: list[Sample]) -> list[Sample]:
    """The samples with the engine's values."""
    for sample, (values, _) in zip(samples, score(engine, samples), strict=True):
        sample.log_probs = values
    engine.report(samples, random.Random(1))
    return samples


def differences(clean: list[Sample], faulty: list[Sample]) -> list[float]:
    """|Δ| of trained tokens; another mask or response counts as infinite."""
    values = []
    for first, second in zip(clean, faulty, strict=True):
        if first.mask != second.mask or first.response != second.response:
            return [np.inf]
        for place, trained in enumerate(first.mask):
            if trained:
                values.append(abs(first.log_probs[place] - second.log_probs[place]))
    return values


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_changes_what_is_reported(name, world_of):
    fault = FAULTS[name]
    world = world_of(fault.families[0])
    torch.manual_seed(0)
    # The barely trained model is nearly uniform, which hides truncation of likely tokens.
    clean = Engine(model=world.at, temperature=0.2 * fault.temperature)
    faulty = fault.build(world, clean)
    expected = reported(clean, scripted(world, fault.form))
    actual = reported(faulty, scripted(world, fault.form))
    values = differences(expected, actual)
    largest = np.nanmax(np.nan_to_num(values, nan=np.inf))
    if fault.silent:
        assert largest == 0
    else:
        assert largest > 1e-4


def case(name: str, family: str = "llama", **options: str) -> Case:
    return Case(
        seed=3,
        family=family,
        names=(name,),
        kind=FAULTS[name].kind,
        sides=("rollout",),
        **options,  # type: ignore[arg-type]
    )


def largest_differences(rows: list[Scored], is_faulty: bool) -> float:
    values = [0.0]
    for row in rows:
        if row.is_faulty == is_faulty:
            values.append(float(np.abs(np.subtract(row.train, row.sample.log_probs)).max()))
    return max(values)


@pytest.mark.parametrize("scope", ["all", "later", "part", "server"])
def test_a_scope_limits_the_fault(scope, world_of):
    rows = make(case("BOS missing", scope=scope), world_of("llama"))
    assert largest_differences(rows, is_faulty=True) > 1e-3
    assert largest_differences(rows, is_faulty=False) < 1e-5


def test_a_later_fault_spares_the_first_step(world_of):
    rows = make(case("BOS missing", scope="later"), world_of("llama"))
    assert {row.sample.step for row in rows if row.is_faulty} == {1, 2}


def test_training_can_have_the_fault(world_of):
    planted = replace(case("BOS missing"), sides=("training",))
    rows = make(planted, world_of("llama"))
    world = world_of("llama")
    clean = Engine(model=world.at)
    first = [row for row in rows if row.sample.step == 0]
    for row, (values, _) in zip(first, score(clean, [row.sample for row in first]), strict=True):
        assert row.sample.log_probs == pytest.approx(values, abs=1e-5)


def test_dumps_depend_on_the_seed_only(world_of):
    first = make(case("dropout in the rollout"), world_of("llama"))
    second = make(case("dropout in the rollout"), world_of("llama"))
    assert [row.sample.log_probs for row in first] == [row.sample.log_probs for row in second]
    assert [row.train for row in first] == [row.train for row in second]


@pytest.mark.parametrize(
    ("hidden", "missing"),
    [
        ("", []),
        ("entropy", ["entropy"]),
        ("versions", ["weight_version"]),
        ("tokens", ["entropy", "token"]),
        ("entropy and versions", ["entropy", "weight_version"]),
    ],
)
def test_a_dump_lacks_the_hidden_columns(hidden, missing, world_of, tmp_path: Path):
    planted = case("BOS missing", hidden=hidden)
    path = tmp_path / "dump.parquet"
    write_dump(planted, make(planted, world_of("llama")), path)
    table = read(path)
    absent = []
    for column in ("entropy", "token", "weight_version"):
        if getattr(table, column) is None:
            absent.append(column)
    assert absent == missing
    assert len(table) == 12


def test_two_faults_cannot_have_one_name():
    fault = FAULTS["BOS missing"]
    with pytest.raises(ValueError, match="BOS missing"):
        add("named", "BOS missing", fault.build)


@pytest.mark.parametrize("family", ["tiny", SMOLLM2])
def test_a_seed_has_each_case_once(family):
    planted = [each.planted for each in cases(200, family)]
    assert len(planted) == len(set(planted))


def test_pairs_share_a_family():
    for first, second in PAIRS:
        assert {*FAULTS[first].families} & {*FAULTS[second].families} & {*TINY}


def test_accepted_causes_are_documented_or_announced():
    page = (ROOT / "docs" / "diagnosis.md").read_text()
    accepted = set()
    for fault in FAULTS.values():
        accepted |= fault.accepts | fault.near
    undocumented = {cause for cause in accepted - ANNOUNCED if f"`{cause}`" not in page}
    assert undocumented == set()


@pytest.mark.parametrize(
    ("name", "cause", "expected"),
    [
        ("BOS missing", "other_prompt", "right"),
        ("BOS missing", "unexplained", "unexplained"),
        ("BOS missing", "healthy", "missed"),
        ("BOS missing", "temperature", "misleading"),
        ("dropout in training", "rounding", "near"),
        ("watermark", "unexplained", "right"),
        ("watermark", "penalty", "near"),
        ("log-probs divided by 0.7", "unexplained", "unexplained"),
    ],
)
def test_grades_of_faults(name, cause, expected):
    assert run.grade(case(name), cause, "") == expected


@pytest.mark.parametrize(
    ("cause", "detail", "expected"),
    [
        ("healthy", "", "right"),
        ("rounding", "bf16 or int8", "right"),
        ("rounding", "fp8", "near"),
        ("unexplained", "", "unexplained"),
        ("temperature", "", "misleading"),
    ],
)
def test_grades_of_a_healthy_bf16_run(cause, detail, expected):
    assert run.healthy_grade(frozenset(["bf16"]), cause, detail) == expected


def test_rounding_is_a_false_alarm_between_equal_engines():
    assert run.healthy_grade(frozenset(), "rounding", "bf16") == "misleading"


@pytest.mark.parametrize(
    ("count", "total", "low", "high"),
    [(8, 10, 0.4902, 0.9433), (0, 20, 0.0, 0.1611), (20, 20, 0.8389, 1.0)],
    ids=["eight of ten", "none", "all"],
)
def test_wilson_intervals(count, total, low, high):
    assert run.wilson(count, total) == pytest.approx((low, high), abs=1e-4)
