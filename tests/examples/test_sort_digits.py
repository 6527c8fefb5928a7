"""The examples sort_digits and sort_digits_moe, at a size that trains in seconds."""

import json
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
from tests.runs import ROOT, largest_file, read_metrics, run_here

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


def answer_metrics(directory: Path, **sampling: Any) -> dict[str, float]:
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


@dataclass(frozen=True)
class PreparedExample:
    """The directory that prepare.py fills, and its report."""

    directory: Path
    report: dict[str, Any]

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The rows of a file of prompts."""
        lines = (self.directory / f"{name}.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    @property
    def all_rows(self) -> list[dict[str, Any]]:
        """The rows of both files of prompts."""
        return self.rows("train") + self.rows("eval")


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> PreparedExample:
    directory = tmp_path_factory.mktemp("example") / "sort"
    return PreparedExample(directory, prepare.prepare(directory, seed=3, example=SMALL))


def test_the_report_is_written(example):
    written = json.loads((example.directory / "complete.json").read_text())
    assert written["accuracy"] == example.report["accuracy"]
    assert 0.2 <= example.report["accuracy"] <= 0.9


def test_the_engine_reaches_the_reported_accuracy(example):
    accuracy = answer_metrics(example.directory, temperature=0.0)["accuracy"]
    assert accuracy == pytest.approx(example.report["accuracy"])


def test_samples_reach_the_reported_accuracy(example):
    accuracy = answer_metrics(example.directory, n_samples=400)["accuracy"]
    # 12,000 samples: 0.02 is four standard errors
    assert accuracy == pytest.approx(example.report["sampled_accuracy"], abs=0.02)


def test_files_have_the_requested_number_of_rows(example):
    assert len(example.rows("train")) == 40
    assert len(example.rows("eval")) == 30


def test_the_label_is_the_sorted_prompt(example):
    for row in example.all_rows:
        digits = row["prompt"].removeprefix("<bos>").removesuffix(">")
        assert len(digits) == 2
        assert row["prompt"] == f"<bos>{digits}>"
        assert row["label"] == "".join(sorted(digits))


def test_no_prompt_is_repeated(example):
    assert len({row["prompt"] for row in example.all_rows}) == 70


def test_the_same_seed_makes_the_same_example(example, tmp_path):
    again = prepare.prepare(tmp_path / "again", seed=3, example=SMALL)
    assert {**again, "seconds": 0} == {**example.report, "seconds": 0}
    for name in ("train.jsonl", "eval.jsonl", "checkpoint/model.safetensors"):
        assert (example.directory / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_an_interrupted_run_leaves_nothing_half_made(tmp_path, monkeypatch):
    def full_disk(path, rows):
        raise OSError("no space left on device")

    monkeypatch.setattr(prepare, "write_jsonl", full_disk)
    with pytest.raises(OSError, match="no space left"):
        prepare.prepare(tmp_path / "sort", example=SMALL)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error_of_the_system(tmp_path):
    with largest_file(10_000), pytest.raises(OSError, match="serializing"):
        prepare.prepare(tmp_path / "sort", example=SMALL)


def test_the_readme_states_the_size_of_the_model():
    model = prepare.make_model(prepare.Example(), 0)
    assert sum(parameter.numel() for parameter in model.parameters()) == 592_960


def test_the_readme_states_the_size_of_the_mixture():
    model = prepare.make_model(prepare.Example(experts=8), 0)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    # two of eight experts are active
    idle = sum(size for name, size in sizes.items() if ".experts." in name) * 6 // 8
    assert sum(sizes.values()) == 1_335_360
    assert sum(sizes.values()) - idle == 450_624
    assert model.config.num_experts_per_tok == 2


@pytest.mark.parametrize(
    ("experts", "tied"), [(0, True), (8, False)], ids=["dense", "mixture of experts"]
)
def test_the_output_layer_of_the_dense_model_is_tied(experts, tied):
    model = prepare.make_model(prepare.Example(experts=experts), 0)
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight) == tied


@pytest.fixture
def readme_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command, flags and run that the page shows, where the command's data exist."""
    readme = (ROOT / "examples/sort_digits/README.md").read_text()
    blocks = re.findall(r"```\n(.*?)```", readme, flags=re.DOTALL)
    prepare.prepare(tmp_path / blocks[0].split()[-1], example=SMALL)
    monkeypatch.chdir(tmp_path)
    return blocks


def test_the_run_on_the_page_corrects(readme_blocks):
    words = readme_blocks[2].split()
    config = ROOT / words[3]
    assert parse_args(["--custom-config-path", str(config), *words[4:]]).correction.use_tis


def test_the_page_shows_the_flags_of_the_data(readme_blocks):
    command, flags, _ = readme_blocks
    assert command.split()[:2] == ["python", "examples/sort_digits/prepare.py"]
    directory = command.split()[-1]
    loop = "--rollout-batch-size 32 --n-samples-per-prompt 8 --num-rollout 1"
    rollout = parse_args([*flags.split(), *loop.split()]).rollout
    keys = (rollout.input_key, rollout.label_key, rollout.rm_type)
    assert keys == ("prompt", "label", "exact_match")
    assert rollout.prompt_data == f"{directory}/train.jsonl"
    assert [path for _, path in rollout.eval_prompt_sets] == [f"{directory}/eval.jsonl"]


HERE = ROOT / "examples" / "sort_digits_moe"
MIXTURE = replace(SMALL, eval_prompts=16, layers=2, experts=4, accuracy=(0.1, 0.95))
REPLAY = ["--use-rollout-routing-replay", "--measure-routing-mismatch", "1"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that has only the files that prepare.py makes, and the examples."""
    root = tmp_path_factory.mktemp("moe")
    prepare.prepare(root / "data" / "sort_digits_moe", example=MIXTURE)
    (root / "examples").symlink_to(ROOT / "examples")
    return root


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both runs of `make train-moe`, of two steps each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(data)
        output = tmp_path_factory.mktemp("runs")
        flags = [
            "--custom-config-path",
            "examples/sort_digits_moe/train.yaml",
            "--num-rollout",
            "2",
            "--rollout-batch-size",
            "4",
            "--eval-interval",
            "1",
            "--lr-warmup-iters",
            "1",
        ]
        run_here(flags, output / "without_replay")
        run_here([*flags, *REPLAY], output / "with_replay")
    return {name: output / name for name in ("without_replay", "with_replay")}


@pytest.fixture(scope="module")
def plain_rows(runs: dict[str, Path]) -> list[dict[str, Any]]:
    return read_metrics(runs["without_replay"])


@pytest.fixture(scope="module")
def replayed_rows(runs: dict[str, Path]) -> list[dict[str, Any]]:
    return read_metrics(runs["with_replay"])


def test_replay_finds_the_routing_of_every_token(replayed_rows):
    assert [row["step"] for row in replayed_rows] == [0, 1, 2]
    for row in replayed_rows[1:]:
        assert row["train/routing_replay_missing"] == 0
        assert row["train/routing_difference"] > 0


def test_replay_lowers_the_mismatch(replayed_rows):
    for row in replayed_rows[1:]:
        replayed = row["train/with_replay/mismatch_k3_kl"]
        assert 0 < replayed < row["train/without_replay/mismatch_k3_kl"]
        assert replayed == pytest.approx(row["train/mismatch_k3_kl"], rel=1e-4)


def test_both_runs_start_with_the_same_samples(plain_rows, replayed_rows):
    plain = plain_rows[1]
    replayed = replayed_rows[1]
    assert plain["rollout/raw_reward"] == replayed["rollout/raw_reward"]
    assert plain["train/mismatch_k3_kl"] == pytest.approx(
        replayed["train/without_replay/mismatch_k3_kl"], rel=1e-4
    )


def test_a_run_without_replay_has_no_metrics_of_replay(plain_rows):
    assert not any("replay" in name for name in plain_rows[1])


def test_the_picture_is_drawn(runs, capsys):
    assert picture.main([str(runs["without_replay"]), str(runs["with_replay"])]) == 0
    path = capsys.readouterr().out.splitlines()[0]
    assert path == str(runs["with_replay"] / picture.PICTURE)
    assert Path(path).stat().st_size > 10_000


def test_the_lines_below_the_picture(runs, replayed_rows, capsys):
    picture.main([str(runs["without_replay"]), str(runs["with_replay"])])
    lines = capsys.readouterr().out.splitlines()[1:]
    accuracy = [row["eval/accuracy"] for row in replayed_rows]
    assert lines[0].startswith("without replay: eval accuracy ")
    assert lines[1].startswith("with replay: eval accuracy ")
    assert lines[-1] == f"eval accuracy: {accuracy[0]:.2f} -> {accuracy[-1]:.2f}"


def test_the_picture_needs_a_run_with_replay(runs, capsys):
    assert picture.main([str(runs["with_replay"]), str(runs["without_replay"])]) == 2
    needed = "must be a run with --use-rollout-routing-replay and --measure-routing-mismatch"
    assert needed in capsys.readouterr().err


def test_an_empty_directory_is_not_drawn(tmp_path):
    assert picture.main([str(tmp_path)]) == 2


@pytest.fixture(scope="module")
def measured(data: Path) -> list[measure.Row]:
    """The mismatch of every engine, without replay, with replay, and with replay of weights."""
    directory = data / "data" / "sort_digits_moe"
    return measure.measure(directory, directory / "checkpoint", samples=4)


def rows_of(measured: list[measure.Row], engine: str) -> list[measure.Row]:
    """The rows of an engine: without replay, of experts, and of experts and weights."""
    return [row for row in measured if row.engine == engine]


def test_every_engine_is_measured_with_every_replay(measured):
    expected = []
    for engine in (*measure.ENGINES, *measure.PARTS):
        for replayed in measure.REPLAYS:
            expected.append((engine, replayed))
    assert [(row.engine, row.replayed) for row in measured] == expected


def test_an_exact_engine_has_no_mismatch(measured):
    for row in rows_of(measured, "fp32"):
        assert row.k3 < 1e-9
        assert row.other_experts == 0
        assert 0.999 < row.smallest <= row.largest < 1.001


def test_replay_of_experts_lowers_the_mismatch_of_coarse_routers(measured):
    plain, experts, _ = rows_of(measured, "fp32, routers of 4 bits")
    assert plain.other_experts > 0
    assert plain.k3 > 3 * experts.k3 > 0


def test_replay_of_weights_leaves_no_mismatch_of_coarse_routers(measured):
    plain, _, weights = rows_of(measured, "fp32, routers of 4 bits")
    assert weights.k3 < 1e-9
    assert weights.largest < 1.001 < plain.largest


def test_the_page_shows_the_table_of_results():
    table = measure.table(read_rows(measure.RESULTS, measure.Row))
    assert f"\n{table}\n" in (HERE / "README.md").read_text()


def page_commands() -> list[str]:
    """The flags of the page's commands."""
    page = (HERE / "README.md").read_text()
    return re.findall(r"^python train.py ((?:.*\\\n)*.*)$", page, re.M)


def makefile_commands() -> list[str]:
    """The flags of `make train-moe`, with the variables replaced."""
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    variables = dict(re.findall(r"^(\w+) := (.*)$", makefile, re.M))
    commands = []
    for line in re.findall(r"train\.py (.*)$", makefile, re.M):
        if "$(MOE_CONFIG)" in line:
            commands.append(re.sub(r"\$\((\w+)\)", lambda name: variables[name[1]], line))
    return commands


@pytest.mark.parametrize("commands", [page_commands(), makefile_commands()], ids=["page", "make"])
def test_the_commands_shown_differ_in_replay(data, monkeypatch, commands):
    monkeypatch.chdir(data)
    plain, replayed = [
        configure(shlex.split(command.replace("\\\n", " ")), {}) for command in commands
    ]
    assert not plain.rollout.use_rollout_routing_replay
    assert replayed.rollout.use_rollout_routing_replay
    for run in (plain, replayed):
        assert run.rollout.rollout_router_bits == 4


@pytest.mark.parametrize("commands", [page_commands(), makefile_commands()], ids=["page", "make"])
def test_the_commands_shown_write_apart(data, monkeypatch, commands):
    monkeypatch.chdir(data)
    directories = []
    for command in commands:
        run = configure(shlex.split(command.replace("\\\n", " ")), {})
        directories.append(run.reporting.output_dir)
    assert directories == [
        "runs/sort_digits_moe/without_replay",
        "runs/sort_digits_moe/with_replay",
    ]


def test_the_makefile_measures_routing_without_correction(data, monkeypatch):
    monkeypatch.chdir(data)
    replayed = configure(shlex.split(makefile_commands()[1]), {})
    assert not replayed.correction.corrects
    assert replayed.rollout.measure_routing_mismatch == 4
