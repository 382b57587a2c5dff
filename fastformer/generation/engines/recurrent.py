"""Decodes with a recurrent model: the recurrent state takes the place of a KV cache."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fastformer.generation.engines.base import Batch, Candidates, Engine, Prompt, Selection
from fastformer.generation.engines.sampling import choose
from fastformer.generation.inputs import pad
from fastformer.generation.model_protocols import (
    Model,
    Recurrent,
    RecurrentState,
    device_of,
    is_recurrent,
    why_not_by_modules,
)
from fastformer.nn import SequenceLayout


class RecurrentEngine(Engine):
    """Steps a `baseline.LSTMSeq2Seq`, or a model that decodes like one.

    Args:
        model: the model to decode.
        precision: the model's own precision, or None.
    """

    name: ClassVar[str] = "recurrent"

    def __init__(self, model: Model, precision: str | None = None) -> None:
        assert is_recurrent(model)
        self.model: Recurrent = model
        self.device = device_of(model)

    @classmethod
    def why_unsupported(cls, model: object, precision: str | None = None) -> str | None:
        """Returns a reason if the model isn't recurrent or doesn't compute in this precision, or None."""
        return why_not_by_modules(model, precision) if is_recurrent(model) else "it isn't recurrent"

    @property
    def token_bytes(self) -> int:
        """The bytes of one source token of a row: its encoder output, its attention scores and a share of the state."""
        return 4 * 4 * self.model.config.d_model

    def tokens_needed(self, prompt: Prompt, num_rows: int, new_tokens: int) -> int:
        """Returns the tokens of memory of a group, which holds the source once for each row."""
        return num_rows * len(prompt.source or ())

    def open(self, max_rows: int, num_tokens: int) -> Batch:
        return RecurrentBatch(self.model, self.device, num_tokens)


class RecurrentBatch(Batch):
    """A batch that holds the encoder's output, repeated for each row, and each row's state."""

    def __init__(self, model: Recurrent, device: torch.device, num_tokens: int) -> None:
        self.model, self.device, self._num_tokens = model, device, num_tokens
        self._rows: list[int] = []  # the number of rows in each group
        self._lengths: list[int] = []  # the length of each group's source
        self._memory: Tensor | None = None  # (rows, source_seqlen, d_model), zeros after each source
        self._mask: Tensor | None = None  # (rows, 1, source_seqlen), True = attend
        self._state: RecurrentState | None = None

    def prefill(self, prompts: Sequence[Prompt]) -> None:
        sources = [prompt.source or () for prompt in prompts]
        memory, mask, state = encode_padded(self.model, sources, self.device)
        state = self._read(prompts, memory, mask, state)
        if self._memory is not None and self._mask is not None and self._state is not None:
            width = max(memory.shape[1], self._memory.shape[1])
            memory = torch.cat([F.pad(m, (0, 0, 0, width - m.shape[1])) for m in (self._memory, memory)])
            mask = torch.cat([F.pad(m, (0, width - m.shape[2])) for m in (self._mask, mask)])
            state = (torch.cat([self._state[0], state[0]], 1), torch.cat([self._state[1], state[1]], 1))
        self._memory, self._mask, self._state = memory, mask, state
        self._rows += [1] * len(prompts)
        self._lengths += [len(source) for source in sources]

    def _read(self, prompts: Sequence[Prompt], memory: Tensor, mask: Tensor, state: RecurrentState) -> RecurrentState:
        """Returns the state after all tokens of the prompts except the last."""
        prefixes = [prompt.tokens[:-1] for prompt in prompts]
        hidden, cell = state[0].clone(), state[1].clone()
        for position in range(max(map(len, prefixes))):
            rows = [row for row, prefix in enumerate(prefixes) if len(prefix) > position]
            index = torch.tensor(rows, device=self.device)
            tokens = torch.tensor([[prefixes[row][position]] for row in rows], device=self.device)
            before = (hidden[:, index], cell[:, index])
            _, _, (hidden[:, index], cell[:, index]) = self.model.decode(tokens, memory[index], mask[index], before)
        return hidden, cell

    def step(self, tokens: Sequence[int], selection: Selection) -> Candidates:
        assert self._memory is not None and self._mask is not None and self._state is not None
        ids = torch.tensor(tokens, device=self.device)[:, None]
        hidden, _, self._state = self.model.decode(ids, self._memory, self._mask, self._state)
        return choose(self.model.output(hidden[:, -1]), selection)

    def fork(self, parents: Sequence[Sequence[int]]) -> None:
        assert self._memory is not None and self._mask is not None and self._state is not None
        starts = itertools.accumulate(self._rows, initial=0)
        rows = [first + place for first, places in zip(starts, parents, strict=False) for place in places]
        index, width = torch.tensor(rows, device=self.device), max(self._lengths)
        self._memory, self._mask = self._memory[index, :width], self._mask[index, :, :width]
        self._state = (self._state[0][:, index], self._state[1][:, index])
        self._rows = list(map(len, parents))

    def free(self, groups: Sequence[int]) -> None:
        leaving = set(groups)
        self._lengths = [length for group, length in enumerate(self._lengths) if group not in leaving]
        parents = [range(0 if group in leaving else rows) for group, rows in enumerate(self._rows)]
        if any(parents):
            self.fork(parents)
        else:
            self._memory = self._mask = self._state = None
        self._rows = [len(rows) for group, rows in enumerate(parents) if group not in leaving]

    def free_tokens(self) -> int:
        """Returns the number of tokens of memory that the rows' sources leave free."""
        return self._num_tokens - sum(rows * length for rows, length in zip(self._rows, self._lengths, strict=True))


def encode_padded(
    model: Recurrent, sources: Sequence[Sequence[int]], device: torch.device
) -> tuple[Tensor, Tensor, RecurrentState]:
    """Returns the encoder's output (rows, seqlen, d_model), its mask (rows, 1, seqlen; True = attend) and the state."""
    ids = pad(sources).to(device)
    seqlens = torch.tensor([len(source) for source in sources], device=device)
    memory, state = model.encode(ids, SequenceLayout.padded(seqlens, ids.shape[1]))
    return memory, (torch.arange(ids.shape[1], device=device) < seqlens[:, None])[:, None], state
