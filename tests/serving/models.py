"""Makes folders of small random models: a translator, a language model with a chat template, encoders, a classifier."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fastformer.data import ByteTokenizer, Tokenizer
from fastformer.data.huggingface import LibraryBackend
from fastformer.data.pieces import PieceBackend
from fastformer.models import GPT, Transformer
from fastformer.special_ids import SpecialIds
from tests.encoding import folders

LINES = ["two men walk the dog in the park", "a woman reads a book", "the dog sees two birds", "men read in the park"]
TEMPLATE = """{% if note %}{{ note }}{% endif %}{% for m in messages %}
{% if m.role == 'assistant' and m.content == 'loop' %}
{% for i in range(99999) %}{% for j in range(99999) %}{{ m.content }}{% endfor %}{% endfor %}{% endif %}
{{ '<|im_start|>' + m.role + (':' + m.name if m.name else '') + '\n' + m.content }}
{% for c in m.tool_calls or [] %}{{ '<tool_call>' }}{{ c | tojson }}{% endfor %}
{% if m.tool_call_id %}{{ m.tool_call_id }}{% endif %}{% if m.reasoning_content %}{{ m.reasoning_content }}{% endif %}
{{ '<|im_end|>' + '\n' }}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
MAX_LEN = 512


def tokenizer(template: str | None = TEMPLATE, marks: Sequence[str] = (), added: Sequence[str] = ()) -> Tokenizer:
    """Makes a tokenizer of bytes and a few merges, with a chat template that loops if an assistant has said "loop".

    Args:
        template: the chat template.
        marks: further special tokens.
        added: further tokens that aren't special.
    """
    import tokenizers

    trained = tokenizers.ByteLevelBPETokenizer()
    special = ["<|im_start|>", "<|im_end|>", "<|pad|>", *marks]
    trained.train_from_iterator(LINES, vocab_size=300, special_tokens=special, show_progress=False)
    trained.add_tokens([*added])
    chat = {} if template is None else {"chat_template": template, "eos_token": "<|im_end|>"}
    ids = SpecialIds(pad=2, eos=1, unk=None)
    return Tokenizer(LibraryBackend(trained._tokenizer), ids, "prompts", chat=chat)


def piece_tokenizer() -> Tokenizer:
    """Makes a SentencePiece tokenizer, whose tokens have other texts alone than behind others."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=model, vocab_size=300, hard_vocab_limit=False, byte_fallback=True,
        pad_id=3, minloglevel=2,
    )  # fmt: skip
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return Tokenizer(PieceBackend(processor, added={}), SpecialIds(pad=3, eos=2, unk=0), "prompts", bos=1)


@torch.inference_mode(False)  # whichever test comes first
def generator(
    folder: Path, *, template: str | None = TEMPLATE, own: Any = None, ends: bool = True, **settings: Any
) -> Path:
    """Makes a language model that generates different tokens; with `ends` False its answers never end."""
    own = tokenizer(template) if own is None else own
    torch.manual_seed(3)
    settings = {"d_model": 32, "num_heads": 4, "num_layers": 2, "max_len": MAX_LEN, "tie_embeddings": False, **settings}
    model = GPT.from_preset("tiny", vocab_size=own.vocab_size, special_ids=own.special_ids, **settings).eval()
    for parameter in model.parameters():
        parameter.data *= 8 if parameter.dim() == 2 else 1
    model.output_weight.data[: 0 if ends else 3] = 0.0
    model.save_pretrained(folder)
    own.save(folder)
    return folder


@torch.inference_mode(False)  # whichever test comes first
def translator(folder: Path, *, ends: bool = True, **settings: Any) -> Path:
    """Makes a translator of bytes; with `ends` False its output never ends."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_ff": 32, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1, "max_len": 64}
    model = Transformer.from_preset("tiny", vocab_size=259, **(sizes | settings))
    model.embedding.weight.data *= 3  # a fresh model is nearly uniform
    model.output_weight.data[: 0 if ends else 3] = 0.0
    model.save_pretrained(folder)
    ByteTokenizer().save(folder)
    return folder


def encoder(folder: Path, **settings: Any) -> Path:
    """Makes a BERT with mean pooling, a norm after it, and a prompt."""
    folders.bert(folder)
    folders.modules(
        folder, ("Pooling", {"pooling_mode": "mean", "embedding_dimension": folders.D_MODEL}), ("Normalize", {})
    )
    folders.write(folder / "config_sentence_transformers.json", {"prompts": {"query": "query : "}, **settings})
    return folder


def multi_vector(folder: Path) -> Path:
    """Makes a ColBERT of a BERT, with prompts, and queries that are expanded by tokens to which no token attends."""
    folders.bert(folder)
    place, _ = folders.modules(folder, ("Dense", {}), ("MultiVectorMask", {"skiplist_words": ["."]}))
    folders.dense(place, folders.D_MODEL, 16)
    tokens = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
    settings = json.loads((place / "config.json").read_text())
    folders.write(place / "config.json", settings | tokens)
    expansion = {"strategy": "fixed", "length": 12, "token": "[MASK]"}
    folders.write(folder / "sentence_bert_config.json", {"query_expansion": expansion})
    prompts = {"query": "query : ", "document": "answer "}
    folders.write(folder / "config_sentence_transformers.json", {"prompts": prompts})
    return folder


def sparse(folder: Path) -> Path:
    """Makes a SPLADE of a BERT, with a prompt."""
    folders.masked(folder, "Bert", {"pooling_strategy": "max"})
    folders.write(folder / "config_sentence_transformers.json", {"prompts": {"query": "query : "}})
    return folder


def classifier(folder: Path, num_labels: int = 3) -> Path:
    """Makes a BERT with a head."""
    names = ["good", "bad", "odd"][:num_labels]
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: place for place, name in enumerate(names)}}
    folders.bert(folder, num_labels=num_labels, **(labels if num_labels > 1 else {}))
    return folder


def services(folder: Path) -> dict[str, Path]:
    """Makes a folder of each kind of service."""
    return {
        "translator": translator(folder / "tiny-translator"),
        "generator": generator(folder / "tiny"),
        "encoder": encoder(folder / "mini"),
        "ranker": classifier(folder / "ranker", 1),
        "multi-vector": multi_vector(folder / "multi-vector"),
        "sparse": sparse(folder / "sparse"),
    }


def folder_of(kind: str, folder: Path, translator_folder: Path) -> Path:
    """A folder of a kind of service."""
    if kind == "translator":
        return translator_folder
    if kind == "speech":
        from tests.audio import speech

        return speech.folder(folder)
    if kind == "ranker":
        return classifier(folder, num_labels=1)
    return {"generator": generator, "encoder": encoder, "multi-vector": multi_vector, "cross-encoder": classifier}[
        kind
    ](folder)
