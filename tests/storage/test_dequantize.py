"""Checkpoints in fp8 and mxfp4, written as bfloat16."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_tis.hf_directory import read_model_config
from slime_tis.hf_tensors import check_tensors
from slime_tis.trainer.storage.dequantize import dequantize, dequantized_tensors, scaled_blocks
from tests.checkpoints import make_checkpoint

UP = "model.layers.0.mlp.up_proj.weight"
FP8 = {"quant_method": "fp8", "weight_block_size": [16, 32], "activation_scheme": "dynamic"}


def quantize(directory: Path) -> dict[str, torch.Tensor]:
    """Makes a checkpoint fp8, with the scale 0.5 for every block.

    Returns:
        The tensors in bfloat16.
    """
    expected = {}
    stored = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if "_proj" in name:
            rows, columns = tensor.shape
            stored[name] = tensor.to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = torch.full((-(-rows // 16), -(-columns // 32)), 0.5)
            expected[name] = (stored[name].float() * 0.5).bfloat16()
        else:
            stored[name] = tensor.bfloat16()
            expected[name] = stored[name]
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": FP8}))
    return expected


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """The directory of a converted fp8 checkpoint, and the tensors that it must have."""
    root = tmp_path_factory.mktemp("fp8")
    expected = quantize(make_checkpoint(root / "model", "qwen3"))
    return dequantize(root / "model", root / "bf16"), expected


SIGNALLED = """
import os, signal, sys
from slime_tis.trainer.storage import dequantize

write = dequantize.write_hf_checkpoint

def signalled(*args, **options):
    write(*args, **options)
    os.kill(os.getpid(), signal.SIGTERM)

dequantize.write_hf_checkpoint = signalled
sys.exit(dequantize.main())
"""
"""A conversion that gets SIGTERM after its last tensor."""


def test_sigterm_leaves_no_unfinished_conversion(tmp_path):
    quantize(make_checkpoint(tmp_path / "model", "qwen3"))
    command = [sys.executable, "-c", SIGNALLED, "model", "bf16"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 128 + signal.SIGTERM
    assert run.stderr == "ended by SIGTERM; unfinished files are removed.\n"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_every_tensor_is_converted(converted):
    directory, expected = converted
    tensors = load_file(directory / "model.safetensors")
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())


def test_the_converted_checkpoint_is_accepted(converted):
    directory, _ = converted
    check_tensors(directory, read_model_config(directory))


def test_each_block_has_its_own_scale():
    weight = torch.ones(3, 3, dtype=torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    assert scaled_blocks(weight, scale, (2, 2)).tolist() == [[1, 1, 2], [1, 1, 2], [4, 4, 8]]


def test_four_bit_numbers_of_gpt_oss(tmp_path):
    # 16 bytes are 32 numbers: 0x2 is 1, 0xA is -1; the lower half of a byte comes first.
    blocks = torch.full((1, 1, 1, 16), 0xA2, dtype=torch.uint8)
    scales = torch.tensor([[[128]]], dtype=torch.uint8)  # 2 ** (128 - 127)
    stored = {"experts.down_proj_blocks": blocks, "experts.down_proj_scales": scales}
    save_file(stored, tmp_path / "model.safetensors")
    ((name, tensor),) = dequantized_tensors(tmp_path, (1, 1))
    assert name == "experts.down_proj"
    assert tensor.flatten().tolist() == [2.0, -2.0] * 16


def test_the_refusal_of_fp8_names_the_command(tmp_path):
    quantize(make_checkpoint(tmp_path, "qwen3"))
    with pytest.raises(ValueError, match=r"python -m slime_tis\.trainer\.storage\.dequantize"):
        read_model_config(tmp_path)


def test_a_checkpoint_without_quantization_is_refused(tmp_path):
    make_checkpoint(tmp_path / "model", "qwen3")
    with pytest.raises(ValueError, match="has no quantization_config"):
        dequantize(tmp_path / "model", tmp_path / "out")


def test_another_format_is_refused(tmp_path):
    path = make_checkpoint(tmp_path / "model", "qwen3") / "config.json"
    fields = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "awq"}}
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="known are mxfp4, and fp8"):
        dequantize(tmp_path / "model", tmp_path / "out")


def test_a_missing_scale_leaves_nothing_behind(tmp_path):
    model = make_checkpoint(tmp_path / "model", "qwen3")
    quantize(model)
    tensors = load_file(model / "model.safetensors")
    del tensors[f"{UP}_scale_inv"]
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"no tensor {UP}_scale_inv"):
        dequantize(model, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_scales_of_another_block_size_are_refused(tmp_path):
    model = make_checkpoint(tmp_path / "model", "qwen3")
    quantize(model)
    path = model / "config.json"
    fields = json.loads(path.read_text())
    # with blocks of twice the rows, half of the scales would be ignored
    fields["quantization_config"]["weight_block_size"] = [32, 32]
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="_scale_inv has the shape"):
        dequantize(model, tmp_path / "out")


def test_an_fp8_tensor_that_is_not_a_matrix_is_refused(tmp_path):
    model = make_checkpoint(tmp_path / "model", "qwen3")
    quantize(model)
    tensors = load_file(model / "model.safetensors")
    tensors[UP] = tensors[UP][None]
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"the fp8 tensor {UP} has the shape"):
        dequantize(model, tmp_path / "out")


def test_a_name_of_the_hub_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no config"):
        dequantize("deepseek-ai/DeepSeek-V3", tmp_path / "out")
