"""Tests the pool of free blocks."""

from __future__ import annotations

import numpy as np
import pytest

from fastformer.cache.block_pool import NULL_BLOCK, BlockPool, CacheFullError


def test_the_last_released_block_is_allocated_first():
    pool = BlockPool(6)
    blocks = pool.allocate(5)
    assert sorted(blocks) == [1, 2, 3, 4, 5] and pool.num_free == 0
    pool.release(blocks[2:3])
    assert pool.num_free == 1 and pool.allocate(1).tolist() == blocks[2:3].tolist()
    with pytest.raises(CacheFullError):
        pool.allocate(1)
    pool.release(blocks)
    assert pool.num_free == 5 and len(set(pool.allocate(5))) == 5


def test_neither_the_null_block_nor_a_missing_block_is_taken():
    pool = BlockPool(4)
    with pytest.raises(CacheFullError):
        pool.allocate(4)
    assert pool.num_free == 3 and NULL_BLOCK not in pool.allocate(3)
    pool.release(np.array([], np.intp))
    assert pool.num_free == 0 and len(pool.allocate(0)) == 0
