"""bf16: the training engine and the local engine are as close to float32 as transformers is."""

import pytest
import torch
from torch import Tensor

from slime_tis.parity.executions import EXECUTIONS, Side
from slime_tis.parity.samples import joined, random_prompts
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.parity.test_parity_engines import OPERATIONS

BOUND = 1.5
"""Largest error of an engine in bf16, relative to transformers' own error.

The largest measured ratio is 1.06. Rounding differs from operation to operation, and a router that
chooses another expert weighs more than all of it."""
RESPONSES = [
    [(7 * sample + 11 * place) % VOCAB_SIZE for place in range(40)] for sample in range(16)
]
SAMPLES = joined(random_prompts(len(RESPONSES), 9, VOCAB_SIZE, seed=0), RESPONSES)


def log_probs(execution: str, checkpoint: str, precision: str) -> Tensor:
    """Log-probs of all tokens; NaN for those without one."""
    side = Side(execution=execution, checkpoint=checkpoint, precision=precision)
    with EXECUTIONS[execution].open(side) as record:
        return record(SAMPLES).log_probs_T


@pytest.fixture(scope="module", params=OPERATIONS)
def family(request, tmp_path_factory):
    """A checkpoint, its log-probs in float32, and transformers' error in bf16."""
    path = tmp_path_factory.mktemp("models") / request.param
    checkpoint = str(make_checkpoint(path, request.param))
    expected_T = log_probs("full", checkpoint, "fp32")
    rounded_T = log_probs("full", checkpoint, "bf16")
    return checkpoint, expected_T, (rounded_T - expected_T).abs()


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["training", "local"])
def test_an_engine_in_bf16_errs_as_transformers_does(execution, family):
    checkpoint, expected_T, transformers_error_T = family
    error_T = (log_probs(execution, checkpoint, "bf16") - expected_T).abs()
    # The local engine reports log-probs of responses only.
    is_compared_T = ~torch.isnan(error_T) & ~torch.isnan(transformers_error_T)
    assert int(is_compared_T.sum()) >= 16 * 40
    ratio = error_T[is_compared_T].mean() / transformers_error_T[is_compared_T].mean()
    assert 1 / BOUND < float(ratio) < BOUND
