"""Vanilla TIS, IcePop and the template: numbers, slime's metric names, both path forms, context parallelism."""

import pickle
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from slime_tis import context_parallel_slices
from slime_tis.user_functions import call_custom_tis, load_function
from tests.runs import free_port, spawn

TRAIN = [torch.tensor([0.1, 1.0, -1.0, 0.0]), torch.tensor([0.3])]
ROLLOUT = [torch.zeros(4), torch.zeros(1)]
MASKS = [torch.tensor([1, 1, 1, 0]), torch.tensor([1])]
RATIO = torch.cat([TRAIN[0], TRAIN[1]]).exp()
FOLDER = Path(__file__).parents[2] / "custom_tis"


def call(path, **args):
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


@pytest.mark.parametrize(
    "form", ["custom_tis.{}.{}", f"{FOLDER}/{{}}.py:{{}}"], ids=["module", "file"]
)
def test_losses_masks_and_metrics(form):
    pg_loss, masks, metrics = call(
        form.format("tis", "vanilla_tis"), tis_clip=2.0, tis_clip_low=0.5
    )
    assert pg_loss.tolist() == pytest.approx([2 * 1.105171, 4.0, 1.0, 0.0, 2 * 1.349859])
    assert [m.tolist() for m in masks] == [m.tolist() for m in MASKS]
    assert metrics["tis"].tolist()[:3] == pytest.approx(RATIO.tolist()[:3])
    assert metrics["tis_clipfrac"].tolist()[:3] == [0, 1, 1]
    assert metrics["tis_abs"].tolist()[:2] == pytest.approx([0.105171, 1.718282], abs=1e-6)
    assert call(form.format("tis", "vanilla_tis"))[0].tolist()[1] == 4.0  # bounds that are missing
    pg_loss, masks, metrics = call(form.format("icepop", "icepop"), tis_clip=2.0, tis_clip_low=0.5)
    assert pg_loss.tolist() == pytest.approx([2 * 1.105171, 0.0, 0.0, 0.0, 2 * 1.349859])
    assert [m.tolist() for m in masks] == [m.tolist() for m in MASKS]
    assert metrics["tis_clipfrac"].tolist()[:3] == [0, 1, 1]
    pg_loss, _, metrics = call(form.format("template", "soft_tis"))
    assert pg_loss.tolist() == pytest.approx((4 * torch.tanh(RATIO / 2)).tolist())
    assert set(metrics) == {"soft_tis_ratio", "soft_tis_weight"}


SHAPES = [(3, 20), (1, 5), (9, 2)]


def whole():
    generator = torch.Generator().manual_seed(0)
    rollout = [-torch.rand(n, generator=generator) for _, n in SHAPES]
    train = [r + 0.5 * torch.randn(len(r), generator=generator) for r in rollout]
    train[0][3] = torch.nan
    return train, rollout, [(torch.rand(n, generator=generator) > 0.2).long() for _, n in SHAPES]


def _rank(rank, size, port, folder):
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size
    )
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(both(rank, size, dist.group.WORLD)))
    dist.destroy_process_group()


def both(rank, size, group):
    train, rollout, masks = whole()
    parts = [context_parallel_slices(p + n, n, rank, size) for p, n in SHAPES]
    local = [
        [torch.cat([x[a], x[b]]) for x, (a, b) in zip(xs, parts, strict=True)]
        for xs in (train, rollout)
    ]
    mis = "custom_tis.mis.compute_mis_weights_with_cp"
    results = []
    for path, tis_level, rs_level in (
        (mis, "sequence", "token"),
        (mis, "prefix", "segment"),
        (mis, "segment", "prefix"),
        ("custom_tis.tis.vanilla_tis", "sequence", "token"),
    ):
        results.append(
            call_custom_tis(
                load_function(path),
                Namespace(
                    use_tis=True,
                    tis_level=tis_level,
                    tis_batch_normalize=True,
                    use_rs=True,
                    rs_level=rs_level,
                    rs_veto_threshold=0.1,
                ),
                pg_loss=torch.ones(sum(map(len, local[0]))),
                train_log_probs=local[0],
                rollout_log_probs=local[1],
                loss_masks=masks,
                total_lengths=[p + n for p, n in SHAPES],
                response_lengths=[n for _, n in SHAPES],
                cp_group=group,
            )
        )
    return results


def test_context_parallel(tmp_path):
    """Two ranks: losses and metrics are the slices of one rank's, masks are whole and the same on both."""
    spawn(_rank, args=(2, free_port(), str(tmp_path)), nprocs=2)
    alone = both(0, 1, None)
    for rank in range(2):
        found = pickle.loads((tmp_path / f"{rank}.pickle").read_bytes())
        for (loss, masks, metrics), (one_loss, one_masks, one_metrics) in zip(
            found, alone, strict=True
        ):
            assert [m.tolist() for m in masks] == [m.tolist() for m in one_masks]
            torch.testing.assert_close(loss, sliced(one_loss, rank), rtol=1e-5, atol=1e-6)
            for name, values in metrics.items():
                torch.testing.assert_close(
                    values, sliced(one_metrics[name], rank), rtol=1e-5, atol=1e-6, msg=name
                )


def sliced(flat, rank):
    pieces = flat.split([n for _, n in SHAPES])
    parts = [context_parallel_slices(p + n, n, rank, 2) for p, n in SHAPES]
    return torch.cat([torch.cat([x[a], x[b]]) for x, (a, b) in zip(pieces, parts, strict=True)])
