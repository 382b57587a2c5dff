"""Keeps an engine's batch full from a queue of requests, within a budget of memory."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch

from fastformer.generation.drafts import Drafter, DraftModel
from fastformer.generation.engines.base import Batch, Engine, Limits
from fastformer.generation.requests import Request, run_batch
from fastformer.requests import Batching, Load
from fastformer.settings import Positive, check_value

# The default limits of a scheduler's memory.
_CPU_BYTES, _CPU_ROWS, _GPU_ROWS = 512 * 2**20, 512, 1024

_PREFILL_TOKENS = 8192  # the most tokens in one prefill, because all of its activations are in memory together
_PIECE_TOKENS = 512  # the same between the steps of running requests, which wait meanwhile; a multiple of any block
_PIECE_SHARE = 0.25  # after a piece of a long prompt, the others run for this part of its time

# A batch that takes many steps in one call returns after this time, so that requests can arrive and be cancelled, and
# the user can interrupt; and after this number of steps, which is longer than any text.
_RUN_SECONDS = 0.01
_RUN_STEPS = 1_000_000
# A listener gets each of the first tokens separately, and later ones after each run of steps: a few milliseconds are
# not noticeable, and a step of a small model costs less than a call of the listener.
_FIRST_TOLD = 4


class Scheduler(Batching[Request]):
    """Admits requests as rows and memory become free, steps them together, and removes those that are done.

    A request's result doesn't depend on the other requests. A request is admitted if there is memory for the tokens
    that it is likely to get. If memory runs out all the same, the youngest request gives its memory back and restarts
    later.

    Memory is counted in tokens, as in the engines. Three numbers of tokens decide which requests are admitted:

    - the *capacity* of the batch, for which it was opened: it depends on the requests that were waiting then;
    - the *reserved* tokens: the sum of the tokens that the running requests are likely to use, which they get at first;
    - the *free* tokens, which the batch reports.

    Rows are counted by a request's peak: the most rows that its search ever has.

    If the engine reuses prefixes, a batch caches the prompts that it has read, in memory that nothing else needs.
    Requests that may begin alike, at once or one after another, should therefore share a scheduler. A long prompt is
    then read in pieces, between the steps of the other requests: each piece is a prompt that leaves at once, and the
    next one finds it in the cache. The request joins the batch with the last piece.

    Args:
        engine: opens the batches.
        max_rows: the most rows that are decoded together; one request may have more.
        max_bytes: the approximate memory of the batch; one request may use more.
        is_endless: open the first batch with all of the memory, because requests arrive while it runs; if False, with
            the memory for the requests that wait when the batch is empty.
        draft_model: drafts tokens for the requests; None: nothing does, except their own texts.

    Attributes:
        waiting: the requests that haven't begun, the next one first.
        waiting_tokens: the number of tokens in their sources and prompts.
        running: the requests of the batch, in the order of its groups.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_rows: int,
        max_bytes: int,
        is_endless: bool = False,
        draft_model: DraftModel | None = None,
    ) -> None:
        super().__init__()
        self.engine, self.max_rows, self.max_bytes, self.is_endless = engine, max_rows, max_bytes, is_endless
        self.max_tokens = max_bytes // engine.token_bytes if engine.token_bytes else max_bytes
        self._batch: Batch | None = None
        self._capacity_rows = self._capacity_tokens = 0
        self._free_at_first = self._free_tokens = 0  # in whole blocks: at first, and when they were last counted
        self._reserved_tokens = self._min_capacity = 0  # the latter: for the next batch, in tokens
        self.waiting_tokens = 0
        self._waiting_rows = self._running_rows = 0
        self._has_cancelled = self._has_deadlines = False  # whether requests may have to leave the queue
        self._read_tokens = self._cached_tokens = 0
        self._piece_seconds = 0.0  # the time that the latest piece of a prompt took, until others have run for it
        self._drafter = Drafter(engine, draft_model, max_rows, self.max_tokens)
        self._reuses_prefixes = engine.reuses_prefixes()

    def submit(self, requests: Iterable[Request]) -> None:
        """Appends requests to the queue."""
        for request in requests:
            self.waiting.append(request)
            self._waiting_rows += request.search.peak_rows
            self.waiting_tokens += request.num_tokens
            request.on_cancel = self._note_cancel
            self._has_cancelled = self._has_cancelled or request.is_cancelled
            self._has_deadlines = self._has_deadlines or request.deadline is not None

    def _note_cancel(self) -> None:
        self._has_cancelled = True

    def load(self) -> Load:
        """Returns the current counters; while requests run, the free memory is that before the latest step."""
        return Load(
            len(self.running), len(self.waiting), self.waiting_tokens, self._running_rows, self._free_tokens,
            self._free_at_first, self._read_tokens, self._cached_tokens, self._drafter.num_drafted,
            self._drafter.num_accepted,
        )  # fmt: skip

    def renewed(self) -> Scheduler:
        """Returns a new scheduler with the same limits. It doesn't query the free memory: the device may be lost."""
        return Scheduler(
            self.engine,
            max_rows=self.max_rows,
            max_bytes=self.max_bytes,
            is_endless=self.is_endless,
            draft_model=self._drafter.model,
        )

    @property
    def wants_more(self) -> bool:
        """True while the waiting requests have fewer rows than the next batch can hold."""
        return self._waiting_rows < self.max_rows

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Steps the batch: once, or until something ends, for some milliseconds at most.

        Returns:
            The requests that ended in this step: done, failed or cancelled.
        """
        ended = self._drop()
        self._admit()
        self._make_room()
        if not self.running:
            return ended
        is_first = any([request.on_token is not None and request.num_told < _FIRST_TOLD for request in self.running])
        min_rows = min(self._refill_below(), self._running_rows)
        may_draft = self._drafter.model is not None or any(
            [request.lookup is not None or request.search.matchers is not None for request in self.running]
        )
        seconds = self._drafter.run_seconds(self.running) if may_draft else _RUN_SECONDS
        seconds = max(seconds, _PIECE_SHARE * self._piece_seconds)
        self._piece_seconds = 0.0
        limits = Limits(1 if is_first else _RUN_STEPS, seconds, min_rows)
        left = self._remove(run_batch(self._open_batch, self.running, limits, self._drafter if may_draft else None))
        for request in reversed(left):
            if not request.is_done:  # its window is full: the model reads its last half again
                request.slide()
                self._requeue(request)
        return ended + [request for request in left if request.is_done]

    @property
    def _open_batch(self) -> Batch:
        assert self._batch is not None
        return self._batch

    def clear(self) -> None:
        """Drops all requests and the batch, which an error may have left in the middle of a step."""
        super().clear()
        self._batch = None
        self._drafter.clear()
        self._waiting_rows = self._running_rows = self._reserved_tokens = self.waiting_tokens = 0
        self._capacity_rows = self._capacity_tokens = self._free_at_first = self._free_tokens = 0

    def cancel_all(self) -> None:
        """Ends all requests without results. The batch stays, with its cached prompts."""
        for request in (*self.running, *self.waiting):
            request.cancel()
        self._drop()

    def _free(self, places: Sequence[int]) -> list[Request]:
        """Removes requests from the batch, and frees their groups."""
        if places:
            self._open_batch.free(places)
        return self._remove(places)

    def _remove(self, places: Sequence[int]) -> list[Request]:
        """Removes the requests at these places, whose groups the batch has freed, and returns them."""
        if not places:
            return []
        gone = [self.running[place] for place in places]
        for request in gone:
            self._running_rows -= request.search.peak_rows
            self._reserved_tokens -= request.reserved_tokens
        leaving = set(places)
        self.running = [request for place, request in enumerate(self.running) if place not in leaving]
        if not self.running:
            self._free_tokens = self._open_batch.free_tokens()
        return gone

    def _drop(self) -> list[Request]:
        """Removes requests that were cancelled, and those that have waited beyond their deadline."""
        if not self._has_cancelled and not self._has_deadlines:  # avoids a scan of the queue, which may be long
            return []
        self._has_cancelled = False  # before the scan: another thread may cancel during it
        now = time.monotonic()
        waiting = [request for request in self.waiting if request.is_cancelled or request.is_late(now)]
        if waiting:
            leaving = set(map(id, waiting))
            self.waiting = deque(request for request in self.waiting if id(request) not in leaving)
            self._waiting_rows -= sum(request.search.peak_rows for request in waiting)
            self.waiting_tokens -= sum(request.num_tokens for request in waiting)
        ended = waiting + self._free([place for place, request in enumerate(self.running) if request.is_cancelled])
        for request in ended:
            request.finish()
        if self._has_deadlines:
            left = itertools.chain(self.waiting, self.running)  # running requests may be queued again
            self._has_deadlines = any(request.deadline is not None for request in left)
        return ended

    def _admit(self) -> None:
        """Admits requests from the head of the queue, as far as rows and memory allow."""
        if not self.waiting:
            return
        if not self.running:
            self._open()
        elif self._running_rows >= self._refill_below():
            return
        reuses = self._reuses_prefixes
        most = left = _PIECE_TOKENS if self.running and reuses else _PREFILL_TOKENS
        while True:
            new, long = self._fitting(left, most if reuses else None)
            if not new:
                break
            read = self._read_tokens
            self._prefill(new)
            left -= self._read_tokens - read
            if not reuses or not self.waiting:
                return  # with reuse, requests that share a prefix with the admitted ones may fit as well
        if long is not None:
            self._read_piece(long)

    def _fitting(self, most_tokens: int, long_tokens: int | None) -> tuple[list[Request], Request | None]:
        """Returns the requests at the head of the queue for which there is room, and one to read in pieces, if any.

        Args:
            most_tokens: the most tokens that they may have to read together.
            long_tokens: a request with more tokens to read is read in pieces, and those behind it may begin before it;
                None: none is.
        """
        batch, long = self._open_batch, None
        idle_rows = self._usable_rows - self._running_rows
        reserved = self._reserved_tokens - batch.shared_tokens()
        tokens = min(self._capacity_tokens - reserved, batch.free_tokens())
        new: list[Request] = []
        for request in self.waiting:
            known = batch.known_prefix(request.prompt)
            rows = request.search.peak_rows
            request.reserved_tokens = self.engine.tokens_needed(request.prompt, rows, request.expected_tokens)
            needed, unread = request.reserved_tokens - known.held, request.num_tokens - known.cached
            # There is room for the first request of a batch, which was opened for it.
            if (self.running or new or long) and (needed > tokens or rows > idle_rows):
                break
            tokens, idle_rows = tokens - needed, idle_rows - rows
            if long_tokens is not None and unread > long_tokens and not (new or long):
                long = request
                continue
            most_tokens -= unread
            if (self.running or new or long) and most_tokens < 0:
                break
            new.append(request)
        return new, long

    def _read_piece(self, request: Request) -> None:
        """Reads the next piece of a long prompt into the cache."""
        batch, prompt, begin = self._open_batch, request.prompt, time.monotonic()
        end = batch.known_prefix(prompt).cached + _PIECE_TOKENS
        batch.prefill([prompt._replace(tokens=prompt.tokens[: end + 1])])
        batch.free([len(self.running)])
        request.begun_at = request.begun_at or begin
        request.piece_tokens += _PIECE_TOKENS
        self._read_tokens += _PIECE_TOKENS
        self._piece_seconds = time.monotonic() - begin

    def _prefill(self, new: list[Request]) -> None:
        """Prefills requests from the head of the queue, and then removes them from it, when no error is possible."""
        batch = self._open_batch
        cached = batch.prefill([request.prompt for request in new]) or [0] * len(new)
        if any(request.search.num_rows > 1 for request in new):
            stay = [list(range(request.search.num_rows)) for request in self.running]
            batch.fork([*stay, *([0] * request.search.num_rows for request in new)])
        self.running.extend(new)
        now = time.monotonic()
        for request, count in zip(new, cached, strict=True):
            request.begun_at = request.begun_at or now
            request.cached_tokens, request.piece_tokens = max(0, count - request.piece_tokens), 0
            self._cached_tokens += request.cached_tokens
            self._read_tokens += request.num_tokens - count
            self.waiting.remove(request)
            self._waiting_rows -= request.search.peak_rows
            self.waiting_tokens -= request.num_tokens
            self._running_rows += request.search.peak_rows
            self._reserved_tokens += request.reserved_tokens

    @property
    def _usable_rows(self) -> int:
        """The rows that requests may use: at most those that the batch was opened with."""
        return min(self.max_rows, self._capacity_rows)

    def _refill_below(self) -> int:
        """Returns the number of running rows below which others are admitted.

        Reading many sources at a time is faster, so a batch that is nearly full waits until a quarter of it is free.
        """
        rows = self._usable_rows
        return rows - min(rows // 4, self._waiting_rows) + 1 if self.waiting else 0

    def _largest_tokens(self, request: Request) -> int:
        return self.engine.tokens_needed(request.prompt, request.search.peak_rows, request.most_tokens)

    def _open(self) -> None:
        """Opens or enlarges an empty batch for all requests that wait, within the budget.

        The batch always has memory for the first request, whatever the budget. For a model that has changed its dtype
        or its layers, it is opened again.
        """
        first = self.waiting[0]
        rows, tokens = self.max_rows, self.max_tokens
        if not self.is_endless:
            rows, tokens = min(rows, self._waiting_rows), 0
            for request in self.waiting:
                tokens += self._largest_tokens(request)
                if tokens > self.max_tokens:
                    tokens = self.max_tokens
                    break
        rows = max(rows, first.search.peak_rows)
        tokens = max(tokens, self._largest_tokens(first), self._min_capacity)
        self._min_capacity = 0
        # A batch doesn't shrink, except that memory beyond the budget, for a single request, is given back.
        rows = max(rows, min(self._capacity_rows, self.max_rows))
        tokens = max(tokens, min(self._capacity_tokens, self.max_tokens))
        is_current = self._batch is not None and self._batch.is_current()
        if is_current and rows <= self._capacity_rows and self.max_tokens < tokens <= self._capacity_tokens:
            return  # another request beyond the budget; the batch is large enough for it
        if not is_current or (rows, tokens) != (self._capacity_rows, self._capacity_tokens):
            self._batch = None  # there may be no memory for two batches
            self._batch = self.engine.open(rows, tokens)
            self._free_at_first = self._free_tokens = self._batch.free_tokens()
            self._capacity_rows, self._capacity_tokens = rows, tokens

    def _make_room(self) -> None:
        """Requeues the youngest request as long as the next step needs more memory than is free."""
        while self.running:
            batch = self._open_batch
            needed, self._free_tokens = batch.step_tokens(), batch.free_tokens()
            if needed <= self._free_tokens:
                return
            youngest = self.running[-1]
            if len(self.running) == 1 and self._largest_tokens(youngest) <= self._capacity_tokens:
                # A group that loses rows and later grows to the same number again may need more than `tokens_needed`.
                self._min_capacity = 2 * self._capacity_tokens
            self._free([len(self.running) - 1])
            youngest.restart()
            self._requeue(youngest)
            if not self.running:  # it began in memory that it shared with others; now it gets memory of its own
                self._admit()

    def _requeue(self, request: Request) -> None:
        """Puts a request that has left the batch at the head of the queue."""
        self.waiting.appendleft(request)
        self._waiting_rows += request.search.peak_rows
        self.waiting_tokens += request.num_tokens


def check_sizes(max_rows: int | None, max_bytes: int | None) -> None:
    """Checks the limits of `new_scheduler`, which may be made long after a caller gave them.

    Raises:
        ValueError: a limit is not positive.
    """
    check_value("max_rows", max_rows, Positive | None)
    check_value("max_bytes", max_bytes, Positive | None)


def new_scheduler(
    engine: Engine,
    max_rows: int | None = None,
    max_bytes: int | None = None,
    *,
    is_endless: bool = False,
    draft_model: DraftModel | None = None,
) -> Scheduler:
    """Makes a scheduler with the default memory limits of the engine's device.

    Args:
        engine: the engine that decodes.
        max_rows: the most rows that are decoded together; None: 512 on a CPU, 1,024 on a GPU.
        max_bytes: the memory for caches; None: 512 MiB on a CPU, a quarter of the free memory on a GPU.
        is_endless, draft_model: see `Scheduler`.
    """
    is_gpu = engine.device.type == "cuda"
    if max_bytes is None:
        max_bytes = torch.cuda.mem_get_info(engine.device)[0] // 4 if is_gpu else _CPU_BYTES
    max_rows = max_rows or (_GPU_ROWS if is_gpu else _CPU_ROWS)
    return Scheduler(engine, max_rows=max_rows, max_bytes=max_bytes, is_endless=is_endless, draft_model=draft_model)


def run(scheduler: Scheduler, requests: Sequence[Request], before_step: Callable[[], object] | None = None) -> None:
    """Runs requests to their end.

    Args:
        scheduler: an idle scheduler, which is idle again afterwards.
        requests: the requests to run.
        before_step: called before each step.

    Raises:
        Exception: the first error of any request; the other requests are then cancelled.
    """
    scheduler.submit(requests)
    try:
        while not scheduler.is_idle:
            if before_step is not None:
                before_step()
            for request in scheduler.step():
                if request.error is not None:
                    scheduler.cancel_all()
                    raise request.error
    except BaseException:
        if not scheduler.is_idle:  # in the middle of a step
            scheduler.clear()
        raise
