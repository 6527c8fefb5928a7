"""Continuous batching with transformers: requests join and leave the running batch between decode steps.

Every sequence has a slot of the key/value cache. The slots of the batch are contiguous at the front, so a decode step
works on views. A request that ends moves its slot behind them. The slot's tokens stay until its conversation continues,
another request begins with the same tokens, or memory is needed: then the least recently used slot is taken. If all
slots are in use, the newest request waits and is recomputed.

    waiting       has no slot
    prefilling    has a slot behind the batch; more than one token is not in the cache
    decoding      one token is not in the cache: every step feeds it and samples the next

The tokens of a request depend only on its input, its uniforms and the weights, not on the rest of the batch.

Shapes: A decoding slots, B rows of a pass, T its columns, V vocabulary, suffix _T one value per fed token.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from itertools import count

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import ModelOutput

from slime_tis.trainer.data.sample import FinishReason
from slime_tis.trainer.data.sampling_mask import SamplingMask
from slime_tis.trainer.engines.generation import Generation, Request, StopStrings, request_uniforms, response_text
from slime_tis.trainer.engines.local.routing import RoutingRecorder
from slime_tis.trainer.engines.local.sampling import sample_tokens
from slime_tis.trainer.engines.local.slot_cache import SlotCache, Window
from slime_tis.trainer.engines.local.slots import Counts, Slot, Work

BLOCK = 64
"""Tokens by which slots grow; copying the cache then costs about one of 64 decode steps."""
MIN_SHARED = 8
"""Shared tokens from which copying another slot is faster than computing."""
PREFILL_SHARE = 8
"""Requests are prefilled together once they are 1/8 of the batch, because each pass has a fixed cost."""
PREFILL_WAIT = 8
"""Longest wait for a prefill, in decode steps."""
PREFILL_COLUMNS = 1024
"""Maximum tokens of a sequence in one pass; bounds the memory of attention masks."""
PREFILL_TOKENS = 8192
"""Maximum tokens of a pass, including padding."""
NARROW = 64
"""Columns up to which padding costs less than another pass."""
SAFE_POINT_INTERVAL = 0.5
"""Seconds between two safe points while no request is in flight."""
LOOP_TURNS = 4
"""Turns of the event loop after an answer; the coroutine usually sends its next request within them."""


class ContinuousBatching:
    """Answers requests of one asyncio loop with one model; the weights must not change meanwhile."""

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
            context_len: Maximum tokens of input and response; None for no limit.
            weight_version: Version of the model's weights.
            records_routing: Whether to record experts or their weights.
            max_batch: Maximum number of slots.
            max_batch_tokens: Maximum tokens of all slots, each as long as the longest; a single slot may exceed it.
            check_interrupts: Called between decode steps; raises to end sampling.

        Raises:
            ValueError: The model's attention cannot use slots, or routing is recorded and the model has no experts.
        """
        self.counts = Counts()
        self._model, self._tokenizer, self._check_interrupts = model, tokenizer, check_interrupts
        self._eos_token_ids, self._context_len = frozenset(eos_token_ids), context_len
        self._weight_version, self._max_batch, self._max_tokens = weight_version, max_batch, max_batch_tokens
        self._cache = SlotCache(model.config)
        self._recorder = RoutingRecorder(model) if records_routing else None
        self._slots: list[Slot] = []
        self._decoding = 0
        """Number of decoding slots, at the front."""
        self._waiting: deque[Work] = deque()
        self._orders = count()
        self._stops: dict[tuple[str, ...], StopStrings] = {}
        self._arrived = asyncio.Event()
        self._failure: BaseException | None = None

    async def answer(self, request: Request) -> Generation:
        """Answers one request; raises the exception that ended `run`. A cancelled request leaves the batch."""
        if self._failure is not None:
            raise self._failure
        options = request.options
        lengths = (options.sampling.max_context_len, self._context_len)
        remaining = [length - len(request.token_ids) for length in lengths if length is not None]
        limit = min([options.sampling.max_response_len, *remaining])
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
        """Notes that a sample is complete: its conversations end."""
        for slot in self._slots:
            if slot.session is not None and slot.session[0] == number:
                slot.session = None

    async def run(self) -> None:
        """Answers requests until it is cancelled.

        Raises:
            Exception: From the model or the safe point; all requests raise it too.
        """
        try:
            while True:
                self._check_interrupts()
                finished = self.step()
                # let coroutines run between steps, longer after an answer
                for _ in range(LOOP_TURNS if finished else 1):
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
        """Admits waiting requests, prefills some, and samples one token of each decoding request.

        Returns:
            Whether a request was answered.
        """
        self._drop_cancelled()
        self._admit()
        self._prefill()
        for slot in [slot for slot in self._slots[self._decoding :] if slot.work and len(slot.work.pending) == 1]:
            self._swap(slot, self._decoding)
            self._decoding += 1
        return self._decode() if self._decoding else False

    def _drop_cancelled(self) -> None:
        """Removes cancelled requests from their slots; `_admit` skips cancelled waiting requests."""
        for slot in [slot for slot in self._slots if slot.work and slot.work.answer.done()]:
            self._leave(slot)

    # Slots

    def _admit(self) -> None:
        """Gives slots to requests in order; a request waits while its prefix is being prefilled."""
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
        """The slot that shares the longest prefix after its prefill, and the length of the prefix.

        The prefix excludes the last token, which must be fed for the next logits.
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
        """Returns a slot that contains the shared tokens, after resizing slots to this capacity."""
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
            slot = Slot(index=len(self._slots))
            self._slots.append(slot)
        if source is not None:
            self._cache.copy(source.index, slot.index, shared)
        slot.tokens = [] if source is None else source.tokens[:shared]
        return slot

    def _capacity_for(self, length: int) -> int | None:
        """The slot size that fits one more request, or None."""
        running = [slot.work for slot in self._slots if slot.work]
        capacity = max(self._cache.capacity, whole_blocks(length))
        if len(running) >= self._most_slots(capacity):  # long sequences may have ended
            capacity = whole_blocks(max([length, *(len(work.known) for work in running)]))
        return capacity if len(running) < self._most_slots(capacity) else None

    def _most_slots(self, capacity: int) -> int:
        return max(1, min(self._max_batch, self._max_tokens // capacity))

    def _resize(self, capacity: int, keep: Slot | None = None) -> None:
        """Resizes the slots and allocates one more.

        Frees the least recently used slots first, then slots of the newest requests, which wait again.
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
        """Moves a slot out of the batch; its tokens stay."""
        slot.work, slot.used = None, self.counts.steps
        if slot.index < self._decoding:
            self._decoding -= 1
            self._swap(slot, self._decoding)

    def _remove(self, slot: Slot) -> None:
        self._swap(slot, len(self._slots) - 1)
        self._slots.pop()

    def _swap(self, slot: Slot, index: int) -> None:
        other = self._slots[index]
        if other is slot:
            return
        self._cache.swap(slot.index, index, max(len(slot.tokens), len(other.tokens)))
        self._slots[slot.index], self._slots[index] = other, slot
        slot.index, other.index = index, slot.index

    # Forward passes

    def _prefill(self) -> None:
        """Feeds inputs without their last token, once enough requests are ready or one has waited."""
        behind = self._slots[self._decoding :]
        works = [slot.work for slot in behind if slot.work and len(slot.work.pending) > 1]
        if len(works) * PREFILL_SHARE < self._decoding and all(work.waited < PREFILL_WAIT for work in works):
            for work in works:
                work.waited += 1
            return
        slots = [slot for slot in behind if slot.work and len(slot.work.pending) > 1]
        for batch in prefill_batches(slots):
            fed = [pending_of(slot)[:-1][:PREFILL_COLUMNS] for slot in batch]
            for index, slot in enumerate(batch, start=self._decoding):
                self._swap(slot, index)
            self._forward(self._decoding, fed, self._model.base_model)
            self.counts.passes += 1
            self.counts.prefilled += sum(map(len, fed))

    def _decode(self) -> bool:
        """Feeds the last token of each sequence and samples the next; returns whether a request was answered."""
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
        """Feeds tokens to the slots from `first` on, padded on the left; they follow the tokens in each slot."""
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
        """Draws the next token of each sequence; requests with equal sampling share one call."""
        rows_by_sampling: dict[tuple[float, float, int], list[int]] = defaultdict(list)
        for row, work in enumerate(works):
            rows_by_sampling[work.sampling.temperature, work.sampling.top_p, work.sampling.top_k].append(row)
        tokens, log_probs = [0] * len(works), [0.0] * len(works)
        for (temperature, top_p, top_k), rows in rows_by_sampling.items():
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
        """Records the candidate tokens; an empty set means the whole vocabulary."""
        if not any(work.sampling.return_sampling_mask for work in works):
            return
        allowed_BV = drawn_from_BV > -torch.inf
        allowed_BV &= ~allowed_BV.all(-1, keepdim=True)
        sets = allowed_BV.nonzero()[:, 1].to(torch.int32).cpu().split(allowed_BV.sum(-1).tolist())
        for work, allowed in zip(works, sets, strict=True):
            work.sets.append(allowed)

    def _finish(self, slot: Slot, work: Work, finish_reason: FinishReason) -> None:
        """Answers a request and moves its slot out of the batch."""
        routing = None if self._recorder is None else self._cache.routing(slot.index, len(slot.tokens))
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


def common_prefix(first: list[int], second: list[int]) -> int:
    """Length of the common prefix of two sequences."""
    shorter = min(len(first), len(second))
    if first[:shorter] == second[:shorter]:
        return shorter
    return bisect_left(range(shorter), True, key=lambda length: first[: length + 1] != second[: length + 1])


def whole_blocks(length: int) -> int:
    """The slot size for sequences of up to `length` tokens."""
    return -(-length // BLOCK) * BLOCK


def pending_of(slot: Slot) -> list[int]:
    """The tokens of a slot's request that are not in the cache."""
    assert slot.work is not None
    return slot.work.pending


def prefill_batches(slots: Sequence[Slot]) -> Iterator[list[Slot]]:
    """Groups slots into prefill passes with little padding, longest inputs first."""
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
