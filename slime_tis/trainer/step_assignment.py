"""Which rollouts of a step go to which data-parallel rank, and which micro-batches they form."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from slime_tis.trainer.data.sample import Sample
from slime_tis.trainer.megatron.architecture import sequence_workload
from slime_tis.trainer.megatron.batch import assign_together, balanced_order, fixed_partition
from slime_tis.trainer.megatron.training_engine import TrainingEngine
from slime_tis.trainer.step_inputs import Step


def assigned_together(engine: TrainingEngine, rollouts: Sequence[Sequence[Sample]]) -> int:
    """Returns how many consecutive rollouts of a step go to the same data-parallel rank."""
    if not engine.shares_prompts:
        return 1
    groups = [rollout[0].group_index for rollout in rollouts]
    return assign_together(groups, engine.parallel.data_size)


def order_of_rollouts(
    engine: TrainingEngine, rollouts: Sequence[Sequence[Sample]], together: int
) -> list[int]:
    """Returns the order in which a step's rollouts are dealt to the data-parallel ranks.

    With --balance-data, runs of `together` rollouts are reordered.
    """
    if not engine.config.balance_data:
        return list(range(len(rollouts)))
    workloads = []
    for start in range(0, len(rollouts), together):
        workloads.append(workload(engine, rollouts[start : start + together]))
    order: list[int] = []
    for run in balanced_order(workloads, engine.parallel.data_size):
        order += range(run * together, (run + 1) * together)
    return order


def in_order_of_sampling(values: Sequence[bool], order: Sequence[int]) -> list[bool]:
    """Returns one value per rollout in the order of sampling.

    Args:
        values: One per rollout, in the order in which the ranks got the rollouts.
        order: Numbers of the rollouts in that order.
    """
    by_number = dict(zip(order, values, strict=True))
    return [by_number[number] for number in range(len(order))]


def workload(engine: TrainingEngine, rollouts: Sequence[Sequence[Sample]]) -> float:
    """Returns the estimated operations of rollouts, in an arbitrary unit."""
    hf = engine.model.hf_config
    samples = chain.from_iterable(rollouts)
    return sum(sequence_workload(hf, len(sample.tokens)) for sample in samples)


def isolate_zero_advantage_groups(engine: TrainingEngine, step: Step) -> Step:
    """Moves zero-advantage groups to separate micro-batches, whose backward pass is skipped.

    The step itself is returned if micro-batches have no fixed number of rollouts, if they have
    recorded experts, or if the engine skips no backward pass.
    """
    size = engine.config.micro_batch_size
    is_fixed = engine.token_budget is None and size is not None and step.routing_record is None
    if not (is_fixed and engine.skips_backward):
        return step
    tokens = step.batch.responses
    assert tokens.advantages_L is not None
    advantages = tokens.advantages_L.split(list(tokens.lengths))
    group_of = {}
    samples: dict[int, list[int]] = {}
    nonzero_groups = set()
    for index, rollout in enumerate(step.rollouts):
        group = step.samples[index].group_index
        group_of[rollout] = group
        samples.setdefault(rollout, []).append(index)
        if advantages[index].any():
            nonzero_groups.add(group)
    # The sort is stable: within both halves the rollouts keep their order.
    order = sorted(samples, key=lambda rollout: group_of[rollout] not in nonzero_groups)
    partition = []
    for positions in fixed_partition(len(order), size):
        indices: list[int] = []
        for position in positions:
            indices += samples[order[position]]
        partition.append(sorted(indices))
    return replace(step, partition=partition)
