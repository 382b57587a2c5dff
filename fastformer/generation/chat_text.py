"""`Text`: the texts that a chat template works on, which know the characters that the template itself wrote."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from string import Formatter
from typing import Any

from markupsafe import Markup

_DIRECTIVE = re.compile(r"%(?:\((?P<key>[^)]*)\))?[#0\- +]*\d*(?:\.\d+)?[hlL]?(?P<kind>[A-Za-z%])")
MAX_ITEMS = 200_000  # items in a list or a mapping, including the nested ones; characters of a text that is iterated


class BoundExceeded(Exception):
    """Raised if a template exceeds a bound."""


class Text(str):
    """A text with a mask of the characters that the template wrote; the others came from a message.

    The template's own literals are marked when it is compiled, and nothing else is: an operation that isn't followed
    here returns an ordinary str, which counts as the text of a message. So a mistake can turn a control token of the
    template into text, but never the text of a message into a control token.

    Args:
        text: the text.
        mask: a byte for each character, 1 if the template wrote it; None: it wrote none of them.
    """

    __slots__ = ("_mask",)
    _mask: bytes

    def __new__(cls, text: str, mask: bytes | None = None) -> Text:
        self = super().__new__(cls, text)
        self._mask = mask if mask is not None and len(mask) == len(text) else bytes(len(text))
        return self

    @classmethod
    def written(cls, text: str) -> Text:
        """Returns a text of the template."""
        return cls(text, b"\1" * len(text))

    def __str__(self) -> str:
        return self  # str(text) keeps the mask

    def __iter__(self) -> Iterator[str]:
        for place, character in enumerate(str.__iter__(self)):
            if place == MAX_ITEMS:
                raise BoundExceeded(f"it takes a text of more than {MAX_ITEMS:,} characters apart")
            yield Text(character, self._mask[place : place + 1])

    def __getitem__(self, key: Any) -> Text:
        mask = self._mask[key]
        return Text(str.__getitem__(self, key), mask if isinstance(mask, bytes) else bytes((mask,)))

    def __add__(self, other: str) -> Text:
        if not isinstance(other, str) or isinstance(other, Markup):  # Markup escapes the other side
            return NotImplemented
        return Text(str.__add__(self, other), self._mask + mask_of(other))

    def __radd__(self, other: str) -> Text:
        if not isinstance(other, str):
            return NotImplemented
        return Text(str.__add__(other, self), mask_of(other) + self._mask)

    def __mul__(self, times: Any) -> Text:
        return Text(str.__mul__(self, times), self._mask * times)

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> Text:
        return _same(str.__mod__(self, values), lambda: self._with_values(values))

    def _with_values(self, values: Any) -> Iterator[str]:
        left, last = iter(values if isinstance(values, tuple) else (values,)), 0
        for match in _DIRECTIVE.finditer(str.__str__(self)):
            yield self[last : match.start()]
            last, directive = match.end(), match[0]
            if match["kind"] == "%":
                yield Text("%", self._mask[match.start() : match.start() + 1])
            else:
                value = next(left) if match["key"] is None else values[match["key"]]
                is_whole = match["kind"] == "s" and directive == (
                    "%s" if match["key"] is None else f"%({match['key']})s"
                )
                shown = value if match["key"] is None else {match["key"]: value}
                yield value if is_whole and isinstance(value, str) else directive % (shown,)
        yield self[last:]

    def filled(self, formatter: Formatter, args: Any, values: Mapping[str, Any]) -> Text:
        """Returns the result of str.format, by a formatter that checks what the text reads."""
        whole = formatter.vformat(str.__str__(self), args, values)
        return _same(whole, lambda: self._with_fields(formatter, args, values))

    def _with_fields(self, formatter: Formatter, args: Any, values: Mapping[str, Any]) -> Iterator[str]:
        is_written, number = 0 not in self._mask, 0
        for literal, field, spec, conversion in formatter.parse(str.__str__(self)):
            yield Text.written(literal) if is_written else literal
            if field is None:
                continue
            if not field or field[0] in ".[":
                field, number = f"{number}{field}", number + 1
            value, _ = formatter.get_field(field, args, values)
            if isinstance(value, str) and not (spec or conversion):
                yield value
            else:
                form = "{" + field + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "") + "}"
                yield formatter.vformat(form, args, values)

    def join(self, items: Iterable[str]) -> Text:
        parts = [*items]
        return Text(str.join(self, parts), self._mask.join(map(mask_of, parts)))

    def replace(self, old: str, new: str, count: Any = -1) -> Text:
        whole = str.replace(self, old, new, count)
        if not old:
            marks = [self._mask[place : place + 1] + mask_of(new) for place in range(len(self))]
            return Text(whole, mask_of(new) + b"".join(marks) if count < 0 else None)
        masks, place = [], 0
        for part in str.split(self, old, count):
            masks.append(self._mask[place : place + len(part)])
            place += len(part) + len(old)
        return Text(whole, mask_of(new).join(masks))

    def split(self, sep: str | None = None, maxsplit: Any = -1) -> list[Text]:  # type: ignore[override]
        return self._cut(str.split(self, sep, maxsplit), None if sep is None else len(sep))

    def rsplit(self, sep: str | None = None, maxsplit: Any = -1) -> list[Text]:  # type: ignore[override]
        return self._cut(str.rsplit(self, sep, maxsplit), None if sep is None else len(sep))

    def splitlines(self, keepends: bool = False) -> list[Text]:  # type: ignore[override]
        lines = self._cut(str.splitlines(self, True), 0)
        return lines if keepends else [line[: len(str.splitlines(line)[0])] for line in lines]

    def partition(self, sep: str) -> tuple[Text, Text, Text]:
        first, middle, last = self._cut(str.partition(self, sep), 0)
        return first, middle, last

    def rpartition(self, sep: str) -> tuple[Text, Text, Text]:
        first, middle, last = self._cut(str.rpartition(self, sep), 0)
        return first, middle, last

    def _cut(self, parts: Sequence[str], gap: int | None) -> list[Text]:
        """Returns parts of the text, which are so far apart; None: by white space."""
        if len(parts) > MAX_ITEMS:
            raise BoundExceeded(f"it cuts a text into more than {MAX_ITEMS:,} parts")
        pieces, place = [], 0
        for part in parts:
            place = str.find(self, part, place) if gap is None else place
            pieces.append(self[place : place + len(part)])
            place += len(part) + (gap or 0)
        return pieces

    def lstrip(self, chars: str | None = None) -> Text:
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None) -> Text:
        return self[: len(str.rstrip(self, chars))]

    def strip(self, chars: str | None = None) -> Text:
        return self.rstrip(chars).lstrip(chars)

    def removeprefix(self, prefix: str) -> Text:
        return self[len(self) - len(str.removeprefix(self, prefix)) :]

    def removesuffix(self, suffix: str) -> Text:
        return self[: len(str.removesuffix(self, suffix))]


def _in_place(name: str) -> Any:
    """Makes a method that changes each character by itself; one of them may become several."""
    change: Callable[..., str] = getattr(str, name)

    def method(self: Text) -> Text:
        whole = change(self)
        if len(whole) == len(self):
            return Text(whole, self._mask)
        marks = (self._mask[place : place + 1] * len(change(each)) for place, each in enumerate(str.__str__(self)))
        return Text(whole, b"".join(marks))

    method.__name__ = name
    return method


for _name in ("capitalize", "casefold", "lower", "swapcase", "title", "upper"):
    setattr(Text, _name, _in_place(_name))


class SafeText(Markup):
    """A text that a template has called safe; it is printed as it is, with its mask."""

    __slots__ = ("_text",)
    _text: Text

    def __new__(cls, text: Text) -> SafeText:
        self = super().__new__(cls, str.__str__(text))
        self._text = text
        return self

    def __str__(self) -> str:
        return self._text


def mask_of(text: str) -> bytes:
    """Returns the mask of a text; an ordinary str came from a message."""
    return text._mask if isinstance(text, Text) else bytes(len(text))


def as_text(value: Any) -> Any:
    """Returns a value; an ordinary str as a Text."""
    return Text(value) if type(value) is str else value


def as_texts(value: Any) -> Any:
    """Copies plain values, with each str in them, keys included, as a Text."""
    if isinstance(value, list):
        return [as_texts(item) for item in value]
    if isinstance(value, dict):
        return {as_text(key): as_texts(item) for key, item in value.items()}
    return as_text(value)


def made_of(whole: Any, *parts: Any) -> Any:
    """Returns a result; if it is an ordinary str that was made of nothing but texts of the template, it is marked."""
    if type(whole) is str:
        texts = [part for part in parts if not isinstance(part, int | float | None)]
        if texts and all(isinstance(part, Text) and 0 not in part._mask for part in texts):
            return Text.written(whole)
    return whole


def _same(whole: str, parts: Callable[[], Iterable[str]]) -> Text:
    """Returns a text that was computed as a whole, with the mask of its parts if they are the same text."""
    try:
        text = Text("").join(parts())
    except (TypeError, ValueError, LookupError, StopIteration, RuntimeError, AttributeError):
        return Text(whole)
    return text if str.__eq__(text, whole) else Text(whole)
