"""The parts of slime that user functions import, with and without an installed slime."""

import importlib
import pickle
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from slime_tis import context_parallel_slices
from slime_tis.integrations import slime_modules
from slime_tis.user_functions import load_function
from tests.runs import free_port, spawn

TOTAL, RESPONSE = 23, 20
WHOLE = torch.arange(1.0, RESPONSE + 1)


def test_the_helpers_are_found_and_nothing_else_is():
    slime_modules.provide()
    slime_modules.provide()
    helpers = importlib.import_module("slime.backends.megatron_utils.cp_utils")
    assert helpers.all_gather_with_cp(WHOLE, TOTAL, RESPONSE) is WHOLE
    assert helpers.slice_log_prob_with_cp([0.5] * RESPONSE, TOTAL, RESPONSE) == [0.5] * RESPONSE
    with pytest.raises(ValueError, match="log_prob has 3 values but response_length is 20"):
        helpers.slice_log_prob_with_cp([0.0] * 3, TOTAL, RESPONSE)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("slime.ray")
    assert sum(isinstance(finder, slime_modules.Finder) for finder in sys.meta_path) == 1


def test_an_installed_slime_provides_the_other_names(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "slime"]:
        monkeypatch.delitem(sys.modules, name)
    package = tmp_path / "slime" / "backends" / "megatron_utils"
    package.mkdir(parents=True)
    for folder in (tmp_path / "slime", tmp_path / "slime" / "backends", package):
        (folder / "__init__.py").touch()
    (package / "cp_utils.py").write_text("all_gather_with_cp = 'theirs'\nother = 'theirs'")
    (package / "model.py").write_text("name = 'theirs'")
    file = tmp_path / "mine.py"
    file.write_text(
        "from slime.backends.megatron_utils import cp_utils, model\n"
        "def f():\n    return cp_utils.all_gather_with_cp, cp_utils.other, model.name, hasattr(cp_utils, 'neither')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert load_function(f"{file}:f")() == (slime_modules.all_gather_with_cp, "theirs", "theirs", False)
    for name in [name for name in sys.modules if name.split(".")[0] == "slime"]:
        monkeypatch.delitem(sys.modules, name)


def _rank(rank, port, folder):
    from megatron.core import parallel_state

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    local = slime_modules.slice_log_prob_with_cp(WHOLE, TOTAL, RESPONSE).clone().requires_grad_()
    as_list = slime_modules.slice_log_prob_with_cp(WHOLE.tolist(), TOTAL, RESPONSE)
    gathered = slime_modules.all_gather_with_cp(local, TOTAL, RESPONSE)
    (gathered * WHOLE * (rank + 1)).sum().backward()
    # one-token responses that one rank holds nothing of
    lonely = [slime_modules.slice_log_prob_with_cp(WHOLE[:1] * n, 3 + n, 1) for n in range(1, 6)]
    joined = [slime_modules.all_gather_with_cp(part, 3 + n, 1) for n, part in enumerate(lonely, 1)]
    assert local.grad is not None
    found = {
        "local": local.tolist(),
        "list": as_list,
        "gathered": gathered.tolist(),
        "gradient": local.grad.tolist(),
        "lonely": [part.tolist() for part in lonely],
        "joined": [part.tolist() for part in joined],
        "matrix": slime_modules.all_gather_with_cp(torch.stack([local, -local], 1), TOTAL, RESPONSE).tolist(),
    }
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(found))
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def test_slices_of_two_ranks_are_joined_and_their_gradients_added(tmp_path):
    spawn(_rank, (free_port(), str(tmp_path)), 2)
    found = [pickle.loads((tmp_path / f"{rank}.pickle").read_bytes()) for rank in range(2)]
    for rank in range(2):
        first, second = context_parallel_slices(TOTAL, RESPONSE, rank, 2)
        own = torch.cat([WHOLE[first], WHOLE[second]])
        assert found[rank]["local"] == found[rank]["list"] == own.tolist()
        assert found[rank]["gathered"] == WHOLE.tolist()
        assert found[rank]["matrix"] == torch.stack([WHOLE, -WHOLE], 1).tolist()
        assert found[rank]["gradient"] == (3 * own).tolist()  # of both ranks, whose losses are WHOLE and 2 · WHOLE
        assert found[rank]["joined"] == [[float(n)] for n in range(1, 6)]
    for one, other in zip(found[0]["lonely"], found[1]["lonely"], strict=True):
        assert len(one) + len(other) == 1
