"""Texts as people hold them keep their order, bad ones are named, batches fit in memory; pictures are drawn."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
import torch

from fastformer.baseline import LSTMSeq2Seq
from fastformer.data import ByteTokenizer
from fastformer.generation import Translator, draw_attention, generate
from fastformer.generation.translator import Scored
from fastformer.models import GPT, Transformer
from fastformer.models.pretrained import save_model

TEXTS = ["a", "a longer text", "mid size", "b" * 40, "x"]
FEW = {"max_new_tokens": 8}


@pytest.fixture(scope="module")
def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer.from_preset("tiny", vocab_size=259, d_model=32, d_ff=64, num_heads=4, max_len=64)


@pytest.fixture(scope="module")
def translator(model) -> Translator:
    return Translator(model, ByteTokenizer(), max_batch_size=64)


def test_order_is_kept_whatever_the_batches(translator) -> None:
    together = translator.translate(TEXTS, **FEW)
    assert together == [translator.translate(text, **FEW) for text in TEXTS]
    for read_ahead in (1, 2, 1000):
        assert list(translator.stream(iter(TEXTS), read_ahead=read_ahead, **FEW)) == together
    assert len(set(together)) > 1


def test_a_text_gives_a_text_and_texts_give_a_list(translator) -> None:
    together = translator.translate(TEXTS, **FEW)
    assert translator.translate(TEXTS[1], **FEW) == together[1]
    for texts in (
        tuple(TEXTS),
        iter(TEXTS),
        np.array(TEXTS),
        np.array(TEXTS, dtype=object),
        dict.fromkeys(TEXTS).keys(),
    ):
        assert translator.translate(texts, **FEW) == together
    assert translator.translate([]) == [] and list(translator.stream([])) == []


def test_what_is_no_text_is_named(translator) -> None:
    for wrong in (b"bytes", {"a": "b"}, None, 7):
        with pytest.raises(ValueError, match=f"expected a text, or a list of texts, got {type(wrong).__name__}"):
            translator.translate(wrong)
        with pytest.raises(ValueError, match=f"expected a text, or a list of texts, got {type(wrong).__name__}"):
            translator.stream(wrong)
    for text in (7, None, b"x", ["y"]):
        for translate in (translator.translate, lambda texts: list(translator.stream(texts))):
            with pytest.raises(ValueError, match=rf"texts\[1\]: expected a str, got {type(text).__name__}"):
                translate(["a", text])
    with pytest.raises(ValueError, match="expected texts to stream, got one str"):
        translator.stream("a text")


def test_options_are_checked_before_anything_is_read(translator) -> None:
    for options, message in (
        ({"num_beam": 2}, "no option 'num_beam' here; did you mean 'num_beams'?"),
        ({"return_dict_in_generate": True}, "give return_scores=True instead of return_dict_in_generate"),
        ({"num_beams": 300}, "num_beams of at most the vocabulary's 259"),
        ({"max_new_tokens": 65}, "expected max_new_tokens of at most 64"),
        ({"on_error": "ignore"}, "expected on_error to be 'stop' or 'skip', got 'ignore'"),
    ):
        for translate in (translator.translate, translator.stream):
            with pytest.raises(ValueError, match=message):
                translate([], **options)
    for read_ahead in (0, -1, 1.5):
        with pytest.raises(ValueError, match="expected read_ahead of at least 1"):
            translator.stream(["a"], read_ahead=read_ahead)
    for sizes in ({"max_batch_size": 0}, {"max_batch_bytes": 0}):
        with pytest.raises(ValueError, match=f"expected {next(iter(sizes))} to be an integer of at least 1"):
            Translator(translator.model, ByteTokenizer(), **sizes)
    with pytest.raises(ValueError, match="expected a fastformer.models.Transformer"):
        Translator(torch.nn.Linear(2, 2), ByteTokenizer())


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 4, "num_return_sequences": 3},
        {"do_sample": True, "num_return_sequences": 3, "top_k": 1},
    ],
    ids=["beams", "samples"],
)
def test_n_best_belongs_to_its_text(model, options) -> None:
    # Two texts a batch, the longest first: each text gets its own rows back, in order.
    translator = Translator(model.eval(), ByteTokenizer(), max_batch_size=6)
    tokenizer, device = ByteTokenizer(), torch.device("cpu")
    found = translator.translate(TEXTS, return_scores=True, **FEW, **options)
    for text, answers in zip(TEXTS, found, strict=True):
        ids = torch.tensor([[*tokenizer.encode(text), 1]], device=device)
        out = generate(model, ids, return_dict_in_generate=True, **FEW, **options)
        expected = [tokenizer.decode(row) for row in out.sequences.tolist()]
        assert [answer.text for answer in answers] == expected
        assert max(abs(answer.score - score) for answer, score in zip(answers, out.scores.tolist(), strict=True)) < 1e-4
    assert translator.translate(TEXTS, **FEW, **options) == [[answer.text for answer in row] for row in found]
    assert translator.translate(TEXTS[1], **FEW, **options) == [answer.text for answer in found[1]]
    assert list(translator.stream(["a", ""], **FEW, **options)) == [[answer.text for answer in found[0]], []]


def test_scores_on_request(translator) -> None:
    text, score = translator.translate("a", return_scores=True, **FEW)
    assert text == translator.translate("a", **FEW) and score < 0
    assert list(translator.stream(["a", " "], return_scores=True, **FEW)) == [
        Scored(text, score),
        Scored("", -math.inf),
    ]


def test_sampling_is_seeded_once_for_all_batches(model) -> None:
    # The same text in two batches: other draws, and the same ones again with the same seed.
    translator = Translator(model, ByteTokenizer(), max_batch_size=1)
    options = {"do_sample": True, "seed": 3, **FEW}
    found = translator.translate(["same text"] * 4, **options)
    assert len(set(found)) > 1 and found == translator.translate(["same text"] * 4, **options)
    for read_ahead in (1, 2):  # nor does a stream begin anew with each group
        assert list(translator.stream(["same text"] * 4, read_ahead=read_ahead, **options)) == found


def test_no_more_hypotheses_than_there_are() -> None:
    # This model says EOS and nothing else.
    model = LSTMSeq2Seq(vocab_size=259, d_model=32)
    model.output.weight.data.zero_()
    model.output.bias.data = torch.full((259,), -math.inf).index_fill(0, torch.tensor([1]), 0.0)
    found = Translator(model, ByteTokenizer()).translate(
        ["a", "b"], num_beams=3, num_return_sequences=2, return_scores=True
    )
    assert found == [[Scored("", 0.0)]] * 2


def test_errors_name_the_text(translator) -> None:
    with pytest.raises(ValueError, match="text 2: expected something to translate, got an empty text; on_error skip"):
        translator.translate(["a", " "])
    with pytest.raises(
        ValueError, match="text 1: expected at most 64 tokens, got 101: split it.*; skip_long or on_error"
    ):
        translator.translate(["x" * 100])
    with pytest.raises(ValueError, match="text 3: expected text, got the lone surrogate"):
        list(translator.stream(["a", "", "\ud800"], read_ahead=2))
    assert len(translator.encode("x" * 63)) == 64
    with pytest.raises(ValueError, match="at most 64 tokens, got 65"):
        translator.encode("x" * 64)


@pytest.mark.parametrize("read_ahead", [2, 100])
def test_bad_texts_are_skipped_in_their_place(translator, caplog, read_ahead) -> None:
    texts = ["a", "x" * 100, "", "x", "\ud800"]
    a, x = translator.translate(["a", "x"], **FEW)
    with caplog.at_level(logging.WARNING, "fastformer"):
        found = list(translator.stream(texts, read_ahead=read_ahead, on_error="skip", **FEW))
    assert found == [a, "", "", x, ""]
    said = [record.getMessage() for record in caplog.records]
    assert said[0].startswith("skipped text 2: expected at most 64 tokens, got 101")
    assert said[1].startswith("skipped text 5: expected text, got the lone surrogate")
    assert said[2:] == ["skipped 2 of 5 texts; their translations are empty"]
    assert translator.translate(texts, on_error="skip", **FEW) == found
    assert translator.translate(texts[:2], skip_long=True, **FEW) == found[:2]
    with pytest.raises(ValueError, match="text 5: expected text, got the lone surrogate"):
        list(translator.stream(texts, skip_long=True, **FEW))
    with pytest.raises(ValueError, match=r"texts\[0\]: expected a str, got int"):  # a mistake of the program
        translator.translate([7], on_error="skip")


def test_many_skipped_texts_do_not_flood_the_log(translator, caplog) -> None:
    assert translator.translate(["x" * 100] * 50, skip_long=True) == [""] * 50
    assert len(caplog.records) == 11 and caplog.records[-1].getMessage().startswith("skipped 50 of 50 texts")


def test_each_module_is_left_in_its_mode(model) -> None:
    translator = Translator(model.train(), ByteTokenizer())
    model.encoder.eval()
    modes = [module.training for module in model.modules()]
    for run in (
        lambda: translator.translate(["a"], **FEW),
        lambda: translator.attention("a"),
        lambda: next(translator.stream(["a", "b"], read_ahead=1, **FEW)),
        lambda: pytest.raises(ValueError, translator.translate, ["x" * 100]),
    ):
        run()
        assert [module.training for module in model.modules()] == modes
    model.eval()


@pytest.mark.parametrize("kind", [Transformer, LSTMSeq2Seq])
def test_attention_is_that_of_evaluation(kind) -> None:
    # With dropout on, no two calls would agree.
    model: Transformer | LSTMSeq2Seq
    if kind is Transformer:
        model = Transformer.from_preset("tiny", vocab_size=259, d_model=32, d_ff=64, num_heads=4, dropout=0.5)
    else:
        model = LSTMSeq2Seq(vocab_size=259, d_model=32, dropout=0.5)
    translator = Translator(model.eval(), ByteTokenizer())
    expected = translator.attention("abc")
    model.train()
    source, target, weights = translator.attention("abc")
    assert (source, target) == expected[:2] and torch.equal(weights, expected[2])
    assert model.training


def test_attention_and_its_picture(translator, tmp_path) -> None:
    source, target, weights = translator.attention("zwölf")
    assert weights.shape == (2, 4, len(target), len(source)) and source[-1] == "</s>"
    assert (weights.sum(-1) - 1).abs().max() < 1e-5
    ids = torch.tensor([translator.encode("zwölf")])
    found = generate(translator.model.eval(), ids)
    assert target == translator.tokenizer.tokens(found[0].tolist())
    expected = translator.model.attention_maps(ids, torch.tensor([[0, *found[0].tolist()[:-1]]]))["cross"][:, 0]
    assert (weights - expected).abs().max() < 1e-6
    pytest.importorskip("matplotlib", reason="drawing needs matplotlib")
    draw_attention(source, target, weights, tmp_path / "a.png", title="zwölf")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("precision", [None, "fp32", "bf16"])
@pytest.mark.parametrize("kind", [Transformer, LSTMSeq2Seq])
def test_from_pretrained_needs_the_folder_alone(kind, precision, tmp_path) -> None:
    model: Transformer | LSTMSeq2Seq
    if kind is Transformer:
        model = Transformer.from_preset("tiny", vocab_size=259, d_model=32, d_ff=64, num_heads=4)
    else:
        model = LSTMSeq2Seq(vocab_size=259, d_model=32)
    save_model(model, tmp_path, ByteTokenizer())
    translator = Translator.from_pretrained(tmp_path, precision=precision, device="cpu")
    assert {p.dtype for p in translator.model.parameters()} == {
        torch.bfloat16 if precision == "bf16" else torch.float32
    }
    found = translator.translate(TEXTS, num_beams=2, **FEW)
    if precision != "bf16":
        assert found == Translator(model, ByteTokenizer()).translate(TEXTS, num_beams=2, **FEW)
    assert translator.attention("a")[2].dtype == torch.float32


def test_from_pretrained_says_what_is_wrong(tmp_path) -> None:
    GPT.from_preset("tiny", vocab_size=259).save_pretrained(tmp_path, ByteTokenizer())
    with pytest.raises(ValueError, match=r"expected a folder of Transformer or LSTMSeq2Seq, got one of 'GPT'"):
        Translator.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="expected precision fp32, bf16 or fp16, got 'int8'"):
        Translator.from_pretrained(tmp_path, precision="int8")
