"""Makes tiny models of each class, whose weights depend on their names and not on an initialisation."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import transformers
from torch import nn

import fastformer
import fastformer.nn as ours
from fastformer import baseline, models

VOCAB = 40
M = TypeVar("M", bound=nn.Module)

_ALIKE: dict[str, Any] = {"vocab_size": VOCAB, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
_NO_DROPOUT: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
_ENDS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}


def fill(model: M, scale: float = 1.0) -> M:
    """Gives every parameter uniform numbers that depend on its name, of a size that keeps activations near 1.

    Args:
        model: the model to fill, in place.
        scale: the scale of the matrices. Larger ones make a model that attends to something and generates different
        tokens.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if isinstance(model, transformers.MarianMTModel) and "embed_positions" in name:
                continue  # sines and cosines
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            numbers = 2 * torch.rand(parameter.shape, generator=generator) - 1
            if parameter.dim() > 1:
                parameter.copy_(numbers * scale * (3 / parameter.shape[-1]) ** 0.5)
            else:
                parameter.copy_(0.2 * numbers + (1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0))
    return model


def encoder(**options: Any) -> nn.Module:
    layer = ours.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True, **options)
    return ours.TransformerEncoder(layer, 2, norm=nn.LayerNorm(16))


def decoder(**options: Any) -> nn.Module:
    layer = ours.TransformerDecoderLayer(16, 2, 24, dropout=0.0, batch_first=True, **options)
    return ours.TransformerDecoder(layer, 2)


def transformer(**options: Any) -> models.Transformer:
    sizes: dict[str, Any] = {"d_model": 32, "d_ff": 48, "num_heads": 4, "max_len": 64, "tie_embeddings": False}
    return models.Transformer.from_preset("tiny", vocab_size=VOCAB, **sizes | options)


def gpt(**options: Any) -> models.GPT:
    sizes: dict[str, Any] = {"d_model": 32, "num_layers": 2, "num_heads": 4, "max_len": 64, "tie_embeddings": False}
    return models.GPT.from_preset("tiny", vocab_size=VOCAB, **sizes | options)


def lstm() -> baseline.LSTMSeq2Seq:
    return baseline.LSTMSeq2Seq(vocab_size=VOCAB, d_model=16, num_layers=2)


def bert() -> transformers.BertForSequenceClassification:
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.BertConfig(**_ALIKE, **sizes, intermediate_size=48, max_position_embeddings=32)
    return transformers.BertForSequenceClassification(config)


def gpt2() -> transformers.GPT2LMHeadModel:
    sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    dropouts = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCAB, **sizes, **dropouts, **_ENDS))


def llama() -> transformers.LlamaForCausalLM:
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 32}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCAB, **sizes, **more, **_ENDS))


def t5() -> transformers.T5ForConditionalGeneration:
    sizes: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    more = {"decoder_start_token_id": 0, "dropout_rate": 0.0, "pad_token_id": 0, "eos_token_id": 1}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=VOCAB, **sizes, **more))


def _bart_sizes() -> dict[str, Any]:
    sides = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 2), ("ffn_dim", 48))}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    return {"vocab_size": VOCAB, "d_model": 32, "max_position_embeddings": 32, **sides, **heads, **_NO_DROPOUT}


def bart() -> transformers.BartForConditionalGeneration:
    config = transformers.BartConfig(**_bart_sizes(), **_ENDS, decoder_start_token_id=1, forced_eos_token_id=None)
    return transformers.BartForConditionalGeneration(config)


def marian() -> transformers.MarianMTModel:
    config = transformers.MarianConfig(
        **_bart_sizes(), pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, forced_eos_token_id=None
    )
    return transformers.MarianMTModel(config)


def accelerated(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: fastformer.accelerate(make())


# Made on "meta": their keys and shapes are what counts.
STATE_DICTS: dict[str, Callable[[], nn.Module]] = {
    "nn.MultiheadAttention": lambda: ours.MultiheadAttention(16, 2),
    "nn.MultiheadAttention, all options": lambda: ours.MultiheadAttention(
        16, 2, kdim=8, vdim=12, add_bias_kv=True, add_zero_attn=True
    ),
    "nn.TransformerEncoderLayer": lambda: ours.TransformerEncoderLayer(16, 2, 24),
    "nn.TransformerEncoderLayer, no bias": lambda: ours.TransformerEncoderLayer(16, 2, 24, bias=False),
    "nn.TransformerDecoderLayer": lambda: ours.TransformerDecoderLayer(16, 2, 24),
    "nn.TransformerEncoder": encoder,
    "nn.TransformerDecoder": decoder,
    "nn.Transformer": lambda: ours.Transformer(16, 2, 1, 1, 24),
    "nn.FeedForward": lambda: ours.FeedForward(16, 24),
    "nn.AddLayerNorm": lambda: ours.AddLayerNorm(16),
    "nn.Embedding": lambda: ours.Embedding(VOCAB, 16),
    "nn.PositionalEncoding": lambda: ours.PositionalEncoding(16),
    "nn.RelativePositionBias": lambda: ours.RelativePositionBias(2),
    "nn.RotaryEmbedding": lambda: ours.RotaryEmbedding(8),
    "models.Transformer": transformer,
    "models.Transformer, tied": lambda: transformer(tie_embeddings=True),
    "models.Transformer, two vocabularies": lambda: transformer(source_vocab_size=VOCAB + 8),
    "models.GPT": gpt,
    "models.GPT, tied": lambda: gpt(tie_embeddings=True),
    "models.BERT": lambda: models.BERT.from_preset(
        "tiny", vocab_size=VOCAB, d_model=16, max_len=32, num_labels=2, embedding_size=8
    ),
    "models.BERT, relative": lambda: models.BERT.from_preset(
        "tiny", vocab_size=VOCAB, d_model=16, positions="learned-relative", num_labels=2, head="modernbert"
    ),
    "baseline.LSTMSeq2Seq": lstm,
    "baseline.Transformer": lambda: baseline.Transformer(vocab_size=VOCAB, d_model=16, num_heads=2, d_ff=24),
    "accelerated torch.nn.TransformerEncoder": accelerated(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 2)
    ),
    "accelerated torch.nn.Transformer": accelerated(lambda: nn.Transformer(16, 2, 1, 1, 24, batch_first=True)),
    "accelerated BART": accelerated(bart),
    "accelerated BERT": accelerated(bert),
    "accelerated GPT-2": accelerated(gpt2),
    "accelerated Llama": accelerated(llama),
    "accelerated Marian": accelerated(marian),
    "accelerated T5": accelerated(t5),
}
