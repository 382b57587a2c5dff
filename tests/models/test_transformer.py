"""Compares models.Transformer with a plain one, packed with padded, and cached with uncached."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastformer.models import Transformer, TransformerConfig
from fastformer.nn import AddLayerNorm, SequenceLayout
from tests.covering import by_turns
from tests.models.plain import PlainTransformer
from tests.nn.comparing import assert_same, assert_same_gradients, randomised

V, SOURCE_LENGTHS, TARGET_LENGTHS = 23, [5, 2, 7], [4, 6, 1]
SIZES = {"vocab_size": V, "d_model": 16, "num_heads": 4, "d_ff": 24, "max_len": 12}
LAYERS = {"num_encoder_layers": 2, "num_decoder_layers": 2}
SMALL = {**SIZES, **LAYERS, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
T5 = {
    "positions": "relative", "num_buckets": 8, "max_distance": 6, "norm": "rms", "bias": False, "embed_pad": True,
    "scale_embedding": False,
}  # fmt: skip
VARIANTS = {
    "pre-norm": {},
    "post-norm": {"norm_first": False},
    "interleaved positions": {"positions": "interleaved"},
    "later positions": {"first_position": 3},
    "untied": {"tie_embeddings": False, "source_vocab_size": 19},
    "attention bias": {"attention_bias": True},
    "window": {"window_size": 2},
    "wide heads": {"head_dim": 12, "attention_bias": True},
    "marian": {"norm_first": False, "positions": "halves", "embed_pad": True, "output_bias": True},
    "bart": {"norm_first": False, "positions": "learned", "embedding_norm": True, "scale_embedding": False},
    "mbart": {"positions": "learned", "embedding_norm": True, "tie_embeddings": False},
    "t5": {**T5, "scale_output": True},
    "t5 1.1": {**T5, "activation": "geglu_tanh", "tie_embeddings": False, "window_size": 3},
    "unscaled": {"scale_embedding": False, "tie_embeddings": False, "output_bias": True},
}
variants = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())


def model_of(**options):
    model = Transformer(TransformerConfig(**{**SMALL, **options}), dtype=torch.float64)
    for module in model.modules():
        if isinstance(module, AddLayerNorm):
            randomised(module)
    if model.output_bias is not None:
        nn.init.normal_(model.output_bias)
    return model


def batch():
    """Makes padded (source, target_in, target_out): target_in starts with 0, and target_out is padded with -100."""
    source, target = torch.randint(3, 19, (3, 7)), torch.randint(3, 19, (3, 6))
    source[torch.arange(7)[None] >= torch.tensor(SOURCE_LENGTHS)[:, None]] = 0
    padding = torch.arange(6)[None] >= torch.tensor(TARGET_LENGTHS)[:, None]
    shifted = F.pad(target[:, :-1], (1, 0)).masked_fill(padding, 0)
    return source, shifted, target.masked_fill(padding, -100)


def layouts_of(kind):
    """Returns layouts by the names of the loss's arguments. kind: the kind of SequenceLayout."""
    lengths = {"source_layout": SOURCE_LENGTHS, "target_layout": TARGET_LENGTHS}
    return {name: kind(torch.tensor(seqlens), max(seqlens)) for name, seqlens in lengths.items()}


def plain_logits(model, source, shifted):
    plain = PlainTransformer(dict(model.named_parameters()), model.config)
    return [
        plain(source[row, :s], shifted[row, :t])
        for row, (s, t) in enumerate(zip(SOURCE_LENGTHS, TARGET_LENGTHS, strict=True))
    ]


@variants
def test_equals_the_plain_model(options):
    model = model_of(**options)
    source, shifted, target = batch()
    logits = model(source, shifted)
    loss = model.loss(source, shifted, target, label_smoothing=0.1)
    expected = plain_logits(model, source, shifted)
    for row, length in enumerate(TARGET_LENGTHS):
        assert_same(logits[row, :length], expected[row], f"logits of row {row}")
    real = torch.cat([target[row, :length] for row, length in enumerate(TARGET_LENGTHS)])
    # tensor2tensor's smoothing over the others is torch's with a larger share.
    others = model.loss(source, shifted, target, label_smoothing=0.1, smooth_others=True, reduction="mean")
    assert_same(others, F.cross_entropy(torch.cat(expected), real, label_smoothing=0.1 * V / (V - 1)), "others")
    expected_loss = F.cross_entropy(torch.cat(expected), real, label_smoothing=0.1, reduction="sum")
    assert_same_gradients(loss, expected_loss, model)


@variants
def test_packed_equals_padded(options):
    model = model_of(**options)
    source, shifted, target = batch()
    layouts = layouts_of(SequenceLayout.packed)
    source_layout, target_layout = layouts.values()
    flat = source_layout.pack(source), target_layout.pack(shifted), target_layout.pack(target)
    assert_same(model(*flat[:2], **layouts), target_layout.pack(model(source, shifted)), "logits")
    options = {"label_smoothing": 0.1, "smooth_others": True, "reduction": "mean"}
    packed, padded = model.loss(*flat, **layouts, **options), model.loss(source, shifted, target, **options)
    assert_same_gradients(packed, padded, model)
    none = {"reduction": "none"}
    assert_same(
        model.loss(*flat, **layouts, **none), target_layout.pack(model.loss(source, shifted, target, **none)), "none"
    )


@pytest.mark.parametrize("totals", [(None, 16), (16, None), (16, 16)], ids=["target", "source", "both"])
def test_rows_after_a_packed_batch_change_nothing(totals):
    model = model_of()
    source, shifted, target = batch()
    lengths = torch.tensor(SOURCE_LENGTHS), torch.tensor(TARGET_LENGTHS)
    exact = [SequenceLayout.packed(lengths[0], 7), SequenceLayout.packed(lengths[1], 6)]
    wide = [SequenceLayout.packed(n, m, total=t) for n, m, t in zip(lengths, (7, 6), totals, strict=True)]
    losses = []
    for source_layout, target_layout in (wide, exact):
        flat = [source_layout.pack(source), target_layout.pack(shifted), target_layout.pack(target)]
        flat[2][11:] = -100
        losses.append(model.loss(*flat, source_layout=source_layout, target_layout=target_layout))
    assert_same_gradients(losses[0], losses[1], model)


@torch.inference_mode()
@pytest.mark.parametrize(
    "options, chunks",
    by_turns([*VARIANTS.values(), {"num_kv_heads": 2, "norm": "rms", "activation": "swiglu"}], [[1] * 6, [3, 1, 2]]),
    ids=str,
)
def test_cached_decoding_equals_uncached(options, chunks):
    model = model_of(**options).eval()
    source, shifted, _ = batch()
    padded, packed = SequenceLayout.from_ids(source), SequenceLayout.packed(torch.tensor(SOURCE_LENGTHS), 7)
    memory = model.encode(source)
    expected = model.decode(shifted, memory, memory_layout=padded)
    nothing = (None, None)
    for encoded in ((memory, padded), (packed.pack(memory), packed)):
        for with_cache, with_steps in ((encoded, nothing), (nothing, encoded)):  # what computes the memory's keys
            cache = model.new_cache(3, 6, with_cache[0], memory_layout=with_cache[1])
            parts = []
            for start, size in zip(torch.tensor([0, *chunks]).cumsum(0).tolist(), chunks, strict=False):
                tokens = shifted[:, start : start + size]
                parts.append(model.decode(tokens, with_steps[0], memory_layout=with_steps[1], cache=cache))
            assert_same(torch.cat(parts, 1), expected, "hidden states")


@torch.inference_mode()
def test_beams_decode_over_one_memory():
    model = model_of().eval()
    source, _, _ = batch()
    layout, memory = SequenceLayout.from_ids(source), model.encode(source)
    tokens = torch.randint(0, V, (6, 4))
    cache = model.new_cache(6, 5, memory, memory_layout=layout)
    assert cache.group_sizes == [2, 2, 2]
    first = model.decode(tokens[:, :3], None, cache=cache)
    order = torch.tensor([1, 0, 3, 3, 5, 4])
    cache.fork([[1, 0], [1, 1], [1, 0]])
    last = model.decode(tokens[:, 3:], None, cache=cache)
    twice = memory.repeat_interleave(2, 0)
    wide = SequenceLayout.padded(layout.seqlens.repeat_interleave(2), 7)
    whole = torch.cat([tokens[order, :3], tokens[:, 3:]], 1)
    expected = model.decode(whole, twice, memory_layout=wide)
    assert_same(first[order], expected[:, :3], "first")
    assert_same(last, expected[:, 3:], "after reordering")


def test_the_layout_of_the_source_is_detected():
    model = model_of()
    source, shifted, _ = batch()
    detected = model(source, shifted)
    explicit = model(source, shifted, source_layout=SequenceLayout.padded(torch.tensor(SOURCE_LENGTHS), 7))
    assert torch.equal(detected, explicit)
    wider = F.pad(source, (0, 4))
    assert_same(model(wider, shifted), detected, "more padding")
    everything = model(source, shifted, source_layout=SequenceLayout.padded(torch.tensor([7, 7, 7]), 7))
    assert (everything - detected).abs().max() > 1e-3


@pytest.mark.parametrize("average", [True, False])
def test_attention_maps(average):
    model = model_of(dropout=0.5)
    model.train()
    source, shifted, _ = batch()
    maps = model.attention_maps(source, shifted, average_heads=average)
    heads = () if average else (4,)
    assert {name: tuple(value.shape) for name, value in maps.items()} == {
        "encoder": (2, 3, *heads, 7, 7),
        "decoder": (2, 3, *heads, 6, 6),
        "cross": (2, 3, *heads, 6, 7),
    }
    assert model.training and not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    for value in maps.values():
        assert_same(value.sum(-1), torch.ones_like(value[..., 0]), "sum over the keys")
    assert (maps["decoder"].triu(1) == 0).all()
    for row, length in enumerate(SOURCE_LENGTHS):
        assert (maps["cross"][:, row, ..., length:] == 0).all() and (maps["encoder"][:, row, ..., length:] == 0).all()
    # The first layer's map, by hand.
    attention = model.encoder.layers[0].self_attn
    y = model.encoder.layers[0].norm1(model.eval().embedding(source))[2]
    q, k = (F.linear(y, w).unflatten(-1, (4, 4)).transpose(0, 1) for w in attention.in_proj_weight.split(16)[:2])
    expected = (q @ k.mT / 2).softmax(-1)
    assert_same(maps["encoder"][0, 2], expected.mean(0) if average else expected, "weights")


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2}, {"tie_embeddings": False}], ids=str)
def test_initialisation(options):
    model = Transformer(TransformerConfig(**{**SMALL, "d_model": 64, "d_ff": 96, **options}))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        elif "embedding" in name:
            assert abs(parameter.std() - 64**-0.5) < 0.1 * 64**-0.5 and parameter.abs().max() > 2 * 64**-0.5, name
        else:
            kv = 16 * model.config.num_kv_heads if options.get("num_kv_heads") else 64
            blocks = parameter.split([64, kv, kv]) if name.endswith("in_proj_weight") else [parameter]
            for block in blocks:
                # Uniform in +-sqrt(6 / (fan_in + fan_out)).
                bound = math.sqrt(6 / sum(block.shape))
                assert 0.95 * bound < block.abs().max() <= bound, name
                assert abs(block.std() - bound / math.sqrt(3)) < 0.1 * bound, name


def test_presets():
    base = Transformer.from_preset("base", vocab_size=100, device="meta")
    # 6 layers of (4 d^2 + FFN + 2 norms), 6 of (8 d^2 + FFN + 3 norms), 2 final norms, one embedding.
    ffn = 2 * 512 * 2048 + 2048 + 512
    expected = 6 * (4 * 512**2 + ffn + 4 * 512) + 6 * (8 * 512**2 + ffn + 6 * 512) + 2 * 1024 + 100 * 512
    assert sum(p.numel() for p in base.parameters()) == expected
    paper = Transformer.from_preset("base-paper", vocab_size=100, device="meta")
    assert paper.encoder.norm is None and paper.decoder.norm is None
    c = paper.config
    assert (c.norm_first, c.positions, c.dropout, c.attention_dropout) == (False, "interleaved", 0.1, 0.0)
    assert (c.d_model, c.d_ff, c.num_heads, c.num_encoder_layers, c.num_decoder_layers) == (512, 2048, 8, 6, 6)
    big = Transformer.from_preset("big", vocab_size=100, device="meta").config
    assert (big.d_model, big.d_ff, big.num_heads, big.dropout) == (1024, 4096, 16, 0.3)
    assert Transformer.from_preset("tiny", vocab_size=100, dropout=0.0).config.dropout == 0.0


def test_dropouts_of_the_config_arrive():
    model = model_of(dropout=0.1, attention_dropout=0.2, activation_dropout=0.3)
    for layer in (*model.encoder.layers, *model.decoder.layers):
        assert (layer.dropout1.p, layer.self_attn.dropout, layer.dropout.p) == (0.1, 0.2, 0.3)
    assert model.embedding.dropout == 0.1
    source, shifted, _ = batch()
    assert not torch.equal(model(source, shifted), model(source, shifted))
    model.eval()
    assert torch.equal(model(source, shifted), model(source, shifted))


def test_learned_positions_are_drawn_again():
    model = model_of(embedding_norm=True, positions="learned")
    for name in ("source_position.table", "target_position.table", "source_embedding_norm.weight"):
        nn.init.constant_(model.get_parameter(name), 7.0)
    model.reset_parameters()
    assert 0.01 < model.source_position.table.std() < 0.03 and 0.01 < model.target_position.table.std() < 0.03
    assert not torch.equal(model.source_position.table, model.target_position.table)
    assert (model.source_embedding_norm.weight == 1).all()


def test_dropout_of_embeddings_follows_their_norm():
    model = model_of(embedding_norm=True, positions="learned", dropout=0.5)
    seen = []
    for stack in (model.encoder, model.decoder):
        stack.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    source, shifted, _ = batch()
    model(source, shifted)
    for x in seen:
        assert 0.3 < (x == 0).double().mean() < 0.7  # of what a norm gives, hardly anything would be 0
    seen.clear()
    model.eval()(source, shifted)
    assert all(x.all() for x in seen)


# What is packed doesn't depend on where the norms stand.
@pytest.mark.parametrize("packed", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("norm_first", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_compiles_in_one_graph(norm_first, packed):
    model = model_of(norm_first=norm_first, dropout=0.1, num_encoder_layers=1, num_decoder_layers=1)
    source, shifted, target = batch()
    layouts = layouts_of(SequenceLayout.packed) if packed else {}
    if packed:
        source_layout, target_layout = layouts.values()
        source, shifted, target = source_layout.pack(source), target_layout.pack(shifted), target_layout.pack(target)
    losses = []
    for loss in (torch.compile(model.loss, backend="aot_eager", fullgraph=True), model.loss):
        torch.manual_seed(3)
        losses.append(loss(source, shifted, target, **layouts))
    assert_same_gradients(losses[0], losses[1], model)


@torch.inference_mode()
def test_a_cached_step_compiles_in_one_graph():
    model = model_of(num_encoder_layers=1, num_decoder_layers=1).eval()
    source, shifted, _ = batch()
    memory, layout = model.encode(source), SequenceLayout.from_ids(source)
    cache = model.new_cache(3, 7, memory, memory_layout=layout)

    def step(tokens):
        return model.decode(tokens, None, cache=cache)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    outputs = []
    for i in range(6):
        host_step = cache.begin(1)  # the host's part
        outputs.append(compiled(shifted[:, i : i + 1]))
        cache.commit(host_step)
    hidden = torch.cat(outputs, 1)
    assert_same(hidden, model.decode(shifted, memory, memory_layout=layout), "hidden states")
    # One graph for the first token, one for any later one: the length is no constant in it.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before <= 2
    assert cache.lengths == [6, 6, 6]
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"KVCache\.begin"):
        compiled(shifted[:, :1])


@pytest.mark.gpu
def test_no_host_sync_in_training_and_decoding():
    model = model_of(dropout=0.1, attention_dropout=0.1).float().cuda()
    tensors = [tensor.cuda() for tensor in batch()]
    layouts, flat_layouts = (
        {name: layout.to("cuda") for name, layout in layouts_of(kind).items()}
        for kind in (SequenceLayout.padded, SequenceLayout.packed)
    )
    flat = [flat_layouts["source_layout"].pack(tensors[0])]
    flat += [flat_layouts["target_layout"].pack(tensor) for tensor in tensors[1:]]

    def work():
        model.train()
        model.loss(*tensors, **layouts).backward()
        model.loss(*flat, **flat_layouts).backward()
        model.eval()
        with torch.inference_mode():
            memory = model.encode(tensors[0])
            cache = model.new_cache(6, 6, memory, memory_layout=layouts["source_layout"])
            tokens = tensors[1].repeat_interleave(2, 0)
            model.decode(tokens[:, :3], None, cache=cache)
            cache.fork([[1, 0], [1, 1], [1, 0]])
            model.decode(tokens[:, 3:4], None, cache=cache)
            model.decode(tokens[:, 4:5], None, cache=cache)

    work()  # compiles the kernels
    try:
        torch.cuda.set_sync_debug_mode("error")
        work()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_bfloat16_autocast_and_cache():
    model = model_of().float()
    source, shifted, target = batch()
    exact = model.loss(source, shifted, target)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(source, shifted, target)
        loss.backward()
        assert loss.dtype == torch.float32 and abs(loss - exact) < 0.02 * exact
        assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())
        with torch.inference_mode():
            memory = model.encode(source)
            cache = model.new_cache(3, 6, memory, memory_layout=SequenceLayout.from_ids(source))
            assert cache.k.dtype == torch.bfloat16
            hidden = torch.cat([model.decode(shifted[:, i : i + 2], None, cache=cache) for i in (0, 2, 4)], 1)
            whole = model.decode(shifted, memory, memory_layout=SequenceLayout.from_ids(source))
    assert (hidden - whole).abs().max() < 0.1 * whole.abs().max()


def test_bad_input():
    model = model_of()
    source, shifted, _ = batch()
    layout = SequenceLayout.packed(torch.tensor([3, 2]), 3)
    for name, call in (
        ("source", lambda: model(source.masked_fill(source == source.max(), 23), shifted)),
        ("target", lambda: model(source, shifted - 1)),
        ("max_len", lambda: model(torch.ones(1, 13, dtype=torch.int64), shifted[:1])),
        ("max_len", lambda: model(source[:1], torch.ones(1, 14, dtype=torch.int64))),
        ("layout", lambda: model(source[0], shifted[0])),
        ("source", lambda: model(source.float(), shifted)),
        ("layout", lambda: model.encode(source[2], layout)),
    ):
        with pytest.raises(ValueError, match=rf"\b{name}\b"):
            call()
    with torch.inference_mode():
        cache = model.new_cache(3, 20, model.encode(source))
        model.decode(torch.ones(3, 10, dtype=torch.int64), None, cache=cache)
        with pytest.raises(ValueError, match=r"\bmax_len\b"):
            model.decode(torch.ones(3, 3, dtype=torch.int64), None, cache=cache)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("first_position", {"positions": "learned", "first_position": 1}),
        ("first_position", {"positions": "relative", "first_position": 1}),
        ("positions", {"positions": "rotary"}),
        ("d_model", {"embedding_norm": True, "d_model": 15, "num_heads": 3}),
        ("embedding_norm", {"embedding_norm": "yes"}),
    ],
)
def test_bad_settings(name, settings):
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        TransformerConfig(**{"vocab_size": 5, **settings})
    for wrong, arguments in (("preset", {"name": "huge"}), ("d_modle", {"name": "tiny", "d_modle": 3})):
        with pytest.raises(ValueError, match=rf"\b{wrong}\b"):
            Transformer.from_preset(vocab_size=5, **arguments)
    assert TransformerConfig(5, positions="learned", d_model=15, num_heads=3).d_model == 15
