"""The pages of the reference that are made when the site is built: from the parser, the dataclasses and public names.

`write(docs)` puts them into `docs/reference/generated/`, which git ignores. Each function returns one page.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
from collections.abc import Iterable
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, get_type_hints
from unittest.mock import MagicMock

from docstring_parser import parse as parse_docstring

from fastformer.checkpoints.gguf.architectures import ARCHITECTURES
from fastformer.checkpoints.hf import FAMILIES, UNSUPPORTED
from fastformer.cli import COMMANDS
from fastformer.commands import _parsing
from fastformer.generation.config import GenerationConfig
from fastformer.models import BERT, GPT, Transformer
from fastformer.settings import describe_bounds
from fastformer.training.sections import SECTIONS

ROOT = Path(__file__).parents[1]
NAMES = ROOT / "tests" / "frozen" / "public_names.json"
KINDS = ROOT / "tests" / "integrations" / "test_sentence_transformers.py"
FORMATS = ROOT / "tests" / "foreign"
MODELS = {"transformer": Transformer, "gpt": GPT, "bert": BERT}
_MEMBERS_OF_MODULES = {"forward"}  # documented by their class


def commands() -> str:
    """The command line: every command with its arguments and flags."""
    parts = [
        "# Command line\n",
        "This page is made from the parsers, so it is what `fastformer COMMAND --help` prints. Options of the program"
        " itself stand before the command: `--version` prints the version, and `--debug` shows the traceback of an"
        " error. After a success the exit status is 0, after an error 1, after wrong flags 2, and after a signal 128"
        " plus its number (130 for Ctrl-C).\n",
    ]
    for name, summary in COMMANDS.items():
        parts.append(f"## fastformer {name}\n\n{summary}\n")
        if name == "doctor":  # it takes no flags, and has no parser, so that it works where nothing else does
            continue
        parser, _ = _parsing.make_parser(importlib.import_module(f"fastformer.commands.{name}"), name)
        parts.append(f"```text\n{parser.format_usage().removeprefix('usage: ').strip()}\n```\n")
        for group in parser._action_groups:
            rows = [_flag(parser, action) for action in group._group_actions if action.help != argparse.SUPPRESS]
            if not rows:
                continue
            if group.title not in ("positional arguments", "options"):
                parts.append(f"**{_text(group.title)}**\n")
            if group.description:
                parts.append(f"{_text(group.description)}\n")
            parts.append(_table(("argument" if group.title == "positional arguments" else "flag", "meaning"), rows))
    return "\n".join(parts)


def _flag(parser: argparse.ArgumentParser, action: argparse.Action) -> tuple[str, str]:
    formatter = parser._get_formatter()
    spelled = [word for word in action.option_strings if not word.endswith("+")] or [str(action.dest).upper()]
    return ", ".join(f"`{word}`" for word in spelled), _text(formatter._expand_help(action))


def settings() -> str:
    """The settings of training: a table for each section."""
    parts = [
        "# Settings of training\n",
        "Each setting is a field of `TrainConfig`, a flag of `fastformer train` and a key of the"
        " YAML file that `--config` names. A setting of the model, such as `dropout`, is the flag `--model.dropout 0.1`"
        " and the YAML `model: {dropout: 0.1}`. This page is made from the dataclasses.\n",
    ]
    for section in SECTIONS:
        parts.append(f"## {section.__name__}\n\n{_text(_summary(section))}\n")
        parts.append(_fields(section))
    return "\n".join(parts)


def model_settings() -> str:
    """The settings of the models and the presets' names."""
    parts = [
        "# Settings of the models\n",
        "`Transformer.from_preset(name, **settings)` and its like take these; `fastformer train` takes them as"
        " `--model.NAME`, and `fastformer train --model.help gpt` prints them. Special ids and the size of the"
        " vocabulary come from the tokenizer when you train. This page is made from the dataclasses.\n",
    ]
    for name, model in MODELS.items():
        config = get_type_hints(model.__init__)["config"]  # type: ignore[misc]
        parts.append(f"## {name}\n\n{_text(_summary(config))}\n")
        parts.append(_fields(config))
    return "\n".join(parts)


def decoding_options() -> str:
    """The options of decoding: the fields of `GenerationConfig`."""
    return "\n".join(
        [
            "# Options of decoding\n",
            "`fastformer.generate` and `Translator.translate` take these by name, or as a"
            " `GenerationConfig`; the commands take those that are flags, and all of them from"
            " a YAML file. This page is made from the dataclass.\n",
            _fields(GenerationConfig),
        ]
    )


def _fields(config: type[Any]) -> str:
    hints = get_type_hints(config, include_extras=True)
    texts = {
        each.arg_name: each.description or ""
        for owner in reversed(config.__mro__)
        for each in parse_docstring(owner.__doc__ or "").params
    }
    own = [each for each in fields(config) if not each.name.startswith("_")]
    rows = [
        (f"`{each.name}`", _kind(hints[each.name]), _default(each), _text(texts.get(each.name, ""))) for each in own
    ]
    return _table(("name", "value", "default", "meaning"), rows)


def _kind(hint: Any) -> str:
    try:
        return _text(describe_bounds(hint))
    except (TypeError, ValueError, AttributeError, KeyError):
        return _text(inspect.formatannotation(hint))


def _default(each: Field[Any]) -> str:
    if each.default is not MISSING:
        return f"`{each.default!r}`" if not isinstance(each.default, str) else f"`{each.default}`"
    if each.default_factory is not MISSING:
        return f"`{each.default_factory()!r}`"
    return "required"


def http() -> str:
    """The paths of the HTTP server by the kind of model, and the fields of their bodies, from the routes' schemas."""
    parts = [
        "# HTTP\n",
        "`fastformer serve FOLDER` adds the paths that the folder's model can answer; [Serving](../../guide/serving.md)"
        " describes limits and errors. A running server has the same description at `/openapi.json`. This page is made"
        " from the routes.\n",
    ]
    bodies: dict[str, Any] = {}
    for kind, described in http_descriptions().items():
        parts.append(f"## {kind}\n")
        rows = []
        for path, methods in described["paths"].items():
            for method, route in methods.items():
                words = (route.get("description") or route.get("summary") or "").split("\n\n")[0]
                names = _schemas_of(route.get("requestBody", {}))
                body = ", ".join(f"[{name}](#{name.lower()})" for name in names)
                rows.append((f"`{method.upper()} {path}`", body, _text(words)))
        parts.append(_table(("route", "body", "meaning"), rows))
        bodies |= {name: each for name, each in described.get("components", {}).get("schemas", {}).items()}
        wanted = {name for methods in described["paths"].values() for route in methods.values()
                  for name in _schemas_of(route.get("requestBody", {}))}  # fmt: skip
        for name in sorted(wanted):
            bodies[name]["asked"] = True
    parts.append("## Bodies\n")
    for name, schema in sorted(bodies.items()):
        if schema.pop("asked", False) and "properties" in schema:
            required = set(schema.get("required", ()))
            values = [
                (f"`{field}`", _json_kind(each), "required" if field in required else f"`{each.get('default')}`",
                 _text(each.get("description", "")))
                for field, each in schema["properties"].items()
            ]  # fmt: skip
            parts.append(f"### {name}\n")
            parts.append(_table(("field", "type", "default", "meaning"), values))
    return "\n".join(parts)


def http_descriptions() -> dict[str, Any]:
    """Kind of model -> OpenAPI's description of a server of it; no model is loaded."""
    from fastformer.serving import make_app
    from fastformer.serving.encoder_service import EmbedService, RankService
    from fastformer.serving.generate_service import GenerateService
    from fastformer.serving.limits import Limits
    from fastformer.serving.service import Service
    from fastformer.serving.speech_service import SpeechService
    from fastformer.serving.translate_service import TranslateService

    found: dict[str, Any] = {}
    for each in (TranslateService, GenerateService, EmbedService, RankService, SpeechService):
        # Routes are made from the class; whatever a router reads of a loaded model is a stand-in here.
        stand_in = type(each.__name__, (each,), {"__getattr__": lambda self, name: MagicMock()})
        service: Service = object.__new__(stand_in)
        encoder = MagicMock(num_labels=1, precision="fp32", pooling="mean", labels=["0"])
        vars(service).update(name="model", limits=Limits(), codes={}, encoder=encoder)
        found[service.kind] = make_app(service).openapi()
    return found


def _schemas_of(body: dict[str, Any]) -> list[str]:
    """The names of the schemas that a request's body refers to."""
    text = json.dumps(body)
    return list(dict.fromkeys(part.split('"')[0] for part in text.split("#/components/schemas/")[1:]))


def _json_kind(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_json_kind(each) for each in schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return " or ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if schema.get("type") == "array":
        return f"list of {_json_kind(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


def sentence_transformers() -> str:
    """Which models of sentence-transformers are accelerated: those of the tests that compare them with plain ones."""
    tree = ast.parse(KINDS.read_text(encoding="utf-8"))
    (table,) = (
        each.value
        for each in tree.body
        if isinstance(each, ast.Assign) and [ast.unparse(name) for name in each.targets] == ["KINDS"]
    )
    assert isinstance(table, ast.Dict)
    rows: list[tuple[str, ...]] = []
    for key, value in zip(table.keys, table.values, strict=True):
        if key is None:  # a comprehension: one row for each of its names
            assert isinstance(value, ast.DictComp)
            rows += [(f"{name} pooling", "in C++") for name in ast.literal_eval(value.generators[0].iter)]
            continue
        by_modules = isinstance(value, ast.Call) and any(
            word.arg == "engine" and ast.unparse(word.value) == "False" for word in value.keywords
        )
        rows.append((str(ast.literal_eval(key)), "by its modules" if by_modules else "in C++"))
    return (
        "# Models of sentence-transformers\n\nThe tests compare each model of this list, after "
        "`fastformer.accelerate`, with the plain one: numbers within the rule of numerics, types and shapes, in each "
        "form of call. The second "
        "column says how an accelerated model computes padded batches in evaluation.\n\n"
        + _table(("Model, or what it has", "Computed"), rows)
    )


def file_formats() -> str:
    """Which families are read from which files, by the registries and by the tests' files of other programs."""
    in_gguf = _classes(FORMATS / "gguf_files.py", "CASES", 0)
    in_ctranslate2 = {
        name for table in ("CASES", "DECODERS") for name in _classes(FORMATS / "ctranslate2_folders.py", table, 1)
    }
    written = {each.kind for each in ARCHITECTURES.values() if each.is_written}
    architectures = {each.kind for each in ARCHITECTURES.values()}
    rows: list[tuple[str, ...]] = []
    for kind, family in FAMILIES.items():
        name = family.config_class.removesuffix("Config").removesuffix("Text")
        cells = [name in in_gguf or kind in architectures, kind in written, name in in_ctranslate2]
        found = ("exact", "exact", *(("exact" if cell else "–") for cell in cells))
        rows.append((family.name, f"`{kind}`", *found))
    refused = [(f"`{kind}`", reason) for kind, reason in UNSUPPORTED.items()]
    return "\n".join(
        [
            "# Files and families\n",
            "The rows are the families that fastformer knows, and the columns the files that it reads or writes. The "
            "tests run each pair that has a word; `–` is a pair that no test runs, which may load or be refused. A "
            "weight is never read approximately: a file that has something unknown is refused with an error that "
            "names it.\n",
            _table(
                (
                    "Family",
                    "`model_type`",
                    "transformers",
                    "GPTQ, AWQ, compressed-tensors",
                    "GGUF",
                    "written as GGUF",
                    "CTranslate2",
                ),
                sorted(rows, key=lambda row: row[0].lower()),
            ),
            "- **transformers**, exact: outputs in fp32 differ from those of transformers by rounding alone.\n"
            "- **GPTQ, AWQ, compressed-tensors**, exact: the weights are bit for bit those that the format defines, "
            "and outputs those of a model with these weights. Computed in int4 or int8, 4-bit weights keep the file's "
            "integers where their groups allow it, and others are rounded again; the log says by how much.\n"
            "- **GGUF**, exact: dequantised weights equal those of llama.cpp bit for bit, tokens of texts equal "
            "transformers', and outputs in fp32 differ by rounding alone. A file of F16 or BF16 gives, in each "
            "precision, bit for bit the tokens and scores of the folder with its weights. [Supported "
            "models](../../models/index.md) says which kinds of tensors are rounded again.\n"
            "- **written as GGUF**, exact: llama.cpp reads what `fastformer quantize MODEL out.gguf` writes, cuts "
            "texts into the same tokens, and of the same numbers in fp32 it continues texts with the same tokens. Its "
            "probabilities of Q8_0 and Q4_0 differ, since it rounds the inputs of matrices. Weights that were of Q8_0 "
            "before keep their numbers. Others are rounded in blocks of 32, and in int8 once more in rows, each time "
            "by up to 1/254 of the largest weight of the block or row; so the file in int8 may continue a text with "
            "other tokens than its folder in int8, which has the second rounding alone. A model is written as the "
            "first family that computes it, so a Mistral without a window becomes a Llama.\n"
            "- **CTranslate2**, exact: int8 decodes with the integers of the file, and greedy and beam searches find "
            "CTranslate2's tokens, except where two sums are equal up to rounding.\n",
            "Speech is read from folders of transformers and of CTranslate2: see [Speech](../../guide/speech.md). "
            "Packages of Argos Translate are CTranslate2's Transformers: see [Argos](../../guide/argos.md).\n",
            "## Refused\n",
            _table(("`model_type`", "Reason"), refused),
        ]
    )


def _classes(file: Path, name: str, place: int) -> set[str]:
    """Returns the names of transformers' models in a table of tuples, each at the place, without "Text"."""
    for each in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(each, ast.AnnAssign) and ast.unparse(each.target) == name:
            rows: Any = each.value.values if isinstance(each.value, ast.Dict) else getattr(each.value, "elts", ())
            return {str(ast.literal_eval(row.elts[place])).removesuffix("Text") for row in rows}
    raise ValueError(f"expected a table {name} in {file}")


def public_names() -> dict[str, Any]:
    """Package -> name -> what is promised of it; `tests/frozen/` holds the code to this."""
    found: dict[str, Any] = json.loads(NAMES.read_text(encoding="utf-8"))
    return found


def python_pages() -> dict[str, str]:
    """A page for each public package, in reStructuredText, for autodoc."""
    home: dict[int, str] = {}
    pages = {}
    for package, names in public_names().items():
        module = importlib.import_module(package)
        parts = [package, "=" * len(package), "", *_module_text(module), ""]
        for name, promised in names.items():
            value, full = getattr(module, name), f"{package}.{name}"
            if promised == "value" or inspect.ismodule(value):
                parts += [f".. py:data:: {full}", f"   :value: {value!r}"[:90], ""]
                continue
            if id(value) in home:
                parts += [f".. py:data:: {full}", "", f"   See :py:obj:`{home[id(value)]}`.", ""]
                continue
            home[id(value)] = full
            if inspect.isclass(value):
                members = (
                    [each for each in promised if each not in ("()", *_MEMBERS_OF_MODULES)]
                    if isinstance(promised, dict)
                    else []
                )
                own = [each for each in members if getattr(getattr(value, each), "__doc__", None)]
                parts += [f".. autoclass:: {full}", *([f"   :members: {', '.join(own)}"] if own else []), ""]
            else:
                parts += [f".. autofunction:: {full}", ""]
        pages[package] = "\n".join(parts) + "\n"
    return pages


def _module_text(module: Any) -> list[str]:
    return [f".. py:module:: {module.__name__}", "", *(inspect.getdoc(module) or "").splitlines()]


def python_index(packages: Iterable[str]) -> str:
    """The list of the packages."""
    lines = [
        "# Python\n",
        "These packages and names are public: see [what SemVer covers here](../../project/public.md). Every other"
        " module is internal and may change in any release.\n",
        "```{toctree}\n:maxdepth: 1\n",
        *packages,
        "```\n",
    ]
    return "\n".join(lines)


def _summary(config: type[Any]) -> str:
    return (parse_docstring(config.__doc__ or "").short_description or "").strip()


def _text(text: str | None) -> str:
    """Words of a docstring or a help text as they stand in a cell of a Markdown table."""
    words = " ".join((text or "").split())
    for sign in "|<>*_[]$":
        words = "`".join(
            part.replace(sign, f"\\{sign}") if i % 2 == 0 else part for i, part in enumerate(words.split("`"))
        )
    return "`".join(part if i % 2 == 0 else part.replace("|", "\\|") for i, part in enumerate(words.split("`")))


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def pages() -> dict[str, str]:
    """File name -> text."""
    python = python_pages()
    return {
        "commands.md": commands(),
        "settings.md": settings(),
        "model-settings.md": model_settings(),
        "decoding-options.md": decoding_options(),
        "http.md": http(),
        "file-formats.md": file_formats(),
        "sentence-transformers.md": sentence_transformers(),
        "python.md": python_index(python),
        **{f"{package}.rst": text for package, text in python.items()},
    }


def write(docs: Path) -> None:
    """Writes all pages; a file that is as it should be keeps its time, so that Sphinx leaves it alone."""
    folder = docs / "reference" / "generated"
    folder.mkdir(parents=True, exist_ok=True)
    made = pages()
    for path in folder.iterdir():
        if path.name not in made:
            path.unlink()
    for name, text in made.items():
        path = folder / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
