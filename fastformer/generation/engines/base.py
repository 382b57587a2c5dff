"""What decoding drives: an engine opens batches, and a batch steps rows of tokens that come and go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fastformer.generation.native_search import NativeSearch


class Prompt(NamedTuple):
    """What a request begins with.

    Attributes:
        source: the ids that an encoder reads; None for a decoder-only model.
        tokens: the ids that the decoder begins with, at least one: the start token and a forced prefix, or the prompt
            of a language model. The last of them is the input of the first step.
    """

    source: Sequence[int] | None
    tokens: Sequence[int]

    @property
    def num_tokens(self) -> int:
        """The ids of the source and of the decoder."""
        return len(self.source or ()) + len(self.tokens)


class KnownPrefix(NamedTuple):
    """What of a prompt a batch has already.

    Attributes:
        cached: how many of its first tokens, which it does not read again.
        held: how many of those are in memory that groups hold, so that they take none.
    """

    cached: int = 0
    held: int = 0


class Sample(NamedTuple):
    """How a row's next token is sampled: at `uniform`, in [0, 1), of the warped distribution's cumulative sum."""

    temperature: float
    top_k: int
    top_p: float
    uniform: float


@dataclass(frozen=True)
class Selection:
    """What a step returns for each row.

    Attributes:
        num_candidates: how many tokens, the best first.
        log_probs: their values are log-probabilities. If False, logits will do, which saves the exponentials.
        logit_rows: the rows, in ascending order, that are sampled or whose logits are processed. The candidates of the
            other rows don't depend on whether there are such rows: they need not come from logits that a 16-bit model
            has rounded.
        process: edits the logits of logit_rows first, also in place: (len(logit_rows), vocab_size) fp32 in and out.
        samples: for each of logit_rows how its token is sampled, or None to take the best ones; None: no row is
            sampled. The first candidate of a sampled row is the token that was drawn, with its log-probability before
            warping; the best ones stand behind it.
        keeps: for each of logit_rows whether the output of `process` is returned as it is, without a log-softmax;
            None: no row's.
    """

    num_candidates: int
    log_probs: bool = True
    logit_rows: Sequence[int] = ()
    process: Callable[[Tensor], Tensor] | None = None
    samples: Sequence[Sample | None] | None = None
    keeps: Sequence[bool] | None = None


class Candidates(NamedTuple):
    """What may follow each row, on the host, best first: ids and their log-probabilities (or logits)."""

    ids: list[list[int]]
    values: list[list[float]]


class Limits(NamedTuple):
    """When a run of several steps returns at the latest.

    Attributes:
        max_steps: after so many steps, at least 1.
        seconds: no step begins after so long.
        min_rows: when fewer rows go on, counted by the peaks of their searches.
    """

    max_steps: int
    seconds: float
    min_rows: int


class Work(Protocol):
    """The requests that a batch decodes, one for each group, in the order of the groups."""

    def next_tokens(self) -> list[int]:
        """The next token of each row."""

    def selection(self) -> Selection:
        """What the requests need to know of the next step."""

    def advance(self, candidates: Candidates) -> tuple[list[int], list[list[int]] | None]:
        """Takes in a step.

        Returns:
            The places of the requests that leave the batch; and for each that stays the parents of its rows, or None
            where all rows go on from themselves.
        """

    def wants_log_probs(self) -> bool:
        """Whether a request needs log-probabilities; see `Selection`."""

    def native_searches(self) -> list[NativeSearch] | None:
        """The searches of all requests where C++ code can advance each of them; else None."""

    def native_tokens(self, searches: Sequence[NativeSearch]) -> list[int]:
        """`next_tokens`, from the native searches of all requests."""

    def take_steps(self, searches: Sequence[NativeSearch], steps: Sequence[int]) -> list[int]:
        """Takes in a run that has advanced the native searches of all requests by so many steps each.

        Returns:
            The places of the requests that leave the batch.
        """


class Batch(ABC):
    """Requests that an engine decodes together.

    Rows 0, 1, 2, ... belong to groups, one for each request, in the order of their prefill. All rows of a group read
    one source and have the same length. The caller keeps the same list of groups.

    Memory is counted in tokens: what a group takes for its source, its prompt and each of its rows.
    """

    @abstractmethod
    def prefill(self, prompts: Sequence[Prompt]) -> Sequence[int] | None:
        """Appends a group of one row for each prompt: reads the sources, and the prompts up to their last token.

        Returns:
            How many tokens of each prompt were not read, because the batch had them (`Engine.reuses_prefixes`); None:
            all were read.
        """

    def known_prefix(self, prompt: Prompt) -> KnownPrefix:
        """What `prefill` would find of a prompt."""
        return KnownPrefix()

    @abstractmethod
    def step(self, tokens: Sequence[int], selection: Selection) -> Candidates:
        """Appends a token to each row, and returns what may follow.

        Args:
            tokens: the next token of each row.
            selection: what to return.
        """

    @abstractmethod
    def fork(self, parents: Sequence[Sequence[int]]) -> None:
        """Gives groups other rows.

        Args:
            parents: for each group, for each of its new rows, which of its rows it goes on from. A group may grow or
                shrink; it keeps at least one row.
        """

    @abstractmethod
    def free(self, groups: Sequence[int]) -> None:
        """Removes groups and frees their memory; later groups move up."""

    def free_tokens(self) -> int:
        """How many tokens of memory are free. Those of prompts that have left, and may come again, count as free."""
        return 0

    def shared_tokens(self) -> int:
        """How many tokens of memory groups save by sharing: without, they would take so many more."""
        return 0

    def step_tokens(self) -> int:
        """How many tokens of memory the next step takes."""
        return 0

    def run(self, work: Work, limits: Limits) -> list[int]:
        """Steps the rows, at least once, and frees the groups whose requests leave; here one step, searched in Python.

        Args:
            work: the requests of the groups.
            limits: when to return at the latest.

        Returns:
            The places of the groups that were freed.
        """
        leaving, parents = work.advance(self.step(work.next_tokens(), work.selection()))
        if leaving:
            self.free(leaving)
        if parents is not None:
            self.fork(parents)
        return leaving


class SearchingBatch(Batch):
    """A batch that takes many steps in one call, for requests whose searches live in C++."""

    @abstractmethod
    def run_searches(
        self, searches: Sequence[NativeSearch], tokens: Sequence[int], log_probs: bool, limits: Limits
    ) -> list[int]:
        """Steps the rows, advances the searches, and forks the rows, again and again.

        It returns when all searches are done, at its limits, or when the next step would take more memory than there is
        (`step_tokens`, `free_tokens`); it may return as soon as one search is done. Each row takes one step at least.
        The group of a search that is done keeps rows, whose contents don't matter, until it is freed.

        Args:
            searches: of each group, a different one; none of them is done.
            tokens: the next token of each row.
            log_probs: see `Selection`.
            limits: see the class.

        Returns:
            How many steps each group took.
        """

    def run(self, work: Work, limits: Limits) -> list[int]:
        """As many steps as the limits allow where all searches are native, else one."""
        searches = work.native_searches()
        if searches is None:
            return super().run(work, limits)
        steps = self.run_searches(searches, work.native_tokens(searches), work.wants_log_probs(), limits)
        leaving = work.take_steps(searches, steps)
        if leaving:
            self.free(leaving)
        return leaving


class Engine(ABC):
    """A way to decode a model in a precision, for which `why_unsupported` has returned None.

    Attributes:
        name: what `generate(..., engine=)` calls it.
        device: where the model is.
    """

    name: ClassVar[str]
    device: torch.device

    @classmethod
    @abstractmethod
    def why_unsupported(cls, model: object, precision: str | None = None) -> str | None:
        """Why it can't decode this model in this precision (None: the model's own); None when it can."""

    @property
    def token_bytes(self) -> int:
        """What a token of memory costs; 0 where memory isn't worth counting."""
        return 0

    def tokens_needed(self, prompt: Prompt, num_rows: int, new_tokens: int) -> int:
        """How many tokens of memory a group takes at most when its rows have so many new tokens.

        A group that loses rows and has as many again later may take more.
        """
        return 0

    def runs_searches(self) -> bool:
        """Whether its batches advance native searches themselves: they are `SearchingBatch`es."""
        return False

    def reuses_prefixes(self) -> bool:
        """Whether its batches read once what prompts have in common from their first token on.

        A batch keeps it when its prompts have left, as long as no other group takes the memory.
        """
        return False

    def limit_to(self, shortlist: Sequence[int]) -> bool:
        """Has the batches that are opened from now on compute the logits of some tokens only.

        Args:
            shortlist: the ids, in ascending order; the logits of others are -inf.

        Returns:
            Whether it can. If not, the caller has to forbid the other tokens by itself.
        """
        return False

    @abstractmethod
    def open(self, max_rows: int, num_tokens: int) -> Batch:
        """A batch without rows.

        Drop the batch before first: there may be no memory for two.

        Args:
            max_rows, num_tokens: what it has memory for.
        """
