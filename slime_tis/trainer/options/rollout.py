"""Options of the rollouts: the sampling engine, prompts, sampling, rewards and evaluation."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from slime_tis.errors import quoted
from slime_tis.limits import Limits, check_fields, option
from slime_tis.trainer.options.rm_types import check_rm_type, is_remote, parse_weights, reward_keys
from slime_tis.trainer.options.sglang import normalized_url

data_option = partial(option, group="model and data")
rollout_option = partial(option, group="rollout")
sampling_option = partial(option, group="sampling")
reward_option = partial(option, group="rewards")
evaluation_option = partial(option, group="evaluation", needs=("--eval-prompt-data",))
routing_option = partial(option, group="routing replay")

Rounding = Literal["nearest", "stochastic", "error-compensated"]
"""How weights are rounded on their way to the rollout engine."""

GREEDY = "greedy samples of a group are identical and have no gradient"


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """The source of prompts, and how responses are sampled and scored."""

    rollout_engine: Literal["local", "sglang"] = rollout_option("local")
    """Engine that samples: transformers inside the training process, or SGLang servers over HTTP."""

    rollout_precision: Literal["fp32", "fp16", "bf16", "fp8", "int8"] = rollout_option(
        "fp32", needs=("--rollout-engine=local",)
    )
    """Precision of the local engine's copy of the weights; for servers use --sglang-dtype, --sglang-quantization."""

    rollout_router_bits: Annotated[int | None, Limits(ge=2, le=16)] = rollout_option(
        None, needs=("--rollout-engine=local",)
    )
    """Bits to which the local engine rounds router weights, for studies of routing mismatch; unset keeps their type."""

    use_rollout_routing_replay: bool = routing_option(False)
    """Use the rollout engine's experts of every token for old log-probs and for training (R3)."""

    routing_replay_weights: bool = routing_option(False, needs=("--use-rollout-routing-replay",))
    """Also use the rollout engine's combine weights; the gradient is the training router's."""

    measure_routing_mismatch: Annotated[int | None, Limits(ge=1, le=1_000_000)] = routing_option(None)
    """Optimizer steps between measurements of the mismatch with and without routing replay; unset means none."""

    weight_update_rounding: Rounding = rollout_option(
        "nearest",
        needs=(
            "--rollout-precision=fp16",
            "--rollout-precision=bf16",
            "--rollout-precision=fp8",
            "--rollout-precision=int8",
            "--rollout-engine=sglang",
        ),
    )
    """Rounding to the rollout engine's precision; stochastic and error-compensated also transmit smaller updates."""

    update_weights_interval: Annotated[int, Limits(ge=1, le=1_000_000)] = rollout_option(1)
    """Rollouts between two weight updates of the engine; samples are up to this many rollouts stale."""

    rollout_lookahead: Annotated[int, Limits(ge=0, le=1_000)] = rollout_option(0)
    """Rollouts generated ahead during training; samples are up to this many rollouts stale."""

    max_weight_staleness: Annotated[int | None, Limits(ge=0, le=1_000_000)] = rollout_option(None)
    """Largest age of a response's oldest token, in optimizer steps; older responses are masked and counted."""

    partial_rollout: bool = rollout_option(False)
    """Abort the slowest responses once enough prompts are answered, and resume them in the next rollout."""

    mask_offpolicy_in_partial_rollout: bool = rollout_option(False, needs=("--partial-rollout",))
    """Do not train tokens of resumed responses that older weights than those of the last token sampled."""

    over_sampling_batch_size: Annotated[int | None, Limits(ge=1, le=1_000_000)] = rollout_option(
        None, needs=("--partial-rollout", "--dynamic-sampling-filter-path")
    )
    """Prompts of one batch; unset means rollout_batch_size, which partial_rollout does not allow."""

    dynamic_sampling_filter_path: str | None = rollout_option(None, metavar="FUNCTION")
    """User function that accepts or drops each group of samples; new prompts replace dropped groups (DAPO)."""

    custom_generate_function_path: str | None = rollout_option(None, metavar="FUNCTION")
    """User function that makes each sample with any number of engine requests, for example for agents with tools."""

    generate_concurrency: Annotated[int, Limits(ge=1, le=65_536)] = rollout_option(
        256, needs=("--custom-generate-function-path",)
    )
    """Largest number of simultaneous calls of custom_generate_function_path, per rank of the local engine."""

    generate_timeout: Annotated[float, Limits(gt=0, le=10_000_000)] = rollout_option(
        3600.0, needs=("--custom-generate-function-path",)
    )
    """Longest time for one call of custom_generate_function_path, in seconds; then the sample is dropped."""

    retokenization: Literal["reject", "keep-mask", "error"] = rollout_option(
        "reject", needs=("--custom-generate-function-path",)
    )
    """Samples whose tokens differ from the sampled ones: mask the sample, mask these tokens, or end the run."""

    dynamic_sampling_max_batches: Annotated[int, Limits(ge=1, le=1_000_000)] = rollout_option(
        30, needs=("--dynamic-sampling-filter-path",)
    )
    """Largest number of batches for one rollout with dynamic sampling; then the run saves and stops."""

    buffer_filter_path: str | None = rollout_option(None, metavar="FUNCTION")
    """User function that chooses the unfinished groups of partial_rollout that the next batch resumes."""

    rollout_sample_filter_path: str | None = rollout_option(None, metavar="FUNCTION")
    """User function that sets remove_sample on samples of a rollout to exclude them from training."""

    rollout_all_samples_process_path: str | None = rollout_option(None, metavar="FUNCTION")
    """User function that gets all sampled groups of a rollout, including groups that dynamic sampling dropped."""

    custom_reward_post_process_path: str | None = reward_option(None, metavar="FUNCTION")
    """User function that returns (raw rewards, advantages) of a rollout, instead of the advantage estimator."""

    custom_rollout_log_function_path: str | None = rollout_option(None, metavar="FUNCTION")
    """User function that gets every rollout; if it returns true, the metrics rollout/… are not logged."""

    custom_eval_rollout_log_function_path: str | None = evaluation_option(None, metavar="FUNCTION")
    """User function that gets the answers to held-out prompts; if it returns true, eval/… is not logged."""

    check_engines: Literal["warn", "stop", "off"] = rollout_option("warn")
    """Before the first step, compare both engines on a few answers; if they disagree, search for the cause."""

    check_weight_sync: bool = rollout_option(False)
    """After each weight update, compare tensors and log-probs of a probe prompt between the engines."""

    weight_sync_bound: Annotated[float | None, Limits(gt=0, le=1_000)] = rollout_option(
        None, needs=("--check-weight-sync",)
    )
    """Largest mean absolute difference of the probe's log-probs; unset derives it from the engines' precision."""

    rollout_function_path: str | None = rollout_option(None, metavar="FUNCTION")
    """User function that makes whole rollouts instead of the rollout engine, which still answers held-out prompts."""

    data_source_path: str | None = data_option(None, metavar="FUNCTION")
    """User class that provides the training prompts."""

    prompt_data: str = data_option(metavar="FILE")
    """File of training prompts, JSONL or parquet, one prompt per row."""

    input_key: str = data_option("input", metavar="KEY")
    """Key of a row that holds the prompt: a string, or a list of chat messages."""

    label_key: str | None = data_option(None, metavar="KEY")
    """Key of a row that holds the label for the reward; unset means no label."""

    metadata_key: str = data_option("metadata", metavar="KEY")
    """Key of a row that holds a mapping for custom rewards."""

    apply_chat_template: bool = data_option(False)
    """Render prompts with the tokenizer's chat template before tokenization."""

    rollout_batch_size: Annotated[int, Limits(ge=1, le=65_536)] = rollout_option()
    """Prompts sampled per rollout."""

    n_samples_per_prompt: Annotated[int, Limits(ge=1, le=4_096)] = rollout_option(1)
    """Responses per prompt; they form the group of a baseline."""

    rollout_max_response_len: Annotated[int, Limits(ge=1, le=10_000_000)] = rollout_option()
    """Longest response, in tokens."""

    rollout_max_prompt_len: Annotated[int | None, Limits(ge=1, le=10_000_000)] = rollout_option(None)
    """Longest prompt, in tokens; longer ones are dropped; unset means the context's limit."""

    rollout_max_context_len: Annotated[int | None, Limits(ge=2, le=10_000_000)] = rollout_option(None)
    """Longest prompt and response together, in tokens; unset means the model's limit."""

    rollout_temperature: Annotated[float, Limits(ge=0.01, le=100, hint=GREEDY)] = sampling_option(1.0)
    """Sampling temperature that divides the logits."""

    rollout_top_p: Annotated[float, Limits(gt=0, le=1)] = sampling_option(1.0)
    """Nucleus sampling keeps the likeliest tokens of this total probability; 1 keeps all."""

    rollout_top_k: Annotated[int, Limits(ge=1, le=10_000_000, also=(-1,))] = sampling_option(-1)
    """Top-k sampling keeps this many of the likeliest tokens; -1 keeps all."""

    allow_truncation_bias: bool = sampling_option(False)
    """Train on samples of rollout_top_p or rollout_top_k without recorded token sets, over the whole vocabulary."""

    rollout_shuffle: bool = data_option(False)
    """Visit the prompts in a new order every epoch."""

    rollout_seed: Annotated[int, Limits(ge=0, le=2**31 - 1)] = sampling_option(42)
    """Seed of sampling and shuffling; SGLang servers use it only with --enable-deterministic-inference."""

    rollout_stop_token_ids: Annotated[tuple[int, ...] | None, Limits(ge=0, le=2**31 - 1)] = sampling_option(
        None, metavar="ID"
    )
    """Token ids that end a response, in addition to the tokenizer's end of sequence."""

    rm_type: str | None = reward_option(None, metavar="NAME")
    """Built-in reward: exact_match, math, deepscaler, dapo, f1, gpqa, random or remote_rm; each also as boxed_NAME."""

    rm_url: str | None = reward_option(None, metavar="URL")
    """URL of the reward server: gets prompt, response and label, answers with a number or an object of numbers."""

    rm_timeout: Annotated[float, Limits(ge=0.1, le=86_400)] = reward_option(120.0, needs=("--rm-url",))
    """Longest wait for one answer of the reward server, in seconds."""

    rm_max_retries: Annotated[int, Limits(ge=0, le=1_000)] = reward_option(10, needs=("--rm-url",))
    """Retries of a failed request to the reward server."""

    rm_concurrency: Annotated[int, Limits(ge=1, le=10_000)] = reward_option(64, needs=("--rm-url",))
    """Simultaneous requests to the reward server, per rank."""

    custom_rm_path: str | None = reward_option(None, metavar="FUNCTION")
    """User function for rewards."""

    reward_key: str | None = reward_option(None, metavar="KEY")
    """Key of the reward if the reward function returns a dict; its other numbers are reported."""

    reward_weights: str | None = reward_option(None, metavar="KEY=WEIGHT,…")
    """Weights of a dict reward's numbers, whose weighted sum is the reward; replaces reward_key."""

    eval_reward_key: str | None = reward_option(None, metavar="KEY", needs=("--eval-prompt-data",))
    """Key of the reward of held-out prompts; unset means reward_key or reward_weights."""

    eval_interval: Annotated[int | None, Limits(ge=1, le=1_000_000)] = evaluation_option(None)
    """Rollouts between two evaluations; unset means before and after training only."""

    eval_prompt_data: tuple[str, ...] | None = evaluation_option(None, metavar="[NAME] PATH", needs=())
    """Held-out prompt files as NAME PATH pairs; a single PATH is named accuracy."""

    n_samples_per_eval_prompt: Annotated[int, Limits(ge=1, le=4_096)] = evaluation_option(1)
    """Responses sampled per held-out prompt."""

    eval_temperature: Annotated[float, Limits(ge=0.01, le=100, also=(0,))] = evaluation_option(0.0)
    """Sampling temperature of evaluation; 0 is greedy."""

    eval_top_p: Annotated[float, Limits(gt=0, le=1)] = evaluation_option(1.0)
    """Nucleus probability of evaluation; 1 keeps all tokens."""

    eval_max_response_len: Annotated[int | None, Limits(ge=1, le=10_000_000)] = evaluation_option(None)
    """Longest response in evaluation, in tokens; unset means rollout_max_response_len."""

    eval_input_key: str | None = evaluation_option(None, metavar="KEY")
    """Key of a held-out row that holds the prompt; unset means input_key."""

    eval_label_key: str | None = evaluation_option(None, metavar="KEY")
    """Key of a held-out row that holds the label; unset means label_key."""

    eval_engine: Literal["local", "rollout"] | None = evaluation_option(None)
    """Engine for held-out prompts: a second, unrounded copy in the training process, or the rollout engine."""

    skip_eval_before_train: bool = evaluation_option(False)
    """Skip the evaluation before the first step."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.allow_truncation_bias and not self.truncates_sampling:
            raise ValueError("--allow-truncation-bias has no effect without --rollout-top-p or --rollout-top-k.")
        if self.routing_replay_weights and self.rollout_engine == "sglang":
            raise ValueError("--routing-replay-weights needs --rollout-engine local: SGLang returns no weights.")
        _check_evaluation(self)
        _check_partial_rollout(self)
        _check_reward(self)

    @property
    def evaluates_locally(self) -> bool:
        """Whether held-out prompts are answered by a model in the training process."""
        return (self.eval_engine or ("local" if self.rollout_engine == "local" else "rollout")) == "local"

    @property
    def truncates_sampling(self) -> bool:
        """Whether top-p or top-k omit tokens in the samples that are trained on."""
        return self.rollout_top_p < 1.0 or self.rollout_top_k != -1

    @property
    def records_routed_experts(self) -> bool:
        """Whether the experts of samples for training are recorded, to be replayed or to measure replay with."""
        return self.use_rollout_routing_replay or self.measure_routing_mismatch is not None

    @property
    def eval_prompt_sets(self) -> tuple[tuple[str, str], ...]:
        """The held-out prompt files as (name, path) pairs, empty without evaluation."""
        parts = self.eval_prompt_data or ()
        if len(parts) == 1:
            return (("accuracy", parts[0]),)
        return tuple(zip(parts[::2], parts[1::2], strict=True))


def _check_reward(config: RolloutConfig) -> None:
    name, weights = config.rm_type, parse_weights(config.reward_weights) if config.reward_weights else {}
    scores = name or config.custom_rm_path or config.custom_generate_function_path
    if scores is None:
        raise ValueError("--rm-type is unset and so is --custom-rm-path; add one of them to score responses.")
    if name is not None and config.custom_rm_path is not None:
        raise ValueError("--rm-type and --custom-rm-path are both given; remove one of the two.")
    if weights and config.reward_key is not None:
        raise ValueError("--reward-weights and --reward-key are both given; remove one of the two.")
    if config.rm_url is not None:
        normalized_url(config.rm_url, "--rm-url")
    if name is None:
        return
    check_rm_type("--rm-type", name)
    if not is_remote(name):
        _check_reward_keys(config, name, [*weights])
    elif config.rm_url is None:
        raise ValueError(f"--rm-type is {name} but --rm-url is unset; add the URL of the reward server.")


def _check_reward_keys(config: RolloutConfig, name: str, weighted: list[str]) -> None:
    keys = reward_keys(name)
    gives = f"--rm-type {name} gives {' and '.join(keys) or 'a number'}"
    named = [("--reward-key", config.reward_key), ("--eval-reward-key", config.eval_reward_key)]
    for flag, key in [*named, *(("--reward-weights", key) for key in weighted)]:
        if key is not None and key not in keys:
            raise ValueError(f"{flag} is {key!r} but {gives}; change or remove it.")
    if keys and config.reward_key is None and not weighted:
        raise ValueError(f"{gives}; add --reward-key {keys[0]}.")


def _check_evaluation(config: RolloutConfig) -> None:
    if config.eval_top_p != 1 and config.eval_temperature == 0:
        raise ValueError("--eval-top-p has no effect with --eval-temperature 0; remove it, or raise the temperature.")
    count = len(config.eval_prompt_data or ())
    if count > 1 and count % 2 == 1:
        raise ValueError(f"--eval-prompt-data has {count} values, but needs one PATH or NAME PATH pairs.")
    names = [name for name, _ in config.eval_prompt_sets]
    if len(set(names)) < len(names):
        raise ValueError(f"--eval-prompt-data names {quoted(', '.join(names))[1:-1]}; give each name once.")


def _check_partial_rollout(config: RolloutConfig) -> None:
    size, batch = config.over_sampling_batch_size, config.rollout_batch_size
    if size is not None and size < batch:
        raise ValueError(f"--over-sampling-batch-size is {size} but --rollout-batch-size is {batch}; raise it.")
    if not config.partial_rollout:
        if config.buffer_filter_path is not None:
            raise ValueError("--buffer-filter-path has no effect without --partial-rollout; add that, or remove it.")
        return
    if config.rollout_engine != "sglang":
        raise ValueError("--partial-rollout needs --rollout-engine sglang: the local engine decodes whole batches.")
    if size is None or size == batch:
        raise ValueError(f"--over-sampling-batch-size is {size}; with --partial-rollout make it more than {batch}.")
    if config.rollout_lookahead:
        raise ValueError("--rollout-lookahead and --partial-rollout are both given; remove one of them.")
