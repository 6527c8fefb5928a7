"""Tables of flags and values of slime, vime and Megatron, for `train.py` and `slime-tis port`.

They name flags of SGLang's servers; with vLLM's, `port` writes --vllm- for --sglang-.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime_tis.errors import quoted
from slime_tis.families import FAMILIES, Experts, family_titles
from slime_tis.options.flags import Flag
from slime_tis.options.values import SWITCHES, nearest, similar
from slime_tis.trainer.configs.server_engines import SERVER_ENGINES

MAX_FLAGS = 200
"""Unknown flags that one message examines."""


@dataclass(frozen=True)
class Restated:
    """A flag that repeats a fact of `checkpoint_facts`."""

    fact: str
    switch: tuple[Any, ...] | None = None
    """Facts that agree with a switch; None for a flag whose value must equal the fact."""


@dataclass(frozen=True)
class Renamed:
    """A flag that has another name here."""

    name: str
    convert: Callable[[str], str] = str
    """Converts slime's value to the value here."""
    note: str = ""
    """End of the message."""


def _mebibytes(text: str) -> str:
    """Converts bytes; another text than an integer is left to the option's own check."""
    if not re.fullmatch(r"[0-9]{1,18}", text):
        return text
    return str(max(1, int(text) >> 20))


def _http_address(text: str) -> str:
    """Adds http:// to an address without a scheme."""
    if "://" in text:
        return text
    return f"http://{text}"


def _transport(text: str) -> str:
    """Converts the name of a weight transport."""
    if text == "nccl":
        return "distributed"
    return text


RESTATED: Mapping[str, Restated] = {
    "--num-layers": Restated("num_hidden_layers"),
    "--hidden-size": Restated("hidden_size"),
    "--ffn-hidden-size": Restated("intermediate_size"),
    "--num-attention-heads": Restated("num_attention_heads"),
    "--group-query-attention": Restated("grouped_query_attention", (True,)),
    "--num-query-groups": Restated("num_key_value_heads"),
    "--kv-channels": Restated("head_dim"),
    "--multi-latent-attention": Restated("latent_attention", (True,)),
    "--q-lora-rank": Restated("q_lora_rank"),
    "--kv-lora-rank": Restated("kv_lora_rank"),
    "--qk-head-dim": Restated("qk_nope_head_dim"),
    "--qk-pos-emb-head-dim": Restated("qk_rope_head_dim"),
    "--v-head-dim": Restated("v_head_dim"),
    "--vocab-size": Restated("vocab_size"),
    "--max-position-embeddings": Restated("max_position_embeddings"),
    "--normalization": Restated("normalization"),
    "--norm-epsilon": Restated("rms_norm_eps"),
    "--position-embedding-type": Restated("position_embedding_type"),
    "--use-rotary-position-embeddings": Restated("position_embedding_type", ("rope",)),
    "--rotary-base": Restated("rope_theta"),
    "--rotary-percent": Restated("partial_rotary_factor"),
    "--rotary-interleaved": Restated("rotary_interleaved", (True,)),
    "--use-rope-scaling": Restated("rope_scaling", (True,)),
    "--rotary-scaling-factor": Restated("rope_scaling_factor"),
    "--mscale": Restated("mscale"),
    "--mscale-all-dim": Restated("mscale_all_dim"),
    "--swiglu": Restated("hidden_act", ("silu", "swish")),
    "--disable-bias-linear": Restated("mlp_bias", (False,)),
    "--add-qkv-bias": Restated("attention_bias", (True,)),
    "--qk-layernorm": Restated("qk_norm", (True,)),
    "--use-gated-attention": Restated("output_gate", (True,)),
    "--attention-output-gate": Restated("output_gate", (True,)),
    "--apply-layernorm-1p": Restated("zero_centered_norms", (True,)),
    "--linear-attention-freq": Restated("full_attention_interval"),
    "--linear-conv-kernel-dim": Restated("linear_conv_kernel_dim"),
    "--linear-num-key-heads": Restated("linear_num_key_heads"),
    "--linear-num-value-heads": Restated("linear_num_value_heads"),
    "--linear-key-head-dim": Restated("linear_key_head_dim"),
    "--linear-value-head-dim": Restated("linear_value_head_dim"),
    "--post-self-attn-layernorm": Restated("output_norms", (True,)),
    "--post-mlp-layernorm": Restated("output_norms", (True,)),
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
"""Flags that repeat config.json; they are accepted if they agree with it."""

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
    "--vllm-logprobs-mode": ("processed_logprobs",),
    "--lora-type": ("canonical_lora",),
    "--lambd": ("1",),
    "--start-rollout-id": ("0",),
    "--accumulate-allreduce-grads-in-fp32": (),
    "--attention-softmax-in-fp32": (),
    "--rollout-skip-special-tokens": (),
    "--use-fault-tolerance": (),
    "--no-offload-train": (),
    "--no-offload-rollout": (),
}
"""Flags that repeat fixed settings, and the values that agree with them; () for switches."""

RENAMED: Mapping[str, Renamed] = {
    "--sglang-server-concurrency": Renamed("--sglang-concurrency"),
    "--vllm-server-concurrency": Renamed("--vllm-concurrency"),
    "--rollout-num-gpus-per-engine": Renamed(
        "--sglang-tp-size", note="a flag of the servers that --sglang-launch starts"
    ),
    "--rollout-external-engine-addrs": Renamed(
        "--sglang-url", _http_address, note="with http:// before each address"
    ),
    "--update-weight-buffer-size": Renamed(
        "--sglang-bucket-mb", _mebibytes, note="in MiB, not bytes"
    ),
    "--update-weight-transport": Renamed(
        "--sglang-weight-sync", _transport, note="nccl is distributed there"
    ),
    "--update-weight-disk-dir": Renamed("--sglang-weight-dir"),
    "--balance-by-flops": Renamed(
        "--balance-data", note="which never exceeds --max-tokens-per-gpu"
    ),
    "--check-weight-update-equal": Renamed(
        "--check-weight-sync", note="which compares the engines' log-probs"
    ),
}
"""Flags that have another name here. A name that is also read here is an alias instead."""

CONFIG = "the model follows the checkpoint's config.json; remove the flag"
REMOVE = "this program has no counterpart; remove it, or use slime"
NO_CRITIC = "there is no critic; use --advantage-estimator grpo, rloo or reinforce_plus_plus"
NO_FINE_TUNING = "there is no supervised fine-tuning; use slime"
LAYERS = f"the model has layers that this program lacks; supported are {family_titles()}"
ONE_ADAPTER = "this program trains and samples with one LoRA adapter of dense layers; use miles"

RAW_REWARDS = "--custom-reward-post-process-path slime_tis.trainer.rewards.raw.raw_rewards"
"""Takes rewards as advantages, without the group's baseline and scale."""

VALUES: Mapping[str, Mapping[str, str]] = {
    "--advantage-estimator": {
        "gspo": "--advantage-estimator grpo --policy-loss gspo",
        "cispo": "--advantage-estimator grpo --policy-loss cispo",
    },
    "--rollout-function-path": {
        "slime.rollout.fully_async_rollout.generate_rollout_fully_async": "--rollout-lookahead 1",
        "vime.rollout.fully_async_rollout.generate_rollout_fully_async": "--rollout-lookahead 1",
        "fully_async_rollout.generate_rollout_fully_async": "--rollout-lookahead 1",
    },
    "--custom-tis-function-path": {
        "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp": (
            "--custom-tis-function-path custom_tis.mis.compute_mis_weights_with_cp"
        ),
    },
    "--eval-top-k": {"1": "--eval-temperature 0"},
    "--disable-rewards-normalization": {"": RAW_REWARDS},
    "--ci-test": {"": "--ci-train-rollout-logprob-abs-diff-threshold 0.1"},
}
"""Flags here that mean the same as values of slime's flags; a switch has an empty text."""

OTHER_VALUES: Mapping[str, Mapping[str, str]] = {
    "--advantage-estimator": {"ppo": NO_CRITIC},
    "--loss-type": {"sft_loss": NO_FINE_TUNING},
    "--rollout-function-path": {
        "slime.rollout.sft_rollout.generate_rollout": NO_FINE_TUNING,
        "vime.rollout.sft_rollout.generate_rollout": NO_FINE_TUNING,
    },
}
"""Advice on values of slime's flags that ask for another experiment."""

OTHER_EXPERIMENTS: Mapping[str, str] = {
    "--multi-lora-* --lora-train-only --experts-shared-outer-loras": ONE_ADAPTER,
    "--use-opd --opd-*": "there is no on-policy distillation; use slime",
    "--fp8-*": (
        "training is in bf16, fp16 or fp32, which is another experiment; use --bf16, and for"
        " servers options such as --sglang-quantization fp8"
    ),
    "--use-stateless-adam --reset-optimizer-states --muon-*": (
        "the optimizer is Adam, whose state lasts for the run; remove it, or use slime"
    ),
    "--disable-compute-advantages-and-returns": (
        "advantages are always computed; use --custom-loss-function-path with your function, or"
        " slime for supervised fine-tuning"
    ),
    "--custom-megatron-* --custom-model-provider-path": (
        "no function is called inside the training engine; use slime, or change weights and masks"
        " with --custom-tis-function-path, and the loss with --custom-loss-function-path"
    ),
    (
        "--rollout-data-postprocess-path --custom-convert-samples-to-train-data-path "
        "--rollout-sample-hook-path"
    ): (
        "no function is called on the converted batch; change samples with"
        " --rollout-sample-filter-path or --rollout-all-samples-process-path, and rewards with"
        " --custom-reward-post-process-path"
    ),
    "--multimodal-keys": "prompts are text; use slime for images",
    "--no-position-embedding --freeze-indexer": LAYERS,
}
"""Advice on flags of training that this program cannot do, which `slime-tis port` refuses.

Blanks separate the flags; a name that ends in * is a prefix."""

FIXED_EXPERIMENT = (
    "--optimizer",
    "--hidden-dropout",
    "--attention-dropout",
    "--moe-aux-loss-coeff",
    "--moe-router-bias-update-rate",
)
"""Flags of FIXED whose other values are another experiment."""

ADVICE: Mapping[str, str] = {
    "--actor-num-nodes --actor-num-gpus-per-node --num-gpus-per-node": (
        "torchrun starts the ranks; use torchrun --nnodes NODES --nproc-per-node GPUS train.py"
    ),
    "--rollout-num-gpus": (
        "use --rollout-engine sglang --sglang-launch SERVERS --sglang-tp-size GPUS_PER_SERVER"
    ),
    "--colocate --offload --offload-train --offload-rollout --release-train": (
        "training and SGLang do not share GPUs; set --sglang-base-gpu-id, or use --rollout-engine"
        " local"
    ),
    "--prefill-num-servers": (
        "start servers of several kinds yourself, and name them with --sglang-url"
    ),
    "--vllm-weight-sync-packed --no-vllm-weight-sync-packed": (
        "weights travel in buckets of --vllm-bucket-mb; remove it"
    ),
    "--vllm-weight-transfer-timeout-sec": "use --vllm-request-timeout",
    "--vllm-enable-deterministic-inference": (
        "requests have seeds of --rollout-seed; for kernels that do not depend on the batch, set"
        " VLLM_BATCH_INVARIANT=1 in the environment"
    ),
    "--vllm-router-policy --router-*": (
        "start the router yourself, and name it with --vllm-router-ip and --vllm-router-port"
    ),
    "--spec --megatron-config-path --model-name --moe-*": CONFIG,
    "--megatron-to-hf-mode --padded-vocab-size --ref-ckpt-step": (
        "weights are read from safetensors and written to them, without conversion; remove it"
    ),
    (
        "--attention-backend --no-rope-fusion --no-masked-softmax-fusion "
        "--no-gradient-accumulation-fusion --no-bias-swiglu-fusion "
        "--make-vocab-size-divisible-by --seq-length --data-pad-size-multiplier "
        "--enable-experimental --no-check-for-nan-in-loss-and-grad --allgather-cp "
        "--recompute-loss-function --distributed-backend --qwen-gdn-backend"
    ): ("train.py chooses kernels, padding and buffers; remove it"),
    "--decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers": (
        "pipeline stages have equal sizes; choose a --pipeline-model-parallel-size that divides the"
        " layers"
    ),
    "--train-memory-margin-bytes": "memory is not moved between training and servers; remove it",
    "--exclude-modules": "name all layers that get an adapter with --lora-target-modules",
    "--lora-sync-from-tensor --lora-base-cpu-backup --check-lora-weight-equal": (
        "the rollout engine gets weights with the merged adapter; remove it, and compare them with"
        " --check-weight-sync"
    ),
    "--train-env-vars": "set the environment variables of torchrun's processes yourself",
    "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer": (
        "optimizer state stays on the GPUs in fp32; shard it with --use-distributed-optimizer"
    ),
    "--lr-warmup-fraction": "use optimizer steps: --lr-warmup-iters N and --lr-decay-iters N",
    "--log-probs-max-tokens-per-gpu": "use --max-tokens-per-gpu and --log-probs-chunk-size",
    "--eval-function-path": "use --eval-prompt-data NAME PATH with --custom-generate-function-path",
    "--custom-update-weight-post-write-path": (
        "no function is called after a weight update; remove it, or use slime"
    ),
    "--group-rm": (
        "name the reward function's second parameter samples: it then gets all samples of a prompt"
    ),
    "--loss-mask-type": (
        "the tokenizer's chat template renders prompts; render others into the prompt file"
    ),
    "--critic-* --num-critic-only-steps --value-clip": NO_CRITIC,
    (
        "--enable-mtp-training --mtp-* --profile-* --ci-disable-kl-checker --ci-save-grad-norm "
        "--ci-load-grad-norm"
    ): REMOVE,
    (
        "--rollout-health-check-* --update-weight-delta-* --update-weight-local-checkpoint-dir "
        "--update-weight-disk-keep-files"
    ): ("see --sglang-recovery-timeout and --sglang-weight-sync"),
    (
        "--min-p --rollout-min-p --repetition-penalty --rollout-repetition-penalty"
        " --presence-penalty --rollout-presence-penalty --frequency-penalty"
        " --rollout-frequency-penalty --min-new-tokens --rollout-min-new-tokens"
    ): (
        "training computes log-probs after temperature, top-k and top-p, and this would sample from"
        " another distribution; remove it, and limit tokens with --rollout-top-p or"
        " --rollout-top-k"
    ),
    "--debug-train-only": "use only --load-debug-rollout-data",
    "--deterministic-mode": (
        "runs in fp32 on a CPU are bitwise repeatable; set --seed and --rollout-seed"
    ),
    "--wandb-key --wandb-host --wandb-team --wandb-run-id --disable-wandb-random-suffix": (
        "use WANDB_API_KEY, WANDB_BASE_URL, WANDB_ENTITY or WANDB_RUN_ID"
    ),
    "--no-save-optim --no-load-optim --no-load-rng --finetune --ckpt-*": (
        "a checkpoint has weights, optimizer and data; to start from weights only, use"
        " --hf-checkpoint"
    ),
    "--eval-max-context-len --eval-max-prompt-len": (
        "held-out prompts have the limits of training; use --rollout-max-context-len and"
        " --rollout-max-prompt-len"
    ),
    "--eval-min-new-tokens": (
        "a minimum length forbids the end of sequence, which would be another policy; remove it"
    ),
    (
        "--fetch-trajectory-retry-times --load-forge-rollout-data --min-batch-collection-ratio "
        "--rollout-buffer-url --rollout-task-type"
    ): "it belongs to a rollout function of slime; read it in yours from --custom-config-path",
    "--http-proxy --use-distributed-post": (
        "rank 0 sends all requests; set http_proxy in the environment for a proxy"
    ),
    "--keep-old-actor": (
        "no second copy of the policy is kept: log-probs of the old policy are computed before the"
        " first step; for older weights use --old-logprobs interpolate"
    ),
    "--load-debug-rollout-data-subsample": (
        "a file holds complete rollouts; write a smaller one with a lower --rollout-batch-size"
    ),
    "--log-correct-samples --log-reward-category": (
        "each number of a reward dict is reported as rollout/reward/KEY; report others with"
        " --custom-rollout-log-function-path"
    ),
    "--log-multi-turn": (
        "turns and lengths of agents are always reported, as rollout/turns and"
        " rollout/observation_len; remove it"
    ),
    "--megatron-deepgemm-*": "kernels of DeepGEMM are for FP8 training; remove it, or use slime",
    "--memory-recorder --memory-snapshot-* --record-memory-history": (
        "slime-tis plan estimates the memory; record it with torch.cuda.memory in a user function"
    ),
    "--rollout-data-transport": (
        "there is no Ray object store: rank 0 sends samples to the other ranks; remove it"
    ),
    "--wandb-always-use-train-step": (
        "all metrics are logged by optimizer step already; remove it"
    ),
}
"""Advice on flags without a counterpart. Blanks separate the flags; a name that ends in * is a
prefix."""


def advice_for(flag: str) -> str | None:
    """Returns the advice on a flag of slime or Megatron that this program lacks, or None."""
    return experiment_of(flag) or _match(flag, ADVICE)


def experiment_of(flag: str) -> str | None:
    """Returns why a flag makes a script another experiment than this program can run, or None."""
    return _match(flag, OTHER_EXPERIMENTS)


def _match(flag: str, table: Mapping[str, str]) -> str | None:
    """Returns the text for a flag, else for its longest prefix, else None."""
    texts = {}
    for names, text in table.items():
        for name in names.split():
            texts[name] = text
    if flag in texts:
        return texts[flag]
    prefixes = [name for name in texts if name.endswith("*") and flag.startswith(name[:-1])]
    if not prefixes:
        return None
    return texts[max(prefixes, key=len)]


def value_advice(flag: str) -> dict[str, str]:
    """Returns the advice on values of a slime flag, by value."""
    advice = {value: f"write {flags}" for value, flags in VALUES.get(flag, {}).items()}
    return advice | dict(OTHER_VALUES.get(flag, {}))


def checkpoint_facts(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns config.json with derived values, in the names of RESTATED.

    Args:
        model: The unchecked content of config.json.

    Returns:
        The facts; one that the file omits is missing or None.
    """
    facts = {name: value for name, value in model.items() if value is not None}
    heads = facts.get("num_attention_heads")
    hidden = facts.get("hidden_size")
    if isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        facts.setdefault("head_dim", hidden // heads)
    facts.setdefault("num_key_value_heads", heads)
    facts |= _rope_facts(facts)
    facts.setdefault("partial_rotary_factor", 1.0)
    # All families here have these properties, which config.json does not contain.
    facts["normalization"] = "RMSNorm"
    facts["position_embedding_type"] = "rope"
    facts["grouped_query_attention"] = True
    architectures = facts.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        return facts
    name = architectures[0]
    if not isinstance(name, str) or name not in FAMILIES:
        return facts
    family = FAMILIES[name]
    facts["rotary_interleaved"] = _family_fact(facts, family.attention.turns_neighbors)
    facts["output_norms"] = family.norms != "inputs"
    kinds = facts.get("layer_types")
    if isinstance(kinds, list) and "full_attention" in kinds:
        facts.setdefault("full_attention_interval", kinds.index("full_attention") + 1)
    facts["output_gate"] = family.attention.output_gate
    facts["zero_centered_norms"] = family.norm_offset == 1.0
    facts["latent_attention"] = family.attention.latent
    if family.attention.latent:
        # Megatron's --kv-channels is the size of a value; the norms are those of latent vectors.
        facts["head_dim"] = facts.get("v_head_dim")
        facts["qk_norm"] = True
    else:
        facts["qk_norm"] = _family_fact(facts, family.attention.qk_norm)
    facts["attention_bias"] = _family_fact(facts, family.attention.qkv_bias)
    if family.experts is not None:
        facts |= _expert_facts(facts, family.experts)
    return facts


def _rope_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the facts of rotary embeddings."""
    # Transformers 5 renamed rope_scaling to rope_parameters; older files write type for rope_type.
    rope = facts.get("rope_parameters") or facts.get("rope_scaling")
    if not isinstance(rope, Mapping):
        rope = {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    rope_facts = {
        "rope_scaling": rope_type != "default",
        "rope_scaling_factor": rope.get("factor"),
    }
    for name in ("rope_theta", "partial_rotary_factor", "mscale", "mscale_all_dim"):
        if name in rope:
            rope_facts[name] = rope[name]
    return rope_facts


def _family_fact(facts: Mapping[str, Any], value: Any) -> Any:
    """Returns a property of a family, which is a constant or the name of a fact."""
    if isinstance(value, str):
        return facts.get(value)
    return value


def _expert_facts(facts: Mapping[str, Any], experts: Experts) -> dict[str, Any]:
    """Returns the facts of a mixture of experts."""
    score_function = "sigmoid" if experts.router == "sigmoid" else "softmax"
    expert_facts = {
        "num_experts": facts.get(experts.count),
        "router_score_function": score_function,
        "expert_bias": experts.router == "sigmoid",
        "shared_expert_gate": experts.has_shared_gate,
    }
    if experts.router == "sigmoid":
        # --moe-router-pre-softmax has no effect without a softmax
        expert_facts["norm_topk_prob"] = None
    # GLM-4.5 has the number of shared experts, Qwen2-MoE their joint inner size.
    shared = None
    if experts.shared_count is not None:
        shared = facts.get(experts.shared_count)
    width = facts.get("moe_intermediate_size")
    if isinstance(shared, int) and isinstance(width, int):
        expert_facts["shared_expert_intermediate_size"] = shared * width
    return expert_facts


def is_checked(name: str) -> bool:
    """Whether a flag repeats config.json or a fixed setting."""
    return name in RESTATED or name in FIXED


def refusal(
    unknown: Sequence[Flag], known: Collection[str], model: Mapping[str, Any] | None = None
) -> str:
    """Returns one message about all refused flags, or an empty text.

    Args:
        unknown: Flags that this program does not have.
        known: Flags that this program has.
        model: config.json; None if it cannot be read.
    """
    judgements = []
    for flag in unknown[:MAX_FLAGS]:
        judgement = _judge(flag, known, model)
        if judgement is not None:
            judgements.append(judgement)
    # By rank: wrong values of slime's flags come first, words that are no flags last.
    judgements.sort()
    messages = [text for _, text in judgements]
    if len(messages) < 2:
        return "".join(messages)
    count = str(len(messages))
    if len(unknown) > MAX_FLAGS:
        count = f"more than {MAX_FLAGS}"
    lines = [
        f"{count} flags are refused (slime-tis port SCRIPT rewrites a launch script of slime):"
    ]
    lines += [f"  {text}" for text in messages]
    return "\n".join(lines)


def _judge(
    flag: Flag, known: Collection[str], model: Mapping[str, Any] | None
) -> tuple[int, str] | None:
    """Returns the rank and the text of the message about a flag; None for an accepted flag."""
    name = flag.name
    if is_checked(name):
        difference = disagreement(flag, model)
        if not difference:
            return None
        # With config.json in the message, "it" could be either.
        removed = "the flag"
        if name in FIXED:
            removed = "it"
        return 0, f"{difference}; remove {removed}."
    if name in RENAMED:
        new = RENAMED[name]
        note = ""
        if new.note:
            note = f", {new.note}"
        return 1, f"{name} is {new.name} here{note}."
    replacement = VALUES.get(name, {}).get(" ".join(flag.values))
    if replacement is not None:
        return 2, f"{name} is a flag of slime; write {replacement}."
    advice = advice_for(name)
    if advice is not None:
        return 2, f"{name} is not supported: {advice}."
    # Servers have hundreds of flags, so any unknown name may be one of theirs.
    engine = name[2:].partition("-")[0]
    if engine in SERVER_ENGINES and similar(name, known) is None:
        advice = f"add --rollout-engine {engine} --{engine}-launch N"
        return 2, f"{name} is a flag of {SERVER_ENGINES[engine].title} servers; {advice}."
    return 3, f"{quoted(name)[1:-1]} is not a flag; {nearest(name, known)}"


def disagreement(flag: Flag, model: Mapping[str, Any] | None) -> str:
    """Compares a flag of RESTATED or FIXED with config.json or the fixed value.

    Returns:
        The difference as a clause without a full stop; empty if the flag agrees, or if there is no
        config.json to compare with.
    """
    shown = "without a value"
    if flag.values:
        shown = repr(" ".join(flag.values)[:80])
    is_on = _switch_value(flag)
    if flag.name in FIXED:
        allowed = FIXED[flag.name]
        is_allowed = any(_is_same(flag.values, value) for value in allowed)
        if is_allowed or (not allowed and is_on):
            return ""
        return f"{flag.name} is {shown} but always {' or '.join(allowed) or 'on'} here"
    restated = RESTATED[flag.name]
    expected = None
    if model is not None:
        expected = checkpoint_facts(model).get(restated.fact)
    if restated.switch is None:
        is_equal = expected is None or _is_same(flag.values, expected)
        agrees = len(flag.values) == 1 and is_equal
    elif is_on:
        agrees = expected is None or expected in restated.switch
        shown = "set"
    else:
        # A switch that is off asks for nothing; other words are wrong.
        agrees = is_on is not None
    if agrees:
        return ""
    return f"{flag.name} is {shown} but config.json has {restated.fact} {_as_json(expected)}"


def _switch_value(flag: Flag) -> bool | None:
    """Returns a switch's value, or None if the words after the flag are none."""
    if not flag.values:
        return True
    if len(flag.values) > 1:
        return None
    return SWITCHES.get(flag.values[0].lower())


def _is_same(values: tuple[str, ...], expected: Any) -> bool:
    """Whether there is one value, and it is the same number or the same word."""
    text = " ".join(values)
    try:
        # Scripts write 1000000 for config.json's 1000000.0, or 1e-06 for 1e-6.
        return math.isclose(float(text), float(expected), rel_tol=1e-9)
    except (TypeError, ValueError, OverflowError):
        return text.lower() == str(expected).lower()


def _as_json(value: Any) -> str:
    """Returns a fact as it looks in config.json, for messages."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)[:80]
