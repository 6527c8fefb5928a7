"""Hostile servers: their answers are thrown away, asked for elsewhere and counted; the terminal
sees nothing of them.

Each is given to the real client on a real connection: once beside a good server, which the samples
then come from, and once alone, where the request ends with a message.
"""

import base64
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from slime_tis.trainer.data.sample import Sampling
from slime_tis.trainer.engines.rollout_engine import RolloutUnavailable
from slime_tis.trainer.engines.servers.health import Timeouts
from slime_tis.trainer.engines.servers.server_engine import ServerEngine
from tests.checkpoints import make_checkpoint
from tests.faults.forked import check
from tests.faults.hostile import (
    ADMIN_KEY,
    ERRORS,
    GENERATE,
    KEY,
    PROTOCOL,
    STEERING,
    Hostile,
    Spoil,
    hostiles,
    http,
    nested,
)
from tests.rollout.sglang.rollouts import LATE, Weights, assert_exact, make_engine

QUICK = Timeouts(recovery=0.3, first_retry=0.002, max_retry=0.01, health_interval=0.01)
SAMPLING = Sampling(max_response_len=12, n_samples=2)
PROMPTS = LATE[:2]
SPOILED = {**GENERATE, **PROTOCOL, **ERRORS}
LONGEST_MESSAGE = 1500
"""Characters."""
MEMORY = 300 << 20
"""Bytes by which a try may increase the peak."""
ECHOES: list[str] = []
"""The keys, and their base64."""
for key in (KEY, ADMIN_KEY):
    ECHOES += [key, base64.b64encode(key.encode()).decode().rstrip("=")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_API_KEY", KEY)
    monkeypatch.setenv("SGLANG_ADMIN_API_KEY", ADMIN_KEY)


@contextmanager
def engine_on(
    servers: Sequence[Hostile], checkpoint: Path, **options: Any
) -> Iterator[ServerEngine]:
    config = {
        "sglang_url": tuple(server.url for server in servers),
        "sglang_request_timeout": 5.0,
        **options,
    }
    engine = make_engine(checkpoint, Weights(), timeouts=QUICK, **config)
    try:
        yield engine
    finally:
        engine.close()


def exposure(text: str) -> str | None:
    """Describes a secret or a control character in a text, or returns None."""
    for echo in ECHOES:
        # eight characters of a key are enough to recognize it
        if any(echo[start : start + 8] in text for start in range(len(echo) - 7)):
            return f"shows a key: {text!r}"
    if not text.replace("\n", "").isprintable():
        return f"steers the terminal: {text!r}"
    return None


@dataclass
class Peak:
    """The most memory held since it was made, as the kernel counts it."""

    before: int = 0

    def __post_init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self.before = self._most()

    def growth(self) -> int:
        return self._most() - self.before

    @staticmethod
    def _most() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def failure_of(attempt: Callable[[], str | None], caplog: pytest.LogCaptureFixture) -> str | None:
    """Describes a failure: one that a try returns or raises, its memory, or a record of the log."""
    caplog.clear()
    peak = Peak()
    try:
        failure = attempt()
    except Exception as error:
        failure = f"{type(error).__name__}: {str(error)[:200]}"
    if peak.growth() > MEMORY:
        failure = failure or f"took {peak.growth() >> 20} MB"
    for record in caplog.records:
        failure = failure or exposure(record.getMessage())
    return failure


def failure_of_loss(engine: ServerEngine, url: str) -> str | None:
    """Describes a wrong end of a rollout without servers, or returns None."""
    try:
        engine.generate(PROMPTS[:1], Sampling(max_response_len=5), seed=0)
    except RolloutUnavailable as error:
        message = str(error)
    else:
        return "was believed"
    is_one_line = "\n" not in message and message.endswith(".")
    if url not in message or not is_one_line or len(message) > LONGEST_MESSAGE:
        return f"ended with {message!r}"
    return exposure(message)


def wait_for_servers(engine: ServerEngine, count: int) -> None:
    while engine.metrics()["rollout/sglang_live_servers"] < count:
        time.sleep(0.001)


def test_hostile_answers_are_asked_for_elsewhere(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failures = {}
    with hostiles(2) as both, engine_on(both, checkpoint, sglang_max_retries=20) as engine:

        def ask(name: str, spoil: Spoil) -> str | None:
            wait_for_servers(engine, 2)
            before = engine.metrics()
            both[0].faults.append(spoil)
            assert_exact(engine.generate(PROMPTS, SAMPLING, seed=0), PROMPTS, SAMPLING)
            after = engine.metrics()
            changes = {}
            for count in ("retries", "malformed_responses"):
                metric = f"rollout/sglang_{count}"
                changes[count] = after[metric] - before[metric]
            # protocol errors and refusals are no answers, and not counted as malformed ones
            expected_malformed = 1 if name in GENERATE else 0
            # a busy machine may take the server for a dead one, which is another retry
            is_retried = changes["retries"] >= 1
            if is_retried and changes["malformed_responses"] == expected_malformed:
                return None
            return str(changes)

        for name, spoil in SPOILED.items():
            failures[name] = failure_of(partial(ask, name, spoil), caplog)
    check(failures)


def test_a_hostile_server_alone_ends_in_a_message(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failures = {}
    with hostiles(1) as (server,), engine_on([server], checkpoint, sglang_max_retries=0) as engine:

        def ask(spoil: Spoil) -> str | None:
            wait_for_servers(engine, 1)
            server.faults.append(spoil)
            return failure_of_loss(engine, server.url)

        for name, spoil in SPOILED.items():
            failures[name] = failure_of(partial(ask, spoil), caplog)
    check(failures)


SERVER_INFO: dict[str, tuple[str, Spoil]] = {
    "a bomb": ("/server_info", GENERATE["gzip bomb"]),
    "nested arrays": ("/server_info", lambda good: nested(100_000)),
    "a number of 5,000 digits": ("/server_info", lambda good: '{"tp_size": ' + "9" * 5000 + "}"),
    "a trillion ranks": ("/server_info", lambda good: {**good, "tp_size": 10**12}),
    "sizes of text": ("/server_info", lambda good: {**good, "dp_size": "two"}),
    "the key as version": ("/model_info", lambda good: {**good, "weight_version": f"-{KEY}" * 20}),
    "a version that steers": (
        "/model_info",
        lambda good: {**good, "weight_version": STEERING * 20},
    ),
    "a negative version": ("/model_info", lambda good: {**good, "weight_version": "-3"}),
    "an error with the key": ("/model_info", ERRORS["an error with the key"]),
    "an error that steers": ("/health", ERRORS["an error that steers the terminal"]),
}
"""Path and answer of a server about itself."""

ROUTER_INFO: dict[str, Spoil] = {
    "a router's bomb": GENERATE["gzip bomb"],
    "a router's nested arrays": lambda good: nested(100_000),
    "a router's URL with the key": lambda good: {
        "workers": [{"url": f"http://127.0.0.1:1/{KEY}?k={KEY}"}]
    },
    "a router's error with the key": ERRORS["an error with the key"],
}


def failure_of_start(
    server: Hostile, checkpoint: Path, *, names_server: bool, **options: Any
) -> str | None:
    """Describes a wrong refusal to start, or returns None."""
    try:
        with engine_on([server], checkpoint, sglang_startup_timeout=0.3, **options):
            return "was believed"
    except (ValueError, RolloutUnavailable) as error:
        message = str(error)
    if names_server and server.url not in message:
        return message
    return exposure(message)


def test_what_a_hostile_server_says_of_itself_is_refused(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failures = {}

    def start(path: str, spoil: Spoil) -> str | None:
        with hostiles(1) as (server,):
            server.answers[path] = spoil
            return failure_of_start(server, checkpoint, names_server=True)

    for name, (path, spoil) in SERVER_INFO.items():
        failures[name] = failure_of(partial(start, path, spoil), caplog)
    check(failures)


def test_what_a_hostile_router_says_of_servers_is_refused(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failures = {}

    def start(spoil: Spoil) -> str | None:
        with hostiles(1) as (server,):
            server.workers = [server]
            server.answers["/workers"] = spoil
            address = urlsplit(server.url)
            router = {
                "sglang_url": None,
                "sglang_router_ip": address.hostname,
                "sglang_router_port": address.port,
            }
            return failure_of_start(server, checkpoint, names_server=False, **router)

    for name, spoil in ROUTER_INFO.items():
        failures[name] = failure_of(partial(start, spoil), caplog)
    check(failures)


UPDATES: dict[str, tuple[str, Spoil]] = {
    "the key in a refusal": (
        "/update_weights_from_disk",
        lambda good: http(KEY.encode(), status="400 X"),
    ),
    "the admin key in a failure": (
        "/update_weights_from_disk",
        lambda good: {"success": False, "message": ADMIN_KEY},
    ),
    "a bomb": ("/update_weights_from_disk", GENERATE["gzip bomb"]),
    "the key as the new version": (
        "/model_info",
        lambda good: {**good, "weight_version": f"v-{KEY}"},
    ),
    "no end of the pause": (
        "/continue_generation",
        lambda good: http(KEY.encode(), status="503 X"),
    ),
}


def test_updates_that_hostile_servers_spoil(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The hostile server is not used any more, which is logged; the other one is."""
    failures = {}

    def update(path: str, spoil: Spoil) -> str | None:
        with hostiles(2) as both, engine_on(both, checkpoint, sglang_weight_sync="disk") as engine:
            both[0].answers[path] = spoil
            engine.update_weights(Weights(), 1)
            if engine.metrics()["rollout/sglang_live_servers"] != 1:
                return "was believed"
            groups = engine.generate(PROMPTS, SAMPLING, seed=0)
            assert_exact(groups, PROMPTS, SAMPLING)
            if both[0].url not in caplog.text:
                return "was not logged"
            return None

    for name, (path, spoil) in UPDATES.items():
        failures[name] = failure_of(partial(update, path, spoil), caplog)
    check(failures)
