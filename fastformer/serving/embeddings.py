"""OpenAI's route for embeddings."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from fastformer.encoding.modules import Array
from fastformer.serving.answers import answer, until_gone
from fastformer.serving.encoder_service import EmbedService
from fastformer.serving.limits import Limits
from fastformer.serving.openai_bodies import Embeddings, EmbeddingsBody
from fastformer.serving.openai_errors import ERRORS, ApiError, check_model


def add_embeddings(found: APIRouter, service: EmbedService, limits: Limits) -> None:
    """Adds POST /v1/embeddings to a router."""

    @found.post("/v1/embeddings", response_model=None, responses={200: {"model": Embeddings}, **ERRORS})
    async def embeddings(body: EmbeddingsBody, http: Request) -> Response:
        """Returns the embeddings of texts."""
        check_model(body.model, service.name)
        texts = _texts(body.input)
        if len(texts) > limits.max_texts:
            raise ApiError(f"expected at most {limits.max_texts} texts, got {len(texts):,}", param="input")
        longest = max(map(len, texts))
        if longest > limits.max_text_chars:
            raise ApiError(
                f"expected texts of at most {limits.max_text_chars:,} characters, got one of {longest:,}",
                param="input",
                code="string_above_max_length",
            )
        width = service.encoder.get_embedding_dimension()
        if body.dimensions is not None and body.dimensions > width:
            raise ApiError(f"expected dimensions of at most {width}, got {body.dimensions:,}", param="dimensions")
        if body.prompt_name is not None and body.prompt_name not in service.encoder.prompts:
            names = [*service.encoder.prompts]
            raise ApiError(f"expected a prompt_name in {names}, got {body.prompt_name!r:.40}", param="prompt_name")
        try:
            work = service.embed(
                texts,
                prompt_name=body.prompt_name,
                truncate_dim=body.dimensions,
                cuts=body.truncate,
                timeout=body.timeout,
            )
            encoded = await until_gone(http, work)
        except ValueError as error:
            raise ApiError(str(error), param="input") from error
        is_packed = body.encoding_format == "base64"
        rows = [
            {"object": "embedding", "index": index, "embedding": _packed(row) if is_packed else row.tolist()}
            for index, row in enumerate(encoded.rows)
        ]
        usage = {"prompt_tokens": encoded.num_tokens, "total_tokens": encoded.num_tokens}
        return answer({"object": "list", "data": rows, "model": service.name, "usage": usage})


def _texts(given: str | list[Any]) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts[0], str):
        raise ApiError(
            "expected input to be a text or a list of texts, got ids of tokens, which clients make for other models; "
            "LangChain sends texts with check_embedding_ctx_length=False",
            param="input",
        )
    return texts


def _packed(row: Array) -> str:
    """Packs the numbers of an embedding as OpenAI does: the base64 of fp32 in little endian."""
    return base64.b64encode(np.ascontiguousarray(row, "<f4").tobytes()).decode("ascii")
