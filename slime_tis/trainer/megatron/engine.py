"""The training engine: a Megatron-core model, its optimizer, and the passes that train.py makes over a batch."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, TypeVar

import torch
from megatron.core import parallel_state as mpu
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
from torch import Tensor

from slime_tis.hf_directory import moe_sizes
from slime_tis.policy.policy_loss import LossInputs, LossOutputs
from slime_tis.policy.step_sums import StepSums
from slime_tis.trainer.megatron.architecture import HfConfig, build_model, padded_vocab_size, uses_transformer_engine
from slime_tis.trainer.megatron.batch import TrainingBatch, fixed_partition, load_of, token_budget_partitions
from slime_tis.trainer.megatron.fused_log_probs import fused_linear_log_probs
from slime_tis.trainer.megatron.hf_weights import load_hf_weights, named_hf_tensors, named_weights
from slime_tis.trainer.megatron.log_probs import vocab_parallel_log_probs
from slime_tis.trainer.megatron.memory import TokenBudget, bytes_per_token, free_memory, return_freed_memory
from slime_tis.trainer.megatron.packing import MicroBatch, pack
from slime_tis.trainer.megatron.parallel import Parallel
from slime_tis.trainer.megatron.prefix_tree import PrefixTree
from slime_tis.trainer.megatron.routing_replay import RoutingRecord, RoutingReplay
from slime_tis.trainer.megatron.slime_loss import get_log_probs_and_entropy  # noqa: F401  (users' losses import it)
from slime_tis.trainer.options.megatron import MegatronConfig

Loss = Callable[[LossInputs], LossOutputs]
"""The loss of one micro-batch."""
R = TypeVar("R")
OnLogProbs = Callable[[MicroBatch, Tensor, Tensor], R]
"""Called on the last pipeline stage with log-probs and entropies [L] of a micro-batch's response tokens."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One optimizer step, as this rank saw it."""

    sums: StepSums | None
    """Those of all micro-batches of this rank; None but on the last pipeline stage."""
    grad_norm: float
    """Before clipping, on every rank; not finite where the gradient or the loss is not, and no step was made."""
    learning_rate: float
    loss_denominator: int
    """What the loss of the global batch was divided by: tokens or sequences; 0 means that no step was made."""

    @property
    def is_finite(self) -> bool:
        """Whether gradient and loss are."""
        return math.isfinite(self.grad_norm)


@dataclass(frozen=True, kw_only=True)
class MicroBatches:
    """How the samples of a data-parallel rank are dealt into micro-batches."""

    partition: list[list[int]]
    """The samples of each."""
    load: float | None = None
    """Tokens of the largest one of all ranks, as a share of the token budget; None without one."""


@dataclass(frozen=True)
class ReturnsMemoryBeforeGradient:
    """Forward hook of the embedding, whose gradient, as large as its weight, is made once all activations are freed."""

    token_bytes: int
    """That the activations of a token take."""

    def __call__(self, _module: torch.nn.Module, _inputs: Any, output: Tensor) -> None:
        """Has the activations' memory returned when the gradient of the output is there."""
        if output.requires_grad:
            output.register_hook(lambda grad: return_freed_memory(grad.device, self.token_bytes * len(grad)))


class TrainingEngine:
    """A policy in Megatron-core: log-probs, training steps, and its weights under Hugging Face names."""

    def __init__(
        self,
        config: MegatronConfig,
        parallel: Parallel,
        *,
        temperature: float,
        total_steps: int,
        keep_reference: bool = False,
        entropy_gradient: bool = False,
        gives_logits: bool = False,
        timer: Callable[[str], AbstractContextManager[Any]] | None = None,
        safe_point: Callable[[], None] = lambda: None,
    ) -> None:
        """Builds the model, loads `config.hf_checkpoint` and prepares the optimizer.

        Args:
            config: sizes, precision, optimizer.
            parallel: this process's place in the layout.
            temperature: of the sampling distribution, whose log-probs are wanted.
            total_steps: optimizer steps of the run; the learning rate decays over them unless configured.
            keep_reference: keep a frozen copy of the reference policy's weights.
            entropy_gradient: whether the objective differentiates the entropy.
            gives_logits: whether the loss gets a copy of the logits, which then are computed in training.
            timer: `timer(name)` is a context manager that adds to the time of `name`.
            safe_point: called before each micro-batch; what it raises gives the pass up, and the weights stay.
        """
        self.config, self.parallel, self.temperature = config, parallel, temperature
        self.entropy_gradient, self.gives_logits, self.safe_point = entropy_gradient, gives_logits, safe_point
        self.timer = timer or (lambda name: nullcontext())
        self.model = build_model(config.hf_checkpoint, config, parallel)
        self.routing = RoutingReplay(
            self.model.module, moe_sizes(self.model.hf_config), parallel, sequence_parallel=config.sequence_parallel
        )
        self.reference = self._load_weights(keep_reference)
        self.ddp = self._wrap()
        self.optimizer = get_megatron_optimizer(_optimizer_config(config), [self.ddp], use_gloo_process_groups=False)
        self.scheduler = _scheduler(config, self.optimizer, total_steps)
        self.model.config.finalize_model_grads_func = self._finalize
        logits = self.model.hf_config.vocab_size if gives_logits else 0
        self._token_bytes = bytes_per_token(self.model.config, logits, config.log_probs_chunk_size)
        if parallel.is_first_stage:
            self.model.module.embedding.register_forward_hook(ReturnsMemoryBeforeGradient(self._token_bytes))
        self.loss_denominator = torch.zeros([], dtype=torch.int)
        self.poison = torch.zeros([], device=parallel.backend.device)
        self.no_shared_prompts = why_not_shared(config.share_prompts, parallel, self.model.hf_config)
        """Why prompts are computed for each sample; None where each is computed once."""
        self.token_budget = self._token_budget()
        """Of a micro-batch on this rank, the same on all ranks; None where micro-batches are so many samples."""
        self._skips = False

    def log_probs(
        self,
        batch: TrainingBatch,
        partition: Sequence[Sequence[int]],
        *,
        record: RoutingRecord | None = None,
        source: RoutingRecord | None = None,
        replays_routing: bool = True,
        counts_routing: bool = False,
    ) -> Tensor:
        """Log-probs of the batch's response tokens under the present weights, without gradient.

        Args:
            batch: this data-parallel rank's samples, with the experts to replay where there are any.
            partition: indices of the samples of each micro-batch.
            record: gets the experts of every token.
            source: record of another pass over the same micro-batches, which is replayed in place of the batch's.
            replays_routing: whether the batch's experts are taken; else the routers choose, and are compared with them.
            counts_routing: whether experts are counted, for `routing.metrics`.

        Returns:
            [L] float32, this context-parallel rank's tokens in the order of the batch; NaN on all pipeline stages but
            the last.
        """
        self.routing.begin(trains=False, replays=replays_routing, counts=counts_routing, record=record, source=source)
        with torch.no_grad():
            outputs = self._run(batch, partition, _detached_log_probs, forward_only=True)
        lengths = batch.responses.lengths
        if not self.parallel.is_last_stage:
            return torch.full((sum(lengths),), math.nan, device=self.parallel.backend.device)
        order = [sample for samples in partition for sample in samples]
        parts = torch.cat(outputs).split([lengths[sample] for sample in order])
        of_sample = dict(zip(order, parts, strict=True))
        return torch.cat([of_sample[sample] for sample in range(len(batch))])

    @contextmanager
    def at_temperature(self, temperature: float) -> Iterator[None]:
        """Log-probs within are those of another temperature."""
        usual, self.temperature = self.temperature, temperature
        try:
            yield
        finally:
            self.temperature = usual

    def reference_log_probs(self, batch: TrainingBatch, partition: Sequence[Sequence[int]]) -> Tensor:
        """As `log_probs`, under the reference policy, whose routers choose themselves."""
        with self._reference_weights():
            return self.log_probs(batch.with_routing(None, None), partition)

    def train_step(
        self,
        batch: TrainingBatch,
        partition: Sequence[Sequence[int]],
        loss: Loss,
        *,
        source: RoutingRecord | None = None,
        scales_with_advantages: bool = False,
    ) -> StepResult:
        """Forward and backward over the micro-batches, gradients averaged over the global batch, one Adam step.

        Where nothing of the global batch was accepted (everything rejected) the weights stay as they are: a step on a
        zero gradient would still move them by momentum and weight decay. So they do where the gradient is not finite.

        Args:
            batch: this data-parallel rank's samples, with the experts to replay where there are any.
            partition: indices of the samples of each micro-batch.
            loss: of a micro-batch.
            source: record of a pass over the same micro-batches, which is replayed in place of the batch's experts.
            scales_with_advantages: whether the loss of a token is a multiple of its advantage, so that the gradient of
                a micro-batch without any is zero. It has a forward pass alone then, where `skips_backward` allows it.
        """
        self._skips = scales_with_advantages and self.skips_backward
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.poison.zero_()
        self.routing.begin(trains=True, counts=True, source=source)
        with self.timer("forward_backward"):
            sums = self._run(batch, partition, partial(self._loss, loss=loss), forward_only=False)
        self._skips = False
        loss_denominator = int(self.loss_denominator)
        grad_norm = 0.0
        if loss_denominator > 0:
            with self.timer("optimizer_step"):
                grad_norm = self._optimizer_step()
        return StepResult(
            sums=reduce(lambda one, other: one.merge(other), sums) if sums else None,
            grad_norm=grad_norm,
            learning_rate=self.optimizer.param_groups[0]["lr"],
            loss_denominator=loss_denominator,
        )

    def weights_are_finite(self) -> bool:
        """Whether no weight is NaN or infinite, on any rank; a collective with one host synchronisation."""
        finite = [weight.detach().isfinite().all() for weight in self.model.module.parameters()]
        return not self.parallel.largest(int(~torch.stack(finite).all()))

    def micro_batches(
        self,
        tokens_of_ranks: Sequence[Sequence[Sequence[int]]],
        responses_of_ranks: Sequence[Sequence[int]],
        rollouts_of_ranks: Sequence[Sequence[int]],
    ) -> MicroBatches:
        """This data-parallel rank's micro-batches, which have the segments of a rollout together.

        Args:
            tokens_of_ranks: token ids of the sequences of every rank.
            responses_of_ranks: the lengths of their responses.
            rollouts_of_ranks: the number of the rollout that each is a segment of, from 0 on.
        """
        rank = self.parallel.data_rank
        if self.token_budget is None:
            rollouts = rollouts_of_ranks[rank]
            places: list[list[int]] = [[] for _ in range(max(rollouts, default=-1) + 1)]
            for place, rollout in enumerate(rollouts):
                places[rollout].append(place)
            runs = fixed_partition(len(places), self.config.micro_batch_size)
            return MicroBatches(partition=[[place for number in run for place in places[number]] for run in runs])
        ranks = zip(tokens_of_ranks, responses_of_ranks, strict=True)
        trees = [
            PrefixTree.of(tokens, responses) if self.shares_prompts else PrefixTree.apart(map(len, tokens), responses)
            for tokens, responses in ranks
        ]
        budget = self.token_budget.tokens * self.parallel.context_size
        partitions = token_budget_partitions(trees, budget, rollouts_of_ranks)
        loads = [
            load_of(tree, samples) for tree, partition in zip(trees, partitions, strict=True) for samples in partition
        ]
        return MicroBatches(partition=partitions[rank], load=max(loads) / budget)

    @property
    def skips_backward(self) -> bool:
        """Whether a rank may leave the backward pass of a micro-batch out, on its own.

        It may not where backward passes communicate with ranks that have other tokens: context, pipeline and expert
        parallelism.
        """
        parallel = self.parallel
        return parallel.context_size == parallel.pipeline_size == 1 and moe_sizes(self.model.hf_config) is None

    @property
    def shares_prompts(self) -> bool:
        """Whether what samples of a micro-batch begin with alike is computed once."""
        return self.no_shared_prompts is None

    def keep_token_budget(self, tokens: int | None) -> None:
        """Takes the budget of the run that this one goes on from, unless the options decide; None leaves this one's."""
        if tokens is not None and self.token_budget is not None and self.token_budget.reason is not None:
            self.token_budget = TokenBudget(tokens=tokens, reason="as before this run was resumed")

    def named_hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The weights as whole tensors under Hugging Face names; a collective (see hf_weights)."""
        return named_hf_tensors(self.model, self.parallel)

    def _load_weights(self, keep_reference: bool) -> dict[str, Tensor] | None:
        """Loads the policy's weights; returns a copy of the reference's where `keep_reference` asks for it."""
        config = self.config
        reference = None
        if keep_reference and config.ref_load not in (None, config.hf_checkpoint):
            load_hf_weights(self.model, config.ref_load, self.parallel)
            reference = self._copy_weights()
        load_hf_weights(self.model, config.hf_checkpoint, self.parallel)
        return self._copy_weights() if keep_reference and reference is None else reference

    def _token_budget(self) -> TokenBudget | None:
        """The budget that is given, or that fits into the memory of every rank; a collective where none is given."""
        config, parallel = self.config, self.parallel
        if config.use_dynamic_batch_size:
            assert config.max_tokens_per_gpu is not None
            return TokenBudget(tokens=config.max_tokens_per_gpu)
        if config.micro_batch_size is not None:
            return None
        weights = list(self.model.module.parameters())
        moments = 8 * sum(weight.numel() for weight in weights)  # which Adam is yet to make
        gradient = max(weight.nbytes for weight in weights)  # which autograd makes before it is added to the others
        free = free_memory(parallel.backend.device, parallel.local_size) - moments - gradient
        return TokenBudget.that_fits(max(-parallel.largest(-free), 0), self._token_bytes)

    def _copy_weights(self) -> dict[str, Tensor]:
        return {name: weight.detach().clone() for name, weight in named_weights(self.model.module).items()}

    @contextmanager
    def _reference_weights(self) -> Iterator[None]:
        if self.reference is None:
            raise ValueError("the engine has no reference policy: build the engine with keep_reference=True")
        policy = self._copy_weights()
        self._set_weights(self.reference)
        try:
            yield
        finally:
            self._set_weights(policy)

    @torch.no_grad()
    def _set_weights(self, weights: dict[str, Tensor]) -> None:
        for name, weight in named_weights(self.model.module).items():
            weight.copy_(weights[name])

    def _wrap(self) -> DistributedDataParallel:
        module = self.model.module
        module = Float16Module(self.model.config, module) if self.config.bf16 else module
        options = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
            use_distributed_optimizer=self.config.use_distributed_optimizer,
            check_for_nan_in_grad=False,  # it raises on one rank, bucket by bucket; _optimizer_step looks at the norm
        )
        return DistributedDataParallel(self.model.config, options, module)

    def _run(
        self,
        batch: TrainingBatch,
        partition: Sequence[Sequence[int]],
        on_log_probs: OnLogProbs[R],
        *,
        forward_only: bool,
    ) -> list[Any]:
        """megatron-core's pipeline schedule over the micro-batches.

        Returns:
            What the last stage got from `on_log_probs` for each micro-batch, the third of its values where it trains.
        """
        self.ddp.train(not forward_only)
        packed = self._packed(batch, partition)
        lengths = batch.total_lengths
        tokens = max(sum(lengths[i] for i in samples) for samples in partition)
        outputs: list[Any] = get_forward_backward_func()(
            forward_step_func=partial(self._forward_step, on_log_probs=on_log_probs),
            data_iterator=packed,
            model=[self.ddp],
            num_microbatches=len(partition),
            seq_length=tokens,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        self.routing.end()
        return outputs

    def _packed(self, batch: TrainingBatch, partition: Sequence[Sequence[int]]) -> Iterator[MicroBatch]:
        for samples in partition:
            self.safe_point()
            yield self._pack(batch.select(samples))

    def _pack(self, batch: TrainingBatch) -> MicroBatch:
        parallel = self.parallel
        micro = pack(
            batch,
            rotary=self.model.rotary,
            context_rank=parallel.context_rank,
            context_size=parallel.context_size,
            tensor_size=parallel.tensor_size if self.config.sequence_parallel else 1,
            share_prompts=self.shares_prompts,
            device=parallel.backend.device,
        )
        micro.packed_seq_params.gives_logits = self.gives_logits and self.ddp.training
        advantages_L = batch.responses.advantages_L
        if self._skips and advantages_L is not None and not advantages_L.any():
            return replace(micro, has_gradient=False)
        return micro

    def _forward_step(
        self,
        micro_batches: Iterator[MicroBatch],
        module: torch.nn.Module,
        on_log_probs: OnLogProbs[R],
    ) -> tuple[Tensor, Callable[..., R]]:
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
        if output.requires_grad:
            # temporaries, before the backward pass makes others
            return_freed_memory(output.device, self._token_bytes * micro.input_ids.numel())

        def last_stage(output: Tensor, non_loss_data: bool = False) -> R:
            with clock(), torch.set_grad_enabled(differentiates):  # megatron-core differentiates what has a gradient
                if not micro.packed_seq_params.gives_logits:
                    return on_log_probs(micro, *self._from_hidden_states(output[:, 0], micro))
                output.detach()[..., self._vocabulary[1] :] = -torch.inf
                return on_log_probs(replace(micro, logits=output.clone()), *self._from_logits(output[0], micro))

        return output, last_stage

    @property
    def _vocabulary(self) -> tuple[int, int]:
        """Of this tensor-parallel rank's columns the first one's token, and how many do not only pad the vocabulary."""
        parallel, vocab = self.parallel, self.model.hf_config.vocab_size
        width = padded_vocab_size(vocab, parallel.tensor_size) // parallel.tensor_size
        start = parallel.tensor_rank * width
        return start, min(max(vocab - start, 0), width)

    def _from_hidden_states(self, hidden_LI: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """(log-probs, entropies) [L] of the response tokens on this rank."""
        start, width = self._vocabulary
        weight_OI = self.model.module.output_weight()
        return fused_linear_log_probs(
            hidden_LI,
            weight_OI,
            micro.target_L,
            vocab_start=start,
            width=width,
            weight_grad_OI=weight_OI.main_grad,  # type: ignore[attr-defined]  # megatron-core's
            **self._softmax_options(micro),
        )

    def _from_logits(self, logits: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """The same from logits [L, V], which are overwritten."""
        start, _ = self._vocabulary
        return vocab_parallel_log_probs(logits, micro.target_L, vocab_start=start, **self._softmax_options(micro))

    def _softmax_options(self, micro: MicroBatch) -> dict[str, Any]:
        return {
            "group": mpu.get_tensor_model_parallel_group(),
            "temperature": self.temperature,
            "chunk_size": self.config.log_probs_chunk_size,
            "entropy_gradient": self.entropy_gradient,
            "sampling_mask": micro.sampling_mask,
        }

    def _loss(
        self, micro: MicroBatch, log_probs_L: Tensor, entropy_L: Tensor, loss: Loss
    ) -> tuple[Tensor, Tensor, StepSums]:
        inputs = LossInputs(tokens=micro.responses, log_probs_L=log_probs_L, entropy_L=entropy_L)
        if micro.logits is not None:
            sequences = [tokens.to(micro.logits.device) for tokens in micro.sequences]
            inputs = replace(inputs, sequences=sequences, logits=micro.logits)
        found = loss(inputs)
        self.poison += found.numerator.detach() * 0.0  # NaN where the loss is NaN or infinite, else 0
        return found.numerator, found.denominator, found.sums

    def _finalize(self, model: list[torch.nn.Module], num_tokens: Tensor, **kwargs: Any) -> None:
        """megatron-core's gradient reduction, which divides by the denominator of the global batch; remembers it.

        A loss that is not finite makes the gradient so, and all ranks learn of it from the gradient's norm, without
        another reduction.
        """
        next(self.model.module.parameters()).main_grad.view(-1)[:1].add_(self.poison)
        finalize_model_grads(model, num_tokens, **kwargs)
        self.loss_denominator = num_tokens

    def _optimizer_step(self) -> float:
        """Clips the gradient and steps, unless the gradient's norm is not finite; returns the norm.

        megatron-core's `step` in its parts, with the norm looked at between them: it is a reduction over all ranks that
        hold different gradients, so that all of them decide alike, and it is on the host for clipping anyway.
        """
        found_inf = self.optimizer.prepare_grads()
        norm = math.nan if found_inf else float(self.optimizer.get_grad_norm())
        if not math.isfinite(norm):
            return norm
        self.scheduler.step(1)
        for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            parameters = [] if part.is_stub_optimizer else part.get_parameters()
            if parameters and self.config.clip_grad > 0:
                clip_grad_by_total_norm_fp32(parameters, self.config.clip_grad, norm)
        self.optimizer.step_with_ready_grads()
        return norm


def why_not_shared(asked: bool | None, parallel: Parallel, hf_config: HfConfig) -> str | None:
    """Why prompts are computed for each sample, for the user; None where those of siblings are computed once.

    Args:
        asked: what the options say; None where they leave it open.
        parallel: this process's place in the layout.
        hf_config: of the model.

    Raises:
        ValueError: prompts cannot be shared although the options ask for it.
    """
    if asked is False:
        return "--no-share-prompts"
    reason = None
    if parallel.context_size > 1:
        reason = "context parallelism cuts every sequence into slices"
    elif moe_sizes(hf_config) is not None:
        reason = "the routing of experts is recorded, replayed and counted for each sample"
    elif uses_transformer_engine(hf_config, parallel):
        reason = "transformer-engine has no attention to a shared prompt"
    if reason is not None and asked:
        raise ValueError(f"--share-prompts is on but {reason}; leave it out.")
    if reason is None and parallel.backend.device.type != "cpu" and not asked:
        return "not tried on a GPU; --share-prompts turns it on, with FlexAttention"
    return reason


def _detached_log_probs(micro: MicroBatch, log_probs_L: Tensor, entropy_L: Tensor) -> Tensor:
    return log_probs_L


def _optimizer_config(config: MegatronConfig) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_eps=config.adam_eps,
        clip_grad=config.clip_grad,
        bf16=config.bf16,
        params_dtype=torch.bfloat16 if config.bf16 else torch.float32,
        use_distributed_optimizer=config.use_distributed_optimizer,
    )


def _scheduler(config: MegatronConfig, optimizer: Any, total_steps: int) -> OptimizerParamScheduler:
    decay_steps = max(config.lr_decay_iters or total_steps, config.lr_warmup_iters + 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.lr_warmup_iters,
        lr_decay_steps=decay_steps,
        lr_decay_style=config.lr_decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=decay_steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
