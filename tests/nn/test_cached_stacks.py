"""Cached decoding gives the same results as decoding without a cache."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import fastformer.nn as fnn
from fastformer.errors import InputError
from fastformer.nn import KVCache, SequenceLayout
from tests.nn.comparing import assert_same, padding_mask, randomised, taken

N, T, S, E, H, FF, LAYERS = 3, 7, 5, 12, 3, 16, 2
DOUBLE = {"dtype": torch.float64}


def decoder(norm_first=True, batch_first=True, **options):
    layer = fnn.TransformerDecoderLayer(
        E, H, FF, 0.1, norm_first=norm_first, batch_first=batch_first, **options, **DOUBLE
    )
    return randomised(fnn.TransformerDecoder(layer, LAYERS, fnn.AddLayerNorm(E, **DOUBLE))).eval()


def new_cache(groups=N, rows=1, max_seqlen=T, kv_heads=H):
    cache = KVCache(LAYERS, 2 * groups * rows, max_seqlen, kv_heads, E // H, block_size=4, **DOUBLE)
    cache.add(groups, rows)
    return cache


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
    layout = SequenceLayout.padded(torch.tensor([4, 2, 3]), S)
    expected = stack(x, memory, tgt_is_causal=True, memory_layout=layout)
    cache = new_cache(kv_heads=options.get("num_kv_heads", H))
    assert_same(run(stack, x, memory, chunks, cache, memory_layout=layout), expected, "hidden states")
    assert cache.lengths == [T] * N and cache.seqlens.tolist() == [T] * N


@torch.inference_mode()
@pytest.mark.parametrize("chunks", [[1] * 7, [4, 1, 2]], ids=str)
def test_a_window_limits_a_position_bias_as_well(chunks):
    layer = fnn.TransformerEncoderLayer(E, H, FF, batch_first=True, window_size=(2, 0), **DOUBLE)
    stack = randomised(fnn.TransformerEncoder(layer, LAYERS)).eval()
    x, bias, seen = torch.randn(N, T, E, **DOUBLE), torch.randn(1, H, T, T, **DOUBLE), torch.ones(T, T).bool()
    expected = stack(x, position_bias=bias.masked_fill(~(seen.tril() & seen.triu(-2)), -torch.inf))
    cache, outputs, start = new_cache(), [], 0
    for size in chunks:
        own = bias[:, :, start : start + size, : start + size]
        outputs.append(stack(x[:, start : start + size], cache=cache, position_bias=own))
        start += size
    assert_same(torch.cat(outputs, 1), expected, "hidden states")


@torch.inference_mode()
def test_sequence_first():
    stack = decoder(batch_first=False)
    x, memory = torch.randn(T, N, E, **DOUBLE), torch.randn(S, N, E, **DOUBLE)
    expected = stack(x, memory, tgt_is_causal=True)
    cache = new_cache()
    outputs = [stack(x[:3], memory, cache=cache)] + [stack(x[i : i + 1], memory, cache=cache) for i in range(3, T)]
    assert_same(torch.cat(outputs), expected, "hidden states")


@torch.inference_mode()
@pytest.mark.parametrize("rotary", ["none", "positions", "those of the cache"])
def test_decoder_only_with_prompts_of_different_lengths(rotary):
    layer = fnn.TransformerEncoderLayer(E, H, FF, norm_first=True, batch_first=True, **DOUBLE)
    stack = randomised(fnn.TransformerEncoder(layer, LAYERS, fnn.AddLayerNorm(E, **DOUBLE))).eval()
    table = fnn.RotaryEmbedding(E // H, 20, **DOUBLE)
    lengths = [4, 1, 3]
    prompts, further = torch.randn(N, 4, E, **DOUBLE), torch.randn(N, 3, E, **DOUBLE)
    cache = new_cache()

    def bind(positions):
        return None if rotary == "none" else table(positions)

    def bind_next(num_tokens):
        return bind(None if rotary == "those of the cache" else cache.positions(num_tokens))

    layout = SequenceLayout.padded(torch.tensor(lengths), 4)
    first = stack(prompts, cache=cache, layout=layout, rotary=bind_next(4))
    assert cache.seqlens.tolist() == cache.lengths == lengths
    chunks = [further[:, :1], further[:, 1:]]
    steps = [stack(chunk, cache=cache, rotary=bind_next(chunk.shape[1])) for chunk in chunks]
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
    cache = new_cache(rows=beams)
    out = run(stack, x, memory, [2, 1, 4], cache, memory_layout=layout)
    repeated = SequenceLayout.padded(layout.seqlens.repeat_interleave(beams), S)
    expected = stack(x, memory.repeat_interleave(beams, 0), tgt_is_causal=True, memory_layout=repeated)
    assert_same(out, expected, "hidden states")
    # 2 blocks of 4 for each row of 7 tokens, and 2 + 1 + 1 for the sources, whose padding is not stored.
    assert taken(cache) == 2 * N * beams + 4


@torch.inference_mode()
@pytest.mark.parametrize("change", ["fork", "free"])
def test_rows_continue_from_their_parents(change):
    """After fork or free, the cache decodes like one that got the rows in the new order."""
    stack, beams = decoder(), 3
    memory, x = torch.randn(N, S, E, **DOUBLE), torch.randn(N * beams, T, E, **DOUBLE)
    layout = SequenceLayout.padded(torch.tensor([5, 2, 3]), S)
    cache = new_cache(rows=beams)
    run(stack, x, memory, [3, 1], cache, memory_layout=layout)
    if change == "fork":  # one group with other rows, one with fewer, one with more
        cache.fork([[2, 0, 2], [1], [0, 0, 2, 1]])
        index = torch.tensor([2, 0, 2, 4, 6, 6, 8, 7])
    else:
        cache.free([0])
        index = torch.tensor([3, 4, 5, 6, 7, 8])
    after = run(stack, x[index][:, 4:], None, [1, 2], cache)
    chosen = SequenceLayout.padded(layout.seqlens[index // beams], S)
    expected = stack(x[index], memory[index // beams], tgt_is_causal=True, memory_layout=chosen)[:, 4:]
    assert_same(after, expected, change)


@torch.inference_mode()
@pytest.mark.parametrize(
    "options",
    [{}, {"norm_first": False}, {"num_kv_heads": 1}, {"window_size": (2, 0)}, {"batch_first": False}],
    ids=str,
)
def test_packed_prompts_join_rows_that_are_decoding(options):
    stack = decoder(**options)
    kv_heads = options.get("num_kv_heads", H)
    lengths, sources = [3, 0, 5], [4, 5, 1]
    rows = [torch.randn(T, E, **DOUBLE) for _ in range(N + 1)]
    memories = [torch.randn(length, E, **DOUBLE) for length in (3, *sources)]

    def alone(row):
        x, memory = rows[row][:, None], memories[row][:, None]
        if options.get("batch_first", True):
            x, memory = x.transpose(0, 1), memory.transpose(0, 1)
        return stack(x, memory, tgt_is_causal=True).view(T, E)

    def step(cache, tokens):
        x = torch.stack(tokens)[:, None]
        batched = options.get("batch_first", True)
        return stack(x if batched else x.transpose(0, 1), None, cache=cache).view(len(tokens), E)

    cache = KVCache(LAYERS, N + 1, T, kv_heads, E // H, max_source_seqlen=S, block_size=2, **DOUBLE)
    cache.k[:, 1:] = cache.v[:, 1:] = torch.nan
    cache.add()
    stack.store_memory(cache, memories[0], SequenceLayout.packed(torch.tensor([3]), 3))
    first = [step(cache, [rows[0][i]]) for i in range(2)]
    cache.add(N)
    assert len(cache.begin(0).layer(0).self_attention.seqlens) == N + 1  # what is read here is not the tail's
    new = cache.tail(1)
    assert len(new.begin(0).layer(0).self_attention.seqlens) == N
    stack.store_memory(new, torch.cat(memories[1:]), SequenceLayout.packed(torch.tensor(sources), S))
    packed = torch.cat([row[:length] for row, length in zip(rows[1:], lengths, strict=True)])
    # Two tokens behind the last sequence, which belong to no sequence.
    layout = SequenceLayout.packed(torch.tensor(lengths), 5, total=10)
    prompts = stack(torch.cat([packed, torch.ones(2, E, **DOUBLE)]), None, layout=layout, cache=new)
    assert cache.lengths == [2, *lengths]
    position = [2, *lengths]
    steps = [step(cache, [row[p + i] for row, p in zip(rows, position, strict=True)]) for i in range(2)]
    assert_same(torch.cat(first), alone(0)[:2], "before")
    for row in range(N + 1):
        expected = alone(row)
        begin = sum(lengths[: row - 1]) if row else 0
        if row and lengths[row - 1]:
            assert_same(prompts[begin : begin + position[row]], expected[: position[row]], "prompt")
        for i in range(2):
            assert_same(steps[i][row], expected[position[row] + i], "step")


@torch.inference_mode()
def test_tokens_are_read_again_after_rewinding():
    stack = decoder()
    x, memory = torch.randn(N, T, E, **DOUBLE), torch.randn(N, S, E, **DOUBLE)
    cache = new_cache()
    run(stack, torch.randn(N, T, E, **DOUBLE), memory, [6, 1], cache)
    expected = stack(x, memory, tgt_is_causal=True)
    for end in (2, 1, 5):
        cache.rewind()
        assert cache.lengths == [0, 0, 0] and cache.has_memory
        assert_same(stack(x[:, :end], None, cache=cache), expected[:, :end], "hidden states")


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
        cache.add(N - cache.num_groups)
        padded = SequenceLayout.padded(layout.seqlens, S)
        expected = stack(x, layout.unpack(memory), tgt_is_causal=True, memory_layout=padded)
        assert_same(run(stack, x, memory, [2, 5], cache, memory_layout=layout), expected, "hidden states")
        cache.reset()
        assert not cache.has_memory and cache.num_rows == 0 and taken(cache) == 0


@torch.inference_mode()
def test_a_lone_layer():
    layer = randomised(fnn.TransformerEncoderLayer(E, H, FF, batch_first=True, **DOUBLE)).eval()
    x = torch.randn(N, 3, E, **DOUBLE)
    cache = KVCache(1, N, 3, H, E // H, **DOUBLE)
    cache.add(N)
    outputs = []
    for i in range(3):
        step = cache.begin(1)
        outputs.append(layer(x[:, i : i + 1], cache=step.layer(0)))
        cache.commit(step)
    assert_same(torch.cat(outputs, 1), layer(x, is_causal=True), "hidden states")
    cache.reset()
    cache.add(N)
    step = cache.begin(3, [1, 0, 2], is_packed=True)
    layout = SequenceLayout.packed(torch.tensor([1, 0, 2]), 3)
    packed = layer(layout.pack(x), cache=step.layer(0), layout=layout)
    assert_same(packed, layout.pack(layer(x, is_causal=True)), "packed")


def test_no_gradient_flows_through_a_cache():
    stack, memory = decoder(), torch.randn(N, S, E, **DOUBLE, requires_grad=True)
    cache = new_cache()
    for size in (3, 1):
        x = torch.randn(N, size, E, **DOUBLE, requires_grad=True)
        assert not stack(x, memory, cache=cache).requires_grad
    assert not cache.k.requires_grad and not cache.v.requires_grad


@torch.inference_mode()
def test_a_failed_step_keeps_the_lengths_and_can_be_repeated():
    stack, cache = decoder(), new_cache()
    x, memory = torch.randn(N, T, E, **DOUBLE), torch.randn(N, S, E, **DOUBLE)
    expected = stack(x, memory, tgt_is_causal=True)
    run(stack, x[:, :4], memory, [3, 1], cache)
    with mock.patch.object(stack.norm, "forward", side_effect=ZeroDivisionError):  # after the layers have written
        for size in (1, 3):
            with pytest.raises(ZeroDivisionError):
                stack(torch.randn(N, size, E, **DOUBLE), None, cache=cache)
            assert cache.lengths == [4] * N
    assert_same(run(stack, x[:, 4:], None, [1, 2], cache), expected[:, 4:], "hidden states")


def test_errors():
    """Wrong calls are InputErrors, as forward documents, and leave the cache unchanged."""
    stack, x, memory = decoder(), torch.randn(N, T, E, **DOUBLE), torch.randn(N, S, E, **DOUBLE)
    layout = SequenceLayout.packed(torch.tensor([2, 2, 3]), 3)
    other = KVCache(LAYERS, N, T, 1, E, **DOUBLE)
    other.add(N)

    def refuses(name, call):
        with torch.inference_mode(), pytest.raises(InputError, match=rf"\b{name}\b"):
            call()

    cache = new_cache()
    refuses("memory", lambda: stack(x, None, cache=cache))
    refuses("mask", lambda: stack(x, memory, tgt_mask=torch.zeros(T, T, **DOUBLE), cache=cache))
    refuses("mask", lambda: stack(x, memory, tgt_key_padding_mask=padding_mask([1, 2, 3], T), cache=cache))
    refuses("memory_mask", lambda: stack(x, memory, memory_mask=torch.zeros(T, S, **DOUBLE), cache=cache))
    mask = torch.zeros(N, S, **DOUBLE)
    refuses("memory_key_padding_mask", lambda: stack(x, memory, memory_key_padding_mask=mask, cache=cache))
    refuses("layout", lambda: stack(x[0], memory, cache=cache))
    refuses("layout", lambda: stack(x, memory, cache=cache, layout=layout))
    refuses("memory_layout", lambda: stack(x, memory[0], cache=cache))
    refuses("rows", lambda: stack(x[:2], memory, cache=cache))
    refuses("layers", lambda: stack(x, memory, cache=KVCache(1, N, T, H, E // H, **DOUBLE)))
    refuses("num_kv_heads", lambda: stack(x, memory, cache=other))
    refuses("num_kv_heads", lambda: stack.store_memory(other, memory))
    refuses("groups", lambda: stack(torch.randn(4, 1, E, **DOUBLE), memory, cache=new_cache(4)))
    refuses("max_seqlen", lambda: stack(torch.randn(N, T + 1, E, **DOUBLE), memory, cache=cache))
    refuses("need_weights", lambda: stack.layers[0].self_attn(x, x, x, cache=cache.begin(0).layer(0).self_attention))
    assert taken(cache) == 0 and not cache.has_memory

    def attend(step, x, **options):
        own = step.layer(0).self_attention
        return stack.layers[0].self_attn(x, x, x, need_weights=False, cache=own, **options)

    step = cache.begin(T - 1)
    refuses("num_tokens", lambda: attend(step, x))
    refuses("rows", lambda: attend(step, x[:2, : T - 1]))
    refuses("is_packed", lambda: attend(step, x[0], layout=layout))
    refuses("memory", lambda: stack.layers[0](x, memory, cache=step.layer(0)))
    for part in (x[:, :1], x):
        with torch.inference_mode(), pytest.raises(ValueError, match="head"):
            attend(other.begin(T), part)
    with torch.inference_mode():
        stack(x[:, :5], memory, cache=cache)
    refuses("max_seqlen", lambda: stack(x[:, :3], None, cache=cache))
    refuses("packed", lambda: stack(x[0], None, cache=cache, layout=layout))
    assert cache.lengths == [5, 5, 5]
