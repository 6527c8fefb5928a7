"""Models of the Hugging Face Hub by name: from a cache on disk, a server, and without a network."""

import os
import socket
from pathlib import Path

import pytest
from huggingface_hub import constants

from slime_tis.hf_directory import read_model_config
from slime_tis.hf_hub import CONFIG, HubModel, hub_model, local_directory
from slime_tis.trainer.cli.train_arguments import configure, parse_args, read_layout
from tests.checkpoints import make_checkpoint, make_task
from tests.hub import COMMIT, hub_with, make_cache

FILES = {
    "config.json": b'{"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 2}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "modeling_own.py": b"raise SystemExit('code of the repository')",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"the weights again",
    "onnx/config.json": b"{}",
}
TRAIN = (
    "--prompt-data train.jsonl --num-rollout 1 --rollout-batch-size 4 --rm-type exact_match"
    " --input-key prompt --label-key label --n-samples-per-prompt 2 --rollout-max-response-len 4"
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and an address at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    return tmp_path / "cache"


@pytest.fixture
def hub(cache, monkeypatch):
    with hub_with(FILES) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield server


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    directory = tmp_path_factory.mktemp("task")
    make_task(directory)
    make_checkpoint(directory / "checkpoint", "qwen3")
    return directory


def message(text, flag="--hf-checkpoint"):
    with pytest.raises(ValueError) as error:
        local_directory(text, flag)
    return str(error.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Qwen/Qwen3-4B", HubModel("Qwen/Qwen3-4B", None)),
        ("a.b/c_d-1@v1.0", HubModel("a.b/c_d-1", "v1.0")),
        ("org/model@refs/pr/3", HubModel("org/model", "refs/pr/3")),
        ("gpt2", None),
        ("a/b/c", None),
        ("/a/b", None),
        ("./a/b", None),
        ("../b", None),
        ("~/b", None),
        ("a/", None),
        ("org/model@", None),
        ("https://huggingface.co/org/model", None),
        ("", None),
    ],
)
def test_names_of_the_hub(text, expected):
    assert hub_model(text) == expected


@pytest.mark.parametrize(
    "text",
    ["../b", "org/model@", "org/na me", "org/..", "a b/c"],
    ids=["a path above", "an empty revision", "a space", "dots", "a space in the owner"],
)
def test_a_bad_name_is_answered_with_both_forms(text, hub):
    directory = local_directory(text, files=CONFIG)
    with pytest.raises(ValueError, match="ORG/NAME or ORG/NAME@REVISION of a model of the Hub"):
        read_model_config(directory)
    assert hub.requests == []


def test_a_local_directory_wins(hub):
    Path("org/model").mkdir(parents=True)
    assert local_directory("org/model") == "org/model"
    assert hub.requests == []


def test_a_model_is_downloaded_without_code_or_copies(hub, cache):
    directory = Path(local_directory("org/model"))
    assert directory == cache / "models--org--model" / "snapshots" / COMMIT
    assert sorted(os.listdir(directory)) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert hub.downloaded() == ["config.json", "model.safetensors", "tokenizer.json"]


def test_a_revision_is_asked_for(hub):
    local_directory("org/model@v2", files=CONFIG)
    assert any("/revision/v2" in request for request in hub.requests)


def test_a_plan_downloads_only_config_json(hub):
    megatron = read_layout(["--hf-checkpoint", "org/model"]).megatron
    assert (Path(megatron.hf_checkpoint) / "config.json").read_bytes() == FILES["config.json"]
    assert hub.downloaded() == ["config.json"]


def test_a_cached_model_needs_no_network(cache, task):
    snapshot = make_cache(cache, "org/model", task / "checkpoint")
    assert local_directory("org/model") == str(snapshot)


def test_a_cached_revision_needs_no_network(cache, task):
    snapshot = make_cache(cache, "org/model", task / "checkpoint", "v2")
    assert local_directory("org/model@v2") == str(snapshot)
    assert local_directory(f"org/model@{COMMIT}") == str(snapshot)


def test_train_takes_a_cached_model(cache, task):
    snapshot = make_cache(cache, "org/model", task / "checkpoint")
    flags = TRAIN.replace("train.jsonl", str(task / "train.jsonl")).split()
    got = parse_args(["--hf-checkpoint", "org/model", *flags]).megatron
    assert got.hf_checkpoint == str(snapshot)


def test_the_reference_is_looked_up_too(cache, task):
    snapshot = make_cache(cache, "org/model", task / "checkpoint")
    flags = TRAIN.replace("train.jsonl", str(task / "train.jsonl")).split()
    names = ["--hf-checkpoint", str(task / "checkpoint"), "--ref-load", "org/model"]
    got = configure([*names, "--use-kl-loss", *flags], {}).megatron
    assert got.ref_load == str(snapshot)


def test_without_a_network_the_message_has_the_cache_and_a_command(cache):
    assert message("org/model@v2") == (
        "--hf-checkpoint is 'org/model@v2', which is not a directory and not completely in the"
        f" cache {cache}, and {constants.ENDPOINT} cannot be reached; give a directory, or run"
        " `hf download org/model --revision v2` where there is a network and copy the cache."
    )


def test_offline_mode_asks_nobody(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in message("org/model", "--ref-load")
    assert hub.requests == []


@pytest.mark.parametrize(
    ("refusal", "advice"),
    [
        ("RepoNotFound", "correct the path or the name"),
        ("RevisionNotFound", "no branch, tag or commit 'v2'; correct the text after @"),
        ("GatedRepo", "accept its terms at"),
        ("broken", "where there is a network"),
    ],
    ids=lambda value: value.split()[0],
)
def test_refusals_of_the_hub_say_what_to_do(hub, refusal, advice):
    hub.refusal = refusal
    text = message("org/model@v2")
    assert advice in text and "--hf-checkpoint is 'org/model@v2'" in text


def test_a_name_that_no_model_can_have_is_refused(cache):
    assert "is not a directory and not a name of the Hub: " in message("org/a..b")


def test_a_token_is_not_in_the_message(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.refusal = "GatedRepo"
    assert "hf_secret" not in message("org/model")
