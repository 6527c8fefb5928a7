"""Continuous batching with transformers: requests join and leave the batch between decode steps.

Every sequence has a slot of the key/value cache. The slots of the batch are contiguous at the
front, so a decode step works on views. A request that ends moves its slot behind them. The slot's
tokens stay until its conversation continues, another request begins with the same tokens, or memory
is needed: then the least recently used slot is taken. If all slots are in use, the newest request
waits and is recomputed.

    waiting       has no slot
    prefilling    has a slot behind the batch; several tokens are not in the cache
    prefilled     all tokens are in the cache; requests with the same input share the next logits
    decoding      one token is not in the cache: every step feeds it and samples the next

The tokens of a request depend only on its input, its uniforms and the weights, not on the rest of
the batch.

Shapes: A decoding slots, B rows of a pass, T its columns, V vocabulary, suffix _T one value per fed
token.
"""

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import chain, count

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from slime_tis.trainer.data.sample import FinishReason, SamplingMask
from slime_tis.trainer.engines.function_requests import (
    Generation,
    Request,
    StopStrings,
    common_prefix,
    request_uniforms,
    response_text,
)
from slime_tis.trainer.engines.local.attention_masks import attention_masks
from slime_tis.trainer.engines.local.routing import RoutingRecorder
from slime_tis.trainer.engines.local.slot_cache import Slot, SlotCache, Window, Work
from slime_tis.trainer.engines.local.token_sampling import sample_tokens

BLOCK = 32
"""Least growth of slots, in tokens. Long slots grow by an eighth to a quarter, because growing
copies the cache."""
MIN_SHARED = 8
"""Shared tokens from which copying another slot is faster than computing."""
PREFILL_SHARE = 8
"""Requests are prefilled together once they are 1/8 of the batch, because each pass has a fixed
cost."""
PREFILL_WAIT = 8
"""Longest wait for a prefill, in decode steps."""
PREFILL_COLUMNS = 1024
"""Maximum tokens of a sequence in one pass; bounds the memory of attention masks."""
PREFILL_TOKENS = 8192
"""Maximum tokens of a pass, including padding."""
NARROW = 64
"""Columns up to which padding costs less than another pass."""
DRAWN_LOGITS = 400_000
"""Logits from which a CPU samples at once, 8 rows of a vocabulary of 49,152 tokens: their
probabilities stay in its cache. A small vocabulary needs one pass for the batch."""
MIN_DRAWN_ROWS = 2
"""Rows of logits from which a CPU samples at once with the largest vocabularies."""
SAFE_POINT_INTERVAL = 0.5
"""Seconds between two safe points while no request is in flight."""
LOOP_TURNS = 4
"""Turns of the event loop after an answer; the coroutine usually sends its next request within
them."""


@dataclass(eq=False, kw_only=True)
class ContinuousBatching:
    """Answers requests with one model, whose weights must not change meanwhile."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: frozenset[int]
    context_len: int | None
    weight_version: int
    records_routing: bool
    check_interrupts: Callable[[], None]
    vocabulary_part: int | None = None
    """See `sample_tokens`."""
    key_block: int = 1
    """Attention reads a multiple of this number of keys. Invariant attention then copies none."""
    cache_dtype: torch.dtype | None = None
    """Type of keys and values in the cache; None for the model's. Invariant attention computes in
    float32, and with a float32 cache it converts each key only once."""
    max_batch: int = 512
    max_batch_tokens: int = 131072
    """Maximum tokens of all slots, each as long as the longest; a single slot may exceed it."""

    def __post_init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Computed work; `reused` input tokens were in the cache, `preempted` requests lost their
        slot."""
        self._cache = SlotCache(self.model.config, self.model.device, self.cache_dtype)
        self._recorder = RoutingRecorder(self.model) if self.records_routing else None
        self._slots: list[Slot] = []
        self._decoding = 0
        """Number of decoding slots, at the front."""
        self._waiting: deque[Work] = deque()
        self._orders = count()
        self._stops: dict[tuple[str, ...], StopStrings] = {}
        self._arrived = asyncio.Event()
        self._failure: BaseException | None = None

    async def answer(self, request: Request) -> Generation:
        """Answers one request, which leaves the batch if its coroutine is cancelled.

        Raises the exception that ended `run`.
        """
        if self._failure is not None:
            raise self._failure
        work = self._add(request, request_uniforms(request.key))
        if work.generation is None:
            work.future = asyncio.get_running_loop().create_future()
            self._arrived.set()
            await work.future
        assert work.generation is not None
        return work.generation

    def answer_all(self, requests: Iterable[tuple[Request, Tensor]]) -> list[Generation]:
        """Answers requests without an event loop; every request comes with its uniforms."""
        works = [self._add(request, iter(uniforms.numpy())) for request, uniforms in requests]
        while self._is_busy:
            self.check_interrupts()
            self.step()
        return [work.generation for work in works if work.generation]

    def _add(self, request: Request, uniforms: Iterator[float]) -> Work:
        """Appends a request to the waiting ones, or answers it if no token has room."""
        sampling = request.options.sampling
        stop = request.options.stop
        limit = sampling.max_response_len
        for context_len in (sampling.max_context_len, self.context_len):
            if context_len is not None:
                limit = min(limit, context_len - len(request.token_ids))
        work = Work(
            request=request,
            order=next(self._orders),
            limit=limit,
            stop_token_ids=self.eos_token_ids | set(sampling.stop_token_ids),
            stop=self._stops.setdefault(stop, StopStrings(self.tokenizer, stop)),
            distribution=(sampling.temperature, sampling.top_p, sampling.top_k),
            uniforms=uniforms,
        )
        if work.limit < 1:
            work.generation = Generation(
                token_ids=[], log_probs=[], weight_versions=[], finish_reason="length", text=""
            )
        else:
            self._waiting.append(work)
        return work

    @property
    def _is_busy(self) -> bool:
        return bool(self._waiting) or any(slot.work for slot in self._slots)

    def end_sample(self, number: int) -> None:
        """Notes that a sample is complete: its conversations end."""
        for slot in self._slots:
            if slot.session is not None and slot.session[0] == number:
                slot.session = None

    async def run(self) -> None:
        """Answers requests until it is cancelled.

        An exception of the model or of `check_interrupts` ends all requests.
        """
        try:
            while True:
                self.check_interrupts()
                finished = self.step()
                # Coroutines run between steps, and longer after an answer.
                turns = LOOP_TURNS if finished else 1
                for _ in range(turns):
                    await asyncio.sleep(0)
                if not self._is_busy:
                    self._arrived.clear()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(SAFE_POINT_INTERVAL):
                            await self._arrived.wait()
        except Exception as error:
            self._failure = error
            running = [slot.work for slot in self._slots if slot.work]
            for work in chain(self._waiting, running):
                if work.future and not work.future.done():
                    work.future.set_exception(error)
            raise

    @torch.inference_mode()
    def step(self) -> bool:
        """Admits requests, prefills some, and samples a token for every decoding request.

        Returns:
            Whether a request was answered.
        """
        # A copy of the list, because `_leave` reorders the slots.
        for slot in list(self._slots):
            if slot.work and slot.work.is_cancelled:
                self._leave(slot)
        self._admit()
        if self._prefill():
            # Requests with the same input share its logits.
            self._admit()
        ready = [slot for slot in self._slots[self._decoding :] if slot.logits is not None]
        is_answered = False
        if ready:
            logits = [slot.logits for slot in ready if slot.logits is not None]
            is_answered = self._sample(ready, torch.stack(logits))
        for slot in self._slots[self._decoding :]:
            if len(slot.pending) == 1:
                self._swap(slot, self._decoding)
                self._decoding += 1
        if self._decoding:
            is_answered |= self._decode()
        return is_answered

    # Slots

    def _admit(self) -> None:
        """Gives slots to requests in order; a request waits while its prefix is being prefilled."""
        later: list[Work] = []
        running = [slot.work for slot in self._slots if slot.work]
        source: Slot | None = None
        shared = 0
        # The request whose prefix was searched last.
        shared_request: Request | None = None
        while self._waiting:
            work = self._waiting.popleft()
            if work.is_cancelled:
                continue
            tokens = work.known
            capacity = self._capacity_for(len(tokens), running)
            if capacity is None:
                later.append(work)
                break
            if work.request is not shared_request:
                source, shared = self._longest_prefix(work.request.session, tokens)
            if source is not None and shared > len(source.tokens):
                later.append(work)
                continue
            slot = self._slot_for(work, capacity, source, shared)
            slot.work = work
            slot.session = work.request.session
            work.pending = tokens[len(slot.tokens) :]
            work.waited = 0
            if not work.token_ids and len(work.pending) != 1:
                # The prompt's other samples share this slot, without a search.
                shared_request = work.request
                source = slot
                shared = len(tokens)
            running.append(work)
            self.counts["reused"] += len(slot.tokens)
        self._waiting.extendleft(reversed(later))

    def _longest_prefix(
        self, session: tuple[int, str | None], tokens: list[int]
    ) -> tuple[Slot | None, int]:
        """Finds the slot that will share the longest prefix once its prefill is done.

        Returns:
            The slot, and the number of shared tokens. The last token is shared only if the slot has
            the logits after it; otherwise it must be fed again to compute them.
        """
        most = len(tokens) - 1
        own = [slot for slot in self._slots if slot.session == session]
        for slot in chain(own, self._slots):
            if slot.logits is not None and slot.tokens == tokens:
                return slot, len(tokens)
        for slot in own:
            cached = len(slot.tokens)
            if slot.work is None and cached <= most and slot.tokens == tokens[:cached]:
                return slot, cached
        if self._cache.has_states:
            return self._complete_prefix(tokens)
        return self._partial_prefix(session, tokens)

    def _partial_prefix(
        self, session: tuple[int, str | None], tokens: list[int]
    ) -> tuple[Slot | None, int]:
        """Returns `_longest_prefix` among slots of which any number of tokens can be shared."""
        most = len(tokens) - 1
        own = [slot for slot in self._slots if slot.session == session]
        best: Slot | None = None
        longest = 0
        for slot in chain(own, self._slots):
            if longest == most:
                break
            least = longest + 1
            if slot.session != session:
                least = max(least, MIN_SHARED)
            if least > most or not slot.may_share(tokens, least):
                continue
            shared = min(common_prefix(tokens, slot.tokens + slot.pending), most)
            if shared >= least:
                best = slot
                longest = shared
        return best, longest

    def _complete_prefix(self, tokens: list[int]) -> tuple[Slot | None, int]:
        """Returns `_longest_prefix` among slots of which all tokens are shared or none.

        The states of a recurrence are those after the last token.
        """
        best: Slot | None = None
        longest = MIN_SHARED - 1
        for slot in self._slots:
            if len(slot.pending) > 1 and slot.tokens + slot.pending == tokens:
                return slot, len(tokens)
            cached = len(slot.tokens)
            if longest < cached < len(tokens) and slot.tokens == tokens[:cached]:
                best = slot
                longest = cached
        if best is None:
            return None, 0
        return best, longest

    def _slot_for(self, work: Work, capacity: int, source: Slot | None, shared: int) -> Slot:
        """Returns a slot that contains the shared tokens, after resizing slots to this capacity."""
        self._resize(capacity, keep=source)
        is_full = len(self._slots) == self._most_slots(capacity)
        idle: list[Slot] = []
        if is_full:
            idle = [slot for slot in self._slots if slot.work is None and slot is not source]
        if source is not None and source.work is None:
            # Takes the slot itself, unless its conversation may need the tokens after the shared
            # ones.
            ended = source.session in (None, work.request.session)
            if ended or shared == len(source.tokens) or (is_full and not idle):
                source.tokens = source.tokens[:shared]
                return source
        if is_full:
            slot = min(idle, key=lambda slot: slot.used)
        else:
            slot = Slot(index=len(self._slots), row=len(self._slots))
            self._slots.append(slot)
        slot.tokens = []
        if source is not None:
            slot.tokens = source.tokens[:shared]
            slot.row = source.row
            if shared == len(work.known):
                slot.logits = source.logits
        return slot

    def _capacity_for(self, length: int, running: Sequence[Work]) -> int | None:
        """The slot size that fits one more request, or None."""
        capacity = max(self._cache.capacity, self._whole_blocks(length))
        if len(running) >= self._most_slots(capacity):
            # Long sequences may have ended, so that smaller slots are enough.
            longest = max([len(work.known) for work in running], default=0)
            capacity = self._whole_blocks(max(length, longest))
        if len(running) >= self._most_slots(capacity):
            return None
        return capacity

    def _whole_blocks(self, length: int) -> int:
        """The slot size for sequences of up to `length` tokens, a multiple of `key_block`."""
        return round_up(whole_blocks(length), self.key_block)

    def _most_slots(self, capacity: int) -> int:
        return max(1, min(self.max_batch, self.max_batch_tokens // capacity))

    def _resize(self, capacity: int, keep: Slot | None = None) -> None:
        """Allocates slots of a capacity, and one slot more than there are.

        If that needs too much memory, the least recently used slots are freed, then the slots of
        the newest requests, which wait again.
        """
        most = self._most_slots(capacity)
        while len(self._slots) > most:
            idle = [slot for slot in self._slots if slot.work is None and slot is not keep]
            if idle:
                self._remove(min(idle, key=lambda slot: slot.used))
            else:
                newest = max(self._slots, key=lambda slot: slot.work.order if slot.work else -1)
                assert newest.work is not None
                self.counts["preempted"] += 1
                self._waiting.appendleft(newest.work)
                self._leave(newest)
                self._remove(newest)
        if capacity < self._cache.capacity:
            for slot in self._slots:
                # A state of fewer tokens is not known.
                kept = 0 if self._cache.has_states and len(slot.tokens) > capacity else capacity
                del slot.tokens[kept:]
        slots = self._cache.slots
        if len(self._slots) >= slots:
            wanted = len(self._slots) + len(self._waiting) + 1
            slots = max(wanted, slots + slots // 2)
        slots = min(slots, most)
        if (slots, capacity) != (self._cache.slots, self._cache.capacity):
            self._arrange()
            self._cache.resize(slots, capacity)

    def _arrange(self) -> None:
        """Moves sequences to the rows that belong to their slots, and copies shared prefixes."""
        moved = [slot for slot in self._slots if slot.row != slot.index]
        if moved:
            sources = [slot.row for slot in moved]
            targets = [slot.index for slot in moved]
            length = max(len(slot.tokens) for slot in moved)
            self._cache.move(sources, targets, length)
            for slot in moved:
                slot.row = slot.index

    def _leave(self, slot: Slot) -> None:
        """Ends or interrupts the request of a slot; the slot's tokens stay in the cache."""
        slot.work = None
        slot.logits = None
        slot.used = self.counts["steps"]
        if slot.index < self._decoding:
            self._decoding -= 1
            self._swap(slot, self._decoding)

    def _remove(self, slot: Slot) -> None:
        """Frees a slot."""
        self._swap(slot, len(self._slots) - 1)
        self._slots.pop()

    def _swap(self, slot: Slot, index: int) -> None:
        """Exchanges a slot with the slot at an index; the cache follows in `_arrange`."""
        other = self._slots[index]
        self._slots[slot.index] = other
        self._slots[index] = slot
        other.index = slot.index
        slot.index = index

    # Forward passes

    def _prefill(self) -> bool:
        """Feeds inputs once enough requests are ready or one has waited; returns whether it did."""
        slots = [slot for slot in self._slots[self._decoding :] if len(slot.pending) > 1]
        works = [slot.work for slot in slots if slot.work]
        are_few = len(works) * PREFILL_SHARE < self._decoding
        if are_few and all(work.waited < PREFILL_WAIT for work in works):
            for work in works:
                work.waited += 1
            return False
        for batch in self._prefill_batches(slots):
            fed = [slot.pending[:PREFILL_COLUMNS] for slot in batch]
            for index, slot in enumerate(batch, start=self._decoding):
                self._swap(slot, index)
            logits_BV = self._forward(self._decoding, fed)
            for slot, logits in zip(batch, logits_BV, strict=True):
                slot.logits = None if slot.pending else logits
            self.counts["passes"] += 1
            self.counts["prefilled"] += sum(map(len, fed))
        return bool(slots)

    def _prefill_batches(self, slots: Sequence[Slot]) -> Iterator[list[Slot]]:
        """Groups slots into prefill passes."""
        if not self._cache.has_states:
            yield from prefill_batches(slots)
            return
        # Padding on the left changes a state, unless it is that before the first token.
        groups: dict[int, list[Slot]] = defaultdict(list)
        for slot in slots:
            columns = min(len(slot.pending), PREFILL_COLUMNS) if slot.tokens else 0
            groups[columns].append(slot)
        for group in groups.values():
            yield from prefill_batches(group)

    def _decode(self) -> bool:
        """Feeds the last tokens and samples the next; returns whether a request was answered."""
        longest = max(len(slot.tokens) for slot in self._slots[: self._decoding]) + 1
        if longest > self._cache.capacity:
            self._resize(self._whole_blocks(longest))
        slots = self._slots[: self._decoding]
        logits_AV = self._forward(0, [slot.pending for slot in slots])
        self.counts["steps"] += 1
        self.counts["decoded"] += len(slots)
        return self._sample(slots, logits_AV)

    def _forward(self, first: int, fed: list[list[int]]) -> Tensor:
        """Feeds tokens to the slots from `first` on, padded on the left.

        Returns:
            Logits [B, V] after the last tokens.
        """
        self._arrange()
        slots = self._slots[first : first + len(fed)]
        self._cache.clear_states([slot.index for slot in slots if not slot.tokens])
        device = self.model.device
        columns = max(map(len, fed))
        padded = [[0] * (columns - len(tokens)) + tokens for tokens in fed]
        ids_BT = torch.tensor(padded, device=device)
        lengths = [len(slot.tokens) + len(tokens) for slot, tokens in zip(slots, fed, strict=True)]
        ends_B1 = torch.tensor(lengths, device=device)[:, None]
        positions_BT = ends_B1 - columns + torch.arange(columns, device=device)
        longest = max(lengths)
        window = Window(
            all_slots=self._cache.slots,
            capacity=self._cache.capacity,
            first=first,
            slots=len(fed),
            length=longest,
            keys=round_up(longest, self.key_block),
            columns=columns,
        )
        is_fed_BT: Tensor | None = None
        if min(lengths) == longest and min(map(len, fed)) == columns:
            # All rows have equal positions: one row of positions and of the mask is broadcast.
            positions_BT = positions_BT[:1]
        else:
            fed_B1 = torch.tensor([[len(tokens)] for tokens in fed], device=device)
            is_fed_BT = torch.arange(columns, 0, -1, device=device) <= fed_B1
            window.row_T, window.column_T = is_fed_BT.nonzero(as_tuple=True)
            # Padding has negative positions. It attends to the first token, because a row without
            # any allowed token gives NaN.
            positions_BT = positions_BT.clamp(min=0)
            window.position_T = positions_BT[window.row_T, window.column_T]
        self._cache.begin(window)
        config = self.model.config
        masks = attention_masks(config, positions_BT, window.keys, self.model.dtype, is_fed_BT)
        with self._recorder or nullcontext():
            output = self.model(
                input_ids=ids_BT,
                attention_mask=masks,
                position_ids=positions_BT,
                past_key_values=self._cache.states,
                use_cache=True,
                logits_to_keep=1,
            )
        if self._recorder is not None:
            self._cache.write_routing(self._recorder.take(len(fed)))
        for slot, tokens in zip(slots, fed, strict=True):
            assert slot.work is not None
            slot.tokens += tokens
            slot.work.pending = slot.work.pending[len(tokens) :]
        logits_BV: Tensor = output.logits[:, -1]
        return logits_BV

    def _sample(self, slots: Sequence[Slot], logits_AV: Tensor) -> bool:
        """Samples the next tokens of slots; returns whether a request was answered."""
        works = [slot.work for slot in slots if slot.work]
        rows_by_distribution: dict[tuple[float, float, int], list[int]] = defaultdict(list)
        for row, work in enumerate(works):
            rows_by_distribution[work.distribution].append(row)
        for distribution, rows in rows_by_distribution.items():
            logits = logits_AV
            if len(rows) < len(works):
                logits = logits_AV[torch.tensor(rows, device=logits_AV.device)]
            works_of_rows = [works[row] for row in rows]
            rows_at_once = len(rows)
            if logits.device.type == "cpu":
                rows_at_once = max(MIN_DRAWN_ROWS, DRAWN_LOGITS // logits.shape[-1])
            for start in range(0, len(rows), rows_at_once):
                part = slice(start, start + rows_at_once)
                self._draw(works_of_rows[part], logits[part], distribution)
        is_answered = False
        for slot, work in zip(slots, works, strict=True):
            slot.logits = None
            if work.token_ids[-1] in work.stop_token_ids or work.stop.found(work.token_ids):
                self._finish(slot, work, "stop")
                is_answered = True
            elif len(work.token_ids) == work.limit:
                self._finish(slot, work, "length")
                is_answered = True
        return is_answered

    def _draw(
        self, works: Sequence[Work], logits_BV: Tensor, distribution: tuple[float, float, int]
    ) -> None:
        """Draws one token per request, all with the same temperature, top-p and top-k."""
        temperature, top_p, top_k = distribution
        numbers = [next(work.uniforms) for work in works]
        # float64, so that the search in the cumulative sums is exact for large vocabularies.
        uniforms = torch.tensor(numbers, dtype=torch.float64)
        tokens, log_probs, drawn_from_BV = sample_tokens(
            logits_BV,
            uniforms.to(logits_BV.device),
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            vocabulary_part=self.vocabulary_part,
        )
        for work, token, log_prob in zip(works, tokens.tolist(), log_probs.tolist(), strict=True):
            work.pending = [token]
            work.token_ids.append(token)
            work.log_probs.append(log_prob)
        if any(work.request.options.sampling.return_sampling_mask for work in works):
            allowed_BV = drawn_from_BV > -torch.inf
            # An empty set stands for the complete vocabulary.
            allowed_BV &= ~allowed_BV.all(-1, keepdim=True)
            token_ids = allowed_BV.nonzero()[:, 1].to(torch.int32).cpu()
            sets = token_ids.split(allowed_BV.sum(-1).tolist())
            for work, allowed in zip(works, sets, strict=True):
                work.sets.append(allowed)

    def _finish(self, slot: Slot, work: Work, finish_reason: FinishReason) -> None:
        """Answers a request and frees its slot or keeps it for the conversation."""
        sampling = work.request.options.sampling
        experts = None
        weights = None
        if self._recorder:
            recorded_experts, recorded_weights = self._cache.routing(slot.row, len(slot.tokens))
            if sampling.return_routed_experts:
                experts = recorded_experts.cpu()
            if sampling.return_routing_weights:
                weights = recorded_weights.cpu()
        mask = None
        if sampling.return_sampling_mask:
            lengths = torch.tensor([len(allowed) for allowed in work.sets], dtype=torch.int32)
            mask = SamplingMask(torch.cat(work.sets), lengths)
        work.generation = Generation(
            token_ids=work.token_ids,
            log_probs=work.log_probs,
            weight_versions=[self.weight_version] * len(work.token_ids),
            workers=[0] * len(work.token_ids),
            finish_reason=finish_reason,
            text=response_text(self.tokenizer, work.token_ids, work.request.options, finish_reason),
            routed_experts=experts,
            routing_weights=weights,
            sampling_mask=mask,
        )
        self._leave(slot)
        if work.future:
            work.future.set_result(None)
        else:
            # A request of `answer_all` has no next turn.
            self._remove(slot)


def whole_blocks(length: int) -> int:
    """The slot size for sequences of up to `length` tokens."""
    block = BLOCK
    if length > 4:
        # The block is an eighth to a quarter of the length.
        block = max(BLOCK, 1 << length.bit_length() - 3)
    return round_up(length, block)


def round_up(number: int, multiple: int) -> int:
    """The least multiple that is not below a number."""
    return -(-number // multiple) * multiple


def prefill_batches(slots: Sequence[Slot]) -> Iterator[list[Slot]]:
    """Groups slots into prefill passes with little padding, longest inputs first."""
    batch: list[Slot] = []
    columns = 0
    for slot in sorted(slots, key=lambda slot: -len(slot.pending)):
        needed = min(len(slot.pending), PREFILL_COLUMNS)
        is_narrow = columns > max(NARROW, 4 * needed)
        if batch and (is_narrow or (len(batch) + 1) * columns > PREFILL_TOKENS):
            yield batch
            batch = []
        if not batch:
            columns = needed
        batch.append(slot)
    if batch:
        yield batch
