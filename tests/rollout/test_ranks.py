"""Two gloo processes that sample: they fail together, and refuse samples that cannot be sent."""

import pytest
import torch
import torch.distributed as dist

from slime_tis.trainer.collectives import map_over_ranks
from slime_tis.trainer.data.sample import Prompt, Sampling
from slime_tis.trainer.engines.local.checkpoint import load_tokenizer
from slime_tis.trainer.engines.local.engine import LocalEngine
from tests.runs import spawn

SIZE = 2


async def keep_a_function(sample, engine):
    sample.metadata["tool"] = lambda: None
    return [sample]


def fail_on_rank_1(items):
    if dist.get_rank() == 1:
        raise ValueError(f"item {items[0]} is bad.")
    return items


def work(rank, path, out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=SIZE)
    engine, prompt = LocalEngine(path, load_tokenizer(path)), Prompt(index=0, text="a", token_ids=(1, 5))
    failures = []
    for call in (
        lambda: map_over_ranks(fail_on_rank_1, [10, 11, 12]),
        lambda: engine.submit([prompt], Sampling(max_response_len=2), 0, function=keep_a_function, concurrency=1),
    ):
        with pytest.raises(ValueError) as failure:
            call()
        failures.append(str(failure.value))
    samples = engine.generate([prompt] * 3, Sampling(max_response_len=6), 4)
    torch.save((failures, [group[0].tokens for group in samples]), f"{out}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_sample_as_one_and_fail_together(tmp_path, checkpoint, tokenizer):
    spawn(work, args=(str(checkpoint), str(tmp_path)), nprocs=SIZE)
    prompts = [Prompt(index=0, text="a", token_ids=(1, 5))] * 3
    alone = LocalEngine(checkpoint, tokenizer).generate(prompts, Sampling(max_response_len=6), 4)
    for rank in range(SIZE):
        failures, tokens = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert failures[0] == "item 11 is bad." and "put plain data" in failures[1]
        assert tokens == [group[0].tokens for group in alone]
