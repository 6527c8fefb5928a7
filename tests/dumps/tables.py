"""Tables that tests are made of."""

import numpy as np

from slime_tis.analysis.dumps.table import SampleParts, TokenTable


def full_table():
    """Samples of 3, 0 and 2 tokens with every column; the second token is masked."""
    parts = [
        SampleParts(
            train_log_prob=[-1.0, 0.0, -2.5],
            old_log_prob=[-1.0, 0.0, -2.25],
            rollout_log_prob=[-1.5, float("nan"), -2.0],
            loss_mask=[1, 0, 1],
            token=[5, 6, 7],
            weight=[1.5, 0.0, 0.75],
            bounded_weight=[1.25, 0.0, 0.75],
            rejected=[0, 0, 2],
            vetoed=[0, 0, 1],
            advantage=[0.5, 0.5, 0.5],
            entropy=[0.1, 0.2, 0.3],
            weight_version=[4, 4, 5],
            turn=[0, 0, 1],
            experts=np.arange(12).reshape(3, 2, 2),
            prompt=[1, 2],
            step=5,
            sample_index=0,
            group=0,
            reward=1.0,
            truncated=False,
            text="<b>é",
            prompt_text="p",
        ),
        SampleParts(
            train_log_prob=[],
            rollout_log_prob=[],
            prompt=[],
            step=5,
            sample_index=1,
            group=0,
            reward=0.0,
            text="",
        ),
        SampleParts(
            train_log_prob=[-0.5, -0.25],
            rollout_log_prob=[-0.5, -0.5],
            token=[8, 9],
            advantage=[-1.0, -1.0],
            prompt=[3],
            step=6,
            sample_index=2,
            group=1,
            truncated=True,
            text="two",
        ),
    ]
    metadata = {
        "source": "slime_tis",
        "old_policy": "recomputed",
        "criteria": ["token", "veto"],
        "temperature": 1.0,
    }
    return TokenTable.from_parts(parts, metadata)


def assert_same(one, other):
    """Every column, its type and the metadata are equal; NaN equals NaN."""
    assert one.metadata == other.metadata
    for name, value in vars(one).items():
        found = getattr(other, name)
        if isinstance(value, np.ndarray):
            assert found is not None and found.dtype == value.dtype, name
            np.testing.assert_array_equal(found, value, err_msg=name)
        elif name == "prompt":
            assert [list(ids) for ids in found or ()] == [list(ids) for ids in value or ()]
        elif name != "metadata":
            assert found == value, name
