"""Damaged files of every program: each is loaded, or refused by a sentence, in little memory and time.

A file is damaged in its bytes, most often beside names, where sizes, types and offsets are; JSON in its values, too.
"""

from __future__ import annotations

import io
import json
import random
import re
import resource
import shutil
import signal
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fastformer.checkpoints import load_model
from fastformer.checkpoints.ctranslate2 import load_transformer
from fastformer.checkpoints.hf import load_folder
from fastformer.checkpoints.run import architecture_of
from fastformer.checkpoints.speech import load_speech
from fastformer.data.pieces import PieceBackend, read_sentencepiece
from tests.checkpoints.test_compressed_tensors import LLAMA
from tests.checkpoints.test_gguf import contents, to_bytes
from tests.foreign.compressed_folders import FOLDERS as COMPRESSED
from tests.foreign.ctranslate2_folders import ARGOS, DECODER_FOLDERS
from tests.foreign.ctranslate2_folders import FOLDERS as CTRANSLATE2
from tests.foreign.gguf_files import FOLDER as GGUF

pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")
pytest.importorskip("sentencepiece", reason="the sentencepiece library is not installed")

Files = dict[str, bytes]
MOST_MEMORY, MOST_SECONDS = 1 << 28, 20.0  # for files below 200 KiB; seconds of CPU
ODD: list[Any] = [
    None, True, -1, 0, 1, 3, 2**31, 2**63, 10**40, 0.5, -1e308, float("nan"), float("inf"), "", "\0", "é" * 300, "</s>",
    "../x", [], [[]], {}, [1, "a"], {"a": {"b": None}},
]  # fmt: skip
WORDS = re.compile(rb"[ -~]{4,}")


def files_of(folder: Path) -> Files:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "expected.json"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def damaged_bytes(data: bytes, draw: random.Random) -> bytes:
    changed, names = bytearray(data), [match.span() for match in WORDS.finditer(data)]
    for _ in range(draw.choice([1, 1, 2, 5])):
        size = max(1, len(changed))
        if names and draw.random() < 0.7:
            first, last = draw.choice(names)
            place = draw.randrange(max(0, first - 12), last + 24) % size
        else:
            place = draw.randrange(size)
        width = draw.choice([1, 1, 4, 8])
        part = draw.choice([b"\0" * 8, b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"\1" + b"\0" * 7, draw.randbytes(8)])[
            :width
        ]
        kind = draw.random()
        if kind < 0.8:
            changed[place : place + width] = part
        elif kind < 0.9:
            changed[place:place] = part
        else:
            del changed[place : place + width]
    return bytes(changed if draw.random() < 0.9 else changed[: draw.randrange(len(changed) + 1)])


def damaged_value(value: Any, draw: random.Random) -> Any:
    """Returns a JSON value of which one part is another, missing, or there twice."""
    if not isinstance(value, dict | list) or not value or draw.random() < 0.1:
        return draw.choice(ODD)
    copy: Any = value.copy()
    key = draw.choice([*value]) if isinstance(value, dict) else draw.randrange(len(value))
    kind = draw.random()
    if kind < 0.15:
        del copy[key]
    elif kind < 0.3 and isinstance(copy, list):
        copy.insert(draw.randrange(len(copy)), copy[key])
    else:
        copy[key] = damaged_value(copy[key], draw)
    return copy


def damaged_json(data: bytes, draw: random.Random) -> bytes:
    return json.dumps(damaged_value(json.loads(data), draw)).encode()


def damaged_safetensors(data: bytes, draw: random.Random) -> bytes:
    end = 8 + int.from_bytes(data[:8], "little")
    header = damaged_json(data[8:end], draw)
    return len(header).to_bytes(8, "little") + header + data[end:]


def damaged_tokenizer(files: Files, draw: random.Random) -> Files:
    """Damages the tokenizer of a GGUF file, and leaves the rest of it whole."""
    (name,) = files
    values, tensors = contents(GGUF / name)
    key = draw.choice([key for key in values if key.startswith("tokenizer.")])
    kind, value = values[key]
    if draw.random() < 0.2:
        del values[key]
    elif kind == 9:
        inner, parts = value
        parts = damaged_value(parts, draw)
        fits = isinstance(parts, list) and {*map(type, parts)} <= {type(value[1][0])}
        others: list[Any] = [(8, "bpe"), (9, (8, ["a", ""])), (9, (5, [-1, 99])), (9, (6, [0.5, float("nan")]))]
        values[key] = (kind, (inner, parts)) if fits else draw.choice(others)
        try:
            return {name: to_bytes(values, tensors)}
        except (struct.error, OverflowError):  # the type of the list has no such number
            values[key] = draw.choice(others)
    elif kind == 4:
        values[key] = draw.choice([(4, draw.randrange(400)), (5, -1), (4, 2**32 - 1), (8, "1"), (6, 1.0)])
    else:
        texts = ["gpt2", "llama", "bert", "t5", "default", "qwen2", "{% for x in y %}", "", "é\0"]
        values[key] = draw.choice([(8, draw.choice(texts)), (7, draw.random() < 0.5), (4, 1)])
    return {name: to_bytes(values, tensors)}


def damaged(files: Files, draw: random.Random) -> Files:
    """Returns the file that changes."""
    name = draw.choice([*files])
    data, change = files[name], damaged_bytes
    if draw.random() < 0.7:
        by_suffix = {".json": damaged_json, ".safetensors": damaged_safetensors}
        change = by_suffix.get(Path(name).suffix, damaged_bytes)
    return {name: change(data, draw)}


def zipped(files: Files) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as file:
        for name, part in files.items():
            file.writestr(f"en_de/{name}", part)
    return data.getvalue()


def damaged_zip(files: Files, draw: random.Random) -> Files:
    """Damages a file in a zip file, or the zip file."""
    name = "x.argosmodel"
    if draw.random() < 0.4:
        return {name: zipped(files | damaged(files, draw))}
    return {name: damaged_bytes(zipped(files), draw)}


def use(folder: Path) -> None:
    """Loads a model by the front door, reads its weights, and its tokenizer reads and writes a text."""
    path = next((path for path in folder.iterdir() if path.suffix in (".gguf", ".argosmodel")), folder)
    model, tokenizer = load_model(path, ("Transformer", "GPT", "BERT"))
    assert model.state_dict()
    architecture_of(path)
    tokenizer.decode(tokenizer.encode("The old dog, 12 birds. é漢")[:50])


def use_pieces(path: Path) -> None:
    (file,) = path.iterdir()
    backend = PieceBackend(read_sentencepiece(file, file.read_bytes()))
    backend.decode(backend.encode_batch(["The old dog, 12 birds. é漢"])[0])


def use_weights(path: Path) -> None:
    load_transformer(path)[0].state_dict()


class Reader(NamedTuple):
    """What is damaged, and who reads it.

    Attributes:
        whole: returns folders that are whole.
        read: reads a folder.
        damage: returns the files of a folder that change.
    """

    whole: Callable[[], list[Files]]
    read: Callable[[Path], Any]
    damage: Callable[[Files, random.Random], Files] = damaged


def folders(parent: Path, *names: str) -> list[Files]:
    return [files_of(parent / name) for name in names]


def ggufs(*names: str) -> list[Files]:
    return [{f"{name}.gguf": (GGUF / f"{name}.gguf").read_bytes()} for name in names]


READERS = {
    "argos": Reader(lambda: [files_of(ARGOS)], use),
    "argos in a zip": Reader(lambda: [files_of(ARGOS)], use, damaged_zip),
    "compressed-tensors": Reader(
        lambda: folders(COMPRESSED, "w4a16_asym", "w8a8", "fp8", "actorder", "mixed"),
        lambda folder: load_folder(folder, LLAMA)[0].state_dict(),
    ),
    "ctranslate2": Reader(lambda: folders(CTRANSLATE2, "marian", "t5-gated", "bart", "pegasus"), use_weights),
    "ctranslate2 decoders": Reader(lambda: folders(DECODER_FOLDERS, "llama", "gpt2", "gemma3"), use),
    "gguf": Reader(lambda: ggufs("llama", "gemma3", "bert", "gpt2", "nomic", "phi3"), use),
    "gguf tokenizers": Reader(
        lambda: ggufs("llama", "mistral", "gemma", "qwen2", "bert", "roberta"),
        use,
        damaged_tokenizer,
    ),
    "sentencepiece": Reader(lambda: [{"x.model": (ARGOS / "sentencepiece.model").read_bytes()}], use_pieces),
    "whisper": Reader(lambda: folders(GGUF.parent / "speech", "int8", "fp16"), load_speech),
}


@contextmanager
def limits() -> Iterator[None]:
    """Raises a MemoryError for more memory, and an AssertionError for more time, than a reader of small files needs."""

    def stop(*_: object) -> None:
        raise AssertionError(f"a reader took {MOST_SECONDS} seconds")

    status = Path("/proc/self/status").read_text()
    used = int(status.split("VmData:")[1].split()[0]) * 1024
    old, handler = resource.getrlimit(resource.RLIMIT_DATA), signal.signal(signal.SIGPROF, stop)
    resource.setrlimit(resource.RLIMIT_DATA, (used + MOST_MEMORY, old[1]))
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
        resource.setrlimit(resource.RLIMIT_DATA, old)


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error, and those while which it was raised."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def loaded(name: str, seeds: range, folder: Path) -> int:
    """Reads damaged folders, and returns how many were loaded; any error but a ValueError or an OSError is a fault."""
    count, reader = 0, READERS[name]
    wholes = reader.whole()
    for seed in seeds:
        draw = random.Random(seed)
        files = draw.choice(wholes)
        shutil.rmtree(folder, ignore_errors=True)
        changed = reader.damage(files, draw)
        for file, data in (files | changed if changed.keys() <= files.keys() else changed).items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(data)
        try:
            with limits():
                reader.read(folder)
            count += 1
        except (ValueError, OSError) as error:
            assert len(str(error)) > 20, f"seed {seed}: {error!r}"
            # Code that turns any error of a library into a ValueError has no say in the limits.
            assert not any(isinstance(each, MemoryError | AssertionError) for each in causes_of(error)), f"seed {seed}"
        except Exception as error:
            raise AssertionError(f"{name}, seed {seed}: see {folder}") from error
    return count


@pytest.mark.parametrize("name", READERS)
def test_damaged_files_are_loaded_or_refused(name, tmp_path) -> None:
    assert loaded(name, range(6), tmp_path / "x") < 6


def test_a_size_that_lies_takes_no_memory(tmp_path) -> None:
    data = bytearray(zipped(files_of(ARGOS)))
    entry = data.rindex(b"PK\1\2", 0, data.rindex(b"en_de/model/model.bin"))  # in the list at the end
    data[entry + 20 : entry + 28] = (1 << 30).to_bytes(4, "little") * 2  # compressed, and not
    (tmp_path / "x.argosmodel").write_bytes(data)
    with limits(), pytest.raises(ValueError, match="model.bin"):
        use(tmp_path)


def test_an_empty_file_of_pieces_is_an_error(tmp_path) -> None:
    (tmp_path / "x.model").touch()
    with pytest.raises(ValueError, match=r"x\.model"):
        use_pieces(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 11_000, 2000))
@pytest.mark.parametrize("name", READERS)
def test_many_damaged_files_are_loaded_or_refused(name, first, tmp_path) -> None:
    assert 0 < loaded(name, range(first, first + 2000), tmp_path / "x") < 2000
