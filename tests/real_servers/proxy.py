"""An HTTP proxy before a real server, which plants faults that a server's own code cannot have."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

Edit = Callable[[bytes], bytes]


@dataclass
class Proxy:
    """Hands requests on to a server; fields may be set at any time."""

    target: str
    url: str = ""
    swallowed: dict[str, bytes] = field(default_factory=dict)
    """Answers to endpoints whose requests never reach the server."""
    edited_requests: dict[str, Edit] = field(default_factory=dict)
    """What becomes of the bodies of requests to an endpoint."""
    edited_answers: dict[str, Edit] = field(default_factory=dict)
    """What becomes of the answers of an endpoint."""

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of the answer to a request."""
        endpoint = path.partition("?")[0]
        if endpoint in self.swallowed:
            return 200, self.swallowed[endpoint]
        if endpoint in self.edited_requests:
            body = self.edited_requests[endpoint](body)
        headers = {"content-type": "application/json"}
        response = httpx.request(
            method, self.target + path, content=body, headers=headers, timeout=600, trust_env=False
        )
        content = response.content
        if endpoint in self.edited_answers:
            content = self.edited_answers[endpoint](content)
        return response.status_code, content


@contextmanager
def running_proxy(target: str) -> Iterator[Proxy]:
    """A proxy before a server, on the loopback."""
    proxy = Proxy(target)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_request(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            status, content = proxy.answer(self.command, self.path, body)
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = handle_request
        do_POST = handle_request

        def log_message(self, *_: object) -> None:
            """Writes no log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    proxy.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
