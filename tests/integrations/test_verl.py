"""The verl integration against verl 0.9.1's own output, and where it deliberately differs."""

import json
import math
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError

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


def padded(key, fill, dtype):
    rows = [torch.tensor(s[key], dtype=dtype) for s in GOLDEN["sequences"]]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)


def inputs(padding=0.0):
    return (
        padded("train", padding, torch.float32),
        padded("rollout", padding, torch.float32),
        padded("mask", 0, torch.int64),
    )


def rows(nested):
    """Golden rows, which may be padded or not, cut to the length of their sequence."""
    return [list(row)[: len(s["mask"])] for row, s in zip(nested, GOLDEN["sequences"], strict=True)]


@pytest.mark.parametrize(
    "case", GOLDEN["cases"], ids=lambda case: "-".join(map(str, case["args"].values()))
)
def test_golden(case):
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
    _, mask, _ = compute_rollout_correction_and_rejection_mask(
        *inputs(), **case["args"]
    )  # symmetric bounds
    assert [mask[i, :n].tolist() for i, n in enumerate(lengths)] == rows(case["mask"])


def test_the_older_api():
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


def test_wrong_options_and_criteria_are_refused():
    with pytest.raises(ValueError, match="response_mask must contain at least one valid token"):
        compute_rollout_correction_and_rejection_mask(
            torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2)
        )
    with pytest.raises(ValueError, match="does not match rollout_log_prob shape"):
        compute_rollout_correction_and_rejection_mask(
            torch.zeros(1, 2), torch.zeros(1, 3), torch.ones(1, 2)
        )
    with pytest.raises(ValueError, match="rollout_rs_threshold is unset"):
        compute_rollout_correction_and_rejection_mask(*inputs(), rollout_rs="token_k1")
    with pytest.raises(ValueError, match="rollout_is is 'geometric'"):
        compute_rollout_correction_weights(torch.zeros(1, 2), torch.ones(1, 2), "geometric")
    # verl has a maximum of k2 and of k3, which are distances, and none of k1, which has a sign.
    with pytest.raises(
        ValueError, match=r"'seq_max_k4'; choose from token_k1, token_k2, .*seq_max_k2, seq_max_k3"
    ):
        compute_rollout_rejection_mask(torch.zeros(1, 2), torch.ones(1, 2), "seq_max_k4", 2.0)
    with pytest.raises(ValueError, match=r"'seq_max_k1'.* --rs-veto-threshold"):
        compute_rollout_rejection_mask(torch.zeros(1, 2), torch.ones(1, 2), "seq_max_k1", 2.0)


# (options, error, part of the message)
BAD_THRESHOLDS = {
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
def test_thresholds_that_are_no_numbers_are_refused(options, error, part):
    with pytest.raises(error, match=part) as raised:
        compute_rollout_correction_and_rejection_mask(*inputs(), **options)
    assert "contradicts" not in str(raised.value)


@pytest.mark.parametrize("compat", [False, True])
def test_a_lower_bound_of_zero_is_none(compat):
    """Ratios of e⁻⁹, 1 and e⁹; with `verl_compat` the bounds are on the inverse of the ratio."""
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


def test_pairs_as_thresholds_and_public_names():
    # float("0.5_2") is 0.52.
    log_ratio = torch.tensor([[0.45, 0.55, 1.9, 2.1]]).log()
    old = {"rollout_rs": "token", "rollout_rs_threshold": "0.5_2"}
    _, mask, _ = compute_rollout_correction_and_rejection_mask(
        log_ratio, torch.zeros(1, 4), torch.ones(1, 4), **old
    )
    assert mask.tolist() == [[0, 1, 1, 0]]
    with pytest.raises(ValueError, match="so has rollout_rs_threshold_lower"):
        compute_rollout_correction_and_rejection_mask(
            log_ratio, torch.zeros(1, 4), torch.ones(1, 4), **old, rollout_rs_threshold_lower=0.4
        )
    with pytest.raises(ValueError, match="tis_upper_bound is '2_3'"):
        compute_rollout_correction_weights(log_ratio, torch.ones(1, 4), "token", "1_2_3")
    assert (
        SAFETY_BOUND == 20.0
        and {"token_k1", "token_k2", "token_k3"} == TOKEN_LEVEL_ROLLOUT_RS_OPTIONS
    )
    sequence = {
        f"seq_{aggregation}_{k}"
        for aggregation in ("sum", "mean", "max")
        for k in ("k1", "k2", "k3")
    }
    assert TOKEN_LEVEL_ROLLOUT_RS_OPTIONS | sequence - {
        "seq_max_k1"
    } == SUPPORTED_ROLLOUT_RS_OPTIONS - {"seq_mean_error"}


EVERY_CRITERION = ",".join(sorted(SUPPORTED_ROLLOUT_RS_OPTIONS))


@pytest.mark.parametrize("width", [2, 0])
@pytest.mark.parametrize("value", [0.0, float("nan"), float("-inf")])
def test_a_batch_without_a_valid_token_gives_zeros(value, width):
    """Masked, not finite, or without columns: nothing is measured, and nothing raises."""
    log_ratio = torch.full((2, width), value)
    mask = torch.full((2, width), 0.0 if value == 0.0 else 1.0)
    kept, found = compute_rollout_rejection_mask(log_ratio, mask, EVERY_CRITERION, 2.0)
    assert kept.sum() == 0 and len(found) > 11 * 12 and set(found.values()) == {0.0}
    for level in ("token", "sequence"):
        weights, found = compute_rollout_correction_weights(log_ratio, mask, level, "0.5_2.0")
        assert weights.sum() == 0 and set(found.values()) == {0.0}


def test_metrics_alone_and_a_batch_with_weights():
    metrics = compute_offpolicy_metrics(torch.tensor([[-1.0, -3.0]]), None, torch.ones(1, 2))
    assert metrics == pytest.approx({"training_ppl": 7.389056, "training_log_ppl": 2.0})
    both = compute_rollout_corr_metrics_from_logprobs(
        torch.tensor([[-1.0]]), torch.tensor([[-0.5]]), torch.ones(1, 1)
    )
    assert both["rollout_corr/kl"] == pytest.approx(0.5)
    batch, metrics = compute_rollout_correction_and_add_to_batch(
        Batch(),
        {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"},
    )
    assert batch.batch["rollout_is_weights"].max() == 2.0
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(
        1 - batch.batch["response_mask"].sum().item() / 94
    )


class Batch:
    """What the integration reads of a DataProto."""

    def __init__(self):
        names = ("old_log_probs", "rollout_log_probs", "response_mask")
        self.batch = dict(zip(names, inputs(), strict=True))


def test_bypass_mode_writes_into_structs_and_dictionaries_and_needs_rollout_log_probs():
    # As hydra hands it over: a struct, which refuses new keys.
    config = OmegaConf.create({"loss_mode": "vanilla", "clip_ratio": 0.2})
    OmegaConf.set_struct(config, True)
    with pytest.raises(ConfigKeyError):
        config["rollout_correction"] = None
    batch = Batch()
    apply_bypass_mode(batch, RolloutCorrectionConfig.pg_is(threshold=3.0), config)
    assert batch.batch["old_log_probs"] is batch.batch["rollout_log_probs"]
    assert (
        config["loss_mode"] == "bypass_mode"
        and config["rollout_correction"]["rollout_is_threshold"] == 3.0
    )
    assert OmegaConf.is_struct(config)
    batch, policy_loss = Batch(), {"loss_mode": "vanilla"}
    apply_bypass_mode(batch, None, policy_loss)
    assert policy_loss == {"loss_mode": "bypass_mode", "rollout_correction": None}
    del batch.batch["rollout_log_probs"]
    with pytest.raises(ValueError, match="bypass_mode=True requires rollout_log_probs in batch"):
        apply_bypass_mode(batch)


@pytest.mark.parametrize("sentinel", [-9999.0, -1e6, -math.inf])
@pytest.mark.parametrize("side", ["old", "rollout"])
def test_a_code_for_minus_infinity_gets_no_weight(side, sentinel):
    pair = [torch.tensor([[sentinel, -1.0]]), torch.tensor([[-0.5, -1.0]])]
    old, rollout = pair if side == "old" else reversed(pair)
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
