"""Faults of an engine as changes of a reference scorer: one table entry for each.

An entry has a parameter that the search fits.
"""

from typing import Any

from slime_tis.analysis.diagnosis.hypotheses import network, prompts, sampler
from slime_tis.analysis.diagnosis.hypotheses.hypothesis import Hypothesis, Input
from slime_tis.analysis.diagnosis.hypotheses.prompts import with_prompt

TABLE: dict[str, Hypothesis] = {**sampler.TABLE, **prompts.TABLE, **network.TABLE}
"""Hypotheses that need no property of a model, by name."""


def hypotheses(
    model: Any = None, tokenizer: Any = None, *, prompt: int = 0, layers: int = 0
) -> dict[str, Hypothesis]:
    """Returns `TABLE` with the hypotheses on a model's special tokens, template and experts.

    Args:
        model: Of transformers. None leaves out the hypotheses on the network and on positions.
        tokenizer: Of the model.
        prompt: Length of the longest prompt, tokens.
        layers: Number of layers whose experts the dump records.
    """
    config = getattr(model, "config", None)
    pad = getattr(config, "pad_token_id", None)
    eos = getattr(config, "eos_token_id", None)
    bos = getattr(config, "bos_token_id", None)
    if not isinstance(pad, int):
        pad = 0
    if isinstance(eos, list):
        # Models such as Llama 3 have several end tokens; only the first is tried.
        eos = eos[0]
    table = dict(TABLE)
    table |= prompts.for_pads(pad, prompt)
    if isinstance(eos, int):
        table |= sampler.for_end(eos)
    if isinstance(bos, int):
        table |= prompts.for_bos(bos)
    if tokenizer is not None:
        table |= prompts.for_template(tokenizer)
    if model is None:
        return {name: hypothesis for name, hypothesis in table.items() if hypothesis.cost < 2}
    return table | network.for_model(model, layers)


__all__ = ["TABLE", "Hypothesis", "Input", "hypotheses", "with_prompt"]
