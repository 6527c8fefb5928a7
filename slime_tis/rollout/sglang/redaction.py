"""Text from servers in messages and logs: without keys, without control characters, and no longer than a few lines."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from urllib.parse import quote

LONGEST_QUOTE = 400
"""Characters of a server's own words in a message."""
LONGEST_READ = 8192
"""Characters that are looked at for keys; far more than are shown."""
LEAST_ECHO = 8
"""Characters of a key in a row that count as an echo of it."""
REDACTED = "***"


class Redactor:
    """Replaces keys, and what of them is at least `LEAST_ECHO` characters long, by `***`."""

    def __init__(self, secrets: Iterable[str]) -> None:
        """Args:
        secrets: the keys; each is also found as JSON, `repr`, URLs and base64 spell it.
        """
        found = {spelling for secret in secrets if secret for spelling in _spellings(secret)}
        self._short = sorted((one for one in found if len(one) < LEAST_ECHO), key=len, reverse=True)
        self._parts = {one[start : start + LEAST_ECHO] for one in found for start in range(len(one) - LEAST_ECHO + 1)}

    def __repr__(self) -> str:
        return "Redactor()"

    def redacted(self, text: str) -> str:
        """The text without keys, whole or in part."""
        hidden = [False] * len(text)
        for start in range(len(text) - LEAST_ECHO + 1 if self._parts else 0):
            if text[start : start + LEAST_ECHO] in self._parts:
                hidden[start : start + LEAST_ECHO] = [True] * LEAST_ECHO
        shown = [
            REDACTED if is_hidden and not before else "" if is_hidden else character
            for character, is_hidden, before in zip(text, hidden, [False, *hidden], strict=False)
        ]
        text = "".join(shown)
        for secret in self._short:
            text = text.replace(secret, REDACTED)
        return text

    def quoted(self, text: str, longest: int = LONGEST_QUOTE) -> str:
        """Words of a server on one line, for a message: redacted first, then escaped, then cut."""
        words = printable(self.redacted(" ".join(text[:LONGEST_READ].split())))
        return words if len(words) <= longest else words[:longest] + " …"


def printable(text: str) -> str:
    """The text with characters escaped that would steer a terminal: controls, bidirectional marks, surrogates."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def _spellings(secret: str) -> set[str]:
    """A key as servers may repeat it."""
    encoded = base64.b64encode(secret.encode()).decode().rstrip("=")
    return {secret, json.dumps(secret)[1:-1], repr(secret)[1:-1], quote(secret, safe=""), encoded}
