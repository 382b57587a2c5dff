"""BART, mBART and Pegasus as models.Transformer and back: logits, losses, tokens through every engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import fastformer
from fastformer.generation import score
from fastformer.integrations import from_huggingface, to_huggingface
from fastformer.models import Transformer
from fastformer.nn import SequenceLayout

PAD, EOS = 1, 2
SOURCE = torch.tensor([[0, 9, 33, 8, 5, EOS], [0, 12, 6, EOS, PAD, PAD], [0, EOS, PAD, PAD, PAD, PAD]])
TARGET = torch.tensor([[EOS, 0, 4, 7, 7], [EOS, 0, 31, 2, 9], [EOS, 0, 3, 3, 58]])
SIZES = {
    "vocab_size": 60, "d_model": 24, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 3,
    "decoder_attention_heads": 3, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "max_position_embeddings": 32,
    "pad_token_id": PAD, "bos_token_id": 0, "eos_token_id": EOS, "decoder_start_token_id": EOS,
    "forced_eos_token_id": None,
}  # fmt: skip
IS_OLD = int(transformers.__version__.split(".")[0]) < 5  # there BART has one matrix for both sides
FAMILIES = {"BART": "Bart", "mBART": "MBart", "Pegasus": "Pegasus"}
VARIANTS: dict[str, dict[str, Any]] = {
    "real": {"activation_function": "gelu"},
    "scaled, bias": {"scale_embedding": True, "bias": True},
    "zero pad": {"zero_pad": True, "activation_function": "relu"},
    "untied": {"tie_word_embeddings": False, "activation_function": "gelu_new", "bias": True},
    "shallow": {"encoder_layers": 3, "decoder_layers": 1, "d_model": 36, "activation_function": "swish"},
}
families = pytest.mark.parametrize("family", FAMILIES)
variants = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())


def made(
    family: str = "BART",
    dtype: torch.dtype = torch.float64,
    *,
    bias: bool = False,
    zero_pad: bool = False,
    seed: int = 3,
    scale: float = 0.4,
    **options: Any,
) -> Any:
    """A model of transformers whose every parameter matters."""
    name = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**SIZES | options)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).to(dtype).eval()
    torch.manual_seed(seed)  # however much the version at hand has drawn
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if family != "Pegasus" or "embed_positions" not in name:  # sines
                size = 0.3 if parameter.dim() == 1 or "shared" in name or "embed_tokens" in name else scale
                parameter.copy_(torch.randn_like(parameter) * size + (1 if "norm" in name and "weight" in name else 0))
        if zero_pad:
            for embedding in (model.model.encoder.embed_tokens, model.model.decoder.embed_tokens):
                embedding.weight[PAD] = 0
        if bias:
            model.final_logits_bias.copy_(torch.randn_like(model.final_logits_bias))
    return model


def logits_of(model: Any) -> Tensor:
    return model(SOURCE, attention_mask=(SOURCE != PAD).long(), decoder_input_ids=TARGET).logits


@families
@variants
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_logits_are_the_same(dtype, tolerance, family, options):
    theirs = made(family, dtype, **options)
    ours = from_huggingface(theirs)
    config = ours.config
    assert config.positions == ("halves" if family == "Pegasus" else "learned")
    assert config.embedding_norm == (family != "Pegasus") and config.norm_first == (family != "BART")
    assert config.embed_pad != options.get("zero_pad", False)
    assert config.output_bias == options.get("bias", False)
    expected, found = logits_of(theirs), ours(SOURCE, TARGET)
    assert found.dtype == dtype and (found - expected).abs().max() < tolerance * expected.abs().max()
    layouts = SequenceLayout.packed((SOURCE != PAD).sum(1), 6), SequenceLayout.packed(torch.tensor([5, 4, 2]), 5)
    packed = [layout.pack(ids) for layout, ids in zip(layouts, (SOURCE, TARGET), strict=True)]
    found = ours(*packed, source_layout=layouts[0], target_layout=layouts[1])
    assert (found - layouts[1].pack(expected)).abs().max() < tolerance * expected.abs().max()


@families
@pytest.mark.parametrize("options", [VARIANTS["scaled, bias"], VARIANTS["untied"]], ids=["tied", "untied"])
def test_scores_are_the_log_probabilities_of_theirs(family, options):
    theirs = made(family, **options)
    targets = [[*row[1:], EOS] for row in TARGET.tolist()]  # behind the start token
    expected = logits_of(theirs).log_softmax(-1)
    found = score(from_huggingface(theirs), SOURCE, [row[:4] for row in targets])
    for values, log_probs, target in zip(found, expected, targets, strict=True):
        assert values == pytest.approx(log_probs[range(4), target[:4]].tolist(), abs=1e-5)


@families
@variants
def test_a_model_goes_there_and_back(family, options, tmp_path):
    theirs = made(family, **options)
    ours = from_huggingface(theirs)
    back = to_huggingface(ours)
    assert type(back) is type(theirs)
    again = from_huggingface(back)
    assert again.config == ours.config
    for (name, weight), (_, other) in zip(ours.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(weight, other), name
    state = back.state_dict()
    untied = options.get("tie_word_embeddings") is False
    for name, weight in theirs.state_dict().items():
        if "embed_positions" in name:
            weight, state[name] = weight[2:], state[name][2:]  # nobody reads the first two
        elif name == "model.shared.weight" and untied:
            continue  # nor this
        torch.testing.assert_close(state[name], weight, rtol=0, atol=1e-6 if family == "Pegasus" else 0, msg=name)
    expected = logits_of(back)
    back.save_pretrained(tmp_path / "theirs")
    saved = type(back).from_pretrained(tmp_path / "theirs", dtype=torch.float64)
    if IS_OLD and untied:  # a BART's or mBART's sides, ours or not, it loads without the matrix that they share
        for stack in (saved.model.encoder, saved.model.decoder):
            stack.embed_tokens.weight = saved.model.shared.weight
    torch.testing.assert_close(logits_of(saved), expected, rtol=1e-6, atol=1e-6)
    for model, folder in ((ours, "ours"), (ours.quantize(), "int8")):
        model.save_pretrained(tmp_path / folder)
        loaded = Transformer.from_pretrained(tmp_path / folder)
        assert loaded.config == ours.config and loaded.precision == model.precision
        torch.testing.assert_close(loaded(SOURCE, TARGET), model(SOURCE, TARGET), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", [VARIANTS["scaled, bias"], VARIANTS["untied"]], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["BART", "mBART"])
def test_the_loss_and_its_gradients_are_the_same(family, options):
    theirs = made(family, **options)
    ours = from_huggingface(theirs)
    labels = torch.tensor([[0, 4, 7, 7, 2], [0, 31, 2, -100, -100], [0, 3, -100, -100, -100]])
    loss = ours.loss(SOURCE, TARGET, labels, reduction="mean")
    expected = F.cross_entropy(logits_of(theirs).flatten(0, 1), labels.flatten())
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    for side, stack in (("source", "encoder"), ("target", "decoder")):
        table = theirs.get_parameter(f"model.{stack}.embed_positions.weight").grad[2:]
        torch.testing.assert_close(ours.get_parameter(f"{side}_position.table").grad, table, rtol=1e-6, atol=1e-8)
        for kind in ("weight", "bias"):
            norm = theirs.get_parameter(f"model.{stack}.layernorm_embedding.{kind}").grad
            found = ours.get_parameter(f"{side}_embedding_norm.{kind}").grad
            torch.testing.assert_close(found, norm, rtol=1e-6, atol=1e-8)


def until_end(row: list[int]) -> list[int]:
    return row[: row.index(EOS) + 1] if EOS in row else row


# Beams end alike where what ends is best by far; see from_huggingface.
LONG = {"max_new_tokens": 20, "min_new_tokens": 20}
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 20, "no_repeat_ngram_size": 2},
    "forced": {"max_new_tokens": 9, "forced_bos_token_id": 0, "forced_eos_token_id": EOS},
    "beams": {**LONG, "num_beams": 4, "length_penalty": 0.0},
    "beams that end": {"max_new_tokens": 20, "min_new_tokens": 5, "num_beams": 4, "length_penalty": 0.0},
    "beams that repeat nothing": {**LONG, "num_beams": 4, "length_penalty": 0.0, "no_repeat_ngram_size": 3},
}


@pytest.mark.parametrize("engine", ["cpp", "kv_cache", "recompute", "graph"])
@pytest.mark.parametrize("family", ["BART", "mBART"])
@pytest.mark.parametrize("variant", ["scaled, bias", "untied"])
@pytest.mark.parametrize("search", SEARCHES)
def test_generates_the_same_tokens(search, variant, family, engine):
    theirs = made(family, torch.float32, seed=24, scale=0.9, **VARIANTS[variant])
    if search == "beams that end":
        theirs.final_logits_bias[0, EOS] += 12
    options = SEARCHES[search]
    with torch.inference_mode():
        expected = theirs.generate(
            input_ids=SOURCE, attention_mask=(SOURCE != PAD).long(), do_sample=False, renormalize_logits=True, **options
        )
    rows = [until_end(row[1:]) for row in expected.tolist()]
    assert len({*map(tuple, rows)}) > 1
    assert search != "beams that end" or all(row[-1] == EOS and len(row) < 20 for row in rows)
    found = from_huggingface(theirs).generate(SOURCE, engine=engine, **options)
    assert [until_end(row) for row in found.tolist()] == rows


def test_the_pad_row_of_a_tied_matrix_is_kept_for_the_output():
    theirs = made("BART")
    config = from_huggingface(theirs).config
    config.embed_pad = False
    ours = Transformer(config, dtype=torch.float64).eval()
    assert ours.embedding.weight[PAD].any()
    if not IS_OLD:
        back = to_huggingface(ours)
        assert not back.config.tie_word_embeddings and back.lm_head.weight[PAD].any()
        torch.testing.assert_close(logits_of(back), ours(SOURCE, TARGET), rtol=1e-6, atol=1e-6)


def test_dtype_and_mode_stay():
    theirs = made("BART", torch.bfloat16).train()
    ours = from_huggingface(theirs)
    assert ours.training and {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    assert ours.source_position.table.data_ptr() != theirs.model.encoder.embed_positions.weight.data_ptr()
    assert to_huggingface(ours).dtype == torch.bfloat16


def test_what_they_lack_is_refused():
    with pytest.raises(ValueError, match="expected encoder_ffn_dim and decoder_ffn_dim to be the same, got 40 and 44"):
        from_huggingface(made(decoder_ffn_dim=44))
    with pytest.raises(ValueError, match="expected a BART with a decoder_start_token_id, got none"):
        from_huggingface(made(decoder_start_token_id=None))
    theirs = made()
    theirs.model.encoder.layernorm_embedding = torch.nn.Identity()
    with pytest.raises(ValueError, match=r"of a BART, got none called model.encoder.layernorm_embedding.weight"):
        from_huggingface(theirs)
    ours = from_huggingface(made())
    ours.config.source_vocab_size, ours.config.tie_embeddings = 50, False
    with pytest.raises(ValueError, match="expected a BART, with one vocabulary, got one of its own for the source"):
        to_huggingface(Transformer(ours.config))


@families
@pytest.mark.parametrize("fused_loss", [False, True])
def test_an_accelerated_model_is_converted(fused_loss, family):
    theirs = made(family, bias=True)
    expected = logits_of(theirs)
    if fused_loss and family != "BART":
        pytest.skip("accelerate doesn't know this family's head")
    fastformer.accelerate(theirs, fused_loss=fused_loss)
    torch.testing.assert_close(from_huggingface(theirs)(SOURCE, TARGET), expected, rtol=1e-9, atol=1e-9)


OPTIONS: dict[str, dict[str, Any]] = {
    "bart": {"positions": "learned", "embedding_norm": True, "norm_first": False},
    "mbart": {"positions": "learned", "embedding_norm": True, "norm_first": True},
    "marian": {"positions": "halves", "norm_first": False},
    "pegasus": {"positions": "halves", "norm_first": True},
    "t5": {
        "positions": "relative", "norm": "rms", "bias": False, "attention_bias": False, "scale_embedding": False,
        "norm_first": True, "layer_norm_eps": 1e-6,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("eos", [(1, 7), (7, 1, 4), (1,)])
def test_every_end_of_a_sequence_goes_there_and_back(kind, eos) -> None:
    special = fastformer.models.SpecialIds(pad=0, eos=eos, unk=None, start=0)
    sizes = {"vocab_size": 40, "d_model": 16, "num_heads": 2, "d_ff": 24, "max_len": 12, "special_ids": special}
    torch.manual_seed(0)
    ours = Transformer.from_preset("tiny", **({"layer_norm_eps": 1e-5} | OPTIONS[kind] | sizes)).eval()
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
        assert found[0].tolist() == [0, end]
