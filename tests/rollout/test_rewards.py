"""Rewards: tables of scores, and the user's own functions held to their contract."""

import math
from argparse import Namespace

import pytest

from slime_tis.rollout.config import RolloutConfig
from slime_tis.rollout.rewards import build_reward, exact_match, math_match, token_f1
from slime_tis.rollout.sample import Prompt, Sample


def make_config(**options) -> RolloutConfig:
    return RolloutConfig(prompt_data="p", rollout_batch_size=2, rollout_max_response_len=4, **options)


def make_samples(*groups, label: str | None = "12") -> list[Sample]:
    """Samples of prompts 10, 11, … with the given responses."""
    return [
        Sample(
            prompt=Prompt(index=10 + group, text="?", token_ids=(1,), label=label, metadata={"group": group}),
            group_index=group,
            sample_index=0,
            response_ids=[3],
            response=response,
            rollout_log_probs=[-1.0],
            loss_mask=[1],
            weight_versions=[0],
            finish_reason="stop",
        )
        for group, responses in enumerate(groups)
        for response in responses
    ]


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [("0123", "0123", 1.0), (" 0123\n", "0123", 1.0), ("0132", "0123", 0.0), ("", "0123", 0.0)],
)
def test_exact_match(response, label, score):
    assert exact_match(response, label) == score


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        ("so 3 + 4 = 7 apples.", "7", 1.0),
        ("so 3 + 4 = 7 apples.", "6 + 1 = 7\n#### 7", 1.0),
        ("#### 1,234", "1234", 1.0),
        ("It costs $1,234.50.", "1234.5", 1.0),
        ("first 7, then 8", "7", 0.0),
        ("7 at first, then \\boxed{8} (not 9)", "8", 1.0),
        ("\\boxed{1} or \\boxed{2}", "\\boxed{2}", 1.0),
        ("\\boxed{\\frac{3}{4}}", "0.75", 1.0),
        ("\\boxed{\\dfrac{3}{4}}", "\\frac{6}{8}", 1.0),
        ("x = 3/4", "0.75", 1.0),
        ("-5", "5", 0.0),
        ("the answer is -5", "-5", 1.0),
        ("50\\%", "50", 1.0),
        (".5", "0.5", 1.0),
        ("0.30000000000000001", "0.3", 0.0),
        ("\\boxed{x^2 + 1}", "x^2+1", 1.0),
        ("\\boxed{x^2}", "x^3", 0.0),
        ("\\boxed{7", "7", 1.0),
        ("1/0", "0", 0.0),
        ("no number", "7", 0.0),
        ("", "7", 0.0),
        ("2+2", "4", 0.0),
        ("9" * 5000, "7", 0.0),
        ("1e999999999", "7", 0.0),
    ],
)
def test_math(response, label, score):
    assert math_match(response, label) == score


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        ("The cat sat.", "a cat sat", 1.0),
        ("cat", "the black cat", 2 / 3),
        ("cat cat dog", "cat dog dog", 2 / 3),
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
        ("the", "a", 1.0),
    ],
)
def test_f1(response, label, score):
    assert token_f1(response, label) == pytest.approx(score)


def test_a_reward_by_name_scores_every_sample():
    reward = build_reward(make_config(rm_type="exact_match"))
    assert reward(make_samples(["12", "21"], ["12", "12", ""])) == [1.0, 0.0, 1.0, 1.0, 0.0]
    assert reward([]) == []


def test_an_unknown_name_and_a_missing_label_are_refused():
    with pytest.raises(ValueError) as refusal:
        build_reward(make_config(rm_type="mathh"))
    assert str(refusal.value) == "--rm-type is 'mathh' but must be one of exact_match, math, f1."
    reward = build_reward(make_config(rm_type="math"))
    with pytest.raises(ValueError) as refusal:
        reward(make_samples(["1"], label=None))
    assert str(refusal.value) == "prompt 10 has no label, which --rm-type math needs; set --label-key."


CUSTOM = """
import asyncio

def plain(args, sample, **kwargs):
    return args.scale * len(sample.response)

async def slow(args, sample, **kwargs):
    await asyncio.sleep(0.05 / len(sample.response))
    return len(sample.response) + sample.metadata["group"]

async def group(args, samples, **kwargs):
    return [len(samples)] * len(samples)

def short(args, samples):
    return [1.0]

def nan(args, sample):
    return float("nan") if sample.prompt.index == 11 else 1

def nothing(args, sample):
    return None
"""


@pytest.fixture
def custom(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(CUSTOM)
    return lambda name: f"{path}:{name}"


@pytest.mark.parametrize(
    ("name", "scores"),
    [("plain", [2.0, 4.0, 2.0]), ("slow", [1.0, 2.0, 2.0]), ("group", [2.0, 2.0, 1.0])],
)
def test_own_functions_may_be_plain_or_coroutines_and_take_a_sample_or_a_group(custom, name, scores):
    reward = build_reward(make_config(custom_rm_path=custom(name)), Namespace(scale=2))
    assert reward(make_samples(["a", "aa"], ["b"])) == scores


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nan", "reward function {path} returned nan for prompt 11; it must return a finite number."),
        ("nothing", "reward function {path} returned None for prompt 10; it must return a finite number."),
        (
            "short",
            "reward function {path} returned [1.0] for the 2 samples of prompt 10; it must return a list of as "
            "many numbers.",
        ),
    ],
)
def test_a_wrong_return_is_refused_by_name(custom, name, message):
    reward = build_reward(make_config(custom_rm_path=custom(name)))
    with pytest.raises(ValueError) as refusal:
        reward(make_samples(["a", "aa"], ["b"]))
    assert str(refusal.value) == message.replace("{path}", custom(name))


def test_scores_are_plain_floats(custom):
    scores = build_reward(make_config(custom_rm_path=custom("plain")), Namespace(scale=1))(make_samples(["a"]))
    assert type(scores[0]) is float and math.isfinite(scores[0])
