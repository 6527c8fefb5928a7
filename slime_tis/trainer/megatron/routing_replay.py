"""Routing replay: mixture-of-experts layers send tokens to recorded experts.

    I_t = experts that the rollout engine chose (R3), or this engine's pass for log π_old (R2)
    g_i = softmax over i ∈ I_t of the current router's logits
          (or the model's other function of the logits at I_t)
    y_t = Σ_{i ∈ I_t} g_i E_i(x_t)

The weights g are the current router's, so that the gradient reaches router and hidden states.
`--routing-replay-weights` replaces their value by the rollout engine's weights g̃, straight
through:

    g_i := g̃_i + (g_i − stopgrad(g_i))

Sources:
    R3: "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers",
        Ma et al. (https://arxiv.org/abs/2510.11370), eq. 5 and 6.
    R2: "Group Sequence Policy Optimization", Zheng et al. (https://arxiv.org/abs/2507.18071),
        section 5.3.
    The straight-through estimator: "Estimating or Propagating Gradients Through Stochastic
        Neurons", Bengio et al. (https://arxiv.org/abs/1308.3432).

Shapes: suffix _T the tokens of a micro-batch that this rank's routers see, _TK their k experts,
_TE all experts.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slime_tis.hf_directory import MoeSizes
from slime_tis.trainer.data.sample import Sample
from slime_tis.trainer.megatron.layers import MoeRouter
from slime_tis.trainer.megatron.packing import MicroBatch
from slime_tis.trainer.megatron.parallel import Parallel

RoutingRecord = list[Tensor]
"""The experts used in each micro-batch of a pass, int16 [T, sparse layers of this rank, k]."""


@dataclass(frozen=True, kw_only=True)
class MicroBatchRouting:
    """The routing of one micro-batch in this rank's sparse layers."""

    experts: Tensor | None
    """int16 [T, layers, k] to replay, -1 for tokens whose routers choose; None: routers choose for
    all."""
    weights: Tensor | None
    """float32 [T, layers, k] weights of these experts, NaN for tokens with the router's weights;
    None: for all."""
    is_fed_T: Tensor
    """bool: whether a token of the same sequence follows."""
    is_recorded_T: Tensor
    """bool: tokens of `is_fed_T` with a record in `experts`."""
    differs_T: Tensor
    """bool, set by the layers: tokens for which a router would not have chosen the set in
    `experts`."""
    taken: Tensor | None
    """int16 [T, layers, k], set by the layers: the experts of every token; None if they are not
    recorded."""


class LayerReplay:
    """The routing of one layer: the attribute `router_replay` of megatron-core's router.

    With recomputed activations a layer runs twice: without gradient in the forward pass and with it
    in the backward pass, in the same order of micro-batches. megatron-core's class does not support
    every recomputation.
    """

    def __init__(self, routing: "RoutingReplay", index: int) -> None:
        self._routing = routing
        self._index = index
        self._current: MicroBatchRouting | None = None
        self.to_recompute: deque[MicroBatchRouting | None] = deque()
        """The micro-batches that ran without gradient, and will run again with it."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Returns the scores [T, k] and the experts [T, k] of every token.

        The signature is that of megatron-core's `RouterReplay`.

        Args:
            scores: Of all experts, [T, experts].
            topk: Number of experts per token, k.
            num_groups: Groups of experts from which some models choose; None without groups.
            group_topk: Groups per token.
            compute_topk: Returns the scores and the experts that the router chooses.
        """
        recomputes = torch.is_grad_enabled() and bool(self.to_recompute)
        current = self.to_recompute.popleft() if recomputes else self._routing.current
        self._current = current
        if self._routing.trains and not torch.is_grad_enabled():
            self.to_recompute.append(current)
        values, chosen = compute_topk(scores, topk, num_groups, group_topk)
        if current is None:
            return values, chosen
        recorded = chosen
        if current.experts is not None:
            recorded = current.experts[:, self._index].long()
        taken = chosen
        if self._routing.replays:
            taken = torch.where(recorded >= 0, recorded, chosen)
        if not recomputes:  # count each token once
            self._note(current, taken, chosen, recorded)
        if current.experts is None:
            return values, chosen
        return scores.gather(1, taken), taken

    def combine(
        self, router: nn.Module, args: Any, output: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """A forward hook of the router: replaces its weights by replayed ones, straight through."""
        current = self._current
        if (
            current is None
            or current.weights is None
            or current.experts is None
            or not self._routing.replays
        ):
            return None
        router_TE, routing_map = output
        weights_TK = current.weights[:, self._index].to(router_TE)
        experts_TK = current.experts[:, self._index].long()
        # tokens without a record have expert -1 and weight NaN: they keep the router's weights
        replayed_TE = torch.zeros_like(router_TE).scatter(1, experts_TK.clamp_min(0), weights_TK)
        value_TE = torch.where(weights_TK[:, :1].isnan(), router_TE.detach(), replayed_TE)
        return value_TE + (router_TE - router_TE.detach()), routing_map

    @torch.no_grad()
    def _note(
        self, current: MicroBatchRouting, taken: Tensor, chosen: Tensor, recorded: Tensor
    ) -> None:
        """Writes the layer's experts into the record, and counts loads and differences."""
        if current.taken is not None:
            current.taken[:, self._index] = taken
        counts = self._routing.counts
        fed_TK = current.is_fed_T[:, None].expand_as(taken)
        counts[self._index].scatter_add_(0, taken.flatten(), fed_TK.flatten().to(counts))
        if current.experts is not None:
            # sets are compared: the order of a token's experts has no effect
            is_other_set_T = (recorded.sort(-1).values != chosen.sort(-1).values).any(-1)
            differs_T = current.is_recorded_T & is_other_set_T
            counts[self._index, -2] += current.is_recorded_T.sum()
            counts[self._index, -1] += differs_T.sum()
            current.differs_T.logical_or_(differs_T)


class RoutingReplay:
    """Replays, records and counts the routing of this rank's sparse layers.

    A dense model has none; then `sizes` is None and every method does nothing.
    """

    def __init__(
        self,
        module: nn.Module,
        sizes: MoeSizes | None,
        parallel: Parallel,
        *,
        sequence_parallel: bool,
    ) -> None:
        self.current: MicroBatchRouting | None = None
        self.trains = False
        self.replays = True
        self.counts = torch.zeros(0)
        """float64 [layers, experts + 2] of a pass: tokens of each expert, tokens with recorded
        experts, and tokens with recorded experts for which the router chooses another set."""
        self.sizes = sizes
        self._parallel = parallel
        self._splits = sequence_parallel and parallel.tensor_size > 1
        self._record: RoutingRecord | None = None
        self._source: Sequence[Tensor] | None = None
        self._compared: list[tuple[Tensor, Tensor]] = []
        routers = [child for child in module.modules() if isinstance(child, MoeRouter)]
        self._layers = [LayerReplay(self, index) for index in range(len(routers))]
        self._layer_indices: list[int] = []
        if sizes is not None:  # megatron-core counts layers from 1
            self._layer_indices = [
                sizes.layers.index(router.layer_number - 1) for router in routers
            ]
        for router, layer in zip(routers, self._layers, strict=True):
            router.router_replay = layer
            router.register_forward_hook(layer.combine)

    def begin(
        self,
        *,
        trains: bool,
        replays: bool = True,
        record: RoutingRecord | None = None,
        source: RoutingRecord | None = None,
    ) -> None:
        """Prepares for a pass.

        Args:
            trains: Whether a backward pass follows.
            replays: False to let the routers choose, and only count differences.
            record: Gets the experts used in each micro-batch.
            source: Record from another pass, replayed instead of the batch's experts.
        """
        self.trains = trains
        self.replays = replays
        self._record = record
        self._source = source
        self.current = None
        self._compared = []
        for layer in self._layers:
            layer.to_recompute.clear()
        if self.sizes is not None:
            self.counts = torch.zeros(
                (len(self._layers), self.sizes.num_experts + 2),
                dtype=torch.float64,
                device=self._parallel.device,
            )

    def fill(self, micro: MicroBatch) -> None:
        """Sets the routing of the micro-batch whose forward pass comes next."""
        if self.sizes is None:
            return
        rows = slice(None)
        if self._splits:
            # sequence parallelism: each tensor-parallel rank routes its share of the tokens
            size = len(micro.is_fed_T) // self._parallel.tensor_size
            start = self._parallel.tensor_rank * size
            rows = slice(start, start + size)
        is_fed_T = micro.is_fed_T[rows]
        is_recorded_T = is_fed_T
        if self._source is not None:
            experts: Tensor | None = self._source[len(self._compared)]
        else:
            experts = self._of_layers(micro.routed_experts, rows)
            recorded = micro.routed_experts
            if recorded is None:
                is_recorded_T = torch.zeros_like(is_fed_T)
            else:  # a token has a record in all layers or in none
                is_recorded_T = is_fed_T & (recorded[rows, 0, 0] >= 0)
        taken = None
        if self._record is not None:
            shape = (len(is_fed_T), len(self._layers), self.sizes.top_k)
            taken = torch.empty(shape, dtype=torch.int16, device=is_fed_T.device)
            self._record.append(taken)
        self.current = MicroBatchRouting(
            experts=experts,
            weights=self._of_layers(micro.routing_weights, rows),
            is_fed_T=is_fed_T,
            is_recorded_T=is_recorded_T,
            differs_T=torch.zeros_like(is_fed_T),
            taken=taken,
        )
        self._compared.append((is_recorded_T, self.current.differs_T))

    def end(self) -> None:
        """Ends a pass.

        Raises:
            RuntimeError: A layer has not recomputed every micro-batch, so replay was out of step.
        """
        self.current = None
        self.trains = False
        if any(layer.to_recompute for layer in self._layers):
            raise RuntimeError("routing replay: a layer has not recomputed every micro-batch")

    def metrics(self) -> dict[str, float]:
        """Returns loads and differences of the last pass over all ranks; a collective.

        docs/metrics.md describes them.
        """
        if self.sizes is None:
            return {}
        parallel = self._parallel
        shape = (len(self.sizes.layers), self.sizes.num_experts + 2)
        layers = torch.zeros(shape, dtype=torch.float64)
        in_any_layer = torch.zeros(2, dtype=torch.float64)
        recorded_T, differs_T = self._in_any_layer()
        # without sequence parallelism, all tensor-parallel ranks have the same tokens: count once
        if self._splits or parallel.tensor_rank == 0:
            layers[self._layer_indices] = self.counts.cpu()
            if parallel.is_last_stage:
                in_any_layer = torch.stack([recorded_T.sum(), differs_T.sum()]).double().cpu()
        summed = torch.cat([layers.flatten(), in_any_layer]).to(parallel.device)
        if parallel.size > 1:
            dist.all_reduce(summed)
        layers = summed[:-2].view_as(layers).cpu()
        any_recorded, any_differs = summed[-2:].tolist()
        metrics = {}
        load = layers[:, :-2]
        recorded, differing = layers[:, -2:].T
        if bool((load.sum(1) > 0).all()):
            share = load / load.sum(1, keepdim=True)
            metrics = {"expert_load_max": float(share.max()), "expert_load_min": float(share.min())}
        if any_recorded:
            metrics["routing_difference"] = any_differs / any_recorded
            per_layer = (differing / recorded).tolist()
            for layer, difference in zip(self.sizes.layers, per_layer, strict=True):
                metrics[f"routing_difference/layer_{layer}"] = difference
        return metrics

    def _of_layers(self, values: Tensor | None, rows: slice) -> Tensor | None:
        return None if values is None else values[rows][:, self._layer_indices]

    def _in_any_layer(self) -> tuple[Tensor, Tensor]:
        """Returns bools over this rank's tokens: with a record, with a difference in any layer."""
        recorded, differs = zip(*self._compared, strict=True)
        recorded_T = torch.cat(recorded)
        differs_T = torch.cat(differs)
        if self._parallel.pipeline_size > 1:
            bytes_T = differs_T.to(torch.uint8)
            dist.all_reduce(bytes_T, dist.ReduceOp.MAX, self._parallel.pipeline_group)
            differs_T = bytes_T > 0
        return recorded_T, differs_T


FIELDS = ("rollout_routed_experts", "rollout_routing_weights")
"""Fields of samples that only rank 0 has at first: they are ten times as large as the rest of a
sample."""


def drop_routing(groups: Sequence[Sequence[Sample]]) -> None:
    """Removes experts and weights from samples."""
    for sample in chain(*groups):
        sample.rollout_routed_experts = None
        sample.rollout_routing_weights = None


def receive_routing(parallel: Parallel, shares: Sequence[Sequence[Sample]]) -> None:
    """Sends experts and weights from rank 0 to the data-parallel rank that has the sample.

    A collective. `shares` has the samples by data-parallel rank. It is equal on all ranks, except
    for `FIELDS`, which only rank 0 has.
    """
    if parallel.size == 1:
        return
    slots = []
    for data_rank, share in enumerate(shares):
        for sample in share:
            for name in FIELDS:
                slots.append((data_rank, sample, name))
    descriptions = [_description(getattr(sample, name)) for _, sample, name in slots]
    # Rank 0 tells the other ranks which values exist. The list of descriptions is one object,
    # because every object is sent in a separate message.
    objects = [descriptions]
    dist.broadcast_object_list(objects, src=0)
    for (data_rank, sample, name), description in zip(slots, objects[0], strict=True):
        if parallel.is_main:
            if description is not None:
                value = getattr(sample, name)
                _pass_on(parallel, data_rank, value.contiguous().flatten().view(torch.uint8))
        elif parallel.data_rank == data_rank:
            value = None
            if description is not None:
                value = _received(parallel, *description)
            setattr(sample, name, value)


def _description(value: Tensor | None) -> tuple[torch.Size, torch.dtype] | None:
    if value is None:
        return None
    return value.shape, value.dtype


def _received(parallel: Parallel, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Receives a value of this data-parallel rank's samples."""
    data = torch.empty(shape.numel() * dtype.itemsize, dtype=torch.uint8)
    return _pass_on(parallel, parallel.data_rank, data).cpu().view(dtype).view(shape)


def _pass_on(parallel: Parallel, data_rank: int, data: Tensor) -> Tensor:
    """Sends bytes from rank 0 to all ranks that have the samples of a data-parallel rank.

    Megatron has no group of these ranks. The bytes go to one rank first, then through the context-,
    tensor- and pipeline-parallel groups. The values are bytes because NCCL has no int16.
    """
    if not data.numel():
        return data
    data = data.to(parallel.device)
    is_first_stage = parallel.is_first_stage
    is_first_slice = parallel.tensor_rank == 0
    if data_rank > 0 and is_first_stage and is_first_slice and parallel.context_rank == 0:
        if parallel.is_main:
            dist.send(data, group=parallel.data_group, group_dst=data_rank)
            return data
        dist.recv(data, group=parallel.data_group, group_src=0)
    for size, group, takes_part in (
        (parallel.context_size, parallel.context_group, is_first_stage and is_first_slice),
        (parallel.tensor_size, parallel.tensor_group, is_first_stage),
        (parallel.pipeline_size, parallel.pipeline_group, True),
    ):
        if size > 1 and takes_part:
            dist.broadcast(data, group=group, group_src=0)
    return data
