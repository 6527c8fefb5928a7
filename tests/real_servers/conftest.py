"""Servers and models for tests against real servers of one engine.

`make test-sglang` and `make test-vllm` run them.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from slime_tis.trainer.data.sample import Prompt
from tests.checkpoints import BOS, make_checkpoint
from tests.real_servers.engines import ServedModel
from tests.real_servers.references import Reference
from tests.real_servers.servers import ENGINE, RealServer
from tests.real_servers.training import without_engine
from tests.runs import make_task

# Large enough for several buckets of 1 MiB. The wide vocabulary makes end-of-sequence rare and
# responses long.
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
    **ENGINE.sizes,
}


def pytest_sessionstart() -> None:
    """Ends the session if the servers' environment is missing: these tests are not skipped."""
    if not ENGINE.python.exists():
        pytest.exit(
            f"{ENGINE.python} does not exist: run `make {ENGINE.name}-env`, which builds the"
            " servers' environment.",
            1,
        )
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(ENGINE.name)


@pytest.fixture(scope="session")
def checkpoint(directory: Path) -> Path:
    return make_checkpoint(directory / "model", "qwen3", **SIZES)


@pytest.fixture(scope="session")
def started_servers(checkpoint: Path, directory: Path) -> Iterator[list[RealServer]]:
    """Two servers, started side by side; most tests need only the first one."""
    servers = []
    for number in range(2):
        log = directory / f"server_{number}.log"
        servers.append(RealServer(checkpoint, log, "--dtype", "float32"))
    yield servers
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def two_servers(started_servers: list[RealServer]) -> tuple[RealServer, RealServer]:
    first, second = started_servers
    return first.wait(), second.wait()


@pytest.fixture(scope="session")
def model(checkpoint: Path, directory: Path, started_servers: list[RealServer]) -> ServedModel:
    """A dense model on one server."""
    other_checkpoint = make_checkpoint(directory / "other", "qwen3", seed=1, **SIZES)
    return ServedModel(
        checkpoint=checkpoint,
        server=started_servers[0].wait(),
        reference=Reference(checkpoint),
        other_reference=Reference(other_checkpoint),
        directory=directory,
    )


@pytest.fixture(scope="session")
def prompts() -> list[Prompt]:
    """Eight prompts of 3 to 24 tokens."""
    rows = []
    for index in range(8):
        token_ids = [BOS]
        for position in range(2 + 3 * index):
            token_ids.append(3 + (7 * index + 5 * position) % 60)
        rows.append(Prompt(index=index, text=str(index), token_ids=tuple(token_ids)))
    return rows


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of train.py for a dense model, without a rollout engine."""
    flags = make_task(tmp_path_factory.mktemp("task"), prompts=32, hidden_size=64, **ENGINE.sizes)
    return [*without_engine(flags), "--num-rollout", "4", "--lr", "1e-4"]
