"""A checkpoint, and engines on servers."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.rollout.sglang.fake_sglang import FakeSGLang, fake_servers
from tests.rollout.sglang.rollouts import Run


@pytest.fixture
def start(checkpoint: Path) -> Iterator[Callable[..., Run]]:
    with ExitStack() as stack:

        def make(count: int, prepare: Callable[[list[FakeSGLang]], None] = lambda servers: None, **options: Any) -> Run:
            servers = stack.enter_context(fake_servers(count))
            prepare(servers)
            run = Run(servers, checkpoint, **options)
            stack.callback(run.engine.close)
            return run

        yield make
