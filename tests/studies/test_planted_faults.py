"""The rollout engines with planted faults: what they report, and that `planted` ends."""

from pathlib import Path

import pytest

from slime_tis.trainer.data.sample import Sample, Sampling
from slime_tis.trainer.engines.local import local_engine as local
from slime_tis.trainer.engines.local.load_model import load_tokenizer
from studies.collapse.cases import Grid, Study
from studies.collapse.faults import FAULTS
from studies.diagnosis.real_runs import planted
from tests.checkpoints import make_checkpoint
from tests.rollout.conftest import make_prompts
from tests.runs import ROOT

SAMPLING = Sampling(n_samples=16, max_response_len=16, for_training=True)
Groups = list[list[Sample]]


def sample_after_update(path: Path) -> Groups:
    """Samples of eight prompts, after an update that doubles all weights."""
    engine = local.LocalEngine(path, load_tokenizer(path))
    weights = {name: 2 * weight for name, weight in engine._weights.items()}
    engine.update_weights(weights.items, 1)
    prompts = make_prompts(path, ["1>", "22>", "3>", "4>", "5>", "6>", "7>", "8>"])
    return engine.generate(prompts, SAMPLING, 0)


def log_probs(groups: Groups) -> list[float]:
    return [value for group in groups for sample in group for value in sample.rollout_log_probs]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def healthy(checkpoint: Path) -> Groups:
    """Samples of an engine without a fault."""
    return sample_after_update(checkpoint)


def sample_with(fault: str, checkpoint: Path) -> Groups:
    """Samples of an engine with a fault."""
    with planted(FAULTS[fault]):
        return sample_after_update(checkpoint)


def test_a_fault_ends_with_its_block(checkpoint, healthy):
    sample_with("wrong_log_probs", checkpoint)
    assert log_probs(sample_after_update(checkpoint)) == log_probs(healthy)


def test_one_of_a_thousand_log_probs_is_wrong(checkpoint, healthy):
    faulty = log_probs(sample_with("wrong_log_probs", checkpoint))
    pairs = list(zip(faulty, log_probs(healthy), strict=True))
    changed = [wrong for wrong, right in pairs if wrong != right]
    assert set(changed) == {-30.0}
    assert len(changed) / len(pairs) == pytest.approx(0.001, abs=0.001)


def test_one_of_four_servers_is_stale(checkpoint, healthy):
    faulty = sample_with("stale_server", checkpoint)
    versions = []
    stale = []
    for index, group in enumerate(faulty):
        versions.append({version for sample in group for version in sample.weight_versions})
        if log_probs([group]) != log_probs([healthy[index]]):
            stale.append(index)
    assert versions == [{0}, {1}, {1}, {1}] * 2
    assert stale == [0, 4]


def test_truncated_sampling_raises_log_probs(checkpoint, healthy):
    faulty = sample_with("top_p", checkpoint)
    assert sum(log_probs(faulty)) > sum(log_probs(healthy))


def test_truncated_sampling_reports_no_mask(checkpoint):
    for group in sample_with("top_p", checkpoint):
        for sample in group:
            assert sample.sampling_mask is None


@pytest.fixture(scope="module")
def grid() -> Grid:
    """The grid of the comparison study."""
    return Grid.load(Study(ROOT / "studies" / "comparison"))


def test_the_grid_uses_every_fault(grid):
    assert set(grid.faults.values()) == FAULTS.keys()
    assert grid.faults.keys() <= grid.scenarios.keys()


def test_scenarios_with_faults_run_the_program_of_faults(grid):
    faulty = set()
    for case in grid.cases([0]):
        if "studies.collapse.faults" in case.program[:2]:
            faulty.add(case.scenario)
    assert faulty == set(grid.faults)
