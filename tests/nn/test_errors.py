"""torch.nn's modules and fastformer's refuse the same calls; fastformer's error stands for all of torch's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastformer.nn as fast
from fastformer.nn.errors import InputError

BATCH, SEQLEN, MEMORY, DIM, HEADS = 2, 3, 4, 8, 2


@pytest.fixture(params=[nn, fast], ids=["torch", "fastformer"])
def library(request: pytest.FixtureRequest) -> Any:
    return request.param


def refused(call: Callable[[], Any], library: Any, message: str | None = None) -> None:
    with pytest.raises(InputError if library is fast else (AssertionError, RuntimeError, ValueError), match=message):
        call()


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


@pytest.mark.parametrize("expected", [ValueError, RuntimeError, AssertionError])
def test_one_error_for_all(expected: type[Exception]) -> None:
    with pytest.raises(expected, match=r"\bvalue\b"):
        fast.MultiheadAttention(DIM, HEADS)(torch.randn(3, 2, DIM), torch.randn(3, DIM), torch.randn(3, 2, DIM))


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("dims", [2, 3])
def test_dimensions_of_an_attention(library: Any, dims: int, need_weights: bool) -> None:
    """The words are torch.nn's, because other code matches them."""
    other = 5 - dims
    right, wrong = (torch.randn(*(4, 4, 4)[: d - 1], 4) for d in (dims, other))
    attention = library.MultiheadAttention(4, 4).eval()

    def check(message: str, key: Tensor = right, value: Tensor = right, **masks: Tensor) -> None:
        refused(lambda: attention(right, key, value, need_weights=need_weights, **masks), library, message)

    wanted = f"expected `key` and `value` to be {dims}-D but found"
    check(f"{wanted} {other}-D and {dims}-D tensors respectively", key=wrong)
    check(f"{wanted} {dims}-D and {other}-D tensors respectively", value=wrong)
    padding = ones(4) if dims == 3 else ones(4, 4)
    found = f"expected `key_padding_mask` to be `None` or {dims - 1}-D but found {padding.dim()}-D tensor instead"
    check(found, key_padding_mask=padding)
    check("expected `attn_mask` to be `None`, 2-D or 3-D but found 1-D tensor instead", attn_mask=ones(4))
    if dims == 2:
        check(r"Expected `attn_mask` shape to be \(4, 4, 4\) but got .*5, 4, 4", attn_mask=ones(5, 4, 4))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("norm_first", [False, True])
def test_shapes_of_a_transformer(library: Any, norm_first: bool) -> None:
    options: dict[str, Any] = {"num_encoder_layers": 1, "num_decoder_layers": 1, "dim_feedforward": 8}
    model = library.Transformer(DIM, HEADS, **options, norm_first=norm_first).eval()
    source, target = torch.randn(MEMORY, BATCH, DIM), torch.randn(SEQLEN, BATCH, DIM)
    assert model(source, target).shape == target.shape
    for wrong, named in (
        ((source[:, :1], target), "batch"),
        ((source[..., :-1], target), "d_model"),
        ((source, target[..., :-1]), "d_model"),
        ((source[..., :-1], target[..., :-1]), "d_model"),
    ):
        refused(partial(model, *wrong), library, rf"\b{named}\b" if library is fast else None)
    masks = {
        "src_mask": ones(MEMORY + 1, MEMORY + 1),
        "tgt_mask": ones(SEQLEN + 1, SEQLEN + 1),
        "memory_mask": ones(SEQLEN, MEMORY + 1),
        "src_key_padding_mask": ones(BATCH, MEMORY + 1),
        "tgt_key_padding_mask": ones(BATCH + 1, SEQLEN),
        "memory_key_padding_mask": ones(BATCH, MEMORY - 1),
    }
    for name, mask in masks.items():  # triangles, of which those of a square would be causal
        refused(partial(model, source, target, **{name: mask.triu(1)}), library)
    for of, size in (("src", MEMORY), ("tgt", SEQLEN)):  # beside padding the mask is read, whatever it is said to be
        padding = {f"{of}_key_padding_mask": torch.zeros(BATCH, size, dtype=torch.bool), f"{of}_is_causal": True}
        refused(partial(model, source, target, **{f"{of}_mask": ones(size - 1, size - 1).triu(1)}, **padding), library)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("name", ["TransformerEncoderLayer", "TransformerDecoderLayer"])
def test_a_layer_of_another_size(library: Any, name: str, norm_first: bool) -> None:
    layer = getattr(library, name)(DIM, HEADS, 8, norm_first=norm_first)
    inputs = [torch.randn(SEQLEN, BATCH, DIM - 1)] * (1 + (name == "TransformerDecoderLayer"))
    refused(lambda: layer(*inputs), library)
    refused(lambda: getattr(library, name)(DIM, HEADS, 8, activation="tanh"), library, "activation")


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_an_integer_is_not_a_padding_mask(library: Any, training: bool, dtype: torch.dtype) -> None:
    layer = library.TransformerEncoderLayer(DIM, HEADS, 8, batch_first=True)
    encoder = library.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    x = torch.randn(1, 4, DIM)
    for mask in (torch.tensor([[0, 0, 1, 1]]), torch.tensor([[0, 0, 0, 0]])):
        refused(partial(encoder, x, src_key_padding_mask=mask.to(dtype)), library)
