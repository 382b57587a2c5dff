"""The common base of `Encoder` and `CrossEncoder`."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from fastformer.encoding.engine import EncoderEngine
from fastformer.encoding.folder import Folder, read_folder


class FolderModel:
    """The model of a folder, its engine and its tokenizer.

    Args:
        folder: a path, or the result of `read_folder`.
        precision: the precision of the weights; None: as they were saved.
        device: the device for the model; None: the CPU.
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
        """Makes an object from a folder. The arguments are those of the class."""
        return cls(folder, precision=precision, device=device, **options)

    @property
    def max_seq_length(self) -> int:
        """The most tokens in a row, including special ones. Texts are cut to it, in a pair the longer one. Settable."""
        return self._reader.max_len

    @max_seq_length.setter
    def max_seq_length(self, value: int) -> None:
        self._reader.set_max_len(value, self._folder.model.config.max_len)

    @property
    def num_cut(self) -> int:
        """The number of texts or pairs so far that were cut because they were longer than max_seq_length."""
        return self._reader.num_cut

    @property
    def model(self) -> Any:
        """The `models.BERT`."""
        return self._folder.model

    @property
    def precision(self) -> str:
        """The precision that the model computes in."""
        return self._engine.precision

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        found: torch.device = next(self._folder.model.parameters()).device
        return found

    def _given(self, found: Tensor, is_one: bool, convert_to_numpy: bool, convert_to_tensor: bool) -> Any:
        """Returns results on the CPU in the form that the caller asks for; for one text, its row."""
        given: Any = found.to(self.device) if convert_to_tensor else found.numpy() if convert_to_numpy else list(found)
        return given[0] if is_one else given
