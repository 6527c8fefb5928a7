"""The training engine: a Megatron-core model, its optimizer, and the passes over a batch."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial, reduce
from operator import itemgetter
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime_tis.hf_directory import moe_sizes
from slime_tis.policy.policy_loss import LossInputs, LossOutputs
from slime_tis.policy.step_sums import StepSums
from slime_tis.trainer.configs.megatron import MegatronConfig
from slime_tis.trainer.engines.weight_rounding import DTYPES
from slime_tis.trainer.megatron.architecture import HfConfig, build_model, padded_vocab_size
from slime_tis.trainer.megatron.batch import TrainingBatch
from slime_tis.trainer.megatron.hf_weights import (
    copied_weights,
    load_hf_weights,
    named_hf_tensors,
    replaced_weights,
)
from slime_tis.trainer.megatron.log_probs import (
    TokenDistribution,
    fused_linear_log_probs,
    vocab_parallel_log_probs,
)
from slime_tis.trainer.megatron.memory import (
    TokenBudget,
    bytes_per_token,
    free_memory,
    trim_before_gradient,
    trim_heap,
)
from slime_tis.trainer.megatron.micro_batches import PrefixTree, load_of, token_budget_partitions
from slime_tis.trainer.megatron.packing import MicroBatch, RowSplit, pack
from slime_tis.trainer.megatron.parallel import Parallel
from slime_tis.trainer.megatron.routing_replay import RoutingRecord, RoutingReplay

Loss = Callable[[LossInputs], LossOutputs]
MIN_LOSS_SCALE = 1.0
"""A gradient that is not finite at this scale is not an overflow."""
OnLogProbs = Callable[..., Any]
"""Called on the last pipeline stage with a micro-batch and its tokens' log-probs, entropies and, if
asked, Σ π² [L]."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One optimizer step on this rank."""

    sums: StepSums | None
    """Of this rank's micro-batches; None except on the last pipeline stage."""
    grad_norm: float
    """Before clipping, on every rank. If gradient or loss are not finite, it is not finite and no
    step was made."""
    learning_rate: float
    loss_denominator: int
    """Tokens or sequences of the global batch that the loss was divided by; 0 means that no step
    was made."""
    loss_scale: float | None = None
    """Of this step, under --fp16."""
    overflowed: bool = False
    """The scaled gradient left float16's range: no step was made, and the loss scale falls."""

    @property
    def is_finite(self) -> bool:
        """Whether gradient and loss are finite.

        True also for an fp16 overflow, which lowers the loss scale.
        """
        return self.overflowed or math.isfinite(self.grad_norm)


class TrainingEngine:
    """A policy in Megatron-core: log-probs, training steps, and its weights under Hugging Face names."""

    def __init__(  # noqa: PLR0913
        self,
        config: MegatronConfig,
        parallel: Parallel,
        *,
        temperature: float,
        total_steps: int,
        keep_reference: bool = False,
        entropy_gradient: bool = False,
        gives_logits: bool = False,
        timer: Callable[[str], AbstractContextManager[Any]] = lambda name: nullcontext(),
        check_interrupts: Callable[[], None] = lambda: None,
    ) -> None:
        self.config, self.parallel, self.temperature = config, parallel, temperature
        self.entropy_gradient, self.gives_logits = entropy_gradient, gives_logits
        self.timer, self.check_interrupts = timer, check_interrupts
        self.model = build_model(config.hf_checkpoint, config, parallel)
        self.routing = RoutingReplay(
            self.model.module,
            moe_sizes(self.model.hf_config),
            parallel,
            sequence_parallel=config.sequence_parallel,
        )
        self.reference = self._load_weights(keep_reference)
        module = self.model.module
        module = module if config.precision == "fp32" else Float16Module(self.model.config, module)
        self.ddp = wrap(module, self.model.config, config)
        self.optimizer = _adam(config, self.ddp)
        self.model.config.grad_scale_func = self.optimizer.scale_loss if config.fp16 else None
        self.scheduler = _schedule(config, self.optimizer, total_steps)
        self.model.config.finalize_model_grads_func = self._finalize
        logits = self.model.hf_config.vocab_size if gives_logits else 0
        self._token_bytes = bytes_per_token(self.model.config, logits, config.log_probs_chunk_size)
        if parallel.is_first_stage:
            self.model.module.embedding.register_forward_hook(
                partial(trim_before_gradient, self._token_bytes)
            )
        self.loss_denominator = torch.zeros([], dtype=torch.int)
        self.poison = torch.zeros([], device=parallel.device)
        """NaN if a loss was not finite, else 0; added to the gradient."""
        self.contributing = torch.zeros([], dtype=torch.float64, device=parallel.device)
        """Sum of `LossOutputs.contributing` over the micro-batches of this rank."""
        self.no_shared_prompts = why_not_shared(
            config.share_prompts, parallel, self.model.hf_config
        )
        self.token_budget = self._token_budget()
        """None if micro-batches have a fixed number of samples."""
        self._skips = self._sums_squares = False

    def log_probs(
        self,
        batch: TrainingBatch,
        partition: Sequence[Sequence[int]],
        *,
        record: RoutingRecord | None = None,
        source: RoutingRecord | None = None,
        replays_routing: bool = True,
        sums_squares: bool = False,
    ) -> Tensor:
        """Log-probs [L] of the response tokens in the micro-batches `partition`; NaN except on the last stage.

        With `sums_squares`, Σ_v π_v² is a second column, [L, 2].
        """

        def columns(_: MicroBatch, log_probs_L: Tensor, __: Tensor, *squares: Tensor) -> Tensor:
            return torch.stack([log_probs_L, *squares], 1) if squares else log_probs_L

        self.routing.begin(trains=False, replays=replays_routing, record=record, source=source)
        self._sums_squares = sums_squares
        with torch.no_grad():
            outputs = self._run(batch, partition, columns, forward_only=True)
        self._sums_squares = False
        lengths = batch.responses.lengths
        if not self.parallel.is_last_stage:
            shape = (sum(lengths), *((2,) if sums_squares else ()))
            return torch.full(shape, math.nan, device=self.parallel.device)
        order = [sample for samples in partition for sample in samples]
        per_sample = torch.cat(outputs).split([lengths[sample] for sample in order])
        return torch.cat(
            [values for _, values in sorted(zip(order, per_sample, strict=True), key=itemgetter(0))]
        )

    @contextmanager
    def at_temperature(self, temperature: float) -> Iterator[None]:
        """Computes log-probs at another temperature inside the block."""
        previous, self.temperature = self.temperature, temperature
        try:
            yield
        finally:
            self.temperature = previous

    def reference_log_probs(
        self, batch: TrainingBatch, partition: Sequence[Sequence[int]]
    ) -> Tensor:
        """`log_probs` of the reference policy, without routing replay."""
        if self.reference is None:
            raise ValueError(
                "the engine has no reference policy: build the engine with keep_reference=True"
            )
        with replaced_weights(self.model.module, self.reference):
            return self.log_probs(batch.with_routing(None, None), partition)

    def train_step(
        self,
        batch: TrainingBatch,
        partition: Sequence[Sequence[int]],
        loss: Loss,
        *,
        source: RoutingRecord | None = None,
        scales_with_advantages: bool = False,
        rate_scale: Callable[[StepSums | None], float] = lambda sums: 1.0,
    ) -> StepResult:
        """Forward and backward over the micro-batches, gradients averaged over the global batch, one Adam step.

        The weights stay if the whole global batch is rejected: a step on a zero gradient would
        still move them by momentum and weight decay. They also stay if the gradient is not finite.

        `scales_with_advantages`: each token's loss is a multiple of its advantage, so that the
        backward pass of a micro-batch without advantages may be skipped. `source`: see
        `RoutingReplay.begin`. `rate_scale`: gives the factor of the learning rate from this rank's
        sums; every rank calls it.
        """
        self._skips = scales_with_advantages and self.skips_backward
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.poison.zero_()
        self.contributing.zero_()
        self.routing.begin(trains=True, source=source)
        with self.timer("forward_backward"):
            sums = self._run(batch, partition, partial(self._loss, loss=loss), forward_only=False)
        self._skips = False
        contributes = self.parallel.largest(int(self.contributing > 0)) > 0
        loss_denominator = int(self.loss_denominator) if contributes else 0
        grad_norm = 0.0
        merged = reduce(lambda left, right: left.merge(right), sums) if sums else None
        loss_scale = float(self.optimizer.get_loss_scale()) if self.config.fp16 else None
        if loss_denominator > 0:
            with self.timer("optimizer_step"):
                grad_norm = self._step_if_finite(rate_scale(merged))
        return StepResult(
            sums=merged,
            grad_norm=grad_norm,
            learning_rate=self.optimizer.param_groups[0]["lr"],
            loss_denominator=loss_denominator,
            loss_scale=loss_scale,
            overflowed=not math.isfinite(grad_norm) and self._can_overflow(loss_scale),
        )

    def weights_are_finite(self) -> bool:
        """Whether all weights are finite on all ranks; a collective with one host synchronization."""
        finite = [weight.detach().isfinite().all() for weight in self.model.module.parameters()]
        return not self.parallel.largest(int(~torch.stack(finite).all()))

    def micro_batches(
        self,
        tokens_of_ranks: Sequence[Sequence[Sequence[int]]],
        responses_of_ranks: Sequence[Sequence[int]],
        rollouts_of_ranks: Sequence[Sequence[int]],
    ) -> tuple[list[list[int]], float | None]:
        """This data-parallel rank's micro-batches, given token ids, response lengths and rollouts of every rank.

        Returns:
            The samples of each micro-batch. Tokens of the largest micro-batch of all ranks, divided
            by the token budget; None without a budget.
        """
        rank = self.parallel.data_rank
        if self.token_budget is None:
            assert self.config.micro_batch_size is not None
            partition: dict[int, list[int]] = {}
            for sample, rollout in enumerate(rollouts_of_ranks[rank]):
                partition.setdefault(rollout // self.config.micro_batch_size, []).append(sample)
            return list(partition.values()), None
        trees = [
            (
                PrefixTree.of(tokens, responses)
                if self.shares_prompts
                else PrefixTree.apart(map(len, tokens), responses)
            )
            for tokens, responses in zip(tokens_of_ranks, responses_of_ranks, strict=True)
        ]
        budget = self.token_budget.tokens * self.parallel.context_size
        partitions = token_budget_partitions(trees, budget, rollouts_of_ranks)
        largest = max(
            load_of(tree, samples)
            for tree, partition in zip(trees, partitions, strict=True)
            for samples in partition
        )
        return partitions[rank], largest / budget

    @property
    def skips_backward(self) -> bool:
        """Whether backward passes do not communicate with ranks that have other tokens, so that a rank may skip one."""
        parallel = self.parallel
        return (
            parallel.context_size == parallel.pipeline_size == 1
            and moe_sizes(self.model.hf_config) is None
        )

    @property
    def shares_prompts(self) -> bool:
        """Whether the shared beginnings of a micro-batch's samples are computed once."""
        return self.no_shared_prompts is None

    def keep_token_budget(self, tokens: int | None) -> None:
        """Keeps the budget of the resumed run, unless options set the budget or `tokens` is None."""
        if (
            tokens is not None
            and self.token_budget is not None
            and self.token_budget.reason is not None
        ):
            self.token_budget = TokenBudget(tokens=tokens, reason="as before this run was resumed")

    def named_hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The weights as whole tensors under Hugging Face names; a collective (see hf_weights)."""
        return named_hf_tensors(self.model, self.parallel)

    def _load_weights(self, keep_reference: bool) -> dict[str, Tensor] | None:
        """Loads the policy's weights; returns a copy of the reference policy's weights if `keep_reference`."""
        config, reference = self.config, None
        if keep_reference and config.ref_load not in (None, config.hf_checkpoint):
            load_hf_weights(self.model, config.ref_load, self.parallel)
            reference = copied_weights(self.model.module)
        load_hf_weights(self.model, config.hf_checkpoint, self.parallel)
        return (
            copied_weights(self.model.module) if keep_reference and reference is None else reference
        )

    def _token_budget(self) -> TokenBudget | None:
        config, parallel = self.config, self.parallel
        if config.use_dynamic_batch_size:
            assert config.max_tokens_per_gpu is not None
            return TokenBudget(tokens=config.max_tokens_per_gpu)
        if config.micro_batch_size is not None:
            return None
        weights = list(self.model.module.parameters())
        moments = 8 * sum(
            weight.numel() for weight in weights
        )  # Adam allocates them in its first step
        gradient = max(
            weight.nbytes for weight in weights
        )  # autograd's, before it is added to main_grad
        free = free_memory(parallel.device, parallel.local_size) - moments - gradient
        return TokenBudget.that_fits(max(-parallel.largest(-free), 0), self._token_bytes)

    def _run(
        self,
        batch: TrainingBatch,
        partition: Sequence[Sequence[int]],
        on_log_probs: OnLogProbs,
        *,
        forward_only: bool,
    ) -> list[Any]:
        """Results of `on_log_probs` on the last stage for each micro-batch; in training, their third values."""
        self.ddp.train(not forward_only)
        lengths = batch.responses.total_lengths
        outputs: list[Any] = get_forward_backward_func()(
            forward_step_func=partial(self._forward_step, on_log_probs=on_log_probs),
            data_iterator=self._packed(batch, partition),
            model=[self.ddp],
            num_microbatches=len(partition),
            seq_length=max(sum(lengths[i] for i in samples) for samples in partition),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        self.routing.end()
        return outputs

    def _packed(
        self, batch: TrainingBatch, partition: Sequence[Sequence[int]]
    ) -> Iterator[MicroBatch]:
        for samples in partition:
            self.check_interrupts()
            yield self._pack(batch.select(samples))

    def _pack(self, batch: TrainingBatch) -> MicroBatch:
        parallel = self.parallel
        split = RowSplit(
            context_rank=parallel.context_rank,
            context_size=parallel.context_size,
            tensor_size=parallel.tensor_size if self.config.sequence_parallel else 1,
        )
        micro = pack(batch, split, rotary=self.model.rotary, share_prompts=self.shares_prompts)
        micro = micro.to(parallel.device)
        micro.packed_seq_params.gives_logits = self.gives_logits and self.ddp.training
        advantages_L = batch.responses.advantages_L
        if self._skips and advantages_L is not None and not advantages_L.any():
            return replace(micro, has_gradient=False)
        return micro

    def _forward_step(
        self, micro_batches: Iterator[MicroBatch], module: torch.nn.Module, on_log_probs: OnLogProbs
    ) -> tuple[Tensor, Callable[..., Any]]:
        micro = next(micro_batches)
        self.routing.fill(micro)
        clock = partial(self.timer, "forward") if module.training else nullcontext
        differentiates = micro.has_gradient and torch.is_grad_enabled()
        with clock(), torch.set_grad_enabled(differentiates):
            output = module(
                input_ids=micro.input_ids,
                position_ids=micro.position_ids,
                attention_mask=None,
                packed_seq_params=micro.packed_seq_params,
            )
        if output.requires_grad:  # frees temporaries before the backward pass allocates others
            trim_heap(output.device, self._token_bytes * micro.input_ids.numel())

        def last_stage(output: Tensor, non_loss_data: bool = False) -> Any:
            with (
                clock(),
                torch.set_grad_enabled(differentiates),
            ):  # megatron-core differentiates outputs with gradient
                if not micro.packed_seq_params.gives_logits:
                    return on_log_probs(micro, *self._from_hidden_states(output[:, 0], micro))
                output.detach()[
                    ..., self._distribution(micro).width(output.shape[-1]) :
                ] = -torch.inf
                return on_log_probs(
                    replace(micro, logits=output.clone()), *self._from_logits(output[0], micro)
                )

        return output, last_stage

    def _distribution(self, micro: MicroBatch) -> TokenDistribution:
        vocab_size, rank, size = (
            self.model.hf_config.vocab_size,
            self.parallel.tensor_rank,
            self.parallel.tensor_size,
        )
        return TokenDistribution(
            temperature=self.temperature,
            sampling_mask=micro.sampling_mask,
            group=self.parallel.tensor_group,
            vocab_start=rank * padded_vocab_size(vocab_size, size) // size,
            vocab_size=vocab_size,
            chunk_size=self.config.log_probs_chunk_size,
            entropy_gradient=self.entropy_gradient,
            sums_squares=self._sums_squares,
        )

    def _from_hidden_states(self, hidden_LI: Tensor, micro: MicroBatch) -> tuple[Tensor, ...]:
        weight_OI = self.model.module.output_weight()
        main_grad_OI: Tensor = weight_OI.main_grad  # type: ignore[attr-defined]  # megatron-core's
        return fused_linear_log_probs(
            hidden_LI, weight_OI, micro.target_L, self._distribution(micro), main_grad_OI
        )

    def _from_logits(self, logits: Tensor, micro: MicroBatch) -> tuple[Tensor, ...]:
        return vocab_parallel_log_probs(logits, micro.target_L, self._distribution(micro))

    def _loss(
        self, micro: MicroBatch, log_probs_L: Tensor, entropy_L: Tensor, loss: Loss
    ) -> tuple[Tensor, Tensor, StepSums]:
        inputs = LossInputs(tokens=micro.responses, log_probs_L=log_probs_L, entropy_L=entropy_L)
        if micro.logits is not None:
            sequences = [tokens.to(micro.logits.device) for tokens in micro.sequences]
            inputs = replace(inputs, sequences=sequences, logits=micro.logits)
        outputs = loss(inputs)
        self.poison += outputs.numerator.detach() * 0.0
        self.contributing += outputs.contributing
        return outputs.numerator, outputs.denominator, outputs.sums

    def _step_if_finite(self, rate_scale: float) -> float:
        """Clips the gradient and steps, unless the gradient's norm is not finite; returns the norm before clipping."""
        norm = math.nan if self.optimizer.prepare_grads() else float(self.optimizer.get_grad_norm())
        if not math.isfinite(norm):
            return norm
        self.scheduler.step(1)
        for group in self.optimizer.param_groups:
            group["lr"] *= rate_scale
        for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            parameters = [] if part.is_stub_optimizer else part.get_parameters()
            if parameters and self.config.clip_grad > 0:
                clip_grad_by_total_norm_fp32(parameters, self.config.clip_grad, norm)
        self.optimizer.step_with_ready_grads()
        return norm

    def _can_overflow(self, loss_scale: float | None) -> bool:
        """Whether a gradient that is not finite may be due to the loss scale; a collective under --fp16."""
        if loss_scale is None or loss_scale <= MIN_LOSS_SCALE:
            return False
        return self.parallel.largest(int(not torch.isfinite(self.poison))) == 0

    def _finalize(self, model: list[torch.nn.Module], num_tokens: Tensor, **kwargs: Any) -> None:
        """megatron-core's gradient reduction, which divides by the global batch's denominator; stores the denominator.

        A loss that is not finite poisons the gradient: all ranks learn of it from the gradient's
        norm.
        """
        next(self.model.module.parameters()).main_grad.view(-1)[:1].add_(self.poison)
        finalize_model_grads(model, num_tokens, **kwargs)
        self.loss_denominator = num_tokens


def wrap(
    module: torch.nn.Module, transformer: TransformerConfig, config: MegatronConfig
) -> DistributedDataParallel:
    """The model with megatron-core's gradient buffers."""
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=config.use_distributed_optimizer,
    )
    return DistributedDataParallel(transformer, options, module)


def _adam(config: MegatronConfig, model: DistributedDataParallel) -> Any:
    names = {field.name for field in fields(OptimizerConfig)} & {
        field.name for field in fields(config)
    }
    options = OptimizerConfig(
        optimizer="adam",
        min_loss_scale=MIN_LOSS_SCALE,
        params_dtype=DTYPES[config.precision],
        **{name: getattr(config, name) for name in names},
    )
    return get_megatron_optimizer(options, [model], use_gloo_process_groups=False)


def _schedule(config: MegatronConfig, optimizer: Any, total_steps: int) -> OptimizerParamScheduler:
    decay_steps = max(config.lr_decay_iters or total_steps, config.lr_warmup_iters + 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        lr_warmup_steps=config.lr_warmup_iters,
        max_lr=config.lr,
        lr_decay_style=config.lr_decay_style,
        lr_decay_steps=decay_steps,
        min_lr=config.min_lr,
        wd_incr_style="constant",
        wd_incr_steps=decay_steps,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def why_not_shared(requested: bool | None, parallel: Parallel, hf_config: HfConfig) -> str | None:
    """Why prompts are computed for each sample, for the user; None if shared prompts are computed once."""
    if requested is False:
        return "--no-share-prompts"
    reason = None
    if parallel.context_size > 1:
        reason = "context parallelism cuts every sequence into slices"
    elif moe_sizes(hf_config) is not None:
        reason = "the routing of experts is recorded, replayed and counted for each sample"
    elif parallel.device.type != "cpu":
        reason = "attention to a shared prompt needs a CPU"
    if reason is not None and requested:
        raise ValueError(f"--share-prompts is on but {reason}; remove it.")
    return reason
