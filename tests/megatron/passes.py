"""Passes of a training engine over a batch, compared, and functions on several ranks."""

import os
from pathlib import Path

import torch
from torch import Tensor

from slime_tis.policy.policy_loss import LossOutputs
from slime_tis.trainer.configs.megatron import MegatronConfig
from slime_tis.trainer.megatron.parallel import initialize, shut_down
from tests.runs import free_port, rank_environment, spawn

RECOMPUTE_LAYERS = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


class Values(list[Tensor]):
    """Log-probs and entropies of micro-batches, in the place of a step's sums."""

    def merge(self, other):
        return Values([*self, *other])


def outputs(inputs, numerator):
    sums = Values([torch.stack([inputs.log_probs_L, inputs.entropy_L]).detach()])
    no_record = None
    count = torch.tensor(len(inputs.log_probs_L), dtype=torch.int)
    return LossOutputs(
        numerator=numerator, denominator=count, contributing=count, sums=sums, record=no_record
    )


def likelihood(inputs):
    """The negative mean log-prob."""
    return outputs(inputs, -inputs.log_probs_L.sum())


def weighted_loss(inputs):
    """Log-probs with different weights, and entropies."""
    weight_L = torch.linspace(0.5, 1.5, len(inputs.log_probs_L))
    return outputs(inputs, 0.3 * inputs.entropy_L.sum() - (weight_L * inputs.log_probs_L).sum())


def results(engine, batch, partition):
    """Old and reference log-probs, values in training, and the gradient of every parameter."""
    old = engine.log_probs(batch, partition, sums_squares=True)
    found = {"old": old, "reference": engine.reference_log_probs(batch, partition)}
    step = engine.train_step(batch, partition, weighted_loss)
    assert step.loss_denominator > 0
    values = step.sums or []
    found |= {f"values {number}": value for number, value in enumerate(values)}
    for name, parameter in engine.model.module.named_parameters():
        found[name] = parameter.main_grad.clone()
    assert not engine.parallel.is_last_stage or any(bool(value.any()) for value in values)
    return found


def assert_same_results(actual, expected, *, rtol=1e-5, atol=1e-5):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name],
            value,
            rtol=rtol,
            atol=atol,
            equal_nan=True,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def on_ranks(function, directory, layout, ranks=2):
    """Calls `function(parallel, directory, layout)` on some ranks.

    `layout` has fields of MegatronConfig.
    """
    spawn(
        _on_a_rank,
        (rank_environment(0, ranks, free_port()), function, str(directory), layout),
        ranks,
    )


def _on_a_rank(rank, environment, function, directory, layout):
    torch.set_num_threads(1)
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    function(initialize(MegatronConfig(hf_checkpoint="none", **layout)), Path(directory), layout)
    shut_down()
