"""Reading shards needs memory for only a few of them, however many there are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy
import pytest

from fastformer.data import ByteTokenizer
from fastformer.data.shards.arrow_file import arrow, write_table
from fastformer.data.shards.deal import describe, shard_name
from fastformer.data.shards.manifest import Manifest, ShardSource, Stored, tokenizer_digest

pytest.importorskip("pyarrow", reason="shards are files of Arrow")

READ = """
import sys
from fastformer.data.order import Order
from fastformer.data.shards.reading import ShardedExamples

def resident():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) / 1024

ShardedExamples(sys.argv[1])
import pyarrow
before = resident()
examples = ShardedExamples(sys.argv[1])
order = Order(examples, max_tokens=4096, batching="packed", seed=0)
tokens = 0
for window in range(order.num_windows):
    for batch in order.plan(0, window):
        tokens += sum(len(examples[i].target) for i in batch[:4])
print(resident() - before, len(examples), tokens)
"""


def write_shards(folder: Path, shards: int, examples: int) -> int:
    """Writes shards of random ids, 50 per side, and returns their size in bytes."""
    chooser, count = numpy.random.default_rng(0), 50
    ends = numpy.arange(0, (examples + 1) * count, count, dtype=numpy.int32)
    found = []
    for number in range(shards):
        ids = chooser.integers(3, 259, examples * count, dtype=numpy.int32)
        columns = {name: arrow().ListArray.from_arrays(ends, ids) for name in ("source", "target")}
        columns["origin"] = arrow().array(numpy.zeros(examples, numpy.uint16))
        write_table(folder / shard_name(number), arrow().table(columns))
        found.append(describe(folder / shard_name(number), 1))
    ByteTokenizer().save(folder)
    source = ShardSource("random", 1.0, shards * examples, shards * examples, 0, {})
    validation = Stored.of(folder / shard_name(0))
    Manifest("pairs", tokenizer_digest(ByteTokenizer()), {}, [source], found, validation).save(folder)
    return sum(shard.size for shard in found)


@pytest.mark.slow  # 20 s: a gigabyte of shards adds less than 300 MiB to a process that goes through all of them
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="asks Linux for its memory")
def test_a_gigabyte_of_shards(tmp_path) -> None:
    size = write_shards(tmp_path, shards=64, examples=40_000)
    assert size > 1e9
    done = subprocess.run([sys.executable, "-c", READ, str(tmp_path)], capture_output=True, text=True, check=True)
    added, examples, tokens = map(float, done.stdout.split())
    assert examples == 64 * 40_000 and tokens > 0
    assert added < 300, f"{size / 2**20:.0f} MiB of shards added {added:.0f} MiB"
