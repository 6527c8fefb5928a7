"""Servers and engines for tests against the real SGLang; `make test-sglang` runs them."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
import torch

from slime_tis.trainer.configs.sglang import SGLangConfig
from slime_tis.trainer.data.sample import Prompt
from slime_tis.trainer.engines.local.load_model import load_tokenizer
from slime_tis.trainer.engines.rollout_engine import EngineHost
from slime_tis.trainer.engines.sglang.server_group import SGLangSettings
from slime_tis.trainer.engines.sglang.sglang_engine import SGLangEngine
from tests.checkpoints import BOS, make_checkpoint
from tests.sglang_server.references import Reference
from tests.sglang_server.servers import PYTHON, RealServer

# Large enough for several buckets of 1 MiB; of a wide vocabulary, so that end-of-sequence is rare
# and responses long.
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
}


def pytest_sessionstart():
    """These tests are not skipped where they cannot run."""
    if not PYTHON.exists():
        pytest.exit(
            f"{PYTHON} does not exist: run `make sglang-env`, which builds the servers'"
            " environment.",
            1,
        )
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("sglang")


@pytest.fixture(scope="session")
def checkpoint(directory):
    return make_checkpoint(directory / "model", "qwen3", **SIZES)


@pytest.fixture(scope="session")
def reference(checkpoint):
    """What log-probs of `checkpoint` ought to be."""
    return Reference(checkpoint)


@pytest.fixture(scope="session")
def other_reference(directory):
    """What log-probs of the same model with other weights ought to be."""
    return Reference(make_checkpoint(directory / "other", "qwen3", seed=1, **SIZES))


@pytest.fixture(scope="session")
def started(checkpoint, directory):
    servers = [
        RealServer(checkpoint, directory / f"server_{i}.log", "--dtype", "float32")
        for i in range(2)
    ]
    yield servers
    for server in servers:
        server.stop()


@pytest.fixture
def server(started):
    return started[0].wait()


@pytest.fixture
def two_servers(started):
    return [server.wait() for server in started]


@pytest.fixture
def make_engine(checkpoint, reference, tmp_path):
    """Makes engines on given or launched servers, with the reference's weights as version 0."""
    with ExitStack() as engines:

        def make(*servers, weights=reference.named_tensors, push=True, sampling=None, **options):
            urls = {"sglang_url": tuple(server.url for server in servers)} if servers else {}
            config = SGLangConfig(sglang_bucket_mb=1, **urls, **options)
            host = EngineHost(hf_checkpoint=checkpoint, weights=weights, output_dir=tmp_path)
            engine = SGLangEngine(
                SGLangSettings(config=config, sampling=sampling), load_tokenizer(checkpoint), host
            )
            engines.callback(engine.close)
            if push:
                engine.update_weights(reference.named_tensors, 0)
            return engine

        yield make


@pytest.fixture(scope="session")
def prompts():
    texts = [[BOS, *(3 + (7 * i + 5 * j) % 60 for j in range(2 + 3 * i))] for i in range(8)]
    return [Prompt(index=i, text=str(i), token_ids=tuple(ids)) for i, ids in enumerate(texts)]


@dataclass
class Real:
    server: RealServer
    make_engine: Callable[..., SGLangEngine]
    prompts: list[Prompt]
    reference: Reference
    other_reference: Reference


@pytest.fixture
def real(server, make_engine, prompts, reference, other_reference):
    return Real(server, make_engine, prompts, reference, other_reference)
