"""Options of the example, and its command line: the flags of train.py where they mean the same."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from slime_tis.correction.config import RolloutCorrectionConfig
from slime_tis.integrations.arguments import CORRECTION_ALIASES
from slime_tis.options.command_line import (
    CommandLine,
    SourceConfig,
    build,
    make_parser,
    merge_sources,
    naming_sources,
    read_flags,
    split_words,
    unmet_needs,
)
from slime_tis.options.fields import Limits, check_fields
from slime_tis.options.values import declare_options
from slime_tis.trainer.configs.loop import ReportingConfig

PIXELS = 64
"""Latent dimensions of a step: the digits are 8×8 and no autoencoder is in between."""


@dataclass(frozen=True, kw_only=True)
class DigitsConfig:
    """The model, its reinforcement learning, and what it is compared with."""

    seed: int = 0
    """Seed of everything: data split, captions, weights, noise."""

    hidden_size: Annotated[int, Limits(ge=1)] = 256
    """Width of the velocity model."""

    layers: Annotated[int, Limits(ge=1)] = 3
    """Residual blocks of the velocity model."""

    pretrain_steps: Annotated[int, Limits(ge=1)] = 600
    """Flow-matching steps before reinforcement learning."""

    caption_noise: Annotated[float, Limits(ge=0, le=1)] = 0.5
    """Share of the images that flow matching sees with a caption drawn at random, as captions off
    the web are."""

    judge_steps: Annotated[int, Limits(ge=1)] = 400
    """Training steps of each classifier."""

    num_rollout: Annotated[int, Limits(ge=1)] = 100
    """Rollouts of the whole run."""

    rollout_batch_size: Annotated[int, Limits(ge=1)] = 16
    """Digits asked for in a rollout."""

    n_samples_per_prompt: Annotated[int, Limits(ge=1)] = 16
    """Images of each digit asked for; their rewards are compared with each other."""

    num_steps_per_rollout: Annotated[int, Limits(ge=1)] = 1
    """Optimizer steps per rollout; each trains on a share of the trajectories."""

    sde_steps: Annotated[int, Limits(ge=1)] = 10
    """Steps of the SDE sampler."""

    noise_level: Annotated[float, Limits(gt=0)] = 0.7
    """Noise level a of the SDE sampler; more of it explores more."""

    rollout_precision: Literal["fp32", "bf16", "fp8"] = "fp32"
    """Precision of the copy that samples: fp32, bf16 (weights and arithmetic) or fp8 (weights)."""

    update_weights_interval: Annotated[int, Limits(ge=1)] = 1
    """Rollouts that the copy keeps its weights for."""

    log_ratio_scale: Literal["sum", "mean"] = "sum"
    """Scale of the corrected log-ratios: the step's density (sum over pixels), or its 64th root
    (mean), which the loss uses and which bounds hardly ever reach."""

    lr: Annotated[float, Limits(gt=0)] = 3e-4
    """Learning rate of reinforcement learning, Adam."""

    clip_grad: Annotated[float, Limits(gt=0)] = 1.0
    """Largest norm of the gradient of a step."""

    eps_clip: Annotated[float, Limits(gt=0)] = 3e-3
    """Clip range of the ratio, a distance from 1, on the scale of means over pixels."""

    eval_interval: Annotated[int, Limits(ge=1)] = 10
    """Rollouts between evaluations; the first and the last are evaluated in any case."""

    eval_samples: Annotated[int, Limits(ge=1)] = 30
    """Images of each digit that an evaluation samples."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.n_samples_per_prompt < 2:
            raise ValueError(
                f"--n-samples-per-prompt is {self.n_samples_per_prompt} but the images of a digit"
                " are compared with each other; raise it to 2 or more."
            )
        if self.trajectories % self.num_steps_per_rollout:
            raise ValueError(
                f"--num-steps-per-rollout is {self.num_steps_per_rollout} but a rollout has"
                f" {self.trajectories} trajectories; choose a divisor of {self.trajectories}."
            )

    @property
    def trajectories(self) -> int:
        """Trajectories of a rollout."""
        return self.rollout_batch_size * self.n_samples_per_prompt

    @property
    def latent_dims(self) -> int:
        """What brings the mean log-prob of a step to the scale that is corrected on."""
        return PIXELS if self.log_ratio_scale == "sum" else 1


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Everything a run is configured by."""

    digits: DigitsConfig
    correction: RolloutCorrectionConfig
    reporting: ReportingConfig


CONFIGS = (DigitsConfig, RolloutCorrectionConfig, ReportingConfig)
OPTIONS = declare_options((*CONFIGS, SourceConfig))
COMMAND_LINE = CommandLine(options=OPTIONS, aliases=CORRECTION_ALIASES)


def configure(argv: Sequence[str]) -> Arguments:
    """Reads and checks the whole configuration of a run.

    Raises:
        ValueError: for anything that is refused.
    """
    parser = make_parser(
        COMMAND_LINE,
        prog="train.py",
        usage="python -m examples.diffusion_digits.train [options]",
        description=(
            "Trains a flow model of handwritten digits to draw the digit that it is asked for, with"
            " the mismatch between rollout and training log-probs measured and corrected."
        ),
    )
    options = merge_sources(COMMAND_LINE, read_flags(COMMAND_LINE, *split_words(parser, argv)))
    with naming_sources(options):
        correction = build(RolloutCorrectionConfig, options)
    if correction.policy_loss not in ("ppo", "reinforce"):
        raise ValueError(
            f"--policy-loss is {correction.policy_loss} but SDE steps have ppo and reinforce;"
            " choose one."
        )
    if correction.old_logprobs == "interpolate":
        raise ValueError(
            "--old-logprobs is interpolate but SDE steps have no version per token; make it"
            " recompute."
        )
    return Arguments(
        digits=build(DigitsConfig, options),
        correction=correction,
        reporting=build(ReportingConfig, options),
    )


def effective_config(arguments: Arguments) -> dict[str, Any]:
    """The configuration in force as plain values; as YAML, --custom-config-path takes it back."""
    configs = (arguments.digits, arguments.correction, arguments.reporting)
    values = {
        field.name: getattr(config, field.name)
        for config in configs
        for field in dataclasses.fields(config)
    }
    return {
        name: value for name, value in values.items() if not unmet_needs(COMMAND_LINE, name, values)
    }
