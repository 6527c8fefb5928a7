"""Bodies of HTTP answers that take bounded memory: uncompressed, and up to a number of bytes."""

import httpx

PLAIN = {"Accept-Encoding": "identity"}
"""Header of requests whose answers `read_plain` reads."""


async def read_plain(response: httpx.Response, max_bytes: int) -> bytes:
    """Returns the body of a streamed answer, or its first bytes if it has more than `max_bytes`.

    A compressed answer is not read: a kilobyte can contain gigabytes, and httpx decompresses them
    before anybody can count the bytes.

    Args:
        response: From `client.stream` with the headers `PLAIN`.
        max_bytes: A longer result shows that the answer exceeds this number.

    Raises:
        httpx.DecodingError: The answer is compressed.
    """
    encoding = response.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise httpx.DecodingError(
            "the answer is compressed, but the request accepts no compression"
        )
    body = bytearray()
    async for part in response.aiter_raw():
        body += part
        if len(body) > max_bytes:
            break
    return bytes(body)
