"""Convertible encoder-decoders of transformers in every variant, in which every weight matters."""

from __future__ import annotations

import contextlib
import random
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from fastformer.nn import SequenceLayout
from tests.integrations.families import exactly
from tests.integrations.remembered import made_once

LEARNED = ("Bart", "MBart")  # families that learn their positions
SIZES: dict[str, Any] = {
    "vocab_size": 60, "d_model": 24, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 3,
    "decoder_attention_heads": 3, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "max_position_embeddings": 32,
    "forced_eos_token_id": None,
}  # fmt: skip
MARIAN: dict[str, Any] = {
    "pad_token_id": 59, "eos_token_id": 0, "decoder_start_token_id": 59, "activation_function": "swish",
    "scale_embedding": True,
}  # fmt: skip
BART: dict[str, Any] = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
T5: dict[str, Any] = {
    "vocab_size": 60, "d_model": 24, "d_kv": 4, "num_heads": 6, "d_ff": 40, "num_layers": 3, "num_decoder_layers": 2,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 14, "pad_token_id": 0,
    "eos_token_id": 1, "decoder_start_token_id": 0,
}  # fmt: skip
FLAN = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "is_untied": True}


def until_end(row: list[int], *ends: int) -> list[int]:
    """Returns the ids up to and including the first end."""
    return row[: next((i + 1 for i, token in enumerate(row) if token in ends), None)]


def bart(family: str = "Bart", dtype: torch.dtype = torch.float64, *, seed: int = 3, **options: Any) -> Any:
    """Makes a BART, or a relative.

    Args:
        family: the prefix of transformers' class names.
        options: options of the config; or bias (on the logits), pad (whether its row is zero), scale (of the matrices).
    """
    scale, has_bias = options.pop("scale", 0.4), options.pop("bias", False)
    zero_pad = options.pop("zero_pad", family == "Marian")
    config = getattr(transformers, f"{family}Config")(**SIZES | (MARIAN if family == "Marian" else BART) | options)
    name = "MarianMTModel" if family == "Marian" else f"{family}ForConditionalGeneration"
    model = getattr(transformers, name)(config).to(dtype).eval()
    torch.manual_seed(seed)  # however much the version at hand has drawn
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if family in LEARNED or "embed_positions" not in name:  # sines
                is_small = parameter.dim() == 1 or "shared" in name or "embed_tokens" in name
                size = (0.2 if family == "Marian" else 0.3) if is_small else scale
                parameter.copy_(torch.randn_like(parameter) * size + (1 if "norm" in name and "weight" in name else 0))
        if zero_pad:
            for embedding in (model.model.encoder.embed_tokens, model.model.decoder.embed_tokens):
                embedding.weight[model.config.pad_token_id] = 0
        if has_bias:
            model.final_logits_bias.copy_(torch.randn_like(model.final_logits_bias))
    return model


def t5(family: str = "T5", dtype: torch.dtype = torch.float64, *, seed: int = 3, **options: Any) -> Any:
    """Makes a T5 or an mT5. options: as in `bart`, or is_untied."""
    scale, is_untied, zero_pad = (options.pop(name, value) for name, value in (
        ("scale", 0.2), ("is_untied", False), ("zero_pad", False)))  # fmt: skip
    config = getattr(transformers, f"{family}Config")(**T5 | options)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).to(dtype).eval()
    torch.manual_seed(seed)
    if is_untied:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            size = 1.0 if "relative" in name or "shared" in name else scale
            parameter.copy_(torch.randn_like(parameter) * size + (1 if "norm" in name else 0))
        if zero_pad:
            model.shared.weight[model.config.pad_token_id] = 0
    return model


def opinionated(theirs: Any, *, embedding: float = 0.2, seed: int = 5) -> Any:
    """Makes a Marian whose weights make it generate different tokens, and end sometimes."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if parameter.dim() == 2 and "positions" not in name:
                scale = embedding if "embed" in name or "shared" in name else 0.8
                parameter.copy_(torch.randn_like(parameter) * scale * (parameter != 0))
        theirs.model.decoder.layers[-1].final_layer_norm.weight.mul_(3)
        theirs.final_logits_bias.mul_(0.5)
        theirs.final_logits_bias[0, 0] += 1
        theirs.final_logits_bias[0, 59] -= 50  # penalties of transformers count the start token
    return theirs


def _t5_batch() -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([27, 9, 1])  # the first reaches beyond max_distance
    source = torch.randint(3, 60, (3, 27), generator=torch.Generator().manual_seed(1))
    source = source.masked_fill(torch.arange(27) >= lengths[:, None], 0)
    source[torch.arange(3), lengths - 1] = 1
    return source, F.pad(torch.randint(2, 60, (3, 21), generator=torch.Generator().manual_seed(2)), (1, 0))


_BART_BATCH = (
    torch.tensor([[0, 9, 33, 8, 5, 2], [0, 12, 6, 2, 1, 1], [0, 2, 1, 1, 1, 1]]),
    torch.tensor([[2, 0, 4, 7, 7], [2, 0, 31, 2, 9], [2, 0, 3, 3, 58]]),
)
_MARIAN_BATCH = (
    torch.tensor([[5, 9, 33, 8, 0], [12, 6, 0, 59, 59], [7, 0, 59, 59, 59]]),
    torch.tensor([[59, 4, 7, 7], [59, 31, 2, 9], [59, 3, 3, 58]]),
)
BATCHES = {"Marian": _MARIAN_BATCH, "T5": _t5_batch(), "MT5": _t5_batch()}


class Case(NamedTuple):
    """A model of one family in one variant."""

    family: str
    options: dict[str, Any]

    @made_once
    def make(self, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
        """Makes the model of transformers."""
        maker = t5 if self.is_t5 else bart
        return maker(self.family, dtype, **self.options | options)

    @property
    def is_t5(self) -> bool:
        return self.family in ("T5", "MT5")

    @property
    def batch(self) -> tuple[Tensor, Tensor]:
        """Makes sources and targets, padded on the right."""
        return BATCHES.get(self.family, _BART_BATCH)

    @property
    def ids(self) -> tuple[int, int]:
        """Returns the ids of PAD and EOS."""
        sizes = T5 if self.is_t5 else MARIAN if self.family == "Marian" else BART
        return sizes["pad_token_id"], sizes["eos_token_id"]

    def logits(self, model: Any) -> Tensor:
        """Returns the logits of a model of transformers."""
        source, target = self.batch
        return model(source, attention_mask=(source != self.ids[0]).long(), decoder_input_ids=target).logits

    def layouts(self) -> tuple[SequenceLayout, SequenceLayout]:
        """Returns packed layouts: of the sources in their padded form, and of targets of other lengths."""
        source, target = self.batch
        lengths = torch.tensor([target.shape[1], target.shape[1] - 1, 2])
        sources = SequenceLayout.packed((source != self.ids[0]).sum(1), source.shape[1])
        return sources, SequenceLayout.packed(lengths, target.shape[1])

    def exactly(self) -> contextlib.AbstractContextManager[Any]:
        """Keeps transformers from rounding a T5's norms to fp32."""
        return exactly("t5") if self.is_t5 else contextlib.nullcontext()


_RELATIVES: dict[str, dict[str, Any]] = {
    "real": {"activation_function": "gelu"},
    "scaled, bias": {"scale_embedding": True, "bias": True},
    "zero pad": {"zero_pad": True, "activation_function": "relu"},
    "untied": {"tie_word_embeddings": False, "activation_function": "gelu_new", "bias": True},
    "shallow": {"encoder_layers": 3, "decoder_layers": 1, "d_model": 36, "activation_function": "swish"},
}
_SEPARATE = {"tie_word_embeddings": False, "share_encoder_decoder_embeddings": False}
_MARIANS: dict[str, dict[str, Any]] = {
    "real": {"bias": True},
    "no bias": {},
    "embedded pad": {"zero_pad": False},
    "gelu, unscaled": {"activation_function": "gelu", "scale_embedding": False},
    "relu, starts by itself": {"activation_function": "relu", "decoder_start_token_id": 2},
    "separate": {
        "share_encoder_decoder_embeddings": False,
        "vocab_size": 63,
        "decoder_vocab_size": 60,
        "bias": True,
    },
    "untied": {**_SEPARATE, "zero_pad": False},
    "tanh": {"activation_function": "gelu_new", "tie_word_embeddings": False},
}
_M2M100S: dict[str, dict[str, Any]] = {
    "real": {"activation_function": "relu", "scale_embedding": True},
    "unscaled, zero pad": {"zero_pad": True, "scale_embedding": False, "activation_function": "gelu"},
}
_T5S: dict[str, dict[str, Any]] = {
    "1.0": {},
    "1.1": FLAN,
    "few heads": {**FLAN, "num_heads": 4},
    "tied, unscaled": {"feed_forward_proj": "gated-silu", "tie_word_embeddings": False},
    "odd buckets": {"relative_attention_num_buckets": 11, "relative_attention_max_distance": 9},
    "zero pad, shallow": {"zero_pad": True, "num_layers": 3, "num_decoder_layers": 1, "feed_forward_proj": "gelu"},
    "d_kv of 8": {"d_kv": 8, "num_heads": 3},
    "wide heads": {**FLAN, "d_kv": 16, "num_heads": 3},
    "odd heads": {"d_kv": 16, "num_heads": 1},
}
CASES = {
    f"{family} {variant}": Case(family, options)
    for families, variants in (
        (("Marian",), _MARIANS),
        (("Bart", "MBart", "Pegasus"), _RELATIVES),
        (("M2M100",), _M2M100S),
        (("T5",), _T5S),
        (("MT5",), {"few heads": {**FLAN, "num_heads": 3}}),
    )
    for family in families
    for variant, options in variants.items()
}


def drawn(family: str, seed: int) -> Case:
    """Draws a config of a family with random options and 96 positions."""
    rng = random.Random(f"{family} {seed}")
    flip = lambda: rng.random() < 0.5  # noqa: E731
    heads, depths = rng.choice((1, 2, 3, 4)), [rng.choice((1, 2, 3)) for _ in range(2)]
    if family in ("T5", "MT5"):  # transformers fails to generate with more decoder layers than encoder layers
        wide = flip()  # whether all heads together are wider than the model
        d_kv = rng.choice((4, 6, 8, 16))
        d_model = d_kv * heads - 2 if wide else d_kv * (heads + rng.randint(0, 2))
        return Case(family, {
            "num_heads": heads, "d_kv": d_kv, "d_model": d_model,
            "d_ff": rng.randint(5, 50), "num_layers": max(depths), "num_decoder_layers": min(depths),
            "relative_attention_num_buckets": rng.choice((6, 8, 11)),
            "relative_attention_max_distance": rng.choice((9, 14, 40)),
            "feed_forward_proj": rng.choice(("relu", "gelu", "silu", "gated-gelu", "gated-silu")),
            "layer_norm_epsilon": rng.choice((1e-6, 1e-5)), "zero_pad": flip(),
            **({"is_untied": True, "tie_word_embeddings": False} if flip() else {}),
        })  # fmt: skip
    options: dict[str, Any] = {
        "d_model": heads * rng.choice((4, 6, 8, 12)), "encoder_layers": depths[0], "decoder_layers": depths[1],
        "activation_function": rng.choice(("relu", "gelu", "gelu_new", "swish")), "scale_embedding": flip(),
        "zero_pad": flip(), "max_position_embeddings": 96,
    }  # fmt: skip
    options |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), heads)
    options |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), rng.randint(5, 50))
    if family != "M2M100":
        options |= {"bias": flip(), "tie_word_embeddings": flip()}
    if family == "Marian":
        options |= _SEPARATE if flip() and not options["tie_word_embeddings"] else {}
        options["decoder_start_token_id"] = rng.choice((59, 2))
    return Case(family, options)
