"""Decodes the routed experts of an answer while it arrives.

Their text may be 98 % of an answer, so it is decoded in blocks and never kept completely.
"""

import binascii
import re
from typing import Literal

import numpy as np
import pybase64
import torch
from torch import Tensor

from slime_tis.trainer.engines.local.routing import expert_dtype
from slime_tis.trainer.engines.servers.answers import has_duplicates
from slime_tis.trainer.engines.servers.api import ExpertLayout
from slime_tis.trainer.engines.servers.errors import InvalidAnswer

NAME = re.compile(rb'[^\\]"routed_experts"\s{0,8}:\s{0,8}"')
"""Precedes the text. A JSON string cannot contain this, because a quote inside a string follows a
backslash."""
NAME_BYTES = 35
"""Longest match of `NAME`."""
BLOCK_CHARACTERS = 96 << 10
"""Characters that are decoded together: their bytes stay in the cache of a core, and in memory that
is used again."""
COMPARED_ROWS = 768
"""Tokens whose experts are compared together, in the cache of a core."""


class ExpertText:
    """Base64 of little-endian int32 [tokens, all layers, k]: `routed_experts` of an answer."""

    def __init__(self, layout: ExpertLayout) -> None:
        self._layout = layout
        # A multiple of 3 rows has a multiple of 3 bytes, which base64 encodes without padding.
        rows = max(BLOCK_CHARACTERS // layout.num_bytes(3), 1) * 3
        self._block = layout.num_bytes(rows)
        self._position: Literal["before", "inside", "after"] = "before"
        self._held = bytearray()
        """Before the text: bytes that may begin its name. Inside: characters that do not fill a
        block yet."""
        self._characters = 0
        self._problem = ""
        """First problem in the text; the rest is counted but not decoded."""
        moe = layout.moe
        self._dtype = np.uint8 if expert_dtype(moe.num_experts) is torch.uint8 else np.int16
        self._blocks = [np.empty((0, len(moe.layers), moe.top_k), self._dtype)]

    def cut(self, chunk: bytes) -> bytes:
        """Returns the next part of the answer without the text of experts, which it decodes."""
        if self._position == "after":
            return chunk
        start = 0
        if self._position == "before":
            chunk = bytes(self._held) + chunk
            # Searching the plain name first is much faster than only the regular expression.
            name = chunk.find(b'"routed_experts"')
            match = NAME.search(chunk, max(name - 1, 0)) if name >= 0 else None
            if match is None:
                self._held = bytearray(chunk[-NAME_BYTES:])
                return chunk[:-NAME_BYTES]
            self._position = "inside"
            self._held = bytearray()
            start = match.end()
        end = chunk.find(b'"', start)
        if end >= 0:
            self._position = "after"
        else:
            end = len(chunk)
        self._take(memoryview(chunk)[start:end])
        return chunk[:start] + chunk[end:]

    def end(self) -> bytes:
        """Returns the end of the answer, which `cut` has held back."""
        return bytes(self._held) if self._position == "before" else b""

    def experts(self, num_rows: int) -> Tensor:
        """Returns the experts as uint8 (up to 256 experts) or int16 [`num_rows`, sparse layers, k].

        Raises:
            InvalidAnswer: The text is missing, has another length, or cannot be the experts of
                `num_rows` tokens.
        """
        expected = self._layout.num_bytes(num_rows)
        if self._position == "before":
            raise InvalidAnswer("it has no routed_experts")
        if self._characters != expected:
            raise InvalidAnswer(f"routed_experts has {self._characters} characters, not {expected}")
        if self._problem:
            raise InvalidAnswer(self._problem)
        experts = np.concatenate(self._blocks)
        blocks = np.split(experts, range(COMPARED_ROWS, num_rows, COMPARED_ROWS))
        if any(map(has_duplicates, blocks)):
            # SGLang returns zeros if its kernels do not record experts: the message names the
            # cause.
            for i, layer in enumerate(self._layout.moe.layers):
                if not experts[:, i].any():
                    raise InvalidAnswer(
                        f"routed_experts is all zeros in layer {layer}: the server's kernels do not"
                        " record them"
                    )
            raise InvalidAnswer("routed_experts has the same expert twice for a token")
        return torch.from_numpy(experts)

    def _take(self, text: memoryview) -> None:
        """Decodes all complete blocks, and at the end the last, incomplete one."""
        self._characters += len(text)
        start = 0
        if self._held:
            start = min(self._block - len(self._held), len(text))
            self._held += text[:start]
            if len(self._held) == self._block:
                self._decode(self._held)
                self._held.clear()
        while len(text) - start >= self._block:
            self._decode(text[start : start + self._block])
            start += self._block
        self._held += text[start:]
        if self._position == "after" and self._held:
            self._decode(self._held)

    def _decode(self, text: bytearray | memoryview) -> None:
        """Appends the experts of complete rows to the blocks, or records the problem."""
        if self._problem:
            return
        layout = self._layout
        moe = layout.moe
        try:
            data = pybase64.b64decode(text, validate=True)
            # Unsigned: a negative number becomes large, so one comparison finds both errors.
            experts = np.frombuffer(data, "<u4")
            experts = experts.reshape(-1, layout.num_hidden_layers, moe.top_k)
        except (ValueError, binascii.Error):
            self._problem = "routed_experts is not base64 of whole rows"
            return
        # Indexing copies, so it is skipped if every layer has experts.
        if len(moe.layers) != layout.num_hidden_layers:
            experts = experts[:, list(moe.layers)]
        if experts.max(initial=0) >= moe.num_experts:
            signed = experts.view("<i4")
            self._problem = (
                f"routed_experts has {signed.min()} to {signed.max()}, but there are"
                f" {moe.num_experts} experts"
            )
            return
        self._blocks.append(experts.astype(self._dtype))
