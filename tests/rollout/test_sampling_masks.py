"""Sampling masks of a rollout: the local engine's sets, the checks before training, and the file."""

import json
import math

import pytest

from slime_tis.trainer.data.dump import load_samples, save_samples
from slime_tis.trainer.data.sampling_mask import SamplingMask
from slime_tis.trainer.samples import check_sampling_masks
from tests.rollout.test_dump import sample


def masked(sets, **changes):
    return sample(0, 0, sampling_mask=None if sets is None else SamplingMask.from_sets(sets), **changes)


def test_metrics_count_sets_tokens_without_one_and_tokens_outside_of_theirs():
    # response [4, 5], of which the first is trained on
    groups = [[masked([[4, 9, 8], []]), masked(None)], [masked([[9], [5]]), masked([[4], [5, 6]])]]
    assert check_sampling_masks(groups, truncates_sampling=True) == {
        "rollout/sampling_mask_tokens": 8 / 5,
        "rollout/sampling_mask_missing": 1 / 4,
        "rollout/sampling_mask_violations": 1.0,
    }


def test_a_token_outside_of_its_set_loses_log_prob_and_set_and_nothing_else_changes():
    wrong, right = masked([[9], [5, 6]]), masked([[4], [5]])
    check_sampling_masks([[wrong, right]], truncates_sampling=True)
    assert math.isnan(wrong.rollout_log_probs[0])
    assert wrong.rollout_log_probs[1] == -1.5
    assert wrong.sampling_mask == SamplingMask.from_sets([[], [5, 6]])
    assert right == masked([[4], [5]])


def test_nothing_is_measured_where_nothing_is_truncated():
    assert check_sampling_masks([[masked(None)]], truncates_sampling=False) == {}
    assert check_sampling_masks([[masked(None)]], truncates_sampling=True)["rollout/sampling_mask_missing"] == 1.0


def test_masks_come_back_from_a_file_as_they_were(tmp_path):
    groups = [[masked([[4, 9, 8], []]), masked(None)]]
    save_samples(tmp_path / "x", groups)
    assert load_samples(tmp_path / "x", 1, 2) == groups
    row = json.loads((tmp_path / "x").read_text().splitlines()[0])
    assert row["sampling_mask"]["lengths"] == {"dtype": "int32", "shape": [2], "base64": "AwAAAAAAAAA="}


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        pytest.param("token_ids", {"shape": [3, 1]}, "two lists of numbers", id="two dimensions"),
        pytest.param("lengths", {"base64": "AgAAAAAAAAA="}, "do not add up", id="too few ids"),
        pytest.param("lengths", {"base64": "BQAAAP7///8="}, "negative numbers", id="a negative length"),
    ],
)
def test_a_damaged_mask_is_refused_with_its_line(part, value, message, tmp_path):
    save_samples(tmp_path / "x", [[masked([[4, 9, 8], []])]])
    row = json.loads((tmp_path / "x").read_text())
    row["sampling_mask"][part] |= value
    (tmp_path / "x").write_text(json.dumps(row))
    with pytest.raises(ValueError, match=message) as caught:
        load_samples(tmp_path / "x", 1, 1)
    assert "line 1" in str(caught.value)
