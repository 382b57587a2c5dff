"""Constraints: a JSON schema, a regular expression, a list of choices or a grammar that new tokens must match.

The library llguidance computes at each step which tokens may come next, from the bytes of each token
(`Tokenizer.token_bytes`). A row ends when its text is complete and nothing can follow, or by an id that ends it where
the text may end.
"""

from __future__ import annotations

import copy
import json
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

ConstraintKind = Literal["schema", "regex", "choices", "grammar"]
Mask = npt.NDArray[np.uint32]

# JSON may have one space, or a line end and an indentation, between its parts. Without a limit, small models write
# white space up to the limit of tokens.
WHITE_SPACE = r"( |\n[ \t]{0,40})"
_MOST_GRAMMARS = 32  # the compiled grammars that a vocabulary keeps besides those that are in use
_MOST_FORCED = 1024  # the texts whose tokens a vocabulary remembers
_PREFIXES = ("\n", "=", "a")  # texts in front of a text that a tokenizer would else begin with a space
_SPACE = b" \t\r\n"
_BETWEEN = _SPACE + b"[],;"  # a model may write it between calls
_USED = ("LLMatcher", "LLParserLimits", "LLTokenizer", "TokenizerWrapper", "grammar_from")  # names of the library
_vocabularies: weakref.WeakKeyDictionary[Any, Vocabulary] = weakref.WeakKeyDictionary()


class Constraint(NamedTuple):
    """What new tokens must match.

    Attributes:
        kind: the name of the option.
        text: a schema or a list of choices as JSON, a regular expression, or a grammar in Lark's syntax.
    """

    kind: ConstraintKind
    text: str


class Triggers(NamedTuple):
    """Texts behind which a row is under a constraint, until that is complete. The row is free before and afterwards.

    Attributes:
        constraint: the constraint.
        texts: the texts, and for each the part at its end that belongs to the constraint, which may be empty.
        shown: the texts of special tokens, by id. Other special tokens have no text.
        is_first: whether these texts count only where the row begins, and behind a constraint.
        hidden: the marks around a part at the beginning in which no text counts; None: there is none.
        is_open: whether the row begins behind the first of these marks.
    """

    constraint: Constraint
    texts: Mapping[str, str]
    shown: Mapping[int, str]
    is_first: bool = False
    hidden: tuple[str, str] | None = None
    is_open: bool = False


class Grammar:
    """A constraint that was compiled for a vocabulary, which finds it as long as this object exists.

    Attributes:
        state: llguidance's LLMatcher at the beginning of a text.
    """

    def __init__(self, state: Any) -> None:
        self.state = state


class Vocabulary:
    """The tokens of a model as bytes, and the grammars that were compiled for them.

    Args:
        tokenizer: has encode and token_bytes.
        vocab_size: the number of the model's ids.

    Attributes:
        anchor: the id of a letter, or no id. The text of tokens behind it is their bytes, whereas decoding may omit the
            first space of a text.

    Raises:
        ImportError: llguidance is not installed, or can't be imported.
        ValueError: the tokenizer doesn't know the bytes of its tokens.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        library = _library()
        data = getattr(tokenizer, "token_bytes", None)
        if data is None:
            raise ValueError(
                "expected a tokenizer that knows the bytes of its tokens, as those of fastformer.data do, to constrain "
                f"the text, got {type(tokenizer).__name__}"
            )
        self.vocab_size, self.bytes = vocab_size, [*data[:vocab_size], *[None] * (vocab_size - len(data))]
        self.anchor = [i for i, one in enumerate(self.bytes) if one and len(one) == 1 and one.isalpha()][-1:]
        # The id behind the last one stands for the end of the text: which ids end it depends on the request.
        self._wrapped = _Wrapped(tokenizer, self.bytes)
        self._tokens = library.LLTokenizer(library.TokenizerWrapper(self._wrapped))
        self._grammars: weakref.WeakValueDictionary[Constraint, Grammar] = weakref.WeakValueDictionary()
        self._latest: OrderedDict[Constraint, Grammar] = OrderedDict()  # the ones that the vocabulary itself keeps

    @classmethod
    def of(cls, tokenizer: Any, vocab_size: int) -> Vocabulary:
        """Returns the vocabulary of a tokenizer, which is made once."""
        if not hasattr(tokenizer, "token_bytes"):
            return cls(tokenizer, vocab_size)  # an error
        vocabulary = _vocabularies.get(tokenizer)
        if vocabulary is None or vocabulary.vocab_size != vocab_size:
            vocabulary = _vocabularies[tokenizer] = cls(tokenizer, vocab_size)
        return vocabulary

    def grammar(self, constraint: Constraint) -> Grammar:
        """Compiles a constraint, unless it is one of the latest or a caller has kept its grammar.

        Raises:
            ValueError: the constraint is wrong, can't be satisfied, or has a part that the library can't enforce.
        """
        grammar = self._grammars.get(constraint)
        if grammar is None:  # several threads may compile; all get the grammar of the first to end
            grammar = self._grammars.setdefault(constraint, self._compile(constraint))
        self._latest.pop(constraint, None)
        self._latest[constraint] = grammar
        while len(self._latest) > _MOST_GRAMMARS:
            self._latest.popitem(last=False)
        return grammar

    def matcher(self, constraint: Constraint, ends: Sequence[int]) -> Matcher:
        """Returns the beginning of a text under a constraint, which ends by the ids `ends`; see `grammar`."""
        return Matcher(self.grammar(constraint).state.deep_copy(), self.vocab_size, ends)

    def late_matcher(self, triggers: Triggers, ends: Sequence[int]) -> LateMatcher:
        """Returns the beginning of a text under a constraint behind some texts; see `matcher`."""
        return LateMatcher(self.matcher(triggers.constraint, ends), triggers, self)

    def text_of(self, token: int, shown: Mapping[int, str]) -> bytes:
        """Returns the text of a token; see `Triggers.shown`."""
        return shown[token].encode() if token in shown else self.bytes[token] or b""

    def split(self, text: bytes) -> list[int]:
        """Returns tokens of a text, the longest possible ones; of the part before what no token begins."""
        return self._wrapped.split(text)

    def _compile(self, constraint: Constraint) -> Grammar:
        library = _library()
        try:
            grammar = _grammar_of(constraint, library)
            limits = library.LLParserLimits(verbose_errors=False)
            state = library.LLMatcher(self._tokens, grammar, log_level=0, limits=limits)
            # Warnings are about parts that wouldn't be enforced.
            problems = state.get_grammar_warnings()
            if not state.is_error():
                state.compute_bitmask()  # finds grammars without any text, and those that are too complex
            problems += [state.get_error()] if state.is_error() else []
        except ValueError as error:
            problems = [str(error)]
        if problems:
            raise ValueError(f"expected a {constraint.kind} that can be enforced: {problems[0]:.500}")
        return Grammar(state)


class _Wrapped:
    """A tokenizer as llguidance reads it. The token behind the last one is the end of the text."""

    bos_token_id = None

    def __init__(self, tokenizer: Any, data: Sequence[bytes | None]) -> None:
        self.eos_token_id = len(data)
        # A token whose bytes begin with FF is special: only a grammar that names its id allows it.
        self.tokens = [*(one or b"\xff[%d]" % i for i, one in enumerate(data)), b"\xff<end>"]
        self.special_token_ids = [*(i for i, one in enumerate(data) if not one), self.eos_token_id]
        self._tokenizer, self._data = weakref.ref(tokenizer), data  # a vocabulary lives as long as its tokenizer
        self._ids: dict[bytes, int] = {}
        for i, one in enumerate(data):
            if one:
                self._ids.setdefault(one, i)
        self._longest = max(map(len, self._ids), default=0)
        self._encoded: dict[bytes, list[int]] = {}

    def __call__(self, text: bytes | str) -> list[int]:
        """Encodes a text that the grammar forces: if possible, in the tokens that the model has seen for it."""
        whole = text.encode() if isinstance(text, str) else text
        if whole not in self._encoded:
            if len(self._encoded) >= _MOST_FORCED:
                self._encoded.clear()
            self._encoded[whole] = self._encode(whole)
        return self._encoded[whole]

    def _encode(self, whole: bytes) -> list[int]:
        tokenizer: Any = self._tokenizer()
        try:
            for prefix in () if tokenizer is None else ("", *_PREFIXES):
                ids, before = tokenizer.encode(prefix + whole.decode()), prefix.encode()
                data = [self._data[i] if i < len(self._data) else None for i in ids]
                for place in range(len(ids) + 1 if prefix else 1):
                    if b"".join(one or b"\xff" for one in data[place:]) == whole and (
                        b"".join(one or b"\xff" for one in data[:place]).lstrip(b" ") == before
                    ):
                        return ids[place:]
        except ValueError:  # not UTF-8, or a text that the tokenizer can't encode
            pass
        return self.split(whole)

    def split(self, whole: bytes) -> list[int]:
        """See `Vocabulary.split`."""
        ids, begin = [], 0
        while begin < len(whole):
            longest = min(self._longest, len(whole) - begin)
            size = next((n for n in range(longest, 0, -1) if whole[begin : begin + n] in self._ids), 0)
            if not size:
                break
            ids.append(self._ids[whole[begin : begin + size]])
            begin += size
        return ids


class Matcher:
    """The state of a row under a constraint.

    Args:
        state: llguidance's LLMatcher.
        vocab_size: the number of the model's ids.
        ends: the ids that end the row; they are allowed where the text may end, and only there.
    """

    def __init__(self, state: Any, vocab_size: int, ends: Sequence[int]) -> None:
        self._state, self._size, self._ends = state, vocab_size, tuple(ends)
        self.num_words = -(-(vocab_size + 1) // 32)

    is_bound = True  # some tokens are not allowed to come next

    def copy(self) -> Matcher:
        """Returns an independent copy."""
        return Matcher(self._state.deep_copy(), self._size, self._ends)

    def fill(self, mask: Mask) -> None:
        """Writes which tokens may come next, (num_words,): token i may if bit i % 32 of word i // 32 is set.

        Raises:
            ValueError: the constraint is too complex to continue.
        """
        self._state.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._state.is_error():
            raise ValueError(f"the constraint can't be followed any further: {self._state.get_error():.500}")
        may_end = _is_set(mask, self._size)
        for token in (self._size, *self._ends):
            word, bit = token >> 5, np.uint32(1 << (token & 31))
            mask[word] = mask[word] | bit if may_end else mask[word] & ~bit

    def take(self, token: int) -> None:
        """Continues after a token.

        Raises:
            ValueError: the constraint doesn't allow it.
        """
        if token not in self._ends and not self._state.consume_token(token):
            raise ValueError(f"token {token} breaks the constraint: {self._state.get_error():.500}")

    def allows(self, tokens: Sequence[int]) -> bool:
        """Continues after tokens if the constraint allows all of them, and returns whether it does."""
        return bool(self._state.try_consume_tokens([*tokens]) == len(tokens))

    def forced(self) -> list[int]:
        """Returns the tokens that come next in any case, which may be none."""
        return list(self._state.compute_ff_tokens())

    @property
    def is_complete(self) -> bool:
        """Whether the text matches, and nothing can follow."""
        return bool(self._state.is_stopped()) and not self._state.is_error()


class LateMatcher:
    """The state of a row that is under a constraint only behind some texts. It has the methods of `Matcher`.

    A token may have the end of such a text and more. If the constraint doesn't allow what is behind, it doesn't begin.

    Args:
        matcher: the beginning of the constraint.
        triggers: the texts.
        vocabulary: the tokens.
    """

    is_complete = False  # the row may continue

    def __init__(self, matcher: Matcher, triggers: Triggers, vocabulary: Vocabulary) -> None:
        self._matcher, self._triggers, self._vocabulary = matcher, triggers, vocabulary
        self._texts = {text.encode(): part.encode() for text, part in triggers.texts.items()}
        self._current: Matcher | None = None
        self._text = b""  # the last of the text, which may be the beginning of a trigger
        self._skipped = _SPACE  # a row may begin with it, before a trigger
        self._part: Literal["start", "hidden", "free", "over"] = "free"
        if triggers.hidden is not None:
            self._part = "hidden" if triggers.is_open else "start"
        self.num_words = matcher.num_words

    def copy(self) -> LateMatcher:
        """Returns an independent copy."""
        other = copy.copy(self)
        other._current = None if self._current is None else self._current.copy()
        return other

    @property
    def is_bound(self) -> bool:
        """Whether some tokens are not allowed to come next."""
        return self._current is not None

    def fill(self, mask: Mask) -> None:
        """Writes which tokens may come next; see `Matcher.fill`."""
        if self._current is None:
            mask.fill(0xFFFFFFFF)
        else:
            self._current.fill(mask)

    def forced(self) -> list[int]:
        """Returns the tokens that come next in any case, which may be none."""
        return [] if self._current is None else self._current.forced()

    def take(self, token: int) -> None:
        """Continues after a token; see `Matcher.take`."""
        if self._current is not None:
            self._current.take(token)
            self._leave()
        elif self._part != "over":
            self._text += self._vocabulary.text_of(token, self._triggers.shown)
            if self._is_free() and (begun := self._begun()) is not None:
                matcher, ids, self._text = self._matcher.copy(), self._vocabulary.split(begun), b""
                if b"".join(self._vocabulary.bytes[i] or b"" for i in ids) == begun and matcher.allows(ids):
                    self._current = matcher
                    self._leave()

    def _leave(self) -> None:
        """Ends a constraint that is complete."""
        if self._current is not None and self._current.is_complete:
            self._current, self._text, self._skipped = None, b"", _BETWEEN

    def _is_free(self) -> bool:
        """Reads the hidden part; returns whether it has ended."""
        if self._triggers.hidden is None or self._part == "free":
            return True
        begin, end = (mark.encode() for mark in self._triggers.hidden)
        if self._part == "start":
            text = self._text.lstrip()
            if not text.startswith(begin):
                if not begin.startswith(text):
                    self._part = "free"
                return self._part == "free"
            self._part, self._text = "hidden", text[len(begin) :]
        _, found, behind = self._text.partition(end)
        self._text = behind if found else self._text[-len(end) :]
        self._part = "free" if found else "hidden"
        return bool(found)

    def _begun(self) -> bytes | None:
        """Returns the beginning of what is under the constraint, which may be empty; None: nothing is yet."""
        if self._triggers.is_first:
            self._text = text = self._text.lstrip(self._skipped)
            found = [(0, trigger) for trigger in self._texts if text.startswith(trigger)]
            if not found and not any(trigger.startswith(text) for trigger in self._texts):
                self._part = "over"
        else:
            text = self._text
            found = [(place, trigger) for trigger in self._texts if (place := text.find(trigger)) >= 0]
            self._text = text[-max(map(len, self._texts)) :]
        if not found:
            return None
        place, trigger = min(found)
        return self._texts[trigger] + text[place + len(trigger) :]


def allowed_tokens(masks: Mask, vocab_size: int) -> npt.NDArray[np.bool_]:
    """Returns masks with a boolean for each token, (rows, vocab_size)."""
    bits = np.unpackbits(masks.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
    return bits.view(np.bool_)


def _is_set(mask: Mask, token: int) -> bool:
    return bool(int(mask[token >> 5]) >> (token & 31) & 1)


def _grammar_of(constraint: Constraint, library: ModuleType) -> str:
    matcher, text = library.LLMatcher, constraint.text
    if constraint.kind == "schema":
        options = {"whitespace_pattern": WHITE_SPACE}
        return str(matcher.grammar_from_json_schema(text, overrides=options))
    if constraint.kind == "regex":
        return str(matcher.grammar_from_regex(text))
    if constraint.kind == "choices":
        choices = " | ".join(json.dumps(one, ensure_ascii=False) for one in json.loads(text))
        return str(matcher.grammar_from_lark(f"start: {choices}"))
    return str(library.grammar_from("grammar", text))


def is_installed() -> bool:
    """Whether the library that computes constraints is there, even if it can't be imported."""
    return find_spec("llguidance") is not None


def why_broken() -> str | None:
    """Returns why the library can't be used, although it is installed; None: it can, or it is not installed."""
    try:
        _library()
    except ImportError as error:
        return str(error) if is_installed() else None
    return None


def _library() -> ModuleType:
    try:
        import llguidance
    except Exception as error:  # a damaged library may raise any
        if is_installed():
            raise ImportError(f"the llguidance library is installed, but can't be imported: {error}") from error
        raise ImportError(
            "a schema, a regex, choices or a grammar needs the llguidance library: pip install 'fastformer[structured]'"
        ) from error
    if missing := [name for name in _USED if not hasattr(llguidance, name)]:
        raise ImportError(f"the llguidance library is installed, but in a version without {missing[0]}")
    return llguidance
