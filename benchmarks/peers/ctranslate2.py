"""CTranslate2 with the weights of a fastformer model, in a folder of its own format; and fastformer on such a folder.

Greedy decoding, and beam search over outputs of one length, give fastformer's tokens. If outputs end by themselves,
beam
search differs: CTranslate2 divides a score by length ** length_penalty, and stops as soon as num_beams hypotheses are
finished; fastformer divides by ((5 + length) / 6) ** length_penalty, and continues while a better one is possible.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.peers.job import DecodingPeer, Missing, Model, PeerJob, Tokens, needed
from benchmarks.peers.ours import Ours
from fastformer.checkpoints.ctranslate2 import load_transformer
from fastformer.models import Transformer
from fastformer.nn.attention import MultiheadAttention

_COMPUTE_TYPES = {"fp32": "float32", "bf16": "bfloat16", "int8": "int8"}
_LENGTH_PENALTY = 0.6  # the default of generate
_ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu_tanh": "GELUTanh"}


class CTranslate2(DecodingPeer):
    """CTranslate2's Translator. Its tokens are strings: the ids in decimal, made before the clock starts."""

    name = "ctranslate2"

    def __init__(self, model: Model, precision: str, threads: int, options: dict[str, str]) -> None:
        ctranslate2 = needed("ctranslate2")
        if _COMPUTE_TYPES[precision] not in ctranslate2.get_supported_compute_types("cpu"):
            raise Missing(f"has no {precision} on this CPU")
        with _converted(model, precision) as folder:
            self.translator = ctranslate2.Translator(
                str(folder), compute_type=_COMPUTE_TYPES[precision], inter_threads=1, intra_threads=threads
            )

    def inputs(self, batch: Tokens) -> list[list[str]]:
        return [[str(token) for token in row] for row in batch]

    def decode(self, batch: list[list[str]], job: PeerJob) -> list[list[str]]:
        """Decodes lists of tokens to lists of tokens."""
        results = self.translator.translate_batch(
            batch,
            beam_size=job.num_beams,
            length_penalty=_LENGTH_PENALTY,
            max_decoding_length=job.limit(batch),
            min_decoding_length=0,  # fastformer's outputs may end at once
            return_end_token=True,
        )
        return [result.hypotheses[0] for result in results]

    def tokens(self, output: list[list[str]], batch: Tokens) -> Tokens:
        return [[int(token) for token in row] for row in output]


class OursOfFolder(Ours):
    """fastformer on the folder that CTranslate2 reads."""

    name = "fastformer, CTranslate2's folder"
    precisions = ("int8", "fp32")

    def __init__(self, model: Model, precision: str, threads: int, options: dict[str, str]) -> None:
        needed("ctranslate2")
        with _converted(model, precision) as folder:
            super().__init__(load_transformer(folder)[0].eval(), precision, threads, options)


@contextlib.contextmanager
def _converted(model: Model, precision: str) -> Iterator[Path]:
    if not isinstance(model, Transformer):
        raise Missing("compared with models that read sources")
    with tempfile.TemporaryDirectory(prefix="fastformer-ctranslate2-") as parent:
        convert(model, folder := Path(parent) / "model", _COMPUTE_TYPES[precision])
        yield folder


def convert(model: Transformer, folder: Path, quantization: str) -> None:
    """Writes a model in CTranslate2's format.

    Raises:
        Missing: CTranslate2 lacks an option, or this function doesn't map it.
    """
    config = model.config
    unmapped = {
        "norm": config.norm != "layer",
        "window_size": config.window_size is not None,
        "num_kv_heads": config.num_kv_heads not in (None, config.num_heads),
        "activation": config.activation not in _ACTIVATIONS,
        "output_bias": config.output_bias,
        "embed_pad": config.embed_pad,
        "embedding_norm": config.embedding_norm,
        "positions": config.positions in ("learned", "relative"),
        "scale_embedding": not config.scale_embedding,
        "scale_output": config.scale_output,
        "bias": not config.bias,
        "special_ids": len(config.special_ids.eos) > 1,
    }
    if any(unmapped.values()):
        raise Missing(f"its conversion has no {', '.join(name for name, is_so in unmapped.items() if is_so)} like this")
    from ctranslate2.specs import TransformerSpec, common_spec  # refusals need no CTranslate2

    spec = TransformerSpec.from_config(
        (config.num_encoder_layers, config.num_decoder_layers),
        config.num_heads,
        pre_norm=config.norm_first,
        activation=getattr(common_spec.Activation, _ACTIVATIONS[config.activation]),
    )
    ids = config.special_ids
    source_vocab_size = config.source_vocab_size or config.vocab_size
    spec.register_source_vocabulary([str(token) for token in range(source_vocab_size)])
    spec.register_target_vocabulary([str(token) for token in range(config.vocab_size)])
    spec.config.unk_token = str(ids.pad if ids.unk is None else ids.unk)
    spec.config.bos_token = spec.config.decoder_start_token = str(ids.start)
    spec.config.eos_token = str(ids.first_eos)
    spec.config.layer_norm_epsilon = config.layer_norm_eps

    source = model.embedding if config.tie_embeddings else model.source_embedding
    target = model.embedding if config.tie_embeddings else model.target_embedding
    # The row of PAD is read as zeros, whatever its values: a tied matrix is also the projection's.
    spec.decoder.start_from_zero_embedding = ids.start == ids.pad
    for embeddings, table in ((spec.encoder.embeddings[0], source), (spec.decoder.embeddings, target)):
        embeddings.weight = _array(table.weight)
    spec.decoder.projection.weight = (
        spec.decoder.embeddings.weight if config.tie_embeddings else _array(model.output.weight)
    )
    for side, stack, embedding in ((spec.encoder, model.encoder, source), (spec.decoder, model.decoder, target)):
        assert embedding.position is not None
        side.position_encodings.encodings = _array(embedding.position.table)
        if config.norm_first:
            _norm(side.layer_norm, stack.norm)
        for layer_spec, layer in zip(side.layer, stack.layers, strict=True):
            _attention(layer_spec.self_attention, layer.self_attn, layer.norm1)
            last_norm = layer.norm2
            if side is spec.decoder:
                _attention(layer_spec.attention, layer.multihead_attn, layer.norm2, is_cross=True)
                last_norm = layer.norm3
            _norm(layer_spec.ffn.layer_norm, last_norm)
            _linear(layer_spec.ffn.linear_0, layer.linear1.weight, layer.linear1.bias)
            _linear(layer_spec.ffn.linear_1, layer.linear2.weight, layer.linear2.bias)
    spec.validate()
    spec.optimize(quantization=quantization)
    folder.mkdir()
    spec.save(str(folder))


def _array(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    copy = tensor.detach().to("cpu", torch.float32, copy=True)  # CTranslate2 quantises in place
    array: np.ndarray[Any, np.dtype[np.float32]] = copy.contiguous().numpy()
    return array


def _linear(spec: Any, weight: Tensor, bias: Tensor | None) -> None:
    spec.weight = _array(weight)
    if bias is not None:
        spec.bias = _array(bias)


def _norm(spec: Any, norm: nn.Module | None) -> None:
    assert isinstance(norm, nn.LayerNorm) and norm.bias is not None
    spec.gamma, spec.beta = _array(norm.weight), _array(norm.bias)


def _attention(spec: Any, attention: MultiheadAttention, norm: nn.Module, *, is_cross: bool = False) -> None:
    """Copies an attention's weights.

    Query, key and value are one matrix in self-attention; in cross-attention the query has its own.
    """
    _norm(spec.layer_norm, norm)
    weight, bias = attention.in_proj_weight, attention.in_proj_bias
    if is_cross:
        dim = attention.embed_dim
        _linear(spec.linear[0], weight[:dim], None if bias is None else bias[:dim])
        _linear(spec.linear[1], weight[dim:], None if bias is None else bias[dim:])
    else:
        _linear(spec.linear[0], weight, bias)
    _linear(spec.linear[-1], attention.out_proj.weight, attention.out_proj.bias)
