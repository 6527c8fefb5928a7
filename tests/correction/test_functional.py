"""The functional core, which test_reference.py compares with `correct`: traced by torch.fx, compile and torch.func."""

import pytest
import torch

from slime_tis import RolloutCorrectionConfig, functional
from tests.correction.strategies import policy_batch

OPTIONS = {
    "token truncate": {"use_tis": True, "tis_upper_bound": 1.3},
    "segment clip": {"use_tis": True, "tis_level": "segment", "tis_mode": "clip", "tis_upper_bound": 1.3},
    "normalized sequence": {"use_tis": True, "tis_level": "sequence", "tis_batch_normalize": True},
    "geometric": {"use_rs": True, "rs_level": "geometric", "rs_lower_bound": 0.7, "rs_upper_bound": 1.2},
    "veto": {"use_tis": True, "rs_veto_threshold": 0.2, "rs_veto_upper_threshold": 4.0},
    "kpop": {"divergence_mask": "binary_kl_max", "divergence_mask_direction": "both"},
    "binary_tv away": {"divergence_mask": "binary_tv", "divergence_mask_bound": 0.05},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_fx_and_compile_and_vmap_trace_it(name):
    config = RolloutCorrectionConfig(**OPTIONS[name])

    def both(*inputs):
        train, rollout, mask, current, advantages = inputs
        return tuple(functional.correct(config, train, rollout, mask, current_log_probs=current, advantages=advantages))

    inputs = [x.float() for x in policy_batch().values()]
    expected = both(*inputs)
    for traced in (torch.fx.symbolic_trace(both), torch.compile(both, fullgraph=True, backend="eager")):
        for one, other in zip(traced(*inputs), expected, strict=True):
            assert torch.equal(one, other)
    if not config.tis_batch_normalize:
        for one, other in zip(torch.func.vmap(both)(*inputs), expected, strict=True):
            torch.testing.assert_close(one, other)


def test_no_gradient_flows_through_weights():
    config = RolloutCorrectionConfig(use_tis=True)
    train, rollout, mask, *_ = policy_batch().values()
    train[1, 2] = -1.0

    def loss(log_probs):
        found = functional.correct(config, log_probs, rollout, mask)
        return (found.weights * torch.where(found.mask, log_probs, 0.0)).sum()

    gradient = torch.func.grad(loss)(train)
    found = functional.correct(config, train, rollout, mask)
    torch.testing.assert_close(gradient, (found.weights * found.mask).double())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param({"use_rs": True, "rs_level": "geometric", "rs_z_score": 3.0}, "rs_z_score", id="z-score"),
        pytest.param({"rs_second_moment_bound": 0.1}, "rs_second_moment_bound", id="second moment"),
        pytest.param({"divergence_mask": "binary_tv"}, "advantages", id="advantages"),
    ],
)
def test_options_on_the_batch_are_refused(options, words):
    train, rollout, mask, *_ = policy_batch().values()
    with pytest.raises(ValueError, match=words):
        functional.correct(RolloutCorrectionConfig(**options), train, rollout, mask)
