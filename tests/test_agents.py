"""Runs of train.py with a generate function: proof against Megatron, segments, failures, resumption, evaluation."""

import re
from pathlib import Path

import numpy as np
import pytest

from slime_tis.analysis.dumps.readers import read
from slime_tis.main import train
from slime_tis.trainer.data.sample_file import load_samples
from tests.runs import make_task, read_metrics, run_apart, run_here

ROOT = Path(__file__).parent.parent
AGENTS = """
import asyncio, time
from slime.utils.types import Sample

OBSERVATIONS = [[4], [5, 6], [12, 4, 5]]


async def eight_turns(args, sample, sampling_params, engine):
    for turn in range(8):
        out = await engine.generate(sample.tokens, {**sampling_params, "max_new_tokens": 1 + (turn + sample.index) % 3})
        sample.append_response_tokens(args, tokens=out.token_ids, log_probs=out.log_probs, text=out.text)
        if turn < 7:
            sample.append_response_tokens(args, tokens=OBSERVATIONS[turn % 3], trainable=False)
    return sample


async def shifted(args, sample, sampling_params, engine):
    sample = await eight_turns(args, sample, sampling_params, engine)
    sample.rollout_log_probs = [0.0, *sample.rollout_log_probs[:-1]]
    return sample


async def unmasked(args, sample, sampling_params, engine):
    sample = await eight_turns(args, sample, sampling_params, engine)
    sample.loss_mask = [1] * sample.response_length
    sample.rollout_log_probs = [value or -1.0 for value in sample.rollout_log_probs]
    return sample


async def retokenized(args, sample, sampling_params, engine):
    out = await engine.generate(sample.tokens, {**sampling_params, "max_new_tokens": 3})
    other = [4 if token != 4 else 5 for token in out.token_ids]
    sample.append_response_tokens(args, tokens=other, log_probs=out.log_probs, text=out.text)
    return sample


async def removed(args, sample, sampling_params, engine):
    sample = await eight_turns(args, sample, sampling_params, engine)
    sample.remove_sample = True
    return sample


async def segments(args, sample, sampling_params, engine):
    whole = await eight_turns(args, sample, sampling_params, engine)
    whole.reward = len(whole.tokens) % 3 + whole.tokens[-1] / 50
    if whole.index % 3 == 0:
        return whole
    compacted = whole.tokens[-5:]
    out = await engine.generate(compacted, {"max_new_tokens": 4})
    second = Sample(prompt=[{"role": "user", "content": "so far"}], tokens=compacted, reward=out.token_ids[0] / 50)
    second.append_response_tokens(args, tokens=out.token_ids, log_probs=out.log_probs, text=out.text)
    return [whole, second]


async def unreliable(args, sample, sampling_params, engine):
    if sample.index % 4 == 0:
        raise RuntimeError("the tool is broken")
    sample = await eight_turns(args, sample, sampling_params, engine)
    if sample.index % 4 == 1:
        sample.response = "x" * (1 << 21)
    return sample


async def hung_tools(args, sample, sampling_params, engine):
    if sample.index == 0:
        await asyncio.to_thread(time.sleep, 10_000)
    while sample.index == 1:
        try:
            await asyncio.to_thread(time.sleep, 10_000)
        except:
            pass
    while sample.index == 2:
        try:
            await engine.generate([])  # raises at once
        except:
            pass
        await asyncio.sleep(0)
    asyncio.get_running_loop().stop()
    return await eight_turns(args, sample, sampling_params, engine)
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    directory = tmp_path_factory.mktemp("agents")
    flags = [*make_task(directory), "--rollout-precision", "fp32", "--num-rollout", "1"]
    (directory / "agents.py").write_text(AGENTS)
    return flags, directory


def agent(task, name):
    return [*task[0], "--custom-generate-function-path", f"{task[1] / 'agents.py'}:{name}"]


def test_log_probs_of_eight_turns_are_those_that_megatron_computes(task, tmp_path):
    (row,) = run_here(
        [*agent(task, "eight_turns"), "--dump-details", str(tmp_path / "dump")], tmp_path / "run"
    )
    table = read(tmp_path / "dump" / "train_data" / "0_0.parquet")
    trained = table.loss_mask > 0
    gap = np.abs(table.train_log_prob - table.rollout_log_prob)
    assert table.turn.max() == 7 and gap[trained].max() < 1e-4
    assert (table.rollout_log_prob[~trained] == 0).all() and (
        table.train_log_prob[~trained] < -0.01
    ).all()
    shift = np.abs(table.train_log_prob - np.roll(table.rollout_log_prob, 1))
    assert (shift[trained] > 1e-2).mean() > 0.9  # what a shift by one would show
    assert row["rollout/turns"] == 8.0 and row["rollout/observation_len"] == 13.0
    assert (
        row["rollout/response_len"] == pytest.approx(trained.sum() / 16)
        and row["rollout/retokenized"] == 0.0
    )
    by_turn = [row[f"train/token_fraction_turn_{name}"] for name in ("1", "2", "3", "4", "5_to_8")]
    assert sum(by_turn) == pytest.approx(1.0)
    assert row["train/train_rollout_logprob_abs_diff_turn_5_to_8"] < 1e-5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("shifted", "log-probs and tokens are out of step (prompt"),
        ("unmasked", "trained tokens that differ from the sampled tokens"),
    ],
    ids=["log-probs shifted by one", "observations that are trained on"],
)
def test_a_shift_by_one_and_a_wrong_mask_end_a_strict_run(task, name, message, tmp_path, capsys):
    flags = [*agent(task, name), "--retokenization", "error", "--output-dir", str(tmp_path / "run")]
    assert train(flags) == 2
    assert message in capsys.readouterr().err


def test_the_first_retokenized_token_is_named_once(task, tmp_path, capsys):
    run_here(agent(task, "retokenized"), tmp_path / "run")
    output = capsys.readouterr()
    assert (output.out + output.err).count("response token 0") == 1


@pytest.mark.parametrize(("name", "share"), [("retokenized", 1.0), ("removed", 0.0)])
def test_a_built_in_reward_does_not_train_on_excluded_samples(task, name, share, tmp_path, capsys):
    flags = agent(task, name)
    place = flags.index("--custom-rm-path")
    flags[place : place + 2] = ["--rm-type", "random"]
    (row,) = run_here(flags, tmp_path / "run")
    assert (
        row["train/loss_denominator"] == row["train/grad_norm"] == 0
        and row["rollout/retokenized"] == share
    )
    output = capsys.readouterr()
    assert ("every sample was retokenized" in output.out + output.err) == (share == 1)
    assert ("widen the bounds" in output.out + output.err) == (share == 0)


def test_segments_train_alike_on_one_rank_and_on_two(task, tmp_path):
    flags = [*agent(task, "segments"), "--num-steps-per-rollout", "2", "--micro-batch-size", "2"]
    data = tmp_path / "samples.jsonl"
    alone = run_here([*flags, "--save-debug-rollout-data", str(data)], tmp_path / "alone")
    groups = load_samples(data, 4, 4)
    assert [len(group) for group in groups] != [4] * 4
    assert [row["train/loss_denominator"] for row in alone] == [8.0, 8.0]  # rollouts
    assert alone[-1]["rollout/segments"] == pytest.approx(sum(map(len, groups)) / 16)
    two = run_apart(flags, tmp_path / "two", ranks=2)
    assert two.returncode == 0, two.stderr[-3000:]
    for one, other in zip(alone, read_metrics(tmp_path / "two"), strict=True):
        for name in (
            "train/grad_norm",
            "train/loss",
            "train/entropy_loss",
            "rollout/raw_reward",
            "rollout/turns",
        ):
            if name in one:
                assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6)
    again = run_here([*flags, "--load-debug-rollout-data", str(data)], tmp_path / "again")
    assert [row["train/grad_norm"] for row in again] == [row["train/grad_norm"] for row in alone]


def test_failures_cost_their_samples_alone(task, tmp_path, capsys):
    (row,) = run_here(agent(task, "unreliable"), tmp_path / "run")
    assert row["rollout/generate_failed"] == 0.5
    assert (row["rollout/generate_failed/raised"], row["rollout/generate_failed/response"]) == (
        4.0,
        4.0,
    )
    assert (
        row["train/loss_denominator"] == 8.0 and row["train/train_rollout_logprob_abs_diff"] < 1e-5
    )
    assert "8 of 16 samples could not be made and train nothing: " in capsys.readouterr().err


def test_a_run_continues_without_the_samples_whose_tools_hang(task, tmp_path):
    hung = run_apart(
        [*agent(task, "hung_tools"), "--generate-timeout", "3", "--num-rollout", "2"],
        tmp_path / "run",
    )
    assert hung.returncode == 0, hung.stderr
    rows = read_metrics(tmp_path / "run")
    assert [row["rollout/generate_failed/timeout"] for row in rows] == [3.0, 3.0]


def test_a_resumed_run_goes_on_to_the_bit_and_evaluates_with_the_function(task, tmp_path):
    evaluation = [
        "--eval-prompt-data",
        str(task[1] / "train.jsonl"),
        "--eval-max-response-len",
        "4",
    ]
    flags = [*agent(task, "segments"), "--rollout-precision", "int8", *evaluation]
    whole = run_here([*flags, "--num-rollout", "2"], tmp_path / "whole")
    run_here([*flags, "--save", str(tmp_path / "save")], tmp_path / "first")
    (row,) = run_here(
        [*flags, "--num-rollout", "2", "--load", str(tmp_path / "save")], tmp_path / "resumed"
    )
    for name in ("rollout/raw_reward", "rollout/response_len", "train/grad_norm", "eval/accuracy"):
        assert row[name] == whole[-1][name]


def test_the_example_of_the_page_runs(task, tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "agents.md").read_text(), re.S)
    (tmp_path / "my_agent.py").write_text(code)
    flags = [*task[0], "--custom-generate-function-path", f"{tmp_path / 'my_agent.py'}:generate"]
    (row,) = run_here(flags, tmp_path / "run")
    assert row["rollout/generate_failed"] == row["rollout/retokenized"] == 0.0
    assert row["train/train_rollout_logprob_abs_diff"] < 1e-5
