"""A language of five tokens that is small enough to enumerate, and searches over it written the plain way."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import ClassVar

import torch

from fastformer.generation.engines import Candidates, Prompt, Selection
from fastformer.generation.engines.choice import choose

VOCAB, EOS = 5, 1

Hypothesis = tuple[float, tuple[int, ...]]  # score, tokens


class ToyEngine:
    """A language whose probabilities depend on the last two tokens; the source [i] has the i-th table."""

    name: ClassVar[str] = "toy"
    token_bytes, device = 0, torch.device("cpu")

    def __init__(self, sources: int, *, eos: float = 0.0, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(sources + 1000 * seed)
        self.table = torch.randn(sources, VOCAB, VOCAB, VOCAB, generator=generator) * 1.5
        self.table[..., EOS] += eos
        self.start(0, 0)

    @classmethod
    def why_unsupported(cls, model: object) -> str | None:
        return None

    def start(self, max_rows: int, num_tokens: int) -> None:
        self.groups: list[list[list[int]]] = []  # of each row its source, and what was said

    def admit(self, prompts: Sequence[Prompt]) -> None:
        self.groups += [[[*(prompt.source or ()), 0, *prompt.tokens[:-1]]] for prompt in prompts]

    def step(self, tokens: Sequence[int], selection: Selection) -> Candidates:
        rows = [row for group in self.groups for row in group]
        for row, token in zip(rows, tokens, strict=True):
            row.append(token)
        return choose(torch.stack([self.table[row[0], row[-2], row[-1]] for row in rows]), selection)

    def reorder(self, parents: Sequence[Sequence[int]]) -> None:
        self.groups = [[list(rows[i]) for i in own] for rows, own in zip(self.groups, parents, strict=True)]

    def release(self, groups: Sequence[int]) -> None:
        self.groups = [rows for i, rows in enumerate(self.groups) if i not in groups]

    def tokens_needed(self, prompt: Prompt, num_rows: int, new_tokens: int) -> int:
        return 0

    def free_tokens(self) -> int:
        return 0

    def step_tokens(self) -> int:
        return 0

    def score(self, source: int, sequence: tuple[int, ...]) -> float:
        """The log-probability of a sequence."""
        score, before, last = 0.0, 0, 0
        for token in sequence:
            score += float(self.table[source, before, last].log_softmax(-1)[token])
            before, last = last, token
        return score

    def continuations(self, source: int, sequence: tuple[int, ...]) -> list[float]:
        """The log-probability of each next token."""
        before, last = (0, 0, *sequence)[-2:]
        return self.table[source, before, last].log_softmax(-1).tolist()


def penalty(length: int, alpha: float) -> float:
    return ((5 + length) / 6) ** alpha


def every_hypothesis(engine: ToyEngine, source: int, limit: int, alpha: float) -> list[Hypothesis]:
    """All sequences of up to `limit` tokens that there are: the finished ones, best first, then the cut ones."""
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


def plain_beam_search(
    engine: ToyEngine, source: int, limit: int, beams: int, alpha: float, returned: int, early_stopping: bool
) -> list[Hypothesis]:
    """Beam search with lists: 2 * beams candidates a step, those that end apart from those that go on."""
    alive: list[Hypothesis] = [(0.0, ())]
    finished: list[Hypothesis] = []
    for length in range(1, limit + 1):
        candidates = [
            (score + gained, (*sequence, token))
            for score, sequence in alive
            for token, gained in enumerate(engine.continuations(source, sequence))
            if gained > -math.inf
        ]
        candidates = sorted(candidates, reverse=True)[: 2 * beams]
        ended = [(score / penalty(length, alpha), tokens) for score, tokens in candidates if tokens[-1] == EOS]
        finished = sorted(finished + ended, reverse=True)[:beams]
        alive = [hypothesis for hypothesis in candidates if hypothesis[1][-1] != EOS][:beams]
        if early_stopping and len(finished) == beams:
            return finished[:returned]
        bound = alive[0][0] / max(penalty(n, alpha) for n in (1, limit)) if alive else -math.inf
        if not early_stopping and len(finished) >= returned and finished[returned - 1][0] >= bound:
            return finished[:returned]
    cut = [(score / penalty(limit, alpha), tokens) for score, tokens in alive]
    return (finished + cut)[:returned]
