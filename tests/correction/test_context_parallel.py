"""Context-parallel slices, data-parallel ranks and empty ranks give what one rank gives (gloo, 2 and 4 processes)."""

import pickle
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from slime_tis import RolloutCorrectionConfig, context_parallel_slices, correct, figures

CONFIGS = [
    RolloutCorrectionConfig(
        use_tis=True,
        tis_level=level,
        tis_mode=mode,
        tis_batch_normalize=True,
        use_rs=True,
        rs_level=rs_level,
        rs_lower_bound=0.7,
        rs_upper_bound=1.5,
        rs_veto_threshold=0.05,
        rollout_rs="token_k3,seq_mean_k2,seq_max_k3",
        rollout_rs_threshold="0.4,0.2,1.5",
    )
    for level, mode, rs_level in [
        ("token", "truncate", "geometric"),
        ("sequence", "clip", "token"),
        ("geometric", "mask", "sequence"),
        ("token", "mask", "token"),
    ]
]
# (prompt, response): longer than a row, shorter than the group, a single token.
SHAPES = [(5, 300), (1, 9), (40, 3), (2, 1), (7, 64), (1, 2)]


def batch() -> tuple[list, list, list]:
    generator = torch.Generator().manual_seed(3)
    rollout = [-torch.rand(response, generator=generator) for _, response in SHAPES]
    train = [r + 0.3 * torch.randn(len(r), generator=generator) for r in rollout]
    mask = [torch.rand(len(r), generator=generator) > 0.2 for r in rollout]
    train[0][17] = torch.nan
    return train, rollout, mask


def take(whole: torch.Tensor, shape: tuple[int, int], rank: int, size: int) -> torch.Tensor:
    prompt, response = shape
    first, second = context_parallel_slices(prompt + response, response, rank, size)
    return torch.cat([whole[first], whole[second]])


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    out = tensor.clone()
    dist.all_reduce(out)
    return out


def _min(tensor: torch.Tensor) -> torch.Tensor:
    out = tensor.clone()
    dist.all_reduce(out, op=dist.ReduceOp.MIN)
    return out


def _max(tensor: torch.Tensor) -> torch.Tensor:
    out = tensor.clone()
    dist.all_reduce(out, op=dist.ReduceOp.MAX)
    return out


def _sliced(rank: int, size: int) -> list[Any]:
    """Every rank holds its zigzag slices of all sequences."""
    local = [[take(x, shape, rank, size) for x, shape in zip(xs, SHAPES, strict=True)] for xs in batch()]
    results = []
    for config in CONFIGS:
        calls: list[torch.Size] = []

        def reduce_once(table: torch.Tensor, calls: list[torch.Size] = calls) -> torch.Tensor:
            calls.append(table.shape)
            return _sum(table)

        found = correct(config, *local, reduce_sequences=reduce_once)
        assert len(calls) == 1 and calls[0][0] == len(SHAPES)
        statistics = found.statistics.reduce(lambda x: x, _min, _max)
        results.append((found.weights, found.mask, found.kept_per_sequence, figures(config, statistics)))
    return results


def _sharded(rank: int, size: int) -> list[Any]:
    """Sequences are dealt out over data-parallel ranks; the last rank has none."""
    local = [xs[rank :: size - 1] if rank < size - 1 else [] for xs in batch()]
    results = []
    for config in CONFIGS:
        found = correct(config, *local, reduce_batch=_sum)
        statistics = found.statistics.reduce(_sum, _min, _max)
        results.append((found.weights, found.mask, figures(config, statistics)))
    return results


def _rank(rank: int, size: int, port: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    found = {"sliced": _sliced(rank, size), "sharded": _sharded(rank, size)}
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of 2 and of 4 processes found."""
    size, folder = request.param, tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_rank, args=(size, port, str(folder)), nprocs=size)
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(size)]


def test_context_parallel_ranks_agree_with_one(ranks: list[dict[str, Any]]) -> None:
    size = len(ranks)
    for c, config in enumerate(CONFIGS):
        whole = correct(config, *batch())
        for rank in range(size):
            weights, mask, kept, values = ranks[rank]["sliced"][c]
            for i, shape in enumerate(SHAPES):
                expected = take(whole.weights[i], shape, rank, size)
                torch.testing.assert_close(weights[i], expected, rtol=1e-6, atol=1e-6)
                assert mask[i].tolist() == take(whole.mask[i], shape, rank, size).tolist()
            assert kept.tolist() == whole.kept_per_sequence.tolist()
            assert values == pytest.approx(figures(config, whole.statistics), rel=1e-6, abs=1e-6)


def test_data_parallel_ranks_agree_with_one(ranks: list[dict[str, Any]]) -> None:
    size = len(ranks)
    for c, config in enumerate(CONFIGS):
        whole = correct(config, *batch())
        for rank in range(size - 1):
            weights, mask, values = ranks[rank]["sharded"][c]
            for x, y in zip(weights, whole.weights[rank :: size - 1], strict=True):
                torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)
            assert [x.tolist() for x in mask] == [x.tolist() for x in whole.mask[rank :: size - 1]]
            assert values == pytest.approx(figures(config, whole.statistics), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(("total", "response"), [(10, 7), (3, 2), (16, 16), (1, 1), (33, 1), (9, 0)])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_slices_cover_the_response_once(total: int, response: int, size: int) -> None:
    owned = []
    for rank in range(size):
        for part in context_parallel_slices(total, response, rank, size):
            owned += range(response)[part]
    # The first token of a sequence without a prompt has no logits that predict it.
    expected = range(1, response) if total == response and size > 1 else range(response)
    assert sorted(owned) == list(expected)


def test_slices_of_a_worked_example() -> None:
    """10 tokens, prompt 3, two ranks: chunks of 3 positions; rank 0 has positions 0-2 and 9, rank 1 has 3-8."""
    assert context_parallel_slices(10, 7, 0, 2) == (slice(0, 1), slice(0, 0))
    assert context_parallel_slices(10, 7, 1, 2) == (slice(1, 4), slice(4, 7))
    assert context_parallel_slices(10, 7, 0, 2, padded_length=16) == (slice(0, 2), slice(0, 0))


@pytest.mark.parametrize("level", ["prefix", "segment"])
def test_levels_that_need_whole_sequences_say_so(level: str) -> None:
    config = RolloutCorrectionConfig(use_tis=True, tis_level=level)
    with pytest.raises(ValueError, match=f"--tis-level {level} needs whole sequences"):
        correct(config, [], [], [], reduce_sequences=lambda x: x)
