"""Writes log_probs.jsonl: log-probs of both engines for some steps of a run, one sample per line.

The file has the form that any trainer can write for `slime-tis report`, `diagnose` and `what-if`
(docs/dumps.md). Its run is "See the mismatch" of the README: an engine in fp8, whose weights are
updated every third step.

python -m examples.notebooks.save_log_probs runs/stale/dump --steps 30 31 32
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slime_tis.analysis.dumps.readers import read
from slime_tis.analysis.dumps.table import TokenTable

OUT = Path(__file__).with_name("log_probs.jsonl")
DIGITS = 5
"""Decimals of the log-probs: 1e-5 nats is a hundredth of the rounding of fp8."""
TOKEN_COLUMNS = {
    "train_log_probs": "train_log_prob",
    "rollout_log_probs": "rollout_log_prob",
    "loss_mask": "loss_mask",
    "advantages": "advantage",
    "weight_versions": "weight_version",
}
"""Key of a line, and column of the dump."""
SAMPLE_COLUMNS = ("step", "group", "reward")
"""Columns with one value per sample."""


def rows(table: TokenTable, steps: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yields the samples of some steps."""
    for sample in range(len(table)):
        row = {}
        for column in SAMPLE_COLUMNS:
            row[column] = getattr(table, column)[sample].item()
        if row["step"] not in steps:
            continue
        tokens = slice(table.offsets[sample], table.offsets[sample + 1])
        for key, column in TOKEN_COLUMNS.items():
            values = getattr(table, column)[tokens].tolist()
            if isinstance(values[0], float):
                values = [round(value, DIGITS) for value in values]
            row[key] = values
        yield row


def main() -> None:
    """Reads the dump of the command line and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dump")
    parser.add_argument("--steps", type=int, nargs="+", required=True)
    chosen = parser.parse_args()
    with OUT.open("w") as lines:
        for row in rows(read(chosen.dump), chosen.steps):
            lines.write(json.dumps(row, separators=(",", ":")) + "\n")
    print(f"{OUT}: {OUT.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
