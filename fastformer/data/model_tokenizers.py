"""Tokenizers of pretrained models, with the models' own ids.

`ForeignTokenizer` (`tokenizer_files.py`) renumbers another library's tokens, for a model that is trained from scratch.
Here the model is already trained, so each token has the id that the model knows it by. As everywhere in fastformer, a
special token that is spelled out in a text is ordinary text.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fastformer.data.checks import check_text, check_texts, checked_ids, until_eos
from fastformer.data.tokenizer import TOKENIZER, encode_batch, library_errors, read_backend, tokenizers_library, visible
from fastformer.files import write_atomically
from fastformer.languages import Languages
from fastformer.special_ids import SpecialIds

if TYPE_CHECKING:
    import sentencepiece
    import tokenizers

_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


class ModelTokenizer:
    """The base of pretrained models' tokenizers.

    Args:
        vocab_size: the number of the model's ids; there may be fewer tokens.
        special_ids: the special ids of the model.
        languages: the languages that the model can be told. If translations begin with a language's token, `decode`
            omits it. None: the model isn't told a language.

    Attributes:
        vocab_size, special_ids, languages: the same.

    Raises:
        ValueError: a language beyond vocab_size.
    """

    type: ClassVar[str]  # in tokenizer.json
    # The tokenizer of an encoder-decoder names PAD as a special token. A language model's may have none: its PAD can be
    # any token, even a word, and only what the tokenizer marks as special is omitted from its text.
    _pad_is_special: ClassVar[bool] = True

    def __init__(self, vocab_size: int, special_ids: SpecialIds, languages: Languages | None = None) -> None:
        self.vocab_size, self.special_ids, self.languages = vocab_size, special_ids, languages
        tokens = () if languages is None else languages.ids.values()
        check_largest(max(tokens, default=0), vocab_size)
        self._unsaid = frozenset(() if languages is None or languages.places == "asked" else tokens)
        if self._pad_is_special:
            self._unsaid |= {special_ids.pad}

    def encode(self, text: str) -> list[int]:
        """Encodes a source to its ids, without EOS."""
        raise NotImplementedError

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes many texts; see `encode`."""
        check_texts(texts)
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes the ids of an output to text: skips special tokens, stops at EOS."""
        raise NotImplementedError

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Returns the token of each id of an output."""
        raise NotImplementedError

    def pieces(self, text: str) -> list[str]:
        """Returns the text uncut: the places where the library's ids don't depend on neighbours are not known."""
        return [text]

    def _said(self, ids: Iterable[int]) -> list[int]:
        """Returns the ids that represent text, up to EOS; some may be special tokens."""
        return [i for i in until_eos(ids, self.special_ids, self.vocab_size) if i not in self._unsaid]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes tokenizer.json."""
        values = {
            "type": self.type,
            "vocab_size": self.vocab_size,
            "special_ids": asdict(self.special_ids),
            **({} if self.languages is None else {"languages": self.languages.to_dict()}),
            **self._values(),
        }
        write_atomically(Path(folder, TOKENIZER), json.dumps(values, ensure_ascii=False).encode() + b"\n")

    def _values(self) -> dict[str, Any]:
        """Returns the values of tokenizer.json other than those that all classes share."""
        raise NotImplementedError


class BackendTokenizer(ModelTokenizer):
    """A tokenizer of the `tokenizers` library, such as BART's.

    Args:
        backend: the library's object. Padding and truncation that it may hold are switched off.
        vocab_size, special_ids: the size and the special ids of the model's vocabulary.
        bos: the id that sources and outputs begin with; None: they begin with the text.
        name: the name of the tokenizer in messages.
        languages: see `ModelTokenizer`.

    Raises:
        ValueError: tokens beyond vocab_size.
    """

    type = "bart"
    words_begin_with_space = True

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        vocab_size: int,
        special_ids: SpecialIds,
        bos: int | None,
        name: str = "the tokenizer",
        languages: Languages | None = None,
    ) -> None:
        super().__init__(vocab_size, special_ids, languages)
        check_largest(max(backend.get_vocab().values(), default=0), vocab_size)
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True  # "</s>" in a text is ordinary text
        self._backend, self._bos, self._name = backend, [] if bos is None else [bos], name

    def encode(self, text: str) -> list[int]:
        """Encodes a text to BOS and its ids, without EOS."""
        check_text(text)
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes many texts on all cores; see `encode`."""
        return [[*self._bos, *ids] for ids in encode_batch(self._backend, texts, self._name)]

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes ids to text: skips special tokens, stops at EOS; broken UTF-8 becomes U+FFFD."""
        kept = self._said(ids)
        with library_errors(f"{self._name} can't decode these ids"):
            return str(self._backend.decode(kept, skip_special_tokens=True))

    def tokens(self, ids: Iterable[int]) -> list[str]:
        return [visible(self._backend.id_to_token(i)) for i in checked_ids(ids, self.vocab_size)]

    def _values(self) -> dict[str, Any]:
        return {"bos": self._bos[0] if self._bos else None, "backend": json.loads(self._backend.to_str())}


class SentencePieceTokenizer(ModelTokenizer):
    """A SentencePiece model whose piece numbers are the pretrained model's ids, such as T5's.

    Args:
        processor: the SentencePiece model.
        vocab_size: the size of the pretrained model's vocabulary, which may have ids without a piece: sentinels
            ("<extra_id_0>"), and unused ones.
        special_ids: the special ids of the model.
        languages: see `ModelTokenizer`.

    Raises:
        ValueError: more pieces than ids.
    """

    type = "t5"

    def __init__(
        self,
        processor: sentencepiece.SentencePieceProcessor,
        vocab_size: int,
        special_ids: SpecialIds,
        languages: Languages | None = None,
    ) -> None:
        super().__init__(vocab_size, special_ids, languages)
        self._processor, self._size = processor, int(processor.get_piece_size())
        if self._size > vocab_size:
            raise ValueError(f"expected ids below {vocab_size}, got {self._size} pieces: is it another model's?")

    def encode(self, text: str) -> list[int]:
        """Encodes a text to its ids, without EOS."""
        check_text(text)
        return list(self._processor.encode(text))

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes ids to text: skips special tokens and ids without a piece, stops at EOS."""
        kept = self._said(ids)
        return str(self._processor.decode([i for i in kept if i < self._size and i != self.special_ids.unk]))

    def tokens(self, ids: Iterable[int]) -> list[str]:
        each = checked_ids(ids, self.vocab_size)
        return [visible(self._processor.id_to_piece(i) if i < self._size else None) for i in each]

    def _values(self) -> dict[str, Any]:
        return {"model": piece_model(self._processor)}


class PieceTokenizer(ModelTokenizer):
    """A SentencePiece model, and a table with the id of each piece, such as M2M100's.

    Args:
        processor: the SentencePiece model.
        vocab: the ids of its pieces, special tokens among them.
        vocab_size, special_ids: the size and the special ids of the model's vocabulary. A piece without an id becomes
            unk.
        languages: see `ModelTokenizer`.

    Raises:
        ValueError: ids of another vocabulary, or no unk.
    """

    type = "pieces"

    def __init__(
        self,
        processor: sentencepiece.SentencePieceProcessor,
        vocab: Mapping[str, int],
        vocab_size: int,
        special_ids: SpecialIds,
        languages: Languages | None = None,
    ) -> None:
        super().__init__(vocab_size, special_ids, languages)
        if special_ids.unk is None:
            raise ValueError("expected an id for pieces that the vocabulary lacks, got none")
        check_largest(max(vocab.values(), default=0), vocab_size)
        self._processor, self._vocab, self._unk = processor, dict(vocab), special_ids.unk
        self._pieces = {i: piece for piece, i in vocab.items()}
        self._names = self._pieces | ({} if languages is None else {i: name for name, i in languages.ids.items()})
        special = (special_ids.pad, special_ids.unk, special_ids.start, *special_ids.eos)
        unsaid = {i for piece, i in vocab.items() if piece in _SPECIAL}
        self._unsaid = self._unsaid.union(special, unsaid)

    def encode(self, text: str) -> list[int]:
        """Encodes a text to its ids, without EOS."""
        check_text(text)
        return [self._vocab.get(piece, self._unk) for piece in self._processor.encode(text, out_type=str)]

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes ids to text: skips special tokens and ids without a piece, stops at EOS."""
        pieces = [self._pieces[i] for i in self._said(ids) if i in self._pieces]
        return str(self._processor.decode_pieces(pieces)).replace("▁", " ").strip()

    def tokens(self, ids: Iterable[int]) -> list[str]:
        return [visible(self._names.get(i)) for i in checked_ids(ids, self.vocab_size)]

    def _values(self) -> dict[str, Any]:
        return {"model": piece_model(self._processor), "vocab": self._vocab}


class MarianTokenizer(ModelTokenizer):
    """A SentencePiece model for each side, and a table with the id of each piece.

    Sources and translations are encoded by `encode` and `encode_target`; translations are decoded. A text may begin
    with the code of the target language, ">>fra<<", if the vocabulary has such codes.

    Args:
        source, target: SentencePiece models.
        source_vocab, target_vocab: the ids of their pieces.
        vocab_size: the number of the model's target ids.
        special_ids: the special ids of the model. A piece without an id becomes unk.
        languages: see `ModelTokenizer`.

    Raises:
        ValueError: ids of another vocabulary, or no unk.
    """

    type = "marian"

    def __init__(
        self,
        source: sentencepiece.SentencePieceProcessor,
        target: sentencepiece.SentencePieceProcessor,
        source_vocab: Mapping[str, int],
        target_vocab: Mapping[str, int],
        vocab_size: int,
        special_ids: SpecialIds,
        languages: Languages | None = None,
    ) -> None:
        super().__init__(vocab_size, special_ids, languages)
        if special_ids.unk is None:
            raise ValueError("expected an id for pieces that the vocabulary lacks, got none")
        check_largest(max(target_vocab.values(), default=0), vocab_size)
        self._source, self._target, self._unk = source, target, special_ids.unk
        self._source_vocab, self._target_vocab = dict(source_vocab), dict(target_vocab)
        self._source_pieces = {i: piece for piece, i in source_vocab.items()}
        self._target_pieces = {i: piece for piece, i in target_vocab.items()}
        self._source_size = max(vocab_size, 1 + max(source_vocab.values(), default=0))

    def encode(self, text: str) -> list[int]:
        """Encodes a source to its ids, without EOS."""
        return self._encode(text, self._source, self._source_vocab)

    def encode_target(self, text: str) -> list[int]:
        """Encodes a translation to its ids, without EOS."""
        return self._encode(text, self._target, self._target_vocab)

    def _encode(
        self, text: str, processor: sentencepiece.SentencePieceProcessor, vocab: Mapping[str, int]
    ) -> list[int]:
        check_text(text)
        pieces = []
        if text.startswith(">>") and (end := text.find("<<")) >= 0:
            pieces, text = [text[: end + 2]], text[end + 2 :]
        return [vocab.get(piece, self._unk) for piece in [*pieces, *processor.encode(text, out_type=str)]]

    def decode(self, ids: Iterable[int]) -> str:
        kept = [i for i in self._said(ids) if i != self._unk]
        pieces = [self._target_pieces[i] for i in kept if i in self._target_pieces]
        return str(self._target.decode_pieces(pieces)).replace("▁", " ").strip()

    def tokens(self, ids: Iterable[int]) -> list[str]:
        return [visible(self._target_pieces.get(i)) for i in checked_ids(ids, self.vocab_size)]

    def source_tokens(self, ids: Iterable[int]) -> list[str]:
        """Returns the piece of each id of a source."""
        return [visible(self._source_pieces.get(i)) for i in checked_ids(ids, self._source_size)]

    def _values(self) -> dict[str, Any]:
        return {
            "source": piece_model(self._source),
            "target": piece_model(self._target),
            "source_vocab": self._source_vocab,
            "target_vocab": None if self._source_vocab == self._target_vocab else self._target_vocab,
        }


MODEL_TOKENIZERS = {
    kind.type: kind for kind in (BackendTokenizer, SentencePieceTokenizer, PieceTokenizer, MarianTokenizer)
}


def saved_model_tokenizer(file: Path, values: Mapping[str, Any]) -> ModelTokenizer:
    """Loads a tokenizer that `ModelTokenizer.save` wrote, whose type is one of `MODEL_TOKENIZERS`.

    Args:
        file: tokenizer.json.
        values: its contents.

    Raises:
        ImportError: the library that the tokenizer needs is not installed.
        KeyError, TypeError, ValueError, AttributeError: damaged contents; `load_tokenizer` names the file.
    """
    sizes = int(values["vocab_size"]), SpecialIds.from_dict(values["special_ids"])
    languages = None if values.get("languages") is None else Languages.from_dict(values["languages"])
    if values["type"] == BackendTokenizer.type:
        bos = None if values["bos"] is None else int(values["bos"])
        return BackendTokenizer(read_backend(file, values["backend"]), *sizes, bos, str(file), languages)
    if values["type"] == SentencePieceTokenizer.type:
        return SentencePieceTokenizer(read_piece_model(file, values["model"]), *sizes, languages)
    if values["type"] == PieceTokenizer.type:
        vocab = check_vocab(file, values["vocab"])
        return PieceTokenizer(read_piece_model(file, values["model"]), vocab, *sizes, languages)
    source_vocab = check_vocab(file, values["source_vocab"])
    target_vocab = values["target_vocab"]
    target_vocab = source_vocab if target_vocab is None else check_vocab(file, target_vocab)
    source, target = (read_piece_model(file, values[side]) for side in ("source", "target"))
    return MarianTokenizer(source, target, source_vocab, target_vocab, *sizes, languages)


def byte_level_bpe(
    file: Path, vocab: Mapping[str, int], merges: bytes, *, add_prefix_space: bool
) -> tokenizers.Tokenizer:
    """Builds a byte-level BPE from a vocabulary and its merges.

    Args:
        file: the file of the merges, for messages.
        vocab: the ids of tokens.
        merges: two tokens a line, separated by a space, the first to be merged first, after a line of the version.
        add_prefix_space: whether the first word of a text gets a space.

    Raises:
        ImportError: tokenizers is not installed.
        ValueError: the merges are damaged or don't fit the vocabulary.
    """
    library = tokenizers_library()
    try:
        lines = merges.decode("utf-8").split("\n")
        pairs = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
        backend: tokenizers.Tokenizer = library.Tokenizer(library.models.BPE(vocab=dict(vocab), merges=pairs))
    except Exception as error:  # the library raises nothing more specific than Exception
        raise ValueError(f"{file} is damaged, or of another vocabulary ({error}): copy it again") from error
    backend.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.decoder = library.decoders.ByteLevel()
    backend.add_special_tokens([name for name in _SPECIAL if name in vocab])
    return backend


def added_tokens(backend: tokenizers.Tokenizer) -> dict[str, int]:
    """Returns the ids of the tokens that a tokenizer has in addition to its vocabulary, special tokens included."""
    return {str(token.content): int(i) for i, token in backend.get_added_tokens_decoder().items()}


def check_vocab(file: Path, values: object) -> dict[str, int]:
    """Returns `values` if it maps pieces to ids.

    Raises:
        ValueError: it does not.
    """
    if not isinstance(values, dict) or not values:
        raise ValueError(f"expected {file} to map pieces to ids, got {values!r:.60}")
    for piece, i in values.items():
        if not isinstance(i, int) or isinstance(i, bool) or i < 0:
            raise ValueError(f"expected {file} to map pieces to ids, got {i!r} for {piece!r:.40}")
    return values


def read_sentencepiece(file: Path, model: bytes) -> sentencepiece.SentencePieceProcessor:
    """Loads a SentencePiece model from bytes.

    Args:
        file: the file of the bytes, for messages.
        model: the bytes.

    Raises:
        ImportError: the library is not installed.
        ValueError: the bytes are no SentencePiece model.
    """
    try:
        import sentencepiece
    except ImportError as error:
        raise ImportError(f"{file} needs the sentencepiece library: pip install 'fastformer[sentencepiece]'") from error
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise ValueError(f"expected a SentencePiece model in {file}, got something else ({error})") from error


def piece_model(processor: sentencepiece.SentencePieceProcessor) -> str:
    """Returns a SentencePiece model as text for tokenizer.json."""
    return base64.b64encode(processor.serialized_model_proto()).decode("ascii")


def read_piece_model(file: Path, model: str) -> sentencepiece.SentencePieceProcessor:
    """Loads a SentencePiece model from the text that `piece_model` made.

    Raises:
        ImportError: the library is not installed.
        ValueError: the text is not from `piece_model`.
    """
    return read_sentencepiece(file, base64.b64decode(model, validate=True))


def check_largest(largest: int, vocab_size: int) -> None:
    """Raises a ValueError for an id beyond the vocabulary."""
    if largest >= vocab_size:
        raise ValueError(f"expected ids below {vocab_size}, got {largest}: is it another model's tokenizer?")
