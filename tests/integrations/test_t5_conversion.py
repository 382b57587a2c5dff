"""T5, its version 1.1 and mT5 as models.Transformer and back: logits, losses, tokens through every engine."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.models.t5.modeling_t5 import T5Attention

import fastformer
from fastformer.integrations import from_huggingface, to_huggingface
from fastformer.models import Transformer, TransformerConfig
from fastformer.nn import MultiheadAttention, RelativePositionBias, SequenceLayout
from tests.checks import assert_accurate
from tests.integrations import test_t5 as t5

PAD, EOS = 0, 1
LENGTHS = torch.tensor([27, 9, 1])  # the first reaches beyond max_distance
SOURCE = torch.randint(3, 60, (3, 27), generator=torch.Generator().manual_seed(1))
SOURCE = SOURCE.masked_fill(torch.arange(27) >= LENGTHS[:, None], PAD)
SOURCE[torch.arange(3), LENGTHS - 1] = EOS
TARGET = F.pad(torch.randint(2, 60, (3, 21), generator=torch.Generator().manual_seed(2)), (1, 0))
SIZES: dict[str, Any] = {
    "vocab_size": 60, "d_model": 24, "d_kv": 4, "num_heads": 6, "d_ff": 40, "num_layers": 3, "num_decoder_layers": 2,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 14, "pad_token_id": PAD,
    "eos_token_id": EOS, "decoder_start_token_id": PAD,
}  # fmt: skip
FLAN = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "is_untied": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "1.0": {},
    "1.1": FLAN,
    "few heads": {**FLAN, "num_heads": 4},
    "mt5": {**FLAN, "num_heads": 3},
    "tied, unscaled": {"feed_forward_proj": "gated-silu", "tie_word_embeddings": False},
    "odd buckets": {"relative_attention_num_buckets": 11, "relative_attention_max_distance": 9},
    "zero pad, shallow": {"zero_pad": True, "num_layers": 3, "num_decoder_layers": 1, "feed_forward_proj": "gelu"},
    "d_kv of 8": {"d_kv": 8, "num_heads": 3},
}
variants = pytest.mark.parametrize("variant", VARIANTS)
V5 = int(transformers.__version__.split(".")[0]) >= 5


def made(
    variant: str = "1.0",
    dtype: torch.dtype = torch.float64,
    *,
    scale: float = 0.2,
    seed: int = 3,
    **options: Any,
) -> Any:
    """A model of transformers whose every parameter matters."""
    if not V5 and variant == "tied, unscaled":
        pytest.skip("before version 5 a T5 scales where it is tied")
    options = VARIANTS[variant] | options
    is_untied, zero_pad = options.pop("is_untied", False), options.pop("zero_pad", False)
    name = "MT5" if variant == "mt5" else "T5"
    config = getattr(transformers, f"{name}Config")(**SIZES | options)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).to(dtype).eval()
    torch.manual_seed(seed)  # however much the version at hand has drawn
    if is_untied:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            size = 1.0 if "relative" in name or "shared" in name else scale
            parameter.copy_(torch.randn_like(parameter) * size + (1 if "norm" in name else 0))
        if zero_pad:
            model.shared.weight[PAD] = 0
    return model


@pytest.fixture
def exactly() -> Iterator[None]:
    """transformers rounds the norms' statistics to fp32, before version 5 the softmax, too: here it doesn't."""
    with t5.exactly():
        yield


def logits_of(model: Any) -> Tensor:
    return model(SOURCE, attention_mask=(SOURCE != PAD).long(), decoder_input_ids=TARGET).logits


@variants
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_logits_are_the_same(dtype, tolerance, variant, exactly):
    theirs = made(variant, dtype)
    ours = from_huggingface(theirs)
    config = ours.config
    assert config.positions == "relative" and config.num_heads * SIZES["d_kv"] == 24 or variant == "d_kv of 8"
    assert config.tie_embeddings != VARIANTS[variant].get("is_untied", False)
    assert config.scale_output == VARIANTS[variant].get("tie_word_embeddings", True)
    assert config.embed_pad == (variant != "zero pad, shallow")
    expected, found = logits_of(theirs), ours(SOURCE, TARGET)
    assert found.dtype == dtype and (found - expected).abs().max() < tolerance * expected.abs().max()
    layouts = SequenceLayout.packed(LENGTHS, 27), SequenceLayout.packed(torch.tensor([22, 5, 1]), 22, total=31)
    packed = [layouts[0].pack(SOURCE), F.pad(SequenceLayout.packed(torch.tensor([22, 5, 1]), 22).pack(TARGET), (0, 3))]
    found = ours(*packed, source_layout=layouts[0], target_layout=layouts[1])
    expected = layouts[1].pack(expected)[:28]
    assert (found[:28] - expected).abs().max() < tolerance * expected.abs().max() and found.isfinite().all()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("num_buckets, max_distance", [(32, 128), (8, 5), (11, 40), (4, 1000), (64, 33)])
def test_the_buckets_are_theirs(num_buckets, max_distance, is_causal):
    distances = torch.arange(-3 * max_distance, 3 * max_distance + 1)
    ours = RelativePositionBias(2, num_buckets, max_distance, is_causal)
    expected = T5Attention._relative_position_bucket(distances, not is_causal, num_buckets, max_distance)
    assert torch.equal(ours.buckets(distances), expected) and len(expected.unique()) > 2
    bias = ours(torch.tensor([[3, 4], [0, 1]]), torch.arange(5))
    assert bias.shape == (2, 2, 2, 5)
    assert torch.equal(bias[0, 1, 1], ours.table[ours.buckets(torch.arange(5) - 4), 1])


def test_a_bias_on_packed_sequences_is_one_on_rows():
    torch.manual_seed(5)
    module = MultiheadAttention(8, 2, bias=False, batch_first=True, dtype=torch.float64)
    bias, x = torch.randn(1, 2, 4, 4, dtype=torch.float64), torch.randn(9, 8, dtype=torch.float64)
    layout = SequenceLayout.packed(torch.tensor([4, 0, 3]), 4, total=9)
    options = {"need_weights": False, "is_causal": True, "position_bias": bias}
    found = module(x, x, x, layout=layout, **options)[0]
    assert not found[7:].any()  # behind the last sequence there is nothing to attend to
    for begin, end in ((0, 4), (4, 7)):
        part, length = x[None, begin:end], end - begin
        rows = module(part, part, part, **options | {"position_bias": bias[..., :length, :length]})[0]
        torch.testing.assert_close(found[begin:end], rows[0])
    mask = torch.ones(4, 4, dtype=torch.bool).triu(1)
    part = x[None, :4]
    for each in (mask, torch.zeros(4, 4).masked_fill(mask, -torch.inf).double()):
        again = module(part, part, part, attn_mask=each, need_weights=False, position_bias=bias)[0]
        torch.testing.assert_close(again[0], found[:4])
    with pytest.raises(ValueError, match="batched query, and batch_first, along with a position_bias"):
        module(x, x, x, need_weights=False, position_bias=bias)


@variants
def test_a_model_goes_there_and_back(variant, tmp_path, exactly):
    theirs = made(variant)
    ours = from_huggingface(theirs)
    back = to_huggingface(ours)
    assert type(back).__name__ == "T5ForConditionalGeneration"
    assert back.config.num_heads == theirs.config.num_heads
    again = from_huggingface(back)
    assert again.config == ours.config
    for (name, weight), (_, other) in zip(ours.state_dict().items(), again.state_dict().items(), strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-15 if variant == "d_kv of 8" else 0, atol=0, msg=name)
    state, expected = back.state_dict(), theirs.state_dict()
    assert state.keys() == expected.keys()
    for name, weight in expected.items():
        # Multiplied and divided by a root of 8, which is rounded.
        is_rounded = variant == "d_kv of 8" and name.endswith(".q.weight")
        torch.testing.assert_close(state[name], weight, rtol=1e-15 if is_rounded else 0, atol=0, msg=name)
    logits = logits_of(back)
    back.save_pretrained(tmp_path / "theirs")
    saved = type(back).from_pretrained(tmp_path / "theirs", dtype=torch.float64)
    torch.testing.assert_close(logits_of(saved), logits, rtol=1e-6, atol=1e-6)
    for model, folder in ((ours, "ours"), (ours.quantize(), "int8")):
        model.save_pretrained(tmp_path / folder)
        loaded = Transformer.from_pretrained(tmp_path / folder)
        assert loaded.config == ours.config and loaded.precision == model.precision
        torch.testing.assert_close(loaded(SOURCE, TARGET), model(SOURCE, TARGET), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("variant", ["1.0", "1.1", "few heads"])
def test_the_loss_and_its_gradients_are_the_same(variant, packed, exactly):
    labels = F.pad(TARGET[:, 1:], (0, 1), value=EOS)
    lengths = torch.tensor([22, 13, 2])
    labels = labels.masked_fill(torch.arange(22) >= lengths[:, None], -100)
    gradients: list[dict[str, Tensor]] = []
    plain_model = made(variant, torch.float32)
    models = [copy.deepcopy(plain_model).double(), plain_model]
    ours = from_huggingface(plain_model)
    for theirs in models:
        F.cross_entropy(logits_of(theirs).flatten(0, 1), labels.flatten()).backward()
        gradients.append({name: p.grad for name, p in theirs.named_parameters()})
    if packed:
        layouts = SequenceLayout.packed(LENGTHS, 27), SequenceLayout.packed(lengths, 22)
        inputs = [
            layout.pack(ids) for layout, ids in zip((*layouts, layouts[1]), (SOURCE, TARGET, labels), strict=True)
        ]
        loss = ours.loss(*inputs, source_layout=layouts[0], target_layout=layouts[1], reduction="mean")
    else:
        loss = ours.loss(SOURCE, TARGET, labels, reduction="mean")
    loss.backward()
    exact, plain = gradients
    heads = models[0].config.num_heads
    for side in ("encoder", "decoder"):
        name = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        found = ours.get_parameter(f"{side}_position_bias.table").grad
        assert exact[name].abs().max() > 1e-4
        # The scores' gradients, and so the mask's.
        assert_accurate(found[:, :heads], plain[name], exact[name], "dmask")
        assert not found[:, heads:].any()
        ff = 1 if side == "encoder" else 2
        for mine, name in (
            (f"{side}.norm.weight", f"{side}.final_layer_norm.weight"),
            (f"{side}.layers.0.linear2.weight", f"{side}.block.0.layer.{ff}.DenseReluDense.wo.weight"),
            (f"{side}.layers.1.norm1.weight", f"{side}.block.1.layer.0.layer_norm.weight"),
        ):
            torch.testing.assert_close(ours.get_parameter(mine).grad.double(), exact[name], rtol=1e-4, atol=1e-6)
        grad = ours.get_submodule(f"{side}.layers.0.self_attn").in_proj_weight.grad
        inner = 4 * heads
        q = exact[f"{side}.block.0.layer.0.SelfAttention.q.weight"] / 2  # the weights are twice theirs
        torch.testing.assert_close(grad[:inner].double(), q, rtol=1e-4, atol=1e-6)
        assert not grad.view(3, 24, 24)[:, inner:].any()  # heads of zeros stay


def until_end(row: list[int]) -> list[int]:
    return row[: row.index(EOS) + 1] if EOS in row else row


# Beams end alike where what ends is best by far; see from_huggingface.
LONG = {"max_new_tokens": 24, "min_new_tokens": 24}
SEARCHES: dict[str, dict[str, Any]] = {
    # There an ngram may begin with the token that starts the decoder, which is PAD.
    "greedy": {"max_new_tokens": 24, "no_repeat_ngram_size": 2, "suppress_tokens": [PAD]},
    "forced": {"max_new_tokens": 9, "forced_bos_token_id": 7, "forced_eos_token_id": EOS},
    "beams": {**LONG, "num_beams": 4, "length_penalty": 0.0},
    "beams that repeat nothing": {**LONG, "num_beams": 4, "length_penalty": 0.0, "no_repeat_ngram_size": 3},
}


@pytest.mark.parametrize("engine", ["cpp", "kv_cache", "recompute"])
@pytest.mark.parametrize("variant", ["1.0", "1.1", "few heads"])
@pytest.mark.parametrize("search", SEARCHES)
def test_generates_the_same_tokens(search, variant, engine):
    theirs = made(variant, torch.float32, seed=2, scale=0.6)
    options = SEARCHES[search]
    with torch.inference_mode():
        expected = theirs.generate(
            input_ids=SOURCE, attention_mask=(SOURCE != PAD).long(), do_sample=False, renormalize_logits=True, **options
        )
    rows = [until_end(row[1:]) for row in expected.tolist()]
    assert len({*map(tuple, rows)}) > 1 and max(len({*row}) for row in rows) > 3
    found = from_huggingface(theirs).generate(SOURCE, engine=engine, **options)
    assert [until_end(row) for row in found.tolist()] == rows


@pytest.mark.parametrize("sizes", [[1] * 22, [7, 1, 9, 5], [22]], ids=str)
@torch.inference_mode()
def test_pieces_of_a_target_are_one_target(sizes):
    ours = from_huggingface(made("1.1"))
    layout = SequenceLayout.from_ids(SOURCE, PAD)
    memory = ours.encode(SOURCE)
    expected = ours.decode(TARGET, memory, memory_layout=layout)
    cache = ours.new_cache(3, 22, memory, memory_layout=layout)
    parts = [ours.decode(part, None, cache=cache) for part in TARGET.split(sizes, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-10, atol=1e-10)
    # Rows that are not of one length.
    cache = ours.new_cache(3, 22, memory, memory_layout=layout)
    lengths = torch.tensor([5, 1, 3])
    prompts = TARGET[:, :5].masked_fill(torch.arange(5) >= lengths[:, None], PAD)
    ours.decode(prompts, None, layout=SequenceLayout.padded(lengths, 5), cache=cache)
    following = torch.stack([TARGET[row, length : length + 4] for row, length in enumerate(lengths)])
    found = ours.decode(following, None, cache=cache)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(found[row], expected[row, length : length + 4], rtol=1e-10, atol=1e-10)


def test_what_it_looks_at_sums_to_one():
    ours = from_huggingface(made())
    maps = ours.attention_maps(SOURCE, TARGET)
    for name, depth in (("encoder", 3), ("decoder", 2), ("cross", 2)):
        assert maps[name].shape[:3] == (depth, 3, 6)
        torch.testing.assert_close(maps[name].sum(-1), torch.ones_like(maps[name][..., 0]))
    alone = ours.encoder_position_bias.table
    with torch.no_grad():
        alone.zero_()
    assert not torch.allclose(ours.attention_maps(SOURCE, TARGET)["encoder"], maps["encoder"])


def test_engines_that_add_no_bias_say_so():
    ours = from_huggingface(made(dtype=torch.float32))
    with pytest.raises(ValueError, match="engine 'graph' can't decode a Transformer: relative positions are a bias on"):
        ours.generate(SOURCE, engine="graph", max_new_tokens=2)


def test_dtype_and_mode_stay():
    theirs = made("1.0", torch.bfloat16).train()
    ours = from_huggingface(theirs)
    assert ours.training and {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    assert ours.config.dropout == 0.1 and ours(SOURCE, TARGET).isfinite().all()
    assert ours.embedding.weight.data_ptr() != theirs.shared.weight.data_ptr()
    assert to_huggingface(ours).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "options, message",
    [
        ({"d_kv": 8}, "heads fit into d_model, .*, got num_heads 6 of d_kv 8 and d_model 24"),
        ({"d_kv": 5, "num_heads": 2}, "heads fit into d_model, .*, got num_heads 2 of d_kv 5 and d_model 24"),
        ({"feed_forward_proj": "gated-relu"}, "expected a feed_forward_proj out of .*, got 'gated-relu'"),
        ({"pad_token_id": None}, "expected a T5 with a pad_token_id and an eos_token_id, got None and 1"),
        ({"relative_attention_max_distance": 4}, "max_distance to be more than half of num_buckets, 4, got 4"),
    ],
)
def test_settings_that_we_lack_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        from_huggingface(made(**options))


def test_changed_models_are_refused():
    theirs = made()
    theirs.encoder.block[1].layer[0].SelfAttention.o = nn.Identity()
    with pytest.raises(ValueError, match=r"of a T5, got none called encoder.block.1.layer.0.SelfAttention.o.weight"):
        from_huggingface(theirs)
    theirs = made()
    theirs.decoder.extra = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"of a T5, got others as well: decoder.extra.bias, decoder.extra.weight"):
        from_huggingface(theirs)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"norm": "layer"}, "expected a T5, with norm='rms', got 'layer'"),
        ({"bias": True}, "expected a T5, with bias=False, got True"),
        ({"scale_embedding": True}, "with scale_embedding=False, got True"),
        ({"window_size": 3}, "with window_size=None, got 3"),
        ({"num_kv_heads": 1}, "as many heads of keys as of queries, got 1"),
        ({"activation_dropout": 0.0}, r"with one probability of dropout, got \[0.0, 0.1\]"),
        ({"tie_embeddings": False}, "one embedding for source and target, got two that differ"),
        ({"tie_embeddings": False, "source_vocab_size": 30}, "one vocabulary, got one of its own for the source"),
    ],
)
def test_options_that_a_t5_lacks_are_refused(options, message):
    form = {"positions": "relative", "norm": "rms", "bias": False, "scale_embedding": False}
    sizes = {"d_model": 8, "num_heads": 2, "d_ff": 8, "num_encoder_layers": 1, "num_decoder_layers": 1}
    with pytest.raises(ValueError, match=message):
        to_huggingface(Transformer(TransformerConfig(20, **sizes, **form | options)))


def test_the_pad_row_of_a_tied_matrix_is_kept_for_the_output(exactly):
    config = from_huggingface(made()).config
    config.embed_pad = False
    ours = Transformer(config, dtype=torch.float64).eval()
    assert ours.embedding.weight[PAD].any()
    back = to_huggingface(ours)
    assert back.lm_head.weight[PAD].any() and not back.shared.weight[PAD].any()
    torch.testing.assert_close(logits_of(back), ours(SOURCE, TARGET), rtol=1e-9, atol=1e-9)


def test_an_accelerated_model_is_converted():
    theirs = made()
    expected = logits_of(theirs)
    fastformer.accelerate(theirs)
    torch.testing.assert_close(from_huggingface(theirs)(SOURCE, TARGET), expected, rtol=1e-5, atol=1e-5)
