"""The doctor tells the truth about what runs."""

from __future__ import annotations

import torch

from fastformer import doctor
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


def test_all_public_ops_are_listed() -> None:
    from fastformer.ops._library import LIBRARY

    forward = {name.split("::")[1].split(".")[0] for name in LIBRARY._op_defs}
    forward = {name for name in forward if not name.endswith("_bwd")}
    assert forward == {op_name for op_name, _ in doctor.OPS}
