"""Steps of a batch: the model reads the next tokens of its requests, whose searches choose from what it computes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

import numpy as np

from fastformer.extension import extension_module
from fastformer.generation.constraints import Mask
from fastformer.generation.drafts import Drafter
from fastformer.generation.engines.base import Batch, Candidates, DraftingBatch, Limits, SearchingBatch, Selection
from fastformer.generation.native_search import NativeSearch
from fastformer.generation.requests import Request, process_logits
from fastformer.generation.search import Sample


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
    edited_masks: list[int] = []  # the masks that `process_logits` applies, and the places of their rows in logit_rows
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
        process=partial(process_logits, edited, masked) if edited or masked else None,
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
