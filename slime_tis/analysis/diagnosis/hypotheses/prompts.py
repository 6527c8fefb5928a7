"""Faults of the network's input: other prompts, positions, masks and caches."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from slime_tis.analysis.diagnosis.hypotheses.hypothesis import Hypothesis, Input, PromptEdit

SIZES = tuple(2**i for i in range(1, 12))
"""Grid of prompt lengths and attention windows, tokens."""
CHUNKS = (4, 6, 8, 12, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Grid of the size of a chunk of the prompt, tokens."""
FEW = (1, 2, 3, 4)
"""Grid of a number of missing tokens."""
PADS = (*range(1, 9), 16)
"""Grid of a number of padding tokens."""


def with_prompt(sample: Input, prompt: Tensor) -> Input:
    """Returns the sample's response after another prompt; the sample itself if none changes."""
    if not len(prompt) or torch.equal(prompt, sample.prompt):
        return sample
    tokens = torch.cat([prompt, sample.tokens[len(sample.tokens) - sample.response :]])
    return replace(sample, tokens=tokens, positions=torch.arange(len(tokens)))


def _causal(length: int) -> Tensor:
    """Returns an explicit mask [S, S].

    Without one, transformers may take a jump of the positions for the start of a packed sample.
    """
    return torch.ones(length, length, dtype=torch.bool).tril()


def _gap(sample: Input, value: float, _: Sequence[Input]) -> Input:
    """The positions of the response are `value` higher."""
    positions = sample.positions.clone()
    positions[-sample.response :] += round(value)
    return replace(sample, positions=positions.clamp_min(0), mask=_causal(len(positions)))


def _window(sample: Input, value: float, _: Sequence[Input]) -> Input:
    """Every token attends to the last `value` tokens only."""
    length = len(sample.tokens)
    # A window that is longer than the sample changes nothing.
    if value >= length:
        return sample
    distance = torch.arange(length)[:, None] - torch.arange(length)
    return replace(sample, mask=(distance >= 0) & (distance < value))


def _neighbors(sample: Input, value: float, before: Sequence[Input]) -> Input:
    """Attends to the last `value` samples before it."""
    packed = before[max(len(before) - round(value), 0) :]
    return _after(sample, packed)


def _pack(sample: Input, value: float, before: Sequence[Input]) -> Input:
    """Attends to the samples before it in a pack of `value` samples."""
    # Packs are filled in order, so only the earlier samples of the same pack are seen.
    earlier = len(before) % round(value)
    return _after(sample, before[len(before) - earlier :])


def _after(sample: Input, packed: Sequence[Input]) -> Input:
    """Returns a sample that reads other samples before it; positions start anew in each."""
    if not packed:
        return sample
    all_tokens = []
    all_positions = []
    for other in packed:
        all_tokens.append(other.tokens)
        all_positions.append(torch.arange(len(other.tokens)))
    tokens = torch.cat([*all_tokens, sample.tokens])
    positions = torch.cat([*all_positions, sample.positions])
    return replace(sample, tokens=tokens, positions=positions, mask=_causal(len(tokens)))


def _chunks(sample: Input, value: float, _: Sequence[Input]) -> Input:
    """The prompt is read in chunks, and no chunk attends to an earlier one."""
    prompt = len(sample.prompt)
    if value >= prompt:
        return sample
    mask = _causal(len(sample.tokens))
    chunk = torch.arange(prompt) // round(value)
    mask[:prompt, :prompt] &= chunk[:, None] == chunk
    return replace(sample, mask=mask)


def _without(sample: Input, missing: Tensor) -> Input:
    """Returns the input in which later tokens do not read the missing tokens [S].

    A missing token has no key, and later positions move up. In its place the last token before it
    is read once more, because that token predicts the next one.
    """
    if not missing.any():
        return sample
    tokens = sample.tokens.clone()
    positions = sample.positions - (missing.cumsum(0) - missing.long())
    mask = _causal(len(tokens)) & ~missing
    for i in missing.nonzero()[:, 0].tolist():
        tokens[i] = tokens[i - 1]
        positions[i] = positions[i - 1]
        mask[i] = mask[i - 1]
    return replace(sample, tokens=tokens, positions=positions, mask=mask)


def _turn_starts(sample: Input, value: float, _: Sequence[Input]) -> Input:
    """The first tokens of every text between two turns are missing, such as a template's."""
    return _without(sample, _between_turns(sample, round(value), 0))


def _turn_ends(sample: Input, value: float, _: Sequence[Input]) -> Input:
    """The last tokens of every text between two turns are missing."""
    return _without(sample, _between_turns(sample, 0, round(value)))


def _between_turns(sample: Input, first: int, last: int) -> Tensor:
    """Returns first and last tokens [S] of the runs that the policy did not sample.

    A run at the end of the response counts, too; no token follows it.
    """
    missing = torch.zeros(len(sample.tokens), dtype=torch.bool)
    if sample.trained is None:
        return missing
    offset = len(sample.tokens) - sample.response
    start = 0
    for trained, run in groupby(sample.trained.tolist()):
        end = start + len(list(run))
        if not trained:
            missing[offset + start : offset + min(start + first, end)] = True
            missing[offset + max(end - last, start) : offset + end] = True
        start = end
    return missing


def for_history(opening: int, closing: int) -> dict[str, Hypothesis]:
    """Returns the hypothesis that thinking is removed from earlier turns.

    Args:
        opening: Token id that starts thinking.
        closing: Token id that ends thinking.
    """

    def without_thinking(sample: Input, _: float, __: Sequence[Input]) -> Input:
        missing = torch.zeros(len(sample.tokens), dtype=torch.bool)
        if sample.trained is None or sample.trained.all():
            return sample
        last_turn = len(sample.tokens) - sample.response
        untrained = (~sample.trained).nonzero()[:, 0]
        last_turn += int(untrained[-1]) + 1
        starts = (sample.tokens[:last_turn] == opening).nonzero()[:, 0].tolist()
        ends = (sample.tokens[:last_turn] == closing).nonzero()[:, 0].tolist()
        # A text that was cut may start thinking without ending it.
        for start, end in zip(starts, ends, strict=False):
            missing[start : end + 1] = True
        return _without(sample, missing)

    claim = "reads earlier turns without their thinking"
    return {"thinking removed": Hypothesis(claim, "other_prompt", inputs=without_thinking)}


def _fp8_cache(sample: Input, _: float, __: Sequence[Input]) -> Input:
    """Keys and values are rounded to fp8 when they are stored."""
    from transformers import DynamicCache

    def rounded(states: Tensor) -> Tensor:
        return states.to(torch.float8_e4m3fn).to(states.dtype)

    class Fp8Cache(DynamicCache):  # type: ignore[misc]  # transformers has no types here
        def update(
            self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            return super().update(rounded(key_states), rounded(value_states), *args, **kwargs)

    return replace(sample, cache=Fp8Cache)


def for_pads(pad: int, longest: int) -> dict[str, Hypothesis]:
    """Returns the hypotheses on attended padding.

    Args:
        pad: Token id of the padding.
        longest: Length of the longest prompt, tokens.
    """

    def before(prompt: Tensor, count: int) -> Tensor:
        return torch.cat([prompt.new_full((max(count, 0),), pad), prompt])

    def after(prompt: Tensor, count: int) -> Tensor:
        return torch.cat([prompt, prompt.new_full((max(count, 0),), pad)])

    cause = "attention_mask"
    few = "attends to {value:.0f} padding tokens"
    full = "attends to the padding on the {} of the prompt, which makes all prompts {} tokens long"
    return {
        "pads attended": Hypothesis(f"{few} before the prompt", cause, PADS, prompt=before),
        "pads after the prompt": Hypothesis(f"{few} after the prompt", cause, PADS, prompt=after),
        "padded on the left": Hypothesis(
            full.format("left", longest), cause, prompt=lambda p, _: before(p, longest - len(p))
        ),
        "padded on the right": Hypothesis(
            full.format("right", longest), cause, prompt=lambda p, _: after(p, longest - len(p))
        ),
    }


def for_bos(bos: int) -> dict[str, Hypothesis]:
    """Returns the hypothesis on the token that starts a text."""
    return {
        "BOS added": _other_prompt(
            "reads a BOS token before the prompt", lambda p, _: torch.cat([p.new_tensor([bos]), p])
        )
    }


def for_template(tokenizer: Any) -> dict[str, Hypothesis]:
    """Returns the hypotheses on special tokens, and on the chat template if it renders."""
    special = torch.tensor(sorted(tokenizer.all_special_ids))
    message_marks = torch.tensor(sorted({*tokenizer.all_special_ids} - {tokenizer.bos_token_id}))

    def without_first_message(prompt: Tensor, _: int) -> Tensor:
        marks = prompt[torch.isin(prompt, message_marks)]
        if not len(marks):
            return prompt
        # The first special token after BOS usually starts every message.
        starts = (prompt == marks[0]).nonzero()[:, 0]
        if len(starts) < 2:
            return prompt
        return prompt[starts[1] :]

    table = {
        "special tokens missing": _other_prompt(
            "reads the prompt without special tokens", lambda p, _: p[~torch.isin(p, special)]
        ),
        "first message missing": _other_prompt(
            "does not read the first message (system prompt?)", without_first_message
        ),
    }
    try:
        full = _rendered(tokenizer, "x")
        without_start = _rendered(tokenizer, "x", add_generation_prompt=False)
        without_thinking = _rendered(tokenizer, "x", enable_thinking=False)
    except Exception:
        # The tokenizer has no template, or the template does not render.
        return table
    if full:

        def in_template(prompt: Tensor, _: int) -> Tensor:
            text = tokenizer.decode(prompt[~torch.isin(prompt, special)])
            return _encoded(tokenizer, _rendered(tokenizer, text))

        table["chat template added"] = _other_prompt(
            "puts the prompt into the chat template (once more)", in_template
        )
    if without_start and full.startswith(without_start):
        table |= _for_start(_encoded(tokenizer, full.removeprefix(without_start)))
    opening = _encoded(tokenizer, "<think>")
    closing = _encoded(tokenizer, "</think>")
    if len(opening) == len(closing) == 1:
        table |= for_history(int(opening[0]), int(closing[0]))
    if without_thinking.startswith(full):
        table |= _for_thinking(_encoded(tokenizer, without_thinking.removeprefix(full)))
    return table


def _rendered(tokenizer: Any, text: str, **options: Any) -> str:
    """Returns the chat template's text for a message of the user."""
    options = {"tokenize": False, "add_generation_prompt": True, **options}
    return str(tokenizer.apply_chat_template([{"role": "user", "content": text}], **options))


def _encoded(tokenizer: Any, text: str) -> Tensor:
    """Returns the token ids of a text, without the tokens that the tokenizer adds."""
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    return torch.tensor(tokens, dtype=torch.long)


def _for_start(start: Tensor) -> dict[str, Hypothesis]:
    """Returns the hypotheses on the start of the answer that a chat template adds."""
    if not len(start):
        return {}

    def without_start(prompt: Tensor, _: int) -> Tensor:
        if not _ends(prompt, start):
            return prompt
        return prompt[: -len(start)]

    return {
        "generation prompt missing": _other_prompt(
            "does not read the start of the answer that the chat template adds", without_start
        ),
        "generation prompt added": _other_prompt(
            "reads twice the start of the answer that the chat template adds",
            lambda p, _: torch.cat([p, start]),
        ),
    }


def _for_thinking(thinking: Tensor) -> dict[str, Hypothesis]:
    """Returns the hypothesis on the tokens that end a prompt without thinking."""
    if not len(thinking):
        return {}

    def other_thinking(prompt: Tensor, _: int) -> Tensor:
        if not _ends(prompt, thinking):
            return torch.cat([prompt, thinking])
        return prompt[: -len(thinking)]

    claim = "reads a prompt with the other value of enable_thinking"
    return {"thinking": _other_prompt(claim, other_thinking)}


def _ends(prompt: Tensor, suffix: Tensor) -> bool:
    """Whether a prompt ends with these tokens."""
    return len(prompt) >= len(suffix) and torch.equal(prompt[-len(suffix) :], suffix)


def _other_prompt(claim: str, prompt: PromptEdit, values: tuple[float, ...] = (0.0,)) -> Hypothesis:
    """Returns the hypothesis that the engine reads another prompt."""
    return Hypothesis(claim, "other_prompt", values, prompt=prompt)


TABLE: dict[str, Hypothesis] = {
    "first prompt tokens missing": _other_prompt(
        "does not read the first {value:.0f} tokens of the prompt (BOS?)", lambda p, k: p[k:], FEW
    ),
    "last prompt tokens missing": _other_prompt(
        "does not read the last {value:.0f} tokens of the prompt", lambda p, k: p[:-k], FEW
    ),
    "first token doubled": _other_prompt(
        "reads the first token of the prompt {value:.0f} times",
        lambda p, k: torch.cat([p[:1].expand(k - 1), p]),
        (2, 3),
    ),
    "last token doubled": _other_prompt(
        "reads the last token of the prompt {value:.0f} times",
        lambda p, k: torch.cat([p, p[-1:].expand(k - 1)]),
        (2, 3),
    ),
    "prompt cut": _other_prompt(
        "reads only the last {value:.0f} tokens of the prompt", lambda p, n: p[-n:], SIZES
    ),
    "prompt cut at the end": _other_prompt(
        "reads only the first {value:.0f} tokens of the prompt", lambda p, n: p[:n], SIZES
    ),
    "packed neighbor": Hypothesis(
        "attends to the {value:.0f} samples before it",
        "attention_mask",
        (1, 2, 3),
        inputs=_neighbors,
    ),
    "pack": Hypothesis(
        "attends to the samples before it in packs of {value:.0f}",
        "attention_mask",
        (2, 3, 4, 8),
        inputs=_pack,
    ),
    "chunks": Hypothesis(
        "reads the prompt in chunks of {value:.0f} tokens that do not see each other",
        "attention_mask",
        CHUNKS,
        inputs=_chunks,
    ),
    "start of turns missing": Hypothesis(
        "does not read the first {value:.0f} tokens between two turns (a template?)",
        "other_prompt",
        FEW,
        inputs=_turn_starts,
    ),
    "end of turns missing": Hypothesis(
        "does not read the last {value:.0f} tokens between two turns (a template?)",
        "other_prompt",
        FEW,
        inputs=_turn_ends,
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
