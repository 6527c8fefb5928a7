"""The example of an agent with a calculator, at a size that runs in seconds."""

import asyncio
import random
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.tool_agent import agent, episodes, prepare
from examples.tool_agent.calculator import calculate
from slime_tis.demo.sort_digits import make_tokenizer
from slime_tis.trainer.cli.train_arguments import configure
from slime_tis.trainer.data.sample import Sample
from slime_tis.trainer.engines.function_requests import Generation
from tests.runs import ROOT, run_here

HERE = ROOT / "examples" / "tool_agent"
SMALL = prepare.Example(
    train_prompts=64,
    eval_prompts=8,
    hidden_size=32,
    layers=2,
    transcripts=64,
    batch_size=16,
    accuracy=(0.0, 1.0),
    copied=0.0,
)
ROW = {"prompt": "<bos>47+38-62>", "label": "23"}


@pytest.mark.parametrize(
    ("call", "result"),
    [
        ("47+38", "85"),
        ("-85-62", "-147"),
        ("0-0", "0"),
        ("999999+999999", "1999998"),
        ("", "!"),
        ("1+2+3", "!"),
        ("47*38", "!"),
        ("1000000+1", "!"),
        ("__import__('os')", "!"),
        ("9" * 1_000_000, "!"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_the_calculator_knows_one_operation(call, result):
    assert calculate(call) == result


@pytest.mark.parametrize(
    ("probability", "text", "sampled"),
    [
        ((1.0, 1.0, 1.0), "<bos>47+38-62>?47+38=85;?85-62=23;!23<eos>", "?47+38=?85-62=!23<eos>"),
        ((0.0, 1.0, 0.0), "<bos>47+38-62>?47+38=85;!23<eos>", "?47+38=!23<eos>"),
        ((1.0, 0.0, 0.0), "<bos>47+38-62>!23<eos>", "!23<eos>"),
    ],
    ids=["every call", "one call", "no call"],
)
def test_a_transcript_calls_until_it_answers(probability, text, sampled):
    tokenizer = make_tokenizer(prepare.MAX_LENGTH, prepare.CHARACTERS)
    found = prepare.transcript(ROW, tokenizer, probability, random.Random(0))
    assert tokenizer.decode(found.tokens) == text
    own = [
        token for token, is_sampled in zip(found.tokens, found.sampled, strict=True) if is_sampled
    ]
    assert tokenizer.decode(own) == sampled


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("?47+38=85;?85-62=23;!23<eos>", 1.0),
        ("!23", 1.0),
        ("!24!23<eos>", 1.0),
        ("!24<eos>", 0.0),
        ("?47+38=85;", 0.0),
        ("!<eos>", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_answer_is_scored(response, reward):
    entry = {"question": "47 + 38 - 62 =", "answer": "23", "metadata": {}}
    metadata = {"dataset": "chain_sum", "config": prepare.CONFIG, "entry": entry, "answer": "text"}
    assert agent.correct(Namespace(), Sample(response=response, metadata=metadata)) == reward


class Caller:
    """An engine whose policy calls for ever."""

    def __init__(self, tokenizer):
        self.ids = tokenizer.encode("?1+1=", add_special_tokens=False)

    async def generate(self, token_ids, sampling_params, *, session_id):
        count = len(self.ids)
        return Generation(
            token_ids=self.ids,
            log_probs=[-1.0] * count,
            weight_versions=[0] * count,
            finish_reason="stop",
            text="?1+1=",
        )


def test_an_episode_that_only_calls_ends(data):
    checkpoint = str(data / "data" / "tool_agent" / "checkpoint")
    args = Namespace(hf_checkpoint=checkpoint, rollout_max_response_len=1000)
    sample = Sample(prompt="1+1>", tokens=[1, 5, 14, 5, 16])
    caller = Caller(agent.load_tokenizer(checkpoint))
    episode = asyncio.run(agent.generate(args, sample, {}, caller))
    assert episode.response == "?1+1=2;" * agent.MAX_CALLS + "?1+1="
    assert episode.metadata["calls"] == agent.MAX_CALLS == 6
    assert episode.turns == 7
    # each call has five sampled tokens and two of the calculator
    assert episode.loss_mask == [1, 1, 1, 1, 1, 0, 0] * 6 + [1, 1, 1, 1, 1]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that has only the files that prepare.py makes, and the examples."""
    root = tmp_path_factory.mktemp("agent")
    prepare.prepare(root / "data" / "tool_agent", example=SMALL)
    (root / "examples").symlink_to(ROOT / "examples")
    return root


@pytest.fixture(scope="module")
def steps(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    """The metrics of a run of two steps."""
    flags = [
        "--custom-config-path",
        str(HERE / "train.yaml"),
        "--num-rollout",
        "2",
        "--rollout-batch-size",
        "4",
        "--eval-interval",
        "2",
        "--no-progress",
        "--lr-warmup-iters",
        "1",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(data)
        yield run_here(flags, tmp_path_factory.mktemp("run"))


def test_every_step_is_reported(steps):
    assert [row["step"] for row in steps] == [0, 1, 2]


def test_every_episode_is_trained_with_the_sampled_tokens(steps):
    for row in steps[1:]:
        assert row["rollout/retokenized"] == 0
        assert row["rollout/generate_failed"] == 0


def test_an_episode_has_a_turn_per_call(steps):
    for row in steps[1:]:
        assert 1 <= row["rollout/turns"] <= agent.MAX_CALLS + 1


def test_the_mismatch_of_a_step_is_small(steps):
    for row in steps[1:]:
        assert 1e-9 < row["train/mismatch_k3_kl"] < 0.1


def test_the_configuration_with_servers_is_accepted(data, monkeypatch):
    monkeypatch.chdir(data)
    configure(["--custom-config-path", str(HERE / "sglang.yaml")], {})


@pytest.fixture
def printed_episodes(data: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines that the page's command prints for two episodes."""
    directory = data / "data" / "tool_agent"
    prompts = str(directory / "eval.jsonl")
    episodes.main([str(directory / "checkpoint"), "--prompts", prompts, "--each", "2"])
    return capsys.readouterr().out.splitlines()


def test_the_accuracy_is_printed(data, printed_episodes):
    checkpoint = data / "data" / "tool_agent" / "checkpoint"
    assert printed_episodes[0].startswith(f"{checkpoint}: accuracy 0.")
    assert printed_episodes[0].endswith(" calls per episode")


def test_episodes_are_printed(printed_episodes):
    assert len(printed_episodes) == 3
    assert all(">" in line for line in printed_episodes[1:])
