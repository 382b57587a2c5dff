"""Writes a decoder and its tokenizer as a GGUF file, which llama.cpp reads: the inverse of `models`, `tokenizers`."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastformer.checkpoints.gguf.architectures import ARCHITECTURES, GPT2_SETTINGS, SETTINGS, Architecture
from fastformer.checkpoints.gguf.blocks import BLOCKS, Kind
from fastformer.checkpoints.gguf.tokenizers import CHAT, CONTROL, DIGIT, GPT2, NORMAL, PRE, UNUSED, USER
from fastformer.checkpoints.hf import from_model
from fastformer.data import Tokenizer
from fastformer.data.huggingface import LibraryBackend
from fastformer.data.pieces import PieceBackend
from fastformer.files import write_atomically
from fastformer.models import GPT
from fastformer.models.quantization import to_groups

_ALIGNMENT = 32
_TYPES: dict[type, tuple[int, str]] = {bool: (7, "?"), int: (4, "I"), float: (6, "f")}
_SIGNED = (5, "i")
# The family's settings whose numbers are sizes of the model, by architecture.
_FLOATS = ("rms_norm_eps", "layer_norm_epsilon", "rope_theta", "norm_epsilon")


def write_gguf(path: str | os.PathLike[str], model: GPT, tokenizer: Tokenizer, kind: Kind) -> None:
    """Writes a model.

    Args:
        path: the file to write.
        model: a decoder of a family in `ARCHITECTURES`.
        tokenizer: its tokenizer: a byte-level BPE whose cuts have a name in GGUF, or a SentencePiece model.
        kind: Q8_0 or Q4_0, for the matrices; rows that aren't whole blocks are F16, vectors F32.

    Raises:
        ValueError: the model or the tokenizer has no form in GGUF.
        OSError: the file could not be written; an earlier one is unchanged.
    """
    settings, state = from_model(model)
    name, architecture = _architecture(settings)
    values = {"general.architecture": name, "general.quantization_version": 2}
    values |= {"general.file_type": {Kind.Q8_0: 7, Kind.Q4_0: 2}[kind]}
    values |= _sizes(name, settings, model) | _tokenizer(tokenizer, model)
    tensors = [*_tensors(name, architecture, model, state)]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values))
    head += b"".join(_text(key) + _value(value) for key, value in values.items())
    parts: list[bytes] = []
    offset = 0
    for tensor_name, tensor in tensors:
        used, data = _stored(tensor, kind)
        head += _text(tensor_name) + struct.pack(f"<I{tensor.dim()}Q", tensor.dim(), *reversed(tensor.shape))
        head += struct.pack("<IQ", used, offset)
        parts.append(data + bytes(-len(data) % _ALIGNMENT))
        offset += len(parts[-1])
    write_atomically(Path(path), b"".join([head, bytes(-len(head) % _ALIGNMENT), *parts]))


def _architecture(settings: Mapping[str, Any]) -> tuple[str, Architecture]:
    family = settings["model_type"]
    for name, architecture in ARCHITECTURES.items():
        if family == architecture.kind and architecture.is_written:
            return name, architecture
    written = ", ".join(repr(each.kind) for each in ARCHITECTURES.values() if each.is_written)
    raise ValueError(f"expected a model of a family that is written as GGUF ({written}), got a {family!r}")


def _sizes(name: str, settings: Mapping[str, Any], model: GPT) -> dict[str, Any]:
    """Returns the values of the architecture."""
    config, names = model.config, GPT2_SETTINGS if name == "gpt2" else SETTINGS
    values: dict[str, Any] = {
        f"{name}.{key}": float(settings[setting]) if setting in _FLOATS else int(settings[setting])
        for setting, key in names.items()
        if settings.get(setting) is not None
    }
    values[f"{name}.context_length"] = config.max_len
    if name == "gpt2":
        return values
    values[f"{name}.attention.value_length"] = values[f"{name}.attention.key_length"] = config.size_of_head
    values[f"{name}.rope.dimension_count"] = config.rotary_dim
    if name == "starcoder2":
        values[f"{name}.attention.layer_norm_epsilon"] = config.layer_norm_eps
    scaling = config.scaling
    if scaling is not None and scaling["kind"] == "linear":
        values[f"{name}.rope.scaling.type"], values[f"{name}.rope.scaling.factor"] = "linear", float(scaling["factor"])
    elif scaling is not None and (name != "llama" or scaling.speeds(config.rotary_dim, config.rotary_base).scale != 1):
        raise ValueError(f"expected rotary positions whose scaling GGUF has, got {dict(scaling)!r:.80}")
    if name.startswith("gemma"):
        if config.attention_scale not in (None, config.size_of_head**-0.5):
            raise ValueError(
                f"expected scores scaled by the size of a head, got attention_scale {config.attention_scale}"
            )
        for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
            if name != "gemma" and settings.get(cap) is not None:
                values[f"{name}.{cap}"] = float(settings[cap])
        if name == "gemma3" and config.local_rotary_base is not None:
            values[f"{name}.rope.freq_base_swa"] = float(config.local_rotary_base)
    usual = {"gemma2": 2, "gemma3": 6}.get(name)
    pattern = [usual is not None and (layer + 1) % usual != 0 for layer in range(config.num_layers)]
    if usual is not None and config.window_size is not None and [*config.windows] != pattern:
        raise ValueError(f"expected windows in all layers but each {usual}th, as a {name} has, got {config.windows}")
    return values


def _tensors(
    name: str, architecture: Architecture, model: GPT, state: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors under GGUF's names, in fp32."""
    config = model.config
    places = {family: stem for stem, family in architecture.places.items()}
    modules = {family: stem for stem, family in architecture.layer.items()}
    for key, tensor in state.items():
        module, kind = key.rsplit(".", 1)
        if key == "lm_head.weight" and config.tie_embeddings:
            continue
        tensor, prefix, stem = tensor.detach().cpu(), "", places.get(module)
        if stem is None:
            layer, _, inner = module.removeprefix(architecture.prefix).partition(".")
            prefix, stem = f"blk.{layer}.", modules.get(inner)
        if stem is None:
            raise ValueError(f"expected the tensors of a {name}, got {key}")
        if architecture.is_turned and prefix and tensor.dim() == 2:
            tensor = tensor.t()
        if architecture.norms_have_one and stem.endswith("norm"):
            tensor = tensor.double() + 1
        if architecture.is_permuted and stem in ("attn_q", "attn_k"):
            tensor = tensor.reshape(-1, 2, config.size_of_head // 2, *tensor.shape[1:]).transpose(1, 2).flatten(0, 2)
        yield f"{prefix}{stem}.{kind}", tensor.float().contiguous()
    if name == "llama" and config.scaling is not None and config.scaling["kind"] != "linear":
        plain = config.rotary_base ** -(torch.arange(0, config.rotary_dim, 2, dtype=torch.float64) / config.rotary_dim)
        speeds = config.scaling.speeds(config.rotary_dim, config.rotary_base).speeds
        yield "rope_freqs.weight", (plain / (plain if speeds is None else speeds)).float()


def _stored(tensor: Tensor, kind: Kind) -> tuple[Kind, bytes]:
    """Returns the kind of a tensor and its bytes."""
    if tensor.dim() < 2:
        return Kind.F32, tensor.numpy().tobytes()
    if tensor.shape[-1] % BLOCKS[kind].numbers:
        return Kind.F16, tensor.half().numpy().tobytes()
    if kind == Kind.Q4_0:
        groups = to_groups(tensor)
        q = torch.stack([groups.nibbles & 15, groups.nibbles >> 4], -1).view(-1, 2, 16)
        scale, data = groups.scale.reshape(-1, 1), q[:, 0] | q[:, 1] << 4
    else:
        blocks = tensor.view(-1, 32)
        scale = blocks.abs().amax(1, keepdim=True) / 127
        steps = torch.where(scale > 0, blocks / scale, 0.0)
        data = (steps.abs() + 0.5).floor().copysign(steps).clamp(-127, 127).to(torch.int8).view(torch.uint8)
    if not scale.half().isfinite().all():
        raise ValueError("expected finite weights whose scales fit fp16, got others")
    return kind, torch.cat([scale.half().contiguous().view(torch.uint8), data], 1).numpy().tobytes()


def _tokenizer(tokenizer: Tokenizer, model: GPT) -> dict[str, Any]:
    """Returns the values of the tokenizer."""
    backend, ids, size = tokenizer.backend, model.config.special_ids, 0
    if isinstance(backend, LibraryBackend):
        values, added = _byte_level(backend), backend.added_tokens
        names = [backend.id_to_token(i) for i in range(model.config.vocab_size)]
        types = [UNUSED if name is None else NORMAL for name in names]
    elif isinstance(backend, PieceBackend) and backend.vocab is None:
        values, added = _pieces(backend), backend.added_tokens
        names = [backend.id_to_token(i) for i in range(model.config.vocab_size)]
        known = [*_piece_types(backend.processor.serialized_model_proto())]
        size = len(known)
        types = [UNUSED if name is None else known[i] if i < size else NORMAL for i, name in enumerate(names)]
        scores = [backend.processor.get_score(i) if i < size else -1000.0 for i in range(len(names))]
        values["tokenizer.ggml.scores"] = [float(score) for score in scores]
    else:
        raise ValueError(f"expected a byte-level BPE or a SentencePiece model, got a tokenizer of {backend.library}")
    tokens = [f"[PAD{i}]" if name is None else name for i, name in enumerate(names)]
    for i, token in enumerate(tokens):
        if token in added and types[i] == NORMAL and i >= size:  # a model's own pieces have their types
            types[i] = CONTROL if added[token] else USER
    if isinstance(backend, PieceBackend):  # llama.cpp looks for these in a text whose spaces are still spaces
        tokens = [token.replace("▁", " ") if kind == USER else token for token, kind in zip(tokens, types, strict=True)]
    values |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    values["tokenizer.ggml.add_bos_token"] = bool(begin := tokenizer.encode(""))
    places = {token: i for i, token in enumerate(tokens)}
    named = {key: places.get(tokenizer.chat.get(name, "")) for name, key in CHAT.items()}
    ends = dict(zip(("eos", "eot"), ids.eos, strict=False))
    special = {**named, **ends, "padding": ids.pad, **({"bos": begin[0]} if begin else {})}
    values |= {f"tokenizer.ggml.{name}_token_id": i for name, i in special.items() if i is not None}
    if "chat_template" in tokenizer.chat:
        values["tokenizer.chat_template"] = tokenizer.chat["chat_template"]
    return values


def _byte_level(backend: LibraryBackend) -> dict[str, Any]:
    values = json.loads(backend.tokenizer.to_str())
    model, steps = values["model"], values.get("pre_tokenizer") or {}
    cuts: list[str | None] = []
    for step in steps.get("pretokenizers", [steps]):
        if step.get("type") == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
            cuts.append(step["pattern"].get("Regex"))
        elif step.get("type") == "Digits" and step.get("individual_digits"):
            cuts.append(DIGIT)
        elif step.get("type") == "ByteLevel" and not step.get("add_prefix_space"):
            cuts += [GPT2] if step["use_regex"] else []
        else:
            cuts.append(None)
    normalizer = values.get("normalizer")
    nfc = normalizer is not None
    form = tuple(cuts), bool(model.get("ignore_merges")), nfc
    names = [name for name, pre in PRE.items() if (pre.cuts, pre.whole_words, pre.nfc) == form]
    is_plain = model.get("type") == "BPE" and (not nfc or normalizer.get("type") == "NFC")
    if not is_plain or not names or "ByteLevel" not in json.dumps(values.get("decoder")):
        raise ValueError("expected a byte-level BPE that cuts words in a way that has a name in GGUF, got another one")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": names[0], "tokenizer.ggml.merges": merges}


def _pieces(backend: PieceBackend) -> dict[str, Any]:
    encode = backend.processor.encode
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.add_space_prefix": encode("a", out_type=str)[0].startswith("▁"),
        "tokenizer.ggml.remove_extra_whitespaces": encode("a  a") == encode("a a"),
    }


def _piece_types(data: bytes) -> Iterator[int]:
    """Yields the types of the pieces of a SentencePiece `ModelProto`, which the library doesn't tell."""
    for field, part in _fields(data):
        if field == 1 and isinstance(part, bytes):
            yield next((value for inner, value in _fields(part) if inner == 3 and isinstance(value, int)), NORMAL)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields the numbers and the values of a message's fields."""
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = data[place]
            place, value, shift = place + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while place < len(data):
        tag = varint()
        if tag & 7 == 0:
            yield tag >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(tag & 7) or varint()
        yield tag >> 3, data[place : place + size]
        place += size


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, list):
        if value and isinstance(value[0], str):
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
        kind, form = _TYPES[float] if value and isinstance(value[0], float) else _SIGNED
        return struct.pack(f"<IIQ{len(value)}{form}", 9, kind, len(value), *value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"expected finite numbers, got {value}")
    kind, form = _TYPES[type(value)]
    return struct.pack(f"<I{form}", kind, value)
