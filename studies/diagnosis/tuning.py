"""More faults of the first generator, to tune the rules that read tokens and prompts.

    python -m studies.diagnosis.tuning --seeds 0 1 2

Each dump has one or four steps of a model of `world.py`. A fault without accepted causes is one
that no rule describes; it should stay `unexplained`.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from slime_tis.analysis.diagnosis import diagnose
from slime_tis.analysis.dumps.files import parquet_tables, write
from slime_tis.analysis.dumps.table import TokenTable
from slime_tis.trainer.engines.weight_rounding import round_fp8, round_int8
from studies.diagnosis.faults import Scored, table_of
from studies.diagnosis.run import DENSE
from studies.diagnosis.world import (
    FIRST,
    Rollout,
    World,
    changed,
    make_world,
    sample,
    score,
    supervise,
)

Model = Any
Shape = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(logits [B, V], prompts [B, P], tokens so far [B, t]) → the sampler's logits."""


def unchanged(logits: Tensor, *_: Tensor) -> Tensor:
    return logits


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of the rollout engine in three strengths."""

    accepts: str = ""
    """Causes that name it; none if no rule describes it."""
    model: Callable[[World, int, int], Model] = lambda world, step, strength: world.at(step)
    shape: Callable[[World, int], Shape] = lambda world, strength: unchanged
    prompts: Callable[[Tensor, int], Tensor] = lambda prompts, strength: prompts
    """The prompts that the rollout engine reads."""
    report: Callable[[World, int, Rollout, int], Tensor] = lambda world, step, rollout, strength: (
        rollout.log_probs
    )
    gap: tuple[int, int, int] = (0, 0, 0)
    """Positions that the response is moved by."""


def counts(tokens: Tensor, vocabulary: int) -> Tensor:
    return torch.zeros(len(tokens), vocabulary).scatter_add_(1, tokens, torch.ones(tokens.shape))


def repetition(world: World, strength: int) -> Shape:
    theta = (1.05, 1.15, 1.4)[strength]

    def shape(logits: Tensor, prompts: Tensor, tokens: Tensor) -> Tensor:
        seen = counts(torch.cat([prompts, tokens], 1), logits.shape[1]) > 0
        return torch.where(seen, torch.where(logits > 0, logits / theta, logits * theta), logits)

    return shape


def presence(world: World, strength: int) -> Shape:
    value = (0.2, 0.5, 1.0)[strength]
    return lambda logits, prompts, tokens: logits - value * (counts(tokens, logits.shape[1]) > 0)


def frequency(world: World, strength: int) -> Shape:
    value = (0.1, 0.3, 0.6)[strength]
    return lambda logits, prompts, tokens: logits - value * counts(tokens, logits.shape[1])


def bias(world: World, strength: int) -> Shape:
    value = (0.5, -1.0, 2.5)[strength]
    return lambda logits, *_: (
        logits + value * torch.nn.functional.one_hot(torch.tensor(FIRST + 3), logits.shape[1])
    )


def banned(world: World, strength: int) -> Shape:
    token = (FIRST + 3, FIRST + 9, world.vocabulary - 1)[strength]  # the last begins each pair
    return lambda logits, *_: logits.index_fill(1, torch.tensor([token]), -1e9)


def cap(world: World, strength: int) -> Shape:
    value = (12.0, 8.0, 5.0)[strength]
    return lambda logits, *_: value * (logits / value).tanh()


def mixed(world: World, strength: int) -> Shape:
    share = (0.01, 0.03, 0.08)[strength]
    return lambda x, *_: ((1 - share) * x.softmax(-1) + share / x.shape[1]).log()


def raised(world: World, strength: int) -> Shape:
    value = (0.2, 0.5, 1.0)[strength]
    return lambda x, *_: x + value * (x == x.amax(-1, keepdim=True))


def min_p(world: World, strength: int) -> Shape:
    bound = (0.02, 0.06, 0.15)[strength]
    return lambda x, *_: x.masked_fill(
        x.softmax(-1) < bound * x.softmax(-1).amax(-1, keepdim=True), -torch.inf
    )


def hot(world: World, strength: int) -> Shape:
    value = (0.95, 1.1, 1.3)[strength]
    return lambda x, *_: x / value


def draft(world: World, step: int, rollout: Rollout, strength: int) -> Tensor:
    """Log-probs of a smaller model of the task."""
    torch.manual_seed(world.seed)
    size, steps = ((48, 60), (32, 50), (24, 40))[strength]
    config = LlamaConfig(
        vocab_size=world.vocabulary,
        hidden_size=size,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    small = replace(world, model=LlamaForCausalLM(config).eval(), weights=[])
    supervise(small, steps)
    return score(small.model, rollout.prompts, rollout.tokens)[0]


def noise(world: World, step: int, rollout: Rollout, strength: int) -> Tensor:
    chance = torch.Generator().manual_seed(world.seed)
    rows = torch.rand((len(rollout.tokens), 1), generator=chance) < (0.25, 0.6, 1.0)[strength]
    return rollout.log_probs + 0.2 * rows * torch.randn(rollout.log_probs.shape, generator=chance)


def averaged(world: World, step: int, rollout: Rollout, strength: int) -> Tensor:
    share = (0.1, 0.25, 0.5)[strength]
    return rollout.log_probs.lerp(rollout.log_probs.roll(-1, 1), share)


def decimals(world: World, step: int, rollout: Rollout, strength: int) -> Tensor:
    return (rollout.log_probs * (100, 20, 5)[strength]).round() / (100, 20, 5)[strength]


def older(world: World, step: int, strength: int) -> Model:
    return world.at(max(step - (1, 2, 4)[strength], 0))


def one_tensor(world: World, step: int, strength: int) -> Model:
    model, first = world.at(step), world.weights[0]
    name = ("model.layers.1.mlp.down_proj.weight", "lm_head.weight", "model.embed_tokens.weight")[
        strength
    ]
    with torch.no_grad():
        model.get_parameter(name).copy_(first[name])
    return model


def norm_reset(world: World, step: int, strength: int) -> Model:
    ones = ("layers.1.input_layernorm", "layers.1.post", "model.norm")[strength]
    return changed(
        world.at(step), lambda name: ones in name, lambda w: 0.7 * torch.ones_like(w) + 0.3 * w
    )


def skipped(world: World, step: int, strength: int) -> Model:
    """A layer whose output counts less."""
    keep = (0.9, 0.7, 0.3)[strength]
    return changed(
        world.at(step),
        lambda n: "layers.1" in n and ("o_proj" in n or "down_proj" in n),
        lambda w: keep * w,
    )


def scaled_attention(world: World, step: int, strength: int) -> Model:
    return changed(world.at(step), lambda n: "q_proj" in n, lambda w: (0.9, 1.2, 1.5)[strength] * w)


def epsilon(world: World, step: int, strength: int) -> Model:
    model = world.at(step)
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = (1e-3, 1e-2, 5e-2)[strength]
    return model


def rope(world: World, step: int, strength: int) -> Model:
    model = world.at(step)
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq"):
            buffer.mul_((0.8, 0.5, 0.25)[strength])
    return model


def dropout(world: World, step: int, strength: int) -> Model:
    model = world.at(step).train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = (0.02, 0.1, 0.3)[strength]
    return model


def matrices(change: Callable[[Tensor], Tensor]) -> Callable[[World, int, int], Model]:
    return lambda world, step, strength: changed(
        world.at(step),
        lambda n: (
            "norm" not in n and "embed" not in n and (("down_proj", "mlp", "layers")[strength] in n)
        ),
        change,
    )


FAULTS: dict[str, Fault] = {
    "temperature": Fault(accepts="temperature", shape=hot),
    "soft cap": Fault(accepts="temperature", shape=cap),
    "min-p": Fault(accepts="truncated_sampling", shape=min_p),
    "repetition penalty": Fault(accepts="penalty", shape=repetition),
    "presence penalty": Fault(accepts="penalty", shape=presence),
    "frequency penalty": Fault(accepts="penalty", shape=frequency),
    "logit bias": Fault(accepts="penalty", shape=bias),
    "banned token": Fault(accepts="penalty truncated_sampling", shape=banned),
    "draft": Fault(accepts="other_model", report=draft),
    "position gap": Fault(accepts="position_drift", gap=(1, 3, 8)),
    "rope": Fault(accepts="position_drift", model=rope),
    "prompt cut": Fault(accepts="other_prompt", prompts=lambda p, s: p[:, (1, 3, 5)[s] :]),
    "last prompt token missing": Fault(
        accepts="other_prompt", prompts=lambda p, s: p[:, : -(1, 2, 3)[s]]
    ),
    "first token doubled": Fault(
        accepts="other_prompt",
        prompts=lambda p, s: torch.cat([p[:, :1].expand(-1, (1, 2, 4)[s]), p], 1),
    ),
    "pads": Fault(
        accepts="other_prompt attention_mask",
        prompts=lambda p, s: torch.nn.functional.pad(p, ((1, 3, 6)[s], 0)),
    ),
    "older weights": Fault(accepts="weights_not_updated stale_weights", model=older),
    "one older tensor": Fault(accepts="weights_not_updated stale_weights", model=one_tensor),
    "epsilon": Fault(accepts="rounding", model=epsilon),
    "int8": Fault(accepts="rounding", model=matrices(round_int8)),
    "fp8": Fault(accepts="rounding", model=matrices(round_fp8)),
    "dropout": Fault(accepts="dropout rounding", model=dropout),
    "norm weight": Fault(model=norm_reset),
    "layer": Fault(model=skipped),
    "attention scale": Fault(model=scaled_attention),
    "uniform": Fault(shape=mixed),
    "likeliest raised": Fault(shape=raised),
    "noise": Fault(report=noise),
    "averaged": Fault(report=averaged),
    "decimals": Fault(report=decimals),
}
PAIRS = (
    ("presence penalty", "int8"),
    ("repetition penalty", "fp8"),
    ("frequency penalty", "pads"),
    ("logit bias", "rope"),
    ("temperature", "fp8"),
    ("temperature", "prompt cut"),
    ("min-p", "epsilon"),
    ("soft cap", "rope"),
)
"""A fault of the sampler, and one of the network or its input."""
FAULTS |= {
    " + ".join(pair): replace(
        FAULTS[pair[0]],
        accepts=" ".join(FAULTS[name].accepts for name in pair),
        model=FAULTS[pair[1]].model,
        prompts=FAULTS[pair[1]].prompts,
    )
    for pair in PAIRS
}
NETWORK = tuple(
    name
    for name, each in FAULTS.items()
    if "+" not in name and (each.model is not Fault.model or each.prompts is not Fault.prompts)
)
"""Faults of the network or its input, which the rollout engine reports honestly."""


def dump(world: World, fault: Fault, strength: int, steps: Sequence[int]) -> TokenTable:
    scored = []
    shape = fault.shape(world, strength)
    for step in steps:  # 48 samples in all
        given = torch.cat([world.prompts(step + 100 * part) for part in range(4 // len(steps))])
        engine = fault.model(world, step, strength)
        rollout = sample(
            engine,
            fault.prompts(given, strength),
            world.response_tokens,
            31 * world.seed + step,
            shape=shape,
            gap=fault.gap[strength],
        )
        reported = replace(rollout, log_probs=fault.report(world, step, rollout, strength))
        train, entropy = score(world.at(step), given, reported.tokens)
        scored.append(Scored(step, replace(reported, prompts=given), train, entropy, step))
    table = table_of(world, scored)
    return table if len(steps) > 1 else replace(table, step=None, weight_version=None)


def dumps(seeds: Sequence[int], folder: Path, names: Sequence[str]) -> Any:
    """(seed, fault, strength, table) of each dump, made where it is missing."""
    for seed in seeds:
        world = None
        for name in names:
            for strength in range(3):
                path = folder / f"{seed}-{name}-{strength}.parquet"
                if not path.exists():
                    world = world or make_world(seed, DENSE[seed % 2])
                    write(
                        path,
                        dump(
                            world, FAULTS[name], strength, (9,) if strength != 1 else (6, 7, 8, 9)
                        ),
                    )
                yield seed, name, strength, TokenTable.concatenate(list(parquet_tables(path)))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--faults", nargs="+", default=[*FAULTS])
    parser.add_argument("--dumps", type=Path, default=Path("runs/diagnose_tuning"))
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    grades: dict[str, Counter[str]] = {}
    confident: dict[str, list[bool]] = {}
    for _, name, _, table in dumps(options.seeds, options.dumps, options.faults):
        first = diagnose(table).findings[0]
        grades.setdefault(name, Counter())[f"{first.cause} {first.confidence:.1f}"] += 1
        if first.cause not in ("unexplained", "healthy"):
            band = "below 90 %" if first.confidence < 0.9 else "90 % and more"
            confident.setdefault(band, []).append(first.cause in FAULTS[name].accepts.split())
    for name, found in grades.items():
        print(
            f"{name:26} [{FAULTS[name].accepts}]",
            ", ".join(f"{cause}: {n}" for cause, n in found.most_common()),
        )
    for band, right in sorted(confident.items()):
        print(f"{band}: {sum(right)} of {len(right)} named causes are right")


if __name__ == "__main__":
    main()
