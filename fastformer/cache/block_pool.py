"""The blocks of a `KVCache`: whose each one is, and which are free."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]


class CacheFullError(ValueError):
    """A `KVCache` has not as many free blocks as are asked for. Nothing was taken."""


class BlockPool:
    """Blocks that owners take and give back; the one that came back last goes out first. Block 0 is never given out.

    Args:
        num_blocks: all blocks, with block 0.
        num_owners: owners are 0 ... num_owners - 1.

    Attributes:
        num_free: how many can be taken.
    """

    def __init__(self, num_blocks: int, num_owners: int) -> None:
        self.num_blocks, self.num_owners, self.num_free = num_blocks, num_owners, num_blocks - 1
        self._owner = np.full(num_blocks, num_owners, np.int32)  # num_owners: nobody
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)  # the next one is at num_free - 1

    def take(self, owners: npt.NDArray[np.integer]) -> Ints:
        """A block for each of the owners, who may repeat.

        Raises:
            CacheFullError: there are not as many.
        """
        if len(owners) > self.num_free:
            raise CacheFullError(
                f"the cache has {self.num_free} free blocks of {self.num_blocks - 1} and {len(owners)} are needed: "
                "make it with more num_blocks, or release groups"
            )
        self.num_free -= len(owners)
        blocks = self._free[self.num_free : self.num_free + len(owners)][::-1].copy()
        self._owner[blocks] = owners
        return blocks

    def give_back(self, owners: npt.NDArray[np.integer], live: Ints | None = None) -> None:
        """Makes free what these owners have, but for the live blocks."""
        giving = np.zeros(self.num_owners + 1, bool)
        giving[owners] = True
        dead = giving[self._owner]
        if live is not None:
            dead[live] = False
        blocks = np.flatnonzero(dead)
        self._free[self.num_free : self.num_free + len(blocks)] = blocks
        self.num_free += len(blocks)
        self._owner[blocks] = self.num_owners
