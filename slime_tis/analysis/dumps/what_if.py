"""Applies corrections to the tokens of a dump: the policy loss of train.py on every row.

TokenTable → policy_loss under one configuration → metrics of the step, and the gradient with
respect to log π_θ

`annotated` adds the effects of the run's own correction to a table: which criterion rejected each
token, vetoes, and weights before their bounds.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import reduce
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime_tis.analysis.dumps.table import Bool, Column, TokenTable
from slime_tis.correction import (
    LEVELS,
    LOG_RATIO_BOUND,
    PRESETS,
    GlobalBatch,
    Ranks,
    RolloutCorrectionConfig,
    correct,
    response_slices,
)
from slime_tis.correction.config import DIVERGENCE_BOUNDS
from slime_tis.policy.config import COVARIANCE_LOSSES, PolicyConfig, needs_global_batch
from slime_tis.policy.custom_loss import CustomTis
from slime_tis.policy.policy_loss import (
    LossInputs,
    LossStep,
    old_log_probs,
    policy_loss,
    without_correction,
)
from slime_tis.policy.response_tokens import ResponseTokens, turns_of
from slime_tis.policy.step_sums import step_metrics

MAX_TOKENS = 1 << 18
"""Default number of response tokens that `what_if` uses, a random part of a larger table."""
MAX_STEPS = 64
"""Default number of optimizer steps, a random part of more, for corrections that depend on a whole
batch."""
UNBOUNDED = 2 * float(np.exp(LOG_RATIO_BOUND))
"""An upper bound that no weight reaches: weights are at most e^20."""
CURRENT_VERSION = 1 << 30
"""Version of each step's weights; negative versions are unknown ones."""
CUSTOM_FUNCTION_CONFIG = RolloutCorrectionConfig(use_tis=True)
"""Configuration for functions in slime's contract."""
CorrectionChoice = RolloutCorrectionConfig | Callable[..., Any]
"""A configuration, or a function in slime's contract."""


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """The effect of one correction on a table; docs/dumps.md ("What if") describes the numbers."""

    name: str
    """Name of the preset or of the point of the sweep."""
    flags: str
    """Flags of train.py that select the correction."""
    kept: float
    ess: float
    """(Σw)²/(n·Σw²) of the bounded weights; the weight of a function is its output for an accepted
    token of loss 1."""
    weight_mean: float
    weight_max: float
    cosine: float | None
    """Against the gradient of −ρ_t·A_t·log π_θ; None without advantages, or if a gradient is 0."""
    norm_ratio: float | None
    sequence_cosine: float | None
    """As `cosine`, with the exact ratio of the sequence, Π_t ρ_t."""
    sequence_norm_ratio: float | None
    steps: int | None
    """Number of steps a whole-batch correction was applied to; None if it was applied to all tokens
    at once."""
    metrics: dict[str, float]
    """All metrics of the step under the names of docs/metrics.md, without `train/`."""


def corrections() -> dict[str, RolloutCorrectionConfig]:
    """All presets, and a sweep of weights and rejection over levels, modes and bounds, by name."""
    options: dict[str, dict[str, Any]] = {}
    for level, mode, upper in product(
        ("token", "sequence", "geometric"), ("truncate", "mask"), (1.5, 2.0, 5.0, 10.0)
    ):
        bounds = {"tis_level": level, "tis_mode": mode, "tis_upper_bound": upper}
        options[f"tis {level} {mode} {upper:g}"] = {"use_tis": True, **bounds}
    rejection_bounds = {
        "token": (2.0, 5.0, 10.0),
        "sequence": (1.5, 2.0, 5.0),
        "geometric": (1.001, 1.01, 1.05),
    }
    for level, uppers in rejection_bounds.items():
        for upper in uppers:
            options[f"rs {level} {upper:g}"] = {
                "use_rs": True,
                "rs_level": level,
                "rs_upper_bound": upper,
            }
    for z_score in (2.0, 3.0, 4.0):
        options[f"rs geometric z {z_score:g}"] = {
            "use_rs": True,
            "rs_level": "geometric",
            "rs_z_score": z_score,
        }
    for (kind, bound), scale in product(DIVERGENCE_BOUNDS.items(), (0.5, 1.0, 2.0)):
        mask = {"divergence_mask": kind, "divergence_mask_bound": scale * bound}
        options[f"{kind} {scale * bound:g}"] = mask
    sweep = {name: RolloutCorrectionConfig(**each) for name, each in options.items()}
    return {name: RolloutCorrectionConfig.preset(name) for name in PRESETS} | sweep


@dataclass(frozen=True, kw_only=True, eq=False)
class _Batches:
    """Inputs of the policy loss, one batch of all samples or one per step, and the exact gradients to compare with."""

    inputs: tuple[LossInputs, ...]
    has_advantages: bool
    exact: tuple[Tensor | None, ...] = ()
    """[N] with the exact ratio of each token, and of each sequence; None without advantages."""


def what_if(
    table: TokenTable,
    configs: Mapping[str, CorrectionChoice] | Sequence[CorrectionChoice] | None = None,
    *,
    args: Namespace | None = None,
    max_tokens: int = MAX_TOKENS,
    max_steps: int = MAX_STEPS,
) -> list[WhatIf]:
    """Applies each correction to a table, instead of the correction that its run had; one row per correction.

    All numbers come from the functions that train.py calls. Statistics of the global batch (mean
    weight, second-moment limit, adaptive bounds) are computed over the samples of each step in the
    table. Clip ranges and the averaging of the loss are in the table's metadata.

    Args:
        table: Samples of one or several steps.
        configs: Corrections or functions in slime's contract, in a list or by name. Default:
            `corrections()`.
        args: Options for functions, with those of their own: `args=Namespace(alpha=0.5)`. Default:
            the options of `CUSTOM_FUNCTION_CONFIG` and of the table's loss.
        max_tokens: Response tokens to use, a random part of a larger table. Bounds the memory.
        max_steps: Steps for whole-batch corrections, a random part of more.
    """
    table = table.sampled(max_tokens)
    policy = policy_of(table)
    if configs is None:
        configs = corrections()
    named = (
        configs.items()
        if isinstance(configs, Mapping)
        else [(_name_of(choice), choice) for choice in configs]
    )
    args = Namespace(**asdict(CUSTOM_FUNCTION_CONFIG), **asdict(policy)) if args is None else args
    batches: dict[bool, _Batches] = {}
    rows = []
    for name, choice in named:
        config = choice if isinstance(choice, RolloutCorrectionConfig) else CUSTOM_FUNCTION_CONFIG
        stepwise = _needs_steps(config)
        if stepwise not in batches:
            batches[stepwise] = _with_exact(
                _steps(table, max_steps) if stepwise else [table], policy
            )
        step = _loss_step(table, config, policy)
        if isinstance(choice, RolloutCorrectionConfig):
            rows.append(_row(name, config, batches[stepwise], step))
        else:
            rows.append(_row_of_function(name, choice, args, batches[stepwise], step))
    return rows


def _needs_steps(config: RolloutCorrectionConfig) -> bool:
    return needs_global_batch(config) or config.policy_loss in COVARIANCE_LOSSES


def _name_of(choice: CorrectionChoice) -> str:
    if isinstance(choice, RolloutCorrectionConfig):
        return flags_of(choice) or "no correction"
    return getattr(choice, "__name__", repr(choice))


def _row_of_function(
    name: str, function: Callable[..., Any], args: Namespace, batches: _Batches, step: LossStep
) -> WhatIf:
    (inputs,) = batches.inputs
    path = f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"
    custom = CustomTis(function=function, args=args, seed=0)
    row = _row(name, CUSTOM_FUNCTION_CONFIG, batches, replace(step, custom=custom))
    row = replace(row, flags=f"--use-tis --custom-tis-function-path {path}")
    old_L = old_log_probs(inputs, step).detach()
    loss_L, mask_L, *_ = CustomTis(function=function, args=args, seed=0)(
        inputs.tokens,
        loss_L=torch.ones_like(old_L).requires_grad_() * 1,
        log_probs_L=inputs.log_probs_L,
        train_log_probs_L=old_L,
        global_batch=GlobalBatch(),
    )
    weights = loss_L.detach()[mask_L & (inputs.tokens.loss_mask_L > 0)].double()
    if not len(weights):
        return replace(row, ess=0.0, weight_mean=0.0, weight_max=0.0)
    square = len(weights) * weights.square().sum()
    ess = float(weights.sum().square() / square) if square > 0 else 0.0
    return replace(row, ess=ess, weight_mean=float(weights.mean()), weight_max=float(weights.max()))


def by_cosine(rows: Sequence[WhatIf]) -> list[WhatIf]:
    """The rows, the closest to the exact gradient first; rows without a cosine last."""
    return sorted(rows, key=lambda row: -2.0 if row.cosine is None else row.cosine, reverse=True)


def as_text(rows: Sequence[WhatIf]) -> str:
    """A text table, sorted by cosine."""
    lines = ["  kept    ESS  mean w   max w  cosine  norm ratio  flags"]
    for row in by_cosine(rows):
        cosine, norm = (
            "-" if value is None else f"{value:.4f}" for value in (row.cosine, row.norm_ratio)
        )
        numbers = f"{row.kept:6.1%} {row.ess:6.3f} {row.weight_mean:7.4g} {row.weight_max:7.4g}"
        lines.append(f"{numbers} {cosine:>7} {norm:>11}  {row.flags or 'no correction'}")
    return "\n".join(lines)


def _row(name: str, config: RolloutCorrectionConfig, batches: _Batches, step: LossStep) -> WhatIf:
    metrics, gradient_N = _applied(batches, step)
    is_preset = name in PRESETS and RolloutCorrectionConfig.preset(name) == config
    of_token, of_sequence = (_compared(gradient_N, exact_N) for exact_N in batches.exact)
    # Without --use-tis all weights are 1; with it there are none if no token has log-probs of both
    # engines.
    default = 0.0 if config.use_tis else 1.0
    return WhatIf(
        name=name,
        flags=f"--rollout-correction-preset {name}" if is_preset else flags_of(config),
        kept=metrics["gradient_kept_fraction"],
        ess=metrics.get("mis_eff_sample_size", default),
        weight_mean=metrics.get("mis_ratio_mean_after_mis", default),
        weight_max=metrics.get("mis_weight_max", default),
        cosine=of_token[0],
        norm_ratio=of_token[1],
        sequence_cosine=of_sequence[0],
        sequence_norm_ratio=of_sequence[1],
        steps=len(batches.inputs) if _needs_steps(config) else None,
        metrics=metrics,
    )


def policy_of(table: TokenTable) -> PolicyConfig:
    """The policy loss options in a table's metadata, without the KL loss; defaults for missing options."""
    known = {option.name for option in fields(PolicyConfig)}
    policy = table.metadata.get("policy") or {}
    options: dict[str, Any] = {name: value for name, value in policy.items() if name in known}
    return replace(PolicyConfig(**options), use_kl_loss=False)


def flags_of(config: RolloutCorrectionConfig) -> str:
    """The flags of train.py for all options that differ from their defaults."""
    words = []
    for option in fields(config):
        value = getattr(config, option.name)
        if value == option.default:
            continue
        words.append("--" + option.name.replace("_", "-"))
        words += [] if value is True else [f"{value:g}" if isinstance(value, float) else str(value)]
    return " ".join(words)


def _with_exact(parts: Sequence[TokenTable], policy: PolicyConfig) -> _Batches:
    """The batches with the gradients of −ρ·A·log π_θ, with the unbounded ratio of each level."""
    batches = _Batches(
        inputs=tuple(loss_inputs(part) for part in parts),
        has_advantages=parts[0].advantage is not None and any(part.tokens for part in parts),
    )
    token = RolloutCorrectionConfig(
        use_rollout_logprobs=True, policy_loss="reinforce", use_tis=True, tis_upper_bound=UNBOUNDED
    )
    policy = replace(policy, staleness_decay=1.0, rollout_pull_coef=0.0, use_opsm=False)
    steps = [
        _loss_step(parts[0], config, policy)
        for config in (token, replace(token, tis_level="sequence"))
    ]
    return replace(batches, exact=tuple(_applied(batches, step)[1] for step in steps))


def _applied(batches: _Batches, step: LossStep) -> tuple[dict[str, float], Tensor | None]:
    """Metrics of a correction over all batches, and the gradient of its loss [N], None without advantages."""
    outputs = [policy_loss(inputs, step) for inputs in batches.inputs]
    sums = reduce(lambda total, sums: total.merge(sums), (output.sums for output in outputs))
    metrics = step_metrics(sums, step.correction, step.policy)
    if not batches.has_advantages:
        return metrics, None
    log_probs = [inputs.log_probs_L for inputs in batches.inputs]
    numerator = torch.stack([output.numerator for output in outputs]).sum()
    denominator = torch.stack([output.denominator for output in outputs]).sum().clamp_min(1)
    if not numerator.requires_grad:  # nothing is accepted
        return metrics, torch.zeros_like(torch.cat(log_probs))
    return metrics, torch.cat(torch.autograd.grad(numerator / denominator, log_probs))


def _steps(table: TokenTable, max_steps: int) -> list[TokenTable]:
    """One table per optimizer step, at most `max_steps`; a single table without a step column."""
    if table.step is None or not len(table):
        return [table]
    order = np.argsort(table.step, kind="stable")
    steps = np.split(order, np.flatnonzero(np.diff(table.step[order])) + 1)
    chosen = np.sort(np.random.default_rng(0).permutation(len(steps))[:max_steps])
    return [table.select(steps[i]) for i in chosen]


def _compared(
    gradient_N: Tensor | None, exact_N: Tensor | None
) -> tuple[float | None, float | None]:
    """Cosine and norm ratio of two gradients; None if a gradient is missing or 0."""
    if gradient_N is None or exact_N is None:
        return None, None
    norm, exact_norm = float(gradient_N.double().norm()), float(exact_N.double().norm())
    if exact_norm == 0:
        return None, None
    return (
        float(gradient_N.double() @ exact_N.double()) / (norm * exact_norm) if norm else None
    ), norm / exact_norm


def loss_inputs(table: TokenTable) -> LossInputs:
    """A table as a micro-batch for the policy loss; log π_θ requires a gradient."""
    lengths = table.response_length.tolist()
    prompts = [len(prompt) for prompt in table.prompt or [()] * len(table)]
    totals = [prompt + response for prompt, response in zip(prompts, lengths, strict=True)]
    version = np.full(table.tokens, CURRENT_VERSION)
    if table.weight_version is not None:
        age = (
            0
            if table.step is None
            else np.repeat(table.step, table.response_length) - table.weight_version
        )
        version = np.where(table.weight_version < 0, -1, CURRENT_VERSION - age)
    loss_mask = torch.from_numpy(table.loss_mask.astype(np.float32))
    advantage = (
        torch.ones(table.tokens)
        if table.advantage is None
        else _tensor(table.advantage).nan_to_num()
    )
    recomputed = table.metadata.get("old_policy") == "recomputed"
    tokens = ResponseTokens(
        slices=response_slices(totals, lengths, 0, 1),
        total_lengths=tuple(totals),
        loss_mask_L=loss_mask,
        loss_mask_N=loss_mask,
        rollout_log_probs_L=_tensor(table.rollout_log_prob),
        weight_versions_L=torch.from_numpy(version),
        workers_L=(
            None
            if table.rollout_worker is None
            else torch.from_numpy(table.rollout_worker.astype(np.int64))
        ),
        turns_L=turns_of(loss_mask, lengths),
        old_log_probs_L=_tensor(table.old_log_prob) if recomputed else None,
        advantages_L=advantage,
    )
    entropy = torch.zeros(table.tokens) if table.entropy is None else _tensor(table.entropy)
    log_probs = _tensor(table.train_log_prob).requires_grad_()
    return LossInputs(tokens=tokens, log_probs_L=log_probs, entropy_L=entropy)


def _loss_step(
    table: TokenTable, config: RolloutCorrectionConfig, policy: PolicyConfig
) -> LossStep:
    interpolates = config.old_logprobs == "interpolate"
    if (interpolates or policy.staleness_decay < 1) and (
        table.weight_version is None or table.step is None
    ):
        flag = "--old-logprobs interpolate" if interpolates else "--staleness-decay"
        raise ValueError(f"{flag} needs steps and weight versions, which the dump does not have.")
    recomputed = table.metadata.get("old_policy") == "recomputed" and not (
        config.use_rollout_logprobs or interpolates
    )
    return LossStep(
        correction=config,
        policy=policy,
        uses_recomputed_old_policy=recomputed,
        version=CURRENT_VERSION,
    )


def annotated(
    table: TokenTable, config: RolloutCorrectionConfig, accepted: Bool, global_batch: GlobalBatch
) -> TokenTable:
    """The table with weights before bounds, the criteria that reject each token, and vetoes.

    Args:
        table: Complete samples of one step.
        config: Correction of the step.
        accepted: [N] tokens that counted in the loss.
        global_batch: Statistics of the batch over all ranks.
    """
    global_batch = replace(global_batch, ranks=Ranks())
    trained = table.loss_mask > 0
    rejected: dict[str, Bool] = {}
    for name, criterion in single_criteria(config).items():
        if not criterion.needs_advantages or table.advantage is not None:
            rejected[name] = trained & ~_corrected(table, criterion, global_batch).mask.numpy()
    if config.touches_loss and config.nonfinite_policy == "reject":
        rejected = {
            name: mask & table.valid for name, mask in rejected.items()
        }  # they ignore tokens without log-probs
        rejected["nonfinite"] = trained & ~table.valid
    explained = np.any([*rejected.values(), np.zeros(table.tokens, np.bool_)], axis=0)
    rejected["other"] = (
        trained & ~accepted & ~explained
    )  # by off-policy sequence masking, or a user-defined function
    bits = np.zeros(table.tokens, np.int32)
    for bit, mask in enumerate(rejected.values()):
        bits |= mask.astype(np.int32) << bit
    unbounded = RolloutCorrectionConfig(
        use_tis=True,
        tis_level=config.tis_level,
        tis_upper_bound=UNBOUNDED,
        nonfinite_policy=config.nonfinite_policy,
    )
    return replace(
        table,
        weight=_corrected(table, unbounded, GlobalBatch()).weights.numpy(),
        rejected=bits,
        vetoed=rejected.get("veto", np.zeros(table.tokens)).astype(np.uint8),
        metadata={**table.metadata, "criteria": list(rejected)},
    )


def single_criteria(config: RolloutCorrectionConfig) -> dict[str, RolloutCorrectionConfig]:
    """One configuration per rejection criterion, which has only this criterion, by the criterion's name.

    Names are the names of the metrics (the level, or verl's names), "divergence_mask", "tis_mask"
    for weights in mode mask, "second_moment" and "veto".
    """
    base = replace(without_correction(config), use_rollout_logprobs=False, old_logprobs="recompute")
    single = {}
    for criterion in config.rejections:
        if criterion.anchor is not None:
            options: dict[str, Any] = {"divergence_mask": config.divergence_mask}
        elif criterion.name in LEVELS:
            options = {
                "use_rs": True,
                "rs_z_score": config.rs_z_score,
                "rs_target_fraction": config.rs_target_fraction,
            }
        else:
            bounds = (
                [criterion.upper] if criterion.lower is None else [criterion.lower, criterion.upper]
            )
            options = {
                "rollout_rs": criterion.name,
                "rollout_rs_threshold": "_".join(map(repr, bounds)),
            }
        single[criterion.name] = replace(base, **options)
    if config.rejects_weights:
        single["tis_mask"] = replace(base, use_tis=True, tis_batch_normalize=False)
    if config.rs_second_moment_bound is not None:
        single["second_moment"] = replace(
            base, rs_second_moment_bound=config.rs_second_moment_bound
        )
    if config.vetoes:
        lower, upper = config.rs_veto_threshold, config.rs_veto_upper_threshold
        single["veto"] = replace(base, rs_veto_threshold=lower, rs_veto_upper_threshold=upper)
    return single


def _corrected(
    table: TokenTable, config: RolloutCorrectionConfig, global_batch: GlobalBatch
) -> Any:
    return correct(
        config,
        *(
            _tensor(column)
            for column in (table.policy_log_prob, table.rollout_log_prob, table.loss_mask)
        ),
        lengths=table.response_length.tolist(),
        current_log_probs=_tensor(table.train_log_prob),
        advantages=None if table.advantage is None else _tensor(table.advantage),
        global_batch=global_batch,
    )


def _tensor(values: Column) -> Tensor:
    return torch.from_numpy(np.array(values))
