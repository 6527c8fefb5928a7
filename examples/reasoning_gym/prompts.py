"""Writes prompts of reasoning-gym's datasets: train.jsonl and eval.jsonl, without common questions.

    python -m examples.reasoning_gym.prompts --list
    python -m examples.reasoning_gym.prompts --out data/gym --train 1024 --held-out 64 \
        'chain_sum?max_terms=2&max_digits=1&answer=number' 'leg_counting?level=0&weight=2'

A dataset is given as NAME?KEY=VALUE&…: fields of its configuration, and

    level     of its curriculum; further fields override the level's settings
    weight    its share of the rows, in proportion to the others' (default 1)
    answer    how a response is read: tag, number, word or text
"""

import argparse
import dataclasses
import itertools
import json
import os
import random
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import reasoning_gym
from reasoning_gym.factory import CURRICULA, DATASETS
from reasoning_gym.utils import SYSTEM_PROMPTS

from examples.reasoning_gym.reward import EXECUTES, READERS, checked, decoded, encoded

COMPLETE = "complete.json"
SYSTEM = {"tag": SYSTEM_PROMPTS["default"].strip()} | dict.fromkeys(
    ("number", "word", "text"), "Reply with the answer only."
)
"""System message for each way of reading an answer."""
REPEATS = 500
"""Questions in a row that were all generated before, after which a dataset is taken to have no
others."""
HELD_OUT_SHARE = 5
"""At most one of this number of questions is held out if a dataset has few."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A dataset of the mixture."""

    name: str
    """Its name in reasoning-gym."""
    config: dict[str, Any]
    """Fields of its configuration that are not defaults."""
    weight: float = 1.0
    """Its share of the rows, relative to the other datasets."""
    answer: str = "tag"
    """How a response is read, one of `READERS`."""


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "datasets", nargs="*", metavar="NAME?KEY=VALUE&…", help="datasets with fields of theirs"
    )
    parser.add_argument("--out", type=Path, help="directory to make")
    parser.add_argument(
        "--train", type=int, default=1024, help="rows of train.jsonl (default 1024)"
    )
    parser.add_argument("--held-out", type=int, default=64, help="rows of eval.jsonl (default 64)")
    parser.add_argument("--level", type=int, help="curriculum level of the datasets that give none")
    parser.add_argument(
        "--answer", choices=READERS, default="tag", help="how responses are read (default tag)"
    )
    parser.add_argument("--system", help="system message, instead of one that fits --answer")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the questions and of their order (default 0)"
    )
    parser.add_argument(
        "--list", action="store_true", help="list the datasets, their levels and fields"
    )
    options = parser.parse_args(argv)
    if options.list:
        print("\n".join(listed()))
        return 0
    if not options.datasets or options.out is None:
        parser.error("--out and at least one dataset are needed; --list shows the datasets.")
    if options.train < 1 or options.held_out < 1:
        parser.error("--train and --held-out must be at least 1.")
    try:
        specs = [
            parse_spec(text, level=options.level, answer=options.answer)
            for text in options.datasets
        ]
        print(
            write(
                options.out,
                specs,
                options.train,
                options.held_out,
                seed=options.seed,
                system=options.system,
            )
        )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def listed() -> list[str]:
    """One line per dataset: name, levels, fields with their defaults."""
    lines = []
    for name, (_, config_class) in sorted(DATASETS.items()):
        if name == "composite":
            continue
        fields = [
            (
                f"{field.name}={field.default!r}"
                if field.default is not dataclasses.MISSING
                else field.name
            )
            for field in dataclasses.fields(config_class)
            if field.name not in ("seed", "size")
        ]
        levels = f"levels 0 to {top_level(name)}" if name in CURRICULA else "no levels"
        lines.append(
            f"{name}: {f'not offered, {EXECUTES[name]}' if name in EXECUTES else levels};"
            f" {', '.join(fields)}"
        )
    return lines


def parse_spec(text: str, *, level: int | None = None, answer: str = "tag") -> Spec:
    """A dataset from its text on the command line.

    Args:
        text: NAME?KEY=VALUE&…; a value is JSON, or else a string.
        level: Of the curriculum, where the text gives none; None takes the dataset's defaults.
        answer: One of `READERS`, where the text gives none.

    Raises:
        ValueError: No such dataset, field, level or reader, or a configuration that the dataset
            refuses.
    """
    name, _, query = text.partition("?")
    checked(name)
    fields: dict[str, Any] = {}
    for part in filter(None, query.split("&")):
        key, equals, value = part.partition("=")
        if not equals or key in fields:
            raise ValueError(f"{text!r} has {part!r} where KEY=VALUE with a new key is needed.")
        fields[key] = _value(value)
    level, weight, answer = (
        fields.pop("level", level),
        fields.pop("weight", 1.0),
        fields.pop("answer", answer),
    )
    if answer not in READERS:
        raise ValueError(
            f"{text!r} has answer {answer!r}, but must be one of {', '.join(READERS)}."
        )
    if (
        isinstance(weight, bool)
        or not isinstance(weight, (int, float))
        or not 0 < weight < float("inf")
    ):
        raise ValueError(f"{text!r} has weight {weight!r}, but must be a number above 0.")
    known = [
        field.name
        for field in dataclasses.fields(DATASETS[name][1])
        if field.name not in ("seed", "size")
    ]
    unknown = [key for key in fields if key not in known]
    if unknown:
        raise ValueError(
            f"{name} has no field {unknown[0]!r}; it has {', '.join(known)}, and level, weight and"
            " answer."
        )
    config = ({} if level is None else level_config(name, level)) | fields
    make(name, config, seed=0, size=1)
    return Spec(name=name, config=config, weight=float(weight), answer=answer)


def level_config(name: str, level: int) -> dict[str, Any]:
    """The fields that a level of a dataset's curriculum sets: ranges reach from level 0 to it.

    Raises:
        ValueError: The dataset has no curriculum, or not that level.
    """
    if name not in CURRICULA:
        raise ValueError(f"{name} has no curriculum; remove level and set its fields.")
    if type(level) is not int or not 0 <= level <= top_level(name):
        raise ValueError(f"{name} has the levels 0 to {top_level(name)}, but level is {level!r}.")
    curriculum = CURRICULA[name]()
    curriculum.set_global_level(level)
    found, default = curriculum.generate_configuration(), DATASETS[name][1]()
    values = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    return {key: value for key, value in values.items() if value != getattr(default, key)}


def top_level(name: str) -> int:
    """The highest level of any attribute of a dataset's curriculum."""
    return max(len(attribute.levels) for attribute in CURRICULA[name]().attributes.values()) - 1


def make(name: str, config: dict[str, Any], *, seed: int, size: int) -> Any:
    """A dataset of reasoning-gym.

    Raises:
        ValueError: It refuses the configuration.
    """
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **config)
    except (AssertionError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{name} refuses {json.dumps(encoded(config), default=str)}: {error}."
        ) from error


def write(
    out: Path,
    specs: list[Spec],
    train: int,
    held_out: int,
    *,
    seed: int = 0,
    system: str | None = None,
) -> str:
    """Writes train.jsonl, eval.jsonl and complete.json to a new directory, all or nothing.

    Returns the text to print.

    Args:
        out: Directory to make. One that was written with the same arguments is left as it is.
        specs: Datasets of the mixture.
        train: Rows of train.jsonl. Rows of a dataset with too few questions are repeated, so that
            weights hold.
        held_out: Rows of eval.jsonl, all different, at most a fifth of the questions where a
            dataset has few.
        seed: Of the questions and of their order.
        system: System message; None takes `SYSTEM`'s.

    Raises:
        ValueError: `out` has something else in it, or a dataset cannot be written.
    """
    settings = {
        "datasets": [encoded(dataclasses.asdict(spec)) for spec in specs],
        **{"train": train, "held_out": held_out, "seed": seed, "system": system},
    }
    if (out / COMPLETE).is_file():
        if json.loads((out / COMPLETE).read_text())["settings"] == settings:
            return f"{out} is complete already."
        raise ValueError(
            f"{out} was written with other arguments; remove it or choose another --out."
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(
            f"{out} exists and is not prompts of ours; remove it or choose another --out."
        )
    shares = zip(specs, split(train, specs), split(held_out, specs), strict=True)
    seen: set[str] = set()
    rows: dict[str, list[dict[str, Any]]] = {"train": [], "eval": []}
    lines = []
    for spec, train_rows, held_out_rows in shares:
        entries = questions(spec, train_rows + held_out_rows, seen, seed)
        few = len(entries) < train_rows + held_out_rows
        cut = min(held_out_rows, len(entries) // HELD_OUT_SHARE) if few else held_out_rows
        made = [row(spec, entry, system) for entry in entries]
        distinct = made[cut:]
        if not distinct:
            raise ValueError(
                f"{spec.name} has no question that the datasets before it did not have."
            )
        rows["eval"] += made[:cut]
        rows["train"] += [distinct[place % len(distinct)] for place in range(train_rows)]
        lines.append(
            f"  {spec.name}: {train_rows} training rows of {min(train_rows, len(distinct))}"
            f" questions, {cut} held out"
        )
    for each in rows.values():
        random.Random(seed).shuffle(each)
    if not rows["eval"]:
        raise ValueError(
            f"the datasets have fewer than {HELD_OUT_SHARE} questions each; none can be held out."
        )
    _write_directory(out, rows, settings)
    return "\n".join(
        [f"{out}: {len(rows['train'])} training rows, {len(rows['eval'])} held out", *lines]
    )


def split(total: int, specs: list[Spec]) -> list[int]:
    """Rows of each dataset: a number in proportion to the weights, at least one each."""
    whole = sum(spec.weight for spec in specs)
    bounds, passed = [0], 0.0
    for spec in specs:
        passed += spec.weight
        bounds.append(round(total * passed / whole))
    return [max(end - start, 1) for start, end in itertools.pairwise(bounds)]


def questions(spec: Spec, wanted: int, seen: set[str], seed: int) -> list[dict[str, Any]]:
    """Returns up to `wanted` entries of a dataset with new questions.

    reasoning-gym draws entry i of a dataset from `seed + i`: two seeds that are close have entries
    in common, so that training and held-out questions are distinguished by their text.
    """
    dataset = make(spec.name, spec.config, seed=seed, size=100 * wanted + REPEATS)
    entries: list[dict[str, Any]] = []
    repeated = 0
    for place in range(len(dataset)):
        entry = dataset[place]
        repeated += 1
        if entry["question"] not in seen:
            seen.add(entry["question"])
            entries.append(entry)
            repeated = 0
        if len(entries) == wanted or repeated == REPEATS:
            break
    return entries


def row(spec: Spec, entry: dict[str, Any], system: str | None) -> dict[str, Any]:
    """A row of a prompt file.

    Raises:
        ValueError: The entry is not the same after a way through JSON.
    """
    stored = encoded(entry)
    try:
        same = decoded(json.loads(json.dumps(stored, allow_nan=False))) == entry
    except (TypeError, ValueError):
        same = False
    if not same:
        raise ValueError(f"{spec.name} has entries that JSON cannot hold.")
    messages = [
        {"role": "system", "content": system or SYSTEM[spec.answer]},
        {"role": "user", "content": entry["question"]},
    ]
    metadata = {
        "dataset": spec.name,
        "config": encoded(spec.config),
        "entry": stored,
        "answer": spec.answer,
    }
    return {"prompt": messages, "label": entry["answer"], "metadata": metadata}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _write_directory(
    out: Path, rows: dict[str, list[dict[str, Any]]], settings: dict[str, Any]
) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    try:
        for name, each in rows.items():
            (unfinished / f"{name}.jsonl").write_text(
                "".join(json.dumps(one) + "\n" for one in each)
            )
        complete = {"settings": settings, "rows": {name: len(each) for name, each in rows.items()}}
        (unfinished / COMPLETE).write_text(json.dumps(complete, indent=2) + "\n")
        unfinished.chmod(0o755)  # mkdtemp's directories are closed to others
        os.rename(unfinished, out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
