"""Calls the user's generate function for every rollout; an invalid sample becomes a failed sample.

    async def generate(args, sample, sampling_params) -> Sample | list[Sample]

A parameter named `engine` gets the engine of this sample (`function_requests.TokenEngine`). A
parameter named `evaluation` is True for held-out prompts. `slime_client` answers requests of
slime's functions with the same engine.
"""

import asyncio
import inspect
import math
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from transformers import PreTrainedTokenizerBase

from slime_tis.errors import CustomFunctionError, quoted
from slime_tis.hf_directory import ModelSizes
from slime_tis.policy.advantages import MAX_REWARD
from slime_tis.trainer.agents.returned_samples import (
    NoSample,
    ReturnedSample,
    read_samples,
)
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
from slime_tis.trainer.engines.event_loops import is_abandoned
from slime_tis.trainer.engines.function_requests import RolloutFunction, TokenEngine
from slime_tis.trainer.engines.rollout_engine import RolloutUnavailable
from slime_tis.trainer.stop_signals import Interrupted
from slime_tis.user_functions import accepted, calling, describe, load_user_function

CANCEL_TIMEOUT = 1.0
"""Seconds for a cancelled function to end."""
MAX_LOG_PROB = 1e-3
"""Largest log-prob in nats: in half precision, a certain token can have a slightly positive one."""
RETOKENIZED = "retokenized"
"""Key of a sample's metadata: where its tokens differ from the sampled ones."""
LOG_PROB_TOLERANCE = 1e-4
"""Difference in nats between a function's log-prob and the engine's."""


@dataclass(frozen=True, kw_only=True)
class GenerateFunction:
    """The user's function, and limits of the samples that it returns."""

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
            # Before the call, because the function may change the sample that it gets.
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
        """Returns the function's value; raises NoSample if it raises or runs out of time."""
        offered = {"engine": engine, "evaluation": evaluation}
        keywords = {name: offered[name] for name in accepted(self.function, tuple(offered))}

        async def call() -> Any:
            # A task has a copy of the context, so simultaneous calls do not see this engine.
            current_engine.set(engine)
            with calling(self.function):
                returned = self.function(self.args, sample, params, **keywords)
                if inspect.isawaitable(returned):
                    returned = await returned
                return returned

        task = asyncio.create_task(call())
        try:
            # Not wait_for, which waits without a limit if a function ignores its cancellation.
            await asyncio.wait({task}, timeout=self.config.generate_timeout)
        finally:
            # Also if the rollout is cancelled.
            if not task.done():
                engine.is_closed = True
                # Nobody awaits the task: without this, asyncio logs its exception at exit.
                task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
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
        """Returns the samples of one call in the form that training takes.

        Args:
            returned: The function's return value.
            fresh: A sample of the prompt without a response.
            requests: The call's requests and their answers.

        Raises:
            NoSample: A sample is invalid.
        """
        try:
            segments = read_samples(returned)
            return self._checked_rollout(segments, fresh, requests)
        except NoSample as error:
            reason, problem = error.args
            raise NoSample(
                reason, f"{describe(self.function)} {problem} (prompt {fresh.prompt_index})."
            ) from error

    def _checked_rollout(
        self, segments: Sequence[ReturnedSample], fresh: Sample, requests: Sequence[Sampled]
    ) -> list[Sample]:
        """Returns the checked segments of a rollout, or a sample to start anew."""
        statuses = [_status(segment.status, requests) for segment in segments]
        can_continue = len(segments) == 1 and segments[0].response_length != 0
        if SampleStatus.ABORTED in statuses and not can_continue:
            # The next rollout calls the function from the start.
            return [replace(fresh, status=SampleStatus.ABORTED, loss_mask=[], rollout_log_probs=[])]
        return [self._checked_sample(segment, fresh, requests) for segment in segments]

    def _checked_sample(
        self, fields: ReturnedSample, fresh: Sample, requests: Sequence[Sampled]
    ) -> Sample:
        """Returns a new sample from the checked fields and the engine's records."""
        tokens = fields.tokens
        length = fields.response_length
        self._check_sizes(fields)
        # After the check: a length of 10^12 would need more memory than the machine has.
        mask = [1] * length
        if fields.loss_mask is not None:
            # True and 1.0 are accepted, too.
            mask = [int(value) for value in fields.loss_mask]
        log_probs = _log_probs(fields.rollout_log_probs, mask)
        # Engines here give one number per token; slime's give one text per request, or none.
        versions = [int(version) for version in fields.weight_versions if str(version).isdecimal()]
        if len(versions) != length:
            versions = [self.version()] * length
        reward, reward_parts = self._reward(fields.reward)
        sets = fields.sampling_mask
        if sets is not None and len(sets) != length:
            sets = None
        # `Sample` takes an empty prompt, label or metadata from the prompt's row.
        result = Sample(
            prompt=fields.prompt,
            prompt_row=fresh.prompt_row,
            tokens=tokens,
            response=self._response(fields.response, tokens[-length:]),
            response_length=length,
            label=fields.label,
            loss_mask=mask,
            rollout_log_probs=log_probs,
            weight_versions=versions,
            remove_sample=fields.remove_sample,
            status=_status(fields.status, requests),
            metadata=fields.metadata or {},
            train_metadata=fields.train_metadata,
            session_id=fields.session_id,
            non_generation_time=fields.non_generation_time,
            reward=reward,
            reward_parts=reward_parts,
            sampling_mask=sets,
        )
        if requests:
            origin = provenance(tokens, length, requests)
            if fields.rollout_log_probs is not None:
                _check_log_probs(log_probs, mask, origin, requests)
            copy_engine_records(result, origin, requests)
            self._handle_retokenized(result, origin, requests)
        return result

    def _check_sizes(self, fields: ReturnedSample) -> None:
        """Raises NoSample if the numbers of tokens, mask entries or log-probs do not fit."""
        tokens = fields.tokens
        length = fields.response_length
        response = f"a response_length of {length}"
        if not 0 < length < len(tokens):
            raise NoSample(
                "tokens", f"gave {len(tokens)} tokens with {response}; give prompt and response"
            )
        if max(tokens) >= self.vocab_size:
            raise NoSample(
                "tokens",
                f"gave the token {max(tokens)}; the vocabulary ends at {self.vocab_size - 1}",
            )
        if len(tokens) > self.context_len:
            raise NoSample(
                "context", f"gave {len(tokens)} tokens; the context has {self.context_len}"
            )
        mask = fields.loss_mask
        if mask is not None and len(mask) != length:
            raise NoSample("loss_mask", f"gave a loss_mask of {len(mask)} entries for {response}")
        log_probs = fields.rollout_log_probs
        if log_probs is not None and len(log_probs) != length:
            raise NoSample(
                "rollout_log_probs",
                f"gave {len(log_probs)} rollout_log_probs for {response}; give 0.0 for"
                " observations",
            )

    def _response(self, text: str, response_ids: Sequence[int]) -> str:
        """Returns the text of a response, for built-in rewards without special tokens at the end.

        Without a function, the engine removes these tokens. In slime's functions they remain,
        because slime turns `skip_special_tokens` off.
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
        self, reward: float | dict[str, float | str] | None
    ) -> tuple[float | None, dict[str, float]]:
        """Returns the reward, and the other numbers of a dictionary reward.

        Raises:
            NoSample: The reward is too large or no number, or --reward-key is not in it.
        """
        if reward is None:
            return None, {}
        value = reward
        parts: dict[str, float] = {}
        if isinstance(reward, dict):
            for name, part in reward.items():
                if isinstance(part, float):
                    parts[name] = part
            # NaN, for the error below, if the dictionary lacks --reward-key.
            value = parts.pop(self.args.reward_key or "", math.nan)
        assert isinstance(value, float)
        # `not <=` also refuses NaN.
        if not abs(value) <= MAX_REWARD:
            raise NoSample(
                "reward",
                f"gave the reward {quoted(reward)}; it must be a finite number of at most"
                f" {MAX_REWARD:g} in magnitude, or a dict with --reward-key",
            )
        return value, parts

    def _handle_retokenized(
        self, sample: Sample, origin: Provenance, requests: Sequence[Sampled]
    ) -> None:
        """Rejects or masks trained tokens that no request sampled (--retokenization)."""
        wrong = []
        for index, number in enumerate(origin.request):
            if sample.loss_mask[index] and number < 0:
                wrong.append(index)
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
        """Returns the first position where a sample and the engine differ, and a remedy."""

        def shown(token: int) -> str:
            return f"{token} ({quoted(self.tokenizer.decode([token]), 40)})"

        prompt_length = len(sample.tokens) - sample.response_length
        position, expected = first_difference(sample.tokens, requests)
        if position >= len(sample.tokens) or expected is None:
            # All sampled tokens agree, but tokens after them, such as tool output, are marked as
            # trained.
            token = sample.response_ids[first_wrong]
            return (
                f"no request sampled response token {first_wrong}, {shown(token)}. Append the ids"
                " of the engine's answer, and other tokens with a loss mask of 0."
            )
        if position < prompt_length:
            name = f"prompt token {position}"
            advice = (
                "Send sample.tokens, or tokenize sample.prompt with add_special_tokens=False, and"
                " return the same."
            )
        else:
            name = f"response token {position - prompt_length}"
            advice = "Append the ids of the engine's answer."
        return (
            f"they differ first at {name}, {shown(sample.tokens[position])} in the sample and"
            f" {shown(expected)} in the request. {advice}"
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
        # slime's functions build the URL of the router from these two.
        args = Namespace(**vars(args))
        args.sglang_router_ip, args.sglang_router_port = address
    vocab_size: float = math.inf
    if sizes.vocab_size is not None:
        vocab_size = sizes.vocab_size
    context_len = math.inf
    for limit in (sizes.context_len, config.rollout_max_context_len):
        if limit is not None:
            context_len = min(context_len, limit)
    return GenerateFunction(
        function=load_user_function(option, path),
        args=args,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        context_len=context_len,
        config=config,
        version=version,
    )


def slime_sampling_params(sampling: Sampling) -> dict[str, Any]:
    """Returns slime's parameters for a generate function, which keep stops in the text."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": sampling.max_response_len,
        "stop": list(sampling.stop) or None,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


def mark_failed_samples(groups: Sequence[Sequence[Sample]]) -> str | None:
    """Turns samples without a response into failed samples.

    Returns:
        A warning about all failed samples; None without one.

    Raises:
        CustomFunctionError: All samples failed.
    """
    total = 0
    messages: Counter[str] = Counter()
    for group in groups:
        for rollout in by_rollout(group):
            total += 1
            for sample in rollout:
                if not sample.response_length:
                    message = "the generate function ended without a response."
                    make_failed(sample, "aborted", message)
            # A call that failed gave a single sample.
            if rollout[0].failure:
                messages[str(rollout[0].metadata["generate_error"])] += 1
    if not messages:
        return None
    failed = messages.total()
    message, _ = messages.most_common(1)[0]
    if failed == total:
        raise CustomFunctionError(
            f"none of the {total} samples of a rollout could be made: {message}"
        )
    return f"{failed} of {total} samples could not be made and train nothing: {message}"


def retokenized_message(groups: Sequence[Sequence[Sample]]) -> str | None:
    """Returns the message about the first retokenized sample; None without one."""
    for sample in chain.from_iterable(groups):
        if sample.retokenized:
            return str(sample.metadata[RETOKENIZED])
    return None


def make_failed(sample: Sample, reason: str, message: str, version: int = 0) -> None:
    """Turns a prompt into a failed sample: one response token, which is not trained on."""
    # Training needs a response; its token is masked, so any id of the vocabulary will do.
    sample.tokens = [*sample.tokens, sample.tokens[-1]]
    sample.response_length = 1
    sample.loss_mask = [0]
    sample.rollout_log_probs = [0.0]
    sample.weight_versions = [version]
    sample.status = SampleStatus.FAILED
    sample.failure = reason
    sample.reward = 0.0
    sample.remove_sample = True
    sample.metadata = {**sample.metadata, "generate_error": message}


def _log_probs(values: Sequence[float | None] | None, mask: Sequence[int]) -> list[float]:
    """Returns 0 for tokens that are not trained on; all NaN if the function gave no log-probs."""
    if values is None:
        return [math.nan] * len(mask)
    log_probs = []
    for index, (value, is_trained) in enumerate(zip(values, mask, strict=True)):
        log_prob = 0.0
        if is_trained:
            log_prob = math.nan
            if value is not None:
                log_prob = value
        # A comparison with NaN is false, so NaN is refused, too.
        if not -math.inf < log_prob <= MAX_LOG_PROB:
            raise NoSample(
                "rollout_log_probs",
                f"gave the log-prob {log_prob} for response token {index}, which is trained on",
            )
        log_probs.append(log_prob)
    return log_probs


def _check_log_probs(
    log_probs: Sequence[float], mask: Sequence[int], origin: Provenance, requests: Sequence[Sampled]
) -> None:
    """Raises NoSample if the log-prob of a trained token differs from the engine's."""
    for position, (number, offset) in enumerate(origin.pairs):
        if not mask[position] or number < 0:
            continue
        sampled = requests[number].generation.log_probs[offset]
        # `not <=` also refuses NaN.
        if not abs(log_probs[position] - sampled) <= LOG_PROB_TOLERANCE:
            raise NoSample(
                "rollout_log_probs",
                f"gave the log-prob {log_probs[position]:.4f} for response token {position},"
                f" which was sampled with {sampled:.4f}; log-probs and tokens are out of step",
            )


def _status(status: SampleStatus, requests: Sequence[Sampled]) -> SampleStatus:
    """Returns the sample's status.

    The last request decides if the engine aborted it, or if the function left the status unchanged.
    """
    # `is_trained` is set only for the response of an earlier rollout, which is no request.
    reasons = [one.generation.finish_reason for one in requests if one.is_trained is None]
    if not reasons:
        if status is SampleStatus.PENDING:
            return SampleStatus.COMPLETED
        return status
    is_unchanged = status in (SampleStatus.PENDING, SampleStatus.ABORTED)
    if is_unchanged or reasons[-1] == "abort":
        return STATUS[reasons[-1]]
    return status
