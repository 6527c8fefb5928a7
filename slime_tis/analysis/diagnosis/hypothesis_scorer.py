"""Log-probs of samples under hypotheses, with as few forward passes as possible.

Hypotheses on logits and log-probs share the forward pass of the network. A prompt or an input that
a hypothesis does not change needs no pass.

Shapes: T response tokens of a sample, S tokens of prompt and response, V vocabulary entries.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from slime_tis.analysis.diagnosis.hypotheses import Hypothesis, Input, with_prompt
from slime_tis.analysis.diagnosis.rescore import HfScorer, Scorer

MAX_CACHED = 2**29
"""Largest size of the logits that are kept, bytes."""
MAX_BATCH = 2**24
"""Largest number of logits in one batch."""
FUNCTION_VOCABULARY = 2**16
"""Vocabulary size that is assumed for a scorer that is a function, to limit memory."""

BLOCK = 8
"""Number of neighboring samples of the dump that are chosen together, for hypotheses that involve
the samples before."""

Edit = tuple[str, float]
"""Name and parameter of a hypothesis."""
Edits = tuple[Edit, ...]
"""Hypotheses that hold together."""


def _ignore(_: int) -> None:
    """Does nothing with the number of tokens."""


class HypothesisScorer:
    """Scores samples with the reference scorer, changed by hypotheses.

    Args:
        scorer: The reference.
        inputs: The samples.
        fitted: Indices of the samples that parameters are fitted on. Their logits are kept, as
            each step of a fit needs them again.
        table: The hypotheses by name, in the order in which an engine applies them. The search
            adds entries.
    """

    def __init__(
        self,
        scorer: Scorer,
        inputs: Sequence[Input],
        fitted: Sequence[int],
        table: dict[str, Hypothesis],
    ) -> None:
        self.table = table
        self._scorer = scorer
        self._inputs = inputs
        self._fitted = fitted
        self._all = range(len(inputs))
        self._model: Any = None
        self.on_tokens: Callable[[int], object] = _ignore
        """Called with the number of tokens of every forward pass."""
        self._vocabulary = FUNCTION_VOCABULARY
        if isinstance(scorer, HfScorer):
            self._model = scorer.model
            self._vocabulary = scorer.model.config.vocab_size
        self._rows: dict[Edits, list[Tensor]] = {}
        self._kept_network: Edits = ()
        self._kept_logits: dict[int, Tensor] = {}

    @torch.inference_mode()
    def rows(self, edits: Edits) -> list[Tensor]:
        """Returns the log-probs [T] of all samples under some hypotheses."""
        if edits not in self._rows:
            self._rows[edits] = self._pass(self._with_pass(edits), [edits], self._all)[0]
        return self._rows[edits]

    @torch.inference_mode()
    def score(self, lists: Sequence[Edits], samples: Sequence[int]) -> list[list[Tensor]]:
        """Returns the log-probs [T] of samples under each list of hypotheses.

        Lists with the same network and input share a forward pass.
        """
        ordered = self._in_order_of_table(lists)
        result: dict[Edits, list[Tensor]] = {}
        groups: dict[Edits, list[Edits]] = {}
        # Two lists may differ only in their order, and are then scored once.
        for edits in dict.fromkeys(ordered):
            if "exchanged" in dict(edits):
                result[edits] = self._exchanged(edits, samples)
            else:
                groups.setdefault(self._with_pass(edits), []).append(edits)
        for network, group in groups.items():
            rows = self._pass(network, group, samples)
            result.update(zip(group, rows, strict=True))
        return [result[edits] for edits in ordered]

    def _in_order_of_table(self, lists: Sequence[Edits]) -> list[Edits]:
        """Returns the lists in the order in which an engine applies hypotheses."""
        order = {name: index for index, name in enumerate(self.table)}

        def place(edit: Edit) -> int:
            name, _ = edit
            return order[name]

        return [tuple(sorted(edits, key=place)) for edits in lists]

    def logits(self, read: Input) -> Tensor:
        """Returns the logits [T, V] of one sample, divided by the temperature."""
        self.on_tokens(len(read.tokens))
        if self._model is None:
            return self._scorer(read.tokens, read.response) / read.temperature
        options: dict[str, Any] = {}
        start = 0
        mask = self._float_mask(read)
        if read.cache is not None:
            options["past_key_values"] = read.cache()
            options["use_cache"] = True
        if read.prompt_network is not None and len(read.prompt) > 1:
            # The last prompt token predicts the first response token, so the response reads it.
            start = len(read.prompt) - 1
            prompt = read.tokens[None, :start].to(self._model.device)
            prompt_mask = None
            if mask is not None:
                prompt_mask = mask[..., :start, :start]
            with read.prompt_network(self._model, 1.0):
                output = self._model(prompt, attention_mask=prompt_mask, use_cache=True)
            options["past_key_values"] = output.past_key_values
            options["use_cache"] = True
        if mask is not None:
            # The keys of a cached prompt stay.
            options["attention_mask"] = mask[..., start:, :]
        options["position_ids"] = read.positions[None, start:].to(self._model.device)
        with ExitStack() as stack:
            if read.network is not None:
                stack.enter_context(read.network(self._model, 1.0))
            logits = self._scorer(read.tokens[start:], read.response, **options)
        return logits / read.temperature

    def _float_mask(self, read: Input) -> Tensor | None:
        """Returns a sample's mask as transformers takes it; None if the model makes it."""
        if read.mask is None:
            return None
        # Attention of transformers adds a float mask [batch, heads, S, S] to its scores.
        mask = torch.where(read.mask, 0.0, torch.finfo(torch.float32).min)[None, None]
        return mask.to(self._model.device, next(self._model.parameters()).dtype)

    def log_probs(self, logits: Tensor, sample: Input, edits: Edits = ()) -> Tensor:
        """Returns the log-probs [T] of the response, after the changes of the logits."""
        for name, value in edits:
            change = self.table[name].logits
            if change is not None:
                logits = change(logits, sample, value)
        response = sample.tokens[len(sample.tokens) - sample.response :]
        log_probs = logits.log_softmax(-1)
        for name, value in edits:
            report = self.table[name].reported
            if report is not None:
                return report(log_probs, response, value)
        return log_probs.gather(1, response[:, None])[:, 0]

    def _with_pass(self, edits: Edits) -> Edits:
        """Returns the hypotheses that need a forward pass."""
        with_pass = []
        for name, value in edits:
            if self.table[name].cost:
                with_pass.append((name, value))
        return tuple(with_pass)

    def _exchanged(self, edits: Edits, samples: Sequence[int]) -> list[Tensor]:
        """Returns the log-probs of samples that report those of other samples."""
        exchange = []
        others = []
        for name, value in edits:
            if name == "exchanged":
                exchange.append((name, value))
            else:
                others.append((name, value))
        # The other samples may be outside of `samples`, so all are scored.
        rows = self._reported(self.rows(tuple(others)), tuple(exchange))
        return [rows[i] for i in samples]

    def _pass(
        self, network: Edits, lists: Sequence[Edits], samples: Sequence[int]
    ) -> list[list[Tensor]]:
        """Runs a forward pass of samples under `network`.

        Returns:
            The log-probs [T] per list of hypotheses and sample.
        """
        rows: list[dict[int, Tensor]] = []
        for _ in lists:
            # Allocated before the logits: small tensors between freed logits fragment the heap,
            # which took 6.2 GB instead of 2.5 GB for SmolLM2.
            rows.append({i: torch.empty(self._inputs[i].response) for i in samples})
        kept = self._kept(network, lists, samples)
        may_skip = self._may_skip(network, lists)
        reads: dict[int, Input] = {}
        for i in samples:
            if kept is not None and i in kept:
                continue
            read = self._read(i, network)
            if may_skip and read is self._inputs[i]:
                for row in rows:
                    row[i] = self._rows[()][i]
            else:
                reads[i] = read
        # A copy, because the loop adds entries.
        earlier = list((kept or {}).items())
        for i, logits in chain(earlier, self._network_logits(network, reads)):
            if kept is not None:
                kept[i] = logits
            for row, edits in zip(rows, lists, strict=True):
                row[i].copy_(self.log_probs(logits, self._inputs[i], edits))
        result = []
        for row, edits in zip(rows, lists, strict=True):
            result.append(self._reported([row[i] for i in samples], edits))
        return result

    def _kept(
        self, network: Edits, lists: Sequence[Edits], samples: Sequence[int]
    ) -> dict[int, Tensor] | None:
        """Returns the kept logits under `network` by sample, to be filled; None to keep none."""
        response_tokens = sum(self._inputs[i].response for i in samples)
        logits_bytes = 4 * self._vocabulary * response_tokens
        # A single list is scored once, so that its logits are not needed again.
        if samples is not self._fitted or len(lists) == 1 or logits_bytes > MAX_CACHED:
            return None
        if self._kept_network != network:
            self._kept_network = network
            self._kept_logits = {}
        return self._kept_logits

    def _may_skip(self, network: Edits, lists: Sequence[Edits]) -> bool:
        """Whether samples whose input stays have the log-probs of the reference."""
        # The rows of the reference are computed first, by `Search`.
        if () not in self._rows:
            return False
        for name, _ in network:
            if self.table[name].network:
                return False
        for name, _ in chain.from_iterable(lists):
            if self.table[name].logits or self.table[name].reported:
                return False
        return True

    def _network_logits(
        self, network: Edits, reads: Mapping[int, Input]
    ) -> Iterator[tuple[int, Tensor]]:
        """Yields each sample's index and logits, while the network has its changes."""
        with ExitStack() as stack:
            for name, value in network:
                edit = self.table[name].network
                if edit is not None:
                    stack.enter_context(edit(self._model, value))
            yield from self._batches(reads)

    def _batches(self, reads: Mapping[int, Input]) -> Iterator[tuple[int, Tensor]]:
        """Yields each sample's index and logits; small models score several samples at a time."""
        batched: list[int] = []
        if self._model is not None:
            batched = [i for i, read in reads.items() if read.is_plain]
        longest = max((len(reads[i].tokens) for i in batched), default=1)
        size = max(1, MAX_BATCH // (longest * self._vocabulary))
        if size == 1:
            # `logits` leaves out the logits of the prompt, a batch cannot.
            batched = []
        for i, read in reads.items():
            if i not in batched:
                yield i, self.logits(read)
        for start in range(0, len(batched), size):
            chunk = batched[start : start + size]
            logits = self._batch_logits([reads[i] for i in chunk])
            yield from zip(chunk, logits, strict=True)

    def _batch_logits(self, reads: Sequence[Input]) -> Iterator[Tensor]:
        """Yields the samples' logits [T, V] from one batch, divided by the temperature."""
        self.on_tokens(sum(len(read.tokens) for read in reads))
        # Padding after the end needs no mask, as attention is causal.
        tokens = pad_sequence([read.tokens for read in reads], batch_first=True)
        positions = torch.arange(tokens.shape[1]).repeat(len(reads), 1)
        for row, read in zip(positions, reads, strict=True):
            row[: len(read.positions)] = read.positions
        device = self._model.device
        output = self._model(tokens.to(device), position_ids=positions.to(device))
        for read, logits in zip(reads, output.logits.float().cpu(), strict=True):
            end = len(read.tokens) - 1
            yield logits[end - read.response : end] / read.temperature

    def _read(self, i: int, edits: Edits) -> Input:
        """Returns the network's input for a sample; the sample itself if nothing changes."""
        read = self._inputs[i]
        for name, value in edits:
            prompt_edit = self.table[name].prompt
            if prompt_edit is not None:
                read = with_prompt(read, prompt_edit(read.prompt, round(value)))
        # Masks and positions have the length of the changed prompt, so they come second.
        for name, value in edits:
            input_edit = self.table[name].inputs
            if input_edit is not None:
                read = input_edit(read, value, self._inputs[i - i % BLOCK : i])
        return read

    def _reported(self, rows: list[Tensor], edits: Edits) -> list[Tensor]:
        """Returns the log-probs that the engine reports instead of the computed ones."""
        for name, value in edits:
            change = self.table[name].outputs
            if change is not None:
                rows = change(rows, value)
        return rows
