"""Tests SequenceLayout: lengths, positions, packing."""

from __future__ import annotations

import pytest
import torch

from fastformer.nn import SequenceLayout


def test_packed():
    layout = SequenceLayout.packed(torch.tensor([3, 1, 0, 2]), 3)
    assert layout.is_packed and layout.batch_size == 4
    assert layout.cu_seqlens.tolist() == [0, 3, 4, 4, 6] and layout.cu_seqlens.dtype == torch.int32
    assert layout.seqlens.dtype == torch.int32
    assert layout.positions.tolist() == [0, 1, 2, 0, 0, 1]


def test_packed_with_a_fixed_total():
    layout = SequenceLayout.packed(torch.tensor([3, 2]), 3, total=8)
    assert layout.positions[:5].tolist() == [0, 1, 2, 0, 1] and layout.positions.shape == (8,)
    # What lies behind stays inside any position table.
    assert layout.positions[5:].max() < 3
    x = torch.randn(8, 2)
    padded = layout.unpack(x)
    assert torch.equal(padded[0], x[:3]) and torch.equal(padded[1, :2], x[3:5]) and (padded[1, 2] == 0).all()
    assert torch.equal(layout.pack(padded)[:5], x[:5])


def test_pack_and_unpack_are_inverse_with_gradients():
    layout = SequenceLayout.packed(torch.tensor([2, 4, 1]), 5)
    x = torch.randn(7, 3, requires_grad=True)
    padded = layout.unpack(x)
    assert padded.shape == (3, 5, 3)
    assert torch.equal(padded[0, :2], x[:2]) and torch.equal(padded[1, :4], x[2:6]) and torch.equal(padded[2, 0], x[6])
    assert padded.abs().sum(-1).ne(0).sum(1).tolist() == [2, 4, 1]
    assert torch.equal(layout.pack(padded), x)
    dy = torch.randn_like(padded)
    (grad,) = torch.autograd.grad(padded, x, dy)
    assert torch.equal(grad, layout.pack(dy))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8])
def test_from_mask(dtype):
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]]).to(dtype)
    layout = SequenceLayout.from_mask(mask)
    assert layout.seqlens.tolist() == [2, 1, 3, 0] and layout.max_seqlen == 3 and not layout.is_packed
    assert SequenceLayout.from_mask(mask[:, :0]).max_seqlen == 0


@pytest.mark.parametrize(
    "mask",
    [
        torch.tensor([[1, 1], [0, 1]]),  # padding on the left
        torch.tensor([[1, 0, 1]]),  # a hole
        torch.tensor([[0, -1]]),
        torch.tensor([[2, 1]]),
        torch.ones(1, 2),
        torch.ones(3, dtype=torch.bool),
        [[True]],
    ],
)
def test_from_mask_accepts_only_padding_on_the_right(mask):
    with pytest.raises(ValueError, match="mask"):
        SequenceLayout.from_mask(mask)


def test_padded_and_from_ids():
    layout = SequenceLayout.from_ids(torch.tensor([[5, 6, 0], [7, 0, 0], [0, 0, 0]]))
    assert layout.seqlens.tolist() == [2, 1, 0] and layout.max_seqlen == 3
    assert not layout.is_packed and layout.positions is None
    assert SequenceLayout.from_ids(torch.tensor([[9, 4, 4]]), pad_id=4).seqlens.tolist() == [1]


def test_to_keeps_everything():
    layout = SequenceLayout.packed(torch.tensor([2, 1]), 2).to("cpu")
    assert layout.positions.tolist() == [0, 1, 0] and layout.max_seqlen == 2
    assert SequenceLayout.padded(torch.tensor([2, 1]), 2).to("meta").seqlens.is_meta
    for build in (SequenceLayout.padded, SequenceLayout.packed):
        moved = build(torch.tensor([2, 1]), 2).to("meta").to("meta")
        assert moved.read_seqlens().tolist() == [2, 1]  # without asking the device


def test_errors():
    with pytest.raises(ValueError, match=r"\bseqlens\b"):
        SequenceLayout.padded(torch.ones(2), 3)
    with pytest.raises(ValueError, match=r"\blayout\b"):
        SequenceLayout.padded(torch.tensor([1]), 3).pack(torch.zeros(1, 3))
    with pytest.raises(ValueError, match=r"\blayout\b"):
        SequenceLayout.packed(torch.tensor([3]), 3).unpack(torch.zeros(4))
