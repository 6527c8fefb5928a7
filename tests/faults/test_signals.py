"""SIGINT, SIGTERM and SIGUSR1 at any moment: the run saves and ends, no process remains, and resumption is bitwise."""

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.forked import ForkedRun, Outcome, group_is_empty, run_forked
from tests.rollout.sglang.fake_sglang import fake_servers
from tests.runs import make_task, read_metrics, training_metrics

STEPS = 12
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
HANG = 60.0
"""Seconds after which a signalled run counts as hanging; runs end within ten on a busy machine."""
SEEDS, INTERRUPTS = 2, 7
"""Number of runs, and interrupts of each run."""
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
    sample.append_response_tokens(args, tokens=turn.token_ids, log_probs=turn.log_probs, text=turn.text)
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
    return [*task, "--num-rollout", str(STEPS), "--eval-prompt-data", prompts, "--eval-interval", "2", "--use-tis",
            "--update-weights-interval", "2"]  # fmt: skip


@pytest.fixture(scope="module")
def expected(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, float]]:
    """The metrics of an uninterrupted run, by step."""
    directory = tmp_path_factory.mktemp("whole")
    arguments = [*flags, "--save", str(directory / "save"), "--output-dir", str(directory / "run")]
    outcome = run_forked(arguments, directory, timeout=120)
    assert outcome.status == 0, outcome.error
    return by_step(directory / "run")


def by_step(run: Path) -> dict[int, dict[str, float]]:
    """The rows of metrics.jsonl by step; an interrupted evaluation has a separate row."""
    found: dict[int, dict[str, float]] = {}
    for row in read_metrics(run):
        metrics = training_metrics(row)
        assert not found.get(row["step"], {}).keys() & metrics.keys(), f"step {row['step']} is reported twice"
        found.setdefault(row["step"], {}).update(metrics)
    return found


def wrong(run: ForkedRun, outcome: Outcome, number: signal.Signals) -> str | None:
    """Returns the error of an interrupted run, or None."""
    words = outcome.error.strip().splitlines()
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
    if outcome.status == 128 + number and not any(number.name in line for line in words):
        return f"does not say {number.name}: {outcome.error}"
    return None


def until(condition: Callable[[], bool], run: ForkedRun, timeout: float) -> bool:
    """Waits for a condition during the run; returns whether it came true."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and not has_ended(run):
        if condition():
            return True
        time.sleep(0.0005)
    return False


def has_ended(run: ForkedRun) -> bool:
    """Returns whether the run has ended; its process is not reaped yet."""
    return "Z" in Path(f"/proc/{run.pid}/stat").read_text().rpartition(")")[2].split()[:1]


def prints(run: ForkedRun, words: str) -> Callable[[], bool]:
    """A condition: the run has printed the words."""
    return lambda: any(path.exists() and words in path.read_text() for path in (run.stdout, run.stderr))


def test_runs_interrupted_at_random_moments_resume_bitwise(
    flags: list[str], expected: dict[int, dict[str, float]], tmp_path: Path, tally: Any
) -> None:
    """Each run is interrupted several times, as a process or a group, and resumed until it completes."""
    tries = tally("a signal at a random moment")
    for seed in range(SEEDS):
        chance = random.Random(seed)
        save, directory = str(tmp_path / f"save{seed}"), tmp_path / f"run{seed}"
        arguments = [*flags, "--save", save, "--load", save, "--save-interval", "3", "--output-dir", str(directory)]
        for attempt in range(INTERRUPTS):
            number, group = chance.choice(SIGNALS), chance.random() < 0.5
            run = ForkedRun(arguments, tmp_path / f"log{seed}_{attempt}")
            until(lambda: False, run, chance.uniform(0.0, 3.0))
            if not has_ended(run):
                run.kill(number, group=group)
            tries.record(f"{number.name}, seed {seed}, try {attempt}", wrong(run, run.wait(HANG), number))
        outcome = run_forked(arguments, tmp_path / f"last{seed}", timeout=120)
        failure = outcome.error if outcome.status else None
        if by_step(directory) != expected:
            failure = f"the metrics differ from those of an uninterrupted run: {by_step(directory)}"
        tries.record(f"the resumed run, seed {seed}", failure)
    tries.check(at_least=SEEDS * (INTERRUPTS + 1))


def test_a_signal_during_a_save_is_not_lost(
    flags: list[str], expected: dict[int, dict[str, float]], tmp_path: Path, tally: Any
) -> None:
    tries = tally("a signal during a save")
    save, directory = tmp_path / "save", tmp_path / "run"
    arguments = [*flags, "--save", str(save), "--load", str(save), "--output-dir", str(directory)]
    for attempt in range(8):
        number = SIGNALS[attempt % 3]
        run = ForkedRun([*arguments, "--save-interval", "1"], tmp_path / f"log{attempt}")
        until(lambda: any(save.glob(".iter_*")), run, HANG)
        if not has_ended(run):
            run.kill(number, group=attempt % 2 == 1)
        tries.record(f"{number.name} try {attempt}", wrong(run, run.wait(HANG), number))
    outcome = run_forked(arguments, tmp_path / "last", timeout=120)
    differs = outcome.status != 0 or by_step(directory) != expected
    tries.record("the resumed run", f"{outcome.error} {by_step(directory)}" if differs else None)
    tries.check(at_least=9)


def test_a_second_signal_during_a_save_ends_the_run_at_once_and_the_half_checkpoint_does_not_count(
    tmp_path: Path, tally: Any
) -> None:
    """SIGSTOP holds the run during a save until the second signal; late tries repeat."""
    tries = tally("a second signal during a save")
    task = make_task(tmp_path, hidden_size=512, intermediate_size=2048)  # a checkpoint of some 50 MB
    save, directory = tmp_path / "save", tmp_path / "run"
    arguments = [*task, "--num-rollout", "3", "--save", str(save), "--load", str(save), "--output-dir", str(directory)]
    first = run_forked([*arguments, "--num-rollout", "1"], tmp_path / "first", timeout=120)
    assert first.status == 0, first.error
    for attempt in range(9):
        number = SIGNALS[attempt % 3]
        run = ForkedRun([*arguments, "--save-interval", "1"], tmp_path / f"log{attempt}")
        until(lambda: any(save.glob(".iter_*")), run, HANG)
        run.kill(number)
        until(prints(run, number.name), run, HANG)
        run.kill(signal.SIGSTOP)
        unfinished = {path.name.removeprefix(".").split(".")[0] for path in save.glob(".iter_*")}
        if unfinished and not has_ended(run):
            until(lambda: False, run, 1.0)  # a second signal comes later than those that launchers pass on
            run.kill(signal.SIGTERM)
            run.kill(signal.SIGCONT)
            outcome = run.wait(HANG)
            failure = None if outcome.status == 128 + signal.SIGTERM else f"status {outcome.status}: {outcome.error}"
            if f"{number.name}: the run saves and stops" not in outcome.error or outcome.traceback:
                failure = failure or outcome.error
            tries.record(f"{number.name} try {attempt}", failure)
            break
        run.kill(signal.SIGCONT)
        run.wait(HANG)
    whole = {path.name for path in save.glob("iter_*")}
    last = run_forked(arguments, tmp_path / "last", timeout=120)
    tries.record("the resumed run", last.error if last.status else None)
    tries.record("the half checkpoint", f"{unfinished & whole} counts as whole" if unfinished & whole else None)
    steps = sorted(by_step(directory))
    tries.record("steps", None if steps == [1, 2, 3] else f"steps {steps}")
    tries.check(at_least=4)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_while_sglang_is_waited_for(
    number: signal.Signals, flags: list[str], tmp_path: Path, tally: Any
) -> None:
    """Requests hang in a server; the run saves and ends, and resumption gives the same metrics."""
    tries = tally("a signal while SGLang is waited for")
    place = flags.index("--rollout-precision")
    sglang = [*flags[:place], *flags[place + 2 :], "--num-rollout", "4", "--update-weights-interval", "1"]
    sglang += ["--rollout-engine", "sglang", "--sglang-weight-sync", "disk"]

    def line(name: str, url: str) -> list[str]:
        places = {"--save": "save", "--load": "save", "--output-dir": "run", "--sglang-weight-dir": "weights"}
        directories = [word for flag, place in places.items() for word in (flag, str(tmp_path / name / place))]
        return [*sglang, "--sglang-url", url, *directories]

    def trained(name: str) -> dict[int, dict[str, float]]:
        rows = by_step(tmp_path / name / "run")
        return {step: {k: v for k, v in row.items() if "sglang" not in k} for step, row in rows.items()}

    with fake_servers(2) as (other, server):
        whole = run_forked(line("whole", other.url), tmp_path / "log_whole", timeout=120)
        assert whole.status == 0, whole.error
        run = ForkedRun(line("signalled", server.url), tmp_path / "log")
        until(prints(run, "step 1/4"), run, HANG)
        server.stop_after = 1
        until(lambda: bool(server.held), run, HANG)
        run.kill(number)
        outcome = run.wait(HANG)
        failure = wrong(run, outcome, number)
        tries.record("the run", failure if outcome.status else f"status {outcome.status}: {outcome.output}")
        server.stop_after = None
        resumed = run_forked(line("signalled", server.url), tmp_path / "log_resumed", timeout=120)
        differs = resumed.status != 0 or trained("signalled") != trained("whole")
        tries.record("the resumed run", f"{resumed.error} {trained('signalled')}" if differs else None)
    tries.check(at_least=2)


@pytest.mark.parametrize("reward", ["awaited", "blocking"])
def test_slow_rewards_are_abandoned_or_end_at_the_second_signal(
    reward: str, flags: list[str], tmp_path: Path, tally: Any
) -> None:
    """A coroutine is cancelled at the first signal; a call that never returns is ended by the second one."""
    tries = tally("a signal while rewards take for ever")
    (tmp_path / "slow.py").write_text(SLOW_REWARDS)
    for number in SIGNALS:
        arguments = [*flags, "--custom-rm-path", f"{tmp_path / 'slow.py'}:{reward}", "--skip-eval-before-train"]
        run = ForkedRun([*arguments, "--output-dir", str(tmp_path / number.name)], tmp_path / f"log_{number.name}")
        until(prints(run, "scoring"), run, HANG)
        run.kill(number)
        if reward == "blocking":
            until(prints(run, number.name), run, HANG)
            until(lambda: False, run, 1.0)  # a second signal comes later than those that launchers pass on
            run.kill(signal.SIGTERM, group=True)
            outcome = run.wait(HANG)
            failure = wrong(run, outcome, signal.SIGTERM)
        else:
            outcome = run.wait(HANG)
            failure = wrong(run, outcome, number)
        tries.record(
            f"{number.name}, {reward}", failure or (f"took {outcome.seconds} s" if not outcome.status else None)
        )
    tries.check(at_least=3)


@pytest.mark.parametrize("agent", ["hung_thread", "bare_except"])
def test_the_first_signal_stops_a_run_whose_tools_hang(
    agent: str, flags: list[str], tmp_path: Path, tally: Any
) -> None:
    tries = tally("a signal while tools hang")
    (tmp_path / "agents.py").write_text(HUNG_TOOLS)
    place = flags.index("--rollout-precision")
    with fake_servers(1) as (server,):
        sglang = ["--rollout-engine", "sglang", "--sglang-url", server.url, "--sglang-weight-sync", "disk"]
        sglang += ["--sglang-weight-dir", str(tmp_path / "weights"), "--update-weights-interval", "1"]
        engines = {"local": flags, "sglang": [*flags[:place], *flags[place + 2 :], *sglang]}
        for name, number in zip(engines, (signal.SIGTERM, signal.SIGINT), strict=True):
            save = tmp_path / f"save_{name}"
            arguments = [*engines[name], "--save", str(save), "--skip-eval-before-train"]
            arguments += ["--custom-generate-function-path", f"{tmp_path / 'agents.py'}:{agent}"]
            run = ForkedRun([*arguments, "--output-dir", str(tmp_path / name)], tmp_path / f"log_{name}")
            until(prints(run, "hanging"), run, HANG)
            run.kill(number)
            outcome = run.wait(HANG)
            saved = outcome.status == 128 + number and any(save.glob("iter_*"))
            tries.record(f"{agent}, {name}", wrong(run, outcome, number) or (None if saved else outcome.error))
    tries.check(at_least=2)


def test_a_signal_during_the_export_leaves_a_whole_export_or_none(flags: list[str], tmp_path: Path, tally: Any) -> None:
    tries = tally("a signal during the export")
    arguments = [*flags, "--num-rollout", "1", "--skip-eval-before-train"]
    for attempt, number in enumerate(SIGNALS):
        export = tmp_path / f"hf{attempt}"
        run = ForkedRun(
            [*arguments, "--save-hf", str(export), "--output-dir", str(tmp_path / f"run{attempt}")],
            tmp_path / f"log{attempt}",
        )
        until(lambda export=export: any(export.parent.glob(f".{export.name}*")) or export.exists(), run, HANG)
        if not has_ended(run):
            run.kill(number)
        outcome = run.wait(HANG)
        failure = wrong(run, outcome, number)
        if export.exists() and not (export / "model.safetensors").exists():
            failure = "the export is not whole"
        if outcome.status == 0 and not export.exists():
            failure = "ended as complete without the export"
        tries.record(f"{number.name}", failure)
    tries.check(at_least=3)
