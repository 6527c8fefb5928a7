"""A real server that dies in the middle of a batch, and comes back."""

import time

import httpx
import pytest

from slime_tis.trainer.data.sample import Sample, Sampling
from tests.samples import flat
from tests.sglang_server.references import BOUND, worst_by_version
from tests.sglang_server.servers import wait_for_decoding

SAMPLES = 3


@pytest.mark.parametrize("sync", ["distributed", "disk"])
def test_a_server_killed_in_mid_batch_loses_nothing_and_comes_back_with_the_current_weights(sync, two_servers, real):
    victim, prompts = two_servers[1], real.prompts
    weights = {0: real.reference, 1: real.other_reference}
    current = [real.reference]
    engine = real.make_engine(*two_servers, weights=lambda: current[0].named_tensors(), sglang_weight_sync=sync)

    pending = engine.submit(prompts, Sampling(max_response_len=300, n_samples=SAMPLES), seed=0)
    wait_for_decoding(victim.log)
    victim.kill()
    groups = pending.result()
    assert [[sample.row for sample in group] for group in groups] == [[prompt] * SAMPLES for prompt in prompts]
    samples = flat(groups)
    assert [sample.index for sample in samples] == list(range(SAMPLES * len(prompts)))
    assert all(sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED) for sample in samples)
    assert all(worst_by_version(sample, weights) < BOUND for sample in samples)
    metrics = engine.metrics()
    assert metrics["rollout/sglang_retries"] >= 1 and metrics["rollout/sglang_deaths"] == 1

    current[0] = real.other_reference
    engine.update_weights(real.other_reference.named_tensors, 1)
    victim.restart()
    victim.wait()
    deadline = time.monotonic() + 60.0
    while engine.metrics()["rollout/sglang_returns"] < 1:
        assert time.monotonic() < deadline, "the server that came back was not taken in again"
        samples = flat(engine.generate(prompts, Sampling(max_response_len=32), seed=0))
        assert all(worst_by_version(sample, weights) < BOUND for sample in samples)
    version = httpx.get(f"{victim.url}/model_info").json()["weight_version"]
    assert version == "1", "the server that came back was not given the current weights"
    answered = victim.log.read_text().count("POST /generate")
    samples = flat(engine.generate(prompts, Sampling(max_response_len=32, n_samples=2), seed=0))
    assert victim.log.read_text().count("POST /generate") > answered
    assert all(set(sample.weight_versions) == {1} and worst_by_version(sample, weights) < BOUND for sample in samples)
    assert engine.metrics()["rollout/sglang_returns"] == 1
