"""Cached decoding gives what decoding without a cache gives."""

from __future__ import annotations

import pytest
import torch

import fastformer.nn as fnn
from fastformer.nn import KVCache, SequenceLayout
from tests.nn.comparing import assert_same, padding_mask, randomised

N, T, S, E, H, FF, LAYERS = 3, 7, 5, 12, 3, 16, 2
DOUBLE = {"dtype": torch.float64}


def decoder(norm_first=True, batch_first=True, **options):
    layer = fnn.TransformerDecoderLayer(
        E, H, FF, 0.1, norm_first=norm_first, batch_first=batch_first, **options, **DOUBLE
    )
    return randomised(fnn.TransformerDecoder(layer, LAYERS, fnn.AddLayerNorm(E, **DOUBLE))).eval()


def new_cache(rows=N, max_seqlen=T, kv_heads=H):
    return KVCache(LAYERS, rows, max_seqlen, kv_heads, E // H, **DOUBLE)


def run(stack, x, memory, chunks, cache, **options):
    outputs, start = [], 0
    for size in chunks:
        outputs.append(stack(x[:, start : start + size], memory, cache=cache, **options))
        start += size
    return torch.cat(outputs, 1)


@torch.inference_mode()
@pytest.mark.parametrize("chunks", [[1] * 7, [4, 1, 1, 1], [7], [1, 3, 3]], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"norm_first": False}, {"num_kv_heads": 1}, {"window_size": (2, 0)}, {"norm": "rms"}], ids=str
)
def test_cached_equals_uncached(options, chunks):
    stack = decoder(**options)
    x, memory = torch.randn(N, T, E, **DOUBLE), torch.randn(N, S, E, **DOUBLE)
    layout = SequenceLayout.padded(torch.tensor([5, 2, 3]), S)
    expected = stack(x, memory, tgt_is_causal=True, memory_layout=layout)
    cache = new_cache(kv_heads=options.get("num_kv_heads", H))
    assert_same(run(stack, x, memory, chunks, cache, memory_layout=layout), expected, "hidden states")
    assert cache.length_bound == T and cache.seqlens.tolist() == [T] * N


@torch.inference_mode()
def test_sequence_first():
    stack = decoder(batch_first=False)
    x, memory = torch.randn(T, N, E, **DOUBLE), torch.randn(S, N, E, **DOUBLE)
    expected = stack(x, memory, tgt_is_causal=True)
    cache = new_cache()
    outputs = [stack(x[:3], memory, cache=cache)] + [stack(x[i : i + 1], memory, cache=cache) for i in range(3, T)]
    assert_same(torch.cat(outputs), expected, "hidden states")


@torch.inference_mode()
@pytest.mark.parametrize("rotary", [False, True])
def test_decoder_only_with_prompts_of_different_lengths(rotary):
    layer = fnn.TransformerEncoderLayer(E, H, FF, norm_first=True, batch_first=True, **DOUBLE)
    stack = randomised(fnn.TransformerEncoder(layer, LAYERS, fnn.AddLayerNorm(E, **DOUBLE))).eval()
    table = fnn.RotaryEmbedding(E // H, 20, **DOUBLE)
    lengths = [4, 1, 3]
    prompts, further = torch.randn(N, 4, E, **DOUBLE), torch.randn(N, 3, E, **DOUBLE)
    cache = new_cache()

    def bind(positions):
        return table(positions) if rotary else None

    layout = SequenceLayout.padded(torch.tensor(lengths), 4)
    first = stack(prompts, cache=cache, layout=layout, rotary=bind(cache.positions(4)))
    assert cache.seqlens.tolist() == lengths and cache.length_bound == 4
    steps = [stack(further[:, i : i + 1], cache=cache, rotary=bind(cache.positions(1))) for i in range(3)]
    for row, length in enumerate(lengths):
        whole = torch.cat([prompts[row, :length], further[row]])[None]
        expected = stack(whole, is_causal=True, rotary=bind(torch.arange(length + 3)[None]))[0]
        assert_same(first[row, :length], expected[:length], "prompt")
        assert_same(torch.cat(steps, 1)[row], expected[length:], "steps")


@torch.inference_mode()
def test_beams_share_their_sources_keys():
    stack, beams = decoder(), 2
    x, memory = torch.randn(N * beams, T, E, **DOUBLE), torch.randn(N, S, E, **DOUBLE)
    layout = SequenceLayout.padded(torch.tensor([5, 2, 3]), S)
    cache = new_cache(N * beams)
    out = run(stack, x, memory, [2, 1, 4], cache, memory_layout=layout)
    assert cache.cross_k.shape == (LAYERS, N, S, H, E // H)
    repeated = SequenceLayout.padded(layout.seqlens.repeat_interleave(beams), S)
    expected = stack(x, memory.repeat_interleave(beams, 0), tgt_is_causal=True, memory_layout=repeated)
    assert_same(out, expected, "hidden states")
    other = new_cache(N * beams)
    index = torch.tensor([2, 0, 1, 1, 0, 2])
    stack.store_memory(other, memory, layout, source_index=index)
    repeated = SequenceLayout.padded(layout.seqlens[index], S)
    expected = stack(x, memory[index], tgt_is_causal=True, memory_layout=repeated)
    assert_same(run(stack, x, None, [3, 4], other), expected, "with an index")


@torch.inference_mode()
@pytest.mark.parametrize("beams", [1, 2])
def test_reorder_and_select(beams):
    """The cache after reorder or select decodes as one that had seen the rows in that order."""
    stack, rows = decoder(), N * beams
    memory, x = torch.randn(N, S, E, **DOUBLE), torch.randn(rows, T, E, **DOUBLE)
    layout = SequenceLayout.padded(torch.tensor([5, 2, 3]), S)
    sources = torch.arange(rows) // beams
    for index, change in (
        (torch.tensor([1, 1, 2, 0, 5, 4])[:rows] % rows, "reorder"),
        (torch.tensor([2, 0]), "select"),
        (torch.tensor([rows - 1]), "select"),
    ):
        cache = new_cache(rows)
        storage = cache.k.data_ptr()
        run(stack, x[:, :4], memory, [3, 1], cache, memory_layout=layout)
        getattr(cache, change)(index)
        assert cache.batch_size == len(index)
        assert change == "select" or cache.k.data_ptr() == storage
        source = sources[index]
        after = run(stack, x[index][:, 4:], None, [1, 2], cache)
        chosen = SequenceLayout.padded(layout.seqlens[source], S)
        expected = stack(x[index], memory[source], tgt_is_causal=True, memory_layout=chosen)[:, 4:]
        assert_same(after, expected, change)


@torch.inference_mode()
@pytest.mark.parametrize("change", ["reorder", "select"])
def test_reorder_and_select_take_the_lengths_along(change):
    layer = fnn.TransformerEncoderLayer(E, H, FF, batch_first=True, **DOUBLE)
    stack = randomised(fnn.TransformerEncoder(layer, LAYERS)).eval()
    lengths, index = torch.tensor([4, 1, 3]), torch.tensor([1, 2, 0])
    prompts, further = torch.randn(N, 4, E, **DOUBLE), torch.randn(N, 1, E, **DOUBLE)
    cache = new_cache()
    stack(prompts, cache=cache, layout=SequenceLayout.padded(lengths, 4))
    getattr(cache, change)(index)
    out = stack(further, cache=cache)
    for row, old in enumerate(index.tolist()):
        whole = torch.cat([prompts[old, : lengths[old]], further[row]])[None]
        assert_same(out[row, 0], stack(whole, is_causal=True)[0, -1], change)


@torch.inference_mode()
def test_a_padding_mask_may_leave_out_any_key():
    stack = decoder()
    x, memory = torch.randn(N, T, E, **DOUBLE), torch.randn(N, S, E, **DOUBLE)
    mask = torch.tensor([[0, 1, 0, 0, 1], [1, 1, 1, 0, 1], [0, 0, 0, 0, 0]], dtype=torch.bool)
    expected = stack(x, memory, tgt_is_causal=True, memory_key_padding_mask=mask)
    out = run(stack, x, memory, [3, 4], new_cache(), memory_key_padding_mask=mask)
    assert_same(out, expected, "hidden states")


@torch.inference_mode()
def test_packed_memory_and_reset():
    stack = decoder()
    layout = SequenceLayout.packed(torch.tensor([5, 2, 3]), S)
    cache = new_cache()
    for _ in range(2):
        x, memory = torch.randn(N, T, E, **DOUBLE), torch.randn(10, E, **DOUBLE)
        padded = SequenceLayout.padded(layout.seqlens, S)
        expected = stack(x, layout.unpack(memory), tgt_is_causal=True, memory_layout=padded)
        assert_same(run(stack, x, memory, [2, 5], cache, memory_layout=layout), expected, "hidden states")
        cache.reorder(torch.tensor([1, 0, 2]))  # which rows read which sources is forgotten too
        cache.reset()
        assert not cache.has_memory and cache.length_bound == 0
        assert cache.source_index is None and cache.source_seqlens is None


@torch.inference_mode()
def test_a_lone_layer():
    layer = randomised(fnn.TransformerEncoderLayer(E, H, FF, batch_first=True, **DOUBLE)).eval()
    x = torch.randn(N, 3, E, **DOUBLE)
    cache = KVCache(1, N, 3, H, E // H, **DOUBLE)
    outputs = []
    for i in range(3):
        outputs.append(layer(x[:, i : i + 1], cache=cache[0]))
        cache.advance(1)
    assert_same(torch.cat(outputs, 1), layer(x, is_causal=True), "hidden states")


def test_no_gradient_flows_through_a_cache():
    stack, memory = decoder(), torch.randn(N, S, E, **DOUBLE, requires_grad=True)
    cache = new_cache()
    for size in (3, 1):
        x = torch.randn(N, size, E, **DOUBLE, requires_grad=True)
        assert not stack(x, memory, cache=cache).requires_grad
    assert not cache.k.requires_grad and not cache.cross_k.requires_grad


def test_errors():
    stack, x, memory = decoder(), torch.randn(N, T, E, **DOUBLE), torch.randn(N, S, E, **DOUBLE)
    with pytest.raises(ValueError, match="expected num_layers, .* of at least 1, got 0, 3, 7, 3, 4"):
        KVCache(0, 3, 7, 3, 4)
    with torch.inference_mode():
        cache = new_cache()
        with pytest.raises(ValueError, match="expected a memory: the cache holds none yet"):
            stack(x, None, cache=cache)
        with pytest.raises(ValueError, match="no mask but the causal one along with a cache"):
            stack(x, memory, tgt_mask=torch.zeros(T, T, **DOUBLE), cache=cache)
        with pytest.raises(ValueError, match="no mask but the causal one along with a cache"):
            stack(x, memory, tgt_key_padding_mask=padding_mask([1, 2, 3], T), cache=cache)
        with pytest.raises(ValueError, match="no memory_mask along with a cache"):
            stack(x, memory, memory_mask=torch.zeros(T, S, **DOUBLE), cache=cache)
        with pytest.raises(ValueError, match="a bool memory_key_padding_mask"):
            stack(x, memory, memory_key_padding_mask=torch.zeros(N, S, **DOUBLE), cache=cache)
        with pytest.raises(ValueError, match=r"a padded batch along with a cache, got a tensor of shape \(7, 12\)"):
            stack(x[0], memory, cache=cache)
        stack(x[:, :5], memory, cache=cache)
        with pytest.raises(ValueError, match="room for 7 tokens a row and holds up to 5; 3 more don't fit"):
            stack(x[:, :3], None, cache=cache)
        with pytest.raises(ValueError, match=r"an index of shape \(3,\), got \(2,\)"):
            cache.reorder(torch.tensor([0, 1]))
        with pytest.raises(ValueError, match="a multiple of the 3 sources, or a source_index; got a cache of 4 rows"):
            stack(torch.randn(4, 1, E, **DOUBLE), memory, cache=new_cache(4))
        with pytest.raises(ValueError, match="memory is set"):
            stack.layers[0](x, memory, cache=new_cache()[0])
    with pytest.raises(ValueError, match="need_weights=False and no mask along with a cache"):
        stack.layers[0].self_attn(x, x, x, cache=new_cache()[0].self_attention)
