"""Damaged and odd data sets and model directories: each is one message that names the file, and for JSONL the line."""

import codecs
import datetime
import gzip
import json
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
    "zip": (zipped(GOOD), "is a zip archive; unpack it"),
    "UTF-16 with a mark": (GOOD.decode().encode("utf-16"), "is UTF-16; save it as UTF-8"),
    "UTF-16 without a mark": (GOOD.decode().encode("utf-16-le"), "is binary"),
    "parquet by another name": (b"PAR1" + bytes(100), "is parquet; let its name end in .parquet"),
    "noughts": (bytes(1000), "is binary"),
    "blank lines": (b"\n \n\t\n", "is empty"),
}
"""Files that are not JSONL at all."""

LINES: dict[str, tuple[bytes, str]] = {
    "invalid UTF-8": (b'{"prompt": "\xff", "label": "1"}\n', "not UTF-8"),
    "a number of 5,000 digits": (b'{"prompt": "1", "label": -' + b"9" * 5000 + b"}\n", "limit (4300 digits)"),
    "lists nested 100,000 deep": (b'{"prompt": "1", "label": ' + deep(100_000) + b"}\n", "nested too deep"),
    "half a row": (b'{"prompt": "1", "lab', "not JSON"),
    "no prompt": (b'{"text": "1", "label": "1"}\n', "no key 'prompt'"),
    "no label": (b'{"prompt": "1"}\n', "no key 'label'"),
    "an empty prompt": (row(prompt=""), "empty prompt"),
    "a prompt of null": (row(prompt=None), "type NoneType"),
    "a prompt of messages": (row(prompt=[{"role": "user", "content": "1"}]), "--apply-chat-template"),
    "half a pair in the prompt": (row(prompt="ab\ud800c"), "surrogate"),
    "metadata of a list": (row(metadata=[1]), "'metadata' that is not a mapping"),
    "metadata nested 200 deep": (row(metadata={"a": json.loads(deep(200))}), "nests deeper"),
    "a prompt that fills the context": (row(prompt="1" * 127), "128 tokens"),
    "a prompt of 10 MB": (row(prompt="1" * 10_000_000), "10000000 characters"),
}
"""Second lines of files whose first is good."""


def test_data_sets_that_are_no_jsonl(tally: Any, tmp_path: Path) -> None:
    t = tally("data sets that are not JSONL")
    for name, (content, words) in FILES.items():
        path = tmp_path / "p.jsonl"
        path.write_bytes(content)
        t.record(name, problem(lambda p=path: load(p), path, words))
    t.check()


def load(path: Path, **options: Any) -> Any:
    return load_prompts(path, TOKENIZER, **{"input_key": "prompt", "label_key": "label", "sizes": SIZES, **options})


def test_malformed_lines(tally: Any, tmp_path: Path) -> None:
    t = tally("malformed lines of JSONL")
    path = tmp_path / "p.jsonl"
    for name, (line, words) in LINES.items():
        path.write_bytes(GOOD + line)
        t.record(name, problem(lambda: load(path), f"{path}, line 2", words))
    for name, prompt in (("a chat without text", [{"role": "user", "content": {"a": [1]}}]), ("half a pair", "\ud800")):
        path.write_bytes(GOOD + row(prompt=prompt))
        t.record(name, problem(lambda: load(path, apply_chat_template=True), f"{path}, line 2"))
    path.write_bytes(row(prompt="1" * 20_000_000))
    t.record("a prompt of 20 MB alone", problem(lambda: load(path, max_prompt_len=9), path, "raise it"))
    t.check()


def test_tokens_that_the_model_does_not_have(tally: Any, tmp_path: Path) -> None:
    t = tally("tokenizers of another model")
    path = tmp_path / "p.jsonl"
    path.write_bytes(row(prompt="1") + row(prompt="?"))
    small = ModelSizes(context_len=None, vocab_size=60)
    words = "has a prompt with token 63, but the model's vocabulary ends at 59; the tokenizer of --hf-checkpoint is"
    t.record("a token beyond the vocabulary", problem(lambda: load(path, sizes=small), f"{path}, line 2 {words}"))
    t.check()


def test_data_sets_that_are_accepted(tally: Any, tmp_path: Path) -> None:
    t = tally("odd data sets that are accepted")
    path = tmp_path / "p.jsonl"
    for name, content, expected in (
        ("a UTF-8 mark", codecs.BOM_UTF8 + GOOD, [("31>", "13")]),
        ("Windows line ends", GOOD.replace(b"\n", b"\r\n") * 2, [("31>", "13")] * 2),
        ("Unicode line separators", row(prompt="3\u2028\u0085\x1c1"), [("3\u2028\u0085\x1c1", "13")]),
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
    t.check()


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
        ("cut off", whole[:-20]),
        ("damaged metadata", whole[:-60] + bytes(40) + whole[-20:]),
    ):
        path.write_bytes(content)
        t.record(name, problem(lambda: load(path), path))
    for name, columns, words in (
        ("labels of bytes", {"label": [b"1", b"2"]}, "label of type bytes"),
        ("metadata of a number", {"metadata": [1, 2]}, "'metadata' that is not a mapping"),
    ):
        write(**columns)
        t.record(name, problem(lambda: load(path), f"{path}, row 1", words))
    write(date=[datetime.date(2024, 1, 2)] * 2)
    t.record("another column of dates", None if len(load(path)) == 2 else "rows are missing")
    write(label=[Decimal("7.50"), Decimal("-1E+3")])
    labels = [prompt.label for prompt in load(path)]
    t.record("labels of decimals", None if labels == ["7.50", "-1000.00"] else str(labels))
    t.check()


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
    "none": (None, "no config.json"),
    "cut off": (b'{"architectures": [', "not JSON"),
    "invalid UTF-8": (b'{"a": "\xff"}', "not UTF-8"),
    "nested 100,000 deep": (b'{"a":' + deep(100_000) + b"}", "nested too deeply"),
    "a number of 5,000 digits": (b'{"hidden_size": ' + b"9" * 5000 + b"}", "not JSON"),
    "fp8": ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    "an unknown rope": ({"rope_parameters": {"rope_type": "wormhole"}}, "'wormhole'"),
    "a rope of theta -1": ({"rope_parameters": {"rope_theta": -1}}, "rope_theta -1"),
    "epsilon NaN": (b'{"architectures": ["Qwen3ForCausalLM"], "rms_norm_eps": NaN}', "rms_norm_eps nan"),
    "3 groups": ({"num_key_value_heads": 3}, "num_attention_heads 4"),
    "heads that do not divide": ({"head_dim": None, "num_attention_heads": 6}, "heads of 5.33333 numbers"),
    "hidden_size below 0": ({"hidden_size": -1}, "hidden_size -1"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers 0"),
    "10**12 tokens": ({"vocab_size": 10**12}, "vocab_size 1000000000000"),
}


def test_configurations(tally: Any, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    t = tally("malformed config.json")
    source = checkpoints["qwen3"]
    config = json.loads((source / "config.json").read_text())
    for name, (content, words) in CONFIGS.items():
        text = json.dumps({**config, **content}).encode() if isinstance(content, dict) else content
        directory = spoiled(source, tmp_path / "model", config__json=text)
        t.record(name, problem(lambda d=directory: read_model_config(d), f"--hf-checkpoint is '{directory}'", words))
    for name, content in (
        ("cut off", b"{"),
        ("binary", bytes(range(256))),
        ("an end of -1", b'{"eos_token_id": [2, -1]}'),
        ("an end of 2**70", b'{"eos_token_id": 1180591620717411303424}'),
    ):
        directory = spoiled(source, tmp_path / "model", generation_config__json=content)
        failure = problem(lambda d=directory: check_generation_config(d), directory, "generation_config.json")
        t.record(f"generation: {name}", failure)
    rope = {"rope_type": "yarn"}
    for name, fields in (
        ("a rope without its factor", {"rope_scaling": rope, "rope_parameters": rope}),
        ("an unknown type of numbers", {"dtype": "float31", "torch_dtype": "float31"}),
    ):
        directory = spoiled(source, tmp_path / "model", config__json=json.dumps({**config, **fields}).encode())
        t.record(name, problem(lambda d=directory: (read_hf_config(d), load_model(d, torch.float32)), directory))
    for name, files in (
        ("a tokenizer of garbage", {"tokenizer__json": b"\xff\xfe"}),
        ("a tokenizer cut off", {"tokenizer__json": (source / "tokenizer.json").read_bytes()[:100]}),
        ("no tokenizer", {"tokenizer__json": None, "tokenizer_config__json": None}),
    ):
        directory = spoiled(source, tmp_path / "model", **files)
        t.record(name, problem(lambda d=directory: load_tokenizer(d), directory))
    t.check()


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
        ("the last byte missing", whole[:-1]),
        ("a pointer of Git LFS", b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 988097824\n"),
        ("a header of 2**63 bytes", header(b"{}", 2**63)),
        ("offsets beyond the end", header(b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}')),
    ):
        directory = spoiled(source, target, model__safetensors=content)
        t.record(name, problem(lambda d=directory: check(d), directory / "model.safetensors", "download it again"))
    for name, edit, words in (
        ("a wrong shape", lambda w: w.update({Q: w[Q][:-1]}), f"{Q} has the shape [63, 32]"),
        ("whole numbers", lambda w: w.update({Q: w[Q].long()}), f"{Q} is of type I64"),
        ("fp8", lambda w: w.update({Q: w[Q].to(torch.float8_e4m3fn)}), f"{Q} is of type F8_E4M3"),
        ("a tensor missing", lambda w: w.pop(DOWN), f"has no tensor {DOWN}"),
        ("no output layer", lambda w: w.pop("lm_head.weight"), "has no tensor lm_head.weight"),
    ):
        directory = edited(source, target, edit)
        t.record(name, problem(lambda d=directory: check(d), directory, words))
    for value in (float("nan"), -float("inf")):
        directory = edited(source, target, lambda w, v=value: w[Q].view(-1).__setitem__(7, v))
        words = f"{directory / 'model.safetensors'}: the tensor {Q} holds NaN or infinity"
        t.record(f"a weight of {value}", problem(lambda d=directory: HfTensors(d, tied=False)[Q], words))
    directory = spoiled(source, target, model__safetensors=None, pytorch_model__bin=b"\x80\x02}q\x00.")
    t.record("pickles alone", problem(lambda: check(directory), directory, "safetensors"))
    config = json.loads((source / "config.json").read_text())
    text = json.dumps({key: value for key, value in config.items() if key != "vocab_size"}).encode()
    directory = spoiled(source, target, config__json=text)
    t.record("no vocab_size", problem(lambda: check(directory), directory / "config.json", "has no vocab_size"))
    t.check()


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

    shard = sorted(load_file(source / "model.safetensors")).index(Q) % 2
    for name, index, words in (
        ("empty", b"", "not JSON"),
        ("nested deeply", deep(100_000), "nested too deeply"),
        ("a weight_map of a list", {"weight_map": ["a"]}, "no weight_map"),
        ("a file of 5", naming(5), "not a file name"),
        ("a missing file", naming("part-7.safetensors"), "does not exist"),
        ("a file above", naming("../outside.safetensors"), "not a file within"),
        ("an absolute file", naming(str(outside)), "not a file within"),
        ("a null byte", naming("a\0b"), r"'a\x00b'"),
        ("another shard", naming(f"part-{1 - shard}.safetensors"), f"has no tensor {Q}"),
        ("a tensor missing", lambda m: {"weight_map": {k: v for k, v in m.items() if k != Q}}, f"has no tensor {Q}"),
    ):
        directory = indexed(source, target, index)
        t.record(name, problem(lambda d=directory: check(d), directory, words))
    directory = indexed(source, target, lambda weight_map: {"weight_map": weight_map})
    (directory / "part-1.safetensors").write_bytes((directory / "part-1.safetensors").read_bytes()[:-1])
    t.record("a damaged part", problem(lambda: check(directory), directory / "part-1.safetensors", "download it again"))
    t.check()


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
    t.check()


def test_whole_runs_end_before_anything_is_built(tally: Any, tmp_path: Path) -> None:
    t = tally("whole runs on damaged inputs")
    task = make_task(tmp_path / "task")
    model, data = tmp_path / "task" / "model", tmp_path / "task" / "train.jsonl"
    whole = {path.name: path.read_bytes() for path in (*model.iterdir(), data)}
    long_row = row(prompt="1" * 10_000_000)
    cases: tuple[tuple[str, Path, bytes, int, str], ...] = (
        ("a file cut off", model / "model.safetensors", whole["model.safetensors"][:-9], 2, "download it again."),
        ("no configuration", model / "config.json", b"{", 2, "its config.json is not JSON"),
        ("a tokenizer of garbage", model / "tokenizer.json", b"\xff", 1, "whose tokenizer does not load"),
        ("gzip", data, gzip.compress(whole["train.jsonl"]), 2, "is compressed with gzip"),
        ("half a row", data, whole["train.jsonl"][:-9], 1, ", line 16 is not JSON"),
        ("10 MB", data, whole["train.jsonl"] + long_row, 1, ", line 17 has a prompt of 10000000 char"),
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
    t.check()
