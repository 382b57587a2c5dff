"""Layers that mix tokens by a state of fixed size, in the place of keys and values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.nn.errors import InputError
from fastformer.nn.layout import SequenceLayout

ByRow = Callable[..., Tensor]


class StateMixing(nn.Module):
    """A module that a layer calls as its self-attention, and in which a token sees those before it by a state.

    A subclass computes `_mix_tokens`, and sets the first values of its own parameters.
    """

    def reset_parameters(self) -> None:
        """Gives the parameters that are not a module's of PyTorch their first values."""
        raise NotImplementedError

    def forward(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, *,
        layout: SequenceLayout | None = None, cache: object = None, is_causal: bool = True, need_weights: bool = False,
        attn_mask: Tensor | None = None, key_padding_mask: Tensor | None = None, **options: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Mixes the tokens, as `MultiheadAttention.forward` is called by a layer.

        Args:
            query: (batch, seqlen, embed_dim), or packed (total, embed_dim) with a packed layout.
            key, value: the query or None.
            layout: the layout of the query; padding on the right changes no token before it.
            is_causal: has to be True.
            cache, need_weights, attn_mask, key_padding_mask: have to be as by default.
            options: rotary positions, which have no effect.

        Returns:
            (the output in query's shape, None).

        Raises:
            InputError: a mask, a cache, or a call that isn't causal.
        """
        has_masks = attn_mask is not None or key_padding_mask is not None or options.get("position_bias") is not None
        if has_masks or cache is not None or need_weights or not is_causal:
            raise InputError(
                f"expected a causal call of a {type(self).__name__}, without masks, position biases and a cache"
            )
        is_packed = layout is not None and layout.is_packed
        if query.dim() != (2 if is_packed else 3):
            raise InputError(f"expected a batch, or packed tokens and their layout, got shape {tuple(query.shape)}")

        def by_row(mix: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
            if is_packed and layout is not None:
                return layout.pack(mix(*map(layout.unpack, tensors)))
            return mix(*tensors)

        return self._mix_tokens(query, by_row), None

    def _mix_tokens(self, x: Tensor, by_row: ByRow) -> Tensor:
        """Computes the output. by_row(f, *tensors) calls f with tensors (batch, seqlen, ...) of padded rows."""
        raise NotImplementedError


def causal_conv(x: Tensor, weight: Tensor) -> Tensor:
    """Computes a depthwise convolution in which a token reads itself and those before it.

    Args:
        x: (batch, seqlen, channels).
        weight: (channels, 1, size), whose last column belongs to the token itself.

    Returns:
        x's shape.
    """
    if x.shape[1] == 0:
        return x
    channels = F.pad(x.transpose(1, 2), (weight.shape[-1] - 1, 0))
    return F.conv1d(channels, weight.to(channels.dtype), groups=len(weight)).transpose(1, 2)


def decays_in_chunks(log: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the factors of a state from one token of a chunk to another.

    Args:
        log: (..., size, 1), the logarithm of each token's factor, which it applies before it writes.

    Returns:
        (the factors (..., size, size) from what token j writes to what token i reads, 0 above the diagonal; and those
        (..., size, 1) from the state before the chunk to what a token reads).
    """
    # Differences of one sum would have lost the digits of small decays behind large ones.
    between = log.expand(*log.shape[:-1], log.shape[-2]).tril(-1).cumsum(-2).exp().tril()
    return between, log.cumsum(-2).exp()


class ShortConv(StateMixing):
    """A gated convolution over a few tokens, the mixing of most layers of LFM2.

    With (b, c, u) = in_proj(x), a token's output is out_proj(c * conv(b * u)), where conv is causal and depthwise. The
    state of a row is b * u of the last conv_size - 1 tokens.

    Parameters: `in_proj.weight` (rows of b, c and u), `conv_weight` (embed_dim, 1, conv_size), `out_proj.weight`.

    Args:
        embed_dim: input and output size.
        conv_size: the number of tokens, the current one included, that the convolution reads.
        device, dtype: the device and the dtype of the parameters.

    Raises:
        InputError: a size below 1.
    """

    def __init__(
        self,
        embed_dim: int,
        conv_size: int = 3,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if min(embed_dim, conv_size) < 1:
            raise InputError(f"expected sizes of at least 1, got {embed_dim} and {conv_size}")
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embed_dim, self.conv_size = embed_dim, conv_size
        self.in_proj = nn.Linear(embed_dim, 3 * embed_dim, bias=False, **factory)
        self.conv_weight = nn.Parameter(torch.empty(embed_dim, 1, conv_size, **factory))
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=False, **factory)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises the convolution as PyTorch does."""
        bound = 1 / math.sqrt(self.conv_size)
        nn.init.uniform_(self.conv_weight, -bound, bound)

    def _mix_tokens(self, x: Tensor, by_row: ByRow) -> Tensor:
        b, c, u = self.in_proj(x).chunk(3, -1)
        out: Tensor = self.out_proj(c * by_row(self._convolve, b * u))
        return out

    def _convolve(self, x: Tensor) -> Tensor:
        return causal_conv(x, self.conv_weight)

    def extra_repr(self) -> str:
        """Returns the options that print shows for the module."""
        return f"{self.embed_dim}, conv_size={self.conv_size}"
