"""Lanes of a cache against lists of tokens: whatever a run writes and reorders, the host knows of it afterwards."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from fastformer.cache.block_pool import CacheFullError
from fastformer.cache.fixed_shape import LaneCache
from fastformer.cache.layer_view import AttentionCache
from fastformer.nn import KVCache
from fastformer.nn.cached_attention import attend_cached
from tests.no_sync import NoSync

BEAMS, GROUPS, SIZE, LONGEST, SPARE = 3, 4, 4, 40, 6


class Walk:
    """A cache, and what should be in it: of each group the tokens of its rows, and how long they may get."""

    def __init__(self, num_blocks: int | None = None) -> None:
        self.cache = KVCache(2, BEAMS * GROUPS, LONGEST, 1, 1, max_source_seqlen=9, num_blocks=num_blocks, block_size=4)
        self.spare = self.cache.set_aside(SPARE)
        self.groups: list[list[list[int]]] = []
        self.sources: list[list[int]] = []
        self.most: list[int] = []
        self.token = 0

    def add(self, prompt: int, source: int, most: int) -> None:
        self.cache.add()
        new = self.cache.tail(len(self.groups))
        self.sources.append([self._next() for _ in range(source)])
        packed = torch.tensor(self.sources[-1], dtype=torch.float32).view(-1, 1, 1)
        new.set_memory([packed] * 2, [packed] * 2, [source])
        tokens = [self._next() for _ in range(prompt)]
        if prompt:
            new.reserve(prompt, [prompt])
            new.k[:, new.slot_table[0, :prompt] // SIZE, new.slot_table[0, :prompt] % SIZE] = self._shaped(tokens)
            new.advance(prompt, [prompt])
        self.cache.reorder([*(range(BEAMS) for _ in self.groups), [0] * BEAMS])
        self.groups.append([list(tokens) for _ in range(BEAMS)])
        self.most.append(most)

    def _next(self) -> int:
        self.token += 1
        return self.token

    def _shaped(self, tokens: list[int]) -> torch.Tensor:
        return torch.tensor(tokens, dtype=torch.float32)[None, :, None, None]

    def run(self, lanes: LaneCache, steps: int, dice: random.Random, load: bool) -> None:
        last = np.array(self.most, np.int32) - 1
        lanes.provide(steps, last)
        if load:
            lanes.load(last)
        moves = []
        for _ in range(steps):
            parents = [lane // BEAMS * BEAMS + dice.randrange(BEAMS) for lane in range(lanes.num_rows)]
            tokens = torch.tensor([[float(self._next())] for _ in parents])[..., None]
            following = None if dice.random() < 0.2 else torch.tensor(parents)
            with NoSync():
                self._step(lanes, tokens, following)
            for group, rows in enumerate(self.groups):
                if len(rows[0]) >= self.most[group]:
                    continue
                for row, tail in enumerate(rows):
                    tail.append(int(tokens[group * BEAMS + row]))
                if following is not None:
                    own = [parents[group * BEAMS + row] - group * BEAMS for row in range(BEAMS)]
                    rows[:] = [list(rows[place]) for place in own]
            moves.append(parents if following is not None else list(range(lanes.num_rows)))
        lanes.settle(np.array(moves, np.int32))

    def _step(self, lanes: LaneCache, tokens: torch.Tensor, parents: torch.Tensor | None) -> None:
        lanes.reserve(1)
        slots = lanes.slot_table.gather(1, lanes.positions(1)).flatten().long()
        for layer in range(2):
            own = lanes[layer].self_attention
            assert own.slot_table is lanes.slot_table and own.seqlens is lanes.seqlens
            own.k.flatten(0, 1).index_copy_(0, slots, tokens)
        lanes.advance(1)
        lanes.follow(parents)

    def check(self) -> None:
        cache, stored = self.cache, self.cache.k.flatten(1, 2)[:, :, 0, 0]
        assert cache.lengths == [len(rows[0]) for rows in self.groups]
        table = cache.slot_table
        behind = torch.arange(table.shape[1]) >= cache.seqlens[:, None]
        assert not table.masked_select(behind).any()  # entries that mean nothing name block 0
        for group, rows in enumerate(self.groups):
            if len(rows[0]) >= self.most[group]:  # it has written its last token over and over, and is done
                continue
            for row, tokens in enumerate(rows):
                for layer in range(2):
                    assert stored[layer, table[group * BEAMS + row, : len(tokens)].long()].tolist() == tokens
        assert not cache.k[:, 0].any()  # nobody writes where nothing is


@pytest.mark.parametrize("seed", range(6))
def test_runs_leave_what_lists_hold(seed: int) -> None:
    dice, walk = random.Random(seed), Walk()
    everything = walk.cache.free_blocks
    for _ in range(2):
        walk.add(dice.randrange(6), dice.randint(1, 9), 30)
    lanes = LaneCache(walk.cache, GROUPS, BEAMS, LONGEST, 9, 5, walk.spare)
    addresses = [part.data_ptr() for part in (lanes.slot_table, lanes.seqlens)]
    load = True
    for _ in range(14):
        choice = dice.random()
        if choice < 0.3 and len(walk.groups) < GROUPS:
            prompt = dice.randrange(7)
            walk.add(prompt, dice.randint(1, 9), prompt + dice.randint(1, 25))
            load = True
        over = [group for group, rows in enumerate(walk.groups) if len(rows[0]) >= walk.most[group]]
        if over or (choice > 0.9 and len(walk.groups) > 1):
            over = over or [dice.randrange(len(walk.groups))]
            walk.cache.release(over)
            staying = [group for group in range(len(walk.groups)) if group not in over]
            walk.groups, walk.most = [walk.groups[i] for i in staying], [walk.most[i] for i in staying]
            load = True
        while len(walk.groups) < 2:  # there are spare slots for the lanes of two groups
            walk.add(1, 1, 9)
            load = True
        walk.run(lanes, dice.randint(1, 5), dice, load)
        load = False
        walk.check()
        if dice.random() < 0.2:  # a step that is taken some other way
            walk.cache.reserve(1)
            load = True
    assert [part.data_ptr() for part in (lanes.slot_table, lanes.seqlens)] == addresses
    walk.cache.reset()
    assert walk.cache.free_blocks == everything


def test_the_sources_of_groups_are_where_their_lanes_look() -> None:
    walk = Walk()
    for length in (3, 9, 1):
        walk.add(2, length, 9)
    walk.cache.release([0])
    walk.sources.pop(0)
    lanes = LaneCache(walk.cache, 3, BEAMS, 16, 9, 2, walk.spare)
    lanes.provide(1, np.array([8, 8], np.int32))
    lanes.load(np.array([8, 8], np.int32))
    cross = lanes[1].cross_attention
    assert cross is not None and cross.rows_per_source == BEAMS and cross.is_static
    assert cross.seqlens.tolist() == [9, 1, 0]
    for i, source in enumerate(walk.sources):
        assert cross.k.flatten(0, 1)[cross.slot_table[i, : len(source)].long()].flatten().tolist() == source
    # Queries of one source side by side see what they would see each alone.
    q = torch.randn(3 * BEAMS, 1, 1, 1)
    own = torch.arange(3).repeat_interleave(BEAMS)
    alone = AttentionCache(cross.k, cross.v, cross.slot_table[own], cross.seqlens[own])
    torch.testing.assert_close(attend_cached(cross, q), attend_cached(alone, q))


def test_blocks_that_are_not_there_are_not_taken() -> None:
    walk = Walk(num_blocks=14)
    walk.add(2, 3, 30)
    lanes = LaneCache(walk.cache, 1, BEAMS, LONGEST, 9, 20, walk.spare)
    before = walk.cache.free_blocks
    with pytest.raises(CacheFullError, match="free blocks"):
        lanes.provide(20, np.array([29], np.int32))
    assert walk.cache.free_blocks == before
    walk.run(lanes, 3, random.Random(0), True)
    walk.check()


def test_anything_but_a_token_a_row_is_refused() -> None:
    walk = Walk()
    walk.add(2, 3, 9)
    lanes = LaneCache(walk.cache, 1, BEAMS, LONGEST, 9, 2, walk.spare)
    assert (lanes.num_rows, lanes.length_bound, lanes.has_memory) == (BEAMS, 0, True)
    for call in (lambda: lanes.reserve(2), lambda: lanes.advance(1, [1]), lambda: lanes.positions(0)):
        with pytest.raises(ValueError, match="expected one token a row in a step that is replayed"):
            call()
    with pytest.raises(ValueError, match="expected the 3 rows of the cache, got a batch of 4"):
        lanes.check_rows(4)
