"""The routes of embeddings: OpenAI's POST /v1/embeddings, and Jina's /v1/multi-vector of a multi-vector encoder."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from fastformer.encoding.modules import Array, Stored, stored
from fastformer.serving.answers import answer
from fastformer.serving.encoder_service import EmbedService, MultiVectorService
from fastformer.serving.gate import until_gone
from fastformer.serving.limits import Limits
from fastformer.serving.openai_bodies import ERRORS, ApiError, Body, Int, Text, check_body, check_texts
from fastformer.serving.openai_bodies import error_response as error_response
from fastformer.serving.service import Service

# What `UNSUPPORTED` is for language models, for embeddings, scores and rankings.
UNSUPPORTED_OF_ENCODERS: Mapping[str, tuple[Any, ...]] = {
    "activation": (), "add_special_tokens": (True,), "dimensions": (), "documents": (), "embedding_type": ("float",),
    "embedding_types": (["float"],), "encoding_format": ("float",), "function_to_apply": (), "input_type": (),
    "instruction": (), "late_chunking": (False,), "max_chunks_per_doc": (), "max_tokens_per_doc": (), "normalize": (),
    "normalized": (), "output_dimension": (), "output_dtype": ("float",), "parameters": ({},), "prompt_name": (),
    "rank_fields": (["text"],), "return_multivector": (False,), "softmax": (), "task": (), "task_type": (),
    "top_k": (), "top_n": (), "truncate_prompt_tokens": (), "truncation": (), "use_activation": (),
}  # fmt: skip


class EmbeddingsBody(Body):
    """The body of a POST /v1/embeddings request; OpenAI has input, model, encoding_format and dimensions alone.

    Attributes:
        input: a text or several. Ids are refused: clients make them for another model's vocabulary.
        truncate: cut texts that are too long; without it they are an error.
        truncation: the same, as Voyage names it.
        output_dtype: the type of the numbers, as Voyage names it; int8 and uint8 need `Encoder.ranges`.
        embedding_type: the same of signs, and base64, as Jina names them.
    """

    unsupported = UNSUPPORTED_OF_ENCODERS

    input: (
        Text
        | Annotated[list[Text], Field(min_length=1, fail_fast=True)]
        | Annotated[list[Int], Field(min_length=1, fail_fast=True)]
        | Annotated[list[Annotated[list[Int], Field(fail_fast=True)]], Field(min_length=1, fail_fast=True)]
    )
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[Int, Field(ge=1)] | None = None
    prompt_name: str | None = None
    truncate: bool | None = None
    truncation: bool | None = None
    output_dtype: Literal["float", "int8", "uint8", "binary", "ubinary"] | None = None
    embedding_type: Literal["float", "base64", "binary", "ubinary"] | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None


class EmbeddingRow(BaseModel):
    """An embedding: numbers, or the base64 of their bytes, in little endian."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | list[int] | str


class EmbeddingsUsage(BaseModel):
    """The number of the texts' tokens."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(BaseModel):
    """The body of a POST /v1/embeddings response."""

    object: Literal["list"]
    data: list[EmbeddingRow]
    model: str
    usage: EmbeddingsUsage


class VectorsBody(Body):
    """The body of a POST /v1/multi-vector request; truncate and timeout aren't Jina's.

    Attributes:
        input: a text or several.
        input_type: whether they are queries or documents.
        embedding_type: numbers, or for each vector the base64 of fp32 in little endian.
        dimensions: the number of dimensions, which is the model's.
        truncate: cut texts that are too long; without it they are an error.
        timeout: seconds after which the request fails; at most the server's limit.
    """

    unsupported = {name: neutral for name, neutral in UNSUPPORTED_OF_ENCODERS.items() if name != "return_multivector"}

    input: Text | Annotated[list[Text], Field(min_length=1, fail_fast=True)]
    model: str | None = None
    input_type: Literal["query", "document"] | None = None
    embedding_type: Literal["float", "base64"] | None = None
    dimensions: Annotated[Int, Field(ge=1)] | None = None
    truncate: bool | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None


class VectorsOfText(BaseModel):
    """The vectors of a text's tokens: numbers, or base64."""

    object: Literal["embeddings"]
    index: int
    embeddings: list[list[float]] | list[str]


class TokenVectors(BaseModel):
    """The body of a POST /v1/multi-vector response."""

    object: Literal["list"]
    data: list[VectorsOfText]
    model: str
    usage: EmbeddingsUsage


def router(service: Service, limits: Limits) -> APIRouter:
    """Makes the routes of an encoder."""
    routes = APIRouter()
    if isinstance(service, EmbedService):
        _add_embeddings(routes, service, limits)
    if isinstance(service, MultiVectorService):
        _add_vectors(routes, service, limits)
    return routes


def _add_embeddings(routes: APIRouter, service: EmbedService, limits: Limits) -> None:
    @routes.post("/v1/embeddings", responses={200: {"model": Embeddings}, **ERRORS})
    async def embeddings(body: EmbeddingsBody, http: Request) -> Response:
        """Returns the embeddings of texts."""
        check_body(body, service.models)
        texts = _embedded_texts(body.input)
        check_texts(texts, limits, "input")
        width = service.encoder.get_embedding_dimension()
        if body.dimensions is not None and body.dimensions > width:
            raise ApiError(f"expected dimensions of at most {width}, got {body.dimensions:,}", param="dimensions")
        if body.prompt_name is not None and body.prompt_name not in (names := service.encoder.prompt_names):
            raise ApiError(f"expected a prompt_name in {names}, got {body.prompt_name!r:.40}", param="prompt_name")
        precision, is_packed = _precision(body, width, service.encoder.ranges)
        try:
            work = service.embed(
                texts,
                prompt_name=body.prompt_name,
                # An embedding that is cut is no longer of length 1.
                normalize=(body.dimensions is not None and service.encoder.normalizes) or None,
                truncate_dim=body.dimensions,
                cuts=bool(body.truncation if body.truncate is None else body.truncate),
                timeout=body.timeout,
            )
            encoded = await until_gone(http, work)
        except ValueError as error:
            raise ApiError(str(error), param="input") from error
        numbers = stored(encoded.rows, precision, service.encoder.ranges)
        rows = [
            {"object": "embedding", "index": index, "embedding": _packed(row) if is_packed else row.tolist()}
            for index, row in enumerate(numbers)
        ]
        usage = {"prompt_tokens": encoded.num_tokens, "total_tokens": encoded.num_tokens}
        return answer({"object": "list", "data": rows, "model": service.name, "usage": usage})


def _precision(body: EmbeddingsBody, width: int, ranges: Array | None) -> tuple[Stored, bool]:
    """Returns the type of the numbers that a request asks for, and whether it asks for base64.

    Args:
        body: the request.
        width: the number of dimensions of an embedding, unless the request names one.
        ranges: those of the encoder.
    """
    kind, other = body.output_dtype, body.embedding_type
    if other in ("binary", "ubinary") and kind not in (None, other):
        raise ApiError(f"expected output_dtype or embedding_type, got {kind} and {other}", param="embedding_type")
    named = kind or (other if other in ("binary", "ubinary") else None) or "float"
    if named in ("int8", "uint8"):
        if ranges is None:
            raise ApiError(
                f"expected an output_dtype of float, binary or ubinary, got {named}: the server has no ranges of the "
                "embeddings, as `fastformer serve --calibration` and Encoder.calibrate find them",
                param="output_dtype",
            )
        if (body.dimensions or width) != len(ranges[0]):
            raise ApiError(
                f"expected {len(ranges[0])} dimensions for an output_dtype of {named}, those of the server's ranges, "
                f"got {body.dimensions or width}",
                param="dimensions",
            )
    precision: Stored = "float32" if named == "float" else named
    return precision, "base64" in (body.encoding_format, other)


def _embedded_texts(given: str | list[Any]) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts[0], str):
        raise ApiError(
            "expected input to be a text or a list of texts, got ids of tokens, which clients make for other models; "
            "LangChain sends texts with check_embedding_ctx_length=False",
            param="input",
        )
    return texts


def _add_vectors(routes: APIRouter, service: MultiVectorService, limits: Limits) -> None:
    @routes.post("/v1/multi-vector", responses={200: {"model": TokenVectors}, **ERRORS})
    async def multi_vector(body: VectorsBody, http: Request) -> Response:
        """Returns a vector for each token of texts."""
        check_body(body, service.models)
        texts = [body.input] if isinstance(body.input, str) else body.input
        check_texts(texts, limits, "input")
        width = service.encoder.get_embedding_dimension()
        if body.dimensions not in (None, width):
            raise ApiError(
                f"expected dimensions {width}, those of the model, got {body.dimensions:,}", param="dimensions"
            )
        try:
            work = service.vectors(texts, body.input_type or "document", cuts=bool(body.truncate), timeout=body.timeout)
            encoded = await until_gone(http, work)
        except ValueError as error:
            raise ApiError(str(error), param="input") from error
        is_packed = body.embedding_type == "base64"
        data = [
            {
                "object": "embeddings",
                "index": index,
                "embeddings": [_packed(row) for row in rows] if is_packed else rows.tolist(),
            }
            for index, rows in enumerate(encoded.rows)
        ]
        usage = {"prompt_tokens": encoded.num_tokens, "total_tokens": encoded.num_tokens}
        return answer({"object": "list", "data": data, "model": service.name, "usage": usage})


def _packed(row: npt.NDArray[Any]) -> str:
    """Packs the numbers of an embedding as OpenAI does: the base64 of fp32 in little endian, or of whole bytes."""
    kind = "<f4" if row.dtype == np.float32 else row.dtype
    return base64.b64encode(np.ascontiguousarray(row, kind).tobytes()).decode("ascii")
