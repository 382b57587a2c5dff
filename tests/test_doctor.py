"""The doctor tells the truth about what runs."""

from __future__ import annotations

from pathlib import Path

import torch

from fastformer import doctor, ops
from fastformer.ops import _extension


def test_report_names_every_op_and_its_backend() -> None:
    text = doctor.report()
    for op_name, stem in doctor.OPS:
        assert hasattr(torch.ops.fastformer, op_name), f"doctor lists {op_name}, which does not exist"
        backend, why = doctor.choice(op_name, stem, "cpu")
        assert f"{op_name.removesuffix('_fwd'):<22} {backend:<10} {why}" in text


def test_choice_follows_the_extension(monkeypatch) -> None:
    monkeypatch.setattr(_extension, "load", lambda: None)
    assert doctor.choice("attention_fwd", "attention", "cpu") == ("reference", "the C++ extension is not there")


def test_every_op_file_is_listed() -> None:
    files = {path.stem for path in Path(ops.__file__).parent.glob("[!_]*.py")}
    assert {op_name.removesuffix("_fwd") for op_name, _ in doctor.OPS} == files
