"""Translators in the packages of Argos Translate, in a folder or in an .argosmodel file.

NAME/metadata.json            the languages: from_code, to_code
NAME/sentencepiece.model      the SentencePiece model of both sides
NAME/model/                   a folder of CTranslate2, see `checkpoints.ctranslate2`; its vocabulary may be a .txt

An .argosmodel file is a zip file with one such folder. It is read in memory, and only these files are; the splitter of
sentences that it may have is not used.
"""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from fastformer.checkpoints.ctranslate2 import Vocabularies, ends_sources, transformer_of
from fastformer.checkpoints.hf.common import make_translator
from fastformer.checkpoints.model_bin import MODEL, read_variables
from fastformer.data import Tokenizer
from fastformer.data.pieces import PieceBackend, read_sentencepiece
from fastformer.files import is_plain_file, read_small
from fastformer.models import Transformer

SUFFIX = ".argosmodel"
_METADATA, _PIECES, _OTHER_PIECES = "metadata.json", "sentencepiece.model", "bpe.model"
_MOST_SMALL, _MOST_MODEL = 1 << 26, 1 << 33  # bytes
_MOST_RATIO = 200  # of a file's size to its size in the zip file: numbers are hardly compressible
_MOST_FILES = 10_000
_AT_ONCE = 1 << 20  # bytes


def is_package(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is a package: a file with its suffix, or its folder."""
    place = Path(path)
    if place.suffix == SUFFIX and not place.is_dir():
        return True
    return (place / _METADATA).is_file() and (place / "model" / MODEL).is_file()


def load_package(
    path: str | os.PathLike[str], *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> tuple[Transformer, Tokenizer]:
    """Loads the model and the tokenizer of a package; see `ctranslate2.load_transformer` for the other arguments.

    Raises:
        ImportError: sentencepiece is not installed.
        ValueError: no such file, a damaged one, or a package with another tokenizer or model.
    """
    place = Path(path)
    files = _Folder(place) if place.is_dir() else _Zip(place)
    if not files.has(_PIECES):
        other = f", got {_OTHER_PIECES}" if files.has(_OTHER_PIECES) else ""
        raise ValueError(f"expected {path} to have a {_PIECES}, the tokenizer{other}")
    processor = read_sentencepiece(place / _PIECES, files.small(_PIECES))
    vocabularies, settings = _vocabularies(files, place), _json(files, place, "model/config.json", {})
    if not isinstance(settings, dict):
        raise ValueError(f"expected {path} to have a JSON object in model/config.json, got {settings!r:.60}")
    stored = read_variables(place / "model" / MODEL, files.model())
    model = transformer_of(place, stored, vocabularies, settings, device=device, dtype=dtype)
    unk = model.config.special_ids.unk
    backends = [PieceBackend(processor, {token: i for i, token in enumerate(tokens)}, unk) for tokens in vocabularies]
    options: dict[str, Any] = {"ends_sources": ends_sources(vocabularies, settings)}
    if vocabularies.source is not vocabularies.target:
        options["target"] = backends[1]
    return model, make_translator(backends[0], **options)(model.config)


def codes_of(path: str | os.PathLike[str]) -> tuple[str, str] | None:
    """Returns the codes of the languages that a package translates from and to; None: it names none.

    Raises:
        ValueError: see `load_package`.
    """
    place = Path(path)
    values = _json(_Folder(place) if place.is_dir() else _Zip(place), place, _METADATA, {})
    named = values if isinstance(values, dict) else {}
    source, target = (str(named.get(name) or "") for name in ("from_code", "to_code"))
    return (source, target) if source and target else None


class _Folder:
    """The files of a package's folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def has(self, name: str) -> bool:
        return (self._path / name).is_file()

    def small(self, name: str) -> bytes:
        return read_small(self._path / name)

    def model(self) -> bytearray | None:
        """Returns the bytes of model.bin; None: they are mapped."""
        return None


class _Zip(_Folder):
    """The files of a package's zip file, of which none is unpacked to disk."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        if not is_plain_file(path.resolve()):
            raise ValueError(f"expected a package of Argos Translate, but there is no file {path}")
        try:
            with zipfile.ZipFile(path) as file:
                listed = file.infolist()
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
            raise ValueError(f"expected {path} to be a zip file ({error}): it was cut, or is damaged") from error
        if len(listed) > _MOST_FILES:
            raise ValueError(f"expected at most {_MOST_FILES:,} files in {path}, got {len(listed):,}")
        roots, self._members = set[str](), dict[str, zipfile.ZipInfo]()
        for info in listed:
            parts = PurePosixPath(info.filename).parts
            if not parts or parts[0] == "/" or ".." in parts or "\\" in info.filename or info.filename in self._members:
                raise ValueError(f"expected files within one folder in {path}, got {info.filename!r:.80}")
            roots.add(parts[0])
            self._members["/".join(parts[1:])] = info
        if len(roots) != 1:
            raise ValueError(f"expected one folder in {path}, got {sorted(roots)[:3]}")

    def has(self, name: str) -> bool:
        return name in self._members

    def small(self, name: str) -> bytes:
        return bytes(self._read(name, _MOST_SMALL))

    def model(self) -> bytearray | None:
        return self._read(f"model/{MODEL}", _MOST_MODEL)

    def _read(self, name: str, most: int) -> bytearray:
        info = self._members.get(name)
        if info is None or info.is_dir() or not info.file_size:
            raise ValueError(f"expected the file {name} in {self._path}, got none")
        if info.file_size > most or info.file_size > _MOST_RATIO * max(1, info.compress_size):
            raise ValueError(
                f"expected {name} in {self._path} of at most {most:,} bytes, compressed up to {_MOST_RATIO} times, got "
                f"{info.file_size:,} of {info.compress_size:,}"
            )
        data = bytearray()  # grows with what is there: the sizes in a damaged file may be any
        try:
            with zipfile.ZipFile(self._path) as file, file.open(info) as member:
                while part := member.read(_AT_ONCE):
                    data += part
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, NotImplementedError) as error:
            raise ValueError(f"expected {name} in {self._path} to be whole ({error}): copy the file again") from error
        if len(data) != info.file_size:
            raise ValueError(f"expected {info.file_size:,} bytes of {name} in {self._path}, got {len(data):,}")
        return data


def _vocabularies(files: _Folder, path: Path) -> Vocabularies:
    names = ("shared",) if any(files.has(f"model/shared_vocabulary.{kind}") for kind in ("json", "txt")) else (
        "source", "target")  # fmt: skip
    sides = []
    for name in names:
        tokens = _json(files, path, f"model/{name}_vocabulary.json", None)
        if tokens is None:
            text = _text(files, path, f"model/{name}_vocabulary.txt")
            tokens = text.removesuffix("\n").split("\n")
        if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
            raise ValueError(f"expected {path} to have a list of tokens in model/{name}_vocabulary.json")
        sides.append(tokens)
    return Vocabularies(sides[0], sides[-1])


def _json(files: _Folder, path: Path, name: str, default: Any) -> Any:
    if not files.has(name):
        return default
    try:
        return json.loads(_text(files, path, name))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected {name} of {path} to be JSON ({error}): copy the package again") from error


def _text(files: _Folder, path: Path, name: str) -> str:
    if not files.has(name):
        raise ValueError(f"expected the file {name} in {path}, which doesn't exist")
    try:
        return files.small(name).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"expected {name} of {path} to be UTF-8 ({error})") from error
