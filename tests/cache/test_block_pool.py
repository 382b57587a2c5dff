"""Tests the reference counts of blocks."""

from __future__ import annotations

import numpy as np
import pytest

from fastformer.cache.block_pool import NULL_BLOCK, BlockPool, CacheFullError


def test_a_block_is_free_when_its_last_holder_releases_it():
    pool = BlockPool(6)
    mine, yours = pool.take(3), pool.take(2)
    assert sorted([*mine, *yours]) == [1, 2, 3, 4, 5] and pool.num_free == 0
    pool.share(mine[:2])
    pool.release(mine)
    assert pool.num_free == 1 and pool.take(1).tolist() == mine[2:].tolist()
    with pytest.raises(CacheFullError):
        pool.take(1)
    pool.release(mine[:2])
    pool.release(yours)
    assert pool.num_free == 4 and len(set(pool.take(4))) == 4


def test_neither_the_null_block_nor_a_missing_block_is_taken():
    pool = BlockPool(4)
    with pytest.raises(CacheFullError):
        pool.take(4)
    assert pool.num_free == 3 and NULL_BLOCK not in pool.take(3)
    pool.release(np.array([], np.intp))
    assert pool.num_free == 0 and len(pool.take(0)) == 0
