"""Damaged logs in every command: a verdict or one message, no traceback, no damaged number.

LOG_MUTATIONS=200 runs 200 mutations per kind and format, 3,400 in all; the default runs fewer.
"""

import importlib.util
import io
import os
import random
from pathlib import Path

import pytest

from slime_tis.analysis.logs.log_formats import wandb_records
from slime_tis.analysis.logs.read_log import read_log
from slime_tis.main import main
from tests.faults.log_mutations import (
    CHECKSUMMED,
    FORMATS,
    METRIC,
    MUTATIONS,
    VALUES,
    leveldb,
    with_hostile_values,
)

COUNT = int(os.environ.get("LOG_MUTATIONS", "30"))
"""Mutations per format and kind."""
LONGEST_MESSAGE = 700
"""Characters."""
ABS = "train/train_rollout_logprob_abs_diff"
HAS_WANDB = importlib.util.find_spec("wandb") is not None


def skip_without_wandb(name: str) -> None:
    if name == "W&B" and not HAS_WANDB:
        pytest.skip("the package wandb is not installed")


def kinds_of(name: str) -> list[str]:
    """Mutations of a format; values are replaced in text files."""
    return [kind for kind in MUTATIONS if kind != "values" or name not in CHECKSUMMED]


CASES: list[tuple[str, str]] = []
for format_name in FORMATS:
    CASES += [(format_name, kind) for kind in kinds_of(format_name)]


@pytest.mark.parametrize(("name", "kind"), CASES, ids=[f"{name}, {kind}" for name, kind in CASES])
def test_a_damaged_log_has_a_verdict_or_one_message(
    name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    skip_without_wandb(name)
    file_name, write = FORMATS[name]
    path = tmp_path / file_name
    write(path)
    good = path.read_bytes()
    chance = random.Random(f"{name} {kind}")
    for number in range(COUNT):
        path.write_bytes(MUTATIONS[kind](good, chance))
        command = ["diagnose", "diagnose", "report", "recommend"][number % 4]
        target = tmp_path if number % 3 == 0 else path
        status = main([command, str(target)])
        captured = capsys.readouterr()
        assert status in (0, 2), f"mutation {number}: {captured.err}"
        message = captured.err.strip()
        is_short = len(message) <= LONGEST_MESSAGE and message.isprintable()
        assert status == 0 or (is_short and message.endswith(".")), (
            f"mutation {number}: {message[:500]}"
        )


@pytest.mark.parametrize("name", CHECKSUMMED)
def test_damaged_numbers_are_not_read(name: str, tmp_path: Path) -> None:
    skip_without_wandb(name)
    file_name, write = FORMATS[name]
    path = tmp_path / file_name
    write(path)
    good = path.read_bytes()
    chance = random.Random(name)
    for number in range(COUNT):
        path.write_bytes(MUTATIONS["flips"](good, chance))
        try:
            log = read_log(path)
        except ValueError:
            continue
        values = [] if log is None else [row[ABS] for row in log.rows]
        assert values == pytest.approx(VALUES[: len(values)]), f"mutation {number}"


@pytest.mark.parametrize("size", [10, 32_754, 32_755, 32_761, 40_000, 100_000])
def test_records_may_end_anywhere_in_a_block(size: int) -> None:
    records = [b"a" * size, b"b" * 3, b"c" * size]
    assert list(wandb_records(io.BytesIO(leveldb(records)))) == records


@pytest.mark.parametrize("place", [7, 11, 13, 14, 20, 32_768 + 3])
def test_a_flipped_bit_in_a_record_is_found(place: int) -> None:
    content = bytearray(leveldb([b"a" * 50_000, b"b" * 3]))
    content[place] ^= 1
    with pytest.raises(ValueError, match=r"the record at byte \d+ is (damaged|out of order)"):
        list(wandb_records(io.BytesIO(content)))


def test_hostile_values_reach_the_parser() -> None:
    """The mutation changes numbers; else the test above would test nothing."""
    content = f"step,{METRIC}\n1,0.5\n2,0.25\n".encode()
    changed = {with_hostile_values(content, random.Random(seed)) for seed in range(20)}
    assert len(changed) > 10
