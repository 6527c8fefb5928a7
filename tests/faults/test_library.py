"""Random calls of the library with absurd values: no result is non-finite, and no input changes."""

import dataclasses
import math
import random
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

import slime_tis
from slime_tis import RolloutCorrectionConfig, correct
from slime_tis.correction.config import NonfinitePolicy, Normalizer
from slime_tis.correction.modes import CRITERIA, LEVELS, ModeName
from slime_tis.correction.sums import stacked

CALLS = 5000
"""Calls of each seed."""
DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
MASK_DTYPES = (torch.bool, torch.int64, torch.uint8, torch.float32, torch.bfloat16)
WILD = (math.nan, math.inf, -math.inf, 3.0e38, -3.0e38, -1.0e9, 1.0e6, -25.0, 30.0, 1e-40, 5e-324, -0.0)
BOUNDS = (5e-324, 1e-310, 1e-300, 1e-46, 1e-38, 1e-8, 0.3, 0.9, 1.0, 1.1, 2.0, 5, 1e9, 3.5e38, 1e39, 1e300, 1.7e308)


def make_options(rng: random.Random) -> dict[str, Any]:
    """Options of a configuration, mostly of sound types and often in conflict."""

    def bound(likely: float) -> Any:
        if rng.random() > likely:
            return None
        return rng.choice((0.3, 0.9, 1.1, 2.0, 5, 100.0) if rng.random() < 0.5 else BOUNDS)

    names = rng.sample(list(CRITERIA), rng.choice((0, 0, 1, 2, 4)))
    thresholds = [f"{rng.choice(BOUNDS[rng.choice((0, 8)) :])}" for _ in names]
    options = {
        "use_tis": rng.random() < 0.7,
        "tis_mode": rng.choice(get_args(ModeName)),
        "tis_level": rng.choice(tuple(LEVELS)),
        "tis_lower_bound": bound(0.2),
        "tis_upper_bound": bound(1.0) if rng.random() < 0.5 else 2.0,
        "tis_batch_normalize": rng.random() < 0.3,
        "use_rs": rng.random() < 0.5,
        "rs_level": rng.choice(tuple(LEVELS)),
        "rs_lower_bound": bound(0.1),
        "rs_upper_bound": bound(0.5),
        "rs_veto_threshold": rng.choice((None, None, 1e-4, 5e-324, bound(0.5))),
        "rs_veto_upper_threshold": rng.choice((None, None, 100.0, 1.7e308, bound(0.5))),
        "rs_second_moment_bound": bound(0.2),
        "rollout_rs": ",".join(names) or None,
        "rollout_rs_threshold": ",".join(thresholds) or None,
        "rejection_normalizer": rng.choice(get_args(Normalizer)),
        "nonfinite_policy": rng.choice(get_args(NonfinitePolicy)),
        "use_rollout_logprobs": rng.random() < 0.2,
        "policy_loss": rng.choice(("ppo", "reinforce", "reinforce", "reinforce")),
        "get_mismatch_metrics": rng.random() < 0.5,
    }
    if options["use_rs"] and rng.random() < 0.3:
        options |= {"rs_level": rng.choice(("geometric", "sequence")), "rs_lower_bound": None, "rs_upper_bound": None}
        options |= rng.choice(({"rs_z_score": bound(0.9)}, {"rs_target_fraction": rng.choice((0.02, 0.5, 1.0, 2.0))}))
    return options


def make_values(rng: random.Random, length: int, dtype: torch.dtype, scale: float) -> Tensor:
    """Log-probs, a few of them absurd in some batches."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    values = -torch.rand(length, generator=generator) * scale
    if length and rng.random() < 0.3:
        for _ in range(rng.randint(1, 3)):
            values[rng.randrange(length)] = rng.choice(WILD)
        if rng.random() < 0.1:
            values[:] = rng.choice(WILD)
    return values.to(dtype)


def make_lists(rng: random.Random) -> tuple[list[Tensor | None], list[Tensor | None], list[Tensor | None]]:
    """Train and rollout log-probs and masks of a batch: often none, one token, nothing valid, or one long sequence."""
    lengths = [rng.choice((0, 1, 1, 2, 3, 8, 17)) for _ in range(rng.choice((0, 1, 1, 2, 3, 6)))]
    if rng.random() < 0.01:
        lengths.append(rng.choice((4097, 300_000)))
    train_dtype, rollout_dtype, mask_dtype = rng.choice(DTYPES), rng.choice(DTYPES), rng.choice(MASK_DTYPES)
    scale = rng.choice((1e-6, 0.1, 1.0, 30.0))
    kept = rng.choice((0.0, 0.5, 0.9, 1.0))
    train = [make_values(rng, n, train_dtype, scale) for n in lengths]
    rollout: list[Tensor | None] = [make_values(rng, n, rollout_dtype, scale) for n in lengths]
    if rollout and rng.random() < 0.1:
        rollout[rng.randrange(len(rollout))] = None
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    mask = [(torch.rand(n, generator=generator) < kept).to(mask_dtype) for n in lengths]
    return list(train), rollout, list(mask)


def make_inputs(rng: random.Random) -> tuple[list[Any], dict[str, Any]]:
    """The three inputs of `correct` in one of its layouts, and what belongs to the layout."""
    train, rollout, mask = make_lists(rng)
    layout = rng.choice(("list", "padded", "packed", "slices"))
    if layout in ("list", "slices"):
        lengths = [len(x) for x in train]
        if layout == "list":
            return [train, rollout, mask], {}
        slices = slime_tis.response_slices([n + 2 for n in lengths], lengths, 0, 1)
        return [train, rollout, mask], {"ranks": slime_tis.Ranks(context=one_rank_sum, slices=slices)}
    filled = [torch.full((len(t),), math.nan) if r is None else r for t, r in zip(train, rollout, strict=True)]
    if layout == "packed":
        parts = [torch.cat([torch.zeros(0), *part]) for part in (train, filled, mask)]
        return parts, {"lengths": [len(x) for x in train]}
    if not train:
        return [torch.zeros(0, 3) for _ in range(3)], {}
    return [torch.nn.utils.rnn.pad_sequence(part, batch_first=True) for part in (train, filled, mask)], {}


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of a nest of lists."""
    if isinstance(value, Tensor):
        return [value]
    return [x for item in value for x in tensors_of(item)] if isinstance(value, list) else []


def wrong_correction(config: RolloutCorrectionConfig, inputs: list[Any], found: Any) -> str | None:
    """What is wrong with a result; None where every promise holds."""
    weights, masks, loss_masks = (tensors_of(x) for x in (found.weights, found.mask, inputs[2]))
    for weight, mask, original in zip(weights, masks, loss_masks, strict=True):
        if weight.dtype != torch.float32 or mask.dtype != torch.bool or weight.shape != original.shape:
            return f"weights {weight.dtype} {tuple(weight.shape)} and mask {mask.dtype}"
        if not weight.isfinite().all() or (weight < 0).any():
            return "a weight is not finite, or below 0"
        if (mask & (original == 0)).any() or (weight * (original == 0)).any():
            return "a masked token counts"
    outside = [
        found.statistics.sums,
        found.masked_in_per_sequence,
        found.accepted_per_sequence,
        stacked(found.sequence_sums),
    ]
    if any(x.requires_grad for x in (*weights, *masks, *outside)):
        return "a gradient flows"
    if not all(x.isfinite().all() for x in outside):
        return "a sum is not finite"
    merged = found.statistics.merge(slime_tis.Statistics.empty(config)).merge(found.statistics)
    for statistics in (found.statistics, merged):
        values = statistics.metrics()
        bad = [name for name, value in values.items() if not math.isfinite(value)]
        if bad:
            return f"not finite: {', '.join(bad)}"
        if values.get("mismatch_k3_kl", 0.0) < 0 or values.get("mis_weight_std", 0.0) < 0:
            return "a metric is below 0 that cannot be"
    if not found.statistics.batch_norm_factor() > 0:
        return "the mean weight is not above 0"
    losses = [torch.ones(mask.shape, requires_grad=True) for mask in masks]
    mean = found.mean(losses if isinstance(found.mask, list) else losses[0])
    gradients = torch.autograd.grad(mean, losses, allow_unused=True) if losses else []
    if not all(x is None or x.isfinite().all() for x in (mean, *gradients)):
        return "the mean or its gradient is not finite"
    return None


def one_rank_sum(values: Tensor, op: str) -> Tensor:
    """The reduction over a group of one rank."""
    return values


def global_batch(rng: random.Random, ranks: slime_tis.Ranks) -> slime_tis.GlobalBatch:
    """What a caller may know of the global batch, absurd values among it."""
    found: dict[str, Any] = {"ranks": ranks}
    if rng.random() < 0.2:
        found["batch_norm_factor"] = torch.tensor(rng.choice((0.7, 0.0, -1.0, 1e-300, 1e300, math.nan, math.inf)))
    if rng.random() < 0.2:
        found["second_moment_limit"] = torch.tensor(rng.choice((0.1, 0.0, -1.0, 1e300, math.nan, math.inf)))
    if rng.random() < 0.2:
        found["ranks"] = dataclasses.replace(ranks, data=one_rank_sum)
    return slime_tis.GlobalBatch(**found)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_corrections(tally: Any, seed: int) -> None:
    """`correct` and everything that reads its result."""
    rng, faults = random.Random(seed), tally("library: corrections")
    for call in range(CALLS):
        try:
            config = RolloutCorrectionConfig(**make_options(rng))
        except ValueError:
            continue
        inputs, options = make_inputs(rng)
        options["global_batch"] = global_batch(rng, options.pop("ranks", slime_tis.Ranks()))
        for x in tensors_of(inputs):
            if x.is_floating_point() and rng.random() < 0.1:
                x.requires_grad_()
        versions = [x._version for x in tensors_of(inputs)]
        try:
            found = correct(config, *inputs, **options)
        except ValueError:  # such as a missing log-prob under the policy raise
            continue
        wrong = wrong_correction(config, inputs, found)
        is_changed = [x._version for x in tensors_of(inputs)] != versions
        faults.record(f"seed {seed} call {call} {config}", wrong or ("an input changed" if is_changed else None))
    faults.check(at_least=CALLS // 3)
