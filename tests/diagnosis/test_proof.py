"""Proofs by scoring again: faults planted with transformers' own tools are named, with their parameter."""

import itertools
import json
from collections.abc import Callable
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

from slime_tis.analysis.diagnosis.hypotheses import TABLE, Hypothesis, hypotheses
from slime_tis.analysis.diagnosis.proof import explain_disagreement, prove
from slime_tis.analysis.diagnosis.rescore import HfScorer
from slime_tis.analysis.diagnosis.search import Search
from slime_tis.analysis.dumps.files import write
from slime_tis.analysis.dumps.table import SampleParts, TokenTable
from slime_tis.main import main
from tests.checkpoints import BOS, EOS, PAD, VOCAB_SIZE, make_checkpoint

PROMPT, RESPONSE, SAMPLES = 6, 10, 24
Rows = torch.Tensor
Engine = Callable[[Any, torch.Tensor], Rows]


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
        steps = [processor(tokens[:, : PROMPT + t], logits[:, t].clone()) for t in range(RESPONSE)]
        return log_probs(torch.stack(steps, 1), tokens)

    return engine


def bf16(model: Any, tokens: torch.Tensor) -> Rows:
    small = AutoModelForCausalLM.from_pretrained(model.name_or_path, dtype=torch.bfloat16).eval()
    return log_probs(logits_of(small, tokens), tokens)


def int8(model: Any, tokens: torch.Tensor, temperature: float = 1.0) -> Rows:
    small = AutoModelForCausalLM.from_pretrained(model.name_or_path, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in small.named_parameters():
            if name.endswith("proj.weight"):  # engines keep embeddings and the output layer
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
    return lambda m, t: log_probs(
        logits_of(m, torch.cat([change(t[:, :PROMPT]), t[:, PROMPT:]], 1)), t
    )


def filled(token: int, count: int) -> torch.Tensor:
    return torch.full((SAMPLES, count), token)


def window(model: Any, tokens: torch.Tensor) -> Rows:
    distance = torch.arange(PROMPT + RESPONSE)[:, None] - torch.arange(PROMPT + RESPONSE)
    mask = torch.where((distance >= 0) & (distance < 5), 0.0, -1e30)[None, None].expand(
        SAMPLES, -1, -1, -1
    )
    return log_probs(logits_of(model, tokens, attention_mask=mask), tokens)


def packed(model: Any, tokens: torch.Tensor) -> Rows:
    ids = torch.arange(PROMPT + RESPONSE).repeat(SAMPLES, 2)
    both = torch.cat([tokens.roll(1, 0), tokens], 1)
    return log_probs(
        logits_of(model, both, position_ids=ids, attention_mask=torch.ones_like(both)), tokens
    )


def positions(model: Any, tokens: torch.Tensor, gap: int) -> Rows:
    ids = torch.arange(PROMPT + RESPONSE) + gap * (torch.arange(PROMPT + RESPONSE) >= PROMPT)
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
        steps = [
            model(token, past_key_values=cache, use_cache=True).logits
            for token in tokens.split(1, 1)
        ]
    return log_probs(torch.cat(steps, 1)[:, PROMPT - 1 : -1], tokens)


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
        for t in range(
            PROMPT, PROMPT + RESPONSE
        ):  # likely tokens, so that top-p and the like keep them
            choice = (
                model(tokens[:, :t])
                .logits[:, -1]
                .topk(8)
                .values.softmax(-1)
                .multinomial(1, generator=generator)
            )
            tokens[:, t] = (
                model(tokens[:, :t]).logits[:, -1].topk(8).indices.gather(1, choice)[:, 0]
            )
    train, rollout = log_probs(logits_of(model, tokens), tokens), engine(model, tokens)
    parts = [
        SampleParts(
            train_log_prob=train[i].numpy(),
            rollout_log_prob=rollout[i].numpy(),
            token=tokens[i, PROMPT:].numpy(),
            prompt=tokens[i, :PROMPT].numpy(),
        )
        for i in range(SAMPLES)
    ]
    return TokenTable.from_parts(parts)


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_named_with_its_parameter(fault: str, model: Any, path: Path) -> None:
    engine, name, value = PLANTED[fault]
    _, proof = prove(dump(model, engine), str(path))
    best = proof.explanations[0]
    assert (proof.engine, best.name) == ("rollout", name), proof.sentence
    assert proof.is_proven and best.interval[0] <= best.share <= best.interval[1] <= 1.0
    assert value is None or best.value == pytest.approx(value, rel=0.02)


def test_a_fault_of_training_is_named(model: Any, path: Path) -> None:
    table = dump(model, PLANTED["temperature"][0])
    table = replace(
        table, train_log_prob=table.rollout_log_prob, rollout_log_prob=table.train_log_prob
    )
    _, proof = prove(table, str(path))
    assert (proof.engine, proof.explanations[0].name, proof.is_proven) == (
        "training",
        "temperature",
        True,
    )


def test_a_function_that_gives_logits_is_enough(model: Any) -> None:
    table = dump(model, PLANTED["BOS"][0])
    _, proof = explain_disagreement(
        lambda tokens, response: model(tokens[None]).logits[0, -response - 1 : -1], table
    )
    assert (proof.explanations[0].name, proof.is_proven) == ("first prompt tokens missing", True)
    assert proof.hypotheses < len(hypotheses(model))


def test_an_engine_in_bf16_is_named_by_its_noise(model: Any, path: Path) -> None:
    _, proof = prove(dump(model, bf16), str(path))
    assert proof.explanations[0].name == "bf16"
    assert proof.is_proven or proof.is_noise  # its kernels depend on the shape of the batch


def test_two_faults_are_found_one_after_the_other(model: Any, path: Path) -> None:
    table = dump(model, lambda m, t: log_probs(logits_of(m, t[:, 1:]) / 0.7, t))
    _, proof = prove(table, str(path))
    assert {each.name for each in proof.explanations[:2]} == {
        "first prompt tokens missing",
        "temperature",
    }
    assert proof.is_proven and set(proof.causes) == {"other_prompt", "temperature"}


def test_a_precision_and_a_temperature_are_found(model: Any, path: Path) -> None:
    _, proof = prove(dump(model, partial(int8, temperature=0.95)), str(path))
    assert {each.name for each in proof.explanations[:2]} == {"int8 weights", "temperature"}, proof
    assert proof.is_proven and not proof.is_noise


def test_any_two_hypotheses_with_a_forward_pass_can_be_combined(model: Any, path: Path) -> None:
    table = dump(model, PLANTED["temperature"][0])
    assert table.prompt is not None
    prompts = tuple(prompt[i % 4 :] for i, prompt in enumerate(table.prompt))  # of several lengths
    search = Search(replace(table, prompt=prompts), HfScorer(model), None, "rollout")
    names = [name for name, each in search.table.items() if each.cost]
    assert len(names) >= 30
    for first, second in itertools.permutations(names, 2):
        edits = tuple((name, search.table[name].values[0]) for name in (first, second))
        (rows,) = search.scorer.score([edits], [1, 2])
        assert [len(row) for row in rows] == [RESPONSE] * 2, (
            edits
        )  # NaN, as of fp8 scales in fp16, explains nothing


def test_hypotheses_that_the_samples_do_not_tell_apart_are_named_together(
    model: Any, path: Path
) -> None:
    table = dump(model, prompted(lambda p: p[:, -3:]))  # of six tokens each
    _, proof = prove(table, str(path))
    assert {proof.explanations[0].name, *proof.rivals} == {
        "first prompt tokens missing",
        "prompt cut",
    }
    assert (
        proof.is_proven
        and proof.causes == ("other_prompt",)
        and "Cannot be told apart" in proof.sentence
    )


def test_few_samples_prove_nothing(model: Any, path: Path) -> None:
    table = dump(model, PLANTED["temperature"][0])
    _, proof = prove(table.select(range(10)), str(path))
    assert (
        proof.explanations[0].name == "temperature"
        and proof.explained > 0.99
        and not proof.is_proven
    )
    assert "needs 8 held-out samples" in proof.sentence


def test_noise_is_not_explained(model: Any, path: Path) -> None:
    table = dump(model, PLANTED["temperature"][0])
    noise = 0.3 * np.random.default_rng(0).standard_normal(table.tokens)
    _, proof = prove(
        replace(table, rollout_log_prob=(table.train_log_prob + noise).astype(np.float32)),
        str(path),
    )
    assert proof.causes == () and "not explained by" in proof.sentence


def test_equal_engines_and_other_models_need_no_search(model: Any, path: Path) -> None:
    table = dump(model, PLANTED["temperature"][0])
    _, proof = prove(replace(table, rollout_log_prob=table.train_log_prob), str(path))
    assert proof.causes == () and "nothing to explain" in proof.sentence
    both = (table.train_log_prob - 1.0).astype(np.float32)
    _, proof = prove(
        replace(table, train_log_prob=both, rollout_log_prob=both + np.float32(0.01)), str(path)
    )
    assert proof.causes == () and "not the model" in proof.sentence


def test_a_hypothesis_without_numbers_explains_nothing(
    model: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Hypothesis(claim="is broken", cause="unexplained", logits=lambda x, *_: x * torch.nan)
    monkeypatch.setitem(TABLE, "broken", broken)
    _, proof = prove(dump(model, PLANTED["temperature"][0]), str(path))
    assert proof.explanations[0].name == "temperature"
    assert all(each.name != "broken" or each.share < 0 for each in proof.explanations)


def test_another_architecture_is_refused(model: Any, path: Path, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", "llama", vocab_size=VOCAB_SIZE + 1)
    with pytest.raises(ValueError, match="another architecture"):
        prove(dump(model, PLANTED["temperature"][0]), str(path), [str(other)])


def test_every_hypothesis_leaves_the_model_as_it_was(path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokens = torch.arange(3, 19)[None]
    before = logits_of(model, tokens)
    for name, hypothesis in hypotheses(model).items():
        if hypothesis.network is not None:
            with torch.inference_mode(), hypothesis.network(model, hypothesis.values[-1]):
                changed = logits_of(model, tokens)
            assert not torch.equal(changed, before), name
            assert torch.equal(logits_of(model, tokens), before), name


def test_the_command_shows_the_proof_first(
    model: Any, path: Path, tmp_path: Path, capsys: Any
) -> None:
    write(tmp_path / "dump.parquet", dump(model, PLANTED["repetition penalty"][0]))
    command = ["diagnose", str(tmp_path / "dump.parquet"), "--hf-checkpoint", str(path)]
    assert main(command) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert words.index("penalty in the sampler") < words.index(
        "applies a repetition penalty of about 1.13"
    )
    assert "the rollout engine is wrong" in words and "60 tokens of 6 samples" in words
    assert main([*command, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["findings"][0]["cause"] == "penalty" and values["proof"]["is_proven"]
    assert (
        values["rescored"]["verdict"].startswith("the rollout")
        and values["rescored"]["rollout_error"] > 0.01
    )
    assert main(["diagnose", str(tmp_path / "dump.parquet"), "--other-checkpoint", str(path)]) == 2
    assert "--hf-checkpoint" in capsys.readouterr().err


def test_the_cause_of_one_wrong_server_is_proven_on_its_samples(
    model: Any, path: Path, tmp_path: Path, capsys: Any
) -> None:
    table = TokenTable.concatenate(
        [dump(model, PLANTED["temperature"][0], seed) for seed in range(3)]
    )
    worker = (table.sample % 4).astype(np.int32)
    rollout = np.where(worker == 2, table.rollout_log_prob, table.train_log_prob + np.float32(1e-5))
    urls = [f"http://10.0.0.{number}" for number in range(4)]
    table = replace(
        table, rollout_log_prob=rollout, rollout_worker=worker, metadata={"workers": urls}
    )
    write(tmp_path / "dump.parquet", table)
    assert (
        main(["diagnose", str(tmp_path / "dump.parquet"), "--hf-checkpoint", str(path), "--json"])
        == 0
    )
    values = json.loads(capsys.readouterr().out)
    assert [each["cause"] for each in values["findings"]] == ["worker", "temperature"]
    assert values["findings"][0]["detail"] == urls[2] and values["rescored"]["samples"] <= 18
    assert values["proof"]["is_proven"] and values["proof"]["samples"] == 18


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
    limits: str, status: int, words: str, model: Any, tmp_path: Path, capsys: Any
) -> None:
    write(tmp_path / "dump.parquet", dump(model, PLANTED["temperature"][0]))
    assert main(["diagnose", str(tmp_path / "dump.parquet"), "--fail-on", limits]) == status
    captured = capsys.readouterr()
    assert words in captured.err and bool(captured.out) == (status < 2)
