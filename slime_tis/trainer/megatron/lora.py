"""LoRA adapters on megatron-core's linear layers.

    y = W x + s · B A dropout(x),   s = alpha / rank

W is frozen; A [rank, in] and B [out, rank] are trained. A starts with uniform random numbers, as in
PEFT, and B with zeros, so that a new adapter changes nothing.

Source: "LoRA: Low-Rank Adaptation of Large Language Models", Hu et al.
(https://arxiv.org/abs/2106.09685), section 4.1.

megatron-core fuses query, key and value, and gate and up projection. Each of them has its own A and
B here, as in PEFT. One A for a fused matrix would be another parametrization, which PEFT's format
cannot hold.

Under tensor parallelism, a column-parallel layer has all of A and this rank's rows of B. A
row-parallel layer has this rank's columns of A and all of B. Only the `rank` values per token
between A and B are communicated.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import (
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from slime_tis.errors import quoted_path
from slime_tis.peft_directory import read_adapter_config
from slime_tis.trainer.configs.megatron import MegatronConfig

TRIAL_SIZE = 0.05
"""Size of a trial adapter relative to the weights."""
PREFIX = "lora_"
"""Beginning of an adapter's name; the rest is the name of its linear layer."""


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """The adapters of a model."""

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]
    """Hugging Face names of the linear layers, such as q_proj."""

    @property
    def scale(self) -> float:
        """s, by which the product of B and A is multiplied."""
        return self.alpha / self.rank


@dataclass(frozen=True, kw_only=True)
class Fusion:
    """The Hugging Face projections of a linear layer of megatron-core, in the order of its rows."""

    names: tuple[str, ...]
    per_group: tuple[int, ...]
    """Rows of each projection within one group, in proportion."""
    groups: int
    """Number of groups on this rank, each of which has rows of all projections."""

    def rows(self, total: int) -> dict[str, int]:
        """Returns how many of the layer's rows each projection has."""
        unit = total // sum(self.per_group)
        return {name: unit * share for name, share in zip(self.names, self.per_group, strict=True)}

    def join(self, parts: list[Tensor], dim: int) -> Tensor:
        """Joins one tensor per projection along the rows `dim`, in the order of the layer."""
        if len(parts) == 1:
            return parts[0]
        dim %= parts[0].dim()
        per_group = [part.unflatten(dim, (self.groups, -1)) for part in parts]
        return torch.cat(per_group, dim + 1).flatten(dim, dim + 1)


def lora_settings(config: MegatronConfig) -> LoraSettings | None:
    """Returns the settings of the adapters, None without any.

    Raises:
        ValueError: --lora-adapter-path has no adapter.
    """
    path = config.lora_adapter_path
    if path is not None:
        subject = f"--lora-adapter-path is {quoted_path(path)}"
        saved = read_adapter_config(path, subject)
        return LoraSettings(
            rank=saved.rank, alpha=saved.alpha, dropout=config.lora_dropout, targets=saved.targets
        )
    if config.lora_rank is None:
        return None
    return LoraSettings(
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        dropout=config.lora_dropout,
        targets=config.lora_targets,
    )


class Adapter(MegatronModule):  # type: ignore[misc]  # megatron-core has no types
    """The adapters of one linear layer; a forward hook of the layer adds their output."""

    def __init__(
        self,
        linear: nn.Module,
        fusion: Fusion,
        config: TransformerConfig,
        settings: LoraSettings,
        *,
        seed: int,
        layer_name: str,
    ) -> None:
        """Makes the parameters of the targeted projections.

        Args:
            linear: The linear layer.
            fusion: Its projections.
            config: The model's configuration.
            settings: Rank, scale and targets.
            seed: Seed of A's random numbers, which do not depend on the parallel layout.
            layer_name: Name of the linear layer in the complete model; A's random numbers depend on
                it.
        """
        super().__init__(config=config)
        weight: Any = linear.weight
        rows, columns = weight.shape
        self.fusion = fusion
        self.settings = settings
        self.is_enabled = True
        self.divides_input = isinstance(linear, RowParallelLinear)
        self.tp_group: Any = linear.tp_group
        self.output_sizes = fusion.rows(rows)
        self.down = nn.ParameterDict()
        self.up = nn.ParameterDict()
        for name in fusion.names:
            if name not in settings.targets:
                continue
            down = self._initial_down(settings.rank, columns, f"{seed} {layer_name} {name}")
            up = torch.zeros(self.output_sizes[name], settings.rank)
            self.down[name] = nn.Parameter(down.to(weight.dtype))
            self.up[name] = nn.Parameter(up.to(weight.dtype))
            self._mark_parallelism(self.down[name], self.up[name])

    def forward(self, x: Tensor) -> Tensor:
        """Returns s · B A dropout(x), for the input that the linear layer gets on this rank."""
        x = F.dropout(x, self.settings.dropout, self.training)
        low_rank = torch.cat([F.linear(x, down) for down in self.down.values()], -1)
        low_rank = self._communicated(low_rank) * self.settings.scale
        per_target = dict(zip(self.down, low_rank.chunk(len(self.down), -1), strict=True))
        outputs = []
        for name, size in self.output_sizes.items():
            if name in self.up:
                outputs.append(F.linear(per_target[name], self.up[name]))
            else:
                outputs.append(low_rank.new_zeros(*low_rank.shape[:-1], size))
        return self.fusion.join(outputs, -1)

    @torch.no_grad()
    def weight_change(self) -> Tensor:
        """Returns s · B A in float32, this rank's shard in the layout of the layer's weight."""
        device = next(self.parameters()).device
        columns = next(iter(self.down.values())).shape[1]
        parts = []
        for name, size in self.output_sizes.items():
            if name in self.up:
                product = self.up[name].float() @ self.down[name].float()
                parts.append(self.settings.scale * product)
            else:
                parts.append(torch.zeros(size, columns, device=device))
        return self.fusion.join(parts, 0)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Returns megatron-core's description of the parameters for a checkpoint."""
        state = self.state_dict(prefix="", keep_vars=True)
        divided = {}
        for name in self.down:
            if self.divides_input:
                divided[f"down.{name}"] = 1
            else:
                divided[f"up.{name}"] = 0
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state, prefix, divided, sharded_offsets
        )
        return sharded

    def _initial_down(self, rank: int, columns: int, seed: str) -> Tensor:
        """Returns this rank's columns of uniform random numbers within ±1/√in.

        This is `nn.init.kaiming_uniform_(A, a=√5)`, PEFT's initialization.
        """
        shards = self.tp_group.size() if self.divides_input else 1
        digest = hashlib.sha256(seed.encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        bound = 1 / math.sqrt(columns * shards)
        complete = torch.empty(rank, columns * shards, device="cpu")
        complete.uniform_(-bound, bound, generator=generator)
        if not self.divides_input:
            return complete
        own_columns: Tensor = complete.chunk(shards, 1)[self.tp_group.rank()]
        return own_columns.contiguous()

    def _mark_parallelism(self, down: nn.Parameter, up: nn.Parameter) -> None:
        """Marks the parameters for megatron-core's norm and sums of gradients."""
        if self.divides_input:
            set_tensor_model_parallel_attributes(down, True, 1, 1)
            replicated = up
        else:
            set_tensor_model_parallel_attributes(up, True, 0, 1)
            replicated = down
        # A rank computes this one's gradient from its slice of the sequence only.
        replicated.sequence_parallel = self.config.sequence_parallel  # type: ignore[attr-defined]

    def _communicated(self, low_rank: Tensor) -> Tensor:
        """Returns the values between A and B that this rank's part of B needs."""
        if self.divides_input and self.config.sequence_parallel:
            summed = reduce_scatter_to_sequence_parallel_region(low_rank, group=self.tp_group)
        elif self.divides_input:
            summed = reduce_from_tensor_model_parallel_region(low_rank, group=self.tp_group)
        elif self.config.sequence_parallel:
            summed = gather_from_sequence_parallel_region(low_rank, group=self.tp_group)
        else:
            # the same values on every rank, whose gradients are summed
            summed = copy_to_tensor_model_parallel_region(low_rank, group=self.tp_group)
        assert isinstance(summed, Tensor)
        return summed


def add_adapters(
    module: nn.Module, config: TransformerConfig, settings: LoraSettings, *, seed: int
) -> None:
    """Adds adapters to the layers of this rank, and freezes all other parameters.

    Raises:
        ValueError: A layer lacks a targeted linear layer, or has it in experts.
    """
    module.requires_grad_(False)
    for layer in module.decoder.layers:  # type: ignore[union-attr]  # megatron-core's
        for parent_name, linear_name, fusion in _fusions(config):
            if not set(fusion.names) & set(settings.targets):
                continue
            parent = getattr(layer, parent_name)
            linear = getattr(parent, linear_name, None)
            if linear is None:
                raise ValueError(
                    f"--lora-target-modules has {', '.join(fusion.names)}, but layer"
                    f" {layer.layer_number - 1} has no such linear layer, or has it in experts;"
                    " name other layers."
                )
            layer_name = f"{layer.layer_number - 1}.{parent_name}.{linear_name}"
            adapter = Adapter(linear, fusion, config, settings, seed=seed, layer_name=layer_name)
            parent.add_module(PREFIX + linear_name, adapter)
            linear.register_forward_hook(_Addition(adapter))


class _Addition:
    """The forward hook that adds an adapter's output to its linear layer's."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter

    def __call__(self, _: nn.Module, inputs: tuple[Tensor, ...], outputs: Any) -> Any:
        if not self.adapter.is_enabled:
            return outputs
        output, bias = outputs
        return output + self.adapter(inputs[0]), bias


def adapters_of(module: nn.Module) -> dict[str, Adapter]:
    """Returns the adapters on this rank, by the name of their linear layer's weight."""
    adapters = {}
    for name, child in module.named_modules():
        if isinstance(child, Adapter):
            adapters[name.replace(f".{PREFIX}", ".") + ".weight"] = child
    return adapters


def oversized_targets(module: nn.Module, rank: int) -> list[str]:
    """Returns the projections of this rank whose complete matrix has a side below the rank.

    Each is a text such as "k_proj (16 × 32)", with output and input features.
    """
    texts = []
    for adapter in adapters_of(module).values():
        shards = adapter.tp_group.size()
        for name, down in adapter.down.items():
            rows = adapter.output_sizes[name]
            columns = down.shape[1]
            if adapter.divides_input:
                columns *= shards
            else:
                rows *= shards
            if rank > min(rows, columns):
                texts.append(f"{name} ({rows} × {columns})")
    return list(dict.fromkeys(texts))  # once for all layers


def is_adapter_parameter(name: str) -> bool:
    """Returns whether a name of `named_parameters` is that of an adapter's A or B."""
    return f".{PREFIX}" in name


def merged(weight: Tensor, adapter: Adapter) -> Tensor:
    """Returns W + s · B A in float32, this rank's shard."""
    return weight.detach().float() + adapter.weight_change()


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """Inside the block, the model computes without its adapters."""
    adapters = adapters_of(module).values()
    for adapter in adapters:
        adapter.is_enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.is_enabled = True


def copied_adapters(module: nn.Module) -> dict[str, Tensor]:
    """Returns a copy of the adapters' parameters on this rank."""
    copies = {}
    for name, parameter in module.named_parameters():
        if is_adapter_parameter(name):
            copies[name] = parameter.detach().clone()
    return copies


@torch.no_grad()
def assign_adapters(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Sets the adapters' parameters on this rank."""
    for name, parameter in module.named_parameters():
        if is_adapter_parameter(name):
            parameter.copy_(values[name])


def trial_adapters(module: nn.Module, seed: int) -> dict[str, Tensor]:
    """Returns the parameters of the adapters on this rank with a random B in place of their own.

    B is uniform within ±b, with b such that s · B A has TRIAL_SIZE of the size of a weight matrix
    whose values have the variance 1/in, as after the usual initialization. A is uniform within
    ±1/√in; a value of B A then has the variance rank · b² / (9 · in).
    """
    values = copied_adapters(module)
    generator = torch.Generator().manual_seed(seed)
    for name, adapter in module.named_modules():
        if not isinstance(adapter, Adapter):
            continue
        settings = adapter.settings
        bound = 3 * TRIAL_SIZE / (settings.scale * math.sqrt(settings.rank))
        for projection, up in adapter.up.items():
            # On the CPU and from one generator: where B is replicated, ranks must agree.
            random = torch.empty(up.shape, device="cpu").uniform_(
                -bound, bound, generator=generator
            )
            values[f"{name}.up.{projection}"] = random.to(up)
    return values


def _fusions(config: TransformerConfig) -> list[tuple[str, str, Fusion]]:
    """Returns the linear layers that can have adapters: parent, name, and projections."""
    groups = config.num_query_groups // config.tensor_model_parallel_size
    queries_per_group = config.num_attention_heads // config.num_query_groups
    return [
        (
            "self_attention",
            "linear_qkv",
            Fusion(
                names=("q_proj", "k_proj", "v_proj"),
                per_group=(queries_per_group, 1, 1),
                groups=groups,
            ),
        ),
        (
            "self_attention",
            "linear_proj",
            Fusion(names=("o_proj",), per_group=(1,), groups=1),
        ),
        (
            "mlp",
            "linear_fc1",
            Fusion(names=("gate_proj", "up_proj"), per_group=(1, 1), groups=1),
        ),
        ("mlp", "linear_fc2", Fusion(names=("down_proj",), per_group=(1,), groups=1)),
    ]
