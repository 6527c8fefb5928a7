"""User functions: loading, calls whose every failure is one message, the contract, and runs of train.py."""

import asyncio
import functools
import importlib
import re
import sys
import textwrap
from argparse import Namespace

import pytest
import torch

from slime_tis.errors import CustomFunctionError
from slime_tis.user_functions import call_custom_tis, calling, load_custom_tis, load_function
from slime_tis.user_functions.calling import check_signature

MASKS = [torch.ones(2), torch.ones(1)]


def call(function, **given):
    loss = torch.ones(3, requires_grad=True) * 1
    return call_custom_tis(function, None, **{"pg_loss": loss, "loss_masks": MASKS, **given})


def written(directory, text, name="mine.py"):
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
def test_files_are_found(path, tmp_path, monkeypatch):
    body = (
        "from helper import value\n\ndef f():\n    return value\n\nclass Group:\n    f ="
        " staticmethod(f)\n"
    )
    for name in ("mine.py", "some.dots/a.b-c.py"):
        written(tmp_path, body, name)
        written((tmp_path / name).parent, "value = 7", "helper.py")
    written(
        tmp_path,
        "from .helper import value\nfrom . import helper\n\ndef f():\n    return value",
        "pkg/mod.py",
    )
    written(tmp_path, "value = 7", "pkg/helper.py")
    (tmp_path / "links").mkdir()
    (tmp_path / "link.py").symlink_to("mine.py")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert load_function(path)() == 7
    assert sys.path == before


def test_a_file_is_run_once_and_knows_its_own_names(tmp_path):
    file = written(
        tmp_path,
        """
        from __future__ import annotations
        import dataclasses, sys, typing

        runs = getattr(sys, "_runs_of_mine", 0) + 1
        sys._runs_of_mine = runs

        @dataclasses.dataclass
        class Bounds:
            upper: float = 2.0

        def f():
            return runs, typing.get_type_hints(Bounds)["upper"]

        def g():
            return runs
        """,
    )
    (tmp_path / "same.py").symlink_to(file)
    assert load_function(f"{file}:f")() == (1, float)
    assert load_function(f"{file}:g")() == load_function(f"{tmp_path / 'same.py'}:g")() == 1


def test_helpers_of_the_same_name_do_not_mix(tmp_path):
    paths = []
    for name in ("a", "b"):
        written(tmp_path / name, f"value = {name!r}", "helper.py")
        file = written(tmp_path / name, "import helper\n\ndef f():\n    return helper.value\n")
        paths.append(f"{file}:f")
    assert [load_function(path)() for path in paths] == ["a", "b"]


def test_what_lies_beside_a_file_is_found_when_it_is_called_too_and_by_nobody_else(tmp_path):
    written(tmp_path, "value = 7", "late_helper.py")
    written(tmp_path, "raise RuntimeError('not the standard library')", "wave.py")
    text = """
    import importlib

    def f(name):
        return importlib.import_module(name).value
    """
    function = load_function(f"{written(tmp_path, text)}:f")
    assert importlib.import_module("wave").__file__ != str(tmp_path / "wave.py")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("late_helper")
    assert function("late_helper") == 7


NOT_FOUND = {
    "no dot": ("sqrt", "names no module and function"),
    "no module": ("nowhere.sqrt", "there is no module 'nowhere'"),
    "path without .py": ("dir/file.f", "there is no module 'dir/file'"),
    "no such function": ("math.square", "math has no function 'square'; it has"),
    "no file": ("nowhere/file.py:f", "there is no file nowhere/file.py"),
    "not Python": ("pyproject.toml:f", "is not a Python file"),
}


@pytest.mark.parametrize(("path", "message"), NOT_FOUND.values(), ids=NOT_FOUND)
def test_a_missing_function_is_one_short_message(path, message):
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
        "slime is not installed, and of its modules this program has",
    ),
    "name that slime's module lacks": (
        "from slime.backends.megatron_utils.cp_utils import y",
        "cannot import name 'y'.*all_gather_with_cp",
    ),
    "exits": ("import sys\nsys.exit(0)", r"called sys.exit\(0\).*/mine.py, line 2"),
    "no text file": ("x = '\udcff'", "raised SyntaxError: .*utf-8"),
}


@pytest.mark.parametrize(("text", "message"), NOT_IMPORTED.values(), ids=NOT_IMPORTED)
def test_a_file_that_cannot_be_imported_is_one_message_with_its_line(tmp_path, text, message):
    written(tmp_path, "\nraise RuntimeError('deep')", "helper_with_a_fault.py")
    file = tmp_path / "mine.py"
    file.write_bytes(text.encode(errors="surrogateescape"))
    for _ in range(2):  # a failed import is tried again
        with pytest.raises(CustomFunctionError, match=message) as caught:
            load_function(f"{file}:f")
    assert len(str(caught.value).splitlines()) == 1


def failing(args, **kwargs):
    return args["missing"]


@functools.wraps(failing)
def wrapped(*args, **kwargs):
    return failing(*args, **kwargs)


class Callables:
    def __call__(self, args, **kwargs):
        raise RuntimeError("a\nb\x1b[2J" + "x" * 1000)


def message_of(function, *args):
    with pytest.raises(CustomFunctionError) as caught, calling(function):
        function(*args)
    return str(caught.value)


def test_an_exception_is_one_message_with_the_line_in_the_users_file():
    line = failing.__code__.co_firstlineno + 1
    expected = (
        f"failing ({__file__}, line {line}) raised KeyError: 'missing'. SLIME_TIS_TRACEBACK=1 shows"
        " the traceback."
    )
    assert (
        message_of(failing, {})
        == message_of(functools.partial(failing, {}))
        == message_of(wrapped, {})
        == expected
    )
    long = message_of(Callables(), {})
    assert re.search(
        r"Callables \(.*test_custom.py, line \d+\) raised RuntimeError: a b\\x1b\[2Jx+…", long
    )
    assert len(long) < 600 and "\n" not in long
    assert "called sys.exit('bye'); return a value" in message_of(sys.exit, "bye")


@pytest.mark.parametrize("error", [KeyboardInterrupt, asyncio.CancelledError])
def test_signals_and_cancellations_pass_through(error):
    with pytest.raises(error), calling(failing):
        raise error


def slimes(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks,
           total_lengths, response_lengths):  # fmt: skip
    return pg_loss, loss_masks, {}


def keyword(*, args, pg_loss, loss_masks, **_):
    return pg_loss, loss_masks, {"seen": pg_loss.detach() * args.value}


def test_slimes_signature_without_kwargs_and_args_by_keyword_work():
    more = {
        "train_log_probs": [],
        "rollout_log_probs": [],
        "total_lengths": [],
        "response_lengths": [],
    }
    loss, _, _ = call(slimes, **more, log_probs=[], cp_group=None)
    assert loss.tolist() == [1, 1, 1]
    given = {"pg_loss": torch.ones(3), "loss_masks": MASKS}
    assert call_custom_tis(keyword, Namespace(value=5), **given)[2]["seen"].tolist() == [5, 5, 5]


def test_a_signature_that_does_not_fit_is_refused_before_it_is_called(tmp_path):
    cases = {
        "def f(): pass": "got an unexpected keyword argument",
        "def f(options, **kw): pass": "missing a required argument: 'options'",
        "def f(args, pg_loss): pass": "got an unexpected keyword argument",
        "def f(args, *, other, **kw): pass": "missing a required( keyword-only)? argument: 'other'",
        "def f(args, pg_loss, /, **kw): pass": "'args'",
    }
    for number, (text, message) in enumerate(cases.items()):
        file = written(tmp_path, text, f"case_{number}.py")
        with pytest.raises(
            CustomFunctionError,
            match=rf"f \(.*, line 1\) cannot be called as f\(args=…, pg_loss=….*{message}",
        ):
            load_custom_tis(f"{file}:f", Namespace())
    file = written(tmp_path, "async def f(args, **kw): pass", "asynchronous.py")
    with pytest.raises(CustomFunctionError, match="is a coroutine or a generator; write a plain"):
        load_custom_tis(f"{file}:f", Namespace())
    assert load_custom_tis("custom_tis.template.soft_tis", Namespace())
    check_signature(max, ["args"], ["key"])


def test_a_module_may_refuse_options(tmp_path):
    text = """
    def check_args(args):
        if args.use_rs:
            raise ValueError("--use-rs is not followed")

    def f(args, **kwargs):
        return None
    """
    path = f"{written(tmp_path, text)}:f"
    assert load_custom_tis(path, Namespace(use_rs=False))
    with pytest.raises(
        CustomFunctionError,
        match=r"--custom-tis-function-path .*mine.py:f: --use-rs is not followed",
    ):
        load_custom_tis(path, Namespace(use_rs=True))


def test_double_precision_and_masks_are_fitted_to_the_input():
    result = call(
        lambda args, **kw: [
            kw["pg_loss"].double() / 3,
            tuple(kw["loss_masks"]),
            {"m": kw["pg_loss"] > 0},
        ]
    )
    loss, masks, metrics = result
    assert (
        loss.dtype == torch.float32
        and loss.requires_grad
        and len(masks) == 2
        and metrics["m"].all()
    )
    assert loss.tolist() == pytest.approx([1 / 3] * 3)
    masks = [torch.tensor([1, 0]), torch.ones(1)]
    with pytest.raises(CustomFunctionError, match="a mask with 1 where the loss mask is 0"):
        call(returning(masks=lambda kw: [torch.ones(2), torch.ones(1)]), loss_masks=masks)
    _, found, _ = call(
        returning(masks=lambda kw: [m.bool() for m in kw["loss_masks"]]), loss_masks=masks
    )
    assert [mask.tolist() for mask in found] == [[True, False], [True]]


def shorter(args, *, pg_loss, loss_masks):
    return pg_loss[:2], loss_masks, {}


def returning(**changed):
    def function(args, **kw):
        parts = {"loss": kw["pg_loss"], "masks": kw["loss_masks"], "metrics": {}}
        parts |= {name: change(kw) for name, change in changed.items()}
        return tuple(parts.values())

    return function


@torch.no_grad()
def without_grad(args, *, pg_loss, loss_masks):
    return pg_loss * 1, loss_masks, {}


NAN = float("nan")


def loss(change):
    return returning(loss=lambda kw: change(kw["pg_loss"]))


WRONG = {
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
def test_a_wrong_return_is_named(function, message):
    with pytest.raises(CustomFunctionError, match=message):
        call(function)


MIS = ("--custom-tis-function-path", "custom_tis.mis.compute_mis_weights_with_cp")
TWO_STEPS = ("--num-rollout", "2", "--num-steps-per-rollout", "2", "--micro-batch-size", "4")
CORRECTIONS = {
    "token, one bound, veto": "--use-rs --rs-upper-bound 1.01 --rs-veto-threshold 0.95",
    "normalised over micro-batches": (
        "--use-tis --tis-level sequence --tis-mode clip --tis-batch-normalize"
    ),
    "share of the global batch": "--use-rs --rs-level sequence --rs-target-fraction 0.25",
}
SAME = ("train/loss", "train/grad_norm", "train/gradient_kept_fraction", "train/loss_denominator")


@pytest.mark.parametrize("flags", CORRECTIONS.values(), ids=CORRECTIONS)
def test_the_same_flags_train_alike_whoever_computes(flags, run):
    built_in = run(*flags.split(), *TWO_STEPS, name="built_in")
    custom = run(*flags.split(), *TWO_STEPS, *MIS, name="custom")
    for one, other in zip(built_in, custom, strict=True):
        assert [other[name] for name in SAME] == pytest.approx(
            [one[name] for name in SAME], rel=1e-4, abs=1e-6
        )
    if "--tis-level sequence" not in flags:
        assert any(row["train/gradient_kept_fraction"] < 1 for row in built_in)


def test_a_function_that_works_in_place_leaves_metrics_only_runs_as_they_are_to_the_bit(
    run, tmp_path
):
    file = tmp_path / "half.py"
    file.write_text(
        textwrap.dedent("""
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
            """)
    )
    flags = ("--get-mismatch-metrics", "--num-rollout", "2")
    plain = run(*flags, name="plain")
    careless = run(*flags, "--custom-tis-function-path", f"{file}:fn", name="careless")
    for row, other in zip(plain, careless, strict=True):
        assert other["train/custom_loss"] == pytest.approx(99)
        same = {
            name: value for name, value in row.items() if name.startswith(("train/", "rollout/"))
        }
        assert {name: other[name] for name in same} == same


def test_off_policy_sequence_masking_acts_on_stale_samples_with_one_step_per_rollout(run):
    flags = (
        "--use-opsm",
        "--opsm-delta",
        "0.005",
        "--update-weights-interval",
        "3",
        "--num-rollout",
        "3",
    )
    rows = run(*flags, "--rollout-precision", "fp32")
    clipped = [row["train/opsm_clipfrac"] for row in rows]
    assert clipped[0] == 0 < max(clipped[1:])  # the engines agree, and the weights do not
    assert rows[-1]["rollout/weight_staleness"] == 2
