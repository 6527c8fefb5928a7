"""Draws the pictures of docs/report.md from runs, in a headless Chromium.

    python -m tools.report_pictures runs/stale runs/fresh_1 runs/fresh_2 runs/old_1 runs/old_2

The first run is that of README's "See the mismatch". The others, of two configurations with
several seeds each, show a comparison over seeds.
"""

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from playwright.sync_api import ViewportSize, sync_playwright

from slime_tis.analysis.report.report_commands import report

DOCS = Path(__file__).resolve().parents[1] / "docs"
WIDTH = 1240
"""Width of the window, pixels."""
HEIGHT = 900
"""Height of the window, pixels; pictures may be higher."""
MARGIN = 24
"""Space above and below a picture's elements, pixels."""


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run", help="run of the README, with its dumps")
    parser.add_argument("seeds", nargs="+", help="runs of two configurations, several seeds each")
    options = parser.parse_args(argv)
    program = shutil.which("chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        one_run = Path(folder) / "run.html"
        several_seeds = Path(folder) / "seeds.html"
        report([options.run], out=str(one_run))
        report(options.seeds, out=str(several_seeds))
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        window = ViewportSize(width=WIDTH, height=HEIGHT)
        page = browser.new_page(viewport=window, color_scheme="light")
        open_page(page, one_run)
        save(page, "h1", "#diagnosis", DOCS / "report.png")
        page.locator("#side").click()
        save(page, "#samples", "#plot-pareto", DOCS / "report_samples.png")
        open_page(page, several_seeds)
        save(page, "#overview", "#plot-run-reward", DOCS / "report_seeds.png")
        browser.close()


def open_page(page: Any, path: Path) -> None:
    """Opens a report, and waits until its plots and samples are drawn."""
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-drawn][data-samples]", state="attached")


def save(page: Any, first: str, last: str, picture: Path) -> None:
    """Writes the part of the page from one element to another."""
    top = page.locator(first).first.evaluate("e => e.getBoundingClientRect().top + scrollY")
    bottom = page.locator(last).first.evaluate("e => e.getBoundingClientRect().bottom + scrollY")
    clip = {
        "x": 0,
        "y": max(top - MARGIN, 0),
        "width": WIDTH,
        "height": bottom - top + 2 * MARGIN,
    }
    page.screenshot(path=picture, clip=clip, full_page=True)
    print(picture)


if __name__ == "__main__":
    main()
