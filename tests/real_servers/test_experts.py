"""Routed experts of real servers, against transformers."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_tis.trainer.data.sample import Prompt, Sample, Sampling
from slime_tis.trainer.engines.local.load_model import weights_by_file_name
from slime_tis.trainer.engines.servers.server_engine import ServerEngine
from tests.checkpoints import make_checkpoint
from tests.real_servers.engines import ServedModel, decode_steps
from tests.real_servers.references import BOUND, Reference, largest_difference
from tests.real_servers.servers import ONLY_SGLANG, RealServer
from tests.samples import flat, reloaded

pytestmark = ONLY_SGLANG

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
}
LONG = Sampling(max_response_len=300, n_samples=2, return_routed_experts=True)
SHORT = dataclasses.replace(LONG, max_response_len=32)
UNEVEN = dataclasses.replace(LONG, stop_token_ids=tuple(range(3, 1024, 32)))
"""Many stop tokens, so that lengths differ."""


class MoeReference(Reference):
    """A mixture of experts in transformers, float32, with the choices of its routers."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint)
        self._chosen: dict[str, Tensor] = {}
        for name, module in self.model.named_modules():
            if name.endswith(".mlp.experts"):
                self._record(name, module)

    def _record(self, name: str, experts: torch.nn.Module) -> None:
        def record(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
            # transformers calls this module with hidden states, experts and their weights
            self._chosen[name] = args[1]

        experts.register_forward_pre_hook(record)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Its weights under the names of files, one matrix for each expert."""
        yield from weights_by_file_name(self.model).items()

    def experts(self, token_ids: Iterable[int]) -> Tensor:
        """[tokens - 1, layers, k]: the experts of all tokens but the last."""
        self.log_probs(list(token_ids))
        return torch.stack(list(self._chosen.values()), 1)[:-1]


def start_model(directory: Path, family: str) -> ServedModel:
    """A mixture of experts on a server that has just been started."""
    checkpoints = []
    for seed in range(2):
        path = directory / f"{family}_{seed}"
        checkpoints.append(make_checkpoint(path, family, seed=seed, **SIZES))
    log = directory / f"{family}.log"
    server = RealServer(checkpoints[0], log, "--dtype", "float32", "--enable-return-routed-experts")
    return ServedModel(
        checkpoint=checkpoints[0],
        server=server,
        reference=MoeReference(checkpoints[0]),
        other_reference=MoeReference(checkpoints[1]),
        directory=directory,
    )


@pytest.fixture(scope="module")
def moe(directory: Path) -> Iterator[ServedModel]:
    model = start_model(directory, "qwen3_moe")
    try:
        model.server.wait()
        yield model
    finally:
        model.server.stop()


def versions_of_next_tokens(sample: Sample) -> list[int]:
    """The weight version of the token after each token but the last; the first one's in a
    prompt."""
    prompt_length = len(sample.row.token_ids)
    versions = []
    for position in range(len(sample.tokens) - 1):
        next_response_position = max(position + 1 - prompt_length, 0)
        versions.append(sample.weight_versions[next_response_position])
    return versions


def expected_experts(sample: Sample, references: Mapping[int, Reference]) -> Tensor:
    """[tokens - 1, layers, k]: the choice of the weights that sampled the next token."""
    versions = versions_of_next_tokens(sample)
    by_version = {}
    for version in set(versions):
        reference = references[version]
        assert isinstance(reference, MoeReference)
        by_version[version] = reference.experts(sample.tokens)
    rows = [by_version[version][position] for position, version in enumerate(versions)]
    return torch.stack(rows)


def assert_experts(samples: Iterable[Sample], references: Mapping[int, Reference]) -> None:
    """Compares each token's set of experts; one token in 200 may differ.

    If two experts have almost the same score, the rounding of float32 decides between them.
    """
    for sample in samples:
        expected = expected_experts(sample, references)
        experts = sample.rollout_routed_experts
        assert experts is not None and experts.shape == expected.shape
        are_different = experts.long().sort(-1).values != expected.sort(-1).values
        num_different = int(are_different.flatten(1).any(-1).sum())
        assert num_different <= len(expected) // 200


def assert_log_probs(samples: Iterable[Sample], references: Mapping[int, Reference]) -> None:
    for sample in samples:
        assert largest_difference(sample, references) < BOUND


@pytest.fixture(scope="module")
def plain_rollout(moe: ServedModel, prompts: list[Prompt]) -> list[Sample]:
    with moe.engine(sampling=LONG) as engine:
        return flat(engine.generate(prompts, SHORT, seed=0))


def test_experts_are_those_of_transformers(plain_rollout: list[Sample], moe: ServedModel) -> None:
    assert_experts(plain_rollout, moe.references())


def test_log_probs_of_a_moe_are_those_of_transformers(
    plain_rollout: list[Sample], moe: ServedModel
) -> None:
    assert_log_probs(plain_rollout, moe.references())


@pytest.fixture(scope="module")
def updated_rollout(moe: ServedModel, prompts: list[Prompt]) -> list[Sample]:
    """Responses during which the weights are updated twice."""
    with moe.engine(sampling=LONG) as engine:
        pending = engine.submit(prompts, LONG, seed=1)
        for version in (1, 2):
            decode_steps(engine, prompts)
            engine.update_weights(moe.references()[version].named_tensors, version)
        return flat(pending.result())


def test_moe_responses_continue_over_updates(updated_rollout: list[Sample]) -> None:
    num_versions = [len(set(sample.weight_versions)) for sample in updated_rollout]
    assert num_versions.count(3) >= 2, "the updates came too early or too late"


def test_experts_follow_updates_within_responses(
    updated_rollout: list[Sample], moe: ServedModel
) -> None:
    assert_experts(updated_rollout, moe.references())


def test_log_probs_follow_updates_within_moe_responses(
    updated_rollout: list[Sample], moe: ServedModel
) -> None:
    assert_log_probs(updated_rollout, moe.references())


@pytest.fixture(scope="module")
def disk_rollout(moe: ServedModel, prompts: list[Prompt]) -> list[Sample]:
    """Responses after an update over the disk."""
    with moe.engine(sampling=LONG, weight_sync="disk", push=False) as engine:
        engine.update_weights(moe.other_reference.named_tensors, 1)
        return flat(engine.generate(prompts[:4], SHORT, seed=2))


def test_a_disk_update_sets_the_version_of_tokens(disk_rollout: list[Sample]) -> None:
    for sample in disk_rollout:
        assert set(sample.weight_versions) == {1}


def test_experts_follow_a_disk_update(disk_rollout: list[Sample], moe: ServedModel) -> None:
    assert_experts(disk_rollout, moe.references())


def test_log_probs_follow_a_disk_update_of_a_moe(
    disk_rollout: list[Sample], moe: ServedModel
) -> None:
    assert_log_probs(disk_rollout, moe.references())


@dataclasses.dataclass
class PartialRollout:
    """A rollout that leaves responses unfinished, which a later one completes."""

    completed: list[Sample]
    """Groups that were complete at the end of the first rollout."""
    unfinished: list[Sample]
    """Responses with tokens that the end of the first rollout aborted."""
    resumed: list[Sample]
    """Responses of the unfinished groups, resumed after a checkpoint and an update."""


def aborted_responses(groups: list[list[Sample]]) -> list[Sample]:
    """Aborted samples that have response tokens."""
    aborted = [sample for sample in flat(groups) if sample.status is Sample.Status.ABORTED]
    return [sample for sample in aborted if sample.response_ids]


def complete_three_groups(engine: ServerEngine, prompts: list[Prompt]) -> list[Sample]:
    return flat(engine.submit(prompts, UNEVEN, seed=0, num_groups=3).result())


@pytest.fixture(scope="module")
def partial_rollout(moe: ServedModel, prompts: list[Prompt]) -> PartialRollout:
    with moe.engine(sampling=LONG) as engine:
        completed = complete_three_groups(engine, prompts)
        groups = engine.unfinished()
        unfinished = aborted_responses(groups)
        stored = reloaded(groups)
        engine.update_weights(moe.other_reference.named_tensors, 1)
        engine.resume_unfinished(stored)
        resumed = engine.submit([], UNEVEN, seed=1, num_groups=len(groups)).result()
    return PartialRollout(completed, unfinished, flat(resumed))


def test_a_partial_rollout_aborts_begun_responses(partial_rollout: PartialRollout) -> None:
    assert partial_rollout.unfinished


def test_experts_of_aborted_responses_are_complete(
    partial_rollout: PartialRollout, moe: ServedModel
) -> None:
    samples = [*partial_rollout.completed, *partial_rollout.unfinished]
    assert_experts(samples, moe.references())


def test_log_probs_of_aborted_moe_responses_are_exact(
    partial_rollout: PartialRollout, moe: ServedModel
) -> None:
    samples = [*partial_rollout.completed, *partial_rollout.unfinished]
    assert_log_probs(samples, moe.references())


def test_aborted_responses_continue_with_new_weights(partial_rollout: PartialRollout) -> None:
    over_update = [
        sample for sample in partial_rollout.resumed if set(sample.weight_versions) == {0, 1}
    ]
    assert len(over_update) == len(partial_rollout.unfinished)


def test_resumed_responses_keep_their_experts(
    partial_rollout: PartialRollout, moe: ServedModel
) -> None:
    assert_experts(partial_rollout.resumed, moe.references())


def test_log_probs_of_resumed_moe_responses_are_exact(
    partial_rollout: PartialRollout, moe: ServedModel
) -> None:
    assert_log_probs(partial_rollout.resumed, moe.references())


@pytest.fixture(scope="module")
def grouped_moe(directory: Path) -> Iterator[ServedModel]:
    """GLM-4.5's router has a bias and groups of experts."""
    model = start_model(directory, "glm4_moe")
    try:
        model.server.wait()
        yield model
    finally:
        model.server.stop()


@pytest.fixture(scope="module")
def grouped_rollouts(grouped_moe: ServedModel, prompts: list[Prompt]) -> dict[int, list[Sample]]:
    """Samples by the version of the weights that were sent before their rollout."""
    sampling = dataclasses.replace(LONG, max_response_len=16)
    rollouts = {}
    with grouped_moe.engine(sampling=LONG, push=False) as engine:
        for version in (0, 1):
            source = grouped_moe.references()[version].named_tensors
            engine.update_weights(source, version)
            rollouts[version] = flat(engine.generate(prompts[:4], sampling, seed=0))
    return rollouts


VERSIONS = pytest.mark.parametrize("version", [0, 1], ids=["first weights", "updated"])


@VERSIONS
def test_an_update_of_a_grouped_router_sets_the_version(
    version: int, grouped_rollouts: dict[int, list[Sample]]
) -> None:
    for sample in grouped_rollouts[version]:
        assert set(sample.weight_versions) == {version}


@VERSIONS
def test_grouped_routers_choose_as_in_transformers(
    version: int, grouped_rollouts: dict[int, list[Sample]], grouped_moe: ServedModel
) -> None:
    assert_experts(grouped_rollouts[version], grouped_moe.references())


@VERSIONS
def test_log_probs_of_a_grouped_router_are_exact(
    version: int, grouped_rollouts: dict[int, list[Sample]], grouped_moe: ServedModel
) -> None:
    assert_log_probs(grouped_rollouts[version], grouped_moe.references())
