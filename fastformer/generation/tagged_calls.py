"""Calls of tools whose arguments are tags, as Qwen3-Coder, Qwen 3.5, Nemotron 3 and Seed-OSS write them.

    <function=weather>
    <parameter=city>
    Oslo
    </parameter>
    </function>

A text stands there as it is, over any number of lines, and every other value as JSON. So the schema of an argument
decides what "7" is. Around a value is a line end, but in Seed-OSS's calls, where the tags stand beside it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from fastformer.generation.argument_schemas import (
    alternatives,
    as_json,
    expression,
    fits,
    given_values,
    json_rule,
    kinds,
    properties_of,
    quoted,
    slashed,
)

FUNCTION, PARAMETER = "<function=", "<parameter="
_END_FUNCTION, _END_PARAMETER = "</function>", "</parameter>"
_TEXT = re.compile(r'"([^"\\]|\\.)*"', re.DOTALL)  # of JSON
_TWO_ENDS = r"(?s:.*)<\/parameter>(?s:.*)<\/parameter>\n"


def argument_rules(schema: Mapping[str, Any], place: int, around: str) -> list[str]:
    """Returns the rules, in Lark's syntax, of a call's arguments, from `args_{place}` on.

    Args:
        schema: the schema of the arguments.
        place: the number of the tool.
        around: what stands on both sides of a value.

    Raises:
        ValueError: the schema has what the rules can't express.
    """
    rules, parts = list[str](), list[str]()
    for number, (key, described) in enumerate(properties_of(schema).items()):
        rule = f"arg_{place}_{number}"
        if ">" in key or key != key.strip():
            raise ValueError(f"expected names of arguments without > and spaces around them, got {key!r:.80}")
        parts.append(rule if key in schema.get("required", []) else f"{rule}?")
        begin = quoted(f"{PARAMETER}{key}>{around}")
        values = [*_values(described, schema, rule, around)]
        rules += [
            f"{rule}: {begin} ({' | '.join(value for value, _ in values)})",
            *(more for _, more in values if more),
        ]
    return [f"args_{place}: {' '.join(parts) or quoted('')}", *rules]


def _values(schema: Any, root: Mapping[str, Any], rule: str, around: str) -> Iterator[tuple[str, str]]:
    """Yields the forms of a value with the end of its tag, each with a rule of its own, which may be empty."""
    end = f"{around}{_END_PARAMETER}\n"
    for number, one in enumerate(alternatives(schema, root)):
        if (values := given_values(one)) is not None:
            for value in values:
                text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                if _END_PARAMETER in text:
                    raise ValueError(f"expected values without {_END_PARAMETER}, with which the model ends them")
                yield quoted(text + end), ""
        elif one.get("type") == "string":
            name = f"{rule}_{number}"
            # The end of the tag belongs to the expression: a text ends at the first one, also within a line.
            whole = expression(one) + end.replace("\n", r"\n")
            text = f"(/{slashed(whole)}/ & ~/{_TWO_ENDS}/)"
            yield name, f"{name}[lazy]: {text}"
        else:
            yield f"{json_rule(one, root)} {quoted(end)}", ""


class TaggedCall:
    """Reads a call character by character; see `answers.JsonCall`, whose attributes and methods it has.

    Args:
        schemas: the schemas of the arguments, by the name of the tool.
        around: what stands on both sides of a value.
    """

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]], around: str) -> None:
        self.name: str | None = None
        self.is_done, self.is_broken, self.is_told = False, False, False
        self._schemas, self._around, self._reads = schemas, around, self._open
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
        line = self._text.removesuffix("\n")
        if not line.endswith(_END_PARAMETER):
            return
        written = line.removesuffix(_END_PARAMETER)
        allowed, root = self._allowed()
        may_be_text = any("string" in kinds(one) for one in allowed)
        others = [one for one in allowed if any(kind != "string" for kind in kinds(one))]
        if others and line == self._text and _is_open(written):  # no text of JSON has a line end
            return
        value = written.removeprefix(self._around).removesuffix(self._around)
        read = as_json(value) if others else None
        # A text needs no quotes, so that these may be its own.
        is_text = may_be_text and read is not None and not any(_fits(read, one, root) for one in others)
        if read is None or is_text:
            read = json.dumps(value, ensure_ascii=False)
        begin = ", " if self._count else "{"
        self._arguments.append(f"{begin}{json.dumps(self._key, ensure_ascii=False)}: {read}")
        self._count += 1
        self._reads, self._text = self._between, ""

    def _allowed(self) -> tuple[list[dict[str, Any]], Mapping[str, Any]]:
        """Returns the alternatives of the argument's schema, and the schema of all arguments."""
        root = self._schemas.get(self.name or "", {})
        properties = root.get("properties")
        try:
            return alternatives(properties[self._key] if isinstance(properties, Mapping) else {}, root), root
        except (KeyError, ValueError):
            return [{}], root


def _is_open(written: str) -> bool:
    """Returns whether JSON has a text that hasn't ended, to which a tag belongs; such a text has no line ends."""
    begins = written.lstrip()[:1] in ("[", "{", '"')
    return begins and not written.endswith("\n") and '"' in _TEXT.sub("", written)


def _fits(written: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    """Returns whether JSON is a value of a schema, and no text."""
    return written[0] != '"' and fits(json.loads(written), schema, root)
