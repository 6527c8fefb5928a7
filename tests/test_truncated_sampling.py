"""train.py with top-p and top-k, whose log-probs are taken over the sampled sets; the sets in compressed rows."""

import json
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_tis.main import train
from slime_tis.trainer.data.sample import SamplingMask

EXACT = 1e-5
"""Nats between the two engines at equal float32 weights."""
DATA = "rollout_{rollout_id}.jsonl"


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [
        pytest.param("--rollout-top-p 0.5", (2, 40), id="top-p 0.5"),
        pytest.param("--rollout-top-k 1", (1, 1), id="top-k 1"),
        pytest.param("--rollout-top-k 3 --rollout-temperature 2", (3, 3), id="top-k 3, hot"),
        pytest.param(
            "--rollout-top-p 0.8 --rollout-top-k 20 --rollout-temperature 0.6",
            (1, 20),
            id="both, cool",
        ),
        pytest.param("--rollout-top-p 0.7 --use-rollout-logprobs --use-rs", (2, 50), id="bypass"),
        pytest.param(
            "--rollout-top-p 0.7 --use-tis --num-steps-per-rollout 2", (2, 50), id="two steps"
        ),
    ],
)
def test_equal_weights_give_equal_log_probs(flags, tokens, run):
    rows = run(
        *flags.split(),
        "--rollout-precision",
        "fp32",
        "--num-rollout",
        "2",
        "--get-mismatch-metrics",
    )
    for row in rows:
        # without weights and rejection; with two steps per rollout those of π_old, which the
        # samples come from
        assert row["train/train_rollout_logprob_abs_diff"] < EXACT
        assert row["train/mismatch_k3_kl"] < 1e-9
        assert row["train/nonfinite_token_fraction"] == 0
        if "rollout/sampling_mask_tokens" in row:  # once per rollout
            assert tokens[0] <= row["rollout/sampling_mask_tokens"] <= tokens[1]
            assert (
                row["rollout/sampling_mask_missing"] == row["rollout/sampling_mask_violations"] == 0
            )
    assert "rollout/sampling_mask_tokens" in rows[-1]


def test_one_certain_token_teaches_nothing(run):
    for row in run("--rollout-top-k", "1", "--entropy-coef", "0.1", "--rollout-precision", "fp32"):
        assert row["train/entropy_loss"] == row["train/entropy_gap"] == row["train/grad_norm"] == 0


def test_samples_without_masks_are_refused_and_show_their_bias_where_it_is_allowed(
    task, run, tmp_path, capsys
):
    data = str(tmp_path / DATA)
    flags = ["--rollout-top-p", "0.8", "--rollout-precision", "fp32", "--num-rollout", "1"]
    (replayed,) = run(*flags, "--save-debug-rollout-data", data, name="recorded")
    change(tmp_path / "rollout_0.jsonl", lambda row: row.pop("sampling_mask"))
    flags += ["--load-debug-rollout-data", data]
    assert train([*task, *flags, "--output-dir", str(tmp_path / "refused")]) == 1
    assert "16 samples of the rollout data" in capsys.readouterr().err
    (biased,) = run(*flags, "--allow-truncation-bias", name="biased")
    assert biased["rollout/sampling_mask_missing"] == 1
    assert replayed["train/train_rollout_logprob_abs_diff"] < EXACT
    assert biased["train/train_rollout_logprob_abs_diff"] > 0.1
    assert abs(replayed["train/entropy_gap"]) < 0.2
    assert biased["train/entropy_gap"] > 0.3


@pytest.mark.parametrize("policy", ["reject", "neutral"])
def test_a_token_outside_of_its_set_is_left_to_the_nonfinite_policy(policy, run, tmp_path):
    data = str(tmp_path / DATA)
    flags = ["--rollout-top-k", "4", "--rollout-precision", "fp32", "--num-rollout", "1"]
    run(*flags, "--save-debug-rollout-data", data, name="recorded")
    flags += ["--use-tis", "--nonfinite-policy", policy, "--calculate-per-token-loss"]
    (right,) = run(*flags, "--load-debug-rollout-data", data, name="right")

    def spoil(row):
        first = len(row["tokens"]) - row["response_length"]
        row["tokens"][first] = next(token for token in range(5, 60) if token not in row["tokens"])

    lines = (tmp_path / "rollout_0.jsonl").read_text().splitlines()
    row = json.loads(lines[0])
    spoil(row)
    (tmp_path / "rollout_0.jsonl").write_text("\n".join([json.dumps(row), *lines[1:]]) + "\n")
    (wrong,) = run(*flags, "--load-debug-rollout-data", data, name="wrong")
    assert (
        right["rollout/sampling_mask_violations"],
        wrong["rollout/sampling_mask_violations"],
    ) == (0, 1)
    assert wrong["train/nonfinite_token_fraction"] == pytest.approx(
        1 / right["train/loss_denominator"]
    )
    assert wrong["train/loss_denominator"] == right["train/loss_denominator"]
    kept = 1 - (policy == "reject") / right["train/loss_denominator"]
    assert wrong["train/gradient_kept_fraction"] == pytest.approx(kept)
    assert wrong["train/nonfinite_gradient_steps"] == 0
    assert 0 < wrong["train/grad_norm"] < 100


def change(path, edit):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        edit(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


SETS = st.lists(st.lists(st.integers(0, 9), max_size=4, unique=True), max_size=8)


def test_masks_by_hand():
    mask = SamplingMask.from_sets([[5, 7], [], [1]])
    assert mask.token_ids.tolist() == [5, 7, 1]
    assert mask.lengths.tolist() == [2, 0, 1]
    assert mask.position_of_token().tolist() == [0, 0, 2]
    assert mask.select(torch.tensor([2, 0, 2])).sets() == [[1], [5, 7], [1]]
    assert mask.contains(torch.tensor([7, 3, 2])).tolist() == [True, True, False]
    assert mask.without(torch.tensor([True, False, False])).sets() == [[], [], [1]]
    assert mask != SamplingMask.from_sets([[5], [7], [1]])
    assert mask == SamplingMask.from_sets([[5, 7], [], [1]])


def test_a_part_of_a_mask_is_pickled_without_the_others():
    first, _ = SamplingMask.from_sets([[3, 4], list(range(100_000))]).split([1, 1])
    assert len(pickle.dumps(first)) < 2_000


@given(SETS, st.data())
def test_selection_is_that_of_a_list(sets, data):
    mask = SamplingMask.from_sets(sets)
    positions = data.draw(
        st.lists(st.integers(0, len(sets) - 1), max_size=6) if sets else st.just([])
    )
    assert mask.select(torch.tensor(positions, dtype=torch.int64)).sets() == [
        sets[i] for i in positions
    ]


@given(SETS, st.data())
def test_cat_is_the_inverse_of_split(sets, data):
    mask = SamplingMask.from_sets(sets)
    cut = data.draw(st.integers(0, len(sets)))
    parts = mask.split([cut, len(sets) - cut])
    assert [part.sets() for part in parts] == [sets[:cut], sets[cut:]]
    assert SamplingMask.cat(parts) == mask


@given(SETS, st.integers(0, 9))
def test_contains_is_membership_or_an_unrecorded_set(sets, token):
    found = SamplingMask.from_sets(sets).contains(
        torch.full((len(sets),), token, dtype=torch.int32)
    )
    assert found.tolist() == [not allowed or token in allowed for allowed in sets]
