"""vocab_parallel_log_probs against torch's log_softmax, its gradient, and the tensors saved for the backward pass."""

import math

import pytest
import torch
from torch import Tensor

from slime_tis.trainer.data.sampling_mask import SamplingMask
from slime_tis.trainer.megatron.log_probs import TokenDistribution, vocab_parallel_log_probs

HAND_LOGITS = [[0.0, math.log(3.0)], [math.log(4.0), 0.0]]
FIVE = torch.tensor([[0.1, 0.2, 0.3, 0.15, 0.25], [0.5, 0.2, 0.1, 0.15, 0.05], [0.2, 0.2, 0.2, 0.2, 0.2]]).log()


def over_sets(sets: list[list[int]], temperature: float = 1.0) -> TokenDistribution:
    return TokenDistribution(sampling_mask=SamplingMask.from_sets(sets), temperature=temperature)


def dense_log_probs(logits: Tensor, target: Tensor, distribution: TokenDistribution) -> tuple[Tensor, Tensor]:
    """The reference: log-probs and entropies by torch's log_softmax over a dense mask."""
    allowed = torch.ones_like(logits, dtype=torch.bool)
    if distribution.sampling_mask is not None:
        for row, mask in zip(allowed, distribution.sampling_mask.split([1] * len(logits)), strict=True):
            if len(mask.token_ids):
                row[:] = False
                row[mask.token_ids.long()] = True
    log_softmax = (logits / distribution.temperature).masked_fill(~allowed, -torch.inf).log_softmax(-1)
    entropy = -(log_softmax.exp() * log_softmax.masked_fill(~allowed, 0.0)).sum(-1)
    return log_softmax.gather(1, target[:, None])[:, 0], entropy


@pytest.mark.parametrize(
    ("distribution", "expected"),
    [
        pytest.param(TokenDistribution(), [0.75, 0.2], id="temperature 1"),
        pytest.param(TokenDistribution(temperature=0.5), [0.9, 1 / 17], id="temperature 0.5"),
    ],
)
def test_hand_computed_table(distribution: TokenDistribution, expected: list[float]) -> None:
    log_prob, entropy = vocab_parallel_log_probs(torch.tensor(HAND_LOGITS), torch.tensor([1, 1]), distribution)
    torch.testing.assert_close(log_prob.exp(), torch.tensor(expected))
    entropies = [-p * math.log(p) - (1 - p) * math.log(1 - p) for p in expected]
    torch.testing.assert_close(entropy, torch.tensor(entropies))


@pytest.mark.parametrize("chunk_size", [-1, 1, 4, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy_gradient", [True, False], ids=["entropy gradient", "log-prob gradient"])
@pytest.mark.parametrize("masked", [False, True], ids=["all tokens", "sampled sets"])
def test_values_and_gradients_match_a_dense_masked_softmax(
    chunk_size: int, temperature: float, entropy_gradient: bool, masked: bool
) -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(9, 13), torch.randint(13, (9,))
    allowed = torch.rand(9, 13) < 0.4
    allowed[torch.arange(9), target] = True
    allowed[5] = True
    sets = [row.nonzero()[:, 0].flip(0).tolist() for row in allowed]  # not sorted by id
    sets[5] = []  # no set: the whole vocabulary
    distribution = TokenDistribution(
        temperature=temperature,
        chunk_size=chunk_size,
        entropy_gradient=entropy_gradient,
        sampling_mask=SamplingMask.from_sets(sets) if masked else None,
    )
    weights = torch.randn(2, 9)
    weights[1] *= entropy_gradient
    leaves = [logits.clone().requires_grad_(), logits.double().requires_grad_()]
    actual = vocab_parallel_log_probs(leaves[0] * 1.0, target, distribution)
    expected = dense_log_probs(leaves[1], target, distribution)
    for values in (actual, expected):
        (torch.stack(values) * weights).sum().backward()
    assert actual[1].requires_grad == entropy_gradient
    assert leaves[0].grad is not None and leaves[1].grad is not None
    for value, reference in zip((*actual, leaves[0].grad), (*expected, leaves[1].grad), strict=True):
        torch.testing.assert_close(value.double(), reference, atol=2e-6, rtol=0)
    if masked:
        assert bool((leaves[0].grad[~allowed] == 0).all())


def test_padding_of_the_vocabulary_has_no_probability_and_no_gradient() -> None:
    logits, target = torch.randn(3, 6), torch.tensor([0, 5, 2])
    expected = vocab_parallel_log_probs(logits.clone(), target)
    leaf = torch.cat([logits, torch.full((3, 2), -torch.inf)], 1).requires_grad_()
    actual = vocab_parallel_log_probs(leaf * 1.0, target)
    torch.testing.assert_close(actual, expected)
    (actual[0].sum() + actual[1].sum()).backward()
    assert leaf.grad is not None and leaf.grad.isfinite().all() and leaf.grad[:, 6:].abs().max() == 0


def test_one_matrix_of_the_logits_size_is_saved_in_their_own_memory() -> None:
    logits = torch.randn(11, 17).requires_grad_() * 1.0
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        vocab_parallel_log_probs(logits, torch.zeros(11, dtype=torch.int64))
    assert [tensor.data_ptr() for tensor in saved if tensor.numel() == logits.numel()] == [logits.data_ptr()]


def test_bfloat16_logits_give_float32_log_probs_and_a_bfloat16_gradient() -> None:
    leaf = torch.randn(4, 5).bfloat16().requires_grad_()
    log_prob, _ = vocab_parallel_log_probs(leaf * 1.0, torch.arange(4))
    assert log_prob.dtype == torch.float32
    torch.testing.assert_close(log_prob, dense_log_probs(leaf.float(), torch.arange(4), TokenDistribution())[0])
    log_prob.sum().backward()
    assert leaf.grad is not None and leaf.grad.dtype == torch.bfloat16


def test_log_probs_and_entropies_over_the_sampled_sets_by_hand() -> None:
    # {1, 2, 4} has mass 0.75, {0} is certain, and the last row has no set. Id 77 is beyond the vocabulary.
    distribution = over_sets([[1, 2, 4, 77], [0], []])
    log_prob, entropy = vocab_parallel_log_probs(FIVE.clone(), torch.tensor([2, 0, 3]), distribution)
    torch.testing.assert_close(log_prob.exp(), torch.tensor([0.4, 1.0, 0.2]))
    # -(4/15 ln 4/15 + 0.4 ln 0.4 + 1/3 ln 1/3), 0, ln 5
    torch.testing.assert_close(entropy, torch.tensor([1.0851894, 0.0, 1.6094379]))


def test_a_target_outside_its_set_has_probability_zero_and_other_rows_are_unaffected() -> None:
    sets = over_sets([[0, 1], [0, 1], []])
    log_prob, entropy = vocab_parallel_log_probs(FIVE.clone(), torch.tensor([4, 1, 0]), sets)
    assert log_prob[0] == -math.inf
    torch.testing.assert_close(log_prob[1:].exp(), torch.tensor([2 / 7, 0.2]))
    assert entropy.isfinite().all()


def test_a_nan_logit_outside_the_set_makes_the_log_prob_nan() -> None:
    logits = FIVE[:1].clone()
    logits[0, 3] = math.nan
    assert vocab_parallel_log_probs(logits, torch.tensor([2]), over_sets([[1, 2]]))[0].isnan().all()
