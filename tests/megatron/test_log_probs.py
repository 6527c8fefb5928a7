"""vocab_parallel_log_probs against torch's own log_softmax, its gradient, and what it keeps for the backward pass."""

import math

import pytest
import torch

from slime_tis.trainer.data.sampling_mask import SamplingMask
from slime_tis.trainer.megatron.log_probs import vocab_parallel_log_probs

HAND_LOGITS = [[0.0, math.log(3.0)], [math.log(4.0), 0.0]]


def test_hand_computed_table() -> None:
    log_prob, entropy = vocab_parallel_log_probs(torch.tensor(HAND_LOGITS), torch.tensor([1, 1]), None)
    torch.testing.assert_close(log_prob.exp(), torch.tensor([0.75, 0.2]))
    expected = [-0.25 * math.log(0.25) - 0.75 * math.log(0.75), -0.8 * math.log(0.8) - 0.2 * math.log(0.2)]
    torch.testing.assert_close(entropy, torch.tensor(expected))


def test_temperature_divides_the_logits() -> None:
    log_prob, _ = vocab_parallel_log_probs(torch.tensor(HAND_LOGITS), torch.tensor([1, 1]), None, temperature=0.5)
    torch.testing.assert_close(log_prob.exp(), torch.tensor([0.9, 1 / 17]))


@pytest.mark.parametrize("chunk_size", [-1, 1, 4, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_are_those_of_log_softmax(chunk_size: int, temperature: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(9, 13, dtype=torch.float64).float()
    target = torch.randint(13, (9,))
    weight, entropy_weight = torch.randn(2, 9)

    reference = logits.double().requires_grad_()
    log_softmax = (reference / temperature).log_softmax(-1)
    log_prob = log_softmax.gather(1, target[:, None])[:, 0]
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    (log_prob @ weight.double() + entropy @ entropy_weight.double()).backward()

    leaf = logits.clone().requires_grad_()
    ours, our_entropy = vocab_parallel_log_probs(
        leaf * 1.0, target, None, temperature=temperature, chunk_size=chunk_size
    )
    (ours @ weight + our_entropy @ entropy_weight).backward()
    torch.testing.assert_close(ours.double(), log_prob, atol=2e-6, rtol=0)
    torch.testing.assert_close(our_entropy.double(), entropy, atol=2e-6, rtol=0)
    torch.testing.assert_close(leaf.grad.double(), reference.grad, atol=2e-6, rtol=0)


def test_entropy_without_gradient_gives_the_gradient_of_the_log_prob_alone() -> None:
    logits, target = torch.randn(5, 7), torch.tensor([0, 1, 2, 3, 6])
    leaf = logits.clone().requires_grad_()
    log_prob, entropy = vocab_parallel_log_probs(leaf * 1.0, target, None, entropy_gradient=False)
    assert not entropy.requires_grad
    log_prob.sum().backward()
    expected = torch.nn.functional.one_hot(target, 7) - logits.softmax(-1)
    torch.testing.assert_close(leaf.grad, expected, atol=1e-6, rtol=0)


def test_entries_that_pad_the_vocabulary_have_no_probability_and_no_gradient() -> None:
    logits = torch.randn(3, 6)
    padded = torch.cat([logits, torch.full((3, 2), -torch.inf)], 1)
    target = torch.tensor([0, 5, 2])
    expected, expected_entropy = vocab_parallel_log_probs(logits.clone(), target, None)
    leaf = padded.clone().requires_grad_()
    log_prob, entropy = vocab_parallel_log_probs(leaf * 1.0, target, None)
    torch.testing.assert_close(log_prob, expected)
    torch.testing.assert_close(entropy, expected_entropy)
    (log_prob.sum() + entropy.sum()).backward()
    assert leaf.grad[:, 6:].abs().max() == 0
    assert leaf.grad.isfinite().all()


def test_one_matrix_of_the_logits_size_is_kept_and_it_is_their_own_memory() -> None:
    logits = torch.randn(11, 17).requires_grad_() * 1.0
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        vocab_parallel_log_probs(logits, torch.zeros(11, dtype=torch.int64), None)
    large = [tensor for tensor in saved if tensor.numel() == logits.numel()]
    assert len(large) == 1
    assert large[0].data_ptr() == logits.data_ptr()


def test_bfloat16_logits_give_float32_log_probs_and_a_bfloat16_gradient() -> None:
    leaf = torch.randn(4, 5).bfloat16().requires_grad_()
    log_prob, _ = vocab_parallel_log_probs(leaf * 1.0, torch.tensor([0, 1, 2, 3]), None)
    assert log_prob.dtype == torch.float32
    expected = leaf.detach().float().log_softmax(-1).gather(1, torch.arange(4)[:, None])[:, 0]
    torch.testing.assert_close(log_prob, expected)
    log_prob.sum().backward()
    assert leaf.grad is not None and leaf.grad.dtype == torch.bfloat16


def test_a_second_backward_pass_is_refused() -> None:
    log_prob, _ = vocab_parallel_log_probs(torch.randn(2, 3).requires_grad_() * 1.0, torch.tensor([0, 1]), None)
    log_prob.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        log_prob.sum().backward()


def test_shapes_that_do_not_fit_are_refused_with_both_named() -> None:
    with pytest.raises(ValueError, match=r"\(3, 4\), \(2,\)"):
        vocab_parallel_log_probs(torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64), None)
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        vocab_parallel_log_probs(torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64), None, temperature=0)


FIVE = torch.tensor([[0.1, 0.2, 0.3, 0.15, 0.25], [0.5, 0.2, 0.1, 0.15, 0.05], [0.2, 0.2, 0.2, 0.2, 0.2]]).log()


def test_log_probs_and_entropies_over_the_sampled_sets_by_hand() -> None:
    # {1, 2, 4} has mass 0.75, {0} is certain, and the last row has no set.
    mask = SamplingMask.from_sets([[1, 2, 4], [0], []])
    log_prob, entropy = vocab_parallel_log_probs(FIVE.clone(), torch.tensor([2, 0, 3]), None, sampling_mask=mask)
    torch.testing.assert_close(log_prob.exp(), torch.tensor([0.4, 1.0, 0.2]))
    # -(4/15 ln 4/15 + 0.4 ln 0.4 + 1/3 ln 1/3), 0, ln 5
    torch.testing.assert_close(entropy, torch.tensor([1.0851894, 0.0, 1.6094379]))


def test_temperature_comes_before_the_set() -> None:
    mask = SamplingMask.from_sets([[1, 2]])
    log_prob, _ = vocab_parallel_log_probs(
        FIVE[:1].clone(), torch.tensor([2]), None, temperature=0.5, sampling_mask=mask
    )
    torch.testing.assert_close(log_prob.exp(), torch.tensor([9 / 13]))  # 0.3² / (0.2² + 0.3²)


def test_the_gradient_of_a_certain_token_is_zero() -> None:
    leaf = FIVE.clone().requires_grad_()
    mask = SamplingMask.from_sets([[2], [0], [4]])
    log_prob, entropy = vocab_parallel_log_probs(leaf * 1.0, torch.tensor([2, 0, 4]), None, sampling_mask=mask)
    (log_prob.sum() + entropy.sum()).backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [[0.0] * 5] * 3


def test_a_target_outside_of_its_set_has_probability_zero_and_other_rows_are_as_before() -> None:
    mask = SamplingMask.from_sets([[0, 1], [0, 1], []])
    log_prob, entropy = vocab_parallel_log_probs(FIVE.clone(), torch.tensor([4, 1, 0]), None, sampling_mask=mask)
    assert log_prob[0] == -math.inf
    torch.testing.assert_close(log_prob[1:].exp(), torch.tensor([2 / 7, 0.2]))
    assert entropy.isfinite().all()


def test_ids_beyond_the_vocabulary_are_passed_over() -> None:
    mask = SamplingMask.from_sets([[2, 1, 77], [0], []])
    log_prob, _ = vocab_parallel_log_probs(FIVE.clone(), torch.tensor([2, 0, 3]), None, sampling_mask=mask)
    torch.testing.assert_close(log_prob.exp(), torch.tensor([0.6, 1.0, 0.2]))


def test_a_broken_logit_outside_of_the_set_still_shows() -> None:
    logits = FIVE[:1].clone()
    logits[0, 3] = math.nan
    log_prob, _ = vocab_parallel_log_probs(
        logits, torch.tensor([2]), None, sampling_mask=SamplingMask.from_sets([[1, 2]])
    )
    assert log_prob.isnan().all()


@pytest.mark.parametrize("chunk_size", [-1, 1, 4])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy_gradient", [True, False], ids=["entropy gradient", "log-prob gradient"])
def test_values_and_gradients_over_sets_are_those_of_a_dense_masked_softmax(
    chunk_size: int, temperature: float, entropy_gradient: bool
) -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(9, 13), torch.randint(13, (9,))
    allowed = torch.rand(9, 13) < 0.4
    allowed[torch.arange(9), target] = True
    allowed[5] = True
    sets = [row.nonzero()[:, 0].flip(0).tolist() for row in allowed]  # in another order than that of the ids
    sets[5] = []  # no set: the whole vocabulary
    weight, entropy_weight = torch.randn(2, 9)

    reference = logits.double().requires_grad_()
    log_softmax = (reference / temperature).masked_fill(~allowed, -torch.inf).log_softmax(-1)
    log_prob = log_softmax.gather(1, target[:, None])[:, 0]
    entropy = -torch.where(allowed, log_softmax.exp() * log_softmax.masked_fill(~allowed, 0.0), 0.0).sum(-1)
    objective = log_prob @ weight.double() + entropy @ entropy_weight.double() * entropy_gradient
    objective.backward()

    leaf = logits.clone().requires_grad_()
    ours, our_entropy = vocab_parallel_log_probs(
        leaf * 1.0,
        target,
        None,
        temperature=temperature,
        chunk_size=chunk_size,
        entropy_gradient=entropy_gradient,
        sampling_mask=SamplingMask.from_sets(sets),
    )
    (ours @ weight + our_entropy @ entropy_weight * entropy_gradient).backward()
    torch.testing.assert_close(ours.double(), log_prob, atol=2e-6, rtol=0)
    torch.testing.assert_close(our_entropy.double(), entropy, atol=2e-6, rtol=0)
    torch.testing.assert_close(leaf.grad.double(), reference.grad, atol=2e-6, rtol=0)
    assert bool((leaf.grad[~allowed] == 0).all())


def test_no_matrix_of_the_logits_size_is_made_for_the_sets() -> None:
    logits = torch.randn(11, 17).requires_grad_() * 1.0
    shapes: list[torch.Size] = []

    class Shapes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            shapes.extend(x.shape for x in torch.utils._pytree.tree_leaves(out) if getattr(x, "dtype", 0) == torch.bool)
            return out

    mask = SamplingMask.from_sets([[0, 3]] * 11)
    with Shapes():
        log_prob, _ = vocab_parallel_log_probs(logits, torch.zeros(11, dtype=torch.int64), None, sampling_mask=mask)
    assert log_prob.isfinite().all()
    assert max(shape.numel() for shape in shapes) == 22  # the tokens of the sets


def test_a_mask_of_other_rows_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="the sampling mask has 2 positions for 3 rows"):
        vocab_parallel_log_probs(
            FIVE.clone(), torch.tensor([0, 0, 0]), None, sampling_mask=SamplingMask.from_sets([[0], [0]])
        )
