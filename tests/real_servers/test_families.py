"""Families on real servers: training and the server agree, before and after a weight update.

`make study-families` measures all families; these are one for each mechanism.
"""

from pathlib import Path

import pytest

from studies.families.measure import EngineName, Measurement, measure
from tests.real_servers.servers import ENGINE

NAME: EngineName = "vllm" if ENGINE.name == "vllm" else "sglang"
SERVED = {
    "sglang": ["gemma3", "smollm3"],
    "vllm": ["deepseek_v3", "mistral_windows"],
}[NAME]
"""Norms of outputs with two kinds of windows, and layers without positions; latent attention with
the router of DeepSeek-V3, and windows in all layers."""
REFUSED = {
    "sglang": {"gpt_oss": "GptOssForCausalLM requires one of"},
    "vllm": {"gpt_oss": "does not apply a weight update"},
}[NAME]
"""Models that this engine does not serve on a CPU, and a part of the message."""
BOUND = 2e-5
"""Largest mean difference in float32, in nats. A missed update differs by 1e-2 or more."""


@pytest.fixture(scope="module", params=SERVED)
def served(request: pytest.FixtureRequest, directory: Path) -> Measurement:
    path = directory / f"family_{request.param}"
    path.mkdir()
    return measure(NAME, request.param, path)


def test_a_family_has_the_log_probs_of_training(served: Measurement) -> None:
    assert served.before is not None, served.message
    assert served.before < BOUND


def test_a_family_has_the_updated_log_probs_of_training(served: Measurement) -> None:
    assert served.after is not None, served.message
    assert served.after < BOUND


@pytest.mark.parametrize(("name", "words"), REFUSED.items(), ids=list(REFUSED))
def test_a_family_that_is_not_served_is_refused(name: str, words: str, tmp_path: Path) -> None:
    result = measure(NAME, name, tmp_path)
    assert words in result.message
