"""Finds the first operation of a sequence whose result differs between the two engines.

Both engines compute the complete sequence, and hooks record the outputs of their modules.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slime_tis.trainer.data.sample import Sample
from slime_tis.trainer.engines.local.local_engine import LocalEngine
from slime_tis.trainer.invariant.operations import token_log_probs
from slime_tis.trainer.learner import Learner
from slime_tis.trainer.megatron.log_probs import TokenDistribution


@dataclass(frozen=True)
class Place:
    """An operation, and the modules of both engines whose output it is."""

    name: str
    rollout: str
    """Name of transformers' module. The module's input is compared if it ends with `INPUT`."""
    training: str
    """Name of megatron-core's module."""


INPUT = "<"
IN_A_LAYER = (
    Place("norm before attention", "input_layernorm", "input_layernorm"),
    Place("norm of queries", "self_attn.q_norm", "self_attention.q_layernorm"),
    Place("norm of keys", "self_attn.k_norm", "self_attention.k_layernorm"),
    Place(
        "query, key and value, rotary embedding or attention",
        "self_attn.o_proj<",
        "self_attention.linear_proj<",
    ),
    Place("attention output", "self_attn.o_proj", "self_attention.linear_proj"),
    Place("norm before the MLP", "post_attention_layernorm", "pre_mlp_layernorm"),
    Place("gate and up, or silu", "mlp.down_proj<", "mlp.linear_fc2<"),
    Place("down", "mlp.down_proj", "mlp.linear_fc2"),
    Place("residual", "", ""),
)
"""Operations of a layer in order, with names inside the layer."""
ROLLOUT_LAYER = "model.layers.{}"
TRAINING_LAYER = "decoder.layers.{}"


def places(num_layers: int) -> list[Place]:
    """Returns the operations of a dense model in the order of computation."""
    result = [Place("embedding", "model.embed_tokens", "embedding")]
    for number in range(num_layers):
        rollout_layer = ROLLOUT_LAYER.format(number)
        training_layer = TRAINING_LAYER.format(number)
        for place in IN_A_LAYER:
            result.append(
                Place(
                    f"{place.name} of layer {number}",
                    f"{rollout_layer}.{place.rollout}".rstrip("."),
                    f"{training_layer}.{place.training}".rstrip("."),
                )
            )
    result.append(Place("final norm", "model.norm", "decoder.final_layernorm"))
    return result


@contextmanager
def recorded(module: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Records outputs, or inputs, of the named submodules during the block, by name.

    Names without a module are left out.
    """
    values: dict[str, Tensor] = {}
    modules = dict(module.named_modules())
    handles = []
    for name in names:
        submodule = modules.get(name.removesuffix(INPUT))
        if submodule is None:
            continue

        def record(_: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
            value = output[0] if isinstance(output, tuple) else output
            if name.endswith(INPUT):
                value = inputs[0]
            # A copy, because residuals are added in place.
            values[name] = value.detach().clone()

        handles.append(submodule.register_forward_hook(record))
    try:
        yield values
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def first_difference(learner: Learner, engine: LocalEngine, sample: Sample) -> str:
    """Returns a sentence about the first operation that differs; a collective.

    Tensor-parallel ranks compare the operations whose complete result every rank has.
    """
    model = engine.model
    compared = places(model.config.num_hidden_layers)
    with recorded(model, [place.rollout for place in compared]) as rollout:
        logits = model(torch.tensor([sample.tokens])).logits[0]
    training_module = learner.engine.model.module
    with recorded(training_module, [place.training for place in compared]) as training:
        _, log_probs_L = learner.score([sample])
    for place in compared:
        left = rollout.get(place.rollout)
        right = training.get(place.training)
        # Inside a tensor-parallel layer a rank has a part of the features.
        if left is None or right is None or left.numel() != right.numel():
            continue
        left = left.flatten().float()
        right = right.flatten().float()
        differs = left != right
        if differs.any():
            share = float(differs.float().mean())
            largest = float((left - right).abs().max())
            return (
                f"In a complete pass over this sample, the first operation that differs is the"
                f" {place.name}: {share:.2%} of its values, at most by {largest:.2g}."
            )
    if not torch.equal(sampler_log_probs(learner, logits, sample), log_probs_L):
        return (
            "In a complete pass over this sample, all hidden states agree: the output layer or the"
            " log-softmax differs."
        )
    return (
        "In a complete pass over this sample, both engines agree in every bit: the difference comes"
        " from another batch, from the key/value cache, or from weights that changed after the"
        " sample."
    )


def sampler_log_probs(learner: Learner, logits_BV: Tensor, sample: Sample) -> Tensor:
    """Returns the log-probs [L] of a response by the sampler's sums, from the logits of all tokens.

    Tokens that top-p or top-k left out have probability 0.
    """
    count = sample.response_length
    distribution = TokenDistribution(
        temperature=learner.engine.temperature, sampling_mask=sample.sampling_mask
    )
    z_LV = distribution.scale_(logits_BV[-count - 1 : -1].float().clone(), 0)
    kernels = learner.engine.kernels
    assert kernels is not None  # --true-on-policy
    return token_log_probs(z_LV, torch.tensor(sample.response_ids), kernels.vocabulary_part)
