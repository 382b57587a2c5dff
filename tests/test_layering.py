"""Imports go one way; the tests read every import statement of the tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.english import findings

ROOT = Path(__file__).parent.parent
if not (ROOT / "fastformer").is_dir():
    pytest.skip("the sources are not here", allow_module_level=True)
MODULES = [*sorted((ROOT / "fastformer").rglob("*.py")), *sorted((ROOT / "kernels").glob("*.py"))]
MODULES = [path for path in MODULES if not path.is_relative_to(ROOT / "fastformer" / "kernels")]

# A room may import the rooms in its row, and itself.
ALLOWED = {
    "kernels": set(),
    "baseline": set(),
    "console": set(),
    "graphs": set(),
    "extension": set(),
    "requests": set(),
    "ops": {"extension", "kernels"},
    "engine": {"locks", "ops"},
    "errors": set(),
    "locks": set(),
    "cache": {"errors"},
    "nn": {"cache", "engine", "errors", "ops", "special_ids"},
    "functional": {"engine", "locks", "nn", "ops"},
    "files": set(),
    "settings": set(),
    "languages": set(),
    "special_ids": {"settings"},
    "models": {"cache", "engine", "files", "locks", "nn", "ops", "settings", "special_ids"},
    "data": {"files", "languages", "models", "nn", "ops", "settings", "special_ids"},
    "devices": set(),
    "number_words": set(),
    "plots": set(),
    "checkpoints": {"baseline", "data", "files", "languages", "models", "ops", "special_ids"},
    "audio": {"checkpoints", "console", "extension", "files", "requests", "settings"},
    "encoding": {
        "checkpoints",
        "data",
        "engine",
        "files",
        "generation",
        "locks",
        "models",
        "nn",
        "ops",
        "requests",
        "settings",
    },
    "generation": {
        "cache",
        "checkpoints",
        "engine",
        "extension",
        "graphs",
        "languages",
        "locks",
        "models",
        "nn",
        "ops",
        "plots",
        "requests",
        "settings",
        "special_ids",
    },
    "serving": {
        "__version__",
        "audio",
        "checkpoints",
        "devices",
        "encoding",
        "files",
        "generation",
        "models",
        "settings",
    },
    "training": {
        "baseline",
        "checkpoints",
        "console",
        "data",
        "devices",
        "engine",
        "files",
        "generation",
        "graphs",
        "models",
        "nn",
        "number_words",
        "ops",
        "settings",
        "special_ids",
    },
    "integrations": {
        "audio",
        "checkpoints",
        "encoding",
        "engine",
        "functional",
        "generation",
        "models",
        "nn",
        "ops",
        "training",
    },
}
# The files of models whose method `generate` calls `fastformer.generate`, for which it imports the package.
GENERATING = {"lstm", "pretrained"}
# Rooms that the table omits (cli, commands, demo, doctor, the package itself) are at the top and may import any room.


def room(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return "kernels" if parts[0] == "kernels" else parts[1].removesuffix(".py")


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the statements of a tree, those inside of others included; expressions, which are many more, have none."""
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, name, ()):
            yield child
            yield from statements(child)


class Facts(NamedTuple):
    """What the tests ask of a file. Its tree, which isn't kept, has a million objects with those of all files.

    Attributes:
        imported: the full names of what it imports.
        changed: the places where it changes a name of another file.
        long: the functions that don't fit on two screens.
    """

    imported: list[str]
    changed: list[str]
    long: list[str]


@cache
def facts(path: Path) -> Facts:
    tree = ast.parse(path.read_text())
    nodes = [*statements(tree)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = [f"{path}:{node.lineno} {node.name}" for node in functions if (node.end_lineno or 0) - node.lineno >= 100]
    return Facts(names_in(path, nodes), changed_elsewhere(path, tree, nodes), long)


def names_in(path: Path, nodes: list[ast.AST]) -> list[str]:
    names = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the full name"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def test_imports_go_one_way() -> None:
    for path in MODULES:
        here = room(path)
        is_root = path.parent == ROOT / "fastformer" or here not in ALLOWED
        for name in facts(path).imported:
            parts = name.split(".")
            assert parts[0] not in ("tests", "benchmarks"), f"{path} imports {name}"
            if here == "baseline":
                assert parts[0] not in ("triton", "numpy"), f"the baseline imports torch alone, {path} imports {name}"
            assert name != "fastformer" or is_root or path.stem in GENERATING, f"{path} imports the whole package"
            if parts[0] == "fastformer" and len(parts) > 1 and here in ALLOWED:
                assert parts[1] in ALLOWED[here] | {here}, f"{path} ({here}) imports {name}"
            if parts[0] == "triton":
                assert here == "kernels", f"{path} imports triton; only kernels/ may"


def test_engines_do_not_know_the_schedulers_objects() -> None:
    rooms = ("jobs", "request_builder", "requests", "scheduler", "session", "text_io")
    above = tuple(f"fastformer.generation.{name}." for name in rooms)
    for path in MODULES:
        if path.is_relative_to(ROOT / "fastformer" / "generation" / "engines"):
            known = [name for name in facts(path).imported if name.startswith(above)]
            assert not known, f"{path} imports {known}"


CHANGES = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}


def modules_by_alias(nodes: list[ast.AST]) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the modules of this package, and names in them, by the names under which a file imports them."""
    modules: dict[str, str] = {}
    names: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fastformer"):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                file = ROOT / full.replace(".", "/")
                is_module = file.is_dir() or file.with_suffix(".py").exists()
                (modules if is_module else names)[alias.asname or alias.name] = full
    return modules, names


def changed_elsewhere(path: Path, tree: ast.Module, nodes: list[ast.AST]) -> list[str]:
    """Returns the module-level names of other files that a file changes: by assignment, item or a changing method."""
    modules, names = modules_by_alias(nodes)
    if not modules and not any(map(str.isupper, names)):
        return []

    def foreign(node: ast.expr) -> str | None:
        if isinstance(node, ast.Name) and node.id in names and node.id.isupper():
            return names[node.id]
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            return f"{modules[node.value.id]}.{node.attr}"
        return None

    found = []
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else []
        targets = [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else targets
        for target in targets:
            inner = target.value if isinstance(target, ast.Subscript) else target
            # To rebind a name that was imported changes the file's own.
            if (name := foreign(inner)) is not None and (inner is not target or isinstance(inner, ast.Attribute)):
                found.append(f"{path}:{target.lineno} {name}")
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr in CHANGES and (name := foreign(called.value)) is not None:
            found.append(f"{path}:{called.lineno} {name}")
    return found


def test_no_module_changes_a_name_of_another_one() -> None:
    found = [change for path in MODULES for change in facts(path).changed]
    assert not found, "\n".join(found)


def test_hugging_face_kernels_is_not_shadowed() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert (ROOT / "fastformer" / "kernels").is_symlink()


def test_functions_fit_on_two_screens() -> None:
    # A kernel is one function, and kernels may be longer. Ruff counts branches.
    sources = [path for path in MODULES if not path.is_relative_to(ROOT / "kernels")]
    long = [name for path in [*sources, *sorted((ROOT / "benchmarks").rglob("*.py"))] for name in facts(path).long]
    assert not long, f"more than 100 lines: {', '.join(long)}"


def test_files_have_at_most_600_lines() -> None:
    sources = [*MODULES, *(path for name in ("benchmarks", "tests") for path in (ROOT / name).rglob("*.py"))]
    sources += [path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".cpp", ".h")]
    long = [str(path) for path in sources if path.read_text(encoding="utf-8").count("\n") > 600]
    assert not long, f"two files each: {', '.join(long)}"


def test_the_encoding_of_a_file_is_named() -> None:
    """Without a name it is the one of the system, which isn't UTF-8 everywhere."""
    bare = [str(path) for path in MODULES if ".read_text()" in path.read_text(encoding="utf-8")]
    assert not bare, ", ".join(bare)


# No text that a user or a newcomer reads hides its actor; `python -m tests.english --list` finds the places.


def test_the_actor_is_named() -> None:
    places = [place for place in findings() if place.path.parts[0] != "csrc"]  # only the command counts these
    assert not places, "\n".join(f"{place.path}:{place.line}: {place.text}" for place in places)
