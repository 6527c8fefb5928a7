"""What --true-on-policy refuses on the command line, and its warning about corrections."""

import json
import shlex
from pathlib import Path

import pytest

from slime_tis.trainer.cli.train_arguments import parse_args
from tests.cli.conftest import configured, refusal


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--fp16 --rollout-precision fp16", "--fp16, whose operations were not tested"),
        ("--bf16", "--rollout-precision fp32 while training has bf16"),
        ("--rollout-precision int8", "--rollout-precision int8 while training has fp32"),
        ("--rollout-router-bits 8", "--rollout-router-bits"),
        ("--tensor-model-parallel-size 4", "--tensor-model-parallel-size 4: the order in"),
        ("--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 2, which was not"),
        ("--context-parallel-size 2", "--context-parallel-size 2, which was not shown"),
        ("--tensor-model-parallel-size 2 --sequence-parallel", "--sequence-parallel, which"),
        ("--transformer-impl transformer_engine", "does not have its kernels"),
        ("--num-steps-per-rollout 2", "2 optimizer steps per rollout"),
        ("--update-weights-interval 2", "--update-weights-interval 2, because older"),
        ("--rollout-lookahead 1", "--rollout-lookahead 1, because older weights"),
        ("--load-debug-rollout-data d/{rollout_id}.pt", "whose tokens another run sampled"),
        ("--debug-rollout-only", "which trains nothing"),
        ("--custom-loss-function-path a.py:b --loss-type custom_loss", "megatron-core's output"),
        ("--rollout-function-path a.py:b", "whose log-probs may come from anywhere"),
        ("--rollout-engine sglang --sglang-launch 1", "does not have the kernels of a server"),
    ],
    ids=lambda value: value.split(" --")[0] if value.startswith("--") else "",
)
def test_refused_with_the_reason(base, flags, words):
    assert words in refusal(f"{base} --true-on-policy {flags}")


def test_mixtures_of_experts_are_refused(base):
    model = json.loads(Path("model/config.json").read_text())
    model |= {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
    }
    Path("model/config.json").write_text(json.dumps(model))
    assert "mixture of experts" in refusal(f"{base} --true-on-policy")


def test_families_that_were_not_compared_are_refused(base):
    model = json.loads(Path("model/config.json").read_text())
    model |= {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
    Path("model/config.json").write_text(json.dumps(model))
    assert "whose operations were not compared" in refusal(f"{base} --true-on-policy")


def test_two_tensor_parallel_ranks_are_accepted(base):
    line = f"{base} --true-on-policy --tensor-model-parallel-size 2"
    assert configured(line, world_size=2).rollout.true_on_policy


def test_corrections_without_effect_are_named(whole, capsys):
    parse_args(shlex.split(f"{whole} --true-on-policy --use-tis --use-rs --rs-upper-bound 2"))
    warnings = capsys.readouterr().err
    assert "--use-tis and --use-rs has no effect with --true-on-policy" in warnings
