"""Names what is wrong with the LoRA adapter of one of the compared executions."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slime_tis.parity.comparison import Comparison
from slime_tis.parity.executions import Side
from slime_tis.parity.parity_options import ADAPTER_SAMPLES
from slime_tis.parity.recording import Recording
from slime_tis.parity.samples import Samples

ABSENT = 0.05
"""Largest share of the adapter's scale that counts as none."""
ROUNDED_WEIGHTS = (
    "bf16 weights",
    "fp8 weights",
    "fp8 weights per tensor",
    "fp8 weights in blocks",
    "int8 weights",
    "int4 weights",
)
"""Hypotheses that the merged weights are rounded."""
LEAST_DIFFERENCE = 1e-5
"""Smallest mean abs(Δ) of log-probs for which a cause is searched for, nats. Rounding in fp32 is
smaller."""


def adapter_cause(
    comparison: Comparison, reference: Side, other: Side, samples: Samples, older: Sequence[str]
) -> str:
    """Returns what is wrong with the adapter of one side, as `slime-tis diagnose` finds it.

    The reference takes the part of training, and the other side that of the rollout engine.

    Args:
        comparison: Of both sides.
        reference: The side that is taken as right.
        other: The other side.
        samples: The tokens of both.
        older: Directories of older adapters that the other side may have.

    Returns:
        A sentence; empty without adapters, or if the log-probs are equal up to rounding in fp32.

    Raises:
        ValueError: A directory has no plain LoRA adapter of the model.
    """
    has_adapter = bool(reference.adapter or other.adapter)
    # Negated, so that NaN is searched for too.
    if not has_adapter or not comparison.log_probs.mean > LEAST_DIFFERENCE:
        return ""
    if len(samples) < ADAPTER_SAMPLES:
        return (
            f"What is wrong with the adapter was not searched for: that needs --samples"
            f" {ADAPTER_SAMPLES}."
        )
    # Imported here, because only adapters need the diagnosis.
    from slime_tis.analysis.diagnosis.proof import PROVEN, explain_disagreement
    from slime_tis.analysis.dumps.table import TokenTable
    from slime_tis.parity.transformers_executions import load

    # The search for single tensors needs gradients.
    model = load(replace(reference, precision="fp32", adapter="")).requires_grad_(True)
    adapter = reference.adapter or other.adapter
    others = merge_adapters(model, reference.adapter, [adapter, *older])
    metadata = {
        "temperature": 1.0,
        "precision": comparison.reference.precision,
        "rollout_precision": comparison.other.precision,
    }
    parts = sample_parts(samples, comparison.reference, comparison.other)
    table = TokenTable.from_parts(parts, metadata)
    _, proof = explain_disagreement(model, table, others=others, with_progress=True)
    fault = ""
    if proof.explained >= PROVEN:
        is_applied = bool(reference.adapter)
        fault = adapter_fault(proof.explanations[0], adapter, older, is_applied=is_applied)
    return (
        f"{fault}With the reference {comparison.reference.name} as training, and"
        f" {comparison.other.name} as rollout engine: {proof.sentence}"
    )


def adapter_fault(explanation: Any, adapter: str, older: Sequence[str], *, is_applied: bool) -> str:
    """Returns a sentence that says what the other execution does with the adapter.

    Args:
        explanation: The `Explanation` of the difference.
        adapter: Directory of the adapter.
        older: Directories of older adapters.
        is_applied: Whether the reference applies the adapter.

    Returns:
        The sentence, with a blank at its end; empty if the hypothesis is not about the adapter.
    """
    name = explanation.name
    scale = explanation.value + is_applied
    part = name.removesuffix(f" of the adapter {adapter}")
    if name == f"weights of {adapter}" and abs(scale) < ABSENT:
        sentence = "The adapter is absent."
    elif name == f"weights of {adapter}":
        sentence = f"Alpha is wrong: the adapter has {scale:.3g} times its scale."
    elif part != name and abs(scale) < ABSENT:
        sentence = f"The adapter is loaded in part: it is absent in {part}."
    elif part != name:
        sentence = f"The adapter is loaded in part: it has {scale:.3g} times its scale in {part}."
    elif any(name.endswith(f" of {path}") for path in older):
        sentence = "The adapter is stale."
    elif name in ROUNDED_WEIGHTS:
        sentence = "The adapter is merged with rounding."
    else:
        return ""
    return f"{sentence} "


def merge_adapters(model: Any, adapter: str, others: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """Merges the reference's adapter into a model.

    Returns:
        Other weights that an engine may have, by the directory of their adapter. Those of the
        reference's adapter have it twice, so that −1 times this change is the base model.

    Raises:
        ValueError: A directory has no plain LoRA adapter of the model.
    """
    # Imported here, because only adapters need the diagnosis.
    from slime_tis.analysis.diagnosis.hypotheses.weights import read_adapter

    state = model.state_dict()
    base = dict(state)
    weights: dict[str, dict[str, Tensor]] = {}
    if adapter:
        once = read_adapter(adapter, state)
        weights[adapter] = {name: 2 * weight - state[name] for name, weight in once.items()}
        for name in once:
            base[name] = state[name].clone()
        _assign(state, once)
    for directory in others:
        if not directory or directory in weights:
            continue
        adapted = read_adapter(directory, base)
        if adapter:
            # The complete model, because the reference's adapter may have more layers.
            adapted = base | adapted
        weights[directory] = adapted
    return weights


def sample_parts(samples: Samples, reference: Recording, other: Recording) -> list[Any]:
    """Returns the responses with the log-probs of both sides, as samples of a dump."""
    # Imported here, because only adapters need the diagnosis.
    from slime_tis.analysis.dumps.table import SampleParts

    parts = []
    for number, start in enumerate(samples.starts):
        tokens = samples.tokens[number]
        prompt_length = samples.prompt_lengths[number]
        response = slice(start + prompt_length, start + len(tokens))
        parts.append(
            SampleParts(
                prompt=tokens[:prompt_length],
                token=tokens[prompt_length:],
                train_log_prob=reference.log_probs_T[response].numpy(),
                rollout_log_prob=other.log_probs_T[response].numpy(),
            )
        )
    return parts


@torch.no_grad()
def _assign(state: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Changes some weights in place."""
    for name, weight in weights.items():
        state[name].copy_(weight)
