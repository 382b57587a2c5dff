"""The C++ functions have the arguments and results of the ops of the same names, by position."""

from __future__ import annotations

import re

import pytest
import torch

import fastformer.ops  # noqa: F401 (defines the ops)
from fastformer.ops import _extension
from tests.covering import each

if _extension.load() is None:
    pytest.skip("the C++ extension is not built", allow_module_level=True)


def _schemas(namespace: str) -> dict[str, torch.FunctionSchema]:
    names = {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith(f"{namespace}::")}
    return {
        name.partition("::")[2]: getattr(getattr(torch.ops, namespace), name.partition("::")[2]).default._schema
        for name in names
    }


def _described(schema: torch.FunctionSchema, left_out: set[str]) -> tuple[list[tuple[str, bool]], list[str]]:
    """Returns (type, whether it is written) of each argument that isn't left out, and the types of the results."""
    # A symbolic size is an integer by the time that a kernel runs.
    arguments = [
        (str(argument.real_type).replace("SymInt", "int"), bool(argument.alias_info and argument.alias_info.is_write))
        for argument in schema.arguments
        if argument.name not in left_out
    ]
    return arguments, [str(result.real_type) for result in schema.returns]


# What an op does not hand on to its C++ function (see `cpp_call` of `define_op`).
LEFT_OUT = {
    "linear_cross_entropy_bwd": {"output_mask"},
    "linear_cross_entropy_fwd_bwd": {"output_mask"},
    "decode_attention": {"cos", "sin", "interleaved"},
}
# Made of several ops; a stack's plan calls it by itself.
WITHOUT_OP = {"encoder_stack"}
CPP = _schemas("fastformer_cpp")
PYTHON = _schemas("fastformer")


@each("name", sorted(CPP.keys() - WITHOUT_OP))
def test_equals_the_op(name: str) -> None:
    assert name in PYTHON, f"torch.ops.fastformer has no {name}"
    left_out = LEFT_OUT.get(name, set())
    assert left_out <= {argument.name for argument in PYTHON[name].arguments}
    assert _described(CPP[name], set()) == _described(PYTHON[name], left_out)


def test_every_op_with_sources_exists() -> None:
    """A function that is not registered would be a silent fallback."""
    from pathlib import Path

    sources = Path(__file__).parents[2] / "csrc" / "ops"
    if not sources.is_dir():
        pytest.skip("the sources are not here")
    defined = set()
    for path in sources.glob("*.cpp"):
        text = path.read_text()
        defined |= set(re.findall(r"(?m)^FASTFORMER_OP\((\w+)\)", text))
    assert defined == set(CPP)
