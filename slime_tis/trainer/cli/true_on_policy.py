"""Refuses options that --true-on-policy cannot work with, and names those that it makes useless.

The flag promises that both log-probs of every trained token are equal in every bit. It accepts only
options that were shown to keep this promise (docs/true_on_policy.md).
"""

from collections.abc import Iterator

from slime_tis.families import FAMILIES
from slime_tis.options.command_line import CORRECTION_SWITCHES
from slime_tis.options.fields import flag
from slime_tis.trainer.cli.train_options import OPTIONS, Arguments

PRECISIONS = ("fp32", "bf16")
"""Precisions whose operations were shown to be exact."""
MOST_TENSOR_RANKS = 2
"""Tensor-parallel ranks. Two numbers can only be added in one order; for three, gloo chooses it."""


def check_true_on_policy(arguments: Arguments) -> None:
    """Refuses options that cannot keep the promise of --true-on-policy.

    Raises:
        ValueError: There is one; the message has the reason.
    """
    if not arguments.rollout.true_on_policy:
        return
    problems = [
        *_sample_problems(arguments),
        *_precision_problems(arguments),
        *_layout_problems(arguments),
    ]
    if problems:
        raise ValueError(f"--true-on-policy does not work with {problems[0]}")


def check_family(arguments: Arguments, architecture: str) -> None:
    """Refuses a model family that was not shown to keep the promise.

    Raises:
        ValueError: --true-on-policy is on, and the family is another one.
    """
    family = FAMILIES[architecture]
    if not arguments.rollout.true_on_policy or family.true_on_policy:
        return
    if family.experts is not None:
        raise ValueError(
            "--true-on-policy does not work with a mixture of experts: the two engines add the"
            " experts of a token in different orders; remove the flag, or replay routing with"
            " --use-rollout-routing-replay."
        )
    exact = [name for name, entry in FAMILIES.items() if entry.true_on_policy]
    raise ValueError(
        f"--true-on-policy does not work with {architecture}, whose operations were not compared;"
        f" remove the flag, or use {', '.join(exact)}."
    )


def _precision_problems(arguments: Arguments) -> Iterator[str]:
    precision = arguments.megatron.precision
    rollout_precision = arguments.rollout.rollout_precision
    if precision not in PRECISIONS:
        yield f"--{precision}, whose operations were not tested; use --bf16 or float32."
    if rollout_precision != precision:
        yield (
            f"--rollout-precision {rollout_precision} while training has {precision}, because"
            f" rounded weights give other log-probs; add --rollout-precision {precision}."
        )
    if arguments.rollout.rollout_router_bits is not None:
        yield "--rollout-router-bits, which rounds weights of the rollout engine only; remove it."


def _layout_problems(arguments: Arguments) -> Iterator[str]:
    megatron = arguments.megatron
    ranks = megatron.tensor_model_parallel_size
    if ranks > MOST_TENSOR_RANKS:
        yield (
            f"--tensor-model-parallel-size {ranks}: the order in which gloo adds more than"
            f" {MOST_TENSOR_RANKS} numbers is unknown; use at most {MOST_TENSOR_RANKS}."
        )
    for name in ("pipeline_model_parallel_size", "context_parallel_size"):
        size = getattr(megatron, name)
        if size > 1:
            yield f"{flag(name)} {size}, which was not shown to be exact; remove it."
    if megatron.sequence_parallel:
        yield "--sequence-parallel, which was not shown to be exact; remove it."
    if megatron.trains_adapters:
        yield (
            "LoRA adapters, which training computes apart from the weights into which the rollout"
            " engine merges them; remove --lora-rank and --lora-adapter-path."
        )
    if megatron.transformer_impl == "transformer_engine":
        yield (
            "--transformer-impl transformer_engine: the rollout engine does not have its kernels;"
            " remove it."
        )


def _sample_problems(arguments: Arguments) -> Iterator[str]:
    """Yields options whose tokens were not sampled by the weights and operations of the step."""
    rollout = arguments.rollout
    loop = arguments.loop
    if rollout.rollout_engine != "local":
        yield (
            f"--rollout-engine {rollout.rollout_engine}: training does not have the kernels of a"
            " server, also with deterministic inference, so their log-probs differ; use"
            " --rollout-engine local."
        )
    steps = loop.num_steps_per_rollout
    if steps is not None and steps > 1:
        yield (
            f"{steps} optimizer steps per rollout: after the first step, training has other weights"
            " than the rollout engine; use --num-steps-per-rollout 1."
        )
    stale = {"update_weights_interval": 1, "rollout_lookahead": 0}
    for name, fresh in stale.items():
        value = getattr(rollout, name)
        if value != fresh:
            yield (
                f"{flag(name)} {value}, because older weights then sample the tokens; use {fresh}."
            )
    if loop.load_debug_rollout_data is not None:
        yield "--load-debug-rollout-data, whose tokens another run sampled; remove it."
    if loop.debug_rollout_only:
        yield "--debug-rollout-only, which trains nothing that could be compared; remove it."
    if rollout.rollout_function_path is not None:
        yield "--rollout-function-path, whose log-probs may come from anywhere; remove it."
    if arguments.policy.custom_loss_function_path is not None:
        yield (
            "--custom-loss-function-path, whose logits come from megatron-core's output layer;"
            " remove it."
        )


def true_on_policy_warnings(arguments: Arguments) -> Iterator[str]:
    """Yields a warning about corrections, which do nothing if all ratios are 1."""
    if not arguments.rollout.true_on_policy:
        return
    idle = []
    for name in CORRECTION_SWITCHES:
        if getattr(arguments.correction, name) != OPTIONS[name].default:
            idle.append(flag(name))
    if idle:
        yield (
            f"{' and '.join(idle)} has no effect with --true-on-policy, because every ratio of"
            " training to rollout is exactly 1; remove one of the two."
        )
