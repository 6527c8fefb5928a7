"""What the contenders of decode.py generate; also imported in vLLM's environment."""

import os
import time
from collections.abc import Callable
from pathlib import Path

RATE = "tokens per CPU second:"
"""Words before each result, to tell it from other output."""
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class DecodeTask:
    """Sizes of the task."""

    prompts = 8
    samples = 8
    """Samples per prompt."""
    sequences = prompts * samples
    new_tokens = 32
    """Tokens of every sample; end tokens are ignored."""
    warm_up_tokens = 4
    calls = 2
    """Measured calls of a process, because starting vLLM takes longer than a call."""


SYSTEM_PROMPT = [1, 9690, 198, 1780, 314, 216, 34, 1232, 216, 55, 47, 2, 198, 1, 520, 9531, 198]
"""Tokens of the chat template with which each prompt begins."""


def prompt_token_ids() -> list[list[int]]:
    """The prompts, of 28 tokens each, which differ in the last one."""
    shared = [*SYSTEM_PROMPT, *range(200, 210)]
    return [[*shared, 300 + number] for number in range(DecodeTask.prompts)]


def cpu_seconds() -> float:
    """Processor time of this process and of all its living children."""
    total = time.process_time()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_text().rsplit(")", 1)[1].split()
        except (OSError, IndexError):
            # The process has ended meanwhile.
            continue
        if int(words[1]) == os.getpid():
            total += (int(words[11]) + int(words[12])) / TICKS_PER_SECOND
    return total


def print_rates(generate: Callable[[int], int]) -> None:
    """Prints tokens per CPU second of two calls after a warm-up call.

    Args:
        generate: Samples this number of tokens per sequence, and returns the tokens of all.
    """
    generate(DecodeTask.warm_up_tokens)
    for _ in range(DecodeTask.calls):
        start = cpu_seconds()
        tokens = generate(DecodeTask.new_tokens)
        seconds = cpu_seconds() - start
        expected = DecodeTask.sequences * DecodeTask.new_tokens
        if tokens != expected:
            raise RuntimeError(f"{tokens} tokens were generated instead of {expected}")
        print(RATE, tokens / seconds, flush=True)
