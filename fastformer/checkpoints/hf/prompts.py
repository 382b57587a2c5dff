"""The tokenizer of a decoder-only model's folder.

tokenizer.json               of the tokenizers library; its post-processor decides whether prompts begin with BOS
tokenizer.model              a SentencePiece model, if the folder has no tokenizer.json
vocab.json, merges.txt       a byte-level BPE, in older folders
tokenizer_config.json        the names of the special tokens, whether BOS is added, the chat template
special_tokens_map.json      the names of the special tokens, in older folders
chat_template.jinja          the template, in newer folders
added_tokens.json            tokens that a SentencePiece model or a vocab.json lacks, in older folders
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fastformer.checkpoints.hf.common import MakeTokenizer, flag_of, read_file
from fastformer.data.backend import Backend
from fastformer.data.huggingface import (
    LibraryBackend,
    added_tokens,
    byte_level_bpe,
    check_vocab,
    read_library,
)
from fastformer.data.pieces import PieceBackend, read_sentencepiece
from fastformer.data.tokenizer import CHAT_NAMES, TOKENIZER, Tokenizer
from fastformer.files import read_json, tokenizers_library
from fastformer.models import GPTConfig

_PIECES, _VOCAB, _MERGES = "tokenizer.model", "vocab.json", "merges.txt"
_CONFIG, _MAP, _TEMPLATE = "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"


def read_tokenizer(folder: Path, settings: Mapping[str, Any]) -> MakeTokenizer:
    """Reads the tokenizer, as `ReadTokenizer` describes."""
    config, mapped = _read(folder / _CONFIG), _read(folder / _MAP)
    # As in transformers: a folder that lists its added tokens, as newer ones do, has their names there too.
    config = mapped | config if "added_tokens_decoder" in config else config | mapped
    chat = chat_of(folder, config)
    if not (folder / TOKENIZER).is_file() and (folder / _PIECES).is_file():
        return _from_pieces(folder, config, chat)
    if (folder / TOKENIZER).is_file():
        backend = read_library(folder / TOKENIZER, read_json(folder / TOKENIZER))
        add_special(backend, chat)
    elif (folder / _VOCAB).is_file():
        vocab = check_vocab(folder / _VOCAB, read_json(folder / _VOCAB))
        has_space = flag_of(config, "add_prefix_space", False)
        backend = byte_level_bpe(folder / _MERGES, vocab, read_file(folder / _MERGES), add_prefix_space=has_space)
        added = tokenizers_library().AddedToken
        named = [chat[name] for name in CHAT_NAMES[1:] if chat.get(name) in vocab] or ["<|endoftext|>"]
        backend.add_special_tokens([token for token in dict.fromkeys(named) if token in vocab])
        for token, (_, is_special) in sorted(_added(folder, config).items(), key=lambda each: each[1]):
            backend.add_tokens([added(token, special=is_special)])
    else:
        raise ValueError(
            f"expected a {TOKENIZER}, a {_PIECES}, or {_VOCAB} and {_MERGES}, and there is none of them in {folder}: "
            "was the model saved completely?"
        )
    unk = chat.get("unk_token") or getattr(backend.model, "unk_token", None)
    library = LibraryBackend(backend, str(folder / TOKENIZER))
    return None if unk is None else backend.token_to_id(unk), prompt_tokenizer(
        library, _bos(library, config, chat, folder), chat
    )


def add_special(backend: Any, chat: Mapping[str, str]) -> None:
    """Makes the tokens that a folder names special, unless its tokenizer.json says that one is an ordinary one."""
    vocab, known = backend.get_vocab(), added_tokens(backend)
    named = [token for name in CHAT_NAMES[1:] if (token := chat.get(name)) in vocab and token not in known]
    backend.add_special_tokens([*dict.fromkeys(named)])


def prompt_tokenizer(backend: Backend, bos: int | None, chat: Mapping[str, str]) -> Callable[[GPTConfig], Tokenizer]:
    """Returns a function that makes the tokenizer of a language model; see `Tokenizer` for the arguments."""
    return lambda config: Tokenizer(
        backend, config.special_ids, "prompts", vocab_size=config.vocab_size, bos=bos, chat=chat
    )


def _from_pieces(folder: Path, config: Mapping[str, Any], chat: Mapping[str, str]) -> MakeTokenizer:
    processor = read_sentencepiece(folder / _PIECES, read_file(folder / _PIECES))
    size = processor.get_piece_size()
    added = {token: each for token, each in _added(folder, config).items() if each[0] >= size}
    bos = None
    if flag_of(config, "add_bos_token", True):
        name = chat.get("bos_token")
        bos = processor.bos_id() if name is None else added[name][0] if name in added else processor.piece_to_id(name)
        bos = None if bos < 0 else bos
    unk = processor.unk_id()
    return None if unk < 0 else unk, prompt_tokenizer(
        PieceBackend(processor, added=added, special=chat.values()), bos, chat
    )


def _bos(backend: LibraryBackend, config: Mapping[str, Any], chat: Mapping[str, str], folder: Path) -> int | None:
    """Returns the id that prompts begin with, from tokenizer_config.json, or else from the post-processor."""
    if config.get("add_bos_token") is not None:
        if not flag_of(config, "add_bos_token", False) or "bos_token" not in chat:
            return None
        bos: int | None = backend.tokenizer.token_to_id(chat["bos_token"])
        if bos is None:
            raise ValueError(f"expected the vocabulary of {folder} to have {chat['bos_token']!r}, its bos_token")
        return bos
    prefix = backend.frame().prefix
    if len(prefix) > 1:
        raise ValueError(f"expected the tokenizer in {folder} to add one token before a text, got {prefix}")
    return next(iter(prefix), None)


def chat_of(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the chat template, and the special tokens by the names that templates use."""
    chat = {}
    for name in CHAT_NAMES[1:]:
        value = config.get(name)
        value = value.get("content") if isinstance(value, Mapping) else value  # a mapping adds options
        if isinstance(value, str):
            chat[name] = value
    template = config.get("chat_template")
    if (folder / _TEMPLATE).is_file():
        try:
            template = read_file(folder / _TEMPLATE).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"expected {folder / _TEMPLATE} to be UTF-8 ({error})") from error
    if isinstance(template, list):  # several templates, with names
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, Mapping)}
        template = named.get("default", next(iter(named.values()), None))
    if template is not None:
        if not isinstance(template, str):
            raise ValueError(f"expected the chat_template of {folder} to be a text, got {template!r:.60}")
        chat["chat_template"] = template
    return chat


def _added(folder: Path, config: Mapping[str, Any]) -> dict[str, tuple[int, bool]]:
    """Returns the tokens that were added to the vocabulary, with their ids and whether they are special."""
    added: dict[str, tuple[int, bool]] = {}
    for token, i in _read(folder / "added_tokens.json").items():
        added[token] = (i, True)
    listed = config.get("added_tokens_decoder")
    for i, token in listed.items() if isinstance(listed, Mapping) else ():
        if isinstance(token, Mapping) and isinstance(token.get("content"), str) and str(i).isdecimal():
            added[token["content"]] = (int(i), bool(token.get("special", False)))
    for token, (i, _) in added.items():
        if not isinstance(i, int) or isinstance(i, bool) or i < 0:
            raise ValueError(f"expected the added tokens of {folder} to have ids, got {i!r} for {token!r:.40}")
    return added


def _read(file: Path) -> dict[str, Any]:
    return dict(read_json(file)) if file.is_file() else {}
