"""Samples of old weights lose their loss mask and are counted; the others are untouched."""

from slime_tis.rollout.sample import Prompt, Sample
from slime_tis.rollout.staleness import mask_stale_samples


def sample(versions: list[int]) -> Sample:
    return Sample(
        prompt=Prompt(index=0, text="", token_ids=(5,)),
        group_index=0,
        sample_index=0,
        response_ids=[7] * len(versions),
        response="",
        rollout_log_probs=[-1.0] * len(versions),
        loss_mask=[1] * len(versions),
        weight_versions=versions,
        finish_reason="stop",
    )


GROUPS = [[sample([4, 4]), sample([1, 4])], [sample([2, 3, 4]), sample([])]]


def test_the_oldest_token_decides() -> None:
    found, count = mask_stale_samples(GROUPS, version=4, limit=2)
    assert [[s.loss_mask for s in group] for group in found] == [[[1, 1], [0, 0]], [[1, 1, 1], []]]
    assert count == 1
    assert GROUPS[0][1].loss_mask == [1, 1]  # the caller's samples stay as they are


def test_a_limit_of_nothing_keeps_only_the_present_weights() -> None:
    found, count = mask_stale_samples(GROUPS, version=4, limit=0)
    assert [[any(s.loss_mask) for s in group] for group in found] == [[True, False], [False, False]]
    assert count == 2


def test_no_limit_keeps_all() -> None:
    assert mask_stale_samples(GROUPS, version=400, limit=None) == (GROUPS, 0)
