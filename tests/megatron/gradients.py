"""The gradient of every weight: by transformers, and by the training engine on any parallel layout.

Log-probs and exports can be right while a gradient is wrong, for example if it is summed over
the wrong ranks. Only a comparison of every tensor finds such an error.
"""

import json
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime_tis.hf_tensors import tensor_files
from slime_tis.trainer.configs.megatron import MegatronConfig
from slime_tis.trainer.megatron.batch import fixed_partition, make_batch, shard
from slime_tis.trainer.megatron.hf_weights import named_weights, replaced_weights
from slime_tis.trainer.megatron.parallel import Parallel
from slime_tis.trainer.megatron.training_engine import StepResult, TrainingEngine
from tests.checkpoints import PAD, VOCAB_SIZE, make_checkpoint, transformers_model
from tests.megatron.passes import RECOMPUTE_LAYERS, on_ranks, outputs

TOLERANCE = 1e-5
"""Largest relative difference of a tensor's gradient."""
TEMPERATURE = 0.9
"""Of the log-probs, so that a layout that forgets the temperature fails."""
ENTROPY_COEFFICIENT = 0.3
CLIP_GRAD = 0.5
"""Smaller than the gradients of all checkpoints, so that every comparison also covers clipping."""
SMALLEST_VOCABULARY = VOCAB_SIZE
"""Token ids of the samples are below it; checkpoints may have more."""
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "distributed optimizer, recomputation": {"use_distributed_optimizer": True, **RECOMPUTE_LAYERS},
}
"""Options with which every layout is compared."""
SELECTION_BIAS = "e_score_correction_bias"
"""Ending of the name of a router's bias, which is exported but not trained."""


@dataclass(frozen=True)
class Samples:
    """Sequences with a weight for the log-prob of every response token."""

    tokens: list[list[int]]
    weights: list[list[float]]
    """One list per sample, as long as its response."""


def make_samples(vocab_size: int) -> Samples:
    """Eight sequences in pairs; the two sequences of a pair have the same prompt.

    They lack the padding token: its embedding is 0, and the gradient of its norm, 1 / √ε, magnifies
    rounding errors.
    """
    generator = torch.Generator().manual_seed(0)

    def random_ids(length: int) -> list[int]:
        return torch.randint(PAD + 1, vocab_size, (length,), generator=generator).tolist()

    tokens, weights = [], []
    for prompt_length in (9, 12, 3, 10):
        prompt = random_ids(prompt_length)
        for response_length in (4, 7):
            tokens.append(prompt + random_ids(response_length))
            weights.append((torch.rand(response_length, generator=generator) + 0.5).tolist())
    return Samples(tokens, weights)


def transformers_gradients(directory: Path, samples: Samples) -> dict[str, Tensor]:
    """The gradient of the mean weighted loss, under the tensor names of the checkpoint's file."""
    model = transformers_model(directory)
    total = torch.zeros([])
    for ids, weights in zip(samples.tokens, samples.weights, strict=True):
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, -len(weights) - 1 : -1]
        log_probs = (logits / TEMPERATURE).log_softmax(-1)
        entropies = -(log_probs.exp() * log_probs).sum(-1)
        sampled = log_probs.gather(1, torch.tensor(ids[-len(weights) :])[:, None])[:, 0]
        total = total + (ENTROPY_COEFFICIENT * entropies - torch.tensor(weights) * sampled).sum()
    (total / sum(map(len, samples.weights))).backward()
    gradients = {
        name: value.grad for name, value in model.named_parameters() if value.grad is not None
    }
    return dict(_per_expert(gradients, tensor_files(directory)))


def _per_expert(
    gradients: Mapping[str, Tensor], files: Mapping[str, Path]
) -> Iterator[tuple[str, Tensor]]:
    """Splits the experts of a layer, which transformers 5 stacks in memory but not in most files.

    `files` has the names in the files.
    """
    for name, gradient in gradients.items():
        prefix, _, part = name.rpartition(".experts.")
        if name in files:
            yield name, gradient
        elif part == "gate_up_proj":
            for expert, (gate, up) in enumerate(matrix.chunk(2) for matrix in gradient):
                yield f"{prefix}.experts.{expert}.gate_proj.weight", gate
                yield f"{prefix}.experts.{expert}.up_proj.weight", up
        elif part == "down_proj":
            for expert, matrix in enumerate(gradient):
                yield f"{prefix}.experts.{expert}.down_proj.weight", matrix
        else:
            yield name, gradient


def weighted_loss(inputs):
    """Weighted negative log-probs and entropies.

    The samples' weights take the place of the rollout's log-probs, which are split over ranks and
    micro-batches as the tokens are.
    """
    weighted = inputs.tokens.rollout_log_probs_L * inputs.log_probs_L
    return outputs(inputs, ENTROPY_COEFFICIENT * inputs.entropy_L.sum() - weighted.sum())


def engine_gradients(engine: TrainingEngine) -> dict[str, Tensor]:
    """The gradient after `train_step`, from all ranks, under Hugging Face names; a collective.

    The gradients take the place of the weights in the export, so that they are joined as the
    weights are.
    """
    if engine.config.use_distributed_optimizer:
        _gather_reduced_shards(engine)
    module = engine.model.module
    gradients = {}
    for name, weight in named_weights(module).items():
        gradients[name] = getattr(
            weight, "main_grad", torch.zeros_like(weight)
        )  # a selection bias has none
    with replaced_weights(module, gradients):
        exported = {name: tensor.clone() for name, tensor in engine.named_hf_tensors()}
    return {name: tensor for name, tensor in exported.items() if not name.endswith(SELECTION_BIAS)}


def _gather_reduced_shards(engine: TrainingEngine) -> None:
    """Completes the gradient: the distributed optimizer sums only a rank's shard of a bucket."""
    for group in [*engine.ddp.bucket_groups, *engine.ddp.expert_parallel_bucket_groups]:
        ranks = group.intra_distributed_optimizer_instance_group
        for bucket in group.buckets:
            shards = list(bucket.grad_data.chunk(ranks.size()))
            own = shards[ranks.rank()].clone()
            dist.all_gather(shards, own, group=ranks)


def relative_differences(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> dict[str, float]:
    """The largest difference within each tensor, divided by the tensor's largest gradient.

    A tensor whose gradient is small compared with the others, such as a bias of keys, is divided by
    a hundredth of the median of the tensors' largest gradients: its rounding errors come from
    larger terms that cancel. A tensor that only one side has differs by infinity.
    """
    largest = {name: float(gradient.abs().max()) for name, gradient in expected.items()}
    floor = 0.01 * statistics.median(largest.values())
    differences = {}
    for name in actual.keys() & expected.keys():
        difference = float((actual[name] - expected[name]).abs().max())
        differences[name] = difference / max(largest[name], floor)
    for name in actual.keys() ^ expected.keys():
        differences[name] = math.inf
    return differences


def norm_of(gradients: Mapping[str, Tensor]) -> float:
    """The L2 norm over all tensors, summed in float64."""
    return math.sqrt(
        sum(float(gradient.double().square().sum()) for gradient in gradients.values())
    )


def trained_engine(
    directory: Path,
    parallel: Parallel,
    samples: Samples,
    *,
    micro_batch_size: int = 2,
    **options: Any,
) -> tuple[TrainingEngine, StepResult]:
    """An engine after one step on the samples, of which each data-parallel rank has a share."""
    config = MegatronConfig(hf_checkpoint=str(directory), clip_grad=CLIP_GRAD, **options)
    engine = TrainingEngine(
        config, parallel, temperature=TEMPERATURE, total_steps=2, entropy_gradient=True
    )
    pair = 2  # stays together: its samples share a prompt
    tokens = shard(samples.tokens, parallel.data_rank, parallel.data_size, pair)
    weights = shard(samples.weights, parallel.data_rank, parallel.data_size, pair)
    ones = [[1] * len(row) for row in weights]
    batch = make_batch(tokens, ones, weights, ones, parallel.context_rank, parallel.context_size)
    partition = fixed_partition(len(tokens), micro_batch_size)
    return engine, engine.train_step(batch, partition, weighted_loss)


def differences_from(
    expected: Mapping[str, Tensor], engine: TrainingEngine, step: StepResult
) -> dict[str, float]:
    """Relative differences of the norm and of every clipped gradient; a collective."""
    norm = norm_of(expected)
    factor = CLIP_GRAD / (norm + 1e-6)  # megatron-core's formula
    clipped = {name: gradient * factor for name, gradient in expected.items()}
    differences = relative_differences(engine_gradients(engine), clipped)
    return differences | {"norm": abs(step.grad_norm / norm - 1)}


def beyond_tolerance(differences: Mapping[str, float]) -> dict[str, float]:
    """The entries above `TOLERANCE`, also if they are NaN."""
    return {name: value for name, value in differences.items() if not value <= TOLERANCE}


def compare_checkpoints(parallel: Parallel, directory: Path, layout: Mapping[str, Any]) -> None:
    """Writes the differences on this rank, for all checkpoints and options under a directory."""
    options = json.loads((directory / "options.json").read_text())
    found: dict[str, float] = {}
    for checkpoint in sorted(path for path in directory.iterdir() if path.is_dir()):
        samples = make_samples(SMALLEST_VOCABULARY)
        expected = transformers_gradients(checkpoint, samples)
        for option, fields in options.items():
            engine, step = trained_engine(checkpoint, parallel, samples, **layout, **fields)
            differing = beyond_tolerance(differences_from(expected, engine, step))
            for name, value in differing.items():
                found[f"{checkpoint.name}, {option}: {name}"] = value
    (directory / f"differing_{parallel.rank}.json").write_text(json.dumps(found))


def differing_gradients(
    directory: Path,
    models: Mapping[str, tuple[str, dict[str, Any]]],
    layout: Mapping[str, Any],
    ranks: int,
    options: Mapping[str, dict[str, Any]],
) -> dict[str, float]:
    """Relative differences above `TOLERANCE` on any rank, by rank, model, option and tensor.

    Args:
        directory: An empty directory.
        models: Name → family and sizes of a checkpoint.
        layout: Fields of `MegatronConfig` that all runs have.
        ranks: Number of processes.
        options: Name → further fields of `MegatronConfig`, and `micro_batch_size`.
    """
    for name, (family, sizes) in models.items():
        make_checkpoint(directory / name, family, **sizes)
    (directory / "options.json").write_text(json.dumps(options))
    on_ranks(compare_checkpoints, directory, layout, ranks)
    found = {}
    for rank in range(ranks):
        differing = json.loads((directory / f"differing_{rank}.json").read_text())
        for name, value in differing.items():
            found[f"rank {rank}, {name}"] = value
    return found
