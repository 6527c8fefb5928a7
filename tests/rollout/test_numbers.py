"""Numbers behave like the list that functions of users expect."""

import copy
import pickle

import pytest

from slime_tis.trainer.data.sample import NUMBER_TYPES, Numbers, Sample


def test_numbers_are_a_list_for_its_readers_and_writers():
    numbers = Numbers("q", [1, 2, 3])
    assert numbers == [1, 2, 3] and numbers != [1, 2]
    assert numbers == Numbers("b", [1, 2, 3]) and numbers != Numbers("q", [1, 2, 4])
    assert numbers.__add__([4]) == [1, 2, 3, 4] and numbers.__radd__([0]) == [0, 1, 2, 3]
    for same in (numbers[:], copy.copy(numbers), copy.deepcopy(numbers), pickle.loads(pickle.dumps(numbers))):
        assert type(same) is Numbers and same == numbers and same is not numbers
    assert type(numbers.copy()) is list
    joined = numbers[1:] + numbers[:1]
    assert type(joined) is Numbers and joined == [2, 3, 1]
    numbers += [4, 5]
    numbers[0], numbers[1:3] = 7, [0, 0, 0]
    numbers.append(9)
    assert numbers == [7, 0, 0, 0, 4, 5, 9] and numbers


@pytest.mark.parametrize("field", NUMBER_TYPES)
def test_samples_are_compact_in_any_order_of_edits(field):
    values = {"loss_mask": [1, 0], "rollout_log_probs": [-0.5, 0.0], "weight_versions": [3, 3]}
    sample = Sample(tokens=[5, 6, 7], response_length=2, rollout_workers=[0, 1], **values)
    before = list(getattr(sample, field))
    sample.compact()
    assert type(getattr(sample, field)) is Numbers and getattr(sample.compact(), field) == before
