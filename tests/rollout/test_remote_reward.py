"""Rewards from a server on this machine: what it gets, and whatever it may answer."""

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from inspect import isawaitable
from typing import Any

import pytest

from slime_tis.errors import CustomFunctionError
from slime_tis.trainer.data.sample import Prompt
from slime_tis.trainer.engines.engine import RolloutUnavailable
from slime_tis.trainer.rewards.remote_reward import MAX_ANSWER_BYTES, RewardServer
from slime_tis.trainer.rewards.rewards import build_reward, check_prompts, check_reward_server
from tests.rollout.sglang.fake_sglang import FakeSGLang, servers_of
from tests.rollout.test_rewards import make_config, make_samples
from tests.runs import free_port


class Scorer(FakeSGLang):
    """Answers every request with what a function returns."""

    respond: Callable[[dict[str, Any]], Any]

    async def _control(self, path, body):
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        answer = self.respond(body)
        answer = await answer if isawaitable(answer) else answer
        self.at_once -= 1
        return answer


@pytest.fixture
def serve():
    with servers_of(Scorer, 1) as (server,):

        def start(respond):
            server.respond = respond
            return server

        yield start


def client(url, **options):
    return RewardServer(**{"url": url, "timeout": 10, "max_retries": 2, "concurrency": 8, "backoff": 0.001} | options)


REQUEST = {"prompt": "?", "response": "a", "label": ""}


def test_the_server_gets_prompt_response_and_label(serve):
    server = serve(lambda body: (200, len(body["response"])))
    reward = build_reward(make_config(rm_type="remote_rm", rm_url=server.url))
    assert reward(make_samples(["a", "aa"], ["aaa"])) == [1.0, 2.0, 3.0]
    assert sorted(server.bodies("/"), key=str) == [
        {"prompt": "?", "response": response, "label": "12"} for response in ("a", "aa", "aaa")
    ]
    assert build_reward(make_config(rm_type="remote_rm", rm_url=server.url))([]) == []


def test_rows_choose_their_own_reward(serve):
    server = serve(lambda body: (200, "0.5"))
    config = make_config(rm_type="exact_match", rm_url=server.url)
    samples = make_samples(["12"], [r"\boxed{7}"], ["13"])
    samples[1].metadata["rm_type"] = "boxed_remote_rm"
    assert build_reward(config)(samples) == [1.0, 0.5, 0.0]
    assert [request["response"] for request in server.bodies("/")] == ["7"]
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
    prompts = [Prompt(index=0, text="a", token_ids=(1,), metadata={}), Prompt(index=1, text="", token_ids=(1,))]
    if row is not None:
        prompts[1].metadata["rm_type"] = row
    config = make_config(rm_type=rm_type, rm_url="http://a:1/")
    with nullcontext() if asks else pytest.raises(ValueError, match="no prompt has a remote"):
        check_reward_server(config, prompts)


def test_an_object_is_weighted(serve):
    server = serve(lambda body: (200, '{"correct": 1, "format": 0.5}'))
    config = make_config(rm_type="remote_rm", rm_url=server.url, reward_weights="correct=1,format=0.2")
    samples = make_samples(["a"])
    assert build_reward(config)(samples) == [1.1]
    assert samples[0].reward_parts == {"correct": 1.0, "format": 0.5}


@pytest.mark.parametrize("status", [500, 429])
def test_a_busy_server_is_asked_again(serve, status):
    answers = iter([(status, "later"), (status, ""), (200, "2")])
    server = serve(lambda body: next(answers))
    assert client(server.url).ask([REQUEST]) == [2]
    assert len(server.bodies("/")) == 3


WRONG = {
    "500s": (500, "x", "failed 3 times in a row, the last time with Busy: HTTP status 500."),
    "404": (404, "no such page", "answered with HTTP status 404: b'no such page'; it must answer with a number"),
    "a megabyte": (200, "1" * 2**20, f"answered with more than {MAX_ANSWER_BYTES} bytes: b'1111"),
    "deep": (200, "[" * 60_000, "answered with what is not JSON: b'[[["),
    "redirect": (302, "", "answered with HTTP status 302"),
}


@pytest.mark.parametrize(("status", "content", "message"), WRONG.values(), ids=WRONG)
def test_a_server_that_answers_otherwise_is_one_message(serve, status, content, message):
    server = serve(lambda body: (status, content))
    with pytest.raises(RolloutUnavailable) as stopped:
        client(server.url).ask([REQUEST])
    assert str(stopped.value).startswith(f"the reward server {server.url} (--rm-url) {message}")


@pytest.mark.parametrize("content", ["NaN", "null", '"1"', "[1]", "1e999"])
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
    server = serve(lambda body: asyncio.sleep(60))
    with pytest.raises(
        RolloutUnavailable, match=r"failed 2 times in a row, the last time with no answer within 0\.1 s"
    ):
        client(server.url, timeout=0.1, max_retries=1).ask([REQUEST])


def test_requests_under_way_are_bounded(serve):
    both = asyncio.Barrier(2)

    async def answer(body):
        await both.wait()
        return 200, "1"

    server = serve(answer)
    assert client(server.url, concurrency=2).ask([REQUEST] * 6) == [1] * 6
    assert server.most_at_once == 2


def test_a_signal_ends_the_wait(serve):
    server = serve(lambda body: asyncio.sleep(60))

    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client(server.url).ask([REQUEST], stop)
