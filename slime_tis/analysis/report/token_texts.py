"""Texts of token ids, by the tokenizer of the model that sampled them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slime_tis.analysis.dumps.table import TokenTable
from slime_tis.analysis.report.samples import Decode
from slime_tis.errors import first_line, quoted_path


def decoder(table: TokenTable | None, hf_checkpoint: str = "") -> Decode | None:
    """A function from token ids to their texts, decoded one by one; None without a tokenizer.

    Args:
        table: A dump; its metadata may name the directory of its tokenizer.
        hf_checkpoint: Directory of the tokenizer, which has priority.

    Raises:
        ValueError: `hf_checkpoint` is given and has no readable tokenizer.
    """
    named = None if table is None else table.metadata.get("tokenizer")
    directory = hf_checkpoint or (named if isinstance(named, str) else "")
    if not directory or not Path(directory).is_dir():
        if hf_checkpoint:
            raise ValueError(f"--hf-checkpoint {quoted_path(hf_checkpoint)} is not a directory.")
        return None
    from tokenizers import Tokenizer

    try:  # transformers would read more files of the directory, and could run code in it
        tokenizer = Tokenizer.from_file(str(Path(directory) / "tokenizer.json"))
    except Exception as error:  # tokenizers raises Exception itself
        if hf_checkpoint:
            problem = first_line(error)
            raise ValueError(f"{quoted_path(directory)} has no tokenizer.json that can be read: {problem}.") from error
        return None
    size = tokenizer.get_vocab_size()

    def decode(ids: Sequence[int]) -> list[str]:
        return [tokenizer.decode([i], skip_special_tokens=False) if 0 <= i < size else f"⟨{i}⟩" for i in ids]

    return decode
