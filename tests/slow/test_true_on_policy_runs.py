"""--true-on-policy over layouts, micro-batches, shared prompts, resumption and long prompts."""

import itertools
import json
import random
from pathlib import Path

import pytest

from tests.runs import make_task, metrics_of, run_apart, training_metrics

MISMATCH = "train/train_rollout_logprob_abs_diff"
PRECISIONS = {
    "float32": ["--rollout-precision", "fp32"],
    "bfloat16": ["--bf16", "--rollout-precision", "bf16"],
}
MICRO_BATCHES = {
    "one sample": ["--micro-batch-size", "1"],
    "four samples": ["--micro-batch-size", "4"],
    "token budget": ["--use-dynamic-batch-size", "--max-tokens-per-gpu", "200"],
}
SHARING = {"shared": ["--share-prompts"], "separate": ["--no-share-prompts"]}
LAYOUTS = {
    "one rank": (1, []),
    "two data-parallel ranks": (2, []),
    "two tensor-parallel ranks": (2, ["--tensor-model-parallel-size", "2"]),
    "distributed optimizer": (2, ["--use-distributed-optimizer"]),
}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A task with prompts of 1 to 60 digits, a tied and odd vocabulary, and odd sizes."""
    directory = tmp_path_factory.mktemp("mixed")
    task = make_task(directory, vocab_size=67, num_key_value_heads=2, tie_word_embeddings=True)
    chance = random.Random(2)
    lines = []
    for _ in range(32):
        digits = "".join(chance.choices("0123456789", k=chance.randint(1, 60)))
        lines.append(json.dumps({"prompt": f"<bos>{digits}>", "label": digits}))
    Path(directory / "train.jsonl").write_text("\n".join(lines))
    return [*task, "--true-on-policy", "--rollout-max-response-len", "30", "--num-rollout", "4"]


def assert_no_mismatch(rows):
    assert len(rows) >= 3
    assert max(row[MISMATCH] for row in rows) == 0.0


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("micro", "sharing"), itertools.product(MICRO_BATCHES, SHARING))
def test_micro_batches_have_equal_log_probs(mixed, tmp_path, precision, micro, sharing):
    flags = [*mixed, *PRECISIONS[precision], *MICRO_BATCHES[micro], *SHARING[sharing]]
    assert_no_mismatch(metrics_of(flags, tmp_path / "run"))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_have_equal_log_probs(mixed, tmp_path, precision, layout):
    ranks, flags = LAYOUTS[layout]
    rows = metrics_of([*mixed, *PRECISIONS[precision], *flags], tmp_path / "run", ranks)
    assert_no_mismatch(rows)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_truncated_sampling_has_equal_log_probs(mixed, tmp_path, precision, ranks):
    flags = [*mixed, *PRECISIONS[precision], "--tensor-model-parallel-size", str(ranks)]
    flags += ["--rollout-top-p", "0.9", "--rollout-top-k", "20", "--rollout-temperature", "0.7"]
    assert_no_mismatch(metrics_of(flags, tmp_path / "run", ranks))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_resumed_run_equals_an_uninterrupted_one(mixed, tmp_path, precision):
    flags = [*mixed, *PRECISIONS[precision]]
    expected = metrics_of(flags, tmp_path / "whole")
    saved = ["--save", str(tmp_path / "saved"), "--load", str(tmp_path / "saved")]
    first = metrics_of([*flags, *saved, "--num-rollout", "2"], tmp_path / "first")
    second = metrics_of([*flags, *saved], tmp_path / "second")
    assert_no_mismatch(first + second)
    for row, whole in zip(first + second, expected, strict=True):
        if precision == "float32":
            assert training_metrics(row) == training_metrics(whole)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputed_layers_have_equal_log_probs(mixed, tmp_path, recompute):
    flags = [*mixed, *PRECISIONS["float32"], "--recompute-granularity", recompute]
    if recompute == "full":
        flags += ["--recompute-method", "uniform", "--recompute-num-layers", "1"]
    assert_no_mismatch(metrics_of(flags, tmp_path / "run"))


def test_two_threads_have_equal_log_probs_or_are_refused(mixed, tmp_path):
    flags = [*mixed, *PRECISIONS["float32"], "--num-threads", "2"]
    result = run_apart(flags, tmp_path / "run")
    assert result.returncode == 0 or "for another batch (--num-threads 2)" in result.stderr
