"""fused_linear_log_probs: values and gradients are those of log-probs from all logits, which it never holds."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slime_tis.trainer.data.sampling_mask import SamplingMask
from slime_tis.trainer.megatron import fused_log_probs
from slime_tis.trainer.megatron.fused_log_probs import fused_linear_log_probs
from slime_tis.trainer.megatron.log_probs import vocab_parallel_log_probs

ROWS, INPUTS, VOCABULARY, PADDED = 9, 6, 13, 15
SETS = [[0, 5, 2], [3], [12, 1], [], [7, 8, 9], [4], [6, 0], [2, 11], []]
"""The first of each is the target."""
TARGETS = [0, 3, 12, 10, 7, 4, 6, 2, 1]


def tiles_of(monkeypatch: pytest.MonkeyPatch, entries: int) -> None:
    monkeypatch.setattr(fused_log_probs, "TILE_BYTES", 4 * entries)
    monkeypatch.setattr(fused_log_probs, "MIN_COLUMNS", 4)


def values_and_gradients(
    log_probs: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    hidden: Tensor,
    weight: Tensor,
    grads: tuple[Tensor, Tensor | None],
) -> list[Tensor]:
    """Log-probs, entropies, and gradients of hidden states and weight, given those of the first two."""
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    log_prob, entropy = log_probs(*leaves)
    objective = (log_prob * grads[0]).sum()
    if grads[1] is not None:
        objective = objective + (entropy * grads[1]).sum()
    objective.backward()
    assert leaves[0].grad is not None and leaves[1].grad is not None
    return [log_prob.detach(), entropy.detach(), leaves[0].grad, leaves[1].grad]


@pytest.mark.parametrize("entries", [10**6, 36, 20], ids=["one tile", "blocks of the vocabulary", "chunks and blocks"])
@pytest.mark.parametrize("chunk_size", [-1, 4, 100])
@pytest.mark.parametrize("masked", [False, True], ids=["all tokens", "sampled sets"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy_gradient", [False, True], ids=["log-prob gradient", "entropy gradient"])
@pytest.mark.parametrize("zeros", [(), (0, 1, 5), range(ROWS)], ids=["all rows", "some zero", "all zero"])
def test_values_and_gradients_are_those_of_all_logits(
    entries: int,
    chunk_size: int,
    masked: bool,
    temperature: float,
    entropy_gradient: bool,
    zeros: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiles_of(monkeypatch, entries)
    torch.manual_seed(0)
    hidden, weight = torch.randn(ROWS, INPUTS), torch.randn(PADDED, INPUTS)
    grads = torch.randn(2, ROWS)
    grads[:, list(zeros)] = 0.0
    target = torch.tensor(TARGETS)
    options = {
        "temperature": temperature,
        "chunk_size": chunk_size,
        "entropy_gradient": entropy_gradient,
        "sampling_mask": SamplingMask.from_sets(SETS) if masked else None,
    }

    def of_all_logits(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        logits = hidden @ weight.t()
        logits.detach()[:, VOCABULARY:] = -torch.inf
        return vocab_parallel_log_probs(logits, target, None, **options)  # type: ignore[arg-type]

    def fused(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return fused_linear_log_probs(hidden, weight, target, None, width=VOCABULARY, **options)  # type: ignore[arg-type]

    given = grads[0], grads[1] if entropy_gradient else None
    expected = values_and_gradients(of_all_logits, hidden, weight, given)
    for found, value in zip(values_and_gradients(fused, hidden, weight, given), expected, strict=True):
        torch.testing.assert_close(found, value, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("entries", [10**6, 36, 20], ids=["one tile", "blocks of the vocabulary", "chunks and blocks"])
def test_the_gradient_of_the_weight_is_added_to_what_is_given(
    dtype: torch.dtype, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles_of(monkeypatch, entries)
    torch.manual_seed(0)
    hidden, weight = torch.randn(ROWS, INPUTS).to(dtype), torch.randn(PADDED, INPUTS).to(dtype)
    target, before = torch.tensor(TARGETS), torch.randn(PADDED, INPUTS)

    def gradient(added_to: Tensor | None) -> Tensor | None:
        leaf = weight.clone().requires_grad_()
        log_prob, _ = fused_linear_log_probs(hidden, leaf, target, None, width=VOCABULARY, weight_grad_OI=added_to)
        log_prob.sum().backward()
        return leaf.grad

    expected, found = gradient(None), before.clone()
    assert expected is not None and gradient(found) is None
    torch.testing.assert_close(found - before, expected.float(), rtol=0, atol=1e-5 if dtype == torch.float32 else 2e-2)
    assert torch.equal(found[VOCABULARY:], before[VOCABULARY:])


@pytest.mark.parametrize("entries", [10**6, 20], ids=["one tile", "several"])
def test_gradients_in_float64_are_those_of_finite_differences(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles_of(monkeypatch, entries)
    torch.manual_seed(0)
    hidden = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 3, dtype=torch.float64, requires_grad=True)
    mask = SamplingMask.from_sets([[1, 4], [], [9, 2, 3], [0], []])

    def fused(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return fused_linear_log_probs(
            hidden, weight, torch.tensor([1, 10, 9, 0, 5]), None, temperature=0.7, sampling_mask=mask
        )

    assert torch.autograd.gradcheck(fused, (hidden, weight))


def test_no_rows_have_no_values_and_no_gradient() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    log_prob, entropy, *grads = values_and_gradients(
        lambda hidden, weight: fused_linear_log_probs(hidden, weight, empty, None),
        torch.randn(0, 3),
        torch.randn(5, 3),
        (torch.zeros(0), torch.zeros(0)),
    )
    assert (log_prob.shape, entropy.shape) == ((0,), (0,))
    assert torch.equal(grads[0], torch.zeros(0, 3)) and torch.equal(grads[1], torch.zeros(5, 3))


@pytest.mark.parametrize("entries", [10**6, 36], ids=["one tile", "blocks of the vocabulary"])
def test_large_logits_in_another_block_leave_no_rounding(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles_of(monkeypatch, entries)
    logits = torch.zeros(9, 13)
    logits[0, 12], logits[1, 0], logits[2, 12] = 300.0, 300.0, -300.0
    log_prob, entropy = fused_linear_log_probs(
        torch.eye(9), logits.t().contiguous(), torch.tensor([12, 12, 0, *range(6)]), None
    )
    # certain; 300 below; uniform over 12 of 13; uniform
    expected = torch.tensor([0.0, -300.0, -2.4849066, *[-2.5649494] * 6])
    torch.testing.assert_close(log_prob, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(entropy, torch.tensor([0.0, 0.0, 2.4849066, *[2.5649494] * 6]), atol=1e-6, rtol=1e-6)


def test_bfloat16_has_logits_in_bfloat16_and_sums_and_gradients_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles_of(monkeypatch, 20)
    torch.manual_seed(0)
    hidden, weight = torch.randn(ROWS, INPUTS).bfloat16().float(), torch.randn(VOCABULARY, INPUTS).bfloat16()
    target = torch.tensor(TARGETS)
    grads = torch.randn(2, ROWS).unbind()
    expected = values_and_gradients(
        lambda hidden, weight: vocab_parallel_log_probs((hidden.bfloat16() @ weight.t()).float(), target, None),
        hidden,
        weight,
        grads,
    )
    found = values_and_gradients(
        lambda hidden, weight: fused_linear_log_probs(hidden, weight, target, None), hidden, weight, grads
    )
    assert [value.dtype for value in found] == [torch.float32, torch.float32, torch.float32, torch.bfloat16]
    for value, other in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(value, other, atol=2e-6, rtol=1e-5)
    for value, other in zip(found[2:], expected[2:], strict=True):
        torch.testing.assert_close(value, other, atol=0.02, rtol=0.02)


class Sizes(TorchDispatchMode):
    """The largest tensor that an operation makes, in entries, but for those of the weight's own size."""

    def __init__(self, leave_out: int) -> None:
        super().__init__()
        self.largest, self.leave_out, self.products = 0, leave_out, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        self.products += func is torch.ops.aten.mm.default
        sizes = [x.numel() for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, Tensor)]
        self.largest = max([self.largest, *(size for size in sizes if size != self.leave_out)])
        return out


@pytest.mark.parametrize(
    ("entries", "zeros", "largest", "products"),
    [
        pytest.param(10**6, 0, 640, 1, id="one tile, whose logits are computed once"),
        pytest.param(160, 0, 160, 4 + 3, id="four tiles, of which the last one's logits are computed once"),
        pytest.param(160, 30, 160, 4 + 3, id="rows without gradient"),
        pytest.param(160, 40, 160, 4, id="no gradient"),
    ],
)
def test_no_more_than_a_tile_of_logits_exists(
    entries: int, zeros: int, largest: int, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles_of(monkeypatch, entries)
    hidden, weight = torch.randn(40, 2).requires_grad_(), torch.randn(16, 2).requires_grad_()
    grad = torch.ones(40)
    grad[:zeros] = 0.0
    with Sizes(leave_out=weight.numel()) as sizes:
        log_prob, _ = fused_linear_log_probs(hidden, weight, torch.arange(40) % 16, None, entropy_gradient=False)
        log_prob.backward(grad)
    assert (sizes.largest, sizes.products) == (largest, products)


def test_a_broken_weight_shows_in_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles_of(monkeypatch, 20)
    weight = torch.randn(VOCABULARY, INPUTS)
    weight[2] = torch.nan
    log_prob, entropy = fused_linear_log_probs(torch.randn(ROWS, INPUTS), weight, torch.tensor(TARGETS), None)
    assert log_prob.isnan().all() and entropy.isnan().all()


def test_what_does_not_fit_is_refused_with_the_shapes() -> None:
    hidden, weight, target = torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"\(3, 4\), \(5, 4\), \(2,\)"):
        fused_linear_log_probs(hidden, weight, target[:2], None)
    with pytest.raises(ValueError, match=r"\(3, 4\), \(5, 3\), \(3,\)"):
        fused_linear_log_probs(hidden, weight[:, :3], target, None)
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        fused_linear_log_probs(hidden, weight, target, None, temperature=0)
    with pytest.raises(ValueError, match="the sampling mask has 2 positions for 3 rows"):
        fused_linear_log_probs(hidden, weight, target, None, sampling_mask=SamplingMask.from_sets([[0], [0]]))
