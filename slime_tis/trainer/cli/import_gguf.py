"""A GGUF file as the Hugging Face directory that `--hf-checkpoint` takes: `slime-tis import-gguf FILE.gguf OUT_DIR`.

    metadata → config.json · blocks → dequantized and renamed → safetensors · vocabulary, chat template → tokenizer

Names and layouts are those of llama.cpp's `convert_hf_to_gguf.py`, read backwards. Tensors are converted one at a time,
so that memory holds one file of weights.
"""

from __future__ import annotations

import importlib.util
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_tis.errors import first_line, quoted, quoted_path
from slime_tis.hf_directory import check_tensors, expected_tensors, read_model_config
from slime_tis.trainer.storage import exports
from slime_tis.trainer.storage.directories import LOCK, held, unwritable

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader, ReaderTensor
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""GGUF's name of an architecture → the class in transformers."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""Types that weights can be written in → torch's name."""

OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
"""Tensors outside of the layers."""
INSIDE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Modules of a layer, `blk.N.…` → `model.layers.N.…`."""
ROPE_FREQS = "rope_freqs.weight"
"""Divisors of the rotary frequencies, which Llama 3.1 and its successors have."""
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The rotary scaling of every Llama 3.1 to 3.3, whose `factor` alone differs."""

BYTE_LEVEL_PRE = ("default", "gpt-2")
"""Pre-tokenizers that are GPT-2's own."""
DIGIT_PRE = ("smollm", "starcoder", "refact", "command-r", "codeshell")
"""Pre-tokenizers that are GPT-2's with every digit a piece of its own; transformers takes them for plain GPT-2."""


@dataclass(frozen=True, kw_only=True)
class Gguf:
    """An opened GGUF file of an architecture that can be imported."""

    path: Path
    """The file."""
    reader: GGUFReader
    """Its metadata, and its tensors as memory maps."""
    architecture: str
    """A key of `ARCHITECTURES`."""

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the metadata; `{arch}` in the key becomes the architecture."""
        field = self.reader.get_field(key.format(arch=self.architecture))
        return default if field is None else field.contents()

    def number(self, key: str, default: Any = None) -> Any:
        """A number of the metadata.

        Raises:
            ValueError: There is none and no default, or it is something else.
        """
        value = self.get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            name = key.format(arch=self.architecture)
            raise ValueError(f"{self.path} has {name} {quoted(value)} where a number is needed.")
        return value

    @property
    def tensors(self) -> dict[str, ReaderTensor]:
        """Tensors by their names in GGUF, without the rotary divisors, which are part of the configuration."""
        return {tensor.name: tensor for tensor in self.reader.tensors if tensor.name != ROPE_FREQS}


def import_gguf(file: str | Path, directory: str | Path, *, dtype: str = "fp32") -> str:
    """Writes a GGUF file as a Hugging Face directory, whole or not at all; returns what to print about it.

    Args:
        file: GGUF of a dense Llama, Qwen2 or Qwen3 model in one file, quantized or not, with its tokenizer.
        directory: Where to write: absent, empty or an earlier import, which is replaced.
        dtype: Type of the written weights, a key of `DTYPES`. Quantized weights are sums of products that bf16
            rounds once more.

    Raises:
        ValueError: A package is missing, the file cannot be imported, or the directory cannot be written.
        OSError: Writing failed; `directory` is as it was.
    """
    _need_packages()
    target = Path(directory).resolve()
    _check_target(target, directory)
    gguf = open_gguf(Path(file))
    config = model_config(gguf) | {"dtype": DTYPES[dtype]}
    _check_names(gguf, config)
    with held({target.with_name(f".{target.name}{LOCK}"): "OUT_DIR"}), tempfile.TemporaryDirectory() as scratch:
        tokenizer = read_tokenizer(gguf, Path(scratch), config["max_position_embeddings"])
        _write(gguf, config, tokenizer, target)
    return _summary(gguf, config, tokenizer, target, dtype)


def open_gguf(path: Path) -> Gguf:
    """Opens a file and checks that it is one that can be imported.

    Raises:
        ValueError: There is no file, it is not GGUF, or holds another kind of model.
    """
    from gguf import GGUFReader

    if not path.is_file():
        problem = "is not a file" if path.exists() else "does not exist"
        raise ValueError(f"{quoted_path(path)} {problem}; give a GGUF file.")
    try:
        reader = GGUFReader(path)
    except Exception as error:  # a wrong magic number is a ValueError, a file cut short whatever numpy raises
        raise ValueError(f"{quoted_path(path)} does not read as GGUF, or is cut off: {first_line(error)}.") from error
    field = reader.get_field("general.architecture")
    architecture = None if field is None else field.contents()
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"{path} is of the architecture {quoted(architecture)}, but supported are {known}.")
    gguf = Gguf(path=path, reader=reader, architecture=architecture)
    if gguf.get("split.count", 1) > 1:
        raise ValueError(f"{path} is one of several parts; join them with `llama-gguf-split --merge` first.")
    if gguf.get("{arch}.expert_count", 0):
        raise ValueError(f"{path} is a mixture of experts, which import-gguf does not read.")
    return gguf


def model_config(gguf: Gguf) -> dict[str, Any]:
    """The fields of config.json.

    Raises:
        ValueError: A size is missing, or the model has what the three architectures have not.
    """
    heads, hidden = gguf.number("{arch}.attention.head_count"), gguf.number("{arch}.embedding_length")
    head_dim = gguf.number("{arch}.attention.key_length", gguf.number("{arch}.rope.dimension_count", hidden // heads))
    for key in ("{arch}.attention.value_length", "{arch}.rope.dimension_count"):
        if gguf.number(key, head_dim) != head_dim:
            raise ValueError(
                f"{gguf.path} has {key.format(arch=gguf.architecture)} {gguf.get(key)}, but heads of {head_dim} "
                "numbers; models in which the two differ are not supported."
            )
    context = gguf.number("{arch}.context_length")
    if gguf.number("{arch}.attention.sliding_window", context) not in (0, context):
        raise ValueError(f"{gguf.path} has sliding-window attention, which is not supported.")
    if "token_embd.weight" not in gguf.tensors:
        raise ValueError(f"{gguf.path} has no tensor token_embd.weight, which every model has.")
    ids = {name: gguf.get(f"tokenizer.ggml.{key}_token_id") for name, key in TOKEN_KEYS.items()}
    return {
        "architectures": [ARCHITECTURES[gguf.architecture]],
        "vocab_size": int(gguf.tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "intermediate_size": gguf.number("{arch}.feed_forward_length"),
        "num_hidden_layers": gguf.number("{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": gguf.number("{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": _shortest(gguf.number("{arch}.attention.layer_norm_rms_epsilon")),
        "rope_parameters": _rope(gguf),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "bos_token_id": ids["bos"],
        "eos_token_id": _ends(ids),
        "pad_token_id": ids["eos"] if ids["pad"] is None else ids["pad"],
    }


TOKEN_KEYS = {"bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "pad": "padding"}
"""Special tokens → the part of their key in GGUF. `eot` and `eom` end a turn and a message, where `eos` ends a text."""


def _ends(ids: Mapping[str, int | None]) -> int | list[int] | None:
    """Tokens that end a response: one where they agree."""
    ends = list(dict.fromkeys(ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None))
    found: list[int] = [end for end in ends if end is not None]
    return found[0] if len(found) == 1 else (found or None)


def _shortest(value: float) -> float:
    """The shortest decimal that is this number in float32, as which GGUF has it: 9.999999747e-06 → 1e-05."""
    import numpy as np

    return float(str(np.float32(value)))


def _rope(gguf: Gguf) -> dict[str, Any]:
    """`rope_parameters` of config.json: base, and scaling where there is one."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(gguf.number("{arch}.rope.freq_base", 10000.0))}
    divisors = [tensor for tensor in gguf.reader.tensors if tensor.name == ROPE_FREQS]
    if divisors:
        return rope | llama3_rope(gguf, divisors[0].data, rope["rope_theta"])
    kind = gguf.get("{arch}.rope.scaling.type", "none")
    factor = gguf.number("{arch}.rope.scaling.factor", gguf.number("{arch}.rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return rope
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": _shortest(factor)}
    if kind == "yarn":
        original = gguf.number("{arch}.rope.scaling.original_context_length")
        return rope | {
            "rope_type": "yarn",
            "factor": _shortest(factor),
            "original_max_position_embeddings": original,
        }
    raise ValueError(f"{gguf.path} scales rotary positions by {quoted(kind)}; known are none, linear, yarn and llama3.")


def llama3_rope(gguf: Gguf, divisors: np.ndarray[Any, Any], theta: float) -> dict[str, Any]:
    """Llama 3's scaling, whose factor is the largest divisor, if the others are what it makes of that factor."""
    import numpy as np
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    found = np.asarray(divisors, dtype=np.float64)
    rope = {"rope_type": "llama3", "rope_theta": theta, "factor": round(float(found.max()), 3), **LLAMA3_ROPE}
    width = 2 * len(found)
    config = LlamaConfig(head_dim=width, max_position_embeddings=131072, rope_parameters=rope)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / theta ** (np.arange(0, width, 2) / width)
    if not np.allclose(plain / frequencies.double().numpy(), found, rtol=1e-3):
        raise ValueError(f"{gguf.path} has {ROPE_FREQS} that are not those of Llama 3, the only ones known.")
    return rope


def hf_name(name: str) -> str | None:
    """The name of a tensor in transformers; None for one that the three architectures have not."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in INSIDE:
        return None
    return f"model.layers.{match[1]}.{INSIDE[match[2]]}.{match[3]}"


def named_tensors(gguf: Gguf, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Weights under their names in transformers, dequantized one at a time.

    llama.cpp pairs neighbouring numbers in rotary positions where transformers pairs the halves of a head; its files of
    the architecture `llama` have the rows of queries and keys in that order.

    Raises:
        ValueError: A type of block that the package gguf cannot dequantize.
    """
    import numpy as np
    import torch
    from gguf import dequantize

    dtype = getattr(torch, config["dtype"])
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, tensor in gguf.tensors.items():
        try:
            weights = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        except NotImplementedError:
            kind = tensor.tensor_type.name
            raise ValueError(f"{gguf.path}: {name} is of type {kind}, which the package gguf does not read.") from None
        part = name.split(".")[-2]
        if gguf.architecture == "llama" and part in heads:
            weights = _halves_from_pairs(weights, heads[part])
        renamed = hf_name(name)
        assert renamed is not None  # _check_names
        yield renamed, torch.from_numpy(weights).to(dtype)


def _halves_from_pairs(weights: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of each head from the order 0, d/2, 1, d/2 + 1, … to 0, 1, 2, …."""
    paired = weights.reshape(heads, -1, 2, *weights.shape[1:])
    return paired.swapaxes(1, 2).reshape(weights.shape).copy()


def read_tokenizer(gguf: Gguf, scratch: Path, context: int) -> PreTrainedTokenizerBase:
    """The tokenizer with its chat template, as transformers reads it, with what its reader leaves open filled in.

    Args:
        gguf: The file.
        scratch: An empty directory. The file is linked there alone: transformers would also read what lies beside it.
        context: Longest text of the model, in tokens.

    Raises:
        ValueError: There is no tokenizer in the file, or one of an unknown kind.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    (scratch / "model.gguf").symlink_to(gguf.path.resolve())
    try:
        read = AutoTokenizer.from_pretrained(
            scratch, gguf_file="model.gguf", local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # of transformers and tokenizers, which share no class
        raise ValueError(f"{gguf.path} has a tokenizer that does not load: {first_line(error)}.") from error
    if gguf.get("tokenizer.ggml.pre") in DIGIT_PRE:
        read.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=read.backend_tokenizer,
        bos_token=read.bos_token,
        eos_token=read.eos_token,
        unk_token=read.unk_token,
        pad_token=read.pad_token or read.eos_token,
        chat_template=read.chat_template,
        model_max_length=context,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def _need_packages() -> None:
    """Whether the optional packages are installed.

    Raises:
        ValueError: One is not.
    """
    for name in ("gguf", "transformers", "safetensors"):
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"import-gguf needs the package {name}; pip install 'slime_tis[train,gguf]'.")


def _check_target(target: Path, given: str | Path) -> None:
    exports.check_target(target, f"OUT_DIR is {quoted_path(given)}", "import")
    problem = unwritable(target)
    if problem is None and unwritable(target.parent) is not None:
        problem = "the directory above it, where the new one is made, cannot be written"
    if problem is not None:
        raise ValueError(f"OUT_DIR is {quoted_path(given)} but {problem}; give another.")


def _check_names(gguf: Gguf, config: Mapping[str, Any]) -> None:
    """Whether the tensors are those of the configuration, before anything is written.

    Raises:
        ValueError: One is missing, unknown or of another shape.
    """
    shapes = {hf_name(name): tuple(map(int, reversed(tensor.shape))) for name, tensor in gguf.tensors.items()}
    expected = dict(expected_tensors(gguf.path, config))
    unknown = [name for name in gguf.tensors if hf_name(name) not in expected]
    if unknown:
        raise ValueError(f"{gguf.path} has the tensor {unknown[0]}, which {config['architectures'][0]} has not.")
    for name, shape in expected.items():
        if name not in shapes:
            raise ValueError(f"{gguf.path} has no tensor for {name}; the file is incomplete.")
        if shapes[name] != shape:
            raise ValueError(
                f"{gguf.path} has {name} of shape {list(shapes[name])} where its metadata say {list(shape)}."
            )


def _write(gguf: Gguf, config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, target: Path) -> None:
    """Configuration, tokenizer and weights, under another name until all are there."""
    from transformers import AutoConfig, GenerationConfig

    from slime_tis.trainer.storage.hf_checkpoint import SHARD_BYTES, side_files, write_hf_checkpoint

    with tempfile.TemporaryDirectory() as beside:
        written = AutoConfig.for_model(gguf.architecture, **config)
        written.save_pretrained(beside)
        ends = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        GenerationConfig(**ends).save_pretrained(beside)
        tokenizer.save_pretrained(beside)
        unfinished = exports.begin(target, [file.name for file in side_files(Path(beside))])
        try:
            write_hf_checkpoint(unfinished, named_tensors(gguf, config), like=Path(beside), shard_bytes=SHARD_BYTES)
            check_tensors(unfinished, read_model_config(unfinished, "OUT_DIR"))
        except BaseException:
            exports.discard(unfinished)
            raise
    exports.finish(unfinished, target)


def _summary(
    gguf: Gguf, config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, target: Path, dtype: str
) -> str:
    """What was written, and from what."""
    kinds = Counter(tensor.tensor_type.name for tensor in gguf.tensors.values())
    parameters = sum(int(tensor.n_elements) for tensor in gguf.tensors.values())
    size = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    template = "a chat template" if tokenizer.chat_template else "no chat template"
    lines = [
        f"{target}: {config['architectures'][0]}, {config['num_hidden_layers']} layers, {parameters / 1e6:.1f} million "
        f"parameters in {dtype} ({size / 1e6:.0f} MB)",
        f"  weights of {gguf.path.name}: {', '.join(f'{count} {kind}' for kind, count in kinds.most_common())}",
        f"  tokenizer: {len(tokenizer):,} tokens, {template}; a response ends with "
        f"{quoted(tokenizer.convert_ids_to_tokens(config['eos_token_id']))}",
        f"  licence, as the file has it: {gguf.get('general.license', 'none')}",
    ]
    pre = gguf.get("tokenizer.ggml.pre", "default")
    if gguf.get("tokenizer.ggml.model") == "gpt2" and pre not in (*BYTE_LEVEL_PRE, *DIGIT_PRE, *_known_splits()):
        lines.append(f"  warning: the pre-tokenizer {quoted(pre)} is not known, GPT-2's is used; compare its token ids")
    return "\n".join(lines)


def _known_splits() -> Mapping[str, str]:
    """Pre-tokenizers that transformers splits text by."""
    from transformers.integrations.gguf import gguf_tokenizer_mapping

    found: Mapping[str, str] = gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS
    return found
