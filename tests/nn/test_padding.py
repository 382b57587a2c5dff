"""By padding="skip", stacks skip the padding that a mask names: torch.nn's results at real tokens, zeros elsewhere."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastformer.nn.layout import read_padding
from fastformer.ops import record_backends
from tests.covering import covering
from tests.nn.comparing import E, assert_same, banded, compare, padding_mask, pair

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:.*nested tensors is in prototype")

N, L, S = 4, 6, 5
DOUBLE = {"dtype": torch.float64}
both_orders = pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
both_layouts = pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "seqlen first"])

RIGHT = padding_mask([6, 3, 1, 4], L)
LEFT = RIGHT.flip(1)
HOLES = torch.tensor([[0, 1, 0, 0, 1, 0], [1, 0, 0, 1, 0, 1], [0, 0, 0, 0, 0, 0], [1, 1, 1, 0, 1, 1]]).bool()
EMPTY = padding_mask([6, 0, 2, 4], L)
MASKS = {
    "right": RIGHT,
    "left": LEFT,
    "holes": HOLES,
    "floating": torch.zeros(N, L, **DOUBLE).masked_fill(LEFT, float("-inf")),
    "none": torch.zeros(N, L, dtype=torch.bool),
}
MEMORY = padding_mask([5, 2, 4, 1], S).flip(1)


def as_bool(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask < 0


def tensor(seqlen: int, batch_first: bool) -> Tensor:
    return torch.randn(*((N, seqlen) if batch_first else (seqlen, N)), E, **DOUBLE)


def by_position(mask: Tensor, batch_first: bool) -> Tensor:
    """Returns a mask, True at real tokens, by which a batch can be multiplied."""
    real = ~as_bool(mask)[..., None]
    return real if batch_first else real.transpose(0, 1)


def encoders(norm_first: bool = True, batch_first: bool = True) -> tuple[Any, Any]:
    ours, theirs = pair("encoder", 2, nn.LayerNorm, norm_first=norm_first, batch_first=batch_first)
    ours.padding = "skip"
    return ours, theirs


def decoders(norm_first: bool = True, batch_first: bool = True) -> tuple[Any, Any]:
    ours, theirs = pair("decoder", 2, norm_first=norm_first, batch_first=batch_first)
    ours.padding = "skip"
    return ours, theirs


def assert_alike(
    ours: Any, theirs: Any, data: tuple[Tensor, ...], real: Tensor, *, zeros: bool, **options: Any
) -> None:
    """Checks that real tokens and all gradients are the same, and that fastformer returns zeros elsewhere."""
    compare(ours, theirs, partial(ours, **options), partial(theirs, **options), data, real)
    assert not zeros or not (ours(*data, **options) * ~real).any()


def ran_packed(call: Any) -> bool:
    """Returns whether attention ran on packed tokens."""
    with record_backends() as ran:
        call()
    names = {name for name, _ in ran}
    assert names & {"attention_fwd", "varlen_attention_fwd"}
    return "varlen_attention_fwd" in names


@pytest.mark.parametrize(
    "kind, causal, batch_first, norm_first", covering([*MASKS], [False, True], [True, False], [False, True])
)
def test_an_encoder_leaves_padding_out(kind, causal, batch_first, norm_first):
    torch.manual_seed(1)
    if kind in ("left", "holes", "floating") and causal:
        # torch.nn's causal rows that see nothing are NaN there; ours are compared with tokens moved together.
        return check_moved_together(kind, batch_first, norm_first)
    ours, theirs = encoders(norm_first, batch_first)
    mask = banded(L, None, 0) if causal else None
    real = by_position(MASKS[kind], batch_first)
    options = {"mask": mask, "src_key_padding_mask": MASKS[kind]}
    has_padding = kind != "none"
    assert ran_packed(lambda: ours(tensor(L, batch_first), **options)) == has_padding
    assert_alike(ours, theirs, (tensor(L, batch_first),), real, zeros=has_padding, **options)
    ours.eval(), theirs.eval()
    x = tensor(L, batch_first)
    assert_same(ours(x, **options) * real, theirs(x, **options) * real, "evaluation")


def check_moved_together(kind: str, batch_first: bool, norm_first: bool) -> None:
    ours, theirs = encoders(norm_first, batch_first)
    keep = ~as_bool(MASKS[kind])
    x = tensor(L, batch_first)
    out = ours(x, mask=banded(L, None, 0), src_key_padding_mask=MASKS[kind])
    if not batch_first:
        x, out = x.transpose(0, 1), out.transpose(0, 1)
    for row, (sequence, real) in enumerate(zip(x, keep, strict=True)):
        alone = theirs(sequence[real], mask=banded(int(real.sum()), None, 0))
        assert_same(out[row][real], alone, f"row {row}")
        assert not out[row][~real].any()


@pytest.mark.parametrize(
    "which, batch_first, norm_first", covering(["both", "target", "memory"], [True, False], [False, True])
)
def test_a_decoder_leaves_padding_out(which, batch_first, norm_first):
    torch.manual_seed(2)
    ours, theirs = decoders(norm_first, batch_first)
    options = {
        "tgt_mask": banded(L, None, 0),
        "tgt_key_padding_mask": None if which == "memory" else RIGHT,
        "memory_key_padding_mask": None if which == "target" else MEMORY,
    }
    real = by_position(torch.zeros(N, L, dtype=torch.bool) if which == "memory" else RIGHT, batch_first)
    data = (tensor(L, batch_first), tensor(S, batch_first))
    assert ran_packed(lambda: ours(*data, **options))
    assert_alike(ours, theirs, data, real, zeros=True, **options)


def test_a_sequence_of_padding_alone_gives_zeros():
    ours, theirs = encoders()
    x = tensor(L, True).requires_grad_()
    out = ours(x, src_key_padding_mask=EMPTY)
    assert not out[1].any()
    expected = theirs(x[:1], src_key_padding_mask=EMPTY[:1])
    assert_same(out[:1], expected, "its neighbour")
    (dx,) = torch.autograd.grad(out.sum(), x)
    assert torch.isfinite(dx).all() and not dx[1].any()


def test_a_batch_of_only_padding_or_no_rows():
    ours, _ = encoders()
    x = tensor(L, True)
    assert not ours(x, src_key_padding_mask=torch.ones(N, L, dtype=torch.bool)).any()
    assert ours(x[:0], src_key_padding_mask=RIGHT[:0]).shape == (0, L, E)


def test_batches_that_are_not_packed():
    """If a mask says more, or user code would see packed tokens, the batch stays padded."""
    torch.manual_seed(3)
    ours, theirs = encoders()
    x, options = tensor(L, True), {"src_key_padding_mask": RIGHT}
    real = by_position(RIGHT, True)
    band = banded(L, 2, 2)
    assert not ran_packed(lambda: ours(x, mask=band, **options))
    assert_alike(ours, theirs, (x,), real, zeros=False, mask=band, **options)
    # torch.nn reads a mask that is called causal where there is padding.
    assert not ran_packed(lambda: ours(x, mask=band, is_causal=True, **options))
    assert_alike(ours, theirs, (x,), real, zeros=False, mask=band, is_causal=True, **options)
    penalty = {"src_key_padding_mask": torch.where(RIGHT, -3.0, 0.0).double()}
    assert not ran_packed(lambda: ours(x, **penalty))
    assert_alike(ours, theirs, (x,), real, zeros=False, **penalty)
    shapes = []
    handle = ours.layers[1].linear1.register_forward_pre_hook(lambda module, args: shapes.append(args[0].shape))
    assert not ran_packed(lambda: ours(x, **options)) and shapes == [(N, L, E)]
    handle.remove()
    assert ran_packed(lambda: ours(x, **options))
    ours.layers[0].self_attn.forward = ours.layers[0].self_attn.forward
    assert not ran_packed(lambda: ours(x, **options))
    assert_alike(ours, theirs, (x,), real, zeros=False, **options)


def test_a_trainable_mask_is_not_packed():
    torch.manual_seed(4)
    x, grads = tensor(L, True), []
    for stack in encoders():
        mask = torch.zeros(N, L, dtype=torch.float64, requires_grad=True)
        out = stack(x, src_key_padding_mask=mask)
        out = (out * torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)).sum()
        grads.append(torch.autograd.grad(out, mask, allow_unused=True)[0])
    assert grads[0] is not None
    assert_same(grads[0], grads[1], "the mask's gradient")


class Running(nn.Linear):
    """A projection that sums over the sequence."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).cumsum(1)


@pytest.mark.parametrize("part", ["activation", "out_proj"])
def test_modules_that_may_read_other_tokens_see_the_batch(part):
    """Packed tokens have no rows, so modules that may mix tokens get the padded batch."""
    ours, _ = encoders()
    x, shapes = tensor(L, True), []

    def activation(y: Tensor) -> Tensor:
        shapes.append(y.shape)
        return y.cumsum(1)

    for layer in ours.layers:
        if part == "activation":
            layer.activation = activation
        else:
            layer.self_attn.out_proj = Running(E, E, dtype=torch.float64)
    assert not ran_packed(lambda: ours(x, src_key_padding_mask=RIGHT))
    assert part == "out_proj" or all(shape[:2] == (N, L) for shape in shapes)


def test_meta_tensors_have_masks_too():
    ours = encoders()[0].to("meta")
    x, causal = tensor(L, True).to("meta"), torch.zeros(L, L, device="meta")
    for options in ({}, {"src_key_padding_mask": RIGHT.to("meta")}, {"mask": causal}):
        out = ours(x, **options)
        assert out.is_meta and out.shape == (N, L, E)


def test_windows_count_positions():
    """A window is measured in positions: tokens that padding separates don't move together."""
    ours, _ = encoders()
    for layer in ours.layers:
        layer.self_attn.window_size = (1, 1)
    x = tensor(L, True)
    assert ran_packed(lambda: ours(x, src_key_padding_mask=LEFT))
    assert not ran_packed(lambda: ours(x, src_key_padding_mask=HOLES))
    out = ours(x, src_key_padding_mask=LEFT)
    for row, (sequence, padding) in enumerate(zip(x, LEFT, strict=True)):
        assert_same(out[row][~padding], ours(sequence[~padding][None])[0], f"row {row}")


def test_checkpointing_and_packing():
    ours, _ = encoders()
    x, options = tensor(L, True), {"src_key_padding_mask": RIGHT}
    expected = torch.autograd.grad(ours(x, **options).sum(), [*ours.parameters()])
    ours.gradient_checkpointing = True
    for a, b in zip(torch.autograd.grad(ours(x, **options).sum(), [*ours.parameters()]), expected, strict=True):
        assert torch.equal(a, b)


def test_compiled_and_vmapped_calls_keep_their_shapes():
    ours, _ = encoders()
    x = tensor(L, True)
    expected = ours(x, src_key_padding_mask=RIGHT)
    real = by_position(RIGHT, True)
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    assert_same(compiled(x, src_key_padding_mask=RIGHT) * real, expected * real, "compiled")


@both_layouts
def test_read_padding(batch_first):
    x = tensor(L, batch_first)
    padding = read_padding(x, HOLES, batch_first)
    assert padding is not None and not padding.is_contiguous and not padding.is_none
    assert padding.layout.seqlens.tolist() == [4, 3, 6, 1] and padding.layout.max_seqlen == 6
    rows = x if batch_first else x.transpose(0, 1)
    assert torch.equal(padding.pack(x), rows[~HOLES])
    assert torch.equal(padding.unpack(padding.pack(x)), x * by_position(HOLES, batch_first))
    for mask, is_contiguous in ((LEFT, True), (RIGHT, True), (EMPTY, True), (None, True)):
        found = read_padding(x, mask, batch_first)
        assert found is not None and found.is_contiguous == is_contiguous and found.is_none == (mask is None)
    assert read_padding(x, RIGHT[:, :-1], batch_first) is None
    assert read_padding(x, torch.full((N, L), -1.0), batch_first) is None


def test_a_memory_mask_is_read():
    ours, theirs = decoders()
    options = {"tgt_key_padding_mask": RIGHT, "memory_mask": banded(max(L, S), 2, 2)[:L, :S]}
    data = (tensor(L, True), tensor(S, True))
    assert not ran_packed(lambda: ours(*data, **options))
    assert_alike(ours, theirs, data, by_position(RIGHT, True), zeros=False, **options)
    hinted = {**options, "memory_mask": banded(max(L, S), None, 0)[:L, :S], "memory_is_causal": True}
    assert not ran_packed(lambda: ours(*data, **hinted))
    assert_alike(ours, theirs, data, by_position(RIGHT, True), zeros=False, **hinted)
