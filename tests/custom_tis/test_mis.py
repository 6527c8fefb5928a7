"""custom_tis.mis against slime's own output, its deliberate differences, and its contract."""

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from custom_tis.mis import compute_mis_weights, compute_mis_weights_with_cp
from slime_tis.user_functions import call_custom_tis

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "slime_mis.json").read_text())
TRAIN = [torch.tensor(s["train"]) for s in GOLDEN["sequences"]]
ROLLOUT = [torch.tensor(s["rollout"]) for s in GOLDEN["sequences"]]
MASKS = [torch.tensor(s["mask"]) for s in GOLDEN["sequences"]]

DIFFERENT_IN_MASK_MODE = {
    *("tis_weight_after_bound", "is_ratio_mean_after_tis_rs", "batch_norm_factor"),
    *("is_ratio_mean_final", "is_ratio_min_final", "is_ratio_max_final"),
}
"""slime leaves the raw weight at rejected tokens, and lets it into the batch mean and all
metrics."""


def sample_mean(values):
    """slime's reduction: masked mean of each sequence, then the mean over sequences."""
    means = [
        ((v * m).sum() / m.sum().clamp_min(1)).item() for v, m in zip(values, MASKS, strict=True)
    ]
    return sum(means) / len(means)


@pytest.mark.parametrize(
    "case", GOLDEN["cases"], ids=lambda case: "-".join(map(str, case["args"].values()))
)
def test_golden(case):
    weights, masks, metrics = compute_mis_weights(
        Namespace(**case["args"]),
        train_log_probs=TRAIN,
        rollout_log_probs=ROLLOUT,
        loss_masks=MASKS,
    )
    assert [mask.tolist() for mask in masks] == case["masks"]
    is_mask = case["args"]["use_tis"] and case["args"]["tis_mode"] == "mask"
    different = DIFFERENT_IN_MASK_MODE if is_mask else set()
    if case["weights"] is None:
        assert weights is None
    elif not different:
        for found, expected in zip(weights, case["weights"], strict=True):
            assert found.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert set(metrics) == set(case["metrics"])
    for name, expected in case["metrics"].items():
        if name not in different:
            assert sample_mean(metrics[name]) == pytest.approx(expected, rel=1e-5, abs=1e-6), name


def contract(**args):
    pg_loss = torch.arange(1.0, 1.0 + sum(map(len, TRAIN)), requires_grad=True)
    return call_custom_tis(
        compute_mis_weights_with_cp,
        Namespace(**args),
        pg_loss=pg_loss,
        train_log_probs=TRAIN,
        rollout_log_probs=ROLLOUT,
        loss_masks=MASKS,
        total_lengths=[len(x) + 5 for x in TRAIN],
        response_lengths=[len(x) for x in TRAIN],
        advantages=None,
    )


def test_the_contract_and_metrics_only():
    args = {"use_tis": True, "use_rs": True, "rs_upper_bound": 3.0, "tis_batch_normalize": True}
    weights, masks, _ = compute_mis_weights(
        Namespace(**args), train_log_probs=TRAIN, rollout_log_probs=ROLLOUT, loss_masks=MASKS
    )
    pg_loss, whole, metrics = contract(**args)
    flat = torch.cat(weights)
    assert pg_loss.tolist() == pytest.approx((torch.arange(1.0, 1.0 + len(flat)) * flat).tolist())
    assert pg_loss.requires_grad and [m.tolist() for m in whole] == [m.tolist() for m in masks]
    assert "mis_tis_truncate_fraction" in metrics and all(
        name.startswith("mis_") for name in metrics
    )
    assert all(value.shape == flat.shape and not value.requires_grad for value in metrics.values())
    pg_loss, masks, metrics = contract()
    assert torch.equal(pg_loss, torch.arange(1.0, 1.0 + sum(map(len, TRAIN))))
    assert [m.tolist() for m in masks] == [m.tolist() for m in MASKS] and "mis_kl" in metrics


@pytest.mark.parametrize("code", [-9999.0, -1e6, -float("inf")])
def test_a_code_for_minus_infinity_is_in_no_metric(code):
    options = Namespace(use_tis=True, tis_mode="truncate", tis_level="token", tis_upper_bound=2.0)
    weights, masks, metrics = compute_mis_weights(
        options,
        train_log_probs=[torch.tensor([-0.5, -1.0])],
        rollout_log_probs=[torch.tensor([code, -1.0])],
        loss_masks=[torch.ones(2)],
    )
    assert weights is not None
    assert weights[0].tolist() == [0.0, 1.0]
    assert masks[0].tolist() == [0.0, 1.0]
    assert metrics["k3_kl"][0].tolist() == [0.0, 0.0]
