"""Generate functions of users, held to their contract."""

import asyncio
import math
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_tis.errors import CustomFunctionError
from slime_tis.hf_directory import ModelSizes
from slime_tis.policy.advantages import MAX_REWARD
from slime_tis.trainer.agents.custom_generate import build_generate_function, mark_failed_samples
from slime_tis.trainer.configs.rollout import RolloutConfig
from slime_tis.trainer.data.sample import Prompt, Sample, Sampling, SamplingMask, by_rollout
from slime_tis.trainer.engines.function_requests import Generation
from slime_tis.trainer.rollout.rollout_metrics import rollout_metrics

PROMPT = Prompt(index=3, text="abc", token_ids=(1, 2, 3), label="x", metadata={"level": 1})
SAMPLING = Sampling(max_response_len=4)


class Letters:
    """A tokenizer: token n is the n-th letter, and "bc" in a text is one token, 27."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join("bc" if token == 27 else chr(96 + token) for token in ids)

    def encode(self, text: str) -> list[int]:
        ids = []
        rest = text
        while rest:
            if rest.startswith("bc"):
                ids.append(27)
                rest = rest[2:]
            else:
                ids.append(ord(rest[0]) - 96)
                rest = rest[1:]
        return ids


class Engine:
    """Samples 2, 3, 4 and 5 after every input; log-probs follow from the length of the input."""

    def __init__(self, finish_reason: Any = "length", version: int = 7) -> None:
        self.finish_reason = finish_reason
        self.version = version

    async def generate(
        self,
        token_ids: list[int],
        sampling_params: dict[str, Any] | None = None,
        *,
        session_id: str | None = None,
    ) -> Generation:
        count = (sampling_params or {}).get("max_new_tokens", 4)
        ids = [2, 3, 4, 5][:count]
        inputs = torch.arange(len(token_ids) + count - 1)
        await asyncio.sleep(0)
        return Generation(
            token_ids=ids,
            log_probs=[-float(len(token_ids)) - place / 8 for place in range(count)],
            weight_versions=[self.version] * count,
            finish_reason=self.finish_reason,
            text=Letters().decode(ids),
            sampling_mask=SamplingMask.from_sets([[token, 9] for token in ids]),
            routed_experts=inputs[:, None, None] + 100 * len(token_ids),
        )


IMPORTS = """
import asyncio
from slime.utils.types import Sample
from slime.utils.http_utils import post
async def generate(args, sample, sampling_params, engine):
"""
TURN = """
    out = await engine.generate(sample.tokens, {"max_new_tokens": 2})
    sample.append_response_tokens(
        args, tokens=out.token_ids, log_probs=out.log_probs, text=out.text
    )
"""
Call = Callable[..., list[Sample]]


@pytest.fixture
def call(tmp_path: Path) -> Call:
    """Writes a function with a body, which begins in line 5 of a file, and calls it."""

    def run(
        body: str, engine: Engine | None = None, sample: Sample | None = None, **options: Any
    ) -> list[Sample]:
        # a file is loaded once, so another function needs another file
        path = tmp_path / f"agent_{len(list(tmp_path.iterdir()))}.py"
        path.write_text(f"{IMPORTS.lstrip()}{body}\n")
        config = RolloutConfig(
            prompt_data="p",
            rollout_batch_size=2,
            rollout_max_response_len=4,
            custom_generate_function_path=f"{path}:generate",
            rollout_max_context_len=40,
            **options,
        )
        function = build_generate_function(
            config,
            Namespace(reward_key=None),
            Letters(),
            sizes=ModelSizes(vocab_size=28, context_len=None),
            version=lambda: 5,
            address=("127.0.0.1", 0),
        )
        assert function is not None
        first = sample or Sample(prompt_row=PROMPT, tokens=list(PROMPT.token_ids))
        bound: Callable[..., Any] = function.bind(SAMPLING)
        return asyncio.run(bound(first, engine or Engine()))

    return run


@pytest.fixture
def two_turns(call: Call) -> Sample:
    """Two turns of two tokens, with the observation "z" between them."""
    observation = "    sample.append_response_tokens(args, tokens=[26], trainable=False, text='z')"
    (sample,) = call(f"{TURN}{observation}\n{TURN}    return sample")
    return sample


def test_turns_follow_each_other(two_turns):
    assert two_turns.tokens == [1, 2, 3, 2, 3, 26, 2, 3]
    assert two_turns.response == "bczbc"
    assert two_turns.status is Sample.Status.TRUNCATED


def test_an_observation_is_not_trained(two_turns):
    assert two_turns.loss_mask == [1, 1, 0, 1, 1]


def test_turns_have_the_log_probs_of_the_engine(two_turns):
    assert two_turns.rollout_log_probs == [-3.0, -3.125, 0.0, -6.0, -6.125]
    assert two_turns.weight_versions == [7] * 5


def test_turns_have_the_sampling_sets_of_the_engine(two_turns):
    sets = [[2, 9], [3, 9], [], [2, 9], [3, 9]]
    assert two_turns.sampling_mask == SamplingMask.from_sets(sets)


def test_turns_have_the_experts_of_their_requests(two_turns):
    # for every token that a token was sampled after, from the request that sampled
    experts = two_turns.rollout_routed_experts
    assert experts.flatten().tolist() == [600, 601, 302, 303, 604, 605, 606]


def test_turns_keep_the_prompt(two_turns):
    assert two_turns.metadata == {"level": 1}
    assert two_turns.row is PROMPT


def test_turns_of_sampled_tokens_are_accepted(two_turns):
    assert two_turns.retokenized == 0
    assert two_turns.failure is None


@pytest.fixture
def new_sample(call: Call) -> Sample:
    """A new sample with its own prompt, and a last token that is not trained."""
    (sample,) = call("""
    out = await engine.generate([8, 9], sampling_params)
    return Sample(
        tokens=[8, 9, *out.token_ids, 4],
        response_length=5,
        loss_mask=[1, 1, 1, 1, 0],
        reward=0.5,
    )""")
    return sample


def test_a_new_sample_gets_the_records_of_the_engine(new_sample):
    assert new_sample.rollout_log_probs[:4] == [-2.0, -2.125, -2.25, -2.375]
    assert new_sample.weight_versions == [7] * 5


def test_a_new_sample_keeps_its_tokens(new_sample):
    assert new_sample.prompt_ids == [8, 9]
    assert new_sample.reward == 0.5


def test_a_new_sample_gets_text_and_label_of_the_prompt(new_sample):
    assert new_sample.prompt == "abc"
    assert new_sample.label == "x"


RETOKENIZED = """
    out = await engine.generate(sample.tokens, {"max_new_tokens": 3})
    again = [27, 4]  # "bcd" tokenized again
    length = len(again)
    sample.append_response_tokens(args, tokens=again, log_probs=out.log_probs[:2], text=out.text)
    out = await engine.generate(sample.tokens, {"max_new_tokens": 2})
    sample.append_response_tokens(args, tokens=out.token_ids, log_probs=out.log_probs)
    return sample"""


def test_a_retokenized_sample_is_rejected(call):
    (sample,) = call(RETOKENIZED)
    assert sample.retokenized == 2
    assert sample.remove_sample
    assert sample.tokens[3:] == [27, 4, 2, 3]


def test_keep_mask_trains_the_sampled_tokens(call):
    (sample,) = call(RETOKENIZED, retokenization="keep-mask")
    assert sample.retokenized == 2
    assert not sample.remove_sample
    assert sample.loss_mask == [0, 0, 1, 1]
    assert sample.rollout_log_probs[2:] == [-5.0, -5.125]


SLIMES_REQUESTS = """
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    text = sample.prompt
    sample.tokens = [1, 2, 3]
    for _ in range(2):
        payload = {"sampling_params": {"max_new_tokens": 2}, "return_logprob": True}
        payload |= {INPUT}
        out = await post(url, payload)
        pairs = out["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            args,
            tokens=[pair[1] for pair in pairs],
            log_probs=[pair[0] for pair in pairs],
            meta_info=out["meta_info"],
            text=out["text"],
        )
        text += out["text"]
    return sample"""


def test_a_request_to_slimes_router_is_answered_by_the_engine(call):
    (sample,) = call(SLIMES_REQUESTS.replace("INPUT", '"input_ids": sample.tokens'))
    assert sample.rollout_log_probs == [-3.0, -3.125, -5.0, -5.125]
    assert sample.retokenized == 0


def test_a_request_with_text_is_retokenized(call):
    body = SLIMES_REQUESTS.replace("INPUT", '"text": text')
    (sample,) = call(body, retokenization="keep-mask")
    # "abc" becomes the tokens a, bc: the sampled tokens followed another input
    assert sample.retokenized == 4


BROKEN = {
    # body, reason, part of the message
    "a short mask": (
        "return Sample(tokens=[1, 2, 3], response_length=2, loss_mask=[1])",
        "loss_mask",
        "gave a loss_mask of 1 entries for a response_length of 2",
    ),
    "raises": (
        "raise KeyError('tool')",
        "raised",
        "generate (FILE, line 5) raised KeyError: 'tool'.",
    ),
    "cancels itself": ("raise asyncio.CancelledError", "raised", "cancelled itself"),
    "nothing": (
        "pass",
        "returned",
        "generate (FILE, line 4) returned None; return a Sample or a list of them",
    ),
    "no response": ("return sample", "tokens", "a response_length of 0; give prompt and response"),
    "a response longer than the memory": (
        "return Sample(tokens=[1, 2], response_length=10**12)",
        "tokens",
        "gave 2 tokens with a response_length of 1000000000000",
    ),
    "a weight version of 64 bits": (
        "return Sample(tokens=[1, 2], response_length=1, weight_versions=[2**63])",
        "weight_versions",
        "a weight version is above 9223372036854775807",
    ),
    "a weight version in 5,000 digits": (
        "return Sample(tokens=[1, 2], response_length=1, weight_versions=['9' * 5000])",
        "weight_versions",
        "in weight_versions: ",
    ),
    "beyond the vocabulary": (
        "return Sample(tokens=[1, 28], response_length=1)",
        "tokens",
        "vocabulary ends at 27",
    ),
    "an impossible status": (
        f"{TURN}    sample.status = 'done'\n    return sample",
        "status",
        "gave 'done' in status",
    ),
    "a log-prob of NaN": (
        "return Sample(tokens=[1, 2], response_length=1, rollout_log_probs=[float('nan')])",
        "rollout_log_probs",
        "gave the log-prob nan for response token 0, which is trained on",
    ),
    "log-probs shifted by one": (
        (
            f"{TURN}    sample.rollout_log_probs = sample.rollout_log_probs[1:] + [-1.0]\n   "
            " return sample"
        ),
        "rollout_log_probs",
        "gave the log-prob -3.1250 for response token 0, which was sampled with -3.0000",
    ),
    "a log-prob that is off by a thousandth": (
        f"{TURN}    sample.rollout_log_probs[1] -= 0.001\n    return sample",
        "rollout_log_probs",
        "gave the log-prob -3.1260 for response token 1, which was sampled with -3.1250",
    ),
    "a megabyte of metadata": (
        f"{TURN}    sample.metadata['x'] = 'x' * (1 << 21)\n    return sample",
        "metadata",
        "more than 1048576 characters",
    ),
}


@pytest.mark.parametrize(("body", "reason", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_contract_names_its_reason(body, reason, message, call, tmp_path):
    (sample,) = call(f"    {body.strip()}")
    error = sample.metadata["generate_error"].replace(str(tmp_path / "agent_0.py"), "FILE")
    assert sample.failure == reason
    assert message in error


@pytest.mark.parametrize("body", [body for body, _, _ in BROKEN.values()], ids=list(BROKEN))
def test_a_broken_contract_leaves_a_sample_that_trains_nothing(body, call):
    (sample,) = call(f"    {body.strip()}")
    assert sample.status is Sample.Status.FAILED
    assert (sample.tokens, sample.weight_versions) == ([1, 2, 3, 3], [5])
    assert sample.loss_mask == [0]
    assert sample.reward == 0.0


HOSTILE = {
    # a statement about `mine`, reason, part of the message
    "an attribute that raises": (
        "Mine.label = property(lambda self: {}['x'])",
        "returned",
        "gave a sample that cannot be read: KeyError: 'x'",
    ),
    "an attribute that exits": (
        "Mine.status = property(lambda self: exit(0))",
        "returned",
        "gave a sample that cannot be read: SystemExit: 0",
    ),
    "metadata without a text": (
        "mine.metadata['x'] = type('X', (), {'__str__': lambda self: 1})()",
        "returned",
        "gave a sample that cannot be read: TypeError: __str__ returned non-string",
    ),
    "a status without a repr": (
        "mine.status = type('X', (), {'__repr__': lambda self: exit(0)})()",
        "returned",
        "gave a sample that cannot be read: SystemExit: 0",
    ),
    "sampling sets in a list": (
        "mine.sampling_mask = [[2], [3]]",
        "sampling_mask",
        "gave [[2], [3]] in sampling_mask: Input should be an instance of SamplingMask",
    ),
}


@pytest.mark.parametrize(("statement", "reason", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_sample_that_cannot_be_read_is_a_failure(statement, reason, message, call):
    (sample,) = call(f"""
    class Mine(Sample):
        pass
    mine = Mine(tokens=[1, 2, 3], response_length=2)
    {statement}
    return mine""")
    assert sample.failure == reason
    assert message in sample.metadata["generate_error"]


def test_a_defect_of_this_program_is_no_failure_of_the_sample(call):
    # the tokenizer of these tests has no `all_special_ids`, which built-in rewards need
    with pytest.raises(AttributeError, match="'Letters' object has no attribute"):
        call("    return Sample(tokens=[1, 2], response='b', response_length=1)", rm_type="math")


@pytest.mark.parametrize("reward", [MAX_REWARD, -MAX_REWARD], ids=str)
def test_a_reward_at_the_limit_is_accepted(reward, call):
    (sample,) = call(f"    return Sample(tokens=[1, 2], response_length=1, reward={reward})")
    assert sample.failure is None
    assert sample.reward == reward


@pytest.mark.parametrize("reward", [2 * MAX_REWARD, math.inf, math.nan], ids=str)
def test_a_reward_beyond_the_limit_is_a_failure(reward, call):
    body = f"    return Sample(tokens=[1, 2], response_length=1, reward=float('{reward}'))"
    (sample,) = call(body)
    assert sample.failure == "reward"
    assert sample.reward == 0.0


@pytest.fixture
def aborted(call: Call) -> Sample:
    """One turn that an update of weights interrupted."""
    (sample,) = call(f"{TURN}    return sample", Engine("abort"))
    return sample


def test_an_aborted_sample_keeps_its_tokens(aborted):
    assert aborted.status is Sample.Status.ABORTED
    assert aborted.loss_mask == [1, 1]


def test_an_aborted_sample_is_continued(aborted, call):
    (sample,) = call(f"{TURN}    return sample", Engine(version=8), sample=aborted)
    assert sample.tokens == [1, 2, 3, 2, 3, 2, 3]
    assert sample.weight_versions == [7, 7, 8, 8]
    assert sample.rollout_log_probs == [-3.0, -3.125, -5.0, -5.125]


def test_a_continued_sample_is_complete(aborted, call):
    (sample,) = call(f"{TURN}    return sample", Engine(version=8), sample=aborted)
    assert sample.status is Sample.Status.TRUNCATED
    assert sample.retokenized == 0


def test_several_aborted_segments_begin_anew(call):
    (sample,) = call(f"{TURN}    return [sample, sample]", Engine("abort"))
    assert sample.status is Sample.Status.ABORTED
    assert sample.tokens == [1, 2, 3]
    assert sample.response_length == 0


@pytest.fixture
def good(call: Call) -> Sample:
    """A sample of two tokens."""
    (sample,) = call(f"{TURN}    return sample")
    sample.rollout_id = 0
    sample.reward = 1.0
    return sample


@pytest.fixture
def bad(call: Call) -> Sample:
    """A sample whose function raised an exception."""
    (sample,) = call("    raise ValueError('no tool')")
    sample.rollout_id = 1
    return sample


def test_failed_samples_are_reported(good, bad):
    message = mark_failed_samples([[good, bad]])
    assert message.startswith("1 of 2 samples could not be made and train nothing: generate")


def test_failures_are_counted_by_reason(good, bad):
    mark_failed_samples([[good, bad]])
    metrics = rollout_metrics([[good, bad]], 7)
    assert metrics["rollout/generate_failed"] == 0.5
    assert metrics["rollout/generate_failed/raised"] == 1.0


def test_failed_samples_have_no_part_in_lengths(good, bad):
    mark_failed_samples([[good, bad]])
    assert rollout_metrics([[good, bad]], 7)["rollout/response_len"] == 2.0


def test_a_rollout_of_failed_samples_ends_the_run(bad):
    message = r"none of the 1 samples of a rollout could be made: generate .* raised"
    with pytest.raises(CustomFunctionError, match=message):
        mark_failed_samples([[bad]])


def test_good_samples_are_not_reported(good):
    assert mark_failed_samples([[good]]) is None


def test_an_aborted_sample_without_a_response_is_a_failure():
    aborted = Sample(
        prompt_row=PROMPT,
        tokens=[1, 2, 3],
        status=Sample.Status.ABORTED,
        loss_mask=[],
        rollout_log_probs=[],
    )
    other = Sample(prompt_row=PROMPT, tokens=[1, 2], response_length=1)
    assert mark_failed_samples([[aborted, other]]) is not None
    assert aborted.failure == "aborted"
    # a response of one token, which is masked
    assert aborted.tokens == [1, 2, 3, 3]


@pytest.fixture
def segments(call: Call) -> list[Sample]:
    """Two segments of one rollout; the second is not trained."""
    other = "Sample(tokens=[5, *out.token_ids], response_length=2, loss_mask=[0, 0])"
    segments = call(f"{TURN}    return [sample, {other}]")
    for segment, reward in zip(segments, (0.25, 0.5), strict=True):
        segment.rollout_id = 4
        segment.reward = reward
    return segments


def test_segments_belong_to_one_rollout(segments):
    assert by_rollout(segments) == [segments]


@pytest.mark.parametrize(
    ("metric", "value"),
    [("raw_reward", 0.75), ("response_len", 2.0), ("turns", 1.0), ("observation_len", 2.0)],
    ids=["raw_reward", "response_len", "turns", "observation_len"],
)
def test_segments_count_as_one_rollout_in_the_metrics(segments, metric, value):
    assert rollout_metrics([segments], 7)[f"rollout/{metric}"] == value


@pytest.fixture
def text_only(call: Call) -> Sample:
    """A sample that no engine has sampled."""
    (sample,) = call("    return Sample(tokens=[1, 2, 3], response_length=2)")
    return sample


def test_tokens_that_no_engine_sampled_have_no_log_prob(text_only):
    assert all(math.isnan(value) for value in text_only.rollout_log_probs)
    assert text_only.retokenized == 0


def test_tokens_that_no_engine_sampled_have_the_present_version(text_only):
    assert text_only.weight_versions == [5, 5]


def test_tokens_that_no_engine_sampled_are_decoded(text_only):
    assert text_only.response == "bc"
