"""Proofs with other checkpoints, templates, experts and two scorings."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from slime_tis.analysis.diagnosis.hypotheses.weights import read_adapter
from slime_tis.analysis.diagnosis.proof import Proof, explain_disagreement, prove
from slime_tis.analysis.dumps.table import TokenTable
from slime_tis.main import main
from tests.checkpoints import make_checkpoint
from tests.diagnosis.test_proof import PROMPT, RESPONSE, SAMPLES, Rows, dump, log_probs, logits_of

TENSOR = "model.layers.1.mlp.down_proj.weight"


def loaded(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "start", "llama")


@pytest.fixture(scope="module")
def earlier(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The start with noise in all tensors."""
    model, generator = loaded(start), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * weight.abs().mean() * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(path := tmp_path_factory.mktemp("checkpoints") / "earlier")
    return path


def engine(path: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Any:
    model = loaded(path)
    model.load_state_dict(change(model.state_dict()), strict=False)
    return lambda _, tokens: log_probs(logits_of(model, tokens), tokens)


def stale_prompt(old: Any) -> Any:
    def score(model: Any, tokens: torch.Tensor) -> Rows:
        with torch.inference_mode():
            cache = old(tokens[:, : PROMPT - 1], use_cache=True).past_key_values
        return log_probs(logits_of(model, tokens[:, PROMPT - 1 :], past_key_values=cache), tokens)

    return score


def test_faults_of_other_checkpoints_are_named(start: Path, earlier: Path, tmp_path: Path) -> None:
    old, model = loaded(earlier), loaded(start)
    draft = make_checkpoint(
        tmp_path / "draft", "llama", seed=5, hidden_size=16, num_hidden_layers=1
    )
    half = {
        name: weight.lerp(old.state_dict()[name], 0.4)
        for name, weight in model.state_dict().items()
    }
    layer = {name: weight for name, weight in old.state_dict().items() if ".layers.0." in name}
    planted: dict[str, tuple[Any, Path, str, str]] = {
        "tensor": (
            engine(start, lambda w: {TENSOR: old.state_dict()[TENSOR]}),
            earlier,
            TENSOR,
            "weights_not_updated",
        ),
        "layer": (engine(start, lambda w: layer), earlier, "layer of", "weights_not_updated"),
        "fraction": (engine(start, lambda w: half), earlier, "weights of", "weights_not_updated"),
        "cache": (stale_prompt(old), earlier, "prompt cache", "stale_cache"),
        "draft": (
            lambda _, t: log_probs(logits_of(loaded(draft), t), t),
            draft,
            "model ",
            "other_model",
        ),
    }
    for fault, (score, other, name, cause) in planted.items():
        _, proof = prove(dump(model, score), str(start), [str(other)])
        assert name in proof.explanations[0].name, (fault, proof.sentence)
        assert proof.is_proven and proof.causes == (cause,), (fault, proof.sentence)
        assert fault != "fraction" or proof.explanations[0].value == pytest.approx(0.4, abs=0.01)


def test_a_missing_adapter_is_named(start: Path, tmp_path: Path) -> None:
    name, generator = "model.layers.0.self_attn.q_proj", torch.Generator().manual_seed(0)
    model = loaded(start)
    own = model.state_dict()[f"{name}.weight"]
    down, up = (
        torch.randn(4, own.shape[1], generator=generator),
        0.1 * torch.randn(own.shape[0], 4, generator=generator),
    )
    adapter = {
        f"base_model.model.{name}.lora_A.weight": down,
        f"base_model.model.{name}.lora_B.weight": up,
    }
    save_file(
        {key: value.contiguous() for key, value in adapter.items()},
        tmp_path / "adapter_model.safetensors",
    )
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8}))
    score = engine(start, lambda w: {f"{name}.weight": own - 2 * up @ down})
    _, proof = prove(dump(model, score), str(start), [str(tmp_path)])
    assert proof.is_proven and "adapter" in proof.sentence
    assert proof.explanations[0].value == pytest.approx(-1.0, abs=0.01)
    for content in ('{"r": 4}', "[]", '{"r": 0, "lora_alpha": 8}'):
        (tmp_path / "adapter_config.json").write_text(content)
        with pytest.raises(ValueError, match="no LoRA adapter"):
            prove(dump(model, score), str(start), [str(tmp_path)])


ADAPTED = "base_model.model.model.layers.0.self_attn.q_proj"
BAD_TENSORS = {
    "NaN": ({f"{ADAPTED}.lora_A.weight": torch.full((4, 32), torch.nan)}, "holds NaN or infinity"),
    "DoRA": (
        {f"{ADAPTED}.lora_magnitude_vector": torch.ones(64)},
        "lora_magnitude_vector, which plain LoRA",
    ),
    "a trained embedding": (
        {"base_model.model.model.embed_tokens.weight": torch.ones(3)},
        "embed_tokens.weight, which",
    ),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_an_adapter_that_is_not_plain_lora_is_refused(
    name: str, start: Path, tmp_path: Path
) -> None:
    tensors, message = BAD_TENSORS[name]
    own = loaded(start).state_dict()
    plain = {
        f"{ADAPTED}.lora_A.weight": torch.ones(
            4, own["model.layers.0.self_attn.q_proj.weight"].shape[1]
        ),
        f"{ADAPTED}.lora_B.weight": torch.ones(
            own["model.layers.0.self_attn.q_proj.weight"].shape[0], 4
        ),
    }
    save_file({**plain, **tensors}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8}))
    with pytest.raises(ValueError, match=message):
        read_adapter(str(tmp_path), own)


def test_another_template_is_named(start: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(start)

    def in_template(model: Any, tokens: torch.Tensor) -> Rows:
        rows = [f"user:{tokenizer.decode(row[:PROMPT])}.assistant:" for row in tokens]
        prompts = torch.tensor(tokenizer(rows, add_special_tokens=False)["input_ids"])
        return log_probs(logits_of(model, torch.cat([prompts, tokens[:, PROMPT:]], 1)), tokens)

    _, proof = prove(dump(loaded(start), in_template), str(start))
    assert (proof.explanations[0].name, proof.is_proven) == ("chat template added", True)


def test_experts_of_the_dump_are_tried(tmp_path: Path) -> None:
    model = loaded(make_checkpoint(tmp_path, "qwen3_moe"))
    gates = [layer.mlp.gate for layer in model.model.layers]
    chosen: list[torch.Tensor] = []

    def other_experts(gate: Any, args: Any, output: Any) -> Any:
        """Experts 2 to 3 places below the best, with the router's own weights."""
        logits, weights, experts = output
        values, indices = logits.softmax(-1).topk(3, -1)
        rows = torch.arange(len(logits)) % (PROMPT + RESPONSE) >= PROMPT - 1
        experts = torch.where(rows[:, None], indices[:, 1:], experts)
        weights = torch.where(
            rows[:, None], values[:, 1:] / values[:, 1:].sum(1, keepdim=True), weights
        )
        chosen.append(experts)
        return logits, weights, experts

    def score(model: Any, tokens: torch.Tensor) -> Rows:
        hooks = [gate.register_forward_hook(other_experts) for gate in gates]
        rows = log_probs(logits_of(model, tokens), tokens)
        for hook in hooks:
            hook.remove()
        return rows

    table = dump(model, score)
    experts = torch.stack(chosen, 1).unflatten(0, (SAMPLES, -1))[:, PROMPT - 1 : -1].flatten(0, 1)
    _, proof = prove(replace(table, experts=experts.numpy().astype(np.int32)), str(tmp_path))
    assert (proof.explanations[0].name, proof.is_proven) == (
        "recorded experts",
        True,
    ), proof.sentence


def two_scorings(table: TokenTable, model: Any, second: np.ndarray) -> Proof:
    noise = 0.05 * np.random.default_rng(0).standard_normal(table.tokens).astype(np.float32)
    exact = table.train_log_prob
    table = replace(
        table, rollout_log_prob=exact, train_log_prob=exact + noise, old_log_prob=exact + second
    )
    return explain_disagreement(model, table)[1]


def test_dropout_is_named_by_two_scorings(start: Path) -> None:
    model = loaded(start)
    table = dump(model, lambda m, t: log_probs(logits_of(m, t), t))
    noise = 0.05 * np.random.default_rng(1).standard_normal(table.tokens).astype(np.float32)
    proof = two_scorings(table, model, noise)
    assert proof.causes == ("dropout",) and proof.is_noise and not proof.is_proven
    assert two_scorings(table, model, 0 * noise).causes == ()


def test_the_demo_finds_its_fault_in_an_empty_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["diagnose", "--demo"]) == 0
    assert "applies a repetition penalty of about 1.1:" in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "slime-tis-diagnosis" / "report.html").stat().st_size > 1e6
    for words in (["--demo"], ["--demo", "--json"], []):
        assert main(["diagnose", *words]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
