"""Proves the cause of a mismatch with checkpoints: loads them, and chooses the reference."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slime_tis.analysis.diagnosis.hypotheses.weights import read_adapter
from slime_tis.analysis.diagnosis.proof import Proof, explain_disagreement
from slime_tis.analysis.diagnosis.rescore import (
    NEGLIGIBLE_ERROR,
    HfScorer,
    Rescored,
    check_memory,
    fit_error,
    load_model,
    rescore,
)
from slime_tis.analysis.dumps.table import TokenTable
from slime_tis.peft_directory import base_model, is_adapter

SAME_FIT = 3.0
"""Checkpoints fit equally well if their errors differ by at most this factor."""


def prove(
    table: TokenTable,
    hf_checkpoint: str,
    others: Sequence[str] = (),
    *,
    device: str = "cpu",
    with_progress: bool = False,
) -> tuple[Rescored, Proof]:
    """Searches for the fault that explains the mismatch of a dump.

    Args:
        table: With token ids, prompts and the log-probs of both engines.
        hf_checkpoint: The model that training had when it scored the samples; a directory of a
            LoRA adapter stands for its base model with the adapter.
        others: Other checkpoints of the run, adapters, or a draft model, which the rollout engine
            may have.
        device: Device of torch that the models are loaded to.
        with_progress: Whether to print the size of the search, and to show the progress.

    Returns:
        The errors of both engines, and the proof.

    Raises:
        ValueError: The dump cannot be scored, a path is not a model directory, or the models do not
            fit into the memory of the device.
    """
    base = hf_checkpoint
    complete = list(others)
    trains_adapter = is_adapter(hf_checkpoint)
    if trains_adapter:
        base = base_model(hf_checkpoint)
        # Another adapter of the run is a complete model: the base with this adapter.
        complete = [base if is_adapter(path) else path for path in others]
    check_memory([base, *complete], device)
    model = load_model(base, device)
    own = model.state_dict()
    loaded: dict[str, Any] = {}
    for path in others:
        if not is_adapter(path):
            loaded[path] = load_model(path, device)
        elif trains_adapter:
            loaded[path] = _with_weights(copy.deepcopy(model), read_adapter(path, own))
        else:
            loaded[path] = read_adapter(path, own)
    twice: dict[str, Tensor] = {}
    if trains_adapter:
        once = read_adapter(hf_checkpoint, own)
        # Before the adapter is applied, because `own` shares its memory with the model.
        twice = {name: 2 * weight - own[name] for name, weight in once.items()}
        _with_weights(model, once)
    models = {hf_checkpoint: model, **loaded}
    reference = _reference(table, models, with_progress=with_progress)
    if reference != hf_checkpoint:
        loaded[hf_checkpoint] = model
        model = loaded.pop(reference)
    elif trains_adapter:
        # For "applies the adapter -1 times more", which is an engine without it.
        loaded[hf_checkpoint] = twice
    return explain_disagreement(
        model, table, others=loaded, tokenizer=_tokenizer(base), with_progress=with_progress
    )


def _tokenizer(directory: str) -> Any:
    """Returns the tokenizer of a checkpoint; None without one, which only templates need."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception:
        # transformers raises errors of several libraries for a missing or damaged tokenizer.
        return None


@torch.no_grad()
def _with_weights(model: Any, weights: Mapping[str, Tensor]) -> Any:
    """Changes some weights of a model, and returns it."""
    state = model.state_dict()
    for name, weight in weights.items():
        state[name].copy_(weight)
    return model


def _reference(table: TokenTable, models: Mapping[str, Any], *, with_progress: bool) -> str:
    """Returns the path of the model with which samples are scored again.

    A checkpoint fits the step that was sampled with it. If updates go wrong, both engines still
    agree in the first step, so a model that fits a later step with more mismatch is better.
    """
    first = next(iter(models))
    if len(models) == 1:
        return first
    scored: dict[str, Rescored] = {}
    for path, model in models.items():
        # An adapter is only a part of a model, and another vocabulary is that of a draft model.
        is_model = isinstance(model, torch.nn.Module)
        if is_model and model.config.vocab_size == models[first].config.vocab_size:
            scored[path] = rescore(table, HfScorer(model), with_progress=with_progress)
    allowed = max(SAME_FIT * min(map(fit_error, scored.values())), NEGLIGIBLE_ERROR)
    fitting = [path for path, rescored in scored.items() if fit_error(rescored) <= allowed]
    return max(fitting, key=lambda path: max(scored[path].train_error, scored[path].rollout_error))
