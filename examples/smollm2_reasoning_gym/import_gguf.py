"""Converts a GGUF file to a Hugging Face directory.

    python -m examples.smollm2_reasoning_gym.import_gguf FILE.gguf OUT_DIR

The package gguf names and dequantizes tensors, and transformers reads the tokenizer. The
configuration is made here: transformers ignores the rotary scaling of GGUF files and replaces
missing weights by random ones.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_tis.errors import first_line, quoted, quoted_path
from slime_tis.hf_directory import read_model_config
from slime_tis.hf_tensors import expected_tensors
from slime_tis.trainer.storage import exports
from slime_tis.trainer.storage.directories import LOCK, held, unwritable

if TYPE_CHECKING:
    from gguf import ReaderTensor
    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Names of the supported architectures in GGUF and in transformers."""
DIGIT_PRE = ("smollm", "starcoder", "refact", "command-r", "codeshell")
"""Pre-tokenizers that split digits and then follow GPT-2; transformers reads them as GPT-2's."""
GPT2_PRE = ("default", "gpt-2")
"""Names of the pre-tokenizer of GPT-2."""
ROPE_FREQS = "rope_freqs.weight"
"""Divisors of the rotary frequencies in files of Llama 3.1 to 3.3."""
MAX_STRINGS = 1 << 19
"""Limit on tokens and on merges; the largest known vocabularies have 280,000 merges."""


def import_gguf(file: str | Path, directory: str | Path, *, dtype: str = "fp32") -> str:
    """Writes a GGUF file as a Hugging Face directory, all or nothing; returns a summary to print.

    Args:
        file: GGUF of a dense Llama, Qwen2 or Qwen3 model in one file, quantized or not, with its
            tokenizer.
        directory: absent, empty or an earlier import, which is replaced.
        dtype: type of the written weights, fp32 or bf16.

    Raises:
        ValueError: the file cannot be converted, or the directory cannot be written.
        OSError: writing failed; `directory` is unchanged.
    """
    from transformers import AutoConfig, GenerationConfig
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    from slime_tis.trainer.storage.hf_writer import SHARD_BYTES, write_hf_checkpoint

    path, target = Path(file), Path(directory).resolve()
    exports.check_target(target, f"OUT_DIR is {quoted_path(directory)}", "import")
    if (problem := unwritable(target) or unwritable(target.parent)) is not None:
        raise ValueError(f"OUT_DIR is {quoted_path(directory)} but {problem}; give another.")
    with (
        held({target.with_name(f".{target.name}{LOCK}"): "OUT_DIR"}),
        tempfile.TemporaryDirectory() as scratch,
    ):
        metadata, tensors = read_gguf(path)
        try:
            config = model_config(metadata, tensors)
            (Path(scratch) / "config.json").write_text(json.dumps(config))
            read_model_config(scratch, "the file")
            (Path(scratch) / "config.json").unlink()
            tokenizer = read_tokenizer(path, metadata, Path(scratch))
            AutoConfig.for_model(**config, dtype="float32").save_pretrained(scratch)
            ends = {key: value for key, value in config.items() if key.endswith("_token_id")}
            GenerationConfig(**ends).save_pretrained(scratch)
            tokenizer.save_pretrained(scratch)
            sources = named_sources(tensors, config)
        except (
            Exception
        ) as error:  # numbers and texts of the file reach transformers, tokenizers and gguf
            raise ValueError(
                f"{quoted_path(path)} cannot be converted: {first_line(error)}."
            ) from error
        unfinished = exports.begin(target)
        try:
            weights = dequantized(sources, config, dtype)
            write_hf_checkpoint(unfinished, weights, like=Path(scratch), shard_bytes=SHARD_BYTES)
        except BaseException:
            exports.discard(unfinished)
            raise
        exports.finish(unfinished, target)
    parameters = sum(int(tensor.n_elements) for tensor in tensors.values()) / 1e6
    kinds = Counter(tensor.tensor_type.name for tensor in tensors.values()).most_common()
    pre = metadata.get("tokenizer.ggml.pre", "default")
    known = metadata.get("tokenizer.ggml.model") != "gpt2" or pre in (
        *DIGIT_PRE,
        *GPT2_PRE,
        *GGUF_PRE_TOKENIZER_SPLITS,
    )
    return (
        f"{target}: {config['architectures'][0]}, {config['num_hidden_layers']} layers,"
        f" {parameters:.1f} million parameters in {dtype} from"
        f" {', '.join(f'{count} {kind}' for kind, count in kinds)}\n  {len(tokenizer):,} tokens; a"
        f" response ends with {quoted(tokenizer.eos_token)}; licence"
        f" {quoted(metadata.get('general.license'))}"
        + (
            ""
            if known
            else f"\n  warning: GPT-2's pre-tokenizer replaces {quoted(pre)}; compare token ids"
        )
    )


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, ReaderTensor]]:
    """Reads metadata, with counts instead of lists of strings, and maps tensors into memory.

    Raises:
        ValueError: the file is damaged, or holds another kind of model.
    """
    if not path.is_file():
        problem = "is not a file" if path.exists() else "does not exist"
        raise ValueError(f"{quoted_path(path)} {problem}; give a GGUF file.")
    from gguf import GGUFReader
    from transformers.integrations.gguf.reader import read_gguf_metadata

    try:
        metadata, _ = read_gguf_metadata(
            str(path)
        )  # stops at the end of the file, GGUFReader does not
        architecture = metadata["general.architecture"]
        strings = max(metadata.get(f"tokenizer.ggml.{key}", 0) for key in ("tokens", "merges"))
        problems = {
            f"is of the architecture {quoted(architecture)}": architecture not in ARCHITECTURES,
            f"has {strings} tokens or merges": strings > MAX_STRINGS,
            "is one of several parts; join them with llama-gguf-split --merge": (
                metadata.get("split.count", 1) > 1
            ),
            "is a mixture of experts": metadata.get(f"{architecture}.expert_count", 0) > 0,
        }
        problem = next((problem for problem, holds in problems.items() if holds), "")
        tensors = {} if problem else {tensor.name: tensor for tensor in GGUFReader(path).tensors}
        if sum(int(tensor.n_bytes) for tensor in tensors.values()) > path.stat().st_size:
            problem = "has tensors that overlap"
    except Exception as error:  # a damaged file raises errors of struct, numpy and gguf
        raise ValueError(
            f"{quoted_path(path)} does not read as GGUF, or is cut off: {first_line(error)}."
        ) from error
    if problem:
        raise ValueError(
            f"{quoted_path(path)} {problem}; give a dense {', '.join(ARCHITECTURES)} model in one"
            " file."
        )
    return metadata, tensors


def model_config(metadata: Mapping[str, Any], tensors: dict[str, ReaderTensor]) -> dict[str, Any]:
    """The fields of config.json; removes the divisors of rotary frequencies from the tensors.

    Raises:
        ValueError: a number is missing, or the model differs from the supported architectures.
    """
    architecture = metadata["general.architecture"]

    def number(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{architecture}.{key}", default)
        if not isinstance(value, int | float):
            raise ValueError(f"{architecture}.{key} is {quoted(value)} where a number is needed")
        return value

    heads, hidden, context = (
        number("attention.head_count"),
        number("embedding_length"),
        number("context_length"),
    )
    head_dim = number(
        "attention.key_length", number("rope.dimension_count", hidden // max(heads, 1))
    )
    for key, expected in (
        ("attention.value_length", (head_dim,)),
        ("rope.dimension_count", (head_dim,)),
        ("attention.sliding_window", (0, context)),
    ):
        if number(key, expected[0]) not in expected:
            raise ValueError(
                f"{architecture}.{key} is {number(key)} where {expected[0]} is supported"
            )
    ids = {
        key: metadata.get(f"tokenizer.ggml.{key}_token_id")
        for key in ("bos", "eos", "eot", "eom", "padding")
    }
    ends = list(dict.fromkeys(ids[key] for key in ("eos", "eot", "eom") if ids[key] is not None))
    return {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": decimal(number("attention.layer_norm_rms_epsilon")),
        "rope_parameters": rope_parameters(metadata, number, tensors.pop(ROPE_FREQS, None)),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": ids["bos"],
        "eos_token_id": ends if len(ends) > 1 else ids["eos"],
        "pad_token_id": ids["eos"] if ids["padding"] is None else ids["padding"],
    }


def decimal(value: float) -> float:
    """Returns the shortest decimal that float32 rounds to the number: 1e-05 for 9.999999747e-06."""
    import numpy as np

    return float(str(np.float32(value)))


def rope_parameters(
    metadata: Mapping[str, Any], number: Callable[..., Any], freqs: ReaderTensor | None
) -> dict[str, Any]:
    """`rope_parameters` of config.json: the base and the scaling of rotary positions."""
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": float(number("rope.freq_base", 10000.0)),
    }
    if freqs is not None:
        return rope | llama3_scaling(freqs.data, rope["rope_theta"])
    kind = metadata.get(f"{metadata['general.architecture']}.rope.scaling.type", "none")
    factor = decimal(number("rope.scaling.factor", number("rope.scale_linear", 1.0)))
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return rope
    if kind == "yarn":
        rope["original_max_position_embeddings"] = number("rope.scaling.original_context_length")
    elif kind != "linear":
        raise ValueError(
            f"rotary positions are scaled by {quoted(kind)}; supported are linear, yarn and llama3"
        )
    return rope | {"rope_type": kind, "factor": factor}


def llama3_scaling(divisors: NDArray[Any], theta: float) -> dict[str, Any]:
    """Llama 3's scaling of rotary frequencies, whose factor is the largest divisor.

    Raises:
        ValueError: the divisors differ from the ones of Llama 3.1 to 3.3 for this factor.
    """
    import numpy as np

    factor = round(float(divisors.max()), 3)
    wavelengths = 2 * np.pi * theta ** (np.arange(len(divisors)) / len(divisors))
    smooth = np.clip((8192 / wavelengths - 1) / (4 - 1), 0, 1)
    if not np.allclose(divisors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        raise ValueError(f"{ROPE_FREQS} differs from Llama 3")
    factors = {
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return {"rope_type": "llama3", "factor": factor, **factors}


def read_tokenizer(
    path: Path, metadata: Mapping[str, Any], scratch: Path
) -> PreTrainedTokenizerBase:
    """Returns the tokenizer with its chat template.

    It is read through a link, since transformers also reads other files of a directory.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    (scratch / "model.gguf").symlink_to(path.resolve())
    read = AutoTokenizer.from_pretrained(
        scratch, gguf_file="model.gguf", local_files_only=True, trust_remote_code=False
    )
    if metadata.get("tokenizer.ggml.pre") in DIGIT_PRE:
        read.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=read.backend_tokenizer,
        bos_token=read.bos_token,
        eos_token=read.eos_token,
        unk_token=read.unk_token,
        pad_token=read.pad_token or read.eos_token,
        chat_template=read.chat_template,
        model_max_length=metadata[f"{metadata['general.architecture']}.context_length"],
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def named_sources(
    tensors: Mapping[str, ReaderTensor], config: Mapping[str, Any]
) -> dict[str, ReaderTensor]:
    """The tensors by their names in transformers.

    Raises:
        ValueError: a tensor is missing, has another shape, or does not belong to the architecture.
    """
    from gguf import MODEL_ARCH, get_tensor_name_map
    from transformers import AutoConfig

    names = get_tensor_name_map(
        MODEL_ARCH[config["model_type"].upper()], config["num_hidden_layers"]
    )
    sources, unknown = {}, set(tensors)
    for name, shape in expected_tensors(AutoConfig.for_model(**config)):
        module, _, kind = name.rpartition(".")
        key = f"{names.get_name(module)}.{kind}"
        if key not in tensors or tuple(reversed(tensors[key].shape.tolist())) != shape:
            raise ValueError(f"the file has no tensor {key} of shape {list(shape)}")
        sources[name] = tensors[key]
        unknown.discard(key)
    if unknown:
        raise ValueError(
            f"the file has the tensor {min(unknown)}, which {config['architectures'][0]} has not"
        )
    return sources


def dequantized(
    sources: Mapping[str, ReaderTensor], config: Mapping[str, Any], dtype: str
) -> Iterator[tuple[str, Tensor]]:
    """Weights, dequantized one at a time.

    llama.cpp rotates pairs of neighbouring numbers, and transformers the halves of a head. Files of
    the architecture llama therefore have the rows of queries and keys in another order.
    """
    import numpy as np
    import torch
    from gguf import dequantize

    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in sources.items():
        try:
            weights = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        except NotImplementedError:
            raise ValueError(
                f"{tensor.name} has the type {tensor.tensor_type.name}, which gguf cannot read."
            ) from None
        module = name.split(".")[-2]
        if config["architectures"] == ["LlamaForCausalLM"] and module in heads:
            rows = weights.reshape(heads[module], -1, 2, *weights.shape[1:])
            weights = rows.swapaxes(1, 2).reshape(weights.shape).copy()
        yield (
            name,
            torch.from_numpy(weights).to(torch.float32 if dtype == "fp32" else torch.bfloat16),
        )


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        description=(
            "Writes a GGUF file of a dense Llama, Qwen2 or Qwen3 model as the directory for"
            " --hf-checkpoint: configuration, dequantized weights, tokenizer and chat template."
            " Needs the extra gguf."
        ),
    )
    parser.add_argument("file", metavar="FILE.gguf", help="the model, in one file")
    parser.add_argument(
        "directory", metavar="OUT_DIR", help="absent, empty or an earlier import, which is replaced"
    )
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16"), default="fp32", help="of the weights (default fp32)"
    )
    options = parser.parse_args(argv)
    try:
        print(import_gguf(options.file, options.directory, dtype=options.dtype))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
