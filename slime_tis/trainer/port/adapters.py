"""Converts miles' flags of LoRA adapters, before the other flags of a script are read."""

from dataclasses import dataclass, field

from slime_tis.options.flags import Flag
from slime_tis.trainer.configs.megatron import ALL_LINEAR, LORA_TARGETS

MILES_ALPHA = "16"
"""Default of --lora-alpha in miles."""
FUSED = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Hugging Face names of megatron-core's linear layers, which miles also takes."""
FLAGS_OF_ADAPTERS = (
    "--lora-rank",
    "--lora-alpha",
    "--lora-dropout",
    "--lora-type",
    "--target-modules",
    "--exclude-modules",
    "--lora-adapter-path",
    "--lora-sync-from-tensor",
    "--lora-base-cpu-backup",
)


@dataclass
class AdapterChanges:
    """What was changed in the flags."""

    notes: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)
    """Flags of adapters that this program cannot train."""


def port_adapters(given: dict[str, Flag]) -> AdapterChanges:
    """Replaces miles' flags of adapters in `given` by those of train.py, in place."""
    changes = AdapterChanges()
    rank = _text(given, "--lora-rank")
    has_adapter = rank not in ("", "0") or "--lora-adapter-path" in given
    if not has_adapter:
        dropped = [name for name in FLAGS_OF_ADAPTERS if given.pop(name, None) is not None]
        if dropped:
            changes.notes.append(
                f"{', '.join(dropped)}: dropped, because --lora-rank 0 trains all weights."
            )
        return changes
    _port_targets(given, changes)
    _port_servers(given, changes)
    if _text(given, "--lora-type") in ("", "lora"):
        given.pop("--lora-type", None)
        changes.notes.append(
            "miles' --lora-type lora has one matrix A for query, key and value, and one for gate"
            " and up projection; here each has its own, as with canonical_lora and in PEFT."
        )
    if "--lora-adapter-path" in given:
        for name in ("--lora-rank", "--lora-alpha", "--lora-target-modules"):
            if given.pop(name, None) is not None:
                changes.notes.append(f"{name} is dropped: the adapter of the directory has it.")
    elif "--lora-alpha" not in given:
        given["--lora-alpha"] = Flag("--lora-alpha", (MILES_ALPHA,))
        changes.added.append(f"--lora-alpha {MILES_ALPHA}")
    return changes


def _port_targets(given: dict[str, Flag], changes: AdapterChanges) -> None:
    """Replaces --target-modules and --exclude-modules by --lora-target-modules."""
    included = given.pop("--target-modules", None)
    excluded = given.pop("--exclude-modules", None)
    if included is None:
        return
    targets = _names(included)
    without = [] if excluded is None else _names(excluded)
    targets = [name for name in targets if name not in without]
    unknown = [name for name in targets if name not in LORA_TARGETS]
    if unknown:
        changes.unsupported.append(f"--target-modules {','.join(unknown)}")
        return
    words = tuple(targets)
    if set(targets) == set(LORA_TARGETS):
        words = (ALL_LINEAR,)
    given["--lora-target-modules"] = Flag("--lora-target-modules", words)
    shown = " ".join(["--target-modules", *included.values])
    if excluded is not None:
        shown += " ".join([" and --exclude-modules", *excluded.values])
    changes.notes.append(f"{shown}: written as --lora-target-modules {' '.join(words)}.")


def _port_servers(given: dict[str, Flag], changes: AdapterChanges) -> None:
    """Drops flags with which the servers would load adapters themselves."""
    names = ["--lora-sync-from-tensor", "--lora-base-cpu-backup"]
    for name in list(given):
        if name in names or (name.startswith("--sglang-") and "lora" in name):
            del given[name]
            changes.notes.append(
                f"{name} is dropped: the servers get weights with the merged adapter."
            )


def _names(flag: Flag) -> list[str]:
    """Returns Hugging Face's names of the layers in a flag, which commas may separate."""
    names: list[str] = []
    for word in ",".join(flag.values).split(","):
        word = word.strip()
        if word == ALL_LINEAR:
            names += LORA_TARGETS
        elif word:
            names += FUSED.get(word, (word,))
    return list(dict.fromkeys(names))


def _text(given: dict[str, Flag], name: str) -> str:
    """Returns the values of a flag as one text; an empty text if the flag is missing."""
    if name not in given:
        return ""
    return " ".join(given[name].values)
