"""The examples sort_digits and sort_digits_moe, at a size that trains in seconds: data, runs, picture and table."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from examples.sort_digits_moe import measure, picture
from examples.tables import read_rows
from slime_tis.demo import sort_digits as prepare
from slime_tis.trainer.cli.train_arguments import configure, parse_args
from slime_tis.trainer.configs.rollout import RolloutConfig
from slime_tis.trainer.data.prompts import load_prompts
from slime_tis.trainer.data.sample import Sampling
from slime_tis.trainer.engines.local.load_model import load_tokenizer
from slime_tis.trainer.engines.local.local_engine import LocalEngine
from slime_tis.trainer.evaluation import accuracy_metrics
from slime_tis.trainer.rewards.rewards import assign_rewards, build_reward
from tests.runs import ROOT, read_metrics, run_here

SMALL = prepare.Example(
    digits=2,
    train_prompts=40,
    eval_prompts=30,
    supervised_prompts=40,
    hidden_size=32,
    layers=1,
    lr=1e-2,
    batch_size=40,
    accuracy=(0.2, 0.9),
    sampled_accuracy=0.0,
)


def answers(directory, **sampling):
    """Metrics of the engine's answers to eval.jsonl."""
    tokenizer = load_tokenizer(directory / "checkpoint")
    prompts = load_prompts(
        directory / "eval.jsonl", tokenizer, input_key="prompt", label_key="label"
    )
    config = RolloutConfig(
        prompt_data="p", rollout_batch_size=1, rollout_max_response_len=1, rm_type="exact_match"
    )
    engine = LocalEngine(directory / "checkpoint", tokenizer)
    groups = engine.generate(prompts, Sampling(max_response_len=4, **sampling), seed=0)
    assign_rewards(groups, build_reward(config))
    return accuracy_metrics([sample for group in groups for sample in group])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    directory = tmp_path_factory.mktemp("example") / "sort"
    return directory, prepare.prepare(directory, seed=3, example=SMALL)


def test_the_accuracies_are_those_of_the_engine(made):
    directory, report = made
    assert json.loads((directory / "complete.json").read_text())["accuracy"] == report["accuracy"]
    assert 0.2 <= report["accuracy"] <= 0.9
    assert answers(directory, temperature=0.0)["accuracy"] == pytest.approx(report["accuracy"])
    sampled = answers(directory, n_samples=400)["accuracy"]
    assert sampled == pytest.approx(
        report["sampled_accuracy"], abs=0.02
    )  # 12,000 samples: 4 standard errors


def test_rows_are_sorted_digits_and_follow_from_the_seed(made, tmp_path):
    directory, _ = made
    rows = {
        name: [json.loads(line) for line in (directory / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "eval")
    }
    assert (len(rows["train"]), len(rows["eval"])) == (40, 30)
    for row in rows["train"] + rows["eval"]:
        digits = row["prompt"].removeprefix("<bos>").removesuffix(">")
        assert row["prompt"] == f"<bos>{digits}>" and len(digits) == 2
        assert row["label"] == "".join(sorted(digits))
    assert len({row["prompt"] for row in rows["train"] + rows["eval"]}) == 70
    directory, report = made
    again = prepare.prepare(tmp_path / "again", seed=3, example=SMALL)
    assert {**again, "seconds": 0} == {**report, "seconds": 0}
    for name in ("train.jsonl", "eval.jsonl", "checkpoint/model.safetensors"):
        assert (directory / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_an_interrupted_run_leaves_nothing_half_made(tmp_path, monkeypatch):
    def full_disk(path, rows):
        raise OSError("no space left on device")

    monkeypatch.setattr(prepare, "write_jsonl", full_disk)
    with pytest.raises(OSError, match="no space left"):
        prepare.prepare(tmp_path / "sort", example=SMALL)
    assert list(tmp_path.iterdir()) == []


def test_the_models_are_those_that_the_readme_describes():
    model = prepare.make_model(prepare.Example(), 0)
    assert sum(parameter.numel() for parameter in model.parameters()) == 592_960
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    model = prepare.make_model(prepare.Example(experts=8), 0)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    idle = sum(size for name, size in sizes.items() if ".experts." in name) * 6 // 8
    assert (sum(sizes.values()), sum(sizes.values()) - idle) == (1_335_360, 450_624)
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    assert model.config.num_experts_per_tok == 2


def test_the_flags_that_the_readme_shows_parse(tmp_path, monkeypatch):
    readme = (ROOT / "examples/sort_digits/README.md").read_text()
    command, flags, run = re.findall(r"```\n(.*?)```", readme, flags=re.DOTALL)
    assert command.split()[:2] == ["python", "examples/sort_digits/prepare.py"]
    directory = command.split()[-1]
    prepare.prepare(tmp_path / directory, example=SMALL)
    monkeypatch.chdir(tmp_path)
    config = ROOT / run.split()[3]
    assert parse_args(["--custom-config-path", str(config), *run.split()[4:]]).correction.use_tis
    rollout = parse_args(
        [
            *flags.split(),
            "--rollout-batch-size",
            "32",
            "--n-samples-per-prompt",
            "8",
            "--num-rollout",
            "1",
        ]
    ).rollout
    assert (rollout.input_key, rollout.label_key, rollout.rm_type) == (
        "prompt",
        "label",
        "exact_match",
    )
    assert rollout.prompt_data == f"{directory}/train.jsonl"
    assert [path for _, path in rollout.eval_prompt_sets] == [f"{directory}/eval.jsonl"]


HERE = ROOT / "examples" / "sort_digits_moe"
MIXTURE = replace(SMALL, eval_prompts=16, layers=2, experts=4, accuracy=(0.1, 0.95))
REPLAY = ["--use-rollout-routing-replay", "--measure-routing-mismatch", "1"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """What prepare.py makes, below a directory of its own."""
    root = tmp_path_factory.mktemp("moe")
    prepare.prepare(root / "data" / "sort_digits_moe", example=MIXTURE)
    (root / "examples").symlink_to(ROOT / "examples")
    return root


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """Both runs of `make train-moe`, of two steps each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(data)
        output = tmp_path_factory.mktemp("runs")
        common = [
            "--custom-config-path",
            "examples/sort_digits_moe/train.yaml",
            "--num-rollout",
            "2",
        ]
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
        assert (
            0 < row["train/with_replay/mismatch_k3_kl"] < row["train/without_replay/mismatch_k3_kl"]
        )
        assert row["train/with_replay/mismatch_k3_kl"] == pytest.approx(
            row["train/mismatch_k3_kl"], rel=1e-4
        )
    first = without[1], replayed[1]
    assert first[0]["rollout/raw_reward"] == first[1]["rollout/raw_reward"], "the same samples"
    assert first[0]["train/mismatch_k3_kl"] == pytest.approx(
        replayed[1]["train/without_replay/mismatch_k3_kl"], rel=1e-4
    )
    assert not any("replay" in name for name in without[1])


def test_the_picture_and_the_lines_below_it(runs, capsys, tmp_path):
    assert picture.main([str(runs["without_replay"]), str(runs["with_replay"])]) == 0
    drawn, *lines = capsys.readouterr().out.splitlines()
    assert (
        drawn == str(runs["with_replay"] / picture.PICTURE) and Path(drawn).stat().st_size > 10_000
    )
    found = [row["eval/accuracy"] for row in read_metrics(runs["with_replay"])]
    assert lines[-1] == f"eval accuracy: {found[0]:.2f} -> {found[-1]:.2f}"
    assert lines[0].startswith("without replay: eval accuracy ") and lines[1].startswith(
        "with replay: eval accuracy "
    )
    assert picture.main([str(runs["with_replay"]), str(runs["without_replay"])]) == 2
    assert (
        "must be a run with --use-rollout-routing-replay and --measure-routing-mismatch"
        in capsys.readouterr().err
    )
    assert picture.main([str(tmp_path)]) == 2


def test_replay_leaves_what_is_not_routing_and_weights_leave_nothing_of_coarse_routers(data):
    directory = data / "data" / "sort_digits_moe"
    rows = measure.measure(directory, directory / "checkpoint", samples=4)
    assert [(row.engine, row.replayed) for row in rows] == [
        (engine, replayed)
        for engine in (*measure.ENGINES, *measure.PARTS)
        for replayed in measure.REPLAYS
    ]
    found = {(row.engine, row.replayed): row for row in rows}
    for replayed in measure.REPLAYS:
        exact = found["fp32", replayed]
        assert (
            exact.k3 < 1e-9
            and exact.other_experts == 0
            and 0.999 < exact.smallest <= exact.largest < 1.001
        )
    coarse = [found["fp32, routers of 4 bits", replayed] for replayed in measure.REPLAYS]
    assert coarse[0].other_experts > 0 and coarse[0].k3 > 3 * coarse[1].k3 > 0
    assert coarse[2].k3 < 1e-9, "with their weights too, routers that differ make no difference"
    assert coarse[2].largest < 1.001 < coarse[0].largest


def test_the_page_shows_the_table_of_results():
    assert (
        f"\n{measure.table(read_rows(measure.RESULTS, measure.Row))}\n"
        in (HERE / "README.md").read_text()
    )


def test_the_commands_shown_are_accepted(data, monkeypatch):
    monkeypatch.chdir(data)
    shown = re.findall(r"^python train.py ((?:.*\\\n)*.*)$", (HERE / "README.md").read_text(), re.M)
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    made = [
        line for line in re.findall(r"train\.py (.*)$", makefile, re.M) if "$(MOE_CONFIG)" in line
    ]
    assert len(shown) == len(made) == 2
    made = [
        re.sub(
            r"\$\((\w+)\)",
            lambda name: re.findall(rf"^{name[1]} := (.*)$", makefile, re.M)[0],
            line,
        )
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
