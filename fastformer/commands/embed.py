"""`fastformer embed`."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

from fastformer.console import OutputLostError, is_terminal, progress
from fastformer.settings import Range

if TYPE_CHECKING:
    from fastformer.encoding.modules import Array

FILLED_BY = ("file",)  # a text or a file, not both
TEXTS = ("text", "prompt", "prompt_name")
_HEADER = 128  # bytes in front of the numbers of a .npy file


def embed(
    folder: str,
    text: str | None = None,
    *,
    file: str | None = None,
    out: str | None = None,
    prompt_name: str | None = None,
    prompt: str | None = None,
    normalize: bool | None = None,
    precision: Literal["fp32", "bf16", "int8", "int4"] | None = None,
    device: str = "auto",
    batch_tokens: Annotated[int, Range(1)] = 16384,
) -> None:
    """Computes the embeddings of a text, or of texts, a line each, with an encoder.

    They become a .npy file, which numpy.load reads: an array (lines, dim) in fp32, in the order of the lines. An empty
    line is an empty text, which has an embedding too. Memory does not grow with the number of lines.

    Args:
        folder: the encoder's folder, as sentence-transformers or transformers saves it
        text: the text to embed; without it and without --file, the lines of standard input
        file: a UTF-8 file, one text a line; compressed or not; - is standard input, FILE.jsonl:COLUMN a column of JSON
            lines, as of .parquet, .csv and .tsv
        out: the .npy file to write; without it the array goes to standard output, which must not be a terminal
        prompt_name: the name of one of the folder's prompts, such as query; it is put in front of each text
        prompt: a text to put in front of each text
        normalize: divide each embedding by its length; false: don't, even if the folder says so; by default as the
            folder says
        precision: convert the weights to this; int8 and int4 are for a CPU; by default they stay as they were saved
        device: auto (a GPU if there is one), cpu, cuda, cuda:1, ...
        batch_tokens: tokens that are computed together; fewer need less memory
    """
    from fastformer.commands._lines import each_line
    from fastformer.devices import choose_device
    from fastformer.encoding import Encoder

    if out is None:
        if is_terminal(sys.stdout):
            raise ValueError("expected --out FILE, or standard output to go to a file (> vectors.npy), got a terminal")
        sys.stdout.write("")  # fails before the work if the stream was closed when the process began
    encoder = Encoder.from_pretrained(folder, precision=precision, device=choose_device(device, precision))
    total = 0
    with _written(out) as write, progress(unit="text") as advance:
        texts = each_line(file) if text is None else [text]
        for rows in encoder.stream(texts, prompt_name, prompt, normalize=normalize, batch_tokens=batch_tokens):
            write(rows)
            total += len(rows)
            advance(len(rows))
        if not total:
            write(encoder.encode([]))
    cut = f", of which {encoder.num_cut:,} were cut to {encoder.max_seq_length} tokens" if encoder.num_cut else ""
    print(f"embedded {total:,} text{'s' * (total != 1)}{cut}", file=sys.stderr)


@contextlib.contextmanager
def _written(out: str | None) -> Iterator[Callable[[Array], None]]:
    """Yields a function that writes the next rows of a .npy file. The whole file appears at the end, or not at all.

    The file begins with the number of rows, which is known only at the end: the rows go to another file first.

    Args:
        out: the file; None: standard output.
    """
    path = None if out is None else Path(out)
    if path is not None:
        if not path.parent.is_dir():
            raise ValueError(f"expected --out in an existing folder, got {out}")
        if path.exists() and not path.is_file():  # also behind a link, as /dev/stdout is one
            raise ValueError(f"expected --out to be a file, got the folder, the pipe or the device {out}")
    with tempfile.NamedTemporaryFile(dir=None if path is None else path.parent, delete=False) as rows:
        place = path or rows.name
        try:
            rows.write(bytes(_HEADER))
            shape: list[int] = []

            def write(part: Array) -> None:
                shape[:] = [part.shape[0] + (shape[0] if shape else 0), part.shape[1]]
                with _named(place):
                    rows.write(part.tobytes())

            yield write
            with _named(place):
                rows.seek(0)
                rows.write(_header((shape[0], shape[1])))
                rows.seek(0)
            if path is None:
                _to_output(rows)
            else:
                os.chmod(rows.name, 0o666 & ~_umask())
                os.replace(rows.name, path)
        finally:
            with contextlib.suppress(OSError):  # what a full disk didn't take has its error already
                rows.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(rows.name)


@contextlib.contextmanager
def _named(place: object) -> Iterator[None]:
    """Names the file in the error of a write that failed."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"could not write {place} ({error.strerror})") from error


def _header(shape: tuple[int, int]) -> bytes:
    """Returns the beginning of a .npy file of fp32 (format 1.0), padded to _HEADER bytes."""
    text = repr({"descr": "<f4", "fortran_order": False, "shape": shape})
    start = b"\x93NUMPY\x01\x00" + (_HEADER - 10).to_bytes(2, "little")
    return start + text.encode().ljust(_HEADER - 11) + b"\n"


def _to_output(rows: IO[bytes]) -> None:
    output: Any = sys.stdout
    try:
        output.flush()
        shutil.copyfileobj(rows, output.buffer)
        output.buffer.flush()
    except (OSError, ValueError, AttributeError) as error:  # a ValueError for a stream that was closed meanwhile
        reason = getattr(error, "strerror", None) or str(error)
        raise OutputLostError("standard output", reason, has_left=isinstance(error, BrokenPipeError)) from error


def _umask() -> int:
    """Returns the process's umask, which can be read only by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
