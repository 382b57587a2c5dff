"""The routes of Cohere's and Jina's rerankers, which vLLM has too: POST /v1/rerank and /v2/rerank.

Of a multi-vector encoder also /rerank, as vLLM has it.
"""

from __future__ import annotations

import uuid
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from fastformer.serving.answers import answer
from fastformer.serving.embeddings import UNSUPPORTED_OF_ENCODERS, EmbeddingsUsage
from fastformer.serving.encoder_service import MultiVectorService, RankService
from fastformer.serving.gate import until_gone
from fastformer.serving.limits import Limits
from fastformer.serving.openai_bodies import (
    ERRORS,
    ApiError,
    Body,
    Int,
    Text,
    check_body,
    check_length,
    check_texts,
)
from fastformer.serving.openai_bodies import error_response as error_response
from fastformer.serving.service import Service


class Document(Body):
    """A text to rank."""

    text: str


class DocumentsBody(Body):
    """The body of a request; a document that is too long is cut at its end, as Cohere and Jina do.

    Attributes:
        documents: texts, or objects with a text.
        top_n: the number of the best documents to return; None: all.
        return_documents: return each document with its score; None: yes.
        timeout: seconds after which the request fails; at most the server's limit.
    """

    unsupported = {**UNSUPPORTED_OF_ENCODERS, "truncation": (True,)}  # as Voyage says that long texts are cut

    model: str | None = None
    query: Text
    documents: Annotated[list[str | Document], Field(min_length=1, fail_fast=True)]
    top_n: Annotated[Int, Field(ge=1)] | None = None
    return_documents: bool | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None


class Ranked(BaseModel):
    """A document's index in the request, and its score: from 0 to 1, or of a multi-vector encoder MaxSim's."""

    index: int
    relevance_score: float
    document: Document | None = None


class Ranking(BaseModel):
    """The body of a response: the best documents first."""

    id: str
    object: str
    model: str
    results: list[Ranked]
    usage: EmbeddingsUsage


def router(service: Service, limits: Limits) -> APIRouter:
    """Makes the routes of a cross-encoder, or of a multi-vector encoder."""
    routes = APIRouter()
    assert isinstance(service, RankService | MultiVectorService)

    async def rerank(body: DocumentsBody, http: Request) -> Response:
        """Ranks documents by how well they answer a query, the best first."""
        return answer(await ranking(body, http, service, limits))

    responses: dict[int | str, dict[str, Any]] = {200: {"model": Ranking}, **ERRORS}
    for path in ("/v1/rerank", "/v2/rerank", *(["/rerank"] if isinstance(service, MultiVectorService) else [])):
        routes.add_api_route(path, rerank, methods=["POST"], responses=responses)
    return routes


async def ranking(
    body: DocumentsBody, http: Request, service: RankService | MultiVectorService, limits: Limits
) -> dict[str, Any]:
    """Returns the JSON value of the answer to a request.

    Raises:
        ApiError: the request is wrong, or the model has several labels.
        ClientGone: see `until_gone`.
    """
    check_body(body, service.models)
    if isinstance(service, RankService) and service.encoder.num_labels != 1:
        raise ApiError(f"expected a model of one label to rank with, got {service.encoder.num_labels}")
    texts = [one if isinstance(one, str) else one.text for one in body.documents]
    check_length(body.query, limits, "query")
    check_texts(texts, limits, "documents")
    try:
        encoded = await until_gone(http, service.rank(body.query, texts, timeout=body.timeout))
    except ValueError as error:
        raise ApiError(str(error), param="documents") from error
    scores = encoded.rows.tolist()
    order = sorted(range(len(scores)), key=lambda place: -scores[place])[: body.top_n]
    results: list[dict[str, Any]] = [{"index": place, "relevance_score": scores[place]} for place in order]
    for result in results if body.return_documents is not False else ():
        result["document"] = {"text": texts[result["index"]]}
    usage = {"prompt_tokens": encoded.num_tokens, "total_tokens": encoded.num_tokens}
    return {
        "id": "rerank-" + uuid.uuid4().hex,
        "object": "list",
        "model": service.name,
        "results": results,
        "usage": usage,
    }
