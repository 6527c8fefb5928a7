"""Builds megatron-core's GPTModel from a Hugging Face configuration.

The supported families are in `slime_tis.families`.
"""

import importlib
import math
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from slime_tis.errors import first_line
from slime_tis.families import (
    Family,
    attention_windows,
    delta_net_layers,
    family_of,
    flag_value,
    layer_weights,
)
from slime_tis.hf_directory import load_config, moe_sizes, read_model_config
from slime_tis.hf_tensors import dimensions, head_size, positioned_size
from slime_tis.trainer.configs.megatron import MegatronConfig
from slime_tis.trainer.engines.weight_rounding import DTYPES
from slime_tis.trainer.invariant.self_check import Kernels, ModelShapes
from slime_tis.trainer.matrix_products import prefers_onednn
from slime_tis.trainer.megatron.family_layers import (
    AllHeadsNorm,
    ClampedSwiGLU,
    ExpertRowLinear,
    NormThenAdd,
)
from slime_tis.trainer.megatron.fast_layers import use_fast_products
from slime_tis.trainer.megatron.gated_delta_net import DeltaNetSizes, GatedDeltaNet
from slime_tis.trainer.megatron.invariant_layers import use_invariant_operations
from slime_tis.trainer.megatron.latent_attention import LatentAttention, LatentSizes
from slime_tis.trainer.megatron.layers import (
    AttentionTraits,
    MoeRouter,
    TorchAttention,
    TorchMLP,
    TorchRMSNorm,
    TorchSwiGLU,
    release_probabilities,
    separate_expert_gradients,
)
from slime_tis.trainer.megatron.lora import add_adapters, lora_settings
from slime_tis.trainer.megatron.model_config import ModelConfig
from slime_tis.trainer.megatron.packing import PackedSequences, RotaryAngles
from slime_tis.trainer.megatron.parallel import Parallel


class HfConfig(Protocol):
    """The fields of a Hugging Face configuration that every family must have."""

    architectures: list[str]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: dict[str, Any] | None
    tie_word_embeddings: bool


class ResponseModel(GPTModel):  # type: ignore[misc]  # megatron-core has no types
    """A GPTModel that returns hidden states, or logits, only for `PackedSequences.response_rows`.

    Under sequence parallelism a rank's slice of the tokens has any number of these rows. Therefore
    the hidden states are gathered here, and the gradient of the rows is summed over the
    tensor-parallel ranks.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.post_process and self.config.sequence_parallel:
            self.output_layer.sequence_parallel = False
            self.output_layer.allreduce_dgrad = True

    def _postprocess(
        self, hidden_states: Tensor, *, packed_seq_params: PackedSequences, **kwargs: Any
    ) -> Tensor:
        """Selects the rows whose log-probs are needed.

        Returns:
            On the last pipeline stage hidden states [L, 1, h] or logits [1, L, V]; on other stages
            hidden states [T, 1, h] of all tokens.
        """
        if self.post_process:
            if self.config.sequence_parallel:
                hidden_states = gather_from_sequence_parallel_region(
                    hidden_states, tensor_parallel_output_grad=False
                )
            if packed_seq_params.response_rows is not None:
                hidden_states = hidden_states.index_select(0, packed_seq_params.response_rows)
            if not packed_seq_params.gives_logits:
                return hidden_states
        output: Tensor = super()._postprocess(
            hidden_states, packed_seq_params=packed_seq_params, **kwargs
        )
        return output

    def output_weight(self) -> Tensor:
        """Returns this rank's weight of the output layer; only on the last pipeline stage."""
        weight: Tensor
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        else:
            weight = self.output_layer.weight
        return weight


def sequence_workload(hf: HfConfig, tokens: int) -> float:
    """Returns a number in proportion to the operations of a sequence in the layers.

        T · (T + P / A)

    A layer needs 2·P·T operations for its P weights per token, and 2·A·T² for causal attention of
    width A. P and A are means over the layers: a gated delta net has A = 0, and its recurrence
    needs few operations next to its weights. The output layer is left out: it sees only responses.

    Source: slime, utils/flops_utils.py, calculate_fwd_flops.

    Args:
        hf: The model's configuration.
        tokens: T, prompt and response.
    """
    sizes = dimensions(hf)
    delta_net_share = len(delta_net_layers(hf)) / hf.num_hidden_layers
    projections = (1 - delta_net_share) * _projection_weights(hf, has_delta_net=False)
    if delta_net_share > 0:
        projections += delta_net_share * _projection_weights(hf, has_delta_net=True)
    if "queries" in sizes:
        attention_width = float(sizes["queries"])
    else:
        attention_width = (sizes["latent_queries"] + sizes["values"]) / 2
    # All layers may have delta nets.
    attention_width = max((1 - delta_net_share) * attention_width, 1.0)
    inner_width = float(hf.intermediate_size)
    moe = moe_sizes(hf)
    if moe is not None:
        active_width = moe.top_k * moe.intermediate_size + (moe.shared_intermediate_size or 0)
        sparse_share = len(moe.layers) / hf.num_hidden_layers
        inner_width += sparse_share * (active_width - inner_width)
    weights = projections + 3 * hf.hidden_size * inner_width
    return tokens * (tokens + weights / attention_width)


def _projection_weights(hf: Any, *, has_delta_net: bool) -> int:
    """Returns the number of weights of attention or of a gated delta net."""
    sizes = dimensions(hf)
    count = 0
    for name, weight in layer_weights(hf, is_sparse=False, has_delta_net=has_delta_net).items():
        if name.startswith("self_attention."):
            for tensor in weight.tensors:
                count += math.prod(sizes[dimension] for dimension in tensor.shape)
    return count


@dataclass(frozen=True)
class Model:
    """This rank's part of a GPTModel, and its configurations."""

    module: ResponseModel
    config: ModelConfig
    hf_config: HfConfig
    rotary: RotaryAngles | None
    """Rotary angles for `pack`; None if the layers compute them."""


def read_hf_config(directory: str | Path) -> HfConfig:
    """Loads a checkpoint's configuration.

    Raises:
        ValueError: The architecture, or a variant, is not supported.
    """
    read_model_config(directory)
    hf: HfConfig = load_config(directory)
    name = hf.architectures[0]
    family = family_of(hf)
    unsupported = ["mlp_bias", "use_sliding_window"]
    if family.attention.qkv_bias is False:
        unsupported.append("attention_bias")
    used = [field for field in unsupported if getattr(hf, field, False)]
    activations: tuple[str, ...] = ("silu", "swish")
    if family.activation == "gelu_pytorch_tanh":
        activations = (family.activation,)
    if getattr(hf, family.activation_field) not in activations:
        used.insert(0, family.activation_field)
    if used:
        field = used[0]
        raise ValueError(f"{directory}: {field}={getattr(hf, field)!r} is not supported for {name}")
    return hf


def build_model(
    directory: str | Path,
    config: MegatronConfig,
    parallel: Parallel,
    kernels: Kernels | None = None,
) -> Model:
    """Builds this rank's part of the model, with uninitialized weights, on its device.

    With `kernels`, the layers share the operations of the rollout engine.
    """
    hf = read_hf_config(directory)
    family = family_of(hf)
    transformer = transformer_config(hf, config, parallel)
    engine = uses_transformer_engine(hf, parallel, config)
    if not engine and config.transformer_impl == "transformer_engine":
        raise ValueError(
            "--transformer-impl transformer_engine supports dense models only; remove the flag."
        )
    inverse_frequency, scaling = rotary_frequencies(hf, family)
    if engine and scaling != 1.0:
        raise ValueError(
            f"{directory}: rotary scaling by {scaling} (YaRN) is supported on plain torch layers"
            " only"
        )
    if engine:
        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=transformer.qk_layernorm)
    else:
        spec = _torch_spec(transformer, hf, parallel, kernels)
    module = ResponseModel(
        transformer,
        spec,
        vocab_size=padded_vocab_size(hf.vocab_size, parallel.tensor_size),
        max_sequence_length=hf.max_position_embeddings,
        pre_process=parallel.is_first_stage,
        post_process=parallel.is_last_stage,
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        position_embedding_type="rope" if engine else "none",
    )
    settings = lora_settings(config)
    if settings is not None:
        add_adapters(module, transformer, settings, seed=config.seed)
    if parallel.device.type != "cpu":  # torch cannot move the fake parameters of a plan
        module.to(parallel.device)
    release_probabilities(module)
    if family.scales_embeddings and parallel.is_first_stage:
        scale_embeddings(module, hf.hidden_size, transformer.params_dtype)
    # If the sizes are equal, the data- and context-parallel ranks are the ranks with the same
    # expert. megatron-core is then right without this.
    if parallel.expert_tensor_size != parallel.tensor_size:
        separate_expert_gradients(module)
    if engine:
        # built without rotary scaling, which these frequencies have
        module.rotary_pos_emb.inv_freq = inverse_frequency[0].to(parallel.device, copy=True)
        return Model(module, transformer, hf, None)
    return Model(module, transformer, hf, RotaryAngles(inverse_frequency, scaling))


def transformer_config(hf: HfConfig, config: MegatronConfig, parallel: Parallel) -> ModelConfig:
    """Returns megatron-core's configuration of a Hugging Face model under the parallel layout."""
    family = family_of(hf)
    engine = uses_transformer_engine(hf, parallel, config)
    same_options = fields_in_common(config, ModelConfig)
    # megatron-core reads it only to choose layers, which `build_model` does
    del same_options["transformer_impl"]
    has_qk_norm = flag_value(hf, family.attention.qk_norm)
    is_latent = family.attention.latent
    over_all_heads = family.attention.qk_norm_over == "all_heads"
    dtype = DTYPES[config.precision]
    on_cpu = parallel.device.type == "cpu"
    return ModelConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_attention_heads if is_latent else hf.num_key_value_heads,
        kv_channels=head_size(hf),
        softmax_scale=softmax_scale(hf),
        ffn_hidden_size=hf.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=family.biases,
        add_qkv_bias=flag_value(hf, family.attention.qkv_bias),
        attention_output_gate=family.attention.output_gate,
        qk_layernorm=has_qk_norm and not over_all_heads,
        norms_all_heads=has_qk_norm and over_all_heads,
        norms_outputs=family.norms == "both",
        delta_net_values=_delta_net_values(hf),
        **_latent_options(hf),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        **same_options,  # precision, layout, recomputation
        # their spelling
        hetereogenous_dist_checkpoint=_has_separate_layers_in_checkpoints(hf, config),
        # Sums over tokens or sequences are divided once, by their number in the global batch.
        calculate_per_token_loss=True,
        variable_seq_lengths=parallel.pipeline_size > 1,
        moe_token_dispatcher_type="alltoall",  # required with variable_seq_lengths, dense or not
        **_moe_options(hf),
        use_cpu_initialization=on_cpu,
        use_te_activation_func=not engine,  # takes the activation of the spec, TorchSwiGLU
        apply_rope_fusion=engine,
        batch_p2p_comm=not on_cpu,
        batch_p2p_sync=not on_cpu,
    )


def _latent_options(hf: Any) -> dict[str, Any]:
    """Returns the options of `ModelConfig` for latent attention; empty for grouped queries."""
    if not family_of(hf).attention.latent:
        return {}
    sizes = latent_sizes(hf)
    before_norms = (sizes.query_rank or 0) + sizes.rank + sizes.rotated
    after_norms = (sizes.query_rank or 0) + sizes.rank
    return {
        "latent_query_channels": sizes.plain + sizes.rotated,
        "latent_width": before_norms + after_norms,
    }


def _has_separate_layers_in_checkpoints(hf: Any, config: MegatronConfig) -> bool:
    """Returns whether a checkpoint has one tensor per layer, instead of one for all layers.

    A tensor for all layers needs the weight in each of them. Gated delta nets are only in some, and
    the optimizer's part lacks layers that are not trained.
    """
    return bool(delta_net_layers(hf)) or config.selected_weights is not None


def _delta_net_values(hf: Any) -> int:
    """Returns the values per token that a gated delta net saves; 0 for a model without them."""
    if not delta_net_layers(hf):
        return 0
    return delta_net_sizes(hf).saved_values


def fields_in_common(config: MegatronConfig, megatron_class: type) -> dict[str, Any]:
    """Returns the options whose names are also fields of a dataclass of megatron-core."""
    names = {field.name for field in fields(megatron_class)}
    return {name: value for name, value in vars(config).items() if name in names}


def _moe_options(hf: Any) -> dict[str, Any]:
    """Returns megatron-core's options for a model's experts; empty for a dense model.

    Experts are trained without a load-balancing loss.
    """
    sizes = moe_sizes(hf)
    experts = family_of(hf).experts
    if sizes is None or experts is None:
        return {}
    options = {
        "num_moe_experts": sizes.num_experts,
        "moe_layer_freq": [int(layer in sizes.layers) for layer in range(hf.num_hidden_layers)],
        "moe_ffn_hidden_size": sizes.intermediate_size,
        "moe_shared_expert_intermediate_size": sizes.shared_intermediate_size,
        "moe_shared_expert_gate": experts.has_shared_gate,
        "moe_router_topk": sizes.top_k,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
    }
    if experts.router != "sigmoid":
        options["moe_router_score_function"] = "softmax"
        # Normalized weights are a softmax over the chosen experts, others one over all experts.
        is_over_chosen = experts.router == "chosen_softmax" or hf.norm_topk_prob
        options["moe_router_pre_softmax"] = not is_over_chosen
        if experts.router == "greedy_softmax":
            options["moe_router_topk_scaling_factor"] = hf.routed_scaling_factor
        return options
    # "DeepSeek-V3 Technical Report" (https://arxiv.org/abs/2412.19437), section 2.1.2
    options["moe_router_score_function"] = "sigmoid"
    options["moe_router_enable_expert_bias"] = True
    options["moe_router_bias_update_rate"] = 0.0  # the bias keeps its pretrained value
    options["moe_router_topk_scaling_factor"] = hf.routed_scaling_factor
    if hf.n_group > 1:
        options["moe_router_num_groups"] = hf.n_group
        options["moe_router_group_topk"] = hf.topk_group
    return options


def scale_embeddings(module: ResponseModel, hidden_size: int, dtype: torch.dtype) -> None:
    """Multiplies embeddings by √hidden_size, which is rounded to their type as in transformers."""
    scale = torch.tensor(hidden_size**0.5).to(dtype)

    def multiply(embedding: Any, inputs: Any, output: Tensor) -> Tensor:
        return output * scale.to(output.device)

    module.embedding.register_forward_hook(multiply)


def padded_vocab_size(vocab_size: int, tensor_size: int) -> int:
    """Rounds the size of the vocabulary up to a multiple of the tensor-parallel size."""
    return -(-vocab_size // tensor_size) * tensor_size


def rotary_frequencies(hf: HfConfig, family: Family) -> tuple[torch.Tensor, float]:
    """Returns the rotary settings that transformers computes for this model.

    Returns:
        Inverse frequencies [kinds, d/2], and the factor on cosine and sine.
    """
    module_name, class_name = family.rotary_class.split(":")
    rotary_class = getattr(importlib.import_module(module_name), class_name)
    try:
        rotary = rotary_class(config=hf)
    except Exception as error:  # for example KeyError if the configuration lacks a factor
        raise ValueError(
            f"the checkpoint's rotary settings are invalid: {first_line(error)}."
        ) from error
    if family.attention.rotary_kinds:
        return _frequencies_by_kind(rotary, family)
    partial = (hf.rope_parameters or {}).get("partial_rotary_factor", 1.0)
    width = positioned_size(hf)
    if 2 * len(rotary.inv_freq) != int(width * partial):
        raise ValueError(
            f"partial_rotary_factor {partial} is not supported for {family.title}: transformers"
            f" rotates {2 * len(rotary.inv_freq)} of {width} features."
        )
    return rotary.inv_freq.float()[None], float(rotary.attention_scaling)


def _frequencies_by_kind(rotary: Any, family: Family) -> tuple[torch.Tensor, float]:
    """Returns `rotary_frequencies` of a model whose types of layers have their own ones."""
    frequencies = []
    for kind in family.attention.rotary_kinds:
        # transformers has no frequencies of a type that no layer has
        known = getattr(rotary, f"{kind}_inv_freq", None)
        scaling = float(getattr(rotary, f"{kind}_attention_scaling", 1.0))
        if scaling != 1.0:
            raise ValueError(f"rotary scaling by {scaling} is not supported for {family.title}.")
        frequencies.append(known)
    (some, *_) = [known for known in frequencies if known is not None]
    filled = [some if known is None else known for known in frequencies]
    return torch.stack(filled).float(), 1.0


def uses_transformer_engine(hf: HfConfig, parallel: Parallel, config: MegatronConfig) -> bool:
    """Returns whether transformer-engine computes the layers: of some dense families, no adapters.

    `hf_weights` does not know transformer-engine's names of expert weights. Adapters need the input
    of their linear layer, which transformer-engine computes inside the layer.
    """
    has_layers = family_of(hf).has_engine_layers and moe_sizes(hf) is None
    is_possible = has_layers and not config.trains_adapters
    return parallel.transformer_engine and is_possible


def invariant_shapes(hf: HfConfig, ranks: int) -> ModelShapes:
    """Returns the sizes of a dense model that `ranks` tensor-parallel ranks divide."""
    return ModelShapes(
        hidden=hf.hidden_size,
        heads=hf.num_attention_heads,
        groups=hf.num_key_value_heads,
        head_features=head_size(hf),
        inner=hf.intermediate_size,
        vocabulary=hf.vocab_size,
        ranks=ranks,
    )


def _torch_spec(
    config: ModelConfig, hf: HfConfig, parallel: Parallel, kernels: Kernels | None
) -> TransformerBlockSubmodules:
    """Returns the specification of the layers of this pipeline stage."""
    family = family_of(hf)
    norm: Any = TorchRMSNorm
    if kernels is not None:
        norm = ModuleSpec(TorchRMSNorm, params={"invariant": True})
    elif family.norm_offset:
        norm = ModuleSpec(TorchRMSNorm, params={"offset": family.norm_offset})
    dense = _torch_layer_spec(config, None, norm)
    if kernels is not None:
        use_invariant_operations(dense, kernels)
    elif prefers_onednn():
        use_fast_products(dense)
    layers = [dense] * get_num_layers_to_build(config)
    if config.num_moe_experts is not None:
        sparse = _torch_layer_spec(config, config.num_moe_experts, norm)
        first = get_transformer_layer_offset(config)
        for number in range(len(layers)):
            if config.moe_layer_freq[first + number]:
                layers[number] = sparse
    for layer in {id(layer): layer for layer in layers}.values():
        _use_family_layers(layer, config, hf, parallel)
    layers = _with_delta_nets(layers, config, hf)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def _torch_layer_spec(config: ModelConfig, num_experts: int | None, norm: Any) -> Any:
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", num_experts=num_experts)
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = TorchAttention
    if config.qk_layernorm:
        attention.q_layernorm = norm
        attention.k_layernorm = norm
    layer.submodules.input_layernorm = norm
    layer.submodules.pre_mlp_layernorm = norm
    mlp = layer.submodules.mlp
    if num_experts is None:
        mlp.module = TorchMLP
    else:
        mlp.submodules.router = MoeRouter
        mlp.submodules.experts.submodules.activation_func = TorchSwiGLU
        mlp.submodules.shared_experts.submodules.activation_func = TorchSwiGLU
    return layer


def _with_delta_nets(layers: list[ModuleSpec], config: ModelConfig, hf: Any) -> list[ModuleSpec]:
    """Returns the layers of this pipeline stage with gated delta nets where the model has them."""
    first = get_transformer_layer_offset(config)
    delta_nets = delta_net_layers(hf)
    replaced = []
    for number, layer in enumerate(layers, start=first):
        if number in delta_nets:
            delta_net = ModuleSpec(GatedDeltaNet, params={"sizes": delta_net_sizes(hf)})
            submodules = replace(layer.submodules, self_attention=delta_net)
            layer = replace(layer, submodules=submodules)
        replaced.append(layer)
    return replaced


def _use_family_layers(layer: ModuleSpec, config: ModelConfig, hf: Any, parallel: Parallel) -> None:
    """Changes the specification of a layer where the family differs from Llama."""
    family = family_of(hf)
    attention = layer.submodules.self_attention.submodules
    traits = attention_traits(hf)
    if any(layer_traits != AttentionTraits() for layer_traits in traits):
        attention.core_attention = partial(attention.core_attention, traits=traits)
    if config.norms_all_heads:
        attention.q_layernorm = _all_heads_norm(config.num_attention_heads, parallel)
        attention.k_layernorm = _all_heads_norm(config.num_query_groups, parallel)
    if family.attention.latent:
        spec = layer.submodules.self_attention
        spec.module = LatentAttention
        spec.params = {**spec.params, "sizes": latent_sizes(hf)}
    mlp = layer.submodules.mlp
    if family.activation == "gelu_pytorch_tanh":
        mlp.params = {**(mlp.params or {}), "activation": family.activation}
    if family.activation == "clamped_swiglu":
        params = {"alpha": hf.swiglu_alpha, "limit": hf.swiglu_limit}
        mlp.submodules.experts.submodules.activation_func = ModuleSpec(ClampedSwiGLU, params=params)
    if family.biases:
        mlp.submodules.experts.submodules.linear_fc2 = ExpertRowLinear
    if family.norms == "outputs":
        layer.submodules.input_layernorm = IdentityOp
        layer.submodules.pre_mlp_layernorm = IdentityOp
    if family.norms != "inputs":
        params = {"config": config, "offset": family.norm_offset}
        output_norm = ModuleSpec(NormThenAdd, params=params)
        layer.submodules.self_attn_bda = output_norm
        layer.submodules.mlp_bda = output_norm


def _all_heads_norm(heads: int, parallel: Parallel) -> ModuleSpec:
    return ModuleSpec(AllHeadsNorm, params={"heads": heads, "group": parallel.tensor_group})


def delta_net_sizes(hf: Any) -> DeltaNetSizes:
    """Returns the sizes of the gated delta nets of a model."""
    return DeltaNetSizes(
        key_heads=hf.linear_num_key_heads,
        value_heads=hf.linear_num_value_heads,
        key=hf.linear_key_head_dim,
        value=hf.linear_value_head_dim,
        kernel=hf.linear_conv_kernel_dim,
    )


def latent_sizes(hf: Any) -> LatentSizes:
    """Returns the sizes of the latent attention of a model."""
    return LatentSizes(
        query_rank=hf.q_lora_rank,
        rank=hf.kv_lora_rank,
        plain=hf.qk_nope_head_dim,
        rotated=hf.qk_rope_head_dim,
        value=hf.v_head_dim,
    )


def softmax_scale(hf: Any) -> float | None:
    """Returns the factor on products of queries and keys; None for d^(-1/2).

    It is x^(-1/2) if the family has a field x for it. In latent attention with YaRN it is
    d^(-1/2) · m², m = 0.1 · mscale_all_dim · log(factor) + 1.

    Source: DeepSeek-V3, inference/model.py, and transformers' `yarn_apply_mscale`.
    """
    attention = family_of(hf).attention
    if attention.scale is not None:
        return float(getattr(hf, attention.scale) ** -0.5)
    if not attention.latent:
        return None
    scale: float = (hf.qk_nope_head_dim + hf.qk_rope_head_dim) ** -0.5
    rope = hf.rope_parameters
    all_dimensions = rope.get("mscale_all_dim")
    if rope.get("rope_type", "default") != "default" and all_dimensions and rope["factor"] > 1:
        scale *= (0.1 * all_dimensions * math.log(rope["factor"]) + 1.0) ** 2
    return scale


def attention_traits(hf: Any) -> tuple[AttentionTraits, ...]:
    """Returns the attention's traits of every layer of the model."""
    attention = family_of(hf).attention
    layers = range(hf.num_hidden_layers)
    rotates = [True for _ in layers]
    if attention.rotary_layers is not None:
        rotates = [bool(flag) for flag in getattr(hf, attention.rotary_layers)]
    windows = attention_windows(hf)
    rotary_kinds = [0 for _ in layers]
    if attention.rotary_kinds:
        rotary_kinds = [attention.rotary_kinds.index(kind) for kind in hf.layer_types]
    return tuple(
        AttentionTraits(
            rotates=rotates[layer],
            rotary_kind=rotary_kinds[layer],
            turns_neighbors=flag_value(hf, attention.turns_neighbors),
            window=windows[layer],
            sinks=attention.sinks,
        )
        for layer in layers
    )
