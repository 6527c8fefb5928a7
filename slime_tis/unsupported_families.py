"""Published families that `train.py` refuses, with the reason and what to train instead."""

from collections.abc import Mapping

WITH_SLIME = (
    "train it with slime or miles, which take this project's corrections by"
    " --custom-tis-function-path"
)
_QWEN_WITH_IMAGES = (
    "It reads images; only checkpoints for text are supported. Train the text model of a dense"
    f" Qwen3.5, which docs/models.md extracts, or Qwen3-Next here, or {WITH_SLIME}."
)
_QWEN_WITH_EXPERTS = (
    "Of Qwen3.5, only dense text models are supported. Train Qwen3-Next here, which has the same"
    f" layers, or {WITH_SLIME}."
)
_INDEXER = (
    "Its attention sees only the tokens that an indexer chooses, and no layer here has one. Train"
    f" DeepSeek-V3 or GLM-4.7-Flash here, or {WITH_SLIME}."
)
_IMAGES = "It reads images; only checkpoints for text are supported."
UNSUPPORTED: Mapping[str, str] = {
    "Qwen3_5ForConditionalGeneration": _QWEN_WITH_IMAGES,
    "Qwen3_5MoeForCausalLM": _QWEN_WITH_EXPERTS,
    "Qwen3_5MoeForConditionalGeneration": _QWEN_WITH_EXPERTS,
    "DeepseekV32ForCausalLM": _INDEXER,
    "GlmMoeDsaForCausalLM": _INDEXER,
    "Gemma3ForConditionalGeneration": _IMAGES,
    "Mistral3ForConditionalGeneration": _IMAGES,
    "Qwen2_5_VLForConditionalGeneration": _IMAGES,
    "Qwen3VLForConditionalGeneration": _IMAGES,
    "Qwen3VLMoeForConditionalGeneration": _IMAGES,
}
"""Sentences for the message, by the architecture in config.json."""
NAMES: Mapping[str, str] = {
    r"qwen3\.[5-9]": _QWEN_WITH_IMAGES,
    r"deepseek-v3\.2|glm-?5": _INDEXER,
}
"""The same by a pattern of directory names in lower case, for scripts without the checkpoint."""
