"""A tiny model and the parallel state of one process, for each file of tests that asks for them."""

import pytest

from slime_tis.trainer.configs.megatron import MegatronConfig
from slime_tis.trainer.megatron.parallel import initialize, shut_down
from tests.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A checkpoint whose output layer is tied to the embeddings."""
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def parallel():
    """One process, initialised."""
    yield initialize(MegatronConfig(hf_checkpoint="none"))
    shut_down()
