"""Files of torch.save: read without running code, and without taking more memory than the file has."""

from __future__ import annotations

import zipfile
from typing import Any, BinaryIO

import torch


def read_archive(file: BinaryIO, name: object, what: str) -> Any:
    """Reads a file of torch.save onto the CPU; it may hold tensors and plain values only.

    torch.save stores its entries uncompressed. torch's reader also accepts compressed entries, and a few megabytes of
    those can expand to any number of gigabytes, so a file with compressed entries is refused.

    Args:
        file: its bytes.
        name: the name of the file, for messages.
        what: the kind of file that the caller expects, for messages.

    Raises:
        ValueError: a file that is damaged, compressed, or holds more than tensors and plain values.
    """
    try:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                entries = archive.infolist()
            size = file.seek(0, 2)
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries) or size < sum(
                entry.file_size for entry in entries
            ):
                raise ValueError(f"expected {name} as torch.save writes it, got a compressed archive")
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)
    except ValueError:
        raise
    except Exception as error:  # torch raises what the unpickler and the archive's reader raise
        raise ValueError(f"{name} is not a {what} of plain tensors and values ({type(error).__name__})") from error
