"""Generate functions on servers: partial rollouts over a checkpoint, with proof of the tokens of both parts."""

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from slime_tis.hf_directory import ModelSizes
from slime_tis.trainer.agents.custom_generate import build_generate_function
from slime_tis.trainer.data.dump import from_dict, to_dict
from slime_tis.trainer.data.sample import Sample, Sampling
from slime_tis.trainer.options.rollout import RolloutConfig
from tests.rollout.sglang.fake_sglang import continuation
from tests.rollout.sglang.rollouts import EARLY, LATE, Run, flat, held

RUN = Sampling(max_response_len=12, n_samples=2)
AGENT = """
import asyncio
from slime.utils.http_utils import post
from slime.utils.types import Sample

async def generate(args, sample, sampling_params):
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    if sample.prompt_index in args.early:
        while not args.is_held():
            await asyncio.sleep(0.001)
    for turn in range(sample.loss_mask.count(0) // 2 if sample.loss_mask else 0, 1 if args.is_early(sample) else 2):
        out = await post(url, {"input_ids": sample.tokens, "sampling_params": sampling_params})
        pairs = out["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            args, tokens=[pair[1] for pair in pairs], log_probs=[pair[0] for pair in pairs], meta_info=out["meta_info"])
        if sample.status is Sample.Status.ABORTED:
            return sample
        if turn == 0:
            sample.append_response_tokens(args, tokens=[20, 21], trainable=False)
    return sample
"""


def test_an_aborted_episode_goes_on_after_a_checkpoint_with_proof_of_both_parts(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    run = start(1)
    (tmp_path / "agent.py").write_text(AGENT)
    config = RolloutConfig(
        prompt_data="p",
        rollout_batch_size=2,
        rollout_max_response_len=12,
        custom_generate_function_path=f"{tmp_path / 'agent.py'}:generate",
        retokenization="error",
    )
    early = {prompt.index for prompt in EARLY}
    args = Namespace(
        early=early,
        is_early=lambda sample: sample.prompt_index in early,
        is_held=lambda: run.num_held == 2 or not run.servers[0].stop_after,
    )
    function = build_generate_function(
        config,
        args,
        run.engine._tokenizer,
        sizes=ModelSizes(vocab_size=None, context_len=128),
        version=lambda: run.engine.weight_version,
        address=run.engine.http_address or ("", 0),
    )
    assert function is not None
    call = function.bind(RUN)
    with held(run, 6):
        groups = run.engine.submit_function([LATE[0], EARLY[0]], call, RUN, concurrency=8, num_groups=1).result()
    assert [group[0].row for group in groups] == [EARLY[0]]
    left = run.engine.unfinished()
    assert [(s.status, s.response_length, s.loss_mask) for s in flat(left)] == [(Sample.Status.ABORTED, 6, [1] * 6)] * 2
    stored = json.loads(json.dumps([[to_dict(sample) for sample in group] for group in left]))
    run.update(1)
    run.engine.resume_unfinished([[from_dict(row) for row in group] for group in stored])
    (group,) = run.engine.submit_function([], call, RUN, concurrency=8, num_groups=1).result()
    for sample in group:
        first = sample.loss_mask.index(0)
        assert sample.response_ids[:first] == continuation(list(LATE[0].token_ids), first)
        assert sample.weight_versions == [0] * 6 + [1] * (sample.response_length - 6)
        assert sample.retokenized == 0 and sample.failure is None and sample.turns == 2


def test_a_sample_that_was_never_begun_goes_into_a_checkpoint() -> None:
    sample = Sample(prompt_row=LATE[0], tokens=list(LATE[0].token_ids))
    assert from_dict(json.loads(json.dumps(to_dict(sample)))).tokens == sample.tokens
