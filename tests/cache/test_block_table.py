"""The tables of a cache, held against lists of tokens in plain Python."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from fastformer.cache.device_tables import DeviceTables
from fastformer.cache.kv_cache import CacheFullError, KVCache
from tests.nn.comparing import taken

LAYERS, ROWS, SEQLEN, SOURCE, SIZE = 2, 9, 23, 7, 4


def new_cache(num_blocks=None, rows=ROWS, size=SIZE, **options):
    cache = KVCache(
        LAYERS, rows, SEQLEN, 1, 1, max_source_seqlen=SOURCE, num_blocks=num_blocks, block_size=size, **options
    )
    cache.k[:, 1:] = cache.v[:, 1:] = torch.nan  # what was never written must never be read
    return cache


class Row:
    """What a row should hold: its tokens, the (place, block column) each was written to, and the place it writes to."""

    def __init__(self, place, tokens=(), homes=(), first_column=0):
        self.place, self.tokens, self.homes, self.first_column = place, list(tokens), list(homes), first_column
        self.given = first_column  # columns for which the place has blocks (before first_column: not its own)


class Oracle:
    """Groups of rows as plain lists, driven along with a cache."""

    def __init__(self, cache):
        self.cache, self.groups, self.sources, self.places, self.token = cache, [], [], 0, 0.0

    def place(self):
        self.places += 1
        return self.places

    def rows(self, first=0):
        return [row for group in self.groups[first:] for row in group]

    def add(self, num_groups, rows):
        self.cache.add(num_groups, rows)
        self.groups += [[Row(self.place()) for _ in range(rows)] for _ in range(num_groups)]
        self.sources += [None] * num_groups

    def release(self, which):
        self.cache.release(which)
        self.groups = [group for i, group in enumerate(self.groups) if i not in which]
        self.sources = [source for i, source in enumerate(self.sources) if i not in which]

    def reorder(self, parents):
        self.cache.reorder(parents)
        for group, origins in zip(self.groups, parents, strict=True):
            new = []
            for i, origin in enumerate(origins):
                old = group[origin]
                if i < len(group):
                    row = Row(group[i].place, old.tokens, old.homes, group[i].first_column)
                    row.given = group[i].given
                else:
                    row = Row(self.place(), old.tokens, old.homes, len(old.tokens) // SIZE)
                new.append(row)
            group[:] = new

    def append(self, n, first=0, counts=None):
        """Reserves, writes as a layer would, advances."""
        cache = self.cache.tail(first) if first else self.cache
        rows = self.rows(first)
        each = [n] * len(rows) if counts is None else counts
        cache.reserve(n, counts)
        table = cache.slot_table
        for index, (row, count) in enumerate(zip(rows, each, strict=True)):
            for _ in range(count):
                self.token += 1
                position = len(row.tokens)
                slot = int(table[index, position])
                cache.k.flatten(1, 2)[:, slot] = self.token
                cache.v.flatten(1, 2)[:, slot] = -self.token
                row.tokens.append(self.token)
                row.homes.append((row.place, position // SIZE))
            row.given = max(row.given, -(-len(row.tokens) // SIZE))
        cache.advance(n, counts)

    def set_memory(self, lengths):
        groups = [i for i, source in enumerate(self.sources) if source is None]
        keys = []
        for group, length in zip(groups, lengths, strict=True):
            self.sources[group] = [self.token + 1 + i for i in range(length)]
            self.token += length
            keys += self.sources[group]
        packed = torch.tensor(keys).view(-1, 1, 1)
        self.cache.set_memory([packed] * LAYERS, [-packed] * LAYERS, lengths)

    def rewind(self):
        self.cache.rewind()
        for row in self.rows():
            row.tokens, row.homes, row.first_column, row.given = [], [], 0, 0

    def live_blocks(self):
        """Of every group: blocks that hold history of a row, or that a row writes to next or later."""
        total = 0
        for group in self.groups:
            blocks = {home for row in group for home in row.homes}
            for row in group:
                blocks |= {(row.place, column) for column in range(len(row.tokens) // SIZE, row.given)}
            total += len(blocks)
        return total + sum(-(-len(source) // SIZE) for source in self.sources if source is not None)

    def check(self, swept):
        cache, rows = self.cache, self.rows()
        assert (cache.num_rows, cache.num_groups) == (len(rows), len(self.groups))
        assert cache.group_sizes == [len(group) for group in self.groups]
        assert cache.lengths == [len(group[0].tokens) for group in self.groups]
        assert cache.seqlens.tolist() == [len(row.tokens) for row in rows]
        assert cache.length_bound == max((len(row.tokens) for row in rows), default=0)
        for layer in range(LAYERS):
            k, v = cache.k[layer].flatten(), cache.v[layer].flatten()
            for row, table in zip(rows, cache.slot_table, strict=True):
                held = table[: len(row.tokens)].long()
                assert k[held].tolist() == row.tokens and v[held].tolist() == [-token for token in row.tokens]
            own, cross = cache[layer].self_attention, cache[layer].cross_attention
            # Views of the same memory, as wide as the rows need: what is behind that is not read.
            width = min(SEQLEN, -(-(cache.length_bound + own.reserved) // SIZE) * SIZE)
            assert torch.equal(own.slot_table, cache.slot_table[:, :width])
            assert own.slot_table.data_ptr() == cache.slot_table.data_ptr() or not width * len(rows)
            if rows and cache.has_memory:
                longest = max(len(source) for source in self.sources)
                assert cross.slot_table.shape[1] == min(SOURCE, -(-longest // SIZE) * SIZE)
                wanted = [source for group, source in zip(self.groups, self.sources, strict=True) for _ in group]
                for key, source in zip(cross.batch_index.tolist(), wanted, strict=True):
                    assert cross.seqlens[key] == len(source)
                    held = cross.slot_table[key, : len(source)].long()
                    assert k[held].tolist() == source and v[held].tolist() == [-token for token in source]
        assert (cache.k[:, 0] == 0).all() and (cache.v[:, 0] == 0).all()
        live = self.live_blocks()
        assert taken(cache) == live if swept else taken(cache) >= live


def step_randomly(oracle, choice, rng):
    sizes = [len(group) for group in oracle.groups]
    room = ROWS - sum(sizes)
    longest = max((len(row.tokens) for row in oracle.rows()), default=0)
    if choice == "add" and room:
        rows = rng.randint(1, min(3, room))
        before = len(sizes)
        oracle.add(rng.randint(1, room // rows), rows)
        if rng.random() < 0.7:
            oracle.set_memory([rng.randint(0, SOURCE) for source in oracle.sources if source is None])
        lengths = [rng.randint(0, 6) for _ in oracle.groups[before:]]
        counts = [length for length, group in zip(lengths, oracle.groups[before:], strict=True) for _ in group]
        oracle.append(6, before, counts)
    elif choice == "release" and sizes:
        oracle.release(rng.sample(range(len(sizes)), rng.randint(1, min(2, len(sizes)))))
    elif choice == "reorder" and sizes:
        oracle.reorder([[rng.randrange(size) for _ in range(size)] for size in sizes])
    elif choice == "resize" and sizes:
        new = [rng.randint(1, size + min(2, room // len(sizes))) for size in sizes]
        oracle.reorder([[rng.randrange(size) for _ in range(n)] for size, n in zip(sizes, new, strict=True)])
    elif choice == "append" and sizes:
        oracle.append(min(rng.choice([1, 1, 1, 2, 5]), SEQLEN - longest))
    elif choice == "rewind":
        oracle.rewind()
    else:
        return False
    return True


@pytest.mark.parametrize("seed", range(12))
def test_random_walks_hold_what_lists_hold(seed):
    rng = random.Random(seed)
    cache = new_cache(num_blocks=120)
    oracle = Oracle(cache)
    choices = ["append"] * 8 + ["reorder"] * 5 + ["resize"] * 2 + ["add"] * 2 + ["release"]
    for _ in range(120):
        longest = max((len(row.tokens) for row in oracle.rows()), default=0)
        step_randomly(oracle, "release" if longest > SEQLEN - 3 else rng.choice(choices), rng)
        oracle.check(swept=False)
    if oracle.groups:
        step_randomly(oracle, "resize", rng)  # which sweeps
        oracle.check(swept=True)
        oracle.rewind()
        oracle.check(swept=True)
    cache.reset()
    assert taken(cache) == 0 and cache.num_rows == 0 and not cache.has_memory
    oracle = Oracle(cache)  # and begins anew
    oracle.add(2, 2)
    oracle.set_memory([3, SOURCE])
    oracle.append(5)
    oracle.check(swept=True)


def test_a_prompt_is_stored_once_for_all_rows_of_its_group():
    cache, oracle = (cache := new_cache()), Oracle(cache)
    oracle.add(2, 1)
    oracle.append(10, counts=[10, 6])
    assert taken(cache) == 3 + 2
    oracle.reorder([[0, 0, 0, 0], [0, 0]])
    assert taken(cache) == 3 + 2 and cache.blocks_needed(1) == 3 + 1
    oracle.append(1)
    # One more block for each row but the first of a group, which goes on in the block that it has begun.
    assert taken(cache) == 3 + 3 + 2 + 1
    oracle.check(swept=True)


def test_dead_beams_give_their_blocks_back():
    cache, oracle = (cache := new_cache(rows=4)), Oracle(cache)
    oracle.add(1, 4)
    oracle.append(8)
    assert taken(cache) == 4 * 2
    oracle.reorder([[2, 2, 2, 2]])
    oracle.append(1)  # which takes new blocks, and looks for dead ones first
    assert taken(cache) == 2 + 4
    oracle.check(swept=True)
    oracle.reorder([[1]])
    assert taken(cache) == 2 + 2  # place 0 has begun a block that its new history doesn't name
    oracle.check(swept=True)


def test_beams_that_never_shrink_fit_by_default():
    cache, oracle, rng = (cache := new_cache(rows=8)), Oracle(cache), random.Random(0)
    oracle.add(2, 4)
    oracle.set_memory([SOURCE, SOURCE])
    for _ in range(SEQLEN):
        oracle.append(1)
        oracle.reorder([[rng.randrange(4) for _ in range(4)] for _ in range(2)])
    oracle.check(swept=False)


def test_a_full_cache_takes_nothing():
    cache, oracle = (cache := new_cache(num_blocks=1 + 6)), Oracle(cache)
    oracle.add(1, 2)
    oracle.append(2 * SIZE)
    oracle.add(1, 1)
    oracle.append(SIZE, 1, [SIZE])
    before = cache.slot_table.clone()
    assert (cache.free_blocks, cache.blocks_needed(1), cache.blocks_of(5)) == (1, 3, 2)
    for call in (lambda: cache.reserve(1), lambda: cache.tail(1).reserve(SIZE + 1)):
        with pytest.raises(CacheFullError, match="1 free blocks of 6 and .* are needed"):
            call()
    with pytest.raises(ValueError, match="room for 23 tokens a row and holds up to 8; 16 more don't fit"):
        cache.reserve(16)
    packed = torch.zeros(5, 1, 1)
    cache.add()
    with pytest.raises(ValueError, match="a source for each of the 3 groups without one, got 1"):
        cache.set_memory([packed] * LAYERS, [packed] * LAYERS, [5])
    with pytest.raises(CacheFullError, match="1 free blocks of 6 and 2 are needed"):
        cache.tail(2).set_memory([packed] * LAYERS, [packed] * LAYERS, [5])
    cache.release([2])
    assert torch.equal(cache.slot_table, before) and cache.free_blocks == 1 and not cache.has_memory
    oracle.check(swept=True)
    # Dead blocks of a group that needs none now are found when they are wanted.
    oracle.reorder([[1, 1], [0]])
    assert cache.free_blocks == 1
    oracle.append(1, 1)
    oracle.append(SIZE - 1, 1)
    assert cache.free_blocks == 0
    oracle.append(1, 1)
    assert cache.free_blocks == 1
    oracle.check(swept=True)


def test_tokens_reserved_ahead_stay_with_their_place():
    cache, oracle = (cache := new_cache()), Oracle(cache)
    oracle.add(1, 2)
    cache.reserve(2 * SIZE)
    assert cache.blocks_needed(2 * SIZE) == 0 and cache.blocks_needed(2 * SIZE + 1) == 2
    for row in oracle.rows():
        row.given = 2
    oracle.append(3)
    oracle.check(swept=True)
    oracle.reorder([[1, 1]])
    assert (cache.slot_table[:, 3:] == 0).all()
    oracle.append(3)
    oracle.check(swept=False)
    assert len(set(cache.slot_table[:, 3:6].flatten().tolist())) == 6


@pytest.mark.parametrize("change", ["release", "resize", "reorder", "rewind", "add"])
def test_a_reservation_ends_when_rows_change(change):
    cache, oracle = (cache := new_cache()), Oracle(cache)
    oracle.add(3, 2)
    oracle.append(6, counts=[1, 1, 6, 6, 3, 3])
    cache.reserve(5)
    for row in oracle.rows():
        row.given = max(row.given, -(-(len(row.tokens) + 5) // SIZE))
    if change == "release":
        oracle.release([1])
    elif change == "reorder":
        oracle.reorder([[1, 0], [1, 1], [0, 0]])
    elif change == "resize":
        oracle.reorder([[1], [0, 1], [1, 0, 1]])
    elif change == "rewind":
        oracle.rewind()
    else:
        oracle.add(1, 2)
    assert cache[0].self_attention.reserved == 0
    assert (cache.slot_table[torch.arange(SEQLEN) >= cache.seqlens[:, None]] == 0).all()
    for _ in range(7):
        oracle.append(1)
        oracle.check(swept=False)
    oracle.reorder([[0]] * cache.num_groups)
    oracle.check(swept=True)


@pytest.mark.parametrize("between", ["reorder", "tail", "nothing"])
def test_single_steps_that_are_reserved_and_not_taken(between):
    """What was reserved for one step, and is reserved again, is the same slot; a view's step is not the others'."""
    cache, oracle = (cache := new_cache()), Oracle(cache)
    oracle.add(2, 2)
    for _ in range(SIZE + 1):
        oracle.append(1)
    cache.reserve(1)
    if between == "reorder":
        oracle.reorder([[1, 0], [1, 1]])
    elif between == "nothing":
        cache.advance(0)
        oracle.reorder([[1, 0], [1, 1]])
    else:
        oracle.append(1, 1)
    for _ in range(SIZE):
        oracle.append(1)
        oracle.check(swept=False)
    oracle.append(1, 1)
    oracle.check(swept=False)
    assert (cache.slot_table[torch.arange(SEQLEN) >= cache.seqlens[:, None]] == 0).all()


def test_a_row_can_be_filled_and_not_overfilled():
    cache, oracle = (cache := new_cache()), Oracle(cache)
    oracle.add(1, 2)
    for _ in range(SEQLEN):
        oracle.append(1)
    with pytest.raises(ValueError, match="room for 23 tokens a row and holds up to 23; 1 more don't fit"):
        cache.reserve(1)
    oracle.check(swept=True)


def test_views_of_the_last_groups():
    cache, oracle = (cache := new_cache()), Oracle(cache)
    oracle.add(3, 1)
    oracle.append(5)
    last = cache.tail(1).tail(1)
    assert (last.num_groups, last.lengths, last.num_rows) == (1, [5], 1)
    assert last.slot_table.tolist() == cache.slot_table[2:].tolist()
    last.reserve(1)
    with pytest.raises(ValueError, match="at most the 1 tokens that are reserved, got 1"):
        cache.advance(1)
    last.advance(1)
    last.reorder([[0, 0]])
    assert cache.group_sizes == [1, 1, 2] and cache.lengths == [5, 5, 6]
    cache.tail(1).release([0])
    assert cache.lengths == [5, 6]
    cache.tail(1).rewind()
    assert cache.lengths == [5, 0] and taken(cache) == 2
    source = torch.zeros(1, 3, 1, 1)
    cache.tail(1).set_memory([source] * LAYERS, [source] * LAYERS)
    assert cache.tail(1).has_memory and not cache.has_memory
    assert cache.tail(1)[0].cross_attention.batch_index.tolist() == [2, 2]


def test_a_layers_part_is_never_stale():
    cache = new_cache()
    cache.add(2)
    before = cache[0]
    assert before.cross_attention is None and before.self_attention.is_empty
    source = torch.zeros(2, 3, 1, 1)
    cache.set_memory([source] * LAYERS, [source] * LAYERS)
    assert cache[0].cross_attention.seqlens[:2].tolist() == [3, 3]
    cache.reserve(3, [1, 2])
    assert cache[1].self_attention.packed_slots.tolist() == [4 * 3, 4 * 4, 4 * 4 + 1]
    cache.reserve(2)
    assert cache[1].self_attention.packed_slots is None and cache[1].self_attention.reserved == 2
    assert cache[1].self_attention.slot_table[:, :2].tolist() == [[12, 13], [16, 17]]
    cache.advance(1)
    part = cache[1].self_attention
    assert (part.reserved, part.is_empty, part.seqlens.tolist()) == (1, False, [1, 1])
    cache.release([0])
    assert len(cache[1].self_attention.seqlens) == 1
    # A memory that is wider than what was allocated, before anything is stored.
    wide = KVCache(LAYERS, 5, SEQLEN, 1, 1, block_size=SIZE)
    wide.add(2, 2)
    narrow = wide[0]
    wide.set_memory([source] * LAYERS, [source] * LAYERS)
    assert narrow.cross_attention is None and wide.max_source_seqlen == 3 and wide.group_sizes == [2, 2]
    assert wide[0].cross_attention.slot_table.shape == (5, 3)
    wide.add()
    with pytest.raises(ValueError, match="at most max_source_seqlen = 3 tokens, got one of 4"):
        wide.set_memory([torch.zeros(1, 4, 1, 1)] * LAYERS, [torch.zeros(1, 4, 1, 1)] * LAYERS)


def test_entries_that_mean_nothing_name_block_0():
    cache, oracle, rng = (cache := new_cache()), Oracle(cache), random.Random(1)
    oracle.add(2, 2)
    oracle.append(6, counts=[6, 6, 2, 2])
    for _ in range(30):
        step_randomly(oracle, rng.choice(["append", "reorder", "resize", "release", "add"]), rng)
        unused = torch.arange(SEQLEN) >= cache.seqlens[:, None]
        assert (cache.slot_table[unused] == 0).all() and (cache.slot_table[~unused] >= SIZE).all()
        if cache.has_memory:
            cross = cache[0].cross_attention
            unused = torch.arange(SOURCE) >= cross.seqlens[:, None]
            assert (cross.slot_table[unused] == 0).all() and (cross.slot_table[~unused] >= SIZE).all()
            assert (cross.seqlens > 0).sum() == sum(len(source) > 0 for source in oracle.sources)
        if max(cache.lengths, default=0) > SEQLEN - 6:
            oracle.rewind()


def test_nothing_moves_and_nothing_is_allocated_in_a_step():
    cache, oracle = (cache := new_cache()), Oracle(cache)
    oracle.add(2, 2)
    oracle.append(5)
    pointers = [x.data_ptr() for x in (cache.k, cache.v, cache.seqlens, cache.slot_table)]
    versions = cache.k._version, cache.v._version
    cache.reserve(1)
    cache.advance(1)
    cache.reorder([[1, 1], [0, 1]])
    cache.release([0])
    cache.add(1, 2)
    assert (cache.k._version, cache.v._version) == versions
    assert [x.data_ptr() for x in (cache.k, cache.v, cache.seqlens, cache.slot_table)] == pointers


def test_the_device_has_what_the_host_has(monkeypatch):
    """With tables of its own, as on a GPU, the device lacks nothing at any look, and a step is one small upload."""
    monkeypatch.setattr(DeviceTables, "is_host", staticmethod(lambda device: False))
    cache, oracle = (cache := new_cache()), Oracle(cache)
    rng = random.Random(5)
    for _ in range(150):
        longest = max((len(row.tokens) for row in oracle.rows()), default=0)
        choices = ["append"] * 6 + ["reorder"] * 4 + ["resize", "add", "add", "release", "rewind"]
        step_randomly(oracle, "release" if longest > SEQLEN - 6 else rng.choice(choices), rng)
        oracle.check(swept=False)
        rows, tables = slice(0, cache.num_rows), cache._on_device
        assert np.array_equal(cache.slot_table.numpy(), tables.host.slots[rows])
        assert np.array_equal(tables.source_slots.numpy(), tables.host.source_slots)
    oracle.release(list(range(cache.num_groups)))
    oracle.add(2, 2)
    oracle.set_memory([2, 3])
    oracle.append(6)
    uploads = []
    staged = DeviceTables._staged

    def counted(self, tensor):
        uploads.append(tensor.numel())
        return staged(self, tensor)

    monkeypatch.setattr(DeviceTables, "_staged", counted)
    for _ in range(4):  # which begins a block
        assert cache.positions(1).flatten().tolist() == cache.lengths * 2
        cache.reserve(1)
        assert cache[0].cross_attention is not None and cache[1].self_attention.reserved == 1
        cache.advance(1)
        assert np.array_equal(cache.slot_table.numpy(), cache._on_device.host.slots[:4])
    assert uploads == [4 * 2] * 4  # of each row: where, and which slot
    cache.reserve(2)
    cache.advance(1)
    assert np.array_equal(cache.slot_table.numpy(), cache._on_device.host.slots[:4])
    assert uploads[4:] == [4 * 2 * 2]
    cache.reorder([[1, 0], [0, 0]])
    uploads.clear()
    for _ in range(3):
        assert cache.positions(1).flatten().tolist() == cache.lengths * 2
        cache.reserve(1)
        cache.reserve(1)
        assert cache[0].cross_attention is not None and cache[1].self_attention.reserved == 1
        cache.advance(1)
        assert cache.seqlens.tolist() == [cache.lengths[0]] * 4
        cache.reorder([[1, 0], [0, 0]])
    assert len(uploads) == 3 and max(uploads) == 4 * 14
    # Who comes, with its source, costs what is in use, not what there is room for.
    uploads.clear()
    oracle.cache.add(1, 1)
    cache.set_memory([torch.zeros(1, 2, 1, 1)] * LAYERS, [torch.zeros(1, 2, 1, 1)] * LAYERS, [2])
    cache.reserve(1)
    assert cache[0].cross_attention is not None
    assert max(uploads) <= 5 * 15
    for _ in range(3):
        cache.reserve(1)
        cache.advance(1)
    cache.reset()
    cache.add(2, 2)  # where those who left had entries, there are none
    assert (cache.slot_table == 0).all()


@pytest.mark.parametrize("recorder", ["compiler", "graph"])
def test_a_step_that_is_run_again_sees_all_columns(recorder, monkeypatch):
    cache, oracle = (cache := new_cache()), Oracle(cache)
    oracle.add(2, 2)
    oracle.set_memory([2, 3])
    oracle.append(2)
    cache.reserve(1)
    assert cache[0].self_attention.slot_table.shape[1] == cache[0].cross_attention.slot_table.shape[1] == SIZE
    if recorder == "compiler":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    else:
        cache._is_cuda = True
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    part = cache[0]
    assert part.self_attention.slot_table.shape == (4, SEQLEN)
    assert part.cross_attention.slot_table.shape == (ROWS, SOURCE)


def test_a_device_without_values_is_never_asked():
    """On meta nothing can be read back, so this is what holds without a host sync."""
    cache = new_cache(device="meta", dtype=torch.bfloat16)
    cache.add(2, 2)
    source = torch.empty(5, 1, 1, device="meta")
    cache.set_memory([source] * LAYERS, [source] * LAYERS, [2, 3])
    cache.reserve(3, [3, 3, 1, 1])
    part = cache[1]
    assert part.self_attention.packed_slots.shape == (8,) and part.cross_attention.batch_index.shape == (8,)
    cache.advance(3, [3, 3, 1, 1])
    cache.reorder([[1, 1, 0], [0]])
    cache.reserve(1)
    part = cache[1]
    own, cross = part.self_attention, part.cross_attention
    assert own.slot_table.shape == (4, SIZE) and own.seqlens.shape == cross.batch_index.shape == (4,)
    assert cross.slot_table.shape == (ROWS, SIZE) and cache.positions(1).shape == (4, 1)
    assert all(x.is_meta for x in (own.k, own.slot_table, own.seqlens, cross.batch_index, cross.slot_table))
    cache.advance(1)
    cache.release([0])
    assert cache.lengths == [2] and cache.seqlens.is_meta and own.k.dtype == torch.bfloat16


def test_fewer_sources_than_rows_get_fewer_blocks():
    sizes = {"max_source_seqlen": SIZE + 1, "block_size": SIZE}
    assert KVCache(LAYERS, 6, 2 * SIZE, 1, 1, **sizes).num_blocks == 1 + 6 * 2 + 6 * 2
    assert KVCache(LAYERS, 6, 2 * SIZE + 1, 1, 1, num_sources=2, **sizes).num_blocks == 1 + 6 * 3 + 2 * 2
    with pytest.raises(ValueError, match="num_sources to be an integer of at least 0, got -1"):
        KVCache(LAYERS, 6, 2 * SIZE, 1, 1, num_sources=-1, **sizes)


def test_errors():
    cache = new_cache()
    with pytest.raises(ValueError, match="groups of 1 row or more, 9 rows in all; got 2 of 5 behind 0"):
        cache.add(2, 5)
    with pytest.raises(ValueError, match="groups of 1 row or more"):
        cache.add(1, 0)
    cache.add(2, 2)
    for groups in ([0, 0], [2], [-1]):
        with pytest.raises(ValueError, match="expected different groups out of 2"):
            cache.release(groups)
    for parents, message in (
        ([[0, 1]], "parents of 2 groups"),
        ([[0, 1], []], "parents of 2 groups, one or more each"),
        ([[0, 1], [0, 2]], r"inside of groups of \[2, 2\], got"),
        ([[0, 1], [-1, 0]], r"inside of groups of \[2, 2\], got"),
        ([[0], [0, 2, 0]], r"inside of groups of \[2, 2\], got"),
        ([[0] * 5, [0] * 5], "at most 9 rows in all, got 10"),
        ([1, 1, 0, 0], r"parents of 2 groups, .* as lists of integers, got \[1, 1, 0, 0\]"),
        ([[0, 1], [1.7, 1]], r"parents of 2 groups, .* as lists of integers, got .*1\.7"),
        ([[0, 1], [1.0, 1]], "parents of 2 groups, .* as lists of integers"),
        ([[0, 1], "01"], "parents of 2 groups, .* as lists of integers"),
        ([[0, 1], [0, 2**40]], "parents of 2 groups, .* as lists of integers"),
        (None, "parents of 2 groups, .* as lists of integers, got None"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.reorder(parents)
    assert cache.group_sizes == [2, 2]
    with pytest.raises(ValueError, match="at most the 0 tokens that are reserved, got 1"):
        cache.advance(1)
    cache.reserve(3)
    with pytest.raises(ValueError, match=r"one length for all rows of a group of \[2, 2\], got \[1 2 3 3\]"):
        cache.advance(3, [1, 2, 3, 3])
    with pytest.raises(ValueError, match="from 0 to 3 tokens a row, as reserved"):
        cache.advance(3, torch.tensor([1, 1, 4, 4]))
    with pytest.raises(ValueError, match="seqlens of shape .* with integers, got float32"):
        cache.advance(3, torch.ones(4))
    cache.reserve(3, [1, 1, 3, 3])
    with pytest.raises(ValueError, match="from 0 to 3 tokens a row, as reserved"):
        cache.advance(3)
    with pytest.raises(ValueError, match="first_group from 0 to 2, got 3"):
        cache.tail(3)
    x = torch.zeros(2, 8, 1, 1)
    with pytest.raises(ValueError, match="keys and values of 2 layers, got 1 and 1"):
        cache.set_memory([x], [x])
    with pytest.raises(ValueError, match="at most max_source_seqlen = 7 tokens, got one of 8"):
        cache.set_memory([x, x], [x, x])
    with pytest.raises(ValueError, match=r"seqlens that keys of shape .* have, got \[9, 1\]"):
        cache.set_memory([x, x], [x, x], [9, 1])
    with pytest.raises(ValueError, match=r"seqlens that keys of shape .* have, got \[9, 9\]"):
        cache.set_memory([x.flatten(0, 1)] * 2, [x.flatten(0, 1)] * 2, [9, 9])
    with pytest.raises(ValueError, match=r"\(sources, source_seqlen, 1, 1\) or .*, got \(2, 8, 1, 2\)"):
        cache.set_memory([x.expand(2, 8, 1, 2)] * 2, [x.expand(2, 8, 1, 2)] * 2)
    with pytest.raises(ValueError, match="expected seqlens along with packed keys"):
        cache.set_memory([x[0]] * 2, [x[0]] * 2)
    for name, value in (("num_blocks", 1), ("block_size", 0), ("max_source_seqlen", -1)):
        with pytest.raises(ValueError, match=f"expected {name} to be an integer of at least"):
            KVCache(1, 1, 1, 1, 1, **{name: value})
