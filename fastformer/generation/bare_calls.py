"""Calls of tools as Gemma 4 writes them: keys are bare, and a mark is on both sides of a text.

call:weather{city:<|"|>Oslo<|"|>,days:[1,2]}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from fastformer.generation.argument_schemas import (
    alternatives,
    as_json,
    conditions,
    expression,
    given_values,
    is_any,
    json_rule,
    properties_of,
    quoted,
    slashed,
)
from fastformer.generation.call_reader import CallReader

CALL, QUOTE = "call:", '<|"|>'
_MOST_DEPTH, _MOST_RULES = 20, 5000
_COUNTS, _MANY = ("minItems", "maxItems"), 10**9
_KEY = r"/[^\s:,{}\[\]\"<]+/"  # of an object whose schema names none
_WORDS: dict[str, Any] = {"type": ["number", "boolean", "null"]}
_ANY: list[dict[str, Any]] = [{"type": "string"}, {"type": "array"}, {"type": "object"}, _WORDS]


def argument_rules(schema: Mapping[str, Any], place: int, marked: Callable[[str], str]) -> list[str]:
    """Returns the rules, in Lark's syntax, of a call's arguments with their braces, from `args_{place}` on.

    Args:
        schema: the schema of the arguments.
        place: the index of the call's tool.
        marked: returns the rule of a text with marks.

    Raises:
        ValueError: the schema has what the rules can't express.
    """
    rules = list[str]()
    _Rules(schema, marked, rules, f"any_{place}").define(f"args_{place}", schema)
    return rules


class _Rules:
    """Adds the rules of values to a list; `of_any` is the rule of a value without a schema."""

    def __init__(self, root: Mapping[str, Any], marked: Callable[[str], str], rules: list[str], of_any: str) -> None:
        self._root, self._marked, self._rules, self._any = root, marked, rules, of_any
        self._objects: dict[int, tuple[str, Mapping[str, Any]]] = {}  # the rules of objects that have one, by identity
        self._has_any = False

    def define(self, rule: str, schema: Mapping[str, Any], depth: int = 0) -> str:
        """Adds the rule of an object, and returns its name."""
        if depth > _MOST_DEPTH:
            raise ValueError("expected the schema of arguments of fewer levels")
        self._objects[id(schema)] = rule, schema
        # A property is optional, and a comma only stands between two. So each place has two rules: `first`, if no
        # property has been told, and `next`.
        properties, required = [*properties_of(schema).items()], schema.get("required", [])
        for number, (key, described) in enumerate(properties):
            value = f"{self._key(key)} ({self._values(described, f'{rule}_{number}', depth)})"
            for name, before in ((f"{rule}_first_{number}", ""), (f"{rule}_next_{number}", '"," ')):
                skipped = "" if key in required else f" | {name.rsplit('_', 1)[0]}_{number + 1}"
                self._rules.append(f"{name}: {before}{value} {rule}_next_{number + 1}{skipped}")
        self._rules += [f'{rule}_{kind}_{len(properties)}: ""' for kind in ("first", "next")]
        self._rules.append(f'{rule}: "{{" {rule}_first_0 "}}"')
        return rule

    def _key(self, key: str) -> str:
        """Returns a name with its colon, which has marks if it isn't plain."""
        if QUOTE in key:
            raise ValueError(f"expected names of arguments without {QUOTE}, with which the model ends them")
        is_plain = key == key.strip() and not set(key).intersection(':{}[]"')
        return self._marked(f"{key}:" if is_plain else f"{QUOTE}{key}{QUOTE}:")

    def _values(self, schema: Any, rule: str, depth: int) -> str:
        """Returns the forms of a value."""
        if len(self._rules) > _MOST_RULES:
            raise ValueError("expected the schema of arguments of fewer values")
        if is_any(schema):
            if not self._has_any:
                self._has_any = True
                self._rules.append(f"{self._any}: {self._forms(_ANY, self._any, depth)}")
            return self._any
        return self._forms(self._typed(schema), rule, depth)

    def _forms(self, schemas: Iterable[dict[str, Any]], rule: str, depth: int) -> str:
        return " | ".join([self._value(one, f"{rule}_{place}", depth) for place, one in enumerate(schemas)])

    def _typed(self, schema: Any) -> Iterator[dict[str, Any]]:
        """Yields schemas of one type each."""
        for one in alternatives(schema, self._root):
            types = one.get("type")
            yield from ({**one, "type": kind} for kind in types) if isinstance(types, list) else [one]

    def _value(self, schema: dict[str, Any], rule: str, depth: int) -> str:
        kind, values = schema.get("type"), given_values(schema)
        if values is not None:
            if any(isinstance(value, dict | list) or (isinstance(value, str) and QUOTE in value) for value in values):
                raise ValueError(f"expected an enum of numbers, booleans, null, and texts without {QUOTE}")
            texts = (f"{QUOTE}{one}{QUOTE}" if isinstance(one, str) else json.dumps(one) for one in values)
            return " | ".join(map(self._marked, texts))
        if kind == "string":
            text, mark = slashed(expression(schema)), self._marked(QUOTE)
            is_special = mark.startswith("<[")  # no expression matches a special token
            ends = "" if is_special else slashed(QUOTE.replace("|", r"\|"))
            self._rules.append(f"{rule}{'' if is_special else '[lazy]'}: /{text}{ends}/")
            return f"{mark} {rule} {mark if is_special else ''}" + (f" | {mark} {mark}" if _allows_none(schema) else "")
        if kind == "object" and "properties" in schema:
            known, _ = self._objects.get(id(schema), (None, None))
            return known or self.define(rule, schema, depth + 1)
        if kind not in ("array", "object"):
            if kind is None:
                raise ValueError(f"expected a schema with a type, got {schema!r:.80}")
            return json_rule(schema, {} if schema is _WORDS else self._root)
        begin, end, of_items = ("[", "]", "items") if kind == "array" else ("{", "}", "additionalProperties")
        if unknown := conditions(schema) - {"type", of_items, *(_COUNTS if kind == "array" else ())}:
            raise ValueError(f"expected the schema of an {kind} with its {of_items}, got one with {sorted(unknown)}")
        least, items = schema.get("minItems", 0), schema.get(of_items, True)
        most = schema.get("maxItems", _MANY)
        if depth > _MOST_DEPTH or not (isinstance(least, int) and isinstance(most, int) and 0 <= least <= most):
            raise ValueError(f"expected an {kind} of fewer levels, and a possible number of items, got {schema!r:.80}")
        if items is False or not most:
            return quoted(f"{begin}{end}")
        key = "" if kind == "array" else f'{_KEY} ":" '
        self._rules.append(f"{rule}_item: {key}({self._values(items, f'{rule}_of', depth + 1)})")
        again = "" if most == 1 else f'("," {rule}_item){{{max(0, least - 1)},{most - 1 if most < _MANY else ""}}}'
        none = "" if least > 0 else f" | {quoted(f'{begin}{end}')}"
        return f"{quoted(begin)} {rule}_item {again} {quoted(end)}{none}"


def _allows_none(schema: Mapping[str, Any]) -> bool:
    """Returns whether the empty text matches, which an expression of a token's own doesn't."""
    return not (schema.keys() & {"pattern", "format"}) and not schema.get("minLength")


class BareCall(CallReader):
    """Reads a call, and tells its arguments when they are complete."""

    def __init__(self) -> None:
        super().__init__()
        self._text, self._depth, self._in_text = "", 0, False

    def _reads(self, character: str) -> None:
        self._text += character
        self._open() if self.name is None else self._read(character)

    def _open(self) -> None:
        begun = self._text[: len(CALL)]
        if not CALL.startswith(begun) or self._text[-1].isspace():
            self.is_broken = True
        elif self._text.endswith("{"):
            self.name, self._text, self._depth = self._text[len(CALL) : -1].strip(), "{", 1

    def _read(self, character: str) -> None:
        if self._text.endswith(QUOTE):
            self._in_text = not self._in_text
        elif not self._in_text:
            self._depth += (character in "{[") - (character in "}]")
        if not self._depth:
            try:
                self._arguments = [_Reader(self._text).value()]
                self.is_done = True
            except (ValueError, IndexError, RecursionError):
                self.is_broken = True


class _Reader:
    """Reads a value, and returns it as JSON."""

    def __init__(self, text: str) -> None:
        self._text, self._place = text, 0

    def value(self) -> str:
        self._space()
        if self._text.startswith(QUOTE, self._place):
            return self._marked_text()
        if self._text[self._place] in "{[":
            return self._items(self._text[self._place])
        if self._text[self._place] == '"':
            read, self._place = json.JSONDecoder().raw_decode(self._text, self._place)
            return quoted(read)
        begin = self._place
        while self._text[self._place] not in ",]}":
            self._place += 1
        text = self._text[begin : self._place].strip()
        return as_json(text) or quoted(text)

    def _items(self, begin: str) -> str:
        end, items = "}" if begin == "{" else "]", list[str]()
        self._place += 1
        self._space()
        while self._text[self._place] != end:
            if items:
                self._take(",")
            items.append(f"{self._key()}: {self.value()}" if begin == "{" else self.value())
            self._space()
        self._place += 1
        return f"{begin}{', '.join(items)}{end}"

    def _key(self) -> str:
        self._space()
        if self._text.startswith(QUOTE, self._place):
            key = self._marked_text()
        else:
            end = self._text.index(":", self._place)
            key, self._place = quoted(self._text[self._place : end].strip().strip('"')), end
        self._space()
        self._take(":")
        return key

    def _marked_text(self) -> str:
        begin = self._place + len(QUOTE)
        end = self._text.index(QUOTE, begin)
        self._place = end + len(QUOTE)
        return quoted(self._text[begin:end])

    def _take(self, character: str) -> None:
        if self._text[self._place] != character:
            raise ValueError(f"expected {character!r}, got {self._text[self._place :]!r:.40}")
        self._place += 1

    def _space(self) -> None:
        while self._text[self._place].isspace():
            self._place += 1
