"""The blocks of a `KVCache`, each with the number of its holders."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fastformer.errors import InputError

Ints = npt.NDArray[np.int32]

NULL_BLOCK = 0
"""The block that is never taken. Its keys and values stay 0, so code that reads an unused entry gets finite numbers."""


class CacheFullError(InputError):
    """A `KVCache` has fewer free blocks than are asked for. Nothing was taken."""


class BlockPool:
    """Blocks that are taken, shared and released. A block without holders is free; the last one freed goes out first.

    Args:
        num_blocks: all blocks, the null block among them.

    Attributes:
        counts: (num_blocks,) the holders of each block: groups of rows, or whatever else will read it later.
        num_free: the blocks that can be taken.
    """

    def __init__(self, num_blocks: int) -> None:
        self.counts = np.zeros(num_blocks, np.int32)
        self.counts[NULL_BLOCK] = 1
        self.num_free = num_blocks - 1
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)  # a stack of num_free blocks

    def take(self, num_blocks: int) -> Ints:
        """Takes free blocks, for one holder.

        Raises:
            CacheFullError: fewer blocks are free.
        """
        if num_blocks > self.num_free:
            raise CacheFullError(
                f"the cache has {self.num_free} free blocks of {len(self.counts) - 1} and {num_blocks} are needed: "
                "make it with a larger num_blocks, or free groups"
            )
        end, self.num_free = self.num_free, self.num_free - num_blocks
        blocks = self._free[self.num_free : end][::-1].copy()
        self.counts[blocks] = 1
        return blocks

    def share(self, blocks: npt.NDArray[np.integer]) -> None:
        """Adds a holder to each of these different blocks, which are held already."""
        self.counts[blocks] += 1

    def release(self, blocks: npt.NDArray[np.integer]) -> None:
        """Takes a holder from each of these different blocks."""
        self.counts[blocks] -= 1
        free = blocks[self.counts[blocks] == 0]
        self._free[self.num_free : self.num_free + len(free)] = free
        self.num_free += len(free)
