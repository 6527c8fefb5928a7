"""config.json of published models: read as transformers reads it, in the old and the new spelling.

`tests/golden/published_configs.json` has the published fields, without those for loading remote
code. Its `parameters` were counted by transformers on the meta device, and equal the published
sizes, without layers for multi-token prediction and selection biases of routers.
"""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_tis.families import FAMILIES, attention_windows, family_of
from slime_tis.trainer.configs.megatron import MegatronConfig
from slime_tis.trainer.megatron.architecture import read_hf_config, rotary_frequencies
from slime_tis.trainer.memory_plan import census
from tests.runs import ROOT

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (ROOT / "tests" / "golden" / "published_configs.json").read_text()
)
GEMMA = [(5, 512), (1, None)]
GPT_OSS = [(1, 128), (1, None)]
WINDOWS = {
    "mistralai/Mistral-7B-v0.1": [(32, 4096)],
    # five layers with windows, then one without
    "google/gemma-3-1b-it": GEMMA * 4 + [(2, 512)],
    "google/gemma-3-270m-it": GEMMA * 3,
    "openai/gpt-oss-20b": GPT_OSS * 12,
    "openai/gpt-oss-120b": GPT_OSS * 18,
}
"""Consecutive layers with the same window, by model; all others have none."""


def written(name: str, directory: Path) -> Path:
    """A directory with the published config.json."""
    (directory / "config.json").write_text(json.dumps(PUBLISHED[name]["config"]))
    return directory


def test_every_family_has_a_published_model():
    architectures = {entry["config"]["architectures"][0] for entry in PUBLISHED.values()}
    # Qwen3.5 is published with images only.
    assert architectures == set(FAMILIES) - {"Qwen3_5ForCausalLM"}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_plan_counts_the_published_parameters(name, tmp_path):
    directory = written(name, tmp_path)
    weights = census(MegatronConfig(hf_checkpoint=str(directory), bf16=True))
    assert weights.total == PUBLISHED[name]["parameters"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_layers_have_the_published_windows(name, tmp_path):
    hf = read_hf_config(written(name, tmp_path))
    runs = [(len(list(layers)), window) for window, layers in groupby(attention_windows(hf))]
    assert runs == WINDOWS.get(name, [(hf.num_hidden_layers, None)])


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_spelling_of_transformers_5_has_the_same_rotation(name, tmp_path):
    hf = read_hf_config(written(name, tmp_path))
    frequencies, scale = rotary_frequencies(hf, family_of(hf))
    # writes rope_parameters and dtype instead of rope_theta, rope_scaling and torch_dtype
    hf.save_pretrained(tmp_path)
    assert "rope_parameters" in json.loads((tmp_path / "config.json").read_text())
    saved = read_hf_config(tmp_path)
    saved_frequencies, saved_scale = rotary_frequencies(saved, family_of(saved))
    assert torch.equal(saved_frequencies, frequencies)
    assert saved_scale == scale


ROTATED = {
    # model: rotated features of a head, base of the frequencies
    "microsoft/phi-4": (128, 250_000),
    "THUDM/GLM-4-9B-0414": (64, 10_000),
    "zai-org/GLM-4.5-Air": (64, 1_000_000),
    "zai-org/GLM-4.7-Flash": (64, 1_000_000),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (64, 10_000_000),
    "moonshotai/Moonlight-16B-A3B-Instruct": (64, 50_000),
    "mistralai/Mistral-Small-24B-Instruct-2501": (128, 100_000_000),
}


@pytest.mark.parametrize(("name", "rotation"), ROTATED.items(), ids=ROTATED)
def test_frequencies_are_those_of_the_published_base(name, rotation, tmp_path):
    hf = read_hf_config(written(name, tmp_path))
    size, base = rotation
    exponents = torch.arange(0, size, 2, dtype=torch.float64) / size
    frequencies, _ = rotary_frequencies(hf, family_of(hf))
    torch.testing.assert_close(frequencies[0].double(), base**-exponents, rtol=1e-5, atol=0)
