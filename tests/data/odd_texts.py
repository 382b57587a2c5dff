"""Texts that are known to be difficult for tokenizers."""

from __future__ import annotations

import random
import unicodedata

# The tokenizers library normalises by an older Unicode than Python; these characters mean the same in both. The
# other planes have none of them.
CHARACTERS = [
    chr(code)
    for code in (*range(0x30000), *range(0xE0000, 0xE1000))
    if unicodedata.ucd_3_2_0.category(chr(code)) not in ("Cn", "Cs", "Co")
]
SPELLED_LIKE_SPECIAL = (
    *("<pad>", "</s>", "<unk>", "<0x0A>", "<0xFF>", "<0x4a>", "<0xFf>", "<0x+a>"),
    *("<s>", "▁", "Ġ", "\ufeff", "\ufffd"),
)


def random_text(chooser: random.Random) -> str:
    kinds = (
        lambda: chooser.choice(CHARACTERS),
        lambda: chooser.choice("one two<>"),
        lambda: chooser.choice("  \n\t\r\x00\x0b\x0c\x85\u2028"),
        lambda: chooser.choice(SPELLED_LIKE_SPECIAL),
        lambda: chooser.choice(" \nx漢") * chooser.randrange(100, 400),  # cut for learning
        lambda: chooser.choice("😀🏳️‍🌈漢字ﬁ½é́ⅸ\u00a0"),
    )
    return "".join(chooser.choice(kinds)() for _ in range(chooser.randrange(25)))
