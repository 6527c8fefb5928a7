"""The trainer's state of a checkpoint, and options that changed: refused or reported."""

import json
from dataclasses import asdict

import pytest

from slime_tis.trainer.storage.resumption import TrainerState, changed_options, check_options, read_trainer_state

STATE = TrainerState(
    run="a",
    step=3,
    rollout_id=3,
    dataset={"epoch": 0, "position": 2},
    unfinished=[],
    evaluation_due=False,
    sampler_weight_version=2,
    first_accuracy=None,
    token_budget=512,
    options={"lr": 1e-4},
    model="0",
)


def test_a_state_is_read_as_it_was_written(tmp_path):
    (tmp_path / "trainer_state.json").write_text(json.dumps(asdict(STATE)))
    assert read_trainer_state(tmp_path) == STATE


@pytest.mark.parametrize("change", [{"step": "3"}, {"unfinished": {}}, {"first_accuracy": []}], ids=str)
def test_a_value_of_another_type_is_named(change, tmp_path):
    (tmp_path / "trainer_state.json").write_text(json.dumps({**asdict(STATE), **change}))
    with pytest.raises(ValueError, match=rf"trainer_state\.json: {next(iter(change))}: "):
        read_trainer_state(tmp_path)


def test_options_that_a_run_must_keep_are_refused_with_both_values():
    saved = {"seed": 1, "rollout_seed": 5, "rollout_shuffle": False, "lr": 1.0}
    check_options(saved, {**saved, "rollout_seed": 6, "lr": 2.0})
    shuffled = {**saved, "rollout_shuffle": True}
    for before, now, words in (
        (saved, {**saved, "seed": 2}, "--seed is 2 .* has 1"),
        (shuffled, {**shuffled, "rollout_seed": 6}, "--rollout-seed is 6 .* has 5"),
        (saved, shuffled, "--rollout-shuffle is True"),
    ):
        with pytest.raises(ValueError, match=words):
            check_options(before, now)


def test_other_changes_are_one_line():
    saved = {"lr": 1e-4, "save": "a", "ids": [1, 2], "gone": 1, "rm_type": "math"}
    now = {"lr": 5e-5, "save": "b", "ids": [1, 2], "new": 1, "rm_type": "xyz\n"}
    assert changed_options(saved, now) == "--lr 0.0001 → 5e-05, --rm-type 'math' → 'xyz\\n'"
    assert changed_options(saved, saved) == ""
