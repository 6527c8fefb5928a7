"""Proves the cause of a mismatch: scores samples again under each hypothesis and measures what disappears.

The wrong engine is the one that `rescore` finds. Each hypothesis changes the reference scorer, its
parameter is fitted on some samples, and the share of Σ|Δ| that disappears is measured on the
others.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from slime_tis.analysis.diagnosis.hypotheses.weights import read_adapter
from slime_tis.analysis.diagnosis.rescore import (
    NEGLIGIBLE_ERROR,
    HfScorer,
    Rescored,
    Scorer,
    load_model,
    rescore,
)
from slime_tis.analysis.diagnosis.search import Edit, Measured, Search
from slime_tis.analysis.dumps.table import SampleParts, TokenTable

MIN_SAMPLES = 8
"""Smallest number of samples for a search."""
MIN_HELD_OUT = 8
"""Smallest number of held-out samples for a proof."""
PROVEN = 0.9
"""Smallest share of the mismatch that disappears under a proven cause."""
PARTIAL = 0.3
"""Smallest share of the mismatch that disappears under a cause that explains a part."""
BETTER = 0.05
"""Share that a second hypothesis must add."""
RESAMPLES = 1000
MIN_NOISE_SHARE = 0.05
"""Smallest share of the mismatch that a precision repeats."""
NOISE_RANGE = (0.6, 1.7)
"""Range of a precision's noise, as a multiple of the mismatch."""
OTHER_MODEL = 0.3
"""A mean |Δ| below this share of both engines' errors means that both engines have other
weights."""
SECOND_RANGE = (0.5, 2.0)
"""Range of the ratio of the errors of two scorings of the same weights, if they are noise."""
MAX_CORRELATION = 0.5
"""Largest correlation of the errors of two scorings of the same weights, if they are noise."""


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
    causes: tuple[str, ...] = ()
    """Causes of the explanations and their rivals, in `CAUSES`; none if nothing explains the
    mismatch."""
    explained: float = 0.0
    """Share that disappears under all explanations together."""
    is_proven: bool = False
    """Whether one cause explains nearly all of the mismatch, on enough samples and better than the
    others."""
    is_noise: bool = False
    """Whether the cause is a noise of the size of the mismatch, which scoring again repeats in
    part."""
    explanations: tuple[Explanation, ...] = ()
    """The causes, then the best of the others."""
    rivals: tuple[str, ...] = ()
    """Hypotheses that these samples do not tell from the last cause."""
    samples: int = 0
    hypotheses: int = 0
    """Number of hypotheses that were tried."""


def prove(
    table: TokenTable, hf_checkpoint: str, others: Sequence[str] = ()
) -> tuple[Rescored, Proof]:
    """Searches for the fault that explains the mismatch of a dump.

    Args:
        table: With token ids, prompts and the log-probs of both engines.
        hf_checkpoint: The model that training had when it scored the samples.
        others: Other checkpoints of the run, adapters, or a draft model, which the rollout engine
            may have.

    Raises:
        ValueError: The dump cannot be scored, or a path is not a model directory.
    """
    from transformers import AutoTokenizer

    model = load_model(hf_checkpoint)
    own = model.state_dict()
    loaded = {
        path: (
            read_adapter(path, own)
            if os.path.exists(os.path.join(path, "adapter_config.json"))
            else load_model(path)
        )
        for path in others
    }
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            hf_checkpoint, local_files_only=True, trust_remote_code=False
        )
    except Exception:  # the hypotheses on templates need it, the others do not
        tokenizer = None
    return explain_disagreement(model, table, others=loaded, tokenizer=tokenizer)


def explain_disagreement(
    scorer: Any,
    samples: TokenTable | Sequence[SampleParts],
    *,
    temperature: float = 1.0,
    others: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
) -> tuple[Rescored, Proof]:
    """Says which engine is wrong and searches for the fault that explains it.

    Args:
        scorer: A causal language model of transformers, or a function (token ids [S] of prompt and
            response, response length T) → logits [T, V] of a training engine, before the
            temperature. A function limits the search to faults of the prompt, the logits and the
            reported log-probs.
        samples: At least 16, each with prompt, token, train_log_prob and rollout_log_prob. A second
            scoring of the same weights by training may be in old_log_prob.
        temperature: Of both engines' log-probs, if samples is no table.
        others: Tensors of other weights that the rollout engine may have, or other models, by a
            name for the answer.
        tokenizer: Of transformers, for faults of the chat template.

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
    search = Search(table, score, rescored.step, rescored.engine, tokenizer)
    search.add(others or {})
    return rescored, _Case(rescored, search).proof()


@dataclass(frozen=True)
class _Case:
    """A search, and the answer that follows from it."""

    rescored: Rescored
    search: Search

    def proof(self) -> Proof:
        """Ranks the hypotheses, and adds a second one where the best explains a part only."""
        search = self.search
        empty = Proof(sentence="", engine=self.rescored.engine, samples=len(search.inputs))
        if not self.rescored.engine or len(search.inputs) < MIN_SAMPLES or not search.before.sum():
            reason = (
                "too few samples of the step fit"
                if self.rescored.engine
                else "there is nothing to explain"
            )
            return replace(empty, sentence=f"No cause is searched for: {reason}.")
        mean = float(
            torch.cat(search.delta).nan_to_num(0.0, 10.0, -10.0).abs().clamp(max=10).mean()
        )
        if mean < OTHER_MODEL * min(self.rescored.train_error, self.rescored.rollout_error):
            words = "The checkpoint is not the model of these samples: both engines differ from it."
            return replace(empty, sentence=words)
        if words := self._two_scorings():
            return replace(empty, sentence=words, causes=("dropout",), is_noise=True)
        ranked = search.ranked()
        is_noise = self._is_noise_of(ranked[0])
        causes = ranked[:1] if search.share(ranked[0]) >= PARTIAL or is_noise else []
        others = ranked[len(causes) :]
        if causes and self._explanation(causes[0]).interval[0] < PROVEN:
            both, rest = self._with_second(causes[0], others)
            if not is_noise or search.share(both[-1]) >= PROVEN > search.share(causes[0]):
                causes, others, is_noise = both, rest, False
        rivals = [each.name for each in others if causes and self._is_rival(each, causes[-1])]
        kinds = [search.table[name].cause for name in (*(each.name for each in causes), *rivals)]
        explanations = tuple(self._explanation(each) for each in (*causes, *others[:3]))
        proof = replace(
            empty,
            causes=tuple(dict.fromkeys(kinds)),
            is_noise=is_noise,
            explanations=explanations,
            rivals=tuple(rivals),
            hypotheses=len(search.table),
        )
        if not causes:
            return replace(proof, sentence=self._unexplained(explanations[0]))
        last = explanations[len(causes) - 1]
        agrees = len({*kinds[len(causes) - 1 :]}) == 1
        return replace(
            proof,
            sentence=self._sentence(proof, len(causes)),
            explained=last.share,
            is_proven=last.interval[0] >= PROVEN
            and len(search.held_out) >= MIN_HELD_OUT
            and agrees,
        )

    def _with_second(
        self, first: Measured, others: list[Measured]
    ) -> tuple[list[Measured], list[Measured]]:
        """Adds the hypothesis that helps most next to the first, and fits the first again next to it."""
        search = self.search
        both = search.ranked(((first.name, first.value),))
        if not both or search.share(both[0]) < search.share(first) + BETTER:
            return [first], others
        second: Edit = (both[0].name, both[0].value)
        fitted = search.fit_again(first, second)
        (last,) = search.measure(((fitted.name, fitted.value),), [second])
        if search.share(last) < search.share(both[0]):
            fitted, last = first, both[0]
        return [fitted, last], both[1:]

    def _is_noise_of(self, best: Measured) -> bool:
        """Whether the mismatch has the size of a precision's noise, and a part of it is this very noise.

        The noise of arithmetic depends on kernels and batch shapes, so scoring again repeats a part
        of it only.
        """
        search = self.search
        explanation = self._explanation(best)
        is_settled = explanation.interval[0] < MIN_NOISE_SHARE or explanation.interval[0] >= PROVEN
        hypothesis = search.table[best.name]
        if (
            hypothesis.cause != "rounding" or len(hypothesis.values) > 1 or is_settled
        ):  # a setting is no noise
            return False
        (rows,) = search.score([((best.name, best.value),)], search.held_out)
        noise = [
            float((row - search.reference[i])[search.delta[i].isfinite()].abs().clamp(max=10).sum())
            for i, row in zip(search.held_out, rows, strict=True)
        ]
        return (
            NOISE_RANGE[0] <= sum(noise) / max(float(search.before.sum()), 1e-30) <= NOISE_RANGE[1]
        )

    def _two_scorings(self) -> str:
        """Dropout in words: training scored the same weights twice, and the errors of both are independent."""
        search = self.search
        if self.rescored.engine != "training":
            return ""
        error = torch.cat([search.change(i) for i in search.all])
        other = error + torch.cat(search.second).nan_to_num(0.0)
        ratio = float(other.abs().sum() / error.abs().sum().clamp_min(1e-30))
        correlation = float(torch.corrcoef(torch.stack([error, other]))[0, 1])
        size = float(torch.cat(search.second).nan_to_num(0.0).abs().mean())
        are_alike = SECOND_RANGE[0] <= ratio <= SECOND_RANGE[1] and size >= NEGLIGIBLE_ERROR
        if not (are_alike and correlation <= MAX_CORRELATION):
            return ""
        return (
            f"Training's two scorings of the same weights differ by {size:.2g} nats on average, and"
            " the errors of both are unrelated: dropout is on, or kernels give other results each"
            " time."
        )

    def _shares(self, measured: Measured) -> Any:
        """[RESAMPLES] shares of samples drawn with replacement, the same draws for every hypothesis."""
        before, after = self.search.before, measured.remaining
        draws = np.random.default_rng(0).integers(0, len(before), (RESAMPLES, len(before)))
        return 1 - after[draws].sum(1) / np.maximum(before[draws].sum(1), 1e-30)

    def _explanation(self, measured: Measured) -> Explanation:
        low, high = np.quantile(self._shares(measured), [0.025, 0.975]).tolist()
        share = self.search.share(measured)
        return Explanation(
            name=measured.name, value=measured.value, share=share, interval=(low, high)
        )

    def _is_rival(self, other: Measured, best: Measured) -> bool:
        """Whether the interval of the difference to the best hypothesis includes 0."""
        difference = self._shares(best) - self._shares(other)
        return float(np.quantile(difference, 0.025)) <= 0 and self.search.share(other) >= PARTIAL

    @property
    def _engine(self) -> str:
        return {"rollout": "The rollout engine", "training": "Training"}[self.rescored.engine]

    def _unexplained(self, best: Explanation) -> str:
        """Says where a mismatch without a cause is."""
        size = [x.nan_to_num(0.0, 10.0, -10.0).abs() for x in self.search.delta]
        every = torch.cat(size).sort(descending=True).values
        total = every.sum().clamp_min(1e-30)
        top = float(every[: max(1, len(every) // 100)].sum() / total)
        halves = float(sum(x[: len(x) // 2].sum() for x in size) / total)
        return (
            f"{self._engine} is wrong, but the mismatch is not explained by any of these"
            f" {len(self.search.table)} hypotheses (the best, {best.name}, removes"
            f" {max(best.share, 0):.0%}). 1 % of the tokens carry {top:.0%} of it, and the first"
            f" halves of the responses {halves:.0%}."
        )

    def _sentence(self, proof: Proof, causes: int) -> str:
        search, explained = self.search, proof.explanations[:causes]
        claims = " and ".join(
            search.table[each.name].claim.format(value=each.value) for each in explained
        )
        last, held_out = explained[-1], len(search.held_out)
        low, high = last.interval
        verdict = "."
        if proof.is_noise:
            verdict = ", and the noise of this precision has the size of the mismatch."
        elif last.share < PROVEN:
            verdict = ", so it explains a part only."
        elif held_out < MIN_HELD_OUT:
            verdict = f". A proof needs {MIN_HELD_OUT} held-out samples."
        elif low < PROVEN:
            verdict = f". A proof needs more samples: the interval goes below {PROVEN:.0%}."
        tie = (
            f" Cannot be told apart: {' or '.join((last.name, *proof.rivals))}."
            if proof.rivals
            else ""
        )
        return (
            f"{self._engine} {claims}: with it {last.share:.1%} of the mismatch disappears on"
            f" {held_out} held-out samples (95 % interval {low:.1%} to {high:.1%}){verdict}{tie}"
        )
