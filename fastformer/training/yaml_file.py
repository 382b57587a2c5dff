"""Reads YAML as users mean it: 010 is ten, 1e3 is a number, 1:30 and dates are texts, a repeated name is an error."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from fastformer.data.files import is_there, read_bytes

# YAML 1.1 would read 010 and 0x4 in other bases, 1:30 as 90, and 1e3 as a text.
_NUMBERS = {
    "int": (r"[-+]?[0-9][0-9_]*", lambda text: int(text, 10)),
    "float": (
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        lambda text: float(text.replace("_", "").replace(".inf", "inf").replace(".nan", "nan")),
    ),
}
_DROPPED = {f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "timestamp")}


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Reads the settings in a YAML file.

    Raises:
        ValueError: no such file, invalid YAML, a repeated name, or a file without settings.
    """
    yaml, file = yaml_library(), Path(path).expanduser()
    if not is_there(file):  # it may be a pipe
        raise ValueError(f"expected a YAML file with settings, but there is no file {file}")
    try:
        values = yaml.load(read_bytes(file).decode("utf-8"), Loader=_loader())
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no YAML: {error}") from error
    if not isinstance(values, dict):
        kind = "nothing" if values is None else type(values).__name__
        raise ValueError(f"expected settings in {file}, one `name: value` per line, got {kind}: is the file truncated?")
    return values


@functools.cache
def _loader() -> Any:
    yaml = yaml_library()

    class Loader(yaml.SafeLoader):  # type: ignore[misc, name-defined]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            """Constructs a mapping as PyYAML does, but refuses a repeated name, of which PyYAML uses the last value."""
            first: dict[str, Any] = {}
            for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
                if isinstance(key, yaml.ScalarNode) and first.setdefault(key.value, key) is not key:
                    lines = first[key.value].start_mark.line + 1, key.start_mark.line + 1
                    raise ValueError(f"{key.value!r} is there twice, in line {lines[0]} and in line {lines[1]}")
            return super().construct_mapping(node, deep)

    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in some if tag not in _DROPPED]
        for first, some in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for kind, (pattern, convert) in _NUMBERS.items():
        tag = f"tag:yaml.org,2002:{kind}"
        Loader.add_implicit_resolver(tag, re.compile(f"^(?:{pattern})$"), list("-+.0123456789"))
        Loader.add_constructor(tag, _constructor(convert))
    return Loader


def _constructor(convert: Callable[[str], float]) -> Callable[[Any, Any], float]:
    return lambda loader, node: convert(loader.construct_scalar(node).lower())


def yaml_library() -> ModuleType:
    """Imports the yaml library.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import yaml
    except ImportError as error:
        raise ImportError("training writes its settings as YAML: pip install 'fastformer[train]'") from error
    return yaml
