"""Converts options of LoRA adapters of verl, TRL and PEFT's LoraConfig to flags of train.py.

An adapter that is read never becomes a run that trains all weights: what cannot be converted is
refused.
verl 0.9.1, TRL 1.16.0 and PEFT were read.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from slime_tis.options.flags import Flag
from slime_tis.options.values import SWITCHES
from slime_tis.trainer.configs.megatron import ALL_LINEAR, LORA_TARGETS
from slime_tis.trainer.port.adapters import FUSED
from slime_tis.trainer.port.launch_script import CLOSE, OPEN, legible

UNSET = ("null", "none", "~", "", "[]", "{}")
"""Texts, in lower case, of an option without a value."""
OFF = ("false", "0", *UNSET)
"""Texts, in lower case, of a switch that is off."""
CANONICAL = {
    "linear_q": ("q_proj",),
    "linear_k": ("k_proj",),
    "linear_v": ("v_proj",),
    "linear_fc1_gate": ("gate_proj",),
    "linear_fc1_up": ("up_proj",),
}
"""Hugging Face names of the layers of verl's canonical_lora."""
PEFT_TARGETS = ("q_proj", "v_proj")
"""The layers that PEFT adapts by default in Llama, Qwen, Mistral and Gemma models."""
PLAIN_LORA = f"only plain LoRA adapters of {', '.join(LORA_TARGETS)} are trained here"
SHARED_A = (
    "its type lora has one matrix A for query, key and value, and one for gate and up projection;"
    " here each has its own, as in PEFT"
)


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """The options of one trainer, each with its name after the prefix."""

    prefix: str = ""
    rank: str
    alpha: str
    targets: str
    dropout: str = ""
    excluded: str = ""
    path: str = ""
    rslora: str = ""
    defaults: Mapping[str, str]
    """Values of the options above that are not given."""
    neutral: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Values, in lower case, of options with plain LoRA; all other values are refused."""
    dropped: Mapping[str, str] = field(default_factory=dict)
    """Options without a counterpart, and the reason."""
    refuses_others: bool = False
    """Whether all options with the prefix belong to the adapter, so that unknown ones are
    refused."""

    @property
    def names(self) -> list[str]:
        """All known names, with the prefix."""
        own = (
            self.rank,
            self.alpha,
            self.targets,
            self.dropout,
            self.excluded,
            self.path,
            self.rslora,
        )
        given = [name for name in own if name]
        return [self.prefix + name for name in (*given, *self.neutral, *self.dropped)]


VERL_FSDP = AdapterOptions(
    prefix="actor_rollout_ref.model.",
    rank="lora_rank",
    alpha="lora_alpha",
    targets="target_modules",
    excluded="exclude_modules",
    path="lora_adapter_path",
    defaults={"lora_rank": "0", "lora_alpha": "16", "target_modules": ALL_LINEAR},
    neutral={"target_parameters": UNSET},
)
VERL_MEGATRON = AdapterOptions(
    prefix="actor_rollout_ref.model.lora.",
    rank="rank",
    alpha="alpha",
    targets="target_modules",
    dropout="dropout",
    excluded="exclude_modules",
    path="adapter_path",
    defaults={"rank": "0", "alpha": "32", "target_modules": ALL_LINEAR, "dropout": "0.0"},
    neutral={"type": ("lora", "canonical_lora"), "dropout_position": ("pre",)},
    dropped={
        "merge": "the rollout engine gets merged weights",
        "dtype": "adapters have the type of the weights",
        "lora_A_init_method": "A starts as in PEFT",
        "lora_B_init_method": "B starts with 0",
        "a2a_experimental": "communication is Megatron-core's",
    },
    refuses_others=True,
)
VERL_BLOCKS = ("actor_rollout_ref", "actor_rollout_ref.model", "actor_rollout_ref.model.lora")
"""Options of verl whose value may be a block with options of an adapter."""
TRL_FLAGS = AdapterOptions(
    rank="lora_r",
    alpha="lora_alpha",
    targets="lora_target_modules",
    dropout="lora_dropout",
    rslora="use_rslora",
    defaults={"lora_r": "16", "lora_alpha": "32", "lora_dropout": "0.05"},
    neutral={
        "lora_target_parameters": UNSET,
        "lora_modules_to_save": UNSET,
        "lora_task_type": ("causal_lm",),
        "use_dora": OFF,
        "load_in_8bit": OFF,
        "load_in_4bit": OFF,
    },
)
PEFT_CLASS = "LoraConfig"
"""PEFT's class of options, and the prefix of its options here."""
PEFT_CONFIG = AdapterOptions(
    prefix=f"{PEFT_CLASS}.",
    rank="r",
    alpha="lora_alpha",
    targets="target_modules",
    dropout="lora_dropout",
    excluded="exclude_modules",
    rslora="use_rslora",
    defaults={"r": "8", "lora_alpha": "8", "lora_dropout": "0.0"},
    neutral={
        "bias": ("none",),
        "task_type": ("causal_lm", "tasktype.causal_lm", *UNSET),
        "inference_mode": OFF,
        "fan_in_fan_out": OFF,
        "use_dora": OFF,
        "modules_to_save": UNSET,
        "init_lora_weights": ("true",),
    },
    refuses_others=True,
)
ADAPTER_FILE = "PeftModel.from_pretrained"
"""Option for the directory of an adapter that a program loads."""
ADAPTER_PROGRAM = "program with an adapter"
"""Option for the name of a program that may make an adapter."""
QUANTIZED = ("load_in_8bit", "load_in_4bit")
"""Options of TRL, and arguments of transformers' BitsAndBytesConfig and of Unsloth."""


@dataclass
class AdapterConversion:
    """Options of adapters as flags of train.py."""

    flags: dict[str, Flag] = field(default_factory=dict)
    spellings: dict[str, str] = field(default_factory=dict)
    """The user's words for these flags."""
    changed: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    same: list[str] = field(default_factory=list)
    todo: list[str] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)
    """Options of adapters that this program cannot train."""

    def add(self, name: str, values: tuple[str, ...], spelling: str) -> None:
        """Adds a flag; without a spelling it is a default of the other trainer."""
        self.flags[name] = Flag(name, values)
        words = legible(" ".join([name, *values]))
        if spelling:
            self.spellings[name] = spelling
            self.changed.append(f"{spelling} is {words}.")
        else:
            self.added.append(words)


def convert_verl_adapter(options: dict[str, str]) -> AdapterConversion:
    """Returns verl's options of adapters, and removes them from `options`."""
    conversion = AdapterConversion()
    trained = []
    for block in VERL_BLOCKS:
        # A value such as {lora_rank: 8} is not read.
        if "lora" in options.get(block, "").lower():
            conversion.unsupported.append(f"{block}={legible(options.pop(block))}")
    for names in (VERL_FSDP, VERL_MEGATRON):
        values = _taken(names, options)
        if not _has_rank(names, values):
            conversion.same += _spellings(names, values)
            continue
        trained.append(names.rank)
        _convert(names, values, conversion)
        if values.get("type", "lora") == "lora" and names is VERL_MEGATRON:
            conversion.changed.append(f"{names.prefix}{names.rank}: {SHARED_A}.")
    if len(trained) == 2:
        conversion.unsupported.append(" and ".join(trained))
    return conversion


def convert_trl_adapter(options: dict[str, str]) -> AdapterConversion:
    """Returns TRL's options of adapters, and removes them from `options`."""
    conversion = AdapterConversion()
    flags = _taken(TRL_FLAGS, options)
    config = _taken(PEFT_CONFIG, options)
    has_config = PEFT_CLASS in options
    unread_config = options.pop(PEFT_CLASS, "")
    loaded = options.pop(ADAPTER_FILE, "")
    use_peft = options.pop("use_peft", "false")
    peft_config = options.pop("peft_config", "None")
    program = options.pop(ADAPTER_PROGRAM, "")
    if has_config and loaded:
        _require(f"{PEFT_CLASS} beside {ADAPTER_FILE}", conversion)
    elif OPEN in unread_config:
        _require(legible(unread_config), conversion)
    elif loaded:
        conversion.add("--lora-adapter-path", (loaded,), f"{ADAPTER_FILE}({legible(loaded)})")
    elif has_config:
        _convert(PEFT_CONFIG, config, conversion)
    elif OPEN in use_peft or SWITCHES.get(use_peft.lower()) is True:
        if OPEN in use_peft:
            conversion.todo.append("use_peft is known when the script runs; port has assumed true.")
        _convert(TRL_FLAGS, flags, conversion)
    elif peft_config.lower() not in UNSET:
        _require(f"peft_config={legible(peft_config)}", conversion)
    elif program:
        _require(f"the adapter of {program}", conversion)
    else:
        conversion.same += _spellings(TRL_FLAGS, flags)
        return conversion
    _refuse_quantized(flags, conversion)
    return conversion


def _require(source: str, conversion: AdapterConversion) -> None:
    """Adds flags without values for an adapter that was not read, so that none is forgotten."""
    conversion.flags["--lora-rank"] = Flag("--lora-rank", (f"{OPEN}${{LORA_RANK}}{CLOSE}",))
    conversion.flags["--lora-alpha"] = Flag("--lora-alpha", (f"{OPEN}${{LORA_ALPHA}}{CLOSE}",))
    conversion.todo.append(
        f"{source} is not read: set LORA_RANK and LORA_ALPHA to its values, and add its"
        " --lora-target-modules and --lora-dropout. Remove the two flags if the run trains all"
        " weights."
    )


def _refuse_quantized(flags: Mapping[str, str], conversion: AdapterConversion) -> None:
    """Refuses adapters of a quantized model, also if the adapter is not that of TRL's flags."""
    for name in QUANTIZED:
        value = flags.get(name, "false")
        spelling = f"{name}={legible(value)}"
        # With use_peft, the list has it already.
        if value.lower() not in OFF and spelling not in conversion.unsupported:
            conversion.unsupported.append(spelling)


def _spellings(names: AdapterOptions, values: Mapping[str, str]) -> list[str]:
    """Returns options as the user wrote them."""
    return [f"{names.prefix}{name}={legible(value)}" for name, value in values.items()]


def _taken(names: AdapterOptions, options: dict[str, str]) -> dict[str, str]:
    """Moves options out of `options`; returns their values by the names after the prefix."""
    taken = {}
    for key in list(options):
        is_other = names.refuses_others and key.startswith(names.prefix)
        if key in names.names or is_other:
            taken[key.removeprefix(names.prefix)] = options.pop(key)
    return taken


def _has_rank(names: AdapterOptions, values: Mapping[str, str]) -> bool:
    """Whether the rank is above 0, or only the running script knows it."""
    rank = values.get(names.rank, names.defaults[names.rank])
    return rank.lower() not in OFF


def _convert(names: AdapterOptions, values: dict[str, str], conversion: AdapterConversion) -> None:
    """Adds the flags of an adapter."""
    path = values.get(names.path, "")
    if names.path and path.lower() not in UNSET:
        spelling = f"{names.prefix}{names.path}={legible(path)}"
        conversion.add("--lora-adapter-path", (path,), spelling)
        conversion.changed.append(
            "the adapter's rank, alpha and layers are those of its directory."
        )
    else:
        _add(names, values, conversion, "--lora-rank", names.rank)
        _add_alpha(names, values, conversion)
        _add_targets(names, values, conversion)
    if names.dropout:
        _add(names, values, conversion, "--lora-dropout", names.dropout)
    for name, value in values.items():
        spelling = f"{names.prefix}{name}={legible(value)}"
        if name in names.dropped:
            conversion.changed.append(f"{spelling} is dropped: {names.dropped[name]}.")
        elif name in names.neutral:
            if legible(value).lower() not in names.neutral[name]:
                conversion.unsupported.append(spelling)
        elif names.prefix + name not in names.names:
            conversion.unsupported.append(spelling)


def _add(
    names: AdapterOptions,
    values: Mapping[str, str],
    conversion: AdapterConversion,
    flag: str,
    name: str,
) -> None:
    """Adds a flag with the value of an option, or with its default."""
    spelling = ""
    if name in values:
        spelling = f"{names.prefix}{name}={legible(values[name])}"
    conversion.add(flag, (values.get(name, names.defaults[name]),), spelling)


def _add_alpha(
    names: AdapterOptions, values: dict[str, str], conversion: AdapterConversion
) -> None:
    """Adds --lora-alpha, multiplied by √rank for rank-stabilized LoRA.

    Its scale is α/√rank instead of α/rank.
    """
    rslora = values.get(names.rslora, "false")
    if not names.rslora or rslora.lower() in OFF:
        _add(names, values, conversion, "--lora-alpha", names.alpha)
        return
    rank = values.get(names.rank, names.defaults[names.rank])
    alpha = values.get(names.alpha, names.defaults[names.alpha])
    try:
        product = float(alpha) * math.sqrt(float(rank))
    except ValueError:
        conversion.unsupported.append(f"{names.prefix}{names.rslora} with a rank that is unknown")
        return
    spelling = f"{names.prefix}{names.rslora} with the alpha {alpha}"
    conversion.add("--lora-alpha", (f"{product:.17g}",), spelling)


def _add_targets(
    names: AdapterOptions, values: dict[str, str], conversion: AdapterConversion
) -> None:
    """Adds --lora-target-modules."""
    default = names.defaults.get(names.targets, "")
    text = values.get(names.targets, default)
    if text.lower() in UNSET:
        conversion.add("--lora-target-modules", PEFT_TARGETS, "")
        conversion.todo.append(
            f"{names.prefix}{names.targets} is unset: PEFT's default is q_proj and v_proj in most"
            " families; check it for this model."
        )
        return
    spelling = f"{names.prefix}{names.targets}={legible(text)}"
    if OPEN in text:
        conversion.add("--lora-target-modules", (text,), spelling)
        return
    targets = _layers(text)
    unknown = [name for name in targets if name not in LORA_TARGETS]
    excluded = values.get(names.excluded, "")
    if names.excluded and excluded.lower() not in UNSET:
        without = _layers(excluded)
        spelling += f" without {legible(excluded)}"
        # Other layers than the targets, such as lm_head, have no adapter anyway.
        unknown += [name for name in without if not name.isidentifier()]
        targets = [name for name in targets if name not in without]
    if unknown or not targets:
        conversion.unsupported.append(spelling)
        return
    words = tuple(targets)
    if set(targets) == set(LORA_TARGETS):
        words = (ALL_LINEAR,)
    if names.targets not in values and len(words) == 1:
        spelling = ""
    conversion.add("--lora-target-modules", words, spelling)


def _layers(text: str) -> list[str]:
    """Returns Hugging Face's names of the layers in a list of YAML, Hydra or Python."""
    names: list[str] = []
    for character in "[](){}'\",":
        text = text.replace(character, " ")
    for word in text.split():
        if word == ALL_LINEAR:
            names += LORA_TARGETS
        else:
            names += (FUSED | CANONICAL).get(word, (word,))
    return list(dict.fromkeys(names))
