"""`slime-tis plan`: memory of LoRA adapters in the rollout engine."""

import pytest

from slime_tis.hf_directory import load_config
from slime_tis.main import main
from slime_tis.trainer.adapter_plan import sglang_slot_values, vllm_slot_values
from tests.checkpoints import make_checkpoint

# family, sizes, and bytes of the tensors that a real vLLM 0.32.0 server on a CPU has for four slots
# of rank 8 in float32
VLLM_SLOTS = {
    "tied output layer": ("qwen3", {"tie_word_embeddings": True}, 180_224),
    "own output layer": ("llama", {}, 180_224),
    "experts": ("qwen3_moe", {}, 460_800),
}


@pytest.mark.parametrize(("family", "sizes", "measured"), VLLM_SLOTS.values(), ids=VLLM_SLOTS)
def test_slots_of_vllm_are_those_of_a_server(family, sizes, measured, tmp_path):
    hf = load_config(make_checkpoint(tmp_path, family, **sizes))
    assert vllm_slot_values(hf) * 4 * 8 * 4 == measured


def test_sglang_reserves_all_of_a_fused_layer(tmp_path):
    hf = load_config(make_checkpoint(tmp_path, "qwen3"))
    # queries have 64 rows, keys and values 32 each, all with 32 columns; two layers
    assert sglang_slot_values(hf, ["v_proj"]) == 2 * (3 * 32 + 64 + 32 + 32)


@pytest.fixture
def planned(tmp_path, capsys, monkeypatch):
    """Returns the plan of a tiny model with adapters of rank 8, and more flags."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    checkpoint = make_checkpoint(tmp_path, "qwen3", vocab_size=4096)
    capsys.readouterr()  # the progress of saving

    def plan(flags, status=0):
        words = ["plan", "--world-size", "1", "--hf-checkpoint", str(checkpoint)]
        assert main([*words, "--lora-rank", "8", *flags.split()]) == status
        return "".join(capsys.readouterr())

    return plan


VLLM = "--rollout-lora unmerged --rollout-engine vllm --vllm-launch 1 --vllm-weight-sync disk"
SGLANG = "--rollout-lora unmerged --rollout-engine sglang --sglang-launch 1"
LINES = {
    # (4096 + 32) · 2 + 1216 values in each of 8 ranks, in 16 bits
    "vLLM": (VLLM, "vLLM: 4 slots of rank 8 for all linear layers, the embedding and"),
    "size of vLLM's": (VLLM, f"take {4 * 8 * (2 * 4128 + 1216) * 2 / 2**20:.1f} MiB"),
    "float32": (f"{VLLM} --vllm-dtype float32", f"{4 * 8 * 9472 * 4 / 2**20:.1f} MiB of GPU"),
    "more slots": (f"{VLLM} --vllm-max-loras 32", "vLLM: 32 slots of rank 8"),
    "two versions": (VLLM, "two versions are held while requests finish with the older one"),
    "SGLang": (SGLANG, "SGLang: 8 slots of rank 8 for the layers with an adapter"),
    "fewer slots": (f"{SGLANG} --sglang-max-loras-per-batch 2", "SGLang: 2 slots"),
    "local engine": ("--rollout-lora unmerged", "LoRA adapters in the local engine: "),
}


@pytest.mark.parametrize(("flags", "line"), LINES.values(), ids=LINES)
def test_the_plan_counts_adapters_of_the_engine(flags, line, planned):
    assert line in planned(flags)


def test_a_merged_adapter_takes_nothing_in_the_engine(planned):
    assert "LoRA adapters" not in planned("").replace("are LoRA adapters; the others", "")


def test_an_update_without_merging_sends_the_adapter(planned):
    sent = 2 * 8 * (3 * 32 + 128 + 64 + 32 + 2 * (32 + 64) + 64 + 32) * 4 / 1e9
    assert f"Weight update: {sent:.4g} GB" in planned("--rollout-lora unmerged")


def test_slots_that_are_no_number_are_refused(planned):
    message = planned(f"{VLLM} --vllm-max-loras many", status=2)
    assert message == "the server's flag --max-loras is 'many' but must be 1 or more.\n"


def test_a_rank_without_slots_is_refused(planned):
    message = planned(f"{VLLM} --lora-rank 1000", status=2)
    assert message.startswith("vLLM takes LoRA adapters up to rank 512")
