"""`slime-tis port run.sh` prints a slime launch script as a command line of `train.py`, with comments.

The comments list what was changed, renamed, added and dropped, and why. Nothing of the script is executed.
"""

import re
import shlex
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_tis.hf_directory import read_model_config
from slime_tis.trainer.cli.arguments import configure
from slime_tis.trainer.cli.launch_script import END, NAME, OUTPUT, UNSET, Launch, legible, read_launch
from slime_tis.trainer.cli.run_options import ALIASES, FLAGS, OPTIONS
from slime_tis.trainer.cli.slime_flags import RENAMED, advice_for, disagreement, is_checked
from slime_tis.trainer.options.words import Flag, flags_of

PLACEMENT = (
    *("--actor-num-nodes", "--actor-num-gpus-per-node", "--num-gpus-per-node", "--colocate", "--rollout-num-gpus"),
    *("--rollout-num-gpus-per-engine", "--offload", "--offload-train", "--offload-rollout"),
)
"""Flags that assign GPUs; torchrun and --sglang-launch replace them."""
COMMENT_WIDTH = 110
DEFAULT_GPUS_PER_NODE, MAX_GPUS = 8, 1024

# Values that mean something else here.
ESTIMATORS = {
    "gspo": "--advantage-estimator grpo --policy-loss gspo",
    "cispo": "--advantage-estimator grpo --policy-loss cispo",
    "reinforce_plus_plus": "--advantage-estimator reinforce_plus_plus_baseline",
}
FUNCTIONS = {
    "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp": "--custom-tis-function-path "
    "custom_tis.mis.compute_mis_weights_with_cp",
    "slime.rollout.fully_async_rollout.generate_rollout_fully_async": "--rollout-lookahead 1",
    "fully_async_rollout.generate_rollout_fully_async": "--rollout-lookahead 1",
    "slime.rollout.sglang_rollout.generate_rollout": "",
}
"""slime's functions, and the flags that replace them."""
SLIME_DEFAULTS = {
    "bf16": "True",
    "micro_batch_size": "1",
    "adam_beta2": "0.999",
    "lr_decay_style": "linear",
    "tis_upper_bound": "2.0",
    "eval_temperature": "1.0",
}
"""Options with another default in slime or Megatron-core, and that default."""
NO_EFFECT = re.compile(
    r"(--[a-z0-9-]+) is (?:.* but has no effect|on but --tensor-model-parallel-size is 1)", re.DOTALL
)
"""Refusals of flags that change nothing, which port drops."""

TODO, CHANGED, RENAMES, ADDED, RESTATES, NO_OPS, UNSUPPORTED, UNKNOWN, REFUSED = (
    "to do by hand",
    "changed",
    "renamed",
    "added because slime has another default",
    "dropped because config.json or this program has the value",
    "dropped because they have no effect",
    "not supported",
    "not known",
    "on this machine train.py says",
)

Given = Mapping[str, Flag]


@dataclass
class Ported:
    """A command line under construction."""

    flags: dict[str, tuple[str, ...]] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)
    """Comments by title."""
    launcher: tuple[str, ...] = ()
    ranks: int = 1

    def note(self, title: str, text: str) -> None:
        """Adds a comment."""
        self.notes.setdefault(title, []).append(text)

    def replace(self, flag: Flag, new: str, reason: str = "") -> bool:
        """Replaces a flag by others, given as words with blanks between; returns true."""
        for words in re.split(r" (?=--)", new) if new else ():
            name, *values = words.split(" ")
            self.flags[name] = tuple(values)
        self.note(CHANGED, f"{_shown(flag)} {f'becomes {legible(new)}' if new else 'is dropped'}{reason}.")
        return True

    @property
    def argv(self) -> list[str]:
        """The command line after train.py; a variable without a value is the word ${NAME}."""
        return [word for name, values in self.flags.items() for word in (name, *map(legible, values))]


def port_script(path: str) -> str:
    """Returns a slime launch script as a command line of train.py, with comments."""
    ported = port(read_launch(path))
    ported.notes[REFUSED] = _drop_no_ops(ported).splitlines()
    lines = _comment(f"{Path(path).name} for train.py; nothing of it was executed.", "")
    command = [" ".join([*ported.launcher, "train.py"])]
    command += [" ".join([name, *map(_quoted, values)]) for name, values in ported.flags.items()]
    lines.append(" \\\n   ".join(command))
    for title in (TODO, CHANGED, RENAMES, ADDED, NO_OPS, RESTATES, UNSUPPORTED, UNKNOWN, REFUSED):
        notes = ported.notes.get(title, [])
        lines += ["#", f"# {title}:"] if notes else []
        for note in [", ".join(notes)] if title == RESTATES and notes else notes:
            lines += _comment(note)
    return "\n".join(lines) + "\n"


def port(launch: Launch) -> Ported:
    """The training command of a slime script in this program's flags."""
    ported = Ported()
    for note in launch.notes:
        ported.note(TODO, f"{note}.")
    given: dict[str, Flag] = {}
    for flag in flags_of(launch.words)[1:]:
        if flag.name in given:
            ported.note(CHANGED, f"{flag.name[:80]} is given more than once; the last value counts.")
        given[flag.name] = flag
    if "--eval-top-k" in given and given["--eval-top-k"].values == ("1",):
        ported.note(CHANGED, "--eval-top-k 1 becomes --eval-temperature 0: evaluation is greedy.")
        given["--eval-temperature"] = Flag("--eval-temperature", ("0",))
        del given["--eval-top-k"]
    try:
        model = read_model_config(" ".join(given["--hf-checkpoint"].values))
    except (KeyError, ValueError):  # on another machine
        model = None
    for flag in given.values():
        _port_flag(flag, given, model, ported)
    _assign_gpus(given, ported)
    if launch.program == "train_async.py" and "--rollout-lookahead" not in ported.flags:
        ported.flags["--rollout-lookahead"] = ("1",)
        ported.note(CHANGED, "train_async.py becomes --rollout-lookahead 1.")
    if launch.python_path:
        ported.launcher = (f"PYTHONPATH={_quoted(':'.join(launch.python_path))}", *ported.launcher)
        ported.note(CHANGED, "PYTHONPATH has the script's entries, where its functions are, without Megatron-LM.")
    _add_defaults(ported)
    return ported


def _drop_no_ops(ported: Ported) -> str:
    """Drops flags that train.py refuses because they have no effect; returns the message of another refusal."""
    while True:
        try:
            rank = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
            configure(ported.argv, {**rank, "WORLD_SIZE": str(ported.ranks)})
            return ""
        except (ValueError, OSError) as error:
            match = NO_EFFECT.match(str(error))
            dropped = [name for name in ported.flags if match and _option_of(name) == _option_of(match[1])]
            if not dropped:
                return str(error)
            for name in dropped:
                del ported.flags[name]
            ported.note(NO_OPS, str(error))


def _port_flag(flag: Flag, given: Given, model: Mapping[str, Any] | None, ported: Ported) -> None:
    """Keeps, changes or drops a flag, and adds the comment."""
    is_unknown = any(OUTPUT in value or not (value.isprintable() or UNSET in value) for value in flag.values)
    is_open = any(UNSET in value for value in flag.values)
    advice, shown = advice_for(flag.name), _shown(flag)
    if flag.name in PLACEMENT:
        return  # _assign_gpus reads them together
    if is_checked(flag.name):
        difference = "" if is_open or is_unknown else disagreement(flag, model)
        ported.note(TODO if difference else RESTATES, difference or shown)
    elif advice is not None:
        ported.note(UNSUPPORTED, f"{shown}: {advice}.")
    elif is_unknown:
        ported.note(TODO, f"{shown}: the value is a command's output; add the flag with its value.")
    elif flag.name in RENAMED:
        new = RENAMED[flag.name]
        ported.flags[new.name] = tuple(new.convert(value) for value in flag.values)
        ported.note(RENAMES, f"{shown} is {' '.join([new.name, *map(legible, ported.flags[new.name])])}.")
    elif flag.name not in FLAGS and not flag.name.startswith("--sglang-"):
        ported.note(UNKNOWN, f"{shown}: neither train.py nor slime is known to have this flag.")
    elif not _port_changed(flag, given, ported):
        if is_open:
            ported.note(TODO, f"{shown}: the script does not set the variable; set it, or write the value.")
        ported.flags[flag.name] = flag.values


def _port_changed(flag: Flag, given: Given, ported: Ported) -> bool:
    """Replaces a flag whose value means something else here; returns whether it did."""
    value = " ".join(flag.values)
    match flag.name:
        case "--ref-load" if not (Path(value) / "config.json").is_file():
            return ported.replace(flag, "", ": it takes a Hugging Face directory, by default --hf-checkpoint")
        case "--load" if "--save" in given and value.rstrip("/") == " ".join(given["--save"].values).rstrip("/"):
            ported.flags["--load"] = given["--save"].values
            ported.note(CHANGED, f"{_shown(flag)} resumes from this program's checkpoints; slime's are not read.")
            return True
        case "--load":
            return ported.replace(flag, "", ": slime's checkpoints are not read; give weights with --hf-checkpoint")
        case "--advantage-estimator" if value in ESTIMATORS:
            return ported.replace(flag, ESTIMATORS[value])
        case "--custom-tis-function-path" | "--rollout-function-path" if value in FUNCTIONS:
            return ported.replace(flag, FUNCTIONS[value])
        case "--rollout-function-path" if "sft_rollout" in value:
            return ported.replace(flag, "", ": there is no supervised fine-tuning; use slime for this script")
        case "--custom-config-path" if not Path(value).is_file():
            ported.note(TODO, f"{_shown(flag)} is a path in slime's directory; copy the file.")
    return False


def _option_of(flag: str) -> str:
    """Name of the option that a flag sets."""
    name = flag[2:].replace("-", "_")
    name = name if name in OPTIONS or name in ALIASES else name.removeprefix("no_")
    return ALIASES.get(name, name)


def _assign_gpus(given: Given, ported: Ported) -> None:
    """Sets torchrun's ranks and the servers from slime's numbers of nodes and GPUs."""
    stated = ", ".join(_shown(given[name]) for name in PLACEMENT if name in given) or "slime's placement"
    nodes = _count(given, "--actor-num-nodes", 1)
    gpus = min(_count(given, "--actor-num-gpus-per-node", 0) or DEFAULT_GPUS_PER_NODE, MAX_GPUS)
    if not _count(given, "--actor-num-gpus-per-node", 0):
        stated += f" ({DEFAULT_GPUS_PER_NODE} GPUs in a node are assumed)"
    per_server = min(max(1, _count(given, "--rollout-num-gpus-per-engine", 1)), MAX_GPUS)
    is_shared = "--colocate" in given
    ranks = (
        _ranks(given, nodes, max(gpus // 2, 1), gpus - per_server) if is_shared else _ranks(given, nodes, gpus, gpus)
    )
    for_servers = gpus - ranks if is_shared else _count(given, "--rollout-num-gpus", per_server)
    ported.launcher = (
        "torchrun",
        *(["--nnodes", str(nodes)] if nodes > 1 else []),
        "--nproc-per-node",
        str(ranks or gpus),
    )
    ported.ranks = nodes * (ranks or gpus)
    ported.flags["--rollout-engine"] = ("sglang",)
    text = f"{stated}: torchrun starts {ported.ranks} ranks"
    runs_elsewhere = bool({"--sglang-url", "--sglang-router-ip"} & set(ported.flags))
    if runs_elsewhere or per_server > gpus or not ranks:
        own = [name for name in ported.flags if name.startswith("--sglang-") and name not in FLAGS]
        words = [word.replace("--sglang-", "--") for name in own for word in (name, *ported.flags.pop(name))]
        words = [*(["--tp-size", str(per_server)] if per_server > 1 else []), *map(legible, words)]
        if not runs_elsewhere:
            ported.flags["--sglang-url"] = ("http://SERVER:30000",)
            ported.note(
                TODO, "a node has too few GPUs for training and SGLang; start servers elsewhere, and name them."
            )
        if words:
            ported.note(TODO, f"start the servers with {' '.join(words)}.")
    else:
        servers = max(1, for_servers // per_server)
        ported.flags["--sglang-launch"] = (str(servers),)
        ported.flags |= {"--sglang-tp-size": (str(per_server),)} if per_server > 1 else {}
        ported.flags.setdefault("--sglang-base-gpu-id", (str(ranks),))
        text += f", and --sglang-launch {servers} starts servers with --sglang-tp-size {per_server} from GPU {ranks} on"
    ported.note(CHANGED, f"{text}{'. Training and SGLang do not share GPUs' if is_shared else ''}.")
    if nodes > 1:
        ported.note(TODO, "start torchrun on every node, with --rdzv-endpoint; examples/clusters has a Slurm script.")


def _ranks(given: Given, nodes: int, smallest: int, largest: int) -> int:
    """Ranks of a node: complete replicas of the model whose number divides the samples of a step; 0 if none fit."""
    replica = 1
    for part in ("tensor-model", "pipeline-model", "context"):
        replica *= max(1, _count(given, f"--{part}-parallel-size", 1))
    samples = _count(given, "--global-batch-size", 0)
    for ranks in range(max(smallest, min(replica, largest)), 0, -1):
        if ranks * nodes % replica == 0 and samples % (ranks * nodes // replica) == 0:
            return ranks
    return 0


def _add_defaults(ported: Ported) -> None:
    """Adds slime's defaults that differ from this program's."""
    relevant = {
        "micro_batch_size": "--use-dynamic-batch-size" not in ported.flags,
        "tis_upper_bound": "--use-tis" in ported.flags and "--custom-config-path" not in ported.flags,
        "eval_temperature": "--eval-prompt-data" in ported.flags,
    }
    names = set(map(_option_of, ported.flags))
    for name, value in SLIME_DEFAULTS.items():
        if name in names or not relevant.get(name, True) or str(OPTIONS[name].default) == value:
            continue
        flag = "--" + name.replace("_", "-")
        values: tuple[str, ...] = () if value == "True" else (value,)
        if name == "eval_temperature":  # slime evaluates at the temperature of the rollouts
            values = ported.flags.get("--rollout-temperature", values)
        ported.flags[flag] = values
        ported.note(ADDED, " ".join([flag, *map(legible, values)]))


def _count(given: Given, name: str, default: int) -> int:
    values = given[name].values if name in given else ()
    return int(values[0]) if len(values) == 1 and re.fullmatch(r"[0-9]{1,9}", values[0]) else default


def _shown(flag: Flag) -> str:
    return " ".join([flag.name[:80], *(legible(value)[:160] for value in flag.values[:8])])


def _quoted(word: str) -> str:
    """The word for bash; a variable without a value stays a variable, and nothing else is expanded."""
    if UNSET not in word:
        return shlex.quote(word)
    escaped = re.sub(r'([\\"$`])', r"\\\1", word)
    return '"' + re.sub(f"{UNSET}({NAME})?[^{END}]*{END}", r"${\1}", escaped).replace("${}", "") + '"'


def _comment(text: str, indent: str = "  ") -> list[str]:
    """The text as comment lines; control characters are escaped."""
    printable = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    wrapper = textwrap.TextWrapper(COMMENT_WIDTH, f"# {indent}", f"# {indent}  ")
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.wrap(printable)
