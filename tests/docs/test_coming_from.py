"""What the "Coming from" pages put beside another program's calls exists here: names, arguments, and command lines."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fastformer
from fastformer.generation.config import OPTIONS
from tests.docs.pages import DOCS, understood

PAGES = sorted(path for path in (DOCS / "coming-from").glob("*.md") if path.stem != "index")
_CODE = re.compile(r"`([^`]+)`")
_ROOTS = {"fastformer": fastformer, "torch": torch}


def codes(page: Path) -> Iterator[tuple[str, bool]]:
    """Yields the code of fastformer's column, and False; where that is "the same", the other program's, and True."""
    for line in page.read_text(encoding="utf-8").split("<!-- numbers")[0].splitlines():
        if line.startswith("| "):
            theirs, ours = line.strip("| ").split(" | ")
            is_same = ours.startswith("the same")
            yield from ((code, is_same) for code in _CODE.findall(theirs if is_same else ours))


def owners(page: Path) -> list[Any]:
    """Returns the classes and functions of fastformer that a page names."""
    text = page.read_text(encoding="utf-8")
    modules = {name: getattr(fastformer.nn, name) for name in re.findall(r"\bnn\.(\w+)", text)}
    return [*modules.values(), *(getattr(fastformer, n) for n in fastformer.__all__ if re.search(rf"\b{n}\b", text))]


def meant(path: str, page: Path) -> list[Any]:
    """Returns what a dotted name may mean: an object, or the methods of this name of the page's classes."""
    first, *others = path.split(".")
    value = _ROOTS.get(first, getattr(fastformer, first, None))
    if value is None:
        return [getattr(owner, others[-1] if others else first, None) for owner in owners(page)]
    for name in others:
        value = getattr(value, name, None)
    return [value]


def parameters(function: Any) -> list[inspect.Parameter]:
    """Returns the parameters of a function, or of a method without its object, with the options of decoding."""
    if not callable(function):
        return []
    every = inspect.signature(function).parameters
    named = [each for each in every.values() if each.name != "self" and each.kind is not each.VAR_KEYWORD]
    further = sorted({*OPTIONS} - {*every}) if "config" in every and "options" in every else ()
    return [*named, *(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in further)]


def accepts(function: Any, call: ast.Call) -> bool:
    """Returns whether a function takes a call's arguments; "..." stands for any that come before."""
    if inspect.isbuiltin(function):  # PyTorch's, without a signature
        return True
    places = [arg for arg in call.args if not (isinstance(arg, ast.Constant) and arg.value is ...)]
    signature = inspect.Signature(parameters(function))
    bind = signature.bind if len(places) == len(call.args) else signature.bind_partial
    try:
        bind(*places, **{str(keyword.arg): keyword.value for keyword in call.keywords})
    except TypeError:
        return False
    return callable(function)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_tables_name_what_exists(page: Path) -> None:
    number = 0
    for code, is_same in codes(page):
        where = f"{page.name}: {code}"
        if code.startswith(("fastformer ", "--")):
            understood(shlex.split(code if code[0] == "f" else f"fastformer generate F TEXT {code}")[1:])
        elif is_same and code.isidentifier():  # a method, or an argument of one
            every = [getattr(each, name) for each in owners(page) for name in dir(each) if name[0] != "_"]
            assert any(meant(code, page)) or any(code == p.name for each in every for p in parameters(each)), where
        elif "(" in code:
            for call in ast.walk(ast.parse(code.removeprefix("."), mode="eval")):
                if isinstance(call, ast.Call):
                    path = ast.unparse(call.func).rpartition(").")[2]  # of a call's result
                    assert any(accepts(each, call) for each in meant(path, page)), where
        elif code.startswith("fastformer."):
            assert all(meant(code, page)), where
        else:
            continue
        number += 1
    assert number >= 5
