"""Exports in PEFT's format: read by PEFT and transformers, and loaded again."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from slime_tis.peft_directory import check_base, read_adapter_config
from slime_tis.trainer.megatron import sharded_checkpoint
from tests.checkpoints import make_checkpoint
from tests.lora.engines import (
    LENGTHS,
    PARTITION,
    TOKENS,
    adapter_tensors,
    base_engine,
    build,
    make_samples,
    randomize_adapters,
    train,
)
from tests.megatron.passes import on_ranks


def log_probs(model):
    """Log-probs of the responses by a model of transformers, in the order of the samples."""
    rows = []
    with torch.no_grad():
        for ids, length in zip(TOKENS, LENGTHS, strict=True):
            scores = model(torch.tensor([ids])).logits[0, -length - 1 : -1].log_softmax(-1)
            rows.append(scores.gather(1, torch.tensor(ids[-length:])[:, None])[:, 0])
    return torch.cat(rows)


FAMILIES = {
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "llama": ("llama", {"num_key_value_heads": 4}),
}
TARGETS = {
    "all": ("all-linear",),
    "query and value": ("q_proj", "v_proj"),
    "up projection": ("up_proj",),
}


@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize(("family", "sizes"), FAMILIES.values(), ids=FAMILIES)
def test_peft_computes_the_same_log_probs(family, sizes, targets, parallel, tmp_path):
    peft = pytest.importorskip("peft")
    checkpoint = make_checkpoint(tmp_path / "model", family, **sizes)
    engine = build(checkpoint, parallel, lora_target_modules=targets)
    randomize_adapters(engine, scale=0.02)
    expected = engine.log_probs(make_samples(), PARTITION)
    sharded_checkpoint.save_adapter(tmp_path / "adapter", engine)
    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    torch.testing.assert_close(log_probs(model), expected, rtol=1e-6, atol=1e-6)


def test_transformers_reads_the_merged_model(model, parallel, tmp_path):
    engine = build(model, parallel)
    randomize_adapters(engine, scale=0.02)
    sharded_checkpoint.save_hf(tmp_path / "merged", engine)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    expected = engine.log_probs(make_samples(), PARTITION)
    torch.testing.assert_close(log_probs(merged), expected, rtol=2e-6, atol=2e-6)


def test_a_merged_model_has_the_precision_of_training(model, parallel, tmp_path):
    engine = build(model, parallel, bf16=True)
    sharded_checkpoint.save_hf(tmp_path / "merged", engine)
    tensors = load_file(tmp_path / "merged" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


@pytest.mark.parametrize("options", [{}, {"bf16": True}], ids=["fp32", "bf16"])
def test_an_adapter_is_loaded_exactly(options, model, parallel, tmp_path):
    engine = build(model, parallel, lora_target_modules=("q_proj", "down_proj"), **options)
    train(engine)
    sharded_checkpoint.save_adapter(tmp_path / "adapter", engine)
    loaded = load(model, parallel, tmp_path / "adapter", **options)
    expected = adapter_tensors(engine)
    assert adapter_tensors(loaded).keys() == expected.keys()
    for name, tensor in adapter_tensors(loaded).items():
        assert torch.equal(tensor, expected[name]), name


def test_a_loaded_adapter_has_its_log_probs(model, parallel, tmp_path):
    engine = build(model, parallel)
    train(engine)
    sharded_checkpoint.save_adapter(tmp_path / "adapter", engine)
    loaded = load(model, parallel, tmp_path / "adapter")
    expected = engine.log_probs(make_samples(), PARTITION)
    assert torch.equal(loaded.log_probs(make_samples(), PARTITION), expected)


def load(model, parallel, directory, **options):
    return base_engine(model, parallel, lora_adapter_path=str(directory), **options)


def test_rank_stabilized_scales_are_understood(model, parallel, tmp_path):
    engine = build(model, parallel, lora_rank=4, lora_alpha=8.0)
    randomize_adapters(engine)
    sharded_checkpoint.save_adapter(tmp_path / "adapter", engine)
    change_config(tmp_path / "adapter", use_rslora=True, lora_alpha=4.0)  # 4 / √4 = 8 / 4
    loaded = load(model, parallel, tmp_path / "adapter")
    expected = engine.log_probs(make_samples(), PARTITION)
    assert torch.equal(loaded.log_probs(make_samples(), PARTITION), expected)


def test_fields_without_effect_are_accepted(model, parallel, tmp_path):
    sharded_checkpoint.save_adapter(tmp_path / "adapter", build(model, parallel))
    fields = {"lora_ga_config": {"scale": "stable"}, "runtime_config": {"ephemeral_gpu_offload": 1}}
    change_config(tmp_path / "adapter", **fields, use_future=False)
    load(model, parallel, tmp_path / "adapter")


def change_config(directory, **fields):
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_tensors(directory, change):
    path = directory / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
INTEGERS = torch.zeros(4, 32, dtype=torch.int32)
OUTPUT_LAYER = {
    "base_model.model.lm_head.lora_A.weight": torch.zeros(4, 32),
    "base_model.model.lm_head.lora_B.weight": torch.zeros(64, 4),
}


def without_first(tensors):
    """Removes both matrices of the query projection of layer 0."""
    del tensors[FIRST]
    del tensors[FIRST.replace("lora_A", "lora_B")]


SPOILED = {
    "another method": (
        lambda path: change_config(path, use_dora=True),
        "has use_dora True; only plain LoRA is supported",
    ),
    "another kind": (lambda path: change_config(path, peft_type="IA3"), "no LoRA adapter of PEFT"),
    "an initialization that changes the model": (
        lambda path: change_config(path, init_lora_weights="pissa_niter_4"),
        "has init_lora_weights 'pissa_niter_4'; only plain LoRA is supported",
    ),
    "an unknown method": (
        lambda path: change_config(path, use_future=True),
        "has 'use_future' True, a field that this version does not know",
    ),
    "rank": (lambda path: change_config(path, r=0), "has r 0, which must be an integer from 1"),
    "rank of other tensors": (lambda path: change_config(path, r=8), "which does not fit r 8"),
    "scale": (lambda path: change_config(path, lora_alpha=-1), "has lora_alpha -1, which must be"),
    "huge scale": (lambda path: change_config(path, lora_alpha=10**400), "has lora_alpha 1000"),
    "integers": (
        lambda path: change_tensors(path, lambda tensors: tensors.update({FIRST: INTEGERS})),
        "is of type I32, not one of F64, F32, F16, BF16",
    ),
    "no config": (lambda path: (path / "adapter_config.json").unlink(), "holds no adapter_config"),
    "no tensors": (
        lambda path: (path / "adapter_model.safetensors").unlink(),
        "holds no adapter_model",
    ),
    "other layers than the list": (
        lambda path: change_config(path, target_modules=["q_proj"]),
        "has target_modules q_proj, and its tensors are of down_proj, gate_proj",
    ),
    "some layers of the model": (
        lambda path: change_config(path, layers_to_transform=[0]),
        r"has layers_to_transform \[0\]; only plain LoRA is supported",
    ),
    "a missing tensor": (
        lambda path: change_tensors(path, lambda tensors: tensors.pop(FIRST)),
        "has the tensor .*layers.0.self_attn.q_proj.lora_B.weight without .*q_proj.lora_A.weight",
    ),
    "a missing layer": (
        lambda path: change_tensors(path, without_first),
        "adapters of q_proj is 1, and the model has 2 layers; only adapters of all layers",
    ),
    "NaN": (
        lambda path: change_tensors(path, lambda tensors: tensors[FIRST].fill_(torch.nan)),
        "holds NaN or infinity",
    ),
    "another shape": (
        lambda path: change_tensors(
            path, lambda tensors: tensors.update({FIRST: torch.zeros(4, 8)})
        ),
        "does not fit the model and the rank",
    ),
    "an embedding": (
        lambda path: change_tensors(path, lambda tensors: tensors.update(OUTPUT_LAYER)),
        "its tensors are of down_proj, gate_proj, k_proj, lm_head",
    ),
}


@pytest.mark.parametrize(("spoil", "message"), SPOILED.values(), ids=SPOILED)
def test_other_directories_are_refused(spoil, message, model, parallel, tmp_path):
    sharded_checkpoint.save_adapter(tmp_path / "adapter", build(model, parallel))
    spoil(tmp_path / "adapter")
    with pytest.raises(ValueError, match=message):
        load(model, parallel, tmp_path / "adapter")


TWO = ("q_proj", "down_proj")


def test_listed_layers_may_have_prefixes(model, parallel, tmp_path):
    sharded_checkpoint.save_adapter(tmp_path, build(model, parallel, lora_target_modules=TWO))
    change_config(tmp_path, target_modules=["self_attn.q_proj", "mlp.down_proj"])
    assert read_adapter_config(tmp_path, "x").targets == ("down_proj", "q_proj")


OTHER_MODELS = {
    "size": ({"hidden_size": 64}, "belongs to another model"),
    "depth": ({"num_hidden_layers": 1}, "adapts model.layers.1.mlp.down_proj, which"),
}


@pytest.mark.parametrize(("sizes", "message"), OTHER_MODELS.values(), ids=OTHER_MODELS)
def test_an_adapter_of_another_model_is_refused_by_its_headers(
    sizes, message, model, parallel, tmp_path
):
    sharded_checkpoint.save_adapter(tmp_path / "adapter", build(model, parallel))
    other = make_checkpoint(tmp_path / "other", "qwen3", **sizes)
    with pytest.raises(ValueError, match=message):
        check_base(tmp_path / "adapter", other, "--lora-adapter-path is 'adapter'", layers=2)


def test_an_adapter_of_the_model_is_accepted_by_its_headers(model, parallel, tmp_path):
    sharded_checkpoint.save_adapter(tmp_path, build(model, parallel))
    check_base(tmp_path, model, "x", layers=2)


def test_an_adapter_of_some_layers_is_refused_by_its_headers(model, parallel, tmp_path):
    sharded_checkpoint.save_adapter(tmp_path, build(model, parallel))
    change_tensors(tmp_path, without_first)
    with pytest.raises(ValueError, match="adapters of q_proj is 1, and the model has 2 layers"):
        check_base(tmp_path, model, "x", layers=2)


def exports_and_loads(parallel, directory, layout):
    engine = base_engine(
        directory / "model", parallel, lora_adapter_path=str(directory / "adapter"), **layout
    )
    sharded_checkpoint.save_adapter(directory / "again", engine)


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 2},
    ],
    ids=["tensor", "pipeline"],
)
def test_two_ranks_export_the_adapter_that_they_load(layout, parallel, tmp_path):
    checkpoint = make_checkpoint(tmp_path / "model", "qwen3")
    engine = build(checkpoint, parallel)
    randomize_adapters(engine)
    sharded_checkpoint.save_adapter(tmp_path / "adapter", engine)
    on_ranks(exports_and_loads, tmp_path, layout)
    expected = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    actual = load_file(tmp_path / "again" / "adapter_model.safetensors")
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
