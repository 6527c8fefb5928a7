"""Faults of an engine as changes of a reference scorer: one table entry each, with a parameter to fit."""

from typing import Any

from slime_tis.analysis.diagnosis.hypotheses import network, prompts, sampler
from slime_tis.analysis.diagnosis.hypotheses.hypothesis import Hypothesis, Input
from slime_tis.analysis.diagnosis.hypotheses.prompts import with_prompt

TABLE: dict[str, Hypothesis] = {**sampler.TABLE, **prompts.TABLE, **network.TABLE}
"""Hypotheses of every model, by name."""


def hypotheses(
    model: Any = None, tokenizer: Any = None, *, prompt: int = 0, layers: int = 0
) -> dict[str, Hypothesis]:
    """The table, with the hypotheses on the special tokens, the template and the experts of a model.

    Args:
        model: Of transformers; without one, the hypotheses on the network and on positions are
            absent.
        tokenizer: Of the model.
        prompt: Length of the longest prompt.
        layers: Number of layers whose experts the dump records.
    """
    config = getattr(model, "config", None)
    pad, eos, bos = (getattr(config, f"{name}_token_id", None) for name in ("pad", "eos", "bos"))
    eos = eos[0] if isinstance(eos, list) else eos
    table = {**TABLE, **prompts.for_pads(pad if isinstance(pad, int) else 0, prompt)}
    table |= sampler.for_end(eos) if isinstance(eos, int) else {}
    table |= prompts.for_bos(bos) if isinstance(bos, int) else {}
    table |= prompts.for_template(tokenizer) if tokenizer is not None else {}
    if model is None:
        return {name: each for name, each in table.items() if each.cost < 2}
    return {**table, **network.for_model(model, layers)}


__all__ = ["TABLE", "Hypothesis", "Input", "hypotheses", "with_prompt"]
