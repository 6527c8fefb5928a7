"""Proves the cause of a mismatch: scores samples again under each hypothesis and measures what disappears.

The deviating engine is the one that `rescore` finds. Each hypothesis changes the reference scorer, its parameter is
fitted on half of the samples, and the share of Σ|Δ| that disappears is measured on the other half. With h the log-probs
under the hypothesis and r the reference's, the remaining mismatch is Δ + h − r for the rollout engine, Δ − h + r for
training.

Shapes: T response tokens of a sample, B samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime_tis.analysis.diagnosis.hypotheses import Hypothesis, Input, hypotheses, other_weights, with_prompt
from slime_tis.analysis.diagnosis.rescore import HfScorer, Rescored, Scorer, load_model, rescore
from slime_tis.analysis.dumps.table import SampleParts, TokenTable
from slime_tis.errors import quoted_path

MAX_SAMPLES, MAX_TOKENS = 64, 16_384
"""Samples, and tokens of prompts and responses, that are scored."""
MIN_SAMPLES = 8
PROVEN, PARTIAL = 0.9, 0.3
"""Smallest share of the mismatch that disappears under a proven cause, and under one that explains a part."""
WORTH_FITTING = 0.02
"""Smallest share on the grid for which a parameter is refined."""
ROUNDS = 7
"""Refinements of a parameter, each with a step of 0.6 of the last."""
LARGEST = 10.0
"""|Δ| of a token counts up to this many nats, as in the diagnosis."""
RESAMPLES = 1000
MIN_NOISE_SHARE, NOISE_RANGE = 0.05, (0.6, 1.7)
"""Smallest share of the mismatch that a precision repeats, and its noise as a multiple of the mismatch."""
OTHER_MODEL = 0.3
"""A mean |Δ| below this share of both engines' errors means that both engines have other weights."""

Edit = tuple[str, float]
"""Name and parameter of a hypothesis."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A hypothesis with its fitted parameter, on the held-out samples."""

    name: str
    value: float
    share: float
    """Share of Σ|Δ| that disappears, at most 1; negative if the hypothesis adds mismatch."""
    interval: tuple[float, float]
    """95 % interval of the share: bootstrap over samples."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What scoring again has shown."""

    sentence: str
    """The result in words."""
    engine: str
    """rollout or training; empty if both engines agree with the reference."""
    causes: tuple[str, ...]
    """Causes of the explanations, in `CAUSES`; none if nothing explains the mismatch."""
    explained: float
    """Share that disappears under all causes together."""
    explanations: tuple[Explanation, ...]
    """The causes, then the best of the others."""
    samples: int
    hypotheses: int
    is_noise: bool = False
    """Whether the cause is a precision whose noise has the size of the mismatch, and which repeats a part of it."""

    @property
    def is_proven(self) -> bool:
        """Whether the causes explain nearly all of the mismatch."""
        return self.explained >= PROVEN

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "is_proven": self.is_proven}


def prove(table: TokenTable, hf_checkpoint: str, others: Sequence[str] = ()) -> tuple[Rescored, Proof]:
    """Searches for the fault that explains the mismatch of a dump.

    Args:
        table: With token ids, prompts and the log-probs of both engines.
        hf_checkpoint: The model that training had when it scored the samples.
        others: Other checkpoints of the run, whose weights the rollout engine may have.

    Raises:
        ValueError: The dump cannot be scored, or a path is not a model directory.
    """
    weights = {path: load_model(path).state_dict() for path in others}
    return explain_disagreement(load_model(hf_checkpoint), table, others=weights)


def explain_disagreement(
    scorer: Any,
    samples: TokenTable | Sequence[SampleParts],
    *,
    temperature: float = 1.0,
    others: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> tuple[Rescored, Proof]:
    """Says which engine is wrong and searches for the fault that explains it.

    Args:
        scorer: A causal language model of transformers, or a function (token ids [S] of prompt and response, response
            length T) → logits [T, V] of a training engine, before the temperature. A function limits the search to
            faults of the prompt, the logits and the reported log-probs.
        samples: At least 16, each with prompt, token, train_log_prob and rollout_log_prob. A second scoring of the same
            weights by training may be in old_log_prob.
        temperature: Of both engines' log-probs, if samples is no table.
        others: Tensors of other weights that the rollout engine may have, by a name for the answer.

    Returns:
        The errors of both engines, and the proof; `Proof.sentence` is the answer in words.

    Raises:
        ValueError: The samples lack tokens or prompts, or the weights have other shapes.
    """
    table = samples
    if not isinstance(table, TokenTable):
        table = TokenTable.from_parts(table, {"temperature": temperature})
    score: Scorer = HfScorer(scorer) if isinstance(scorer, torch.nn.Module) else scorer
    rescored = rescore(table, score)
    return rescored, Search(table, score, rescored, others or {}).proof()


class Search:
    """The scorer, the samples and the hypotheses."""

    def __init__(
        self, table: TokenTable, scorer: Scorer, rescored: Rescored, others: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        self.scorer, self.rescored = scorer, rescored
        self.model = scorer.model if isinstance(scorer, HfScorer) else None
        self.temperature = float(table.metadata.get("temperature") or 1.0)
        self.table = hypotheses(getattr(self.model, "config", None))
        if self.model is None:
            self.table = {name: each for name, each in self.table.items() if not each.needs_model}
        own = {} if self.model is None else self.model.state_dict()
        for path, weights in others.items():
            if any(name in own and own[name].shape != weight.shape for name, weight in weights.items()):
                raise ValueError(
                    f"--other-checkpoint {quoted_path(path)} has another architecture; give the same model."
                )
            for part, words in {"weights": ("",), "output layer": ("lm_head", "embed_tokens")}.items():
                edit = other_weights({name: w for name, w in weights.items() if any(word in name for word in words)})
                claim = f"has the {part} of {path}".replace("{", "{{").replace("}", "}}")
                self.table[f"{part} of {path}"] = Hypothesis(claim=claim, cause="weights_not_updated", network=edit)
        self.inputs, self.delta = _samples(table, rescored.step)
        self.sign = -1.0 if rescored.engine == "training" else 1.0
        self.reference = self.score([], [()])[0] if self.inputs else []

    def proof(self) -> Proof:
        """Ranks the hypotheses, and adds a second one where the best explains a part only."""
        if not self.rescored.engine or len(self.inputs) < MIN_SAMPLES:
            reason = "too few samples of the step fit" if self.rescored.engine else "there is nothing to explain"
            return self._proof(f"No cause is searched for: {reason}.", [], [])
        if self._is_another_model():
            return self._proof("The checkpoint is not the model of these samples: both engines differ from it.", [], [])
        first = self.ranked([])
        is_noise = self._is_noise_of(first[0])
        chosen = first[:1] if first[0].share >= PARTIAL or is_noise else []
        found, rest = list(chosen), first[len(chosen) :]
        if chosen and chosen[0].share < PROVEN and not is_noise:
            both = self.ranked([(chosen[0].name, chosen[0].value)])
            if both[0].share > chosen[0].share + 0.1:
                found.append(both[0])
        return replace(self._proof(self._sentence(found, rest, is_noise), found, rest), is_noise=is_noise)

    def _is_noise_of(self, best: Explanation) -> bool:
        """Whether the mismatch has the size of a precision's noise, and a part of it is this very noise.

        The noise of arithmetic depends on kernels and batch shapes, so scoring again repeats a part of it only.
        """
        if self.table[best.name].cause != "rounding" or best.interval[0] < MIN_NOISE_SHARE or best.share >= PROVEN:
            return False
        (rows,) = self.score([], [(best.name, best.value)])
        counted = [delta.isfinite() for delta in self.delta]
        noise = [(row - base)[keep] for row, base, keep in zip(rows, self.reference, counted, strict=True)]
        ratio = float(_sizes(noise).sum() / _sizes(self.delta).sum().clamp_min(1e-30))
        return NOISE_RANGE[0] <= ratio <= NOISE_RANGE[1]

    def _is_another_model(self) -> bool:
        tokens = torch.cat(self.delta).isfinite().sum()
        mean = float(_sizes(self.delta).sum() / tokens.clamp_min(1))
        return mean < OTHER_MODEL * min(self.rescored.train_error, self.rescored.rollout_error)

    def _proof(self, sentence: str, found: Sequence[Explanation], rest: Sequence[Explanation]) -> Proof:
        return Proof(
            sentence=sentence,
            engine=self.rescored.engine,
            causes=tuple(dict.fromkeys(self.table[each.name].cause for each in found)),
            explained=found[-1].share if found else 0.0,
            explanations=(*found, *rest[:3]),
            samples=len(self.inputs),
            hypotheses=len(self.table),
        )

    def _sentence(self, found: Sequence[Explanation], rest: Sequence[Explanation], is_noise: bool) -> str:
        engine = {"rollout": "The rollout engine", "training": "Training"}[self.rescored.engine]
        if not found:
            best = f"the best, {rest[0].name}, removes {max(rest[0].share, 0):.0%}"
            return f"{engine} is wrong, but none of {len(self.table)} hypotheses explains the mismatch ({best})."
        claims = " and ".join(self.table[each.name].claim.format(value=each.value) for each in found)
        last, held_out = found[-1], len(self.inputs) // 2
        low, high = last.interval
        verdict = "" if last.share >= PROVEN else ", so it is a part of the cause"
        if is_noise:
            verdict = ", and the noise of this precision has the size of the mismatch"
        ties = [each.name for each in rest if each.share > last.interval[0] and last.share >= PROVEN]
        tie = f" These data do not tell it from: {', '.join(ties)}." if ties else ""
        return (
            f"{engine} {claims}: with it {last.share:.1%} of the mismatch disappears on {held_out} held-out samples "
            f"(95 % interval {low:.1%} to {high:.1%}){verdict}.{tie}"
        )

    def ranked(self, fixed: Sequence[Edit]) -> list[Explanation]:
        """Every hypothesis beside the fixed ones, with its fitted parameter; the largest held-out share first."""
        names = [name for name in self.table if name not in dict(fixed)]
        grid = [(name, value) for name in names for value in self.table[name].values]
        residual = dict(zip(grid, self.residuals(fixed, grid), strict=True))
        best = {
            name: min((edit for edit in grid if edit[0] == name), key=lambda e: _fit(residual[e])) for name in names
        }
        total = _fit(self.residuals(fixed, [()])[0])
        steps = {name: _step(self.table[name], best[name][1]) for name in names}
        for _ in range(ROUNDS):
            tries = [
                (name, best[name][1] + sign * step)
                for name, step in steps.items()
                if step and _fit(residual[best[name]]) < (1 - WORTH_FITTING) * total
                for sign in (-1, 1)
                if best[name][1] + sign * step > 0 or min(self.table[name].values) < 0
            ]
            for edit, values in zip(tries, self.residuals(fixed, tries), strict=True):
                residual[edit] = values
                if _fit(values) < _fit(residual[best[edit[0]]]):
                    best[edit[0]] = edit
            steps = {name: 0.6 * step for name, step in steps.items()}
        explanations = [self._explanation(edit, residual[edit]) for edit in best.values()]
        return sorted(explanations, key=lambda each: -each.share)

    def _explanation(self, edit: Edit, residual: Tensor) -> Explanation:
        before, after = (np.asarray(x[1::2]) for x in (_sizes(self.delta), residual))
        draws = np.random.default_rng(0).integers(0, len(before), (RESAMPLES, len(before)))
        shares = 1 - after[draws].sum(1) / np.maximum(before[draws].sum(1), 1e-30)
        low, high = np.quantile(shares, [0.025, 0.975]).tolist()
        share = float(1 - after.sum() / max(before.sum(), 1e-30))
        return Explanation(name=edit[0], value=edit[1], share=share, interval=(low, high))

    def residuals(self, fixed: Sequence[Edit], candidates: Sequence[Any]) -> list[Tensor]:
        """[B] Σ|Δ| of each sample that remains under the fixed hypotheses and each candidate; `()` is none."""
        result = []
        for rows in self.score(fixed, candidates):
            changes = zip(self.delta, rows, self.reference, strict=True)
            remaining = [delta + self.sign * (row - base).nan_to_num(torch.inf) for delta, row, base in changes]
            result.append(_sizes(remaining))  # NaN marks tokens that do not count, never a hypothesis without a number
        return result

    @torch.inference_mode()
    def score(self, fixed: Sequence[Edit], candidates: Sequence[Any]) -> list[list[Tensor]]:
        """Log-probs [T] of every sample under the fixed hypotheses and each candidate.

        Candidates that change logits or reported log-probs alone share one forward pass.
        """
        lists = [[*fixed, *([candidate] if candidate else [])] for candidate in candidates]
        heavy = [not candidate or not self.table[candidate[0]].is_cheap for candidate in candidates]
        result: list[list[Tensor]] = [[] for _ in candidates]
        shared = [i for i, is_heavy in enumerate(heavy) if not is_heavy]
        if shared:
            for i, rows in zip(shared, self._pass(fixed, [lists[i] for i in shared]), strict=True):
                result[i] = rows
        for i, is_heavy in enumerate(heavy):
            if is_heavy:
                (result[i],) = self._pass(lists[i], [lists[i]])
        return result

    def _pass(self, network: Sequence[Edit], lists: Sequence[Sequence[Edit]]) -> list[list[Tensor]]:
        """One forward pass of every sample under `network`, and the log-probs under each list of hypotheses."""
        rows: list[list[Tensor]] = [[] for _ in lists]
        with ExitStack() as stack:
            for name, value in network:
                if (edit := self.table[name].network) is not None:
                    stack.enter_context(edit(self.model, value))
            for i, sample in enumerate(self.inputs):
                read = sample
                for name, value in network:
                    if (prompt := self.table[name].prompt) is not None:
                        read = with_prompt(read, prompt(read.tokens[: len(read.tokens) - read.response], round(value)))
                    if (change := self.table[name].inputs) is not None:
                        read = change(read, value, self.inputs[i - 1])
                logits = self._logits(read)
                for row, edits in zip(rows, lists, strict=True):
                    row.append(self._log_probs(logits, sample, edits))
        return [self._reported(row, edits) for row, edits in zip(rows, lists, strict=True)]

    def _logits(self, read: Input) -> Tensor:
        inputs: dict[str, Any] = {}
        if self.model is not None:
            inputs["position_ids"] = read.positions[None].to(self.model.device)
            if read.mask is not None:
                low = torch.finfo(self.model.dtype).min
                mask = torch.where(read.mask, 0.0, low)[None, None]
                inputs["attention_mask"] = mask.to(self.model.device, self.model.dtype)
            if read.cache is not None:
                inputs |= {"past_key_values": read.cache(), "use_cache": True}
        return self.scorer(read.tokens, read.response, **inputs) / self.temperature

    def _log_probs(self, logits: Tensor, sample: Input, edits: Sequence[Edit]) -> Tensor:
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


def _samples(table: TokenTable, step: int | None) -> tuple[list[Input], list[Tensor]]:
    """Samples of a step, evenly spaced, and Δ of their tokens, 0 at tokens that do not count."""
    assert table.token is not None and table.prompt is not None
    fits = (table.response_length > 1) & np.array([len(prompt) > 0 for prompt in table.prompt])
    if step is not None and table.step is not None:
        fits &= table.step == step
    chosen = np.flatnonzero(fits)
    chosen = (
        chosen[np.unique(np.linspace(0, len(chosen) - 1, min(MAX_SAMPLES, len(chosen))).astype(int))]
        if len(chosen)
        else chosen
    )
    inputs, deltas, budget = [], [], MAX_TOKENS
    for i in chosen.tolist():
        rows = slice(int(table.offsets[i]), int(table.offsets[i + 1]))
        tokens = torch.from_numpy(np.concatenate([table.prompt[i], table.token[rows]]).astype(np.int64))
        budget -= len(tokens)
        if budget < 0:
            break
        positions = torch.arange(len(tokens))
        inputs.append(Input(tokens=tokens, response=rows.stop - rows.start, positions=positions))
        deltas.append(torch.from_numpy(np.where(table.valid[rows], table.log_ratio[rows], np.nan)).float())
    return inputs, deltas


def _sizes(rows: Sequence[Tensor]) -> Tensor:
    """[B] Σ min(|Δ|, 10) over the tokens that count."""
    return torch.stack([row.nan_to_num(0.0, LARGEST, -LARGEST).abs().clamp(max=LARGEST).sum() for row in rows])


def _fit(sizes: Tensor) -> float:
    return float(sizes[::2].sum())


def _step(hypothesis: Hypothesis, value: float) -> float:
    """Half the distance to the nearest value of the grid; 0 where the parameter is not refined."""
    if hypothesis.whole or len(hypothesis.values) == 1:
        return 0.0
    return 0.5 * min(abs(other - value) for other in hypothesis.values if other != value)
