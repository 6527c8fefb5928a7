"""Checks and locks of the directories that a run writes."""

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from slime_tis.errors import first_line, quoted_path
from slime_tis.trainer.options.megatron import MegatronConfig
from slime_tis.trainer.options.reporting import ReportingConfig
from slime_tis.trainer.options.rollout import RolloutConfig
from slime_tis.trainer.reporting.run_directory import OWN_NAMES, foreign_file
from slime_tis.trainer.storage import exports
from slime_tis.trainer.storage.checkpoints import Damaged, check_options, checkpoints, read_state
from slime_tis.trainer.storage.directories import LOCK, held, same_path, unwritable


def check_outputs(
    rollout: RolloutConfig, megatron: MegatronConfig, reporting: ReportingConfig, dumps: Mapping[str, str]
) -> None:
    """Refuses output paths that cannot be written, hold other files, or would replace an input of the run.

    `dumps` has the first file of each kind of dump, by flag.
    """
    outputs = {"--output-dir": reporting.output_dir, "--save": megatron.save, "--save-hf": megatron.save_hf}
    for flag, directory in outputs.items():
        problem = None if directory is None else unwritable(directory)
        if problem is not None:
            raise ValueError(f"{flag} is {quoted_path(directory)} but {problem}; give a directory that can be written.")
    for flag, file in dumps.items():
        _check_dump(flag, Path(file), Path(reporting.output_dir), megatron.save_hf)
    foreign = foreign_file(Path(reporting.output_dir))
    if foreign is not None:
        raise ValueError(
            f"--output-dir is {quoted_path(reporting.output_dir)} but its {foreign} is of no run of this program; give "
            "another directory."
        )
    _check_save(megatron)
    if megatron.save_hf is not None:
        _check_export(megatron.save_hf, rollout, megatron, reporting)


def check_resumption(megatron: MegatronConfig, options: Mapping[str, Any]) -> None:
    """Refuses options that differ from the ones of the newest checkpoint under --load."""
    found = checkpoints(megatron.load) if megatron.load is not None else []
    if not found:
        return
    try:
        saved = read_state(found[-1]).get("options")
    except Damaged:  # another checkpoint may be taken, or the run ends with what is wrong
        return
    if isinstance(saved, dict):
        check_options(saved, options)


@contextmanager
def held_outputs(megatron: MegatronConfig, reporting: ReportingConfig, *, main: bool) -> Iterator[None]:
    """Locks the run's output directories, for all ranks by the `main` process; refuses a directory or port in use."""
    locks = {Path(reporting.output_dir).resolve() / LOCK: "--output-dir"}
    if megatron.save is not None:
        locks[Path(megatron.save).resolve() / LOCK] = "--save"
    if megatron.save_hf is not None:
        export = Path(megatron.save_hf).resolve()
        locks[export.with_name(f".{export.name}{LOCK}")] = "--save-hf"
    with held(locks) if main else nullcontext():
        if main:
            _check_save(megatron)  # again, now that no other run can write there
            _check_port(reporting.prometheus_port)
        yield


def _check_port(port: int | None) -> None:
    try:
        with nullcontext() if port is None else socket.create_server(("127.0.0.1", port)):
            pass
    except OSError as error:
        raise ValueError(f"--prometheus-port is {port}, which is not available: {error.strerror}.") from None


def _is_inside(inner: Path, outer: Path) -> bool:
    """Whether a path is another one or lies below it."""
    inner = inner.resolve()
    return any(same_path(place, outer) for place in (inner, *inner.parents))


def _check_dump(flag: str, file: Path, output_dir: Path, save_hf: str | None) -> None:
    """Refuses a dump over other files than dumps of its kind, and among files that the run replaces later."""
    problem = "it is a directory" if file.is_dir() else unwritable(file.parent)
    if file.parts[0].startswith("~"):
        problem = "only a shell expands ~"
    elif save_hf is not None and _is_inside(file, Path(save_hf)):
        problem = "that is inside --save-hf, which an export replaces"
    elif any(_is_inside(file, output_dir / name) for name in OWN_NAMES):
        problem = "that is a name that the run itself uses"
    elif problem is None and os.path.lexists(file):
        # imported where there is a file: they bring torch, which takes seconds
        if flag == "--save-debug-rollout-data":
            from slime_tis.trainer.data.dump import check_replaceable
        else:
            from slime_tis.analysis.dumps.files import check_replaceable
        try:
            check_replaceable(file)
        except (ValueError, OSError) as error:
            problem = first_line(error)
    if problem is not None:
        raise ValueError(f"{flag} would write {quoted_path(file)} but {problem}; give another file.")


def _check_save(megatron: MegatronConfig) -> None:
    """A directory with checkpoints is only written on by the run that resumes from it."""
    save, load = megatron.save, megatron.load
    if save is None or (load is not None and same_path(save, load)):
        return
    found = checkpoints(save)
    if found:
        raise ValueError(
            f"--save is {quoted_path(save)} but another run's checkpoints are there, up to {found[-1].name}; "
            f"continue from them with --load {save}, or give another --save."
        )


def _check_export(save_hf: str, rollout: RolloutConfig, megatron: MegatronConfig, reporting: ReportingConfig) -> None:
    """Refuses an export over or around other files of the run; it may lie in the run and the working directory."""
    target, output_dir = Path(save_hf).resolve(), Path(reporting.output_dir)
    used = [
        ("--hf-checkpoint", megatron.hf_checkpoint),
        ("--ref-load", megatron.ref_load),
        ("--save", megatron.save),
        ("--load", megatron.load),
        ("--prompt-data", rollout.prompt_data),
        *(("--eval-prompt-data", path) for _, path in rollout.eval_prompt_sets),
        ("--output-dir", reporting.output_dir),
        *(("--output-dir (a name that the run itself uses)", str(output_dir / name)) for name in sorted(OWN_NAMES)),
        ("the working directory", os.getcwd()),
    ]
    for flag, path in used:
        if path is None:
            continue
        if same_path(target, path):
            relation = "the same as"
        elif _is_inside(Path(path), target):
            relation = "above"
        elif flag not in ("--output-dir", "the working directory") and _is_inside(target, Path(path)):
            relation = "inside"
        else:
            continue
        raise ValueError(
            f"--save-hf is {quoted_path(save_hf)}, which is {relation} {flag} {quoted_path(path)}; an export replaces "
            "its whole directory, so give it a separate one."
        )
    exports.check_target(target, f"--save-hf is {quoted_path(save_hf)}", "export")
