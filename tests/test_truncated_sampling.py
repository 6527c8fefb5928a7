"""train.py with top-p and top-k: log-probs over the sampled sets, and these sets as tensors."""

import json
import pickle
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_tis.main import train
from slime_tis.trainer.data.sample import SamplingMask
from tests.runs import run_here

Row = dict[str, float]

EXACT = 1e-5
"""Nats between the two engines at equal float32 weights."""
DATA = "rollout_{rollout_id}.jsonl"


CUTS = {
    # flags, smallest and largest mean size of a set
    "top-p 0.5": ("--rollout-top-p 0.5", (2, 40)),
    "top-k 1": ("--rollout-top-k 1", (1, 1)),
    "top-k 3, hot": ("--rollout-top-k 3 --rollout-temperature 2", (3, 3)),
    "both, cool": (
        "--rollout-top-p 0.8 --rollout-top-k 20 --rollout-temperature 0.6",
        (1, 20),
    ),
    "bypass": ("--rollout-top-p 0.7 --use-rollout-logprobs --use-rs", (2, 50)),
    "two steps": ("--rollout-top-p 0.7 --use-tis --num-steps-per-rollout 2", (2, 50)),
}


@dataclass
class TruncatedRun:
    """Two rollouts by engines of equal weights."""

    rows: list[Row]
    bounds: tuple[float, float]
    """Smallest and largest mean size of a set."""

    def values(self, name: str) -> list[float]:
        """A metric of every step, or of every rollout."""
        return [row[name] for row in self.rows if name in row]


@pytest.fixture(scope="module", params=CUTS.values(), ids=list(CUTS))
def truncated(
    request: pytest.FixtureRequest, task: list[str], tmp_path_factory: pytest.TempPathFactory
) -> TruncatedRun:
    flags, bounds = request.param
    more = ["--rollout-precision", "fp32", "--num-rollout", "2", "--get-mismatch-metrics"]
    rows = run_here([*task, *flags.split(), *more], tmp_path_factory.mktemp("truncated") / "run")
    return TruncatedRun(rows, bounds)


def test_equal_weights_give_equal_log_probs(truncated):
    # Without weights and rejection. With two steps per rollout these are the log-probs of π_old,
    # which the samples come from.
    assert max(truncated.values("train/train_rollout_logprob_abs_diff")) < EXACT
    assert max(truncated.values("train/mismatch_k3_kl")) < 1e-9
    assert set(truncated.values("train/nonfinite_token_fraction")) == {0}


def test_every_sampled_token_is_in_a_recorded_set(truncated):
    assert set(truncated.values("rollout/sampling_mask_missing")) == {0}
    assert set(truncated.values("rollout/sampling_mask_violations")) == {0}


def test_top_p_or_top_k_bounds_the_mean_size_of_sets(truncated):
    smallest, largest = truncated.bounds
    sizes = truncated.values("rollout/sampling_mask_tokens")
    assert smallest <= min(sizes)
    assert max(sizes) <= largest


def test_one_certain_token_teaches_nothing(run):
    rows = run("--rollout-top-k", "1", "--entropy-coef", "0.1", "--rollout-precision", "fp32")
    for name in ("entropy_loss", "entropy_gap", "grad_norm"):
        assert {row[f"train/{name}"] for row in rows} == {0}


TOP_P = ["--rollout-top-p", "0.8", "--rollout-precision", "fp32", "--num-rollout", "1"]


@dataclass
class RecordedRun:
    """A run with top-p, and its samples without the sampled sets."""

    row: Row
    unmasked: str
    """Value of --load-debug-rollout-data."""


@pytest.fixture(scope="module")
def recorded(task: list[str], tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    directory = tmp_path_factory.mktemp("recorded")
    data = str(directory / DATA)
    (row,) = run_here([*task, *TOP_P, "--save-debug-rollout-data", data], directory / "run")
    change(directory / "rollout_0.jsonl", lambda sample: sample.pop("sampling_mask"))
    return RecordedRun(row, data)


@pytest.fixture(scope="module")
def biased(recorded: RecordedRun, task: list[str], tmp_path_factory: pytest.TempPathFactory) -> Row:
    """The metrics of a run that trains on samples without their sets."""
    flags = [*task, *TOP_P, "--load-debug-rollout-data", recorded.unmasked]
    output = tmp_path_factory.mktemp("biased") / "run"
    (row,) = run_here([*flags, "--allow-truncation-bias"], output)
    return row


def test_samples_without_masks_are_refused(recorded, task, tmp_path, capsys):
    flags = [*TOP_P, "--load-debug-rollout-data", recorded.unmasked]
    assert train([*task, *flags, "--output-dir", str(tmp_path / "refused")]) == 1
    assert "16 samples of the rollout data" in capsys.readouterr().err


def test_missing_masks_are_counted(biased):
    assert biased["rollout/sampling_mask_missing"] == 1


def test_samples_without_masks_have_biased_log_probs(recorded, biased):
    assert recorded.row["train/train_rollout_logprob_abs_diff"] < EXACT
    assert biased["train/train_rollout_logprob_abs_diff"] > 0.1


def test_samples_without_masks_have_a_gap_of_entropy(recorded, biased):
    assert abs(recorded.row["train/entropy_gap"]) < 0.2
    assert biased["train/entropy_gap"] > 0.3


@dataclass
class ViolatedRun:
    """Two runs on the same samples: as recorded, and with one token outside of its set."""

    policy: str
    right: Row
    wrong: Row


@pytest.fixture(scope="module", params=["reject", "neutral"])
def violated(
    request: pytest.FixtureRequest, task: list[str], tmp_path_factory: pytest.TempPathFactory
) -> ViolatedRun:
    directory = tmp_path_factory.mktemp("violated")
    data = str(directory / DATA)
    flags = [*task, "--rollout-top-k", "4", "--rollout-precision", "fp32", "--num-rollout", "1"]
    run_here([*flags, "--save-debug-rollout-data", data], directory / "recorded")
    flags += ["--use-tis", "--nonfinite-policy", request.param, "--calculate-per-token-loss"]
    flags += ["--load-debug-rollout-data", data]
    (right,) = run_here(flags, directory / "right")

    path = directory / "rollout_0.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    tokens = rows[0]["tokens"]
    first = len(tokens) - rows[0]["response_length"]
    tokens[first] = next(token for token in range(5, 60) if token not in tokens)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (wrong,) = run_here(flags, directory / "wrong")
    return ViolatedRun(request.param, right, wrong)


def test_tokens_outside_of_their_sets_are_counted(violated):
    assert violated.right["rollout/sampling_mask_violations"] == 0
    assert violated.wrong["rollout/sampling_mask_violations"] == 1


def test_a_token_outside_of_its_set_is_nonfinite(violated):
    fraction = violated.wrong["train/nonfinite_token_fraction"]
    assert fraction == pytest.approx(1 / violated.right["train/loss_denominator"])


def test_the_nonfinite_policy_decides_on_a_token_outside_of_its_set(violated):
    tokens = violated.right["train/loss_denominator"]
    kept = 1 - (violated.policy == "reject") / tokens
    assert violated.wrong["train/gradient_kept_fraction"] == pytest.approx(kept)
    assert violated.wrong["train/loss_denominator"] == tokens


def test_a_token_outside_of_its_set_leaves_gradients_finite(violated):
    assert violated.wrong["train/nonfinite_gradient_steps"] == 0
    assert 0 < violated.wrong["train/grad_norm"] < 100


def change(path, edit):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        edit(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


SETS = st.lists(st.lists(st.integers(0, 9), max_size=4, unique=True), max_size=8)


@pytest.fixture
def mask() -> SamplingMask:
    return SamplingMask.from_sets([[5, 7], [], [1]])


def test_a_mask_holds_the_sets_one_after_the_other(mask):
    assert mask.token_ids.tolist() == [5, 7, 1]
    assert mask.lengths.tolist() == [2, 0, 1]


def test_the_position_of_every_token_of_a_mask(mask):
    assert mask.position_of_token().tolist() == [0, 0, 2]


def test_sets_are_selected_by_position(mask):
    assert mask.select(torch.tensor([2, 0, 2])).sets() == [[1], [5, 7], [1]]


def test_an_unrecorded_set_contains_every_token(mask):
    assert mask.contains(torch.tensor([7, 3, 2])).tolist() == [True, True, False]


def test_sets_are_removed_by_position(mask):
    assert mask.without(torch.tensor([True, False, False])).sets() == [[], [], [1]]


def test_masks_are_equal_if_their_sets_are(mask):
    assert mask == SamplingMask.from_sets([[5, 7], [], [1]])
    assert mask != SamplingMask.from_sets([[5], [7], [1]])


def test_a_part_of_a_mask_is_pickled_without_the_others():
    first, _ = SamplingMask.from_sets([[3, 4], list(range(100_000))]).split([1, 1])
    assert len(pickle.dumps(first)) < 2_000


@given(SETS, st.data())
def test_selection_is_that_of_a_list(sets, data):
    mask = SamplingMask.from_sets(sets)
    drawn = st.just([])
    if sets:
        drawn = st.lists(st.integers(0, len(sets) - 1), max_size=6)
    positions = data.draw(drawn)
    selected = mask.select(torch.tensor(positions, dtype=torch.int64))
    assert selected.sets() == [sets[i] for i in positions]


@given(SETS, st.data())
def test_cat_is_the_inverse_of_split(sets, data):
    mask = SamplingMask.from_sets(sets)
    cut = data.draw(st.integers(0, len(sets)))
    parts = mask.split([cut, len(sets) - cut])
    assert [part.sets() for part in parts] == [sets[:cut], sets[cut:]]
    assert SamplingMask.cat(parts) == mask


@given(SETS, st.integers(0, 9))
def test_contains_is_membership_or_an_unrecorded_set(sets, token):
    tokens = torch.full((len(sets),), token, dtype=torch.int32)
    is_contained = SamplingMask.from_sets(sets).contains(tokens)
    assert is_contained.tolist() == [not allowed or token in allowed for allowed in sets]
