"""Interrupted runs with --partial-rollout and routing replay: stragglers keep their experts."""

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_tis.main import train
from slime_tis.trainer.data.sample import Sample
from slime_tis.trainer.data.sample_file import from_dict, load_samples
from tests.rollout.sglang.fake_sglang import fake_servers
from tests.rollout.sglang.test_experts import assert_experts
from tests.runs import make_task, read_metrics, with_sglang

REWARD = """
import os, signal
from pathlib import Path

scored = []

def reward(args, sample):
    scored.append(sample)
    interrupt = Path(__file__).with_name("interrupt")
    if len(scored) == 40 and interrupt.exists():
        interrupt.unlink()
        os.kill(os.getpid(), signal.SIGTERM)
    return len(sample.response_ids) % 3 + sample.response_ids[0] / 50
"""


def flags_in(directory: Path) -> list[str]:
    """Flags of a run that the reward interrupts in its third rollout, once."""
    flags = make_task(directory, "qwen3_moe", prompts=32)
    (directory / "reward.py").write_text(REWARD)
    (directory / "interrupt").touch()
    return [
        *with_sglang(flags),
        "--rollout-max-response-len",
        "60",
        "--num-rollout",
        "5",
        "--partial-rollout",
        "--over-sampling-batch-size",
        "8",
        "--use-rollout-routing-replay",
        "--measure-routing-mismatch",
        "1",
        "--save",
        str(directory / "checkpoints"),
        "--save-debug-rollout-data",
        str(directory / "rollout_{rollout_id}.jsonl"),
    ]


def stragglers_of(checkpoints: Path) -> list[Sample]:
    """The samples of a checkpoint that were begun and not finished."""
    (checkpoint,) = checkpoints.glob("iter_*")
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    samples = [from_dict(row) for group in state["unfinished"] for row in group]
    return [
        sample
        for sample in samples
        if sample.status is Sample.Status.ABORTED and sample.response_ids
    ]


@dataclass(frozen=True)
class ResumedRun:
    """An interrupted run and the one that resumed it."""

    statuses: tuple[int, int]
    rows: list[dict[str, Any]]
    stragglers: list[Sample]
    trained: list[Sample]

    def continuations(self) -> list[tuple[Sample, Sample]]:
        """Pairs of a straggler and the trained sample that continues it."""
        pairs = []
        for straggler in self.stragglers:
            for sample in self.trained:
                if continues(sample, straggler):
                    pairs.append((straggler, sample))
        return pairs


def continues(sample: Sample, straggler: Sample) -> bool:
    """Whether a sample has the prompt, first tokens and their weight versions of a straggler."""
    length = len(straggler.response_ids)
    return (
        sample.prompt_index == straggler.prompt_index
        and sample.response_ids[:length] == straggler.response_ids
        and sample.weight_versions[:length] == straggler.weight_versions
    )


@pytest.fixture(scope="module")
def resumed_run(tmp_path_factory: pytest.TempPathFactory) -> ResumedRun:
    directory = tmp_path_factory.mktemp("partial")
    flags = flags_in(directory)
    first = directory / "first"
    second = directory / "second"
    with fake_servers(1) as (server,):
        server.pace = 0.01  # all requests must be running before the first one ends
        flags += ["--sglang-url", server.url]
        interrupted = train([*flags, "--output-dir", str(first)])
        stragglers = stragglers_of(directory / "checkpoints")
        load = ["--load", str(directory / "checkpoints"), "--output-dir", str(second)]
        resumed = train([*flags, *load])
    trained: list[Sample] = []
    for rollout in range(5):
        for group in load_samples(directory / f"rollout_{rollout}.jsonl", 4, 4):
            trained.extend(group)
    rows = [*read_metrics(first), *read_metrics(second)]
    return ResumedRun((interrupted, resumed), rows, stragglers, trained)


def test_an_interrupted_run_can_be_resumed(resumed_run):
    assert resumed_run.statuses == (128 + signal.SIGTERM, 0)
    assert [row["step"] for row in resumed_run.rows] == [1, 2, 3, 4, 5]


def test_no_token_lacks_its_experts(resumed_run):
    assert all(row["train/routing_replay_missing"] == 0 for row in resumed_run.rows)


def test_stragglers_are_saved_with_their_experts(resumed_run):
    assert resumed_run.stragglers
    for sample in resumed_run.stragglers:
        assert_experts(sample)


def test_samples_are_trained_with_their_experts(resumed_run):
    for sample in resumed_run.trained:
        assert_experts(sample)


def test_a_straggler_is_continued_with_newer_weights(resumed_run):
    newer = []
    for straggler, sample in resumed_run.continuations():
        newer.append(len(set(sample.weight_versions)) > len(set(straggler.weight_versions)))
    assert any(newer)


def test_a_continued_straggler_keeps_its_experts(resumed_run):
    for straggler, sample in resumed_run.continuations():
        assert straggler.rollout_routed_experts is not None
        assert sample.rollout_routed_experts is not None
        first = sample.rollout_routed_experts[: len(straggler.rollout_routed_experts)]
        assert torch.equal(first, straggler.rollout_routed_experts)
