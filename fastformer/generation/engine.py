"""What a search drives: tokens in, scores of the next ones out, and a cache that follows the rows.

The rungs of the ladder are one engine with four memories; all give the same scores, each at less cost than the last:

    naive         encoder and decoder run over everything for each new token
    encoder_once  the encoder runs once
    cross_cached  and the keys and values of cross-attention are computed once
    cached        and those of self-attention are kept: a step computes one token
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fastformer.generation.decoders import (
    DecoderOnly,
    EncoderDecoder,
    Model,
    Recurrent,
    State,
    is_decoder_only,
    is_encoder_decoder,
    is_recurrent,
)
from fastformer.generation.settings import RUNGS
from fastformer.nn import KVCache, SequenceLayout

PAD_ID = 0


class Engine(Protocol):
    """A model in the middle of decoding; the rows of a source stand side by side."""

    def first_tokens(self) -> Tensor:
        """(rows,) what decoding begins with."""
        ...

    def step(self, tokens: Tensor) -> Tensor:
        """Appends a token to each row. (rows,) ids -> (rows, vocab_size) fp32 logits of the next one."""
        ...

    def reorder(self, index: Tensor) -> None:
        """Row i goes on from what row index[i] was; both belong to one source."""
        ...

    def select(self, sources: Tensor) -> None:
        """Keeps some sources, in ascending order, and their rows."""
        ...


def make_engine(
    model: Model, inputs: Tensor, layout: SequenceLayout, beams: int, max_new_tokens: int, rung: str
) -> Engine:
    """The engine that steps a model.

    Args:
        model: what decodes.
        inputs: (num_sources, seqlen) ids, right-padded: sources, or prompts.
        layout: of the inputs.
        beams: rows per source.
        max_new_tokens: the most that a row may get.
        rung: one of RUNGS.

    Raises:
        ValueError: a rung that this kind of model doesn't have.
    """
    if is_decoder_only(model):
        return GPTEngine(model, inputs, layout, beams, max_new_tokens, rung)
    if is_recurrent(model):
        return RecurrentEngine(model, inputs, layout, beams, rung)
    assert is_encoder_decoder(model)
    return TransformerEngine(model, inputs, layout, beams, max_new_tokens, rung)


def bytes_per_source(model: Model, source_seqlen: int, beams: int, max_new_tokens: int) -> int:
    """About how much memory decoding needs for one more source in a batch, beside the model and its encoder.

    Counted are the caches, the copy that a reordering makes of them, the scores and the hypotheses.

    Args:
        model: what decodes.
        source_seqlen: the width of the batch.
        beams: rows per source.
        max_new_tokens: the most that a row may get.
    """
    scores = 4 * 4 * model.config.vocab_size  # logits, their softmax, totals and a temporary, fp32
    hypotheses = 8 * 8 * max_new_tokens
    if is_recurrent(model):
        states = 4 * 3 * source_seqlen * model.config.d_model  # the memory, and what scoring it makes
        return beams * (states + scores + hypotheses)
    assert is_decoder_only(model) or is_encoder_decoder(model)
    token = model.new_cache(1, 1).k[:, 0, 0]
    token_bytes = 2 * token.numel() * token.element_size()
    if is_decoder_only(model):
        return beams * (scores + hypotheses + (source_seqlen + max_new_tokens) * token_bytes * 3 // 2)
    # The source's keys and values are computed layer by layer and then stacked: twice there for a moment.
    cross = 2 * source_seqlen * token_bytes
    return cross + beams * (scores + hypotheses + max_new_tokens * token_bytes * 3 // 2)


class TransformerEngine:
    """Steps an encoder-decoder model.

    Args:
        model: a `models.Transformer`, or what decodes like one.
        source: (num_sources, source_seqlen) ids, right-padded.
        layout: of the source.
        beams: rows per source; row r decodes source r // beams.
        max_new_tokens: tokens that a row may get.
        rung: one of RUNGS.
    """

    def __init__(
        self,
        model: EncoderDecoder,
        source: Tensor,
        layout: SequenceLayout,
        beams: int,
        max_new_tokens: int,
        rung: str = "cached",
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
            self.memory = None  # its keys and values are all that is asked for from here on

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
            self.cache.rewind()
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
            self.cache.reorder((index.view(-1, self.beams) % self.beams).tolist())

    def select(self, sources: Tensor) -> None:
        """Keeps some sources and their rows: what is finished leaves the batch."""
        rows = (sources[:, None] * self.beams + torch.arange(self.beams, device=sources.device)).flatten()
        self.tokens, self.source, self.rows = self.tokens[rows], self.source[sources], len(rows)
        self.layout = SequenceLayout.padded(self.layout.seqlens[sources], self.layout.max_seqlen)
        if self.memory is not None:
            self.memory = self.memory[sources]
        if self.cache is not None:
            _keep(self.cache, sources)


class RecurrentEngine:
    """Steps a recurrent encoder-decoder such as `baseline.LSTMSeq2Seq`; its state is the cache.

    Args:
        model: a `baseline.LSTMSeq2Seq`, or what decodes like one.
        source: (num_sources, source_seqlen) ids, right-padded.
        layout: of the source.
        beams: rows per source.
        rung: "cached"; there is no other way.
    """

    def __init__(
        self, model: Recurrent, source: Tensor, layout: SequenceLayout, beams: int, rung: str = "cached"
    ) -> None:
        if rung != "cached":
            raise ValueError(f"expected rung cached for a recurrent model, which keeps a state, got {rung!r}")
        self.model, self.beams = model, beams
        memory, state = model.encode(source, layout)
        seen = torch.arange(source.shape[1], device=source.device) < layout.seqlens[:, None]
        self.memory = memory.repeat_interleave(beams, 0)
        self.mask = seen[:, None].repeat_interleave(beams, 0)
        hidden, cell = state
        self.state: State = (hidden.repeat_interleave(beams, 1), cell.repeat_interleave(beams, 1))

    def first_tokens(self) -> Tensor:
        """(rows,) what decoding begins with."""
        return torch.full((len(self.memory),), PAD_ID, dtype=torch.long, device=self.memory.device)

    def step(self, tokens: Tensor) -> Tensor:
        """Appends a token to each row. (rows,) ids -> (rows, vocab_size) fp32 logits of the next one."""
        hidden, _, self.state = self.model.decode(tokens[:, None], self.memory, self.mask, self.state)
        return self.model.output(hidden[:, -1]).float()

    def reorder(self, index: Tensor) -> None:
        """Row i goes on from what row index[i] was; both belong to one source, whose memory stays where it is."""
        hidden, cell = self.state
        self.state = (hidden[:, index], cell[:, index])

    def select(self, sources: Tensor) -> None:
        """Keeps some sources and their rows: what is finished leaves the batch."""
        rows = (sources[:, None] * self.beams + torch.arange(self.beams, device=sources.device)).flatten()
        self.memory, self.mask = self.memory[rows], self.mask[rows]
        self.reorder(rows)


class GPTEngine:
    """Steps a decoder-only model behind its prompts.

    Args:
        model: a `models.GPT`, or what decodes like one.
        prompt: (num_prompts, prompt_seqlen) ids, right-padded, none empty.
        layout: of the prompts.
        beams: rows per prompt.
        max_new_tokens: tokens that a row may get.
        rung: "naive" (everything again for each token) or "cached".
    """

    def __init__(
        self,
        model: DecoderOnly,
        prompt: Tensor,
        layout: SequenceLayout,
        beams: int,
        max_new_tokens: int,
        rung: str = "cached",
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
            self.cache = model.empty_cache(self.rows, width + max_new_tokens)
            self.cache.add(len(prompt), beams)
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
            self.cache.reorder((index.view(-1, self.beams) % self.beams).tolist())

    def select(self, sources: Tensor) -> None:
        """Keeps some prompts and their rows: what is finished leaves the batch."""
        rows = (sources[:, None] * self.beams + torch.arange(self.beams, device=sources.device)).flatten()
        self.tokens, self.seqlens, self.rows = self.tokens[rows], self.seqlens[rows], len(rows)
        if self.cache is not None:
            _keep(self.cache, sources)


def _keep(cache: KVCache, groups: Tensor) -> None:
    staying = set(groups.tolist())
    cache.release([group for group in range(cache.num_groups) if group not in staying])
