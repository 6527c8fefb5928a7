"""fused_linear_log_probs: values and gradients match log-probs from all logits, which never exist at once."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slime_tis.trainer.data.sampling_mask import SamplingMask
from slime_tis.trainer.megatron import fused_log_probs
from slime_tis.trainer.megatron.fused_log_probs import fused_linear_log_probs
from slime_tis.trainer.megatron.log_probs import TokenDistribution
from tests.megatron.test_log_probs import dense_log_probs

ROWS, INPUTS, VOCABULARY, PADDED = 9, 6, 13, 15
SETS = [[0, 5, 2], [3], [12, 1], [], [7, 8, 9], [4], [6, 0], [2, 11], []]
"""The first of each is the target."""
TARGETS = torch.tensor([0, 3, 12, 10, 7, 4, 6, 2, 1])
PADDED_VOCABULARY = TokenDistribution(vocab_size=VOCABULARY)
LogProbs = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

tilings = pytest.mark.parametrize(
    "entries", [10**6, 36, 20], ids=["one tile", "blocks of the vocabulary", "chunks and blocks"]
)


@pytest.fixture(autouse=True)
def small_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of the test's `entries`."""
    callspec = getattr(request.node, "callspec", None)
    entries = callspec.params.get("entries", 20) if callspec else 20
    monkeypatch.setattr(fused_log_probs, "TILE_BYTES", 4 * entries)
    monkeypatch.setattr(fused_log_probs, "MIN_COLUMNS", 4)


def fused(distribution: TokenDistribution | None = None, target: Tensor = TARGETS) -> LogProbs:
    return lambda hidden, weight: fused_linear_log_probs(hidden, weight, target, distribution)


def values_and_gradients(log_probs: LogProbs, hidden: Tensor, weight: Tensor, grads: Tensor) -> list[Tensor]:
    """Log-probs, entropies, and gradients of hidden states and weight, given [2, rows] gradients of the first two."""
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    values = log_probs(*leaves)
    (torch.stack(values) * grads).sum().backward()
    assert leaves[0].grad is not None and leaves[1].grad is not None
    return [*(value.detach() for value in values), leaves[0].grad, leaves[1].grad]


@tilings
@pytest.mark.parametrize("chunk_size", [-1, 4, 100])
@pytest.mark.parametrize("masked", [False, True], ids=["all tokens", "sampled sets"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy_gradient", [False, True], ids=["log-prob gradient", "entropy gradient"])
@pytest.mark.parametrize("zeros", [(), (0, 1, 5), range(ROWS)], ids=["all rows", "some zero", "all zero"])
def test_values_and_gradients_match_those_of_all_logits(
    entries: int, chunk_size: int, masked: bool, temperature: float, entropy_gradient: bool, zeros: tuple[int, ...]
) -> None:
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
    )

    def of_all_logits(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return dense_log_probs(hidden @ weight[:VOCABULARY].t(), TARGETS, distribution)

    expected = values_and_gradients(of_all_logits, hidden.double(), weight.double(), grads)
    actual = values_and_gradients(fused(distribution), hidden, weight, grads)
    for value, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(value.double(), reference, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@tilings
def test_the_gradient_of_the_weight_is_added_to_a_given_tensor(dtype: torch.dtype, entries: int) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(ROWS, INPUTS).to(dtype), torch.randn(PADDED, INPUTS).to(dtype)
    before = torch.randn(PADDED, INPUTS)

    def gradient(total: Tensor | None) -> Tensor | None:
        leaf = weight.clone().requires_grad_()
        log_prob, _ = fused_linear_log_probs(hidden, leaf, TARGETS, PADDED_VOCABULARY, total)
        log_prob.sum().backward()
        return leaf.grad

    expected, total = gradient(None), before.clone()
    assert expected is not None and gradient(total) is None
    torch.testing.assert_close(total - before, expected.float(), rtol=0, atol=1e-5 if dtype == torch.float32 else 2e-2)
    assert torch.equal(total[VOCABULARY:], before[VOCABULARY:])


def test_no_rows_have_no_values_and_no_gradient() -> None:
    log_probs = fused(target=torch.zeros(0, dtype=torch.int64))
    found = values_and_gradients(log_probs, torch.randn(0, 3), torch.randn(5, 3), torch.zeros(2, 0))
    assert [value.tolist() for value in found] == [[], [], [], [[0.0] * 3] * 5]


@pytest.mark.parametrize("entries", [10**6, 36], ids=["one tile", "blocks of the vocabulary"])
def test_large_logits_in_another_block_leave_no_rounding(entries: int) -> None:
    logits = torch.zeros(9, 13)
    logits[0, 12], logits[1, 0], logits[2, 12] = 300.0, 300.0, -300.0
    target = torch.tensor([12, 12, 0, *range(6)])
    log_prob, entropy = fused(target=target)(torch.eye(9), logits.t().contiguous())
    # certain; 300 below; uniform over 12 of 13; uniform
    expected = torch.tensor([0.0, -300.0, -2.4849066, *[-2.5649494] * 6])
    torch.testing.assert_close(log_prob, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(entropy, torch.tensor([0.0, 0.0, 2.4849066, *[2.5649494] * 6]), atol=1e-6, rtol=1e-6)


def test_bfloat16_has_logits_in_bfloat16_and_sums_and_gradients_in_float32() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(ROWS, INPUTS).bfloat16().float(), torch.randn(VOCABULARY, INPUTS).bfloat16()
    grads = torch.randn(2, ROWS)

    def of_all_logits(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return dense_log_probs((hidden.bfloat16() @ weight.t()).float(), TARGETS, TokenDistribution())

    expected = values_and_gradients(of_all_logits, hidden, weight, grads)
    actual = values_and_gradients(fused(), hidden, weight, grads)
    assert [value.dtype for value in actual] == [torch.float32, torch.float32, torch.float32, torch.bfloat16]
    torch.testing.assert_close(actual[:2], expected[:2], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(actual[2:], expected[2:], atol=0.02, rtol=0.02)


class Sizes(TorchDispatchMode):
    """The largest tensor that an operation makes, in entries, except tensors of the weight's size."""

    def __init__(self, ignored: int) -> None:
        super().__init__()
        self.largest, self.ignored, self.products = 0, ignored, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        self.products += func is torch.ops.aten.mm.default
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
def test_only_one_tile_of_logits_exists_at_a_time(entries: int, zeros: int, largest: int, products: int) -> None:
    hidden, weight = torch.randn(40, 2).requires_grad_(), torch.randn(16, 2).requires_grad_()
    grad = torch.ones(40)
    grad[:zeros] = 0.0
    with Sizes(ignored=weight.numel()) as sizes:
        distribution = TokenDistribution(entropy_gradient=False)
        fused(distribution, torch.arange(40) % 16)(hidden, weight)[0].backward(grad)
    assert (sizes.largest, sizes.products) == (largest, products)


def test_a_nan_weight_makes_every_row_nan() -> None:
    weight = torch.randn(VOCABULARY, INPUTS)
    weight[2] = torch.nan
    log_prob, entropy = fused()(torch.randn(ROWS, INPUTS), weight)
    assert log_prob.isnan().all() and entropy.isnan().all()
