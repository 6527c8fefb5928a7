"""Samples rescored in fp32: which engine is wrong."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slime_tis.analysis.diagnosis import rescore as rescore_module
from slime_tis.analysis.diagnosis.rescore import (
    HfScorer,
    check_memory,
    load_model,
    parameter_count,
    rescore,
)
from slime_tis.analysis.dumps.files import write
from slime_tis.analysis.dumps.table import TokenTable
from slime_tis.main import main
from tests.checkpoints import make_checkpoint
from tests.diagnosis.test_proof import PROMPT, RESPONSE, dump, log_probs, logits_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("rescore") / "model", "llama")


@pytest.fixture(scope="module")
def exact(model: Path) -> TokenTable:
    """Two steps of four samples at temperature 0.5, with the model's log-probs on both sides."""
    table = dump(load_model(str(model)), lambda m, t: log_probs(logits_of(m, t) / 0.5, t))
    table = table.select(range(8))
    return replace(
        table,
        train_log_prob=table.rollout_log_prob,
        step=np.arange(8, dtype=np.int32) // 4,
        metadata={"temperature": 0.5},
    )


def noisy(values: np.ndarray, size: float) -> np.ndarray:
    signs = np.random.default_rng(0).choice([-1, 1], len(values))
    return (values + size * signs).astype(np.float32)


CASES = {
    "none": (0.0, 0.0, "both engines are close to fp32"),
    "rollout": (0.0, 0.05, "the rollout engine differs from fp32"),
    "training": (0.05, 0.001, "training differs from fp32"),
    "both": (0.05, 0.04, "both differ from fp32"),
}


@pytest.mark.parametrize("wrong", CASES)
def test_the_wrong_engine_is_named(model: Path, exact: TokenTable, wrong: str) -> None:
    train, rollout, verdict = CASES[wrong]
    table = replace(
        exact,
        train_log_prob=noisy(exact.train_log_prob, train),
        rollout_log_prob=noisy(exact.rollout_log_prob, rollout),
    )
    result = rescore(table, HfScorer(load_model(str(model))))
    assert result.verdict.startswith(verdict)
    assert (result.train_error, result.rollout_error) == pytest.approx((train, rollout), abs=1e-4)
    assert (result.samples, result.tokens) == (4, 4 * RESPONSE)


def test_the_step_that_fits_the_weights_is_used(model: Path, exact: TokenTable) -> None:
    # The first step has the log-probs of other weights.
    is_first = np.arange(exact.tokens) < 4 * RESPONSE
    both = np.where(is_first, exact.train_log_prob - 1, exact.train_log_prob).astype(np.float32)
    table = replace(exact, train_log_prob=both, rollout_log_prob=both)
    result = rescore(table, HfScorer(load_model(str(model))))
    assert (result.step, result.verdict) == (1, "both engines are close to fp32")


def test_masked_tokens_are_ignored(model: Path, exact: TokenTable) -> None:
    mask = np.where(np.arange(exact.tokens) % 3 == 0, 0, 1).astype(np.uint8)
    both = np.where(mask == 0, np.float32(-50), exact.train_log_prob)
    table = replace(exact, train_log_prob=both, rollout_log_prob=both, loss_mask=mask)
    result = rescore(table.select(range(4, 8)), HfScorer(load_model(str(model))))
    assert (result.tokens, result.verdict) == (27, "both engines are close to fp32")


def test_the_largest_mismatches_are_scored(model: Path, exact: TokenTable) -> None:
    """One sample of eight is wrong, and it is the last one of its step."""
    rollout = exact.rollout_log_prob.copy()
    rollout[3 * RESPONSE : 4 * RESPONSE] -= 1
    table = replace(exact, rollout_log_prob=rollout, step=np.zeros(8, np.int32))
    result = rescore(table, HfScorer(load_model(str(model))))
    assert result.rollout_error == pytest.approx(1 / 6, abs=1e-4)


def test_samples_of_different_prompts_come_first(model: Path, exact: TokenTable) -> None:
    assert exact.prompt is not None
    prompts = (exact.prompt[0],) * 7 + (exact.prompt[7],)
    rollout = exact.rollout_log_prob.copy()
    rollout[7 * RESPONSE :] -= 0.5
    rollout[: 7 * RESPONSE] -= 1
    table = replace(exact, rollout_log_prob=rollout, prompt=prompts, step=np.zeros(8, np.int32))
    result = rescore(table, HfScorer(load_model(str(model))))
    # Five samples of the first prompt and the one of the second.
    errors = np.abs(table.rollout_log_prob - exact.rollout_log_prob).reshape(8, -1).mean(1)
    assert errors.tolist() == pytest.approx([1] * 7 + [0.5])
    assert result.samples == 6


def test_a_long_response_is_cut(
    model: Path, exact: TokenTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rescore_module, "MAX_TOKENS", PROMPT + 4)
    monkeypatch.setattr(rescore_module, "MIN_RESPONSE", 4)
    result = rescore(exact, HfScorer(load_model(str(model))))
    assert (result.samples, result.tokens) == (4, 4 * 4)
    assert result.train_error < 1e-4


def test_parameters_are_counted_without_loading(model: Path) -> None:
    expected = sum(weight.numel() for weight in load_model(str(model)).state_dict().values())
    assert parameter_count(str(model)) == expected


def test_models_larger_than_memory_are_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rescore_module, "parameter_count", lambda _: 10**15)
    with pytest.raises(ValueError, match=r"needs about 7450580\.6 GiB for the models, and cpu has"):
        check_memory([str(model)], "cpu")


@pytest.mark.parametrize("device", ["cuda:97", "gpu", "mps", "meta"])
def test_an_absent_device_is_refused(device: str, model: Path) -> None:
    with pytest.raises(ValueError, match=f"--device is '{device}' but must be cpu"):
        check_memory([str(model)], device)


def without_prompts(table: TokenTable) -> TokenTable:
    return replace(table, prompt=None)


def with_token_offset(table: TokenTable, offset: int) -> TokenTable:
    assert table.token is not None
    return replace(table, token=table.token + np.int32(offset))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(without_prompts, "needs token ids and prompts", id="no prompts"),
        pytest.param(
            lambda table: with_token_offset(table, 1000), "the dump has token id 10", id="large id"
        ),
        pytest.param(
            lambda table: with_token_offset(table, -1000), "the dump has token id -", id="negative"
        ),
        pytest.param(lambda table: table.select([]), "this one has no trained token", id="empty"),
    ],
)
def test_a_bad_dump_is_refused_with_one_line(
    change: Callable[[TokenTable], TokenTable],
    message: str,
    model: Path,
    exact: TokenTable,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    dump_path = tmp_path / "dump.parquet"
    write(dump_path, change(exact))
    assert main(["diagnose", str(dump_path), "--hf-checkpoint", str(model)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("directory", "message"),
    [
        pytest.param("absent", "absent", id="absent"),
        pytest.param(".", "config.json", id="no model"),
    ],
)
def test_a_bad_checkpoint_is_refused_with_one_line(
    directory: str,
    message: str,
    exact: TokenTable,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    dump_path = tmp_path / "dump.parquet"
    write(dump_path, exact)
    checkpoint = tmp_path / directory
    assert main(["diagnose", str(dump_path), "--hf-checkpoint", str(checkpoint)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
