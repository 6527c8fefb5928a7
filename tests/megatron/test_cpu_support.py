"""megatron-core without a GPU or transformer-engine, and the variables of a launcher."""

import importlib
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

import slime_tis.trainer.megatron.parallel  # and with it megatron.core
from slime_tis.trainer.configs.megatron import LAUNCH, Environment, MegatronConfig, read_environment
from slime_tis.trainer.megatron.cpu_support import rewrite
from slime_tis.trainer.megatron.parallel import (
    initialize,
    shut_down,
    trains_with_transformer_engine,
)

REWRITTEN = [
    ("x = torch.zeros(1, device='cuda')", "x = torch.zeros(1, device='cpu')"),
    ('a = t.type() == "torch.cuda.FloatTensor"', 'a = t.type() == "torch.FloatTensor"'),
    ("d = torch.cuda.current_device()", "d = torch.get_default_device()"),
    ("torch.cuda.synchronize()", "None"),
    ("y = x.cuda(non_blocking=f(g(1))) + 1", "y = x + 1"),
    ("z = torch.empty(1, pin_memory=True)", "z = torch.empty(1, pin_memory=False)"),
    ("stream = torch.cuda.Stream()", "stream = None"),
    ("jit_fuser = torch.compile", "jit_fuser = noop_decorator"),
    (
        "torch.distributed.all_gather(output_tensor_list, input_, group=group)",
        (
            "torch.distributed.all_to_all_single(output, torch.cat([input_] * world_size), "
            "output_split_sizes, [len(input_)] * world_size, group=group)"
        ),
    ),
    (
        "ok = torch.cuda.is_available() and 'cudagraph'",
        "ok = torch.cuda.is_available() and 'cudagraph'",
    ),
]


@pytest.mark.parametrize(("source", "expected"), REWRITTEN, ids=[source for source, _ in REWRITTEN])
def test_rewrites_what_needs_cuda_or_nccl(source, expected):
    assert rewrite(source) == expected


def test_options_do_not_import_megatron_core():
    code = (
        "import sys, slime_tis.trainer.configs.megatron; sys.exit('megatron.core' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA nothing is rewritten")
@pytest.mark.parametrize("module", ["torch._inductor.compile_fx", "pyarrow"])
def test_training_does_not_import_large_modules_that_it_rarely_needs(module):
    code = f"import sys, slime_tis.trainer.setup; sys.exit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_process_without_launcher_is_the_only_rank():
    assert read_environment({}) == Environment(rank=0, local_rank=0, world_size=1, launched=False)


def test_ranks_of_torchrun():
    assert read_environment(TORCHRUN) == Environment(
        rank=3, local_rank=1, world_size=4, launched=True
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA nothing is rewritten")
def test_importing_megatron_core_first_is_refused_without_cuda(monkeypatch):
    finders = [finder for finder in sys.meta_path if finder.__module__ != rewrite.__module__]
    monkeypatch.setattr(sys, "meta_path", finders)
    with pytest.raises(RuntimeError, match="already imported"):
        importlib.reload(slime_tis.trainer.megatron)


TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        pytest.param({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'", id="no ranks"),
        pytest.param({"WORLD_SIZE": "1.5"}, "WORLD_SIZE is '1.5'", id="a fraction"),
        pytest.param({"WORLD_SIZE": ""}, "WORLD_SIZE is ''", id="empty"),
        pytest.param({"WORLD_SIZE": "9" * 5000}, f"WORLD_SIZE is '{'9' * 80}' ", id="huge"),
        pytest.param({"RANK": "٣"}, "RANK is '٣'", id="other digits"),
        pytest.param({"WORLD_SIZE": "2"}, "RANK is unset", id="size without rank"),
        pytest.param(TORCHRUN | {"RANK": "4"}, "from 0 to 3", id="rank beyond the size"),
        pytest.param({"RANK": "0"}, "MASTER_ADDR is unset", id="no address"),
        pytest.param({"RANK": "0", "MASTER_ADDR": "node0"}, "MASTER_PORT is unset", id="no port"),
        pytest.param(
            TORCHRUN | {"MASTER_PORT": "65536"},
            "MASTER_PORT is '65536'",
            id="port beyond the range",
        ),
    ],
)
def test_impossible_values_are_named(environ, message):
    with pytest.raises(ValueError) as raised:
        read_environment(environ)
    assert message in str(raised.value) and str(raised.value).endswith(LAUNCH + ".")


GOOD, BROKEN = "", "raise ImportError('libcudart.so.13: cannot open shared object file')"


@pytest.mark.parametrize(
    ("options", "has_gpu", "module", "answer"),
    [
        pytest.param({"bf16": True}, True, GOOD, True, id="bf16"),
        pytest.param({"fp16": True}, True, GOOD, True, id="fp16"),
        pytest.param({}, True, GOOD, False, id="float32"),
        pytest.param({"bf16": True}, False, GOOD, False, id="no GPU"),
        pytest.param({"bf16": True}, True, BROKEN, False, id="broken"),
        pytest.param({"bf16": True}, True, None, False, id="absent"),
        pytest.param({"bf16": True, "transformer_impl": "local"}, True, GOOD, False, id="local"),
        pytest.param(
            {"bf16": True, "transformer_impl": "transformer_engine"},
            True,
            GOOD,
            True,
            id="asked for",
        ),
        pytest.param(
            {"transformer_impl": "transformer_engine"},
            True,
            GOOD,
            "float32",
            id="asked for in float32",
        ),
        pytest.param(
            {"bf16": True, "transformer_impl": "transformer_engine"},
            True,
            BROKEN,
            "libcudart",
            id="asked",
        ),
        pytest.param(
            {"bf16": True, "transformer_impl": "transformer_engine"},
            False,
            GOOD,
            "a GPU",
            id="asked on CPU",
        ),
    ],
)
def test_transformer_engine_is_used_where_it_can_train(
    options, has_gpu, module, answer, tmp_path, monkeypatch
):
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        monkeypatch.delitem(sys.modules, name)
    if module is not None:
        package = tmp_path / "transformer_engine"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "pytorch.py").write_text(module)
        monkeypatch.syspath_prepend(tmp_path)
    config = MegatronConfig(hf_checkpoint="model", **options)
    if isinstance(answer, bool):
        assert trains_with_transformer_engine(config, has_gpu=has_gpu) is answer
    else:
        with pytest.raises(ValueError, match=answer):
            trains_with_transformer_engine(config, has_gpu=has_gpu)
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_no_group_outlives_the_shut_down():
    """The threads of a group would not exist in a forked process, which would wait for them."""
    initialize(MegatronConfig(hf_checkpoint="none"))
    shut_down()
    kept = []
    for name, value in vars(parallel_state).items():
        if isinstance(value, dist.ProcessGroup):
            kept.append(name)
    assert kept == []
