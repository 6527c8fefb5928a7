"""New weights in a real server: between rollouts, and in the middle of its requests."""

import httpx
import pytest

from slime_tis.trainer.data.sample import Sampling
from tests.samples import flat
from tests.sglang_server.references import BOUND, worst_by_version
from tests.sglang_server.servers import wait_for_decoding

LONG = Sampling(max_response_len=400, n_samples=2)

pytestmark = pytest.mark.parametrize("sync", ["distributed", "disk"])


def test_log_probs_are_those_of_the_weights_that_it_was_given(sync, real):
    engine = real.make_engine(real.server, sglang_weight_sync=sync)
    sampling = Sampling(max_response_len=32, n_samples=2)
    for version, weights in ((1, real.other_reference), (2, real.reference), (7, real.other_reference)):
        engine.update_weights(weights.named_tensors, version)
        assert engine.weight_version == version
        assert httpx.get(f"{real.server.url}/model_info").json()["weight_version"] == str(version)
        for sample in flat(engine.generate(real.prompts, sampling, seed=0)):
            assert set(sample.weight_versions) == {version}
            assert weights.gap(sample) < BOUND
        ids = real.prompts[5].token_ids
        assert engine.prompt_log_probs(ids)[real.server.url] == pytest.approx(weights.log_probs(ids), abs=BOUND)


def test_every_token_has_the_version_and_log_prob_of_its_weights(sync, real):
    weights = {0: real.reference, 1: real.other_reference, 2: real.reference}
    engine = real.make_engine(real.server, sglang_weight_sync=sync)
    pending = engine.submit(real.prompts, LONG, seed=0)
    for version in (1, 2):
        wait_for_decoding(real.server.log)
        engine.update_weights(weights[version].named_tensors, version)
    samples = flat(pending.result())
    assert len(samples) == 2 * len(real.prompts)
    for sample in samples:
        assert sample.weight_versions == sorted(sample.weight_versions)
        assert worst_by_version(sample, weights) < BOUND
    seen = [len(set(sample.weight_versions)) for sample in samples]
    assert seen.count(3) >= 2  # or the updates came too early, or too late, to show anything


def test_a_server_with_the_weights_of_an_earlier_run_samples_nothing_before_it_has_ours(sync, real):
    earlier = real.make_engine(real.server)
    earlier.update_weights(real.other_reference.named_tensors, 12)
    earlier.close()
    engine = real.make_engine(real.server, sglang_weight_sync=sync, push=False)
    for sample in flat(engine.generate(real.prompts, Sampling(max_response_len=8), seed=0)):
        assert set(sample.weight_versions) == {0}
        assert real.reference.gap(sample) < BOUND
