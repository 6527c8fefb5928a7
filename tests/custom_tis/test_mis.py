"""custom_tis.mis against slime's own output, its deliberate differences, and its contract."""

import json
from argparse import Namespace
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from custom_tis.mis import compute_mis_weights, compute_mis_weights_with_cp
from slime_tis.user_functions import call_custom_tis

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "slime_mis.json").read_text())
TRAIN = [torch.tensor(s["train"]) for s in GOLDEN["sequences"]]
ROLLOUT = [torch.tensor(s["rollout"]) for s in GOLDEN["sequences"]]
MASKS = [torch.tensor(s["mask"]) for s in GOLDEN["sequences"]]

DIFFERENT_IN_MASK_MODE = {
    "tis_weight_after_bound",
    "is_ratio_mean_after_tis_rs",
    "batch_norm_factor",
    "is_ratio_mean_final",
    "is_ratio_min_final",
    "is_ratio_max_final",
}
"""slime leaves the raw weight at rejected tokens, and lets it into the batch mean and all
metrics."""


def sample_mean(values: list[torch.Tensor]) -> float:
    """slime's reduction: masked mean of each sequence, then the mean over sequences."""
    total = 0.0
    for value, mask in zip(values, MASKS, strict=True):
        total += ((value * mask).sum() / mask.sum().clamp_min(1)).item()
    return total / len(MASKS)


def has_mask_mode(case: dict[str, Any]) -> bool:
    return case["args"]["use_tis"] and case["args"]["tis_mode"] == "mask"


@dataclass
class GoldenRun:
    """Our output for one case of slime's."""

    case: dict[str, Any]
    weights: list[torch.Tensor] | None
    masks: list[torch.Tensor]
    metrics: dict[str, list[torch.Tensor]]


@pytest.fixture(params=GOLDEN["cases"], ids=lambda case: "-".join(map(str, case["args"].values())))
def golden_run(request: pytest.FixtureRequest) -> GoldenRun:
    weights, masks, metrics = compute_mis_weights(
        Namespace(**request.param["args"]),
        train_log_probs=TRAIN,
        rollout_log_probs=ROLLOUT,
        loss_masks=MASKS,
    )
    return GoldenRun(request.param, weights, masks, metrics)


def test_masks_equal_slime(golden_run: GoldenRun) -> None:
    assert [mask.tolist() for mask in golden_run.masks] == golden_run.case["masks"]


def test_weights_equal_slime(golden_run: GoldenRun) -> None:
    expected = golden_run.case["weights"]
    if golden_run.weights is None or has_mask_mode(golden_run.case):
        assert (golden_run.weights is None) == (expected is None)
        return
    values = torch.cat(golden_run.weights).tolist()
    assert values == pytest.approx(list(chain.from_iterable(expected)), rel=1e-5, abs=1e-6)


def test_metric_names_equal_slime(golden_run: GoldenRun) -> None:
    assert set(golden_run.metrics) == set(golden_run.case["metrics"])


def test_metrics_equal_slime(golden_run: GoldenRun) -> None:
    expected = dict(golden_run.case["metrics"])
    if has_mask_mode(golden_run.case):
        for name in DIFFERENT_IN_MASK_MODE:
            expected.pop(name, None)
    means = {name: sample_mean(golden_run.metrics[name]) for name in expected}
    assert means == pytest.approx(expected, rel=1e-5, abs=1e-6)


def call_with_contract(
    **args: Any,
) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    return call_custom_tis(
        compute_mis_weights_with_cp,
        Namespace(**args),
        pg_loss=LOSSES.clone().requires_grad_(),
        train_log_probs=TRAIN,
        rollout_log_probs=ROLLOUT,
        loss_masks=MASKS,
        total_lengths=[len(values) + 5 for values in TRAIN],
        response_lengths=[len(values) for values in TRAIN],
        advantages=None,
    )


LOSSES = torch.arange(1.0, 1.0 + sum(map(len, TRAIN)))
CORRECTION = {
    "use_tis": True,
    "use_rs": True,
    "rs_upper_bound": 3.0,
    "tis_batch_normalize": True,
}


@pytest.fixture(scope="module")
def contract_result() -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    return call_with_contract(**CORRECTION)


def test_contract_weights_the_loss(contract_result: tuple[Any, ...]) -> None:
    weights, _, _ = compute_mis_weights(
        Namespace(**CORRECTION),
        train_log_probs=TRAIN,
        rollout_log_probs=ROLLOUT,
        loss_masks=MASKS,
    )
    assert weights is not None
    expected = LOSSES * torch.cat(weights)
    pg_loss, _, _ = contract_result
    assert pg_loss.tolist() == pytest.approx(expected.tolist())
    assert pg_loss.requires_grad


def test_contract_returns_complete_masks(contract_result: tuple[Any, ...]) -> None:
    _, expected, _ = compute_mis_weights(
        Namespace(**CORRECTION),
        train_log_probs=TRAIN,
        rollout_log_probs=ROLLOUT,
        loss_masks=MASKS,
    )
    _, masks, _ = contract_result
    assert [mask.tolist() for mask in masks] == [mask.tolist() for mask in expected]


def test_contract_metrics_have_slimes_names(contract_result: tuple[Any, ...]) -> None:
    _, _, metrics = contract_result
    assert "mis_tis_truncate_fraction" in metrics
    assert {name[:4] for name in metrics} == {"mis_"}


def test_contract_metrics_are_flat_without_gradient(contract_result: tuple[Any, ...]) -> None:
    _, _, metrics = contract_result
    kinds = {(tuple(value.shape), value.requires_grad) for value in metrics.values()}
    assert kinds == {(tuple(LOSSES.shape), False)}


def test_without_options_only_metrics_are_added() -> None:
    pg_loss, masks, metrics = call_with_contract()
    assert torch.equal(pg_loss, LOSSES)
    assert [mask.tolist() for mask in masks] == [mask.tolist() for mask in MASKS]
    assert "mis_kl" in metrics


@pytest.mark.parametrize("code", [-9999.0, -1e6, -float("inf")])
def test_engine_code_for_minus_infinity_is_ignored(code: float) -> None:
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
