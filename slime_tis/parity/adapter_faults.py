"""Finds the fault of a LoRA adapter from the log-probs of two executions."""

import math
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
    """Searches for the fault of the adapter in one side, with the search of `slime-tis diagnose`.

    For this search, the reference is the training engine and the other side the rollout engine.

    Args:
        comparison: Of both sides.
        reference: The side that is taken as right.
        other: The other side.
        samples: The tokens of both.
        older: Directories of older adapters that the other side may have.

    Returns:
        The fault and its proof, or why nothing was searched for; empty without an adapter, or if
        the log-probs are equal up to rounding in fp32.

    Raises:
        ValueError: A directory has no plain LoRA adapter of the model.
    """
    adapter = reference.adapter
    difference = comparison.log_probs.mean
    if not adapter or difference <= LEAST_DIFFERENCE:
        return ""
    if not math.isfinite(difference):
        return (
            "What is wrong with the adapter was not searched for: log-probs are NaN or infinite."
            " Check the values of the adapter."
        )
    if len(samples) < ADAPTER_SAMPLES:
        return (
            f"What is wrong with the adapter was not searched for: that needs {ADAPTER_SAMPLES}"
            f" samples, and there are {len(samples)}."
        )
    # Imported here, because only adapters need the diagnosis.
    from slime_tis.analysis.diagnosis.proof import PROVEN, explain_disagreement
    from slime_tis.analysis.dumps.table import TokenTable
    from slime_tis.parity.transformers_executions import load

    # The search for single tensors needs gradients.
    model = load(replace(reference, precision="fp32", adapter="")).requires_grad_(True)
    others = merge_adapters(model, adapter, older)
    metadata = {
        "temperature": 1.0,
        "precision": comparison.reference.precision,
        "rollout_precision": comparison.other.precision,
    }
    parts = sample_parts(samples, comparison.reference, comparison.other)
    table = TokenTable.from_parts(parts, metadata)
    _, proof = explain_disagreement(model, table, others=others, with_progress=True)
    fault = ""
    # Of two causes that are proven together, the first may explain too little.
    if proof.is_proven and proof.explanations[0].share >= PROVEN:
        fault = adapter_fault(proof.explanations[0], adapter, older)
    return (
        f"{fault}With the reference {comparison.reference.name} as training, and"
        f" {comparison.other.name} as rollout engine: {proof.sentence}"
    )


def adapter_fault(explanation: Any, adapter: str, older: Sequence[str]) -> str:
    """Returns the fault of the adapter, such as "The adapter is absent.".

    Args:
        explanation: The `Explanation` of the difference.
        adapter: Directory of the adapter.
        older: Directories of older adapters.

    Returns:
        The sentence, with a blank at its end; empty if the hypothesis is not about the adapter.
    """
    name = explanation.name
    # The value says how many times more than the reference, which applies the adapter once.
    scale = 1 + explanation.value
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


def merge_adapters(model: Any, adapter: str, older: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """Merges an adapter into a model.

    Returns:
        Weights with which the other side may compute, by the directory of an adapter: the base
        model with an older adapter, and the base model with `adapter` applied twice. The second
        change, −1 times, leads back to the base model.

    Raises:
        ValueError: A directory has no plain LoRA adapter of the model.
    """
    # Imported here, because only adapters need the diagnosis.
    from slime_tis.analysis.diagnosis.hypotheses.weights import read_adapter

    state = model.state_dict()
    base = dict(state)
    once = read_adapter(adapter, state)
    twice = {name: 2 * weight - state[name] for name, weight in once.items()}
    for name in once:
        base[name] = state[name].clone()
    _assign(state, once)
    weights = {adapter: twice}
    for directory in older:
        if directory not in weights:
            # The complete model, because `adapter` may have more layers than the older one.
            weights[directory] = base | read_adapter(directory, base)
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
