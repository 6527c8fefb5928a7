"""Finds tensors that an update should have changed and whose checksums on a server stayed the same."""

import re
from collections.abc import Mapping, Sequence

from slime_tis.trainer.engines.engine import SentRows
from slime_tis.trainer.engines.weight_updates import BLOCKS, EMBEDDING, OUTPUT_LAYER

TensorChecksums = Mapping[str, Sequence[str]]
"""Checksums of each rank by SGLang's name of the tensor."""
JOINED = {
    r"\.experts\.\d+\.(gate|up)_proj\.weight$": ".experts.w13_weight",
    r"\.experts\.\d+\.down_proj\.weight$": ".experts.w2_weight",
    r"\.[qkv]_proj\.": ".qkv_proj.",
    r"\.(gate|up)_proj\.": ".gate_up_proj.",
}
"""Pattern of Hugging Face names → SGLang's name of the tensor that joins them."""


def stale_weights(now: TensorChecksums, before: TensorChecksums, sent: Mapping[str, SentRows]) -> list[str]:
    """Returns the Hugging Face names of tensors that the update changed but the server did not."""
    joined: dict[str, list[SentRows]] = {}
    for name, rows in sent.items():
        joined.setdefault(server_name(name), []).append(rows)
    stale = {
        name
        for name, shards in joined.items()
        if is_stale(
            now.get(name, []),
            before.get(name, []),
            on_every_rank=name not in (EMBEDDING, OUTPUT_LAYER) and all(shard.changed_everywhere for shard in shards),
        )
    }
    return [name for name, rows in sent.items() if rows.changed and server_name(name) in stale]


def server_name(name: str) -> str:
    """SGLang's name of the tensor that contains a Hugging Face tensor; SGLang joins matrices with the same input."""
    for pattern, joined in JOINED.items():
        name = re.sub(pattern, joined, name)
    return name


def is_stale(now: Sequence[str], before: Sequence[str], *, on_every_rank: bool) -> bool:
    """Whether a tensor that an update changed kept its checksums; `now` is empty if the server has no such tensor.

    `on_every_rank` says whether the shard of each of up to `BLOCKS` / 2 ranks must have changed. Vocabularies are
    padded, so their last rank may hold only padding.
    """
    same = [current == earlier for current, earlier in zip(now, before, strict=False)]
    if not same or len(now) != len(before):
        return False
    return all(same) or (on_every_rank and len(same) <= BLOCKS // 2 and any(same))
