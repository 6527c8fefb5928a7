"""Requests and generate functions held to their contract; which tokens of a sample are the tokens that were sampled."""

import asyncio
import math
from argparse import Namespace
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_tis.errors import CustomFunctionError
from slime_tis.hf_directory import ModelSizes
from slime_tis.policy.advantages import MAX_REWARD
from slime_tis.trainer.agents.custom_generate import build_generate_function, mark_failed_samples
from slime_tis.trainer.agents.sampled_tokens import Sampled, copy_engine_records, provenance
from slime_tis.trainer.configs.rollout import RolloutConfig
from slime_tis.trainer.data.sample import Prompt, Sample, Sampling, SamplingMask, by_rollout
from slime_tis.trainer.engines.function_requests import (
    Generation,
    RequestOptions,
    SampleEngine,
    SampleKey,
    StopStrings,
    request_options,
    request_uniforms,
    response_text,
)
from slime_tis.trainer.rollout.rollout_metrics import rollout_metrics
from tests.checkpoints import CHARACTERS, make_tokenizer

PROMPT = Prompt(index=3, text="abc", token_ids=(1, 2, 3), label="x", metadata={"level": 1})
SAMPLING = Sampling(max_response_len=4)


class Letters:
    """A tokenizer: token n is the n-th letter, and "bc" is one token, 27, where a text is tokenized."""

    def decode(self, ids, **_):
        return "".join("bc" if token == 27 else chr(96 + token) for token in ids)

    def encode(self, text):
        ids, place = [], 0
        while place < len(text):
            pair = text[place : place + 2] == "bc"
            ids.append(27 if pair else ord(text[place]) - 96)
            place += 1 + pair
        return ids


class Engine:
    """Samples 2, 3, 4 and 5 after every input, with log-probs that follow from the length of the input."""

    def __init__(self, finish_reason="length", version=7):
        self.finish_reason, self.version = finish_reason, version

    async def generate(self, token_ids, sampling_params=None, *, session_id=None):
        count = (sampling_params or {}).get("max_new_tokens", 4)
        ids = [2, 3, 4, 5][:count]
        await asyncio.sleep(0)
        return Generation(
            token_ids=ids,
            log_probs=[-float(len(token_ids)) - place / 8 for place in range(count)],
            weight_versions=[self.version] * count,
            finish_reason=self.finish_reason,
            text=Letters().decode(ids),
            sampling_mask=SamplingMask.from_sets([[token, 9] for token in ids]),
            routed_experts=torch.arange(len(token_ids) + count - 1)[:, None, None]
            + 100 * len(token_ids),
        )


IMPORTS = (
    "import asyncio\nfrom slime.utils.types import Sample\nfrom slime.utils.http_utils import"
    " post\n"
)
TURN = """
    out = await engine.generate(sample.tokens, {"max_new_tokens": 2})
    sample.append_response_tokens(args, tokens=out.token_ids, log_probs=out.log_probs, text=out.text)
"""


def call(tmp_path, body, engine=None, sample=None, **options):
    """What a function with this body gives; the lines of the body begin in line 5 of FILE."""
    path = tmp_path / f"agent_{len(list(tmp_path.iterdir()))}.py"
    path.write_text(
        f"{IMPORTS}async def generate(args, sample, sampling_params, engine):\n{body}\n"
    )
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
    sample = sample or Sample(prompt_row=PROMPT, tokens=list(PROMPT.token_ids))
    return asyncio.run(function.bind(SAMPLING)(sample, engine or Engine()))


def test_turns_come_with_what_the_engine_recorded(tmp_path):
    observation = (
        "    sample.append_response_tokens(args, tokens=[26], trainable=False, text='z')\n"
    )
    (sample,) = call(tmp_path, f"{TURN}{observation}{TURN}    return sample")
    assert sample.tokens == [1, 2, 3, 2, 3, 26, 2, 3] and sample.loss_mask == [1, 1, 0, 1, 1]
    assert sample.rollout_log_probs == [-3.0, -3.125, 0.0, -6.0, -6.125]
    assert sample.weight_versions == [7] * 5 and sample.status is Sample.Status.TRUNCATED
    assert sample.sampling_mask == SamplingMask.from_sets([[2, 9], [3, 9], [], [2, 9], [3, 9]])
    assert sample.response == "bczbc" and sample.metadata == {"level": 1} and sample.row is PROMPT
    assert sample.retokenized == 0 and sample.failure is None
    experts = (
        sample.rollout_routed_experts
    )  # of tokens that a token was sampled after, of the request that did so
    assert experts is not None and experts.flatten().tolist() == [600, 601, 302, 303, 604, 605, 606]
    body = """
    out = await engine.generate([8, 9], sampling_params)
    return Sample(tokens=[8, 9, *out.token_ids, 4], response_length=5, loss_mask=[1, 1, 1, 1, 0], reward=0.5)"""
    (sample,) = call(tmp_path, body)
    assert (
        sample.rollout_log_probs[:4] == [-2.0, -2.125, -2.25, -2.375]
        and sample.weight_versions == [7] * 5
    )
    assert (
        sample.prompt_ids == [8, 9]
        and sample.prompt == "abc"
        and (sample.reward, sample.label) == (0.5, "x")
    )


RETOKENIZED = """
    out = await engine.generate(sample.tokens, {"max_new_tokens": 3})
    again = [27, 4]  # "bcd" tokenized again
    length = len(again)
    sample.append_response_tokens(args, tokens=again, log_probs=out.log_probs[:2], text=out.text)
    out = await engine.generate(sample.tokens, {"max_new_tokens": 2})
    sample.append_response_tokens(args, tokens=out.token_ids, log_probs=out.log_probs, text=out.text)
    return sample"""


def test_a_sample_of_tokens_that_were_tokenized_again_is_rejected_or_trained_on_in_part(tmp_path):
    (sample,) = call(tmp_path, RETOKENIZED)
    assert sample.retokenized == 2 and sample.remove_sample and sample.tokens[3:] == [27, 4, 2, 3]
    (sample,) = call(tmp_path, RETOKENIZED, retokenization="keep-mask")
    assert sample.loss_mask == [0, 0, 1, 1] and sample.retokenized == 2 and not sample.remove_sample
    assert sample.rollout_log_probs[2:] == [-5.0, -5.125]


def test_slimes_way_to_the_server_is_answered_by_the_same_engine_and_proved(tmp_path):
    body = """
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    text = sample.prompt
    sample.tokens = [1, 2, 3]
    for _ in range(2):
        out = await post(url, {"PAYLOAD", "sampling_params": {"max_new_tokens": 2}, "return_logprob": True})
        pairs = out["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            args, tokens=[pair[1] for pair in pairs], log_probs=[pair[0] for pair in pairs],
            meta_info=out["meta_info"], text=out["text"])
        text += out["text"]
    return sample"""
    (by_ids,) = call(tmp_path, body.replace('"PAYLOAD"', '"input_ids": sample.tokens'))
    assert by_ids.rollout_log_probs == [-3.0, -3.125, -5.0, -5.125] and by_ids.retokenized == 0
    (by_text,) = call(
        tmp_path, body.replace('"PAYLOAD"', '"text": text'), retokenization="keep-mask"
    )
    assert (
        by_text.retokenized == 4
    )  # "abc" is tokenized as a, bc: the tokens followed another input


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
def test_a_broken_contract_costs_one_sample_and_is_named(body, reason, message, tmp_path):
    (sample,) = call(tmp_path, f"    {body.strip()}")
    found = sample.metadata["generate_error"].replace(str(tmp_path / "agent_0.py"), "FILE")
    assert sample.failure == reason and message in found
    assert sample.tokens == [1, 2, 3, 3] and sample.loss_mask == [0] and sample.reward == 0.0
    assert sample.status is Sample.Status.FAILED and sample.weight_versions == [5]


@pytest.mark.parametrize(
    ("reward", "failure"),
    [
        (MAX_REWARD, None),
        (-MAX_REWARD, None),
        (2 * MAX_REWARD, "reward"),
        (math.inf, "reward"),
        (math.nan, "reward"),
    ],
    ids=str,
)
def test_rewards_are_limited(reward, failure, tmp_path):
    (sample,) = call(
        tmp_path, f"    return Sample(tokens=[1, 2], response_length=1, reward=float('{reward}'))"
    )
    assert sample.failure == failure
    assert sample.reward == (0.0 if failure else reward)


def test_an_aborted_sample_goes_on_and_several_segments_begin_anew(tmp_path):
    (first,) = call(tmp_path, f"{TURN}    return sample", Engine("abort"))
    assert first.status is Sample.Status.ABORTED and first.loss_mask == [1, 1]
    (whole,) = call(tmp_path, f"{TURN}    return sample", Engine(version=8), sample=first)
    assert (
        whole.tokens == [1, 2, 3, 2, 3, 2, 3]
        and whole.weight_versions == [7, 7, 8, 8]
        and whole.retokenized == 0
    )
    assert (
        whole.rollout_log_probs == [-3.0, -3.125, -5.0, -5.125]
        and whole.status is Sample.Status.TRUNCATED
    )
    (sample,) = call(tmp_path, f"{TURN}    return [sample, sample]", Engine("abort"))
    assert (sample.status, sample.tokens, sample.response_length) == (
        Sample.Status.ABORTED,
        [1, 2, 3],
        0,
    )


def test_failures_are_counted_by_reason_and_end_the_run_where_there_is_nothing_else(tmp_path):
    (good,) = call(tmp_path, f"{TURN}    return sample")
    (bad,) = call(tmp_path, "    raise ValueError('no tool')")
    good.rollout_id, bad.rollout_id, good.reward = 0, 1, 1.0
    message = mark_failed_samples([[good, bad]])
    assert message is not None and message.startswith(
        "1 of 2 samples could not be made and train nothing: generate"
    )
    metrics = rollout_metrics([[good, bad]], 7)
    assert (
        metrics["rollout/generate_failed"] == 0.5
        and metrics["rollout/generate_failed/raised"] == 1.0
    )
    assert metrics["rollout/response_len"] == 2.0  # of the sample that was made
    with pytest.raises(
        CustomFunctionError,
        match=r"none of the 1 samples of a rollout could be made: generate .* raised",
    ):
        mark_failed_samples([[bad]])
    assert mark_failed_samples([[good]]) is None
    aborted = Sample(
        prompt_row=PROMPT,
        tokens=[1, 2, 3],
        status=Sample.Status.ABORTED,
        loss_mask=[],
        rollout_log_probs=[],
    )
    message = mark_failed_samples(
        [[aborted, Sample(prompt_row=PROMPT, tokens=[1, 2], response_length=1)]]
    )
    assert aborted.failure == "aborted" and aborted.tokens == [1, 2, 3, 3] and message is not None


def test_segments_count_as_one_rollout_in_the_metrics(tmp_path):
    segments = call(
        tmp_path,
        f"{TURN}    other = Sample(tokens=[5, *out.token_ids], response_length=2, loss_mask=[0,"
        " 0])\n    return [sample, other]",
    )
    for segment, reward in zip(segments, (0.25, 0.5), strict=True):
        segment.rollout_id, segment.reward = 4, reward
    assert by_rollout(segments) == [segments]
    metrics = rollout_metrics([segments], 7)
    assert metrics["rollout/raw_reward"] == 0.75 and metrics["rollout/response_len"] == 2.0
    assert metrics["rollout/turns"] == 1.0 and metrics["rollout/observation_len"] == 2.0


def requests(*pairs):
    asked = []
    for number, (ids, out) in enumerate(pairs):
        ones = [1] * len(out)
        values = {
            "log_probs": [-1.0 * one for one in ones],
            "weight_versions": ones,
            "workers": [number for _ in out],
        }
        generation = Generation(token_ids=out, finish_reason="stop", text="", **values)
        asked.append(Sampled(input_ids=ids, generation=generation))
    return asked


def with_experts(request, rows):
    """The request with one expert per input token and layer."""
    experts = torch.tensor(rows)[:, None, None]
    return replace(request, generation=replace(request.generation, routed_experts=experts))


WHERE_TOKENS_WERE = {
    "another end": ([1, 2, 3, 4], 2, [([1, 2], [3, 9])], [0, -1]),
    "another input": ([1, 2, 3, 4], 2, [([1, 9], [3, 4])], [-1, -1]),
    "two turns": ([1, 2, 3, 8, 4], 3, [([1, 2], [3]), ([1, 2, 3, 8], [4])], [0, -1, 1]),
    "another observation": ([1, 2, 3, 8, 4], 3, [([1, 2], [3]), ([1, 2, 3, 7], [4])], [0, -1, -1]),
    "asked twice": ([1, 2, 3, 4], 2, [([1, 2], [3, 5]), ([1, 2], [3, 4])], [1, 1]),
    "longer than": ([1, 2, 3], 1, [([1], [2, 3])], [0]),
}


@pytest.mark.parametrize(
    ("tokens", "length", "pairs", "request_of_each"),
    WHERE_TOKENS_WERE.values(),
    ids=WHERE_TOKENS_WERE,
)
def test_where_tokens_were_sampled(tokens, length, pairs, request_of_each):
    assert provenance(tokens, length, requests(*pairs)).request == request_of_each


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=5),
    st.integers(0, 100),
)
def test_every_sampled_token_is_found_and_none_after_a_change(turns, place):
    tokens, pairs, mask = [7], [], []
    for number, turn in enumerate(turns):
        pairs.append((list(tokens), turn))
        tokens, mask = [*tokens, *turn, 8 + number], [*mask, *[1] * len(turn), 0]
    found = provenance(tokens, len(mask), requests(*pairs))
    assert [number >= 0 for number in found.request] == [bool(trained) for trained in mask]
    place %= len(mask)
    tokens[1 + place] += 100
    changed = provenance(tokens, len(mask), requests(*pairs)).request
    assert changed[:place] == found.request[:place] and set(changed[place:]) == {-1}


@pytest.mark.parametrize(
    ("earlier", "expected"),
    [(None, [20, 21, 22, 23]), ([10], [20, 21, 22, 23]), ([10, 11], [20, 11, 22, 23])],
    ids=["not recorded", "cut short", "complete"],
)
def test_experts_are_those_of_the_request_that_sampled(earlier, expected):
    sample = Sample(tokens=[1, 2, 3, 8, 4], response_length=3, rollout_log_probs=[-1.0, 0.0, -1.0])
    first, second = requests(([1, 2], [3]), ([1, 2, 3, 8], [4]))
    if earlier is not None:
        first = with_experts(first, earlier)
    asked = [first, with_experts(second, [20, 21, 22, 23])]
    copy_engine_records(sample, provenance(sample.tokens, 3, asked), asked)
    assert sample.rollout_routed_experts is not None
    assert sample.rollout_routed_experts.flatten().tolist() == expected


def test_tokens_keep_their_server_and_nothing_is_known_of_others(tmp_path):
    sample = Sample(tokens=[1, 2, 3, 8, 4], response_length=3, rollout_log_probs=[-1.0, 0.0, -1.0])
    assert sample.worker_of_each == [-1, -1, -1]
    asked = requests(([1, 2], [3]), ([1, 2, 3, 8], [4]))
    copy_engine_records(sample, provenance(sample.tokens, 3, asked), asked)
    assert sample.worker_of_each == [
        0,
        0,
        1,
    ]  # an observation has the server of the token before it
    (sample,) = call(tmp_path, "    return Sample(tokens=[1, 2, 3], response_length=2)")
    assert all(
        math.isnan(value) for value in sample.rollout_log_probs
    ) and sample.weight_versions == [5, 5]
    assert sample.response == "bc" and sample.retokenized == 0


RUN = Sampling(temperature=0.8, top_p=0.9, top_k=20, max_response_len=7, stop_token_ids=(9,))
KEY = SampleKey(seed=3, prompt_index=5, occurrence=0, sample=1)


def token_ids(text):
    return make_tokenizer()(text, add_special_tokens=False)["input_ids"]


def test_a_request_asks_under_sglangs_names_or_gets_the_runs_values():
    asked = {
        "temperature": 1,
        "top_p": 0.5,
        "top_k": -1,
        "max_new_tokens": 30,
        "stop": ["</a>", "b", "</a>"],
        "stop_token_ids": [4, 5],
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    assert request_options(asked, RUN) == RequestOptions(
        sampling=Sampling(
            temperature=1.0, top_p=0.5, top_k=-1, max_response_len=30, stop_token_ids=(4, 5)
        ),
        stop=("</a>", "b"),
        skip_special_tokens=False,
        no_stop_trim=True,
        spaces_between_special_tokens=False,
    )
    assert request_options({"stop": "end"}, RUN).stop == ("end",)
    assert (
        request_options(None, RUN)
        == request_options({"stop": None}, RUN)
        == RequestOptions(sampling=RUN)
    )


WRONG_PARAMS = {
    "unknown": ({"min_p": 0.1}, "min_p"),
    "negative": ({"temperature": -1}, "temperature -1: Input should be greater than or equal to 0"),
    "no top-p": ({"top_p": 0}, "top_p 0"),
    "no top-k": ({"top_k": 0}, "top_k 0"),
    "no tokens": ({"max_new_tokens": 0}, "max_new_tokens 0"),
    "empty stop": ({"stop": [""]}, "stop"),
}


@pytest.mark.parametrize(("params", "message"), WRONG_PARAMS.values(), ids=WRONG_PARAMS)
def test_impossible_parameters_are_refused(params, message):
    with pytest.raises(ValueError, match=message):
        request_options(params, RUN)


def asked(calls, key=KEY, **options):
    requests = []

    async def answer(request):
        requests.append(request)
        return Generation(
            token_ids=[], log_probs=[], weight_versions=[], finish_reason="stop", text=""
        )

    async def ask():
        engine = SampleEngine(answer, RUN, key, number=8, vocab_size=64, **options)
        for ids in calls:
            await engine.generate(ids, session_id="s")

    asyncio.run(ask())
    return requests


def test_random_numbers_follow_from_the_sample_its_input_and_repetitions_alone():
    first, again, other = asked([[1, 2], [1, 2], [1, 3]])
    assert (first.token_ids, first.session) == ([1, 2], (8, "s"))
    assert len({first.key, again.key, other.key}) == 3
    assert [request.key for request in asked([[1, 3], [1, 2], [1, 2]])] == [
        other.key,
        first.key,
        again.key,
    ]
    for field in ("seed", "prompt_index", "occurrence", "sample"):
        changed = KEY._replace(**{field: 77})
        assert asked([[1, 2]], changed)[0].key != first.key
    uniforms, again = request_uniforms(bytes(range(16))), request_uniforms(bytes(range(16)))
    many = [next(uniforms) for _ in range(1000)]
    assert many[:2] == pytest.approx([0.7761366048984066, 0.9612052412461628], abs=1e-15)
    assert many == [next(again) for _ in range(1000)]
    assert len(set(many)) == 1000 and min(many) >= 0 and max(many) < 1


def test_impossible_tokens_and_other_distributions_than_the_trained_one_are_refused():
    for ids, message in (([], "is empty"), ([1, 64], "has 64"), ([-1, 5], "has -1")):
        with pytest.raises(ValueError, match=f"token_ids {message}"):
            asked([ids])
    training = Sampling(temperature=0.8, max_response_len=7, for_training=True)
    assert (
        request_options({"temperature": 0.8, "top_p": 1, "top_k": -1}, training).sampling
        == training
    )
    with pytest.raises(ValueError, match="temperature 0, but the run samples with"):
        request_options({"temperature": 0}, training)


@given(
    st.text(CHARACTERS, min_size=1, max_size=12),
    st.lists(st.text(CHARACTERS, min_size=1, max_size=3), max_size=3),
)
def test_a_stop_string_is_found_at_the_token_that_completes_it(text, stop):
    ids = token_ids(text)
    ends = [text.find(one) + len(one) for one in stop if one in text]
    assert StopStrings(make_tokenizer(), stop).first(ids) == (min(ends) if ends else None)


def test_stop_strings_of_several_bytes_a_character_are_found():
    """Byte-level tokens: each character below is several tokens, none of which is text by itself."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {byte: index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    ids = fast("日本€語€")["input_ids"]
    assert StopStrings(fast, ["本€"]).first(ids) == 9
    assert StopStrings(fast, ["語"]).first(ids) == 12
    assert StopStrings(fast, ["x"]).first(ids) is None


TEXT_ENDS_BEFORE = {
    "length": ({}, "length", "ab>:c"),
    "stop string": ({"stop": (">:",)}, "stop", "ab"),
    "untrimmed": ({"stop": (">:",), "no_stop_trim": True}, "stop", "ab>:c"),
    "stop token": ({}, "stop", "ab>:"),
}


@pytest.mark.parametrize(
    ("options", "reason", "text"), TEXT_ENDS_BEFORE.values(), ids=TEXT_ENDS_BEFORE
)
def test_text_ends_before_the_stop(options, reason, text):
    options = RequestOptions(sampling=RUN, **options)
    assert response_text(make_tokenizer(), token_ids("ab>:c"), options, reason) == text
