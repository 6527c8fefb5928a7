"""A small server with the API of the Hugging Face Hub, and a cache of the Hub on disk."""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def make_cache(cache: Path, repo: str, source: Path, revision: str = "main") -> Path:
    """Writes a model into a cache as huggingface_hub does: blobs, and links to them."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir()
    (folder / "refs").mkdir()
    (folder / "refs" / revision).write_text(COMMIT)
    for path in source.iterdir():
        blob = folder / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copyfile(path, blob)
        (snapshot / path.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot


@dataclass
class Hub:
    """A server of one model."""

    url: str
    files: Mapping[str, bytes]
    requests: list[str] = field(default_factory=list)
    """Method and path of every request."""
    refusal: str = ""
    """Error code of every answer, such as GatedRepo."""

    def downloaded(self) -> list[str]:
        """The names of the files that were sent."""
        sent = [request for request in self.requests if request.startswith("GET /org/")]
        return sorted({request.rpartition("/")[2] for request in sent})


NO_HEADERS: Mapping[str, str] = {}
STATUS = {"RepoNotFound": 404, "RevisionNotFound": 404, "GatedRepo": 403, "broken": 500}


class HubServer(ThreadingHTTPServer):
    """The server; its handler finds the files in `hub`."""

    hub: Hub


class Handler(BaseHTTPRequestHandler):
    """Answers the three requests of a download: the commit, the list of files, a file."""

    server: HubServer

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.server.hub
        hub.requests.append(f"{self.command} {self.path}")
        if hub.refusal:
            self.answer(b"", STATUS[hub.refusal], {"X-Error-Code": hub.refusal})
        elif self.path.startswith("/api/models/org/model/tree/"):
            self.answer(json.dumps(listing(hub.files)).encode())
        elif self.path.startswith("/api/models/org/model"):
            self.answer(json.dumps({"id": "org/model", "sha": COMMIT}).encode())
        else:
            content = hub.files[self.path.rpartition("/")[2]]
            headers = {"ETag": f'"{object_id(content)}"', "X-Repo-Commit": COMMIT}
            self.answer(content, 200, headers)

    def answer(self, body: bytes, status: int = 200, headers: Mapping[str, str] = NO_HEADERS):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def object_id(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def listing(files: Mapping[str, bytes]) -> list[dict[str, object]]:
    entries: list[dict[str, object]] = []
    for name, content in files.items():
        oid = object_id(content)
        entries.append({"type": "file", "path": name, "size": len(content), "oid": oid})
    return entries


@contextmanager
def hub_with(files: Mapping[str, bytes]) -> Iterator[Hub]:
    """Serves org/model with these files, at the commit COMMIT."""
    server = HubServer(("127.0.0.1", 0), Handler)
    server.hub = Hub(url=f"http://127.0.0.1:{server.server_port}", files=files)
    # Half a second, the default, is how long `shutdown` would wait.
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server.hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
