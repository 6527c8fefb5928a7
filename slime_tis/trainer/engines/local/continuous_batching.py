"""Continuous batching with transformers: requests join and leave the running batch between decode steps.

Every sequence has a slot of the key/value cache. The slots of the batch lie next to each other at the front, so that a
decode step works on views. A request that ends moves its slot behind them, where its tokens stay until the same
conversation goes on, another request begins with the same tokens, or the memory is needed: then the slot that was used
least recently is taken, and where every slot is in use, the newest request waits and is computed again.

    waiting       no slot yet
    prefilling    a slot behind the batch; more than one of its tokens is not in the cache
    decoding      one token is not in the cache: every step feeds it, and samples the next

What a request samples follows from its input, its uniforms and the weights, whatever else is in the batch.

Shapes: A decoding slots, B rows of a pass, T its columns, V vocabulary, suffix _T one value per token that is fed.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import ModelOutput

from slime_tis.trainer.data.sample import FinishReason, Sampling
from slime_tis.trainer.data.sampling_mask import SamplingMask
from slime_tis.trainer.engines.generation import Generation, Request, StopStrings, request_uniforms, response_text
from slime_tis.trainer.engines.local.routing import RoutingRecorder
from slime_tis.trainer.engines.local.sampling import sample_tokens
from slime_tis.trainer.engines.local.slot_cache import SlotCache, Window

BLOCK = 64
"""Tokens that slots grow by: copying the cache then costs as much as one decode step in so many."""
MIN_SHARED = 8
"""Tokens that another slot must share to be copied from: fewer are computed as fast."""
PREFILL_SHARE = 8
"""Requests are prefilled together once they are one in so many of the batch: each pass has a cost of its own."""
PREFILL_WAIT = 8
"""Longest wait for that, in decode steps."""
PREFILL_COLUMNS = 1024
"""Most tokens of a sequence in one pass, which bounds the memory of attention masks."""
PREFILL_TOKENS = 8192
"""Most tokens of a pass, padding included."""
NARROW = 64
"""Columns of a pass whose padding costs less than another pass."""
SAFE_POINT_INTERVAL = 0.5
"""Longest time between two safe points while every function is busy elsewhere, in seconds."""
TURNS_OF_THE_LOOP = 4
"""Times that coroutines may go on after one of them has its answer: it asks again within a few."""


@dataclass(kw_only=True)
class Counts:
    """What a scheduler has computed."""

    steps: int = 0
    """Decode steps."""
    decoded: int = 0
    """Tokens that were fed in decode steps."""
    passes: int = 0
    """Forward passes for prefilling."""
    prefilled: int = 0
    """Tokens that were fed in them."""
    reused: int = 0
    """Tokens of inputs that were in the cache."""
    preempted: int = 0
    """Times that a request lost its slot to an older one."""


@dataclass(eq=False, kw_only=True)
class Work:
    """A request that is being answered."""

    request: Request
    order: int
    """Number of the request, in their order of arrival."""
    limit: int
    """Most tokens that it may sample."""
    stop_token_ids: frozenset[int]
    stop: StopStrings
    uniforms: Iterator[float]
    answer: asyncio.Future[Generation]
    pending: list[int] = field(default_factory=list)
    """Tokens that are not in the cache, at least one while it has a slot."""
    waited: int = 0
    """Decode steps since it could have been prefilled."""
    token_ids: list[int] = field(default_factory=list)
    """Sampled so far."""
    log_probs: list[float] = field(default_factory=list)
    sets: list[Tensor] = field(default_factory=list)
    """The tokens that could be sampled at each token, where they are recorded; empty for the whole vocabulary."""

    @property
    def known(self) -> list[int]:
        """The input and what has been sampled."""
        return self.request.token_ids + self.token_ids

    @property
    def sampling(self) -> Sampling:
        """How it is sampled."""
        return self.request.options.sampling


@dataclass(eq=False, kw_only=True)
class Slot:
    """A sequence in the cache."""

    place: int
    tokens: list[int] = field(default_factory=list)
    """Those whose keys and values are there."""
    session: tuple[int, str | None] | None = None
    """The conversation that may go on; None once its sample is made."""
    used: int = 0
    """The step in which it was used last."""
    work: Work | None = None
    """The request that it is of; None where it only stays for the next."""

    @property
    def cached_soon(self) -> list[int]:
        """The tokens that are in the cache once it is prefilled."""
        if self.work is None or len(self.work.pending) == 1:
            return self.tokens
        return self.tokens + self.work.pending[:-1]

    def may_share(self, tokens: Sequence[int], count: int) -> bool:
        """Whether it may share so many tokens: the last of them is the same."""
        last = count - 1
        if last < len(self.tokens):
            return self.tokens[last] == tokens[last]
        pending = () if self.work is None else self.work.pending
        return last < len(self.tokens) + len(pending) - 1 and pending[last - len(self.tokens)] == tokens[last]


class ContinuousBatching:
    """Answers requests of one asyncio loop with one model, whose weights stay the same meanwhile."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        eos_token_ids: Iterable[int],
        context_len: int | None,
        weight_version: int,
        records_routing: bool,
        max_batch: int,
        max_batch_tokens: int,
        check_interrupts: Callable[[], None],
    ) -> None:
        """Answers nothing yet.

        Args:
            model: In evaluation mode.
            tokenizer: Of the model.
            eos_token_ids: Tokens that end every response.
            context_len: Longest input and response together, in tokens; None where there is no limit.
            weight_version: Of the model.
            records_routing: Whether experts or their weights are recorded.
            max_batch: Most slots.
            max_batch_tokens: Most tokens of all slots, each as long as the longest; one slot has what it needs.
            check_interrupts: Called between decode steps; raises where sampling is to be given up.

        Raises:
            ValueError: The model cannot be batched so, or has no experts where routing is recorded.
        """
        self.counts = Counts()
        self._model, self._tokenizer, self._check_interrupts = model, tokenizer, check_interrupts
        self._eos_token_ids, self._context_len = frozenset(eos_token_ids), context_len
        self._weight_version, self._max_batch, self._max_tokens = weight_version, max_batch, max_batch_tokens
        self._cache = SlotCache(model.config)
        self._recorder = RoutingRecorder(model) if records_routing else None
        self._slots: list[Slot] = []
        self._decoding = 0
        """Number of slots at the front that decode."""
        self._waiting: deque[Work] = deque()
        self._orders = count()
        self._stops: dict[tuple[str, ...], StopStrings] = {}
        self._arrived = asyncio.Event()
        self._failure: BaseException | None = None

    async def answer(self, request: Request) -> Generation:
        """Answers one request; a cancelled one leaves the batch.

        Raises:
            Exception: What ended `run`.
        """
        if self._failure is not None:
            raise self._failure
        options = request.options
        lengths = (options.sampling.max_context_len, self._context_len)
        rests = [length - len(request.token_ids) for length in lengths if length is not None]
        limit = min([options.sampling.max_response_len, *rests])
        if limit < 1:
            return Generation(token_ids=[], log_probs=[], weight_versions=[], finish_reason="length", text="")
        work = Work(
            request=request,
            order=next(self._orders),
            limit=limit,
            stop_token_ids=self._eos_token_ids | set(options.sampling.stop_token_ids),
            stop=self._stops.setdefault(options.stop, StopStrings(self._tokenizer, options.stop)),
            uniforms=request_uniforms(request.key),
            answer=asyncio.get_running_loop().create_future(),
        )
        self._waiting.append(work)
        self._arrived.set()
        return await work.answer

    def end_sample(self, number: int) -> None:
        """Notes that a sample is made: its conversations do not go on."""
        for slot in self._slots:
            if slot.session is not None and slot.session[0] == number:
                slot.session = None

    async def run(self) -> None:
        """Answers requests until it is cancelled.

        Raises:
            Exception: What the model or the safe point raised; every request is answered by it.
        """
        try:
            while True:
                self._check_interrupts()
                finished = self.step()
                # Coroutines go on between steps, further ones after an answer.
                for _ in range(TURNS_OF_THE_LOOP if finished else 1):
                    await asyncio.sleep(0)
                if not self._waiting and not any(slot.work for slot in self._slots):
                    self._arrived.clear()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(SAFE_POINT_INTERVAL):
                            await self._arrived.wait()
        except Exception as error:
            self._failure = error
            for work in [*self._waiting, *(slot.work for slot in self._slots if slot.work)]:
                if not work.answer.done():
                    work.answer.set_exception(error)
            raise

    @torch.inference_mode()
    def step(self) -> bool:
        """Gives slots to waiting requests, prefills some, and samples one token of each that decodes.

        Returns:
            whether a request was answered.
        """
        self._drop_cancelled()
        self._admit()
        self._prefill()
        for slot in [slot for slot in self._slots[self._decoding :] if slot.work and len(slot.work.pending) == 1]:
            self._swap(slot, self._decoding)
            self._decoding += 1
        return self._decode() if self._decoding else False

    def _drop_cancelled(self) -> None:
        """Takes cancelled requests out of their slots; those that wait are left out once it is their turn."""
        for slot in [slot for slot in self._slots if slot.work and slot.work.answer.done()]:
            self._leave(slot)

    # Slots

    def _admit(self) -> None:
        """Gives slots to requests in their order; those whose prefix is being prefilled come after it."""
        later: list[Work] = []
        while self._waiting:
            work = self._waiting.popleft()
            if work.answer.done():
                continue
            tokens = work.known
            capacity = self._capacity_for(len(tokens))
            if capacity is None:
                later.append(work)
                break
            source, shared = self._longest_prefix(work.request.session, tokens)
            if source is not None and shared > len(source.tokens):
                later.append(work)
                continue
            slot = self._slot_for(work, capacity, source, shared)
            slot.work, slot.session = work, work.request.session
            work.pending, work.waited = tokens[len(slot.tokens) :], 0
            self.counts.reused += len(slot.tokens)
        self._waiting.extendleft(reversed(later))

    def _longest_prefix(self, session: tuple[int, str | None], tokens: list[int]) -> tuple[Slot | None, int]:
        """The slot that shares most tokens, once it is prefilled, and how many.

        The last token is left out: it is fed in any case, for the logits of the next one.
        """
        most = len(tokens) - 1
        for slot in self._slots:
            cached = len(slot.tokens)
            if slot.work is None and slot.session == session and cached <= most and slot.tokens == tokens[:cached]:
                return slot, cached
        best: tuple[Slot | None, int] = None, 0
        for slot in self._slots:
            least = best[1] + 1 if slot.session == session else max(best[1] + 1, MIN_SHARED)
            if least > most or not slot.may_share(tokens, least):
                continue
            shared = min(common_prefix(tokens, slot.cached_soon), most)
            if shared >= least:
                best = slot, shared
        return best

    def _slot_for(self, work: Work, capacity: int, source: Slot | None, shared: int) -> Slot:
        """A slot with the shared tokens, of slots of a size with which one more request fits in."""
        self._resize(capacity, keep=source)
        idle = [slot for slot in self._slots if slot.work is None and slot is not source]
        is_full = len(self._slots) == self._most_slots(capacity)
        if source is not None and source.work is None:
            ended = source.session in (None, work.request.session)
            if ended or shared == len(source.tokens) or (is_full and not idle):
                source.tokens = source.tokens[:shared]
                return source
        if is_full:
            slot = min(idle, key=lambda slot: slot.used)
        else:
            slot = Slot(place=len(self._slots))
            self._slots.append(slot)
        if source is not None:
            self._cache.copy(source.place, slot.place, shared)
        slot.tokens = [] if source is None else source.tokens[:shared]
        return slot

    def _capacity_for(self, length: int) -> int | None:
        """The size of slots with which one more request fits in; None where it does not."""
        running = [slot.work for slot in self._slots if slot.work]
        capacity = max(self._cache.capacity, whole_blocks(length))
        if len(running) >= self._most_slots(capacity):  # long sequences may have ended
            capacity = whole_blocks(max([length, *(len(work.known) for work in running)]))
        return capacity if len(running) < self._most_slots(capacity) else None

    def _most_slots(self, capacity: int) -> int:
        return max(1, min(self._max_batch, self._max_tokens // capacity))

    def _resize(self, capacity: int, keep: Slot | None = None) -> None:
        """Gives slots another size, and memory to one more of them.

        The least recently used ones make room, then those of the newest requests, which wait again.
        """
        most = self._most_slots(capacity)
        while len(self._slots) > most:
            idle = [slot for slot in self._slots if slot.work is None and slot is not keep]
            if idle:
                self._remove(min(idle, key=lambda slot: slot.used))
            else:
                self._preempt(
                    max(
                        (slot for slot in self._slots if slot.work),
                        key=lambda slot: slot.work.order if slot.work else -1,
                    )
                )
        for slot in self._slots:
            del slot.tokens[capacity:]
        slots, wanted = self._cache.slots, len(self._slots) + len(self._waiting) + 1
        if len(self._slots) >= slots:
            slots = max(wanted, slots + slots // 2)
        slots = min(slots, most)
        if (slots, capacity) != (self._cache.slots, self._cache.capacity):
            self._cache.resize(slots, capacity)

    def _preempt(self, slot: Slot) -> None:
        assert slot.work is not None
        self.counts.preempted += 1
        self._waiting.appendleft(slot.work)
        self._leave(slot)
        self._remove(slot)

    def _leave(self, slot: Slot) -> None:
        """Takes a slot out of the batch; its tokens stay."""
        slot.work, slot.used = None, self.counts.steps
        if slot.place < self._decoding:
            self._decoding -= 1
            self._swap(slot, self._decoding)

    def _remove(self, slot: Slot) -> None:
        self._swap(slot, len(self._slots) - 1)
        self._slots.pop()

    def _swap(self, slot: Slot, place: int) -> None:
        """Puts a slot into another place, and the one from there into its place."""
        other = self._slots[place]
        if other is slot:
            return
        self._cache.swap(slot.place, place, max(len(slot.tokens), len(other.tokens)))
        self._slots[slot.place], self._slots[place] = other, slot
        slot.place, other.place = place, slot.place

    # Forward passes

    def _prefill(self) -> None:
        """Feeds inputs, all but the last token of each, once enough requests are there or one has waited."""
        behind = self._slots[self._decoding :]
        works = [slot.work for slot in behind if slot.work and len(slot.work.pending) > 1]
        if len(works) * PREFILL_SHARE < self._decoding and all(work.waited < PREFILL_WAIT for work in works):
            for work in works:
                work.waited += 1
            return
        slots = [slot for slot in behind if slot.work and len(slot.work.pending) > 1]
        for batch in prefill_batches(slots):
            fed = [pending_of(slot)[:-1][:PREFILL_COLUMNS] for slot in batch]
            for place, slot in enumerate(batch, start=self._decoding):
                self._swap(slot, place)
            self._forward(self._decoding, fed, self._model.base_model)
            self.counts.passes += 1
            self.counts.prefilled += sum(map(len, fed))

    def _decode(self) -> bool:
        """Feeds the last token of each sequence of the batch and samples the next; whether a request was answered."""
        longest = max(len(slot.tokens) for slot in self._slots[: self._decoding]) + 1
        if longest > self._cache.capacity:
            self._resize(whole_blocks(longest))
        slots = self._slots[: self._decoding]
        logits_AV = self._forward(0, [pending_of(slot) for slot in slots], self._model).logits[:, -1]
        self.counts.steps += 1
        self.counts.decoded += len(slots)
        tokens, log_probs = self._sample([slot.work for slot in slots if slot.work], logits_AV)
        finished = False
        for slot, token, log_prob in zip(slots, tokens, log_probs, strict=True):
            work = slot.work
            assert work is not None
            work.pending = [token]
            work.token_ids.append(token)
            work.log_probs.append(log_prob)
            if token in work.stop_token_ids or work.stop.found(work.token_ids):
                self._finish(slot, work, "stop")
            elif len(work.token_ids) == work.limit:
                self._finish(slot, work, "length")
            finished = finished or slot.work is None
        return finished

    def _forward(self, first: int, fed: list[list[int]], model: Callable[..., ModelOutput]) -> ModelOutput:
        """Feeds tokens to the slots from the first on; what the model returns is aligned at the last column.

        The tokens of a row end in the last column, and follow those that its slot has.
        """
        slots, device = self._slots[first : first + len(fed)], self._model.device
        columns = max(map(len, fed))
        ids_BT = torch.tensor([[0] * (columns - len(tokens)) + tokens for tokens in fed], device=device)
        starts_B = torch.tensor(
            [len(slot.tokens) + len(tokens) - columns for slot, tokens in zip(slots, fed, strict=True)]
        )
        positions_BT = starts_B.to(device)[:, None] + torch.arange(columns, device=device)
        lengths = [len(slot.tokens) + len(tokens) for slot, tokens in zip(slots, fed, strict=True)]
        if columns == 1:
            row_T = torch.arange(len(fed), device=device)
            column_T = torch.zeros_like(row_T)
        else:
            padding_B = torch.tensor([columns - len(tokens) for tokens in fed], device=device)
            row_T, column_T = (torch.arange(columns, device=device) >= padding_B[:, None]).nonzero(as_tuple=True)
            positions_BT = positions_BT.clamp(min=0)  # of padding, which attends to the first token
        self._cache.window = Window(
            first=first,
            slots=len(fed),
            length=max(lengths),
            row_T=row_T,
            column_T=column_T,
            slot_T=row_T + first,
            position_T=positions_BT[row_T, column_T],
        )
        allowed = torch.arange(max(lengths), device=device) <= positions_BT[:, :, None]
        mask = torch.zeros(allowed.shape, dtype=self._model.dtype, device=device).masked_fill_(~allowed, -torch.inf)
        with self._recorder or nullcontext():
            output = model(
                input_ids=ids_BT,
                attention_mask=mask[:, None],
                position_ids=positions_BT,
                past_key_values=self._cache.states,
                use_cache=True,
                **({"logits_to_keep": 1} if model is self._model else {}),
            )
        if self._recorder is not None:
            self._cache.write_routing(self._recorder.take(len(fed)))
        for slot, tokens in zip(slots, fed, strict=True):
            assert slot.work is not None
            slot.tokens += tokens
            slot.work.pending = slot.work.pending[len(tokens) :]
        return output

    def _sample(self, works: Sequence[Work], logits_AV: Tensor) -> tuple[list[int], list[float]]:
        """Draws the next token of each sequence; requests that sample alike are drawn together."""
        alike: dict[tuple[float, float, int], list[int]] = defaultdict(list)
        for row, work in enumerate(works):
            alike[work.sampling.temperature, work.sampling.top_p, work.sampling.top_k].append(row)
        tokens, log_probs = [0] * len(works), [0.0] * len(works)
        for (temperature, top_p, top_k), rows in alike.items():
            logits = logits_AV if len(rows) == len(works) else logits_AV[torch.tensor(rows, device=logits_AV.device)]
            uniforms = torch.tensor([next(works[row].uniforms) for row in rows], dtype=torch.float64)
            drawn, drawn_log_probs, drawn_from_BV = sample_tokens(
                logits, uniforms.to(logits.device), temperature=temperature, top_p=top_p, top_k=top_k
            )
            for row, token, log_prob in zip(rows, drawn.tolist(), drawn_log_probs.tolist(), strict=True):
                tokens[row], log_probs[row] = token, log_prob
            self._record_sets([works[row] for row in rows], drawn_from_BV)
        return tokens, log_probs

    def _record_sets(self, works: Sequence[Work], drawn_from_BV: Tensor) -> None:
        """Notes the tokens that could be drawn; the whole vocabulary as none."""
        if not any(work.sampling.return_sampling_mask for work in works):
            return
        allowed_BV = drawn_from_BV > -torch.inf
        allowed_BV &= ~allowed_BV.all(-1, keepdim=True)
        sets = allowed_BV.nonzero()[:, 1].to(torch.int32).cpu().split(allowed_BV.sum(-1).tolist())
        for work, allowed in zip(works, sets, strict=True):
            work.sets.append(allowed)

    def _finish(self, slot: Slot, work: Work, finish_reason: FinishReason) -> None:
        """Answers a request, whose slot leaves the batch."""
        routing = None if self._recorder is None else self._cache.routing(slot.place, len(slot.tokens))
        sampling, mask = work.sampling, None
        if sampling.return_sampling_mask:
            lengths = torch.tensor([len(allowed) for allowed in work.sets], dtype=torch.int32)
            mask = SamplingMask(torch.cat(work.sets), lengths)
        work.answer.set_result(
            Generation(
                token_ids=work.token_ids,
                log_probs=work.log_probs,
                weight_versions=[self._weight_version] * len(work.token_ids),
                finish_reason=finish_reason,
                text=response_text(self._tokenizer, work.token_ids, work.request.options, finish_reason),
                routed_experts=routing.experts.cpu() if routing and sampling.return_routed_experts else None,
                routing_weights=routing.weights.cpu() if routing and sampling.return_routing_weights else None,
                sampling_mask=mask,
            )
        )
        self._leave(slot)


def common_prefix(one: list[int], other: list[int]) -> int:
    """Number of tokens that two sequences begin with alike."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return shorter
    return bisect_left(range(shorter), True, key=lambda length: one[: length + 1] != other[: length + 1])


def whole_blocks(length: int) -> int:
    """The size of slots for sequences of up to `length` tokens."""
    return -(-length // BLOCK) * BLOCK


def pending_of(slot: Slot) -> list[int]:
    """The tokens of a request in a slot that are not in the cache."""
    assert slot.work is not None
    return slot.work.pending


def prefill_batches(slots: Sequence[Slot]) -> Iterator[list[Slot]]:
    """Slots that are prefilled in one pass each, longest inputs first, without much padding."""
    batch: list[Slot] = []
    columns = 0
    for slot in sorted(slots, key=lambda slot: -len(pending_of(slot))):
        needed = min(len(pending_of(slot)) - 1, PREFILL_COLUMNS)
        is_narrow = columns > max(NARROW, 4 * needed)
        if batch and (is_narrow or (len(batch) + 1) * columns > PREFILL_TOKENS):
            yield batch
            batch = []
        columns = columns if batch else needed
        batch.append(slot)
    if batch:
        yield batch
