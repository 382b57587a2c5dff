"""Drafts: tokens that may follow, guessed cheaply, which the model reads in one pass instead of one pass for each.

A request's search chooses from the model's logits as always, token by token, and continues with the next ones that were
computed as long as it chooses what was drafted. The tokens are therefore those without drafts, whatever the search, its
processors and its ends; sampling draws the same numbers, and accepts a draft with the probability that the model gives
it. Log-probabilities are the same, too, bit for bit, but for those of a request with min_new_tokens: their last bits
may differ.

A draft comes from the text so far (`PromptLookup`), from a smaller model (`DraftModel`), or from a constraint where it
leaves no choice (`Matcher.forced`), so that its tokens are certain. A `Drafter` decides how many tokens to draft for
each request: as many as probably save more time than they cost.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from fastformer.generation.engines import choose_engine
from fastformer.generation.engines.base import DraftingBatch, Engine, Prompt
from fastformer.generation.evaluation import evaluating
from fastformer.generation.model_protocols import Model, as_model, is_decoder_only, own_precision
from fastformer.models.quantization import QUANTIZED

if TYPE_CHECKING:
    from fastformer.generation.requests import Request

# What a further token of a pass costs, as a share of a pass over one row: while reading the weights takes longest, and
# when computing does. For attention, what the further token costs as a share of the first one's.
# They are estimates, and decide only how much is drafted.
_CHEAP_ROWS, _CHEAP, _DEAR, _ATTENTION = 6, 0.05, 0.13, 0.35
# Attention takes so much longer than reading as many bytes of weights.
_ATTENTION_BYTES = 4
_MOST_ROWS = 64  # of a draft: with more, a pass would be one over a prompt

# How much of what was learned about drafts before counts after the next draft: of a request, and of a draft model.
_MEMORY, _LONG_MEMORY = 0.9, 0.99
# Chances to draft that are left out where drafts don't pay, and how much longer each pause is than the one before.
_FIRST_PAUSE, _LONGEST_PAUSE, _GROWTH = 8, 128, 4
# The seconds between two looks for drafts while nothing is drafted: they double from the first to the longest.
_FIRST_RUN, _LONGEST_RUN = 0.001, 0.01


class Odds:
    """Estimates how often a drafted token is accepted if those before it were.

    Args:
        guess: the estimate before the first draft.
    """

    def __init__(self, guess: float) -> None:
        self._accepted, self._tried = guess, 1.0  # counts as one token, so that a few wrong drafts refute it
        self._pause, self._left = _FIRST_PAUSE, _FIRST_PAUSE

    def count(self, costs: Iterable[float]) -> int:
        """Returns how many tokens to draft: those that are accepted with a higher probability than they cost.

        Drafts that don't pay are tried again now and then, one token at a time.

        Args:
            costs: for each further token, its cost as a share of the gain if it is accepted.
        """
        chance, count = 1.0, 0
        for cost in costs:
            chance *= self._accepted / self._tried
            if chance < cost:
                break
            count += 1
        else:
            return count
        if count:
            return count
        self._left -= 1
        if self._left > 0:
            return 0
        self._pause = min(_GROWTH * self._pause, _LONGEST_PAUSE)
        self._left = self._pause
        return 1

    def learn(self, drafted: int, accepted: int) -> None:
        """Notes how many tokens of a draft were accepted."""
        self._accepted = _MEMORY * self._accepted + accepted
        self._tried = _MEMORY * self._tried + accepted + (accepted < drafted)
        if accepted:
            self._pause = self._left = _FIRST_PAUSE


class Certainty:
    """Estimates how often a model's draft is right, token by token, by the probability that the model gives it."""

    _PARTS = 8  # of the range of probabilities, each with a rate of its own
    _GUESS = 0.7  # before the first draft, and again for a part that was not tried for long

    def __init__(self) -> None:
        self._accepted, self._tried = [0.0] * self._PARTS, [0.0] * self._PARTS

    def chances(self) -> list[float]:
        """Returns the logarithm of the chance of a token in each part."""
        pairs = zip(self._accepted, self._tried, strict=True)
        return [math.log((self._GUESS + accepted) / (1 + tried)) for accepted, tried in pairs]

    def learn(self, parts: Sequence[int], accepted: int) -> None:
        """Notes how many tokens of a draft were accepted, given the part of each token."""
        for counts in (self._accepted, self._tried):
            counts[:] = [_LONG_MEMORY * count for count in counts]
        for place, part in enumerate(parts[: accepted + 1]):
            self._tried[part] += 1
            self._accepted[part] += place < accepted


class PromptLookup:
    """Drafts what followed the last tokens where they occurred before: in the prompt, or in the new text.

    Args:
        most: the most tokens in a draft.
        before: the tokens before the new ones.

    Attributes:
        num_new: the number of new tokens that it knows.
    """

    _LONGEST = 4  # longer matches count as matches of this length
    _PLACES = 64  # the most earlier places that are compared

    def __init__(self, most: int, before: Sequence[int]) -> None:
        self.most = most
        self._text: list[int] = []
        self._ends: dict[int, list[int]] = defaultdict(list)  # the places of each token
        self.num_new = 0
        self._odds = [Odds(guess) for guess in (0.2, 0.4, 0.6, 0.7)]  # for each length of a match
        self._latest = self._odds[0]
        self._extend(before)

    def _extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._ends[token].append(len(self._text))
            self._text.append(token)

    def draft(self, new: Sequence[int], costs: Iterable[float]) -> list[int]:
        """Returns a draft after the new tokens, given those that it doesn't know; see `Odds.count`."""
        self._extend(new)
        self.num_new += len(new)
        text = self._text
        if not text:
            return []
        longest, end = 0, 0
        last = len(text) - 1
        for place in islice(reversed(self._ends[text[-1]]), 1, 1 + self._PLACES):
            length = 1
            while length < 2 * self._LONGEST and length <= place and text[place - length] == text[last - length]:
                length += 1
            if length > longest:  # of the longest matches, the latest
                longest, end = length, place
                if length == 2 * self._LONGEST:
                    break
        if not longest:
            return []
        self._latest = self._odds[min(longest, self._LONGEST) - 1]
        count = self._latest.count(islice(costs, self.most))
        period = last - end  # beyond the end of the text, it repeats
        return [text[end + 1 + i % period] for i in range(count)]

    def learn(self, drafted: int, accepted: int) -> None:
        self._latest.learn(drafted, accepted)


def source_text(prompt: Prompt, config: object) -> Sequence[int]:
    """Returns the tokens of a source that the text may copy: none if it has a vocabulary of its own."""
    has_two_vocabularies = getattr(config, "source_vocab_size", None) is not None
    return () if has_two_vocabularies else prompt.source or ()


@dataclass
class _Row:
    """A request's row in the batch of a `DraftModel`.

    Attributes:
        tokens: the tokens that the model has read.
        num_fixed: the number of the first of them that can't be cut.
    """

    tokens: list[int]
    num_fixed: int


class DraftModel:
    """Drafts the best tokens of a smaller model with the same vocabularies, which has a cache of its own.

    Args:
        engine: decodes the smaller model; its batches are `DraftingBatch`es. It reads sources if the larger one does.
        max_len: the smaller model's number of positions.
    """

    _MOST = 15  # tokens of a draft: with the one before them, they fill the 16 rows of a tile of AMX

    @classmethod
    def of(cls, model: object, drafted: Model, engine: Engine, precision: str | None) -> DraftModel:
        """Returns the drafts of a model.

        Args:
            model: the smaller model.
            drafted: the model that decodes.
            engine: its engine.
            precision: the precision to compute in, unless the smaller model is quantised; None: its own.

        Raises:
            ValueError: the model can't draft for the other one.
        """
        small = as_model(model)
        for each in (small, drafted):
            if not is_decoder_only(each):
                raise ValueError(f"expected language models along with a draft_model, got {type(each).__name__}")
        sizes = small.config.vocab_size, drafted.config.vocab_size
        if sizes[0] != sizes[1]:
            raise ValueError(f"expected a draft_model with the model's vocabulary of {sizes[1]:,}, got {sizes[0]:,}")
        if not engine.step_bytes:
            what = f"the engine {engine.name!r}, or a model whose layers have states"
            raise ValueError(f"expected the engine 'cpp' along with a draft_model, and no states; got {what}")
        if own_precision(small) in QUANTIZED:
            precision = None
        with evaluating(small):
            drafting = choose_engine(small, "cpp", precision)
        if not drafting.step_bytes:
            raise ValueError("expected a draft_model without layers that have a state")
        return cls(drafting, int(small.config.max_len))

    def __init__(self, engine: Engine, max_len: int) -> None:
        self.engine, self._max_len, self._block = engine, max_len, engine.block_size or 1
        self._batch: DraftingBatch | None = None
        self._rows: dict[Request, _Row] = {}  # in the order of the batch's groups
        self._odds: dict[Request, Odds] = {}
        self._parts: dict[Request, list[int]] = {}  # of the latest drafts
        self._certainty = Certainty()

    def open(self, max_rows: int, num_tokens: int) -> None:
        """Opens an empty batch for as many rows and tokens; see `Engine.open`."""
        for kept in (self._rows, self._odds, self._parts):
            kept.clear()
        self._batch = None  # there may be no memory for two
        batch = self.engine.open(max_rows, num_tokens + max_rows * (self._MOST + self._block))
        assert isinstance(batch, DraftingBatch)
        self._batch = batch

    def keep(self, requests: Collection[Request]) -> None:
        """Frees the rows of all other requests."""
        assert self._batch is not None
        leaving = [place for place, request in enumerate(self._rows) if request not in requests]
        if leaving:
            self._batch.free(leaving)
        for kept in (self._rows, self._odds, self._parts):
            for request in [request for request in kept if request not in requests]:
                del kept[request]

    def limits(self, request: Request, costs: Iterable[float]) -> list[float]:
        """Returns a limit for each token that a draft for a request may have; see `DraftingBatch.draft`.

        Args:
            request: the request.
            costs: see `Odds.count`.
        """
        if request.window is not None or len(request.prompt.source or ()) > self._max_len:
            return []
        room = self._max_len - len(request.prompt.tokens) - request.steps
        limits = list(islice(costs, max(0, min(self._MOST, room))))
        count = self._odds.setdefault(request, Odds(0.7)).count(limits)
        if count == 1:
            return [-math.inf]  # a try
        return [math.log(cost) for cost in limits] if count else []

    def learn(self, request: Request, drafted: int, accepted: int) -> None:
        """Notes how many tokens of a draft were accepted."""
        self._odds[request].learn(drafted, accepted)
        self._certainty.learn(self._parts[request][:drafted], accepted)

    def drafts(self, limits: Mapping[Request, list[float]]) -> dict[Request, list[int]]:
        """Returns drafts that are probably right, given their limits, without those for which there is no memory.

        A draft may be empty. Then it doesn't pay, and that is learned.
        """
        batch = self._batch
        assert batch is not None
        new = {request: tokens for request in limits if (tokens := self._unread(batch, request))}
        most = [len(new[one]) + len(limits[one]) - 1 if one in new else 0 for one in self._rows]
        if batch.free_tokens() < sum(-(-count // self._block) * self._block for count in most):
            batch.free([*range(len(self._rows))])  # begin anew, with what fits
            self._rows.clear()
            return {}
        if not new:
            return {}
        tokens = [token for request in self._rows for token in new.get(request, ())]
        counts = [len(new.get(request, ())) for request in self._rows]
        chances = self._certainty.chances()
        found = batch.draft(tokens, counts, chances, [limits.get(request, []) for request in self._rows])
        drafts: dict[Request, list[int]] = {}
        for (request, row), (draft, parts) in zip(self._rows.items(), found, strict=True):
            if request in new:
                row.tokens += new[request] + draft[:-1]
                if sum(chances[part] for part in parts) < limits[request][len(draft) - 1]:
                    draft.pop()
                drafts[request], self._parts[request] = draft, parts
                if not draft:
                    self._odds[request].learn(1, 0)
        return drafts

    def _unread(self, batch: DraftingBatch, request: Request) -> list[int]:
        """Gives the request a row that has read only tokens of its text. Returns the rest of the text.

        The list is empty if there is no memory for the row.
        """
        text = [*request.prompt.tokens, *(request.search.tokens(0) if request.steps else ())]
        row = self._rows.get(request)
        if row is not None:
            common = min(len(row.tokens), len(text) - 1)
            while row.tokens[:common] != text[:common]:
                common -= 1
            dropped = len(row.tokens) - common
            if not dropped or common > row.num_fixed:
                if dropped:
                    batch.cut([dropped if one is row else 0 for one in self._rows.values()])
                    del row.tokens[common:]
                return text[common:]
            batch.free([list(self._rows).index(request)])
            del self._rows[request]
        prompt = Prompt(request.prompt.source, text)
        if batch.free_tokens() < self.engine.tokens_needed(prompt, 1, self._MOST):
            return []
        batch.prefill([prompt])
        self._rows[request] = _Row(text[:-1], len(text) - 1)
        return text[-1:]


class Drafter:
    """Drafts tokens for the requests of a batch.

    Args:
        engine: the engine of the batch.
        model: drafts for requests that nothing was found for in their text; None: nothing does.
        max_rows, max_tokens: the size of the model's batch.

    Attributes:
        num_drafted, num_accepted: the number of tokens that were drafted, and of those that the searches have chosen.
    """

    def __init__(self, engine: Engine, model: DraftModel | None, max_rows: int, max_tokens: int) -> None:
        self._step_bytes, self._token_bytes, self._block = engine.step_bytes, engine.token_bytes, engine.block_size or 1
        self.model, self._size = model, (max_rows, max_tokens)
        self._is_open = False
        self.num_drafted = self.num_accepted = 0
        self._seconds = _FIRST_RUN
        self._forced: set[Request] = set()  # those whose constraint leaves no choice in the latest draft
        self._of_model: Collection[Request] = ()  # the requests whose latest draft is the model's

    def clear(self) -> None:
        """Forgets what the model has read."""
        self._is_open = False

    def run_seconds(self, requests: Sequence[Request]) -> float:
        """Returns how long to run if the next look for drafts finds none: not long if one of the requests begins."""
        if not all([request.steps for request in requests]):
            self._seconds = _FIRST_RUN
        return self._seconds

    def drafts(self, requests: Sequence[Request], batch: DraftingBatch) -> list[list[int]]:
        """Returns a draft for each request, which may be empty."""
        if self.model is not None:
            if not self._is_open:
                self.model.open(*self._size)
                self._is_open = True
            self.model.keep(set(requests))
        spare = batch.free_tokens() - batch.step_tokens()
        rows = among = len(requests)
        cost = 1 + sum(_row_cost(row) for row in range(1, rows))
        drafts: list[list[int]] = []
        limits: dict[Request, list[float]] = {}  # of the model's drafts
        self._forced.clear()
        for request in requests:
            draft: list[int] = []
            most = min(request.most_drafts, spare)
            if most > 0 and spare >= self._block:
                most, matchers = min(most, _MOST_ROWS), request.search.matchers
                if matchers is not None and (draft := matchers[0].forced()[:most]):
                    self._forced.add(request)
                elif (lookup := request.lookup) is not None:
                    costs = self._costs(request, most, rows)
                    draft = lookup.draft(request.tokens_after(lookup.num_new), (one * among / cost for one in costs))
                count = len(draft)
                if not draft and self.model is not None:
                    each = self.model.engine.step_bytes / self._step_bytes / among
                    costs = self._costs(request, most, rows)
                    if of_one := self.model.limits(request, ((one + each) * among / cost for one in costs)):
                        limits[request] = of_one
                        count = len(of_one)
                if count:
                    spare -= -(-count // self._block) * self._block
                    cost += sum(self._costs(request, count, rows))
                    rows += count
            drafts.append(draft)
        self._of_model = limits
        if limits and self.model is not None:
            of_model = self.model.drafts(limits)
            drafts = [of_model.get(request, draft) for request, draft in zip(requests, drafts, strict=True)]
        self._seconds = _FIRST_RUN if any(drafts) else min(2 * self._seconds, _LONGEST_RUN)
        return drafts

    def learn(self, requests: Sequence[Request], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Notes for each request how many tokens were drafted, and how many of them its search has chosen."""
        for request, count, right in zip(requests, drafted, accepted, strict=True):
            if not count or request in self._forced:
                continue
            if request in self._of_model and self.model is not None:
                self.model.learn(request, count, right)
            elif request.lookup is not None:
                request.lookup.learn(count, right)
            request.num_drafted += count
            request.num_accepted += right
            self.num_drafted += count
            self.num_accepted += right

    def _costs(self, request: Request, most: int, rows: int) -> Iterator[float]:
        """Yields what each of the first tokens of a draft costs, if the pass has so many rows without it."""
        attention = _ATTENTION_BYTES * self._token_bytes * request.length
        share = attention / (attention + self._step_bytes)
        for row in range(rows, rows + most):
            yield (1 - share) * _row_cost(row) + share * _ATTENTION


def _row_cost(row: int) -> float:
    return _CHEAP if row < _CHEAP_ROWS else _DEAR
