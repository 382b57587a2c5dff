"""Splits a text into sentences and the white space between them, by rules for many scripts and no particular language.

If a rule is uncertain, two sentences stay one: a translator handles two sentences better than half of one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

# Marks that end a sentence even without a space after them (full-width, Arabic, Indic, Ethiopic, Armenian, Myanmar and
# Khmer ones), and marks that need white space.
_SURE = "。｡！？؟۔।॥።፧։။។"
_SPACED = ".!?…‼⁇⁈⁉．"
_CLOSERS = "\"'”’“‘»«›‹)]}）］｝」』】〉》〕＂＇*_"
_PAIRS = dict(zip("([{（［｛「『【〈《〔„“", ")]}）］｝」』】〉》〕“”", strict=True))
_END = re.compile(
    rf"(?P<mark>[{re.escape(_SPACED + _SURE)}]+)"
    rf"(?P<closed>[{re.escape(_CLOSERS)}]*(?:[ \u00a0\u202f][»›](?=\s|\Z))?)"  # French puts a space before »
    r"(?P<space>\s*)"
)
_SPACE = re.compile(r"\s+")
_LINE_END = re.compile(r"[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
_OPENING = re.compile(r"(?:[^\w\s]+\s*)*")  # quotation marks, brackets, dashes, ¿ and ¡ before a sentence
_LAST_WORD = re.compile(r"[^\s()\[\]{}\"“„«]*\Z")
_WORD = re.compile(r"\w+")
_ITEM = re.compile(r"[IVXLCDM]+|[A-Za-z]|\d+(?:\.\d+)*")
_AROUND = "'’*_-–—/"
_LONGEST_WORD = _LONGEST_OPENING = 30
_LONGEST_ASIDE = 600  # the maximum number of characters between brackets that are kept together
_MOST_OPEN = 8  # the number of open brackets that are searched for the one that is closed
_HIRAGANA = range(0x3041, 0x30A0)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Abbreviations that never end a sentence: a name or another word follows.
_TITLES = _words(
    "adm attn bde bldg blvd brig capt cf cmdr col comdr cpl dipl dr drs ej esp evtl frl gen geb gov hon hr hrn hrsg "
    "ing insp lt ltn maj messrs mgr mlle mme mr mrs ms msgr mt mx pfc prof pvt rev sen sgt sra srta st supt univ "
    "verh vgl viz vs zzgl bzw ca inkl sog"
)
# Abbreviations that don't end a sentence if a number follows.
_BEFORE_NUMBERS = _words(
    "abb abs app art bd ch chap eq eqs fig figs kap no nos nr num op p par pp pt ref sec tab vol vols zit"
)
# Abbreviations that end a sentence only if the next word is one that often begins a sentence.
_MAYBE_LAST = _words(
    "apr aug ave bros co corp dec dept ed eds etc feb inc jan jr jul jun llc ltd nov oct plc rd sept sr str usf usw"
)
_STARTERS = _words(
    "after all also an and as at but by das dann der die doch ein eine el en er es for from he her here his how if "
    "il ils in it its la le les los my now on one or our she since so some that the their then there these they "
    "this those to und une we what when where which while who why wir with yes you your"
)
# Words that follow German ordinals.
_AFTER_ORDINALS = _words(
    "januar jänner februar märz april mai juni juli august september oktober november dezember jahrhundert "
    "jahrhunderts jahrtausend weltkrieg weltkriegs weltkrieges kapitel auflage platz klasse stock tag"
)


class Sentence(NamedTuple):
    """A sentence, and the white space after it."""

    text: str
    space: str


def split_sentences(text: str) -> list[Sentence]:
    """Splits a text into sentences.

    A line end always separates two sentences. Abbreviations, initials, ordinals, decimals, addresses and text between
    brackets are kept together, and so is text that continues with a small letter.

    Args:
        text: a text of any length; the cost is linear in it.

    Returns:
        The sentences, without white space at their ends. If the text begins with white space, the first sentence is
        empty; no other is. All sentences and spaces, one after another, make up the text.
    """
    sentences: list[Sentence] = []
    line = 0
    for run in _SPACE.finditer(text):
        if run.start() > 0 and not _LINE_END.search(run.group()):
            continue
        sentences += _line_sentences(text[line : run.start()])
        if run.start() == 0:
            sentences.append(Sentence("", run.group()))
        else:
            sentences[-1] = Sentence(sentences[-1].text, run.group())
        line = run.end()
    return [*sentences, *_line_sentences(text[line:])]


def _line_sentences(line: str) -> Iterator[Sentence]:
    """Yields the sentences of a line that doesn't begin with white space."""
    start, enclosed = 0, _enclosed(line)
    for end in _END.finditer(line):
        behind = end.end("closed")
        if not enclosed[behind] and _is_end(line, start, end):
            yield Sentence(line[start:behind], end["space"])
            start = end.end()
    if start < len(line):
        rest = line[start:].rstrip()
        yield Sentence(rest, line[start + len(rest) :])


def _is_end(line: str, start: int, end: re.Match[str]) -> bool:
    """Returns whether the marks of `end` end the sentence that begins at `start`."""
    after, mark, closed = end.end(), end["mark"], end["closed"]
    if after == len(line):
        return True
    is_sure = any(character in _SURE for character in mark)
    if not end["space"]:  # the sentence continues after a quotation: 「はい。」と言った。
        return is_sure and not (closed and ord(line[after]) in _HIRAGANA)
    opening = _OPENING.match(line, after, after + _LONGEST_OPENING)
    word = after if opening is None else opening.end()
    if word == len(line):  # only marks follow: they belong to this sentence
        return False
    if is_sure:
        return True
    if line[word].islower():
        return False
    return mark != "." or bool(closed) or _stop_ends(line, start, end.start(), word)


def _stop_ends(line: str, start: int, stop: int, after: int) -> bool:
    """Returns whether a full stop at `stop` ends a sentence, if the next one would begin with the word at `after`."""
    match = _LAST_WORD.search(line, max(start, stop - _LONGEST_WORD), stop)
    word = "" if match is None else match.group().strip(_AROUND)
    following = _WORD.match(line, after)
    next_word = "" if following is None else following.group()
    low, next_low = word.lower(), next_word.lower()
    if match is not None and match.start() == start and _ITEM.fullmatch(word):
        return False  # the number of an item in a list
    if word.isdecimal():  # an ordinal, or the day of a date
        return not (len(word) <= 2 and (next_low in _AFTER_ORDINALS or next_word[:1].isdecimal()))
    if low in _TITLES:
        return False
    if low in _BEFORE_NUMBERS:
        return not next_word[:1].isdecimal()
    is_short = len(word) == 1 and word.upper() != word.lower()  # an initial
    is_dotted = "." in word and all(len(part) <= 2 and part.isalpha() for part in word.split("."))  # U.S., z.B., p.m.
    if is_short or is_dotted or low in _MAYBE_LAST:
        return len(next_word) > 1 and next_low in _STARTERS
    return True


def _enclosed(line: str) -> list[int]:
    """Returns how many brackets and quotation marks that close soon are around each character and the line's end."""
    changes = [0] * (len(line) + 2)
    opened: list[int] = []
    for place, character in enumerate(line):
        for depth, first in enumerate(reversed(opened[-_MOST_OPEN:]), 1):
            if _PAIRS[line[first]] == character:
                del opened[-depth:]
                if place - first <= _LONGEST_ASIDE:
                    changes[first + 1] += 1
                    changes[place] -= 1
                break
        else:
            if character in _PAIRS:
                opened.append(place)
    return list(accumulate(changes))
