"""Hostile user functions in whole runs: one message with file and line and exit status 2, or unchanged training.

`tests/test_custom.py` and `tests/rollout/test_rewards.py` check every message of the contracts.
"""

from pathlib import Path
from typing import Any

import pytest

from slime_tis.trainer import setup
from tests.faults.forked import Outcome, check, run_forked
from tests.runs import make_task, run_apart

HEAD = "import torch\n\ndef fn(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kw):\n    "
TIS, REWARD = ("--use-tis", "--custom-tis-function-path"), ("--custom-rm-path",)
GOES_WRONG = {
    # flags, code of a file, part of the message
    "raises deep in torch": (TIS, f"{HEAD}return pg_loss + torch.ones(99999)", "line 4) raised RuntimeError: The size"),
    "fails in a helper": (TIS, f"{HEAD}import beside\n    beside.fail()", "beside.py, line 2) raised KeyError"),
    "exits with 0": (TIS, f"{HEAD}import sys; sys.exit(0)", "called sys.exit(0); return a value"),
    "other names each time": (
        ("--micro-batch-size", "4", *TIS),
        f"{HEAD}args.n = getattr(args, 'n', 0) + 1\n    return pg_loss, loss_masks, {{str(args.n): pg_loss}}",
        "returned metric '1' for one micro-batch and not for another",
    ),
    "hostile repr": (
        REWARD,
        "class X:\n    def __repr__(self): raise SystemExit(0)\ndef fn(args, sample): return X()",
        "line 2) called sys.exit(0)",
    ),
    "recursion": (REWARD, "def fn(args, sample): return fn(args, sample)", "raised RecursionError"),
    "metadata without end": (
        REWARD,
        "def fn(args, sample):\n    sample.metadata['self'] = sample.metadata\n    return 1",
        "its metadata nests deeper than 100 levels",
    ),
}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [*make_task(tmp_path_factory.mktemp("task")), "--num-rollout", "1", "--micro-batch-size", "8"]


def _run(task: list[str], directory: Path, code: str, *flags: str) -> Outcome:
    directory.mkdir(parents=True)
    (directory / "beside.py").write_text("def fail():\n    return {}['x']\n")
    (directory / "mine.py").write_text(code)
    path = [*flags, f"{directory / 'mine.py'}:fn", "--output-dir", str(directory / "run")]
    return run_forked([*task, *path], directory / "log")


def _wrong_end(outcome: Outcome, expected: str) -> str | None:
    """What is wrong with the end of a run that had to be refused, or None."""
    errors = [line for line in outcome.error.splitlines() if not line.startswith("warning: ")]
    if outcome.status != 2 or outcome.traceback or len(errors) != 1:
        return f"status {outcome.status}, {outcome.error[-1500:]}"
    is_readable = len(errors[0]) < 900 and errors[0].isprintable()
    return None if expected in errors[0] and is_readable else f"said {errors[0][:2000]!r}"


@pytest.mark.parametrize("part", range(2))  # two parts, for the two workers of pytest-xdist
def test_a_failure_while_training_is_one_message(part: int, task: list[str], tmp_path: Path) -> None:
    tried: dict[str, str | None] = {}
    for number, (name, (flags, code, expected)) in list(enumerate(GOES_WRONG.items()))[part::2]:
        outcome = _run(task, tmp_path / str(number), code, *flags)
        wrong = _wrong_end(outcome, expected)
        if wrong is None and "fn (" not in outcome.error and "beside" not in outcome.error:
            wrong = f"does not name the function: {outcome.error}"
        tried[name] = wrong
    check(tried, at_least=len(GOES_WRONG) // 2)


def test_a_function_that_cannot_be_used_is_refused_before_the_model_is_built(
    task: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*args: Any, **kwargs: Any) -> None:
        raise OSError("a model is being built")

    monkeypatch.setattr(setup, "TrainingEngine", build)  # runs are forks of this process
    tried: dict[str, str | None] = {}
    (tmp_path / "broken.py").write_text("def fn(:\n")
    (tmp_path / "narrow.py").write_text("def fn(args): pass\n")
    tis, rm = "--custom-tis-function-path", "--custom-rm-path"
    for flags, expected in (
        (["--use-tis", tis, "nowhere.py:fn"], "there is no file nowhere.py"),
        (["--use-tis", tis, "broken.py:fn"], "SyntaxError"),
        (["--rs-second-moment-bound", "0.1", tis, "custom_tis.template.soft_tis"], "goes by the global batch"),
        ([rm, "narrow.py:fn"], "cannot be called as fn"),
    ):
        directory = tmp_path / f"log_{len(tried)}"
        outcome = run_forked([*task, *flags, "--output-dir", str(directory / "run")], directory, cwd=tmp_path)
        tried[" ".join(flags)] = _wrong_end(outcome, expected)
    check(tried)


def test_ranks_that_return_other_metrics_are_refused(task: list[str], tmp_path: Path) -> None:
    body = "rank = torch.distributed.get_rank()\n    return pg_loss, loss_masks, {'a': pg_loss} if rank == 0 else {}\n"
    (tmp_path / "mine.py").write_text(HEAD + body)
    ended = run_apart([*task, *TIS, f"{tmp_path / 'mine.py'}:fn"], tmp_path / "run", 2, 120)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert "returned metric 'a' for one rank and not for another" in ended.stderr
