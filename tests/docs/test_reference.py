"""The reference has every flag, setting, public name and environment variable, and nothing that doesn't exist."""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest

from fastformer.checkpoints.gguf.architectures import ARCHITECTURES
from fastformer.checkpoints.gguf.file import first_value
from fastformer.checkpoints.hf import FAMILIES
from fastformer.cli import COMMANDS
from fastformer.commands import _parsing
from fastformer.generation.config import GenerationConfig
from fastformer.training import TrainConfig
from tests.covering import each
from tests.docs.pages import DOCS, ROOT
from tests.frozen.names import PACKAGES, public_names

# `os.environ`, `getenv`, and names of variables that are kept in constants.
_READ = re.compile(
    r"""(?:environ(?:\.get|\.setdefault|\.pop)?[\[(]|getenv\(|^_?[A-Z_]*(?:MODE|KEYS?|VARIABLE) = )"""
    r"""\s*["'](FASTFORMER_\w+)["']""",
    re.MULTILINE,
)  # fmt: skip


@pytest.fixture(scope="module")
def generated() -> ModuleType:
    """Returns the module that makes the pages."""
    sys.path.insert(0, str(DOCS))
    try:
        return importlib.import_module("generated")
    finally:
        sys.path.remove(str(DOCS))


@pytest.fixture(scope="module")
def commands_page(generated: ModuleType) -> str:
    page: str = generated.commands()
    return page


@each("name", [name for name in COMMANDS if name != "doctor"])
def test_every_flag_is_on_the_page(commands_page: str, name: str) -> None:
    section = commands_page[commands_page.index(f"## fastformer {name}\n") :].split("\n## ")[0]
    _, hints = _parsing.make_parser(importlib.import_module(f"fastformer.commands.{name}"), name)
    for flag in hints:
        assert f"`--{flag}`" in section or f"`{flag.upper()}`" in section, flag
    for flag in re.findall(r"`--([\w.]+)`", section):
        assert flag in {*hints, "help"} or "." in flag or name == "train", flag


def test_every_setting_and_option_has_a_description(generated: ModuleType) -> None:
    for page, config in ((generated.settings(), TrainConfig), (generated.decoding_options(), GenerationConfig)):
        rows = {row[0].strip(" `"): row for line in page.splitlines() if (row := line.strip("| ").split(" | "))[0]}
        for field in dataclasses.fields(config):
            if not field.name.startswith("_"):
                assert len(rows[field.name][-1]) > 3, field.name


def test_every_tested_kind_of_sentence_transformers_is_on_the_page(generated: ModuleType) -> None:
    pytest.importorskip("sentence_transformers", reason="not installed: pip install sentence-transformers")
    from tests.integrations.test_sentence_transformers import KINDS

    page = generated.sentence_transformers()
    for name, kind in KINDS.items():
        assert f"| {name} | {'in C++' if kind.engine else 'by its modules'} |" in page
    assert page.count("\n| ") == len(KINDS) + 2


def test_the_table_of_files_has_what_the_registries_and_the_tests_have(generated: ModuleType) -> None:
    from tests.checkpoints.test_llama_cpp import WRITTEN
    from tests.foreign.ctranslate2_folders import CASES as TRANSLATORS
    from tests.foreign.ctranslate2_folders import DECODER_FOLDERS, DECODERS, FOLDERS
    from tests.foreign.gguf_files import CASES, FOLDER

    page = generated.file_formats().split("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if " | `" in line][1:]
    table = {kind.strip("`"): cells for _, kind, *cells in lines}
    assert {*table} == {*FAMILIES}

    def kinds_of(column: int) -> set[str]:
        assert {cells[column] for cells in table.values()} <= {"exact", "–", "refused"}
        return {kind for kind, cells in table.items() if cells[column] == "exact"}

    def kinds_with(names: Iterable[str]) -> set[str]:
        classes = {name.removesuffix("Text") for name in names}
        return {
            kind for kind, family in FAMILIES.items() if re.sub("(Text)?Config$", "", family.config_class) in classes
        }

    assert kinds_of(0) == kinds_of(1) == {*FAMILIES}
    assert kinds_of(2) == kinds_with(kind for kind, *_ in CASES.values()) | {"nomic_bert"}
    files = {path.stem: first_value(path, "general.architecture") for path in FOLDER.glob("*.gguf")}
    assert {*CASES, "nomic"} == {*files} and {*files.values()} == {*ARCHITECTURES}
    assert kinds_of(3) == {ARCHITECTURES[str(files[name])].kind for name in WRITTEN}
    assert kinds_of(3) == {each.kind for each in ARCHITECTURES.values() if each.is_written}
    assert kinds_of(4) == kinds_with(kind for _, kind, *_ in (*TRANSLATORS, *DECODERS))
    for folder, cases in ((FOLDERS, TRANSLATORS), (DECODER_FOLDERS, DECODERS)):
        assert {path.name for path in folder.iterdir()} == {name for name, *_ in cases}


def test_every_route_is_on_the_page(generated: ModuleType) -> None:
    """The routes are those of the apps for a small model of each kind."""
    pytest.importorskip("fastapi", reason='not installed: pip install "fastformer[serve]"')
    page = generated.http()
    for kind, described in generated.http_descriptions().items():
        section = page[page.index(f"## {kind}\n") :].split("\n## ")[0]
        assert len(described["paths"]) > 3
        for path, methods in described["paths"].items():
            for method in methods:
                assert f"`{method.upper()} {path}`" in section


def test_every_public_name_is_on_the_page_of_its_package(generated: ModuleType) -> None:
    pages = generated.python_pages()
    assert pages.keys() == set(PACKAGES)
    for package in PACKAGES:
        for name in public_names(package):
            assert re.search(rf":: {re.escape(package)}\.{name}$", pages[package], re.MULTILINE), f"{package}.{name}"


def test_every_public_name_has_a_docstring() -> None:
    lacking = []
    for package in PACKAGES:
        for name in public_names(package):
            value = getattr(importlib.import_module(package), name)
            if (isinstance(value, type) or callable(value)) and not (getattr(value, "__doc__", None) or "").strip():
                lacking.append(f"{package}.{name}")
    assert not lacking


def test_the_environment_variables_are_those_that_are_read() -> None:
    """Searches all sources for `os.environ`, `getenv` and the like."""
    if not (ROOT / "setup.py").exists():
        pytest.skip("the sources are not here")
    page = (DOCS / "reference" / "environment.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(FASTFORMER_\w+)`", page, re.MULTILINE))
    read = set()
    for folder in ("fastformer", "kernels", "csrc", "benchmarks", "tests"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".cpp", ".h") and path != Path(__file__):
                read |= set(_READ.findall(path.read_text(encoding="utf-8")))
    read |= set(_READ.findall((ROOT / "setup.py").read_text(encoding="utf-8")))
    assert listed == read
