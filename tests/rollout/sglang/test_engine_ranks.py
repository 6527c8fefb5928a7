"""Two gloo processes with one engine: the first alone talks to the servers, and both get, or raise, the same."""

from pathlib import Path

import httpx
import pytest
import torch
import torch.distributed as dist

from slime_tis.trainer.data.sample import Sampling
from slime_tis.trainer.engines.engine import RolloutUnavailable
from tests.checkpoints import make_checkpoint
from tests.rollout.sglang.fake_sglang import fake_servers, log_prob
from tests.rollout.sglang.rollouts import (
    EARLY,
    LATE,
    PROMPTS,
    SAMPLING,
    ByHand,
    Weights,
    assert_exact,
    make_engine,
    versions_of,
)
from tests.runs import spawn

SIZE = 2


def work(rank, checkpoint, url, out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=SIZE)
    torch.save(play(rank, checkpoint, url), f"{out}/{rank}.pt")
    dist.destroy_process_group()


def play(rank, checkpoint, url):
    """What one rank sees of a run on a server that begins with the weights of another run."""
    weights, sync = Weights(), ByHand()
    engine = make_engine(Path(checkpoint), weights, weight_sync=sync, sglang_url=(url,), sglang_max_retries=0)
    seen = {"first": engine.generate(PROMPTS, SAMPLING, 0), "iterated": [weights.iterated]}
    engine.update_weights(weights, 4)
    seen["iterated"].append(weights.iterated)
    seen["second"] = engine.generate(PROMPTS, SAMPLING, 0)
    seen["scores"] = engine.prompt_log_probs([1, 7, 20])
    for kind in (400, 500):
        if rank == 0:
            httpx.post(f"{url}/faults", json={"faults": [kind]})
        dist.barrier()
        try:
            engine.generate(PROMPTS, SAMPLING, 0)
        except (ValueError, RolloutUnavailable) as error:
            seen[kind] = type(error) is RolloutUnavailable, isinstance(error, ValueError), str(error)
    seen["third"] = engine.submit([LATE[0], EARLY[0]], Sampling(max_response_len=30), 0, num_groups=1).result()
    seen["left"] = engine.unfinished()
    seen["metrics"] = engine.metrics()
    engine.close()
    return seen


@pytest.mark.slow
def test_two_ranks_see_the_same(tmp_path):
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "qwen3")
    with fake_servers(1) as (server,):
        server.weight_version, server.version = "7", 7
        spawn(work, args=(str(checkpoint), server.url, str(tmp_path)), nprocs=SIZE)
        first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(SIZE))
    assert_exact(first["first"], PROMPTS)
    assert_exact(first["second"], PROMPTS)
    assert versions_of(first["first"]) == {0}
    assert versions_of(first["second"]) == {4}
    assert first["iterated"] == [1, 2]
    assert first["scores"] == {server.url: [log_prob(7, 4), log_prob(20, 4)]}
    assert first[400][:2] == (True, False) and "HTTP 400: max_new_tokens must be" in first[400][2]
    assert first[500][:2] == (True, False) and "a request failed 1 time" in first[500][2]
    assert sorted(group[0].prompt_index for group in [*first["third"], *first["left"]]) == sorted(
        (LATE[0].index, EARLY[0].index)
    )
    assert first["metrics"]["rollout/sglang_live_servers"] == 1 and second.pop("metrics") == {}
    assert {name: first[name] for name in second} == second
