"""What flags of a slime or Megatron command line that this program lacks come to here: three literal tables.

RESTATED and FIXED say what the checkpoint's config.json, or this program, has anyway: they are checked and accepted.
RENAMED have another name here. UNSUPPORTED have a reason and something to do instead.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from slime_tis.hf_directory import FAMILIES, Family


@dataclass(frozen=True)
class Restated:
    """A flag that repeats what config.json says."""

    fact: str
    """Name among `checkpoint_facts`."""

    switch: tuple[Any, ...] | None = None
    """For a switch, what the fact may be; None where the flag's value has to equal the fact."""


@dataclass(frozen=True)
class Renamed:
    """A flag with another name here."""

    name: str
    """The flag here."""

    form: Literal["same", "bytes to MiB", "URL", "transport"] = "same"
    """How its values are written here."""

    note: str = ""
    """What else differs, as the end of a message."""


@dataclass(frozen=True)
class Advice:
    """Flags that have no counterpart, and what to do about it."""

    flags: str
    """Names, separated by blanks; one that ends in * means all that begin so."""

    reason: str
    """The reason."""

    instead: str
    """What to do."""


RESTATED: Mapping[str, Restated] = {
    "--num-layers": Restated("num_hidden_layers"),
    "--hidden-size": Restated("hidden_size"),
    "--ffn-hidden-size": Restated("intermediate_size"),
    "--num-attention-heads": Restated("num_attention_heads"),
    "--group-query-attention": Restated("grouped_query_attention", (True,)),
    "--num-query-groups": Restated("num_key_value_heads"),
    "--kv-channels": Restated("head_dim"),
    "--vocab-size": Restated("vocab_size"),
    "--max-position-embeddings": Restated("max_position_embeddings"),
    "--normalization": Restated("normalization"),
    "--norm-epsilon": Restated("rms_norm_eps"),
    "--position-embedding-type": Restated("position_embedding_type"),
    "--use-rotary-position-embeddings": Restated("position_embedding_type", ("rope",)),
    "--rotary-base": Restated("rope_theta"),
    "--rotary-percent": Restated("partial_rotary_factor"),
    "--use-rope-scaling": Restated("rope_scaling", (True,)),
    "--rotary-scaling-factor": Restated("rope_scaling_factor"),
    "--swiglu": Restated("hidden_act", ("silu", "swish")),
    "--disable-bias-linear": Restated("mlp_bias", (False,)),
    "--add-qkv-bias": Restated("attention_bias", (True,)),
    "--qk-layernorm": Restated("qk_norm", (True,)),
    "--untie-embeddings-and-output-weights": Restated("tie_word_embeddings", (False,)),
    "--num-experts": Restated("num_experts"),
    "--moe-router-topk": Restated("num_experts_per_tok"),
    "--moe-ffn-hidden-size": Restated("moe_intermediate_size"),
    "--moe-shared-expert-intermediate-size": Restated("shared_expert_intermediate_size"),
    "--moe-shared-expert-gate": Restated("shared_expert_gate", (True,)),
    "--moe-router-score-function": Restated("router_score_function"),
    "--moe-router-pre-softmax": Restated("norm_topk_prob", (False,)),
    "--moe-router-enable-expert-bias": Restated("expert_bias", (True,)),
    "--moe-router-topk-scaling-factor": Restated("routed_scaling_factor"),
    "--moe-router-num-groups": Restated("n_group"),
    "--moe-router-group-topk": Restated("topk_group"),
}
"""Flags that repeat config.json: checked against it, and accepted where they agree."""

FIXED: Mapping[str, tuple[str, ...]] = {
    "--hidden-dropout": ("0",),
    "--attention-dropout": ("0",),
    "--optimizer": ("adam",),
    "--train-backend": ("megatron",),
    "--mtp-num-layers": ("0",),
    "--moe-token-dispatcher-type": ("alltoall",),
    "--moe-token-drop-policy": ("probs",),
    "--moe-router-dtype": ("fp32",),
    "--moe-router-load-balancing-type": ("none", "aux_loss", "seq_aux_loss"),
    "--moe-router-bias-update-rate": ("0",),
    "--moe-aux-loss-coeff": ("0",),
    "--update-weight-mode": ("full",),
    "--kl-coef": ("0",),
    "--gamma": ("1",),
    "--lambd": ("1",),
    "--eval-top-k": ("-1",),
    "--start-rollout-id": ("0",),
    "--accumulate-allreduce-grads-in-fp32": (),
    "--attention-softmax-in-fp32": (),
    "--rollout-skip-special-tokens": (),
    "--use-fault-tolerance": (),
    "--no-offload-train": (),
    "--no-offload-rollout": (),
}
"""Flags that repeat what this program always does, with the values that do; () where they are switches."""

RENAMED: Mapping[str, Renamed] = {
    "--sglang-server-concurrency": Renamed("--sglang-concurrency"),
    "--rollout-num-gpus-per-engine": Renamed(
        "--sglang-tp-size", note="a flag of the servers that --sglang-launch starts"
    ),
    "--rollout-external-engine-addrs": Renamed("--sglang-url", "URL", note="with http:// before each address"),
    "--update-weight-buffer-size": Renamed("--sglang-bucket-mb", "bytes to MiB", note="in MiB, not bytes"),
    "--update-weight-transport": Renamed("--sglang-weight-sync", "transport", note="nccl is distributed there"),
    "--update-weight-disk-dir": Renamed("--sglang-weight-dir"),
    "--check-weight-update-equal": Renamed("--check-weight-sync", note="which compares the engines' log-probs"),
}
"""Flags whose name here is another. Names that are read here too are aliases, and no entries of this table."""

ATTENTION = "multi-head latent, gated and linear attention are not supported"
HOOK = "there is no such hook"
FAMILY = "use a Llama, Qwen2, Qwen3, Qwen2-MoE, Qwen3-MoE or GLM-4.5 checkpoint"

ADVICE = (
    Advice(
        "--actor-num-nodes --actor-num-gpus-per-node --num-gpus-per-node",
        "torchrun starts the ranks, there is no Ray",
        "use torchrun --nnodes NODES --nproc-per-node GPUS train.py",
    ),
    Advice(
        "--rollout-num-gpus",
        "servers are counted, not GPUs",
        "use --rollout-engine sglang --sglang-launch N, with --sglang-tp-size GPUS for the GPUs of each",
    ),
    Advice(
        "--colocate --offload --offload-train --offload-rollout --release-train --keep-old-actor",
        "training and SGLang do not take turns on the same GPUs",
        "give the servers GPUs of their own with --sglang-base-gpu-id, or sample in the training process with "
        "--rollout-engine local",
    ),
    Advice(
        "--prefill-num-servers",
        "all servers of a run are identical",
        "start servers of several kinds yourself and name them with --sglang-url or --sglang-router-ip",
    ),
    Advice(
        "--ref-ckpt-step --ref-update-interval --ref-micro-batch-size",
        "the reference policy is one Hugging Face directory, read once",
        "give it with --ref-load DIR",
    ),
    Advice(
        "--spec --megatron-config-path --model-name --transformer-impl --custom-model-provider-path "
        "--custom-megatron-init-path",
        "layers follow the checkpoint's config.json and the hardware",
        f"remove it, and {FAMILY}",
    ),
    Advice(
        "--attention-backend --no-rope-fusion --no-masked-softmax-fusion --no-gradient-accumulation-fusion "
        "--no-bias-swiglu-fusion --make-vocab-size-divisible-by --seq-length --data-pad-size-multiplier "
        "--enable-experimental --no-check-for-nan-in-loss-and-grad --allgather-cp",
        "kernels, padding and buffers are chosen by this program",
        "remove it",
    ),
    Advice(
        "--moe-*",
        "experts and routers follow the checkpoint's config.json, and their kernels are chosen by this program",
        "remove it",
    ),
    Advice(
        "--multi-latent-attention --kv-lora-rank --q-lora-rank --qk-head-dim --qk-pos-emb-head-dim --v-head-dim "
        "--mscale --mscale-all-dim --use-gated-attention --attention-output-gate --qwen-gdn-backend "
        "--no-position-embedding --rotary-interleaved --apply-layernorm-1p --post-self-attn-layernorm "
        "--post-mlp-layernorm",
        ATTENTION,
        FAMILY,
    ),
    Advice(
        "--decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers",
        "pipeline stages hold equally many layers",
        "choose a --pipeline-model-parallel-size that divides the layers",
    ),
    Advice(
        "--enable-mtp-training --mtp-*",
        "multi-token prediction is not trained",
        "remove it",
    ),
    Advice(
        "--fp8-* --fp16 --megatron-deepgemm-* --train-env-vars",
        "training is in bf16 or fp32",
        "use --bf16; servers have precisions of their own, such as --sglang-quantization fp8",
    ),
    Advice(
        "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer "
        "--use-stateless-adam --reset-optimizer-states --optimizer-offload-fraction",
        "optimizer state stays on the GPUs, in fp32",
        "shard it over the data-parallel ranks with --use-distributed-optimizer",
    ),
    Advice(
        "--lr-warmup-fraction --lr-warmup-samples --lr-decay-samples",
        "warm-up and decay are counted in optimizer steps",
        "use --lr-warmup-iters N and --lr-decay-iters N",
    ),
    Advice(
        "--balance-data --balance-by-flops",
        "micro-batches are packed by tokens alone, and an optimizer step keeps the order of the samples",
        "remove it",
    ),
    Advice(
        "--log-probs-max-tokens-per-gpu",
        "one token budget holds for log-probs and training",
        "use --max-tokens-per-gpu, and --log-probs-chunk-size for the memory of the logits",
    ),
    Advice(
        "--eval-function-path",
        "the rollout engine answers held-out prompts",
        "use --eval-prompt-data NAME PATH, with your --custom-generate-function-path, which gets "
        "evaluation=True where it has a parameter named evaluation, and --eval-reward-key",
    ),
    Advice(
        "--disable-rollout-global-dataset --rollout-task-type --rollout-buffer-url --fetch-trajectory-retry-times "
        "--min-batch-collection-ratio --load-forge-rollout-data --use-distributed-post --http-proxy",
        "responses come from prompt files and the rollout engine",
        "write samples made elsewhere in the form of --save-debug-rollout-data and train on them with "
        "--load-debug-rollout-data",
    ),
    Advice(
        "--custom-megatron-before-log-prob-hook-path --custom-megatron-before-train-step-hook-path "
        "--recompute-loss-function",
        HOOK,
        "change losses, weights and masks with --custom-tis-function-path",
    ),
    Advice(
        "--disable-rewards-normalization",
        "an estimator compares the rewards of a group",
        "return the rewards as they are from a function for --custom-reward-post-process-path",
    ),
    Advice(
        "--rollout-sample-hook-path --rollout-data-postprocess-path "
        "--custom-convert-samples-to-train-data-path --custom-update-weight-post-write-path",
        HOOK,
        "set sample.remove_sample or sample.loss_mask in a function for --rollout-sample-filter-path",
    ),
    Advice(
        "--mask-offpolicy-in-partial-rollout",
        "tokens of older weights are corrected, not masked",
        "use --use-tis or --use-rs, and --max-weight-staleness N",
    ),
    Advice(
        "--group-rm",
        "the function's own signature says it",
        "name its second parameter samples: it then gets all samples of a prompt",
    ),
    Advice(
        "--log-reward-category --log-passrate --log-correct-samples --log-multi-turn",
        "rollouts are reported by their means",
        "return a dict of numbers from the function of --custom-rm-path: each is reported as rollout/reward/KEY",
    ),
    Advice(
        "--eval-config --eval-max-prompt-len --eval-max-context-len --eval-min-new-tokens --eval-tool-key",
        "held-out prompts share the options of training prompts",
        "use --eval-prompt-data NAME FILE … and the --eval- flags that --help lists",
    ),
    Advice(
        "--rollout-stop",
        "responses end at tokens, not strings",
        "use --rollout-stop-token-ids",
    ),
    Advice(
        "--apply-chat-template-kwargs --tool-key --multimodal-keys --loss-mask-type",
        "prompts are text or messages, rendered by the tokenizer's chat template",
        "render them while the prompt file is written",
    ),
    Advice(
        "--num-critic-only-steps --value-clip --critic-*",
        "there is no critic",
        "use --advantage-estimator grpo, rloo or reinforce_plus_plus_baseline",
    ),
    Advice(
        "--use-unbiased-kl",
        "the KL loss has no weights of its own",
        "use --use-kl-loss with --kl-loss-type low_var_kl",
    ),
    Advice(
        "--use-opd --opd-*",
        "there is no on-policy distillation from a teacher",
        "use slime for this experiment; --use-kl-loss --ref-load DIR only adds a penalty towards a reference model",
    ),
    Advice(
        "--disable-compute-advantages-and-returns",
        "the loss always has advantages",
        "give your own with --custom-advantage-function-path, or your own loss with --custom-loss-function-path",
    ),
    Advice(
        "--freeze-params-name-list --only-train-params-name-list",
        "all weights are trained",
        "use slime to train a part of the weights",
    ),
    Advice(
        "--rollout-health-check-* --rollout-data-transport --update-weight-delta-* --update-weight-disk-keep-files "
        "--update-weight-local-checkpoint-dir",
        "servers are watched and given whole weights in one way",
        "see --sglang-request-timeout, --sglang-recovery-timeout and --sglang-weight-sync",
    ),
    Advice("--debug-train-only", "it is implied", "use --load-debug-rollout-data alone"),
    Advice(
        "--load-debug-rollout-data-subsample --memory-* --profile-* --record-memory-history --use-pytorch-profiler",
        "dumps are loaded whole, and profiles are the perf/ metrics",
        "use --save-debug-rollout-data and --save-debug-train-data",
    ),
    Advice("--use-rollout-entropy", "the entropy is reported anyway", "see train/entropy_loss"),
    Advice(
        "--deterministic-mode",
        "runs in fp32 on a CPU are bitwise repeatable, runs on GPUs are not",
        "set --seed and --rollout-seed",
    ),
    Advice("--ci-*", "it is for slime's own tests", "remove it"),
    Advice(
        "--wandb-key --wandb-host --wandb-team --wandb-run-id --disable-wandb-random-suffix "
        "--wandb-always-use-train-step",
        "the wandb package reads its account and run from the environment",
        "set WANDB_API_KEY, WANDB_BASE_URL, WANDB_ENTITY or WANDB_RUN_ID",
    ),
    Advice(
        "--async-save --no-save-optim --no-load-optim --no-load-rng --finetune --ckpt-*",
        "a checkpoint is always whole, weights with optimizer and data",
        "use --save and --load; to start from weights alone give them with --hf-checkpoint",
    ),
)
"""Flags without a counterpart."""


def advice_for(flag: str) -> Advice | None:
    """What ADVICE has on a flag: its own entry, else the longest prefix that fits; None where there is neither."""
    best, length = None, 0
    for advice in ADVICE:
        for name in advice.flags.split():
            if name == flag:
                return advice
            if name.endswith("*") and flag.startswith(name[:-1]) and len(name) > length:
                best, length = advice, len(name)
    return best


EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of a layer's experts in config.json."""


def checkpoint_facts(model: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json says, under its own names, with what follows from it.

    Args:
        model: the object of a config.json, which nobody has checked.

    Returns:
        facts by name; one that the file leaves to its architecture's default is missing or None.
    """
    facts = {name: value for name, value in model.items() if value is not None}
    heads, hidden = facts.get("num_attention_heads"), facts.get("hidden_size")
    if "head_dim" not in facts and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        facts["head_dim"] = hidden // heads
    if heads is not None:
        facts.setdefault("num_key_value_heads", heads)
    rope = facts.get("rope_parameters") or facts.get("rope_scaling") or {}
    if isinstance(rope, Mapping):
        kind = rope.get("rope_type", rope.get("type", "default"))
        facts |= {"rope_scaling": kind != "default"}
        facts |= {"rope_scaling_factor": rope["factor"]} if "factor" in rope else {}
        facts |= {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    facts.setdefault("partial_rotary_factor", 1.0)
    facts |= {"normalization": "RMSNorm", "position_embedding_type": "rope", "grouped_query_attention": True}
    architectures = facts.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is not None:
        parts = {"qk_norm": family.qk_norm, "attention_bias": family.qkv_bias}
        facts |= {fact: facts.get(part) if isinstance(part, str) else part for fact, part in parts.items()}
    return facts if family is None or not family.moe else facts | _moe_facts(facts, family)


def _moe_facts(facts: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """What a config.json says about experts, under the names that Qwen's has."""
    found = {
        "num_experts": next((facts[name] for name in EXPERT_COUNTS if name in facts), None),
        "router_score_function": "sigmoid" if family.sigmoid_router else "softmax",
        "expert_bias": family.sigmoid_router,
        "shared_expert_gate": family.shared_expert_gate is not None,
    }
    shared, width = facts.get("n_shared_experts"), facts.get("moe_intermediate_size")
    if isinstance(shared, int) and isinstance(width, int):
        found["shared_expert_intermediate_size"] = shared * width
    return found
