"""Which samples carry the mismatch, from tables with known shares."""

from typing import Any

import numpy as np
import pytest

from slime_tis.analysis.diagnosis.concentration import concentration
from slime_tis.analysis.diagnosis.trained_tokens import tokens_of
from slime_tis.analysis.dumps.table import SampleParts, TokenTable

SAMPLES = 20
TOKENS = 10


def table_of(size: np.ndarray, **columns: Any) -> TokenTable:
    """Samples with abs(Δ) [S, T], and with columns of one value per sample."""
    parts = []
    for i in range(len(size)):
        values: dict[str, Any] = {name: column[i] for name, column in columns.items()}
        part = SampleParts(
            train_log_prob=np.full(TOKENS, -3.0), rollout_log_prob=-3.0 - size[i], **values
        )
        parts.append(part)
    return TokenTable.from_parts(parts)


def sentence(size: np.ndarray, **columns: Any) -> str:
    return concentration(tokens_of(table_of(size, **columns)))


def of_samples(chosen: list[int]) -> np.ndarray:
    """abs(Δ) of 1 in the chosen samples, of 0.001 elsewhere."""
    size = np.full((SAMPLES, TOKENS), 1e-3)
    size[chosen] = 1.0
    return size


def test_an_even_mismatch_is_spread() -> None:
    text = sentence(np.full((SAMPLES, TOKENS), 0.1))
    assert text == "18 of 20 samples carry 90% of the mismatch: it is spread over them"


def test_a_mismatch_of_three_samples_has_no_common_property() -> None:
    text = sentence(of_samples([1, 7, 15]))
    assert text.startswith("3 of 20 samples carry 90% of the mismatch, without a common property")


def test_only_known_properties_count_as_compared() -> None:
    text = sentence(of_samples([1, 7, 15]))
    assert text.endswith("(compared: position, response length)")


def test_a_known_server_counts_as_compared() -> None:
    worker = np.arange(SAMPLES)[:, None].repeat(TOKENS, 1) % 3
    text = sentence(of_samples([1, 3, 5]), rollout_worker=worker)
    assert text.endswith("(compared: server, position, response length)")


def test_the_common_server_is_named() -> None:
    worker = np.zeros((SAMPLES, TOKENS), int)
    worker[[1, 7, 15]] = 2
    text = sentence(of_samples([1, 7, 15]), rollout_worker=worker)
    assert text.endswith("99% of it is in tokens of server 2, 15% of all tokens")


def test_the_common_prompt_is_named() -> None:
    group = [i // 4 for i in range(SAMPLES)]
    text = sentence(of_samples([8, 9, 10, 11]), group=group)
    assert "of prompt 2, 20% of all tokens" in text


def test_the_common_step_is_named() -> None:
    step = [i // 5 for i in range(SAMPLES)]
    assert "of step 3, 25% of all tokens" in sentence(of_samples(list(range(15, 20))), step=step)


def test_the_last_position_is_named() -> None:
    size = np.full((SAMPLES, TOKENS), 1e-3)
    size[:, -1] = 1.0
    assert "at the last position, 10% of all tokens" in sentence(size)


def test_the_common_token_is_named() -> None:
    token = np.arange(SAMPLES * TOKENS).reshape(SAMPLES, TOKENS) % 7
    size = np.where(token == 3, 1.0, 1e-3)
    assert "of token id 3, 14% of all tokens" in sentence(size, token=token)


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(np.zeros((SAMPLES, TOKENS)), id="no mismatch"),
        pytest.param(np.ones((7, TOKENS)), id="few samples"),
    ],
)
def test_nothing_is_said_without_evidence(size: np.ndarray) -> None:
    assert sentence(size) == ""


def test_one_infinite_token_carries_at_most_ten_nats() -> None:
    size = np.full((SAMPLES, TOKENS), 1.0)
    size[4, 4] = np.inf
    assert sentence(size).startswith("18 of 20 samples")
