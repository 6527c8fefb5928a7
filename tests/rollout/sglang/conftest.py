"""A checkpoint, and engines on servers."""

from contextlib import ExitStack

import pytest

from tests.rollout.sglang.fake_sglang import fake_servers
from tests.rollout.sglang.rollouts import Run


@pytest.fixture
def start(checkpoint):
    with ExitStack() as stack:

        def make(count, prepare=lambda servers: None, **options):
            servers = stack.enter_context(fake_servers(count))
            prepare(servers)
            run = Run(servers, checkpoint, **options)
            stack.callback(run.engine.close)
            return run

        yield make
