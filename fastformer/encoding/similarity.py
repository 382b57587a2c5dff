"""Similarities of embeddings, with sentence-transformers' names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

Embeddings: TypeAlias = Tensor | npt.NDArray[Any] | Sequence[Tensor | npt.NDArray[Any]]


# ALL: the similarity of each row to each row of the other matrix. PAIRED: of each row to the same row of the other
# matrix. Distances are negated.
ALL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cosine": lambda first, second: F.normalize(first) @ F.normalize(second).T,
    "dot": lambda first, second: first @ second.T,
    "euclidean": lambda first, second: -torch.cdist(first, second),
    "manhattan": lambda first, second: -torch.cdist(first, second, p=1.0),
}
PAIRED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cosine": lambda first, second: (F.normalize(first) * F.normalize(second)).sum(-1),
    "dot": lambda first, second: (first * second).sum(-1),
    "euclidean": lambda first, second: -torch.linalg.vector_norm(first - second, dim=-1),
    "manhattan": lambda first, second: -(first - second).abs().sum(-1),
}


def as_rows(embeddings: Embeddings) -> Tensor:
    """Converts embeddings to (rows, features) in at least fp32; a single embedding becomes one row.

    Raises:
        ValueError: the embeddings have neither one nor two dimensions.
    """
    if isinstance(embeddings, Tensor):
        rows = embeddings
    elif isinstance(embeddings, np.ndarray):
        rows = torch.from_numpy(np.ascontiguousarray(embeddings))
    else:
        rows = torch.stack([row if isinstance(row, Tensor) else torch.as_tensor(row) for row in embeddings])
    if rows.dim() == 1:
        rows = rows[None]
    if rows.dim() != 2:
        raise ValueError(f"expected embeddings of shape (rows, features), got {tuple(rows.shape)}")
    return rows if rows.dtype in (torch.float32, torch.float64) else rows.float()
