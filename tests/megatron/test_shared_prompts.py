"""Shared prompts: log-probs, values in training and gradients are those of prompts computed for each sample."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_tis.megatron.batch import TrainingBatch, make_batch
from slime_tis.megatron.config import MegatronConfig
from slime_tis.megatron.engine import TrainingEngine
from slime_tis.megatron.packing import MicroBatch
from slime_tis.megatron.parallel import Parallel, initialize, shut_down
from slime_tis.sampling_mask import SamplingMask
from tests.checkpoints import make_checkpoint
from tests.megatron.test_response_rows import results
from tests.runs import free_port, rank_environment, spawn

FIRST, SECOND, TURN = [3, 4, 5, 6, 7], [3, 9, 10], [20, 21, 22, 23, 24, 25, 26, 27, 28]
SAMPLES: list[tuple[list[int], list[int]]] = [
    (FIRST, [8, 11, 12]),
    (FIRST, [8, 11, 12]),  # the same response
    (FIRST, [13]),
    (FIRST, []),
    (SECOND, [14, 15]),
    (SECOND, [*TURN, 30]),  # these three begin with the same nine tokens
    (SECOND, [*TURN, 31, 32]),
    (SECOND, TURN),
    ([40, 41], [42, 43, 44]),  # alone
]
"""Prompts and responses of two groups, and of one sample."""


class Counting(TrainingEngine):
    """Counts the tokens that are packed."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.tokens = 0
        super().__init__(*args, **options)

    def _pack(self, batch: TrainingBatch) -> MicroBatch:
        micro = super()._pack(batch)
        self.tokens += micro.input_ids.shape[1]
        return micro


def batch_of() -> TrainingBatch:
    rows = [[1] * len(response) for _, response in SAMPLES]
    masks = [SamplingMask.from_sets([[token, 5 + token % 3] for token in response]) for _, response in SAMPLES]
    return make_batch([[*prompt, *response] for prompt, response in SAMPLES], rows, rows, rows, sampling_masks=masks)


def compare(model: Path, parallel: Parallel, options: dict[str, Any], partition: list[list[int]], tokens: int) -> None:
    """Both engines on the same weights and samples."""
    found = []
    counted = []
    for share in (False, None):
        config = MegatronConfig(hf_checkpoint=str(model), clip_grad=0.0, share_prompts=share, **options)
        engine = Counting(config, parallel, temperature=0.8, total_steps=1, keep_reference=True, entropy_gradient=True)
        found.append(results(engine, batch_of(), partition))
        counted.append(engine.tokens)
    if not options.get("sequence_parallel"):  # which adds a filler
        assert counted == [3 * sum(len(prompt) + len(response) for prompt, response in SAMPLES), 3 * tokens]
    expected, shared = found
    assert shared.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            shared[name], value, rtol=1e-5, atol=1e-5, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )
    if parallel.is_last_stage:
        assert any(bool(value.any()) for name, value in shared.items() if name.startswith("values"))


WHOLE = [list(range(len(SAMPLES)))]
SPLIT = [[0, 2, 4], [1, 3, 5, 6], [7, 8]]
# 5 + 3 + 1 tokens of the first group, 3 + 2 + 9 + 1 + 2 of the second, 5 alone
TOKENS, TOKENS_SPLIT = 31, (5 + 3 + 1 + 3 + 2) + (5 + 3 + 3 + 9 + 1 + 2) + (12 + 5)


@pytest.mark.parametrize(
    ("family", "options", "partition", "tokens"),
    [
        pytest.param("qwen3", {}, WHOLE, TOKENS, id="one micro-batch"),
        pytest.param("llama", {"log_probs_chunk_size": 2}, SPLIT, TOKENS_SPLIT, id="groups over micro-batches"),
        pytest.param(
            "qwen2",
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
            WHOLE,
            TOKENS,
            id="recomputation",
        ),
    ],
)
def test_one_process(
    family: str,
    options: dict[str, Any],
    partition: list[list[int]],
    tokens: int,
    parallel: Parallel,
    tmp_path: Path,
) -> None:
    compare(make_checkpoint(tmp_path, family), parallel, options, partition, tokens)


LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_model_parallel_size": 2},
    "tensor and sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_model_parallel_size": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks(layout: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", "qwen3", vocab_size=67)
    spawn(compare_on_a_rank, (2, free_port(), str(tmp_path / "model"), LAYOUTS[layout]), 2)


def compare_on_a_rank(rank: int, ranks: int, port: int, path: str, layout: dict[str, Any]) -> None:
    """Compares both engines as one of several ranks.

    Args:
        rank: of this process.
        ranks: of the job.
        port: at which they meet.
        path: of the checkpoint.
        layout: fields of MegatronConfig.
    """
    torch.set_num_threads(1)
    os.environ.update(rank_environment(rank, ranks, port))
    parallel = initialize(MegatronConfig(hf_checkpoint=path, **layout))
    compare(Path(path), parallel, layout, SPLIT, TOKENS_SPLIT)
    shut_down()
