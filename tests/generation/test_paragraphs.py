"""Paragraphs are translated sentence by sentence, in one batch, and keep their white space. Sentences and the spaces
between them add up to the text; abbreviations and the like don't end a sentence.
"""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastformer.data import ByteTokenizer
from fastformer.generation import AsyncTranslator, Translator, split_sentences
from fastformer.generation.engines import choose_engine
from fastformer.models import Transformer
from tests.covering import each
from tests.generation.weights import drawn

TEXT = " One. Two!\t\tThree is longer...  Four?\r\n\n  Five\u3000六。七！「八。」\u2028Nine \n"
TEXTS = [TEXT, "", "a", " \n ", "Aa. Bb.", "Aa.  Bb.\t"]


@pytest.fixture(scope="module")
def translator() -> Translator:
    return Translator(drawn(Transformer, vocab_size=259, max_len=24), ByteTokenizer())


def by_hand(translator: Translator, text: str, **options) -> str:
    return "".join(
        (translator.translate(one, **options) if one else "") + space for one, space in split_sentences(text)
    )


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"stop_strings": ["e"]}], ids=str)
async def test_each_sentence_is_translated_by_itself(translator, options) -> None:
    options = {**options, "max_new_tokens": 6}
    expected = [by_hand(translator, text, **options) for text in TEXTS]
    assert len(set(expected)) == len(TEXTS) and expected[1] == "" and expected[3] == " \n "
    assert translator.translate(TEXTS, split=True, **options) == expected
    assert [translator.translate(text, split=True, **options) for text in TEXTS] == expected
    assert list(translator.stream(iter(TEXTS), split=True, **options)) == expected
    assert list(translator.stream(iter(TEXTS), split=True, read_ahead=1, **options)) == expected
    pieces = list(translator.stream(TEXT, split=True, **options))
    assert "".join(pieces) == expected[0] and len(pieces) > 6 and all(pieces)
    assert list(translator.stream("", split=True, **options)) == []
    async with AsyncTranslator(translator) as front:
        found = await asyncio.gather(*(front.translate(text, split=True, **options) for text in TEXTS))
        assert found == expected
        assert "".join([piece async for piece in front.stream(TEXT, split=True, **options)]) == expected[0]


def test_the_sentences_of_all_texts_are_one_batch(translator, monkeypatch) -> None:
    admitted: list[int] = []
    kind = type(choose_engine(translator.model).open(1, 16))
    prefill = kind.prefill

    def counted(self, prompts) -> None:
        admitted.append(len(prompts))
        prefill(self, prompts)

    monkeypatch.setattr(kind, "prefill", counted)
    translator.translate(["Ab cd. Ef gh.", "Ij! Kl?", "Mn"], split=True, max_new_tokens=4)
    assert admitted == [5]


def test_a_long_text_is_no_longer_too_long(translator, caplog) -> None:
    text = "A short one. " * 9
    with pytest.raises(ValueError, match=r"text 1: .*\b24\b.*\b118\b"):
        translator.translate(text)
    assert translator.translate(text, split=True, max_new_tokens=3).count(" ") >= 9
    long = "Good. And a sentence that is much too long for it. Good."
    with pytest.raises(ValueError, match=r"text 2, sentence 2: .*\b24\b.*\b45\b"):
        translator.translate(["a", long], split=True)
    with pytest.raises(ValueError, match="text 2, sentence 2"):
        list(translator.stream(["a", long], split=True))
    # A text without one of its sentences would be wrong without a sign of it.
    expected = [translator.translate("Good.", max_new_tokens=5), "", translator.translate("b", max_new_tokens=5)]
    for options in ({"on_error": "skip"}, {"skip_long": True}):
        texts = ["Good.", long, "b"]
        assert translator.translate(texts, split=True, max_new_tokens=5, **options) == expected
        assert list(translator.stream(texts, split=True, max_new_tokens=5, **options)) == expected
    assert "1 of 3" in caplog.text


async def test_an_error_names_its_sentence(translator) -> None:
    def broken(input_ids, scores):
        raise KeyError("on purpose")

    with pytest.raises(RuntimeError, match="text 1, sentence 1: KeyError"):
        translator.translate(["Aa. Bb.", "C"], split=True, logits_processor=broken)

    async with AsyncTranslator(translator) as front:
        with pytest.raises(RuntimeError, match="KeyError"):
            await front.translate("Aa. Bb.", split=True, logits_processor=broken)
        with pytest.raises(ValueError, match=r"text 1, sentence 2: .*\b24\b"):
            await front.translate("Aa. " + "B" * 40, split=True)


def test_options_that_cannot_be_combined_with_split(translator) -> None:
    for options, words in (
        ({"num_beams": 2, "num_return_sequences": 2}, r"\bsplit\b"),
        ({"return_scores": True}, r"\bsplit\b"),
        ({"return_token_scores": True}, r"\bsplit\b"),
        ({"target_prefix": ["a"]}, r"\btarget_prefix\b.*\bsplit\b"),
        ({"split": "en"}, r"\bsplit\b.*'en'"),
    ):
        for call in (translator.translate, translator.stream):
            with pytest.raises(ValueError, match=words):
                call(["a"], **{"split": True, **options})
    with pytest.raises(ValueError, match=r"texts\[1\].*\bint\b"):
        translator.translate(["a", 3], split=True)


CASES = [
    "Dr. Smith went home. | He paid $3.14 at 5 p.m. on Jan. 5. | J. R. R. Tolkien wrote it!  | Really?",
    'Yes... he did. | "Stop!" he cried. | (This is it. And more.) | See https://x.org/a.b?c=d. | Mail a.b@c.de. | Done',
    "He left the U.S. | It was, e.g. for him, good. | U.S. troops stay. | So did I. | Then vitamin C. | The end.",
    "Mr. A vs. Mrs. B. No. 5 is alive. | Fig. 3 shows it. | He said no. | It is over. | Apple Inc. makes it.",
    "Wait… what? | I don't know… | Maybe. | Hello. | :) Hi! :-)",
    "He is 42. | She left in 1999. | On 3. 4. 2020 it was so. | [See p. 4.] | Good.",
    "Das ist z. B. gut. | Am 3. Mai kam er. | Er sagte: „Gut. Sehr gut.“ | Dann ging er. | »Ja.« | Er kam.",
    "« Oui. » | Il partit. | Vraiment ? | Oui !",
    '¿Qué? | ¡Nada! | "Bien." | — Dijo. | Fin',
    "今日は天気がいい。|散歩に行きましょう！|本当？|「はい。」と彼は言った。|「行く。待って。」|彼は笑った。",
    "我来了。|你呢？|好（真的。好吧）！|走",
    "यह एक वाक्य है। | यह दूसरा है॥ | और तीसरा",
    "هل أنت بخير؟ | نعم. | شكرا",
    "Он пришёл. | Кто? | А. С. Пушкин.",
    "그는 갔다. | 왜? | 몰라.",
    "1. First item\n|2. Second. | It goes on\r\n|- a bullet. | Another.\n\n\n|IV. Chapter\t\n|a. Part | \u2028|\tlast",
    "Tab.\t|  Two.  | Non-breaking.\u00a0|\u3000|Wide.",
]


@each("case", CASES)
def test_where_sentences_end(case) -> None:
    text = case.replace(" | ", " ").replace("|", "")
    found = split_sentences(text)
    expected = [piece.strip() for piece in case.split("|") if piece.strip()]
    assert [sentence.text for sentence in found if sentence.text] == expected
    assert "".join(sentence.text + sentence.space for sentence in found) == text


ODD = "ab AB.!?。！？؟।…\"'()[]«»„“”「」 \t\n\r\u3000\u00a0\u202f\u2028\x0b\x85é漢0123:;,-–—\u200b\u0301😀ßİǅ|＂"


@settings(max_examples=80, deadline=None)
@given(st.one_of(st.text(ODD, max_size=80), st.text(max_size=60)))
def test_the_pieces_add_up_to_the_text(text) -> None:
    found = split_sentences(text)
    assert "".join(sentence.text + sentence.space for sentence in found) == text
    for place, (sentence, space) in enumerate(found):
        assert sentence == sentence.strip() and not space.strip() and (sentence or place == 0)
        assert "\n" not in sentence


@pytest.mark.parametrize("unit", ["a. ", "(", "A. B. ", "! ", " ", "(a. B ", ". »", "“", "1. "])
def test_the_cost_is_in_proportion(unit) -> None:
    def seconds(size: int) -> float:
        text = unit * (size // len(unit)) + "."
        least = 9.0
        for _ in range(2):
            begin = time.process_time()
            split_sentences(text)
            least = min(least, time.process_time() - begin)
        return least

    assert seconds(16_000) < 12 * seconds(4_000) + 0.02  # 16 where it is quadratic
