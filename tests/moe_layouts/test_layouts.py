"""Mixtures of experts on every layout: training, parity with transformers, and resumption."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.checkpoints import PAD, make_checkpoint
from tests.megatron.passes import on_ranks
from tests.megatron.test_hf_parity import compare_all
from tests.runs import make_task, metrics_of, run_apart, training_metrics

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
        [
            *EXPERTS_2,
            "--use-distributed-optimizer",
            "--use-dynamic-batch-size",
            "--max-tokens-per-gpu",
            "64",
        ],
    ),
    "tensor": (2, TENSOR_2),
    "tensor, whole experts": (2, [*TENSOR_2, *ONE_EXPERT_TENSOR]),
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
    *(
        "--use-tis",
        "--tis-upper-bound",
        "1.05",
        "--use-rs",
        "--rs-level",
        "geometric",
        "--rs-upper-bound",
        "1.01",
    ),
    *("--use-kl-loss", "--kl-loss-coef", "0.1", "--entropy-coef", "0.01"),
]
REPLAY = [
    *(
        "--rollout-router-bits",
        "3",
        "--use-rollout-routing-replay",
        "--measure-routing-mismatch",
        "1",
    ),
    *(
        "--num-steps-per-rollout",
        "2",
        "--use-kl-loss",
        "--kl-loss-coef",
        "0.1",
        "--num-rollout",
        "2",
    ),
]
MODES = {
    **{family: (family, CORRECTION) for family in FAMILIES},
    "replay of experts": ("qwen3_moe", REPLAY),
    "both replays, with weights": (
        "qwen3_moe",
        [*REPLAY, "--routing-replay-weights", "--use-routing-replay"],
    ),
}
CASES = [
    *(("qwen3_moe", layout) for layout in LAYOUTS),
    *(
        (mode, layout)
        for mode in ("qwen2_moe", "glm4_moe")
        for layout in ("tensor and experts", "pipeline and experts")
    ),
    *(("replay of experts", layout) for layout in LAYOUTS),
    *(
        ("both replays, with weights", f"{layout} and experts")
        for layout in ("tensor", "context", "pipeline")
    ),
]


def make_moe_task(directory, family):
    """As `make_task`, with a padding embedding that is not zero.

    Samples contain padding tokens, and a zero vector's RMSNorm has a gradient of 1 / √ε, which
    depends on the order of summation.
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
    flags, data = (
        [*make_moe_task(directory, family), *mode_flags],
        str(directory / "rollout_{rollout_id}.jsonl"),
    )
    saved = ["--save-debug-rollout-data", data, "--save-hf", str(directory / "hf")]
    rows = metrics_of([*flags, *saved], directory / "one")
    if mode_flags is CORRECTION:
        assert 0 < rows[0]["train/gradient_kept_fraction"] < 1  # compares rejection, too
    else:
        assert all(row["train/routing_difference"] > 0.05 for row in rows)  # compares replay
    return (
        [*flags, "--load-debug-rollout-data", data],
        rows,
        load_file(directory / "hf" / "model.safetensors"),
    )


@pytest.mark.parametrize(("one_process", "layout"), CASES, indirect=["one_process"], ids=str)
def test_ranks_agree_with_one_process(one_process, layout, tmp_path):
    flags, expected_rows, expected_weights = one_process
    ranks, layout_flags = LAYOUTS[layout]
    # Some rollout metrics depend on single roundings of a router that the rollout engine rounds.
    prefix = "train/" if "--rollout-router-bits" in flags else ""
    rows = metrics_of(
        [*flags, *layout_flags, "--save-hf", str(tmp_path / "hf")], tmp_path / "run", ranks
    )
    assert [row["step"] for row in rows] == list(range(1, len(expected_rows) + 1))
    for row, expected in zip(rows, expected_rows, strict=True):
        found, wanted = (
            {
                name: value
                for name, value in training_metrics(each).items()
                if name.startswith(prefix)
            }
            for each in (row, expected)
        )
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-4)
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert weights.keys() == expected_weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected_weights[name], rtol=0, atol=1e-4, msg=name)


PARITY_CASES = {
    "qwen3_moe": {"num_hidden_layers": 3, "mlp_only_layers": [1]},
    "qwen2_moe": {},
    "glm4_moe": {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "n_shared_experts": 2},
}
PARITY_LAYOUTS = {
    "experts": {"expert_model_parallel_size": 2},
    "tensor and experts": {
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
    "matrices of each expert": {"expert_tensor_parallel_size": 2},
}


@pytest.mark.parametrize("layout", PARITY_LAYOUTS)
def test_models_match_transformers(layout, tmp_path):
    for family, sizes in PARITY_CASES.items():
        make_checkpoint(tmp_path / family, family, **sizes)
    on_ranks(compare_all, tmp_path, PARITY_LAYOUTS[layout])
    assert len(list(tmp_path.glob("*/parity_*"))) == 2 * len(PARITY_CASES)


TWO_EXPERT_RANKS = ["--expert-model-parallel-size", "2"]


@pytest.mark.parametrize(
    "optimizer", [[], ["--use-distributed-optimizer"]], ids=["whole", "distributed optimizer"]
)
def test_a_run_resumes_from_a_checkpoint(optimizer, tmp_path):
    flags = [
        *make_moe_task(tmp_path, "glm4_moe"),
        "--rollout-precision",
        "fp32",
        "--check-weight-sync",
    ]
    flags += [*TWO_EXPERT_RANKS, *optimizer, "--weight-sync-bound", "1e-4"]
    whole = metrics_of([*flags, "--save-hf", str(tmp_path / "whole_hf")], tmp_path / "whole", 2)
    saved = ["--save", str(tmp_path / "checkpoints")]
    metrics_of([*flags, *saved, "--num-rollout", "2"], tmp_path / "first", 2)
    resumed = [
        *saved,
        "--load",
        str(tmp_path / "checkpoints"),
        "--save-hf",
        str(tmp_path / "resumed_hf"),
    ]
    (row,) = metrics_of([*flags, *resumed], tmp_path / "second", 2)
    assert training_metrics(row) == pytest.approx(training_metrics(whole[2]), rel=1e-5)
    weights = load_file(tmp_path / "whole_hf" / "model.safetensors")
    for name, weight in load_file(tmp_path / "resumed_hf" / "model.safetensors").items():
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=1e-6, msg=name)
    start = load_file(tmp_path / "model" / "model.safetensors")
    changed = {name for name, weight in weights.items() if not torch.equal(weight, start[name])}
    assert weights.keys() - changed == {
        name for name in weights if name.endswith("e_score_correction_bias")
    }
    AutoModelForCausalLM.from_pretrained(tmp_path / "resumed_hf")
    for size, ranks in (
        ("1", 1),
        ("4", 4),
    ):  # the optimizer's state of the experts has another form
        other = run_apart(
            [*flags, *resumed, "--expert-model-parallel-size", size], tmp_path / f"by_{size}", ranks
        )
        assert other.returncode == 2, other.stderr
        assert (
            f"--expert-model-parallel-size is {size} but was 2 in the run that --load resumes"
            in other.stderr
        )
        assert not (tmp_path / f"by_{size}" / "metrics.jsonl").exists()
