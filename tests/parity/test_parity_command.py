"""`slime-tis parity` on the command line."""

import json
import shutil

import pytest

from slime_tis.main import main
from slime_tis.parity import transformers_executions
from tests.checkpoints import make_checkpoint

SHORT = ["--samples", "2", "--tokens", "4"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "qwen3", "qwen3"))


def test_first_line_names_the_result(checkpoint, capsys):
    assert main(["parity", checkpoint, *SHORT, "--other-precision", "bf16", "--other", "full"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("embedding: full and full differ in fp32 and bf16, at most ")


def test_json_has_every_operation(checkpoint, capsys):
    assert main(["parity", checkpoint, *SHORT, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["other"]["execution"] == "decode"
    assert result["log_probs"]["tokens"] == (2 + 4) + (4 + 4) - 2
    assert len(result["operations"]) == 3 + 2 * 17


def test_several_executions_are_compared_with_one_reference(checkpoint, capsys):
    words = ["parity", checkpoint, *SHORT, "--json", "--other", "batch", "--other", "chunks"]
    assert main(words) == 0
    names = [result["other"]["execution"] for result in json.loads(capsys.readouterr().out)]
    assert names == ["batch", "chunks"]


def test_limit_on_log_probs_sets_the_status(checkpoint, capsys):
    words = ["parity", checkpoint, *SHORT, "--other", "full", "--other-precision", "bf16"]
    assert main([*words, "--fail-on", "1e-6"]) == 1
    assert "--fail-on: mean abs(Δ) of full and full is" in capsys.readouterr().err


PROMPT_FILES = {
    "texts": ("p.txt", "12>\n\n345>\n", 2),
    "objects": ("p.jsonl", '{"prompt": "12>"}\n{"tokens": [5, 6]}\n', 2),
    "chat messages": ("p.jsonl", '{"prompt": [{"role": "user", "content": "12>"}]}\n', 1),
    "more lines than samples": ("p.txt", "1>\n2>\n3>\n", 2),
}


@pytest.mark.parametrize(("name", "content", "count"), PROMPT_FILES.values(), ids=[*PROMPT_FILES])
def test_prompts_of_a_file_are_used(checkpoint, tmp_path, capsys, name, content, count):
    (tmp_path / name).write_text(content)
    words = ["parity", checkpoint, *SHORT, "--json", "--prompts", str(tmp_path / name)]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == count


def refused(words, capsys):
    """The single line of a refused command."""
    assert main(["parity", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_missing_checkpoint_is_refused(tmp_path, capsys):
    line = refused([str(tmp_path / "absent")], capsys)
    assert "holds no config.json; give a Hugging Face directory" in line


WRONG_PROMPTS = {
    "token out of the vocabulary": ('{"tokens": [5, 640]}', "has the token 640, but the model's"),
    "negative token": ('{"tokens": [-1]}', "has the token -1"),
    "no JSON": ("{tokens}", "line 1 is not JSON"),
    "neither text nor tokens": ('{"text": "a"}', 'has neither "tokens" nor "prompt"'),
    "messages without a role": ('{"prompt": [{"text": "a"}]}', "does not fit the chat template"),
    "no tokens": ('{"tokens": []}', "must have a text or a list of token ids"),
    "empty file": ("\n", "has no prompt"),
}


@pytest.mark.parametrize(("content", "message"), WRONG_PROMPTS.values(), ids=[*WRONG_PROMPTS])
def test_wrong_prompts_are_refused(checkpoint, tmp_path, capsys, content, message):
    (tmp_path / "p.jsonl").write_text(content)
    assert message in refused([checkpoint, "--prompts", str(tmp_path / "p.jsonl")], capsys)


WRONG_OPTIONS = {
    "no file of prompts": (["--prompts", "absent.txt"], "'absent.txt' is not a file"),
    "equal executions": (["--other", "full"], "are both 'full' with the same checkpoint"),
    "no samples": (["--samples", "0"], "--samples is 0 but must be a number from 1"),
    "longer than the context": (["--tokens", "120"], "240 tokens, but the model has 128 positions"),
    "unknown device": (["--device", "tpu"], "--device is 'tpu' but must be cpu"),
    "shared operations of other executions": (["--true-on-policy"], "add --reference local"),
    "seed of 65 bits": (["--seed", str(2**64)], "must be a number of 64 bits"),
    "limit of NaN": (["--fail-on", "nan"], "--fail-on is nan but must be 0 or more"),
    "negative limit": (["--fail-on", "-1"], "--fail-on is -1 but must be 0 or more"),
    "chunks of no token": (["--other", "chunks", "--chunk-size", "0"], "--chunk-size is 0"),
}


@pytest.mark.parametrize(("words", "message"), WRONG_OPTIONS.values(), ids=[*WRONG_OPTIONS])
def test_wrong_options_are_refused(checkpoint, capsys, words, message):
    assert message in refused([checkpoint, *words], capsys)


def test_other_vocabulary_is_refused(checkpoint, tmp_path, capsys):
    other = make_checkpoint(tmp_path / "other", "qwen3", vocab_size=8)
    capsys.readouterr()  # the progress of saving
    line = refused([checkpoint, *SHORT, "--other-checkpoint", str(other)], capsys)
    assert "compare models with the same tokenizer" in line


@pytest.mark.parametrize("positions", ["many", 0, 12.5], ids=["text", "none", "fraction"])
def test_wrong_number_of_positions_is_refused(tmp_path, capsys, positions):
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "qwen3")
    config = json.loads((checkpoint / "config.json").read_text())
    config["max_position_embeddings"] = positions
    (checkpoint / "config.json").write_text(json.dumps(config))
    capsys.readouterr()  # the progress of saving
    assert "config.json has the max_position_embeddings" in refused([str(checkpoint)], capsys)


def cut_off(checkpoint):
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])


INCOMPLETE = {
    "no weights": (lambda path: (path / "model.safetensors").unlink(), "has no weights, neither"),
    "cut off": (cut_off, "cannot be read as safetensors"),
}


@pytest.mark.parametrize(("spoil", "message"), INCOMPLETE.values(), ids=INCOMPLETE)
def test_nothing_is_sampled_before_incomplete_weights_are_refused(
    checkpoint, tmp_path, monkeypatch, capsys, spoil, message
):
    monkeypatch.setattr(transformers_executions, "sampled_responses", None)
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    spoil(other)
    words = [checkpoint, *SHORT, "--other-checkpoint", str(other)]
    assert message in refused(words, capsys)
