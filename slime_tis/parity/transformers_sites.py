"""Modules of a transformers model that have the results of operations.

Names are those of Llama and its relatives. Operations of other families that have no such module
are not recorded.
"""

import sys
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

OUTPUTS = {
    "input_layernorm": "norm before attention",
    "self_attn.q_proj": "query projection",
    "self_attn.k_proj": "key projection",
    "self_attn.v_proj": "value projection",
    # DeepSeek's latent attention. Its `kv_b_proj` is left out: a cache holds latents, so each pass
    # projects those of all earlier tokens again.
    "self_attn.q_a_proj": "query latent projection",
    "self_attn.q_a_layernorm": "query latent norm",
    "self_attn.q_b_proj": "query projection",
    "self_attn.kv_a_proj_with_mqa": "key-value latent projection",
    "self_attn.kv_a_layernorm": "key-value latent norm",
    "self_attn.q_norm": "query norm",
    "self_attn.k_norm": "key norm",
    "self_attn.o_proj": "output projection",
    # Gated delta nets.
    "linear_attn.in_proj_qkvz": "query-key-value-gate projection",
    "linear_attn.in_proj_ba": "rate-decay projection",
    "linear_attn.out_proj": "output projection",
    # GLM-4.
    "post_self_attn_layernorm": "norm after attention",
    "post_attention_layernorm": "norm before MLP",
    "mlp.experts": "experts",
    # Qwen2-MoE. megatron-core's shared expert includes the gate.
    "mlp.shared_expert": "shared expert before its gate",
    "mlp.shared_experts": "shared expert",
    "mlp.gate_proj": "gate projection",
    "mlp.up_proj": "up projection",
    "mlp.down_proj": "down projection",
    "mlp": "MLP",
    # GLM-4.
    "post_mlp_layernorm": "norm after MLP",
    "": LAYER_END,
}
"""Operations by the module of a layer whose output they are."""
INPUTS = {
    "self_attn.o_proj": "attention",
    "linear_attn.out_proj": "attention",
    "post_attention_layernorm": "residual after attention",
    "mlp.down_proj": "activation",
}
"""Operations by the module of a layer whose input they are."""
NORM_AFTER_MLP = "post_feedforward_layernorm"
"""Layers with this module, of OLMo 2 and Gemma 2, have another `post_attention_layernorm`: the norm
of the attention's output."""
NORM_BEFORE_MLP = "pre_feedforward_layernorm"
"""The norm before the MLP of such a layer, in Gemma 2 and 3."""
HEAD_NORMS = ("query norm", "key norm")
"""Norms of heads. Gemma 3 has the heads before the tokens there, other families behind them."""
FUSED_QKV = "self_attn.qkv_proj"
FUSED_GATE_UP = "mlp.gate_up_proj"
ROUTERS = ("mlp.gate", "mlp.router")
"""Modules that return router logits, weights of the chosen experts, and their numbers."""
ROPE = "apply_rotary_pos_emb"
"""Function of a model's Python module that rotates queries and keys."""


def layers_of(model: Any) -> list[nn.Module]:
    """Returns the layers of a model; none if they have another name."""
    return list(getattr(model.base_model, "layers", []))


@contextmanager
def recorded(model: Any, recorder: Recorder) -> Iterator[None]:
    """Records all visible operations of a model during the block."""
    sites = []
    named = [
        (model.get_input_embeddings(), EMBEDDING),
        (getattr(model.base_model, "norm", None), FINAL_NORM),
        (model.get_output_embeddings(), HEAD),
    ]
    for module, name in named:
        if module is not None:
            sites.append(Site(module=module, operations=(Operation(name),)))
    with ExitStack() as stack:
        for number, layer in enumerate(layers_of(model)):
            sites += _layer_sites(layer, number)
            for path in ROUTERS:
                router = _submodule(layer, path)
                if router is not None:
                    handle = router.register_forward_hook(_router_hook(number, recorder))
                    stack.callback(handle.remove)
        stack.enter_context(hooked(sites, recorder))
        stack.enter_context(_recorded_rope(model, recorder))
        yield


def _submodule(layer: nn.Module, path: str) -> nn.Module | None:
    try:
        return layer.get_submodule(path)
    except AttributeError:
        return None


def _layer_sites(layer: nn.Module, number: int) -> list[Site]:
    sites = []
    # A dense MLP's output is its down projection's.
    is_dense = _submodule(layer, "mlp.down_proj") is not None
    inputs, outputs = _names(layer)
    for table, is_input in ((inputs, True), (outputs, False)):
        for path, name in table.items():
            module = _submodule(layer, path)
            if module is None or (name == "MLP" and is_dense):
                continue
            operations = (Operation(name, number),)
            if name in HEAD_NORMS and _submodule(layer, NORM_BEFORE_MLP) is not None:
                site = Site(module=module, operations=operations, split=_by_token, join=_by_head)
            else:
                site = Site(module=module, operations=operations, is_input=is_input)
            sites.append(site)
    return sites + _fused_sites(layer, number)


def _by_token(value: Tensor) -> Sequence[Tensor]:
    """Returns [sequences, columns, heads, d] of [sequences, heads, columns, d]."""
    return [value.transpose(1, 2)]


def _by_head(results: Sequence[Tensor], value: Tensor) -> Tensor:
    """The inverse of `_by_token`."""
    return results[0].reshape(value.transpose(1, 2).shape).transpose(1, 2)


def _names(layer: nn.Module) -> tuple[dict[str, str], dict[str, str]]:
    """Returns `INPUTS` and `OUTPUTS` of a layer."""
    inputs = dict(INPUTS)
    outputs = dict(OUTPUTS)
    if _submodule(layer, NORM_AFTER_MLP) is not None:
        outputs["post_attention_layernorm"] = "norm after attention"
        outputs[NORM_AFTER_MLP] = "norm after MLP"
        del inputs["post_attention_layernorm"]
        if _submodule(layer, NORM_BEFORE_MLP) is not None:
            outputs[NORM_BEFORE_MLP] = "norm before MLP"
            inputs[NORM_BEFORE_MLP] = "residual after attention"
        else:
            inputs["mlp"] = "residual after attention"
    return inputs, outputs


def _fused_sites(layer: nn.Module, number: int) -> list[Site]:
    """Returns the sites of joint projections, in Phi-3 and GLM-4."""
    sites = []
    qkv = _submodule(layer, FUSED_QKV)
    if isinstance(qkv, nn.Linear):
        attention: Any = layer.get_submodule("self_attn")
        keys = attention.config.num_key_value_heads * attention.head_dim
        sizes = [qkv.out_features - 2 * keys, keys, keys]
        operations = (
            Operation("query projection", number),
            Operation("key projection", number),
            Operation("value projection", number),
        )

        def split(value: Tensor) -> Sequence[Tensor]:
            return torch.split(value, sizes, -1)

        sites.append(Site(module=qkv, operations=operations, split=split, join=side_by_side))
    gate_up = _submodule(layer, FUSED_GATE_UP)
    if gate_up is not None:
        halves = (Operation("gate projection", number), Operation("up projection", number))
        sites.append(
            Site(module=gate_up, operations=halves, split=split_in_half, join=side_by_side)
        )
    return sites


def _router_hook(number: int, recorder: Recorder) -> Callable[..., Any]:
    """Records a router's weights as a matrix [tokens, experts], 0 for experts not chosen."""

    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        if not isinstance(output, tuple) or len(output) != 3:
            return None
        logits, weights, experts = output
        recorder.take(Operation("router logits", number), logits)
        weights_TE = torch.zeros(logits.shape, dtype=weights.dtype, device=weights.device)
        weights_TE.scatter_(1, experts, weights)
        replaced_TE = recorder.take(Operation("router", number), weights_TE)
        if replaced_TE is None:
            return None
        chosen = replaced_TE.topk(experts.shape[1], dim=-1)
        return logits, chosen.values.to(weights.dtype), chosen.indices

    return hook


@contextmanager
def _recorded_rope(model: Any, recorder: Recorder) -> Iterator[None]:
    """Records rotated queries and keys, by replacing the function that rotates them."""
    layers = layers_of(model)
    attentions: dict[int, nn.Module] = {}
    for number, layer in enumerate(layers):
        attention = _submodule(layer, "self_attn")
        if attention is not None:
            attentions[number] = attention
    if not attentions:
        yield
        return
    first_attention = next(iter(attentions.values()))
    python_module = sys.modules[type(first_attention).__module__]
    original = getattr(python_module, ROPE, None)
    # The rotation does not know its layer.
    running_layer = [0]

    def rotate(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        assert original is not None  # the function is replaced only if there is one
        rotated = []
        outputs = original(query, key, *args, **kwargs)
        for name, output in zip(("query rope", "key rope"), outputs, strict=True):
            # [sequences, heads, columns, d]; a row is a token.
            by_token = output.transpose(1, 2)
            replaced = recorder.take(Operation(name, running_layer[0]), by_token)
            rotated.append(output if replaced is None else replaced.transpose(1, 2))
        return rotated[0], rotated[1]

    def entered(number: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            running_layer[0] = number

        return hook

    with ExitStack() as stack:
        for number, attention in attentions.items():
            stack.callback(attention.register_forward_pre_hook(entered(number)).remove)
        stack.enter_context(replaced_attribute(python_module, ROPE, rotate))
        yield
