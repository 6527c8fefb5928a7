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
from tests.test_agents import AGENTS

GREEDY = Sampling(temperature=0.0, max_response_len=6, n_samples=2)


def function(checkpoint: Path, directory: Path, address: tuple[str, int]) -> GenerateFunction:
    (directory / "agents.py").write_text(AGENTS)
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
