"""Rewards by name, by function and by server, held to their contracts."""

import asyncio
import json
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from inspect import isawaitable
from typing import Any

import pytest

from slime_tis.errors import CustomFunctionError
from slime_tis.trainer.configs.rollout import RolloutConfig
from slime_tis.trainer.data.sample import Prompt
from slime_tis.trainer.data.sample_file import from_dict, to_dict
from slime_tis.trainer.engines.rollout_engine import RolloutUnavailable
from slime_tis.trainer.rewards.remote_reward import MAX_ANSWER_BYTES, RewardServer
from slime_tis.trainer.rewards.rewards import (
    assign_rewards,
    build_reward,
    check_prompts,
    check_reward_server,
)
from slime_tis.trainer.rollout.rollout_metrics import rollout_metrics
from slime_tis.trainer.sample_pipeline import mask_removed_samples
from tests.rollout.sglang.fake_sglang import FakeSGLang, servers_of
from tests.runs import free_port
from tests.samples import make_sample


def make_config(**options):
    return RolloutConfig(
        prompt_data="p", rollout_batch_size=2, rollout_max_response_len=4, **options
    )


def make_samples(*groups, label="12"):
    return [
        make_sample(
            Prompt(
                index=10 + group, text="?", token_ids=(1,), label=label, metadata={"group": group}
            ),
            [3],
            group_index=group,
            response=response,
        )
        for group, responses in enumerate(groups)
        for response in responses
    ]


def test_rewards_by_name_of_the_run_or_of_a_row():
    reward = build_reward(make_config(rm_type="exact_match"))
    assert reward(make_samples(["12", "21"], ["12", "12", ""])) == [1.0, 0.0, 1.0, 1.0, 0.0]
    assert reward([]) == []
    with pytest.raises(ValueError, match="--rm-type is 'mathh' but must be one of exact_match, "):
        make_config(rm_type="mathh")
    with pytest.raises(ValueError, match="--rm-type is 'boxed_ifbench'"):
        make_config(rm_type="boxed_ifbench")
    with pytest.raises(ValueError, match="prompt 10 has no label"):
        build_reward(make_config(rm_type="math"))(make_samples(["1"], label=None))
    samples = make_samples(["so \\boxed{12}"], ["12"], ["so \\boxed{12}"])
    samples[1].metadata["rm_type"] = "exact_match"
    samples[2].metadata["rm_type"] = "boxed_exact_match"
    assert build_reward(make_config(rm_type="f1"))(samples) == [0.0, 1.0, 1.0]


CUSTOM = """
import asyncio

def plain(args, sample, **kwargs):
    return args.scale * len(sample.response)

async def slow(args, sample, **kwargs):
    for _ in range(10 - len(sample.response)):  # the longest response is the first to be scored
        await asyncio.sleep(0)
    return len(sample.response) + sample.metadata["group"]

async def group(args, samples, **kwargs):
    return [len(samples)] * len(samples)
"""


def written(tmp_path, code, name="fn", **options):
    path = tmp_path / f"reward_{len(list(tmp_path.iterdir()))}.py"
    path.write_text(code)
    return make_config(custom_rm_path=f"{path}:{name}", **options)


def test_functions_take_a_sample_or_a_group_and_return_one_reward_each(tmp_path):
    for name, scores in {
        "plain": [2.0, 4.0, 2.0],
        "slow": [1.0, 2.0, 2.0],
        "group": [2.0, 2.0, 1.0],
    }.items():
        reward = build_reward(written(tmp_path, CUSTOM, name), Namespace(scale=2))
        assert reward(make_samples(["a", "aa"], ["b"])) == scores
    for returned in ("[1.0]", "1.0", "None", "[1.0, 2.0, 3.0]"):
        code = f"async def fn(args, samples, **kwargs):\n    return {returned}\n"
        assert (
            f"fn (FILE, line 1) returned {returned} for the 2 samples of prompt 10"
            in refusal_of(tmp_path, code)
        )
    assert "cannot be called as fn(args, sample)" in refusal_of(
        tmp_path, "def fn(args):\n    return 1\n"
    )


def refusal_of(tmp_path, code, **options):
    config = written(tmp_path, code, **options)
    with pytest.raises(CustomFunctionError) as refusal:
        build_reward(config)(make_samples(["a", "aa"], ["b"]))
    return str(refusal.value).replace(config.custom_rm_path.removesuffix(":fn"), "FILE")


# (code of a function, options, what the message says after `fn (FILE, line N) `)
WRONG = {
    "nan": ("return float('nan')", {}, "returned nan for prompt 10; return a number"),
    "overflow": ("return -1e151", {}, "returned -1e+151 for prompt 10"),
    "none": ("pass", {}, "returned None for prompt 10"),
    "huge": ("return 10**9999", {}, "returned a int that cannot be shown for prompt 10"),
    "dict": (
        "return {'acc': 1, 'len': 2}",
        {},
        "returned {'acc': 1, 'len': 2} for prompt 10; return a number, or add ",
    ),
    "tokens": ("sample.tokens.clear(); return 1", {}, "changed a sample of prompt"),
    "raises": (
        "x = 1\n    return x / 0",
        {},
        "raised ZeroDivisionError: division by zero. SLIME_TIS_TRACEBACK",
    ),
    "no key": (
        "return {'score': 1.0}",
        {"reward_key": "acc"},
        "returned {'score': 1.0} for prompt 10; return a dict with",
    ),
    "no dict": (
        "return 1.0",
        {"reward_key": "acc"},
        "returned 1.0 for prompt 10; return a dict with the number acc",
    ),
    "no weighted key": (
        "return {'a': 1}",
        {"reward_weights": "a=1,b=2"},
        "returned {'a': 1} for prompt 10",
    ),
}


@pytest.mark.parametrize(("body", "options", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_reward_is_one_message_with_function_file_and_prompt(
    tmp_path, body, options, message
):
    said = refusal_of(tmp_path, f"async def fn(args, sample, **kwargs):\n    {body}\n", **options)
    assert said.startswith("fn (FILE, line ") and message in said and len(said) < 400


def test_dicts_give_the_reward_of_a_key_or_weighted_components(tmp_path):
    returned = (
        "{'score': len(sample.response), 'acc': sample.response == 'a', 'pred': 'a', 'bad': 1e999}"
    )
    code = f"def fn(args, sample):\n    return {returned}\n"
    config = written(tmp_path, code, reward_key="score", eval_reward_key="acc")
    samples = make_samples(["a", "aa"], ["aaa"])
    assert build_reward(config)(samples) == [1.0, 2.0, 3.0]
    assert [sample.reward_parts for sample in samples] == [{"acc": 1.0}, {"acc": 0.0}, {"acc": 0.0}]
    assert rollout_metrics([samples], 0)["rollout/reward/acc"] == pytest.approx(1 / 3)
    assert build_reward(config, evaluation=True)(samples) == [1.0, 0.0, 0.0]
    assert samples[2].reward_parts == {"score": 3.0}
    returned = "{'correct': sample.response == 'a', 'format': len(sample.response), 'words': 7}"
    code = f"def fn(args, sample):\n    return {returned}\n"
    config = written(
        tmp_path, code, reward_weights="correct=1, format=0.2", eval_reward_key="correct"
    )
    samples = make_samples(["a", "aa"])
    assert build_reward(config)(samples) == [1.2, 0.4]
    assert samples[1].reward_parts == {"correct": 0.0, "format": 2.0, "words": 7.0}
    metrics = rollout_metrics([samples], 0)
    assert (metrics["rollout/reward/correct"], metrics["rollout/reward/format"]) == (0.5, 1.5)
    assert build_reward(config, evaluation=True)(samples) == [1.0, 0.0]


WRONG_KEYS = {
    "no key of several": ({"rm_type": "dapo"}, "add --reward-key score"),
    "unknown key": ({"rm_type": "dapo", "reward_key": "pred"}, "--reward-key is 'pred'"),
    "weights of a number": (
        {"rm_type": "math", "reward_weights": "a=1"},
        "--reward-weights is 'a'",
    ),
    "no weight": ({"rm_type": "dapo", "reward_weights": "a"}, "must be KEY=WEIGHT"),
    "a weight that is no number": (
        {"rm_type": "dapo", "reward_weights": "acc=nan"},
        "must be KEY=WEIGHT",
    ),
    "a key twice": ({"rm_type": "dapo", "reward_weights": "acc=1,acc=2"}, "different keys"),
    "weights and key": (
        {"rm_type": "dapo", "reward_weights": "acc=1", "reward_key": "acc"},
        "remove one of the two",
    ),
    "no url": ({"rm_type": "remote_rm"}, "--rm-url is unset"),
}


@pytest.mark.parametrize(("options", "message"), WRONG_KEYS.values(), ids=WRONG_KEYS)
def test_keys_are_checked_before_anything_is_built(options, message):
    with pytest.raises(ValueError, match=message):
        make_config(**options)


@pytest.mark.parametrize(
    "url", ["http://ann:SECRET@a:1/", "http://a/x?token=SECRET", "ftp://b:SECRET@a/?SECRET"]
)
def test_a_secret_in_the_url_of_a_reward_server_is_refused_unseen(url):
    with pytest.raises(ValueError, match="--rm-url") as refusal:
        make_config(rm_type="remote_rm", rm_url=url)
    assert "SECRET" not in str(refusal.value)


SLIMES_OWN = """
from slime.utils.types import Sample

async def fn(args, sample: Sample, **kwargs):
    assert sample.prompt == "?" and sample.prompt.find("?") == 0 and isinstance(sample.prompt, str)
    assert sample.status == Sample.Status.COMPLETED and sample.status.value == "completed"
    assert sample.tokens == [1, 3] and sample.response_length == 1 and sample.index == 0
    assert sample.label == "12" and sample.rollout_log_probs == [-1.0] and sample.weight_versions == [0]
    assert sample.reward is None and sample.effective_response_length == 1
    sample.metadata["length"] = len(sample.response)
    sample.metadata["seen"] = {1, (2,)}
    if sample.response == "aa":
        sample.remove_sample = True
    if sample.response == "aaa":
        sample.loss_mask[0] = 0
    return sample.group_index
"""


def test_a_function_of_slime_reads_and_writes_the_fields_of_its_sample(tmp_path):
    samples = make_samples(["a", "aa"], ["aaa", "a"])
    groups = [samples[:2], samples[2:]]
    assign_rewards(groups, build_reward(written(tmp_path, SLIMES_OWN)))
    assert [sample.reward for sample in samples] == [0.0, 0.0, 1.0, 1.0]
    mask_removed_samples(groups)
    assert [sample.loss_mask for sample in samples] == [[1], [0], [0], [1]]
    assert [sample.remove_sample for sample in samples] == [False, True, False, False]
    assert [sample.metadata["length"] for sample in samples] == [1, 2, 3, 1]
    assert samples[0].metadata["group"] == 0 and "length" not in samples[0].row.metadata
    assert [from_dict(json.loads(json.dumps(to_dict(sample)))) for sample in samples] == samples


def test_prompts_are_checked_before_anything_is_sampled():
    def prompts(**fields):
        return [Prompt(index=3, text="?", token_ids=(1,), **{"label": "1", **fields})]

    config = make_config(rm_type="math")
    check_prompts(config, prompts())
    check_prompts(make_config(rm_type="random"), prompts(label=None))
    for fields, message in (
        ({"label": None}, "prompt 3 has no label"),
        ({"metadata": {"rm_type": "mathh"}}, "the rm_type in the metadata of prompt 3 is 'mathh'"),
        ({"metadata": {"rm_type": 7}}, "not text: 7"),
    ):
        with pytest.raises(ValueError, match=message):
            check_prompts(config, prompts(**fields))


class Scorer(FakeSGLang):
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
    options = {"rm_timeout": 10.0, "rm_max_retries": 2, "rm_concurrency": 8, **options}
    return RewardServer(
        url=url, config=make_config(rm_type="remote_rm", rm_url=url, **options), backoff=0.001
    )


REQUEST = {"prompt": "?", "response": "a", "label": ""}


def test_the_server_gets_prompt_response_and_label_and_objects_are_weighted(serve):
    server = serve(lambda body: (200, len(body["response"])))
    reward = build_reward(make_config(rm_type="remote_rm", rm_url=server.url))
    assert reward(make_samples(["a", "aa"], ["aaa"])) == [1.0, 2.0, 3.0]
    assert sorted(server.bodies("/"), key=str) == [
        {"prompt": "?", "response": response, "label": "12"} for response in ("a", "aa", "aaa")
    ]
    assert build_reward(make_config(rm_type="remote_rm", rm_url=server.url))([]) == []
    server = serve(lambda body: (200, '{"correct": 1, "format": 0.5}'))
    config = make_config(
        rm_type="remote_rm", rm_url=server.url, reward_weights="correct=1,format=0.2"
    )
    samples = make_samples(["a"])
    assert build_reward(config)(samples) == [1.1]
    assert samples[0].reward_parts == {"correct": 1.0, "format": 0.5}


def test_rows_choose_their_own_reward(serve):
    server = serve(lambda body: (200, "0.5"))
    config = make_config(rm_type="exact_match", rm_url=server.url)
    samples = make_samples(["12"], [r"\boxed{7}"], ["13"])
    samples[1].metadata["rm_type"] = "boxed_remote_rm"
    assert build_reward(config)(samples) == [1.0, 0.5, 0.0]
    assert [request["response"] for request in server.bodies("/")] == ["7"]
    samples[1].row.metadata["rm_type"] = "remote_rm"
    with pytest.raises(
        ValueError, match="prompt 11 has the rm_type remote_rm in its metadata; add --rm-url"
    ):
        check_prompts(make_config(rm_type="exact_match"), [sample.row for sample in samples])


A_SERVER_THAT = {
    "nobody": ("math", None, False),
    "other rewards": ("math", "dapo", False),
    "the flag": ("remote_rm", None, True),
    "a row": ("math", "boxed_remote_rm", True),
}


@pytest.mark.parametrize(("rm_type", "row", "asks"), A_SERVER_THAT.values(), ids=A_SERVER_THAT)
def test_a_server_that_nothing_asks_is_refused(rm_type, row, asks):
    prompts = [
        Prompt(index=0, text="a", token_ids=(1,), metadata={}),
        Prompt(index=1, text="", token_ids=(1,)),
    ]
    if row is not None:
        prompts[1].metadata["rm_type"] = row
    config = make_config(rm_type=rm_type, rm_url="http://a:1/")
    with nullcontext() if asks else pytest.raises(ValueError, match="no prompt has a remote"):
        check_reward_server(config, prompts)


@pytest.mark.parametrize("status", [500, 429])
def test_a_busy_server_is_asked_again(serve, status):
    answers = iter([(status, "later"), (status, ""), (200, "2")])
    server = serve(lambda body: next(answers))
    assert client(server.url).ask([REQUEST]) == [2]
    assert len(server.bodies("/")) == 3


WRONG_ANSWERS = {
    "500s": (500, "x", "failed 3 times in a row, the last time with Busy: HTTP status 500."),
    "404": (
        404,
        "no such page",
        "answered with HTTP status 404: b'no such page'; it must answer with a number",
    ),
    "a megabyte": (200, "1" * 2**20, f"answered with more than {MAX_ANSWER_BYTES} bytes: b'1111"),
    "deep": (200, "[" * 60_000, "gave an answer that is not JSON: b'[[["),
    "redirect": (302, "", "answered with HTTP status 302"),
}


@pytest.mark.parametrize(
    ("status", "content", "message"), WRONG_ANSWERS.values(), ids=WRONG_ANSWERS
)
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


def test_a_server_that_is_missing_or_never_answers_is_given_up(serve):
    url = f"http://127.0.0.1:{free_port()}/"
    with pytest.raises(RolloutUnavailable) as stopped:
        client(url).ask([REQUEST] * 20)
    assert str(stopped.value).startswith(
        f"the reward server {url} (--rm-url) failed 3 times in a row, the last time "
    )
    assert "ConnectError" in str(stopped.value)
    server = serve(lambda body: asyncio.sleep(60))
    with pytest.raises(
        RolloutUnavailable,
        match=r"failed 2 times in a row, the last time with no answer within 0\.1 s",
    ):
        client(server.url, rm_timeout=0.1, rm_max_retries=1).ask([REQUEST])


def test_requests_under_way_are_bounded(serve):
    both = asyncio.Barrier(2)

    async def answer(body):
        await both.wait()
        return 200, "1"

    server = serve(answer)
    assert client(server.url, rm_concurrency=2).ask([REQUEST] * 6) == [1] * 6
    assert server.most_at_once == 2


def test_a_signal_ends_the_wait(serve):
    server = serve(lambda body: asyncio.sleep(60))

    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client(server.url).ask([REQUEST], stop)
