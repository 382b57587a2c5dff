"""Any write into watched memory or a model's weights is noticed."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fastformer.generation import generate, repack
from fastformer.generation.engines.cpp_support import find_guards
from fastformer.models import GPT, Transformer
from fastformer.nn import page_watch, prepack
from fastformer.nn.page_watch import PageWatch
from tests.generation.small import needs_cpp
from tests.generation.weights import drawn

fingerprint = functools.partial(prepack.fingerprint, find=find_guards)
packed = functools.partial(prepack.packed, find=find_guards)

PAGE = mmap.PAGESIZE


def can_watch() -> bool:
    tensor = torch.zeros(4 * PAGE, dtype=torch.uint8)
    return watch_of(tensor).begin()


def watch_of(*tensors: torch.Tensor) -> PageWatch:
    return PageWatch([(one.data_ptr(), one.data_ptr() + one.numel() * one.element_size()) for one in tensors])


needs_watch = pytest.mark.skipif(not can_watch(), reason="this system doesn't say what was written")


@needs_watch
def test_each_byte_is_watched_and_reading_is_not_writing(tmp_path) -> None:
    tensor = torch.randn(64 * PAGE // 4)
    watch = watch_of(tensor)
    assert watch.is_written()  # until it has begun
    (begin, end), dice = watch.ranges[0], random.Random(1)
    assert begin - tensor.data_ptr() < PAGE and tensor.data_ptr() + 64 * PAGE - end < PAGE
    first, count = (begin - tensor.data_ptr()) // 4, (end - begin) // 4
    for place in (first, first + count - 1, *(dice.randrange(first, first + count) for _ in range(40))):
        assert watch.begin() and not watch.is_written()
        float(tensor.sum()), tensor.clone(), tensor.numpy().tobytes()
        assert not watch.is_written()
        tensor[place] += 1
        assert watch.is_written() and watch.is_written()
    # By the kernel, and by another thread.
    (tmp_path / "bytes").write_bytes(bytes(8))
    assert watch.begin()
    with open(tmp_path / "bytes", "rb") as file:
        file.readinto(memoryview(tensor.numpy()[first + 9 : first + 11]).cast("B"))
    assert watch.is_written() and watch.begin()
    thread = threading.Thread(target=lambda: tensor[first:].fill_(1))
    thread.start()
    thread.join()
    assert watch.is_written()
    # What lies beside it isn't watched.
    assert watch.begin()
    tensor[:first] = 0
    assert not watch.is_written()
    watch.end()
    assert watch.is_written()


@needs_watch
def test_a_new_watch_takes_nothing_from_another_one() -> None:
    tensor = torch.zeros(40 * PAGE // 4)
    elsewhere = torch.zeros(8 * PAGE)
    whole, part, other = watch_of(tensor), watch_of(tensor[15 * PAGE // 4 :]), watch_of(elsewhere)
    assert whole.begin() and part.begin() and other.begin()
    tensor[20 * PAGE // 4] = 1
    assert part.begin() and not part.is_written() and whole.is_written()
    assert whole.begin() and not whole.is_written() and not other.is_written()
    part.end()  # which takes the other's protection away: that is no silence
    assert whole.is_written() and whole.begin() and not whole.is_written()


@needs_watch
@pytest.mark.parametrize("has_id_of_its_own", [True, False])
def test_a_child_and_its_parent_notice_only_their_own_writes(has_id_of_its_own, monkeypatch) -> None:
    mine = os.getpid()
    if not has_id_of_its_own:
        monkeypatch.setattr(os, "getpid", lambda: mine)  # as in two containers, one in the other
    tensor = torch.zeros(8 * PAGE // 4)
    watch = watch_of(tensor)
    assert watch.begin()
    pid = os.fork()
    if pid == 0:
        tensor[3 * PAGE // 4] = 1
        fine = watch.is_written() and watch.begin() and not watch.is_written()
        tensor[3 * PAGE // 4] = 2
        os._exit(0 if fine and watch.is_written() else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert not watch.is_written()
    tensor[3 * PAGE // 4] = 1
    assert watch.is_written()


@needs_watch
def test_shared_memory_is_watched_for_writes_of_this_process(tmp_path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(8 * PAGE))
    own, copied, changed = torch.zeros(8 * PAGE), np.memmap(file, np.float32, "c"), np.memmap(file, np.float32, "r+")
    shared = torch.ones(8 * PAGE // 4).share_memory_()
    for tensor in (torch.from_numpy(copied), torch.from_numpy(changed), shared, own):
        watch = watch_of(tensor)
        for value in (3, 4):
            assert watch.begin() and watch.is_private == (tensor is own)
            float(tensor.sum()), tensor.clone()
            assert not watch.is_written()
            tensor[5000] = value
            assert watch.is_written()


@needs_watch
def test_memory_between_two_ranges_may_be_given_back_and_used_for_something_else() -> None:
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, 12 * PAGE, flags=flags)
    memory[:] = b"a" * len(memory)
    numbers = np.frombuffer(memory, np.uint8)
    begin = numbers.ctypes.data
    watch = PageWatch([(begin, begin + 4 * PAGE), (begin + 8 * PAGE, begin + 12 * PAGE)])
    assert watch.begin() and not watch.is_written()
    assert libc.munmap(begin + 5 * PAGE, 2 * PAGE) == 0
    assert not watch.is_written()
    fixed = 0x10  # MAP_FIXED
    assert libc.mmap(begin + 5 * PAGE, 2 * PAGE, 3, flags | fixed, -1, 0) == begin + 5 * PAGE
    for place in (3 * PAGE, 8 * PAGE):
        assert not watch.is_written()
        memory[5 * PAGE + place // 8] = 1  # which isn't watched
        assert not watch.is_written()
        memory[place] = 1
        assert watch.is_written() and watch.begin() and not watch.is_written()


def mappings() -> int:
    with open("/proc/self/maps", encoding="utf-8") as file:
        return sum(1 for _ in file)


@needs_watch
def test_watching_takes_few_of_the_mappings_that_a_process_may_have(tmp_path, monkeypatch) -> None:
    memory = torch.zeros(2000, 4 * PAGE, dtype=torch.uint8)
    rest, every_other = watch_of(torch.zeros(8 * PAGE)), watch_of(*memory[::2])
    before = mappings()
    assert every_other.begin() and mappings() - before < 10
    memory[1].fill_(1)  # between two that are watched
    assert not every_other.is_written()
    memory[1998, -PAGE - 1] = 1
    assert every_other.is_written()
    every_other.end()
    # What can't be watched as a whole leaves nothing behind.
    (tmp_path / "weights").write_bytes(bytes(8 * PAGE))
    fixed = np.memmap(tmp_path / "weights", np.uint8, "r")
    place = fixed.ctypes.data
    before = mappings()
    ranges = [*every_other.ranges[:4], (place, place + 8 * PAGE)]
    assert not PageWatch(ranges).begin() and mappings() == before
    # Nor is more taken than a part of what there is.
    monkeypatch.setattr(page_watch, "most_spans", lambda: 0)
    assert not rest.begin() and rest.is_written()


# A model's weights.

EDITS: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "an element of data": lambda p, i: p.data.view(-1)[i].add_(1.0),
    "a row of data": lambda p, i: p.data[i % len(p)].neg_(),
    "copied into a row": lambda p, i: p.data[i % len(p)].copy_(torch.full_like(p.data[0], 0.5)),
    "NumPy": lambda p, i: np.add.at(p.detach().numpy().reshape(-1), i, 1.0),
    "a column": lambda p, i: p.data[..., i % p.shape[-1]].mul_(1.5),
    "in place": lambda p, i: p.requires_grad_(False).view(-1)[i].add_(1.0),
    "a bit": lambda p, i: p.data.view(torch.int32).view(-1)[i].bitwise_xor_(1),
}
SIZES: dict[str, Any] = {"vocab_size": 300, "d_model": 64, "num_heads": 4, "d_ff": 96}


@needs_watch
def test_a_change_of_any_element_is_noticed() -> None:
    dice = random.Random(3)
    for kind in (Transformer, GPT):
        model = drawn(kind, **SIZES)
        parameters = [p for p in model.parameters() if p.dim() == 2] + [*model.parameters()]
        assert any(p.numel() * 4 > 4 * PAGE for p in parameters)
        for _ in range(60):
            before = fingerprint(model)
            assert fingerprint(model) == before
            parameter = dice.choice(parameters)
            EDITS[dice.choice([*EDITS])](parameter, dice.randrange(parameter.numel()))
            assert fingerprint(model) != before


@needs_watch
@pytest.mark.parametrize("way", ["mapped privately", "mapped for all", "shared"])
def test_a_change_of_weights_in_a_file_or_in_shared_memory_is_noticed(tmp_path, way) -> None:
    model, dice = drawn(GPT, **SIZES), random.Random(6)
    if way == "shared":
        model.share_memory()
    else:
        torch.save(model.state_dict(), tmp_path / "weights.pt")
        flags = mmap.MAP_PRIVATE if way == "mapped privately" else mmap.MAP_SHARED
        with torch.serialization.set_default_mmap_options(flags):
            model.load_state_dict(torch.load(tmp_path / "weights.pt", mmap=True), assign=True)
    parameters = [*model.parameters()]
    for _ in range(30):
        before = fingerprint(model)
        assert fingerprint(model) == before
        parameter = dice.choice(parameters)
        EDITS["an element of data"](parameter, dice.randrange(parameter.numel()))
        assert fingerprint(model) != before


@needs_cpp
def test_a_call_reads_a_mask_once(monkeypatch) -> None:
    looks, look = [], prepack.fingerprint

    def counted(*args: Any, **options: Any) -> prepack.Fingerprint:
        looks.append(1)
        return look(*args, **options)

    monkeypatch.setattr(prepack, "fingerprint", counted)
    model = drawn(Transformer, **SIZES)
    generate(model, [[5, 6, 7]], max_new_tokens=3)
    looks.clear()
    generate(model, [[5, 6, 7]], max_new_tokens=3)
    assert len(looks) == 1


@pytest.fixture
def blind(monkeypatch) -> None:
    """Behaves like a system that can't tell which memory was written."""
    monkeypatch.setattr(page_watch, "system_of", lambda process: None)


@pytest.mark.usefixtures("blind")
def test_without_the_system_vectors_and_counted_changes_are_noticed() -> None:
    model, dice = drawn(Transformer, **SIZES), random.Random(5)
    vectors = [p for p in model.parameters() if p.dim() == 1]
    for _ in range(20):
        before = fingerprint(model)
        vector = dice.choice(vectors)
        vector.data[dice.randrange(len(vector))] += 1
        assert fingerprint(model) != before
    # Elements that no sample hits: PyTorch counts what isn't done behind its back.
    before, weight = fingerprint(model), model.embedding.weight
    weight.data[7, 3] += 1
    assert fingerprint(model) == before
    with torch.no_grad():
        weight[7, 3] += 1
    assert fingerprint(model) != before


@needs_cpp
@pytest.mark.usefixtures("blind")
def test_repack_packs_changes_that_went_unnoticed() -> None:
    for kind in (Transformer, GPT):
        model = drawn(kind, **SIZES)
        first = [packed(model, precision, lambda: object()) for precision in ("int8", "fp32")]
        assert packed(model, "int8", lambda: object()) is first[0]
        repack(torch.nn.ModuleList([model]))  # or what holds it
        assert all(packed(model, name, lambda: None) is None for name in ("int8", "fp32"))
        repack(model)
        options = {"max_new_tokens": 8, "engine": "cpp"}
        before, weight = generate(model, [[5, 6, 7]], **options), model.embedding.weight
        row = int(before[0, -8])
        weight.data[row] *= -1
        due = generate(model, [[5, 6, 7]], **{**options, "engine": "kv_cache"})
        repack(model)
        assert torch.equal(generate(model, [[5, 6, 7]], **options), due) and not torch.equal(before, due)
        repack(model)  # more often than needed
    with pytest.raises(ValueError, match=r"\bmodel\b.*\bdict\b"):
        repack({})
