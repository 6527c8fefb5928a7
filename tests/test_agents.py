"""Runs of train.py with a generate function: turns, segments, failures and resumption."""

import re
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

from slime_tis.analysis.dumps.readers import read
from slime_tis.analysis.dumps.table import TokenTable
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
        options = {**sampling_params, "max_new_tokens": 1 + (turn + sample.index) % 3}
        out = await engine.generate(sample.tokens, options)
        sample.append_response_tokens(
            args, tokens=out.token_ids, log_probs=out.log_probs, text=out.text
        )
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
    prompt = [{"role": "user", "content": "so far"}]
    second = Sample(prompt=prompt, tokens=compacted, reward=out.token_ids[0] / 50)
    second.append_response_tokens(
        args, tokens=out.token_ids, log_probs=out.log_probs, text=out.text
    )
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


Row = dict[str, float]


@dataclass
class AgentTask:
    """Flags of a run of one rollout, and the file of the agents."""

    flags: list[str]
    directory: Path

    def with_agent(self, name: str) -> list[str]:
        path = f"{self.directory / 'agents.py'}:{name}"
        return [*self.flags, "--custom-generate-function-path", path]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> AgentTask:
    directory = tmp_path_factory.mktemp("agents")
    flags = [*make_task(directory), "--rollout-precision", "fp32", "--num-rollout", "1"]
    (directory / "agents.py").write_text(AGENTS)
    return AgentTask(flags, directory)


@pytest.fixture(scope="module")
def eight_turns(
    task: AgentTask, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Row, TokenTable]:
    """The metrics and the dump of a rollout of eight turns."""
    directory = tmp_path_factory.mktemp("eight_turns")
    flags = [*task.with_agent("eight_turns"), "--dump-details", str(directory / "dump")]
    (row,) = run_here(flags, directory / "run")
    return row, read(directory / "dump" / "train_data" / "0_0.parquet")


def test_log_probs_of_eight_turns_equal_megatrons(eight_turns):
    row, table = eight_turns
    gap = np.abs(table.train_log_prob - table.rollout_log_prob)
    assert table.turn.max() == 7
    assert gap[table.loss_mask > 0].max() < 1e-4
    assert row["train/train_rollout_logprob_abs_diff_turn_5_to_8"] < 1e-5


def test_observations_have_no_rollout_log_probs(eight_turns):
    _, table = eight_turns
    is_observation = table.loss_mask == 0
    assert (table.rollout_log_prob[is_observation] == 0).all()
    assert (table.train_log_prob[is_observation] < -0.01).all()


def test_a_shift_by_one_would_change_most_log_probs(eight_turns):
    _, table = eight_turns
    shift = np.abs(table.train_log_prob - np.roll(table.rollout_log_prob, 1))
    assert (shift[table.loss_mask > 0] > 1e-2).mean() > 0.9


def test_observations_do_not_count_as_response_tokens(eight_turns):
    row, table = eight_turns
    assert row["rollout/turns"] == 8.0
    assert row["rollout/observation_len"] == 13.0
    assert row["rollout/response_len"] == pytest.approx((table.loss_mask > 0).sum() / 16)


def test_sampled_tokens_do_not_count_as_retokenized(eight_turns):
    row, _ = eight_turns
    assert row["rollout/retokenized"] == 0.0


def test_the_token_fractions_of_turns_sum_to_one(eight_turns):
    row, _ = eight_turns
    by_turn = [row[f"train/token_fraction_turn_{name}"] for name in ("1", "2", "3", "4", "5_to_8")]
    assert sum(by_turn) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("shifted", "log-probs and tokens are out of step (prompt"),
        ("unmasked", "trained tokens that differ from the sampled tokens"),
    ],
    ids=["log-probs shifted by one", "observations that are trained on"],
)
def test_an_invalid_sample_ends_a_strict_run(task, name, message, tmp_path, capsys):
    flags = [*task.with_agent(name), "--retokenization", "error"]
    assert train([*flags, "--output-dir", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err


def test_the_first_retokenized_token_is_named_once(task, tmp_path, capsys):
    run_here(task.with_agent("retokenized"), tmp_path / "run")
    output = capsys.readouterr()
    assert (output.out + output.err).count("response token 0") == 1


EXCLUDED = {
    "retokenized": (1.0, "every sample was retokenized"),
    "removed": (0.0, "widen the bounds"),
}


@pytest.mark.parametrize("name", EXCLUDED)
def test_a_built_in_reward_does_not_train_on_excluded_samples(task, name, tmp_path, capsys):
    flags = task.with_agent(name)
    index = flags.index("--custom-rm-path")
    flags[index : index + 2] = ["--rm-type", "random"]
    (row,) = run_here(flags, tmp_path / "run")
    share, warning = EXCLUDED[name]
    output = capsys.readouterr()
    warnings = [text for _, text in EXCLUDED.values() if text in output.out + output.err]
    assert row["train/loss_denominator"] == 0
    assert row["train/grad_norm"] == 0
    assert row["rollout/retokenized"] == share
    assert warnings == [warning]


@dataclass
class SegmentsRun:
    """A run whose rollouts have one or two segments."""

    flags: list[str]
    data: Path
    """The saved samples."""
    rows: list[Row]


@pytest.fixture(scope="module")
def segments(task: AgentTask, tmp_path_factory: pytest.TempPathFactory) -> SegmentsRun:
    directory = tmp_path_factory.mktemp("segments")
    data = directory / "samples.jsonl"
    flags = task.with_agent("segments")
    flags += ["--num-steps-per-rollout", "2", "--micro-batch-size", "2"]
    rows = run_here([*flags, "--save-debug-rollout-data", str(data)], directory / "run")
    return SegmentsRun(flags, data, rows)


def test_segments_are_counted(segments):
    groups = load_samples(segments.data, 4, 4)
    assert [len(group) for group in groups] != [4] * 4
    assert segments.rows[-1]["rollout/segments"] == pytest.approx(sum(map(len, groups)) / 16)


def test_the_loss_denominator_counts_rollouts(segments):
    assert [row["train/loss_denominator"] for row in segments.rows] == [8.0, 8.0]


EQUAL_ON_TWO_RANKS = (
    "train/grad_norm",
    "train/loss",
    "train/entropy_loss",
    "rollout/raw_reward",
    "rollout/turns",
)


def test_segments_train_alike_on_two_ranks(segments, tmp_path):
    two = run_apart(segments.flags, tmp_path / "two", ranks=2)
    assert two.returncode == 0, two.stderr[-3000:]
    for row, other in zip(segments.rows, read_metrics(tmp_path / "two"), strict=True):
        names = [name for name in EQUAL_ON_TWO_RANKS if name in row]
        expected = {name: row[name] for name in names}
        assert {name: other[name] for name in names} == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_saved_segments_train_to_the_same_bits(segments, tmp_path):
    flags = [*segments.flags, "--load-debug-rollout-data", str(segments.data)]
    again = run_here(flags, tmp_path / "again")
    norms = [row["train/grad_norm"] for row in segments.rows]
    assert [row["train/grad_norm"] for row in again] == norms


@dataclass
class UnreliableRun:
    """A run whose agent raises, or returns an invalid sample, for half of the rollouts."""

    row: Row
    stderr: str


@pytest.fixture(scope="module")
def unreliable(task: AgentTask, tmp_path_factory: pytest.TempPathFactory) -> UnreliableRun:
    stderr = StringIO()
    with redirect_stderr(stderr):
        flags = task.with_agent("unreliable")
        (row,) = run_here(flags, tmp_path_factory.mktemp("unreliable") / "run")
    return UnreliableRun(row, stderr.getvalue())


def test_failures_are_counted_by_reason(unreliable):
    prefix = "rollout/generate_failed"
    failures = {
        name.removeprefix(prefix): value
        for name, value in unreliable.row.items()
        if name.startswith(prefix)
    }
    assert failures == {"": 0.5, "/raised": 4.0, "/response": 4.0}


def test_failed_samples_are_not_trained_on(unreliable):
    assert unreliable.row["train/loss_denominator"] == 8.0
    assert unreliable.row["train/train_rollout_logprob_abs_diff"] < 1e-5


def test_failures_are_one_warning(unreliable):
    warning = "8 of 16 samples could not be made and train nothing: "
    assert warning in unreliable.stderr


def test_a_run_continues_without_the_samples_whose_tools_hang(task, tmp_path):
    flags = [*task.with_agent("hung_tools"), "--generate-timeout", "3", "--num-rollout", "2"]
    hung = run_apart(flags, tmp_path / "run")
    assert hung.returncode == 0, hung.stderr
    rows = read_metrics(tmp_path / "run")
    assert [row["rollout/generate_failed/timeout"] for row in rows] == [3.0, 3.0]


RESUMED = ("rollout/raw_reward", "rollout/response_len", "train/grad_norm", "eval/accuracy")


def test_a_resumed_run_equals_the_complete_run(task, tmp_path):
    flags = task.with_agent("segments")
    flags += ["--rollout-precision", "int8", "--eval-max-response-len", "4"]
    flags += ["--eval-prompt-data", str(task.directory / "train.jsonl")]
    save = str(tmp_path / "save")
    complete = run_here([*flags, "--num-rollout", "2"], tmp_path / "complete")
    run_here([*flags, "--save", save], tmp_path / "first")
    (row,) = run_here([*flags, "--num-rollout", "2", "--load", save], tmp_path / "resumed")
    expected = {name: complete[-1][name] for name in RESUMED}
    assert {name: row[name] for name in RESUMED} == expected


def test_the_example_of_the_page_runs(task, tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "agents.md").read_text(), re.S)
    (tmp_path / "my_agent.py").write_text(code)
    path = f"{tmp_path / 'my_agent.py'}:generate"
    flags = [*task.flags, "--custom-generate-function-path", path]
    (row,) = run_here(flags, tmp_path / "run")
    assert row["rollout/generate_failed"] == 0.0
    assert row["rollout/retokenized"] == 0.0
    assert row["train/train_rollout_logprob_abs_diff"] < 1e-5
