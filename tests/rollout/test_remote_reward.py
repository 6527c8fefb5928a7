"""Rewards from a server on this machine: what it gets, and whatever it may answer."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from slime_tis.errors import CustomFunctionError
from slime_tis.trainer.data.sample import Prompt
from slime_tis.trainer.engines.engine import RolloutUnavailable
from slime_tis.trainer.rewards.remote_reward import MAX_ANSWER_BYTES, RewardServer
from slime_tis.trainer.rewards.rewards import build_reward, check_prompts, check_reward_server
from tests.rollout.test_rewards import make_config, make_samples
from tests.runs import free_port

Answer = Callable[[dict[str, Any]], tuple[int, bytes]]


class Server:
    """Answers every request with what a function returns, and remembers the requests."""

    def __init__(self, answer: Answer) -> None:
        requests = self.requests = list[dict[str, Any]]()
        self.most = under_way = 0
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(handler) -> None:
                nonlocal under_way
                body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
                with lock:
                    requests.append(body)
                    under_way += 1
                    self.most = max(self.most, under_way)
                status, content = answer(body)
                with lock:
                    under_way -= 1
                handler.send_response(status)
                handler.send_header("Content-Length", str(len(content)))
                handler.end_headers()
                handler.wfile.write(content)

            def log_message(handler, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # of connections that the client ends
        self.url = f"http://127.0.0.1:{self._server.server_port}/score"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], Server]]:
    servers: list[Server] = []

    def start(answer: Answer) -> Server:
        servers.append(Server(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def client(url: str, **options: Any) -> RewardServer:
    return RewardServer(**{"url": url, "timeout": 10, "max_retries": 2, "concurrency": 8, "backoff": 0.001} | options)


REQUEST = {"prompt": "?", "response": "a", "label": "b"}


def test_the_server_gets_prompt_response_and_label(serve):
    server = serve(lambda body: (200, json.dumps(len(body["response"])).encode()))
    reward = build_reward(make_config(rm_type="remote_rm", rm_url=server.url))
    assert reward(make_samples(["a", "aa"], ["aaa"])) == [1.0, 2.0, 3.0]
    assert sorted(server.requests, key=str) == [
        {"prompt": "?", "response": response, "label": "12"} for response in ("a", "aa", "aaa")
    ]
    assert build_reward(make_config(rm_type="remote_rm", rm_url=server.url))([]) == []


def test_rows_choose_their_own_reward(serve):
    server = serve(lambda body: (200, b"0.5"))
    config = make_config(rm_type="exact_match", rm_url=server.url)
    samples = make_samples(["12"], [r"\boxed{7}"], ["13"])
    samples[1].metadata["rm_type"] = "boxed_remote_rm"
    assert build_reward(config)(samples) == [1.0, 0.5, 0.0]
    assert [request["response"] for request in server.requests] == ["7"]
    samples[1].row.metadata["rm_type"] = "remote_rm"
    with pytest.raises(ValueError, match="prompt 11 has the rm_type remote_rm in its metadata; add --rm-url"):
        check_prompts(make_config(rm_type="exact_match"), [sample.row for sample in samples])


A_SERVER_THAT = {
    "nobody": ("math", None, False),
    "other rewards": ("math", "dapo", False),
    "the flag": ("remote_rm", None, True),
    "a row": ("math", "boxed_remote_rm", True),
}


@pytest.mark.parametrize(("rm_type", "row", "asks"), A_SERVER_THAT.values(), ids=A_SERVER_THAT)
def test_a_server_that_nothing_asks_is_refused(rm_type, row, asks):
    prompts = [Prompt(index=0, text="a", token_ids=(1,), metadata={}), Prompt(index=1, text="b", token_ids=(1,))]
    if row is not None:
        prompts[1].metadata["rm_type"] = row
    config = make_config(rm_type=rm_type, rm_url="http://a:1/")
    with nullcontext() if asks else pytest.raises(ValueError, match="--rm-type is math and no prompt has a remote"):
        check_reward_server(config, prompts)


def test_an_object_is_weighted(serve):
    server = serve(lambda body: (200, b'{"correct": 1, "format": 0.5}'))
    config = make_config(rm_type="remote_rm", rm_url=server.url, reward_weights="correct=1,format=0.2")
    samples = make_samples(["a"])
    assert build_reward(config)(samples) == [1.1]
    assert samples[0].reward_parts == {"correct": 1.0, "format": 0.5}


@pytest.mark.parametrize("status", [500, 503, 429, 408])
def test_a_busy_server_is_asked_again(serve, status):
    answers = iter([(status, b"later"), (status, b""), (200, b"2")])
    server = serve(lambda body: next(answers))
    assert client(server.url).ask([REQUEST]) == [2]
    assert len(server.requests) == 3


WRONG = {
    "500s": (500, b"x", "failed 3 times in a row, the last time with Busy: HTTP status 500."),
    "404": (404, b"no such page", "answered with HTTP status 404: b'no such page'; it must answer with a number"),
    "a megabyte": (200, b"1" * 2**20, f"answered with more than {MAX_ANSWER_BYTES} bytes: b'1111"),
    "deep": (200, b"[" * 60_000, "answered with what is not JSON: b'[[["),
    "redirect": (302, b"", "answered with HTTP status 302"),
}


@pytest.mark.parametrize(("status", "content", "message"), WRONG.values(), ids=WRONG)
def test_a_server_that_answers_otherwise_is_one_message(serve, status, content, message):
    server = serve(lambda body: (status, content))
    with pytest.raises(RolloutUnavailable) as stopped:
        client(server.url).ask([REQUEST])
    assert str(stopped.value).startswith(f"the reward server {server.url} (--rm-url) {message}")


@pytest.mark.parametrize("content", [b"NaN", b"null", b'"1"', b"[1]", b"1e999"])
def test_a_reward_that_is_no_number_is_one_message(serve, content):
    server = serve(lambda body: (200, content))
    with pytest.raises(CustomFunctionError) as refusal:
        build_reward(make_config(rm_type="remote_rm", rm_url=server.url))(make_samples(["a"]))
    assert str(refusal.value).startswith(f"the reward server {server.url} returned ")
    assert " for prompt 10; return a number" in str(refusal.value)


def test_a_server_that_is_not_there_is_one_message():
    url = f"http://127.0.0.1:{free_port()}/"
    with pytest.raises(RolloutUnavailable) as stopped:
        client(url).ask([REQUEST] * 20)
    assert str(stopped.value).startswith(f"the reward server {url} (--rm-url) failed 3 times in a row, the last time ")
    assert "ConnectError" in str(stopped.value)


def test_a_server_that_never_answers_is_given_up(serve):
    released = threading.Event()
    server = serve(lambda body: (released.wait(60), (200, b"1"))[1])
    with pytest.raises(
        RolloutUnavailable, match=r"failed 2 times in a row, the last time with no answer within 0\.1 s"
    ):
        client(server.url, timeout=0.1, max_retries=1).ask([REQUEST])
    released.set()


def test_requests_under_way_are_bounded(serve):
    both = threading.Barrier(2)

    def answer(body: dict[str, Any]) -> tuple[int, bytes]:
        both.wait(10)
        return 200, b"1"

    server = serve(answer)
    assert client(server.url, concurrency=2).ask([REQUEST] * 6) == [1] * 6
    assert server.most == 2


def test_a_signal_ends_the_wait(serve):
    released = threading.Event()
    server = serve(lambda body: (released.wait(60), (200, b"1"))[1])

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client(server.url).ask([REQUEST], stop)
    released.set()
