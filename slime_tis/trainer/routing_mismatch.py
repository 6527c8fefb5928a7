"""Measures the mismatch with and without replay of the rollout's experts.

`--measure-routing-mismatch` needs both in one step: training computes one of them anyway, and one
forward pass computes the other.
"""

from slime_tis.correction import Statistics
from slime_tis.policy.step_sums import mismatch, mismatch_metrics
from slime_tis.trainer.megatron.parallel import Parallel
from slime_tis.trainer.megatron.training_engine import TrainingEngine
from slime_tis.trainer.step_inputs import Step

WITH_REPLAY = "with_replay"
"""Metric prefix of a pass that replays the rollout's experts."""
WITHOUT_REPLAY = "without_replay"
"""Metric prefix of a pass that the training router routes."""
DIFFERENCE = "routing_difference"
"""Share of tokens that the training router would send to other experts; per-layer values append the
layer's name."""


def mismatch_with_other_routing(
    engine: TrainingEngine, step: Step, *, replays: bool
) -> dict[str, float]:
    """Returns the metrics of one forward pass, with or without replay; a collective of all ranks.

    Args:
        engine: The engine that computes the pass.
        step: The step whose samples are measured.
        replays: Whether this pass replays the experts, which training itself then does not.
    """
    parallel = engine.parallel
    prefix = _prefix(replays=replays)
    with engine.timer(prefix):
        log_probs_L = engine.log_probs(step.recorded, step.partition, replays_routing=replays)
        statistics = None
        if parallel.is_last_stage:
            tokens = step.recorded.responses.to(parallel.device)
            statistics = mismatch(tokens, log_probs_L, parallel.ranks)
        metrics = named_mismatch(parallel, statistics, replays=replays)
        routing = engine.routing.metrics()
    if replays:
        for name, value in routing.items():
            if name.startswith(DIFFERENCE):
                metrics[name] = value
    elif DIFFERENCE in routing:
        metrics[f"{prefix}/{DIFFERENCE}"] = routing[DIFFERENCE]
    return metrics


def named_mismatch(
    parallel: Parallel, statistics: Statistics | None, *, replays: bool
) -> dict[str, float]:
    """Returns metrics with the prefix of their pass; a collective of all ranks.

    Args:
        parallel: The parallel layout.
        statistics: On the last pipeline stage, this rank's statistics; None on other stages.
        replays: Whether the pass replayed the rollout's experts.
    """
    metrics = {}
    if statistics is not None:
        metrics = mismatch_metrics(statistics.all_reduce(parallel.ranks))
    metrics = parallel.broadcast_from_last_stage(metrics)
    prefix = _prefix(replays=replays)
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def _prefix(*, replays: bool) -> str:
    if replays:
        return WITH_REPLAY
    return WITHOUT_REPLAY
