"""Compares a fixed-shape batch with lists of tokens; after a run, the host knows its writes and forks."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from fastformer.cache import AttentionCache, CacheFullError, FixedShapeCache, KVCache
from fastformer.errors import InputError
from fastformer.nn.cached_attention import attend_cached
from tests.no_sync import NoSync

BEAMS, GROUPS, SIZE, LONGEST, SPARE = 3, 4, 4, 40, 6


class Walk:
    """A cache and its expected contents: the tokens of each row of each group, and their maximum lengths."""

    def __init__(self, num_blocks: int | None = None) -> None:
        self.cache = KVCache(2, BEAMS * GROUPS, LONGEST, 1, 1, max_source_seqlen=9, num_blocks=num_blocks, block_size=4)
        self.spare = self.cache.take_slots(SPARE)
        self.groups: list[list[list[int]]] = []
        self.sources: list[list[int]] = []
        self.most: list[int] = []
        self.token = 0

    def batch(self, num_groups: int = GROUPS, width: int = LONGEST) -> FixedShapeCache:
        return FixedShapeCache(self.cache, num_groups, BEAMS, width, 9, self.spare)

    def add(self, prompt: int, source: int, most: int) -> None:
        self.cache.add()
        new = self.cache.tail(len(self.groups))
        self.sources.append(self._tokens(source))
        packed = torch.tensor(self.sources[-1], dtype=torch.float32).view(-1, 1, 1)
        new.set_memory([packed] * 2, [packed] * 2, [source])
        tokens, step = self._tokens(prompt), new.begin(prompt)
        new.k.flatten(1, 2)[:, step.slot_table[0, :prompt].long(), 0, 0] = torch.tensor(tokens, dtype=torch.float32)
        new.commit(step)
        self.cache.fork([*(range(BEAMS) for _ in self.groups), [0] * BEAMS])
        self.groups.append([list(tokens) for _ in range(BEAMS)])
        self.most.append(most)

    def free(self, which: list[int]) -> None:
        self.cache.free(which)
        staying = [group for group in range(len(self.groups)) if group not in which]
        self.groups, self.most = [self.groups[i] for i in staying], [self.most[i] for i in staying]

    def _tokens(self, count: int) -> list[int]:
        self.token += count
        return [self.token - i for i in range(count)]

    def run(self, batch: FixedShapeCache, steps: int, dice: random.Random) -> None:
        batch.reserve_run(steps, np.array(self.most, np.int32) - 1)
        moves = []
        for _ in range(steps):
            parents = [row // BEAMS * BEAMS + dice.randrange(BEAMS) for row in range(batch.num_rows)]
            tokens = torch.tensor(self._tokens(batch.num_rows), dtype=torch.float32).view(-1, 1, 1)
            following = None if dice.random() < 0.2 else torch.tensor(parents)
            with NoSync():
                self._step(batch, tokens, following)
            for group, rows in enumerate(self.groups):
                if len(rows[0]) >= self.most[group]:
                    continue
                for row, tail in enumerate(rows):
                    tail.append(int(tokens[group * BEAMS + row]))
                if following is not None:
                    parent_rows = [parents[group * BEAMS + row] - group * BEAMS for row in range(BEAMS)]
                    rows[:] = [list(rows[place]) for place in parent_rows]
            moves.append(parents if following is not None else list(range(batch.num_rows)))
        assert batch.step.item() == steps
        batch.sync(np.array(moves, np.int32))

    def _step(self, batch: FixedShapeCache, tokens: torch.Tensor, parents: torch.Tensor | None) -> None:
        step = batch.begin(1)
        slots = step.slot_table.gather(1, batch.positions(1)).flatten().long()
        for layer in range(2):
            step.layer(layer).self_attention.k.flatten(0, 1).index_copy_(0, slots, tokens)
        batch.commit(step)
        batch.end_step(parents)

    def check(self) -> None:
        cache, stored = self.cache, self.cache.k.flatten(1, 2)[:, :, 0, 0]
        assert cache.lengths == [len(rows[0]) for rows in self.groups]
        table = cache.begin(0).slot_table.long()
        for group, rows in enumerate(self.groups):
            if len(rows[0]) >= self.most[group]:  # it has written its last token over and over, and is done
                continue
            for row, tokens in enumerate(rows):
                for layer in range(2):
                    assert stored[layer, table[group * BEAMS + row, : len(tokens)]].tolist() == tokens
        assert not cache.k[:, 0].any()


@pytest.mark.parametrize("is_host", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("seed", range(4))
def test_runs_equal_operations_on_lists(seed: int, is_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "_is_host", staticmethod(lambda device: is_host))
    dice, walk = random.Random(seed), Walk()
    everything, batch = walk.cache.free_blocks, walk.batch()
    addresses = [part.data_ptr() for part in (batch.slot_table, batch.seqlens)]
    for _ in range(14):
        over = [group for group, rows in enumerate(walk.groups) if len(rows[0]) >= walk.most[group]]
        if not over and dice.random() < 0.1 and len(walk.groups) > 1:
            over = [dice.randrange(len(walk.groups))]
        walk.free(over)
        # There are spare slots for the rows of two groups.
        while len(walk.groups) < 2 or (len(walk.groups) < GROUPS and dice.random() < 0.3):
            prompt = dice.randrange(7)
            walk.add(prompt, dice.randint(1, 9), prompt + dice.randint(1, 25))
        walk.run(batch, dice.randint(1, 5), dice)
        walk.check()
    assert [part.data_ptr() for part in (batch.slot_table, batch.seqlens)] == addresses
    walk.cache.reset()
    assert walk.cache.free_blocks == everything


def test_the_rows_of_a_group_find_its_source() -> None:
    walk = Walk()
    for length in (3, 9, 1):
        walk.add(2, length, 9)
    walk.free([0])
    batch = walk.batch(3, 16)
    batch.reserve_run(1, np.array([8, 8], np.int32))
    cross = batch.begin(1).layer(1).cross_attention
    assert cross is not None and cross.seqlens.tolist() == [9, 1, 0]
    for i, source in enumerate(walk.sources[1:]):
        assert cross.k.flatten(0, 1)[cross.slot_table[i, : len(source)].long()].flatten().tolist() == source
    # Queries of one source side by side see what they would see each alone.
    q = torch.randn(3 * BEAMS, 1, 1, 1)
    sources = torch.arange(3).repeat_interleave(BEAMS)
    alone = AttentionCache(cross.k, cross.v, cross.slot_table[sources], cross.seqlens[sources])
    torch.testing.assert_close(attend_cached(cross, q), attend_cached(alone, q))


def test_missing_blocks_are_not_taken() -> None:
    walk = Walk(num_blocks=14)
    walk.add(2, 3, 30)
    batch, before = walk.batch(1), walk.cache.free_blocks
    with pytest.raises(CacheFullError):
        batch.reserve_run(20, np.array([29], np.int32))
    assert walk.cache.free_blocks == before
    walk.run(batch, 3, random.Random(0))
    walk.check()


def test_anything_but_a_token_a_row_is_refused() -> None:
    walk = Walk()
    walk.add(2, 3, 9)
    batch = walk.batch(1)
    assert (batch.num_rows, batch.length_bound, batch.has_memory) == (BEAMS, 0, True)
    for call in (lambda: batch.begin(2), lambda: batch.begin(1, [1]), lambda: batch.positions(0)):
        with pytest.raises(InputError, match=r"\bnum_tokens\b"):
            call()
    with pytest.raises(InputError, match=r"\brows\b"):
        batch.check_rows(4)
