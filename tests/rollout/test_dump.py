"""Samples in files, and their checks before training: sampling masks and staleness."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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


def make_answer(
    group: int, place: int, response_ids: Sequence[int] = (4, 5), **changes: Any
) -> Sample:
    """Sample `place` of two of a group."""
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


def save_and_load(path: Path, group: list[Sample]) -> list[Sample]:
    """Saves and loads one group, without a check of sizes."""
    save_samples(path, [group])
    (loaded,) = load_samples(path, 1, len(group))
    return loaded


def first_row(path: Path) -> dict[str, Any]:
    """The first line of a file of samples."""
    return json.loads(path.read_text().splitlines()[0])


def test_samples_come_back_as_they_were(tmp_path):
    groups = [
        [make_answer(0, 0), make_answer(0, 1, reward=None)],
        [make_answer(1, 0), make_answer(1, 1, response_ids=(9, 9))],
    ]
    save_samples(tmp_path / "a" / "rollout.jsonl", groups)
    assert load_samples(tmp_path / "a" / "rollout.jsonl", 2, 2) == groups


def test_no_partial_file_is_left(tmp_path):
    save_samples(tmp_path / "rollout.jsonl", [[make_answer(0, 0)]])
    assert [path.name for path in tmp_path.iterdir()] == ["rollout.jsonl"]


def test_a_sample_without_a_response_comes_back():
    pending = Sample(prompt_row=PROMPT, tokens=list(PROMPT.token_ids), group_index=0, index=0)
    assert from_dict(json.loads(json.dumps(to_dict(pending)))).tokens == pending.tokens


def test_another_number_of_samples_is_refused(tmp_path):
    save_samples(tmp_path / "x", [[make_answer(0, 0), make_answer(0, 1)]])
    message = r"has 1 prompts with \[2\] samples each, but --rollout-batch-size is 4"
    with pytest.raises(ValueError, match=message):
        load_samples(tmp_path / "x", 4, 2)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        load_samples(tmp_path / "none", 4, 2)


def test_a_model_with_the_tokens_is_accepted(tmp_path):
    save_samples(tmp_path / "x", [[make_answer(0, 0)]])
    assert load_samples(tmp_path / "x", 1, 1, ModelSizes(vocab_size=6, context_len=5))


@pytest.mark.parametrize(
    ("vocab_size", "context_len", "message"),
    [
        (5, 5, "line 1 has token 5"),
        (6, 4, "line 1 has 5 tokens, but the model's context has 4"),
    ],
    ids=["vocabulary", "context"],
)
def test_samples_of_a_larger_model_are_refused(tmp_path, vocab_size, context_len, message):
    save_samples(tmp_path / "x", [[make_answer(0, 0)]])
    sizes = ModelSizes(vocab_size=vocab_size, context_len=context_len)
    with pytest.raises(ValueError, match=message):
        load_samples(tmp_path / "x", 1, 1, sizes)


EXPERTS = torch.tensor([[[3, 1]], [[0, 255]], [[7, 2]], [[5, 6]]], dtype=torch.uint8)


@pytest.mark.parametrize("experts", [EXPERTS, EXPERTS.short()], ids=["uint8", "int16"])
def test_experts_come_back_to_the_bit(tmp_path, experts):
    (loaded,) = save_and_load(tmp_path / "x", [make_answer(0, 0, rollout_routed_experts=experts)])
    assert loaded.rollout_routed_experts.dtype == experts.dtype
    assert torch.equal(loaded.rollout_routed_experts, experts)
    assert loaded.rollout_routing_weights is None


def test_routing_weights_come_back_to_the_bit(tmp_path):
    weights = torch.rand(4, 1, 2)
    routing = {"rollout_routed_experts": EXPERTS, "rollout_routing_weights": weights}
    (loaded,) = save_and_load(tmp_path / "x", [make_answer(0, 0, **routing)])
    assert loaded.rollout_routing_weights.dtype == torch.float32
    assert torch.equal(loaded.rollout_routing_weights, weights)


def test_a_tensor_is_stored_with_dtype_and_shape(tmp_path):
    save_samples(tmp_path / "x", [[make_answer(0, 0, rollout_routed_experts=EXPERTS)]])
    assert first_row(tmp_path / "x")["rollout_routed_experts"] == {
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
    save_samples(tmp_path / "x", [[make_answer(0, 0)]])
    (tmp_path / "x").write_text(json.dumps(first_row(tmp_path / "x") | changes))
    with pytest.raises(ValueError, match=message):
        load_samples(tmp_path / "x", 1, 1, ModelSizes(vocab_size=None, context_len=None))


def test_a_line_that_is_not_json_is_refused(tmp_path):
    (tmp_path / "x").write_text("nonsense")
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        load_samples(tmp_path / "x", 1, 1)


@pytest.fixture
def segments() -> list[Sample]:
    """Two segments of one rollout, and another rollout; the second segment has its own prompt."""
    first = make_answer(
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
    return [first, second, make_answer(0, 2)]


def test_segments_come_back_as_one_rollout(tmp_path, segments):
    save_samples(tmp_path / "x", [segments])
    assert load_samples(tmp_path / "x", 1, 2) == [segments]


def test_tokens_of_the_prompt_are_stored_once(tmp_path, segments):
    save_samples(tmp_path / "x", [segments])
    assert first_row(tmp_path / "x")["prompt_row"]["token_ids"] is None


def with_sets(sets: list[list[int]] | None) -> Sample:
    """A sample of the tokens 4 (trained) and 5 (masked), with their sampling sets."""
    sampling_mask = None
    if sets is not None:
        sampling_mask = SamplingMask.from_sets(sets)
    return make_answer(0, 0, sampling_mask=sampling_mask)


def test_sets_that_a_user_function_returns_are_counted():
    groups = [[with_sets([[4, 9, 8], []]), with_sets(None)]]
    metrics = check_sampling_masks(groups, truncates_sampling=False)
    assert metrics["rollout/sampling_mask_tokens"] == 3.0
    assert metrics["rollout/sampling_mask_missing"] == 1 / 2


def test_metrics_of_sampling_sets():
    groups = [
        [with_sets([[4, 9, 8], []]), with_sets(None)],
        [with_sets([[9], [5]]), with_sets([[4], [5, 6]])],  # 4 is not in {9}
    ]
    assert check_sampling_masks(groups, truncates_sampling=True) == {
        "rollout/sampling_mask_tokens": 8 / 5,
        "rollout/sampling_mask_missing": 1 / 4,
        "rollout/sampling_mask_violations": 1.0,
    }


def test_no_metrics_without_sets_and_truncation():
    assert check_sampling_masks([[with_sets(None)]], truncates_sampling=False) == {}


def test_all_sets_are_missing_under_truncation():
    metrics = check_sampling_masks([[with_sets(None)]], truncates_sampling=True)
    assert metrics["rollout/sampling_mask_missing"] == 1.0


def test_a_mask_of_an_empty_response_counts_as_recorded():
    empty = make_answer(
        0,
        1,
        tokens=[1],
        response_length=0,
        loss_mask=[],
        rollout_log_probs=[],
        weight_versions=[],
        sampling_mask=SamplingMask.from_sets([]),
    )
    metrics = check_sampling_masks([[empty]], truncates_sampling=False)
    assert metrics == {
        "rollout/sampling_mask_tokens": 0.0,
        "rollout/sampling_mask_missing": 0.0,
        "rollout/sampling_mask_violations": 0.0,
    }
    assert empty.sampling_mask == SamplingMask.from_sets([])


def test_a_mask_of_too_few_positions_is_an_error():
    sample = with_sets([])  # the response has two tokens
    with pytest.raises(RuntimeError, match="size of tensor"):
        check_sampling_masks([[sample]], truncates_sampling=True)


def test_a_token_outside_of_its_set_loses_its_log_prob():
    sample = with_sets([[9], [5, 6]])
    check_sampling_masks([[sample]], truncates_sampling=True)
    assert math.isnan(sample.rollout_log_probs[0])
    assert sample.rollout_log_probs[1] == -1.5


def test_a_token_outside_of_its_set_loses_the_set():
    sample = with_sets([[9], [5, 6]])
    check_sampling_masks([[sample]], truncates_sampling=True)
    assert sample.sampling_mask == SamplingMask.from_sets([[], [5, 6]])


def test_tokens_in_their_sets_are_not_changed():
    sample = with_sets([[4], [5]])
    check_sampling_masks([[sample]], truncates_sampling=True)
    assert sample == with_sets([[4], [5]])


def test_sampling_sets_come_back(tmp_path):
    group = [with_sets([[4, 9, 8], []]), with_sets(None)]
    assert save_and_load(tmp_path / "x", group) == group


def test_sampling_sets_are_stored_as_tensors(tmp_path):
    save_samples(tmp_path / "x", [[with_sets([[4, 9, 8], []])]])
    assert first_row(tmp_path / "x")["sampling_mask"]["lengths"] == {
        "dtype": "int32",
        "shape": [2],
        "base64": "AwAAAAAAAAA=",
    }


@pytest.mark.parametrize("missing", [math.nan, -math.inf, None], ids=str)
def test_missing_log_probs_are_null_in_files(tmp_path, missing):
    save_samples(tmp_path / "x", [[make_answer(0, 0, rollout_log_probs=[missing, -0.5])]])
    assert first_row(tmp_path / "x")["rollout_log_probs"] == [None, -0.5]


@pytest.mark.parametrize("missing", [math.nan, -math.inf, None], ids=str)
def test_missing_log_probs_come_back_as_nan(tmp_path, missing):
    sample = make_answer(0, 0, rollout_log_probs=[missing, -0.5])
    (loaded,) = save_and_load(tmp_path / "x", [sample])
    assert math.isnan(loaded.rollout_log_probs[0])
    assert loaded.rollout_log_probs[1] == -0.5


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
    save_samples(tmp_path / "x", [[with_sets([[4, 9, 8], []])]])
    row = first_row(tmp_path / "x")
    row["sampling_mask"][part] |= value
    (tmp_path / "x").write_text(json.dumps(row))
    with pytest.raises(ValueError, match=message) as caught:
        load_samples(tmp_path / "x", 1, 1)
    assert "line 1" in str(caught.value)


def of_versions(versions: list[int]) -> Sample:
    """A sample with a token for each version."""
    prompt = Prompt(index=0, text="", token_ids=(5,))
    return make_sample(prompt, [7] * len(versions), weight_versions=versions)


@pytest.mark.parametrize(
    ("version", "limit", "expected", "count"),
    [
        (4, 2, [[1, 1], [0, 0], [1, 1, 1], []], 1),
        (4, 0, [[1, 1], [0, 0], [0, 0, 0], []], 2),
        (400, None, [[1, 1], [1, 1], [1, 1, 1], []], 0),
    ],
    ids=["two steps", "no step", "no limit"],
)
def test_the_oldest_token_decides_whether_a_sample_is_stale(version, limit, expected, count):
    samples = [of_versions(versions) for versions in ([4, 4], [1, 4], [2, 3, 4], [])]
    assert mask_stale_samples([samples[:2], samples[2:]], version, limit) == count
    assert [sample.loss_mask for sample in samples] == expected


def test_tokens_older_than_the_last_are_masked_one_by_one():
    samples = [of_versions(versions) for versions in ([4, 4], [1, 2, 4, 4], [3, 3], [])]
    samples[1].loss_mask = [1, 0, 1, 1]
    # one of seven trained tokens; the second of the stale ones was masked before
    assert mask_earlier_tokens([samples[:2], samples[2:]]) == 1 / 7
    assert [sample.loss_mask for sample in samples] == [[1, 1], [0, 0, 1, 1], [1, 1], []]


def test_a_token_one_version_older_is_masked():
    sample = of_versions([3, 4, 4])
    assert mask_earlier_tokens([[sample]]) == 1 / 3
    assert sample.loss_mask == [0, 1, 1]


def test_accuracy_metrics_are_means_over_the_answers():
    prompt = Prompt(index=0, text="12>", token_ids=(1, 2))
    samples = []
    for length, truncated in [(1, 0), (2, 0), (3, 0), (6, 1), (5, 0), (6, 1)]:
        status = Sample.Status.TRUNCATED if truncated else Sample.Status.COMPLETED
        reward = float(length % 3 > 0)
        samples.append(make_sample(prompt, [3] * length, reward=reward, status=status))
    assert accuracy_metrics(samples) == {
        "accuracy": pytest.approx(3 / 6),
        "response_length": pytest.approx(23 / 6),
        "truncated_fraction": pytest.approx(2 / 6),
    }
