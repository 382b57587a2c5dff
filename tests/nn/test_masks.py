"""A key_padding_mask of right padding becomes lengths; any other stays a mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fastformer.nn import MultiheadAttention, TransformerEncoder, TransformerEncoderLayer, masks
from fastformer.nn import attention as module_of_attention
from fastformer.nn.masks import attended_lengths, is_causal_mask, right_padding_lengths, square_subsequent_mask
from tests.conftest import Call, CallsOf
from tests.no_sync import NoSync

LENGTHS = [5, 7, 0, 1]


def right_padded(lengths: list[int] = LENGTHS, seqlen: int = 7) -> Tensor:
    return torch.arange(seqlen) >= torch.tensor(lengths)[:, None]


def test_right_padding_is_lengths() -> None:
    lengths = right_padding_lengths(right_padded())
    assert lengths is not None and lengths.dtype == torch.int32 and lengths.tolist() == LENGTHS
    nothing = right_padding_lengths(torch.zeros(2, 3, dtype=torch.bool))
    assert nothing is not None and nothing.tolist() == [3, 3]


def test_anything_else_is_a_mask() -> None:
    left, hole, first = right_padded().flip(1), right_padded(), right_padded()
    hole[1, 3] = True
    first[1, 0] = True
    for mask in (left, hole, first, right_padded().float(), right_padded()[0]):
        assert right_padding_lengths(mask) is None


@pytest.mark.parametrize("way", ["data", "numpy", "in place", "in inference mode"])
def test_no_result_is_cached_after_a_write(way: str) -> None:
    """This includes writes that don't change a tensor's version."""
    with torch.inference_mode(way == "in inference mode"):
        causal, padding = square_subsequent_mask(7), right_padded()
        assert is_causal_mask(causal) and right_padding_lengths(padding) is not None
        for mask, value in ((causal, 0.0), (padding, True)):
            view = mask.data if way == "data" else mask.numpy() if way == "numpy" else mask
            view[1, 0 if mask is padding else 3] = value
        assert not is_causal_mask(causal) and right_padding_lengths(padding) is None
        causal.data[1, 3] = float("-inf")
        assert is_causal_mask(causal)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_trace_reads_the_mask_of_each_call() -> None:
    class Attending(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = TransformerEncoder(TransformerEncoderLayer(16, 2, 16, 0.0, batch_first=True), 1)

        def forward(self, x: Tensor, mask: Tensor, padding: Tensor) -> Tensor:
            return self.encoder(x, mask) + self.encoder(x, src_key_padding_mask=padding)

    module, x = Attending().double(), torch.randn(4, 7, 16, dtype=torch.float64)
    seen = (x, square_subsequent_mask(7, dtype=torch.float64), right_padded([7, 5, 6, 1]))
    others = (x, torch.zeros(7, 7, dtype=torch.float64), right_padded([3, 7, 4, 5]))
    real = ~others[2][..., None]
    traced = torch.jit.trace(module, seen, check_trace=False)
    torch.testing.assert_close(traced(*others) * real, module(*others) * real)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    torch.testing.assert_close(make_fx(module)(*seen)(*others) * real, module(*others) * real)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("seqlen_k", [7, 9])
def test_a_trace_of_causal_attention(seqlen_k: int) -> None:
    """In a trace, sizes are tensors; queries of any length may be traced, because a triangle has no fixed length."""
    module = MultiheadAttention(16, 2, batch_first=True).requires_grad_(False)

    def call(x: Tensor, y: Tensor) -> Tensor:
        memory = x if seqlen_k == 7 else y
        return module(x, memory, memory, is_causal=True, need_weights=False)[0]

    x, y = torch.randn(2, 7, 16), torch.randn(2, 9, 16)
    traced = torch.jit.trace(call, (x, y), check_trace=False)
    torch.testing.assert_close(traced(y[:, :7], y), call(y[:, :7], y))


@pytest.mark.parametrize("strict", [False, True])
def test_a_program_of_causal_attention_whose_lengths_may_vary(strict: bool) -> None:
    """The op's window is a number, so the program keeps the lengths of its example, in both ways of exporting."""

    class Attending(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.attention(x, y, y, is_causal=True, need_weights=False)[0]

    module, x, y = Attending().eval(), torch.randn(2, 7, 16), torch.randn(2, 9, 16)
    sizes = {"x": None, "y": {1: torch.export.Dim.AUTO}}
    program = torch.export.export(module, (x, y), dynamic_shapes=sizes, strict=strict).module()
    torch.testing.assert_close(program(x.flip(0), y), module(x.flip(0), y))


def test_lengths_first_read_in_inference_mode_serve_training() -> None:
    module = MultiheadAttention(16, 2, batch_first=True)
    x, mask = torch.randn(4, 7, 16), right_padded()
    with torch.inference_mode():
        module(x, x, x, mask, need_weights=False)
    module(x, x, x, mask, need_weights=False)[0].sum().backward()
    assert module.in_proj_weight.grad is not None


@pytest.fixture
def calls(calls_of: CallsOf) -> list[Call]:
    """Records the calls of the op."""
    return calls_of(module_of_attention, "attention")


def results_of(module: MultiheadAttention, padding: Tensor, **options: Any) -> list[Tensor]:
    """Returns the output, the weights if they are requested, and every gradient."""
    generator = torch.Generator().manual_seed(3)
    query, key = (torch.randn(n, 4, 16, dtype=torch.float64, generator=generator).requires_grad_() for n in (6, 7))
    out, weights = module(query, key, key, padding, **options)
    seen = out if weights is None else out + weights.square().sum()
    seen = (seen * torch.linspace(-1, 2, out.numel(), dtype=torch.float64).view_as(out)).sum()
    gradients = torch.autograd.grad(seen, [query, key, *module.parameters()])
    return [out, *([] if weights is None else [weights]), *gradients]


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_lengths_equal_their_mask(need_weights: bool, is_causal: bool, calls: list[Call], monkeypatch: Any) -> None:
    """A row may consist of padding only; the op gets lengths."""
    module, options = MultiheadAttention(16, 2, dtype=torch.float64), {"need_weights": need_weights}
    ours = results_of(module, right_padded(), is_causal=is_causal, **options)
    monkeypatch.setattr(module_of_attention, "right_padding_lengths", lambda mask: None)
    masked = results_of(module, right_padded(), is_causal=is_causal, **options)
    given = [(call.options["attn_mask"] is None, call.options["seqlens_k"] is None) for call in calls]
    assert given == [(True, False), (False, True)]
    torch.testing.assert_close(ours, masked)


def padded_anyhow() -> dict[str, Tensor]:
    """Returns masks (4, 7) of every form that key_padding_mask allows, with a row that ignores all keys in each."""
    right, hole = right_padded(), right_padded()
    hole[1, 3] = hole[1, 6] = True
    left = torch.tensor([[1, 1, 1, 0, 0, 0, 0], [0] * 7, [1] * 7, [1, 0, 0, 0, 0, 1, 1]]).bool()
    added = torch.linspace(-2.0, 1.0, 28, dtype=torch.float64).view(4, 7).masked_fill(hole, -torch.inf)
    lowest = torch.zeros(4, 7, dtype=torch.float64).masked_fill(right, torch.finfo(torch.float32).min)
    return {"right": right, "hole": hole, "left": left, "added": added, "lowest": lowest, "nothing": right & ~right}


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes masks and lengths unreadable for the host, as on a GPU, and counts lengths from seven keys on."""
    monkeypatch.setattr(masks, "_READABLE", ())
    monkeypatch.setattr("fastformer.ops._common.is_readable", lambda lengths: False)
    monkeypatch.setattr(masks, "LEAST_KEYS", 1)


@pytest.mark.parametrize(
    ("kind", "lengths"),
    [
        ("right", [5, 7, 0, 1]), ("hole", [5, 6, 0, 1]), ("left", [7, 7, 0, 5]), ("added", [5, 6, 0, 1]),
        ("lowest", [7] * 4), ("nothing", [7] * 4),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.usefixtures("on_a_device")
def test_lengths_beside_a_mask_change_nothing(
    kind: str, lengths: list[int], is_causal: bool, calls: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are used, and the host doesn't wait for the device."""
    module, padding = MultiheadAttention(16, 2, dtype=torch.float64), padded_anyhow()[kind]

    def results() -> list[list[Tensor]]:
        with NoSync():
            return [results_of(module, padding, need_weights=each, is_causal=is_causal) for each in (False, True)]

    counted = results()
    monkeypatch.setattr(module_of_attention, "attended_lengths", lambda mask: None)
    masked = results()
    assert not any(call.options["attn_mask"] is None for call in calls)
    used = [call.options["seqlens_k"] for call in calls]
    assert [None if each is None else each.tolist() for each in used] == [lengths, lengths, None, None]
    assert used[0].dtype == torch.int32
    torch.testing.assert_close(counted, masked)


def test_layouts_without_lengths() -> None:
    """These are a CPU, which reads masks, and short keys."""
    long = torch.zeros(2, masks.LEAST_KEYS, dtype=torch.bool)
    assert attended_lengths(long) is None
    assert attended_lengths(long.to("meta")) is not None
    assert attended_lengths(long[:, 1:].to("meta")) is None
    assert attended_lengths(long[0].to("meta")) is None


def test_lengths_are_counted_in_each_run_of_a_trace(on_a_device: None) -> None:
    """A graph, a compiled module and vmap count the lengths of the mask of each call."""
    module = MultiheadAttention(16, 2, batch_first=True, dtype=torch.float64).eval().requires_grad_(False)
    x = torch.randn(4, 7, 16, dtype=torch.float64)
    kinds = padded_anyhow()

    def attending(x: Tensor, padding: Tensor) -> Tensor:
        return module(x, x, x, padding, need_weights=False)[0]

    forms = (
        make_fx(attending)(x, kinds["right"]),
        torch.compile(attending, backend="aot_eager", fullgraph=True, dynamic=True),
        lambda x, padding: torch.vmap(attending)(x[:, None], padding[:, None])[:, 0],
    )
    for form in forms:
        for kind in ("right", "left", "hole", "nothing"):
            torch.testing.assert_close(form(x, kinds[kind]), attending(x, kinds[kind]))
