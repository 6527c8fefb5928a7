"""Training checkpoints: exact, complete or absent, newest found, old ones removed; and Hugging Face directories."""

import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from slime_tis.megatron import checkpoint
from slime_tis.megatron.batch import TrainingBatch, make_batch
from slime_tis.megatron.config import MegatronConfig
from slime_tis.megatron.engine import TrainingEngine
from slime_tis.megatron.parallel import Parallel, initialize, shut_down
from tests.checkpoints import make_checkpoint

TOKENS = [[3, 4, 5, 6, 7], [8, 9, 10], [11, 12, 13, 14]]


class Nothing:
    def merge(self, other: "Nothing") -> "Nothing":
        return self


def likelihood(batch: TrainingBatch, log_prob: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor, Any]:
    return -log_prob.sum(), torch.tensor(log_prob.numel(), dtype=torch.int), Nothing()


def steps(engine: TrainingEngine, count: int) -> list[float]:
    batch = make_batch(TOKENS, [3, 2, 2], [[1] * 3, [1] * 2, [1] * 2], {})
    return [engine.train_step(batch, [[0, 2], [1]], likelihood).grad_norm for _ in range(count)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_checkpoint(directory, "qwen3", tie_word_embeddings=True)
    return directory


@pytest.fixture(scope="module")
def parallel(model: Path) -> Iterator[Parallel]:
    yield initialize(MegatronConfig(hf_checkpoint=str(model)))
    shut_down()


def build(model: Path, parallel: Parallel, **options: Any) -> TrainingEngine:
    config = MegatronConfig(hf_checkpoint=str(model), lr=1e-3, lr_decay_style="linear", **options)
    return TrainingEngine(config, parallel, temperature=1.0, total_steps=10)


@pytest.mark.parametrize("options", [{}, {"use_distributed_optimizer": True}, {"bf16": True}], ids=str)
def test_training_goes_on_to_the_bit(options: dict[str, Any], model: Path, parallel: Parallel, tmp_path: Path) -> None:
    engine = build(model, parallel, **options)
    steps(engine, 2)
    checkpoint.save(tmp_path, 2, engine, {"step": 2}, retain=2)
    expected = steps(engine, 2)
    resumed = build(model, parallel, **options)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert checkpoint.load(found, resumed) == {"step": 2}
    assert steps(resumed, 2) == expected
    for name, tensor in resumed.named_hf_tensors():
        assert torch.equal(tensor, dict(engine.named_hf_tensors())[name])


def test_the_newest_complete_one_is_found_and_old_ones_go(model: Path, parallel: Parallel, tmp_path: Path) -> None:
    engine = build(model, parallel)
    assert checkpoint.newest(tmp_path) is None
    for step in (9, 10, 11):
        checkpoint.save(tmp_path, step, engine, {}, retain=2)
    (tmp_path / "iter_0000012").mkdir()  # a directory without a trainer's state is no checkpoint
    (tmp_path / ".iter_0000013.unfinished").mkdir()  # what a killed run leaves
    assert checkpoint.newest(tmp_path) == tmp_path / "iter_0000011"
    assert not (tmp_path / "iter_0000009").exists()
    checkpoint.save(tmp_path, 13, engine, {}, retain=2)
    assert checkpoint.newest(tmp_path) == tmp_path / "iter_0000013"
    assert not list(tmp_path.glob(".*"))


def test_a_disk_that_fills_up_leaves_the_earlier_checkpoint(model: Path, parallel: Parallel, tmp_path: Path) -> None:
    engine = build(model, parallel)
    checkpoint.save(tmp_path, 1, engine, {"step": 1}, retain=1)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, unlimited[1]))  # writes beyond it fail, as on a full disk
    try:
        with pytest.raises(checkpoint.CheckpointError, match="earlier checkpoints are intact") as failure:
            checkpoint.save(tmp_path, 2, engine, {"step": 2}, retain=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert "\n" not in str(failure.value)
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000001"]
    found = checkpoint.newest(tmp_path)
    assert found is not None and checkpoint.load(found, engine) == {"step": 1}


def test_a_checkpoint_of_another_model_is_refused(model: Path, parallel: Parallel, tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "runs", 1, build(model, parallel), {}, retain=1)
    make_checkpoint(tmp_path / "other", "qwen3", num_hidden_layers=3)
    with pytest.raises(checkpoint.CheckpointError, match="another model or layout"):
        checkpoint.load(tmp_path / "runs" / "iter_0000001", build(tmp_path / "other", parallel))


@pytest.mark.parametrize("shard_bytes", [2**40, 10_000])
def test_the_hugging_face_directory_loads_with_the_trained_weights(
    shard_bytes: int, model: Path, parallel: Parallel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", shard_bytes)
    engine = build(model, parallel)
    steps(engine, 1)
    checkpoint.save_hf(tmp_path / "hf", engine)
    checkpoint.save_hf(tmp_path / "hf", engine)  # again, over the first
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "hf").named_parameters())
    for name, tensor in engine.named_hf_tensors():
        assert torch.equal(loaded[name], tensor)
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").get_vocab()
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "float32"
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists() == (shard_bytes == 10_000)
