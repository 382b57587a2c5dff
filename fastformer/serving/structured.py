"""The fields of requests that constrain an answer, as OpenAI, vLLM, SGLang, llama.cpp and TGI name them."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from fastformer.generation.config import GenerationConfig
from fastformer.generation.constraints import Grammar, is_installed
from fastformer.serving.generate_service import GenerateService
from fastformer.serving.openai_bodies import ApiError

MOST_CHARS = 100_000  # of a constraint: a larger grammar takes seconds to compile

# The option of decoding that each field sets.
_OPTIONS = {
    "guided_json": "schema", "json_schema": "schema", "guided_regex": "regex", "regex": "regex",
    "guided_choice": "choices", "guided_grammar": "grammar", "grammar": "grammar", "ebnf": "grammar",
}  # fmt: skip
_PARTS = {"json": "schema", "regex": "regex", "choice": "choices", "grammar": "grammar"}  # of vLLM's structured_outputs
_ANY_JSON = {"type": "object"}


class ConstraintTooLarge(ValueError):
    """A constraint has more characters than the server compiles."""


class Constrained(NamedTuple):
    """The constraint of a request.

    Attributes:
        param: the field of the request.
        options: the option of decoding.
        grammar: the compiled constraint, which is kept until the requests are made.
    """

    param: str
    options: dict[str, Any]
    grammar: Grammar | None = None


async def check_constraint(given: Mapping[str, Any], service: GenerateService, deadline: float) -> Constrained | None:
    """Returns the constraint of a request, which has been compiled; None: its answers are free.

    Args:
        given: see `StructuredBody.constraints`.
        service: compiles it.
        deadline: a result of `Service.deadline`.

    Raises:
        ApiError: a field has another form than its server's, two fields constrain the answer, or the constraint is
            wrong or can't be enforced.
    """
    found = []
    for name, value in given.items():
        if name == "response_format":
            options = of_response_format(value)
        elif name == "structured_outputs":
            options = _of_structured_outputs(value)
        else:
            options = {_OPTIONS[name]: value}
        if options:
            found.append(Constrained(name, options))
    if len(found) > 1:
        raise ApiError(f"expected {found[0].param} or {found[1].param}, got both", param=found[1].param)
    try:
        return await compiled(found[0], service, deadline) if found else None
    except ValueError as error:
        raise ApiError(str(error), param=found[0].param) from error


async def compiled(constrained: Constrained, service: GenerateService, deadline: float) -> Constrained:
    """Compiles a constraint, which requests have at once as long as the caller keeps the result.

    Raises:
        ConstraintTooLarge: the constraint has too many characters.
        ValueError: the constraint is empty or wrong, or can't be enforced.
        RuntimeError: the library that enforces it can't be imported.
        QueueFull, TooLate: see `Session.aside`.
    """
    try:
        constraint = GenerationConfig.from_options(constrained.options).constraint
    except RecursionError as error:
        raise ValueError(f"expected {constrained.param} of fewer levels") from error
    if constraint is None:
        raise ValueError(f"expected {constrained.param} that isn't empty")
    if (size := len(constraint.text)) > MOST_CHARS:
        raise ConstraintTooLarge(f"expected {constrained.param} of at most {MOST_CHARS:,} characters, got {size:,}")
    work = functools.partial(service.session.check_constraint, constrained.options)
    try:
        grammar = await service.session.aside(work, size, deadline=deadline, is_slow=True)
    except ImportError as error:
        if is_installed():  # no fault of the request
            raise RuntimeError(str(error)) from error
        raise ValueError(f"expected an answer without constraints here: {error}") from error
    return constrained._replace(grammar=grammar)


def of_response_format(value: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the option of decoding for OpenAI's response_format.

    Raises:
        ApiError: a type that isn't known, or without its schema.
    """
    kind, param = value.get("type"), "response_format"
    if kind == "text":
        return {}
    if kind == "json_object":
        schema = value.get("schema", _ANY_JSON)  # llama.cpp's clients send one along
    elif kind == "json_schema":
        given = value.get("json_schema")
        if not isinstance(given, dict) or not isinstance(given.get("schema", _ANY_JSON), dict):
            raise ApiError("expected json_schema with a schema, an object", param=param)
        schema = given.get("schema", _ANY_JSON)
    else:
        names = "'text', 'json_object' or 'json_schema'"
        raise ApiError(f"expected response_format of type {names}, got {kind!r:.40}", param=param)
    return {"schema": schema}


def _of_structured_outputs(value: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: one for name, one in value.items() if one is not None and one is not False}
    if given == {"json_object": True}:
        return {"schema": _ANY_JSON}
    if len(given) != 1 or not given.keys() <= _PARTS.keys():
        raise ApiError(
            f"expected one of {', '.join(_PARTS)} and json_object, got {sorted(given)}", param="structured_outputs"
        )
    [(name, one)] = given.items()
    return {_PARTS[name]: one}


def of_tgi(grammar: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the option of decoding for TGI's grammar: a type, and a value.

    Raises:
        ValueError: another form.
    """
    kind, value = grammar.get("type"), grammar.get("value")
    if kind == "regex" and isinstance(value, str):
        return {"regex": value}
    if kind in ("json", "json_schema") and isinstance(value, dict | str):
        is_named = kind == "json_schema" and isinstance(value, dict) and isinstance(value.get("schema"), dict)
        return {"schema": value["schema"] if is_named and isinstance(value, dict) else value}
    shown = json.dumps(grammar, default=str)
    raise ValueError(f"expected a grammar of type 'json', 'regex' or 'json_schema' with a value, got {shown:.80}")
