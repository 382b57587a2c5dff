"""The steps of the GPU plan (`benchmarks/gpu_run_plan.py`), in order of importance.

First what users ask, in the first ten minutes: attention beside the fastest rivals, its reproducibility to the bit, a
training step and decoding as wholes, and one shape of each other op. Then numerics, and all other times.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.warm import PlanStep
from benchmarks.measure import record
from benchmarks.measure.suites import benchmarks, has_values, key_value

SHARDS = min(12, os.cpu_count() or 1)
# The number of cores to which the 16 hyperthreads of a rented machine amount when they compile.
_LENT_CORES = 9.0
_START = 3.0  # seconds until a process starts to time (it is a fork; see `warm.py`)
_TESTS_START = 8.0  # seconds until the processes have collected their tests
_COMPILING = 2.6  # seconds of a core to compile a binary and its launcher
_TIMING = 0.5  # the part of a case's estimate for its turns; compiling and checking take the rest

_KERNELS = (
    "tests/kernels/test_attention_gpu.py tests/kernels/test_rows_gpu.py tests/kernels/test_decode_attention_gpu.py"
)
_OPS = (
    "add_layer_norm", "feed_forward", "linear_cross_entropy", "linear_topk", "embedding", "rotary", "decode_attention"
)  # fmt: skip
# The files whose tests the steps run: first those that only a GPU can run, with sizes of many tiles, then those of ops.
TESTS = {
    "attention": "tests/kernels/test_attention_gpu.py",
    "ops": "tests/kernels/test_rows_gpu.py tests/kernels/test_decode_attention_gpu.py "
    + " ".join(f"tests/kernels/test_{stem}.py tests/ops/test_{stem}.py" for stem in _OPS),
    "models": "tests/models/test_backends.py tests/models/test_transformer.py tests/test_graphs.py "
    "tests/generation/test_graph_engine_gpu.py tests/training/test_graph_updates_gpu.py",
    "attention_hopper": "tests/kernels/test_attention_hopper_gpu.py",
}
# The seconds of a shape. For a training step, most of it is torch.compile's time for the rival (twelve layers, forward
# and backward), and for gpt2, the time in which Hugging Face's step is compiled.
_SECONDS = {"attention": 24.0, "masked_attention": 24.0, "packed_attention": 24.0, "decode_attention": 10.0,
            "decoding": 20.0, "graph_decoding": 30.0, "training_step": 100.0, "accelerated": 12.0}  # fmt: skip
# The fastest of the rivals of attention, which need no compilation. FlashAttention-3 has its forward pass alone.
_BEST_RIVALS = ("sdpa flash", "sdpa cudnn", "fa3")


@functools.cache
def other_tests() -> str:
    """Returns the files that no other step runs: all of tests/ops and tests/kernels, and others that have GPU tests."""
    named = {path for files in TESTS.values() for path in files.split()}
    others = []
    for path in sorted((record.ROOT / "tests").rglob("test_*.py")):
        name = path.relative_to(record.ROOT).as_posix()
        on_device = path.parent.name in ("ops", "kernels") or "mark.gpu" in path.read_text(encoding="utf-8")
        if on_device and name not in named and path.name != "test_gpu_run_plan.py":
            others.append(name)
    return " ".join(others)


def tests(name: str, files: str, seconds: float, binaries: int, *, only: str = "") -> PlanStep:
    """Makes a step of the GPU tests of some files (separated by spaces), in parallel, since most of it is compiling.

    Args:
        seconds: the time of the tests themselves, with all processes in parallel.
        binaries: roughly how many binaries they compile.
        only: pytest's -k.
    """
    command = [sys.executable, "-m", "pytest", "-m", "gpu and not slow", "-q", "-rN", "--tb=short"]
    command += ["-p", "benchmarks.measure.failures", *files.split(), *(["-k", only] if only else [])]
    key = f"tests {name}"
    variables = {"OMP_NUM_THREADS": "1"}
    shards = [(command, variables | {"FASTFORMER_TEST_SHARD": f"{shard}/{SHARDS}"}) for shard in range(SHARDS)]
    compiling = 0.0 if os.environ.get("FASTFORMER_KERNELS") else _COMPILING * binaries / _LENT_CORES
    return PlanStep(key, shards, _TESTS_START + compiling + seconds)


def times(
    op: str,
    out: Path,
    *values: str,
    label: str = "",
    rivals: Sequence[str] = (),
    seconds: float | None = None,
    modes: Sequence[str] = (),
) -> PlanStep:
    """Makes a step of the runner's cases of an op, in bf16 if the op has it.

    Args:
        values: required values of a shape, such as "seqlen=2048"; if a name is given twice, either value fits.
        label: a label for a first look, whose rows go to another file.
        rivals: the rivals, besides fastformer and the baseline; empty = all.
        seconds: the seconds of a shape.
        modes: the modes; empty = all.
    """
    benchmark = benchmarks()[op]
    shapes = [shape for shape in benchmark.shapes["cuda"] if has_values(shape, map(key_value, values))]
    seconds_per_shape = seconds or _SECONDS.get(op, 15.0)
    rows = out / ("_".join(["cuda", *label.split()[:1]]) + ".jsonl")
    count = len(modes or benchmark.modes)
    command = [sys.executable, "-m", "benchmarks.run", "--device", "cuda", "--op", op, "--rounds", "20",
               "--seconds", f"{_TIMING * seconds_per_shape / count:g}", "--out", str(rows)]  # fmt: skip
    if "bfloat16" in benchmark.dtypes:
        command += ["--dtype", "bfloat16"]
    for option, chosen in (("--shape", values), ("--provider", rivals), ("--mode", modes)):
        command += [option, *chosen] if chosen else []
    key = " ".join(filter(None, ["time", label, op, *values]))
    # Rows of attention have to be ours, and whole models as users get them.
    environment = {"FASTFORMER_ATTENTION_KERNELS": "ours" if op == "attention" else "fastest"}
    return PlanStep(key, [(command, environment)], _START + seconds_per_shape * len(shapes), rivals=rivals)


_LOOK: dict[str, Any] = {"label": "first look", "modes": ("fwd", "bwd"), "rivals": _BEST_RIVALS, "seconds": 11}
_ALONE = _LOOK | {"modes": ("fwdbwd",), "rivals": ("eager",), "seconds": 6}
_BESIDE_LIGER = _ALONE | {"rivals": ("liger",), "seconds": 8}


def _look_at_attention(out: Path) -> Iterator[PlanStep]:
    """Yields steps that check and time attention, beside cuDNN and FlashAttention only."""
    causal = ("causal=True", "seqlen=2048")
    for head_dim in (64, 128):
        yield times("attention", out, *causal, "dropout_p=0.0", f"head_dim={head_dim}", **_LOOK)
    yield times("attention", out, *causal, "dropout_p=0.1", "head_dim=64", **_LOOK)
    yield times("packed_attention", out, "head_dim=64", "causal=True", **_LOOK)
    yield times("decode_attention", out, "batch=1", "seqlen=4096", **_ALONE | {"modes": ("fwd",)})


def _look_at_others(out: Path) -> Iterator[PlanStep]:
    """Yields steps that check and time one shape of each other op."""
    yield times("add_layer_norm", out, "rows=16384", "dim=512", "dropout_p=0.1", **_BESIDE_LIGER)
    yield times("embedding", out, "dropout_p=0.1", **_BESIDE_LIGER)
    yield times("rotary", out, "head_dim=64", "seqlen=4096", **_BESIDE_LIGER)
    yield times("linear_cross_entropy", out, "vocab_size=32000", **_BESIDE_LIGER)
    yield times("feed_forward", out, "dim=512", "activation=relu", "dropout_p=0.1", **_ALONE)
    # Lengths of translation, with all heads of a model.
    for seqlen in (16, 64, 256):
        yield times("attention", out, "causal=True", f"seqlen={seqlen}", "dropout_p=0.0", "head_dim=64", **_LOOK)


def _build() -> PlanStep:
    install = [sys.executable, "-m", "pip", "install", "-q", "-e", ".", "--no-build-isolation", "--no-deps"]
    return PlanStep("build the extension", [(install, {})], 90)


def steps(out: Path) -> Iterator[PlanStep]:
    """Yields all steps, in order of importance. To add a step, add a `yield`."""
    yield from _look_at_attention(out)
    yield tests("repeats", _KERNELS, 20, 60, only="repeat")
    yield tests("hopper", TESTS["attention_hopper"], 20, 80, only=f"not ({_LATER})")
    yield times("training_step", out, "lengths=multi30k")
    if not list((record.ROOT / "fastformer").glob("_engine_*.so")):
        yield _build()  # without it, no search runs inside of a graph
    yield times("graph_decoding", out, "batch=1")
    yield times("accelerated", out)
    yield from _look_at_others(out)
    yield times("graph_decoding", out, "batch=16")
    yield tests("attention", TESTS["attention"], 25, 250, only=f"not repeat and not ({_LATER})")
    yield tests("ops", TESTS["ops"], 60, 300, only="not repeat")
    yield tests("models", TESTS["models"], 60, 100)
    for head_dim in (64, 128):
        yield times("attention", out, "causal=True", "seqlen=8192", f"head_dim={head_dim}", rivals=_BEST_RIVALS,
                    seconds=12)  # fmt: skip
    for head_dim in (64, 128):
        yield times("attention", out, "seqlen=2048", "seqlen=512", "dropout_p=0.0", f"head_dim={head_dim}",
                    modes=("fwd", "bwd"), rivals=_BEST_RIVALS, seconds=8)  # fmt: skip
    yield times("decoding", out)
    lengths = (f"seqlen={seqlen}" for seqlen in (64, 128, 512, 4096))
    yield times("decode_attention", out, "batch=1", "batch=256", *lengths)
    yield times("linear_cross_entropy", out)
    yield times("add_layer_norm", out, "rows=16384", "dim=512", "dim=4096")
    yield times("feed_forward", out, "dropout_p=0.1", "activation=relu")
    yield times("masked_attention", out, "head_dim=64")
    yield times("packed_attention", out, "head_dim=64", "causal=True")
    yield times("attention", out, "causal=True", "seqlen=2048", "seqlen=256", "dropout_p=0.1")
    yield times("embedding", out, "dropout_p=0.1")
    yield times("rotary", out, "head_dim=64", "seqlen=4096")
    yield from _later(out)


# Tests of numerics that add little to the earlier ones: pairs of options, other dtypes.
_LATER = "pair or float16 or float32"


def _later(out: Path) -> Iterator[PlanStep]:
    """Yields the least important steps: all other tests, and less interesting sizes."""
    yield tests("pairs", TESTS["attention"], 60, 900, only=_LATER)
    yield tests("hopper pairs", TESTS["attention_hopper"], 60, 150, only=_LATER)._replace(after="tests hopper")
    yield tests("others", other_tests(), 100, 200)
    yield times("attention", out, "causal=True", "seqlen=2048")
    yield times("attention", out, "causal=False", "seqlen=2048")
    yield times("attention", out, "causal=True", "seqlen=64", "seqlen=256")
    yield times("masked_attention", out, "head_dim=128")
    yield times("packed_attention", out, "head_dim=128")
    yield times("add_layer_norm", out, "rows=2048", "dim=512", "dim=4096", "dropout_p=0.1")
    yield times("feed_forward", out, "dropout_p=0.1", "activation=gelu")
    yield times("rotary", out, "head_dim=64", "seqlen=512")
