"""Signals and SIGKILL at any moment: files are complete, no process remains, resumption is bitwise
identical."""

import hashlib
import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from slime_tis.trainer.storage.checkpoint_files import check, checkpoints, read_manifest
from tests.faults.forked import ForkedRun, group_is_empty, run_forked
from tests.faults.forked import check as check_tries
from tests.rollout.sglang.fake_sglang import fake_servers
from tests.runs import make_task, read_metrics, training_metrics, with_sglang

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
def flags(tmp_path_factory):
    task = make_task(tmp_path_factory.mktemp("task"))
    prompts = task[task.index("--prompt-data") + 1]
    return [
        *task,
        "--num-rollout",
        str(STEPS),
        "--eval-prompt-data",
        prompts,
        "--eval-interval",
        "2",
        "--use-tis",
        "--update-weights-interval",
        "2",
    ]


@pytest.fixture(scope="module")
def expected(flags, tmp_path_factory):
    """The metrics of an uninterrupted run, by step."""
    directory = tmp_path_factory.mktemp("whole")
    arguments = [*flags, "--save", str(directory / "save"), "--output-dir", str(directory / "run")]
    outcome = run_forked(arguments, directory, timeout=120)
    assert outcome.status == 0, outcome.error
    return by_step(directory / "run")


def by_step(run):
    """The rows of metrics.jsonl by step; an interrupted evaluation has a separate row."""
    found = {}
    for row in read_metrics(run):
        metrics = training_metrics(row)
        assert not found.get(row["step"], {}).keys() & metrics.keys(), (
            f"step {row['step']} is reported twice"
        )
        found.setdefault(row["step"], {}).update(metrics)
    return found


def wrong(run, outcome, number):
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


def until(condition, run, timeout):
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and not has_ended(run):
        if condition():
            return True
        time.sleep(0.0005)
    return False


def has_ended(run):
    return "Z" in Path(f"/proc/{run.pid}/stat").read_text().rpartition(")")[2].split()[:1]


def prints(run, words):
    return lambda: any(
        path.exists() and words in path.read_text() for path in (run.stdout, run.stderr)
    )


@pytest.fixture(scope="module")
def ahead(flags, tmp_path_factory):
    """The flags of a run with rollouts in flight, and the metrics of an uninterrupted run, by
    step."""
    directory = tmp_path_factory.mktemp("ahead")
    flags = [*flags, "--rollout-lookahead", "2"]
    outcome = run_forked(
        [*flags, "--save", str(directory / "save"), "--output-dir", str(directory / "run")],
        directory,
        timeout=120,
    )
    assert outcome.status == 0, outcome.error
    return flags, by_step(directory / "run")


@pytest.mark.parametrize("seed", [0, 1])
def test_rollouts_in_flight_survive_interruptions_bitwise(seed, ahead, tmp_path):
    flags, expected = ahead
    interrupt_and_resume(flags, expected, tmp_path, seed)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_interrupted_at_random_moments_resumes_bitwise(seed, flags, expected, tmp_path):
    interrupt_and_resume(flags, expected, tmp_path, seed)


def interrupt_and_resume(flags, expected, tmp_path, seed):
    """The run is interrupted several times, as a process or a group, and resumed until it
    completes."""
    chance, save = random.Random(seed), str(tmp_path / "save")
    arguments = [
        *flags,
        "--save",
        save,
        "--load",
        save,
        "--save-interval",
        "3",
        "--output-dir",
        str(tmp_path / "run"),
    ]
    for attempt in range(INTERRUPTS):
        number, group = chance.choice(SIGNALS), chance.random() < 0.5
        run = ForkedRun(arguments, tmp_path / f"log{attempt}")
        until(lambda: False, run, chance.uniform(0.0, 3.0))
        if not has_ended(run):
            run.kill(number, group=group)
        assert wrong(run, run.wait(HANG), number) is None
    outcome = run_forked(arguments, tmp_path / "last", timeout=120)
    assert outcome.status == 0, outcome.error
    assert by_step(tmp_path / "run") == expected


def test_a_signal_while_sglang_is_waited_for(flags, tmp_path):
    """Requests hang in a server; the run saves and ends, and resumption gives the same metrics."""
    sglang = [*with_sglang(flags), "--num-rollout", "4", "--update-weights-interval", "1"]

    def line(name, url):
        places = {
            "--save": "save",
            "--load": "save",
            "--output-dir": "run",
            "--sglang-weight-dir": "weights",
        }
        directories = [
            word for flag, place in places.items() for word in (flag, str(tmp_path / name / place))
        ]
        return [*sglang, "--sglang-url", url, *directories]

    def trained(name):
        rows = by_step(tmp_path / name / "run")
        return {
            step: {k: v for k, v in row.items() if "sglang" not in k} for step, row in rows.items()
        }

    with fake_servers(2) as (other, server):
        whole = run_forked(line("whole", other.url), tmp_path / "log_whole", timeout=120)
        assert whole.status == 0, whole.error
        run = ForkedRun(line("signalled", server.url), tmp_path / "log")
        until(prints(run, "step 1/4"), run, HANG)
        server.stop_after = 1
        until(lambda: bool(server.held), run, HANG)
        run.kill(signal.SIGUSR1)
        outcome = run.wait(HANG)
        assert outcome.status and wrong(run, outcome, signal.SIGUSR1) is None
        server.stop_after = None
        resumed = run_forked(line("signalled", server.url), tmp_path / "log_resumed", timeout=120)
        assert resumed.status == 0, resumed.error
        assert trained("signalled") == trained("whole")


@pytest.mark.parametrize("reward", ["awaited", "blocking"])
def test_slow_rewards_are_abandoned_or_end_at_the_second_signal(reward, flags, tmp_path):
    """A coroutine is cancelled at the first signal; a call that never returns is ended by the
    second one."""
    (tmp_path / "slow.py").write_text(SLOW_REWARDS)
    number = signal.SIGINT
    arguments = [
        *flags,
        "--custom-rm-path",
        f"{tmp_path / 'slow.py'}:{reward}",
        "--skip-eval-before-train",
    ]
    run = ForkedRun([*arguments, "--output-dir", str(tmp_path / "run")], tmp_path / "log")
    until(prints(run, "scoring"), run, HANG)
    run.kill(number)
    if reward == "blocking":
        until(prints(run, number.name), run, HANG)
        until(
            lambda: False, run, 1.0
        )  # a second signal comes later than those that launchers pass on
        number = signal.SIGTERM
        run.kill(number, group=True)
    outcome = run.wait(HANG)
    assert outcome.status and wrong(run, outcome, number) is None


@pytest.mark.parametrize("engine", ["local", "sglang"])
@pytest.mark.parametrize("agent", ["hung_thread", "bare_except"])
def test_the_first_signal_stops_a_run_whose_tools_hang(agent, engine, flags, tmp_path):
    (tmp_path / "agents.py").write_text(HUNG_TOOLS)
    with fake_servers(1) as (server,):
        if engine == "sglang":
            flags = [
                *with_sglang(flags),
                "--sglang-url",
                server.url,
                "--update-weights-interval",
                "1",
            ]
            flags += ["--sglang-weight-dir", str(tmp_path / "weights")]
        arguments = [*flags, "--save", str(tmp_path / "save"), "--skip-eval-before-train"]
        arguments += ["--custom-generate-function-path", f"{tmp_path / 'agents.py'}:{agent}"]
        run = ForkedRun([*arguments, "--output-dir", str(tmp_path / "run")], tmp_path / "log")
        until(prints(run, "hanging"), run, HANG)
        run.kill(signal.SIGTERM)
        outcome = run.wait(HANG)
    assert outcome.status == 128 + signal.SIGTERM and wrong(run, outcome, signal.SIGTERM) is None
    assert any((tmp_path / "save").glob("iter_*"))


KILLED_STEPS = 10
CHAINS, KILLS, ENOUGH = 5, 9, {"anywhere": 8, "saving": 8, "after": 4}
"""Runs, kills per run, and the minimum number of kills of each kind."""
LIMIT = 120.0


@pytest.fixture(scope="module")
def saving(tmp_path_factory):
    task = make_task(tmp_path_factory.mktemp("task"), prompts=24)
    return [
        *(
            *task,
            "--num-rollout",
            str(KILLED_STEPS),
            "--save-interval",
            "1",
            "--save-retain",
            "2",
            "--rollout-shuffle",
        ),
        *(
            "--update-weights-interval",
            "3",
            "--use-tis",
            "--lr-decay-style",
            "cosine",
        ),  # stale weights are saved too
    ]


def own(saving, directory, *, resumes=True):
    save = str(directory / "save")
    load = ["--load", save] if resumes else []
    return [
        *saving,
        "--save",
        save,
        *load,
        "--save-hf",
        str(directory / "hf"),
        "--output-dir",
        str(directory / "run"),
    ]


def results(directory):
    rows = [
        {"step": row["step"], **training_metrics(row)} for row in read_metrics(directory / "run")
    ]
    return [
        *rows,
        hashlib.sha256((directory / "hf" / "model.safetensors").read_bytes()).hexdigest(),
    ]


def kill(run, moment, delay):
    """Kills a run `delay` seconds after a moment; returns whether the run was still alive."""
    process = psutil.Process(run.pid)
    while process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < run.started + LIMIT:
        if moment():
            time.sleep(delay)
            break
        time.sleep(0.001)
    reached = process.status() != psutil.STATUS_ZOMBIE
    run.kill(signal.SIGKILL)
    run.wait(LIMIT)
    return reached


def after_a_save(save, count):
    """A condition: `count` new checkpoints exist."""
    present = {path.name for path in save.glob("iter_*")}
    return lambda: len({path.name for path in save.glob("iter_*")} - present) >= count


def within_a_save(save, count):
    """A condition: a checkpoint is being written after `count` others."""
    enough = after_a_save(save, count)
    return lambda: enough() and any(save.glob(".iter_*.unfinished"))


def damage(save):
    """Returns the damage of a killed run's checkpoints, or None."""
    for checkpoint in checkpoints(save):
        try:
            check(checkpoint, read_manifest(checkpoint))
        except ValueError as error:
            return f"{checkpoint.name}: {error}"
    return None


@pytest.mark.parametrize("lookahead", ["0", "1"])
def test_a_killed_run_resumes_bitwise(saving, lookahead, tmp_path):
    saving = [*saving, "--rollout-lookahead", lookahead]
    whole = run_forked(
        own(saving, tmp_path / "whole", resumes=False), tmp_path / "whole", timeout=LIMIT
    )
    assert whole.status == 0, whole.error
    chance = random.Random(0)
    kills = {kind: {} for kind in ENOUGH}
    for chain in range(3 * CHAINS):
        if chain >= CHAINS and all(len(kills[kind]) >= enough for kind, enough in ENOUGH.items()):
            break  # a run that ended before the kill does not count
        directory = tmp_path / str(chain)
        save = directory / "save"
        for number in range(KILLS):
            run = ForkedRun(own(saving, directory), directory / f"log_{number}")
            kind, moment, delay = [
                ("saving", within_a_save(save, chance.randint(0, 1)), 0.04),
                ("after", after_a_save(save, chance.randint(1, 2)), 0.004),
                ("anywhere", lambda: True, 1.4),
            ][number % 3]
            if kill(run, moment, chance.uniform(0, delay)):
                failure = damage(save) if group_is_empty(run.pid) else "left a process running"
                kills[kind][f"run {chain}, kill {number}"] = failure
        outcome = run_forked(own(saving, directory), directory / "last", timeout=LIMIT)
        assert outcome.status == 0, outcome.error
        assert results(directory) == results(tmp_path / "whole")
        assert len(list(save.iterdir())) == 2
    for kind, enough in ENOUGH.items():
        check_tries(kills[kind], at_least=enough)
