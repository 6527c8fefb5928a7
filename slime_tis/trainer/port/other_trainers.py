"""Options of verl and TRL as flags of slime and train.py, which `port` treats like a script's.

Options of the vLLM engine, of sampling, placement, correction and LoRA adapters are converted.
`Conversion.others` lists all others. verl 0.9.1 and TRL 1.16.0 were read.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from slime_tis.integrations.verl_config import ACTOR_NAMES, LOSS_MODE
from slime_tis.options.flags import CORRECTION, Flag, flags_of
from slime_tis.options.values import SWITCHES
from slime_tis.trainer.cli.slime_flags import Renamed
from slime_tis.trainer.configs.servers import bracketed
from slime_tis.trainer.port.gpus import PLACEMENT
from slime_tis.trainer.port.launch_script import OPEN, LaunchScript, legible
from slime_tis.trainer.port.other_adapters import (
    AdapterConversion,
    convert_trl_adapter,
    convert_verl_adapter,
)
from slime_tis.trainer.port.trl_options import options_of

Options = Mapping[str, str]
"""Values by option: dotted keys of verl, or fields of TRL's GRPOConfig."""

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
ENGINE_KWARGS = f"{ROLLOUT}.engine_kwargs.vllm."
"""Beginning of verl's options that go to vLLM under vLLM's own names."""
UNUSED_ADDRESS = "it has no effect in the mode colocate and beside vllm_server_base_url"
SHARED_GPUS = "GPUs that training and vLLM share"
NO_SHARED_GPUS = "training and vLLM do not share GPUs"
UNSET = ("null", "none", "~", "")
"""Texts, in lower case, of an option without a value."""


@dataclass(frozen=True, kw_only=True)
class OtherTrainer:
    """A trainer whose options of the engine are converted."""

    title: str
    renamed: Mapping[str, Renamed]
    switches: Mapping[str, tuple[str, str]]
    """Flags for a switch that is on, and for one that is off; an empty text if none is needed."""
    same: Mapping[str, tuple[str, ...]]
    """Values, in lower case, that ask for what this program does anyway."""
    dropped: Mapping[str, str]
    """Options without a counterpart, and the reason."""
    defaults: Options
    """Options with another default in train.py, and that default."""


@dataclass
class Conversion:
    """A command of another trainer in flags that `port` reads."""

    flags: dict[str, Flag] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)
    """Overrides of Hydra that train.py reads itself."""
    spellings: dict[str, str] = field(default_factory=dict)
    """The user's words for these flags."""
    changed: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    same: list[str] = field(default_factory=list)
    """Options that ask for what this program does anyway."""
    todo: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    """Options that are not converted, as the user wrote them."""
    unsupported: list[str] = field(default_factory=list)
    """Options of a LoRA adapter that this program cannot train."""

    def add(self, words: str, spelling: str) -> None:
        """Adds flags, in the user's words."""
        for flag in flags_of(words.split(" "))[1:]:
            self.flags[flag.name] = flag
            self.spellings[flag.name] = spelling

    def add_adapter(self, adapter: AdapterConversion) -> None:
        """Adds the converted options of a LoRA adapter."""
        self.flags |= adapter.flags
        self.spellings |= adapter.spellings
        self.changed += adapter.changed
        self.added += adapter.added
        self.same += adapter.same
        self.todo += adapter.todo
        self.unsupported += adapter.unsupported


def _top_k(text: str) -> str:
    """TRL writes 0 for all tokens."""
    if text == "0":
        return "-1"
    return text


VERL = OtherTrainer(
    title="verl",
    renamed={
        "actor_rollout_ref.model.path": Renamed("--hf-checkpoint"),
        "data.train_batch_size": Renamed("--rollout-batch-size"),
        "data.max_prompt_length": Renamed("--rollout-max-prompt-len"),
        "data.max_response_length": Renamed("--rollout-max-response-len"),
        "trainer.total_training_steps": Renamed("--num-rollout"),
        "trainer.nnodes": Renamed("--actor-num-nodes"),
        "trainer.n_gpus_per_node": Renamed("--actor-num-gpus-per-node"),
        f"{ACTOR}.megatron.tensor_model_parallel_size": Renamed("--tensor-model-parallel-size"),
        f"{ACTOR}.megatron.pipeline_model_parallel_size": Renamed("--pipeline-model-parallel-size"),
        f"{ACTOR}.megatron.context_parallel_size": Renamed("--context-parallel-size"),
        f"{ACTOR}.megatron.expert_model_parallel_size": Renamed("--expert-model-parallel-size"),
        f"{ROLLOUT}.n": Renamed("--n-samples-per-prompt"),
        f"{ROLLOUT}.temperature": Renamed("--rollout-temperature"),
        f"{ROLLOUT}.top_p": Renamed("--rollout-top-p"),
        f"{ROLLOUT}.top_k": Renamed("--rollout-top-k"),
        f"{ROLLOUT}.seed": Renamed("--rollout-seed"),
        f"{ROLLOUT}.response_length": Renamed("--rollout-max-response-len"),
        f"{ROLLOUT}.prompt_length": Renamed("--rollout-max-prompt-len"),
        f"{ROLLOUT}.tensor_model_parallel_size": Renamed("--rollout-num-gpus-per-engine"),
        f"{ROLLOUT}.dtype": Renamed("--vllm-dtype"),
        f"{ROLLOUT}.gpu_memory_utilization": Renamed("--vllm-gpu-memory-utilization"),
        f"{ROLLOUT}.max_model_len": Renamed("--vllm-max-model-len"),
        f"{ROLLOUT}.max_num_batched_tokens": Renamed("--vllm-max-num-batched-tokens"),
        f"{ROLLOUT}.max_num_seqs": Renamed("--vllm-max-num-seqs"),
        f"{ROLLOUT}.scheduling_policy": Renamed("--vllm-scheduling-policy"),
        f"{ROLLOUT}.quantization": Renamed("--vllm-quantization"),
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": Renamed("--vllm-bucket-mb"),
    },
    switches={
        f"{ROLLOUT}.enforce_eager": ("--vllm-enforce-eager", ""),
        f"{ROLLOUT}.enable_chunked_prefill": (
            "--vllm-enable-chunked-prefill",
            "--vllm-no-enable-chunked-prefill",
        ),
        f"{ROLLOUT}.enable_prefix_caching": (
            "--vllm-enable-prefix-caching",
            "--vllm-no-enable-prefix-caching",
        ),
        f"{ROLLOUT}.disable_log_stats": ("--vllm-disable-log-stats", ""),
        f"{ROLLOUT}.enable_rollout_routing_replay": ("--use-rollout-routing-replay", ""),
        f"{ROLLOUT}.calculate_log_probs": ("--get-mismatch-metrics", ""),
    },
    same={
        f"{ROLLOUT}.name": ("vllm",),
        f"{ROLLOUT}.mode": ("async", "sync"),
        f"{ROLLOUT}.logprobs_mode": ("processed_logprobs",),
        f"{ROLLOUT}.ignore_eos": ("false",),
        f"{ROLLOUT}.do_sample": ("true",),
        f"{ROLLOUT}.skip_tokenizer_init": ("true",),
        f"{ROLLOUT}.data_parallel_size": ("1",),
        f"{ROLLOUT}.pipeline_model_parallel_size": ("1",),
        f"{ROLLOUT}.expert_parallel_size": ("1",),
    },
    dropped={
        f"{ROLLOUT}.free_cache_engine": NO_SHARED_GPUS,
        f"{ROLLOUT}.multi_stage_wake_up": NO_SHARED_GPUS,
        f"{ROLLOUT}.layered_summon": NO_SHARED_GPUS,
        f"{ROLLOUT}.load_format": "servers load --hf-checkpoint, and get weights before step 1",
        f"{ROLLOUT}.log_prob_micro_batch_size": "this pass has the micro-batches of training",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": (
            "this pass has the micro-batches of training"
        ),
        f"{ROLLOUT}.log_prob_use_dynamic_bsz": "this pass has the micro-batches of training",
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu": "this pass has the micro-batches of training",
        "actor_rollout_ref.hybrid_engine": NO_SHARED_GPUS,
    },
    defaults={
        f"{ROLLOUT}.n": "1",
        f"{ROLLOUT}.tensor_model_parallel_size": "2",
        f"{ROLLOUT}.dtype": "bfloat16",
        "data.train_batch_size": "1024",
        "data.max_response_length": "512",
    },
)

TRL = OtherTrainer(
    title="TRL",
    renamed={
        "model_name_or_path": Renamed("--hf-checkpoint"),
        "num_generations": Renamed("--n-samples-per-prompt"),
        "max_completion_length": Renamed("--rollout-max-response-len"),
        "temperature": Renamed("--rollout-temperature"),
        "top_p": Renamed("--rollout-top-p"),
        "top_k": Renamed("--rollout-top-k", _top_k),
        "num_processes": Renamed("--actor-num-gpus-per-node"),
        "vllm_tensor_parallel_size": Renamed("--rollout-num-gpus-per-engine"),
        "vllm_gpu_memory_utilization": Renamed("--vllm-gpu-memory-utilization"),
        "vllm_max_model_length": Renamed("--vllm-max-model-len"),
        "vllm_model_impl": Renamed("--vllm-model-impl"),
        "vllm_server_base_url": Renamed("--vllm-url"),
        "vllm_server_timeout": Renamed("--vllm-startup-timeout"),
    },
    switches={},
    same={"use_vllm": ("true",), "vllm_mode": ("server", "colocate")},
    dropped={
        "vllm_enable_sleep_mode": NO_SHARED_GPUS,
        "vllm_group_port": "the run takes a free port",
        "vllm_server_host": UNUSED_ADDRESS,
        "vllm_server_port": UNUSED_ADDRESS,
    },
    defaults={"num_generations": "8", "max_completion_length": "512"},
)

OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
"""An override of Hydra, which writes + before a new key."""
CORRECTION_DEFAULTS: Options = {
    "vllm_importance_sampling_correction": "True",
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": "3.0",
    "vllm_importance_sampling_clip_min": "None",
}
"""TRL's options of importance sampling, and their defaults."""


def convert(launch: LaunchScript) -> Conversion | None:
    """Returns the converted options of a command of verl or TRL; None for slime and vime."""
    if launch.program == "verl":
        return convert_verl(launch.words)
    if launch.program == "trl":
        return convert_trl(options_of(launch), launch.notes)
    return None


def convert_verl(words: Sequence[str]) -> Conversion:
    """Returns overrides of a verl command as flags.

    Raises:
        ValueError: The engine is not vLLM.
    """
    conversion = Conversion()
    options: dict[str, str] = {}
    for word in words:
        match = OVERRIDE.fullmatch(word)
        if match is None:
            conversion.others.append(legible(word))
        else:
            # Hydra's grammar allows quotes around a value. A later override replaces an earlier.
            options[match[1]] = match[2].strip("'\"")
    engine = options.get(f"{ROLLOUT}.name", "unset")
    if OPEN in engine:
        options[f"{ROLLOUT}.name"] = "vllm"
        conversion.todo.append(
            f"{ROLLOUT}.name is known when the script runs; port has assumed vllm."
        )
    elif engine != "vllm":
        raise ValueError(
            f"{ROLLOUT}.name is {engine}, but port converts only verl's options of vLLM; see"
            " docs/sglang.md for the flags of SGLang."
        )
    conversion.add_adapter(convert_verl_adapter(options))
    remaining = dict(options)
    for key, value in options.items():
        parent, _, name = key.rpartition(".")
        is_loss = key.removeprefix(f"{ACTOR}.") in (LOSS_MODE, *ACTOR_NAMES)
        if parent == CORRECTION or is_loss:
            _add_override(key, value, conversion)
            del remaining[key]
        elif key.startswith(ENGINE_KWARGS):
            _add_engine_option(name, value, f"{key}={legible(value)}", conversion)
            del remaining[key]
    is_corrected = any(key.startswith(f"{CORRECTION}.") for key in options)
    log_probs = f"{ROLLOUT}.calculate_log_probs"
    if is_corrected and log_probs in remaining:
        # A correction has these metrics anyway; the flag is for runs that only measure.
        conversion.same.append(f"{log_probs}={legible(remaining.pop(log_probs))}")
    _convert_options(VERL, remaining, conversion)
    # main_ppo always shares GPUs.
    conversion.add("--colocate", SHARED_GPUS)
    return conversion


def _add_override(key: str, value: str, conversion: Conversion) -> None:
    """Adds an override that train.py reads itself, unless only the running script has its value."""
    if OPEN in value:
        conversion.todo.append(
            f"{key}={legible(value)}: the value is known when the script runs; add the option with"
            " its value."
        )
    else:
        conversion.overrides.append(f"{key}={value}")


def _add_engine_option(name: str, value: str, spelling: str, conversion: Conversion) -> None:
    """Adds an option of vLLM under vLLM's name; a switch that is off has the prefix no-."""
    flag = f"--vllm-{name.replace('_', '-')}"
    switch = SWITCHES.get(value.lower())
    if value.lower() in UNSET:
        conversion.same.append(spelling)
        return
    if switch is None:
        conversion.flags[flag] = Flag(flag, (value,))
        flag = f"{flag} {legible(value)}"
    else:
        if not switch:
            flag = f"--vllm-no-{name.replace('_', '-')}"
        conversion.flags[flag] = Flag(flag)
    conversion.changed.append(f"{spelling} is {flag}.")


def convert_trl(options: Options, notes: Iterable[str] = ()) -> Conversion:
    """Returns options of TRL's GRPOConfig, of its command line and of accelerate as flags.

    Args:
        options: All options that were read.
        notes: What was not read, for the message of an error.

    Raises:
        ValueError: The run does not sample from vLLM, or a mode is unknown.
    """
    conversion = Conversion()
    remaining = dict(options)
    use_vllm = options.get("use_vllm", "false")
    if OPEN in use_vllm:
        remaining["use_vllm"] = "true"
        conversion.todo.append("use_vllm is known when the script runs; port has assumed true.")
    elif SWITCHES.get(use_vllm.lower()) is not True:
        unread = "".join(f" ({note})" for note in notes)
        raise ValueError(
            f"use_vllm is not on{unread}: port converts TRL's options of vLLM, and this run has"
            " none; see docs/adapters.md to correct it inside TRL."
        )
    clip_max = remaining.pop("vllm_importance_sampling_cap", "None")
    if clip_max.lower() not in UNSET:
        # The older name replaces the newer one, as in TRL.
        remaining["vllm_importance_sampling_clip_max"] = clip_max
    conversion.add_adapter(convert_trl_adapter(remaining))
    _add_correction(remaining, conversion)
    mode = remaining.get("vllm_mode", "colocate")
    if mode == "server":
        _add_server(remaining, conversion)
    elif mode == "colocate":
        conversion.add("--colocate", SHARED_GPUS)
    _convert_options(TRL, remaining, conversion)
    return conversion


def _add_server(options: dict[str, str], conversion: Conversion) -> None:
    """Moves the address of TRL's server from the options to a flag, and adds what it needs."""
    if options.get("vllm_server_base_url", "none").lower() in UNSET:
        host = options.pop("vllm_server_host", "0.0.0.0")
        port = options.pop("vllm_server_port", "8000")
        # 0.0.0.0 is TRL's name for this machine, which no client should use.
        host = host.replace("0.0.0.0", "127.0.0.1")
        url = f"http://{bracketed(host)}:{port}"
        spelling = f"vllm_server_host and vllm_server_port ({legible(url)})"
        conversion.flags["--vllm-url"] = Flag("--vllm-url", (url,))
        conversion.changed.append(f"{spelling} is --vllm-url {legible(url)}.")
    conversion.todo.append(
        "start the server with the flags and variables that docs/vllm.md names: `trl vllm-serve`"
        " has other routes."
    )


def _add_correction(options: dict[str, str], conversion: Conversion) -> None:
    """Moves TRL's importance sampling from the options to the flags.

    TRL multiplies by w = π_old/π_rollout of the token, or of the sequence (the product). Truncation
    is clamp(w, min, max); masking sets w outside of the bounds to 0.
    """
    values = {name: options.get(name, value) for name, value in CORRECTION_DEFAULTS.items()}
    given = []
    for name in CORRECTION_DEFAULTS:
        if name in options:
            given.append(f"{name}={legible(options.pop(name))}")
    if SWITCHES.get(values["vllm_importance_sampling_correction"].lower()) is False:
        conversion.changed.append(f"{', '.join(given)}: nothing is corrected here by default.")
        return
    mode = values["vllm_importance_sampling_mode"]
    level, _, constraint = mode.partition("_")
    if level not in ("token", "sequence") or constraint not in ("truncate", "mask"):
        conversion.todo.append(f"{', '.join(given)}: unknown to port; see docs/choosing.md.")
        return
    upper = values["vllm_importance_sampling_clip_max"]
    if upper.lower() in UNSET:
        upper = "inf"
    lower = values["vllm_importance_sampling_clip_min"]
    words = f"--use-tis --tis-level {level} --tis-mode {constraint} --tis-upper-bound {upper}"
    if lower.lower() not in UNSET:
        words = words.replace("--tis-mode truncate", "--tis-mode clip")
        words += f" --tis-lower-bound {lower}"
    elif constraint == "mask":
        words += " --tis-lower-bound 0"
    conversion.add(words, ", ".join(given) or "TRL's correction")
    if given:
        conversion.changed.append(f"{', '.join(given)} is {legible(words)}.")
    else:
        conversion.added.append(words)


def _convert_options(trainer: OtherTrainer, options: Options, conversion: Conversion) -> None:
    """Converts options by the tables of a trainer, and adds the defaults that differ."""
    for name, value in options.items():
        _convert_option(trainer, name, value, conversion)
    for name, value in trainer.defaults.items():
        flag = trainer.renamed[name].name
        if flag in conversion.flags:
            continue
        conversion.add(f"{flag} {value}", f"{name}={value} by default")
        if flag not in PLACEMENT:
            conversion.added.append(f"{flag} {value}")


def _convert_option(trainer: OtherTrainer, name: str, value: str, conversion: Conversion) -> None:
    """Converts one option by the tables of a trainer."""
    spelling = f"{name}={legible(value)}"
    is_known = name in trainer.renamed or name in trainer.switches
    is_unset = is_known and value.lower() in UNSET
    is_on = SWITCHES.get(value.lower())
    if is_unset or value.lower() in trainer.same.get(name, ()):
        conversion.same.append(spelling)
    elif name in trainer.renamed:
        _add_renamed(trainer.renamed[name], value, spelling, conversion)
    elif name in trainer.switches and is_on is not None:
        on, off = trainer.switches[name]
        words = on if is_on else off
        if words:
            conversion.add(words, spelling)
            conversion.changed.append(f"{spelling} is {words}.")
        else:
            conversion.same.append(spelling)
    elif name in trainer.dropped:
        conversion.changed.append(f"{spelling} is dropped: {trainer.dropped[name]}.")
    else:
        conversion.others.append(spelling)


def _add_renamed(renamed: Renamed, value: str, spelling: str, conversion: Conversion) -> None:
    """Adds a flag that takes the option's value."""
    value = renamed.convert(value)
    conversion.flags[renamed.name] = Flag(renamed.name, (value,))
    conversion.spellings[renamed.name] = spelling
    # The placement has its own note.
    if renamed.name not in PLACEMENT:
        conversion.changed.append(f"{spelling} is {renamed.name} {legible(value)}.")
