"""Logits of the response rows only: log-probs, entropies and gradients equal the values from logits of every row."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shared_prompts import EveryRow
from slime_tis.trainer.data.sampling_mask import SamplingMask
from slime_tis.trainer.megatron import fused_log_probs
from slime_tis.trainer.megatron.batch import TrainingBatch, make_batch
from slime_tis.trainer.megatron.engine import TrainingEngine
from slime_tis.trainer.megatron.parallel import Parallel
from slime_tis.trainer.options.megatron import MegatronConfig
from tests.checkpoints import make_checkpoint
from tests.megatron.passes import RECOMPUTE_LAYERS, assert_same_results, on_ranks, results, weighted_loss

TOKENS = [[3, 4, 5, 6, 7, 8, 9, 10], [8, 9, 10], [11, 12, 13, 14, 3, 2]]
RESPONSES = [2, 1, 4]
SETS = [[[9, 5], [10, 1, 2]], [[10, 40, 61]], [[13, 2], [], [], [2, 3, 4]]]


def batch_of(parallel: Parallel, *, masked: bool = False) -> TrainingBatch:
    rows = [[1] * response for response in RESPONSES]
    masks = [SamplingMask.from_sets(sets) for sets in SETS] if masked else []
    return make_batch(TOKENS, rows, rows, rows, parallel.context_rank, parallel.context_size, sampling_masks=masks)


@pytest.fixture(autouse=True)
def tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probs from hidden states in several tiles, although vocabularies are tiny."""
    make_tiles_small(monkeypatch.setattr)


def make_tiles_small(assign: Callable[[Any, str, int], None]) -> None:
    """Tiles of four rows, or of sixteen tokens of the vocabulary."""
    assign(fused_log_probs, "TILE_BYTES", 4 * 64)
    assign(fused_log_probs, "MIN_COLUMNS", 16)


def compare(model: Path, parallel: Parallel, options: dict[str, Any], *, masked: bool) -> None:
    """Both engines on the same weights and samples."""
    config = MegatronConfig(hf_checkpoint=str(model), clip_grad=0.0, **options)
    expected, actual = (
        results(
            engine(config, parallel, temperature=0.8, total_steps=1, keep_reference=True, entropy_gradient=True),
            batch_of(parallel, masked=masked),
            [[0, 2], [1]],
        )
        for engine in (EveryRow, TrainingEngine)
    )
    tolerance = {"rtol": 0.03, "atol": 0.03} if options.get("bf16") else {"rtol": 1e-5, "atol": 1e-6}
    assert_same_results(actual, expected, **tolerance)


@pytest.mark.parametrize(
    ("family", "masked", "options"),
    [
        pytest.param("qwen3", False, {}, id="tied embeddings"),
        pytest.param("llama", True, {"log_probs_chunk_size": 2}, id="sampling masks, chunks"),
        pytest.param("qwen3_moe", True, {}, id="experts"),
        pytest.param("llama", True, {"bf16": True}, id="bf16"),
        pytest.param("qwen2", False, RECOMPUTE_LAYERS, id="recomputation"),
    ],
)
def test_one_process(family: str, masked: bool, options: dict[str, Any], parallel: Parallel, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, family, tie_word_embeddings=family == "qwen3")
    compare(model, parallel, options, masked=masked)


LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_model_parallel_size": 2},
    "tensor and sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "context": {"context_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks(layout: str, tmp_path: Path) -> None:
    for family, tied in (("qwen3", True), ("qwen3_moe", False)):
        make_checkpoint(tmp_path / family, family, tie_word_embeddings=tied, vocab_size=67)
    on_ranks(compare_families, tmp_path, LAYOUTS[layout])


def compare_families(parallel: Parallel, directory: Path, layout: dict[str, Any]) -> None:
    make_tiles_small(setattr)
    for model in sorted(directory.iterdir()):
        if "moe" in model.name and layout == LAYOUTS["tensor"]:
            continue  # megatron-core's experts need sequence parallelism with tensor parallelism
        compare(model, parallel, layout, masked=True)


def test_prompt_rows_have_no_logits(parallel: Parallel, model: Path) -> None:
    config = MegatronConfig(hf_checkpoint=str(model))
    engine = TrainingEngine(config, parallel, temperature=1.0, total_steps=1, gives_logits=True)
    shapes = []
    engine.model.module.output_layer.register_forward_hook(lambda *call: shapes.append(tuple(call[2][0].shape)))
    engine.train_step(batch_of(parallel), [[0, 1, 2]], weighted_loss)
    assert shapes == [(sum(RESPONSES), 1, engine.model.hf_config.vocab_size)]
    engine.log_probs(batch_of(parallel), [[0, 1, 2]])
    assert len(shapes) == 1  # of hidden states
