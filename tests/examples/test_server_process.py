"""The server process of examples and studies: it is waited for, quoted and always ended."""

import os
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from examples.server_process import free_port, running
from tests.runs import ROOT

SERVER = """
import http.server, os, subprocess, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(child.pid).encode())
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
"""A server with a worker, whose process id it answers."""
STUBBORN = (
    "import os, signal\n"
    "signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getppid(), signal.SIGINT))"
    f"{SERVER}"
)
"""A server that does not end at SIGTERM; its parent gets Ctrl-C at this moment."""
INTERRUPTED = """
import os, signal, sys
from pathlib import Path
import httpx
from examples.server_process import free_port, running
signal.signal(signal.SIGINT, signal.default_int_handler)
port = free_port()
command = [sys.executable, "-c", sys.argv[1], str(port)]
with running(command, os.environ, port=port, log=Path(sys.argv[2])) as url:
    print(httpx.get(url).text, flush=True)
    raise KeyboardInterrupt
"""
"""A program that prints the worker's process id, and is interrupted twice."""


def command(port: int, code: str = SERVER) -> list[str]:
    return [sys.executable, "-c", code, str(port)]


def test_a_server_is_healthy_inside_the_block(tmp_path: Path) -> None:
    port = free_port()
    with running(command(port), os.environ, port=port, log=tmp_path / "log") as url:
        assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt], ids=["error", "Ctrl-C"])
def test_server_workers_end_with_the_block(error: type[BaseException], tmp_path: Path) -> None:
    port = free_port()
    with (
        pytest.raises(error),
        running(command(port), os.environ, port=port, log=tmp_path / "log") as url,
    ):
        worker = psutil.Process(int(httpx.get(url).text))
        raise error
    ended, _ = psutil.wait_procs([worker], timeout=60)
    assert ended == [worker]


def test_server_workers_end_after_a_second_interrupt(tmp_path: Path) -> None:
    program = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, STUBBORN, str(tmp_path / "log")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert program.stderr.endswith("KeyboardInterrupt\n")
    worker = int(program.stdout)
    if psutil.pid_exists(worker):
        ended, _ = psutil.wait_procs([psutil.Process(worker)], timeout=60)
        assert ended


def test_a_server_that_ends_is_quoted(tmp_path: Path) -> None:
    ended = command(free_port(), "import sys; print('no such model'); sys.exit(3)")
    with (
        pytest.raises(RuntimeError, match=r"exit status 3.*no such model"),
        running(ended, os.environ, port=1, log=tmp_path / "log"),
    ):
        pass


def test_a_server_that_is_not_up_in_time_is_refused(tmp_path: Path) -> None:
    sleeper = command(1, "import time; time.sleep(600)")
    with (
        pytest.raises(RuntimeError, match="not up after 0 s"),
        running(sleeper, os.environ, port=free_port(), log=tmp_path / "log", startup=0.0),
    ):
        pass
