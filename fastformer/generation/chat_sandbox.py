"""Renders chat templates, which are programs that come with a model, with bounds on what they access and cost.

jinja2's sandbox hides Python's internals and the file system from templates. It bounds neither time nor memory: a
template could loop for ever, or double a text until the memory is full. This sandbox counts each round of a loop and
each call of a macro. It reads the clock at each of them, and at each other operation that may take more than a moment:
calls, filters, tests, comparisons, slices, arithmetic, and what is printed. Each of these is bounded by itself: values
have a largest size, and operations that take much longer than their values are long are checked before they run.
Filters that chat templates don't need are not available.

Texts are of the class `Text`, so that the result of a rendering shows which of its characters the template wrote.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace, pass_environment
from markupsafe import Markup

from fastformer.generation.chat_text import MAX_ITEMS, BoundExceeded, SafeText, Text, as_text, made_of

MAX_ROUNDS = 100_000  # rounds of loops and calls of macros, together
MAX_LENGTH = 4_000_000  # characters in a text
MAX_SECONDS = 5.0
MAX_NUMBER = 100_000  # the largest number that a method or filter accepts, such as a width
_MAX_PRINTED = 10 * MAX_LENGTH  # characters of all values that are printed, in parts that a template throws away too
_MAX_PRODUCT = 100_000_000  # characters of a text times those that are searched for in it from the right
_MAX_BITS = 4096  # bits in an integer
_MAX_INDENT = 64  # characters of JSON's indentation
_LONG_NUMBER = re.compile(r"\d{6}")  # a number in a format string, which may be a width

_FILTERS = (
    "abs", "attr", "batch", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float",
    "format", "groupby", "indent", "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min",
    "reject", "rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr", "slice", "sort", "string",
    "sum", "title", "trim", "truncate", "unique", "upper", "wordcount",
)  # fmt: skip
_GLOBALS = ("range", "joiner", "cycler")
_EMPTY = Text("")
# Methods and filters that may take as long as the product of two lengths.
_PRODUCTS = ("lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip", "trim")


class TemplateRefusal(jinja2.TemplateError):
    """Raised by a template that refuses its messages (`raise_exception`)."""


class _Budget:
    """The rounds, the time and the printed characters that are left to a rendering."""

    def __init__(self) -> None:
        self.rounds, self.end, self.printed = MAX_ROUNDS, time.monotonic() + MAX_SECONDS, _MAX_PRINTED


_budget: ContextVar[_Budget] = ContextVar("budget")


def _check_time() -> None:
    """Checks the clock. jinja2 also tries filters while it compiles, where this raises LookupError, so it gives up."""
    if time.monotonic() > _budget.get().end:
        raise BoundExceeded(f"it takes longer than {MAX_SECONDS:g} s")


def _check_length(length: int, most: int = MAX_LENGTH) -> None:
    if length > most:
        raise BoundExceeded(
            f"it makes a string of more than {MAX_LENGTH:,} characters or a list of {MAX_ITEMS:,} items"
        )


def _most(value: object) -> int:
    return MAX_LENGTH if isinstance(value, str) else MAX_ITEMS


def _check_number(value: object) -> None:
    if isinstance(value, int) and abs(value) > MAX_NUMBER:
        raise BoundExceeded(f"it passes a number above {MAX_NUMBER:,}")
    if isinstance(value, float) and not abs(value) <= MAX_NUMBER:
        raise BoundExceeded(f"it passes a number above {MAX_NUMBER:,}")


def _checked(value: Any) -> Any:
    """Returns a value after a check of its length, nested values included: writing or comparing it takes as long."""
    length, items, pending = 0, 0, [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            length += len(item)
        elif isinstance(item, list | tuple | dict | set):
            items += len(item)
        elif isinstance(item, bytes | bytearray):
            raise BoundExceeded("it makes bytes, whose size has no bound")
        _check_length(length)
        _check_length(items, MAX_ITEMS)
        if isinstance(item, dict):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set):
            pending += item
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise BoundExceeded("it makes a number with too many digits")
    return value


def _bounded_concat(parts: Iterable[Any]) -> Text:
    pieces, length = [], 0
    for part in parts:
        piece = part if type(part) is Text else str(part)
        length += len(piece)
        _check_length(length)
        pieces.append(piece)
    return _EMPTY.join(pieces)


def _before_call(name: str, subject: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Checks a call of a method or filter whose result may be much longer than its input."""
    for value in (*args, *kwargs.values()):
        _check_number(value)
    if name == "replace" and isinstance(subject, str) and len(args) >= 2:
        old, new = str(args[0]), str(args[1])
        times = subject.count(old) if old else len(subject) + 1
        _check_length(len(subject) + times * max(0, len(new) - len(old)))
    elif name == "format" and isinstance(subject, str) and _LONG_NUMBER.search(subject):
        raise BoundExceeded("it formats to a width above 99,999")
    elif name == "translate":  # its table may replace any character by any text
        raise BoundExceeded("it calls translate, whose result has no bound")
    elif name == "expandtabs" and isinstance(subject, str):
        _check_length(len(subject) * 8)
    elif name in _PRODUCTS and isinstance(subject, str):
        longest = max((len(value) for value in (*args, *kwargs.values()) if isinstance(value, str)), default=0)
        if len(subject) * longest > _MAX_PRODUCT:
            raise BoundExceeded(f"it calls {name} with long texts")


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    passes = getattr(function, "jinja_pass_arg", None)
    place = 0 if passes is None else 1

    def call(*args: Any, **kwargs: Any) -> Any:
        _check_time()
        args = (*args[:place], *map(as_text, args[place:]))
        subject = args[place] if len(args) > place else None
        if name == "join" and subject is not None and not kwargs.get("attribute") and len(args) < place + 3:
            # The result may contain the separator many times.
            items = [str(item) for item in subject]
            separator = Text(str(args[place + 1] if len(args) > place + 1 else kwargs.get("d", "")))
            _check_length(sum(map(len, items)) + len(separator) * len(items))
            return separator.join(items)
        if name == "indent":
            width = args[place + 1] if len(args) > place + 1 else kwargs.get("width", 4)
            added = len(width) if isinstance(width, str) else width if isinstance(width, int) else 0
            _check_length(len(str(subject)) + (str(subject).count("\n") + 1) * max(0, added))
        _before_call(name, subject, args[place + 1 :], kwargs)
        result = _checked(function(*args, **kwargs))
        _check_time()
        return made_of(result, *args[place:], *kwargs.values())

    if passes is not None:
        call.jinja_pass_arg = passes  # type: ignore[attr-defined]
    return call


def _timed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a test that checks the clock: a filter may run it for each item, and each time look at all of a list."""

    def call(*args: Any, **kwargs: Any) -> Any:
        _check_time()
        return function(*args, **kwargs)

    if (passes := getattr(function, "jinja_pass_arg", None)) is not None:
        call.jinja_pass_arg = passes  # type: ignore[attr-defined]
    return call


@pass_environment
def _sum(environment: Sandbox, values: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
    """Adds items one by one, as jinja2's filter does: a sum of lists copies the lists before again and again."""
    if attribute is not None:
        values = map(make_attrgetter(environment, attribute), values)
    if isinstance(start, str):
        raise TypeError("sum() can't sum strings")
    for value in values:
        start = environment.added(start, value)
    return start


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Indents lines as jinja2's filter does, but by methods that keep a text's mask."""
    space, newline = width if isinstance(width, str) else " " * width, Text("\n")
    lines = (str(text) + newline).splitlines()
    if not blank:
        lines = [line and space + line if place else line for place, line in enumerate(lines)]
    joined = ((newline + space) if blank else newline).join(lines)
    return space + joined if first else joined


def _safe(value: Any) -> Any:
    return SafeText(value) if isinstance(value, Text) else jinja2.filters.do_mark_safe(value)


class _Writer(CodeGenerator):
    """Writes a template's Python code, with its literals as marked texts."""

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        value = node.as_const(frame.eval_ctx)
        if isinstance(value, str):
            self.write(self._literal(value))
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:
        self.write(self._literal(node.data))

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return self._literal("".join(map(str, group)))

    def _output_child_pre(self, *args: Any) -> None:
        self.write("environment.shown(")

    def _literal(self, text: str) -> str:
        literals: dict[str, Text] = self.environment.literals  # type: ignore[attr-defined]
        literals.setdefault(str.__str__(text), Text.written(text))
        return f"environment.literals[{text!r}]"


class _Generation(Extension):
    """The tag {% generation %}, which marks the model's answers for training; here it only renders its contents."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Namespace(Namespace):
    """A namespace that rejects names with a leading underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace can't have the name {name!r}")


def _raise_exception(message: object) -> None:
    raise TemplateRefusal(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    width = len(indent) if isinstance(indent, str) else indent or 0
    if max(width, sum(map(len, separators or ()))) > _MAX_INDENT:
        raise BoundExceeded(f"it writes JSON with an indent or separators longer than {_MAX_INDENT}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:  # noqa: A002 (the name that templates know)
    return str(made_of(datetime.now().strftime(format), format))


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of transformers' chat templates, with the bounds of this module."""

    intercepted_binops = frozenset(("-", "*", "/", "//", "**", "%"))
    concat = staticmethod(_bounded_concat)
    code_generator_class = _Writer

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters = {name: _bounded_filter(name, self.filters[name]) for name in _FILTERS}
        for name, function in (("tojson", _tojson), ("sum", _sum), ("indent", _indent), ("safe", _safe)):
            self.filters[name] = _bounded_filter(name, function)
        self.tests: dict[str, Any] = {name: _timed(test) for name, test in self.tests.items()}
        self.literals: dict[str, Text] = {}  # the texts in the source of the templates
        self.globals = {name: self.globals[name] for name in _GLOBALS}
        self.globals |= {
            "raise_exception": _raise_exception, "strftime_now": _strftime_now, "dict": _dict, "namespace": _Namespace,
        }  # fmt: skip

    def render(self, template: jinja2.Template, variables: Mapping[str, Any]) -> Text:
        """Renders a template of this environment.

        Args:
            template: the template.
            variables: the variables that it reads; each str of a message is a Text without marks.

        Raises:
            Exception: any error of the template.
        """
        token = _budget.set(_Budget())
        try:
            return _bounded_concat(template.generate(**variables))
        finally:
            _budget.reset(token)

    def tick(self) -> str:
        """Counts a round of a loop or a call of a macro, and checks the clock. Returns ""."""
        budget = _budget.get()
        budget.rounds -= 1
        if budget.rounds < 0:
            raise BoundExceeded(f"it takes more than {MAX_ROUNDS:,} rounds of loops and macros")
        _check_time()
        return ""

    def joined(self, *parts: Any) -> Text:
        """Computes the operator ~ with a bound on the length."""
        _check_time()
        return _bounded_concat(parts)

    def made(self, value: Any) -> Any:
        """Returns a list, tuple, mapping, slice or comparison of the template's source after a check of its size."""
        checked = _checked(value)
        _check_time()
        return checked

    def shown(self, value: Any) -> str:
        """Returns a value as it is printed."""
        _check_time()
        text, budget = value if type(value) is Text else str(value), _budget.get()
        budget.printed -= len(text)
        if budget.printed < 0:
            raise BoundExceeded(f"it prints more than {_MAX_PRINTED:,} characters")
        return text

    def added(self, *values: Any) -> Any:
        """Computes values joined by the operator + with its bounds; texts are joined at once."""
        kinds = {*map(type, values)}
        if kinds <= {str, Text}:
            _check_time()
            _check_length(sum(map(len, values)))
            return _EMPTY.join(values)
        return functools.reduce(lambda left, right: self._computed("+", left, right), values)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parses a template, and inserts calls that count loops and macros into its syntax tree."""
        tree = super()._parse(source, name, filename)
        for kind in (nodes.For, nodes.Macro, nodes.CallBlock):
            for node in tree.find_all(kind):
                assert isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock)
                count = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
                node.body.insert(0, nodes.ExprStmt(count).set_lineno(node.lineno))
                if isinstance(node, nodes.For) and node.test is not None:  # counts skipped items as well
                    node.test = nodes.Or(count, node.test).set_lineno(node.lineno)
        _bound_lengths(tree)
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Computes an operator of arithmetic if the result is not too long or too large."""
        return self._computed(operator, left, right)

    def _computed(self, operator: str, left: Any, right: Any) -> Any:
        _check_time()
        if operator == "*":
            for text, times in ((left, right), (right, left)):
                if isinstance(text, str | list | tuple) and isinstance(times, int):
                    _check_length(len(text) * max(0, times), _most(text))
        elif operator == "**":
            _check_number(left)
            if isinstance(right, int | float) and abs(right) > 64:
                raise BoundExceeded("it raises a number to a power above 64")
        elif operator == "%" and isinstance(left, str) and (_LONG_NUMBER.search(left) or "*" in left):
            raise BoundExceeded("it formats to a width above 99,999")
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            _check_length(len(left) + len(right), _most(left))
        left = Text(left) if type(left) is str else left
        right = Text(right) if type(right) is str else right
        return _checked(self.binop_table[operator](left, right))

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: D102 (the base class's)
        _check_time()
        name, subject = getattr(obj, "__name__", ""), getattr(obj, "__self__", None)
        if type(subject) is str:
            subject = Text(subject)
            obj = getattr(subject, name)
        if name == "format_map" and args and isinstance(args[0], dict):
            _before_call(name, subject, [*args[0].values()], {})
        elif isinstance(subject, str | int) or name in ("range", "format"):
            _before_call(name, subject, args, kwargs)
        if name == "join" and isinstance(subject, str) and args:
            items = [*args[0]]
            _check_length(sum(len(str(item)) for item in items) + len(subject) * len(items))
            args = (items, *args[1:])
        result = _checked(super().call(context, obj, *args, **kwargs))
        _check_time()
        # A method of a text makes a new text; a macro or another function of the template has marked its own.
        return made_of(result, subject, *args, *kwargs.values()) if isinstance(subject, str) else result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Wraps str.format so that attributes are hidden, and long numbers, which may be widths, are refused."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text, name = value.__self__, value.__name__
        if _LONG_NUMBER.search(text):
            raise BoundExceeded("it formats to a width above 99,999")
        if isinstance(text, Markup):
            return wrapped

        @functools.wraps(wrapped)
        def call(*args: Any, **kwargs: Any) -> Text:
            if name == "format_map":
                [values], args = args, ()
                kwargs = values
            return Text(text, getattr(text, "_mask", None)).filled(SandboxedFormatter(self), args, kwargs)

        return call

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Raises an error for an attribute that the sandbox hides, instead of returning an undefined value."""
        raise jinja2.exceptions.SecurityError(f"it reads the attribute {attribute!r} of a {type(obj).__name__}")


def _bound_lengths(node: nodes.Node) -> None:
    """Replaces a ~ b, a + b, lists, tuples, mappings, slices and comparisons with calls that check length and time."""
    for field, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            _bound_lengths(value)
            setattr(node, field, _as_call(value))
        elif isinstance(value, list):
            for place, item in enumerate(value):
                if isinstance(item, nodes.Node):
                    _bound_lengths(item)
                    value[place] = _as_call(item)


def _as_call(node: nodes.Node) -> nodes.Node:
    if isinstance(node, nodes.Concat):
        call = nodes.Call(nodes.EnvironmentAttribute("joined"), node.nodes, [], None, None)
    elif isinstance(node, nodes.Add):
        values = [node.left, node.right]
        # The left side has become a call already, if it is a sum.
        if isinstance(node.left, nodes.Call) and node.left.node == nodes.EnvironmentAttribute("added"):
            values[:1] = node.left.args
        call = nodes.Call(nodes.EnvironmentAttribute("added"), values, [], None, None)
    elif (
        isinstance(node, nodes.List | nodes.Dict | nodes.Compare)
        or (isinstance(node, nodes.Tuple) and node.ctx == "load")
        or (isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice))
    ):
        call = nodes.Call(nodes.EnvironmentAttribute("made"), [node], [], None, None)
    else:
        return node
    return call.set_lineno(node.lineno)
