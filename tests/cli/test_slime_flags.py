"""Flags that this program lacks: refused in groups, or compared with config.json and accepted."""

import shlex

import pytest

from slime_tis.options.fields import flag
from slime_tis.options.flags import flags_of
from slime_tis.options.values import similar
from slime_tis.trainer.cli.slime_flags import (
    ADVICE,
    FIXED,
    OTHER_EXPERIMENTS,
    RENAMED,
    RESTATED,
    VALUES,
    advice_for,
    refusal,
)
from slime_tis.trainer.cli.train_options import ALIASES, FLAGS, OPTIONS
from tests.cli.conftest import configured
from tests.cli.conftest import refusal as refusal_of

KNOWN = list(map(flag, (*OPTIONS, *ALIASES)))
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 36,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
}
LLAMA31 = {
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": 32,
    "hidden_size": 4096,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0},
}


QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
MOONLIGHT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": True,
}
GLM4 = {
    "architectures": ["Glm4ForCausalLM"],
    "num_key_value_heads": 2,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
GLM45 = {
    "architectures": ["Glm4MoeForCausalLM"],
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
    "use_qk_norm": True,
    "attention_bias": True,
}


def said(line, model=None):
    return refusal(flags_of(shlex.split(line))[1:], KNOWN, model)


def test_all_unknown_flags_are_one_message_in_groups():
    line = (
        "--num-layers 36 --colocate --sglang-server-concurrency 512 --sglang-mem-fraction-static"
        " 0.7 --hidden-dropout 0.1 --roll-out-batch-size 4 --zzz"
    )
    lines = said(line, {**QWEN3, "num_hidden_layers": 28}).splitlines()
    assert lines[0].startswith("7 flags are refused")
    assert [words.split()[0] for words in lines[1:]] == [
        *("--hidden-dropout", "--num-layers", "--sglang-server-concurrency", "--colocate"),
        *("--sglang-mem-fraction-static", "--roll-out-batch-size", "--zzz"),
    ]
    assert "did you mean --rollout-batch-size?" in lines[6]


# What slime's own files for these models say, against what their config.json says.
@pytest.mark.parametrize(
    ("line", "model"),
    [
        (
            (
                "--swiglu --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728"
                " --num-attention-heads 32 --group-query-attention --num-query-groups 8"
                " --use-rotary-position-embeddings --disable-bias-linear --normalization RMSNorm"
                " --norm-epsilon 1e-6 --rotary-base 1000000 --vocab-size 151936 --kv-channels 128"
                " --qk-layernorm --attention-dropout 0.0 --hidden-dropout 0.0"
                " --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 --optimizer adam"
            ),
            QWEN3,
        ),
        (
            (
                "--use-rope-scaling --rotary-scaling-factor 8.0 --rotary-base 500000 --kv-channels"
                " 128 --untie-embeddings-and-output-weights --position-embedding-type rope"
                " --rotary-percent 1.0"
            ),
            LLAMA31,
        ),
        ("--add-qkv-bias", {"architectures": ["Qwen2ForCausalLM"]}),
        (
            (
                "--moe-ffn-hidden-size 768 --moe-router-score-function softmax"
                " --moe-token-dispatcher-type alltoall --moe-router-topk 8 --num-experts 128"
                " --moe-token-drop-policy probs --moe-router-dtype fp32 --moe-aux-loss-coeff 0"
            ),
            QWEN3_MOE,
        ),
        (
            (
                "--num-experts 160 --moe-router-topk 8 --moe-ffn-hidden-size 1536"
                " --moe-shared-expert-intermediate-size 1536 --moe-router-score-function sigmoid"
                " --moe-router-enable-expert-bias --moe-router-bias-update-rate 0"
                " --moe-router-load-balancing-type seq_aux_loss --moe-router-topk-scaling-factor"
                " 2.5 --moe-router-num-groups 1 --moe-router-group-topk 1 --qk-layernorm"
                " --add-qkv-bias"
            ),
            GLM45,
        ),
        (
            "--post-self-attn-layernorm --post-mlp-layernorm --rotary-interleaved"
            " --rotary-percent 0.5 --add-qkv-bias --num-query-groups 2",
            GLM4,
        ),
        (
            "--multi-latent-attention --kv-channels 128 --kv-lora-rank 512 --qk-head-dim 128"
            " --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm --num-experts 64"
            " --moe-router-pre-softmax --moe-router-score-function sigmoid"
            " --moe-shared-expert-intermediate-size 2816 --rotary-interleaved",
            MOONLIGHT,
        ),
        ("--num-layers 7 --rotary-base 3", {}),
        ("--num-layers 7 --rotary-base 3", None),
    ],
    ids=[
        "qwen3",
        "llama3.1",
        "qwen2.5",
        "qwen3-30b-a3b",
        "glm-4.5",
        "glm-4-9b-0414",
        "moonlight",
        "empty config.json",
        "no config.json",
    ],
)
def test_flags_that_repeat_config_json_are_accepted(line, model):
    assert said(line, model) == ""


# (flags, config.json, part of the message)
CONTRADICTIONS = [
    ("--kv-lora-rank 256", MOONLIGHT, "kv_lora_rank 512"),
    ("--multi-latent-attention", QWEN3, "latent_attention false"),
    ("--post-mlp-layernorm", QWEN3, "output_norms false"),
    ("--rotary-interleaved", QWEN3, "rotary_interleaved false"),
    ("--kv-channels 64", QWEN3, "head_dim 128"),
    ("--num-layers", QWEN3, "without a value"),
    ("--normalization LayerNorm", QWEN3, "RMSNorm"),
    ("--add-qkv-bias", QWEN3, "attention_bias false"),
    ("--use-rope-scaling", QWEN3, "rope_scaling false"),
    ("--swiglu please", QWEN3, "'please'"),
    ("--optimizer sgd", QWEN3, "always adam"),
    ("--attention-softmax-in-fp32 false", QWEN3, "always on"),
    ("--num-experts 64", QWEN3_MOE, "num_experts 128"),
    ("--moe-router-pre-softmax", QWEN3_MOE, "norm_topk_prob true"),
    ("--moe-shared-expert-gate", QWEN3_MOE, "shared_expert_gate false"),
    ("--moe-aux-loss-coeff 0.01", QWEN3_MOE, "always 0"),
    ("--moe-grouped-gemm", QWEN3_MOE, "not supported"),
]


@pytest.mark.parametrize(
    ("line", "model", "part"), CONTRADICTIONS, ids=[row[0] for row in CONTRADICTIONS]
)
def test_flags_that_contradict_config_json_are_refused(line, model, part):
    message = said(line, model)
    assert message.startswith(line.split()[0]) and part in message


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("--use-tiss", "--use-tis"),
        ("--rollout-batchsize", "--rollout-batch-size"),
        ("--colocate", None),
        ("--custom-megatron-before-train-step-hook-path", None),
        ("--" + "x" * 100_000, None),
    ],
)
def test_a_suggestion_is_made_where_it_is_plausible(word, found):
    assert similar(word, KNOWN) == found


ADVISED = [name for flags in (*ADVICE, *OTHER_EXPERIMENTS) for name in flags.split()]
IN_TABLES = [
    *RESTATED,
    *FIXED,
    *RENAMED,
    *(name for name in ADVISED if not name.endswith("*")),
]


def test_no_table_has_a_flag_of_this_program():
    assert not FLAGS.intersection(IN_TABLES)
    assert not [name for name in FLAGS if advice_for(name)]


def test_no_flag_is_in_two_tables():
    assert len(set(IN_TABLES)) == len(IN_TABLES)


def test_advice_names_existing_flags():
    servers = {
        "--nnodes",
        "--nproc-per-node",
        "--sglang-tp-size",
        "--sglang-base-gpu-id",
        "--sglang-quantization",
    }
    texts = [*ADVICE.values(), *OTHER_EXPERIMENTS.values()]
    for row in VALUES.values():
        texts += row.values()
    words = " ".join(texts).split()
    recommended = {word.strip(",;:.") for word in words if word.startswith("--")}
    assert recommended <= FLAGS | servers | {"--eval-", "--help"}


def test_restated_flags_that_agree_are_accepted(base):
    configured(base + "--num-layers 2 --hidden-dropout 0")


def test_a_restated_flag_is_compared_with_the_checkpoint(base):
    assert "num_hidden_layers 2" in refusal_of(base + "--num-layers 28")


def test_a_restated_flag_is_compared_with_a_checkpoint_of_yaml(base, tmp_path):
    (tmp_path / "run.yaml").write_text("hf_checkpoint: model\n")
    flags = base.removeprefix("--hf-checkpoint model ")
    message = refusal_of(flags + "--custom-config-path run.yaml --num-layers 28")
    assert "num_hidden_layers 2" in message


def test_a_renamed_flag_is_no_flag_of_servers(base):
    line = base + "--rollout-engine sglang --sglang-launch 1 --sglang-server-concurrency 8"
    assert refusal_of(line) == "--sglang-server-concurrency is --sglang-concurrency here."


# (flag and value of slime, what to write here)
ESTIMATORS = {
    "cispo": "write --advantage-estimator grpo --policy-loss cispo",
    "gspo": "write --advantage-estimator grpo --policy-loss gspo",
    "ppo": "there is no critic",
}


@pytest.mark.parametrize(("name", "advice"), ESTIMATORS.items(), ids=ESTIMATORS)
def test_estimators_of_slime_are_refused_with_advice(base, tmp_path, name, advice):
    (tmp_path / "run.yaml").write_text(f"advantage_estimator: {name}\n")
    for source in (f"--advantage-estimator {name}", "--custom-config-path run.yaml"):
        message = refusal_of(f"{base} {source}")
        assert f"is '{name}' but must be one of grpo, " in message
        assert advice in message


# (flag of slime, part of the message)
WITHOUT_COUNTERPART = {
    "--ci-test": "write --ci-train-rollout-logprob-abs-diff-threshold 0.1",
    "--value-clip 0.2": "there is no critic",
    "--custom-megatron-before-train-step-hook-path a.b": (
        "no function is called inside the training engine"
    ),
    "--custom-convert-samples-to-train-data-path a.b": (
        "no function is called on the converted batch"
    ),
    "--multi-lora-n-adapters 2": "this program trains and samples with one LoRA adapter",
    "--freeze-indexer": "the model has layers that this program lacks",
    "--megatron-to-hf-mode bridge": "without conversion",
    "--disable-rewards-normalization": "raw_rewards",
}


@pytest.mark.parametrize(("flags", "part"), WITHOUT_COUNTERPART.items(), ids=WITHOUT_COUNTERPART)
def test_flags_of_slime_are_never_taken_for_typing_errors(flags, part):
    message = said(flags)
    assert part in message
    assert "is not a flag" not in message


def test_loss_type_of_fine_tuning_is_refused_with_advice(base):
    assert "there is no supervised fine-tuning; use slime" in refusal_of(
        f"{base} --loss-type sft_loss"
    )
