"""A tiny language model that is trained, sampled from and scored; faults are planted in it.

Training: a few supervised steps on a task of symbols, then optimizer steps by REINFORCE, whose
weights are all kept. Sampling: token by token with a KV cache, as a rollout engine does. Scoring:
one forward pass, as a training engine does.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SEPARATOR, TOOL, SYSTEM = 1, 2, 3
FIRST = 4  # of the symbols
MERGEABLE = 8  # symbols that can be written as two tokens too, the last nine ids of the vocabulary
STEPS = 9  # optimizer steps after the supervised ones
SAMPLES = 12  # of a step
FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}


@dataclass(frozen=True)
class Rollout:
    """Responses of one step, as the rollout engine reports them."""

    prompts: Tensor
    """[B, P] token ids."""
    tokens: Tensor
    """[B, T] token ids of the responses, all of one length."""
    log_probs: Tensor
    """[B, T] reported log-probs."""
    lengths: tuple[int, ...] = ()
    """Tokens of each response, where they are fewer than T."""


@dataclass
class World:
    """A model with its weights after each optimizer step."""

    seed: int
    family: str
    model: PreTrainedModel
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    """State dicts: before training, and after each step."""
    vocabulary: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0

    @property
    def symbols(self) -> int:
        """End of the ids that are symbols."""
        return self.vocabulary - MERGEABLE - 1

    def pair(self, symbol: int) -> tuple[int, int]:
        """The two tokens that a symbol can be written as."""
        return self.vocabulary - 1, self.vocabulary - 2 - (symbol - FIRST)

    def at(self, step: int) -> PreTrainedModel:
        """The model with the weights after a step: another copy in each call."""
        model = copy.deepcopy(self.model)
        model.load_state_dict(self.weights[step])
        return model

    def prompts(self, step: int) -> Tensor:
        """[B, P] prompts of a step: random symbols and a separator; rows are equal in pairs."""
        chance = torch.Generator().manual_seed(7919 * self.seed + step)
        rows = torch.randint(
            FIRST, self.symbols, (SAMPLES // 2, self.prompt_tokens - 1), generator=chance
        )
        rows = torch.cat([rows, torch.full((len(rows), 1), SEPARATOR)], 1)
        return rows.repeat_interleave(2, 0)


def make_world(seed: int, family: str) -> World:
    """Makes and trains a model; sizes, task, lengths and the learning rate follow from the seed."""
    torch.manual_seed(seed)
    vocabulary = (32, 48, 96)[seed % 3]
    config, architecture = FAMILIES[family]
    sizes: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": (48, 64)[seed % 2],
        "intermediate_size": 96,
        "num_hidden_layers": (2, 3)[seed % 2],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }
    if family == "qwen3_moe":
        sizes |= {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        }
    model = architecture(config(**sizes)).eval()
    world = World(
        seed=seed,
        family=family,
        model=model,
        vocabulary=vocabulary,
        prompt_tokens=8 + seed % 5,
        response_tokens=28 + 4 * (seed % 4),
    )
    supervise(world, steps=70 + 10 * (seed % 4))
    _reinforce(world, lr=(3e-4, 5e-4)[seed % 2])
    return world


def answers(world: World, prompts: Tensor) -> Tensor:
    """Returns [B, T] right answers: the prompt's symbols repeated, shifted by one every time."""
    symbols = prompts[:, :-1] - FIRST
    rounds = [
        (symbols + turn) % (world.symbols - FIRST)
        for turn in range(-(-world.response_tokens // symbols.shape[1]))
    ]
    return torch.cat(rounds, 1)[:, : world.response_tokens] + FIRST


def split(world: World, tokens: Tensor, chance: torch.Generator) -> Tensor:
    """The answers with a quarter of the symbols that can be written as two tokens written so."""
    rows = []
    for row in tokens.tolist():
        written: list[int] = []
        for symbol in row:
            two = symbol < FIRST + MERGEABLE and torch.rand((), generator=chance) < 0.25
            written += world.pair(symbol) if two else (symbol,)
        rows.append(written[: len(row)])
    return torch.tensor(rows)


def sample(  # noqa: PLR0913
    model: PreTrainedModel,
    prompts: Tensor,
    length: int,
    seed: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    store: Callable[[Tensor], Tensor] = lambda cached: cached,
    shape: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda logits, prompts, tokens: logits,
    gap: int = 0,
) -> Rollout:
    """Samples with a KV cache; log-probs are of the distribution that was sampled from.

    `store` is what becomes of a sampled token's keys and values in the cache, `shape` what the
    sampler makes of logits, `gap` moves the positions of the response.
    """
    chance = torch.Generator().manual_seed(seed)
    tokens: list[Tensor] = []
    log_probs: list[Tensor] = []
    with torch.no_grad():
        output = model(prompts, use_cache=True)
        for t in range(length):
            seen = torch.cat(tokens, 1) if tokens else prompts[:, :0]
            logits = shape(output.logits[:, -1].float(), prompts, seen) / temperature
            allowed = truncate(logits, top_p, top_k).log_softmax(-1)
            token = torch.multinomial(allowed.exp(), 1, generator=chance)
            tokens.append(token)
            log_probs.append(allowed.gather(1, token))
            position = torch.full_like(token, prompts.shape[1] + t + gap)
            output = model(
                token, position_ids=position, past_key_values=output.past_key_values, use_cache=True
            )
            for layer in output.past_key_values.layers:
                for cached in (layer.keys, layer.values):
                    cached[:, :, -1:] = store(cached[:, :, -1:])
    return Rollout(prompts=prompts, tokens=torch.cat(tokens, 1), log_probs=torch.cat(log_probs, 1))


def truncate(logits_BV: Tensor, top_p: float, top_k: int) -> Tensor:
    """Logits with −∞ outside of the most probable tokens."""
    ordered, order = logits_BV.sort(-1, descending=True)
    out = torch.zeros_like(ordered, dtype=torch.bool)
    probability = ordered.softmax(-1)
    out |= probability.cumsum(-1) - probability >= top_p
    if top_k:
        out[:, top_k:] = True
    out[:, 0] = False
    return logits_BV.masked_fill(out.scatter(1, order, out), float("-inf"))


def score(
    model: PreTrainedModel, prompts: Tensor, tokens: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """[B, T] log-probs and entropies of responses in one forward pass."""
    with torch.no_grad():
        logits = (
            model(torch.cat([prompts, tokens], 1)).logits[:, prompts.shape[1] - 1 : -1].float()
            / temperature
        )
    log_probs = logits.log_softmax(-1)
    return log_probs.gather(2, tokens[..., None])[..., 0], -(log_probs.exp() * log_probs).sum(-1)


def changed(
    model: PreTrainedModel, chosen: Callable[[str], bool], change: Callable[[Tensor], Tensor]
) -> PreTrainedModel:
    """The model with the tensors whose names are chosen changed in place."""
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if chosen(name):
                tensor.copy_(change(tensor))
    return model


def supervise(world: World, steps: int) -> None:
    optimizer = torch.optim.AdamW(world.model.parameters(), lr=3e-3)
    chance = torch.Generator().manual_seed(world.seed)
    for step in range(steps):
        prompts = torch.cat([world.prompts(-1 - 3 * step - part) for part in range(3)])
        right = split(world, answers(world, prompts), chance)
        logits = world.model(torch.cat([prompts, right], 1)).logits[:, prompts.shape[1] - 1 : -1]
        loss = F.cross_entropy(logits.flatten(0, 1), right.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _reinforce(world: World, lr: float) -> None:
    """Takes REINFORCE steps on the share of right symbols; keeps the weights of every step."""
    optimizer = torch.optim.AdamW(world.model.parameters(), lr=lr)

    def keep() -> None:
        world.weights.append(
            {name: tensor.clone() for name, tensor in world.model.state_dict().items()}
        )

    keep()
    for step in range(STEPS):
        rollout = sample(
            world.model, world.prompts(1000 + step), world.response_tokens, world.seed + step
        )
        reward = (rollout.tokens == answers(world, rollout.prompts)).float().mean(1)
        advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
        logits = world.model(torch.cat([rollout.prompts, rollout.tokens], 1)).logits[
            :, rollout.prompts.shape[1] - 1 : -1
        ]
        log_probs = logits.log_softmax(-1).gather(2, rollout.tokens[..., None])[..., 0]
        loss = -(advantage[:, None] * log_probs).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        keep()
