"""Samples rescored in fp32: which engine is wrong."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slime_tis.analysis.diagnosis.rescore import HfScorer, load_model, rescore
from slime_tis.analysis.dumps.files import write
from slime_tis.analysis.dumps.table import SampleParts, TokenTable
from slime_tis.main import main
from tests.checkpoints import make_checkpoint

PROMPT, RESPONSE, SAMPLES = 5, 12, 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("rescore") / "model", "llama")


@pytest.fixture(scope="module")
def exact(model: Path) -> TokenTable:
    """Random tokens at temperature 0.5 with the log-probs of the model on both sides."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.randint(3, 50, (SAMPLES, PROMPT + RESPONSE), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        log_probs = (loaded(ids).logits[:, PROMPT - 1 : -1] / 0.5).log_softmax(-1)
    chosen = log_probs.gather(2, ids[:, PROMPT:, None])[..., 0].numpy()
    parts = [
        SampleParts(
            train_log_prob=chosen[i],
            rollout_log_prob=chosen[i],
            token=ids[i, PROMPT:].numpy(),
            prompt=ids[i, :PROMPT].numpy(),
            step=i // 4,
        )
        for i in range(SAMPLES)
    ]
    return TokenTable.from_parts(parts, {"temperature": 0.5})


def noisy(values: np.ndarray, size: float) -> np.ndarray:
    return (values + size * np.random.default_rng(0).choice([-1, 1], len(values))).astype(np.float32)


CASES = {
    "none": (0.0, 0.0, "both engines are close to fp32"),
    "rollout": (0.0, 0.05, "the rollout engine is wrong"),
    "training": (0.05, 0.001, "training is wrong"),
    "both": (0.05, 0.04, "both differ from fp32"),
}


@pytest.mark.parametrize("wrong", CASES)
def test_the_wrong_engine_is_named(model: Path, exact: TokenTable, wrong: str) -> None:
    train, rollout, verdict = CASES[wrong]
    log_probs = {"train_log_prob": noisy(exact.train_log_prob, train)}
    log_probs["rollout_log_prob"] = noisy(exact.rollout_log_prob, rollout)
    found = rescore(replace(exact, **log_probs), HfScorer(load_model(str(model))))
    assert found.verdict.startswith(verdict)
    assert (found.train_error, found.rollout_error) == pytest.approx((train, rollout), abs=1e-4)
    assert (found.samples, found.tokens) == (4, 4 * RESPONSE)


def test_the_step_that_fits_the_weights_is_used_and_masked_tokens_are_ignored(model: Path, exact: TokenTable) -> None:
    first = np.arange(exact.tokens) < 4 * RESPONSE
    mask = np.where(np.arange(exact.tokens) % 3 == 0, 0, 1).astype(np.uint8)
    both = np.where(first, exact.train_log_prob - 1, exact.train_log_prob)  # other weights in the first step
    both = np.where(mask == 0, np.float32(-50), both).astype(np.float32)
    found = rescore(
        replace(exact, train_log_prob=both, rollout_log_prob=both, loss_mask=mask), HfScorer(load_model(str(model)))
    )
    assert (found.step, found.tokens, found.verdict) == (1, 32, "both engines are close to fp32")


def test_the_command_prints_the_verdict(model, exact, tmp_path, capsys) -> None:
    dump = tmp_path / "dump.parquet"
    write(dump, replace(exact, rollout_log_prob=noisy(exact.rollout_log_prob, 0.05)))
    assert main(["diagnose", str(dump), "--hf-checkpoint", str(model)]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "the rollout engine is wrong" in words and "48 tokens of 4 samples" in words
    assert main(["diagnose", str(dump), "--hf-checkpoint", str(model), "--json"]) == 0
    rescored = json.loads(capsys.readouterr().out)["rescored"]
    assert rescored["rollout_error"] == pytest.approx(0.05, abs=1e-4) and rescored["verdict"].startswith("the rollout")


def test_bad_input_is_refused_with_one_line(model, exact, tmp_path, capsys) -> None:
    dump = tmp_path / "dump.parquet"
    for table, directory, message in (
        (replace(exact, prompt=None), model, "needs token ids and prompts"),
        (replace(exact, token=exact.token + 1000), model, "the dump has token id 10"),
        (replace(exact, token=exact.token - 1000), model, "the dump has token id -"),
        (exact, tmp_path / "absent", "absent"),
        (exact, tmp_path, "config.json"),
        (exact.select([]), model, "no sample of the dump has log-probs"),
    ):
        write(dump, table)
        assert main(["diagnose", str(dump), "--hf-checkpoint", str(directory)]) == 2
        written = capsys.readouterr().err
        assert message in written and len(written.splitlines()) == 1, written
