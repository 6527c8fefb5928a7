"""Rewards by name, by function and by server, held to their contracts."""

import asyncio
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from inspect import isawaitable
from pathlib import Path
from typing import Any

import pytest

from slime_tis.errors import CustomFunctionError
from slime_tis.trainer.configs.rollout import RolloutConfig
from slime_tis.trainer.data.sample import Prompt, Sample
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
from tests.samples import flat, make_sample, reloaded


def make_config(**options: Any) -> RolloutConfig:
    return RolloutConfig(
        prompt_data="p", rollout_batch_size=2, rollout_max_response_len=4, **options
    )


def make_samples(*groups: Sequence[str], label: str | None = "12") -> list[Sample]:
    """A sample for each response of each group; the first group's prompt has index 10."""
    samples = []
    for group, responses in enumerate(groups):
        prompt = Prompt(
            index=10 + group, text="?", token_ids=(1,), label=label, metadata={"group": group}
        )
        for response in responses:
            samples.append(make_sample(prompt, [3], group_index=group, response=response))
    return samples


def test_a_reward_by_name_scores_each_sample():
    reward = build_reward(make_config(rm_type="exact_match"))
    assert reward(make_samples(["12", "21"], ["12", "12", ""])) == [1.0, 0.0, 1.0, 1.0, 0.0]


def test_a_reward_by_name_scores_no_samples():
    assert build_reward(make_config(rm_type="exact_match"))([]) == []


def test_an_unknown_reward_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="--rm-type is 'mathh' but must be one of exact_match, "):
        make_config(rm_type="mathh")


def test_an_unknown_reward_after_boxed_is_refused():
    with pytest.raises(ValueError, match="--rm-type is 'boxed_ifbench'"):
        make_config(rm_type="boxed_ifbench")


def test_a_reward_by_name_needs_a_label():
    with pytest.raises(ValueError, match="prompt 10 has no label"):
        build_reward(make_config(rm_type="math"))(make_samples(["1"], label=None))


def test_the_reward_of_a_row_replaces_that_of_the_run():
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


def custom_reward(tmp_path: Path, code: str, name: str = "fn", **options: Any) -> RolloutConfig:
    """The configuration of a run with this code as `--custom-rm-path`."""
    path = tmp_path / "reward.py"
    path.write_text(code)
    return make_config(custom_rm_path=f"{path}:{name}", **options)


FUNCTION_SCORES = {
    "plain": [2.0, 4.0, 2.0],
    "slow": [1.0, 2.0, 2.0],
    "group": [2.0, 2.0, 1.0],
}


@pytest.mark.parametrize(("name", "scores"), FUNCTION_SCORES.items(), ids=FUNCTION_SCORES)
def test_a_function_scores_samples_or_groups(tmp_path, name, scores):
    reward = build_reward(custom_reward(tmp_path, CUSTOM, name), Namespace(scale=2))
    assert reward(make_samples(["a", "aa"], ["b"])) == scores


@pytest.mark.parametrize("returned", ["[1.0]", "1.0", "None", "[1.0, 2.0, 3.0]"])
def test_a_group_needs_one_reward_for_each_sample(tmp_path, returned):
    code = f"async def fn(args, samples, **kwargs):\n    return {returned}\n"
    message = f"fn (FILE, line 1) returned {returned} for the 2 samples of prompt 10"
    assert message in refusal_of(tmp_path, code)


def test_a_function_without_a_sample_argument_is_refused(tmp_path):
    message = refusal_of(tmp_path, "def fn(args):\n    return 1\n")
    assert "cannot be called as fn(args, sample)" in message


def refusal_of(tmp_path: Path, code: str, **options: Any) -> str:
    """The error message of two samples scored by this code, with FILE as its path."""
    config = custom_reward(tmp_path, code, **options)
    assert config.custom_rm_path is not None
    with pytest.raises(CustomFunctionError) as error:
        build_reward(config)(make_samples(["a", "aa"], ["b"]))
    return str(error.value).replace(config.custom_rm_path.removesuffix(":fn"), "FILE")


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
def test_a_wrong_reward_is_one_message(tmp_path, body, options, message):
    """The message names the function, its file, and the prompt."""
    code = f"async def fn(args, sample, **kwargs):\n    {body}\n"
    refusal = refusal_of(tmp_path, code, **options)
    assert refusal.startswith("fn (FILE, line ")
    assert message in refusal
    assert len(refusal) < 400


DICT_WITH_KEYS = """
def fn(args, sample):
    is_a = sample.response == "a"
    return {"score": len(sample.response), "acc": is_a, "pred": "a", "bad": 1e999}
"""


@pytest.fixture
def keyed_config(tmp_path: Path) -> RolloutConfig:
    return custom_reward(tmp_path, DICT_WITH_KEYS, reward_key="score", eval_reward_key="acc")


@pytest.fixture
def keyed_samples(keyed_config: RolloutConfig) -> list[Sample]:
    """Three samples that are scored for training."""
    samples = make_samples(["a", "aa"], ["aaa"])
    build_reward(keyed_config)(samples)
    return samples


def test_the_reward_is_that_of_the_reward_key(keyed_config):
    samples = make_samples(["a", "aa"], ["aaa"])
    assert build_reward(keyed_config)(samples) == [1.0, 2.0, 3.0]


def test_other_numbers_of_a_dict_are_parts_of_the_reward(keyed_samples):
    parts = [sample.reward_parts for sample in keyed_samples]
    assert parts == [{"acc": 1.0}, {"acc": 0.0}, {"acc": 0.0}]


def test_parts_of_the_reward_are_metrics(keyed_samples):
    assert rollout_metrics([keyed_samples], 0)["rollout/reward/acc"] == pytest.approx(1 / 3)


def test_evaluation_has_its_own_reward_key(keyed_config, keyed_samples):
    assert build_reward(keyed_config, evaluation=True)(keyed_samples) == [1.0, 0.0, 0.0]
    assert keyed_samples[2].reward_parts == {"score": 3.0}


DICT_WITH_COMPONENTS = """
def fn(args, sample):
    return {"correct": sample.response == "a", "format": len(sample.response), "words": 7}
"""


@pytest.fixture
def weighted_config(tmp_path: Path) -> RolloutConfig:
    return custom_reward(
        tmp_path,
        DICT_WITH_COMPONENTS,
        reward_weights="correct=1, format=0.2",
        eval_reward_key="correct",
    )


def test_weighted_components_are_added(weighted_config):
    assert build_reward(weighted_config)(make_samples(["a", "aa"])) == [1.2, 0.4]


def test_weighted_components_are_parts_of_the_reward(weighted_config):
    samples = make_samples(["a", "aa"])
    build_reward(weighted_config)(samples)
    assert samples[1].reward_parts == {"correct": 0.0, "format": 2.0, "words": 7.0}


def test_weighted_components_are_metrics(weighted_config):
    samples = make_samples(["a", "aa"])
    build_reward(weighted_config)(samples)
    metrics = rollout_metrics([samples], 0)
    assert metrics["rollout/reward/correct"] == 0.5
    assert metrics["rollout/reward/format"] == 1.5


def test_evaluation_may_take_one_component(weighted_config):
    samples = make_samples(["a", "aa"])
    build_reward(weighted_config)(samples)
    assert build_reward(weighted_config, evaluation=True)(samples) == [1.0, 0.0]


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
def test_a_secret_in_the_url_of_a_server_is_not_shown(url):
    with pytest.raises(ValueError, match="--rm-url") as refusal:
        make_config(rm_type="remote_rm", rm_url=url)
    assert "SECRET" not in str(refusal.value)


SLIME_REWARD = """
from slime.utils.types import Sample

async def fn(args, sample: Sample, **kwargs):
    assert sample.prompt == "?" and sample.prompt.find("?") == 0 and isinstance(sample.prompt, str)
    assert sample.status == Sample.Status.COMPLETED and sample.status.value == "completed"
    assert sample.tokens == [1, 3] and sample.response_length == 1 and sample.index == 0
    assert sample.label == "12" and sample.rollout_log_probs == [-1.0]
    assert sample.weight_versions == [0]
    assert sample.reward is None and sample.effective_response_length == 1
    sample.metadata["length"] = len(sample.response)
    sample.metadata["seen"] = {1, (2,)}
    if sample.response == "aa":
        sample.remove_sample = True
    if sample.response == "aaa":
        sample.loss_mask[0] = 0
    return sample.group_index
"""


@pytest.fixture
def slime_groups(tmp_path: Path) -> list[list[Sample]]:
    """Two groups that a reward function written for slime has scored and edited."""
    samples = make_samples(["a", "aa"], ["aaa", "a"])
    groups = [samples[:2], samples[2:]]
    assign_rewards(groups, build_reward(custom_reward(tmp_path, SLIME_REWARD)))
    return groups


def test_a_function_of_slime_reads_its_sample(slime_groups):
    # the function itself asserts the fields that it reads
    assert [sample.reward for sample in flat(slime_groups)] == [0.0, 0.0, 1.0, 1.0]


def test_a_function_of_slime_removes_samples(slime_groups):
    removed = [sample.remove_sample for sample in flat(slime_groups)]
    assert removed == [False, True, False, False]


def test_a_function_of_slime_masks_tokens(slime_groups):
    mask_removed_samples(slime_groups)
    assert [sample.loss_mask for sample in flat(slime_groups)] == [[1], [0], [0], [1]]


def test_a_function_of_slime_writes_metadata(slime_groups):
    lengths = [sample.metadata["length"] for sample in flat(slime_groups)]
    assert lengths == [1, 2, 3, 1]


def test_metadata_of_a_sample_is_not_written_to_its_row(slime_groups):
    sample = slime_groups[0][0]
    assert sample.metadata["group"] == 0
    assert "length" not in sample.row.metadata


def test_samples_edited_by_a_function_of_slime_are_saved(slime_groups):
    mask_removed_samples(slime_groups)
    assert reloaded(slime_groups) == slime_groups


def make_labeled_prompt(**fields: Any) -> Prompt:
    return Prompt(index=3, text="?", token_ids=(1,), **{"label": "1", **fields})


def test_a_prompt_with_a_label_is_accepted():
    check_prompts(make_config(rm_type="math"), [make_labeled_prompt()])


def test_a_random_reward_needs_no_label():
    check_prompts(make_config(rm_type="random"), [make_labeled_prompt(label=None)])


WRONG_PROMPTS: dict[str, tuple[dict[str, Any], str]] = {
    "no label": ({"label": None}, "prompt 3 has no label"),
    "unknown reward": (
        {"metadata": {"rm_type": "mathh"}},
        "the rm_type in the metadata of prompt 3 is 'mathh'",
    ),
    "a number as reward": ({"metadata": {"rm_type": 7}}, "not text: 7"),
}


@pytest.mark.parametrize(("fields", "message"), WRONG_PROMPTS.values(), ids=WRONG_PROMPTS)
def test_prompts_are_checked_before_sampling(fields, message):
    with pytest.raises(ValueError, match=message):
        check_prompts(make_config(rm_type="math"), [make_labeled_prompt(**fields)])


class Scorer(FakeSGLang):
    """A reward server."""

    respond: Callable[[dict[str, Any]], Any]

    async def _control(self, path: str, body: dict[str, Any]) -> Any:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        answer = self.respond(body)
        answer = await answer if isawaitable(answer) else answer
        self.at_once -= 1
        return answer


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[dict[str, Any]], Any]], Scorer]]:
    """Sets the response of a running reward server, and returns the server."""
    with servers_of(Scorer, 1) as (server,):

        def start(respond: Callable[[dict[str, Any]], Any]) -> Scorer:
            server.respond = respond
            return server

        yield start


def make_client(url: str, **options: Any) -> RewardServer:
    options = {"rm_timeout": 10.0, "rm_max_retries": 2, "rm_concurrency": 8, **options}
    config = make_config(rm_type="remote_rm", rm_url=url, **options)
    return RewardServer(url=url, config=config, backoff=0.001)


REQUEST = {"prompt": "?", "response": "a", "label": ""}


def test_the_number_of_the_server_is_the_reward(serve):
    server = serve(lambda body: (200, len(body["response"])))
    reward = build_reward(make_config(rm_type="remote_rm", rm_url=server.url))
    assert reward(make_samples(["a", "aa"], ["aaa"])) == [1.0, 2.0, 3.0]


def test_the_server_gets_prompt_response_label(serve):
    server = serve(lambda body: (200, len(body["response"])))
    build_reward(make_config(rm_type="remote_rm", rm_url=server.url))(
        make_samples(["a", "aa"], ["aaa"])
    )
    requests = sorted(server.bodies("/"), key=str)
    assert requests == [
        {"prompt": "?", "response": "a", "label": "12"},
        {"prompt": "?", "response": "aa", "label": "12"},
        {"prompt": "?", "response": "aaa", "label": "12"},
    ]


def test_a_reward_server_scores_no_samples(serve):
    server = serve(lambda body: (200, len(body["response"])))
    assert build_reward(make_config(rm_type="remote_rm", rm_url=server.url))([]) == []


def test_an_object_of_the_server_is_weighted(serve):
    server = serve(lambda body: (200, '{"correct": 1, "format": 0.5}'))
    config = make_config(
        rm_type="remote_rm", rm_url=server.url, reward_weights="correct=1,format=0.2"
    )
    samples = make_samples(["a"])
    assert build_reward(config)(samples) == [1.1]
    assert samples[0].reward_parts == {"correct": 1.0, "format": 0.5}


def test_a_row_may_choose_the_reward_server(serve):
    server = serve(lambda body: (200, "0.5"))
    config = make_config(rm_type="exact_match", rm_url=server.url)
    samples = make_samples(["12"], [r"\boxed{7}"], ["13"])
    samples[1].metadata["rm_type"] = "boxed_remote_rm"
    assert build_reward(config)(samples) == [1.0, 0.5, 0.0]
    assert [request["response"] for request in server.bodies("/")] == ["7"]


def test_a_row_with_the_reward_server_needs_its_url():
    prompts = [sample.row for sample in make_samples(["12"], ["7"], ["13"])]
    prompts[1].metadata["rm_type"] = "remote_rm"
    message = "prompt 11 has the rm_type remote_rm in its metadata; add --rm-url"
    with pytest.raises(ValueError, match=message):
        check_prompts(make_config(rm_type="exact_match"), prompts)


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
    assert make_client(server.url).ask([REQUEST]) == [2]
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
        make_client(server.url).ask([REQUEST])
    assert str(stopped.value).startswith(f"the reward server {server.url} (--rm-url) {message}")


@pytest.mark.parametrize("content", ["NaN", "null", '"1"', "[1]", "1e999"])
def test_a_reward_that_is_no_number_is_one_message(serve, content):
    server = serve(lambda body: (200, content))
    with pytest.raises(CustomFunctionError) as refusal:
        build_reward(make_config(rm_type="remote_rm", rm_url=server.url))(make_samples(["a"]))
    assert str(refusal.value).startswith(f"the reward server {server.url} returned ")
    assert " for prompt 10; return a number" in str(refusal.value)


def test_a_missing_server_is_given_up():
    url = f"http://127.0.0.1:{free_port()}/"
    with pytest.raises(RolloutUnavailable) as error:
        make_client(url).ask([REQUEST] * 20)
    message = f"the reward server {url} (--rm-url) failed 3 times in a row, the last time "
    assert str(error.value).startswith(message)
    assert "ConnectError" in str(error.value)


def test_a_server_that_never_answers_is_given_up(serve):
    server = serve(lambda body: asyncio.sleep(60))
    client = make_client(server.url, rm_timeout=0.1, rm_max_retries=1)
    message = r"failed 2 times in a row, the last time with no answer within 0\.1 s"
    with pytest.raises(RolloutUnavailable, match=message):
        client.ask([REQUEST])


def test_requests_under_way_are_bounded(serve):
    two_requests = asyncio.Barrier(2)

    async def answer(body):
        await two_requests.wait()
        return 200, "1"

    server = serve(answer)
    assert make_client(server.url, rm_concurrency=2).ask([REQUEST] * 6) == [1] * 6
    assert server.most_at_once == 2


def test_a_signal_ends_the_wait(serve):
    server = serve(lambda body: asyncio.sleep(60))

    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_client(server.url).ask([REQUEST], stop)
