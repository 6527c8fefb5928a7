"""The config.json of a model that a launch script only names, for checks on another machine."""

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from slime_tis.options.flags import Flag, flags_of
from slime_tis.trainer.cli.slime_flags import RESTATED

_QWEN3 = "--vocab-size 151936 --kv-channels 128 --qk-layernorm"
_UNTIED = "--untie-embeddings-and-output-weights"
_ROUTED = "--num-experts 128 --moe-router-topk 8"
PUBLISHED: Mapping[str, str] = {
    "qwen2.5-0.5b": (
        "--num-layers 24 --hidden-size 896 --ffn-hidden-size 4864 --num-attention-heads 14 "
        "--num-query-groups 2 --vocab-size 151936 --add-qkv-bias"
    ),
    "qwen2.5-1.5b": (
        "--num-layers 28 --hidden-size 1536 --ffn-hidden-size 8960 --num-attention-heads 12 "
        "--num-query-groups 2 --vocab-size 151936 --add-qkv-bias"
    ),
    "qwen2.5-3b": (
        "--num-layers 36 --hidden-size 2048 --ffn-hidden-size 11008 --num-attention-heads 16 "
        "--num-query-groups 2 --vocab-size 151936 --add-qkv-bias"
    ),
    "qwen2.5-7b": (
        "--num-layers 28 --hidden-size 3584 --ffn-hidden-size 18944 --num-attention-heads 28 "
        f"--num-query-groups 4 --vocab-size 152064 --add-qkv-bias {_UNTIED}"
    ),
    "qwen2.5-32b": (
        "--num-layers 64 --hidden-size 5120 --ffn-hidden-size 27648 --num-attention-heads 40 "
        f"--num-query-groups 8 --vocab-size 152064 --add-qkv-bias {_UNTIED}"
    ),
    "qwen3-0.6b": (
        "--num-layers 28 --hidden-size 1024 --ffn-hidden-size 3072 --num-attention-heads 16 "
        f"--num-query-groups 8 {_QWEN3}"
    ),
    "qwen3-1.7b": (
        "--num-layers 28 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 16 "
        f"--num-query-groups 8 {_QWEN3}"
    ),
    "qwen3-4b": (
        "--num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32 "
        f"--num-query-groups 8 {_QWEN3}"
    ),
    "qwen3-8b": (
        "--num-layers 36 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 32 "
        f"--num-query-groups 8 {_QWEN3} {_UNTIED}"
    ),
    "qwen3-14b": (
        "--num-layers 40 --hidden-size 5120 --ffn-hidden-size 17408 --num-attention-heads 40 "
        f"--num-query-groups 8 {_QWEN3} {_UNTIED}"
    ),
    "qwen3-32b": (
        "--num-layers 64 --hidden-size 5120 --ffn-hidden-size 25600 --num-attention-heads 64 "
        f"--num-query-groups 8 {_QWEN3} {_UNTIED}"
    ),
    "qwen3-30b-a3b": (
        "--num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 "
        f"--num-query-groups 4 --moe-ffn-hidden-size 768 {_ROUTED} {_QWEN3} {_UNTIED}"
    ),
    "qwen3-235b-a22b": (
        "--num-layers 94 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 64 "
        f"--num-query-groups 4 --moe-ffn-hidden-size 1536 {_ROUTED} {_QWEN3} {_UNTIED}"
    ),
    "llama-3.1-8b": (
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
        f"--num-query-groups 8 --vocab-size 128256 {_UNTIED}"
    ),
    "llama-3.2-3b": (
        "--num-layers 28 --hidden-size 3072 --ffn-hidden-size 8192 --num-attention-heads 24 "
        "--num-query-groups 8 --vocab-size 128256"
    ),
    "glm-4.5-air": (
        "--num-layers 46 --hidden-size 4096 --ffn-hidden-size 10944 --num-attention-heads 96"
        " --num-query-groups 8 --kv-channels 128 --vocab-size 151552 --moe-ffn-hidden-size 1408"
        f" {_ROUTED} --moe-router-score-function sigmoid --moe-shared-expert-intermediate-size 1408"
        f" --add-qkv-bias {_UNTIED}"
    ),
}
"""Sizes of published models of the supported families, in Megatron's flags, by a part of the
directory's name."""

OTHER_FAMILIES = re.compile(
    r"(kimi|moonlight|deepseek-v[2-9]|deepseek-r1(?!-distill|-0528-qwen3)|gpt-oss|gemma|mimo|minimax|nemotron|"
    r"qwen3\.[5-9]|qwen3-next|qwen\d(\.\d)?-(vl|omni)|glm-?4-(9b|32b)|glm-?4\.7-flash|glm-?5|mistral|mixtral|phi)"
)
"""Names of models whose layers this program does not have."""
QUANTIZED = re.compile(r"-(fp8|int4|int8|awq|gptq|nvfp4|mxfp4|mxfp8|w4a16|w8a8)\b")
"""Names of checkpoints with quantized weights."""
DEFAULT_CONTEXT_LEN = 1 << 20
"""A context that no script exceeds, since Megatron's flags seldom give it."""


def name_problem(directory: str) -> str | None:
    """Returns why train.py cannot load the checkpoint that a directory's name promises, or None."""
    name = PurePosixPath(directory).name.lower()
    if OTHER_FAMILIES.search(name):
        return (
            f"--hf-checkpoint is {directory}, by its name of an unsupported family; "
            "supported are Llama, Qwen2, Qwen3, Qwen2-MoE, Qwen3-MoE and GLM-4.5"
        )
    if QUANTIZED.search(name):
        return (
            f"--hf-checkpoint is {directory}, by its name quantized; give a checkpoint in bf16, and"
            " quantize the servers' copy, for example with --sglang-quantization fp8"
        )
    return None


def model_from_script(given: Mapping[str, Flag], directory: str) -> dict[str, Any] | None:
    """Returns a config.json from the script's MODEL_ARGS, or from a published model of this name.

    Args:
        given: The script's flags.
        directory: The script's --hf-checkpoint.

    Returns:
        The fields that decide layout and memory, or None if the script says nothing about the
        model.
    """
    sizes = _sizes(given)
    if sizes is None:
        name = PurePosixPath(directory).name.lower().replace("meta-llama-", "llama-")
        matches = [known for known in PUBLISHED if known in name]
        if not matches:
            return None
        given = {flag.name: flag for flag in flags_of(PUBLISHED[max(matches, key=len)].split())}
        sizes = _sizes(given)
        assert sizes is not None
    if "num_experts" in sizes:
        return sizes | _experts(given, sizes)
    if "--qk-layernorm" in given:
        family, model_type = "Qwen3ForCausalLM", "qwen3"
    elif "--add-qkv-bias" in given:
        family, model_type = "Qwen2ForCausalLM", "qwen2"
    else:
        family, model_type = "LlamaForCausalLM", "llama"
    return sizes | {"architectures": [family], "model_type": model_type}


def _sizes(given: Mapping[str, Flag]) -> dict[str, Any] | None:
    """Returns the numbers of config.json in Megatron's flags; None without essential sizes."""
    sizes: dict[str, Any] = {}
    for name, restated in RESTATED.items():
        values = given[name].values if name in given else ()
        if (
            restated.switch is None
            and len(values) == 1
            and re.fullmatch(r"[1-9][0-9]{0,8}", values[0])
        ):
            sizes[restated.fact] = int(values[0])
    needed = (
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "vocab_size",
    )
    if any(name not in sizes for name in needed):
        return None
    sizes.setdefault("num_key_value_heads", sizes["num_attention_heads"])
    sizes.setdefault("head_dim", sizes["hidden_size"] // sizes["num_attention_heads"])
    sizes.setdefault("max_position_embeddings", DEFAULT_CONTEXT_LEN)
    sizes.pop("rope_theta", None)  # the angles of rotations change neither layout nor memory
    sizes.pop("rope_scaling_factor", None)
    sizes.pop("partial_rotary_factor", None)
    sizes["tie_word_embeddings"] = _UNTIED not in given
    return sizes


def _experts(given: Mapping[str, Flag], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the family of a mixture of experts, and the fields that its configuration needs."""
    top_k = sizes.get("num_experts_per_tok", 1)
    score = given.get("--moe-router-score-function")
    if score is not None and score.values == ("sigmoid",):
        return {
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            "n_routed_experts": sizes["num_experts"],
            "n_shared_experts": 1,
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": top_k > 1,
            "attention_bias": "--add-qkv-bias" in given,
            "use_qk_norm": "--qk-layernorm" in given,
        }
    is_qwen2 = "--moe-shared-expert-gate" in given
    return {
        "architectures": ["Qwen2MoeForCausalLM" if is_qwen2 else "Qwen3MoeForCausalLM"],
        "model_type": "qwen2_moe" if is_qwen2 else "qwen3_moe",
        "decoder_sparse_step": 1,
        "norm_topk_prob": "--moe-router-pre-softmax" not in given and top_k > 1,
    }
