"""Options of the rollouts: the sampling engine, prompts, sampling, rewards and evaluation."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import permutations
from typing import TYPE_CHECKING, Annotated, Any, Literal

from slime_tis.errors import quoted
from slime_tis.options.fields import Limits, check_fields, option
from slime_tis.trainer.configs.eval_config import EvalSet, read_eval_config
from slime_tis.trainer.configs.server_engines import SERVER_ENGINES
from slime_tis.trainer.configs.servers import normalized_url

data_option = partial(option, group="model and data")
rollout_option = partial(option, group="rollout")
sampling_option = partial(option, group="sampling")
reward_option = partial(option, group="rewards")
SET_METRIC = re.compile(r"-pass@\d+|/(response_length|truncated_fraction|reward/.+)")
"""What follows a held-out set's name in the names of its further metrics."""
EVALUATES = ("--eval-prompt-data", "--eval-config")
"""Flags that name held-out prompts."""
evaluation_option = partial(option, group="evaluation", needs=EVALUATES)
routing_option = partial(option, group="routing replay")

Rounding = Literal["nearest", "stochastic"]
"""How weights are rounded on their way to the rollout engine."""

REDUCED = ("fp16", "bf16", "fp8", "int8", "int4")
"""Precisions of the local engine to which weights are rounded."""
GREEDY = "greedy samples of a group are identical and have no gradient"

RM_TYPES: Mapping[str, tuple[str, ...]] = {
    "exact_match": (),
    "math": (),
    "deepscaler": (),
    "dapo": ("score", "acc"),
    "f1": (),
    "gpqa": (),
    "random": (),
    "remote_rm": (),
}
"""Built-in rewards by name, and the keys of their dictionaries; () for a plain number."""

TEMPLATE_ARGUMENTS = (
    "conversation",
    "tools",
    "tokenize",
    "add_generation_prompt",
    "return_tensors",
    "return_dict",
)
"""Arguments of `apply_chat_template` that --apply-chat-template-kwargs may not set."""

REMOTE = "remote_rm"
BOXED = "boxed_"
"""Prefix of a name: scores the content of the response's last \\boxed{}."""


# Type checkers take no computed Literal; at run time it lists the choices of the flag.
if TYPE_CHECKING:
    EngineName = str
else:
    EngineName = Literal[("local", *SERVER_ENGINES)]


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """The source of prompts, and how responses are sampled and scored."""

    rollout_engine: EngineName = rollout_option("local")
    """Sampler: transformers in the training process, or servers of SGLang or vLLM over HTTP."""
    rollout_precision: Literal["fp32", "fp16", "bf16", "fp8", "int8", "int4"] = rollout_option(
        "fp32", needs=("--rollout-engine=local",)
    )
    """Precision of the local engine's weights; for servers use --sglang-dtype or
    --sglang-quantization."""
    rollout_router_bits: Annotated[int | None, Limits(ge=2, le=16)] = rollout_option(
        None, needs=("--rollout-engine=local",)
    )
    """Round router weights to this number of bits, to study routing mismatch."""
    use_rollout_routing_replay: bool = routing_option(False)
    """Replay the rollout engine's experts in all training passes (R3)."""
    routing_replay_weights: bool = routing_option(False, needs=("--use-rollout-routing-replay",))
    """Also replay combine weights; the gradient is the training router's."""
    measure_routing_mismatch: Annotated[int | None, Limits(ge=1, le=1_000_000)] = routing_option(
        None
    )
    """Optimizer steps between measurements of the mismatch with and without replay; unset: none."""
    weight_update_rounding: Rounding = rollout_option(
        "nearest",
        needs=(
            *(f"--rollout-precision={name}" for name in REDUCED),
            *(f"--rollout-engine={name}" for name in SERVER_ENGINES),
        ),
    )
    """Rounding to the rollout engine's precision; stochastic transmits small updates, too."""
    update_weights_interval: Annotated[int, Limits(ge=1, le=1_000_000)] = rollout_option(1)
    """Rollouts between two weight updates of the engine."""
    rollout_lookahead: Annotated[int, Limits(ge=0, le=1_000)] = rollout_option(0)
    """Rollouts generated ahead during training."""
    max_weight_staleness: Annotated[int | None, Limits(ge=0, le=1_000_000)] = rollout_option(None)
    """Mask responses whose oldest token is older, in optimizer steps."""
    partial_rollout: bool = rollout_option(False)
    """Abort the slowest responses and resume them in the next rollout."""
    mask_offpolicy_in_partial_rollout: bool = rollout_option(False, needs=("--partial-rollout",))
    """Do not train tokens of a resumed response whose weights are older than its last token's."""
    over_sampling_batch_size: Annotated[int | None, Limits(ge=1, le=1_000_000)] = rollout_option(
        None, needs=("--partial-rollout", "--dynamic-sampling-filter-path")
    )
    """Prompts of one batch; unset: rollout_batch_size. partial_rollout needs a larger value."""
    dynamic_sampling_filter_path: str | None = rollout_option(None, metavar="FUNCTION")
    """User function that accepts or drops groups; new prompts replace dropped groups (DAPO)."""
    custom_generate_function_path: str | None = rollout_option(None, metavar="FUNCTION")
    """User function that makes a sample with any number of engine requests (agents)."""
    generate_concurrency: Annotated[int, Limits(ge=1, le=65_536)] = rollout_option(
        256, needs=("--custom-generate-function-path",)
    )
    """Simultaneous calls of the generate function, per rank of the local engine."""
    generate_timeout: Annotated[float, Limits(gt=0, le=10_000_000)] = rollout_option(
        3600.0, needs=("--custom-generate-function-path",)
    )
    """Time limit of one call of the generate function, in seconds; then the sample is dropped."""
    retokenization: Literal["reject", "keep-mask", "error"] = rollout_option(
        "reject", needs=("--custom-generate-function-path",)
    )
    """If tokens differ from the sampled ones: mask the sample, mask these tokens, or end the
    run."""
    dynamic_sampling_max_batches: Annotated[int, Limits(ge=1, le=1_000_000)] = rollout_option(
        30, needs=("--dynamic-sampling-filter-path",)
    )
    """Batches allowed for one rollout of dynamic sampling; then the run saves and stops."""
    buffer_filter_path: str | None = rollout_option(None, metavar="FUNCTION")
    """User function that chooses the unfinished groups that the next batch resumes."""
    rollout_sample_filter_path: str | None = rollout_option(None, metavar="FUNCTION")
    """User function that sets remove_sample to exclude samples from training."""
    rollout_all_samples_process_path: str | None = rollout_option(None, metavar="FUNCTION")
    """User function that gets all sampled groups of a rollout, including dropped ones."""
    custom_reward_post_process_path: str | None = reward_option(None, metavar="FUNCTION")
    """User function that returns raw rewards and advantages instead of the estimator."""
    custom_rollout_log_function_path: str | None = rollout_option(None, metavar="FUNCTION")
    """User function that gets every rollout; true replaces the metrics rollout/…."""
    custom_eval_rollout_log_function_path: str | None = evaluation_option(None, metavar="FUNCTION")
    """User function that gets held-out answers; true replaces the metrics eval/…."""
    check_engines: Literal["warn", "stop", "off"] = rollout_option("warn")
    """Before the first step, compare both engines on a few answers; if they disagree, search for
    the cause."""
    true_on_policy: bool = rollout_option(False)
    """Sample and train with the same operations, so that both log-probs of a token are equal in
    every bit; stop at the first that differs. Dense models on a CPU, in fp32 or bf16."""
    check_weight_sync: bool = rollout_option(False)
    """After each weight update, compare the engines' tensors and log-probs of a probe prompt."""
    weight_sync_bound: Annotated[float | None, Limits(gt=0, le=1_000)] = rollout_option(
        None, needs=("--check-weight-sync",)
    )
    """Largest mean absolute difference of the probe's log-probs; unset: from the engines'
    precision."""
    rollout_function_path: str | None = rollout_option(None, metavar="FUNCTION")
    """User function that replaces the rollout loop; the engine still answers held-out prompts."""
    disable_rollout_global_dataset: bool = rollout_option(False, needs=("--rollout-function-path",))
    """The rollout function provides the prompts, so --prompt-data is not needed."""
    data_source_path: str | None = data_option(None, metavar="FUNCTION")
    """User class that provides training prompts."""
    prompt_data: str | None = data_option(None, metavar="FILE")
    """Training prompts, one per row of a JSONL or parquet file; FILE@[0:3000] reads these rows."""
    input_key: str = data_option("input", metavar="KEY")
    """Key of the prompt in a row: a string or a list of chat messages."""
    label_key: str | None = data_option(None, metavar="KEY")
    """Key of the label for the reward; unset: no label."""
    metadata_key: str = data_option("metadata", metavar="KEY")
    """Key of a mapping for custom rewards."""
    tool_key: str | None = data_option("tools", metavar="KEY", needs=("--apply-chat-template",))
    """Key of the tools for the chat template: a list, or JSON text."""
    apply_chat_template: bool = data_option(False)
    """Render prompts with the tokenizer's chat template; texts are tokenized without special
    tokens."""
    apply_chat_template_kwargs: str | None = data_option(
        None, metavar="JSON", needs=("--apply-chat-template",), suffices=("--data-source-path",)
    )
    """Variables of the chat template as a JSON object: '{"enable_thinking": false}'."""
    rollout_batch_size: Annotated[int, Limits(ge=1, le=65_536)] = rollout_option()
    """Prompts sampled per rollout."""
    n_samples_per_prompt: Annotated[int, Limits(ge=1, le=4_096)] = rollout_option(1)
    """Responses per prompt, which form a group."""
    rollout_max_response_len: Annotated[int, Limits(ge=1, le=10_000_000)] = rollout_option()
    """Longest response, in tokens."""
    rollout_max_prompt_len: Annotated[int | None, Limits(ge=1, le=10_000_000)] = rollout_option(
        None
    )
    """Longest prompt, in tokens; longer ones are dropped. Unset: the context's limit."""
    rollout_max_context_len: Annotated[int | None, Limits(ge=2, le=10_000_000)] = rollout_option(
        None
    )
    """Longest prompt with response, in tokens; unset: the model's limit."""
    rollout_temperature: Annotated[float, Limits(ge=0.01, le=100, hint=GREEDY)] = sampling_option(
        1.0
    )
    """Sampling temperature."""
    rollout_top_p: Annotated[float, Limits(gt=0, le=1)] = sampling_option(1.0)
    """Nucleus probability; 1 keeps all tokens."""
    rollout_top_k: Annotated[int, Limits(ge=1, le=10_000_000, also=(-1,))] = sampling_option(-1)
    """Number of likeliest tokens to sample from; -1 keeps all."""
    allow_truncation_bias: bool = sampling_option(False)
    """Train truncated samples without recorded token sets; log-probs then normalize over the full
    vocabulary."""
    rollout_shuffle: bool = data_option(False)
    """Shuffle the prompts every epoch."""
    rollout_seed: Annotated[int, Limits(ge=0, le=2**31 - 1)] = sampling_option(42)
    """Seed of sampling and shuffling; servers need --enable-deterministic-inference."""
    rollout_stop: tuple[str, ...] | None = sampling_option(None, metavar="TEXT", verbatim=True)
    """Texts that end a response, which keeps them; also in evaluation."""
    rollout_stop_token_ids: Annotated[tuple[int, ...] | None, Limits(ge=0, le=2**31 - 1)] = (
        sampling_option(None, metavar="ID")
    )
    """Token ids that end a response, besides the end of sequence."""
    rm_type: str | None = reward_option(None, metavar="NAME")
    """Built-in reward: exact_match, math, deepscaler, dapo, f1, gpqa, random, remote_rm, or
    boxed_NAME."""
    rm_url: str | None = reward_option(None, metavar="URL")
    """URL of the reward server of remote_rm."""
    rm_timeout: Annotated[float, Limits(ge=0.1, le=86_400)] = reward_option(
        120.0, needs=("--rm-url",)
    )
    """Longest wait for an answer of the reward server, in seconds."""
    rm_max_retries: Annotated[int, Limits(ge=0, le=1_000)] = reward_option(10, needs=("--rm-url",))
    """Retries of a failed request."""
    rm_concurrency: Annotated[int, Limits(ge=1, le=10_000)] = reward_option(64, needs=("--rm-url",))
    """Simultaneous requests per rank."""
    custom_rm_path: str | None = reward_option(None, metavar="FUNCTION")
    """User function for rewards."""
    reward_key: str | None = reward_option(None, metavar="KEY")
    """Key of the reward if the reward is a dict; its other numbers are reported."""
    reward_weights: str | None = reward_option(None, metavar="KEY=WEIGHT,…")
    """Weighted sum of a dict's numbers as the reward; replaces reward_key."""
    eval_reward_key: str | None = reward_option(None, metavar="KEY", needs=EVALUATES)
    """reward_key of held-out prompts; unset: reward_key or reward_weights."""
    eval_interval: Annotated[int | None, Limits(ge=1, le=1_000_000)] = evaluation_option(None)
    """Rollouts between two evaluations; unset: before and after training only."""
    eval_prompt_data: tuple[str, ...] | None = evaluation_option(
        None, metavar="[NAME] PATH", needs=()
    )
    """Held-out prompts as NAME PATH pairs; a single PATH is named accuracy."""
    eval_config: str | None = option(None, group="evaluation", metavar="FILE")
    """YAML file of held-out prompt sets with own keys and sampling, in slime's format; replaces
    eval_prompt_data."""
    n_samples_per_eval_prompt: Annotated[int, Limits(ge=1, le=4_096)] = evaluation_option(1)
    """Responses sampled per held-out prompt."""
    eval_temperature: Annotated[float, Limits(ge=0.01, le=100, also=(0,))] = evaluation_option(0.0)
    """Temperature of evaluation; 0 is greedy."""
    eval_top_p: Annotated[float, Limits(gt=0, le=1)] = evaluation_option(1.0)
    """Nucleus probability of evaluation."""
    eval_top_k: Annotated[int, Limits(ge=1, le=10_000_000, also=(-1,))] = evaluation_option(-1)
    """Number of likeliest tokens in evaluation; -1 keeps all."""
    eval_max_response_len: Annotated[int | None, Limits(ge=1, le=10_000_000)] = evaluation_option(
        None
    )
    """Longest held-out response, in tokens; unset: rollout_max_response_len."""
    eval_input_key: str | None = evaluation_option(None, metavar="KEY")
    """input_key of held-out rows; unset: input_key."""
    eval_label_key: str | None = evaluation_option(None, metavar="KEY")
    """label_key of held-out rows; unset: label_key."""
    eval_tool_key: str | None = evaluation_option(
        None, metavar="KEY", needs=("--apply-chat-template",)
    )
    """tool_key of held-out rows; unset: tool_key."""
    eval_engine: Literal["local", "rollout"] | None = evaluation_option(None)
    """Engine for held-out prompts: an unrounded copy in the training process, or the rollout
    engine."""
    skip_eval_before_train: bool = evaluation_option(False)
    """Skip the evaluation before the first step."""
    log_passrate: bool = option(False, group="reporting")
    """Report pass@1, pass@2, pass@4, … of samples and held-out answers; a reward of 1 passes."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.allow_truncation_bias and not self.truncates_sampling:
            raise ValueError(
                "--allow-truncation-bias has no effect without --rollout-top-p or --rollout-top-k."
            )
        if self.routing_replay_weights and self.rollout_engine != "local":
            title = SERVER_ENGINES[self.rollout_engine].title
            raise ValueError(
                "--routing-replay-weights needs --rollout-engine local:"
                f" {title} returns no weights."
            )
        if self.prompt_data is None and self.needs_prompt_data:
            raise ValueError("--prompt-data is unset but required; add --prompt-data FILE.")
        if self.rollout_stop is not None and "" in self.rollout_stop:
            raise ValueError("--rollout-stop has an empty text; give one character or more.")
        # Parsed only for its errors, which are then reported before anything is built.
        _ = self.chat_template_options
        _check_evaluation(self)
        _check_partial_rollout(self)
        _check_reward(self)

    @property
    def chat_template_options(self) -> dict[str, Any]:
        """Returns the variables of --apply-chat-template-kwargs."""
        text = self.apply_chat_template_kwargs
        if text is None:
            return {}
        return parse_template_options(text)

    @property
    def needs_prompt_data(self) -> bool:
        """Whether training prompts come from --prompt-data, not from a user's function."""
        return self.data_source_path is None and not self.disable_rollout_global_dataset

    @property
    def evaluates_locally(self) -> bool:
        """Whether held-out prompts are answered by a model in the training process."""
        if self.eval_engine is None:
            return self.rollout_engine == "local"
        return self.eval_engine == "local"

    @property
    def truncates_sampling(self) -> bool:
        """Whether top-p or top-k omit tokens in the samples that are trained on."""
        return self.rollout_top_p < 1.0 or self.rollout_top_k != -1

    @property
    def records_routed_experts(self) -> bool:
        """Whether samples record their experts, for replay or to measure the routing mismatch."""
        return self.use_rollout_routing_replay or self.measure_routing_mismatch is not None

    @property
    def eval_prompt_sets(self) -> tuple[tuple[str, str], ...]:
        """The held-out prompt files as (name, path) pairs, empty without evaluation."""
        return tuple((held_out.name, held_out.path) for held_out in self.eval_sets)

    @cached_property
    def eval_sets(self) -> tuple[EvalSet, ...]:
        """The held-out prompt sets, empty without evaluation."""
        # cached_property writes into __dict__, which a frozen dataclass permits.
        # Cached, because the user may edit the file while the run trains.
        if self.eval_config is not None:
            return read_eval_config(self.eval_config)
        parts = self.eval_prompt_data or ()
        if len(parts) == 1:
            parts = ("accuracy", parts[0])
        sets = []
        for name, path in zip(parts[::2], parts[1::2], strict=True):
            sets.append(EvalSet(name=name, path=path))
        return tuple(sets)


def _check_reward(config: RolloutConfig) -> None:
    """Refuses rewards that exclude each other, and names or keys that do not exist."""
    name = config.rm_type
    weights: dict[str, float] = {}
    if config.reward_weights:
        weights = parse_weights(config.reward_weights)
    if name is not None and config.custom_rm_path is not None:
        raise ValueError("--rm-type and --custom-rm-path are both given; remove one of the two.")
    if weights and config.reward_key is not None:
        raise ValueError("--reward-weights and --reward-key are both given; remove one of the two.")
    if config.rm_url is not None:
        normalized_url(config.rm_url, "--rm-url")
    if name is None:
        return
    check_rm_type("--rm-type", name)
    if base_name(name) != REMOTE:
        _check_reward_keys(config, name, [*weights])
    elif config.rm_url is None:
        raise ValueError(
            f"--rm-type is {name} but --rm-url is unset; add the URL of the reward server."
        )


def _check_reward_keys(config: RolloutConfig, name: str, weighted: list[str]) -> None:
    keys = RM_TYPES[base_name(name)]
    gives = f"--rm-type {name} gives {' and '.join(keys) or 'a number'}"
    given: list[tuple[str, str | None]] = [
        ("--reward-key", config.reward_key),
        ("--eval-reward-key", config.eval_reward_key),
    ]
    for weighted_key in weighted:
        given.append(("--reward-weights", weighted_key))
    for flag, key in given:
        if key is not None and key not in keys:
            raise ValueError(f"{flag} is {key!r} but {gives}; change or remove it.")
    if keys and config.reward_key is None and not weighted:
        raise ValueError(f"{gives}; add --reward-key {keys[0]}.")


def _check_evaluation(config: RolloutConfig) -> None:
    if config.eval_top_p != 1 and config.eval_temperature == 0:
        raise ValueError(
            "--eval-top-p has no effect with --eval-temperature 0; remove it, or raise the"
            " temperature."
        )
    if config.eval_top_k != -1 and config.eval_temperature == 0:
        raise ValueError(
            "--eval-top-k has no effect with --eval-temperature 0; remove it, or raise the"
            " temperature."
        )
    if config.eval_config is not None and config.eval_prompt_data is not None:
        raise ValueError(
            "--eval-config and --eval-prompt-data are both given; remove one of the two."
        )
    count = len(config.eval_prompt_data or ())
    if count > 1 and count % 2 == 1:
        raise ValueError(
            f"--eval-prompt-data has {count} values, but needs one PATH or NAME PATH pairs."
        )
    _check_greedy_sets(config)
    _check_set_names(config)


def _check_set_names(config: RolloutConfig) -> None:
    """Refuses held-out sets whose metrics would have the same name."""
    names = [name for name, _ in config.eval_prompt_sets]
    if len(set(names)) < len(names):
        listed = quoted(", ".join(names))[1:-1]  # escaped, but without the quotes
        raise ValueError(f"--eval-prompt-data names {listed}; give each name once.")
    source = "--eval-config"
    if config.eval_config is None:
        source = "--eval-prompt-data"
    for name, other in permutations(names, 2):
        # The metrics of a set are eval/NAME, eval/NAME/KEY and eval/NAME-pass@K.
        if other.startswith(name) and SET_METRIC.fullmatch(other.removeprefix(name)):
            raise ValueError(
                f"{source} names {quoted(name)} and {quoted(other)}, but eval/{other} is a metric"
                " of the first one; rename one of the two."
            )


def _check_greedy_sets(config: RolloutConfig) -> None:
    """Refuses truncated sampling of a held-out set that is greedy only by default."""
    for held_out in config.eval_sets:
        # A set with its own temperature 0 may have these from the file's defaults.
        is_greedy = held_out.temperature is None and config.eval_temperature == 0
        if not is_greedy:
            continue
        for key, neutral in (("top_p", 1.0), ("top_k", -1)):
            if getattr(held_out, key) not in (None, neutral):
                raise ValueError(
                    f"--eval-config, dataset {quoted(held_out.name)}: {key} has no effect with"
                    " --eval-temperature 0; add temperature to the file, or remove it."
                )


def _check_partial_rollout(config: RolloutConfig) -> None:
    size = config.over_sampling_batch_size
    batch = config.rollout_batch_size
    if size is not None and size < batch:
        raise ValueError(
            f"--over-sampling-batch-size is {size} but --rollout-batch-size is {batch}; raise it."
        )
    if not config.partial_rollout:
        if config.buffer_filter_path is not None:
            raise ValueError(
                "--buffer-filter-path has no effect without --partial-rollout; add that, or"
                " remove it."
            )
        return
    if config.rollout_engine == "local":
        engines = " or ".join(SERVER_ENGINES)
        raise ValueError(
            f"--partial-rollout needs --rollout-engine {engines}: the local engine decodes whole"
            " batches."
        )
    if size is None or size == batch:
        raise ValueError(
            f"--over-sampling-batch-size is {size}; with --partial-rollout make it more than"
            f" {batch}."
        )
    if config.rollout_lookahead:
        raise ValueError(
            "--rollout-lookahead and --partial-rollout are both given; remove one of them."
        )


def check_rm_type(source: str, name: str) -> None:
    """Refuses an unknown reward, with or without `boxed_`; the message begins with `source`."""
    if base_name(name) not in RM_TYPES:
        raise ValueError(
            f"{source} is {quoted(name)} but must be one of {', '.join(RM_TYPES)}, each also as"
            f" {BOXED}NAME; for another reward write a function for --custom-rm-path."
        )


def base_name(name: str) -> str:
    """Returns the name of a reward without `boxed_`."""
    return name.removeprefix(BOXED)


def parse_template_options(text: str) -> dict[str, Any]:
    """Returns the variables of the chat template.

    Raises:
        ValueError: The text is not a JSON object, or sets a variable that this program sets.
    """
    try:
        options = json.loads(text)
    except (ValueError, RecursionError):
        options = None
    if not isinstance(options, dict):
        raise ValueError(
            f"--apply-chat-template-kwargs is {quoted(text)} but must be a JSON object, such as "
            "'{\"enable_thinking\": false}'."
        )
    for name in options:
        if name in TEMPLATE_ARGUMENTS:
            raise ValueError(
                f"--apply-chat-template-kwargs sets {name!r}, which this program sets itself;"
                " remove it."
            )
    return options


def parse_weights(text: str) -> dict[str, float]:
    """Returns the weights of --reward-weights by key."""
    weights: dict[str, float] = {}
    for part in text.split(","):
        # At the last equals sign, because a key may contain some.
        name, equals, number = (word.strip() for word in part.rpartition("="))
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan  # refused below
        if not name or not equals or not math.isfinite(weight) or name in weights:
            raise ValueError(
                f"--reward-weights is {quoted(text)} but must be KEY=WEIGHT,KEY=WEIGHT with finite"
                " weights and different keys."
            )
        weights[name] = weight
    return weights
