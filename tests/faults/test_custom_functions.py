"""Hostile custom functions: one message with file and line and exit status 2, or training that is right."""

import re
import textwrap
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime_tis.errors import CustomFunctionError
from slime_tis.trainer import setup
from slime_tis.user_functions import load_custom_tis
from tests.faults.forked import Outcome, run_forked
from tests.runs import make_task, read_metrics, run_apart

SIGNATURE = "args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kw"

CANNOT_BE_LOADED = {
    # content of the file: what the message must say
    "": "has no function 'fn'; it has none",
    "def fn(": r"SyntaxError: .* \(FILE, line 1\); correct the file",
    "def fn(args):\nreturn 1": r"IndentationError: .* \(FILE, line 2\)",
    "def fn():\n\tif 1:\n        pass": r"TabError: .*\(FILE, line 3\)",
    "import torch, not_installed_anywhere": r"No module named 'not_installed_anywhere' \(FILE, line 1\); install it",
    "from . import not_there": "cannot import name 'not_there'",
    "from .not_there import x": r"ModuleNotFoundError: .* \(FILE, line 1\)",
    "from ..above import x": "for imports beyond the file's own directory",
    "from ...further import x": "for imports beyond the file's own directory",
    "from slime.ray.rollout import x": "slime is not installed, and of its modules this program has",
    "import slime.rollout.nothing": "slime is not installed, and of its modules this program has",
    "from slime.backends.megatron_utils.cp_utils import zzz": "cannot import name 'zzz'",
    "from torch import no_such_name": r"cannot import name 'no_such_name' .*\(FILE, line 1\)",
    "x = {}\nx['k']": r"KeyError: 'k' \(FILE, line 2\)",
    "raise RuntimeError": r"raised RuntimeError \(FILE, line 1\)",
    "raise RuntimeError('a\\nb\\x1b[31m' * 1000)": r"RuntimeError: a b\\x1b\[31ma b.*… \(FILE, line 1\)",
    "class Odd(Exception):\n  def __str__(self): raise ValueError\nraise Odd": r"raised Odd \(FILE, line 3\)",
    "import sys; sys.exit(0)": r"called sys.exit\(0\).*FILE, line 1",
    "import sys; sys.exit('bye')": r"called sys.exit\('bye'\)",
    "quit()": r"called sys.exit\(None\)|NameError",
    "raise KeyboardInterrupt": r"raised KeyboardInterrupt \(FILE, line 1\)",
    "raise GeneratorExit": r"raised GeneratorExit \(FILE, line 1\)",
    "def f(n): return f(n + 1)\nf(0)": r"RecursionError: .* \(FILE, line 1\)",
    "fn = 3": "fn in .* is a int, and cannot be called",
    "fn = None": "fn in .* is a NoneType, and cannot be called",
    "def other(args): pass": "has no function 'fn'; it has other",
    "def fn(): pass": r"fn \(FILE, line 1\) cannot be called as fn\(args, pg_loss=…, .*too many positional",
    "def fn(args): pass": "cannot be called as .*unexpected keyword argument 'pg_loss'",
    "def fn(args, *, pg_loss, losses, **kw): pass": "missing a required (keyword-only )?argument: 'losses'",
    "def fn(args, pg_loss, train, /, **kw): pass": "cannot be called as",
    "fn = lambda: None": "cannot be called as",
    "async def fn(args, **kw): return kw['pg_loss'], kw['loss_masks'], {}": "is a coroutine or a generator",
    "def fn(args, **kw): yield 1": "is a coroutine or a generator",
    "def check_args(args): raise ValueError('not with me')\ndef fn(args, **kw): pass": "FILE:fn: not with me",
    "# -*- coding: nothing -*-": "SyntaxError: .*unknown encoding",
    "import mine_that_fails": r"ZeroDivisionError: division by zero \(.*mine_that_fails.py, line 2\)",
}


def test_what_cannot_be_loaded_is_one_message_with_file_and_line(tally: Any, tmp_path: Path) -> None:
    tried = tally("custom functions that cannot be loaded")
    (tmp_path / "mine_that_fails.py").write_text("\n1 / 0\n")
    for number, (text, expected) in enumerate(CANNOT_BE_LOADED.items()):
        file = tmp_path / f"case_{number}.py"
        file.write_text(text)
        try:
            load_custom_tis(f"{file}:fn", Namespace())
        except CustomFunctionError as error:
            tried.record(repr(text), _wrong_words(str(error), expected, file))
        except BaseException as error:
            tried.record(repr(text), f"raised {error!r}")
        else:
            tried.record(repr(text), "was loaded")
    tried.check(at_least=30)


def _wrong_words(message: str, expected: str, file: Path) -> str | None:
    if not re.search(expected.replace("FILE", re.escape(str(file))), message):
        return f"said {message!r}"
    if len(message) > 900 or not message.isprintable():
        return f"said {message[:2000]!r}"
    return None


LOSS, MASKS = "pg_loss", "loss_masks"
GOES_WRONG = {
    # what it does: body of the function, what the message must say (with the line where that is in the body)
    "raises": ("return 1 / 0", "ZeroDivisionError: division by zero.*|FILE, line 4"),
    "raises deep in torch": ("return pg_loss + torch.ones(99999)", r"FILE, line 4\) raised RuntimeError: The size"),
    "raises without words": ("raise ValueError", r"\(FILE, line 4\) raised ValueError\. SLIME"),
    "raises many lines": ("raise OSError('one\\ntwo\\x07')", r"raised OSError: one two\\x07\. SLIME"),
    "fails in a helper": (
        "import helper_beside\n    helper_beside.fail()",
        r"helper_beside.py, line 3\) raised KeyErr",
    ),
    "imports what is not there": ("import nothing_here", "No module named 'nothing_here'"),
    "recurses": ("return fn(args, pg_loss=pg_loss, train_log_probs=0, rollout_log_probs=0, loss_masks=0)", "Recursion"),
    "exits with 0": ("import sys; sys.exit(0)", r"called sys.exit\(0\); return a value"),
    "exits with 3": ("raise SystemExit(3)", r"called sys.exit\(3\)"),
    "interrupts": ("raise KeyboardInterrupt", r"FILE, line 4\) raised KeyboardInterrupt"),
    "stops": ("raise StopIteration", "raised StopIteration"),
    "asserts": ("assert False, 'never'", "raised AssertionError: never"),
    "writes past its tensors": ("pg_loss[10**6] = 0", "raised IndexError"),
    "returns nothing": ("return None", "returned NoneType; return the tuple"),
    "returns the loss alone": (f"return {LOSS}", r"returned a tensor of shape \(\d+,\); return the tuple"),
    "returns two": (f"return {LOSS}, {MASKS}", "returned a tuple of 2; return the tuple"),
    "returns a dict": ("return {}", "returned dict; return the tuple"),
    "a list as loss": (f"return {LOSS}.tolist(), {MASKS}, {{}}", r"returned a list of \d+ as pg_loss"),
    "a scalar loss": (f"return {LOSS}.mean(), {MASKS}, {{}}", r"a tensor of shape \(\) as pg_loss"),
    "a longer loss": (f"return {LOSS}.repeat(2), {MASKS}, {{}}", "one value per token as it was given"),
    "a loss of half precision": (f"return {LOSS}.half(), {MASKS}, {{}}", "a pg_loss of torch.float16"),
    "a loss of integers": (f"return {LOSS}.int(), {MASKS}, {{}}", "a pg_loss of torch.int32"),
    "a sparse loss": (f"return {LOSS}.to_sparse(), {MASKS}, {{}}", "a sparse_coo tensor"),
    "a loss elsewhere": (f"return {LOSS}.to('meta'), {MASKS}, {{}}", "on meta as pg_loss"),
    "a detached loss": (f"return {LOSS}.detach(), {MASKS}, {{}}", "lost the gradient of pg_loss"),
    "a loss of its own": (f"return torch.zeros_like({LOSS}, requires_grad=True), {MASKS}, {{}}", "lost the gradient"),
    "a leaf's loss": (
        f"return {LOSS}.detach() * torch.ones_like({LOSS}).requires_grad_(), {MASKS}, {{}}",
        "lost the gradient of pg_loss",
    ),
    "a loss without grad": (
        f"torch.set_grad_enabled(False)\n    return {LOSS} * 2, {MASKS}, {{}}",
        "lost the gradient",
    ),
    "a loss in inference mode": (
        f"with torch.inference_mode():\n        return {LOSS} * 2, {MASKS}, {{}}",
        "lost the gradient of pg_loss",
    ),
    "NaN": (f"return {LOSS} * float('nan'), {MASKS}, {{}}", r"made a finite pg_loss NaN or infinite, at \d+ of"),
    "infinity": (f"return {LOSS} + float('inf'), {MASKS}, {{}}", "made a finite pg_loss NaN or infinite"),
    "too large for float32": (f"return {LOSS}.double() + 1e300, {MASKS}, {{}}", "made a finite pg_loss NaN or infin"),
    "one infinite token": (
        f"weight = torch.ones_like({LOSS})\n    weight[0] = float('nan')\n    return {LOSS} * weight, {MASKS}, {{}}",
        "NaN or infinite, at 1 of",
    ),
    "no masks": (f"return {LOSS}, None, {{}}", "returned NoneType as masks"),
    "one flat mask": (f"return {LOSS}, torch.cat({MASKS}), {{}}", r"returned a tensor of shape \(\d+,\) as masks"),
    "too few masks": (f"return {LOSS}, {MASKS}[1:], {{}}", "a list of 7 as masks; return a list of 8"),
    "masks of another length": (f"return {LOSS}, [m[1:] for m in {MASKS}], {{}}", "as mask 0; return the whole"),
    "masks of numbers": (f"return {LOSS}, [m.tolist() for m in {MASKS}], {{}}", "a list of .* as mask 0"),
    "masks of NaN": (f"return {LOSS}, [m * float('nan') for m in {MASKS}], {{}}", "returned a mask with nan in it"),
    "complex masks": (f"return {LOSS}, [m * 1j for m in {MASKS}], {{}}", "as mask 0"),
    "calls backward": (f"{LOSS}.sum().backward()\n    return {LOSS}, {MASKS}, {{}}", "belongs to training"),
    "negative masks": (f"return {LOSS}, [-m for m in {MASKS}], {{}}", "returned a mask with -1 in it"),
    "weights as masks": (
        f"return {LOSS}, [m * 0.5 for m in {MASKS}], {{}}",
        "with 0.5 in it.* Weights go into pg_loss",
    ),
    "no metrics": (f"return {LOSS}, {MASKS}, None", "returned NoneType as metrics"),
    "metrics of numbers": (f"return {LOSS}, {MASKS}, {{'m': 1.0}}", "returned float as metric 'm'"),
    "metrics of one value": (f"return {LOSS}, {MASKS}, {{'m': torch.ones(1)}}", "as metric 'm'; return a tensor of"),
    "a complex metric": (f"return {LOSS}, {MASKS}, {{'m': {LOSS}.detach() * 1j}}", "as metric 'm'"),
    "a number as name": (f"return {LOSS}, {MASKS}, {{1: {LOSS}}}", "returned a metric named 1"),
    "a name for the terminal": (
        f"return {LOSS}, {MASKS}, {{'\\x1b[2J': {LOSS}}}",
        r"returned a metric named '\\\\?x1b",
    ),
    "other names each time": (
        f"args.calls = getattr(args, 'calls', 0) + 1\n    return {LOSS}, {MASKS}, {{str(args.calls): {LOSS}}}",
        "returned metric '1' for one micro-batch and not for another",
    ),
}
TRAINS_RIGHT = {
    # what it does, and training as with no weights at all must come of it
    "works in place on all but the loss": (
        "for values in (train_log_probs, rollout_log_probs, kw['advantages'], kw['log_probs']):\n"
        "        for value in values:\n            value.fill_(float('nan'))\n"
        "    masks = [m.clone() for m in loss_masks]\n    for m in loss_masks:\n        m.zero_()\n"
        "    loss_masks.clear()\n    return pg_loss, masks, {}"
    ),
    "sets everything that can be set": (
        "import os, random\n    torch.set_default_dtype(torch.float64)\n    torch.set_default_device('meta')\n"
        "    torch.manual_seed(1)\n    random.seed(1)\n    torch.use_deterministic_algorithms(True)\n"
        "    os.chdir('/')\n    loss = pg_loss * 1\n    torch.set_grad_enabled(False)\n    return loss, loss_masks, {}"
    ),
    "names its metrics like ours": (
        "names = ('loss', 'pg_loss', 'grad_norm', 'lr', 'mismatch_kl', 'custom_loss', 'a/b', 'ü')\n"
        "    return pg_loss, loss_masks, {name: torch.full_like(pg_loss.detach(), 99.0) for name in names}"
    ),
    "returns a list, tuples, bool masks and double precision": (
        "return [pg_loss.double(), tuple(m.bool() for m in loss_masks), {'seen': pg_loss > 0}]"
    ),
    "has metrics that are not finite": "return pg_loss, loss_masks, {'nan': pg_loss.detach() * float('nan')}",
    "prints and warns": (
        "import warnings\n    print('hello')\n    warnings.warn('hm')\n    return pg_loss, loss_masks, {}"
    ),
    "changes its options": "args.lr = 1e9\n    args.use_tis = False\n    return pg_loss, loss_masks, {}",
    "multiplies in place": "pg_loss.mul_(2).div_(2)\n    return pg_loss, loss_masks, {}",
}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [*make_task(tmp_path_factory.mktemp("task")), "--num-rollout", "1", "--micro-batch-size", "8"]


def _run(task: list[str], directory: Path, body: str, *flags: str) -> tuple[Outcome, Path]:
    directory.mkdir(parents=True)
    (directory / "helper_beside.py").write_text("\ndef fail():\n    return {}['x']\n")
    file = directory / "mine.py"
    file.write_text(f"import torch\n\ndef fn({SIGNATURE}):\n    {body}\n")
    path = ["--custom-tis-function-path", f"{file}:fn", "--output-dir", str(directory / "run")]
    return run_forked([*task, *(flags or ("--use-tis",)), *path], directory / "log"), file


def _wrong_end(outcome: Outcome, expected: str, file: Path) -> str | None:
    """What is wrong with the end of a run that had to be refused, or None."""
    errors = [line for line in outcome.error.splitlines() if not line.startswith("warning: ")]
    if outcome.status != 2 or outcome.traceback or len(errors) != 1:
        return f"status {outcome.status}, {outcome.error[-1500:]}"
    return _wrong_words(errors[0].removeprefix("error: "), expected, file)


@pytest.mark.parametrize("part", range(2))  # two parts, for the two workers of pytest-xdist
def test_what_goes_wrong_while_training_is_one_message(part: int, tally: Any, task: list[str], tmp_path: Path) -> None:
    tried = tally("custom functions that go wrong while training")
    for number, (name, (body, expected)) in list(enumerate(GOES_WRONG.items()))[part::2]:
        steps = () if name != "other names each time" else ("--use-tis", "--micro-batch-size", "4")
        outcome, file = _run(task, tmp_path / str(number), body, *steps)
        wrong = _wrong_end(outcome, expected, file)
        if wrong is None and "fn (" not in outcome.error and "helper_beside" not in outcome.error:
            wrong = f"does not name the function: {outcome.error}"
        tried.record(name, wrong)
    tried.check(at_least=len(GOES_WRONG) // 2)


def test_what_a_function_meddles_with_does_not_reach_training(tally: Any, task: list[str], tmp_path: Path) -> None:
    tried = tally("custom functions that meddle")
    expected = _trained(_run(task, tmp_path / "plain", "return pg_loss, loss_masks, {}")[0], tmp_path / "plain")
    assert expected is not None
    for number, (name, body) in enumerate(TRAINS_RIGHT.items()):
        outcome, _ = _run(task, tmp_path / str(number), body)
        found = _trained(outcome, tmp_path / str(number))
        wrong = f"{outcome.error[-1500:]}" if found is None else f"{found} instead of {expected}"
        tried.record(name, None if found == expected else wrong)
    tried.check(at_least=len(TRAINS_RIGHT))


def _trained(outcome: Outcome, directory: Path) -> list[float] | None:
    if outcome.status != 0:
        return None
    (row,) = read_metrics(directory / "run")
    names = ("loss", "grad_norm", "lr", "mismatch_kl", "gradient_kept_fraction")
    return [row[f"train/{name}"] for name in names]


def test_what_is_refused_is_refused_before_the_model_is_built(
    tally: Any, task: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*args: Any, **kwargs: Any) -> None:
        raise OSError("a model is being built")

    monkeypatch.setattr(setup, "TrainingEngine", build)  # runs are forks of this process
    tried = tally("custom functions refused at the start")
    (tmp_path / "broken.py").write_text("def fn(:\n")
    (tmp_path / "narrow.py").write_text("def fn(args): pass\n")
    tis, rm = "--custom-tis-function-path", "--custom-rm-path"
    for flags, expected in (
        (["--use-tis", tis, "nowhere.py:fn"], "there is no file nowhere.py"),
        (["--use-tis", tis, "broken.py:fn"], "SyntaxError"),
        (["--use-tis", tis, "narrow.py:fn"], "cannot be called as fn"),
        (["--use-tis", tis, "..tis.x"], "is not a module's name"),
        (["--use-tis", tis, "math.sqrt"], "cannot be called as"),
        (["--use-rs", tis, "custom_tis.tis.vanilla_tis"], "--use-rs is on, and vanilla_tis does not follow it"),
        (["--rs-second-moment-bound", "0.1", tis, "custom_tis.template.soft_tis"], "goes by the global batch"),
        ([rm, "nowhere.py:fn"], "there is no file nowhere.py"),
        ([rm, "broken.py:fn"], "SyntaxError"),
    ):
        directory = tmp_path / f"log_{tried.tries}"
        outcome = run_forked([*task, *flags, "--output-dir", str(directory / "run")], directory, cwd=tmp_path)
        tried.record(" ".join(flags), _wrong_end(outcome, expected, tmp_path / "none.py"))
    tried.check(at_least=9)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("{'a': pg_loss} if rank == 0 else {'b': pg_loss}", "returned metric 'a' for one rank and not for another"),
        ("{'a': pg_loss} if rank == 0 else {}", "returned metric 'a' for one rank and not for another"),
    ],
    ids=["other names", "none"],
)
def test_ranks_that_return_other_metrics_are_refused(
    names: str, message: str, tally: Any, task: list[str], tmp_path: Path
) -> None:
    tried = tally("custom functions that differ between ranks")
    file = tmp_path / "mine.py"
    body = f"rank = torch.distributed.get_rank()\n    return pg_loss, loss_masks, {names}"
    file.write_text(textwrap.dedent(f"import torch\n\ndef fn({SIGNATURE}):\n    {body}\n"))
    found = run_apart([*task, "--use-tis", "--custom-tis-function-path", f"{file}:fn"], tmp_path / "run", 2, 120)
    wrong = None if found.returncode == 2 and message in found.stderr else f"{found.returncode}: {found.stderr[-1500:]}"
    tried.record(names, wrong if "Traceback" not in found.stderr else found.stderr[-1500:])
    tried.check(at_least=1)
