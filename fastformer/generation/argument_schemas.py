"""The schemas of arguments that a model doesn't write as JSON: what a value may be, and rules of unquoted texts."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastformer.generation.constraints import WHITE_SPACE

_ANY_TEXT = "(?s:.*)"
_DAYS = "(0[1-9]|1[0-9]|2[0-9])"
_DATE = f"[0-9]{{4}}-(02-{_DAYS}|(0[469]|11)-({_DAYS}|30)|(0[13578]|1[02])-({_DAYS}|30|31))"
_HOUR = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR}:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+\-]{_HOUR})"
_FORMATS = {
    "date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}", "email": r"[^@\s]+@[^@\s]+",
    "uri": r"[A-Za-z][A-Za-z0-9+.\-]*:[^\s]+", "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}  # fmt: skip
# The keywords of JSON schemas that say what a value has to be. By its specification, all others only tell something
# about it, such as title or x-order.
_DEFINITIONS = frozenset(("$defs", "definitions"))
_OF_NUMBERS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
_OF_LISTS = frozenset((
    "items", "prefixItems", "additionalItems", "contains", "minContains", "maxContains", "minItems", "maxItems",
    "uniqueItems", "unevaluatedItems",
))  # fmt: skip
_OF_OBJECTS = frozenset((
    "properties", "patternProperties", "additionalProperties", "required", "propertyNames", "minProperties",
    "maxProperties", "dependencies", "dependentRequired", "dependentSchemas", "unevaluatedProperties",
))  # fmt: skip
_KEYWORDS = _OF_NUMBERS | _OF_LISTS | _OF_OBJECTS | {
    "type", "enum", "const", "minLength", "maxLength", "pattern", "format", "anyOf", "oneOf", "allOf", "not", "if",
    "then", "else", "$ref", "$dynamicRef", "$recursiveRef",
}  # fmt: skip
_PARTS = _DEFINITIONS | {
    "properties", "patternProperties", "dependentSchemas", "anyOf", "oneOf", "allOf", "prefixItems", "items",
    "contains", "additionalItems", "additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties",
    "not", "if", "then", "else",
}  # fmt: skip
_NAMED = _DEFINITIONS | {"properties", "patternProperties", "dependentSchemas"}  # parts by names of any kind
_FORMATS_OF_JSON = frozenset((*_FORMATS, "duration", "hostname", "ipv4", "ipv6"))  # those that llguidance knows
_MOST_ALTERNATIVES = 1000  # references may multiply them
_MOST_DEPTH = 20
_TYPES: dict[type, tuple[str, ...]] = {
    str: ("string",), bool: ("boolean",), int: ("integer", "number"), float: ("number",), list: ("array",),
    dict: ("object",), type(None): ("null",),
}  # fmt: skip
_PYTHON = {"True": "true", "False": "false", "None": "null"}  # as some templates write values


def conditions(schema: Mapping[str, Any]) -> set[str]:
    """Returns the keywords of a schema that say what a value has to be."""
    return set(schema) & _KEYWORDS


def asserted(schema: Any, *, is_json: bool) -> Any:
    """Returns a schema without what says nothing of a value: formats that aren't known, and uniqueItems of False.

    Args:
        schema: the schema. By the specification of JSON schemas, a format that isn't known only describes a value.
        is_json: whether the value is JSON; of other texts, fewer formats are known.
    """
    if isinstance(schema, list):
        return [asserted(one, is_json=is_json) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    known, found = _FORMATS_OF_JSON if is_json else _FORMATS.keys(), {}
    for name, value in schema.items():
        is_note = name == "format" and isinstance(value, str) and value not in known
        if is_note or (name == "uniqueItems" and value is False):
            continue
        if name in _NAMED and isinstance(value, Mapping):
            value = {key: asserted(one, is_json=is_json) for key, one in value.items()}
        found[name] = asserted(value, is_json=is_json) if name in _PARTS - _NAMED else value
    return found


def properties_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schemas of an object's properties.

    Raises:
        ValueError: the schema has more than properties.
    """
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if isinstance(properties, dict) and isinstance(required, list) and schema.get("type", "object") == "object":
        others = conditions(schema) - {"type", "properties", "required", "additionalProperties"}
        unknown = [*sorted(others), *(name for name in required if name not in [*properties])]
        if not unknown:
            return properties
        raise ValueError(f"expected the schema of an object with its properties, got one with {unknown!r:.80}")
    raise ValueError(f"expected the schema of an object with its properties, got {schema!r:.80}")


def json_rule(schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    """Returns the rule of JSON that matches a part of a schema."""
    defined = {name: root[name] for name in ("$defs", "definitions") if name in root}
    limited = {**schema, **defined, "x-guidance": {"whitespace_pattern": WHITE_SPACE}}
    return f"%json {json.dumps(limited, ensure_ascii=False)}"


def is_any(schema: Any) -> bool:
    """Returns whether every value matches a schema."""
    return schema is True or (isinstance(schema, dict) and not conditions(schema))


def alternatives(schema: Any, root: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns schemas, any of which a value has: texts and other values apart.

    Raises:
        ValueError: it is no schema, or it has too many of them.
    """
    found = [*itertools.islice(_alternatives(schema, root), _MOST_ALTERNATIVES + 1)]
    if len(found) > _MOST_ALTERNATIVES:
        raise ValueError(f"expected an argument of at most {_MOST_ALTERNATIVES:,} alternatives")
    return found


def _alternatives(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Iterator[dict[str, Any]]:
    if is_any(schema):
        schema = {"type": ["string", "object", "array", "number", "boolean", "null"]}
    lists = [schema[name] for name in ("anyOf", "oneOf", "enum") if name in schema] if isinstance(schema, dict) else [0]
    is_empty = isinstance(schema, dict) and schema.get("type") == []
    if depth > _MOST_DEPTH or is_empty or not all(isinstance(one, list) and one for one in lists):
        raise ValueError(f"expected the schema of an argument, got {schema!r:.80}")
    for name in ("anyOf", "oneOf"):
        if name in schema:
            if unknown := conditions(schema) - {name}:
                raise ValueError(f"expected {name} alone in the schema of an argument, got {sorted(unknown)} beside it")
            for one in schema[name]:
                yield from _alternatives(one, root, depth + 1)
            return
    if isinstance(parts := schema.get("allOf"), list) and len(parts) == 1 and conditions(schema) == {"allOf"}:
        yield from _alternatives(parts[0], root, depth + 1)
        return
    if "$ref" in schema and (found := _target(schema["$ref"], root)) is not None:
        beside = {name: schema[name] for name in conditions(schema) - {"$ref"}}
        if beside:
            if not isinstance(found, dict) or beside.keys() & found.keys():
                raise ValueError(f"expected $ref alone in the schema of an argument, got {sorted(beside)} beside it")
            found = found | beside
        yield from _alternatives(found, root, depth + 1)
        return
    types = schema.get("type")
    if not isinstance(types, list) or "enum" in schema or "const" in schema:
        yield schema
        return
    if "string" in types:
        yield schema | {"type": "string"}
    if others := [kind for kind in types if kind != "string"]:
        yield schema | {"type": others}


def _target(reference: Any, root: Mapping[str, Any]) -> Any:
    """Returns what a reference within the schema of all arguments names; None: it is another one."""
    place: Any = root
    for name in str(reference).removeprefix("#/").split("/"):
        place = place.get(name) if isinstance(place, Mapping) else None
    return place


def fits(value: Any, schema: Any, root: Mapping[str, Any], depth: int = 0) -> bool:
    """Returns whether a value has the types, listed values, bounds, items and properties of a schema.

    Other conditions, and schemas that can't be read, are taken to be met.
    """
    if isinstance(schema, bool) or depth > _MOST_DEPTH:
        return schema is not False
    try:
        return any(_has_all(value, one, root, depth) for one in alternatives(schema, root))
    except (AttributeError, TypeError, ValueError):
        return True


def _has_all(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> bool:
    types = schema.get("type", [])
    kinds = _TYPES[type(value)] + (("integer",) if isinstance(value, float) and value.is_integer() else ())
    if types and not {*kinds}.intersection([types] if isinstance(types, str) else types):
        return False
    if (values := given_values(schema)) is not None:
        return any(one == value and isinstance(one, bool) == isinstance(value, bool) for one in values)
    least, most, number = schema.get("minimum"), schema.get("maximum"), value
    if isinstance(value, list):
        least, most, number = schema.get("minItems"), schema.get("maxItems"), len(value)
        if not all(fits(one, schema.get("items", True), root, depth + 1) for one in value):
            return False
    elif isinstance(value, dict):
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        parts = all(fits(one, properties.get(name, others), root, depth + 1) for name, one in value.items())
        return parts and all(name in value for name in schema.get("required", []))
    elif not isinstance(value, int | float):
        return True
    return (least is None or least <= number) and (most is None or number <= most)


def expression(schema: Mapping[str, Any]) -> str:
    """Returns a regular expression of the texts that match a schema.

    Raises:
        ValueError: it has more than one condition, or one that isn't known.
    """
    of_others = _OF_NUMBERS | _OF_LISTS | _OF_OBJECTS  # which no text breaks
    given = {name: schema[name] for name in conditions(schema) - of_others - {"type"}}
    if not given:
        return _ANY_TEXT
    if given.keys() <= {"minLength", "maxLength"}:
        return f"(?s:.{{{given.get('minLength', 0)},{given.get('maxLength', '')}}})"
    if given.keys() == {"format"} and (known := _FORMATS.get(str(given["format"]))) is not None:
        return known
    if given.keys() == {"pattern"} and isinstance(given["pattern"], str):
        pattern = given["pattern"]
        begin = "" if pattern.startswith("^") else _ANY_TEXT
        end = "" if pattern.endswith("$") and not pattern.endswith("\\$") else _ANY_TEXT
        return f"{begin}({pattern.removeprefix('^').removesuffix('' if end else '$')}){end}"
    raise ValueError(f"expected texts among the arguments with one known condition, got {sorted(given)}: the model "
                     "writes them without quotes")  # fmt: skip


def slashed(expression: str) -> str:
    """Returns a regular expression as it stands between slashes."""
    return re.sub(r"\\.|/", lambda match: "\\/" if match[0] == "/" else match[0], expression, flags=re.DOTALL)


def given_values(schema: Mapping[str, Any]) -> list[Any] | None:
    """Returns the values that a schema lists; None: it lists none."""
    return schema.get("enum", [schema["const"]] if "const" in schema else None)


def kinds(schema: Mapping[str, Any]) -> Sequence[str]:
    """Returns the types that a schema allows."""
    if (values := given_values(schema)) is not None:
        return ["string" if isinstance(value, str) else "other" for value in values]
    kind = schema.get("type", "other")
    return kind if isinstance(kind, list) else [str(kind)]


def as_json(value: str) -> str | None:
    """Returns the JSON that a model has written, also as Python spells it; None: it is none."""
    written = _PYTHON.get(value.strip(), value.strip())
    try:
        read = json.loads(written)
    except (ValueError, RecursionError):
        return None
    return None if isinstance(read, float) and written.lstrip("-")[:1] in ("N", "I") else written  # NaN, Infinity


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
