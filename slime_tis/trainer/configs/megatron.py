"""Options of the training engine: model, layout, precision, optimizer, checkpoints, launcher."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from slime_tis.errors import quoted
from slime_tis.options.fields import Limits, check_fields, flag, option

data_option = partial(option, group="model and data")
loop_option = partial(option, group="training loop")
optimizer_option = partial(option, group="optimizer")
routing_option = partial(option, group="routing replay")
parallel_option = partial(option, group="parallelism and precision")
checkpoint_option = partial(option, group="checkpoints")
lora_option = partial(option, group="LoRA adapters")

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear layers that can have an adapter, by their Hugging Face names."""
ALL_LINEAR = "all-linear"
"""Value of --lora-target-modules for all of LORA_TARGETS."""

LAUNCH = "start several ranks with torchrun, or one process without the variables of torchrun"


@dataclass(frozen=True, kw_only=True)
class MegatronConfig:
    """How Megatron-core builds, shards, optimizes and saves the policy."""

    hf_checkpoint: str = data_option(metavar="DIR")
    """Hugging Face directory of the policy (config.json, safetensors, tokenizer), or ORG/NAME of
    the Hub, also with @REVISION."""
    ref_load: str | None = data_option(None, metavar="DIR", needs=("--use-kl-loss", "--kl-coef"))
    """The same of the reference policy; unset: hf_checkpoint."""
    load: str | None = checkpoint_option(None, metavar="DIR")
    """Directory whose latest complete checkpoint is resumed; an empty directory starts a new
    run."""
    save: str | None = checkpoint_option(None, metavar="DIR")
    """Directory for checkpoints, empty or equal to load; unset: none."""
    save_interval: Annotated[int | None, Limits(ge=1, le=1_000_000)] = checkpoint_option(
        None, needs=("--save",)
    )
    """Rollouts between two checkpoints; unset: only at the end."""
    async_save: bool = checkpoint_option(False, needs=("--save",))
    """Write checkpoints in the background, from copies in main memory; complete after the next
    rollout, or later."""
    save_hf: str | None = checkpoint_option(None, metavar="DIR")
    """Directory for the policy in Hugging Face format: absent, empty or an earlier export."""
    save_retain: Annotated[int, Limits(ge=1, le=1_000_000)] = checkpoint_option(
        2, needs=("--save",)
    )
    """Newest checkpoints of the run to keep."""
    tensor_model_parallel_size: Annotated[int, Limits(ge=1, le=4_096)] = parallel_option(1)
    """Ranks that divide every layer's matrices."""
    pipeline_model_parallel_size: Annotated[int, Limits(ge=1, le=4_096)] = parallel_option(1)
    """Ranks that hold consecutive stages of the layers."""
    context_parallel_size: Annotated[int, Limits(ge=1, le=4_096)] = parallel_option(1)
    """Ranks that hold zigzag slices of every sequence."""
    expert_model_parallel_size: Annotated[int, Limits(ge=1, le=4_096)] = parallel_option(1)
    """Ranks that divide the experts of a layer."""
    expert_tensor_parallel_size: Annotated[int | None, Limits(ge=1, le=4_096)] = parallel_option(
        None
    )
    """Ranks that divide the matrices of an expert; unset: tensor_model_parallel_size."""
    transformer_impl: Literal["transformer_engine", "local"] | None = parallel_option(None)
    """Layers; unset: transformer-engine on a GPU, if it imports and trains this model in bf16 or
    fp16, else torch's."""
    latent_norm_epsilon: Annotated[float | None, Limits(ge=0, lt=1)] = parallel_option(None)
    """ε of the norms of latent vectors in multi-head latent attention; unset: rms_norm_eps of the
    checkpoint with SGLang and vLLM, which take it, and 1e-6 with the local engine, as in
    transformers."""
    sequence_parallel: bool = parallel_option(False)
    """Shard other activations along the sequence over the tensor-parallel ranks."""
    use_distributed_optimizer: bool = parallel_option(False)
    """Shard optimizer state over the data-parallel ranks."""
    distributed_timeout_minutes: Annotated[float, Limits(gt=0, le=100_000)] = parallel_option(30.0)
    """Longest wait of a rank for the other ranks, except for SGLang; then every rank ends with a
    message."""
    micro_batch_size: Annotated[int | None, Limits(ge=1, le=1_000_000)] = loop_option(None)
    """Samples in one forward pass of a rank; unset: as many tokens as half of the free memory
    holds."""
    use_dynamic_batch_size: bool = loop_option(False)
    """Pack samples into micro-batches of max_tokens_per_gpu tokens."""
    max_tokens_per_gpu: Annotated[int | None, Limits(ge=1, le=100_000_000)] = loop_option(
        None, needs=("--use-dynamic-batch-size",)
    )
    """Tokens of one packed micro-batch on one rank."""
    balance_data: bool = loop_option(False)
    """Deal samples to data-parallel ranks by estimated operations, not in turn."""
    share_prompts: bool | None = loop_option(None)
    """Compute a group's common prompt once; unset: on a CPU without experts and context
    parallelism."""
    use_routing_replay: bool = routing_option(False)
    """Replay the experts of the old-log-prob pass in training (R2)."""
    log_probs_chunk_size: Annotated[int, Limits(ge=1, le=100_000_000, also=(-1,))] = loop_option(-1)
    """Response tokens whose log-probs are computed at once; -1: from the output layer's size."""
    lr: Annotated[float, Limits(ge=0, le=1)] = optimizer_option(1e-6)
    """Peak learning rate of Adam."""
    min_lr: Annotated[float, Limits(ge=0, le=1)] = optimizer_option(
        0.0, needs=("--lr-decay-style=linear", "--lr-decay-style=cosine")
    )
    """Final learning rate of the decay."""
    lr_warmup_iters: Annotated[int, Limits(ge=0, le=1_000_000_000)] = optimizer_option(0)
    """Optimizer steps of linear warm-up from 0."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = optimizer_option("constant")
    """Shape of the learning rate after warm-up."""
    lr_decay_iters: Annotated[int | None, Limits(ge=1, le=1_000_000_000)] = optimizer_option(
        None, needs=("--lr-decay-style=linear", "--lr-decay-style=cosine")
    )
    """Optimizer steps until min_lr; unset: until the end of the run."""
    ess_lr_scaling: Literal["off", "sqrt", "linear"] = optimizer_option("off")
    """Multiply each step's learning rate by effective_sequence_share (linear) or its root
    (sqrt)."""
    weight_decay: Annotated[float, Limits(ge=0, le=100)] = optimizer_option(0.01)
    """Decoupled weight decay per unit of learning rate; biases and norms are exempt."""
    adam_beta1: Annotated[float, Limits(ge=0, lt=1)] = optimizer_option(0.9)
    """Decay rate of the first moment."""
    adam_beta2: Annotated[float, Limits(ge=0, lt=1)] = optimizer_option(0.98)
    """Decay rate of the second moment."""
    adam_eps: Annotated[float, Limits(gt=0, le=1)] = optimizer_option(1e-8)
    """Constant added to the root of the second moment."""
    clip_grad: Annotated[float, Limits(ge=0, le=1_000_000)] = optimizer_option(1.0)
    """Largest global L2 norm of the gradient; 0: no clipping."""
    freeze_params_name_list: tuple[str, ...] | None = optimizer_option(None, metavar="REGEX")
    """Regular expressions; weights in whose Megatron name one is found are not trained."""
    only_train_params_name_list: tuple[str, ...] | None = optimizer_option(None, metavar="REGEX")
    """Regular expressions; only weights in whose Megatron name one is found are trained."""
    lora_rank: Annotated[int | None, Limits(ge=1, le=4_096)] = lora_option(None)
    """Train LoRA adapters of this rank, and freeze the model's own weights; unset: train all
    weights."""
    lora_alpha: Annotated[float, Limits(gt=0, le=1_000_000)] = lora_option(
        32.0, needs=("--lora-rank",)
    )
    """The product of an adapter's two matrices is multiplied by lora_alpha / lora_rank."""
    lora_dropout: Annotated[float, Limits(ge=0, lt=1)] = lora_option(
        0.0, needs=("--lora-rank", "--lora-adapter-path")
    )
    """Share of an adapter's inputs that training sets to 0. Rollouts and old log-probs have no
    dropout."""
    lora_target_modules: tuple[str, ...] | None = lora_option(
        None, metavar="NAME", needs=("--lora-rank",)
    )
    """Linear layers with an adapter: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj,
    or all-linear; unset: all-linear."""
    lora_adapter_path: str | None = lora_option(None, metavar="DIR")
    """Directory of a LoRA adapter of PEFT, which is trained further, instead of lora_rank,
    lora_alpha and lora_target_modules."""
    rollout_lora: Literal["merged", "unmerged"] = lora_option(
        "merged", needs=("--lora-rank", "--lora-adapter-path")
    )
    """merged: the rollout engine gets weights with the merged adapter; unmerged: it applies the
    adapter beside its weights, whose rounding then does not affect the adapter. Servers load it by
    name from a directory; they need LoRA turned on and weight_sync disk."""
    merge_lora: bool = lora_option(False, needs=("--save-hf",))
    """Write the merged model to save_hf, and the adapter to a second directory, save_hf with
    -adapter at its end."""
    nonfinite_gradient: Literal["stop", "skip"] = optimizer_option("stop")
    """At a non-finite gradient or loss: save and stop, or skip and count the step."""
    bf16: bool = parallel_option(False)
    """Train in bfloat16 with float32 master weights."""
    bf16_if_fast: bool = parallel_option(False)
    """Train with --bf16, and sample in bf16 with the local engine, on a GPU with bf16 or a CPU with
    AMX or AVX512_BF16; else compute in float32. Precisions that you give stay."""
    fp16: bool = parallel_option(False)
    """Train in float16 with float32 master weights and a dynamic loss scale; an overflow skips the
    step."""
    initial_loss_scale: Annotated[float, Limits(ge=1, le=2**32)] = parallel_option(
        2.0**12, needs=("--fp16",)
    )
    """First loss scale; two overflows halve it, 1,000 steps without one double it."""
    recompute_granularity: Literal["full", "selective"] | None = parallel_option(None)
    """Recomputation in the backward pass: full layers or attention; unset: none."""
    recompute_method: Literal["uniform", "block"] | None = parallel_option(
        None, needs=("--recompute-granularity=full",)
    )
    """Layers that full recomputation covers: uniform groups, or the first block of a pipeline
    stage."""
    recompute_num_layers: Annotated[int | None, Limits(ge=1, le=10_000)] = parallel_option(
        None, needs=("--recompute-granularity=full",)
    )
    """Layers in a group or in the block."""
    seed: Annotated[int, Limits(ge=0, le=2**31 - 1)] = loop_option(1234)
    """Seed of training; sampling has rollout_seed."""
    num_threads: Annotated[int | None, Limits(ge=1, le=1_024)] = parallel_option(None)
    """CPU threads per process; unset: torch's default."""

    @property
    def precision(self) -> Literal["fp32", "fp16", "bf16"]:
        """Precision of weights and activations in training."""
        if self.bf16:
            return "bf16"
        if self.fp16:
            return "fp16"
        return "fp32"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.bf16 and self.fp16:
            raise ValueError("--bf16 and --fp16 exclude each other; remove one.")
        if self.bf16_if_fast and self.fp16:
            raise ValueError("--bf16-if-fast and --fp16 exclude each other; remove one.")
        if self.min_lr > self.lr:
            raise ValueError(
                f"--min-lr is {self.min_lr} but must not exceed --lr, which is {self.lr}."
            )
        if self.use_dynamic_batch_size and self.max_tokens_per_gpu is None:
            raise ValueError(
                "--use-dynamic-batch-size is on but --max-tokens-per-gpu is unset; add a token"
                " budget."
            )
        if self.micro_batch_size is not None and self.use_dynamic_batch_size:
            raise ValueError(
                "--micro-batch-size and --use-dynamic-batch-size are both given; remove one of the"
                " two."
            )
        recompute_options = (self.recompute_method, self.recompute_num_layers)
        if self.recompute_granularity == "full" and None in recompute_options:
            raise ValueError(
                "--recompute-granularity full needs --recompute-method and --recompute-num-layers."
            )
        if self.share_prompts and self.context_parallel_size > 1:
            raise ValueError(
                "--share-prompts does not work with --context-parallel-size; remove one of the two."
            )
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ValueError(
                "--sequence-parallel is on but --tensor-model-parallel-size is 1; raise it, or"
                " remove it."
            )
        self._check_patterns()
        self._check_lora()

    def _check_patterns(self) -> None:
        """Refuses both lists of weights at once, and texts that are no regular expressions."""
        frozen = self.freeze_params_name_list
        trained = self.only_train_params_name_list
        if frozen and trained:
            raise ValueError(
                "--freeze-params-name-list and --only-train-params-name-list are both given; remove"
                " one of the two."
            )
        for name in ("freeze_params_name_list", "only_train_params_name_list"):
            for pattern in getattr(self, name) or ():
                try:
                    re.compile(pattern)
                # Nested groups raise RecursionError, and huge repeat counts raise OverflowError.
                except (re.error, RecursionError, OverflowError) as error:
                    raise ValueError(
                        f"{flag(name)} has {quoted(pattern)}, which is no regular expression:"
                        f" {error}."
                    ) from None

    def _check_lora(self) -> None:
        """Refuses unknown target modules, and options that contradict adapters."""
        for name in self.lora_targets:
            if name not in LORA_TARGETS:
                raise ValueError(
                    f"--lora-target-modules has {quoted(name)}, but must have names of"
                    f" {', '.join(LORA_TARGETS)}, or {ALL_LINEAR}."
                )
        if not self.lora_targets:
            raise ValueError(
                f"--lora-target-modules names no layer; give {ALL_LINEAR}, or some of"
                f" {', '.join(LORA_TARGETS)}."
            )
        if self.lora_rank is not None and self.lora_adapter_path is not None:
            raise ValueError(
                "--lora-rank and --lora-adapter-path are both given, but the adapter has its rank;"
                " remove one of the two."
            )
        if not self.trains_adapters:
            if self.merge_lora:
                raise ValueError(
                    "--merge-lora is on but there is no adapter; add --lora-rank, or remove it."
                )
            return
        if self.selected_weights is not None:
            option, _ = self.selected_weights
            raise ValueError(
                f"{flag(option)} has no effect on LoRA adapters, and the model's own weights are"
                " frozen; remove it, or choose adapters by --lora-target-modules."
            )
        if self.transformer_impl == "transformer_engine":
            raise ValueError(
                "--transformer-impl transformer_engine fuses norms into the linear layers that"
                " LoRA adapters belong to; remove it."
            )

    @property
    def trains_adapters(self) -> bool:
        """Whether LoRA adapters are trained, and not the model's own weights."""
        return self.lora_rank is not None or self.lora_adapter_path is not None

    @property
    def adapter_export(self) -> str | None:
        """Directory to which the adapters are exported; None if nothing is."""
        if self.save_hf is None or not self.trains_adapters:
            return None
        if self.merge_lora:
            return f"{self.save_hf.rstrip('/')}-adapter"
        return self.save_hf

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """The names in lora_target_modules, without duplicates; commas may separate them, too."""
        names: list[str] = []
        for item in self.lora_target_modules or (ALL_LINEAR,):
            names += [name.strip() for name in item.split(",") if name.strip()]
        if ALL_LINEAR in names:
            return LORA_TARGETS
        return tuple(dict.fromkeys(names))

    @property
    def selected_weights(self) -> tuple[str, tuple[str, ...]] | None:
        """The name of the option that selects weights, and its patterns; None if all train."""
        if self.freeze_params_name_list:
            return "freeze_params_name_list", self.freeze_params_name_list
        if self.only_train_params_name_list:
            return "only_train_params_name_list", self.only_train_params_name_list
        return None

    @property
    def model_parallel_size(self) -> int:
        """Ranks that together hold one replica of the model: tensor × pipeline × context."""
        return (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.context_parallel_size
        )

    @property
    def expert_parallel_size(self) -> int:
        """Ranks that together hold all experts once: expert × expert-tensor × pipeline."""
        tensor = self.expert_tensor_parallel_size or self.tensor_model_parallel_size
        return self.expert_model_parallel_size * tensor * self.pipeline_model_parallel_size


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The launcher's settings; the defaults are one process without a launcher."""

    rank: int = 0
    local_rank: int = 0
    launched: bool = False
    """Whether RANK is set: the ranks meet at MASTER_ADDR and MASTER_PORT."""
    world_size: int = 1
    local_world_size: int = 1


def read_environment(environ: Mapping[str, str]) -> Environment:
    """Reads RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""

    def number(name: str, default: str | None, low: int = 0, high: int = 10**9 - 1) -> int:
        text = environ.get(name, default)
        if text is None:
            # Only MASTER_PORT has no default, and it is read after RANK.
            raise ValueError(f"RANK is {rank} but {name} is unset; {LAUNCH}.")
        # isdigit accepts characters such as ², and int() refuses more than 4,300 digits.
        is_number = text.isascii() and text.isdigit() and len(text) < 10
        if not (is_number and low <= int(text) <= high):
            raise ValueError(
                f"{name} is {text[:80]!r} but must be an integer from {low} to {high}; {LAUNCH}."
            )
        return int(text)

    launched = "RANK" in environ
    world_size = number("WORLD_SIZE", "1", 1)
    if world_size > 1 and not launched:
        raise ValueError(f"WORLD_SIZE is {world_size} but RANK is unset; {LAUNCH}.")
    rank = number("RANK", "0", high=world_size - 1)
    if launched:
        if not environ.get("MASTER_ADDR"):
            raise ValueError(f"RANK is {rank} but MASTER_ADDR is unset; {LAUNCH}.")
        number("MASTER_PORT", None, 1, 65535)
    return Environment(
        rank=rank,
        local_rank=number("LOCAL_RANK", "0"),
        world_size=world_size,
        local_world_size=number("LOCAL_WORLD_SIZE", "1", 1),
        launched=launched,
    )
