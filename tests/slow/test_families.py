"""train.py with a model of each family: training and the local engine agree in float32."""

import pytest

from tests.runs import make_task, metrics_of

REPLAY = ["--use-rollout-routing-replay", "--routing-replay-weights"]
MODELS = {
    "mistral": ({"sliding_window": 6}, []),
    "phi3": ({}, []),
    "smollm3": ({"num_hidden_layers": 4}, []),
    "olmo2": ({}, []),
    "seed_oss": ({}, []),
    "mimo": ({}, []),
    "glm4": ({}, []),
    "gemma3": (
        {
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 24,
        },
        [],
    ),
    "gpt_oss": ({}, REPLAY),
    "deepseek_v2": ({}, REPLAY),
    "deepseek_v3": ({}, REPLAY),
    "kimi_k2": ({}, REPLAY),
    "glm4_moe_lite": ({}, REPLAY),
    "qwen3_next": ({}, REPLAY),
    "qwen3_5": ({}, []),
}
"""Family → fields of config.json, and flags."""


@pytest.mark.parametrize("family", MODELS)
def test_both_engines_agree_before_and_after_an_update(family, tmp_path):
    fields, flags = MODELS[family]
    task = make_task(tmp_path, family, **fields)
    exact = ["--rollout-precision", "fp32", "--num-rollout", "2", "--get-mismatch-metrics"]
    rows = metrics_of([*task, *exact, *flags], tmp_path / "run")
    differences = [row["train/train_rollout_logprob_abs_diff"] for row in rows]
    assert len(differences) == 2
    assert max(differences) < 1e-6
