"""The doctor reports what really runs, and works in a bare installation."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from fastformer import doctor
from fastformer.ops import _dispatch, _extension
from tests.ops.calls import BY_NAME

# The packages of the extras; a bare `pip install` has none of them.
ADDED = ("jsonargparse", "docstring_parser", "yaml", "numpy", "tokenizers", "safetensors", "sacrebleu", "tqdm")
HIDE = f"import sys; sys.modules.update(dict.fromkeys({(*ADDED, 'matplotlib', 'tensorboard')!r}))\n"


def calls() -> dict[str, Callable[[], object]]:
    """Returns a call of each op without dropout, by its name in the report."""
    changes: dict[str, dict[str, Any]] = {
        "varlen_attention": {"dropout_p": 0.0},
        "linear": {"x": torch.randn(64, 256), "weight": torch.randn(256, 256), "bias": None},  # smaller ones: PyTorch's
    }
    return {name: partial(call, 5, **changes.get(name, {})) for name, call in BY_NAME.items() if "," not in name}


def table(device_type: str) -> dict[str, str]:
    """Returns the backend of each op, as the report shows it."""
    _, _, text = doctor.report().partition(f"backends on {device_type}\n")
    return dict(re.findall(r"^  (\w+) +(\w+) ", text.partition("\n\n")[0], re.MULTILINE))


def assert_ops_run_where(shown: dict[str, str]) -> None:
    assert shown.keys() == calls().keys()
    for name, call in calls().items():
        with _dispatch.record_backends() as ran:
            call()
        assert {backend for op, backend in ran if op.removesuffix("_fwd") == name} == {shown[name]}, name


def test_every_op_runs_where_the_report_says() -> None:
    assert_ops_run_where(table("cpu"))


def test_without_the_extension_the_fallback_is_reported_with_its_reason(no_extension) -> None:
    shown = table("cpu")
    assert {name for name in shown if shown[name] == "torch"} == {"attention", "linear", "varlen_attention"}
    assert {*shown.values()} == {"torch", "reference"}
    assert_ops_run_where(shown)
    assert "the C++ extension is not built" in doctor.report()


@pytest.mark.parametrize(("system", "cpu"), [("Linux", "aarch64"), ("Darwin", "arm64"), ("Windows", "AMD64")])
def test_a_machine_that_no_compiler_helps_is_told_so(no_extension, monkeypatch, system, cpu) -> None:
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.machine", lambda: cpu)
    (line,) = [line for line in doctor.machine() if line.startswith("C++ extension")]
    assert line.startswith("C++ extension: none") and system in line and cpu in line and "compiler" not in line


def test_the_doctor_describes_the_decoding_engine_or_why_it_is_missing(monkeypatch) -> None:
    module = types.SimpleNamespace(cpu_features=lambda: ["avx512_vnni", "amx_int8"], Session=object)
    monkeypatch.setattr(_extension, "load", lambda: "avx512")
    monkeypatch.setattr(_extension, "module", lambda: module)
    (line,) = [line for line in doctor.report().splitlines() if "engine 'cpp'" in line]
    assert all(word in line for word in ("fp32", "bf16", "int8", "int4", "avx512", "avx512_vnni", "amx_int8"))
    del module.cpu_features
    assert "int8" in next(doctor.decoding()) and "amx" not in next(doctor.decoding())
    del module.Session
    older = next(doctor.decoding())
    monkeypatch.setattr(_extension, "module", lambda: None)
    missing, other, *_ = doctor.decoding()
    assert "engine 'kv_cache'" in other and older != missing
    assert all("engine 'cpp'" in line and "int8" not in line for line in (older, missing))


def test_the_doctor_reports_the_size_of_a_packed_copy(monkeypatch) -> None:
    monkeypatch.setattr(_extension, "why_missing", lambda name: None)
    text = " ".join(doctor.encoding())
    numbers = 12 * 7_077_888  # in the matrices of a BERT-base's layers
    for precision, size in (("fp32", 4), ("bf16", 2), ("int8", 1)):
        (megabytes,) = re.findall(rf"(\d+) MB in {precision}", text)
        assert abs(int(megabytes) * 1e6 - numbers * size) < 1e6
    assert "encode=False" in text


def test_versions_are_those_that_are_installed() -> None:
    lines = list(doctor.versions())
    assert f"torch {importlib.metadata.version('torch')}" in lines
    for package in doctor.PACKAGES:
        try:
            assert f"{package} {importlib.metadata.version(package)}" in lines
        except importlib.metadata.PackageNotFoundError:
            assert f"{package} is not installed" in lines


def test_a_bare_installation_is_enough(tmp_path) -> None:
    """The doctor's report is complete; the other commands say in one line what to install."""
    code = HIDE + (
        "from fastformer.cli import main\n"
        "assert main(['doctor']) == 0\n"
        "for words in (['train', 'r'], ['translate', 'r', 'x'], ['generate', 'r', 'x'], ['average', 'r'], ['demo'],\n"
        "              ['serve', 'r'], ['prepare', 'r'], ['chat', 'r']):\n"
        "    assert main(words) == 1, words\n"
    )
    proc = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert proc.returncode == 0, proc.stderr
    assert "backends on cpu" in proc.stdout and "linear_cross_entropy" in proc.stdout
    lines = proc.stderr.splitlines()
    extras = [*5 * ["train"], "serve", "train,parquet", "train,chat"]
    assert all(f"pip install 'fastformer[{extra}]'" in line for extra, line in zip(extras, lines, strict=True)), lines
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_need_and_load_nothing(flag) -> None:
    code = (
        "import sys; from fastformer.cli import main\n"
        f"try: main(['{flag}'])\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'fastformer.training', 'fastformer.commands.train'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    proc = subprocess.run([sys.executable, "-c", HIDE + code], capture_output=True, text=True)
    assert proc.returncode == 0, proc.stderr
    assert "fastformer" in proc.stdout
