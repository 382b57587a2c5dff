"""What a search drives: tokens in, scores of the next ones out, and a cache that follows the rows.

The rungs of the ladder are one engine with four memories; all give the same scores, each at less cost than the last:

    naive         encoder and decoder run over everything for each new token
    encoder_once  the encoder runs once
    cross_cached  and the keys and values of cross-attention are computed once
    cached        and those of self-attention are kept: a step computes one token
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastformer.nn import KVCache, SequenceLayout

RUNGS = ("naive", "encoder_once", "cross_cached", "cached")
PAD_ID = 0


class TransformerEngine:
    """Steps an encoder-decoder model.

    Args:
        model: a `models.Transformer`, or anything with its `encode`, `decode`, `logits`, `new_cache`.
        source: (num_sources, source_seqlen) ids, right-padded.
        layout: of the source.
        beams: rows per source; row r decodes source r // beams.
        max_new_tokens: tokens that a row may get.
        rung: one of RUNGS.
    """

    def __init__(
        self, model: Any, source: Tensor, layout: SequenceLayout, beams: int, max_new_tokens: int, rung: str = "cached"
    ) -> None:
        if rung not in RUNGS:
            raise ValueError(f"expected a rung out of {RUNGS}, got {rung!r}")
        self.model, self.rung, self.beams = model, rung, beams
        self.source, self.layout = source, layout
        self.rows = source.shape[0] * beams
        self.tokens = source.new_empty((self.rows, 0))
        self.memory = None if rung == "naive" else model.encode(source, layout)
        self.cache: KVCache | None = None
        if rung in ("cross_cached", "cached"):
            self.cache = model.new_cache(self.rows, max_new_tokens, self.memory, memory_layout=layout)

    def first_tokens(self) -> Tensor:
        """(rows,) what decoding begins with."""
        return torch.full((self.rows,), PAD_ID, dtype=torch.long, device=self.source.device)

    def step(self, tokens: Tensor) -> Tensor:
        """Appends a token to each row. (rows,) ids -> (rows, vocab_size) fp32 logits of the next one."""
        if self.rung == "cached":
            hidden = self.model.decode(tokens[:, None], None, cache=self.cache)
            return self.model.logits(hidden[:, -1]).float()
        self.tokens = torch.cat((self.tokens, tokens[:, None]), dim=1)
        if self.rung == "cross_cached":
            assert self.cache is not None
            self.cache.seqlens.zero_()
            self.cache.length_bound = 0
            hidden = self.model.decode(self.tokens, None, cache=self.cache)
        else:
            if self.rung == "naive":
                self.memory = self.model.encode(self.source, self.layout)
            assert self.memory is not None
            memory = self.memory.repeat_interleave(self.beams, 0)
            seqlens = self.layout.seqlens.repeat_interleave(self.beams, 0)
            layout = SequenceLayout.padded(seqlens, self.layout.max_seqlen)
            hidden = self.model.decode(self.tokens, memory, memory_layout=layout)
        return self.model.logits(hidden[:, -1]).float()

    def reorder(self, index: Tensor) -> None:
        """Row i goes on from what row index[i] was; both belong to one source, whose memory stays where it is."""
        self.tokens = self.tokens[index]
        if self.cache is not None:
            self.cache.reorder(index)

    def select(self, sources: Tensor) -> None:
        """Keeps some sources and their rows: what is finished leaves the batch."""
        rows = (sources[:, None] * self.beams + torch.arange(self.beams, device=sources.device)).flatten()
        self.tokens, self.source, self.rows = self.tokens[rows], self.source[sources], len(rows)
        self.layout = SequenceLayout.padded(self.layout.seqlens[sources], self.layout.max_seqlen)
        if self.memory is not None:
            self.memory = self.memory[sources]
        if self.cache is not None:
            self.cache.select(rows)


class RecurrentEngine:
    """Steps a recurrent encoder-decoder such as `baseline.LSTMSeq2Seq`; its state is the cache.

    Args:
        model: with `encode(source, layout) -> (memory, state)`, `decode(target, memory, mask, state)` and `output`.
        source: (num_sources, source_seqlen) ids, right-padded.
        layout: of the source.
        beams: rows per source.
        max_new_tokens: not needed.
        rung: "cached"; there is no other way.
    """

    def __init__(
        self, model: Any, source: Tensor, layout: SequenceLayout, beams: int, max_new_tokens: int, rung: str = "cached"
    ) -> None:
        if rung != "cached":
            raise ValueError(f"expected rung cached for a recurrent model, which keeps a state, got {rung!r}")
        self.model, self.beams = model, beams
        memory, state = model.encode(source, layout)
        seen = torch.arange(source.shape[1], device=source.device) < layout.seqlens[:, None]
        self.memory = memory.repeat_interleave(beams, 0)
        self.mask = seen[:, None].repeat_interleave(beams, 0)
        self.state = tuple(part.repeat_interleave(beams, 1) for part in state)  # (num_layers, rows, dim)

    def first_tokens(self) -> Tensor:
        """(rows,) what decoding begins with."""
        return torch.full((len(self.memory),), PAD_ID, dtype=torch.long, device=self.memory.device)

    def step(self, tokens: Tensor) -> Tensor:
        """Appends a token to each row. (rows,) ids -> (rows, vocab_size) fp32 logits of the next one."""
        hidden, _, self.state = self.model.decode(tokens[:, None], self.memory, self.mask, self.state)
        return self.model.output(hidden[:, -1]).float()

    def reorder(self, index: Tensor) -> None:
        """Row i goes on from what row index[i] was; both belong to one source, whose memory stays where it is."""
        self.state = tuple(part[:, index] for part in self.state)

    def select(self, sources: Tensor) -> None:
        """Keeps some sources and their rows: what is finished leaves the batch."""
        rows = (sources[:, None] * self.beams + torch.arange(self.beams, device=sources.device)).flatten()
        self.memory, self.mask = self.memory[rows], self.mask[rows]
        self.reorder(rows)


class GPTEngine:
    """Steps a decoder-only model behind its prompts.

    Args:
        model: a `models.GPT`, or anything with its `decode`, `logits`, `new_cache`.
        prompt: (num_prompts, prompt_seqlen) ids, right-padded, none empty.
        layout: of the prompts.
        beams: rows per prompt.
        max_new_tokens: tokens that a row may get.
        rung: "naive" (everything again for each token) or "cached".
    """

    def __init__(
        self, model: Any, prompt: Tensor, layout: SequenceLayout, beams: int, max_new_tokens: int, rung: str = "cached"
    ) -> None:
        if rung not in ("naive", "cached"):
            raise ValueError(f"expected rung naive or cached for a decoder-only model, got {rung!r}")
        self.model, self.rung, self.beams = model, rung, beams
        self.rows = prompt.shape[0] * beams
        self.seqlens = layout.seqlens.repeat_interleave(beams).long()
        self.cache: KVCache | None = None
        # The last token of each prompt is what the search feeds first; the others are read here.
        at = (layout.seqlens.long() - 1)[:, None]
        self._first = prompt.gather(1, at).flatten().repeat_interleave(beams)
        width = prompt.shape[1]
        self.tokens = torch.cat((prompt, prompt.new_zeros((len(prompt), max_new_tokens))), 1).repeat_interleave(
            beams, 0
        )
        self.seqlens -= 1
        if rung == "cached":
            self.cache = model.new_cache(self.rows, width + max_new_tokens)
            if width > 1:
                before = SequenceLayout.padded(self.seqlens, width)
                model.decode(prompt.repeat_interleave(beams, 0), layout=before, cache=self.cache)

    def first_tokens(self) -> Tensor:
        """(rows,) the last token of each prompt."""
        return self._first

    def step(self, tokens: Tensor) -> Tensor:
        """Appends a token to each row. (rows,) ids -> (rows, vocab_size) fp32 logits of the next one."""
        if self.cache is not None:
            return self.model.logits(self.model.decode(tokens[:, None], cache=self.cache)[:, -1]).float()
        self.tokens.scatter_(1, self.seqlens[:, None], tokens[:, None])
        self.seqlens += 1
        width = int(self.seqlens.max())
        hidden = self.model.decode(self.tokens[:, :width], layout=SequenceLayout.padded(self.seqlens, width))
        last = hidden[torch.arange(self.rows, device=hidden.device), self.seqlens - 1]
        return self.model.logits(last).float()

    def reorder(self, index: Tensor) -> None:
        """Row i goes on from what row index[i] was."""
        self.tokens, self.seqlens = self.tokens[index], self.seqlens[index]
        if self.cache is not None:
            self.cache.reorder(index)

    def select(self, sources: Tensor) -> None:
        """Keeps some prompts and their rows: what is finished leaves the batch."""
        rows = (sources[:, None] * self.beams + torch.arange(self.beams, device=sources.device)).flatten()
        self.tokens, self.seqlens, self.rows = self.tokens[rows], self.seqlens[rows], len(rows)
        if self.cache is not None:
            self.cache.select(rows)
