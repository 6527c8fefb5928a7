"""The fused token pass against the eager one and the reference, under Triton's interpreter or on a GPU."""

import math
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from slime_tis import RolloutCorrectionConfig, correct
from slime_tis.correction.layout import INPUTS, as_layout
from slime_tis.correction.reference import reference_correct
from slime_tis.correction.sums import named, sequence_columns
from slime_tis.correction.token_pass import torch_token_pass
from tests.correction.strategies import batches, configurations

triton = pytest.importorskip("triton", reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("set TRITON_INTERPRET=1, as make test-kernels does: there is no GPU", allow_module_level=True)

EXAMPLES = 40 if DEVICE == "cpu" else 10
"""Of each property: a GPU's compiler makes new kernels for every configuration, seconds each."""

from experimental import triton_token_pass  # noqa: E402
from experimental.triton_token_pass import token_pass  # noqa: E402
from tests.kernels.compiled import CONFIGS  # noqa: E402

EVERYTHING = CONFIGS["everything"]


@pytest.fixture(autouse=True, scope="module")
def small_tiles():
    """Few rows at a time, so that short sequences have several tiles, and the interpreter little to do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_token_pass, "TILE_TOKENS", 32)
        patch.setattr(triton_token_pass, "TILE_ROWS", 4)
        yield


def random_tokens(tokens, dtype=torch.float32):
    """Log-probs of two policies with some that are not finite, and a mask in spans."""
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(tokens, generator=generator)
    train = rollout + 0.3 * torch.randn(tokens, generator=generator)
    train[7::31], rollout[11::53] = math.nan, -math.inf
    mask = (torch.rand(-(-tokens // 3), generator=generator) > 0.2).repeat_interleave(3)[:tokens]
    return [train.to(DEVICE, dtype), rollout.to(DEVICE, dtype), mask.to(DEVICE)]


ACROSS_ROWS = ("prefix", "segment")
SUPPORTED = configurations().filter(
    lambda config: (
        "seq_mean_error" not in (config.rollout_rs or "")
        and not (config.use_tis and config.tis_level in ACROSS_ROWS)
        and not (config.use_rs and config.rs_level in ACROSS_ROWS)
    )
)
"""The kernel refuses divergence masks, the error criterion, and levels whose rows need sums of other rows."""


def layout_of(*tensors, lengths):
    return as_layout(dict(zip(INPUTS, tensors, strict=False)), lengths)


def packed(batch, dtype=torch.float32):
    dtypes = (dtype, dtype, torch.bool)
    tensors = [
        torch.tensor([y for x in xs for y in x], dtype=d, device=DEVICE) for xs, d in zip(batch, dtypes, strict=True)
    ]
    return layout_of(*tensors, lengths=[len(x) for x in batch[0]])


def assert_same(config, layout, *, rtol=5e-6, but=()):
    """Equal verdicts, and weights, sums and extremes that are equal but for rounding."""
    for chunk in layout.chunks():
        eager, fused = torch_token_pass(config, chunk), token_pass(config, chunk)
        close = {"rtol": rtol, "atol": rtol, "check_dtype": True}
        assert torch.equal(fused.accepted_RK, eager.accepted_RK)
        assert torch.equal(fused.sequence_R, eager.sequence_R)
        torch.testing.assert_close(fused.weight_RK, eager.weight_RK, **close)
        if eager.squares_RK is None:
            assert fused.squares_RK is None
        else:
            torch.testing.assert_close(fused.squares_RK, eager.squares_RK, **close)
        tables = [named(sequence_columns(config), part.table_S.unbind(1)) for part in (eager, fused)]
        names = [column.name for column in fields(tables[0]) if column.name not in but]
        torch.testing.assert_close(*[plain([getattr(table, name) for name in names]) for table in tables], **close)
        assert (fused.extremes is None) == (eager.extremes is None)
        if eager.extremes is not None:
            torch.testing.assert_close(fused.extremes, eager.extremes, **close)


def plain(node):
    """Dataclasses as dictionaries, for `assert_close`; None as 0."""
    if isinstance(node, list):
        return [plain(x) for x in node]
    if isinstance(node, dict):
        return {name: plain(x) for name, x in node.items()}
    return torch.zeros(()) if node is None else node if isinstance(node, torch.Tensor) else plain(vars(node))


@pytest.mark.parametrize("wild", [False, True], ids=["finite", "non-finite"])
def test_batches(wild):
    @settings(max_examples=EXAMPLES)
    @given(SUPPORTED, batches(wild=wild))
    def check(config, batch):
        # rows of log-probs of ±3e38 overflow in the order in which they are added
        assert_same(config, packed(batch), but=("train",) if wild else ())

    check()


@settings(max_examples=EXAMPLES // 2)
@given(SUPPORTED, batches(wild=True))
def test_correct_agrees_with_the_reference(config, batch):
    width = max((len(x) for x in batch[0]), default=0) + 1
    fill = (math.nan, math.nan, False)
    tensors = [
        torch.tensor([[*x, *[f] * (width - len(x))] for x in xs], dtype=d, device=DEVICE).view(len(xs), width)
        for xs, f, d in zip(batch, fill, (torch.float64, torch.float64, torch.bool), strict=True)
    ]
    reference = reference_correct(config, *tensors)
    found = correct(config, *tensors, token_pass=token_pass)
    torch.testing.assert_close(found.weights.double(), reference.weights, rtol=2e-6, atol=1e-7)
    assert torch.equal(found.mask, reference.mask)


PACKED = {
    "many rows": ([5, 0, 1, 131, 78], (215,)),
    "empty sequences": ([0, 100, 20, 0], (120,)),
    "padded, one token": (None, (2, 1)),
    "padded, one row": (None, (2, 20)),
    "padded, two rows of 129": (None, (2, 258)),
}


@pytest.mark.parametrize(("lengths", "shape"), PACKED.values(), ids=list(PACKED))
def test_everything_at_once(lengths, shape):
    assert_same(EVERYTHING, layout_of(*[x.view(shape) for x in random_tokens(math.prod(shape))], lengths=lengths))


@pytest.mark.parametrize(
    "options", [{"use_tis": True, "tis_level": "prefix"}, {"use_rs": True, "rs_level": "segment"}], ids=str
)
def test_levels_whose_rows_need_other_rows_are_refused(options):
    (chunk,) = layout_of(*random_tokens(20), lengths=[20]).chunks()
    with pytest.raises(ValueError, match="does not support"):
        token_pass(RolloutCorrectionConfig(**options), chunk)


@pytest.mark.parametrize(
    ("train", "rollout", "mask"),
    [
        (torch.bfloat16, torch.bfloat16, torch.bool),
        (torch.float16, torch.float32, torch.int64),
        (torch.float64, torch.float32, torch.uint8),
        (torch.float32, torch.bfloat16, torch.float16),
        (torch.float32, torch.float32, torch.float64),
    ],
    ids=str,
)
def test_dtypes(train, rollout, mask):
    config = RolloutCorrectionConfig(use_tis=True, rollout_rs="seq_sum_k3", rollout_rs_threshold="0.1")
    values = random_tokens(40)
    # one ulp of the working precision where both passes have it in full, and nothing less exact in float64
    rtol = 1e-12 if train == torch.float64 else 5e-6
    layout = layout_of(values[0].to(train), values[1].to(rollout), values[2].to(mask), lengths=[33, 7])
    assert_same(config, layout, rtol=rtol)


def test_small_log_ratios_keep_their_digits():
    config = RolloutCorrectionConfig(use_tis=True)
    train = torch.tensor([1e-7, 3e-5, -2e-3, 0.3465, 0.3467, 5.0, 19.9, -40.0], device=DEVICE)
    layout = layout_of(train, torch.zeros_like(train), torch.ones_like(train), lengths=[1] * 8)
    (chunk,) = layout.chunks()
    sums = named(sequence_columns(config), token_pass(config, chunk).table_S.unbind(1))
    exact = train.double().clamp(-20, 20).expm1()
    torch.testing.assert_close(sums.ratio_minus_1, exact, rtol=3e-7, atol=0.0)


def test_non_contiguous_tokens_and_lists():
    config = RolloutCorrectionConfig(use_tis=True, rs_veto_threshold=0.5)
    tokens = [torch.stack([x, x], 1).view(-1)[::2] for x in random_tokens(41)]
    assert_same(config, layout_of(*tokens, lengths=[40, 1]))
    lists = [list(x.split([3, 0, 37, 1])) for x in random_tokens(41)]
    lists[1][2] = None
    assert_same(config, layout_of(*lists, lengths=None))


def test_empty_batches():
    none = torch.zeros(0, device=DEVICE)
    found = correct(EVERYTHING, none, none, none, lengths=[0, 0], token_pass=token_pass)
    assert found.mask.shape == (0,) and found.accepted_per_sequence.tolist() == [0, 0]
    padded = correct(EVERYTHING, *[none.view(0, 4)] * 3, token_pass=token_pass)
    assert padded.weights.shape == (0, 4)


def test_tokens_that_are_not_finite_are_named():
    config = RolloutCorrectionConfig(use_tis=True, nonfinite_policy="raise")
    tokens = [torch.zeros(20, device=DEVICE), torch.zeros(20, device=DEVICE), torch.ones(20, device=DEVICE)]
    (chunk,) = layout_of(*tokens, lengths=[3, 17]).chunks()
    token_pass(config, chunk)
    tokens[0][5] = math.nan
    (chunk,) = layout_of(*tokens, lengths=[3, 17]).chunks()
    with pytest.raises(ValueError, match="sequence 1, position 2: train log-prob nan"):
        token_pass(config, chunk)


def test_a_cpu_needs_the_interpreter():
    script = "from experimental.triton_token_pass import *; import slime_tis, torch; x = torch.zeros(1, 1)\n"
    script += "slime_tis.correct(RolloutCorrectionConfig(), x, x, x, token_pass=token_pass)"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "TRITON_INTERPRET=1" in done.stderr


def test_the_same_tokens_give_the_same_bits():
    layout = layout_of(*random_tokens(90), lengths=[50, 40])
    first, second = ([token_pass(EVERYTHING, chunk).table_S for chunk in layout.chunks()] for _ in range(2))
    assert torch.equal(torch.cat(first), torch.cat(second))


@pytest.mark.skipif(DEVICE == "cpu", reason="there is no GPU to synchronise with")
def test_no_host_synchronisation():
    (chunk,) = layout_of(*random_tokens(90), lengths=[50, 40]).chunks()
    token_pass(EVERYTHING, chunk)
    torch.cuda.set_sync_debug_mode("error")
    try:
        token_pass(EVERYTHING, chunk)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_kernels_compile_for_a_gpu_without_spilling(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    script = Path(__file__).with_name("compiled.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split() for line in done.stdout.splitlines() if not line.startswith("#")]
    assert len(rows) == 6
    assert all(int(registers) <= 255 and int(spilled) == 0 for _, registers, spilled, _ in rows)
