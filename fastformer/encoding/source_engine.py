"""Runs the encoder of a `models.Transformer` for its results alone, in one C++ call or by its modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastformer.encoding.engine import PackedEncoder
from fastformer.generation.engines import cpp
from fastformer.generation.engines.cpp_support import find_guards, forget_guards, why_not_in, why_not_now
from fastformer.generation.engines.prepack import packed
from fastformer.generation.model_protocols import check_precision, dtype_precision, own_precision, why_not_by_modules
from fastformer.models import Transformer
from fastformer.nn.layout import SequenceLayout
from fastformer.ops import _extension

Rows: TypeAlias = Sequence[Sequence[int]]
Array: TypeAlias = npt.NDArray[np.float32]


class SourceEngine:
    """Encodes sources, as ids, with the encoder of a `models.Transformer`: what the model's `encode` gives.

    On a CPU the whole encoder is one C++ call, from weights that are packed once for all engines of the model, without
    the decoder's. It computes as `EncoderEngine` does: a source's bits depend neither on its neighbours nor on the
    number of threads, and weights that change are packed again with the next call. Where the C++ code would compute
    something else than the modules, or on a GPU, the model's modules run, in their own precision.

    Several threads may call one engine at once.

    Args:
        model: the model, of which the engine holds a reference.
        precision: "fp32", "bf16", "int8" or "int4"; None: the model's own.

    Raises:
        ValueError: something else than a Transformer; a precision that neither the C++ code nor the modules compute in.
    """

    def __init__(self, model: Transformer, precision: str | None = None) -> None:
        if not isinstance(model, Transformer):
            raise ValueError(f"expected a models.Transformer, got {type(model).__name__}")
        check_precision(precision)
        self.model, self.precision = model, precision or own_precision(model)
        if self.why_unsupported(model, self.precision) is not None:
            self._check_modules()

    @staticmethod
    def why_unsupported(model: object, precision: str | None = None) -> str | None:
        """Why the C++ code would compute something else than the model's modules, or not in this precision.

        Returns:
            The reason, for people; None where the encoder runs in C++.

        Raises:
            ValueError: no such precision.
        """
        check_precision(precision)
        return _why_not(model, precision) or find_guards(cast(Transformer, model))[1]

    @property
    def name(self) -> str:
        """The engine of the encoder as the model is now: "cpp" or "modules"."""
        return "cpp" if self.why_unsupported(self.model, self.precision) is None else "modules"

    def encode(self, ids: Rows) -> Array:
        """Encodes sources of any lengths.

        Args:
            ids: of each source its tokens, with its special ones and without padding.

        Returns:
            The states of all tokens, one source after the other: (tokens, d_model) fp32.

        Raises:
            ValueError: a source without tokens, or longer than the model's max_len; ids that the model doesn't have.
        """
        model, precision = self.model, self.precision
        if self.why_unsupported(model, precision) is not None:
            self._check_modules()
            return self._by_modules(ids)
        return packed(model, f"source {precision}", lambda: encoder_of(_pack(model, precision))).states(ids, None)

    def _check_modules(self) -> None:
        reason = why_not_by_modules(self.model, self.precision)
        if reason is not None and self.precision != dtype_precision(self.model):
            why = self.why_unsupported(self.model, self.precision)
            raise ValueError(f"expected a model that computes in {self.precision}; the C++ code doesn't run it: {why}")

    def _by_modules(self, ids: Rows) -> Array:
        config = self.model.config
        if not len(ids):
            return np.zeros((0, config.d_model), np.float32)
        lengths = [len(source) for source in ids]
        if not min(lengths):
            raise ValueError(f"ids: expected sources of 1 to {config.max_len} tokens, got 0 in one")
        device = next(self.model.encoder.parameters()).device
        layout = SequenceLayout.packed(torch.tensor(lengths, device="cpu"), max(lengths)).to(device)
        tokens = torch.tensor([each for source in ids for each in source], device=device)
        with torch.inference_mode():
            states: Array = self.model.encode(tokens, layout).float().cpu().numpy()
        return states


def _why_not(model: object, precision: str | None) -> str | None:
    if (missing := _extension.why_missing("Encoder")) is not None:
        return missing
    if type(model) is not Transformer:
        return f"it knows models.Transformer alone, and a {type(model).__name__} may compute otherwise"
    return why_not_now() or why_not_in(precision, model)


def pack_source(model: Transformer, precision: str) -> PackedEncoder | str:
    """The packed encoder of a model, which may be freed behind it; or why the C++ code doesn't compute it."""
    reason = SourceEngine.why_unsupported(model, precision)
    if reason is not None:
        return reason
    found = encoder_of(_pack(model, precision))
    forget_guards(model)
    return found


def encoder_of(weights: object) -> PackedEncoder:
    """The encoder of a `PackedModel` of the extension, which may have a decoder as well. It holds no other weights."""
    encoder = cast(Any, _extension.module()).Encoder(weights)
    return PackedEncoder(encoder, encoder.max_len, token_types=0)


def _pack(model: Transformer, precision: str) -> object:
    extension = cast(Any, _extension.module())
    return extension.PackedModel(pack_options(model, precision), pack_tensors(model, precision))


def pack_options(model: Transformer, precision: str) -> dict[str, object]:
    """What the tensors don't say: csrc/engine/packed_model.h's ModelOptions."""
    embedding = model.embedding if model.config.tie_embeddings else model.source_embedding
    return cpp.pack_options(model, precision) | {
        "num_decoder_layers": 0,
        "decoder_windows": [],
        "scale": embedding.acting_scale,
        "padding_idx": -1 if embedding.padding_idx is None else embedding.padding_idx,
    }


def pack_tensors(model: Transformer, precision: str) -> dict[str, Any]:
    """The encoder's tensors under the names that csrc/engine/packed_model.h wants."""
    tensors: dict[str, Tensor] = {
        name: tensor
        for name, tensor in cpp.named_tensors(model).items()
        if name.startswith(("encoder.", "encoder_", "source_"))
    }
    return cpp.arrays_of(model, tensors, precision)
