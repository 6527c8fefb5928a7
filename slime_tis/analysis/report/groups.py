"""Runs of one configuration with different seeds: how they are grouped, and the spread of their curves."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime_tis.errors import one_line

if TYPE_CHECKING:
    from slime_tis.analysis.report.source import Source

PER_RUN_OPTIONS = (
    *("seed", "rollout_seed", "output_dir", "save", "load", "save_hf", "wandb_dir", "wandb_group"),
    *("dump_details", "save_debug_rollout_data", "save_debug_train_data", "sglang_log_dir", "sglang_weight_dir"),
    "tb_experiment_name",
)
"""Options that differ between runs of one configuration."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that differ only in `PER_RUN_OPTIONS`."""

    name: str
    """Name of a single run, or the options that differ between the groups."""
    sources: tuple[Source, ...]


def group_runs(sources: Sequence[Source]) -> list[Group]:
    """Groups sources by their configuration, in order. A source without a configuration forms a separate group."""
    groups: dict[str, list[Source]] = {}
    for index, source in enumerate(sources):
        options = sorted(map(repr, _shared_options(source).items()))
        groups.setdefault(str(options or index), []).append(source)
    configs = [_shared_options(members[0]) for members in groups.values()]
    names = {name for each in configs for name in each if any(each[name] != other.get(name) for other in configs)}
    pairs = zip(groups.values(), configs, strict=True)
    return [Group(name=_name(members, config, names), sources=tuple(members)) for members, config in pairs]


def spread(curves: Sequence[Mapping[int, float]]) -> tuple[list[int], list[float], list[float], list[float]]:
    """Steps that all curves have, and at each step the median, the lowest and the highest value."""
    steps = sorted(set.intersection(*map(set, curves)))
    columns = [[curve[step] for curve in curves] for step in steps]
    return steps, list(map(statistics.median, columns)), list(map(min, columns)), list(map(max, columns))


def _shared_options(source: Source) -> dict[str, Any]:
    return {name: value for name, value in source.options.items() if name not in PER_RUN_OPTIONS}


def _name(members: Sequence[Source], config: Mapping[str, Any], names: set[str]) -> str:
    if len(members) == 1:
        return members[0].name
    options = ", ".join(f"{name}={value}" for name, value in config.items() if name in names)
    return f"{one_line(options or members[0].name, 60)} ({len(members)} runs)"
