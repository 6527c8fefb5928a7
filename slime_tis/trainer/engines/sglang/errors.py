"""Exceptions of SGLang servers.

    Exception
     ├── SGLangError                a server did not do what it was asked; the message names it and says why
     │    ├── ServerError           another server may do it: no answer, HTTP 5xx, a broken connection, marked down
     │    │    ├── MalformedAnswer  its answer is too large, compressed, not JSON, or holds values that cannot be
     │    │    └── UnexpectedWeights  its answer comes from other weights than it was given
     │    └── RequestRefused        it refuses, and so would any other: HTTP 4xx, or success: false (also a ValueError)
     └── InvalidAnswer              what is wrong with an answer, before the client adds which server gave it

Requests are tried again after a ServerError. What leaves this package is `rollout.engine.RolloutUnavailable`, after
which the run saves a checkpoint and ends, and ValueError, for what the user asked for.
"""


class SGLangError(Exception):
    """A server did not do what it was asked; the message names it and says why."""


class ServerError(SGLangError):
    """A server failed at something that another one may do."""


class MalformedAnswer(ServerError):
    """A server gave an answer that cannot be used."""


class UnexpectedWeights(ServerError):
    """A server answered with other weights than it was given."""


class RequestRefused(SGLangError, ValueError):
    """A server refuses a request, with HTTP 4xx or `success: false` (status 200); another one would do the same."""

    def __init__(self, message: str, status: int) -> None:
        """Keeps the HTTP status beside the message."""
        super().__init__(message)
        self.status = status


class InvalidAnswer(Exception):
    """What is wrong with an answer, as the end of a message that begins with the server's name."""
