"""The directories that a run writes, looked at and locked before anything is built."""

import os
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
from slime_tis.trainer.storage.checkpoints import Damaged, checkpoints, read_state
from slime_tis.trainer.storage.directories import LOCK, held, same_path, unwritable
from slime_tis.trainer.storage.resumption import check_options


def check_outputs(
    rollout: RolloutConfig, megatron: MegatronConfig, reporting: ReportingConfig, dumps: Mapping[str, str]
) -> None:
    """Whether --output-dir, --save, --save-hf and dumps can be written, and the former belong to this run.

    Args:
        rollout: names files that the run reads.
        megatron: names files that the run reads, and directories that it writes.
        reporting: names the run directory.
        dumps: the first file of each kind of dump, by flag.

    Raises:
        ValueError: one cannot be written, is in use by other files, or would replace an input of the run.
    """
    for flag, directory in (
        ("--output-dir", reporting.output_dir),
        ("--save", megatron.save),
        ("--save-hf", megatron.save_hf),
    ):
        problem = None if directory is None else unwritable(directory)
        if problem is not None:
            raise ValueError(f"{flag} is {quoted_path(directory)} but {problem}; give a directory that can be written.")
    for flag, file in dumps.items():
        problem = "it is a directory" if Path(file).is_dir() else unwritable(Path(file).parent)
        if problem is not None:
            raise ValueError(f"{flag} would write {quoted_path(file)} but {problem}; give a file that can be written.")
        _check_dump_path(flag, Path(file), Path(reporting.output_dir), megatron.save_hf)
        if os.path.lexists(file):
            _check_dump(flag, Path(file))
    foreign = foreign_file(Path(reporting.output_dir))
    if foreign is not None:
        raise ValueError(
            f"--output-dir is {quoted_path(reporting.output_dir)} but its {foreign} is of no run of this program, and "
            "reports would take its place; give another directory."
        )
    _check_save(megatron)
    if megatron.save_hf is not None:
        _check_export(megatron.save_hf, rollout, megatron, reporting)


def check_resumption(megatron: MegatronConfig, options: Mapping[str, Any]) -> None:
    """Whether the newest checkpoint under --load was written with the options that a resumed run has to keep.

    Raises:
        ValueError: one has changed.
    """
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
    """Holds the run's output directories against other runs while it lasts; the main process does so for all.

    Raises:
        ValueError: another run holds one of them or has written to it meanwhile, or it cannot be written.
    """
    locks = {Path(reporting.output_dir).resolve() / LOCK: "--output-dir"}
    if megatron.save is not None:
        locks[Path(megatron.save).resolve() / LOCK] = "--save"
    if megatron.save_hf is not None:
        export = Path(megatron.save_hf).resolve()
        locks[export.with_name(f".{export.name}{LOCK}")] = "--save-hf"
    with held(locks) if main else nullcontext():
        if main:
            _check_save(megatron)  # again, now that no other run can write there
        yield


def _is_inside(inner: Path, outer: Path) -> bool:
    """Whether a path is another one or lies below it."""
    inner = inner.resolve()
    return any(same_path(place, outer) for place in (inner, *inner.parents))


def _check_dump_path(flag: str, file: Path, output_dir: Path, save_hf: str | None) -> None:
    """Refuses a dump among the files of an export or of the run directory, which replace or refuse it later."""
    if file.parts[0].startswith("~"):
        raise ValueError(f"{flag} would write {quoted_path(file)}, but only a shell expands ~; write the directory.")
    if save_hf is not None and _is_inside(file, Path(save_hf)):
        raise ValueError(f"{flag} would write {quoted_path(file)} inside --save-hf, which an export replaces; move it.")
    if any(_is_inside(file, output_dir / name) for name in OWN_NAMES):
        raise ValueError(f"{flag} would write {quoted_path(file)}, a name that the run itself uses; give another name.")


def _check_dump(flag: str, file: Path) -> None:
    """A dump is written over a dump of its kind, and over nothing else."""
    # imported where there is a file: they bring torch, which takes seconds
    if flag == "--save-debug-rollout-data":
        from slime_tis.trainer.data.dump import check_replaceable
    else:
        from slime_tis.analysis.dumps.files import check_replaceable
    try:
        check_replaceable(file)
    except (ValueError, OSError) as error:
        raise ValueError(f"{flag} would write {quoted_path(file)} but {first_line(error)}.") from error


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
    target = Path(save_hf).resolve()
    used = [
        ("--hf-checkpoint", megatron.hf_checkpoint),
        ("--ref-load", megatron.ref_load),
        ("--save", megatron.save),
        ("--load", megatron.load),
        ("--prompt-data", rollout.prompt_data),
        *(("--eval-prompt-data", path) for _, path in rollout.eval_prompt_sets),
        ("the working directory", os.getcwd()),
    ]
    for flag, path in used:
        if path is None:
            continue
        relation = _relation(target, Path(path))
        if relation is not None and not (flag == "the working directory" and relation == "inside"):
            raise _not_its_own(save_hf, relation, flag, path)
    output_dir = Path(reporting.output_dir)
    relation = _relation(target, output_dir)
    if relation is not None and relation != "inside":
        raise _not_its_own(save_hf, relation, "--output-dir", reporting.output_dir)
    if relation == "inside":
        name = next(place for place in (target, *target.parents) if same_path(place.parent, output_dir)).name
        if name in OWN_NAMES:
            raise _not_its_own(save_hf, "inside", f"the run directory's own {name}", str(output_dir / name))
    exports.check_target(target, f"--save-hf is {quoted_path(save_hf)}", "export")


def _relation(target: Path, path: Path) -> str | None:
    """How a target lies to a path that is in use; None where the two have nothing to do with each other."""
    if same_path(target, path):
        return "the same as"
    if _is_inside(target, path):
        return "inside"
    return "above" if _is_inside(path, target) else None


def _not_its_own(save_hf: str, relation: str, flag: str, path: str) -> ValueError:
    return ValueError(
        f"--save-hf is {quoted_path(save_hf)}, which is {relation} {flag} {quoted_path(path)}; an export replaces its "
        "whole directory, so give it one of its own."
    )
