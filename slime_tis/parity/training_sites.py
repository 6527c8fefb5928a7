"""Modules of the training engine's model that have the results of operations.

`transformers_sites` has the same for a model of transformers; both use the same names.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from slime_tis.parity.recording import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    LAYER_END,
    Operation,
    Recorder,
    Site,
    hooked,
    replaced_attribute,
    side_by_side,
    split_in_half,
)
from slime_tis.trainer.invariant import operations as invariant_operations
from slime_tis.trainer.invariant.self_check import HEAD as TILES_OF_HEAD
from slime_tis.trainer.megatron import layers
from slime_tis.trainer.megatron.family_layers import NormThenAdd
from slime_tis.trainer.megatron.layers import AttentionTraits
from slime_tis.trainer.megatron.training_engine import TrainingEngine

OUTPUTS = {
    "input_layernorm": "norm before attention",
    "self_attention.q_layernorm": "query norm",
    "self_attention.k_layernorm": "key norm",
    # DeepSeek's latent attention.
    "self_attention.linear_q_proj": "query projection",
    "self_attention.linear_q_down_proj": "query latent projection",
    "self_attention.linear_q_up_proj": "query projection",
    "self_attention.linear_kv_down_proj": "key-value latent projection",
    "self_attention.kv_layernorm": "key-value latent norm",
    "self_attention.linear_proj": "output projection",
    # Gated delta nets.
    "self_attention.in_proj_qkvz": "query-key-value-gate projection",
    "self_attention.in_proj_ba": "rate-decay projection",
    "self_attention.out_proj": "output projection",
    "pre_mlp_layernorm": "norm before MLP",
    "mlp.shared_experts": "shared expert",
    "mlp.linear_fc2": "down projection",
    "mlp": "MLP",
    "": LAYER_END,
}
"""Operations by the module of a layer whose output they are."""
INPUTS = {
    "self_attention.linear_proj": "attention",
    "self_attention.out_proj": "attention",
    "pre_mlp_layernorm": "residual after attention",
    "mlp.linear_fc2": "activation",
}
"""Operations by the module of a layer whose input they are."""
OUTPUT_NORMS = {"self_attn_bda": "norm after attention", "mlp_bda": "norm after MLP"}
"""Operations by the module that has a norm of an output in some families."""
QUERY_LATENT = "self_attention.linear_q_down_proj"
"""In layers with this module, `q_layernorm` normalizes its output instead of the queries."""
QKV = "self_attention.linear_qkv"
GATE_UP = "mlp.linear_fc1"
ROUTER = "mlp.router"


@contextmanager
def recorded(engine: TrainingEngine, recorder: Recorder) -> Iterator[None]:
    """Records the visible operations of all layers during the block, and logits at its end.

    A tensor-parallel rank computes a part of the features of some operations. Their results have
    another shape than those of a complete model, so that a comparison skips them.
    """
    module = engine.model.module
    sites = [
        Site(module=module.embedding, operations=(Operation(EMBEDDING),)),
        Site(module=module.decoder.final_layernorm, operations=(Operation(FINAL_NORM),)),
    ]
    with ExitStack() as stack:
        for number, layer in enumerate(module.decoder.layers):
            modules = dict(layer.named_modules())
            sites += _layer_sites(modules, number, module.config)
            if ROUTER in modules:
                hook = _router_hook(number, recorder)
                stack.callback(modules[ROUTER].register_forward_hook(hook).remove)
        stack.enter_context(hooked(sites, recorder))
        stack.enter_context(_recorded_rope(module.decoder.layers, recorder))
        yield
    if module.config.tensor_model_parallel_size == 1:
        _record_logits(engine, recorder)


@torch.no_grad()
def _record_logits(engine: TrainingEngine, recorder: Recorder) -> None:
    """Records logits by the output layer.

    The engine itself has no logits: it computes log-probs in tiles from the final norm's output.
    """
    final_norm = Operation(FINAL_NORM)
    hidden = recorder.substitutes.get(final_norm) or recorder.results[final_norm]
    module = engine.model.module
    weight = module.output_weight()
    hidden_TF = hidden.values_TF.to(weight)
    if engine.kernels is None:
        logits, _bias = module.output_layer(hidden_TF[:, None], weight=weight)
    else:
        tiles = engine.kernels.tiles[TILES_OF_HEAD]
        logits = invariant_operations.linear(hidden_TF, weight, None, tiles)[:, None]
    # Other columns pad the vocabulary.
    recorder.take(Operation(HEAD), logits[:, 0, : engine.model.hf_config.vocab_size])


def _layer_sites(modules: dict[str, nn.Module], number: int, config: Any) -> list[Site]:
    sites = []
    is_dense = GATE_UP in modules
    for table, is_input in ((INPUTS, True), (OUTPUTS, False)):
        for path, name in table.items():
            module = modules.get(path)
            # A dense MLP's output is its down projection's.
            if (name == "MLP" and is_dense) or not _can_record(module, is_input=is_input):
                continue
            assert module is not None
            if name == "query norm" and QUERY_LATENT in modules:
                name = "query latent norm"
            operation = Operation(name, number)
            sites.append(Site(module=module, operations=(operation,), is_input=is_input))
    for path, name in OUTPUT_NORMS.items():
        module = modules.get(path)
        if isinstance(module, NormThenAdd):
            sites.append(Site(module=module.norm, operations=(Operation(name, number),)))
    if config.tensor_model_parallel_size > 1:
        # Ranks divide the rows of joint projections, and not always by groups.
        return sites
    if QKV in modules:
        split, join = _qkv_layout(
            config.num_attention_heads,
            config.num_query_groups,
            has_gates=config.attention_output_gate,
        )
        query_key_value = (
            Operation("query projection", number),
            Operation("key projection", number),
            Operation("value projection", number),
        )
        sites.append(Site(module=modules[QKV], operations=query_key_value, split=split, join=join))
    if is_dense:
        gate_up = (Operation("gate projection", number), Operation("up projection", number))
        sites.append(
            Site(
                module=modules[GATE_UP],
                operations=gate_up,
                split=split_in_half,
                join=side_by_side,
            )
        )
    return sites


def _can_record(module: nn.Module | None, *, is_input: bool) -> bool:
    """Whether a module's input or output is also that of a module of transformers."""
    if module is None:
        return False
    if is_input:
        return True
    # transformer-engine computes norms within the next linear layer. Its class is not imported:
    # slime_tis.trainer.megatron must be imported before megatron.core.
    is_identity = type(module).__name__ == "IdentityOp"
    # megatron-core adds the output projection's bias with the residual, transformers in the layer.
    has_bias = getattr(module, "bias", None) is not None
    adds_bias_later = has_bias and getattr(module, "skip_bias_add", False)
    return not is_identity and not adds_bias_later


def _qkv_layout(
    heads: int, groups: int, *, has_gates: bool
) -> tuple[Callable[[Tensor], list[Tensor]], Callable[[Sequence[Tensor], Tensor], Tensor]]:
    """Returns functions between megatron-core's joint projection and transformers' three.

    megatron-core's features are, per group: its queries, their output gates if there are any, its
    key, its value. transformers has the gate of a head after its query.
    """
    queries = heads // groups
    kinds = 2 if has_gates else 1

    def split(value: Tensor) -> list[Tensor]:
        grouped = value.unflatten(-1, (groups, kinds * queries + 2, -1))
        query, key, keys_value = grouped.split([kinds * queries, 1, 1], -2)
        by_head = query.unflatten(-2, (kinds, queries)).transpose(-3, -2)
        return [by_head.flatten(-4), key.flatten(-3), keys_value.flatten(-3)]

    def join(parts: Sequence[Tensor], value: Tensor) -> Tensor:
        query, key, keys_value = parts
        by_head = query.unflatten(-1, (groups, queries, kinds, -1))
        grouped = [
            by_head.transpose(-3, -2).flatten(-3, -2),
            key.unflatten(-1, (groups, 1, -1)),
            keys_value.unflatten(-1, (groups, 1, -1)),
        ]
        return torch.cat(grouped, -2).reshape(value.shape)

    return split, join


def _router_hook(number: int, recorder: Recorder) -> Callable[..., Any]:
    """Records a router's weights [tokens, experts]."""

    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        weights_TE, _chosen_TE = output
        replaced_TE = recorder.take(Operation("router", number), weights_TE)
        if replaced_TE is None:
            return None
        return replaced_TE, replaced_TE > 0

    return hook


@contextmanager
def _recorded_rope(decoder_layers: Any, recorder: Recorder) -> Iterator[None]:
    """Records rotated queries and keys, by replacing the functions that rotate them."""
    remaining: list[Operation] = []

    def entered(number: int) -> Callable[..., None]:
        def hook(attention: Any, _: Any) -> None:
            remaining.clear()
            traits = getattr(attention, "traits", AttentionTraits())
            # If neighbors are turned together, training has another order of features.
            if not traits.turns_neighbors:
                # The attention module rotates queries, then keys.
                remaining.append(Operation("query rope", number))
                remaining.append(Operation("key rope", number))

        return hook

    def observed(rotate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def function(x: Tensor, *angles: Tensor) -> Tensor:
            output = rotate(x, *angles)
            if not remaining:
                return output
            replaced = recorder.take(remaining.pop(0), output)
            return output if replaced is None else replaced

        return function

    with ExitStack() as stack:
        for number, layer in enumerate(decoder_layers):
            attention = getattr(layer.self_attention, "core_attention", None)
            if attention is None:  # a gated delta net
                continue
            stack.callback(attention.register_forward_pre_hook(entered(number)).remove)
        # `layers` is for plain layers, the other module for those of --true-on-policy.
        for owner in (layers, invariant_operations):
            function = observed(owner.rotate)
            stack.enter_context(replaced_attribute(owner, "rotate", function))
        yield
