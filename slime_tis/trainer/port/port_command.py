"""`slime-tis port run.sh` prints a launch script of another trainer as a command of `train.py`.

Scripts of slime and vime become complete commands. Of verl and TRL, the options of the engine, of
sampling and of the correction are converted, and the others are listed.

The comments list the changed, added and dropped flags with the reasons. Nothing in the script is
executed. A script of an experiment that train.py cannot run is refused. A command that train.py
would refuse is printed as a comment.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_tis.hf_directory import read_model_config
from slime_tis.options.flags import Flag, flags_of
from slime_tis.trainer.cli.slime_flags import (
    FIXED,
    FIXED_EXPERIMENT,
    LAYERS,
    ONE_ADAPTER,
    OTHER_VALUES,
    RENAMED,
    VALUES,
    advice_for,
    disagreement,
    experiment_of,
    is_checked,
)
from slime_tis.trainer.cli.train_options import FLAGS
from slime_tis.trainer.configs.server_engines import SERVER_ENGINES
from slime_tis.trainer.port.adapters import port_adapters
from slime_tis.trainer.port.gpus import GPUS_PER_NODE, PLACEMENT, Placement, count, place
from slime_tis.trainer.port.launch_script import (
    CLOSE,
    OPEN,
    UNSET_VARIABLE,
    LaunchScript,
    legible,
    read_launch,
    text_of,
)
from slime_tis.trainer.port.other_adapters import PLAIN_LORA
from slime_tis.trainer.port.other_trainers import Conversion, convert
from slime_tis.trainer.port.plan_check import OPTION_OF, REQUIRED, UNKNOWN_VALUES, check
from slime_tis.trainer.port.ported_command import (
    ADDED,
    CHANGED,
    MEMORY,
    MISSING,
    NO_OPS,
    REFUSED,
    RESTATES,
    TODO,
    UNSUPPORTED,
    Ported,
)
from slime_tis.trainer.port.published_models import model_from_script, name_problem
from slime_tis.trainer.port.trl_options import read_trl_program

MOST_ROLLOUTS = 10_000_000
"""Upper limit of --num-rollout in train.py."""
MOST_MEMORY = 1e6
"""Upper limit of --gpu-memory, GiB."""
PATHS = ("--hf-checkpoint", "--prompt-data")
"""Paths that train.py requires."""
DROPPED = {
    "--rollout-function-path slime.rollout.sglang_rollout.generate_rollout": (
        "--rollout-engine sglang generates"
    ),
    "--rollout-function-path vime.rollout.vllm_rollout.generate_rollout": (
        "--rollout-engine vllm generates"
    ),
    "--vllm-config": (
        "vime's file describes several kinds of servers; start them yourself, and name them with"
        " --vllm-url"
    ),
    "--ref-load": "it takes a Hugging Face directory, by default --hf-checkpoint",
    "--load": "slime's checkpoints are not read; give weights with --hf-checkpoint",
}
"""Flags, with or without a value, that are dropped, and the reason."""
SLIME_DEFAULTS: Mapping[str, tuple[str, ...]] = {
    "--bf16": (),
    "--micro-batch-size": ("1",),
    "--adam-beta2": ("0.999",),
    "--lr-decay-style": ("linear",),
    "--eval-temperature": ("1.0",),
    "--use-distributed-optimizer": (),
}
"""Options with another default in slime or Megatron-core, and that default."""

ADAPTER_WORD = re.compile(r"[\w.-]*(?<![a-z])(?:lora|peft)(?![a-z])[\w.-]*", re.IGNORECASE)
"""A word with LoRA or PEFT, such as use_peft, but not exploration."""


def port_script(path: str, gpu_memory: float = 80.0) -> Ported:
    """Returns a launch script as a command line of train.py, with comments.

    Args:
        path: The script.
        gpu_memory: Memory of a GPU for the check whether the layout fits, GiB.

    Raises:
        ValueError: The script cannot be read, its experiment cannot be run, or the memory is out of
            range.
    """
    if not 0 < gpu_memory <= MOST_MEMORY:
        raise ValueError(
            f"--gpu-memory is {gpu_memory:g}; it must be above 0 and at most {MOST_MEMORY:g}."
        )
    if path.endswith(".py"):
        launch = read_trl_program(Path(path))
    else:
        launch = read_launch(path)
    conversion = convert(launch)
    ported = Ported(script=Path(path).name, python_path=launch.python_path)
    ported.notes[TODO] += [f"{note}." for note in launch.notes]
    if conversion is not None:
        given = _take_conversion(conversion, ported)
    else:
        given = _replace_values(launch, ported)
        ported.engine = _server_engine(launch, given)
        _replace_adapters(given, ported)
    model = _model_on_this_machine(_value(given, "--hf-checkpoint"))
    for flag in given.values():
        _port_flag(flag, given, model, ported)
    if model is None and "--spec" in given:
        ported.other_experiments.setdefault(LAYERS, []).append(ported.shown(given["--spec"]))
    if ported.other_experiments:
        lines = [f"{str(path)!r} is an experiment that train.py cannot run:"]
        for reason, flags in ported.other_experiments.items():
            lines.append(f"  {', '.join(flags)}: {reason}.")
        raise ValueError("\n".join(lines))
    placement = place(given)
    _assign_gpus(placement, given, ported)
    if conversion is not None:
        _add_required(ported)
    else:
        _add_defaults(placement, ported)
    _note_unread_adapters(launch, ported)
    _check(placement, given, model, gpu_memory, ported)
    return ported


def _note_unread_adapters(launch: LaunchScript, ported: Ported) -> None:
    """Adds a note if the script mentions adapters but the command trains all weights.

    They may be in words that were not read: another branch of an `if`, or an unusual expansion.
    """
    if any(name.startswith("--lora") for name in ported.flags):
        return
    read = " ".join(ported.notes[CHANGED] + ported.notes[RESTATES])
    mentions: list[str] = []
    for path in sorted(launch.files):
        mentions += ADAPTER_WORD.findall(text_of(path))
    unread = [word for word in dict.fromkeys(mentions) if word not in read]
    if unread:
        ported.notes[TODO].append(
            f"the script mentions {', '.join(unread[:3])}, but this command trains all weights. If"
            " the run has adapters, add --lora-rank and --lora-alpha."
        )


def _take_conversion(conversion: Conversion, ported: Ported) -> dict[str, Flag]:
    """Returns the flags for a command of verl or TRL, and adds its notes."""
    ported.engine = "vllm"
    ported.python_path = []  # it is that of the other trainer
    ported.spellings = conversion.spellings
    for override in conversion.overrides:
        ported.flags[override] = ()
    ported.notes[TODO] += conversion.todo
    ported.notes[CHANGED] += conversion.changed
    ported.notes[ADDED] += conversion.added
    ported.notes[RESTATES] += conversion.same
    if conversion.unsupported:
        ported.other_experiments[PLAIN_LORA] = conversion.unsupported
    if conversion.others:
        ported.notes[TODO].append(
            "port converts options of the engine, of sampling, of the correction and of LoRA"
            f" adapters. Write the flags for the others yourself: {', '.join(conversion.others)}."
        )
    return conversion.flags


def _add_required(ported: Ported) -> None:
    """Adds variables for the flags that train.py requires and the options do not give."""
    missing = [name for name in (*PATHS, *REQUIRED) if name not in ported.flags]
    for name in missing:
        ported.flags[name] = (f"{OPEN}${{{_variable(name)}}}{CLOSE}",)
    if missing:
        variables = ", ".join(_variable(name) for name in missing)
        ported.notes[TODO].append(f"set the variables {variables}: train.py requires these flags.")


def _variable(name: str) -> str:
    """The shell variable for a flag's value that is unknown."""
    return name.removeprefix("--").replace("-", "_").upper()


def _server_engine(launch: LaunchScript, given: Mapping[str, Flag]) -> str:
    """Returns vllm for scripts of vime, which is slime with vLLM, and sglang for others."""
    has_vllm_flags = any(name.startswith("--vllm-") for name in given)
    if has_vllm_flags or "vime" in launch.directory.parts:
        return "vllm"
    return "sglang"


def _replace_adapters(given: dict[str, Flag], ported: Ported) -> None:
    """Replaces miles' flags of LoRA adapters in `given`."""
    changes = port_adapters(given)
    ported.notes[CHANGED] += changes.notes
    ported.notes[ADDED] += changes.added
    if changes.unsupported:
        ported.other_experiments[ONE_ADAPTER] = changes.unsupported


def _replace_values(launch: LaunchScript, ported: Ported) -> dict[str, Flag]:
    """Returns the script's flags; flags in `VALUES` are replaced by equivalent ones."""
    # Item 0 has the words before the first flag. The last of repeated flags counts, as in argparse.
    given = {flag.name: flag for flag in flags_of(launch.words)[1:]}
    if launch.program == "train_async.py":
        given.setdefault("--rollout-lookahead", Flag("--rollout-lookahead", ("1",)))
        ported.notes[CHANGED].append("train_async.py becomes --rollout-lookahead 1.")
    for flag in list(given.values()):
        new = VALUES.get(flag.name, {}).get(" ".join(flag.values))
        if new is None:
            continue
        del given[flag.name]
        for replacement in flags_of(new.split())[1:]:
            given.setdefault(replacement.name, replacement)
        ported.notes[CHANGED].append(f"{ported.shown(flag)} becomes {new}.")
    is_baseline = _value(given, "--advantage-estimator") == "reinforce_plus_plus_baseline"
    if is_baseline and "--normalize-advantages" not in given:
        # This program's estimator always divides by a deviation.
        new = "--advantage-estimator grpo --disable-grpo-std-normalization"
        given |= {flag.name: flag for flag in flags_of(new.split())[1:]}
        ported.notes[CHANGED].append(
            f"reinforce_plus_plus_baseline without --normalize-advantages becomes {new}."
        )
    return given


def _value(given: Mapping[str, Flag], name: str) -> str:
    """Returns the values of a flag as one text; an empty text if the flag is missing."""
    if name not in given:
        return ""
    return " ".join(given[name].values)


def _model_on_this_machine(directory: str) -> dict[str, Any] | None:
    """Returns the config.json of a checkpoint; None if there is none that train.py could read."""
    if not directory:
        return None
    try:
        return read_model_config(directory)
    except (ValueError, OSError):
        return None


def _port_flag(
    flag: Flag, given: dict[str, Flag], model: dict[str, Any] | None, ported: Ported
) -> None:
    """Keeps, changes or drops a flag, and adds the comment."""
    name = flag.name
    value = " ".join(flag.values)
    shown = ported.shown(flag)
    experiment = experiment_of(name) or OTHER_VALUES.get(name, {}).get(value)
    # A mark is not printable. Marks of unset variables do not count, because bash expands the
    # variables in the new command.
    is_unknown = not UNSET_VARIABLE.sub("", value).isprintable()
    if name in PLACEMENT:
        return  # _assign_gpus reads them together
    if experiment is not None:
        ported.other_experiments.setdefault(experiment, []).append(shown)
    elif is_checked(name):
        _port_checked(flag, model, ported)
    elif (advice := advice_for(name)) is not None:
        ported.notes[UNSUPPORTED].append(f"{shown}: {ported.for_engine(advice)}.")
    elif is_unknown:
        advice = "add the flag with its value"
        if name in (*PATHS, *UNKNOWN_VALUES):
            variable = _variable(name)
            ported.flags[name] = (f"{OPEN}${{{variable}}}{CLOSE}",)
            advice = f"set {variable} to it"
        ported.notes[TODO].append(f"{shown}: the value is known when the script runs; {advice}.")
    elif name in RENAMED:
        new_name = ported.for_engine(RENAMED[name].name)
        values = tuple(map(RENAMED[name].convert, flag.values))
        ported.flags[new_name] = values
        replacement = " ".join([new_name, *map(legible, values)])
        ported.notes[CHANGED].append(f"{shown} is {replacement}.")
    elif name not in FLAGS and not _is_server_flag(name, ported):
        ported.notes[TODO].append(
            f"{shown} is dropped: neither train.py nor slime is known to have this flag."
        )
    else:
        _keep_or_drop(flag, given, ported)


def _is_server_flag(name: str, ported: Ported) -> bool:
    """Whether the name may be that of a flag of the engine's servers."""
    return name.startswith(ported.server_prefix) and re.fullmatch("[A-Za-z0-9-]+", name) is not None


def _port_checked(flag: Flag, model: dict[str, Any] | None, ported: Ported) -> None:
    """Drops a flag that repeats config.json or a fixed setting, and comments on differences."""
    difference = ""
    if OPEN not in " ".join(flag.values):
        difference = disagreement(flag, model)
    if not difference:
        ported.notes[RESTATES].append(ported.shown(flag))
    elif flag.name in FIXED_EXPERIMENT:
        ported.other_experiments.setdefault(
            f"{difference}, which is another experiment", []
        ).append(ported.shown(flag))
    elif flag.name in FIXED:
        ported.notes[CHANGED].append(f"{difference}.")
    else:
        ported.notes[TODO].append(f"{difference}; check the checkpoint.")


def _keep_or_drop(flag: Flag, given: dict[str, Flag], ported: Ported) -> None:
    """Keeps a flag of train.py, or drops or changes it if its value has another meaning here."""
    name = flag.name
    value = " ".join(flag.values)
    shown = ported.shown(flag)
    reason = DROPPED.get(shown, DROPPED.get(name))
    is_model = name == "--ref-load" and os.path.isfile(os.path.join(value, "config.json"))
    is_resumed = "--save" in given and value.rstrip("/") == _value(given, "--save").rstrip("/")
    if name == "--load" and is_resumed:
        ported.flags["--load"] = given["--save"].values
        ported.notes[CHANGED].append(
            f"{shown} resumes from this program's checkpoints; slime's are not read."
        )
    elif reason and not is_model:
        ported.notes[CHANGED].append(f"{shown} is dropped: {reason}.")
    elif name == "--micro-batch-size" and "--use-dynamic-batch-size" in given:
        ported.notes[NO_OPS].append(f"{shown} has no effect with --use-dynamic-batch-size.")
    elif name == "--num-rollout" and count({name: flag}, name, 1) > MOST_ROLLOUTS:
        ported.flags[name] = (str(MOST_ROLLOUTS),)
        ported.notes[CHANGED].append(
            f"{shown} becomes {name} {MOST_ROLLOUTS}, the most that train.py takes."
        )
    else:
        if OPEN in value:
            ported.notes[TODO].append(
                f"{shown}: the script does not set the variable; set it, or write the value."
            )
        ported.flags[name] = flag.values


def _assign_gpus(placement: Placement, given: dict[str, Flag], ported: Ported) -> None:
    """Sets torchrun's ranks and the servers."""
    launcher = ["torchrun"]
    if placement.nodes > 1:
        launcher += ["--nnodes", str(placement.nodes)]
    ported.launcher = [*launcher, "--nproc-per-node", str(placement.ranks_per_node)]
    engine = ported.engine
    tensor_parallel = f"--{engine}-{SERVER_ENGINES[engine].tensor_parallel}"
    ported.flags["--rollout-engine"] = (engine,)
    stated = [ported.shown(given[name]) for name in PLACEMENT if name in given]
    if not count(given, "--actor-num-gpus-per-node", 0):
        stated.append(f"{GPUS_PER_NODE} GPUs in a node are assumed")
    text = f"{', '.join(stated)}: torchrun starts {placement.ranks} ranks"

    runs_elsewhere = f"--{engine}-url" in ported.flags or f"--{engine}-router-ip" in ported.flags
    if placement.servers and not runs_elsewhere:
        first_gpu = placement.ranks_per_node
        ported.flags[f"--{engine}-launch"] = (str(placement.servers),)
        if placement.tensor_parallel > 1:
            ported.flags[tensor_parallel] = (str(placement.tensor_parallel),)
        ported.flags[f"--{engine}-base-gpu-id"] = (str(first_gpu),)
        text += (
            f", and --{engine}-launch {placement.servers} starts servers with {tensor_parallel}"
            f" {placement.tensor_parallel} from GPU {first_gpu} on"
        )
    else:
        _serve_elsewhere(placement, runs_elsewhere, ported)
    if "--colocate" in given:
        text += f". Training and {SERVER_ENGINES[engine].title} do not share GPUs"
    ported.notes[CHANGED].append(f"{text}.")
    if placement.nodes > 1:
        ported.notes[TODO].append(
            "start torchrun on every node, with --rdzv-endpoint, as examples/clusters does."
        )


def _serve_elsewhere(placement: Placement, is_named: bool, ported: Ported) -> None:
    """Moves flags of servers from the command to a note, for whoever starts the servers."""
    prefix = ported.server_prefix
    if not is_named:
        ported.flags[f"{prefix}url"] = ("http://SERVER:30000",)
    words: list[str] = []
    for name in list(ported.flags):
        # Other flags --ENGINE-NAME are options of train.py.
        if name.startswith(prefix) and name not in FLAGS:
            words += [name.replace(prefix, "--"), *map(legible, ported.flags.pop(name))]
    if words or not is_named:
        tensor_parallel = f"--{SERVER_ENGINES[ported.engine].tensor_parallel}"
        shown = " ".join([tensor_parallel, str(placement.tensor_parallel), *words])
        ported.notes[TODO].append(
            f"start servers on other GPUs, with {shown}; {prefix}url names them. Beside the ranks"
            " they do not fit."
        )


def _add_defaults(placement: Placement, ported: Ported) -> None:
    """Adds options with another default in slime, so that the run is the same."""
    options = [OPTION_OF.get(name) for name in ported.flags]
    for name, values in SLIME_DEFAULTS.items():
        if OPTION_OF[name] in options:
            continue
        if name == "--micro-batch-size" and "--use-dynamic-batch-size" in ported.flags:
            continue
        if name == "--use-distributed-optimizer" and placement.data_parallel == 1:
            continue
        if name == "--eval-temperature":  # slime evaluates at the temperature of the rollouts
            if not ported.flags.keys() & {"--eval-prompt-data", "--eval-config"}:
                continue
            values = ported.flags.get("--rollout-temperature", values)
        ported.flags[name] = values
        ported.notes[ADDED].append(" ".join([name, *map(legible, values)]))


def _check(
    placement: Placement,
    given: dict[str, Flag],
    model: dict[str, Any] | None,
    gpu_memory: float,
    ported: Ported,
) -> None:
    """Drops flags without effect, and adds the messages of train.py and of the plan."""
    directory = legible(_value(given, "--hf-checkpoint"))
    sizes = None
    if model is None and not os.path.isfile(os.path.join(directory, "config.json")):
        sizes = model_from_script(given, directory)
        problem = name_problem(directory)
        if problem is not None:
            ported.notes[REFUSED].append(f"{ported.for_engine(problem)}.")
    verdict = check(ported.flags, placement.ranks, sizes, gpu_memory)
    for flag, message in verdict.no_ops.items():
        option = OPTION_OF.get(flag)
        for spelling in [word for word in ported.flags if OPTION_OF.get(word) is option]:
            del ported.flags[spelling]
        ported.notes[NO_OPS].append(message)
    ported.notes[REFUSED] += verdict.refusals
    ported.notes[MEMORY] += verdict.memory
    ported.notes[MISSING] += verdict.missing
