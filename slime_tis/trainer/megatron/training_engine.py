"""The training engine: a Megatron-core model, its optimizer, and the passes over a batch."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
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

from slime_tis.families import delta_net_layers
from slime_tis.hf_directory import moe_sizes
from slime_tis.policy.loss_inputs import LossInputs
from slime_tis.policy.policy_loss import LossOutputs
from slime_tis.policy.step_sums import StepSums
from slime_tis.trainer.configs.megatron import MegatronConfig
from slime_tis.trainer.engines.weight_rounding import DTYPES
from slime_tis.trainer.invariant.self_check import HEAD, Kernels
from slime_tis.trainer.megatron.architecture import (
    HfConfig,
    build_model,
    fields_in_common,
    padded_vocab_size,
)
from slime_tis.trainer.megatron.batch import TrainingBatch
from slime_tis.trainer.megatron.frozen_weights import begin_graph, freeze_weights
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
from slime_tis.trainer.megatron.lora import without_adapters
from slime_tis.trainer.megatron.lora_weights import load_adapter, named_adapter_tensors
from slime_tis.trainer.megatron.memory import (
    TokenBudget,
    bytes_per_token,
    free_memory,
    trim_before_gradient,
    trim_heap,
)
from slime_tis.trainer.megatron.micro_batches import (
    PrefixTree,
    in_sample_order,
    load_of,
    token_budget_partitions,
)
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
    """Sums over this rank's micro-batches; None except on the last pipeline stage."""
    grad_norm: float
    """The norm before clipping, equal on all ranks. If the gradient or the loss is not finite, the
    norm is not finite and the weights do not change."""
    learning_rate: float
    loss_denominator: int
    """Tokens or sequences of the global batch by which the loss was divided. If it is 0, the
    weights do not change."""
    loss_scale: float | None = None
    """The loss scale of this step; None without --fp16."""
    overflowed: bool = False
    """Whether the scaled gradient exceeded float16's range. Then the weights do not change, and the
    loss scale falls."""

    @property
    def is_finite(self) -> bool:
        """Whether gradient and loss are finite.

        True also for an fp16 overflow, which lowers the loss scale.
        """
        return self.overflowed or math.isfinite(self.grad_norm)


class TrainingEngine:
    """A policy in megatron-core.

    It computes log-probs, makes training steps and exports weights under Hugging Face names.
    """

    def __init__(  # noqa: PLR0913
        self,
        config: MegatronConfig,
        parallel: Parallel,
        *,
        temperature: float,
        total_steps: int,
        keep_reference: bool = False,
        saves_reference: bool = False,
        entropy_gradient: bool = False,
        gives_logits: bool = False,
        kernels: Kernels | None = None,
        timer: Callable[[str], AbstractContextManager[Any]] = lambda name: nullcontext(),
        check_interrupts: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self.parallel = parallel
        self.temperature = temperature
        self.entropy_gradient = entropy_gradient
        self.gives_logits = gives_logits
        self.kernels = kernels
        """Operations that the rollout engine shares; None if each engine has its own."""
        self.saves_reference = saves_reference
        """Whether a checkpoint has the reference policy, because it changes during the run."""
        self.timer = timer
        self.check_interrupts = check_interrupts
        self.model = build_model(config.hf_checkpoint, config, parallel, kernels)
        freeze_weights(self.model, config, parallel)
        self.routing = RoutingReplay(
            self.model.module,
            moe_sizes(self.model.hf_config),
            parallel,
            sequence_parallel=config.sequence_parallel,
        )
        self.has_reference = keep_reference
        self.reference = self._load_weights(keep_reference)
        module = self.model.module
        if config.precision != "fp32":
            module = Float16Module(self.model.config, module)
        self.ddp = wrap(module, self.model.config, config)
        self.optimizer = _adam(config, self.ddp)
        if config.fp16:
            self.model.config.grad_scale_func = self.optimizer.scale_loss
        self.scheduler = _schedule(config, self.optimizer, total_steps)
        self.model.config.finalize_model_grads_func = self._finalize
        logits = self.model.hf_config.vocab_size if gives_logits else 0
        self._token_bytes = bytes_per_token(self.model.config, logits, config.log_probs_chunk_size)
        if parallel.is_first_stage:
            embedding = self.model.module.embedding
            embedding.register_forward_hook(partial(trim_before_gradient, self._token_bytes))
            if config.recompute_granularity == "full":
                embedding.register_forward_hook(begin_graph)
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
        self._skips = False
        self._sums_squares = False

    def log_probs(
        self,
        batch: TrainingBatch,
        partition: Sequence[Sequence[int]],
        *,
        record: RoutingRecord | None = None,
        source: RoutingRecord | None = None,
        replays_routing: bool = True,
        sums_squares: bool = False,
        gives_entropy: bool = False,
    ) -> Tensor:
        """Computes the log-probs [L] of response tokens, or columns [L, n] with further values.

        Args:
            batch: The samples of this rank.
            partition: Samples per micro-batch.
            record: Receives the routing of this pass.
            source: Routing to replay, see `RoutingReplay.begin`.
            replays_routing: Whether the recorded experts are replayed.
            sums_squares: Adds Σ_v π_v² as the last column.
            gives_entropy: Adds the entropy as the second column.

        Returns:
            Values in the order of the samples; NaN except on the last pipeline stage.
        """
        num_columns = 1 + gives_entropy + sums_squares

        def columns(_: MicroBatch, log_probs_L: Tensor, entropy_L: Tensor, *rest: Tensor) -> Tensor:
            if num_columns == 1:
                return log_probs_L
            entropies = [entropy_L] if gives_entropy else []
            return torch.stack([log_probs_L, *entropies, *rest], 1)

        self.routing.begin(trains=False, replays=replays_routing, record=record, source=source)
        self._sums_squares = sums_squares
        with torch.no_grad():
            outputs = self._run(batch, partition, columns, forward_only=True)
        self._sums_squares = False
        lengths = batch.responses.lengths
        if not self.parallel.is_last_stage:
            shape = [sum(lengths)]
            if num_columns > 1:
                shape.append(num_columns)
            return torch.full(shape, math.nan, device=self.parallel.device)
        return in_sample_order(torch.cat(outputs), partition, lengths)

    @contextmanager
    def at_temperature(self, temperature: float) -> Iterator[None]:
        """Computes log-probs at another temperature inside the block."""
        previous = self.temperature
        self.temperature = temperature
        try:
            yield
        finally:
            self.temperature = previous

    def reference_log_probs(
        self, batch: TrainingBatch, partition: Sequence[Sequence[int]]
    ) -> Tensor:
        """Computes `log_probs` of the reference policy, without routing replay."""
        if not self.has_reference:
            raise ValueError(
                "the engine has no reference policy: build the engine with keep_reference=True"
            )
        with self.as_reference():
            return self.log_probs(batch.with_routing(None, None), partition)

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Inside the block, the module is the reference policy: always without LoRA adapters."""
        module = self.model.module
        with ExitStack() as changes:
            changes.enter_context(without_adapters(module))
            if self.reference is not None:
                changes.enter_context(replaced_weights(module, self.reference))
            yield

    def update_reference(self) -> None:
        """Makes the policy the reference policy."""
        self.has_reference = True
        self.reference = copied_weights(self.model.module)

    def train_step(
        self,
        batch: TrainingBatch,
        partition: Sequence[Sequence[int]],
        loss: Loss,
        *,
        source: RoutingRecord | None = None,
        scales_with_advantages: bool = False,
        before_step: Callable[[], None] = lambda: None,
        rate_scale: Callable[[StepSums | None], float] = lambda sums: 1.0,
    ) -> StepResult:
        """Makes one Adam step on the gradient of the global batch.

        The weights do not change if all tokens of the global batch are rejected: a step on a zero
        gradient would still move them by momentum and weight decay. They also do not change if the
        gradient is not finite.

        Args:
            batch: The samples of this rank.
            partition: Samples per micro-batch.
            loss: The loss of a micro-batch.
            source: Routing to replay, see `RoutingReplay.begin`.
            scales_with_advantages: Whether a token with advantage 0 has no gradient. Then the
                backward pass of a micro-batch without advantages may be skipped.
            before_step: Called on every rank after the backward passes, before the weights change.
            rate_scale: Returns the factor of the learning rate from this rank's sums. Every rank
                calls it.
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
        before_step()
        contributes = self.parallel.largest(int(self.contributing > 0)) > 0
        loss_denominator = int(self.loss_denominator) if contributes else 0
        merged: StepSums | None = None  # except on the last pipeline stage
        for micro_sums in sums:
            merged = micro_sums if merged is None else merged.merge(micro_sums)
        loss_scale = None
        if self.config.fp16:
            # before the step, which may change it
            loss_scale = float(self.optimizer.get_loss_scale())
        grad_norm = 0.0
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
        """Returns whether all weights are finite on all ranks.

        A collective with one host synchronization.
        """
        finite = [weight.detach().isfinite().all() for weight in self.model.module.parameters()]
        return not self.parallel.largest(int(~torch.stack(finite).all()))

    def micro_batches(
        self,
        tokens_of_ranks: Sequence[Sequence[Sequence[int]]],
        responses_of_ranks: Sequence[Sequence[int]],
        rollouts_of_ranks: Sequence[Sequence[int]],
    ) -> tuple[list[list[int]], float | None]:
        """Divides the samples of this data-parallel rank into micro-batches.

        Args:
            tokens_of_ranks: Token ids, per data-parallel rank and sample.
            responses_of_ranks: Response lengths, per rank and sample.
            rollouts_of_ranks: Rollout numbers, per rank and sample.

        Returns:
            Samples per micro-batch. Tokens of the largest micro-batch of all ranks, divided by the
            token budget; None without a budget.
        """
        rank = self.parallel.data_rank
        if self.token_budget is None:
            assert self.config.micro_batch_size is not None
            partition: dict[int, list[int]] = {}
            for sample, rollout in enumerate(rollouts_of_ranks[rank]):
                partition.setdefault(rollout // self.config.micro_batch_size, []).append(sample)
            return list(partition.values()), None
        trees = []
        for tokens, responses in zip(tokens_of_ranks, responses_of_ranks, strict=True):
            if self.shares_prompts:
                trees.append(PrefixTree.of(tokens, responses))
            else:
                trees.append(PrefixTree.apart(map(len, tokens), responses))
        # The budget is per rank, and context-parallel ranks divide each micro-batch.
        budget = self.token_budget.tokens * self.parallel.context_size
        partitions = token_budget_partitions(trees, budget, rollouts_of_ranks)
        loads = []
        for tree, samples_of_micro_batches in zip(trees, partitions, strict=True):
            for samples in samples_of_micro_batches:
                loads.append(load_of(tree, samples))
        return partitions[rank], max(loads) / budget

    @property
    def skips_backward(self) -> bool:
        """Whether a rank may skip the backward pass of a micro-batch.

        Only if backward passes do not communicate with ranks that have other tokens.
        """
        parallel = self.parallel
        is_dense = moe_sizes(self.model.hf_config) is None
        return parallel.context_size == 1 and parallel.pipeline_size == 1 and is_dense

    @property
    def shares_prompts(self) -> bool:
        """Whether common beginnings of a micro-batch's samples are computed once."""
        return self.no_shared_prompts is None

    def keep_token_budget(self, tokens: int | None) -> None:
        """Sets the budget of the resumed run, unless `tokens` is None or options set the budget."""
        current = self.token_budget
        if tokens is not None and current is not None and current.reason is not None:
            self.token_budget = TokenBudget(tokens=tokens, reason="as before this run was resumed")

    def parameter_counts(self) -> tuple[int, int]:
        """Returns how many parameters of this rank are trained, and how many it has."""
        trained = sum(weight.numel() for weight in self._trained_weights())
        return trained, sum(weight.numel() for weight in self.model.module.parameters())

    def named_hf_tensors(self, *, rounds_merged: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yields complete weights under Hugging Face names; a collective (see hf_weights)."""
        return named_hf_tensors(self.model, self.parallel, rounds_merged=rounds_merged)

    def named_adapter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields complete A and B of LoRA adapters by PEFT's names; a collective."""
        return named_adapter_tensors(self.model, self.parallel)

    def _load_weights(self, keep_reference: bool) -> dict[str, Tensor] | None:
        """Loads the policy's weights.

        Returns:
            A copy of the reference policy's weights; None unless `keep_reference`, and with LoRA
            adapters if the reference policy has the same frozen weights.
        """
        config = self.config
        reference = None
        if keep_reference and config.ref_load not in (None, config.hf_checkpoint):
            load_hf_weights(self.model, config.ref_load, self.parallel)
            reference = copied_weights(self.model.module)
        load_hf_weights(self.model, config.hf_checkpoint, self.parallel)
        if config.lora_adapter_path is not None:
            load_adapter(self.model, config.lora_adapter_path, self.parallel)
        if keep_reference and reference is None and not config.trains_adapters:
            reference = copied_weights(self.model.module)
        return reference

    def _trained_weights(self) -> list[Tensor]:
        """Returns this rank's weights that have a gradient: at least one (see frozen_weights)."""
        return [weight for weight in self.model.module.parameters() if weight.requires_grad]

    def _token_budget(self) -> TokenBudget | None:
        config = self.config
        parallel = self.parallel
        if config.use_dynamic_batch_size:
            assert config.max_tokens_per_gpu is not None
            return TokenBudget(tokens=config.max_tokens_per_gpu)
        if config.micro_batch_size is not None:
            return None
        weights = self._trained_weights()
        # Two float32 moments per value, which Adam allocates in its first step.
        moments = 8 * sum(weight.numel() for weight in weights)
        # Autograd's gradient of one weight exists until it is added to main_grad.
        gradient = max(weight.nbytes for weight in weights)
        free = free_memory(parallel.device, parallel.local_size) - moments - gradient
        if config.async_save and parallel.device.type == "cpu":
            # copies of weights and optimizer state, while they are written
            free -= moments + sum(weight.nbytes for weight in self.model.module.parameters())
        least_free = -parallel.largest(-free)  # of all ranks
        return TokenBudget.that_fits(max(least_free, 0), self._token_bytes)

    def _run(
        self,
        batch: TrainingBatch,
        partition: Sequence[Sequence[int]],
        on_log_probs: OnLogProbs,
        *,
        forward_only: bool,
    ) -> list[Any]:
        """Runs megatron-core's schedule over the micro-batches.

        Returns:
            The result of `on_log_probs` for each micro-batch, or in training its third value; empty
            except on the last pipeline stage.
        """
        self.ddp.train(not forward_only)
        lengths = batch.responses.total_lengths
        longest = 0
        for samples in partition:
            longest = max(longest, sum(lengths[sample] for sample in samples))
        outputs: list[Any] = get_forward_backward_func()(
            forward_step_func=partial(self._forward_step, on_log_probs=on_log_probs),
            data_iterator=self._packed(batch, partition),
            model=[self.ddp],
            num_microbatches=len(partition),
            seq_length=longest,
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
        micro = pack(
            batch,
            split,
            rotary=self.model.rotary,
            share_prompts=self.shares_prompts,
            # A recurrence keeps many values for each token of a padded row.
            limits_padding=bool(delta_net_layers(self.model.hf_config)),
        )
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
        clock: Callable[[], AbstractContextManager[Any]] = nullcontext
        if module.training:
            clock = partial(self.timer, "forward")
        differentiates = micro.has_gradient and torch.is_grad_enabled()
        with clock(), torch.set_grad_enabled(differentiates):
            output = module(
                input_ids=micro.input_ids,
                position_ids=micro.position_ids,
                attention_mask=None,
                packed_seq_params=micro.packed_seq_params,
            )
        if output.requires_grad:
            # frees temporaries before the backward pass allocates others
            trim_heap(output.device, self._token_bytes * micro.input_ids.numel())

        def last_stage(output: Tensor, non_loss_data: bool = False) -> Any:
            # megatron-core runs the backward pass of every loss that requires a gradient.
            with clock(), torch.set_grad_enabled(differentiates):
                if not micro.packed_seq_params.gives_logits:
                    values = self._from_hidden_states(output[:, 0], micro)
                    return on_log_probs(micro, *values)
                # The columns that pad the vocabulary are not tokens.
                width = self._distribution(micro).width(output.shape[-1])
                output.detach()[..., width:] = -torch.inf
                # A copy: the computation of log-probs overwrites float32 logits.
                with_logits = replace(micro, logits=output.clone())
                return on_log_probs(with_logits, *self._from_logits(output[0], micro))

        return output, last_stage

    def _distribution(self, micro: MicroBatch) -> TokenDistribution:
        size = self.parallel.tensor_size
        vocab_size = self.model.hf_config.vocab_size
        rows_per_rank = padded_vocab_size(vocab_size, size) // size
        tiles = None
        if self.kernels is not None:
            tiles = self.kernels.tiles[HEAD]
        return TokenDistribution(
            temperature=self.temperature,
            sampling_mask=micro.sampling_mask,
            group=self.parallel.tensor_group,
            vocab_start=self.parallel.tensor_rank * rows_per_rank,
            vocab_size=vocab_size,
            chunk_size=self.config.log_probs_chunk_size,
            entropy_gradient=self.entropy_gradient,
            sums_squares=self._sums_squares,
            tiles=tiles,
        )

    def _from_hidden_states(self, hidden_LI: Tensor, micro: MicroBatch) -> tuple[Tensor, ...]:
        weight_OI = self.model.module.output_weight()
        # a frozen weight has no gradient
        main_grad_OI: Tensor | None = getattr(weight_OI, "main_grad", None)
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
        self.poison += outputs.numerator.detach() * 0.0  # NaN if the loss is not finite
        self.contributing += outputs.contributing
        return outputs.numerator, outputs.denominator, outputs.sums

    def _step_if_finite(self, rate_scale: float) -> float:
        """Clips the gradient and steps, unless the gradient's norm is not finite.

        Returns:
            The norm before clipping.
        """
        overflows = self.optimizer.prepare_grads()
        if overflows:
            return math.nan
        norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(norm):
            return norm
        self.scheduler.step(1)
        for group in self.optimizer.param_groups:
            group["lr"] *= rate_scale
        if self.config.clip_grad > 0:
            # With experts, megatron-core has one optimizer for them and one for other weights.
            for optimizer in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
                if optimizer.is_stub_optimizer:  # this rank has no weights for it
                    continue
                parameters = optimizer.get_parameters()
                if parameters:
                    clip_grad_by_total_norm_fp32(parameters, self.config.clip_grad, norm)
        self.optimizer.step_with_ready_grads()
        return norm

    def _can_overflow(self, loss_scale: float | None) -> bool:
        """Whether the loss scale may be why a gradient is not finite; a collective under --fp16."""
        if loss_scale is None or loss_scale <= MIN_LOSS_SCALE:
            return False
        loss_is_finite = bool(torch.isfinite(self.poison))
        return self.parallel.largest(int(not loss_is_finite)) == 0

    def _finalize(self, model: list[torch.nn.Module], num_tokens: Tensor, **kwargs: Any) -> None:
        """Reduces gradients over the ranks, divided by the denominator of the global batch.

        megatron-core calls this function after the backward passes.
        """
        # A loss that is not finite makes one value of the gradient NaN. All ranks then see it in
        # the gradient's norm, without another collective.
        first_weight = self._trained_weights()[0]
        main_grad: Tensor = first_weight.main_grad  # type: ignore[attr-defined]  # megatron-core's
        main_grad.view(-1)[:1].add_(self.poison)
        finalize_model_grads(model, num_tokens, **kwargs)
        self.loss_denominator = num_tokens


def wrap(
    module: torch.nn.Module, transformer: TransformerConfig, config: MegatronConfig
) -> DistributedDataParallel:
    """Returns the model with megatron-core's gradient buffers."""
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=config.use_distributed_optimizer,
    )
    return DistributedDataParallel(transformer, options, module)


def _adam(config: MegatronConfig, model: DistributedDataParallel) -> Any:
    options = OptimizerConfig(
        optimizer="adam",
        min_loss_scale=MIN_LOSS_SCALE,
        params_dtype=DTYPES[config.precision],
        **fields_in_common(config, OptimizerConfig),
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
    """Returns why shared prompts are not computed once; None if they are.

    Raises:
        ValueError: --share-prompts is on, but not possible.
    """
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
