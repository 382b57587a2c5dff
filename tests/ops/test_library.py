"""The dispatcher: which backend runs, what a refusal does, and that autocast stays out of a reference."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from fastformer.ops import _library, use_backend
from fastformer.ops._library import define_op


def toy_reference(x: Tensor) -> Tensor:
    return x @ x


toy = define_op(
    "toy(Tensor x) -> Tensor",
    toy_reference,
    stem="toy",
    fake=lambda x: torch.empty_like(x),
    cpp_unsupported=lambda name, x: "only squares of two" if x.shape[0] != 2 else None,
)


@pytest.fixture
def cpp_toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A C++ function that can be told from the reference: it gives zeros."""
    monkeypatch.setattr(_library, "cpp_kernel", lambda name: torch.zeros_like if name == "toy" else None)
    monkeypatch.setattr(_library, "_told", set())


def test_reference_where_there_is_no_kernel() -> None:
    x = torch.randn(2, 2)
    assert torch.equal(toy(x), x @ x)


def test_cpp_on_a_cpu_and_the_override(cpp_toy: None) -> None:
    x = torch.randn(2, 2)
    assert torch.equal(toy(x), torch.zeros(2, 2))
    with use_backend("reference"):
        assert torch.equal(toy(x), x @ x)
        with use_backend(None):
            assert torch.equal(toy(x), torch.zeros(2, 2))
        assert torch.equal(toy(x), x @ x)
    assert torch.equal(toy(x), torch.zeros(2, 2))


def test_a_refusal_is_logged_once_and_strict_forbids_it(
    cpp_toy: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(3, 3)
    with pytest.raises(NotImplementedError, match="fastformer::toy can't run on cpp: only squares of two"):
        toy(x)
    monkeypatch.setenv("FASTFORMER_STRICT", "0")
    with caplog.at_level(logging.WARNING, "fastformer"):
        for _ in range(2):
            assert torch.equal(toy(x), x @ x)
    assert [record.message for record in caplog.records] == [
        "toy runs on the reference, not on cpp: only squares of two"
    ]
    with use_backend("cpp"), pytest.raises(NotImplementedError, match="only squares of two"):
        toy(x)


def test_a_forced_backend_that_is_missing_is_an_error() -> None:
    with use_backend("triton"), pytest.raises(NotImplementedError, match="can't run on triton: there is no Triton"):
        toy(torch.randn(2, 2))
    with use_backend("cpp"), pytest.raises(NotImplementedError, match=r"can't run on cpp: the C\+\+ extension"):
        toy(torch.randn(2, 2))


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match="backend out of .*'reference'.*got 'cuda'"), use_backend("cuda"):
        pass


def test_autocast_stays_out_of_a_reference() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert toy(torch.randn(2, 2)).dtype == torch.float32


def test_every_public_op_has_an_autocast_rule() -> None:
    x = torch.randn(2, dtype=torch.float64)
    for name, rule in _library.AUTOCAST.items():
        with torch.autocast("cpu", torch.bfloat16):
            wide, single, integer, none = _library.autocast(name, x, x.float(), x.long(), None)
        assert wide is not None and single is not None and integer is not None and none is None
        assert wide.dtype == torch.float64 and integer.dtype == torch.int64
        assert single.dtype == (torch.bfloat16 if rule == "cast" else torch.float32)
