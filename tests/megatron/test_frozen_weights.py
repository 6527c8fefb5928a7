"""Weights that are not trained: --freeze-params-name-list and --only-train-params-name-list."""

import dataclasses
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_tis.trainer.configs.megatron import MegatronConfig
from slime_tis.trainer.megatron import checkpoint_saving, sharded_checkpoint
from slime_tis.trainer.megatron.batch import make_batch
from slime_tis.trainer.megatron.frozen_weights import slime_names
from slime_tis.trainer.megatron.training_engine import TrainingEngine
from tests.checkpoints import make_checkpoint
from tests.megatron.passes import RECOMPUTE_LAYERS, likelihood, on_ranks

TOKENS = [[3, 4, 5, 6, 7], [8, 9, 10], [11, 12, 13, 14], [15, 16, 17]]
LENGTHS = [3, 2, 2, 2]
BATCH = make_batch(
    TOKENS,
    [[1] * length for length in LENGTHS],
    [[0.0] * length for length in LENGTHS],
    [[0] * length for length in LENGTHS],
)
PARTITION = [[0, 2], [1, 3]]
FREEZE = {"freeze_params_name_list": ("embedding", r"layers\.0\.", "linear_fc2")}
FROZEN_TENSORS = (
    "model.embed_tokens.",
    "model.layers.0.",
    "model.layers.1.mlp.down_proj.",
    "lm_head.",
)
"""Beginnings of the Hugging Face names of what FREEZE excludes; the output layer is tied."""


def build(checkpoint, parallel, **options):
    config = MegatronConfig(hf_checkpoint=str(checkpoint), lr=1e-2, **options)
    return TrainingEngine(config, parallel, temperature=1.0, total_steps=10)


def train(engine, steps=3):
    return [engine.train_step(BATCH, PARTITION, likelihood).grad_norm for _ in range(steps)]


def tensors(engine):
    return {name: tensor.clone() for name, tensor in engine.named_hf_tensors()}


def is_frozen(name):
    return name.startswith(FROZEN_TENSORS)


@pytest.mark.parametrize(
    ("name", "matched"),
    [
        ("embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
        ("output_layer.weight", "embedding.word_embeddings.weight"),
        ("decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.4.mlp.linear_fc1.weight"),
        (
            "decoder.layers.0.input_layernorm.weight",
            "decoder.layers.4.self_attention.linear_qkv.layer_norm_weight",
        ),
        (
            "decoder.layers.0.pre_mlp_layernorm.weight",
            "decoder.layers.4.mlp.linear_fc1.layer_norm_weight",
        ),
        ("decoder.layers.1.pre_mlp_layernorm.weight", "decoder.layers.5.pre_mlp_layernorm.weight"),
        (
            "decoder.layers.1.mlp.experts.local_experts.12.linear_fc2.weight",
            "decoder.layers.5.mlp.experts.linear_fc2.weight",
        ),
    ],
    ids=["embedding", "tied copy", "layer", "norm", "norm of MLP", "norm of experts", "expert"],
)
def test_names_are_those_of_slime(name, matched):
    router = "decoder.layers.1.mlp.router.weight"
    assert slime_names([router, name], first_layer=4, tied=True)[name] == matched


VARIANTS = {
    "fp32": {},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True, "initial_loss_scale": 64.0},
    "distributed optimizer": {"use_distributed_optimizer": True},
    "bf16, distributed optimizer": {"bf16": True, "use_distributed_optimizer": True},
    "recomputation": RECOMPUTE_LAYERS,
}


@pytest.fixture(scope="module", params=VARIANTS)
def trained(request, model, parallel):
    """An engine with frozen weights after three steps, and its weights before."""
    engine = build(model, parallel, **FREEZE, **VARIANTS[request.param])
    before = tensors(engine)
    train(engine)
    return engine, before


def test_frozen_weights_stay_bitwise_equal(trained):
    engine, before = trained
    changed = {name for name, tensor in tensors(engine).items() if not tensor.equal(before[name])}
    assert changed == {name for name in before if not is_frozen(name)}
    assert len(changed) == 11  # the second layer without down_proj, and the last norm


def test_frozen_weights_have_no_gradient_buffer(trained):
    engine, _ = trained
    sizes = [len(buffer.grad_data) for buffer in engine.ddp.buffers]
    trained_sizes = [weight.numel() for weight in engine._trained_weights()]
    padding = 64 * len(trained_sizes)  # of the distributed optimizer
    assert sum(trained_sizes) <= sum(sizes) <= sum(trained_sizes) + padding
    for weight in engine.model.module.parameters():
        assert hasattr(weight, "main_grad") == weight.requires_grad


def test_frozen_weights_have_no_optimizer_state(trained):
    engine, _ = trained
    moments = 0
    for wrapper in sharded_checkpoint.torch_adams(engine.optimizer):
        for state in wrapper.optimizer.state.values():
            moments += state["exp_avg"].numel()
    assert moments == sum(weight.numel() for weight in engine._trained_weights())


def test_the_gradient_norm_excludes_frozen_weights(model, parallel):
    everything = build(model, parallel, clip_grad=0.0)
    everything.train_step(BATCH, PARTITION, likelihood)
    engine = build(model, parallel, **FREEZE)
    names = {
        name for name, weight in engine.model.module.named_parameters() if weight.requires_grad
    }
    squares = 0.0
    for name, weight in everything.model.module.named_parameters():
        if name in names:
            squares += float(weight.main_grad.double().square().sum())
    assert train(engine, 1) == [pytest.approx(math.sqrt(squares), rel=1e-6)]


@pytest.mark.parametrize("options", [{}, RECOMPUTE_LAYERS], ids=["stored", "recomputed"])
def test_trained_weights_have_their_usual_gradient(options, model, parallel):
    everything = build(model, parallel, clip_grad=0.0)
    everything.train_step(BATCH, PARTITION, likelihood)
    engine = build(model, parallel, clip_grad=0.0, **FREEZE, **options)
    engine.train_step(BATCH, PARTITION, likelihood)
    expected = dict(everything.model.module.named_parameters())
    for name, weight in engine.model.module.named_parameters():
        if weight.requires_grad:
            assert weight.main_grad.any(), name
            torch.testing.assert_close(weight.main_grad, expected[name].main_grad)


def test_only_named_weights_train(model, parallel):
    engine = build(model, parallel, only_train_params_name_list=("final_layernorm", "q_layernorm"))
    before = tensors(engine)
    train(engine)
    changed = {name for name, tensor in tensors(engine).items() if not tensor.equal(before[name])}
    assert changed == {
        "model.norm.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.1.self_attn.q_norm.weight",
    }


def test_the_output_layer_trains_alone(parallel, tmp_path):
    """No layer has a gradient; the output layer is the only function with one."""
    checkpoint = make_checkpoint(tmp_path, "qwen3")
    engine = build(checkpoint, parallel, only_train_params_name_list=("output_layer",))
    before = tensors(engine)
    train(engine)
    changed = {name for name, tensor in tensors(engine).items() if not tensor.equal(before[name])}
    assert changed == {"lm_head.weight"}


def test_a_loss_that_is_not_finite_is_seen(model, parallel):
    """The first weight, which carries the mark of such a loss otherwise, is frozen."""

    def broken(inputs):
        outputs = likelihood(inputs)
        return dataclasses.replace(outputs, numerator=outputs.numerator.detach() * torch.nan)

    engine = build(model, parallel, **FREEZE)

    def hidden(inputs):
        # the gradient is finite, only the value of the loss is not
        outputs = broken(inputs)
        numerator = outputs.numerator + 0.0 * inputs.log_probs_L.sum()
        return dataclasses.replace(outputs, numerator=numerator)

    assert not engine.train_step(BATCH, PARTITION, hidden).is_finite


@pytest.mark.parametrize(
    "options",
    [{}, {"bf16": True}, {"use_distributed_optimizer": True}],
    ids=["fp32", "bf16", "distributed optimizer"],
)
def test_resumption_is_bitwise(options, model, parallel, tmp_path):
    engine = build(model, parallel, **FREEZE, **options)
    train(engine, 2)
    checkpoint_saving.save(tmp_path, 2, engine, {"run": "a"}, retain=1)
    expected = train(engine, 2)
    resumed = build(model, parallel, **FREEZE, **options)
    sharded_checkpoint.load(tmp_path / "iter_0000002", resumed)
    assert train(resumed, 2) == expected
    for name, tensor in tensors(engine).items():
        assert tensor.equal(tensors(resumed)[name]), name


def test_experts_train_without_the_router(parallel, tmp_path):
    checkpoint = make_checkpoint(tmp_path, "qwen3_moe")
    engine = build(checkpoint, parallel, only_train_params_name_list=(r"mlp\.experts",))
    before = tensors(engine)
    train(engine)
    for name, tensor in tensors(engine).items():
        if ".experts." not in name:
            assert tensor.equal(before[name]), name
    gate = "model.layers.1.mlp.experts.{}.gate_proj.weight"
    changes = [not tensors(engine)[gate.format(n)].equal(before[gate.format(n)]) for n in range(8)]
    assert sum(changes) >= 2  # tokens are few: not every expert gets some


REFUSED = {
    "no match": (
        {"freeze_params_name_list": ("embedding", "wq_b")},
        "--freeze-params-name-list has 'wq_b', which is found in no weight's name; names are"
        " embedding.word_embeddings.weight, decoder.layers.0.",
    ),
    "tied output layer": (
        {"only_train_params_name_list": ("output_layer",)},
        "The output layer is tied to embedding.word_embeddings.weight",
    ),
    "nothing to train": (
        {"freeze_params_name_list": ("weight",)},
        "leaves no weight to train",
    ),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_lists_without_effect_are_refused(options, message, model, parallel):
    with pytest.raises(ValueError) as refusal:
        build(model, parallel, **options)
    assert message in str(refusal.value)


FREEZE_ON_RANKS = {
    "freeze_params_name_list": ("embedding", r"layers\.0\.mlp\.linear", "linear_proj")
}
"""With something to train in every layer."""
FROZEN_ON_RANKS = (
    "model.embed_tokens.",
    *(f"model.layers.0.mlp.{name}_proj." for name in ("gate", "up", "down")),
    "model.layers.0.post_attention_layernorm.",
    *(f"model.layers.{number}.self_attn.o_proj." for number in (0, 1)),
)


def trains_as_on_one_rank(parallel, directory, layout):
    """Compares the weights after three steps with those that one rank has written."""
    engine = build(directory / "model", parallel, **layout)
    half = [0, 2] if parallel.data_rank == 0 else [1, 3]
    for _ in range(3):
        if parallel.data_size > 1:
            engine.train_step(BATCH.select(half), [[0], [1]], likelihood)
        else:
            engine.train_step(BATCH, PARTITION, likelihood)
    expected = load_file(directory / "expected.safetensors")
    before = load_file(directory / "model" / "model.safetensors")
    for name, tensor in engine.named_hf_tensors():
        is_before = tensor.equal(before[name])
        assert is_before == name.startswith(FROZEN_ON_RANKS), name
        torch.testing.assert_close(tensor, expected[name], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_model_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"pipeline_model_parallel_size": 2},
        {"use_distributed_optimizer": True},
        {"context_parallel_size": 2},
    ],
    ids=["tensor", "sequence", "pipeline", "distributed optimizer", "context"],
)
def test_layouts_train_the_same_weights(layout, parallel, tmp_path):
    # The embedding of the first stage, and its tied copy on the last one, are frozen.
    checkpoint = make_checkpoint(tmp_path / "model", "qwen3", tie_word_embeddings=True)
    engine = build(checkpoint, parallel, **FREEZE_ON_RANKS)
    train(engine)
    save_file(tensors(engine), tmp_path / "expected.safetensors")
    on_ranks(trains_as_on_one_rank, tmp_path, layout | FREEZE_ON_RANKS)


def refuses_an_idle_stage(parallel, directory, layout):
    with pytest.raises(ValueError, match="leaves a pipeline stage without a weight to train"):
        build(directory, parallel, **layout)


def test_a_stage_with_nothing_to_train_is_refused(tmp_path):
    make_checkpoint(tmp_path, "qwen3")
    layout = {"pipeline_model_parallel_size": 2, "only_train_params_name_list": (r"layers\.1\.",)}
    on_ranks(refuses_an_idle_stage, tmp_path, layout)


def finds_names_of_other_stages(parallel, directory, layout):
    engine = build(directory, parallel, **layout)
    count = len(engine._trained_weights())
    # 9 weights of a layer; the last stage also has a norm and the output layer
    assert count == (1 if parallel.is_first_stage else 2)


def test_a_pattern_may_match_one_stage_only(tmp_path):
    make_checkpoint(tmp_path, "qwen3")
    layout = {
        "pipeline_model_parallel_size": 2,
        "only_train_params_name_list": (r"layers\.[01]\.mlp\.linear_fc2", "output_layer"),
    }
    on_ranks(finds_names_of_other_stages, tmp_path, layout)
