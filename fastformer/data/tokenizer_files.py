"""Loads tokenizers from files: those of runs, Hugging Face's tokenizer.json, and SentencePiece models.

A foreign tokenizer keeps its tokens but not its ids: PAD, EOS and UNK come first, as everywhere in fastformer, and the
other tokens follow in their order. A special token that the file lacks gets an id of its own. `save` writes the
foreign model and the three ids into one tokenizer.json, so that a run needs no other file.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fastformer.data import pair
from fastformer.data.bpe import BPETokenizer, form_of
from fastformer.data.checks import SPECIAL_TOKENS, check_text, checked_ids, until_eos
from fastformer.data.cuts import cuts_of, pieces
from fastformer.data.encoder_tokenizers import ENCODER_TOKENIZERS, saved_encoder_tokenizer
from fastformer.data.model_tokenizers import (
    MODEL_TOKENIZERS,
    piece_model,
    read_piece_model,
    read_sentencepiece,
    saved_model_tokenizer,
)
from fastformer.data.prompt_tokenizers import PROMPT_TOKENIZERS, saved_prompt_tokenizer
from fastformer.data.tokenizer import (
    BYTES,
    TOKENIZER,
    Tokenizer,
    encode_batch,
    library_errors,
    read_backend,
    saved_bytes,
    visible,
)
from fastformer.files import read_json, read_small, write_atomically
from fastformer.special_ids import SpecialIds

if TYPE_CHECKING:
    import sentencepiece
    import tokenizers

# The usual names of the special tokens, for a tokenizer whose accompanying files don't name them.
_USUAL_NAMES = {
    "pad": ("<pad>", "[PAD]", "<|pad|>"),
    "eos": ("</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>", "[EOS]", "[SEP]", "<|im_end|>"),
    "unk": ("<unk>", "[UNK]", "<|unk|>"),
}


@dataclass(frozen=True)
class ForeignIds:
    """The special ids of the foreign file; None: the file lacks the token, or its id means another special token."""

    pad: int | None
    eos: int | None
    unk: int | None

    @classmethod
    def distinct(cls, *, pad: int | None, eos: int | None, unk: int | None) -> ForeignIds:
        """Builds the ids without those that have two purposes: files often use one token for padding, too."""
        unk = None if unk == eos else unk
        return cls(None if pad in (eos, unk) else pad, eos, unk)


class ForeignModel(Protocol):
    """The interface of another library's tokenizer for `ForeignTokenizer`, in that library's ids."""

    def size(self) -> int:
        """One more than the largest id."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes texts to ids, without special tokens around them."""

    def decode(self, ids: list[int]) -> str:
        """Decodes ids to text."""

    def token(self, id: int) -> str | None:
        """Returns the token of an id."""

    def unknown(self, text: str, unk: int) -> list[str]:
        """Returns the parts of a text that were encoded as `unk`."""

    @property
    def cuts(self) -> re.Pattern[str] | None:
        """Where a text may be cut (see `cuts`); None: that isn't known."""

    def to_json(self) -> dict[str, Any]:
        """Returns the values to save."""


class ForeignTokenizer:
    """A tokenizer of another library, renumbered to fastformer's ids.

    Args:
        model: the tokenizer.
        ids: its own ids of PAD, EOS and UNK.
    """

    special_ids = SpecialIds()
    words_begin_with_space = True

    def __init__(self, model: ForeignModel, ids: ForeignIds) -> None:
        self._model, self._ids = model, ids
        special, size = (ids.pad, ids.eos, ids.unk), model.size()
        given = [i for i in special if i is not None]
        if len(set(given)) < len(given) or any(not 0 <= i < size for i in given):
            raise ValueError(f"expected different special ids below {size}, got {special}")
        self.backend_ids = [*special, *(i for i in range(size) if i not in special)]
        self._ours = {theirs: ours for ours, theirs in enumerate(self.backend_ids) if theirs is not None}
        self._spelled: set[str] = set()  # characters that are known to have tokens
        self._lost: set[str] = set()  # characters that are known to have none

    @property
    def vocab_size(self) -> int:
        """The number of ids, special ones included."""
        return len(self.backend_ids)

    def encode(self, text: str) -> list[int]:
        """Encodes a text to its ids, without EOS or other tokens that the file would add around it."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes many texts; see `encode`."""
        ours = self._ours
        return [[ours[i] for i in ids] for ids in self._model.encode_batch(texts)]

    def pieces(self, text: str) -> list[str]:
        """Cuts a long text where it is known that the library's ids don't depend on the text beyond."""
        return pieces(text, self.cuts)

    @property
    def cuts(self) -> re.Pattern[str] | None:
        """Where a text may be cut; None: nowhere."""
        return self._model.cuts

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes ids to text: skips special tokens, stops at EOS."""
        kept = until_eos(ids, self.special_ids, self.vocab_size)
        theirs = [self.backend_ids[i] for i in kept if i not in (self.special_ids.pad, self.special_ids.unk)]
        return self._model.decode([i for i in theirs if i is not None])

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Returns the piece of text of each id."""
        return [
            SPECIAL_TOKENS[i] if i < len(SPECIAL_TOKENS) else visible(self._model.token(self.backend_ids[i] or 0))
            for i in checked_ids(ids, self.vocab_size)
        ]

    def unknown(self, text: str, ids: Sequence[int]) -> list[str]:
        """Returns the parts of a text that no token represents; `ids` is the encoded text."""
        if self.special_ids.unk in ids and self._ids.unk is not None:
            return self._model.unknown(text, self._ids.unk)
        if self._ids.unk is not None:
            return []
        # Without an unknown token, some libraries omit the parts that they don't know.
        for character in set(text) - self._spelled - self._lost:
            spelled = character.isspace() or bool(self.encode(character))
            (self._spelled if spelled else self._lost).add(character)
        return [character for character in text if character in self._lost] if self._lost else []

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes tokenizer.json."""
        values = {"type": "foreign", "special_ids": asdict(self._ids), **self._model.to_json()}
        write_atomically(Path(folder, TOKENIZER), json.dumps(values, ensure_ascii=False).encode() + b"\n")


def count_unknown(tokenizer: Tokenizer, texts: Sequence[str], encoded: Sequence[Sequence[int]]) -> Counter[str]:
    """Counts the characters of texts that a foreign tokenizer has no token for; `encoded` are the ids of the texts."""
    if not isinstance(tokenizer, ForeignTokenizer):
        return Counter()
    parts = (part for text, ids in zip(texts, encoded, strict=True) for part in tokenizer.unknown(text, ids))
    return Counter("".join(parts))


class HuggingFaceModel:
    """A tokenizer of the `tokenizers` library. The padding and truncation that a file may hold are switched off.

    Args:
        backend: the tokenizer.
        name: its name in messages.
    """

    def __init__(self, backend: tokenizers.Tokenizer, name: str = "the tokenizer") -> None:
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True  # "</s>" in a text is ordinary text
        self._backend, self._name = backend, name

    def size(self) -> int:
        """One more than the largest id."""
        return 1 + max(self._backend.get_vocab().values(), default=-1)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes texts to ids on all cores."""
        return encode_batch(self._backend, texts, self._name)

    def decode(self, ids: list[int]) -> str:
        """Decodes ids to text, without special tokens."""
        with library_errors(f"{self._name} can't decode these ids"):
            return str(self._backend.decode(ids, skip_special_tokens=True))

    def token(self, id: int) -> str | None:
        """Returns the token of an id."""
        return self._backend.id_to_token(id)

    def unknown(self, text: str, unk: int) -> list[str]:
        """Returns the parts of a text that were encoded as `unk`."""
        with library_errors(f"{self._name} can't encode the text {text[:40]!r}"):
            encoding = self._backend.encode(text, add_special_tokens=False)
        return [text[start:end] for i, (start, end) in zip(encoding.ids, encoding.offsets, strict=True) if i == unk]

    @functools.cached_property
    def cuts(self) -> re.Pattern[str] | None:
        """Where a text may be cut."""
        return cuts_of(json.loads(self._backend.to_str()))

    def to_json(self) -> dict[str, Any]:
        """Returns the contents of the original tokenizer.json."""
        return {"library": "tokenizers", "model": json.loads(self._backend.to_str())}


class SentencePieceModel:
    """A model of the `sentencepiece` library."""

    cuts = None  # the library adds up scores in fp32, so that pieces may depend on all text before them

    def __init__(self, processor: sentencepiece.SentencePieceProcessor) -> None:
        self._processor = processor

    def size(self) -> int:
        """Returns the number of pieces."""
        return int(self._processor.get_piece_size())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes texts to ids on all cores."""
        for text in texts:
            check_text(text)
        return [list(ids) for ids in self._processor.encode(list(texts))]

    def decode(self, ids: list[int]) -> str:
        """Decodes ids to text."""
        return str(self._processor.decode(ids))

    def token(self, id: int) -> str | None:
        """Returns the piece of an id."""
        return str(self._processor.id_to_piece(id))

    def unknown(self, text: str, unk: int) -> list[str]:
        """Returns the parts of a text that were encoded as `unk`."""
        pieces, ids = self._processor.encode(text, out_type=str), self._processor.encode(text)
        return [piece.removeprefix("▁") for piece, i in zip(pieces, ids, strict=True) if i == unk]

    def to_json(self) -> dict[str, Any]:
        """Returns the model file as text."""
        return {"library": "sentencepiece", "model": piece_model(self._processor)}


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Loads a tokenizer.

    Args:
        path: a run folder; a tokenizer.json, or a folder with one as Hugging Face's libraries save it (the files beside
            it name the special tokens); a SentencePiece model, or a folder with one.

    Raises:
        ImportError: the library that the file needs is not installed.
        ValueError: no such file, or one that is damaged or no tokenizer.
    """
    file = Path(path)
    if not file.exists():
        raise ValueError(
            f"expected a run folder, a model's folder or a {TOKENIZER} on disk, but there is no {file}; fastformer "
            "downloads nothing: `hf download NAME --local-dir FOLDER` copies a model from the Hugging Face Hub"
        )
    if file.is_dir():
        file = _in_folder(file)
    if not file.is_file():  # reading a named pipe could block forever
        raise ValueError(f"expected a {TOKENIZER} or a SentencePiece model, got {file}, which is not a file")
    return _sentencepiece(file) if file.suffix == ".model" else _tokenizer_json(file, read_json(file))


def _in_folder(folder: Path) -> Path:
    if (folder / TOKENIZER).is_file():
        return folder / TOKENIZER
    models = sorted(folder.glob("*.model"))
    if len(models) == 1:
        return models[0]
    if models:
        raise ValueError(f"expected one SentencePiece model in {folder}, got {len(models)}: name the file")
    advice = "was the run saved completely?"
    if (folder / "vocab.json").is_file() or (folder / "vocab.txt").is_file():
        advice = "transformers writes it: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
    raise ValueError(f"expected the file {folder / TOKENIZER}, which isn't there: {advice}")


def _saved(file: Path, values: dict[str, Any]) -> Tokenizer:
    """Loads a tokenizer that `ForeignTokenizer.save` wrote."""
    ids = ForeignIds(**values["special_ids"])
    if values["library"] == "sentencepiece":
        return ForeignTokenizer(SentencePieceModel(read_piece_model(file, values["model"])), ids)
    return ForeignTokenizer(HuggingFaceModel(read_backend(file, values["model"]), str(file)), ids)


# The functions that load tokenizers that were saved here, by the type in tokenizer.json.
_SAVED: dict[str, Callable[[Path, dict[str, Any]], Tokenizer]] = {
    "foreign": _saved,
    **dict.fromkeys(MODEL_TOKENIZERS, saved_model_tokenizer),
    **dict.fromkeys(PROMPT_TOKENIZERS, saved_prompt_tokenizer),
    **dict.fromkeys(ENCODER_TOKENIZERS, saved_encoder_tokenizer),
}


def _tokenizer_json(file: Path, values: dict[str, Any]) -> Tokenizer:
    kind = values.get("type")
    if kind == BYTES:
        return saved_bytes(file, values)
    if isinstance(kind, str) and (read := _SAVED.get(kind)) is not None:
        try:
            return read(file, values)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{file} is damaged or not a tokenizer ({error}): copy or convert it again") from error
    if kind == pair.TYPE:
        return _saved_pair(file, values)
    if not isinstance(values.get("model"), dict):
        keys = ", ".join(map(repr, list(values)[:5])) or "nothing"
        raise ValueError(
            f"expected {file} to hold a 'model', as every {TOKENIZER} does, got {keys}: is it another file?"
        )
    backend = read_backend(file, values)
    if form_of(backend) is not None:
        return BPETokenizer(backend)
    model = HuggingFaceModel(backend, str(file))
    return ForeignTokenizer(model, _huggingface_ids(file.parent, backend, values["model"]))


def _saved_pair(file: Path, values: dict[str, Any]) -> pair.PairTokenizer:
    """Loads a tokenizer that `PairTokenizer.save` wrote."""
    sides = values.get("source"), values.get("target")
    if not all(isinstance(side, dict) and side.get("type") != pair.TYPE for side in sides):
        raise ValueError(f"{file} is damaged or no tokenizer (it holds no source and target): copy it again")
    source, target = (_tokenizer_json(file, dict(side or {})) for side in sides)
    return pair.PairTokenizer(source, target)


def _huggingface_ids(folder: Path, backend: tokenizers.Tokenizer, model: dict[str, Any]) -> ForeignIds:
    """Finds the special ids by the files beside tokenizer.json, else by the model, else by the usual names."""
    named: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            named |= read_json(folder / name)

    def find(kind: str, *others: str) -> int | None:
        for key in (f"{kind}_token", *others):
            token = named.get(key)
            token = token.get("content") if isinstance(token, dict) else token  # with its options
            if isinstance(token, str) and (found := backend.token_to_id(token)) is not None:
                return found
        if kind == "unk" and isinstance(model.get("unk_token"), str):
            return backend.token_to_id(model["unk_token"])
        if kind == "unk" and isinstance(model.get("unk_id"), int):
            return int(model["unk_id"])
        ids = (backend.token_to_id(name) for name in _USUAL_NAMES[kind])
        return next((i for i in ids if i is not None), None)

    return ForeignIds.distinct(pad=find("pad"), eos=find("eos", "sep_token"), unk=find("unk"))


def _sentencepiece(file: Path) -> Tokenizer:
    processor = read_sentencepiece(file, read_small(file))
    pad, eos, unk = (i if i >= 0 else None for i in (processor.pad_id(), processor.eos_id(), processor.unk_id()))
    return ForeignTokenizer(SentencePieceModel(processor), ForeignIds.distinct(pad=pad, eos=eos, unk=unk))
