"""Hypothesis strategies: configurations over every combination of options, and batches of short
sequences."""

from dataclasses import replace
from typing import get_args

import torch
from hypothesis import strategies as st

from slime_tis import RolloutCorrectionConfig
from slime_tis.correction.config import NonfinitePolicy
from slime_tis.correction.modes import CRITERIA, LEVELS, SEQUENCE_LEVELS, ModeName

# Bounds between the values that Δ takes below, so that no statistic of one token lies on a bound.
THRESHOLDS = {"k1": "0.61_1.93", "k2": "0.0617", "k3": "0.0523", "error": "1.337"}
FIXED_BOUNDS = [
    {},
    {"rs_lower_bound": 0.563},
    {"rs_lower_bound": 0},
    {"rs_upper_bound": 1.719},
    {"rs_lower_bound": 0.563, "rs_upper_bound": 1.719},
]
ALL_BOUNDS = [
    *FIXED_BOUNDS,
    *({name: x} for name in ("rs_z_score", "rs_target_fraction") for x in (0.537, 0.917)),
]


@st.composite
def configurations(draw, policies=("reject", "neutral")):
    """Any valid combination of weights, rejection, veto, normalisation and policy for non-finite
    tokens."""
    assert set(policies) <= set(get_args(NonfinitePolicy))
    names = draw(st.lists(st.sampled_from(list(CRITERIA)), unique=True, max_size=3))
    lower = draw(st.sampled_from([None, 0, 0.437, 0.811]))
    use_rs, rs_level = draw(st.booleans()), draw(st.sampled_from(tuple(LEVELS)))
    bounds = draw(
        st.sampled_from(
            FIXED_BOUNDS if not use_rs or rs_level not in SEQUENCE_LEVELS else ALL_BOUNDS
        )
    )
    return RolloutCorrectionConfig(
        use_tis=draw(st.booleans()),
        tis_mode=draw(st.sampled_from(get_args(ModeName))),
        tis_level=draw(st.sampled_from(tuple(LEVELS))),
        tis_lower_bound=lower,
        tis_upper_bound=draw(st.sampled_from([1.37, 2.03])),
        tis_batch_normalize=draw(st.booleans()),
        use_rs=use_rs,
        rs_level=rs_level,
        **bounds,
        rs_veto_threshold=draw(st.sampled_from([None, 0.173])),
        rs_veto_upper_threshold=draw(st.sampled_from([None, 4.19])),
        rs_second_moment_bound=draw(st.sampled_from([None, 0.0719, 1.137])),
        rollout_rs=",".join(names) or None,
        rollout_rs_threshold=",".join(THRESHOLDS[CRITERIA[name][1]] for name in names) or None,
        nonfinite_policy=draw(st.sampled_from(policies)),
        use_rollout_logprobs=draw(st.booleans()),
        policy_loss="reinforce",
    )


DIVERGENCE_MASKS = [
    {"divergence_mask": None},
    {
        "divergence_mask": "binary_tv",
        "divergence_mask_bound": 0.05,
        "divergence_mask_bound_negative": 0.02,
    },
    {"divergence_mask": "binary_kl", "divergence_mask_bound": 0.02},
    *(
        {
            "divergence_mask_direction": "both",
            "divergence_mask": divergence,
            "divergence_mask_bound": bound,
            **level,
        }
        for divergence, bound in (("binary_kl_max", 0.1), ("binary_tv", 0.1), ("binary_kl", 0.03))
        for level in ({}, {"divergence_mask_level": "sequence"})
    ),
]


@st.composite
def policy_configurations(draw):
    """The same with divergence masks, and with other bounds of the weights at negative
    advantages."""
    config = draw(configurations())
    anchors = ["rollout"] if config.use_rollout_logprobs else ["rollout", "old"]
    return replace(
        config,
        **draw(st.sampled_from(DIVERGENCE_MASKS)),
        divergence_mask_anchor=draw(st.sampled_from(anchors)),
        tis_upper_bound_negative=draw(st.sampled_from([None, 1.13, float("inf")])),
        tis_lower_bound_negative=(
            draw(st.sampled_from([None, 0, 0.913])) if config.mode.has_lower_bound else None
        ),
    )


def policy_batch(seed=3, rows=7, width=19):
    """The inputs of `correct` by name, [rows, width] float64, with masked tokens, zeros and NaN."""
    generator = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(rows, width, generator=generator, dtype=torch.float64)

    rollout = -4 * torch.rand(rows, width, generator=generator, dtype=torch.float64) ** 3
    train, current = ((rollout + 0.3 * normal()).clamp(max=0) for _ in range(2))
    current[2, 3], rollout[3, 4], train[1, 2], rollout[2, 3] = (
        torch.nan,
        torch.nan,
        -torch.inf,
        -1e30,
    )
    mask = (torch.rand(rows, width, generator=generator) > 0.2).float()
    mask[5] = 0
    return {
        "train_log_probs": train,
        "rollout_log_probs": rollout,
        "loss_mask": mask,
        "current_log_probs": current,
        "advantages": normal().round(decimals=1),
    }


LOG_PROBS = st.floats(-6.0, 0.5, width=32)
DELTAS = st.floats(-2.5, 2.5, width=32) | st.floats(-0.0625, 0.0625, width=32)
WILD = st.sampled_from(
    [
        float("nan"),
        float("inf"),
        float("-inf"),
        -3.0e38,
        3.0e38,
        -1.0e9,
        2.0e6,
        -1.0e6,
        -9999.0,
        -200.0,
        -25.0,
        30.0,
    ]
)


@st.composite
def batches(draw, wild=False, max_sequences=5, max_length=9):
    """(train, rollout, mask) as lists of numbers; with `wild`, non-finite and absurd values are
    planted."""
    train, rollout, masks = [], [], []
    for length in draw(st.lists(st.integers(0, max_length), max_size=max_sequences)):
        r = draw(st.lists(LOG_PROBS, min_size=length, max_size=length))
        d = draw(st.lists(DELTAS, min_size=length, max_size=length))
        t = [a + b for a, b in zip(r, d, strict=True)]
        if wild and length:
            for values in (t, r):
                for position in draw(st.lists(st.integers(0, length - 1), max_size=3)):
                    values[position] = draw(WILD)
        train.append(t)
        rollout.append(r)
        masks.append(draw(st.lists(st.booleans(), min_size=length, max_size=length)))
    return train, rollout, masks


def tensors(batch, dtype=torch.float64):
    train, rollout, mask = batch
    return (
        [torch.tensor(x, dtype=dtype) for x in train],
        [torch.tensor(x, dtype=dtype) for x in rollout],
        [torch.tensor(x, dtype=torch.bool) for x in mask],
    )
