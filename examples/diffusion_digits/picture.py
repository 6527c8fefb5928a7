"""The picture of a run: reward, mismatch and weights over rollouts, and images before and after.

python -m examples.diffusion_digits.picture RUN_DIR [OTHER_RUN_DIR]
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.curves import COLORS, Series, read_series, running_mean
from slime_tis.atomic_files import METRICS, atomic_file
from slime_tis.torch_files import load_tensors

SAMPLES, PICTURE = "samples.pt", "diffusion_digits.png"
PICTURE_ROWS = 4
PREFIXES = ("rollout_corr/", "actor/rollout_corr/")
WEIGHTS = {
    "mis_ratio_mean_after_mis": "mean weight, bounded",
    "mis_eff_sample_size": "effective sample size",
    "mis_truncate_fraction": "share of weights at the bound",
    "rejected_sequence_fraction": "share of trajectories with a rejected step",
}
"""Metrics of the panel of weights, and their labels."""


def save_samples(directory: Path, before: Tensor, after: Tensor) -> None:
    """Images before and after, [rows, 10, 64], whole or not at all."""
    with atomic_file(directory / SAMPLES) as file:
        torch.save({"before": before, "after": after}, file)


def draw(directory: Path, compare_with: Path | None = None) -> Path:
    """Draws a run, optionally next to another one.

    Args:
        directory: of the run; the picture is written into it.
        compare_with: directory of the other run, or None.

    Returns:
        Path of the picture.

    Raises:
        ValueError: a directory has no finished run of this example, or both have the same name.
    """
    import matplotlib  # slow to import, and needed once a run

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = {path.name: path for path in (compare_with, directory) if path is not None}
    series = {name: read_series(path / METRICS) for name, path in runs.items()}
    for path in runs.values():
        if not (path / SAMPLES).is_file():
            raise ValueError(
                f"{path} has no {SAMPLES}; give a finished run of examples.diffusion_digits."
            )
    if compare_with is not None and len(runs) == 1:
        raise ValueError(f"both runs are named {directory.name!r}; rename a directory.")
    figure = pyplot.figure(figsize=(12, 9.6), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    curves, images = figure.subfigures(2, 1, height_ratios=(7.2, 2.4))
    axes = curves.subplots(2, 2)
    _draw_reward(axes[0, 0], series)
    _draw_mismatch(axes[0, 1], series)
    _draw_timesteps(axes[1, 0], series)
    _draw_weights(axes[1, 1], directory.name, series[directory.name])
    _draw_images(images, runs)
    path = directory / PICTURE
    with atomic_file(path) as file:
        figure.savefig(file, dpi=110, format="png")
    pyplot.close(figure)
    return path


def _draw_reward(axis: Any, series: dict[str, dict[str, Series]]) -> None:
    for (name, found), color in zip(series.items(), _colors(series), strict=True):
        _line(
            axis, found["rollout/raw_reward"], color, f"{name}: reward of the rollouts", faint=True
        )
        _line(axis, found["eval/reward"], color, f"{name}: held-out classifier", marker="o")
    _label(axis, "Reward", "probability of the digit asked for")
    axis.set_ylim(0, 1)


def _draw_mismatch(axis: Any, series: dict[str, dict[str, Series]]) -> None:
    for (name, found), color in zip(series.items(), _colors(series), strict=True):
        _line(axis, measured(found, "logprob_abs_diff_mean"), color, f"{name}: mean |Δ|")
        _line(
            axis, measured(found, "logprob_abs_diff_max"), color, f"{name}: largest |Δ|", faint=True
        )
    axis.set_yscale("log")
    _label(axis, "Mismatch of training and rollout log-probs", "|Δ| of a step, nats")


def _draw_timesteps(axis: Any, series: dict[str, dict[str, Series]]) -> None:
    """The mean over the run at each timestep, from noise to image."""
    for (name, found), color in zip(series.items(), _colors(series), strict=True):
        points = by_timestep(found)
        axis.plot(*zip(*points, strict=True), "o-", color=color, label=name) if points else None
    axis.set_yscale("log")
    axis.invert_xaxis()
    _label(
        axis,
        "Mismatch by timestep, mean over the run",
        "mean |Δ|, nats",
        "timestep, from noise to image",
    )


def _draw_weights(axis: Any, name: str, found: dict[str, Series]) -> None:
    for (metric, label), color in zip(WEIGHTS.items(), COLORS[2:], strict=False):
        _line(axis, measured(found, metric), color, label)
    axis.set_ylim(0, 1.05)
    _label(axis, f"Weights and rejections: {name}", "mean weight, share")


def _draw_images(figure: Any, runs: dict[str, Path]) -> None:
    samples = {name: load_tensors(path / SAMPLES) for name, path in runs.items()}
    first = next(iter(samples.values()))
    grids = {
        "before": first["before"],
        **{f"after, {name}": found["after"] for name, found in samples.items()},
    }
    axes = figure.subplots(1, len(grids), squeeze=False)[0]
    for axis, (title, grid) in zip(axes, grids.items(), strict=True):
        axis.imshow(tiled(grid), cmap="gray_r", vmin=-1, vmax=1)
        axis.set_title(title, loc="left", fontweight="bold")
        axis.set_xticks(
            [10 * digit + 4.5 for digit in range(10)], [str(digit) for digit in range(10)]
        )
        axis.set_yticks([])
        axis.set_xlabel("digit asked for")
        axis.tick_params(length=0)
        for side in axis.spines.values():
            side.set_visible(False)


def measured(found: dict[str, Series], metric: str) -> Series:
    """A metric of the correction, under whichever prefix it was logged; empty where it was not."""
    return next((found[prefix + metric] for prefix in PREFIXES if prefix + metric in found), [])


def by_timestep(found: dict[str, Series]) -> list[tuple[float, float]]:
    """(timestep, mean |Δ| over the run), ascending."""
    named = ((name.rpartition("/ts_"), points) for name, points in found.items() if "/ts_" in name)
    return sorted(
        (float(parts[2]), sum(value for _, value in points) / len(points))
        for parts, points in named
    )


def tiled(grid: Tensor) -> Tensor:
    """[rows, columns, 64] images as one, a pixel of white around each."""
    rows, columns, _ = grid.shape
    padded = torch.nn.functional.pad(grid.view(rows, columns, 8, 8), (1, 1, 1, 1), value=-1.0)
    return padded.clamp(-1, 1).permute(0, 2, 1, 3).reshape(10 * rows, 10 * columns)


def _line(
    axis: Any, points: Series, color: str, label: str, *, faint: bool = False, marker: str = ""
) -> None:
    """A series; one that is not of evaluations is smoothed."""
    if not points:
        return
    steps, values = [step for step, _ in points], [value for _, value in points]
    if not marker:
        values = running_mean(values, reach=2)
    style = ":" if faint else "-"
    axis.plot(
        steps, values, style, color=color, label=label, marker=marker, markersize=4, linewidth=1.6
    )


def _label(axis: Any, title: str, left: str, below: str = "rollout") -> None:
    axis.set_title(title, loc="left", fontweight="bold")
    axis.set_ylabel(left)
    axis.set_xlabel(below)
    axis.grid(alpha=0.25)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8, frameon=False)


def _colors(series: dict[str, dict[str, Series]]) -> tuple[str, ...]:
    """The run itself comes last and is blue; the one it is compared with is red."""
    return (COLORS[1], COLORS[0])[-len(series) :]


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python -m examples.diffusion_digits.picture RUN_DIR [OTHER_RUN_DIR]")
    try:
        print(draw(*map(Path, sys.argv[1:])))
    except ValueError as error:
        sys.exit(str(error))
