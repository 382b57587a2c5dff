"""The examples of libraries that hold a SentenceTransformer run, in C++, with the vectors of the plain model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastformer
from tests.encoding.folders import D_MODEL, bert, modules

library = pytest.importorskip("sentence_transformers", reason="not installed: pip install sentence-transformers")

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "embedding-libraries.md"
TEXTS = ["A bird sings.", "The river is slow."]
PACKAGES = {
    "LangChain": "langchain_huggingface",
    "LlamaIndex": "llama_index.embeddings.huggingface",
    "Haystack": "haystack_integrations.components.embedders.sentence_transformers",
    "BERTopic": "bertopic",
}


def blocks() -> dict[str, str]:
    """Returns the block of each section."""
    found = re.findall(r"## (\w+)\n\n```.*?\n\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return dict(found)


def test_each_library_has_an_example() -> None:
    assert blocks().keys() == PACKAGES.keys()
    assert all(PACKAGES[name] in text for name, text in blocks().items())


@pytest.mark.slow  # for the packages, of which BERTopic compiles code when it is first imported
@pytest.mark.parametrize("name", PACKAGES)
def test_an_example_runs_on_the_engine(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(PACKAGES[name], reason=f"not installed: pip install {PACKAGES[name].partition('.')[0]}")
    monkeypatch.chdir(tmp_path)
    bert(tmp_path / "all-MiniLM-L6-v2")
    modules(tmp_path / "all-MiniLM-L6-v2", ("Pooling", {"embedding_dimension": D_MODEL, "pooling_mode": "mean"}))
    accelerated: list[Any] = []
    original = fastformer.accelerate

    def accelerate(model: Any) -> Any:
        accelerated.append(model)
        return original(model)

    monkeypatch.setattr(fastformer, "accelerate", accelerate)
    names: dict[str, Any] = {}
    exec(compile(blocks()[name], str(PAGE), "exec"), names)
    (model,) = accelerated
    assert isinstance(model, library.SentenceTransformer)
    assert "on the C++ engine" in str(fastformer.report(model))
    plain = library.SentenceTransformer("all-MiniLM-L6-v2", device="cpu").encode(TEXTS)
    if name == "BERTopic":  # which embeds by this in `fit`
        backend = pytest.importorskip("bertopic.backend._utils").select_backend(names["topics"].embedding_model)
        names["vectors"] = backend.embed_documents(TEXTS)
    rows = np.array(names["vectors"], np.float32)
    lengths = np.linalg.norm(plain, axis=1, keepdims=True)
    # LlamaIndex normalises.
    assert any(np.allclose(rows, due, atol=1e-5) for due in (plain, plain / lengths))
