"""What the encoder and the cross-encoder of a folder have in common."""

from __future__ import annotations

import os
from typing import Any

import torch
from typing_extensions import Self

from fastformer.encoding.engine import EncoderEngine
from fastformer.encoding.folder import Folder, read_folder


class FolderModel:
    """The model of a folder, its engine and its tokenizer.

    Args:
        folder: on disk, or as `read_folder` found it.
        precision: of the weights; None: as they were saved.
        device: where the model goes; None: the CPU.
    """

    def __init__(
        self, folder: str | os.PathLike[str] | Folder, precision: str | None, device: torch.device | str | None
    ) -> None:
        self._folder = folder if isinstance(folder, Folder) else read_folder(folder, device=device)
        self._reader = self._folder.reader
        self._engine = EncoderEngine(self._folder.model, precision)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        *,
        precision: str | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> Self:
        """The same as the class itself, which documents it."""
        return cls(folder, precision=precision, device=device, **options)

    @property
    def max_seq_length(self) -> int:
        """Tokens at most, special ones among them; longer texts are cut, of a pair the longer one. It may be set."""
        return self._reader.max_len

    @max_seq_length.setter
    def max_seq_length(self, value: int) -> None:
        self._reader.set_max_len(value, self._folder.model.config.max_len)

    @property
    def num_cut(self) -> int:
        """How many texts or pairs were longer than max_seq_length so far, and were cut."""
        return self._reader.num_cut

    @property
    def model(self) -> Any:
        """The `models.BERT`."""
        return self._folder.model

    @property
    def precision(self) -> str:
        """What the model is computed in."""
        return self._engine.precision

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        found: torch.device = next(self._folder.model.parameters()).device
        return found
