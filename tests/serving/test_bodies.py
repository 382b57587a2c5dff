"""A wrong body has few errors, however long it is: making them would delay the requests of others."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest

from fastformer.serving.libretranslate import TranslateBody
from fastformer.serving.openai_bodies import ChatBody, CompletionBody, EmbeddingsBody
from fastformer.serving.tei import EmbedBody, PredictBody, RerankBody
from fastformer.serving.translate import Ask


@pytest.mark.parametrize("elements", [[None] * 1000, [1] * 1000 + [0.5], [[1] * 1000 + [None]], [["a"] * 3] * 1000])
@pytest.mark.parametrize(
    "kind, field",
    [
        (CompletionBody, "prompt"), (CompletionBody, "stop"), (ChatBody, "messages"), (EmbeddingsBody, "input"),
        (EmbedBody, "inputs"), (RerankBody, "texts"), (PredictBody, "inputs"), (Ask, "text"), (Ask, "prefix"),
        (TranslateBody, "q"),
    ],
)  # fmt: skip
def test_a_long_list_has_few_errors(kind: Any, field: str, elements: list[Any]) -> None:
    content = {"role": "user", "content": elements}
    for value in (elements, [content]) if field == "messages" else (elements,):
        with pytest.raises(pydantic.ValidationError) as found:
            kind.model_validate({field: value})
        assert len(found.value.errors()) < 10
