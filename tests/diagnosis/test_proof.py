"""Proofs by scoring again name faults that transformers' own tools plant, with their parameter."""

import io
import itertools
import json
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from slime_tis.analysis.diagnosis.checkpoint_proof import prove
from slime_tis.analysis.diagnosis.hypotheses import TABLE, Hypothesis, Input, hypotheses
from slime_tis.analysis.diagnosis.hypotheses.prompts import for_history
from slime_tis.analysis.diagnosis.proof import explain_disagreement
from slime_tis.analysis.diagnosis.rescore import HfScorer
from slime_tis.analysis.diagnosis.search import Search
from slime_tis.analysis.dumps.files import write
from slime_tis.analysis.dumps.table import SampleParts, TokenTable
from slime_tis.main import main
from tests.checkpoints import BOS, EOS, PAD, VOCAB_SIZE, make_checkpoint

PROMPT = 6
"""Tokens of a prompt."""
RESPONSE = 10
"""Tokens of a response."""
SAMPLES = 24
Rows = torch.Tensor
"""[S, T] log-probs."""
Engine = Callable[[Any, torch.Tensor], Rows]
"""(model, tokens of prompt and response) → log-probs of the response."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose distributions are far from uniform."""
    directory = make_checkpoint(tmp_path_factory.mktemp("proof") / "model", "llama")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(3)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def model(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def logits_of(model: Any, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(tokens, **options).logits[:, -RESPONSE - 1 : -1].float()


def log_probs(logits: torch.Tensor, tokens: torch.Tensor) -> Rows:
    return logits.log_softmax(-1).gather(2, tokens[:, -RESPONSE:, None])[..., 0]


def processed(processor: Any) -> Engine:
    """Log-probs after a logits processor of transformers, token by token."""

    def engine(model: Any, tokens: torch.Tensor) -> Rows:
        logits = logits_of(model, tokens)
        steps = []
        for t in range(RESPONSE):
            steps.append(processor(tokens[:, : PROMPT + t], logits[:, t].clone()))
        return log_probs(torch.stack(steps, 1), tokens)

    return engine


def bf16(model: Any, tokens: torch.Tensor) -> Rows:
    small = AutoModelForCausalLM.from_pretrained(model.name_or_path, dtype=torch.bfloat16).eval()
    return log_probs(logits_of(small, tokens), tokens)


def int8(model: Any, tokens: torch.Tensor, temperature: float = 1.0) -> Rows:
    small = AutoModelForCausalLM.from_pretrained(model.name_or_path, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in small.named_parameters():
            # Engines keep embeddings and the output layer.
            if name.endswith("proj.weight"):
                scale = weight.abs().amax(1, keepdim=True) / 127
                weight.copy_((weight / scale).round() * scale)
    return log_probs(logits_of(small, tokens) / temperature, tokens)


def configured(**options: Any) -> Engine:
    """The same weights with another configuration."""

    def engine(model: Any, tokens: torch.Tensor) -> Rows:
        config = AutoModelForCausalLM.from_pretrained(model.name_or_path).config
        config.update(options)
        changed = AutoModelForCausalLM.from_pretrained(
            model.name_or_path, config=config, dtype=torch.float32
        ).eval()
        return log_probs(logits_of(changed, tokens), tokens)

    return engine


def rope(**parameters: Any) -> Engine:
    return configured(
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, **parameters}
    )


def prompted(change: Callable[[torch.Tensor], torch.Tensor]) -> Engine:
    """The response after another prompt."""

    def engine(model: Any, tokens: torch.Tensor) -> Rows:
        other = torch.cat([change(tokens[:, :PROMPT]), tokens[:, PROMPT:]], 1)
        return log_probs(logits_of(model, other), tokens)

    return engine


def filled(token: int, count: int) -> torch.Tensor:
    return torch.full((SAMPLES, count), token)


def window(model: Any, tokens: torch.Tensor) -> Rows:
    distance = torch.arange(PROMPT + RESPONSE)[:, None] - torch.arange(PROMPT + RESPONSE)
    mask = torch.where((distance >= 0) & (distance < 5), 0.0, -1e30)
    masks = mask.expand(SAMPLES, 1, -1, -1)
    return log_probs(logits_of(model, tokens, attention_mask=masks), tokens)


def packed(model: Any, tokens: torch.Tensor) -> Rows:
    ids = torch.arange(PROMPT + RESPONSE).repeat(SAMPLES, 2)
    both = torch.cat([tokens.roll(1, 0), tokens], 1)
    options = {"position_ids": ids, "attention_mask": torch.ones_like(both)}
    return log_probs(logits_of(model, both, **options), tokens)


def positions(model: Any, tokens: torch.Tensor, gap: int) -> Rows:
    ids = torch.arange(PROMPT + RESPONSE)
    ids[PROMPT:] += gap
    options = {"position_ids": ids.expand(SAMPLES, -1), "attention_mask": torch.ones_like(tokens)}
    return log_probs(logits_of(model, tokens, **options), tokens)


class Fp8(DynamicCache):
    def update(self, key: torch.Tensor, value: torch.Tensor, *args: Any, **options: Any) -> Any:
        return super().update(
            key.to(torch.float8_e4m3fn).float(), value.to(torch.float8_e4m3fn).float(), *args
        )


def cached(cache: DynamicCache, model: Any, tokens: torch.Tensor) -> Rows:
    """Token by token, as an engine decodes."""
    with torch.inference_mode():
        steps = []
        for token in tokens.split(1, 1):
            steps.append(model(token, past_key_values=cache, use_cache=True).logits)
    return log_probs(torch.cat(steps, 1)[:, PROMPT - 1 : -1], tokens)


def scaled_attention(model: Any, tokens: torch.Tensor) -> Rows:
    other = AutoModelForCausalLM.from_pretrained(model.name_or_path, dtype=torch.float32).eval()
    with torch.no_grad():
        for layer in other.model.layers:
            # Queries times a factor are scores times a factor.
            layer.self_attn.q_proj.weight.mul_(1.2)
    return log_probs(logits_of(other, tokens), tokens)


def argmax(model: Any, tokens: torch.Tensor) -> Rows:
    return logits_of(model, tokens).log_softmax(-1).max(-1).values


def packs_of_four(model: Any, tokens: torch.Tensor) -> Rows:
    """Every fourth sample begins a pack, and the others attend to the samples before them."""
    rows = []
    for i in range(SAMPLES):
        start = i - i % 4
        pack = tokens[start : i + 1].reshape(1, -1)
        ids = torch.arange(PROMPT + RESPONSE).repeat(1, i - start + 1)
        options = {"position_ids": ids, "attention_mask": torch.ones_like(pack)}
        logits = logits_of(model, pack, **options)
        rows.append(log_probs(logits, tokens[i : i + 1]))
    return torch.cat(rows)


def chunked(model: Any, tokens: torch.Tensor) -> Rows:
    """The prompt in two chunks of which the second one does not see the first."""
    mask = torch.ones(PROMPT + RESPONSE, PROMPT + RESPONSE, dtype=torch.bool).tril()
    mask[4:PROMPT, :4] = False
    masks = torch.where(mask, 0.0, -1e30).expand(SAMPLES, 1, -1, -1)
    return log_probs(logits_of(model, tokens, attention_mask=masks), tokens)


def reported(change: Callable[[Rows], Rows]) -> Engine:
    return lambda m, t: change(log_probs(logits_of(m, t), t))


PLANTED: dict[str, tuple[Engine, str, float | None]] = {
    "temperature": (lambda m, t: log_probs(logits_of(m, t) / 0.83, t), "temperature", 0.83),
    "repetition penalty": (
        processed(RepetitionPenaltyLogitsProcessor(1.13)),
        "repetition penalty",
        1.13,
    ),
    "top-p": (processed(TopPLogitsWarper(0.8)), "top-p", None),
    "top-k": (processed(TopKLogitsWarper(3)), "top-k", 3.0),
    "min-p": (processed(MinPLogitsWarper(0.03)), "min-p", None),
    "int8": (int8, "int8 weights", None),
    "BOS": (prompted(lambda p: p[:, 1:]), "first prompt tokens missing", 1.0),
    "banned token": (processed(SuppressTokensLogitsProcessor([7, 31])), "logit bias", None),
    "logit bias": (processed(SequenceBiasLogitsProcessor({(21,): 1.7})), "logit bias", None),
    "minimum length": (
        processed(MinNewTokensLengthLogitsProcessor(PROMPT, 4, EOS)),
        "minimum length",
        4.0,
    ),
    "soft cap": (lambda m, t: log_probs(8 * (logits_of(m, t) / 8).tanh(), t), "soft cap", 8.0),
    "rope_theta": (rope(rope_theta=30_000.0), "rope_theta", 3.0),
    "linear": (rope(rope_type="linear", factor=3.0), "linear rope scaling", 3.0),
    "YaRN": (
        rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=128),
        "YaRN rope scaling",
        4.0,
    ),
    "dynamic": (rope(rope_theta=10_000.0 * 3 ** (16 / 14)), "dynamic rope scaling", 2.0),
    "prompt cut": (prompted(lambda p: p[:, -1:]), "prompt cut", 1.0),
    "pads": (prompted(lambda p: torch.cat([filled(PAD, 3), p], 1)), "pads attended", 3.0),
    "pads on the right": (
        prompted(lambda p: torch.cat([p, filled(PAD, 2)], 1)),
        "pads after the prompt",
        2.0,
    ),
    "BOS added": (prompted(lambda p: torch.cat([filled(BOS, 1), p], 1)), "BOS added", None),
    "positions": (partial(positions, gap=2), "position gap", 2.0),
    "positions between values of the grid": (partial(positions, gap=3), "position gap", 3.0),
    "window": (window, "attention window", 5.0),
    "packed": (packed, "packed neighbor", None),
    "fp8 cache": (lambda m, t: cached(Fp8(), m, t), "fp8 KV cache", None),
    "epsilon": (configured(rms_norm_eps=1e-2), "norm epsilon", 1e-2),
    "attention scale": (scaled_attention, "attention scale", 1.2),
    "argmax": (argmax, "argmax", None),
    "packs": (packs_of_four, "pack", 4.0),
    "chunks": (chunked, "chunks", 4.0),
    "factor": (reported(lambda x: x / 0.7), "factor", 1 / 0.7),
    "log base": (reported(lambda x: x / np.log(2)), "log base", 2.0),
    "clamped": (reported(lambda x: x.clamp_min(-1.3)), "clamped", -1.3),
    "exchanged": (reported(lambda x: x.roll(2, 0)), "exchanged", -2.0),
    "shift": (reported(lambda x: torch.cat([x[:, 1:], x[:, -1:]], 1)), "shift", 1.0),
}


def dump(model: Any, engine: Engine, seed: int = 0) -> TokenTable:
    """Samples of the engine, drawn token by token, with the training log-probs of the model."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 50, (SAMPLES, PROMPT + RESPONSE), generator=generator)
    with torch.inference_mode():
        for t in range(PROMPT, PROMPT + RESPONSE):
            # Likely tokens, so that top-p and the like keep them.
            top = model(tokens[:, :t]).logits[:, -1].topk(8)
            choice = top.values.softmax(-1).multinomial(1, generator=generator)
            tokens[:, t] = top.indices.gather(1, choice)[:, 0]
    train = log_probs(logits_of(model, tokens), tokens)
    rollout = engine(model, tokens)
    parts = []
    for i in range(SAMPLES):
        sample = SampleParts(
            train_log_prob=train[i].numpy(),
            rollout_log_prob=rollout[i].numpy(),
            token=tokens[i, PROMPT:].numpy(),
            prompt=tokens[i, :PROMPT].numpy(),
        )
        parts.append(sample)
    return TokenTable.from_parts(parts)


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_named_with_its_parameter(fault: str, model: Any, path: Path) -> None:
    engine, name, value = PLANTED[fault]
    _, proof = prove(dump(model, engine), str(path))
    best = proof.explanations[0]
    assert (proof.engine, best.name) == ("rollout", name), proof.sentence
    assert proof.is_proven
    assert best.interval[0] <= best.share <= best.interval[1] <= 1.0
    assert value is None or best.value == pytest.approx(value, rel=0.02)


def test_a_placeholder_of_the_end_token_is_named(model: Any) -> None:
    exact = dump(model, reported(lambda x: x))
    assert exact.token is not None
    ids, counts = np.unique(exact.token, return_counts=True)
    end = int(ids[counts.argmax()])
    rollout = np.where(exact.token == end, np.float32(0), exact.rollout_log_prob)
    other = AutoModelForCausalLM.from_pretrained(model.name_or_path, dtype=torch.float32).eval()
    other.config.eos_token_id = end
    _, proof = explain_disagreement(other, replace(exact, rollout_log_prob=rollout))
    assert proof.explanations[0].name == "end placeholder"
    assert proof.causes == ("placeholder_log_prob",)


def test_padding_rows_in_the_softmax_are_named(model: Any) -> None:
    flat = AutoModelForCausalLM.from_pretrained(model.name_or_path, dtype=torch.float32).eval()
    with torch.no_grad():
        # The likeliest logits of the steep model hide rows of zeros.
        flat.lm_head.weight.mul_(0.2)

    def engine(scorer: Any, tokens: torch.Tensor) -> Rows:
        logits = logits_of(scorer, tokens)
        rows = torch.zeros(*logits.shape[:2], 100)
        return log_probs(torch.cat([logits, rows], 2), tokens)

    _, proof = explain_disagreement(flat, dump(flat, engine))
    best = proof.explanations[0]
    assert (best.name, proof.is_proven) == ("padded vocabulary", True), proof.sentence
    assert best.value == pytest.approx(100, abs=1)


@pytest.fixture(scope="module")
def warm(model: Any) -> TokenTable:
    """Samples of an engine at another temperature."""
    return dump(model, PLANTED["temperature"][0])


def between_turns() -> np.ndarray:
    """Loss mask [T] of a response with four tokens of a tool in the middle."""
    mask = np.ones(RESPONSE)
    mask[3:7] = 0
    return mask


def without(positions: list[int]) -> Engine:
    """Later tokens do not read the tokens of the response at some positions."""

    def engine(model: Any, tokens: torch.Tensor) -> Rows:
        own = log_probs(logits_of(model, tokens), tokens)
        kept = [i for i in range(PROMPT + RESPONSE) if i - PROMPT not in positions]
        with torch.inference_mode():
            logits = model(tokens[:, kept]).logits.log_softmax(-1)
        rows = own.clone()
        for t in range(max(positions) + 1, RESPONSE):
            before = kept.index(PROMPT + t) - 1
            rows[:, t] = logits[:, before].gather(1, tokens[:, PROMPT + t, None])[:, 0]
        return rows

    return engine


@pytest.mark.parametrize(
    ("positions", "name", "value"),
    [
        pytest.param([3, 4], "start of turns missing", 2.0, id="start"),
        pytest.param([6], "end of turns missing", 1.0, id="end"),
    ],
)
def test_a_text_between_turns_that_is_cut_is_named(
    positions: list[int], name: str, value: float, model: Any
) -> None:
    table = dump(model, without(positions))
    mask = np.tile(between_turns(), SAMPLES).astype(np.uint8)
    _, proof = explain_disagreement(model, replace(table, loss_mask=mask))
    best = proof.explanations[0]
    assert (best.name, best.value) == (name, value), proof.sentence
    assert proof.causes == ("other_prompt",)


def test_thinking_that_is_removed_from_earlier_turns() -> None:
    tokens = torch.tensor([9, 9, 50, 7, 51, 8, 6, 6, 5, 5])
    trained = torch.tensor([True, True, True, True, False, False, True, True])
    sample = Input(tokens=tokens, response=8, positions=torch.arange(10), trained=trained)
    edit = for_history(50, 51)["thinking removed"].inputs
    assert edit is not None
    changed = edit(sample, 0.0, [])
    # The last turn reads neither the thinking nor its marks, and its positions move up.
    assert changed.positions[-2:].tolist() == [5, 6]
    assert changed.mask is not None
    assert changed.mask[-1].tolist() == [True, True, False, False, False, *[True] * 5]


def test_thinking_of_a_single_turn_stays() -> None:
    tokens = torch.tensor([9, 9, 50, 7, 51, 8])
    trained = torch.ones(4, dtype=torch.bool)
    sample = Input(tokens=tokens, response=4, positions=torch.arange(6), trained=trained)
    edit = for_history(50, 51)["thinking removed"].inputs
    assert edit is not None
    assert edit(sample, 0.0, []) is sample


def test_a_fault_of_training_is_named(warm: TokenTable, path: Path) -> None:
    table = replace(
        warm, train_log_prob=warm.rollout_log_prob, rollout_log_prob=warm.train_log_prob
    )
    _, proof = prove(table, str(path))
    assert (proof.engine, proof.explanations[0].name) == ("training", "temperature")
    assert proof.is_proven


def test_a_function_that_gives_logits_is_enough(model: Any) -> None:
    table = dump(model, PLANTED["BOS"][0])
    _, proof = explain_disagreement(
        lambda tokens, response: model(tokens[None]).logits[0, -response - 1 : -1], table
    )
    assert proof.explanations[0].name == "first prompt tokens missing"
    assert proof.is_proven
    assert proof.hypotheses < len(hypotheses(model))


def test_an_engine_in_bf16_is_named_by_its_noise(model: Any, path: Path) -> None:
    _, proof = prove(dump(model, bf16), str(path))
    assert proof.explanations[0].name == "bf16"
    # The kernels of bf16 depend on the shape of the batch.
    assert proof.is_proven or proof.is_noise


def test_a_second_fault_is_found_next_to_the_first(model: Any, path: Path) -> None:
    table = dump(model, lambda m, t: log_probs(logits_of(m, t[:, 1:]) / 0.7, t))
    _, proof = prove(table, str(path))
    names = {explanation.name for explanation in proof.explanations[:2]}
    assert names == {"first prompt tokens missing", "temperature"}
    assert proof.is_proven
    assert set(proof.causes) == {"other_prompt", "temperature"}


def test_a_temperature_is_found_next_to_a_precision(model: Any, path: Path) -> None:
    _, proof = prove(dump(model, partial(int8, temperature=0.95)), str(path))
    names = {explanation.name for explanation in proof.explanations[:2]}
    assert names == {"int8 weights", "temperature"}, proof
    assert proof.is_proven
    assert not proof.is_noise


def test_hypotheses_with_a_forward_pass_can_be_combined(model: Any, warm: TokenTable) -> None:
    assert warm.prompt is not None
    # Prompts of several lengths.
    prompts = tuple(prompt[i % 4 :] for i, prompt in enumerate(warm.prompt))
    search = Search(replace(warm, prompt=prompts), HfScorer(model), None, "rollout")
    names = [name for name, hypothesis in search.table.items() if hypothesis.cost]
    assert len(names) >= 30
    for pair in itertools.permutations(names, 2):
        edits = tuple((name, search.table[name].values[0]) for name in pair)
        (rows,) = search.scorer.score([edits], [1, 2])
        # The log-probs may be NaN, as fp8 scales in fp16 are: such a pair explains nothing.
        assert [len(row) for row in rows] == [RESPONSE] * 2, edits


def test_rivals_of_a_cause_are_named_with_it(model: Any, path: Path) -> None:
    # All prompts have six tokens, so "the last three" and "without the first three" are equal.
    table = dump(model, prompted(lambda p: p[:, -3:]))
    _, proof = prove(table, str(path))
    names = {proof.explanations[0].name, *proof.rivals}
    assert names == {"first prompt tokens missing", "prompt cut"}
    assert proof.is_proven
    assert proof.causes == ("other_prompt",)
    assert "Cannot be told apart" in proof.sentence


def test_few_samples_prove_nothing(warm: TokenTable, path: Path) -> None:
    _, proof = prove(warm.select(range(10)), str(path))
    assert proof.explanations[0].name == "temperature"
    assert proof.explained > 0.99
    assert not proof.is_proven
    assert "needs 8 held-out samples" in proof.sentence


def test_noise_is_not_explained(warm: TokenTable, path: Path) -> None:
    noise = 0.3 * np.random.default_rng(0).standard_normal(warm.tokens)
    rollout = (warm.train_log_prob + noise).astype(np.float32)
    _, proof = prove(replace(warm, rollout_log_prob=rollout), str(path))
    assert proof.causes == ()
    assert "hypotheses explains it" in proof.sentence


def test_equal_engines_need_no_search(warm: TokenTable, path: Path) -> None:
    _, proof = prove(replace(warm, rollout_log_prob=warm.train_log_prob), str(path))
    assert proof.causes == ()
    assert "nothing to explain" in proof.sentence


def test_another_model_needs_no_search(warm: TokenTable, path: Path) -> None:
    train = (warm.train_log_prob - 1.0).astype(np.float32)
    rollout = train + np.float32(0.01)
    _, proof = prove(replace(warm, train_log_prob=train, rollout_log_prob=rollout), str(path))
    assert proof.causes == ()
    assert "not the model" in proof.sentence


def test_masked_tokens_do_not_dilute_the_mismatch(warm: TokenTable, path: Path) -> None:
    noise = 0.1 * np.random.default_rng(0).standard_normal(warm.tokens)
    train = (warm.train_log_prob + noise).astype(np.float32)
    mask = np.zeros(warm.tokens, np.uint8)
    mask[::RESPONSE] = 1
    _, proof = prove(replace(warm, train_log_prob=train, loss_mask=mask), str(path))
    assert "not the model" not in proof.sentence


def test_a_hypothesis_without_numbers_explains_nothing(
    warm: TokenTable, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Hypothesis(claim="is broken", cause="unexplained", logits=lambda x, *_: x * torch.nan)
    monkeypatch.setitem(TABLE, "broken", broken)
    _, proof = prove(warm, str(path))
    shares = {explanation.name: explanation.share for explanation in proof.explanations}
    assert proof.explanations[0].name == "temperature"
    assert shares.get("broken", -1.0) < 0


def test_another_architecture_is_refused(warm: TokenTable, path: Path, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", "llama", vocab_size=VOCAB_SIZE + 1)
    with pytest.raises(ValueError, match="another architecture"):
        prove(warm, str(path), [str(other)])


NETWORK_HYPOTHESES = [name for name, hypothesis in TABLE.items() if hypothesis.network is not None]


@pytest.mark.parametrize("name", NETWORK_HYPOTHESES)
def test_a_hypothesis_leaves_the_model_as_it_was(name: str, path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokens = torch.arange(3, 19)[None]
    before = logits_of(model, tokens)
    hypothesis = TABLE[name]
    assert hypothesis.network is not None
    with torch.inference_mode(), hypothesis.network(model, hypothesis.values[-1]):
        changed = logits_of(model, tokens)
    assert not torch.equal(changed, before)
    assert torch.equal(logits_of(model, tokens), before)


@pytest.fixture(scope="module")
def penalized_dump(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("penalized") / "dump.parquet"
    write(file, dump(model, PLANTED["repetition penalty"][0]))
    return file


def test_the_command_shows_the_proof_first(penalized_dump: Path, path: Path, capsys: Any) -> None:
    assert main(["diagnose", str(penalized_dump), "--hf-checkpoint", str(path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    claim = "applies a repetition penalty of about 1.13"
    assert text.index("penalty in the sampler") < text.index(claim)
    assert "the rollout engine differs from fp32" in text
    assert "60 tokens of the 6 samples with the largest mismatch" in text


def test_the_command_writes_the_proof_as_json(
    penalized_dump: Path, path: Path, capsys: Any
) -> None:
    command = ["diagnose", str(penalized_dump), "--hf-checkpoint", str(path), "--json"]
    assert main(command) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["findings"][0]["cause"] == "penalty"
    assert values["proof"]["is_proven"]
    assert values["rescored"]["verdict"].startswith("the rollout")
    assert values["rescored"]["rollout_error"] > 0.01


def test_another_checkpoint_needs_a_reference(
    penalized_dump: Path, path: Path, capsys: Any
) -> None:
    assert main(["diagnose", str(penalized_dump), "--other-checkpoint", str(path)]) == 2
    assert "--hf-checkpoint" in capsys.readouterr().err


SERVERS = [f"http://10.0.0.{number}" for number in range(4)]
"""The third server samples at another temperature."""


@pytest.fixture(scope="module")
def one_wrong_server(
    model: Any, path: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """JSON of the diagnosis with proof."""
    tables = [dump(model, PLANTED["temperature"][0], seed) for seed in range(3)]
    table = TokenTable.concatenate(tables)
    worker = (table.sample % 4).astype(np.int32)
    equal = table.train_log_prob + np.float32(1e-5)
    table = replace(
        table,
        rollout_log_prob=np.where(worker == 2, table.rollout_log_prob, equal),
        rollout_worker=worker,
        metadata={"workers": SERVERS},
    )
    file = tmp_path_factory.mktemp("server") / "dump.parquet"
    write(file, table)
    output = io.StringIO()
    with redirect_stdout(output):
        assert main(["diagnose", str(file), "--hf-checkpoint", str(path), "--json"]) == 0
    values: dict[str, Any] = json.loads(output.getvalue())
    return values


def test_a_wrong_server_has_its_cause_second(one_wrong_server: dict[str, Any]) -> None:
    findings = one_wrong_server["findings"]
    assert [finding["cause"] for finding in findings] == ["worker", "temperature"]
    assert findings[0]["detail"] == SERVERS[2]


def test_a_wrong_server_is_proven_on_its_samples(one_wrong_server: dict[str, Any]) -> None:
    assert one_wrong_server["proof"]["is_proven"]
    assert one_wrong_server["proof"]["samples"] == 18
    assert one_wrong_server["rescored"]["samples"] <= 18


@pytest.mark.parametrize(
    ("limits", "status", "words"),
    [
        pytest.param("k3=1,abs=2", 0, "", id="within"),
        pytest.param("k3=1e-6", 1, "k3 is ", id="k3"),
        pytest.param("abs=1e-3", 1, "abs is ", id="abs"),
        pytest.param("k3=1, cause", 1, "the cause is ", id="cause"),
        pytest.param("k3=nan", 2, "--fail-on has 'k3=nan'", id="NaN"),
        pytest.param("k3", 2, "--fail-on has 'k3'", id="no limit"),
        pytest.param("ess=1", 2, "--fail-on has 'ess=1'", id="unknown"),
    ],
)
def test_limits_give_an_exit_status(
    limits: str, status: int, words: str, warm: TokenTable, tmp_path: Path, capsys: Any
) -> None:
    write(tmp_path / "dump.parquet", warm)
    assert main(["diagnose", str(tmp_path / "dump.parquet"), "--fail-on", limits]) == status
    captured = capsys.readouterr()
    assert words in captured.err
    assert bool(captured.out) == (status < 2)
