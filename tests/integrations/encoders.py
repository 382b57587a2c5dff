"""Convertible encoder-only models of transformers in every variant, in which every weight matters."""

from __future__ import annotations

import contextlib
import random
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from fastformer.checkpoints.hf import ENCODER_FORMS, FAMILIES
from fastformer.models import BERT
from fastformer.nn import SequenceLayout
from tests.checkpoints.present import ENCODERS
from tests.integrations.decoders import Wide, made_wide
from tests.integrations.remembered import made_once

VOCAB, LABELS = 60, 3
_DISTIL = {
    "hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
}  # fmt: skip
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 40,
    "max_position_embeddings": 48, "num_labels": LABELS, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
    "attn_implementation": "eager",
}  # fmt: skip
HEAD, BASE, WORDS = "ForSequenceClassification", "Model", "ForMaskedLM"


class Case(NamedTuple):
    """A model of one family in one variant.

    Attributes:
        kind: the model_type of transformers.
        head: the ending of its class name.
        options: options of the config.
    """

    kind: str
    head: str
    options: dict[str, Any]

    @made_once
    def make(self, dtype: torch.dtype = torch.float64, seed: int = 3, **options: Any) -> Any:
        """Makes the model of transformers, with the same weights in each dtype."""
        settings = SIZES | self.options | options
        if self.kind == "distilbert":
            settings = {_DISTIL.get(name, name): value for name, value in settings.items()}
        with made_wide() if dtype == torch.float64 else contextlib.nullcontext():
            config = getattr(transformers, FAMILIES[self.kind].config_class)(**settings)
            model = getattr(transformers, ENCODER_FORMS[self.kind].classes + self.head)(config).to(dtype).eval()
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                is_norm = parameter.dim() == 1 and name.endswith("weight")
                parameter.copy_(torch.randn(parameter.shape) * 0.3 + (1.0 if is_norm else 0.0))
        return model


def texts_of(theirs: Any, lengths: tuple[int, ...] = (13, 7, 1)) -> list[list[int]]:
    """Returns texts without PAD."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def padded(theirs: Any, texts: list[list[int]], side: str = "right") -> dict[str, Tensor]:
    """Returns ids, mask and, if the model has them, token types of a batch, and positions that begin with each text."""
    pad, width = theirs.config.pad_token_id, max(map(len, texts))
    rows: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "token_type_ids": [], "position_ids": []}
    for text in texts:
        gap, own = width - len(text), [len(text) // 2, len(text) - len(text) // 2]
        parts = {"input_ids": (text, pad), "attention_mask": ([1] * len(text), 0)}
        parts["token_type_ids"] = ([0] * own[0] + [1] * own[1], 0)
        parts["position_ids"] = ([*range(len(text))], 0)
        for name, (values, fill) in parts.items():
            rows[name].append(values + [fill] * gap if side == "right" else [fill] * gap + values)
    found = {name: torch.tensor(values) for name, values in rows.items()}
    if getattr(theirs.config, "type_vocab_size", 0) < 2:
        del found["token_type_ids"]
    if theirs.config.model_type not in ("bert", "electra", "albert", "distilbert") or side == "right":
        del found["position_ids"]  # the others count from the first token by themselves
    return found


def hidden_of(theirs: Any, batch: dict[str, Tensor]) -> Tensor:
    """Returns the hidden states of the texts of a batch, one after another."""
    with Wide() if theirs.dtype == torch.float64 else contextlib.nullcontext():
        hidden: Tensor = theirs.base_model(**batch).last_hidden_state
    return hidden[batch["attention_mask"].bool()]


def packed(texts: list[list[int]], batch: dict[str, Tensor]) -> dict[str, Any]:
    """Returns the arguments of a `BERT` for the texts of a batch."""
    found: dict[str, Any] = {"tokens": torch.tensor(sum(texts, []))}
    found["layout"] = SequenceLayout.packed(torch.tensor([*map(len, texts)]), max(map(len, texts)))
    if "token_type_ids" in batch:
        found["token_types"] = batch["token_type_ids"][batch["attention_mask"].bool()]
    return found


def gradients_of(ours: BERT, kind: str) -> dict[str, Tensor]:
    """Returns the gradients of a fastformer model under transformers' names, because the conversion is linear."""
    twin = BERT(ours.config, dtype=ours.embedding.weight.dtype)
    with torch.no_grad():
        for parameter, own in zip(twin.parameters(), ours.parameters(), strict=True):
            parameter.copy_(torch.zeros_like(own) if own.grad is None else own.grad)
    return ENCODER_FORMS[kind].from_model(twin)[1]


_TURNED: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}
_SCALED: dict[str, Any] = {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.5}}
_GATED = ("modernbert", "nomic_bert", "gte", "eurobert")


def drawn(kind: str, seed: int) -> Case:
    """Draws a config of a family with unusual sizes and options."""
    draw = random.Random(f"{kind} {seed}")
    heads = draw.choice([1, 2, 3, 5])
    options: dict[str, Any] = {
        "hidden_size": heads * draw.choice([2, 6, 8, 14]),
        "num_attention_heads": heads,
        "num_hidden_layers": draw.randint(1, 4),
        "intermediate_size": draw.choice([1, 7, 33, 64]),
        "max_position_embeddings": draw.randint(36, 60),
        "num_labels": draw.choice([1, 2, 7]),
        "pad_token_id": 1 if kind == "mpnet" else draw.choice([0, 1, 4]),
        "eos_token_id": draw.choice([2, 3]),
        "bos_token_id": None,
    }
    activation = draw.choice(["gelu", "gelu_new", "silu"] if kind in _GATED else ["relu", "gelu", "gelu_new"])
    name = {"modernbert": "hidden_activation", "distilbert": "activation"}.get(kind, "hidden_act")
    options[name] = activation
    if kind == "modernbert":
        options |= {name: draw.choice([True, False]) for name in ("norm_bias", "attention_bias")}
        options |= dict.fromkeys(("mlp_bias", "classifier_bias"), options["norm_bias"])
        options |= {"local_attention": draw.choice([2, 8, 30]), "global_attn_every_n_layers": draw.choice([1, 2, 3])}
        options["classifier_pooling"] = draw.choice(["cls", "mean"])
    elif kind == "eurobert":
        options |= {name: draw.choice([True, False]) for name in ("mlp_bias", "attention_bias", "tie_word_embeddings")}
        options |= {"num_key_value_heads": draw.choice([1, heads]), "head_dim": draw.choice([2, 6, 10, None])}
        options |= {"classifier_pooling": draw.choice(["bos", "mean", "late"]), **draw.choice([_TURNED, _SCALED, {}])}
    elif kind not in ("distilbert", "mpnet"):
        options["type_vocab_size"] = draw.choice([1, 2, 5])
    if kind == "electra":
        options["embedding_size"] = draw.choice([3, 16, options["hidden_size"]])
    if kind == "albert":
        options |= {
            "embedding_size": draw.choice([3, 17]),
            "num_hidden_groups": draw.randint(1, options["num_hidden_layers"]),
        }
    return Case(kind, draw.choice([BASE, HEAD, WORDS]), options)


# The families whose models have no other attention.
ONLY_EAGER = ("mpnet",)
_BIASES = dict.fromkeys(("norm_bias", "mlp_bias", "classifier_bias", "attention_bias"), True)
_TYPED: dict[str, Any] = {"type_vocab_size": 3}
CASES = {
    "bert": Case("bert", BASE, {"hidden_act": "gelu_new", "pad_token_id": 0}),
    "bert labels": Case("bert", HEAD, {"hidden_act": "relu", **_TYPED}),
    "bert words": Case("bert", WORDS, {}),
    "roberta": Case("roberta", BASE, {"pad_token_id": 4}),
    "roberta labels": Case("roberta", HEAD, _TYPED),
    "xlm-roberta labels": Case("xlm-roberta", HEAD, {"num_labels": 1}),
    "camembert words": Case("camembert", WORDS, {"hidden_act": "silu"}),
    "distilbert": Case("distilbert", BASE, {"activation": "relu"}),
    "distilbert labels": Case("distilbert", HEAD, {"pad_token_id": 0}),
    "mpnet": Case("mpnet", BASE, {}),
    "mpnet labels": Case("mpnet", HEAD, {"max_position_embeddings": 21}),
    "electra": Case("electra", BASE, {"embedding_size": 16}),
    "modernbert": Case("modernbert", BASE, {"local_attention": 6, "hidden_activation": "silu"}),
    "modernbert labels": Case("modernbert", HEAD, {"local_attention": 4, "classifier_pooling": "mean"}),
    "modernbert biases": Case("modernbert", HEAD, {"local_attention": 8, "hidden_activation": "gelu_new", **_BIASES}),
    "albert": Case("albert", BASE, {"embedding_size": 16, "num_hidden_groups": 2}),
    "albert labels": Case("albert", HEAD, {"embedding_size": 30, "hidden_act": "relu"}),
    "electra labels": Case("electra", HEAD, {"embedding_size": 24, "hidden_act": "gelu_new"}),
}
_LATER = {
    "nomic_bert": Case("nomic_bert", BASE, {"pad_token_id": 0, **_TURNED}),
    "nomic_bert labels": Case("nomic_bert", HEAD, {"hidden_act": "gelu", "head_dim": 6, **_TYPED}),
    "gte": Case("gte", BASE, {"hidden_act": "silu", "type_vocab_size": 0}),
    "gte labels": Case("gte", HEAD, {"hidden_act": "gelu_new", "type_vocab_size": 2, **_TURNED}),
    "gte scaled": Case("gte", BASE, _SCALED),
    "eurobert": Case("eurobert", BASE, {"num_key_value_heads": 3, "hidden_act": "gelu_new", **_SCALED}),
    "eurobert labels": Case("eurobert", HEAD, {"num_key_value_heads": 2, "attention_bias": True, **_TURNED}),
    "eurobert bos": Case("eurobert", HEAD, {"classifier_pooling": "bos", "mlp_bias": True, "head_dim": 10}),
    "eurobert mean": Case(
        "eurobert",
        HEAD,
        {"classifier_pooling": "mean", "num_key_value_heads": 1, "mlp_bias": True, "attention_bias": True},
    ),
    "eurobert words": Case("eurobert", WORDS, {"tie_word_embeddings": True, "num_key_value_heads": 2}),
}
CASES |= {name: case for name, case in _LATER.items() if case.kind in ENCODERS}
