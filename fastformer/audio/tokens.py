"""The tokens of Whisper: prompts, special ids, and the words that a text's tokens make."""

from __future__ import annotations

import string
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from fastformer.settings import suggestion

TIMES_PER_SECOND = 50
SECONDS_PER_TIMESTAMP = 0.02
TASKS = ("transcribe", "translate")
# The English names of languages, by their codes in prompts.
LANGUAGE_NAMES = {
    "en": "english", "zh": "chinese", "de": "german", "es": "spanish", "ru": "russian", "ko": "korean",
    "fr": "french", "ja": "japanese", "pt": "portuguese", "tr": "turkish", "pl": "polish", "ca": "catalan",
    "nl": "dutch", "ar": "arabic", "sv": "swedish", "it": "italian", "id": "indonesian", "hi": "hindi",
    "fi": "finnish", "vi": "vietnamese", "he": "hebrew", "uk": "ukrainian", "el": "greek", "ms": "malay",
    "cs": "czech", "ro": "romanian", "da": "danish", "hu": "hungarian", "ta": "tamil", "no": "norwegian",
    "th": "thai", "ur": "urdu", "hr": "croatian", "bg": "bulgarian", "lt": "lithuanian", "la": "latin", "mi": "maori",
    "ml": "malayalam", "cy": "welsh", "sk": "slovak", "te": "telugu", "fa": "persian", "lv": "latvian",
    "bn": "bengali", "sr": "serbian", "az": "azerbaijani", "sl": "slovenian", "kn": "kannada", "et": "estonian",
    "mk": "macedonian", "br": "breton", "eu": "basque", "is": "icelandic", "hy": "armenian", "ne": "nepali",
    "mn": "mongolian", "bs": "bosnian", "kk": "kazakh", "sq": "albanian", "sw": "swahili", "gl": "galician",
    "mr": "marathi", "pa": "punjabi", "si": "sinhala", "km": "khmer", "sn": "shona", "yo": "yoruba", "so": "somali",
    "af": "afrikaans", "oc": "occitan", "ka": "georgian", "be": "belarusian", "tg": "tajik", "sd": "sindhi",
    "gu": "gujarati", "am": "amharic", "yi": "yiddish", "lo": "lao", "uz": "uzbek", "fo": "faroese",
    "ht": "haitian creole", "ps": "pashto", "tk": "turkmen", "nn": "nynorsk", "mt": "maltese", "sa": "sanskrit",
    "lb": "luxembourgish", "my": "myanmar", "bo": "tibetan", "tl": "tagalog", "mg": "malagasy", "as": "assamese",
    "tt": "tatar", "haw": "hawaiian", "ln": "lingala", "ha": "hausa", "ba": "bashkir", "jw": "javanese",
    "su": "sundanese", "yue": "cantonese",
}  # fmt: skip
# Their texts have no spaces between words: a word is what makes whole characters.
_UNSPACED = {"zh", "ja", "th", "lo", "my", "yue"}
# Marks that name sounds or speakers rather than what is said, which are not generated: the whole mark if it is one
# token; of a note, which may be several tokens, the first one.
_MARKS = [*'"#()*+/:;<=>@[\\]^_`{|}~「」『』', "<<", ">>", "<<<", ">>>", "--", "---", "-(", "-[", "('", '("']
_MARKS += ["((", "))", "(((", ")))", "[[", "]]", "{{", "}}", "♪♪", "♪♪♪"]
_NOTES = "♩♪♫♬♭♮♯"
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # of bytes that are no whole character


class Tokens:
    """The tokenizer of a Whisper model.

    Args:
        tokenizer: a `tokenizers.Tokenizer`.
        is_multilingual: whether a prompt names the language and the task.

    Attributes:
        text_end: the id of the end of a text, above the ids of texts and below all other ids.
        start, previous, no_timestamps: the ids of the start of a transcript, of the text before it, and of a transcript
            without times.
        first_timestamp: the id of 0 seconds; each id after it is 20 ms later.
        languages: the codes of the model's languages.
    """

    def __init__(self, tokenizer: Any, is_multilingual: bool) -> None:
        self._tokenizer, self.is_multilingual = tokenizer, is_multilingual
        self.text_end, self.start, self.previous, self.no_timestamps = (
            self._special(name) for name in ("endoftext", "startoftranscript", "startofprev", "notimestamps")
        )
        self.first_timestamp = self.no_timestamps + 1
        ids = range(self.start + 1, self._special("translate"))
        self.languages = [self.language_of(token) for token in ids] if is_multilingual else ["en"]

    def _special(self, *names: str) -> int:
        ids = [self._tokenizer.token_to_id(f"<|{name}|>") for name in names]
        first = next((token for token in ids if token is not None), None)
        if first is None:
            raise ValueError(f"expected a tokenizer of Whisper, got one without the token <|{names[0]}|>")
        return int(first)

    def language_of(self, token: int) -> str:
        """Returns the code of a language's token."""
        return str(self._tokenizer.id_to_token(token))[2:-2]

    def check(self, language: str | None, task: str) -> None:
        """Raises a ValueError for a language or a task that the model doesn't have."""
        if task not in TASKS:
            raise ValueError(f"expected task transcribe or translate, got {task!r}{suggestion(task, TASKS)}")
        if language is not None and self.is_multilingual and language not in self.languages:
            raise ValueError(
                f"expected a language of the model ({', '.join(self.languages)}), got {language!r}"
                f"{suggestion(language, self.languages)}"
            )

    def sequence(self, language: str, task: str) -> list[int]:
        """Returns the ids that begin a transcript."""
        if not self.is_multilingual:
            return [self.start]
        return [self.start, self._special(language), self._special(task)]

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids, without special ones and times."""
        return str(self._tokenizer.decode([token for token in ids if token < self.text_end]))

    def is_timestamp(self, token: int) -> bool:
        """Whether a token is a time."""
        return token >= self.first_timestamp

    def seconds(self, token: int) -> float:
        """Returns the time of a timestamp's token within its window."""
        return (token - self.first_timestamp) * SECONDS_PER_TIMESTAMP

    def suppressed(self, ids: Sequence[int] | None) -> tuple[int, ...]:
        """Returns the ids that are never generated: the given ones, -1 for all marks, and those of prompts."""
        if not ids:
            return ()
        prompts = [self._special(name) for name in ("transcribe", "translate", "startoflm")]
        prompts += [self.start, self.previous, self._special("nospeech", "nocaptions")]
        return (*sorted({*(token for token in ids if token >= 0), *(self._marks if -1 in ids else ()), *prompts}),)

    @cached_property
    def _marks(self) -> set[int]:
        ids = {*self.encode(" -")[:1], *self.encode(" '")[:1]}  # may stand within a word, not before it
        for mark in (*_MARKS, *_NOTES):
            for tokens in (self.encode(mark), self.encode(" " + mark)):
                ids.update(tokens[:1] if len(tokens) == 1 or mark in _NOTES else ())
        return ids

    def words(self, ids: Sequence[int], language: str) -> list[tuple[str, list[int]]]:
        """Returns the words of a text, each with its ids. The end of the text is a word of its own."""
        words: list[tuple[str, list[int]]] = []
        for text, tokens in self._characters(ids):
            is_mark = text.strip() in string.punctuation
            begins = text.startswith(" ") or is_mark or tokens[0] >= self.text_end or not words
            if language in _UNSPACED or begins:
                words.append((text, tokens))
            else:
                words[-1] = words[-1][0] + text, words[-1][1] + tokens
        return words

    def _characters(self, ids: Sequence[int]) -> list[tuple[str, list[int]]]:
        """Returns the shortest parts that are whole characters, each with its ids."""
        whole, parts, length = self._spelled(ids), list[tuple[str, list[int]]](), 0
        begin = 0
        for end in range(1, len(ids) + 1):
            text = self._spelled(ids[begin:end])
            place = text.find(_UNKNOWN)
            # A character that stays unknown in the whole text doesn't wait for its other bytes.
            if place < 0 or whole[length + place : length + place + 1] == _UNKNOWN:
                parts.append((text, list(ids[begin:end])))
                length += len(text)
                begin = end
        return parts

    def _spelled(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, special ones included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))
