"""The built-in task: English number words to German number words, 0 to 999,999,999.

It has real grammar (units before tens, one long compound, eine Million but einhunderteintausend), is unlimited and
readable, and can be checked by exact match.
"""

from __future__ import annotations

import random

LIMIT = 10**9

_ENGLISH_SMALL = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_ENGLISH_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_GERMAN_SMALL = (
    "null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn", "elf", "zwölf",
    "dreizehn", "vierzehn", "fünfzehn", "sechzehn", "siebzehn", "achtzehn", "neunzehn",
)  # fmt: skip
_GERMAN_TENS = ("", "", "zwanzig", "dreißig", "vierzig", "fünfzig", "sechzig", "siebzig", "achtzig", "neunzig")


def english(number: int) -> str:
    """Spells a number in English words: "one million, two hundred and three thousand and five".

    Raises:
        ValueError: outside 0 to 999,999,999.
    """
    _check(number)
    if number == 0:
        return _ENGLISH_SMALL[0]
    groups = [
        _english_group(value) + suffix
        for value, suffix in zip(_groups(number), (" million", " thousand", ""), strict=True)
        if value
    ]
    last = number % 1000
    if len(groups) > 1 and 0 < last < 100:
        return ", ".join(groups[:-1]) + " and " + groups[-1]
    return ", ".join(groups)


def german(number: int) -> str:
    """Spells a number in German words: "eine Million zweihundertdreitausendfünf".

    Raises:
        ValueError: outside 0 to 999,999,999.
    """
    _check(number)
    if number == 0:
        return _GERMAN_SMALL[0]
    millions, thousands, rest = _groups(number)
    words = []
    if millions:
        words.append("eine Million" if millions == 1 else _german_group(millions, "eine") + " Millionen")
    compound = _german_group(thousands, "ein") + "tausend" if thousands else ""
    if rest:
        compound += _german_group(rest, "eins")
    if compound:
        words.append(compound)
    return " ".join(words)


def number_pairs(count: int, *, seed: int, max_digits: int = 9, exclude: set[int] | None = None) -> list[int]:
    """Draws different random numbers with a uniform number of digits, so that short ones are not rare.

    A group of three digits is often zero or small, so that forms such as "one million and one" are not rare either.

    Args:
        count: the number of numbers.
        seed: the seed of the choice.
        max_digits: the most digits, 1 to 9.
        exclude: numbers to avoid, such as those of another split.

    Returns:
        `count` different numbers; feed them to `english` and `german`.

    Raises:
        ValueError: max_digits outside 1 to 9, or more numbers asked for than there are.
    """
    for name, value in (("count", count), ("seed", seed)):
        if not isinstance(value, int) or (name == "count" and value < 0):
            raise ValueError(f"expected {name} to be an integer{' of at least 0' * (name == 'count')}, got {value!r}")
    if not 1 <= max_digits <= 9:
        raise ValueError(f"expected max_digits in 1 to 9, got {max_digits}")
    used = set(exclude or ())
    if count + len(used) > 10**max_digits // 2:
        raise ValueError(f"expected far fewer than {10**max_digits} numbers of {max_digits} digits, got {count}")
    chooser = random.Random(seed)
    numbers: list[int] = []
    while len(numbers) < count:
        number = chooser.randrange(10 ** chooser.randint(1, max_digits))
        for group in (1, 1000):
            if number >= 1000 * group and chooser.random() < 0.25:
                number += (chooser.randrange(chooser.choice((1, 20, 100))) - number // group % 1000) * group
        if number not in used:
            used.add(number)
            numbers.append(number)
    return numbers


def _check(number: int) -> None:
    if not isinstance(number, int) or isinstance(number, bool):
        raise ValueError(f"expected a number from 0 to {LIMIT - 1:,}, got {number!r}")
    if not 0 <= number < LIMIT:
        raise ValueError(f"expected a number from 0 to {LIMIT - 1:,}, got {number:,}")


def _groups(number: int) -> tuple[int, int, int]:
    return number // 1_000_000, number // 1000 % 1000, number % 1000


def _english_group(value: int) -> str:
    hundreds, rest = divmod(value, 100)
    words = [f"{_ENGLISH_SMALL[hundreds]} hundred"] if hundreds else []
    if rest >= 20:
        unit = f"-{_ENGLISH_SMALL[rest % 10]}" if rest % 10 else ""
        words.append(_ENGLISH_TENS[rest // 10] + unit)
    elif rest:
        words.append(_ENGLISH_SMALL[rest])
    return " and ".join(words)


def _german_group(value: int, final_one: str) -> str:
    """Spells 1 to 999 as one compound; final_one: a final 1 (eins at the end, ein before tausend, eine Million)."""
    hundreds, rest = divmod(value, 100)
    word = ("ein" if hundreds == 1 else _GERMAN_SMALL[hundreds]) + "hundert" if hundreds else ""
    if rest == 1:
        return word + final_one
    if rest < 20:
        return word + (_GERMAN_SMALL[rest] if rest else "")
    unit, ten = rest % 10, _GERMAN_TENS[rest // 10]
    return word + (("ein" if unit == 1 else _GERMAN_SMALL[unit]) + "und" if unit else "") + ten
