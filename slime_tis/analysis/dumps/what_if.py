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
from slime_tis.policy.config import (
    COVARIANCE_LOSSES,
    PolicyConfig,
    needs_global_batch,
    without_correction,
)
from slime_tis.policy.custom_loss import CustomTis
from slime_tis.policy.loss_inputs import LossInputs, LossStep
from slime_tis.policy.policy_loss import old_log_probs, policy_loss
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
"""Version of the weights at each step. It is large because negative versions mean unknown."""
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
    """Number of steps that a correction with batch statistics used. None for others: they take all
    tokens at once."""
    metrics: dict[str, float]
    """All metrics of the step under the names of docs/metrics.md, without `train/`."""


def corrections() -> dict[str, RolloutCorrectionConfig]:
    """Returns all presets, and a sweep of weights and rejection, by name."""
    configs = {name: RolloutCorrectionConfig.preset(name) for name in PRESETS}
    for level, mode, upper in product(
        ("token", "sequence", "geometric"), ("truncate", "mask"), (1.5, 2.0, 5.0, 10.0)
    ):
        options: dict[str, Any] = {"tis_level": level, "tis_mode": mode, "tis_upper_bound": upper}
        configs[f"tis {level} {mode} {upper:g}"] = RolloutCorrectionConfig(use_tis=True, **options)
    rejection_bounds = {
        "token": (2.0, 5.0, 10.0),
        "sequence": (1.5, 2.0, 5.0),
        # The geometric mean over a sequence is close to 1.
        "geometric": (1.001, 1.01, 1.05),
    }
    for level, uppers in rejection_bounds.items():
        for upper in uppers:
            options = {"rs_level": level, "rs_upper_bound": upper}
            configs[f"rs {level} {upper:g}"] = RolloutCorrectionConfig(use_rs=True, **options)
    for z_score in (2.0, 3.0, 4.0):
        configs[f"rs geometric z {z_score:g}"] = RolloutCorrectionConfig(
            use_rs=True, rs_level="geometric", rs_z_score=z_score
        )
    for kind, default_bound in DIVERGENCE_BOUNDS.items():
        for scale in (0.5, 1.0, 2.0):
            bound = scale * default_bound
            configs[f"{kind} {bound:g}"] = RolloutCorrectionConfig(
                divergence_mask=kind, divergence_mask_bound=bound
            )
    return configs


@dataclass(frozen=True, kw_only=True, eq=False)
class _Batches:
    """Inputs of the policy loss and exact gradients: one batch of all samples, or one per step."""

    inputs: tuple[LossInputs, ...]
    has_advantages: bool
    exact: tuple[Tensor | None, ...] = ()
    """Gradients [N] with exact ratios of tokens, and of sequences; None without advantages."""


def what_if(
    table: TokenTable,
    configs: Mapping[str, CorrectionChoice] | Sequence[CorrectionChoice] | None = None,
    *,
    args: Namespace | None = None,
    max_tokens: int = MAX_TOKENS,
    max_steps: int = MAX_STEPS,
) -> list[WhatIf]:
    """Applies each correction to a table, instead of the run's own; returns one row for each.

    All numbers come from the functions that train.py calls. Statistics of the global batch (mean
    weight, second-moment limit, adaptive bounds) are computed over the samples of each step in the
    table. Clip ranges and the averaging of the loss are in the table's metadata.

    Args:
        table: Samples of one or several steps.
        configs: Corrections or functions in slime's contract, in a list or by name. Default:
            `corrections()`.
        args: Options that functions read, for example `Namespace(alpha=0.5)`. Default: the options
            of `CUSTOM_FUNCTION_CONFIG` and of the table's loss.
        max_tokens: Response tokens to use; a larger table is sampled. Bounds the memory.
        max_steps: Steps for corrections with batch statistics; more steps are sampled.

    Raises:
        ValueError: a correction needs a column that the table lacks.
    """
    table = table.sampled(max_tokens)
    policy = policy_of(table)
    if configs is None:
        configs = corrections()
    if isinstance(configs, Mapping):
        named = list(configs.items())
    else:
        named = [(_name_of(choice), choice) for choice in configs]
    if args is None:
        args = Namespace(**asdict(CUSTOM_FUNCTION_CONFIG), **asdict(policy))
    batches: dict[bool, _Batches] = {}  # the exact gradients are the same for most corrections
    rows = []
    for name, choice in named:
        config = CUSTOM_FUNCTION_CONFIG
        if isinstance(choice, RolloutCorrectionConfig):
            config = choice
        stepwise = _needs_steps(config)
        if stepwise not in batches:
            parts = [table]
            if stepwise:
                parts = _steps(table, max_steps)
            batches[stepwise] = _with_exact(parts, policy)
        step = _loss_step(table, config, policy)
        if isinstance(choice, RolloutCorrectionConfig):
            rows.append(_row(name, config, batches[stepwise], step))
        else:
            rows.append(_row_of_function(name, choice, args, batches[stepwise], step))
    return rows


def _needs_steps(config: RolloutCorrectionConfig) -> bool:
    """Whether a correction depends on the samples of one optimizer step."""
    return needs_global_batch(config) or config.policy_loss in COVARIANCE_LOSSES


def _name_of(choice: CorrectionChoice) -> str:
    """Returns the flags of a configuration, or the name of a function."""
    if isinstance(choice, RolloutCorrectionConfig):
        return flags_of(choice) or "no correction"
    return getattr(choice, "__name__", repr(choice))


def _row_of_function(
    name: str, function: Callable[..., Any], args: Namespace, batches: _Batches, step: LossStep
) -> WhatIf:
    """Returns the effect of a function in slime's contract."""
    (inputs,) = batches.inputs
    module = getattr(function, "__module__", "?")
    path = f"{module}.{getattr(function, '__qualname__', repr(function))}"
    custom = CustomTis(function=function, args=args, seed=0)
    row = _row(name, CUSTOM_FUNCTION_CONFIG, batches, replace(step, custom=custom))
    row = replace(row, flags=f"--use-tis --custom-tis-function-path {path}")
    old_L = old_log_probs(inputs, step).detach()
    # A loss of 1 per token turns the function's output into its weights. A new CustomTis has the
    # seed of the step above; `custom` would draw other random numbers in a second call.
    again = CustomTis(function=function, args=args, seed=0)
    # The product is no leaf of autograd, which may not be changed in place.
    ones_L = torch.ones_like(old_L).requires_grad_() * 1
    loss_L, mask_L, *_ = again(
        inputs.tokens,
        loss_L=ones_L,
        log_probs_L=inputs.log_probs_L,
        train_log_probs_L=old_L,
        global_batch=GlobalBatch(),
    )
    weights = loss_L.detach()[mask_L & (inputs.tokens.loss_mask_L > 0)].double()
    if not len(weights):
        return replace(row, ess=0.0, weight_mean=0.0, weight_max=0.0)
    square = len(weights) * weights.square().sum()
    ess = 0.0
    if square > 0:
        ess = float(weights.sum().square() / square)
    return replace(row, ess=ess, weight_mean=float(weights.mean()), weight_max=float(weights.max()))


def by_cosine(rows: Sequence[WhatIf]) -> list[WhatIf]:
    """Returns the rows, the closest to the exact gradient first, and rows without a cosine last."""

    def cosine(row: WhatIf) -> float:
        if row.cosine is None:
            return -2.0  # below every cosine
        return row.cosine

    return sorted(rows, key=cosine, reverse=True)


def as_text(rows: Sequence[WhatIf]) -> str:
    """Returns a text table, sorted by cosine."""
    lines = ["  kept    ESS  mean w   max w  cosine  norm ratio  flags"]
    for row in by_cosine(rows):
        cosine = _four_digits(row.cosine)
        norm = _four_digits(row.norm_ratio)
        numbers = f"{row.kept:6.1%} {row.ess:6.3f} {row.weight_mean:7.4g} {row.weight_max:7.4g}"
        lines.append(f"{numbers} {cosine:>7} {norm:>11}  {row.flags or 'no correction'}")
    return "\n".join(lines)


def _four_digits(value: float | None) -> str:
    """Returns a number for the text table; a dash if it is unknown."""
    if value is None:
        return "-"
    return f"{value:.4f}"


def _row(name: str, config: RolloutCorrectionConfig, batches: _Batches, step: LossStep) -> WhatIf:
    """Returns the effect of one configuration."""
    metrics, gradient_N = _applied(batches, step)
    flags = flags_of(config)
    if name in PRESETS and RolloutCorrectionConfig.preset(name) == config:
        flags = f"--rollout-correction-preset {name}"
    token_exact_N, sequence_exact_N = batches.exact
    cosine, norm_ratio = _compared(gradient_N, token_exact_N)
    sequence_cosine, sequence_norm_ratio = _compared(gradient_N, sequence_exact_N)
    # Without --use-tis all weights are 1; with it there are none if no token has log-probs of both
    # engines.
    default = 1.0
    if config.use_tis:
        default = 0.0
    steps = None
    if _needs_steps(config):
        steps = len(batches.inputs)
    return WhatIf(
        name=name,
        flags=flags,
        kept=metrics["gradient_kept_fraction"],
        ess=metrics.get("mis_eff_sample_size", default),
        weight_mean=metrics.get("mis_ratio_mean_after_mis", default),
        weight_max=metrics.get("mis_weight_max", default),
        cosine=cosine,
        norm_ratio=norm_ratio,
        sequence_cosine=sequence_cosine,
        sequence_norm_ratio=sequence_norm_ratio,
        steps=steps,
        metrics=metrics,
    )


def policy_of(table: TokenTable) -> PolicyConfig:
    """Returns the policy loss options in a table's metadata, without the KL loss.

    Missing options have their defaults.
    """
    names = {option.name for option in fields(PolicyConfig)}
    policy = table.metadata.get("policy") or {}
    options: dict[str, Any] = {name: value for name, value in policy.items() if name in names}
    # A dump has no log-probs of the reference model.
    return replace(PolicyConfig(**options), use_kl_loss=False)


def flags_of(config: RolloutCorrectionConfig) -> str:
    """Returns the flags of train.py for all options that differ from their defaults."""
    words = []
    for option in fields(config):
        value = getattr(config, option.name)
        if value == option.default:
            continue
        words.append("--" + option.name.replace("_", "-"))
        if isinstance(value, float):
            words.append(f"{value:g}")
        elif value is not True:
            words.append(str(value))
    return " ".join(words)


def _with_exact(parts: Sequence[TokenTable], policy: PolicyConfig) -> _Batches:
    """The batches with gradients of −ρ·A·log π_θ, for exact ratios ρ of tokens and sequences."""
    batches = _Batches(
        inputs=tuple(loss_inputs(part) for part in parts),
        has_advantages=parts[0].advantage is not None and any(part.tokens for part in parts),
    )
    # The exact gradient has none of these further factors and terms.
    policy = replace(policy, staleness_decay=1.0, rollout_pull_coef=0.0, use_opsm=False)
    exact = []
    for level in ("token", "sequence"):
        config = RolloutCorrectionConfig(
            use_rollout_logprobs=True,
            policy_loss="reinforce",
            use_tis=True,
            tis_level=level,
            tis_upper_bound=UNBOUNDED,
        )
        _, gradient_N = _applied(batches, _loss_step(parts[0], config, policy))
        exact.append(gradient_N)
    return replace(batches, exact=tuple(exact))


def _applied(batches: _Batches, step: LossStep) -> tuple[dict[str, float], Tensor | None]:
    """A correction's metrics over all batches, and its gradient [N]; None without advantages."""
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
    """At most `max_steps` tables of one optimizer step each; one table without a step column."""
    if table.step is None or not len(table):
        return [table]
    order = np.argsort(table.step, kind="stable")
    starts = np.flatnonzero(np.diff(table.step[order])) + 1
    steps = np.split(order, starts)
    # A fixed seed, so that all corrections are compared on the same steps.
    shuffled = np.random.default_rng(0).permutation(len(steps))
    chosen = np.sort(shuffled[:max_steps])
    return [table.select(steps[i]) for i in chosen]


def _compared(
    gradient_N: Tensor | None, exact_N: Tensor | None
) -> tuple[float | None, float | None]:
    """Cosine and norm ratio of two gradients; None if a gradient is missing or 0."""
    if gradient_N is None or exact_N is None:
        return None, None
    norm = float(gradient_N.double().norm())
    exact_norm = float(exact_N.double().norm())
    if exact_norm == 0:
        return None, None
    cosine = None
    if norm:
        cosine = float(gradient_N.double() @ exact_N.double()) / (norm * exact_norm)
    return cosine, norm / exact_norm


def loss_inputs(table: TokenTable) -> LossInputs:
    """Returns a table as a micro-batch for the policy loss; log π_θ requires a gradient."""
    lengths = table.response_length.tolist()
    totals = lengths
    if table.prompt is not None:
        totals = []
        for prompt, response in zip(table.prompt, lengths, strict=True):
            totals.append(len(prompt) + response)
    # All steps of the table are one batch, so versions are made from ages.
    version = np.full(table.tokens, CURRENT_VERSION)
    if table.weight_version is not None:
        if table.step is not None:
            version = CURRENT_VERSION - (table.step[table.sample] - table.weight_version)
        version = np.where(table.weight_version < 0, -1, version)
    loss_mask = torch.from_numpy(table.loss_mask.astype(np.float32))
    advantage = torch.ones(table.tokens)
    if table.advantage is not None:
        advantage = _tensor(table.advantage).nan_to_num()
    workers = None
    if table.rollout_worker is not None:
        workers = torch.from_numpy(table.rollout_worker.astype(np.int64))
    old_log_probs_L = None
    if table.metadata.get("old_policy") == "recomputed":
        old_log_probs_L = _tensor(table.old_log_prob)
    tokens = ResponseTokens(
        slices=response_slices(totals, lengths, 0, 1),
        total_lengths=tuple(totals),
        loss_mask_L=loss_mask,
        loss_mask_N=loss_mask,
        rollout_log_probs_L=_tensor(table.rollout_log_prob),
        weight_versions_L=torch.from_numpy(version),
        workers_L=workers,
        turns_L=turns_of(loss_mask, lengths),
        old_log_probs_L=old_log_probs_L,
        advantages_L=advantage,
    )
    entropy = torch.zeros(table.tokens)
    if table.entropy is not None:
        entropy = _tensor(table.entropy)
    log_probs = _tensor(table.train_log_prob).requires_grad_()
    return LossInputs(tokens=tokens, log_probs_L=log_probs, entropy_L=entropy)


def _loss_step(
    table: TokenTable, config: RolloutCorrectionConfig, policy: PolicyConfig
) -> LossStep:
    """Returns the options of the loss; raises ValueError if the table lacks a column for them."""
    interpolates = config.old_logprobs == "interpolate"
    needs_age = interpolates or policy.staleness_decay < 1
    if needs_age and (table.weight_version is None or table.step is None):
        flag = "--staleness-decay"
        if interpolates:
            flag = "--old-logprobs interpolate"
        raise ValueError(f"{flag} needs steps and weight versions, which the dump does not have.")
    is_recomputed = table.metadata.get("old_policy") == "recomputed"
    replaces_old = config.use_rollout_logprobs or interpolates
    return LossStep(
        correction=config,
        policy=policy,
        uses_recomputed_old_policy=is_recomputed and not replaces_old,
        version=CURRENT_VERSION,
    )


def annotated(
    table: TokenTable, config: RolloutCorrectionConfig, accepted: Bool, global_batch: GlobalBatch
) -> TokenTable:
    """Returns the table with weights before bounds, rejecting criteria per token, and vetoes.

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
        # Criteria ignore tokens without log-probs.
        for name in rejected:
            rejected[name] &= table.valid
        rejected["nonfinite"] = trained & ~table.valid
    explained = np.zeros(table.tokens, np.bool_)
    for mask in rejected.values():
        explained |= mask
    # Off-policy sequence masking or a user-defined function rejected these.
    rejected["other"] = trained & ~accepted & ~explained
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
    """Returns one configuration for each rejection criterion, by the criterion's name.

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
            # repr keeps all digits of a bound.
            threshold = repr(criterion.upper)
            if criterion.lower is not None:
                threshold = f"{criterion.lower!r}_{threshold}"
            options = {"rollout_rs": criterion.name, "rollout_rs_threshold": threshold}
        single[criterion.name] = replace(base, **options)
    if config.rejects_weights:
        single["tis_mask"] = replace(base, use_tis=True, tis_batch_normalize=False)
    if config.rs_second_moment_bound is not None:
        single["second_moment"] = replace(
            base, rs_second_moment_bound=config.rs_second_moment_bound
        )
    if config.vetoes:
        single["veto"] = replace(
            base,
            rs_veto_threshold=config.rs_veto_threshold,
            rs_veto_upper_threshold=config.rs_veto_upper_threshold,
        )
    return single


def _corrected(
    table: TokenTable, config: RolloutCorrectionConfig, global_batch: GlobalBatch
) -> Any:
    """Returns the correction of a table's tokens."""
    advantages = None
    if table.advantage is not None:
        advantages = _tensor(table.advantage)
    return correct(
        config,
        _tensor(table.policy_log_prob),
        _tensor(table.rollout_log_prob),
        _tensor(table.loss_mask),
        lengths=table.response_length.tolist(),
        current_log_probs=_tensor(table.train_log_prob),
        advantages=advantages,
        global_batch=global_batch,
    )


def _tensor(values: Column) -> Tensor:
    """Returns a copy, because arrow's columns are read-only and torch warns about them."""
    return torch.from_numpy(np.array(values))
