"""What `--check-weight-sync` catches: planted faults, and good updates, while a model trains.

    python -m benchmarks.weight_sync_faults --plant-at 1 50 -- \
        --custom-config-path examples/smollm2_reasoning_gym/train.yaml --num-rollout 50 ...

Everything after `--` goes to train.py. After each of the run's updates local engines of several
precisions are given the new weights and checked; at the updates that --plant-at names they are then
given wrong ones.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from slime_tis.main import train as run_train
from slime_tis.trainer import weight_sync
from slime_tis.trainer.configs.rollout import Rounding
from slime_tis.trainer.engines.local.load_model import load_tokenizer
from slime_tis.trainer.engines.local.local_engine import LocalEngine
from slime_tis.trainer.engines.rollout_engine import RolloutEngine, SentRows
from slime_tis.trainer.engines.weight_rounding import Precision, WeightRounder
from slime_tis.trainer.engines.weight_updates import WeightUpdates
from slime_tis.trainer.megatron.training_engine import TrainingEngine
from slime_tis.trainer.weight_sync import MIN_RECEIVED, SyncCheck, check_weight_sync

ENGINES: tuple[tuple[Precision, Rounding], ...] = (
    ("fp32", "nearest"),
    ("bf16", "nearest"),
    ("bf16", "stochastic"),
    ("int8", "nearest"),
    ("fp8", "nearest"),
)
"""Precision and rounding of updates of the engines that are checked."""
NAMES = {one[0] if one[1] == "nearest" else " ".join(one): one for one in ENGINES}
Weights = dict[str, Tensor]
QUERIES = "model.layers.0.self_attn.q_proj.weight"


@dataclass(frozen=True, kw_only=True)
class History:
    """The weights that were sent with the last updates, newest last, and the number of layers."""

    weights: list[Weights]
    layers: int


def no_update(history: History) -> Weights:
    """The weights before."""
    return history.weights[-2]


def missing_layer(history: History) -> Weights:
    """One layer in the middle is that before."""
    return _stale(history, {history.layers // 2})


def half_stale(history: History) -> Weights:
    """Every second layer is that before."""
    return _stale(history, set(range(0, history.layers, 2)))


def swapped(history: History) -> Weights:
    """The query matrices of the first two layers are in each other's place."""
    new = history.weights[-1]
    first, second = (f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1))
    return {**new, first: new[second], second: new[first]}


def flipped_head(history: History) -> Weights:
    """The sign of an eighth of the rows of one query matrix is wrong."""
    weight = history.weights[-1][QUERIES].clone()
    weight[len(weight) // 8 : len(weight) // 4] *= -1
    return {**history.weights[-1], QUERIES: weight}


def stale_quarter(history: History) -> Weights:
    """The third quarter of one query matrix is that before."""
    weight = history.weights[-1][QUERIES].clone()
    quarter = slice(len(weight) // 2, len(weight) * 3 // 4)
    weight[quarter] = history.weights[-2][QUERIES][quarter]
    return {**history.weights[-1], QUERIES: weight}


def _stale(history: History, layers: set[int]) -> Weights:
    new, before = history.weights[-1], history.weights[-2]
    parts = tuple(f"model.layers.{layer}." for layer in layers)
    return {
        name: before[name] if name.startswith(parts) else tensor for name, tensor in new.items()
    }


FAULTS: dict[str, Callable[[History], Weights]] = {
    "no update": no_update,
    "one layer missing": missing_layer,
    "half the layers stale": half_stale,
    "two tensors swapped": swapped,
    "a head's sign flipped": flipped_head,
    "a quarter of a matrix stale": stale_quarter,
    "one update late": no_update,
}
"""Faulty replacements of the newest weights. The late engine already lagged by one update."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One update of one engine."""

    engine: str
    """Its precision, and its rounding if it is not to nearest."""
    version: int
    fault: str
    """Empty for a good update."""
    wrong_tensors: int
    """Tensors in use that differ from the sent ones."""
    log_probs: str
    """Finding of the check of log-probs alone: gap, movement, or nothing."""
    metrics: dict[str, float]
    """Of the update that should have arrived, and of the check where it finds nothing."""

    @property
    def is_judged_by_movement(self) -> bool:
        """Whether rounding left enough of the update for the probe to have to move."""
        return self.metrics.get("rollout/update_received", 1.0) >= MIN_RECEIVED


@dataclass(kw_only=True)
class Lane:
    """A rollout engine with the state of its check."""

    engine: LocalEngine
    updates: WeightUpdates
    check: SyncCheck
    sent: list[Weights] = field(default_factory=list)
    """What it was sent with the last three updates."""


class WithoutTensors:
    """A rollout engine into whose weights nobody can look."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.weight_version = engine.weight_version
        self.prompt_log_probs = engine.prompt_log_probs
        self.cached_tokens = engine.cached_tokens

    def wrong_weights(self, sent: Mapping[str, SentRows]) -> dict[str, list[str]]:
        """Nothing."""
        return {}


@dataclass(kw_only=True)
class Planter:
    """Replaces `check_weight_sync` in a run, and also checks additional engines."""

    checkpoint: str
    plant_at: Sequence[int]
    engines: Sequence[str] = tuple(NAMES)
    """The engines that are checked besides the run's own."""
    rows: list[Row] = field(default_factory=list)
    lanes: dict[str, Lane] = field(default_factory=dict)

    def __call__(
        self,
        engine: TrainingEngine,
        sampler: RolloutEngine,
        check: SyncCheck,
        updates: WeightUpdates,
    ) -> dict[str, float]:
        """Checks the run's own engine, then the others."""
        found = check_weight_sync(engine, sampler, check, updates)
        version = sampler.weight_version
        if not self.lanes:
            self.lanes = {name: self._lane(*NAMES[name], check) for name in self.engines}
        new = {name: tensor.clone() for name, tensor in engine.named_hf_tensors()}
        for name, lane in self.lanes.items():
            before = copy(lane.check)
            sent = dict(lane.updates.source(new.items, version)())
            lane.sent = [*lane.sent[-2:], sent]
            lane.engine.update_weights(sent.items, version)
            self._record(engine, lane, lane.check, name, "")
            if version in self.plant_at:
                self._plant(engine, lane, before, name)
                lane.engine.update_weights(sent.items, version)
        return found

    def _lane(self, precision: Precision, rounding: Rounding, check: SyncCheck) -> Lane:
        engine = LocalEngine(self.checkpoint, load_tokenizer(self.checkpoint), precision=precision)
        updates = WeightUpdates(
            WeightRounder(rounding, 0), engine.weight_precision, samples_all=True
        )
        return Lane(
            engine=engine,
            updates=updates,
            check=SyncCheck(probe=check.probe, bound=check.bound, trains_in=check.trains_in),
        )

    def _plant(self, engine: TrainingEngine, lane: Lane, before: SyncCheck, name: str) -> None:
        version = lane.engine.weight_version
        layers = 1 + max(
            int(one.split(".")[2]) for one in lane.sent[-1] if one.startswith("model.layers.")
        )
        history = History(weights=lane.sent, layers=layers)
        for title, fault in FAULTS.items():
            check = copy(before)
            if title == "one update late":
                if len(lane.sent) < 3:
                    continue
                lane.engine.update_weights(lane.sent[-3].items, version)
                check = _as_after(lane, before)
            lane.engine.update_weights(fault(history).items, version)
            self._record(engine, lane, check, name, title)

    def _record(
        self, engine: TrainingEngine, lane: Lane, check: SyncCheck, name: str, fault: str
    ) -> None:
        wrong = lane.engine.wrong_weights(lane.updates.sent_rows())
        metrics, log_probs = lane.updates.metrics(), "nothing"
        try:
            metrics |= check_weight_sync(engine, WithoutTensors(lane.engine), check, lane.updates)  # type: ignore[arg-type]
        except ValueError as error:
            log_probs = "movement" if "moved by" in str(error) else "gap"
        self.rows.append(
            Row(
                engine=name,
                version=lane.engine.weight_version,
                fault=fault,
                wrong_tensors=sum(map(len, wrong.values())),
                log_probs=log_probs,
                metrics=metrics,
            )
        )


def _as_after(lane: Lane, check: SyncCheck) -> SyncCheck:
    """The check of an engine whose present weights were checked at the update before."""
    late = copy(check)
    ((name, log_probs),) = lane.engine.prompt_log_probs(check.probe).items()
    received_L = check.received_L[name]
    late.received_L = {name: received_L.new_tensor(log_probs)}
    return late


def table(rows: Iterable[Row]) -> list[str]:
    """Markdown: per fault and engine the tensors that differ and what the log-probs alone show."""
    rows = list(rows)
    engines = list(dict.fromkeys(row.engine for row in rows))
    lines = [
        "| weights that arrived | " + " | ".join(engines) + " |",
        "|---" * (len(engines) + 1) + "|",
    ]
    for fault in dict.fromkeys(row.fault for row in rows):
        cells = []
        for engine in engines:
            found = [row for row in rows if (row.fault, row.engine) == (fault, engine)]
            tensors = sum(row.wrong_tensors > 0 for row in found)
            seen = sum(row.log_probs != "nothing" for row in found)
            ways = "/".join(sorted({row.log_probs for row in found} - {"nothing"}))
            cells.append(f"{tensors} / {seen} of {len(found)}{f' ({ways})' if ways else ''}")
        lines.append(f"| {fault or 'the new ones'} | " + " | ".join(cells) + " |")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the run, and prints the table; rows go to weight_sync_faults.jsonl in its directory."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    place = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hf-checkpoint", required=True)
    parser.add_argument(
        "--plant-at", type=int, nargs="+", default=[2], help="updates at which faults are planted"
    )
    parser.add_argument(
        "--engines", nargs="+", choices=NAMES, default=list(NAMES), help="engines that are checked"
    )
    parser.add_argument("--out", type=Path, required=True, help="file of rows, JSON lines")
    given, flags = parser.parse_args(arguments[:place]), arguments[place + 1 :]
    planter = Planter(
        checkpoint=given.hf_checkpoint, plant_at=given.plant_at, engines=given.engines
    )
    weight_sync.check_weight_sync = planter
    status = run_train(["--hf-checkpoint", given.hf_checkpoint, "--check-weight-sync", *flags])
    with open(given.out, "w") as lines:
        lines.writelines(json.dumps(vars(row)) + "\n" for row in planter.rows)
    print("\n".join(table(planter.rows)))
    return status


if __name__ == "__main__":
    sys.exit(main())
