"""`slime-tis parity` with LoRA adapters: both engines apply them, and faults are named."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_tis.main import main
from slime_tis.parity import transformers_executions
from slime_tis.peft_directory import AdapterConfig, write_adapter
from tests.checkpoints import make_checkpoint
from tests.parity.test_parity_command import refused
from tests.rollout.sglang.fake_sglang import fake_servers

RANK = 4
ALPHA = 8.0
PROJECTIONS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model of two layers, with weights that bf16 holds exactly."""
    directory = make_checkpoint(tmp_path_factory.mktemp("base") / "llama", "llama")
    path = directory / "model.safetensors"
    weights = load_file(path)
    exact = {name: weight.bfloat16().to(weight) for name, weight in weights.items()}
    save_file(exact, path, metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def tensors(base):
    """A and B of all linear layers by PEFT's names."""
    weights = load_file(base / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(2):
        for projection in PROJECTIONS:
            name = f"model.layers.{layer}.{projection}"
            rows, columns = weights[f"{name}.weight"].shape
            prefix = f"base_model.model.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator)
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator) / 50
    return tensors


def save(directory, base, tensors, alpha=ALPHA):
    """Writes an adapter in PEFT's format; returns its path."""
    directory.mkdir()
    targets = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors})
    config = AdapterConfig(rank=RANK, alpha=alpha, targets=tuple(targets))
    write_adapter(directory, tensors, config, base=str(base))
    return str(directory)


@pytest.fixture(scope="module")
def adapter(base, tensors, tmp_path_factory):
    return save(tmp_path_factory.mktemp("adapter") / "adapter", base, tensors)


def compared(capsys, *words):
    """The JSON of a comparison."""
    assert main(["parity", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("execution", ["decode", "local", "training"])
def test_executions_with_the_same_adapter_agree(execution, base, adapter, capsys):
    words = [base, "--adapter", adapter, "--samples", "2", "--other", execution]
    result = compared(capsys, *words)
    assert result["log_probs"]["mean"] < 1e-5
    assert result["cause"] is None


def test_the_adapter_has_an_effect(base, adapter, capsys):
    words = [base, "--adapter", adapter, "--samples", "2", "--other", "full"]
    assert compared(capsys, *words, "--other-adapter", "none")["log_probs"]["mean"] > 0.1


def half_loaded(tensors, *words):
    """The tensors of an adapter whose name has one of the words."""
    return {name: tensor for name, tensor in tensors.items() if any(map(name.__contains__, words))}


def without(tensors, word):
    return {name: tensor for name, tensor in tensors.items() if word not in name}


FAULTS = {
    "half of alpha": (lambda tensors: tensors, ALPHA / 2, "Alpha is wrong: the adapter has 0.5"),
    "rank-stabilized": (lambda tensors: tensors, ALPHA * 2, "Alpha is wrong: the adapter has 2"),
    "no MLP": (
        lambda tensors: half_loaded(tensors, "self_attn"),
        ALPHA,
        "loaded in part: it is absent in MLP",
    ),
    "no values": (
        lambda tensors: without(tensors, "v_proj"),
        ALPHA,
        "loaded in part: it is absent in v_proj",
    ),
    "first layer only": (
        lambda tensors: half_loaded(tensors, "layers.0"),
        ALPHA,
        "loaded in part: it is absent in layer 1",
    ),
}


@pytest.mark.parametrize(("change", "alpha", "fault"), FAULTS.values(), ids=FAULTS)
def test_a_fault_of_the_adapter_is_named(
    change, alpha, fault, base, tensors, adapter, tmp_path, capsys
):
    other = save(tmp_path / "other", base, change(tensors), alpha)
    words = [base, "--adapter", adapter, "--other", "full", "--other-adapter", other]
    assert fault in compared(capsys, *words)["cause"]


def test_an_absent_adapter_is_named(base, adapter, capsys):
    words = [base, "--adapter", adapter, "--other", "full", "--other-adapter", "none"]
    assert compared(capsys, *words)["cause"].startswith("The adapter is absent. With the ")


def test_a_stale_adapter_is_named(base, tensors, adapter, tmp_path, capsys):
    generator = torch.Generator().manual_seed(1)
    older_tensors = {}
    for name, tensor in tensors.items():
        older_tensors[name] = tensor
        if "lora_B" in name:
            older_tensors[name] = tensor + torch.randn(tensor.shape, generator=generator) / 50
    older = save(tmp_path / "older", base, older_tensors)
    words = [base, "--adapter", adapter, "--other", "full", "--other-adapter", older]
    cause = compared(capsys, *words, "--older-adapter", older)["cause"]
    assert cause.startswith("The adapter is stale. ")
    assert f"has the weights of {older}" in cause


def test_a_merged_model_with_rounding_is_named(base, tensors, adapter, tmp_path, capsys):
    merged = make_checkpoint(tmp_path / "merged", "llama")
    weights = load_file(base / "model.safetensors")
    for name in without(tensors, "lora_B"):
        layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        up = tensors[name.replace("lora_A", "lora_B")]
        change = ALPHA / RANK * up @ tensors[name]
        weights[f"{layer}.weight"] = (weights[f"{layer}.weight"] + change).bfloat16().float()
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    words = [base, "--adapter", adapter, "--other", "full", "--other-adapter", "none"]
    cause = compared(capsys, *words, "--other-checkpoint", merged)["cause"]
    assert cause.startswith("The adapter is merged with rounding. ")


def test_the_text_has_the_fault_after_the_sentence(base, adapter, capsys):
    words = [str(base), "--adapter", adapter, "--other", "full", "--other-adapter", "none"]
    assert main(["parity", *words]) == 0
    assert capsys.readouterr().out.split("\n\n")[1].startswith("The adapter is absent.")


def test_the_page_has_the_fault(base, adapter, tmp_path):
    page = tmp_path / "parity.html"
    words = [str(base), "--adapter", adapter, "--other", "full", "--other-adapter", "none"]
    assert main(["parity", *words, "--out", str(page)]) == 0
    assert "<p>The adapter is absent. With the reference" in page.read_text()


def test_few_samples_are_no_search(base, adapter, capsys):
    words = [base, "--adapter", adapter, "--samples", "2", "--other", "full"]
    cause = compared(capsys, *words, "--other-adapter", "none")["cause"]
    assert cause.endswith("not searched for: that needs 16 samples, and there are 2.")


def test_infinite_log_probs_are_no_search(base, tensors, adapter, tmp_path, capsys):
    huge = {name: 1e20 * tensor for name, tensor in tensors.items()}
    other = save(tmp_path / "other", base, huge)
    words = [base, "--adapter", adapter, "--other", "full", "--other-adapter", other]
    assert "not searched for: log-probs are NaN" in compared(capsys, *words)["cause"]


def test_training_refuses_an_adapter_without_its_own_option(base, tensors, tmp_path, capsys):
    first = save(tmp_path / "first", base, half_loaded(tensors, "layers.0"))
    line = refused([str(base), "--adapter", first, "--other", "training"], capsys)
    assert line.startswith(f"the adapter is '{first}' but its number of adapters of down_proj is 1")


def with_nan(tensors):
    spoiled = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in spoiled.values():
        tensor[0, 0] = torch.nan
    return spoiled


def with_wider_inputs(tensors):
    """The adapter of a model whose layers have twice as many inputs."""
    wider = dict(tensors)
    for name, tensor in tensors.items():
        if "lora_A" in name:
            wider[name] = torch.cat([tensor, tensor], 1)
    return wider


# what is refused, words with the adapter in the place of ADAPTER, and the message
EARLY = {
    "some layers for training": (
        lambda tensors: half_loaded(tensors, "layers.0"),
        ["--other-adapter", "ADAPTER", "--other", "training"],
        "only adapters of all layers are trained",
    ),
    "NaN in the other adapter": (with_nan, ["--other-adapter", "ADAPTER"], "NaN or infinity"),
    "NaN in an older adapter": (with_nan, ["--older-adapter", "ADAPTER"], "NaN or infinity"),
    "an older adapter of another model": (
        with_wider_inputs,
        ["--older-adapter", "ADAPTER"],
        "it is not one of this model",
    ),
    "no server": (
        lambda tensors: tensors,
        ["--other", "vllm", "--url", "http://127.0.0.1:9"],
        "Start a server of vLLM with this checkpoint, or correct --url",
    ),
}


@pytest.fixture
def no_sampling(monkeypatch):
    """The first step of a comparison cannot run."""
    monkeypatch.setattr(transformers_executions, "sampled_responses", None)


@pytest.mark.usefixtures("no_sampling")
@pytest.mark.parametrize(("change", "words", "message"), EARLY.values(), ids=EARLY)
def test_nothing_is_sampled_before_a_refusal(
    change, words, message, base, tensors, adapter, tmp_path, capsys
):
    other = save(tmp_path / "other", base, change(tensors))
    given = [other if word == "ADAPTER" else word for word in words]
    assert message in refused([str(base), "--adapter", adapter, *given], capsys)


REFUSED = {
    "no adapter": (["--adapter", "absent"], "--adapter is 'absent' but it holds no adapter_config"),
    "another adapter without one": (["--other-adapter", "ADAPTER"], "need --adapter"),
    "no other adapter without one": (["--other-adapter", "none"], "need --adapter"),
    "an older adapter without one": (["--older-adapter", "ADAPTER"], "need --adapter"),
    "shared operations": (
        ["--adapter", "ADAPTER", "--true-on-policy", "--other", "local"],
        "--true-on-policy does not work with LoRA adapters; remove --adapter",
    ),
    "another adapter of a server": (
        ["--adapter", "ADAPTER", "--other-adapter", "none", "--other", "vllm", "--url", "http://x"],
        "--other-adapter has no effect on the execution vllm",
    ),
    "a served adapter without a server": (
        ["--adapter", "ADAPTER", "--served-adapter", "a"],
        "--served-adapter names the adapter in requests to a server",
    ),
    "the same": (["--adapter", "ADAPTER", "--other", "full"], "precision and adapter; choose"),
}


@pytest.mark.parametrize(("words", "message"), REFUSED.values(), ids=REFUSED)
def test_options_that_do_not_fit_are_refused(words, message, base, adapter, capsys):
    given = [adapter if word == "ADAPTER" else word for word in words]
    assert message in refused([str(base), *given], capsys)


def test_an_adapter_of_another_model_is_refused(adapter, tmp_path, capsys):
    other = make_checkpoint(tmp_path / "other", "llama", hidden_size=64)
    capsys.readouterr()
    line = refused([str(other), "--adapter", adapter], capsys)
    assert "but it is not one of this model: the adapter's tensor base_model.model" in line
    assert "has the shape [32, 4], but the model needs [64, 4]" in line


@pytest.fixture
def served(base, adapter):
    """Words that compare with a server which records the requests, and the server."""
    with fake_servers(1) as (server,):
        server.adapters["mine"] = adapter
        words = [str(base), "--adapter", adapter, "--samples", "1", "--tokens", "4"]
        yield [*words, "--other", "sglang", "--url", server.url], server


def test_requests_to_a_server_name_its_adapter(served, capsys):
    words, server = served
    compared(capsys, *words, "--served-adapter", "mine")
    assert [body["lora_path"] for body in server.requests] == ["mine"]


def test_an_adapter_that_the_server_lacks_is_refused(served, capsys):
    words, server = served
    line = refused([*words, "--served-adapter", "theirs"], capsys)
    assert line.endswith(
        f"{server.url} has no adapter 'theirs', but mine; load it, or correct --served-adapter."
    )
