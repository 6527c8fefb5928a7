"""A command line that is accepted, with its files, for the tests of this folder."""

import json
import shlex
import shutil
from pathlib import Path

import pytest

from slime_tis.trainer.cli.train_arguments import configure
from tests.checkpoints import make_checkpoint


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = {
        "architectures": ["Qwen3ForCausalLM"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
        "vocab_size": 16,
    }
    for directory in ("model", "reference"):
        Path(directory).mkdir()
        Path(directory, "config.json").write_text(json.dumps(model))
    Path("d").mkdir()
    for name in ("train.jsonl", "eval.jsonl", "hard.jsonl", "d/0.pt"):
        Path(name).write_text('{"input": "21>", "label": "12"}\n')
    return (
        "--hf-checkpoint model --prompt-data train.jsonl --rollout-batch-size 4"
        " --n-samples-per-prompt 8 --rollout-max-response-len 12 --num-rollout 3 --rm-type"
        " exact_match "
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(
        tmp_path_factory.mktemp("checkpoint"), "qwen3", max_position_embeddings=64
    )


@pytest.fixture
def whole(base, checkpoint):
    """`base` with weights in its checkpoint, at which `parse_args` looks too."""
    shutil.copytree(checkpoint, "model", dirs_exist_ok=True)
    return base


def configured(line, world_size=1):
    torchrun = {"RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    return configure(shlex.split(line), {"WORLD_SIZE": str(world_size), **torchrun})


def refusal(line, world_size=1):
    with pytest.raises(ValueError) as error:
        configured(line, world_size)
    message = str(error.value)
    assert message.isprintable() and len(message) <= 600, message[:300]
    return message
