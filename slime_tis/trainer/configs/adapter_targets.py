"""Checks that the layers of LoRA adapters exist in a family's files and can have adapters."""

from slime_tis.errors import quoted_path
from slime_tis.families import Family
from slime_tis.peft_directory import read_adapter_config
from slime_tis.trainer.configs.megatron import LORA_TARGETS, MegatronConfig

MLP_TARGETS = frozenset(["gate_proj", "up_proj", "down_proj"])
"""Linear layers of the MLP, which is in the experts of a sparse layer."""


def check_adapters(megatron: MegatronConfig, family: Family) -> None:
    """Checks the layers of new adapters, or of those in --lora-adapter-path.

    Raises:
        ValueError: A layer cannot have an adapter, or the directory has no plain LoRA adapter.
    """
    if not megatron.trains_adapters:
        return
    path = megatron.lora_adapter_path
    if path is None:
        subject = "--lora-target-modules"
        request = "--lora-rank is given"
        advice = "Use --lora-target-modules"
        targets = megatron.lora_targets
    else:
        subject = f"--lora-adapter-path is {quoted_path(path)}"
        request = subject
        advice = "Give an adapter of only"
        targets = _saved_targets(path, subject)
    if family.attention.has_delta_nets:
        raise ValueError(
            f"{request} but most layers of {family.title} have a gated delta net, whose projections"
            " get no adapters; only all weights of this model can be trained."
        )
    supported = _supported_targets(family)
    refused = [name for name in targets if name not in supported]
    if not refused:
        return
    names = ", ".join(refused)
    advice = f"{advice} {' '.join(supported)}."
    if family.attention.latent and not MLP_TARGETS.issuperset(refused):
        raise ValueError(
            f"{subject}: {family.title} supports no adapters of {names}; of its latent attention,"
            f" only o_proj can have one. {advice}"
        )
    if family.experts is not None:
        raise ValueError(
            f"{subject}: {names} of this model are in experts, which get no adapters: an adapter of"
            " each expert would need its own part in the grouped products of training and of the"
            f" servers. {advice}"
        )
    raise ValueError(
        f"{subject}: a {family.title} checkpoint has no {names}, but fuses them; an adapter of a"
        f" fused matrix is another one. {advice}"
    )


def _saved_targets(path: str, subject: str) -> tuple[str, ...]:
    """Returns the adapted layers of a directory.

    Raises:
        ValueError: It has no plain LoRA adapter, or one of other layers.
    """
    targets = read_adapter_config(path, subject).targets
    others = sorted(set(targets) - set(LORA_TARGETS))
    if others:
        raise ValueError(
            f"{subject} but it adapts {', '.join(others)}; only {', '.join(LORA_TARGETS)} can"
            " have adapters."
        )
    return targets


def _supported_targets(family: Family) -> list[str]:
    """Returns the linear layers in a family's files that can have adapters."""
    names = set()
    for weight in family.weights.values():
        for tensor in weight.tensors:
            names.add(tensor.name.removesuffix(".weight").rpartition(".")[2])
    if family.experts is not None:
        names -= MLP_TARGETS
    if family.attention.latent:
        # Models without q_lora_rank have it, but the training engine adapts it only together with
        # keys and values, in its fused layer.
        names.discard("q_proj")
    return [name for name in LORA_TARGETS if name in names]
