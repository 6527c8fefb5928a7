"""The local rollout engine, which draws given tokens."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from slime_tis.hf_directory import load_config, read_model_config
from slime_tis.parity import transformers_executions
from slime_tis.parity.executions import Record, Side
from slime_tis.parity.recording import Recorder, Recording, Rows, replaced_attribute
from slime_tis.parity.samples import Samples
from slime_tis.parity.transformers_adapters import apply_adapter
from slime_tis.parity.transformers_executions import DTYPES
from slime_tis.parity.transformers_sites import recorded
from slime_tis.trainer.data.sample import Sampling
from slime_tis.trainer.engines.function_requests import Request, RequestOptions
from slime_tis.trainer.engines.local import token_sampling
from slime_tis.trainer.engines.local.continuous_batching import ContinuousBatching
from slime_tis.trainer.engines.local.load_model import load_model, load_tokenizer
from slime_tis.trainer.engines.local.slot_cache import Slot, Work, check_config


class GivenTokens(ContinuousBatching):
    """The engine's batching, with given responses and an announcement of every pass.

    A subclass, because only the engine itself knows which request a row of a pass belongs to.
    """

    samples: Samples
    recorder: Recorder

    def _forward(self, first: int, fed: list[list[int]]) -> Tensor:
        slots = self._slots[first : first + len(fed)]
        self.recorder.begin(*self._rows(slots, fed))
        return super()._forward(first, fed)

    def _rows(self, slots: Sequence[Slot], fed: list[list[int]]) -> tuple[Rows, Rows]:
        """Returns the rows of a left-padded pass, and the rows that get logits."""
        columns = max(map(len, fed))
        rows = []
        tokens = []
        last_tokens = []
        for number, (slot, token_ids) in enumerate(zip(slots, fed, strict=True)):
            first_row = number * columns + columns - len(token_ids)
            first_token = self.samples.starts[_sample(slot.work)] + len(slot.tokens)
            rows.append(first_row + torch.arange(len(token_ids)))
            tokens.append(first_token + torch.arange(len(token_ids)))
            last_tokens.append(first_token + len(token_ids) - 1)
        # Logits are computed for the last column only.
        head_rows = Rows((len(fed), 1), torch.arange(len(fed)), torch.tensor(last_tokens))
        return Rows((len(fed), columns), torch.cat(rows), torch.cat(tokens)), head_rows

    def _draw(
        self, works: Sequence[Work], logits_BV: Tensor, distribution: tuple[float, float, int]
    ) -> None:
        tokens = []
        for work in works:
            tokens.append(self.samples.tokens[_sample(work)][len(work.known)])
        given = torch.tensor(tokens, device=logits_BV.device)
        # The engine's log-probs, of these tokens instead of random ones.
        with replaced_attribute(token_sampling, "inverse_cdf", lambda *_: given):
            super()._draw(works, logits_BV, distribution)


def _sample(work: Work | None) -> int:
    """Returns the number of a request's sample."""
    assert work is not None
    return work.request.session[0]


def check(side: Side) -> None:
    """Refuses a model or an adapter that the engine does not support.

    Raises:
        ValueError: The model, its tokenizer or the adapter does not fit.
    """
    read_model_config(side.checkpoint, "the checkpoint")
    check_config(load_config(side.checkpoint))
    load_tokenizer(side.checkpoint)
    transformers_executions.check(side)
    if side.true_on_policy:
        _shared_kernels(side, torch.device(side.device).type)


@contextmanager
def opened(side: Side) -> Iterator[Record]:
    """Loads the engine's model; yields its execution."""
    model = load_model(side.checkpoint, DTYPES[side.precision]).to(side.device)
    check_config(model.config)
    if side.adapter:
        apply_adapter(model, side.adapter)
    invariant_options: dict[str, Any] = {}
    if side.true_on_policy:
        invariant_options = _use_shared_kernels(model, side)
    tokenizer = load_tokenizer(side.checkpoint)

    def record(samples: Samples, substitutes: Recording | None = None) -> Recording:
        recorder = Recorder(samples.total, substitutes)
        batching = GivenTokens(
            model=model,
            tokenizer=tokenizer,
            # Responses may contain or follow a token that ends a text.
            eos_token_ids=frozenset(),
            context_len=None,
            weight_version=0,
            records_routing=False,
            check_interrupts=lambda: None,
            **invariant_options,
        )
        batching.samples = samples
        batching.recorder = recorder
        with recorded(model, recorder):
            generations = batching.answer_all(_requests(samples))
        log_probs_T = torch.full([samples.total], torch.nan)
        is_scored_T = torch.zeros(samples.total, dtype=torch.bool)
        for sample, generation in enumerate(generations):
            end = samples.starts[sample] + len(samples.tokens[sample])
            response = slice(end - len(generation.log_probs), end)
            log_probs_T[response] = torch.tensor(generation.log_probs)
            is_scored_T[response] = True
        return Recording(
            name=side.execution,
            precision=side.precision,
            results=recorder.results,
            log_probs_T=log_probs_T,
            is_scored_T=is_scored_T,
            shapes=recorder.shapes,
        )

    yield record


def _use_shared_kernels(model: Any, side: Side) -> dict[str, Any]:
    """Installs the operations of --true-on-policy; returns the engine's options of batching."""
    # Imported here, because only this option needs megatron-core.
    from slime_tis.trainer.engines.local.invariant_model import batching_options, install

    kernels = _shared_kernels(side, model.device.type)
    install(model, kernels)
    return batching_options(kernels)


def _shared_kernels(side: Side, device_type: str) -> Any:
    """Returns the operations of --true-on-policy; raises ValueError as `kernels_of`."""
    # Imported here, because only this option needs megatron-core.
    from slime_tis.parity.shared_kernels import kernels_of

    kernels = kernels_of(side, device_type)
    assert kernels is not None
    return kernels


def _requests(samples: Samples) -> list[tuple[Request, Tensor]]:
    """Returns the requests for all responses, with unused random numbers."""
    requests = []
    for sample, tokens in enumerate(samples.tokens):
        prompt_length = samples.prompt_lengths[sample]
        length = len(tokens) - prompt_length
        request = Request(
            token_ids=list(tokens[:prompt_length]),
            options=RequestOptions(sampling=Sampling(max_response_len=length)),
            key=b"",
            session=(sample, None),
        )
        requests.append((request, torch.zeros(length)))
    return requests
