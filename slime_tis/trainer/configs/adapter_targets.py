"""Checks that the layers of LoRA adapters exist in a family's files and can have adapters."""

from collections.abc import Collection

from slime_tis.errors import quoted_path
from slime_tis.families import Family
from slime_tis.peft_directory import read_adapter_config
from slime_tis.trainer.configs.megatron import LORA_TARGETS, MegatronConfig


def check_adapters(megatron: MegatronConfig, family: Family) -> None:
    """Refuses a directory without an adapter that can be trained, and layers without adapters."""
    if not megatron.trains_adapters:
        return
    targets: Collection[str] = megatron.lora_targets
    subject = "--lora-target-modules"
    path = megatron.lora_adapter_path
    if path is not None:
        subject = f"--lora-adapter-path is {quoted_path(path)}"
        targets = read_adapter_config(path, subject).targets
        others = sorted(set(targets) - set(LORA_TARGETS))
        if others:
            raise ValueError(
                f"{subject} but it adapts {', '.join(others)}; only {', '.join(LORA_TARGETS)} can"
                " have adapters."
            )
    if family.attention.has_delta_nets:
        flag = "--lora-rank" if path is None else "--lora-adapter-path"
        raise ValueError(
            f"{flag} is given but most layers of {family.title} have a gated delta net, whose"
            " projections get no adapters; remove it, which trains all weights."
        )
    fused = sorted(set(targets) - _projections(family))
    if fused:
        raise ValueError(
            f"{subject}: a {family.title} checkpoint has no {', '.join(fused)}, but fuses them; an"
            " adapter of a fused matrix is another one. Use --lora-target-modules"
            f" {' '.join(sorted(_projections(family)))}."
        )
    experts = [name for name in targets if name in ("gate_proj", "up_proj", "down_proj")]
    if family.experts is not None and experts:
        raise ValueError(
            f"{subject}: {', '.join(experts)} of this model are in experts, which get no adapters:"
            " an adapter of each expert would need its own part in the grouped products of"
            " training and of the servers. Use --lora-target-modules q_proj k_proj v_proj o_proj."
        )


def _projections(family: Family) -> set[str]:
    """Returns the linear layers in a family's files that can have adapters."""
    names = set()
    for weight in family.weights.values():
        for tensor in weight.tensors:
            names.add(tensor.name.removesuffix(".weight").rpartition(".")[2])
    return names & set(LORA_TARGETS)
