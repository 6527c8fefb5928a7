"""Sampling sets of a real server under top-p and top-k, against transformers."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_tis.trainer.data.sample import Prompt, Sample, Sampling, SamplingMask
from tests.real_servers.engines import ServedModel, decode_steps
from tests.real_servers.references import BOUND, Reference
from tests.real_servers.servers import ONLY_SGLANG
from tests.real_servers.training import finished_run, server_flags
from tests.samples import flat

pytestmark = ONLY_SGLANG

FILTERS: dict[str, dict[str, Any]] = {
    "top-p": {"top_p": 0.9},
    "top-k": {"top_k": 7},
    "both, hot": {"top_p": 0.8, "top_k": 50, "temperature": 1.7},
    "both, cool": {"top_p": 0.95, "top_k": 20, "temperature": 0.6},
    "greedy": {"top_k": 1},
}


def truncated_sampling(**filters: Any) -> Sampling:
    return Sampling(max_response_len=40, n_samples=2, return_sampling_mask=True, **filters)


def mask_of(sample: Sample) -> SamplingMask:
    assert sample.sampling_mask is not None
    return sample.sampling_mask


def expected_sizes(reference: Reference, sample: Sample, sampling: Sampling) -> Tensor:
    """[response tokens]: the sizes of the sets; in SGLang top-p cuts the full distribution."""
    log_probs_LV = reference.response_log_probs(sample, sampling.temperature)
    probs_LV = log_probs_LV.exp().sort(-1, descending=True).values
    mass_of_likelier_LV = probs_LV.cumsum(-1) - probs_LV
    sizes_L = (mass_of_likelier_LV < sampling.top_p).sum(-1)
    # -1 disables top-k
    if sampling.top_k != -1:
        sizes_L = sizes_L.clamp(max=sampling.top_k)
    return sizes_L


@dataclasses.dataclass
class Rollouts:
    """Samples with sampling sets, before and after a weight update."""

    sampling: Sampling
    by_version: dict[int, list[Sample]]


@pytest.fixture(scope="module", params=FILTERS)
def rollouts(request: pytest.FixtureRequest, model: ServedModel, prompts: list[Prompt]) -> Rollouts:
    sampling = truncated_sampling(**FILTERS[request.param])
    with model.engine(sampling=sampling) as engine:
        before = flat(engine.generate(prompts, sampling, seed=0))
        engine.update_weights(model.other_reference.named_tensors, 1)
        after = flat(engine.generate(prompts, sampling, seed=0))
    return Rollouts(sampling, {0: before, 1: after})


def test_tokens_carry_the_version_of_their_rollout(rollouts: Rollouts) -> None:
    for version, samples in rollouts.by_version.items():
        for sample in samples:
            assert set(sample.weight_versions) == {version}


def test_sets_contain_the_sampled_tokens(rollouts: Rollouts) -> None:
    for samples in rollouts.by_version.values():
        for sample in samples:
            assert mask_of(sample).contains(torch.tensor(sample.response_ids)).all()


def test_log_probs_are_normalized_over_sets(rollouts: Rollouts, model: ServedModel) -> None:
    temperature = rollouts.sampling.temperature
    for version, samples in rollouts.by_version.items():
        reference = model.references()[version]
        for sample in samples:
            difference = reference.largest_difference_over_sets(sample, {version}, temperature)
            assert difference < BOUND


def test_sizes_of_sets_are_those_of_transformers(rollouts: Rollouts, model: ServedModel) -> None:
    for version, samples in rollouts.by_version.items():
        reference = model.references()[version]
        for sample in samples:
            sizes = expected_sizes(reference, sample, rollouts.sampling)
            differences = (mask_of(sample).lengths - sizes).abs()
            # If the likelier tokens sum to top-p but for rounding, a token may be in or out.
            assert differences.max() <= 1
            assert (differences == 0).float().mean() > 0.9


@pytest.fixture(scope="module")
def interrupted_rollouts(model: ServedModel, prompts: list[Prompt]) -> dict[str, list[Sample]]:
    """Responses that an update interrupts, and responses that a partial rollout leaves for after
    an update."""
    sampling = dataclasses.replace(truncated_sampling(top_p=0.9), max_response_len=400)
    # Many stop tokens, so that lengths differ.
    uneven = dataclasses.replace(sampling, stop_token_ids=tuple(range(3, 1024, 32)))
    with model.engine(sampling=sampling) as engine:
        pending = engine.submit(prompts, sampling, seed=0)
        decode_steps(engine, prompts)
        engine.update_weights(model.other_reference.named_tensors, 1)
        updated = pending.result()
        partial = engine.submit(prompts, uneven, seed=0, num_groups=3).result()
        num_left = len(engine.unfinished())
        engine.update_weights(model.reference.named_tensors, 2)
        partial += engine.submit([], uneven, seed=1, num_groups=num_left).result()
    return {"an update": flat(updated), "a partial rollout": flat(partial)}


INTERRUPTIONS = {"an update": {0, 1}, "a partial rollout": {1, 2}}
"""Weight versions of the tokens, by interruption."""
interruptions = pytest.mark.parametrize("interruption", INTERRUPTIONS)


@interruptions
def test_interrupted_responses_have_both_versions(
    interruption: str, interrupted_rollouts: dict[str, list[Sample]]
) -> None:
    versions: set[int] = set()
    for sample in interrupted_rollouts[interruption]:
        versions.update(sample.weight_versions)
    assert versions == INTERRUPTIONS[interruption]


@interruptions
def test_interrupted_responses_have_a_set_for_every_token(
    interruption: str, interrupted_rollouts: dict[str, list[Sample]]
) -> None:
    for sample in interrupted_rollouts[interruption]:
        mask = mask_of(sample)
        assert len(mask) == len(sample.response_ids)
        assert (mask.lengths > 0).all()


@interruptions
def test_log_probs_of_interrupted_responses_are_exact(
    interruption: str, interrupted_rollouts: dict[str, list[Sample]], model: ServedModel
) -> None:
    for sample in interrupted_rollouts[interruption]:
        assert model.reference.largest_difference_over_sets(sample, {0, 2}) < BOUND
        assert model.other_reference.largest_difference_over_sets(sample, {1}) < BOUND


@pytest.fixture(scope="module")
def truncated_run(task: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """The metrics of two context-parallel ranks that train with top-p and top-k."""
    output: Path = tmp_path_factory.mktemp("truncated")
    flags = [*task, *server_flags(dtype="float32")]
    flags += ["--rollout-top-p", "0.9", "--rollout-top-k", "40", "--context-parallel-size", "2"]
    return finished_run(flags, output, ranks=2).rows


def test_training_normalizes_over_the_sets(truncated_run: list[dict]) -> None:
    differences = [row["train/train_rollout_logprob_abs_diff"] for row in truncated_run]
    assert max(differences) < 1e-5


def test_a_run_measures_the_size_of_its_sets(truncated_run: list[dict]) -> None:
    for row in truncated_run:
        assert 1 < row["rollout/sampling_mask_tokens"] <= 40


def test_no_set_of_a_run_is_missing(truncated_run: list[dict]) -> None:
    for row in truncated_run:
        assert row["rollout/sampling_mask_missing"] == 0
        assert row["rollout/sampling_mask_violations"] == 0
