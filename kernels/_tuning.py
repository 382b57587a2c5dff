"""Persistent measured tile sizes: read once per process, and written by tuning runs only.

The file is JSON, {kernel: {key: [config fields]}}, at FASTFORMER_TUNING_FILE or ~/.cache/fastformer/tuning.json. The
key contains the call and Triton's version, because another compiler may spill where this one does not.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import triton

from fastformer.kernels import _plans


def path() -> Path:
    """Returns the path of the file of measured configs."""
    default = Path.home() / ".cache" / "fastformer" / "tuning.json"
    return Path(os.environ.get("FASTFORMER_TUNING_FILE", default))


@functools.cache
def _table() -> dict[str, dict[str, list[Any]]]:
    return json.loads(path().read_text()) if path().exists() else {}


def _key(call: tuple[Any, ...]) -> str:
    return " ".join([*map(str, call), f"triton{triton.__version__}"])


_Config = TypeVar("_Config")
_chosen: list[Callable[[], None]] = []


def remembered(choose: Callable[[Any], _Config]) -> Callable[[Any], _Config]:
    """Remembers the config of each call until a tuning run measures another."""
    cached = functools.cache(choose)
    _chosen.append(cached.cache_clear)
    return cached


def forget() -> None:
    """Makes the next call read the file again."""
    _table.cache_clear()
    measured.cache_clear()
    for clear in _chosen:
        clear()
    _plans.forget()


@functools.cache
def measured(kernel: str, call: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Returns the fields of the config that a tuning run found for this call, or None."""
    fields = _table().get(kernel, {}).get(_key(call))
    return None if fields is None else tuple(fields)


def record(kernel: str, call: tuple[Any, ...], config: tuple[Any, ...]) -> None:
    """Writes one result, which later calls of this process and other processes use."""
    table = _table()
    table.setdefault(kernel, {})[_key(call)] = list(config)
    path().parent.mkdir(parents=True, exist_ok=True)
    temporary = path().with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(table, indent=1))
    temporary.replace(path())  # a concurrent reader sees the old file or the new one
    forget()


def tune(
    kernel: str,
    call: tuple[Any, ...],
    configs: Iterable[tuple[Any, ...]],
    run: Callable[[Any], object],
    time: Callable[[functools.partial[object]], float],
) -> tuple[list[tuple[float, tuple[Any, ...]]], dict[str, str]]:
    """Times `run(config)` for each config. It records each new fastest one, so that an interruption loses nothing.

    Args:
        run: launches the kernel with a config. Configs for which the compiler fails are omitted.
        time: (function) -> milliseconds.

    Returns:
        (milliseconds, config) from fast to slow, and the reasons why the other configs failed.
    """
    results: list[tuple[float, tuple[Any, ...]]] = []
    failed: dict[str, str] = {}
    for config in configs:
        try:
            run(config)
            took = time(functools.partial(run, config))
        except Exception as error:  # PTXASError, OutOfResources or, if a compiler pass fails, RuntimeError
            failed[str(tuple(config))] = f"{type(error).__name__}: {str(error)[:200]}"
            continue
        if all(took < fastest for fastest, _ in results):
            record(kernel, call, config)
        results.append((took, config))
    # Not by the configs as well, whose fields may be None in one and a number in another.
    return sorted(results, key=lambda result: result[0]), failed
