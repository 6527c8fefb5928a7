"""Bias and noise of gradient estimators, against the size of the mismatch and the length.

    python -m studies.gradient_bias.gradient           # computes gradient.csv, five minutes
    python -m studies.gradient_bias.gradient --draw    # writes plot and tables; part of `make docs`

`estimators.py` defines what is computed; estimators that can be enumerated are exact, the others
simulated.
"""

import argparse
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.tables import read_rows, write_rows
from slime_tis import RolloutCorrectionConfig
from slime_tis.atomic_files import atomic_file
from slime_tis.progress import tracked
from studies.collapse.report import LOOKS, replace_table
from studies.gradient_bias.estimators import (
    ENUMERABLE,
    ESTIMATORS,
    Mismatch,
    Moments,
    enumerated,
    simulated,
    true_gradient,
)

TABLE = Path(__file__).with_name("gradient.csv")
PAGE, PICTURE = Path(__file__).with_name("README.md"), Path(__file__).with_name("bias_variance.png")

LENGTHS = (4, 64, 512, 4096)
SIGMAS = tuple(float(f"{10 ** (exponent / 4):.3g}") for exponent in range(-12, 1))
CORRELATIONS = {0.1: "noise", 0.7: "drift"}
"""κ, and what such a mismatch is."""
SIMULATED_TOKENS = 2**23
"""Tokens that a simulated point is made of."""
BATCH = 256
"""Responses of the batch whose standard deviation is shown."""
SHOWN_SIGMAS = (0.01, 0.0316, 0.1, 0.316)
"""Columns of the table of the smallest errors."""
ABOUT_EQUAL = 1.05
"""No correction is named if its error is at most this multiple of the smallest error."""
HOPELESS = 0.8
"""Relative error above which no estimator is named: the estimator 0 has 1."""

BOUNDS = (1.2, 1.5, 2.0, 3.0, 5.0, 10.0, 100.0)
"""Upper bounds of a sequence weight that are compared."""
BOUNDS_LENGTH, BOUNDS_SPREADS = 128, (0.25, 0.7, 1.4, 2.8)
"""Tokens, and σ√T, at which they are."""

STYLES = LOOKS | {
    "uncorrected": ("black", "-"),
    "sequence IS, unbounded": ("tab:orange", ":"),
    "geometric RS": ("tab:green", "-"),
    "prefix TIS": ("tab:cyan", "none"),
}


@dataclass(frozen=True, kw_only=True)
class Point:
    """An estimator at a length and mismatch; numbers are relative to the true gradient's norm."""

    correlation: float
    length: int
    sigma: float
    estimator: str
    responses: int
    """Simulated responses; 0 where the numbers are exact."""
    bias: float
    """‖E ĝ − g‖ / ‖g‖."""
    bias_low: float
    """95 % confidence interval of the bias."""
    bias_high: float
    projection: float
    """⟨E ĝ, g⟩ / ‖g‖²: how much of the gradient is found; 1 has all of it."""
    deviation: float
    """Standard deviation of one response's estimate: √(tr Cov ĝ) / ‖g‖; a batch of N has 1/√N of
    it."""
    deviation_error: float
    """Half of its 95 % confidence interval."""
    kept: float

    def error(self, batch: int) -> float:
        """Root of the mean squared error of a batch's mean, relative to ‖g‖."""
        return math.sqrt(self.bias**2 + self.deviation**2 / batch)

    def error_up_to_scale(self, batch: int) -> float:
        """The error of c·ĝ for the best c: √(1 − ⟨E ĝ, g⟩² / (‖g‖²·E‖ĝ‖²)).

        It is 1 if ĝ points away from g.

        A gradient that is merely too small does not count as an error: Adam and clipping the norm
        take its size out.
        """
        squared_length = self.bias**2 + 2 * self.projection - 1 + self.deviation**2 / batch
        found = max(self.projection, 0.0) ** 2 / squared_length if squared_length > 0 else 0.0
        return math.sqrt(max(1 - found, 0.0))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m studies.gradient_bias.gradient", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--draw", action="store_true", help="draw the plot and write the tables from gradient.csv"
    )
    parser.add_argument("--table", type=Path, default=TABLE, help="CSV file of the points")
    options = parser.parse_args(argv)
    if options.draw:
        found = read_rows(options.table, Point)
        print(draw(found, PICTURE))
        for name, text in tables(found).items():
            replace_table(PAGE, name, text)
        print(PAGE)
        return
    torch.set_num_threads(1)
    cases = list(itertools.product(CORRELATIONS, LENGTHS, SIGMAS, ESTIMATORS))
    write_rows(options.table, Point, tracked(points(cases), "points", len(cases)))
    print(options.table)


def points(cases: Sequence[tuple[float, int, float, str]]) -> Iterator[Point]:
    """The points of (correlation, length, sigma, estimator)."""
    truth = {length: true_gradient(length) for length in {case[1] for case in cases}}
    for correlation, length, sigma, name in cases:
        mismatch = Mismatch.of_size(sigma, correlation)
        responses = 0 if name in ENUMERABLE else SIMULATED_TOKENS // length
        config = ESTIMATORS[name]
        found = (
            simulated(config, mismatch, length, responses)
            if responses
            else enumerated(config, mismatch, length)
        )
        yield Point(
            correlation=correlation,
            length=length,
            sigma=sigma,
            estimator=name,
            responses=responses,
            **relative(found, truth[length], responses),
        )


def relative(found: Moments, gradient_V: Tensor, responses: int = 0) -> dict[str, float]:
    """Returns moments relative to the true gradient; exact unless responses were simulated."""
    norm = float(gradient_V.norm())
    bias = float((found.mean_V - gradient_V).norm()) / norm
    radius = found.mean_radius(responses) / norm if responses else 0.0
    return {
        "bias": bias,
        "bias_low": max(bias - radius, 0.0),
        "bias_high": bias + radius,
        "projection": float(found.mean_V @ gradient_V) / norm**2,
        "deviation": math.sqrt(found.variance) / norm,
        "deviation_error": found.deviation_radius(responses) / norm if responses else 0.0,
        "kept": found.kept,
    }


def tables(found: Sequence[Point]) -> dict[str, str]:
    """The tables of the page, by the names of their marks."""
    return {
        "errors": smallest_errors(found, Point.error),
        "errors up to scale": smallest_errors(found, Point.error_up_to_scale),
        "bounds": errors_by_bound(),
    }


def smallest_errors(found: Sequence[Point], error: Callable[[Point, int], float]) -> str:
    """Returns Markdown: the enumerated estimators with the smallest error in a batch."""
    by_case: dict[tuple[float, int, float], list[Point]] = {}
    for point in found:
        if not point.responses and not math.isnan(point.bias):
            by_case.setdefault((point.correlation, point.length, point.sigma), []).append(point)
    lines = [
        f"| mismatch | tokens | {' | '.join(f'σ = {sigma:.2g}' for sigma in SHOWN_SIGMAS)} |",
        "|---" * (len(SHOWN_SIGMAS) + 2) + "|",
    ]
    for correlation, length in itertools.product(CORRELATIONS, LENGTHS):
        cells = [
            _smallest(
                {
                    point.estimator: error(point, BATCH)
                    for point in by_case[correlation, length, sigma]
                }
            )
            for sigma in SHOWN_SIGMAS
        ]
        lines.append(f"| {CORRELATIONS[correlation]} | {length} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _smallest(errors: dict[str, float]) -> str:
    best, plain = min(errors, key=errors.__getitem__), errors["uncorrected"]
    if errors[best] > HOPELESS:
        return f"nothing helps, {errors[best]:.2f}"
    if plain <= ABOUT_EQUAL * errors[best]:
        return f"uncorrected, {plain:.2f}"
    return f"{best}, {errors[best]:.2f} (uncorrected {plain:.2f})"


def errors_by_bound() -> str:
    """Returns Markdown: errors of token and truncated sequence weights, plain and up to scale."""
    configs = {"token, ≤ 2": RolloutCorrectionConfig(use_tis=True)} | {
        f"≤ {bound:g}": RolloutCorrectionConfig(
            use_tis=True, tis_level="sequence", tis_upper_bound=bound
        )
        for bound in BOUNDS
    }
    lines = [f"| mismatch | σ√T | {' | '.join(configs)} |", "|---" * (len(configs) + 2) + "|"]
    gradient_V = true_gradient(BOUNDS_LENGTH)
    for correlation, spread in itertools.product(CORRELATIONS, BOUNDS_SPREADS):
        sigma = spread / math.sqrt(BOUNDS_LENGTH)
        mismatch = Mismatch.of_size(sigma, correlation)
        where: dict[str, Any] = {
            "correlation": correlation,
            "length": BOUNDS_LENGTH,
            "sigma": sigma,
            "responses": 0,
        }
        cells = []
        for name, config in configs.items():
            found = enumerated(config, mismatch, BOUNDS_LENGTH)
            errors: dict[str, Any] = relative(found, gradient_V)
            point = Point(estimator=name, **where, **errors)
            cells.append(f"{point.error(BATCH):.2f} · {point.error_up_to_scale(BATCH):.2f}")
        lines.append(f"| {CORRELATIONS[correlation]} | {spread:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(found: Sequence[Point], path: Path) -> Path:
    """Bias and standard deviation against σ: a column a length, two rows a kind of mismatch."""
    import matplotlib  # slow to import

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lengths = sorted({point.length for point in found})
    kinds = list(itertools.product(CORRELATIONS, ("bias", "deviation")))
    figure, axes = pyplot.subplots(
        len(kinds),
        len(lengths),
        figsize=(4 * len(lengths), 3 * len(kinds)),
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for (row, (correlation, what)), (column, length) in itertools.product(
        enumerate(kinds), enumerate(lengths)
    ):
        axis = axes[row][column]
        for name in ESTIMATORS:
            there = [
                p
                for p in found
                if (p.correlation, p.length, p.estimator) == (correlation, length, name)
            ]
            _draw_line(
                axis, there, what, name, width=3.2 - 0.3 * list(ESTIMATORS).index(name)
            )  # equals stay visible
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_ylim((1e-4, 3) if what == "bias" else (0.03, 10))
        axis.grid(alpha=0.25)
        if row == 0:
            axis.set_title(f"{length} tokens", fontweight="bold")
        if row == len(kinds) - 1:
            axis.set_xlabel("σ of the log-ratio of a token")
        if column == 0:
            label = "relative bias" if what == "bias" else f"relative deviation, {BATCH} responses"
            axis.set_ylabel(f"{CORRELATIONS[correlation]} (κ = {correlation:g})\n{label}")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    with atomic_file(path) as file:
        figure.savefig(file, dpi=90, format="png")
    pyplot.close(figure)
    return path


def _draw_line(axis: Any, there: Sequence[Point], what: str, name: str, width: float) -> None:
    color, style = STYLES[name]
    sigmas = [point.sigma for point in there]
    if what == "bias":
        heights = [point.bias for point in there]
        below = [point.bias - point.bias_low for point in there]
        above = [point.bias_high - point.bias for point in there]
    else:
        heights = [point.deviation / math.sqrt(BATCH) for point in there]
        below = above = [point.deviation_error / math.sqrt(BATCH) for point in there]
    if any(point.responses for point in there):
        axis.errorbar(
            sigmas,
            heights,
            [below, above],
            color=color,
            fmt="o",
            markersize=3,
            linewidth=1,
            label=f"{name} (simulated)",
        )
    else:
        axis.plot(sigmas, heights, style, color=color, label=name, linewidth=width)


if __name__ == "__main__":
    main()
