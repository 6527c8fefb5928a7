"""train.py with routing replay on two and four ranks: every parallel layout gives the metrics of one process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.moe_layouts.test_layouts import LAYOUTS, make_moe_task
from tests.runs import read_metrics, run_apart, training_metrics

REPLAY = [
    *("--rollout-router-bits", "3", "--use-rollout-routing-replay", "--measure-routing-mismatch", "1"),
    *("--num-steps-per-rollout", "2", "--use-kl-loss", "--kl-loss-coef", "0.1", "--num-rollout", "2"),
]
MODES = {
    "the rollout's experts": [],
    "the rollout's experts and weights, and those of the pass for old log-probs": [
        *("--routing-replay-weights", "--use-routing-replay")
    ],
}
CASES = [
    *(("the rollout's experts", layout) for layout in LAYOUTS),
    *((list(MODES)[1], layout) for layout in ("tensor and experts", "context and experts", "pipeline and experts")),
]


def of_training(row: dict[str, Any]) -> dict[str, float]:
    """The metrics of the steps alone: how much of an update a rounded engine receives hangs on single roundings."""
    return {name: value for name, value in training_metrics(row).items() if name.startswith("train/")}


@pytest.fixture(scope="module")
def one_process(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[list[str], list[dict[str, Any]]]]:
    """Flags that replay the rollouts of a run in one process, and the rows of that run."""
    directory = tmp_path_factory.mktemp("replay")
    flags = [*make_moe_task(directory, "qwen3_moe"), *REPLAY, *MODES[request.param]]
    data = str(directory / "rollout_{rollout_id}.jsonl")
    result = run_apart([*flags, "--save-debug-rollout-data", data], directory / "one")
    assert result.returncode == 0, result.stderr[-4000:]
    rows = read_metrics(directory / "one")
    assert all(row["train/routing_difference"] > 0.05 for row in rows)  # the comparison is about replay
    yield [*flags, "--load-debug-rollout-data", data], rows


@pytest.mark.parametrize(("one_process", "layout"), CASES, indirect=["one_process"], ids=str)
def test_ranks_agree_with_one_process(
    one_process: tuple[list[str], list[dict[str, Any]]], layout: str, tmp_path: Path
) -> None:
    ranks, layout_flags = LAYOUTS[layout]
    result = run_apart([*one_process[0], *layout_flags], tmp_path, ranks)
    assert result.returncode == 0, result.stderr[-4000:]
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row, one in zip(rows, one_process[1], strict=True):
        assert of_training(row) == pytest.approx(of_training(one), rel=1e-4, abs=1e-4)
