"""The data of a rollout: prompts in, sampled responses out, and how to sample them."""

from __future__ import annotations

import copy
import json
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
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
        found = super().__getitem__(index)
        return Numbers(self.typecode, found) if isinstance(index, slice) else found

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(
            index, array(self.typecode, value) if isinstance(index, slice) else value
        )

    def __add__(self, other: Any) -> Any:
        is_same = isinstance(other, Numbers) and other.typecode == self.typecode
        return Numbers(self.typecode, super().__add__(other)) if is_same else [*self, *other]

    def __radd__(self, other: list[Any]) -> list[Any]:
        return [*other, *self]

    def __iadd__(self, other: Iterable[Any]) -> Numbers:  # type: ignore[misc]
        self.extend(other)
        return self

    def __eq__(self, other: object) -> bool:
        return self.tolist() == other if isinstance(other, list) else super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None

    copy = array.tolist

    def __copy__(self) -> Numbers:
        return self[:]  # type: ignore[no-any-return]

    def __deepcopy__(self, _: object) -> Numbers:
        return self[:]  # type: ignore[no-any-return]


Ints: TypeAlias = list[int] | Numbers
Floats: TypeAlias = list[float] | Numbers


@dataclass(frozen=True, eq=False)
class SamplingMask:
    """The tokens that truncated sampling (top-p, top-k) could draw at each position, in compressed sparse rows (CSR).

    Position i has the set token_ids[s : s + lengths[i]] with s = Σ_{j<i} lengths[j]. A length of 0
    means the whole vocabulary: nothing was cut, no set was recorded, or the token is not the
    policy's.

    Shapes: suffix _M one value per token of the sets, one position after another.
    """

    token_ids: Tensor
    """[M] int32, the sets of all positions one after another."""
    lengths: Tensor
    """[positions] int32, the tokens of each position's set."""

    def __len__(self) -> int:
        return len(self.lengths)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SamplingMask):
            return NotImplemented
        return torch.equal(self.token_ids, other.token_ids) and torch.equal(
            self.lengths, other.lengths
        )

    __hash__ = None  # type: ignore[assignment]  # tensors compare by value and can be changed

    @classmethod
    def from_sets(cls, sets: Sequence[Sequence[int]]) -> SamplingMask:
        """The mask of sets given as lists of token ids, an empty one for a position without a recorded set."""
        ids = [token for allowed in sets for token in allowed]
        return cls(
            torch.tensor(ids, dtype=torch.int32),
            torch.tensor([len(allowed) for allowed in sets], dtype=torch.int32),
        )

    @classmethod
    def unrecorded(cls, positions: int) -> SamplingMask:
        """Returns a mask of `count` positions without a recorded set."""
        return cls(torch.zeros(0, dtype=torch.int32), torch.zeros(positions, dtype=torch.int32))

    @classmethod
    def cat(cls, masks: Sequence[SamplingMask]) -> SamplingMask:
        """The positions of several masks, one after another."""
        if not masks:
            return cls.unrecorded(0)
        return cls(
            torch.cat([mask.token_ids for mask in masks]),
            torch.cat([mask.lengths for mask in masks]),
        )

    def sets(self) -> list[list[int]]:
        """The token ids of each position."""
        return [ids.tolist() for ids in self.token_ids.split(self.lengths.tolist())]

    def position_of_token(self) -> Tensor:
        """[M] int64: the position that each token id belongs to; nothing synchronises with the host."""
        positions = torch.arange(len(self), device=self.lengths.device)
        return positions.repeat_interleave(self.lengths, output_size=len(self.token_ids))

    def select(self, positions: Tensor) -> SamplingMask:
        """The sets at the given positions [int64], in that order."""
        starts = self.lengths.cumsum(0) - self.lengths
        lengths = self.lengths[positions]
        shift = starts[positions] - (lengths.cumsum(0) - lengths)
        index_M = torch.arange(int(lengths.sum()), device=lengths.device) + shift.repeat_interleave(
            lengths
        )
        return SamplingMask(self.token_ids[index_M], lengths)

    def split(self, positions: Sequence[int]) -> list[SamplingMask]:
        """Splits the mask by numbers of positions, into separate memory: a pickled view contains the whole tensor."""
        lengths = self.lengths.split(list(positions))
        token_ids = self.token_ids.split([int(part.sum()) for part in lengths])
        return [
            SamplingMask(ids.clone(), part.clone())
            for ids, part in zip(token_ids, lengths, strict=True)
        ]

    def contains(self, token_ids: Tensor) -> Tensor:
        """Whether each position's set has the token given for it, bool [positions]; True where no set was recorded."""
        position_M = self.position_of_token()
        found_M = self.token_ids == token_ids[position_M]
        found = torch.zeros(len(self), dtype=torch.int64, device=self.lengths.device)
        return (found.index_add_(0, position_M, found_M.long()) > 0) | (self.lengths == 0)

    def without(self, forgotten: Tensor) -> SamplingMask:
        """The same positions, without the sets of those where `forgotten` [positions] is True."""
        stays_M = ~forgotten[self.position_of_token()]
        return SamplingMask(self.token_ids[stays_M], self.lengths.masked_fill(forgotten, 0))

    def to(self, device: torch.device | str) -> SamplingMask:
        """The same sets on another device."""
        return SamplingMask(
            self.token_ids.to(device, non_blocking=True), self.lengths.to(device, non_blocking=True)
        )


class SampleStatus(Enum):
    """What became of a sample, under slime's names."""

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
    """Anything else that the row hands to the reward: its other columns, and its mapping of
    metadata."""


@dataclass
class Sample:
    """One response to a prompt. Engines and generate functions fill it, rewards score it, and training reads it.

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
    """Log-prob of each response token in the distribution that it was sampled from; NaN if missing,
    any number where the loss mask is 0. None before there is a response."""
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
    """float32 of the same shape: the combine weight of each expert."""
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
            self.label = copy.deepcopy(self.prompt_row.label) if self.label is None else self.label
            self.metadata = self.metadata or copy.deepcopy(self.prompt_row.metadata)

    def compact(self) -> Sample:
        """Replaces lists with a number for each token, and returns the sample."""
        for name, code in NUMBER_TYPES.items():
            if not isinstance(values := getattr(self, name), Numbers):
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
        return -1 if self.prompt_row is None else self.prompt_row.index

    @property
    def prompt_ids(self) -> Ints:
        """Tokens before the response."""
        return self.tokens[: len(self.tokens) - self.response_length]

    @property
    def response_ids(self) -> Ints:
        """Tokens of the response."""
        return self.tokens[len(self.tokens) - self.response_length :]

    @property
    def prompt_text(self) -> str:
        """The prompt as one text."""
        return (
            self.prompt
            if isinstance(self.prompt, str)
            else json.dumps(self.prompt, ensure_ascii=False)
        )

    @property
    def effective_response_length(self) -> int:
        """Tokens of the response that are trained on."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    @property
    def turns(self) -> int:
        """Runs of tokens that are trained on."""
        return sum(now > before for before, now in pairwise([0, *self.loss_mask]))

    @property
    def trained_versions(self) -> list[int]:
        """Versions of the weights that sampled the tokens that are trained on."""
        return [
            version
            for version, trained in zip(self.weight_versions, self.loss_mask, strict=True)
            if trained
        ]

    @property
    def worker_of_each(self) -> Ints:
        """`rollout_workers`; -1 for all tokens if a function did not keep one per token."""
        workers, length = self.rollout_workers, self.response_length
        return workers if len(workers) == length else [-1] * length

    @property
    def rollout_top_p_token_ids(self) -> Tensor | None:
        """The tokens of `sampling_mask`, of one response token after another."""
        return None if self.sampling_mask is None else self.sampling_mask.token_ids

    @rollout_top_p_token_ids.setter
    def rollout_top_p_token_ids(self, token_ids: Sequence[int] | Tensor | None) -> None:
        lengths = (
            SamplingMask.unrecorded(0).lengths
            if self.sampling_mask is None
            else self.sampling_mask.lengths
        )
        self.sampling_mask = None if token_ids is None else SamplingMask(_int32(token_ids), lengths)

    @property
    def rollout_top_p_token_offsets(self) -> Tensor | None:
        """Where the tokens of each response token begin in them, and where the last ones end."""
        if self.sampling_mask is None:
            return None
        return torch.nn.functional.pad(self.sampling_mask.lengths.cumsum(0), (1, 0))

    @rollout_top_p_token_offsets.setter
    def rollout_top_p_token_offsets(self, offsets: Sequence[int] | Tensor | None) -> None:
        ids = (
            SamplingMask.unrecorded(0).token_ids
            if self.sampling_mask is None
            else self.sampling_mask.token_ids
        )
        self.sampling_mask = None if offsets is None else SamplingMask(ids, _int32(offsets).diff())

    def get_reward_value(self, args: Any) -> float | None:
        """The reward as a number, by `args.reward_key` where it is a dict."""
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
        """Appends tokens to the response, with their entries of loss mask, log-probs and versions."""
        ids, meta = _listed(tokens, int), meta_info or {}
        values = None if log_probs is None else _listed(log_probs, float)
        if trainable and ids and values is None:
            raise ValueError(
                "tokens that are trained on need the log-probs that they were sampled with."
            )
        if not trainable and values:
            raise ValueError(
                "tokens with trainable=False are not the policy's, and have no log-probs."
            )
        values = [0.0] * len(ids) if values is None else values
        before = self.response_length
        mask = [1] * before if self.loss_mask is None else self.loss_mask
        earlier = self.rollout_log_probs
        if earlier is None:
            earlier = [math.nan if trained else 0.0 for trained in mask]
        self.tokens = [*self.tokens, *ids]
        self.response_length += len(ids)
        self.loss_mask = [*mask, *[int(trainable)] * len(ids)]
        self.rollout_log_probs = [*earlier, *values]
        if (
            len(self.weight_versions) == before
        ):  # else the program knows what its own engine sampled
            self.weight_versions = [
                *self.weight_versions,
                *_versions(meta, len(ids), self.weight_versions),
            ]
        sets = meta.get("output_token_sampling_mask")
        if sets is not None or self.sampling_mask is not None:
            known = (
                SamplingMask.unrecorded(before)
                if self.sampling_mask is None
                else self.sampling_mask
            )
            added = (
                SamplingMask.unrecorded(len(ids)) if sets is None else SamplingMask.from_sets(sets)
            )
            self.sampling_mask = SamplingMask.cat([known, added])
        self.response += text or ""
        if update_terminal_info and "finish_reason" in meta:
            self.status = STATUS.get(meta["finish_reason"]["type"], self.status)


def by_rollout(samples: Iterable[Sample]) -> list[list[Sample]]:
    """Groups adjacent samples that are segments of one rollout."""
    rollouts: list[list[Sample]] = []
    for sample in samples:
        if (
            rollouts
            and sample.rollout_id is not None
            and rollouts[-1][0].rollout_id == sample.rollout_id
        ):
            rollouts[-1].append(sample)
        else:
            rollouts.append([sample])
    return rollouts


def _listed(values: Any, kind: type[T]) -> list[T]:
    if values is None:
        return []
    return [
        kind(value)
        for value in (values.flatten().tolist() if isinstance(values, Tensor) else values)
    ]


def _int32(values: Sequence[int] | Tensor) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32).reshape(-1)


def _versions(meta: Mapping[str, Any], count: int, before: Sequence[int]) -> list[int]:
    """Returns the version of each token from a server's meta_info, or else the version of the token before them."""

    def number(name: Any) -> int:
        return int(name) if str(name).isdecimal() else 0

    spans = meta.get("weight_versions")
    if spans:
        return [
            number(span["version"]) for span in spans for _ in range(span["start"], span["end"])
        ]
    name = meta.get("weight_version", before[-1] if before else None)
    return [] if name is None else [number(name)] * count


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
    context = min(
        (limit for limit in (sampling.max_context_len, context_len) if limit is not None),
        default=math.inf,
    )
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
