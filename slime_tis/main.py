"""The command `slime-tis`, and what `python train.py` calls.

    slime-tis train --hf-checkpoint DIR …    trains, as `python train.py …` in a checkout
    slime-tis demo                           trains a tiny model, and reports its mismatch
    slime-tis port run.sh                    prints another trainer's script in this program's flags
    slime-tis plan --world-size N [FLAGS]    prints the memory per rank of a layout, without a GPU
    slime-tis report RUN_OR_DUMP             writes one HTML file on a run or on dumps of its tokens
    slime-tis what-if RUN_OR_DUMP [FLAGS]    prints what corrections would have done to these tokens
    slime-tis diagnose RUN_OR_DUMP           names the causes of the mismatch
    slime-tis parity CHECKPOINT              names the first operation in which executions differ
    slime-tis recommend RUN_OR_DUMP          prints the correction that the study recommends for it
    slime-tis completion SHELL               prints a script that completes these commands

A command line is read and checked before torch, transformers and Megatron-core are imported,
because these imports take seconds.
"""

import argparse
import gc
import io
import locale
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any

import slime_tis
from slime_tis.analysis.report.comparison_study import PRECISION_CLASSES
from slime_tis.command_signals import raise_on_signals, status_after
from slime_tis.console_output import protect_output
from slime_tis.parity.parity_options import add_parity_options

WHAT_IF_ORDER = (
    "Ordered by cosine, the closest to the exact gradient first. This is no recommendation: a dump"
    " cannot show a\nlater collapse. `slime-tis recommend` prints the recommended correction."
)
TRAINING_COMMANDS = ("demo", "port", "plan")
"""Commands that need the extra `train`; the others need `analysis`."""
SHELLS = ("bash", "zsh")
"""Shells whose completion is tested."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: The words after `slime-tis`; None takes this process's.

    Returns:
        The exit status: 1 after an error, 2 if the command is refused, 130 after Ctrl-C, 143 after
        SIGTERM.
    """
    owns_process = argv is None
    if argv is None:
        argv = _own_command_line()
    argv = list(argv)
    if argv[:1] == ["train"]:
        return train(argv[1:], prog="slime-tis train", owns_process=owns_process)
    protect_output(keep_running=False)
    parser = _parser()
    chosen = _parsed(parser, argv)
    if chosen.command is None:
        parser.print_help()
        return 0
    if owns_process:
        raise_on_signals()
    try:
        status = _run(chosen, owns_process=owns_process)
        # A full disk is an error of this command, not of the interpreter's exit.
        sys.stdout.flush()
    except ModuleNotFoundError as error:
        return _package_is_missing(error, f"slime-tis {chosen.command}", _extra(chosen.command))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        location = ""
        if error.filename is not None:
            location = f" ({str(error.filename)!r})"
        print(f"error: {error.strerror or error}{location}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        return status_after(error)
    return status


def _extra(command: str) -> str:
    """Returns the extra of the package that a command needs."""
    if command in TRAINING_COMMANDS:
        return "train"
    return "analysis"


def _parsed(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parses a command line; `plan` and `what-if` keep the flags that train.py takes."""
    chosen, flags = parser.parse_known_args(argv)
    if chosen.command == "plan":
        chosen.flags = flags
    elif flags:
        parser.error(f"unrecognized arguments: {' '.join(flags)}")
    # After DUMP, argparse keeps --help as one of the flags.
    if chosen.command == "what-if" and {"-h", "--help"} & set(chosen.flags):
        parser.parse_args(["what-if", "--help"])
    return chosen


def _run(chosen: argparse.Namespace, *, owns_process: bool) -> int:
    """Runs a command other than `train`; returns its exit status.

    Args:
        chosen: The parsed command line.
        owns_process: Whether the process ends with the command.
    """
    if chosen.command == "demo":
        from slime_tis.demo.demo_commands import demo

        return demo(chosen.out, owns_process=owns_process)
    # These commands print and choose their exit status; the others below only return a text.
    with_status = {"port": _port, "diagnose": _diagnose, "parity": _parity}
    if chosen.command in with_status:
        return with_status[chosen.command](chosen)
    if chosen.command == "plan":
        # The plan is made on the CPU.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        from slime_tis.trainer.cli.train_arguments import read_layout
        from slime_tis.trainer.memory_plan import plan

        layout = read_layout(chosen.flags)
        text = plan(
            layout, chosen.world_size, gpu_memory=chosen.gpu_memory, bandwidth=chosen.bandwidth
        )
    elif chosen.command == "report":
        from slime_tis.analysis.report.report_commands import report

        if chosen.compare is None:
            paths = [chosen.path]
            is_valid = chosen.path is not None
        else:
            paths = chosen.compare
            is_valid = chosen.path is None and len(paths) > 1
        if not is_valid:
            raise ValueError("error: give one run or dump, or several after --compare.")
        text = report(
            paths, out=chosen.out, as_json=chosen.json, hf_checkpoint=chosen.hf_checkpoint
        )
    elif chosen.command == "recommend":
        from slime_tis.analysis.report.recommend import recommend

        text = recommend(chosen.path, chosen.rollout_precision)
    elif chosen.command == "completion":
        from slime_tis.shell_completion import completion_script, train_flags

        parser = _parser(train_flags())
        text = completion_script(parser, chosen.shell, with_python=chosen.python)
    else:
        text = what_if_table(chosen.dump, chosen.flags)
    print(text)
    return 0


def _port(chosen: argparse.Namespace) -> int:
    """Runs `slime-tis port`; returns its exit status: 2 if train.py refuses the command."""
    from slime_tis.trainer.port.port_command import port_script

    if isinstance(sys.stdout, io.TextIOWrapper):
        # The printed script is UTF-8 in every locale.
        sys.stdout.reconfigure(encoding="utf-8")
    ported = port_script(chosen.script, gpu_memory=chosen.gpu_memory)
    print(ported.text, end="")
    if ported.refusals:
        print("train.py refuses the command:", *ported.refusals, sep="\n  ", file=sys.stderr)
        return 2
    return 0


def _diagnose(chosen: argparse.Namespace) -> int:
    """Runs `slime-tis diagnose`; returns its exit status: 1 if a limit of --fail-on is exceeded."""
    scores_again = chosen.hf_checkpoint or chosen.other_checkpoint or chosen.device
    if chosen.demo:
        if chosen.json or chosen.compare or chosen.fail_on or scores_again:
            raise ValueError("error: --demo takes a directory and no other option.")
        from slime_tis.demo.demo_commands import diagnosis_demo

        print(diagnosis_demo(chosen.path or "slime-tis-diagnosis"))
        return 0
    if (chosen.path is None) == (chosen.compare is None):
        raise ValueError("error: give a run or a dump, --compare with two of them, or --demo.")
    if chosen.compare:
        if chosen.fail_on or scores_again:
            raise ValueError("error: --compare takes no other option than --json.")
        from slime_tis.analysis.report.report_commands import comparison

        print(comparison(*chosen.compare, as_json=chosen.json))
        return 0
    from slime_tis.analysis.report.report_commands import LimitExceeded, diagnosis

    options = {
        "hf_checkpoint": chosen.hf_checkpoint,
        "other_checkpoints": chosen.other_checkpoint,
        "device": chosen.device,
    }
    try:
        print(diagnosis(chosen.path, **options, as_json=chosen.json, fail_on=chosen.fail_on))
    except LimitExceeded as error:
        print(error.text)
        print(f"--fail-on: {error}.", file=sys.stderr)
        return 1
    return 0


def _parity(chosen: argparse.Namespace) -> int:
    """Runs `slime-tis parity`; returns its exit status: 1 if --fail-on is exceeded."""
    from slime_tis.parity.parity_command import TooDifferent, parity

    try:
        print(parity(chosen))
    except TooDifferent as error:
        print(error.text)
        print(f"--fail-on: {error}.", file=sys.stderr)
        return 1
    return 0


def _add_diagnose_options(add: Callable[..., object], dumps: str) -> None:
    """Adds the options of `slime-tis diagnose`.

    Args:
        add: Adds an argument to its parser.
        dumps: Help on RUN_OR_DUMP.
    """
    add("path", metavar="RUN_OR_DUMP", nargs="?", help=dumps)
    demo = (
        "plant a fault in a tiny model, in the new directory RUN_OR_DUMP (default"
        " slime-tis-diagnosis), and find it"
    )
    add("--demo", action="store_true", help=demo)
    model = "model that scores samples again in fp32: names the wrong engine and proves the cause"
    add("--hf-checkpoint", default="", metavar="DIR", help=model)
    other = (
        "another checkpoint of the run, whose weights the rollout engine may have; may be repeated"
    )
    add("--other-checkpoint", action="append", default=[], metavar="DIR", help=other)
    device = "device of torch that scores again, such as cuda:0 (default cpu)"
    add("--device", default="", metavar="DEVICE", help=device)
    add("--json", action="store_true", help="print JSON")
    two = "name the differences between two: options, precisions, size and cause of the mismatch"
    add("--compare", nargs=2, metavar="RUN_OR_DUMP", help=two)
    limits = (
        "exit with status 1 if a limit is exceeded or cannot be checked: k3=X,"
        " abs=X (mean abs(Δ)), cause (any but healthy)"
    )
    add("--fail-on", default="", metavar="LIMITS", help=limits)


def _parser(
    train_flags: Mapping[str, argparse.ArgumentParser] = MappingProxyType({}),
) -> argparse.ArgumentParser:
    """Returns the parser of all commands; `train` is there only for the help.

    Args:
        train_flags: Parsers of the flags of train.py, by command. Only shell completion needs them.
    """
    parser = argparse.ArgumentParser(
        prog="slime-tis",
        description="Training with rollout correction, and tools for its analysis.",
    )
    parser.add_argument("--version", action="version", version=f"slime-tis {slime_tis.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def add_parser(name: str, **options: Any) -> argparse.ArgumentParser:
        """Adds a command, which takes flags of train.py if it has any."""
        if name in train_flags:
            # Both parsers have --help.
            options |= {"parents": [train_flags[name]], "conflict_handler": "resolve"}
        return commands.add_parser(name, **options)

    add_parser("train", help="train; `slime-tis train --help` lists the flags")

    def command(name: str, text: str, details: str = "", **options: Any) -> Callable[..., object]:
        """Adds a command; returns the function that adds its arguments."""
        description = f"{text[0].upper()}{text[1:]}{details}. Needs the extra {_extra(name)}."
        return add_parser(name, help=text, description=description, **options).add_argument

    add = command("demo", "train a tiny model for a minute and write a report on its mismatch")
    add(
        "--out",
        default="slime-tis-demo",
        metavar="DIR",
        help="directory to make (default %(default)s)",
    )

    add = command(
        "port", "print a script of another trainer in the flags of train.py, without running it"
    )
    add("script", metavar="SCRIPT", help="launch script, for example slime/scripts/run-qwen3-4B.sh")
    memory = "memory of a GPU, for the check whether the layout fits (default %(default)g)"
    add("--gpu-memory", type=float, default=80.0, metavar="GIB", help=memory)

    add = command(
        "plan",
        "print the memory of each rank for a model and a layout, without weights and without a GPU",
        ", from the config.json in --hf-checkpoint DIR",
        usage=(
            "slime-tis plan --world-size N [--gpu-memory GIB] [--bandwidth GB/S] FLAGS OF train.py"
        ),
        allow_abbrev=False,
    )
    add("--world-size", type=int, required=True, metavar="N", help="number of ranks")
    add(
        "--gpu-memory",
        type=float,
        default=80.0,
        metavar="GIB",
        help="memory of a GPU (default %(default)g)",
    )
    bandwidth = (
        "GB/s from training to rollout, for the time of a weight update (default %(default)g)"
    )
    add("--bandwidth", type=float, default=25.0, metavar="GB/S", help=bandwidth)

    dumps = (
        "directory of a run, dumps of tokens (a file or a directory), or for report and diagnose a"
        " log of metrics"
    )
    add = command("report", "write one HTML file on a run or on dumps of its tokens")
    add("path", metavar="RUN_OR_DUMP", nargs="?", help=dumps)
    several = "several in one file; runs that differ in seeds form a group"
    add("--compare", nargs="+", metavar="RUN_OR_DUMP", help=several)
    out = "file to write (default RUN/report.html); a report is replaced"
    add("--out", default="", metavar="FILE", help=out)
    add("--json", action="store_true", help="print the numbers as JSON; a page only with --out")
    add("--hf-checkpoint", default="", metavar="DIR", help="directory or ORG/NAME of the tokenizer")

    add = command("diagnose", "name the causes of the mismatch between training and rollout")
    _add_diagnose_options(add, dumps)

    add = command(
        "recommend", "print the correction that the comparison study supports for a mismatch"
    )
    add("path", metavar="RUN_OR_DUMP", help=dumps)
    precision = "precision of the rollout engine, if the dump does not have it, as with servers"
    add("--rollout-precision", choices=[*PRECISION_CLASSES], default="", help=precision)

    add = command(
        "parity",
        "compare two executions of the same tokens",
        ", and name the first operation that differs",
    )
    add_parity_options(add)

    add = command(
        "what-if",
        "print what corrections would have done to the tokens of a dump",
        ": of every preset, or of the flags",
        usage="slime-tis what-if [-h] RUN_OR_DUMP [FLAGS OF A CORRECTION]",
    )
    add("dump", metavar="RUN_OR_DUMP", help=dumps)
    flags = (
        "as train.py takes them, e.g. --use-tis --tis-level sequence, or"
        " --rollout-correction-preset NAME"
    )
    add("flags", metavar="FLAGS", nargs=argparse.REMAINDER, help=flags)

    add = command(
        "completion",
        "print a script that completes commands, flags, choices and paths",
        ": slime-tis completion bash > ~/.slime-tis.bash, which ~/.bashrc must source",
    )
    add("shell", choices=SHELLS, help="bash or zsh")
    python = "also complete `python train.py`, in place of the shell's completion of python"
    add("--python", action="store_true", help=python)
    return parser


ASCII = ("ANSI_X3.4-1968", "US-ASCII", "ASCII")
"""Encodings of the locale C if Python's UTF-8 mode is off."""
ASCII_LOCALE = (
    "error: the locale's encoding is ASCII, in which torch cannot read its own files;"
    " set PYTHONUTF8=1 or LC_ALL=C.UTF-8."
)


def train(
    argv: Sequence[str] | None = None, *, prog: str = "train.py", owns_process: bool = False
) -> int:
    """Checks a command line and trains.

    Args:
        argv: Flags of train.py; None takes this process's.
        prog: Name of the program in messages.
        owns_process: Whether the process ends with the run; always if argv is None.

    Returns:
        The exit status.
    """
    if argv is None:
        owns_process = True
        argv = _own_command_line()
    # --help prints before the run protects its output.
    protect_output(keep_running=False)
    try:
        from slime_tis.trainer.cli.train_arguments import parse_args

        arguments = parse_args(argv, prog=prog)
        if locale.getpreferredencoding(do_setlocale=False).upper() in ASCII:
            print(ASCII_LOCALE, file=sys.stderr)
            return 2
        from slime_tis.trainer.engines.event_loops import THREADS
        from slime_tis.trainer.stop_signals import end_process
        from slime_tis.trainer.training_command import main as run
    except ModuleNotFoundError as error:
        return _package_is_missing(error, prog, "train")
    protect_output(keep_running=True)
    if owns_process:
        # Imported modules live until the process ends. Without this, every full collection visits
        # their 400,000 objects, which takes a quarter of a second.
        gc.freeze()
    status = run(arguments)
    # Python aborts at its exit if a daemon thread holds a lock of stdin, or runs C++.
    if owns_process and THREADS.running:
        sys.stdout.flush()
        sys.stderr.flush()
        end_process(status)
    return status


def _package_is_missing(error: ModuleNotFoundError, command: str, extra: str) -> int:
    """Prints how to install a package; returns the exit status.

    A missing module of slime_tis itself is a defect, and is raised.
    """
    package = (error.name or "slime_tis").split(".")[0]
    if package == "slime_tis":
        raise error
    install = f"pip install 'slime_tis[{extra}]'"
    print(
        f"error: {command} needs the package {package}; install it with: {install}", file=sys.stderr
    )
    return 2


def what_if_table(path: str, flags: Sequence[str]) -> str:
    """Returns the table of `slime-tis what-if` for flags; without flags for presets and a sweep."""
    from slime_tis.analysis.dumps.what_if import as_text, policy_of, what_if
    from slime_tis.analysis.report.report_inputs import open_source
    from slime_tis.correction import RolloutCorrectionConfig
    from slime_tis.trainer.cli.train_arguments import read_correction
    from slime_tis.user_functions import load_custom_tis

    table = open_source(path).tokens()
    if not flags:
        return f"{as_text(what_if(table))}\n{WHAT_IF_ORDER}"
    correction, policy, function, args = read_correction(flags, policy_of(table))
    chosen: Any = correction
    if function:
        chosen = load_custom_tis(function, args)
    changed = replace(table, metadata=dict(table.metadata) | {"policy": asdict(policy)})
    # For comparison, the first row has no correction and the policy options of the run.
    rows = list(what_if(table, [RolloutCorrectionConfig()]))
    (row,) = what_if(changed, [chosen], args=args)
    rows.append(replace(row, flags=" ".join(flags)))
    return as_text(rows)


def _own_command_line() -> list[str]:
    """Returns the command line of this process.

    Until the run handles signals itself, Ctrl-C ends the process without a traceback.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return sys.argv[1:]


if __name__ == "__main__":
    sys.exit(main())
