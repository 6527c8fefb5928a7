"""Damaged and odd data sets and model directories: each is one message that names the file, and for
JSONL the line."""

import codecs
import datetime
import gzip
import json
import shutil
import struct
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slime_tis.hf_directory import (
    ModelSizes,
    check_generation_config,
    read_model_config,
)
from slime_tis.hf_tensors import check_tensors, tensor_files
from slime_tis.trainer.data.prompts import load_prompts
from slime_tis.trainer.data.sample import Prompt
from slime_tis.trainer.engines.local.load_model import load_model, load_tokenizer
from slime_tis.trainer.megatron.architecture import read_hf_config
from slime_tis.trainer.megatron.hf_weights import HfTensors
from tests.checkpoints import make_checkpoint, make_tokenizer
from tests.faults.forked import run_forked
from tests.runs import make_task

TOKENIZER = make_tokenizer()
SIZES = ModelSizes(context_len=128, vocab_size=64)
LONGEST_MESSAGE = 600
"""Characters."""


def assert_refused(work: Callable[[], Any], *words: str | Path) -> None:
    """Work is refused by one short printable message that has the words."""
    with pytest.raises(ValueError) as refusal:
        work()
    message = str(refusal.value)
    assert len(message) <= LONGEST_MESSAGE, message[:300]
    assert message.isprintable() and message.endswith("."), message[:300]
    missing = [word for word in words if str(word) not in message]
    assert missing == [], message


def row(**fields: Any) -> bytes:
    return json.dumps({"prompt": "31>", "label": "13", **fields}).encode() + b"\n"


GOOD = row()


def deep(depth: int) -> bytes:
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


def load(path: Path, **options: Any) -> list[Prompt]:
    defaults = {"input_key": "prompt", "label_key": "label", "sizes": SIZES}
    return load_prompts(path, TOKENIZER, **{**defaults, **options})


CONTENTS = {name: (content, [words]) for name, (content, words) in FILES.items()}
CONTENTS |= {
    name: (GOOD + line, ["p.jsonl, line 2", words]) for name, (line, words) in LINES.items()
}


@pytest.mark.parametrize(("content", "words"), CONTENTS.values(), ids=CONTENTS)
def test_malformed_data_sets(content: bytes, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_bytes(content)
    assert_refused(lambda: load(tmp_path / "p.jsonl"), tmp_path / "p.jsonl", *words)


@pytest.mark.parametrize(
    "prompt", [[{"role": "user", "content": {"a": [1]}}], "\ud800"], ids=["no text", "half a pair"]
)
def test_malformed_chats(prompt: Any, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(GOOD + row(prompt=prompt))
    assert_refused(lambda: load(path, apply_chat_template=True), f"{path}, line 2")


def test_a_file_whose_only_prompt_is_too_long(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(row(prompt="1" * 20_000_000))
    assert_refused(lambda: load(path, max_prompt_len=9), path, "raise it")


def test_tokens_that_the_model_does_not_have(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(row(prompt="1") + row(prompt="?"))
    sizes = ModelSizes(context_len=None, vocab_size=60)
    words = "has a prompt with token 63, but the model's vocabulary ends at 59"
    assert_refused(lambda: load(path, sizes=sizes), f"{path}, line 2 {words}")


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
def test_data_sets_that_are_accepted(
    content: bytes, expected: list[tuple[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "p.jsonl").write_bytes(content)
    prompts = load(tmp_path / "p.jsonl", max_prompt_len=99)
    assert [(prompt.text, prompt.label) for prompt in prompts] == expected


def write_parquet(path: Path, **columns: list[Any]) -> None:
    """Writes two rows, with these columns besides or instead of prompt and label."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = {"prompt": ["31>", "7>"], "label": ["13", "7"], **columns}
    parquet.write_table(pyarrow.table(rows), path)


PARQUET_DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "JSONL": lambda content: GOOD,
    "cut off": lambda content: content[:-20],
    "damaged metadata": lambda content: content[:-60] + bytes(40) + content[-20:],
}


@pytest.mark.parametrize("damage", PARQUET_DAMAGE.values(), ids=PARQUET_DAMAGE)
def test_damaged_parquet(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    write_parquet(path)
    path.write_bytes(damage(path.read_bytes()))
    assert_refused(lambda: load(path), path)


PARQUET_COLUMNS: dict[str, tuple[dict[str, list[Any]], str]] = {
    "bytes as label": ({"label": [b"1", b"2"]}, "label of type bytes"),
    "numbers as metadata": ({"metadata": [1, 2]}, "'metadata' that is not a mapping"),
}


@pytest.mark.parametrize(("columns", "words"), PARQUET_COLUMNS.values(), ids=PARQUET_COLUMNS)
def test_parquet_columns_of_a_wrong_type(
    columns: dict[str, list[Any]], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "p.parquet"
    write_parquet(path, **columns)
    assert_refused(lambda: load(path), f"{path}, row 1", words)


def test_dates_of_a_parquet_file_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    write_parquet(path, date=[datetime.date(2024, 1, 2)] * 2)
    assert len(load(path)) == 2


def test_decimals_of_a_parquet_file_become_text(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    write_parquet(path, label=[Decimal("7.50"), Decimal("-1E+3")])
    assert [prompt.label for prompt in load(path)] == ["7.50", "-1000.00"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    return {
        family: make_checkpoint(directory / family, family)
        for family in ("qwen2", "qwen3", "llama")
    }


def spoiled(source: Path, target: Path, **files: bytes | None) -> Path:
    """A copy of a checkpoint with other contents of some files; None removes one.

    `config__json` stands for config.json.
    """
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
        "num_key_value_heads 2",
    ),
    "fp8": ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    "an unknown rope": ({"rope_parameters": {"rope_type": "wormhole"}}, "'wormhole'"),
    "dual chunk attention": (
        {"dual_chunk_attention_config": {"chunk_size": 8}},
        "dual_chunk_attention_config",
    ),
    "capped logits": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
    "a window that is on": ({"sliding_window": 8, "use_sliding_window": None}, "sliding_window 8"),
    "linear attention": (
        {"layer_types": ["full_attention", "linear_attention"]},
        "'linear_attention' in layer_types",
    ),
    "an unknown field of the rope": (
        {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
        "mrope_section [2, 1, 1] in rope_scaling",
    ),
    "a rope of the sequence's length": (
        {"rope_scaling": {"type": "longrope"}},
        "rope_type 'longrope'",
    ),
    "a rope that servers scale differently": (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "rope_type 'dynamic'",
    ),
    "a scale of -1": ({"query_pre_attn_scalar": -1}, "query_pre_attn_scalar -1"),
    "a limit of NaN": ({"swiglu_limit": float("nan")}, "swiglu_limit nan"),
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
def test_configurations(
    content: bytes | dict[str, Any] | None,
    words: str,
    checkpoints: dict[str, Path],
    tmp_path: Path,
) -> None:
    source = checkpoints["qwen3"]
    if isinstance(content, dict):
        config = json.loads((source / "config.json").read_text())
        content = json.dumps({**config, **content}).encode()
    directory = spoiled(source, tmp_path / "model", config__json=content)
    assert_refused(lambda: read_model_config(directory), f"--hf-checkpoint is '{directory}'", words)


ENDS = {
    "cut off": b"{",
    "binary": bytes(range(256)),
    "an end of -1": b'{"eos_token_id": [2, -1]}',
    "an end of 2**70": b'{"eos_token_id": 1180591620717411303424}',
}


@pytest.mark.parametrize("content", ENDS.values(), ids=ENDS)
def test_generation_configurations(
    content: bytes, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    directory = spoiled(checkpoints["qwen3"], tmp_path / "model", generation_config__json=content)
    assert_refused(lambda: check_generation_config(directory), directory, "generation_config.json")


YARN = {"rope_type": "yarn"}


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_scaling": YARN, "rope_parameters": YARN},
        {"dtype": "float31", "torch_dtype": "float31"},
    ],
    ids=["a rope without its factor", "an unknown type of numbers"],
)
def test_configurations_that_transformers_refuses(
    fields: dict[str, Any], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    config = json.loads((checkpoints["qwen3"] / "config.json").read_text())
    text = json.dumps({**config, **fields}).encode()
    directory = spoiled(checkpoints["qwen3"], tmp_path / "model", config__json=text)
    assert_refused(
        lambda: (read_hf_config(directory), load_model(directory, torch.float32)), directory
    )


TOKENIZERS: dict[str, Callable[[bytes], bytes | None]] = {
    "invalid UTF-8": lambda content: b"\xff\xfe",
    "cut off": lambda content: content[:100],
    "none": lambda content: None,
}


@pytest.mark.parametrize("damage", TOKENIZERS.values(), ids=TOKENIZERS)
def test_tokenizers(
    damage: Callable[[bytes], bytes | None], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    source = checkpoints["qwen3"]
    files = {
        "tokenizer__json": damage((source / "tokenizer.json").read_bytes()),
        "tokenizer_config__json": None,
    }
    directory = spoiled(source, tmp_path / "model", **files)
    assert_refused(lambda: load_tokenizer(directory), directory)


def check(directory: Path) -> None:
    check_tensors(directory, read_model_config(directory))


def edited(source: Path, target: Path, edit: Callable[[dict[str, Tensor]], Any]) -> Path:
    """A copy of a checkpoint with other tensors."""
    directory = spoiled(source, target)
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, directory / "model.safetensors")
    return directory


def header(content: bytes, length: int | None = None) -> bytes:
    """The beginning of a safetensors file; `length` is that of the content by default."""
    if length is None:
        length = len(content)
    return struct.pack("<Q", length) + content


Q = "model.layers.0.self_attn.q_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


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
def test_damaged_safetensors(
    damage: Callable[[bytes], bytes], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    whole = (checkpoints["qwen3"] / "model.safetensors").read_bytes()
    directory = spoiled(checkpoints["qwen3"], tmp_path / "model", model__safetensors=damage(whole))
    assert_refused(lambda: check(directory), directory / "model.safetensors", "download it again")


@pytest.mark.parametrize(("edit", "words"), TENSORS.values(), ids=TENSORS)
def test_other_tensors(
    edit: Callable[[dict[str, Tensor]], Any],
    words: str,
    checkpoints: dict[str, Path],
    tmp_path: Path,
) -> None:
    directory = edited(checkpoints["qwen3"], tmp_path / "model", edit)
    assert_refused(lambda: check(directory), directory, words)


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_weights_that_are_not_finite(
    value: float, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    directory = edited(
        checkpoints["qwen3"], tmp_path / "model", lambda w: w[Q].view(-1).__setitem__(7, value)
    )
    words = f"{directory / 'model.safetensors'}: the tensor {Q} holds NaN or infinity"
    assert_refused(lambda: HfTensors(directory, tied=False)[Q], words)


def test_a_checkpoint_without_safetensors(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    files = {"model__safetensors": None, "pytorch_model__bin": b"\x80\x02}q\x00."}
    directory = spoiled(checkpoints["qwen3"], tmp_path / "model", **files)
    assert_refused(lambda: check(directory), directory, "safetensors")


def test_a_configuration_without_sizes(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    config = json.loads((checkpoints["qwen3"] / "config.json").read_text())
    del config["vocab_size"]
    text = json.dumps(config).encode()
    directory = spoiled(checkpoints["qwen3"], tmp_path / "model", config__json=text)
    assert_refused(lambda: check(directory), directory / "config.json", "has no vocab_size")


WeightMap = dict[str, str]


def indexed(source: Path, target: Path, index: Callable[[WeightMap], Any] | Any) -> Path:
    """A copy of a checkpoint in two files, with any index.

    An index is bytes, JSON, or a function of the correct map of weights.
    """
    directory = spoiled(source, target, model__safetensors=None)
    tensors = load_file(source / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for part in range(2):
        file = f"part-{part}.safetensors"
        part_names = names[part::2]
        save_file({name: tensors[name] for name in part_names}, directory / file)
        weight_map.update(dict.fromkeys(part_names, file))
    content = index(weight_map) if callable(index) else index
    if not isinstance(content, bytes):
        content = json.dumps(content).encode()
    (directory / "model.safetensors.index.json").write_bytes(content)
    return directory


def correct_index(weight_map: WeightMap) -> dict[str, WeightMap]:
    return {"weight_map": weight_map}


def naming(file: Any) -> Callable[[WeightMap], dict[str, Any]]:
    """An index whose query projection is in another file."""
    return lambda weight_map: {"weight_map": {**weight_map, Q: file}}


def with_other_shard(weight_map: WeightMap) -> dict[str, WeightMap]:
    """An index whose query projection is in the wrong one of the two files."""
    others = set(weight_map.values()) - {weight_map[Q]}
    return {"weight_map": {**weight_map, Q: others.pop()}}


def without_query(weight_map: WeightMap) -> dict[str, WeightMap]:
    return {"weight_map": {name: file for name, file in weight_map.items() if name != Q}}


INDICES = {
    "empty": (b"", "not JSON"),
    "nested deeply": (deep(100_000), "nested too deeply"),
    "a weight_map of a list": ({"weight_map": ["a"]}, "no weight_map"),
    "a file of 5": (naming(5), "not a file name"),
    "a missing file": (naming("part-7.safetensors"), "does not exist"),
    "a file above": (naming("../outside.safetensors"), "not a file within"),
    "an absolute file": (naming("/dev/null"), "not a file within"),
    "a null byte": (naming("a\0b"), r"'a\x00b'"),
    "another shard": (with_other_shard, f"has no tensor {Q}"),
    "a tensor missing": (without_query, f"has no tensor {Q}"),
}


@pytest.mark.parametrize(("index", "words"), INDICES.values(), ids=INDICES)
def test_indices(index: Any, words: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    shutil.copy(checkpoints["llama"] / "model.safetensors", tmp_path / "outside.safetensors")
    directory = indexed(checkpoints["llama"], tmp_path / "model", index)
    assert_refused(lambda: check(directory), directory, words)


def test_a_damaged_part(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    directory = indexed(checkpoints["llama"], tmp_path / "model", correct_index)
    part = directory / "part-1.safetensors"
    part.write_bytes(part.read_bytes()[:-1])
    assert_refused(lambda: check(directory), part, "download it again")


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_each_family_is_accepted(family: str, checkpoints: dict[str, Path]) -> None:
    check(checkpoints[family])


def test_several_files_are_accepted(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    check(indexed(checkpoints["llama"], tmp_path / "model", correct_index))


def test_links_to_other_directories_are_accepted(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Hugging Face's cache has a link to a blob for each file."""
    directory = indexed(checkpoints["llama"], tmp_path / "model", correct_index)
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(directory.iterdir())):
        shutil.move(file, blobs / str(number))
        file.symlink_to(Path("..", "blobs", str(number)))
    check(directory)
    assert {path.parent for path in tensor_files(directory).values()} == {directory}


def test_tied_weights_need_no_output_layer(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "tied", "qwen3", tie_word_embeddings=True)
    check(directory)
    assert "lm_head.weight" not in tensor_files(directory)


def test_configurations_of_old_llamas_are_accepted(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    config = json.loads((checkpoints["llama"] / "config.json").read_text())
    directory = make_checkpoint(tmp_path / "old", "llama", head_dim=8)
    # fields that configurations of the first Llamas do not have
    for name in ("head_dim", "tie_word_embeddings", "rope_parameters"):
        config.pop(name, None)
    (directory / "config.json").write_text(json.dumps(config))
    check(directory)


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
def test_whole_runs_end_before_anything_is_built(name: str, tmp_path: Path) -> None:
    file, damage, status, words = WHOLE_RUNS[name]
    task = make_task(tmp_path)
    path = tmp_path / file
    path.write_bytes(damage(path.read_bytes()))
    flags = [*task, "--output-dir", str(tmp_path / "run")]
    outcome = run_forked(flags, tmp_path / "log", timeout=240)
    assert (outcome.status, outcome.traceback) == (status, False), outcome.error
    message = outcome.error.splitlines()[-1]
    assert words in message
    assert str(path.parent) in message
