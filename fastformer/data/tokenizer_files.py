"""Loads tokenizers from files: those of runs, Hugging Face's tokenizer.json, and SentencePiece models.

A tokenizer of another library keeps its tokens but not its ids (`backend.Renumbered`). `save` writes the library's
model and the three special ids into one tokenizer.json, so that a run needs no other file.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastformer.data import pair
from fastformer.data.backend import Backend, ForeignIds, Renumbered
from fastformer.data.bpe import BPETokenizer, form_of
from fastformer.data.huggingface import LibraryBackend, check_vocab, read_library
from fastformer.data.pieces import PieceBackend, fairseq_pieces, read_saved_pieces, read_sentencepiece
from fastformer.data.tokenizer import TOKENIZER, TYPES, ByteTokenizer, Tokenizer
from fastformer.files import NOT_DOWNLOADED, read_json, read_small
from fastformer.languages import Languages
from fastformer.special_ids import SpecialIds

if TYPE_CHECKING:
    import tokenizers

# The usual names of the special tokens, for a tokenizer whose accompanying files don't name them.
_USUAL_NAMES = {
    "pad": ("<pad>", "[PAD]", "<|pad|>"),
    "eos": ("</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>", "[EOS]", "[SEP]", "<|im_end|>"),
    "unk": ("<unk>", "[UNK]", "<|unk|>"),
}


_SAVED = ("bytes", "foreign", "pieces", "marian", *TYPES.values())  # types that `Tokenizer.to_json` writes


def count_unknown(tokenizer: Tokenizer, texts: Sequence[str], encoded: Sequence[Sequence[int]]) -> Counter[str]:
    """Counts the characters of texts that another library's tokenizer has no token for.

    Args:
        tokenizer: any tokenizer; those that are made here spell every text.
        texts: the texts.
        encoded: the ids of the texts.
    """
    if not isinstance(tokenizer.backend, Renumbered):
        return Counter()
    unknown = tokenizer.backend.unknown_parts
    parts = (part for text, ids in zip(texts, encoded, strict=True) for part in unknown(text, ids))
    return Counter("".join(parts))


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
            f"expected a run folder, a model's folder or a {TOKENIZER} on disk, but there is no {file}; "
            f"{NOT_DOWNLOADED}"
        )
    if file.is_dir():
        file = _in_folder(file)
    if not file.is_file():  # reading a named pipe could block forever
        raise ValueError(f"expected a {TOKENIZER} or a SentencePiece model, got {file}, which is not a file")
    if file.suffix == ".model":
        return _sentencepiece(file)
    with file.open("rb") as opened:
        first = opened.read(64).lstrip()[:1]
    if first not in (b"", b"{", b"["):
        raise ValueError(f"expected a {TOKENIZER} or a SentencePiece model, got {file}, which is neither")
    return _tokenizer_json(file, read_json(file))


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


def _saved(file: Path, values: Mapping[str, Any]) -> Tokenizer:
    """Makes the tokenizer of the values that `Tokenizer.to_json` returned."""
    kind = values["type"]
    if kind == "bytes":
        return _bytes(file, values)
    if kind == "foreign":
        ids = ForeignIds(**values["special_ids"])
        if values["library"] == "sentencepiece":
            return Tokenizer(Renumbered(PieceBackend(read_saved_pieces(file, values["model"])), ids))
        return Tokenizer(Renumbered(LibraryBackend(read_library(file, values["model"]), str(file)), ids))
    options: dict[str, Any] = {"vocab_size": int(values["vocab_size"])}
    special_ids = SpecialIds.from_dict(values["special_ids"])
    if values.get("languages") is not None:
        options["languages"] = Languages.from_dict(values["languages"])
    if values.get("ends_sources") is False:
        options["ends_sources"] = False
    if "bos" in values:
        options["bos"] = None if values["bos"] is None else int(values["bos"])
    if kind == "marian":
        vocab = check_vocab(file, values["source_vocab"])
        target_vocab = vocab if values["target_vocab"] is None else check_vocab(file, values["target_vocab"])
        source, target = (
            PieceBackend(read_saved_pieces(file, values[side]), table, special_ids.unk, has_codes=True)
            for side, table in (("source", vocab), ("target", target_vocab))
        )
        return Tokenizer(source, special_ids, "translator", target=target, **options)
    role, library = next(each for each, name in TYPES.items() if name == {"pieces": "t5"}.get(kind, kind))
    chat = {str(name): str(text) for name, text in values.get("chat", {}).items()}
    backend: Backend
    if library == "tokenizers":
        backend = LibraryBackend(read_library(file, values["backend"]), str(file))
    else:
        processor = read_saved_pieces(file, values["model"])
        if kind == "pieces":
            backend = PieceBackend(processor, check_vocab(file, values["vocab"]), special_ids.unk)
        elif role == "encoder":
            backend = fairseq_pieces(processor)
        elif role == "prompts":
            added = {str(token): (int(i), bool(special)) for token, (i, special) in values["added"].items()}
            backend = PieceBackend(processor, added=added, special=chat.values())
        else:
            backend = PieceBackend(processor)
    if role == "encoder":
        options |= {"max_len": int(values["max_len"]), "has_token_types": bool(values["has_token_types"])}
        options |= {"side": str(values["side"]), "frames": backend.encoder_frames()}
    return Tokenizer(backend, special_ids, role, chat=chat, **options)


def _bytes(file: Path, values: Mapping[str, Any]) -> ByteTokenizer:
    tokens, is_dropped = values.get("user_tokens", []), values.get("drop_user_tokens", False)
    if not isinstance(tokens, list) or not isinstance(is_dropped, bool):
        raise ValueError(f"user_tokens {tokens!r:.40}")
    return ByteTokenizer(tokens, drop_user_tokens=is_dropped)


def _tokenizer_json(file: Path, values: dict[str, Any]) -> Tokenizer:
    kind = values.get("type")
    if isinstance(kind, str) and kind in _SAVED:
        try:
            return _saved(file, values)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{file} is damaged or not a tokenizer ({error}): copy or convert it again") from error
    if kind == pair.TYPE:
        return _saved_pair(file, values)
    if not isinstance(values.get("model"), dict):
        keys = ", ".join(map(repr, list(values)[:5])) or "nothing"
        raise ValueError(
            f"expected {file} to hold a 'model', as every {TOKENIZER} does, got {keys}: is it another file?"
        )
    backend = read_library(file, values)
    if form_of(backend) is not None:
        return BPETokenizer(backend)
    ids = _huggingface_ids(file.parent, backend, values["model"])
    return Tokenizer(Renumbered(LibraryBackend(backend, str(file)), ids))


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
            if isinstance(token, str) and (i := backend.token_to_id(token)) is not None:
                return i
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
    return Tokenizer(Renumbered(PieceBackend(processor), ForeignIds.distinct(pad=pad, eos=eos, unk=unk)))
