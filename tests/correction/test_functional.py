"""The functional core against `slime_tis.correct`, and traced by torch.fx, torch.compile and torch.func."""

import math
from typing import Any

import pytest
import torch

from slime_tis import RolloutCorrectionConfig, correct, functional
from slime_tis.correction import CRITERIA

OPTIONS: dict[str, dict[str, Any]] = {
    "metrics": {"get_mismatch_metrics": True},
    **{
        f"{level} {mode}": {"use_tis": True, "tis_level": level, "tis_mode": mode, "tis_upper_bound": 1.3}
        for level in ("token", "sequence", "geometric", "prefix", "segment")
        for mode in ("truncate", "clip", "mask")
    },
    **{
        f"normalized {level}": {"use_tis": True, "tis_level": level, "tis_batch_normalize": True}
        for level in ("token", "sequence")
    },
    **{
        level: {"use_rs": True, "rs_level": level, "rs_lower_bound": 0.7, "rs_upper_bound": 1.2}
        for level in ("token", "sequence", "geometric")
    },
    **{
        name: {
            "rollout_rs": name,
            "rollout_rs_threshold": "0.5_1.5" if name.endswith("k1") else 2.0 if name.endswith("error") else 0.1,
        }
        for name in CRITERIA
    },
    "veto": {"use_tis": True, "rs_veto_threshold": 0.2, "rs_veto_upper_threshold": 4.0},
    "neutral": {"use_tis": True, "nonfinite_policy": "neutral"},
    "bypass": {"use_rollout_logprobs": True},
    "signed": {"use_tis": True, "tis_upper_bound": 2.0, "tis_upper_bound_negative": 1.1},
    **{
        f"{kind} {direction}": {
            "divergence_mask": kind,
            "divergence_mask_direction": direction,
            "divergence_mask_bound": 0.05,
        }
        for kind in ("binary_tv", "binary_kl")
        for direction in ("away", "both")
    },
    "kpop": {
        "divergence_mask": "binary_kl_max",
        "divergence_mask_direction": "both",
        "divergence_mask_level": "sequence",
        "divergence_mask_bound": 0.02,
    },
}


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rollout = -3 * torch.rand(12, 20, generator=generator)
    train = (rollout + 0.3 * torch.randn(12, 20, generator=generator)).clamp(max=0.0)
    mask = (torch.rand(12, 20, generator=generator) > 0.3).float()
    mask[3] = 0.0
    rollout[0, 1], train[1, 2], rollout[2, 3] = math.nan, -math.inf, -1e30
    return train, rollout, mask, torch.randn(12, 1, generator=generator).expand(12, 20).contiguous()


@pytest.mark.parametrize("name", OPTIONS)
def test_weights_and_mask_equal_correct(name: str) -> None:
    config = RolloutCorrectionConfig(**OPTIONS[name])
    for seed in range(5):
        train, rollout, mask, advantages = batch(seed)
        expected = correct(config, train, rollout, mask, advantages=advantages)
        found = functional.correct(config, train, rollout, mask, advantages=advantages)
        assert torch.equal(found.mask, expected.mask)
        torch.testing.assert_close(found.weights * found.mask, expected.weights * expected.mask, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(
    "name", ["token truncate", "segment clip", "geometric", "veto", "kpop", "binary_tv away", "normalized sequence"]
)
def test_fx_and_compile_and_vmap_trace_it(name: str) -> None:
    config = RolloutCorrectionConfig(**OPTIONS[name])

    def both(train: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor, advantages: torch.Tensor) -> Any:
        return tuple(functional.correct(config, train, rollout, mask, advantages=advantages))

    inputs = batch()
    expected = both(*inputs)
    for traced in (torch.fx.symbolic_trace(both), torch.compile(both, fullgraph=True, backend="eager")):
        for one, other in zip(traced(*inputs), expected, strict=True):
            assert torch.equal(one, other)
    if not config.tis_batch_normalize:
        for one, other in zip(torch.func.vmap(both)(*inputs), expected, strict=True):
            torch.testing.assert_close(one, other)


def test_no_gradient_flows_through_weights() -> None:
    config = RolloutCorrectionConfig(use_tis=True)
    train, rollout, mask, _ = batch(7)
    train[1, 2] = -1.0

    def loss(log_probs: torch.Tensor) -> torch.Tensor:
        found = functional.correct(config, log_probs, rollout, mask)
        return (found.weights * torch.where(found.mask, log_probs, 0.0)).sum()

    gradient = torch.func.grad(loss)(train)
    found = functional.correct(config, train, rollout, mask)
    torch.testing.assert_close(gradient, found.weights * found.mask)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param({"use_rs": True, "rs_level": "geometric", "rs_z_score": 3.0}, "rs_z_score", id="z-score"),
        pytest.param({"rs_second_moment_bound": 0.1}, "rs_second_moment_bound", id="second moment"),
        pytest.param({"divergence_mask": "binary_tv"}, "advantages", id="advantages"),
    ],
)
def test_options_on_the_batch_are_refused(options: dict[str, Any], words: str) -> None:
    train, rollout, mask, _ = batch()
    with pytest.raises(ValueError, match=words):
        functional.correct(RolloutCorrectionConfig(**options), train, rollout, mask)
