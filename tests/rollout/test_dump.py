"""Samples written to a file and read back."""

import json
import math
from pathlib import Path

import pytest

from slime_tis.rollout.dump import load_samples, save_samples
from slime_tis.rollout.sample import Prompt, Sample


def sample(group: int, place: int, **changes: object) -> Sample:
    values = {
        "prompt": Prompt(index=7, text="21>", token_ids=(1, 2, 3), label="12", metadata={"level": 3}),
        "group_index": group,
        "sample_index": 2 * group + place,
        "response_ids": [4, 5],
        "response": "12",
        "rollout_log_probs": [-0.25, -1.5],
        "loss_mask": [1, 0],
        "weight_versions": [3, 4],
        "finish_reason": "stop",
        "reward": 0.5,
    }
    return Sample(**{**values, **changes})  # type: ignore[arg-type]


def test_samples_come_back_as_they_were(tmp_path: Path) -> None:
    groups = [[sample(0, 0), sample(0, 1, reward=None)], [sample(1, 0), sample(1, 1, response_ids=[9, 9])]]
    save_samples(tmp_path / "a" / "rollout.jsonl", groups)
    assert load_samples(tmp_path / "a" / "rollout.jsonl", 2, 2) == groups
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["rollout.jsonl"]


def test_a_log_prob_that_is_not_finite_is_null_in_the_file_and_nan_after_it(tmp_path: Path) -> None:
    save_samples(tmp_path / "x", [[sample(0, 0, rollout_log_probs=[float("nan"), float("-inf")])]])
    assert json.loads((tmp_path / "x").read_text())["rollout_log_probs"] == [None, None]
    assert [math.isnan(value) for value in load_samples(tmp_path / "x", 1, 1)[0][0].rollout_log_probs] == [True, True]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "line 2 is not a sample"),
        ('{"prompt": {}}', "line 2 is not a sample"),
    ],
)
def test_a_bad_line_is_named(line: str, message: str, tmp_path: Path) -> None:
    save_samples(tmp_path / "x", [[sample(0, 0)]])
    with open(tmp_path / "x", "a") as lines:
        lines.write(line + "\n")
    with pytest.raises(ValueError, match=message):
        load_samples(tmp_path / "x", 1, 1)


def test_lists_of_different_lengths_are_named(tmp_path: Path) -> None:
    save_samples(tmp_path / "x", [[sample(0, 0, loss_mask=[1])]])
    with pytest.raises(ValueError, match="response_ids 2, rollout_log_probs 2, loss_mask 1"):
        load_samples(tmp_path / "x", 1, 1)


def test_another_number_of_samples_is_refused(tmp_path: Path) -> None:
    save_samples(tmp_path / "x", [[sample(0, 0), sample(0, 1)]])
    with pytest.raises(ValueError, match=r"has 1 prompts with \[2\] samples each, but --rollout-batch-size is 4"):
        load_samples(tmp_path / "x", 4, 2)
    with pytest.raises(ValueError, match="does not exist"):
        load_samples(tmp_path / "none", 4, 2)
