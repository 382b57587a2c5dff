"""The interfaces of engines and batches: an engine opens batches, and a batch steps rows that come and go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fastformer.checkpoints.hf.adapters import Adapter
from fastformer.generation.constraints import Mask
from fastformer.generation.native_search import NativeSearch
from fastformer.generation.search import Sample


class Prompt(NamedTuple):
    """The ids that a request begins with.

    Attributes:
        source: the ids that an encoder reads; None for a decoder-only model.
        tokens: the ids that the decoder begins with, at least one: the start token and a forced prefix, or the prompt
            of a language model. The last id is the input of the first step.
        adapter: the adapter with which the model reads and continues them; None: the model's own weights.
    """

    source: Sequence[int] | None
    tokens: Sequence[int]
    adapter: Adapter | None = None

    @property
    def num_tokens(self) -> int:
        """The number of ids, of the source and of the decoder together."""
        return len(self.source or ()) + len(self.tokens)


class KnownPrefix(NamedTuple):
    """The part of a prompt that a batch has in its cache.

    Attributes:
        cached: the number of the prompt's first tokens that are in the cache and are not read again.
        held: the number of cached tokens in memory that groups hold already, so that they need no further memory.
    """

    cached: int = 0
    held: int = 0


@dataclass(frozen=True)
class Selection:
    """The candidates that a step is to return for each row.

    Attributes:
        num_candidates: the number of tokens for each row, best first.
        log_probs: whether their values are log-probabilities. False allows logits, which saves the exponentials.
        logit_rows: the rows, in ascending order, that are sampled or whose logits are processed. The candidates of the
            other rows don't depend on logit_rows: they need not come from logits that a 16-bit model has rounded.
        process: edits the logits of logit_rows first, possibly in place: (len(logit_rows), vocab_size) fp32 in and out.
        samples: for each of logit_rows, the way to sample its token, or None to take the best tokens; None: no row is
            sampled. The first candidate of a sampled row is the token that was drawn, with its log-probability before
            warping; the best tokens follow it.
        masked_rows: the rows, in ascending order, that may only choose some tokens. A batch with takes_masks forbids
            the others before `process`; for any other batch, `process` forbids them, and the rows are in logit_rows.
        masks: for each of masked_rows, the tokens that it may choose: see `Matcher.fill`.
        keeps: for each of logit_rows, whether the output of `process` is returned without a log-softmax; None: False
            for all of them.
    """

    num_candidates: int
    log_probs: bool = True
    logit_rows: Sequence[int] = ()
    process: Callable[[Tensor], Tensor] | None = None
    samples: Sequence[Sample | None] | None = None
    keeps: Sequence[bool] | None = None
    masked_rows: Sequence[int] = ()
    masks: Mask | None = None


class Candidates(NamedTuple):
    """The candidates for the next token of each row, on the host, best first: ids and log-probabilities (or logits)."""

    ids: list[list[int]]
    values: list[list[float]]


class Readings(ABC):
    """What a batch has computed for some tokens of its rows (`DraftingBatch.read`)."""

    @abstractmethod
    def choose(self, tokens: Sequence[int], selection: Selection) -> Candidates:
        """Returns the candidates after one token of each row, as a step of these rows alone would.

        Args:
            tokens: the place of each row's token among the tokens that were read, in the order of the rows.
            selection: see `Batch.step`; its rows are these rows.
        """


class Limits(NamedTuple):
    """The limits of a run of several steps: it returns when it reaches any of them.

    Attributes:
        max_steps: the most steps; 0: the next step, which is taken all the same, needs a processor.
        seconds: the time after which no further step begins.
        min_rows: the run returns when fewer rows than this continue, counted by the peaks of their searches.
    """

    max_steps: int
    seconds: float
    min_rows: int


class Batch(ABC):
    """The requests that an engine decodes together.

    Rows 0, 1, 2, ... belong to groups, one for each request, in the order of their prefill. All rows of a group read
    one source and have the same length. The caller maintains the same list of groups.

    Memory is counted in tokens: those of a group's source, its prompt and each of its rows.

    Attributes:
        takes_masks: whether steps forbid the tokens that `Selection.masks` forbid.
    """

    takes_masks: ClassVar[bool] = False

    @abstractmethod
    def prefill(self, prompts: Sequence[Prompt]) -> Sequence[int] | None:
        """Appends a group of one row for each prompt, and reads the sources, and the prompts except their last token.

        Returns:
            For each prompt, the number of tokens that were not read because the batch had them in its cache
            (`Engine.reuses_prefixes`); None: all tokens were read.
        """

    def known_prefix(self, prompt: Prompt) -> KnownPrefix:
        """Returns the part of a prompt that `prefill` would find in the cache."""
        return KnownPrefix()

    @abstractmethod
    def step(self, tokens: Sequence[int], selection: Selection) -> Candidates:
        """Appends a token to each row, and returns the candidates for the token after it.

        Args:
            tokens: the next token of each row.
            selection: the candidates to return.
        """

    @abstractmethod
    def fork(self, parents: Sequence[Sequence[int]]) -> None:
        """Replaces the rows of each group by continuations of its rows.

        Args:
            parents: for each group, for each of its new rows, the index in the group of the row that it continues. A
                group may grow or shrink; it keeps at least one row.
        """

    @abstractmethod
    def free(self, groups: Sequence[int]) -> None:
        """Removes groups and frees their memory; later groups move up."""

    def is_current(self) -> bool:
        """Returns whether the batch's memory still has the form in which the model computes. The batch is empty."""
        return True

    def free_tokens(self) -> int:
        """Returns the number of free tokens of memory, including the cached prompts of requests that have left."""
        return 0

    def shared_tokens(self) -> int:
        """Returns the number of tokens of memory that groups save by sharing."""
        return 0

    def step_tokens(self) -> int:
        """Returns the number of tokens of memory that the next step takes."""
        return 0


class SearchingBatch(Batch):
    """A batch that takes many steps in one call, for requests whose searches live in C++."""

    @abstractmethod
    def run_searches(
        self, searches: Sequence[NativeSearch], tokens: Sequence[int], log_probs: bool, limits: Limits
    ) -> list[int]:
        """Repeats these operations: steps the rows, advances the searches, and forks the rows.

        It returns when all searches are done, at its limits, or when the next step would take more memory than is free
        (`step_tokens`, `free_tokens`); it may return as soon as one search is done. Each row takes at least one step,
        or none does if the batch can't run these searches.
        The group of a search that is done keeps rows, whose contents are undefined, until it is freed.

        Args:
            searches: a search for each group, all distinct; none of them is done.
            tokens: the next token of each row.
            log_probs: see `Selection`.
            limits: see `Limits`.

        Returns:
            The number of steps that each group took.
        """


class DraftingBatch(SearchingBatch):
    """A batch that reads several tokens of a row at once, so that drafts of them cost little more than one token."""

    @abstractmethod
    def read(self, tokens: Sequence[int], counts: Sequence[int], selection: Selection) -> Readings:
        """Appends several tokens to rows, in one pass over the weights: the first one, and drafts of what follows it.

        The candidates after each token are those of as many steps of one token each, bit for bit.

        Args:
            tokens: the tokens of each row, row by row.
            counts: for each group, the number of tokens of each of its rows; 0 leaves the group as it is.
            selection: the candidates to compute. Its logit_rows are places of `tokens`; nothing is processed or sampled
                before `Readings.choose`.
        """

    @abstractmethod
    def draft(
        self,
        tokens: Sequence[int],
        counts: Sequence[int],
        chances: Sequence[float],
        least: Sequence[Sequence[float]],
    ) -> list[tuple[list[int], list[int]]]:
        """Appends several tokens to rows, as `read` does, and then the best token after them, again and again.

        Args:
            tokens, counts: see `read`; a group with a count has one row.
            chances: the logarithm of the chance that a drafted token is right, for equal parts of the range of its
                probability.
            least: for each group, for each token that its draft may have, the sum of chances up to it that the draft
                needs to go on.

        Returns:
            For each group, its draft, and the index of the chance of each token. The last token, which may be one too
            many, was not appended.
        """

    @abstractmethod
    def cut(self, counts: Sequence[int]) -> None:
        """Removes the last counts[i] tokens of each row of group i.

        They are tokens that steps or `read` have appended, but not the first of those since the prefill or a fork.
        """


class Engine(ABC):
    """A way to decode a model in a precision, for which `why_unsupported` has returned None.

    Attributes:
        name: the engine's name in `generate(..., engine=)`.
        device: the model's device.
        block_size: the number of tokens in a block of memory; None: the engine's memory isn't worth counting.
        cache_dtypes: the values of `cache_dtype` that the engine has. A class with any is called with one of them, or
            None, as its third argument.
    """

    name: ClassVar[str]
    cache_dtypes: ClassVar[tuple[str, ...]] = ()
    device: torch.device
    block_size: int | None = None

    @classmethod
    @abstractmethod
    def why_unsupported(cls, model: object, precision: str | None = None) -> str | None:
        """Returns the reason why the engine can't decode this model in this precision, or None if it can.

        A precision of None is the model's own.
        """

    @property
    def token_bytes(self) -> int:
        """The bytes of a token of memory; 0 if the engine's memory isn't worth counting."""
        return 0

    def tokens_needed(self, prompt: Prompt, num_rows: int, new_tokens: int) -> int:
        """Returns the most tokens of memory that a group takes when each of its rows has new_tokens new tokens.

        A group that loses rows and later grows to as many rows again may take more. Memory is taken in whole blocks; a
        row's own tokens begin at the end of the prompt, which may be in the middle of one.
        """
        size = self.block_size
        if size is None:
            return 0
        of_rows = num_rows * (-(-new_tokens // size) + 1)
        return (-(-len(prompt.source or ()) // size) + -(-len(prompt.tokens) // size) + of_rows) * size

    def runs_searches(self) -> bool:
        """Returns whether the engine's batches are `SearchingBatch`es, which advance native searches themselves."""
        return False

    @property
    def step_bytes(self) -> int:
        """The bytes of weights that a step reads, if batches are `DraftingBatch`es; else 0."""
        return 0

    def reuses_prefixes(self) -> bool:
        """Returns whether the engine's batches read the common beginning of prompts only once.

        A batch keeps that beginning in its cache after the prompts have left, until another group takes the memory.
        """
        return False

    def add_adapter(self, name: str, adapter: Adapter) -> None:
        """Adds an adapter of the model, or replaces that of the same name.

        Args:
            name: the name by which requests choose it.
            adapter: the adapter.

        Raises:
            ValueError: the engine can't run requests with adapters of their own.
        """
        raise ValueError(
            f"expected the engine 'cpp' for the adapter {name!r}, got {self.name!r}, which has no adapters"
        )

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters that were added."""
        return ()

    def adapter(self, name: str) -> Adapter:
        """Returns the adapter of a name.

        Raises:
            ValueError: there is none of this name.
        """
        known = ", ".join(map(repr, self.adapters)) or "there is none"
        raise ValueError(f"expected the name of an adapter that was loaded ({known}), got {name!r:.60}")

    def limit_to(self, shortlist: Sequence[int]) -> bool:
        """Makes batches that are opened from now on compute the logits of only some tokens.

        Args:
            shortlist: the ids of these tokens, in ascending order; the logits of other tokens are -inf.

        Returns:
            Whether the engine can do so. If not, the caller has to forbid the other tokens itself.
        """
        return False

    @abstractmethod
    def open(self, max_rows: int, num_tokens: int) -> Batch:
        """Opens a batch without rows.

        Drop the previous batch first: there may not be enough memory for two.

        Args:
            max_rows, num_tokens: the numbers of rows and of tokens that the batch has memory for.
        """
