"""A language that is small enough to enumerate, and plain searches over it."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Collection, Sequence
from typing import ClassVar

import torch

from fastformer.generation.engines import Candidates, Engine, Prompt, Selection
from fastformer.generation.engines.base import Limits, SearchingBatch
from fastformer.generation.engines.sampling import choose
from fastformer.generation.native_search import NativeSearch
from fastformer.generation.requests import Request
from fastformer.generation.scheduler import Scheduler, run
from fastformer.generation.search import Hypothesis as Found
from fastformer.generation.search import Search

VOCAB, EOS, START = 5, 1, 0

Hypothesis = tuple[float, tuple[int, ...]]  # score, tokens


class ToyEngine(Engine, SearchingBatch):
    """An engine and its only batch. Probabilities depend on the last two tokens, by table i for source [i]."""

    name: ClassVar[str] = "toy"
    token_bytes, device = 0, torch.device("cpu")

    def __init__(self, sources: int, *, eos: float = 0.0, vocab: int = VOCAB, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(sources + 1000 * seed)
        self.table = torch.randn(sources, vocab, vocab, vocab, generator=generator) * 1.5
        self.table[..., EOS] += eos
        self.groups: list[list[list[int]]] = []  # of each row its source, and what was said

    @classmethod
    def why_unsupported(cls, model: object, precision: str | None = None) -> str | None:
        return None

    def open(self, max_rows: int, num_tokens: int):
        self.groups = []
        return self

    def run_searches(self, searches, tokens, log_probs, limits) -> list[int]:
        return [0] * len(searches)  # it runs none; RunningEngine does

    def prefill(self, prompts: Sequence[Prompt]) -> None:
        self.groups += [[[*(prompt.source or ()), START, *prompt.tokens[:-1]]] for prompt in prompts]

    def step(self, tokens: Sequence[int], selection: Selection) -> Candidates:
        rows = [row for group in self.groups for row in group]
        for row, token in zip(rows, tokens, strict=True):
            row.append(token)
        return choose(torch.stack([self.table[row[0], row[-2], row[-1]] for row in rows]), selection)

    def fork(self, parents: Sequence[Sequence[int]]) -> None:
        self.groups = [[list(rows[i]) for i in own] for rows, own in zip(self.groups, parents, strict=True)]

    def free(self, groups: Sequence[int]) -> None:
        self.groups = [rows for i, rows in enumerate(self.groups) if i not in groups]

    def continuations(self, source: int, sequence: Sequence[int]) -> list[float]:
        """Returns the log-probability of each next token."""
        before, last = (START, START, *sequence)[-2:]
        return self.table[source, before, last].log_softmax(-1).tolist()

    def log_probs(self, source: int, sequence: Sequence[int]) -> list[float]:
        """Returns the log-probability of each token of a sequence."""
        return [self.continuations(source, sequence[:i])[token] for i, token in enumerate(sequence)]

    def score(self, source: int, sequence: Sequence[int]) -> float:
        """Returns the log-probability of a sequence."""
        return sum(self.log_probs(source, sequence))


class MeteredEngine(ToyEngine):
    """A ToyEngine that counts memory: a group's source and prompt once, and one token per row and step."""

    token_bytes = 1

    def __init__(self, sources: int, **options) -> None:
        super().__init__(sources, **options)
        self.max_rows = self.num_tokens = 0
        self.taken: list[int] = []  # by each group
        self.starts: list[tuple[int, int]] = []
        self.admitted: list[int] = []  # the source of each group that was ever admitted
        self.most_rows = self.most_used = 0

    def open(self, max_rows: int, num_tokens: int):
        self.max_rows, self.num_tokens, self.taken = max_rows, num_tokens, []
        self.starts.append((max_rows, num_tokens))
        return super().open(max_rows, num_tokens)

    def _check(self) -> None:
        rows = sum(map(len, self.groups))
        self.most_rows, self.most_used = max(self.most_rows, rows), max(self.most_used, self.used())
        assert rows <= self.max_rows and self.used() <= self.num_tokens, "more than there is"

    def prefill(self, prompts: Sequence[Prompt]) -> None:
        super().prefill(prompts)
        self.admitted += [prompt.source[0] for prompt in prompts if prompt.source]
        self.taken += [len(prompt.source or ()) + len(prompt.tokens) for prompt in prompts]
        self._check()

    def step(self, tokens: Sequence[int], selection: Selection) -> Candidates:
        self.taken = [taken + len(rows) for taken, rows in zip(self.taken, self.groups, strict=True)]
        self._check()
        return super().step(tokens, selection)

    def fork(self, parents: Sequence[Sequence[int]]) -> None:
        assert all(parents), "a group lost all of its rows"
        super().fork(parents)
        self._check()

    def free(self, groups: Sequence[int]) -> None:
        super().free(groups)
        self.taken = [taken for i, taken in enumerate(self.taken) if i not in groups]

    def used(self) -> int:
        return sum(self.taken)

    def tokens_needed(self, prompt: Prompt, num_rows: int, new_tokens: int) -> int:
        return len(prompt.source or ()) + len(prompt.tokens) + num_rows * new_tokens

    def free_tokens(self) -> int:
        return self.num_tokens - self.used()

    def step_tokens(self) -> int:
        return sum(map(len, self.groups))


class RunningEngine(MeteredEngine):
    """A MeteredEngine for C++ searches: it takes steps until its time, here a number of steps, is over."""

    def __init__(self, sources: int, *, patience: int = 10**6, **options) -> None:
        super().__init__(sources, **options)
        self.patience = patience
        self.runs: list[int] = []  # the steps of each call

    def runs_searches(self) -> bool:
        return True

    def run_searches(
        self, searches: Sequence[NativeSearch], tokens: Sequence[int], log_probs: bool, limits: Limits
    ) -> list[int]:
        max_steps, seconds, min_rows = limits
        assert [search.num_rows for search in searches] == list(map(len, self.groups))
        assert not any(search.handle.is_done for search in searches) and seconds > 0 and max_steps > 0
        assert min_rows <= sum(search.peak_rows for search in searches)  # or no step would ever be taken
        taken, steps, goes_on = [0] * len(searches), 0, True
        while goes_on:
            wanted = max(search.num_candidates for search in searches)
            found = self.step(tokens, Selection(wanted, log_probs))
            firsts = itertools.accumulate(map(len, self.groups[:-1]), initial=0)
            kept = []
            for place, (search, first) in enumerate(zip(searches, list(firsts), strict=True)):
                taken[place] += not search.handle.is_done
                kept.append([] if search.handle.is_done else search.handle.advance(*found, first))
            self.fork([parents or [0] for parents in kept])
            # A search that is done keeps a row, which says anything.
            said = [[0] if search.handle.is_done else search.last_tokens() for search in searches]
            tokens = [token for tokens in said for token in tokens]
            steps += 1
            rows_left = sum(search.peak_rows for search in searches if not search.handle.is_done)
            has_room = self.step_tokens() <= self.free_tokens()
            goes_on = any(kept) and rows_left >= min_rows and has_room and steps < min(max_steps, self.patience)
        self.runs.append(steps)
        return taken


def ask(source: int, make_search: Callable[[], Search], *, length: int = 1, prefix: Sequence[int] = (), **options):
    """Makes a request in the toy's language, given its table and the length of its source."""
    return Request(Prompt([source] * length, [START, *prefix]), make_search, **options)


def decode(engine: ToyEngine, requests: list[Request], max_rows: int = 64, max_bytes: int = 10**6) -> list[list[Found]]:
    """Returns the results of requests that are decoded together."""
    run(Scheduler(engine, max_rows=max_rows, max_bytes=max_bytes), requests)
    return [request.results for request in requests]


def finish(scheduler: Scheduler, requests: Sequence[Request] = ()) -> list[list[Request]]:
    """Runs requests to their end, which may be an error. Returns those that ended with each step."""
    scheduler.submit(requests)
    ended = []
    while not scheduler.is_idle:
        ended.append(scheduler.step())
    return ended


def penalty(length: int, alpha: float) -> float:
    return ((5 + length) / 6) ** alpha


def every_hypothesis(engine: ToyEngine, source: int, limit: int, alpha: float) -> list[Hypothesis]:
    """Returns all sequences of up to `limit` tokens: the finished ones, best first, then the unfinished ones."""
    finished, cut = [], []
    going_on = [token for token in range(VOCAB) if token != EOS]
    for size in range(1, limit + 1):
        for body in itertools.product(going_on, repeat=size - 1):
            finished.append((engine.score(source, (*body, EOS)) / penalty(size, alpha), (*body, EOS)))
    for body in itertools.product(going_on, repeat=limit):
        cut.append((engine.score(source, body) / penalty(limit, alpha), body))
    return [
        hypothesis
        for group in (finished, cut)
        for hypothesis in sorted(group, reverse=True)
        if hypothesis[0] > -math.inf
    ]


def extended(
    engine: ToyEngine, source: int, alive: list[Hypothesis], lowered: Callable[[int], float] = lambda token: 0.0
) -> list[Hypothesis]:
    """Returns all continuations, best first. Some tokens may be penalised."""
    longer = (
        (score + gained - lowered(token), (*sequence, token))
        for score, sequence in alive
        for token, gained in enumerate(engine.continuations(source, sequence))
        if gained > -math.inf
    )
    return sorted(longer, reverse=True)


def plain_beam_search(
    engine: ToyEngine,
    source: int,
    limit: int,
    beams: int,
    alpha: float,
    returned: int,
    early_stopping: bool,
    *,
    ends: Collection[int] = (EOS,),
    groups: int = 1,
    diversity: float = 0.0,
) -> list[Hypothesis]:
    """Implements beam search with lists: ended hypotheses are separate from live ones; groups of beams run in turn."""
    width = beams // groups
    alive: list[list[Hypothesis]] = [[(0.0, ())] for _ in range(groups)]
    finished: list[list[Hypothesis]] = [[] for _ in range(groups)]
    for length in range(1, limit + 1):
        chosen: list[int] = []  # by the groups before, as their next token
        for g in range(groups):
            candidates = extended(engine, source, alive[g], lambda token: diversity * chosen.count(token))  # noqa: B023
            del candidates[(1 + len(ends)) * width :]
            ended = [(score / penalty(length, alpha), tokens) for score, tokens in candidates if tokens[-1] in ends]
            finished[g] = sorted(finished[g] + ended, reverse=True)[:width]
            alive[g] = [hypothesis for hypothesis in candidates if hypothesis[1][-1] not in ends][:width]
            needed = min(returned, width)
            bound = alive[g][0][0] / max(penalty(n, alpha) for n in (1, limit)) if alive[g] else -math.inf
            if early_stopping:
                done = len(finished[g]) == width
            else:
                done = len(finished[g]) >= needed and finished[g][needed - 1][0] >= bound
            alive[g] = [] if done else alive[g]
            chosen += [sequence[-1] for _, sequence in alive[g]]
        if not any(alive):
            break
    cut = [(score / penalty(limit, alpha), tokens) for group in alive for score, tokens in group]
    whole = [hypothesis for group in finished for hypothesis in group]
    return (sorted(whole, reverse=True) + sorted(cut, reverse=True))[:returned]


def plain_transformers_search(
    engine: ToyEngine,
    source: int,
    limit: int,
    beams: int,
    alpha: float,
    returned: int,
    early_stopping: bool | str,
    *,
    ends: Collection[int] = (EOS,),
    begun: int = 0,
) -> list[Hypothesis]:
    """Implements beam search by transformers' rules, with lists: a step ends hypotheses, then checks for the end."""
    alive: list[Hypothesis] = [(0.0, ())]
    finished: list[Hypothesis] = []
    for length in range(1, limit + 1):
        candidates = extended(engine, source, alive)[: (1 + len(ends)) * beams]
        ending = [one for one in candidates[:beams] if one[1][-1] in ends or length == limit]
        finished += [(score / (begun + length) ** alpha, tokens) for score, tokens in ending]
        finished = sorted(finished, reverse=True)[:beams]
        alive = [one for one in candidates if one[1][-1] not in ends][:beams]
        is_full = len(finished) == beams
        if is_full and early_stopping is True:
            break
        far = begun + (limit if early_stopping == "never" and alpha > 0 else length)
        if is_full and not any(score / far**alpha > finished[-1][0] for score, _ in alive[:1]):
            break
    return finished[:returned]


def plain_greedy(engine: ToyEngine, source: int, limit: int, ends: Collection[int] = (EOS,)) -> tuple[int, ...]:
    """Chooses the best token repeatedly."""
    tokens: tuple[int, ...] = ()
    while len(tokens) < limit and not (tokens and tokens[-1] in ends):
        gained = engine.continuations(source, tokens)
        tokens = (*tokens, gained.index(max(gained)))
    return tokens


VALUES = {
    "plain": [-0.25, -0.5, -0.75, -1.5, -1.1, -3.0],
    "impossible": [-0.25, -math.inf, -1.5, -math.inf],
    "equal": [-1.0],
    # What these differ by is lost in a sum of 64 bits, so that their ids decide.
    "absorbed": [-1e-20, -2e-20, -3e-20, -0.0],
}


def candidates(dice: random.Random, vocab: int, count: int, values: list[float]) -> tuple[list[int], list[float]]:
    """Draws the best candidates of a row from few values, so that many are equal, also between rows."""
    row = [-math.inf] * vocab if dice.random() < 0.04 else [dice.choice(values) for _ in range(vocab)]
    row = torch.tensor(row).tolist()  # of 32 bits
    ranked = sorted(range(vocab), key=lambda token: (-row[token], token))[:count]
    return ranked, [row[token] for token in ranked]
