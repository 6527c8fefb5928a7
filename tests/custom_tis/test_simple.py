"""Vanilla TIS, IcePop and the template, on one rank and with context parallelism."""

import pickle
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from slime_tis import context_parallel_slices
from slime_tis.integrations.slime import TisResult
from slime_tis.user_functions import call_custom_tis, load_function
from tests.runs import free_port, spawn

TRAIN = [torch.tensor([0.1, 1.0, -1.0, 0.0]), torch.tensor([0.3])]
ROLLOUT = [torch.zeros(4), torch.zeros(1)]
MASKS = [torch.tensor([1, 1, 1, 0]), torch.tensor([1])]
RATIO = torch.cat([TRAIN[0], TRAIN[1]]).exp()
FOLDER = Path(__file__).parents[2] / "custom_tis"


def call(path: str, **args: float) -> TisResult:
    return call_custom_tis(
        load_function(path),
        Namespace(**args),
        pg_loss=torch.full((5,), 2.0, requires_grad=True),
        train_log_probs=TRAIN,
        rollout_log_probs=ROLLOUT,
        loss_masks=MASKS,
        total_lengths=[6, 4],
        response_lengths=[4, 1],
    )


def lists(tensors: list[torch.Tensor]) -> list[list[float]]:
    return [tensor.tolist() for tensor in tensors]


@pytest.fixture(params=["custom_tis.{}.{}", f"{FOLDER}/{{}}.py:{{}}"], ids=["module", "file"])
def form(request: pytest.FixtureRequest) -> str:
    """A form of the path to a function."""
    return request.param


@pytest.fixture
def vanilla(form: str) -> TisResult:
    return call(form.format("tis", "vanilla_tis"), tis_clip=2.0, tis_clip_low=0.5)


@pytest.fixture
def icepop(form: str) -> TisResult:
    return call(form.format("icepop", "icepop"), tis_clip=2.0, tis_clip_low=0.5)


def test_vanilla_tis_clips_weights(vanilla: TisResult) -> None:
    pg_loss, _, _ = vanilla
    assert pg_loss.tolist() == pytest.approx([2 * 1.105171, 4.0, 1.0, 0.0, 2 * 1.349859])


def test_vanilla_tis_keeps_masks(vanilla: TisResult) -> None:
    _, masks, _ = vanilla
    assert lists(masks) == lists(MASKS)


def test_vanilla_tis_has_slimes_metrics(vanilla: TisResult) -> None:
    _, _, metrics = vanilla
    assert metrics["tis"].tolist()[:3] == pytest.approx(RATIO.tolist()[:3])
    assert metrics["tis_clipfrac"].tolist()[:3] == [0, 1, 1]
    assert metrics["tis_abs"].tolist()[:2] == pytest.approx([0.105171, 1.718282], abs=1e-6)


def test_vanilla_tis_has_default_bounds(form: str) -> None:
    pg_loss, _, _ = call(form.format("tis", "vanilla_tis"))
    assert pg_loss.tolist()[1] == 4.0


def test_icepop_drops_ratios_out_of_bounds(icepop: TisResult) -> None:
    pg_loss, _, _ = icepop
    assert pg_loss.tolist() == pytest.approx([2 * 1.105171, 0.0, 0.0, 0.0, 2 * 1.349859])


def test_icepop_keeps_masks(icepop: TisResult) -> None:
    _, masks, _ = icepop
    assert lists(masks) == lists(MASKS)


def test_icepop_counts_dropped_tokens(icepop: TisResult) -> None:
    _, _, metrics = icepop
    assert metrics["tis_clipfrac"].tolist()[:3] == [0, 1, 1]


def test_template_has_soft_weights(form: str) -> None:
    pg_loss, _, metrics = call(form.format("template", "soft_tis"))
    assert pg_loss.tolist() == pytest.approx((4 * torch.tanh(RATIO / 2)).tolist())
    assert set(metrics) == {"soft_tis_ratio", "soft_tis_weight"}


SHAPES = [(3, 20), (1, 5), (9, 2)]
"""Tokens of prompt and response."""

MIS = "custom_tis.mis.compute_mis_weights_with_cp"
CASES = {
    "sequence": (MIS, "sequence", "token"),
    "prefix": (MIS, "prefix", "segment"),
    "segment": (MIS, "segment", "prefix"),
    "vanilla": ("custom_tis.tis.vanilla_tis", "sequence", "token"),
}
"""Function, level of the weights, level of the rejection."""


def call_on_rank(rank: int, size: int, group: dist.ProcessGroup | None) -> dict[str, TisResult]:
    """Results on one rank's slices, by the name in `CASES`."""
    generator = torch.Generator().manual_seed(0)
    rollout = [-torch.rand(n, generator=generator) for _, n in SHAPES]
    train = [r + 0.5 * torch.randn(len(r), generator=generator) for r in rollout]
    train[0][3] = torch.nan
    masks = [(torch.rand(n, generator=generator) > 0.2).long() for _, n in SHAPES]
    results = {}
    for name, (path, tis_level, rs_level) in CASES.items():
        args = Namespace(
            use_tis=True,
            tis_level=tis_level,
            tis_batch_normalize=True,
            use_rs=True,
            rs_level=rs_level,
            rs_veto_threshold=0.1,
        )
        local_train = rank_slices(train, rank, size)
        results[name] = call_custom_tis(
            load_function(path),
            args,
            pg_loss=torch.ones(sum(map(len, local_train))),
            train_log_probs=local_train,
            rollout_log_probs=rank_slices(rollout, rank, size),
            loss_masks=masks,
            total_lengths=[prompt + response for prompt, response in SHAPES],
            response_lengths=[response for _, response in SHAPES],
            cp_group=group,
        )
    return results


def rank_slices(responses: Sequence[torch.Tensor], rank: int, size: int) -> list[torch.Tensor]:
    slices = []
    for (prompt, length), response in zip(SHAPES, responses, strict=True):
        first, second = context_parallel_slices(prompt + length, length, rank, size)
        slices.append(torch.cat([response[first], response[second]]))
    return slices


def run_rank(rank: int, size: int, port: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size
    )
    results = call_on_rank(rank, size, dist.group.WORLD)
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(results))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, TisResult]]:
    folder = tmp_path_factory.mktemp("ranks")
    spawn(run_rank, args=(2, free_port(), str(folder)), nprocs=2)
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(2)]


@pytest.fixture(scope="module")
def one_rank() -> dict[str, TisResult]:
    return call_on_rank(0, 1, None)


def rank_values(flat: torch.Tensor, rank: int) -> torch.Tensor:
    """One rank's values of flat values of all tokens."""
    responses = flat.split([response for _, response in SHAPES])
    return torch.cat(rank_slices(responses, rank, 2))


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_have_complete_masks(
    two_ranks: list[dict[str, TisResult]], one_rank: dict[str, TisResult], case: str, rank: int
) -> None:
    _, masks, _ = two_ranks[rank][case]
    _, expected, _ = one_rank[case]
    assert lists(masks) == lists(expected)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_have_their_slices_of_the_loss(
    two_ranks: list[dict[str, TisResult]], one_rank: dict[str, TisResult], case: str, rank: int
) -> None:
    loss, _, _ = two_ranks[rank][case]
    expected = rank_values(one_rank[case][0], rank)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_have_their_slices_of_the_metrics(
    two_ranks: list[dict[str, TisResult]], one_rank: dict[str, TisResult], case: str, rank: int
) -> None:
    _, _, metrics = two_ranks[rank][case]
    _, _, one_rank_metrics = one_rank[case]
    expected = {name: rank_values(one_rank_metrics[name], rank) for name in metrics}
    torch.testing.assert_close(metrics, expected, rtol=1e-5, atol=1e-6)
