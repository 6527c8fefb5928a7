"""Whether the rollout engine has the weights that are trained (`--check-weight-sync`)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slime_tis.megatron.batch import make_batch
from slime_tis.megatron.engine import TrainingEngine
from slime_tis.rollout.engine import RolloutEngine
from slime_tis.rollout.prompts import PromptDataset

PROBE_PROMPTS, PROBE_TOKENS = 64, 512
"""The probe is the longest of so many prompts, cut to so many tokens."""


@dataclass(frozen=True, kw_only=True)
class SyncCheck:
    """A comparison of the two engines' log-probs after every update."""

    probe: tuple[int, ...]
    """Token ids of the text that both engines score."""
    bound: float
    """Largest mean absolute difference, in nats per token."""


def sync_check(dataset: PromptDataset, bound: float) -> SyncCheck:
    """The check with the longest of the first prompts as its probe.

    A single token is taken twice, since the first token of a text has no log-prob.
    """
    prompts = dataset.prompts[:PROBE_PROMPTS]
    longest = max((prompt.token_ids for prompt in prompts), key=len)
    probe = longest[:PROBE_TOKENS] if len(longest) > 1 else longest * 2
    return SyncCheck(probe=tuple(probe), bound=bound)


def check_weight_sync(engine: TrainingEngine, sampler: RolloutEngine, check: SyncCheck) -> None:
    """Compares the log-probs of the probe under both engines' weights after an update; a collective.

    Raises:
        ValueError: they differ by more than the bound; the message names the copy of the weights that does.
    """
    for name, log_probs in sampler.prompt_log_probs(check.probe).items():
        gap = log_prob_gap(engine, check.probe, log_probs)
        if not gap <= check.bound:
            raise ValueError(
                f"parameter-sync error: after the update to step {sampler.weight_version} the log-probs of a probe "
                f"prompt differ by {gap:.3g} on average between training and {name}, more than --weight-sync-bound "
                f"{check.bound}; see that both run the same model, and raise the bound if the "
                "rollout engine is meant to be that coarse."
            )


def log_prob_gap(engine: TrainingEngine, token_ids: Sequence[int], log_probs: Sequence[float]) -> float:
    """Mean |log π_train − log π_other| over all tokens of a text but the first, at temperature 1; a collective.

    Args:
        engine: the training engine.
        token_ids: the text, two tokens or more.
        log_probs: of its tokens but the first, by the other engine.

    Returns:
        The mean in nats, the same on every rank; infinite where a log-prob is not finite.
    """
    parallel, count = engine.parallel, len(token_ids) - 1
    place = parallel.context_rank, parallel.context_size
    batch = make_batch([token_ids], [[1] * count], [log_probs], [[0] * count], *place)
    with engine.at_temperature(1.0):
        found_L = engine.log_probs(batch, [[0]])
    gap = 0.0
    if parallel.is_last_stage:
        difference_L = (found_L - batch.responses.rollout_log_probs_L.to(found_L)).abs().double()
        total = torch.stack([difference_L.sum(), difference_L.new_tensor(float(len(difference_L)))])
        difference, tokens = parallel.ranks.all_reduce(total).tolist()
        gap = difference / tokens
    gap = parallel.broadcast_from_last_stage(gap)
    return math.inf if math.isnan(gap) else gap
