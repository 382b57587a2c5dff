"""SPLADE's weights equal those of transformers' masked language models, whatever the batch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fastformer
from fastformer.files import read_json
from tests.checkpoints.present import ENCODERS
from tests.checks import assert_accurate
from tests.encoding.folders import MANY, SPECIAL, WORDS, bert, ids_of, masked, modules, write


def expected_of(model: Any, folder: Path, texts: list[str], sums: bool, twice: bool) -> list[Tensor]:
    """Returns transformers' weights in fp32 and in fp64."""
    return [expected(model, folder, texts, dtype, sums, twice) for dtype in (torch.float32, torch.float64)]


def expected(model: Any, folder: Path, texts: list[str], dtype: torch.dtype, sums: bool, twice: bool) -> Tensor:
    model = copy.deepcopy(model).to(dtype)
    rows = []
    with torch.inference_mode():
        for inputs in ids_of(folder, texts):
            inputs.pop("token_type_ids")
            weights = model(**inputs).logits[0].relu().log1p()
            weights = weights.log1p() if twice else weights
            rows.append(weights.sum(0) if sums else weights.amax(0))
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Bert", {"hidden_act": "gelu_new"}),
        ("Bert", {"tie_word_embeddings": False}),
        ("DistilBert", {"activation": "relu"}),
        ("Roberta", {"layer_norm_eps": 0.01}),
        ("MPNet", {"pad_token_id": 1}),
        ("ModernBert", {"local_attention": 8, **dict.fromkeys(("norm_bias", "mlp_bias", "classifier_bias"), True)}),
        ("Electra", {"embedding_size": 16}),
        ("Gte", {"layer_norm_eps": 0.01}),
        ("EuroBert", {"num_key_value_heads": 2, "mask_token_id": 4, "mlp_bias": True}),
        ("EuroBert", {"num_key_value_heads": 1, "mask_token_id": 4, "tie_word_embeddings": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_weights_equal_those_of_transformers(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    if name == "Gte" and "gte" not in ENCODERS:
        pytest.skip("a later version of transformers has it")
    sums, twice = name == "DistilBert", name == "ModernBert"
    pooling = {"pooling_strategy": "sum" if sums else "max", "activation_function": "log1p_relu" if twice else "relu"}
    model = masked(tmp_path, name, pooling, **settings)
    encoder = fastformer.Encoder(tmp_path)
    # MPNet's PAD is [UNK] here, whose positions transformers doesn't count.
    texts = [text for text in MANY if 1 not in encoder.tokenize([text])["input_ids"]]
    assert encoder.pooling == "splade" and encoder.get_embedding_dimension() == len(SPECIAL + WORDS)
    rows = encoder.encode(texts)
    results = [(torch.from_numpy(rows), *expected_of(model, tmp_path, texts, sums, twice))]
    for seed in (1, 2, 3):  # plain PyTorch may be lucky once or twice
        folder = tmp_path / str(seed)
        another = masked(folder, name, pooling, seed=seed, **settings)
        ours = torch.from_numpy(fastformer.Encoder(folder).encode(texts))
        results.append((ours, *expected_of(another, folder, texts, sums, twice)))
    assert_accurate(*map(torch.cat, zip(*results, strict=True)))
    sparse = encoder.encode_sparse(texts)
    for row, (indices, values) in zip(rows, sparse, strict=True):
        assert (np.diff(indices) > 0).all() and (values > 0).all() and indices.dtype == np.int32
        again = np.zeros_like(row)
        again[indices] = values
        np.testing.assert_array_equal(again, row)
    alone = encoder.encode_sparse(texts[3])
    np.testing.assert_array_equal(alone.values, sparse[3].values)
    few = encoder.encode_sparse(texts[3], max_active_dims=3)
    assert sorted(few.values) == sorted(alone.values)[-3:]


def test_an_int8_model_is_near_and_prompts_count(tmp_path: Path) -> None:
    masked(tmp_path, "Bert", {"pooling_strategy": "max"})
    write(tmp_path / "config_sentence_transformers.json", {"prompts": {"query": "query : "}})
    fp32, int8 = fastformer.Encoder(tmp_path), fastformer.Encoder(tmp_path, precision="int8")
    one, other = fp32.encode(MANY), int8.encode(MANY)
    assert 0.98 < (one * other).sum() / np.linalg.norm(one) / np.linalg.norm(other) < 1
    prompted = fp32.encode_sparse("a bird", "query")
    np.testing.assert_array_equal(prompted.values, fp32.encode_sparse("query : a bird").values)


def test_what_is_no_splade_is_refused(tmp_path: Path, plain: tuple[Path, Any]) -> None:
    with pytest.raises(ValueError, match="SpladePooling"):
        fastformer.Encoder(plain[0]).encode_sparse(["a"])
    masked(tmp_path / "strategy", "Bert", {"pooling_strategy": "min"})
    with pytest.raises(ValueError, match="pooling_strategy"):
        fastformer.Encoder(tmp_path / "strategy")
    bert(tmp_path / "headless")
    modules(tmp_path / "headless", ("SpladePooling", {"pooling_strategy": "max"}))
    with pytest.raises(ValueError, match="without its head"):
        fastformer.Encoder(tmp_path / "headless")
    # The head of a EuroBERT is not the embedding, unless its settings say so.
    masked(tmp_path / "one", "EuroBert", {"pooling_strategy": "max"}, mask_token_id=4)
    state, settings = load_file(tmp_path / "one/model.safetensors"), read_json(tmp_path / "one/config.json")
    write(tmp_path / "one/config.json", {key: settings[key] for key in settings if not key.startswith("tie")})
    words = fastformer.Encoder(tmp_path / "one").encode("a bird")
    save_file({**state, "lm_head.weight": -state["lm_head.weight"]}, tmp_path / "one/model.safetensors")
    assert not np.array_equal(fastformer.Encoder(tmp_path / "one").encode("a bird"), words)
    del state["lm_head.weight"]
    save_file(state, tmp_path / "one/model.safetensors")
    with pytest.raises(ValueError, match="without its head"):
        fastformer.Encoder(tmp_path / "one")
    model = fastformer.Encoder(masked_folder(tmp_path))
    with pytest.raises(ValueError, match="max_active_dims"):
        model.encode_sparse("a", max_active_dims=0)


def masked_folder(tmp_path: Path) -> Path:
    masked(tmp_path / "whole", "Bert", {"pooling_strategy": "max"})
    return tmp_path / "whole"
