"""`slime-tis parity` with the local engine, the training engine and servers."""

import html
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_tis.families import FAMILIES
from slime_tis.main import main
from slime_tis.parity.comparison import compare
from slime_tis.parity.executions import EXECUTIONS, Side
from slime_tis.parity.parity_text import sentence
from slime_tis.parity.samples import joined, random_prompts
from slime_tis.parity.shared_kernels import kernels_of
from slime_tis.trainer.engines.local.slot_cache import SlotCache
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.rollout.sglang.fake_sglang import fake_servers, log_prob

SAMPLES = joined(random_prompts(3, 9, VOCAB_SIZE, seed=0), random_prompts(3, 5, VOCAB_SIZE, seed=1))
SHORT = ["--samples", "2", "--tokens", "4", "--json"]


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")

    def make(family="qwen3", *, name="", change=None):
        path = root / (name or family)
        if not path.exists():
            make_checkpoint(path, family)
            if change is not None:
                weights = path / "model.safetensors"
                tensors = load_file(weights)
                change(tensors)
                save_file(tensors, weights, {"format": "pt"})
        return str(path)

    return make


def recordings(execution, checkpoint, reference=None):
    """One or, with a reference, two recordings of an execution."""
    side = Side(execution=execution, checkpoint=checkpoint)
    with EXECUTIONS[execution].open(side) as record:
        result = [record(SAMPLES)]
        if reference is not None:
            result.append(record(SAMPLES, reference))
    return result


@pytest.fixture(scope="module")
def reference(checkpoint_of):
    (recording,) = recordings("full", checkpoint_of())
    return recording


@pytest.fixture(scope="module")
def local_engine(checkpoint_of, reference):
    """The local engine compared with transformers."""
    recording, isolated = recordings("local", checkpoint_of(), reference)
    return compare(reference, recording, isolated, SAMPLES)


def test_local_engine_draws_the_given_tokens(local_engine):
    responses = SAMPLES.total - sum(SAMPLES.prompt_lengths)
    assert local_engine.log_probs.tokens == responses
    assert local_engine.log_probs.mean < 1e-5


def test_local_engine_shows_all_operations_of_transformers(local_engine):
    assert len(local_engine.operations) == 3 + 2 * 17


def test_local_engine_differs_from_transformers_by_rounding(local_engine):
    assert max(row.difference.relative for row in local_engine.operations) < 1e-5


OPERATIONS = {
    "llama": 3 + 2 * 15,
    "mistral": 3 + 2 * 15,
    "mimo": 3 + 2 * 15,
    "phi3": 3 + 2 * 15,
    "smollm3": 3 + 2 * 15,
    "qwen2": 3 + 2 * 15,
    "seed_oss": 3 + 2 * 15,
    # Norms of queries and keys.
    "qwen3": 3 + 2 * 17,
    # Norms of queries and keys; norms of outputs instead of inputs.
    "olmo2": 3 + 2 * 17,
    # Norms of queries and keys; norms of inputs and outputs.
    "gemma3": 3 + 2 * 19,
    # Norms of outputs; without rotary embeddings, whose features have another order in training.
    "glm4": 3 + 2 * 15,
    # Latents of queries, keys and values; router and MLP of the second layer.
    "deepseek_v2": 3 + 15 + 14,
    "deepseek_v3": 3 + 15 + 14,
    "kimi_k2": 3 + 15 + 14,
    "glm4_moe_lite": 3 + 15 + 14,
    # Router and MLP instead of the four operations of a dense MLP. qwen2_moe and glm4_moe have a
    # shared expert, too.
    "qwen2_moe": 3 + 2 * 13,
    # Without the output projection, whose bias training adds with the residual.
    "gpt_oss": 3 + 2 * 12,
    "qwen3_moe": 3 + 2 * 15,
    # A gated delta net, which has no keys and values, and attention with norms of heads.
    "qwen3_next": 3 + 10 + 15,
    # The same with dense MLPs; the input projections of the delta net are joined in training.
    "qwen3_5": 3 + 10 + 17,
    "glm4_moe": 3 + 15 + 14,
}
"""Number of operations that transformers and training both show, by model type."""


def test_every_family_is_compared():
    model_types = set()
    for family in FAMILIES.values():
        # The tests' checkpoint of Gemma 3 has only its text model.
        model_types |= {family.model_type.removesuffix("_text"), *family.aliases}
    assert {*OPERATIONS} == model_types


@pytest.fixture(scope="module", params=OPERATIONS)
def trained_family(request, checkpoint_of):
    """A family, and its training engine compared with transformers."""
    checkpoint = checkpoint_of(request.param)
    (expected,) = recordings("full", checkpoint)
    recording, isolated = recordings("training", checkpoint, expected)
    return request.param, compare(expected, recording, isolated, SAMPLES)


def test_training_engine_has_the_operations_of_transformers(trained_family):
    family, comparison = trained_family
    assert len(comparison.operations) == OPERATIONS[family]


def test_training_engine_has_the_log_probs_of_transformers(trained_family):
    _, comparison = trained_family
    assert comparison.log_probs.mean < 1e-5


def test_operations_of_training_differ_by_rounding(trained_family):
    _, comparison = trained_family
    assert max(row.difference.relative for row in comparison.operations) < 1e-5
    assert max(row.own.relative for row in comparison.operations) < 1e-6


def test_rounding_of_all_operations_is_said(trained_family):
    _, comparison = trained_family
    assert sentence(comparison).endswith("Rounding explains the own differences of all operations.")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_engines_with_shared_operations_are_equal_bit_by_bit(checkpoint_of, precision, capsys):
    checkpoint = checkpoint_of()
    words = ["--reference", "local", "--other", "training", "--precision", precision]
    assert main(["parity", checkpoint, *SHORT, *words, "--true-on-policy"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["sentence"].startswith("local and training are equal bit by bit in " + precision)
    assert len(result["operations"]) == 3 + 2 * 17


def test_shared_operations_refuse_a_gpu():
    side = Side(execution="training", checkpoint="unread", true_on_policy=True)
    with pytest.raises(ValueError, match="but the execution training uses a GPU; hide it"):
        kernels_of(side, "cuda")


def test_shared_operations_use_the_cache_of_the_engine(checkpoint_of, monkeypatch):
    dtypes = []

    def spied(cache, config, device, dtype=None):
        dtypes.append(dtype)
        original(cache, config, device, dtype)

    original = SlotCache.__init__
    monkeypatch.setattr(SlotCache, "__init__", spied)
    side = Side(execution="local", checkpoint=checkpoint_of(), precision="bf16")
    with EXECUTIONS["local"].open(replace(side, true_on_policy=True)) as record:
        record(SAMPLES)
    assert dtypes == [torch.float32]


def test_changed_weight_of_the_training_engine_is_named(checkpoint_of, reference):
    def change(tensors):
        tensors["model.layers.1.self_attn.k_proj.weight"] *= 1.01

    changed = checkpoint_of(name="changed", change=change)
    recording, isolated = recordings("training", changed, reference)
    comparison = compare(reference, recording, isolated, SAMPLES)
    named = comparison.later_fault or comparison.first
    assert str(named.operation) == "key projection of layer 1"


def test_server_reveals_log_probs_only(checkpoint_of, capsys):
    with fake_servers(1) as (server,):
        words = ["parity", checkpoint_of(), *SHORT, "--other", "sglang", "--url", server.url]
        assert main(words) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["operations"] == []
    assert "one side reveals no hidden states" in result["sentence"]
    assert result["log_probs"]["tokens"] == (2 + 4) + (4 + 4) - 2


def test_log_probs_of_a_server_are_compared_with_another_server(checkpoint_of):
    with fake_servers(1) as (server,):
        side = Side(execution="sglang", checkpoint=checkpoint_of(), url=server.url)
        with EXECUTIONS["sglang"].open(side) as record:
            recording = record(SAMPLES)
    expected = [log_prob(token, 0) for tokens in SAMPLES.tokens for token in tokens[1:]]
    assert torch.equal(recording.log_probs_T[SAMPLES.predicted], torch.tensor(expected))


REFUSALS = {
    "server that is down": (
        ["--other", "sglang", "--url", "http://127.0.0.1:9"],
        "Start a server of SGLang with this checkpoint, or correct --url.",
    ),
    "server without address": (["--other", "vllm"], "the execution vllm needs --url"),
    "address without server": (["--url", "http://127.0.0.1:9"], "add --other sglang or"),
}


@pytest.mark.parametrize(("words", "message"), REFUSALS.values(), ids=[*REFUSALS])
def test_server_that_cannot_be_asked_is_refused(checkpoint_of, capsys, words, message):
    checkpoint = checkpoint_of()
    capsys.readouterr()
    assert main(["parity", checkpoint, *SHORT, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_report_has_the_sentence(checkpoint_of, tmp_path, capsys):
    out = tmp_path / "parity.html"
    words = ["parity", checkpoint_of(), *SHORT, "--other", "full", "--other-precision", "bf16"]
    assert main([*words, "--out", str(out)]) == 0
    page = html.unescape(out.read_text())
    assert json.loads(capsys.readouterr().out)["sentence"] in page
    assert page.count("Plotly.newPlot(") == 3
