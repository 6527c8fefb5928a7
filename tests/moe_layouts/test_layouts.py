"""train.py with mixtures of experts on two and four ranks: every parallel layout gives the metrics of one process."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import PAD
from tests.runs import make_task, metrics_of, training_metrics

EXPERTS_2 = ["--expert-model-parallel-size", "2"]
TENSOR_2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
CONTEXT_2 = ["--context-parallel-size", "2"]
PIPELINE_2 = ["--pipeline-model-parallel-size", "2", "--micro-batch-size", "4"]
ONE_EXPERT_TENSOR = ["--expert-tensor-parallel-size", "1"]
LAYOUTS = {
    "data": (2, []),
    "experts": (2, EXPERTS_2),
    "experts, distributed optimizer, token budget": (
        2,
        [*EXPERTS_2, "--use-distributed-optimizer", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "64"],
    ),
    "tensor": (2, TENSOR_2),
    "tensor and experts": (2, [*TENSOR_2, *EXPERTS_2, *ONE_EXPERT_TENSOR]),
    "context": (2, CONTEXT_2),
    "context and experts": (2, [*CONTEXT_2, *EXPERTS_2]),
    "pipeline": (2, PIPELINE_2),
    "pipeline and experts": (4, [*PIPELINE_2, *EXPERTS_2]),
}
FAMILIES = {
    "qwen3_moe": {"num_hidden_layers": 4, "mlp_only_layers": [0]},
    "qwen2_moe": {},
    "glm4_moe": {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4},
}
CORRECTION = [
    *("--use-tis", "--tis-upper-bound", "1.05", "--use-rs", "--rs-level", "geometric", "--rs-upper-bound", "1.01"),
    *("--use-kl-loss", "--kl-loss-coef", "0.1", "--entropy-coef", "0.01"),
]
REPLAY = [
    *("--rollout-router-bits", "3", "--use-rollout-routing-replay", "--measure-routing-mismatch", "1"),
    *("--num-steps-per-rollout", "2", "--use-kl-loss", "--kl-loss-coef", "0.1", "--num-rollout", "2"),
]
MODES = {
    **{family: (family, CORRECTION) for family in FAMILIES},
    "replay of experts": ("qwen3_moe", REPLAY),
    "both replays, with weights": ("qwen3_moe", [*REPLAY, "--routing-replay-weights", "--use-routing-replay"]),
}
CASES = [
    *(("qwen3_moe", layout) for layout in LAYOUTS),
    *(
        (mode, layout)
        for mode in ("qwen2_moe", "glm4_moe")
        for layout in ("tensor and experts", "pipeline and experts")
    ),
    *(("replay of experts", layout) for layout in LAYOUTS),
    *(("both replays, with weights", f"{layout} and experts") for layout in ("tensor", "context", "pipeline")),
]


def make_moe_task(directory, family):
    """As `make_task`, with a padding embedding that is not zero.

    Samples contain padding tokens, and a zero vector's RMSNorm has a gradient of 1 / √ε, which depends on the order of
    summation.
    """
    flags = make_task(directory, family, **FAMILIES[family])
    file = directory / "model" / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][PAD] = weights["model.embed_tokens.weight"][PAD + 3]
    save_file(weights, file, {"format": "pt"})
    return flags


@pytest.fixture(scope="module")
def one_process(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("one_process")
    family, mode_flags = MODES[request.param]
    flags, data = [*make_moe_task(directory, family), *mode_flags], str(directory / "rollout_{rollout_id}.jsonl")
    saved = ["--save-debug-rollout-data", data, "--save-hf", str(directory / "hf")]
    rows = metrics_of([*flags, *saved], directory / "one")
    if mode_flags is CORRECTION:
        assert 0 < rows[0]["train/gradient_kept_fraction"] < 1  # compares rejection, too
    else:
        assert all(row["train/routing_difference"] > 0.05 for row in rows)  # compares replay
    return [*flags, "--load-debug-rollout-data", data], rows, load_file(directory / "hf" / "model.safetensors")


@pytest.mark.parametrize(("one_process", "layout"), CASES, indirect=["one_process"], ids=str)
def test_ranks_agree_with_one_process(one_process, layout, tmp_path):
    flags, expected_rows, expected_weights = one_process
    ranks, layout_flags = LAYOUTS[layout]
    # Some rollout metrics depend on single roundings of a router that the rollout engine rounds.
    prefix = "train/" if "--rollout-router-bits" in flags else ""
    rows = metrics_of([*flags, *layout_flags, "--save-hf", str(tmp_path / "hf")], tmp_path / "run", ranks)
    assert [row["step"] for row in rows] == list(range(1, len(expected_rows) + 1))
    for row, expected in zip(rows, expected_rows, strict=True):
        found, wanted = (
            {name: value for name, value in training_metrics(each).items() if name.startswith(prefix)}
            for each in (row, expected)
        )
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-4)
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert weights.keys() == expected_weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected_weights[name], rtol=0, atol=1e-4, msg=name)
