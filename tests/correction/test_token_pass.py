"""Which token pass is chosen: `SLIME_TIS_TOKEN_PASS`, the device, and whether triton is there."""

import warnings
from collections.abc import Iterator

import pytest
import torch

from slime_tis import RolloutCorrectionConfig, correct
from slime_tis.correction import token_pass
from slime_tis.correction.token_pass import VARIABLE, uses_triton

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(params=[False, True], ids=["without triton", "with triton"])
def installed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    monkeypatch.setattr(token_pass, "_triton_is_installed", lambda: request.param)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    token_pass._warn_of_eager.cache_clear()
    yield request.param


def test_unset_is_eager(installed: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert uses_triton(CPU) is False and uses_triton(CUDA) is False


def test_a_cpu_is_eager_and_says_nothing(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "auto")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert uses_triton(CPU) is False


def test_a_gpu_uses_triton_and_warns_once_where_there_is_none(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "auto")
    if installed:
        assert uses_triton(CUDA) is True
        return
    with pytest.warns(UserWarning, match="triton is not installed.*SLIME_TIS_TOKEN_PASS=eager"):
        assert uses_triton(CUDA) is False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert uses_triton(CUDA) is False


def test_eager_on_request(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert uses_triton(CUDA) is False


def test_triton_on_request_is_refused_where_it_cannot_run(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "triton")
    with pytest.raises(ValueError, match="the tensors are on cpu" if installed else "which is not installed"):
        uses_triton(CPU)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    if installed:
        assert uses_triton(CPU) and uses_triton(CUDA)


def test_an_unknown_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "tritn")
    with pytest.raises(ValueError, match="SLIME_TIS_TOKEN_PASS is 'tritn'; set it to auto, triton or eager"):
        correct(RolloutCorrectionConfig(use_tis=True), torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2))
