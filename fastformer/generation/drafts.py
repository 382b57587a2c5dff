"""Drafts: tokens that may follow, guessed cheaply, which the model reads in one pass instead of one pass for each.

A request's search chooses from the model's logits as always, token by token, and continues with the next ones that were
computed as long as it chooses what was drafted. The results are therefore those without drafts, bit for bit, whatever
the search, its processors and its ends; sampling draws the same numbers, and accepts a draft with the probability that
the model gives it.

A draft comes from the text so far (`PromptLookup`) or from a smaller model (`DraftModel`). A `Drafter` decides how many
tokens to draft for each request: as many as probably save more time than they cost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from fastformer.generation.engines.base import DraftingBatch, Engine

if TYPE_CHECKING:
    from fastformer.generation.requests import Request

# What a further token of a pass costs, as a share of a pass over one row: while reading the weights takes longest, and
# when computing does. For attention, what the further token costs as a share of the first one's. Measured on Zen 4.
_CHEAP_ROWS, _CHEAP, _DEAR, _ATTENTION = 6, 0.05, 0.13, 0.35
# Attention takes so much longer than reading as many bytes of weights.
_ATTENTION_BYTES = 4

_MEMORY = 0.9  # how much of what was learned about drafts before counts after the next draft
_FIRST_PAUSE, _LONGEST_PAUSE = 8, 128  # chances to draft that are left out where drafts don't pay


class Odds:
    """Estimates how often a drafted token is accepted if those before it were.

    Args:
        guess: the estimate before the first draft.
    """

    def __init__(self, guess: float) -> None:
        self._accepted, self._tried = 2 * guess, 2.0
        self._pause, self._left = _FIRST_PAUSE, _FIRST_PAUSE

    def count(self, costs: Sequence[float]) -> int:
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
        if count or not costs:
            return count
        self._left -= 1
        if self._left > 0:
            return 0
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._left = self._pause
        return 1

    def learn(self, drafted: int, accepted: int) -> None:
        """Notes how many tokens of a draft were accepted."""
        self._accepted = _MEMORY * self._accepted + accepted
        self._tried = _MEMORY * self._tried + accepted + (accepted < drafted)
        if accepted:
            self._pause = self._left = _FIRST_PAUSE


class PromptLookup:
    """Drafts what followed the last tokens where they occurred before: in the prompt, or in the new text.

    Args:
        most: the most tokens in a draft.
        before: the tokens before the new ones.
    """

    _LONGEST = 4  # longer matches count as matches of this length
    _PLACES = 64  # the most earlier places that are compared

    def __init__(self, most: int, before: Sequence[int]) -> None:
        self.most = most
        self._text: list[int] = []
        self._ends: dict[int, list[int]] = defaultdict(list)  # the places of each token
        self._num_before = len(before)
        self._odds = [Odds(guess) for guess in (0.2, 0.4, 0.6, 0.7)]  # for each length of a match
        self._latest = self._odds[0]
        self._extend(before)

    def _extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._ends[token].append(len(self._text))
            self._text.append(token)

    def draft(self, new: Sequence[int], costs: Sequence[float]) -> list[int]:
        """Returns a draft after the new tokens; see `Odds.count`."""
        self._extend(islice(new, len(self._text) - self._num_before, None))
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
        count = min(self._latest.count(costs), self.most)
        period = last - end  # beyond the end of the text, it repeats
        return [text[end + 1 + i % period] for i in range(count)]

    def learn(self, drafted: int, accepted: int) -> None:
        self._latest.learn(drafted, accepted)


class Drafter:
    """Drafts tokens for the requests of a batch.

    Args:
        engine: the engine of the batch.

    Attributes:
        num_drafted, num_accepted: the number of tokens that were drafted, and of those that the searches have chosen.
    """

    def __init__(self, engine: Engine) -> None:
        self._step_bytes, self._token_bytes, self._block = engine.step_bytes, engine.token_bytes, engine.block_size or 1
        self.num_drafted = self.num_accepted = 0

    def drafts(self, requests: Sequence[Request], batch: DraftingBatch) -> list[list[int]]:
        """Returns a draft for each request, which may be empty."""
        spare = batch.free_tokens() - batch.step_tokens()
        rows = len(requests)
        cost = 1 + sum(self._row_cost(row) for row in range(1, rows))
        found: list[list[int]] = []
        for request in requests:
            draft: list[int] = []
            most = request.most_drafts
            if request.lookup is not None and most > 0 and spare >= self._block:
                most = min(most, request.lookup.most, spare)
                draft = request.lookup.draft(
                    request.search.tokens(0) if request.steps else (),
                    self._costs(request, most, rows, cost, len(requests)),
                )
                spare -= -(-len(draft) // self._block) * self._block
                cost += sum(self._row_cost(rows + i) for i in range(len(draft)))
                rows += len(draft)
            found.append(draft)
        return found

    def learn(self, requests: Sequence[Request], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Notes for each request how many tokens were drafted, and how many of them its search has chosen."""
        for request, count, right in zip(requests, drafted, accepted, strict=True):
            if count and request.lookup is not None:
                request.lookup.learn(count, right)
                request.num_drafted += count
                request.num_accepted += right
                self.num_drafted += count
                self.num_accepted += right

    def _row_cost(self, row: int) -> float:
        return _CHEAP if row < _CHEAP_ROWS else _DEAR

    def _costs(self, request: Request, most: int, rows: int, cost: float, expected: int) -> list[float]:
        """Returns what each token of a draft costs; see `Odds.count`.

        Args:
            request: the request.
            most: the most tokens of the draft.
            rows, cost: the number of rows that the pass has already, and its cost.
            expected: the number of tokens that the pass gives without this draft.
        """
        attention = _ATTENTION_BYTES * self._token_bytes * request.length
        share = attention / (attention + self._step_bytes)
        costs = []
        for row in range(rows, rows + most):
            more = (1 - share) * self._row_cost(row) + share * _ATTENTION
            costs.append(more * expected / cost)
            cost += more
        return costs
