"""Proves the cause of a mismatch: scores samples again under each hypothesis.

`rescore` finds the wrong engine. Each hypothesis changes the reference scorer. Its parameter is
fitted on some samples, and the share of Σ|Δ| that disappears is measured on the others.
"""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slime_tis.analysis.diagnosis.engine_rules import MIN_SIGN_SHARE
from slime_tis.analysis.diagnosis.hypothesis_scorer import Edit
from slime_tis.analysis.diagnosis.rescore import (
    NEGLIGIBLE_ERROR,
    HfScorer,
    Rescored,
    Scorer,
    rescore,
)
from slime_tis.analysis.diagnosis.search import TINY, Measured, Search
from slime_tis.analysis.diagnosis.trained_tokens import MAX_SIZE
from slime_tis.analysis.dumps.table import SampleParts, TokenTable
from slime_tis.progress import Progress

MIN_SAMPLES = 8
"""Smallest number of samples for a search."""
MIN_HELD_OUT = 8
"""Smallest number of held-out samples for a proof."""
PROVEN = 0.9
"""Smallest share of the mismatch that disappears under a proven cause."""
LARGEST_REST = 0.1
"""Largest mean |Δ| that a proven cause leaves, nats: the noise of 8 bits is smaller.

Beside a mismatch of several nats, for example of random weights, a wrong hypothesis may remove 90 %
and leave more."""
PARTIAL = 0.3
"""Smallest share of the mismatch that disappears under a cause that is named at all."""
BETTER = 0.05
"""Smallest share that a second hypothesis must add."""
RESAMPLES = 1000
"""Draws of the bootstrap over samples."""
MIN_NOISE_SHARE = 0.05
"""Smallest share of the mismatch that a precision repeats."""
NOISE_SAMPLES = 8
"""About this many held-out samples show the size of a precision's noise."""
NOISE_RANGE = (0.6, 1.7)
"""Range of a precision's noise, as a multiple of the mismatch."""
PRECISION_HYPOTHESES = {
    "bf16": ("bf16", "bf16 weights", "reported in bf16"),
    "fp16": ("fp16",),
    "fp8": (
        "fp8 weights",
        "fp8 weights and activations",
        "fp8 weights in blocks",
        "fp8 weights per tensor",
        "fp8 KV cache",
    ),
    "int8": ("int8 weights",),
    "int4": ("int4 weights",),
}
"""Hypotheses that a precision in the metadata of a dump may mean."""
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
    """The result of scoring again."""

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
    """Whether one cause explains nearly all of the mismatch, on enough samples, and no other cause
    does."""
    is_noise: bool = False
    """Whether the cause is noise of the mismatch's size, which scoring again repeats only in
    part."""
    explanations: tuple[Explanation, ...] = ()
    """The causes, then the best other hypotheses."""
    rivals: tuple[str, ...] = ()
    """Hypotheses that these samples do not distinguish from the last cause."""
    tested: Mapping[str, float] = field(default_factory=dict)
    """For each cause that a hypothesis describes, the largest share of the mismatch that one of its
    hypotheses removes on the samples of the fit."""
    samples: int = 0
    """Number of samples that were scored."""
    hypotheses: int = 0
    """Number of hypotheses that were tried."""


def explain_disagreement(
    scorer: Any,
    samples: TokenTable | Sequence[SampleParts],
    *,
    temperature: float = 1.0,
    others: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    with_progress: bool = False,
) -> tuple[Rescored, Proof]:
    """Finds the wrong engine and searches for the fault that explains its mismatch.

    Args:
        scorer: A causal language model of transformers, or a function (token ids [S] of prompt and
            response, response length T) → logits [T, V] of a training engine, before the
            temperature. A function limits the search to faults of the prompt, the logits and the
            reported log-probs.
        samples: At least 16, each with prompt, token, train_log_prob and rollout_log_prob. A second
            scoring of the same weights by training may be in old_log_prob.
        temperature: Temperature of both engines' log-probs, if samples is no table.
        others: Tensors of other weights that the rollout engine may have, or other models. The
            keys name them in the answer.
        tokenizer: A tokenizer of transformers, for faults of the chat template.
        with_progress: Whether to print the size of the search, and to show the progress.

    Returns:
        The errors of both engines, and the proof; `Proof.sentence` is the answer in words.

    Raises:
        ValueError: The samples lack tokens or prompts, or the weights have other shapes.
    """
    table = samples
    if not isinstance(table, TokenTable):
        table = TokenTable.from_parts(table, {"temperature": temperature})
    score: Scorer = scorer
    if isinstance(scorer, torch.nn.Module):
        score = HfScorer(scorer)
    rescored = rescore(table, score, with_progress=with_progress)
    search = Search(table, score, rescored.step, rescored.engine, tokenizer)
    search.add(others or {})
    precisions = (
        table.metadata.get("precision") or "",
        table.metadata.get("rollout_precision") or "",
    )
    case = _Case(rescored, search, precisions, _mismatch_elsewhere(table, rescored.step))
    if not with_progress or not search.fitted:
        return rescored, case.proof()
    with _progress(search):
        return rescored, case.proof()


def _mismatch_elsewhere(table: TokenTable, fitted_step: int | None) -> str:
    """Returns a message about a larger mismatch in a step that the checkpoint does not fit.

    It is empty if the step with the largest mismatch is the one that fits, or is unknown.
    """
    if table.step is None or fitted_step is None:
        return ""
    size = np.bincount(table.sample, np.abs(table.log_ratio), len(table))
    count = np.bincount(table.sample, table.valid, len(table))
    means = {}
    for step in np.unique(table.step).tolist():
        of_step = table.step == step
        means[step] = size[of_step].sum() / max(count[of_step].sum(), 1)
    largest = max(means, key=lambda step: means[step])
    if largest == fitted_step or means[largest] < NEGLIGIBLE_ERROR:
        return ""
    return (
        f"No cause is searched for: the checkpoint has the weights of step {fitted_step}, in which"
        f" both engines agree. The mismatch is in other steps: mean abs(Δ) is {means[largest]:.2g}"
        f" nats in step {largest}. Name the policy's weights of such a step (--save-hf, of a run"
        " that ends before it) with --other-checkpoint."
    )


@contextmanager
def _progress(search: Search) -> Iterator[None]:
    """Prints the size of a search to stderr, and shows the progress."""
    sample = search.inputs[search.fitted[0]]
    # The time of one pass, for the estimate that is printed.
    start = time.perf_counter()
    with torch.inference_mode():
        search.scorer.logits(sample)
    seconds = (time.perf_counter() - start) / len(sample.tokens)
    work = search.largest_work()
    print(
        f"Scoring {len(search.inputs)} samples again under {len(search.table)} hypotheses: at most"
        f" {work:,} tokens, about {seconds * work:.0f} seconds; a clear cause ends"
        " the search earlier.",
        file=sys.stderr,
        flush=True,
    )
    with Progress("scoring again", work, unit="tokens") as progress:
        search.scorer.on_tokens = progress.update
        yield


@dataclass(frozen=True)
class _Case:
    """A search, and the answer that follows from it."""

    rescored: Rescored
    search: Search
    precisions: tuple[str, str] = ("", "")
    """Precisions of training and of the rollout engine that the dump names; empty if unknown."""
    elsewhere: str = ""
    """That other steps have a mismatch, in words; empty if they have none."""

    def proof(self) -> Proof:
        """Returns the answer; its sentence has the reason if a search is impossible or useless."""
        empty = Proof(sentence="", engine=self.rescored.engine, samples=len(self.search.inputs))
        obstacle = self._obstacle()
        if obstacle:
            return replace(empty, sentence=obstacle)
        dropout = self._dropout()
        if dropout:
            return replace(empty, sentence=dropout, causes=("dropout",), is_noise=True)
        return self._search_result(empty)

    def _obstacle(self) -> str:
        """Returns why no cause is searched for; empty if nothing hinders it."""
        search = self.search
        rescored = self.rescored
        if not rescored.engine:
            return self.elsewhere or "No cause is searched for: there is nothing to explain."
        if len(search.inputs) < MIN_SAMPLES or not search.before.sum():
            return "No cause is searched for: too few samples of the step fit."
        delta = torch.cat(search.delta)
        # NaN marks tokens that do not count, such as tool output.
        delta = delta[~delta.isnan()]
        mean = float(delta.abs().clamp(max=MAX_SIZE).mean())
        if mean < OTHER_MODEL * min(rescored.train_error, rescored.rollout_error):
            return "The checkpoint is not the model of these samples: both engines differ from it."
        return ""

    def _search_result(self, empty: Proof) -> Proof:
        """Ranks the hypotheses, and adds a second one if the best explains only a part."""
        search = self.search
        ranked = search.ranked()
        if ranked[0].share < PARTIAL:
            noise = self._named_noise()
            names = {each.name for each in noise}
            ranked = noise + [each for each in ranked if each.name not in names]
        is_noise = self._is_noise_of(ranked[0])
        causes: list[Measured] = []
        if ranked[0].share >= PARTIAL or is_noise:
            causes = ranked[:1]
        others = ranked[len(causes) :]
        # A second cause is tried only if the first may leave a part.
        if causes and self._explanation(causes[0]).interval[0] < PROVEN:
            both, rest = self._with_second(causes[0], others)
            if not is_noise or both[-1].share >= PROVEN > causes[0].share:
                causes = both
                others = rest
                is_noise = False
        explanations = tuple(self._explanation(each) for each in (*causes, *others[:3]))
        proof = replace(
            empty,
            explanations=explanations,
            hypotheses=len(search.table),
            tested=self._tested(),
        )
        if not causes:
            return replace(proof, sentence=self._unexplained(explanations[0]))
        last = explanations[len(causes) - 1]
        rivals = tuple(each.name for each in others if self._is_rival(each, causes[-1]))
        cause_names = [search.table[each.name].cause for each in causes]
        rival_names = [search.table[name].cause for name in rivals]
        is_unique = set(rival_names) <= {cause_names[-1]}
        has_samples = len(search.held_out) >= MIN_HELD_OUT
        left = self._mean_left(causes[-1])
        is_complete = last.interval[0] >= PROVEN and left <= LARGEST_REST
        proof = replace(
            proof,
            causes=tuple(dict.fromkeys(cause_names + rival_names)),
            explained=last.share,
            is_proven=is_complete and has_samples and is_unique,
            is_noise=is_noise,
            rivals=rivals,
        )
        return replace(proof, sentence=self._sentence(proof, explanations[: len(causes)], left))

    def _mean_left(self, cause: Measured) -> float:
        """Returns the mean |Δ| of the held-out samples that a cause leaves, nats."""
        deltas = [self.search.delta[i] for i in self.search.held_out]
        count = sum(int(delta.isfinite().sum()) for delta in deltas)
        return float(cause.remaining.sum()) / max(count, 1)

    def _tested(self) -> dict[str, float]:
        """Returns the largest share that a hypothesis removes, by cause."""
        tested: dict[str, float] = {}
        for name, share in self.search.shares.items():
            cause = self.search.table[name].cause
            tested[cause] = max(share, tested.get(cause, 0.0))
        return tested

    def _with_second(
        self, first: Measured, others: list[Measured]
    ) -> tuple[list[Measured], list[Measured]]:
        """Adds the hypothesis that helps most next to the first, and fits the first again.

        Returns:
            One or two hypotheses. The last one has the share of both.
            The others, best first.
        """
        search = self.search
        both = search.ranked((first.edit,))
        if not both or both[0].share < first.share + BETTER:
            return [first], others
        second = both[0]
        fitted = search.fit_again(first, second.edit)
        (last,) = search.measure((fitted.edit,), [second.edit])
        if last.share < second.share:
            # The fit on few samples made it worse on the held-out samples.
            return [first, second], both[1:]
        return [fitted, last], both[1:]

    def _named_noise(self) -> list[Measured]:
        """Returns the precision that the dump names and whose noise has the size of the mismatch.

        The noise of arithmetic depends on kernels and shapes, so that scoring again may not repeat
        any.
        """
        edits = []
        for name in self._named_precisions():
            edits.append((name, self.search.table[name].values[0]))
        if not edits or not self._has_both_signs():
            return []
        fitting = [edit for edit in edits if self._noise_ratio(edit) >= NOISE_RANGE[0]]
        if not fitting:
            return []
        return self.search.measure((), fitting)[:1]

    def _named_precisions(self) -> list[str]:
        """Returns the hypotheses that the precisions in the dump's metadata may mean."""
        names: list[str] = []
        for precision in dict.fromkeys(self.precisions):
            names += PRECISION_HYPOTHESES.get(precision, ())
        return [name for name in names if name in self.search.table]

    def _has_both_signs(self) -> bool:
        """Whether each sign of Δ has a part of the mismatch, as in noise."""
        delta = torch.cat(self.search.delta).nan_to_num(0.0, MAX_SIZE, -MAX_SIZE)
        positive = float(delta.clamp_min(0).sum() / delta.abs().sum().clamp_min(TINY))
        return MIN_SIGN_SHARE <= positive <= 1 - MIN_SIGN_SHARE

    def _noise_ratio(self, edit: Edit) -> float:
        """Returns how much a precision changes log-probs, as a multiple of the mismatch.

        It is above 1 if both engines have this precision, because a part of their noise is equal.
        A size needs fewer samples than a share of the mismatch, so a part of the held-out samples
        is scored.
        """
        search = self.search
        step = max(1, len(search.held_out) // NOISE_SAMPLES)
        samples = search.held_out[::step]
        (rows,) = search.scorer.score([(edit,)], samples)
        noise = 0.0
        for i, row in zip(samples, rows, strict=True):
            change = (row - search.reference[i])[search.delta[i].isfinite()]
            noise += float(change.abs().clamp(max=MAX_SIZE).sum())
        before = float(search.before[::step].sum())
        return noise / max(before, TINY)

    def _is_noise_of(self, best: Measured) -> bool:
        """Whether the mismatch is a precision's noise: it has its size, and a part is equal.

        If the dump names the precision, the size is enough.
        """
        hypothesis = self.search.table[best.name]
        if hypothesis.cause != "rounding" or len(hypothesis.values) > 1:
            return False
        low = self._explanation(best).interval[0]
        is_named = best.name in self._named_precisions()
        if low >= PROVEN or (low < MIN_NOISE_SHARE and not is_named):
            return False
        ratio = self._noise_ratio(best.edit)
        return ratio >= NOISE_RANGE[0] and (is_named or ratio <= NOISE_RANGE[1])

    def _dropout(self) -> str:
        """Returns dropout in words; empty if training's two scorings do not show it.

        They show it if the errors of both have the same size and are independent.
        """
        search = self.search
        if self.rescored.engine != "training":
            return ""
        counts = torch.cat(search.delta).isfinite()
        second = torch.cat(search.second).nan_to_num(0.0)[counts]
        error = torch.cat([search.change(i) for i in search.all])[counts]
        other = error + second
        ratio = float(other.abs().sum() / error.abs().sum().clamp_min(TINY))
        correlation = float(torch.corrcoef(torch.stack([error, other]))[0, 1])
        size = float(second.abs().mean())
        have_equal_sizes = SECOND_RANGE[0] <= ratio <= SECOND_RANGE[1]
        if size < NEGLIGIBLE_ERROR or not have_equal_sizes:
            return ""
        # "not <=" also refuses the NaN of a scoring without any error.
        if not correlation <= MAX_CORRELATION:
            return ""
        return (
            f"Training's two scorings of the same weights differ by {size:.2g} nats on average, and"
            " the errors of both are unrelated: dropout is on, or kernels give other results each"
            " time."
        )

    def _shares(self, measured: Measured) -> NDArray[np.float64]:
        """Returns the shares [RESAMPLES] of samples that are drawn with replacement.

        The draws are the same for every hypothesis, so that shares can be compared.
        """
        before = self.search.before
        draws = np.random.default_rng(0).integers(0, len(before), (RESAMPLES, len(before)))
        remaining = measured.remaining[draws].sum(1)
        shares: NDArray[np.float64] = 1 - remaining / np.maximum(before[draws].sum(1), TINY)
        return shares

    def _explanation(self, measured: Measured) -> Explanation:
        """Returns a hypothesis with the interval of the share."""
        low, high = np.quantile(self._shares(measured), [0.025, 0.975]).tolist()
        return Explanation(
            name=measured.name, value=measured.value, share=measured.share, interval=(low, high)
        )

    def _is_rival(self, other: Measured, best: Measured) -> bool:
        """Whether the interval of the difference to the best hypothesis includes 0."""
        difference = self._shares(best) - self._shares(other)
        return float(np.quantile(difference, 0.025)) <= 0 and other.share >= PARTIAL

    @property
    def _engine(self) -> str:
        """The wrong engine, at the start of a sentence."""
        if self.rescored.engine == "rollout":
            return "The rollout engine"
        return "Training"

    def _unexplained(self, best: Explanation) -> str:
        """Returns a sentence on the place of a mismatch without a cause."""
        sizes = [delta.nan_to_num(0.0, MAX_SIZE, -MAX_SIZE).abs() for delta in self.search.delta]
        ordered = torch.cat(sizes).sort(descending=True).values
        total = ordered.sum().clamp_min(TINY)
        top = float(ordered[: max(1, len(ordered) // 100)].sum() / total)
        first_halves = sum(size[: len(size) // 2].sum() for size in sizes)
        halves = float(first_halves / total)
        return (
            f"{self._engine} differs from the checkpoint, but none of these"
            f" {len(self.search.table)} hypotheses explains it (the best, {best.name}, removes"
            f" {max(best.share, 0):.0%}). 1 % of the tokens carry {top:.0%} of it, and the first"
            f" halves of the responses {halves:.0%}."
        )

    def _sentence(self, proof: Proof, causes: Sequence[Explanation], left: float) -> str:
        """Returns the causes' claims with their share, and the reason if there is no proof.

        `left` is the mean |Δ| that the causes leave, nats.
        """
        search = self.search
        claims = []
        for cause in causes:
            claims.append(search.table[cause.name].claim.format(value=cause.value))
        last = causes[-1]
        held_out = len(search.held_out)
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
        elif left > LARGEST_REST:
            verdict = (
                f". It is not proven: {left:.2g} nats per token remain, more than rounding leaves."
            )
        tie = ""
        if proof.rivals:
            tie = f" Cannot be told apart: {' or '.join((last.name, *proof.rivals))}."
        return (
            f"{self._engine} {' and '.join(claims)}: with it {last.share:.1%} of the mismatch"
            f" disappears on {held_out} held-out samples (95 % interval {low:.1%} to {high:.1%})"
            f"{verdict}{tie}"
        )
