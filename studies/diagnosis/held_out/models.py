"""Models of the held-out study: tiny ones of several families, and SmolLM2-135M.

Tiny models learn a small language of chats. A system word sets a key, and each next word follows
from the word before, the key and some chance; some words repeat the user's. Then a few updates on
another key move the weights, so that every optimizer step has its own. SmolLM2 gets real SGD
updates on its own prompts.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)

PAD, BOS, EOS, SYSTEM, USER, ASSISTANT, TOOL, THINK, ANSWER, END, IMAGE, NEWLINE = range(12)
FIRST_HALF = 12
"""First token of words that are written as two tokens."""
SECOND_HALVES = 13
"""First of the four tokens that complete such a word."""
DIGRAPHS = 4
"""Words, from `WORD` on, that can be written as two tokens."""
WORD = SECOND_HALVES + DIGRAPHS
WORDS = 48
VOCABULARY = WORD + WORDS
KEYS = 7
CONFIGS: dict[str, Any] = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
TINY = ("llama", "qwen2", "qwen3")
SMOLLM2 = "smollm2"
SMOLLM2_CHECKPOINT = Path("data/smollm2/checkpoint")
SMOLLM2_QUESTIONS = (
    "What is 17 + 26?",
    "Name three rivers of Europe.",
    "Write a short poem about rain.",
    "Why is the sky blue?",
    "Sort these numbers: 9, 4, 7, 1.",
    "Translate 'good morning' into French.",
    "What does a compiler do?",
    "Give me a recipe with two eggs.",
    "Which is heavier, iron or wood?",
)


@dataclass(kw_only=True)
class Task:
    """One prompt, and what the environment adds later."""

    prompt: list[int]
    """Token ids of the dump; images are placeholders."""
    pixels: list[int] = field(default_factory=list)
    """Words that the model reads at the placeholders; they stand for an image's embedding."""
    followup: list[int] = field(default_factory=list)
    """Masked tokens between the first and the second turn; none for one turn."""


@dataclass(kw_only=True)
class World:
    """A model with its weights before each optimizer step."""

    seed: int
    family: str
    model: Any
    weights: list[dict[str, Tensor]]
    """State dicts; entry i has the weights of the dump's step i."""
    directory: Path
    """Has the checkpoints `start` and `last`."""
    draft: Any = None
    """A smaller model for speculative decoding; None for SmolLM2."""
    samples: int = 10
    """Samples of one step."""
    max_response: int = 26
    """Most response tokens."""
    questions: list[list[int]] = field(default_factory=list)
    """Prompts of SmolLM2."""
    end: int = EOS

    @property
    def is_tiny(self) -> bool:
        return self.family != SMOLLM2

    @property
    def steps(self) -> int:
        return len(self.weights)

    def at(self, step: int) -> Any:
        """A new copy of the model with the weights of a step."""
        model = copy.deepcopy(self.model)
        model.load_state_dict(self.weights[step])
        return model

    def task(self, rng: random.Random, form: str) -> Task:
        """A prompt of one form: single, chat, reasoning or image."""
        if self.is_tiny:
            return tiny_task(rng, form)
        return Task(prompt=list(rng.choice(self.questions)))


def next_word(word: int, key: int, user: Sequence[int], rng: random.Random) -> int:
    """A word from 0 to WORDS − 1, predictable from the word before, the key and the user."""
    if rng.random() < 0.25:
        return rng.choice(user)
    noise = min(int(rng.expovariate(0.6)), 6)
    return (3 * word + 5 * key + noise) % WORDS


def tiny_task(rng: random.Random, form: str) -> Task:
    key = rng.randrange(KEYS)
    system = [SYSTEM, WORD + key]
    for _ in range(rng.randrange(5)):
        system.append(WORD + (7 * key + len(system)) % WORDS)
    user = []
    for _ in range(rng.randrange(3, 9)):
        user.append(WORD + rng.randrange(WORDS))
    pixels: list[int] = []
    if form == "image":
        for _ in range(4):
            pixels.append(WORD + rng.randrange(WORDS))
        # One prompt text for all images, as in visual question answering.
        system = [SYSTEM, WORD + 3]
        user = [IMAGE] * len(pixels) + [WORD + 1, WORD + 2]
    prompt = [BOS, *system, END, USER, *user, END, ASSISTANT]
    if form == "reasoning":
        prompt.append(THINK)
    followup: list[int] = []
    if form in ("chat", "reasoning"):
        role = TOOL if rng.random() < 0.5 else USER
        words = []
        for _ in range(rng.randrange(2, 5)):
            words.append(WORD + rng.randrange(WORDS))
        followup = [role, *words, END, ASSISTANT]
        if form == "reasoning":
            followup.append(THINK)
    return Task(prompt=prompt, pixels=pixels, followup=followup)


def spoken(rng: random.Random, context: Sequence[int], key_shift: int, length: int) -> list[int]:
    """Words of an answer; some are written as two tokens."""
    key = 0
    user = []
    for index, token in enumerate(context):
        if index and context[index - 1] == SYSTEM:
            key = token - WORD
        elif token >= WORD:
            user.append(token - WORD)
    word = user[-1]
    tokens = []
    for _ in range(length):
        word = next_word(word, key + key_shift, user, rng)
        if word < DIGRAPHS and rng.random() < 0.5:
            tokens += [FIRST_HALF, SECOND_HALVES + word]
        else:
            tokens.append(WORD + word)
    return tokens


def example(rng: random.Random, key_shift: int) -> list[int]:
    """A complete chat for training."""
    form = rng.choice(("single", "chat", "reasoning", "image"))
    task = tiny_task(rng, form)
    images = iter(task.pixels)
    text = []
    for token in task.prompt:
        text.append(next(images) if token == IMAGE else token)
    turns = 2 if task.followup else 1
    for turn in range(turns):
        if form == "reasoning":
            text += spoken(rng, text, key_shift, rng.randrange(2, 6))
            text.append(ANSWER)
        text += spoken(rng, text, key_shift, rng.randrange(4, 11))
        if turn + 1 < turns:
            text += [END, *task.followup]
    return [*text, EOS]


def padded(rows: Sequence[Sequence[int]], pad: int = PAD) -> Tensor:
    """[B, T] token ids, padded on the right."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows])


def teach(model: Any, rng: random.Random, steps: int, rate: float, key_shift: int = 0) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    for _ in range(steps):
        tokens = padded([example(rng, key_shift) for _ in range(24)])
        model(tokens, labels=tokens.masked_fill(tokens == PAD, -100)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def tiny_model(seed: int, family: str, hidden: int, layers: int, tied: bool) -> Any:
    torch.manual_seed(seed)
    config = CONFIGS[family](
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        rope_parameters={"rope_type": "default", "rope_theta": 2000.0},
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def make_tiny(
    seed: int,
    family: str,
    directory: Path,
    *,
    taught: int = 130,
    steps: int = 5,
    samples: int = 10,
    max_response: int = 26,
) -> World:
    """A tiny model; Qwen2 ties its embeddings, as its small versions do."""
    rng = random.Random(f"{seed} {family}")
    hidden = (48, 64)[rng.randrange(2)]
    model = tiny_model(seed, family, hidden, rng.choice((3, 4)), family == "qwen2")
    teach(model, rng, taught, 3e-3)
    draft = tiny_model(seed + 1, family, 32, 1, False)
    teach(draft, rng, taught // 2, 3e-3)
    weights = []
    rate = rng.choice((2e-4, 4e-4))
    for step in range(steps):
        if step:
            # Two updates per step move mean log-probs by several hundredths of a nat, as a run
            # with a high learning rate does.
            teach(model, rng, 2, rate, key_shift=1)
        weights.append({name: value.clone() for name, value in model.state_dict().items()})
    return finished(
        World(
            seed=seed,
            family=family,
            model=model,
            weights=weights,
            directory=directory,
            draft=draft.eval().requires_grad_(False),
            samples=samples,
            max_response=max_response,
        )
    )


def make_smollm2(seed: int, directory: Path, checkpoint: Path = SMOLLM2_CHECKPOINT) -> World:
    """SmolLM2-135M-Instruct with two SGD updates on its own prompts.

    Raises:
        FileNotFoundError: the checkpoint is missing.
    """
    if not (checkpoint / "config.json").exists():
        raise FileNotFoundError(f"{checkpoint} has no checkpoint; run `make data-smollm2`.")
    rng = random.Random(f"{seed} {SMOLLM2}")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    questions = []
    for text in SMOLLM2_QUESTIONS:
        chat = [{"role": "system", "content": "You help."}, {"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        questions.append(tokenizer.encode(rendered, add_special_tokens=False))
    weights = []
    for step in range(3):
        if step:
            tokens = padded(rng.sample(questions, 3), model.config.pad_token_id)
            model(tokens, labels=tokens).loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            assert torch.isfinite(norm)
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(0.2 * parameter.grad)
            model.zero_grad()
        weights.append({name: value.clone() for name, value in model.state_dict().items()})
    return finished(
        World(
            seed=seed,
            family=SMOLLM2,
            model=model,
            weights=weights,
            directory=directory,
            samples=6,
            max_response=24,
            questions=questions,
            end=model.config.eos_token_id,
        )
    )


def finished(world: World) -> World:
    """Writes the start and the last checkpoint."""
    world.model.eval().requires_grad_(False)
    for name, step in (("start", 0), ("last", world.steps - 1)):
        world.at(step).save_pretrained(world.directory / name)
    return world


def cross_entropy_of(model: Any, rng: random.Random) -> float:
    """Mean loss in nats on fresh chats; tests check that a model has learned something."""
    tokens = padded([example(rng, 0) for _ in range(16)])
    with torch.inference_mode():
        logits = model(tokens).logits[:, :-1]
    labels = tokens[:, 1:].masked_fill(tokens[:, 1:] == PAD, -100)
    return float(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100))
