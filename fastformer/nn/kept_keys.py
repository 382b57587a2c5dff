"""Keys and values that a layer leaves for later layers of a stack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


def cache_places(key_layers: Sequence[int]) -> list[int]:
    """Returns for each layer the place of its keys and values in a cache, given the layers whose keys layers read."""
    makers = sorted(set(key_layers))
    return [makers.index(layer) for layer in key_layers]


class KeptKeys(NamedTuple):
    """The keys and values of the layers of a stack in one call, as one layer sees them.

    They are normalised but not rotated yet: layers that share them rotate them alike. Gradients flow through them.

    Attributes:
        all: by the index of a layer, its keys and values.
        layer: the layer whose keys and values this one reads or makes.
    """

    all: dict[int, tuple[Tensor, Tensor]]
    layer: int

    def keep(self, k: Tensor, v: Tensor) -> None:
        """Leaves keys and values for later layers; those of a checkpoint's second pass are not needed."""
        self.all.setdefault(self.layer, (k, v))

    def read(self) -> tuple[Tensor, Tensor]:
        """Returns the keys and values that the layer reads."""
        return self.all[self.layer]
