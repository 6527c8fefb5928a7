"""Runs of train.py with --partial-rollout and routing replay that are interrupted: stragglers keep their experts."""

import json
import signal

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


@pytest.fixture
def task(tmp_path):
    """Flags of a run that the reward interrupts in its third rollout, once."""
    flags = make_task(tmp_path, "qwen3_moe", prompts=32)
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "interrupt").touch()
    return [
        *(*with_sglang(flags), "--rollout-max-response-len", "60", "--num-rollout", "5"),
        *("--partial-rollout", "--over-sampling-batch-size", "8"),
        *(
            "--use-rollout-routing-replay",
            "--measure-routing-mismatch",
            "1",
            "--save",
            str(tmp_path / "checkpoints"),
        ),
        *("--save-debug-rollout-data", str(tmp_path / "rollout_{rollout_id}.jsonl")),
    ]


def stragglers(directory):
    """The samples of a checkpoint that were begun and not finished."""
    (checkpoint,) = directory.glob("iter_*")
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    samples = [from_dict(row) for group in state["unfinished"] for row in group]
    return [
        sample
        for sample in samples
        if sample.status is Sample.Status.ABORTED and sample.response_ids
    ]


def test_stragglers_of_an_interrupted_run_keep_their_experts(task, tmp_path):
    with fake_servers(1) as (server,):
        server.pace = 0.01  # so that all requests are under way before the first of them ends
        flags = [*task, "--sglang-url", server.url]
        assert train([*flags, "--output-dir", str(tmp_path / "first")]) == 128 + signal.SIGTERM
        begun = stragglers(tmp_path / "checkpoints")
        assert begun
        for sample in begun:
            assert_experts(sample)
        resumed = [
            *flags,
            "--load",
            str(tmp_path / "checkpoints"),
            "--output-dir",
            str(tmp_path / "second"),
        ]
        assert train(resumed) == 0
    rows = [*read_metrics(tmp_path / "first"), *read_metrics(tmp_path / "second")]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert all(row["train/routing_replay_missing"] == 0 for row in rows)
    trained = [
        sample
        for rollout in range(5)
        for group in load_samples(tmp_path / f"rollout_{rollout}.jsonl", 4, 4)
        for sample in group
    ]
    for sample in trained:
        assert_experts(sample)
    pairs = [(one, whole) for one in begun for whole in trained if goes_on_from(whole, one)]
    assert any(
        len(set(whole.weight_versions)) > len(set(one.weight_versions)) for one, whole in pairs
    )
    for one, whole in pairs:
        assert whole.rollout_routed_experts is not None and one.rollout_routed_experts is not None
        assert torch.equal(
            whole.rollout_routed_experts[: len(one.rollout_routed_experts)],
            one.rollout_routed_experts,
        )


def goes_on_from(whole, part):
    length = len(part.response_ids)
    beginning = whole.prompt_index, whole.response_ids[:length], whole.weight_versions[:length]
    return beginning == (part.prompt_index, part.response_ids, part.weight_versions)
