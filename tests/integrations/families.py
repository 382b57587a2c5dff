"""Small fp64 models of the families that `accelerate` knows, with a call of each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mt5.modeling_mt5 import MT5LayerNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

import fastformer
from fastformer.ops import record_backends
from tests.integrations.remembered import made_once
from tests.nn.comparing import assert_same

IDS = torch.randint(5, 60, (4, 9), generator=torch.Generator().manual_seed(0))
RIGHT = torch.arange(9) < torch.tensor([[9], [4], [1], [7]])
LEFT = RIGHT.flip(1)
HOLES = RIGHT & (torch.arange(9) != 2)
TARGETS = torch.randint(5, 60, (4, 6), generator=torch.Generator().manual_seed(1))
PACKED, FUSED = "varlen_attention_fwd", "feed_forward_fwd"

CAUSAL, SEQ2SEQ = ("gpt2", "llama"), ("bart", "marian", "t5")
FAMILIES = ("bert", *CAUSAL, *SEQ2SEQ)
HEADS = {
    "bert": "BertForMaskedLM", "gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM",
    "bart": "BartForConditionalGeneration", "marian": "MarianMTModel", "t5": "T5ForConditionalGeneration",
}  # fmt: skip
_SIZES: dict[str, Any] = {"vocab_size": 60, "hidden_size": 24, "num_hidden_layers": 2}
_IDS = {"pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0}
_BART = _IDS | {
    "vocab_size": 60, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 3,
    "decoder_attention_heads": 3, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "max_position_embeddings": 64,
    "dropout": 0.0, "decoder_start_token_id": 1, "forced_eos_token_id": 2, "activation_function": "gelu",
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "bert": _SIZES | {"num_attention_heads": 3, "intermediate_size": 40, "attention_probs_dropout_prob": 0.0,
                      "hidden_dropout_prob": 0.0},
    "gpt2": _SIZES | _IDS | {"num_attention_heads": 6, "max_position_embeddings": 64, "resid_pdrop": 0.0,
                             "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "llama": _SIZES | _IDS | {"num_attention_heads": 6, "max_position_embeddings": 64, "intermediate_size": 40,
                              "num_key_value_heads": 2},
    "bart": _BART | {"scale_embedding": False},
    "marian": _BART | {"scale_embedding": True},
    "t5": {"vocab_size": 60, "d_model": 24, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 3,
           "dropout_rate": 0.0, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 10,
           "decoder_start_token_id": 0},
}  # fmt: skip
# What the config of each family calls the probabilities of dropout.
DROPOUTS = {
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "llama": ("attention_dropout",),
    "bart": ("dropout", "attention_dropout", "activation_dropout"),
    "marian": ("dropout", "attention_dropout", "activation_dropout"),
    "t5": ("dropout_rate",),
}


@made_once
def make(family: str, kind: Any = None, *, seed: int = 4, **options: Any) -> Any:
    """Makes a model in which every parameter matters.

    Args:
        kind: a class of transformers; by default the family's head that predicts tokens.
        options: options of the config.
    """
    torch.manual_seed(seed)
    kind = kind or getattr(transformers, HEADS[family])
    model = kind(kind.config_class(**OPTIONS[family] | options)).double()
    scale = 0.2 if family == "bert" else 0.3
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" not in name:
                parameter.copy_(torch.randn_like(parameter) * scale + (0.5 if parameter.dim() == 1 else 0))
    return model


def exact_norm(self: Any, x: Tensor) -> Tensor:
    return self.weight * (x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt())


@contextlib.contextmanager
def exactly(family: str, *, accelerated: bool = False) -> Iterator[None]:
    """Keeps the code of transformers from rounding statistics to fp32.

    Args:
        accelerated: whether the model is accelerated. Then none of that code runs.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not accelerated and family in ("llama", "t5"):
            for norm in (LlamaRMSNorm,) if family == "llama" else (T5LayerNorm, MT5LayerNorm):
                patch.setattr(norm, "forward", exact_norm)
        yield


def labels_of(mask: Tensor | None) -> Tensor:
    """Returns the ids as labels, except at padding and at positions that padding would predict."""
    if mask is None:
        return IDS
    behind = torch.cat((mask[:, :1], mask[:, :-1]), 1)
    return IDS.masked_fill(~(mask & behind), -100)


def run(model: Any, mask: Tensor | None, **options: Any) -> Any:
    """Returns the output with labels: TARGETS for encoder-decoders, and the ids themselves for other models."""
    labels = TARGETS if model.config.is_encoder_decoder else labels_of(mask)
    return model(IDS, attention_mask=None if mask is None else mask.long(), **{"labels": labels} | options)


def ran(call: Callable[[], Any]) -> set[str]:
    """Returns fastformer's ops that a call runs."""
    with record_backends() as backends:
        call()
    return {name for name, _ in backends}


def gradients(model: Any, loss: Tensor) -> list[Tensor]:
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [g for g in torch.autograd.grad(loss, learning, allow_unused=True) if g is not None]


def assert_all_same(ours: list[Tensor], theirs: list[Tensor], name: str, tolerance: float = 1e-9) -> None:
    for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if other.abs().max() < tolerance / 10:  # a bias of keys has no gradient, but for rounding
            assert mine.abs().max() < tolerance / 10
        else:
            assert_same(mine, other, f"{name} {i}", tolerance)


def before_and_after(model: Any, call: Callable[[], Any], **options: Any) -> tuple[Any, Any]:
    """Returns the results of a call of a model before `accelerate` with these options, and after it."""
    with exactly(model.config.model_type):
        before = call()
    fastformer.accelerate(model, **options)
    return before, call()


def layers_of(model: Any) -> list[nn.ModuleList]:
    """Returns the layers of each stack."""
    base = model.base_model
    if model.config.is_encoder_decoder:
        return [getattr(stack, "layers", None) or stack.block for stack in (base.encoder, base.decoder)]
    return [base.encoder.layer if hasattr(base, "encoder") else base.h if hasattr(base, "h") else base.layers]


class Wrapped(nn.Module):
    """A module that wraps another one, as users write them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)
