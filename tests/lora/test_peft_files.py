"""Adapters that PEFT itself saves: plain LoRA is read, other methods are refused by name."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.config import BdLoraConfig, KasaConfig, LoraGAConfig, VeloraConfig
from transformers import LlamaConfig, LlamaForCausalLM

from slime_tis.peft_directory import (
    CONFIG,
    NEUTRAL,
    WITHOUT_EFFECT,
    AdapterConfig,
    read_adapter_config,
)

QV = ["q_proj", "v_proj"]
ALL = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")


def saved_config(directory: Path, **options: Any) -> LoraConfig:
    """Saves an adapter of a tiny model with PEFT; returns its configuration."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=64, num_attention_heads=4, num_key_value_heads=2, **sizes)
    lora = LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **options)
    model = get_peft_model(LlamaForCausalLM(config).to(torch.float32), lora)
    model.save_pretrained(str(directory))
    return model.peft_config["default"]


def test_every_field_of_a_lora_config_is_known() -> None:
    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    assert fields - set(NEUTRAL) - WITHOUT_EFFECT == set()


# options of LoraConfig; α and the adapted layers
PLAIN = {
    "plain": ({"target_modules": QV}, 8, ("q_proj", "v_proj")),
    "all linear layers": ({"target_modules": "all-linear"}, 8, ALL),
    "expression": ({"target_modules": r".*\.(q_proj|down_proj)"}, 8, ("down_proj", "q_proj")),
    "rank-stabilized": ({"target_modules": QV, "use_rslora": True}, 16, ("q_proj", "v_proj")),
    "gaussian": ({"target_modules": QV, "init_lora_weights": "gaussian"}, 8, ("q_proj", "v_proj")),
}


@pytest.mark.parametrize(("options", "alpha", "targets"), PLAIN.values(), ids=PLAIN)
def test_plain_lora_is_read(
    options: dict[str, Any], alpha: float, targets: tuple[str, ...], tmp_path: Path
) -> None:
    saved_config(tmp_path, **options)
    expected = AdapterConfig(rank=4, alpha=alpha, targets=targets)
    assert read_adapter_config(tmp_path, "x") == expected


def test_the_fields_that_verl_saves_are_read(tmp_path: Path) -> None:
    """verl and SkyRL save `asdict` of the configuration, which has more fields than PEFT saves."""
    fields = dataclasses.asdict(saved_config(tmp_path, target_modules=QV))
    fields["peft_type"] = fields["peft_type"].value
    fields["target_modules"] = sorted(fields["target_modules"])
    (tmp_path / CONFIG).write_text(json.dumps(fields))
    assert read_adapter_config(tmp_path, "x").rank == 4


BLOCKS = BdLoraConfig(target_modules_bd_a=["q_proj"], target_modules_bd_b=["v_proj"], nblocks=2)
# options of LoraConfig; a part of the refusal
OTHER_METHODS = {
    "DoRA": ({"use_dora": True}, "use_dora True"),
    "PiSSA": ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
    "OLoRA": ({"init_lora_weights": "olora"}, "init_lora_weights 'olora'"),
    "LoRA-GA": (
        {"init_lora_weights": "lora_ga", "lora_ga_config": LoraGAConfig()},
        "init_lora_weights 'lora_ga'",
    ),
    "KaSA": ({"kasa_config": KasaConfig()}, "kasa_config"),
    "VeLoRA": ({"velora_config": VeloraConfig(num_groups=2)}, "velora_config"),
    "aLoRA": ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens"),
    "BD-LoRA": ({"use_bdlora": BLOCKS}, "use_bdlora"),
    "biases": ({"bias": "lora_only"}, "bias 'lora_only'"),
    "ranks per layer": ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
    "some layers": ({"layers_to_transform": [0]}, "layers_to_transform"),
    "output layer": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
}


@pytest.mark.parametrize(("options", "field"), OTHER_METHODS.values(), ids=OTHER_METHODS)
def test_other_methods_are_refused_by_their_field(
    options: dict[str, Any], field: str, tmp_path: Path
) -> None:
    saved_config(tmp_path, target_modules=QV, **options)
    with pytest.raises(ValueError, match=f"has {field}.*; only plain LoRA is supported"):
        read_adapter_config(tmp_path, "x")
