"""Tests the grammar of the built-in task, and that its splits are disjoint."""

from __future__ import annotations

import pytest

from fastformer.number_words import english, german, number_pairs
from tests.covering import each

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
    1_389_157: (
        "one million, three hundred and eighty-nine thousand, one hundred and fifty-seven",
        "eine Million dreihundertneunundachtzigtausendeinhundertsiebenundfünfzig",
    ),
    21_000_000: ("twenty-one million", "einundzwanzig Millionen"),
    10: ("ten", "zehn"),
    11: ("eleven", "elf"),
    13: ("thirteen", "dreizehn"),
    14: ("fourteen", "vierzehn"),
    15: ("fifteen", "fünfzehn"),
    18: ("eighteen", "achtzehn"),
    19: ("nineteen", "neunzehn"),
    20: ("twenty", "zwanzig"),
    64: ("sixty-four", "vierundsechzig"),
    99: ("ninety-nine", "neunundneunzig"),
    110: ("one hundred and ten", "einhundertzehn"),
    1000: ("one thousand", "eintausend"),
    1099: ("one thousand and ninety-nine", "eintausendneunundneunzig"),
    1100: ("one thousand, one hundred", "eintausendeinhundert"),
    21_021: ("twenty-one thousand and twenty-one", "einundzwanzigtausendeinundzwanzig"),
    1_001_000: ("one million, one thousand", "eine Million eintausend"),
    1_001_001: ("one million, one thousand and one", "eine Million eintausendeins"),
    2_000_021: ("two million and twenty-one", "zwei Millionen einundzwanzig"),
    12_345_678: (
        "twelve million, three hundred and forty-five thousand, six hundred and seventy-eight",
        "zwölf Millionen dreihundertfünfundvierzigtausendsechshundertachtundsiebzig",
    ),
    999_999_999: (
        "nine hundred and ninety-nine million, nine hundred and ninety-nine thousand, nine hundred and ninety-nine",
        "neunhundertneunundneunzig Millionen neunhundertneunundneunzigtausendneunhundertneunundneunzig",
    ),
    101_000_000: ("one hundred and one million", "einhunderteine Millionen"),
}


@each("number", WORDS)
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
    # Without the exclusion, numbers of the other split would occur.
    assert set(number_pairs(2000, seed=0)) & set(number_pairs(2000, seed=0, max_digits=9)[:500])
    assert not set(number_pairs(500, seed=0, exclude=set(number_pairs(500, seed=0)))) & set(number_pairs(500, seed=0))


def test_all_lengths_and_round_forms_are_common() -> None:
    numbers = number_pairs(3000, seed=0)
    digits = [sum(len(str(n)) == count for n in numbers) for count in range(1, 10)]
    assert digits[0] == 10 and min(digits[2:]) > 150
    assert sum(n % 1000 < 100 for n in numbers if n >= 10**6) > 0.2 * sum(n >= 10**6 for n in numbers)


@pytest.mark.parametrize("call", [lambda: english(-1), lambda: german(10**9)])
def test_out_of_range(call) -> None:
    with pytest.raises(ValueError, match="999,999,999"):
        call()


def test_too_many_numbers() -> None:
    with pytest.raises(ValueError, match=r"\b10\b"):
        number_pairs(9, seed=0, max_digits=1)
