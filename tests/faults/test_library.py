"""Random calls of the library, sound and broken: nothing non-finite leaves it, and what is refused is refused in words.

Every call is one of a sound configuration and batch, in which some part may have been replaced by something absurd.
"""

import dataclasses
import math
import random
from collections.abc import Callable
from dataclasses import fields
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
NOT_BOUNDS = (0.0, -1.0, math.nan, math.inf, True, "2", [2.0], 10**400, 10**5000, None)
NOT_TENSORS = (None, 3.0, "log-probs", [1.0, 2.0], {}, object())


def make_options(rng: random.Random) -> dict[str, Any]:
    """Options of a configuration, mostly of sound types and often in conflict."""

    def bound(likely: float) -> Any:
        if rng.random() > likely:
            return None
        sound = (0.3, 0.9, 1.1, 2.0, 5, 100.0)
        return rng.choice(NOT_BOUNDS) if rng.random() < 0.01 else rng.choice(sound if rng.random() < 0.5 else BOUNDS)

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
    if rng.random() < 0.02:
        name = rng.choice([field.name for field in fields(RolloutCorrectionConfig)])
        options[name] = rng.choice(("nonsense" * 1000, 3, [], None, math.nan))
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


def break_inputs(rng: random.Random, inputs: list[Any], options: dict[str, Any]) -> None:
    """Replaces a part of sound inputs, in place, by something of another shape, type, device or layout."""
    which = rng.randrange(3)
    whole = rng.random() < 0.5 or not isinstance(inputs[which], list) or not inputs[which]
    holder, key = (inputs, which) if whole else (inputs[which], rng.randrange(len(inputs[which])))
    x = holder[key]
    changes: list[Callable[[], Any]] = [lambda: rng.choice(NOT_TENSORS)]
    if isinstance(x, Tensor):
        changes += [
            lambda: x.to(torch.complex64),
            lambda: x.to(torch.int32),
            lambda: x.to("meta"),
            lambda: x.to_sparse(),
            lambda: x[None],
            lambda: x.reshape(-1)[:-1],
            lambda: torch.tensor(0.0),
            lambda: x.tolist(),
            lambda: torch.cat([x, x]),
        ]
    elif isinstance(x, list):
        changes += [lambda: x[:-1], lambda: [*x, torch.zeros(1)], lambda: torch.zeros(3), lambda: torch.zeros(1, 3)]
    if rng.random() < 0.2:
        options["lengths"] = rng.choice(([1], [-1, 2], [0.5], ["a"], 7, "ab", [True], [10**30], torch.tensor([2])))
    else:
        holder[key] = rng.choice(changes)()


def unclear(error: BaseException) -> str | None:
    """What is wrong with a refusal: the kind of the exception, or a message that is not written for the caller."""
    message = str(error)
    if not isinstance(error, ValueError | TypeError):
        return f"{type(error).__name__}: {message[:200]}"
    if not message.endswith(".") or "\n" in message or len(message) > 600 or not message.isprintable():
        return f"{type(error).__name__} with the message {message[:200]!r}"
    return None


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of a nest of lists."""
    if isinstance(value, Tensor):
        return [value]
    return [x for item in value for x in tensors_of(item)] if isinstance(value, list) else []


def fingerprint(value: Any) -> list[tuple[Any, ...]]:
    """What must not change of inputs: values to the bit, versions, and whether a gradient is wanted."""
    found: list[tuple[Any, ...]] = []
    for x in tensors_of(value):
        dense = x.layout == torch.strided and x.device.type == "cpu"
        bits = x.detach().contiguous().reshape(-1).view(torch.uint8).sum().item() if dense and x.numel() else 0
        found.append((tuple(x.shape), x.dtype, x._version, x.requires_grad, bits))
    return found


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
    accepted = 0
    for call in range(CALLS):
        attempt = f"seed {seed} call {call}"
        try:
            config = RolloutCorrectionConfig(**make_options(rng))
        except Exception as error:
            faults.record(attempt, unclear(error))
            continue
        inputs, options = make_inputs(rng)
        options["global_batch"] = global_batch(rng, options.pop("ranks", slime_tis.Ranks()))
        for x in tensors_of(inputs):
            if x.is_floating_point() and rng.random() < 0.1:
                x.requires_grad_()
        if rng.random() < 0.15:
            break_inputs(rng, inputs, options)
        before = fingerprint(inputs)
        try:
            found = correct(config, *inputs, **options)
        except Exception as error:
            faults.record(f"{attempt} {config}", unclear(error))
            continue
        wrong = wrong_correction(config, inputs, found)
        faults.record(f"{attempt} {config}", wrong or ("an input changed" if fingerprint(inputs) != before else None))
        accepted += 1
    faults.check(at_least=CALLS)
    assert accepted > CALLS // 3, "most calls were refused"
