"""Log-probs from logits and hidden states equal log_softmax, in the memory of one tile."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slime_tis.trainer.data.sample import SamplingMask
from slime_tis.trainer.megatron import log_probs
from slime_tis.trainer.megatron.log_probs import (
    TokenDistribution,
    fused_linear_log_probs,
    vocab_parallel_log_probs,
)

ROWS, INPUTS, VOCABULARY, PADDED = 9, 6, 13, 15
SETS = [[0, 5, 2], [3], [12, 1], [], [7, 8, 9], [4], [6, 0], [2, 11], []]
"""The first of each is the target."""
TARGETS = torch.tensor([0, 3, 12, 10, 7, 4, 6, 2, 1])
WHOLE = TokenDistribution()
FIVE = torch.tensor(
    [[0.1, 0.2, 0.3, 0.15, 0.25], [0.5, 0.2, 0.1, 0.15, 0.05], [0.2, 0.2, 0.2, 0.2, 0.2]]
).log()

tilings = pytest.mark.parametrize(
    "entries",
    [0, 10**6, 36, 20],
    ids=["all logits", "one tile", "blocks of the vocabulary", "chunks and blocks"],
)


@pytest.fixture(autouse=True)
def small_tiles(request, monkeypatch):
    """Tiles of the test's `entries`."""
    callspec = getattr(request.node, "callspec", None)
    entries = callspec.params.get("entries", 20) if callspec else 20
    monkeypatch.setattr(log_probs, "TILE_BYTES", 4 * entries)
    monkeypatch.setattr(log_probs, "MIN_COLUMNS", 4)


def over_sets(sets):
    return TokenDistribution(sampling_mask=SamplingMask.from_sets(sets))


def dense_log_probs(logits, target, distribution):
    """The reference: log-probs, entropies and Σ π² by torch's log_softmax over a dense mask."""
    allowed = torch.ones_like(logits, dtype=torch.bool)
    if distribution.sampling_mask is not None:
        for row, mask in zip(
            allowed, distribution.sampling_mask.split([1] * len(logits)), strict=True
        ):
            if len(mask.token_ids):
                row[:] = False
                row[mask.token_ids.long()] = True
    log_softmax = (
        (logits / distribution.temperature).masked_fill(~allowed, -torch.inf).log_softmax(-1)
    )
    entropy = -(log_softmax.exp() * log_softmax.masked_fill(~allowed, 0.0)).sum(-1)
    return log_softmax.gather(1, target[:, None])[:, 0], entropy, log_softmax.exp().square().sum(-1)


def fused(distribution=WHOLE, target=TARGETS, total=None):
    """Log-probs from hidden states.

    The gradient of the weight is added to `total`, or becomes the weight's `main_grad`.
    """

    def log_probs(hidden, weight):
        weight.main_grad = torch.zeros(weight.shape) if total is None else total  # megatron-core's
        return fused_linear_log_probs(hidden, weight, target, distribution, weight.main_grad)

    return log_probs


def from_logits(distribution=WHOLE):
    def log_probs(hidden, weight):
        logits = hidden.to(weight.dtype) @ weight.t()
        logits.detach()[:, VOCABULARY:] = -torch.inf  # as the engine does
        return vocab_parallel_log_probs(logits, TARGETS, distribution)

    return log_probs


def values_and_gradients(log_probs, hidden, weight, grads):
    """All values, and the gradients of hidden states and weight.

    `grads` [2, rows] are the gradients of log-probs and entropies.
    """
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    values = log_probs(*leaves)
    (torch.stack(values[:2]) * grads).sum().backward()
    of_hidden, of_weight = leaves[0].grad, leaves[1].grad
    return [*(v.detach() for v in values), of_hidden, getattr(leaves[1], "main_grad", of_weight)]


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, [0.75, 0.2]), (0.5, [0.9, 1 / 17])])
def test_hand_computed_table(temperature, expected):
    logits, distribution = (
        torch.tensor([[0.0, 3.0], [4.0, 0.0]]),
        TokenDistribution(temperature=temperature),
    )
    logits[logits > 0] = logits[logits > 0].log()
    log_prob, entropy = vocab_parallel_log_probs(logits, torch.tensor([1, 1]), distribution)
    torch.testing.assert_close(log_prob.exp(), torch.tensor(expected))
    entropies = [-p * math.log(p) - (1 - p) * math.log(1 - p) for p in expected]
    torch.testing.assert_close(entropy, torch.tensor(entropies))


@tilings
@pytest.mark.parametrize("chunk_size", [-1, 1, 4, 100])
@pytest.mark.parametrize("masked", [False, True], ids=["all tokens", "sampled sets"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    "entropy_gradient", [False, True], ids=["log-prob gradient", "entropy gradient"]
)
@pytest.mark.parametrize(
    "zeros", [(), (0, 1, 5), range(ROWS)], ids=["all rows", "some zero", "all zero"]
)
def test_differentiated_values_match_a_dense_masked_softmax(
    entries, chunk_size, masked, temperature, entropy_gradient, zeros
):
    torch.manual_seed(0)
    hidden, weight = torch.randn(ROWS, INPUTS), torch.randn(PADDED, INPUTS)
    grads = torch.randn(2, ROWS)
    grads[:, list(zeros)] = 0.0
    grads[1] *= entropy_gradient
    distribution = TokenDistribution(
        vocab_size=VOCABULARY,
        sampling_mask=SamplingMask.from_sets(SETS) if masked else None,
        chunk_size=chunk_size,
        temperature=temperature,
        entropy_gradient=entropy_gradient,
        sums_squares=True,
    )

    def dense(hidden, weight):
        return dense_log_probs(hidden @ weight[:VOCABULARY].t(), TARGETS, distribution)

    implementation = fused(distribution) if entries else from_logits(distribution)
    expected = values_and_gradients(dense, hidden.double(), weight.double(), grads)
    actual = values_and_gradients(implementation, hidden, weight, grads)
    for value, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(value.double(), reference, atol=2e-6, rtol=1e-5)
    values = implementation(hidden.requires_grad_(), weight)
    assert [value.requires_grad for value in values] == [True, entropy_gradient, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gradient_of_the_weight_is_added_to_a_given_tensor(dtype):
    torch.manual_seed(0)
    hidden, weight = torch.randn(ROWS, INPUTS).to(dtype), torch.randn(PADDED, INPUTS).to(dtype)
    before, padded, grads = (
        torch.randn(PADDED, INPUTS),
        TokenDistribution(vocab_size=VOCABULARY),
        torch.ones(2, ROWS),
    )
    added = values_and_gradients(fused(padded), hidden, weight, grads)[-1]
    total = values_and_gradients(fused(padded, total=before.clone()), hidden, weight, grads)[-1]
    torch.testing.assert_close(total - before, added, rtol=0, atol=1e-5)
    assert torch.equal(total[VOCABULARY:], before[VOCABULARY:])


def test_no_rows_have_no_values():
    log_probs = fused(target=torch.zeros(0, dtype=torch.int64))
    values = values_and_gradients(
        log_probs, torch.randn(0, 3), torch.randn(5, 3), torch.zeros(2, 0)
    )
    assert [value.tolist() for value in values] == [[], [], [], [[0.0] * 3] * 5]


def test_a_nan_weight_makes_every_row_nan():
    weight = torch.randn(VOCABULARY, INPUTS)
    weight[2] = torch.nan
    log_prob, entropy = fused()(torch.randn(ROWS, INPUTS), weight)
    assert log_prob.isnan().all()
    assert entropy.isnan().all()


@pytest.mark.parametrize("entries", [10**6, 36], ids=["one tile", "blocks of the vocabulary"])
def test_large_logits_in_another_block_leave_no_rounding(entries):
    logits = torch.zeros(9, 13)
    logits[0, 12], logits[1, 0], logits[2, 12] = 300.0, 300.0, -300.0
    target = torch.tensor([12, 12, 0, *range(6)])
    log_prob, entropy = fused(target=target)(torch.eye(9), logits.t().contiguous())
    # certain; 300 below; uniform over 12 of 13; uniform
    expected = torch.tensor([0.0, -300.0, -2.4849066, *[-2.5649494] * 6])
    torch.testing.assert_close(log_prob, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(
        entropy, torch.tensor([0.0, 0.0, 2.4849066, *[2.5649494] * 6]), atol=1e-6, rtol=1e-6
    )


@pytest.mark.parametrize(
    ("implementation", "gradient"),
    [(fused, torch.float32), (from_logits, torch.bfloat16)],
    ids=["from hidden states", "from logits"],
)
def test_sums_over_bfloat16_logits_are_in_float32(implementation, gradient):
    torch.manual_seed(0)
    hidden, weight = (
        torch.randn(ROWS, INPUTS).bfloat16().float(),
        torch.randn(VOCABULARY, INPUTS).bfloat16(),
    )
    grads = torch.randn(2, ROWS)

    def dense(hidden, weight):
        return dense_log_probs((hidden.bfloat16() @ weight.t()).float(), TARGETS, WHOLE)[:2]

    expected = values_and_gradients(dense, hidden, weight, grads)
    actual = values_and_gradients(implementation(), hidden, weight, grads)
    assert [value.dtype for value in actual] == [*[torch.float32] * 3, gradient]
    torch.testing.assert_close(actual[:2], expected[:2], atol=2e-6, rtol=1e-5)
    for value, reference in zip(actual[2:], expected[2:], strict=True):
        torch.testing.assert_close(value.float(), reference.float(), atol=0.02, rtol=0.02)


MATRIX_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.mkldnn._linear_pointwise.default)


class Sizes(TorchDispatchMode):
    """The largest result of an operation, in entries, except tensors of the weight's size.

    Counts the products that give logits.
    """

    def __init__(self, weight):
        super().__init__()
        self.largest = 0
        self.ignored = weight.numel()
        self.inputs = weight.shape[1]
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in MATRIX_PRODUCTS and out.shape[-1] != self.inputs:
            self.products += 1
        sizes = [x.numel() for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, Tensor)]
        self.largest = max([self.largest, *(size for size in sizes if size != self.ignored)])
        return out


@pytest.mark.parametrize(
    ("entries", "zeros", "largest", "products"),
    [
        pytest.param(10**6, 0, 640, 1, id="one tile, whose logits are computed once"),
        pytest.param(160, 0, 160, 4 + 3, id="four tiles: the last one's logits are computed once"),
        pytest.param(160, 30, 160, 4 + 3, id="rows without gradient"),
        pytest.param(160, 40, 160, 4, id="no gradient"),
    ],
)
def test_only_one_tile_of_logits_exists_at_a_time(entries, zeros, largest, products):
    hidden, weight = torch.randn(40, 2).requires_grad_(), torch.randn(16, 2).requires_grad_()
    grad = torch.ones(40)
    grad[:zeros] = 0.0
    with Sizes(weight) as sizes:
        distribution = TokenDistribution(entropy_gradient=False)
        fused(distribution, torch.arange(40) % 16)(hidden, weight)[0].backward(grad)
    assert (sizes.largest, sizes.products) == (largest, products)


def test_the_saved_matrix_is_in_the_memory_of_the_logits():
    logits = torch.randn(11, 17).requires_grad_() * 1.0
    saved = []

    def keep(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        vocab_parallel_log_probs(logits, torch.zeros(11, dtype=torch.int64), WHOLE)
    assert [tensor.data_ptr() for tensor in saved if tensor.numel() == logits.numel()] == [
        logits.data_ptr()
    ]


def test_log_probs_over_the_sampled_sets_by_hand():
    # {1, 2, 4} has mass 0.75, {0} is certain, and the last row has no set. Id 77 is beyond the
    # vocabulary.
    leaf = FIVE.clone().requires_grad_()
    sets = over_sets([[1, 2, 4, 77], [0], []])
    log_prob, entropy = vocab_parallel_log_probs(leaf * 1.0, torch.tensor([2, 0, 3]), sets)
    torch.testing.assert_close(log_prob.exp(), torch.tensor([0.4, 1.0, 0.2]))
    # -(4/15 ln 4/15 + 0.4 ln 0.4 + 1/3 ln 1/3), 0, ln 5
    torch.testing.assert_close(entropy, torch.tensor([1.0851894, 0.0, 1.6094379]))
    (log_prob.sum() + entropy.sum()).backward()
    assert leaf.grad is not None
    assert leaf.grad[0, [0, 3]].tolist() == [0.0] * 2
    assert leaf.grad[1, 1:].tolist() == [0.0] * 4


def test_a_target_outside_its_set_has_probability_0():
    sets = over_sets([[0, 1], [0, 1], []])
    log_prob, entropy = vocab_parallel_log_probs(FIVE.clone(), torch.tensor([4, 1, 0]), sets)
    assert log_prob[0] == -math.inf
    torch.testing.assert_close(log_prob[1:].exp(), torch.tensor([2 / 7, 0.2]))
    assert entropy.isfinite().all()


def test_a_nan_outside_the_set_is_not_hidden():
    logits = FIVE[:1].clone()
    logits[0, 3] = math.nan
    log_prob, _ = vocab_parallel_log_probs(logits, torch.tensor([2]), over_sets([[1, 2]]))
    assert log_prob.isnan().all()
