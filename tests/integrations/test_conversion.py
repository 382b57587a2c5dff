"""Encoder-decoders convert to models.Transformer and back, with the same logits, losses and tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.models.t5.modeling_t5 import T5Attention

import fastformer
from fastformer.integrations import from_huggingface, to_huggingface
from fastformer.models import GPT, GPTConfig, SpecialIds, Transformer, TransformerConfig
from fastformer.nn import MultiheadAttention, RelativePositionBias, SequenceLayout
from fastformer.ops import record_backends
from tests.checkpoints.present import skip_before
from tests.covering import by_turns, each
from tests.integrations.conversions import CASES, LEARNED, opinionated, t5, until_end

cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def some(*names: str) -> Any:
    return pytest.mark.parametrize("case", [CASES[name] for name in names], ids=names)


@cases
def test_logits_are_the_same(case) -> None:
    theirs, tolerance = case.make(), 1e-10
    ours = from_huggingface(theirs)
    config, options = ours.config, case.options
    if case.is_t5:
        assert config.tie_embeddings != options.get("is_untied", False)
    else:
        assert config.output_bias == options.get("bias", False)
    assert config.embed_pad != options.get("zero_pad", case.family == "Marian") or config.special_ids.start == 2
    with case.exactly():
        expected = case.logits(theirs)
    found = ours(*case.batch)
    assert found.dtype == torch.float64 and not ours.training
    assert (found - expected).abs().max() < tolerance * expected.abs().max()
    layouts = case.layouts()
    packed = [layout.pack(ids) for layout, ids in zip(layouts, case.batch, strict=True)]
    # A batch may have room behind its last sequence.
    roomy = SequenceLayout.packed(layouts[1].seqlens, layouts[1].max_seqlen, total=len(packed[1]) + 3)
    found = ours(packed[0], F.pad(packed[1], (0, 3)), source_layout=layouts[0], target_layout=roomy)
    assert (found[:-3] - layouts[1].pack(expected)).abs().max() < tolerance * expected.abs().max()
    assert found.isfinite().all()


# Of each family, and with each kind of matrices that the file may have: those that are also written and read.
WRITTEN = [
    CASES[name]
    for name in (
        *("Marian real", "Marian separate", "Marian untied", "Bart scaled, bias", "Bart untied", "MBart untied"),
        *("Pegasus zero pad", "M2M100 real", "T5 1.0", "T5 1.1", "T5 tied, unscaled", "T5 d_kv of 8", "MT5 few heads"),
    )
]


@cases
def test_a_model_survives_the_conversion_and_back(case, tmp_path) -> None:
    theirs = case.make()
    ours = from_huggingface(theirs)
    back = to_huggingface(ours)
    assert type(back) is (transformers.T5ForConditionalGeneration if case.is_t5 else type(theirs))
    # Weights of queries are multiplied and divided by a root of 8, which is rounded.
    tolerance = 1e-15 if case.options.get("d_kv") == 8 else 0
    again = from_huggingface(back)
    assert again.config == ours.config
    torch.testing.assert_close(again.state_dict(), ours.state_dict(), rtol=tolerance, atol=0)
    untied = case.options.get("tie_word_embeddings") is False and not case.is_t5
    state = back.state_dict()
    for name, weight in theirs.state_dict().items():
        if "embed_positions" in name and case.family in LEARNED:
            weight, state[name] = weight[2:], state[name][2:]  # the first two aren't read
        elif (name == "model.shared.weight" and untied) or name not in state:
            continue  # nor this
        is_sine = "embed_positions" in name  # whose table is of fp32
        torch.testing.assert_close(state[name], weight, rtol=tolerance, atol=1e-6 if is_sine else 0, msg=name)
    with case.exactly():
        expected = case.logits(back)
        assert (ours(*case.batch) - expected).abs().max() < 1e-6 * expected.abs().max()
        if case not in WRITTEN:
            return
        back.save_pretrained(tmp_path / "theirs")
        saved = type(back).from_pretrained(tmp_path / "theirs", dtype=torch.float64)
        torch.testing.assert_close(case.logits(saved), expected, rtol=1e-6, atol=1e-6)
    ours.save_pretrained(tmp_path / "ours")
    loaded = Transformer.from_pretrained(tmp_path / "ours")
    assert loaded.config == ours.config
    torch.testing.assert_close(loaded(*case.batch), ours(*case.batch), rtol=1e-6, atol=1e-6)


BEAMS = {"num_beams": 4, "length_penalty": 0.0}
# Of these families, by the number of new tokens: searches, and how the model is drawn for them.
SEARCHES: dict[tuple[str, ...], tuple[int, dict[str, dict[str, Any]]]] = {
    ("Marian real", "Marian separate", "Marian embedded pad"): (20, {
        "greedy": {"repetition_penalty": 1.5},
        "beams": {**BEAMS, "min_new_tokens": 20},
        "beams that end": BEAMS,
    }),
    ("Bart scaled, bias", "Bart untied", "MBart scaled, bias", "MBart untied"): (20, {
        "greedy": {"no_repeat_ngram_size": 2},
        "forced": {"max_new_tokens": 9, "forced_bos_token_id": 0, "forced_eos_token_id": 2},
        "beams": {**BEAMS, "min_new_tokens": 20},
        "beams that end": {**BEAMS, "min_new_tokens": 5},
        "beams that repeat nothing": {**BEAMS, "min_new_tokens": 20, "no_repeat_ngram_size": 3},
    }),
    ("T5 1.0", "T5 1.1", "T5 few heads", "T5 wide heads"): (24, {
        # There an ngram may begin with the token that starts the decoder, which is PAD.
        "greedy": {"no_repeat_ngram_size": 2, "suppress_tokens": [0]},
        "forced": {"max_new_tokens": 9, "forced_bos_token_id": 7, "forced_eos_token_id": 1},
        "beams": {**BEAMS, "min_new_tokens": 24},
        "beams that repeat nothing": {**BEAMS, "min_new_tokens": 24, "no_repeat_ngram_size": 3},
    }),
}  # fmt: skip
ENGINES = {"Marian": ("cpp", "kv_cache"), "T5": ("cpp", "kv_cache", "recompute")}


@pytest.mark.parametrize(
    "name, search, options, engine",
    [
        case
        for names, (limit, searches) in SEARCHES.items()
        for case in by_turns(
            names,
            [(search, {"max_new_tokens": limit} | options) for search, options in searches.items()],
            ENGINES.get(names[0].split()[0], ("cpp", "kv_cache", "recompute", "graph")),
        )
    ],
    ids=lambda value: value if isinstance(value, str) else "options",
)
def test_generates_the_same_tokens(name, search, options, engine) -> None:
    case = CASES[name]
    (source, _), (pad, eos) = case.batch, case.ids
    if name == "Marian separate" and "num_beams" in options:
        skip_before(5, 18, "takes the beams' vocabulary for that of the source")
    if case.family == "Marian":
        theirs = opinionated(case.make(torch.float32), seed=19, embedding=0.1 if search == "beams that end" else 0.2)
    else:
        theirs = case.make(torch.float32, **({"seed": 2, "scale": 0.6} if case.is_t5 else {"seed": 24, "scale": 0.9}))
        if search == "beams that end":
            theirs.final_logits_bias[0, eos] += 12
        options = {"renormalize_logits": True} | options
    with torch.inference_mode():
        expected = theirs.generate(
            input_ids=source, attention_mask=(source != pad).long(), do_sample=False, **options
        ).tolist()
    rows = [until_end(row[1:], eos) for row in expected]
    assert len({*map(tuple, rows)}) > 1
    assert (
        case.family == "Marian" or search != "beams that end" or all(row[-1] == eos and len(row) < 20 for row in rows)
    )
    options.pop("renormalize_logits", None)
    found = from_huggingface(theirs).generate(source, engine=engine, **options)
    assert [until_end(row, eos) for row in found.tolist()] == rows


@pytest.mark.parametrize(
    "eos, kind, options",
    by_turns([(1, 7), (7, 1, 4), (1,)], [*{
        "bart": {"positions": "learned", "embedding_norm": True, "norm_first": False},
        "mbart": {"positions": "learned", "embedding_norm": True, "norm_first": True},
        "marian": {"positions": "halves", "norm_first": False},
        "pegasus": {"positions": "halves", "norm_first": True},
        "m2m_100": {"positions": "concatenated", "norm_first": True, "first_position": 1},
        "t5": {
            "positions": "relative", "norm": "rms", "bias": False, "attention_bias": False, "scale_embedding": False,
            "norm_first": True, "layer_norm_eps": 1e-6,
        },
    }.items()]),
)  # fmt: skip
def test_every_end_id_survives_the_conversion(kind, options, eos) -> None:
    special = SpecialIds(pad=0, eos=eos, unk=None, start=1 if kind == "m2m_100" else 0)
    sizes = {"vocab_size": 40, "d_model": 16, "num_heads": 2, "d_ff": 24, "max_len": 12, "special_ids": special}
    torch.manual_seed(0)
    ours = Transformer.from_preset("tiny", **({"layer_norm_eps": 1e-5} | options | sizes)).eval()
    theirs = to_huggingface(ours)
    assert theirs.config.model_type == kind
    expected: Any = [*eos] if len(eos) > 1 else eos[0]
    assert theirs.config.eos_token_id == theirs.generation_config.eos_token_id == expected
    assert from_huggingface(theirs).config.special_ids.eos == eos
    # Each of them ends what is generated, here and there.
    source = torch.tensor([[5, 6, 8, eos[0]]])
    for end in eos:
        bias = torch.zeros(40)
        bias[end] = 1e4
        found = theirs.generate(
            source, max_new_tokens=4, logits_processor=[lambda ids, logits, bias=bias: logits + bias]
        )
        assert found[0].tolist() == [special.start, end]


@pytest.mark.parametrize("eos", [(0,), (0, 3), ()])
def test_every_end_id_of_a_decoder_survives_the_conversion(eos) -> None:
    ids = SpecialIds(pad=0, eos=eos, unk=None)
    theirs = to_huggingface(GPT(GPTConfig(20, d_model=16, num_heads=2, num_layers=1, max_len=8, special_ids=ids)))
    assert from_huggingface(theirs).config.special_ids.eos == eos


@some("Marian real", "Bart real", "T5 1.0")
def test_the_pad_row_of_a_tied_matrix_is_kept_for_the_output(case) -> None:
    config = from_huggingface(case.make()).config
    config.embed_pad = False
    ours = Transformer(config, dtype=torch.float64).eval()
    pad = case.ids[0]
    assert ours.embedding.weight[pad].any()
    back = to_huggingface(ours)
    assert back.lm_head.weight[pad].any() and (case.is_t5 or not back.config.tie_word_embeddings)
    assert not back.get_encoder().embed_tokens.weight[pad].any()
    with case.exactly():
        torch.testing.assert_close(case.logits(back), ours(*case.batch), rtol=1e-6, atol=1e-6)


@some("Marian real", "Bart real", "T5 1.0")
def test_dtype_and_mode_stay(case) -> None:
    theirs = case.make(torch.bfloat16).train()
    ours = from_huggingface(theirs)
    assert ours.training and {p.dtype for p in ours.parameters()} == {torch.bfloat16} and ours.config.dropout == 0.1
    assert not {p.data_ptr() for p in ours.parameters()} & {p.data_ptr() for p in theirs.parameters()}
    assert ours(*case.batch).isfinite().all() and to_huggingface(ours).dtype == torch.bfloat16


@pytest.mark.parametrize("fused_loss", [False, True])
@some("Marian real", "Bart real", "MBart real", "Pegasus real", "T5 1.0")
def test_an_accelerated_model_is_converted(case, fused_loss) -> None:
    if fused_loss and case.family in ("MBart", "Pegasus"):
        pytest.skip("accelerate doesn't know this family's head")
    theirs = case.make()
    expected = case.logits(theirs)
    fastformer.accelerate(theirs, fused_loss=fused_loss)
    tolerance = 1e-5 if case.is_t5 else 1e-9
    with record_backends() as backends:
        torch.testing.assert_close(case.logits(theirs), expected, rtol=tolerance, atol=tolerance)
    assert case.family != "Marian" or "feed_forward_fwd" in {name for name, _ in backends}  # swish is fused
    torch.testing.assert_close(from_huggingface(theirs)(*case.batch), expected, rtol=tolerance, atol=tolerance)


def test_other_families_are_refused() -> None:
    sizes = {"vocab_size": 20, "d_model": 8, "d_ff": 8, "d_kv": 4, "num_heads": 2, "num_layers": 1}
    subclass = type("Subclass", (transformers.MarianMTModel,), {})  # may do something else
    for model, named in (
        (transformers.UMT5ForConditionalGeneration(transformers.UMT5Config(**sizes)), "UMT5"),
        (nn.Linear(2, 2), "MarianMTModel.*Linear"),
        (subclass(CASES["Marian real"].make().config), "MarianMTModel.*Subclass"),
    ):
        with pytest.raises(ValueError, match=named):
            from_huggingface(model)
    with pytest.raises(ValueError, match="Linear"):
        to_huggingface(nn.Linear(2, 2))


@pytest.mark.parametrize(
    "name, options, named",
    [
        ("Marian real", {"decoder_attention_heads": 2}, "encoder_attention_heads and decoder_attention_heads"),
        ("Marian real", {"decoder_ffn_dim": 44}, "decoder_ffn_dim .*40 and 44"),
        ("Marian real", {"activation_function": "tanh"}, "activation_function .*'tanh'"),
        ("Bart real", {"decoder_ffn_dim": 44}, "decoder_ffn_dim .*40 and 44"),
        ("Bart real", {"decoder_start_token_id": None}, r"\bdecoder_start_token_id\b"),
        ("M2M100 real", {"decoder_start_token_id": 1}, r"\bdecoder starts\b"),
        ("T5 1.0", {"feed_forward_proj": "gated-relu"}, "feed_forward_proj .*'gated-relu'"),
        ("T5 1.0", {"pad_token_id": None}, r"\bpad_token_id\b"),
        ("T5 1.0", {"relative_attention_max_distance": 4}, r"\bmax_distance\b.* 4"),
    ],
)
def test_unsupported_settings_of_a_family_are_refused(name, options, named) -> None:
    with pytest.raises(ValueError, match=named):
        from_huggingface(CASES[name].make(**options))


def replaced(module: str, name: str, new: Any) -> Any:
    return lambda theirs: setattr(theirs.get_submodule(module), name, new)


@pytest.mark.parametrize(
    "name, damage, named",
    [
        ("Marian real", replaced("model.decoder.layers.1", "fc1", nn.Sequential()), r"layers\.1\.fc1\.weight"),
        ("Marian real", replaced("model.encoder", "extra", nn.Parameter(torch.zeros(2))), r"model\.encoder\.extra"),
        ("Marian real", lambda m: m.model.encoder.embed_positions.weight.data.add_(0.1), "Marian's sines"),
        ("Marian real", replaced("model.encoder.layers.0.final_layer_norm", "eps", 1e-3), r"\beps\b"),
        ("Bart real", replaced("model.encoder", "layernorm_embedding", nn.Identity()), r"layernorm_embedding\.weight"),
        ("T5 1.0", replaced("encoder.block.1.layer.0.SelfAttention", "o", nn.Identity()), r"SelfAttention\.o\.weight"),
        ("T5 1.0", replaced("decoder", "extra", nn.Linear(2, 2)), r"decoder\.extra\.bias, decoder\.extra\.weight"),
    ],
)
def test_changed_models_are_refused(name, damage, named) -> None:
    theirs = CASES[name].make()
    damage(theirs)
    with pytest.raises(ValueError, match=named):
        from_huggingface(theirs)


@each(
    "positions, options, named",
    [
        ("halves", {"positions": "concatenated"}, "positions='halves', .*Marian.*positions='concatenated'"),
        ("halves", {"embedding_norm": True}, r"embedding_norm=True, norm_first=False \(BART\)"),
        ("halves", {"layer_norm_eps": 1e-6}, "layer_norm_eps=1e-05.* 1e-06"),
        ("halves", {"norm": "rms"}, "norm='layer'.* 'rms'"),
        ("halves", {"window_size": 3}, "window_size=None.* 3"),
        ("halves", {"num_kv_heads": 1}, "key heads.* 1"),
        ("halves", {"head_dim": 6}, "head_dim=None.* 6"),
        ("halves", {"bias": False}, r"\bbias=True.* False"),
        ("learned", {"scale_output": True}, "scale_output=False.* True"),
        ("halves", {"activation": "swiglu"}, "activation .*'swiglu'"),
        ("concatenated", {"norm_first": True, "first_position": 2}, "M2M100.*first_position=1.* 2"),
        ("concatenated", {"norm_first": True, "first_position": 1, "output_bias": True}, "M2M100.*output_bias"),
        ("concatenated", {"norm_first": True, "first_position": 1}, "M2M100.*decoder starts"),  # with PAD
        ("learned", {"source_vocab_size": 50, "tie_embeddings": False}, "one vocabulary"),
        ("relative", {"norm": "layer"}, "norm='rms'.* 'layer'"),
        ("relative", {"bias": True}, "bias=False.* True"),
        ("relative", {"scale_embedding": True}, "scale_embedding=False.* True"),
        ("relative", {"window_size": 3}, "window_size=None.* 3"),
        ("relative", {"activation_dropout": 0.0}, r"probability of dropout.*\[0\.0, 0\.1\]"),
        ("relative", {"tie_embeddings": False}, "one embedding"),
    ],
)
def test_options_that_a_library_lacks_are_refused(positions, options, named) -> None:
    form: dict[str, Any] = {"positions": positions, "norm_first": False, "layer_norm_eps": 1e-5}
    if positions == "relative":
        form = {"positions": "relative", "norm": "rms", "bias": False, "scale_embedding": False}
    elif positions == "learned":
        form["embedding_norm"] = True
    sizes = {"d_model": 8, "num_heads": 2, "d_ff": 8, "num_encoder_layers": 1, "num_decoder_layers": 1}
    with pytest.raises(ValueError, match=named):
        to_huggingface(Transformer(TransformerConfig(20, **sizes, **form | options)))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("num_buckets, max_distance", [(32, 128), (8, 5), (11, 40), (4, 1000), (64, 33)])
def test_the_buckets_are_transformers(num_buckets, max_distance, is_causal):
    distances = torch.arange(-3 * max_distance, 3 * max_distance + 1)
    ours = RelativePositionBias(2, num_buckets, max_distance, is_causal)
    expected = T5Attention._relative_position_bucket(distances, not is_causal, num_buckets, max_distance)
    assert torch.equal(ours.buckets(distances), expected) and len(expected.unique()) > 2
    bias = ours(torch.tensor([[3, 4], [0, 1]]), torch.arange(5))
    assert bias.shape == (2, 2, 2, 5)
    assert torch.equal(bias[0, 1, 1], ours.table[ours.buckets(torch.arange(5) - 4), 1])


def test_a_bias_on_packed_sequences_equals_one_on_rows():
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
    for blocked in (mask, torch.zeros(4, 4).masked_fill(mask, -torch.inf).double()):
        again = module(part, part, part, attn_mask=blocked, need_weights=False, position_bias=bias)[0]
        torch.testing.assert_close(again[0], found[:4])
    with pytest.raises(ValueError, match=r"\bposition_bias\b"):
        module(x, x, x, need_weights=False, position_bias=bias)


@torch.inference_mode()
def test_rows_of_several_lengths_are_continued():
    ours: Any = from_huggingface(CASES["T5 1.1"].make())
    source, target = CASES["T5 1.1"].batch
    layout = SequenceLayout.from_ids(source, 0)
    memory = ours.encode(source)
    expected = ours.decode(target, memory, memory_layout=layout)
    cache = ours.new_cache(3, 22, memory, memory_layout=layout)
    lengths = torch.tensor([5, 1, 3])
    prompts = target[:, :5].masked_fill(torch.arange(5) >= lengths[:, None], 0)
    ours.decode(prompts, None, layout=SequenceLayout.padded(lengths, 5), cache=cache)
    following = torch.stack([target[row, length : length + 4] for row, length in enumerate(lengths)])
    found = ours.decode(following, None, cache=cache)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(found[row], expected[row, length : length + 4], rtol=1e-10, atol=1e-10)


def test_attention_weights_sum_to_one():
    ours = from_huggingface(t5())
    maps = ours.attention_maps(*CASES["T5 1.0"].batch)
    for name, depth in (("encoder", 3), ("decoder", 2), ("cross", 2)):
        assert maps[name].shape[:3] == (depth, 3, 6)
        torch.testing.assert_close(maps[name].sum(-1), torch.ones_like(maps[name][..., 0]))
    alone = ours.encoder_position_bias.table
    with torch.no_grad():
        alone.zero_()
    assert not torch.allclose(ours.attention_maps(*CASES["T5 1.0"].batch)["encoder"], maps["encoder"])


def test_engines_without_a_bias_refuse_the_model():
    ours = from_huggingface(t5(dtype=torch.float32))
    with pytest.raises(ValueError, match=r"'graph'.*\brelative\b"):
        ours.generate(CASES["T5 1.0"].batch[0], engine="graph", max_new_tokens=2)
