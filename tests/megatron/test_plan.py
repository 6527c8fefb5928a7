"""The plan of a layout's memory, and the token budget of micro-batches."""

import gc
import json
import os
import random
from types import SimpleNamespace

import pytest
import torch
from torch._C._profiler import _EventType
from torch.profiler import profile
from transformers import AutoConfig, AutoModelForCausalLM

from slime_tis.families import FAMILIES
from slime_tis.main import main
from slime_tis.trainer.configs.megatron import MegatronConfig
from slime_tis.trainer.megatron import memory
from slime_tis.trainer.megatron.architecture import build_model
from slime_tis.trainer.megatron.batch import make_batch
from slime_tis.trainer.megatron.frozen_weights import freeze_weights
from slime_tis.trainer.megatron.memory import TokenBudget, bytes_per_token, free_memory
from slime_tis.trainer.megatron.training_engine import TrainingEngine, wrap
from slime_tis.trainer.memory_plan import GIB, USABLE, census, fake_rank, smallest_layout
from tests.checkpoints import make_checkpoint
from tests.megatron.passes import RECOMPUTE_LAYERS, likelihood, on_ranks
from tests.runs import ROOT

QWEN3 = {"vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8}
QWEN3_4B = QWEN3 | {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
}
QWEN3_32B = {
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
}
QWEN3_30B = {
    "num_key_value_heads": 4,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
}
QWEN3_30B_EXPERTS = {
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
GLM_4_5 = {
    "vocab_size": 151552,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 92,
    "num_attention_heads": 96,
    "head_dim": 128,
    "attention_bias": True,
    "n_routed_experts": 160,
    "first_k_dense_replace": 3,
    "use_qk_norm": True,
}


def write_config(directory, family, sizes):
    """A model of transformers' family, as config.json alone."""
    (architecture,) = [name for name, entry in FAMILIES.items() if entry.model_type == family]
    AutoConfig.for_model(family, architectures=[architecture], **sizes).save_pretrained(directory)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sizes", "parameters", "ranks"),
    [
        pytest.param(
            "qwen3", QWEN3_4B | {"tie_word_embeddings": True}, 4_022_468_096, 2, id="Qwen3-4B"
        ),
        pytest.param("qwen3", QWEN3 | QWEN3_32B, 32_762_123_264, 16, id="Qwen3-32B"),
        pytest.param(
            "qwen3_moe",
            QWEN3 | QWEN3_30B | QWEN3_30B_EXPERTS,
            30_532_122_624,
            8,
            id="Qwen3-30B-A3B",
        ),
        pytest.param(
            "glm4_moe",
            GLM_4_5,
            352_797_814_784,
            128,
            id="GLM-4.5 without its layer for speculation",
        ),
    ],
)
def test_published_models(family, sizes, parameters, ranks, tmp_path):
    write_config(tmp_path, family, sizes)
    with torch.device("meta"):
        transformers = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert sum(each.numel() for each in transformers.parameters()) == parameters
    config = MegatronConfig(hf_checkpoint=str(tmp_path), bf16=True)
    whole = census(config)
    smallest = smallest_layout(config, whole, 256, USABLE * 80 * GIB)
    assert whole.total == parameters and smallest is not None and smallest[0] == ranks
    assert f"| {parameters:,} | {ranks} ranks" in (ROOT / "docs" / "gpu.md").read_text()


SEQUENCE = 256
"""Tokens of a sample in the measurement."""
LAYOUTS = {
    "one rank": ("qwen3", 1, {}),
    "bf16": ("qwen3", 2, {"bf16": True}),
    "tensor and pipeline, tied": (
        "qwen3",
        8,
        {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "sequence_parallel": True,
        },
    ),
    "distributed optimizer": (
        "qwen3",
        4,
        {"pipeline_model_parallel_size": 2, "use_distributed_optimizer": True},
    ),
    "frozen weights": (
        "qwen3",
        4,
        {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "bf16": True,
            "freeze_params_name_list": ("embedding", "linear_fc2", "q_layernorm"),
        },
    ),
    "adapters": (
        "qwen3",
        8,
        {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "sequence_parallel": True,
            "use_distributed_optimizer": True,
            "bf16": True,
            "lora_rank": 4,
        },
    ),
    "fused projections": ("phi3", 2, {"tensor_model_parallel_size": 2}),
    "norms over all heads": ("olmo2", 2, {"tensor_model_parallel_size": 2}),
    "gated delta nets": (
        "qwen3_next",
        2,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    ),
    "norms of outputs": ("glm4", 2, {"pipeline_model_parallel_size": 2}),
    "experts": (
        "qwen3_moe",
        4,
        {"expert_model_parallel_size": 4, "use_distributed_optimizer": True},
    ),
    "experts and tensor": (
        "qwen3_moe",
        4,
        {
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
        },
    ),
}


@pytest.fixture(scope="module", params=LAYOUTS)
def built_stages(request, tmp_path_factory):
    """Each stage of a layout: the plan, megatron-core's weights, and its gradients' bytes."""
    family, ranks, options = LAYOUTS[request.param]
    directory = tmp_path_factory.mktemp("layout")
    checkpoint = make_checkpoint(directory, family, tie_word_embeddings=True, vocab_size=67)
    config = MegatronConfig(hf_checkpoint=str(checkpoint), **options)
    planned = census(config).stages(config, ranks)
    stages = []
    for index, stage in enumerate(planned):
        with fake_rank(config, ranks, index * ranks // len(planned)) as parallel:
            model = build_model(config.hf_checkpoint, config, parallel)
            freeze_weights(model, config, parallel)
            weights = list(model.module.parameters())
            ddp = wrap(model.module, model.config, config)
        gradients = 0
        for buffer in [*ddp.buffers, *ddp.expert_parallel_buffers]:
            gradients += buffer.grad_data.nbytes
        stages.append((stage, weights, gradients))
    return config, stages


def test_the_plan_counts_the_weights_that_megatron_builds(built_stages):
    _, stages = built_stages
    for stage, weights, _ in stages:
        assert stage.parameters == sum(weight.numel() for weight in weights)
        assert stage.weights == sum(weight.nbytes for weight in weights)
        assert stage.temporary == max(each.nbytes for each in weights if each.requires_grad)


def test_the_plan_counts_the_gradients_that_megatron_builds(built_stages):
    config, stages = built_stages
    for stage, _, gradients in stages:
        # the distributed optimizer pads its buffers
        padding = 0.02 * gradients if config.use_distributed_optimizer else 0
        assert 0 <= gradients - stage.gradients <= padding


@pytest.mark.parametrize(
    ("spare_tokens", "ranks"), [(1, 1), (-1, 2)], ids=["one rank fits", "one rank is too small"]
)
def test_the_smallest_layout_is_the_smallest_that_fits(spare_tokens, ranks, tmp_path):
    config = MegatronConfig(hf_checkpoint=str(make_checkpoint(tmp_path, "qwen3")))
    weights = census(config)
    (stage,) = weights.stages(config, 1)
    memory = stage.fixed + (2048 + spare_tokens) * stage.per_token
    layout = smallest_layout(config, weights, 8, memory)
    assert layout is not None and layout[0] == ranks


def test_a_plan_of_adapters_saves_only_them(tmp_path):
    checkpoint = str(make_checkpoint(tmp_path, "qwen3"))
    config = MegatronConfig(hf_checkpoint=checkpoint, lora_rank=4)
    weights = census(config)
    (stage,) = weights.stages(config, 1)
    # per layer: A of q, k, v, gate and up have 32 columns, of o and down 64; B the rows below
    rows = 64 + 32 + 32 + 32 + 64 + 64 + 32
    assert weights.trained == 2 * 4 * (5 * 32 + 2 * 64 + rows)
    assert stage.saved_weights == 4 * weights.trained
    assert stage.gradients == 4 * weights.trained
    assert stage.optimizer == 8 * weights.trained


def test_no_layout_fits_little_memory(tmp_path):
    config = MegatronConfig(hf_checkpoint=str(make_checkpoint(tmp_path, "qwen3")))
    assert smallest_layout(config, census(config), 8, 1000) is None


def test_the_plan_names_the_precision_of_bf16_if_fast(tmp_path, capsys):
    checkpoint = str(make_checkpoint(tmp_path, "qwen3"))
    flags = ["--hf-checkpoint", checkpoint, "--bf16-if-fast"]
    assert main(["plan", "--world-size", "1", *flags]) == 0
    assert "--bf16-if-fast: the plan is for float32" in capsys.readouterr().out


def test_the_plan_reads_the_yaml_file_of_a_run(tmp_path, capsys):
    checkpoint = make_checkpoint(tmp_path, "qwen3")
    file = tmp_path / "run.yaml"
    file.write_text(f"hf_checkpoint: {checkpoint}\nrollout_max_response_len: 8\nbf16: true\n")
    assert main(["plan", "--world-size", "1", "--custom-config-path", str(file)]) == 0
    assert "(Qwen3ForCausalLM), bf16" in capsys.readouterr().out


def test_every_size_that_does_not_divide_is_named(tmp_path, capsys):
    checkpoint = make_checkpoint(tmp_path, "qwen3")
    layout = ["--tensor-model-parallel-size", "3", "--pipeline-model-parallel-size", "4"]
    assert main(["plan", "--world-size", "8", "--hf-checkpoint", str(checkpoint), *layout]) == 2
    message = capsys.readouterr().err
    sizes = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "num_hidden_layers")
    assert [name for name in (*sizes, "world size is 8") if name not in message] == []


def test_the_command_needs_only_config_json(tmp_path, capsys):
    write_config(tmp_path, "qwen3", QWEN3_4B | {"num_hidden_layers": 4})
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        flags = ["--bf16", "--tensor-model-parallel-size", "2", "--sequence-parallel"]
        assert main(["plan", "--world-size", "4", "--hf-checkpoint", str(tmp_path), *flags]) == 0
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES")
        os.environ |= {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
    output = capsys.readouterr().out
    assert "4 ranks: tensor 2 × pipeline 1 × context 1 × data 2" in output
    assert "does not fit" not in output


@pytest.mark.parametrize(
    "flags",
    [["--world-size", "0"], ["--world-size", "4", "--gpu-memory", "nan"]],
    ids=["no ranks", "memory is NaN"],
)
def test_numbers_out_of_range_are_refused(flags, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    write_config(tmp_path, "qwen3", QWEN3_4B | {"num_hidden_layers": 4})
    assert main(["plan", "--hf-checkpoint", str(tmp_path), *flags]) == 2


def test_trained_parameters_are_named(tmp_path, capsys):
    model = make_checkpoint(tmp_path, "qwen3")
    flags = ["--hf-checkpoint", str(model), "--only-train-params-name-list", "final_layernorm"]
    hidden_size = json.loads((model / "config.json").read_text())["hidden_size"]
    assert main(["plan", "--world-size", "1", *flags]) == 0
    assert f"\n{hidden_size} parameters are trained;" in capsys.readouterr().out


def test_a_pattern_without_a_match_is_refused(tmp_path, capsys):
    """A mixture of experts is built with as many ranks as experts."""
    make_checkpoint(tmp_path, "qwen3_moe")
    flags = ["--hf-checkpoint", str(tmp_path), "--freeze-params-name-list", "wq_b"]
    assert main(["plan", "--world-size", "1", *flags]) == 2
    assert "'wq_b', which is found in no weight's name" in capsys.readouterr().err


def test_adapters_of_a_gated_delta_net_are_refused(tmp_path, capsys):
    model = make_checkpoint(tmp_path, "qwen3_5")
    flags = ["--hf-checkpoint", str(model), "--lora-rank", "4"]
    assert main(["plan", "--world-size", "1", *flags]) == 2
    assert "have a gated delta net" in capsys.readouterr().err


def test_the_copies_of_a_save_are_named(tmp_path, capsys):
    model = make_checkpoint(tmp_path, "qwen3")
    flags = ["--hf-checkpoint", str(model), "--save", "x", "--async-save"]
    assert main(["plan", "--world-size", "1", *flags]) == 0
    assert "--async-save: up to 0.00 GiB of main memory per rank" in capsys.readouterr().out


def memory_of(run):
    """(largest, last) number of bytes of tensors during a call, beyond those before it."""
    with profile(profile_memory=True) as recorded:
        run()
        gc.collect()
    assert recorded.profiler is not None and recorded.profiler.kineto_results is not None
    pending, changes = recorded.profiler.kineto_results.experimental_event_tree(), []
    while pending:
        event = pending.pop()
        pending += event.children
        if event.tag == _EventType.Allocation:
            changes.append(
                (event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size)
            )
    held = {}
    total = largest = 0
    for _, address, nbytes in sorted(changes):
        total -= held.pop(address, 0)  # also if a thread of gloo freed it, which is not recorded
        if nbytes > 0:
            held[address] = nbytes
            total += nbytes
            largest = max(largest, total)
    return largest, total


def trains_within_the_plan(parallel, directory, layout):
    config = MegatronConfig(
        hf_checkpoint=str(directory), micro_batch_size=4, share_prompts=False, **layout
    )
    chance = random.Random(parallel.data_rank)
    tokens = [[chance.randrange(3, 60) for _ in range(SEQUENCE)] for _ in range(8)]
    rows = [[1] * (SEQUENCE - 8)] * 8
    batch = make_batch(tokens, rows, rows, rows)
    engines = []

    def start():
        engines.append(TrainingEngine(config, parallel, temperature=1.0, total_steps=10))
        # The first step allocates the optimizer's moments. What it leaves behind does not depend
        # on the number of samples.
        engines[-1].train_step(batch, [[0], [4]], likelihood)

    def step():
        engines[-1].train_step(batch, [list(range(4)), list(range(4, 8))], likelihood)

    start()  # fills caches of the libraries
    _, state = memory_of(start)
    peak, _ = memory_of(step)
    predicted = json.loads((directory / "predicted.json").read_text())[parallel.pipeline_rank]
    assert state + peak == pytest.approx(predicted, rel=0.1)


@pytest.mark.parametrize(
    ("family", "ranks", "layout"),
    [
        pytest.param("qwen3", 1, {}, id="one rank"),
        pytest.param("qwen3", 1, RECOMPUTE_LAYERS, id="recomputation"),
        pytest.param(
            "qwen3",
            1,
            RECOMPUTE_LAYERS | {"recompute_num_layers": 2},
            id="recomputation of two layers",
        ),
        pytest.param(
            "qwen3",
            1,
            RECOMPUTE_LAYERS | {"recompute_method": "block", "recompute_num_layers": 3},
            id="block",
        ),
        pytest.param(
            "qwen3",
            2,
            RECOMPUTE_LAYERS | {"tensor_model_parallel_size": 2, "sequence_parallel": True},
            id="recomputation and sequence",
        ),
        pytest.param(
            "qwen3",
            2,
            RECOMPUTE_LAYERS
            | {
                "pipeline_model_parallel_size": 2,
                "recompute_method": "block",
                "recompute_num_layers": 1,
            },
            id="block and pipeline",
        ),
        pytest.param("qwen3", 2, {"use_distributed_optimizer": True}, id="data"),
        pytest.param("qwen3", 2, {"pipeline_model_parallel_size": 2}, id="pipeline"),
        pytest.param(
            "qwen3", 1, {"freeze_params_name_list": ("linear_fc2", "output")}, id="frozen weights"
        ),
        pytest.param("qwen3_moe", 1, {}, id="experts"),
        pytest.param("olmo2", 1, {}, id="norms over all heads"),
        pytest.param("glm4", 1, {}, id="norms of outputs"),
        pytest.param("deepseek_v3", 1, {}, id="latent attention"),
        pytest.param(
            "qwen3",
            2,
            {"tensor_model_parallel_size": 2, "sequence_parallel": True},
            id="tensor and sequence",
        ),
        pytest.param("qwen3_moe", 2, {"expert_model_parallel_size": 2}, id="experts on two ranks"),
    ],
)
def test_the_peak_of_a_step_is_predicted(family, ranks, layout, tmp_path):
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "max_position_embeddings": 256,
    }
    if family == "qwen3_moe":
        sizes["moe_intermediate_size"] = 256
        # A rank's share of the tokens differs from layer to layer; more layers are nearer the mean.
        sizes["num_hidden_layers"] = 8
    if family == "deepseek_v3":
        sizes |= {"moe_intermediate_size": 256, "num_hidden_layers": 8}
        sizes |= {"head_dim": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32}
        sizes |= {"v_head_dim": 32, "q_lora_rank": 96, "kv_lora_rank": 64}
    make_checkpoint(tmp_path, family, **sizes)
    config = MegatronConfig(hf_checkpoint=str(tmp_path), **layout)
    planned = census(config).stages(config, ranks)
    tokens = 4 * SEQUENCE
    (tmp_path / "predicted.json").write_text(
        json.dumps([each.fixed + tokens * each.per_token for each in planned])
    )
    on_ranks(trains_within_the_plan, tmp_path, layout, ranks)


def saves_layer_inputs(parallel, directory, layout):
    """Compares the tensors that forward passes of four and of eight layers save for autograd."""
    saved_bytes = []
    for layers in (4, 8):
        checkpoint = str(directory / str(layers))
        config = MegatronConfig(
            hf_checkpoint=checkpoint, micro_batch_size=4, share_prompts=False, **layout
        )
        engine = TrainingEngine(config, parallel, temperature=1.0, total_steps=10)
        rows = [[1] * (SEQUENCE - 8)] * 4
        batch = make_batch([[3] * SEQUENCE] * 4, rows, rows, rows)
        storages: dict[int, int] = {}

        def note(tensor, storages=storages):
            is_in_backward = torch._C._current_graph_task_id() != -1
            if not is_in_backward:  # layers that are computed again save more
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            engine.train_step(batch, [list(range(4))], likelihood)
        weights = {
            weight.untyped_storage().data_ptr() for weight in engine.model.module.parameters()
        }
        saved_bytes.append(sum(size for place, size in storages.items() if place not in weights))
    tokens = 4 * SEQUENCE
    hidden_bytes = 4 * 128
    share = 2 if layout.get("sequence_parallel") else 1
    assert saved_bytes[1] - saved_bytes[0] == 4 * tokens * hidden_bytes // share


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tensor", "tensor and sequence"])
def test_sequence_parallelism_divides_saved_layer_inputs(sequence_parallel, tmp_path):
    for layers in (4, 8):
        (tmp_path / str(layers)).mkdir()
        make_checkpoint(tmp_path / str(layers), "qwen3", hidden_size=128, num_hidden_layers=layers)
    layout = RECOMPUTE_LAYERS | {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": sequence_parallel,
    }
    on_ranks(saves_layer_inputs, tmp_path, layout, 2)


SMOLLM2 = {
    "params_dtype": torch.float32,
    "num_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_query_groups": 3,
    "kv_channels": 64,
    "ffn_hidden_size": 1536,
    "num_moe_experts": None,
    "tensor_model_parallel_size": 1,
    "sequence_parallel": False,
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "qk_layernorm": False,
    "norms_all_heads": False,
    "norms_outputs": False,
    "latent_query_channels": None,
    "latent_width": 0,
    "attention_output_gate": False,
    "delta_net_values": 0,
    "use_te_activation_func": True,
}
HEAD = 12 * 576
"""Of log-probs: hidden states, a copy and their gradient."""
PER_LAYER = 4 * 576 + 5 * 576 + 2 * 192 + 2 * 1536


def recomputed(method, layers):
    """Full recomputation, as megatron-core's options."""
    return {
        "recompute_granularity": "full",
        "recompute_method": method,
        "recompute_num_layers": layers,
    }


BF16 = {"params_dtype": torch.bfloat16}
TENSOR = {"tensor_model_parallel_size": 2}
EXPERTS = {
    "num_moe_experts": 8,
    "moe_layer_freq": [1] * 30,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 512,
    "moe_shared_expert_intermediate_size": None,
}
CASES = {
    "fp32": ({}, 0, -1, 4 * 30 * PER_LAYER + HEAD),
    "transformer-engine": (
        {"use_te_activation_func": False},
        0,
        -1,
        4 * 30 * (PER_LAYER + 3 * 1536) + HEAD,
    ),
    "fp32, logits requested": ({}, 49152, -1, 4 * 30 * PER_LAYER + HEAD + 16 * 49152),
    "log-probs in chunks": ({}, 49152, 256, 4 * 30 * PER_LAYER + HEAD + 8 * 49152),
    "bf16, logits requested": (BF16, 49152, -1, 2 * 30 * PER_LAYER + 10 * 576 + 18 * 49152),
    "tensor": (
        TENSOR,
        49152,
        -1,
        4 * 30 * (4 * 576 + (PER_LAYER - 4 * 576) // 2) + HEAD + 8 * 49152,
    ),
    "tensor and sequence": (TENSOR | {"sequence_parallel": True}, 0, -1, 2 * 30 * PER_LAYER + HEAD),
    "recomputation": (recomputed("uniform", 1), 0, -1, 4 * (30 * 576 + PER_LAYER) + HEAD),
    "recomputation of four layers": (
        recomputed("uniform", 4),
        0,
        -1,
        4 * (8 * 576 + 4 * PER_LAYER) + HEAD,
    ),
    "recomputation of a block": (
        recomputed("block", 10),
        0,
        -1,
        4 * (10 * 576 + 20 * PER_LAYER) + HEAD,
    ),
    "recomputation and sequence": (
        recomputed("uniform", 1) | TENSOR | {"sequence_parallel": True},
        0,
        -1,
        2 * (30 * 576 + PER_LAYER) + HEAD,
    ),
    "norms over all heads": (
        {"norms_all_heads": True},
        0,
        -1,
        4 * 30 * (PER_LAYER + 576 + 2 * 192) + HEAD,
    ),
    "latent attention": (
        {"latent_query_channels": 96, "latent_width": 700},
        0,
        -1,
        4 * 30 * (4 * 576 + 2 * 9 * 96 + 3 * 9 * 64 + 700 + 2 * 1536) + HEAD,
    ),
    "output gates": (
        {"attention_output_gate": True},
        0,
        -1,
        4 * 30 * (PER_LAYER + 3 * 576) + HEAD,
    ),
    "gated delta nets, float32": (
        {"delta_net_values": 20000},
        0,
        -1,
        4 * 30 * (4 * 576 + 20000 + 2 * 1536) + HEAD,
    ),
    "gated delta nets, bf16": (
        BF16 | {"delta_net_values": 20000},
        0,
        -1,
        2 * 30 * (4 * 576 + 2 * 20000 + 2 * 1536) + 10 * 576,
    ),
    "norms of outputs": ({"norms_outputs": True}, 0, -1, 4 * 30 * (PER_LAYER + 2 * 576) + HEAD),
    "norms of queries and keys": (
        {"qk_layernorm": True},
        0,
        -1,
        4 * 30 * (PER_LAYER + 576 + 2 * 192) + HEAD,
    ),
    "experts": (EXPERTS, 0, -1, 4 * 30 * (PER_LAYER - 2 * 1536 + 4 * 1024 + 2 * 576) + HEAD),
    "context": ({"context_parallel_size": 2}, 0, -1, 4 * 30 * (PER_LAYER + 2 * 576) + HEAD),
}


@pytest.mark.parametrize(
    ("changes", "logits", "chunk_size", "expected"), CASES.values(), ids=list(CASES)
)
def test_bytes_of_a_token_by_hand(changes, logits, chunk_size, expected):
    config = SimpleNamespace(**SMOLLM2 | changes)
    assert bytes_per_token(config, logits, chunk_size) == expected


@pytest.mark.parametrize(
    ("free", "tokens"),
    [(2 * 1000 * 999, 512), (2 * 1000 * 512, 512), (1500 * 2, 1), (100, 1), (0, 1)],
)
def test_the_budget_is_a_power_of_two_for_half_of_the_memory(free, tokens):
    assert TokenBudget.that_fits(free, 1000).tokens == tokens


@pytest.fixture
def container(monkeypatch, tmp_path):
    """The directory of a control group, on a machine with 1,000 free bytes."""
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    return tmp_path


@pytest.mark.parametrize(("processes", "free"), [(1, 1000), (4, 250)])
def test_processes_share_free_memory(container, processes, free):
    assert free_memory(torch.device("cpu"), processes) == free


@pytest.mark.parametrize(
    ("limit", "processes", "free"),
    [("900\n", 1, 240), ("900\n", 2, 120), ("max\n", 1, 1000), ("100\n", 1, 0)],
    ids=["limited", "limited and shared", "unlimited", "above the limit"],
)
def test_a_container_limits_free_memory(container, limit, processes, free):
    (container / "memory.max").write_text(limit)
    (container / "memory.current").write_text("700\n")
    (container / "memory.stat").write_text("anon 5\ninactive_file 40\n")
    assert free_memory(torch.device("cpu"), processes) == free


def test_options_take_precedence(model, parallel):
    def budget(**options):
        config = MegatronConfig(hf_checkpoint=str(model), **options)
        return TrainingEngine(config, parallel, temperature=1.0, total_steps=1).token_budget

    assert budget(micro_batch_size=2) is None
    assert budget(use_dynamic_batch_size=True, max_tokens_per_gpu=100) == TokenBudget(tokens=100)
    derived = budget()
    assert derived is not None and derived.reason is not None and derived.tokens > 10_000
