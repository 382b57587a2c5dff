"""Calls of tools whose arguments are tags, as Qwen3-Coder, Qwen 3.5, Nemotron 3, Seed-OSS and GLM 4.5 write them.

    <function=weather>
    <parameter=city>
    Oslo
    </parameter>
    </function>

A text stands there as it is, over any number of lines, and every other value as JSON. So the schema of an argument
decides what "7" is. Around a value is a line end, but in Seed-OSS's and GLM's calls, where the tags stand beside it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

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
from fastformer.generation.call_reader import CallReader

_TEXT = re.compile(r'"([^"\\]|\\.)*"', re.DOTALL)  # of JSON


class Tags(NamedTuple):
    """The tags of a call.

    Attributes:
        name, name_end: the tags on both sides of the tool's name; without the second, a line or the next tag ends it.
        key, key_ends: the tags in front of an argument's name and behind it, the last of which begins the value.
        value_end: the tag behind a value.
        end: the tag behind all arguments.
        line: what stands between two tags.
        around: what stands on both sides of a value.
    """

    name: str = "<function="
    name_end: str = ">"
    key: str = "<parameter="
    key_ends: tuple[str, ...] = (">",)
    value_end: str = "</parameter>"
    end: str = "</function>"
    line: str = "\n"
    around: str = "\n"

    def head(self, name: str) -> str:
        """Returns the text of a call up to its arguments."""
        return f"{self.name}{name}{self.name_end}{self.line}"


def argument_rules(schema: Mapping[str, Any], place: int, tags: Tags) -> list[str]:
    """Returns the rules, in Lark's syntax, of a call's arguments, from `args_{place}` on.

    Args:
        schema: the schema of the arguments.
        place: the number of the tool.
        tags: the tags of the format.

    Raises:
        ValueError: the schema has what the rules can't express.
    """
    rules, parts = list[str](), list[str]()
    for number, (key, described) in enumerate(properties_of(schema).items()):
        rule = f"arg_{place}_{number}"
        if "<" in key or ">" in key or key != key.strip():
            raise ValueError(f"expected names of arguments without <, > and spaces around them, got {key!r:.80}")
        parts.append(rule if key in schema.get("required", []) else f"{rule}?")
        begin = quoted(f"{tags.key}{key}{tags.line.join(tags.key_ends)}{tags.around}")
        values = [*_values(described, schema, rule, tags)]
        rules += [
            f"{rule}: {begin} ({' | '.join(value for value, _ in values)})",
            *(more for _, more in values if more),
        ]
    return [f"args_{place}: {' '.join(parts) or quoted('')}", *rules]


def _values(schema: Any, root: Mapping[str, Any], rule: str, tags: Tags) -> Iterator[tuple[str, str]]:
    """Yields the forms of a value with the end of its tag, each with a rule of its own, which may be empty."""
    end = f"{tags.around}{tags.value_end}{tags.line}"
    for number, one in enumerate(alternatives(schema, root)):
        if (values := given_values(one)) is not None:
            for value in values:
                text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                if tags.value_end in text:
                    raise ValueError(f"expected values without {tags.value_end}, with which the model ends them")
                yield quoted(text + end), ""
        elif one.get("type") == "string":
            name = f"{rule}_{number}"
            # The end of the tag belongs to the expression: a text ends at the first one, also within a line.
            whole = expression(one) + end.replace("\n", r"\n")
            two = f"(?s:.*){tags.value_end}(?s:.*){tags.value_end}{tags.line}".replace("\n", r"\n")
            text = f"(/{slashed(whole)}/ & ~/{slashed(two)}/)"
            yield name, f"{name}[lazy]: {text}"
        else:
            yield f"{json_rule(one, root)} {quoted(end)}", ""


class TaggedCall(CallReader):
    """Reads a call.

    Args:
        schemas: the schemas of the arguments, by the name of the tool.
        tags: the tags of the format.
    """

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]], tags: Tags) -> None:
        super().__init__()
        self._schemas, self._tags, self._state = schemas, tags, self._open
        self._text, self._key = "", ""
        self._count = 0  # of the arguments

    def _reads(self, character: str) -> None:
        self._text += character
        self._state()

    def _open(self) -> None:
        begin, end, last = self._tags.name, self._tags.name_end, self._text[-1]
        if not begin.startswith(self._text[: len(begin)]):
            self.is_broken = not self._text.startswith(begin)
        elif last == end or (not end and last in "\n<" and self._text.strip("\n")):
            name = self._text[len(begin) : -1].strip()
            self.name, self._state, self._text = name, self._between, "" if end else last
        elif last == "\n":
            self.is_broken = bool(end)

    def _between(self) -> None:
        self._text, tags = self._text.lstrip(), self._tags
        if self._text == tags.end:
            self._arguments.append("}" if self._count else "{}")
            self.is_done = True
        elif self._text.startswith(tags.key):
            if self._text.endswith(tags.key_ends[-1]):
                self._key = self._text[len(tags.key) :].partition(tags.key_ends[0])[0].strip()
                self._state, self._text = self._value, ""
        elif not any(tag.startswith(self._text) for tag in (tags.key, tags.end)):
            self.is_broken = True

    def _value(self) -> None:
        line = self._text.removesuffix("\n")
        if not line.endswith(self._tags.value_end):
            return
        written = line.removesuffix(self._tags.value_end)
        allowed, root = self._allowed()
        may_be_text = any("string" in kinds(one) for one in allowed)
        others = [one for one in allowed if any(kind != "string" for kind in kinds(one))]
        if others and line == self._text and _is_open(written):  # no text of JSON has a line end
            return
        value = written.removeprefix(self._tags.around).removesuffix(self._tags.around)
        read = as_json(value) if others else None
        # A text needs no quotes, so that these may be its own.
        is_text = may_be_text and read is not None and not any(_fits(read, one, root) for one in others)
        if read is None or is_text:
            read = json.dumps(value, ensure_ascii=False)
        begin = ", " if self._count else "{"
        self._arguments.append(f"{begin}{json.dumps(self._key, ensure_ascii=False)}: {read}")
        self._count += 1
        self._state, self._text = self._between, ""

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
