"""`Request`: one input with its search, its listener and its limits; and the steps that a batch of requests takes.

In a step the model reads the next tokens of the requests, whose searches choose from what it computes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fastformer.extension import extension_module
from fastformer.generation.config import Processor
from fastformer.generation.constraints import Mask, allowed_tokens
from fastformer.generation.drafts import Drafter, PromptLookup
from fastformer.generation.engines.base import (
    Batch,
    Candidates,
    DraftingBatch,
    Limits,
    Prompt,
    SearchingBatch,
    Selection,
)
from fastformer.generation.native_search import NativeSearch
from fastformer.generation.processors import AtOneLength, ForcedToken, RowWise
from fastformer.generation.search import Hypothesis, Sample, Search
from fastformer.requests import BaseRequest

_EXPECTED = 32  # new tokens that a beginning request gets memory for, unless its source is longer


class Request(BaseRequest):
    """One input with its own search and listener. It shares nothing with the other requests of a batch.

    Args:
        prompt: the ids that the request begins with.
        make_search: makes the search; each call makes the same search, so that the request can restart.
        processors: edit the logits, in this order.
        search_suffices: whether the search, if an engine runs it, does the same as the processors, except at the steps
            of an `AtOneLength`, at which they are called.
        keeps_scores: the outputs of the processors are the scores, without a log-softmax.
        log_probs: whether scores are needed; if not, log-probabilities aren't computed, and scores are undefined.
        max_time: seconds after which the request ends with the results so far; None: no limit.
        on_token: called with each new token of a request with one row.
        window: for a request with one row and no source, the most tokens that the model sees: when the window is full,
            the request continues from its last half. None: no window.
        before: the ids before the new tokens, if the prompt is only their end; None: the prompt.
        stop_strings: texts that end a result, and are omitted from its text.
        num_lookup_tokens: the most tokens to draft from the request's own text; 0: none. See `drafts.PromptLookup`.
        lookup_text: tokens from which they are drafted as well, such as a source that the text may copy.

    Attributes:
        results: the hypotheses found, best first; empty before the end.
        before: the ids before the new tokens.
        steps: the number of steps that the search has taken.
        num_told: the number of tokens that on_token has received.
        stops_at: the lengths at which its processors act although the search suffices.
        cached_tokens: the number of prompt tokens that were not read when the request began, because the batch had them
            in its cache.
        piece_tokens: the number of tokens of its prompt that the scheduler has read before the request began.
        reserved_tokens: the tokens of memory that the scheduler has reserved for the request.
        lookup: drafts from the request's own text; None: nothing is drafted from it.
        num_drafted, num_accepted: the number of tokens that were drafted for the request, and of those accepted.
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
        num_lookup_tokens: int = 0,
        lookup_text: Sequence[int] = (),
    ) -> None:
        super().__init__(max_time)
        self.prompt, self.num_tokens = prompt, prompt.num_tokens
        self.processors, self.log_probs, self.on_token = processors, log_probs, on_token
        self.search_suffices = search_suffices or not processors
        self.window, self.stop_strings = window, stop_strings
        self.before = prompt.tokens if before is None else before
        self.stops_at = [one.position for one in processors if isinstance(one, AtOneLength)] if processors else []
        self._first_prompt, self._slid_at = prompt, 0
        self.keeps_scores = keeps_scores and bool(processors)
        self.results: list[Hypothesis] = []
        self._make_search = make_search
        self.num_told = self.steps = self._kept_steps = self.cached_tokens = self.piece_tokens = 0
        self.reserved_tokens = 0
        self._kept: list[Hypothesis] = []  # the results at the restart
        self.search = make_search()
        self._num_lookup_tokens, self._lookup_text = num_lookup_tokens, lookup_text
        self.lookup = self._new_lookup() if num_lookup_tokens else None
        self.num_drafted = self.num_accepted = 0
        last = processors[-1] if processors else None
        self._last_token: int | None = None  # the id that a processor forces before the limit
        if isinstance(last, ForcedToken) and last.position == len(self.before) + self.search.limit - 1:
            self._last_token = last.token
        if on_token is not None:
            self.listen(on_token)

    def listen(self, on_token: Callable[[int], object]) -> None:
        if self.search.peak_rows != 1:
            raise ValueError("expected one row to stream: beams and samples can't be told token by token")
        self.on_token = on_token

    @property
    def num_new_tokens(self) -> int:
        return sum(len(result.tokens) for result in self.results)

    @property
    def expected_tokens(self) -> int:
        """The approximate number of new tokens that the request is likely to get."""
        return min(self.most_tokens, max(_EXPECTED, len(self.prompt.source or ())))

    @property
    def most_tokens(self) -> int:
        """The most new tokens that the request can get or, with a window, that fit in the window after its prompt."""
        if self.window is None:
            return self.search.limit
        return min(self.search.limit, max(1, self.window - len(self.prompt.tokens)))

    @property
    def most_drafts(self) -> int:
        """The most tokens that may be read after the next one; 0 if the search may have several rows."""
        if self.search.peak_rows != 1:
            return 0
        left = self.search.limit - self.steps
        if self.window is not None:
            left = min(left, self.window - len(self.prompt.tokens) - self.steps + self._slid_at)
        return max(0, left - 1)

    def _new_lookup(self) -> PromptLookup | None:
        most = self._num_lookup_tokens
        return PromptLookup(most, [*self._lookup_text, *self.before]) if most else None

    @property
    def is_full(self) -> bool:
        """Whether the window has no room for another token."""
        return self.window is not None and len(self.prompt.tokens) + self.steps - self._slid_at >= self.window

    def slide(self) -> None:
        """Makes the last half of a full window the new prompt."""
        tokens = [*self.before, *self.search.tokens(0)]
        self.prompt = self.prompt._replace(tokens=window_end(tokens, self.window or 0))
        self._slid_at = self.steps
        self.num_tokens = self.prompt.num_tokens

    def next_tokens(self) -> list[int]:
        """Returns the next input token of each row."""
        if self.steps:
            return self.search.last_tokens()
        return [self.prompt.tokens[-1]] * self.search.num_rows

    @property
    def length(self) -> int:
        """The number of ids in each row that the decoder has read."""
        return len(self.before) + self.steps

    def tokens_after(self, count: int) -> list[int]:
        """Returns the new tokens of the only row that continues, without the first ones."""
        if count == self.steps:
            return []
        if count == self.steps - 1:  # the common case; its cost doesn't grow with the text
            return self.search.last_tokens()
        return self.search.tokens(0)[count:]

    def history(self) -> list[list[int]]:
        """Returns for each row the ids that the decoder has read, including the prompt."""
        before = list(self.before)
        if not self.steps:
            return [before] * self.search.num_rows
        return [before + self.search.tokens(row) for row in range(self.search.num_rows)]

    def advance(self, candidates: Candidates, first: int) -> list[int]:
        """Advances the search by a step; see `Search.advance`. An error is stored in `error` and ends the request."""
        if self.error is not None:  # its processors have failed
            self.is_done = True
            return []
        self.steps += 1
        try:
            parents = self.search.advance(candidates.ids, candidates.values, first)
        except Exception as error:  # the error ends only this request
            self.fail(error)
            return []
        return parents if self._update(not parents) else []

    def take_steps(self, steps: int, error: Exception | None, is_done: bool) -> bool:
        """Updates the request after the engine has advanced its search by some steps.

        Args:
            steps: the number of steps.
            error: the error that ended the search, or None.
            is_done: whether the search is done.

        Returns:
            Whether the request continues.
        """
        self.steps += steps
        if error is not None:
            self.fail(error)
            return False
        if not is_done and self._last_token is not None and self.steps == self.search.limit - 1:
            # No logits are needed for a last token that a processor forces.
            rows = self.search.num_rows
            self.search.advance([[self._last_token]] * rows, [[0.0]] * rows, 0)
            self.steps, is_done = self.steps + 1, True
        return self._update(is_done)

    def _update(self, is_done: bool) -> bool:
        """Streams new tokens; finishes the request when its search is done or the deadline has passed.

        Returns:
            Whether the request continues.
        """
        if self.on_token is not None:
            try:
                # While the search runs, its row holds the tokens; the results exist only at the end.
                if is_done:
                    new = self.search.results()[0].tokens[self.num_told :]
                else:  # after a restart, on_token has received the first tokens
                    new = self.tokens_after(self.num_told)
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
        if not self.is_cancelled:
            # If a restarted request runs out of time, the longer attempt counts: on_token may have received its tokens.
            self.results = self.search.results() if self.steps >= self._kept_steps else self._kept
        self.is_done = True

    def restart(self) -> None:
        """Resets the request after an older one took its memory. Decoding is deterministic: results do not change."""
        if self.steps > self._kept_steps:
            self._kept, self._kept_steps = self.search.results(), self.steps
        self.search, self.steps, self.lookup = self._make_search(), 0, self._new_lookup()
        self.prompt, self.num_tokens, self._slid_at = self._first_prompt, self._first_prompt.num_tokens, 0


def window_end(tokens: Sequence[int], window: int) -> Sequence[int]:
    """Returns the tokens that the model still sees when its window is full: the last half of the window."""
    return tokens[-max(1, window // 2) :] if len(tokens) >= window else tokens


def run_batch(batch: Batch, requests: Sequence[Request], limits: Limits, drafter: Drafter | None = None) -> list[int]:
    """Steps the rows of a batch at least once, and frees the groups whose requests leave.

    A batch whose engine runs searches takes as many steps as the limits and the requests' processors allow. With
    drafts, it takes the steps of one pass over them.

    Args:
        batch: the batch.
        requests: the request of each group.
        limits: the limits of the run.
        drafter: drafts tokens for the requests; None: no tokens are drafted.

    Returns:
        The places of the groups that were freed.
    """
    if drafter is not None and isinstance(batch, DraftingBatch):
        drafts = drafter.drafts(requests, batch)
        if any(drafts):
            return _run_drafts(batch, requests, drafts, drafter)
    leaving = _run_searches(batch, requests, limits) if isinstance(batch, SearchingBatch) else None
    if leaving is not None:
        if leaving:
            batch.free(leaving)
        return leaving
    tokens = [token for request in requests for token in request.next_tokens()]
    # Log-probabilities have the same last bits with drafts and without.
    takes_masks = batch.takes_masks and not _wants_log_probs(requests)
    leaving, parents = _advance(requests, batch.step(tokens, _selection(requests, takes_masks)))
    if leaving:
        batch.free(leaving)
    if parents is not None:
        batch.fork(parents)
    return leaving


def _run_searches(batch: SearchingBatch, requests: Sequence[Request], limits: Limits) -> list[int] | None:
    """Has a batch run the searches of its requests; None if it can't, or if a processor has to be called first."""
    steps = limits.max_steps
    searches: list[NativeSearch] = []
    for request in requests:
        if not (request.search_suffices and isinstance(request.search, NativeSearch)):
            return None
        searches.append(request.search)
        if request.stops_at:
            steps = min([steps, *(stop - request.length for stop in request.stops_at if stop >= request.length)])
    if not steps:
        return None
    begun = len(requests)
    while begun and not requests[begun - 1].steps:  # the new ones were admitted last
        begun -= 1
    module, handles, log_probs = extension_module(), [search.handle for search in searches], _wants_log_probs(requests)
    tokens: list[int] = module.last_tokens(handles[:begun])
    for request in requests[begun:]:
        tokens += request.next_tokens()
    counts = batch.run_searches(searches, tokens, log_probs, limits._replace(max_steps=steps))
    if not any(counts):
        return None
    done = set(module.places_of_done(handles))
    leaving: list[int] = []
    for place, request in enumerate(requests):
        is_done = place in done
        error = searches[place].error if is_done and handles[place].is_broken else None
        if not request.take_steps(counts[place], error, is_done):
            leaving.append(place)
    return leaving


def _run_drafts(
    batch: DraftingBatch, requests: Sequence[Request], drafts: Sequence[Sequence[int]], drafter: Drafter
) -> list[int]:
    """Reads the next token of each row and a draft for each request; takes steps as long as drafts are chosen."""
    tokens, counts, shown = list[int](), list[int](), list[int]()
    firsts = []  # the place of each request's first token
    for request, draft in zip(requests, drafts, strict=True):
        firsts.append(len(tokens))
        counts.append(1 + len(draft))
        for token in request.next_tokens():
            tokens += [token, *draft]
        if request.processors or request.search.is_sampling or request.search.matchers is not None:
            shown += range(firsts[-1], len(tokens))
    wanted = Selection(max(request.search.num_candidates for request in requests), _wants_log_probs(requests), shown)
    readings = batch.read(tokens, counts, wanted)
    going, accepted = list(range(len(requests))), [0] * len(requests)
    leaving, parents = set[int](), dict[int, list[int]]()
    for step in itertools.count():
        active = [requests[place] for place in going]
        rows = [firsts[place] + step + row for place in going for row in range(requests[place].search.num_rows)]
        left, continued = _advance(active, readings.choose(rows, _selection(active, takes_masks=False)))
        ended = {going[index] for index in left}
        leaving |= ended
        going = [place for place in going if place not in ended]
        if continued is not None:  # in the first step: requests with several rows have no drafts
            parents = dict(zip(going, continued, strict=True))
        going = [
            place
            for place in going
            if step < len(drafts[place]) and requests[place].search.last_tokens() == [drafts[place][step]]
        ]
        if not going:
            break
        for place in going:
            accepted[place] += 1
    batch.cut([len(draft) - count for draft, count in zip(drafts, accepted, strict=True)])
    drafter.learn(requests, [len(draft) for draft in drafts], accepted)
    places = sorted(leaving)
    if places:
        batch.free(places)
    if parents:
        batch.fork([parents[place] for place in range(len(requests)) if place not in leaving])
    return places


def _wants_log_probs(requests: Sequence[Request]) -> bool:
    return any([request.log_probs for request in requests])


def _selection(requests: Sequence[Request], takes_masks: bool) -> Selection:
    """Returns the selection that requests need from the next step."""
    masked_rows, masks = _masks(requests)
    edited_masks: list[int] = []  # the masks that `_process_logits` applies, and the places of their rows in logit_rows
    edited_places: list[int] = []
    logit_rows: list[int] = []
    samples: list[Sample | None] = []  # for each of logit_rows
    keeps: list[bool] = []  # likewise
    edited: list[tuple[Request, range]] = []  # each request with its part of logit_rows
    first, num_masked, is_sampled = 0, 0, False
    for request in requests:
        rows = range(first, first + request.search.num_rows)
        first = rows.stop
        drawn = request.search.samples()
        is_masked = request.search.is_masked
        num_masked += len(rows) if is_masked else 0
        if drawn is None and not request.processors and (takes_masks or not is_masked):
            continue
        places = range(len(logit_rows), len(logit_rows) + len(rows))
        if is_masked and (request.processors or not takes_masks):
            edited_masks += range(num_masked - len(rows), num_masked)
            edited_places += places
        if request.processors:
            edited.append((request, places))
        is_sampled = is_sampled or drawn is not None
        logit_rows += rows
        samples += drawn if drawn is not None else [None] * len(rows)
        keeps += [request.keeps_scores] * len(rows)
    masked = None if masks is None or not edited_places else (edited_places, masks[edited_masks])
    return Selection(
        num_candidates=max(request.search.num_candidates for request in requests),
        log_probs=_wants_log_probs(requests),
        logit_rows=logit_rows,
        process=partial(_process_logits, edited, masked) if edited or masked else None,
        samples=samples if is_sampled else None,
        keeps=keeps if any(keeps) else None,
        masked_rows=masked_rows,
        masks=masks,
    )


def _masks(requests: Sequence[Request]) -> tuple[list[int], Mask | None]:
    """Returns the rows of requests that may only choose some tokens, and the masks of these rows."""
    rows: list[int] = []
    masked: list[tuple[Request, slice]] = []
    first = num_words = 0
    for request in requests:
        behind = first + request.search.num_rows
        if (matchers := request.search.matchers) is not None and request.search.is_masked:
            num_words = matchers[0].num_words  # of all of them, since they share the model's vocabulary
            masked.append((request, slice(len(rows), len(rows) + behind - first)))
            rows += range(first, behind)
        first = behind
    if not masked:
        return [], None
    masks: Mask = np.zeros((len(rows), num_words), np.uint32)
    for request, places in masked:
        try:
            request.search.fill_masks(masks[places])
        except Exception as error:  # only this request fails; the others continue
            request.error = error
    return rows, masks


def _advance(requests: Sequence[Request], candidates: Candidates) -> tuple[list[int], list[list[int]] | None]:
    """Advances each request by the candidates of a step. It leaves if it has ended or its window is full.

    Returns:
        The places of the requests that leave the batch; and for each request that stays the parents of its rows, or
        None if every row continues from itself.
    """
    leaving: list[int] = []
    parents: list[list[int]] = []
    first, is_changed = 0, False
    for place, request in enumerate(requests):
        rows = request.search.num_rows
        continued = request.advance(candidates, first)
        first += rows
        if continued and not request.is_full:
            parents.append(continued)
            is_changed = is_changed or continued != list(range(rows))
        else:
            leaving.append(place)
    return leaving, parents if is_changed else None


def _process_logits(
    edited: Sequence[tuple[Request, range]], masked: tuple[Sequence[int], Mask] | None, logits: Tensor
) -> Tensor:
    """Runs the processors of requests on the logits, in place.

    Args:
        edited: the requests, each with the indices of its rows.
        masked: the indices of rows that may only choose some tokens, whatever the processors do, and their masks.
        logits: (rows, vocab_size).
    """
    if masked is not None:
        rows, masks = masked
        forbidden = ~torch.from_numpy(allowed_tokens(masks, logits.shape[-1])).to(logits.device)
        logits[rows] = logits[rows].masked_fill(forbidden, -torch.inf)
        if edited:
            _process_logits(edited, None, logits)
            logits[rows] = logits[rows].masked_fill(forbidden, -torch.inf)
        return logits
    for _, neighbours in itertools.groupby(edited, key=lambda pair: _kind(pair[0])):
        alike = list(neighbours)
        processors = alike[0][0].processors
        places = [row for _, rows_of_request in alike for row in rows_of_request]  # sampled rows may lie between them
        history = [row for request, _ in alike for row in request.history()]
        input_ids = torch.tensor(history, dtype=torch.long, device=logits.device)
        try:
            scores = logits[places]
            for processor in processors:
                scores = _checked(processor(input_ids, scores), scores, processor)
            logits[places] = scores
        except Exception as error:  # only this request fails; the others continue
            for request, _ in alike:
                request.error = error
    return logits


def _kind(request: Request) -> tuple[object, ...]:
    """Returns a request's kind. Requests of one kind have equal processors and lengths, and are processed together."""
    if all(isinstance(processor, RowWise) for processor in request.processors):
        return (request.length, *request.processors)
    return (id(request),)  # a user's function gets the rows of only one request


def _checked(output: object, scores: Tensor, processor: object) -> Tensor:
    """Converts the result of a processor to the dtype of the scores.

    Raises:
        ValueError: the result is not one number for each score, on the same device.
    """
    if isinstance(output, np.ndarray) and output.dtype.kind in "fiu":
        output = torch.as_tensor(np.ascontiguousarray(output), device=scores.device)
    name = getattr(processor, "__name__", type(processor).__name__)
    wanted = f"expected a processor to give scores of shape {tuple(scores.shape)}"
    if not isinstance(output, Tensor):
        raise ValueError(f"{wanted}, got {type(output).__name__} from {name}")
    if output.is_nested or output.layout != torch.strided or output.dtype == torch.bool or output.is_complex():
        kind = "a nested tensor" if output.is_nested else f"{output.dtype} of layout {output.layout}"
        raise ValueError(f"{wanted} as dense numbers, got {kind} from {name}")
    if output.shape != scores.shape:
        raise ValueError(f"{wanted}, got {tuple(output.shape)} from {name}")
    if output.device != scores.device:
        raise ValueError(f"{wanted} on {scores.device}, got scores on {output.device} from {name}")
    return output.to(scores.dtype)
