"""Contracts of the user's functions for advantages and losses."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_tis.errors import CustomFunctionError
from slime_tis.policy.config import PolicyConfig
from slime_tis.policy.custom_loss import (
    CustomLoss,
    ObjectiveFunctions,
    loss_batch,
    reduced_loss,
    token_advantages,
)
from slime_tis.policy.reducers import dr_grpo
from slime_tis.policy.response_tokens import ResponseTokens
from tests.policy.test_policy_loss import make

ARGS = Namespace(rollout_max_response_len=8)
OPTIONS: dict[str, dict[str, Any]] = {
    "loss": {"loss_type": "custom_loss", "custom_loss_function_path": None},
    "reducer": {"custom_pg_loss_reducer_function_path": None},
    "advantage": {"custom_advantage_function_path": None},
}


def make_tokens(lengths: list[int]) -> ResponseTokens:
    values = [[0.5] * length for length in lengths]
    masks = [[1] * length for length in lengths]
    return make(masks, rollout_log_probs=values, old_log_probs=values, advantages=values)


def load(tmp_path: Path, kind: str, code: str) -> ObjectiveFunctions:
    path = tmp_path / f"own_{len(list(tmp_path.iterdir()))}.py"
    path.write_text(code)
    options: dict[str, Any] = {name: value or f"{path}:fn" for name, value in OPTIONS[kind].items()}
    return ObjectiveFunctions.load(PolicyConfig(**options), ARGS)


def call_loss(tmp_path: Path, body: str) -> tuple[Tensor, dict[str, Tensor]]:
    code = f"import torch\ndef fn(args, batch, logits, sum_of_sample_mean):\n    {body}\n"
    function = load(tmp_path, "loss", code).loss
    assert function is not None
    logits = torch.arange(15.0).view(1, 5, 3).requires_grad_() * 1
    loss = CustomLoss(function=function, args=ARGS, seed=0)
    return loss(make_tokens([2, 3]), torch.arange(5.0), [], logits, torch.sum)


def test_loss_gets_slimes_batch(tmp_path: Path) -> None:
    body = """
    assert sorted(batch) == [
        "advantages", "log_probs", "loss_masks", "response_lengths", "rollout_is_weights",
        "rollout_log_probs", "total_lengths", "unconcat_tokens"
    ], sorted(batch)
    assert [len(part) for part in batch["advantages"]] == batch["response_lengths"] == [2, 3]
    assert [part.tolist() for part in batch["rollout_is_weights"]] == [[0, 1], [2, 3, 4]]
    batch["advantages"][0].zero_()
    return sum_of_sample_mean(logits), {"seen": 2}"""
    loss, metrics = call_loss(tmp_path, body.strip())
    assert loss.item() == 105
    assert loss.requires_grad
    assert metrics == {"seen": 2}


def test_loss_does_not_change_global_settings(tmp_path: Path) -> None:
    body = "torch.set_default_dtype(torch.float64); return logits.sum(), {}"
    call_loss(tmp_path, body)
    assert torch.get_default_dtype() == torch.float32


LOST = "returned a loss that lost the gradient of"
WRONG_LOSSES = {
    "return logits.detach().sum(), {}": f"{LOST} logits",
    "return torch.tensor(1.0, requires_grad=True), {}": f"{LOST} logits",
    "return (logits * float('nan')).sum(), {}": "returned nan as the loss; return a finite number.",
    "return logits[0, 0], {}": (
        "returned a tensor of shape (3,) and type float32 as the loss; return a"
    ),
    "return 1.0, {}": "returned float as the loss; return a scalar tensor.",
    "return logits.sum()": (
        "returned a tensor of shape () and type float32; return the tuple (loss, "
    ),
    "return logits.sum(), {'a': logits}": (
        "returned a tensor of shape (1, 5, 3) and type float32 as metric"
    ),
    "return logits.sum(), {3: 1}": "returned a metric named 3",
}


def assert_refused(message: str, function: Callable[..., Any], *arguments: Any) -> None:
    with pytest.raises(CustomFunctionError) as refusal:
        function(*arguments)
    assert message in str(refusal.value)


@pytest.mark.parametrize("body", WRONG_LOSSES)
def test_wrong_loss_is_one_message(tmp_path: Path, body: str) -> None:
    message = f"fn ({tmp_path}/own_0.py, line 2) {WRONG_LOSSES[body]}"
    assert_refused(message, call_loss, tmp_path, body)


def test_exception_in_a_loss_names_the_line(tmp_path: Path) -> None:
    message = r"fn \(.*own_0.py, line 3\) raised KeyError: 'values'"
    with pytest.raises(CustomFunctionError, match=message):
        call_loss(tmp_path, "return batch['values'], {}")


def reduce(functions: ObjectiveFunctions) -> Tensor:
    loss = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], requires_grad=True) * 1
    mask = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])
    return reduced_loss(functions, make_tokens([2, 3]), loss, mask, per_token=False, seed=0)


REDUCER = """
import torch
def fn(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
    """


def test_reducer_reduces(tmp_path: Path) -> None:
    body = "return lambda loss: (loss * torch.cat(loss_masks)).sum() / 100\n"
    functions = load(tmp_path, "reducer", REDUCER + body)
    assert reduce(functions).item() == pytest.approx(0.12)


WRONG_REDUCERS = {
    "return lambda loss: loss.detach().sum()": f"{LOST} pg_loss",
    "return lambda loss: loss": (
        "returned a tensor of shape (5,) and type float32 as the reduced loss"
    ),
    "return 3": "raised TypeError: 'int' object is not callable",
}


@pytest.mark.parametrize("body", WRONG_REDUCERS)
def test_wrong_reducer_is_refused(tmp_path: Path, body: str) -> None:
    functions = load(tmp_path, "reducer", f"{REDUCER}{body}\n")
    assert_refused(WRONG_REDUCERS[body], reduce, functions)


def test_dr_grpo_divides_by_the_longest_response() -> None:
    config = PolicyConfig(custom_pg_loss_reducer_function_path="slime_tis.policy.reducers.dr_grpo")
    functions = ObjectiveFunctions.load(config, ARGS)
    assert functions.reducer is dr_grpo
    assert reduce(functions).item() == pytest.approx((1 + 2 + 4 + 5) / 8)


def test_functions_get_copies() -> None:
    sequences = [torch.arange(4), torch.arange(5)]
    tokens = make_tokens([2, 3])
    masks = tokens.loss_mask_N.clone()
    data = loss_batch(tokens, sequences)
    for key in ("unconcat_tokens", "loss_masks", "rollout_log_probs"):
        for value in data[key]:
            value.fill_(7)
    assert torch.equal(tokens.loss_mask_N, masks)
    assert [sequence.tolist() for sequence in sequences] == [[0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert not (tokens.rollout_log_probs_L == 7).any()


def advantages(functions: ObjectiveFunctions) -> list[float]:
    data = {"rewards": [1.0, -1.0], "response_lengths": [2, 3]}
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0])
    return token_advantages(functions, data, [2, 3], mask, seed=0).tolist()


ADVANTAGE = "import torch\ndef fn(args, rollout_data):\n    rollout_data['advantages'] = "


def test_advantages_are_per_token(tmp_path: Path) -> None:
    pairs = "zip(rollout_data['rewards'], rollout_data['response_lengths'])"
    code = f"{ADVANTAGE}[r * torch.arange(1.0, n + 1) for r, n in {pairs}]\n"
    assert advantages(load(tmp_path, "advantage", code)) == [1, 2, -1, -2, -3]


def test_masked_advantages_may_be_nan(tmp_path: Path) -> None:
    code = f"{ADVANTAGE}[torch.tensor([1.0, float('nan')]), torch.ones(3)]\n"
    assert advantages(load(tmp_path, "advantage", code)) == [1, 0, 1, 1, 1]


WRONG_ADVANTAGES = {
    "None": "left NoneType as rollout_data['advantages']; leave a list of 2 tensors.",
    "[torch.ones(2)]": "left a list of 1 as rollout_data['advantages']; leave a list of 2 tensors.",
    "[torch.ones(2), torch.ones(2)]": (
        "left a tensor of shape (2,) and type float32 as the advantages of sample 1"
    ),
    "[torch.ones(2), torch.ones(3) / 0]": (
        "left 3 advantages that are NaN or infinite; leave finite numbers."
    ),
}


@pytest.mark.parametrize("value", WRONG_ADVANTAGES)
def test_wrong_advantages_are_refused(tmp_path: Path, value: str) -> None:
    functions = load(tmp_path, "advantage", f"{ADVANTAGE}{value}\n")
    assert_refused(WRONG_ADVANTAGES[value], advantages, functions)


FORGETFUL = """
def fn(args, batch, logits, sum_of_sample_mean):
    fn.calls = getattr(fn, "calls", 0) + 1
    metrics = {"a": 1.0}
    if fn.calls == 3:
        metrics["b"] = 2.0
    return logits.sum(), metrics
"""


def test_all_micro_batches_need_the_same_metrics(tmp_path: Path) -> None:
    function = load(tmp_path, "loss", FORGETFUL).loss
    assert function is not None
    loss = CustomLoss(function=function, args=ARGS, seed=0)
    logits = torch.ones(1, 5, 3).requires_grad_() * 1
    for _ in range(2):
        loss(make_tokens([2, 3]), torch.ones(5), [], logits, torch.sum)
    with pytest.raises(CustomFunctionError, match="'b' for one micro-batch and not for another"):
        loss(make_tokens([2, 3]), torch.ones(5), [], logits, torch.sum)
