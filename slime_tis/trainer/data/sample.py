"""The data of a rollout: prompts in, sampled responses out, and how to sample them."""

from __future__ import annotations

import copy
import json
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain, pairwise
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]
T = TypeVar("T", int, float)

NUMBER_TYPES = {
    "tokens": "q",
    "loss_mask": "b",
    "rollout_log_probs": "d",
    "weight_versions": "q",
    "rollout_workers": "i",
}
"""Fields of `Sample` with a number for each token, and their types as type codes of the module
`array`."""


class Numbers(array):  # type: ignore[type-arg]  # Python 3.11 has no array[Any]
    """A list of numbers of one type: `Numbers("d", [0.5])`, with a type code of the module `array`.

    It takes 1 to 8 bytes per number; a list takes 8, and 24 to 28 for the object. Samples hold
    their numbers in this form between user functions, which get lists (`Sample.expand`).
    """

    def __getitem__(self, index: Any) -> Any:
        value = super().__getitem__(index)
        if isinstance(index, slice):
            return Numbers(self.typecode, value)
        return value

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, slice):  # array takes only arrays here; a list takes any iterable
            value = array(self.typecode, value)
        super().__setitem__(index, value)

    def __add__(self, other: Any) -> Any:
        if isinstance(other, Numbers) and other.typecode == self.typecode:
            return Numbers(self.typecode, super().__add__(other))
        return [*self, *other]

    def __radd__(self, other: list[Any]) -> list[Any]:
        return [*other, *self]

    def __iadd__(self, other: Iterable[Any]) -> Numbers:  # type: ignore[misc]
        self.extend(other)
        return self

    def __eq__(self, other: object) -> bool:
        if isinstance(other, list):
            return self.tolist() == other
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        # Without this, Python would use array's comparison, which no list equals.
        return not self == other

    __hash__ = None

    # As list.copy does, it returns a list; copy.copy keeps the compact form.
    copy = array.tolist

    def __copy__(self) -> Numbers:
        return self[:]  # type: ignore[no-any-return]

    def __deepcopy__(self, _: object) -> Numbers:
        return self[:]  # type: ignore[no-any-return]


Ints: TypeAlias = list[int] | Numbers
Floats: TypeAlias = list[float] | Numbers


@dataclass(frozen=True, eq=False)
class SamplingMask:
    """The tokens that truncated sampling (top-p, top-k) could draw at each position.

    The sets are stored as compressed sparse rows (CSR): position i has the set
    token_ids[s : s + lengths[i]] with s = Σ_{j<i} lengths[j]. A length of 0 means the full
    vocabulary: nothing was cut, no set was recorded, or the policy did not sample the token.

    Shapes: the suffix _M marks one value per token of the concatenated sets.
    """

    token_ids: Tensor
    """[M] int32, the concatenated sets of all positions."""
    lengths: Tensor
    """[positions] int32, the number of tokens in each set."""

    def __len__(self) -> int:
        return len(self.lengths)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SamplingMask):
            return NotImplemented
        same_lengths = torch.equal(self.lengths, other.lengths)
        return same_lengths and torch.equal(self.token_ids, other.token_ids)

    __hash__ = None  # type: ignore[assignment]  # tensors compare by value and can be changed

    @classmethod
    def from_sets(cls, sets: Sequence[Sequence[int]]) -> SamplingMask:
        """Returns the mask of one list of token ids per position; an empty list is no record."""
        lengths = [len(allowed) for allowed in sets]
        return cls(
            token_ids=torch.tensor(list(chain(*sets)), dtype=torch.int32),
            lengths=torch.tensor(lengths, dtype=torch.int32),
        )

    @classmethod
    def unrecorded(cls, positions: int) -> SamplingMask:
        """Returns a mask of `positions` positions without a recorded set."""
        return cls(torch.zeros(0, dtype=torch.int32), torch.zeros(positions, dtype=torch.int32))

    @classmethod
    def cat(cls, masks: Sequence[SamplingMask]) -> SamplingMask:
        """Concatenates masks."""
        if not masks:
            return cls.unrecorded(0)
        token_ids = [mask.token_ids for mask in masks]
        lengths = [mask.lengths for mask in masks]
        return cls(token_ids=torch.cat(token_ids), lengths=torch.cat(lengths))

    def sets(self) -> list[list[int]]:
        """Returns one list of token ids per position."""
        return [ids.tolist() for ids in self.token_ids.split(self.lengths.tolist())]

    def position_of_token(self) -> Tensor:
        """Returns the position of every entry of `token_ids`, [M] int64, without a GPU sync."""
        positions = torch.arange(len(self), device=self.lengths.device)
        return positions.repeat_interleave(self.lengths, output_size=len(self.token_ids))

    def select(self, positions: Tensor) -> SamplingMask:
        """Returns the sets at the given positions [int64], in that order."""
        starts = self.lengths.cumsum(0) - self.lengths
        lengths = self.lengths[positions]
        # A set moves as one block, from its start here to its start in the new mask.
        new_starts = lengths.cumsum(0) - lengths
        shift = starts[positions] - new_starts
        index_M = torch.arange(int(lengths.sum()), device=lengths.device)
        index_M = index_M + shift.repeat_interleave(lengths)
        return SamplingMask(self.token_ids[index_M], lengths)

    def split(self, positions: Sequence[int]) -> list[SamplingMask]:
        """Splits the mask into masks with the given numbers of positions."""
        masks = []
        start = 0
        for lengths in self.lengths.split(list(positions)):
            end = start + int(lengths.sum())
            # clones, because a pickled view would contain the storage of the complete tensor
            masks.append(SamplingMask(self.token_ids[start:end].clone(), lengths.clone()))
            start = end
        return masks

    def contains(self, token_ids: Tensor) -> Tensor:
        """Returns, per position, whether the set contains the token.

        Args:
            token_ids: [positions], one token per position.

        Returns:
            [positions] bool; True for a position without a recorded set.
        """
        position_M = self.position_of_token()
        equal_M = self.token_ids == token_ids[position_M]
        counts = torch.zeros(len(self), dtype=torch.int64, device=self.lengths.device)
        counts.index_add_(0, position_M, equal_M.long())
        return (counts > 0) | (self.lengths == 0)

    def without(self, removed: Tensor) -> SamplingMask:
        """Returns the mask without the sets at the positions that `removed` [positions] marks."""
        kept_M = ~removed[self.position_of_token()]
        return SamplingMask(self.token_ids[kept_M], self.lengths.masked_fill(removed, 0))

    def to(self, device: torch.device | str) -> SamplingMask:
        """Returns the mask on another device."""
        return SamplingMask(
            token_ids=self.token_ids.to(device, non_blocking=True),
            lengths=self.lengths.to(device, non_blocking=True),
        )


class SampleStatus(Enum):
    """How a sample ended, under slime's names."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


STATUS: dict[FinishReason, SampleStatus] = {
    "stop": SampleStatus.COMPLETED,
    "length": SampleStatus.TRUNCATED,
    "abort": SampleStatus.ABORTED,
}


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One row of a prompt file."""

    index: int
    text: str
    """The tokenized text, after the chat template."""
    token_ids: tuple[int, ...]

    label: Any = None
    """The expected answer, in the JSON type of the prompt file."""

    metadata: dict[str, Any] = field(default_factory=dict)
    """Other data for the reward: the row's other columns, and its mapping of metadata."""


@dataclass
class Sample:
    """One response to a prompt.

    Engines and generate functions fill it, rewards score it, and training reads it.
    It has the fields of slime's Sample and is mutable like it, because functions written for slime
    construct, read and write samples. The last `response_length` tokens are the response.
    """

    group_index: int | None = None
    """Index of the prompt in the batch; the samples of one prompt share it."""
    index: int | None = None
    rollout_id: int | None = None
    """Samples of one call of a generate function share it and count as one rollout; None for a
    single sample."""
    prompt: str | list[dict[str, Any]] = ""
    """The answered text or messages; unset means the text of `prompt_row`."""
    tokens: Ints = field(default_factory=list)
    response: str = ""
    """Text of the response, without special tokens."""
    response_length: int = 0
    """Tokens of the response, including the end-of-sequence token and observations of tools."""
    label: Any = None
    """The expected answer, in the JSON type of the prompt file; None takes the label of the
    prompt's row."""
    reward: float | None = None
    loss_mask: Ints = None  # type: ignore[assignment]  # slime's functions ask whether it is None
    """1 for each response token that is trained on, 0 for tool output; None before there is a
    response."""
    weight_versions: Ints = field(default_factory=list)
    """For each response token the version of the weights that sampled it, in optimizer steps; an
    observation has the version of the token before it."""
    rollout_log_probs: Floats = None  # type: ignore[assignment]  # as of loss_mask
    """For each response token its log-prob in the distribution that the engine sampled from. NaN if
    missing; ignored if the loss mask is 0. None before there is a response."""
    remove_sample: bool = False
    """Whether to train on none of the sample's tokens; its reward stays in its group's baseline."""
    status: SampleStatus = SampleStatus.PENDING
    """Completed by a stop token, truncated by a length limit, aborted from outside, or failed."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """User-defined notes; unset means a copy of the prompt row's metadata."""
    train_metadata: dict[str, Any] | None = None
    """Notes for functions that take part in training."""
    session_id: str | None = None
    """Name of a conversation, whose requests share a cache."""
    non_generation_time: float = 0.0
    """Seconds that a generate function spent on anything but sampling."""
    sampling_mask: SamplingMask | None = None
    """The candidate tokens at each response token under top-p or top-k; None if nothing was cut or
    recorded."""
    rollout_routed_experts: Tensor | None = field(default=None, compare=False)
    """uint8 or int16 [tokens - 1, sparse layers, k]: the experts that the engine's routers chose
    for every token but the last, in their order; None if not recorded. Between sampling and
    training, only rank 0 has them."""
    rollout_routing_weights: Tensor | None = field(default=None, compare=False)
    """float32 [tokens - 1, sparse layers, k]: the combine weights of these experts."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """The numbers of a reward that is a dict; the score is the one that --reward-key names."""
    prompt_row: Prompt | None = None
    """The answered row of a prompt file, also if a function changes `prompt`; None without a
    row."""
    failure: str | None = None
    """Why a call of a generate function gave no sample (raised, timeout, tokens, …); None if it
    gave one."""
    retokenized: int = 0
    """Trained tokens of a generate function that differ from the tokens that the engine sampled
    there."""
    rollout_workers: Ints = field(default_factory=list, compare=False)
    """For each response token the index in `RolloutEngine.workers` of the server that sampled it;
    -1 if unknown."""

    Status: ClassVar = SampleStatus

    def __post_init__(self) -> None:
        if self.prompt_row is not None:
            self.prompt = self.prompt or self.prompt_row.text
            if self.label is None:
                self.label = copy.deepcopy(self.prompt_row.label)
            self.metadata = self.metadata or copy.deepcopy(self.prompt_row.metadata)

    def compact(self) -> Sample:
        """Replaces lists with a number for each token, and returns the sample."""
        for name, code in NUMBER_TYPES.items():
            values = getattr(self, name)
            if not isinstance(values, Numbers):
                setattr(self, name, Numbers(code, values))
        return self

    def expand(self) -> Sample:
        """Replaces compact numbers with lists, for user functions, and returns the sample."""
        for name in NUMBER_TYPES:
            values = getattr(self, name)
            if isinstance(values, Numbers):
                setattr(self, name, values.tolist())
        return self

    @property
    def row(self) -> Prompt:
        """The answered row of a prompt file; raises ValueError without one."""
        if self.prompt_row is None:
            raise ValueError("the sample answers no row of a prompt file.")
        return self.prompt_row

    @property
    def prompt_index(self) -> int:
        """Number of that row; -1 without a row."""
        if self.prompt_row is None:
            return -1
        return self.prompt_row.index

    @property
    def prompt_ids(self) -> Ints:
        """Tokens before the response."""
        # A slice with -response_length would be empty for an empty response.
        return self.tokens[: len(self.tokens) - self.response_length]

    @property
    def response_ids(self) -> Ints:
        """Tokens of the response."""
        return self.tokens[len(self.tokens) - self.response_length :]

    @property
    def prompt_text(self) -> str:
        """The prompt as one text."""
        if isinstance(self.prompt, str):
            return self.prompt
        return json.dumps(self.prompt, ensure_ascii=False)

    @property
    def effective_response_length(self) -> int:
        """Tokens of the response that are trained on."""
        if self.loss_mask is None:
            return self.response_length
        return sum(self.loss_mask)

    @property
    def turns(self) -> int:
        """The number of runs of consecutive trained tokens."""
        return sum(now > before for before, now in pairwise([0, *self.loss_mask]))

    @property
    def trained_versions(self) -> list[int]:
        """For each trained token the version of the weights that sampled it."""
        versions = []
        for version, is_trained in zip(self.weight_versions, self.loss_mask, strict=True):
            if is_trained:
                versions.append(version)
        return versions

    @property
    def worker_of_each(self) -> Ints:
        """`rollout_workers`; -1 for all tokens if a function did not keep one per token."""
        if len(self.rollout_workers) == self.response_length:
            return self.rollout_workers
        return [-1] * self.response_length

    @property
    def rollout_top_p_token_ids(self) -> Tensor | None:
        """slime's name of `sampling_mask.token_ids`; None without a mask."""
        if self.sampling_mask is None:
            return None
        return self.sampling_mask.token_ids

    @rollout_top_p_token_ids.setter
    def rollout_top_p_token_ids(self, token_ids: Sequence[int] | Tensor | None) -> None:
        if token_ids is None:
            self.sampling_mask = None
            return
        # slime's functions set token ids and offsets one after the other
        mask = self.sampling_mask
        if mask is None:
            mask = SamplingMask.unrecorded(0)
        self.sampling_mask = SamplingMask(_int32(token_ids), mask.lengths)

    @property
    def rollout_top_p_token_offsets(self) -> Tensor | None:
        """slime's form of `sampling_mask.lengths`: the starts of the sets, and the last end."""
        if self.sampling_mask is None:
            return None
        return torch.nn.functional.pad(self.sampling_mask.lengths.cumsum(0), (1, 0))

    @rollout_top_p_token_offsets.setter
    def rollout_top_p_token_offsets(self, offsets: Sequence[int] | Tensor | None) -> None:
        if offsets is None:
            self.sampling_mask = None
            return
        mask = self.sampling_mask
        if mask is None:
            mask = SamplingMask.unrecorded(0)
        self.sampling_mask = SamplingMask(mask.token_ids, _int32(offsets).diff())

    def get_reward_value(self, args: Any) -> float | None:
        """Returns the reward as a number; of a dict, the number of `args.reward_key`."""
        if isinstance(self.reward, Mapping):
            return float(self.reward[args.reward_key])
        return self.reward

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Sequence[int] | Tensor | None = None,
        log_probs: Sequence[float] | Tensor | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Appends tokens to the response, as slime's method of this name does.

        Args:
            args: slime passes its options; they have no effect.
            tokens: Token ids.
            log_probs: One per token, required if the tokens are trained on.
            trainable: Whether the tokens are trained on; False for the output of tools.
            meta_info: The server's meta_info: versions, sampling masks and finish reason.
            text: The tokens' text.
            update_terminal_info: Whether the finish reason sets `status`.

        Raises:
            ValueError: Trained tokens have no log-probs, or other tokens have some.
        """
        ids = _listed(tokens, int)
        values = _listed(log_probs, float)
        meta = meta_info or {}
        if trainable and ids and log_probs is None:
            raise ValueError("trained tokens need the log-probs that they were sampled with.")
        if not trainable and values:
            raise ValueError("tokens with trainable=False are not sampled and have no log-probs.")
        if log_probs is None:
            values = [0.0] * len(ids)
        before = self.response_length
        mask = self.loss_mask
        if mask is None:
            mask = [1] * before
        earlier = self.rollout_log_probs
        if earlier is None:
            # NaN counts as missing; for untrained tokens, any number is ignored.
            earlier = [math.nan if is_trained else 0.0 for is_trained in mask]
        added_mask = [int(trainable)] * len(ids)
        self.tokens = [*self.tokens, *ids]
        self.response_length += len(ids)
        self.loss_mask = [*mask, *added_mask]
        self.rollout_log_probs = [*earlier, *values]
        # If a function did not keep one version per token, the trainer fills them in later, from
        # the tokens that its engine sampled.
        if len(self.weight_versions) == before:
            added = _versions(meta, len(ids), self.weight_versions)
            self.weight_versions = [*self.weight_versions, *added]
        sets = meta.get("output_token_sampling_mask")
        if sets is not None or self.sampling_mask is not None:
            self._append_sampling_mask(before, len(ids), sets)
        self.response += text or ""
        if update_terminal_info and "finish_reason" in meta:
            self.status = STATUS.get(meta["finish_reason"]["type"], self.status)

    def _append_sampling_mask(
        self, before: int, count: int, sets: Sequence[Sequence[int]] | None
    ) -> None:
        """Appends `count` positions to the mask of the `before` earlier response tokens."""
        earlier = self.sampling_mask
        if earlier is None:
            earlier = SamplingMask.unrecorded(before)
        if sets is None:
            added = SamplingMask.unrecorded(count)
        else:
            added = SamplingMask.from_sets(sets)
        self.sampling_mask = SamplingMask.cat([earlier, added])


def by_rollout(samples: Iterable[Sample]) -> list[list[Sample]]:
    """Groups adjacent samples that are segments of one rollout."""
    rollouts: list[list[Sample]] = []
    previous_id = None
    for sample in samples:
        if sample.rollout_id is not None and sample.rollout_id == previous_id:
            rollouts[-1].append(sample)
        else:
            rollouts.append([sample])
        previous_id = sample.rollout_id
    return rollouts


def _listed(values: Any, kind: type[T]) -> list[T]:
    if values is None:
        return []
    if isinstance(values, Tensor):
        values = values.flatten().tolist()
    return [kind(value) for value in values]


def _int32(values: Sequence[int] | Tensor) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32).reshape(-1)


def _versions(meta: Mapping[str, Any], count: int, before: Sequence[int]) -> list[int]:
    """Returns the weight versions of `count` new tokens.

    A server's meta_info has spans of versions, or one version. Without either, the tokens get the
    version of the last token in `before`; if there is none, the list is empty.
    """
    spans = meta.get("weight_versions")
    if spans:
        versions = []
        for span in spans:
            length = span["end"] - span["start"]
            versions += [_version_number(span["version"])] * length
        return versions
    if "weight_version" in meta:
        name = meta["weight_version"]
    elif before:
        name = before[-1]
    else:
        name = None
    if name is None:
        return []
    return [_version_number(name)] * count


def _version_number(name: Any) -> int:
    """Returns a server's version as a number; 0 for a name such as SGLang's `default`."""
    if str(name).isdecimal():
        return int(name)
    return 0


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How responses are drawn."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token and reports log-probs at temperature 1."""
    top_p: float = 1.0
    """Nucleus probability; 1 means all tokens."""
    top_k: int = -1
    """Number of most likely tokens that can be sampled; -1 means all."""
    max_response_len: int
    max_context_len: int | None = None
    """Maximum tokens of prompt and response; unset means the model's limit."""
    n_samples: int = 1
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response besides the model's end-of-sequence tokens."""
    stop: tuple[str, ...] = ()
    """Texts that end a response, which includes them."""
    return_routed_experts: bool = False
    return_routing_weights: bool = False
    return_sampling_mask: bool = False
    """Whether to record the candidate tokens under top-p and top-k."""
    for_training: bool = False
    """Whether samples are trained on; then no request may change temperature, top-p or top-k."""

    @property
    def records_routing(self) -> bool:
        """Whether experts or their weights are recorded."""
        return self.return_routed_experts or self.return_routing_weights


def check_room(
    prompt: Prompt, sampling: Sampling, context_len: int | None, longest_prompt: int | None = None
) -> None:
    """Raises ValueError if a prompt leaves no tokens for a response."""
    length = len(prompt.token_ids)
    if length == 0:
        raise ValueError(
            f"prompt {prompt.index} has no tokens; a response needs at least one to follow."
        )
    limits = [math.inf, sampling.max_context_len, context_len]
    context = min(limit for limit in limits if limit is not None)
    if length >= context:
        bound = f"which leaves no tokens for a response in a context of {context}"
    elif longest_prompt is not None and length > longest_prompt:
        bound = f"but the servers take {longest_prompt} at most"
    else:
        return
    raise ValueError(
        f"prompt {prompt.index} has {length} tokens, {bound}; --rollout-max-prompt-len skips such"
        " prompts."
    )
