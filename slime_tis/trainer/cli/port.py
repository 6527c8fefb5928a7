"""A launch script of slime in this program's flags: what is kept, changed, added and left out, and why.

`slime-tis port run.sh` prints a command that can be run as it is, and comments. Nothing of the script is executed.
"""

import json
import re
import shlex
import textwrap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_tis.trainer.cli.launch_script import END, OUTPUT, UNSET, Launch, legible
from slime_tis.trainer.cli.options import Option, read_value
from slime_tis.trainer.cli.slime_flags import FIXED, RENAMED, RESTATED, advice_for
from slime_tis.trainer.cli.unknown_flags import UnknownFlag, disagreement

PLACEMENT = (
    *("--actor-num-nodes", "--actor-num-gpus-per-node", "--num-gpus-per-node", "--colocate", "--rollout-num-gpus"),
    *("--rollout-num-gpus-per-engine", "--offload", "--offload-train", "--offload-rollout"),
)
"""Flags that say which GPUs do what; torchrun and --sglang-launch say it here."""

WIDTH = 110
"""Longest line of a comment, in characters, unless a word is longer."""

GPUS_PER_NODE, MOST_GPUS = 8, 1024
"""GPUs of a node where the script does not say, and at most."""

ESTIMATORS = {
    "gspo": ("grpo", "gspo"),
    "cispo": ("grpo", "cispo"),
    "reinforce_plus_plus": ("reinforce_plus_plus_baseline", None),
}
"""slime's --advantage-estimator → the estimator here, and the --policy-loss that it means."""

FUNCTIONS = {
    "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp": (
        "custom_tis.mis.compute_mis_weights_with_cp"
    ),
}
"""Functions of slime's examples that are shipped here."""

SLIME_DEFAULTS = {
    "bf16": "True",
    "micro_batch_size": "1",
    "adam_beta2": "0.999",
    "lr_decay_style": "linear",
    "tis_upper_bound": "2.0",
    "eval_temperature": "1.0",
}
"""Options whose default is another one in slime or Megatron-core, and what it is there."""

CHANGED = "changed"
ADDED = "added since slime's default is another"
TODO = "to do by hand"
RENAMES = "renamed"
RESTATES = "left out since config.json or this program says it"
UNSUPPORTED = "not supported"
UNKNOWN = "not known"
GROUPS = (TODO, CHANGED, RENAMES, ADDED, RESTATES, UNSUPPORTED, UNKNOWN)


@dataclass(frozen=True)
class Vocabulary:
    """The flags of this program."""

    options: Mapping[str, Option]
    """By name."""

    aliases: Mapping[str, str]
    """Old names of options and the name each one has now."""

    flags: Collection[str]
    """All that are read, --no- forms included."""

    def option_of(self, flag: str) -> Option:
        """The option that a flag sets."""
        name = flag[2:].replace("-", "_")
        name = name if name in self.options or name in self.aliases else name.removeprefix("no_")
        return self.options[self.aliases.get(name, name)]


@dataclass
class Ported:
    """A command line in the making."""

    flags: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Flags and their values, in the script's order."""

    notes: dict[str, list[str]] = field(default_factory=dict)
    """What to say about the others, by group."""

    launcher: tuple[str, ...] = ("python",)
    """What starts train.py."""

    ranks: int = 1
    """Ranks that it starts, on all nodes."""

    counts: dict[str, int] = field(default_factory=dict)
    """Flags of the script by what became of them."""

    def note(self, group: str, text: str) -> None:
        """Adds a comment."""
        self.notes.setdefault(group, []).append(text)

    @property
    def argv(self) -> list[str]:
        """The command line after train.py; a variable that the script does not set is the word ${NAME}."""
        return [word for name, values in self.flags.items() for word in (name, *map(legible, values))]


def port(launch: Launch, vocabulary: Vocabulary) -> Ported:
    """The training command of a slime script in this program's flags.

    Args:
        launch: read by `read_launch`.
        vocabulary: this program's flags.
    """
    ported = Ported()
    for note in launch.notes:
        ported.note(TODO, f"{note}.")
    given = _group(launch.words, ported)
    model = _model_of(given)
    for flag in given.values():
        outcome = _port_flag(flag, given, vocabulary, model, ported)
        ported.counts[outcome] = ported.counts.get(outcome, 0) + 1
    _place(given, ported)
    if launch.program == "train_async.py" and "--rollout-lookahead" not in ported.flags:
        ported.flags["--rollout-lookahead"] = ("1",)
        ported.note(CHANGED, "train_async.py is --rollout-lookahead 1 here.")
    _add_defaults(given, vocabulary, ported)
    return ported


def show(ported: Ported, script: str, verdict: str = "") -> str:
    """The command and its comments as bash.

    Args:
        ported: the command line.
        script: name of the script, for the first line.
        verdict: what train.py says about the command line, empty for nothing.
    """
    parts = [" ".join([*ported.launcher, "train.py"])]
    parts += [" ".join([name, *map(_quoted, values)]) for name, values in ported.flags.items()]
    counted = ", ".join(f"{count} {outcome}" for outcome, count in ported.counts.items())
    first = f"{script} for train.py; nothing of it was run. Its flags: {counted}."
    lines = [*_comment(first, ""), " \\\n   ".join(parts)]
    for group in GROUPS:
        if group in ported.notes:
            notes = ported.notes[group]
            lines += ["#", f"# {group}:"]
            lines += [line for note in ([", ".join(notes)] if group == RESTATES else notes) for line in _comment(note)]
    if verdict:
        lines += ["#", "# on this machine train.py says:"]
        lines += [line for text in verdict.splitlines() for line in _comment(text)]
    return "\n".join(lines) + "\n"


def _group(words: tuple[str, ...], ported: Ported) -> dict[str, UnknownFlag]:
    """Flags with their values; of a flag that is given twice the last, as argparse has it."""
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        if not re.fullmatch(r"--[A-Za-z0-9][A-Za-z0-9_-]*", name):
            values.append(word)
            continue
        if name in found:
            ported.note(CHANGED, f"{name} is given twice; the last counts.")
        values = found[name] = [value] if equals else []
    return {name: UnknownFlag(name, tuple(values)) for name, values in found.items()}


def _port_flag(
    flag: UnknownFlag,
    given: Mapping[str, UnknownFlag],
    vocabulary: Vocabulary,
    model: Mapping[str, Any] | None,
    ported: Ported,
) -> str:
    """Takes a flag over, or notes why not; says what became of it."""
    unknown = [value for value in flag.values if OUTPUT in value or (not value.isprintable() and UNSET not in value)]
    advice = advice_for(flag.name)
    if flag.name in PLACEMENT:
        return RENAMES  # _place looks at them together
    if flag.name in RESTATED or flag.name in FIXED:
        difference = "" if unknown or any(map(_is_open, flag.values)) else disagreement(flag, model)
        ported.note(TODO if difference else RESTATES, difference or _shown(flag))
        return RESTATES
    if advice is not None:
        ported.note(UNSUPPORTED, f"{_shown(flag)}: {advice.reason}; {advice.instead}.")
        return UNSUPPORTED
    if unknown:
        ported.note(TODO, f"{_shown(flag)}: its value is the output of a command, which was not run; add it yourself.")
        return TODO
    if flag.name in RENAMED:
        new = RENAMED[flag.name]
        ported.flags[new.name] = tuple(FORMS[new.form](value) for value in flag.values)
        ported.note(RENAMES, f"{_shown(flag)} is {' '.join([new.name, *map(legible, ported.flags[new.name])])}.")
        return RENAMES
    if flag.name in vocabulary.flags:
        return _port_own(flag, given, vocabulary, ported)
    if flag.name.startswith("--sglang-"):
        ported.flags[flag.name] = flag.values
        return "kept"
    ported.note(UNKNOWN, f"{_shown(flag)}: neither a flag of train.py nor one of slime that is known here.")
    return UNKNOWN


def _port_own(flag: UnknownFlag, given: Mapping[str, UnknownFlag], vocabulary: Vocabulary, ported: Ported) -> str:
    """A flag that both programs have: kept, unless its value means something else here."""
    special = SPECIAL.get(flag.name)
    change = special(flag, given) if special else None
    if change is not None:
        ported.flags |= change.flags
        ported.note(CHANGED, change.note)
        return CHANGED
    option = vocabulary.option_of(flag.name)
    if not any(map(_is_open, flag.values)):
        problem = _problem(flag, option)
        if problem:
            ported.note(TODO, f"{problem} It is left out.")
            return TODO
    else:
        ported.note(TODO, f"{_shown(flag)}: the script does not set it; set the variable, or write the value.")
    ported.flags[flag.name] = flag.values
    return "kept"


def _problem(flag: UnknownFlag, option: Option) -> str:
    """Why the option does not take the flag's values; empty where it does."""
    values: Any = list(flag.values) if option.type.is_list else " ".join(flag.values)
    if option.type.kind is bool:
        return f"{_shown(flag)}: it is a switch." if flag.values else ""
    try:
        read_value(flag.name, option, values)
    except ValueError as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class Change:
    """What a flag becomes."""

    flags: dict[str, tuple[str, ...]]
    """Flags to write in its place, none to leave it out."""

    note: str
    """Why."""


Given = Mapping[str, UnknownFlag]


def _reference(flag: UnknownFlag, given: Given) -> Change | None:
    if flag.values and (Path(flag.values[0]) / "config.json").is_file():
        return None
    return Change(
        {},
        f"{_shown(flag)} is left out: slime's is a Megatron checkpoint, here it is a Hugging Face directory, by "
        "default that of --hf-checkpoint.",
    )


def _resumed(flag: UnknownFlag, given: Given) -> Change | None:
    save = given.get("--save")
    if save is not None and flag.values and save.values and _same_path(flag.values[0], save.values[0]):
        return Change(
            {"--load": save.values},
            f"{_shown(flag)} resumes from checkpoints of this program; those of slime are not read.",
        )
    return Change(
        {}, f"{_shown(flag)} is left out: checkpoints of slime are not read; give weights with --hf-checkpoint."
    )


def _estimator(flag: UnknownFlag, given: Given) -> Change | None:
    name = " ".join(flag.values)
    if name not in ESTIMATORS:
        return None
    estimator, loss = ESTIMATORS[name]
    flags: dict[str, tuple[str, ...]] = {"--advantage-estimator": (estimator,)}
    flags |= {"--policy-loss": (loss,)} if loss else {}
    return Change(
        flags, f"{_shown(flag)} is {' '.join(word for pair in flags.items() for word in (pair[0], *pair[1]))}."
    )


def _correction(flag: UnknownFlag, given: Given) -> Change | None:
    name = " ".join(flag.values)
    if name not in FUNCTIONS:
        return None
    return Change({flag.name: (FUNCTIONS[name],)}, f"{_shown(flag)} is {FUNCTIONS[name]} here.")


def _options_file(flag: UnknownFlag, given: Given) -> Change | None:
    if flag.values and Path(flag.values[0]).is_file():
        return None
    return Change({flag.name: flag.values}, f"{_shown(flag)} is a path in slime's directory; copy the file.")


SPECIAL: dict[str, Callable[[UnknownFlag, Given], Change | None]] = {
    "--ref-load": _reference,
    "--load": _resumed,
    "--advantage-estimator": _estimator,
    "--custom-tis-function-path": _correction,
    "--custom-config-path": _options_file,
}
"""Flags of both programs whose values may mean something else, and what they become; None keeps them."""


def _place(given: Given, ported: Ported) -> None:
    """torchrun and the servers, from slime's counts of nodes and GPUs."""
    stated = [_shown(given[name]) for name in PLACEMENT if name in given]
    nodes = _count(given, "--actor-num-nodes", 1)
    gpus = _count(given, "--actor-num-gpus-per-node", 0)
    assumed = "" if gpus else f" ({GPUS_PER_NODE} GPUs in a node are assumed)"
    gpus = min(gpus or GPUS_PER_NODE, MOST_GPUS)
    per_server = min(max(1, _count(given, "--rollout-num-gpus-per-engine", 1)), MOST_GPUS)
    shares = "--colocate" in given
    ranks = _ranks(given, gpus - per_server if shares else gpus, halved=gpus // 2 if shares else gpus, nodes=nodes)
    for_servers = gpus - ranks if shares else _count(given, "--rollout-num-gpus", per_server)
    launcher = ["torchrun", *(["--nnodes", str(nodes)] if nodes > 1 else []), "--nproc-per-node", str(ranks)]
    ported.launcher, ported.ranks = tuple(launcher), nodes * ranks
    servers = ""
    if not {"--sglang-url", "--sglang-router-ip"} & set(ported.flags):
        count = max(1, for_servers // per_server)
        ported.flags |= {"--rollout-engine": ("sglang",), "--sglang-launch": (str(count),)}
        ported.flags |= {"--sglang-tp-size": (str(per_server),)} if per_server > 1 else {}
        ported.flags.setdefault("--sglang-base-gpu-id", (str(ranks),))
        servers = f", and --sglang-launch {_many(count, 'server')} of {_many(per_server, 'GPU')} from GPU {ranks} on"
    else:
        ported.flags["--rollout-engine"] = ("sglang",)
    reason = ": training and SGLang do not take turns on the same GPUs" if shares else ""
    ported.note(
        CHANGED,
        f"{', '.join(stated) or 'what slime assumes'}{assumed}: torchrun starts {_many(nodes * ranks, 'rank')}{servers}"
        f"{reason}.",
    )
    if nodes > 1:
        ported.note(TODO, "start torchrun on every node, with --rdzv-endpoint; examples/clusters has a Slurm script.")


def _ranks(given: Given, most: int, *, halved: int, nodes: int) -> int:
    """Ranks of a node: whole replicas of the model that divide the samples of a step, in about so many GPUs."""
    sizes = [_count(given, f"--{part}-parallel-size", 1) for part in ("tensor-model", "pipeline-model", "context")]
    replica = max(1, sizes[0] * sizes[1] * sizes[2])
    samples = _count(given, "--global-batch-size", 0)
    ranks = max(halved, 1)
    for candidate in range(max(halved, min(replica, most)), 0, -1):
        whole = candidate * nodes % replica == 0
        if whole and samples % (candidate * nodes // replica) == 0:
            ranks = candidate
            break
    return ranks


def _add_defaults(given: Given, vocabulary: Vocabulary, ported: Ported) -> None:
    """Options that the script leaves to defaults which are others here."""
    relevant = {
        "micro_batch_size": "--use-dynamic-batch-size" not in ported.flags,
        "tis_upper_bound": "--use-tis" in ported.flags and "--custom-config-path" not in ported.flags,
        "eval_temperature": "--eval-prompt-data" in ported.flags,
        "bf16": "--fp16" not in given,
    }
    set_already = {vocabulary.option_of(name).name for name in ported.flags if name in vocabulary.flags}
    for name, value in SLIME_DEFAULTS.items():
        if name in set_already or not relevant.get(name, True) or str(vocabulary.options[name].default) == value:
            continue
        flag = "--" + name.replace("_", "-")
        if name == "eval_temperature":  # slime's is that of the rollouts
            value = " ".join(ported.flags.get("--rollout-temperature", (value,)))
        ported.flags[flag] = () if value == "True" else (value,)
        ported.note(ADDED, " ".join([flag, *map(legible, ported.flags[flag])]))


def _model_of(given: Given) -> dict[str, Any] | None:
    """config.json of the checkpoint where this machine has it."""
    try:
        path = Path(" ".join(given["--hf-checkpoint"].values)) / "config.json"
        model = json.loads(path.read_text(encoding="utf-8"))
    except (KeyError, OSError, ValueError, RecursionError):
        return None
    return model if isinstance(model, dict) else None


def _count(given: Given, name: str, default: int) -> int:
    """The whole number that a flag gives; the default where it gives none that can be read."""
    values = given[name].values if name in given else ()
    return int(values[0]) if len(values) == 1 and re.fullmatch(r"[0-9]{1,9}", values[0]) else default


def _same_path(a: str, b: str) -> bool:
    return a.rstrip("/") == b.rstrip("/")


def _mebibytes(text: str) -> str:
    return str(max(1, int(text) >> 20)) if re.fullmatch(r"[0-9]{1,18}", text) else text


FORMS: dict[str, Callable[[str], str]] = {
    "same": str,
    "bytes to MiB": _mebibytes,
    "URL": lambda text: text if "://" in text else f"http://{text}",
    "transport": lambda text: {"nccl": "distributed"}.get(text, text),
}
"""How values of renamed flags are written here."""


def _is_open(value: str) -> bool:
    return UNSET in value or OUTPUT in value


def _shown(flag: UnknownFlag) -> str:
    return " ".join([flag.name[:80], *(legible(value)[:160] for value in flag.values[:8])])


def _quoted(word: str) -> str:
    """The word for bash; a variable that the script does not set stays one, and nothing else is expanded."""
    if UNSET not in word:
        return shlex.quote(word)
    escaped = re.sub(r'([\\"$`])', r"\\\1", word)
    return '"' + re.sub(f"{UNSET}([^{END}]*){END}", _variable, escaped) + '"'


def _variable(match: re.Match[str]) -> str:
    return f"${{{match[1]}}}" if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", match[1]) else ""


def _many(count: int, thing: str) -> str:
    return f"{count} {thing}{'s' * (count != 1)}"


def _comment(text: str, indent: str = "  ") -> list[str]:
    """The text as lines of comment, of which no part is a command when the output is run."""
    printable = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    return textwrap.wrap(
        printable,
        WIDTH,
        initial_indent=f"# {indent}",
        subsequent_indent=f"# {indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
