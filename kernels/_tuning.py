"""Measured tile sizes that persist: read once a process, written by a tuning run, never by an ordinary call.

The file is JSON, {kernel: {key: [config fields]}}, at FASTFORMER_TUNING_FILE or ~/.cache/fastformer/tuning.json. The
key names the call and Triton's version, since another compiler may spill where this one does not.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import triton


def path() -> Path:
    """Where the measured configs lie."""
    default = Path.home() / ".cache" / "fastformer" / "tuning.json"
    return Path(os.environ.get("FASTFORMER_TUNING_FILE", default))


@functools.cache
def _table() -> dict[str, dict[str, list]]:
    return json.loads(path().read_text()) if path().exists() else {}


def _key(call: tuple) -> str:
    return " ".join([*map(str, call), f"triton{triton.__version__}"])


@functools.cache
def measured(kernel: str, call: tuple) -> tuple | None:
    """The config's fields that a tuning run found for this call, or None."""
    fields = _table().get(kernel, {}).get(_key(call))
    return None if fields is None else tuple(fields)


def record(kernel: str, call: tuple, config: tuple) -> None:
    """Writes one result; later calls of this process and of others use it."""
    table = _table()
    table.setdefault(kernel, {})[_key(call)] = list(config)
    path().parent.mkdir(parents=True, exist_ok=True)
    temporary = path().with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(table, indent=1))
    temporary.replace(path())  # a reader sees the old file or the new one
    measured.cache_clear()


def tune(
    kernel: str, call: tuple, configs: Iterable[tuple], run: Callable[[Any], object], time: Callable[[Callable], float]
) -> list[tuple[float, tuple]]:
    """Times `run(config)` for each config, records the fastest, returns (milliseconds, config) from fast to slow.

    Args:
        run: launches the kernel with a config; one that does not compile or fit is left out.
        time: (function) -> milliseconds.
    """
    results = []
    for config in configs:
        try:
            run(config)
            results.append((time(functools.partial(run, config)), config))
        except (triton.CompilationError, triton.runtime.errors.OutOfResources):
            continue
    if results:
        record(kernel, call, min(results)[1])
    return sorted(results)
