"""The generate user function: called for each rollout, held to its contract, and given up where it fails.

    async def generate(args, sample, sampling_params) -> Sample | list[Sample]

Where the function has a parameter named `engine` it gets the engine of this sample (`generation.TokenEngine`), and
where it has one named `evaluation` whether held-out prompts are answered. Functions written for slime post to the
address in `args`; `slime_client` answers them with the same engine.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import operator
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from slime_tis.errors import CustomFunctionError, quoted
from slime_tis.policy.advantages import MAX_REWARD
from slime_tis.trainer.agents.sampled_tokens import Provenance, RecordedEngine, copy_engine_records, provenance
from slime_tis.trainer.agents.slime_client import SlimeEngine, current_engine
from slime_tis.trainer.data.json_values import json_object
from slime_tis.trainer.data.sample import STATUS, Sample, SampleStatus, Sampling, by_rollout
from slime_tis.trainer.engines.engine import RolloutUnavailable
from slime_tis.trainer.engines.generation import RolloutFunction, TokenEngine
from slime_tis.trainer.engines.tasks import is_abandoned
from slime_tis.trainer.interrupt import Interrupted
from slime_tis.user_functions import accepted, calling, describe, load_user_function

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slime_tis.trainer.options.rollout import RolloutConfig

GRACE = 1.0
"""Time that a function has to end once it is cancelled, in seconds."""
LONGEST_TEXT = 1 << 20
"""Characters of a response, of a prompt of the function's own, and of metadata as JSON."""
LARGEST_LOG_PROB = 1e-3
"""A probability of 1 may come out a little above it in half precision."""
LOG_PROB_TOLERANCE = 1e-4
"""Difference of a log-prob that a function returns to the one that the engine gave it, in nats."""


class NoSample(Exception):
    """A call gave no sample that can be trained on."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        """One word, by which such samples are counted."""


@dataclass(frozen=True, kw_only=True)
class GenerateFunction:
    """The user's function, and what its samples are held to."""

    function: Callable[..., Any]
    args: Namespace
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int | None
    """Token ids of the model; None where that is not known."""
    context_len: int | None
    """Longest prompt and response together, in tokens."""
    timeout: float
    """Longest time for one call, in seconds."""
    retokenization: str
    """Handling of tokens that differ from the sampled tokens: reject, keep-mask or error."""
    version: Callable[[], int]
    """Version of the engine's weights."""

    def bind(self, sampling: Sampling, *, evaluation: bool = False) -> RolloutFunction:
        """What the engine calls for each sample.

        Args:
            sampling: How responses are drawn, unless a request says otherwise.
            evaluation: Whether held-out prompts are answered.
        """
        params = slime_sampling_params(sampling)

        async def call(sample: Sample, engine: TokenEngine) -> list[Sample]:
            recorded = RecordedEngine(engine, sample)
            given = Sample(prompt=sample.row, tokens=list(sample.row.token_ids))
            try:
                returned = await self._call(sample, recorded, dict(params), evaluation)
                return self.checked(returned, given, recorded)
            except NoSample as error:
                if recorded.lost is not None:
                    raise recorded.lost from error
                make_failed(given, error.reason, str(error), self.version())
                return [given]

        return call

    async def _call(self, sample: Sample, engine: RecordedEngine, params: dict[str, Any], evaluation: bool) -> Any:
        """What the function returns, within its time.

        Raises:
            NoSample: It raised, or ran out of time.
        """
        offered = {"engine": engine, "evaluation": evaluation}
        extra = {name: offered[name] for name in accepted(self.function, tuple(offered))}
        address = f"{self.args.sglang_router_ip}:{self.args.sglang_router_port}"

        async def call() -> Any:
            current_engine.set(SlimeEngine(engine, self.tokenizer, address))
            with calling(self.function):
                found = self.function(self.args, sample, params, **extra)
                return await found if inspect.isawaitable(found) else found

        task = asyncio.create_task(call())
        try:
            await asyncio.wait({task}, timeout=self.timeout)
        finally:  # reached as well where the rollout is given up
            if not task.done():
                engine.is_closed = True
                task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody awaits it
                task.cancel()
                try:
                    await asyncio.wait({task}, timeout=GRACE)
                finally:
                    is_abandoned(task)
        if engine.is_closed:
            raise NoSample("timeout", f"{describe(self.function)} took more than {self.timeout:g} s.")
        try:
            return task.result()
        except CustomFunctionError as error:
            cause = error.__cause__
            if isinstance(cause, RolloutUnavailable | Interrupted):
                engine.lost = cause
            raise NoSample("raised", str(error)) from error
        except asyncio.CancelledError:
            raise NoSample("raised", f"{describe(self.function)} cancelled itself.") from None

    def checked(self, returned: Any, given: Sample, engine: RecordedEngine) -> list[Sample]:
        """The samples of one call, each in the form that training takes.

        Args:
            returned: By the function.
            given: What it was given.
            engine: The requests sampled in the meantime.

        Raises:
            NoSample: The contract is broken, or the function was stopped with nothing to continue from.
            CustomFunctionError: Tokens differ from the sampled tokens, and --retokenization is error.
        """
        samples = list(returned) if isinstance(returned, list | tuple) else [returned]
        if not samples or not all(isinstance(sample, Sample) for sample in samples):
            raise self._broken("returned", f"returned {quoted(returned)}; return a Sample or a list of them", given)
        try:
            aborted = any(_status(sample, engine) is SampleStatus.ABORTED for sample in samples)
            if aborted and (len(samples) > 1 or not samples[0].response_length):
                return [_without_response(given)]
            return [self._checked(sample, given, engine) for sample in samples]
        except (NoSample, CustomFunctionError):
            raise
        except (Exception, SystemExit) as error:  # of methods of the user's objects
            message = f"gave a sample that cannot be read: {type(error).__name__}: {error}"
            raise self._broken("returned", message, given) from error

    def _checked(self, sample: Sample, given: Sample, engine: RecordedEngine) -> Sample:
        tokens, length = self._tokens(sample, given)
        mask = self._mask(sample, length, given)
        log_probs = self._log_probs(sample, mask, given, are_known=bool(engine.sampled))
        found = Sample(
            prompt=_prompt(sample, given),
            prompt_row=given.prompt_row,
            tokens=tokens,
            response=self._text(sample, tokens[len(tokens) - length :], given),
            response_length=length,
            label=given.label if sample.label is None else sample.label,
            loss_mask=mask,
            rollout_log_probs=[math.nan] * length if log_probs is None else log_probs,
            weight_versions=self._versions(sample, length),
            sampling_mask=sample.sampling_mask if _covers(sample, length) else None,
            remove_sample=bool(sample.remove_sample),
            status=_status(sample, engine),
            metadata=self._notes(sample.metadata or given.metadata, given),
            train_metadata=None if sample.train_metadata is None else self._notes(sample.train_metadata, given),
            session_id=None if sample.session_id is None else str(sample.session_id),
            non_generation_time=float(sample.non_generation_time),
        )
        found.reward, found.reward_parts = self._reward(sample, given)
        if engine.sampled:
            where = provenance(tokens, length, engine.sampled)
            self._check_log_probs(log_probs, mask, where, engine, given)
            copy_engine_records(found, where, engine.sampled)
            self._handle_retokenized(found, where, engine)
        return found

    def _tokens(self, sample: Sample, given: Sample) -> tuple[list[int], int]:
        try:
            tokens = [operator.index(token) for token in sample.tokens]
            length = operator.index(sample.response_length)
        except TypeError as error:
            message = f"gave tokens {quoted(sample.tokens)} and response_length {quoted(sample.response_length)}"
            raise self._broken("tokens", f"{message}; both are whole numbers", given) from error
        if not 0 < length < len(tokens):
            message = f"gave {len(tokens)} tokens with a response_length of {length}; tokens are prompt and response"
            raise self._broken("tokens", f"{message}, at least one of each", given)
        limit = math.inf if self.vocab_size is None else self.vocab_size
        wrong = next((token for token in tokens if not 0 <= token < limit), None)
        if wrong is not None:
            raise self._broken("tokens", f"gave the token {quoted(wrong)}; the vocabulary ends at {limit - 1}", given)
        if self.context_len is not None and len(tokens) > self.context_len:
            message = f"gave {len(tokens)} tokens, more than the {self.context_len} of the context"
            raise self._broken("context", f"{message}; cut the observations, or end the episode earlier", given)
        return tokens, length

    def _mask(self, sample: Sample, length: int, given: Sample) -> list[int]:
        if sample.loss_mask is None:
            return [1] * length
        mask = list(sample.loss_mask)
        if len(mask) != length or any(value not in (0, 1) for value in mask):
            message = f"gave a loss_mask of {len(mask)} entries for a response_length of {length}"
            raise self._broken("loss_mask", f"{message}; give a 0 or 1 for each response token", given)
        return [int(value) for value in mask]

    def _log_probs(self, sample: Sample, mask: Sequence[int], given: Sample, *, are_known: bool) -> list[float] | None:
        """The log-probs that the function gave; 0 where it trains on nothing, None where it gave none."""
        if sample.rollout_log_probs is None:
            return None
        values = [math.nan if value is None else float(value) for value in sample.rollout_log_probs]
        if len(values) != len(mask):
            message = f"gave {len(values)} rollout_log_probs for a response_length of {len(mask)}"
            raise self._broken("log_probs", f"{message}; give 0.0 for observations", given)
        for place, (value, trained) in enumerate(zip(values, mask, strict=True)):
            if trained and not -math.inf < value <= LARGEST_LOG_PROB:
                message = f"gave the log-prob {value} for response token {place}, which is trained on"
                raise self._broken("log_probs", f"{message}; mask the token, or give a log-prob", given)
        return [value if trained else 0.0 for value, trained in zip(values, mask, strict=True)]

    def _check_log_probs(
        self,
        log_probs: Sequence[float] | None,
        mask: Sequence[int],
        where: Provenance,
        engine: RecordedEngine,
        given: Sample,
    ) -> None:
        """Compares the function's log-probs with the engine's."""
        if log_probs is None:
            return
        for position, (number, place) in enumerate(zip(where.request, where.place, strict=True)):
            if mask[position] and number >= 0:
                sampled = engine.sampled[number].generation.log_probs[place]
                if not abs(log_probs[position] - sampled) <= LOG_PROB_TOLERANCE:
                    raise self._broken(
                        "log_probs",
                        f"gave the log-prob {log_probs[position]:.4f} for response token {position}, which was sampled "
                        f"with {sampled:.4f}; log-probs and tokens are out of step",
                        given,
                    )

    def _versions(self, sample: Sample, length: int) -> list[int]:
        """A version per token; slime's functions have one text per request, or none."""
        versions = [int(version) for version in sample.weight_versions if str(version).isdecimal()]
        return versions if len(versions) == length else [self.version()] * length

    def _text(self, sample: Sample, response_ids: list[int], given: Sample) -> str:
        if not isinstance(sample.response, str):
            raise self._broken("returned", f"gave the response {quoted(sample.response)}; it must be text", given)
        if len(sample.response) > LONGEST_TEXT:
            raise self._broken("size", f"gave a response of {len(sample.response)} characters", given)
        return sample.response or str(self.tokenizer.decode(response_ids, skip_special_tokens=True))

    def _notes(self, metadata: Any, given: Sample) -> dict[str, Any]:
        if not isinstance(metadata, Mapping):
            raise self._broken("metadata", f"gave {quoted(metadata)} as metadata; give a dict", given)
        try:
            notes = json_object(metadata, "its metadata")
        except ValueError as error:
            raise self._broken("metadata", f"gave metadata that cannot be saved: {error}", given) from error
        if len(json.dumps(notes)) > LONGEST_TEXT:
            raise self._broken("size", f"gave metadata of more than {LONGEST_TEXT} characters", given)
        return notes

    def _reward(self, sample: Sample, given: Sample) -> tuple[float | None, dict[str, float]]:
        """The reward that the function has set, and its components; None leaves it to the reward function."""
        reward: Any = sample.reward
        parts: dict[str, float] = {}
        if isinstance(reward, Mapping):
            parts = {str(name): float(part) for name, part in reward.items() if isinstance(part, int | float)}
            reward = parts.pop(self.args.reward_key or "", math.nan)
        if reward is None or abs(float(reward)) <= MAX_REWARD:
            return None if reward is None else float(reward), parts
        message = (
            f"gave the reward {quoted(sample.reward)}; it must be a finite number of at most {MAX_REWARD:g} in "
            "magnitude, or a dict with --reward-key"
        )
        raise self._broken("returned", message, given)

    def _handle_retokenized(self, sample: Sample, where: Provenance, engine: RecordedEngine) -> None:
        """Finds tokens that are trained on and were not sampled, and does with them as --retokenization says.

        Raises:
            CustomFunctionError: there are some, and it says error.
        """
        trained = zip(where.request, sample.loss_mask, strict=True)
        wrong = [place for place, (number, masked_in) in enumerate(trained) if masked_in and number < 0]
        sample.retokenized = len(wrong)
        if not wrong:
            return
        if self.retokenization == "error":
            token = sample.response_ids[wrong[0]]
            text = quoted(self.tokenizer.decode([token]), 40)
            raise CustomFunctionError(
                f"{describe(self.function)} gave {len(wrong)} of {sum(sample.loss_mask)} tokens to be trained on that "
                f"differ from the sampled tokens, for prompt {sample.prompt_index}; the first is response token "
                f"{wrong[0]}, {token} ({text}). Give the engine token ids and append the ids of its answer; "
                "--retokenization keep-mask trains on the others."
            )
        if self.retokenization == "reject":
            sample.remove_sample = True
        else:
            for place in wrong:
                sample.loss_mask[place] = 0

    def _broken(self, reason: str, text: str, given: Sample) -> NoSample:
        return NoSample(reason, f"{describe(self.function)} {text} (prompt {given.prompt_index}).")


def build_generate_function(
    config: RolloutConfig,
    args: Namespace,
    tokenizer: PreTrainedTokenizerBase,
    *,
    vocab_size: int | None,
    context_len: int | None,
    version: Callable[[], int],
    address: tuple[str, int],
) -> GenerateFunction | None:
    """The function of --custom-generate-function-path; None without.

    Args:
        config: With the path, and what its samples are held to.
        args: Given to the function.
        tokenizer: Of the model.
        vocab_size: Token ids of the model.
        context_len: Longest text that is trained on, in tokens.
        version: Version of the engine's weights.
        address: Host and port of the engine, where it has some.

    Raises:
        CustomFunctionError: It cannot be loaded, or called as the contract says.
    """
    if config.custom_generate_function_path is None:
        return None
    ip, port = address
    limits = [limit for limit in (context_len, config.rollout_max_context_len) if limit is not None]
    return GenerateFunction(
        function=load_generate_function(config.custom_generate_function_path),
        args=Namespace(**{**vars(args), "sglang_router_ip": ip, "sglang_router_port": port}),
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        context_len=min(limits, default=None),
        timeout=config.generate_timeout,
        retokenization=config.retokenization,
        version=version,
    )


def load_generate_function(path: str) -> Callable[..., Any]:
    """The function at a path, which can be called as the contract says.

    Raises:
        CustomFunctionError: it cannot be loaded or called so.
    """
    return load_user_function("custom_generate_function_path", path)


def slime_sampling_params(sampling: Sampling) -> dict[str, Any]:
    """What slime passes to a generate function: SGLang's names, with special tokens and stops left in the text."""
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
    """Makes failed samples of those without a response, and says what became of calls that gave no sample.

    Args:
        groups: samples of each prompt, the same on every rank; changed in place.

    Returns:
        A warning; None where every call gave a sample.

    Raises:
        CustomFunctionError: no call gave one.
    """
    rollouts = [rollout for group in groups for rollout in by_rollout(group)]
    for sample in (sample for rollout in rollouts for sample in rollout):
        if not sample.response_length:
            make_failed(sample, "aborted", "the generate function ended without a response.")
    messages = [str(rollout[0].metadata["generate_error"]) for rollout in rollouts if rollout[0].failure]
    if not messages:
        return None
    message, _ = Counter(messages).most_common(1)[0]
    if len(messages) == len(rollouts):
        raise CustomFunctionError(f"none of the {len(rollouts)} samples of a rollout could be made: {message}")
    return f"{len(messages)} of {len(rollouts)} samples could not be made and train nothing: {message}"


def make_failed(sample: Sample, reason: str, message: str, version: int = 0) -> None:
    """Makes a sample one that takes part in nothing: after the prompt one token, which is not trained on.

    Args:
        sample: with tokens of the prompt and no response.
        reason: one word, by which such samples are counted.
        message: what happened.
        version: of the engine's weights.
    """
    sample.tokens = [*sample.tokens, sample.tokens[-1]]
    sample.response_length = 1
    sample.loss_mask, sample.rollout_log_probs, sample.weight_versions = [0], [0.0], [version]
    sample.status, sample.failure = SampleStatus.FAILED, reason
    sample.reward, sample.remove_sample = 0.0, True
    sample.metadata = {**sample.metadata, "generate_error": message}


def _parameters(function: Callable[..., Any]) -> Sequence[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a function in C without a signature
        return ()


def _without_response(given: Sample) -> Sample:
    """Returns an aborted sample from which the function starts again."""
    return replace(given, status=SampleStatus.ABORTED, loss_mask=[], rollout_log_probs=[])


def _status(sample: Sample, engine: RecordedEngine) -> SampleStatus:
    """Its own; what the last request says where that was aborted, or the function left the status as it was given."""
    status = SampleStatus(sample.status)
    reasons = [one.generation.finish_reason for one in engine.sampled if one.is_trained is None]
    if not reasons:
        return SampleStatus.COMPLETED if status is SampleStatus.PENDING else status
    untouched = status in (SampleStatus.PENDING, SampleStatus.ABORTED)
    return STATUS[reasons[-1]] if untouched or reasons[-1] == "abort" else status


def _prompt(sample: Sample, given: Sample) -> Any:
    """The prompt that the function answered, which is the row of the file where it is the same text."""
    if isinstance(sample.prompt, list):
        return json.loads(json.dumps(sample.prompt, default=str))
    return given.prompt if sample.prompt in ("", given.prompt) else str(sample.prompt)


def _covers(sample: Sample, length: int) -> bool:
    mask = sample.sampling_mask
    return mask is not None and len(mask) == length and int(mask.lengths.sum()) == len(mask.token_ids)
