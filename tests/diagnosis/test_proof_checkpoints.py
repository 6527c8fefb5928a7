"""Proofs with other checkpoints, templates, experts and two scorings."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from slime_tis.analysis.diagnosis.checkpoint_proof import prove
from slime_tis.analysis.diagnosis.hypotheses.prompts import for_template
from slime_tis.analysis.diagnosis.hypotheses.weights import read_adapter
from slime_tis.analysis.diagnosis.proof import Proof, explain_disagreement
from slime_tis.analysis.diagnosis.rescore import HfScorer
from slime_tis.analysis.diagnosis.search import Search
from slime_tis.analysis.dumps.table import TokenTable
from slime_tis.main import main
from tests.checkpoints import make_checkpoint
from tests.diagnosis.test_proof import (
    PROMPT,
    RESPONSE,
    SAMPLES,
    Engine,
    Rows,
    dump,
    log_probs,
    logits_of,
)

TENSOR = "model.layers.1.mlp.down_proj.weight"


def loaded(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "start", "llama")


@pytest.fixture(scope="module")
def earlier(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The start with noise in all tensors."""
    model = loaded(start)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * weight.abs().mean() * torch.randn(weight.shape, generator=generator))
    path = tmp_path_factory.mktemp("checkpoints") / "earlier"
    model.save_pretrained(path)
    return path


Weights = dict[str, torch.Tensor]


def engine(path: Path, weights: Weights) -> Engine:
    """The model of a checkpoint with some other weights."""
    model = loaded(path)
    model.load_state_dict(weights, strict=False)
    return lambda _, tokens: log_probs(logits_of(model, tokens), tokens)


def stale_prompt(old: Any) -> Engine:
    """The prompt is in the cache of an older model."""

    def score(model: Any, tokens: torch.Tensor) -> Rows:
        with torch.inference_mode():
            cache = old(tokens[:, : PROMPT - 1], use_cache=True).past_key_values
        return log_probs(logits_of(model, tokens[:, PROMPT - 1 :], past_key_values=cache), tokens)

    return score


@pytest.fixture(scope="module")
def old_weights(earlier: Path) -> Weights:
    return loaded(earlier).state_dict()


def test_an_old_tensor_is_named(start: Path, earlier: Path, old_weights: Weights) -> None:
    table = dump(loaded(start), engine(start, {TENSOR: old_weights[TENSOR]}))
    _, proof = prove(table, str(start), [str(earlier)])
    assert TENSOR in proof.explanations[0].name
    assert (proof.is_proven, proof.causes) == (True, ("weights_not_updated",)), proof.sentence


def test_an_old_layer_is_named(start: Path, earlier: Path, old_weights: Weights) -> None:
    layer = {name: weight for name, weight in old_weights.items() if ".layers.0." in name}
    _, proof = prove(dump(loaded(start), engine(start, layer)), str(start), [str(earlier)])
    assert "layer of" in proof.explanations[0].name
    assert (proof.is_proven, proof.causes) == (True, ("weights_not_updated",)), proof.sentence


def test_an_old_shard_is_named(start: Path, earlier: Path, old_weights: Weights) -> None:
    weights = loaded(start).state_dict()
    for name, old in old_weights.items():
        if old.dim() != 2:
            continue
        if "o_proj" in name or "down_proj" in name:
            half = old.shape[1] // 2
            weights[name] = torch.cat([weights[name][:, :half], old[:, half:]], 1)
        else:
            half = old.shape[0] // 2
            weights[name] = torch.cat([weights[name][:half], old[half:]])
    table = dump(loaded(start), engine(start, weights))
    _, proof = prove(table, str(start), [str(earlier)])
    assert "shard of" in proof.explanations[0].name
    assert (proof.is_proven, proof.causes) == (True, ("weights_not_updated",)), proof.sentence


def test_an_old_half_of_a_tensor_is_named(start: Path, earlier: Path, old_weights: Weights) -> None:
    own = loaded(start).state_dict()[TENSOR]
    half = len(own) // 2
    weights = {TENSOR: torch.cat([old_weights[TENSOR][:half], own[half:]])}
    table = dump(loaded(start), engine(start, weights))
    _, proof = prove(table, str(start), [str(earlier)])
    assert proof.explanations[0].name.startswith(f"half of {TENSOR}")
    assert (proof.is_proven, proof.causes) == (True, ("weights_not_updated",)), proof.sentence


def half_updated(weights: Weights, *, by_name: bool) -> Weights:
    """The old values of the tensors that half an update does not reach."""
    names = list(weights)
    if by_name:
        names.sort()
    return {name: weights[name] for name in names[len(names) // 2 :]}


@pytest.fixture(scope="module", params=["by model", "by name"])
def half_update_proof(
    request: pytest.FixtureRequest, start: Path, earlier: Path, old_weights: Weights
) -> Proof:
    """The proof for an update that ended after half of the tensors, in one of two orders."""
    weights = half_updated(old_weights, by_name=request.param == "by name")
    _, proof = prove(dump(loaded(start), engine(start, weights)), str(start), [str(earlier)])
    return proof


def test_half_an_update_is_named(half_update_proof: Proof) -> None:
    assert "last tensors" in half_update_proof.explanations[0].name, half_update_proof.sentence
    assert half_update_proof.is_proven
    assert half_update_proof.causes == ("weights_not_updated",)


def test_half_an_update_ends_the_search_before_other_networks(half_update_proof: Proof) -> None:
    assert "network_setting" not in half_update_proof.tested


def noisy_engine(_: Any, tokens: torch.Tensor) -> Rows:
    """A network without a relation to the model: all tokens are about equally likely."""
    generator = torch.Generator().manual_seed(0)
    logits = 0.3 * torch.randn(len(tokens), RESPONSE, 64, generator=generator)
    return log_probs(logits, tokens)


def test_random_weights_prove_no_other_cause(start: Path) -> None:
    model = loaded(start)
    model.lm_head.weight.data.mul_(30)  # far from uniform
    _, proof = explain_disagreement(model, dump(model, noisy_engine))
    # A soft cap of the logits also makes all tokens about equally likely.
    assert proof.explained > 0.9
    assert not proof.is_proven, proof.sentence


def test_a_tied_output_layer_that_stays_old_is_named(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "tied", "llama", tie_word_embeddings=True)
    old = loaded(path)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        embedding = old.get_input_embeddings().weight
        noise = torch.randn(embedding.shape, generator=generator)
        embedding.add_(0.2 * embedding.abs().mean() * noise)
    old.save_pretrained(tmp_path / "old")

    def stale_head(model: Any, tokens: torch.Tensor) -> Rows:
        with torch.inference_mode():
            hidden = model.model(tokens).last_hidden_state[:, -RESPONSE - 1 : -1]
            return log_probs(hidden @ old.get_output_embeddings().weight.T, tokens)

    table = dump(loaded(path), stale_head)
    _, proof = prove(table, str(path), [str(tmp_path / "old")])
    assert "tied output" in proof.explanations[0].name
    assert (proof.is_proven, proof.causes) == (True, ("weights_not_updated",)), proof.sentence


def test_weights_between_two_steps_are_named(
    start: Path, earlier: Path, old_weights: Weights
) -> None:
    model = loaded(start)
    between = {}
    for name, weight in model.state_dict().items():
        between[name] = weight.lerp(old_weights[name], 0.4)
    _, proof = prove(dump(model, engine(start, between)), str(start), [str(earlier)])
    assert "weights of" in proof.explanations[0].name
    assert proof.explanations[0].value == pytest.approx(0.4, abs=0.01)
    assert (proof.is_proven, proof.causes) == (True, ("weights_not_updated",)), proof.sentence


def test_a_prompt_cache_of_old_weights_is_named(start: Path, earlier: Path) -> None:
    table = dump(loaded(start), stale_prompt(loaded(earlier)))
    _, proof = prove(table, str(start), [str(earlier)])
    assert "prompt cache" in proof.explanations[0].name
    assert (proof.is_proven, proof.causes) == (True, ("stale_cache",)), proof.sentence


def test_hypotheses_on_checkpoints_can_be_combined(
    start: Path, earlier: Path, old_weights: Weights
) -> None:
    model = loaded(start)
    table = dump(model, engine(start, {TENSOR: old_weights[TENSOR]}))
    search = Search(table, HfScorer(model), None, "rollout")
    before = set(search.table)
    search.add({str(earlier): loaded(earlier)})
    added = [name for name in search.table if name not in before]
    others = ["packed neighbor", "attention window", "chunks", "position gap", "prompt cut"]
    for name in added:
        for other in others:
            edits = tuple((each, search.table[each].values[0]) for each in (other, name))
            (rows,) = search.scorer.score([edits], [1, 2])
            assert [len(row) for row in rows] == [RESPONSE] * 2, edits
            assert all(row.isfinite().all() for row in rows), edits


def test_a_draft_model_is_named(start: Path, tmp_path: Path) -> None:
    draft = make_checkpoint(
        tmp_path / "draft", "llama", seed=5, hidden_size=16, num_hidden_layers=1
    )
    _, proof = prove(dump(loaded(start), engine(draft, {})), str(start), [str(draft)])
    assert "model " in proof.explanations[0].name
    assert (proof.is_proven, proof.causes) == (True, ("other_model",)), proof.sentence


ADAPTED = "base_model.model.model.layers.0.self_attn.q_proj"
ADAPTED_WEIGHT = "model.layers.0.self_attn.q_proj.weight"


def save_adapter(directory: Path, tensors: Weights, config: str) -> None:
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(config)


CONFIG = json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8})


def test_a_missing_adapter_is_named(start: Path, tmp_path: Path) -> None:
    model = loaded(start)
    weight = model.state_dict()[ADAPTED_WEIGHT]
    generator = torch.Generator().manual_seed(0)
    down = torch.randn(4, weight.shape[1], generator=generator)
    up = 0.1 * torch.randn(weight.shape[0], 4, generator=generator)
    adapter = {f"{ADAPTED}.lora_A.weight": down, f"{ADAPTED}.lora_B.weight": up}
    save_adapter(tmp_path, adapter, CONFIG)
    without = engine(start, {ADAPTED_WEIGHT: weight - 2 * up @ down})
    _, proof = prove(dump(model, without), str(start), [str(tmp_path)])
    assert proof.is_proven
    assert "adapter" in proof.sentence
    assert proof.explanations[0].value == pytest.approx(-1.0, abs=0.01)


def plain_adapter(own: Weights) -> Weights:
    rows, columns = own[ADAPTED_WEIGHT].shape
    return {
        f"{ADAPTED}.lora_A.weight": torch.ones(4, columns),
        f"{ADAPTED}.lora_B.weight": torch.ones(rows, 4),
    }


BAD_CONFIGS = {
    "no object": ("[]", "is no LoRA adapter"),
    "no alpha": ('{"peft_type": "LORA", "r": 4}', "has lora_alpha None"),
    "alpha NaN": ('{"peft_type": "LORA", "r": 4, "lora_alpha": NaN}', "has lora_alpha nan"),
    "alpha -1": ('{"peft_type": "LORA", "r": 4, "lora_alpha": -1}', "has lora_alpha -1"),
    "rank 0": ('{"peft_type": "LORA", "r": 0, "lora_alpha": 8}', "has r 0"),
    "another rank": ('{"peft_type": "LORA", "r": 8, "lora_alpha": 8}', "does not fit r 8"),
}


@pytest.mark.parametrize(("config", "message"), BAD_CONFIGS.values(), ids=BAD_CONFIGS)
def test_a_bad_adapter_config_is_refused(
    config: str, message: str, start: Path, tmp_path: Path
) -> None:
    own = loaded(start).state_dict()
    save_adapter(tmp_path, plain_adapter(own), config)
    with pytest.raises(ValueError, match=message):
        read_adapter(str(tmp_path), own)


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
    save_adapter(tmp_path, {**plain_adapter(own), **tensors}, CONFIG)
    with pytest.raises(ValueError, match=message):
        read_adapter(str(tmp_path), own)


def test_an_adapter_with_only_a_is_refused(start: Path, tmp_path: Path) -> None:
    own = loaded(start).state_dict()
    tensors = plain_adapter(own)
    del tensors[f"{ADAPTED}.lora_B.weight"]
    save_adapter(tmp_path, tensors, CONFIG)
    with pytest.raises(ValueError, match=r"lora_A\.weight without"):
        read_adapter(str(tmp_path), own)


def test_an_adapter_of_another_model_is_refused(start: Path, tmp_path: Path) -> None:
    own = loaded(start).state_dict()
    save_adapter(tmp_path, plain_adapter(own), CONFIG)
    with pytest.raises(ValueError, match="it belongs to another model"):
        read_adapter(str(tmp_path), {ADAPTED_WEIGHT: own[ADAPTED_WEIGHT][:, :16]})


def test_another_template_is_named(start: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(start)

    def in_template(model: Any, tokens: torch.Tensor) -> Rows:
        rows = [f"user:{tokenizer.decode(row[:PROMPT])}.assistant:" for row in tokens]
        prompts = torch.tensor(tokenizer(rows, add_special_tokens=False)["input_ids"])
        return log_probs(logits_of(model, torch.cat([prompts, tokens[:, PROMPT:]], 1)), tokens)

    _, proof = prove(dump(loaded(start), in_template), str(start))
    assert proof.explanations[0].name == "chat template added"
    assert proof.is_proven


def test_claims_on_the_start_of_an_answer_are_sentences(start: Path) -> None:
    table = for_template(AutoTokenizer.from_pretrained(start))
    part = "the start of the answer that the chat template adds"
    assert table["generation prompt missing"].claim == f"does not read {part}"
    assert table["generation prompt added"].claim == f"reads twice {part}"


@pytest.mark.parametrize("bos", [0, 1], ids=["id 0", "id 1"])
def test_the_first_message_starts_after_bos(start: Path, bos: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(start)
    mark, other = 2, 9
    tokens = {"bos_token": bos, "eos_token": mark}
    tokenizer.add_special_tokens(
        {name: tokenizer.convert_ids_to_tokens(token) for name, token in tokens.items()}
    )
    edit = for_template(tokenizer)["first message missing"].prompt
    assert edit is not None
    prompt = torch.tensor([bos, mark, other, mark, other + 1])
    assert edit(prompt, 0).tolist() == [mark, other + 1]


def test_experts_of_the_dump_are_tried(tmp_path: Path) -> None:
    model = loaded(make_checkpoint(tmp_path, "qwen3_moe"))
    gates = [layer.mlp.gate for layer in model.model.layers]
    chosen: list[torch.Tensor] = []

    def other_experts(gate: Any, args: Any, output: Any) -> Any:
        """The second and the third best experts, with the router's weights for them."""
        logits, weights, experts = output
        values, indices = logits.softmax(-1).topk(3, -1)
        other_weights = values[:, 1:] / values[:, 1:].sum(1, keepdim=True)
        predicts_response = torch.arange(len(logits)) % (PROMPT + RESPONSE) >= PROMPT - 1
        experts = torch.where(predicts_response[:, None], indices[:, 1:], experts)
        weights = torch.where(predicts_response[:, None], other_weights, weights)
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
    assert proof.explanations[0].name == "recorded experts", proof.sentence
    assert proof.is_proven


@pytest.fixture(scope="module")
def exact(start: Path) -> TokenTable:
    """Samples on which both engines agree."""
    return dump(loaded(start), lambda m, t: log_probs(logits_of(m, t), t))


def noise_of(table: TokenTable, seed: int) -> np.ndarray:
    return 0.05 * np.random.default_rng(seed).standard_normal(table.tokens).astype(np.float32)


def proof_of_two_scorings(start: Path, exact: TokenTable, second: np.ndarray) -> Proof:
    """The proof if both scorings by training are wrong."""
    log_prob = exact.train_log_prob
    table = replace(
        exact, train_log_prob=log_prob + noise_of(exact, 0), old_log_prob=log_prob + second
    )
    return explain_disagreement(loaded(start), table)[1]


def test_dropout_is_named_by_two_scorings(start: Path, exact: TokenTable) -> None:
    proof = proof_of_two_scorings(start, exact, noise_of(exact, 1))
    assert proof.causes == ("dropout",)
    assert proof.is_noise
    assert not proof.is_proven


def test_an_exact_second_scoring_is_no_dropout(start: Path, exact: TokenTable) -> None:
    proof = proof_of_two_scorings(start, exact, 0 * noise_of(exact, 1))
    assert proof.causes == ()


def test_masked_tokens_do_not_hide_dropout(start: Path, exact: TokenTable) -> None:
    mask = np.zeros(exact.tokens, np.uint8)
    mask[::5] = 1
    proof = proof_of_two_scorings(start, replace(exact, loss_mask=mask), noise_of(exact, 1))
    assert proof.causes == ("dropout",)


def test_the_demo_finds_its_fault_in_an_empty_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["diagnose", "--demo"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "applies a repetition penalty of about 1.1:" in text
    assert (tmp_path / "slime-tis-diagnosis" / "report.html").stat().st_size > 1e6
    # The second demo does not overwrite the first one.
    assert main(["diagnose", "--demo"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    "options",
    [pytest.param(["--demo", "--json"], id="demo as JSON"), pytest.param([], id="no file")],
)
def test_diagnose_without_a_file_is_refused(options: list[str], capsys: Any) -> None:
    assert main(["diagnose", *options]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.fixture(scope="module")
def run_with_stale_cache(start: Path, earlier: Path) -> TokenTable:
    """Two steps: engines agree in the first one, and the second one reads an old cache."""
    before = loaded(earlier)
    first = dump(before, engine(earlier, {}))
    second = dump(loaded(start), stale_prompt(before), seed=1)
    table = TokenTable.concatenate([first, second])
    steps = np.repeat(np.array([0, 1], dtype=np.int32), SAMPLES)
    return replace(table, step=steps)


def test_a_checkpoint_of_a_good_step_names_the_bad_one(
    run_with_stale_cache: TokenTable, earlier: Path
) -> None:
    _, proof = prove(run_with_stale_cache, str(earlier))
    assert "the checkpoint has the weights of step 0" in proof.sentence
    assert "nats in step 1" in proof.sentence


def test_the_checkpoint_of_the_bad_step_is_the_reference(
    run_with_stale_cache: TokenTable, start: Path, earlier: Path
) -> None:
    rescored, proof = prove(run_with_stale_cache, str(earlier), [str(start)])
    assert rescored.step == 1
    assert proof.causes == ("stale_cache",), proof.sentence
