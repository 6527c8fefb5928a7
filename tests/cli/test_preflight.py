"""Files that a run starts from, looked at before anything is built."""

import shlex

import pytest

from slime_tis.trainer.cli.arguments import parse_args
from tests.cli.conftest import configured, refusal


def test_empty_prompt_file_is_refused(base, tmp_path):
    (tmp_path / "train.jsonl").write_text("")
    assert refusal(base) == "--prompt-data is 'train.jsonl' but the file is empty; give one prompt per row."


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            '{"architectures": ["MambaForCausalLM"]}',
            "--hf-checkpoint is 'model' of the architecture MambaForCausalLM but supported are "
            "LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen2MoeForCausalLM, Qwen3MoeForCausalLM, "
            "Glm4MoeForCausalLM; give a checkpoint of one of these.",
        ),
        (
            '{"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512}',
            "--hf-checkpoint is 'model' of the architecture DeepseekV3ForCausalLM with multi-head latent attention but "
            "supported are LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen2MoeForCausalLM, "
            "Qwen3MoeForCausalLM, Glm4MoeForCausalLM; give a checkpoint of one of these.",
        ),
        (
            "[]",
            "--hf-checkpoint is 'model' but its config.json is JSON of type list and must be an object.",
        ),
        (
            "{",
            "--hf-checkpoint is 'model' but its config.json is not JSON: Expecting property name enclosed in "
            "double quotes: line 1 column 2 (char 1).",
        ),
    ],
    ids=["another architecture", "latent attention", "a list", "cut JSON"],
)
def test_unusable_checkpoint_is_refused(base, tmp_path, config, message):
    (tmp_path / "model" / "config.json").write_text(config)
    assert refusal(base) == message


@pytest.mark.parametrize(("layers", "message"), [(2, None), (3, "must divide the 2 layers"), (99, "must divide the 2")])
def test_recomputation_in_chunks_that_do_not_divide_the_layers_is_refused(base, layers, message):
    line = f"{base}--recompute-granularity full --recompute-num-layers {layers} --recompute-method "
    assert configured(line + "block").megatron.recompute_num_layers == layers
    if message is None:
        configured(line + "uniform")
    else:
        assert message in refusal(line + "uniform")


def test_a_checkpoint_without_weights_is_refused_with_code_2(base, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_args(shlex.split(base))
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("model has no model.safetensors and no model.safetensors.index.json; only checkpoints in")
    assert error.count("\n") == 1
