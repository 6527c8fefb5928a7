"""The picture of `make train-moe`: runs without and with routing replay.

Its panels are accuracy, mismatch, largest weights and routing.

    python -m examples.sort_digits_moe.picture WITHOUT_REPLAY_DIR WITH_REPLAY_DIR

draws replay.png into the second directory, and prints what is in it.
"""

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.curves import COLORS, Series, read_series, running_mean
from slime_tis.atomic_files import METRICS, atomic_file

PICTURE = "replay.png"
BLUE, RED = COLORS[:2]
ACCURACY, K3, DIFFERENCE = "eval/accuracy", "train/mismatch_k3_kl", "train/routing_difference"
LARGEST_WITHOUT, LARGEST_WITH = "train/without_replay/ratio_max", "train/with_replay/ratio_max"
WITHOUT, WITH = "without replay", "with replay"
REACH = 4
"""Steps on either side that a drawn mean is taken over; single steps are drawn faintly."""

Metrics = Mapping[str, Series]


def draw(without: Path, with_replay: Path) -> Path:
    """Draws two runs that differ in routing replay alone.

    Args:
        without: directory of the run without it.
        with_replay: of the one with it, and with --measure-routing-mismatch; the picture is left
            there.

    Returns:
        Path of the picture.

    Raises:
        ValueError: a directory holds no run, or the second one did not measure.
    """
    import matplotlib  # slow to import, and needed once per run

    matplotlib.use("Agg")
    from matplotlib import pyplot

    plain, replayed = read(without, with_replay)
    figure, axes = pyplot.subplots(2, 2, figsize=(12, 8), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    _draw_accuracy(axes[0, 0], plain, replayed)
    _draw_k3(axes[0, 1], plain, replayed)
    _draw_largest(axes[1, 0], replayed)
    _draw_routing(axes[1, 1], replayed)
    path = with_replay / PICTURE
    with atomic_file(path) as file:
        figure.savefig(file, dpi=110, format="png")
    pyplot.close(figure)
    return path


def read(without: Path, with_replay: Path) -> tuple[Metrics, Metrics]:
    """The metrics of both runs."""
    plain, replayed = read_series(without / METRICS), read_series(with_replay / METRICS)
    if LARGEST_WITHOUT not in replayed:
        raise ValueError(
            f"{with_replay} has no {LARGEST_WITHOUT}; it must be a run with"
            " --use-rollout-routing-replay and --measure-routing-mismatch."
        )
    return plain, replayed


def summary(plain: Metrics, replayed: Metrics) -> list[str]:
    """The printed lines; the last one is the usual summary of the run with replay."""
    accuracy = {WITHOUT: values(plain[ACCURACY]), WITH: values(replayed[ACCURACY])}
    return [
        *(
            f"{name}: eval accuracy {found[0]:.2f} -> {found[-1]:.2f}, mean of the second half"
            f" {statistics.fmean(found[len(found) // 2 :]):.2f}; k3"
            f" {statistics.fmean(values(run[K3])):.1e}"
            for (name, found), run in zip(accuracy.items(), (plain, replayed), strict=True)
        ),
        (
            "largest weight of a token, in the run with replay:"
            f" {max(values(replayed[LARGEST_WITHOUT])):.1f} without,"
            f" {max(values(replayed[LARGEST_WITH])):.1f} with; other experts for"
            f" {statistics.fmean(values(replayed[DIFFERENCE])):.1%} of the tokens"
        ),
        f"eval accuracy: {accuracy[WITH][0]:.2f} -> {accuracy[WITH][-1]:.2f}",
    ]


def values(series: Series) -> list[float]:
    """The values without their steps."""
    return [value for _, value in series]


def _draw_accuracy(axis: Any, plain: Metrics, replayed: Metrics) -> None:
    for run, color, label in ((plain, RED, WITHOUT), (replayed, BLUE, WITH)):
        steps, heights = zip(*run[ACCURACY], strict=True)
        axis.plot(steps, heights, "o-", color=color, label=label, markersize=4, linewidth=1.6)
    axis.set_ylim(0, 1)
    _label(axis, "Held-out accuracy of the training policy, greedy", "share of 256 prompts")


def _draw_k3(axis: Any, plain: Metrics, replayed: Metrics) -> None:
    for run, color, label in ((plain, RED, WITHOUT), (replayed, BLUE, WITH)):
        _line(axis, run[K3], color, label)
    axis.set_yscale("log")
    _label(axis, "Mismatch of training and rollout log-probs", "k3 KL, nats per token")


def _draw_largest(axis: Any, replayed: Metrics) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    for metric, color, label in ((LARGEST_WITHOUT, RED, WITHOUT), (LARGEST_WITH, BLUE, WITH)):
        steps, heights = zip(*replayed[metric], strict=True)
        axis.plot(steps, heights, "o", color=color, label=label, markersize=4)
    axis.axhline(1.0, color="grey", linewidth=0.8)
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_locator(NullLocator())
    _label(
        axis,
        "Largest weight of a step, for the samples of the run with replay",
        "π_train/π_rollout of a token",
    )


def _draw_routing(axis: Any, replayed: Metrics) -> None:
    names: Sequence[str] = [
        DIFFERENCE,
        *sorted(name for name in replayed if name.startswith(f"{DIFFERENCE}/")),
    ]
    for name, color in zip(names, ("black", *COLORS[2:]), strict=False):
        layer = name.rpartition("_")[2]
        _line(axis, replayed[name], color, "any layer" if name == DIFFERENCE else f"layer {layer}")
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    _label(
        axis, "Tokens for which training would choose other experts", "share of the replayed tokens"
    )


def _line(axis: Any, points: Series, color: str, label: str) -> None:
    """A series: single steps faintly, their running mean on top."""
    steps, heights = zip(*points, strict=True)
    axis.plot(steps, heights, color=color, linewidth=0.8, alpha=0.3)
    axis.plot(steps, running_mean(heights, REACH), color=color, label=label, linewidth=1.6)


def _label(axis: Any, title: str, left: str) -> None:
    axis.set_title(title, loc="left", fontweight="bold", fontsize=10)
    axis.set_ylabel(left)
    axis.set_xlabel("step")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8, frameon=False)


def main(argv: Sequence[str]) -> int:
    if len(argv) != 2:
        print(
            "usage: python -m examples.sort_digits_moe.picture WITHOUT_REPLAY_DIR WITH_REPLAY_DIR",
            file=sys.stderr,
        )
        return 2
    without, with_replay = map(Path, argv)
    try:
        picture, lines = draw(without, with_replay), summary(*read(without, with_replay))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join([str(picture), *lines]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
