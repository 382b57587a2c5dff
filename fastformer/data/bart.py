"""The tokenizer of a BART: a byte-level BPE under the ids of its model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastformer.data.checks import check_text, checked_ids, until_eos
from fastformer.data.tokenizer import (
    TOKENIZER,
    encode_batch,
    library_errors,
    read_backend,
    tokenizers_library,
    visible,
)
from fastformer.files import write_atomically
from fastformer.special_ids import SpecialIds

if TYPE_CHECKING:
    import tokenizers

TYPE = "bart"  # in tokenizer.json
_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


class BartTokenizer:
    """Encodes sources, which begin with BOS, and what an output begins with; decodes outputs.

    As everywhere in this library, a special token that is spelled in a text is text, "<mask>" too.

    Args:
        backend: of the `tokenizers` library. The padding and truncation that it may hold are switched off.
        vocab_size: of the model, which may have more ids than there are tokens.
        special_ids: of the model.
        bos: what sources and outputs begin with; None: nothing.
        name: what messages call the tokenizer.

    Raises:
        ValueError: tokens beyond vocab_size.
    """

    words_begin_with_space = True

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        vocab_size: int,
        special_ids: SpecialIds,
        bos: int | None,
        name: str = "the tokenizer",
    ) -> None:
        largest = max(backend.get_vocab().values(), default=0)
        if largest >= vocab_size:
            raise ValueError(f"expected ids below {vocab_size}, got {largest}: is it another model's tokenizer?")
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True  # "</s>" in a text is text
        self._backend, self._vocab_size, self._special_ids = backend, vocab_size, special_ids
        self._bos, self._name = [] if bos is None else [bos], name

    @property
    def special_ids(self) -> SpecialIds:
        """Those of the model."""
        return self._special_ids

    @property
    def vocab_size(self) -> int:
        """The number of the model's ids."""
        return self._vocab_size

    def encode(self, text: str) -> list[int]:
        """BOS and the ids of a text, without EOS."""
        check_text(text)
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of many texts, on all cores."""
        return [[*self._bos, *ids] for ids in encode_batch(self._backend, texts, self._name)]

    def pieces(self, text: str) -> list[str]:
        """The text as it is."""
        return [text]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids: special tokens are skipped, EOS ends it; broken UTF-8 becomes U+FFFD."""
        kept = until_eos(ids, self._special_ids, self._vocab_size)
        with library_errors(f"{self._name} can't decode these ids"):
            return str(self._backend.decode(kept, skip_special_tokens=True))

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Each id as its token."""
        return [visible(self._backend.id_to_token(i)) for i in checked_ids(ids, self._vocab_size)]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes tokenizer.json."""
        values = {
            "type": TYPE,
            "vocab_size": self._vocab_size,
            "special_ids": asdict(self._special_ids),
            "bos": self._bos[0] if self._bos else None,
            "backend": json.loads(self._backend.to_str()),
        }
        write_atomically(Path(folder, TOKENIZER), json.dumps(values, ensure_ascii=False).encode() + b"\n")


def saved_bart(file: Path, values: Mapping[str, Any]) -> BartTokenizer:
    """What `BartTokenizer.save` wrote.

    Raises:
        ImportError: tokenizers is not installed.
        ValueError: a damaged file.
    """
    try:
        ids = SpecialIds.from_dict(values["special_ids"])
        bos = None if values["bos"] is None else int(values["bos"])
        return BartTokenizer(read_backend(file, values["backend"]), int(values["vocab_size"]), ids, bos, str(file))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{file} is damaged or no tokenizer ({error}): copy it again or convert anew") from error


def byte_level_bpe(
    file: Path, vocab: Mapping[str, int], merges: bytes, *, add_prefix_space: bool
) -> tokenizers.Tokenizer:
    """The BPE of a vocabulary and its merges.

    Args:
        file: of the merges.
        vocab: the ids of tokens.
        merges: two tokens a line, separated by a space, the first to be merged first; behind a line of a version.
        add_prefix_space: whether the first word of a text gets a space.

    Raises:
        ImportError: tokenizers is not installed.
        ValueError: merges of something else.
    """
    library = tokenizers_library()
    try:
        lines = merges.decode("utf-8").split("\n")
        pairs = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
        backend: tokenizers.Tokenizer = library.Tokenizer(library.models.BPE(vocab=dict(vocab), merges=pairs))
    except Exception as error:  # the library raises a bare Exception
        raise ValueError(f"{file} is damaged, or of another vocabulary ({error}): copy it again") from error
    backend.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.decoder = library.decoders.ByteLevel()
    backend.add_special_tokens([name for name in _SPECIAL if name in vocab])
    return backend
