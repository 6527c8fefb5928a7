"""Answers of reward servers, tools and SGLang servers that are compressed, damaged or not UTF-8."""

import asyncio
import gzip
import json
import random
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from slime_tis.trainer.agents import slime_client
from slime_tis.trainer.configs.rollout import RolloutConfig
from slime_tis.trainer.data.sample import Prompt, Sample, Sampling
from slime_tis.trainer.engines.rollout_engine import RolloutUnavailable
from slime_tis.trainer.engines.servers.answers import WeightName, parse
from slime_tis.trainer.engines.servers.errors import InvalidAnswer
from slime_tis.trainer.engines.servers.health import Timeouts
from slime_tis.trainer.engines.sglang.sglang_answers import (
    ControlAnswer,
    GenerateAnswer,
    ServerDescription,
)
from slime_tis.trainer.rewards import symbolic
from slime_tis.trainer.rewards.remote_reward import RewardServer
from slime_tis.trainer.rewards.rewards import build_reward
from tests.checkpoints import make_checkpoint
from tests.faults.hostile import Hostile, Raw, Spoil, hostiles, http
from tests.rollout.sglang.fake_sglang import recorded
from tests.rollout.sglang.rollouts import LATE, Weights, make_engine
from tests.samples import make_sample

ZEROS = bytes(1 << 28)
"""256 MiB."""
BOMBS = {
    "gzip": gzip.compress(ZEROS),
    "gzip, gzip": gzip.compress(gzip.compress(ZEROS)),
    "deflate": zlib.compress(ZEROS),
    "x-gzip": gzip.compress(ZEROS),
    "GZIP": gzip.compress(ZEROS),
    "unknown": b"1",
}
"""Bodies by their Content-Encoding."""
MEMORY = 64 << 20
"""Bytes by which refusing 256 MiB may increase the peak."""
QUICK = Timeouts(recovery=0.3, first_retry=0.002, max_retry=0.01, health_interval=0.01)


def peak_memory() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = [int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM")]
    return peak


def mutated(content: bytes, chance: random.Random) -> bytes:
    """The content with one to four bytes changed, cut out or put in; half of the new bytes are not
    ASCII."""
    damaged = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(damaged))
        new = chance.randrange(128, 256) if chance.random() < 0.5 else chance.randrange(128)
        damaged[place : place + chance.randint(0, 1)] = bytes([new])
        if chance.random() < 0.2:
            del damaged[place : place + chance.randint(1, 8)]
    return bytes(damaged) or b" "


@pytest.fixture
def server() -> Iterator[Hostile]:
    with hostiles(1) as (one,):
        yield one


def sent(body: bytes) -> Spoil:
    """Sends this body instead of a good answer."""
    return lambda good: http(body)


def reward_server(server: Hostile) -> RewardServer:
    config = RolloutConfig(
        prompt_data="p",
        rollout_batch_size=2,
        rollout_max_response_len=4,
        rm_type="remote_rm",
        rm_url=f"{server.url}/reward",
        rm_timeout=10.0,
        rm_max_retries=1,
    )
    return RewardServer(url=f"{server.url}/reward", config=config, backoff=0.001)


@pytest.mark.parametrize("encoding", BOMBS)
def test_a_compressed_reward_is_refused_unread(encoding: str, server: Hostile) -> None:
    server.answers["/reward"] = lambda good: http(BOMBS[encoding], f"Content-Encoding: {encoding}")
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_memory()
    with pytest.raises(RolloutUnavailable, match=f"answered with Content-Encoding '{encoding}'"):
        reward_server(server).ask([{"response": "a"}] * 8)
    assert peak_memory() - before < MEMORY
    assert server.headers[-1]["accept-encoding"] == "identity"


@pytest.mark.parametrize("encoding", BOMBS)
def test_a_compressed_answer_of_a_tool_is_refused_unread(encoding: str, server: Hostile) -> None:
    server.answers["/tool"] = lambda good: http(BOMBS[encoding], f"Content-Encoding: {encoding}")
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_memory()
    with pytest.raises(httpx.DecodingError, match="compressed"):
        asyncio.run(slime_client.post(f"{server.url}/tool", {}, max_retries=0))
    assert peak_memory() - before < MEMORY


def test_a_tool_that_answers_no_utf_8_is_asked_again(server: Hostile) -> None:
    answers = iter([http(b'{"text": "\xd2"}'), http(b"{"), http(b'{"text": "good"}')])
    server.answers["/tool"] = lambda good: next(answers)
    assert asyncio.run(slime_client.post(f"{server.url}/tool", {}, max_retries=2)) == {
        "text": "good"
    }


def test_an_endless_answer_of_a_tool_is_cut(
    server: Hostile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slime_client, "MAX_ANSWER_BYTES", 1 << 16)
    body = b"1" * (1 << 20)
    server.answers["/tool"] = lambda good: Raw(
        b"HTTP/1.1 200 OK\r\nContent-Length: 1048576\r\n\r\n" + body
    )
    with pytest.raises(httpx.DecodingError, match="more than 65536 bytes"):
        asyncio.run(slime_client.post(f"{server.url}/tool", {}, max_retries=0))


def test_mutated_rewards_are_numbers_or_one_message(server: Hostile) -> None:
    chance = random.Random(0)
    asked = 0
    for _ in range(150):
        body = mutated(b'{"score": 0.5, "format": 1.0, "note": "a text"}', chance)
        server.answers["/reward"] = sent(body)
        try:
            reward_server(server).ask([{"response": "a"}])
        except RolloutUnavailable as error:
            assert "gave an answer that is not JSON" in str(error)
        asked += 1
    assert asked == 150


SCHEMAS: dict[str, Any] = {
    "generate_stop": GenerateAnswer,
    "generate_spans_abort": GenerateAnswer,
    "score": GenerateAnswer,
    "model_info": WeightName,
    "server_info": ServerDescription,
    "begin_weight_update": ControlAnswer,
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_mutated_answers_are_parsed_or_invalid(name: str) -> None:
    content = json.dumps(recorded(name)).encode()
    chance = random.Random(0)
    invalid = 0
    for _ in range(1000):
        try:
            parse(SCHEMAS[name], mutated(content, chance))
        except InvalidAnswer:
            invalid += 1
    assert invalid > 100


NOT_UTF_8 = {
    "finish reason": (
        b'{"output_ids":[5],"meta_info":{"finish_reason":{"type":"st\xd2p"},"weight_versions":[]}}'
    ),
    "version": b'{"weight_version": "\xff1"}',
    "server version": b'{"version": "\xc3("}',
    "worker": b'{"workers": [{"url": "http://\xed\xa0\x80"}]}',
}


@pytest.mark.parametrize("name", NOT_UTF_8)
@pytest.mark.parametrize("schema", [GenerateAnswer, WeightName, ServerDescription, ControlAnswer])
def test_text_that_is_not_utf_8_is_an_invalid_answer(name: str, schema: Any) -> None:
    try:
        parse(schema, NOT_UTF_8[name])
    except InvalidAnswer as error:
        assert "\n" not in str(error)


def test_mutated_answers_of_a_server_are_asked_for_elsewhere(tmp_path: Path) -> None:
    """A hostile server beside a good one: 500 answers are mutated, and no request fails."""
    chance = random.Random(0)

    def spoil(good: Any) -> Raw:
        return http(mutated(json.dumps(good).encode(), chance))

    sampling = Sampling(max_response_len=6, n_samples=8)
    with hostiles(2) as both:
        urls = tuple(server.url for server in both)
        engine = make_engine(
            make_checkpoint(tmp_path / "model", "qwen3"),
            Weights(),
            timeouts=QUICK,
            sglang_url=urls,
            sglang_request_timeout=5.0,
            sglang_max_retries=200,
        )
        try:
            both[0].faults.extend([spoil] * 500)
            while both[0].faults:
                groups = engine.generate(LATE[:4], sampling, seed=0)
                assert all(len(group) == 8 for group in groups)
            malformed = engine.metrics()["rollout/sglang_malformed_responses"]
        finally:
            engine.close()
    assert malformed > 0


ENDLESS = {
    "a tower of powers": lambda number: f"{number + 10}^{{10^{{10}}}}",
    "factorials": lambda number: f"{number + 9}!!!!",
    "parentheses": lambda number: "(" * (5000 + number),
    "letters": lambda number: "a" * (100_000 + number),
}
"""Answers that a policy may learn, by number."""

HONEST = {
    "polynomial": ("2x^2+3x-1", "3x-1+2x^2"),
    "root": (r"\frac{1}{\sqrt{3}}", r"\frac{\sqrt{3}}{3}"),
    "angle": (r"5\pi/4", r"\frac{5}{4}\pi"),
    "set": (r"\{3,1\}", r"\{1,3\}"),
    "pair": ("(1, -2)", r"\left(1,-2\right)"),
}


def scored(response: str, label: str, group: int) -> Sample:
    prompt = Prompt(index=group, text="?", token_ids=(1,), label=label)
    return make_sample(prompt, [3], group_index=group, response=f"so \\boxed{{{response}}}")


def test_endless_answers_are_wrong_beside_honest_ones(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Without a limit of processor time these comparisons would never end.
    monkeypatch.setattr(symbolic, "LIMITS", ((2.0, 1.0), (4.0, 0.5)))
    config = RolloutConfig(
        prompt_data="p", rollout_batch_size=2, rollout_max_response_len=4, rm_type="math"
    )
    hostile = []
    for number in range(20):
        hostile += [scored(answer(number), "x+1", 0) for answer in ENDLESS.values()]
    honest = []
    for group, (response, label) in enumerate(HONEST.values(), start=1):
        honest.append(scored(response, label, group))
    rewards = build_reward(config)([*hostile, *honest])
    assert rewards == [0.0] * len(hostile) + [1.0] * len(honest)
    assert caplog.text.count("answers count as wrong") == 1
