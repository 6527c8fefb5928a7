"""Runs of train.py on a task of its own for each file of tests."""

import gc
import signal

import pytest
import torch
from hypothesis import settings

from tests.devices import SIMULATED, on_device
from tests.runs import make_task, run_here, start_fork_server

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a shell's background job ignores it, and so would its children
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("busy machine", deadline=None)  # no test asserts a time
settings.load_profile("busy machine")


def pytest_addoption(parser):
    """`--device`, for the tests of what is computed with tensors."""
    parser.addoption(
        "--device",
        default="cpu",
        choices=["cpu", "cuda", SIMULATED],
        help="device of the tensors that tests make",
    )


def pytest_configure(config):
    """Postpones garbage collection while modules are imported: a million objects, no garbage.

    From here on tests make their tensors on the device, those of a module's constants too.
    """
    gc.disable()
    # A fork of a process whose OpenMP threads have started waits for them for ever. Tests fork
    # their ranks, so this process must never start any.
    torch.set_num_threads(1)
    device = on_device(config.getoption("device"))
    device.__enter__()
    config.add_cleanup(lambda: device.__exit__(None, None, None))


def pytest_collection_modifyitems(config, items):
    """Omits tests of gloo ranks if this process has its tensors on another device."""
    if config.getoption("device") == "cpu":
        return
    for item in items:
        if not isinstance(item, pytest.Function):
            continue
        fixtures = [each[-1].func for each in item._fixtureinfo.name2fixturedefs.values()]
        if any("spawn" in function.__code__.co_names for function in (item.function, *fixtures)):
            item.add_marker(
                pytest.mark.skip(reason="the processes that it starts compute on the CPU")
            )


def pytest_collection_finish(session):
    """Leaves imported modules out of garbage collection, and starts the fork server if needed."""
    gc.freeze()
    gc.enable()
    used = {
        name
        for item in session.items
        if isinstance(item, pytest.Function)
        for name in vars(item.module)
    }
    if used & {"run_apart", "start_apart"}:
        import slime_tis.trainer.training_command  # noqa: F401  (what the forked processes run)
    if used & {"run_apart", "start_apart", "spawn", "fork_server", "WeightServer"}:
        start_fork_server()


@pytest.fixture(scope="module", autouse=True)
def collected():
    """Frees process groups in reference cycles; each of gloo's has three threads."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture
def run(task, tmp_path):
    """Runs train.py on the task with more flags; the rows of metrics.jsonl."""

    def go(*flags, name="run"):
        return run_here([*task, *flags], tmp_path / name)

    return go
