"""What a report costs: CPU seconds and memory to write it, and how long its page takes to open.

    python -m benchmarks.report DIRECTORY [MILLIONS]

Writes a run of 500 steps whose dumps have 0.1 or MILLIONS million tokens below DIRECTORY, where it is missing, and the
report on it. The page is opened three times in chromium: milliseconds to the load event, when text and tables are
there, and until all plots are drawn, and the CPU seconds of its main thread.
"""

import json
import resource
import sys
import time
from pathlib import Path

import numpy as np

from slime_tis.dumps.parquet import write_parquet
from slime_tis.dumps.table import TokenTable, offsets_of

STEPS, LENGTH, PROMPT = 500, 200, 64


def main(directory: Path, millions: float) -> None:
    run = directory / f"report_{millions:g}"
    if not (run / "metrics.jsonl").exists():
        write_run(run, int(millions * 1e6 / STEPS / LENGTH))
    from slime_tis.cli.main import main as slime_tis

    begun = time.process_time()
    assert slime_tis(["report", str(run)]) == 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{millions:g} million tokens: {time.process_time() - begun:.1f} s CPU, imports included, peak {peak:.2f} GiB"
    )
    open_page(run / "report.html")


def write_run(run: Path, samples: int) -> None:
    """A run of 500 steps of some samples each."""
    for step in range(STEPS):
        write_parquet(run / "dumps" / f"{step}.parquet", tokens_of(step, samples))
    rows = [{"step": i, "train/mismatch_k3_kl": 1e-3, "train/grad_norm": 1 + i / STEPS} for i in range(STEPS)]
    (run / "config.yaml").write_text(f"save_debug_train_data: {run.resolve()}/dumps/{{rollout_id}}.parquet\n")
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
        prompt=chance.integers(0, 50_000, samples * PROMPT).astype(np.int32),
        prompt_offsets=offsets_of([PROMPT] * samples),
        text=("word " * LENGTH,) * samples,
        prompt_text=("question " * PROMPT,) * samples,
        metadata={"source": "slime_tis", "criteria": ["token"], "old_policy": "current"},
    )


def open_page(path: Path) -> None:
    from playwright.sync_api import sync_playwright

    from tests.browser.test_report import BROWSER

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        for _ in range(3):
            page = browser.new_page(viewport={"width": 1240, "height": 900})
            session = page.context.new_cdp_session(page)
            session.send("Performance.enable", {"timeDomain": "threadTicks"})
            page.goto(path.resolve().as_uri(), wait_until="commit")
            page.wait_for_selector("html[data-drawn]", state="attached")
            drawn = page.evaluate("performance.now()")
            loaded = page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
            metrics = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
            print(f"page: load {loaded:.0f} ms, drawn {drawn:.0f} ms, main thread {metrics['TaskDuration']:.2f} s CPU")
            page.close()
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.1)
