"""Hostile servers: their answers are thrown away, asked for elsewhere and counted; the terminal
sees nothing of them.

Each is given to the real client on a real connection: once beside a good server, which the samples
then come from, and once alone, where the request ends with a message.
"""

import base64
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from slime_tis.trainer.data.sample import Sampling
from slime_tis.trainer.engines.rollout_engine import RolloutUnavailable
from slime_tis.trainer.engines.sglang.health import Timeouts
from tests.checkpoints import make_checkpoint
from tests.faults.forked import check
from tests.faults.hostile import (
    ADMIN_KEY,
    ERRORS,
    GENERATE,
    KEY,
    PROTOCOL,
    STEERING,
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
MEMORY = 300 << 20
SECONDS = 10.0
ECHOES = [
    part
    for key in (KEY, ADMIN_KEY)
    for part in (key, base64.b64encode(key.encode()).decode().rstrip("="))
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(autouse=True)
def keys(monkeypatch):
    monkeypatch.setenv("SGLANG_API_KEY", KEY)
    monkeypatch.setenv("SGLANG_ADMIN_API_KEY", ADMIN_KEY)


@contextmanager
def engine_on(servers, checkpoint, **options):
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


def seen_in(text):
    """What a message or a log must not show, if it does."""
    if any(part[start : start + 8] in text for part in ECHOES for start in range(len(part) - 7)):
        return f"shows a key: {text!r}"
    if not text.replace("\n", "").isprintable():
        return f"steers the terminal: {text!r}"
    return None


@dataclass
class Peak:
    """The most memory held since it was made, as the kernel counts it."""

    before: int = 0

    def __post_init__(self):
        Path("/proc/self/clear_refs").write_text("5")
        self.before = self._most()

    def grown(self):
        return self._most() - self.before

    @staticmethod
    def _most():
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def judged(work, caplog):
    """What went wrong in a try: by its own judgement, or in time, memory, or what was logged."""
    caplog.clear()
    peak, began = Peak(), time.monotonic()
    try:
        failure = work()
    except Exception as error:
        failure = f"{type(error).__name__}: {str(error)[:200]}"
    if time.monotonic() - began > SECONDS:
        failure = failure or f"took {time.monotonic() - began:.1f} s"
    if peak.grown() > MEMORY:
        failure = failure or f"took {peak.grown() >> 20} MB"
    return failure or next(
        filter(None, (seen_in(record.getMessage()) for record in caplog.records)), None
    )


def lost(engine, url, work):
    """Whether work ends with RolloutUnavailable and a message that one can read."""
    try:
        work()
    except RolloutUnavailable as error:
        message = str(error)
    else:
        return "was believed"
    if (
        url not in message
        or "\n" in message
        or len(message) > LONGEST_MESSAGE
        or not message.endswith(".")
    ):
        return f"ended with {message!r}"
    return seen_in(message)


def test_hostile_answers_are_asked_for_elsewhere(checkpoint, caplog):
    tried = {}
    with hostiles(2) as both, engine_on(both, checkpoint, sglang_max_retries=20) as engine:
        hostile = both[0]
        counted = dict.fromkeys(GENERATE, 1) | dict.fromkeys({**PROTOCOL, **ERRORS}, 0)

        def ask(name, spoil):
            while engine.metrics()["rollout/sglang_live_servers"] < 2:
                time.sleep(0.001)
            before = engine.metrics()
            hostile.faults.append(spoil)
            assert_exact(engine.generate(PROMPTS, SAMPLING, seed=0), PROMPTS, SAMPLING)
            after = engine.metrics()
            retries, malformed = (
                after[f"rollout/sglang_{count}"] - before[f"rollout/sglang_{count}"]
                for count in ("retries", "malformed_responses")
            )
            done = (
                retries >= 1 and malformed == counted[name]
            )  # a busy machine may take the server for a dead one, too
            return None if done else f"{retries} retries, {malformed} malformed"

        for name, spoil in SPOILED.items():
            tried[name] = judged(lambda n=name, s=spoil: ask(n, s), caplog)
    check(tried)


def test_a_hostile_server_alone_ends_in_a_message(checkpoint, caplog):
    tried = {}
    with hostiles(1) as (server,), engine_on([server], checkpoint, sglang_max_retries=0) as engine:

        def ask(spoil):
            while engine.metrics()["rollout/sglang_live_servers"] < 1:
                time.sleep(0.001)
            server.faults.append(spoil)
            return lost(
                engine,
                server.url,
                lambda: engine.generate(PROMPTS[:1], Sampling(max_response_len=5), seed=0),
            )

        for name, spoil in SPOILED.items():
            tried[name] = judged(lambda s=spoil: ask(s), caplog)
    check(tried)


INFO = {
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
    "a router's bomb": ("/workers", GENERATE["gzip bomb"]),
    "a router's nested arrays": ("/workers", lambda good: nested(100_000)),
    "a router's URL with the key": (
        "/workers",
        lambda good: {"workers": [{"url": f"http://127.0.0.1:1/{KEY}?k={KEY}"}]},
    ),
    "a router's error with the key": ("/workers", ERRORS["an error with the key"]),
}


def test_what_hostile_servers_and_routers_say_of_themselves_is_not_believed(checkpoint, caplog):
    tried = {}

    def start(path, spoil):
        with hostiles(1) as (server,):
            server.workers, server.answers[path] = [server], spoil
            where = urlsplit(server.url)
            router = {
                "sglang_url": None,
                "sglang_router_ip": where.hostname,
                "sglang_router_port": where.port,
            }
            try:
                with engine_on(
                    [server],
                    checkpoint,
                    sglang_startup_timeout=0.3,
                    **router if path == "/workers" else {},
                ):
                    return "was believed"
            except (ValueError, RolloutUnavailable) as error:
                return (
                    seen_in(str(error))
                    if path == "/workers" or server.url in str(error)
                    else str(error)
                )

    for name, (path, spoil) in INFO.items():
        tried[name] = judged(lambda p=path, s=spoil: start(p, s), caplog)
    check(tried)


UPDATES = {
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


def test_updates_that_hostile_servers_spoil(checkpoint, caplog):
    tried = {}

    def update(path, spoil):
        with hostiles(2) as both, engine_on(both, checkpoint, sglang_weight_sync="disk") as engine:
            both[0].answers[path] = spoil
            engine.update_weights(Weights(), 1)
            if engine.metrics()["rollout/sglang_live_servers"] != 1:
                return "was believed"
            groups = engine.generate(PROMPTS, SAMPLING, seed=0)
            assert_exact(groups, PROMPTS, SAMPLING)
            if not [record for record in caplog.records if both[0].url in record.getMessage()]:
                return "was not logged"
            return None

    for name, (path, spoil) in UPDATES.items():
        tried[name] = judged(lambda p=path, s=spoil: update(p, s), caplog)
    check(tried)
