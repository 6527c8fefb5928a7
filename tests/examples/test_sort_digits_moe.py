"""The example of a mixture of experts, at a size that runs in seconds: its two runs, its picture and its table."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from examples.sort_digits_moe import measure, picture
from examples.tables import read_rows
from slime_tis.trainer import sort_digits as prepare
from slime_tis.trainer.cli.arguments import configure
from tests.examples.test_sort_digits import SMALL as DENSE
from tests.runs import ROOT, read_metrics, run_here

HERE = ROOT / "examples" / "sort_digits_moe"
SMALL = replace(DENSE, eval_prompts=16, layers=2, experts=4, accuracy=(0.1, 0.95))
REPLAY = ["--use-rollout-routing-replay", "--measure-routing-mismatch", "1"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """What prepare.py makes, below a directory of its own."""
    root = tmp_path_factory.mktemp("moe")
    prepare.prepare(root / "data" / "sort_digits_moe", example=SMALL)
    (root / "examples").symlink_to(ROOT / "examples")
    return root


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """Both runs of `make train-moe`, of two steps each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(data)
        output = tmp_path_factory.mktemp("runs")
        common = ["--custom-config-path", "examples/sort_digits_moe/train.yaml", "--num-rollout", "2"]
        common += ["--rollout-batch-size", "4", "--eval-interval", "1", "--lr-warmup-iters", "1"]
        for name, more in (("without_replay", []), ("with_replay", REPLAY)):
            run_here([*common, *more], output / name)
    return {name: output / name for name in ("without_replay", "with_replay")}


def test_two_steps_with_replay_leave_less_of_the_mismatch(runs):
    without, replayed = (read_metrics(runs[name]) for name in ("without_replay", "with_replay"))
    assert [row["step"] for row in replayed] == [0, 1, 2]
    for row in replayed[1:]:
        assert row["train/routing_replay_missing"] == 0
        assert row["train/routing_difference"] > 0
        assert 0 < row["train/with_replay/mismatch_k3_kl"] < row["train/without_replay/mismatch_k3_kl"]
        assert row["train/with_replay/mismatch_k3_kl"] == pytest.approx(row["train/mismatch_k3_kl"], rel=1e-4)
    first = without[1], replayed[1]
    assert first[0]["rollout/raw_reward"] == first[1]["rollout/raw_reward"], "the same samples"
    assert first[0]["train/mismatch_k3_kl"] == pytest.approx(
        replayed[1]["train/without_replay/mismatch_k3_kl"], rel=1e-4
    )
    assert not any("replay" in name for name in without[1])


def test_the_picture_and_the_lines_below_it(runs, capsys, tmp_path):
    assert picture.main([str(runs["without_replay"]), str(runs["with_replay"])]) == 0
    drawn, *lines = capsys.readouterr().out.splitlines()
    assert drawn == str(runs["with_replay"] / picture.PICTURE) and Path(drawn).stat().st_size > 10_000
    found = [row["eval/accuracy"] for row in read_metrics(runs["with_replay"])]
    assert lines[-1] == f"eval accuracy: {found[0]:.2f} -> {found[-1]:.2f}"
    assert lines[0].startswith("without replay: eval accuracy ") and lines[1].startswith("with replay: eval accuracy ")
    assert picture.main([str(runs["with_replay"]), str(runs["without_replay"])]) == 2
    assert "must be a run with --use-rollout-routing-replay and --measure-routing-mismatch" in capsys.readouterr().err
    assert picture.main([str(tmp_path)]) == 2


def test_replay_leaves_what_is_not_routing_and_weights_leave_nothing_of_coarse_routers(data):
    directory = data / "data" / "sort_digits_moe"
    rows = measure.measure(directory, directory / "checkpoint", samples=4)
    assert [(row.engine, row.replayed) for row in rows] == [
        (engine, replayed) for engine in (*measure.ENGINES, *measure.PARTS) for replayed in measure.REPLAYS
    ]
    found = {(row.engine, row.replayed): row for row in rows}
    for replayed in measure.REPLAYS:
        exact = found["fp32", replayed]
        assert exact.k3 < 1e-9 and exact.other_experts == 0 and 0.999 < exact.smallest <= exact.largest < 1.001
    coarse = [found["fp32, routers of 4 bits", replayed] for replayed in measure.REPLAYS]
    assert coarse[0].other_experts > 0 and coarse[0].k3 > 3 * coarse[1].k3 > 0
    assert coarse[2].k3 < 1e-9, "with their weights too, routers that differ make no difference"
    assert coarse[2].largest < 1.001 < coarse[0].largest


def test_the_page_shows_the_table_of_results():
    assert f"\n{measure.table(read_rows(measure.RESULTS, measure.Row))}\n" in (HERE / "README.md").read_text()


def test_the_commands_shown_are_accepted(data, monkeypatch):
    monkeypatch.chdir(data)
    shown = re.findall(r"^python train.py ((?:.*\\\n)*.*)$", (HERE / "README.md").read_text(), re.M)
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    made = [line for line in re.findall(r"train\.py (.*)$", makefile, re.M) if "$(MOE_CONFIG)" in line]
    assert len(shown) == len(made) == 2
    made = [
        re.sub(r"\$\((\w+)\)", lambda name: re.findall(rf"^{name[1]} := (.*)$", makefile, re.M)[0], line)
        for line in made
    ]
    for commands in (shown, made):
        found = [configure(shlex.split(command.replace("\\\n", " ")), {}) for command in commands]
        assert [each.rollout.use_rollout_routing_replay for each in found] == [False, True]
        assert [each.rollout.rollout_router_bits for each in found] == [4, 4]
        assert [each.reporting.output_dir for each in found] == [
            "runs/sort_digits_moe/without_replay",
            "runs/sort_digits_moe/with_replay",
        ]
    assert not found[1].correction.corrects and found[1].rollout.measure_routing_mismatch == 4
    assert yaml.safe_load((HERE / "train.yaml").read_text())["summary_plot"] is False
