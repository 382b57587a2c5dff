"""The pool of a `KVCache`'s blocks, which counts the holders of each block."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fastformer.errors import InputError

Ints = npt.NDArray[np.int32]

NULL_BLOCK = 0
"""The block that is never taken. Its keys and values stay 0, so code that reads an unused entry gets finite numbers."""


class CacheFullError(InputError):
    """Raised if a `KVCache` has fewer free blocks than the caller asks for. No block was taken."""


class BlockPool:
    """Reference-counted blocks. A block without holders is free; `take` hands out the most recently freed block first.

    Args:
        num_blocks: the number of blocks, including the null block.

    Attributes:
        counts: (num_blocks,) the number of holders of each block: groups of rows, or other readers.
        num_free: the number of blocks that can be taken.
    """

    def __init__(self, num_blocks: int) -> None:
        self.counts = np.zeros(num_blocks, np.int32)
        self.counts[NULL_BLOCK] = 1
        self.num_free = num_blocks - 1
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)  # a stack of num_free blocks

    def take(self, num_blocks: int) -> Ints:
        """Takes free blocks for one holder.

        Raises:
            CacheFullError: fewer than num_blocks blocks are free.
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
        """Adds a holder to each of these blocks. The blocks are distinct, and each has a holder already."""
        self.counts[blocks] += 1

    def release(self, blocks: npt.NDArray[np.integer]) -> None:
        """Removes a holder from each of these distinct blocks."""
        self.counts[blocks] -= 1
        free = blocks[self.counts[blocks] == 0]
        self._free[self.num_free : self.num_free + len(free)] = free
        self.num_free += len(free)
