"""Loading a user's function, and holding it to the contract."""

from pathlib import Path
from typing import Any

import pytest
import torch

from slime_tis.custom import call_custom_tis, load_function

MASKS = [torch.ones(2), torch.ones(1)]


def call(function: Any) -> Any:
    loss = torch.ones(3, requires_grad=True)
    return call_custom_tis(function, None, pg_loss=loss, loss_masks=MASKS)


def test_both_path_forms(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def double(x):\n    return 2 * x\n")
    assert load_function(f"{file}:double")(4) == 8
    assert load_function("math.sqrt")(9) == 3


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("sqrt", "'sqrt' names no module; write package.module.function or path/file.py:function"),
        ("nowhere.sqrt", "there is no module 'nowhere'; is its directory on PYTHONPATH?"),
        ("math.square", "math has no function 'square'; it has"),
        ("nowhere/file.py:f", "there is no file nowhere/file.py"),
        ("README:f", "there is no file README|README is not a Python file"),
    ],
)
def test_what_cannot_be_loaded_is_said(path: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        load_function(path)


def test_a_good_function_passes() -> None:
    loss, masks, metrics = call(lambda args, *, pg_loss, loss_masks: (pg_loss * 2, loss_masks, {"m": pg_loss.detach()}))
    assert loss.tolist() == [2, 2, 2] and len(masks) == 2 and metrics["m"].tolist() == [1, 1, 1]


def shorter(args: Any, *, pg_loss: torch.Tensor, loss_masks: list) -> Any:
    return pg_loss[:2], loss_masks, {}


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (lambda args, **kw: kw["pg_loss"], r"returned a tensor of shape \(3,\); return the tuple"),
        (lambda args, **kw: (None, kw["loss_masks"], {}), "returned NoneType as pg_loss"),
        (shorter, r"tests.test_custom.shorter returned a tensor of shape \(2,\) as pg_loss"),
        (lambda args, **kw: (kw["pg_loss"].long(), kw["loss_masks"], {}), "a pg_loss of torch.int64"),
        (lambda args, **kw: (kw["pg_loss"].detach(), kw["loss_masks"], {}), "lost the gradient of pg_loss"),
        (lambda args, **kw: (kw["pg_loss"] * torch.nan, kw["loss_masks"], {}), "made a finite pg_loss NaN or infinite"),
        (lambda args, **kw: (kw["pg_loss"], kw["loss_masks"][:1], {}), "a list of 1 as masks; return a list of 2"),
        (lambda args, **kw: (kw["pg_loss"], [torch.ones(1), torch.ones(1)], {}), r"as mask 0; return the whole"),
        (lambda args, **kw: (kw["pg_loss"], kw["loss_masks"], None), "returned NoneType as metrics"),
        (lambda args, **kw: (kw["pg_loss"], kw["loss_masks"], {"m": 1.0}), "returned float as metric 'm'"),
    ],
)
def test_a_wrong_return_is_named(function: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call(function)
