"""Compares the cache with lists of tokens in plain Python."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastformer.cache import CacheFullError, KVCache
from fastformer.cache.block_pool import NULL_BLOCK, BlockPool
from fastformer.errors import InputError
from tests.nn.comparing import taken

LAYERS, ROWS, SEQLEN, SOURCE, SIZE = 2, 9, 23, 7, 4


def new_cache(num_blocks=None, rows=ROWS, **options):
    sizes = {"max_source_seqlen": SOURCE, "num_blocks": num_blocks, "block_size": SIZE}
    cache = KVCache(LAYERS, rows, SEQLEN, 1, 1, **{**sizes, **options})
    cache.k[:, 1:] = cache.v[:, 1:] = torch.nan  # what was never written must never be read
    return cache


class Oracle:
    """The expected contents of a cache, which follow the same operations: the tokens of each group's rows, and its
    source.
    """

    def __init__(self, cache):
        self.cache, self.token = cache, 0.0
        self.groups: list[list[list[float]]] = []
        self.sources: list[list[float] | None] = []

    def tokens(self, n):
        self.token += n
        return [self.token - i for i in range(n)]

    def add(self, num_groups, rows):
        self.cache.add(num_groups, rows)
        self.groups += [[[] for _ in range(rows)] for _ in range(num_groups)]
        self.sources += [None] * num_groups

    def free(self, which):
        self.cache.free(which)
        self.groups = [group for i, group in enumerate(self.groups) if i not in which]
        self.sources = [source for i, source in enumerate(self.sources) if i not in which]

    def fork(self, parents):
        self.cache.fork(parents)
        self.groups = [[list(group[i]) for i in rows] for group, rows in zip(self.groups, parents, strict=True)]

    def rewind(self):
        self.cache.rewind()
        self.groups = [[[] for _ in group] for group in self.groups]

    def append(self, n, first=0, counts=None, is_packed=False):
        """Begins a step, writes the keys and values of a layer, including padding, and commits."""
        cache = self.cache.tail(first) if first else self.cache
        rows = [row for group in self.groups[first:] for row in group]
        step = cache.begin(n, counts, is_packed)
        packed = []
        for index, row in enumerate(rows):
            new = self.tokens(n if counts is None else counts[index])
            table = step.slot_table[index, len(row) :].tolist()
            packed += table[: len(new)]
            for layer in range(LAYERS):
                view = step.layer(layer).self_attention
                for slot, token in zip(table, new if is_packed else new + [torch.inf] * (n - len(new)), strict=False):
                    view.k.view(-1)[slot], view.v.view(-1)[slot] = token, -token
            row += new
        if is_packed:
            assert step.layer(1).self_attention.packed_slots.tolist() == packed
        cache.commit(step)

    def set_memory(self, lengths):
        new = [self.tokens(length) for length in lengths]
        keys = torch.tensor([token for source in new for token in source]).view(-1, 1, 1)
        self.cache.set_memory([keys] * LAYERS, [-keys] * LAYERS, lengths)
        self.sources = [new.pop(0) if source is None else source for source in self.sources]

    def check(self, is_collected=False):
        cache, rows = self.cache, [row for group in self.groups for row in group]
        assert (cache.num_rows, cache.num_groups) == (len(rows), len(self.groups))
        assert cache.group_sizes == [len(group) for group in self.groups]
        assert cache.lengths == [len(group[0]) for group in self.groups]
        assert cache.seqlens.tolist() == [len(row) for row in rows]
        assert cache.length_bound == max((len(row) for row in rows), default=0)
        step = cache.begin(0)  # what is there
        assert step.slot_table.shape == (len(rows), -(-cache.length_bound // SIZE) * SIZE)
        blocks = {int(s) // SIZE for table, row in zip(step.slot_table, rows, strict=True) for s in table[: len(row)]}
        has_memory = bool(rows) and None not in self.sources
        assert cache.has_memory == has_memory
        for index in range(LAYERS):
            self_attn, cross = step.layer(index)
            for row, table in zip(rows, self_attn.slot_table.long(), strict=True):
                assert self_attn.k.view(-1)[table[: len(row)]].tolist() == row
                assert self_attn.v.view(-1)[table[: len(row)]].tolist() == [-token for token in row]
            if has_memory:
                expected = [source for group, source in zip(self.groups, self.sources, strict=True) for _ in group]
                for key, source in zip(cross.batch_index.tolist(), expected, strict=True):
                    assert cross.seqlens[key] == len(source)
                    slots = cross.slot_table[key, : len(source)].long()
                    assert cross.k.view(-1)[slots].tolist() == source
                    assert cross.v.view(-1)[slots].tolist() == [-token for token in source]
        assert not cache.k[:, 0].any() and not cache.v[:, 0].any()
        held_by_sources = sum(-(-len(source) // SIZE) for source in self.sources if source is not None)
        # Beside what it reads a row holds the block that it writes to.
        spare = taken(cache) - len(blocks) - held_by_sources
        assert spare >= 0 and (not is_collected or spare <= len(rows))


def step_randomly(oracle, choice, rng):
    sizes = [len(group) for group in oracle.groups]
    room = ROWS - sum(sizes)
    longest = max((len(row) for group in oracle.groups for row in group), default=0)
    if choice == "add" and room:
        rows, before = rng.randint(1, min(3, room)), len(sizes)
        oracle.add(rng.randint(1, room // rows), rows)
        if rng.random() < 0.7:
            oracle.set_memory([rng.randint(0, SOURCE) for source in oracle.sources if source is None])
        counts = [length for group in oracle.groups[before:] for length in [rng.randint(0, 6)] * len(group)]
        oracle.append(6, before, counts, rng.random() < 0.5)
    elif choice == "free" and sizes:
        oracle.free(rng.sample(range(len(sizes)), rng.randint(1, min(2, len(sizes)))))
    elif choice == "fork" and sizes:
        oracle.fork([[rng.randrange(size) for _ in range(size)] for size in sizes])
    elif choice == "resize" and sizes:
        new = [rng.randint(1, size + min(2, room // len(sizes))) for size in sizes]
        oracle.fork([[rng.randrange(size) for _ in range(n)] for size, n in zip(sizes, new, strict=True)])
    elif choice == "append" and sizes:
        oracle.append(min(rng.choice([1, 1, 1, 2, 5]), SEQLEN - longest))
    elif choice == "abandon" and sizes:  # a step that fails
        oracle.cache.begin(min(rng.choice([1, 3]), SEQLEN - longest))


@pytest.mark.parametrize("is_host", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("seed", range(5))
def test_random_operations_equal_those_on_lists(seed, is_host, monkeypatch):
    """The cache may have its tables in separate memory, as on a GPU, and these are complete whenever they are read."""
    monkeypatch.setattr(KVCache, "_is_host", staticmethod(lambda device: is_host))
    rng = random.Random(seed)
    oracle = Oracle(cache := new_cache(num_blocks=70))
    choices = ["append"] * 8 + ["fork"] * 5 + ["resize"] * 2 + ["add"] * 2 + ["free", "abandon"]
    for _ in range(100):
        longest = max((len(row) for group in oracle.groups for row in group), default=0)
        step_randomly(oracle, "free" if longest > SEQLEN - 6 else rng.choice(choices), rng)
        oracle.check()
    if oracle.groups:
        oracle.fork([[0]] * len(oracle.groups))
        oracle.check(is_collected=True)
    cache.rewind()
    assert taken(cache) == sum(-(-len(source) // SIZE) for source in oracle.sources if source)
    cache.reset()
    assert taken(cache) == 0 and cache.num_rows == 0 and not cache.has_memory
    oracle = Oracle(cache)  # and begins anew
    oracle.add(2, 2)
    oracle.set_memory([3, SOURCE])
    oracle.append(5)
    oracle.check()


def test_a_prompt_is_stored_once_for_all_rows_of_its_group():
    oracle = Oracle(cache := new_cache())
    oracle.add(2, 1)
    oracle.append(10, counts=[10, 6], is_packed=True)
    assert taken(cache) == 3 + 2
    oracle.fork([[0, 0, 0, 0], [0, 0]])
    assert taken(cache) == 3 + 2 and cache.blocks_needed(1) == 3 + 1
    oracle.append(1)
    # One more block for each row but the first of a group, which goes on in the block that it has begun.
    assert taken(cache) == 3 + 3 + 2 + 1
    oracle.check(is_collected=True)


def test_dead_beams_give_their_blocks_back():
    oracle = Oracle(cache := new_cache(rows=4))
    oracle.add(1, 4)
    oracle.append(8)
    assert taken(cache) == 4 * 2
    oracle.fork([[2, 2, 2, 2]])
    oracle.append(1)  # which takes new blocks, and collects first
    assert taken(cache) == 2 + 4
    oracle.check()
    oracle.fork([[1]])
    assert taken(cache) == 2 + 2  # row 0 has begun a block that its new history doesn't name
    oracle.check(is_collected=True)


def test_beams_that_never_shrink_fit_by_default():
    oracle, rng = Oracle(new_cache(rows=8)), random.Random(0)
    oracle.add(2, 4)
    oracle.set_memory([SOURCE, SOURCE])
    for _ in range(SEQLEN):
        oracle.append(1)
        oracle.fork([[rng.randrange(4) for _ in range(4)] for _ in range(2)])
    oracle.check()
    with pytest.raises(InputError, match=r"\bmax_seqlen\b"):
        oracle.cache.begin(1)


def test_a_full_cache_takes_nothing():
    oracle = Oracle(cache := new_cache(num_blocks=1 + 6))
    oracle.add(1, 2)
    oracle.append(2 * SIZE)
    oracle.add(1, 1)
    oracle.append(SIZE, 1)
    assert (cache.free_blocks, cache.blocks_needed(1), cache.blocks_of(5)) == (1, 3, 2)
    packed = [torch.zeros(5, 1, 1)] * LAYERS
    cache.add()
    for call in (
        lambda: cache.begin(1),
        lambda: cache.tail(1).begin(SIZE + 1),
        lambda: cache.tail(2).set_memory(packed, packed, [5]),
        lambda: cache.take_slots(2 * SIZE),
    ):
        with pytest.raises(CacheFullError):
            call()
    cache.free([2])
    assert cache.free_blocks == 1 and not cache.has_memory
    oracle.check()
    # What a fork of another group has left behind is collected before a block is missing.
    oracle.fork([[1, 1], [0]])
    oracle.append(SIZE, 1)
    oracle.append(1, 1)
    assert cache.free_blocks == 1
    oracle.check()


@pytest.mark.parametrize("change", ["free", "fork", "resize", "rewind", "add", "begin", "commit", "set_memory", "tail"])
def test_an_uncommitted_step_changes_no_length(change):
    oracle = Oracle(cache := new_cache())
    oracle.add(3, 2)
    oracle.append(6, counts=[1, 1, 6, 6, 3, 3])
    step = cache.begin(5)
    {
        "free": lambda: oracle.free([1]),
        "fork": lambda: oracle.fork([[1, 0], [1, 1], [0, 0]]),
        "resize": lambda: oracle.fork([[1], [0, 1], [1, 0, 1]]),
        "rewind": oracle.rewind,
        "add": lambda: oracle.add(1, 2),
        "begin": lambda: cache.begin(2),
        "commit": lambda: oracle.append(1),
        "set_memory": lambda: oracle.set_memory([1, 2, 3]),
        "tail": lambda: oracle.append(1, 1),
    }[change]()
    oracle.check()
    with pytest.raises(InputError):
        cache.commit(step)
    oracle.check()
    for _ in range(7):
        oracle.append(1)
        oracle.check()
    last = cache.begin(1)
    cache.commit(last)
    with pytest.raises(InputError):
        cache.commit(last)


def test_views_of_the_last_groups():
    oracle = Oracle(cache := new_cache())
    oracle.add(3, 1)
    oracle.append(5)
    last = cache.tail(1).tail(1)
    assert (last.num_groups, last.lengths, last.num_rows) == (1, [5], 1)
    assert last.begin(0).slot_table.tolist() == cache.begin(0).slot_table[2:].tolist()
    last.commit(last.begin(1))
    last.fork([[0, 0]])
    assert cache.group_sizes == [1, 1, 2] and cache.lengths == [5, 5, 6]
    cache.tail(1).free([0])
    cache.tail(1).rewind()
    assert cache.lengths == [5, 0] and taken(cache) == 2
    source = [torch.zeros(1, 3, 1, 1)] * LAYERS
    cache.tail(1).set_memory(source, source)
    assert cache.tail(1).has_memory and not cache.has_memory
    assert cache.tail(1).begin(1).layer(0).cross_attention.batch_index.tolist() == [2, 2]


def test_a_memory_that_is_wider_than_what_was_allocated():
    cache = new_cache(max_source_seqlen=None)
    cache.add(2, 2)
    assert cache.begin(0).layer(0).cross_attention is None
    source = [torch.zeros(2, 3, 1, 1)] * LAYERS
    cache.set_memory(source, source)
    assert cache.max_source_seqlen == 3 and cache.group_sizes == [2, 2]
    assert cache.begin(1).layer(0).cross_attention.seqlens[:2].tolist() == [3, 3]
    cache.add()
    with pytest.raises(InputError, match=r"\bmax_source_seqlen\b"):
        cache.set_memory([torch.zeros(1, 4, 1, 1)] * LAYERS, [torch.zeros(1, 4, 1, 1)] * LAYERS)


class CopyCounter(TorchDispatchMode):
    """Counts the copies into a tensor."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def test_a_step_inside_a_block_uploads_only_lengths(monkeypatch):
    monkeypatch.setattr(KVCache, "_is_host", staticmethod(lambda device: False))
    oracle = Oracle(cache := new_cache())
    oracle.add(2, 2)
    oracle.set_memory([2, 3])
    oracle.append(5)
    before = [x.data_ptr() for x in cache.begin(1)[2:6] if x is not None], cache.k._version
    with CopyCounter() as copies:
        for _ in range(3):
            cache.commit(cache.begin(1))
    assert copies.sizes == [4] * 3
    with CopyCounter() as copies:
        cache.fork([[1, 1], [0, 1]])
        cache.commit(cache.begin(1))  # each row begins a block
    assert copies.sizes == [4 * 8, 4 * 12, 4]  # what is in use, not what there is room for
    assert ([x.data_ptr() for x in cache.begin(1)[2:6] if x is not None], cache.k._version) == before


@pytest.mark.parametrize("recorder", ["compiler", "graph"])
def test_a_recorded_step_uses_all_columns_and_not_the_host(recorder, monkeypatch):
    oracle = Oracle(cache := new_cache())
    oracle.add(2, 2)
    oracle.set_memory([2, 3])
    oracle.append(2)
    step = cache.begin(1)
    with monkeypatch.context() as patched:
        if recorder == "compiler":
            patched.setattr(torch.compiler, "is_compiling", lambda: True)
        else:
            patched.setattr(KVCache, "_is_recorded", lambda self: True)
        self_attn, cross = (recorded := cache.begin(1)).layer(0)
        assert self_attn.slot_table.shape == (4, 24) and cross.slot_table.shape == (ROWS, 8) and not self_attn.is_empty
        cache.commit(recorded)
        for wrong in ({"num_tokens": 2}, {"num_tokens": 1, "seqlens": [1, 1, 1, 1]}):
            with pytest.raises(InputError, match=r"\bnum_tokens\b"):
                cache.begin(**wrong)
    assert cache.lengths == [2, 2]
    cache.commit(step)
    assert cache.lengths == [3, 3]


def test_values_on_the_meta_device_are_never_read():
    """On meta, no value can be read, so this shows that the host never waits for the device."""
    cache = new_cache(device="meta", dtype=torch.bfloat16)
    cache.add(2, 2)
    source = [torch.empty(5, 1, 1, device="meta")] * LAYERS
    cache.set_memory(source, source, [2, 3])
    step = cache.begin(3, [3, 3, 1, 1], is_packed=True)
    attn, cross = step.layer(1)
    assert attn.packed_slots.shape == cross.batch_index.shape == (8,)
    cache.commit(step)
    cache.fork([[1, 1, 0], [0]])
    attn, cross = (step := cache.begin(1)).layer(1)
    assert attn.slot_table.shape == (4, SIZE) and attn.seqlens.shape == cross.batch_index.shape == (4,)
    assert cross.slot_table.shape == (ROWS, SIZE) and cache.positions(1).shape == (4, 1)
    assert all(x.is_meta for x in (attn.k, attn.slot_table, attn.seqlens, cross.batch_index, cross.slot_table))
    cache.commit(step)
    cache.free([0])
    assert cache.lengths == [2] and cache.seqlens.is_meta and attn.k.dtype == torch.bfloat16


def test_fewer_sources_than_rows_get_fewer_blocks():
    sizes = {"max_source_seqlen": SIZE + 1, "block_size": SIZE}
    assert KVCache(LAYERS, 6, 2 * SIZE, 1, 1, **sizes).num_blocks == 1 + 6 * 2 + 6 * 2
    assert KVCache(LAYERS, 6, 2 * SIZE + 1, 1, 1, num_sources=2, **sizes).num_blocks == 1 + 6 * 3 + 2 * 2


def test_wrong_calls_change_nothing():
    oracle = Oracle(cache := new_cache())
    oracle.add(2, 2)
    oracle.append(2)
    x = torch.zeros(2, 8, 1, 1)
    flat = x.flatten(0, 1)
    parents = ([[0, 1]], [[0, 1], []], [[0, 1], [0, 2]], [[0, 1], [-1, 0]], [[0], [0, 2, 0]], [[0] * 5, [0] * 5])
    no_lists = ([1, 1, 0, 0], [[0, 1], [1.7, 1]], [[0, 1], [1.0, 1]], [[0, 1], "01"], [[0, 1], [0, 2**40]], None)
    wrong = [
        *(("max_rows", lambda n=n, rows=rows: cache.add(n, rows)) for n, rows in ((2, 5), (1, 0), (-1, 1))),
        *(("groups", lambda groups=groups: cache.free(groups)) for groups in ([0, 0], [2], [-1])),
        *(("parents", lambda moves=moves: cache.fork(moves)) for moves in (*parents, *no_lists)),
        *(("num_tokens", lambda n=n: cache.begin(n)) for n in (-1, SEQLEN - 1)),
        *(("seqlens", lambda n=n: cache.begin(3, n)) for n in ([1, 2, 3, 3], [1, 1], [1, 1, 4, 4], [-1, -1, 1, 1])),
        ("seqlens", lambda: cache.begin(3, torch.ones(4))),
        ("first_group", lambda: cache.tail(3)),
        ("layers", lambda: cache.set_memory([x], [x])),
        ("max_source_seqlen", lambda: cache.set_memory([x, x], [x, x])),
        ("seqlens", lambda: cache.set_memory([x, x], [x, x], [9, 1])),
        ("seqlens", lambda: cache.set_memory([flat] * 2, [flat] * 2, [9, 9])),
        ("seqlens", lambda: cache.set_memory([flat] * 2, [flat] * 2)),
        ("keys", lambda: cache.set_memory([x.expand(2, 8, 1, 2)] * 2, [x.expand(2, 8, 1, 2)] * 2)),
        ("groups", lambda: cache.set_memory([x[:1, :5]] * 2, [x[:1, :5]] * 2)),
        ("rows", lambda: cache.check_rows(5)),
        ("num_layers", lambda: KVCache(0, 3, 7, 3, 4)),
        *((name, lambda name=name: KVCache(1, 1, 1, 1, 1, **{name: -1})) for name in ("num_blocks", "num_sources")),
        *((name, lambda name=name: KVCache(1, 1, 1, 1, 1, **{name: 1.5})) for name in ("block_size", "max_rows")[:1]),
    ]
    for name, call in wrong:
        with pytest.raises(InputError, match=rf"\b{name}\b"):
            call()
        oracle.check()


# Tests the pool of free blocks.


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
