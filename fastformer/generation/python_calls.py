"""Calls of tools as LFM2 writes them: a Python list of calls, whose arguments have names and are literals.

[weather(city="Oslo", days=[1, 2], exact=True), clock()]
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from fastformer.generation.argument_schemas import (
    alternatives,
    as_json,
    given_values,
    json_rule,
    kinds,
    properties_of,
    quoted,
)
from fastformer.generation.call_reader import CallReader

_WORDS = {"true": True, "false": False, "null": None}  # as JSON spells them
_NO_KEY = frozenset("()[]{}\"'`,:")
_ESCAPED = frozenset("\n\\'\"/abfnrtvxuUN01234567")
_LINE_ENDS = {"\n": "\\n", "\r": "\\r"}  # Python has none in a text, where models write some


def argument_rules(schema: Mapping[str, Any], place: int) -> list[str]:
    """Returns the rules, in Lark's syntax, of a call's arguments, from `args_{place}` on.

    Lists and objects are JSON, which the reader understands, too.

    Args:
        schema: the schema of the arguments.
        place: the index of the call's tool.

    Raises:
        ValueError: the schema has what the rules can't express.
    """
    # A comma only stands between two arguments: in front of `next`, not of `first`.
    name, properties = f"args_{place}", [*properties_of(schema).items()]
    rules = [f"{name}: {name}_first_0", *(f'{name}_{kind}_{len(properties)}: ""' for kind in ("first", "next"))]
    for number, (key, described) in enumerate(properties):
        if not key or key != key.strip() or _NO_KEY.intersection(key) or "=" in key:
            raise ValueError(f"expected names of arguments without quotes, brackets and =, got {key!r:.80}")
        values = " | ".join(_value(one, schema) for one in alternatives(described, schema))
        rules.append(f"{name}_{number}: {quoted(f'{key}=')} ({values}) {name}_next_{number + 1}")
        for kind, before in (("first", ""), ("next", '", " ')):
            skipped = "" if key in schema.get("required", []) else f" | {name}_{kind}_{number + 1}"
            rules.append(f"{name}_{kind}_{number}: {before}{name}_{number}{skipped}")
    return rules


def _value(schema: dict[str, Any], root: Mapping[str, Any]) -> str:
    if (values := given_values(schema)) is not None:
        return " | ".join(quoted(written(value)) for value in values)
    words = {"boolean": '"True" | "False"', "null": '"None"'}
    types = kinds(schema)
    others = [kind for kind in types if kind not in words]
    forms = [form for kind, form in words.items() if kind in types]
    if others:
        one = schema if len(others) == len(types) else {**schema, "type": others}
        forms.append(json_rule(one, root))
    return " | ".join(forms)


def written(value: Any) -> str:
    """Returns a value as the model writes it."""
    return quoted(value) if isinstance(value, str) else repr(value)


class PythonCall(CallReader):
    """Reads a call, and tells each argument when it is complete."""

    def __init__(self) -> None:
        super().__init__()
        self._text, self._key, self._state = "", "", self._open
        self._depth, self._quote, self._is_escaped = 0, "", False
        self._count = 0

    def _reads(self, character: str) -> None:
        self._state(character)

    def _open(self, character: str) -> None:
        if character == "(":
            self.name, self._text, self._state = self._text, "", self._argument
        elif character.isspace() or character in _NO_KEY:
            self.is_broken = True
        else:
            self._text += character

    def _argument(self, character: str) -> None:
        key = self._text.strip()
        if character == "=" and key:
            self._key, self._text, self._state = key, "", self._value
        elif character == ")" and not key:
            self._finish()
        elif character in _NO_KEY and not (character == "," and self._count and not key):
            self.is_broken = True
        elif character != ",":
            self._text += character

    def _value(self, character: str) -> None:
        if self._quote:
            if self._is_escaped:
                self._is_escaped = False
                self._text += "" if character in _ESCAPED else "\\"  # as Python takes it, which warns
            elif character == "\\":
                self._is_escaped = True
            elif character == self._quote:
                self._quote = ""
            self._text += _LINE_ENDS.get(character, character)
            return
        if character in ",)" and not self._depth:
            self._tell()
            if character == ")":
                self._finish()
            return
        self._text += character
        self._quote = character if character in "\"'" else ""
        self._depth += (character in "([{") - (character in ")]}")

    def _tell(self) -> None:
        begin = ", " if self._count else "{"
        self._arguments.append(f"{begin}{quoted(self._key)}: {_read(self._text.strip())}")
        self._count += 1
        self._text, self._state = "", self._argument

    def _finish(self) -> None:
        self._arguments.append("}" if self._count else "{}")
        self.is_done = True


def _read(text: str) -> str:
    """Returns a literal as JSON; any other expression is taken for a text."""
    if (found := as_json(text)) is not None:
        return found
    try:
        tree = _Words().visit(ast.parse(text, mode="eval"))
        return json.dumps(ast.literal_eval(tree), allow_nan=False)  # ASCII, also of halves of surrogate pairs
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return quoted(text)


class _Words(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:  # noqa: N802  # ast's name
        return ast.Constant(_WORDS[node.id]) if node.id in _WORDS else node
