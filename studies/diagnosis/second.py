"""A second generator of faulty dumps, written without the code of the diagnosis.

It measures how often the diagnosis is right.

An agent reads a sum, writes some words, calls a calculator, and answers. Tiny Llama and Qwen2
models learn this task, and sample it with a fault in the rollout engine. Training scores the
samples in float32. `slime-tis diagnose` then names a cause, once from the dump alone and once with
the checkpoint.

    python -m studies.diagnosis.second --seeds 0 1 2 3 4 \
        --results studies/diagnosis/results_second.csv

Grades of the first finding: *right* (an accepted cause, or `unexplained` for a fault that no
hypothesis describes), *unexplained*, *healthy* (missed), *misleading* (another cause).
"""

from __future__ import annotations

import argparse
import copy
import csv
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, Qwen2Config

from slime_tis.analysis.dumps.files import write
from slime_tis.analysis.dumps.table import SampleParts, TokenTable
from slime_tis.analysis.report.report_commands import diagnosis
from slime_tis.progress import Progress, print_line

PAD, BOS, EOS, ASK, CALL, DONE, ANSWER, PLUS, SYSTEM = range(9)
DIGIT, WORD, WORDS = 10, 20, 60
VOCABULARY = WORD + WORDS
SAMPLES, MAX_RESPONSE = 64, 44


def digits(number: int, width: int) -> list[int]:
    return [DIGIT + int(digit) for digit in f"{number:0{width}}"]


def task(rng: random.Random) -> tuple[list[int], list[int]]:
    """A prompt and the tokens of its tool."""
    a, b = rng.randrange(100), rng.randrange(100)
    system = [SYSTEM, *(WORD + 7 * k % WORDS for k in range(rng.randrange(2, 9)))]
    return [BOS, *system, ASK, *digits(a, 2), PLUS, *digits(b, 2)], digits(a + b, 3)


def example(rng: random.Random) -> list[int]:
    prompt, result = task(rng)
    word, words = rng.randrange(WORDS), []
    for _ in range(rng.randrange(4, 22)):
        word = (3 * word + min(int(rng.expovariate(0.5)), 9)) % WORDS
        words.append(WORD + word)
    return [*prompt, *words, CALL, *prompt[-5:], DONE, *result, ANSWER, *result, EOS]


def batch_of(rows: Sequence[Sequence[int]]) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[PAD] * (width - len(row))] for row in rows])


@dataclass
class World:
    """A trained model, its older weights, and another small model."""

    seed: int
    model: Any
    older: Any
    draft: Any
    directory: Path


def make_model(seed: int, size: int, layers: int) -> Any:
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": size,
        "intermediate_size": 2 * size + 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2 if seed % 2 else 4,
        "max_position_embeddings": 256,
        "tie_word_embeddings": seed % 3 == 0,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "attn_implementation": "sdpa",
    }
    config = LlamaConfig(**sizes, rope_theta=5000.0) if seed % 2 else Qwen2Config(**sizes)
    return AutoModelForCausalLM.from_config(config)


def teach(model: Any, rng: random.Random, steps: int, rate: float) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    for _ in range(steps):
        tokens = batch_of([example(rng) for _ in range(48)])
        model(tokens, labels=tokens.masked_fill(tokens == PAD, -100)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def make_world(seed: int, directory: Path) -> World:
    rng = random.Random(seed)
    model = make_model(seed, 64 + 16 * (seed % 3), 2 + seed % 2)
    teach(model, rng, 220, 3e-3)
    older = copy.deepcopy(model)
    teach(model, rng, 6, (3e-4, 1e-3, 2e-3)[seed % 3])
    draft = make_model(seed + 100, 32, 1)
    teach(draft, rng, 150, 3e-3)
    for name, each in (("model", model), ("older", older), ("draft", draft)):
        each.eval().requires_grad_(False)
        each.save_pretrained(directory / name)
    return World(seed, model, older, draft, directory)


Logits = Callable[[Tensor, list[int], list[int]], Tensor]
"""Changes the logits [V] after a prompt and some response tokens."""


@dataclass(kw_only=True)
class Engine:
    """A rollout engine with the parts that faults replace."""

    model: Any
    reads: Callable[[list[int], random.Random], list[int]] = lambda prompt, _: prompt
    """The prompt that the engine conditions on."""
    logits: Logits = lambda logits, *_: logits
    """For sampling and for the reported log-probs."""
    reported_logits: Logits | None = None
    """For the reported log-probs, if they differ from those of sampling."""
    report: Callable[[list[list[float]], random.Random], list[list[float]]] = lambda rows, _: rows
    positions: Callable[[Tensor, Sequence[int]], Tensor] | None = None
    """Positions [B, T] and the prompts' lengths → the engine's positions."""
    mask: Callable[[int, int], Tensor] | None = None
    """Length of the prompt and of all tokens → [T, T] what is attended to."""
    prompt_model: Any = None
    """Computes keys and values of the prompt."""
    cache: Callable[[Tensor], Tensor] | None = None
    """Rounds cached keys and values."""

    def forward(self, rows: Sequence[list[int]], starts: Sequence[int]) -> Tensor:
        """The logits [B, V] after each row."""
        if self.prompt_model is not None or self.cache is not None:
            return torch.stack(
                [self._cached(row, start) for row, start in zip(rows, starts, strict=True)]
            )
        tokens = batch_of(rows)
        positions = torch.arange(tokens.shape[1]).expand(len(rows), -1)
        arguments: dict[str, Any] = {}
        if self.positions is not None:
            positions = self.positions(positions, starts)
        if self.mask is not None:
            full = torch.ones(len(rows), tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
            for each, row, start in zip(full, rows, starts, strict=True):
                each[: len(row), : len(row)] &= self.mask(start, len(row))
            arguments["attention_mask"] = torch.where(full, 0.0, torch.finfo(torch.float32).min)[
                :, None
            ]
        logits = self.model(tokens, position_ids=positions, **arguments).logits.float()
        return torch.stack(
            [row[len(tokens_) - 1] for row, tokens_ in zip(logits, rows, strict=True)]
        )

    def _cached(self, row: list[int], start: int) -> Tensor:
        model = self.prompt_model or self.model
        cache = model(
            torch.tensor([row[: start - 1]]), use_cache=True, past_key_values=DynamicCache()
        ).past_key_values
        output = None
        for token in row[start - 1 :]:
            if self.cache is not None:
                for layer in cache.layers:
                    layer.keys, layer.values = self.cache(layer.keys), self.cache(layer.values)
            output = self.model(torch.tensor([[token]]), use_cache=True, past_key_values=cache)
        assert output is not None
        return output.logits[0, -1].float()


@torch.inference_mode()
def sample(engine: Engine, rng: random.Random, count: int = SAMPLES) -> list[dict[str, Any]]:
    """Episodes with the engine's log-probs; tool tokens have a mask of 0."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    tasks = [task(rng) for _ in range(count)]
    read = [engine.reads(prompt, rng) for prompt, _ in tasks]
    rows: list[dict[str, Any]] = [
        {"prompt": p, "response": [], "mask": [], "log_prob": []} for p, _ in tasks
    ]
    open_ = list(range(count))
    while open_:
        texts = [[*read[i], *rows[i]["response"]] for i in open_]
        logits = engine.forward(texts, [len(read[i]) for i in open_])
        for i, raw in zip(list(open_), logits, strict=True):
            row = rows[i]
            shaped = engine.logits(raw, read[i], row["response"])
            token = int(torch.multinomial(shaped.softmax(-1), 1, generator=generator))
            said = (
                shaped
                if engine.reported_logits is None
                else engine.reported_logits(raw, read[i], row["response"])
            )
            row["log_prob"].append(float(said.log_softmax(-1)[token]))
            row["response"].append(token)
            row["mask"].append(1)
            if token == DONE and row["response"].count(DONE) == 1:
                row["response"] += tasks[i][1]
                row["mask"] += [0] * 3
                row["log_prob"] += [0.0] * 3
            if token == EOS or len(row["response"]) >= MAX_RESPONSE:
                open_.remove(i)
    for row, values in zip(
        rows, engine.report([row["log_prob"] for row in rows], rng), strict=True
    ):
        row["log_prob"] = values
    return rows


@torch.inference_mode()
def dump(world: World, rows: Sequence[dict[str, Any]], path: Path) -> None:
    parts = []
    for row in rows:
        tokens = torch.tensor([[*row["prompt"], *row["response"]]])
        start = len(row["prompt"])
        log_probs = world.model(tokens).logits[0, start - 1 : -1].float().log_softmax(-1)
        parts.append(
            SampleParts(
                train_log_prob=log_probs.gather(1, tokens[0, start:, None])[:, 0].numpy(),
                rollout_log_prob=row["log_prob"],
                loss_mask=row["mask"],
                token=row["response"],
                prompt=row["prompt"],
                entropy=(-(log_probs.exp() * log_probs).sum(-1)).numpy(),
                step=0,
            )
        )
    write(path, TokenTable.from_parts(parts, {"source": "second generator", "temperature": 1.0}))


# Changes of a model's weights


def edited(model: Any, change: Callable[[str, Tensor], Tensor]) -> Any:
    result = copy.deepcopy(model)
    state = {name: change(name, value.clone()) for name, value in model.state_dict().items()}
    result.load_state_dict(state)
    return result


def rounded(bits: str) -> Callable[[str, Tensor], Tensor]:
    def change(name: str, weight: Tensor) -> Tensor:
        if weight.dim() < 2 or (
            bits not in ("bf16", "fp16") and ("embed" in name or "lm_head" in name)
        ):
            return weight
        if bits in ("bf16", "fp16"):
            return weight.to({"bf16": torch.bfloat16, "fp16": torch.float16}[bits]).float()
        limit = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}[bits]
        scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-12) / limit
        scaled = weight / scale
        return (scaled.to(torch.float8_e4m3fn).float() if bits == "fp8" else scaled.round()) * scale

    return change


def with_config(world: World, **values: Any) -> Any:
    """The same weights in a model of another configuration."""
    config = copy.deepcopy(world.model.config)
    for name, value in values.items():
        setattr(
            config, name, {**getattr(config, name), **value} if isinstance(value, dict) else value
        )
    other = AutoModelForCausalLM.from_config(config)
    other.load_state_dict(world.model.state_dict())
    return other.eval()


# Changes of logits


def penalized(kind: str, value: float) -> Logits:
    def change(logits: Tensor, prompt: list[int], response: list[int]) -> Tensor:
        logits = logits.clone()
        seen = prompt + response if kind == "repetition" else response
        for token in set(seen):
            if kind == "repetition":
                logits[token] = (
                    logits[token] / value if logits[token] > 0 else logits[token] * value
                )
            else:
                logits[token] -= value * (response.count(token) if kind == "frequency" else 1)
        return logits

    return change


def truncated(kind: str, value: float) -> Logits:
    def change(logits: Tensor, *_: Any) -> Tensor:
        order = logits.argsort(descending=True)
        probability = logits[order].softmax(-1)
        keep = {
            "top-p": probability.cumsum(-1) - probability < value,
            "top-k": torch.arange(len(order)) < value,
            "min-p": probability >= value * probability[0],
        }[kind]
        return logits.masked_fill(~keep[order.argsort()], -torch.inf)

    return change


def biased(token: int, value: float) -> Logits:
    return lambda logits, *_: logits.index_add(0, torch.tensor([token]), torch.tensor([value]))


# Faults


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of the rollout engine, and the causes that name it; possibly none."""

    accepts: frozenset[str]
    build: Callable[[World, Engine], Engine]
    others: tuple[str, ...] = ()
    """Checkpoints that a user would give with --other-checkpoint."""


FAULTS: dict[str, Fault] = {}


def fault(name: str, accepts: str, build: Callable[[World, Engine], Engine], *others: str) -> None:
    FAULTS[name] = Fault(accepts=frozenset(accepts.split()), build=build, others=others)


def on_model(change: Callable[[str, Tensor], Tensor]) -> Callable[[World, Engine], Engine]:
    return lambda _, engine: replace(engine, model=edited(engine.model, change))


def on_logits(change: Logits) -> Callable[[World, Engine], Engine]:
    return lambda _, engine: replace(engine, logits=change)


def on_prompt(change: Callable[[list[int]], list[int]]) -> Callable[[World, Engine], Engine]:
    return lambda _, engine: replace(engine, reads=lambda prompt, __: change(prompt))


def on_report(change: Callable[[list[float]], list[float]]) -> Callable[[World, Engine], Engine]:
    return lambda _, engine: replace(engine, report=lambda rows, __: [change(row) for row in rows])


def lora(name: str, weight: Tensor) -> Tensor:
    if not name.endswith("q_proj.weight"):
        return weight
    generator = torch.Generator().manual_seed(5)
    a, b = (torch.randn(n, 4, generator=generator) for n in weight.shape)
    return weight + 0.02 * a @ b.T


def hooked(
    world: World, engine: Engine, pick: Callable[[Any], Any], hook: Callable[..., Any]
) -> Engine:
    model = copy.deepcopy(engine.model)
    pick(model).register_forward_hook(hook)
    return replace(engine, model=model)


def siblings(rows: list[list[float]], _: random.Random) -> list[list[float]]:
    moved = [rows[(i + 1) % len(rows)] for i in range(len(rows))]
    return [
        [*other[: len(row)], *row[len(other) :]] for row, other in zip(rows, moved, strict=True)
    ]


def noisy(
    share: float, size: float
) -> Callable[[list[list[float]], random.Random], list[list[float]]]:
    def report(rows: list[list[float]], rng: random.Random) -> list[list[float]]:
        return [
            [v + rng.gauss(0, size) for v in row] if rng.random() < share else row for row in rows
        ]

    return report


# 1. causes that the diagnosis describes
fault("temperature 0.9", "temperature", on_logits(lambda x, *_: x / 0.9))
fault("temperature 1.2", "temperature", on_logits(lambda x, *_: x / 1.2))
fault("soft cap", "temperature", on_logits(lambda x, *_: 6 * (x / 6).tanh()))
fault("top-p", "truncated_sampling", on_logits(truncated("top-p", 0.85)))
fault("top-k", "truncated_sampling", on_logits(truncated("top-k", 4)))
fault("min-p", "truncated_sampling", on_logits(truncated("min-p", 0.08)))
fault("repetition penalty", "penalty", on_logits(penalized("repetition", 1.15)))
fault("presence penalty", "penalty", on_logits(penalized("presence", 0.7)))
fault("frequency penalty", "penalty", on_logits(penalized("frequency", 0.4)))
fault("logit bias", "penalty truncated_sampling", on_logits(biased(WORD + 11, 1.5)))
fault("banned token", "penalty truncated_sampling", on_logits(biased(EOS, -1e9)))
fault("BOS dropped", "other_prompt", on_prompt(lambda p: p[1:]))
fault("two prompt tokens added", "other_prompt", on_prompt(lambda p: [p[0], p[0], p[0], *p[1:]]))
fault("last prompt token missing", "other_prompt", on_prompt(lambda p: p[:-1]))
fault("prompt cut from the left", "other_prompt", on_prompt(lambda p: p[-7:]))
fault("pads attended", "other_prompt attention_mask", on_prompt(lambda p: [PAD] * 3 + p))
fault(
    "position offset",
    "position_drift",
    lambda _, e: replace(
        e,
        positions=lambda p, starts: (
            p + 3 * (torch.arange(p.shape[1]) >= torch.tensor(starts)[:, None])
        ),
    ),
)
fault(
    "rope_theta",
    "position_drift",
    lambda w, e: replace(e, model=with_config(w, rope_parameters={"rope_theta": 500.0})),
)
fault(
    "linear rope scaling",
    "position_drift",
    lambda w, e: replace(
        e, model=with_config(w, rope_parameters={"rope_type": "linear", "factor": 1.5})
    ),
)
fault(
    "attention window",
    "position_drift attention_mask",
    lambda _, e: replace(e, mask=lambda _, n: torch.ones(n, n, dtype=torch.bool).triu(-9)),
)
fault("norm epsilon", "rounding", lambda w, e: replace(e, model=with_config(w, rms_norm_eps=0.03)))
for bits in ("bf16", "fp8", "int8", "int4"):
    fault(f"{bits} weights", "rounding", on_model(rounded(bits)))
fault(
    "fp8 cache",
    "rounding position_drift",
    lambda _, e: replace(e, cache=lambda x: x.to(torch.float8_e4m3fn).to(x.dtype)),
)
fault("log base 2", "broken_tokens", on_report(lambda row: [v / 0.6931472 for v in row]))
fault("shift by one", "shifted_tokens", on_report(lambda row: [*row[1:], row[-1]]))
fault("siblings exchanged", "shifted_tokens", lambda _, e: replace(e, report=siblings))
fault("clamped", "broken_tokens", on_report(lambda row: [max(v, -1.0) for v in row]))
fault(
    "older weights",
    "weights_not_updated stale_weights",
    lambda w, e: replace(e, model=w.older),
    "older",
)
fault(
    "one older tensor",
    "weights_not_updated stale_weights",
    lambda w, e: replace(
        e,
        model=edited(
            w.model,
            lambda n, x: (
                w.older.state_dict()[n] if n == "model.layers.1.mlp.down_proj.weight" else x
            ),
        ),
    ),
    "older",
)
fault(
    "older prompt cache",
    "weights_not_updated stale_weights stale_cache",
    lambda w, e: replace(e, prompt_model=w.older),
    "older",
)
fault(
    "draft model's log-probs",
    "broken_tokens weights_not_updated other_model",
    lambda w, e: e,
    "draft",
)
fault(
    "dropout",
    "rounding dropout",
    lambda w, e: replace(e, model=with_config(w, attention_dropout=0.1).train()),
)

# 2. causes that no hypothesis describes
fault("noise in a quarter of the samples", "", lambda _, e: replace(e, report=noisy(0.25, 0.3)))
fault(
    "two heads exchanged",
    "",
    lambda _, e: replace(
        e,
        model=edited(
            e.model,
            lambda n, x: (
                x.unflatten(1, (4, -1))[:, [1, 0, 2, 3]].flatten(1)
                if n.endswith("1.self_attn.o_proj.weight")
                else x
            ),
        ),
    ),
)
fault("gelu instead of silu", "", lambda w, e: replace(e, model=with_config(w, hidden_act="gelu")))
fault(
    "first layer skipped",
    "",
    lambda w, e: hooked(w, e, lambda m: m.model.layers[0], lambda _, inputs, __: inputs[0]),
)
fault(
    "output layer in int4",
    "",
    lambda w, e: hooked(w, e, lambda m: m.lm_head, lambda _, __, x: (4 * x).round() / 4),
)
fault("offset of 0.1 nats", "", on_report(lambda row: [v - 0.1 for v in row]))
fault("one decimal", "", on_report(lambda row: [round(v, 1) for v in row]))
fault(
    "attention scale",
    "",
    on_model(lambda n, x: 1.3 * x if "q_proj" in n else x),
)
fault(
    "residual branch at 0.9",
    "",
    lambda w, e: hooked(w, e, lambda m: m.model.layers[1].mlp, lambda _, __, x: 0.9 * x),
)
fault(
    "norm weight reset",
    "",
    on_model(lambda n, x: torch.ones_like(x) if n == "model.norm.weight" else x),
)
fault(
    "embeddings of two tokens exchanged",
    "",
    on_model(
        lambda n, x: (
            x[[*range(WORD + 3), WORD + 4, WORD + 3, *range(WORD + 5, VOCABULARY)]]
            if n == "model.embed_tokens.weight"
            else x
        )
    ),
)
fault(
    "mixed with uniform sampling",
    "",
    on_logits(lambda x, *_: (0.95 * x.softmax(-1) + 0.05 / len(x)).log()),
)
fault("likeliest token raised", "", on_logits(lambda x, *_: x + 0.7 * (x == x.max())))
fault(
    "probabilities instead of log-probs",
    "",
    on_report(lambda row: [float(torch.tensor(v).exp()) for v in row]),
)
fault(
    "log-probs averaged with the neighbor",
    "",
    on_report(lambda row: [(a + b) / 2 for a, b in zip(row, [*row[1:], row[-1]], strict=True)]),
)
fault("adapter unknown to training", "", on_model(lora))

PAIRS = (
    ("temperature 1.2", "fp8 weights"),
    ("temperature 0.9", "BOS dropped"),
    ("top-p", "bf16 weights"),
    ("repetition penalty", "int8 weights"),
    ("presence penalty", "rope_theta"),
    ("last prompt token missing", "int4 weights"),
    ("shift by one", "bf16 weights"),
    ("older weights", "temperature 1.2"),
    ("pads attended", "frequency penalty"),
    ("norm epsilon", "min-p"),
    ("attention window", "logit bias"),
    ("linear rope scaling", "soft cap"),
)
HEALTHY = ("float32", "float32 in another batch")


def build(world: World, names: Sequence[str]) -> Engine:
    engine = Engine(model=world.model)
    for name in names:
        if name == "draft model's log-probs":
            continue
        engine = FAULTS[name].build(world, engine)
    return engine


def rows_of(world: World, names: Sequence[str], rng: random.Random) -> list[dict[str, Any]]:
    rows = sample(build(world, names), rng)
    if "draft model's log-probs" in names:
        with torch.inference_mode():
            for row in rows:
                tokens = torch.tensor([[*row["prompt"], *row["response"]]])
                logits = world.draft(tokens).logits[0, len(row["prompt"]) - 1 : -1].log_softmax(-1)
                row["log_prob"] = logits.gather(1, torch.tensor(row["response"])[:, None])[
                    :, 0
                ].tolist()
    return rows


# Grades


@dataclass
class Grade:
    """One dump, with one of the two ways to ask."""

    seed: int
    planted: str
    kind: str
    """modelled, unmodelled, pair or healthy."""
    checkpoint: bool
    cause: str
    confidence: float
    is_proven: bool
    grade: str
    seconds: float
    sentence: str = field(default="", repr=False)


def grade(accepts: frozenset[str], kind: str, cause: str) -> str:
    if kind == "healthy":
        return "right" if cause == "healthy" else "misleading"
    if cause in accepts:
        return "right"
    if cause == "unexplained":
        return "right" if kind == "unmodelled" else "unexplained"
    return "missed" if cause == "healthy" else "misleading"


def ask(world: World, path: Path, names: Sequence[str], kind: str, with_checkpoint: bool) -> Grade:
    accepts: frozenset[str] = frozenset().union(
        *(FAULTS[name].accepts for name in names if name in FAULTS)
    )
    others = [
        str(world.directory / other)
        for name in names
        if name in FAULTS
        for other in FAULTS[name].others
    ]
    start = time.perf_counter()
    arguments: dict[str, Any] = {}
    if with_checkpoint:
        arguments = {"hf_checkpoint": str(world.directory / "model"), "other_checkpoints": others}
    answer = json.loads(diagnosis(str(path), as_json=True, **arguments))
    first = answer["findings"][0]
    proof = answer.get("proof") or {}
    return Grade(
        seed=world.seed,
        planted=" + ".join(names) or kind,
        kind=kind,
        checkpoint=with_checkpoint,
        cause=first["cause"],
        confidence=round(first["confidence"], 3),
        is_proven=bool(proof.get("is_proven")),
        grade=grade(accepts, kind, first["cause"]),
        seconds=round(time.perf_counter() - start, 2),
        sentence=proof.get("sentence", "").replace(f"{world.directory}/", ""),
    )


def cases() -> list[tuple[tuple[str, ...], str]]:
    """Faults with their kind; ten healthy dumps per seed."""
    single = [
        ((name,), "modelled" if fault.accepts else "unmodelled") for name, fault in FAULTS.items()
    ]
    return [*single, *((pair, "pair") for pair in PAIRS), *(((), "healthy") for _ in range(10))]


def summary(grades: Sequence[Grade]) -> str:
    """Counts per kind, and how often answers of each confidence are right."""
    lines = [
        "| kind | checkpoint | dumps | right | unexplained | missed | misleading |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in ("modelled", "pair", "unmodelled", "healthy"):
        for checkpoint in (False, True):
            rows = [each for each in grades if (each.kind, each.checkpoint) == (kind, checkpoint)]
            if rows:
                counts = [
                    sum(row.grade == g for row in rows)
                    for g in ("right", "unexplained", "missed", "misleading")
                ]
                shares = [f"{count} ({count / len(rows):.0%})" for count in counts]
                lines.append(
                    f"| {kind} | {'yes' if checkpoint else 'no'} | {len(rows)} |"
                    f" {' | '.join(shares)} |"
                )
    lines += ["", "| confidence | checkpoint | answers | right |", "|---|---|---|---|"]
    for checkpoint in (False, True):
        for low, high in ((0.0, 0.5), (0.5, 0.7), (0.7, 0.9), (0.9, 1.01)):
            rows = [
                each
                for each in grades
                if each.checkpoint == checkpoint
                and low <= each.confidence < high
                and each.cause not in ("healthy", "unexplained")
            ]
            if rows:
                share = sum(row.grade == "right" for row in rows) / len(rows)
                lines.append(
                    f"| {low:.1f} to {min(high, 1):.1f} | {'yes' if checkpoint else 'no'} |"
                    f" {len(rows)} | {share:.0%} |"
                )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--faults", nargs="+", metavar="NAME", help="only these (default all)")
    parser.add_argument("--without-checkpoint", action="store_true", help="ask from the dump alone")
    parser.add_argument("--results", type=Path, default=Path("runs/second_generator.csv"))
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    grades: list[Grade] = []
    chosen = []
    for number, (names, kind) in enumerate(cases()):
        if not options.faults or {*names} & {*options.faults}:
            chosen.append((number, names, kind))
    total = len(chosen) * len(options.seeds)
    with tempfile.TemporaryDirectory() as folder, Progress("dumps", total) as progress:
        for seed in options.seeds:
            world = make_world(seed, Path(folder) / str(seed))
            for number, names, kind in chosen:
                path = Path(folder) / f"{seed}_{number}.parquet"
                dump(world, rows_of(world, names, random.Random(1000 * seed + number)), path)
                for with_checkpoint in (False,) if options.without_checkpoint else (False, True):
                    each = ask(world, path, names, kind, with_checkpoint)
                    grades.append(each)
                    print_line(str(each))
                path.unlink()
                progress.update()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with options.results.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, list(vars(grades[0])))
        writer.writeheader()
        writer.writerows(vars(each) for each in grades)
    print(summary(grades))


if __name__ == "__main__":
    main()
