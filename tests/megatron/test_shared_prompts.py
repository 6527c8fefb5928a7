"""Response rows only, and shared prompts: results equal those from all rows of all samples."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from benchmarks.shared_prompts import EveryRow
from slime_tis.trainer.configs.megatron import MegatronConfig
from slime_tis.trainer.data.sample import SamplingMask
from slime_tis.trainer.megatron import log_probs
from slime_tis.trainer.megatron.architecture import read_hf_config
from slime_tis.trainer.megatron.batch import make_batch
from slime_tis.trainer.megatron.training_engine import TrainingEngine, why_not_shared
from tests.checkpoints import make_checkpoint
from tests.megatron.passes import (
    RECOMPUTE_LAYERS,
    assert_same_results,
    on_ranks,
    results,
    weighted_loss,
)

FIRST, SECOND, TURN = [3, 4, 5, 6, 7], [3, 9, 10], [20, 21, 22, 23, 24, 25, 26, 27, 28]
SAMPLES = [
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
WHOLE, SPLIT = [list(range(len(SAMPLES)))], [[0, 2, 4], [1, 3, 5, 6], [7, 8]]
# 5 + 3 + 1 tokens of the first group, 3 + 2 + 9 + 1 + 2 of the second, 5 alone
COMPUTED = {1: 31, 3: (5 + 3 + 1 + 3 + 2) + (5 + 3 + 3 + 9 + 1 + 2) + (12 + 5)}
"""Tokens of a pass with shared prompts, by the number of micro-batches."""


class Counting(TrainingEngine):
    """Counts the tokens that are packed."""

    tokens = 0

    def _pack(self, batch):
        micro = super()._pack(batch)
        self.tokens += micro.input_ids.shape[1]
        return micro


def batch_of(parallel):
    rows = [[1] * len(response) for _, response in SAMPLES]
    sets = [
        [[token, 5 + token % 3] if token % 5 else [] for token in response]
        for _, response in SAMPLES
    ]
    masks = [SamplingMask.from_sets(of_response) for of_response in sets]
    tokens = [[*prompt, *response] for prompt, response in SAMPLES]
    ranks = parallel.context_rank, parallel.context_size
    return make_batch(tokens, rows, rows, rows, *ranks, sampling_masks=masks)


def make_tiles_small(assign):
    """Makes tiles of four rows, or of sixteen tokens, so that tiny vocabularies have several."""
    assign(log_probs, "TILE_BYTES", 4 * 64)
    assign(log_probs, "MIN_COLUMNS", 16)


@pytest.fixture(autouse=True)
def tiles(monkeypatch):
    make_tiles_small(monkeypatch.setattr)


def compare(model, parallel, options, partition):
    """Three engines on the same weights and samples."""
    found = []
    for kind, share in ((EveryRow, False), (Counting, False), (Counting, None)):
        config = MegatronConfig(
            hf_checkpoint=str(model), clip_grad=0.0, share_prompts=share, **options
        )
        engine = kind(
            config,
            parallel,
            temperature=0.8,
            total_steps=1,
            keep_reference=True,
            entropy_gradient=True,
        )
        found.append(results(engine, batch_of(parallel), partition))
        if engine.shares_prompts and not options.get("sequence_parallel"):  # which adds a filler
            assert isinstance(engine, Counting) and engine.tokens == 3 * COMPUTED[len(partition)]
    tolerance = {"rtol": 0.03, "atol": 0.03} if options.get("bf16") else {}
    for actual in found[1:]:
        assert_same_results(actual, found[0], **tolerance)


@pytest.mark.parametrize(
    ("family", "options", "partition"),
    [
        pytest.param("qwen3", {}, WHOLE, id="tied embeddings, one micro-batch"),
        pytest.param(
            "llama", {"log_probs_chunk_size": 2}, SPLIT, id="chunks, groups over micro-batches"
        ),
        pytest.param("llama", {"bf16": True}, SPLIT, id="bf16"),
        pytest.param("qwen3_moe", {}, SPLIT, id="experts"),
        pytest.param("qwen2", RECOMPUTE_LAYERS, WHOLE, id="recomputation"),
        pytest.param(
            "qwen3", {"recompute_granularity": "selective"}, WHOLE, id="recomputation of attention"
        ),
    ],
)
def test_one_process(family, options, partition, parallel, tmp_path):
    compare(
        make_checkpoint(tmp_path, family, tie_word_embeddings=family == "qwen3"),
        parallel,
        options,
        partition,
    )


def test_copies_of_keys_are_not_kept_for_the_backward_pass(parallel, tmp_path):
    model = make_checkpoint(tmp_path, "llama")
    config = MegatronConfig(hf_checkpoint=str(model))
    engine = TrainingEngine(config, parallel, temperature=1.0, total_steps=1)
    dimensions = set()

    def record(tensor):
        dimensions.add(tensor.dim())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        engine.train_step(batch_of(parallel), WHOLE, weighted_loss)
    # Packed tokens have at most three dimensions, padded batches of attention have four.
    assert max(dimensions) == 3


LAYOUTS = {
    "tensor": {"tensor_model_parallel_size": 2},
    "tensor and sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "context": {"context_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks(layout, tmp_path):
    for family, tied in (("qwen3", True), ("qwen3_moe", False)):
        if (family, layout) != (
            "qwen3_moe",
            "tensor",
        ):  # megatron-core's experts need sequence parallelism, too
            make_checkpoint(tmp_path / family, family, tie_word_embeddings=tied, vocab_size=67)
    on_ranks(compare_families, tmp_path, LAYOUTS[layout])


def compare_families(parallel, directory, layout):
    make_tiles_small(setattr)
    for model in sorted(directory.iterdir()):
        compare(model, parallel, layout, SPLIT)


@pytest.mark.parametrize(
    ("device", "requested", "reason"),
    [
        ("cpu", None, None),
        ("cpu", False, "--no-share-prompts"),
        ("cuda", None, "needs a CPU"),
        ("cuda", True, None),
    ],
    ids=["a CPU", "turned off", "a GPU", "refused"],
)
def test_why_prompts_are_not_shared(device, requested, reason, model, parallel):
    on_device = replace(parallel, device=torch.device(device))
    with pytest.raises(ValueError, match="--share-prompts is on") if requested else nullcontext():
        assert (why_not_shared(requested, on_device, read_hf_config(model)) or "").endswith(
            reason or ""
        )


def test_prompt_rows_have_no_logits(parallel, model):
    config = MegatronConfig(hf_checkpoint=str(model))
    engine = TrainingEngine(config, parallel, temperature=1.0, total_steps=1, gives_logits=True)
    shapes = []
    engine.model.module.output_layer.register_forward_hook(
        lambda *call: shapes.append(tuple(call[2][0].shape))
    )
    engine.train_step(batch_of(parallel), WHOLE, weighted_loss)
    responses = sum(len(response) for _, response in SAMPLES)
    assert shapes == [(responses, 1, engine.model.hf_config.vocab_size)]
    engine.log_probs(batch_of(parallel), WHOLE)
    assert len(shapes) == 1  # of hidden states
