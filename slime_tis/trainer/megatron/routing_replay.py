"""Routing replay: mixture-of-experts layers send tokens to experts that were chosen elsewhere.

    I_t = experts that the rollout engine chose (R3), or this engine's pass for log π_old (R2)
    g_i = softmax over i ∈ I_t of the present router's logits   (or what else its model makes of the logits at I_t)
    y_t = Σ_{i ∈ I_t} g_i E_i(x_t)

The choice is replayed; its weights g are the present router's, so that the gradient reaches router and hidden states.
`--routing-replay-weights` puts the rollout engine's own weights g̃ in their place, straight through:

    g_i := g̃_i + (g_i − stopgrad(g_i))

The value is g̃ and the gradient that of g: where the engines agree it is the gradient of the loss itself. With g̃ as a
constant a router would get no gradient at all. Over several steps on a rollout the value stays at g̃ while the router
moves.

Sources: "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers", Ma et al.
(https://arxiv.org/abs/2510.11370), eq. 5 and 6 (R3); "Group Sequence Policy Optimization", Zheng et al.
(https://arxiv.org/abs/2507.18071), section 5.3 (R2); the straight-through estimator: "Estimating or Propagating
Gradients Through Stochastic Neurons", Bengio et al. (https://arxiv.org/abs/1308.3432).

megatron-core asks an object in `router.router_replay` for the experts of each token. Its own one holds a single
micro-batch, and a list for recomputation that shrinks only where there is any; `LayerReplay` is in its place.

Shapes: suffix _T the tokens of a micro-batch that this rank's routers see, _TK with k experts each, _TE with all of
them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slime_tis.hf_directory import MoeSizes
from slime_tis.trainer.megatron.moe import MoeRouter
from slime_tis.trainer.megatron.packing import MicroBatch
from slime_tis.trainer.megatron.parallel import Parallel

RoutingRecord = list[Tensor]
"""The experts that the tokens of each micro-batch of a pass took, int16 [T, sparse layers of this rank, k]."""


@dataclass(frozen=True, kw_only=True)
class MicroBatchRouting:
    """What the sparse layers of this rank do with one micro-batch."""

    experts: Tensor | None
    """int16 [T, layers, k] to replay, -1 in the rows of tokens whose routers choose themselves; None: all do."""
    weights: Tensor | None
    """float32 [T, layers, k] to multiply the outputs of these experts by, NaN where the router's are taken; None: all
    are the router's."""
    is_fed_T: Tensor
    """bool: tokens that another token of their sequence follows; False for the last ones and for padding."""
    is_recorded_T: Tensor
    """bool: tokens among them whose experts are in `experts`."""
    differs_T: Tensor
    """bool, filled by the layers: tokens for which a router would have chosen another set than `experts`."""
    taken: Tensor | None
    """int16 [T, layers, k], filled by the layers: the experts of every token; None where they are not recorded."""


class LayerReplay:
    """The routing of one layer, which megatron-core's router finds in its attribute `router_replay`.

    With recomputed activations a layer runs twice: without gradient in the forward pass and with it in the backward
    pass, where every pipeline schedule takes the micro-batches in the order of their forward passes.
    """

    def __init__(self, routing: RoutingReplay, place: int) -> None:
        """Asks `routing` what to do.

        Args:
            routing: of all layers.
            place: of this one among the sparse layers of the rank.
        """
        self._routing, self._place = routing, place
        self._present: MicroBatchRouting | None = None
        self.to_recompute: deque[MicroBatchRouting | None] = deque()
        """The micro-batches that ran without gradient, and are yet to run with it."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Scores [T, k] and experts [T, k] of every token; called by megatron's `topk_routing_with_score_function`.

        Args:
            scores: [T, experts], by which the router would choose.
            topk: experts per token.
            num_groups: of experts, where a choice is limited to the best groups.
            group_topk: groups that a choice is limited to.
            compute_topk: the router's own choice.
        """
        recomputes = torch.is_grad_enabled() and bool(self.to_recompute)
        self._present = present = self.to_recompute.popleft() if recomputes else self._routing.present
        if self._routing.trains and not torch.is_grad_enabled():
            self.to_recompute.append(present)
        values, own = compute_topk(scores, topk, num_groups, group_topk)
        if present is None:
            return values, own
        recorded = own if present.experts is None else present.experts[:, self._place].long()
        taken = torch.where(recorded >= 0, recorded, own) if self._routing.replays else own
        if not recomputes:
            self._note(present, taken, own, recorded)
        return (values, own) if present.experts is None else (scores.gather(1, taken), taken)

    def combine(self, router: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor] | None:
        """A forward hook of the router: puts replayed weights in the place of its own, straight through."""
        present = self._present
        if present is None or present.weights is None or present.experts is None or not self._routing.replays:
            return None
        own_TE, routing_map = output
        weights_TK, experts_TK = present.weights[:, self._place].to(own_TE), present.experts[:, self._place].long()
        replayed_TE = torch.zeros_like(own_TE).scatter(1, experts_TK.clamp_min(0), weights_TK)
        value_TE = torch.where(weights_TK[:, :1].isnan(), own_TE.detach(), replayed_TE)
        return value_TE + (own_TE - own_TE.detach()), routing_map

    @torch.no_grad()
    def _note(self, present: MicroBatchRouting, taken: Tensor, own: Tensor, recorded: Tensor) -> None:
        """Records and counts the experts [T, k] of a micro-batch."""
        if present.taken is not None:
            present.taken[:, self._place] = taken
        counts = self._routing.counts
        if counts is None:
            return
        fed_TK = present.is_fed_T[:, None].expand_as(taken)
        counts.load[self._place].scatter_add_(0, taken.flatten(), fed_TK.flatten().to(counts.load))
        if present.experts is not None:
            differs_T = present.is_recorded_T & (recorded.sort(-1).values != own.sort(-1).values).any(-1)
            counts.recorded[self._place] += present.is_recorded_T.sum()
            counts.differing[self._place] += differs_T.sum()
            present.differs_T.logical_or_(differs_T)


@dataclass(frozen=True, kw_only=True)
class RoutingCounts:
    """What the sparse layers of this rank count in a pass; float64."""

    load: Tensor
    """[layers, experts] tokens that each expert got."""
    recorded: Tensor
    """[layers] tokens whose experts were recorded elsewhere."""
    differing: Tensor
    """[layers] tokens among them for which the router chooses, or would have chosen, another set."""

    @classmethod
    def zeros(cls, layers: int, experts: int, device: torch.device) -> RoutingCounts:
        """No tokens yet."""
        zeros = torch.zeros(layers, experts + 2, dtype=torch.float64, device=device)
        return cls(load=zeros[:, :experts], recorded=zeros[:, experts], differing=zeros[:, experts + 1])


class RoutingReplay:
    """The routing of this rank's layers: what they replay, record and count. Without experts there are no layers."""

    def __init__(
        self, module: nn.Module, sizes: MoeSizes | None, parallel: Parallel, *, sequence_parallel: bool
    ) -> None:
        """Puts a `LayerReplay` into every router.

        Args:
            module: the model.
            sizes: of its mixture-of-experts layers; None where there are none.
            parallel: this process's place in the layout.
            sequence_parallel: whether the routers of each tensor-parallel rank see a part of the tokens of their own.
        """
        self.present: MicroBatchRouting | None = None
        """What is run next."""
        self.trains, self.replays = False, True
        self.counts: RoutingCounts | None = None
        self.sizes, self._parallel, self._splits = sizes, parallel, sequence_parallel and parallel.tensor_size > 1
        self._record: RoutingRecord | None = None
        self._source: Sequence[Tensor] | None = None
        self._compared: list[tuple[Tensor, Tensor]] = []
        """Of each micro-batch, the tokens whose experts are recorded, and those of them that differ."""
        routers = [part for part in module.modules() if isinstance(part, MoeRouter)]
        self._layers = [LayerReplay(self, place) for place in range(len(routers))]
        self._places = [] if sizes is None else [sizes.layers.index(router.layer_number - 1) for router in routers]
        for router, layer in zip(routers, self._layers, strict=True):
            router.router_replay = layer
            router.register_forward_hook(layer.combine)

    def begin(
        self,
        *,
        trains: bool,
        replays: bool = True,
        counts: bool = False,
        record: RoutingRecord | None = None,
        source: RoutingRecord | None = None,
    ) -> None:
        """Prepares for a pass over micro-batches, whatever became of the last one.

        Args:
            trains: whether a backward pass follows.
            replays: whether recorded experts are taken, or the routers choose and are compared with them.
            counts: whether loads and differences are counted.
            record: gets the experts of every micro-batch.
            source: record of another pass over the same micro-batches, which is replayed in place of the batch's own.
        """
        self.trains, self.replays, self._record, self._source = trains, replays, record, source
        self.present, self._compared = None, []
        for layer in self._layers:
            layer.to_recompute.clear()
        if self.sizes is not None and counts:
            device = self._parallel.backend.device
            self.counts = RoutingCounts.zeros(len(self._layers), self.sizes.num_experts, device)
        else:
            self.counts = None

    def fill(self, micro: MicroBatch) -> None:
        """Takes what is recorded of the micro-batch whose forward pass comes next."""
        if self.sizes is None:
            return
        rows = slice(None)
        if self._splits:
            size = len(micro.is_fed_T) // self._parallel.tensor_size
            rows = slice(self._parallel.tensor_rank * size, (self._parallel.tensor_rank + 1) * size)
        is_fed_T = is_recorded_T = micro.is_fed_T[rows]
        if self._source is not None:
            experts: Tensor | None = self._source[len(self._compared)]
        else:
            experts = self._of_layers(micro.routed_experts, rows)
            recorded = micro.routed_experts
            is_recorded_T = torch.zeros_like(is_fed_T) if recorded is None else is_fed_T & (recorded[rows, 0, 0] >= 0)
        taken = None
        if self._record is not None:
            shape = (len(is_fed_T), len(self._layers), self.sizes.top_k)
            taken = torch.empty(shape, dtype=torch.int16, device=is_fed_T.device)
            self._record.append(taken)
        self.present = MicroBatchRouting(
            experts=experts,
            weights=self._of_layers(micro.routing_weights, rows),
            is_fed_T=is_fed_T,
            is_recorded_T=is_recorded_T,
            differs_T=torch.zeros_like(is_fed_T),
            taken=taken,
        )
        self._compared.append((is_recorded_T, self.present.differs_T))

    def end(self) -> None:
        """Ends a pass.

        Raises:
            RuntimeError: a layer of recomputed activations has not run a second time.
        """
        self.present, self.trains = None, False
        if any(layer.to_recompute for layer in self._layers):
            raise RuntimeError(
                "routing replay: a layer has not recomputed every micro-batch that it ran without gradient"
            )

    def metrics(self) -> dict[str, float]:
        """Loads and differences of the pass that ended last, over all ranks; a collective of all of them.

        Returns:
            expert_load_max and expert_load_min: the largest and the smallest share of a layer's choices that went to
            one expert. Where experts were recorded also routing_difference, the share of their tokens for which the
            router of any layer chooses another set, and routing_difference/layer_N for one layer.
        """
        if self.sizes is None or self.counts is None:
            return {}
        parallel, counts = self._parallel, self.counts
        layers = torch.zeros(len(self.sizes.layers), self.sizes.num_experts + 2, dtype=torch.float64)
        together = torch.zeros(2, dtype=torch.float64)
        recorded_T, differs_T = self._in_any_layer()
        if self._splits or parallel.tensor_rank == 0:  # elsewhere the tensor-parallel ranks see the same tokens
            of_rank = [counts.load, counts.recorded[:, None], counts.differing[:, None]]
            layers[self._places] = torch.cat(of_rank, 1).cpu()
            if parallel.is_last_stage:
                together = torch.stack([recorded_T.sum(), differs_T.sum()]).double().cpu()
        summed = torch.cat([layers.flatten(), together]).to(parallel.backend.device)
        if parallel.size > 1:
            dist.all_reduce(summed)
        layers, together = summed[:-2].view_as(layers).cpu(), summed[-2:].cpu()
        return routing_metrics(self.sizes, layers, together)

    def _of_layers(self, values: Tensor | None, rows: slice) -> Tensor | None:
        """[T, layers, k] of this rank's tokens and layers."""
        return None if values is None else values[rows][:, self._places]

    def _in_any_layer(self) -> tuple[Tensor, Tensor]:
        """Bool over this rank's tokens: those whose experts are recorded, and those that differ in any layer."""
        recorded_T, differs_T = (torch.cat(parts) for parts in zip(*self._compared, strict=True))
        if self._parallel.pipeline_size > 1:
            differs = differs_T.to(torch.uint8)
            dist.all_reduce(differs, dist.ReduceOp.MAX, self._parallel.pipeline_group)
            differs_T = differs > 0
        return recorded_T, differs_T


def routing_metrics(sizes: MoeSizes, layers: Tensor, together: Tensor) -> dict[str, float]:
    """The metrics of `RoutingReplay.metrics`.

    Args:
        sizes: of the mixture-of-experts layers.
        layers: [sparse layers, experts + 2] tokens of each expert, tokens recorded, and tokens that differ.
        together: [2] tokens recorded, and tokens that differ in any layer.
    """
    found = {}
    load, (recorded, differing) = layers[:, :-2], layers[:, -2:].T
    if bool((load.sum(1) > 0).all()):
        share = load / load.sum(1, keepdim=True)
        found = {"expert_load_max": float(share.max()), "expert_load_min": float(share.min())}
    if float(together[0]):
        found["routing_difference"] = float(together[1] / together[0])
        for layer, of_layer in zip(sizes.layers, (differing / recorded).tolist(), strict=True):
            found[f"routing_difference/layer_{layer}"] = of_layer
    return found
