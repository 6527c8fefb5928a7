"""import-gguf: logits and tokens equal the source model's; bad files are refused."""

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from slime_tis.trainer.engines.local.load_model import eos_token_ids, load_model, load_tokenizer
from tests.checkpoints import CHARACTERS, CHAT_TEMPLATE, make_checkpoint

gguf = pytest.importorskip("gguf", reason="the extra gguf is not installed")

from examples.smollm2_reasoning_gym.import_gguf import import_gguf, main  # noqa: E402

TOKENS = torch.tensor([[1, 5, 9, 44, 17, 3, 60, 21]])


def make_source(directory, family, **sizes):
    """A checkpoint whose tokenizer has one merge, `1` and `2`, instead of its last letter."""
    make_checkpoint(directory, family, **sizes)
    characters = ["Ġ" if character == " " else character for character in CHARACTERS[:-1]]
    vocabulary = {
        token: index for index, token in enumerate(["<pad>", "<bos>", "<eos>", *characters, "12"])
    }
    tokenizer = Tokenizer(models.BPE(vocabulary, [("1", "2")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **special, chat_template=CHAT_TEMPLATE
    )
    fast.save_pretrained(directory)
    return directory


def write_gguf(directory, family, *, kind="F32", drop="", tied=False, **metadata):
    """Writes `source` and `model.gguf` as llama.cpp does; returns the model of the GGUF file.

    Matrices have the type `kind`. The tensor `drop` is omitted. `metadata` has further keys, with
    `__` for the dots; None removes a key.
    """
    source = make_source(
        directory / "source", family, hidden_size=64, head_dim=16, tie_word_embeddings=tied
    )
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config, tokenizer = model.config, AutoTokenizer.from_pretrained(source)
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
    writer = gguf.GGUFWriter(
        directory / "model.gguf", metadata.pop("general__architecture", family)
    )
    values = {f"{family}.{key}": value for key, value in values.items()} | {
        "tokenizer.ggml.pre": "gpt-2"
    }
    values |= {
        f"tokenizer.ggml.{name}_token_id": id for id, name in enumerate(("padding", "bos", "eos"))
    }
    for key, value in (
        values | {key.replace("__", "."): value for key, value in metadata.items()}
    ).items():
        add = {float: writer.add_float32, str: writer.add_string, int: writer.add_uint32}.get(
            type(value)
        )
        if add is not None:
            add(key, value)
    writer.add_tokenizer_model("gpt2")
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    writer.add_token_list(vocabulary)
    writer.add_token_types([3] * 3 + [1] * (len(vocabulary) - 3))
    writer.add_token_merges(["1 2"])
    writer.add_chat_template(CHAT_TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], config.num_hidden_layers)
    quantization = gguf.GGMLQuantizationType[kind]
    for name, tensor in model.state_dict().items():
        if name == drop or (tied and name == "lm_head.weight"):
            continue
        weights, raw = tensor.numpy().copy(), None
        if weights.ndim == 2 and kind != "F32":
            weights = gguf.dequantize(gguf.quantize(weights, quantization), quantization)
            tensor.copy_(torch.from_numpy(weights))
            raw = quantization
        for part, heads in (
            (".q_proj.", config.num_attention_heads),
            (".k_proj.", config.num_key_value_heads),
        ):
            if family == "llama" and part in name:  # llama.cpp's `LlamaModel.permute`
                weights = (
                    weights.reshape(heads, 2, -1, *weights.shape[1:])
                    .swapaxes(1, 2)
                    .reshape(weights.shape)
                )
        blocks = weights if raw is None else gguf.quantize(weights, quantization)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), blocks, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@dataclass(frozen=True)
class ImportedModel:
    """A GGUF file's model before and after its import."""

    family: str
    source: PreTrainedModel
    directory: Path
    report: str

    @property
    def model(self) -> PreTrainedModel:
        return load_model(self.directory / "made", torch.float32)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.directory / "made")


@pytest.fixture(
    scope="module",
    params=[(family, tied) for family in ("llama", "qwen2", "qwen3") for tied in (False, True)],
    ids=lambda case: f"{case[0]}, {'tied' if case[1] else 'separate output layer'}",
)
def imported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ImportedModel:
    family, tied = request.param
    directory = tmp_path_factory.mktemp("gguf")
    source = write_gguf(directory, family, tied=tied)
    report = import_gguf(directory / "model.gguf", directory / "made")
    return ImportedModel(family, source, directory, report)


def test_logits_equal_those_of_the_source(imported):
    with torch.no_grad():
        assert torch.equal(imported.model(TOKENS).logits, imported.source(TOKENS).logits)


@pytest.mark.parametrize("text", ["3121412 = x", "what No."])
def test_tokens_equal_those_of_the_source(imported, text):
    source = load_tokenizer(imported.directory / "source")
    expected = source.encode(text, add_special_tokens=False)
    assert imported.tokenizer.encode(text, add_special_tokens=False) == expected


def test_digits_merge_as_the_family_does(imported):
    # transformers splits digits in every Qwen2 checkpoint
    merged = 0 if imported.family == "qwen2" else 2
    assert len(imported.tokenizer.encode("3121412 = x", add_special_tokens=False)) == 11 - merged


def test_special_tokens_are_those_of_the_file(imported):
    tokenizer = imported.tokenizer
    ids = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert ids == (0, 1, 2)
    assert eos_token_ids(imported.model, tokenizer) == (2,)


def test_template_length_and_epsilon_are_those_of_the_file(imported):
    assert imported.tokenizer.chat_template == CHAT_TEMPLATE
    assert imported.tokenizer.model_max_length == 128
    assert imported.model.config.rms_norm_eps == 1e-6


def test_the_report_has_the_size_without_warnings(imported):
    millions = imported.model.num_parameters() / 1e6
    assert f"{millions:.1f} million parameters in fp32" in imported.report
    assert "warning" not in imported.report


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("F16", "fp32"), ("BF16", "bf16"), ("Q8_0", "fp32"), ("Q5_1", "bf16"), ("Q4_1", "fp32")],
    ids=str,
)
def test_quantized_weights_are_exact(tmp_path, kind, dtype):
    model = write_gguf(tmp_path, "llama", kind=kind)
    assert f"16 {kind}, 5 F32" in import_gguf(
        tmp_path / "model.gguf", tmp_path / "made", dtype=dtype
    )
    expected = torch.float32 if dtype == "fp32" else torch.bfloat16
    made = load_model(tmp_path / "made", expected).state_dict()
    assert all(
        torch.equal(made[name], weights.to(expected))
        for name, weights in model.state_dict().items()
    )
    assert json.loads((tmp_path / "made/config.json").read_text())["dtype"] == str(
        expected
    ).removeprefix("torch.")


@pytest.mark.parametrize(
    ("pre_tokenizer", "tokens"), [("smollm", 4), ("gpt-2", 3), ("unknown", 3)], ids=str
)
def test_the_pre_tokenizer_decides_how_digits_split(tmp_path, pre_tokenizer, tokens):
    write_gguf(tmp_path, "llama", tokenizer__ggml__pre=pre_tokenizer)
    import_gguf(tmp_path / "model.gguf", tmp_path / "made")
    tokenizer = load_tokenizer(tmp_path / "made")
    assert len(tokenizer.encode("3124", add_special_tokens=False)) == tokens


@pytest.mark.parametrize(
    ("pre_tokenizer", "warned"), [("smollm", False), ("gpt-2", False), ("unknown", True)], ids=str
)
def test_an_unknown_pre_tokenizer_is_a_warning(tmp_path, pre_tokenizer, warned):
    write_gguf(tmp_path, "llama", tokenizer__ggml__pre=pre_tokenizer)
    report = import_gguf(tmp_path / "model.gguf", tmp_path / "made")
    assert ("warning" in report) == warned


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rotary_scaling_is_kept(tmp_path, kind):
    scaling = {"type": kind, "factor": 4.0, "original_context_length": 32}
    write_gguf(
        tmp_path,
        "llama",
        **{f"llama__rope__scaling__{key}": value for key, value in scaling.items()},
    )
    import_gguf(tmp_path / "model.gguf", tmp_path / "made")
    rope = json.loads((tmp_path / "made/config.json").read_text())["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == (kind, 4.0, 10000.0)
    assert rope.get("original_max_position_embeddings") == (32 if kind == "yarn" else None)


def test_an_earlier_import_is_replaced(tmp_path):
    write_gguf(tmp_path, "llama")
    command = [str(tmp_path / "model.gguf"), str(tmp_path / "made"), "--dtype", "bf16"]
    assert main(command) == 0
    assert main(command) == 0


def test_a_directory_of_the_user_is_not_replaced(tmp_path, capsys):
    write_gguf(tmp_path, "llama")
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "mine.txt").write_text("mine")
    assert main([str(tmp_path / "model.gguf"), str(tmp_path / "made")]) == 2
    assert "'mine.txt'" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["model.gguf/made", os.fsdecode(b"\xff")], ids=["file", "bytes"])
def test_an_impossible_target_leaves_nothing(tmp_path, target):
    write_gguf(tmp_path, "llama")
    assert main([str(tmp_path / "model.gguf"), f"{tmp_path}/{target}"]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "source"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drop": "model.norm.weight"}, "no tensor output_norm.weight"),
        ({"llama__feed_forward_length": 60}, "of shape [60, 64]"),
        ({"llama__block_count": 1}, "has the tensor blk.1."),
        ({"llama__embedding_length": None}, "llama.embedding_length is None"),
        ({"tokenizer__ggml__eos_token_id": 10**6}, "cannot be converted"),
        ({"llama__expert_count": 8}, "mixture of experts"),
        ({"llama__attention__value_length": 8}, "llama.attention.value_length is 8"),
        ({"llama__rope__scaling__type": "longrope"}, "'longrope'"),
        ({"split__count": 3}, "several parts"),
        ({"general__architecture": "gemma2"}, "architecture 'gemma2'"),
    ],
    ids=str,
)
def test_unsupported_models_are_refused(tmp_path, change, message):
    write_gguf(tmp_path, "llama", **change)
    with pytest.raises(ValueError) as error:
        import_gguf(tmp_path / "model.gguf", tmp_path / "made")
    assert message in str(error.value) and not (tmp_path / "made").exists()


def header(*arrays, tail=b""):
    """The beginning of a llama file: an architecture, and arrays by key, type and number."""
    text = [struct.pack("<Q", len(part)) + part for part in (b"general.architecture", b"llama")]
    pairs = [text[0] + struct.pack("<I", 8) + text[1]]
    for key, kind, number in arrays:
        pairs.append(
            struct.pack("<Q", len(key)) + key.encode() + struct.pack("<IIQ", 9, kind, number)
        )
    return struct.pack("<4sIQQ", b"GGUF", 3, 0, len(pairs)) + b"".join(pairs) + tail


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGUF",
        b"PK\x03\x04 no such thing",
        header(("a", 4, 2**60)),
        header(("a", 8, 2**60)),
        header(("tokenizer.ggml.merges", 8, 10**6), tail=bytes(8 * 10**6)),
        struct.pack("<4sIQQ", b"GGUF", 3, 2**60, 2**60),
    ],
    ids=["empty", "cut", "zip", "2^60 numbers", "2^60 texts", "10^6 merges", "2^60 tensors"],
)
def test_damaged_files_are_one_message(tmp_path, capsys, content):
    (tmp_path / "model.gguf").write_bytes(content)
    for name in ("model.gguf", "nothing.gguf", "."):
        assert main([str(tmp_path / name), str(tmp_path / "made")]) == 2
        assert capsys.readouterr().err.count("\n") == 1
