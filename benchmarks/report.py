"""What a report costs: CPU seconds and memory to write it, and how long its page takes to open.

    python -m benchmarks.report DIRECTORY [MILLIONS] [PAGE …]

Writes a run of 500 steps whose dumps have 0.1 or MILLIONS million tokens below DIRECTORY, if it is
missing, and the report on it. Chromium opens the page five times, alternating with the PAGEs, such
as another version's.
"""

import json
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from slime_tis.analysis.dumps.files import write
from slime_tis.analysis.dumps.table import TokenTable, offsets_of

STEPS, LENGTH, PROMPT = 500, 200, 64


def main(directory: Path, millions: float, others: Sequence[Path]) -> None:
    run = directory / f"report_{millions:g}"
    if not (run / "metrics.jsonl").exists():
        write_run(run, int(millions * 1e6 / STEPS / LENGTH))
    from slime_tis.main import main as slime_tis

    begun = time.process_time()
    assert slime_tis(["report", str(run)]) == 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{millions:g} million tokens: {time.process_time() - begun:.1f} s CPU, imports included,"
        f" peak {peak:.2f} GiB"
    )
    open_pages([run / "report.html", *others])


def write_run(run: Path, samples: int) -> None:
    """A run of 500 steps of some samples each."""
    for step in range(STEPS):
        write(run / "dumps" / f"{step}.parquet", tokens_of(step, samples))
    rows = [
        {"step": i, "train/mismatch_k3_kl": 1e-3, "train/grad_norm": 1 + i / STEPS}
        for i in range(STEPS)
    ]
    (run / "config.yaml").write_text(
        f"save_debug_train_data: {run.resolve()}/dumps/{{rollout_id}}.parquet\n"
    )
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def tokens_of(step: int, samples: int) -> TokenTable:
    """A step's samples of 200 tokens and prompts of 64, with all columns but experts."""
    chance = np.random.default_rng(step)
    size = samples * LENGTH
    entropy = chance.gamma(1.0, 0.8, size).astype(np.float32)
    train = -(chance.exponential(1, size) * (entropy + 0.05)).astype(np.float32)
    noise = 0.05 * (1 - np.exp(train)) * chance.normal(size=size)
    rollout = np.minimum(train + noise, 0).astype(np.float32)
    weight = np.exp(train - rollout)
    return TokenTable(
        offsets=offsets_of([LENGTH] * samples),
        train_log_prob=train,
        old_log_prob=train,
        rollout_log_prob=rollout,
        loss_mask=np.ones(size, np.uint8),
        token=chance.integers(0, 50_000, size).astype(np.int32),
        weight=weight,
        bounded_weight=np.minimum(weight, 2),
        rejected=(np.abs(train - rollout) > 0.12).astype(np.int32),
        vetoed=np.zeros(size, np.uint8),
        advantage=np.repeat(chance.normal(size=samples), LENGTH).astype(np.float32),
        entropy=entropy,
        weight_version=np.full(size, step, np.int32),
        turn=np.zeros(size, np.int32),
        step=np.full(samples, step, np.int32),
        sample_index=np.arange(samples, dtype=np.int32),
        group=np.arange(samples, dtype=np.int32) // 4,
        reward=chance.random(samples).astype(np.float32),
        truncated=np.zeros(samples, np.uint8),
        prompt=tuple(chance.integers(0, 50_000, (samples, PROMPT)).astype(np.int32)),
        text=("word " * LENGTH,) * samples,
        prompt_text=("question " * PROMPT,) * samples,
        metadata={"source": "slime_tis", "criteria": ["token"], "old_policy": "current"},
    )


PROBE = """
const times = {};
const all = (query) => [...document.querySelectorAll(query)];
function look() {
  const seen = (name, there) => { if (there && !(name in times)) times[name] = performance.now(); };
  const canvases = all(".canvas");
  const inView = canvases.filter((one) => one.getBoundingClientRect().top < innerHeight);
  const drawn = (one) => one.querySelector(".main-svg .xy") !== null;
  const tables = all("#what-if-table tbody tr").length > 0;
  seen("text and tables", tables);
  seen("plots in view", tables && inView.length && inView.every(drawn));
  seen("samples", all("#sample .tokens span").length > 0);
  seen("all plots", tables && canvases.every(drawn));
  if (Object.keys(times).length < 4) requestAnimationFrame(look);
  else document.documentElement.dataset.times = JSON.stringify(times);
}
requestAnimationFrame(look);
"""
"""Milliseconds from the start of the navigation to the first frame in which each is there."""


def open_pages(paths: Sequence[Path], repeats: int = 5) -> None:
    """Opens the pages in turns and prints their times.

    Medians with the smallest and largest value, and the CPU time of the main thread.
    """
    from playwright.sync_api import sync_playwright

    from tests.browser.test_report import BROWSER

    found: dict[Path, list[dict[str, float]]] = {path: [] for path in paths}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        for repeat in range(repeats):
            for path in paths[:: 1 if repeat % 2 else -1]:
                page = browser.new_page(viewport={"width": 1240, "height": 900})
                page.add_init_script(PROBE)
                session = page.context.new_cdp_session(page)
                session.send("Performance.enable", {"timeDomain": "threadTicks"})
                page.goto(path.resolve().as_uri(), wait_until="commit")
                root = page.wait_for_selector("html[data-times]", state="attached")
                assert root is not None
                times = root.get_attribute("data-times")
                assert times is not None
                metrics = {
                    one["name"]: one["value"]
                    for one in session.send("Performance.getMetrics")["metrics"]
                }
                found[path].append(
                    {**json.loads(times), "CPU, all plots": 1e3 * metrics["TaskDuration"]}
                )
                page.close()
        browser.close()
    for path, rows in found.items():
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB; milliseconds, {repeats} repeats")
        for name in rows[0]:
            values = [row[name] for row in rows]
            print(
                f"  {name}: {statistics.median(values):.0f} ({min(values):.0f} to"
                f" {max(values):.0f})"
            )


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        float(sys.argv[2]) if len(sys.argv) > 2 else 0.1,
        [Path(name) for name in sys.argv[3:]],
    )
