"""The token pass as fused Triton kernels: the result of `torch_token_pass` from one read of the packed tokens.

Select it with `correct(..., token_pass=token_pass)`, or `--token-pass-path experimental.triton_token_pass.token_pass`.
On a CPU it needs Triton's interpreter (TRITON_INTERPRET=1).

A token costs 14 bytes of memory traffic with float32 log-probs: 4 + 4 + 1 are read, 4 + 1 written. Boundary rows add an
eighth at most, the table of row sums half a byte to a byte per token. Nothing synchronises with the host but the
"raise" policy. The levels prefix and segment, divergence masks and bounds by the sign of the advantage are refused.
"""

import math
from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from experimental.triton_kernels import table_kernel, token_pass_kernel
from slime_tis.correction.config import RolloutCorrectionConfig
from slime_tis.correction.layout import PackedChunk
from slime_tis.correction.modes import Criterion
from slime_tis.correction.ratio import in_float32, log_ratios
from slime_tis.correction.sums import named, number_of_columns, sequence_columns
from slime_tis.correction.token_pass import TokenPass

TILE_TOKENS = 1024
"""Tokens of a program: eight per thread of its four warps, whose dozen temporaries then fit its registers."""
TILE_ROWS = 64
"""Rows that a sequence's program reads at a time."""
KERNEL_MODES = {"truncate": "truncate", "clip": "clip", "mask": "mask"}
"""Modes that the kernel implements."""
MASK_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64)
"""Masks that the kernels read as they are, besides bool; others are compared with 0 first."""


def token_pass(config: RolloutCorrectionConfig, packed: PackedChunk) -> TokenPass:
    """Weights, verdicts and row sums of one chunk, equal to `torch_token_pass` except for rounding; deterministic.

    Raises:
        ValueError: if a token is not finite under the "raise" policy; on a CPU without Triton's interpreter.
    """
    rows, device = packed.rows, packed.train_N.device
    if device.type == "cpu" and isinstance(token_pass_kernel, triton.JITFunction):
        raise ValueError(
            "the Triton token pass runs on a GPU; set TRITON_INTERPRET=1 before the import to run it on a CPU."
        )
    across_rows = ("prefix", "segment")
    unsupported = [
        criterion.name
        for criterion in config.rejections
        if criterion.divergence not in ("k1", "k2", "k3") or criterion.aggregation in across_rows
    ]
    unsupported += [f"--tis-level {config.tis_level}"] * (config.use_tis and config.tis_level in across_rows)
    unsupported += ["--tis-upper-bound-negative or --tis-lower-bound-negative"] * config.signs_bounds
    if unsupported:
        raise ValueError(f"the Triton token pass does not support {', '.join(unsupported)}; remove --token-pass-path.")
    row_count, sequences = rows.owner_R.numel(), rows.end_S.numel()
    columns = sequence_columns(config)
    column_count = number_of_columns(columns)
    options, width = _options(config), triton.next_power_of_2(rows.width)
    tile_rows = max(TILE_TOKENS // width, 1)
    programs = triton.cdiv(row_count, tile_rows)
    working = packed.working_dtype
    tokens = _tokens(packed)
    # k3 of the adaptive bounds is summed in float64: float32 would keep three digits of it
    table_CR = torch.empty(column_count, row_count, dtype=torch.float64 if config.adaptive else working, device=device)
    table_S = torch.empty(sequences, column_count, dtype=torch.float64, device=device)
    weight_RK = torch.empty(row_count, rows.width, dtype=working, device=device)
    accepted_RK = torch.empty(row_count, rows.width, dtype=torch.bool, device=device)
    squares_RK = torch.empty_like(weight_RK) if options["TRIMS"] else None
    extremes_PX = torch.empty(programs, 3, dtype=working, device=device)
    outputs = (weight_RK, accepted_RK.view(torch.uint8), squares_RK, table_CR, extremes_PX)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        token_pass_kernel[(programs,)](
            *tokens,
            *outputs,
            row_count,
            tokens[0].numel(),
            WIDTH=rows.width,
            COLUMNS=width,
            ROWS=tile_rows,
            DTYPE=tl.float64 if working == torch.float64 else tl.float32,
            **options,
        )
        table_kernel[(sequences,)](
            table_CR,
            table_S,
            rows.start_S,
            rows.length_S,
            row_count,
            rows.full_rows,
            column_count,
            COLUMNS=triton.next_power_of_2(column_count),
            BLOCK=TILE_ROWS,
            WIDTH=rows.width,
            ALIGNED=rows.aligned,
        )
    if config.nonfinite_policy == "raise" and bool((named(columns, table_S.unbind(1)).nonfinite > 0).any()):
        log_ratios(packed.blocks(), "raise")  # names the token
    extremes = torch.stack([extremes_PX[:, 0].amin(), *extremes_PX[:, 1:].amax(0)])
    return TokenPass(
        weight_RK=weight_RK,
        accepted_RK=accepted_RK,
        sequence_R=rows.owner_R,
        squares_RK=squares_RK,
        table_S=table_S,
        extremes=extremes if config.has_token_weights else None,
    )


def _tokens(packed: PackedChunk) -> tuple[Tensor, ...]:
    """What the kernels read: contiguous tokens in a dtype that they know, and where rows and sequences lie."""
    mask = packed.mask_N
    if mask.dtype not in MASK_DTYPES:
        mask = (mask if mask.dtype == torch.bool else mask.ne(0)).contiguous().view(torch.uint8)
    log_probs = (packed.train_N.contiguous(), packed.rollout_N.contiguous())
    rows = packed.rows
    return (*log_probs, mask.contiguous(), rows.owner_R, rows.offset_R, rows.start_S, rows.length_S)


def _options(config: RolloutCorrectionConfig) -> dict[str, Any]:
    """The configuration as the compile-time constants of `token_pass_kernel`."""
    criteria = [_criterion(x) for x in config.rejections if x.per_token or x.divergence != "k1"]
    lower, upper = config.is_bounds
    below, above = config.rs_veto_threshold, config.rs_veto_upper_threshold
    return {
        "NEUTRAL": config.nonfinite_policy == "neutral",
        "WEIGHTS": config.has_token_weights,
        "MODE": KERNEL_MODES[config.tis_mode],
        "LOWER": in_float32(lower),
        "UPPER": in_float32(upper),
        "KINDS": tuple(criterion[0] for criterion in criteria),
        "STATISTICS": tuple(criterion[1] for criterion in criteria),
        "LOWERS": tuple(criterion[2] for criterion in criteria),
        "UPPERS": tuple(criterion[3] for criterion in criteria),
        "ADAPTIVE": config.adaptive,
        "VETOES": config.vetoes,
        "VETO_BELOW": -math.inf if below is None else math.log(below),
        "VETO_ABOVE": math.inf if above is None else math.log(above),
        "TRIMS": config.rs_second_moment_bound is not None,
        "TOUCHES_LOSS": config.touches_loss,
    }


def _criterion(criterion: Criterion) -> tuple[str, str, float | None, float]:
    """What of a token is judged or summed ("token", "max", "sum"), the statistic, and its bounds as it has them."""
    if criterion.sums_divergence:
        return "sum", criterion.divergence, None, 0.0
    if criterion.lower is None:
        return "token" if criterion.per_token else "max", criterion.divergence, None, in_float32(criterion.upper)
    log_lower, log_upper = criterion.log_bounds
    return "token", criterion.aggregation, log_lower if criterion.lower else None, log_upper
