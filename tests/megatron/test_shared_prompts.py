"""Shared prompts: log-probs, values in training and gradients match prompts computed for each sample."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from slime_tis.trainer.data.sampling_mask import SamplingMask
from slime_tis.trainer.megatron.architecture import read_hf_config
from slime_tis.trainer.megatron.batch import TrainingBatch, make_batch
from slime_tis.trainer.megatron.engine import TrainingEngine, why_not_shared
from slime_tis.trainer.megatron.packing import MicroBatch
from slime_tis.trainer.megatron.parallel import Parallel
from slime_tis.trainer.options.megatron import MegatronConfig
from tests.checkpoints import make_checkpoint
from tests.megatron.passes import RECOMPUTE_LAYERS, assert_same_results, on_ranks, results
from tests.megatron.test_prefix_tree import groups

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
    assert_same_results(found[1], found[0])


WHOLE = [list(range(len(SAMPLES)))]
SPLIT = [[0, 2, 4], [1, 3, 5, 6], [7, 8]]
# 5 + 3 + 1 tokens of the first group, 3 + 2 + 9 + 1 + 2 of the second, 5 alone
TOKENS, TOKENS_SPLIT = 31, (5 + 3 + 1 + 3 + 2) + (5 + 3 + 3 + 9 + 1 + 2) + (12 + 5)


@pytest.mark.parametrize(
    ("family", "options", "partition", "tokens"),
    [
        pytest.param("qwen3", {}, WHOLE, TOKENS, id="one micro-batch"),
        pytest.param("llama", {"log_probs_chunk_size": 2}, SPLIT, TOKENS_SPLIT, id="groups over micro-batches"),
        pytest.param("qwen2", RECOMPUTE_LAYERS, WHOLE, TOKENS, id="recomputation"),
        pytest.param("qwen3", {"recompute_granularity": "selective"}, WHOLE, TOKENS, id="recomputation of attention"),
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


@pytest.fixture(scope="module")
def engine(model: Path, parallel: Parallel) -> Counting:
    """An engine whose weights stay as they are."""
    config = MegatronConfig(hf_checkpoint=str(model), clip_grad=0.0, lr=0.0)
    return Counting(config, parallel, temperature=1.0, total_steps=1, keep_reference=True, entropy_gradient=True)


@settings(max_examples=12)
@given(groups, st.randoms(use_true_random=False))
def test_random_groups(engine: Counting, drawn: list[tuple[list[int], list[list[int]]]], chance: random.Random) -> None:
    samples = [(prompt, response) for prompt, responses in drawn for response in responses]
    rows = [[1] * len(response) for _, response in samples]
    assume(any(rows))
    batch = make_batch([[3 + token for token in (*p, *r)] for p, r in samples], rows, rows, rows)
    cut = chance.randint(0, len(samples))
    order = chance.sample(range(len(samples)), len(samples))
    partition = [part for part in (order[:cut], order[cut:]) if any(rows[i] for i in part)]
    covered = sorted(i for part in partition for i in part)
    batch, position = batch.select(covered), {sample: place for place, sample in enumerate(covered)}
    partition = [[position[sample] for sample in part] for part in partition]
    engine.no_shared_prompts = "to compare"
    expected = results(engine, batch, partition)
    engine.no_shared_prompts = None
    found = results(engine, batch, partition)
    assert_same_results(found, expected, atol=2e-5)


@pytest.mark.parametrize(
    ("device", "requested", "reason"),
    [("cpu", None, None), ("cpu", False, "--no-share-prompts"), ("cuda", None, "needs a CPU")],
    ids=["a CPU", "turned off", "a GPU"],
)
def test_why_prompts_are_not_shared(engine: Counting, device: str, requested: bool | None, reason: str | None) -> None:
    parallel = replace(engine.parallel, backend=replace(engine.parallel.backend, device=torch.device(device)))
    result = why_not_shared(requested, parallel, engine.model.hf_config)
    assert result is None if reason is None else reason in str(result)


def test_impossible_sharing_is_refused(engine: Counting) -> None:
    parallel = replace(engine.parallel, backend=replace(engine.parallel.backend, device=torch.device("cuda")))
    with pytest.raises(ValueError, match="--share-prompts is on but"):
        why_not_shared(True, parallel, engine.model.hf_config)


def test_experts_are_computed_for_each_sample(parallel: Parallel, tmp_path: Path) -> None:
    hf_config = read_hf_config(make_checkpoint(tmp_path, "qwen3_moe"))
    says = "the routing of experts is recorded, replayed and counted for each sample"
    assert why_not_shared(None, parallel, hf_config) == says


LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_model_parallel_size": 2},
    "tensor and sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_model_parallel_size": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks(layout: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", "qwen3", vocab_size=67)
    on_ranks(compare_layout, tmp_path / "model", LAYOUTS[layout])


def compare_layout(parallel: Parallel, model: Path, layout: dict[str, Any]) -> None:
    compare(model, parallel, layout, SPLIT, TOKENS_SPLIT)
