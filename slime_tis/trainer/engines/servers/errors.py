"""Failures of requests to servers, and of the answers that they get."""


class RequestError(Exception):
    """A request to a server failed; the message names the server and the reason."""


class ServerError(RequestError):
    """A server failed; another server may succeed."""


class ServerPaused(ServerError):
    """A server answers but samples nothing until it is resumed."""


class MalformedAnswer(ServerError):
    """A server's answer is unusable."""


class UnexpectedWeights(ServerError):
    """A server answered with other weights than it was given."""


class RequestRefused(RequestError, ValueError):
    """A server refuses a request with HTTP 4xx, or reports a failure with status 200.

    Every server would refuse it, except for a wrong key or address.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class InvalidAnswer(Exception):
    """The problem of an answer: the end of a message that begins with the server's name."""


class ReportedFailure(Exception):
    """An answer with HTTP 200 that reports a failure, in the server's words."""
