"""LoRA adapters on the command line: targets, and models whose layers cannot have them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slime_tis.families import FAMILIES
from slime_tis.peft_directory import AdapterConfig, tensor_name, write_adapter
from slime_tis.trainer.configs.adapter_targets import check_adapters
from slime_tis.trainer.configs.megatron import MegatronConfig
from slime_tis.trainer.configs.server_engines import SERVER_ENGINES
from slime_tis.trainer.engines.vllm.vllm_api import ADAPTER_RANKS
from tests.cli.conftest import configured, refusal

OTHER_MODELS = {
    "experts": (
        "Qwen3MoeForCausalLM",
        "gate_proj, up_proj, down_proj of this model are in experts",
    ),
    "fused projections": ("Phi3ForCausalLM", "Use --lora-target-modules o_proj down_proj."),
    "recurrence": ("Qwen3NextForCausalLM", "--lora-rank is given but most layers of Qwen3-Next"),
    "fused gate": ("Glm4ForCausalLM", "has no gate_proj, up_proj, but fuses them"),
    "fused experts": (
        "GptOssForCausalLM",
        "Use --lora-target-modules q_proj k_proj v_proj o_proj.",
    ),
}


def use_model(architecture):
    """Changes the family of the checkpoint of `base`."""
    path = Path("model", "config.json")
    model = json.loads(path.read_text()) | {
        "architectures": [architecture],
        "model_type": FAMILIES[architecture].model_type,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "num_experts_per_tok": 2,
    }
    path.write_text(json.dumps(model))


@pytest.mark.parametrize(("architecture", "message"), OTHER_MODELS.values(), ids=OTHER_MODELS)
def test_layers_without_adapters_are_refused(architecture, message, base):
    use_model(architecture)
    assert message in refusal(base + "--lora-rank 8")


@pytest.mark.parametrize("target", ["q_proj", "k_proj", "v_proj"])
def test_the_inputs_of_latent_attention_are_refused(target):
    config = MegatronConfig(
        hf_checkpoint="model", lora_rank=8, lora_target_modules=(target, "o_proj")
    )
    with pytest.raises(ValueError, match=f"DeepSeek-V2-Lite supports no adapters of {target}"):
        check_adapters(config, FAMILIES["DeepseekV2ForCausalLM"])


ADVISED = [
    "Phi3ForCausalLM",
    "Glm4ForCausalLM",
    "GptOssForCausalLM",
    "Qwen2MoeForCausalLM",
    "DeepseekV2ForCausalLM",
    "Glm4MoeLiteForCausalLM",
]
"""Models in which not all linear layers can have adapters."""


@pytest.mark.parametrize("architecture", ADVISED)
def test_the_layers_that_a_refusal_advises_are_accepted(architecture):
    config = MegatronConfig(hf_checkpoint="model", lora_rank=8)
    with pytest.raises(ValueError) as error:
        check_adapters(config, FAMILIES[architecture])
    advised = str(error.value).rpartition("--lora-target-modules ")[2].removesuffix(".")
    config = replace(config, lora_target_modules=tuple(advised.split()))
    check_adapters(config, FAMILIES[architecture])


def test_the_layers_of_a_saved_adapter_are_named_with_its_option(base):
    """Without --lora-target-modules in the advice, which does not go with a saved adapter."""
    use_model("Phi3ForCausalLM")
    path = Path("adapter")
    path.mkdir()
    layer = "model.layers.0.self_attn.q_proj"
    tensors = {
        tensor_name(layer, "A"): torch.zeros(4, 32),
        tensor_name(layer, "B"): torch.zeros(32, 4),
    }
    config = AdapterConfig(rank=4, alpha=8.0, targets=("q_proj",))
    write_adapter(path, tensors, config, base="model")
    message = refusal(base + "--lora-adapter-path adapter")
    assert message.startswith("--lora-adapter-path is 'adapter': a Phi-4 checkpoint has no q_proj")
    assert message.endswith("Give an adapter of only o_proj down_proj.")


def test_layers_that_are_not_fused_are_accepted(base):
    use_model("Phi3ForCausalLM")
    config = configured(base + "--lora-rank 8 --lora-target-modules o_proj,down_proj").megatron
    assert config.lora_targets == ("o_proj", "down_proj")


# (flags, targets)
TARGETS = {
    "unset": ("", ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
    "all": ("--lora-target-modules all-linear", None),
    "words": ("--lora-target-modules v_proj q_proj", ("v_proj", "q_proj")),
    "commas": ("--target-modules 'v_proj, q_proj,v_proj'", ("v_proj", "q_proj")),
}


@pytest.mark.parametrize(("flags", "expected"), TARGETS.values(), ids=TARGETS)
def test_targets_are_separated_by_blanks_or_commas(flags, expected, base):
    targets = configured(f"{base} --lora-r 8 {flags}").megatron.lora_targets
    assert targets == (expected or TARGETS["unset"][1])


def test_small_updates_of_merged_adapters_may_be_rounded_at_random(base):
    flags = "--bf16 --lora-rank 8 --weight-update-rounding stochastic --rollout-precision bf16"
    assert configured(base + flags).rollout.weight_update_rounding == "stochastic"


def test_a_second_directory_of_the_export_is_refused_by_its_option(base):
    flags = "--lora-rank 8 --merge-lora --save-hf hf --save hf-adapter"
    message = "--merge-lora writes the adapter to 'hf-adapter', which is the same as --save"
    assert message in refusal(base + flags)


SERVERS = "--lora-rank 513 --rollout-lora unmerged --rollout-engine vllm --vllm-weight-sync"
# flags, and the message
UNABLE = {
    "rank": (f"{SERVERS} disk --vllm-launch 1", "up to rank 512, but they have rank 513"),
    "transport": (f"{SERVERS} distributed --vllm-launch 1", "needs --vllm-weight-sync disk"),
    "router": (
        f"{SERVERS} disk --vllm-router-ip 127.0.0.1 --vllm-router-port 9",
        "does not work with --vllm-router-ip",
    ),
}


@pytest.mark.parametrize(("flags", "message"), UNABLE.values(), ids=UNABLE)
def test_servers_that_load_no_adapter_are_refused_with_the_alternative(flags, message, base):
    refused = refusal(base + flags)
    assert message in refused
    assert refused.endswith("send merged weights: --rollout-lora merged.")


def test_the_largest_rank_is_that_of_the_slots():
    assert SERVER_ENGINES["vllm"].max_adapter_rank == ADAPTER_RANKS[-1]
