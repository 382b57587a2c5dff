"""What decoding drives: an engine steps rows of tokens that come and go, and says what may follow each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fastformer.generation.native_search import NativeSearch


class Prompt(NamedTuple):
    """What a request begins with.

    Attributes:
        source: the ids that an encoder reads; None for a decoder-only model.
        tokens: the ids that the decoder has behind it, at least one: the start token and a forced prefix, or the prompt
            of a language model. The last of them is what the first step is given.
    """

    source: Sequence[int] | None
    tokens: Sequence[int]


class Draw(NamedTuple):
    """How a row's next token is drawn: from the warped distribution, at `uniform` in [0, 1) of its cumulative sum."""

    temperature: float
    top_k: int
    top_p: float
    uniform: float


@dataclass(frozen=True)
class Selection:
    """What a step is to return for each row.

    Attributes:
        num_candidates: the best so many tokens.
        log_probs: their log-probabilities; without, their logits will do, which costs no exponentials.
        logit_rows: the rows, upward, that are drawn or whose logits are edited. What is found for the others doesn't
            depend on whether there are such rows: it need not come from logits that a 16-bit model has rounded.
        process: edits the logits of logit_rows first, also in place: (len(logit_rows), vocab_size) fp32 in and out. An
            engine that can't show its logits says so in `why_unsupported`.
        draws: for each of logit_rows how to draw its token, or None to take the best ones; None: no row draws. A drawn
            row has one candidate, with its log-probability before warping.
        keeps: for each of logit_rows whether what `process` gives are the values, of which no log-probabilities are to
            be made; None: no row's.
    """

    num_candidates: int
    log_probs: bool = True
    logit_rows: Sequence[int] = ()
    process: Callable[[Tensor], Tensor] | None = None
    draws: Sequence[Draw | None] | None = None
    keeps: Sequence[bool] | None = None


class Candidates(NamedTuple):
    """What may follow each row, on the host, best first: ids and their log-probabilities (or logits)."""

    ids: list[list[int]]
    values: list[list[float]]


class Engine(Protocol):
    """A model that decodes many requests at once.

    Its rows 0, 1, 2, ... belong to groups, one a request, which stand side by side in the order of their admission. All
    rows of a group read one source and have the same length. Whoever drives it keeps the same list.

    One is made of a model and a precision, for which `why_unsupported` has given None.

    Memory is counted in tokens: what a group takes for its source, its prompt and each of its rows.

    Attributes:
        name: what `generate(..., engine=)` calls it.
        token_bytes: what a token of memory costs; 0 where memory isn't worth counting.
    """

    name: ClassVar[str]

    @classmethod
    def why_unsupported(cls, model: object, precision: str | None = None) -> str | None:
        """Why it can't decode this model in this precision (None: what the model says); None when it can."""
        ...

    @property
    def token_bytes(self) -> int:
        """See the class."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        ...

    def start(self, max_rows: int, num_tokens: int) -> None:
        """Begins with no rows, and with memory for so many rows and tokens."""
        ...

    def admit(self, prompts: Sequence[Prompt]) -> None:
        """Appends a group of one row for each prompt: reads the sources, and the prompts up to their last token."""
        ...

    def step(self, tokens: Sequence[int], selection: Selection) -> Candidates:
        """Appends a token to each row, and says what may follow.

        Args:
            tokens: the next token of each row.
            selection: what to return.
        """
        ...

    def reorder(self, parents: Sequence[Sequence[int]]) -> None:
        """Gives groups other rows.

        Args:
            parents: for each group, for each of its new rows, which of its rows it goes on from. A group may grow or
                shrink; it keeps at least one row.
        """
        ...

    def release(self, groups: Sequence[int]) -> None:
        """Lets groups go, whose memory is free then; later groups move up."""
        ...

    def tokens_needed(self, prompt: Prompt, num_rows: int, new_tokens: int) -> int:
        """How many tokens of memory a group takes at most when its rows have so many new tokens.

        A group that loses rows and has as many again later may take more.
        """
        ...

    def free_tokens(self) -> int:
        """How many tokens of memory are free."""
        ...

    def step_tokens(self) -> int:
        """How many tokens of memory the next step takes."""
        ...


class ShortlistEngine(Protocol):
    """An engine that computes the logits of some tokens alone, where it is asked to."""

    def set_shortlist(self, ids: Sequence[int]) -> None:
        """From the next `start` on, only these ids, different ones and upward, may follow; those of others are -inf."""
        ...


class SearchingEngine(Engine, Protocol):
    """An engine that also takes many steps in one call, for requests whose searches live in C++."""

    def run(
        self,
        searches: Sequence[NativeSearch],
        tokens: Sequence[int],
        *,
        log_probs: bool,
        max_steps: int,
        seconds: float,
        least_rows: int,
    ) -> list[int]:
        """Steps its rows, advances the searches, and reorders the rows, again and again.

        It returns when all searches are done, when so few go on that others should come, after max_steps, when the time
        is over, or when the next step would take more memory than there is (`step_tokens`, `free_tokens`); it may
        return as soon as one is done. Each row that isn't done takes one step at least. The group of a search that is
        done keeps rows, of which nobody asks anything, until it is released.

        Args:
            searches: of each group, a different one; none of them is done.
            tokens: the next token of each row.
            log_probs: see `Selection`.
            max_steps: at least 1.
            seconds: after which it begins no further step.
            least_rows: with less than this it returns, counted by the peaks of the searches that go on.

        Returns:
            How many steps each group took.
        """
        ...


def is_shortlist_engine(engine: object) -> TypeGuard[ShortlistEngine]:
    """Whether an engine can keep to a shortlist itself. (isinstance on a Protocol would look at each method.)"""
    return hasattr(engine, "set_shortlist")


def is_searching_engine(engine: object) -> TypeGuard[SearchingEngine]:
    """Whether an engine takes many steps in one call."""
    return hasattr(engine, "run")
