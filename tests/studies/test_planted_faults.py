"""The rollout engines with planted faults: what they report, and that `planted` ends."""

import pytest

from slime_tis.trainer.data.sample import Sampling
from slime_tis.trainer.engines.local import local_engine as local
from slime_tis.trainer.engines.local.load_model import load_tokenizer
from studies.collapse.cases import Grid, Study
from studies.collapse.faults import FAULTS
from studies.diagnosis.real_runs import planted
from tests.checkpoints import make_checkpoint
from tests.rollout.conftest import make_prompts
from tests.runs import ROOT

SAMPLING = Sampling(n_samples=16, max_response_len=16, for_training=True)


def sampled(path):
    """Samples after an update that doubles all weights."""
    engine = local.LocalEngine(path, load_tokenizer(path))
    weights = {name: 2 * weight for name, weight in engine._weights.items()}
    engine.update_weights(weights.items, 1)
    return engine.generate(
        make_prompts(path, ["1>", "22>", "3>", "4>", "5>", "6>", "7>", "8>"]), SAMPLING, 0
    )


def log_probs(groups):
    return [value for group in groups for sample in group for value in sample.rollout_log_probs]


def test_faulty_engines(tmp_path):
    checkpoint = make_checkpoint(tmp_path, "qwen3")
    sound, found = sampled(checkpoint), {}
    for name, fault in FAULTS.items():
        with planted(fault):
            found[name] = sampled(checkpoint)
    assert log_probs(sampled(checkpoint)) == log_probs(sound)
    pairs = zip(log_probs(found["wrong_log_probs"]), log_probs(sound), strict=True)
    changed = [new for new, old in pairs if new != old]
    assert set(changed) == {-30.0} and len(changed) / len(log_probs(sound)) == pytest.approx(
        0.001, abs=0.001
    )
    versions = [
        {version for sample in group for version in sample.weight_versions}
        for group in found["stale_server"]
    ]
    assert versions == [{0}, {1}, {1}, {1}] * 2
    stale = {
        index
        for index in range(8)
        if log_probs([found["stale_server"][index]]) != log_probs([sound[index]])
    }
    assert stale == {0, 4}
    assert sum(log_probs(found["top_p"])) > sum(log_probs(sound))
    assert all(sample.sampling_mask is None for group in found["top_p"] for sample in group)


def test_the_grid_names_faults():
    grid = Grid.load(Study(ROOT / "studies" / "comparison"))
    assert (
        set(grid.faults.values()) == FAULTS.keys() and grid.faults.keys() <= grid.scenarios.keys()
    )
    programs = {case.scenario: case.program[:2] for case in grid.cases([0])}
    assert {name for name, program in programs.items() if "studies.collapse.faults" in program} == {
        *grid.faults
    }
