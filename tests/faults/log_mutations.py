"""Damaged logs: files of each format, and mutations of them."""

import json
import random
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

STEPS = 30
METRIC = "policy/rollout_train_logprobs_abs_diff_mean"
VALUES = [0.001 * (step + 1) for step in range(STEPS)]
HOSTILE_VALUES = (
    *(
        "nan",
        "inf",
        "-inf",
        "Infinity",
        "-1",
        "0",
        "1e308",
        "-1e308",
        "1e400",
        "1e-400",
        "",
        " ",
        "null",
        "true",
        "x",
    ),
    *(
        "9" * 400,
        "9" * 5000,
        "-" + "9" * 400,
        "[" * 5000,
        '"',
        "\x00",
        "\x1b[2J",
        "\u0664",
        "0x1f",
        "1_0",
        "1,1",
        "\r\n",
    ),
)
"""Texts that take the place of a number."""


def csv_file(path: Path) -> None:
    rows = [f"{step},{value},1.5,text" for step, value in enumerate(VALUES)]
    path.write_text("\n".join([f"step,{METRIC},loss,name", *rows]) + "\n")


def wandb_chart(path: Path) -> None:
    rows = [f'"{step}","{value}","9","9"' for step, value in enumerate(VALUES)]
    name = f"run-1 - {METRIC}"
    path.write_text(
        "\n".join([f'"Step","{name}","{name}__MIN","{name}__MAX"', *rows]) + "\n",
        encoding="utf-8-sig",
    )


def trainer_state(path: Path) -> None:
    history = [{"step": step, "loss": 1.5, METRIC: value} for step, value in enumerate(VALUES)]
    path.write_text(json.dumps({"global_step": STEPS, "log_history": history}, indent=2))


def console(path: Path) -> None:
    lines = [
        f"(TaskRunner pid=7) step:{step} - training/rollout_probs_diff_mean:{value} -"
        f" {METRIC}:np.float64({value})"
        for step, value in enumerate(VALUES)
    ]
    path.write_text("\n".join(lines) + "\n")


def tensorboard(path: Path) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    content = b""
    for step, value in enumerate(VALUES):
        summary = Summary(value=[Summary.Value(tag=METRIC, simple_value=value)])
        data = Event(step=step, wall_time=1.0, summary=summary).SerializeToString()
        length = struct.pack("<Q", len(data))
        content += (
            length
            + struct.pack("<I", masked_crc32c(length))
            + data
            + struct.pack("<I", masked_crc32c(data))
        )
    path.write_bytes(content)


FRAGMENT_KINDS = {(True, True): 1, (True, False): 2, (False, False): 3, (False, True): 4}
"""LevelDB's type of a fragment that is the first, and the last, of its record."""


def leveldb(records: list[bytes]) -> bytes:
    """A W&B file with these records, each in fragments that do not cross a block of 32 KiB."""
    content = b":W&B\xe1\xbe\x00"
    for record in records:
        is_first = True
        while True:
            rest = 32_768 - len(content) % 32_768
            if rest < 7:
                content += bytes(rest)
                rest = 32_768
            part = record[: rest - 7]
            record = record[rest - 7 :]
            kind = FRAGMENT_KINDS[is_first, not record]
            checksum = zlib.crc32(part, zlib.crc32(bytes([kind])))
            content += struct.pack("<IHB", checksum, len(part), kind) + part
            is_first = False
            if not record:
                break
    return content


def wandb(path: Path) -> None:
    """Needs the package wandb."""
    from wandb.proto.wandb_internal_pb2 import HistoryItem, HistoryRecord, Record

    records = []
    for step, value in enumerate(VALUES):
        numbers = {"_step": step, METRIC: value, "note": "x" * (6_000 if step % 5 == 0 else 10)}
        items = [
            HistoryItem(key=name, value_json=json.dumps(each)) for name, each in numbers.items()
        ]
        records.append(Record(history=HistoryRecord(item=items)).SerializeToString())
    path.write_bytes(leveldb(records))


FORMATS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "CSV": ("log.csv", csv_file),
    "W&B chart": ("chart.csv", wandb_chart),
    "TRL": ("trainer_state.json", trainer_state),
    "verl": ("train.log", console),
    "TensorBoard": ("events.out.tfevents.1", tensorboard),
    "W&B": ("run-1.wandb", wandb),
}
"""Name and writer of the file of each format."""
CHECKSUMMED = ("TensorBoard", "W&B")


def flipped(content: bytes, chance: random.Random) -> bytes:
    """One to four flipped bits."""
    changed = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def truncated(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content))]


def spliced(content: bytes, chance: random.Random) -> bytes:
    """A piece is repeated, removed or replaced by random bytes."""
    start = chance.randrange(len(content))
    piece = content[start : start + chance.randint(1, 200)]
    random_bytes = chance.randbytes(len(piece))
    replacement = chance.choice([piece * 2, b"", random_bytes, piece + random_bytes])
    return content[:start] + replacement + content[start + len(piece) :]


def with_hostile_values(content: bytes, chance: random.Random) -> bytes:
    """One to five words of a text, most of which are numbers, are replaced."""
    words = re.split(rb"[\s,:]+", content)
    for _ in range(chance.randint(1, 5)):
        content = content.replace(chance.choice(words), chance.choice(HOSTILE_VALUES).encode(), 1)
    return content


MUTATIONS = {
    "flips": flipped,
    "truncation": truncated,
    "splices": spliced,
    "values": with_hostile_values,
}
