"""The table of tokens: columns, parts of it, and random parts."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_tis.analysis.dumps.table import SampleParts, TokenTable
from tests.dumps.tables import assert_same, full_table


def test_derived_columns():
    table = full_table()
    assert (len(table), table.tokens) == (3, 5)
    assert table.offsets.tolist() == [0, 3, 3, 5]
    assert table.response_length.tolist() == [3, 0, 2]
    assert table.sample.tolist() == [0, 0, 0, 2, 2]
    assert table.position.tolist() == [0, 1, 2, 0, 1]
    assert [prompt.tolist() for prompt in table.prompt] == [[1, 2], [], [3]]
    assert table.valid.tolist() == [True, False, True, True, True]
    assert table.log_ratio.tolist() == [0.5, 0.0, -0.25, 0.0, 0.25]  # of the recomputed old log-probs
    bypass = replace(table, metadata={"old_policy": "rollout"})
    assert bypass.log_ratio.tolist() == [0.5, 0.0, -0.5, 0.0, 0.25]  # of the current policy


def test_missing_values_are_filled_as_documented():
    table = full_table()
    assert table.old_log_prob.tolist()[3:] == [-0.5, -0.25]  # the training log-probs
    assert table.loss_mask.tolist() == [1, 0, 1, 1, 1]
    assert table.rejected.tolist() == [0, 0, 2, 0, 0]
    assert table.weight_version.tolist() == [4, 4, 5, -1, -1]
    assert np.isnan(table.entropy[3:]).all() and np.isnan(table.reward[2])
    assert table.experts[3:].tolist() == [[[-1, -1], [-1, -1]]] * 2
    assert table.text == ("<b>é", "", "two")


def test_selected_samples_concatenate_to_the_table():
    table = full_table()
    assert_same(TokenTable.concatenate([table.select([i]) for i in range(3)]), table)
    turned = table.select([2, 0])
    assert turned.token.tolist() == [8, 9, 5, 6, 7] and [prompt.tolist() for prompt in turned.prompt] == [[3], [1, 2]]
    assert not any(np.shares_memory(turned.prompt[0], prompt) for prompt in table.prompt)  # prompts can be freed
    assert turned.sample_index.tolist() == [2, 0] and turned.text == ("two", "<b>é")


def test_different_metadata_are_dropped_and_different_criteria_refused():
    table = full_table()
    other = replace(table, metadata={**table.metadata, "temperature": 0.5})
    assert "temperature" not in TokenTable.concatenate([table, other]).metadata
    with pytest.raises(ValueError, match="different rejection criteria"):
        TokenTable.concatenate([table, replace(table, metadata={"criteria": ["geometric"]})])


def test_lists_of_different_lengths_are_refused():
    parts = [SampleParts(train_log_prob=[-1.0, -1.0], rollout_log_prob=[-1.0])]
    with pytest.raises(ValueError, match="sample 0 has 2 entries of train_log_prob"):
        TokenTable.from_parts(parts)


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(0, 40))
def test_a_random_part_has_complete_samples_in_order(lengths, max_tokens):
    parts = [
        SampleParts(train_log_prob=[-1.0] * n, rollout_log_prob=[-1.0] * n, sample_index=i)
        for i, n in enumerate(lengths)
    ]
    table = TokenTable.from_parts(parts)
    part = table.sampled(max_tokens)
    if table.tokens <= max_tokens:
        assert part is table
        return
    assert part.tokens <= max_tokens
    assert part.metadata["sampled"] == {"samples": len(lengths), "tokens": sum(lengths)}
    indices = [] if part.sample_index is None else part.sample_index.tolist()
    assert indices == sorted(indices)
    assert part.response_length.tolist() == [lengths[i] for i in indices]
