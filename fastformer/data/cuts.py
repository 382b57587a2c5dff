"""Where a text may be cut so that the ids of its parts, one after another, are the ids of the whole text.

A tokenizer says it by a pattern, its `cuts`. Each match is a place to cut at: the part before it ends where the match
begins, and the part behind it begins where the match ends. A pattern of None means that the tokenizer's ids may depend
on the text at any distance, so that each document is encoded whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

PIECE = 50_000  # characters of a long text that are encoded at a time
WHOLE = 1 << 25  # the most characters that are encoded at once, for each of which a library needs about 120 bytes

# Letters of scripts with spaces that are letters in every version of Unicode, and that every normal form and every
# change of case leaves letters at both ends: no regular expression joins them with a space behind them.
LETTERS = (
    "A-Za-z\u03b1-\u03c9\u0430-\u0438\u043a-\u044f\u05d0-\u05ea\u0627-\u063a\u0641-\u064a\u0915-\u0928\uac00-\ud7a3"
)
ANYWHERE = re.compile(r"(?=[\s\S])")
AT_SPACES = re.compile(r"(?<=[ \n])(?=[\s\S])")
AT_LINES = re.compile(r"(?<=\n)(?=[^\n])")  # a BPE may join line ends
# A word begins with the space before it, ...
AT_WORDS = re.compile(rf"(?<=[{LETTERS}])(?= [{LETTERS}])")
# ... or the space is left out, because the tokenizer puts one before each text.
AT_WORDS_WITHOUT_SPACE = re.compile(rf"(?<=[{LETTERS}]) (?=[{LETTERS}])")
AT_LINES_AND_WORDS = re.compile(f"{AT_LINES.pattern}|{AT_WORDS_WITHOUT_SPACE.pattern}")


def is_long(text: str) -> bool:
    """Returns whether a text has more than PIECE characters, so that it may be cut."""
    return len(text) > PIECE


def pieces(text: str, cuts: re.Pattern[str] | None) -> list[str]:
    """Cuts a long text into pieces of at least PIECE characters, of which the last may be shorter."""
    return [*_parts(text, cuts, PIECE)]


def parts(texts: Iterable[str], cuts: re.Pattern[str] | None, size: int, name: str) -> Iterator[tuple[str, bool]]:
    """Cuts a document that comes in chunks, of which only about `size` characters are held if it can be cut.

    Args:
        texts: the document's text, cut anywhere.
        cuts: where the tokenizer's ids don't depend on a cut.
        size: the number of characters after which a part may end.
        name: the name of the document in messages.

    Yields:
        Each part, and whether the document ends with it. A document without any text but white space has no part.

    Raises:
        ValueError: over WHOLE characters without a place to cut at.
    """
    waiting, has_text = "", False
    for text in texts:
        waiting += text
        has_text = has_text or bool(text.strip())
        if has_text and len(waiting) > size:
            *done, waiting = _parts(waiting, cuts, size)
            yield from ((part, False) for part in done)
        if len(waiting) > WHOLE + size:
            raise ValueError(
                f"{name}: expected a document of at most {WHOLE:,} characters, because the ids of this tokenizer may "
                "depend on where a text is cut: split it into several documents (files of a folder, or rows of a "
                "column), or use another tokenizer"
            )
    if has_text:
        yield waiting, True


def _parts(text: str, cuts: re.Pattern[str] | None, size: int) -> Iterator[str]:
    start = 0
    while cuts is not None and len(text) - start > size:
        cut = cuts.search(text, start + size)
        if cut is None:
            break
        yield text[start : cut.start()]
        start = cut.end()
    yield text[start:]


# The alternatives of regular expressions that split text into words. None of them has a letter before a space, and only
# `\s+(?!\S)` asks what follows, so that a text that ends with a letter is split as it is in a longer one.
_CASES = tuple(  # words that begin in upper case and go on in lower case
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]{upper}[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]{lower}{end}"
    for upper, lower in (("*", "+"), ("+", "*"))
    for end in ("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "")
)
_ALTERNATIVES = (
    *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "(?i:'s|'t|'re|'ve|'m|'ll|'d)", "'(?i:[sdmt]|ll|ve|re)", *_CASES),
    *(r" ?\p{L}+", r"[^\r\n\p{L}\p{N}]?\p{L}+", r"[^\r\n\p{L}\p{N}]?+\p{L}+"),
    *(r" ?\p{N}+", r"\p{N}", r"\p{N}+", r"\p{N}{1,3}"),
    *(
        r" ?[^\s\p{L}\p{N}]+",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r" ?[^\s\p{L}\p{N}]++[\r\n]*",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    ),
    *(r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+"),
)
_LOCAL = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer")  # normalizers of single letters
_AT_SPACES = ("BertPreTokenizer", "Whitespace", "WhitespaceSplit")  # pre-tokenizers
_SPACE = "▁"


def cuts_of(values: Mapping[str, Any]) -> re.Pattern[str] | None:
    """Finds where a tokenizer of the `tokenizers` library may cut, by the contents of its file.

    A normalizer that knows the ends of a text, a pre-tokenizer that isn't known, or a model that sees more than a word:
    then the answer is None.
    """
    model, added = values["model"], [token for token in values["added_tokens"] if not token["special"]]
    if model.get("dropout") or not all(map(_is_word, added)):
        return None
    normalizers = _flat(values["normalizer"], "normalizers")
    splits = _flat(values["pre_tokenizer"], "pretokenizers")
    if not splits:
        return None if added else _cuts_of_pieces(model, normalizers)
    others = [split["type"] for split in splits if not _splits_words(split)]
    if len(others) == len(splits) or not {*others} <= {"Digits", "Punctuation", "ByteLevel"}:
        return None
    return AT_WORDS if all(map(_is_local, normalizers)) else None


def _cuts_of_pieces(model: Mapping[str, Any], normalizers: list[Any]) -> re.Pattern[str] | None:
    """The cuts of a tokenizer like Llama 2's: a BPE of the whole text, none of whose tokens has a space within."""
    *local, last = normalizers or [{"type": "none"}]
    prefix = [each for each in local if each["type"] == "Prepend"]
    is_plain = not model.get("continuing_subword_prefix") and not model.get("end_of_word_suffix")
    if (
        model["type"] != "BPE"
        or not is_plain
        or (last["type"], last.get("pattern"), last.get("content")) != ("Replace", {"String": " "}, _SPACE)
        or prefix not in ([], [{"type": "Prepend", "prepend": _SPACE}])
        or not all(_is_local(each) for each in local if each not in prefix)
        or _SPACE not in model["vocab"]
        or any(_SPACE in token.lstrip(_SPACE) for token in model["vocab"])
    ):
        return None
    return AT_WORDS_WITHOUT_SPACE if prefix else AT_WORDS


def _flat(part: Mapping[str, Any] | None, name: str) -> list[Any]:
    """Returns the parts of a normalizer or a pre-tokenizer in their order."""
    if part is None:
        return []
    return [each for inner in part[name] for each in _flat(inner, name)] if part["type"] == "Sequence" else [part]


def _is_word(token: Mapping[str, Any]) -> bool:
    """Returns whether an added token can't be found at both sides of a cut."""
    text = token["content"]
    return not token["lstrip"] and not token["rstrip"] and (text.isspace() or not any(map(str.isspace, text)))


def _is_local(normalizer: Mapping[str, Any]) -> bool:
    if normalizer["type"] != "Replace":
        return normalizer["type"] in _LOCAL
    pattern = normalizer["pattern"].get("String")
    return bool(pattern) and not re.search(rf"[{LETTERS}\s]", pattern)


def _splits_words(split: Mapping[str, Any]) -> bool:
    """Returns whether a pre-tokenizer always splits between a letter and a space, whatever is around them."""
    kind = split["type"]
    if kind == "ByteLevel":
        return bool(split["use_regex"])
    if kind == "Metaspace":  # a text that begins with a space gets no other
        return bool(split["split"])
    if kind == "Split":
        whole = (split["behavior"], split["invert"]) in (("Isolated", False), ("Removed", True))
        return whole and _is_known(split["pattern"].get("Regex"))
    return kind in _AT_SPACES


def _is_known(pattern: str | None) -> bool:
    """Returns whether a regular expression consists of known alternatives."""
    while pattern:
        part = next((each for each in _ALTERNATIVES if pattern == each or pattern.startswith(f"{each}|")), None)
        if part is None:
            return False
        pattern = pattern[len(part) + 1 :]
        if not pattern:
            return True
    return False
