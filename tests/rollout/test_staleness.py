"""Samples of old weights lose their loss mask and are counted; the others are untouched."""

from slime_tis.trainer.data.sample import Prompt
from slime_tis.trainer.samples import mask_earlier_tokens, mask_stale_samples
from tests.samples import make_sample


def sample(versions):
    prompt = Prompt(index=0, text="", token_ids=(5,))
    return make_sample(prompt, [7] * len(versions), weight_versions=versions)


def masks(version, limit):
    """Loss masks of four samples, by groups, and the number that was masked."""
    groups = [[sample([4, 4]), sample([1, 4])], [sample([2, 3, 4]), sample([])]]
    masked = mask_stale_samples(groups, version, limit)
    return [[each.loss_mask for each in group] for group in groups], masked


def test_the_oldest_token_decides():
    assert masks(version=4, limit=2) == ([[[1, 1], [0, 0]], [[1, 1, 1], []]], 1)


def test_a_limit_of_zero_leaves_the_present_weights_alone():
    assert masks(version=4, limit=0) == ([[[1, 1], [0, 0]], [[0, 0, 0], []]], 2)


def test_no_limit_masks_nothing():
    assert masks(version=400, limit=None) == ([[[1, 1], [1, 1]], [[1, 1, 1], []]], 0)


def test_tokens_of_earlier_weights_are_masked_by_token():
    samples = [sample([4, 4]), sample([1, 2, 4, 4]), sample([3, 3]), sample([])]
    samples[1].loss_mask = [1, 0, 1, 1]
    assert mask_earlier_tokens([samples[:2], samples[2:]]) == 1 / 7
    assert [each.loss_mask for each in samples] == [[1, 1], [0, 0, 1, 1], [1, 1], []]
