"""Flags that this program lacks: refused all at once in groups, or compared with config.json and accepted."""

import json
import shlex

import pytest

from slime_tis.limits import flag
from slime_tis.trainer.cli.arguments import configure
from slime_tis.trainer.cli.options import similar
from slime_tis.trainer.cli.run_options import ALIASES, FLAGS, OPTIONS
from slime_tis.trainer.cli.slime_flags import (
    ADVICE,
    FIXED,
    RENAMED,
    RESTATED,
    advice_for,
    checkpoint_facts,
)
from slime_tis.trainer.cli.unknown_flags import UnknownFlag, refusal, split_unknown_flags

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


def unknown(line):
    rest, flags = split_unknown_flags(shlex.split(line), FLAGS)
    assert rest == []
    return flags


def said(line, model=None):
    return refusal(unknown(line), KNOWN, model)


def test_unknown_flags_take_their_values_with_them():
    line = "--use-tis --num-layers 36 --lr 1e-6 --colocate --spec a b --vocab-size=7 --no-use-rs stray"
    rest, flags = split_unknown_flags(line.split(), FLAGS)
    assert rest == ["--use-tis", "--lr", "1e-6", "--no-use-rs", "stray"]
    assert flags == [
        UnknownFlag("--num-layers", ("36",)),
        UnknownFlag("--colocate", ()),
        UnknownFlag("--spec", ("a", "b")),
        UnknownFlag("--vocab-size", ("7",)),
    ]


def test_all_unknown_flags_are_one_message_in_groups():
    line = (
        "--num-layers 36 --colocate --sglang-server-concurrency 512 --sglang-mem-fraction-static 0.7 --hidden-dropout "
        "0.1 --roll-out-batch-size 4 --zzz"
    )
    assert said(line, {**QWEN3, "num_hidden_layers": 28}) == (
        "7 flags are refused (slime-tis port SCRIPT rewrites a launch script of slime):\n"
        "read from config.json, or fixed:\n"
        "  --num-layers is '36' but num_hidden_layers of config.json is 28; remove it, or give the directory of "
        "that model.\n"
        "  --hidden-dropout is '0.1' but always 0 here; remove it.\n"
        "renamed:\n"
        "  --sglang-server-concurrency is --sglang-concurrency here.\n"
        "not supported:\n"
        "  --colocate is not supported: training and SGLang do not take turns on the same GPUs; give the servers GPUs "
        "of their own with --sglang-base-gpu-id, or sample in the training process with --rollout-engine local.\n"
        "  --sglang-mem-fraction-static is a flag of SGLang servers, which this run does not start; add "
        "--rollout-engine sglang --sglang-launch N.\n"
        "not known:\n"
        "  --roll-out-batch-size is not a flag; did you mean --rollout-batch-size?\n"
        "  --zzz is not a flag; --help lists what there is."
    )


# What slime's own files for these models say, against what their config.json says.
@pytest.mark.parametrize(
    ("line", "model"),
    [
        (
            "--swiglu --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32 "
            "--group-query-attention --num-query-groups 8 --use-rotary-position-embeddings --disable-bias-linear "
            "--normalization RMSNorm --norm-epsilon 1e-6 --rotary-base 1000000 --vocab-size 151936 --kv-channels 128 "
            "--qk-layernorm --attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 "
            "--attention-softmax-in-fp32 --optimizer adam",
            QWEN3,
        ),
        (
            "--use-rope-scaling --rotary-scaling-factor 8.0 --rotary-base 500000 --kv-channels 128 "
            "--untie-embeddings-and-output-weights --position-embedding-type rope --rotary-percent 1.0",
            LLAMA31,
        ),
        ("--add-qkv-bias", {"architectures": ["Qwen2ForCausalLM"]}),
        (
            "--moe-ffn-hidden-size 768 --moe-router-score-function softmax --moe-token-dispatcher-type alltoall "
            "--moe-router-topk 8 --num-experts 128 --moe-token-drop-policy probs --moe-router-dtype fp32 "
            "--moe-aux-loss-coeff 0",
            QWEN3_MOE,
        ),
        (
            "--num-experts 160 --moe-router-topk 8 --moe-ffn-hidden-size 1536 --moe-shared-expert-intermediate-size "
            "1536 --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0 "
            "--moe-router-load-balancing-type seq_aux_loss --moe-router-topk-scaling-factor 2.5 "
            "--moe-router-num-groups 1 --moe-router-group-topk 1 --qk-layernorm --add-qkv-bias",
            GLM45,
        ),
        ("--num-layers 7 --rotary-base 3", {}),
        ("--num-layers 7 --rotary-base 3", None),
    ],
    ids=["qwen3", "llama3.1", "qwen2.5", "qwen3-30b-a3b", "glm-4.5", "empty config.json", "no config.json"],
)
def test_flags_that_repeat_config_json_are_accepted(line, model):
    assert said(line, model) == ""


CONTRADICTIONS = [
    ("--kv-channels 64", "--kv-channels is '64' but head_dim of config.json is 128; remove it, or give the"),
    ("--norm-epsilon 1e-5", "--norm-epsilon is '1e-5' but rms_norm_eps of config.json is 1e-06; remove it"),
    ("--num-layers", "--num-layers has 0 values but needs one; remove it, config.json says it."),
    ("--num-layers many", "--num-layers is 'many' but num_hidden_layers of config.json is 36; remove it"),
    ("--normalization LayerNorm", "--normalization is 'LayerNorm' but normalization of config.json is RMSNorm"),
    ("--add-qkv-bias", "--add-qkv-bias is set but attention_bias of config.json is false; remove it"),
    (
        "--untie-embeddings-and-output-weights",
        "--untie-embeddings-and-output-weights is set but tie_word_embeddings of config.json is true; remove it",
    ),
    ("--use-rope-scaling", "--use-rope-scaling is set but rope_scaling of config.json is false; remove it"),
    ("--swiglu please", "--swiglu is 'please' but is a switch; remove it."),
    ("--optimizer sgd", "--optimizer is 'sgd' but always adam here; remove it."),
    ("--optimizer", "--optimizer is without a value but always adam here; remove it."),
    ("--attention-softmax-in-fp32 false", "--attention-softmax-in-fp32 is 'false' but cannot be turned off"),
]


MOE_CONTRADICTIONS = [
    ("--num-experts 64", "--num-experts is '64' but num_experts of config.json is 128; remove it, or give the"),
    ("--moe-router-topk 2", "--moe-router-topk is '2' but num_experts_per_tok of config.json is 8; remove it"),
    ("--moe-router-pre-softmax", "--moe-router-pre-softmax is set but norm_topk_prob of config.json is true; remove"),
    ("--moe-router-score-function sigmoid", "--moe-router-score-function is 'sigmoid' but router_score_function of"),
    ("--moe-router-enable-expert-bias", "--moe-router-enable-expert-bias is set but expert_bias of config.json is"),
    ("--moe-shared-expert-gate", "--moe-shared-expert-gate is set but shared_expert_gate of config.json is false"),
    ("--moe-aux-loss-coeff 0.01", "--moe-aux-loss-coeff is '0.01' but always 0 here; remove it."),
    ("--moe-router-dtype bf16", "--moe-router-dtype is 'bf16' but always fp32 here; remove it."),
    ("--moe-token-dispatcher-type allgather", "--moe-token-dispatcher-type is 'allgather' but always alltoall here"),
    (
        "--moe-grouped-gemm",
        "--moe-grouped-gemm is not supported: experts and routers follow the checkpoint's config.json, and their "
        "kernels are chosen by this program; remove it.",
    ),
]


@pytest.mark.parametrize("name", ["--use-opd", "--opd-kl-coef", "--opd-teacher-load"])
def test_flags_of_on_policy_distillation_are_not_to_be_left_out(name):
    assert "distillation" in said(name) and "remove it" not in said(name)


@pytest.mark.parametrize(("line", "message"), MOE_CONTRADICTIONS, ids=[row[0] for row in MOE_CONTRADICTIONS])
def test_flags_of_experts_that_contradict_config_json_are_refused(line, message):
    assert said(line, QWEN3_MOE).startswith(message)


@pytest.mark.parametrize(("line", "message"), CONTRADICTIONS, ids=[row[0] for row in CONTRADICTIONS])
def test_flags_that_contradict_config_json_are_refused_with_both_values(line, message):
    assert said(line, QWEN3).startswith(message)


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("--use-tiss", "--use-tis"),
        ("--tis-uper-bound", "--tis-upper-bound"),
        ("--hf-chekcpoint", "--hf-checkpoint"),
        ("--rollout-batchsize", "--rollout-batch-size"),
        ("--tis-upper", "--tis-upper-bound"),
        ("--colocate", None),
        ("--hidden-dropout", None),
        ("--attention-dropout", None),
        ("--rotary-base", None),
        ("--swiglu", None),
        ("--vocab-size", None),
        ("--custom-megatron-before-train-step-hook-path", None),
        ("--" + "x" * 100_000, None),
    ],
)
def test_a_suggestion_is_made_where_it_is_plausible(word, found):
    assert similar(word, KNOWN) == found


def test_no_table_names_a_flag_of_this_program_or_one_flag_twice():
    advised = [name for advice in ADVICE for name in advice.flags.split()]
    names = [*RESTATED, *FIXED, *RENAMED, *(name for name in advised if not name.endswith("*"))]
    assert not FLAGS.intersection(names)
    assert len(set(names)) == len(names)
    assert not [name for name in FLAGS if advice_for(name)]


def test_every_new_name_is_a_flag_here_or_one_of_the_servers():
    assert {new.name for new in RENAMED.values()} - FLAGS == {"--sglang-tp-size"}


@pytest.mark.parametrize(
    ("config", "qk_norm", "bias"),
    [
        ({"architectures": ["Qwen2ForCausalLM"], "attention_bias": False}, False, True),
        ({"architectures": ["Qwen3ForCausalLM"]}, True, False),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, True, False),
        ({"architectures": ["Qwen2MoeForCausalLM"], "qkv_bias": False}, False, False),
        ({"architectures": ["Qwen2MoeForCausalLM"]}, False, None),
    ],
    ids=["qwen2", "qwen3", "qwen3_moe", "qwen2_moe, without bias", "qwen2_moe, not said"],
)
def test_norms_and_biases_follow_from_the_family_or_the_field_that_it_names(config, qk_norm, bias):
    facts = checkpoint_facts(config)
    assert (facts["qk_norm"], facts.get("attention_bias")) == (qk_norm, bias)


def test_facts_follow_from_config_json():
    facts = checkpoint_facts(LLAMA31)
    assert (facts["head_dim"], facts["num_key_value_heads"], facts["rope_theta"]) == (128, 32, 500000.0)
    assert (facts["rope_scaling"], facts["rope_scaling_factor"], facts["qk_norm"]) == (True, 8.0, False)


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A command line that is accepted, with its files in the current directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN3))
    (tmp_path / "train.jsonl").write_text('{"input": "21>", "label": "12"}\n')
    return (
        "--prompt-data train.jsonl --rollout-batch-size 4 --n-samples-per-prompt 8 --rollout-max-response-len 12 "
        "--num-rollout 3 --rm-type exact_match "
    )


def test_the_command_line_checks_restated_flags_wherever_the_checkpoint_is_named(base, tmp_path):
    configure(shlex.split(base + "--hf-checkpoint model --num-layers 36 --hidden-dropout 0"), {})
    (tmp_path / "run.yaml").write_text("hf_checkpoint: model\n")
    for source in ("--hf-checkpoint model", "--custom-config-path run.yaml"):
        with pytest.raises(ValueError) as error:
            configure(shlex.split(f"{base} {source} --num-layers 28"), {})
        assert str(error.value) == (
            "--num-layers is '28' but num_hidden_layers of config.json is 36; remove it, or give the directory of "
            "that model."
        )


def test_a_flag_of_slime_is_not_passed_to_the_servers(base):
    line = base + "--hf-checkpoint model --rollout-engine sglang --sglang-launch 1 --sglang-server-concurrency 8"
    with pytest.raises(ValueError, match=r"^--sglang-server-concurrency is --sglang-concurrency here\.$"):
        configure(shlex.split(line), {})
