"""Partial rollouts on a real server: stragglers are aborted, and gone on with in the next rollout."""

from slime_tis.trainer.data.sample import Prompt, Sample, Sampling
from tests.sglang_server.conftest import MakeEngine
from tests.sglang_server.references import Reference
from tests.sglang_server.servers import RealServer
from tests.sglang_server.test_weights import BOUND, all_samples, worst_by_version


def test_aborted_samples_are_gone_on_with_from_their_tokens(
    server: RealServer, make_engine: MakeEngine, prompts: list[Prompt], reference: Reference, other_reference: Reference
) -> None:
    engine = make_engine(server)
    stops = tuple(range(3, 1024, 32))  # so that lengths differ
    sampling = Sampling(max_response_len=400, n_samples=2, stop_token_ids=stops)
    weights = {0: reference, 1: other_reference}

    groups = engine.submit(prompts, sampling, seed=0, num_groups=3).result()
    assert len(groups) == 3
    assert all(sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED) for sample in all_samples(groups))
    left = engine.unfinished()
    assert sorted(group[0].prompt.index for group in [*groups, *left]) == list(range(8))
    begun = [sample for sample in all_samples(left) if sample.status is Sample.Status.ABORTED and sample.response_ids]
    assert begun

    engine.update_weights(other_reference.named_tensors, 1)
    groups = engine.submit([], sampling, seed=1, num_groups=len(left)).result()
    assert engine.unfinished() == []
    finished = {(sample.prompt.index, tuple(sample.response_ids)): sample for sample in all_samples(groups)}
    for sample in finished.values():
        assert sample.status is Sample.Status.COMPLETED or len(sample.response_ids) == 400
        assert worst_by_version(sample, weights) < BOUND
    for sample in begun:
        kept = len(sample.response_ids)
        (whole,) = [
            other
            for (index, ids), other in finished.items()
            if index == sample.prompt.index and list(ids[:kept]) == sample.response_ids
        ]
        assert whole.rollout_log_probs[:kept] == sample.rollout_log_probs
        assert whole.weight_versions == [0] * kept + [1] * (len(whole.response_ids) - kept)
