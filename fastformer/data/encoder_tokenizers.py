"""Tokenizers of encoders: texts and pairs of texts with the special tokens around them, cut to the model's length.

As everywhere in fastformer, a special token that is spelled out in a text is ordinary text, with one exception: if a
Unigram model in tokenizer.json has the token as a piece of its vocabulary, the `tokenizers` library finds it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fastformer.data.checks import check_text, check_texts, checked_ids
from fastformer.data.model_tokenizers import ModelTokenizer, check_largest, piece_model, read_piece_model
from fastformer.data.tokenizer import library_errors, read_backend, visible
from fastformer.special_ids import SpecialIds

if TYPE_CHECKING:
    import sentencepiece
    import tokenizers

Side = Literal["right", "left"]
Pair = tuple[str, str]
Encoded = tuple[list[int], list[int]]  # ids and token types


def lengths_of_pair(first: int, second: int, room: int) -> tuple[int, int]:
    """Returns the lengths to which two texts are cut to fit together; the longer one is cut first.

    Args:
        first, second: the numbers of their tokens.
        room: the most tokens of both together.
    """
    if first + second <= room:
        return first, second
    short, long = sorted((first, second))
    long = max(short, room - short) if short <= room else short
    if short + long > room:
        short, long = room // 2, room - room // 2
    return (short, long) if first <= second else (long, short)


class EncoderTokenizer(ModelTokenizer):
    """The base of encoders' tokenizers.

    Args:
        vocab_size, special_ids: the size and the special ids of the model's vocabulary.
        max_len: the number of tokens that texts are cut to, special tokens included.
        has_token_types: whether the texts of a pair have types 0 and 1; else all types are 0.
        side: the end at which texts are cut: "right" or "left".

    Attributes:
        max_len, has_token_types: the same.
    """

    def __init__(
        self,
        vocab_size: int,
        special_ids: SpecialIds,
        max_len: int,
        *,
        has_token_types: bool = False,
        side: Side = "right",
    ) -> None:
        super().__init__(vocab_size, special_ids)
        self.max_len, self.has_token_types, self._side = max_len, has_token_types, side

    def encode(self, text: str, max_len: int | None = None) -> list[int]:
        """Encodes a text to ids with the special tokens around it; see `encode_batch`."""
        check_text(text)
        return self.encode_batch([text], max_len)[0]

    def encode_batch(self, texts: Sequence[str], max_len: int | None = None) -> list[list[int]]:
        """Encodes many texts to ids, each with the special tokens around it.

        Args:
            texts: the texts to encode.
            max_len: the number of tokens that each is cut to, special tokens included; None: the tokenizer's max_len.

        Raises:
            ValueError: a lone surrogate, or a text that the tokenizer can't encode; a max_len without room for a token.
        """
        check_texts(texts)
        for text in texts:
            check_text(text)
        return self._encode_texts([*texts], self._limit(max_len, is_pair=False))

    def encode_pair(self, first: str, second: str, max_len: int | None = None) -> Encoded:
        """Encodes two texts to ids and token types; see `encode_pairs`."""
        return self.encode_pairs([(first, second)], max_len)[0]

    def encode_pairs(self, pairs: Sequence[Pair], max_len: int | None = None) -> list[Encoded]:
        """Encodes pairs of texts to ids and token types, with the special tokens around and between the texts.

        Args:
            pairs: two texts each.
            max_len: the number of tokens that a pair is cut to, the longer text first; see `encode_batch`.

        Raises:
            ValueError: see `encode_batch`; a pair of anything but two texts.
        """
        for pair in pairs:
            if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
                raise ValueError(f"expected pairs of two texts, got {pair!r:.60}")
            check_text(pair[0])
            check_text(pair[1])
        encoded = self._encode_pairs([(first, second) for first, second in pairs], self._limit(max_len, is_pair=True))
        if self.has_token_types:
            return encoded
        return [(ids, [0] * len(ids)) for ids, _ in encoded]

    def _limit(self, max_len: int | None, *, is_pair: bool) -> int:
        least = self._num_special(is_pair) + 1
        limit = self.max_len if max_len is None else max_len
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < least:
            raise ValueError(
                f"expected a max_len of at least {least}, for the special tokens and one more token, got {limit!r}"
            )
        return limit

    def _num_special(self, is_pair: bool) -> int:
        """Returns the number of special tokens around one text or a pair."""
        raise NotImplementedError

    def _encode_texts(self, texts: list[str], limit: int) -> list[list[int]]:
        raise NotImplementedError

    def _encode_pairs(self, pairs: list[Pair], limit: int) -> list[Encoded]:
        raise NotImplementedError

    def _values(self) -> dict[str, Any]:
        return {"max_len": self.max_len, "has_token_types": self.has_token_types, "side": self._side}


class BackendEncoderTokenizer(EncoderTokenizer):
    """An encoder's tokenizer of the `tokenizers` library, whose post-processor puts special tokens around texts.

    Args:
        backend: the library's object. Padding and truncation that it may hold are switched off.
        vocab_size, special_ids, max_len: see `EncoderTokenizer`.
        name: the name of the tokenizer in messages.
        options: see `EncoderTokenizer`.

    Raises:
        ValueError: tokens beyond vocab_size.
    """

    type = "encoder"

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        vocab_size: int,
        special_ids: SpecialIds,
        max_len: int,
        name: str = "the tokenizer",
        **options: Any,
    ) -> None:
        super().__init__(vocab_size, special_ids, max_len, **options)
        check_largest(max(backend.get_vocab().values(), default=0), vocab_size)
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True  # "[SEP]" that is spelled out in a text is ordinary text
        self._backend, self._name = backend, name

    def _num_special(self, is_pair: bool) -> int:
        return int(self._backend.num_special_tokens_to_add(is_pair))

    def _encode_texts(self, texts: list[str], limit: int) -> list[list[int]]:
        found = [encoding.ids for encoding in self._whole(texts)]
        for place, ids in enumerate(found):
            if len(ids) > limit:
                found[place] = self._cut([texts[place]], limit).ids
        return found

    def _encode_pairs(self, pairs: list[Pair], limit: int) -> list[Encoded]:
        found = [(encoding.ids, encoding.type_ids) for encoding in self._whole(pairs)]
        for place, (ids, _) in enumerate(found):
            if len(ids) > limit:
                cut = self._cut(pairs[place], limit)
                found[place] = cut.ids, cut.type_ids
        return found

    def _whole(self, inputs: Sequence[Any]) -> list[tokenizers.Encoding]:
        """Encodes texts or pairs on all cores, without cutting them."""
        try:
            with library_errors(f"{self._name} can't encode this text"):
                return list(self._backend.encode_batch_fast(inputs, add_special_tokens=True))
        except ValueError:
            for each in inputs if len(inputs) > 1 else ():
                with library_errors(f"{self._name} can't encode {each!r:.60}"):
                    self._backend.encode_batch_fast([each], add_special_tokens=True)
            raise

    def _cut(self, texts: Sequence[str], limit: int) -> tokenizers.Encoding:
        """Encodes one text or two, and cuts them. The library can cut too, but then for all threads that share it."""
        with library_errors(f"{self._name} can't encode this text"):
            parts = [self._backend.encode(text, add_special_tokens=False) for text in texts]
            room = limit - self._num_special(len(texts) == 2)
            lengths = (room,) if len(parts) == 1 else lengths_of_pair(len(parts[0]), len(parts[1]), room)
            for part, length in zip(parts, lengths, strict=True):
                part.truncate(length, direction=self._side)
            return self._backend.post_process(parts[0], parts[1] if len(parts) > 1 else None, True)

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes ids to text, without special tokens."""
        kept = list(checked_ids(ids, self.vocab_size))
        with library_errors(f"{self._name} can't decode these ids"):
            return str(self._backend.decode(kept, skip_special_tokens=True))

    def tokens(self, ids: Iterable[int]) -> list[str]:
        return [visible(self._backend.id_to_token(i)) for i in checked_ids(ids, self.vocab_size)]

    def _values(self) -> dict[str, Any]:
        return {**super()._values(), "backend": json.loads(self._backend.to_str())}


class PieceEncoderTokenizer(EncoderTokenizer):
    """XLM-RoBERTa's SentencePiece model, with fairseq's special tokens in front of its pieces.

    <s> is 0, <pad> 1, </s> 2, <unk> 3; a piece has its number in the SentencePiece model, plus one. Two texts are
    <s> A </s></s> B </s>.

    Args:
        processor: the SentencePiece model.
        vocab_size, special_ids, max_len: see `EncoderTokenizer`.
        options: see `EncoderTokenizer`.

    Raises:
        ValueError: more pieces than ids.
    """

    type = "encoder pieces"
    _BOS, _PAD, _EOS, _UNK, _SHIFT = 0, 1, 2, 3, 1

    def __init__(
        self,
        processor: sentencepiece.SentencePieceProcessor,
        vocab_size: int,
        special_ids: SpecialIds,
        max_len: int,
        **options: Any,
    ) -> None:
        super().__init__(vocab_size, special_ids, max_len, **options)
        self._processor, self._size = processor, int(processor.get_piece_size())
        if self._size + self._SHIFT > vocab_size:
            raise ValueError(f"expected ids below {vocab_size}, got {self._size} pieces: is it another model's?")

    def _num_special(self, is_pair: bool) -> int:
        return 4 if is_pair else 2

    def _ids(self, text: str) -> list[int]:
        unk = self._processor.unk_id()
        return [self._UNK if i == unk else i + self._SHIFT for i in self._processor.encode(text)]

    def _kept(self, ids: list[int], length: int) -> list[int]:
        return ids[:length] if self._side == "right" else ids[max(0, len(ids) - length) :]

    def _encode_texts(self, texts: list[str], limit: int) -> list[list[int]]:
        return [[self._BOS, *self._kept(self._ids(text), limit - 2), self._EOS] for text in texts]

    def _encode_pairs(self, pairs: list[Pair], limit: int) -> list[Encoded]:
        found: list[Encoded] = []
        for pair in pairs:
            first, second = map(self._ids, pair)
            lengths = lengths_of_pair(len(first), len(second), limit - 4)
            first, second = map(self._kept, (first, second), lengths)
            ids = [self._BOS, *first, self._EOS, self._EOS, *second, self._EOS]
            found.append((ids, [0] * len(ids)))
        return found

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes ids to text, without special tokens."""
        known = range(self._UNK + 1, self._size + self._SHIFT)
        kept = [i - self._SHIFT for i in checked_ids(ids, self.vocab_size) if i in known]
        return str(self._processor.decode(kept))

    def tokens(self, ids: Iterable[int]) -> list[str]:
        special = {self._BOS: "<s>", self._PAD: "<pad>", self._EOS: "</s>", self._UNK: "<unk>"}
        known = range(self._UNK + 1, self._size + self._SHIFT)
        own = self._processor.id_to_piece
        each = checked_ids(ids, self.vocab_size)
        return [visible(special.get(i) or (own(i - self._SHIFT) if i in known else None)) for i in each]

    def _values(self) -> dict[str, Any]:
        return {**super()._values(), "model": piece_model(self._processor)}


ENCODER_TOKENIZERS = (BackendEncoderTokenizer.type, PieceEncoderTokenizer.type)


def saved_encoder_tokenizer(file: Path, values: Mapping[str, Any]) -> EncoderTokenizer:
    """Loads a tokenizer that `save` of one of these classes wrote, whose type is one of `ENCODER_TOKENIZERS`.

    Args:
        file: tokenizer.json.
        values: its contents.

    Raises:
        ImportError: the library that the tokenizer needs is not installed.
        KeyError, TypeError, ValueError, AttributeError: damaged contents; `load_tokenizer` names the file.
    """
    sizes = int(values["vocab_size"]), SpecialIds.from_dict(values["special_ids"]), int(values["max_len"])
    options: dict[str, Any] = {"has_token_types": bool(values["has_token_types"]), "side": str(values["side"])}
    if values["type"] == BackendEncoderTokenizer.type:
        return BackendEncoderTokenizer(read_backend(file, values["backend"]), *sizes, str(file), **options)
    return PieceEncoderTokenizer(read_piece_model(file, values["model"]), *sizes, **options)
