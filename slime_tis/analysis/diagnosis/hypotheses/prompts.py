"""Faults of the network's input: other prompts, positions, masks and caches."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slime_tis.analysis.diagnosis.hypotheses.hypothesis import Hypothesis, Input, PromptEdit

SIZES = tuple(2**i for i in range(1, 12))
FEW = (1, 2, 3, 4)
PADS = (*range(1, 9), 16)


def with_prompt(sample: Input, prompt: Tensor) -> Input:
    """The sample's response after another prompt."""
    if not len(prompt) or torch.equal(prompt, sample.prompt):
        return sample
    tokens = torch.cat([prompt, sample.tokens[len(sample.tokens) - sample.response :]])
    return replace(sample, tokens=tokens, positions=torch.arange(len(tokens)))


def _causal(length: int) -> Tensor:
    """An explicit mask: without one, transformers may take a jump of the positions for the start of another sample."""
    return torch.ones(length, length, dtype=torch.bool).tril()


def _gap(sample: Input, value: float, _: Input) -> Input:
    positions = sample.positions.clone()
    positions[-sample.response :] += round(value)
    return replace(sample, positions=positions.clamp_min(0), mask=_causal(len(positions)))


def _window(sample: Input, value: float, _: Input) -> Input:
    distance = torch.arange(len(sample.tokens))[:, None] - torch.arange(len(sample.tokens))
    return (
        sample
        if value >= len(distance)
        else replace(sample, mask=(distance >= 0) & (distance < value))
    )


def _neighbor(sample: Input, _: float, before: Input) -> Input:
    tokens = torch.cat([before.tokens, sample.tokens])
    positions = torch.cat([torch.arange(len(before.tokens)), sample.positions])
    return replace(sample, tokens=tokens, positions=positions, mask=_causal(len(tokens)))


def _fp8_cache(sample: Input, _: float, __: Input) -> Input:
    from transformers import DynamicCache

    class Fp8Cache(DynamicCache):  # type: ignore[misc]  # transformers has no types here
        def update(
            self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            small = [x.to(torch.float8_e4m3fn).to(x.dtype) for x in (key_states, value_states)]
            return super().update(*small, *args, **kwargs)

    return replace(sample, cache=Fp8Cache)


def for_pads(pad: int, longest: int) -> dict[str, Hypothesis]:
    """The hypotheses on attended padding; `longest` is the length of the longest prompt."""

    def before(prompt: Tensor, count: int) -> Tensor:
        return torch.cat([prompt.new_full((max(count, 0),), pad), prompt])

    def after(prompt: Tensor, count: int) -> Tensor:
        return torch.cat([prompt, prompt.new_full((max(count, 0),), pad)])

    few = "attends to {value:.0f} padding tokens"
    full = "attends to the padding on the {} of the prompt, which makes all prompts {} tokens long"
    return {
        "pads attended": Hypothesis(
            f"{few} before the prompt", "attention_mask", PADS, prompt=before
        ),
        "pads after the prompt": Hypothesis(
            f"{few} after the prompt", "attention_mask", PADS, prompt=after
        ),
        "padded on the left": Hypothesis(
            full.format("left", longest),
            "attention_mask",
            prompt=lambda p, _: before(p, longest - len(p)),
        ),
        "padded on the right": Hypothesis(
            full.format("right", longest),
            "attention_mask",
            prompt=lambda p, _: after(p, longest - len(p)),
        ),
    }


def for_bos(bos: int) -> dict[str, Hypothesis]:
    """The hypothesis on the token that starts a text."""
    claim = "reads a BOS token before the prompt"
    return {
        "BOS added": Hypothesis(
            claim, "other_prompt", prompt=lambda p, _: torch.cat([p.new_tensor([bos]), p])
        )
    }


def for_template(tokenizer: Any) -> dict[str, Hypothesis]:
    """The hypotheses on the chat template of a tokenizer; none if it has no template that renders."""
    special = torch.tensor(sorted(tokenizer.all_special_ids))

    def encoded(text: str) -> Tensor:
        return torch.tensor(
            tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.long
        )

    def rendered(text: str, **options: Any) -> str:
        options = {"tokenize": False, "add_generation_prompt": True, **options}
        return str(tokenizer.apply_chat_template([{"role": "user", "content": text}], **options))

    def in_template(prompt: Tensor, _: int) -> Tensor:
        return encoded(rendered(tokenizer.decode(prompt[~torch.isin(prompt, special)])))

    def without_first_message(prompt: Tensor, _: int) -> Tensor:
        marks = torch.isin(prompt, special) & (prompt != (tokenizer.bos_token_id or -1))
        first = prompt[marks][:1]
        return (
            prompt[(prompt == first).nonzero()[1:2, 0] :]
            if len(first) and (prompt == first).sum() > 1
            else prompt
        )

    changes: dict[str, tuple[str, PromptEdit]] = {
        "special tokens missing": (
            "reads the prompt without special tokens",
            lambda p, _: p[~torch.isin(p, special)],
        ),
        "first message missing": (
            "does not read the first message (system prompt?)",
            without_first_message,
        ),
    }
    try:
        full, bare, calm = (
            rendered("x", **options)
            for options in ({}, {"add_generation_prompt": False}, {"enable_thinking": False})
        )
    except Exception:  # no template, or a template that does not render
        full = bare = calm = ""
    if full:
        changes["chat template added"] = (
            "puts the prompt into the chat template (once more)",
            in_template,
        )
    if len(suffix := encoded(full.removeprefix(bare))) and full.startswith(bare) and bare:
        claim = "does not read the start of the answer that the chat template adds"
        changes["generation prompt missing"] = (
            claim,
            lambda p, _: p[: -len(suffix)] if _ends(p, suffix) else p,
        )
        changes["generation prompt added"] = (
            f"{claim.split(' not ')[0]} twice",
            lambda p, _: torch.cat([p, suffix]),
        )
    if calm.startswith(full) and len(quiet := encoded(calm.removeprefix(full))):
        claim = "reads a prompt with the other value of enable_thinking"
        changes["thinking"] = (
            claim,
            lambda p, _: p[: -len(quiet)] if _ends(p, quiet) else torch.cat([p, quiet]),
        )
    return {
        name: Hypothesis(claim, "other_prompt", prompt=change)
        for name, (claim, change) in changes.items()
    }


def _ends(prompt: Tensor, suffix: Tensor) -> bool:
    return len(prompt) >= len(suffix) and torch.equal(prompt[-len(suffix) :], suffix)


_PROMPTS: dict[str, tuple[str, tuple[int, ...], PromptEdit]] = {
    "first prompt tokens missing": (
        "does not read the first {value:.0f} tokens of the prompt (BOS?)",
        FEW,
        lambda p, k: p[k:],
    ),
    "last prompt tokens missing": (
        "does not read the last {value:.0f} tokens of the prompt",
        FEW,
        lambda p, k: p[:-k],
    ),
    "first token doubled": (
        "reads the first token of the prompt {value:.0f} times",
        (2, 3),
        lambda p, k: torch.cat([p[:1].expand(k - 1), p]),
    ),
    "last token doubled": (
        "reads the last token of the prompt {value:.0f} times",
        (2, 3),
        lambda p, k: torch.cat([p, p[-1:].expand(k - 1)]),
    ),
    "prompt cut": (
        "reads only the last {value:.0f} tokens of the prompt",
        SIZES,
        lambda p, n: p[-n:],
    ),
    "prompt cut at the end": (
        "reads only the first {value:.0f} tokens of the prompt",
        SIZES,
        lambda p, n: p[:n],
    ),
}
TABLE: dict[str, Hypothesis] = {
    **{
        name: Hypothesis(claim, "other_prompt", values, prompt=edit)
        for name, (claim, values, edit) in _PROMPTS.items()
    },
    "packed neighbor": Hypothesis(
        "attends to the sample packed before it", "attention_mask", inputs=_neighbor
    ),
    "position gap": Hypothesis(
        "numbers the positions of the response {value:+.0f} higher",
        "position_drift",
        (-4, -2, -1, 1, 2, 4, 16),
        inputs=_gap,
    ),
    "attention window": Hypothesis(
        "attends to the last {value:.0f} tokens only", "position_drift", SIZES, inputs=_window
    ),
    "fp8 KV cache": Hypothesis("stores keys and values in fp8", "rounding", inputs=_fp8_cache),
}
