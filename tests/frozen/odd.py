"""Lists what the readers of checkpoints make of odd settings and of tensors that don't fit: of each, a word.

"!" is a refusal, "=" what the whole folder gives, and results with the same letter are the same.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from fastformer.checkpoints.ctranslate2 import as_tensors
from fastformer.checkpoints.gguf.models import load_file as load_gguf
from fastformer.checkpoints.hf import DECODER_FORMS, ENCODER_FORMS, FAMILIES
from fastformer.checkpoints.hf.common import Checkpoint
from fastformer.checkpoints.hf.decoder import special_ids
from fastformer.checkpoints.hf.fields import check_fields
from fastformer.checkpoints.hf.quantized import dequantized, quantization_settings
from fastformer.checkpoints.model_bin import MODEL, read_variables
from tests.checkpoints.test_ctranslate2 import written
from tests.checkpoints.test_gguf import contents, to_bytes
from tests.checkpoints.test_omitted import MORE, REFUSED, SPECIFICATIONS, made_of, options_of, outcome
from tests.checkpoints.test_quantized_folders import checkpoint
from tests.foreign.compressed_folders import FOLDERS as COMPRESSED
from tests.foreign.gguf_files import FOLDER as GGUF
from tests.integrations.config_fields import BASES, config_of

VALUES: tuple[Any, ...] = (None, True, False, 0, 1, -1, 3, 0.5, "", "x", [], {}, [1])
WITH_TENSORS = ("llama",)
NUMBERS = (0.0, -1.0, 0.5, 3.0)
Tensors = dict[str, Tensor]


def words(whole: Any, results: Iterable[Any]) -> str:
    """Returns a word for each result, compared with that of the whole folder."""
    others, found = [whole], list[str]()
    for result in results:
        if result != REFUSED and result not in others:
            others.append(result)
        found.append("!" if result == REFUSED else chr(ord("a") + others.index(result) - 1) if result != whole else "=")
    return " ".join(found)


def read_ones(found: dict[str, str]) -> dict[str, str]:
    """Returns the rows of what is read at all."""
    return {name: row for name, row in found.items() if {*row} - {*"=| "}}


def read_settings(kind: str, settings: dict[str, Any]) -> Any:
    """Returns the options of a family's config, its ids, and whether an encoder may have it."""
    check_fields(settings, FAMILIES[kind].kind)
    encodes = outcome(lambda: check_fields(settings, FAMILIES[kind].kind, encodes=True))
    return options_of(kind, settings), outcome(special_ids, settings, 60, None), encodes


def names_of(kind: str) -> list[str]:
    """Returns the settings that transformers writes for a family."""
    return sorted(config_of(kind, BASES[kind]).to_dict().keys() - {"model_type"})


def settings_now(kind: str, names: Iterable[str]) -> dict[str, str]:
    """Returns a word for each odd value of each setting of a family, in folders of several sizes."""
    wholes = [{"model_type": kind, **base} for base in (BASES[kind], *MORE.get(kind, ()))]
    found: dict[str, str] = {}
    for name in names:
        rows = [
            words(
                read_settings(kind, whole), (outcome(read_settings, kind, {**whole, name: value}) for value in VALUES)
            )
            for whole in wholes
        ]
        found[name] = " | ".join(dict.fromkeys(rows))
    return found


def changes(tensor: Tensor) -> list[Tensor | None]:
    """Returns what may stand in a tensor's place: nothing, other shapes, another type."""
    other = tensor.to(torch.int32 if tensor.is_floating_point() else torch.float32)
    if not tensor.dim():
        return [None, tensor[None], other, *(torch.tensor(number).to(tensor.dtype) for number in NUMBERS)]
    return [None, tensor[None], tensor[:-1], tensor[..., :-1], other]


def digest(model: Any) -> Any:
    config, numbers = made_of(model)
    return config, {name: hash(each) for name, each in numbers.items()}


def tensors_now(
    tensors: Mapping[str, Tensor], read: Callable[[Tensors], Any], kind_of: Callable[[str], str]
) -> dict[str, str]:
    """Returns the words of the changes of a tensor of each kind."""
    found: dict[str, str] = {}
    whole = read(dict(tensors))
    for name, tensor in tensors.items():
        if (kind := kind_of(name)) and kind not in found:
            left = {key: each for key, each in tensors.items() if key != name}
            parts = [left if part is None else {**left, name: part} for part in changes(tensor)]
            found[kind] = words(whole, [outcome(read, part) for part in parts])
    return read_ones(found)


def of_ctranslate2(name: str) -> dict[str, str]:
    source, read = SPECIFICATIONS[name]
    spec, arrays = read_variables(source / MODEL)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(shutil.copytree(source, Path(place) / name))

        def written_and_read(tensors: Tensors) -> Any:
            (folder / MODEL).write_bytes(written(tensors, spec))
            return read(folder)

        stored = as_tensors(arrays)
        numbers = {key.rpartition("/")[2] for key, tensor in stored.items() if not tensor.dim()}

        def kind_of(variable: str) -> str:
            *_, parent, last = re.sub(r"\d+", "", variable).split("/")
            return last if last in numbers else f"{parent}/{last}" if name in WITH_TENSORS else ""

        return tensors_now(stored, written_and_read, kind_of)


def of_quantized(name: str) -> dict[str, str]:
    if name in ("gptq", "awq"):
        settings, state, _ = checkpoint(name, 32)
    else:
        settings = json.loads((COMPRESSED / name / "config.json").read_text())
        state = load_file(COMPRESSED / name / "model.safetensors")
    how = quantization_settings(COMPRESSED, settings)
    assert how is not None

    def read(tensors: Tensors) -> Any:
        plain = dequantized(settings, how, tensors, COMPRESSED)
        return digest(FAMILIES["llama"].to_model(Checkpoint(plain.settings, plain.state, dtype=torch.float32)))

    return tensors_now(state, read, lambda key: key.rpartition(".")[2])


# A kind of a number in a GGUF file, and a value of it.
OF_GGUF = ((4, 0), (4, 3), (8, "x"))


def of_gguf(name: str) -> dict[str, str]:
    values, tensors = contents(GGUF / f"{name}.gguf")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "x.gguf"

        def read(values: Any, tensors: Any) -> Any:
            file.write_bytes(to_bytes(values, tensors))
            model, tokenizer = load_gguf(file)
            return digest(model), tokenizer.special_ids, tokenizer.encode("the dog")

        whole, found = read(values, tensors), dict[str, str]()
        for key in values:
            if key in ("general.architecture", "tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
                continue
            left = {other: each for other, each in values.items() if other != key}
            odd: list[Any] = [left, *({**left, key: each} for each in OF_GGUF)]
            found[key] = words(whole, (outcome(read, each, tensors) for each in odd))
        for key, (kind, sizes, data) in tensors.items():
            if (short := re.sub(r"\d+", "", key)) in found:
                continue
            rest: dict[str, Any] = {other: each for other, each in tensors.items() if other != key}
            shapes = (sizes[::-1], (*sizes[:-1], sizes[-1] - 1))
            bent: list[Any] = [rest, *({**rest, key: (kind, each, data)} for each in shapes)]
            found[short] = words(whole, (outcome(read, values, each) for each in bent))
        return read_ones(found)


READERS: dict[str, tuple[Callable[[str], dict[str, str]], tuple[str, ...]]] = {
    "ctranslate2": (of_ctranslate2, ("llama", "whisper")),
    "quantized": (of_quantized, ("gptq", "awq", "w4a16_asym", "w8a8", "fp8", "actorder")),
    "gguf": (of_gguf, ("llama",)),
}
FOLDERS = {f"{reader} {name}": (read, name) for reader, (read, names) in READERS.items() for name in names}
KINDS = sorted({*DECODER_FORMS, *ENCODER_FORMS})
