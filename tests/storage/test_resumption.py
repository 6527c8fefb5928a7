"""What a resumed run reads of its checkpoint, and options that changed: kept, refused, or said."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

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


def test_a_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text(json.dumps(asdict(STATE)))
    assert read_trainer_state(tmp_path) == STATE


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": "3"}, "trainer_state.json has 'step': '3', which is not a valid value."),
        ({"step": True}, "trainer_state.json has 'step': True, which is not a valid value."),
        ({"unfinished": {}}, "trainer_state.json has 'unfinished': {}, which is not a valid value."),
        ({"first_accuracy": []}, "trainer_state.json has 'first_accuracy': [], which is not a valid value."),
        ({"run": "x" * 1000 + "\n", "step": None}, "trainer_state.json has 'step': None, which is not a valid value."),
    ],
    ids=["text for a number", "truth for a number", "mapping for a list", "list for a number", "nothing for a number"],
)
def test_a_value_of_another_type_is_named(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text(json.dumps({**asdict(STATE), **change}))
    with pytest.raises(ValueError, match=r"trainer_state\.json has") as failure:
        read_trainer_state(tmp_path)
    assert str(failure.value) == f"{tmp_path}/{words}"


@pytest.mark.parametrize(
    "text", ["[1]", "{", "", "[" * 100_000, '{"step": 1}'], ids=["list", "cut", "empty", "deep", "lacks"]
)
def test_a_file_that_is_no_state_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text(text)
    with pytest.raises(ValueError, match=r"trainer_state\.json"):
        read_trainer_state(tmp_path)


def test_options_that_a_run_has_to_keep_are_refused_with_both_values() -> None:
    saved = {"seed": 1, "rollout_seed": 5, "rollout_shuffle": False, "lr": 1.0}
    check_options(saved, {**saved, "rollout_seed": 6, "lr": 2.0})
    with pytest.raises(ValueError, match=r"^--seed is 2 but the run that --load resumes has 1, and the random state"):
        check_options(saved, {**saved, "seed": 2})
    shuffled = {**saved, "rollout_shuffle": True}
    with pytest.raises(ValueError, match=r"^--rollout-seed is 6 but the run that --load resumes has 5"):
        check_options(shuffled, {**shuffled, "rollout_seed": 6})
    with pytest.raises(ValueError, match=r"^--rollout-shuffle is True but the run that --load resumes has False"):
        check_options(saved, shuffled)


def test_other_changes_are_said_on_one_line() -> None:
    saved = {"lr": 1e-4, "save": "a", "ids": [1, 2], "gone": 1, "rm_type": "math"}
    now = {"lr": 5e-5, "save": "b", "ids": [1, 2], "new": 1, "rm_type": "x" * 100 + "\n"}
    assert changed_options(saved, now) == f"--lr 0.0001 → 5e-05, --rm-type 'math' → '{'x' * 78}…"
    assert changed_options(saved, saved) == ""
