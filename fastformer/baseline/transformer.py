"""The Transformer without any acceleration, as the papers describe it: every benchmark's baseline.

Vaswani et al. 2017, with the pre-norm order of tensor2tensor as a choice. Scores and masks are materialised, with the
zero upper triangle; LayerNorm, residual and dropout are steps of their own; batches are padded and padding is
computed; the loss sees the logits of the whole vocabulary; decoding recomputes everything for each token. It imports
nothing but torch and shares only the names of its parameters with the fast path, so that weights can be exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IGNORE_INDEX = -100


def sinusoids(num_positions: int, dim: int, interleaved: bool) -> Tensor:
    """Returns (num_positions, dim) positions: the paper's alternating sines and cosines, or tensor2tensor's halves."""
    position = torch.arange(num_positions, dtype=torch.float64)[:, None]
    if interleaved:  # PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(...); section 3.5
        angle = position / 10000 ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        table = torch.zeros(num_positions, dim, dtype=torch.float64)
        table[:, 0::2] = angle.sin()
        table[:, 1::2] = angle.cos()[:, : dim // 2]
        return table
    half = dim // 2
    rate = torch.exp(torch.arange(half, dtype=torch.float64) * (-math.log(10000.0) / max(half - 1, 1)))
    table = torch.cat(((position * rate).sin(), (position * rate).cos()), dim=1)
    return F.pad(table, (0, dim % 2))


class MultiHeadAttention(nn.Module):
    """Multi-head attention, section 3.2.2, with the score matrix in memory."""

    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.in_proj_weight = nn.Parameter(torch.empty(3 * dim, dim))
        self.out_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, query: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """Maps query (batch, n, dim) and memory (batch, m, dim); mask (batch or 1, 1, n or 1, m) is True = attend."""
        query_weight, key_weight, value_weight = self.in_proj_weight.chunk(3)
        q, k, v = (
            F.linear(x, weight).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for x, weight in ((query, query_weight), (memory, key_weight), (memory, value_weight))
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(~mask, -1e9).softmax(dim=-1)
        weights = F.dropout(weights, self.dropout, self.training)
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """An encoder layer, or with cross-attention a decoder layer."""

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_heads: int,
        cross: bool,
        norm_first: bool,
        dropout: float,
        attention_dropout: float,
        activation_dropout: float,
        eps: float,
    ) -> None:
        super().__init__()
        self.norm_first, self.dropout, self.activation_dropout = norm_first, dropout, activation_dropout
        self.self_attn = MultiHeadAttention(dim, num_heads, attention_dropout)
        if cross:
            self.multihead_attn = MultiHeadAttention(dim, num_heads, attention_dropout)
        self.linear1 = nn.Linear(dim, hidden_dim)
        self.linear2 = nn.Linear(hidden_dim, dim)
        self.norm1 = nn.LayerNorm(dim, eps)
        self.norm2 = nn.LayerNorm(dim, eps)
        if cross:
            self.norm3 = nn.LayerNorm(dim, eps)

    def forward(
        self, x: Tensor, mask: Tensor, memory: Tensor | None = None, memory_mask: Tensor | None = None
    ) -> Tensor:
        """Maps x (batch, n, dim) to the same shape."""
        x = self._add(x, self.norm1, lambda y: self.self_attn(y, y, mask))
        if memory is not None and memory_mask is not None:
            x = self._add(x, self.norm2, lambda y: self.multihead_attn(y, memory, memory_mask))
            return self._add(x, self.norm3, self._feed_forward)
        return self._add(x, self.norm2, self._feed_forward)

    def _add(self, x: Tensor, norm: nn.Module, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.norm_first:
            return x + F.dropout(sublayer(norm(x)), self.dropout, self.training)
        return norm(x + F.dropout(sublayer(x), self.dropout, self.training))

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.linear2(F.dropout(self.linear1(x).relu(), self.activation_dropout, self.training))


class Stack(nn.Module):
    """A sequence of layers, and in pre-norm a final LayerNorm."""

    def __init__(self, layers: list[Layer], norm: nn.Module | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        if norm is not None:
            self.norm = norm

    def forward(self, x: Tensor, *masks: Tensor | None) -> Tensor:
        """Maps x (batch, n, dim) to the same shape; masks are those of `Layer`."""
        for layer in self.layers:
            x = layer(x, *masks)
        return self.norm(x) if hasattr(self, "norm") else x


class Transformer(nn.Module):
    """The encoder-decoder with one matrix for source, target and output.

    The parameters have the names of `fastformer.models.Transformer`: its state_dict loads here.

    Args:
        vocab_size, d_model, d_ff, num_heads, num_layers: sizes.
        norm_first: pre-norm (tensor2tensor today) or post-norm (the paper).
        interleaved: the paper's positions, or tensor2tensor's.
        dropout, attention_dropout, activation_dropout: probabilities.
        max_len: the longest sequence.
        eps: the eps of LayerNorm.
        pad, eos, start: the id of padding, the id or ids that end a sequence, and the id that decoding begins with.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int = 512,
        d_ff: int = 2048,
        num_heads: int = 8,
        num_layers: int = 6,
        *,
        norm_first: bool = True,
        interleaved: bool = False,
        dropout: float = 0.1,
        attention_dropout: float = 0.1,
        activation_dropout: float = 0.1,
        max_len: int = 512,
        eps: float = 1e-6,
        pad: int = 0,
        eos: int | tuple[int, ...] = (1,),
        start: int = 0,
    ) -> None:
        super().__init__()
        self.d_model, self.dropout, self.max_len = d_model, dropout, max_len
        self.pad, self.eos, self.start = pad, (eos,) if isinstance(eos, int) else tuple(eos), start
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.register_buffer("positions", sinusoids(max_len, d_model, interleaved), persistent=False)

        def stack(cross: bool) -> Stack:
            options = (norm_first, dropout, attention_dropout, activation_dropout, eps)
            layers = [Layer(d_model, d_ff, num_heads, cross, *options) for _ in range(num_layers)]
            return Stack(layers, nn.LayerNorm(d_model, eps) if norm_first else None)

        self.encoder, self.decoder = stack(False), stack(True)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws each matrix Xavier uniform, and embeddings from N(0, d_model^-0.5)."""
        for module in self.modules():
            if isinstance(module, MultiHeadAttention):
                for block in module.in_proj_weight.chunk(3):
                    nn.init.xavier_uniform_(block)
            elif isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.normal_(self.embedding.weight, std=self.d_model**-0.5)

    positions: Tensor

    def embed(self, ids: Tensor) -> Tensor:
        """Adds positions to the scaled embeddings (PAD is the zero vector) and applies dropout."""
        x = self.embedding(ids) * math.sqrt(self.d_model) * (ids != self.pad)[..., None]
        return F.dropout(x + self.positions[: ids.shape[1]].to(x.dtype), self.dropout, self.training)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Encodes source (batch, n) ids, right-padded, to memory (batch, n, d_model) and its mask (batch, 1, 1, n)."""
        mask = (source != self.pad)[:, None, None, :]
        return self.encoder(self.embed(source), mask), mask

    def decode(self, target: Tensor, memory: Tensor, memory_mask: Tensor) -> Tensor:
        """Decodes target (batch, m) ids, shifted right, to hidden states (batch, m, d_model)."""
        look_ahead = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool, device=target.device).tril()
        return self.decoder(self.embed(target), look_ahead[None, None], memory, memory_mask)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Returns the logits of the next tokens, (batch, m, vocab_size)."""
        memory, mask = self.encode(source)
        return self.decode(target, memory, mask) @ self.embedding.weight.T

    def loss(
        self,
        source: Tensor,
        target_in: Tensor,
        target_out: Tensor,
        *,
        label_smoothing: float = 0.0,
        reduction: str = "sum",
    ) -> Tensor:
        """Computes the cross-entropy over real target tokens; target_out is -100 at padding."""
        logits = self(source, target_in).float().flatten(0, 1)
        return F.cross_entropy(
            logits,
            target_out.flatten(),
            ignore_index=IGNORE_INDEX,
            label_smoothing=label_smoothing,
            reduction=reduction,
        )

    @torch.no_grad()
    def greedy(self, source: Tensor, max_new_tokens: int) -> Tensor:
        """Decodes greedily, (batch, <= max_new_tokens), and runs encoder and decoder over everything for each token."""
        ends = torch.tensor(self.eos, device=source.device)
        out = torch.full((len(source), 1), self.start, dtype=torch.long, device=source.device)
        done = torch.zeros(len(source), dtype=torch.bool, device=source.device)
        for _ in range(max_new_tokens):
            token = self(source, out)[:, -1].argmax(-1).masked_fill(done, self.pad)
            out = torch.cat((out, token[:, None]), dim=1)
            done |= torch.isin(token, ends)
            if bool(done.all()):
                break
        return out[:, 1:]
