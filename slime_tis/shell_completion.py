"""The scripts of `slime-tis completion`, which complete words in bash and zsh.

shtab writes a script from a parser of argparse. It is static, so a key press starts no Python.
"""

import argparse
import dataclasses
from collections.abc import Iterator
from typing import Any

import shtab

from slime_tis.correction.config import PRESETS
from slime_tis.options.command_line import CommandLine, make_parser
from slime_tis.trainer.cli.train_arguments import WHAT_IF_LOSS_OPTIONS
from slime_tis.trainer.cli.train_options import COMMAND_LINE, OPTIONS
from slime_tis.trainer.configs.rollout import RM_TYPES

COMPLETED_PATHS: dict[str, Any] = {
    "DIR": shtab.DIRECTORY,
    "FILE": shtab.FILE,
    "FILE.yaml": shtab.glob("*.yaml", "*.yml"),
    "PYTHON": shtab.FILE,
    "RUN_OR_DUMP": shtab.FILE,
    "SCRIPT": shtab.FILE,
    "[NAME] PATH": shtab.FILE,
}
"""Paths that the shell offers, by the placeholder of a value in --help."""
KNOWN_NAMES = {"rollout_correction_preset": tuple(PRESETS), "rm_type": tuple(RM_TYPES)}
"""Values of options that accept other text, too, or are checked after the command line."""
PYTHON_SCRIPTS = {
    # Other scripts than train.py get the completion of file names, by `-o default`.
    "bash": """
_slime_tis_python() {
  COMPREPLY=()
  if (( COMP_CWORD > 1 )) && [[ "${COMP_WORDS[1]##*/}" == train.py ]]; then
    COMP_WORDS[0]=slime-tis
    COMP_WORDS[1]=train
    _shtab_slime_tis
  fi
}
complete -o bashdefault -o default -F _slime_tis_python python python3
""",
    "zsh": """
_slime_tis_python() {
  if (( CURRENT > 2 )) && [[ "${words[2]:t}" == train.py ]]; then
    words[1]=slime-tis
    words[2]=train
    _shtab_slime_tis
  else
    _python
  fi
}
compdef _slime_tis_python python python3
""",
}
"""Completes `python train.py FLAGS` as `slime-tis train FLAGS`, by shell."""


def train_flags() -> dict[str, argparse.ArgumentParser]:
    """Returns parsers of the flags of train.py that commands of `slime-tis` take, by command."""
    corrections = {}
    for name, option in OPTIONS.items():
        if option.group == "rollout correction" or name in WHAT_IF_LOSS_OPTIONS:
            corrections[name] = option
    aliases = {old: new for old, new in COMMAND_LINE.aliases.items() if new in corrections}
    what_if = dataclasses.replace(COMMAND_LINE, options=corrections, aliases=aliases)
    return {
        "train": _flags(COMMAND_LINE),
        "plan": _flags(COMMAND_LINE),
        "what-if": _flags(what_if),
    }


def _flags(line: CommandLine) -> argparse.ArgumentParser:
    """Returns a parser of flags, of which a command of `slime-tis` takes the arguments."""
    return make_parser(line, prog="", usage="", description="")


def completion_script(parser: argparse.ArgumentParser, shell: str, *, with_python: bool) -> str:
    """Returns a script that completes commands, flags, choices and paths.

    Args:
        parser: The parser of all commands; values to complete are added to its arguments.
        shell: bash or zsh.
        with_python: Whether the script also completes `python train.py`.
    """
    for action in _actions(parser):
        _add_values(action)
    script = shtab.complete(parser, shell)
    if with_python:
        script += PYTHON_SCRIPTS[shell]
    return script


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yields the arguments of a parser and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)


def _add_values(action: argparse.Action) -> None:
    """Adds the values that a shell offers for an argument."""
    if action.nargs == argparse.REMAINDER:
        # The flags of `what-if`; `train_flags` adds each as a separate argument.
        action.help = argparse.SUPPRESS
        return
    if action.metavar in COMPLETED_PATHS:
        action.complete = COMPLETED_PATHS[action.metavar]  # type: ignore[attr-defined]
    if action.help == argparse.SUPPRESS:
        # A --no- form, which --help leaves out for brevity.
        action.help = f"Turns off {action.option_strings[0].replace('--no-', '--', 1)}."
    option = OPTIONS.get(action.dest)
    if option is None or action.nargs == 0:
        return
    action.choices = option.type.choices or KNOWN_NAMES.get(option.name)
    if option.type.is_list:
        action.nargs = "+"
