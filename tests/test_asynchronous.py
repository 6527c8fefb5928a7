"""train.py with rollouts in flight: how stale they are, what is omitted, what resuming and the sync
check do."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from slime_tis.main import train
from slime_tis.trainer.engines.local.local_engine import LocalEngine
from slime_tis.trainer.engines.rollout_engine import RolloutUnavailable
from slime_tis.trainer.storage.checkpoint_files import checksums, files_of, write_manifest
from tests.runs import read_metrics, run_here

Rows = list[dict[str, Any]]
"""Rows of metrics.jsonl."""


@pytest.fixture(scope="module")
def two_ahead(task: list[str], tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """The metrics of five rollouts with two in flight."""
    flags = [*task, "--rollout-lookahead", "2", "--num-rollout", "5"]
    return run_here(flags, tmp_path_factory.mktemp("two_ahead") / "run")


@pytest.mark.parametrize("name", ["weight_staleness", "weight_staleness_max"])
def test_lookahead_makes_samples_as_many_rollouts_stale(two_ahead, name):
    assert [row[f"rollout/{name}"] for row in two_ahead] == [0, 1, 2, 2, 2]


def test_fresh_samples_have_no_metrics_by_staleness(two_ahead):
    assert "train/mismatch_kl_staleness_0" not in two_ahead[0]


def test_the_mismatch_of_stale_samples_is_that_of_all(two_ahead):
    """All samples of a rollout are equally stale here."""
    assert two_ahead[1]["train/token_fraction_staleness_1"] == 1.0
    assert two_ahead[2]["train/token_fraction_staleness_2"] == 1.0
    all_samples = two_ahead[2]["train/mismatch_k3_kl"]
    assert two_ahead[2]["train/mismatch_k3_kl_staleness_2"] == pytest.approx(all_samples, rel=1e-5)


def test_stale_samples_are_not_trained(run):
    flags = ("--rollout-lookahead", "2", "--num-rollout", "4", "--use-tis")
    rows = run(*flags, "--max-weight-staleness", "1")
    assert [row["rollout/stale_samples"] for row in rows] == [0, 0, 16, 16]
    assert [row["train/skipped_steps"] for row in rows] == [0, 0, 1, 1]
    assert [row["rollout/stale_samples"] for row in run(*flags, name="all")] == [0, 0, 0, 0]


def resumable(task: list[str], directory: Path, *flags: str) -> list[str]:
    """The flags of a run that saves after each rollout and keeps all checkpoints."""
    return [*task, "--num-rollout", "5", "--save-interval", "1", "--save-retain", "9", *flags,
            "--save", str(directory / "save")]  # fmt: skip


def resume_at(step: int, flags: list[str], whole: Path, directory: Path) -> Rows:
    """The metrics of a run that continues from a copy of one checkpoint of the whole run."""
    name = f"iter_{step:07d}"
    (directory / "load").mkdir(parents=True)
    shutil.copytree(whole / "save" / name, directory / "load" / name)
    return run_here([*flags, "--load", str(directory / "load")], directory / "run")


def all_metrics(rows: Rows) -> Rows:
    """Metrics that do not depend on the clock, with the health warnings."""
    return [
        {key: value for key, value in row.items() if not key.startswith("perf/")} for row in rows
    ]


MUTATING = """
def keep(args, samples):
    for group in samples:
        group[0].remove_sample = True
        group[1].metadata["seen"] = True
        group[1].loss_mask[0] = 0

def raw(args, samples):
    shaped = [1.0 - (sample.index % 2) * 2 for sample in samples]
    return [sample.reward for sample in samples], shaped
"""


@pytest.mark.parametrize(
    "flags",
    [
        ("--rollout-lookahead", "1"),
        ("--rollout-lookahead", "2", "--update-weights-interval", "2", "--rollout-shuffle"),
        ("--rollout-lookahead", "1", "--rollout-top-p", "0.9"),
        ("--rollout-lookahead", "1", "MUTATING"),
    ],
    ids=["one ahead", "two ahead of stale weights", "with token sets", "samples changed in place"],
)
def test_a_run_with_rollouts_in_flight_resumes_bitwise(task, tmp_path, flags):
    if "MUTATING" in flags:
        (tmp_path / "hooks.py").write_text(MUTATING)
        hooks = f"{tmp_path / 'hooks.py'}"
        flags = (*flags[:-1], "--rollout-sample-filter-path", f"{hooks}:keep")
        flags = (*flags, "--custom-reward-post-process-path", f"{hooks}:raw")
    whole = tmp_path / "whole"
    expected = run_here(resumable(task, whole, *flags), whole / "run")
    for step in (1, 3):
        resumed = tmp_path / f"resumed_{step}"
        rows = resume_at(step, resumable(task, resumed, *flags), whole, resumed)
        assert all_metrics(rows) == all_metrics(expected)[step:]


INTERRUPTING = """
import os, signal

def reward(args, sample):
    stopped = os.path.exists(args.output_dir + "/stopped")
    if sample.index == 0 and sample.prompt_row.index == 8 and not stopped:
        open(args.output_dir + "/stopped", "w").close()
        os.kill(os.getpid(), signal.SIGTERM)
    sample.metadata["scored"] = True
    return len(sample.response_ids) % 3 + sample.response_ids[0] / 50
"""


def test_a_signal_while_a_rollout_in_flight_is_scored(task, tmp_path):
    (tmp_path / "reward.py").write_text(INTERRUPTING)
    save, output = str(tmp_path / "save"), tmp_path / "run"
    flags = [*task, "--rollout-lookahead", "1", "--num-rollout", "5"]
    flags += ["--custom-rm-path", f"{tmp_path / 'reward.py'}:reward"]
    output.mkdir()
    (output / "stopped").touch()  # nothing interrupts this run
    expected = run_here([*flags, "--save", str(tmp_path / "whole")], output)
    interrupted = [*flags, "--save", save, "--load", save]
    assert train([*interrupted, "--output-dir", str(tmp_path / "again")]) == 128 + signal.SIGTERM
    rows = run_here(interrupted, tmp_path / "again")
    assert all_metrics(rows) == all_metrics(expected) and len(rows) == 5


def test_changed_sampling_options_replace_rollouts_in_flight(task, tmp_path, capsys):
    whole = tmp_path / "whole"
    resumed = tmp_path / "resumed"
    run_here(resumable(task, whole, "--rollout-lookahead", "1"), whole / "run")
    flags = resumable(task, resumed, "--rollout-lookahead", "1", "--rollout-temperature", "0.9")
    rows = resume_at(2, flags, whole, resumed)
    assert rows[0]["rollout/weight_staleness"] == 0
    message = "rollouts in flight are sampled again: --rollout-temperature changed"
    assert message in capsys.readouterr().out


def test_a_checkpoint_without_rollouts_in_flight_is_resumed(task, tmp_path):
    """As earlier versions wrote it: the rollouts in flight are sampled again, by newer weights."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run_here(resumable(task, whole, "--rollout-lookahead", "1"), whole / "run")
    checkpoint = whole / "save" / "iter_0000002"
    (checkpoint / "rollouts_in_flight.jsonl").unlink()
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    del state["in_flight"], state["health"]
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    write_manifest(checkpoint, checksums(checkpoint, files_of(checkpoint)))
    rows = resume_at(2, resumable(task, resumed, "--rollout-lookahead", "1"), whole, resumed)
    assert [row["step"] for row in rows] == [3, 4, 5]
    assert [row["rollout/weight_staleness"] for row in rows] == [0, 1, 1]


def test_health_warnings_count_on_in_a_resumed_run(task, tmp_path):
    """Warnings after several steps in a row begin and end at the same steps, also with a resumption
    at each step."""
    (tmp_path / "same.py").write_text("def reward(args, sample):\n    return 1.0\n")
    whole = tmp_path / "whole"
    constant = ("--custom-rm-path", f"{tmp_path / 'same.py'}:reward", "--rollout-lookahead", "1")
    expected = run_here(resumable(task, whole, *constant), whole / "run")
    assert expected[0]["health/zero_gradient"] == 1.0 and "health/no_variance" not in expected[0]
    for step in (1, 4):
        resumed = tmp_path / f"resumed_{step}"
        rows = resume_at(step, resumable(task, resumed, *constant), whole, resumed)
        assert all_metrics(rows) == all_metrics(expected)[step:]


def test_an_evaluating_rollout_engine_has_the_present_weights(run, task):
    held_out = task[task.index("--prompt-data") + 1]
    flags = ["--eval-prompt-data", held_out, "--eval-interval", "1", "--num-rollout", "2"]
    # the rollouts of both steps are sampled by the initial weights
    flags += ["--rollout-precision", "fp32", "--update-weights-interval", "3"]
    local = run(*flags, name="local")
    remote = run(*flags, "--eval-engine", "rollout", name="rollout")
    assert remote[0]["eval/accuracy"] == local[0]["eval/accuracy"]
    lengths = [row.get("eval/accuracy/response_len") for row in local]
    assert [row.get("eval/accuracy/response_len") for row in remote] == lengths


def lose_the_third_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = LocalEngine.submit
    calls = []

    def submit(self: LocalEngine, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RolloutUnavailable("no server answers.")
        return usual(self, *args, **kwargs)

    monkeypatch.setattr(LocalEngine, "submit", submit)


def test_a_lost_engine_ends_the_run_with_a_checkpoint(task, tmp_path, monkeypatch, capsys):
    lose_the_third_rollout(monkeypatch)
    flags = [*task, "--save", str(tmp_path / "save"), "--output-dir", str(tmp_path / "run")]
    assert train(flags) == 1
    message = "error: no server answers. The run stops after step 2, saved under"
    assert message in capsys.readouterr().err
    assert (tmp_path / "save" / "iter_0000002").is_dir()
    assert len(read_metrics(tmp_path / "run")) == 2


def test_a_run_resumes_after_a_lost_engine(task, tmp_path, monkeypatch):
    flags = [*task, "--save", str(tmp_path / "save")]
    with monkeypatch.context() as patch:
        lose_the_third_rollout(patch)
        train([*flags, "--output-dir", str(tmp_path / "run")])
    rows = run_here([*flags, "--load", str(tmp_path / "save")], tmp_path / "resumed")
    assert [row["step"] for row in rows] == [3]
