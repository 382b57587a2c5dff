"""Calls of tools whose arguments are tags, as Qwen3-Coder, Qwen 3.5 and Nemotron 3 write them.

    <function=weather>
    <parameter=city>
    Oslo
    </parameter>
    </function>

A text stands there as it is, over any number of lines, and every other value as JSON. So the schema of an argument
decides what "7" is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastformer.generation.constraints import WHITE_SPACE

FUNCTION, PARAMETER = "<function=", "<parameter="
_END_FUNCTION, _END_PARAMETER = "</function>", "</parameter>"
_ANY_TEXT = "(?s:.*)"
_DAYS = "(0[1-9]|1[0-9]|2[0-9])"
_DATE = f"[0-9]{{4}}-(02-{_DAYS}|(0[469]|11)-({_DAYS}|30)|(0[13578]|1[02])-({_DAYS}|30|31))"
_HOUR = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR}:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+\-]{_HOUR})"
_FORMATS = {
    "date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}", "email": r"[^@\s]+@[^@\s]+",
    "uri": r"[A-Za-z][A-Za-z0-9+.\-]*:[^\s]+", "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}  # fmt: skip
_NOTES = frozenset(("title", "description", "default", "examples", "deprecated", "$comment"))
_OF_OBJECTS = frozenset(("type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema",
                         "strict", *_NOTES))  # fmt: skip
_PYTHON = {"True": "true", "False": "false", "None": "null"}  # as some templates write values


def argument_rules(schema: Mapping[str, Any], place: int) -> list[str]:
    """Returns the rules, in Lark's syntax, of a call's arguments, from `args_{place}` on.

    Raises:
        ValueError: the schema has what the rules can't express.
    """
    properties, required = schema.get("properties", {}), schema.get("required", [])
    unknown = [*(schema.keys() - _OF_OBJECTS), *({*required} - properties.keys())]
    if unknown or schema.get("type", "object") != "object":
        raise ValueError(f"expected the schema of an object with its properties, got one with {sorted(unknown)!r:.80}")
    rules, parts = list[str](), list[str]()
    for number, (key, described) in enumerate(properties.items()):
        rule = f"arg_{place}_{number}"
        parts.append(rule if key in required else f"{rule}?")
        begin = _quoted(f"{PARAMETER}{key}>\n")
        values = [*_values(described, schema, rule)]
        rules += [
            f"{rule}: {begin} ({' | '.join(value for value, _ in values)})",
            *(more for _, more in values if more),
        ]
    return [f"args_{place}: {' '.join(parts) or _quoted('')}", *rules]


def _values(schema: Any, root: Mapping[str, Any], rule: str) -> Iterator[tuple[str, str]]:
    """Yields the forms of a value with the end of its tag, each with a rule of its own, which may be empty."""
    end = f"\n{_END_PARAMETER}\n"
    for number, one in enumerate(_alternatives(schema, root)):
        texts = one.get("enum", [one["const"]] if "const" in one else None)
        if texts is not None:
            for value in texts:
                yield _quoted((value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)) + end), ""
        elif one.get("type") == "string":
            name = f"{rule}_{number}"
            # The end of the tag belongs to the expression: a text ends at the first one.
            yield name, f"{name}[lazy]: /{_slashed(_expression(one))}\\n<\\/parameter>\\n/"
        else:
            defined = {name: root[name] for name in ("$defs", "definitions") if name in root}
            limited = {**one, **defined, "x-guidance": {"whitespace_pattern": WHITE_SPACE}}
            yield f"%json {json.dumps(limited, ensure_ascii=False)} {_quoted(end)}", ""


def _alternatives(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Iterator[dict[str, Any]]:
    """Yields schemas, any of which a value has: texts and other values apart."""
    if schema is True or schema == {}:
        schema = {"type": ["string", "object", "array", "number", "boolean", "null"]}
    if not isinstance(schema, dict) or depth > 20:
        raise ValueError(f"expected the schema of an argument, got {schema!r:.80}")
    for name in ("anyOf", "oneOf"):
        if name in schema:
            if unknown := schema.keys() - {name} - _NOTES:
                raise ValueError(f"expected {name} alone in the schema of an argument, got {sorted(unknown)} beside it")
            for one in schema[name]:
                yield from _alternatives(one, root, depth + 1)
            return
    if "$ref" in schema and (found := _target(schema["$ref"], root)) is not None:
        yield from _alternatives(found, root, depth + 1)
        return
    kinds = schema.get("type")
    if not isinstance(kinds, list):
        yield schema
        return
    if "string" in kinds:
        yield {name: value for name, value in schema.items() if name != "type"} | {"type": "string"}
    if others := [kind for kind in kinds if kind != "string"]:
        yield schema | {"type": others}


def _target(reference: Any, root: Mapping[str, Any]) -> Any:
    """Returns what a reference within the schema of all arguments names; None: it is another one."""
    place: Any = root
    for name in str(reference).removeprefix("#/").split("/"):
        place = place.get(name) if isinstance(place, Mapping) else None
    return place


def _expression(schema: Mapping[str, Any]) -> str:
    """Returns a regular expression of the texts that match a schema.

    Raises:
        ValueError: it has more than one condition, or one that isn't known.
    """
    given = {name: value for name, value in schema.items() if name not in _NOTES and name != "type"}
    if not given:
        return _ANY_TEXT
    if given.keys() <= {"minLength", "maxLength"}:
        return f"(?s:.{{{given.get('minLength', 0)},{given.get('maxLength', '')}}})"
    if given.keys() == {"format"} and (known := _FORMATS.get(given["format"])) is not None:
        return known
    if given.keys() == {"pattern"} and isinstance(given["pattern"], str):
        pattern = given["pattern"]
        begin = "" if pattern.startswith("^") else _ANY_TEXT
        end = "" if pattern.endswith("$") and not pattern.endswith("\\$") else _ANY_TEXT
        return f"{begin}({pattern.removeprefix('^').removesuffix('' if end else '$')}){end}"
    raise ValueError(f"expected texts among the arguments with one known condition, got {sorted(given)}: the model "
                     "writes them without quotes")  # fmt: skip


def _slashed(expression: str) -> str:
    """Returns a regular expression as it stands between slashes."""
    return re.sub(r"\\.|/", lambda match: "\\/" if match[0] == "/" else match[0], expression, flags=re.DOTALL)


class TaggedCall:
    """Reads a call character by character; see `answers.JsonCall`, whose attributes and methods it has.

    Args:
        schemas: the schemas of the arguments, by the name of the tool.
    """

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self.name: str | None = None
        self.is_done, self.is_broken, self.is_told = False, False, False
        self._schemas, self._reads = schemas, self._open
        self._text, self._key = "", ""
        self._arguments: list[str] = []
        self._count = 0  # of the arguments

    def take(self) -> str:
        """Returns the JSON of the arguments since the last call."""
        text, self._arguments = "".join(self._arguments), []
        return text

    def add(self, text: str) -> int:
        """Reads characters up to the end of the call, and returns their number."""
        for place, character in enumerate(text):
            if self.is_done:
                return place
            self._text += character
            self._reads()
            if self.is_broken:
                return place
        return len(text)

    def _open(self) -> None:
        if not FUNCTION.startswith(self._text[: len(FUNCTION)]):
            self.is_broken = not self._text.startswith(FUNCTION)
        elif self._text.endswith(">"):
            self.name = self._text[len(FUNCTION) : -1].strip()
            self._reads, self._text = self._between, ""
        elif self._text.endswith("\n"):
            self.is_broken = True

    def _between(self) -> None:
        self._text = self._text.lstrip()
        if self._text == _END_FUNCTION:
            self._arguments.append("}" if self._count else "{}")
            self.is_done = True
        elif self._text.startswith(PARAMETER):
            if self._text.endswith(">"):
                self._key = self._text[len(PARAMETER) : -1].strip()
                self._reads, self._text = self._value, ""
        elif not any(tag.startswith(self._text) for tag in (PARAMETER, _END_FUNCTION)):
            self.is_broken = True

    def _value(self) -> None:
        if not self._text.endswith(_END_PARAMETER):
            return
        value = self._text.removesuffix(_END_PARAMETER).removeprefix("\n").removesuffix("\n")
        begin = ", " if self._count else "{"
        self._arguments.append(f"{begin}{json.dumps(self._key, ensure_ascii=False)}: {self._as_json(value)}")
        self._count += 1
        self._reads, self._text = self._between, ""

    def _as_json(self, value: str) -> str:
        """Returns a value as JSON: the one that its schema asks for, and a text if it isn't JSON."""
        root = self._schemas.get(self.name or "", {})
        properties = root.get("properties")
        try:
            allowed = [*_alternatives(properties[self._key] if isinstance(properties, Mapping) else {}, root)]
        except (KeyError, ValueError):
            allowed = [{}]
        kinds = {kind for one in allowed for kind in _kinds(one)}
        text = json.dumps(value, ensure_ascii=False)
        if kinds == {"string"}:
            return text
        written = _PYTHON.get(value.strip(), value.strip())
        try:
            read = json.loads(written, parse_constant=float)
        except (ValueError, RecursionError):
            return text
        if isinstance(read, str) and "string" in kinds:  # the quotes may be its own
            return text
        return text if isinstance(read, float) and written.lstrip("-")[:1] in "NI" else written


def _kinds(schema: Mapping[str, Any]) -> Sequence[str]:
    """Returns the types that a schema allows."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values:
        return ["string" if isinstance(value, str) else "other" for value in values]
    kind = schema.get("type", "other")
    return kind if isinstance(kind, list) else [str(kind)]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
