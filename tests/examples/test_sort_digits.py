"""The example's preparation, at a size that trains in a second."""

import json
import re
from pathlib import Path

import pytest
import torch

from slime_tis.trainer import sort_digits as prepare
from slime_tis.trainer.cli.arguments import parse_args
from slime_tis.trainer.data.prompts import load_prompts
from slime_tis.trainer.data.sample import Sampling
from slime_tis.trainer.engines.local.checkpoint import load_tokenizer
from slime_tis.trainer.engines.local.engine import LocalEngine
from slime_tis.trainer.evaluation import accuracy_metrics
from slime_tis.trainer.options.rollout import RolloutConfig
from slime_tis.trainer.rewards.rewards import assign_rewards, build_reward

ROOT = Path(__file__).parents[2]
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
    prompts = load_prompts(directory / "eval.jsonl", tokenizer, input_key="prompt", label_key="label")
    config = RolloutConfig(prompt_data="p", rollout_batch_size=1, rollout_max_response_len=1, rm_type="exact_match")
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
    assert sampled == pytest.approx(report["sampled_accuracy"], abs=0.02)  # 12,000 samples: 4 standard errors


def test_rows_are_sorted_digits_and_none_is_held_out_and_trained_on(made):
    directory, _ = made
    rows = {
        name: [json.loads(line) for line in (directory / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "eval")
    }
    assert (len(rows["train"]), len(rows["eval"])) == (40, 30)
    for row in rows["train"] + rows["eval"]:
        digits, end = row["prompt"][:-1], row["prompt"][-1]
        assert end == ">" and len(digits) == 2
        assert row["label"] == "".join(sorted(digits))
    assert len({row["prompt"] for row in rows["train"] + rows["eval"]}) == 70


def test_the_same_seed_makes_the_same_example(made, tmp_path):
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


def test_the_default_model_is_the_size_that_the_readme_says():
    model = prepare.make_model(prepare.Example(), 0)
    assert sum(parameter.numel() for parameter in model.parameters()) == 592_960
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_with_experts_the_model_is_the_mixture_that_the_readme_says():
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
        [*flags.split(), "--rollout-batch-size", "32", "--n-samples-per-prompt", "8", "--num-rollout", "1"]
    ).rollout
    assert (rollout.input_key, rollout.label_key, rollout.rm_type) == ("prompt", "label", "exact_match")
    assert rollout.prompt_data == f"{directory}/train.jsonl"
    assert [path for _, path in rollout.eval_prompt_sets] == [f"{directory}/eval.jsonl"]
