"""Scores samples under each hypothesis, fits its parameter, and measures the mismatch that remains.

With h the log-probs under a hypothesis and r the reference's, the remaining mismatch is Δ + h − r
for the rollout engine and Δ − h + r for training.

The cost of a forward pass sets the size of the search: parameters are fitted on a few of the even
samples, and the best hypotheses are measured on all odd ones. Hypotheses on logits and log-probs
share one forward pass. A hypothesis that explains all ends the search before costlier ones.

Shapes: T response tokens of a sample, B samples.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from slime_tis.analysis.diagnosis.hypotheses import Hypothesis, Input, hypotheses, with_prompt
from slime_tis.analysis.diagnosis.hypotheses.sampler import logit_bias
from slime_tis.analysis.diagnosis.hypotheses.weights import for_model, for_tensors, for_weights
from slime_tis.analysis.diagnosis.rescore import HfScorer, Scorer
from slime_tis.analysis.diagnosis.trained_tokens import MAX_SIZE
from slime_tis.analysis.dumps.table import TokenTable
from slime_tis.errors import quoted_path

MAX_SAMPLES = 64
"""Largest number of samples that are scored."""
BLOCK = 8
"""Number of neighboring samples of the dump that are chosen together."""
MIN_RESPONSE = 64
"""Tokens of a long response that are scored at least."""
SCORED_WORK = 1e12
"""Work of one pass over all samples, parameters × tokens."""
MIN_SCORED = 4096
"""Smallest number of tokens of that pass, for large models."""
MAX_SCORED = 16_384
"""Largest number of tokens of that pass, for small models."""
FITTED_WORK = 6e10
"""Work of one pass over the samples that parameters are fitted on, parameters × tokens."""
MIN_FITTED = 256
"""Smallest number of tokens that parameters are fitted on."""
MIN_FITTED_SAMPLES = 4
"""Smallest number of samples that parameters are fitted on."""
ENGINE_PARAMETERS = 1e8
"""Size that a training engine's model is taken to have."""
MAX_CACHED = 2**29
"""Largest size of the logits that are kept, bytes."""
MAX_BATCH = 2**24
"""Largest number of logits in one batch."""
ROUNDS = 7
"""Refinements of a parameter, each with a step of 0.6 of the last."""
MIN_OF_GRID = 0.4
"""Smallest refined value as a multiple of the grid's smallest: a soft cap below 2 is no setting of
an engine."""
WORTH_FITTING = 0.02
"""Smallest share on the grid for which a parameter is refined."""
MAX_REFINED = 4
"""Largest number of hypotheses with forward passes that are refined."""
MEASURED = 8
"""Number of hypotheses that are measured on the held-out samples."""
WORTH_MEASURING = 0.01
"""Smallest share on the fitted samples for which a hypothesis is measured."""
MIN_CLAMPED = 3
"""Tokens of the same lowest log-prob without which log-probs are not clamped."""
SETTLED = 0.99
"""Share on the held-out samples at which costlier hypotheses are not tried."""

Edit = tuple[str, float]
"""Name and parameter of a hypothesis."""
Edits = tuple[Edit, ...]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A hypothesis with its fitted parameter, on the held-out samples."""

    name: str
    value: float
    remaining: NDArray[Any]
    """[B] Σ|Δ| that remains of each held-out sample."""


class Search:
    """The scorer, the samples and the hypotheses."""

    def __init__(
        self,
        table: TokenTable,
        scorer: Scorer,
        step: int | None,
        engine: str,
        tokenizer: Any = None,
    ) -> None:
        self.scorer = scorer
        self.model = scorer.model if isinstance(scorer, HfScorer) else None
        self.vocabulary = 2**16 if self.model is None else self.model.config.vocab_size
        size = (
            ENGINE_PARAMETERS
            if self.model is None
            else sum(x.numel() for x in self.model.parameters())
        )
        limit = int(min(max(SCORED_WORK / size, MIN_SCORED), MAX_SCORED))
        self.inputs, self.delta, self.second = _samples(table, step, limit)
        self.sign = -1.0 if engine == "training" else 1.0
        self.all = range(len(self.inputs))
        self.held_out = self.all[1::2]
        sizes = _sizes(self.delta) if self.delta else torch.zeros(0)
        self.fitted = _within(max(FITTED_WORK / size, MIN_FITTED), self.inputs, sizes)
        prompt = max((len(each.prompt) for each in self.inputs), default=0)
        layers = 0 if table.experts is None else table.experts.shape[1]
        self.table = hypotheses(self.model, tokenizer, prompt=prompt, layers=layers)
        self._rows: dict[Edits, list[Tensor]] = {}
        self._logits: tuple[Edits, dict[int, Tensor]] = ((), {})
        self.reference = self.rows(()) if self.inputs else []

    def add(self, others: Mapping[str, Any]) -> None:
        """Adds the hypotheses on other checkpoints: tensors of other weights, or other models, by path."""
        if self.model is None:
            return
        own = self.model.state_dict()
        for path, other in others.items():
            is_model = isinstance(other, torch.nn.Module)
            weights = other.state_dict() if isinstance(other, torch.nn.Module) else other
            if all(
                name not in own or own[name].shape == weight.shape
                for name, weight in weights.items()
            ):
                is_adapter = len(weights) < len(dict(self.model.named_parameters()))
                self.table |= for_weights(path, own, weights, is_adapter=is_adapter)
                if not is_adapter and self.fitted:
                    self.table |= for_tensors(path, own, weights, self._gradient())
            elif is_model and other.config.vocab_size == self.model.config.vocab_size:
                self.table |= for_model(path, other)
            else:
                raise ValueError(
                    f"--other-checkpoint {quoted_path(path)} has another architecture and"
                    " vocabulary; give the same model, or its draft model."
                )

    def ranked(self, fixed: Edits = ()) -> list[Measured]:
        """The best hypotheses in addition to the fixed ones, with their fitted parameters; the best comes first."""
        self._add_from_samples(fixed)
        names = [name for name in self.table if name not in dict(fixed)]
        if "exchanged" in dict(fixed):
            names = [
                name for name in names if not self.table[name].cost
            ]  # scoring all samples again takes long
        best: dict[str, tuple[float, Edit]] = {}
        before = float(self.remaining(fixed, [()], self.fitted)[0].sum())
        for cost in sorted({self.table[name].cost for name in names}):
            best |= self._fit(
                fixed, [name for name in names if self.table[name].cost == cost], before
            )
            order = sorted(best.values(), key=lambda each: round(each[0] / max(before, 1e-30), 4))
            if order and order[0][0] < (1 - SETTLED + 0.02) * before:
                measured = self.measure(fixed, [edit for _, edit in order[:MEASURED]])
                if self.share(measured[0]) >= SETTLED:
                    return measured
        helpful = [edit for left, edit in order[:MEASURED] if left < (1 - WORTH_MEASURING) * before]
        return self.measure(fixed, helpful or [order[0][1]])

    def _fit(
        self, fixed: Edits, names: Sequence[str], before: float
    ) -> dict[str, tuple[float, Edit]]:
        """The remaining mismatch of each hypothesis on the fitted samples, with its parameter."""
        best: dict[str, tuple[float, Edit]] = {}

        def try_out(edits: Sequence[Edit]) -> None:
            for edit, left in zip(
                edits, self.remaining(fixed, [(e,) for e in edits], self.fitted), strict=True
            ):
                if edit[0] not in best or float(left.sum()) < best[edit[0]][0]:
                    best[edit[0]] = (float(left.sum()), edit)

        try_out([(name, float(value)) for name in names for value in self.table[name].values])
        worth = sorted(
            (name for name in names if best[name][0] < (1 - WORTH_FITTING) * before),
            key=lambda n: best[n][0],
        )
        steps = {name: _step(self.table[name], best[name][1][1]) for name in worth}
        steps = {name: step for name, step in steps.items() if step}
        if names and self.table[names[0]].cost:
            steps = dict(list(steps.items())[:MAX_REFINED])
        for _ in range(ROUNDS):
            tries = []
            for name, step in steps.items():
                for value in (best[name][1][1] - step, best[name][1][1] + step):
                    low = min(self.table[name].values)
                    if low < 0 or value > MIN_OF_GRID * low:
                        tries.append(
                            (name, float(round(value)) if self.table[name].whole else value)
                        )
            try_out(tries)
            steps = {
                name: max(1, step // 2) if self.table[name].whole else 0.6 * step
                for name, step in steps.items()
            }
        return best

    def fit_again(self, first: Measured, second: Edit) -> Measured:
        """The first hypothesis with its parameter fitted next to the second."""
        start = self.table[first.name]
        step = _step(start, min(start.values, key=lambda value: abs(value - first.value)))
        values = (
            [first.value + step * k / 4 for k in range(-4, 5)]
            if step and not start.whole
            else [first.value]
        )
        lists: list[Edits] = [
            ((first.name, value),) for value in values if value > 0 or min(start.values) <= 0
        ]
        remaining = self.remaining((second,), lists, self.fitted)
        best = min(zip(remaining, lists, strict=True), key=lambda each: float(each[0].sum()))[1]
        return self.measure((second,), best)[0]

    def measure(self, fixed: Edits, edits: Sequence[Edit]) -> list[Measured]:
        """The hypotheses on the held-out samples; the best first, at equal shares in the order of `edits`."""
        remaining = self.remaining(fixed, [(edit,) for edit in edits], self.held_out)
        measured = [
            Measured(name=name, value=value, remaining=left.double().numpy())
            for (name, value), left in zip(edits, remaining, strict=True)
        ]
        return sorted(
            measured, key=lambda each: (-round(self.share(each), 4), each.name == "logit bias")
        )

    def share(self, measured: Measured) -> float:
        """The share of Σ|Δ| of the held-out samples that disappears."""
        return float(1 - measured.remaining.sum() / max(self.before.sum(), 1e-30))

    @property
    def before(self) -> NDArray[Any]:
        """[B] Σ|Δ| of the held-out samples."""
        return _sizes([self.delta[i] for i in self.held_out]).double().numpy()

    def remaining(
        self, fixed: Edits, candidates: Sequence[Edits], samples: Sequence[int]
    ) -> list[Tensor]:
        """[B] Σ|Δ| of each sample that remains under the fixed hypotheses and each candidate; `()` is none."""
        result = []
        for rows in self.score([(*fixed, *candidate) for candidate in candidates], samples):
            changes = [
                (self.delta[i], row, self.reference[i])
                for i, row in zip(samples, rows, strict=True)
            ]
            left = [
                delta + self.sign * (row - base).nan_to_num(torch.inf)
                for delta, row, base in changes
            ]
            result.append(
                _sizes(left)
            )  # NaN marks tokens that do not count, never a hypothesis without a number
        return result

    @torch.inference_mode()
    def rows(self, edits: Edits) -> list[Tensor]:
        """Log-probs [T] of all samples under some hypotheses."""
        if edits not in self._rows:
            self._rows[edits] = self._pass(self._costly(edits), [edits], self.all)[0]
        return self._rows[edits]

    @torch.inference_mode()
    def score(self, lists: Sequence[Edits], samples: Sequence[int]) -> list[list[Tensor]]:
        """Log-probs [T] of samples under each list of hypotheses; lists with the same network share a pass."""
        order = {name: i for i, name in enumerate(self.table)}
        ordered = [tuple(sorted(edits, key=lambda edit: order[edit[0]])) for edits in lists]
        result: dict[Edits, list[Tensor]] = {}
        groups: dict[Edits, dict[Edits, None]] = {}
        for edits in ordered:
            if "exchanged" in dict(edits):  # needs other samples
                rows = self.rows(tuple(edit for edit in edits if edit[0] != "exchanged"))
                rows = self._reported(rows, [edit for edit in edits if edit[0] == "exchanged"])
                result[edits] = [rows[i] for i in samples]
            else:
                groups.setdefault(self._costly(edits), {})[edits] = None
        for network, group in groups.items():
            result |= dict(zip(group, self._pass(network, list(group), samples), strict=True))
        return [result[edits] for edits in ordered]

    def _costly(self, edits: Edits) -> Edits:
        """The hypotheses with a forward pass."""
        return tuple(edit for edit in edits if self.table[edit[0]].cost)

    def _pass(
        self, network: Edits, lists: Sequence[Edits], samples: Sequence[int]
    ) -> list[list[Tensor]]:
        """A forward pass of samples under `network`, and the log-probs under each list of hypotheses."""
        rows = [
            {i: torch.empty(self.inputs[i].response) for i in samples} for _ in lists
        ]  # no holes between logits
        logits_bytes = 4 * self.vocabulary * sum(self.inputs[i].response for i in samples)
        keeps = samples is self.fitted and len(lists) > 1 and logits_bytes <= MAX_CACHED
        if keeps and self._logits[0] != network:
            self._logits = (network, {})
        cached = dict(self._logits[1]) if keeps else {}
        edits = [self.table[name] for name, _ in network]
        may_skip = () in self._rows and not any(edit.network for edit in edits)
        may_skip &= not any(self.table[name].logits for edits in lists for name, _ in edits)
        with ExitStack() as stack:
            for edit, (_, value) in zip(edits, network, strict=True):
                if edit.network is not None:
                    stack.enter_context(edit.network(self.model, value))
            reads = {i: self._read(i, network) for i in samples if i not in cached}
            known = {i for i, read in reads.items() if may_skip and read is self.inputs[i]}
            for i in known:
                for row in rows:
                    row[i] = self._rows[()][i]
            new = self._batches({i: read for i, read in reads.items() if i not in known})
            for i, logits in chain(cached.items(), new):
                if keeps:
                    self._logits[1][i] = logits
                for row, each in zip(rows, lists, strict=True):
                    row[i].copy_(self._log_probs(logits, self.inputs[i], each))
        return [
            self._reported([row[i] for i in samples], each)
            for row, each in zip(rows, lists, strict=True)
        ]

    def _batches(self, reads: Mapping[int, Input]) -> Iterator[tuple[int, Tensor]]:
        """Logits of each sample; small models score several samples at a time."""
        model = self.model
        single = [i for i, read in reads.items() if model is None or not read.is_plain]
        plain = [i for i in reads if i not in single]
        longest = max((len(reads[i].tokens) for i in plain), default=1)
        size = max(1, MAX_BATCH // (longest * self.vocabulary))
        for i in [*single, *(plain if size == 1 else [])]:
            yield i, self.logits(reads[i])
        if model is None or size == 1:
            return
        for start in range(0, len(plain), size):
            chunk = [reads[i] for i in plain[start : start + size]]
            tokens = pad_sequence(
                [read.tokens for read in chunk], batch_first=True
            )  # after the end, so no mask
            positions = torch.arange(tokens.shape[1]).repeat(len(chunk), 1)
            for row, read in zip(positions, chunk, strict=True):
                row[: len(read.positions)] = read.positions
            device = model.device
            logits = (
                model(tokens.to(device), position_ids=positions.to(device)).logits.float().cpu()
            )
            for i, read, row in zip(plain[start:], chunk, logits, strict=False):
                end = len(read.tokens) - 1
                yield i, row[end - read.response : end] / read.temperature

    def _read(self, i: int, edits: Edits) -> Input:
        """What the network reads of a sample."""
        read = self.inputs[i]
        for name, value in edits:
            if (prompt := self.table[name].prompt) is not None:
                read = with_prompt(read, prompt(read.prompt, round(value)))
        for name, value in edits:  # masks and positions have the length of the changed prompt
            if (change := self.table[name].inputs) is not None:
                read = change(read, value, self.inputs[i - 1])
        return read

    def logits(self, read: Input) -> Tensor:
        """[T, V] logits, divided by the temperature."""
        inputs: dict[str, Any] = {}
        if self.model is None:
            return self.scorer(read.tokens, read.response) / read.temperature
        device, tokens, start = self.model.device, read.tokens, 0
        if read.mask is not None:
            mask = torch.where(read.mask, 0.0, torch.finfo(torch.float32).min)[None, None]
            inputs["attention_mask"] = mask.to(device, next(self.model.parameters()).dtype)
        if read.cache is not None:
            inputs |= {"past_key_values": read.cache(), "use_cache": True}
        if read.prompt_network is not None and len(read.prompt) > 1:
            start = len(read.prompt) - 1
            with read.prompt_network(self.model, 1.0):
                cache = self.model(tokens[None, :start].to(device), use_cache=True).past_key_values
            inputs |= {"past_key_values": cache, "use_cache": True}
        inputs["position_ids"] = read.positions[None, start:].to(device)
        with ExitStack() as stack:
            if read.network is not None:
                stack.enter_context(read.network(self.model, 1.0))
            return self.scorer(tokens[start:], read.response, **inputs) / read.temperature

    def _log_probs(self, logits: Tensor, sample: Input, edits: Edits) -> Tensor:
        for name, value in edits:
            if (change := self.table[name].logits) is not None:
                logits = change(logits, sample, value)
        response = sample.tokens[len(sample.tokens) - sample.response :, None]
        return logits.log_softmax(-1).gather(1, response)[:, 0]

    def _reported(self, rows: list[Tensor], edits: Sequence[Edit]) -> list[Tensor]:
        for name, value in edits:
            if (change := self.table[name].outputs) is not None:
                rows = change(rows, value)
        return rows

    def change(self, i: int) -> Tensor:
        """[T] log-probs of the wrong engine minus the reference's, 0 where Δ does not count."""
        return (-self.sign * self.delta[i]).nan_to_num(0.0, MAX_SIZE, -MAX_SIZE)

    @torch.inference_mode()
    def _add_from_samples(self, fixed: Edits) -> None:
        """Adds the hypotheses whose parameters the samples give: biases of single tokens, and a lowest log-prob."""
        if fixed or not self.fitted:
            return
        logits = torch.cat([self.logits(self.inputs[i]) for i in self.fitted])
        target = torch.cat([self.inputs[i].tokens[-self.inputs[i].response :] for i in self.fitted])
        change = torch.cat([self.change(i) for i in self.fitted])
        counts = torch.cat([self.delta[i] for i in self.fitted]).isfinite()
        found = logit_bias(logits[counts], target[counts], change[counts])
        if found is not None:
            self.table = {"logit bias": found, **self.table}
        reported = torch.cat([self.reference[i] + self.change(i) for i in self.fitted])[counts]
        lowest = reported.min() if len(reported) else torch.tensor(0.0)
        if "clamped" in self.table and (reported < lowest + 1e-4).sum() >= MIN_CLAMPED:
            self.table["clamped"] = replace(self.table["clamped"], values=(float(lowest),))
        else:  # it would absorb a part of every large mismatch
            self.table.pop("clamped", None)

    def _gradient(self) -> dict[str, Tensor]:
        """The gradient of Σ_t change_t · log π_t on the fitted samples."""
        assert self.model is not None
        self.model.zero_grad()
        with torch.enable_grad():
            for i in self.fitted:
                sample = self.inputs[i]
                logits = self.model(sample.tokens[None].to(self.model.device)).logits[
                    0, -sample.response - 1 : -1
                ]
                log_probs = self._log_probs(logits.float().cpu() / sample.temperature, sample, ())
                (log_probs * self.change(i)).sum().backward()
        gradient = {n: x.grad for n, x in self.model.named_parameters() if x.grad is not None}
        self.model.zero_grad()
        return gradient


def _samples(
    table: TokenTable, step: int | None, limit: int
) -> tuple[list[Input], list[Tensor], list[Tensor]]:
    """Inputs, Δ of their tokens (NaN where it does not count), and the difference of the two scorings by training.

    The samples are evenly spaced blocks of neighbors. Long responses are cut, so that 16 samples
    have `limit` tokens.
    """
    assert table.token is not None and table.prompt is not None
    fits = (table.response_length > 1) & np.array(
        [0 < len(prompt) <= limit // 2 for prompt in table.prompt], bool
    )
    if step is not None and table.step is not None:
        fits &= table.step == step
    chosen = np.flatnonzero(fits)
    if len(chosen) > MAX_SAMPLES:
        starts = np.linspace(0, len(chosen) - BLOCK, MAX_SAMPLES // BLOCK).astype(int)
        chosen = chosen[np.unique((starts[:, None] + np.arange(BLOCK)).ravel())]
    second = (
        table.train_log_prob if table.policy_log_prob is table.old_log_prob else table.old_log_prob
    )
    if table.metadata.get("old_policy") in ("rollout", "interpolated"):  # not a scoring by training
        second = table.policy_log_prob
    inputs, deltas, differences = [], [], []
    for i in chosen.tolist():
        length = min(
            int(table.response_length[i]), max(limit // 16 - len(table.prompt[i]), MIN_RESPONSE)
        )
        rows = slice(int(table.offsets[i]), int(table.offsets[i]) + length)
        tokens = torch.from_numpy(
            np.concatenate([table.prompt[i], table.token[rows]]).astype(np.int64)
        )
        limit -= len(tokens)
        if limit < 0:
            break
        inputs.append(
            Input(
                tokens=tokens,
                response=length,
                positions=torch.arange(len(tokens)),
                temperature=float(table.metadata.get("temperature") or 1.0),
                experts=None if table.experts is None else torch.from_numpy(table.experts[rows]),
            )
        )
        deltas.append(
            torch.from_numpy(np.where(table.valid[rows], table.log_ratio[rows], np.nan)).float()
        )
        differences.append(torch.from_numpy(second[rows] - table.policy_log_prob[rows]).float())
    return inputs, deltas, differences


def _within(budget: float, inputs: Sequence[Input], sizes: Tensor) -> list[int]:
    """Even samples of a number of tokens: the largest mismatches and all others, in turns."""
    even = list(range(0, len(inputs), 2))
    largest = sorted(even, key=lambda i: -float(sizes[i]))
    chosen: list[int] = []
    for i in dict.fromkeys(each for pair in zip(largest, even, strict=True) for each in pair):
        budget -= len(inputs[i].tokens)
        if budget < 0 and len(chosen) >= MIN_FITTED_SAMPLES:
            break
        chosen.append(i)
    return sorted(chosen)


def _sizes(rows: Sequence[Tensor]) -> Tensor:
    """[B] Σ min(|Δ|, 10) over the tokens that count."""
    return torch.stack(
        [row.nan_to_num(0.0, MAX_SIZE, -MAX_SIZE).abs().clamp(max=MAX_SIZE).sum() for row in rows]
    )


def _step(hypothesis: Hypothesis, value: float) -> float:
    """Half the distance to the nearest value of the grid; 0 where the parameter is not refined.

    Of an integer half the larger distance to its two neighbors, so that no value between them is
    skipped.
    """
    if len(hypothesis.values) < 3:
        return 0.0
    if not hypothesis.whole:
        return 0.5 * min(abs(other - value) for other in hypothesis.values if other != value)
    below = [value - other for other in hypothesis.values if other < value]
    above = [other - value for other in hypothesis.values if other > value]
    return float(int(0.5 * max(min(below, default=0.0), min(above, default=0.0))))
