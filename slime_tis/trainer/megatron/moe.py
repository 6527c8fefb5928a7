"""Mixture-of-experts layers: megatron-core's options for them, and their router."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from slime_tis.hf_directory import FAMILIES, moe_sizes
from slime_tis.trainer.megatron.parallel import Parallel


def moe_options(hf: Any, parallel: Parallel) -> dict[str, Any]:
    """megatron-core's configuration of a model's experts; empty for a dense model.

    Routers are trained by the policy's loss alone, without an auxiliary loss for balance.

    Args:
        hf: transformers' configuration of the model.
        parallel: this process's ranks.
    """
    sizes = moe_sizes(hf)
    if sizes is None:
        return {}
    family, sparse = FAMILIES[hf.architectures[0]], set(sizes.layers)
    return {
        "num_moe_experts": sizes.num_experts,
        "moe_layer_freq": [int(layer in sparse) for layer in range(hf.num_hidden_layers)],
        "moe_ffn_hidden_size": sizes.intermediate_size,
        "moe_shared_expert_intermediate_size": sizes.shared_intermediate_size,
        "moe_shared_expert_gate": family.shared_expert_gate is not None,
        "moe_router_topk": sizes.top_k,
        **(_sigmoid_options(hf) if family.sigmoid_router else _softmax_options(hf)),
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "expert_model_parallel_size": parallel.expert_size,
        "expert_tensor_parallel_size": parallel.expert_tensor_size,
    }


def release_probabilities(module: nn.Module) -> None:
    """Makes megatron-core's dispatchers release the probabilities of a micro-batch after their layer has run.

    They would keep the probabilities and their graph until the next micro-batch. The graph refers to the parameters,
    whose data-parallel hooks refer to the model. Python's garbage collector does not see this cycle through C++, so
    that neither the model nor its process groups would ever be freed.
    """

    def release(layer: Any, args: Any, output: Any) -> None:
        layer.token_dispatcher.local_probs = layer.token_dispatcher.probs = None

    for child in module.modules():
        if isinstance(child, MoELayer):
            child.register_forward_hook(release)


def _softmax_options(hf: Any) -> dict[str, Any]:
    # The softmax is over all experts, or over the chosen ones, whose weights then sum to 1.
    return {"moe_router_score_function": "softmax", "moe_router_pre_softmax": not hf.norm_topk_prob}


def _sigmoid_options(hf: Any) -> dict[str, Any]:
    """Routers as in "DeepSeek-V3 Technical Report" (https://arxiv.org/abs/2412.19437), section 2.1.2."""
    grouped = hf.n_group > 1
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,  # the bias keeps its pretrained value
        "moe_router_topk_scaling_factor": hf.routed_scaling_factor,
        "moe_router_num_groups": hf.n_group if grouped else None,
        "moe_router_group_topk": hf.topk_group if grouped else None,
    }


class MoeRouter(TopKRouter):  # type: ignore[misc]  # megatron-core has no types
    """megatron-core's top-k router, without transformer-engine.

    The object in `router_replay` chooses the experts of each token, see
    `megatron.core.transformer.moe.moe_utils.topk_routing_with_score_function`.
    """

    expert_bias: Tensor | None

    def gating(self, input: Tensor) -> Tensor:
        """Logits [..., experts] float32 of hidden states [..., hidden].

        megatron-core's method reads a name that is undefined without transformer-engine.
        """
        return F.linear(input.float(), self.weight.float())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "MoeRouter":
        """Moves the router; its bias stays float32 when the parameters become bfloat16."""
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if bias is not None:
            self.expert_bias = bias.to(self.weight.device)
        return self

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Does nothing: megatron-core would count tokens per expert, to change the bias."""
