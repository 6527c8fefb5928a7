"""The faults that the study plants, in three strengths: a world to a table of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from slime_tis.analysis.dumps.table import SampleParts, TokenTable
from slime_tis.trainer.engines.weight_rounding import round_bits, round_fp8, round_int8
from studies.diagnosis.world import (
    FIRST,
    MERGEABLE,
    SAMPLES,
    STEPS,
    SYSTEM,
    TOOL,
    Rollout,
    World,
    changed,
    sample,
    score,
)

Choice = tuple[float, float, float]


@dataclass(frozen=True)
class Scored:
    """A step with what both engines report."""

    step: int
    rollout: Rollout
    train: Tensor
    """[B, T] log π_train."""
    entropy: Tensor
    """[B, T] nats."""
    version: int
    """Weights that the rollout engine says it sampled with."""


def table_of(
    world: World, steps: list[Scored], masks: dict[int, Tensor] | None = None
) -> TokenTable:
    """The dump of some steps; responses have different lengths."""
    chance = np.random.default_rng(world.seed)
    parts = []
    for scored in steps:
        tokens = scored.rollout.tokens
        for row in range(len(tokens)):
            length = int(chance.integers(tokens.shape[1] // 2, tokens.shape[1] + 1))
            length = min([length, *scored.rollout.lengths[row : row + 1]])
            parts.append(
                SampleParts(
                    train_log_prob=scored.train[row, :length].float().numpy(),
                    rollout_log_prob=scored.rollout.log_probs[row, :length].float().numpy(),
                    entropy=scored.entropy[row, :length].float().numpy(),
                    token=tokens[row, :length].numpy(),
                    weight_version=np.full(length, scored.version),
                    prompt=scored.rollout.prompts[row].numpy(),
                    experts=(
                        np.zeros((length, 1, 2), np.int32) if world.family == "qwen3_moe" else None
                    ),
                    step=scored.step,
                    sample_index=row,
                    group=row // 2,
                )
            )
    return TokenTable.from_parts(parts, {"source": "plain"})


def run(  # noqa: PLR0913
    world: World,
    *,
    steps: int = 6,
    engine: Callable[[World, int], torch.nn.Module] | None = None,
    version: Callable[[int], int] = lambda step: step,
    report: Callable[[Rollout, int], Rollout] = lambda rollout, step: rollout,
    trained_prompts: Callable[[Tensor], Tensor] = lambda prompts: prompts,
    temperatures: tuple[float, float] = (1.0, 1.0),
    top_p: float = 1.0,
    top_k: int = 0,
    store: Callable[[Tensor], Tensor] = lambda cached: cached,
) -> TokenTable:
    """Samples and scores some steps of a world.

    Args:
        engine: model that samples at a step; that with the step's weights where None.
        version: which weights it says they are.
        report: what becomes of the rollout on its way to the dump.
        trained_prompts: prompts as the training engine has them.
        temperatures: of the rollout and of the training engine.
        top_p: share of the probability that is sampled from.
        top_k: tokens that are sampled from; 0 is all.
        store: what the rollout engine's KV cache holds of keys and values.
    """
    scored = []
    for step in range(steps):
        sampler = world.at(step) if engine is None else engine(world, step)
        rollout = sample(
            sampler, world.prompts(step), world.response_tokens, 31 * world.seed + step,
            temperature=temperatures[0], top_p=top_p, top_k=top_k, store=store,
        )  # fmt: skip
        reported = report(rollout, step)
        prompts = trained_prompts(reported.prompts)
        train, entropy = score(world.at(step), prompts, reported.tokens, temperatures[1])
        scored.append(Scored(step, reported, train, entropy, version(step)))
    return table_of(world, scored)


HEALTHY = 5
"""Healthy runs of a model."""


def healthy(world: World, variant: int) -> TokenTable:
    """Nothing: both engines at one temperature, in other kernels, or over more steps."""
    if variant == 0:
        return run(world)
    if variant == 3 and world.family != "qwen3_moe":  # grouped matrix products take no float64
        return run(world, engine=lambda world, step: world.at(step).double())
    if variant == 4:
        return run(world, steps=STEPS)
    temperature = (1.0, 0.8, 1.3, 0.6)[variant]
    return run(world, temperatures=(temperature, temperature))


def shifted_tokens(world: World, strength: int) -> TokenTable:
    """Log-probs that belong to the token before or after, in a part of the samples."""
    share, direction = (0.15, 0.5, 1.0)[strength], 1 if world.seed % 2 else -1
    chance = np.random.default_rng(world.seed)

    def report(rollout: Rollout, step: int) -> Rollout:
        rows = torch.from_numpy(chance.random(SAMPLES) < share)[:, None]
        return replace(
            rollout,
            log_probs=torch.where(rows, rollout.log_probs.roll(direction, 1), rollout.log_probs),
        )

    return run(world, report=report)


def other_prompt(world: World, strength: int) -> TokenTable:
    """Training sees a system prompt before the question, the rollout engine does not."""
    system = torch.full((SAMPLES, (1, 2, 4)[strength]), SYSTEM)
    return run(world, trained_prompts=lambda prompts: torch.cat([system, prompts], 1))


def temperature(world: World, strength: int) -> TokenTable:
    """Sampled and reported at one temperature, scored at 1."""
    ratio = (0.92, 0.8, 0.6)[strength]
    return run(world, temperatures=(ratio if world.seed % 2 else 1 / ratio, 1.0))


def top_p(world: World, strength: int) -> TokenTable:
    """Sampled from the nucleus, log-probs renormalised over it."""
    return run(world, top_p=(0.97, 0.9, 0.7)[strength])


def top_k(world: World, strength: int) -> TokenTable:
    """Sampled from the k likeliest tokens, log-probs renormalised over them."""
    return run(world, top_k=(12, 6, 3)[strength])


def raw_top_p(world: World, strength: int) -> TokenTable:
    """Sampled from the nucleus, log-probs of the whole distribution, as SGLang reports them."""

    def report(rollout: Rollout, step: int) -> Rollout:
        return replace(rollout, log_probs=score(world.at(step), rollout.prompts, rollout.tokens)[0])

    return run(world, top_p=(0.95, 0.8, 0.6)[strength], report=report)


def stale_weights(world: World, strength: int) -> TokenTable:
    """Weights sent every second, third or fifth step."""
    every = (2, 3, 5)[strength]
    return run(
        world,
        steps=STEPS,
        engine=lambda world, step: world.at(step // every * every),
        version=lambda step: step // every * every,
    )


def never_updated(world: World, strength: int) -> TokenTable:
    """The rollout engine keeps its first weights, and counts updates."""
    return run(world, steps=(5, 7, STEPS)[strength], engine=lambda world, step: world.at(0))


def partly_updated(world: World, strength: int) -> TokenTable:
    """A part of the tensors keeps its first values."""
    every = (3, 2, 1)[strength]

    def engine(world: World, step: int) -> torch.nn.Module:
        first, stuck = world.weights[0], set(list(world.weights[0])[::every])
        if every == 1:
            stuck = {name for name in stuck if "mlp" in name or "lm_head" in name}
        names: Iterator[str] = iter([])
        model = world.at(step)
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                if name in stuck:
                    tensor.copy_(first[name])
        del names
        return model

    return run(world, steps=STEPS, engine=engine)


def _rounded(
    change: Callable[[Tensor], Tensor], strength: int
) -> Callable[[World, int], torch.nn.Module]:
    """A rollout engine rounds matrices: of MLPs, of all layers, or of all layers and the head."""

    def chosen(name: str) -> bool:
        if "norm" in name or "embed" in name:
            return False
        return ("mlp" in name, "lm_head" not in name, True)[strength]

    return lambda world, step: changed(world.at(step), chosen, change)


def bf16(world: World, strength: int) -> TokenTable:
    """Weights in bf16, without the head or with it, or everything in bf16."""
    if strength == 2:
        return run(world, engine=lambda world, step: world.at(step).bfloat16())
    return run(world, engine=_rounded(lambda weight: weight.bfloat16().float(), strength + 1))


def int8(world: World, strength: int) -> TokenTable:
    """Matrices in int8 with a scale for each row."""
    return run(world, engine=_rounded(round_int8, strength))


def fp8(world: World, strength: int) -> TokenTable:
    """Matrices in e4m3 with a scale for each row."""
    return run(world, engine=_rounded(round_fp8, strength))


def nan_tokens(world: World, strength: int) -> TokenTable:
    """A kernel that writes NaN."""
    share = (0.001, 0.004, 0.02)[strength]

    def report(rollout: Rollout, step: int) -> Rollout:
        chance = torch.Generator().manual_seed(world.seed + step)
        hit = torch.rand(rollout.log_probs.shape, generator=chance) < share
        hit[0, 3] |= step == 0
        return replace(rollout, log_probs=rollout.log_probs.masked_fill(hit, float("nan")))

    return run(world, report=report)


def broken_tokens(world: World, strength: int) -> TokenTable:
    """A kernel loses the scale of some rows of logits: log-probs down to −30 nats and below."""
    share = (0.003, 0.01, 0.03)[strength]

    def report(rollout: Rollout, step: int) -> Rollout:
        chance = torch.Generator().manual_seed(world.seed + step)
        hit = torch.rand(rollout.log_probs.shape, generator=chance) < share
        hit[0, 3] |= step == 0
        model, (log_probs, _) = world.at(step), (rollout.log_probs, None)
        lost = score(model, rollout.prompts, rollout.tokens, temperature=-0.1)[0]
        return replace(rollout, log_probs=torch.where(hit, lost, log_probs))

    return run(world, report=report)


def kv_cache(world: World, strength: int) -> TokenTable:
    """A KV cache that holds sampled tokens in few bits, and the prompt in fp32."""
    bits = (5, 4, 3)[strength]
    return run(world, store=lambda cached: round_bits(cached, bits))


def rope_theta(world: World, strength: int) -> TokenTable:
    """Another rope_theta in the rollout engine."""
    factor = (1.15, 1.5, 3.0)[strength]

    def engine(world: World, step: int) -> torch.nn.Module:
        model = world.at(step)
        for name, buffer in model.named_buffers():
            if name.endswith("inv_freq"):
                exponents = torch.arange(len(buffer)) / len(buffer)
                buffer.mul_(factor**-exponents)
        return model

    return run(world, engine=engine)


def moe_routing(world: World, strength: int) -> TokenTable:
    """Routers in few bits: other experts for some tokens."""
    bits = (6, 5, 4)[strength]
    return run(
        world,
        engine=lambda world, step: changed(
            world.at(step), lambda name: "mlp.gate.weight" in name, lambda w: round_bits(w, bits)
        ),
    )


def retokenised(world: World, strength: int) -> TokenTable:
    """Encoding the text again joins symbols sampled as two tokens; log-probs do not move."""
    merged = {
        world.pair(symbol): symbol for symbol in range(FIRST, FIRST + (2, 4, MERGEABLE)[strength])
    }

    def report(rollout: Rollout, step: int) -> Rollout:
        rows = []
        for row in rollout.tokens.tolist():
            encoded: list[int] = []
            at = 0
            while at < len(row):
                pair = (row[at], row[at + 1]) if at + 1 < len(row) else (0, 0)
                encoded.append(merged.get(pair, row[at]))
                at += 2 if pair in merged else 1
            rows.append(encoded)
        padded = [row + [0] * (rollout.tokens.shape[1] - len(row)) for row in rows]
        return replace(rollout, tokens=torch.tensor(padded), lengths=tuple(map(len, rows)))

    return run(world, report=report)


def mask_mistake(world: World, strength: int) -> TokenTable:
    """A tool's tokens in the response are trained, with a placeholder as log-prob."""
    share, placeholder = (0.1, 0.3, 0.8)[strength], (0.0, -1.0, float("nan"))[world.seed % 3]
    chance = np.random.default_rng(world.seed)

    def report(rollout: Rollout, step: int) -> Rollout:
        tokens, log_probs = rollout.tokens.clone(), rollout.log_probs.clone()
        for row in np.flatnonzero(chance.random(SAMPLES) < share):
            at, length = int(chance.integers(2, 8)), int(chance.integers(3, 8))
            tokens[row, at : at + length] = torch.from_numpy(
                chance.integers(FIRST, world.vocabulary, length)
            )
            tokens[row, at] = TOOL
            log_probs[row, at : at + length] = placeholder
        return replace(rollout, tokens=tokens, log_probs=log_probs)

    # what follows the tool's output is sampled again, after it
    def resampled(rollout: Rollout, step: int) -> Rollout:
        reported = report(rollout, step)
        tool = reported.tokens != rollout.tokens
        if not tool.any():
            return reported
        train, _ = score(world.at(step), reported.prompts, reported.tokens)
        return replace(
            reported, log_probs=torch.where(_segments(reported, rollout), reported.log_probs, train)
        )

    def _segments(reported: Rollout, rollout: Rollout) -> Tensor:
        changed_log_prob = reported.log_probs != rollout.log_probs
        return changed_log_prob | torch.isnan(reported.log_probs)

    return run(world, report=resampled)


FAULTS: dict[str, tuple[str, str, Callable[[World, int], TokenTable]]] = {
    "shifted by one": ("shifted_tokens", "", shifted_tokens),
    "other system prompt": ("other_prompt", "", other_prompt),
    "other temperature": ("temperature", "", temperature),
    "top-p": ("truncated_sampling", "", top_p),
    "top-k": ("truncated_sampling", "", top_k),
    "top-p, raw log-probs": ("truncated_sampling", "", raw_top_p),
    "stale weights": ("stale_weights", "", stale_weights),
    "never updated": ("weights_not_updated", "", never_updated),
    "partly updated": ("weights_not_updated", "", partly_updated),
    "bf16": ("rounding", "bf16", bf16),
    "int8": ("rounding", "int8", int8),
    "fp8": ("rounding", "fp8", fp8),
    "NaN": ("broken_tokens", "", nan_tokens),
    "lost scale of logits": ("broken_tokens", "", broken_tokens),
    "KV cache in few bits": ("position_drift", "", kv_cache),
    "other rope_theta": ("position_drift", "", rope_theta),
    "routers in few bits": ("moe_routing", "", moe_routing),
    "tokenised again": ("retokenised", "", retokenised),
    "tool output trained on": ("mask_mistake", "", mask_mistake),
}
"""Name → the cause that a diagnosis has to name, its form where there is one, and the fault
itself."""
