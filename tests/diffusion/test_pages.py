"""docs/diffusion.md: its code runs, its names exist."""

import re
from pathlib import Path

import torch

import slime_tis
from slime_tis import RolloutCorrectionConfig, diffusion
from slime_tis.correction import parse_criteria

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "diffusion.md").read_text()


def blocks(text):
    return re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)


def test_the_code_of_the_page_runs(capsys):
    torch.manual_seed(0)
    names = {}
    for block in blocks(PAGE):
        exec(block, names)
    assert len(blocks(PAGE)) == 6
    assert names["log_prob"].shape == (4,) and names["correction"].folded.shape == (16, 2)
    assert names["log_probs"].grad.abs().sum() > 0
    assert names["merged"] is names["correction"].statistics
    assert "actor/rollout_corr/logprob_abs_diff/ts_900" in names["metrics"]
    assert capsys.readouterr().out == "", "bypass of equal policies has nothing to be said about"


def test_functions_presets_fields_and_criteria_named_on_the_page_exist():
    for name in re.findall(r"`(\w+)\(", PAGE):
        known = hasattr(diffusion, name) or hasattr(torch.distributed, name)
        assert known or name.startswith(("apply_", "compute_")), name
    for name in diffusion.__all__:
        assert name in PAGE, f"{name} is public, so the page names it"
    for name in re.findall(r"preset\(\"(\w+)\"\)", PAGE):
        assert name in slime_tis.PRESETS
    fields = RolloutCorrectionConfig.__dataclass_fields__
    named = re.findall(
        r"\b(use_tis|tis_\w+|rs_\w+|rollout_rs\w*|rejection_normalizer|nonfinite_policy)\b", PAGE
    )
    verl_omni = {
        "rollout_rs_masked_fraction",
        "rollout_rs_seq_masked_fraction",
        "rs_masked_fraction",
    }
    assert len(named) > 10 and {name for name in named if name not in fields} <= verl_omni
    assert parse_criteria("seq_mean_k1", "0.5_2.0")[0].upper == 2.0


def test_every_metric_is_in_a_glossary():
    glossary = (ROOT / "docs" / "metrics.md").read_text()
    for bypass in (False, True):
        config = RolloutCorrectionConfig(
            use_rollout_logprobs=bypass, use_rs=True, rs_veto_threshold=1e-4
        )
        found = diffusion.correct_trajectories(
            config, torch.zeros(2, 2), torch.ones(2, 2), timesteps=torch.tensor([900.0, 600.0])
        )
        for name in found.statistics.metrics():
            bare = name.split("rollout_corr/")[1]
            own = f"`{re.sub('ts_.*', 'ts_VALUE', bare)}`"
            general = re.sub(r"mis_rs_token_(seq_)?masked", r"mis_rs_CRITERION_\1masked", bare)
            assert own in PAGE or f"`train/{general}`" in glossary, name
