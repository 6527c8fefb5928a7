"""A checkpoint and its tokenizer."""

import pytest

from slime_tis.trainer.data.sample import Prompt
from slime_tis.trainer.engines.local.load_model import load_tokenizer
from tests.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="session")
def tokenizer(checkpoint):
    return load_tokenizer(checkpoint)


def make_prompts(path, texts):
    tokenizer = load_tokenizer(path)
    ids = [tuple(tokenizer(f"<bos>{text}")["input_ids"]) for text in texts]
    return [Prompt(index=i, text=text, token_ids=ids[i]) for i, text in enumerate(texts)]
