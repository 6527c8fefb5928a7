"""Logits and exports equal transformers' for every family."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from slime_tis.families import FAMILIES
from slime_tis.hf_directory import moe_sizes
from slime_tis.trainer.configs.megatron import MegatronConfig
from slime_tis.trainer.megatron import hf_weights, sharded_checkpoint
from slime_tis.trainer.megatron.batch import make_batch
from slime_tis.trainer.megatron.hf_weights import GATHERED_BYTES
from slime_tis.trainer.megatron.packing import RowSplit, pack
from slime_tis.trainer.megatron.sharded_checkpoint import save_hf
from slime_tis.trainer.megatron.training_engine import TrainingEngine
from tests.checkpoints import architecture_of_family, make_checkpoint, transformers_model
from tests.megatron.family_models import FAMILY_MODELS
from tests.megatron.passes import on_ranks

LENGTHS = (7, 13, 20)
# The vocabulary is odd, so that it is padded on two tensor-parallel ranks.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
GROUPS = {
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "use_qk_norm": True,
    "attention_bias": True,
    "partial_rotary_factor": 0.25,
    "first_k_dense_replace": 0,
}
CASES = {
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "llama": ("llama", {"vocab_size": 67, "rope_parameters": LLAMA3_ROPE}),
    "qwen3_moe, weights of the best sum to 1": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_moe, weights of the best as they are": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen3_moe, first layer dense": ("qwen3_moe", {"mlp_only_layers": [0]}),
    "qwen3_moe, every second layer sparse": (
        "qwen3_moe",
        {"num_hidden_layers": 3, "decoder_sparse_step": 2},
    ),
    "qwen2_moe, weights of the best as they are": ("qwen2_moe", {"norm_topk_prob": False}),
    "qwen2_moe, weights of the best sum to 1, no bias": (
        "qwen2_moe",
        {"norm_topk_prob": True, "qkv_bias": False},
    ),
    "glm4_moe, first layer dense": ("glm4_moe", {}),
    "glm4_moe, groups, norms, biases, two shared experts": ("glm4_moe", GROUPS),
    "glm4_moe, one expert per token": (
        "glm4_moe",
        {"num_experts_per_tok": 1, "norm_topk_prob": False},
    ),
    **FAMILY_MODELS,
}

WHOLE_EXPERTS = {name: case for name, case in CASES.items() if case[0] == "gpt_oss"}
"""Models whose experts tensor-parallel ranks cannot divide."""


def compare(directory, parallel, layout):
    reference = transformers_model(directory)
    vocab = reference.config.vocab_size
    splits = (
        parallel.tensor_size > 1 and moe_sizes(reference.config) is not None
    )  # megatron-core asks for it
    config = MegatronConfig(hf_checkpoint=str(directory), sequence_parallel=splits, **layout)
    engine = TrainingEngine(config, parallel, temperature=1.0, total_steps=1)
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(vocab, (length,), generator=generator).tolist() for length in LENGTHS]
    batch = make_batch(tokens, [[1]] * len(tokens), [[0.0]] * len(tokens), [[0]] * len(tokens))

    packed = pack(
        batch,
        RowSplit(tensor_size=parallel.tensor_size if splits else 1),
        rotary=engine.model.rotary,
    )
    with torch.no_grad():
        every_row = replace(packed.packed_seq_params, response_rows=None, gives_logits=True)
        shard = engine.model.module(
            packed.input_ids, packed.position_ids, None, packed_seq_params=every_row
        )[0]
        shards = [torch.empty_like(shard) for _ in range(parallel.tensor_size)]
        dist.all_gather(shards, shard.contiguous(), group=parallel.tensor_group)
        logits = torch.cat(shards, 1)[: sum(LENGTHS), :vocab]
        expected = torch.cat([reference(torch.tensor([ids])).logits[0] for ids in tokens])
    difference = (logits - expected).abs().max().item()
    bound = 2e-5 if "shared_expert_intermediate_size" in vars(reference.config) else 1e-5
    assert difference <= bound, f"{directory.name}: logits differ by {difference}"

    columns = engine.log_probs(batch, [[*range(len(LENGTHS))]], sums_squares=True)
    squares = (
        expected[torch.tensor(LENGTHS).cumsum(0) - 2].softmax(1).square().sum(1)
    )  # predict the last tokens
    torch.testing.assert_close(columns[:, 1], squares, rtol=1e-5, atol=1e-6)

    for at_once in (GATHERED_BYTES, 1):  # all experts of a layer, and one of each rank
        hf_weights.GATHERED_BYTES = at_once
        names = load_file(directory / "model.safetensors")
        for name, tensor in engine.named_hf_tensors():
            assert torch.equal(tensor, names.pop(name)), (
                f"{directory.name}: {name} changed on its way"
            )
        assert not names, f"{directory.name}: {sorted(names)} were not exported"


def compare_all(parallel, directory, layout):
    """Compares every checkpoint under `directory`."""
    for family in sorted(path for path in directory.iterdir() if path.is_dir()):
        compare(family, parallel, layout)
        (family / f"parity_{parallel.rank}").touch()


@pytest.mark.parametrize("ranks", [1, 2])
def test_models_match_transformers(ranks, tmp_path):
    cases = {name: case for name, case in CASES.items() if case not in WHOLE_EXPERTS.values()}
    compare_on_ranks(cases, tmp_path, {"tensor_model_parallel_size": ranks}, ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_models_with_whole_experts_match_transformers(ranks, tmp_path):
    layout = {"tensor_model_parallel_size": ranks, "expert_tensor_parallel_size": 1}
    compare_on_ranks(WHOLE_EXPERTS, tmp_path, layout, ranks)


def compare_on_ranks(cases, directory, layout, ranks):
    for name, (family, sizes) in cases.items():
        make_checkpoint(directory / name, family, **sizes)
    on_ranks(compare_all, directory, layout, ranks)
    assert len(list(directory.glob("*/parity_*"))) == ranks * len(cases)


def test_every_family_that_the_command_line_accepts_is_compared():
    compared = {architecture_of_family(family) for family, _ in CASES.values()}
    assert compared == set(FAMILIES)


@pytest.fixture(scope="module")
def engine(model, parallel):
    return TrainingEngine(
        MegatronConfig(hf_checkpoint=str(model)), parallel, temperature=1.0, total_steps=10
    )


@pytest.fixture(scope="module", params=[2**40, 10_000], ids=["one file", "several files"])
def export(request, engine, tmp_path_factory):
    """A Hugging Face directory, written twice, and whether it has several files of weights."""
    directory = tmp_path_factory.mktemp("export") / "hf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_checkpoint, "SHARD_BYTES", 20_000)
        assert save_hf(directory, engine) == directory
        patch.setattr(sharded_checkpoint, "SHARD_BYTES", request.param)
        save_hf(directory, engine)
    return directory, request.param == 10_000


def test_the_hugging_face_directory_loads_with_the_weights(engine, export):
    directory, _ = export
    loaded = dict(AutoModelForCausalLM.from_pretrained(directory).named_parameters())
    for name, tensor in engine.named_hf_tensors():
        assert torch.equal(loaded[name], tensor)


def test_the_hugging_face_directory_has_the_tokenizer(export):
    assert AutoTokenizer.from_pretrained(export[0]).get_vocab()


def test_the_hugging_face_directory_has_the_precision(export):
    assert json.loads((export[0] / "config.json").read_text())["dtype"] == "float32"


def test_only_several_files_have_an_index(export):
    directory, has_several = export
    assert (directory / "model.safetensors.index.json").exists() == has_several


def test_an_export_leaves_no_other_files(export):
    directory, _ = export
    listed = json.loads((directory / ".slime_tis_export.json").read_text())["files"]
    assert {path.name for path in directory.iterdir()} == {*listed, ".slime_tis_export.json"}
    assert [path.name for path in directory.parent.iterdir()] == ["hf"]


def test_an_export_through_a_link_replaces_its_target(engine, tmp_path):
    save_hf(tmp_path / "real", engine)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real" / "model.safetensors").write_bytes(b"old")
    assert save_hf(tmp_path / "link", engine) == tmp_path / "real"
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "model.safetensors").stat().st_size > 10_000


def test_an_export_of_an_exported_model_has_one_marker(engine, tmp_path):
    save_hf(tmp_path / "first", engine)
    config = MegatronConfig(hf_checkpoint=str(tmp_path / "first"))
    copy = TrainingEngine(config, engine.parallel, temperature=1.0, total_steps=1)
    save_hf(tmp_path / "hf", copy)
    listed = json.loads((tmp_path / "hf" / ".slime_tis_export.json").read_text())["files"]
    assert "model.safetensors" in listed
    assert ".slime_tis_export.json" not in listed
