"""Signals and SIGKILL at any moment: files are complete, no process remains, resumption is bitwise
identical."""

import hashlib
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slime_tis.trainer.storage.checkpoint_files import check, checkpoints, read_manifest
from tests.faults.forked import ForkedRun, Outcome, group_is_empty, run_forked
from tests.faults.forked import check as check_tries
from tests.rollout.sglang.fake_sglang import fake_servers
from tests.runs import make_task, read_metrics, training_metrics, with_sglang

Rows = dict[int, dict[str, Any]]
"""Metrics by step."""
STEPS = 12
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
HANG = 60.0
"""Seconds after which a signalled run counts as hanging; runs end within ten on a busy machine."""
INTERRUPTS = 7
"""Interrupts of a run."""
SLOW_REWARDS = """
import asyncio, time

async def awaited(args, sample):
    print("scoring", flush=True)
    await asyncio.sleep(100)

def blocking(args, samples):
    print("scoring", flush=True)
    time.sleep(100)
"""

HUNG_TOOLS = """
import asyncio, itertools, time

calls = itertools.count()

async def answer(args, sample, engine):
    turn = await engine.generate(sample.tokens)
    sample.append_response_tokens(
        args, tokens=turn.token_ids, log_probs=turn.log_probs, text=turn.text
    )
    if next(calls) >= 16:  # in the second rollout
        print("hanging", flush=True)
        return None
    return sample

async def hung_thread(args, sample, sampling_params, engine):
    return await answer(args, sample, engine) or await asyncio.to_thread(time.sleep, 10_000)

async def bare_except(args, sample, sampling_params, engine):
    while True:
        try:
            return await answer(args, sample, engine) or await engine.generate([])
        except:
            await asyncio.sleep(0.01)
"""


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    task = make_task(tmp_path_factory.mktemp("task"))
    prompts = task[task.index("--prompt-data") + 1]
    flags = [*task, "--num-rollout", str(STEPS), "--eval-prompt-data", prompts]
    return [*flags, "--eval-interval", "2", "--use-tis", "--update-weights-interval", "2"]


def uninterrupted(flags: list[str], directory: Path) -> Rows:
    """The metrics of an uninterrupted run, by step."""
    arguments = [*flags, "--save", str(directory / "save"), "--output-dir", str(directory / "run")]
    outcome = run_forked(arguments, directory, timeout=120)
    assert outcome.status == 0, outcome.error
    return by_step(directory / "run")


def by_step(run: Path) -> Rows:
    """The rows of metrics.jsonl by step; an interrupted evaluation has a separate row."""
    rows: Rows = {}
    for row in read_metrics(run):
        step = row["step"]
        metrics = training_metrics(row)
        reported = rows.setdefault(step, {})
        assert not reported.keys() & metrics.keys(), f"step {step} is reported twice"
        reported.update(metrics)
    return rows


def error_of(run: ForkedRun, outcome: Outcome, number: signal.Signals) -> str | None:
    """Describes a wrong end of a signalled run, or returns None."""
    if outcome.status is None:
        return f"hangs: {outcome.error}"
    if outcome.traceback or "Exception ignored" in outcome.error:
        return outcome.error
    if not group_is_empty(run.pid):
        return "left a process behind"
    if outcome.status == 0:  # the run was already complete
        return None
    if outcome.status not in (128 + number, -number):  # negative after the handlers are restored
        return f"status {outcome.status}: {outcome.error}"
    if outcome.status == 128 + number and number.name not in outcome.error:
        return f"does not say {number.name}: {outcome.error}"
    return None


def wait_until(condition: Callable[[], bool], run: ForkedRun, timeout: float) -> None:
    """Waits for a condition while the run lives."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and not has_ended(run) and not condition():
        time.sleep(0.0005)


def let_run(run: ForkedRun, seconds: float) -> None:
    """Waits while the run lives: signals at random moments have no event to wait for."""
    wait_until(lambda: False, run, seconds)


def has_ended(run: ForkedRun) -> bool:
    status = Path(f"/proc/{run.pid}/stat").read_text()
    # the state follows the name in brackets; Z is a process that its parent has not waited for
    return status.rpartition(")")[2].split()[0] == "Z"


def wait_for_words(run: ForkedRun, words: str) -> None:
    """Waits until the run has printed some words."""
    wait_until(
        lambda: words in run.stdout.read_text() or words in run.stderr.read_text(), run, HANG
    )


LOOKAHEADS = {"rollouts in flight": ["--rollout-lookahead", "2"], "no rollouts in flight": []}


@dataclass
class Reference:
    """Flags of a run, and the metrics of an uninterrupted run with them."""

    flags: list[str]
    rows: Rows


@pytest.fixture(scope="module", params=LOOKAHEADS)
def reference(
    request: pytest.FixtureRequest, flags: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    flags = [*flags, *LOOKAHEADS[request.param]]
    return Reference(flags, uninterrupted(flags, tmp_path_factory.mktemp("whole")))


@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_interrupted_at_random_moments_resumes_bitwise(
    seed: int, reference: Reference, tmp_path: Path
) -> None:
    """The run is interrupted several times, as a process or a group, until it completes."""
    chance = random.Random(seed)
    save = str(tmp_path / "save")
    arguments = [*reference.flags, "--save", save, "--load", save, "--save-interval", "3"]
    arguments += ["--output-dir", str(tmp_path / "run")]
    for attempt in range(INTERRUPTS):
        number = chance.choice(SIGNALS)
        group = chance.random() < 0.5
        run = ForkedRun(arguments, tmp_path / f"log{attempt}")
        let_run(run, chance.uniform(0.0, 3.0))
        if not has_ended(run):
            run.kill(number, group=group)
        assert error_of(run, run.wait(HANG), number) is None
    outcome = run_forked(arguments, tmp_path / "last", timeout=120)
    assert outcome.status == 0, outcome.error
    assert by_step(tmp_path / "run") == reference.rows


def sglang_arguments(flags: list[str], directory: Path, url: str) -> list[str]:
    """Arguments of four steps on a server, with all files below a directory."""
    arguments = [*with_sglang(flags), "--num-rollout", "4", "--update-weights-interval", "1"]
    arguments += ["--sglang-url", url, "--sglang-weight-dir", str(directory / "weights")]
    arguments += ["--save", str(directory / "save"), "--load", str(directory / "save")]
    return [*arguments, "--output-dir", str(directory / "run")]


def without_server_metrics(rows: Rows) -> Rows:
    """Metrics without those of servers, which count requests."""
    remaining: Rows = {}
    for step, row in rows.items():
        remaining[step] = {name: value for name, value in row.items() if "sglang" not in name}
    return remaining


@dataclass
class WaitingRun:
    """A run that is signalled while requests hang in a server, and resumed."""

    error: str | None
    """A wrong end of the signalled run; None if it ended as it should."""
    outcome: Outcome
    rows: Rows
    """Metrics after the resumed run."""
    expected: Rows
    """Metrics of an uninterrupted run."""


@pytest.fixture(scope="module")
def waiting_run(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> WaitingRun:
    directory = tmp_path_factory.mktemp("waiting")
    with fake_servers(2) as (other, server):
        whole = sglang_arguments(flags, directory / "whole", other.url)
        whole_outcome = run_forked(whole, directory / "log_whole", timeout=120)
        assert whole_outcome.status == 0, whole_outcome.error
        arguments = sglang_arguments(flags, directory / "signalled", server.url)
        run = ForkedRun(arguments, directory / "log")
        wait_for_words(run, "step 1/4")
        server.stop_after = 1
        wait_until(lambda: bool(server.held), run, HANG)
        run.kill(signal.SIGUSR1)
        outcome = run.wait(HANG)
        server.stop_after = None
        resumed = run_forked(arguments, directory / "log_resumed", timeout=120)
        assert resumed.status == 0, resumed.error
    return WaitingRun(
        error=error_of(run, outcome, signal.SIGUSR1),
        outcome=outcome,
        rows=without_server_metrics(by_step(directory / "signalled" / "run")),
        expected=without_server_metrics(by_step(directory / "whole" / "run")),
    )


def test_a_signal_ends_a_run_that_waits_for_a_server(waiting_run: WaitingRun) -> None:
    assert waiting_run.outcome.status
    assert waiting_run.error is None


def test_a_run_that_waited_for_a_server_resumes_bitwise(waiting_run: WaitingRun) -> None:
    assert waiting_run.rows == waiting_run.expected


def run_with_reward(reward: str, flags: list[str], directory: Path) -> ForkedRun:
    """A run that has begun to score samples with a function of `SLOW_REWARDS`."""
    (directory / "slow.py").write_text(SLOW_REWARDS)
    arguments = [*flags, "--custom-rm-path", f"{directory / 'slow.py'}:{reward}"]
    arguments += ["--skip-eval-before-train", "--output-dir", str(directory / "run")]
    run = ForkedRun(arguments, directory / "log")
    wait_for_words(run, "scoring")
    return run


def test_an_awaited_reward_is_cancelled_at_the_first_signal(
    flags: list[str], tmp_path: Path
) -> None:
    run = run_with_reward("awaited", flags, tmp_path)
    run.kill(signal.SIGINT)
    outcome = run.wait(HANG)
    assert outcome.status
    assert error_of(run, outcome, signal.SIGINT) is None


def test_a_blocking_reward_ends_at_the_second_signal(flags: list[str], tmp_path: Path) -> None:
    run = run_with_reward("blocking", flags, tmp_path)
    run.kill(signal.SIGINT)
    wait_for_words(run, "SIGINT")
    # Launchers pass a signal on, so a second one counts only if it comes later.
    let_run(run, 1.0)
    run.kill(signal.SIGTERM, group=True)
    outcome = run.wait(HANG)
    assert outcome.status
    assert error_of(run, outcome, signal.SIGTERM) is None


@pytest.mark.parametrize("engine", ["local", "sglang"])
@pytest.mark.parametrize("agent", ["hung_thread", "bare_except"])
def test_the_first_signal_stops_a_run_whose_tools_hang(
    agent: str, engine: str, flags: list[str], tmp_path: Path
) -> None:
    (tmp_path / "agents.py").write_text(HUNG_TOOLS)
    with fake_servers(1) as (server,):
        if engine == "sglang":
            flags = [*with_sglang(flags), "--sglang-url", server.url]
            flags += ["--update-weights-interval", "1"]
            flags += ["--sglang-weight-dir", str(tmp_path / "weights")]
        arguments = [*flags, "--save", str(tmp_path / "save"), "--skip-eval-before-train"]
        arguments += ["--custom-generate-function-path", f"{tmp_path / 'agents.py'}:{agent}"]
        run = ForkedRun([*arguments, "--output-dir", str(tmp_path / "run")], tmp_path / "log")
        wait_for_words(run, "hanging")
        run.kill(signal.SIGTERM)
        outcome = run.wait(HANG)
    assert outcome.status == 128 + signal.SIGTERM
    assert error_of(run, outcome, signal.SIGTERM) is None
    assert any((tmp_path / "save").glob("iter_*"))


KILLED_STEPS = 10
CHAINS = 5
"""Smallest number of runs."""
KILLS = 9
"""Kills of a run before it may complete."""
ENOUGH = {"anywhere": 8, "saving": 8, "after": 4}
"""Smallest number of kills of each kind: at any time, while a checkpoint is written, or shortly
after it."""
LIMIT = 120.0
"""Seconds after which a run counts as hanging."""


@pytest.fixture(scope="module")
def saving(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of a run that saves each step, with the rollout engine's stale weights."""
    task = make_task(tmp_path_factory.mktemp("task"), prompts=24)
    flags = [*task, "--num-rollout", str(KILLED_STEPS), "--rollout-shuffle"]
    flags += ["--save-interval", "1", "--save-retain", "2", "--update-weights-interval", "3"]
    return [*flags, "--use-tis", "--lr-decay-style", "cosine"]


def arguments_in(directory: Path, saving: list[str], *, resumes: bool = True) -> list[str]:
    """Arguments of a run with all files below a directory."""
    save = str(directory / "save")
    arguments = [*saving, "--save", save, "--save-hf", str(directory / "hf")]
    if resumes:
        arguments += ["--load", save]
    return [*arguments, "--output-dir", str(directory / "run")]


def results(directory: Path) -> tuple[list[dict[str, Any]], str]:
    """Metrics of all steps, and the checksum of the exported weights."""
    rows = []
    for row in read_metrics(directory / "run"):
        rows.append({"step": row["step"], **training_metrics(row)})
    weights = (directory / "hf" / "model.safetensors").read_bytes()
    return rows, hashlib.sha256(weights).hexdigest()


def kill_after(run: ForkedRun, moment: Callable[[], bool], delay: float) -> bool:
    """Kills a run `delay` seconds after a moment; returns whether the run was still alive."""
    wait_until(moment, run, LIMIT)
    let_run(run, delay)
    was_alive = not has_ended(run)
    run.kill(signal.SIGKILL)
    run.wait(LIMIT)
    return was_alive


def after_a_save(save: Path, count: int) -> Callable[[], bool]:
    """A condition: `count` new checkpoints exist."""
    present = {path.name for path in save.glob("iter_*")}
    return lambda: len({path.name for path in save.glob("iter_*")} - present) >= count


def within_a_save(save: Path, count: int) -> Callable[[], bool]:
    """A condition: a checkpoint is being written after `count` others."""
    has_enough = after_a_save(save, count)
    return lambda: has_enough() and any(save.glob(".iter_*.unfinished"))


def damage_of(save: Path) -> str | None:
    """The damage of a killed run's checkpoints; None if there is none."""
    for checkpoint in checkpoints(save):
        try:
            check(checkpoint, read_manifest(checkpoint))
        except ValueError as error:
            return f"{checkpoint.name}: {error}"
    return None


@dataclass
class KilledRuns:
    """Runs that are killed again and again, and at last complete."""

    failures: dict[str, dict[str, str | None]]
    """For each kind of kill, what each kill has damaged."""
    directories: list[Path]
    whole: Path
    """Directory of a run that is not killed."""


@pytest.fixture(scope="module", params=["0", "1"], ids=["lookahead 0", "lookahead 1"])
def killed_runs(
    request: pytest.FixtureRequest, saving: list[str], tmp_path_factory: pytest.TempPathFactory
) -> KilledRuns:
    parent = tmp_path_factory.mktemp("killed")
    saving = [*saving, "--rollout-lookahead", request.param]
    runs = KilledRuns({kind: {} for kind in ENOUGH}, [], parent / "whole")
    whole = run_forked(arguments_in(runs.whole, saving, resumes=False), runs.whole, timeout=LIMIT)
    assert whole.status == 0, whole.error
    chance = random.Random(0)
    for chain in range(3 * CHAINS):
        # a run that ended before the kill does not count, so more chains may be needed
        if chain >= CHAINS and all(len(runs.failures[kind]) >= ENOUGH[kind] for kind in ENOUGH):
            break
        directory = parent / str(chain)
        runs.directories.append(directory)
        for number in range(KILLS):
            kill_once(runs, directory, number, arguments_in(directory, saving), chance)
        outcome = run_forked(arguments_in(directory, saving), directory / "last", timeout=LIMIT)
        assert outcome.status == 0, outcome.error
    return runs


def kill_once(
    runs: KilledRuns, directory: Path, number: int, arguments: list[str], chance: random.Random
) -> None:
    """Starts or continues the run of a directory, kills it, and records the damage."""
    run = ForkedRun(arguments, directory / f"log_{number}")
    save = directory / "save"
    kinds: list[tuple[str, Callable[[], bool], float]] = [
        ("saving", within_a_save(save, chance.randint(0, 1)), 0.04),
        ("after", after_a_save(save, chance.randint(1, 2)), 0.004),
        ("anywhere", lambda: True, 1.4),
    ]
    kind, moment, delay = kinds[number % 3]
    if not kill_after(run, moment, chance.uniform(0, delay)):
        return
    failure = damage_of(save) if group_is_empty(run.pid) else "left a process running"
    runs.failures[kind][f"run {directory.name}, kill {number}"] = failure


@pytest.mark.parametrize("kind", ENOUGH)
def test_a_kill_damages_no_checkpoint(kind: str, killed_runs: KilledRuns) -> None:
    check_tries(killed_runs.failures[kind], at_least=ENOUGH[kind])


def test_a_killed_run_resumes_bitwise(killed_runs: KilledRuns) -> None:
    expected = results(killed_runs.whole)
    for directory in killed_runs.directories:
        assert results(directory) == expected


def test_kills_leave_no_unfinished_checkpoints(killed_runs: KilledRuns) -> None:
    for directory in killed_runs.directories:
        assert len(list((directory / "save").iterdir())) == 2
