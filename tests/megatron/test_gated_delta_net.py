"""Gated delta nets of the training engine: packing, long sequences, checkpoints."""

import pytest
import torch

from slime_tis.trainer.configs.megatron import MegatronConfig
from slime_tis.trainer.megatron import checkpoint_saving, sharded_checkpoint
from slime_tis.trainer.megatron.batch import make_batch
from slime_tis.trainer.megatron.gated_delta_rule import CHUNK
from slime_tis.trainer.megatron.training_engine import TrainingEngine
from tests.checkpoints import VOCAB_SIZE, make_checkpoint, transformers_model
from tests.megatron.passes import likelihood, on_ranks
from tests.megatron.test_family_layers import BATCH, build, resumes_with_equal_weights

FIELDS = {"max_position_embeddings": 512}
LENGTHS = [3, CHUNK + 1, 2 * CHUNK + 30]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_next", **FIELDS)


@pytest.fixture(scope="module")
def engine(checkpoint, parallel):
    config = MegatronConfig(hf_checkpoint=str(checkpoint))
    return TrainingEngine(config, parallel, temperature=1.0, total_steps=1)


def random_tokens(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]


def log_probs(engine, tokens):
    """Of all tokens but the first of each sequence, which are packed into one row."""
    masks = [[1] * (len(ids) - 1) for ids in tokens]
    zeros = [[0.0] * (len(ids) - 1) for ids in tokens]
    batch = make_batch(tokens, masks, zeros, masks)
    packed = engine.log_probs(batch, [list(range(len(tokens)))])
    return packed.flatten().split([len(ids) - 1 for ids in tokens])


def test_sequences_longer_than_a_chunk_have_the_log_probs_of_transformers(engine, checkpoint):
    model = transformers_model(checkpoint)
    tokens = random_tokens(LENGTHS)
    for ids, actual in zip(tokens, log_probs(engine, tokens), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :-1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_a_packed_sequence_does_not_see_the_one_before(engine):
    first, second = random_tokens([40, 25])
    (other,) = random_tokens([40], seed=1)
    _, after_first = log_probs(engine, [first, second])
    _, after_other = log_probs(engine, [other, second])
    assert torch.equal(after_first, after_other)


def test_a_packed_sequence_does_not_see_the_one_behind(engine):
    first, second = random_tokens([40, 25])
    (other,) = random_tokens([25], seed=1)
    before_second, _ = log_probs(engine, [first, second])
    before_other, _ = log_probs(engine, [first, other])
    assert torch.equal(before_second, before_other)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_states_of_heads_are_resumed_on_two_ranks(family, tmp_path):
    make_checkpoint(tmp_path / "model", family)
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    on_ranks(resumes_with_equal_weights, tmp_path, layout)


def trained_on_divided_heads(parallel, directory, layout):
    """Saves a checkpoint after one step, and the weights after the next one."""
    engine = build(directory, parallel, layout)
    engine.train_step(BATCH, [[0]], likelihood)
    checkpoint_saving.save(directory / "save", 1, engine, {"run": "a", "step": 1}, retain=1)
    engine.train_step(BATCH, [[0]], likelihood)
    weights = {name: tensor.clone() for name, tensor in engine.named_hf_tensors()}
    torch.save(weights, directory / f"weights_{parallel.rank}.pt")


def continued_with_complete_heads(parallel, directory, layout):
    """Resumes on ranks with all heads, and compares the weights after the next step."""
    engine = build(directory, parallel, layout)
    checkpoint, _ = sharded_checkpoint.latest_complete_checkpoint(directory / "save")
    sharded_checkpoint.load(checkpoint, engine)
    engine.train_step(BATCH, [[0]], likelihood)
    expected = torch.load(directory / f"weights_{parallel.rank}.pt")
    torch.testing.assert_close(dict(engine.named_hf_tensors()), expected, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_of_divided_heads_is_resumed_with_all_heads(tmp_path):
    make_checkpoint(tmp_path / "model", "qwen3_5")
    on_ranks(trained_on_divided_heads, tmp_path, {"tensor_model_parallel_size": 2})
    on_ranks(continued_with_complete_heads, tmp_path, {})
