"""Runs `slime-tis parity`."""

import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from slime_tis.analysis.diagnosis.rescore import check_device
from slime_tis.analysis.report.page import check_output
from slime_tis.errors import quoted, quoted_path
from slime_tis.hf_hub import local_directory
from slime_tis.parity.adapter_faults import adapter_cause
from slime_tis.parity.checkpoint import read_config, vocab_size_of
from slime_tis.parity.comparison import Comparison, compare
from slime_tis.parity.executions import EXECUTIONS, Record, Side
from slime_tis.parity.parity_options import ADAPTER_SAMPLES, NO_ADAPTER, SAMPLES
from slime_tis.parity.parity_page import write_page
from slime_tis.parity.parity_text import as_json, text
from slime_tis.parity.recording import Recording
from slime_tis.parity.samples import Samples, check_length, joined, random_prompts, read_prompts
from slime_tis.peft_directory import read_adapter_config

SEEDS = 1 << 63
"""Seeds of torch are −SEEDS to SEEDS − 1."""


class TooDifferent(Exception):
    """The log-probs differ by more than --fail-on; `text` is the output."""

    def __init__(self, message: str, text: str) -> None:
        super().__init__(message)
        self.text = text


def parity(chosen: Namespace) -> str:
    """Compares the executions of a command line.

    Args:
        chosen: The parsed options of `slime-tis parity`.

    Returns:
        The text to print.

    Raises:
        ValueError: An option, the checkpoint or the prompts cannot be used, or a server is down.
        TooDifferent: --fail-on is exceeded.
    """
    reference, others = sides(chosen)
    check_device(chosen.device)
    if chosen.out:
        # Before the executions, which may take minutes.
        check_output(Path(chosen.out))
    comparisons = run(chosen, reference, others)
    if chosen.out:
        write_page(Path(chosen.out), chosen.checkpoint, comparisons)
    if chosen.json:
        printed = [as_json(comparison) for comparison in comparisons]
        output = json.dumps(printed[0] if len(printed) == 1 else printed, indent=2)
    else:
        output = "\n\n\n".join(text(comparison) for comparison in comparisons)
    _check_limit(chosen.fail_on, comparisons, output)
    return output


def sides(chosen: Namespace) -> tuple[Side, list[Side]]:
    """Returns the reference and the executions that are compared with it.

    Raises:
        ValueError: The options do not fit together.
    """
    names = chosen.other or ["decode"]
    count = _sample_count(chosen)
    for option, value in (("--samples", count), ("--tokens", chosen.tokens)):
        if not 1 <= value <= 100_000:
            raise ValueError(f"{option} is {value} but must be a number from 1 to 100000.")
    if not 1 <= chosen.chunk_size <= 1_000_000:
        raise ValueError(f"--chunk-size is {chosen.chunk_size} but must be 1 or more.")
    if not -SEEDS <= chosen.seed < SEEDS:
        raise ValueError(f"--seed is {chosen.seed} but must be a number of 64 bits.")
    # Negated, so that NaN is refused too.
    if chosen.fail_on is not None and not chosen.fail_on >= 0:
        raise ValueError(f"--fail-on is {chosen.fail_on:g} but must be 0 or more, in nats.")
    checkpoint = local_directory(chosen.checkpoint, "CHECKPOINT")
    adapter, other_adapter = _adapters(chosen)
    other_checkpoint = checkpoint
    if chosen.other_checkpoint:
        other_checkpoint = local_directory(chosen.other_checkpoint, "--other-checkpoint")
    used = [chosen.reference, *names]
    _check_url(chosen.url, used)
    if chosen.true_on_policy and not any(EXECUTIONS[name].is_engine for name in used):
        raise ValueError(
            "--true-on-policy changes the executions local and training; add --reference local"
            " --other training."
        )
    reference = Side(
        execution=chosen.reference,
        checkpoint=checkpoint,
        precision=chosen.precision,
        device=chosen.device,
        chunk_size=chosen.chunk_size,
        url=chosen.url,
        adapter=adapter,
        served_adapter=chosen.served_adapter,
        true_on_policy=chosen.true_on_policy and EXECUTIONS[chosen.reference].is_engine,
    )
    others = []
    for name in dict.fromkeys(names):
        other = replace(
            reference,
            execution=name,
            checkpoint=other_checkpoint,
            precision=chosen.other_precision or chosen.precision,
            adapter=other_adapter,
            true_on_policy=chosen.true_on_policy and EXECUTIONS[name].is_engine,
        )
        if other == reference:
            raise ValueError(
                f"--reference and --other are both {quoted(name)} with the same checkpoint,"
                " precision and adapter; choose another --other, --other-precision,"
                " --other-checkpoint or --other-adapter."
            )
        others.append(other)
    return reference, others


def run(chosen: Namespace, reference: Side, others: list[Side]) -> list[Comparison]:
    """Runs the executions on the same tokens."""
    _check(reference, others, chosen.older_adapter)
    samples = _samples(chosen, reference)
    for other in others:
        _check_vocabulary(samples, other)
    with _opened(reference) as record:
        expected = record(samples)
    comparisons = []
    for other in others:
        comparison = _compared(other, expected, samples)
        cause = adapter_cause(comparison, reference, other, samples, chosen.older_adapter)
        comparisons.append(replace(comparison, cause=cause))
    return comparisons


def _check(reference: Side, others: list[Side], older_adapters: list[str]) -> None:
    """Refuses what cannot run, before any execution takes its minutes.

    Raises:
        ValueError: A model, an adapter or a server does not fit, or a package is missing.
    """
    # Its weights sample the responses, with transformers.
    sampler = replace(reference, execution="full")
    older = [replace(sampler, adapter=path) for path in older_adapters]
    for side in [sampler, *older, reference, *others]:
        with _naming_the_extra(side):
            EXECUTIONS[side.execution].check(side)


def _compared(other: Side, expected: Recording, samples: Samples) -> Comparison:
    """Runs an execution, and again with the reference's inputs if an operation differs."""
    with _opened(other) as record:
        recording = record(samples)
        comparison = compare(expected, recording, None, samples)
        if comparison.first is not None:
            isolated = record(samples, expected)
            comparison = compare(expected, recording, isolated, samples)
    return comparison


def _adapters(chosen: Namespace) -> tuple[str, str]:
    """Returns the adapter of the reference and that of the other executions, "" for none.

    Raises:
        ValueError: A directory has no plain LoRA adapter, or the options do not fit together.
    """
    adapter = chosen.adapter
    if not adapter and (chosen.other_adapter or chosen.older_adapter):
        raise ValueError("--other-adapter and --older-adapter need --adapter.")
    other = chosen.other_adapter or adapter
    if other == NO_ADAPTER:
        other = ""
    directories = {"--adapter": [adapter], "--other-adapter": [other]}
    directories["--older-adapter"] = chosen.older_adapter
    for option, paths in directories.items():
        for path in filter(None, paths):
            read_adapter_config(path, f"{option} is {quoted_path(path)}")
    servers = [name for name in chosen.other if EXECUTIONS[name].is_server]
    if servers and chosen.other_adapter:
        raise ValueError(
            f"--other-adapter has no effect on the execution {servers[0]}: the server applies what"
            " it has. Give --adapter only, and --older-adapter if it may have an older one."
        )
    used = [chosen.reference, *chosen.other]
    uses_server = any(EXECUTIONS[name].is_server for name in used)
    if chosen.served_adapter and not (uses_server and adapter):
        raise ValueError(
            "--served-adapter names the adapter in requests to a server; it needs --adapter, and"
            " --other sglang or --other vllm."
        )
    if adapter and chosen.true_on_policy:
        raise ValueError("--true-on-policy does not work with LoRA adapters; remove --adapter.")
    return adapter, other


def _sample_count(chosen: Namespace) -> int:
    """Returns the number of prompts: more by default if a fault of an adapter is searched for."""
    if chosen.samples is not None:
        count: int = chosen.samples
        return count
    if chosen.adapter:
        return ADAPTER_SAMPLES
    return SAMPLES


@contextmanager
def _opened(side: Side) -> Iterator[Record]:
    """Opens an execution.

    Raises:
        ValueError: A package is missing, which another extra installs than this command's.
    """
    with _naming_the_extra(side):
        context = EXECUTIONS[side.execution].open(side)
    with context as record:
        yield record


@contextmanager
def _naming_the_extra(side: Side) -> Iterator[None]:
    """Replaces the error of a missing package by a ValueError that names the extra with it."""
    entry = EXECUTIONS[side.execution]
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package == "slime_tis":
            raise
        raise ValueError(
            f"the execution {side.execution} needs the package {package}; install it with:"
            f" pip install 'slime_tis[{entry.extra}]'"
        ) from error


def _check_url(url: str, names: list[str]) -> None:
    """Raises ValueError if a server has no address, or an address no server."""
    servers = [name for name in names if EXECUTIONS[name].is_server]
    if servers and not url:
        raise ValueError(
            f"the execution {servers[0]} needs --url, such as --url http://127.0.0.1:30000."
        )
    if url and not servers:
        raise ValueError("--url is the address of a server; add --other sglang or --other vllm.")


def _samples(chosen: Namespace, reference: Side) -> Samples:
    """Returns prompts with responses that the reference's weights sampled."""
    from slime_tis.parity.transformers_executions import load, sampled_responses

    vocab_size = vocab_size_of(reference.checkpoint)
    count = _sample_count(chosen)
    if chosen.prompts:
        prompts = read_prompts(chosen.prompts, count, _tokenizer(reference.checkpoint), vocab_size)
    else:
        prompts = random_prompts(count, chosen.tokens, vocab_size, chosen.seed)
    context_len = read_config(reference.checkpoint).get("max_position_embeddings")
    check_length(max(map(len, prompts)) + chosen.tokens, context_len)
    model = load(reference)
    return joined(prompts, sampled_responses(model, prompts, chosen.tokens, chosen.seed))


def _tokenizer(checkpoint: str) -> Callable[[], Any]:
    def load() -> Any:
        from slime_tis.trainer.engines.local.load_model import load_tokenizer

        return load_tokenizer(Path(checkpoint))

    return load


def _check_vocabulary(samples: Samples, side: Side) -> None:
    """Raises ValueError if the vocabulary of another checkpoint lacks a token."""
    vocab_size = vocab_size_of(side.checkpoint)
    largest = max(map(max, samples.tokens))
    if largest >= vocab_size:
        raise ValueError(
            f"the samples have the token {largest}, but {quoted_path(side.checkpoint)} has"
            f" {vocab_size} tokens; compare models with the same tokenizer."
        )


def _check_limit(limit: float | None, comparisons: list[Comparison], output: str) -> None:
    if limit is None:
        return
    for comparison in comparisons:
        log_probs = comparison.log_probs
        differs = limit == 0 and not log_probs.difference.is_equal
        # Negated, so that NaN exceeds every limit.
        if differs or not log_probs.mean <= limit:
            raise TooDifferent(
                f"mean abs(Δ) of {comparison.reference.name} and {comparison.other.name} is"
                f" {log_probs.mean:.3g} nats, above {limit:g}",
                output,
            )
