"""Executions of a transformers model: one pass, decoding with a cache, a padded batch, chunks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from slime_tis.errors import quoted_path
from slime_tis.hf_model import empty_causal_lm, load_causal_lm
from slime_tis.hf_tensors import INDEX, SINGLE, tensor_files, tensors_of
from slime_tis.parity.checkpoint import read_config
from slime_tis.parity.executions import Record, Side
from slime_tis.parity.recording import HEAD, Operation, Recorder, Recording, Rows
from slime_tis.parity.samples import Samples
from slime_tis.parity.transformers_adapters import apply_adapter
from slime_tis.parity.transformers_sites import recorded
from slime_tis.trainer.engines.local.token_sampling import log_softmax

Run = Callable[[Any, Samples, Recorder], None]
"""Computes all samples with a model; announces every pass to the recorder."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Data types of parameters by the name of a precision."""
LOGIT_ROWS = 64
"""Tokens whose log-probs are computed at once, which bounds the memory."""


def check(side: Side) -> None:
    """Refuses incomplete files, and an adapter of another model, without reading weights.

    Raises:
        ValueError: config.json does not load, a file of weights is missing or cut off, or the
            adapter does not fit.
    """
    architecture = read_config(side.checkpoint)["architectures"][0]
    _check_files(Path(side.checkpoint))
    if not side.adapter:
        return
    try:
        model = empty_causal_lm(side.checkpoint, architecture=architecture)
    except ValueError as error:
        raise ValueError(f"{quoted_path(side.checkpoint)} {error}.") from error
    apply_adapter(model, side.adapter)


def _check_files(directory: Path) -> None:
    """Reads the headers of the files of weights.

    Raises:
        ValueError: There is no such file, or a header cannot be read.
    """
    if not any((directory / name).is_file() for name in (SINGLE, INDEX)):
        if any(directory.glob("pytorch_model*.bin")):
            return  # without a header; transformers reads it
        raise ValueError(
            f"{quoted_path(directory)} has no weights, neither {SINGLE} nor {INDEX} nor"
            " pytorch_model.bin; download it again."
        )
    for path in set(tensor_files(directory).values()):
        tensors_of(path)


@contextmanager
def opened(side: Side) -> Iterator[Record]:
    """Loads the model of a side; yields its execution."""
    yield execution(load(side), side)


def load(side: Side) -> Any:
    """Returns a side's model on its device.

    Raises:
        ValueError: The directory has no complete model, or the adapter is not one of this model.
    """
    architecture = read_config(side.checkpoint)["architectures"][0]
    try:
        model = load_causal_lm(side.checkpoint, DTYPES[side.precision], architecture=architecture)
    except ValueError as error:
        raise ValueError(f"{quoted_path(side.checkpoint)} {error}.") from error
    model = model.requires_grad_(False).to(side.device)
    if side.adapter:
        apply_adapter(model, side.adapter)
    return model


def execution(model: Any, side: Side) -> Record:
    """Returns the execution of a loaded model that `side` names."""
    runs: dict[str, Run] = {
        "full": one_pass,
        "decode": decode,
        "batch": padded_batch,
        "chunks": partial(in_chunks, chunk_size=side.chunk_size),
    }
    run = runs[side.execution]

    @torch.inference_mode()
    def record(samples: Samples, substitutes: Recording | None = None) -> Recording:
        recorder = Recorder(samples.total, substitutes)
        with recorded(model, recorder):
            run(model, samples, recorder)
        logits = recorder.results[Operation(HEAD)]
        return Recording(
            name=side.execution,
            precision=side.precision,
            results=recorder.results,
            log_probs_T=token_log_probs(logits.values_TF, samples),
            is_scored_T=samples.predicted,
            shapes=recorder.shapes,
        )

    return record


def one_pass(model: Any, samples: Samples, recorder: Recorder) -> None:
    """Computes one sample after the other, each in one pass."""
    for sample, tokens in enumerate(samples.tokens):
        recorder.begin(consecutive(samples, sample, 0, len(tokens)))
        model(input_ids=_ids(model, tokens), use_cache=False)


def decode(model: Any, samples: Samples, recorder: Recorder) -> None:
    """Computes one sample after the other: the prompt in one pass, then token by token."""
    for sample, tokens in enumerate(samples.tokens):
        prompt_length = samples.prompt_lengths[sample]
        ends = [prompt_length, *range(prompt_length + 1, len(tokens) + 1)]
        _cached_passes(model, samples, recorder, sample, ends)


def in_chunks(model: Any, samples: Samples, recorder: Recorder, *, chunk_size: int) -> None:
    """Computes one sample after the other, `chunk_size` tokens in a pass."""
    for sample, tokens in enumerate(samples.tokens):
        ends = [*range(chunk_size, len(tokens), chunk_size), len(tokens)]
        _cached_passes(model, samples, recorder, sample, ends)


def padded_batch(model: Any, samples: Samples, recorder: Recorder) -> None:
    """Computes all samples in one pass, padded on the left."""
    columns = max(map(len, samples.tokens))
    ids = torch.zeros(len(samples), columns, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for sample, tokens in enumerate(samples.tokens):
        ids[sample, columns - len(tokens) :] = torch.tensor(tokens)
        mask[sample, columns - len(tokens) :] = 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    row_N = mask.flatten().nonzero().squeeze(1)
    recorder.begin(Rows((len(samples), columns), row_N, torch.arange(samples.total)))
    model(
        input_ids=ids.to(model.device),
        attention_mask=mask.to(model.device),
        position_ids=positions.to(model.device),
        use_cache=False,
    )


def consecutive(samples: Samples, sample: int, start: int, end: int) -> Rows:
    """Returns the rows of a pass over the tokens from `start` to `end` of one sample."""
    row_N = torch.arange(end - start)
    return Rows((1, end - start), row_N, samples.starts[sample] + start + row_N)


def _cached_passes(
    model: Any, samples: Samples, recorder: Recorder, sample: int, ends: list[int]
) -> None:
    """Feeds a sample in passes that end at these positions, with one key/value cache."""
    cache = DynamicCache(config=model.config)
    tokens = samples.tokens[sample]
    start = 0
    for end in ends:
        recorder.begin(consecutive(samples, sample, start, end))
        model(
            input_ids=_ids(model, tokens[start:end]),
            position_ids=torch.arange(start, end, device=model.device)[None],
            past_key_values=cache,
            use_cache=True,
        )
        start = end


def _ids(model: Any, tokens: tuple[int, ...]) -> Tensor:
    return torch.tensor([tokens], device=model.device)


def token_log_probs(logits_TV: Tensor, samples: Samples) -> Tensor:
    """Returns the log-probs [T] of tokens; NaN for the first token of a sample."""
    token_T = samples.packed
    log_probs_T = torch.full([samples.total], torch.nan)
    for start in range(1, samples.total, LOGIT_ROWS):
        end = min(start + LOGIT_ROWS, samples.total)
        # Logits after a token predict the next one.
        log_probs = log_softmax(logits_TV[start - 1 : end - 1])
        log_probs_T[start:end] = log_probs.gather(1, token_T[start:end, None])[:, 0]
    log_probs_T[~samples.predicted] = torch.nan
    return log_probs_T


@torch.inference_mode()
def sampled_responses(
    model: Any, prompts: list[list[int]], count: int, seed: int
) -> list[list[int]]:
    """Samples `count` tokens after each prompt at temperature 1, also after the end of a text."""
    generator = torch.Generator().manual_seed(seed)
    responses = []
    for prompt in prompts:
        cache = DynamicCache(config=model.config)
        response: list[int] = []
        fed = prompt
        for _ in range(count):
            output = model(input_ids=_ids(model, tuple(fed)), past_key_values=cache, use_cache=True)
            probabilities = output.logits[0, -1].float().softmax(-1).cpu()
            # A model that gives NaN is compared too, with other tokens.
            probabilities = probabilities.nan_to_num(nan=1.0).clamp(min=1e-30)
            token = int(torch.multinomial(probabilities, 1, generator=generator))
            response.append(token)
            fed = [token]
        responses.append(response)
    return responses
