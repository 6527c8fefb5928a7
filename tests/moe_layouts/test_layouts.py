"""train.py with mixtures of experts on two and four ranks: every parallel layout gives the metrics of one process."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import PAD
from tests.runs import make_task, read_metrics, run_apart, training_metrics

EXPERTS_2 = ["--expert-model-parallel-size", "2"]
TENSOR_2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
CONTEXT_2 = ["--context-parallel-size", "2"]
PIPELINE_2 = ["--pipeline-model-parallel-size", "2", "--micro-batch-size", "4"]
ONE_EXPERT_TENSOR = ["--expert-tensor-parallel-size", "1"]
LAYOUTS = {
    "data": (2, []),
    "experts": (2, EXPERTS_2),
    "experts, distributed optimizer, token budget": (
        2,
        [*EXPERTS_2, "--use-distributed-optimizer", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "64"],
    ),
    "tensor": (2, TENSOR_2),
    "tensor and experts": (2, [*TENSOR_2, *EXPERTS_2, *ONE_EXPERT_TENSOR]),
    "context": (2, CONTEXT_2),
    "context and experts": (2, [*CONTEXT_2, *EXPERTS_2]),
    "pipeline": (2, PIPELINE_2),
    "pipeline and experts": (4, [*PIPELINE_2, *EXPERTS_2]),
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_hidden_layers": 4, "mlp_only_layers": [0]},
    "qwen2_moe": {},
    "glm4_moe": {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4},
}
CASES = [
    *(("qwen3_moe", layout) for layout in LAYOUTS),
    *(("qwen2_moe", layout) for layout in ("tensor and experts", "pipeline and experts")),
    *(("glm4_moe", layout) for layout in ("tensor and experts", "pipeline and experts")),
]
CORRECTION = [
    *("--use-tis", "--tis-upper-bound", "1.05", "--use-rs", "--rs-level", "geometric", "--rs-upper-bound", "1.01"),
    *("--use-kl-loss", "--kl-loss-coef", "0.1", "--entropy-coef", "0.01"),
]


@dataclass(frozen=True)
class OneProcess:
    """A run in one process."""

    flags: list[str]
    """Those that train on its samples."""
    rows: list[dict[str, Any]]
    """Of its metrics."""
    weights: dict[str, torch.Tensor]
    """Of the policy at its end."""


def make_moe_task(directory: Path, family: str) -> list[str]:
    """As `make_task`, but the embedding of the padding token is that of another: samples have it, and a zero vector's
    RMSNorm has a gradient of 1 / √ε, which no two orders of summation agree on."""
    flags = make_task(directory, family, **FAMILIES[family])
    file = directory / "model" / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][PAD] = weights["model.embed_tokens.weight"][PAD + 3]
    save_file(weights, file, {"format": "pt"})
    return flags


@pytest.fixture(scope="module")
def one_process(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneProcess]:
    directory = tmp_path_factory.mktemp(request.param)
    flags = [*make_moe_task(directory, request.param), *CORRECTION]
    data = str(directory / "rollout_{rollout_id}.jsonl")
    saved = ["--save-debug-rollout-data", data, "--save-hf", str(directory / "hf")]
    result = run_apart([*flags, *saved], directory / "one")
    assert result.returncode == 0, result.stderr[-4000:]
    rows = read_metrics(directory / "one")
    assert 0 < rows[0]["train/gradient_kept_fraction"] < 1  # the comparison is about rejection too
    weights = load_file(directory / "hf" / "model.safetensors")
    yield OneProcess([*flags, "--load-debug-rollout-data", data], rows, weights)


@pytest.mark.parametrize(("one_process", "layout"), CASES, indirect=["one_process"], ids=str)
def test_ranks_agree_with_one_process(one_process: OneProcess, layout: str, tmp_path: Path) -> None:
    ranks, flags = LAYOUTS[layout]
    exported = ["--save-hf", str(tmp_path / "hf")]
    result = run_apart([*one_process.flags, *flags, *exported], tmp_path / "run", ranks)
    assert result.returncode == 0, result.stderr[-4000:]
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row, one in zip(rows, one_process.rows, strict=True):
        assert training_metrics(row) == pytest.approx(training_metrics(one), rel=1e-4, abs=1e-4)
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert weights.keys() == one_process.weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, one_process.weights[name], rtol=0, atol=1e-4, msg=name)
