"""Multi-head attention under torch.nn's name and signature."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastformer.cache.layer_view import AttentionCache
from fastformer.engine.checks import Replacement, given, is_unhooked, plain_parameters, replacement
from fastformer.engine.frozen import Plans
from fastformer.nn.attention_parameters import AttentionParameters, WindowSize, of_dtype
from fastformer.nn.cached_attention import append_cached, attend_cached, attention_unpacked, placed
from fastformer.nn.embedding import RotaryPositions
from fastformer.nn.errors import InputError
from fastformer.nn.kept_keys import KeptKeys
from fastformer.nn.layout import Jagged, SequenceLayout, open_nested
from fastformer.nn.linear import LINEARS, linear
from fastformer.nn.masks import (
    add_bias,
    attended_lengths,
    check_dimensions,
    is_causal_mask,
    merge_masks,
    right_padding_lengths,
)
from fastformer.nn.norm import NormPlan, find_norm_plan
from fastformer.nn.projected_memory import ProjectedMemory
from fastformer.ops.attention import attention
from fastformer.ops.attention_weights import attention_weights
from fastformer.ops.varlen_attention import varlen_attention


class AttentionPlan(NamedTuple):
    """The parts of an attention's computation that depend only on its modules and its class.

    Attributes:
        replaced: the function that is called instead, because it replaced torch.nn's.
        out_proj: the parameters of the output projection; None if that module is called.
        q_norm, k_norm: the plans of the norms of queries and keys; None if they are called, or don't exist.
        calls_modules: whether any module is called.
    """

    replaced: Replacement | None
    out_proj: dict[str, Any] | None
    q_norm: NormPlan | None
    k_norm: NormPlan | None
    calls_modules: bool


class MultiheadAttention(AttentionParameters):
    """`torch.nn.MultiheadAttention` on the fused attention ops ("Attention Is All You Need", section 3.2).

    Same constructor, forward signature and state_dict keys; boolean masks are True = ignore, as in torch.nn. It differs
    where torch.nn is inconsistent: a query that sees no key results in zeros (before the output projection) in every
    mode, never NaN, and `need_weights` returns the distribution before dropout. When dropout acts, its probability is
    rounded to a multiple of 1/256 (0.1 to 26/256).

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype: as in
            `torch.nn.MultiheadAttention`.
        num_kv_heads: heads of keys and values, each shared by num_heads / num_kv_heads query heads (Ainslie et al.
            2023). The rows of `in_proj_weight` are then embed_dim + 2 * num_kv_heads * head_dim.
        window_size: (left, right): how many keys before and after its own position a query sees; None = all.
        head_dim: size of a head; None: embed_dim / num_heads.
        out_bias: whether the output projection has a bias; None: the value of bias.
        qk_norm: an RMSNorm of queries and keys before they are rotated, `q_norm` and `k_norm`: "head", over each head,
            one weight for all of them, or "all", over all heads together; "rotated": as "head", but after they are
            rotated; None: none.
        qk_norm_eps: added to their mean squares.
        softmax_scale: the factor of the scores; None: head_dim ** -0.5.
        softcap: c of c * tanh(score / c), which is applied to scaled scores before any mask; 0: no cap.
        sinks: whether each head has one more key, without a value, whose score is learned (the parameter `sinks`,
            (num_heads,)); see `ops.attention`.
        gate: whether the heads' outputs are multiplied by the sigmoid of a projection of the query, `gate_proj`.
        value_norm_eps: added to the mean squares of an RMSNorm of each head's values, which has no weight; None: none.
        kv_projections: 1 instead of 2: the values are the keys' product, before `k_norm`, and in_proj_weight has no
            rows for them; 0: the keys and values are those of another layer (see `KeptKeys`). Only in self-attention.

    Raises:
        InputError: sizes that don't divide, an unknown qk_norm.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        layout: SequenceLayout | None = None,
        memory_layout: SequenceLayout | None = None,
        cache: AttentionCache | None = None,
        rotary: RotaryPositions | None = None,
        position_bias: Tensor | None = None,
        kept: KeptKeys | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes the attention of each query over the keys that it sees.

        Args:
            query: (seqlen_q, batch, embed_dim), or (batch, seqlen_q, embed_dim) with batch_first, or (seqlen_q,
                embed_dim), or packed (total_q, embed_dim) with a packed layout, or nested (batch, any lengths,
                embed_dim), which must also be key and value, and for which the only mask is the causal one.
            key, value: of the same form, with kdim and vdim. None if a static cache holds them.
            key_padding_mask: (batch, seqlen_k), bool (True = ignore) or added to the scores.
            need_weights: also return the distribution, which has to be materialised for that.
            attn_mask: (seqlen_q, seqlen_k) or (batch * num_heads, seqlen_q, seqlen_k), bool (True = ignore) or added.
            average_attn_weights: average the distribution over the heads.
            is_causal: query i sees keys 0 to i. An attn_mask given along with it is assumed to be the causal one and,
                as in torch.nn, read only if need_weights or a key_padding_mask is given.
            layout: the layout of query (and of key, if it is the same tensor).
            memory_layout: the layout of key and value, if they are another sequence.
            cache: keys and values of earlier tokens. Unless the cache is static, those of the query are appended; the
                caller advances the lengths.
            rotary: rotates query and key.
            position_bias: (1 or batch, num_heads, seqlen_q, seqlen_k), added to the scores, with gradients; batched,
                with batch_first. For packed self-attention (1, num_heads, max_seqlen, max_seqlen); with a cache
                seqlen_k is the length of its longest row including the query's tokens. See `RelativePositionBias`.
            kept: where to read the keys and values, or to leave them for later layers.

        Returns:
            (the output in query's shape, the distribution or None). The distribution: (batch, seqlen_q, seqlen_k), or
            (batch, num_heads, seqlen_q, seqlen_k) if not averaged, without batch for unbatched input. For a nested
            query it is padded to the longest sequence, with zeros.

        Raises:
            InputError: shapes that don't fit; options that exclude each other; gradients through a strided nested
                query, which torch.nn refuses too (jagged ones have them).
        """
        plan = _PLANS.of(self)
        others = (layout, memory_layout, cache, rotary, position_bias, kept)
        if plan.replaced is not None and all(each is None for each in others):
            # In the order in which torch.nn's layers pass them.
            options = given(
                attn_mask=attn_mask,
                key_padding_mask=key_padding_mask,
                need_weights=None if need_weights else need_weights,
                average_attn_weights=None if average_attn_weights else average_attn_weights,
                is_causal=is_causal or None,
            )
            out: tuple[Tensor, Tensor | None] = plan.replaced.original.forward(self, query, key, value, **options)
            return out
        if query.is_nested or (key is not None and key.is_nested) or (value is not None and value.is_nested):
            if key is not query or value is not query:
                raise InputError("expected a nested tensor as query, key and value at once, or as none of them")
            opened, is_causal = open_nested(query, attn_mask, key_padding_mask, is_causal, *others[:-1])
            return self._nested(plan, query, opened, need_weights, average_attn_weights, is_causal)
        if not need_weights:
            options = given(
                layout=layout, memory_layout=memory_layout, cache=cache, rotary=rotary, position_bias=position_bias,
                kept=kept,
            )  # fmt: skip
            return self.attend(plan, query, key, value, attn_mask, key_padding_mask, is_causal, **options), None
        if self.has_sinks or cache is not None or (layout is not None and layout.is_packed):
            raise InputError("expected need_weights=False and no mask along with a cache or a packed layout, or sinks")
        q, k, v, options = self._dense_call(
            plan, query, key, value, attn_mask, key_padding_mask, is_causal=is_causal, need_weights=True, layout=layout,
            memory_layout=memory_layout, rotary=rotary, position_bias=position_bias, kept=kept,
        )  # fmt: skip
        attended, lse = attention(q, k, v, return_lse=True, dropout_p=self.dropout if self.training else 0.0, **options)
        weights = attention_weights(q, k, lse, **options)
        weights = weights.mean(1) if average_attn_weights else weights
        return self._output(plan, attended, query), weights if query.dim() == 3 else weights[0]

    def project_memory(self, key: Tensor, value: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Projects only keys and values, for a cache.

        Args:
            key: (seqlen_k, batch, kdim), or (batch, seqlen_k, kdim) with batch_first, or packed (total_k, kdim).
            value: of the same form, with vdim; None: the same tensor.

        Returns:
            k and v: (batch, seqlen_k, num_kv_heads, head_dim), or (total_k, num_kv_heads, head_dim).
        """
        parts = [self._parts(whole)[1] for whole in self._in_proj()]
        k, v = self._project_kv(key, key if value is None else value, *parts)
        k, v = self._normalise(None, "k_norm", self._heads(k)), self._heads(v)
        if key.dim() == 3 and not self.batch_first:
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        return k, v

    def attend(
        self,
        plan: AttentionPlan,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool,
        *,
        layout: SequenceLayout | None = None,
        memory_layout: SequenceLayout | None = None,
        cache: AttentionCache | None = None,
        rotary: RotaryPositions | None = None,
        position_bias: Tensor | None = None,
        shape: tuple[int, int] | None = None,
        projected: ProjectedMemory | None = None,
        kept: KeptKeys | None = None,
    ) -> Tensor:
        """Computes `forward` without the distribution, for a layer that knows the plan; nested tensors aren't allowed.

        If a shape is given (the first two dimensions of a batch), the query is the batch's rows, (rows, embed_dim), and
        also key and value. Only masks may then accompany it. Products of rows need no views around them.
        """
        is_packed = layout is not None and layout.is_packed
        if (cache is not None or is_packed) and (attn_mask is not None or key_padding_mask is not None):
            raise InputError("expected need_weights=False and no mask along with a cache or a packed layout")
        if cache is not None:
            return self._cached(plan, query, key, value, cache, layout, rotary, position_bias, kept)
        if layout is not None and is_packed:
            key, value = _both(key, value)
            memory_layout = layout if key is query and memory_layout is None else memory_layout
            layouts = layout, memory_layout
            return self._packed(plan, query, key, value, is_causal, *layouts, rotary, position_bias, projected, kept)
        q, k, v, options = self._dense_call(
            plan, query, key, value, attn_mask, key_padding_mask, is_causal=is_causal, layout=layout,
            memory_layout=memory_layout, rotary=rotary, position_bias=position_bias, shape=shape, kept=kept,
        )  # fmt: skip
        attended = attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, **options)
        return self._output(plan, attended, query, shape)

    def _dense_call(
        self, plan: AttentionPlan, query: Tensor, key: Tensor | None, value: Tensor | None, attn_mask: Tensor | None,
        key_padding_mask: Tensor | None, *, is_causal: bool, need_weights: bool = False,
        layout: SequenceLayout | None, memory_layout: SequenceLayout | None, rotary: RotaryPositions | None,
        position_bias: Tensor | None, shape: tuple[int, int] | None = None, kept: KeptKeys | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:  # fmt: skip
        """Returns the op's arguments for a padded batch, or for one sequence, which becomes a batch of one."""
        if key is None or value is None:
            key, value = _both(key, value)
        same = key is query
        memory_layout = layout if same and memory_layout is None else memory_layout
        if shape is None:
            check_dimensions(query, key, value, key_padding_mask, attn_mask)
        is_batched = query.dim() == 3 or shape is not None
        q, k, v = self._project_heads(plan, query, key, value, shape, kept=kept)
        if not is_batched:
            q, k, v = q[None], k[None], v[None]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        if shape is not None and attn_mask is None and key_padding_mask is None:  # saves time in small batches
            window = self._window(0) if is_causal else self.window_size
            return *self._turn(plan, q, k, None), v, {"window_size": window, **self._scores()}
        if q.shape[0] != k.shape[0] or k.shape[:2] != v.shape[:2]:
            raise InputError(
                f"expected query, key and value of one batch, key and value of one length; got {tuple(query.shape)}, "
                f"{tuple(key.shape)} and {tuple(value.shape)}"
            )
        q, k = self._turn(plan, q, k, rotary)
        if is_causal and attn_mask is not None and (need_weights or key_padding_mask is not None):
            # torch.nn uses the hint only if neither weights nor a key_padding_mask is given.
            is_causal = attn_mask.shape == (q.shape[1], k.shape[1]) and is_causal_mask(attn_mask)
        if is_causal:
            attn_mask = None
        if self.bias_k is not None or self.add_zero_attn:
            if memory_layout is not None or self.window_size != (None, None) or position_bias is not None:
                raise InputError(
                    "add_bias_kv and add_zero_attn are not supported with a layout, a window or a position_bias"
                )
            k, v, attn_mask, key_padding_mask = self.with_extra_keys(
                k, v, attn_mask, key_padding_mask, is_causal, q.shape[1]
            )
            is_causal = False
        seqlens_k = None if memory_layout is None else memory_layout.seqlens
        if attn_mask is None and key_padding_mask is None and position_bias is None:
            mask = None
        else:
            mask, seqlens_k = self._mask(q, k, attn_mask, key_padding_mask, position_bias, seqlens_k, is_batched)
        window = self._window(0 if same else q.shape[1] - k.shape[1]) if is_causal else self.window_size
        return q, k, v, {"attn_mask": mask, "seqlens_k": seqlens_k, "window_size": window, **self._scores()}

    def _mask(
        self, q: Tensor, k: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None,
        position_bias: Tensor | None, seqlens_k: Tensor | None, is_batched: bool,
    ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        """Merges all masks and biases into one mask for the op; also returns each row's number of keys, if known."""
        batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
        if seqlens_k is None and key_padding_mask is not None and key_padding_mask.shape == (batch, seqlen_k):
            seqlens_k = right_padding_lengths(key_padding_mask)
            if seqlens_k is None:
                seqlens_k = attended_lengths(key_padding_mask)
            else:
                key_padding_mask = None
        mask = None
        if attn_mask is not None or key_padding_mask is not None:
            mask = merge_masks(attn_mask, key_padding_mask, batch, self.num_heads, seqlen_q, seqlen_k)
        if position_bias is not None:
            if not (is_batched and self.batch_first):
                raise InputError("expected a batched query, and batch_first, along with a position_bias")
            mask = add_bias(position_bias, mask)
        return mask, seqlens_k

    def _output(
        self, plan: AttentionPlan, attended: Tensor, query: Tensor, shape: tuple[int, int] | None = None
    ) -> Tensor:
        """Projects attended values (batch, seqlen_q, num_heads, head_dim), and returns them in the query's layout."""
        if not (self.batch_first or (query.dim() == 2 and shape is None)):
            attended = attended.transpose(0, 1)
        # Unbatched queries and rows: all leading dimensions become one.
        rows = attended.flatten(-2) if query.dim() == 3 else attended.reshape(query.shape[0], self.q_dim)
        return self._project_out(plan, rows, query)

    def _project_out(self, plan: AttentionPlan, x: Tensor, query: Tensor) -> Tensor:
        x = x * self.gate_proj(query).sigmoid() if self.has_gate else x
        if plan.out_proj is None:
            return self.out_proj(x)
        return linear(x, plan.out_proj["weight"], plan.out_proj["bias"])

    def _nested(
        self, plan: AttentionPlan, x: Tensor, opened: Jagged, need_weights: bool, average_attn_weights: bool,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        learns = torch.is_grad_enabled() and any(each.requires_grad for each in (x, *self.parameters()))
        if learns and not opened.is_jagged:
            raise InputError(
                "MultiheadAttention does not support NestedTensor outside of its fast path, but jagged ones: this one "
                "is strided, grad is enabled and the query or one of the weights or biases requires_grad"
            )
        values, layout = opened.values, opened.layout
        if not need_weights:
            return opened.close(self._packed(plan, values, values, values, is_causal, layout, layout, None)), None
        # The distribution is a padded tensor.
        rows = layout.unpack(values)
        padded = rows if self.batch_first else rows.transpose(0, 1)
        out, weights = MultiheadAttention.forward(
            self,
            padded,
            padded,
            padded,
            average_attn_weights=average_attn_weights,
            is_causal=is_causal,
            layout=SequenceLayout.padded(layout.seqlens, layout.max_seqlen),
        )
        assert weights is not None
        real = torch.arange(layout.max_seqlen, device=x.device) < layout.seqlens[:, None]
        weights = weights * (real[:, :, None] if average_attn_weights else real[:, None, :, None])
        return opened.close(layout.pack(out if self.batch_first else out.transpose(0, 1))), weights

    def _packed(
        self, plan: AttentionPlan, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, layout: SequenceLayout,
        memory_layout: SequenceLayout | None, rotary: RotaryPositions | None, position_bias: Tensor | None = None,
        projected: ProjectedMemory | None = None,
        kept: KeptKeys | None = None,
    ) -> Tensor:  # fmt: skip
        cu_seqlens_q = layout.cu_seqlens
        cu_seqlens_k = None if memory_layout is None else memory_layout.cu_seqlens
        if memory_layout is None or cu_seqlens_q is None or cu_seqlens_k is None:
            raise InputError("expected a packed memory_layout along with a packed layout")
        if self.bias_k is not None or self.add_zero_attn:
            raise InputError("add_bias_kv and add_zero_attn are not supported with a packed layout")
        if is_causal and memory_layout is not layout:
            raise InputError("expected is_causal with a packed layout in self-attention only")
        q, k, v = self._project_heads(plan, query, key, value, projected=projected, kept=kept)
        q, k = self._turn(plan, q, k, rotary)
        dropout_p = self.dropout if self.training else 0.0
        if position_bias is not None:
            if memory_layout is not layout:
                raise InputError("expected a position_bias with a packed layout in self-attention only")
            left, right = self.window_size
            window = (left, 0 if is_causal else right)
            out = attention_unpacked(q, k, v, layout, position_bias, window, dropout_p, self._scores())
            return self._project_out(plan, out.flatten(-2), query)
        out = varlen_attention(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            layout.max_seqlen,
            memory_layout.max_seqlen,
            is_causal=is_causal,
            window_size=self.window_size,
            dropout_p=dropout_p,
            **self._scores(),
        )
        return self._project_out(plan, out.flatten(-2), query)

    @torch.no_grad()
    def _cached(
        self,
        plan: AttentionPlan,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: AttentionCache,
        layout: SequenceLayout | None,
        rotary: RotaryPositions | None,
        position_bias: Tensor | None,
        kept: KeptKeys | None,
    ) -> Tensor:
        packed = layout is not None and layout.is_packed
        if query.dim() != (2 if packed else 3):
            expected = "packed tokens (the layout is packed)" if packed else "a padded batch, or a packed layout,"
            raise InputError(f"expected {expected} along with a cache, got query of shape {tuple(query.shape)}")
        if self.bias_k is not None or self.add_zero_attn:
            raise InputError("add_bias_kv and add_zero_attn are not supported with a cache")
        transposed = not packed and not self.batch_first
        if position_bias is not None and (cache.is_static or transposed):
            raise InputError("expected a position_bias along with a cache in self-attention, and batch_first")
        if cache.is_static:
            parts = [self._parts(whole)[0] for whole in self._in_proj()]
            q = self._heads(linear(query, *self._q_weights(*parts)))
            q = self._normalise(plan.q_norm, "q_norm", q)
            out = attend_cached(cache, q.transpose(0, 1) if transposed else q, self._scores())
        else:
            q, k, v = self._project_heads(plan, query, *_both(key, value), kept=kept)
            if transposed:
                q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
            if self.qk_norm == "rotated":  # which the op that rotates by the places in the cache doesn't apply
                q, k = self._turn(plan, q, k, None if rotary is None else placed(rotary, cache, q))
                rotary = None
            packed_layout = layout if packed else None
            window_left = self.window_size[0]
            out = append_cached(cache, q, k, v, window_left, packed_layout, position_bias, rotary, self._scores())
        out = out.flatten(-2)
        return self._project_out(plan, out.transpose(0, 1) if transposed else out, query)

    def _project(
        self, query: Tensor, key: Tensor, value: Tensor, shape: tuple[int, int] | None = None,
        projected: ProjectedMemory | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        # One product for self-attention, one for the query and one for the memory in cross-attention.
        if query.shape[-1] != self.embed_dim or key.shape[-1] != self.kdim or value.shape[-1] != self.vdim:
            raise InputError(
                f"expected query, key and value of size {self.embed_dim}, {self.kdim} and {self.vdim} in the last "
                f"dimension, got {query.shape[-1]}, {key.shape[-1]} and {value.shape[-1]}"
            )
        if projected is not None:
            q = linear(query, *self._q_weights(projected.q_weight, projected.q_bias))
            return self._heads(q), self._heads(projected.k), self._heads(projected.v)
        weight, bias = self._in_proj()
        if weight is not None and key is query and value is query:
            if bias is not None and bias.dtype != weight.dtype:
                bias = of_dtype(bias, weight)
            qkv = linear(query, weight, bias)
            head_dim = self._head_dim()
            num_kv_heads = self.kv_dim // head_dim
            num_all = self.num_heads + 2 * num_kv_heads
            qkv = qkv.view(*(qkv.shape[:-1] if shape is None else shape), num_all, head_dim)
            q, k, v = qkv.split([self.num_heads, num_kv_heads, num_kv_heads], dim=-2)
            return q, k, v
        (q_weight, kv_weight), (q_bias, kv_bias) = self._parts(weight), self._parts(bias)
        q = linear(query, *self._q_weights(q_weight, q_bias))
        k, v = self._project_kv(key, value, kv_weight, kv_bias)
        return self._heads(q), self._heads(k), self._heads(v)

    def _q_weights(self, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        weight = self.q_proj_weight if weight is None else weight
        return weight, None if bias is None else of_dtype(bias, weight)

    def _project_kv(
        self, key: Tensor, value: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        sizes = [self.kv_dim, self.kv_dim]
        if weight is None:
            k_weight, v_weight = self.k_proj_weight, self.v_proj_weight
        else:
            if key is value:
                k, v = linear(key, weight, of_dtype(bias, weight)).split(sizes, dim=-1)
                return k, v
            k_weight, v_weight = weight.split(sizes)
        k_bias, v_bias = (None, None) if bias is None else bias.split(sizes)
        return linear(key, k_weight, of_dtype(k_bias, k_weight)), linear(value, v_weight, of_dtype(v_bias, v_weight))

    def _head_dim(self) -> int:
        if self.q_dim != self.embed_dim:
            return self.head_dim
        # By the current num_heads, which may have been set after construction; torch.nn reads it, too.
        head_dim, rest = divmod(self.embed_dim, self.num_heads)
        if rest:
            raise InputError(f"expected num_heads to divide embed_dim, got {self.num_heads} and {self.embed_dim}")
        return head_dim

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self._head_dim()))

    def _normalise(self, plan: NormPlan | None, name: str, x: Tensor) -> Tensor:
        """Normalises queries or keys (..., heads, head_dim), if they have a norm; "rotated" ones are rotated before.

        Args:
            plan: the plan of the norm; None if the norm is called.
            name: the name of the norm.
            x: the queries or keys.
        """
        if self.qk_norm is None:
            return x
        rows = x.flatten(-2) if self.qk_norm == "all" else x
        return (getattr(self, name)(rows) if plan is None else plan.apply(rows)).view(x.shape)

    def _project_heads(
        self, plan: AttentionPlan, query: Tensor, key: Tensor, value: Tensor, shape: tuple[int, int] | None = None,
        projected: ProjectedMemory | None = None, kept: KeptKeys | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Computes queries, keys and values (..., heads, head_dim), with the norms that precede rotations applied."""
        if not self.has_usual_keys or kept is not None:
            if key is not query or value is not query:
                raise InputError("expected the query as key and value: its layer shares keys, or makes values of them")
            return self._project_own(plan, query, shape, kept)
        q, k, v = self._project(query, key, value, shape, projected)
        if self.qk_norm is None or self.qk_norm == "rotated":
            return q, k, v
        return self._normalise(plan.q_norm, "q_norm", q), self._normalise(plan.k_norm, "k_norm", k), v

    def _turn(self, plan: AttentionPlan, q: Tensor, k: Tensor, rotary: RotaryPositions | None) -> tuple[Tensor, Tensor]:
        """Rotates queries and keys, and applies the norms that follow rotations."""
        q, k = (q, k) if rotary is None else rotary.rotate(q, k)
        if self.qk_norm != "rotated":
            return q, k
        return self._normalise(plan.q_norm, "q_norm", q), self._normalise(plan.k_norm, "k_norm", k)

    def _project_own(
        self, plan: AttentionPlan, x: Tensor, shape: tuple[int, int] | None, kept: KeptKeys | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        # With keys and values of another layer, or values made of keys.
        if self.qk_norm == "rotated":
            raise InputError("expected keys and values of the layer's own for norms of rotated queries and keys")
        if x.shape[-1] != self.embed_dim:
            raise InputError(f"expected a query of size {self.embed_dim} in the last dimension, got {x.shape[-1]}")
        weight, bias = self._in_proj()
        assert weight is not None
        rows = self._heads(linear(x, weight, None if bias is None else of_dtype(bias, weight)))
        rows = rows if shape is None else rows.view(*shape, *rows.shape[1:])
        q, *own = rows.split([self.num_heads, *[self.num_kv_heads] * self.kv_projections], dim=-2)
        q = self._normalise(plan.q_norm, "q_norm", q)
        if not own:
            if kept is None:
                raise InputError("expected `kept` keys, since the layer reads those of another one")
            return q, *kept.read()
        k, v = self._normalise(plan.k_norm, "k_norm", own[0]), own[-1]
        if self.value_norm_eps is not None:
            v = F.rms_norm(v, v.shape[-1:], eps=self.value_norm_eps)
        if kept is not None:
            kept.keep(k, v)
        return q, k, v

    def _window(self, diagonal: int) -> WindowSize:
        """Returns the window of a causal call."""
        left, right = self.window_size
        # torch.nn's triangle starts at the top left corner, the op's window at the bottom right one: seqlen_q -
        # seqlen_k keys further left.
        return left, diagonal if right is None else min(right, diagonal)

    def extra_repr(self) -> str:
        """Returns the options that print shows for the module."""
        heads = f"{self.num_heads}" if self.num_kv_heads == self.num_heads else f"{self.num_heads}/{self.num_kv_heads}"
        return f"{self.embed_dim}, heads={heads}, dropout={self.dropout}, batch_first={self.batch_first}"


_FORWARD = MultiheadAttention.forward


def find_attention_plan(attention: nn.Module, *, is_lent: bool = False) -> AttentionPlan:
    """Finds the plan of an attention of fastformer's class, or of a class derived from it."""
    inside = attention._modules
    out_proj = plain_parameters(inside.get("out_proj"), *LINEARS, is_lent=is_lent)
    q_norm, k_norm = (find_norm_plan(inside.get(name), is_lent=is_lent) for name in ("q_norm", "k_norm"))
    calls_norms = any(name in inside and norm is None for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)))
    calls = out_proj is None or calls_norms or "gate_proj" in inside
    return AttentionPlan(replacement(type(attention)), out_proj, q_norm, k_norm, calls)


_PLANS: Plans[AttentionPlan] = Plans(
    "attention",
    find_attention_plan,
    watched=lambda attention, plan: AttentionPlan(plan.replaced, None, None, None, True),
)


def plan_inside(attention: object, *, is_lent: bool = False) -> AttentionPlan | None:
    """Returns the plan of a layer's attention; None if that module has to be called."""
    if not isinstance(attention, MultiheadAttention) or type(attention).forward is not _FORWARD:
        return None
    plan = find_attention_plan(attention, is_lent=is_lent)
    return plan if plan.replaced is None and is_unhooked(attention) else None


def _both(key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor]:
    if key is None or value is None:
        raise InputError("expected key and value; only a static cache replaces them")
    return key, value
