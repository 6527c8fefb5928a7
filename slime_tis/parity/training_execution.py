"""The training engine: Megatron layers over packed samples."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from slime_tis.parity.executions import Record, Side
from slime_tis.parity.recording import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    LAYER_END,
    Place,
    Recorder,
    Recording,
    Rows,
    Site,
    hooked,
    replaced_attribute,
)
from slime_tis.parity.samples import Samples
from slime_tis.parity.shared_kernels import kernels_of
from slime_tis.trainer.configs.megatron import MegatronConfig
from slime_tis.trainer.invariant import operations
from slime_tis.trainer.invariant.self_check import HEAD as TILES_OF_HEAD
from slime_tis.trainer.megatron import layers
from slime_tis.trainer.megatron.batch import make_batch
from slime_tis.trainer.megatron.parallel import initialize, shut_down
from slime_tis.trainer.megatron.training_engine import TrainingEngine

OUTPUTS = {
    "input_layernorm": "norm before attention",
    "self_attention.q_layernorm": "query norm",
    "self_attention.k_layernorm": "key norm",
    "self_attention.linear_proj": "output projection",
    "pre_mlp_layernorm": "norm before MLP",
    "mlp.shared_experts": "shared expert",
    "mlp.linear_fc2": "down projection",
    "mlp": "MLP",
    "": LAYER_END,
}
"""Operations by the module of a layer whose output they are."""
INPUTS = {
    "self_attention.linear_proj": "attention",
    "pre_mlp_layernorm": "residual after attention",
    "mlp.linear_fc2": "activation",
}
"""Operations by the module of a layer whose input they are."""
QKV = "self_attention.linear_qkv"
GATE_UP = "mlp.linear_fc1"
ROUTER = "mlp.router"


@contextmanager
def opened(side: Side) -> Iterator[Record]:
    """Builds the training engine on one rank; yields its execution."""
    # megatron-core warns of layers that it does not know.
    logging.getLogger("megatron").setLevel(logging.ERROR)
    config = MegatronConfig(
        hf_checkpoint=side.checkpoint,
        bf16=side.precision == "bf16",
        # Packed once per sample, so that every token has a row.
        share_prompts=False,
        micro_batch_size=1,
    )
    parallel = initialize(config)
    try:
        kernels = kernels_of(side, parallel.device.type)
        engine = TrainingEngine(config, parallel, temperature=1.0, total_steps=1, kernels=kernels)

        @torch.no_grad()
        def record(samples: Samples, substitutes: Recording | None = None) -> Recording:
            return _record(engine, side, samples, substitutes)

        yield record
    finally:
        shut_down()


def _record(
    engine: TrainingEngine, side: Side, samples: Samples, substitutes: Recording | None
) -> Recording:
    """Scores all tokens but the first of every sample, in one packed row."""
    recorder = Recorder(samples.total, substitutes)
    token_T = torch.arange(samples.total)
    recorder.begin(Rows((1, samples.total), token_T, token_T))
    lengths = [len(tokens) - 1 for tokens in samples.tokens]
    batch = make_batch(
        samples.tokens,
        [[1] * length for length in lengths],
        [[0.0] * length for length in lengths],
        [[0] * length for length in lengths],
    )
    module = engine.model.module
    with _recorded(module, recorder):
        log_probs_L = engine.log_probs(batch, [list(range(len(samples)))])
    log_probs_T = torch.full([samples.total], torch.nan)
    log_probs_T[samples.predicted] = log_probs_L.float().cpu()
    _record_logits(engine, recorder)
    return Recording(
        name=side.execution,
        precision=side.precision,
        places=recorder.places,
        log_probs_T=log_probs_T,
        is_scored_T=samples.predicted,
        shapes=recorder.shapes,
    )


def _record_logits(engine: TrainingEngine, recorder: Recorder) -> None:
    """Records logits by the output layer.

    The engine itself has no logits: it computes log-probs in tiles from the final norm's output.
    """
    place = Place(FINAL_NORM)
    hidden = recorder.substitutes.get(place) or recorder.places[place]
    module = engine.model.module
    weight = module.output_weight()
    hidden_TF = hidden.values_TF.to(weight)
    if engine.kernels is None:
        logits, _bias = module.output_layer(hidden_TF[:, None], weight=weight)
    else:
        tiles = engine.kernels.tiles[TILES_OF_HEAD]
        logits = operations.linear(hidden_TF, weight, None, tiles)[:, None]
    # Other columns pad the vocabulary.
    recorder.take(Place(HEAD), logits[:, 0, : engine.model.hf_config.vocab_size])


@contextmanager
def _recorded(module: Any, recorder: Recorder) -> Iterator[None]:
    """Records all visible operations of a GPTModel during the block."""
    sites = [
        Site(module=module.embedding, places=(Place(EMBEDDING),)),
        Site(module=module.decoder.final_layernorm, places=(Place(FINAL_NORM),)),
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


def _layer_sites(modules: dict[str, nn.Module], number: int, config: Any) -> list[Site]:
    sites = []
    is_dense = GATE_UP in modules
    for table, is_input in ((INPUTS, True), (OUTPUTS, False)):
        for path, operation in table.items():
            module = modules.get(path)
            # transformer-engine computes norms within the next linear layer. Its class is not
            # imported: slime_tis.trainer.megatron must be imported before megatron.core.
            is_identity = type(module).__name__ == "IdentityOp"
            is_missing = module is None or (is_identity and not is_input)
            # A dense MLP's output is its down projection's.
            if is_missing or (operation == "MLP" and is_dense):
                continue
            assert module is not None
            place = Place(operation, number)
            sites.append(Site(module=module, places=(place,), is_input=is_input))
    names = ("query projection", "key projection", "value projection")
    split, join = _qkv_layout(config.num_attention_heads, config.num_query_groups)
    places = tuple(Place(name, number) for name in names)
    sites.append(Site(module=modules[QKV], places=places, split=split, join=join))
    if is_dense:
        places = (Place("gate projection", number), Place("up projection", number))
        sites.append(
            Site(module=modules[GATE_UP], places=places, split=_split_gate, join=_join_gate)
        )
    return sites


def _qkv_layout(
    heads: int, groups: int
) -> tuple[Callable[[Tensor], list[Tensor]], Callable[[Sequence[Tensor], Tensor], Tensor]]:
    """Returns functions between megatron-core's joint projection and transformers' three.

    megatron-core's features are, per group: its queries, its key, its value.
    """
    queries = heads // groups

    def split(value: Tensor) -> list[Tensor]:
        grouped = value.unflatten(-1, (groups, queries + 2, -1))
        parts = grouped.split([queries, 1, 1], -2)
        return [part.flatten(-3) for part in parts]

    def join(parts: Sequence[Tensor], value: Tensor) -> Tensor:
        query, key, keys_value = parts
        grouped = [
            query.unflatten(-1, (groups, queries, -1)),
            key.unflatten(-1, (groups, 1, -1)),
            keys_value.unflatten(-1, (groups, 1, -1)),
        ]
        return torch.cat(grouped, -2).reshape(value.shape)

    return split, join


def _split_gate(value: Tensor) -> Sequence[Tensor]:
    return value.chunk(2, -1)


def _join_gate(parts: Sequence[Tensor], value: Tensor) -> Tensor:
    return torch.cat(list(parts), -1).reshape(value.shape)


def _router_hook(number: int, recorder: Recorder) -> Callable[..., Any]:
    """Records a router's weights [tokens, experts]."""

    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        weights_TE, _chosen_TE = output
        replaced_TE = recorder.take(Place("router", number), weights_TE)
        if replaced_TE is None:
            return None
        return replaced_TE, replaced_TE > 0

    return hook


@contextmanager
def _recorded_rope(decoder_layers: Any, recorder: Recorder) -> Iterator[None]:
    """Records rotated queries and keys, by replacing the functions that rotate them."""
    remaining: list[Place] = []

    def entered(number: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            # The attention module rotates queries, then keys.
            remaining[:] = [Place("query rope", number), Place("key rope", number)]

        return hook

    def observed(rotate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def function(x: Tensor, *angles: Tensor) -> Tensor:
            output = rotate(x, *angles)
            replaced = recorder.take(remaining.pop(0), output)
            return output if replaced is None else replaced

        return function

    with ExitStack() as stack:
        for number, layer in enumerate(decoder_layers):
            attention = layer.self_attention.core_attention
            stack.callback(attention.register_forward_pre_hook(entered(number)).remove)
        # `layers` for plain layers, `operations` for those of --true-on-policy.
        for owner in (layers, operations):
            function = observed(owner.rotate)
            stack.enter_context(replaced_attribute(owner, "rotate", function))
        yield
