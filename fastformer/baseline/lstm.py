"""The classic architecture that the Transformer replaced: an LSTM encoder-decoder with attention.

Score functions of Luong et al. 2015, "Effective Approaches to Attention-based Neural Machine Translation", section 3.1
(dot, general) and Bahdanau et al. 2015 (concat, v^T tanh(W [q; k])). The attentional state is
tanh(W_c [context; hidden]), fed to the next step with the next token (without input feeding, as in Luong's base model).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

IGNORE_INDEX = -100
SCORES = ("dot", "general", "concat")


@dataclass
class LSTMConfig:
    """The settings of `LSTMSeq2Seq`.

    Attributes:
        vocab_size: tokens of source and target together.
        d_model: size of the embeddings and of the states; even, because the encoder reads in two directions.
        num_layers: the depth of encoder and decoder.
        score: how a target state is compared with the source: "dot", "general" or "concat".
        dropout: on embeddings and outputs.
        max_len: the longest sequence.
        pad: the id that fills up shorter sequences on the right, embedded as the zero vector.
        eos: the ids that end a sequence; a single id needs no tuple.
        unk: the id of text that the tokenizer doesn't know; None: the tokenizer has no such id. The model treats it as
            any other.
        start: the id in front of a target that is shifted right.
    """

    vocab_size: int
    d_model: int = 128
    num_layers: int = 1
    score: Literal["dot", "general", "concat"] = "general"
    dropout: float = 0.0
    max_len: int = 256
    pad: int = 0
    eos: tuple[int, ...] = (1,)
    unk: int | None = 2
    start: int = 0

    def __post_init__(self) -> None:
        for name, least in (("vocab_size", 2), ("d_model", 2), ("num_layers", 1), ("max_len", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"expected {name} to be an integer of at least {least}, got {value!r}")
        if self.score not in SCORES:
            raise ValueError(f"expected a score in {SCORES}, got {self.score!r}")
        if type(self.dropout) not in (int, float) or not 0 <= self.dropout < 1:
            raise ValueError(f"expected dropout in [0, 1), got {self.dropout!r}")
        if self.d_model % 2:
            raise ValueError(f"expected an even d_model (two directions), got {self.d_model}")
        self.eos = tuple(self.eos) if isinstance(self.eos, list | tuple) else (self.eos,)
        ids = (self.pad, *self.eos, self.start)
        if not self.eos or any(type(i) is not int or not 0 <= i < self.vocab_size for i in ids):
            got = f"pad {self.pad!r}, eos {self.eos!r}, start {self.start!r}"
            raise ValueError(f"expected pad, eos and start to be ids below vocab_size {self.vocab_size}, got {got}")
        if self.unk is not None and (type(self.unk) is not int or self.unk < 0):
            raise ValueError(f"expected unk to be an id or None, got {self.unk!r}")
        if len({self.pad, self.unk, *self.eos}) < 2 + len(self.eos):
            got = f"pad {self.pad}, eos {self.eos}, unk {self.unk}"
            raise ValueError(f"expected pad, eos and unk to be different ids, got {got}")


class Attention(nn.Module):
    """Scores queries against keys: dot q^T k, general q^T W k, concat v^T tanh(W [q; k])."""

    def __init__(self, dim: int, score: str) -> None:
        super().__init__()
        self.score = score
        if score == "general":
            self.weight = nn.Linear(dim, dim, bias=False)
        elif score == "concat":
            self.query = nn.Linear(dim, dim, bias=False)
            self.key = nn.Linear(dim, dim, bias=False)
            self.vector = nn.Linear(dim, 1, bias=False)

    def forward(self, query: Tensor, keys: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Maps query (batch, m, dim), keys (batch, n, dim), mask (batch, 1, n) True = attend to (context, weights)."""
        if self.score == "dot":
            scores = query @ keys.transpose(1, 2)
        elif self.score == "general":
            scores = query @ self.weight(keys).transpose(1, 2)
        else:
            # W [q; k] = W_q q + W_k k
            scores = self.vector(torch.tanh(self.query(query)[:, :, None] + self.key(keys)[:, None])).squeeze(-1)
        weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
        return weights @ keys, weights


class LSTMSeq2Seq(nn.Module):
    """Bidirectional LSTM encoder, LSTM decoder with attention.

    Padded batches only. `loss` has the signature of the Transformer's, so the same trainer can train both.

    Args:
        settings: the fields of `LSTMConfig`.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.config = config = LSTMConfig(**settings)
        dim = config.d_model
        self.embedding = nn.Embedding(config.vocab_size, dim, padding_idx=config.pad)
        dropout = config.dropout if config.num_layers > 1 else 0.0
        self.encoder = nn.LSTM(dim, dim // 2, config.num_layers, batch_first=True, bidirectional=True, dropout=dropout)
        self.decoder = nn.LSTM(dim, dim, config.num_layers, batch_first=True, dropout=dropout)
        self.attention = Attention(dim, config.score)
        self.combine = nn.Linear(2 * dim, dim, bias=False)
        self.output = nn.Linear(dim, config.vocab_size)

    def encode(self, source: Tensor, layout: Any = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Encodes source (batch, n) ids, right-padded, to outputs (batch, n, d_model) and the decoder's first state."""
        _check_ids(source, self.config.vocab_size, "source")
        seqlens = self._seqlens(source, layout)
        if source.numel() == 0 or bool((seqlens < 1).any()):
            raise ValueError("expected at least one token in each source, got an empty one")
        x = F.dropout(self.embedding(source), self.config.dropout, self.training)
        packed = pack_padded_sequence(x, seqlens.cpu(), batch_first=True, enforce_sorted=False)
        outputs, (hidden, cell) = self.encoder(packed)
        memory, _ = pad_packed_sequence(outputs, batch_first=True, total_length=source.shape[1])

        def both_directions(state: Tensor) -> Tensor:  # (2 * layers, batch, dim / 2) -> (layers, batch, dim)
            return state.unflatten(0, (-1, 2)).transpose(1, 2).flatten(2).contiguous()

        return memory, (both_directions(hidden), both_directions(cell))

    def decode(
        self, target: Tensor, memory: Tensor, mask: Tensor, state: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Maps target ids (batch, m) to attentional states (batch, m, d_model), weights (batch, m, n), new state."""
        _check_ids(target, self.config.vocab_size, "target")
        if len(target) != len(memory):
            raise ValueError(f"expected as many targets as sources, got {len(target)} and {len(memory)}")
        x = F.dropout(self.embedding(target), self.config.dropout, self.training)
        hidden, state = self.decoder(x, state)
        context, weights = self.attention(hidden, memory, mask)
        return torch.tanh(self.combine(torch.cat((context, hidden), dim=-1))), weights, state

    def forward(self, source: Tensor, target: Tensor, source_layout: Any = None) -> tuple[Tensor, Tensor]:
        """Returns logits (batch, m, vocab_size) and attention weights (batch, m, n)."""
        memory, state = self.encode(source, source_layout)
        hidden, weights, _ = self.decode(target, memory, self._mask(source, source_layout), state)
        return self.output(F.dropout(hidden, self.config.dropout, self.training)), weights

    def loss(
        self,
        source: Tensor,
        target_in: Tensor,
        target_out: Tensor,
        *,
        source_layout: Any = None,
        target_layout: Any = None,
        label_smoothing: float = 0.0,
        smooth_others: bool = False,
        reduction: str = "sum",
    ) -> Tensor:
        """Computes the cross-entropy over real target tokens; target_out is -100 at padding.

        Raises:
            ValueError: a packed batch, which an LSTM can't read: use batching bucketed or random.
        """
        if isinstance(source, Tensor) and source.dim() != 2:
            raise ValueError("expected a padded batch (batch, seqlen) for the LSTM: set batching to bucketed or random")
        logits, _ = self(source, target_in, source_layout)
        if smooth_others:  # torch spreads over all classes: the same up to a factor of V / (V - 1)
            label_smoothing *= self.config.vocab_size / (self.config.vocab_size - 1)
        return F.cross_entropy(
            logits.float().flatten(0, 1),
            target_out.flatten(),
            ignore_index=IGNORE_INDEX,
            label_smoothing=label_smoothing,
            reduction=reduction,
        )

    @torch.no_grad()
    def greedy(self, source: Tensor, max_new_tokens: int) -> Tensor:
        """Decodes greedily: (batch, <= max_new_tokens) ids, which end in EOS and then PAD."""
        memory, state = self.encode(source)
        mask = self._mask(source, None)
        config, ends = self.config, torch.tensor(self.config.eos, device=source.device)
        token = torch.full((len(source), 1), config.start, dtype=torch.long, device=source.device)
        done = torch.zeros(len(source), dtype=torch.bool, device=source.device)
        out = []
        for _ in range(max_new_tokens):
            hidden, _, state = self.decode(token, memory, mask, state)
            token = self.output(hidden).argmax(-1).masked_fill(done[:, None], config.pad)
            out.append(token)
            done |= torch.isin(token[:, 0], ends)
            if bool(done.all()):
                break
        return torch.cat(out, dim=1)

    def generate(self, input_ids: Any, **options: Any) -> Any:
        """Decodes sources; see `fastformer.generate(self, input_ids, **options)`."""
        import fastformer  # only this method needs decoding; the model itself doesn't

        generate: Any = fastformer.generate
        return generate(self, input_ids, **options)

    @torch.no_grad()
    def attention_maps(self, source: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Returns the attention of target positions to the source: {"cross": (1, batch, 1, m, n)}."""
        return {"cross": self(source, target)[1][None, :, None]}

    def _seqlens(self, source: Tensor, layout: Any) -> Tensor:
        if layout is not None:
            return layout.seqlens.long()
        pad = self.config.pad
        real = source != pad
        if source.device.type == "cpu" and bool((real[:, 1:] & ~real[:, :-1]).any()):
            raise ValueError(
                f"expected source ids padded on the right, got PAD (id {pad}) before a token; or give a layout"
            )
        return real.sum(1)

    def _mask(self, source: Tensor, layout: Any) -> Tensor:
        position = torch.arange(source.shape[1], device=source.device)
        return (position < self._seqlens(source, layout)[:, None])[:, None]


def _check_ids(ids: Tensor, vocab_size: int, name: str) -> None:
    """Raises a ValueError unless these are ids (batch, seqlen); the values are read on a CPU only."""
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        got = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"expected {name} ids (batch, seqlen) of int64 or int32, got {got}")
    if ids.numel() and ids.device.type == "cpu":
        low, high = (int(bound) for bound in ids.aminmax())
        if low < 0 or high >= vocab_size:
            raise ValueError(f"expected {name} ids from 0 to {vocab_size - 1}, got {low} to {high}")
