"""The output projection and the cross-entropy in one module, which never stores all logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastformer.ops.linear_cross_entropy import linear_cross_entropy


class LinearCrossEntropy(nn.Linear):
    """`F.cross_entropy(linear(x), target)` in chunks: no (rows, vocab_size) tensor exists at any time.

    Parameters as `torch.nn.Linear`: `weight` (vocab_size, dim), which may be tied to an embedding, and `bias`.

    Args:
        in_features: the size of x.
        out_features: the number of classes.
        bias, device, dtype: as in `torch.nn.Linear`.
        ignore_index: targets of this value are ignored.
        label_smoothing: the probability that is taken from the target and spread evenly.
        smooth_others: spread it over the other classes (tensor2tensor) instead of over all of them (torch).
        reduction: "mean" over the targets that count, "sum", or "none".
        z_loss: weight of the squared log-partition, which keeps the logits from drifting (PaLM, section 5).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        smooth_others: bool = False,
        reduction: str = "mean",
        z_loss: float = 0.0,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f'expected reduction "mean", "sum" or "none", got {reduction!r}')
        if not isinstance(label_smoothing, int | float) or not 0.0 <= label_smoothing <= 1.0:
            raise ValueError(f"expected label_smoothing in [0, 1], got {label_smoothing!r}")
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.smooth_others = smooth_others
        self.reduction = reduction
        self.z_loss = z_loss

    def forward(self, x: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        """Computes the loss of x at the targets.

        Args:
            x: (..., in_features).
            target: (...) int64 class ids.

        Returns:
            A scalar, or (...) for reduction "none"; fp32 (fp64 for fp64).
        """
        return linear_cross_entropy(
            x,
            self.weight,
            target,
            self.bias,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            smooth_others=self.smooth_others,
            reduction=self.reduction,
            z_loss=self.z_loss,
        )
