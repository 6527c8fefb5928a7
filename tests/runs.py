"""Runs of train.py on a tiny random model, in this process or under torchrun, for tests that look at the figures."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
REWARD = """
def reward(args, sample):
    return len(sample.response_ids) % 3 + sample.response_ids[0] / 50
"""


def make_task(directory: Path, family: str = "qwen3", prompts: int = 16, **sizes: Any) -> list[str]:
    """A checkpoint, prompts of several lengths and a reward without ties; the flags that train on them."""
    from tests.checkpoints import make_checkpoint  # slow to import, and this file is part of every session

    make_checkpoint(directory / "model", family, **sizes)
    chance = random.Random(0)
    rows = ["".join(chance.choices("0123456789", k=chance.randint(3, 12))) for _ in range(prompts)]
    with open(directory / "train.jsonl", "w") as lines:
        lines.writelines(json.dumps({"prompt": row + ">", "label": "".join(sorted(row))}) + "\n" for row in rows)
    (directory / "reward.py").write_text(REWARD)
    return [
        *("--hf-checkpoint", str(directory / "model")),
        *("--prompt-data", str(directory / "train.jsonl"), "--input-key", "prompt", "--label-key", "label"),
        *("--custom-rm-path", f"{directory / 'reward.py'}:reward"),
        *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "10"),
        *("--num-rollout", "3", "--lr", "1e-3", "--rollout-precision", "int8", "--no-progress"),
        *("--num-threads", "1"),  # the same sums in the same order, in this process and in others
    ]


def run_here(flags: Sequence[str], output: Path) -> list[dict[str, Any]]:
    """Runs train.py in this process and returns the rows of its metrics.jsonl."""
    import train

    assert train.main([*flags, "--output-dir", str(output)]) == 0
    return read_metrics(output)


def run_apart(flags: Sequence[str], output: Path, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """Runs train.py in processes of its own."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, "train.py", *flags, "--output-dir", str(output)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


def read_metrics(output: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def training_figures(row: dict[str, Any]) -> dict[str, float]:
    """The figures of a row that do not depend on the clock."""
    return {name: value for name, value in row.items() if name.startswith(("train/", "rollout/", "eval/"))}
