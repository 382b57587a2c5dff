"""`MultiVectorEncoder` has the vectors and scores of sentence-transformers for each form of a ColBERT's folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fastformer
from tests.checks import assert_accurate
from tests.encoding.folders import D_MODEL, MANY, MAX_LEN, SPECIAL, TEXTS, WORDS, bert, dense, modules, write

library = pytest.importorskip("sentence_transformers", reason="not installed: pip install sentence-transformers")
if not hasattr(library, "MultiVectorEncoder"):
    pytest.skip("the class is of its version 6", allow_module_level=True)

LENGTH = 12
MASKED: dict[str, Any] = {"strategy": "fixed", "length": LENGTH, "attend": False}
MARKERS = ["[unused0]", "[unused1]", "[Q] ", "[D] "]
SIZES: dict[str, Any] = {
    "vocab_size": len(SPECIAL + WORDS), "hidden_size": D_MODEL, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": MAX_LEN + 8, "pad_token_id": 0, "bos_token_id": 2,
    "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3,
}  # fmt: skip


def backbone(folder: Path, name: str = "BertModel", **settings: Any) -> None:
    """Writes a model of transformers and its tokenizer."""
    import transformers

    bert(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), model_max_length=MAX_LEN,
        **dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True)),
    ).save_pretrained(folder)  # fmt: skip
    if name == "BertModel":
        return
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**SIZES | settings))
    torch.manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 and key.endswith("weight") else 0.0, 0.3)
    model.save_pretrained(folder)


def saved(
    name: str = "BertModel", mask: dict[str, Any] | None = None, settings: dict[str, Any] | None = None, **options: Any
) -> Callable[[Path], None]:
    """Returns a function that writes a folder of sentence-transformers; `options` are those of its Transformer."""

    def make(folder: Path) -> None:
        from sentence_transformers.base.modules import Dense, Normalize, Transformer
        from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

        backbone(folder / "backbone", name, **settings or {})
        torch.manual_seed(1)
        behind = [
            Dense(D_MODEL, 16, bias=False, activation_function=None, module_input_name="token_embeddings"),
            MultiVectorMask(**mask or {"skiplist_words": [",", ".", "?"]}),
            Normalize(module_input_name="token_embeddings"),
        ]
        prompts = {"query": "query : ", "document": "answer : "}
        model = library.MultiVectorEncoder(
            modules=[Transformer(str(folder / "backbone"), **options), *behind], device="cpu", prompts=prompts
        )
        model.save_pretrained(str(folder))

    return make


def with_markers(folder: Path) -> None:
    """Writes a BERT, with the markers of queries and documents in its vocabulary."""
    bert(folder, vocab_size=len(SPECIAL + WORDS + MARKERS))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    first = len(SPECIAL + WORDS)
    tokenizer["model"]["vocab"] |= {token: first + place for place, token in enumerate(MARKERS[:2])}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False)
    tokenizer["added_tokens"] = [
        {"id": first + 2 + place, "content": token, "normalized": True, **flags}
        for place, token in enumerate(MARKERS[2:])
    ] + [{"id": place, "content": token, "normalized": False, **flags, "special": True}
         for place, token in enumerate(SPECIAL)]  # fmt: skip
    write(folder / "tokenizer.json", tokenizer)
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    write(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": MAX_LEN, **names},
    )


def pylate(**settings: Any) -> Callable[[Path], None]:
    """Returns a function that writes a folder as PyLate does."""

    def make(folder: Path) -> None:
        with_markers(folder)
        (place,) = modules(folder, ("Dense", {}))
        dense(place, D_MODEL, 16, "torch.nn.modules.linear.Identity")
        listed = json.loads((folder / "modules.json").read_text())
        listed[1]["type"] = "pylate.models.Dense.Dense"
        write(folder / "modules.json", listed)
        write(folder / "sentence_bert_config.json", {"max_seq_length": MAX_LEN - 1, "do_lower_case": False})
        usual = {"model_type": "ColBERT", "query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": LENGTH,
                 "document_length": MAX_LEN - 4, "attend_to_expansion_tokens": False,
                 "skiplist_words": [",", "."], "similarity_fn_name": "MaxSim", "prompts": {}}  # fmt: skip
        write(folder / "config_sentence_transformers.json", usual | settings)

    return make


def stanford(**settings: Any) -> Callable[[Path], None]:
    """Returns a function that writes a folder as Stanford's ColBERT does."""

    def make(folder: Path) -> None:
        with_markers(folder)
        config = json.loads((folder / "config.json").read_text())
        write(folder / "config.json", config | {"architectures": ["HF_ColBERT"]})
        state = {f"bert.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
        state["linear.weight"] = torch.randn(16, D_MODEL, generator=torch.Generator().manual_seed(3)) * D_MODEL**-0.5
        (folder / "model.safetensors").unlink()
        save_file(state, folder / "model.safetensors", {"format": "pt"})
        usual = {"query_token_id": "[unused0]", "doc_token_id": "[unused1]", "query_maxlen": LENGTH}
        write(folder / "artifact.metadata", usual | settings)

    return make


FOLDERS: dict[str, Callable[[Path], None]] = {
    "masked expansions": saved(query_expansion=MASKED),
    "expansions of at least a length": saved(
        query_expansion={**MASKED, "strategy": "min", "token": "[SEP]"}, document_length=9
    ),
    "attended expansions": saved(
        query_expansion={**MASKED, "attend": True},
        mask={"skiplist_words": [",", "birds"], "skiplist_tasks": ["query", "document"]},
    ),
    "expansions beyond the most tokens": saved(query_expansion={**MASKED, "strategy": "min"}, max_seq_length=8),
    "chosen tokens, no expansions": saved(mask={"keep_only_token_ids": [5, 6, 7, 8]}, query_length=6),
    "ModernBERT": saved("ModernBertModel", settings={"local_attention": 32}, query_expansion=MASKED),
    "MPNet": saved("MPNetModel", settings={"pad_token_id": 1}, query_expansion=MASKED),
    "RoBERTa": saved("RobertaModel", query_expansion=MASKED),
    "PyLate": pylate(),
    "PyLate without expansions": pylate(do_query_expansion=False, prompts={"query": "[Q] the ", "document": ""}),
    "PyLate with usual punctuation": pylate(skiplist_words=None, attend_to_expansion_tokens=True),
    "Stanford's ColBERT": stanford(),
    "Stanford's ColBERT with punctuation": stanford(mask_punctuation=False, doc_maxlen=10, attend_to_mask_tokens=True),
}


def texts_of(encoder: Any) -> list[str]:
    # MPNet's PAD is [UNK] here, whose positions transformers doesn't count.
    return [text for text in MANY if 1 not in encoder.tokenize([text])["input_ids"]]


@pytest.mark.parametrize("kind", FOLDERS)
def test_vectors_and_scores_equal_those_of_sentence_transformers(kind: str, tmp_path: Path) -> None:
    FOLDERS[kind](tmp_path)
    encoder = fastformer.MultiVectorEncoder(tmp_path)
    plain = library.MultiVectorEncoder(str(tmp_path), device="cpu")
    exact = library.MultiVectorEncoder(str(tmp_path), device="cpu").double()
    texts = texts_of(encoder)
    ours, theirs, wide = (
        [each for task in ("encode_query", "encode_document", "encode") for each in getattr(model, task)(texts)]
        for model in (encoder, plain, exact)
    )
    assert [each.shape for each in ours] == [each.shape for each in theirs]
    assert all(each.dtype == torch.float32 for each in ours)
    assert_accurate(*(torch.cat(each) for each in (ours, theirs, wide)))  # of few numbers, an error is luck
    queries, documents = encoder.encode_query(texts[:9]), encoder.encode_document(texts)
    scores, due = encoder.similarity(queries, documents), plain.similarity(queries, documents)
    torch.testing.assert_close(scores, due)
    torch.testing.assert_close(
        encoder.similarity_pairwise(queries, documents[:9]), plain.similarity_pairwise(queries, documents[:9])
    )
    ranking = encoder.rank(texts[1], texts, top_k=5, return_documents=True)
    assert [each["corpus_id"] for each in ranking] == sorted(range(len(texts)), key=lambda i: -float(scores[1][i]))[:5]
    assert [each["text"] for each in ranking] == [texts[each["corpus_id"]] for each in ranking]
    assert encoder.get_embedding_dimension() == plain.get_embedding_dimension() == 16


@pytest.fixture(scope="module")
def colbert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("colbert")
    FOLDERS["PyLate"](folder)
    return folder


def test_a_text_has_the_same_bits_in_any_batch_and_form(colbert: Path) -> None:
    encoder = fastformer.MultiVectorEncoder.from_pretrained(colbert)
    whole = encoder.encode_query(TEXTS)
    for options in ({"batch_tokens": 1}, {"batch_size": 2}, {"convert_to_numpy": True}):
        for one, other in zip(encoder.encode_query(TEXTS, **options), whole, strict=True):
            np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(encoder.encode_query(TEXTS[3]), whole[3])
    np.testing.assert_array_equal(encoder.encode(TEXTS, "query", task="query")[3], whole[3])
    assert encoder.encode_document([]) == [] and isinstance(encoder.encode(TEXTS[0]), Tensor)
    int8 = fastformer.MultiVectorEncoder(colbert, precision="int8").encode_query(TEXTS)
    assert 0.9 < float((torch.cat(int8) * torch.cat(whole)).sum(1).mean()) < 1
    mean = fastformer.MultiVectorEncoder(colbert, similarity_fn_name="meanmaxsim")
    torch.testing.assert_close(mean.similarity(whole, whole) * LENGTH, encoder.similarity(whole, whole))
    nothing = torch.zeros(0, 16)
    assert float(encoder.similarity(whole[0], [nothing])) < -1e8 and float(encoder.similarity([nothing], whole[0])) == 0


def test_a_marker_in_a_text_is_no_marker(tmp_path: Path) -> None:
    FOLDERS["Stanford's ColBERT"](tmp_path)
    encoder = fastformer.MultiVectorEncoder(tmp_path)
    marker = len(SPECIAL + WORDS)
    (ids,) = encoder._read(["a [unused0] bird"], encoder.prompts["query"], "query").ids
    assert ids.count(marker) == 1 and ids[1] == marker


@pytest.mark.parametrize(
    ("file", "values", "named"),
    [
        ("config_sentence_transformers.json", {"query_prefix": 5}, "query_prefix"),
        ("config_sentence_transformers.json", {"query_length": "8"}, "length"),
        ("sentence_bert_config.json", {"query_expansion": {"strategy": "most", "length": 8}}, "strategy"),
        ("sentence_bert_config.json", {"query_expansion": {**MASKED, "token": "[NONE]"}}, r"\[NONE\]"),
        ("config_sentence_transformers.json", {"skiplist_words": "a"}, "skiplist_words"),
    ],
)
def test_damaged_settings_are_named(colbert: Path, tmp_path: Path, file: str, values: Any, named: str) -> None:
    FOLDERS["PyLate"](tmp_path)
    write(tmp_path / file, json.loads((tmp_path / file).read_text()) | values)
    with pytest.raises(ValueError, match=named):
        fastformer.MultiVectorEncoder(tmp_path)


def test_folders_of_the_other_kind_name_their_class(colbert: Path, plain: tuple[Path, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="MultiVectorEncoder"):
        fastformer.Encoder(colbert)
    with pytest.raises(ValueError, match="fastformer.Encoder"):
        fastformer.MultiVectorEncoder(plain[0])
    saved("ModernBertModel", settings={"local_attention": 4}, query_expansion=MASKED)(tmp_path)
    encoder = fastformer.MultiVectorEncoder(tmp_path)
    with pytest.raises(ValueError, match="window"):
        encoder.encode_query(["a"])
    with pytest.raises(ValueError, match="task"):
        encoder.encode(["a"], task="passage")
