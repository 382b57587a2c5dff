"""Mixture of experts: several feed-forward networks, of which a router chooses some for each token."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fastformer.engine.checks import active_dropout
from fastformer.nn.errors import InputError
from fastformer.nn.feed_forward import Activation, FeedForward, activate, fused_name, is_gated, resolve_activation
from fastformer.nn.linear import linear
from fastformer.ops._transforms import is_transformed
from fastformer.ops.feed_forward import feed_forward

RouterActivation = Literal["softmax", "sigmoid"]

# The list that a `recorded_router_logits` collects, in the code that it surrounds.
_recorded: ContextVar[list[Tensor] | None] = ContextVar("recorded_router_logits", default=None)


class StackedLinear(nn.Module):
    """Linear maps of one size. Their matrices are one below the other, so that rows are rounded as those of a matrix.

    It isn't an `nn.Linear`, because tools that replace these would change all maps by one call.

    Parameters: `weight` (count * out_features, in_features), `bias` (count * out_features).

    Args:
        count: the number of maps.
        in_features, out_features, bias, device, dtype: as in `nn.Linear`, for each map.
    """

    def __init__(self, count: int, in_features: int, out_features: int, bias: bool = False, **factory: Any) -> None:
        super().__init__()
        self.count = count
        self.weight = nn.Parameter(torch.empty(count * out_features, in_features, **factory))
        self.bias = nn.Parameter(torch.empty(count * out_features, **factory)) if bias else None
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(in_features) if in_features else 0.0
            nn.init.uniform_(self.bias, -bound, bound)

    def each(self) -> list[tuple[Tensor, Tensor | None]]:
        """Returns the weight and the bias of each map: views, whose gradients are written to the whole once."""
        weights = self.weight.view(self.count, -1, self.weight.shape[1]).unbind()
        biases = [None] * self.count if self.bias is None else self.bias.view(self.count, -1).unbind()
        return [*zip(weights, biases, strict=True)]


class Router(nn.Module):
    """The scores of experts: the product with a matrix that is never rounded to integers.

    Parameters: `weight` (rows, dim), and `bias` (rows), if there is one, which begins as 0. Buffers: `choice_bias`
    (num_choices), if there is one, which begins as 0. With it, all of them and the scores are fp32 or fp64, also in a
    model of another dtype: its numbers may be large and differ little.
    """

    bias: nn.Parameter | None
    choice_bias: Tensor | None

    def __init__(self, rows: int, dim: int, bias: bool = False, num_choices: int = 0, **factory: Any) -> None:
        super().__init__()
        if num_choices:
            own = factory.get("dtype") or torch.get_default_dtype()
            factory = {**factory, "dtype": torch.promote_types(own, torch.float32)}
        self.register_buffer("choice_bias", torch.zeros(num_choices, **factory) if num_choices else None)
        self.weight = nn.Parameter(torch.empty(rows, dim, **factory))
        self.register_parameter("bias", nn.Parameter(torch.empty(rows, **factory)) if bias else None)
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        before = [None if each is None else each.detach() for each in (self.weight, self.bias, self.choice_bias)]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.choice_bias is not None and self.weight.itemsize < 4:
            for tensor, wide in zip((self.weight, self.bias, self.choice_bias), before, strict=True):
                if tensor is not None and wide is not None:
                    tensor.data = wide.to(tensor.device)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Computes the scores (tokens, rows) of x (tokens, dim)."""
        return linear(x if self.choice_bias is None else x.to(self.weight.dtype), self.weight, self.bias)


class MixtureOfExperts(nn.Module):
    """Sends each token to the experts that a router prefers, and adds their outputs with the router's weights.

    The weights are the softmax of the router's scores over all experts, those of the chosen experts alone
    (Shazeer et al. 2017, Mixtral), or the sigmoids of the scores (DeepSeek-V3). Each expert computes all of its tokens
    at once, whose number differs from expert to expert. A shared expert, if there is one, computes every token, and its
    output is multiplied by the sigmoid of a score of its own, if it has a gate (Qwen2-MoE).

    Parameters: `router.weight` (num_experts, dim), and one more row for the gate of the shared expert; `linear1` and
    `linear2`, the maps of `FeedForward` for each expert, one below the other; `shared.linear1` and `shared.linear2`.
    Buffers: `router.choice_bias` (num_experts), if there is one.

    Args:
        dim: input and output size.
        hidden_dim: the size between the linear maps of an expert.
        num_experts: the number of experts.
        num_experts_per_tok: the number of experts that compute a token.
        norm_topk_prob: whether the weights of a token's experts are divided by their sum.
        norm_topk_eps: is added to that sum.
        shared_hidden_dim: the size between the linear maps of the shared expert; None: there is none.
        shared_gate: whether the shared expert has a gate.
        router_bias: whether the router has a bias.
        router_activation: what makes weights of scores, "softmax" or "sigmoid".
        choice_bias: whether experts are chosen by their weights plus a number for each expert, which isn't trained, see
            `Router`.
        expert_scale: the factor of the weights, at the end.
        activation, dropout, bias, device, dtype: as in `FeedForward`; the activation has to be one with a name.

    Raises:
        InputError: more experts for a token than there are, or an activation without a name.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        num_experts_per_tok: int,
        *,
        norm_topk_prob: bool = True,
        norm_topk_eps: float = 0.0,
        shared_hidden_dim: int | None = None,
        shared_gate: bool = True,
        router_bias: bool = False,
        router_activation: RouterActivation = "softmax",
        choice_bias: bool = False,
        expert_scale: float = 1.0,
        activation: Activation = "swiglu",
        dropout: float = 0.0,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= num_experts_per_tok <= num_experts:
            raise InputError(
                f"expected num_experts_per_tok from 1 to num_experts, got {num_experts_per_tok} of {num_experts}"
            )
        self.activation = resolve_activation(activation)
        self._activation_name = fused_name(self.activation)  # None: no op has it
        if self._activation_name is None and not isinstance(self.activation, str):
            raise InputError(f"expected an activation with a name, got {activation!r}")
        self.num_experts, self.num_experts_per_tok = num_experts, num_experts_per_tok
        self.norm_topk_prob, self.norm_topk_eps = norm_topk_prob, norm_topk_eps
        self.router_activation, self.expert_scale = router_activation, expert_scale
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.has_gate = shared_hidden_dim is not None and shared_gate
        num_choices = num_experts if choice_bias else 0
        self.router = Router(num_experts + self.has_gate, dim, router_bias, num_choices, **factory)
        inner = 2 * hidden_dim if is_gated(self.activation) else hidden_dim
        self.linear1 = StackedLinear(num_experts, dim, inner, bias, **factory)
        self.dropout = nn.Dropout(dropout)
        self.linear2 = StackedLinear(num_experts, hidden_dim, dim, bias, **factory)
        self.shared: FeedForward | None = None
        if shared_hidden_dim is not None:
            self.shared = FeedForward(dim, shared_hidden_dim, activation, dropout, bias, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Applies the experts to x (..., dim), with a result of the same shape."""
        rows = x.reshape(-1, x.shape[-1])
        scores = self.router(rows)
        of_experts = scores[:, : self.num_experts]
        if (recorded := _recorded.get()) is not None:
            recorded.append(of_experts)
        out = self._run_experts(rows, *self._choose(of_experts))
        if self.shared is not None:
            of_shared = self.shared(rows)
            if self.has_gate:
                of_shared = torch.sigmoid(scores[:, self.num_experts :]).to(out.dtype) * of_shared
            out = out + of_shared
        return out.view(x.shape)

    def _choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the experts of each token (tokens, num_experts_per_tok), and their weights."""
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        weights = scores.sigmoid() if self.router_activation == "sigmoid" else scores.softmax(-1)
        if (choice_bias := self.router.choice_bias) is None:
            weights, experts = weights.topk(self.num_experts_per_tok)
        else:
            experts = (weights.detach() + choice_bias).topk(self.num_experts_per_tok).indices
            weights = weights.gather(-1, experts)
        if self.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + self.norm_topk_eps)
        return experts, weights * self.expert_scale

    def _run_experts(self, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        if is_transformed() or torch.compiler.is_exporting():
            return self._run_all_experts(rows, experts, weights)
        order = experts.flatten().argsort(stable=True)  # pairs of a token and an expert, expert by expert
        counts = torch.bincount(experts.flatten(), minlength=self.num_experts).tolist()
        parts = rows.index_select(0, order // self.num_experts_per_tok).split(counts)
        outputs = [
            self._run_expert(part, first, second)
            for part, first, second in zip(parts, self.linear1.each(), self.linear2.each(), strict=True)
            if len(part)
        ]
        if not outputs:
            return torch.zeros_like(rows)
        of_pairs = torch.cat(outputs).index_select(0, order.argsort()).view(*experts.shape, -1)
        return (of_pairs * weights[..., None].to(of_pairs.dtype)).sum(1)

    def _run_all_experts(self, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Computes the same by every expert for every token, where the number of an expert's tokens can't be read."""
        each = zip(self.linear1.each(), self.linear2.each(), strict=True)
        of_all = torch.stack([self._run_expert(rows, first, second) for first, second in each], 1)
        chosen = of_all.gather(1, experts[..., None].expand(*experts.shape, rows.shape[1]))
        return (chosen * weights[..., None].to(chosen.dtype)).sum(1)

    def _run_expert(
        self, rows: Tensor, first: tuple[Tensor, Tensor | None], second: tuple[Tensor, Tensor | None]
    ) -> Tensor:
        if self._activation_name is None:
            return linear(self.dropout(activate(self.activation, linear(rows, *first))), *second)
        dropout_p = active_dropout(self.dropout)
        return feed_forward(rows, *first, *second, activation=self._activation_name, dropout_p=dropout_p)


@contextlib.contextmanager
def recorded_router_logits() -> Iterator[list[Tensor]]:
    """Collects the scores of the routers that run within the block, each (tokens, num_experts), in their order."""
    logits: list[Tensor] = []
    token = _recorded.set(logits)
    try:
        yield logits
    finally:
        _recorded.reset(token)


def load_balancing_loss(
    router_logits: Sequence[Tensor], num_experts_per_tok: int, is_real: Tensor | None = None
) -> Tensor:
    """Computes how unevenly routers use their experts (Fedus et al. 2021, equations 4 to 6), over all layers together.

    Args:
        router_logits: for each layer with experts, (tokens, num_experts).
        num_experts_per_tok: the number of experts that compute a token.
        is_real: (tokens,), False at padding, which doesn't count; None: every token counts.

    Returns:
        A scalar, fp32 or fp64: num_experts_per_tok if all experts are used alike, and more otherwise.
    """
    used: list[Tensor] = []
    preferred: list[Tensor] = []
    for logits in router_logits:
        logits = logits if logits.dtype == torch.float64 else logits.float()
        probabilities = (logits if is_real is None else logits[is_real]).softmax(-1)
        chosen = probabilities.topk(num_experts_per_tok).indices.flatten()
        used.append(torch.bincount(chosen, minlength=probabilities.shape[1]))
        preferred.append(probabilities)
    probabilities = torch.cat(preferred)
    total = max(1, len(probabilities))
    share = torch.stack(used).sum(0) / total
    return (share * probabilities.sum(0)).sum() * probabilities.shape[1] / total
