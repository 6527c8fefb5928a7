"""Servers that say that they are paused, as vLLM does: weights come before the next sample."""

from collections.abc import Callable
from pathlib import Path

import pytest

from slime_tis.trainer.engines.servers.api import Connection
from slime_tis.trainer.engines.servers.errors import ServerError, ServerPaused
from slime_tis.trainer.engines.sglang.sglang_api import SGLangApi
from tests.rollout.sglang.fake_sglang import FakeSGLang, wait_until
from tests.rollout.sglang.rollouts import PROMPTS, SAMPLING, Run, assert_exact
from tests.rollout.sglang.test_adapters import ADAPTER, take_adapters

check_health = SGLangApi.check_health


@pytest.fixture(autouse=True)
def telling_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the fake server's 503, which it answers while it is paused, a ServerPaused."""

    async def check(self: SGLangApi, server: Connection) -> None:
        try:
            await check_health(self, server)
        except ServerError as error:
            if "HTTP 503" in str(error):
                raise ServerPaused(f"{server.url} is paused.") from None
            raise

    monkeypatch.setattr(SGLangApi, "check_health", check)


def pause(servers: list[FakeSGLang]) -> None:
    """Leaves servers as a killed run does."""
    for server in servers:
        server.paused = True


@pytest.fixture
def paused_run(start: Callable[..., Run]) -> Run:
    return start(1, pause)


def test_a_paused_server_is_not_resumed_without_weights(paused_run: Run) -> None:
    assert paused_run.servers[0].called == []


def test_a_paused_server_samples_after_an_update(paused_run: Run) -> None:
    paused_run.update(1)
    assert_exact(paused_run.engine.generate(PROMPTS, SAMPLING), PROMPTS)


def test_a_server_paused_by_others_gets_weights_again(start: Callable[..., Run]) -> None:
    run = start(1)
    run.update(1)
    pause(run.servers)
    wait_until(lambda: run.engine.metrics()["rollout/sglang_deaths"] == 1)
    run.update(2)
    assert_exact(run.engine.generate(PROMPTS, SAMPLING), PROMPTS)


def test_adapters_refuse_a_server_that_another_run_paused(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    def prepare(servers: list[FakeSGLang]) -> None:
        take_adapters(servers)
        pause(servers)

    with pytest.raises(ValueError, match="is paused, as during an update"):
        start(1, prepare, adapter=ADAPTER, output_dir=tmp_path, sglang_weight_sync="disk")
