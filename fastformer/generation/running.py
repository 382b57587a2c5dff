"""The requests of a batch: what a step needs to know of them, and what they make of its candidates."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fastformer.generation.engines.base import Candidates, Sample, Selection
from fastformer.generation.native_search import NativeSearch, last_tokens, places_of_done
from fastformer.generation.processors import RowWise
from fastformer.generation.requests import Request


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

    def native_searches(self) -> list[NativeSearch] | None:
        searches: list[NativeSearch] = []
        for request in self.requests:
            if not request.search_suffices or not isinstance(request.search, NativeSearch):
                return None
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
