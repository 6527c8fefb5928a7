"""The faults of the held-out study, with the answers that count as right.

Accepted answers were written before anybody tuned the diagnosis on these dumps. They are causes of
`docs/diagnosis.md`, or ids of hypotheses that were announced but did not exist yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import nn

from studies.diagnosis.held_out import input_faults as inputs
from studies.diagnosis.held_out import network_faults as network
from studies.diagnosis.held_out import report_faults as reports
from studies.diagnosis.held_out.models import PAD, TINY, WORD
from studies.diagnosis.held_out.network_faults import Build

Kind = Literal["named", "coming", "unnamed"]
Side = Literal["rollout", "training"]
Scope = Literal["all", "later", "part", "server"]
BOTH: tuple[Side, ...] = ("rollout", "training")
SCOPES: tuple[Scope, ...] = ("all", "later", "part", "server")
"""All samples; those from a step > 0 on; a third of the samples; one of three servers."""
WEIGHTS = "weights_not_updated stale_weights"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One cause and how it is planted."""

    name: str
    kind: Kind
    """named: docs/diagnosis.md has a rule or hypothesis; coming: one was announced; unnamed: the
    right answer is `unexplained`."""
    accepts: frozenset[str]
    """Causes that count as right, besides `unexplained` for an unnamed fault."""
    near: frozenset[str]
    """Causes that help, but are not the cause."""
    build: Build
    sides: tuple[Side, ...] = ("rollout",)
    """Engines that can have it; the seed chooses."""
    scopes: tuple[Scope, ...] = SCOPES
    """Samples that can have it; the seed chooses."""
    form: str = "single"
    families: tuple[str, ...] = TINY
    smollm2: bool = False
    """Whether it is planted in SmolLM2 too."""
    temperature: float = 1.0
    """Of both engines."""
    silent: bool = False
    """The log-probs agree, and only the sampled distribution differs."""
    source: str = ""
    """Public report of this or of the closest fault, where one was known."""


FAULTS: dict[str, Fault] = {}


def add(  # noqa: PLR0913
    kind: Kind,
    name: str,
    build: Build,
    accepts: str = "",
    *,
    near: str = "",
    sides: tuple[Side, ...] = ("rollout",),
    scopes: tuple[Scope, ...] = SCOPES,
    form: str = "single",
    families: tuple[str, ...] = TINY,
    smollm2: bool = False,
    temperature: float = 1.0,
    silent: bool = False,
    source: str = "",
) -> None:
    if name in FAULTS:
        raise ValueError(f"Two faults are called {name!r}.")
    FAULTS[name] = Fault(
        name=name,
        kind=kind,
        accepts=frozenset(accepts.split()),
        near=frozenset(near.split()),
        build=build,
        sides=sides,
        scopes=scopes,
        form=form,
        families=families,
        smollm2=smollm2,
        temperature=temperature,
        silent=silent,
        source=source,
    )


def named(name: str, build: Build, accepts: str, **options: object) -> None:
    add("named", name, build, accepts, **options)  # type: ignore[arg-type]


def coming(name: str, build: Build, accepts: str, **options: object) -> None:
    add("coming", name, build, accepts, **options)  # type: ignore[arg-type]


def unnamed(name: str, build: Build, accepts: str = "", **options: object) -> None:
    add("unnamed", name, build, accepts, **options)  # type: ignore[arg-type]


def outputs(pick: Callable[..., nn.Module], factor: float) -> Build:
    """The output of a module of every layer is multiplied."""
    return network.hooked_layers(pick, lambda x: factor * x)


LATER: tuple[Scope, ...] = ("all", "part", "server")
"""Scopes of faults that have no effect at the first step anyway."""

# 1. Causes that docs/diagnosis.md names: the sampler.
named(
    "temperature 0.8 unknown to training",
    reports.on_logits(reports.divided(0.8)),
    "temperature",
    smollm2=True,
)
named(
    "raw log-probs at temperature 0.6",
    reports.raw_log_probs,
    "temperature",
    temperature=0.6,
    source="TRL#4159, verl#6240, vime#64",
)
named(
    "training at another temperature",
    reports.on_logits(reports.divided(1.35)),
    "temperature",
    sides=("training",),
    source="prime-rl#697",
)
named("soft cap of the logits", reports.on_logits(reports.soft_cap), "temperature", sides=BOTH)
named(
    "top-p 0.8 unknown to training",
    reports.on_logits(reports.truncated("top-p", 0.8)),
    "truncated_sampling",
    smollm2=True,
)
named(
    "top-k 4, raw log-probs",
    reports.sampled_only(reports.truncated("top-k", 4)),
    "truncated_sampling",
    silent=True,
    source="NeMo-RL#3497",
)
named(
    "min-p 0.1 unknown to training",
    reports.on_logits(reports.truncated("min-p", 0.1)),
    "truncated_sampling",
)
named(
    "repetition penalty of generation_config.json",
    reports.on_logits(reports.repetition_penalty),
    "penalty",
    smollm2=True,
    source="verl#7270",
)
named("presence penalty", reports.on_logits(reports.presence_penalty), "penalty")
named(
    "logit bias on one word",
    reports.on_logits(reports.biased(WORD + 9, 2.0)),
    "penalty truncated_sampling",
)
named(
    "minimum length",
    reports.on_logits(reports.minimum_length),
    "penalty truncated_sampling",
)
# Prompts.
named("BOS missing", inputs.on_prompt(lambda prompt: prompt[1:]), "other_prompt", sides=BOTH)
named(
    "BOS twice",
    inputs.on_prompt(inputs.doubled),
    "other_prompt",
    sides=BOTH,
    source="slime data.py, the Llama 3 template",
)
named(
    "generation prompt missing",
    inputs.on_prompt(lambda prompt: prompt[:-1]),
    "other_prompt",
    sides=BOTH,
)
named("another system prompt", inputs.on_prompt(inputs.another_system), "other_prompt")
named("another chat template", inputs.on_prompt(inputs.another_template), "other_prompt")
named(
    "only long prompts cut",
    inputs.on_prompt(inputs.cut_if_long),
    "other_prompt",
    scopes=("all", "later"),
    sides=BOTH,
)
named(
    "left padding attended",
    inputs.on_prompt(inputs.padded_left),
    "attention_mask other_prompt",
    sides=BOTH,
)
named(
    "one packed neighbor attended",
    inputs.reads(inputs.packed(1)),
    "attention_mask other_prompt packed_neighbors",
    sides=("training",),
)
# Positions and attention.
named(
    "positions of the response moved by 4",
    inputs.reads(inputs.with_positions(inputs.gap)),
    "position_drift",
    sides=BOTH,
)
named(
    "rope_theta times 4",
    network.on_model(network.rope_theta(4.0)),
    "position_drift",
    sides=BOTH,
    smollm2=True,
    source="sglang#14745",
)
named("linear RoPE scaling 1.5", network.on_model(network.linear_rope(1.5)), "position_drift")
named(
    "attention window of 9",
    inputs.reads(inputs.with_mask(inputs.window(9))),
    "attention_mask position_drift",
    sides=BOTH,
)
# Reports.
named(
    "log-probs shifted by one",
    reports.on_row(reports.shifted(1)),
    "shifted_tokens",
    sides=BOTH,
    smollm2=True,
    source="vllm#29216",
)
named("log-probs shifted by two", reports.on_row(reports.shifted(2)), "shifted_tokens")
named("siblings exchanged", reports.on_report(reports.exchanged), "shifted_tokens")
named("decimal logarithm", reports.on_value(reports.scaled_value(0.4342945)), "broken_tokens")
named(
    "log-probs clamped at −1.2",
    reports.on_row(lambda row, _: [max(value, -1.2) for value in row]),
    "broken_tokens",
)
named(
    "NaN in 3 % of the tokens",
    reports.on_report(reports.replaced(0.03, float("nan"))),
    "broken_tokens",
)
named(
    "−9999 in 1 % of the tokens",
    reports.on_report(reports.replaced(0.01, -9999.0)),
    "broken_tokens",
)
named(
    "log-probs with the wrong sign",
    reports.on_row(lambda row, _: [-v for v in row]),
    "broken_tokens",
)
named("log-probs with one decimal", reports.on_row(reports.rounded_row), "broken_tokens rounding")
named(
    "logits in bf16 before the softmax",
    reports.on_value(reports.bf16_logits),
    "rounding",
    scopes=("all", "server"),
    sides=BOTH,
)
named(
    "tool output trained",
    reports.on_report(reports.trained_tool_output),
    "mask_mistake",
    form="chat",
    source="slime#1563",
)
named(
    "loss mask two tokens early",
    reports.on_report(reports.late_mask),
    "mask_mistake",
    form="chat",
    source="slime#2263",
)
named(
    "only the first log-prob is real",
    reports.on_row(reports.only_first),
    "mask_mistake broken_tokens",
    source="sglang#14046",
)
named(
    "text encoded again",
    reports.on_report(reports.retokenised),
    "retokenised",
    source="prime-rl#1334",
)
named(
    "draft model's log-probs",
    reports.draft_values(1.0),
    "other_model broken_tokens",
)
# Weights.
named("never updated", network.weights_of(lambda step: 0), WEIGHTS, scopes=LATER, smollm2=True)
named(
    "update arrives a step late",
    network.weights_of(lambda step: step - 1),
    WEIGHTS,
    scopes=LATER,
)
named(
    "one layer never updated",
    network.first_if(lambda name: ".layers.1." in name),
    WEIGHTS,
    scopes=LATER,
)
named(
    "attention never updated",
    network.first_if(lambda name: "self_attn" in name),
    WEIGHTS,
    scopes=LATER,
    smollm2=True,
)
named(
    "older weights, reported as older",
    reports.honest_versions(2),
    "stale_weights weights_not_updated",
    scopes=LATER,
)
named(
    "adapter at half its scale",
    network.mixed_weights(network.scaled_difference(0.5)),
    WEIGHTS,
    scopes=LATER,
)
named(
    "adapter at twice its scale",
    network.mixed_weights(network.scaled_difference(2.0)),
    WEIGHTS,
    scopes=LATER,
)
named(
    "moving average of the weights", network.mixed_weights(network.averaged), WEIGHTS, scopes=LATER
)
named(
    "prefix cache not flushed",
    network.stale_prompt_cache,
    f"stale_cache {WEIGHTS}",
    scopes=LATER,
)
named(
    "dropout in training",
    network.hooked_layers(lambda layer: layer.self_attn.o_proj, network.dropout(0.1)),
    "dropout",
    near="rounding",
    sides=("training",),
    scopes=("all", "later"),
)
named(
    "dropout in the rollout",
    network.hooked_layers(lambda layer: layer.mlp.down_proj, network.dropout(0.1)),
    "dropout",
    near="rounding",
    scopes=("all", "server"),
)
named("norm epsilon 0.03", network.on_model(network.norm_epsilon(0.03)), "rounding")

# 2. Causes whose hypotheses were announced: the announced id, or the cause that includes it today.
coming(
    "EOS appended with log-prob 0",
    reports.end_appended,
    "placeholder_log_prob mask_mistake broken_tokens",
    smollm2=True,
    source="SkyRL#2148, SkyRL#758",
)
coming(
    "argmax's log-prob",
    reports.on_value(reports.argmax_value),
    "argmax_log_prob broken_tokens",
    smollm2=True,
    source="TRL#3867",
)
coming(
    "padded vocabulary rows in training's softmax",
    reports.on_logits(reports.padded_vocabulary),
    "padded_vocabulary",
    sides=("training",),
    source="mirage#751, Megatron-Bridge#5375",
)
coming(
    "log-probs divided by 0.7",
    reports.on_value(reports.scaled_value(1 / 0.7)),
    "log_prob_factor broken_tokens",
    smollm2=True,
    source="prime-rl#697",
)
coming(
    "rows of one tensor-parallel rank stale",
    network.mixed_weights(network.stale_rows),
    f"tensor_rows {WEIGHTS}",
    scopes=LATER,
)
coming(
    "head of a tied model never updated",
    network.untied_head,
    f"untied_head {WEIGHTS}",
    families=("qwen2",),
    scopes=LATER,
    smollm2=True,
    source="slime#345",
)
coming(
    "attention scale 1.4",
    network.on_layers(network.scale_attention(1.4)),
    "attention_scale",
    sides=BOTH,
    smollm2=True,
)
coming(
    "three packed neighbors attended",
    inputs.reads(inputs.packed(3)),
    "packed_neighbors attention_mask other_prompt",
    sides=("training",),
)
coming(
    "template adds a newline before later turns",
    inputs.reads(inputs.newline_before_turns),
    "template_per_turn other_prompt",
    near="retokenised position_drift",
    form="chat",
    sides=BOTH,
)
coming(
    "thinking removed from the history",
    inputs.reads(inputs.thinking_removed),
    "thinking_removed other_prompt",
    near="template_per_turn retokenised",
    form="reasoning",
    sides=BOTH,
    source="verl#6854",
)
coming(
    "chunks of the prefill do not see each other",
    inputs.reads(inputs.with_mask(inputs.chunked)),
    "chunk_boundaries attention_mask",
    near="other_prompt",
)
coming(
    "images exchanged between samples",
    inputs.reads(inputs.with_pixels(inputs.neighbor_pixels)),
    "several_inputs other_prompt",
    form="image",
)
coming(
    "images dropped in training",
    inputs.reads(inputs.with_pixels(lambda sample: [PAD] * 4)),
    "several_inputs other_prompt",
    form="image",
    sides=("training",),
)

# 3. Causes without a name: `unexplained` is right, and a cause that includes them.
unnamed("two layers exchanged", network.on_model(network.exchange_layers), sides=BOTH)
unnamed("GELU instead of SiLU", network.on_layers(network.with_activation(nn.GELU)), smollm2=True)
unnamed(
    "ReLU instead of SiLU in the last layer",
    network.on_last_layer(network.with_activation(nn.ReLU)),
    sides=BOTH,
)
unnamed("gate and up projections exchanged", network.on_last_layer(network.exchange_gate))
unnamed("KV heads interleaved", network.on_layers(network.interleave_kv_heads), sides=BOTH)
unnamed("heads of the output projection exchanged", network.on_last_layer(network.exchange_heads))
unnamed(
    "RoPE rotates neighboring dimensions",
    network.on_layers(network.interleave_rope),
    "position_drift",
    families=("llama", "qwen2"),
)
unnamed(
    "half of the frequencies rotate", network.on_model(network.partial_rotary), "position_drift"
)
unnamed("first layer skipped", network.skip(0), near="weights_not_updated")
unnamed("last layer skipped", network.skip(-1), near="temperature", sides=BOTH)
unnamed(
    "embeddings times 1.5",
    network.hooked(lambda model: model.model.embed_tokens, lambda x: 1.5 * x),
)
unnamed("MLP output times 0.8", outputs(lambda layer: layer.mlp.down_proj, 0.8), smollm2=True)
unnamed("attention output times 1.25", outputs(lambda layer: layer.self_attn.o_proj, 1.25))
unnamed(
    "norm weights of the layers reset", network.on_layers(network.reset_norm), near="temperature"
)
unnamed("final norm applied twice", network.on_model(network.norm_twice), near="temperature")
unnamed(
    "biases of q, k and v lost", network.on_layers(network.drop_query_bias), families=("qwen2",)
)
unnamed("norms of q and k reset", network.on_layers(network.drop_query_norm), families=("qwen3",))
unnamed("embeddings of 20 tokens moved by one", network.on_model(network.exchange_embeddings))
unnamed("input embeddings in int3", network.on_model(network.coarse_embeddings), "rounding")
unnamed(
    "stale fp8 scale of one matrix per layer",
    network.on_layers(network.scale_projection),
    WEIGHTS,
    source="vime#248",
)
unnamed("a quarter of one matrix is zero", network.on_last_layer(network.zero_block))
unnamed("one flipped bit", network.on_last_layer(network.flip_bit), sides=BOTH)
unnamed("noise on the weights for exploration", network.on_model(network.shake_weights), "rounding")
unnamed(
    "hidden states saturate",
    network.hooked_layers(lambda layer: layer.mlp, lambda x: x.clamp(-0.4, 0.4)),
    sides=BOTH,
)
unnamed(
    "cached keys and values saturate",
    network.with_cache(lambda x: x.clamp(-0.7, 0.7)),
    "rounding position_drift",
)
unnamed(
    "scale of the KV cache is wrong",
    network.with_cache(lambda x: 0.85 * x),
    "attention_scale",
    source="sglang#9810",
)
unnamed(
    "KV cache evicts the middle",
    inputs.reads(inputs.with_mask(inputs.sinks)),
    "attention_mask position_drift",
)
unnamed(
    "the newest key is missed",
    inputs.reads(inputs.with_mask(inputs.without_newest)),
    "attention_mask",
)
unnamed(
    "blocks of the paged cache lost",
    inputs.reads(inputs.with_mask(inputs.without_every_fifth)),
    "attention_mask position_drift stale_cache",
)
unnamed(
    "the prompt is read in both directions",
    inputs.reads(inputs.with_mask(inputs.sees_all_of_prompt)),
    "attention_mask",
    near="other_prompt",
    sides=BOTH,
)
unnamed(
    "gap of positions depends on the sample",
    inputs.reads(inputs.with_positions(inputs.gap_of_sample)),
    "position_drift",
    sides=BOTH,
)
unnamed(
    "positions of context-parallel chunks overlap",
    inputs.reads(inputs.with_positions(inputs.restarted)),
    "position_drift",
    sides=("training",),
)
unnamed(
    "BOS in the middle of the prompt",
    inputs.on_prompt(inputs.bos_in_the_middle),
    "other_prompt",
    sides=BOTH,
)
unnamed(
    "prefix cache collides with another prompt",
    inputs.reads(inputs.neighbor_prompt),
    "other_prompt stale_cache several_inputs",
    scopes=("part", "server"),
)
unnamed(
    "second turn without the first answer",
    inputs.reads(inputs.history_lost),
    "other_prompt template_per_turn thinking_removed",
    form="chat",
    sides=BOTH,
)
unnamed(
    "order of image parts reversed",
    inputs.reads(inputs.with_pixels(lambda sample: sample.task.pixels[::-1])),
    "several_inputs other_prompt",
    form="image",
    sides=BOTH,
)
unnamed(
    "temperature 0.6 for the first 6 tokens",
    reports.on_logits(reports.early_temperature),
    "temperature",
)
unnamed(
    "temperature 0.6 while thinking",
    reports.on_logits(reports.thinking_temperature),
    "temperature",
    form="reasoning",
)
unnamed("XTC sampling", reports.on_logits(reports.truncated("xtc", 0.15)), "truncated_sampling")
unnamed(
    "pairs of tokens must not repeat",
    reports.on_logits(reports.no_repeated_pair),
    "penalty truncated_sampling",
)
unnamed(
    "structured output",
    reports.on_logits(reports.grammar),
    "truncated_sampling penalty",
)
unnamed("a tenth of uniform sampling", reports.on_logits(reports.uniform_mixture))
unnamed(
    "noise on the logits for exploration",
    reports.on_logits(reports.noisy_logits),
    "rounding dropout",
)
unnamed("likeliest token lowered", reports.on_logits(reports.likelier_second))
unnamed("watermark", reports.on_logits(reports.watermark), near="penalty")
unnamed(
    "label smoothing in training",
    reports.on_value(reports.smoothed_label),
    near="temperature log_prob_factor",
    sides=("training",),
    smollm2=True,
)
unnamed(
    "z-loss in training's log-probs", reports.on_value(reports.with_z_loss), sides=("training",)
)
unnamed(
    "ids of half of the vocabulary moved by one",
    reports.on_value(reports.next_id),
    near="broken_tokens",
)
unnamed(
    "sum of the softmax saturates",
    reports.on_value(reports.saturated_sum),
    "broken_tokens rounding",
)
unnamed(
    "maximum instead of the logarithm of the sum",
    reports.on_value(reports.below_maximum),
    "broken_tokens",
)
unnamed("logits instead of log-probs", reports.on_value(reports.raw_logit), "broken_tokens")
unnamed(
    "probability in 6 bits", reports.on_value(reports.coarse_probability), "broken_tokens rounding"
)
unnamed("0.02 added to the probability", reports.on_value(reports.with_floor), "broken_tokens")
unnamed("entropy instead of the log-prob", reports.on_value(reports.negative_entropy))
unnamed(
    "NaN replaced by 0",
    reports.on_report(reports.replaced(0.03, 0.0)),
    "broken_tokens mask_mistake placeholder_log_prob",
)
unnamed(
    "mean of the sample for each token",
    reports.on_row(reports.mean_of_row),
    "broken_tokens mask_mistake",
)
unnamed("cumulative log-probs", reports.on_row(reports.cumulative), "broken_tokens")
unnamed(
    "log-probs divided by √length",
    reports.on_row(reports.by_length),
    "broken_tokens log_prob_factor",
)
unnamed(
    "last log-prob missing",
    reports.on_row(reports.without_last),
    "broken_tokens placeholder_log_prob shifted_tokens",
    sides=BOTH,
)
unnamed(
    "chunks of log-probs in the wrong order",
    reports.on_row(reports.blocks_exchanged),
    "shifted_tokens",
)
unnamed("log-probs in reverse order", reports.on_row(reports.reversed_row), "shifted_tokens")
unnamed(
    "log-probs smoothed over tokens", reports.on_row(reports.smoothed_row), near="shifted_tokens"
)
unnamed("unstable kernel", reports.on_row(reports.noisy_row), "dropout rounding", sides=BOTH)
unnamed(
    "constant offset",
    reports.on_row(reports.offset),
    near="padded_vocabulary",
    sides=BOTH,
    smollm2=True,
)
unnamed(
    "first values of an aborted attempt",
    reports.on_report(reports.aborted_prefix),
    "shifted_tokens",
)
unnamed(
    "second turn's log-probs shifted",
    reports.on_report(reports.shifted_second_turn),
    "shifted_tokens",
    near="retokenised",
    form="chat",
    sides=BOTH,
)
unnamed(
    "draft model's log-probs for 40 % of the tokens",
    reports.draft_values(0.4),
    "other_model broken_tokens",
    source="vllm#29216",
)
unnamed(
    "interrupted by an update, without versions",
    reports.older_half(honest=False),
    WEIGHTS,
    scopes=LATER,
)
unnamed(
    "interrupted by an update, with versions",
    reports.older_half(honest=True, lag=2),
    WEIGHTS,
    scopes=LATER,
)
unnamed(
    "mean of two replicas, one of them stale", reports.averaged_with_older, WEIGHTS, scopes=LATER
)
unnamed(
    "training scores after its own update",
    network.weights_of(lambda step: step + 1),
    WEIGHTS,
    sides=("training",),
    scopes=("all", "part"),
)
unnamed(
    "reference model scores in training",
    network.weights_of(lambda step: 0),
    f"{WEIGHTS} other_model",
    sides=("training",),
    scopes=("all", "part"),
    smollm2=True,
)

PAIRS: tuple[tuple[str, str], ...] = (
    ("temperature 0.8 unknown to training", "BOS missing"),
    ("never updated", "top-p 0.8 unknown to training"),
    ("NaN in 3 % of the tokens", "attention window of 9"),
    ("EOS appended with log-prob 0", "update arrives a step late"),
    ("log-probs shifted by one", "repetition penalty of generation_config.json"),
    ("rope_theta times 4", "min-p 0.1 unknown to training"),
    ("attention never updated", "positions of the response moved by 4"),
    ("training at another temperature", "presence penalty"),
    ("log-probs divided by 0.7", "generation prompt missing"),
    ("padded vocabulary rows in training's softmax", "never updated"),
    ("GELU instead of SiLU", "temperature 0.8 unknown to training"),
    ("tool output trained", "template adds a newline before later turns"),
    ("one layer never updated", "minimum length"),
    ("left padding attended", "logits in bf16 before the softmax"),
)
"""Two faults at once, each in all samples; the answer is right if it names one of them."""
