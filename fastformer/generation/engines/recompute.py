"""Decodes without a cache: everything is recomputed for each new token.

Its tokens are the same as those of `kv_cache`. It is the simplest engine, a reference for tests and measurements of the
others, and the engine of `generate(..., use_cache=False)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from fastformer.generation.engines.base import Batch, Candidates, Prompt, Selection
from fastformer.generation.engines.kv_cache import ModuleEngine, choose_from_hidden, decode_whole
from fastformer.generation.model_protocols import DecoderOnly, EncoderDecoder


class RecomputeEngine(ModuleEngine):
    """Runs the whole model over all tokens for each new token; see `ModuleEngine`."""

    name: ClassVar[str] = "recompute"

    def open(self, max_rows: int, num_tokens: int) -> Batch:
        return RecomputeBatch(self.model, self.device)


class RecomputeBatch(Batch):
    """A batch that holds only the ids of each row, and no computed state."""

    def __init__(self, model: EncoderDecoder | DecoderOnly, device: torch.device) -> None:
        self.model, self.device = model, device
        self.sources: list[Sequence[int]] = []  # the source of each group
        self.rows: list[list[list[int]]] = []  # for each group, the tokens of each row without the next one

    def prefill(self, prompts: Sequence[Prompt]) -> None:
        self.sources += [prompt.source or () for prompt in prompts]
        self.rows += [[list(prompt.tokens[:-1])] for prompt in prompts]

    def step(self, tokens: Sequence[int], selection: Selection) -> Candidates:
        rows = [row for group in self.rows for row in group]
        for row, token in zip(rows, tokens, strict=True):
            row.append(token)
        sources = [source for source, group in zip(self.sources, self.rows, strict=True) for _ in group]
        hidden, layout = decode_whole(self.model, sources, rows, self.device)
        assert layout.cu_seqlens is not None
        return choose_from_hidden(self.model, hidden[layout.cu_seqlens[1:].long() - 1], selection)

    def fork(self, parents: Sequence[Sequence[int]]) -> None:
        self.rows = [[list(rows[i]) for i in places] for rows, places in zip(self.rows, parents, strict=True)]

    def free(self, groups: Sequence[int]) -> None:
        leaving = set(groups)
        self.sources = [source for i, source in enumerate(self.sources) if i not in leaving]
        self.rows = [rows for i, rows in enumerate(self.rows) if i not in leaving]
