"""A server that a run starts itself, with an API key."""

import httpx
import psutil
import pytest

from slime_tis.trainer.data.sample import Sampling
from tests.runs import free_port
from tests.samples import flat
from tests.sglang_server.references import BOUND
from tests.sglang_server.servers import FLAGS, PYTHON, wait_for_decoding

KEY = "sk-not-to-be-seen"


@pytest.fixture
def launch(make_engine, monkeypatch):
    monkeypatch.setenv("SGLANG_API_KEY", KEY)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    flags = ("--config", str(FLAGS), "--dtype", "float32")
    launched = {"sglang_launch": 1, "sglang_python": str(PYTHON), "sglang_server_args": flags}
    return lambda: make_engine(**launched, sglang_base_port=free_port())


def test_a_launched_server_asks_for_a_key_that_nobody_sees_and_is_started_again_when_it_dies(
    launch, make_engine, prompts, reference, tmp_path, monkeypatch, capfd
):
    before = set(psutil.Process().children(recursive=True))
    engine = launch()
    (url,) = engine.prompt_log_probs([1, 5, 9])
    assert httpx.get(f"{url}/model_info").status_code == 401
    assert httpx.post(f"{url}/pause_generation", json={}).status_code == 401
    monkeypatch.setenv("SGLANG_API_KEY", "wrong")
    with pytest.raises(ValueError, match="401") as error:
        make_engine(sglang_url=(url,))
    assert "wrong" not in str(error.value)

    engine.update_weights(reference.named_tensors, 3)
    pending = engine.submit(prompts, Sampling(max_response_len=300, n_samples=2), seed=0)
    (scheduler,) = [each for each in psutil.Process().children(recursive=True) if is_scheduler(each, before)]
    wait_for_decoding(tmp_path / "sglang_0.log")
    scheduler.kill()
    samples = flat(pending.result())
    assert [sample.index for sample in samples] == list(range(2 * len(prompts)))
    assert all(set(sample.weight_versions) == {3} and reference.gap(sample) < BOUND for sample in samples)
    assert engine.metrics()["rollout/sglang_restarts"] == 1

    launched = set(psutil.Process().children(recursive=True)) - before
    assert launched
    shown = [" ".join(process.cmdline()) for process in launched]
    log = (tmp_path / "sglang_0.log").read_text()
    assert log.count("server_args=") == 2
    assert not any(KEY in text for text in [*shown, log, *capfd.readouterr(), repr(vars(engine))])
    engine.close()
    assert not [process for process in launched if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def is_scheduler(process, before):
    """Whether it is the process of a new server that holds the model."""
    return process not in before and process.cmdline()[:1] == ["sglang::scheduler"]
