"""A run whose only server dies during a weight update saves, says why, and resumes bitwise."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.faults.forked import Outcome, run_forked
from tests.rollout.sglang.fake_sglang import FakeSGLang, servers_of
from tests.runs import make_task, read_metrics, training_metrics, with_sglang

Rows = dict[int, dict[str, Any]]
LOAD = "/update_weights_from_disk"
LIMIT = 120.0
"""Seconds after which a run counts as hanging."""


class Mortal(FakeSGLang):
    """A server that dies at its third load of weights: of version 2, after the initial ones."""

    async def _control(self, path: str, body: dict[str, Any]) -> Any:
        if path == LOAD and self.count(LOAD) == 3:
            await self._die()
            return None
        return await super()._control(path, body)


@dataclass
class LostUpdate:
    """A run that lost its only server in its third update, and the run that resumed it."""

    lost: Outcome
    resumed: Outcome
    rows: Rows
    """Metrics of both, by step."""
    expected: Rows
    """Metrics of an uninterrupted run."""


def arguments_in(directory: Path, flags: list[str], server: FakeSGLang) -> list[str]:
    """Arguments of a run on a server, with all files below a directory."""
    arguments = [*flags, "--sglang-url", server.url]
    arguments += ["--save", str(directory / "save"), "--load", str(directory / "save")]
    return [*arguments, "--output-dir", str(directory / "run")]


def by_step(directory: Path) -> Rows:
    """Metrics of training and samples, without those of requests and of the probe."""
    rows: Rows = {}
    for row in read_metrics(directory / "run"):
        metrics = training_metrics(row)
        for name in list(metrics):
            if name.startswith(("rollout/sglang_", "rollout/weight_sync_", "rollout/probe_")):
                del metrics[name]
        rows[row["step"]] = metrics
    return rows


@pytest.fixture(scope="module")
def lost_update(tmp_path_factory: pytest.TempPathFactory) -> LostUpdate:
    directory = tmp_path_factory.mktemp("lost")
    flags = [*with_sglang(make_task(directory)), "--num-rollout", "4"]
    flags += ["--sglang-recovery-timeout", "1", "--check-engines", "off"]
    # The fake server's log-probs follow a rule, not the weights.
    flags += ["--check-weight-sync", "--weight-sync-bound", "100", "--lr", "1e-6"]
    with servers_of(FakeSGLang, 1) as (server,):
        arguments = arguments_in(directory / "whole", flags, server)
        outcome = run_forked(arguments, directory / "log_whole", timeout=LIMIT)
    assert outcome.status == 0, outcome.error
    with servers_of(Mortal, 1) as (mortal,):
        arguments = arguments_in(directory / "lost", flags, mortal)
        lost = run_forked(arguments, directory / "log_lost", timeout=LIMIT)
        mortal.come_back()
        resumed = run_forked(arguments, directory / "log_resumed", timeout=LIMIT)
    return LostUpdate(lost, resumed, by_step(directory / "lost"), by_step(directory / "whole"))


def test_a_lost_update_ends_the_run_with_one_message(lost_update: LostUpdate) -> None:
    assert lost_update.lost.status == 1
    assert "no SGLang server is left" in lost_update.lost.messages[-1]
    assert not lost_update.lost.traceback


def test_a_check_without_servers_is_reported(lost_update: LostUpdate) -> None:
    assert "the update to step 2 was not checked" in lost_update.lost.error


def test_a_run_resumes_after_a_lost_update(lost_update: LostUpdate) -> None:
    assert lost_update.resumed.status == 0, lost_update.resumed.error


def test_a_lost_update_changes_no_metric(lost_update: LostUpdate) -> None:
    assert lost_update.rows == lost_update.expected
