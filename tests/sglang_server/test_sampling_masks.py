"""Sampling masks of a real server: sets and log-probs against transformers, through weight updates and aborts."""

import dataclasses

import pytest
import torch

from slime_tis.trainer.data.sample import Sampling
from tests.runs import read_metrics, run_apart
from tests.samples import flat
from tests.sglang_server.references import BOUND
from tests.sglang_server.servers import wait_for_decoding
from tests.sglang_server.test_train import sglang_flags, task  # noqa: F401  # a fixture

CASES = {
    "top-p": {"top_p": 0.9},
    "top-k": {"top_k": 7},
    "both, hot": {"top_p": 0.8, "top_k": 50, "temperature": 1.7},
    "both, cool": {"top_p": 0.95, "top_k": 20, "temperature": 0.6},
    "greedy": {"top_k": 1},
}


def truncated(**filters):
    return Sampling(max_response_len=40, n_samples=2, return_sampling_mask=True, **filters)


def expected_sizes(reference, sample, sampling):
    """The number of tokens that SGLang leaves: top-p is of the whole distribution, and does not follow top-k."""
    probs = (reference.logits(sample) / sampling.temperature).softmax(-1).sort(-1, descending=True).values
    sizes = (probs.cumsum(-1) - probs < sampling.top_p).sum(-1)
    return sizes if sampling.top_k == -1 else sizes.clamp(max=sampling.top_k)


@pytest.mark.parametrize("case", CASES)
def test_sets_and_log_probs_are_those_of_transformers(case, real):
    sampling = truncated(**CASES[case])
    engine = real.make_engine(real.server, sampling=sampling)
    for version, weights in ((0, real.reference), (1, real.other_reference)):
        if version:
            engine.update_weights(weights.named_tensors, version)
        for sample in flat(engine.generate(real.prompts, sampling, seed=0)):
            assert sample.sampling_mask is not None
            assert set(sample.weight_versions) == {version}
            assert sample.sampling_mask.contains(torch.tensor(sample.response_ids)).all()
            assert weights.gap_over_sets(sample, (version,), sampling.temperature) < BOUND
            sizes = expected_sizes(weights, sample, sampling)
            # A token whose likelier ones sum to the nucleus probability but for rounding may be in or out.
            assert (sample.sampling_mask.lengths - sizes).abs().max() <= 1
            assert (sample.sampling_mask.lengths == sizes).float().mean() > 0.9


def test_sets_through_an_update_in_the_middle_of_requests_and_a_partial_rollout(real):
    long = dataclasses.replace(truncated(top_p=0.9), max_response_len=400)
    engine = real.make_engine(real.server, sampling=long)
    rollout = engine.submit(real.prompts, long, seed=0)
    wait_for_decoding(real.server.log)
    engine.update_weights(real.other_reference.named_tensors, 1)
    updated = flat(rollout.result())
    assert {version for sample in updated for version in sample.weight_versions} == {0, 1}

    short = dataclasses.replace(long, stop_token_ids=tuple(range(3, 1024, 32)))
    groups = engine.submit(real.prompts, short, seed=0, num_groups=3).result()
    left = engine.unfinished()
    engine.update_weights(real.reference.named_tensors, 2)
    groups += engine.submit([], short, seed=1, num_groups=len(left)).result()
    partial = flat(groups)
    assert {version for sample in partial for version in sample.weight_versions} == {1, 2}
    for sample in [*updated, *partial]:
        assert sample.sampling_mask is not None
        assert len(sample.sampling_mask) == len(sample.response_ids)
        assert (sample.sampling_mask.lengths > 0).all()
        assert real.reference.gap_over_sets(sample, (0, 2)) < BOUND
        assert real.other_reference.gap_over_sets(sample, (1,)) < BOUND


def test_a_run_with_top_p_has_no_mismatch_and_measures_its_sets(task, tmp_path):  # noqa: F811
    flags = [*task, *sglang_flags("--sglang-dtype", "float32"), "--rollout-top-p", "0.9", "--rollout-top-k", "40"]
    run = run_apart([*flags, "--context-parallel-size", "2"], tmp_path, ranks=2)
    assert run.returncode == 0, run.stderr
    for row in read_metrics(tmp_path):
        assert row["train/train_rollout_logprob_abs_diff"] < 1e-5
        assert 1 < row["rollout/sampling_mask_tokens"] <= 40
        assert row["rollout/sampling_mask_missing"] == row["rollout/sampling_mask_violations"] == 0
