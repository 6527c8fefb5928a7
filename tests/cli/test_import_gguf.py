"""import-gguf: logits and tokens of the model that a file was made from; refusals before anything is written."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from slime_tis.hf_directory import check_tensors, read_model_config
from slime_tis.main import main
from slime_tis.trainer.engines.local.checkpoint import eos_token_ids, load_model, load_tokenizer
from tests.checkpoints import CHARACTERS, CHAT_TEMPLATE, make_checkpoint

gguf = pytest.importorskip("gguf", reason="the extra gguf is not installed")

from slime_tis.trainer.cli.import_gguf import INSIDE, OUTSIDE, Gguf, import_gguf, llama3_rope  # noqa: E402

TOKENS = torch.tensor([[1, 5, 9, 44, 17, 3, 60, 21]])
NAMES = {ours: theirs for theirs, ours in OUTSIDE.items()} | {f".{ours}.": f".{name}." for name, ours in INSIDE.items()}


def make_source(directory: Path, family: str, **sizes: Any) -> Path:
    """A checkpoint of tests.checkpoints whose tokenizer has one merge, `1` and `2`, in the place of its last letter."""
    make_checkpoint(directory, family, **sizes)
    characters = ["Ġ" if character == " " else character for character in CHARACTERS[:-1]]
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<bos>", "<eos>", *characters, "12"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("1", "2")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(directory)
    return directory


def pairs_from_halves(weights: np.ndarray, heads: int) -> np.ndarray:
    """The order of rows in llama.cpp's files, as its `LlamaModel.permute` writes it."""
    return (
        weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor."""
    if name in NAMES:
        return NAMES[name]
    name = name.replace("model.layers.", "blk.")
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


def write_gguf(
    path: Path, checkpoint: Path, family: str, *, kind: str = "F32", drop: str = "", **metadata: Any
) -> PreTrainedModel:
    """Writes a checkpoint of tests.checkpoints as GGUF, as llama.cpp does, and returns the model that it contains.

    Args:
        path: file to write.
        checkpoint: directory of `make_checkpoint`.
        family: of the checkpoint.
        kind: GGUF's type of the matrices; vectors are F32.
        drop: name of a tensor to leave out.
        metadata: more of it, by key with `__` for the dots; None leaves one out.
    """
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    config = model.config
    values = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
    }
    writer = gguf.GGUFWriter(path, metadata.pop("general__architecture", family))
    values = {f"{family}.{key}": value for key, value in values.items()}
    values |= {f"tokenizer.ggml.{name}_token_id": id for id, name in enumerate(("padding", "bos", "eos"))}
    values |= {key.replace("__", "."): value for key, value in metadata.items()}
    for key, value in values.items():
        if isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    writer.add_tokenizer_model("gpt2")
    if "tokenizer__ggml__pre" not in metadata:
        writer.add_tokenizer_pre("gpt-2")
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    writer.add_token_list(vocabulary)
    writer.add_token_types([3] * 3 + [1] * (len(vocabulary) - 3))
    writer.add_token_merges(["1 2"])
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHAT_TEMPLATE)
    quantization = gguf.GGMLQuantizationType[kind]
    for name, tensor in model.state_dict().items():
        if name == drop or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        weights = tensor.numpy().copy()
        if weights.ndim == 2 and kind != "F32":
            quantized = gguf.quantize(weights, quantization)
            tensor.copy_(torch.from_numpy(gguf.dequantize(quantized, quantization)))
            weights = tensor.numpy().copy()
        if family == "llama" and ".q_proj." in name:
            weights = pairs_from_halves(weights, config.num_attention_heads)
        if family == "llama" and ".k_proj." in name:
            weights = pairs_from_halves(weights, config.num_key_value_heads)
        if weights.ndim == 2 and kind != "F32":
            writer.add_tensor(gguf_name(name), gguf.quantize(weights, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(gguf_name(name), weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True], ids=["own output layer", "tied"])
def test_logits_and_tokens_are_those_of_the_model_that_the_file_was_made_from(
    tmp_path: Path, family: str, tied: bool
) -> None:
    source = make_source(tmp_path / "source", family, tie_word_embeddings=tied)
    model = write_gguf(tmp_path / "model.gguf", source, family)
    report = import_gguf(tmp_path / "model.gguf", tmp_path / "made")
    config = read_model_config(tmp_path / "made")
    check_tensors(tmp_path / "made", config)
    assert (config["rms_norm_eps"], config["head_dim"], config["tie_word_embeddings"]) == (1e-6, 16, tied)
    made = load_model(tmp_path / "made", torch.float32)
    with torch.no_grad():
        assert torch.equal(made(TOKENS).logits, model(TOKENS).logits)
    original, tokenizer = load_tokenizer(source), load_tokenizer(tmp_path / "made")
    for text in ("3121412 = x", "what No."):
        assert tokenizer.encode(text, add_special_tokens=False) == original.encode(text, add_special_tokens=False)
    merged = 0 if family == "qwen2" else 2  # transformers gives every Qwen2 checkpoint its splitting of digits
    assert len(tokenizer.encode("3121412 = x", add_special_tokens=False)) == 11 - merged
    assert tokenizer.decode(tokenizer.encode("31415 = x"), skip_special_tokens=True) == "31415 = x"
    assert tokenizer.chat_template == CHAT_TEMPLATE and tokenizer.model_max_length == 128
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert eos_token_ids(made, tokenizer) == (2,) and tokenizer.padding_side == "left"
    assert f"{made.num_parameters() / 1e6:.1f} million parameters in fp32" in report


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_quantized_weights_are_those_that_the_blocks_stand_for(tmp_path: Path, kind: str) -> None:
    sizes = {"hidden_size": 64, "head_dim": 16}
    source = make_source(tmp_path / "source", "llama", **sizes)
    model = write_gguf(tmp_path / "model.gguf", source, "llama", kind=kind)
    report = import_gguf(tmp_path / "model.gguf", tmp_path / "made")
    made = load_model(tmp_path / "made", torch.float32)
    for name, weights in model.state_dict().items():
        assert torch.equal(made.state_dict()[name], weights), name
    assert f"16 {kind}, 5 F32" in report


def test_bf16_weights_are_the_rounded_ones(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", "qwen3")
    model = write_gguf(tmp_path / "model.gguf", source, "qwen3")
    import_gguf(tmp_path / "model.gguf", tmp_path / "made", dtype="bf16")
    assert read_model_config(tmp_path / "made")["dtype"] == "bfloat16"
    made = load_model(tmp_path / "made", torch.bfloat16)
    for name, weights in model.state_dict().items():
        assert torch.equal(made.state_dict()[name], weights.bfloat16()), name


def test_smollm_takes_every_digit_by_itself(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", "llama")
    write_gguf(tmp_path / "model.gguf", source, "llama", tokenizer__ggml__pre="smollm")
    import_gguf(tmp_path / "model.gguf", tmp_path / "made")
    for name, expected in (("source", 3), ("made", 4)):  # 1 and 2 are one token, or two
        assert len(load_tokenizer(tmp_path / name).encode("3124", add_special_tokens=False)) == expected


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (
            {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 2.0},
            {"rope_type": "linear", "factor": 2.0},
        ),
        (
            {
                "llama__rope__scaling__type": "yarn",
                "llama__rope__scaling__factor": 4.0,
                "llama__rope__scaling__original_context_length": 32,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
    ],
    ids=["linear", "yarn"],
)
def test_rotary_scaling_comes_along(tmp_path: Path, metadata: dict[str, Any], expected: dict[str, Any]) -> None:
    source = make_source(tmp_path / "source", "llama")
    write_gguf(tmp_path / "model.gguf", source, "llama", **metadata)
    import_gguf(tmp_path / "model.gguf", tmp_path / "made")
    assert read_model_config(tmp_path / "made")["rope_parameters"] == {"rope_theta": 10000.0, **expected}


def test_divisors_of_llama_3_become_its_scaling() -> None:
    """Those of Llama 3.2, by the formula of its rotary scaling: factor 32, base 500000, heads of 64 numbers."""
    theta, width = 500000.0, 64
    frequencies = theta ** (-np.arange(0, width, 2) / width)
    wavelengths = 2 * np.pi / frequencies
    smooth = (8192 / wavelengths - 1) / 3
    divisors = np.where(
        wavelengths < 8192 / 4, 1.0, np.where(wavelengths > 8192, 32.0, 1 / ((1 - smooth) / 32 + smooth))
    )
    file = Gguf(path=Path("x.gguf"), reader=None, architecture="llama")  # type: ignore[arg-type]
    found = llama3_rope(file, divisors.astype(np.float32), theta)
    assert found["factor"] == 32.0 and found["rope_type"] == "llama3"
    with pytest.raises(ValueError, match="not those of Llama 3"):
        llama3_rope(file, divisors[::-1].astype(np.float32), theta)


def test_a_directory_that_is_not_an_import_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_source(tmp_path / "source", "llama")
    write_gguf(tmp_path / "model.gguf", source, "llama")
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "mine.txt").write_text("mine")
    assert main(["import-gguf", str(tmp_path / "model.gguf"), str(tmp_path / "made")]) == 2
    assert "it holds 'mine.txt', which this program did not write" in capsys.readouterr().err
    (tmp_path / "made" / "mine.txt").unlink()
    for _ in range(2):  # an import may be made again
        assert main(["import-gguf", str(tmp_path / "model.gguf"), str(tmp_path / "made"), "--dtype", "bf16"]) == 0
        assert "LlamaForCausalLM, 2 layers" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "model.gguf", "source"]


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (OSError("no space left on device"), 1, "error: no space left on device"),
        (KeyboardInterrupt(), 130, "interrupted; what was not complete is removed."),
    ],
    ids=["full disk", "Ctrl-C"],
)
def test_what_fails_while_writing_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    status: int,
    message: str,
) -> None:
    source = make_source(tmp_path / "source", "llama")
    write_gguf(tmp_path / "model.gguf", source, "llama")

    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("slime_tis.trainer.storage.hf_checkpoint.save_file", fails)
    capsys.readouterr()
    assert main(["import-gguf", str(tmp_path / "model.gguf"), str(tmp_path / "made")]) == status
    assert capsys.readouterr().err == f"{message}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "source"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drop": "model.norm.weight"}, "has no tensor for model.norm.weight; the file is incomplete"),
        ({"llama__feed_forward_length": 60}, "of shape [64, 32] where its metadata say [60, 32]"),
        ({"llama__block_count": 1}, "has the tensor blk.1."),
        ({"llama__embedding_length": None}, "has llama.embedding_length None where a number is needed"),
        ({"llama__expert_count": 8}, "is a mixture of experts"),
        ({"llama__attention__value_length": 8}, "llama.attention.value_length 8, but heads of 16 numbers"),
        ({"llama__attention__sliding_window": 64}, "has sliding-window attention"),
        ({"llama__rope__scaling__type": "longrope"}, "scales rotary positions by 'longrope'"),
        ({"split__count": 3}, "is one of several parts"),
        ({"general__architecture": "gemma2"}, "is of the architecture 'gemma2'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_files_that_cannot_be_imported(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    source = make_source(tmp_path / "source", "llama")
    write_gguf(tmp_path / "model.gguf", source, "llama", **change)
    with pytest.raises(ValueError) as error:
        import_gguf(tmp_path / "model.gguf", tmp_path / "made")
    assert message in str(error.value) and not (tmp_path / "made").exists()


@pytest.mark.parametrize("content", [b"", b"GGUF", b"PK\x03\x04 no such thing"], ids=["empty", "cut", "zip"])
def test_other_files_are_refused_with_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    assert main(["import-gguf", str(tmp_path / "model.gguf"), str(tmp_path / "made")]) == 2
    found = capsys.readouterr().err
    assert "does not read as GGUF" in found and found.count("\n") == 1
    assert main(["import-gguf", str(tmp_path / "nothing.gguf"), str(tmp_path / "made")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["import-gguf", str(tmp_path), str(tmp_path / "made")]) == 2
    assert "is not a file; give a GGUF file." in capsys.readouterr().err
    assert main(["import-gguf", str(tmp_path / "model.gguf"), str(tmp_path / "model.gguf" / "made")]) == 2
    assert capsys.readouterr().err.endswith(f"made' but {str(tmp_path / 'model.gguf')!r} is a file; give another.\n")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"needs the package gguf; pip install 'slime_tis\[train,gguf\]'"):
        import_gguf(tmp_path / "model.gguf", tmp_path / "made")
