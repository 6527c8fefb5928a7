"""Rollout correction in TRL's GRPOTrainer: `RolloutCorrectionMixin` and `CorrectedGRPOTrainer`.

TRL samples, scores and forms advantages. The mixin then multiplies every token's advantage by the
token's importance weight; a rejected token has weight 0. TRL's losses grpo, bnpo, dr_grpo, dapo,
cispo, sapo and luspo are homogeneous in the advantage, so this weights the policy loss exactly. The
KL term with `beta` stays unweighted, as in TRL.
"""

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slime_tis.correction import (
    Correction,
    GlobalBatch,
    Ranks,
    RolloutCorrectionConfig,
    correct,
    within_bound,
)
from slime_tis.integrations.frameworks import TRL
from slime_tis.live_health import LiveHealth, OnAlarm, logged
from slime_tis.token_signs import WeightProbe, over_ranks, sign_metrics, token_sums

if TYPE_CHECKING:
    from slime_tis.analysis.dumps.table import TokenTable

try:
    from trl import GRPOTrainer
except ImportError as error:
    raise ImportError(
        f"slime_tis.integrations.trl needs TRL ({error}); pip install 'slime_tis[trl]'."
    ) from error

PREFIX = "correction/"
"""Prefix of the metrics in TRL's log."""
PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Names of dtypes in dumps."""
OTHER_METRICS = {
    "rollout/raw_reward": "reward",
    "rollout/zero_std_groups": "frac_reward_zero_std",
}
"""Metrics of TRL that health rules read."""
CLIPPED = "clip_ratio/region_mean"
"""TRL's share of tokens whose gradient the clip removes."""
MODEL_INPUTS = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)
"""Keys of a batch that TRL passes to the model besides tokens."""

logger = logging.getLogger(__name__)


class RolloutCorrectionMixin:
    """Adds rollout correction to GRPOTrainer or a subclass.

        class Trainer(RolloutCorrectionMixin, GRPOTrainer): ...

    The correction runs once per generation batch, over all processes. π_old is the trained policy
    at the time when the samples arrive.

    Args of the constructor, besides those of the trainer:
        rollout_correction: The options; None only measures.
        dump_dir: Directory of token dumps, one parquet file per generation batch and process.
            `slime-tis report`, `diagnose` and `what-if` read them. None writes nothing.
        on_alarm: "warn" prints health alarms, "stop" also ends the run by `HealthAlarm` if
            training would use wrong numbers.
        log_all_metrics: Whether TRL's log gets all metrics instead of `DEFAULT_METRICS`.
        rollout_precision: Of the sampler, such as "bf16", for dumps. The diagnosis then knows the
            size of its rounding noise. None if it is not known.

    A `rollout_func` may return `weight_versions`: for each sample, the optimizer steps made before
    the weights that sampled it, as one number or one per token. With vLLM they are known.

    Raises:
        ValueError: TRL's or the correction's options cannot be combined.
        HealthAlarm: See `on_alarm`.
    """

    # Attributes of GRPOTrainer, for the type checker.
    args: Any
    accelerator: Any
    model: Any
    processing_class: Any
    state: Any
    reward_weights: Any
    num_generations: int
    temperature: float
    use_vllm: bool
    vllm_importance_sampling_correction: bool
    _last_loaded_step: int
    _metrics: Any

    def __init__(
        self,
        *args: Any,
        rollout_correction: RolloutCorrectionConfig | None = None,
        dump_dir: str | Path | None = None,
        on_alarm: OnAlarm = "warn",
        log_all_metrics: bool = False,
        rollout_precision: str | None = None,
        **kwargs: Any,
    ) -> None:
        if rollout_correction is None:
            rollout_correction = RolloutCorrectionConfig(get_mismatch_metrics=True)
        self.rollout_correction = rollout_correction
        self._dump_dir = None
        if dump_dir is not None:
            self._dump_dir = Path(dump_dir)
        self._log_all_metrics = log_all_metrics
        self._rollout_precision = rollout_precision
        self._rewards: Tensor | None = None
        self._lengths: list[int] = []
        self._batches = 0
        self._weights = WeightProbe()
        self._probed_step = -1
        super().__init__(*args, **kwargs)
        check_options(self, self.rollout_correction)
        self._health = LiveHealth(
            self.rollout_correction,
            TRL,
            on_alarm=on_alarm,
            prints=self.accelerator.is_main_process,
        )
        if self.use_vllm and self.vllm_importance_sampling_correction:
            logger.info(
                "slime_tis corrects the rollouts; vllm_importance_sampling_correction of TRL is"
                " switched off."
            )
        self.vllm_importance_sampling_correction = False

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: list[list[int]]
    ) -> Tensor:
        """Keeps the rewards of all processes [N, functions] and the lengths of the completions."""
        rewards: Tensor = super()._calculate_rewards(  # type: ignore[misc]
            inputs, prompts, completions, completion_ids_list
        )
        self._rewards = rewards
        self._lengths = [len(ids) for ids in completion_ids_list]
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Corrects the generated batch in place: advantages [B, T], and π_old in bypass mode."""
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        rollout_BT = batch.get("sampling_per_token_logps")
        if rollout_BT is None:
            raise ValueError(
                "TRL has no rollout log-probs; use vLLM (use_vllm=True), or a rollout_func"
                " that returns 'logprobs'."
            )
        mode = "eval"
        if self.model.training:
            mode = "train"
        old_BT, entropy_BT = self._old_policy(batch)
        mask_BT = batch["completion_mask"] * batch.get("tool_mask", 1)
        ranks = Ranks()
        if self.accelerator.num_processes > 1:
            ranks = Ranks.from_groups(data=torch.distributed.group.WORLD)
        advantages_BT = batch["advantages"][:, None].expand_as(old_BT)
        correction = correct(
            self.rollout_correction,
            old_BT,
            rollout_BT,
            mask_BT,
            current_log_probs=old_BT,
            advantages=advantages_BT,
            global_batch=GlobalBatch(ranks=ranks),
        )
        version_BT = self._weight_versions(inputs, batch)
        # Before `_apply`: a dump has TRL's advantages [B].
        if self._dump_dir is not None and mode == "train":
            columns = {"train": old_BT, "entropy": entropy_BT, "mask": mask_BT}
            self._dump(batch, correction, columns, version_BT)
        self._apply(batch, correction, old_BT, rollout_BT)
        age_BT = None
        if version_BT is not None:
            age_BT = torch.where(version_BT < 0, -1, self.state.global_step - version_BT)
        # Several batches of one step have the same weights.
        weights = None
        if mode == "train" and self.state.global_step != self._probed_step:
            weights = self._weights.compare(self.model)
            self._probed_step = self.state.global_step
        local_sums = token_sums(old_BT, rollout_BT, mask_BT, age_BT=age_BT, weights=weights)
        # The copy of the sums ends with the synchronisation of `metrics`.
        sums = over_ranks(local_sums, ranks)
        metrics = correction.statistics.all_reduce(ranks).metrics()
        self._report(metrics | sign_metrics(sums), mode)
        return batch

    def _weight_versions(
        self, inputs: list[dict[str, Any]], batch: dict[str, Any]
    ) -> Tensor | None:
        """Weight versions [B, T] of the tokens, −1 if unknown; None if nothing is known.

        TRL adds the keys that `rollout_func` returns to the inputs, sample by sample.

        Raises:
            ValueError: A sample has a number of versions other than 1 or its number of tokens.
        """
        loaded_step = -1
        if self.use_vllm:
            loaded_step = self._last_loaded_step
        elif not any("weight_versions" in row for row in inputs):
            return None
        completion_BT = batch["completion_ids"]
        # On the host, so that the device gets one copy.
        version_BT = torch.full(completion_BT.shape, -1, dtype=torch.int64)
        for i, row in enumerate(inputs):
            # An engine may count in numpy or torch, whose scalars are no int.
            versions = torch.as_tensor(row.get("weight_versions", loaded_step))
            length = self._lengths[i]
            if versions.ndim and len(versions) != length:
                raise ValueError(
                    f"weight_versions of sample {i} from rollout_func has {len(versions)} entries"
                    f" for {length} tokens; return one number per sample or one per token."
                )
            version_BT[i, :length] = versions
        return version_BT.to(completion_BT.device, non_blocking=True)

    def _old_policy(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """log π_old of the completion and, for dumps, the entropy, [B, T].

        If TRL has log π_old already, there is no entropy.
        """
        if batch.get("old_per_token_logps") is not None:
            return batch["old_per_token_logps"], None
        tokens = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        if self.model.training:
            batch_size = self.args.per_device_train_batch_size
        else:
            batch_size = self.args.per_device_eval_batch_size
        model_inputs = {name: batch[name] for name in MODEL_INPUTS if name in batch}
        with torch.no_grad():
            old_BT, entropy_BT, _ = self._get_per_token_logps_and_entropies(  # type: ignore[attr-defined]
                self.model,
                tokens,
                attention,
                batch["completion_ids"].shape[1],
                batch_size=batch_size,
                compute_entropy=self._dump_dir is not None,
                **model_inputs,
            )
        return old_BT, entropy_BT

    def _apply(
        self,
        batch: dict[str, Any],
        correction: Correction[Tensor],
        old_BT: Tensor,
        rollout_BT: Tensor,
    ) -> None:
        """Writes weighted advantages into the batch, π_old in bypass mode, and the divisor."""
        config = self.rollout_correction
        if config.use_rollout_logprobs:
            # Bypass: π_old is the rollout policy, bounded because TRL takes exp of the log-ratio.
            batch["old_per_token_logps"] = torch.where(
                correction.mask, within_bound(rollout_BT, old_BT), old_BT
            )
        if not config.touches_loss:
            return
        batch["advantages"] = batch["advantages"][:, None] * correction.weights * correction.mask
        if config.rejection_normalizer == "kept":
            # completion_mask is also the attention mask, so tool_mask carries the rejection.
            accepted_BT = correction.mask.to(batch["completion_mask"].dtype)
            batch["tool_mask"] = accepted_BT
            batch["num_items_in_batch"] = self.accelerator.gather(accepted_BT.sum()).sum()

    def _report(self, metrics: dict[str, float], mode: str) -> None:
        """Adds metrics to TRL's log, with the alarms of a training batch."""
        for name, value in logged(metrics, all_metrics=self._log_all_metrics).items():
            self._metrics[mode][PREFIX + name].append(value)
        if mode != "train":
            return
        values = {f"train/{name}": value for name, value in metrics.items()}
        for name, of_trl in OTHER_METRICS.items():
            # `_metrics` is a defaultdict: a lookup would add the name to the log.
            if of_trl in self._metrics[mode]:
                values[name] = self._metrics[mode][of_trl][-1]
        health = self._health.check(self.state.global_step, values)
        for name, value in health.items():
            self._metrics[mode][name].append(value)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Checks gradient and clip, which TRL knows after the optimizer step, and logs."""
        if self.model.training and "grad_norm" in logs:
            # The last line of a run has no gradient, nor have the lines of an evaluation.
            is_finite = math.isfinite(logs["grad_norm"])
            values = {"train/nonfinite_gradient_steps": float(not is_finite)}
            clipped = self._metrics["train"].get(CLIPPED)
            if clipped:
                values["train/pg_clipfrac"] = sum(clipped) / len(clipped)
            logs.update(self._health.check(self.state.global_step, values))
        super().log(logs, start_time)  # type: ignore[misc]

    def _dump(
        self,
        batch: dict[str, Any],
        correction: Correction[Tensor],
        values: dict[str, Tensor | None],
        version_BT: Tensor | None,
    ) -> None:
        """Writes the file of a generation batch."""
        # Here, because a run without dumps needs no pyarrow.
        from slime_tis.analysis.dumps.files import write

        assert self._dump_dir is not None
        self._dump_dir.mkdir(parents=True, exist_ok=True)
        # A step may have several generation batches.
        self._batches += 1
        step = self.state.global_step
        rank = self.accelerator.process_index
        name = f"step_{step:07d}_{self._batches:07d}_rank_{rank}.parquet"
        write(self._dump_dir / name, self._table(batch, correction, values, version_BT))

    def _weighted_rewards(self, first: int, size: int) -> list[float | None]:
        """The weighted sums of the reward functions for this process's samples."""
        if self._rewards is None:
            return [None] * size
        weights = self.reward_weights.to(self._rewards.device)
        # As in TRL, a function that does not judge a sample gives NaN, which counts as 0.
        totals = (self._rewards * weights).nansum(1)
        rewards: list[float | None] = totals[first : first + size].tolist()
        return rewards

    def _table(
        self,
        batch: dict[str, Any],
        correction: Correction[Tensor],
        values: dict[str, Tensor | None],
        version_BT: Tensor | None,
    ) -> "TokenTable":
        """The tokens of a generation batch as a dump, with the weights and verdicts of the loss."""
        from slime_tis.analysis.dumps.table import SampleParts, TokenTable
        from slime_tis.analysis.dumps.what_if import annotated

        size = len(batch["completion_ids"])
        # TRL splits a generation batch evenly, in the order of the processes.
        first = self.accelerator.process_index * size
        rewards = self._weighted_rewards(first, size)
        columns = {**values, "rollout": batch["sampling_per_token_logps"]}
        rows = {name: x.float().cpu().numpy() for name, x in columns.items() if x is not None}
        lengths = batch["completion_mask"].sum(1).tolist()
        if version_BT is not None:
            rows["version"] = version_BT.cpu().numpy()
        # A processor of images and text contains the tokenizer.
        tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)
        samples = []
        accepted = []
        for i, length in enumerate(lengths):
            prompt = batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].cpu()
            completion = batch["completion_ids"][i, :length]
            entropy = None
            if "entropy" in rows:
                entropy = rows["entropy"][i, :length]
            weight_version = None
            if version_BT is not None:
                weight_version = rows["version"][i, :length]
            sample = SampleParts(
                train_log_prob=rows["train"][i, :length],
                rollout_log_prob=rows["rollout"][i, :length],
                loss_mask=rows["mask"][i, :length],
                token=completion.cpu().numpy(),
                entropy=entropy,
                bounded_weight=correction.weights[i, :length].cpu().numpy(),
                advantage=[float(batch["advantages"][i])] * length,
                weight_version=weight_version,
                prompt=prompt.numpy(),
                step=self.state.global_step,
                sample_index=first + i,
                group=(first + i) // self.num_generations,
                reward=rewards[i],
                text=tokenizer.decode(completion),
                prompt_text=tokenizer.decode(prompt),
            )
            samples.append(sample)
            accepted.append(correction.mask[i, :length])
        config = self.rollout_correction
        old_policy = "recomputed"
        if config.use_rollout_logprobs:
            old_policy = "rollout"
        metadata = {
            "source": "trl",
            "precision": PRECISIONS.get(self.model.dtype, str(self.model.dtype)),
            "old_policy": old_policy,
            "temperature": self.temperature,
        }
        if self._rollout_precision is not None:
            metadata["rollout_precision"] = self._rollout_precision
        table = TokenTable.from_parts(samples, metadata)
        accepted_N = torch.cat(accepted).cpu().numpy()
        return annotated(table, config, accepted=accepted_N, global_batch=correction.global_batch)


# For the type checker, GRPOTrainer is Any without TRL.
class CorrectedGRPOTrainer(RolloutCorrectionMixin, GRPOTrainer):  # type: ignore[misc]
    """TRL's GRPOTrainer with rollout correction; see `RolloutCorrectionMixin`."""


def check_options(trainer: Any, config: RolloutCorrectionConfig) -> None:
    """Refuses options that a weight on the advantage cannot express.

    Raises:
        ValueError: Names the option to change.
    """
    args = trainer.args
    message = ""
    if trainer.loss_type == "vespo":
        message = "loss_type 'vespo' has its own sequence weights; choose another loss_type"
    elif not trainer.use_vllm and trainer.rollout_func is None:
        message = (
            "the sampler gives no log-probs; set use_vllm=True, or pass a rollout_func that returns"
            " 'logprobs'"
        )
    elif config.touches_loss and args.off_policy_mask_threshold is not None:
        message = (
            "TRL's off_policy_mask_threshold also rejects sequences; unset it, or remove the"
            " rollout correction"
        )
    elif config.old_logprobs == "interpolate":
        message = (
            "old_logprobs 'interpolate' needs every token's weight version, which TRL does not"
            " record"
        )
    elif config.divergence_mask is not None and _changes_policy(args):
        message = (
            "divergence_mask compares the current policy, which changes within a generation batch"
            " here; set num_iterations=1 and steps_per_generation to gradient_accumulation_steps"
        )
    if message:
        raise ValueError(f"rollout correction in TRL: {message}.")


def _changes_policy(args: Any) -> bool:
    """Whether an optimizer step may fall within a generation batch, as TRL determines it."""
    generate_every: int = args.steps_per_generation * args.num_iterations
    return bool(args.gradient_accumulation_steps % generate_every != 0)
