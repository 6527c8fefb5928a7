"""FlowGRPO on handwritten digits, with rollouts by a low-precision copy whose weights lag behind.

    python -m examples.diffusion_digits.train \\
        --custom-config-path examples/diffusion_digits/train.yaml

Flow matching on digits, half of them with a random caption, gives a model that draws the requested
digit about half of the time. Reinforcement learning continues: the reward is a classifier's
probability of the requested digit. The evaluation uses another classifier, trained on images that
neither the model nor the reward has seen.
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor

from examples.diffusion_digits.config import Arguments, configure, effective_config
from examples.diffusion_digits.data import CLASSES, load_halves, miscaptioned, reward, train_judge
from examples.diffusion_digits.model import VelocityModel, pretrain, rollout_copy
from examples.diffusion_digits.picture import PICTURE_ROWS, save_samples
from examples.diffusion_digits.sampling import (
    Trajectories,
    sample_images,
    sample_trajectories,
    schedule,
    trajectory_log_probs,
)
from slime_tis.atomic_files import atomic_file
from slime_tis.diffusion import (
    Diagnostics,
    DiffusionLoss,
    StepStatistics,
    apply_bypass_mode,
    correct_trajectories,
    diffusion_loss,
)
from slime_tis.policy.advantages import grpo
from slime_tis.trainer.reporting.reporters import open_reporters

TIMESTEPS = 1000
"""Timesteps at t = 1, as the schedulers of diffusion models count them."""
POLICY = "policy.pt"


def main(argv: list[str] | None = None) -> int:
    try:
        arguments = configure(sys.argv[1:] if argv is None else argv)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    torch.set_num_threads(1)  # more gain little at this size, and sums stay in one order
    directory = Path(arguments.reporting.output_dir)
    first, last = Run(arguments).train(directory)
    print(f"eval reward: {first:.2f} -> {last:.2f}", flush=True)
    return 0


@dataclass(frozen=True)
class Batch:
    """Trajectories with everything that the loss needs. Shapes: B trajectories, T steps."""

    trajectories: Trajectories
    advantages_B: Tensor
    old_log_probs_BT: Tensor
    """log π_old; in bypass mode log π_rollout."""
    weights_BT: Tensor | None
    """Weights × mask of the decoupled correction; None in bypass mode, where the loss corrects
    itself."""

    def of(self, index: Tensor) -> Batch:
        """Some of the trajectories."""
        return Batch(
            trajectories=self.trajectories.of(index),
            advantages_B=self.advantages_B[index],
            old_log_probs_BT=self.old_log_probs_BT[index],
            weights_BT=None if self.weights_BT is None else self.weights_BT[index],
        )


class Run:
    """The model, the classifiers, the sampling copy, and the loop over rollouts."""

    def __init__(self, arguments: Arguments) -> None:
        self.arguments, self.config, self.correction = (
            arguments,
            arguments.digits,
            arguments.correction,
        )
        config = self.config
        seen, unseen = load_halves(config.seed)
        generator = torch.Generator().manual_seed(config.seed)
        self.teacher = train_judge(seen, 128, config, generator)
        self.examiner = train_judge(unseen, 96, config, generator)
        self.real_spread = spread(unseen.pixels_BP, unseen.digits_B)
        self.model = pretrain(miscaptioned(seen, config.caption_noise, generator), config)
        self.optimizer = torch.optim.Adam(self.model.parameters(), config.lr)
        self.timesteps_T = TIMESTEPS * schedule(config.sde_steps)[:-1]
        self.diagnostics = Diagnostics(self.correction)
        self.sampler, self.steps_behind = self.model, 0

    def train(self, directory: Path) -> tuple[float, float]:
        """All rollouts; the evaluation's reward before and after."""
        config, total = self.config, self.config.num_rollout
        reporter = open_reporters(
            self.arguments.reporting, effective_config(self.arguments), total_steps=total
        )
        before, first = self.grid(), self.evaluate()
        reporter.log(first, 0)
        for rollout in range(total):
            start = time.monotonic()
            metrics = self.train_rollout(rollout)
            for message in self.diagnostics.check(metrics):
                print(f"warning: {message}", file=sys.stderr, flush=True)
            if rollout + 1 == total or (rollout + 1) % config.eval_interval == 0:
                metrics |= self.evaluate()
            reporter.log(metrics | {"perf/step_time": time.monotonic() - start}, rollout + 1)
        reporter.close()
        save_samples(directory, before, self.grid())
        save_policy(directory, self.model)
        return first["eval/reward"], metrics["eval/reward"]

    def train_rollout(self, rollout: int) -> dict[str, float]:
        """Samples, scores, corrects and trains; returns the metrics of the rollout."""
        config = self.config
        if rollout % config.update_weights_interval == 0:
            self.sampler, self.steps_behind = rollout_copy(self.model, config.rollout_precision), 0
        metrics = {"rollout/weight_staleness": float(self.steps_behind)}
        generator = torch.Generator().manual_seed((config.seed << 32) + rollout)
        asked = torch.randint(CLASSES, (config.rollout_batch_size,), generator=generator)
        digits = asked.repeat_interleave(config.n_samples_per_prompt)
        trajectories = sample_trajectories(self.sampler, digits, config, generator)
        rewards = reward(self.teacher, trajectories.images_BP, digits)
        metrics["rollout/raw_reward"] = rewards.mean().item()
        advantages = grpo(rewards.view(-1, config.n_samples_per_prompt)).flatten()
        batch, measured = self.prepare(trajectories, advantages)
        shares = torch.randperm(len(digits), generator=generator).chunk(
            config.num_steps_per_rollout
        )
        losses, norms = zip(*(self.train_step(batch.of(share)) for share in shares), strict=True)
        measured += [loss.statistics for loss in losses if loss.statistics is not None]
        if measured:
            metrics |= reduce(StepStatistics.merge, measured).metrics()
        return metrics | loss_metrics(losses, norms)

    def prepare(
        self, trajectories: Trajectories, advantages_B: Tensor
    ) -> tuple[Batch, list[StepStatistics]]:
        """Returns old log-probs, and the weights of the rollout if the correction is decoupled."""
        rollout_log_probs = trajectories.rollout_log_probs_BT
        if self.correction.use_rollout_logprobs:
            data = apply_bypass_mode({"rollout_log_probs": rollout_log_probs})
            return Batch(trajectories, advantages_B, data["old_log_probs"], None), []
        with torch.no_grad():
            old_log_probs = trajectory_log_probs(self.model, trajectories, self.config)
        if not self.correction.needs_rollout_log_probs:
            return Batch(trajectories, advantages_B, old_log_probs, None), []
        found = correct_trajectories(
            self.correction,
            old_log_probs,
            rollout_log_probs,
            timesteps=self.timesteps_T,
            latent_dims=self.config.latent_dims,
        )
        return Batch(trajectories, advantages_B, old_log_probs, found.folded), [found.statistics]

    def train_step(self, batch: Batch) -> tuple[DiffusionLoss, float]:
        """Takes an optimizer step; returns the loss and the gradient norm.

        A non-finite gradient changes no weights.
        """
        found = diffusion_loss(
            self.correction,
            trajectory_log_probs(self.model, batch.trajectories, self.config),
            batch.old_log_probs_BT,
            batch.advantages_B,
            weights=batch.weights_BT,
            clip_range=self.config.eps_clip,
            timesteps=self.timesteps_T,
            latent_dims=self.config.latent_dims,
        )
        self.optimizer.zero_grad()
        found.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_grad).item()
        if math.isfinite(norm) and found.denominator > 0:
            self.optimizer.step()
            self.steps_behind += 1
        return replace(found, loss=found.loss.detach(), numerator=found.numerator.detach()), norm

    def evaluate(self) -> dict[str, float]:
        """The examiner's accuracy on images by the ODE, and the diversity of one digit's images."""
        digits = torch.arange(CLASSES).repeat_interleave(self.config.eval_samples)
        images = sample_images(self.model, digits, seed=self.config.seed)
        return {
            "eval/reward": reward(self.examiner, images, digits).mean().item(),
            "eval/reward/right": (self.examiner(images).argmax(1) == digits).float().mean().item(),
            "eval/reward/spread": spread(images, digits) / self.real_spread,
        }

    def grid(self) -> Tensor:
        """[rows, 10, 64]: images for the picture, the same noise whenever it is asked for."""
        digits = torch.arange(CLASSES).repeat(PICTURE_ROWS)
        return sample_images(self.model, digits, seed=self.config.seed + 1).view(
            PICTURE_ROWS, CLASSES, -1
        )


def spread(pixels_BP: Tensor, digits_B: Tensor) -> float:
    """Root of the mean variance of a pixel among the images of one digit."""
    variances = [pixels_BP[digits_B == digit].var(0).mean() for digit in range(CLASSES)]
    return torch.stack(variances).mean().sqrt().item()


def loss_metrics(losses: tuple[DiffusionLoss, ...], norms: tuple[float, ...]) -> dict[str, float]:
    """train/… metrics over all optimizer steps of a rollout."""
    accepted = max(sum(loss.accepted_steps.item() for loss in losses), 1)
    denominator = max(sum(loss.denominator.item() for loss in losses), 1)
    sums = {
        name: sum(loss.sums[name].item() for loss in losses) / accepted for name in losses[0].sums
    }
    return {
        "train/loss": sum(loss.numerator.item() for loss in losses) / denominator,
        "train/grad_norm": sum(norms) / len(norms),
        "train/skipped_steps": float(sum(not math.isfinite(norm) for norm in norms)),
        "train/pg_clipfrac": sums["clipped"],
        "train/ppo_kl": sums["kl"],
        "train/ois": sums["ratio"],
    }


def save_policy(directory: Path, model: VelocityModel) -> None:
    """The weights, whole or not at all."""
    with atomic_file(directory / POLICY) as file:
        torch.save(model.state_dict(), file)


if __name__ == "__main__":
    sys.exit(main())
