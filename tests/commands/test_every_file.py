"""Every command that takes a model takes every kind of file, or refuses it and says what it expects.

A new command, or a new kind of file, has to be in the tables here.
"""

from __future__ import annotations

import importlib
import inspect
import io
import json
import re
import shlex
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fastformer.checkpoints import load_model
from fastformer.checkpoints.run import architecture_of
from fastformer.cli import COMMANDS, main
from fastformer.data import load_tokenizer
from tests.audio.test_reading import wav
from tests.audio.whispers import EOT, TOKENS
from tests.checkpoints.test_argos import zipped
from tests.checkpoints.test_ctranslate2 import with_pieces
from tests.covering import each
from tests.foreign.ctranslate2_folders import ARGOS, DECODER_FOLDERS, FOLDERS
from tests.foreign.gguf_files import FOLDER

pytest.importorskip("sentencepiece", reason="the sentencepiece library is not installed")
pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")

FOREIGN = FOLDER.parent
ONE = "'t5 t9' --max_new_tokens 3 --device cpu"
# The words of each command, and the architectures that it takes. Words in braces are files, and {model} is the model.
WORDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "translate": (f"{{model}} {ONE}", ("Transformer",)),
    "generate": (f"{{model}} {ONE} --greedy", ("GPT",)),
    "chat": ("{model} --max_new_tokens 3 --device cpu", ("GPT",)),
    "chat --draft": ("{chats} --draft {model} --max_new_tokens 3 --device cpu", ()),
    "embed": ("{model} --file {texts} --out {out}/v.npy --device cpu", ("BERT", "GPT")),
    "rank": ("{model} --query t5 --file {texts} --device cpu", ()),
    "score": ("{model} --file {texts} --device cpu", ("GPT",)),
    "score --target": ("{model} --file {texts} --target {texts} --device cpu", ("Transformer",)),
    "serve": ("{model} --device cpu", ("Transformer", "GPT", "BERT", "Whisper")),
    "quantize": ("{model} {out}/small", ("Transformer", "GPT")),
    "quantize .gguf": ("{model} {out}/small.gguf", ("GPT",)),
    "transcribe": ("{model} {sound} --language en", ("Whisper",)),
    "warmup": ("{model} --device cpu", ()),
    "report": ("{model}", ()),
    "average": ("{model}", ()),
    "train --init_from": ("{out}/run --init_from {model} --train_text {texts} --model gpt", ()),
}
# What a kind of file lacks, of an architecture that the command takes.
LACKING = {
    **{("chat", kind): "chat_template" for kind in ("gguf experts", "ct2 decoder", "compressed-tensors")},
    ("embed", "ct2 decoder"): "fastformer generate",
    ("quantize .gguf", "gguf experts"): "mixtral",
    **{("quantize .gguf", kind): "byte-level BPE" for kind in ("ct2 decoder", "compressed-tensors")},
}
# What the message says that is no command; else it names the command that takes the file.
EXPECTED = {
    "chat --draft": "fastformer|draft", "rank": "fastformer|head|tokens", "score": "fastformer|--target",
    "score --target": "fastformer|--target", "transcribe": "Whisper", "warmup": "GPU", "report": "metrics.jsonl",
    "average": "checkpoints", "train --init_from": "fastformer",
}  # fmt: skip


def with_words(folder: Path, tokens: list[str], special: Callable[[int], bool]) -> Path:
    """Gives a folder a tokenizer of whole words."""
    added = [{"id": i, "content": token, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False} for i, token in enumerate(tokens) if special(i)]  # fmt: skip
    vocab = {token: i for i, token in enumerate(tokens)}
    words = {"type": "WordLevel", "vocab": vocab, "unk_token": tokens[2]}
    library = {"added_tokens": added, "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": words}
    (folder / "tokenizer.json").write_text(json.dumps(library))
    return folder


def ct2_translator(path: Path) -> Path:
    shutil.copytree(FOLDERS / "marian", path)
    with_pieces(path)
    return path


def ct2_encoder(path: Path) -> Path:
    path.mkdir()
    name = b"TransformerEncoderSpec\0"
    (path / "model.bin").write_bytes(struct.pack("<IH", 6, len(name)) + name + struct.pack("<III", 1, 0, 0))
    return path


def ct2_speech(path: Path) -> Path:
    return with_words(Path(shutil.copytree(FOREIGN / "speech" / "int8", path)), TOKENS, lambda i: i >= EOT)


def compressed(path: Path) -> Path:
    tokens = ["<s>", "</s>", "<unk>", *(f"t{i}" for i in range(3, 32))]
    shutil.copytree(FOREIGN / "compressed_tensors" / "w4a16", path)
    return with_words(path, tokens, lambda i: i < 3)


# The architecture of each kind of file, and what makes one.
KINDS: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "gguf decoder": ("GPT", lambda path: FOLDER / "llama.gguf"),
    "gguf experts": ("GPT", lambda path: FOLDER / "mixtral.gguf"),
    "gguf encoder": ("BERT", lambda path: FOLDER / "bert.gguf"),
    "ct2 translator": ("Transformer", ct2_translator),
    "ct2 decoder": ("GPT", lambda path: DECODER_FOLDERS / "llama"),
    "ct2 speech": ("Whisper", ct2_speech),
    "ct2 encoder": ("TransformerEncoderSpec", ct2_encoder),
    "argos folder": ("Transformer", lambda path: ARGOS),
    "argos file": ("Transformer", lambda path: zipped(path.with_suffix(".argosmodel"))),
    "compressed-tensors": ("GPT", compressed),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns the files of all kinds, and what the commands read beside a model, by name."""
    folder = tmp_path_factory.mktemp("files")
    found = {name: make(folder / name.replace(" ", "_")) for name, (_, make) in KINDS.items()}
    (folder / "texts").write_text("t5 t9\nt3 t4\n")
    (folder / "sound.wav").write_bytes(wav(np.sin(np.arange(4000) * 0.1) * 0.3))
    return found | {"chats": FOLDER / "llama.gguf", "texts": folder / "texts", "sound": folder / "sound.wav"}


def test_the_tables_have_every_command_and_architecture(paths) -> None:
    modules = {name: importlib.import_module(f"fastformer.commands.{name}") for name in COMMANDS}
    given = {name: inspect.signature(getattr(module, name)).parameters for name, module in modules.items()}
    assert {name for name in COMMANDS if {"run", "folder"} & {*given[name]}} == {name.split()[0] for name in WORDS}
    assert {kind: architecture_of(paths[kind]) for kind in KINDS} == {kind: name for kind, (name, _) in KINDS.items()}


@each("kind", KINDS)
@pytest.mark.parametrize("command", WORDS)
def test_a_file_is_taken_or_refused(command, kind, paths, tmp_path, monkeypatch, capsys) -> None:
    template, taken = WORDS[command]
    if command == "serve":
        pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
        monkeypatch.setattr("fastformer.serving.run.bound", lambda host, port: (host, port))
        monkeypatch.setattr("fastformer.serving.run.Server.run", lambda server, places: print("serves"))
    words = shlex.split(template)
    (written := tmp_path / kind).mkdir()
    places = {**{name: str(path) for name, path in paths.items()}, "model": str(paths[kind]), "out": str(written)}
    words = [word.format_map(places) for word in words]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"t5 t9\n")))
    code = main([command.split()[0], *words])
    out, err = capsys.readouterr()
    takes = KINDS[kind][0] in taken and (command, kind) not in LACKING
    takes |= (command, kind) == ("chat --draft", "gguf decoder")
    assert code == (0 if takes else 1), err
    if takes:
        assert out.strip() or [*written.iterdir()]
        if command == "quantize":  # the folder has the file's tokenizer
            (_, ours), (_, theirs) = (load_model(path, taken) for path in (written / "small", paths[kind]))
            for text in ("t5 t9", "the dogs read <|im_end|> é"):
                assert (found := ours.encode(text)) == theirs.encode(text)
                assert ours.decode(found) == theirs.decode(found)
    else:
        assert not out and not [*written.iterdir()]
        message = LACKING.get((command, kind), EXPECTED.get(command, "fastformer [a-z]+`|TransformerEncoderSpec"))
        assert re.search(message, err), err
        assert not re.search("bug|saved completely|copy it again|not valid", err), err


@pytest.mark.parametrize("kind", ["gguf decoder", "argos file"])
def test_a_file_with_a_tokenizer_is_no_tokenizer(kind, paths) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json or a SentencePiece model"):
        load_tokenizer(paths[kind])
