"""The config.json of a model that a launch script only names, for checks on another machine."""

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from slime_tis.families import FAMILIES, family_titles
from slime_tis.options.flags import Flag, flags_of
from slime_tis.trainer.cli.slime_flags import RESTATED
from slime_tis.trainer.port.gpus import count
from slime_tis.unsupported_families import NAMES

_QWEN3 = "--vocab-size 151936 --kv-channels 128 --qk-layernorm"
_UNTIED = "--untie-embeddings-and-output-weights"
_ROUTED = "--num-experts 128 --moe-router-topk 8"
_LATENT = (
    "--multi-latent-attention --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64"
    " --v-head-dim 128"
)
_DEEPSEEK_V3 = (
    "--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128"
    f" --vocab-size 129280 --q-lora-rank 1536 {_LATENT} --moe-layer-freq [0]*3+[1]*58"
    " --moe-ffn-hidden-size 2048 --num-experts 256 --moe-router-topk 8"
    f" --moe-shared-expert-intermediate-size 2048 --moe-router-score-function sigmoid {_UNTIED}"
)
_GPT_OSS = (
    "--hidden-size 2880 --ffn-hidden-size 2880 --num-attention-heads 64 --num-query-groups 8"
    f" --kv-channels 64 --vocab-size 201088 --moe-router-topk 4 {_UNTIED}"
)
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
    "qwen3-next-80b-a3b": (
        "--num-layers 48 --hidden-size 2048 --ffn-hidden-size 5120 --num-attention-heads 16 "
        "--num-query-groups 2 --vocab-size 151936 --kv-channels 256 --qk-layernorm"
        " --attention-output-gate --num-experts 512 --moe-router-topk 10 --moe-ffn-hidden-size 512"
        f" --moe-shared-expert-intermediate-size 512 --moe-shared-expert-gate {_UNTIED}"
    ),
    "llama-3.1-8b": (
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
        f"--num-query-groups 8 --vocab-size 128256 {_UNTIED}"
    ),
    "llama-3.2-3b": (
        "--num-layers 28 --hidden-size 3072 --ffn-hidden-size 8192 --num-attention-heads 24 "
        "--num-query-groups 8 --vocab-size 128256"
    ),
    "mistral-7b": (
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
        f"--num-query-groups 8 --vocab-size 32768 {_UNTIED}"
    ),
    "mistral-small-24b": (
        "--num-layers 40 --hidden-size 5120 --ffn-hidden-size 32768 --num-attention-heads 32 "
        f"--num-query-groups 8 --kv-channels 128 --vocab-size 131072 {_UNTIED}"
    ),
    "phi-4": (
        "--num-layers 40 --hidden-size 5120 --ffn-hidden-size 17920 --num-attention-heads 40 "
        f"--num-query-groups 10 --vocab-size 100352 {_UNTIED}"
    ),
    "smollm3-3b": (
        "--num-layers 36 --hidden-size 2048 --ffn-hidden-size 11008 --num-attention-heads 16 "
        "--num-query-groups 4 --vocab-size 128256"
    ),
    "olmo-2-0425-1b": (
        "--num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 16 "
        f"--vocab-size 100352 {_UNTIED}"
    ),
    "olmo-2-1124-7b": (
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 "
        f"--vocab-size 100352 {_UNTIED}"
    ),
    "olmo-2-1124-13b": (
        "--num-layers 40 --hidden-size 5120 --ffn-hidden-size 13824 --num-attention-heads 40 "
        f"--vocab-size 100352 {_UNTIED}"
    ),
    "olmo-2-0325-32b": (
        "--num-layers 64 --hidden-size 5120 --ffn-hidden-size 27648 --num-attention-heads 40 "
        f"--num-query-groups 8 --vocab-size 100352 {_UNTIED}"
    ),
    "mimo-7b": (
        "--num-layers 36 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 "
        f"--num-query-groups 8 --vocab-size 151680 --add-qkv-bias {_UNTIED}"
    ),
    "glm-4-9b-0414": (
        "--num-layers 40 --hidden-size 4096 --ffn-hidden-size 13696 --num-attention-heads 32 "
        f"--num-query-groups 2 --kv-channels 128 --vocab-size 151552 --add-qkv-bias {_UNTIED}"
    ),
    "glm-4-32b-0414": (
        "--num-layers 61 --hidden-size 6144 --ffn-hidden-size 23040 --num-attention-heads 48 "
        f"--num-query-groups 2 --kv-channels 128 --vocab-size 151552 {_UNTIED}"
    ),
    "glm-z1-32b-0414": (
        "--num-layers 61 --hidden-size 6144 --ffn-hidden-size 23040 --num-attention-heads 48 "
        f"--num-query-groups 8 --kv-channels 128 --vocab-size 151552 {_UNTIED}"
    ),
    "gemma-3-1b": (
        "--num-layers 26 --hidden-size 1152 --ffn-hidden-size 6912 --num-attention-heads 4"
        " --num-query-groups 1 --kv-channels 256 --vocab-size 262144"
    ),
    "gpt-oss-20b": f"--num-layers 24 --num-experts 32 {_GPT_OSS}",
    "gpt-oss-120b": f"--num-layers 36 --num-experts 128 {_GPT_OSS}",
    "deepseek-v2-lite": (
        "--num-layers 27 --hidden-size 2048 --ffn-hidden-size 10944 --num-attention-heads 16"
        f" --vocab-size 102400 {_LATENT} --moe-layer-freq [0]*1+[1]*26 --moe-ffn-hidden-size 1408"
        " --num-experts 64 --moe-router-topk 6 --moe-shared-expert-intermediate-size 2816"
        f" --moe-router-pre-softmax {_UNTIED}"
    ),
    "moonlight-16b-a3b": (
        "--num-layers 27 --hidden-size 2048 --ffn-hidden-size 11264 --num-attention-heads 16"
        f" --vocab-size 163840 {_LATENT} --moe-layer-freq [0]*1+[1]*26 --moe-ffn-hidden-size 1408"
        " --num-experts 64 --moe-router-topk 6 --moe-shared-expert-intermediate-size 2816"
        f" --moe-router-score-function sigmoid {_UNTIED}"
    ),
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-r1": _DEEPSEEK_V3,
    "kimi-k2": (
        "--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 64"
        f" --vocab-size 163840 --q-lora-rank 1536 {_LATENT} --moe-layer-freq [0]*1+[1]*60"
        " --moe-ffn-hidden-size 2048 --num-experts 384 --moe-router-topk 8"
        f" --moe-shared-expert-intermediate-size 2048 --moe-router-score-function sigmoid {_UNTIED}"
    ),
    "glm-4.7-flash": (
        "--num-layers 47 --hidden-size 2048 --ffn-hidden-size 10240 --num-attention-heads 20"
        " --vocab-size 154880 --multi-latent-attention --q-lora-rank 768 --kv-lora-rank 512"
        " --qk-head-dim 192 --qk-pos-emb-head-dim 64 --v-head-dim 256"
        " --moe-layer-freq [0]*1+[1]*46 --moe-ffn-hidden-size 1536 --num-experts 64"
        " --moe-router-topk 4 --moe-shared-expert-intermediate-size 1536"
        f" --moe-router-score-function sigmoid {_UNTIED}"
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

ARCHITECTURES: Mapping[str, str] = {
    "mistral": "MistralForCausalLM",
    "phi-4": "Phi3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "olmo-2": "Olmo2ForCausalLM",
    "mimo": "MiMoForCausalLM",
    "glm-4-": "Glm4ForCausalLM",
    "glm-z1-": "Glm4ForCausalLM",
    "gemma-3-": "Gemma3ForCausalLM",
}
"""Architectures that Megatron's flags do not tell, by the beginning of the directory's name."""

OTHER_FAMILIES = re.compile(
    r"(kimi-(?!k2)|kimi-k2\.|deepseek-v2(?!-lite)|deepseek-v3\.2|deepseek-v[4-9]|"
    r"gemma-?[124]|gemma-?3n|gemma-?3-(4b|12b|27b)|mimo-v|minimax|nemotron|"
    r"qwen3\.[5-9]|qwen\d(\.\d)?-(vl|omni)|glm-?4-9b-chat|"
    r"glm-?5|mistral-small-3\.[1-9]|mistral-large|mixtral|"
    r"phi-[1-3]|phi-4-(mini|multimodal)|olmoe)"
)
"""Names of models whose layers this program does not have."""
DISTILLED = re.compile(r"deepseek-r1-(distill|0528(?=-qwen3))-")
"""Beginning of the names of Qwen and Llama models that were distilled from DeepSeek-R1."""
QUANTIZED = re.compile(r"-(fp8|int4|int8|awq|gptq|nvfp4|mxfp4|mxfp8|w4a16|w8a8)\b")
"""Names of checkpoints with quantized weights."""
DEFAULT_CONTEXT_LEN = 1 << 20
"""A context that no script exceeds, since Megatron's flags seldom give it."""


def name_problem(directory: str) -> str | None:
    """Returns why train.py cannot load the checkpoint that a directory's name promises, or None."""
    name = PurePosixPath(directory).name.lower()
    if OTHER_FAMILIES.search(name):
        problem = (
            f"--hf-checkpoint is {directory}, by its name of an unsupported family; "
            f"supported are {family_titles()}"
        )
        for pattern, reason in NAMES.items():
            if re.search(pattern, name):
                problem += f". {reason.removesuffix('.')}"
        return problem
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
        The fields that decide layout and memory; None if neither flags nor name give the sizes.
    """
    sizes = _sizes(given)
    if sizes is None:
        name = PurePosixPath(directory).name.lower().replace("meta-llama-", "llama-")
        name = DISTILLED.sub("", name)
        matches = [published for published in PUBLISHED if published in name]
        if not matches:
            return None
        flags = flags_of(PUBLISHED[max(matches, key=len)].split())
        given = {flag.name: flag for flag in flags}
        sizes = _sizes(given)
        assert sizes is not None
    name = PurePosixPath(directory).name.lower()
    if name.startswith("gpt-oss") and "num_experts" in sizes:
        return sizes | {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "num_local_experts": sizes["num_experts"],
        }
    if "num_experts" in sizes:
        return sizes | _experts(given, sizes)
    for beginning, architecture in ARCHITECTURES.items():
        if name.startswith(beginning):
            return sizes | {
                "architectures": [architecture],
                "model_type": FAMILIES[architecture].model_type,
                "attention_bias": "--add-qkv-bias" in given,
            }
    # Megatron's flags have no name of a family: norms on queries and keys tell Qwen3 from the
    # others, and biases on projections tell Qwen2 from Llama.
    family = "Llama"
    if "--qk-layernorm" in given:
        family = "Qwen3"
    elif "--add-qkv-bias" in given:
        family = "Qwen2"
    return sizes | {"architectures": [f"{family}ForCausalLM"], "model_type": family.lower()}


def _sizes(given: Mapping[str, Flag]) -> dict[str, Any] | None:
    """Returns the numbers of config.json in Megatron's flags; None without essential sizes."""
    sizes: dict[str, Any] = {}
    for name, restated in RESTATED.items():
        number = count(given, name, 0)
        if restated.switch is None and number:
            sizes[restated.fact] = number
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
    # The angles of rotary embeddings change neither layout nor memory.
    angles = (
        "rope_theta",
        "rope_scaling_factor",
        "partial_rotary_factor",
        "mscale",
        "mscale_all_dim",
    )
    for name in angles:
        sizes.pop(name, None)
    sizes["tie_word_embeddings"] = _UNTIED not in given
    return sizes


def _experts(given: Mapping[str, Flag], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the family of a mixture of experts, and the fields that its configuration needs."""
    if "kv_lora_rank" in sizes:
        return _latent_experts(given, sizes)
    if "--attention-output-gate" in given:
        return {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "norm_topk_prob": "--moe-router-pre-softmax" not in given,
        }
    top_k = sizes.get("num_experts_per_tok", 1)
    score = given.get("--moe-router-score-function")
    if score is not None and score.values == ("sigmoid",):
        # With one group, `hf_directory` accepts any number of experts.
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
    family = "Qwen3Moe"
    model_type = "qwen3_moe"
    if "--moe-shared-expert-gate" in given:
        family = "Qwen2Moe"
        model_type = "qwen2_moe"
    return {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": model_type,
        "decoder_sparse_step": 1,
        # Megatron's pre-softmax does not divide the chosen probabilities by their sum; with one
        # expert the division would leave the router without a gradient.
        "norm_topk_prob": "--moe-router-pre-softmax" not in given and top_k > 1,
    }


def _latent_experts(given: Mapping[str, Flag], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a mixture of experts with latent attention.

    All such families have the layers of DeepSeek-V3, except for the router's scores.
    """
    layers = given.get("--moe-layer-freq")
    pattern = "" if layers is None else "".join(layers.values)
    dense = re.search(r"\[0\]\*(\d+)", pattern)
    shared = sizes.get("shared_expert_intermediate_size", sizes["moe_intermediate_size"])
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "head_dim": sizes["qk_rope_head_dim"],
        "num_key_value_heads": sizes["num_attention_heads"],
        "q_lora_rank": sizes.get("q_lora_rank"),
        "n_routed_experts": sizes["num_experts"],
        "n_shared_experts": shared // sizes["moe_intermediate_size"],
        "first_k_dense_replace": 0 if dense is None else int(dense[1]),
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": sizes.get("num_experts_per_tok", 1) > 1,
    }
