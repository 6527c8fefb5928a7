"""Samples in files, and their inspections between engine and learner: sampling masks and staleness."""

import json
import math

import pytest
import torch

from slime_tis.hf_directory import ModelSizes
from slime_tis.trainer.data.sample import Prompt, Sample, SamplingMask
from slime_tis.trainer.data.sample_file import from_dict, load_samples, save_samples, to_dict
from slime_tis.trainer.evaluation import accuracy_metrics
from slime_tis.trainer.sample_pipeline import (
    check_sampling_masks,
    mask_earlier_tokens,
    mask_stale_samples,
)
from tests.samples import make_sample

PROMPT = Prompt(index=7, text="21>", token_ids=(1, 2, 3), label="12", metadata={"level": 3})


def sample(group, place, response_ids=(4, 5), **changes):
    values = {
        "group_index": group,
        "index": 2 * group + place,
        "response": "12",
        "rollout_log_probs": [-0.25, -1.5],
        "loss_mask": [1, 0],
        "weight_versions": [3, 4],
        "reward": 0.5,
    }
    return make_sample(PROMPT, list(response_ids), **{**values, **changes})


def test_samples_come_back_as_they_were(tmp_path):
    groups = [
        [sample(0, 0), sample(0, 1, reward=None)],
        [sample(1, 0), sample(1, 1, response_ids=(9, 9))],
    ]
    save_samples(tmp_path / "a" / "rollout.jsonl", groups)
    assert load_samples(tmp_path / "a" / "rollout.jsonl", 2, 2) == groups
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["rollout.jsonl"]
    pending = Sample(prompt_row=PROMPT, tokens=list(PROMPT.token_ids), group_index=0, index=0)
    assert from_dict(json.loads(json.dumps(to_dict(pending)))).tokens == pending.tokens


def test_files_of_another_number_of_samples_or_another_model_are_refused(tmp_path):
    save_samples(tmp_path / "x", [[sample(0, 0), sample(0, 1)]])
    with pytest.raises(
        ValueError, match=r"has 1 prompts with \[2\] samples each, but --rollout-batch-size is 4"
    ):
        load_samples(tmp_path / "x", 4, 2)
    with pytest.raises(ValueError, match="does not exist"):
        load_samples(tmp_path / "none", 4, 2)
    save_samples(tmp_path / "x", [[sample(0, 0)]])
    assert load_samples(tmp_path / "x", 1, 1, ModelSizes(vocab_size=6, context_len=5))
    with pytest.raises(ValueError, match="line 1 has token 5"):
        load_samples(tmp_path / "x", 1, 1, ModelSizes(vocab_size=5, context_len=5))
    with pytest.raises(ValueError, match="line 1 has 5 tokens, but the model's context has 4"):
        load_samples(tmp_path / "x", 1, 1, ModelSizes(vocab_size=6, context_len=4))


def test_routing_comes_back_to_the_bit(tmp_path):
    experts = torch.tensor([[[3, 1]], [[0, 255]], [[7, 2]], [[5, 6]]], dtype=torch.uint8)
    weights = torch.rand(4, 1, 2)
    rows = [
        sample(0, 0, rollout_routed_experts=experts, rollout_routing_weights=weights),
        sample(0, 1, rollout_routed_experts=experts.short()),
    ]
    save_samples(tmp_path / "x", [rows])
    first, second = load_samples(tmp_path / "x", 1, 2)[0]
    for found, wanted in (
        (first.rollout_routed_experts, experts),
        (first.rollout_routing_weights, weights),
        (second.rollout_routed_experts, experts.short()),
    ):
        assert found is not None and found.dtype == wanted.dtype and torch.equal(found, wanted)
    assert second.rollout_routing_weights is None
    assert json.loads((tmp_path / "x").read_text().splitlines()[0])["rollout_routed_experts"] == {
        "dtype": "uint8",
        "shape": [4, 1, 2],
        "base64": "AwEA/wcCBQY=",
    }


ROUTING = {"dtype": "uint8", "shape": [4, 1, 2], "base64": "AAAAAAAAAAA="}
DAMAGED = {
    "missing fields": ({"prompt_row": None, "tokens": None}, "line 1 is not a sample"),
    "another length": ({"loss_mask": [1]}, "response_length 2, rollout_log_probs 2, loss_mask 1"),
    "overflowing reward": ({"reward": 1e308}, "line 1 has the reward"),
    "reward of nan": ({"reward": math.nan}, "line 1 has the reward"),
    "reward of text": ({"reward": "1"}, "line 1 has the reward"),
    "type of a tensor": (
        {"rollout_routed_experts": ROUTING | {"dtype": "float64"}},
        "is 'float64'",
    ),
    "shape too large": (
        {"rollout_routed_experts": ROUTING | {"shape": [4, 1, 3]}},
        "cannot reshape",
    ),
    "not base64": ({"rollout_routed_experts": ROUTING | {"base64": "?"}}, "base64"),
}


@pytest.mark.parametrize(("changes", "message"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_line_is_refused(changes, message, tmp_path):
    save_samples(tmp_path / "x", [[sample(0, 0)]])
    (tmp_path / "x").write_text(json.dumps(json.loads((tmp_path / "x").read_text()) | changes))
    with pytest.raises(ValueError, match=message):
        load_samples(tmp_path / "x", 1, 1, ModelSizes(vocab_size=None, context_len=None))
    (tmp_path / "x").write_text("nonsense")
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        load_samples(tmp_path / "x", 1, 1)


def test_segments_with_prompts_of_their_own_come_back_as_one_rollout(tmp_path):
    first = sample(
        0, 0, rollout_id=0, session_id="a", train_metadata={"weight": 2}, non_generation_time=0.5
    )
    second = Sample(
        group_index=0,
        index=1,
        rollout_id=0,
        prompt=[{"role": "user", "content": "21"}],
        prompt_row=PROMPT,
        tokens=[8, 9, 4],
        response_length=1,
        loss_mask=[1],
        rollout_log_probs=[-2.0],
        weight_versions=[3],
        status=Sample.Status.FAILED,
    )
    save_samples(tmp_path / "x", [[first, second, sample(0, 2)]])
    assert load_samples(tmp_path / "x", 1, 2) == [[first, second, sample(0, 2)]]
    assert (
        json.loads((tmp_path / "x").read_text().splitlines()[0])["prompt_row"]["token_ids"] is None
    )


def masked(sets, **changes):
    return sample(
        0, 0, sampling_mask=None if sets is None else SamplingMask.from_sets(sets), **changes
    )


def test_masks_of_some_samples_are_counted_without_truncation():
    groups = [[masked([[4, 9, 8], []]), masked(None)]]  # a user's function may return masks
    metrics = check_sampling_masks(groups, truncates_sampling=False)
    assert metrics["rollout/sampling_mask_tokens"] == 3.0
    assert metrics["rollout/sampling_mask_missing"] == 1 / 2


def test_metrics_count_sets_tokens_without_one_and_tokens_outside_of_theirs():
    # response [4, 5], of which the first is trained on
    groups = [[masked([[4, 9, 8], []]), masked(None)], [masked([[9], [5]]), masked([[4], [5, 6]])]]
    assert check_sampling_masks(groups, truncates_sampling=True) == {
        "rollout/sampling_mask_tokens": 8 / 5,
        "rollout/sampling_mask_missing": 1 / 4,
        "rollout/sampling_mask_violations": 1.0,
    }
    assert check_sampling_masks([[masked(None)]], truncates_sampling=False) == {}
    assert (
        check_sampling_masks([[masked(None)]], truncates_sampling=True)[
            "rollout/sampling_mask_missing"
        ]
        == 1.0
    )


def test_a_token_outside_of_its_set_loses_log_prob_and_set_and_nothing_else_changes():
    wrong, right = masked([[9], [5, 6]]), masked([[4], [5]])
    check_sampling_masks([[wrong, right]], truncates_sampling=True)
    assert math.isnan(wrong.rollout_log_probs[0])
    assert wrong.rollout_log_probs[1] == -1.5
    assert wrong.sampling_mask == SamplingMask.from_sets([[], [5, 6]])
    assert right == masked([[4], [5]])


def test_masks_come_back_and_log_probs_that_are_missing_are_null(tmp_path):
    groups = [[masked([[4, 9, 8], []]), masked(None)]]
    save_samples(tmp_path / "x", groups)
    assert load_samples(tmp_path / "x", 1, 2) == groups
    row = json.loads((tmp_path / "x").read_text().splitlines()[0])
    assert row["sampling_mask"]["lengths"] == {
        "dtype": "int32",
        "shape": [2],
        "base64": "AwAAAAAAAAA=",
    }
    for missing in (math.nan, -math.inf, None):
        save_samples(tmp_path / "x", [[sample(0, 0, rollout_log_probs=[missing, -0.5])]])
        assert json.loads((tmp_path / "x").read_text())["rollout_log_probs"] == [None, -0.5]
        found = load_samples(tmp_path / "x", 1, 1)[0][0].rollout_log_probs
        assert math.isnan(found[0]) and found[1] == -0.5


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        pytest.param("token_ids", {"shape": [3, 1]}, "two lists of numbers", id="two dimensions"),
        pytest.param("lengths", {"base64": "AgAAAAAAAAA="}, "do not add up", id="too few ids"),
        pytest.param(
            "lengths", {"base64": "BQAAAP7///8="}, "negative numbers", id="a negative length"
        ),
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


def of_versions(versions):
    prompt = Prompt(index=0, text="", token_ids=(5,))
    return make_sample(prompt, [7] * len(versions), weight_versions=versions)


def masks(version, limit):
    groups = [[of_versions([4, 4]), of_versions([1, 4])], [of_versions([2, 3, 4]), of_versions([])]]
    masked = mask_stale_samples(groups, version, limit)
    return [[each.loss_mask for each in group] for group in groups], masked


def test_the_oldest_token_decides_and_earlier_tokens_are_masked_one_by_one():
    assert masks(version=4, limit=2) == ([[[1, 1], [0, 0]], [[1, 1, 1], []]], 1)
    assert masks(version=4, limit=0) == ([[[1, 1], [0, 0]], [[0, 0, 0], []]], 2)
    assert masks(version=400, limit=None) == ([[[1, 1], [1, 1]], [[1, 1, 1], []]], 0)
    samples = [of_versions([4, 4]), of_versions([1, 2, 4, 4]), of_versions([3, 3]), of_versions([])]
    samples[1].loss_mask = [1, 0, 1, 1]
    assert mask_earlier_tokens([samples[:2], samples[2:]]) == 1 / 7
    assert [each.loss_mask for each in samples] == [[1, 1], [0, 0, 1, 1], [1, 1], []]


def test_a_token_one_version_older_is_masked():
    sample = of_versions([3, 4, 4])
    assert mask_earlier_tokens([[sample]]) == 1 / 3
    assert sample.loss_mask == [0, 1, 1]


def test_metrics_are_means_over_the_answers():
    prompt, done, cut = (
        Prompt(index=0, text="12>", token_ids=(1, 2)),
        Sample.Status.COMPLETED,
        Sample.Status.TRUNCATED,
    )
    statuses = (done, done, done, cut, done, cut)
    samples = [
        make_sample(prompt, [3] * length, reward=float(length % 3 > 0), status=status)
        for length, status in zip((1, 2, 3, 6, 5, 6), statuses, strict=True)
    ]
    assert accuracy_metrics(samples) == {
        "accuracy": pytest.approx(3 / 6),
        "response_length": pytest.approx(23 / 6),
        "truncated_fraction": pytest.approx(2 / 6),
    }
