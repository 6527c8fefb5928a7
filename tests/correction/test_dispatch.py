"""The number of torch operations does not grow with the batch, and none waits for the device."""

from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slime_tis import RolloutCorrectionConfig, correct
from slime_tis.correction.layout import row_width

SYNCHRONISING = (
    "_local_scalar_dense",
    "item",
    "nonzero",
    "masked_select",
    "is_nonzero",
    "unique",
    "bincount",
)
EVERYTHING = RolloutCorrectionConfig.preset(
    "decoupled_geo_rs_token_tis",
    tis_mode="mask",
    tis_batch_normalize=True,
    rs_veto_threshold=1e-4,
    rs_veto_upper_threshold=100.0,
    rollout_rs="token_k1,token_k3,seq_sum_k2,seq_mean_k3,seq_max_k2",
    rollout_rs_threshold="2.0,0.1,1.0,0.1,1.0",
    rs_second_moment_bound=0.04,
)


ROW_WIDTHS = {
    "no sequence": ([], 16),
    "empty sequences": ([0, 0], 16),
    "one row each": ([100, 100], 100),
    "widest row": ([256], 256),
    "largest divisor": ([600, 600], 200),
    "narrowest divisor": ([64 * 257], 64),
    "only a smaller divisor": ([63 * 257], 128),
    "prime length": ([257, 257], 32),
    "an eighth of the average": ([1024, 1023], 64),
    "widest of mixed lengths": ([1024, 1025], 128),
    "short of mixed lengths": ([127, 128], 16),
}


@pytest.mark.parametrize(("lengths", "width"), ROW_WIDTHS.values(), ids=ROW_WIDTHS)
def test_row_width_follows_lengths(lengths, width):
    assert row_width(lengths) == width


class DispatchCounter(TorchDispatchMode):
    """Counts dispatched operations, and refuses those that hand a value or a data-dependent shape
    to the host."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in SYNCHRONISING:
            raise AssertionError(f"{func} synchronises with the host")
        if name.startswith("index") and any(
            isinstance(i, torch.Tensor) and i.dtype == torch.bool
            for i in torch.utils._pytree.tree_leaves(args[1:])
        ):
            raise AssertionError(f"{func} indexes with a bool tensor")
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted():
    with DispatchCounter() as mode:
        yield mode.counts


def batch(sequences, tokens=4096):
    lengths = [tokens // sequences + (1 if i % 2 else -1) for i in range(sequences)]
    generator = torch.Generator().manual_seed(0)
    rollout = [-torch.rand(n, generator=generator) for n in lengths]
    return [x + 0.01 for x in rollout], rollout, [torch.ones(n, dtype=torch.bool) for n in lengths]


@pytest.mark.parametrize("level", ["token", "sequence", "geometric", "prefix", "segment"])
def test_operations_do_not_depend_on_the_number_of_sequences(level):
    config = RolloutCorrectionConfig.preset(
        "decoupled_token_is", tis_level=level, rs_veto_threshold=1e-4
    )
    totals = []
    for sequences in (2, 16, 512):
        inputs = batch(sequences)
        with counted() as counts:
            correct(config, *inputs)
        totals.append(sum(counts.values()))
    assert totals[0] == totals[1] == totals[2] <= 270


@pytest.mark.parametrize("layout", ["list", "padded", "packed"])
def test_no_host_synchronisation(layout):
    train, rollout, mask = batch(16)
    lengths = None
    if layout != "list":
        lengths = [len(x) for x in train] if layout == "packed" else None
        join = (
            torch.cat
            if layout == "packed"
            else lambda x: torch.nn.utils.rnn.pad_sequence(x, batch_first=True)
        )
        train, rollout, mask = join(train), join(rollout), join(mask)
    with counted() as counts:
        correct(EVERYTHING, train, rollout, mask, lengths=lengths)
    assert sum(counts.values()) <= 390
