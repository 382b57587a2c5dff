"""If a C++ extension does not load, there is a warning and less speed, but the import works."""

from __future__ import annotations

import importlib.machinery
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fastformer
from fastformer import doctor, extension
from fastformer.ops import _extension
from fastformer.ops._oldest_torch import check


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Returns an empty folder in which modules are searched, instead of the package's."""
    monkeypatch.setattr(fastformer, "__path__", [str(tmp_path)])
    # An editable install finds the package's modules whatever its path says; loading them twice ends the process.
    finders = [importlib.machinery.BuiltinImporter, importlib.machinery.FrozenImporter, importlib.machinery.PathFinder]
    monkeypatch.setattr(sys, "meta_path", finders)
    monkeypatch.setattr(extension, "failures", {})
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    for name in _libraries():
        monkeypatch.delitem(sys.modules, name)
    cached = [value for one in (_extension, extension) for value in vars(one).values() if hasattr(value, "cache_clear")]
    for function in cached:
        function.cache_clear()
    yield tmp_path
    for name in _libraries():  # those of the folder, which later tests in this process would be given
        sys.modules.pop(name)
    for function in cached:
        function.cache_clear()


def _libraries() -> list[str]:
    return [name for name in sys.modules if name.startswith(("fastformer._engine_", "fastformer._host_"))]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the names of the libraries that a test loads, instead of loading them; nonempty ones succeed."""
    names: list[str] = []

    def load_library(path: str) -> None:
        if not Path(path).read_bytes():
            raise OSError(f"{path}: file too short")
        names.append(Path(path).name)

    monkeypatch.setattr(torch.ops, "load_library", load_library)
    return names


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    with caplog.at_level(logging.WARNING, "fastformer"):
        assert _extension.load() is None and _extension.load() is None
    return [record.getMessage() for record in caplog.records]


def test_no_extension_exists(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (warning,) = _warnings(caplog)
    assert warning.startswith("no C++ extension for this CPU (AVX512)")


def test_an_automatic_precision_gives_no_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fastformer"):
        assert _extension.host_function("geometry") is None
    assert not caplog.records
    assert len(_warnings(caplog)) == 1


def test_an_older_library_lacks_a_function(folder: Path, loaded: list[str]) -> None:
    (folder / "_ops_avx512.so").write_bytes(b"a library")
    assert _extension.host_function("geometry") is None and _extension.load() == "avx512"
    assert _extension.function("an op that no library has") is None


def test_a_library_that_does_not_load_is_skipped(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "_ops_avx512.so").write_bytes(b"no library")
    broken, none = _warnings(caplog)
    assert broken.startswith("fastformer._ops_avx512 does not load") and "_ops_avx512" in broken.partition(": ")[2]
    assert none.startswith("no C++ extension for this CPU (AVX512)")
    assert any("avx512 does not load" in line for line in doctor.machine())


def test_the_next_best_is_chosen(folder: Path, loaded: list[str], caplog: pytest.LogCaptureFixture) -> None:
    (folder / "_ops_avx512.so").write_bytes(b"")
    (folder / "_ops_avx2.so").write_bytes(b"a library")
    with caplog.at_level(logging.WARNING, "fastformer"):
        assert _extension.load() == "avx2"
    assert loaded == ["_ops_avx2.so"]
    assert [record.getMessage().partition(" does")[0] for record in caplog.records] == ["fastformer._ops_avx512"]
    assert set(extension.failures) == {"_ops_avx512"}


def test_a_case_that_is_too_much_for_the_cpu_is_skipped(folder, loaded, monkeypatch) -> None:
    for isa in ("avx512", "avx2"):
        (folder / f"_ops_{isa}.so").write_bytes(b"a library")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert _extension.load() == "avx2"
    assert loaded == ["_ops_avx2.so"] and not extension.failures


def test_the_engine_loads_without_the_ops(folder: Path) -> None:
    (folder / "_engine_avx512.py").write_text("class Session: ...\ndef memory_digest(): ...\n")
    assert _extension.load() is None
    assert _extension.why_missing("Session") is None and _extension.host_function("memory_digest") is not None
    assert _extension.why_missing("Encoder") is not None


def test_the_library_that_reads_pytorchs_objects_is_for_one_pytorch(folder, monkeypatch) -> None:
    (folder / "_host_torch2_99.py").write_text("geometry = print\n")
    assert _extension.host_function("geometry") is None
    extension.host.cache_clear()
    _extension.host_function.cache_clear()
    monkeypatch.setattr(torch, "__version__", "2.99.1+cpu")
    assert _extension.host_function("geometry") is print


# A PyTorch that is too old is refused by its version, not by the first name that it lacks.


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.11.0a0+git12ab", "3.0", "unknown"])
def test_a_version_that_is_new_enough_or_unknown_is_accepted(version: str) -> None:
    check(version)


@pytest.mark.parametrize("version", ["2.10.0+cu128", "2.9.1", "1.13.1"])
def test_an_older_version_is_refused_by_its_number(version: str) -> None:
    with pytest.raises(ImportError) as refused:
        check(version)
    assert version in str(refused.value) and "2.11" in str(refused.value)
