"""Sentences and the spaces between them add up to the text; abbreviations and the like don't end a sentence."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastformer.generation import split_sentences

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


@pytest.mark.parametrize("case", CASES)
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
