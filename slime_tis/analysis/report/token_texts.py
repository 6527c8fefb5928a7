"""Texts of token ids, by the tokenizer of the model that sampled them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slime_tis.analysis.dumps.table import TokenTable
from slime_tis.analysis.report.samples import Decode
from slime_tis.errors import first_line, quoted_path


def decoder(table: TokenTable | None, hf_checkpoint: str = "") -> Decode | None:
    """A function from token ids to their texts, each decoded on its own; None where no tokenizer is known.

    Args:
        table: A dump, whose metadata may name the directory of its tokenizer.
        hf_checkpoint: Directory to use in its place.

    Raises:
        ValueError: `hf_checkpoint` is given and has no tokenizer that reads.
    """
    named = None if table is None else table.metadata.get("tokenizer")
    directory = hf_checkpoint or (named if isinstance(named, str) else "")
    if not directory or not Path(directory).is_dir():
        if hf_checkpoint:
            raise ValueError(f"--hf-checkpoint {quoted_path(hf_checkpoint)} is not a directory.")
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of a damaged file, whatever its parser raises
        if hf_checkpoint:
            raise ValueError(f"{quoted_path(directory)} has no tokenizer that reads: {first_line(error)}.") from error
        return None
    size = len(tokenizer)

    def decode(ids: Sequence[int]) -> list[str]:
        return [tokenizer.decode([i]) if 0 <= i < size else f"⟨{i}⟩" for i in ids]

    return decode
