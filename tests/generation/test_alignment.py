"""Tests alignments: the words of tokens, the attention that is used, and texts without words."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from fastformer.baseline import LSTMSeq2Seq
from fastformer.data import ByteTokenizer, Tokenizer, train_bpe
from fastformer.generation import Ensemble, Translator
from fastformer.generation.alignment import Aligner, align_answers, cross_attention, pharaoh, said_words, written_words
from fastformer.generation.text_io import ErrorPolicy, Item, IterableSource
from fastformer.models import Transformer
from tests.generation.small import louder, tiny

TEXTS = ["the old man", "an old hat", "a cat sat on the mat", "mats and hats"]
TOKENIZERS: dict[str, Tokenizer] = {"bytes": ByteTokenizer(), "bpe": train_bpe(TEXTS, 40)}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request) -> Tokenizer:
    return TOKENIZERS[request.param]


@pytest.mark.parametrize("text", [*TEXTS, "the  old\tcat ", " man", "é Ünknown ☃☃ the", "", "  ", "ﬁn ½x man", "a\nb"])
def test_the_tokens_of_a_word_spell_it(tokenizer, text) -> None:
    ids = tokenizer.encode(text)
    said, count = said_words(ids, tokenizer.decode)
    spoken = tokenizer.decode(ids).split()
    assert count == len(spoken)
    for words, places in ((text.split(), written_words(text, ids, tokenizer.encode)), (spoken, said)):
        assert len(places) == len(ids)
        for number, word in enumerate(words):
            own = [i for i, mine in zip(ids, places, strict=True) if number in mine]
            assert tokenizer.decode(own).strip() == tokenizer.decode(tokenizer.encode(word)).strip()
        assert all(len(mine) <= 1 and (not mine or mine[0] < len(words)) for mine in places)


def test_text_without_tokens_does_not_shift_words() -> None:
    def encode(text: str) -> list[int]:  # a word is a token; 9 begins a text; some words have none
        known = {"one": 5, "two": 6, "three": 7}
        return [9, *(known[word] for word in text.split() if word in known)]

    ids = encode("one ? two ? three")
    assert written_words("one ? two ? three", ids, encode) == [range(0), range(0, 1), range(2, 3), range(4, 5)]
    # A token of two words, one of none, and one that joins what stood apart.
    pieces = {(): "", (1,): "of the", (1, 2): "of the", (1, 2, 3): "of the man", (1, 2, 3, 4): "of the man's"}
    found, count = said_words([1, 2, 3, 4], lambda ids: pieces[tuple(ids)])
    assert (found, count) == ([range(0, 2), range(0), range(2, 3), range(2, 3)], 3)


class Looking(Transformer):
    """A model whose first head of the second layer attends to source tokens with ids near those that it generates."""

    def attention_maps(self, source: Tensor, target: Tensor, **options: Any) -> dict[str, Tensor]:
        wanted = target.roll(-1, 1)  # what is said where these are read
        near = torch.exp(-((wanted[:, :, None] - source[:, None]) ** 2 / 4.0)) * (source != 0)[:, None]
        flat = (source != 0)[:, None].expand_as(near).float()
        return {
            "cross": torch.stack(
                [torch.stack([flat, flat], 1), torch.stack([near, flat], 1), torch.stack([flat] * 2, 1)]
            )
        }


@pytest.fixture
def looking() -> Translator:
    return Translator(tiny(Looking, max_len=40), ByteTokenizer())


def test_each_word_is_aligned_by_the_attention_of_its_tokens(looking) -> None:
    assert looking.align("aaa kkk zzz", "zz aa kk zz") == [(2, 0), (0, 1), (1, 2), (2, 3)]
    assert looking.align(["kk  aa", "b"], [" a", "b b"]) == [[(1, 0)], [(0, 0), (0, 1)]]
    # The tokens of a source word are added up: two that are near outweigh one that is nearer.
    assert looking.align("mm n", "n") == [(0, 0)] and looking.align("m n", "n") == [(1, 0)]
    assert looking.align("ab", "ba", unit="tokens") == [(1, 0), (0, 1)]
    # Layers and heads that look at nothing in particular.
    assert looking.align("a k", "k", layer=2, head=1) == [(1, 0)]
    for options in ({"layer": 1}, {"layer": 3}, {"layer": 2, "head": 2}):
        assert looking.align("a kk", "a", **options) == [(1, 0)]
    assert pharaoh([(2, 0), (0, 1)]) == "2-0 0-1" and pharaoh([]) == ""


def test_texts_without_words_and_bad_ones(looking, caplog) -> None:
    assert looking.align("", "") == [] and looking.align("a", "") == [] and looking.align([], []) == []
    with pytest.raises(ValueError, match="text 1: .*empty"):
        looking.align("", "b")
    with caplog.at_level(logging.WARNING, "fastformer"):
        found = looking.align(["a", "", "b" * 50, "c"], ["a", "x", "y", "c d"], on_error="skip")
    assert found == [[(0, 0)], [], [], [(0, 0), (0, 1)]] and "skipped 2 of 4 texts" in caplog.text
    for options, expected in (
        ({"unit": "lines"}, "'lines'"),
        ({"layer": 0}, "layer"),
        ({"head": 1.0}, "head"),
        ({"layer": 4}, "layer.* 3"),
        ({"head": 3}, "head.* 2"),
    ):
        with pytest.raises(ValueError, match=expected):
            looking.align("a", "b", **options)
    with pytest.raises(ValueError, match=r"\battention_maps\b.*\bEnsemble\b"):
        Translator(Ensemble([looking.model]), looking.tokenizer).align("a", "b")


@pytest.mark.parametrize("kind", [Transformer, LSTMSeq2Seq])
def test_the_alignment_of_a_pair_does_not_depend_on_its_neighbours(kind, monkeypatch) -> None:
    model = tiny(kind).train()
    pairs = [([5, 6, 7, 1], [8, 9, 1]), ([5, 1], [6] * 9), ([9] * 20, [4, 1]), ([7, 1], [1])]
    together = cross_attention(model, pairs)
    monkeypatch.setattr("fastformer.generation.alignment._MOST_PAIRS", 1)
    for pair, weights, alone in zip(pairs, together, cross_attention(model, pairs), strict=True):
        assert weights.shape[2:] == (len(pair[1]), len(pair[0])) and torch.allclose(weights, alone, atol=1e-5)
        assert torch.allclose(weights.sum(-1), torch.ones(weights.shape[:-1]), atol=1e-5)
    assert all(module.training for module in model.modules())
    translator = Translator(model, ByteTokenizer())
    source, target, weights = translator.attention("ab c")
    ids = translator.encode("ab c")
    aligner = Aligner(translator, "tokens")
    layer = weights[max(len(weights) - 2, 0)].mean(0)
    (found,) = aligner.align([(aligner.source("ab c", ids), aligner.said([3 + ord("x"), 3 + ord("y"), 1], "xy"))])
    due = cross_attention(model, [(ids, [3 + ord("x"), 3 + ord("y"), 1])])[0][max(len(weights) - 2, 0)].mean(0)
    assert found == [(int(due[place, :4].argmax()), place) for place in range(2)] and layer.shape[1] == len(source)


@pytest.mark.parametrize("unit", ["words", "tokens"])
def test_a_new_translation_is_aligned_like_a_given_one(unit) -> None:
    translator = Translator(louder(tiny(max_len=40, tie_embeddings=False)), ByteTokenizer())
    texts, aligner = ["one two", "a longer line", "", "x"], Aligner(translator, unit)
    options = {
        "max_new_tokens": 20,
        "min_new_tokens": 15,
        "do_sample": True,
        "seed": 1,
        "shortlist": [35, *range(100, 105)],
    }
    settings = translator.settings(options)
    answers = [
        answer
        for some in translator.answers(IterableSource(map(Item, texts)), settings, ErrorPolicy(), log_probs=False)
        for answer in some
    ]
    made = ["".join(answer.texts()) for answer in answers]
    found = [alignment for alignments in align_answers(aligner, texts, answers) for alignment in alignments]
    due = translator.align(texts, made, unit=unit)
    assert found == [one for one, text in zip(due, texts, strict=True) if text] and due[2] == []
    # A stop text ends what is printed, and here it stands behind the first word.
    stop = translator.settings({**options, "stop_strings": made[0].strip()[len(made[0].split()[0]) :][:3]})
    (answers,) = translator.answers(IterableSource([Item(texts[0])]), stop, ErrorPolicy(), log_probs=False)
    assert answers[0].texts()[0].split() == made[0].split()[:1]
    assert unit == "tokens" or align_answers(aligner, texts[:1], answers) == [[found[0][:1]]]
    assert len(found[0]) == len(made[0].split() if unit == "words" else made[0]) and len(found[1]) > 2
