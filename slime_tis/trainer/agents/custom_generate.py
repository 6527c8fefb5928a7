"""The generate user function: called for each rollout; an invalid sample becomes a failed sample.

    async def generate(args, sample, sampling_params) -> Sample | list[Sample]

A parameter named `engine` gets the engine of this sample (`generation.TokenEngine`), and
`evaluation` whether held-out prompts are answered. `slime_client` answers requests of slime's
functions with the same engine.
"""

import asyncio
import inspect
import json
import math
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from transformers import PreTrainedTokenizerBase

from slime_tis.errors import CustomFunctionError, quoted
from slime_tis.hf_directory import ModelSizes
from slime_tis.policy.advantages import MAX_REWARD
from slime_tis.trainer.agents.sampled_tokens import (
    Provenance,
    Sampled,
    copy_engine_records,
    first_difference,
    provenance,
)
from slime_tis.trainer.agents.slime_client import RecordedEngine, current_engine
from slime_tis.trainer.configs.rollout import RolloutConfig
from slime_tis.trainer.data.sample import STATUS, Sample, SampleStatus, Sampling, by_rollout
from slime_tis.trainer.data.user_values import json_object
from slime_tis.trainer.engines.event_loops import is_abandoned
from slime_tis.trainer.engines.function_requests import RolloutFunction, TokenEngine
from slime_tis.trainer.engines.rollout_engine import RolloutUnavailable
from slime_tis.trainer.stop_signals import Interrupted
from slime_tis.user_functions import accepted, calling, describe, load_user_function

CANCEL_TIMEOUT = 1.0
"""Seconds for a cancelled function to end."""
MAX_TEXT = 1 << 20
"""Characters of a response, of a user-defined prompt, and of metadata as JSON."""
MAX_LOG_PROB = 1e-3
"""In half precision the log-prob of a certain token can be slightly positive."""
RETOKENIZED = "retokenized"
"""Key of a sample's metadata: where its tokens differ from the sampled ones."""
LOG_PROB_TOLERANCE = 1e-4
"""Difference in nats between a function's log-prob and the engine's."""


class NoSample(Exception):
    """A call gave no sample that can be trained on; the arguments are a reason and a message."""


class ReturnedSample(BaseModel):
    """The types of the fields that a function sets."""

    model_config = ConfigDict(from_attributes=True)

    tokens: list[Annotated[int, Field(ge=0)]]
    response_length: int
    response: Annotated[str, Field(max_length=MAX_TEXT)]
    loss_mask: list[Literal[0, 1]] | None
    rollout_log_probs: list[float | None] | None
    weight_versions: list[int | str]
    status: SampleStatus
    metadata: dict[Any, Any] | None
    train_metadata: dict[Any, Any] | None
    reward: float | dict[Any, Any] | None
    non_generation_time: float


@dataclass(frozen=True, kw_only=True)
class GenerateFunction:
    """The user's function, and limits of its samples."""

    function: Callable[..., Any]
    args: Namespace
    tokenizer: PreTrainedTokenizerBase
    vocab_size: float
    context_len: float
    """Longest prompt and response together, in tokens."""
    config: RolloutConfig
    version: Callable[[], int]

    def bind(self, sampling: Sampling, *, evaluation: bool = False) -> RolloutFunction:
        """Returns the coroutine function that the engine calls for each sample."""
        params = slime_sampling_params(sampling)

        async def call(sample: Sample, engine: TokenEngine) -> list[Sample]:
            address = f"{self.args.sglang_router_ip}:{self.args.sglang_router_port}"
            recorded = RecordedEngine(engine, sample, self.tokenizer, address)
            fresh = Sample(prompt_row=sample.row, tokens=list(sample.row.token_ids))
            try:
                returned = await self._call(sample.expand(), recorded, dict(params), evaluation)
                return self.checked(returned, fresh, recorded.sampled)
            except NoSample as error:
                reason, message = error.args
                make_failed(fresh, reason, message, self.version())
                return [fresh]

        return call

    async def _call(
        self, sample: Sample, engine: RecordedEngine, params: dict[str, Any], evaluation: bool
    ) -> Any:
        """Returns the function's value; raises NoSample if the function raises or runs out of time."""
        offered = {"engine": engine, "evaluation": evaluation}
        extra = {name: offered[name] for name in accepted(self.function, tuple(offered))}

        async def call() -> Any:
            current_engine.set(engine)
            with calling(self.function):
                returned = self.function(self.args, sample, params, **extra)
                return await returned if inspect.isawaitable(returned) else returned

        task = asyncio.create_task(call())
        try:
            await asyncio.wait({task}, timeout=self.config.generate_timeout)
        finally:  # also if the rollout is cancelled
            if not task.done():
                engine.is_closed = True
                task.add_done_callback(
                    lambda ended: ended.cancelled() or ended.exception()
                )  # nobody awaits it
                task.cancel()
                try:
                    await asyncio.wait({task}, timeout=CANCEL_TIMEOUT)
                finally:
                    is_abandoned(task)
        if engine.is_closed:
            raise NoSample(
                "timeout",
                f"{describe(self.function)} took more than {self.config.generate_timeout:g} s.",
            )
        try:
            return task.result()
        except CustomFunctionError as error:
            if isinstance(error.__cause__, RolloutUnavailable | Interrupted):
                raise error.__cause__ from None
            raise NoSample("raised", str(error)) from error
        except asyncio.CancelledError:
            raise NoSample("raised", f"{describe(self.function)} cancelled itself.") from None

    def checked(self, returned: Any, fresh: Sample, requests: Sequence[Sampled]) -> list[Sample]:
        """Returns the samples of one call in the form that training takes; raises NoSample for an invalid sample."""
        samples = list(returned) if isinstance(returned, list | tuple) else [returned]
        try:
            if not samples or not all(isinstance(sample, Sample) for sample in samples):
                raise NoSample(
                    "returned", f"returned {quoted(returned)}; return a Sample or a list of them"
                )
            fields = [ReturnedSample.model_validate(sample) for sample in samples]
            aborted = any(
                _status(sample.status, requests) is SampleStatus.ABORTED for sample in fields
            )
            if aborted and (len(samples) > 1 or not samples[0].response_length):
                # the function starts again
                return [
                    replace(fresh, status=SampleStatus.ABORTED, loss_mask=[], rollout_log_probs=[])
                ]
            return [
                self._checked(*pair, fresh, requests) for pair in zip(samples, fields, strict=True)
            ]
        except CustomFunctionError:
            raise
        except (Exception, SystemExit) as error:
            reason, text = (
                "returned",
                f"gave a sample that cannot be read: {type(error).__name__}: {error}",
            )
            if isinstance(error, NoSample):
                reason, text = error.args
            elif isinstance(error, ValidationError):
                first, *_ = error.errors(include_url=False)
                reason = str(first["loc"][0])
                text = f"gave {quoted(first['input'])} in {reason}: {first['msg']}"
            raise NoSample(
                reason, f"{describe(self.function)} {text} (prompt {fresh.prompt_index})."
            ) from error

    def _checked(
        self, sample: Sample, fields: ReturnedSample, fresh: Sample, requests: Sequence[Sampled]
    ) -> Sample:
        tokens, length, given = fields.tokens, fields.response_length, fields.rollout_log_probs
        mask = (
            [1] * length if fields.loss_mask is None else [int(value) for value in fields.loss_mask]
        )
        response, last_id = f"a response_length of {length}", self.vocab_size - 1
        checks = (
            (
                "tokens",
                0 < length < len(tokens),
                f"{len(tokens)} tokens with {response}; give prompt and response",
            ),
            (
                "tokens",
                max(tokens) <= last_id,
                f"the token {max(tokens)}; the vocabulary ends at {last_id}",
            ),
            (
                "context",
                len(tokens) <= self.context_len,
                f"{len(tokens)} tokens; the context has {self.context_len}",
            ),
            (
                "loss_mask",
                len(mask) == length,
                f"a loss_mask of {len(mask)} entries for {response}",
            ),
            (
                "rollout_log_probs",
                given is None or len(given) == length,
                f"{len(given or ())} rollout_log_probs for {response}; give 0.0 for observations",
            ),
        )
        for reason, is_satisfied, text in checks:
            if not is_satisfied:
                raise NoSample(reason, f"gave {text}")
        log_probs = [math.nan] * length
        for index, (value, trained) in enumerate(zip(given or (), mask, strict=False)):
            log_probs[index] = 0.0 if not trained else math.nan if value is None else value
            if not -math.inf < log_probs[index] <= MAX_LOG_PROB:
                text = (
                    f"gave the log-prob {log_probs[index]} for response token {index}, which is"
                    " trained on"
                )
                raise NoSample("rollout_log_probs", text)
        # one per token, unlike slime's, which are one text per request, or none
        versions = [int(version) for version in fields.weight_versions if str(version).isdecimal()]
        sets = sample.sampling_mask
        if sets is not None and (
            len(sets) != length or int(sets.lengths.sum()) != len(sets.token_ids)
        ):
            sets = None
        result = Sample(
            prompt=_prompt(sample, fresh),
            prompt_row=fresh.prompt_row,
            tokens=tokens,
            response=self._response(fields.response, tokens[-length:]),
            response_length=length,
            label=fresh.label if sample.label is None else _json({"label": sample.label})["label"],
            loss_mask=mask,
            rollout_log_probs=log_probs,
            weight_versions=versions if len(versions) == length else [self.version()] * length,
            sampling_mask=sets,
            remove_sample=bool(sample.remove_sample),
            status=_status(fields.status, requests),
            metadata=_json(fields.metadata or fresh.metadata),
            train_metadata=None if fields.train_metadata is None else _json(fields.train_metadata),
            session_id=None if sample.session_id is None else str(sample.session_id),
            non_generation_time=fields.non_generation_time,
        )
        result.reward, result.reward_parts = self._reward(fields.reward)
        if requests:
            where = provenance(tokens, length, requests)
            if given is not None:
                _check_log_probs(log_probs, mask, where, requests)
            copy_engine_records(result, where, requests)
            self._handle_retokenized(result, where, requests)
        return result

    def _response(self, text: str, response_ids: Sequence[int]) -> str:
        """Returns the text of a response; built-in rewards get it without special tokens at its end, as from an engine.

        The engine's answers to slime's functions contain them, since slime's `skip_special_tokens`
        is off.
        """
        if not text:
            return str(self.tokenizer.decode(response_ids, skip_special_tokens=True))
        if self.config.rm_type is None:
            return text
        special_ids = set(self.tokenizer.all_special_ids)
        for token in reversed(response_ids):
            ending = str(self.tokenizer.decode([token]))
            if token not in special_ids or not text.endswith(ending):
                break
            text = text.removesuffix(ending)
        return text

    def _reward(
        self, reward: float | dict[Any, Any] | None
    ) -> tuple[float | None, dict[str, float]]:
        if reward is None:
            return None, {}
        value, parts = reward, dict[str, float]()
        if isinstance(reward, dict):
            parts = {
                str(name): float(part)
                for name, part in reward.items()
                if isinstance(part, int | float)
            }
            value = parts.pop(self.args.reward_key or "", math.nan)
        assert isinstance(value, float)
        if not abs(value) <= MAX_REWARD:
            raise NoSample(
                "reward",
                f"gave the reward {quoted(reward)}; it must be a finite number of at most"
                f" {MAX_REWARD:g} in magnitude, or a dict with --reward-key",
            )
        return value, parts

    def _handle_retokenized(
        self, sample: Sample, where: Provenance, requests: Sequence[Sampled]
    ) -> None:
        trained = zip(where.request, sample.loss_mask, strict=True)
        wrong = [
            index for index, (number, is_trained) in enumerate(trained) if is_trained and number < 0
        ]
        sample.retokenized = len(wrong)
        if not wrong:
            return
        message = (
            f"{describe(self.function)} gave {len(wrong)} trained tokens that differ from the"
            f" sampled tokens, for prompt {sample.prompt_index}:"
            f" {self._difference(sample, wrong[0], requests)}"
        )
        if self.config.retokenization == "error":
            raise CustomFunctionError(f"{message} --retokenization keep-mask trains on the others.")
        sample.metadata = {**sample.metadata, RETOKENIZED: message}
        if self.config.retokenization == "reject":
            sample.remove_sample = True
        else:
            for index in wrong:
                sample.loss_mask[index] = 0

    def _difference(self, sample: Sample, first_wrong: int, requests: Sequence[Sampled]) -> str:
        """Returns where a sample and the engine's tokens part first, both tokens, and what to do."""

        def shown(token: int) -> str:
            return f"{token} ({quoted(self.tokenizer.decode([token]), 40)})"

        prompt_length = len(sample.tokens) - sample.response_length
        position, expected = first_difference(sample.tokens, requests)
        if position >= len(sample.tokens) or expected is None:
            # the sampled tokens agree; tokens beyond them, such as tool output, are marked as
            # trained
            token = sample.response_ids[first_wrong]
            return (
                f"no request sampled response token {first_wrong}, {shown(token)}. Append the ids"
                " of the engine's answer, and other tokens with a loss mask of 0."
            )
        place, advice = (
            f"response token {position - prompt_length}",
            "Append the ids of the engine's answer.",
        )
        if position < prompt_length:
            place = f"prompt token {position}"
            advice = (
                "Send sample.tokens, or tokenize sample.prompt with add_special_tokens=False, and"
                " return the same."
            )
        given = shown(sample.tokens[position])
        return (
            f"they differ first at {place}, {given} in the sample and {shown(expected)} in the"
            f" request. {advice}"
        )


def build_generate_function(
    config: RolloutConfig,
    args: Namespace,
    tokenizer: PreTrainedTokenizerBase,
    *,
    sizes: ModelSizes,
    version: Callable[[], int],
    address: tuple[str, int] | None,
    option: str = "custom_generate_function_path",
) -> GenerateFunction | None:
    """Returns the function of an option; None if the option is unset."""
    path = getattr(config, option)
    if path is None:
        return None
    if address is not None:
        args = Namespace(
            **{**vars(args), "sglang_router_ip": address[0], "sglang_router_port": address[1]}
        )
    limits = [
        limit for limit in (sizes.context_len, config.rollout_max_context_len) if limit is not None
    ]
    return GenerateFunction(
        function=load_user_function(option, path),
        args=args,
        tokenizer=tokenizer,
        vocab_size=math.inf if sizes.vocab_size is None else sizes.vocab_size,
        context_len=min(limits, default=math.inf),
        config=config,
        version=version,
    )


def slime_sampling_params(sampling: Sampling) -> dict[str, Any]:
    """Returns slime's parameters for a generate function, with special tokens and stops left in the text."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": sampling.max_response_len,
        "stop": None,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


def mark_failed_samples(groups: Sequence[Sequence[Sample]]) -> str | None:
    """Turns samples without a response into failed samples, and returns a warning about all failed samples."""
    rollouts = [rollout for group in groups for rollout in by_rollout(group)]
    for sample in (sample for rollout in rollouts for sample in rollout):
        if not sample.response_length:
            make_failed(sample, "aborted", "the generate function ended without a response.")
    messages = [
        str(rollout[0].metadata["generate_error"]) for rollout in rollouts if rollout[0].failure
    ]
    if not messages:
        return None
    message, _ = Counter(messages).most_common(1)[0]
    if len(messages) == len(rollouts):
        raise CustomFunctionError(
            f"none of the {len(rollouts)} samples of a rollout could be made: {message}"
        )
    return (
        f"{len(messages)} of {len(rollouts)} samples could not be made and train nothing: {message}"
    )


def retokenized_message(groups: Sequence[Sequence[Sample]]) -> str | None:
    """Returns where the first retokenized sample differs from the sampled tokens; None without one."""
    for group in groups:
        for sample in group:
            if sample.retokenized:
                return str(sample.metadata[RETOKENIZED])
    return None


def make_failed(sample: Sample, reason: str, message: str, version: int = 0) -> None:
    """Turns a prompt into a failed sample: one response token, which is not trained on."""
    sample.tokens = [*sample.tokens, sample.tokens[-1]]
    sample.response_length = 1
    sample.loss_mask, sample.rollout_log_probs, sample.weight_versions = [0], [0.0], [version]
    sample.status, sample.failure = SampleStatus.FAILED, reason
    sample.reward, sample.remove_sample = 0.0, True
    sample.metadata = {**sample.metadata, "generate_error": message}


def _check_log_probs(
    log_probs: Sequence[float], mask: Sequence[int], where: Provenance, requests: Sequence[Sampled]
) -> None:
    for position, (number, index) in enumerate(zip(where.request, where.place, strict=True)):
        if mask[position] and number >= 0:
            sampled = requests[number].generation.log_probs[index]
            if not abs(log_probs[position] - sampled) <= LOG_PROB_TOLERANCE:
                raise NoSample(
                    "rollout_log_probs",
                    f"gave the log-prob {log_probs[position]:.4f} for response token {position},"
                    f" which was sampled with {sampled:.4f}; log-probs and tokens are out of step",
                )


def _status(status: SampleStatus, requests: Sequence[Sampled]) -> SampleStatus:
    """Returns the sample's status; the last request's if it was aborted or the function left the status unchanged."""
    reasons = [one.generation.finish_reason for one in requests if one.is_trained is None]
    if not reasons:
        return SampleStatus.COMPLETED if status is SampleStatus.PENDING else status
    untouched = status in (SampleStatus.PENDING, SampleStatus.ABORTED)
    return STATUS[reasons[-1]] if untouched or reasons[-1] == "abort" else status


def _prompt(sample: Sample, fresh: Sample) -> Any:
    if isinstance(sample.prompt, list):
        return json.loads(json.dumps(sample.prompt, default=str))
    return fresh.prompt if sample.prompt in ("", fresh.prompt) else str(sample.prompt)


def _json(metadata: Mapping[Any, Any]) -> dict[str, Any]:
    try:
        values = json_object(metadata, "its metadata")
    except ValueError as error:
        raise NoSample("metadata", f"gave metadata that cannot be saved: {error}") from error
    if len(json.dumps(values)) > MAX_TEXT:
        raise NoSample("metadata", f"gave metadata of more than {MAX_TEXT} characters")
    return values
