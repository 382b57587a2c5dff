"""A request: one input, its search, its listener, and when it ends; and what a batch's step asks of its requests."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fastformer.generation.config import Processor
from fastformer.generation.engines.base import Candidates, Prompt, Sample, Selection
from fastformer.generation.native_search import NativeSearch, last_tokens, places_of_done
from fastformer.generation.processors import AtOneLength, RowWise
from fastformer.generation.search import Hypothesis, Search

_EXPECTED = 32  # new tokens that a request is given memory for when it begins, if its source isn't longer


class Request:
    """A request owns its input, its search and its listener; it shares nothing with its neighbours in a batch.

    Args:
        prompt: what it begins with.
        make_search: makes its search; when the request restarts, the same one again.
        processors: edit its logits, in this order.
        search_suffices: its search does what the processors would, where an engine runs it; but for each that is
            `AtOneLength`, at whose step they are called.
        keeps_scores: the outputs of the processors are its scores, without a log-softmax.
        log_probs: whether scores are wanted; without, log-probabilities aren't computed, and scores mean nothing.
        max_time: seconds after which it ends with what there is; None: no such end.
        on_token: called with each new token, of a request of one row.
        window: how many tokens the model sees at most, of a request of one row without a source: when it is full, the
            request goes on from its last half. None: it never is.
        before: what stands before the new tokens, where the prompt is only its end; None: the prompt.
        stop_strings: texts that end what is found, and are left out of its text.

    Attributes:
        results: what was found, best first; empty before the end.
        error: what went wrong with it, or None.
        is_done: whether it has ended, well or not.
        is_cancelled: set by `cancel`.
        on_cancel: called when it is cancelled; set by the scheduler that runs it.
        begun_at: the time of `time.monotonic` at which it left the queue for the first time; set by the scheduler.
        before: the ids that stand before the new ones.
        num_told: how many tokens on_token has received.
        cached_tokens: how many tokens of its prompt were not read when it began, because the batch had them.
    """

    def __init__(
        self,
        prompt: Prompt,
        make_search: Callable[[], Search],
        *,
        processors: Sequence[Processor] = (),
        search_suffices: bool = False,
        keeps_scores: bool = False,
        log_probs: bool = True,
        max_time: float | None = None,
        on_token: Callable[[int], object] | None = None,
        window: int | None = None,
        before: Sequence[int] | None = None,
        stop_strings: Sequence[str] = (),
    ) -> None:
        self.prompt, self.processors, self.log_probs, self.on_token = prompt, processors, log_probs, on_token
        self.search_suffices = search_suffices or not processors
        self._stops_at = [one.position for one in processors if isinstance(one, AtOneLength)]
        self.window, self.stop_strings = window, stop_strings
        self.before = prompt.tokens if before is None else before
        self._first_prompt, self._slid_at = prompt, 0
        self.keeps_scores = keeps_scores and bool(processors)
        self.deadline = None if max_time is None else time.monotonic() + max_time
        self.results: list[Hypothesis] = []
        self.error: Exception | None = None
        self.on_cancel: Callable[[], object] | None = None
        self.begun_at: float | None = None
        self.is_done = self.is_cancelled = False
        self._make_search = make_search
        self.num_told = self._steps = self._kept_steps = self.cached_tokens = 0
        self._kept: list[Hypothesis] = []  # the results at the restart
        self.search = make_search()
        if on_token is not None:
            self.listen(on_token)

    def listen(self, on_token: Callable[[int], object]) -> None:
        """Has each new token told, before it begins.

        Raises:
            ValueError: it has several rows.
        """
        if self.search.peak_rows != 1:
            raise ValueError("expected one row to stream: beams and samples can't be told token by token")
        self.on_token = on_token

    @property
    def num_tokens(self) -> int:
        """How many tokens of its source or prompt have to be read."""
        return self.prompt.num_tokens

    @property
    def num_new_tokens(self) -> int:
        """How many tokens were found, in all results."""
        return sum(len(found.tokens) for found in self.results)

    @property
    def num_rows(self) -> int:
        """The rows of the next step."""
        return self.search.num_rows

    @property
    def is_new(self) -> bool:
        """Whether it has yet to take its first step."""
        return self._steps == 0

    @property
    def expected_tokens(self) -> int:
        """How many new tokens it is likely to get, about."""
        return min(self.most_tokens, max(_EXPECTED, len(self.prompt.source or ())))

    @property
    def most_tokens(self) -> int:
        """How many new tokens it gets at most, or behind its prompt before its window is full."""
        if self.window is None:
            return self.search.limit
        return min(self.search.limit, max(1, self.window - len(self.prompt.tokens)))

    @property
    def is_full(self) -> bool:
        """Whether its window has no room for another token."""
        return self.window is not None and len(self.prompt.tokens) + self._steps - self._slid_at >= self.window

    def slide(self) -> None:
        """Goes on from the last half of a window that is full, as its new prompt."""
        tokens = [*self.before, *self.search.tokens(0)]
        self.prompt, self._slid_at = Prompt(None, window_end(tokens, self.window or 0)), self._steps

    def is_late(self, now: float) -> bool:
        """Whether its time is over."""
        return self.deadline is not None and now >= self.deadline

    def cancel(self) -> None:
        """Ends it before the next step, without results. Any thread may call this."""
        self.is_cancelled = True
        if self.on_cancel is not None:
            self.on_cancel()

    def next_tokens(self) -> list[int]:
        """What the engine is given for each row."""
        if self._steps:
            return self.search.last_tokens()
        return [self.prompt.tokens[-1]] * self.num_rows

    @property
    def length(self) -> int:
        """How many ids the decoder has behind it, in each row."""
        return len(self.before) + self._steps

    def steps_alone(self) -> int | None:
        """How many steps its search may take before its processors have to be called; None: all."""
        length = self.length
        return min((position - length for position in self._stops_at if position >= length), default=None)

    def history(self) -> list[list[int]]:
        """For each row the ids that the decoder has behind it, the prompt's included."""
        before = list(self.before)
        if not self._steps:
            return [before] * self.num_rows
        return [before + self.search.tokens(row) for row in range(self.num_rows)]

    def samples(self) -> list[Sample | None] | None:
        """For each row how its next token is sampled; None where no row is."""
        return self.search.samples()

    def advance(self, candidates: Candidates, first: int) -> list[int]:
        """Takes in a step; see `Search.advance`. An exception is kept in `error`, and ends the request."""
        if self.error is not None:  # of its processors
            return self.fail(self.error)
        self._steps += 1
        try:
            parents = self.search.advance(candidates.ids, candidates.values, first)
        except Exception as error:  # it ends this request alone
            return self.fail(error)
        return parents if self._goes_on(not parents) else []

    def take_steps(self, steps: int, error: Exception | None, is_done: bool) -> bool:
        """Takes in steps for which the engine has advanced its search.

        Args:
            steps: how many.
            error: what the search ended with, or None.
            is_done: whether the search is.

        Returns:
            Whether it goes on.
        """
        self._steps += steps
        if error is not None:
            self.fail(error)
            return False
        return self._goes_on(is_done)

    def _goes_on(self, is_done: bool) -> bool:
        """Passes on new tokens, and ends it when its search is done or its time is over. Whether it goes on."""
        if self.on_token is not None:
            try:
                # While it runs, its row holds the tokens; its results come at the end.
                if is_done:
                    new = self.search.results()[0].tokens[self.num_told :]
                elif self.num_told == self._steps - 1:  # the usual case, whose cost doesn't grow with the text
                    new = self.search.last_tokens()
                else:  # after a restart, on_token has received the first
                    new = self.search.tokens(0)[self.num_told :]
                for token in new:
                    self.num_told += 1
                    self.on_token(token)
            except Exception as error:  # as above
                self.fail(error)
                return False
        if is_done or (self.deadline is not None and self.is_late(time.monotonic())):
            self.finish()
            return False
        return True

    def finish(self) -> None:
        """Ends it with what there is."""
        self.is_done = True
        if not self.is_cancelled:
            # After a restart that ran out of time the longer attempt counts: on_token may have received its tokens.
            self.results = self.search.results() if self._steps >= self._kept_steps else self._kept

    def fail(self, error: Exception) -> list[int]:
        """Ends it with an error."""
        self.error, self.is_done = error, True
        return []

    def restart(self) -> None:
        """Restarts after an older request took its memory. Decoding is deterministic: the result is the same."""
        if self._steps > self._kept_steps:
            self._kept, self._kept_steps = self.search.results(), self._steps
        self.search, self._steps = self._make_search(), 0
        self.prompt, self._slid_at = self._first_prompt, 0


def window_end(tokens: Sequence[int], window: int) -> Sequence[int]:
    """What the model still sees of tokens that leave no room in its window: the last half of one."""
    return tokens[-max(1, window // 2) :] if len(tokens) >= window else tokens


class Running:
    """The requests of a batch's groups, as the batch sees them (`engines.base.Work`).

    Attributes:
        requests: in the order of the groups.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def next_tokens(self) -> list[int]:
        return [token for request in self.requests for token in request.next_tokens()]

    def wants_log_probs(self) -> bool:
        return any(request.log_probs for request in self.requests)

    def selection(self) -> Selection:
        logit_rows: list[int] = []
        samples: list[Sample | None] = []  # for each of them
        keeps: list[bool] = []  # likewise
        edited: list[tuple[Request, range]] = []  # which of them are a request's
        first, is_sampled = 0, False
        for request in self.requests:
            rows = range(first, first + request.num_rows)
            first = rows.stop
            own = request.samples()
            if own is None and not request.processors:
                continue
            if request.processors:
                edited.append((request, range(len(logit_rows), len(logit_rows) + len(rows))))
            is_sampled = is_sampled or own is not None
            logit_rows += rows
            samples += own if own is not None else [None] * len(rows)
            keeps += [request.keeps_scores] * len(rows)
        return Selection(
            num_candidates=max(request.search.num_candidates for request in self.requests),
            log_probs=self.wants_log_probs(),
            logit_rows=logit_rows,
            process=partial(_process, edited) if edited else None,
            samples=samples if is_sampled else None,
            keeps=keeps if any(keeps) else None,
        )

    def advance(self, candidates: Candidates) -> tuple[list[int], list[list[int]] | None]:
        """A request leaves the batch when it has ended or its window is full."""
        leaving: list[int] = []
        parents: list[list[int]] = []
        first, is_changed = 0, False
        for place, request in enumerate(self.requests):
            rows = request.num_rows
            kept = request.advance(candidates, first)
            first += rows
            if kept and not request.is_full:
                parents.append(kept)
                is_changed = is_changed or kept != list(range(rows))
            else:
                leaving.append(place)
        return leaving, parents if is_changed else None

    def steps_alone(self) -> int | None:
        """The fewest steps that one of the searches may take by itself; see `Request.steps_alone`."""
        counts = [count for request in self.requests if (count := request.steps_alone()) is not None]
        return min(counts, default=None)

    def native_searches(self) -> list[NativeSearch] | None:
        searches: list[NativeSearch] = []
        for request in self.requests:
            is_native = request.search_suffices and isinstance(request.search, NativeSearch)
            if not is_native or request.steps_alone() == 0:
                return None
            assert isinstance(request.search, NativeSearch)
            searches.append(request.search)
        return searches

    def native_tokens(self, searches: Sequence[NativeSearch]) -> list[int]:
        requests = self.requests
        begun = len(requests)
        while begun and requests[begun - 1].is_new:  # the new ones were admitted last
            begun -= 1
        tokens = last_tokens(searches[:begun])
        return tokens + [token for request in requests[begun:] for token in request.next_tokens()]

    def take_steps(self, searches: Sequence[NativeSearch], steps: Sequence[int]) -> list[int]:
        done = set(places_of_done(searches))
        leaving: list[int] = []
        for place, request in enumerate(self.requests):
            is_done = place in done
            if not request.take_steps(steps[place], searches[place].error if is_done else None, is_done):
                leaving.append(place)
        return leaving


def _process(edited: Iterable[tuple[Request, range]], logits: Tensor) -> Tensor:
    """Lets each request's processors edit the logits of its rows, in place."""
    for _, neighbours in itertools.groupby(edited, key=lambda pair: _kind(pair[0])):
        alike = list(neighbours)
        processors = alike[0][0].processors
        rows = [row for _, own in alike for row in own]  # rows that are sampled may stand between
        history = [row for request, _ in alike for row in request.history()]
        input_ids = torch.tensor(history, dtype=torch.long, device=logits.device)
        try:
            scores = logits[rows]
            for processor in processors:
                scores = _checked(processor(input_ids, scores), scores, processor)
            logits[rows] = scores
        except Exception as error:  # only this request fails: the others go on
            for request, _ in alike:
                request.error = error
    return logits


def _kind(request: Request) -> tuple[object, ...]:
    """Requests of one kind are processed together: they ask for the same and are of one length."""
    if all(isinstance(processor, RowWise) for processor in request.processors):
        return (request.length, *request.processors)
    return (id(request),)  # a function of the user's gets the rows of one request


def _checked(found: object, scores: Tensor, processor: object) -> Tensor:
    """What a processor gave, in the dtype of the scores.

    Raises:
        ValueError: it isn't one number for each score, on their device.
    """
    if isinstance(found, np.ndarray) and found.dtype.kind in "fiu":
        found = torch.as_tensor(np.ascontiguousarray(found), device=scores.device)
    name = getattr(processor, "__name__", type(processor).__name__)
    wanted = f"expected a processor to give scores of shape {tuple(scores.shape)}"
    if not isinstance(found, Tensor):
        raise ValueError(f"{wanted}, got {type(found).__name__} from {name}")
    if found.is_nested or found.layout != torch.strided or found.dtype == torch.bool or found.is_complex():
        kind = "a nested tensor" if found.is_nested else f"{found.dtype} of layout {found.layout}"
        raise ValueError(f"{wanted} as dense numbers, got {kind} from {name}")
    if found.shape != scores.shape:
        raise ValueError(f"{wanted}, got {tuple(found.shape)} from {name}")
    if found.device != scores.device:
        raise ValueError(f"{wanted} on {scores.device}, got scores on {found.device} from {name}")
    return found.to(scores.dtype)
