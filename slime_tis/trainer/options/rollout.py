"""Options of the rollouts: the sampling engine, prompts, sampling, rewards and evaluation."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from slime_tis.errors import quoted
from slime_tis.limits import Limits, check_fields, flag, option
from slime_tis.trainer.options.rm_types import check_rm_type, is_remote, parse_weights, reward_keys
from slime_tis.trainer.options.sglang import shown_url, split_url

data_option = partial(option, group="model and data")
rollout_option = partial(option, group="rollout")
sampling_option = partial(option, group="sampling")
reward_option = partial(option, group="rewards")
evaluation_option = partial(option, group="evaluation", needs=("--eval-prompt-data",))
routing_option = partial(option, group="routing replay")

Rounding = Literal["nearest", "stochastic", "error-compensated"]
"""How weights are rounded on their way to the rollout engine."""

GREEDY = "greedy samples of a group are all alike and teach nothing"


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Where prompts come from, how responses are sampled, and how they are scored."""

    rollout_engine: Literal["local", "sglang"] = rollout_option("local")
    """Engine that samples the responses: local runs transformers inside the training process, sglang asks
    SGLang servers over HTTP."""

    rollout_precision: Literal["fp32", "bf16", "fp8", "int8"] = rollout_option(
        "fp32", needs=("--rollout-engine=local",)
    )
    """Precision of the local engine's own copy of the weights; below fp32 the mismatch with training is real. SGLang
    servers have their own (--sglang-dtype, --sglang-quantization)."""

    rollout_router_bits: Annotated[int | None, Limits(ge=2, le=16)] = rollout_option(
        None, needs=("--rollout-engine=local",)
    )
    """Bits that the local engine rounds the weights of mixture-of-experts routers to, for studies of engines whose
    routers disagree; unset leaves them in the rollout precision's own type, as engines with 8-bit weights do."""

    use_rollout_routing_replay: bool = routing_option(False)
    """Take the experts that the rollout engine chose for every token in the passes for old log-probs and in training
    (R3); the reference policy's routers choose themselves. With one expert per token, samples of SGLang that a layer
    sends to expert 0 throughout are trained on without: servers mark so what they did not record."""

    routing_replay_weights: bool = routing_option(False, needs=("--use-rollout-routing-replay",))
    """Also take the weights that the rollout engine combined these experts' outputs with; the gradient is that of the
    training router's own weights."""

    measure_routing_mismatch: Annotated[int | None, Limits(ge=1, le=1_000_000)] = routing_option(None)
    """Optimizer steps between two measurements of the mismatch with and without routing replay, whether or not the run
    replays, each one more forward pass; unset means none."""

    weight_update_rounding: Rounding = rollout_option(
        "nearest",
        needs=(
            "--rollout-precision=bf16",
            "--rollout-precision=fp8",
            "--rollout-precision=int8",
            "--rollout-engine=sglang",
        ),
    )
    """How weights are rounded to the rollout engine's precision: nearest, stochastic (unbiased, at random by seed and
    version) or error-compensated (the error of one update is added to the next); the last two let updates through that
    are smaller than the precision."""

    update_weights_interval: Annotated[int, Limits(ge=1, le=1_000_000)] = rollout_option(1)
    """Rollouts between two weight updates of the engine; N makes samples up to N steps stale."""

    rollout_lookahead: Annotated[int, Limits(ge=0, le=1_000)] = rollout_option(0)
    """Rollouts that are generated ahead while the present one is trained on; K makes samples up to K
    rollouts stale."""

    max_weight_staleness: Annotated[int | None, Limits(ge=0, le=1_000_000)] = rollout_option(None)
    """Optimizer steps between the weights that sampled a response's oldest token and those it would train;
    staler responses are left out and counted, and unset keeps all."""

    partial_rollout: bool = rollout_option(False)
    """Abort the slowest responses once enough prompts are answered, and continue them in the next rollout from
    their tokens; needs over_sampling_batch_size and the sglang engine."""

    over_sampling_batch_size: Annotated[int | None, Limits(ge=1, le=1_000_000)] = rollout_option(
        None, needs=("--partial-rollout", "--dynamic-sampling-filter-path")
    )
    """Prompts of one batch, where a rollout may need more of them than it trains on: under partial_rollout, more than
    rollout_batch_size, and with dynamic_sampling_filter_path, where unset means rollout_batch_size."""

    dynamic_sampling_filter_path: str | None = rollout_option(None, metavar="FUNCTION")
    """Function that says of every group of samples whether it is trained on, as pkg.module.function or
    path/file.py:function; groups that it drops are replaced by those of fresh prompts (DAPO)."""

    custom_generate_function_path: str | None = rollout_option(None, metavar="FUNCTION")
    """Function of your own that makes each sample by asking the engine as often as it likes, as pkg.module.function or
    path/file.py:function: agents with tools, several turns, several samples."""

    generate_concurrency: Annotated[int, Limits(ge=1, le=65_536)] = rollout_option(
        256, needs=("--custom-generate-function-path",)
    )
    """Most calls of custom_generate_function_path at once, per rank of the local engine."""

    generate_timeout: Annotated[float, Limits(gt=0, le=10_000_000)] = rollout_option(
        3600.0, needs=("--custom-generate-function-path",)
    )
    """Longest time for one call of custom_generate_function_path, in seconds; a sample that takes longer is given up
    and counted."""

    retokenization: Literal["reject", "keep-mask", "error"] = rollout_option(
        "reject", needs=("--custom-generate-function-path",)
    )
    """What becomes of samples of custom_generate_function_path whose tokens are not those that the engine sampled:
    reject trains on none of the sample, keep-mask on the tokens that still are, error ends the run."""

    dynamic_sampling_max_batches: Annotated[int, Limits(ge=1, le=1_000_000)] = rollout_option(
        30, needs=("--dynamic-sampling-filter-path",)
    )
    """Batches of prompts that dynamic sampling takes for one rollout before the run saves and stops."""

    buffer_filter_path: str | None = rollout_option(None, metavar="FUNCTION")
    """Function that chooses, under partial_rollout, which of the unfinished groups the next batch goes on with, and
    which wait for a later one."""

    rollout_sample_filter_path: str | None = rollout_option(None, metavar="FUNCTION")
    """Function that gets the groups of a rollout and sets remove_sample where a sample is not to be trained on."""

    rollout_all_samples_process_path: str | None = rollout_option(None, metavar="FUNCTION")
    """Function that gets all groups that were sampled for a rollout, those that dynamic sampling dropped among them."""

    custom_reward_post_process_path: str | None = reward_option(None, metavar="FUNCTION")
    """Function that turns the scored samples of a rollout into (raw rewards, advantages), in place of the advantage
    estimator."""

    custom_rollout_log_function_path: str | None = rollout_option(None, metavar="FUNCTION")
    """Function that is shown every rollout; where it returns true, metrics of rollouts (rollout/…) are not logged."""

    custom_eval_rollout_log_function_path: str | None = evaluation_option(None, metavar="FUNCTION")
    """Function that is shown the answers to held-out prompts; where it returns true, their metrics (eval/…) are not
    logged."""

    check_weight_sync: bool = rollout_option(False)
    """After each weight update compare tensors (local engine: small ones completely, rows of others; SGLang: checksums)
    and the log-probs of a probe prompt between the two engines, and stop where they disagree."""

    weight_sync_bound: Annotated[float | None, Limits(gt=0, le=1_000)] = rollout_option(
        None, needs=("--check-weight-sync",)
    )
    """Largest mean absolute difference of the probe's log-probs under check_weight_sync; unset chooses by the engines'
    precision and the length of the probe, 0.18 for bf16 and 512 tokens."""

    rollout_function_path: str | None = rollout_option(None, metavar="FUNCTION")
    """Function of your own that makes whole rollouts in place of the rollout engine, as pkg.module.function or
    path/file.py:function; evaluation is by the engine."""

    data_source_path: str | None = data_option(None, metavar="FUNCTION")
    """Class of your own that gives the training prompts in place of the file prompt_data, which it may read; as
    pkg.module.Class or path/file.py:Class."""

    prompt_data: str = data_option(metavar="FILE")
    """File of training prompts, JSONL or parquet, one prompt per row."""

    input_key: str = data_option("input", metavar="KEY")
    """Key of a row that holds the prompt: a string, or a list of chat messages."""

    label_key: str | None = data_option(None, metavar="KEY")
    """Key of a row that holds the label given to the reward; unset means no label."""

    metadata_key: str = data_option("metadata", metavar="KEY")
    """Key of a row that holds a mapping handed to custom rewards."""

    apply_chat_template: bool = data_option(False)
    """Render prompts with the tokenizer's chat template instead of tokenizing them as they are."""

    rollout_batch_size: Annotated[int, Limits(ge=1, le=65_536)] = rollout_option()
    """Prompts sampled per rollout."""

    n_samples_per_prompt: Annotated[int, Limits(ge=1, le=4_096)] = rollout_option(1)
    """Responses sampled per prompt; the group that baselines are taken over."""

    rollout_max_response_len: Annotated[int, Limits(ge=1, le=10_000_000)] = rollout_option()
    """Longest response, in tokens."""

    rollout_max_prompt_len: Annotated[int | None, Limits(ge=1, le=10_000_000)] = rollout_option(None)
    """Longest prompt, in tokens; longer ones are left out of the data; unset means the context's limit."""

    rollout_max_context_len: Annotated[int | None, Limits(ge=2, le=10_000_000)] = rollout_option(None)
    """Longest prompt and response together, in tokens; unset means the model's own limit."""

    rollout_temperature: Annotated[float, Limits(ge=0.01, le=100, hint=GREEDY)] = sampling_option(1.0)
    """Sampling temperature that divides the logits."""

    rollout_top_p: Annotated[float, Limits(gt=0, le=1)] = sampling_option(1.0)
    """Nucleus sampling keeps the likeliest tokens of this total probability; 1 keeps all."""

    rollout_top_k: Annotated[int, Limits(ge=1, le=10_000_000, also=(-1,))] = sampling_option(-1)
    """Top-k sampling keeps this many of the likeliest tokens; -1 keeps all."""

    allow_truncation_bias: bool = sampling_option(False)
    """Train on truncated samples (rollout_top_p, rollout_top_k) whose sets of tokens are not recorded, over the whole
    vocabulary; train/entropy_gap shows the bias, and unset such a run is refused."""

    rollout_shuffle: bool = data_option(False)
    """Visit the prompts in a new order every epoch."""

    rollout_seed: Annotated[int, Limits(ge=0, le=2**31 - 1)] = sampling_option(42)
    """Seed of sampling and shuffling; SGLang servers sample by it only where they are started with
    --enable-deterministic-inference."""

    rollout_stop_token_ids: Annotated[tuple[int, ...] | None, Limits(ge=0, le=2**31 - 1)] = sampling_option(
        None, metavar="ID"
    )
    """Token ids that end a response besides the tokenizer's end of sequence."""

    rm_type: str | None = reward_option(None, metavar="NAME")
    """Name of a built-in reward: exact_match, math, deepscaler, dapo, f1, gpqa, random or remote_rm, each also with
    boxed_ before it; a row's metadata may name its own as rm_type."""

    rm_url: str | None = reward_option(None, metavar="URL")
    """URL of the server that scores the responses whose rm_type is remote_rm: it gets prompt, response and label, and
    answers with a number or an object of numbers."""

    rm_timeout: Annotated[float, Limits(ge=0.1, le=86_400)] = reward_option(120.0, needs=("--rm-url",))
    """Longest wait for one answer of the reward server, in seconds."""

    rm_max_retries: Annotated[int, Limits(ge=0, le=1_000)] = reward_option(10, needs=("--rm-url",))
    """Further attempts after a request to the reward server that failed, with growing pauses of at most a minute."""

    rm_concurrency: Annotated[int, Limits(ge=1, le=10_000)] = reward_option(64, needs=("--rm-url",))
    """Requests to the reward server at a time, of each rank."""

    custom_rm_path: str | None = reward_option(None, metavar="FUNCTION")
    """Reward function of your own, as pkg.module.function or path/file.py:function."""

    reward_key: str | None = reward_option(None, metavar="KEY")
    """Key of the reward, where the reward function returns a dict; its other numbers are reported."""

    reward_weights: str | None = reward_option(None, metavar="KEY=WEIGHT,…")
    """Weights of the components of a reward that is a dict, as KEY=WEIGHT,KEY=WEIGHT: their sum is the reward, and
    each component is reported; in place of reward_key."""

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
    """Engine that answers held-out prompts: local keeps a second, unrounded copy of the weights in the training
    process, rollout asks the rollout engine; unset means local for the local engine and rollout for sglang."""

    skip_eval_before_train: bool = evaluation_option(False)
    """Leave out the evaluation before the first step."""

    def __post_init__(self) -> None:
        check_fields(self)
        _check_sampling(self)
        _check_routing(self)
        _check_evaluation(self)
        _check_asynchronous(self)
        if self.rm_type is None and self.custom_rm_path is None and self.custom_generate_function_path is None:
            raise ValueError("--rm-type is unset and so is --custom-rm-path; add one of them to score responses.")
        if self.rm_type is not None and self.custom_rm_path is not None:
            raise ValueError(
                f"--rm-type is {quoted(self.rm_type)} and --custom-rm-path is {quoted(self.custom_rm_path)}; "
                "leave one of the two out."
            )
        _check_reward(self)

    @property
    def evaluates_locally(self) -> bool:
        """Whether held-out prompts are answered by a model in the training process."""
        return (self.eval_engine or ("local" if self.rollout_engine == "local" else "rollout")) == "local"

    @property
    def truncates_sampling(self) -> bool:
        """Whether top-p or top-k leave out tokens in the samples that are trained on."""
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


def _check_reward_url(url: str) -> None:
    parts = split_url(url)
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"--rm-url is {quoted(shown_url(url))} but must begin with http:// or https:// and a host.")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ValueError(
            f"--rm-url for {parts.hostname} holds a user name, password or query, which logs and config.yaml would "
            "show; call such a server from a --custom-rm-path function that reads the secret from the environment."
        )


def _check_reward(config: RolloutConfig) -> None:
    name = config.rm_type
    if config.rm_url is not None:
        _check_reward_url(config.rm_url)
    if name is not None and is_remote(name) and config.rm_url is None:
        raise ValueError(f"--rm-type is {name} but --rm-url is unset; add the URL of the reward server.")
    weights = None if config.reward_weights is None else parse_weights(config.reward_weights)
    if weights is not None and config.reward_key is not None:
        raise ValueError(
            f"--reward-weights is {quoted(config.reward_weights)} and --reward-key is {quoted(config.reward_key)}; "
            "leave one of the two out."
        )
    for key, value in (("reward_key", config.reward_key), ("eval_reward_key", config.eval_reward_key)):
        if value == "":
            raise ValueError(f"{flag(key)} is empty; name a key of the reward function's dict, or leave it out.")
        if name is None:
            continue
        check_rm_type("--rm-type", name)
        keys = reward_keys(name)
        if is_remote(name):
            continue
        if value is not None and not keys:
            raise ValueError(f"{flag(key)} is {value!r} but --rm-type {name} gives a number; leave it out.")
        if value is not None and value not in keys:
            raise ValueError(f"{flag(key)} is {value!r} but --rm-type {name} gives {' and '.join(keys)}.")
    unknown = [
        key for key in weights or () if name is not None and not is_remote(name) and key not in reward_keys(name)
    ]
    if unknown:
        gives = " and ".join(reward_keys(str(name))) or "a number"
        raise ValueError(f"--reward-weights names {unknown[0]!r} but --rm-type {name} gives {gives}; leave it out.")
    if name is not None and reward_keys(name) and config.reward_key is None and weights is None:
        keys = reward_keys(name)
        raise ValueError(f"--rm-type {name} gives {' and '.join(keys)}; add --reward-key {keys[0]}.")


def _check_sampling(config: RolloutConfig) -> None:
    if config.allow_truncation_bias and not config.truncates_sampling:
        raise ValueError(
            "--allow-truncation-bias is set but has no effect without --rollout-top-p or --rollout-top-k; add one of "
            "them or leave --allow-truncation-bias out."
        )


def _check_routing(config: RolloutConfig) -> None:
    if config.routing_replay_weights and config.rollout_engine == "sglang":
        raise ValueError(
            "--routing-replay-weights is on but an SGLang server returns experts without their weights; leave it out "
            "or use --rollout-engine local."
        )


def _check_evaluation(config: RolloutConfig) -> None:
    if config.eval_top_p != 1 and config.eval_temperature == 0:
        raise ValueError(
            f"--eval-top-p is {config.eval_top_p} but --eval-temperature is 0, which takes the likeliest token; raise "
            "the temperature or leave --eval-top-p out."
        )
    parts = config.eval_prompt_data
    if parts is not None and len(parts) != 1 and len(parts) % 2 == 1:
        raise ValueError(
            f"--eval-prompt-data is {quoted(' '.join(parts))}, {len(parts)} values, but needs one PATH or NAME PATH "
            "pairs."
        )
    names = [name for name, _ in config.eval_prompt_sets]
    if len(set(names)) < len(names):
        raise ValueError(
            f"--eval-prompt-data names {quoted(', '.join(names))[1:-1]} but each name may be given only once."
        )


def _check_asynchronous(config: RolloutConfig) -> None:
    size = config.over_sampling_batch_size
    if size is not None and size < config.rollout_batch_size:
        raise ValueError(
            f"--over-sampling-batch-size is {size} but a rollout trains on {config.rollout_batch_size} prompts "
            "(--rollout-batch-size); raise it."
        )
    if not config.partial_rollout:
        if config.buffer_filter_path is not None:
            raise ValueError(
                "--buffer-filter-path chooses among the groups that --partial-rollout leaves unfinished; add that, or "
                "leave it out."
            )
        return
    if config.rollout_engine != "sglang":
        raise ValueError(
            f"--partial-rollout needs --rollout-engine sglang, but it is {config.rollout_engine}: the local engine "
            "decodes whole batches and has no stragglers."
        )
    if size is None or size <= config.rollout_batch_size:
        raise ValueError(
            f"--over-sampling-batch-size is {size} but --partial-rollout needs more prompts in flight than the "
            f"--rollout-batch-size {config.rollout_batch_size} that it waits for."
        )
    if config.rollout_lookahead:
        raise ValueError(
            f"--rollout-lookahead is {config.rollout_lookahead} and --partial-rollout is set; leave one of them out: "
            "with rollouts in flight there are no stragglers to wait for."
        )
