"""The runs of a study: scenarios × corrections × seeds, as command lines of train.py."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import yaml

Curve = Literal["accuracy", "rewards"]
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Study:
    """The files of a study; studies in other directories share this package's code."""

    directory: Path = HERE

    @property
    def common(self) -> Path:
        """What all runs have in common, as a YAML file of train.py."""
        return self.directory / "train.yaml"

    @property
    def results(self) -> Path:
        """The table of all runs."""
        return self.directory / "results.csv"

    @property
    def runs(self) -> Path:
        """Directory of the runs' own directories."""
        return Path("runs/studies") / self.directory.name

    @property
    def page(self) -> Path:
        """The page with the table."""
        return self.directory / "README.md"

    @property
    def picture(self) -> Path:
        """The picture on that page."""
        return self.directory / "results.png"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run."""

    common: Path
    """YAML file of train.py that all runs have in common."""
    scenario: str
    correction: str
    seed: int
    flags: tuple[str, ...]
    """Of train.py, on top of train.yaml and without the seeds."""
    fault: str = ""
    """Fault of the rollout engine, an entry of `faults.FAULTS`."""

    @property
    def program(self) -> list[str]:
        """The program, as Python's arguments; `command` follows."""
        return (
            ["-m", "studies.collapse.faults", self.fault]
            if self.fault
            else [str(ROOT / "train.py")]
        )

    @property
    def key(self) -> tuple[str, str, int]:
        """Identifies the run."""
        return self.scenario, self.correction, self.seed

    @property
    def name(self) -> str:
        """Scenario, correction and seed as a path below the directory of all runs."""
        correction = "_".join(word for word in self.correction.lower().split() if word != "+")
        return f"{self.scenario}/{correction}/seed_{self.seed}"

    def command(self, directory: Path) -> list[str]:
        """Arguments of train.py for this run, written to a directory."""
        seeds = ("--seed", str(self.seed), "--rollout-seed", str(self.seed))
        common = self.common.relative_to(ROOT) if self.common.is_relative_to(ROOT) else self.common
        return [
            "--custom-config-path",
            str(common),
            *self.flags,
            *seeds,
            "--output-dir",
            str(directory),
        ]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Flags of every scenario and correction, by name."""

    common: Path
    """YAML file of train.py that all runs have in common."""
    scenarios: Mapping[str, str]
    corrections: Mapping[str, str]
    only: Mapping[str, Sequence[str]]
    """Scenarios that are run with some of the corrections alone."""
    tasks: Mapping[str, Path] = field(default_factory=dict)
    """YAML files that replace `common` for scenarios named "TASK: NAME"."""
    faults: Mapping[str, str] = field(default_factory=dict)
    """Fault of the rollout engine in a scenario, an entry of `faults.FAULTS`."""
    draws: Curve = "accuracy"
    """What the study's picture shows over the steps, a column of results.csv."""

    @classmethod
    def load(cls, study: Study = Study()) -> Grid:  # frozen
        """Reads the study's grid.yaml."""
        text = (study.directory / "grid.yaml").read_text(encoding="utf-8")
        grid = {"only": {}, "tasks": {}} | yaml.safe_load(text)
        tasks = {task: ROOT / path for task, path in grid.pop("tasks").items()}
        return cls(**grid, common=study.common, tasks=tasks)

    def cases(self, seeds: Sequence[int], more: Sequence[str] = ()) -> list[Case]:
        """All runs, one seed after another, so that an interrupted study has whole seeds.

        Args:
            seeds: of the training and of the sampling.
            more: flags for every run.
        """
        return [
            Case(
                common=self.tasks.get(scenario.partition(":")[0], self.common),
                scenario=scenario,
                correction=correction,
                seed=seed,
                flags=(*shlex.split(circumstances), *shlex.split(remedy), *more),
                fault=self.faults.get(scenario, ""),
            )
            for seed in seeds
            for scenario, circumstances in self.scenarios.items()
            for correction, remedy in self.corrections.items()
            if correction in self.only.get(scenario, self.corrections)
        ]

    def position(self, key: tuple[str, str, int]) -> tuple[int, int, int]:
        """Returns the sort key of a run: scenario, correction, seed; unknown names come last."""
        scenario, correction, seed = key
        places = [
            [*names].index(name) if name in names else len(names)
            for name, names in ((scenario, self.scenarios), (correction, self.corrections))
        ]
        return places[0], places[1], seed

    def chosen(self, scenarios: Sequence[str] | None, corrections: Sequence[str] | None) -> Grid:
        """The part of the grid that is named; None for all.

        Raises:
            ValueError: a name is not in the grid.
        """
        return replace(
            self,
            scenarios=_chosen("scenario", self.scenarios, scenarios),
            corrections=_chosen("correction", self.corrections, corrections),
        )


def _chosen(
    kind: str, all_of_them: Mapping[str, str], names: Sequence[str] | None
) -> dict[str, str]:
    if names is None:
        return dict(all_of_them)
    for name in names:
        if name not in all_of_them:
            raise ValueError(
                f"there is no {kind} {name!r} in grid.yaml; it has"
                f" {', '.join(map(repr, all_of_them))}."
            )
    return {name: all_of_them[name] for name in names}
