"""Two gloo processes sample and score what one process does, and fail together."""

import copy

import pytest
import torch
import torch.distributed as dist

from slime_tis.trainer.collectives import map_over_ranks
from slime_tis.trainer.data.sample import STATUS, Prompt, Sampling
from slime_tis.trainer.engines.local.checkpoint import load_tokenizer
from slime_tis.trainer.engines.local.engine import LocalEngine
from slime_tis.trainer.options.rollout import RolloutConfig
from slime_tis.trainer.rewards.rewards import build_reward
from tests.checkpoints import make_checkpoint
from tests.rollout.conftest import make_prompts
from tests.runs import spawn

SIZE = 2


def rollout(path):
    """Samples and scores of three prompts, then of one, which leaves the second of two ranks without work."""
    tokenizer = load_tokenizer(path)
    prompts = make_prompts(path, ["31415>", "7>", "abc def"])
    engine = LocalEngine(path, tokenizer)
    reward = build_reward(
        RolloutConfig(
            prompt_data="p",
            rollout_batch_size=1,
            rollout_max_response_len=1,
            custom_rm_path="tests.rollout.test_ranks.share_of_digits",
        )
    )
    sampling = Sampling(max_response_len=12, n_samples=3)
    samples = [s for batch in (prompts, prompts[:1]) for g in engine.generate(batch, sampling, 4) for s in g]
    for sample, score in zip(samples, reward(samples), strict=True):
        sample.reward = score
    asked = engine.submit_function(prompts, ask_twice, sampling, 4, concurrency=4).result()
    return samples, [sample for group in asked for sample in group]


async def ask_twice(sample, engine):
    """Two turns with an observation between them; every other rollout has a second segment."""
    answer = await engine.generate(sample.tokens)
    sample.append_response_tokens(tokens=answer.token_ids, log_probs=answer.log_probs)
    sample.append_response_tokens(tokens=[11, 12], trainable=False)
    answer = await engine.generate(sample.tokens, {"max_new_tokens": 5})
    sample.append_response_tokens(tokens=answer.token_ids, log_probs=answer.log_probs)
    sample.status, sample.reward = STATUS[answer.finish_reason], 0.0
    return [sample, copy.deepcopy(sample)] if sample.index % 2 else [sample]


def share_of_digits(args, sample):
    return sum(character.isdigit() for character in sample.response) / (1 + len(sample.response))


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
    try:
        map_over_ranks(fail_on_rank_1, [10, 11, 12])
    except ValueError as error:
        failure = str(error)
    engine, prompt = LocalEngine(path, load_tokenizer(path)), Prompt(index=0, text="a", token_ids=(1, 5))
    with pytest.raises(ValueError, match="put plain data"):
        engine.submit_function([prompt], keep_a_function, Sampling(max_response_len=2), 0, concurrency=1)
    samples, asked = rollout(path)
    torch.save({"samples": samples, "asked": asked, "failure": failure}, f"{out}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_sample_and_score_as_one(tmp_path):
    path = make_checkpoint(tmp_path / "checkpoint", "qwen3")
    spawn(work, args=(str(path), str(tmp_path)), nprocs=SIZE)
    alone, asked = rollout(path)
    assert len({sample.reward for sample in alone}) > 1
    for rank in range(SIZE):
        result = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert result["failure"] == "item 11 is bad."
        assert [sample.response_ids for sample in result["samples"]] == [s.response_ids for s in alone]
        for shared, own in zip(result["samples"], alone, strict=True):
            assert shared.row == own.row
            assert (shared.group_index, shared.index) == (own.group_index, own.index)
            assert shared.reward == own.reward
            assert shared.rollout_log_probs == pytest.approx(own.rollout_log_probs, abs=1e-5)
        assert [sample.tokens for sample in result["asked"]] == [sample.tokens for sample in asked]
        for shared, own in zip(result["asked"], asked, strict=True):
            assert (shared.group_index, shared.index, shared.rollout_id) == (own.group_index, own.index, own.rollout_id)
            assert (shared.loss_mask, shared.status) == (own.loss_mask, own.status)
            assert shared.rollout_log_probs == pytest.approx(own.rollout_log_probs, abs=1e-5)


def test_without_a_process_group_all_items_are_mapped_here():
    assert map_over_ranks(lambda items: [2 * item for item in items], [1, 2, 3]) == [2, 4, 6]
