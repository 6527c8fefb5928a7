"""LoRA adapters on two ranks: every parallel layout trains the adapters of one process."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_tis.trainer.megatron import checkpoint_saving, sharded_checkpoint
from slime_tis.trainer.megatron.lora import oversized_targets
from tests.checkpoints import make_checkpoint
from tests.lora.engines import PARTITION, adapter_tensors, build, exported, make_samples, train
from tests.megatron.passes import likelihood, on_ranks

LAYOUTS = {
    "tensor": {"tensor_model_parallel_size": 2},
    "tensor and sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "context": {"context_parallel_size": 2},
    "data": {},
    "data, distributed optimizer": {"use_distributed_optimizer": True},
}


def train_on_ranks(engine, steps=3):
    """Trains on the samples that belong to this rank, and returns the norms of the gradient."""
    parallel = engine.parallel
    batch = make_samples(parallel)
    partition = PARTITION
    if parallel.data_size > 1:
        half = [0, 2] if parallel.data_rank == 0 else [1, 3]
        batch = batch.select(half)
        partition = [[0], [1]]
    return [engine.train_step(batch, partition, likelihood).grad_norm for _ in range(steps)]


def trains_as_one_process(parallel, directory, layout):
    engine = build(directory / "model", parallel, **layout)
    norms = train_on_ranks(engine)
    expected = load_file(directory / "adapters.safetensors")
    torch.testing.assert_close(torch.tensor(norms), expected.pop("norms"), rtol=1e-4, atol=0)
    for name, tensor in adapter_tensors(engine).items():
        torch.testing.assert_close(
            tensor, expected[name], rtol=2e-3, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}"
        )
    merged = load_file(directory / "merged.safetensors")
    for name, tensor in engine.named_hf_tensors():
        torch.testing.assert_close(tensor, merged[name], rtol=2e-4, atol=2e-5)


@pytest.fixture(scope="module")
def one_process(parallel, tmp_path_factory):
    """A directory with a checkpoint, and the adapters and weights after three steps."""
    directory = tmp_path_factory.mktemp("lora")
    checkpoint = make_checkpoint(directory / "model", "qwen3", tie_word_embeddings=True)
    engine = build(checkpoint, parallel)
    norms = train(engine)
    adapters = adapter_tensors(engine)
    save_file({**adapters, "norms": torch.tensor(norms)}, directory / "adapters.safetensors")
    save_file(exported(engine), directory / "merged.safetensors")
    return directory


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_two_ranks_train_the_adapters_of_one(layout, one_process):
    on_ranks(trains_as_one_process, one_process, layout)


# One matrix is divided by its rows, the other by its columns.
OVERSIZED = ["q_proj (64 × 32)", "down_proj (32 × 64)"]


def has_oversized_targets(parallel, directory, layout):
    targets = ("q_proj", "down_proj")
    options = {"lora_rank": 40, "lora_target_modules": targets}
    engine = build(directory / "model", parallel, **options, **layout)
    assert oversized_targets(engine.model.module, 40) == OVERSIZED


def test_two_ranks_compare_a_rank_with_complete_matrices(one_process):
    on_ranks(has_oversized_targets, one_process, LAYOUTS["tensor"])


def saves_and_resumes(parallel, directory, layout):
    engine = build(directory / "model", parallel, **layout)
    train_on_ranks(engine, 2)
    checkpoint_saving.save(directory / "saved", 2, engine, {"run": "a"}, retain=1)
    train_on_ranks(engine, 1)
    resumed = build(directory / "model", parallel, **layout)
    sharded_checkpoint.load(directory / "saved" / "iter_0000002", resumed)
    train_on_ranks(resumed, 1)
    for name, tensor in adapter_tensors(engine).items():
        assert tensor.equal(adapter_tensors(resumed)[name]), name


@pytest.mark.parametrize("name", ["tensor and sequence", "pipeline", "data, distributed optimizer"])
def test_two_ranks_resume(name, one_process, tmp_path):
    (tmp_path / "model").symlink_to(one_process / "model")
    on_ranks(saves_and_resumes, tmp_path, LAYOUTS[name])


def continues_on_two_ranks(parallel, directory, layout):
    engine = build(directory / "model", parallel, **layout)
    sharded_checkpoint.load(directory / "saved" / "iter_0000002", engine)
    expected = load_file(directory / "adapters.safetensors")
    for name, tensor in adapter_tensors(engine).items():
        assert tensor.equal(expected[name]), name


@pytest.mark.parametrize("name", ["tensor", "pipeline"])
def test_a_checkpoint_is_resumed_on_another_layout(name, one_process, parallel, tmp_path):
    (tmp_path / "model").symlink_to(one_process / "model")
    engine = build(one_process / "model", parallel)
    train(engine, 2)
    checkpoint_saving.save(tmp_path / "saved", 2, engine, {"run": "a"}, retain=1)
    save_file(adapter_tensors(engine), tmp_path / "adapters.safetensors")
    on_ranks(continues_on_two_ranks, tmp_path, LAYOUTS[name])
