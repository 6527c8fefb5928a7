"""Finds the tensors of a server that an update did not change, by their checksums.

A server reports one checksum per tensor and rank. It joins matrices with the same input, such as
the query, key and value projections, so one of its tensors may contain several of the checkpoint.
"""

import re
from collections.abc import Mapping, Sequence

from slime_tis.trainer.engines.rollout_engine import SentRows
from slime_tis.trainer.engines.weight_updates import BLOCKS, EMBEDDING, OUTPUT_LAYER

TensorChecksums = Mapping[str, Sequence[str]]
"""A server's name of a tensor → one checksum per rank."""
JOINED = {
    r"\.experts\.\d+\.(gate|up)_proj\.weight$": ".experts.w13_weight",
    r"\.experts\.\d+\.down_proj\.weight$": ".experts.w2_weight",
    r"\.[qkv]_proj\.": ".qkv_proj.",
    r"\.(gate|up)_proj\.": ".gate_up_proj.",
}
"""Pattern of Hugging Face names → the server's name of the tensor that joins them."""


def stale_weights(
    now: TensorChecksums, before: TensorChecksums, sent: Mapping[str, SentRows]
) -> list[str]:
    """Returns the Hugging Face names of tensors that the update changed but the server did not."""
    changed_everywhere: dict[str, bool] = {}
    for name, rows in sent.items():
        joined = server_name(name)
        # Vocabularies are padded, so their last rank may hold only padding.
        is_vocabulary = joined in (EMBEDDING, OUTPUT_LAYER)
        changed = rows.changed_everywhere and not is_vocabulary
        changed_everywhere[joined] = changed_everywhere.get(joined, True) and changed
    stale = []
    for name, rows in sent.items():
        joined = server_name(name)
        if rows.changed and is_stale(
            now.get(joined, []),
            before.get(joined, []),
            on_every_rank=changed_everywhere[joined],
        ):
            stale.append(name)
    # An output layer that is tied to the embedding may be a copy in the server.
    head = now.get(OUTPUT_LAYER, [])
    head_before = before.get(OUTPUT_LAYER, [])
    head_must_change = EMBEDDING in sent and sent[EMBEDDING].changed and OUTPUT_LAYER not in sent
    if head_must_change and is_stale(head, head_before, on_every_rank=False):
        stale.append(OUTPUT_LAYER)
    return stale


def server_name(name: str) -> str:
    """The server's name of the tensor that contains a Hugging Face tensor."""
    for pattern, joined in JOINED.items():
        name = re.sub(pattern, joined, name)
    return name


def is_stale(now: Sequence[str], before: Sequence[str], *, on_every_rank: bool) -> bool:
    """Whether a tensor that an update changed kept its checksums.

    Args:
        now: One checksum per rank; empty if the server has no such tensor.
        before: The checksums before the update.
        on_every_rank: Whether the shard of every rank must have changed, with up to `BLOCKS` / 2
            ranks.
    """
    if not now or len(now) != len(before):
        return False
    unchanged = sum(current == earlier for current, earlier in zip(now, before, strict=True))
    if on_every_rank and len(now) <= BLOCKS // 2:
        return unchanged > 0
    return unchanged == len(now)
