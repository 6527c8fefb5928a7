"""A function in the pattern of slime's search-r1, on a real server and on the local engine: the same samples."""

from argparse import Namespace
from pathlib import Path

import pytest

from slime_tis.hf_directory import ModelSizes
from slime_tis.trainer.agents.custom_generate import GenerateFunction, build_generate_function
from slime_tis.trainer.data.sample import Prompt, Sample, Sampling
from slime_tis.trainer.engines.local.checkpoint import load_tokenizer
from slime_tis.trainer.engines.local.engine import LocalEngine
from slime_tis.trainer.options.rollout import RolloutConfig
from tests.sglang_server.conftest import MakeEngine
from tests.sglang_server.servers import RealServer

AGENT = """
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def search(args, sample, sampling_params):
    # the pattern of slime's example search-r1: text to the server's address, stop strings, observations in between
    tokenizer = GenerateState(args).tokenizer
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    sampling_params = {**sampling_params, "stop": ["3", "7"], "max_new_tokens": 6}
    response, response_ids, loss_mask, log_probs = "", [], [], []
    for _ in range(3):
        payload = {"sampling_params": sampling_params, "return_logprob": True}
        payload |= {"input_ids": prompt_ids + response_ids} if sample.index % 2 else {"text": sample.prompt + response}
        output = await post(url, payload)
        pairs = output["meta_info"]["output_token_logprobs"]
        response += output["text"]
        response_ids += [pair[1] for pair in pairs]
        loss_mask += [1] * len(pairs)
        log_probs += [pair[0] for pair in pairs]
        if output["meta_info"]["finish_reason"]["type"] == "length":
            break
        found = tokenizer("12>", add_special_tokens=False)["input_ids"]
        response += "12>"
        response_ids += found
        loss_mask += [0] * len(found)
        log_probs += [0.0] * len(found)
    sample.tokens, sample.response_length = prompt_ids + response_ids, len(response_ids)
    sample.response, sample.loss_mask, sample.rollout_log_probs = response, loss_mask, log_probs
    sample.status = Sample.Status.COMPLETED
    return sample
"""
GREEDY = Sampling(temperature=0.0, max_response_len=6, n_samples=2)


def function(checkpoint: Path, directory: Path, address: tuple[str, int]) -> GenerateFunction:
    (directory / "agents.py").write_text(AGENT)
    config = RolloutConfig(
        prompt_data="p",
        rollout_batch_size=2,
        rollout_max_response_len=6,
        custom_generate_function_path=f"{directory / 'agents.py'}:search",
    )
    found = build_generate_function(
        config,
        Namespace(hf_checkpoint=str(checkpoint), reward_key=None),
        load_tokenizer(checkpoint),
        sizes=ModelSizes(vocab_size=1024, context_len=512),
        version=lambda: 0,
        address=address,
    )
    assert found is not None
    return found


def test_a_real_server_and_the_local_engine_give_the_same_samples(
    server: RealServer, make_engine: MakeEngine, prompts: list[Prompt], checkpoint: Path, tmp_path: Path
) -> None:
    served, local = make_engine(server), LocalEngine(checkpoint, load_tokenizer(checkpoint))
    found: list[list[Sample]] = []
    for engine, address in ((served, served.http_address), (local, ("127.0.0.1", 0))):
        assert address is not None
        call = function(checkpoint, tmp_path, address).bind(GREEDY, evaluation=True)
        groups = engine.submit_function(prompts, call, GREEDY, 0, concurrency=8).result()
        found.append([sample for group in groups for sample in group])
    local.close()
    for of_server, of_local in zip(*found, strict=True):
        assert of_server.failure is None and of_server.tokens == of_local.tokens
        assert of_server.loss_mask == of_local.loss_mask and of_server.response == of_local.response
        assert of_server.rollout_log_probs == pytest.approx(of_local.rollout_log_probs, abs=1e-4)
        assert of_server.retokenized == of_local.retokenized
