"""Damaged and odd data sets and model directories: each is one message that names the file, and for
JSONL the line."""

import codecs
import datetime
import gzip
import json
import shutil
import struct
import time
from decimal import Decimal
from pathlib import Path

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
from slime_tis.trainer.engines.local.load_model import load_model, load_tokenizer
from slime_tis.trainer.megatron.architecture import read_hf_config
from slime_tis.trainer.megatron.hf_weights import HfTensors
from tests.checkpoints import make_checkpoint, make_tokenizer
from tests.faults.forked import run_forked
from tests.runs import make_task

TOKENIZER = make_tokenizer()
SIZES = ModelSizes(context_len=128, vocab_size=64)
LONGEST_MESSAGE = 600
SECONDS = 5.0


def refused(work, *names):
    """Work is refused in time by one short printable message that has the names."""
    began = time.monotonic()
    with pytest.raises(ValueError) as refusal:
        work()
    message = str(refusal.value)
    assert time.monotonic() - began < SECONDS
    assert len(message) <= LONGEST_MESSAGE and message.isprintable() and message.endswith("."), (
        message[:300]
    )
    assert [str(name) for name in names if str(name) not in message] == [], message


def row(**fields):
    return json.dumps({"prompt": "31>", "label": "13", **fields}).encode() + b"\n"


GOOD = row()


def deep(depth):
    return b"[" * depth + b"]" * depth


FILES = {
    "gzip": (gzip.compress(GOOD), "line 1 is not UTF-8"),
    "UTF-16 with a mark": (GOOD.decode().encode("utf-16"), "line 1 is not UTF-8"),
    "UTF-16 without a mark": (GOOD.decode().encode("utf-16-le"), "line 1 is not JSON"),
    "parquet by another name": (b"PAR1" + bytes(100), "line 1 is not JSON"),
    "noughts": (bytes(1000), "line 1 is not JSON"),
    "blank lines": (b"\n \n\t\n", "is empty"),
}
"""Files that are not JSONL at all."""

LINES = {
    "invalid UTF-8": (b'{"prompt": "\xff", "label": "1"}\n', "not UTF-8"),
    "a number of 5,000 digits": (
        b'{"prompt": "1", "label": -' + b"9" * 5000 + b"}\n",
        "limit (4300 digits)",
    ),
    "lists nested 100,000 deep": (
        b'{"prompt": "1", "label": ' + deep(100_000) + b"}\n",
        "nested too deep",
    ),
    "half a row": (b'{"prompt": "1", "lab', "not JSON"),
    "no prompt": (b'{"text": "1", "label": "1"}\n', "no key 'prompt'"),
    "no label": (b'{"prompt": "1"}\n', "no key 'label'"),
    "an empty prompt": (row(prompt=""), "empty prompt"),
    "a prompt of null": (row(prompt=None), "type NoneType"),
    "a prompt of messages": (
        row(prompt=[{"role": "user", "content": "1"}]),
        "--apply-chat-template",
    ),
    "half a pair in the prompt": (row(prompt="ab\ud800c"), "surrogate"),
    "metadata of a list": (row(metadata=[1]), "'metadata' that is not a mapping"),
    "metadata nested 200 deep": (row(metadata={"a": json.loads(deep(200))}), "nests deeper"),
    "a prompt that fills the context": (row(prompt="1" * 128), "128 tokens"),
    "a prompt of 10 MB": (row(prompt="1" * 10_000_000), "10000000 characters"),
}
"""Second lines of files whose first is good."""


def load(path, **options):
    return load_prompts(
        path, TOKENIZER, **{"input_key": "prompt", "label_key": "label", "sizes": SIZES, **options}
    )


CONTENTS = {name: (content, [words]) for name, (content, words) in FILES.items()}
CONTENTS |= {
    name: (GOOD + line, ["p.jsonl, line 2", words]) for name, (line, words) in LINES.items()
}


@pytest.mark.parametrize(("content", "words"), CONTENTS.values(), ids=CONTENTS)
def test_malformed_data_sets(content, words, tmp_path):
    (tmp_path / "p.jsonl").write_bytes(content)
    refused(lambda: load(tmp_path / "p.jsonl"), tmp_path / "p.jsonl", *words)


@pytest.mark.parametrize(
    "prompt", [[{"role": "user", "content": {"a": [1]}}], "\ud800"], ids=["no text", "half a pair"]
)
def test_malformed_chats(prompt, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(GOOD + row(prompt=prompt))
    refused(lambda: load(path, apply_chat_template=True), f"{path}, line 2")


def test_a_long_prompt_alone_and_tokens_that_the_model_does_not_have(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(row(prompt="1" * 20_000_000))
    refused(lambda: load(path, max_prompt_len=9), path, "raise it")
    path.write_bytes(row(prompt="1") + row(prompt="?"))
    words = "has a prompt with token 63, but the model's vocabulary ends at 59"
    refused(
        lambda: load(path, sizes=ModelSizes(context_len=None, vocab_size=60)),
        f"{path}, line 2 {words}",
    )


LABELS = [1, 2.5, None]
ACCEPTED = {
    "a UTF-8 mark": (codecs.BOM_UTF8 + GOOD, [("31>", "13")]),
    "Windows line ends": (GOOD.replace(b"\n", b"\r\n") * 2, [("31>", "13")] * 2),
    "Unicode line separators": (row(prompt="3\u2028\u0085\x1c1"), [("3\u2028\u0085\x1c1", "13")]),
    "labels of other types": (
        row(label=LABELS) + row(label=None),
        [("31>", LABELS), ("31>", None)],
    ),
    "long ones among short ones": (GOOD + row(prompt="1" * 10_000_000) + GOOD, [("31>", "13")] * 2),
}


@pytest.mark.parametrize(("content", "expected"), ACCEPTED.values(), ids=ACCEPTED)
def test_data_sets_that_are_accepted(content, expected, tmp_path):
    (tmp_path / "p.jsonl").write_bytes(content)
    began = time.monotonic()
    assert [
        (prompt.text, prompt.label) for prompt in load(tmp_path / "p.jsonl", max_prompt_len=99)
    ] == expected
    assert time.monotonic() - began < SECONDS


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "p.parquet"

    def write(**columns):
        rows = {"prompt": ["31>", "7>"], "label": ["13", "7"], **columns}
        parquet.write_table(pyarrow.table(rows), path)
        return path.read_bytes()

    whole = write()
    for content in (
        GOOD,
        whole[:-20],
        whole[:-60] + bytes(40) + whole[-20:],
    ):  # JSONL, cut off, damaged metadata
        path.write_bytes(content)
        refused(lambda: load(path), path)
    write(label=[b"1", b"2"])
    refused(lambda: load(path), f"{path}, row 1", "label of type bytes")
    write(metadata=[1, 2])
    refused(lambda: load(path), f"{path}, row 1", "'metadata' that is not a mapping")
    write(date=[datetime.date(2024, 1, 2)] * 2)
    assert len(load(path)) == 2
    write(label=[Decimal("7.50"), Decimal("-1E+3")])
    assert [prompt.label for prompt in load(path)] == ["7.50", "-1000.00"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    return {
        family: make_checkpoint(directory / family, family)
        for family in ("qwen2", "qwen3", "llama")
    }


def spoiled(source, target, **files):
    """A copy of a checkpoint with other contents of some files; None removes one."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    for name, content in files.items():
        path = target / name.replace("__", ".")
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
    return target


CONFIGS = {
    "none": (None, "no config.json"),
    "cut off": (b'{"architectures": [', "not JSON"),
    "invalid UTF-8": (b'{"a": "\xff"}', "not UTF-8"),
    "nested 100,000 deep": (b'{"a":' + deep(100_000) + b"}", "nested too deeply"),
    "a number of 5,000 digits": (b'{"hidden_size": ' + b"9" * 5000 + b"}", "not JSON"),
    "a list": (b"[]", "type list"),
    "another architecture": ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
    "latent attention": (
        {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512},
        "DeepseekV3ForCausalLM",
    ),
    "fp8": ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    "an unknown rope": ({"rope_parameters": {"rope_type": "wormhole"}}, "'wormhole'"),
    "a rope of theta -1": ({"rope_parameters": {"rope_theta": -1}}, "rope_theta -1"),
    "epsilon NaN": (
        b'{"architectures": ["Qwen3ForCausalLM"], "rms_norm_eps": NaN}',
        "rms_norm_eps nan",
    ),
    "3 groups": ({"num_key_value_heads": 3}, "num_attention_heads 4"),
    "heads that do not divide": (
        {"head_dim": None, "num_attention_heads": 6},
        "heads of 5.33333 numbers",
    ),
    "hidden_size below 0": ({"hidden_size": -1}, "hidden_size -1"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers 0"),
    "10**12 tokens": ({"vocab_size": 10**12}, "vocab_size 1000000000000"),
}


@pytest.mark.parametrize(("content", "words"), CONFIGS.values(), ids=CONFIGS)
def test_configurations(content, words, checkpoints, tmp_path):
    source = checkpoints["qwen3"]
    if isinstance(content, dict):
        content = json.dumps(json.loads((source / "config.json").read_text()) | content).encode()
    directory = spoiled(source, tmp_path / "model", config__json=content)
    refused(lambda: read_model_config(directory), f"--hf-checkpoint is '{directory}'", words)


ENDS = {
    "cut off": b"{",
    "binary": bytes(range(256)),
    "an end of -1": b'{"eos_token_id": [2, -1]}',
    "an end of 2**70": b'{"eos_token_id": 1180591620717411303424}',
}


@pytest.mark.parametrize("content", ENDS.values(), ids=ENDS)
def test_generation_configurations(content, checkpoints, tmp_path):
    directory = spoiled(checkpoints["qwen3"], tmp_path / "model", generation_config__json=content)
    refused(lambda: check_generation_config(directory), directory, "generation_config.json")


YARN = {"rope_type": "yarn"}


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_scaling": YARN, "rope_parameters": YARN},
        {"dtype": "float31", "torch_dtype": "float31"},
    ],
    ids=["a rope without its factor", "an unknown type of numbers"],
)
def test_configurations_that_transformers_refuses(fields, checkpoints, tmp_path):
    config = json.loads((checkpoints["qwen3"] / "config.json").read_text())
    text = json.dumps({**config, **fields}).encode()
    directory = spoiled(checkpoints["qwen3"], tmp_path / "model", config__json=text)
    refused(lambda: (read_hf_config(directory), load_model(directory, torch.float32)), directory)


def test_tokenizers(checkpoints, tmp_path):
    source = checkpoints["qwen3"]
    cut = (source / "tokenizer.json").read_bytes()[:100]
    for files in (
        {"tokenizer__json": b"\xff\xfe"},
        {"tokenizer__json": cut},
        {"tokenizer__json": None},
    ):
        directory = spoiled(source, tmp_path / "model", **files, tokenizer_config__json=None)
        refused(lambda d=directory: load_tokenizer(d), directory)


def check(directory):
    check_tensors(directory, read_model_config(directory))


def edited(source, target, edit):
    """A copy of a checkpoint with other tensors."""
    directory = spoiled(source, target)
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        directory / "model.safetensors",
    )
    return directory


def header(content, length=None):
    return struct.pack("<Q", len(content) if length is None else length) + content


Q, DOWN = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"


WEIGHTS = {
    "empty": lambda whole: b"",
    "the last byte missing": lambda whole: whole[:-1],
    "a pointer of Git LFS": lambda whole: (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 988097824\n"
    ),
    "a header of 2**63 bytes": lambda whole: header(b"{}", 2**63),
    "offsets beyond the end": lambda whole: header(
        b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}'
    ),
}
TENSORS = {
    "a wrong shape": (lambda w: w.update({Q: w[Q][:-1]}), f"{Q} has the shape [63, 32]"),
    "whole numbers": (lambda w: w.update({Q: w[Q].long()}), f"{Q} is of type I64"),
    "fp8": (lambda w: w.update({Q: w[Q].to(torch.float8_e4m3fn)}), f"{Q} is of type F8_E4M3"),
    "a tensor missing": (lambda w: w.pop(DOWN), f"has no tensor {DOWN}"),
    "no output layer": (lambda w: w.pop("lm_head.weight"), "has no tensor lm_head.weight"),
}


@pytest.mark.parametrize("damage", WEIGHTS.values(), ids=WEIGHTS)
def test_damaged_safetensors(damage, checkpoints, tmp_path):
    whole = (checkpoints["qwen3"] / "model.safetensors").read_bytes()
    directory = spoiled(checkpoints["qwen3"], tmp_path / "model", model__safetensors=damage(whole))
    refused(lambda: check(directory), directory / "model.safetensors", "download it again")


@pytest.mark.parametrize(("edit", "words"), TENSORS.values(), ids=TENSORS)
def test_other_tensors(edit, words, checkpoints, tmp_path):
    directory = edited(checkpoints["qwen3"], tmp_path / "model", edit)
    refused(lambda: check(directory), directory, words)


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_weights_that_are_not_finite(value, checkpoints, tmp_path):
    directory = edited(
        checkpoints["qwen3"], tmp_path / "model", lambda w: w[Q].view(-1).__setitem__(7, value)
    )
    words = f"{directory / 'model.safetensors'}: the tensor {Q} holds NaN or infinity"
    refused(lambda: HfTensors(directory, tied=False)[Q], words)


def test_no_safetensors_and_no_sizes(checkpoints, tmp_path):
    source, target = checkpoints["qwen3"], tmp_path / "model"
    directory = spoiled(
        source, target, model__safetensors=None, pytorch_model__bin=b"\x80\x02}q\x00."
    )
    refused(lambda: check(directory), directory, "safetensors")
    config = json.loads((source / "config.json").read_text())
    text = json.dumps({key: value for key, value in config.items() if key != "vocab_size"}).encode()
    directory = spoiled(source, target, config__json=text)
    refused(lambda: check(directory), directory / "config.json", "has no vocab_size")


def indexed(source, target, index):
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


def naming(file):
    """An index whose query projection is in another file."""
    return lambda weight_map: {
        "weight_map": {**weight_map, Q: file(weight_map) if callable(file) else file}
    }


INDICES = {
    "empty": (b"", "not JSON"),
    "nested deeply": (deep(100_000), "nested too deeply"),
    "a weight_map of a list": ({"weight_map": ["a"]}, "no weight_map"),
    "a file of 5": (naming(5), "not a file name"),
    "a missing file": (naming("part-7.safetensors"), "does not exist"),
    "a file above": (naming("../outside.safetensors"), "not a file within"),
    "an absolute file": (naming("/dev/null"), "not a file within"),
    "a null byte": (naming("a\0b"), r"'a\x00b'"),
    "another shard": (
        naming(lambda m: next(file for file in m.values() if file != m[Q])),
        f"has no tensor {Q}",
    ),
    "a tensor missing": (
        lambda m: {"weight_map": {k: v for k, v in m.items() if k != Q}},
        f"has no tensor {Q}",
    ),
}


@pytest.mark.parametrize(("index", "words"), INDICES.values(), ids=INDICES)
def test_indices(index, words, checkpoints, tmp_path):
    shutil.copy(checkpoints["llama"] / "model.safetensors", tmp_path / "outside.safetensors")
    directory = indexed(checkpoints["llama"], tmp_path / "model", index)
    refused(lambda: check(directory), directory, words)


def test_a_damaged_part(checkpoints, tmp_path):
    directory = indexed(
        checkpoints["llama"], tmp_path / "model", lambda weight_map: {"weight_map": weight_map}
    )
    part = directory / "part-1.safetensors"
    part.write_bytes(part.read_bytes()[:-1])
    refused(lambda: check(directory), part, "download it again")


def test_model_directories_that_are_accepted(checkpoints, tmp_path):
    for source in checkpoints.values():
        check(source)
    directory = indexed(
        checkpoints["llama"], tmp_path / "model", lambda weight_map: {"weight_map": weight_map}
    )
    check(directory)
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for place, file in enumerate(
        sorted(directory.iterdir())
    ):  # Hugging Face's cache has a link for each file
        shutil.move(file, blobs / str(place))
        file.symlink_to(Path("..", "blobs", str(place)))
    check(directory)
    assert {path.parent for path in tensor_files(directory).values()} == {directory}
    tied = make_checkpoint(tmp_path / "tied", "qwen3", tie_word_embeddings=True)
    check(tied)
    assert "lm_head.weight" not in tensor_files(tied)
    config = json.loads((checkpoints["llama"] / "config.json").read_text())
    old = make_checkpoint(tmp_path / "old", "llama", head_dim=8)
    new_fields = ("head_dim", "tie_word_embeddings", "rope_parameters")
    (old / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if k not in new_fields})
    )
    check(old)


WHOLE_RUNS = {
    "a file cut off": (
        "model/model.safetensors",
        lambda whole: whole[:-9],
        2,
        "download it again.",
    ),
    "no configuration": ("model/config.json", lambda whole: b"{", 2, "its config.json is not JSON"),
    "a tokenizer of garbage": (
        "model/tokenizer.json",
        lambda whole: b"\xff",
        1,
        "whose tokenizer does not load",
    ),
    "half a row": ("train.jsonl", lambda whole: whole[:-9], 2, ", line 16 is not JSON"),
}


@pytest.mark.parametrize("name", WHOLE_RUNS)
def test_whole_runs_end_before_anything_is_built(name, tmp_path):
    file, damage, status, words = WHOLE_RUNS[name]
    task, path = make_task(tmp_path), tmp_path / file
    path.write_bytes(damage(path.read_bytes()))
    outcome = run_forked(
        [*task, "--output-dir", str(tmp_path / "run")], tmp_path / "log", timeout=240
    )
    assert (outcome.status, outcome.traceback) == (status, False), outcome.error
    assert (
        words in outcome.error.splitlines()[-1]
        and str(path.parent) in outcome.error.splitlines()[-1]
    )
