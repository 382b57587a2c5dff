"""Compares the scores of a validation with scores computed by hand."""

from __future__ import annotations

from functools import partial
from unittest.mock import Mock

import pytest
import torch
from torch.nn import functional as F

from fastformer.baseline import LSTMSeq2Seq
from fastformer.data import Example
from fastformer.models import GPT, Transformer
from fastformer.training.evaluate import corpus_scores, translation_scores, words_hint
from tests.training.tiny import nll_of

EXAMPLES = [Example([5, 6, 7, 1], [8, 9, 1]), Example([5, 1], [6, 1]), Example([7, 8, 1], [9, 9, 9, 5, 1])]
CPU = torch.device("cpu")
SIZES = {"vocab_size": 12, "d_model": 16, "num_heads": 2, "d_ff": 24, "num_encoder_layers": 1, "num_decoder_layers": 1}


@pytest.mark.parametrize(("kind", "packed"), [("transformer", True), ("transformer", False), ("lstm", False)])
def test_nll_is_the_mean_over_all_target_tokens_and_eos(kind, packed) -> None:
    make = (
        partial(Transformer.from_preset, "tiny", **SIZES)
        if kind == "transformer"
        else partial(LSTMSeq2Seq, vocab_size=12, d_model=16)
    )
    model = make(dropout=0.5).double()  # training: dropout has to go
    total, tokens = 0.0, 0
    model.eval()
    for example in EXAMPLES:  # one at a time: nothing to pad, nothing to mask
        out = model(torch.tensor([example.source]), torch.tensor([[0, *example.target[:-1]]]))
        logits = out if kind == "transformer" else out[0]
        total += F.cross_entropy(logits[0], torch.tensor(example.target), reduction="sum").item()
        tokens += len(example.target)
    model.train()
    for max_tokens in (5, 100):  # several batches, unlike in size, and one
        found = nll_of(model, EXAMPLES, max_tokens=max_tokens, packed=packed)
        assert found == pytest.approx(total / tokens, rel=1e-6)
        assert model.training  # as it was


def test_nll_of_a_language_model_predicts_each_token_but_the_first() -> None:
    model = GPT.from_preset("tiny", vocab_size=12, d_model=16, num_heads=2, num_layers=1).double().eval()
    example = Example([], [4, 5, 6, 7, 8])
    logits = model(torch.tensor([example.target[:-1]]))
    expected = F.cross_entropy(logits[0], torch.tensor(example.target[1:])).item()
    found = nll_of(model, [example, example], max_tokens=20, packed=True)
    assert found == pytest.approx(expected, rel=1e-6) and not model.training


def test_scores_of_translations() -> None:
    pairs = [("a", "the cat sat on the mat"), ("b", "a dog ran home"), ("c", "yes"), ("d", "no")]
    answers = ["the cat sat on the mat", "a dog ran away", "yes", "No"]
    scores = translation_scores(answers, pairs, 1.25, 2)
    assert scores.nll == 1.25 and scores.exact_match == 0.5
    expected = corpus_scores(answers, [target for _, target in pairs])
    assert (scores.bleu, scores.chrf) == (expected["BLEU"][0], expected["chrF"][0])
    assert 50 < scores.bleu < 100 and 50 < scores.chrf < 100
    assert "tok:13a" in scores.signatures["bleu_signature"] and "nc:6" in scores.signatures["chrf_signature"]
    assert scores.samples == [(s, f, r) for (s, r), f in zip(pairs[:2], answers[:2], strict=True)]
    assert translation_scores([r for _, r in pairs], pairs, 0.0, 0).bleu == pytest.approx(100)


@pytest.mark.parametrize(("reference", "has_bleu"), [("eine Million drei", False), ("eine Million drei mal", True)])
def test_bleu_is_computed_only_for_sentences(reference, has_bleu) -> None:
    pairs = [("a", "eins"), ("b", "zwei"), ("c", "drei"), ("d", reference)]
    scores = translation_scores([target for _, target in pairs], pairs, 0.0, 0)
    assert (scores.bleu is not None) == has_bleu == ("bleu_signature" in scores.signatures)
    assert scores.chrf == pytest.approx(100)


CHINESE = ["我喜欢吃苹果。", "他昨天去北京了。", "今天的天气很好。", "谢谢"]
THAI = ["ฉันชอบกินแอปเปิ้ล", "เมื่อวานเขาไปกรุงเทพ"]
JAPANESE = ["私はりんごが好きです。", "昨日東京へ行きました。"]
KOREAN = ["나는 사과를 좋아한다.", "어제 서울에 갔다."]


@pytest.mark.parametrize(
    ("references", "tokenize", "advice"),
    [
        (CHINESE, "13a", "zh"),
        (CHINESE, "zh", None),
        (CHINESE, "char", None),
        ([" ".join(text) for text in CHINESE], "13a", None),  # cut into words already
        ([*CHINESE, "one of four spaced words"], "13a", "zh"),
        (JAPANESE, "13a", "ja-mecab"),
        (THAI, "13a", "char"),
        (KOREAN, "13a", None),
        (["yes", "no", "Guten Tag"], "13a", None),
        (["GATTACA" * 9, "ACGT" * 20], "13a", "char"),
        ([], "13a", None),
    ],
)
def test_references_without_spaces_are_noticed(references, tokenize, advice) -> None:
    hint = words_hint(references, tokenize)
    assert hint is None if advice is None else f"--bleu_tokenize {advice}," in hint


def test_bleu_of_a_language_without_spaces() -> None:
    pairs = list(zip("abcd", CHINESE, strict=True))
    answers = [text.replace("苹果", "梨") for text in CHINESE]
    scores = translation_scores(answers, pairs, 1.0, 0, bleu_tokenize="zh")
    assert 50 < scores.bleu < 100 and "tok:zh" in scores.signatures["bleu_signature"]
    assert translation_scores(answers, pairs, 1.0, 0).bleu is None and scores.translated == 4


@pytest.mark.parametrize("tokenize", ["flores101", "flores200", "spBLEU-1K"])
def test_nothing_is_downloaded(tokenize, monkeypatch, tmp_path) -> None:
    import sacrebleu.tokenizers.tokenizer_spm as tokenizers
    import sacrebleu.utils

    monkeypatch.setattr(sacrebleu.utils, "SACREBLEU_DIR", str(tmp_path))
    monkeypatch.setattr(tokenizers, "download_file", Mock(side_effect=AssertionError("a download")))
    with pytest.raises(ValueError, match=rf"\bbleu_tokenize\b.*{tokenize}.*{tmp_path}"):
        corpus_scores(["a"], ["a"], bleu_tokenize=tokenize)


def test_scores_with_several_references_other_words_and_ter() -> None:
    found, first, second = ["我喜欢苹果", "", "好的"], ["我喜欢吃苹果", "是的", "好的"], ["我喜欢苹果", "是", "好"]
    plain = corpus_scores(found, first, bleu_tokenize="zh", ter=True)
    assert 0 < plain["BLEU"][0] < 100 and "tok:zh" in plain["BLEU"][1] and plain["TER"][0] > 0
    assert corpus_scores(found, first)["BLEU"][0] == 0  # a line is a word
    both = corpus_scores(found, first, second, bleu_tokenize="zh")
    assert both["BLEU"][0] > plain["BLEU"][0] and "nrefs:2" in both["BLEU"][1] and set(both) == {"BLEU", "chrF"}
    assert corpus_scores(["", ""], ["", ""], ter=True).keys() == {"BLEU", "chrF", "TER"}
    with pytest.raises(ImportError, match="ja-mecab"):
        corpus_scores(found, first, bleu_tokenize="ja-mecab")
