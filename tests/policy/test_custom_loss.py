"""The user's functions for advantages and losses, held to their contracts."""

from argparse import Namespace

import pytest
import torch

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
from tests.policy.test_policy_loss import make

ARGS = Namespace(rollout_max_response_len=8)
OPTIONS = {
    "loss": {"loss_type": "custom_loss", "custom_loss_function_path": None},
    "reducer": {"custom_pg_loss_reducer_function_path": None},
    "advantage": {"custom_advantage_function_path": None},
}


def make_tokens(lengths):
    values = [[0.5] * length for length in lengths]
    masks = [[1] * length for length in lengths]
    return make(masks, rollout_log_probs=values, old_log_probs=values, advantages=values)


def load(tmp_path, kind, code):
    path = tmp_path / f"own_{len(list(tmp_path.iterdir()))}.py"
    path.write_text(code)
    options = {name: value or f"{path}:fn" for name, value in OPTIONS[kind].items()}
    return ObjectiveFunctions.load(PolicyConfig(**options), ARGS)


def call_loss(tmp_path, body):
    code = f"import torch\ndef fn(args, batch, logits, sum_of_sample_mean):\n    {body}\n"
    function = load(tmp_path, "loss", code).loss
    logits = torch.arange(15.0).view(1, 5, 3).requires_grad_() * 1
    loss = CustomLoss(function=function, args=ARGS, seed=0)
    return loss(make_tokens([2, 3]), torch.arange(5.0), [], logits, torch.sum)


def test_a_loss_gets_slimes_batch(tmp_path):
    body = """
    assert sorted(batch) == [
        "advantages", "log_probs", "loss_masks", "response_lengths", "rollout_is_weights",
        "rollout_log_probs", "total_lengths", "unconcat_tokens"
    ], sorted(batch)
    assert [len(part) for part in batch["advantages"]] == batch["response_lengths"] == [2, 3]
    assert [part.tolist() for part in batch["rollout_is_weights"]] == [[0, 1], [2, 3, 4]]
    batch["advantages"][0].zero_()
    torch.set_default_dtype(torch.float64)
    return sum_of_sample_mean(logits), {"seen": 2}"""
    loss, metrics = call_loss(tmp_path, body.strip())
    assert loss.item() == 105 and loss.requires_grad and metrics == {"seen": 2}
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


def assert_refused(message, function, *arguments):
    with pytest.raises(CustomFunctionError) as refusal:
        function(*arguments)
    assert message in str(refusal.value)


@pytest.mark.parametrize("body", WRONG_LOSSES)
def test_a_wrong_loss_is_one_message(tmp_path, body):
    assert_refused(
        f"fn ({tmp_path}/own_0.py, line 2) {WRONG_LOSSES[body]}", call_loss, tmp_path, body
    )


def test_a_loss_that_raises_is_one_message_with_its_line(tmp_path):
    with pytest.raises(
        CustomFunctionError, match=r"fn \(.*own_0.py, line 3\) raised KeyError: 'values'"
    ):
        call_loss(tmp_path, "return batch['values'], {}")


def reduce(functions):
    loss = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], requires_grad=True) * 1
    mask = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])
    return reduced_loss(functions, make_tokens([2, 3]), loss, mask, per_token=False, seed=0)


def test_a_reducer_reduces_and_is_checked(tmp_path):
    head = (
        "import torch\ndef fn(total_lengths, response_lengths, loss_masks,"
        " calculate_per_token_loss=False):\n    "
    )
    functions = load(
        tmp_path,
        "reducer",
        head + "return lambda loss: (loss * torch.cat(loss_masks)).sum() / 100\n",
    )
    assert reduce(functions).item() == pytest.approx(0.12)
    for body, message in {
        "return lambda loss: loss.detach().sum()": f"{LOST} pg_loss",
        "return lambda loss: loss": (
            "returned a tensor of shape (5,) and type float32 as the reduced loss"
        ),
        "return 3": "raised TypeError: 'int' object is not callable",
    }.items():
        assert_refused(message, reduce, load(tmp_path, "reducer", f"{head}{body}\n"))
    name = "slime_tis.policy.reducers.dr_grpo"
    functions = ObjectiveFunctions.load(
        PolicyConfig(custom_pg_loss_reducer_function_path=name), ARGS
    )
    assert functions.reducer is dr_grpo
    assert reduce(functions).item() == pytest.approx((1 + 2 + 4 + 5) / 8)


def test_functions_cannot_change_what_is_trained_in_place(tmp_path):
    sequences = [torch.arange(4), torch.arange(5)]
    tokens = make_tokens([2, 3])
    masks = tokens.loss_mask_N.clone()
    found = loss_batch(tokens, sequences)
    for key in ("unconcat_tokens", "loss_masks", "rollout_log_probs"):
        for value in found[key]:
            value.fill_(7)
    assert torch.equal(tokens.loss_mask_N, masks) and [one.tolist() for one in sequences] == [
        [0, 1, 2, 3],
        [*range(5)],
    ]
    assert not (tokens.rollout_log_probs_L == 7).any()


def advantages(functions):
    data = {"rewards": [1.0, -1.0], "response_lengths": [2, 3]}
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0])
    return token_advantages(functions, data, [2, 3], mask, seed=0).tolist()


def test_advantages_are_of_every_token_and_checked(tmp_path):
    head = "import torch\ndef fn(args, rollout_data):\n    rollout_data['advantages'] = "
    pairs = "zip(rollout_data['rewards'], rollout_data['response_lengths'])"
    functions = load(
        tmp_path, "advantage", f"{head}[r * torch.arange(1.0, n + 1) for r, n in {pairs}]\n"
    )
    assert advantages(functions) == [1, 2, -1, -2, -3]
    masked = load(
        tmp_path, "advantage", f"{head}[torch.tensor([1.0, float('nan')]), torch.ones(3)]\n"
    )
    assert advantages(masked) == [1, 0, 1, 1, 1]  # what is masked may be anything
    for value, message in {
        "None": "left NoneType as rollout_data['advantages']; leave a list of 2 tensors.",
        "[torch.ones(2)]": (
            "left a list of 1 as rollout_data['advantages']; leave a list of 2 tensors."
        ),
        "[torch.ones(2), torch.ones(2)]": (
            "left a tensor of shape (2,) and type float32 as the advantages of sample 1"
        ),
        "[torch.ones(2), torch.ones(3) / 0]": (
            "left 3 advantages that are NaN or infinite; leave finite numbers."
        ),
    }.items():
        assert_refused(message, advantages, load(tmp_path, "advantage", f"{head}{value}\n"))


def test_metrics_are_compared_with_those_of_the_first_micro_batch(tmp_path):
    code = "def fn(args, batch, logits, mean):\n    fn.n = getattr(fn, 'n', -1) + 1\n"
    code += "    return logits.sum(), {'a': 1.0} | ({'b': 2.0} if fn.n == 2 else {})\n"
    function = load(tmp_path, "loss", code.replace("mean", "sum_of_sample_mean")).loss
    loss, logits = (
        CustomLoss(function=function, args=ARGS, seed=0),
        torch.ones(1, 5, 3).requires_grad_() * 1,
    )
    for _ in range(2):
        loss(make_tokens([2, 3]), torch.ones(5), [], logits, torch.sum)
    with pytest.raises(CustomFunctionError, match="'b' for one micro-batch and not for another"):
        loss(make_tokens([2, 3]), torch.ones(5), [], logits, torch.sum)
