"""Damaged and odd data sets and model directories: each is one message that names the file, and for JSONL the line."""

import bz2
import codecs
import datetime
import gzip
import json
import lzma
import random
import shutil
import struct
import time
import zipfile
from collections.abc import Callable
from decimal import Decimal
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_tis.hf_directory import (
    ModelSizes,
    check_generation_config,
    check_tensors,
    read_model_config,
    tensor_files,
)
from slime_tis.trainer.data.prompts import load_prompts
from slime_tis.trainer.engines.local.checkpoint import load_model, load_tokenizer
from slime_tis.trainer.megatron.architecture import read_hf_config
from slime_tis.trainer.megatron.hf_weights import HfTensors
from slime_tis.trainer.options.megatron import MegatronConfig
from tests.checkpoints import make_checkpoint, make_tokenizer
from tests.faults.forked import run_forked
from tests.runs import make_task

TOKENIZER = make_tokenizer()
SIZES = ModelSizes(context_len=128, vocab_size=64)
LONGEST_MESSAGE = 600
SECONDS = 5.0


def problem(work: Callable[[], Any], *names: Path | str) -> str | None:
    """What is wrong with how work was refused: it has to be by one short printable message that has the names."""
    began = time.monotonic()
    try:
        work()
    except ValueError as error:
        message = str(error)
    except Exception as error:
        return f"raised {type(error).__name__}: {str(error)[:200]}"
    else:
        return "was accepted"
    if time.monotonic() - began > SECONDS:
        return f"took {time.monotonic() - began:.1f} s"
    if len(message) > LONGEST_MESSAGE or not message.isprintable() or not message.endswith("."):
        return f"was refused with {message[:300]!r}, {len(message)} characters"
    missing = [str(name) for name in names if str(name) not in message]
    return f"was refused with {message!r}, which lacks {missing}" if missing else None


def row(**fields: Any) -> bytes:
    return json.dumps({"prompt": "31>", "label": "13", **fields}).encode() + b"\n"


GOOD = row()


def zipped(content: bytes) -> bytes:
    archive = BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("p.jsonl", content)
    return archive.getvalue()


def deep(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


FILES: dict[str, tuple[bytes, str]] = {
    "gzip": (gzip.compress(GOOD), "is compressed with gzip; unpack it"),
    "bzip2": (bz2.compress(GOOD), "is compressed with bzip2; unpack it"),
    "xz": (lzma.compress(GOOD), "is compressed with xz; unpack it"),
    "zip": (zipped(GOOD), "is a zip archive; unpack it"),
    "UTF-16 with a mark": (GOOD.decode().encode("utf-16"), "is UTF-16; save it as UTF-8"),
    "UTF-16, big-endian, with a mark": (codecs.BOM_UTF16_BE + GOOD.decode().encode("utf-16-be"), "is UTF-16"),
    "UTF-16 without a mark": (GOOD.decode().encode("utf-16-le"), "is binary"),
    "UTF-32": (GOOD.decode().encode("utf-32-be"), "is binary"),
    "parquet by another name": (b"PAR1" + bytes(100), "is parquet; let its name end in .parquet"),
    "noughts": (bytes(1000), "is binary"),
    "a picture": (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "is binary"),
    "random bytes": (random.Random(0).randbytes(5000), "is binary"),
    "blank lines": (b"\n \n\t\n", "is empty"),
    "a mark alone": (codecs.BOM_UTF8, "is empty"),
}
"""Files that are not JSONL at all."""

LINES: dict[str, tuple[bytes, str]] = {
    "invalid UTF-8": (b'{"prompt": "\xff", "label": "1"}\n', "is not UTF-8: byte 0xff at byte 13; save it as UTF-8"),
    "Latin-1": ('{"prompt": "é", "label": "1"}\n'.encode("latin-1"), "is not UTF-8: byte 0xe9"),
    "a surrogate in UTF-8": (b'{"prompt": "\xed\xa0\x80", "label": "1"}\n', "is not UTF-8: byte 0xed"),
    "a cut sequence": (b'{"prompt": "\xe2\x82', "is not UTF-8: byte 0xe2"),
    "a nought": (b'{"prompt": "1\x002", "label": "1"}\n', "is"),
    "a number of 5,000 digits": (
        b'{"prompt": "1", "label": ' + b"9" * 5000 + b"}\n",
        "a number of thousands of digits",
    ),
    "a negative number of 5,000 digits": (b'{"prompt": "1", "label": -' + b"9" * 5000 + b"}\n", "thousands of digits"),
    "lists nested 100,000 deep": (
        b'{"prompt": "1", "label": ' + deep(100_000) + b"}\n",
        "is JSON that is nested too deep",
    ),
    "objects nested 50,000 deep": (
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"\n",
        "is JSON that is nested too deeply",
    ),
    "half a row": (b'{"prompt": "1", "lab', "is not JSON: Unterminated string starting at at column 17"),
    "two rows on a line": (GOOD.strip() + GOOD, "is not JSON: Extra data at column 33"),
    "no JSON": (b"31> 13\n", "is not JSON: Extra data"),
    "Python": (b"{'prompt': '1'}\n", "is not JSON"),
    "a comma at the end": (b'{"prompt": "1",}\n', "is not JSON"),
    "a control character": (b'{"prompt": "1\x1b[2J"}\n', "is not JSON: Invalid control character at"),
    "a list": (b'["31>"]\n', "is JSON of type list, but each line must be an object"),
    "a string": (b'"31>"\n', "is JSON of type str"),
    "a null": (b"null\n", "is JSON of type NoneType"),
    "no prompt": (b'{"text": "1", "label": "1"}\n', "has no key 'prompt'; its keys are 'text', 'label'"),
    "a thousand keys": (json.dumps({f"k{i}": i for i in range(1000)}).encode() + b"\n", "has no key 'prompt'"),
    "a key of 10,000 characters": (
        json.dumps({"k" * 10_000: 1}).encode() + b"\n",
        "has no key 'prompt'; its keys are 'kk",
    ),
    "no label": (b'{"prompt": "1"}\n', "has no key 'label'"),
    "a prompt of nothing": (row(prompt=""), "has an empty prompt"),
    "a prompt of null": (row(prompt=None), "has a prompt of type NoneType where a string is needed"),
    "a prompt of 5": (row(prompt=5), "has a prompt of type int"),
    "a prompt that is true": (row(prompt=True), "has a prompt of type bool"),
    "a prompt of messages": (row(prompt=[{"role": "user", "content": "1"}]), "needs --apply-chat-template"),
    "a prompt that is an object": (row(prompt={"text": "1"}), "has a prompt of type dict"),
    "half a pair in the prompt": (row(prompt="ab\ud800c"), r"half of a surrogate pair, \ud800, at character 3"),
    "the other half": (row(prompt="\udfff"), r"half of a surrogate pair, \udfff, at character 1"),
    "half a pair in the label": (row(label="\ud83d"), r"has a label with half of a surrogate pair, \ud83d"),
    "metadata of a number": (row(metadata=5), "has 'metadata' that is not a mapping"),
    "metadata of a list": (row(metadata=[1]), "has 'metadata' that is not a mapping"),
    "metadata of no JSON": (row(metadata="{"), "has 'metadata' that is not a mapping"),
    "metadata nested deeply": (row(metadata=deep(50_000).decode()), "has 'metadata' that is not a mapping"),
    "metadata nested 200 deep": (row(metadata={"a": json.loads(deep(200))}), "nests deeper than 100 levels"),
    "metadata of 5,000 digits": (row(metadata="9" * 5000), "has 'metadata' that is not a mapping"),
    "a prompt that fills the context": (row(prompt="1" * 127), "has a prompt of 128 tokens, which leaves no tokens"),
    "a prompt of 10 MB": (row(prompt="1" * 10_000_000), "has a prompt of 10000000 characters, which leaves no tokens"),
}
"""Second lines of files whose first is good."""


def test_data_sets_that_are_no_jsonl(tally: Any, tmp_path: Path) -> None:
    t = tally("data sets that are not JSONL")
    for name, (content, words) in FILES.items():
        path = tmp_path / "p.jsonl"
        path.write_bytes(content)
        t.record(name, problem(lambda p=path: load(p), path, words))
    t.check(at_least=14)


def load(path: Path, **options: Any) -> Any:
    return load_prompts(path, TOKENIZER, **{"input_key": "prompt", "label_key": "label", "sizes": SIZES, **options})


def test_malformed_lines(tally: Any, tmp_path: Path) -> None:
    t = tally("malformed lines of JSONL")
    path = tmp_path / "p.jsonl"
    for name, (line, words) in LINES.items():
        path.write_bytes(GOOD + line)
        in_line = "" if name == "a nought" else f"{path}, line 2"
        t.record(name, problem(lambda: load(path), path, in_line, words))
    path.write_bytes(GOOD + row(prompt=[{"role": "user", "content": {"a": [1]}}]))
    t.record("a chat of no text", problem(lambda: load(path, apply_chat_template=True), f"{path}, line 2 does not fit"))
    path.write_bytes(GOOD + row(prompt="\ud800"))
    t.record("half a pair in a chat", problem(lambda: load(path, apply_chat_template=True), f"{path}, line 2 has a pr"))
    path.write_bytes(row(prompt="1" * 20_000_000))
    alone = problem(lambda: load(path, max_prompt_len=9), f"the shortest prompt of '{path}' is far longer; raise it.")
    t.record("a prompt of 20 MB alone", alone)
    t.check(at_least=40)


def test_tokens_that_the_model_does_not_have(tally: Any, tmp_path: Path) -> None:
    t = tally("tokenizers of another model")
    path = tmp_path / "p.jsonl"
    path.write_bytes(row(prompt="1") + row(prompt="?"))
    small = ModelSizes(context_len=None, vocab_size=60)
    words = "has a prompt with token 63, but the model's vocabulary ends at 59; the tokenizer of --hf-checkpoint is"
    t.record("a token beyond the vocabulary", problem(lambda: load(path, sizes=small), f"{path}, line 2 {words}"))
    t.check(at_least=1)


def test_data_sets_that_are_accepted(tally: Any, tmp_path: Path) -> None:
    t = tally("odd data sets that are accepted")
    path = tmp_path / "p.jsonl"
    for name, content, expected in (
        ("a UTF-8 mark", codecs.BOM_UTF8 + GOOD, [("31>", "13")]),
        ("a mark and blank lines", codecs.BOM_UTF8 + b"\n\n" + GOOD, [("31>", "13")]),
        ("Windows line ends", GOOD.replace(b"\n", b"\r\n") * 2, [("31>", "13")] * 2),
        ("no line end", GOOD.strip(), [("31>", "13")]),
        ("Unicode line separators", row(prompt="3\u2028\u0085\x1c1"), [("3\u2028\u0085\x1c1", "13")]),
        ("a whole pair", row(label="\ud83d\ude00"), [("31>", "😀")]),
        (
            "labels of other types",
            row(label=[1, 2.5, None]) + row(label=None),
            [("31>", [1, 2.5, None]), ("31>", None)],
        ),
        ("long ones among short ones", GOOD + row(prompt="1" * 10_000_000) + GOOD, [("31>", "13")] * 2),
    ):
        path.write_bytes(content)
        began = time.monotonic()
        found = [(prompt.text, prompt.label) for prompt in load(path, max_prompt_len=99)]
        late = time.monotonic() - began > SECONDS
        t.record(
            name, None if found == expected and not late else f"{str(found)[:200]} in {time.monotonic() - began:.1f} s"
        )
    t.check(at_least=8)


def test_parquet(tally: Any, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    t = tally("malformed parquet")
    path = tmp_path / "p.parquet"

    def write(**columns: list[Any]) -> bytes:
        rows = {"prompt": ["31>", "7>"], "label": ["13", "7"], **columns}
        parquet.write_table(pyarrow.table(rows), path)
        return path.read_bytes()

    whole = write()
    for name, content in (
        ("JSONL by another name", GOOD),
        ("nothing but the magic", b"PAR1"),
        ("the magic twice", b"PAR1PAR1"),
        ("cut off", whole[:-20]),
        ("cut in half", whole[: len(whole) // 2]),
        ("another end", whole[:-8] + b"\xff\xff\xff\x7fPAR1"),
        ("damaged metadata", whole[:-60] + bytes(40) + whole[-20:]),
    ):
        path.write_bytes(content)
        t.record(name, problem(lambda: load(path), path))
    for name, columns, words in (
        (
            "labels of bytes",
            {"label": [b"1", b"2"]},
            "row 1 has a label of type bytes, which JSON does not have; write",
        ),
        ("labels of dates", {"label": ["1", "2"], "date": [datetime.date(2024, 1, 2)] * 2}, None),
        ("labels that are dates", {"label": [datetime.date(2024, 1, 2)] * 2}, "row 1 has a label of type date, which"),
        ("labels that are times", {"label": [datetime.datetime(2024, 1, 2)] * 2}, "row 1 has a label of type datetime"),
        ("prompts of bytes", {"prompt": [b"1", b"2"]}, "row 1 has a prompt of type bytes where a string is needed"),
        ("prompts of numbers", {"prompt": [1, 2]}, "row 1 has a prompt of type int"),
        ("a prompt of null", {"prompt": ["1", None]}, "row 2 has a prompt of type NoneType"),
        ("metadata of a number", {"metadata": [1, 2]}, "row 1 has 'metadata' that is not a mapping"),
    ):
        write(**columns)
        failure = problem(lambda: load(path), f"{path}, {words}")
        t.record(name, failure if words else None if failure == "was accepted" else failure)
    write(label=[Decimal("7.50"), Decimal("-1E+3")])
    labels = [prompt.label for prompt in load(path)]
    t.record("labels of decimals", None if labels == ["7.50", "-1000.00"] else str(labels))
    t.check(at_least=16)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    return {family: make_checkpoint(directory / family, family) for family in ("qwen2", "qwen3", "llama")}


def spoiled(source: Path, target: Path, **files: bytes | None) -> Path:
    """A copy of a checkpoint with other contents of some files; None removes one."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    for name, content in files.items():
        path = target / name.replace("__", ".")
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
    return target


CONFIGS: dict[str, tuple[bytes | dict[str, Any] | None, str]] = {
    "none": (None, "holds no config.json"),
    "empty": (b"", "its config.json is not JSON"),
    "cut off": (b'{"architectures": [', "its config.json is not JSON"),
    "a list": (b"[]", "its config.json is JSON of type list and must be an object"),
    "a null": (b"null", "is JSON of type NoneType"),
    "invalid UTF-8": (b'{"a": "\xff"}', "is not UTF-8: invalid start byte at byte 7"),
    "nested 100,000 deep": (b'{"a":' + deep(100_000) + b"}", "is nested too deeply to be read"),
    "a number of 5,000 digits": (b'{"hidden_size": ' + b"9" * 5000 + b"}", "is not JSON: Exceeds the limit"),
    "an architecture of text": ({"architectures": "Qwen3ForCausalLM"}, "of the architecture Qwen3ForCausalLM but"),
    "an architecture of 5": ({"architectures": 5}, "of the architecture 5 but supported are"),
    "an architecture of none": ({"architectures": [None]}, "of the architecture None but supported are"),
    "no architecture": ({"architectures": []}, "of the architecture unknown but supported are"),
    "an architecture of 10,000 characters": ({"architectures": ["A" * 10_000]}, "of the architecture AAAA"),
    "another architecture": ({"architectures": ["BertModel"]}, "of the architecture BertModel but supported are"),
    "fp8": ({"quantization_config": {"quant_method": "fp8"}}, "has quantization_config {'quant_method': 'fp8'}, but"),
    "an unknown quantization": ({"quantization_config": {"quant_method": "nonsense"}}, "has quantization_config"),
    "a quantization of text": ({"quantization_config": "int4"}, "has quantization_config 'int4'"),
    "an unknown rope": ({"rope_parameters": {"rope_type": "wormhole"}}, "has rope_parameters of type 'wormhole', but"),
    "an unknown rope of old": (
        {"rope_scaling": {"type": "wormhole", "factor": 2}},
        "has rope_scaling of type 'wormhole'",
    ),
    "a rope of a list": ({"rope_scaling": [2]}, "has rope_scaling [2], which must be an object"),
    "a rope of factor 0": (
        {"rope_scaling": {"rope_type": "linear", "factor": 0}},
        "has rope_scaling with factor 0, which",
    ),
    "a rope of theta -1": ({"rope_parameters": {"rope_theta": -1}}, "has rope_parameters with rope_theta -1"),
    "theta 0": ({"rope_theta": 0}, "has rope_theta 0, which must be a number above 0"),
    "theta of text": ({"rope_theta": "1e6"}, "has rope_theta '1e6'"),
    "theta infinite": (b'{"architectures": ["Qwen3ForCausalLM"], "rope_theta": Infinity}', "has rope_theta inf"),
    "epsilon -1": ({"rms_norm_eps": -1}, "has rms_norm_eps -1, which must be a number from 0 to 1"),
    "epsilon NaN": (b'{"architectures": ["Qwen3ForCausalLM"], "rms_norm_eps": NaN}', "has rms_norm_eps nan"),
    "epsilon of text": ({"rms_norm_eps": "1e-6"}, "has rms_norm_eps '1e-6'"),
    "tie of text": ({"tie_word_embeddings": "false"}, "has tie_word_embeddings 'false', which must be true or false"),
    "3 groups": (
        {"num_key_value_heads": 3},
        "num_attention_heads 4, which must be a multiple of num_key_value_heads 3",
    ),
    "odd heads": ({"head_dim": 15}, "has heads of 15 numbers, which must be even for rotary positions"),
    "heads that do not divide": (
        {"head_dim": None, "num_attention_heads": 6},
        "hidden_size 32, which must be a multiple",
    ),
} | {
    f"{name} of {value!r}": ({name: value}, f"has {name} {value!r}, which must be a whole number above 0")
    for name, value in (
        ("vocab_size", 0),
        ("vocab_size", "64"),
        ("hidden_size", -1),
        ("hidden_size", 32.0),
        ("intermediate_size", True),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", [2]),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 0),
        ("head_dim", 0),
        ("max_position_embeddings", "128"),
        ("max_position_embeddings", 0),
    )
}


def test_configurations(tally: Any, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    t = tally("malformed config.json")
    source = checkpoints["qwen3"]
    config = json.loads((source / "config.json").read_text())
    for name, (content, words) in CONFIGS.items():
        text = json.dumps({**config, **content}).encode() if isinstance(content, dict) else content
        directory = spoiled(source, tmp_path / "model", config__json=text)
        t.record(name, problem(lambda d=directory: read_model_config(d), f"--hf-checkpoint is '{directory}'", words))
    for name, content, words in (
        ("cut off", b"{", "its generation_config.json is not JSON"),
        ("a list", b"[]", "is JSON of type list"),
        ("binary", bytes(range(256)), "is not UTF-8"),
        ("an end of text", b'{"eos_token_id": "</s>"}', "has eos_token_id '</s>', which must be a token id or a list"),
        ("an end of -1", b'{"eos_token_id": [2, -1]}', "has eos_token_id [2, -1]"),
        ("an end of 2**70", b'{"eos_token_id": 1180591620717411303424}', "has eos_token_id 11805916"),
    ):
        directory = spoiled(source, tmp_path / "model", generation_config__json=content)
        t.record(f"generation: {name}", problem(lambda d=directory: check_generation_config(d), directory, words))
    for name, fields in (
        (
            "a rope without its factor",
            {"rope_scaling": {"rope_type": "yarn"}, "rope_parameters": {"rope_type": "yarn"}},
        ),
        ("an unknown type of numbers", {"dtype": "float31", "torch_dtype": "float31"}),
        ("an activation of 5", {"hidden_act": 5}),
        ("layers of an unknown kind", {"layer_types": ["x", "y"]}),
    ):
        directory = spoiled(source, tmp_path / "model", config__json=json.dumps({**config, **fields}).encode())
        t.record(name, problem(lambda d=directory: (read_hf_config(d), load_model(d, torch.float32)), directory))
    for name, files in (
        ("a tokenizer of garbage", {"tokenizer__json": b"\xff\xfe"}),
        ("a tokenizer cut off", {"tokenizer__json": (source / "tokenizer.json").read_bytes()[:100]}),
        ("a tokenizer of a list", {"tokenizer__json": b"[]"}),
        ("no tokenizer", {"tokenizer__json": None, "tokenizer_config__json": None}),
        ("settings cut off", {"tokenizer_config__json": b"{"}),
    ):
        directory = spoiled(source, tmp_path / "model", **files)
        t.record(name, problem(lambda d=directory: load_tokenizer(d), directory))
    t.check(at_least=55)


def check(directory: Path) -> None:
    check_tensors(directory, read_model_config(directory))


def edited(source: Path, target: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """A copy of a checkpoint with other tensors."""
    directory = spoiled(source, target)
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


def header(content: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(content) if length is None else length) + content


Q, DOWN = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"


def test_safetensors_files(tally: Any, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    t = tally("damaged safetensors")
    source, target = checkpoints["qwen3"], tmp_path / "model"
    whole = (source / "model.safetensors").read_bytes()
    for name, content in (
        ("empty", b""),
        ("7 bytes", whole[:7]),
        ("the header cut off", whole[:100]),
        ("the last byte missing", whole[:-1]),
        ("half", whole[: len(whole) // 2]),
        ("a byte too many", whole + b"\0"),
        ("noughts", bytes(len(whole))),
        ("random bytes", random.Random(1).randbytes(4096)),
        ("a page of HTML", b"<html><body>404</body></html>" * 9),
        ("a pointer of Git LFS", b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 988097824\n"),
        ("a pickle", b"\x80\x02}q\x00."),
        ("a header of 2**63 bytes", header(b"{}", 2**63)),
        ("a header of 100 GB", header(b"{}", 10**11)),
        ("a header of no JSON", header(b"[[[[")),
        ("a header of a list", header(b"[]")),
        ("a header nested deeply", header(deep(50_000))),
        ("offsets beyond the end", header(b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}')),
        ("offsets that overlap", header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}') + bytes(4)),
        ("an unknown type", header(b'{"a":{"dtype":"F31","shape":[1],"data_offsets":[0,4]}}') + bytes(4)),
        (
            "a shape of 2**62",
            header(b'{"a":{"dtype":"F32","shape":[4611686018427387904,8],"data_offsets":[0,4]}}') + bytes(4),
        ),
    ):
        directory = spoiled(source, target, model__safetensors=content)
        t.record(name, problem(lambda d=directory: check(d), directory / "model.safetensors", "download it again"))
    for name, edit, words in (
        (
            "a wrong shape",
            lambda w: w.update({Q: w[Q][:-1]}),
            f"the tensor {Q} has the shape [63, 32], but by config.json",
        ),
        ("a shape turned", lambda w: w.update({DOWN: w[DOWN].T}), f"the tensor {DOWN} has the shape [64, 32], but by"),
        ("a scalar", lambda w: w.update({Q: torch.tensor(1.0)}), f"the tensor {Q} has the shape [], but by"),
        ("whole numbers", lambda w: w.update({Q: w[Q].long()}), f"the tensor {Q} is of type I64, but training needs"),
        ("bytes", lambda w: w.update({Q: w[Q].to(torch.int8)}), f"the tensor {Q} is of type I8"),
        ("fp8", lambda w: w.update({Q: w[Q].to(torch.float8_e4m3fn)}), f"the tensor {Q} is of type F8_E4M3"),
        ("a tensor missing", lambda w: w.pop(DOWN), f"has no tensor {DOWN}, which its config.json asks for"),
        ("no output layer", lambda w: w.pop("lm_head.weight"), "has no tensor lm_head.weight"),
        ("a larger vocabulary", lambda w: w.update({"lm_head.weight": torch.zeros(99, 32)}), "has the shape [99, 32]"),
        ("no tensors", lambda w: w.clear(), "has no tensor model.embed_tokens.weight"),
    ):
        directory = edited(source, target, edit)
        t.record(name, problem(lambda d=directory: check(d), directory, words))
    for value in (float("nan"), float("inf"), -float("inf")):
        directory = edited(source, target, lambda w, v=value: w[Q].view(-1).__setitem__(7, v))
        words = f"{directory / 'model.safetensors'}: the tensor {Q} holds NaN or infinity; the checkpoint is damaged."
        t.record(f"a weight of {value}", problem(lambda d=directory: HfTensors(d, tied=False)[Q], words))
    directory = spoiled(source, target, model__safetensors=None, pytorch_model__bin=b"\x80\x02}q\x00.")
    t.record("pickles alone", problem(lambda: check(directory), directory, "only checkpoints in safetensors are read"))
    config = json.loads((source / "config.json").read_text())
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        text = json.dumps({key: value for key, value in config.items() if key != name}).encode()
        directory = spoiled(source, target, config__json=text)
        words = f"{directory / 'config.json'} has no {name}, which every model has."
        t.record(f"a configuration without {name}", problem(lambda d=directory: check(d), words))
    for name, value in (("num_hidden_layers", 10**9), ("vocab_size", 10**12), ("hidden_size", 2**40)):
        directory = spoiled(source, target, config__json=json.dumps({**config, name: value}).encode())
        t.record(f"{name} of {value}", problem(lambda d=directory: check(d), directory))
    t.check(at_least=40)


def indexed(source: Path, target: Path, index: Any) -> Path:
    """A copy of a checkpoint in two files, with any index."""
    directory = spoiled(source, target, model__safetensors=None)
    tensors = load_file(source / "model.safetensors")
    names = sorted(tensors)
    for place, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, directory / f"part-{place}.safetensors")
    weight_map = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    content = index(weight_map) if callable(index) else index
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    (directory / "model.safetensors.index.json").write_bytes(text)
    return directory


def test_indices(tally: Any, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    t = tally("malformed indices of safetensors")
    source, target = checkpoints["llama"], tmp_path / "model"
    outside = tmp_path / "outside.safetensors"
    shutil.copy(source / "model.safetensors", outside)

    def naming(file: Any) -> Callable[[dict[str, str]], Any]:
        return lambda weight_map: {"weight_map": {**weight_map, Q: file}}

    for name, index, words in (
        ("empty", b"", "is not JSON"),
        ("a list", b"[]", "is JSON of type list"),
        ("nested deeply", deep(100_000), "is nested too deeply"),
        ("no weight_map", {"metadata": {}}, "has no weight_map"),
        ("a weight_map of a list", {"weight_map": ["a"]}, "has no weight_map"),
        ("a weight_map of null", {"weight_map": None}, "has no weight_map"),
        ("a file of 5", naming(5), f"names 5 for the tensor '{Q}', which is not a file name"),
        ("a file of null", naming(None), "names None for the tensor"),
        ("a file of a list", naming(["a"]), "names ['a'] for the tensor"),
        ("a file of nothing", naming(""), "names '' for the tensor"),
        ("a file that is not there", naming("part-7.safetensors"), "names 'part-7.safetensors', which does not exist"),
        ("the directory", naming("."), "names '.', which does not exist"),
        (
            "a file above",
            naming("../outside.safetensors"),
            "names '../outside.safetensors', which is not a file within",
        ),
        ("a file above, hidden", naming("x/../../outside.safetensors"), "which is not a file within the directory"),
        ("an absolute file", naming(str(outside)), "which is not a file within the directory; files outside are not"),
        ("a nought", naming("a\0b"), r"names 'a\x00b', which is not a file within"),
        ("a steering name", naming("\x1b[2J"), r"names '\x1b[2J', which does not exist"),
        ("a name of 10,000 characters", naming("a" * 200 + "/b" * 90), "which does not exist"),
        (
            "another file",
            naming(
                "part-1.safetensors"
                if sorted(load_file(source / "model.safetensors")).index(Q) % 2 == 0
                else "part-0.safetensors"
            ),
            f"has no tensor {Q}, which model.safetensors.index.json says it has",
        ),
        ("a tensor missing", lambda m: {"weight_map": {k: v for k, v in m.items() if k != Q}}, f"has no tensor {Q}"),
    ):
        directory = indexed(source, target, index)
        t.record(name, problem(lambda d=directory: check(d), directory, words))
    directory = indexed(source, target, lambda weight_map: {"weight_map": weight_map})
    (directory / "part-1.safetensors").write_bytes((directory / "part-1.safetensors").read_bytes()[:-1])
    t.record("a damaged part", problem(lambda: check(directory), directory / "part-1.safetensors", "download it again"))
    t.check(at_least=21)


def test_model_directories_that_are_accepted(tally: Any, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    t = tally("odd model directories that are accepted")
    for family, source in checkpoints.items():
        check(source)
        t.record(family)
    directory = indexed(checkpoints["llama"], tmp_path / "model", lambda weight_map: {"weight_map": weight_map})
    check(directory)
    t.record("two files and an index")
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for place, file in enumerate(sorted(directory.iterdir())):  # Hugging Face's cache has a link for each file
        shutil.move(file, blobs / str(place))
        file.symlink_to(Path("..", "blobs", str(place)))
    check(directory)
    assert {path.parent for path in tensor_files(directory).values()} == {directory}
    t.record("links into a cache")
    tied = make_checkpoint(tmp_path / "tied", "qwen3", tie_word_embeddings=True)
    check(tied)
    t.record("tied embeddings", None if "lm_head.weight" not in tensor_files(tied) else "has an output layer")
    config = json.loads((checkpoints["llama"] / "config.json").read_text())
    for name in ("head_dim", "tie_word_embeddings", "rope_parameters"):
        config.pop(name, None)
    old = make_checkpoint(tmp_path / "old", "llama", head_dim=8)
    (old / "config.json").write_text(json.dumps(config))
    check(old)
    t.record("an old configuration")
    assert MegatronConfig(hf_checkpoint=str(old)).hf_checkpoint == str(old)
    t.check(at_least=7)


def test_whole_runs_end_before_anything_is_built(tally: Any, tmp_path: Path) -> None:
    t = tally("whole runs on damaged inputs")
    task = make_task(tmp_path / "task")
    model, data = tmp_path / "task" / "model", tmp_path / "task" / "train.jsonl"
    whole = {path.name: path.read_bytes() for path in (*model.iterdir(), data)}
    cases: tuple[tuple[str, Path, bytes, int, str], ...] = (
        ("a file cut off", model / "model.safetensors", whole["model.safetensors"][:-9], 2, "download it again."),
        ("no configuration", model / "config.json", b"{", 2, "its config.json is not JSON"),
        ("no generation", model / "generation_config.json", b"{", 2, "its generation_config.json is not JSON"),
        ("a tokenizer of garbage", model / "tokenizer.json", b"\xff", 1, "whose tokenizer does not load"),
        ("gzip", data, gzip.compress(whole["train.jsonl"]), 2, "is compressed with gzip; unpack it."),
        ("half a row", data, whole["train.jsonl"][:-9], 1, ", line 16 is not JSON"),
        (
            "half a pair",
            data,
            whole["train.jsonl"] + b'{"prompt": "\\ud800", "label": "1"}',
            1,
            ", line 17 has a prompt",
        ),
        (
            "10 MB",
            data,
            whole["train.jsonl"] + row(prompt="1" * 10_000_000),
            1,
            ", line 17 has a prompt of 10000000 char",
        ),
    )
    for number, (name, path, content, status, words) in enumerate(cases):
        path.write_bytes(content)
        log = tmp_path / str(number)
        outcome = run_forked([*task, "--output-dir", str(log / "run")], log / "log", timeout=240)
        path.write_bytes(whole[path.name])
        lines = outcome.error.splitlines()
        right = (
            outcome.status == status and not outcome.traceback and words in lines[-1] and str(path.parent) in lines[-1]
        )
        t.record(name, None if right else f"status {outcome.status}: {outcome.error[-300:]}")
    t.check(at_least=8)
