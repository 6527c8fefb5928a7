"""User functions: loading, calls, the custom TIS contract, and runs of train.py."""

import asyncio
import functools
import importlib
import re
import sys
import textwrap
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_tis.errors import CustomFunctionError
from slime_tis.integrations.slime import TisResult
from slime_tis.user_functions import call_custom_tis, calling, load_custom_tis, load_function
from slime_tis.user_functions.calling import check_signature

MASKS = [torch.ones(2), torch.ones(1)]
Function = Callable[..., Any]


def call(function: Function, **arguments: Any) -> TisResult:
    loss = torch.ones(3, requires_grad=True) * 1  # with a grad_fn, as in training
    arguments = {"pg_loss": loss, "loss_masks": MASKS, **arguments}
    return call_custom_tis(function, None, **arguments)


def write_file(directory: Path, text: str, name: str = "mine.py") -> Path:
    file = directory / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(textwrap.dedent(text))
    return file


@pytest.mark.parametrize(
    "path",
    [
        "./mine.py:f",
        "~/mine.py:f",
        "link.py:f",
        "some.dots/a.b-c.py:f",
        "mine.py:Group.f",
        "pkg/mod.py:f",
    ],
)
def test_files_are_found(path: str, user_files: Path) -> None:
    before = list(sys.path)
    assert load_function(path)() == 7
    assert sys.path == before


@pytest.fixture
def user_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with files that import from their directories."""
    body = """
    from helper import value

    def f():
        return value

    class Group:
        f = staticmethod(f)
    """
    for name in ("mine.py", "some.dots/a.b-c.py"):
        file = write_file(tmp_path, body, name)
        write_file(file.parent, "value = 7", "helper.py")
    body = """
    from .helper import value
    from . import helper

    def f():
        return value
    """
    write_file(tmp_path, body, "pkg/mod.py")
    write_file(tmp_path, "value = 7", "pkg/helper.py")
    (tmp_path / "link.py").symlink_to("mine.py")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def counting_file(tmp_path: Path) -> Path:
    """A file that counts its executions."""
    text = """
    from __future__ import annotations
    import dataclasses, sys, typing

    runs = getattr(sys, "_runs_of_mine", 0) + 1
    sys._runs_of_mine = runs

    @dataclasses.dataclass
    class Bounds:
        upper: float = 2.0

    def f():
        return runs

    def g():
        return runs

    def hint():
        return typing.get_type_hints(Bounds)["upper"]
    """
    return write_file(tmp_path, text)


def test_file_is_executed_once(counting_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys, "_runs_of_mine", raising=False)
    link = counting_file.with_name("same.py")
    link.symlink_to(counting_file)
    paths = [f"{counting_file}:f", f"{counting_file}:g", f"{link}:g"]
    assert [load_function(path)() for path in paths] == [1, 1, 1]


def test_type_hints_of_a_file_are_resolved(counting_file: Path) -> None:
    assert load_function(f"{counting_file}:hint")() is float


def test_helpers_of_the_same_name_do_not_mix(tmp_path: Path) -> None:
    paths = []
    for name in ("a", "b"):
        write_file(tmp_path / name, f"value = {name!r}", "helper.py")
        file = write_file(tmp_path / name, "import helper\n\ndef f():\n    return helper.value\n")
        paths.append(f"{file}:f")
    assert [load_function(path)() for path in paths] == ["a", "b"]


@pytest.fixture
def late_import(tmp_path: Path) -> Function:
    """A function that imports a module when it is called."""
    write_file(tmp_path, "value = 7", "late_helper.py")
    write_file(tmp_path, "raise RuntimeError('not the standard library')", "wave.py")
    text = """
    import importlib

    def f(name):
        return importlib.import_module(name).value
    """
    return load_function(f"{write_file(tmp_path, text)}:f")


def test_function_imports_from_its_directory_when_called(late_import: Function) -> None:
    assert late_import("late_helper") == 7


def test_files_do_not_hide_the_standard_library(late_import: Function, tmp_path: Path) -> None:
    assert importlib.import_module("wave").__file__ != str(tmp_path / "wave.py")


def test_others_do_not_import_from_the_directory(late_import: Function) -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("late_helper")


NOT_FOUND = {
    "no dot": ("sqrt", "names no module and function"),
    "no module": ("nowhere.sqrt", "there is no module 'nowhere'"),
    "path without .py": ("dir/file.f", "there is no module 'dir/file'"),
    "no such function": ("math.square", "math has no function 'square'; it has"),
    "no file": ("nowhere/file.py:f", "there is no file nowhere/file.py"),
    "not Python": ("pyproject.toml:f", "is not a Python file"),
}


@pytest.mark.parametrize(("path", "message"), NOT_FOUND.values(), ids=NOT_FOUND)
def test_missing_function_is_one_short_message(path: str, message: str) -> None:
    with pytest.raises(CustomFunctionError, match=re.escape(message)) as caught:
        load_function(path)
    assert len(str(caught.value)) < 400


NOT_IMPORTED = {
    "syntax": ("def f(:", r"raised SyntaxError: .*/mine.py, line 1\)"),
    "raises": (
        "import os\n1 / 0",
        r"raised ZeroDivisionError: division by zero \(.*/mine.py, line 2\)",
    ),
    "its import raises": (
        "from helper_with_a_fault import x",
        r"RuntimeError: deep \(.*/helper_with_a_fault.py, line 2\)",
    ),
    "long text": (
        "raise RuntimeError('a\\nb\\x1b[31m' * 1000)",
        r"RuntimeError: a b\\x1b\[31ma b.*… ",
    ),
    "no such module": (
        "import not_there_at_all",
        "No module named 'not_there_at_all'.*install it, copy it",
    ),
    "module that slime has": (
        "from slime.ray.misc import x",
        "slime is not installed; of slime, this program only provides",
    ),
    "name that slime's module lacks": (
        "from slime.backends.megatron_utils.cp_utils import y",
        "cannot import name 'y'.*all_gather_with_cp",
    ),
    "exits": ("import sys\nsys.exit(0)", r"called sys.exit\(0\).*/mine.py, line 2"),
    "no text file": ("x = '\udcff'", "raised SyntaxError: .*utf-8"),
}


@pytest.mark.parametrize(("text", "message"), NOT_IMPORTED.values(), ids=NOT_IMPORTED)
def test_failed_import_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    write_file(tmp_path, "\nraise RuntimeError('deep')", "helper_with_a_fault.py")
    file = tmp_path / "mine.py"
    file.write_bytes(text.encode(errors="surrogateescape"))
    for _ in range(2):  # a failed import is tried again
        with pytest.raises(CustomFunctionError, match=message) as caught:
            load_function(f"{file}:f")
    assert len(str(caught.value).splitlines()) == 1


def failing(args: dict[str, Any], **kwargs: Any) -> Any:
    return args["missing"]


@functools.wraps(failing)
def wrapped(*args: Any, **kwargs: Any) -> Any:
    return failing(*args, **kwargs)


class Callables:
    def __call__(self, args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a\nb\x1b[2J" + "x" * 1000)


def message_of(function: Function, *args: Any) -> str:
    with pytest.raises(CustomFunctionError) as caught, calling(function):
        function(*args)
    return str(caught.value)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        pytest.param(failing, [{}], id="function"),
        pytest.param(functools.partial(failing, {}), [], id="partial"),
        pytest.param(wrapped, [{}], id="decorated"),
    ],
)
def test_exception_names_the_line_in_the_users_file(function: Function, args: list[Any]) -> None:
    line = failing.__code__.co_firstlineno + 1
    assert message_of(function, *args) == (
        f"failing ({__file__}, line {line}) raised KeyError: 'missing'. SLIME_TIS_TRACEBACK=1 shows"
        " the traceback."
    )


def test_long_exception_is_cut_to_one_line() -> None:
    message = message_of(Callables(), {})
    place = r"Callables \(.*test_custom.py, line \d+\)"
    assert re.search(place + r" raised RuntimeError: a b\\x1b\[2Jx+…", message)
    assert len(message) < 600
    assert "\n" not in message


def test_exit_is_an_exception() -> None:
    assert "called sys.exit('bye'); return a value" in message_of(sys.exit, "bye")


@pytest.mark.parametrize("error", [KeyboardInterrupt, asyncio.CancelledError])
def test_interrupts_pass_through(error: type[BaseException]) -> None:
    with pytest.raises(error), calling(failing):
        raise error


# slime's signature, without **kwargs
def slimes(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks,
           total_lengths, response_lengths):  # fmt: skip
    return pg_loss, loss_masks, {}


def keyword(*, args: Namespace, pg_loss: Tensor, loss_masks: list[Tensor], **_: Any) -> TisResult:
    return pg_loss, loss_masks, {"seen": pg_loss.detach() * args.value}


def test_slimes_signature_works() -> None:
    loss, _, _ = call(
        slimes,
        train_log_probs=[],
        rollout_log_probs=[],
        total_lengths=[],
        response_lengths=[],
        log_probs=[],
        cp_group=None,
    )
    assert loss.tolist() == [1, 1, 1]


def test_args_may_be_a_keyword() -> None:
    _, _, metrics = call_custom_tis(
        keyword, Namespace(value=5), pg_loss=torch.ones(3), loss_masks=MASKS
    )
    assert metrics["seen"].tolist() == [5, 5, 5]


WRONG_SIGNATURES = {
    "no arguments": ("def f(): pass", "got an unexpected keyword argument"),
    "other name": (
        "def f(options, **kw): pass",
        "missing a required argument: 'options'",
    ),
    "too few": ("def f(args, pg_loss): pass", "got an unexpected keyword argument"),
    "one more": (
        "def f(args, *, other, **kw): pass",
        "missing a required( keyword-only)? argument: 'other'",
    ),
    "only positional": ("def f(args, pg_loss, /, **kw): pass", "'args'"),
}


@pytest.mark.parametrize(("text", "message"), WRONG_SIGNATURES.values(), ids=WRONG_SIGNATURES)
def test_wrong_signature_is_refused(text: str, message: str, tmp_path: Path) -> None:
    file = write_file(tmp_path, text)
    pattern = rf"f \(.*, line 1\) cannot be called as f\(args=…, pg_loss=….*{message}"
    with pytest.raises(CustomFunctionError, match=pattern):
        load_custom_tis(f"{file}:f", Namespace())


def test_coroutine_is_refused(tmp_path: Path) -> None:
    file = write_file(tmp_path, "async def f(args, **kw): pass")
    with pytest.raises(CustomFunctionError, match="is a coroutine or a generator; write a plain"):
        load_custom_tis(f"{file}:f", Namespace())


def test_template_is_accepted() -> None:
    assert callable(load_custom_tis("custom_tis.template.soft_tis", Namespace()))


def test_function_without_a_signature_is_accepted() -> None:
    check_signature(max, ["args"], ["key"])


@pytest.fixture
def checked_path(tmp_path: Path) -> str:
    """A function whose module refuses --use-rs."""
    text = """
    def check_args(args):
        if args.use_rs:
            raise ValueError("--use-rs is not followed")

    def f(args, **kwargs):
        return None
    """
    return f"{write_file(tmp_path, text)}:f"


def test_module_accepts_options(checked_path: str) -> None:
    assert callable(load_custom_tis(checked_path, Namespace(use_rs=False)))


def test_module_refuses_options(checked_path: str) -> None:
    message = r"--custom-tis-function-path .*mine.py:f: --use-rs is not followed"
    with pytest.raises(CustomFunctionError, match=message):
        load_custom_tis(checked_path, Namespace(use_rs=True))


def double_precision(args: None, *, pg_loss: Tensor, loss_masks: list[Tensor]) -> list[Any]:
    return [pg_loss.double() / 3, tuple(loss_masks), {"m": pg_loss > 0}]


def test_double_precision_is_converted() -> None:
    loss, _, _ = call(double_precision)
    assert loss.dtype == torch.float32
    assert loss.requires_grad
    assert loss.tolist() == pytest.approx([1 / 3] * 3)


def test_list_with_tuple_of_masks_is_accepted() -> None:
    _, masks, metrics = call(double_precision)
    assert len(masks) == 2
    assert metrics["m"].all()


PARTIAL_MASKS = [torch.tensor([1, 0]), torch.ones(1)]


def test_mask_may_not_add_tokens() -> None:
    function = returning(masks=lambda kw: [torch.ones(2), torch.ones(1)])
    with pytest.raises(CustomFunctionError, match="a mask with 1 where the loss mask is 0"):
        call(function, loss_masks=PARTIAL_MASKS)


def test_masks_may_be_boolean() -> None:
    function = returning(masks=lambda kw: [mask.bool() for mask in kw["loss_masks"]])
    _, masks, _ = call(function, loss_masks=PARTIAL_MASKS)
    assert [mask.tolist() for mask in masks] == [[True, False], [True]]


def shorter(args: None, *, pg_loss: Tensor, loss_masks: list[Tensor]) -> TisResult:
    return pg_loss[:2], loss_masks, {}


def returning(**changed: Function) -> Function:
    """A custom function that changes its loss, masks or metrics."""

    def function(args: None, **kw: Any) -> tuple[Any, ...]:
        parts = {"loss": kw["pg_loss"], "masks": kw["loss_masks"], "metrics": {}}
        for name, change in changed.items():
            parts[name] = change(kw)
        return tuple(parts.values())

    return function


@torch.no_grad()
def without_grad(args: None, *, pg_loss: Tensor, loss_masks: list[Tensor]) -> TisResult:
    return pg_loss * 1, loss_masks, {}


NAN = float("nan")


def loss(change: Function) -> Function:
    return returning(loss=lambda kw: change(kw["pg_loss"]))


WRONG: dict[str, tuple[Function, str]] = {
    "loss alone": (
        lambda args, **kw: kw["pg_loss"],
        r"returned a tensor of shape \(3,\).*; return the tuple",
    ),
    "no metrics": (lambda args, **kw: (kw["pg_loss"], kw["loss_masks"]), "returned a tuple of 2"),
    "loss None": (loss(lambda _: None), r"function \(.*, line \d+\) returned NoneType as pg_loss"),
    "loss shorter": (
        shorter,
        r"shorter \(.*test_custom.py, line \d+\) returned .* shape \(2,\) .* as pg_loss",
    ),
    "loss on meta": (loss(lambda loss: loss.to("meta")), "on meta as pg_loss"),
    "loss of integers": (
        loss(lambda loss: loss.long()),
        "a pg_loss of torch.int64; return torch.float32",
    ),
    "loss detached": (loss(lambda loss: loss.detach()), "lost the gradient of pg_loss"),
    "loss without grad mode": (without_grad, "without_grad .*lost the gradient of pg_loss"),
    "loss NaN": (loss(lambda loss: loss * NAN), "made a finite pg_loss NaN or infinite, at 3 of 3"),
    "backward": (loss(lambda loss: loss.sum().backward()), "belongs to training"),
    "one mask of two": (returning(masks=lambda kw: kw["loss_masks"][:1]), "a list of 1 as masks"),
    "mask shorter": (returning(masks=lambda kw: [torch.ones(1), torch.ones(1)]), "as mask 0"),
    "mask NaN": (
        returning(masks=lambda kw: [torch.ones(2), torch.tensor([NAN])]),
        "a mask with nan in it",
    ),
    "mask below 0": (
        returning(masks=lambda kw: [-torch.ones(2), torch.ones(1)]),
        "a mask with -1 in it",
    ),
    "mask of halves": (
        returning(masks=lambda kw: [torch.ones(2) / 2, torch.ones(1)]),
        "a mask with 0.5 in it",
    ),
    "metrics None": (returning(metrics=lambda kw: None), "returned NoneType as metrics"),
    "metric a float": (returning(metrics=lambda kw: {"m": 1.0}), "returned float as metric 'm'"),
    "metric of two": (
        returning(metrics=lambda kw: {"m": torch.ones(2)}),
        r"shape \(2,\) .* as metric 'm'",
    ),
    "name 3": (returning(metrics=lambda kw: {3: torch.ones(3)}), "returned a metric named 3"),
}


@pytest.mark.parametrize(("function", "message"), WRONG.values(), ids=WRONG)
def test_wrong_return_is_named(function: Function, message: str) -> None:
    with pytest.raises(CustomFunctionError, match=message):
        call(function)


MIS = ["--custom-tis-function-path", "custom_tis.mis.compute_mis_weights_with_cp"]
TWO_STEPS = [
    "--num-rollout",
    "2",
    "--num-steps-per-rollout",
    "2",
    "--micro-batch-size",
    "4",
]
CORRECTIONS = {
    "token, one bound, veto": "--use-rs --rs-upper-bound 1.01 --rs-veto-threshold 0.95",
    "normalised over micro-batches": (
        "--use-tis --tis-level sequence --tis-mode clip --tis-batch-normalize"
    ),
    "share of the global batch": "--use-rs --rs-level sequence --rs-target-fraction 0.25",
}
COMPARED = [
    "train/loss",
    "train/grad_norm",
    "train/gradient_kept_fraction",
    "train/loss_denominator",
]
Run = Callable[..., list[dict[str, float]]]


def compared(rows: list[dict[str, float]]) -> dict[str, float]:
    values = {}
    for step, row in enumerate(rows):
        for name in COMPARED:
            values[f"{name} {step}"] = row[name]
    return values


@pytest.mark.parametrize("flags", CORRECTIONS.values(), ids=CORRECTIONS)
def test_mis_trains_as_the_built_in_correction(flags: str, run: Run) -> None:
    built_in = run(*flags.split(), *TWO_STEPS, name="built_in")
    custom = run(*flags.split(), *TWO_STEPS, *MIS, name="custom")
    assert compared(custom) == pytest.approx(compared(built_in), rel=1e-4, abs=1e-6)
    rejects = any(row["train/gradient_kept_fraction"] < 1 for row in built_in)
    assert rejects or "--tis-level sequence" in flags


CARELESS = """
import random
import torch

def fn(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **k):
    pg_loss.mul_(0.5).add_(1)
    for values in (train_log_probs, rollout_log_probs, loss_masks, k["advantages"], k["log_probs"]):
        for value in values:
            value.zero_()
    torch.manual_seed(random.randrange(9))
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    return pg_loss, loss_masks, {"loss": torch.full_like(pg_loss, 99.0)}
"""


def test_careless_function_does_not_change_a_measured_run(run: Run, tmp_path: Path) -> None:
    file = write_file(tmp_path, CARELESS, "half.py")
    flags = ["--get-mismatch-metrics", "--num-rollout", "2"]
    plain = run(*flags, name="plain")
    careless = run(*flags, "--custom-tis-function-path", f"{file}:fn", name="careless")
    assert [row["train/custom_loss"] for row in careless] == pytest.approx([99, 99])
    for row, other in zip(plain, careless, strict=True):
        names = [name for name in row if name.startswith(("train/", "rollout/"))]
        assert {name: other[name] for name in names} == {name: row[name] for name in names}


def test_opsm_masks_stale_samples_with_one_step_per_rollout(run: Run) -> None:
    flags = [
        "--use-opsm",
        "--opsm-delta",
        "0.005",
        "--update-weights-interval",
        "3",
        "--num-rollout",
        "3",
        "--rollout-precision",
        "fp32",
    ]
    rows = run(*flags)
    clipped = [row["train/opsm_clipfrac"] for row in rows]
    # In fp32 the engines agree: only weights of earlier steps make a difference.
    assert clipped[0] == 0 < max(clipped[1:])
    assert rows[-1]["rollout/weight_staleness"] == 2
