"""Whether another engine holds the weights that are trained: the log-probs of a probe text, compared."""

import torch

from slime_tis.megatron.batch import make_batch
from slime_tis.megatron.engine import TrainingEngine


def log_prob_gap(engine: TrainingEngine, token_ids: list[int], log_probs: list[float]) -> float:
    """Mean |log π_train − log π_other| over all tokens of a text but the first, at temperature 1; a collective.

    Args:
        engine: the training engine.
        token_ids: the text, two tokens or more.
        log_probs: of its tokens but the first, by the other engine.

    Returns:
        the mean, the same on every rank; infinite where a log-prob is not finite.
    """
    parallel, count = engine.parallel, len(token_ids) - 1
    batch = make_batch(
        [token_ids],
        [count],
        [[1] * count],
        {"other": [torch.tensor(log_probs, dtype=torch.float32)]},
        parallel.context_rank,
        parallel.context_size,
    )
    with engine.at_temperature(1.0):
        (found,) = engine.log_probs(batch, [[0]])
    gap = 0.0
    if parallel.is_last_stage:
        (other,) = batch.local["other"]
        differences = (found - other.to(found)).abs().double()
        total = torch.stack([differences.sum(), differences.new_tensor(float(differences.numel()))])
        difference, tokens = parallel.sum_over_data_and_context(total).tolist()
        gap = difference / tokens
    gap = parallel.from_last_stage(gap)
    return gap if gap == gap else float("inf")
