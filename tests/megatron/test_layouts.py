"""train.py on two ranks: every parallel layout gives the metrics of one process."""

import pytest

from tests.runs import make_task, metrics_of, read_metrics, run_apart, run_here, training_metrics

TWO_RANKS = {
    "data": [],
    "data, balanced": ["--balance-data"],
    "data, distributed optimizer, token budget": [
        *("--use-distributed-optimizer", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "64")
    ],
    "tensor": ["--tensor-model-parallel-size", "2"],
    "tensor and sequence": ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
    "pipeline, chunks": [
        *(
            "--pipeline-model-parallel-size",
            "2",
            "--micro-batch-size",
            "8",
            "--log-probs-chunk-size",
            "7",
        )
    ],
    "context": ["--context-parallel-size", "2"],
    "context, token budget": [
        *("--context-parallel-size", "2", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "32")
    ],
}
CORRECTION = [
    *("--use-tis", "--tis-upper-bound", "1.05", "--tis-batch-normalize"),
    *(
        "--use-rs",
        "--rs-level",
        "geometric",
        "--rs-upper-bound",
        "1.01",
        "--rs-veto-threshold",
        "0.9",
    ),
    "--reject-before-advantage",
    *("--use-kl-loss", "--kl-loss-coef", "0.1", "--kl-loss-type", "k3", "--entropy-coef", "0.01"),
]
TRUNCATED_SAMPLING = ["--rollout-top-p", "0.8", "--rollout-temperature", "0.9"]
"""Log-probs are over the sets of sampled tokens, split over the ranks."""


def replayed(directory):
    """Flags that replay the rollouts of a run in one process, and the rows of that run."""
    flags = [*make_task(directory), *CORRECTION, *TRUNCATED_SAMPLING]
    data = str(directory / "rollout_{rollout_id}.jsonl")
    rows = run_here([*flags, "--save-debug-rollout-data", data], directory / "one")
    assert 0 < rows[0]["train/gradient_kept_fraction"] < 1  # compares rejection, too
    return [*flags, "--load-debug-rollout-data", data], rows


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    return replayed(tmp_path_factory.mktemp("layouts"))


def assert_same(rows, expected):
    """The metrics of every step equal another run's, up to the order of sums."""
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row, one in zip(rows, expected, strict=True):
        assert training_metrics(row) == pytest.approx(training_metrics(one), rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("layout", TWO_RANKS)
def test_two_ranks_agree_with_one(layout, one_process, tmp_path):
    flags, expected = one_process
    result = run_apart([*flags, *TWO_RANKS[layout]], tmp_path, ranks=2)
    assert result.returncode == 0, result.stderr[-4000:]
    assert_same(read_metrics(tmp_path), expected)
    message = "shared prompts: off (context parallelism cuts every sequence into slices)"
    assert (message in result.stdout) == ("context" in layout)


def test_balanced_ranks_have_similar_loads(one_process, tmp_path):
    flags, _ = one_process
    in_turn = metrics_of(flags, tmp_path / "in_turn", ranks=2)
    balanced = metrics_of([*flags, "--balance-data"], tmp_path / "balanced", ranks=2)
    # Four prompts of different lengths, two on each rank: samples of a prompt stay together.
    loads = [row["perf/rank_load"] for row in in_turn]
    balanced_loads = [row["perf/rank_load"] for row in balanced]
    assert 1.02 < max(balanced_loads) < 1.03
    assert 1.08 < max(loads) < 1.09


TOKEN_BASELINE = ["--advantage-estimator", "optimal_token_baseline"]
KL_IN_REWARDS = [
    *("--advantage-estimator", "reinforce_plus_plus", "--kl-coef", "0.5"),
    *("--no-reject-before-advantage", "--no-use-kl-loss", "--kl-loss-coef", "none"),
]
# Corrections and advantages that need more than sums over the ranks: layout and flags.
MORE = {
    "context, levels of whole sequences": (
        ["--context-parallel-size", "2"],
        ["--tis-level", "prefix", "--rs-level", "segment", "--policy-loss", "experimental_ctpo"],
    ),
    "data, two micro-batches, trimming, a share of the sequences": (
        ["--micro-batch-size", "4"],
        [
            *(*TOKEN_BASELINE, "--rs-second-moment-bound", "2e-4"),
            *("--rs-upper-bound", "none", "--rs-target-fraction", "0.25"),
        ],
    ),
    "context, trimming, bypass, bounds by z-score": (
        ["--context-parallel-size", "2"],
        [
            *("--no-use-tis", "--use-rollout-logprobs", "--rs-second-moment-bound", "2e-4"),
            *("--rs-upper-bound", "none", "--rs-z-score", "1", *TOKEN_BASELINE),
        ],
    ),
    "context, KL in the rewards": (
        ["--context-parallel-size", "2"],
        [*KL_IN_REWARDS, "--gamma", "0.9", "--num-steps-per-rollout", "2"],
    ),
    "data, KL in the rewards, group baseline": (
        [],
        [*KL_IN_REWARDS, "--advantage-estimator", "reinforce_plus_plus_baseline"],
    ),
    "tensor, token baseline": (
        ["--tensor-model-parallel-size", "2"],
        [*TOKEN_BASELINE, "--num-steps-per-rollout", "2"],
    ),
    "pipeline, token baseline": (["--pipeline-model-parallel-size", "2"], [*TOKEN_BASELINE]),
}


@pytest.mark.parametrize("case", MORE)
def test_two_ranks_agree_with_one_beyond_sums(case, one_process, tmp_path):
    layout, correction = MORE[case]
    flags = [*one_process[0], *correction, "--num-rollout", "2"]
    alone = [training_metrics(row) for row in run_here(flags, tmp_path / "1")]
    rows = metrics_of([*flags, *layout], tmp_path / "2", ranks=2)
    assert 0 < alone[0]["train/gradient_kept_fraction"] < 1
    assert 0 < alone[0].get("train/mis_second_moment_masked_fraction", 0.5) < 1
    together = [training_metrics(row) for row in rows]
    assert together == [pytest.approx(row, rel=1e-4, abs=1e-4) for row in alone]
