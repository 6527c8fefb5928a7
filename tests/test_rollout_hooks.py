"""train.py with the user's functions around a rollout: dynamic sampling, filters, shaped rewards,
logs."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slime_tis.main import train
from slime_tis.trainer.data.sample_file import load_samples
from tests.runs import run_apart, run_here, training_metrics

PARITY = """
import os
def fn(args, samples, **kwargs):
    from slime.rollout.filter_hub.base_types import DynamicFilterOutput
    if os.environ.get("RANK") == "1":
        raise RuntimeError("called on another rank than 0")
    keep = len(samples[0].prompt) % 2 == 0
    return DynamicFilterOutput(keep=keep, reason=None if keep else "odd")
"""


@pytest.fixture(scope="module")
def parity(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The flags of a filter that accepts prompts of even length."""
    path = tmp_path_factory.mktemp("parity") / "parity.py"
    path.write_text(PARITY)
    return ["--dynamic-sampling-filter-path", f"{path}:fn"]


def prompts_of(pattern: Path, rollouts: int) -> list[list[str]]:
    """The prompts of each rollout in saved samples."""
    paths = [str(pattern).format(rollout_id=number) for number in range(rollouts)]
    return [[group[0].prompt_text for group in load_samples(path, 4, 4)] for path in paths]


@dataclass
class FilteredRun:
    """A run of two rollouts in batches of five prompts, of which four are trained."""

    flags: list[str]
    rows: list[dict[str, Any]]
    prompts: list[list[str]]


@pytest.fixture(scope="module")
def filtered(
    task: list[str], parity: list[str], tmp_path_factory: pytest.TempPathFactory
) -> FilteredRun:
    directory = tmp_path_factory.mktemp("filtered")
    data = directory / "{rollout_id}.jsonl"
    flags = [*task, *parity, "--over-sampling-batch-size", "5", "--num-rollout", "2"]
    rows = run_here([*flags, "--save-debug-rollout-data", str(data)], directory / "run")
    return FilteredRun(flags, rows, prompts_of(data, 2))


def test_dropped_prompts_are_replaced(filtered):
    assert [len(prompts) for prompts in filtered.prompts] == [4, 4]
    accepted = [prompt for prompts in filtered.prompts for prompt in prompts]
    assert all(len(prompt) % 2 == 0 for prompt in accepted)


def test_metrics_count_dropped_prompts(filtered):
    for row in filtered.rows:
        sampled = row["rollout/dynamic_filter/sampled"]
        dropped = row["rollout/dynamic_filter/dropped"]
        assert sampled == 5 * row["rollout/dynamic_filter/batches"]
        assert dropped == row.get("rollout/dynamic_filter/drop_odd", 0)
        assert sampled - dropped - row["rollout/dynamic_filter/unused"] == 4


def test_a_filtered_run_is_reproducible(filtered, tmp_path):
    again = run_here(filtered.flags, tmp_path / "again")
    assert list(map(training_metrics, again)) == list(map(training_metrics, filtered.rows))


def test_with_lookahead_batches_in_flight_fill_the_rollout(run, parity, tmp_path):
    taken = []
    for depth in (0, 2):
        data = tmp_path / f"{depth}_{{rollout_id}}.jsonl"
        flags = [*parity, "--rollout-lookahead", str(depth), "--save-debug-rollout-data", str(data)]
        run(*flags, "--num-rollout", "3", name=str(depth))
        taken.append(prompts_of(data, 3))
    assert taken[0] == taken[1]


def test_a_resumed_run_samples_the_same(task, parity, tmp_path):
    flags = [*task, *parity, "--num-rollout", "3", "--save-interval", "2"]
    whole = run_here([*flags, "--save", str(tmp_path / "whole")], tmp_path / "run")
    (tmp_path / "load").mkdir()
    (tmp_path / "load" / "iter_0000002").symlink_to(tmp_path / "whole" / "iter_0000002")
    resumed = run_here(
        [*flags, "--load", str(tmp_path / "load"), "--save", str(tmp_path / "other")],
        tmp_path / "two",
    )
    assert list(map(training_metrics, resumed)) == list(map(training_metrics, whole))[2:]


def test_a_filter_that_drops_everything_stops_the_run(task, tmp_path, capsys):
    (tmp_path / "never.py").write_text("def fn(args, samples, **kwargs):\n    return False\n")
    flags = [*task, "--dynamic-sampling-filter-path", f"{tmp_path / 'never.py'}:fn"]
    flags += ["--dynamic-sampling-max-batches", "2", "--output-dir", str(tmp_path / "run")]
    assert train(flags) == 1
    message = (
        "error: the dynamic sampling filter accepted 0 of the 8 prompts of 2 batches, and a rollout"
        " needs 4"
    )
    assert message in capsys.readouterr().err


def test_two_ranks_train_on_the_groups_that_rank_0_accepts(task, parity, tmp_path):
    flags = [*task, *parity, "--num-rollout", "1", "--rollout-precision", "fp32", "--no-bf16"]
    alone = run_apart(flags, tmp_path / "one")
    both = run_apart(flags, tmp_path / "two", ranks=2)
    assert (alone.returncode, both.returncode) == (0, 0), alone.stderr + both.stderr
    rows = [
        json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[0])
        for name in ("one", "two")
    ]
    for name in (
        "rollout/dynamic_filter/sampled",
        "rollout/dynamic_filter/dropped",
        "rollout/raw_reward",
    ):
        assert rows[0][name] == rows[1][name]
    assert rows[0]["train/loss"] == pytest.approx(rows[1]["train/loss"], abs=1e-6)


HOOKS = """
import json
def remove_first(args, samples):
    for group in samples:
        group[0].remove_sample = True

def record(args, samples, data_source):
    with open(OUT, "a") as lines:
        lines.write(json.dumps([len(samples), len(data_source)]) + "\\n")

def shape(args, samples):
    return [7.0] * len(samples), [float(sample.index % 2) for sample in samples]

def log(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    return rollout_id == 1
"""


@dataclass
class HookedRun:
    """The rows of two rollouts with hooks and of one without, and what `record` wrote."""

    rows: list[dict[str, Any]]
    plain: dict[str, Any]
    recorded: str


@pytest.fixture(scope="module")
def hooked(task: list[str], tmp_path_factory: pytest.TempPathFactory) -> HookedRun:
    directory = tmp_path_factory.mktemp("hooked")
    recorded = directory / "recorded"
    path = directory / "hooks.py"
    path.write_text(HOOKS.replace("OUT", repr(str(recorded))))
    flags = [
        "--rollout-sample-filter-path",
        f"{path}:remove_first",
        "--rollout-all-samples-process-path",
        f"{path}:record",
        "--custom-reward-post-process-path",
        f"{path}:shape",
        "--custom-rollout-log-function-path",
        f"{path}:log",
    ]
    (plain,) = run_here([*task, "--num-rollout", "1"], directory / "plain")
    rows = run_here([*task, *flags, "--num-rollout", "2"], directory / "run")
    return HookedRun(rows, plain, recorded.read_text())


def test_removed_samples_are_not_trained(hooked):
    denominator = hooked.plain["train/loss_denominator"] - 4
    assert hooked.rows[0]["train/loss_denominator"] == denominator


def test_all_samples_are_processed_after_each_rollout(hooked):
    assert hooked.recorded == "[4, 16]\n[4, 16]\n"


def test_raw_rewards_are_reported(hooked):
    assert hooked.rows[0]["rollout/raw_reward"] == 7.0


def test_shaped_rewards_are_trained(hooked):
    assert hooked.rows[0]["train/pg_loss"] != hooked.plain["train/pg_loss"]


def test_a_log_function_replaces_the_log_of_its_rollout(hooked):
    assert "rollout/response_len" in hooked.rows[0]
    assert "rollout/response_len" not in hooked.rows[1]


LISTS = """
import copy, json
from slime.rollout.filter_hub.base_types import DynamicFilterOutput

FIELDS = ("tokens", "loss_mask", "rollout_log_probs", "weight_versions", "rollout_workers")

def check(place, samples):
    for sample in samples:
        for name in FIELDS:
            values = getattr(sample, name)
            assert type(values) is list and json.loads(json.dumps(values)) == values, (place, name)
            for copied in (values * 2, sorted(values), copy.deepcopy(values), [0] < values):
                assert isinstance(copied, (list, bool)), (place, name)
        assert isinstance(sample.prompt_ids, list) and isinstance(sample.response_ids, list)
    open(__file__ + "." + place, "w").close()

def reward(args, sample):
    check("reward", [sample])
    return float(sample.index % 3)

def judge(args, samples, **kwargs):
    check("judge", samples)
    return DynamicFilterOutput(keep=True)

def choose(args, samples):
    check("choose", sum(samples, []))
    samples[0][0].loss_mask[0] = True

def process(args, samples, data_source):
    check("process", sum(samples, []))

def shape(args, samples):
    check("shape", samples)
    return [sample.reward for sample in samples], [sample.reward - 1 for sample in samples]

def log(rollout_id, args, samples, metrics, seconds):
    check("log", samples)
    return False

def log_eval(rollout_id, args, data, metrics):
    check("log_eval", data["held"]["samples"])
    return False
"""
OPTION_OF = {
    "reward": "--custom-rm-path",
    "judge": "--dynamic-sampling-filter-path",
    "choose": "--rollout-sample-filter-path",
    "process": "--rollout-all-samples-process-path",
    "shape": "--custom-reward-post-process-path",
    "log": "--custom-rollout-log-function-path",
    "log_eval": "--custom-eval-rollout-log-function-path",
}


def test_user_functions_get_lists(task, tmp_path):
    file = tmp_path / "user.py"
    file.write_text(LISTS)
    place = task.index("--custom-rm-path")
    flags = task[:place] + task[place + 2 :]
    for function, option in OPTION_OF.items():
        flags += [option, f"{file}:{function}"]
    held_out = ["--eval-prompt-data", "held", task[task.index("--prompt-data") + 1]]
    run_here([*flags, *held_out, "--num-rollout", "1"], tmp_path / "run")
    assert {path.suffix[1:] for path in tmp_path.glob("user.py.*")} == set(OPTION_OF)


def test_a_function_may_see_missing_log_probs(task, tmp_path):
    """NaN differs from itself, and is not an edit."""
    (tmp_path / "user.py").write_text("def keep(args, samples):\n    pass\n")
    agent = tmp_path / "agent.py"
    agent.write_text(
        "async def generate(args, sample, sampling_params, engine):\n"
        "    out = await engine.generate(sample.tokens, sampling_params)\n"
        "    sample.tokens += [*out.token_ids, 4]\n"
        "    sample.response_length = len(out.token_ids) + 1\n"
        "    return sample\n"
    )
    flags = [
        *task,
        "--custom-generate-function-path",
        f"{agent}:generate",
        "--retokenization",
        "keep-mask",
    ]
    flags += ["--rollout-sample-filter-path", f"{tmp_path / 'user.py'}:keep", "--num-rollout", "1"]
    (row,) = run_here(flags, tmp_path / "run")
    assert row["train/loss_denominator"] > 0
