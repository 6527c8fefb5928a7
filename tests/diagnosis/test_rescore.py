"""Samples rescored in fp32: which engine is wrong."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime_tis.analysis.diagnosis.rescore import HfScorer, load_model, rescore
from slime_tis.analysis.dumps.files import write
from slime_tis.analysis.dumps.table import TokenTable
from slime_tis.main import main
from tests.checkpoints import make_checkpoint
from tests.diagnosis.test_proof import RESPONSE, dump, log_probs, logits_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("rescore") / "model", "llama")


@pytest.fixture(scope="module")
def exact(model: Path) -> TokenTable:
    """Two steps of four samples at temperature 0.5, with the log-probs of the model on both sides."""
    table = dump(load_model(str(model)), lambda m, t: log_probs(logits_of(m, t) / 0.5, t)).select(
        range(8)
    )
    step = np.arange(8, dtype=np.int32) // 4
    return replace(
        table, train_log_prob=table.rollout_log_prob, step=step, metadata={"temperature": 0.5}
    )


def noisy(values: np.ndarray, size: float) -> np.ndarray:
    return (values + size * np.random.default_rng(0).choice([-1, 1], len(values))).astype(
        np.float32
    )


CASES = {
    "none": (0.0, 0.0, "both engines are close to fp32"),
    "rollout": (0.0, 0.05, "the rollout engine is wrong"),
    "training": (0.05, 0.001, "training is wrong"),
    "both": (0.05, 0.04, "both differ from fp32"),
}


@pytest.mark.parametrize("wrong", CASES)
def test_the_wrong_engine_is_named(model: Path, exact: TokenTable, wrong: str) -> None:
    train, rollout, verdict = CASES[wrong]
    columns: dict[str, Any] = {"train_log_prob": noisy(exact.train_log_prob, train)}
    columns["rollout_log_prob"] = noisy(exact.rollout_log_prob, rollout)
    found = rescore(replace(exact, **columns), HfScorer(load_model(str(model))))
    assert found.verdict.startswith(verdict)
    assert (found.train_error, found.rollout_error) == pytest.approx((train, rollout), abs=1e-4)
    assert (found.samples, found.tokens) == (4, 4 * RESPONSE)


def test_the_step_that_fits_the_weights_is_used_and_masked_tokens_are_ignored(
    model: Path, exact: TokenTable
) -> None:
    first = np.arange(exact.tokens) < 4 * RESPONSE
    mask = np.where(np.arange(exact.tokens) % 3 == 0, 0, 1).astype(np.uint8)
    both = np.where(
        first, exact.train_log_prob - 1, exact.train_log_prob
    )  # other weights in the first step
    both = np.where(mask == 0, np.float32(-50), both).astype(np.float32)
    found = rescore(
        replace(exact, train_log_prob=both, rollout_log_prob=both, loss_mask=mask),
        HfScorer(load_model(str(model))),
    )
    assert (found.step, found.tokens, found.verdict) == (1, 27, "both engines are close to fp32")


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
