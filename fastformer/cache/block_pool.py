"""The free blocks of a `KVCache`."""

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
    """A stack of free blocks: `allocate` hands out the most recently freed block first.

    Args:
        num_blocks: the number of blocks, including the null block, which is never free.

    Attributes:
        num_free: the number of free blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks, self.num_free = num_blocks, num_blocks - 1
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)

    def allocate(self, num_blocks: int) -> Ints:
        """Takes free blocks.

        Raises:
            CacheFullError: fewer than num_blocks blocks are free.
        """
        if num_blocks > self.num_free:
            raise CacheFullError(
                f"the cache has {self.num_free} free blocks of {self.num_blocks - 1} and {num_blocks} are needed: "
                "make it with a larger num_blocks, or free groups"
            )
        end, self.num_free = self.num_free, self.num_free - num_blocks
        return self._free[self.num_free : end][::-1].copy()

    def release(self, blocks: npt.NDArray[np.integer]) -> None:
        """Returns distinct blocks to the pool."""
        self._free[self.num_free : self.num_free + len(blocks)] = blocks
        self.num_free += len(blocks)
