"""`slime-tis plan`: memory of LoRA adapters in the rollout engine, with --rollout-lora unmerged.

A slot for an adapter of rank r has r · (in + out) values for each linear layer that can have one.
The slots of vLLM 0.32.0 are as measured with a tiny model on a CPU; those of SGLang 0.5.23 are read
from its source.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from slime_tis.errors import quoted
from slime_tis.hf_tensors import expected_tensors
from slime_tis.options.flags import flags_of
from slime_tis.peft_directory import AdapterConfig
from slime_tis.trainer.cli.train_arguments import Layout
from slime_tis.trainer.engines.vllm import vllm_api
from slime_tis.trainer.megatron.lora import LoraSettings, lora_settings

MIB = 2**20
"""Bytes in a MiB."""
SGLANG_SLOTS = 8
"""Default of SGLang's --max-loras-per-batch."""
SGLANG_GROUPS = (
    ("q_proj", "k_proj", "v_proj"),
    ("o_proj",),
    ("gate_proj", "up_proj"),
    ("down_proj",),
)
"""Projections that SGLang fuses: a slot has room for all of a group if one has an adapter."""


def adapter_lines(layout: Layout, hf: Any, trained: int) -> Iterator[str]:
    """Yields a line about adapters in the rollout engine; nothing if they are merged.

    Args:
        layout: The options of the plan.
        hf: transformers' configuration of the model.
        trained: Number of values of the adapters.

    Raises:
        ValueError: The server has no slots of this rank, or a flag is no number.
    """
    config = layout.megatron
    settings = lora_settings(config)
    if settings is None or config.rollout_lora == "merged":
        return
    if layout.rollout_engine == "local":
        # Beside 8-bit and 4-bit weights, the engine computes in float32.
        itemsize = 4
        if layout.rollout_precision in ("bf16", "fp16"):
            itemsize = 2
        loaded = trained * itemsize / MIB
        yield (
            f"LoRA adapters in the local engine: {loaded:,.1f} MiB beside its weights; an update"
            " replaces one matrix after the other."
        )
        return
    yield _server_line(layout, hf, settings, trained)


def _server_line(layout: Layout, hf: Any, settings: LoraSettings, trained: int) -> str:
    """Returns the line about a server, with the flags of one that the run launches."""
    servers = layout.servers[layout.rollout_engine]
    args = servers.server_args or ()
    # Both servers compute in 16 bits unless the flag says otherwise, also with float32 files.
    itemsize = 2
    if _value(args, "dtype", "auto") in ("float32", "float"):
        itemsize = 4
    if layout.rollout_engine == "vllm":
        adapter = AdapterConfig(rank=settings.rank, alpha=settings.alpha, targets=settings.targets)
        flags = [*vllm_api.adapter_flags(adapter), *args]
        slots = _number(flags, "max-loras", vllm_api.ADAPTER_SLOTS)
        rank = _number(flags, "max-lora-rank", settings.rank)
        values = vllm_slot_values(hf)
        layers = "all linear layers, the embedding and the output layer"
    else:
        slots = _number(args, "max-loras-per-batch", SGLANG_SLOTS)
        rank = _number(args, "max-lora-rank", settings.rank)
        values = sglang_slot_values(hf, settings.targets)
        layers = "the layers with an adapter"
    file_itemsize = 2
    if layout.megatron.precision == "fp32":
        file_itemsize = 4
    reserved = slots * rank * values * itemsize / MIB
    loaded = trained * itemsize / MIB
    written = trained * file_itemsize / MIB
    return (
        f"LoRA adapters on a server of {servers.entry.title}: {slots} slots of rank {rank} for"
        f" {layers} take {reserved:,.1f} MiB of GPU memory, with tensor parallelism less per GPU."
        f" Each version takes {loaded:,.1f} MiB of main memory and {written:,.1f} MiB of"
        f" {servers.flag('weight_dir')}; two versions are held while requests finish with the older"
        " one."
    )


def _number(words: Sequence[str], name: str, default: int) -> int:
    """Returns the last value of a flag in a server's command line as a number.

    Raises:
        ValueError: It is no positive number.
    """
    text = _value(words, name, str(default))
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ValueError(f"the server's flag --{name} is {quoted(text)} but must be 1 or more.")
    return int(text)


def _value(words: Sequence[str], name: str, default: str) -> str:
    """Returns the last value of a flag in a server's command line."""
    value = default
    for one in flags_of(words):
        if one.name.replace("_", "-") == f"--{name}" and one.values:
            value = one.values[0]
    return value


def vllm_slot_values(hf: Any) -> int:
    """Returns Σ (in + out) over the matrices for which vLLM reserves slots.

    These are all linear layers, with each expert, also if they get no adapter.
    """
    values = 0
    for _, shape in expected_tensors(hf):
        if len(shape) > 1:  # else a norm or a bias
            *copies, rows, columns = shape
            # Files of some families have one tensor for all experts.
            values += math.prod(copies) * (rows + columns)
    if hf.tie_word_embeddings:
        # The output layer has its own slots, although it has the embedding's weights.
        values += hf.vocab_size + hf.hidden_size
    return values


def sglang_slot_values(hf: Any, targets: Sequence[str]) -> int:
    """Returns Σ (in + out) over the matrices for which SGLang reserves slots."""
    reserved: set[str] = set()
    for group in SGLANG_GROUPS:
        if set(group) & set(targets):
            reserved |= set(group)
    values = 0
    for name, shape in expected_tensors(hf):
        projection = name.removesuffix(".weight").rpartition(".")[2]
        if projection in reserved and len(shape) == 2:
            values += sum(shape)
    return values
