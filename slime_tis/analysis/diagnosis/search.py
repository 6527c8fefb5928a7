"""Scores samples under each hypothesis, fits its parameter, and measures the mismatch that remains.

With h the log-probs under a hypothesis and r the reference's, the remaining mismatch is Δ + h − r
for the rollout engine and Δ − h + r for training.

The cost of a forward pass sets the size of the search: parameters are fitted on a few of the even
samples, and the best hypotheses are measured on all odd ones. A hypothesis that explains all of the
mismatch ends the search before costlier ones.

Shapes: T response tokens of a sample, B samples.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from slime_tis.analysis.diagnosis.hypotheses import Hypothesis, hypotheses
from slime_tis.analysis.diagnosis.hypotheses.sampler import logit_bias
from slime_tis.analysis.diagnosis.hypotheses.weights import for_model, for_tensors, for_weights
from slime_tis.analysis.diagnosis.hypothesis_scorer import (
    Edit,
    Edits,
    HypothesisScorer,
)
from slime_tis.analysis.diagnosis.rescore import HfScorer, Scorer
from slime_tis.analysis.diagnosis.search_samples import (
    fitted_samples,
    scored_samples,
    sizes_of,
)
from slime_tis.analysis.diagnosis.trained_tokens import MAX_SIZE
from slime_tis.analysis.dumps.table import TokenTable
from slime_tis.errors import quoted_path

SCORED_WORK = 1e12
"""Work of one pass over all samples, parameters × tokens."""
MIN_SCORED = 4096
"""Smallest number of tokens of that pass, for large models."""
MAX_SCORED = 16_384
"""Largest number of tokens of that pass, for small models."""
FITTED_WORK = 4e10
"""Work of one pass over the samples that parameters are fitted on, parameters × tokens."""
MIN_FITTED = 256
"""Smallest number of tokens that parameters are fitted on."""
ENGINE_PARAMETERS = 1e8
"""Assumed number of parameters of a scorer that is a function."""
ROUNDS = 7
"""Refinements of a parameter."""
STEP_FACTOR = 0.6
"""Each refinement's step as a multiple of the step before."""
MIN_OF_GRID = 0.4
"""Smallest refined value as a multiple of the grid's smallest: no engine has, for example, a soft
cap below 2."""
WORTH_FITTING = 0.02
"""Smallest share on the grid for which a parameter is refined."""
MAX_REFINED = 4
"""Largest number of hypotheses with forward passes that are refined."""
LARGE_MODEL = 5e7
"""Number of parameters from which on fewer hypotheses are refined, in fewer rounds."""
LARGE_ROUNDS = 4
"""Refinements of a parameter with forward passes of a large model."""
LARGE_REFINED = 2
"""Largest number of hypotheses with forward passes of a large model that are refined."""
MEASURED = 8
"""Number of hypotheses that are measured on the held-out samples."""
WORTH_MEASURING = 0.01
"""Smallest share on the fitted samples for which a hypothesis is measured."""
MIN_CLAMPED = 3
"""Smallest number of tokens with the lowest log-prob for which log-probs may be clamped."""
CLAMP_ROUNDING = 1e-4
"""Distance from the lowest log-prob up to which a token counts as clamped, nats."""
SETTLED = 0.99
"""Share on the held-out samples from which on costlier hypotheses are not tried."""
SETTLED_MARGIN = 0.02
"""The share on the fitted samples may be this much lower for a look at the held-out samples."""
TINY = 1e-30
"""Avoids a division by 0 if there is no mismatch, nats."""


@dataclass(frozen=True)
class Fit:
    """The best parameter of a hypothesis so far, on the fitted samples."""

    name: str
    value: float
    remaining: float
    """Σ|Δ| that remains, nats."""

    @property
    def edit(self) -> Edit:
        """Name and parameter."""
        return self.name, self.value


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A hypothesis with its fitted parameter, on the held-out samples."""

    name: str
    value: float
    remaining: NDArray[Any]
    """[B] remaining Σ|Δ| per held-out sample, nats."""
    share: float
    """Share of Σ|Δ| that disappears."""

    @property
    def edit(self) -> Edit:
        """Name and parameter."""
        return self.name, self.value


class Search:
    """The samples, their mismatch and the hypotheses.

    Args:
        table: The dump.
        scorer: The reference.
        step: The step whose weights the reference has; None for all steps.
        engine: The wrong engine, training or rollout.
        tokenizer: Of the reference, for hypotheses on the chat template.
    """

    def __init__(
        self,
        table: TokenTable,
        scorer: Scorer,
        step: int | None,
        engine: str,
        tokenizer: Any = None,
    ) -> None:
        self.model: Any = None
        parameters: float = ENGINE_PARAMETERS
        if isinstance(scorer, HfScorer):
            self.model = scorer.model
            parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.rounds = ROUNDS
        self.max_refined = MAX_REFINED
        if self.model is not None and parameters >= LARGE_MODEL:
            self.rounds = LARGE_ROUNDS
            self.max_refined = LARGE_REFINED
        limit = int(min(max(SCORED_WORK / parameters, MIN_SCORED), MAX_SCORED))
        self.inputs, self.delta, self.second = scored_samples(table, step, limit)
        self.sign = 1.0
        if engine == "training":
            self.sign = -1.0
        self.all = range(len(self.inputs))
        self.held_out = self.all[1::2]
        sizes = sizes_of(self.delta)
        self.before: NDArray[Any] = sizes[1::2].double().numpy()
        """[B] Σ|Δ| of the held-out samples, nats."""
        budget = max(FITTED_WORK / parameters, MIN_FITTED)
        self.fitted = fitted_samples(budget, self.inputs, sizes)
        longest_prompt = max((len(sample.prompt) for sample in self.inputs), default=0)
        layers = 0
        if table.experts is not None:
            layers = table.experts.shape[1]
        self.table = hypotheses(self.model, tokenizer, prompt=longest_prompt, layers=layers)
        self.scorer = HypothesisScorer(scorer, self.inputs, self.fitted, self.table)
        self.reference = self.scorer.rows(())
        self.checkpoint_names: set[str] = set()
        """The hypotheses on other checkpoints."""
        self.shares: dict[str, float] = {}
        """Share of the mismatch that a hypothesis by itself removes on the fitted samples."""

    def add(self, others: Mapping[str, Any]) -> None:
        """Adds the hypotheses on other checkpoints.

        Args:
            others: Tensors of other weights, or other models, by path.

        Raises:
            ValueError: A model has another architecture and another vocabulary.
        """
        if self.model is None:
            return
        general = set(self.table)
        own = self.model.state_dict()
        for path, other in others.items():
            is_model = isinstance(other, torch.nn.Module)
            weights = other
            if is_model:
                weights = other.state_dict()
            if _have_equal_shapes(own, weights):
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
        self.checkpoint_names = self.table.keys() - general

    def largest_work(self) -> int:
        """Returns the tokens of the forward passes of a search that nothing settles early."""
        fitted = self._tokens(self.fitted)
        held_out = self._tokens(self.held_out)
        passes = 0
        stages = set()
        for name, hypothesis in self.table.items():
            if hypothesis.cost:
                stages.add(self._stage(name))
                passes += len(hypothesis.values)
        # A refinement tries a value on either side.
        passes += 2 * self.rounds * self.max_refined * len(stages)
        return passes * fitted + MEASURED * held_out

    def _tokens(self, samples: Sequence[int]) -> int:
        """Returns the number of tokens of some samples, prompts included."""
        return sum(len(self.inputs[i].tokens) for i in samples)

    def ranked(self, fixed: Edits = ()) -> list[Measured]:
        """Fits and measures the hypotheses in addition to the fixed ones.

        Returns:
            The best hypotheses with their fitted parameters, best first.
        """
        if not fixed:
            self._add_from_samples()
        fixed_names = dict(fixed)
        names = [name for name in self.table if name not in fixed_names]
        if "exchanged" in fixed_names:
            # Next to it each candidate with a forward pass would score all samples again.
            names = [name for name in names if not self.table[name].cost]
        best: dict[str, Fit] = {}
        (left,) = self._remaining([fixed], self.fitted)
        before = float(left.sum())
        numbers = {self._stage(name) for name in names}
        for number in sorted(numbers):
            stage = [name for name in names if self._stage(name) == number]
            best |= self._fit(fixed, stage, before)
            if not fixed:
                for fit in best.values():
                    self.shares[fit.name] = 1 - fit.remaining / max(before, TINY)
            order = _best_first(best.values(), before)
            # Only a look at the held-out samples can settle the search, and it costs passes.
            if order[0].remaining < (1 - SETTLED + SETTLED_MARGIN) * before:
                measured = self.measure(fixed, [fit.edit for fit in order[:MEASURED]])
                if measured[0].share >= SETTLED:
                    return measured
        helpful = []
        for fit in order[:MEASURED]:
            if fit.remaining < (1 - WORTH_MEASURING) * before:
                helpful.append(fit.edit)
        return self.measure(fixed, helpful or [order[0].edit])

    def _stage(self, name: str) -> tuple[int, bool]:
        """The place of a hypothesis in the search: by cost.

        Of equal cost, those on other checkpoints come first, because the user suspects them.
        """
        return self.table[name].cost, name not in self.checkpoint_names

    def fit_again(self, first: Measured, second: Edit) -> Measured:
        """Returns the first hypothesis with its parameter fitted next to the second."""
        hypothesis = self.table[first.name]
        nearest = min(hypothesis.values, key=lambda value: abs(value - first.value))
        step = _step(hypothesis, nearest)
        values = [first.value]
        if step and not hypothesis.is_integer:
            values = [first.value + step * k / 4 for k in range(-4, 5)]
        if min(hypothesis.values) > 0:
            values = [value for value in values if value > 0]
        best = self._improve({}, (second,), [(first.name, value) for value in values])
        return self.measure((second,), [best[first.name].edit])[0]

    def measure(self, fixed: Edits, edits: Sequence[Edit]) -> list[Measured]:
        """Measures hypotheses next to the fixed ones on the held-out samples.

        Returns:
            The best first; at equal shares in the order of `edits`.
        """
        measured = []
        lists = [(*fixed, edit) for edit in edits]
        for edit, left in zip(edits, self._remaining(lists, self.held_out), strict=True):
            name, value = edit
            remaining = left.double().numpy()
            share = float(1 - remaining.sum() / max(self.before.sum(), TINY))
            measured.append(Measured(name=name, value=value, remaining=remaining, share=share))

        def place(each: Measured) -> tuple[float, bool]:
            # At equal shares a logit bias comes last, because it has up to eight fitted parameters.
            return -round(each.share, 4), each.name == "logit bias"

        return sorted(measured, key=place)

    def change(self, i: int) -> Tensor:
        """Returns the wrong engine's log-probs [T] minus the reference's; 0 if Δ does not count."""
        return (-self.sign * self.delta[i]).nan_to_num(0.0, MAX_SIZE, -MAX_SIZE)

    def _fit(self, fixed: Edits, names: Sequence[str], before: float) -> dict[str, Fit]:
        """Fits the parameters of hypotheses with equal costs: on their grids, then between.

        Returns:
            The best parameter per hypothesis.
        """
        grid: list[Edit] = []
        for name in names:
            grid += [(name, float(value)) for value in self.table[name].values]
        best = self._improve({}, fixed, grid)
        has_pass = bool(self.table[names[0]].cost)
        steps = self._first_steps(best, before, has_pass=has_pass)
        # Without a forward pass, a round costs nothing.
        rounds = ROUNDS
        if has_pass:
            rounds = self.rounds
        for _ in range(rounds):
            neighbors: list[Edit] = []
            for name, step in steps.items():
                hypothesis = self.table[name]
                low = min(hypothesis.values)
                for value in (best[name].value - step, best[name].value + step):
                    # A grid with negative values has no smallest size.
                    if low < 0 or value > MIN_OF_GRID * low:
                        neighbors.append((name, value))
                steps[name] = STEP_FACTOR * step
                if hypothesis.is_integer:
                    steps[name] = max(1.0, step // 2)
            self._improve(best, fixed, neighbors)
        return best

    def _first_steps(
        self, best: Mapping[str, Fit], before: float, *, has_pass: bool
    ) -> dict[str, float]:
        """Returns the first step of every parameter that is worth a refinement, by hypothesis."""
        worth = [fit for fit in best.values() if fit.remaining < (1 - WORTH_FITTING) * before]
        worth.sort(key=lambda fit: fit.remaining)
        steps: dict[str, float] = {}
        for fit in worth:
            step = _step(self.table[fit.name], fit.value)
            if step:
                steps[fit.name] = step
        if has_pass:
            steps = dict(list(steps.items())[: self.max_refined])
        return steps

    def _improve(self, best: dict[str, Fit], fixed: Edits, edits: Sequence[Edit]) -> dict[str, Fit]:
        """Tries parameters on the fitted samples; returns `best`, updated with better ones."""
        lists = [(*fixed, edit) for edit in edits]
        for (name, value), left in zip(edits, self._remaining(lists, self.fitted), strict=True):
            remaining = float(left.sum())
            if name not in best or remaining < best[name].remaining:
                best[name] = Fit(name, value, remaining)
        return best

    def _remaining(self, lists: Sequence[Edits], samples: Sequence[int]) -> list[Tensor]:
        """Returns Σ|Δ| [B] of the samples that remains under each list of hypotheses, nats."""
        result = []
        for rows in self.scorer.score(lists, samples):
            remaining = []
            for i, row in zip(samples, rows, strict=True):
                # NaN in Δ marks tokens that do not count. A hypothesis without a number must not
                # look like such a token, so its NaN becomes infinite.
                effect = (row - self.reference[i]).nan_to_num(torch.inf)
                remaining.append(self.delta[i] + self.sign * effect)
            result.append(sizes_of(remaining))
        return result

    @torch.inference_mode()
    def _add_from_samples(self) -> None:
        """Adds the hypotheses whose parameters come from the samples."""
        # NaN marks tokens that do not count.
        counts = torch.cat([self.delta[i] for i in self.fitted]).isfinite()
        change = torch.cat([self.change(i) for i in self.fitted])[counts]
        reference = torch.cat([self.reference[i] for i in self.fitted])[counts]
        self._add_logit_bias(counts, change)
        self._set_lower_bound(reference + change)

    def _add_logit_bias(self, counts: Tensor, change: Tensor) -> None:
        """Adds the hypothesis of a bias on single tokens, if the samples show one.

        Args:
            counts: [N] whether a token of the fitted samples counts.
            change: The wrong engine's log-probs of these tokens minus the reference's, nats.
        """
        samples = [self.inputs[i] for i in self.fitted]
        logits = torch.cat([self.scorer.logits(sample) for sample in samples])
        target = torch.cat([sample.tokens[-sample.response :] for sample in samples])
        bias = logit_bias(logits[counts], target[counts], change)
        if bias is not None:
            # The table has the order in which an engine applies the hypotheses.
            others = dict(self.table)
            self.table.clear()
            self.table |= {"logit bias": bias, **others}

    def _set_lower_bound(self, reported: Tensor) -> None:
        """Sets the parameter of the hypothesis of clamped log-probs, or removes it.

        Args:
            reported: The wrong engine's log-probs of the fitted samples' tokens that count, nats.
        """
        lowest = torch.tensor(0.0)
        if len(reported):
            lowest = reported.min()
        if (reported < lowest + CLAMP_ROUNDING).sum() >= MIN_CLAMPED:
            self.table["clamped"] = replace(self.table["clamped"], values=(float(lowest),))
        else:
            # It would absorb a part of every large mismatch.
            del self.table["clamped"]

    def _gradient(self) -> dict[str, Tensor]:
        """Returns the gradient of Σ_t change_t · log π_t on the fitted samples, by parameter."""
        assert self.model is not None
        self.model.zero_grad()
        with torch.enable_grad():
            for i in self.fitted:
                sample = self.inputs[i]
                output = self.model(sample.tokens[None].to(self.model.device))
                # The logits of a token predict the next one.
                logits = output.logits[0, -sample.response - 1 : -1].float().cpu()
                log_probs = self.scorer.log_probs(logits / sample.temperature, sample)
                product = (log_probs * self.change(i)).sum()
                # One sample at a time: the gradients add up in the parameters.
                product.backward()
        gradient = {}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                gradient[name] = parameter.grad
        self.model.zero_grad()
        return gradient


def _best_first(fits: Iterable[Fit], before: float) -> list[Fit]:
    """Sorts fits by the share of the mismatch `before` that they leave."""

    def share(fit: Fit) -> float:
        # Rounded, so that of equally good hypotheses the cheaper one comes first.
        return round(fit.remaining / max(before, TINY), 4)

    return sorted(fits, key=share)


def _have_equal_shapes(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> bool:
    """Whether all tensors that both have are of equal shapes."""
    return all(own[name].shape == weights[name].shape for name in own.keys() & weights.keys())


def _step(hypothesis: Hypothesis, value: float) -> float:
    """Returns the first step of a refinement; 0 if the parameter is not refined.

    It is half the distance to the nearest value of the grid. For an integer it is half the larger
    distance to the two neighbors, so that no value between them is skipped.
    """
    if len(hypothesis.values) < 3:
        return 0.0
    if not hypothesis.is_integer:
        distances = [abs(other - value) for other in hypothesis.values if other != value]
        return 0.5 * min(distances)
    below = [value - other for other in hypothesis.values if other < value]
    above = [other - value for other in hypothesis.values if other > value]
    # At an end of the grid there is no value on one side.
    larger = max(min(below, default=0.0), min(above, default=0.0))
    return float(int(0.5 * larger))
