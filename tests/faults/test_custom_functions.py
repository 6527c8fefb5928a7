"""Hostile user functions in runs of train.py: one message with file and line and exit status 2, or
unchanged training.

`tests/test_custom.py` and `tests/rollout/test_rewards.py` check every message of the contracts.
"""

from pathlib import Path

import pytest

from slime_tis.trainer import setup
from tests.faults.forked import Outcome, run_forked
from tests.runs import make_task, run_apart

HEAD = (
    "import torch\n\ndef fn(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks,"
    " **kw):\n    "
)
TIS = ("--use-tis", "--custom-tis-function-path")
REWARD = ("--custom-rm-path",)
GOES_WRONG: dict[str, tuple[tuple[str, ...], str, str]] = {
    # flags, code of a file, part of the message
    "raises deep in torch": (
        TIS,
        f"{HEAD}return pg_loss + torch.ones(99999)",
        "line 4) raised RuntimeError: The size",
    ),
    "fails in a helper": (
        TIS,
        f"{HEAD}import beside\n    beside.fail()",
        "beside.py, line 2) raised KeyError",
    ),
    "other names each time": (
        ("--micro-batch-size", "4", *TIS),
        (
            f"{HEAD}args.n = getattr(args, 'n', 0) + 1\n    return pg_loss, loss_masks,"
            " {str(args.n): pg_loss}"
        ),
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
    flags = make_task(tmp_path_factory.mktemp("task"))
    return [*flags, "--num-rollout", "1", "--micro-batch-size", "8"]


def run_with_function(task: list[str], directory: Path, code: str, *flags: str) -> Outcome:
    """A run whose user function `fn` has this code; the last flag takes its path."""
    directory.mkdir(parents=True)
    (directory / "beside.py").write_text("def fail():\n    return {}['x']\n")
    (directory / "mine.py").write_text(code)
    path = [*flags, f"{directory / 'mine.py'}:fn", "--output-dir", str(directory / "run")]
    return run_forked([*task, *path], directory / "log")


def assert_refused(outcome: Outcome, expected: str) -> None:
    """The run ends with status 2 and one readable line."""
    assert (outcome.status, outcome.traceback) == (2, False), outcome.error[-1500:]
    (message,) = outcome.messages
    assert expected in message
    assert len(message) < 900 and message.isprintable()


@pytest.mark.parametrize(("flags", "code", "expected"), GOES_WRONG.values(), ids=GOES_WRONG)
def test_a_failure_while_training_is_one_message(
    flags: tuple[str, ...], code: str, expected: str, task: list[str], tmp_path: Path
) -> None:
    outcome = run_with_function(task, tmp_path / "run", code, *flags)
    assert_refused(outcome, expected)
    # the function that failed is named: the user's own, or its helper's file
    assert "fn (" in outcome.error or "beside" in outcome.error


TIS_PATH = "--custom-tis-function-path"
UNUSABLE = {
    "nowhere": (["--use-tis", TIS_PATH, "nowhere.py:fn"], "there is no file nowhere.py"),
    "broken": (["--use-tis", TIS_PATH, "broken.py:fn"], "SyntaxError"),
    "options": (
        ["--rs-second-moment-bound", "0.1", TIS_PATH, "custom_tis.template.soft_tis"],
        "needs statistics of the global batch",
    ),
    "narrow": (["--custom-rm-path", "narrow.py:fn"], "cannot be called as fn"),
}


@pytest.mark.parametrize(("flags", "expected"), UNUSABLE.values(), ids=UNUSABLE)
def test_an_unusable_function_is_refused_before_the_model(
    flags: list[str],
    expected: str,
    task: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def build(*args: object, **kwargs: object) -> None:
        raise OSError("a model is being built")

    monkeypatch.setattr(setup, "TrainingEngine", build)  # runs are forks of this process
    (tmp_path / "broken.py").write_text("def fn(:\n")
    (tmp_path / "narrow.py").write_text("def fn(args): pass\n")
    argv = [*task, *flags, "--output-dir", str(tmp_path / "run")]
    assert_refused(run_forked(argv, tmp_path / "log", cwd=tmp_path), expected)


def test_ranks_that_return_other_metrics_are_refused(task: list[str], tmp_path: Path) -> None:
    body = (
        "rank = torch.distributed.get_rank()\n    return pg_loss, loss_masks, {'a': pg_loss} if"
        " rank == 0 else {}\n"
    )
    (tmp_path / "mine.py").write_text(HEAD + body)
    ended = run_apart([*task, *TIS, f"{tmp_path / 'mine.py'}:fn"], tmp_path / "run", 2, 120)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert "returned metric 'a' for one rank and not for another" in ended.stderr
