"""`slime-tis port run.sh` prints a slime launch script as a command line of `train.py`, with comments.

The comments list what was changed, renamed, added and dropped, and why. Nothing of the script is executed.
"""

import math
import os
import re
import shlex
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_tis.hf_directory import read_model_config
from slime_tis.trainer.cli.arguments import configure
from slime_tis.trainer.cli.launch_script import OPEN, UNSET_VARIABLE, LaunchScript, legible, read_launch
from slime_tis.trainer.cli.run_options import COMMAND_LINE, FLAGS
from slime_tis.trainer.cli.slime_flags import RENAMED, advice_for, disagreement, is_checked
from slime_tis.trainer.options.words import Flag, flags_of

PLACEMENT = (
    *("--actor-num-nodes", "--actor-num-gpus-per-node", "--num-gpus-per-node", "--colocate", "--rollout-num-gpus"),
    *("--rollout-num-gpus-per-engine", "--offload", "--offload-train", "--offload-rollout"),
)
"""Flags that assign GPUs; torchrun and --sglang-launch replace them."""
COMMENT_WIDTH = 110
DEFAULT_GPUS_PER_NODE, MAX_GPUS = 8, 1024

REPLACED = {
    "train_async.py": "--rollout-lookahead 1",
    "--advantage-estimator gspo": "--advantage-estimator grpo --policy-loss gspo",
    "--advantage-estimator cispo": "--advantage-estimator grpo --policy-loss cispo",
    "--advantage-estimator reinforce_plus_plus": "--advantage-estimator reinforce_plus_plus_baseline",
    "--custom-tis-function-path examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp": (
        "--custom-tis-function-path custom_tis.mis.compute_mis_weights_with_cp"
    ),
    "--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async": "--rollout-lookahead 1",
    "--rollout-function-path fully_async_rollout.generate_rollout_fully_async": "--rollout-lookahead 1",
    "--eval-top-k 1": "--eval-temperature 0",
}
"""The program, and flags whose value means something else here; and the flags that replace them."""
DROPPED = {
    "--rollout-function-path slime.rollout.sglang_rollout.generate_rollout": "--rollout-engine sglang generates",
    "--rollout-function-path slime.rollout.sft_rollout.generate_rollout": "use slime for supervised fine-tuning",
    "--ref-load": "it takes a Hugging Face directory, by default --hf-checkpoint",
    "--load": "slime's checkpoints are not read; give weights with --hf-checkpoint",
}
"""Flags, with or without a value, that are dropped, and the reason."""
SLIME_DEFAULTS = {
    "--bf16": (),
    "--micro-batch-size": ("1",),
    "--adam-beta2": ("0.999",),
    "--lr-decay-style": ("linear",),
    "--eval-temperature": ("1.0",),
}
"""Options with another default in slime or Megatron-core, and that default."""
OPTION_OF = {flag: option for flag, (option, _) in COMMAND_LINE.spellings.items()}
SERVER_FLAG = re.compile("--sglang-[A-Za-z0-9-]+")
NO_EFFECT = re.compile(r"(?s)(--[a-z0-9-]+) is (?:.* but has no effect|on but --tensor-model-parallel-size is 1)")
"""Refusals of flags that change nothing, which port drops."""

TODO, CHANGED, ADDED, NO_OPS, RESTATES, UNSUPPORTED, REFUSED = TITLES = (
    "to do by hand",
    "changed",
    "added because slime has another default",
    "dropped because they have no effect",
    "dropped because config.json or this program has the value",
    "not supported",
    "on this machine train.py says",
)


@dataclass
class Ported:
    """A command line under construction."""

    flags: dict[str, tuple[str, ...]] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=lambda: {title: [] for title in TITLES})
    """Comments by title."""
    launcher: tuple[str, ...] = ()
    ranks: int = 1


def port_script(path: str) -> str:
    """Returns a slime launch script as a command line of train.py, with comments."""
    launch = read_launch(path)
    ported = _port(launch)
    ported.notes[REFUSED] = _drop_no_ops(ported).splitlines()
    lines = [f"# {Path(path).name!r} for train.py; nothing of it was executed."]
    python_path = [f"PYTHONPATH={_quoted(':'.join(launch.python_path))}"] if launch.python_path else []
    command = [" ".join([*python_path, *ported.launcher, "train.py"])]
    command += [" ".join([name, *map(_quoted, values)]) for name, values in ported.flags.items()]
    lines.append(" \\\n   ".join(command))
    for title, notes in ported.notes.items():
        lines += ["#", f"# {title}:"] if notes else []
        for note in [", ".join(notes)] if title == RESTATES and notes else notes:
            lines += _comment(note)
    return "\n".join(lines) + "\n"


def _port(launch: LaunchScript) -> Ported:
    """The training command of a slime script in this program's flags."""
    ported = Ported()
    ported.notes[TODO] += [f"{note}." for note in launch.notes]
    given = {flag.name: flag for flag in (Flag(launch.program), *flags_of(launch.words)[1:])}
    for shown, flag in {_shown(flag): flag for flag in given.values()}.items():
        if shown in REPLACED:
            del given[flag.name]
            given |= {new.name: new for new in flags_of(REPLACED[shown].split())[1:]}
            ported.notes[CHANGED].append(f"{shown} becomes {REPLACED[shown]}.")
    given.pop("train.py", None)
    try:
        model = read_model_config(" ".join(given["--hf-checkpoint"].values))
    except (KeyError, ValueError, OSError):  # on another machine
        model = None
    for flag in given.values():
        _port_flag(flag, given, model, ported)
    _assign_gpus(given, ported)
    options = [OPTION_OF.get(name) for name in ported.flags]
    for name, values in SLIME_DEFAULTS.items():
        is_unused = name == "--micro-batch-size" and "--use-dynamic-batch-size" in ported.flags
        if name == "--eval-temperature":  # slime evaluates at the temperature of the rollouts
            is_unused = "--eval-prompt-data" not in ported.flags
            values = ported.flags.get("--rollout-temperature", values)
        if OPTION_OF[name] not in options and not is_unused:
            ported.flags[name] = values
            ported.notes[ADDED].append(" ".join([name, *map(legible, values)]))
    return ported


def _drop_no_ops(ported: Ported) -> str:
    """Drops flags that train.py refuses because they have no effect; returns the message of another refusal."""
    while True:
        try:
            rank = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
            argv = [word for name, values in ported.flags.items() for word in (name, *map(legible, values))]
            configure(argv, {**rank, "WORLD_SIZE": str(ported.ranks)})
            return ""
        except (ValueError, OSError) as error:
            match = NO_EFFECT.match(str(error))
            option = OPTION_OF.get(match[1]) if match else None
            dropped = [name for name in ported.flags if option and OPTION_OF.get(name) is option]
            if not dropped:
                return str(error)
            for name in dropped:
                del ported.flags[name]
            ported.notes[NO_OPS].append(str(error))


def _port_flag(flag: Flag, given: dict[str, Flag], model: dict[str, Any] | None, ported: Ported) -> None:
    """Keeps, changes or drops a flag, and adds the comment."""
    name, values, value, shown = flag.name, flag.values, " ".join(flag.values), _shown(flag)
    advice, reason = advice_for(name), DROPPED.get(shown, DROPPED.get(name))
    if name in PLACEMENT:
        return  # _assign_gpus reads them together
    if is_checked(name):
        difference = "" if OPEN in value else disagreement(flag, model)
        ported.notes[TODO if difference else RESTATES].append(difference or shown)
    elif advice is not None:
        ported.notes[UNSUPPORTED].append(f"{shown}: {advice}.")
    elif not UNSET_VARIABLE.sub("", value).isprintable():
        ported.notes[TODO].append(f"{shown}: the value is known when the script runs; add the flag with its value.")
    elif name in RENAMED:
        new = RENAMED[name]
        ported.flags[new.name] = tuple(map(new.convert, values))
        ported.notes[CHANGED].append(f"{shown} is {' '.join([new.name, *map(legible, ported.flags[new.name])])}.")
    elif name not in FLAGS and not SERVER_FLAG.fullmatch(name):
        ported.notes[UNSUPPORTED].append(f"{shown}: neither train.py nor slime is known to have this flag.")
    elif name == "--load" and "--save" in given and value.rstrip("/") == " ".join(given["--save"].values).rstrip("/"):
        ported.flags["--load"] = given["--save"].values
        ported.notes[CHANGED].append(f"{shown} resumes from this program's checkpoints; slime's are not read.")
    elif reason and not (name == "--ref-load" and os.path.isfile(os.path.join(value, "config.json"))):
        ported.notes[CHANGED].append(f"{shown} is dropped: {reason}.")
    else:
        if OPEN in value:
            ported.notes[TODO].append(f"{shown}: the script does not set the variable; set it, or write the value.")
        ported.flags[name] = values


def _assign_gpus(given: dict[str, Flag], ported: Ported) -> None:
    """Sets torchrun's ranks and the servers: complete replicas of the model, whose number divides a step's samples."""

    def count(name: str, default: int) -> int:
        values = given[name].values if name in given else ()
        return int(values[0]) if len(values) == 1 and re.fullmatch(r"[1-9][0-9]{0,8}", values[0]) else default

    stated = [_shown(given[name]) for name in PLACEMENT if name in given]
    stated += [] if count("--actor-num-gpus-per-node", 0) else [f"{DEFAULT_GPUS_PER_NODE} GPUs in a node are assumed"]
    nodes = count("--actor-num-nodes", 1)
    gpus = min(count("--actor-num-gpus-per-node", DEFAULT_GPUS_PER_NODE), MAX_GPUS)
    per_server = count("--rollout-num-gpus-per-engine", 1)
    is_shared = "--colocate" in given
    replica = math.prod(count(f"--{part}-parallel-size", 1) for part in ("tensor-model", "pipeline-model", "context"))
    samples = count("--global-batch-size", 0)
    sizes = range(max(gpus // 2, 1) if is_shared else gpus, 0, -1)
    fitting = [size for size in sizes if size * nodes % replica == 0 and samples % (size * nodes // replica) == 0]
    ranks = fitting[0] if fitting else gpus
    ported.launcher = ("torchrun", *(["--nnodes", str(nodes)] if nodes > 1 else []), "--nproc-per-node", str(ranks))
    ported.ranks = nodes * ranks
    ported.flags["--rollout-engine"] = ("sglang",)
    text = f"{', '.join(stated)}: torchrun starts {ported.ranks} ranks"
    runs_elsewhere = "--sglang-url" in ported.flags or "--sglang-router-ip" in ported.flags
    if fitting and per_server <= gpus and not runs_elsewhere:
        for_servers = gpus - ranks if is_shared else count("--rollout-num-gpus", per_server)
        servers = max(1, for_servers // per_server)
        ported.flags["--sglang-launch"] = (str(servers),)
        ported.flags |= {"--sglang-tp-size": (str(per_server),)} if per_server > 1 else {}
        ported.flags.setdefault("--sglang-base-gpu-id", (str(ranks),))
        text += f", and --sglang-launch {servers} starts servers with --sglang-tp-size {per_server} from GPU {ranks} on"
    else:
        ported.flags |= {} if runs_elsewhere else {"--sglang-url": ("http://SERVER:30000",)}
        own = [name for name in ported.flags if name.startswith("--sglang-") and name not in FLAGS]
        words = [word.replace("--sglang-", "--") for name in own for word in (name, *ported.flags.pop(name))]
        if words or not runs_elsewhere:
            shown = " ".join(["--tp-size", str(per_server), *map(legible, words)])
            ported.notes[TODO].append(f"start servers on other GPUs, with {shown}; --sglang-url names them.")
    ported.notes[CHANGED].append(f"{text}{'. Training and SGLang do not share GPUs' if is_shared else ''}.")
    if nodes > 1:
        ported.notes[TODO].append("start torchrun on every node, with --rdzv-endpoint, as examples/clusters does.")


def _shown(flag: Flag) -> str:
    return " ".join([flag.name[:80], *(legible(value)[:160] for value in flag.values[:8])])


def _quoted(word: str) -> str:
    """The word for bash; a variable without a value stays a variable, and nothing else is expanded."""
    if OPEN not in word:
        return shlex.quote(word)
    escaped = [re.sub(r'([\\"$`])', r"\\\1", part) for part in UNSET_VARIABLE.split(word)]
    return '"' + "".join(f"${{{part}}}" if index % 2 else part for index, part in enumerate(escaped)) + '"'


def _comment(text: str) -> list[str]:
    """The text as comment lines; control characters are escaped."""
    printable = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    wrapper = textwrap.TextWrapper(COMMENT_WIDTH, "#   ", "#     ")
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.wrap(printable)
