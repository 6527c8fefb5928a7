"""The verl integration against verl 0.9.1's own output, and where it deliberately differs."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError
from torch import Tensor

from slime_tis.integrations.verl import (
    SAFETY_BOUND,
    SUPPORTED_ROLLOUT_RS_OPTIONS,
    TOKEN_LEVEL_ROLLOUT_RS_OPTIONS,
    RolloutCorrectionConfig,
    apply_bypass_mode,
    compute_offpolicy_metrics,
    compute_rollout_corr_metrics_from_logprobs,
    compute_rollout_correction_and_add_to_batch,
    compute_rollout_correction_and_rejection_mask,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "verl_0_9_1.json").read_text())


LENGTHS = [len(sequence["mask"]) for sequence in GOLDEN["sequences"]]


def padded(key: str, fill: float, dtype: torch.dtype) -> Tensor:
    rows = [torch.tensor(sequence[key], dtype=dtype) for sequence in GOLDEN["sequences"]]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)


def inputs(padding: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    return (
        padded("train", padding, torch.float32),
        padded("rollout", padding, torch.float32),
        padded("mask", 0, torch.int64),
    )


def rows(values: Tensor | Sequence[Sequence[float]]) -> list[list[float]]:
    """Rows, which may be padded or not, cut to the lengths of the sequences."""
    if isinstance(values, Tensor):
        values = values.tolist()
    return [list(row)[:length] for row, length in zip(values, LENGTHS, strict=True)]


@dataclass
class GoldenRun:
    """Our output for a case of verl's, with NaN in the padding, which verl cannot take."""

    case: dict[str, Any]
    proto: Any
    mask: Tensor
    metrics: dict[str, float]


@pytest.fixture(params=GOLDEN["cases"], ids=lambda case: "-".join(map(str, case["args"].values())))
def golden_run(request: pytest.FixtureRequest) -> GoldenRun:
    case = request.param
    proto, mask, metrics = compute_rollout_correction_and_rejection_mask(
        *inputs(padding=torch.nan), **case["args"], verl_compat=True
    )
    return GoldenRun(case, proto, mask, metrics)


def test_mask_equals_verl(golden_run: GoldenRun) -> None:
    assert rows(golden_run.mask) == rows(golden_run.case["mask"])


def test_weights_equal_verl(golden_run: GoldenRun) -> None:
    expected = golden_run.case["weights"]
    if expected is None:
        assert golden_run.proto is None
        return
    weights = rows(golden_run.proto.batch["rollout_is_weights"])
    for row, expected_row in zip(weights, rows(expected), strict=True):
        assert row == pytest.approx(expected_row, rel=1e-5, abs=1e-6)


def test_metrics_equal_verl(golden_run: GoldenRun) -> None:
    assert golden_run.metrics == pytest.approx(golden_run.case["metrics"], rel=2e-5, abs=1e-6)


def test_symmetric_bounds_need_no_inversion(golden_run: GoldenRun) -> None:
    _, mask, _ = compute_rollout_correction_and_rejection_mask(*inputs(), **golden_run.case["args"])
    assert rows(mask) == rows(golden_run.case["mask"])


@pytest.fixture(scope="module")
def older_api() -> tuple[Any, Tensor, dict[str, float]]:
    """Token rejection with bounds 0.5 and 2, and a veto below 1e-4."""
    return compute_rollout_correction_and_rejection_mask(
        torch.tensor([[0.0, 0.9, 0.0], [-12.0, 0.0, 0.0]]),
        torch.zeros(2, 3),
        torch.ones(2, 3),
        rollout_is="token",
        rollout_rs="token",
        rollout_rs_threshold=2.0,
        rollout_rs_threshold_lower=0.5,
        rollout_token_veto_threshold=1e-4,
    )


def test_older_api_rejects_tokens_by_level(older_api: tuple[Any, Tensor, Any]) -> None:
    _, mask, _ = older_api
    assert mask.tolist() == [[1, 0, 1], [0, 0, 0]]


def test_older_api_has_weights(older_api: tuple[Any, Tensor, Any]) -> None:
    proto, _, _ = older_api
    weights = proto.batch["rollout_is_weights"]
    assert weights[0].tolist() == pytest.approx([1.0, 2.0, 1.0])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rollout_is_veto_fraction", 0.5),
        ("rollout_is_catastrophic_token_fraction", 1 / 6),
        ("rollout_rs_masked_fraction", 2 / 6),
        ("rollout_rs_seq_masked_fraction", 1.0),
    ],
)
def test_older_api_has_metrics(
    older_api: tuple[Any, Any, dict[str, float]], name: str, value: float
) -> None:
    _, _, metrics = older_api
    assert metrics[f"rollout_corr/{name}"] == pytest.approx(value)


def test_batch_without_a_valid_token_is_refused() -> None:
    zeros = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="response_mask must contain at least one valid token"):
        compute_rollout_correction_and_rejection_mask(zeros, zeros, zeros)


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="does not match rollout_log_prob shape"):
        compute_rollout_correction_and_rejection_mask(
            torch.zeros(1, 2), torch.zeros(1, 3), torch.ones(1, 2)
        )


def test_rejection_needs_a_threshold() -> None:
    with pytest.raises(ValueError, match="rollout_rs_threshold is unset"):
        compute_rollout_correction_and_rejection_mask(*inputs(), rollout_rs="token_k1")


def test_unknown_level_of_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="rollout_is is 'geometric'"):
        compute_rollout_correction_weights(torch.zeros(1, 2), torch.ones(1, 2), "geometric")


# verl has a maximum of k2 and of k3, which are distances, but not of k1, which has a sign.
@pytest.mark.parametrize(
    ("criterion", "message"),
    [
        (
            "seq_max_k4",
            r"'seq_max_k4'; choose from token_k1, token_k2, .*seq_max_k2, seq_max_k3",
        ),
        ("seq_max_k1", r"'seq_max_k1'.* --rs-veto-threshold"),
    ],
)
def test_unknown_criterion_is_refused(criterion: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compute_rollout_rejection_mask(torch.zeros(1, 2), torch.ones(1, 2), criterion, 2.0)


# (options, error, part of the message)
BAD_THRESHOLDS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "weights, a boolean": (
        {"rollout_is": "token", "rollout_is_threshold": True},
        TypeError,
        "not a boolean",
    ),
    "weights, a list": (
        {"rollout_is": "token", "rollout_is_threshold": [2.0]},
        TypeError,
        "not a list",
    ),
    "weights, NaN": (
        {"rollout_is": "token", "rollout_is_threshold": float("nan")},
        ValueError,
        "is nan but must be",
    ),
    "rejection, a boolean": (
        {"rollout_rs": "token_k1", "rollout_rs_threshold": True},
        TypeError,
        "not a boolean",
    ),
    "veto, a boolean": ({"rollout_token_veto_threshold": True}, TypeError, "not a boolean"),
    "veto, NaN": ({"rollout_token_veto_threshold": float("nan")}, ValueError, "nan"),
}


@pytest.mark.parametrize(("options", "error", "part"), BAD_THRESHOLDS.values(), ids=BAD_THRESHOLDS)
def test_threshold_without_a_number_is_refused(
    options: dict[str, Any], error: type[Exception], part: str
) -> None:
    with pytest.raises(error, match=part) as raised:
        compute_rollout_correction_and_rejection_mask(*inputs(), **options)
    assert "contradicts" not in str(raised.value)


@pytest.mark.parametrize("compat", [False, True])
def test_lower_bound_of_zero_is_none(compat: bool) -> None:
    # Ratios are e⁻⁹, 1 and e⁹; with `verl_compat` the bounds are on the inverse ratio.
    _, mask, metrics = compute_rollout_correction_and_rejection_mask(
        torch.tensor([[-9.0, 0.0, 9.0]]),
        torch.zeros(1, 3),
        torch.ones(1, 3),
        rollout_is="token",
        rollout_is_threshold="0_2.0",
        rollout_rs="token_k1",
        rollout_rs_threshold="0_2.0",
        verl_compat=compat,
    )
    assert mask.tolist() == ([[0, 1, 1]] if compat else [[1, 1, 0]])
    assert all(map(math.isfinite, metrics.values()))


PAIR: dict[str, Any] = {"rollout_rs": "token", "rollout_rs_threshold": "0.5_2"}
LOG_RATIO = torch.tensor([[0.45, 0.55, 1.9, 2.1]]).log()


def test_threshold_may_be_a_pair() -> None:
    # float("0.5_2") is 0.52.
    _, mask, _ = compute_rollout_correction_and_rejection_mask(
        LOG_RATIO, torch.zeros(1, 4), torch.ones(1, 4), **PAIR
    )
    assert mask.tolist() == [[0, 1, 1, 0]]


def test_pair_with_a_lower_threshold_is_refused() -> None:
    with pytest.raises(ValueError, match="so has rollout_rs_threshold_lower"):
        compute_rollout_correction_and_rejection_mask(
            LOG_RATIO, torch.zeros(1, 4), torch.ones(1, 4), **PAIR, rollout_rs_threshold_lower=0.4
        )


def test_three_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="tis_upper_bound is '2_3'"):
        compute_rollout_correction_weights(LOG_RATIO, torch.ones(1, 4), "token", "1_2_3")


def test_constants_are_verls() -> None:
    assert SAFETY_BOUND == 20.0
    assert {"token_k1", "token_k2", "token_k3"} == TOKEN_LEVEL_ROLLOUT_RS_OPTIONS


def test_criteria_are_verls_with_one_more() -> None:
    sequence_criteria = {
        "seq_sum_k1",
        "seq_sum_k2",
        "seq_sum_k3",
        "seq_mean_k1",
        "seq_mean_k2",
        "seq_mean_k3",
        "seq_max_k2",
        "seq_max_k3",
    }
    verl_criteria = TOKEN_LEVEL_ROLLOUT_RS_OPTIONS | sequence_criteria
    assert {*verl_criteria, "seq_mean_error"} == SUPPORTED_ROLLOUT_RS_OPTIONS


EVERY_CRITERION = ",".join(sorted(SUPPORTED_ROLLOUT_RS_OPTIONS))


@pytest.fixture(params=[2, 0], ids=["two columns", "no columns"])
def width(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(params=[0.0, math.nan, -math.inf], ids=["masked", "nan", "-inf"])
def unusable_batch(request: pytest.FixtureRequest, width: int) -> tuple[Tensor, Tensor]:
    """Log-ratios and a mask without a usable token."""
    log_ratio = torch.full((2, width), request.param)
    is_masked = request.param == 0.0
    return log_ratio, torch.full((2, width), 0.0 if is_masked else 1.0)


def test_rejection_of_an_unusable_batch_has_zero_metrics(
    unusable_batch: tuple[Tensor, Tensor],
) -> None:
    mask, metrics = compute_rollout_rejection_mask(*unusable_batch, EVERY_CRITERION, 2.0)
    assert mask.sum() == 0
    assert len(metrics) > 11 * 12
    assert set(metrics.values()) == {0.0}


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_of_an_unusable_batch_are_zero(
    unusable_batch: tuple[Tensor, Tensor], level: str
) -> None:
    weights, metrics = compute_rollout_correction_weights(*unusable_batch, level, "0.5_2.0")
    assert weights.sum() == 0
    assert set(metrics.values()) == {0.0}


def test_metrics_without_rollout_log_probs() -> None:
    metrics = compute_offpolicy_metrics(torch.tensor([[-1.0, -3.0]]), None, torch.ones(1, 2))
    assert metrics == pytest.approx({"training_ppl": 7.389056, "training_log_ppl": 2.0})


def test_metrics_with_rollout_log_probs() -> None:
    metrics = compute_rollout_corr_metrics_from_logprobs(
        torch.tensor([[-1.0]]), torch.tensor([[-0.5]]), torch.ones(1, 1)
    )
    assert metrics["rollout_corr/kl"] == pytest.approx(0.5)


def test_batch_gets_weights() -> None:
    options = {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"}
    batch, _ = compute_rollout_correction_and_add_to_batch(Batch(), options)
    assert batch.batch["rollout_is_weights"].max() == 2.0


def test_batch_gets_the_mask_after_rejection() -> None:
    options = {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"}
    batch, metrics = compute_rollout_correction_and_add_to_batch(Batch(), options)
    rejected = 1 - batch.batch["response_mask"].sum().item() / 94
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(rejected)


class Batch:
    """The part of a DataProto that the integration reads."""

    def __init__(self) -> None:
        names = ("old_log_probs", "rollout_log_probs", "response_mask")
        self.batch = dict(zip(names, inputs(), strict=True))


@pytest.fixture
def hydra_config() -> Any:
    """A struct as hydra passes it, which refuses new keys."""
    config = OmegaConf.create({"loss_mode": "vanilla", "clip_ratio": 0.2})
    OmegaConf.set_struct(config, True)
    with pytest.raises(ConfigKeyError):
        config["rollout_correction"] = None
    return config


def test_bypass_replaces_old_log_probs(hydra_config: Any) -> None:
    batch = Batch()
    apply_bypass_mode(batch, RolloutCorrectionConfig.pg_is(threshold=3.0), hydra_config)
    assert batch.batch["old_log_probs"] is batch.batch["rollout_log_probs"]


def test_bypass_writes_into_a_struct(hydra_config: Any) -> None:
    apply_bypass_mode(Batch(), RolloutCorrectionConfig.pg_is(threshold=3.0), hydra_config)
    assert hydra_config["loss_mode"] == "bypass_mode"
    assert hydra_config["rollout_correction"]["rollout_is_threshold"] == 3.0
    assert OmegaConf.is_struct(hydra_config)


def test_bypass_writes_into_a_dictionary() -> None:
    policy_loss: dict[str, object] = {"loss_mode": "vanilla"}
    apply_bypass_mode(Batch(), None, policy_loss)
    assert policy_loss == {"loss_mode": "bypass_mode", "rollout_correction": None}


def test_bypass_needs_rollout_log_probs() -> None:
    batch = Batch()
    del batch.batch["rollout_log_probs"]
    with pytest.raises(ValueError, match="bypass_mode=True requires rollout_log_probs in batch"):
        apply_bypass_mode(batch)


@pytest.mark.parametrize("sentinel", [-9999.0, -1e6, -math.inf])
@pytest.mark.parametrize("side", ["old", "rollout"])
def test_engine_code_for_minus_infinity_gets_no_weight(side: str, sentinel: float) -> None:
    old = torch.tensor([[-0.5, -1.0]])
    rollout = torch.tensor([[-0.5, -1.0]])
    if side == "old":
        old[0, 0] = sentinel
    else:
        rollout[0, 0] = sentinel
    proto, mask, metrics = compute_rollout_correction_and_rejection_mask(
        old,
        rollout,
        torch.ones(1, 2),
        rollout_is="token",
        rollout_rs="token_k1",
        rollout_rs_threshold=2.0,
    )
    assert proto.batch["rollout_is_weights"].tolist() == [[0.0, 1.0]]
    assert mask.tolist() == [[0.0, 1.0]]
    assert metrics["rollout_corr/k3_kl"] == 0.0
