"""The verl integration against verl 0.9.1's own output, and where it deliberately differs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_tis.integrations.verl import (
    compute_offpolicy_metrics,
    compute_rollout_corr_metrics_from_logprobs,
    compute_rollout_correction_and_add_to_batch,
    compute_rollout_correction_and_rejection_mask,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "verl_0_9_1.json").read_text())


def padded(key: str, fill: float, dtype: torch.dtype) -> torch.Tensor:
    rows = [torch.tensor(s[key], dtype=dtype) for s in GOLDEN["sequences"]]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)


def inputs(padding: float = 0.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        padded("train", padding, torch.float32),
        padded("rollout", padding, torch.float32),
        padded("mask", 0, torch.int64),
    )


def rows(nested: list[Any]) -> list[list[float]]:
    """Golden rows, which may be padded or not, cut to the length of their sequence."""
    return [list(row)[: len(s["mask"])] for row, s in zip(nested, GOLDEN["sequences"], strict=True)]


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: "-".join(map(str, case["args"].values())))
def test_golden(case: dict[str, Any]) -> None:
    """verl's weights, masks and metrics; NaN in the padding, which verl cannot take, changes nothing."""
    proto, mask, metrics = compute_rollout_correction_and_rejection_mask(
        *inputs(padding=torch.nan), **case["args"], verl_compat=True
    )
    lengths = [len(s["mask"]) for s in GOLDEN["sequences"]]
    assert [mask[i, :n].tolist() for i, n in enumerate(lengths)] == rows(case["mask"])
    if case["weights"] is None:
        assert proto is None
    else:
        weights = proto.batch["rollout_is_weights"]
        for i, expected in enumerate(rows(case["weights"])):
            assert weights[i, : lengths[i]].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert metrics == pytest.approx(case["metrics"], rel=2e-5, abs=1e-6)


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: "-".join(map(str, case["args"].values())))
def test_golden_masks_the_right_way_round(case: dict[str, Any]) -> None:
    """The golden bounds are symmetric, so that the mask does not depend on the direction of k1."""
    _, mask, _ = compute_rollout_correction_and_rejection_mask(*inputs(), **case["args"])
    lengths = [len(s["mask"]) for s in GOLDEN["sequences"]]
    assert [mask[i, :n].tolist() for i, n in enumerate(lengths)] == rows(case["mask"])


def test_k1_bounds_are_on_the_ratio() -> None:
    log_ratio = torch.tensor([[0.65, 1.0, 1.5]]).log()
    mask = torch.ones(1, 3)
    assert compute_rollout_rejection_mask(log_ratio, mask, "token_k1", "0.6_1.4")[0].tolist() == [[1, 1, 0]]
    compat, _ = compute_rollout_rejection_mask(log_ratio, mask, "token_k1", "0.6_1.4", verl_compat=True)
    assert compat.tolist() == [[0, 1, 1]]


def test_the_older_api() -> None:
    old = torch.tensor([[0.0, 0.9, 0.0], [-12.0, 0.0, 0.0]])
    proto, mask, metrics = compute_rollout_correction_and_rejection_mask(
        old,
        torch.zeros(2, 3),
        torch.ones(2, 3),
        rollout_is="token",
        rollout_rs="token",
        rollout_rs_threshold=2.0,
        rollout_rs_threshold_lower=0.5,
        rollout_token_veto_threshold=1e-4,
    )
    assert mask.tolist() == [[1, 0, 1], [0, 0, 0]]
    assert proto.batch["rollout_is_weights"][0].tolist() == pytest.approx([1.0, 2.0, 1.0])
    assert metrics["rollout_corr/rollout_is_veto_fraction"] == 0.5
    assert metrics["rollout_corr/rollout_is_catastrophic_token_fraction"] == pytest.approx(1 / 6)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(2 / 6)
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == 1.0


def test_rows_without_valid_tokens_count_nowhere() -> None:
    train, rollout, mask = inputs()
    wider = [torch.cat([x, torch.full((1, x.shape[1]), -7.0)]) for x in (train, rollout)]
    more = torch.cat([mask, torch.zeros(1, mask.shape[1], dtype=torch.int64)])
    assert compute_offpolicy_metrics(*wider, more) == pytest.approx(compute_offpolicy_metrics(train, rollout, mask))


def test_icepop_that_zeroes_everything() -> None:
    weights, metrics = compute_rollout_correction_weights(torch.full((1, 2), 3.0), torch.ones(1, 2), "token", "0.5_2.0")
    assert weights.tolist() == [[0, 0]] and metrics["rollout_is_eff_sample_size"] == 0.0


def test_errors_are_those_of_verl() -> None:
    with pytest.raises(ValueError, match="response_mask must contain at least one valid token"):
        compute_rollout_correction_and_rejection_mask(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2))
    with pytest.raises(ValueError, match="does not match rollout_log_prob shape"):
        compute_rollout_correction_and_rejection_mask(torch.zeros(1, 2), torch.zeros(1, 3), torch.ones(1, 2))
    with pytest.raises(ValueError, match="rollout_rs_threshold must be explicitly provided"):
        compute_rollout_correction_and_rejection_mask(*inputs(), rollout_rs="token_k1")
    with pytest.raises(ValueError, match="Invalid rollout_is: geometric"):
        compute_rollout_correction_weights(torch.zeros(1, 2), torch.ones(1, 2), "geometric")
    with pytest.raises(TypeError, match="rollout_is_threshold is True"):
        compute_rollout_correction_weights(torch.zeros(1, 2), torch.ones(1, 2), "token", True)


def test_training_perplexity_alone() -> None:
    metrics = compute_offpolicy_metrics(torch.tensor([[-1.0, -3.0]]), None, torch.ones(1, 2))
    assert metrics == pytest.approx({"training_ppl": 7.389056, "training_log_ppl": 2.0})


def test_metrics_from_log_probs_carry_the_prefix() -> None:
    found = compute_rollout_corr_metrics_from_logprobs(torch.tensor([[-1.0]]), torch.tensor([[-0.5]]), torch.ones(1, 1))
    assert found["rollout_corr/kl"] == pytest.approx(0.5)


class Batch:
    """What the integration reads of a DataProto."""

    def __init__(self) -> None:
        names = ("old_log_probs", "rollout_log_probs", "response_mask")
        self.batch = dict(zip(names, inputs(), strict=True))


def test_add_to_batch() -> None:
    batch, metrics = compute_rollout_correction_and_add_to_batch(
        Batch(), {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"}
    )
    assert batch.batch["rollout_is_weights"].max() == 2.0
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(
        1 - batch.batch["response_mask"].sum().item() / 94
    )
