"""Weight updates of a real server, over both transports."""

from dataclasses import dataclass

import pytest

from slime_tis.trainer.data.sample import Prompt, Sample, Sampling
from tests.real_servers.engines import ServedModel, decode_steps
from tests.real_servers.references import BOUND, Reference, largest_difference
from tests.samples import flat

TRANSPORTS = ["distributed", "disk"]
SHORT = Sampling(max_response_len=32, n_samples=2)


@dataclass
class Update:
    """A weight update, and what engine and server say afterwards."""

    version: int
    reference: Reference
    engine_version: int
    server_version: str
    samples: list[Sample]
    prompt_log_probs: list[float]


@pytest.fixture(scope="module", params=TRANSPORTS)
def updates(
    request: pytest.FixtureRequest, model: ServedModel, prompts: list[Prompt]
) -> list[Update]:
    """Three updates between rollouts."""
    # 2 to 7: versions count optimizer steps, and need not be consecutive.
    references = {1: model.other_reference, 2: model.reference, 7: model.other_reference}
    results = []
    with model.engine(weight_sync=request.param) as engine:
        for version, reference in references.items():
            engine.update_weights(reference.named_tensors, version)
            log_probs = engine.prompt_log_probs(prompts[5].token_ids)
            update = Update(
                version=version,
                reference=reference,
                engine_version=engine.weight_version,
                server_version=model.server.weight_version(),
                samples=flat(engine.generate(prompts, SHORT, seed=0)),
                prompt_log_probs=log_probs[model.server.url],
            )
            results.append(update)
    return results


def test_an_update_sets_the_version(updates: list[Update]) -> None:
    for update in updates:
        assert update.engine_version == update.version
        assert update.server_version == str(update.version)


def test_tokens_after_an_update_carry_its_version(updates: list[Update]) -> None:
    for update in updates:
        for sample in update.samples:
            assert set(sample.weight_versions) == {update.version}


def test_log_probs_after_an_update_are_its_weights(updates: list[Update]) -> None:
    for update in updates:
        for sample in update.samples:
            assert update.reference.largest_difference(sample) < BOUND


def test_prompt_log_probs_after_an_update_are_its_weights(
    updates: list[Update], prompts: list[Prompt]
) -> None:
    for update in updates:
        expected = update.reference.log_probs(prompts[5].token_ids)
        assert update.prompt_log_probs == pytest.approx(expected, abs=BOUND)


LONG = Sampling(max_response_len=400, n_samples=2)


@pytest.fixture(scope="module", params=TRANSPORTS)
def updated_rollout(
    request: pytest.FixtureRequest, model: ServedModel, prompts: list[Prompt]
) -> list[Sample]:
    """Responses during which the weights are updated twice."""
    with model.engine(weight_sync=request.param) as engine:
        pending = engine.submit(prompts, LONG, seed=0)
        for version in (1, 2):
            decode_steps(engine, prompts)
            # Else the server may complete all responses while the update is prepared.
            model.server.pause()
            engine.update_weights(model.references()[version].named_tensors, version)
        return flat(pending.result())


def test_updates_lose_no_response(updated_rollout: list[Sample], prompts: list[Prompt]) -> None:
    indices = [sample.index for sample in updated_rollout]
    assert indices == list(range(LONG.n_samples * len(prompts)))


def test_responses_continue_over_updates(updated_rollout: list[Sample]) -> None:
    num_versions = [len(set(sample.weight_versions)) for sample in updated_rollout]
    assert num_versions.count(3) >= 2, "the updates came too early or too late"


def test_versions_of_a_response_never_decrease(updated_rollout: list[Sample]) -> None:
    for sample in updated_rollout:
        assert sample.weight_versions == sorted(sample.weight_versions)


def test_log_probs_are_those_of_each_tokens_version(
    updated_rollout: list[Sample], model: ServedModel
) -> None:
    for sample in updated_rollout:
        assert largest_difference(sample, model.references()) < BOUND


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_weights_of_an_earlier_run_sample_nothing(
    transport: str, model: ServedModel, prompts: list[Prompt]
) -> None:
    with model.engine() as earlier:
        earlier.update_weights(model.other_reference.named_tensors, 12)
    with model.engine(weight_sync=transport, push=False) as engine:
        groups = engine.generate(prompts, Sampling(max_response_len=8), seed=0)
    for sample in flat(groups):
        assert set(sample.weight_versions) == {0}
        assert model.reference.largest_difference(sample) < BOUND
