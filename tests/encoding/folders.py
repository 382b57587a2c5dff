"""Makes small folders of encoders, as sentence-transformers and transformers write them, and expected results."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

WORDS = ["the", "a", "bird", "birds", "sings", "sing", "over", "hill", "hills", "query", "answer", ":", ",", "."]
WORDS += ["two", "and", "river", "slow", "##s", "##ly", "b", "c", "d", "e"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXTS = [
    "a bird sings",
    "The hills",
    "",
    "two birds sing over the slow river and the hills .",
    "slowly",
    "a",
    "birds , birds",
]
D_MODEL, MAX_LEN = 32, 24
# Errors of a few numbers are luck.
MANY = [*TEXTS, *(" ".join(random.Random(number).choices(WORDS, k=1 + number % 9)) for number in range(80))]


TOKENIZER = {"tokenizer_class": "BertTokenizer", "model_max_length": MAX_LEN, "do_lower_case": False}


def bert(folder: Path, *, num_labels: int | None = None, seed: int = 0, **settings: Any) -> Any:
    """Writes a BERT of transformers with its tokenizer, and returns it. With labels, it is a classifier."""
    import tokenizers
    import transformers
    from tokenizers import models, normalizers, pre_tokenizers, processors

    torch.manual_seed(seed)
    sizes = {
        "vocab_size": len(SPECIAL + WORDS), "hidden_size": D_MODEL, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 48, "max_position_embeddings": MAX_LEN, "initializer_range": 0.3,
    }  # fmt: skip
    labels = {} if num_labels is None else {"num_labels": num_labels}
    config = transformers.BertConfig(**sizes | labels | settings)
    kind = transformers.BertModel if num_labels is None else transformers.BertForSequenceClassification
    model = kind(config).eval()
    model.save_pretrained(folder)
    vocab = {token: i for i, token in enumerate(SPECIAL + WORDS)}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=False)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [(token, vocab[token]) for token in ("[CLS]", "[SEP]")]
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    backend.save(str(folder / "tokenizer.json"))
    write(folder / "tokenizer_config.json", TOKENIZER)
    return model


def write(file: Path, values: object) -> None:
    """Writes JSON to a folder, which is created if necessary."""
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(values))


def modules(folder: Path, *behind: tuple[str, dict[str, Any]], transformer: str = "") -> list[Path]:
    """Writes modules.json and the settings of the modules after the model. Returns the folders of these modules."""
    listed = [{"idx": 0, "name": "0", "path": transformer, "type": "sentence_transformers.models.Transformer"}]
    places = []
    for number, (kind, settings) in enumerate(behind, 1):
        place = folder / f"{number}_{kind}"
        listed.append(
            {"idx": number, "name": str(number), "path": place.name, "type": f"sentence_transformers.models.{kind}"}
        )
        if settings:
            write(place / "config.json", settings)
        places.append(place)
    write(folder / "modules.json", listed)
    return places


def masked(folder: Path, name: str, pooling: dict[str, Any], seed: int = 0, **settings: Any) -> Any:
    """Writes the folder of a SPLADE, and returns transformers' model."""
    import transformers

    bert(folder)
    (folder / "model.safetensors").unlink()
    kind = getattr(transformers, f"{name}ForMaskedLM")
    sizes: dict[str, Any] = {
        "vocab_size": len(SPECIAL + WORDS), "hidden_size": D_MODEL, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 48, "max_position_embeddings": MAX_LEN + 8, "pad_token_id": 0, "bos_token_id": 2,
        "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3,
    }  # fmt: skip
    if name == "DistilBert":
        sizes |= {"dim": D_MODEL, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}
    torch.manual_seed(seed)
    model = kind(kind.config_class(**sizes | settings)).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 and key.endswith("weight") else 0.0, 0.3)
    model.save_pretrained(folder)
    modules(folder, ("SpladePooling", pooling))
    return model


def dense(place: Path, into: int, out: int, activation: str = "torch.nn.modules.activation.Tanh") -> dict[str, Tensor]:
    """Writes a Dense module, and returns its weights."""
    generator = torch.Generator().manual_seed(5)
    weights = {"linear.weight": torch.randn(out, into, generator=generator) * into**-0.5}
    weights["linear.bias"] = torch.randn(out, generator=generator)
    write(
        place / "config.json",
        {"in_features": into, "out_features": out, "bias": True, "activation_function": activation},
    )
    save_file(weights, place / "model.safetensors")
    return weights


def ids_of(folder: Path, texts: Sequence[str], most: int = MAX_LEN) -> list[Any]:
    """Returns the ids of transformers' tokenizer for texts, or pairs of texts, without padding."""
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]"
    )
    options = {"truncation": True, "max_length": most, "return_token_type_ids": True, "return_tensors": "pt"}
    batches = [[[text]] if isinstance(text, str) else [[batch] for batch in text] for text in texts]
    return [tokenizer(*batch, **options) for batch in batches]  # in lists: an empty text is the second one, too


def states(model: Any, folder: Path, texts: Sequence[str], dtype: torch.dtype, most: int = MAX_LEN) -> list[Tensor]:
    """Returns the states (seqlen, d_model) of each text alone, computed by transformers."""
    model = model.to(dtype)
    with torch.inference_mode():
        outputs = [model(**inputs).last_hidden_state[0] for inputs in ids_of(folder, texts, most)]
    model.float()
    return outputs


def mean(states: Sequence[Tensor], *, normalizes: bool = False) -> Tensor:
    """Returns the mean states, (texts, d_model)."""
    rows = torch.stack([rows_of_text.mean(0) for rows_of_text in states])
    return F.normalize(rows) if normalizes else rows
