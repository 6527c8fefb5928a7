"""Answers that no SGLang server should give, and a server that gives them.

The server is that of `tests/rollout/sglang/fake_sglang.py`; its `faults` may be a `Raw` answer,
too, sent as it is.
"""

import asyncio
import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Any

from tests.rollout.sglang.fake_sglang import FakeSGLang, servers_of

KEY = "sk-7Hq2vX9tLw4Rz8Kd"
ADMIN_KEY = "adm-5Tn8bY3cGf6Jp1Ms"
STEERING = "\x1b[2J\x1b]0;owned\x07\x00\x9b31m\u202e\u2066\u2028\r"
"""Clears the terminal, sets its title, rings, and turns the direction of text."""


@dataclass
class Raw:
    """Bytes of an answer, HTTP and all."""

    head: bytes
    chunks: Iterator[bytes] = field(default_factory=lambda: iter(()))
    pause: float = 0.0
    """Between two chunks, in seconds."""


def http(body: bytes, *headers: str, status: str = "200 OK") -> Raw:
    lines = [f"HTTP/1.1 {status}", *headers, f"Content-Length: {len(body)}"]
    return Raw("\r\n".join(lines).encode(errors="surrogateescape") + b"\r\n\r\n" + body)


def endless(chunk: bytes, *headers: str, pause: float = 0.0) -> Raw:
    lines = ["HTTP/1.1 200 OK", "Transfer-Encoding: chunked", *headers]
    framed = f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n"
    return Raw("\r\n".join(lines).encode() + b"\r\n\r\n", repeat(framed), pause)


Spoil = Callable[[Any], Any]
"""Makes a hostile answer from the good one."""


class Hostile(FakeSGLang):
    """A server of recorded answers that can send anything at all."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.answers: dict[str, Spoil] = {}
        """What becomes of the good answer of each path except /generate, which `faults` has."""
        super().__init__(loop)

    async def _send(
        self, writer: asyncio.StreamWriter, path: str, status: int, content: Any
    ) -> bool:
        if path in self.answers:
            content = self.answers[path](content)
        if not isinstance(content, Raw):
            body = content if isinstance(content, str) else json.dumps(content)
            content = http(body.encode(errors="surrogatepass"), status=f"{status} X")
        writer.write(content.head)
        for chunk in content.chunks:
            writer.write(chunk)
            await writer.drain()
            await asyncio.sleep(content.pause)
        await writer.drain()
        return b"Connection: close" not in content.head


hostiles = partial(servers_of, Hostile)


def edited(edit: Callable[[Any], Any]) -> Spoil:
    """A good answer with something changed in place."""

    def spoil(answer: Any) -> Any:
        answer = json.loads(json.dumps(answer))
        edit(answer)
        return answer

    return spoil


def meta(**fields: Any) -> Spoil:
    """A good answer with other fields of `meta_info`."""
    return edited(lambda answer: answer["meta_info"].update(fields))


def text(content: str) -> Spoil:
    """A body that is not what it should be."""
    return lambda answer: content


def spans(*entries: tuple[str, int, int | None]) -> Spoil:
    """Weight versions as (version, start, end); an end of None is the answer's."""

    def edit(answer: Any) -> None:
        length = len(answer["output_ids"])
        versions = []
        for version, start, end in entries:
            if end is None:
                end = length
            versions.append({"version": version, "start": start, "end": end})
        answer["meta_info"]["weight_versions"] = versions

    return edited(edit)


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


GENERATE: dict[str, Spoil] = {
    "gzip bomb": lambda answer: http(gzip.compress(bytes(1 << 24)) * 64, "Content-Encoding: gzip"),
    "a good answer, compressed": lambda answer: http(
        gzip.compress(json.dumps(answer).encode()), "Content-Encoding: gzip"
    ),
    "endless spaces": lambda answer: endless(b" " * 65536),
    "a declared length of 10**18": lambda answer: Raw(
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000000000\r\n\r\n", repeat(b"x" * 65536)
    ),
    "a million empty spans": meta(weight_versions=[{"version": "0", "start": 0, "end": 0}] * 10**6),
    "a span of 2e8 tokens": spans(("0", 0, 200_000_000)),
    "arrays nested 100,000 deep": text(nested(100_000)),
    "a nested finish_reason": meta(finish_reason=json.loads(nested(500))),
    "an unknown finish_reason": meta(finish_reason={"type": "error"}),
    "a finish_reason that steers the terminal": meta(finish_reason={"type": STEERING}),
    "a version that steers the terminal": spans((STEERING * 40, 0, None)),
    "a version with the key": spans((f"{'x' * 120}{KEY}", 0, None)),
}
"""Answers to POST /generate that are to be thrown away and counted, by what is wrong with them.

`tests/rollout/sglang/test_schema.py` has the answers with wrong tokens, log-probs and versions.
"""

PROTOCOL: dict[str, Spoil] = {
    "no HTTP": lambda answer: Raw(b"SSH-2.0-OpenSSH_9.6\r\n\r\n"),
    "a redirect": lambda answer: http(
        b"", "Location: http://127.0.0.1:1/", status="307 Temporary Redirect"
    ),
    "a header of a megabyte": lambda answer: http(b"{}", f"X-Long: {'x' * 1_000_000}"),
    "a chunk of no number": lambda answer: Raw(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n"
    ),
    "a body cut off": lambda answer: Raw(
        b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\nConnection: close\r\n\r\n{", iter([b"x"])
    ),
    "a status line with the key": lambda answer: Raw(
        f"HTTP/1.1 {KEY} {ADMIN_KEY}\r\n\r\n".encode()
    ),
}
"""Answers that are not HTTP, or an odd one, which are to be asked for elsewhere."""


def refusal(words: Any, status: str = "503 X") -> Spoil:
    """An error with these bytes, or with JSON."""
    body = words if isinstance(words, bytes) else json.dumps(words).encode()
    return lambda answer: http(body, status=status)


ERRORS: dict[str, Spoil] = {
    "an error with the key": refusal({"error": {"message": f"bad key {KEY}"}}),
    "an error with the key across the cut": refusal({"message": "x" * 390 + KEY}),
    "an error with the key in quotes": refusal(
        json.dumps({"error": json.dumps({"key": KEY})}).encode()
    ),
    "an error with the key in base64": refusal(b"Basic c2stN0hxMnZYOXRMdzRSejhLZA=="),
    "an error that steers the terminal": refusal({"message": STEERING + "words"}),
    "an error nested deeply": refusal(nested(30_000).encode()),
    "a compressed error": lambda answer: http(
        gzip.compress(bytes(1 << 26)), "Content-Encoding: gzip", status="500 X"
    ),
    "a reason with the key": lambda answer: http(b"{}", status=f"502 {KEY}"),
}
"""Errors that are answered instead, which are to be tried elsewhere."""
