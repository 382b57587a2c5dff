"""The built-in task's grammar, and that its numbers are different ones."""

from __future__ import annotations

import pytest

from fastformer.data.number_words import english, german, number_pairs

WORDS = {
    0: ("zero", "null"),
    1: ("one", "eins"),
    12: ("twelve", "zwölf"),
    16: ("sixteen", "sechzehn"),
    17: ("seventeen", "siebzehn"),
    21: ("twenty-one", "einundzwanzig"),
    30: ("thirty", "dreißig"),
    100: ("one hundred", "einhundert"),
    101: ("one hundred and one", "einhunderteins"),
    1001: ("one thousand and one", "eintausendeins"),
    3745: ("three thousand, seven hundred and forty-five", "dreitausendsiebenhundertfünfundvierzig"),
    101_000: ("one hundred and one thousand", "einhunderteintausend"),
    1_000_000: ("one million", "eine Million"),
    1_000_001: ("one million and one", "eine Million eins"),
    2_000_000: ("two million", "zwei Millionen"),
    1_389_157: (
        "one million, three hundred and eighty-nine thousand, one hundred and fifty-seven",
        "eine Million dreihundertneunundachtzigtausendeinhundertsiebenundfünfzig",
    ),
    21_000_000: ("twenty-one million", "einundzwanzig Millionen"),
    101_000_000: ("one hundred and one million", "einhunderteine Millionen"),
}


@pytest.mark.parametrize("number", WORDS)
def test_words(number: int) -> None:
    assert (english(number), german(number)) == WORDS[number]


def test_words_are_unambiguous() -> None:
    numbers = number_pairs(3000, seed=0)
    assert len({english(n) for n in numbers}) == len({german(n) for n in numbers}) == 3000


def test_numbers_differ_between_splits_and_depend_on_the_seed() -> None:
    val = number_pairs(500, seed=1)
    train = number_pairs(2000, seed=0, exclude=set(val))
    assert len(set(train)) == 2000 and not set(train) & set(val)
    assert number_pairs(100, seed=3) == number_pairs(100, seed=3) != number_pairs(100, seed=4)
    assert max(number_pairs(200, seed=0, max_digits=3)) < 1000


@pytest.mark.parametrize("call", [lambda: english(-1), lambda: german(10**9)])
def test_out_of_range(call) -> None:
    with pytest.raises(ValueError, match="expected a number from 0 to 999,999,999"):
        call()


def test_too_many_numbers() -> None:
    with pytest.raises(ValueError, match="far fewer than 10 numbers"):
        number_pairs(9, seed=0, max_digits=1)
