"""LoRA adapters on megatron-core's linear layers: values, gradients, and what is trained."""

import pytest
import torch

from slime_tis.trainer.megatron import checkpoint_saving, sharded_checkpoint
from slime_tis.trainer.megatron.hf_weights import named_weights
from slime_tis.trainer.megatron.lora import adapters_of, is_adapter_parameter
from tests.checkpoints import make_checkpoint
from tests.lora.engines import (
    PARTITION,
    RANK,
    adapter_tensors,
    base_engine,
    build,
    exported,
    make_samples,
    randomize_adapters,
    train,
)
from tests.megatron.passes import RECOMPUTE_LAYERS, weighted_loss

VARIANTS = {
    "fp32": {},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True, "initial_loss_scale": 64.0},
    "distributed optimizer": {"use_distributed_optimizer": True},
    "recomputation": RECOMPUTE_LAYERS,
    "two targets": {"lora_target_modules": ("q_proj,v_proj",)},
}


@pytest.mark.parametrize("options", [{}, {"bf16": True}], ids=["fp32", "bf16"])
def test_new_adapters_leave_log_probs_bitwise_unchanged(options, model, parallel):
    expected = base_engine(model, parallel, **options).log_probs(make_samples(), PARTITION)
    actual = build(model, parallel, **options).log_probs(make_samples(), PARTITION)
    assert torch.equal(actual, expected)


@pytest.fixture(scope="module", params=VARIANTS)
def trained(request, model, parallel):
    """An engine after three steps, and its own weights and adapters before."""
    engine = build(model, parallel, **VARIANTS[request.param])
    weights = {name: weight.clone() for name, weight in named_weights(engine.model.module).items()}
    adapters = adapter_tensors(engine)
    train(engine)
    return engine, weights, adapters


def test_the_model_s_own_weights_stay_bitwise_equal(trained):
    engine, before, _ = trained
    for name, weight in named_weights(engine.model.module).items():
        assert torch.equal(weight, before[name]), name


def test_every_matrix_of_the_adapters_is_trained(trained):
    engine, _, before = trained
    for name, tensor in adapter_tensors(engine).items():
        assert not torch.equal(tensor, before[name]), name


def test_the_optimizer_holds_only_adapters(trained):
    engine, _, _ = trained
    moments = 0
    for wrapper in sharded_checkpoint.torch_adams(engine.optimizer):
        for state in wrapper.optimizer.state.values():
            moments += state["exp_avg"].numel()
    assert moments == sum(tensor.numel() for tensor in adapter_tensors(engine).values())


def test_an_adapter_without_a_target_is_not_made(model, parallel):
    engine = build(model, parallel, lora_target_modules=("o_proj",))
    assert set(adapters_of(engine.model.module)) == {
        "decoder.layers.0.self_attention.linear_proj.weight",
        "decoder.layers.1.self_attention.linear_proj.weight",
    }


FAMILIES = {
    "grouped queries, norms of queries and keys": ("qwen3", {}),
    "biases": ("qwen2", {}),
    "one key per query": ("llama", {"num_key_value_heads": 4}),
    "norms of outputs": ("olmo2", {}),
    "windows": ("mistral", {"sliding_window": 3}),
    "layers without rotation": ("smollm3", {}),
}


@pytest.mark.parametrize(("family", "sizes"), FAMILIES.values(), ids=FAMILIES)
def test_merged_weights_have_the_adapters_log_probs(family, sizes, parallel, tmp_path):
    checkpoint = make_checkpoint(tmp_path / "model", family, **sizes)
    engine = build(checkpoint, parallel)
    randomize_adapters(engine)
    unmerged = engine.log_probs(make_samples(), PARTITION)
    sharded_checkpoint.save_hf(tmp_path / "merged", engine)
    merged = base_engine(tmp_path / "merged", parallel)
    torch.testing.assert_close(
        merged.log_probs(make_samples(), PARTITION), unmerged, rtol=0, atol=2e-5
    )


LINEAR_LAYERS = [
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
]


@pytest.mark.parametrize("name", LINEAR_LAYERS)
def test_gradients_are_those_of_the_merged_weight_in_float64(name, model, parallel):
    engine = build(model, parallel)
    randomize_adapters(engine)
    layer = engine.model.module.decoder.layers[0].double()
    linear = layer.get_submodule(name)
    adapter = adapters_of(engine.model.module)[f"decoder.layers.0.{name}.weight"]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(7, 1, linear.weight.shape[1], generator=generator, dtype=torch.float64)
    weights = torch.randn(7, 1, linear.weight.shape[0], generator=generator, dtype=torch.float64)
    parameters = [*adapter.down.values(), *adapter.up.values()]
    output, _ = linear(x)
    actual = torch.autograd.grad((output * weights).sum(), parameters)
    products = [adapter.up[key] @ adapter.down[key] for key in adapter.fusion.names]
    merged = linear.weight + 2.0 * joined(name, products)  # alpha 8 of rank 4
    expected_output = torch.nn.functional.linear(x, merged, linear.bias)
    expected = torch.autograd.grad((expected_output * weights).sum(), parameters)
    torch.testing.assert_close(output, expected_output, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def joined(name, parts):
    """The rows of projections in megatron-core's order, for 4 query and 2 key heads of width 16."""
    if name != "self_attention.linear_qkv":
        return torch.cat(parts)
    query, key, value = parts
    rows = []
    for group in range(2):
        rows.append(query[group * 32 : (group + 1) * 32])
        rows.append(key[group * 16 : (group + 1) * 16])
        rows.append(value[group * 16 : (group + 1) * 16])
    return torch.cat(rows)


@pytest.mark.parametrize("options", [{}, RECOMPUTE_LAYERS], ids=["stored", "recomputed"])
def test_gradients_follow_from_the_merged_model_s(options, model, parallel):
    """With ∂W of the merged model, ∂B = s · ∂W Aᵀ and ∂A = s · Bᵀ ∂W; here of o_proj."""
    engine = build(model, parallel, lr=0.0, **options)
    randomize_adapters(engine)
    merged = base_engine(model, parallel, lr=0.0)
    weights = named_weights(merged.model.module)
    adapters = adapters_of(engine.model.module)
    for name, adapter in adapters.items():
        weights[name].data += adapter.weight_change()
    engine.train_step(make_samples(), PARTITION, weighted_loss)
    merged.train_step(make_samples(), PARTITION, weighted_loss)
    for number in range(2):
        name = f"decoder.layers.{number}.self_attention.linear_proj.weight"
        gradient = weights[name].main_grad
        down = adapters[name].down["o_proj"]
        up = adapters[name].up["o_proj"]
        torch.testing.assert_close(up.main_grad, 2.0 * gradient @ down.T, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(down.main_grad, 2.0 * up.T @ gradient, rtol=1e-4, atol=1e-5)


def test_the_reference_policy_is_the_model_without_adapters(model, parallel):
    engine = build(model, parallel, keep_reference=True)
    expected = base_engine(model, parallel).log_probs(make_samples(), PARTITION)
    train(engine)
    assert torch.equal(engine.reference_log_probs(make_samples(), PARTITION), expected)


def test_the_reference_policy_needs_no_copy_of_the_weights(model, parallel):
    assert build(model, parallel, keep_reference=True).reference is None


def test_dropout_acts_only_in_training(model, parallel):
    engine = build(model, parallel, lora_dropout=0.5)
    randomize_adapters(engine)
    plain = build(model, parallel)
    randomize_adapters(plain)
    expected = plain.log_probs(make_samples(), PARTITION)
    assert torch.equal(engine.log_probs(make_samples(), PARTITION), expected)
    assert train(engine, 1) != train(plain, 1)


def test_adapters_on_experts_are_refused(parallel, tmp_path):
    checkpoint = make_checkpoint(tmp_path, "qwen3_moe")
    with pytest.raises(ValueError, match=r"gate_proj, up_proj.* has it in experts"):
        build(checkpoint, parallel)


def test_the_attention_of_a_mixture_of_experts_is_trained(parallel, tmp_path):
    checkpoint = make_checkpoint(tmp_path, "qwen3_moe")
    engine = build(checkpoint, parallel, lora_target_modules=("q_proj", "o_proj"))
    before = exported(engine)
    train(engine)
    changed = {name for name, tensor in exported(engine).items() if not tensor.equal(before[name])}
    expected = set()
    for number in range(2):
        for name in ("q_proj", "o_proj"):
            expected.add(f"model.layers.{number}.self_attn.{name}.weight")
    assert changed == expected


@pytest.mark.parametrize(
    "options",
    [{}, {"bf16": True}, {"use_distributed_optimizer": True}, {"lora_dropout": 0.3}],
    ids=["fp32", "bf16", "distributed optimizer", "dropout"],
)
def test_resumption_is_bitwise(options, model, parallel, tmp_path):
    engine = build(model, parallel, **options)
    train(engine, 2)
    checkpoint_saving.save(tmp_path, 2, engine, {"run": "a"}, retain=1)
    expected = train(engine, 2)
    resumed = build(model, parallel, **options)
    sharded_checkpoint.load(tmp_path / "iter_0000002", resumed)
    assert train(resumed, 2) == expected
    for name, tensor in adapter_tensors(engine).items():
        assert tensor.equal(adapter_tensors(resumed)[name]), name


def test_a_checkpoint_has_no_weights_of_the_model(model, parallel):
    state = sharded_checkpoint.sharded_state(build(model, parallel), is_loading=False)
    assert all(map(is_adapter_parameter, state["model"]))
    assert len(state["model"]) == 2 * 2 * 7  # A and B, layers, projections
    assert state["model"]["decoder.layers.0.mlp.lora_linear_fc2.down.down_proj"].data.shape == (
        RANK,
        64,
    )
