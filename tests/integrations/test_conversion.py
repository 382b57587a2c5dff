"""transformers' Marian as models.Transformer and back: logits, losses, tokens, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import MarianConfig, MarianMTModel, UMT5Config
from transformers import UMT5ForConditionalGeneration as UMT5

import fastformer
from fastformer.integrations import from_huggingface, to_huggingface
from fastformer.models import Transformer, TransformerConfig
from fastformer.ops._library import record_backends

SOURCE = torch.tensor([[5, 9, 33, 8, 0], [12, 6, 0, 59, 59], [7, 0, 59, 59, 59]])
TARGET = torch.tensor([[59, 4, 7, 7], [59, 31, 2, 9], [59, 3, 3, 58]])
SIZES = {
    "vocab_size": 60, "d_model": 24, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 3,
    "decoder_attention_heads": 3, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "max_position_embeddings": 32,
    "pad_token_id": 59, "eos_token_id": 0, "decoder_start_token_id": 59, "forced_eos_token_id": None,
    "activation_function": "swish", "scale_embedding": True,
}  # fmt: skip
IS_OLD = int(transformers.__version__.split(".")[0]) < 5
SOURCE_SIZE = 60 if IS_OLD else 63  # before 5, MarianMTModel makes both of one size
VARIANTS: dict[str, dict[str, Any]] = {
    "real": {"bias": True},
    "no bias": {},
    "embedded pad": {"embed_pad": True},
    "gelu, unscaled": {"activation_function": "gelu", "scale_embedding": False},
    "relu, starts by itself": {"activation_function": "relu", "decoder_start_token_id": 2},
    "separate": {
        "share_encoder_decoder_embeddings": False,
        "vocab_size": SOURCE_SIZE,
        "decoder_vocab_size": 60,
        "bias": True,
    },
    "untied": {"tie_word_embeddings": False, "share_encoder_decoder_embeddings": False, "embed_pad": True},
    "tanh": {"activation_function": "gelu_new", "tie_word_embeddings": False},
}
variants = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())


def marian(dtype: torch.dtype = torch.float64, *, bias: bool = False, embed_pad: bool = False, **options: Any) -> Any:
    model = MarianMTModel(MarianConfig(**SIZES | options)).to(dtype).eval()
    torch.manual_seed(3)  # however much the version at hand has drawn
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" not in name:
                scale = 0.2 if parameter.dim() == 1 or "shared" in name or "embed" in name else 0.4
                parameter.copy_(torch.randn_like(parameter) * scale + (1 if "norm.weight" in name else 0))
        if not embed_pad:
            for embedding in (model.model.encoder.embed_tokens, model.model.decoder.embed_tokens):
                embedding.weight[model.config.pad_token_id] = 0
        if bias:
            model.final_logits_bias.copy_(torch.randn_like(model.final_logits_bias))
    return model


def logits_of(model: Any) -> Tensor:
    return model(SOURCE, attention_mask=(SOURCE != 59).long(), decoder_input_ids=TARGET).logits


@variants
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_logits_are_the_same(dtype, tolerance, options):
    theirs = marian(dtype, **options)
    ours = from_huggingface(theirs)
    assert ours.config.embed_pad == options.get("embed_pad", False) or ours.config.special_ids.start != 59
    assert ours.config.output_bias == options.get("bias", False) and not ours.training
    expected, found = logits_of(theirs), ours(SOURCE, TARGET)
    assert found.dtype == dtype and (found - expected).abs().max() < tolerance * expected.abs().max()


@variants
def test_a_model_goes_there_and_back(options, tmp_path):
    ours = from_huggingface(marian(**options))
    theirs = to_huggingface(ours)
    again = from_huggingface(theirs)
    assert again.config == ours.config
    for (name, weight), (_, other) in zip(ours.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(weight, other), name
    expected = logits_of(theirs)
    assert (ours(SOURCE, TARGET) - expected).abs().max() < 1e-6 * expected.abs().max()  # its table is of fp32
    theirs.save_pretrained(tmp_path / "theirs")
    saved = MarianMTModel.from_pretrained(tmp_path / "theirs", dtype=torch.float64)
    torch.testing.assert_close(logits_of(saved), expected, rtol=1e-6, atol=1e-6)
    ours.save_pretrained(tmp_path / "ours")
    loaded = Transformer.from_pretrained(tmp_path / "ours")
    torch.testing.assert_close(loaded(SOURCE, TARGET), expected, rtol=1e-6, atol=1e-6)


def test_the_pad_row_of_a_tied_matrix_is_kept_for_the_output():
    torch.manual_seed(5)
    options = {"norm_first": False, "positions": "halves", "layer_norm_eps": 1e-5, "d_model": 16, "num_heads": 2}
    sizes = {"d_ff": 24, "num_encoder_layers": 1, "num_decoder_layers": 2, "max_len": 12}
    special = fastformer.models.SpecialIds(pad=59, eos=0, unk=1, start=59)
    config = TransformerConfig(60, **options, **sizes, special_ids=special)
    ours = Transformer(config, dtype=torch.float64).eval()
    assert ours.embedding.weight[59].any()
    theirs = to_huggingface(ours)
    assert not theirs.config.tie_word_embeddings
    torch.testing.assert_close(ours(SOURCE, TARGET), logits_of(theirs), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", [VARIANTS["real"], VARIANTS["untied"]], ids=["real", "untied"])
def test_the_loss_and_its_gradients_are_the_same(options):
    theirs = marian(**options)
    ours = from_huggingface(theirs)
    labels = torch.tensor([[4, 7, 7, 0], [31, 2, 0, -100], [3, 0, -100, -100]])
    loss = ours.loss(SOURCE, TARGET, labels, reduction="mean")
    expected = F.cross_entropy(logits_of(theirs).flatten(0, 1), labels.flatten())
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    name = "model.decoder.layers.1.encoder_attn.v_proj.bias"
    grad = ours.decoder.layers[1].multihead_attn.in_proj_bias.grad.chunk(3)[2]
    torch.testing.assert_close(grad, theirs.get_parameter(name).grad, rtol=1e-6, atol=1e-9)
    if options.get("bias"):
        smooth = F.cross_entropy(logits_of(theirs).flatten(0, 1), labels.flatten(), label_smoothing=0.2)
        found = ours.loss(SOURCE, TARGET, labels, reduction="mean", label_smoothing=0.2)
        torch.testing.assert_close(found.double(), smooth, rtol=1e-6, atol=0)
        probabilities = logits_of(theirs).softmax(-1)[labels != -100]
        errors = probabilities.sum(0) - F.one_hot(labels[labels != -100], 60).sum(0)
        torch.testing.assert_close(ours.output_bias.grad, errors / 9, rtol=1e-5, atol=1e-8)


def generated(theirs: Any, **options: Any) -> list[list[int]]:
    with torch.inference_mode():
        found = theirs.generate(
            input_ids=SOURCE, attention_mask=(SOURCE != 59).long(), max_new_tokens=20, do_sample=False, **options
        )
    return [until_end(row[1:]) for row in found.tolist()]


def until_end(row: list[int]) -> list[int]:
    return row[: row.index(0) + 1] if 0 in row else row


def opinionated(theirs: Any, *, embedding: float = 0.2, seed: int = 5) -> Any:
    """Weights that make it say different things, and end sometimes."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if parameter.dim() == 2 and "positions" not in name:
                scale = embedding if "embed" in name or "shared" in name else 0.8
                parameter.copy_(torch.randn_like(parameter) * scale * (parameter != 0))
        theirs.model.decoder.layers[-1].final_layer_norm.weight.mul_(3)
        theirs.final_logits_bias.mul_(0.5)
        theirs.final_logits_bias[0, 0] += 1
        theirs.final_logits_bias[0, 59] -= 50  # penalties of transformers count the start token
    return theirs


# Beams end alike where what ends is best by far; see from_huggingface.
SEARCHES: dict[str, tuple[dict[str, float], dict[str, Any]]] = {
    "greedy": ({}, {"repetition_penalty": 1.5}),
    "beams": ({}, {"num_beams": 4, "length_penalty": 0.0, "min_new_tokens": 20}),
    "beams that end": ({"embedding": 0.1}, {"num_beams": 4, "length_penalty": 0.0}),
}


@pytest.mark.parametrize("engine", ["cpp", "kv_cache"])
@pytest.mark.parametrize("variant", ["real", "separate", "embedded pad"])
@pytest.mark.parametrize("search", SEARCHES)
def test_generates_the_same_tokens(search, variant, engine):
    weights, options = SEARCHES[search]
    theirs = opinionated(marian(torch.float32, **VARIANTS[variant]), seed=19, **weights)
    expected = generated(theirs, **options)
    assert len({*map(tuple, expected)}) > 1
    found = from_huggingface(theirs).generate(SOURCE, max_new_tokens=20, engine=engine, **options)
    assert [until_end(row) for row in found.tolist()] == expected


def test_a_model_whose_layers_are_accelerated_is_converted():
    theirs = marian(bias=True)
    expected = logits_of(theirs)
    fastformer.accelerate(theirs)
    with record_backends() as backends:  # swish is fused
        torch.testing.assert_close(logits_of(theirs), expected, rtol=1e-9, atol=1e-9)
    assert "feed_forward_fwd" in {name for name, _ in backends}
    torch.testing.assert_close(from_huggingface(theirs)(SOURCE, TARGET), expected, rtol=1e-9, atol=1e-9)


def test_dtype_mode_and_device_stay():
    theirs = marian(torch.bfloat16).train()
    ours = from_huggingface(theirs)
    assert ours.training and ours.embedding.weight.dtype == torch.bfloat16
    assert ours.embedding.weight.data_ptr() != theirs.lm_head.weight.data_ptr()
    assert to_huggingface(ours).dtype == torch.bfloat16


class Subclass(MarianMTModel):  # type: ignore[misc]
    """May do something else."""


def test_what_is_no_relative_is_refused():
    sizes = {"vocab_size": 20, "d_model": 8, "d_ff": 8, "d_kv": 4, "num_heads": 2, "num_layers": 1}
    with pytest.raises(ValueError, match="got UMT5ForConditionalGeneration: UMT5 has a table of relative positions in"):
        from_huggingface(UMT5(UMT5Config(**sizes)))
    with pytest.raises(ValueError, match="expected one of transformers' .*MarianMTModel, .*, got Linear"):
        from_huggingface(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="expected one of transformers' .*MarianMTModel, .*, got Subclass"):
        from_huggingface(Subclass(MarianConfig(**SIZES)))
    with pytest.raises(ValueError, match="expected a models.Transformer, got Linear"):
        to_huggingface(nn.Linear(2, 2))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"decoder_attention_heads": 2}, "expected encoder_attention_heads and decoder_attention_heads to be the same"),
        ({"decoder_ffn_dim": 44}, "expected encoder_ffn_dim and decoder_ffn_dim to be the same, got 40 and 44"),
        ({"activation_function": "tanh"}, "expected an activation_function out of .*, got 'tanh'"),
    ],
)
def test_settings_that_we_lack_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        from_huggingface(marian(**options))


def test_changed_models_are_refused():
    theirs = marian()
    theirs.model.decoder.layers[1].fc1 = nn.Sequential(theirs.model.decoder.layers[1].fc1)
    with pytest.raises(ValueError, match=r"got none called model.decoder.layers.1.fc1.weight"):
        from_huggingface(theirs)
    theirs = marian()
    theirs.model.encoder.register_parameter("extra", nn.Parameter(torch.zeros(2)))
    with pytest.raises(ValueError, match=r"got others as well: model.encoder.extra"):
        from_huggingface(theirs)
    theirs = marian()
    theirs.model.encoder.embed_positions.weight.data[3, 5] += 0.1
    with pytest.raises(ValueError, match="to be Marian's sines and cosines"):
        from_huggingface(theirs)
    theirs = marian()
    theirs.model.encoder.layers[0].final_layer_norm.eps = 1e-3
    with pytest.raises(ValueError, match="expected norms of one eps"):
        from_huggingface(theirs)


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"positions": "concatenated"},
            "positions='halves', .* \\(Marian\\); .*; got positions='concatenated', embedding",
        ),
        ({"embedding_norm": True}, "positions='learned', embedding_norm=True, norm_first=False \\(BART\\); or"),
        ({"layer_norm_eps": 1e-6}, "with layer_norm_eps=1e-05, got 1e-06"),
        ({"norm": "rms"}, "with norm='layer', got 'rms'"),
        ({"window_size": 3}, "with window_size=None, got 3"),
        ({"num_kv_heads": 1}, "as many heads of keys as of queries, got 1"),
        ({"activation": "swiglu"}, "an activation out of .*, got 'swiglu'"),
    ],
)
def test_options_that_marian_lacks_are_refused(options, message):
    form = {"norm_first": False, "positions": "halves", "layer_norm_eps": 1e-5}
    sizes = {"d_model": 8, "num_heads": 2, "d_ff": 8, "num_encoder_layers": 1, "num_decoder_layers": 1}
    with pytest.raises(ValueError, match=message):
        to_huggingface(Transformer(TransformerConfig(20, **sizes, **form | options)))


def test_torchs_transformer_takes_the_layers():
    config = TransformerConfig(
        20, d_model=16, num_heads=2, d_ff=24, num_encoder_layers=1, num_decoder_layers=2, attention_bias=True
    )
    ours = Transformer(config, dtype=torch.float64).eval()
    theirs = nn.Transformer(
        16, 2, 1, 2, 24, layer_norm_eps=1e-6, batch_first=True, norm_first=True, dtype=torch.float64
    ).eval()
    stacks = {name: value for name, value in ours.state_dict().items() if name.startswith(("encoder.", "decoder."))}
    theirs.load_state_dict(stacks)
    source, target = torch.randint(3, 20, (2, 5)), torch.randint(3, 20, (2, 4))
    mask = nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64)
    expected = theirs(ours.embedding(source), ours.embedding(target), tgt_mask=mask, tgt_is_causal=True)
    torch.testing.assert_close(ours.decode(target, ours.encode(source)), expected)
    ours.load_state_dict(theirs.state_dict(), strict=False)
