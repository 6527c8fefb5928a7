"""The kernels of `triton_token_pass`: log-probs and loss mask in, weights, verdicts and sums out, in one read.

A program works on a tile of rows of a chunk in the layout of `Rows`, read from the packed tokens: blocks of the inputs
are never built. Sums of a row are taken in the working precision (float32, or float64 where the log-probs are), rows
are added into sequences in float64 and in a fixed order, without atomics: the same tokens give the same bits.

Shapes: suffix _RK is [rows, row width] of a tile, _R per row, _K per column, _S per sequence, _N per token of the
chunk, _CR [column, row] of the table of row sums, _PX [program, extreme].
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2_HIGH = tl.constexpr(0.693359375)
"""ln 2 to nine binary digits, so that its products with the exponents of this range are exact in float32."""
LN_2_LOW = tl.constexpr(-2.1219444005469057e-4)
"""ln 2 − `LN_2_HIGH`."""


@triton.jit
def _exponentials(x, DOUBLE: tl.constexpr):
    """exp(x) − 1 and exp(x) of |x| ≤ 20, with the relative accuracy of the dtype however small x is.

    x = n·ln 2 + r with |r| ≤ ln(2)/2; exp(r) − 1 is its Taylor polynomial, 2ⁿ is put together from its bits. The
    hardware's exp loses digits with the size of x, and exp(x) − 1 would lose the digits of a small x.
    """
    TERMS: tl.constexpr = 14 if DOUBLE else 8
    n = tl.floor(x * LOG2_E + 0.5)
    r = (x - n * LN_2_HIGH) - n * LN_2_LOW
    factor = tl.zeros_like(r) + 1.0
    for i in tl.static_range(TERMS - 1):
        factor = 1.0 + factor * r * (1.0 / (TERMS - i))
    if DOUBLE:
        power = ((n.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    else:
        power = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    change = power * (r * factor)
    return change + (power - 1.0), change + power


@triton.jit
def _clamp(x, BOUND: tl.constexpr):
    return tl.minimum(tl.maximum(x, -BOUND), BOUND)


@triton.jit
def _constant(VALUE: tl.constexpr, DTYPE: tl.constexpr):
    """A bound in the working precision, which a Python number takes on in torch as well."""
    return tl.full([], VALUE, DTYPE)


@triton.jit
def _read(train_N, rollout_N, mask_N, owner_R, offset_R, start_S, length_S, first_row, rows, readable,
          WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """A tile: its rows, which of them exist, loss mask, finite tokens, log π_train and Δ; 0 where not finite."""
    row_R = first_row + tl.arange(0, ROWS)
    exists_R = row_R < rows
    column_K = tl.arange(0, COLUMNS)
    owner = tl.load(owner_R + row_R, exists_R, other=0)
    offset = tl.load(offset_R + row_R, exists_R, other=0)
    length = tl.load(length_S + owner, exists_R, other=0)
    # rows begin at multiples of their width: known, it lets a thread load several neighbouring tokens at a time
    begin = tl.multiple_of(tl.load(start_S + owner, exists_R, other=0) + offset, WIDTH)
    position_RK = offset[:, None] + column_K[None, :]
    at_RK = begin[:, None] + column_K[None, :]
    own_RK = exists_R[:, None] & (column_K < WIDTH)[None, :] & (position_RK >= 0) & (position_RK < length[:, None])
    # read where there is memory, also of other sequences: unlike ownership, that limit is aligned
    there_RK = (exists_R & (begin >= 0))[:, None] & (at_RK < readable)
    train = tl.load(train_N + at_RK, there_RK, other=0.0).to(DTYPE)
    rollout = tl.load(rollout_N + at_RK, there_RK, other=0.0).to(DTYPE)
    masked_in_RK = own_RK & (tl.load(mask_N + at_RK, there_RK, other=0) != 0)
    difference = train - rollout
    finite_RK = masked_in_RK & (tl.abs(difference) < 1e6)  # LOG_RATIO_LIMIT; a NaN compares as false
    log_ratio = tl.where(finite_RK, difference, 0.0)
    return row_R, exists_R, column_K, masked_in_RK, finite_RK, tl.where(finite_RK, train, 0.0), log_ratio


@triton.jit
def _judge(
    KINDS: tl.constexpr, STATISTICS: tl.constexpr, LOWERS: tl.constexpr, UPPERS: tl.constexpr, INDEX: tl.constexpr,
    valid_RK, log_ratio, ratio_minus_1, DTYPE: tl.constexpr,
):  # fmt: skip
    """The valid tokens that a criterion accepts, all of them where its verdict is not per token; and what it sums.

    It bounds Δ, k2, or k3 = exp(Δ) − Δ − 1 with Δ ≤ 20: below −20, where the clamped ratio ends, exp(Δ) is 0 in
    comparison. It sums its divergence, or 1 at valid tokens that are out of bounds.
    """
    KIND: tl.constexpr = KINDS[INDEX]
    STATISTIC: tl.constexpr = STATISTICS[INDEX]
    LOWER: tl.constexpr = LOWERS[INDEX]
    UPPER: tl.constexpr = UPPERS[INDEX]
    statistic = log_ratio
    if STATISTIC == "k2":
        statistic = log_ratio * log_ratio * 0.5
    if STATISTIC == "k3":
        statistic = ratio_minus_1 - tl.minimum(log_ratio, 20.0)
    accepted_RK = valid_RK
    summed = statistic
    if KIND != "sum":
        within_RK = valid_RK & (statistic <= _constant(UPPER, DTYPE))
        if LOWER is not None:
            within_RK = within_RK & (statistic >= _constant(LOWER, DTYPE))
        summed = valid_RK.to(DTYPE) - within_RK.to(DTYPE)
        if KIND == "token":
            accepted_RK = within_RK
    return accepted_RK, summed


@triton.jit
def _put(table_CR, column, rows, row_R, exists_R, values_RK):
    """Writes the row sums of one column; returns the next column."""
    tl.store(table_CR + column * rows + row_R, tl.sum(values_RK, 1), exists_R)
    return column + 1


@triton.jit
def token_pass_kernel(
    train_N, rollout_N, mask_N, owner_R, offset_R, start_S, length_S,
    weight_RK, accepted_RK, squares_RK, table_CR, extremes_PX, rows, readable,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr,
    NEUTRAL: tl.constexpr, WEIGHTS: tl.constexpr, MODE: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr,
    ADAPTIVE: tl.constexpr, KINDS: tl.constexpr, STATISTICS: tl.constexpr, LOWERS: tl.constexpr, UPPERS: tl.constexpr,
    VETOES: tl.constexpr, VETO_BELOW: tl.constexpr, VETO_ABOVE: tl.constexpr, TRIMS: tl.constexpr,
    TOUCHES_LOSS: tl.constexpr,
):  # fmt: skip
    """Weights, verdicts and row sums, in the order of `SequenceSums`."""
    program = tl.program_id(0).to(tl.int64)
    row_R, exists_R, column_K, masked_in_RK, finite_RK, train_RK, log_ratio = _read(
        train_N, rollout_N, mask_N, owner_R, offset_R, start_S, length_S, program * ROWS, rows, readable,
        WIDTH, COLUMNS, ROWS, DTYPE,
    )  # fmt: skip
    DOUBLE: tl.constexpr = tl.float64 == DTYPE
    masked_in = masked_in_RK.to(DTYPE)
    finite = finite_RK.to(DTYPE)
    valid_RK = masked_in_RK if NEUTRAL else finite_RK
    valid = valid_RK.to(DTYPE)
    ratio_minus_1, ratio = _exponentials(_clamp(log_ratio, 20.0), DOUBLE)

    CRITERIA: tl.constexpr = 17 if WEIGHTS else 10
    rs_accepted_RK = valid_RK
    for i in tl.static_range(len(KINDS)):
        accepted_RK_i, summed = _judge(KINDS, STATISTICS, LOWERS, UPPERS, i, valid_RK, log_ratio, ratio_minus_1, DTYPE)
        rs_accepted_RK = rs_accepted_RK & accepted_RK_i
        _put(table_CR, CRITERIA + i, rows, row_R, exists_R, summed)
    accepted = rs_accepted_RK
    weight = valid
    if WEIGHTS:
        raw = ratio
        upper = _constant(UPPER, DTYPE)
        lower = _constant(LOWER, DTYPE)
        low_RK = valid_RK & (raw < lower)
        high_RK = valid_RK & (raw > upper)
        weight = tl.minimum(raw, upper)
        if MODE == "clip":
            weight = tl.maximum(weight, lower)
        if MODE == "mask":
            weight = tl.where(low_RK | high_RK, 0.0, raw)
            accepted = rs_accepted_RK & (weight > 0.0)
        weight = tl.where(valid_RK, weight, 0.0)
        before_mode = tl.where(valid_RK, raw, 0.0)
        highest = tl.max(tl.max(before_mode, 1), 0)
        tl.store(extremes_PX + program * 3, tl.min(tl.min(tl.where(valid_RK, raw, float("inf")), 1), 0))
        tl.store(extremes_PX + program * 3 + 1, highest)
        tl.store(extremes_PX + program * 3 + 2, tl.max(tl.max(weight, 1), 0) if MODE == "mask" else highest)

    # float32 is exact for counts of this size; two log-probs of −3e38 make a ratio of 1 and a sum that overflows
    train_R = tl.sum(train_RK, 1)
    train_R = tl.where(train_R == train_R, _clamp(train_R, 1e30), 0.0)
    column = _put(table_CR, 0, rows, row_R, exists_R, masked_in)
    column = _put(table_CR, column, rows, row_R, exists_R, valid)
    column = _put(table_CR, column, rows, row_R, exists_R, masked_in - finite)
    tl.store(table_CR + column * rows + row_R, train_R, exists_R)
    column = _put(table_CR, column + 1, rows, row_R, exists_R, log_ratio)
    column = _put(table_CR, column, rows, row_R, exists_R, tl.abs(log_ratio))
    column = _put(table_CR, column, rows, row_R, exists_R, ratio_minus_1)
    column = _put(table_CR, column, rows, row_R, exists_R, ratio_minus_1 * ratio_minus_1)
    column = _put(table_CR, column, rows, row_R, exists_R, rs_accepted_RK.to(DTYPE))
    if not TOUCHES_LOSS:
        weight = masked_in
        accepted = masked_in_RK
    column = _put(table_CR, column, rows, row_R, exists_R, accepted.to(DTYPE))
    if WEIGHTS:
        minus_1 = weight - valid
        column = _put(table_CR, column, rows, row_R, exists_R, before_mode)
        column = _put(table_CR, column, rows, row_R, exists_R, weight)
        column = _put(table_CR, column, rows, row_R, exists_R, weight * weight)
        column = _put(table_CR, column, rows, row_R, exists_R, minus_1)
        column = _put(table_CR, column, rows, row_R, exists_R, minus_1 * minus_1)
        column = _put(table_CR, column, rows, row_R, exists_R, high_RK.to(DTYPE))
        column = _put(table_CR, column, rows, row_R, exists_R, low_RK.to(DTYPE))
    column = column + len(KINDS)
    if ADAPTIVE:
        clamped = _clamp(log_ratio.to(tl.float64), 1.0)
        exponential, _unused = _exponentials(clamped, True)
        column = _put(table_CR, column, rows, row_R, exists_R, exponential - clamped)
    if VETOES:
        catastrophic = (log_ratio < _constant(VETO_BELOW, DTYPE)) | (log_ratio > _constant(VETO_ABOVE, DTYPE))
        column = _put(table_CR, column, rows, row_R, exists_R, catastrophic.to(DTYPE))

    at_RK = row_R[:, None] * WIDTH + column_K[None, :]
    inside_RK = exists_R[:, None] & (column_K < WIDTH)[None, :]
    tl.store(weight_RK + at_RK, weight, inside_RK)
    tl.store(accepted_RK + at_RK, accepted.to(tl.uint8), inside_RK)
    if TRIMS:
        column = _put(table_CR, column, rows, row_R, exists_R, valid * 0.0)
        tl.store(squares_RK + at_RK, tl.where(valid_RK, log_ratio * log_ratio, float("inf")), inside_RK)


@triton.jit
def table_kernel(
    table_CR, table_SC, start_S, length_S, rows, full_rows, columns,
    WIDTH: tl.constexpr, ALIGNED: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds the rows of one sequence, in order and in float64."""
    sequence = tl.program_id(0).to(tl.int64)
    start = tl.load(start_S + sequence)
    first = (start + WIDTH - 1) // WIDTH
    count = (start + tl.load(length_S + sequence) + WIDTH - 1) // WIDTH - first
    column_C = tl.arange(0, COLUMNS)
    exists_C = column_C < columns
    total_C = tl.zeros([COLUMNS], tl.float64)
    if not ALIGNED:  # a boundary row comes before them
        total_C = tl.load(table_CR + column_C * rows + full_rows + sequence, exists_C, other=0.0).to(tl.float64)
    begin = 0
    while begin < count:  # the interpreter's range() does not take numpy 2.4's arrays
        index = begin + tl.arange(0, BLOCK)
        at_CR = column_C[:, None] * rows + first + index[None, :]
        values = tl.load(table_CR + at_CR, exists_C[:, None] & (index < count)[None, :], other=0.0)
        total_C += tl.sum(values.to(tl.float64), 1)
        begin += BLOCK
    tl.store(table_SC + sequence * columns + column_C, total_C, exists_C)
