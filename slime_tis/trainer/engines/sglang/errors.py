"""Exceptions of SGLang servers.

    Exception
     ├── SGLangError                a request to a server failed; the message names the server and the reason
     │    ├── ServerError           another server may succeed: no answer, HTTP 5xx, a broken connection, marked down
     │    │    ├── MalformedAnswer  the answer is too large, compressed, not JSON, or has invalid values
     │    │    └── UnexpectedWeights  the answer comes from other weights than the server was given
     │    └── RequestRefused        every server would refuse: HTTP 4xx, or success: false (also a ValueError)
     └── InvalidAnswer              the problem of an answer, before the client adds the server's name

Requests are retried after a ServerError. The package raises `engines.engine.RolloutUnavailable`, after which the run
saves a checkpoint and ends, and ValueError for invalid options.
"""


class SGLangError(Exception):
    """A request to a server failed; the message names the server and the reason."""


class ServerError(SGLangError):
    """A server failed; another server may succeed."""


class MalformedAnswer(ServerError):
    """A server's answer is unusable."""


class UnexpectedWeights(ServerError):
    """A server answered with other weights than it was given."""


class RequestRefused(SGLangError, ValueError):
    """A server refuses a request with HTTP 4xx or `success: false` (status 200); every server would."""

    def __init__(self, message: str, status: int) -> None:
        """Takes the message and the HTTP status."""
        super().__init__(message)
        self.status = status


class InvalidAnswer(Exception):
    """The problem of an answer: the end of a message that begins with the server's name."""
