"""The modules of slime that user functions import."""

import importlib
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slime_tis import context_parallel_slices
from slime_tis.integrations import slime_modules
from slime_tis.user_functions import load_function
from tests.runs import free_port, spawn

TOTAL = 23
RESPONSE = 20
WHOLE = torch.arange(1.0, RESPONSE + 1)


@pytest.fixture
def cp_utils() -> ModuleType:
    slime_modules.provide()
    return importlib.import_module("slime.backends.megatron_utils.cp_utils")


def test_one_rank_gathers_its_own_tensor(cp_utils: ModuleType) -> None:
    assert cp_utils.all_gather_with_cp(WHOLE, TOTAL, RESPONSE) is WHOLE


def test_one_rank_has_the_complete_list(cp_utils: ModuleType) -> None:
    log_probs = [0.5] * RESPONSE
    assert cp_utils.slice_log_prob_with_cp(log_probs, TOTAL, RESPONSE) == log_probs


def test_log_probs_of_another_length_are_refused(cp_utils: ModuleType) -> None:
    with pytest.raises(ValueError, match="log_prob has 3 values but response_length is 20"):
        cp_utils.slice_log_prob_with_cp([0.0] * 3, TOTAL, RESPONSE)


def test_other_modules_of_slime_are_missing() -> None:
    slime_modules.provide()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("slime.ray")


def test_finder_is_added_once() -> None:
    slime_modules.provide()
    slime_modules.provide()
    assert sum(isinstance(finder, slime_modules.Finder) for finder in sys.meta_path) == 1


@pytest.fixture(scope="module")
def installed_slime_names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, ...]]:
    """Names that a user function imports while a slime of its own is installed."""
    folder = tmp_path_factory.mktemp("slime")
    package = folder / "slime" / "backends" / "megatron_utils"
    package.mkdir(parents=True)
    for directory in (package, package.parent, package.parent.parent):
        (directory / "__init__.py").touch()
    (package / "cp_utils.py").write_text("all_gather_with_cp = 'theirs'\nother = 'theirs'")
    (package / "model.py").write_text("name = 'theirs'")
    file = folder / "mine.py"
    file.write_text(
        "from slime.backends.megatron_utils import cp_utils, model\ndef f():\n    return"
        " cp_utils.all_gather_with_cp, cp_utils.other, model.name, hasattr(cp_utils, 'neither')\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        # The modules that earlier tests imported come back afterwards.
        for name in slime_names():
            patch.delitem(sys.modules, name)
        patch.syspath_prepend(folder)
        function: Callable[[], tuple[Any, ...]] = load_function(f"{file}:f")
        yield function()
        for name in slime_names():
            patch.delitem(sys.modules, name)


def slime_names() -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] == "slime"]


def test_our_names_replace_those_of_an_installed_slime(
    installed_slime_names: tuple[Any, ...],
) -> None:
    assert installed_slime_names[0] is slime_modules.all_gather_with_cp


def test_installed_slime_provides_the_other_names(installed_slime_names: tuple[Any, ...]) -> None:
    assert installed_slime_names[1:3] == ("theirs", "theirs")


def test_names_that_nobody_has_are_missing(installed_slime_names: tuple[Any, ...]) -> None:
    assert installed_slime_names[3] is False


def run_rank(rank: int, port: int, folder: str) -> None:
    from megatron.core import parallel_state

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    local = slime_modules.slice_log_prob_with_cp(WHOLE, TOTAL, RESPONSE).clone().requires_grad_()
    as_list = slime_modules.slice_log_prob_with_cp(WHOLE.tolist(), TOTAL, RESPONSE)
    gathered = slime_modules.all_gather_with_cp(local, TOTAL, RESPONSE)
    matrix = slime_modules.all_gather_with_cp(torch.stack([local, -local], 1), TOTAL, RESPONSE)
    # The losses of the two ranks are WHOLE and 2 · WHOLE.
    (gathered * WHOLE * (rank + 1)).sum().backward()
    # Responses of one token: one rank has the token, the other one nothing.
    short_slices = []
    short_gathered = []
    for n in range(1, 6):
        piece = slime_modules.slice_log_prob_with_cp(WHOLE[:1] * n, 3 + n, 1)
        short_slices.append(piece.tolist())
        short_gathered.append(slime_modules.all_gather_with_cp(piece, 3 + n, 1).tolist())
    assert local.grad is not None
    values = {
        "local": local.tolist(),
        "list": as_list,
        "gathered": gathered.tolist(),
        "matrix": matrix.tolist(),
        "gradient": local.grad.tolist(),
        "short slices": short_slices,
        "short gathered": short_gathered,
    }
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(values))
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Values that two context-parallel ranks computed."""
    folder = tmp_path_factory.mktemp("ranks")
    spawn(run_rank, (free_port(), str(folder)), 2)
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(2)]


def own_values(rank: int) -> torch.Tensor:
    first, second = context_parallel_slices(TOTAL, RESPONSE, rank, 2)
    return torch.cat([WHOLE[first], WHOLE[second]])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("key", ["local", "list"])
def test_rank_slices_a_response(two_ranks: list[dict[str, Any]], rank: int, key: str) -> None:
    assert two_ranks[rank][key] == own_values(rank).tolist()


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_gather_a_response(two_ranks: list[dict[str, Any]], rank: int) -> None:
    assert two_ranks[rank]["gathered"] == WHOLE.tolist()


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_gather_rows(two_ranks: list[dict[str, Any]], rank: int) -> None:
    assert two_ranks[rank]["matrix"] == torch.stack([WHOLE, -WHOLE], 1).tolist()


@pytest.mark.parametrize("rank", [0, 1])
def test_gradients_of_all_ranks_are_added(two_ranks: list[dict[str, Any]], rank: int) -> None:
    assert two_ranks[rank]["gradient"] == (3 * own_values(rank)).tolist()


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_gather_one_token(two_ranks: list[dict[str, Any]], rank: int) -> None:
    assert two_ranks[rank]["short gathered"] == [[float(n)] for n in range(1, 6)]


def test_one_rank_has_the_token_of_a_short_response(two_ranks: list[dict[str, Any]]) -> None:
    first, second = (values["short slices"] for values in two_ranks)
    lengths = [len(one) + len(other) for one, other in zip(first, second, strict=True)]
    assert lengths == [1] * 5
